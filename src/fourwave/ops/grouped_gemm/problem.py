"""Description of one grouped GEMM call: everything that backends, heuristics and caches may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fourwave.formats.scaling import SCALINGS, scale_shape
from fourwave.ops.gemm.problem import FLOAT8, FP8, LAYOUTS, MXFP4, MXFP8, PACKED_E2M1, PRECISIONS

ROWS, REDUCTION = "rows", "reduction"
SPLITS = (ROWS, REDUCTION)
SCALE_LAYOUTS = ("rows", "groups")
SIZE_DTYPES = (torch.int32, torch.int64)
_NAMES = {**PRECISIONS, **FLOAT8, PACKED_E2M1: "e2m1"}


class GroupedTensors(NamedTuple):
    """What a call reads and writes, as stored (GroupedProblem.a_shape, ...).

    a, b      inner stride 1, other strides at least what the inner dimensions span, any storage offset
    m_sizes   [G] int32 or int64, contiguous, on the device: rows of each group. What they add up to is at most the rows there are;
              negative ones count as 0
    out       [M, N], or [G, M, N] where the reduction is split; strides as a's. Shares no element with what is read
    bias      [G, N] contiguous, or None
    a_scale   contiguous; float32, or float8_e8m0fnu for "1x32"; GroupedProblem.a_scale_shape
    b_scale   likewise, any strides
    """

    a: torch.Tensor
    b: torch.Tensor
    m_sizes: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedProblem:
    """G products, one for each group of rows; rows of a group follow each other, and groups do.

    split "rows": out[M, N], row m of group g: out[m] = op(a)[m] @ op(b[g]) + bias[g]. Rows past the sum of m_sizes are zeros
        layout "TN"   a[M, K], b[G, N, K]   fprop, x @ w[g].T
        layout "NN"   a[M, K], b[G, K, N]   dgrad, dout @ w[g]
    split "reduction": out[G, M, N], out[g] = op(a)[:, rows of g] @ op(b)[rows of g] (+ out[g]); K is all rows. An empty group
        gives zeros, or the addend
        layout "NT"   a[K, M], b[K, N]      wgrad, dout.T @ x
        layout "TN"   a[M, K], b[N, K]      the same of operands that are stored transposed

    a_scaling, b_scaling  None: the operand's codes are its values. Else value = code * scale
    a_scale_layout  of "1x128" with split rows. "rows": [M, ceil(K / 128)]. "groups": the block of group g begins at element
                (its first row) * ceil(K / 128), and holds element (row m of the group, k block kb) at m + kb * (its rows)
    b_preshuffled   b[G, N, K] (TN, split rows) in the order of `preshuffle` (ops/grouped_gemm/preshuffle.py)
    device_type "cpu" or "cuda" (which is also what PyTorch calls an AMD GPU)
    """

    G: int
    M: int
    N: int
    K: int
    split: str
    layout: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    accumulate: bool = False
    device_type: str = "cpu"
    a_scaling: str | None = None
    b_scaling: str | None = None
    a_scale_layout: str = "rows"
    b_preshuffled: bool = False
    m_sizes_dtype: torch.dtype = torch.int64
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"split {self.split!r}: the splits are {', '.join(SPLITS)}")
        known = ("TN", "NN") if self.split == ROWS else ("NT", "TN")
        if self.layout not in LAYOUTS or self.layout not in known:
            raise ValueError(f"layout {self.layout!r} with split {self.split!r}: the layouts are {', '.join(known)}")
        if self.a_scale_layout not in SCALE_LAYOUTS:
            raise ValueError(f"a_scale_layout {self.a_scale_layout!r}: the layouts are {', '.join(SCALE_LAYOUTS)}")
        if self.a_scale_layout == "groups" and (self.a_scaling != "1x128" or self.split != ROWS):
            raise ValueError(
                f"a_scale_layout 'groups' with a_scaling {self.a_scaling!r}: it is a layout of '1x128' scales of [M, K] operands"
            )
        for name in ("a_scaling", "b_scaling"):
            if (scaling := getattr(self, name)) not in (None, *SCALINGS):
                raise ValueError(f"{name} {scaling!r}: None, {', '.join(SCALINGS)}")

    @property
    def rows(self) -> int:
        """Rows that m_sizes divides."""
        return self.M if self.split == ROWS else self.K

    @property
    def a_k_last(self) -> bool:
        """Whether the reduction is a's last dimension."""
        return self.layout != "NT"

    @property
    def b_k_last(self) -> bool:
        return self.layout == "TN"

    @property
    def a_shape(self) -> tuple[int, int]:
        """Stored shape of a."""
        return (self.M, self.K) if self.a_k_last else (self.K, self.M)

    @property
    def b_shape(self) -> tuple[int, ...]:
        """Stored shape of b."""
        matrix = (self.N, self.K) if self.b_k_last else (self.K, self.N)
        return (self.G, *matrix) if self.split == ROWS else matrix

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.M, self.N) if self.split == ROWS else (self.G, self.M, self.N)

    @property
    def a_scale_shape(self) -> tuple[int, ...] | None:
        if self.a_scaling is None:
            return None
        return scale_shape(self.a_scaling, *self.a_shape, self.a_k_last)

    @property
    def b_scale_shape(self) -> tuple[int, ...] | None:
        """Of weights one for each group first: [G] for "tensor", [G, N] for "row"."""
        if self.b_scaling is None:
            return None
        rows, columns = self.b_shape[-2:]
        shape = scale_shape(self.b_scaling, rows, columns, self.b_k_last)
        return (self.G, *shape) if self.split == ROWS else shape

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to multiply: the answer is empty, zeros, the bias or the addend."""
        return 0 in (self.G, self.M, self.N, self.K)

    @property
    def precision(self) -> str:
        """Name of the operands' precision in backend strings, as GemmProblem.precision."""
        if PACKED_E2M1 in (self.a_dtype, self.b_dtype):
            return MXFP4
        if "1x32" in (self.a_scaling, self.b_scaling):
            return MXFP8
        if self.b_dtype in FLOAT8:
            return FP8
        return PRECISIONS.get(self.a_dtype, FP8)

    @property
    def flops(self) -> int:
        """Multiplications plus additions if every row belongs to a group."""
        return 2 * self.M * self.N * self.K

    def __str__(self) -> str:
        sizes = (
            f"{self.G} groups, {self.M}x{self.N}x{self.K} {self.layout}, {'M' if self.split == ROWS else 'K'} in groups"
        )
        operands = " x ".join(
            _NAMES[dtype] + (f" ({scaling})" if scaling else "")
            for dtype, scaling in ((self.a_dtype, self.a_scaling), (self.b_dtype, self.b_scaling))
        )
        parts = [sizes, operands, f"out {_NAMES.get(self.out_dtype, self.out_dtype)}"]
        if self.a_scale_layout != "rows":
            parts.append("a's scales in blocks of groups")
        if self.bias_dtype is not None:
            parts.append(f"bias {_NAMES.get(self.bias_dtype, self.bias_dtype)}")
        for name in ("b_preshuffled", "accumulate", "fast_accum"):
            if getattr(self, name):
                parts.append(name)
        return ", ".join(parts) + f" on {self.device_type}"
