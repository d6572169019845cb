"""Runs a checked call on the backend that was chosen for it."""

from __future__ import annotations

import logging

import torch

from fourwave.backends import select
from fourwave.backends.native import finish
from fourwave.ops.gemm.check import Arguments, Tensor, check, check_overlap, matrix
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

_logger = select.logger


def execute(args: Arguments) -> Tensor:
    """The whole of an eager call. Returns out, or the columnwise codes where those alone are asked for."""
    problem, tensors, shape, notes = check(args)
    selection = select.select(select.requested(args.backend)[0], problem, args.config)
    check_overlap(args)
    result = args.out
    if result is None and args.out_columnwise is None:
        target = torch.empty((problem.M, problem.out_columns), dtype=problem.out_dtype, device=args.a.device)
        result = target if len(shape) == 2 else target.view(shape)
        tensors = tensors._replace(out=target)
    # What is written through a copy, because its rows are not contiguous: (argument, copy)
    copies = []
    for name in ("out", "preactivation", "out_columnwise"):
        given = getattr(args, name)
        if given is None:
            continue
        target = matrix(given, problem.M, name, notes)
        tensors = tensors._replace(**{name: target})  # type: ignore[arg-type]
        if target.numel() and target.data_ptr() != given.data_ptr():
            copies.append((given, target))
    if problem.is_empty:
        _empty(problem, tensors)
    else:
        notes = notes + selection.backend.run_gemm(problem, args.config, tensors)
        if selection.backend.name != "native":
            # A kernel writes through a pointer, which autograd does not see: it must know that saved values are gone.
            for given in (args.out, args.preactivation, args.bias_grad):
                if given is not None and not given.is_inference():
                    torch.autograd.graph.increment_version(given)
    for given, target in copies:
        given.copy_(target.view(given.shape))
    if _logger.isEnabledFor(logging.DEBUG):
        select.log(selection, problem, args.config, notes)
    result = result if result is not None else args.out_columnwise
    assert result is not None
    return result


def _empty(problem: GemmProblem, tensors: GemmTensors) -> None:
    """The answer where there is nothing to multiply: act(0 + bias) (+ out), and what else is written."""
    if problem.M == 0 or problem.N == 0:
        for written in (tensors.out_amax, None if problem.accumulate else tensors.bias_grad):
            if written is not None:
                written.zero_()
        return
    acc = torch.zeros((problem.M, problem.N), dtype=torch.float32, device=tensors.a.device)
    finish(problem, acc, tensors)
