"""The operators torch.ops.fourwave.grouped_gemm, grouped_gemm_wgrad (differentiable, functional) and grouped_gemm_out."""

from __future__ import annotations

from typing import Any

import torch

from fourwave.backends import select
from fourwave.ops.gemm.operators import register_flops
from fourwave.ops.grouped_gemm.check import GroupedArguments, Tensor, fake_result, sizes
from fourwave.ops.grouped_gemm.execute import execute
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS


def _grouped_gemm(
    a: Tensor,
    b: Tensor,
    m_sizes: Tensor,
    bias: Tensor | None = None,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    a_scale_layout: str = "rows",
    b_preshuffled: bool = False,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Tensor:
    return execute(
        GroupedArguments(
            a,
            b,
            m_sizes,
            ROWS,
            (True, trans_b),
            out_dtype,
            bias,
            False,
            None,
            a_scale,
            b_scale,
            a_scaling,
            b_scaling,
            a_scale_layout,
            b_preshuffled,
            fast_accum,
            None,
            backend,
        )
    )


_gemm_op = torch.library.custom_op("fourwave::grouped_gemm", _grouped_gemm, mutates_args=())


@_gemm_op.register_fake
def _grouped_gemm_fake(
    a: Tensor,
    b: Tensor,
    m_sizes: Tensor,
    bias: Tensor | None = None,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    a_scale_layout: str = "rows",
    b_preshuffled: bool = False,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Tensor:
    return fake_result(
        GroupedArguments(
            a, b, m_sizes, ROWS, (True, trans_b), out_dtype, bias, False, None, a_scale, b_scale, a_scaling, b_scaling,
            a_scale_layout, b_preshuffled, fast_accum, None, backend,
        )
    )  # fmt: skip


def _wgrad(
    dout: Tensor,
    x: Tensor,
    m_sizes: Tensor,
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
    dout_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dout_scaling: str | None = None,
    x_scaling: str | None = None,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Tensor:
    return execute(
        GroupedArguments(
            dout,
            x,
            m_sizes,
            REDUCTION,
            (transposed, transposed),
            out_dtype,
            None,
            False,
            None,
            dout_scale,
            x_scale,
            dout_scaling,
            x_scaling,
            fast_accum=fast_accum,
            backend=backend,
        )
    )


_wgrad_op = torch.library.custom_op("fourwave::grouped_gemm_wgrad", _wgrad, mutates_args=())


@_wgrad_op.register_fake
def _wgrad_fake(
    dout: Tensor,
    x: Tensor,
    m_sizes: Tensor,
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
    dout_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dout_scaling: str | None = None,
    x_scaling: str | None = None,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Tensor:
    return fake_result(
        GroupedArguments(
            dout, x, m_sizes, REDUCTION, (transposed, transposed), out_dtype, None, False, None, dout_scale, x_scale, dout_scaling,
            x_scaling, fast_accum=fast_accum, backend=backend,
        )
    )  # fmt: skip


def _out(
    a: Tensor,
    b: Tensor,
    m_sizes: Tensor,
    out: Tensor,
    split: str,
    a_k_last: bool,
    b_k_last: bool,
    bias: Tensor | None = None,
    accumulate: bool = False,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    a_scale_layout: str = "rows",
    b_preshuffled: bool = False,
    fast_accum: bool = False,
    backend: str | None = None,
) -> None:
    execute(
        GroupedArguments(
            a,
            b,
            m_sizes,
            split,
            (a_k_last, b_k_last),
            None,
            bias,
            accumulate,
            out,
            a_scale,
            b_scale,
            a_scaling,
            b_scaling,
            a_scale_layout,
            b_preshuffled,
            fast_accum,
            None,
            backend,
        )
    )


_out_op = torch.library.custom_op("fourwave::grouped_gemm_out", _out, mutates_args=("out",))


@_out_op.register_fake
def _out_fake(
    a: Tensor,
    b: Tensor,
    m_sizes: Tensor,
    out: Tensor,
    split: str,
    a_k_last: bool,
    b_k_last: bool,
    bias: Tensor | None = None,
    accumulate: bool = False,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    a_scale_layout: str = "rows",
    b_preshuffled: bool = False,
    fast_accum: bool = False,
    backend: str | None = None,
) -> None:
    fake_result(
        GroupedArguments(
            a, b, m_sizes, split, (a_k_last, b_k_last), None, bias, accumulate, out, a_scale, b_scale, a_scaling, b_scaling,
            a_scale_layout, b_preshuffled, fast_accum, None, backend,
        )
    )  # fmt: skip


# ---- cost ------------------------------------------------------------------------------------------------------------


def register_grouped_flops() -> None:
    """2 M N K, with all rows, those past the last group, too: their number is not read on the host."""
    o = torch.ops.fourwave
    register_flops(
        (o.grouped_gemm, _gemm_flops), (o.grouped_gemm_wgrad, _wgrad_flops), (o.grouped_gemm_out, _out_flops)
    )


def _gemm_flops(
    a: Tensor, b: Tensor, m_sizes: Tensor, bias: Tensor | None = None, trans_b: bool = True, *_: Any, **__: Any
) -> int:
    return _out_flops(a, b, m_sizes, None, ROWS, True, trans_b)


def _wgrad_flops(
    dout: Tensor,
    x: Tensor,
    m_sizes: Tensor,
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
    *_: Any,
    **__: Any,
) -> int:
    return _out_flops(dout, x, m_sizes, None, REDUCTION, transposed, transposed)


def _out_flops(
    a: Tensor,
    b: Tensor,
    m_sizes: Tensor,
    out: Tensor | None,
    split: str,
    a_k_last: bool,
    b_k_last: bool,
    *_: Any,
    **__: Any,
) -> int:
    _groups, m, n, k = sizes(GroupedArguments(a, b, m_sizes, split, (a_k_last, b_k_last)))
    return 2 * m * n * k


# ---- gradients -------------------------------------------------------------------------------------------------------


def group_of_rows(m_sizes: Tensor, rows: int) -> Tensor:
    """Group of each row, [rows]; the number of groups for rows past the last. Reads nothing on the host."""
    return torch.searchsorted(m_sizes.clamp(min=0).cumsum(0), torch.arange(rows, device=m_sizes.device), right=True)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, m_sizes, bias, trans_b = inputs[:5]
    ctx.save_for_backward(a, b, m_sizes, bias)
    ctx.trans_b, ctx.fast_accum = trans_b, inputs[12]
    ctx.scaled = inputs[6] is not None or inputs[7] is not None
    # The backward pass may run in another thread, after a `with use_backend` block has ended: keep the choice.
    ctx.backend = inputs[13] if torch.compiler.is_compiling() else select.requested(inputs[13])[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """da = dout @ b[g] (dgrad);  db[g] = dout.T @ a over the group's rows (wgrad);  dbias[g] = dout summed over them."""
    a, b, m_sizes, bias = ctx.saved_tensors
    if ctx.scaled:
        raise RuntimeError("quantized operands have no gradient: detach them")
    da = db = dbias = None
    dout = grad.to(a.dtype)
    if ctx.needs_input_grad[0]:
        da = torch.ops.fourwave.grouped_gemm(dout, b, m_sizes, None, not ctx.trans_b, a.dtype, backend=ctx.backend)
    if ctx.needs_input_grad[1]:
        left, right = (dout, a) if ctx.trans_b else (a, dout)
        db = torch.ops.fourwave.grouped_gemm_wgrad(left, right, m_sizes, b.dtype, backend=ctx.backend)
    if bias is not None and ctx.needs_input_grad[3]:
        sums = grad.new_zeros((bias.shape[0] + 1, bias.shape[1]), dtype=torch.float32)
        dbias = sums.index_add(0, group_of_rows(m_sizes, grad.shape[0]), grad.float())[:-1].to(bias.dtype)
    return da, db, None, dbias, *[None] * 10


torch.library.register_autograd("fourwave::grouped_gemm", _backward, setup_context=_setup)


def _wgrad_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dout, x, m_sizes = inputs[:3]
    ctx.save_for_backward(dout, x, m_sizes)
    ctx.plain = inputs[5] is None and inputs[6] is None and not inputs[4]
    ctx.backend = inputs[10] if torch.compiler.is_compiling() else select.requested(inputs[10])[0]


def _wgrad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With w'[g] = dout.T @ x: ddout = x @ grad[g].T, dx = dout @ grad[g]."""
    dout, x, m_sizes = ctx.saved_tensors
    if not ctx.plain:
        raise RuntimeError("quantized operands have no gradient: detach them")
    grad = grad.to(x.dtype)
    ddout = dx = None
    if ctx.needs_input_grad[0]:
        ddout = torch.ops.fourwave.grouped_gemm(x, grad, m_sizes, None, True, dout.dtype, backend=ctx.backend)
    if ctx.needs_input_grad[1]:
        dx = torch.ops.fourwave.grouped_gemm(dout, grad, m_sizes, None, False, x.dtype, backend=ctx.backend)
    return ddout, dx, *[None] * 9


torch.library.register_autograd("fourwave::grouped_gemm_wgrad", _wgrad_backward, setup_context=_wgrad_setup)
