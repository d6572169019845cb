"""`fourwave explain grouped`: the selection for a grouped call, its kernels, and how evenly they fall on compute units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.markup import escape

from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES, REGISTERS
from fourwave.cli import console as out
from fourwave.cli import names
from fourwave.ops.gemm.config import FLOAT8, NUM_CUS
from fourwave.ops.grouped_gemm.config import GroupedConfig, why_unsupported
from fourwave.ops.grouped_gemm.explain import explain_problem
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS, GroupedProblem
from fourwave.perf.grouped import busiest_unit_steps, extra_lds_cycles, group_sizes

if TYPE_CHECKING:
    from fourwave.cli.isa import Compiled, Extra

SIZES = (16384, 4096, 4096)  # of --isa: rows, and the weights
# Word -> scales of a and of weights; of wgrad both operands have a's.
OPERANDS: dict[str, tuple[str | None, str | None]] = {
    "bf16": (None, None),
    "fp16": (None, None),
    "fp8": ("1x128", "128x128"),
    "fp8_1x128": ("1x128", "128x128"),  # the name that it has for one product
    "fp8_tensor": ("tensor", "tensor"),
    "mxfp8": ("1x32", "1x32"),
}


def run_explain_grouped(
    sizes: tuple[int, int, int] | None,
    groups: int,
    layout: str | None,
    dtype: str,
    out_dtype: str | None,
    backend: str | None,
    isa: bool,
    archs: list[str],
    json: Path | None,
    waits: bool,
) -> None:
    """sizes: (M, N, K) of GroupedProblem. TN is the forward product, NN dgrad, NT wgrad."""
    (operands,) = names.choose("--dtype", [dtype], OPERANDS)
    result = None if out_dtype is None else names.dtype("--out-dtype", out_dtype)
    if isa:
        from fourwave.cli.isa import show_isa

        by_arch = {arch: problems(sizes, groups, layout, operands, result, arch) for arch in names.archs(archs)}
        show_isa(by_arch, json, check_waits=waits)
        return
    if sizes is None:
        out.fail("give M, N and K: fourwave explain grouped 16384 4096 4096")
    simulated = (backend or "").partition(":")[2]
    on_gpu = torch.cuda.is_available() and not simulated
    problem = problem_of(sizes, groups, layout or "TN", operands, result, simulated or "gfx950", on_gpu)
    try:
        explanation = explain_problem(problem, backend=backend)
    except ValueError as error:
        out.fail(str(error))
    console = out.stdout()
    console.print(escape(str(explanation)), soft_wrap=True)
    record: dict[str, object] = {
        "problem": str(explanation.problem), "backend": explanation.backend, "kernel": explanation.kernel, "arch": explanation.arch,
        "config": None if explanation.config is None else str(explanation.config), "reasons": explanation.reasons,
        "rejected": explanation.rejected, "notes": explanation.notes,
        "error": None if explanation.error is None else str(explanation.error),
    }  # fmt: skip
    if isinstance(explanation.config, GroupedConfig) and explanation.arch is not None:
        steps = busiest_steps(problem, explanation.config, explanation.arch)
        record["busiest_unit_steps"] = steps
        console.print(
            f"main-loop steps of the busiest of {NUM_CUS[explanation.arch]} compute units: {steps[0]} with equal groups, "
            f"{steps[1]} with half of all rows in one ({steps[1] / max(1, steps[0]):.2f} times)",
            soft_wrap=True,
        )
    if json:
        out.write_json(json, record)
    if explanation.error is not None:
        raise typer.Exit(2)


def problem_of(
    sizes: tuple[int, int, int],
    groups: int,
    layout: str,
    operands: str,
    out_dtype: torch.dtype | None,
    arch: str,
    on_gpu: bool = True,
    preshuffled: bool = False,
) -> GroupedProblem:
    a_scaling, b_scaling = OPERANDS[operands]
    split = REDUCTION if layout == "NT" else ROWS
    plain = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(operands)
    codes = plain or FLOAT8["gfx950" if operands == "mxfp8" else arch][0]
    return GroupedProblem(
        groups, *sizes, split, layout, codes, codes, out_dtype or plain or torch.bfloat16, device_type="cuda" if on_gpu else "cpu",
        a_scaling=a_scaling, b_scaling=a_scaling if split == REDUCTION else b_scaling, b_preshuffled=preshuffled,
    )  # fmt: skip


def problems(
    sizes: tuple[int, int, int] | None,
    groups: int,
    layout: str | None,
    operands: str,
    out_dtype: torch.dtype | None,
    arch: str,
) -> list[GroupedProblem]:
    """Forward, preshuffled where there is such a kernel, dgrad and wgrad; or those of one layout."""
    made = []
    rows, n, k = SIZES
    for each in names.layouts([layout] if layout else []):
        size = sizes or ((n, k, rows) if each == "NT" else (rows, n, k))
        problem = problem_of(size, groups, each, operands, out_dtype, arch)
        made.append(problem)
        shuffled = replace(problem, b_preshuffled=True)
        if each == "TN" and problem.b_dtype.itemsize == 1 and why_unsupported(shuffled, None, arch) is None:
            made.append(shuffled)
    return made


def busiest_steps(problem: GroupedProblem, config: GroupedConfig, arch: str) -> tuple[int, int]:
    """Main-loop steps of the busiest compute unit: with equal groups, and with half of all rows in one of them."""
    equal, uneven = (busiest_unit_steps(problem, config, each, NUM_CUS[arch]) for each in group_sizes(problem))
    return equal, uneven


def further_facts(arch: str, compiled: Sequence[Compiled]) -> Extra:
    """LDS conflicts, and steps of the busiest compute unit."""
    conflicts, steps, together = [], [], []
    for problem, config, kernel in compiled:
        assert isinstance(problem, GroupedProblem) and isinstance(config, GroupedConfig)
        read = None if sim.unavailable() else extra_lds_cycles(problem, config, arch)
        conflicts.append("no simulator" if read is None else str(read))
        equal, uneven = busiest_steps(problem, config, arch)
        steps.append(f"{equal}, {uneven} ({uneven / max(1, equal):.2f})")
        # Registers come in eights; each of the four waves has a SIMD of its own.
        by_registers = REGISTERS // (-(-kernel.vgpr // 8) * 8)
        together.append(str(min(by_registers, LDS_BYTES[arch] // max(1, kernel.lds_bytes))))
    return {
        "workgroups that fit a compute unit": together,
        "LDS cycles lost to bank conflicts (simulated)": conflicts,
        f"steps of the busiest of {NUM_CUS[arch]} units: equal, uneven": steps,
    }
