"""What the compiler made of a grouped GEMM kernel (perf/isa.py), and how evenly its main-loop steps fall on compute units."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fourwave.perf.isa import CompiledKernel, compile_spec

if TYPE_CHECKING:
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem


def compile_grouped_isa(
    problem: GroupedProblem,
    config: GroupedConfig | None,
    arch: str,
    *,
    vectorised: bool = True,
    lines: bool = False,
) -> CompiledKernel:
    """As perf.isa.compile_isa."""
    from fourwave.ops.grouped_gemm import amd
    from fourwave.ops.grouped_gemm.config import default_config, why_unsupported

    if (reason := why_unsupported(problem, config, arch)) is not None:
        raise NotImplementedError(reason)
    if config is None:
        config, _ = default_config(problem, arch)
    return compile_spec(
        amd.__name__, amd.specialise(problem, config, arch, vectorised), arch, config.tile_k, lines=lines
    )


def busiest_unit_steps(problem: GroupedProblem, config: GroupedConfig, sizes: Sequence[int], units: int) -> int:
    """Main-loop steps (K tiles) of the compute unit that has most of them, if each unit takes the next workgroup when it is done.

    One workgroup per unit at a time; workgroups that find no tile cost nothing.
    """
    columns = -(-problem.N // config.tile_n)
    if problem.split == "rows":
        tiles = sum(-(-size // config.tile_m) for size in sizes)
        steps = -(-problem.K // config.tile_k)
        part = -(-steps // config.split_k)
        parts = [min(part, steps - first) for first in range(0, steps, part)]
        if len(set(parts)) <= 1:
            return -(-tiles * columns * len(parts) // units) * part
        work = [steps for steps in parts for _ in range(tiles * columns)]
    else:
        per_group = -(-problem.M // config.tile_m) * columns
        work = [-(-size // config.tile_k) for size in sizes for _ in range(per_group)]
    done = [0] * units
    for steps in work:
        heapq.heapreplace(done, done[0] + steps)
    return max(done)


def group_sizes(problem: GroupedProblem) -> tuple[list[int], list[int]]:
    """Sizes of the problem's groups: equal ones, and half of all rows in the first and the rest shared equally."""

    def shared(rows: int, groups: int) -> list[int]:
        return [rows // groups + (index < rows % groups) for index in range(groups)]

    groups, rows = problem.G, problem.rows
    if groups == 1:
        return [rows], [rows]
    return shared(rows, groups), [rows // 2, *shared(rows - rows // 2, groups - 1)]


def extra_lds_cycles(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    """LDS cycles that bank conflicts cost the fragment reads of one workgroup, counted by the simulator (its bank model is that of
    blocks/flydsl/tiles.py). The workgroup is the first of a small product of the same kind, whose operands are zeros."""
    from fourwave import sim
    from fourwave.ops.grouped_gemm import amd
    from fourwave.ops.grouped_gemm.config import is_mx, tiles_per_step
    from fourwave.ops.grouped_gemm.problem import GroupedTensors

    reduction = 2 * tiles_per_step(problem, config, arch) * config.tile_k
    small = replace(problem, G=1, M=config.tile_m, N=config.tile_n, K=reduction, device_type="cpu")

    def zeros(shape: tuple[int, ...] | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if shape is None else torch.zeros(shape, dtype=torch.uint8).to(dtype)

    scales = torch.float8_e8m0fnu if is_mx(problem) else torch.float32
    tensors = GroupedTensors(
        torch.zeros(small.a_shape).to(small.a_dtype), torch.zeros(small.b_shape).to(small.b_dtype),
        torch.tensor([small.rows], dtype=small.m_sizes_dtype), torch.zeros(small.out_shape, dtype=small.out_dtype),
        zeros((1, small.N), problem.bias_dtype) if problem.bias_dtype is not None else None,
        zeros(small.a_scale_shape, scales), zeros(small.b_scale_shape, scales),
    )  # fmt: skip
    with sim.session(arch=arch, count_bank_conflicts=True, on_finding="raise", workgroups=range(1)) as report:
        amd.run(small, config, arch, tensors)
    counters = report.launches[0].counters
    return counters["lds_read_cycles"] - counters["lds_read_cycles_ideal"]
