"""Operands that show misplaced rows, columns and blocks, and views of them surrounded by NaN."""

from __future__ import annotations

import torch

from fourwave.ops.gemm.problem import LAYOUTS
from fourwave.testing.shapes import Shape

K_BLOCK = 32  # elements of K that share a factor
VIEWS = ("contiguous", "sliced", "offset", "transposed", "strided")


def matrix(rows: int, k: int, *, generator: torch.Generator) -> torch.Tensor:
    """[rows, k] float64 of magnitude at most 8, no two rows alike.

    Each row has a factor from 10^-2 to 8 and each block of K_BLOCK along k one from 10^-1 to 1; the first and the last
    block keep 1, so that a dropped first or last k step shows in every row. An element is factor * block factor * a
    value in [1/2, 1) of random sign.
    """

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    row_factor = 8 * 10 ** (-2.9 * uniform(rows, 1))
    num_blocks = -(-k // K_BLOCK)
    block_factor = 10 ** -uniform(1, num_blocks)
    if num_blocks:
        block_factor[0, 0] = block_factor[0, -1] = 1
    block_factor = block_factor.repeat_interleave(K_BLOCK, dim=1)[:, :k]
    sign = torch.where(uniform(rows, k) < 0.5, -1.0, 1.0).to(torch.float64)
    return sign * (0.5 + 0.5 * uniform(rows, k)) * row_factor * block_factor


def spread(
    shape: Shape,
    dtype: torch.dtype,
    *,
    layout: str = "TN",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b for `shape`, stored as `layout` says ("TN": a[M, K], b[N, K]; "NN": b[K, N]; "NT": a[K, M], b[K, N]).

    Rows of op(a), columns of op(b) and K blocks of both differ by decades. The values do not depend on the layout, so the
    layouts have one truth. Contiguous, of `dtype`, on `device`; the same seed gives the same values everywhere.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}: the layouts are {', '.join(LAYOUTS)}")
    generator = torch.Generator().manual_seed(seed)
    a = matrix(shape.M, shape.K, generator=generator)
    b = matrix(shape.N, shape.K, generator=generator)
    if layout == "NT":
        a = a.mT
    if layout != "TN":
        b = b.mT
    return (
        a.contiguous().to(device=device, dtype=dtype),
        b.contiguous().to(device=device, dtype=dtype),
    )


def view(t: torch.Tensor, kind: str) -> torch.Tensor:
    """A tensor equal to the 2-D t, as a view of a buffer that holds NaN wherever t is not.

    contiguous  t's rows back to back, NaN before and after
    sliced      rows 64 elements apart from each other's ends, as buffer[:, :cols]; 16-byte aligned for 2-byte elements
    offset      sliced, but starting at an odd row and column: no alignment to speak of
    transposed  columns contiguous, as buffer.mT
    strided     every second element of every second row
    """
    rows, cols = t.shape

    def nan(*shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=t.dtype, device=t.device)

    if kind == "contiguous":
        result = nan(256 + rows * cols + 256)[256 : 256 + rows * cols].view(rows, cols)
    elif kind == "sliced":
        result = nan(rows + 2, -(-cols // 8) * 8 + 64)[1 : rows + 1, :cols]
    elif kind == "offset":
        result = nan(rows + 4, cols + 13)[3 : rows + 3, 5 : cols + 5]
    elif kind == "transposed":
        result = nan(cols + 2, rows + 8)[1 : cols + 1, :rows].mT
    elif kind == "strided":
        result = nan(2 * rows + 1, 2 * cols + 1)[1::2, 1::2]
    else:
        raise ValueError(f"view {kind!r}: the views are {', '.join(VIEWS)}")
    result.copy_(t)
    return result
