"""Which elements of a matrix share a scale, and how the scales lie."""

from __future__ import annotations

import torch

from fourwave.formats.element import E8M0, decode

SCALINGS = ("tensor", "row", "1x128", "128x128", "1x32")


def scale_shape(scaling: str, rows: int, columns: int, k_last: bool) -> tuple[int, ...]:
    """Shape of the scales of a matrix stored as [rows, columns], of which the last dimension is the reduction if k_last
    and the first one otherwise. Blocks lie along the reduction; the last one may be cut off by the matrix's end.

    "tensor"   ()
    "row"      one for each index that is not reduced: [rows], or [columns]
    "1x128"    [rows, ceil(columns / 128)], or [ceil(rows / 128), columns]; "1x32" likewise
    "128x128"  [ceil(rows / 128), ceil(columns / 128)]
    """
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return (rows if k_last else columns,)
    if scaling == "128x128":
        return (-(-rows // 128), -(-columns // 128))
    size = {"1x128": 128, "1x32": 32}[scaling]
    return (rows, -(-columns // size)) if k_last else (-(-rows // size), columns)


def expand_scale(
    scale: torch.Tensor, scaling: str, shape: tuple[int, ...], k_last: bool, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Scales as float64 or float32, both exact, that broadcast against codes of `shape` (rows, columns). See scale_shape."""
    if scale.dtype in (torch.uint8, E8M0.torch_dtype):
        scale = decode(scale, E8M0, dtype)
    scale = scale.to(dtype)
    if scaling == "tensor":
        return scale.reshape(())
    if scaling == "row":
        return scale[:, None] if k_last else scale[None, :]
    if scaling == "128x128":
        blocks = (128, 128)
    else:
        size = {"1x128": 128, "1x32": 32}[scaling]
        blocks = (1, size) if k_last else (size, 1)
    for dim, size in enumerate(blocks):
        if size > 1:
            assert scale.shape[dim] == -(-shape[dim] // size), (scale.shape, shape, scaling)
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, shape[dim])
    return scale
