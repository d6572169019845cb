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
from fourwave.ops.gemm.problem import GemmProblem

ISA_SHAPE = (4096, 4096, 4096)  # fills the chip: the largest tile


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
) -> None:
    (op,) = names.choose("operation", [op], ("gemm", "grouped"))
    sizes = None if M is None or N is None or K is None else (M, N, K)
    if (sizes is None and (M, N, K) != (None, None, None)) or (sizes is not None and min(sizes) < 0):
        out.fail("give M, N and K, none of them negative")
    if waits and not isa:
        out.fail("--waits goes with --isa")
    if archs and not isa:
        out.fail("--arch goes with --isa; name a simulated architecture as --backend sim:gfx942")
    if op == "grouped":
        run_explain_grouped(sizes, groups or 32, layout, dtype, out_dtype, backend, isa, archs, json, waits)
        return
    if groups is not None:
        out.fail("--groups goes with grouped")
    operands = names.dtype("--dtype", dtype)
    result = operands if out_dtype is None else names.dtype("--out-dtype", out_dtype)
    if isa:
        from fourwave.cli.isa import show_isa

        m, n, k = sizes or ISA_SHAPE
        problems = [
            GemmProblem(m, n, k, each, operands, operands, result) for each in names.layouts([layout] if layout else [])
        ]
        show_isa(dict.fromkeys(names.archs(archs), problems), json, check_waits=waits)
        return
    if sizes is None:
        out.fail("give M, N and K: fourwave explain gemm 4096 4096 4096")
    (chosen,) = names.layouts([layout or "TN"])
    on_gpu = torch.cuda.is_available() and not _simulated(backend)
    m, n, k = sizes
    problem = GemmProblem(m, n, k, chosen, operands, operands, result, device_type="cuda" if on_gpu else "cpu")
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


def _simulated(backend: str | None) -> bool:
    return backend is not None and backend.partition(":")[0] == "sim"
