"""Tunables of the Hopper grouped kernels, the shared memory that they take, and the one rule for what the kernels support.

Imports neither CuTe DSL nor torch.cuda: the rule can be asked anywhere. Which tiles there are: sm90_tiles.py; which of them runs:
sm90_choice.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fourwave.ops.gemm.sm90_config import (
    BARRIER_BYTES,
    DTYPES,
    FOURS_SMS,
    FP8,
    MAX_EXTENT,
    NUM_SMS,
    OUTPUTS,
    SCALE_STEPS,
    SMEM_BYTES,
    SWIZZLE_BYTES,
)
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS, GroupedProblem

MAX_GROUPS = 1024  # what the table in shared memory has room for
TABLES = (128, MAX_GROUPS)
MAX_ACCUMULATORS = 192  # per thread, as in the dense kernel
RING_BYTES, SWIZZLE_ATOM = 8192, 1024
WAVE_ROWS = 128  # of the two consumer warpgroups of a "rows" tile
_PLAIN = (None, "tensor", "row")


@dataclass(frozen=True)
class HopperGroupedConfig:
    """tile_m, tile_n, tile_k: output tile of a CTA and its reduction step.

    schedule    "rows": a's rows ride wgmma's rows; tile_m is 128, or 256, which each consumer warpgroup takes in two halves;
                of wgrad, 128; tile_n a multiple of 16, or of 64 where b's columns are contiguous;
                "swapped": b's do. tile_m is then a multiple of 8 up to 128, tile_n one of 8 up to 128
    num_stages  shared-memory buffers per operand
    cluster_m   "rows": CTAs below each other, in a group, that load b's tiles for each other
    cluster_n   "rows": CTAs side by side that load a's tiles for each other
    band        "rows": tiles of a group side by side, along its rows, that are walked through together (L2 reuse)
    split       "swapped": CTAs of a cluster that share a tile's reduction
    ring        wgrad into float32: pieces of 64 rows x 32 columns of a tile that each of two warpgroups has room for in shared memory, on
                their way out; 0: they leave from registers
    addend      of those, what they are added to: "load", TMA brings it; "reduce", memory adds
    other_n     "rows": 0, or a tile_n that the kernel takes instead, where rounds of such tiles of the groups that there are take less
                time
    other_m     0, or a tile_m that the kernel takes instead, likewise; of "rows" 128
    turned      "rows", two CTAs that share b: those other tiles lie side by side, and they share a
    other_stages  num_stages of the other tiles
    narrow      "rows", FP8 with sums in float32, CTAs that do not share b; of the other tiles if there are such: those of no more than 64
                rows come last, and each consumer has half of their columns
    single      "swapped": one group, whose rows a tile has, and no more tiles than clusters: there is no table of groups, and the CTAs that
                share a tile send each other their sums
    late        "rows", tiles of 128 rows whose scales of blocks are of a multiple of four steps: one is stored while the next one's first products
                run; not of the other tiles
    overlap     the grid may be set up while the one before it on the stream ends (programmatic dependent launch)
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    schedule: str = "rows"
    num_stages: int = 5
    cluster_m: int = 1
    cluster_n: int = 1
    band: int = 16
    split: int = 1
    ring: int = 0
    addend: str = "load"
    other_n: int = 0
    other_m: int = 0
    turned: bool = False
    other_stages: int = 0
    narrow: bool = False
    single: bool = False
    late: bool = False
    overlap: bool = True

    def __str__(self) -> str:
        more = f"split {self.split}" if self.schedule == "swapped" else f"cluster {self.cluster_m}x{self.cluster_n}"
        if self.ring:
            more += f", ring of {self.ring}, {self.addend}"
        if self.turned:
            more += f"/{self.cluster_n}x{self.cluster_m}"
        if self.narrow:
            more += ", narrow"
        if self.late:
            more += ", late"
        tile_n = f"{self.tile_n}/{self.other_n}" if self.other_n else f"{self.tile_n}"
        tile_m = f"{self.tile_m}/{self.other_m}" if self.other_m else f"{self.tile_m}"
        return f"{tile_m}x{tile_n}x{self.tile_k} {self.schedule}, {self.num_stages} stages, {more}"

    @property
    def other(self) -> HopperGroupedConfig | None:
        """The tiles that the kernel may take instead."""
        if not (self.other_n or self.other_m or self.turned):
            return None
        cluster = (self.cluster_n, self.cluster_m) if self.turned else (self.cluster_m, self.cluster_n)
        return replace(
            self, tile_n=self.other_n or self.tile_n, tile_m=self.other_m or self.tile_m, num_stages=self.other_stages, other_n=0,
            other_m=0, turned=False, late=False, other_stages=0, cluster_m=cluster[0], cluster_n=cluster[1],
        )  # fmt: skip

    @property
    def cluster_size(self) -> int:
        return self.split if self.schedule == "swapped" else self.cluster_m * self.cluster_n


def block_scaled(problem: GroupedProblem) -> bool:
    return problem.a_scaling == "1x128"


def promotes(problem: GroupedProblem) -> bool:
    """Whether the matrix unit's sums are moved to float32 registers every 128 k."""
    return problem.a_dtype in FP8 and (not problem.fast_accum or block_scaled(problem))


def whole_steps(problem: GroupedProblem) -> bool:
    """Whether a promoted tile has a multiple of SCALE_STEPS k steps."""
    return -(-problem.K // 128) % SCALE_STEPS == 0


def table_groups(problem: GroupedProblem) -> int:
    return next(size for size in TABLES if size >= problem.G)


def bulk_scales(problem: GroupedProblem, config: HopperGroupedConfig) -> str | None:
    """How copy engines bring a's scales (of wgrad both operands'), of four k blocks at a time: "strips" of each, or "quads" of each row;
    None: they do not."""
    if not block_scaled(problem) or config.schedule != "rows":
        return None
    if problem.split == REDUCTION:
        return "quads" if -(-problem.K // 128) % 4 == 0 else None
    if problem.a_scale_layout == "groups":
        return "strips"
    return "quads" if whole_steps(problem) else None


def last_halves(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    """Whether a cluster's tiles of which half have no rows come last: not where the table for it is large."""
    few = table_groups(problem) == TABLES[0]
    high = config.tile_m * config.cluster_m > WAVE_ROWS or is_narrow(config)
    return few and problem.split == ROWS and config.schedule == "rows" and high


# By tile_m: of a tile's time, what one takes with no more than half of its rows, where those come last (of 128 rows, `narrow`).
LAST_TENTHS = {256: 9, 128: 7}
LAST_BESIDE = 6  # the same, where two of them lie beside one other tile


def is_narrow(config: HopperGroupedConfig) -> bool:
    """Of these tiles, not of the others."""
    return config.narrow and config.other is None


def rings(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    """Whether results leave through a ring of pieces in shared memory."""
    return problem.split == REDUCTION and problem.out_dtype == torch.float32 and config.ring > 0


def store_columns(problem: GroupedProblem) -> int:
    """That a warp passes through shared memory at a time."""
    return 64 if table_groups(problem) == TABLES[0] else 32


def _out_bytes(problem: GroupedProblem, config: HopperGroupedConfig) -> int:
    """Of shared memory, for results of 16-bit types on their way out."""
    if config.late:
        return 2 * WAVE_ROWS * config.tile_n + SWIZZLE_ATOM
    return 2 * WAVE_ROWS * (store_columns(problem) + 8) if problem.out_dtype.itemsize == 2 else 0


def smem_bytes(problem: GroupedProblem, config: HopperGroupedConfig) -> int:
    if (other := config.other) is not None:
        own = smem_bytes(problem, replace(config, other_n=0, other_m=0, turned=False))
        # One place for the stages of either, one for the results of either.
        return max(own, smem_bytes(problem, other) + max(0, _out_bytes(problem, config) - _out_bytes(problem, other)))
    width = -(-config.tile_n // 64) * 64
    stage = (config.tile_m + config.tile_n) * SWIZZLE_BYTES
    slots = 0
    if block_scaled(problem):
        if problem.split == ROWS and config.schedule == "rows":
            # blocks.cutedsl.stacked.SlotScales: strips are the larger.
            slots = -(-(config.num_stages + (0 if whole_steps(problem) else SCALE_STEPS - 1)) // SCALE_STEPS)
            slots *= 4 * SCALE_STEPS * (config.tile_m + 4 + 2)
        else:
            stage += 4 * (config.tile_m + (config.tile_n if problem.split == REDUCTION else 4))
    if problem.split == REDUCTION and bulk_scales(problem, config) is not None:
        stage += 12 * (config.tile_m + config.tile_n) + 256 + 24
    tables = 3 if last_halves(problem, config) else 2
    total = config.num_stages * stage + 4 * (tables * table_groups(problem) + 32) + 2 * BARRIER_BYTES
    if config.schedule == "swapped":
        if config.single and config.split > 1:  # what the others send
            total += 4 * (width + 4) * -(-config.tile_m // config.split) * config.split
        return total + (width - config.tile_n) * SWIZZLE_BYTES + 4 * config.tile_m * (width + 4)
    if rings(problem, config):
        total += 2 * config.ring * (RING_BYTES + 16) + SWIZZLE_ATOM
    total += _out_bytes(problem, config)
    if config.schedule == "rows" and problem.split == ROWS:
        total += 32 * config.num_stages  # what the producer tells
    return total + slots


def why_unsupported(problem: GroupedProblem, config: HopperGroupedConfig | None) -> str | None:
    """Why the Hopper grouped kernels cannot do this problem with this configuration (None: the default), or None."""
    if problem.b_preshuffled:
        return "b is preshuffled, an order for AMD's matrix units"
    if problem.G > MAX_GROUPS:
        return f"G={problem.G}: the kernel keeps a table of at most {MAX_GROUPS} groups"
    pair = problem.a_scaling, problem.b_scaling
    blocks = ("1x128", "128x128") if problem.split == ROWS else ("1x128", "1x128")
    if pair != blocks and not (pair[0] in _PLAIN and pair[1] in _PLAIN):
        return f"scales {pair[0]} and {pair[1]}: this kernel does not multiply such a pair"
    if problem.a_dtype in FP8 and problem.b_dtype in FP8:
        if problem.layout != "TN":
            return f"layout {problem.layout} with FP8 operands: wgmma reads 8-bit operands with K contiguous only"
    elif problem.a_dtype != problem.b_dtype or problem.a_dtype not in DTYPES or pair != (None, None):
        return (
            f"operands are {problem.a_dtype} and {problem.b_dtype}, scales {pair[0]} and {pair[1]}: the kernel takes bfloat16 or "
            "float16, one for both, or float8_e4m3fn and float8_e5m2"
        )
    if problem.out_dtype not in OUTPUTS:
        return f"out is {problem.out_dtype}: the kernel writes float32, bfloat16 and float16"
    if problem.bias_dtype is not None and problem.bias_dtype not in OUTPUTS:
        return f"bias is {problem.bias_dtype}: the kernel reads float32, bfloat16 and float16"
    for name in ("M", "N", "K"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: TMA coordinates are 32-bit, at most {MAX_EXTENT}"
    cells = problem.G * -(-problem.N // 128) if problem.split == ROWS else problem.N
    if block_scaled(problem) and max(problem.M, cells) * -(-problem.K // 128) > MAX_EXTENT:
        return "more than 2**31 scales: the kernel numbers them with 32 bits"
    most = (problem.M // 8 + problem.G) * -(-problem.N // 8)
    if problem.split == REDUCTION:
        most = problem.G * -(-problem.M // 128) * -(-problem.N // 64)
    if most > MAX_EXTENT:
        return f"M={problem.M}, N={problem.N}: the kernel numbers tiles with 32 bits"
    if config is None:
        return None
    if not isinstance(config, HopperGroupedConfig):
        return f"config is a {type(config).__name__}: the Hopper grouped kernels take a HopperGroupedConfig"
    return why_config_unsupported(problem, config)


def why_config_unsupported(problem: GroupedProblem, config: HopperGroupedConfig) -> str | None:
    for name in ("tile_m", "tile_n", "tile_k", "num_stages", "cluster_m", "cluster_n", "band", "split"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: an int of at least 1 is needed"
    if config.schedule not in ("rows", "swapped"):
        return f"schedule {config.schedule!r}: there are rows and swapped"
    if config.tile_k * problem.a_dtype.itemsize != SWIZZLE_BYTES:
        return f"tile_k={config.tile_k}: a row of a tile is {SWIZZLE_BYTES} bytes"
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: a tile is loaded while another is multiplied, so at least 2"
    if (other := config.other) is not None:
        if problem.split == REDUCTION or (config.schedule == "swapped" and (config.other_n or config.turned)):
            return f"other_n={config.other_n}, turned={config.turned}: swapped tiles have another height, those of a reduction no other"
        if config.turned and config.cluster_m == 1:
            return "turned: only CTAs below each other can be side by side instead"
        if (reason := why_config_unsupported(problem, other)) is not None:
            return f"other tile: {reason}"
    if config.schedule == "swapped":
        if problem.split == REDUCTION:
            return "swapped tiles of a reduction in groups: there are none"
        for name in ("tile_m", "tile_n"):
            value = getattr(config, name)
            if value % 8 or value > 128:
                return f"{name}={value}: a swapped tile takes multiples of 8 up to 128"
        if problem.layout == "NN" and config.tile_n % 64:
            return f"tile_n={config.tile_n}: where N is b's contiguous dimension, a swapped tile takes 64 or 128"
        if config.split not in (1, 2, 4, 8):
            return f"split={config.split}: 1, 2, 4 or 8 CTAs"
        if config.split > -(-problem.K // config.tile_k):
            return (
                f"split={config.split}: each CTA needs a k step, and K={problem.K} has {-(-problem.K // config.tile_k)}"
            )
        if config.single and not may_be_single(problem, config):
            return f"single: G={problem.G}, M={problem.M}, and {-(-problem.N // config.tile_n)} tiles: more than a tile of one group"
        if (config.cluster_m, config.cluster_n) != (1, 1):
            return f"cluster_m={config.cluster_m}, cluster_n={config.cluster_n}: swapped tiles are not shared"
    else:
        if config.tile_m not in (WAVE_ROWS, 2 * WAVE_ROWS):
            return f"tile_m={config.tile_m}: {WAVE_ROWS} or {2 * WAVE_ROWS}, once or twice 64 rows for each of two consumer warpgroups"
        step = 16 if problem.layout == "TN" and problem.split == ROWS else 64
        if config.tile_n % step or config.tile_n > 256:
            return f"tile_n={config.tile_n}: multiples of {step} up to 256"
        if problem.split == REDUCTION and config.tile_m != WAVE_ROWS:
            return f"tile_m={config.tile_m}: a reduction in groups has tiles of {WAVE_ROWS} rows"
        if config.ring and (config.ring < 2 or config.tile_n // 32 % config.ring):
            return f"ring={config.ring}: a divisor of tile_n / 32, at least 2, or 0"
        if config.addend not in ("load", "reduce"):
            return f"addend {config.addend!r}: there are load and reduce"
        if config.cluster_n not in (1, 2) or config.cluster_m not in (1, 2) or config.cluster_size > 2:
            return f"cluster_m={config.cluster_m}, cluster_n={config.cluster_n}: 1 or 2 CTAs share a's tiles or b's, not both"
        if is_narrow(config) and (not promotes(problem) or config.tile_n % 32 or config.cluster_m > 1):
            return "narrow: of FP8 with sums in float32, with columns in multiples of 32 and CTAs that do not share b"
        if config.late and not can_be_late(problem, config):
            return "late: of 128 rows by multiples of 64 columns, scales of blocks by row or by group, multiples of 512 of K, 16-bit results"
        if config.cluster_m > 1 and config.tile_m > WAVE_ROWS:
            return f"cluster_m={config.cluster_m} of tiles of {config.tile_m} rows: b is shared by tiles of {WAVE_ROWS} only"
        if config.split != 1:
            return f"split={config.split}: only a swapped tile's reduction is split"
        accumulators = config.tile_m // WAVE_ROWS * config.tile_n // 2 + (
            config.tile_n // 2 if promotes(problem) else 0
        )
        if accumulators > MAX_ACCUMULATORS:
            return f"{accumulators} accumulators per thread: at most {MAX_ACCUMULATORS}"
    smem = smem_bytes(problem, config)
    if smem > SMEM_BYTES:
        return f"{smem} bytes of shared memory: a CTA has {SMEM_BYTES}"
    return None


def can_be_late(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    return (
        bulk_scales(problem, config) is not None
        and whole_steps(problem)
        and problem.split == ROWS
        and problem.out_dtype.itemsize == 2
        and config.tile_m == WAVE_ROWS
        and config.tile_n % 64 == 0
        and not is_narrow(config)
    )


def may_be_single(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    clusters = (NUM_SMS if config.split <= 2 else FOURS_SMS) // config.split
    return problem.G == 1 and problem.M <= config.tile_m and -(-problem.N // config.tile_n) <= clusters
