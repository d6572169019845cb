"""The GEMM's definition in plain PyTorch, written to be read: the truth that tests compare backends with."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act(x), in x's dtype; elementwise but for swiglu.

    relu  max(x, 0);  gelu  x * Phi(x), by erf;  gelu_tanh  its tanh approximation;  silu  x * sigmoid(x)
    swiglu  silu(gate) * up of x = [gate, up], halves of the last dimension: one column for two
    """
    if activation is None:
        return x
    if activation == "relu":
        return F.relu(x)
    if activation == "gelu":
        y = F.gelu(x)
        # From 16 on x is the nearest to x * Phi(x); PyTorch's CPU kernel has NaN for inf there, and inf for numbers next to the largest.
        return torch.where(x > 16, x, y) if x.device.type == "cpu" else y
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "silu":
        return F.silu(x)
    if activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    raise ValueError(f"activation {activation!r}: relu, gelu, gelu_tanh, silu, swiglu or None")


def preactivation(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    """alpha * op(a) @ op(b) + bias, computed and returned in float64."""
    op_a = (a.mT if trans_a else a).to(torch.float64)
    op_b = (b.mT if trans_b else b).to(torch.float64)
    out = alpha * (op_a @ op_b)
    return out if bias is None else out + bias.to(torch.float64)


def gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    addend: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(alpha * op(a) @ op(b) + bias) + addend, computed and returned in float64.

    a       [M, K], or [K, M] with trans_a. Values: a quantized operand's are code * scale (QuantizedTensor.dequantize(float64))
    b       [N, K] with trans_b, else [K, N]
    bias    [N]; addend [M, N]: what `out` held, for accumulate=True
    returns [M, N], with swiglu [M, N / 2], float64, not rounded to any output dtype
    """
    out = activate(preactivation(a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, alpha=alpha), activation)
    if addend is not None:
        out = out + addend.to(torch.float64)
    return out
