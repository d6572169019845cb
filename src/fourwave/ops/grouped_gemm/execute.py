"""Chooses the backend of a checked grouped call, and runs it there."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

import torch

from fourwave.backends import registry, select
from fourwave.backends.select import Selection
from fourwave.errors import BackendUnavailable
from fourwave.ops.grouped_gemm.check import GroupedArguments, Tensor, check
from fourwave.ops.grouped_gemm.problem import ROWS, GroupedProblem, GroupedTensors

if TYPE_CHECKING:
    from fourwave.backends.base import Backend
    from fourwave.ops.grouped_gemm.config import GroupedConfig


def execute(args: GroupedArguments) -> Tensor:
    """The whole of an eager call; returns out."""
    problem, tensors, notes = check(args)
    selection = choose(select.requested(args.backend)[0], problem, args.config)
    out = args.out
    if out is None:
        out = torch.empty(problem.out_shape, dtype=problem.out_dtype, device=args.a.device)
    target = writable(out)
    if target is not out:
        notes.append(through_a_copy(out))
    tensors = tensors._replace(out=target)
    if problem.is_empty:
        empty(problem, tensors)
    else:
        notes = notes + selection.backend.run_grouped_gemm(problem, args.config, tensors)
        if args.out is not None and selection.backend.name != "native" and not args.out.is_inference():
            # A kernel writes through a pointer, which autograd does not see: it must know that saved values are gone.
            torch.autograd.graph.increment_version(args.out)
    if target is not out:
        out.copy_(target)
    if select.logger.isEnabledFor(logging.DEBUG):
        words = [f"not {name}: {why}" for name, why in selection.rejected] + notes
        select.logger.debug("grouped_gemm %s: %s", problem, "; ".join([selection.backend.name, *words]))
    return out


def writable(out: Tensor) -> Tensor:
    """out, or a copy where it is a negated view or its rows are not contiguous."""
    out = out.resolve_neg()
    inner = out.stride(-1) == 1 or out.shape[-1] == 1
    rows = out.shape[-2] == 1 or out.stride(-2) >= out.shape[-1]
    return out if out.numel() == 0 or (inner and rows) else out.clone(memory_format=torch.contiguous_format)


def through_a_copy(out: Tensor) -> str:
    why = "it is a negated view" if out.is_neg() else f"strides {out.stride()}"
    return f"out written through a copy: {why}"


def empty(problem: GroupedProblem, tensors: GroupedTensors) -> None:
    """The answer where there is nothing to multiply: zeros, or bias (K = 0), or the addend."""
    if problem.split != ROWS:
        if not problem.accumulate:
            tensors.out.zero_()
        return
    tensors.out.zero_()
    if tensors.bias is not None and problem.G and tensors.out.numel():
        ends = tensors.m_sizes.clamp(min=0).cumsum(0)
        group = torch.searchsorted(ends, torch.arange(problem.M, device=ends.device), right=True)
        row_bias = tensors.bias[group.clamp(max=problem.G - 1)]
        tensors.out.copy_(torch.where((group < problem.G)[:, None], row_bias.to(tensors.out.dtype), tensors.out))


@functools.lru_cache(maxsize=4096)
def choose(spec: str, problem: GroupedProblem, config: GroupedConfig | None) -> Selection:
    """As backends.select.select, for grouped problems."""
    asked = select.parse(spec)[problem.precision]
    if asked != select.AUTO:
        backend = registry.get(asked)
        if why := backend.unavailable():
            raise BackendUnavailable(f"backend {asked!r} was asked for and cannot run here: {why}")
        if why := _why_unsupported(backend, problem, config):
            raise NotImplementedError(f"backend {asked!r} was asked for and cannot run {problem}: {why}")
        return Selection(backend, asked, ())
    rejected: list[tuple[str, str]] = []
    for name in select._AUTO_ORDER:
        if (why := why_not(name, problem, config)) is None:
            return Selection(registry.get(name), asked, tuple(rejected))
        rejected.append((name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise NotImplementedError(f"no backend can run {problem}. {reasons}")


select.on_clear(choose.cache_clear)


def _why_unsupported(backend: Backend, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
    return None if problem.is_empty else backend.why_grouped_unsupported(problem, config)


def why_not(name: str, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
    """Why backend `name` cannot run `problem` here, or None when it can."""
    backend = registry.get(name)
    return backend.unavailable_to(problem.device_type) or _why_unsupported(backend, problem, config)
