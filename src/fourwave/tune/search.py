"""What every tuner shares: a winner from the cache, or the fastest of a few configs, run once for each key."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from fourwave import env
from fourwave.tune.cache import WinnerCache

logger = logging.getLogger("fourwave.tune")
WARMUPS, SAMPLES = 3, 7

C = TypeVar("C")


@functools.lru_cache(maxsize=1)
def cache() -> WinnerCache:
    return WinnerCache(env.cache_dir() / "tune")


@functools.lru_cache(maxsize=8)
def kernel_version(operation: str) -> str:
    """Changes with every change of the source of an operation's kernels and of FlyDSL's version; operation: its folder."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(_compiler_version().encode())
    for folder in ("blocks/flydsl", f"ops/{operation}"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler_version() -> str:
    try:
        return importlib.metadata.version("flydsl")
    except importlib.metadata.PackageNotFoundError:
        return ""  # nothing is timed without it


def next_power(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def choose(
    key: dict[str, Any],
    *,
    read: Callable[[dict[str, Any] | None], C | None],
    candidates: Callable[[], Sequence[C]],
    default: Callable[[], C],
    measure: Callable[[C], float],
    store: WinnerCache | None,
    capturing: bool,
) -> C:
    """The winner for key: from the cache, or the fastest of the candidates by `measure` (seconds); default where none runs.

    read: the config of a stored winner, or None where it cannot be used.
    capturing: a graph is being captured, in which nothing may be run: a winner that is in memory, or the default.
    """
    store = store or cache()
    if capturing:
        return read(store.in_memory(key)) or default()
    if (known := read(store.get(key))) is not None:
        return known
    with store.searching(key):
        if (known := read(store.get(key))) is not None:
            return known
        times: dict[C, float] = {}
        for config in candidates():
            try:
                times[config] = measure(config)
            except (RuntimeError, NotImplementedError) as error:
                logger.warning("%s of %s cannot be timed: %s", config, key, error)
        if not times:
            return default()
        best = min(times, key=times.__getitem__)
        logger.info("%s: %s, %.3g s, of %d", key, best, times[best], len(times))
        store.put(key, asdict(best))  # type: ignore[call-overload]
        return best


def median_seconds(launch: Callable[[], object]) -> float:
    """Median seconds of a launch on the current stream, by the device's events."""
    for _ in range(WARMUPS):
        launch()
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
