"""The operators torch.ops.fourwave.gemm (functional, differentiable) and gemm_out (everything that writes into a given tensor)."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fourwave.backends import select
from fourwave.ops.gemm.check import (
    Arguments,
    Tensor,
    check_epilogue,
    default_out_dtype,
    product_shape,
)
from fourwave.ops.gemm.execute import execute
from fourwave.ops.gemm.problem import SWIGLU
from fourwave.ops.gemm.reference import activate


def _gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    args = Arguments(
        a, b, bias=bias, alpha=alpha, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, activation=activation,
        batch_invariant=batch_invariant, backend=backend,
    )  # fmt: skip
    return execute(args)


_gemm_op = torch.library.custom_op("fourwave::gemm", _gemm, mutates_args=())


@_gemm_op.register_fake
def _gemm_fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    shape = _result_shape(a, b, bias, trans_a, trans_b, activation)
    return a.new_empty(shape, dtype=out_dtype or default_out_dtype(a, b))


def _result_shape(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, activation: str | None
) -> tuple[int, ...]:
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} and b on {b.device}; both must be on one device")
    shape, _ = product_shape(a, b, trans_a, trans_b)
    check_epilogue(shape, bias, activation, a.device)
    return (*shape[:-1], shape[-1] // 2) if activation == SWIGLU else shape


_WRITTEN = ("out", "preactivation", "bias_grad", "out_scale", "out_amax", "out_columnwise", "out_columnwise_scale")


def _gemm_out(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    backend: str | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    preactivation: Tensor | None = None,
    bias_grad: Tensor | None = None,
    batch_invariant: bool = False,
    fast_accum: bool = False,
    out_scaling: str | None = None,
    out_direction: str = "rowwise",
    out_scale_rule: str = "floor",
    out_scale: Tensor | None = None,
    out_amax: Tensor | None = None,
    out_columnwise: Tensor | None = None,
    out_columnwise_scale: Tensor | None = None,
    b_preshuffled: bool | None = None,
) -> None:
    # fw.gemm's last argument is never its default, None: PyTorch 2.11 drops defaults at the end, and then misses those that are written.
    args = Arguments(
        a, b, out, bias, a_scale, b_scale, preactivation, bias_grad, out_scale, out_amax, out_columnwise,
        out_columnwise_scale, alpha, trans_a, trans_b, None, activation, accumulate, a_scaling, b_scaling, batch_invariant,
        fast_accum, out_scaling, out_direction, out_scale_rule, bool(b_preshuffled), None, backend,
    )  # fmt: skip
    execute(args)


_gemm_out_op = torch.library.custom_op("fourwave::gemm_out", _gemm_out, mutates_args=_WRITTEN)


@_gemm_out_op.register_fake
def _gemm_out_fake(
    a: Tensor,
    b: Tensor,
    out: Tensor | None,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    activation: str | None = None,
    *_: Any,
    **__: Any,
) -> None:
    shape = _result_shape(a, b, bias, trans_a, trans_b, activation)
    if out is not None and tuple(out.shape) != tuple(shape):
        raise ValueError(f"out is {tuple(out.shape)}; a {tuple(a.shape)} and b {tuple(b.shape)} give {tuple(shape)}")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, trans_a, trans_b, _, activation, alpha, batch_invariant, backend = inputs
    ctx.save_for_backward(a, b, bias)
    ctx.layout = (trans_a, trans_b)
    ctx.activation, ctx.alpha, ctx.batch_invariant = activation, alpha, batch_invariant
    # The backward pass may run in another thread, after a `with use_backend` block has ended: keep the choice. While
    # compiling it stays open, to be made when the compiled code runs.
    ctx.backend = backend if torch.compiler.is_compiling() else select.requested(backend)[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With z = alpha * op(a) @ op(b) + bias and dz = grad * act'(z), for swiglu the gradients of both halves:

    TN  da = alpha * dz @ b (NN)      db = alpha * dz.T @ a (NT)
    NN  da = alpha * dz @ b.T (TN)    db = alpha * a.T @ dz (NT)
    NT  da = alpha * b @ dz.T (TN)    db = alpha * a @ dz (NN)
    dbias = dz summed over M.
    """
    a, b, bias = ctx.saved_tensors
    trans_a, trans_b = ctx.layout
    op = functools.partial(torch.ops.fourwave.gemm, backend=ctx.backend)
    dz = grad
    if ctx.activation is not None:
        z = op(a, b, bias, trans_a, trans_b, torch.float32, None, ctx.alpha, ctx.batch_invariant)
        dz = _activation_backward(z, grad.float(), ctx.activation)
    dbias = None
    if bias is not None and ctx.needs_input_grad[2]:
        dbias = _rows(dz.float()).sum(0).to(bias.dtype)
    dz = dz.to(a.dtype)
    product = functools.partial(
        op, bias=None, activation=None, alpha=ctx.alpha, out_dtype=a.dtype, batch_invariant=ctx.batch_invariant
    )
    da = db = None
    if trans_a:
        a2, b2 = _rows(a), _rows(b)
        if ctx.needs_input_grad[0]:
            da = product(b2, dz, trans_a=False, trans_b=True).reshape(a.shape)
        if ctx.needs_input_grad[1]:
            db = product(a2, dz, trans_a=False, trans_b=False).reshape(b.shape)
    else:
        if ctx.needs_input_grad[0]:
            da = product(dz, b, trans_a=False, trans_b=not trans_b)
        if ctx.needs_input_grad[1]:
            left, right = (dz, a) if trans_b else (a, dz)
            db = product(left, right, trans_a=True, trans_b=False)
    return da, db, dbias, None, None, None, None, None, None, None


def _rows(t: Tensor) -> Tensor:
    """t with its leading dimensions flattened; a -1 could not be inferred where the last one is 0."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _activation_backward(z: Tensor, grad: Tensor, activation: str) -> Tensor:
    """Gradient of z, from differentiable operations."""
    if activation == SWIGLU:
        gate, up = z.chunk(2, dim=-1)
        return torch.cat((grad * up * _activation_slope(gate, "silu"), grad * activate(gate, "silu")), dim=-1)
    return grad * _activation_slope(z, activation)


def _activation_slope(z: Tensor, activation: str) -> Tensor:
    """act'(z), elementwise."""
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    # gelu_tanh: z / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (z + 0.044715 z^3)
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (z + 0.044715 * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z)


torch.library.register_autograd("fourwave::gemm", _backward, setup_context=_setup_context)


def _flops(signature: inspect.Signature, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    shape, k = product_shape(*(bound.arguments[name] for name in ("a", "b", "trans_a", "trans_b")))
    return 2 * math.prod(shape) * k


def register_flops(*operators: tuple[Any, Callable[..., int]]) -> None:
    """Tell PyTorch's FLOP counter what operators cost: pairs of an operator and a function of its arguments, by default this file's. Only
    where the caller has imported it: it imports Triton."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    registries = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        copied = getattr(getattr(mode, "counter", None), "flop_registry", None)  # when the counter was made
        if isinstance(copied, dict):
            registries.append(copied)
    for each in registries:
        for operator, flops in operators or _flops_here():
            each.setdefault(operator, flops)


@functools.lru_cache(maxsize=16)  # reading a signature takes longer than a call
def flops_of(function: Callable[..., Any]) -> Callable[..., int]:
    """2 M N K of an operator's arguments. function: has its arguments, a, b, trans_a and trans_b among them."""
    return functools.partial(_flops, inspect.signature(function))


def _flops_here() -> list[tuple[Any, Callable[..., int]]]:
    return [(torch.ops.fourwave.gemm, flops_of(_gemm)), (torch.ops.fourwave.gemm_out, flops_of(_gemm_out))]
