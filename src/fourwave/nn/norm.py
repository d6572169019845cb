"""LayerNorm and RMSNorm, computed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def check_normalization(name: str) -> None:
    if name not in NORMALIZATIONS:
        raise ValueError(f"normalization is {name!r}; it must be {' or '.join(NORMALIZATIONS)}")


def norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * gamma + bias over the last dimension; RMSNorm: x / sqrt(mean(x^2) + eps) * gamma.

    gamma is weight, or 1 + weight with zero_centered. returns x's shape, in dtype
    """
    return _Norm.apply(x, weight, bias, normalization == "LayerNorm", eps, zero_centered, dtype)


class _Norm(torch.autograd.Function):
    """Keeps x and the reciprocal deviation (and mean) of each row."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool, eps: float, zero_centered: bool, dtype: torch.dtype
    ) -> Tensor:  # fmt: skip
        values = x.float()
        mean = None
        if centered:
            mean = values.mean(-1, keepdim=True)
            values = values - mean
        rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        gamma = weight.float() + 1 if zero_centered else weight.float()
        y = values * rstd * gamma
        if bias is not None:
            y = y + bias.float()
        ctx.centered, ctx.zero_centered = centered, zero_centered
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, rstd, *([mean] if mean is not None else []))
        # A conversion that does nothing loses its gradient in code that PyTorch 2.11 compiles.
        return y if y.dtype == dtype else y.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, rstd, *mean = ctx.saved_tensors
        dy = dy.float()
        normal = (x.float() - mean[0] if mean else x.float()) * rstd
        dx = dgamma = dbias = None
        if ctx.needs_input_grad[0]:
            dn = dy * (weight.float() + 1 if ctx.zero_centered else weight.float())
            dx = dn - normal * (dn * normal).mean(-1, keepdim=True)
            if ctx.centered:
                dx = dx - dn.mean(-1, keepdim=True)
            dx = (dx * rstd).to(x.dtype)
        rows = tuple(range(dy.dim() - 1))
        if ctx.needs_input_grad[1]:
            dgamma = (dy * normal).sum(rows).to(weight.dtype) if rows else (dy * normal).to(weight.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            dbias = (dy.sum(rows) if rows else dy).to(ctx.bias_dtype)
        return dx, dgamma, dbias, None, None, None, None


def reset_norm(weight: Tensor, bias: Tensor | None, zero_centered: bool) -> None:
    nn.init.constant_(weight, 0.0 if zero_centered else 1.0)
    if bias is not None:
        nn.init.zeros_(bias)
