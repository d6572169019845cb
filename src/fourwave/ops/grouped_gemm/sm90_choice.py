"""Which tiles a grouped product takes where the caller names none: a model of the time, and its reasons (docs/hopper_grouped.md)."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from fourwave.ops.gemm.sm90_config import FOURS_SMS, NUM_SMS, SWIZZLE_BYTES
from fourwave.ops.grouped_gemm.problem import REDUCTION, GroupedProblem
from fourwave.ops.grouped_gemm.sm90_config import (
    LAST_BESIDE,
    LAST_TENTHS,
    TABLES,
    WAVE_ROWS,
    HopperGroupedConfig,
    block_scaled,
    promotes,
    rings,
    table_groups,
    whole_steps,
)
from fourwave.ops.grouped_gemm.sm90_tiles import candidates, with_other

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
