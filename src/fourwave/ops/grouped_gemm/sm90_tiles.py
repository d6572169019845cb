"""The tiles that the default of the Hopper grouped kernels is chosen from (sm90_choice.py)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fourwave.ops.gemm.sm90_config import NUM_SMS, SCALE_STEPS, SMEM_BYTES, SWIZZLE_BYTES
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS, GroupedProblem
from fourwave.ops.grouped_gemm.sm90_config import (
    MAX_GROUPS,
    WAVE_ROWS,
    HopperGroupedConfig,
    block_scaled,
    can_be_late,
    may_be_single,
    promotes,
    smem_bytes,
    whole_steps,
    why_config_unsupported,
    why_unsupported,
)

_LATE_TILES = 4 * NUM_SMS  # a CTA with few tiles gains little
_TOKENS = (8, 16, 32, 64, 128)  # of a swapped tile
_LEAST_ROWS = 32
# By tile_n. Where the ring has room for a whole tile, what it is added to arrives beside its products; else pieces would wait for that.
_RINGS: dict[int, dict[str, Any]] = {
    64: {"ring": 2}, 128: {"ring": 4}, 192: {"ring": 3, "addend": "reduce"}, 256: {"ring": 4, "addend": "reduce"},
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def candidates(problem: GroupedProblem) -> tuple[HopperGroupedConfig, ...]:
    """The configurations that the default is chosen from, those that this problem allows."""
    if not 1 <= problem.G <= MAX_GROUPS or not problem.M:
        return ()
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
    return tuple(config for config in tiles if why_config_unsupported(problem, config) is None)


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
    if "late" not in more and tile_n == 192 and tiles >= _LATE_TILES and can_be_late(problem, config):
        # Not where its buffers leave room for fewer stages.
        late = _known(problem, _deepest(problem, replace(config, late=True)))
        config = late if late.num_stages == config.num_stages else config
    return config


def swapped(problem: GroupedProblem, tokens: int, rows: int, split: int = 1) -> HopperGroupedConfig:
    tile_k = SWIZZLE_BYTES // problem.a_dtype.itemsize
    config = HopperGroupedConfig(tokens, rows, tile_k, "swapped", split=split)
    config = _deepest(problem, replace(config, single=may_be_single(problem, config)))
    return replace(config, num_stages=_in_fours(problem, config))


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


def _in_fours(problem: GroupedProblem, config: HopperGroupedConfig) -> int:
    """Stages, of which SCALE_STEPS have one barrier where tokens are few."""
    fours = config.num_stages // SCALE_STEPS * SCALE_STEPS
    return fours if block_scaled(problem) and config.tile_m <= 16 and fours else config.num_stages
