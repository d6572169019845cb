"""Which GroupedConfig runs fastest, found by running them once for each kind of problem."""

from __future__ import annotations

import functools
import hashlib
import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fourwave import env
from fourwave.ops.grouped_gemm.config import (
    GroupedConfig,
    candidates,
    default_config,
    expected_tiles,
    split_of,
    why_unsupported,
)
from fourwave.ops.grouped_gemm.problem import ROWS, GroupedProblem, GroupedTensors
from fourwave.tune.cache import WinnerCache

logger = logging.getLogger("fourwave.tune")
WARMUPS, SAMPLES = 3, 7

Measure = Callable[[GroupedConfig], float]


@functools.lru_cache(maxsize=1)
def cache() -> WinnerCache:
    return WinnerCache(env.cache_dir() / "tune")


@functools.lru_cache(maxsize=1)
def kernel_version() -> str:
    """Changes with every change of the kernels' source."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("blocks/flydsl", "ops/grouped_gemm"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def key_of(problem: GroupedProblem, arch: str) -> dict[str, Any]:
    """What a winner is kept for: sizes that m_sizes does not change, rows and groups rounded up to powers of two."""
    rows = "M" if problem.split == ROWS else "K"
    fixed = {name: getattr(problem, name) for name in ("M", "N", "K") if name != rows}
    return {
        "op": "grouped_gemm", "arch": arch, "kernels": kernel_version(), "rows": _next_power(problem.rows),
        "groups": _next_power(problem.G), **fixed, "split": problem.split, "layout": problem.layout,
        "b_preshuffled": problem.b_preshuffled, "a": str(problem.a_dtype), "b": str(problem.b_dtype), "out": str(problem.out_dtype),
        "a_scaling": problem.a_scaling, "b_scaling": problem.b_scaling, "accumulate": problem.accumulate,
    }  # fmt: skip


def _next_power(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def pruned(problem: GroupedProblem, arch: str) -> list[GroupedConfig]:
    """Candidates worth a run: no tile of which three quarters or more would be rows that do not exist; where tiles are few, also
    with K split."""
    configs = candidates(problem, arch)
    kept = [config for config in configs if config.tile_m < 4 * problem.M] or configs[-1:]
    split = [
        replace(config, split_k=parts)
        for config in kept
        if (parts := split_of(problem, config, arch, expected_tiles(problem, config))) > 1
    ]
    return kept + split


def choose(
    problem: GroupedProblem, arch: str, measure: Measure, *, store: WinnerCache | None = None, capturing: bool = False
) -> GroupedConfig:
    """The winner for problem: from the cache, or the fastest of the candidates by `measure` (seconds).

    capturing: a graph is being captured, in which nothing may be run: a winner that is in memory, or the default.
    """
    store = store or cache()
    key = key_of(problem, arch)
    if capturing:
        return _config(store.in_memory(key), problem, arch) or default_config(problem, arch)[0]
    if (known := _config(store.get(key), problem, arch)) is not None:
        return known
    with store.searching(key):
        if (known := _config(store.get(key), problem, arch)) is not None:
            return known
        times: dict[GroupedConfig, float] = {}
        for config in pruned(problem, arch):
            try:
                times[config] = measure(config)
            except (RuntimeError, NotImplementedError) as error:
                logger.warning("%s of %s cannot be timed: %s", config, problem, error)
        if not times:
            return default_config(problem, arch)[0]
        best = min(times, key=times.__getitem__)
        logger.info("%s: %s, %.3g s, of %d", problem, best, times[best], len(times))
        store.put(key, asdict(best))
        return best


def _config(winner: dict[str, Any] | None, problem: GroupedProblem, arch: str) -> GroupedConfig | None:
    """A stored winner that this version can run for this problem, or None."""
    if winner is None:
        return None
    try:
        config = GroupedConfig(**winner)
        return config if why_unsupported(problem, config, arch) is None else None
    except TypeError:
        return None


def measure_on_gpu(problem: GroupedProblem, arch: str, tensors: GroupedTensors) -> Measure:
    """Median seconds of the kernel by the device's events, into an output of its own."""
    from fourwave.ops.grouped_gemm import amd

    def measure(config: GroupedConfig) -> float:
        scratch = tensors._replace(out=torch.zeros_like(tensors.out))
        for _ in range(WARMUPS):
            amd.run(problem, config, arch, scratch)
        times = []
        for _ in range(SAMPLES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            amd.run(problem, config, arch, scratch)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)

    return measure


def config_for(problem: GroupedProblem, arch: str, tensors: GroupedTensors) -> GroupedConfig | None:
    """What a call without a config runs: None (the default) unless FOURWAVE_AUTOTUNE=1."""
    if not env.autotune():
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    kind = replace(problem, fast_accum=False)
    return choose(kind, arch, measure_on_gpu(problem, arch, tensors), capturing=capturing)
