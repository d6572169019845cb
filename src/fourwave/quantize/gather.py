"""Rows of a matrix in another order, quantized: tokens on their way to experts."""

from __future__ import annotations

from typing import Any

import torch

from fourwave.quantize.api import quantize
from fourwave.quantize.tensor import FORMATS, QuantizedTensor

Tensor = torch.Tensor
ROW_SCALINGS = ("row", "1x128", "1x32")  # those of which no scale belongs to two rows


def quantize_gathered(x: Tensor, rows: Tensor, format: str, **options: Any) -> QuantizedTensor:
    """The bits of quantize(x[rows], format, "rowwise", **options), of a format with scales of single rows. x [T, C], rows [M] int64.

    Where M is at least T each row of x is quantized once, and its codes and scales are copied: x[rows] is not made.
    """
    fmt = FORMATS[format]
    if fmt.scaling not in ROW_SCALINGS:
        raise ValueError(
            f"{format} has scales {fmt.scaling}, which rows share: they depend on the rows that are gathered"
        )
    if len(rows) < len(x):
        return quantize(x.index_select(0, rows), format, "rowwise", **options)
    q = quantize(x, format, "rowwise", **options)
    assert q.data is not None and q.scale is not None
    return QuantizedTensor(fmt, (len(rows), q.shape[1]), _taken(q.data, rows), _taken(q.scale, rows))


def _taken(t: Tensor, rows: Tensor) -> Tensor:
    """t[rows]. Bytes are copied: index_select knows few types of 8 bits."""
    plain = t.view(torch.uint8) if t.element_size() == 1 else t
    return plain.index_select(0, rows).view(t.dtype)
