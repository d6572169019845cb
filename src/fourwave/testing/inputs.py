"""Operands that show misplaced rows, columns and blocks, and views of them surrounded by NaN."""

from __future__ import annotations

import torch

from fourwave.formats import encode, pack_e2m1
from fourwave.formats.element import E2M1, E8M0
from fourwave.formats.scaling import scale_shape
from fourwave.ops.gemm.problem import LAYOUTS
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
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


def quantized(
    rows: int,
    k: int,
    name: str,
    *,
    generator: torch.Generator,
    direction: str = "rowwise",
    transposed: bool = False,
    fnuz: bool = False,
    device: torch.device | str = "cpu",
    view_kind: str = "contiguous",
) -> QuantizedTensor:
    """A quantized operand, made of codes and scales directly and not by a quantizer.

    name        fourwave.quantize.tensor.FORMATS; fnuz: codes of gfx942's 8-bit floats, where the format has such
    direction   "rowwise": the matrix [rows, k]. "columnwise": the matrix [k, rows], reduced along its first dimension, stored
                in natural order or, with `transposed`, transposed. The values do not depend on it
    view_kind   how the codes lie (VIEWS); packed ones are always contiguous

    Codes are those of `matrix`, of magnitude 1/2 to 4, and in a tenth of places any finite ones. Scales lie between 2^-6 and 2^6
    (tensor: 1/4 to 3/4), no two neighbours alike; the first and last block of a row have large ones, so that a dropped block shows.
    """
    fmt = FORMATS[name]
    codec = fmt.code_format(fnuz and not fmt.is_mx)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    values = 4 * (0.125 + 0.875 * uniform(rows, k)) * torch.where(uniform(rows, k) < 0.5, -1.0, 1.0)
    wild = torch.where(uniform(rows, k) < 0.5, -1.0, 1.0) * codec.max * 2.0 ** (-(codec.bits + 4) * uniform(rows, k))
    codes = encode(torch.where(uniform(rows, k) < 0.1, wild, values), codec)
    shape = scale_shape(fmt.scaling, rows, k, True)
    if fmt.scaling == "tensor":
        scale = (0.25 + 0.5 * uniform(1)).float().reshape(())  # another for each generator, so a's is not b's
    else:
        exponent = torch.randint(-6, 5, shape, generator=generator)
        if len(shape) == 2 and shape[1]:
            # Rows 16 apart, the same ones of two fragments, differ.
            exponent[:, 0] = exponent[:, -1] = 5 - torch.arange(shape[0]) // 16 % 3
            exponent += torch.arange(shape[1]) % 2 + torch.arange(shape[0])[:, None] % 2  # neighbours differ
        if fmt.is_mx:
            scale = encode(2.0 ** exponent.double(), E8M0)
            scale = scale if E8M0.torch_dtype is None else scale.view(E8M0.torch_dtype)
        else:
            scale = (2.0 ** exponent.double() * (1 + uniform(*shape))).float()
    columnwise = direction == "columnwise"
    if columnwise and not transposed:
        codes = codes.mT
        scale = (
            scale.view(torch.uint8).mT.contiguous().view(scale.dtype)
            if fmt.is_mx
            else scale.mT.contiguous()
            if scale.dim() == 2
            else scale
        )
    if codec is E2M1:
        data = pack_e2m1(codes.contiguous()).to(device)
    else:
        assert codec.torch_dtype is not None
        data = view(codes.contiguous().view(codec.torch_dtype).to(device), view_kind)
    scale = scale.to(device)
    if columnwise:
        return QuantizedTensor(fmt, (k, rows), None, None, data, scale, transposed)
    return QuantizedTensor(fmt, (rows, k), data, scale)


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
