"""Shape classes: one list for tests, `fourwave check` and the tuner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One GEMM size; `name` says what it is for."""

    name: str
    M: int
    N: int
    K: int

    def __str__(self) -> str:
        return f"{self.name} {self.M}x{self.N}x{self.K}"


# 128 and 192 are multiples of every wave's share of a tile, 320 of every K step so far (at least two of each, so that loops
# and their drains run). A tail in M or N is not a multiple of anything but 4 or 2. K tails: 296 is whole 16-byte chunks of
# 2-byte elements, 173 is not.
GEMM_SHAPES: tuple[Shape, ...] = (
    Shape("even", 128, 192, 320),
    Shape("tail M", 100, 128, 128),
    Shape("tail N", 128, 138, 128),
    Shape("tail K", 128, 128, 296),
    Shape("odd K", 64, 128, 173),
    Shape("tail all", 77, 145, 203),
    Shape("M = 1", 1, 192, 256),
    Shape("N = 1", 128, 1, 128),
    Shape("K = 1", 64, 96, 1),
    Shape("small", 3, 5, 7),
)

# Several tiles in each direction: slower, for `--full` runs and tests marked slow.
GEMM_SHAPES_FULL: tuple[Shape, ...] = (
    Shape("even, 4 tiles of 256", 512, 512, 512),
    Shape("tails, 4 tiles of 256", 500, 390, 488),
    Shape("long K", 64, 64, 4096),
    Shape("16 rows", 16, 512, 1024),
    Shape("tall", 1025, 33, 96),
    Shape("wide", 33, 1025, 96),
)


def by_name(name: str) -> Shape:
    """The class called `name`. Raises ValueError, listing the names, for another."""
    shapes = (*GEMM_SHAPES, *GEMM_SHAPES_FULL)
    for shape in shapes:
        if shape.name == name:
            return shape
    raise ValueError(f"shape class {name!r}: the classes are {', '.join(shape.name for shape in shapes)}")
