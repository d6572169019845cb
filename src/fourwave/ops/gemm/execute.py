"""Runs a call on the backend that was chosen for it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch

from fourwave.backends import select
from fourwave.backends.base import Backend
from fourwave.backends.native import finish, write_bias_grad
from fourwave.ops.gemm.check import NUM_TENSORS, Arguments, Tensor, check, check_overlap, matrix
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

_logger = select.logger
_OUTPUTS = ("out", "preactivation", "out_columnwise")  # matrices; the other outputs are contiguous


@dataclass(frozen=True)
class Plan:
    """What checking a call has found, for later calls with tensors of the same shapes, strides and types."""

    problem: GemmProblem
    backend: Backend
    out_shape: tuple[int, ...]
    # Shapes that a and b are viewed with, or None
    a_view: tuple[int, int] | None
    b_view: tuple[int, int] | None


_plans: dict[Any, Plan] = {}
_lock = threading.Lock()
MAX_PLANS = 4096  # sizes that change with every batch must not fill the memory
select.on_clear(_plans.clear)


def execute(args: Arguments) -> Tensor:
    """The whole of an eager call. Returns out, or the columnwise codes where those alone are asked for."""
    spec = select.requested(args.backend)[0]
    token = _token(spec, args)
    plan = None if token is None else _plans.get(token)
    if plan is None or _logger.isEnabledFor(logging.DEBUG):
        return _execute(args, spec, token)
    given: tuple[Any, ...] = args[:NUM_TENSORS]
    a, b, out, bias, a_scale, b_scale, preactivation, bias_grad, *rest = given
    if any(t is not None for t in (out, preactivation, bias_grad, *rest)):
        check_overlap(args)
    if plan.a_view is not None:
        a = a.view(plan.a_view)
    if plan.b_view is not None:
        b = b.view(plan.b_view)
    problem = plan.problem
    if out is None and rest[2] is None:
        out = torch.empty(plan.out_shape, dtype=problem.out_dtype, device=a.device)
    target = out if out is None or out.dim() == 2 else out.view(problem.M, problem.out_columns)
    tensors = GemmTensors(a, b, target, bias, float(args.alpha), a_scale, b_scale, preactivation, bias_grad, *rest)
    plan.backend.run_gemm(problem, args.config, tensors)
    if plan.backend.name != "native":
        bump((args.out, args.preactivation, args.bias_grad))
    result = out if out is not None else args.out_columnwise
    assert result is not None
    return result


def _token(spec: str, args: Arguments) -> Any:
    """What a plan is kept under, or None for arguments that will be refused or copied."""
    flags = args.trans_a, args.trans_b, args.accumulate, args.batch_invariant, args.fast_accum
    if any(type(flag) is not bool for flag in flags):
        return None  # 1.0 and np.True_, which check refuses, are found under True
    key: list[Any] = [spec, args[NUM_TENSORS + 1 :]]
    tensors: tuple[Any, ...] = args[:NUM_TENSORS]
    for t in tensors:
        if t is None:
            key.append(None)
        elif t.layout is torch.strided and not t.is_neg():
            key += (t.shape, t.stride(), t.dtype, t.device)
        else:
            return None
    token = tuple(key)
    try:
        hash(token)
    except TypeError:
        return None
    return token


def plan_of(args: Arguments) -> Plan | None:
    """The plan that `execute` has kept for such a call, if it is one of those that need no copies."""
    return _plans.get(_token(select.requested(args.backend)[0], args))


def bump(written_tensors: tuple[Tensor | None, ...]) -> None:
    """A kernel writes through a pointer: autograd must know that values saved for a backward pass are gone."""
    for written in written_tensors:
        if written is not None and not written.is_inference():
            torch.autograd.graph.increment_version(written)


def _execute(args: Arguments, spec: str, token: Any) -> Tensor:
    """A call of a kind not seen before, or one that needs copies; token: key of the plan to keep."""
    problem, tensors, shape, notes = check(args)
    selection = select.select(spec, problem, args.config)
    check_overlap(args)
    result = args.out
    if result is None and args.out_columnwise is None:
        target = torch.empty((problem.M, problem.out_columns), dtype=problem.out_dtype, device=args.a.device)
        result = target if len(shape) == 2 else target.view(shape)
        tensors = tensors._replace(out=target)
    # What is written through a copy, because its rows are not contiguous: (argument, copy)
    copies = []
    for name in _OUTPUTS:
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
        _keep_plan(token, args, problem, tensors, shape, selection.backend, bool(notes or copies))
        notes = notes + selection.backend.run_gemm(problem, args.config, tensors)
        if selection.backend.name != "native":
            bump((args.out, args.preactivation, args.bias_grad))
    for given, target in copies:
        given.copy_(target.view(given.shape))
    if _logger.isEnabledFor(logging.DEBUG):
        select.log(selection, problem, args.config, notes)
    result = result if result is not None else args.out_columnwise
    assert result is not None
    return result


def _keep_plan(
    token: Any,
    args: Arguments,
    problem: GemmProblem,
    tensors: GemmTensors,
    shape: tuple[int, ...],
    backend: Backend,
    copied: bool,
) -> None:
    """Remember a call whose tensors go to the backend as they are, or as views of two dimensions."""
    if token is None or copied:
        return
    for name in ("bias", "a_scale", "b_scale", "preactivation", "bias_grad", "out_columnwise"):
        if getattr(args, name) is not getattr(tensors, name):
            return
    out = args.out
    if out is not None and tensors.out is not out and (out.dim() == 2 or not out.is_contiguous()):
        return
    views = []
    for given, taken in ((args.a, tensors.a), (args.b, tensors.b)):
        if given is not taken and not given.is_contiguous():
            return
        views.append(None if given is taken else tuple(taken.shape))
    with _lock:
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[token] = Plan(problem, backend, shape, *views)  # type: ignore[arg-type]


def _empty(problem: GemmProblem, tensors: GemmTensors) -> None:
    """The answer where there is nothing to multiply: act(0 + bias) (+ out), and what else is written."""
    if problem.M == 0 or problem.N == 0:
        if tensors.out_amax is not None:
            tensors.out_amax.zero_()
        write_bias_grad(problem, tensors)
        return
    acc = torch.zeros((problem.M, problem.N), dtype=torch.float32, device=tensors.a.device)
    finish(problem, acc, tensors)
