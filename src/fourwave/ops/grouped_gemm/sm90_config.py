"""Tunables of the Hopper grouped kernels, the default choice with its reasons, and the one rule for what they support.

Imports neither CuTe DSL nor torch.cuda: the rule can be asked anywhere.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

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
    return _why_config_unsupported(problem, config)


def _why_config_unsupported(problem: GroupedProblem, config: HopperGroupedConfig) -> str | None:
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
        if (reason := _why_config_unsupported(problem, other)) is not None:
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
        if config.single and not _may_be_single(problem, config):
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
        if config.late and not _can_be_late(problem, config):
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


def _can_be_late(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    return (
        bulk_scales(problem, config) is not None
        and whole_steps(problem)
        and problem.split == ROWS
        and problem.out_dtype.itemsize == 2
        and config.tile_m == WAVE_ROWS
        and config.tile_n % 64 == 0
        and not is_narrow(config)
    )


_LATE_TILES = 4 * NUM_SMS  # a CTA with few tiles gains little
_TOKENS = (8, 16, 32, 64, 128)  # of a swapped tile
_LEAST_ROWS = 32


def _deepest(problem: GroupedProblem, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """With as many stages as there is room for, from 2 to 24."""
    two, three = (smem_bytes(problem, replace(config, num_stages=n)) for n in (2, 3))
    most = max(2, min(24, 2 + (SMEM_BYTES - two) // (three - two)))
    deepest = (replace(config, num_stages=n) for n in range(most, 2, -1))  # slots of scales come with every fourth
    return next((c for c in deepest if smem_bytes(problem, c) <= SMEM_BYTES), replace(config, num_stages=2))


def _known(problem: GroupedProblem, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """With as many stages as the loop is unrolled by: where each is is then known to the compiler. Less work for a step needs more."""
    if (
        problem.split == ROWS
        and promotes(problem)
        and whole_steps(problem)
        and config.tile_m * config.tile_n >= 128 * 192
    ):
        return replace(config, num_stages=min(config.num_stages, SCALE_STEPS))
    return config


def with_other(
    problem: GroupedProblem, config: HopperGroupedConfig, other_n: int = 0, other_m: int = 0, turned: bool = False
) -> HopperGroupedConfig:
    config = replace(config, other_stages=2, other_n=other_n, other_m=other_m, turned=turned)
    assert config.other is not None
    other = _deepest(problem, config.other)
    if config.schedule == "rows" and (turned or other_m):
        other = _known(problem, other)
    stages = _in_fours(problem, other) if config.schedule == "swapped" else other.num_stages
    config = replace(config, other_stages=stages)
    return replace(config, late=config.late and smem_bytes(problem, config) <= SMEM_BYTES)


def swapped(problem: GroupedProblem, tokens: int, rows: int, split: int = 1) -> HopperGroupedConfig:
    tile_k = SWIZZLE_BYTES // problem.a_dtype.itemsize
    config = HopperGroupedConfig(tokens, rows, tile_k, "swapped", split=split)
    config = _deepest(problem, replace(config, single=_may_be_single(problem, config)))
    return replace(config, num_stages=_in_fours(problem, config))


def _in_fours(problem: GroupedProblem, config: HopperGroupedConfig) -> int:
    """Stages, of which SCALE_STEPS have one barrier where tokens are few."""
    fours = config.num_stages // SCALE_STEPS * SCALE_STEPS
    return fours if block_scaled(problem) and config.tile_m <= 16 and fours else config.num_stages


def _may_be_single(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    clusters = (NUM_SMS if config.split <= 2 else FOURS_SMS) // config.split
    return problem.G == 1 and problem.M <= config.tile_m and -(-problem.N // config.tile_n) <= clusters


# By tile_n. Where the ring has room for a whole tile, what it is added to arrives beside its products; else pieces would wait for that.
_RINGS: dict[int, dict[str, Any]] = {
    64: {"ring": 2}, 128: {"ring": 4}, 192: {"ring": 3, "addend": "reduce"}, 256: {"ring": 4, "addend": "reduce"},
}  # fmt: skip


def rows_tile(
    problem: GroupedProblem, tile_m: int, tile_n: int, cluster_n: int = 1, cluster_m: int = 1, **more: Any
) -> HopperGroupedConfig:
    tile_k = SWIZZLE_BYTES // problem.a_dtype.itemsize
    if problem.split == REDUCTION and problem.out_dtype == torch.float32:
        more = _RINGS.get(tile_n, {}) | more
    config = _deepest(
        problem, HopperGroupedConfig(tile_m, tile_n, tile_k, "rows", cluster_n=cluster_n, cluster_m=cluster_m, **more)
    )
    config = _known(problem, config)
    tiles = -(-problem.M // WAVE_ROWS) * -(-problem.N // tile_n)
    if "late" not in more and tile_n == 192 and tiles >= _LATE_TILES and _can_be_late(problem, config):
        # Not where its buffers leave room for fewer stages.
        late = _known(problem, _deepest(problem, replace(config, late=True)))
        config = late if late.num_stages == config.num_stages else config
    return config


@functools.lru_cache(maxsize=4096)
def candidates(problem: GroupedProblem) -> tuple[HopperGroupedConfig, ...]:
    """The configurations that the default is chosen from, those that this problem allows."""
    if problem.split == REDUCTION:
        most = 128 if block_scaled(problem) else 256
        tiles = [
            rows_tile(problem, WAVE_ROWS, n, *cluster)
            for n in (256, 192, 128, 64)
            for cluster in ((1, 1), (1, 2), (2, 1))
            if n <= most
        ]
        if problem.accumulate:
            tiles += [replace(tile, addend="reduce") for tile in tiles if tile.addend == "load" and tile.ring > 0]
        return _allowed(problem, tiles)
    average = -(-problem.M // min(problem.G, problem.M))
    tokens = next((tile for tile in _TOKENS if tile >= average), _TOKENS[-1])
    step = 64 if problem.layout == "NN" else 8
    tiles = [swapped(problem, tokens, rows) for rows in range(128, _LEAST_ROWS - 1, -step)]
    tiles += [swapped(problem, tokens, rows, 2) for rows in (128, 64)]
    used = min(problem.G, problem.M)
    if used * -(-average // tokens) * -(-problem.N // _LEAST_ROWS) < NUM_SMS:
        # Too few tiles, however low: CTAs that share them.
        tiles += [
            swapped(problem, tokens, rows, split) for split in (2, 4) for rows in range(120, _LEAST_ROWS - 1, -step)
        ]
    # Not 176: with scales of blocks its eleven 16 columns take as long as 192 (docs/hopper_grouped.md).
    widths = (256, 192, 128, 64) if problem.layout == "NN" else [n for n in range(256, 63, -16) if n != 176]
    clusters = ((1, 1), (1, 2), (2, 1)) if average > WAVE_ROWS else ((1, 1), (2, 1))  # along n, along m
    tiles += [rows_tile(problem, WAVE_ROWS, n, *cluster) for n in widths for cluster in clusters]
    if promotes(problem):
        tiles.append(rows_tile(problem, 2 * WAVE_ROWS, 128))
    return _allowed(problem, tiles)


def _allowed(problem: GroupedProblem, tiles: list[HopperGroupedConfig]) -> tuple[HopperGroupedConfig, ...]:
    if why_unsupported(problem, None) is not None:
        return ()
    return tuple(config for config in tiles if _why_config_unsupported(problem, config) is None)


# Constants of one H200 (docs/hopper_grouped.md); they rank the tiles and say little else.
_BYTES_PER_SECOND = 4.2e12
_SM_BYTES_PER_SECOND = 33e9
_SM_FLOPS = 10.9e12  # of FP8 wgmma, per SM and second: what the power limit leaves
_SWAPPED_FLOPS = 4.75e12
_CLOCK = 1.5e9  # with the matrix units busy
_SMEM_BYTES_PER_CYCLE = 128
_L2_BYTES_PER_CYCLE = 46  # per SM, where all read
_TURN_SECONDS = 0.3e-6
_ROWS_TURN_SECONDS, _PROMOTED_TURN_SECONDS = 2.4e-6, 1.2e-6
# Of a promoted tile of 256 rows, more, where there are more turns than this.
_HALVES_TURN_SECONDS, _MANY_TURNS = 0.25e-6, 16
_UNKNOWN_STAGES = 1.03  # of a tile of 256 rows, where the compiler does not know where a stage is
# Of the store's time that out's bytes allow: what a tile's products do not hide, and what it takes where there are few.
_STORE_LOADED = 0.9, 1.2
_STORE_REDUCED = {64: (0.7, 1.8), 128: (0.7, 1.8), 192: (0.53, 1.8), 256: (0.65, 1.8)}  # by tile_n
# With a scale of each row and column: a step's time over that of a single CTA without, and more where two share tiles; and the store's.
_SCALED_WGRAD, _SCALED_PAIRS = 1.21, 1.03
_SCALED_LOADED, _SCALED_REDUCED = (0.55, 1.2), (0.3, 1.8)
_SCALED_ALONE = 1.01  # the store's where no two CTAs have tiles side by side
_SWAPPED_STEP_SECONDS = 0.15e-6  # at least: the producer's
_SPLIT_SECONDS = 0.5e-6
_UNEQUAL_TILES = (0.3, 0.4, 0.5, 0.6, 0.7)  # that each of random groups has beyond its share of all rows
_UNEQUAL_ROWS = 3  # of the largest of random groups, over the mean
_OTHER_GAIN = 0.985


def step_seconds(config: HopperGroupedConfig) -> float:
    """Of SWIZZLE_BYTES of k of a tile of the schedule "rows": what shared memory, which wgmma reads and TMA writes, and L2 allow.

    A wgmma of 64 rows reads them and all columns, 32 bytes of each.
    """
    m, n = config.tile_m, config.tile_n
    shared = m // 64 * 4 * (64 + n) * 32 + (m + n) * SWIZZLE_BYTES
    l2 = (m / config.cluster_n + n / config.cluster_m) * SWIZZLE_BYTES
    l2 /= _L2_BYTES_PER_CYCLE * _CLOCK
    return max(shared / (_SMEM_BYTES_PER_CYCLE * _CLOCK), l2, 2 * m * n * SWIZZLE_BYTES / _SM_FLOPS) + 0.05 * l2


def _seconds(problem: GroupedProblem, config: HopperGroupedConfig) -> float:
    """Modelled time of the busiest cluster, were all groups equal."""
    size = problem.a_dtype.itemsize
    if problem.split == REDUCTION:
        high = -(-problem.M // (config.tile_m * config.cluster_m))
        wide = -(-problem.N // (config.tile_n * config.cluster_n))
        turns = -(-problem.G * high * wide // (NUM_SMS // config.cluster_size))
        steps = -(-problem.K * size // (problem.G * SWIZZLE_BYTES))
        out = config.tile_m * config.tile_n * problem.out_dtype.itemsize * (2 if problem.accumulate else 1)
        multiply, store = steps * step_seconds(config), out / _SM_BYTES_PER_SECOND
        if block_scaled(problem):
            multiply = steps * step_seconds(replace(config, cluster_m=1, cluster_n=1)) * _SCALED_WGRAD
            multiply *= _SCALED_PAIRS if config.cluster_size > 1 else 1.0
        if not rings(problem, config):
            if problem.accumulate and config.tile_n > 128:
                store += _ROWS_TURN_SECONDS  # measured: L2's additions come in one burst
            return turns * (multiply + store + _TURN_SECONDS * (1 + config.tile_n / 64))
        beside, alone = _SCALED_LOADED if block_scaled(problem) else _STORE_LOADED
        if problem.accumulate and config.addend == "reduce":
            beside, alone = _STORE_REDUCED.get(config.tile_n, _STORE_REDUCED[256])
            if block_scaled(problem):
                beside, alone = _SCALED_REDUCED
        elif config.ring < 4:
            alone *= 1.2  # too little on its way
        if block_scaled(problem) and config.cluster_n == 1:
            alone *= _SCALED_ALONE
        return turns * max(multiply + beside * store, alone * store)
    used = min(problem.G, problem.M)
    rows = -(-problem.M // used)
    high = -(-rows // (config.tile_m * config.cluster_m))
    wide = -(-problem.N // (config.tile_n * config.cluster_n))
    clusters = (NUM_SMS if config.cluster_size <= 2 else FOURS_SMS) // config.cluster_size
    turns = -(-used * high * wide // clusters)
    k_bytes = problem.K * size / config.split
    reading = config.tile_n / config.cluster_m * k_bytes / high + config.tile_m / config.cluster_n * k_bytes / 4
    if config.schedule == "rows":
        live = min(config.tile_m, -(-rows // WAVE_ROWS) * WAVE_ROWS) / config.tile_m
        multiply = live * -(-k_bytes // SWIZZLE_BYTES) * step_seconds(config)
        if promotes(problem):
            turn = _PROMOTED_TURN_SECONDS * (1 + 1 / turns)  # once more at the start
            if config.tile_m > WAVE_ROWS and turns > _MANY_TURNS:
                turn += _HALVES_TURN_SECONDS
            if config.tile_m > WAVE_ROWS and not whole_steps(problem):
                multiply *= _UNKNOWN_STAGES
        else:
            turn = _ROWS_TURN_SECONDS
    else:
        multiply = 2 * config.tile_m * (-(-config.tile_n // 64) * 64) * k_bytes / _SWAPPED_FLOPS
        multiply = max(multiply, -(-k_bytes // SWIZZLE_BYTES) * _SWAPPED_STEP_SECONDS)
        turn = _TURN_SECONDS * (1 + config.tile_m / 64)
    tile = max(reading / _SM_BYTES_PER_SECOND, multiply) + turn
    return turns * tile + _SPLIT_SECONDS * (config.split - 1)


def _with_other(problem: GroupedProblem, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """config, with another tile that is better where groups are as unequal as random ones; the kernel decides which it takes."""
    if problem.split == REDUCTION or problem.G == 1 or not promotes(problem):
        return config
    if config.schedule == "rows":
        return _with_other_rows(problem, config)
    used = min(problem.G, problem.M)
    other_m = min(128, -(-_UNEQUAL_ROWS * problem.M // (8 * used)) * 8)
    if config.split > 1 or other_m <= config.tile_m:
        return config
    return with_other(problem, config, other_m=other_m)


def round_cost(config: HopperGroupedConfig) -> int:
    """Of a round of tiles, in units of the kernel's own: for its choice between two tiles."""
    if config.schedule == "rows":
        return round(_promoted_seconds(config) * 1e9)
    return 2 * config.tile_n + config.tile_m  # bytes, of which a's come from L2


def _promoted_seconds(config: HopperGroupedConfig) -> float:
    """As step_seconds, measured where all CTAs are busy: a line through 96 to 192 columns, and 16 more than a multiple of 32 cost 32."""
    l2 = (
        (config.tile_m / config.cluster_n + config.tile_n / config.cluster_m)
        * SWIZZLE_BYTES
        / (_L2_BYTES_PER_CYCLE * _CLOCK)
    )
    if config.tile_m > WAVE_ROWS:
        return 0.80e-6 + 0.05 * l2
    return 0.12e-6 + 2.55e-9 * (-(-config.tile_n // 32) * 32) + 0.05 * l2


def _with_other_rows(problem: GroupedProblem, config: HopperGroupedConfig) -> HopperGroupedConfig:
    """config, with other tiles in clusters of as many CTAs, if those would be better with random groups: half of each one's last tiles have
    no more than half of their rows."""
    used = min(problem.G, problem.M)

    def seconds(tile: HopperGroupedConfig) -> float:
        high = problem.M / (tile.tile_m * tile.cluster_m)
        each = -(-problem.N // (tile.tile_n * tile.cluster_n)) / (NUM_SMS // tile.cluster_size)
        last = LAST_TENTHS[tile.tile_m] / 10 if tile.tile_m > WAVE_ROWS or _may_be_narrow(problem, tile) else 1.0
        turns = 0.0
        for unequal in _UNEQUAL_TILES:  # several: no single number of rounds decides
            large, small = max(high + (unequal - 0.5) * used, 0.0), 0.5 * used
            rounds = math.ceil(large * each)
            free = rounds / each - large
            if small > 2 * free:
                turns += max(rounds + last, (large + last * small) * each)
            else:
                turns += max(rounds, rounds - 1 + 2 * min(last, LAST_BESIDE / 10)) if small > free else rounds
        return turns * (-(-problem.K // tile.tile_k) * _promoted_seconds(tile) + _PROMOTED_TURN_SECONDS)

    alike = [
        tile
        for tile in candidates(problem)
        if (tile.schedule, tile.cluster_size) == (config.schedule, config.cluster_size)
        and tile.tile_m <= config.tile_m
        and tile.cluster_m <= config.cluster_m
        and (tile.tile_n >= config.tile_n or problem.M > WAVE_ROWS * used)  # few rows: narrower ones took longer
    ]
    best = min(alike, key=seconds)
    if seconds(best) >= _OTHER_GAIN * seconds(config):
        return config
    other_m = best.tile_m if best.tile_m < config.tile_m else 0
    chosen = with_other(problem, config, best.tile_n, other_m, best.cluster_m < config.cluster_m)
    return replace(chosen, narrow=_may_be_narrow(problem, best))


def _may_be_narrow(problem: GroupedProblem, config: HopperGroupedConfig) -> bool:
    # With fewer rows the time is that of reading b, whoever multiplies.
    many = table_groups(problem) == TABLES[0] and problem.M > WAVE_ROWS * min(problem.G, problem.M)
    alone = config.tile_m == WAVE_ROWS and config.tile_n % 32 == 0 and config.cluster_m == 1
    return many and promotes(problem) and alone


@functools.lru_cache(maxsize=4096)
def default_config(problem: GroupedProblem) -> tuple[HopperGroupedConfig, list[str]]:
    """The candidate of least modelled time, and why. m_sizes is not known: groups are taken to be equal."""
    modelled = {config: _seconds(problem, config) for config in candidates(problem)}
    best = min(modelled, key=lambda config: modelled[config])
    modelled = {_with_other(problem, c) if c == best else c: seconds for c, seconds in modelled.items()}
    best = _with_other(problem, best)
    reasons = [f"least modelled time of {len(modelled)} tiles: {modelled[best] * 1e6:.1f} us, were all groups equal"]
    for config, seconds in modelled.items():
        if config != best and seconds < 1.05 * modelled[best]:
            reasons.append(f"{config}: {seconds * 1e6:.1f} us")
    return best, reasons[:6]
