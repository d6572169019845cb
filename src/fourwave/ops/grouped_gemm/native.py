"""The grouped GEMM by PyTorch alone: one product for each group.

On the CPU m_sizes is read. On a GPU nothing is read on the host: bfloat16 operands go to torch._grouped_mm where the GPU's
library has it, everything else multiplies all rows with every group's weights and keeps what belongs to it, which costs G
times the multiplications.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fourwave.ops.grouped_gemm.problem import ROWS, GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.reference import operand_values, spans, values, weight_values

Tensor = torch.Tensor


def describe(problem: GroupedProblem) -> tuple[str, list[str]]:
    if problem.device_type == "cpu":
        return "torch.mm", ["one product for each group, accumulated in fp32; scaled operands are dequantized to fp32"]
    if why_no_grouped_mm(problem) is None:
        return "torch._grouped_mm", []
    return "torch.mm", [
        "every group's product over all rows, since m_sizes may not be read on the host: G times the multiplications",
        f"torch._grouped_mm: {why_no_grouped_mm(problem)}",
    ]


def why_no_grouped_mm(problem: GroupedProblem) -> str | None:
    """Why torch._grouped_mm does not take this, or None."""
    if problem.device_type != "cuda" or torch.version.hip is not None or not hasattr(torch, "_grouped_mm"):
        return "this PyTorch has it for CUDA GPUs only"
    if torch.cuda.get_device_capability() < (9, 0):
        return "compute capability 9.0 or higher"
    if not problem.a_dtype == problem.b_dtype == problem.out_dtype == torch.bfloat16:
        return "bfloat16 operands and output"
    if problem.bias_dtype is not None or problem.accumulate:
        return "no bias and no accumulation"
    inner = (problem.a_shape[-1], problem.b_shape[-1], problem.N)
    if any(size % 8 for size in inner):
        return "rows of 16-byte multiples"
    return None


def run(problem: GroupedProblem, tensors: GroupedTensors) -> list[str]:
    if torch.is_autocast_enabled(problem.device_type):
        with torch.autocast(problem.device_type, enabled=False):
            return _run(problem, tensors)
    return _run(problem, tensors)


def _run(problem: GroupedProblem, tensors: GroupedTensors) -> list[str]:
    if problem.device_type == "cpu":
        _run_cpu(problem, tensors)
    elif why_no_grouped_mm(problem) is None and _aligned(tensors):
        _run_grouped_mm(problem, tensors)
    else:
        _run_masked(problem, tensors)
    return []


def _run_cpu(problem: GroupedProblem, tensors: GroupedTensors) -> None:
    from fourwave.backends.native import _inexact_fp32

    sizes = tensors.m_sizes.tolist()
    if any(size < 0 for size in sizes) or sum(sizes) > problem.rows:
        raise ValueError(
            f"m_sizes are {sizes}, {sum(sizes)} in all, and there are {problem.rows} rows: sizes must not be negative, and "
            "rows past their sum are left over, not the other way round"
        )
    # The setting is the process's: changing it for one product would race with other threads.
    work = torch.float64 if _inexact_fp32() else torch.float32
    out = tensors.out
    if problem.split == ROWS:
        a = _a_values(problem, tensors, sizes)
        for g, (start, end) in enumerate(spans(sizes, problem.M)):
            if start == end:
                continue
            b = weight_values(problem, tensors, g, torch.float32)
            acc = torch.mm(a[start:end].to(work), (b.mT if problem.b_k_last else b).to(work)).float()
            if tensors.bias is not None:
                acc.add_(tensors.bias[g])
            out[start:end].copy_(acc)
        out[sum(sizes) :].zero_()
        return
    a, b = operand_values(problem, tensors, sizes, torch.float32)
    a = a.mT if problem.a_k_last else a  # [rows, M]
    b = b.mT if problem.b_k_last else b
    for g, (start, end) in enumerate(spans(sizes, problem.K)):
        acc = torch.mm(a[start:end].mT.to(work), b[start:end].to(work)).float()
        out[g].copy_(acc.add_(out[g]) if problem.accumulate else acc)


def _a_values(problem: GroupedProblem, tensors: GroupedTensors, sizes: list[int]) -> Tensor:
    return operand_values(replace(problem, G=0), tensors, sizes, torch.float32)[0]


# ---- on a GPU, without a look at m_sizes -----------------------------------------------------------------------------


def _aligned(tensors: GroupedTensors) -> bool:
    return all(
        t.data_ptr() % 16 == 0 and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        for t in (tensors.a, tensors.b)
    )


def _ends(problem: GroupedProblem, tensors: GroupedTensors) -> Tensor:
    """Row past the last of each group, [G] int64."""
    return tensors.m_sizes.clamp(min=0).cumsum(0).clamp(max=problem.rows)


def _run_grouped_mm(problem: GroupedProblem, tensors: GroupedTensors) -> None:
    ends = _ends(problem, tensors)
    offs = ends.to(torch.int32)
    if problem.split == ROWS:
        b = tensors.b.mT if problem.b_k_last else tensors.b
        result = torch._grouped_mm(tensors.a, b, offs=offs)
        row = torch.arange(problem.M, device=result.device)
        tensors.out.copy_(result.masked_fill_((row >= ends[-1])[:, None], 0))
        return
    a = tensors.a if problem.a_k_last else tensors.a.mT
    b = tensors.b.mT if problem.b_k_last else tensors.b
    result = torch._grouped_mm(a, b, offs=offs)
    empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
    tensors.out.copy_(result.masked_fill_(empty[:, None, None], 0))


def _run_masked(problem: GroupedProblem, tensors: GroupedTensors) -> None:
    ends = _ends(problem, tensors)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    row = torch.arange(problem.rows, device=tensors.out.device)
    out = tensors.out
    if problem.split == ROWS:
        a_scale = tensors.a_scale
        if problem.a_scale_layout == "groups":
            a_scale = _rows_of_group_scales(problem, tensors, starts, ends, row)
        a = values(tensors.a, a_scale, problem.a_scaling, True, torch.float32)
        out.zero_()
        for g in range(problem.G):
            b = weight_values(problem, tensors, g, torch.float32)
            acc = torch.mm(a, b.mT if problem.b_k_last else b)
            if tensors.bias is not None:
                acc.add_(tensors.bias[g])
            inside = ((row >= starts[g]) & (row < ends[g]))[:, None]
            out.copy_(torch.where(inside, acc.to(out.dtype), out))
        return
    a = values(tensors.a, tensors.a_scale, problem.a_scaling, problem.a_k_last, torch.float32)
    b = values(tensors.b, tensors.b_scale, problem.b_scaling, problem.b_k_last, torch.float32)
    a = a.mT if problem.a_k_last else a
    b = b.mT if problem.b_k_last else b
    for g in range(problem.G):
        outside = ((row < starts[g]) | (row >= ends[g]))[:, None]
        acc = torch.mm(a.masked_fill(outside, 0).mT, b.masked_fill(outside, 0))
        out[g].copy_(acc.add_(out[g]) if problem.accumulate else acc)


def _rows_of_group_scales(
    problem: GroupedProblem, tensors: GroupedTensors, starts: Tensor, ends: Tensor, row: Tensor
) -> Tensor:
    assert tensors.a_scale is not None
    blocks = -(-problem.K // 128)
    group = torch.searchsorted(ends, row, right=True).clamp(max=problem.G - 1)
    start, size = starts[group], (ends - starts)[group]
    block = torch.arange(blocks, device=row.device)
    at = start[:, None] * blocks + (row - start)[:, None] + block * size[:, None]
    at = at.clamp(min=0, max=max(problem.M * blocks - 1, 0))  # of rows in no group: any scale will do
    return tensors.a_scale.reshape(-1)[at]
