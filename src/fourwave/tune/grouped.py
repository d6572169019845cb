"""Which GroupedConfig runs fastest, found by running them once for each kind of problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from fourwave.tune import search
from fourwave.tune.cache import WinnerCache

Measure = Callable[[GroupedConfig], float]


def key_of(problem: GroupedProblem, arch: str) -> dict[str, Any]:
    """What a winner is kept for: sizes that m_sizes does not change, rows and groups rounded up to powers of two."""
    rows = "M" if problem.split == ROWS else "K"
    fixed = {name: getattr(problem, name) for name in ("M", "N", "K") if name != rows}
    return {
        "op": "grouped_gemm", "arch": arch, "kernels": search.kernel_version("grouped_gemm"), "rows": search.next_power(problem.rows),
        "groups": search.next_power(problem.G), **fixed, "split": problem.split, "layout": problem.layout,
        "b_preshuffled": problem.b_preshuffled, "a": str(problem.a_dtype), "b": str(problem.b_dtype), "out": str(problem.out_dtype),
        "a_scaling": problem.a_scaling, "b_scaling": problem.b_scaling, "accumulate": problem.accumulate,
    }  # fmt: skip


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
    """As search.choose."""
    return search.choose(
        key_of(problem, arch),
        read=lambda winner: _config(winner, problem, arch),
        candidates=lambda: pruned(problem, arch),
        default=lambda: default_config(problem, arch)[0],
        measure=measure,
        store=store,
        capturing=capturing,
    )


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
    """search.median_seconds of the kernel, into an output of its own."""
    from fourwave.ops.grouped_gemm import amd

    def measure(config: GroupedConfig) -> float:
        scratch = tensors._replace(out=torch.zeros_like(tensors.out))
        return search.median_seconds(lambda: amd.run(problem, config, arch, scratch))

    return measure


def config_for(problem: GroupedProblem, arch: str, tensors: GroupedTensors) -> GroupedConfig | None:
    """What a call without a config runs: None (the default) unless FOURWAVE_AUTOTUNE=1."""
    if not env.autotune():
        return None
    capturing = torch.cuda.is_current_stream_capturing()
    kind = replace(problem, fast_accum=False)
    return choose(kind, arch, measure_on_gpu(problem, arch, tensors), capturing=capturing)
