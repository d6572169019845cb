"""Two 4-bit codes in a byte."""

from __future__ import annotations

from typing import overload

import numpy as np
import torch


@overload
def pack_e2m1(codes: torch.Tensor) -> torch.Tensor: ...
@overload
def pack_e2m1(codes: np.ndarray) -> np.ndarray: ...
def pack_e2m1(codes):  # type: ignore[no-untyped-def]
    """Pack 4-bit codes along the last dimension: element 2i in the low half of byte i, element 2i + 1 in the high half.

    codes    [..., n] uint8, n even, each below 16 (not checked: the upper halves are cut off)
    returns  [..., n / 2] uint8, contiguous; torch or numpy as codes were
    Element 0 low is the order of torch.float4_e2m1fn_x2. Raises ValueError for another dtype or an odd n.
    """
    _check_bytes(codes, "codes")
    if codes.shape[-1] % 2:
        raise ValueError(f"the last dimension is {codes.shape[-1]}; it must be even, two codes make a byte")
    return (codes[..., 0::2] & 0xF) | ((codes[..., 1::2] & 0xF) << 4)


@overload
def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor: ...
@overload
def unpack_e2m1(packed: np.ndarray) -> np.ndarray: ...
def unpack_e2m1(packed):  # type: ignore[no-untyped-def]
    """Inverse of pack_e2m1: [..., m] uint8 to [..., 2 m] uint8 codes below 16. Raises ValueError for another dtype."""
    _check_bytes(packed, "packed")
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    stack = torch.stack if isinstance(packed, torch.Tensor) else np.stack
    return stack((packed & 0xF, packed >> 4), -1).reshape(shape)


def _check_bytes(t: torch.Tensor | np.ndarray, name: str) -> None:
    if t.dtype not in (torch.uint8, np.uint8):
        raise ValueError(f"{name} is {t.dtype}; it must be uint8")
    if t.ndim == 0:
        raise ValueError(f"{name} has no dimension to run along")
