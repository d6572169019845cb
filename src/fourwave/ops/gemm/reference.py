"""The GEMM's definition in plain PyTorch, written to be read: the truth that tests compare backends with."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """act(x), elementwise, in x's dtype.

    relu  max(x, 0);  gelu  x * Phi(x), by erf;  gelu_tanh  its tanh approximation;  silu  x * sigmoid(x)
    """
    if activation is None:
        return x
    if activation == "relu":
        return F.relu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "silu":
        return F.silu(x)
    raise ValueError(f"activation {activation!r}: relu, gelu, gelu_tanh, silu or None")


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

    a       [M, K], or [K, M] with trans_a
    b       [N, K] with trans_b, else [K, N]
    bias    [N]; addend [M, N]: what `out` held, for accumulate=True
    returns [M, N] float64, not rounded to any output dtype
    """
    op_a = (a.mT if trans_a else a).to(torch.float64)
    op_b = (b.mT if trans_b else b).to(torch.float64)
    out = alpha * (op_a @ op_b)
    if bias is not None:
        out = out + bias.to(torch.float64)
    out = activate(out, activation)
    if addend is not None:
        out = out + addend.to(torch.float64)
    return out
