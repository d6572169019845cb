"""What the compiler made of a grouped GEMM kernel (perf/isa.py), and how evenly its main-loop steps fall on compute units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
        work = [-(-problem.K // config.tile_k)] * (tiles * columns)
    else:
        per_group = -(-problem.M // config.tile_m) * columns
        work = [-(-size // config.tile_k) for size in sizes for _ in range(per_group)]
    done = [0] * units
    for steps in work:
        index = done.index(min(done))
        done[index] += steps
    return max(done)
