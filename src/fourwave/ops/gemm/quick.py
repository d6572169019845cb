"""The short way of a call of `fw.gemm`: eager, of a kind that has run before.

What was found out about a kind (execute.Plan) is looked up by the shapes, strides and types of the tensors and by the
options. Whatever is unusual is left to the long way, which also fills the table.
"""

from __future__ import annotations

import logging
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fourwave.backends import select
from fourwave.backends.base import Relaunch
from fourwave.ops.gemm.check import Arguments, Tensor
from fourwave.ops.gemm.execute import MAX_PLANS, Plan, bump, execute, plan_of
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.transforms import PLAIN, is_special

_logger = select.logger
_STRIDED = torch.strided
MAX_THREADS = 64  # of which an entry keeps launches


class _Entry(NamedTuple):
    plan: Plan
    # Bytes from the first to the last element, 0 of what there is not
    a_extent: int
    b_extent: int
    out_extent: int
    others: tuple[int, int, int]  # bias, a_scale, b_scale
    # Of a new out
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    told: bool  # whether autograd is told that out was written: PyTorch's own operations do that
    # By thread; None where the backend has none. A thread that is gone may leave its number, and its launch, to a later one.
    launches: dict[int, Relaunch] | None


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
    a_scale = b_scale = a_scaling = b_scaling = None
    preshuffled = False
    if type(a) not in PLAIN or type(b) not in PLAIN:
        parts = _apart(a, b, trans_a, trans_b)
        if parts is None:
            return None
        a, a_scale, a_scaling, trans_a, b, b_scale, b_scaling, trans_b, preshuffled = parts
        if type(a) not in PLAIN or type(b) not in PLAIN:
            return None
    # 1.0 and True are one key; the long way refuses one of them.
    if not (type(trans_a) is type(trans_b) is type(accumulate) is type(batch_invariant) is type(fast_accum) is bool):
        return None
    if a.layout is not _STRIDED or b.layout is not _STRIDED or a.is_neg() or b.is_neg():
        return None
    if grad and (a.requires_grad or b.requires_grad):
        return None
    if bias is not None or out is not None or a_scale is not None or b_scale is not None:
        for t in (bias, out, a_scale, b_scale):
            if t is not None and (
                type(t) not in PLAIN or (grad and t.requires_grad) or t.layout is not _STRIDED or t.is_neg()
            ):
                return None
    key = (
        select.requested(None)[0] if backend is None else backend, a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device,
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if a_scale is None else (a_scaling, a_scale.shape, a_scale.stride(), a_scale.dtype, a_scale.device),
        None if b_scale is None else (b_scaling, b_scale.shape, b_scale.stride(), b_scale.dtype, b_scale.device),
        preshuffled, trans_a, trans_b, out_dtype, activation, accumulate, batch_invariant, fast_accum,
    )  # fmt: skip
    try:
        entry = _entries.get(key)
    except TypeError:  # an option of a type that nobody takes
        return None
    if entry is None and a.is_meta:
        return None
    if entry is None or _logger.isEnabledFor(logging.DEBUG):
        args = Arguments(
            a, b, out, bias, a_scale, b_scale, alpha=alpha, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype,
            activation=activation, accumulate=accumulate, a_scaling=a_scaling, b_scaling=b_scaling,
            batch_invariant=batch_invariant, fast_accum=fast_accum, b_preshuffled=preshuffled, backend=backend,
        )  # fmt: skip
        result = execute(args)
        plan = plan_of(args) if entry is None else None
        if plan is not None:
            if len(_entries) >= MAX_PLANS:
                _entries.clear()
            launches: dict[int, Relaunch] | None = {} if plan.backend.relaunches(plan.problem) else None
            told = out is not None and plan.backend.name != "native"
            found = _Entry(
                plan, _extent(a), _extent(b), _extent(out), (_extent(bias), _extent(a_scale), _extent(b_scale)), result.stride(), result.dtype, result.device, told, launches
            )  # fmt: skip
            _entries.setdefault(key, found)  # another thread's of the same kind may have launches by now
        return result
    plan, a_extent, b_extent, out_extent, others, strides, dtype, device, told, launches = entry
    a_start, b_start = a.data_ptr(), b.data_ptr()
    bias_start = 0 if bias is None else bias.data_ptr()
    a_scale_start = 0 if a_scale is None else a_scale.data_ptr()
    b_scale_start = 0 if b_scale is None else b_scale.data_ptr()
    if out is None:
        # Quicker than torch.empty
        result = torch.empty_strided(plan.out_shape, strides, dtype=dtype, device=device)
        start = result.data_ptr()
    else:
        result = out
        start = out.data_ptr()
        end = start + out_extent
        # Perhaps columns of one buffer; the long way tells.
        if (start < a_start + a_extent and a_start < end) or (start < b_start + b_extent and b_start < end):
            return None
        if bias_start or a_scale_start or b_scale_start:
            for other, extent in zip((bias_start, a_scale_start, b_scale_start), others, strict=True):
                if start < other + extent and other < end:
                    return None
    again = None if launches is None else launches.get(get_ident())
    if again is None or not again(
        a_start, b_start, start, bias_start, a_scale_start, b_scale_start, float(alpha)
    ):  # fmt: skip
        problem = plan.problem
        if plan.a_view is not None:
            a = a.view(plan.a_view)
        if plan.b_view is not None:
            b = b.view(plan.b_view)
        target = result if result.dim() == 2 else result.view(problem.M, problem.out_columns)
        tensors = GemmTensors(a, b, target, bias, float(alpha), a_scale, b_scale)
        plan.backend.run_gemm(problem, None, tensors)
        if launches is not None and again is None and (made := plan.backend.relaunch(problem, tensors)) is not None:
            if len(launches) >= MAX_THREADS:
                launches.clear()
            launches[get_ident()] = made
    if told:
        bump((result,))
    return result


def _apart(a: Any, b: Any, trans_a: Any, trans_b: Any) -> tuple[Any, ...] | None:
    """Of both operands codes, scales, kind of scales and how the codes are stored, as api._arguments finds them, and whether b is
    preshuffled; None for what it refuses or looks at more closely."""
    if type(trans_a) is not bool or type(trans_b) is not bool or (trans_a and trans_b):
        return None
    a_scale = b_scale = a_scaling = b_scaling = packed_scale = None
    preshuffled = type(b) is Preshuffled
    if preshuffled:
        if trans_a or not trans_b:
            return None
        packed_scale, b = b.packed_scale, b.weights
    if type(a) is QuantizedTensor:
        if a.row_hadamard is not None or a.column_hadamard is not None:
            return None
        a_scaling = a.format.scaling
        if trans_a:
            a, a_scale, trans_a = a.columnwise_data, a.columnwise_scale, not a.columnwise_transposed
        else:
            a, a_scale = a.data, a.scale
        if a is None or a_scale is None:
            return None
    if type(b) is QuantizedTensor:
        if b.row_hadamard is not None or b.column_hadamard is not None:
            return None
        b_scaling = b.format.scaling
        if trans_b:
            b, b_scale = b.data, b.scale
        else:
            b, b_scale, trans_b = b.columnwise_data, b.columnwise_scale, b.columnwise_transposed
        if b is None or b_scale is None:
            return None
        if packed_scale is not None:
            b_scale = packed_scale
    if trans_a and trans_b:
        return None
    return a, a_scale, a_scaling, trans_a, b, b_scale, b_scaling, trans_b, preshuffled


def _extent(t: Tensor | None) -> int:
    if t is None:
        return 0
    return (sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True)) + 1) * t.element_size()
