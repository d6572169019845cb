"""How far a right GEMM may be from the float64 truth, from the formats alone."""

from __future__ import annotations

import math

import torch

from fourwave.ops.gemm.reference import activate

U_FP32 = 2.0**-24  # half an ulp of 1, the largest relative error of one rounding
# Relative to |z|: what a float32 evaluation of an activation may be off, fast exponentials included. |act(z)| <= |z|.
U_ACTIVATION = 2.0**-20
# Largest |act'|. gelu's is at sqrt(2), its tanh form's within 1e-3 of that; silu's at 2.3994.
LIPSCHITZ = {None: 1.0, "relu": 1.0, "gelu": 1.13, "gelu_tanh": 1.13, "silu": 1.1}


def hopper_fp8_u_acc(K: int, promote: bool, wide: bool = False) -> float:
    """`u_acc` for gemm_bound of a Hopper FP8 product.

    wide  products of one sum may differ so much that one is most of it, as those of codes chosen at random

    The matrix unit adds 32 products at a time to a sum; of each of the 33 it drops what lies below 2^-13 of the largest one's
    power of two (modelled so, the worst element of a case with random codes has the error that an H200 made). Products of
    about one size: K / 32 errors of 2^-13, or, where every 128 k are summed in float32, 4 of them, whatever K, and two more
    (seen: 1.7 errors at K = 15). Wide: 33 errors for each 32 k, uniform in [0, 2^-13] and of their products' random signs:
    seven standard deviations of their sum.
    Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3.2.
    """
    errors = min(K / 32 + 2, 5 if promote else math.inf)
    if wide:
        errors = 7 * math.sqrt((min(K, 128) if promote else K) * 33 / 32 / 3)
    return errors * 2.0**-13 / (K + 1) + U_FP32


def gemm_bound(
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    addend: torch.Tensor | None = None,
    u_acc: float = U_FP32,
    scaled: bool = False,
) -> torch.Tensor:
    """Largest error of each element of act(alpha * op(a) @ op(b) + bias) + addend, rounded once to out_dtype.

    a, b, bias, addend  the operands as the kernel got them, shapes as in fw.gemm, 2-D, any dtype; quantized ones as float64
    u_acc    relative error of one rounding in the accumulator; larger where a matrix unit keeps fewer bits
    scaled   float32 scales are multiplied in, with four roundings at most, to operands, partial sums or the sum
    returns  [M, N], with swiglu [M, N / 2], float64

    Any order of summation: K + 1 roundings (product and sums) of partial results that are at most S = |op(a)| @ |op(b)|
    give (K + 1) u / (1 - (K + 1) u) * S. Then one float32 rounding each for alpha, bias and addend, the activation's slope
    and its own evaluation, and half an ulp of out_dtype, or of its subnormals.
    """
    op_a = (a.mT if trans_a else a).to(torch.float64)
    op_b = (b.mT if trans_b else b).to(torch.float64)
    value, error = _preactivation(op_a, op_b, bias, alpha, u_acc, scaled)
    return _finish(value, error, out_dtype, activation, addend)


def sum_bound(a: torch.Tensor, dtype: torch.dtype, addend: torch.Tensor | None = None) -> torch.Tensor:
    """Largest error of the sums over a's first dimension, in float32, scales and an addend included, rounded once to dtype."""
    values = a.to(torch.float64)
    roundings = (len(values) + 4) * U_FP32
    error = roundings / (1 - roundings) * values.abs().sum(0)
    return _finish(values.sum(0), error, dtype, None, addend)


def _preactivation(op_a, op_b, bias, alpha, u_acc, scaled):  # type: ignore[no-untyped-def]
    """(value, error) of alpha * op_a @ op_b + bias in float32."""
    roundings = (op_a.shape[-1] + 1) * u_acc + (4 * U_FP32 if scaled else 0)
    value = op_a @ op_b
    error = roundings / (1 - roundings) * (op_a.abs() @ op_b.abs())
    if alpha != 1.0:
        value = alpha * value
        error = abs(alpha) * error
        error = error + 2 * U_FP32 * (value.abs() + error)  # alpha's own rounding and the product's
    if bias is not None:
        value = value + bias.to(torch.float64)
        error = error + U_FP32 * (value.abs() + error)
    return value, error


def _finish(value, error, out_dtype, activation, addend):  # type: ignore[no-untyped-def]
    """Error bound of act(value) + addend, rounded to out_dtype."""
    if activation == "swiglu":
        gate, up = value.chunk(2, dim=-1)
        gate_error, up_error = error.chunk(2, dim=-1)
        silu = activate(gate, "silu")
        silu_error = LIPSCHITZ["silu"] * gate_error + U_ACTIVATION * (gate.abs() + gate_error)
        value = silu * up
        error = silu_error * (up.abs() + up_error) + silu.abs() * up_error
        error = error + U_FP32 * (value.abs() + error)
    elif activation is not None:
        evaluation = 0.0 if activation == "relu" else U_ACTIVATION
        error = LIPSCHITZ[activation] * error + evaluation * (value.abs() + error)
        value = activate(value, activation)
    if addend is not None:
        value = value + addend.to(torch.float64)
        error = error + U_FP32 * (value.abs() + error)
    info = torch.finfo(out_dtype)
    return error + info.eps / 2 * (value.abs() + error) + info.smallest_normal * info.eps / 2


def error_ratio(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> tuple[float, tuple[int, ...]]:
    """Largest |out - exact| / bound over all elements, and its index; inf where out is wrongly NaN or infinite.

    out    any float dtype; exact and bound float64 of out's shape
    Where exact is NaN, out must be; where exact is infinite, or lies past out's largest value by more than the bound, out
    must be the infinity of its sign. Within the bound of the largest value either is right.
    """
    if out.shape != exact.shape or out.shape != bound.shape:
        raise ValueError(f"out is {tuple(out.shape)}, exact {tuple(exact.shape)}, bound {tuple(bound.shape)}")
    if out.numel() == 0:
        return 0.0, ()
    info = torch.finfo(out.dtype)
    limit = info.max * (1 + info.eps / 4)  # half an ulp past the largest value
    got = out.to(torch.float64)
    error = (got - exact).abs()
    ratio = torch.where(error == 0, 0.0, error / bound)
    is_inf = got.isinf() & (got.sign() == exact.sign())
    ratio = torch.where(is_inf & (exact.abs() + bound >= limit), 0.0, ratio)
    ratio = torch.where(got.isnan() & exact.isnan(), 0.0, ratio)
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    worst = int(ratio.argmax())
    return float(ratio.flatten()[worst]), tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), ratio.shape))


def assert_within(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, what: str = "") -> float:
    """Raise AssertionError, naming the worst index, unless every element is within its bound; return the largest ratio."""
    ratio, index = error_ratio(out, exact, bound)
    if not ratio <= 1:
        got = out.to(torch.float64)
        bad = int((~((got - exact).abs() <= bound)).sum())
        raise AssertionError(
            f"{what}{': ' if what else ''}{bad} of {out.numel()} elements are off; the worst, {list(index)}, is "
            f"{float(got[index]):.9g} where {float(exact[index]):.9g} +- {float(bound[index]):.3g} is right "
            f"({ratio:.3g} times the bound)"
        )
    return ratio
