"""The short way of a call of `fw.gemm`: eager, plain tensors, of a kind that has run before.

What was found out about a kind (execute.Plan) is looked up by the shapes, strides and types of the tensors and by the
options. Whatever is unusual is left to the long way, which also fills the table.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fourwave.backends import select
from fourwave.ops.gemm.check import Arguments, Tensor
from fourwave.ops.gemm.execute import MAX_PLANS, Plan, bump, execute, plan_of
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.transforms import PLAIN, is_special

_logger = select.logger


class _Entry(NamedTuple):
    plan: Plan
    # Bytes from the first to the last element of each
    a_extent: int
    b_extent: int
    bias_extent: int
    out_extent: int


_entries: dict[Any, _Entry] = {}
select.on_clear(_entries.clear)


def quick(
    a: Any,
    b: Any,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    accumulate: bool,
    out: Tensor | None,
    batch_invariant: bool,
    fast_accum: bool,
    backend: str | None,
) -> Tensor | None:
    """The result, or None where the long way must be gone."""
    if a is None or b is None or is_special() or forward_ad._current_level >= 0:
        return None
    grad = torch.is_grad_enabled()
    if type(alpha) is not float and (type(alpha) is not int or alpha.bit_length() > 64):
        return None
    for t in (a, b, bias, out):
        if t is not None and (
            type(t) not in PLAIN or (grad and t.requires_grad) or t.layout is not torch.strided or t.is_neg()
        ):
            return None
    key = (
        select.requested(backend)[0], a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        trans_a, trans_b, out_dtype, activation, accumulate, batch_invariant, fast_accum,
    )  # fmt: skip
    try:
        entry = _entries.get(key)
    except TypeError:  # an option of a type that nobody takes
        return None
    if entry is None and a.is_meta:
        return None
    if entry is None or _logger.isEnabledFor(logging.DEBUG):
        args = Arguments(
            a, b, out, bias, alpha=alpha, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, activation=activation,
            accumulate=accumulate, batch_invariant=batch_invariant, fast_accum=fast_accum, backend=backend,
        )  # fmt: skip
        result = execute(args)
        plan = plan_of(args) if entry is None else None
        if plan is not None:
            if len(_entries) >= MAX_PLANS:
                _entries.clear()
            _entries[key] = _Entry(plan, *(0 if t is None else _extent(t) for t in (a, b, bias, out)))
        return result
    plan, a_extent, b_extent, bias_extent, out_extent = entry
    if plan.a_view is not None:
        a = a.view(plan.a_view)
    if plan.b_view is not None:
        b = b.view(plan.b_view)
    problem = plan.problem
    result = torch.empty(plan.out_shape, dtype=problem.out_dtype, device=a.device) if out is None else out
    if out is not None:
        low = out.data_ptr()
        high = low + out_extent
        for t, extent in ((a, a_extent), (b, b_extent), (bias, bias_extent)):
            if t is not None and low < t.data_ptr() + extent and t.data_ptr() < high:
                return None  # perhaps columns of one buffer; the long way tells
    target = result if result.dim() == 2 else result.view(problem.M, problem.out_columns)
    plan.backend.run_gemm(problem, None, GemmTensors(a, b, target, bias, float(alpha)))
    if out is not None and plan.backend.name != "native":
        bump((out,))
    return result


def _extent(t: Tensor) -> int:
    return (sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True)) + 1) * t.element_size()
