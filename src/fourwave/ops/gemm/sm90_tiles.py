"""The tiles that the default of the Hopper GEMM kernels is chosen from (sm90_choice.py)."""

from __future__ import annotations

import functools
from dataclasses import replace

from fourwave.ops.gemm.problem import SWIGLU, GemmProblem
from fourwave.ops.gemm.sm90_config import (
    HALF_SMEM_BYTES,
    SMEM_BYTES,
    STREAMED_ROWS,
    STREAMED_STEP,
    HopperConfig,
    clusters,
    packed,
    promotes,
    single_tile,
    stores,
    streamed_smem_bytes,
    swapped_smem_bytes,
    tile_k,
    why_streamed_unsupported,
    why_unsupported,
)

# The tiles that the default is chosen from. Left out, because they won nowhere by more than noise on the 81 LLM shapes
# (docs/hopper.md): 128x256 cooperative, 192x128 with three consumers, 64x256 pingpong, other band widths.
WIDE = HopperConfig(256, 128, cluster_m=1, cluster_n=2)
SQUARE = HopperConfig(128, 128, schedule="pingpong", num_stages=6)
LONG = HopperConfig(128, 192, schedule="pingpong", cluster_m=1, cluster_n=2)
HUGE = HopperConfig(256, 192, num_stages=3, cluster_m=1, cluster_n=2)
HALF = HopperConfig(128, 64, schedule="pingpong", num_stages=8, cluster_m=1)
LOW = HopperConfig(64, 128, schedule="pingpong", num_stages=8, cluster_m=1)
SMALL = HopperConfig(64, 64, schedule="pingpong", num_stages=12, store_stages=1, cluster_m=1)
_CANDIDATES = (WIDE, SQUARE, LONG, HUGE, HALF, LOW, SMALL)
# With promotion: totals beside the accumulators of 64 rows. TALL suits scales of rows, those after it scales of blocks, which
# also lie in shared memory.
PROMOTING_TALL = HopperConfig(256, 128, store_stages=2, cluster_m=1, cluster_n=2)
PROMOTING_BLOCKS = HopperConfig(256, 128, store_stages=1, cluster_m=2, cluster_n=1, group=4)
PROMOTING_LONG = HopperConfig(128, 192, store_stages=3, cluster_m=1, cluster_n=2)
# What the cluster shares decides how much comes from L2 in a step: b's 192 columns are more than a's 128 rows.
PROMOTING_PAIR = HopperConfig(128, 192, store_stages=3, cluster_m=2, cluster_n=1, group=4)
PROMOTING_ROWS = HopperConfig(256, 128, store_stages=1, cluster_m=1, cluster_n=2)
PROMOTING_SQUARE = HopperConfig(128, 128, num_stages=6, store_stages=1)
PROMOTING_LOW = HopperConfig(64, 128, consumers=1, num_stages=8, cluster_m=1)
_PROMOTING = (
    PROMOTING_TALL, PROMOTING_BLOCKS, PROMOTING_LONG, PROMOTING_PAIR, PROMOTING_ROWS, PROMOTING_SQUARE, PROMOTING_LOW
)  # fmt: skip
_TOKENS = (8, 16, 32, 64, 128)  # of a swapped tile
_LEAST_ROWS = 32
# Bytes, per SM, of a streamed tile's weights, and with its rows of a; with more they got slower.
_IN_FLIGHT = 34 * 1024, 64 * 1024


@functools.lru_cache(maxsize=4096)
def candidates(problem: GemmProblem) -> tuple[HopperConfig, ...]:
    """The configurations that the default is chosen from, those that this problem allows."""
    step = tile_k(problem)
    tiles = [replace(config, tile_k=step) for config in (_PROMOTING if promotes(problem) else _CANDIDATES)]
    tiles = [
        replace(c, store_stages=max(n for n in range(1, c.store_stages + 1) if stores(problem, c) % n == 0))
        for c in tiles
    ]
    if problem.activation == SWIGLU:
        # Halves of a tile of b are too low to be shared: share rows of a.
        tiles = [
            replace(c, cluster_m=1, cluster_n=c.cluster_m) if c.cluster_m > 1 and c.tile_n < 256 else c for c in tiles
        ]
    if problem.M <= _TOKENS[-1] or packed(problem):
        tiles += _swapped_candidates(problem) + _streamed_candidates(problem)
    return tuple(config for config in tiles if why_unsupported(problem, config) is None)


def listed(problem: GemmProblem, config: HopperConfig) -> HopperConfig:
    """The tile that `candidates` made this one of: other outputs take other buffers and clusters."""

    def shape(c: HopperConfig) -> tuple[int, int, str, int]:
        return c.tile_m, c.tile_n, c.schedule, c.consumers

    tiles = [c for c in (_PROMOTING if promotes(problem) else _CANDIDATES) if shape(c) == shape(config)]
    same = [c for c in tiles if (c.cluster_m, c.cluster_n) == (config.cluster_m, config.cluster_n)]
    return next(iter(same or tiles), config)


def swapped(problem: GemmProblem, rows: int, split: int = 1, share: int = 1, half: bool = False) -> HopperConfig:
    """The swapped tile of `rows` columns of out that suits this M, with as many stages as there is room for.

    half  of an SM's shared memory
    """
    tokens = next((tile for tile in _TOKENS if tile >= problem.M), _TOKENS[-1])
    config = HopperConfig(
        tokens, rows, tile_k(problem), "swapped", cluster_m=1, cluster_n=share, group=1, split=split
    )  # fmt: skip
    room = HALF_SMEM_BYTES if half else SMEM_BYTES
    fitting = (n for n in range(24, 2, -1) if swapped_smem_bytes(problem, replace(config, num_stages=n)) <= room)
    return replace(config, num_stages=next(fitting, 2))


def _swapped_candidates(problem: GemmProblem) -> list[HopperConfig]:
    """The tallest tiles that give every cluster the same number, by clusters that were worth it on one H200 (docs/hopper.md).

    One tile each: with and without the reduction split in two. Several each: the tallest and the next lower tile, with half
    the memory where a's tiles are small, and else also sharing those.
    """
    if packed(problem):
        tiles = [swapped(problem, rows, split) for rows in (64, 128) for split in (1, 2, 4)]
        if problem.b_preshuffled:
            # CTAs that share rows of a, and a reduction split in four, were slower on every weight.
            tiles = [config for config in tiles if config.split < 4]
            for split in (1, 2):
                heights = 0
                for turns in range(1, 1024):
                    in_grid = clusters(HopperConfig(schedule="swapped", split=split))
                    rows = -(-problem.N // (turns * in_grid * 64)) * 64
                    if rows <= 256:
                        tiles.append(swapped(problem, rows, split))
                        heights += 1
                    if heights == 2 or rows == 64 or (split > 1 and heights):
                        break
        # A split reduction was slower wherever a cluster has several tiles.
        fitting = [config for config in tiles if why_unsupported(problem, config) is None]
        return [config for config in fitting if config.split == 1 or single_tile(problem, config)]
    step = 64 if problem.layout == "NN" else 8
    few = problem.M <= 16
    tiles = []
    for split, share in ((1, 1), (2, 1), (1, 2)):
        if share > (problem.M + 7) // 8:
            continue
        heights = 0
        for turns in range(1, 1024):
            in_grid = clusters(HopperConfig(schedule="swapped", cluster_n=share, split=split))
            rows = -(-problem.N // (turns * share * in_grid))
            rows = max(_LEAST_ROWS, -(-rows // step) * step)
            if rows > 128:
                continue
            config = swapped(problem, rows, split, share, few and turns > 1)
            if turns == 1 or split == 1:
                tiles.append(config)
            heights += 1
            if heights == 2 or rows == _LEAST_ROWS or split > 1:
                break
    fits_one = [c for c in tiles if single_tile(problem, c) and c.cluster_n == 1]
    return list(dict.fromkeys(fits_one or [c for c in tiles if c.cluster_n == 1 or not few]))


def streamed(problem: GemmProblem, rows: int, split: int = 1, consumers: int = 2) -> HopperConfig:
    """The streamed tile of `rows` columns of out that suits this M, with as many stages as bring _IN_FLIGHT bytes, up to 8."""
    tokens = next((tile for tile in _TOKENS if tile >= problem.M), _TOKENS[-1])
    config = HopperConfig(
        tokens, rows, STREAMED_STEP, "streamed", consumers=consumers, cluster_m=1, cluster_n=1, group=1, split=split
    )  # fmt: skip
    staged = [replace(config, num_stages=n) for n in range(2, 9)]
    fitting = [c for c in staged if streamed_smem_bytes(problem, c) <= SMEM_BYTES]
    # One stage where two do not fit: never a candidate.
    least = replace(config, num_stages=1) if not fitting else fitting[-1]
    return next((c for c in fitting if _enough_in_flight(problem, c)), least)


def _enough_in_flight(problem: GemmProblem, config: HopperConfig) -> bool:
    """Whether a streamed tile's stages bring _IN_FLIGHT bytes: of each row of weights and 64 k 32 of codes and 2 scales, of one
    of a 128."""
    stages = 4 * config.consumers * config.num_stages
    weights, rows = stages * config.tile_n * 34, stages * problem.M * 128
    return weights >= _IN_FLIGHT[0] and weights + rows >= _IN_FLIGHT[1]


def _streamed_candidates(problem: GemmProblem) -> list[HopperConfig]:
    """For each split of K the two tallest tiles that give every cluster the same number; split only where that is one. Low tiles
    take all the warps that there are, where a has up to 8 rows."""
    if not problem.b_preshuffled or problem.M > STREAMED_ROWS:
        return []
    tiles = []
    for split in (1, 2, 4):
        if split > 1 and problem.K < 16 * split * STREAMED_STEP:
            continue
        in_grid = clusters(HopperConfig(schedule="streamed", cluster_m=1, split=split))
        heights = 0
        for turns in range(1, 1024):
            rows = max(_LEAST_ROWS, -(-problem.N // (turns * in_grid * 16)) * 16)
            config = streamed(problem, rows, split, 4 if rows <= 64 and problem.M <= 8 else 2)
            if why_streamed_unsupported(problem, config) is None and config.num_stages > 1:
                tiles.append(config)
                heights += 1
            if heights == 2 or rows == _LEAST_ROWS or (split > 1 and heights):
                break
    return list(dict.fromkeys(tiles))
