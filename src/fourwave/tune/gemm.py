"""Which GemmConfig runs fastest, found by running them once for each kind of problem.

What a call without a config runs: a winner that was timed, the table tuned_cdna.py, the model's choice, in this order; the
last two are default_config. A problem that asks for batch_invariant is never tuned: what was timed for a class of M could
split K, or differ between two classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from fourwave import env
from fourwave.ops.gemm import tuned_cdna
from fourwave.ops.gemm.config import (
    GemmConfig,
    candidates_for,
    default_config,
    modelled_time,
    split_candidates,
    why_unsupported,
)
from fourwave.ops.gemm.problem import FLOAT8, GemmProblem, GemmTensors
from fourwave.tune import search
from fourwave.tune.cache import WinnerCache

MOST = 8  # candidates that are run: each is compiled first
SLOWEST = 3.0  # times the least modelled time; the model is not measured, so it rules out only what is far off
MAX_KNOWN = 4096  # sizes that change with every batch must not fill the memory
_WRITTEN = ("out", "preactivation", "bias_grad", "out_amax", "out_columnwise", "out_columnwise_scale")

Measure = Callable[[GemmConfig], float]

_known: dict[tuple[GemmProblem, str], GemmConfig] = {}  # what config_for has answered


def key_of(problem: GemmProblem, arch: str) -> dict[str, Any]:
    """What a winner is kept for: everything of a problem, M rounded up to a power of two."""
    kind = {each.name: _plain(getattr(problem, each.name)) for each in fields(problem) if each.name not in _NOT_IN_KEY}
    key = {"op": "gemm", "arch": arch, "kernels": search.kernel_version("gemm"), "rows": search.next_power(problem.M)}
    return {**key, **kind, "fixed_split": fixed_split(problem, arch)}


_NOT_IN_KEY = ("M", "device_type", "batch_invariant", "fast_accum")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, torch.dtype) else value


def fixed_split(problem: GemmProblem, arch: str) -> int | None:
    """Parts of K that only the model chooses: of two 8-bit floats in TN, whose b may be preshuffled or not and gives the
    same bits. None: it may be tuned."""
    if problem.layout == "TN" and problem.a_dtype in FLOAT8 and problem.b_dtype in FLOAT8:
        return default_config(problem, arch)[0].split_k
    return None


def pruned(problem: GemmProblem, arch: str) -> list[GemmConfig]:
    """Candidates worth a run: the default, then those of the least modelled times, with K split and without."""
    default = default_config(problem, arch)[0]
    configs = candidates_for(problem, arch)
    if arch == "gfx1250":  # few, and not modelled
        return list(dict.fromkeys((default, *configs)))
    if (split := fixed_split(problem, arch)) is not None:
        configs = [replace(config, split_k=split) for config in configs]
    else:
        configs = [each for config in configs for each in (config, *split_candidates(problem, config, arch))]
    supported = [config for config in configs if why_unsupported(problem, config, arch) is None]
    times = {config: modelled_time(problem, config, arch) for config in (default, *supported)}
    limit = SLOWEST * min(times.values())
    near = sorted((config for config in times if times[config] <= limit), key=times.__getitem__)
    return list(dict.fromkeys((default, *near)))[:MOST]


def choose(
    problem: GemmProblem, arch: str, measure: Measure, *, store: WinnerCache | None = None, capturing: bool = False
) -> GemmConfig:
    """As search.choose; default_config where batch_invariant is asked for."""
    if problem.batch_invariant:
        return default_config(problem, arch)[0]
    return search.choose(
        key_of(problem, arch),
        read=lambda winner: _config(winner, problem, arch),
        candidates=lambda: pruned(problem, arch),
        default=lambda: default_config(problem, arch)[0],
        measure=measure,
        store=store,
        capturing=capturing,
    )


def _config(winner: dict[str, Any] | None, problem: GemmProblem, arch: str) -> GemmConfig | None:
    """A stored winner that this version can run for this problem, or None."""
    if winner is None:
        return None
    try:
        config = GemmConfig(**winner)
        if why_unsupported(problem, config, arch) is not None:
            return None
    except TypeError:
        return None
    return config if fixed_split(problem, arch) in (None, config.split_k) else None


def measure_on_gpu(problem: GemmProblem, arch: str, tensors: GemmTensors) -> Measure:
    """search.median_seconds of the kernel, into outputs of its own with the same strides."""
    from fourwave.ops.gemm import amd

    def measure(config: GemmConfig) -> float:
        scratch = tensors._replace(**_scratch(problem, tensors))
        return search.median_seconds(lambda: amd.run(problem, config, arch, scratch))

    return measure


def _scratch(problem: GemmProblem, tensors: GemmTensors) -> dict[str, Any]:
    written = (*_WRITTEN, *(("out_scale",) if problem.out_scaling == "1x32" else ()))
    scratch = {}
    for name in written:
        if (given := getattr(tensors, name)) is not None:
            scratch[name] = given.new_empty_strided(given.shape, given.stride())
            if problem.accumulate:  # read as well
                scratch[name].zero_()
    return scratch


def config_for(problem: GemmProblem, arch: str, tensors: GemmTensors) -> GemmConfig:
    """What a call without a config runs: default_config unless FOURWAVE_AUTOTUNE=1."""
    if not _tuned(problem):
        return default_config(problem, arch)[0]
    if (known := _known.get((problem, arch))) is not None:
        return known
    capturing = torch.cuda.is_current_stream_capturing()
    config = choose(problem, arch, measure_on_gpu(problem, arch, tensors), capturing=capturing)
    if not capturing:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[problem, arch] = config
    return config


def described(problem: GemmProblem, arch: str) -> tuple[GemmConfig, list[str]]:
    """The config that config_for would answer, and the reasons in words. Times nothing: without a winner the default."""
    config, reasons = default_config(problem, arch)
    if not env.autotune():
        return config, reasons
    if problem.batch_invariant:
        return config, [*reasons, "batch_invariant: not tuned, so that nothing that was timed for some M decides"]
    if (winner := _winner(problem, arch)) is None:
        count = len(pruned(problem, arch))
        return config, [*reasons, f"FOURWAVE_AUTOTUNE=1: no winner yet; the next call times {count} candidate(s)"]
    kind = tuned_cdna.key(problem, arch)
    told = [f"FOURWAVE_AUTOTUNE=1: the fastest of the candidates that were timed on {arch} for {kind}"]
    if (split := fixed_split(problem, arch)) is not None:
        told.append(f"K in {split} part(s), not tuned: weights give the same bits preshuffled or not")
    told.append("as by default" if winner == config else f"by default {config}: {reasons[0]}")
    return winner, told


def chosen(problem: GemmProblem, arch: str) -> GemmConfig:
    """The config of `described`."""
    return (_winner(problem, arch) if _tuned(problem) else None) or default_config(problem, arch)[0]


def _tuned(problem: GemmProblem) -> bool:
    return env.autotune() and not problem.batch_invariant


def _winner(problem: GemmProblem, arch: str) -> GemmConfig | None:
    return _known.get((problem, arch)) or _config(search.cache().get(key_of(problem, arch)), problem, arch)
