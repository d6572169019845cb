"""The grouped GEMM's definition in plain PyTorch, written to be read: the truth that tests compare backends with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fourwave import formats
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1
from fourwave.ops.grouped_gemm.preshuffle import unshuffle
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors

Tensor = torch.Tensor


def spans(sizes: Sequence[int], rows: int) -> Iterator[tuple[int, int]]:
    """(first row, row past the last) of each group; negative sizes count as 0, and nothing reaches past `rows`."""
    start = 0
    for size in sizes:
        end = min(start + max(size, 0), rows)
        yield start, end
        start = end


def grouped_reference(a: Tensor, b: Tensor, sizes: Sequence[int], *, bias: Tensor | None = None) -> Tensor:
    """[M, N] float64. a[M, K], b[G, N, K], bias[G, N]: values, of any dtype. Rows past the sum of sizes are zeros."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for g, (start, end) in enumerate(spans(sizes, a.shape[0])):
        out[start:end] = a[start:end].double() @ b[g].double().mT
        if bias is not None:
            out[start:end] += bias[g].double()
    return out


def wgrad_reference(a: Tensor, b: Tensor, sizes: Sequence[int], *, addend: Tensor | None = None) -> Tensor:
    """[G, M, N] float64. a[K, M], b[K, N]: values, of any dtype."""
    out = torch.zeros(len(sizes), a.shape[1], b.shape[1], dtype=torch.float64)
    for g, (start, end) in enumerate(spans(sizes, a.shape[0])):
        out[g] = a[start:end].double().mT @ b[start:end].double()
    return out if addend is None else out + addend.double()


def rows_of_group_scales(scale: Tensor, sizes: Sequence[int], rows: int, blocks: int) -> Tensor:
    """Scales in layout "groups" (GroupedProblem.a_scale_layout) as [rows, blocks]; rows past the groups get 1."""
    flat = scale.reshape(-1)
    out = torch.ones(rows, blocks, dtype=scale.dtype, device=scale.device)
    for start, end in spans(sizes, rows):
        out[start:end] = flat[start * blocks : end * blocks].view(blocks, end - start).mT
    return out


def values(
    t: Tensor, scale: Tensor | None, scaling: str | None, k_last: bool, dtype: torch.dtype = torch.float64
) -> Tensor:
    """A stored matrix as numbers, code * scale."""
    if t.dtype == PACKED_E2M1:
        t = formats.decode(formats.unpack_e2m1(t), formats.E2M1, known=True)
    elif t.dtype not in FLOAT8:
        return t.to(dtype)
    t = t.to(dtype)
    if scale is None or scaling is None:
        return t
    return t * expand_scale(scale, scaling, tuple(t.shape), k_last, dtype)


def operand_values(
    problem: GroupedProblem, tensors: GroupedTensors, sizes: Sequence[int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """a and b as numbers in stored order, scales of every layout multiplied in, preshuffled weights put back in order."""
    a_scale = tensors.a_scale
    if problem.a_scale_layout == "groups":
        assert a_scale is not None
        a_scale = rows_of_group_scales(a_scale, sizes, problem.M, -(-problem.K // 128))
    a = values(tensors.a, a_scale, problem.a_scaling, problem.a_k_last, dtype)
    if problem.split != "rows":
        return a, values(tensors.b, tensors.b_scale, problem.b_scaling, problem.b_k_last, dtype)
    b = [weight_values(problem, tensors, g, dtype) for g in range(problem.G)]
    return a, torch.stack(b) if b else torch.zeros(problem.b_shape, dtype=dtype, device=a.device)


def weight_values(
    problem: GroupedProblem, tensors: GroupedTensors, g: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """b[g] as numbers."""
    codes = tensors.b[g]
    if problem.b_preshuffled:
        codes = unshuffle(codes.contiguous().view(torch.uint8)).view(codes.dtype)
    scale = None if tensors.b_scale is None else tensors.b_scale[g]
    return values(codes, scale, problem.b_scaling, problem.b_k_last, dtype)
