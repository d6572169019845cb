"""Outputs that show what a kernel did not write and what it should not have written."""

from __future__ import annotations

import torch

GUARD_BYTE = 0xA5
GUARD_ELEMENTS = 512  # on each side of the whole buffer
LAYOUTS = ("contiguous", "sliced", "offset", "transposed", "strided")


class Poisoned:
    """An [M, N] output inside a buffer of guard bytes. `tensor` is the output; it starts as NaN, or as `addend`."""

    def __init__(
        self,
        M: int,
        N: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        layout: str = "contiguous",
        addend: torch.Tensor | None = None,
    ) -> None:
        """layout: "contiguous"; "sliced" (guards between rows); "offset" (sliced, misaligned); "transposed" (columns
        contiguous); "strided" (every second element of every second row)."""
        row_stride, col_stride, offset = {
            "contiguous": (N, 1, 0),
            "sliced": (-(-N // 8) * 8 + 64, 1, 0),
            "offset": (N + 13, 1, 5),
            "transposed": (1, M + 8, 0),
            "strided": (4 * N + 2, 2, 1),
        }.get(layout, (0, 0, 0))
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r}: the layouts are {', '.join(LAYOUTS)}")
        used = offset + max(M - 1, 0) * row_stride + max(N - 1, 0) * col_stride + 1
        self._geometry = ((M, N), (row_stride, col_stride), GUARD_ELEMENTS + offset)
        itemsize = torch.empty(0, dtype=dtype).element_size()
        self._bytes = torch.full(
            ((used + 2 * GUARD_ELEMENTS) * itemsize,), GUARD_BYTE, dtype=torch.uint8, device=device
        )
        self.tensor = self._bytes.view(dtype).as_strided(*self._geometry)
        if addend is None:
            self.tensor.fill_(float("nan"))
        else:
            self.tensor.copy_(addend)

    def assert_guards_intact(self) -> None:
        """Raise AssertionError, naming the first byte, if anything outside `tensor` was written."""
        inside = torch.zeros_like(self._bytes)
        elements = inside.view(torch.uint8).view(len(inside) // self.tensor.element_size(), -1)
        index = torch.arange(len(elements), device=inside.device).as_strided(*self._geometry)
        elements[index.reshape(-1)] = 1
        broken = ((self._bytes != GUARD_BYTE) & (inside == 0)).nonzero().flatten()
        if len(broken):
            itemsize = self.tensor.element_size()
            where = int(broken[0]) // itemsize - self._geometry[2]
            raise AssertionError(
                f"{len(broken)} guard bytes were overwritten; the first lies {where} elements from the output's first "
                f"(shape {tuple(self.tensor.shape)}, strides {self.tensor.stride()})"
            )


def poisoned(
    M: int,
    N: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    layout: str = "contiguous",
    addend: torch.Tensor | None = None,
) -> Poisoned:
    """An [M, N] output that holds NaN (or `addend`), with guard bytes around and, where the layout has gaps, inside."""
    return Poisoned(M, N, dtype, device, layout=layout, addend=addend)
