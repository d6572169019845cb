"""`fourwave explain`: the selection for a call, or what its compiled kernel looks like."""

from __future__ import annotations

from pathlib import Path

import torch
import typer
from rich.markup import escape

from fourwave.cli import console as out
from fourwave.cli import names
from fourwave.cli.explain_grouped import run_explain_grouped
from fourwave.ops.gemm.explain import explain_problem
from fourwave.ops.gemm.problem import PRECISIONS, GemmProblem

ISA_SHAPE = (4096, 4096, 4096)  # fills the chip: the largest tile
SCHEDULE_SHAPE = (256, 256, 2560)  # 20 steps: each page of scales is filled twice, or nearly


def run_explain(
    op: str,
    M: int | None,
    N: int | None,
    K: int | None,
    layout: str | None,
    dtype: str,
    out_dtype: str | None,
    backend: str | None,
    isa: bool,
    archs: list[str],
    json: Path | None,
    waits: bool = False,
    groups: int | None = None,
    schedule: bool = False,
    svg: Path | None = None,
    batch_invariant: bool = False,
) -> None:
    (op,) = names.choose("operation", [op], ("gemm", "grouped"))
    sizes = None if M is None or N is None or K is None else (M, N, K)
    if (sizes is None and (M, N, K) != (None, None, None)) or (sizes is not None and min(sizes) < 0):
        out.fail("give M, N and K, none of them negative")
    if waits and not isa:
        out.fail("--waits goes with --isa")
    if svg and not schedule:
        out.fail("--svg goes with --schedule")
    if archs and not isa and not schedule:
        out.fail(f"--arch {archs[0]} goes with --isa; for a simulated architecture say --backend sim:{archs[0]}")
    if backend is not None and (isa or schedule):
        compiled = "--isa compiles" if isa else "--schedule simulates"
        out.fail(f"--backend {backend}: {compiled} for what --arch names and asks no backend; leave one away")
    if json and schedule:
        out.fail("--json goes with the selection and with --isa: --schedule prints its table, and draws it with --svg")
    if op == "grouped" and schedule:
        out.fail("--schedule goes with gemm: gfx1250 has no grouped kernel")
    if op == "grouped" and batch_invariant:
        out.fail("--batch-invariant goes with gemm: fw.grouped_gemm has no such mode")
    if op == "grouped":
        run_explain_grouped(sizes, groups or 32, layout, dtype, out_dtype, backend, isa, archs, json, waits)
        return
    if groups is not None:
        out.fail("--groups goes with grouped")
    m, n, k = sizes or (SCHEDULE_SHAPE if schedule else ISA_SHAPE)

    def problem_of(layout: str, arch: str | None, device: str = "cpu") -> GemmProblem:
        a, b, a_scaling, b_scaling = names.operands(dtype, arch)
        given = next((each for each in (a, b) if each in PRECISIONS), torch.bfloat16)
        result = given if out_dtype is None else names.dtype("--out-dtype", out_dtype)
        return GemmProblem(
            m, n, k, layout, a, b, result, device_type=device, a_scaling=a_scaling, b_scaling=b_scaling,
            batch_invariant=batch_invariant,
        )  # fmt: skip

    if schedule:
        if archs != ["gfx1250"] or isa:
            out.fail("--schedule goes with --arch gfx1250, whose kernel's it is, and not with --isa")
        show_schedule(problem_of(names.layouts([layout or "TN"])[0], "gfx1250"), svg)
        return
    if isa:
        from fourwave.cli.isa import show_isa

        chosen_archs = names.archs(archs, names.archs_for(dtype))
        layouts = names.layouts([layout] if layout else [])
        show_isa({arch: [problem_of(each, arch) for each in layouts] for arch in chosen_archs}, json, check_waits=waits)
        return
    if sizes is None:
        out.fail("give M, N and K: fourwave explain gemm 4096 4096 4096")
    (chosen,) = names.layouts([layout or "TN"])
    on_gpu = torch.cuda.is_available() and not _simulated(backend)
    problem = problem_of(chosen, (backend or "").partition(":")[2] or None, "cuda" if on_gpu else "cpu")
    try:
        explanation = explain_problem(problem, backend=backend)
    except ValueError as error:
        out.fail(str(error))
    out.stdout().print(escape(str(explanation)), soft_wrap=True)
    if json:
        out.write_json(
            json,
            {
                "problem": str(explanation.problem),
                "requested": explanation.requested,
                "source": explanation.source,
                "backend": explanation.backend,
                "kernel": explanation.kernel,
                "arch": explanation.arch,
                "config": None if explanation.config is None else str(explanation.config),
                "reasons": explanation.reasons,
                "rejected": explanation.rejected,
                "notes": explanation.notes,
                "error": None if explanation.error is None else str(explanation.error),
            },
        )
    if explanation.error is not None:
        raise typer.Exit(2)


def show_schedule(problem: GemmProblem, svg: Path | None) -> None:
    """Simulate one workgroup and print what its waves did, step by step."""
    from fourwave.backends import registry
    from fourwave.ops.gemm.config import why_unsupported
    from fourwave.perf import schedule

    if reason := registry.get("sim:gfx1250").unavailable() or why_unsupported(problem, None, "gfx1250"):
        out.fail(reason)
    if problem.is_empty:
        out.fail(f"{problem}: there is nothing to multiply, so no schedule")
    steps = schedule.trace_steps(problem)
    typer.echo(schedule.markdown(steps))
    if svg:
        svg.write_text(schedule.svg(steps))


def _simulated(backend: str | None) -> bool:
    return backend is not None and backend.partition(":")[0] == "sim"
