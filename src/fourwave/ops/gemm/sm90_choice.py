"""Which tile a product takes where the caller names none: a model of the time, and its reasons (docs/hopper.md)."""

from __future__ import annotations

import functools

from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem
from fourwave.ops.gemm.sm90_config import (
    FP8,
    STREAMED_STEP,
    SWIZZLE_BYTES,
    HopperConfig,
    cluster_tiles,
    clusters,
    packed,
    stores_late,
)
from fourwave.ops.gemm.sm90_tiles import (
    HALF,
    HUGE,
    LONG,
    LOW,
    PROMOTING_BLOCKS,
    PROMOTING_LONG,
    PROMOTING_LOW,
    PROMOTING_PAIR,
    PROMOTING_SQUARE,
    SMALL,
    SQUARE,
    candidates,
    listed,
)

# A model of the time, its constants from one H200 (docs/hopper.md). Rates are relative to WIDE on full waves.
_SM_FLOPS = 5.9e12  # of WIDE's main loop, per SM and second
# Of swapped tiles; fitted to what each of them took, so they rank them and say little else.
_BYTES_PER_SECOND = 4.4e12
_SM_BYTES_PER_SECOND = 33e9
_L2_BYTES_PER_SECOND = 39e12
_SPLIT_SECONDS, _TURN_SECONDS, _SHARE_SECONDS = 0.58e-6, 0.024e-6, 0.15e-6
_L2_READ_BYTES_PER_SECOND = 6.8e12  # of streamed tiles together, weights included
_STREAMED_BYTES_PER_SECOND = 50e9  # of an SM's streamed tile, if every stage brought _STAGE_BYTES more
_STAGE_BYTES = 1200
_CONVERT_SECONDS = {64: 0.27e-6, 128: 0.44e-6}  # of a stage of MXFP4, by rows, with 8 tokens; taken for MXFP8, too
_STORE_SECONDS = 0.8e-6  # of a 256x128 tile, where nothing else runs meanwhile
_RATES = {
    HALF: 0.58, LOW: 0.56, SMALL: 0.42, PROMOTING_BLOCKS: 0.95, PROMOTING_SQUARE: 0.92, PROMOTING_LOW: 0.52,
}  # fmt: skip
# With scales of blocks, by tile_m, tile_n and cluster.
_BLOCK_RATES = {
    (128, 192, 2, 1): 1.0, (128, 192, 1, 2): 0.997, (256, 128, 1, 2): 0.99, (256, 128, 2, 1): 0.987, (128, 128, 2, 1): 0.933,
    (64, 128, 1, 1): 0.61,
}  # fmt: skip
# SQUARE hides its stores and reads more shared memory per product than WIDE. The first outweighs the second where tiles
# are short and the chip is at its power limit, which a BF16 call of less than half a millisecond does not bring it to.
_SQUARE_K_BYTES = 16384  # at most
_SQUARE_VOLUME = 2.4e11  # M * N * K, at least, where operands have two bytes
_SQUARE_FP8_VOLUME = 2e12  # likewise, where they have one, and K more than half of that
# Over many long tiles CTAs drift apart and share less through L2; the larger a tile, the less it needs to.
# M * N * K * sqrt(bytes of K / 16384) from where SQUARE and LONG lose to WIDE, and WIDE to HUGE.
_DRIFT_VOLUMES = 6e12, 2.5e13


def _rate(problem: GemmProblem, config: HopperConfig, few_bits: bool) -> float:
    """Of a tile's main loop, relative to WIDE's, as measured on one H200. few_bits: as in default_config."""
    if problem.a_scaling == "1x128":
        return _BLOCK_RATES[config.tile_m, config.tile_n, config.cluster_m, config.cluster_n]
    config = listed(problem, config)
    volume = problem.M * problem.N * problem.K
    k_bytes = problem.K * problem.a_dtype.itemsize
    drift = volume * (k_bytes / 16384) ** 0.5
    least = _SQUARE_VOLUME
    if problem.a_dtype in FP8:
        least = _SQUARE_FP8_VOLUME if k_bytes > _SQUARE_K_BYTES // 2 else 0
    short = k_bytes <= _SQUARE_K_BYTES and volume >= least
    if config in (PROMOTING_LONG, PROMOTING_PAIR):
        return 0.965
    if config == HUGE:
        return 1.02 if drift > _DRIFT_VOLUMES[1] else 0.97
    if config in (SQUARE, LONG) and drift > _DRIFT_VOLUMES[0]:
        return 0.8
    if config in (SQUARE, LONG) and few_bits:
        return 0.85 if volume >= _SQUARE_VOLUME else 0.92
    if config == SQUARE:
        return 1.01 if short else 0.97
    if config == LONG:
        return 0.98 if short else 0.95
    return _RATES.get(config, 1.0)


def _swapped_seconds(problem: GemmProblem, config: HopperConfig) -> tuple[float, int]:
    """Reading of weights by all and by the busiest CTA, and what splits, turns and sharing cost. The numbers in it are fitted, too."""
    elem_bytes = float(problem.b_dtype.itemsize)
    if packed(problem):
        elem_bytes = (0.5 if problem.b_dtype == PACKED_E2M1 else 1) + 1 / 32
    turns = -(-cluster_tiles(problem, config) // clusters(config))
    all_steps = -(-problem.K // config.tile_k)
    k_steps = -(-all_steps // config.split)
    weights = problem.N * problem.K * elem_bytes
    tokens = -(-problem.N // config.tile_n) * config.tile_m * problem.K * problem.a_dtype.itemsize / config.cluster_n
    everyone = weights / _BYTES_PER_SECOND + tokens / _L2_BYTES_PER_SECOND
    busiest = turns * k_steps * config.tile_n * SWIZZLE_BYTES / _SM_BYTES_PER_SECOND
    if packed(problem):
        busiest = turns * k_steps * _CONVERT_SECONDS[64 if config.tile_n <= 64 else 128] * (1 + config.tile_m / 200)
    if problem.b_preshuffled:
        of_warpgroup = max(0.085e-6 + 1.25e-9 * config.tile_m, 2.55e-9 * config.tile_m)
        busiest = turns * k_steps * (0.14e-6 + -(-config.tile_n // 64) * of_warpgroup)
        everyone = max(everyone, (weights + tokens) / 9e12)
    overhead = (
        _SPLIT_SECONDS * (config.split - 1) * (1 + config.tile_m / 32)
        + _TURN_SECONDS * (turns - 1) * (1 + config.tile_m / 64)
        + _SHARE_SECONDS * (config.cluster_n - 1)
    )
    return max(everyone, busiest) + 0.3 * min(everyone, busiest) + overhead, turns


def _streamed_seconds(problem: GemmProblem, config: HopperConfig) -> tuple[float, int]:
    """Reading of weights and, out of L2, of a by all; of weights by the busiest CTA; what splits and turns cost. Fitted likewise."""
    tiles = cluster_tiles(problem, config)
    turns = -(-tiles // clusters(config))
    weights = problem.N * problem.K * 17 / 32
    rows_of_a = tiles * problem.M * problem.K * 2
    everyone = max(weights / _BYTES_PER_SECOND, (weights + rows_of_a) / _L2_READ_BYTES_PER_SECOND)
    stages = turns * -(-problem.K // STREAMED_STEP) / config.split
    share = stages * (config.tile_n * STREAMED_STEP * 17 / 32 + _STAGE_BYTES) / _STREAMED_BYTES_PER_SECOND
    seconds = max(everyone, share) + 0.3e-6 * (turns - 1)
    if config.split > 1:
        seconds += 0.03 * seconds + turns * (config.split - 0.5) * 1e-6
    return seconds, turns


def _seconds(problem: GemmProblem, config: HopperConfig, few_bits: bool) -> tuple[float, int]:
    """(modelled time of the busiest CTA, its tiles)."""
    if config.schedule == "swapped":
        return _swapped_seconds(problem, config)
    if config.schedule == "streamed":
        return _streamed_seconds(problem, config)
    per_cta = -(-cluster_tiles(problem, config) // clusters(config))
    area = config.tile_m * config.tile_n
    k_steps = -(-problem.K // config.tile_k)
    multiply = 2 * area * k_steps * config.tile_k / (_SM_FLOPS * _rate(problem, config, few_bits))
    store = _STORE_SECONDS * area / (256 * 128)
    # Pingpong hides every store but the last behind the other warpgroup's products, late stores hide behind their own.
    count = 1 if config.schedule == "pingpong" or stores_late(problem, config) else per_cta
    return per_cta * multiply + count * store, per_cta


@functools.lru_cache(maxsize=4096)
def default_config(problem: GemmProblem, few_bits: bool = False) -> tuple[HopperConfig, list[str]]:
    """The candidate of least modelled time, and why.

    few_bits  an operand's values were MX codes: such products need less power, so the chip is not at its limit, and CTAs of small tiles
              drift apart (0.62 to 0.93 of WIDE's rate on one H200)
    """
    tiles = candidates(problem)
    # Few rows leave the others' matrix units idle, whatever their model, which knows no memory, says.
    tiles = tuple(config for config in tiles if config.few_rows) or tiles
    modelled = {config: _seconds(problem, config, few_bits) for config in tiles}
    best = min(modelled, key=lambda config: modelled[config][0])
    seconds, per_cta = modelled[best]
    reasons = [f"least modelled time of {len(modelled)} tiles: {seconds * 1e6:.1f} us, {per_cta} tiles per CTA"]
    for config, (other, _) in modelled.items():
        if config != best and other < 1.1 * seconds:
            reasons.append(f"{config}: {other * 1e6:.1f} us")
    return best, reasons
