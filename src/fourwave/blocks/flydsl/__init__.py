"""Device parts shared by the FlyDSL kernels for CDNA GPUs.

  tiles.py      host side: LDS images of operand tiles, swizzles, bank model (imports nothing but the standard library)
  memory.py     buffer and LDS accesses, waits, barrier
  loaders.py    global memory to LDS, LDS to fragments; scales of blocks
  dequantize.py 8-bit codes times their scales, as bfloat16
  mma.py        number formats, the matrix instructions that take them, the accumulator block of a wave
  epilogue.py   alpha, bias, activation, addend, conversion and store
  schedule.py   which workgroup computes which output tile

tiles.py may be imported without FlyDSL; the others may not.
"""
