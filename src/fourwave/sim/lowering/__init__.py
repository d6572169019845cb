"""Lowers one kernel of a FlyDSL (or Triton) module, in the `llvm` and `rocdl` dialects, to a lane program.

Every value becomes dword registers. Vectors of 8- and 16-bit elements stay packed as in the machine, so a bitcast, a shuffle of dwords, an
insertvalue or a truncation costs nothing.
"""

from . import (
    arith,
    asm,
    atomics,
    control,
    convert,
    dot,
    gfx1250,
    intrinsics,
    lanes,
    matrix,
    memory,
    order,
    private,
    reduce,
    vectors,
)
from .base import (
    HANDLERS,
    LDS_BANKS,
    WAVE_SIZE,
    UnknownOperation,
    describe_frames,
    find_frames,
    float_bits,
    lower_kernel,
    plain,
    prepare_kernel,
)

__all__ = [
    "HANDLERS",
    "LDS_BANKS",
    "WAVE_SIZE",
    "UnknownOperation",
    "describe_frames",
    "find_frames",
    "float_bits",
    "lower_kernel",
    "plain",
    "prepare_kernel",
]
