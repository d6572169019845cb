"""What the gfx1250 GEMM kernel takes, and its place in LDS. Imports no FlyDSL.

gfx1250.py describes the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourwave.ops.gemm.config import MAX_EXTENT, GemmConfig
from fourwave.ops.gemm.problem import PACKED_E2M1

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

ARCH = "gfx1250"
LDS_LIMIT = 320 * 1024
CONFIG = GemmConfig(256, 256, 128, num_stages=3, waves_m=2, waves_n=2, mma="16x16x128")
FEATURES = frozenset({"scaling:1x32x1x32", "batch_invariant"})
ACTIVATIONS = (None, "relu", "silu", "gelu_tanh", "gelu")
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)

# LDS, in bytes. Rows of a tile are 64 bytes of codes and a gap of 16, so that 16 lanes reading a chunk of as many rows, or
# writing a result, use each bank equally often; rows of scales 32 bytes, of 8 tiles of K, and a gap of 4.
TILES_PER_PAGE = 8  # tiles of K whose scales come together
CODE_BYTES, CODE_GAP = 64, 16
SCALE_BYTES, SCALE_GAP = 4 * TILES_PER_PAGE, 4
NUM_PAGES = 2
ROWS = CONFIG.tile_m + CONFIG.tile_n
STAGE = ROWS * (CODE_BYTES + CODE_GAP)  # a's rows, then b's
PAGE = ROWS * (SCALE_BYTES + SCALE_GAP)
LDS = CONFIG.num_stages * STAGE + NUM_PAGES * PAGE


def why_unsupported(problem: GemmProblem, config: GemmConfig | None) -> str | None:
    """Why the kernel cannot do this problem with this configuration (None: the default), or None."""
    if config is not None and config != CONFIG:
        return f"config {config}: the {ARCH} kernel has one, {CONFIG}"
    for name, dtype, scaling in (("a", problem.a_dtype, problem.a_scaling), ("b", problem.b_dtype, problem.b_scaling)):
        if dtype != PACKED_E2M1 or scaling != "1x32":
            return f"{name} is {dtype} with scales {scaling!r}: the {ARCH} kernel takes MXFP4, packed e2m1 (uint8) with '1x32'"
    if (reason := problem.why_refused(FEATURES)) is not None:
        return reason
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r}: the {ARCH} kernel has {', '.join(a for a in ACTIVATIONS if a)}"
    if problem.out_dtype not in OUTPUTS:
        return f"out is {problem.out_dtype}: the kernel writes float32, bfloat16 and float16"
    if problem.bias_dtype is not None and problem.bias_dtype not in OUTPUTS:
        return f"bias is {problem.bias_dtype}: the kernel reads float32, bfloat16 and float16"
    # The stored rows' length, in which two codes share a byte.
    packed = {"TN": ("K", "K"), "NN": ("K", "N"), "NT": ("M", "N")}[problem.layout]
    for operand, name in zip("ab", packed, strict=True):
        if getattr(problem, name) % 2:
            return f"{name}={getattr(problem, name)}: rows of {operand} are packed, two codes in a byte; {name} is even"
    for name in ("M", "N", "K"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: sizes are 32-bit in the kernel, at most {MAX_EXTENT}"
    tiles = -(-problem.M // CONFIG.tile_m) * -(-problem.N // CONFIG.tile_n)
    if tiles >= 2**31:
        return "2**31 tiles or more"
    return None


def default_config(problem: GemmProblem) -> tuple[GemmConfig, list[str]]:
    """The configuration and the reasons in words."""
    return CONFIG, [
        f"the {ARCH} kernel has one tile, {CONFIG.tile_m}x{CONFIG.tile_n}x{CONFIG.tile_k}",
        f"{CONFIG.num_stages} stages of codes and {NUM_PAGES} pages of scales: {LDS} of {LDS_LIMIT} bytes of LDS, whatever K is",
    ]
