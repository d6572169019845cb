"""Fp8Padding and Fp8Unpadding: rows of zeros after the rows of each expert, and without them again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class _Padding(torch.nn.Module):
    """align_size: rows of each expert become a multiple of it. None: GroupedLinear takes any number of rows, and nothing is padded."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise ValueError(f"align_size is {align_size}; it must be at least 1, or None")
        self.num_gemms, self.align_size = num_gemms, align_size

    def _padded(self, inp: Tensor, m_splits: Sequence[int], *, given: bool) -> list[int]:
        """Rows of each expert with the padding. given: inp has it already."""
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits has {len(m_splits)} numbers for {self.num_gemms} products")
        align = self.align_size or 1
        padded = [-(-m // align) * align for m in m_splits]
        rows = sum(padded) if given else sum(m_splits)
        if min(m_splits, default=0) < 0 or inp.shape[0] != rows:
            raise ValueError(
                f"inp has {inp.shape[0]} rows; m_splits {list(m_splits)}{f' in multiples of {align}' * given} are {rows}"
            )
        return padded


class Fp8Padding(_Padding):
    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """(inp [rows, columns] with the padding, rows of each expert in it)"""
        padded = self._padded(inp, m_splits, given=False)
        if padded == list(m_splits):
            return inp, padded
        parts = inp.split(list(m_splits))
        return torch.cat([F.pad(part, (0, 0, 0, p - len(part))) for part, p in zip(parts, padded, strict=True)]), padded


class Fp8Unpadding(_Padding):
    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """inp [padded rows, columns] without the padding. m_splits: rows without it."""
        padded = self._padded(inp, m_splits, given=True)
        if padded == list(m_splits):
            return inp
        return torch.cat([part[:m] for part, m in zip(inp.split(padded), m_splits, strict=True)])
