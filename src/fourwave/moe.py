"""What a mixture of experts does between its products, as functions without gradients; `fw.nn.MoEMLP` is the whole of it.

gather_quantize     codes of rows in another order: tokens on their way to experts (MSLK: gather_scale_quant_dense_tokens)
silu_mul_quantize   codes of SwiGLU (MSLK: silu_mul_quant; vLLM: silu_and_mul_quant)
combine             the weighted sum of what a token's experts give (MSLK: scatter_add_dense_tokens; vLLM: moe_sum)
"""

from __future__ import annotations

from typing import Any

import torch

from fourwave.ops.gemm.problem import PRECISIONS
from fourwave.ops.moe import combine as _combine
from fourwave.quantize.gather import ROW_SCALINGS, quantize_gathered, quantize_swiglu
from fourwave.quantize.tensor import FORMATS, QuantizedTensor

Tensor = torch.Tensor


def gather_quantize(
    x: Tensor,
    rows: Tensor,
    format: str,
    *,
    scale_rule: str | None = None,
    fnuz: bool | None = None,
    backend: str | None = None,
) -> QuantizedTensor:
    """The bits of fw.quantize(x[rows], format), rowwise, without x[rows].

    x       [T, C] float32, bfloat16 or float16
    rows    [M] int64 on x's device, each at least 0 and below T: not read on the host
    format  one of which no scale belongs to two rows: "fp8_row", "fp8_1x128", MX
    The rest as in `fw.quantize`. Raises ValueError for what the caller must change.
    """
    _matrix("x", x)
    if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device:
        told = f"{tuple(rows.shape)} {rows.dtype} on {rows.device}" if isinstance(rows, Tensor) else repr(rows)
        raise ValueError(f"rows is {told}; it must be [M] int64 on {x.device}")
    if format not in FORMATS or FORMATS[format].scaling not in ROW_SCALINGS:
        fit = ", ".join(name for name, fmt in FORMATS.items() if fmt.scaling in ROW_SCALINGS)
        raise ValueError(f"format {format!r}: rows are quantized one by one in {fit}")
    return quantize_gathered(x, rows, format, **_options(scale_rule, fnuz, backend))


def silu_mul_quantize(
    z: Tensor, format: str, *, scale_rule: str | None = None, fnuz: bool | None = None, backend: str | None = None
) -> QuantizedTensor:
    """fw.quantize(h, format), rowwise, of h = silu(gate) * up, computed in float32 and rounded to z's type: [M, C].

    z       [M, 2 C] float32, bfloat16 or float16: gate and up side by side
    The rest as in `fw.quantize`. On Hopper h is not written, and a code may be a step off where PyTorch's exponential differs.
    """
    _matrix("z", z)
    if z.shape[1] % 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be [M, 2 C], gate and up side by side")
    if format not in FORMATS:
        raise ValueError(f"format {format!r}: the formats are {', '.join(FORMATS)}")
    return quantize_swiglu(z, format, **_options(scale_rule, fnuz, backend))


def combine(rows: Tensor, places: Tensor, weights: Tensor, *, backend: str | None = None) -> Tensor:
    """out[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once: [T, C] of rows' type.

    rows    [M, C] float32, bfloat16 or float16
    places  [T, top_k] int64, each at least 0 and below M: not read on the host
    weights [T, top_k], floating point; all three on one device
    backend "hopper" or "native", which runs or raises; None: chosen
    The order of summation depends on shapes only. Raises ValueError for what the caller must change.
    """
    _matrix("rows", rows)
    for name, t in (("places", places), ("weights", weights)):
        if not isinstance(t, Tensor) or t.dim() != 2 or t.shape != places.shape or t.device != rows.device:
            told = f"{tuple(t.shape)} on {t.device}" if isinstance(t, Tensor) else repr(t)
            raise ValueError(f"{name} is {told}; places and weights must both be [T, top_k] on {rows.device}")
    if places.dtype != torch.int64 or not weights.is_floating_point():
        raise ValueError(f"places is {places.dtype} and weights {weights.dtype}; they must be int64 and floating point")
    if torch.is_grad_enabled() and weights.requires_grad:
        raise ValueError("weights requires grad, and combine has no gradient: detach it, or use fw.nn.MoEMLP")
    return _combine.combine(rows, places, weights, backend)


def _matrix(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or t.dim() != 2 or t.dtype not in PRECISIONS:
        told = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else repr(t)
        raise ValueError(f"{name} is {told}; it must be a matrix of float32, bfloat16 or float16")
    if torch.is_grad_enabled() and t.requires_grad:
        raise ValueError(f"{name} requires grad, and this has no gradient: detach it, or use fw.nn.MoEMLP")


def _options(scale_rule: str | None, fnuz: bool | None, backend: str | None) -> dict[str, Any]:
    return {"scale_rule": scale_rule, "fnuz": fnuz, "backend": backend}
