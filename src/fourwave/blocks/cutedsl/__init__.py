"""Device parts shared by the CuTe DSL kernels for Hopper (sm_90a).

  loaders.py    an operand's shared-memory tiles and the TMA copies that fill them
  mma.py        wgmma over the tiles of one warpgroup
  epilogue.py   alpha, bias, activation, conversion, and the way back through shared memory and TMA
  schedule.py   which cluster computes which output tile

All but ring_order.py import CuTe DSL, so only backends.guard's users may import them.
"""
