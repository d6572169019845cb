"""What the gfx1250 GEMM kernel takes, and its place in LDS. Imports no FlyDSL.

gfx1250.py describes the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fourwave.blocks.flydsl.wmma_tiles import TILE_K, Side, code_pitch
from fourwave.ops.gemm.config import MAX_EXTENT, GemmConfig, too_many_workgroups
from fourwave.ops.gemm.problem import PACKED_E2M1, SWIGLU

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

ARCH = "gfx1250"
LDS_LIMIT = 320 * 1024
MMA = {4: "16x16x128", 8: "16x16x128", 16: "16x16x32"}  # by the wider operand's bits
STAGES = 3
THREADS = 4 * 32  # of a workgroup

# tile_m, tile_n, waves_m, waves_n. Each wave holds its share of the results in registers for all of K. Few rows: one tile for
# all, so that b is read once, and each wave multiplies all rows with columns of its own, so that no two read the same b.
_LARGE = (256, 256, 2, 2)
_FEW = ((64, 256, 1, 4), (32, 256, 1, 4))
# By the bits of a and b. Two operands of 8 bits, or one of 16, leave no registers for 256 x 256.
_TILES = {
    (4, 4): (_LARGE, *_FEW),
    (8, 4): (_LARGE, *_FEW),
    (4, 8): (_LARGE, *_FEW),
    (8, 8): ((128, 256, 2, 2), *_FEW),
    (16, 4): ((128, 256, 1, 4), *_FEW),
}


def _config(tile: tuple[int, int, int, int], bits: int) -> GemmConfig:
    return GemmConfig(
        tile[0], tile[1], TILE_K, num_stages=STAGES, waves_m=tile[2], waves_n=tile[3], mma=MMA[bits]
    )  # fmt: skip


CONFIG = _config(_LARGE, 4)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = {PACKED_E2M1: 4, **dict.fromkeys(FLOAT8, 8), torch.bfloat16: 16}
FEATURES = frozenset(
    {
        "scaling:1x32x1x32",
        "scaling:Nonex1x32",
        "batch_invariant",
        "preactivation",
        "bias_grad",
        "out:tensor",
        "out:1x32",
        SWIGLU,
    }
)
ACTIVATIONS = (None, "relu", "silu", "gelu_tanh", "gelu", SWIGLU)
OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)

NUM_PAGES = 2
# LDS of the epilogue, in bytes: behind each row of a wave's results; at LDS's end a float32 bias or sum for each column or row of each wave.
ROW_GAP = 16
LINE_BYTES = 128 * 4


@dataclass(frozen=True)
class Geometry:
    """Every size that is fixed when the kernel is compiled."""

    config: GemmConfig
    a: Side
    b: Side
    accumulate: bool
    out_bytes: int
    preactivation_bytes: int
    out_scaling: str | None
    out_direction: str

    @property
    def stage(self) -> int:
        """Bytes of LDS: a's codes, then b's."""
        return self.a.code_bytes + self.b.code_bytes

    @property
    def page(self) -> int:
        return self.a.scale_bytes + self.b.scale_bytes

    @property
    def first_page(self) -> int:
        return STAGES * self.stage

    @property
    def lds(self) -> int:
        """Bytes of LDS of a workgroup, whatever K is."""
        return max(self.first_page + NUM_PAGES * self.page, self.epilogue_lds(self.least_rows))

    @property
    def least_rows(self) -> int:
        """Of each wave in a pass of the epilogue: whole blocks where columns are quantized."""
        return 32 if self.out_scaling == "1x32" and self.out_direction != "rowwise" else 16

    def quantized_lds(self, rows: int) -> int:
        """Bytes of LDS that codes and scales of a wave's pass take (LdsCodes)."""
        columns = self.b.wave_rows // self.parts
        codes = rows * code_pitch(columns)
        if self.out_scaling != "1x32":
            return codes if self.out_scaling else 0
        rowwise = codes + rows * (columns // 32) if self.out_direction != "columnwise" else 0
        return rowwise + (codes + rows // 32 * columns if self.out_direction != "rowwise" else 0)

    @property
    def waves(self) -> int:
        return self.config.waves_m * self.config.waves_n

    def pitch(self, size: int) -> int:
        """Bytes of a row of a wave's results in the epilogue, elements of `size` bytes."""
        return self.b.wave_rows * size + ROW_GAP

    @property
    def parts(self) -> int:
        """Of the product, that are one row of out: two halves, or itself."""
        return 2 if self.b.halves else 1

    @property
    def out_pitch(self) -> int:
        """Bytes of a row of out."""
        return self.b.wave_rows // self.parts * self.out_bytes + ROW_GAP

    def epilogue_lds(self, rows: int) -> int:
        """rows: of each wave, that it finishes in a pass."""
        saved = self.pitch(self.preactivation_bytes) if self.preactivation_bytes else 0
        each = rows * (self.pitch(4) + self.out_pitch * self.accumulate + saved) + self.quantized_lds(rows)
        return self.waves * (each + LINE_BYTES)

    @property
    def pass_rows(self) -> int:
        """Rows of each wave in a pass of the epilogue, at most half of what it has: a wave's store is under way while it
        converts what follows."""
        rows = max(self.least_rows, min(64, self.a.wave_rows // 2))
        while self.epilogue_lds(rows) > self.lds:
            rows //= 2
        return rows


def geometry(problem: GemmProblem, config: GemmConfig) -> Geometry:
    a = Side(
        config.tile_m, config.waves_m, _BITS[problem.a_dtype], problem.layout == "NT", problem.a_scaling is not None
    )
    b = Side(
        config.tile_n,
        config.waves_n,
        _BITS[problem.b_dtype],
        problem.layout != "TN",
        problem.b_scaling is not None,
        problem.activation == SWIGLU,
    )
    saved = 0 if problem.preactivation_dtype is None else problem.preactivation_dtype.itemsize
    out = problem.out_dtype.itemsize
    return Geometry(config, a, b, problem.accumulate, out, saved, problem.out_scaling, problem.out_direction)


def candidates(problem: GemmProblem) -> list[GemmConfig]:
    """The configurations for a problem's operands, which the kernel can multiply."""
    bits = _BITS[problem.a_dtype], _BITS[problem.b_dtype]
    return [_config(tile, max(bits)) for tile in _TILES[bits]]


def why_unsupported(problem: GemmProblem, config: GemmConfig | None) -> str | None:
    """Why the kernel cannot do this problem with this configuration (None: the default), or None."""
    kinds = "MXFP4 (packed e2m1, uint8) and MXFP8 with scales '1x32', or a in bfloat16 and b in MXFP4"
    a, b = (problem.a_dtype, problem.a_scaling), (problem.b_dtype, problem.b_scaling)
    for name, (dtype, scaling) in (("a", a), ("b", b)):
        plain = name == "a" and (dtype, scaling) == (torch.bfloat16, None)
        if not plain and (dtype not in (PACKED_E2M1, *FLOAT8) or scaling != "1x32"):
            return f"{name} is {dtype} with scales {scaling!r}: the {ARCH} kernel takes {kinds}"
    if a[0] == torch.bfloat16 and b[0] != PACKED_E2M1:
        return f"a is {a[0]} and b is {b[0]}: the {ARCH} kernel takes {kinds}"
    if a[0] == torch.bfloat16 and problem.layout == "NT":
        return f"a is {a[0]} in layout NT: the {ARCH} kernel multiplies it with weights, in TN and NN"
    if (reason := problem.why_refused(FEATURES)) is not None:
        return reason
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r}: the {ARCH} kernel has {', '.join(a for a in ACTIVATIONS if a)}"
    if problem.out_scaling is not None and problem.out_dtype not in FLOAT8:
        return f"quantized out is {problem.out_dtype}: the {ARCH} kernel writes float8_e4m3fn and float8_e5m2"
    for name in ("out", "preactivation", "bias_grad", "bias")[problem.out_scaling is not None :]:
        if (dtype := getattr(problem, f"{name}_dtype")) is not None and dtype not in OUTPUTS:
            verb = "reads" if name == "bias" else "writes"
            return f"{name} is {dtype}: the kernel {verb} float32, bfloat16 and float16"
    if problem.bias_grad_dtype is not None and problem.layout != "NT":
        return f"bias_grad with layout {problem.layout}: the kernel sums the rows of op(a) where a is [K, M], NT"
    # The stored rows' length, in which two codes share a byte.
    packed = {"TN": ("K", "K"), "NN": ("K", "N"), "NT": ("M", "N")}[problem.layout]
    for operand, dtype, name in zip("ab", (problem.a_dtype, problem.b_dtype), packed, strict=True):
        if dtype == PACKED_E2M1 and getattr(problem, name) % 2:
            return f"{name}={getattr(problem, name)}: rows of {operand} are packed, two codes in a byte; {name} is even"
    if problem.activation == SWIGLU and problem.layout != "TN" and problem.b_dtype == PACKED_E2M1 and problem.N % 4:
        return f"swiglu with N={problem.N} in layout {problem.layout}: the halves of packed rows are whole bytes, N is a multiple of 4"
    for name in ("M", "N", "K"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: sizes are 32-bit in the kernel, at most {MAX_EXTENT}"
    known = candidates(problem)
    if config is not None and config not in known:
        return f"config {config}: the {ARCH} kernel has {'; '.join(map(str, known))} for these operands"
    config = config or default_config(problem)[0]
    tiles = -(-problem.M // config.tile_m) * -(-problem.N // config.tile_n)
    if (reason := too_many_workgroups(tiles, THREADS)) is not None:
        return f"tiles of {config.tile_m}x{config.tile_n}: {reason}"
    return None


def default_config(problem: GemmProblem) -> tuple[GemmConfig, list[str]]:
    """The configuration and the reasons in words: the tile of fewest rows that holds all of them, or the largest.

    Every tile adds along K in the same order, 128 k at a time, so that rows do not depend on their number (batch_invariant).
    """
    known = candidates(problem)
    chosen = known[0]
    reason = f"the {ARCH} kernel's largest tile for these operands, {chosen.tile_m}x{chosen.tile_n}"
    for config in known[1:]:
        if problem.M <= config.tile_m:
            chosen = config
            reason = f"{problem.M} rows: one tile of {chosen.tile_m}, which multiplies fewest rows that are not there"
    geo = geometry(problem, chosen)
    return chosen, [
        reason,
        f"{STAGES} stages of codes and {NUM_PAGES} pages of scales: {geo.lds} of {LDS_LIMIT} bytes of LDS, whatever K is",
    ]
