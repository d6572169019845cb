"""Tiles of MX operands in LDS, for gfx1250 (wmma.py). Imports no FlyDSL."""

from __future__ import annotations

from dataclasses import dataclass

TILE_K = 128
# LDS, in bytes. Behind each GAP_EVERY bytes of codes lies a gap of 16, so that 16 lanes reading a chunk of as many rows use
# each bank equally often; behind as many of scales one of 4, so that 32 lanes reading a word of as many rows do.
TILES_PER_PAGE = 8  # tiles of K whose scales come together
BLOCKS = TILE_K // 32  # scales of a row in a tile
GAP_EVERY, CODE_GAP, SCALE_GAP = 256, 16, 4


def with_gaps(size: int, gap: int) -> int:
    """Bytes in LDS of the first `size` of a tile; a whole number of gaps."""
    return size + size // GAP_EVERY * gap


def code_pitch(columns: int) -> int:
    """Bytes from one row of 8-bit results in LDS to the next: lanes of successive rows begin in other banks."""
    return columns + 16


@dataclass(frozen=True)
class Side:
    """One operand's tile. turned: its k is not contiguous, in memory and in LDS.

    halves: of b for swiglu. The tile's first rows are of the operand's first half, as many others of the second; a wave has as
    many of each, which it multiplies with the same rows of a.
    """

    rows: int  # of op(a), or columns of op(b)
    waves: int  # that share them
    bits: int
    turned: bool
    scaled: bool
    halves: bool = False

    @property
    def wave_rows(self) -> int:
        return self.rows // self.waves

    @property
    def fragments(self) -> int:
        """Of a wave."""
        return self.wave_rows // 16

    @property
    def wave_step(self) -> int:
        """Rows from the first of one wave to that of the next."""
        return self.wave_rows // 2 if self.halves else self.wave_rows

    def fragment_row(self, i: int) -> int:
        """Of fragment i, counted from the wave's first."""
        far = self.halves and i >= self.fragments // 2
        return i * 16 + (self.rows // 2 - self.wave_rows // 2 if far else 0)

    @property
    def stored_rows(self) -> int:
        return TILE_K if self.turned else self.rows

    @property
    def row_bytes(self) -> int:
        return (self.rows if self.turned else TILE_K) * self.bits // 8

    @property
    def scale_rows(self) -> int:
        """In a page."""
        return BLOCKS * TILES_PER_PAGE if self.turned else self.rows

    @property
    def scale_row_bytes(self) -> int:
        return self.rows if self.turned else BLOCKS * TILES_PER_PAGE

    @property
    def scale_gap(self) -> int:
        """Scales are read byte by byte, by neighbouring lanes, where k is not contiguous."""
        return 0 if self.turned else SCALE_GAP

    @property
    def code_bytes(self) -> int:
        return with_gaps(self.stored_rows * self.row_bytes, CODE_GAP)

    @property
    def scale_bytes(self) -> int:
        return with_gaps(self.scale_rows * self.scale_row_bytes, self.scale_gap) if self.scaled else 0
