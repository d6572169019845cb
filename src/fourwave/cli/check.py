"""`fourwave check`: every AMD kernel over layouts, dtypes and awkward shapes, against float64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape

import fourwave as fw
from fourwave.backends import registry
from fourwave.backends.flydsl import device_arch
from fourwave.cli import console as out
from fourwave.cli import names
from fourwave.cli.check_plan import DEFAULT_PRECISIONS, PRECISIONS, SUBJECTS, WITH_LAYOUTS, Planned
from fourwave.cli.check_plan import rows as rows_of

BACKENDS = ("sim", "flydsl")
ALL = "all"
MAX_FAILURES = 20  # spelled out below the table; all are in it
MAX_REASON = 400  # characters of an error that are printed; the record has all of it


@dataclass(frozen=True)
class Row:
    """One row that ran. ratio: largest error over bound; error: what was raised instead of a result, or else broken."""

    arch: str
    kernel: str
    config: str
    mma: str
    group: str
    case: str
    ratio: float | None
    findings: int
    workgroups: int
    seconds: float
    error: str | None

    @property
    def passed(self) -> bool:
        return self.error is None and self.findings == 0 and self.ratio is not None and self.ratio <= 1


def run_row(planned: Planned, arch: str, backend: str) -> Row:
    simulated = backend == "sim"
    if simulated:
        from fourwave import sim

        sim.reset_report()
    ratio, error = None, None
    start = time.perf_counter()
    try:
        name, device = (f"sim:{arch}", "cpu") if simulated else (backend, "cuda")
        ratio, error = planned.run(name, device)
    except Exception as raised:  # a row that cannot run fails; the others still run
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.perf_counter() - start
    findings = workgroups = 0
    if simulated:
        report = sim.current_report()
        findings, workgroups = len(report.findings), report.workgroups
        if error is None and workgroups == 0:
            error = "no workgroup was simulated"
    kernel, config, mma = planned.describe(arch)
    return Row(arch, kernel, config, mma, planned.group, str(planned.case), ratio, findings, workgroups, seconds, error)


def run_check(
    subject: str,
    arch: Sequence[str],
    layout: Sequence[str],
    dtype: Sequence[str],
    backend: str,
    full: bool,
    seed: int,
    json: Path | None,
) -> None:
    (subject,) = names.choose("SUBJECT", [subject], SUBJECTS)
    (backend,) = names.choose("--backend", [backend], BACKENDS)
    if (dtype and subject != "gemm") or (layout and subject not in WITH_LAYOUTS):
        out.fail(
            f"--dtype chooses among the rows of gemm, --layout of {' and '.join(WITH_LAYOUTS)}: {subject} has a list of its own"
        )
    if full and subject not in WITH_LAYOUTS:
        out.fail(
            f"--full goes with {' and '.join(WITH_LAYOUTS)}: the rows of {subject} are the same with and without it"
        )
    known = names.MXFP4_ARCHS if subject == "mxfp4" else names.ARCHS
    if "gfx1250" in (each.lower() for each in names.split(arch)) and "gfx1250" not in known:
        out.fail("--arch gfx1250: of the kernels that check runs it has those of `fourwave check mxfp4`")
    archs, layouts = names.archs(arch, known), names.layouts(layout)
    dtype = names.split(dtype)
    if dtype and any(word.lower() == ALL for word in dtype):
        chosen = list(PRECISIONS)
    else:
        chosen = names.choose("--dtype", dtype, (*PRECISIONS, ALL)) if dtype else list(DEFAULT_PRECISIONS)
    if backend == "flydsl":
        archs = gpu_archs(archs if arch else [])
    else:
        for each in archs:
            if reason := registry.get(f"sim:{each}").unavailable():
                out.fail(reason)
    plans = [(each, planned) for each in archs for planned in rows_of(subject, each, layouts, chosen, full, seed)]
    rows: list[Row] = []
    start = time.perf_counter()
    with out.steps("check") as steps:
        steps.start(len(plans))
        for each, planned in plans:
            rows.append(run_row(planned, each, backend))
            failed = sum(not row.passed for row in rows)
            steps.done(f"{each} {planned.case}" + (f"  {failed} FAILED" if failed else ""))
    seconds = time.perf_counter() - start
    console = out.stdout()
    for each in archs:
        show_rows(console, each, [row for row in rows if row.arch == each], backend)
    failures = [row for row in rows if not row.passed]
    for row in failures[:MAX_FAILURES]:
        console.print(
            f"[bold red]FAILED[/] {escape(f'{row.arch} {row.case} [{row.config}]: {reason_of(row)}')}", soft_wrap=True
        )
    if len(failures) > MAX_FAILURES:
        console.print(f"... and {len(failures) - MAX_FAILURES} more")
    if json:
        out.write_json(
            json,
            {
                "subject": subject,
                "backend": backend,
                "fourwave": fw.__version__,
                "torch": torch.__version__,
                "seconds": seconds,
                "rows": [{**asdict(row), "passed": row.passed} for row in rows],
            },
        )
    worst = max((row.ratio for row in rows if row.ratio is not None), default=float("nan"))
    console.print(f"ms: inputs, compiling, {'simulating' if backend == 'sim' else 'running'} and comparing of one row")
    console.print(
        f"{len(rows)} rows, {len(rows) - len(failures)} passed, {len(failures)} failed; "
        f"largest error over bound {worst:.3f}; "
        f"{sum(row.findings for row in rows)} findings; {sum(row.workgroups for row in rows)} workgroups "
        f"{'simulated' if backend == 'sim' else 'not simulated (GPU)'}; {seconds:.0f} s",
        soft_wrap=True,
    )
    if failures:
        raise typer.Exit(1)


def gpu_archs(wanted: Sequence[str]) -> list[str]:
    """The architecture of the GPU that will run, which must be among those wanted, if any."""
    if reason := registry.get("flydsl").unavailable():
        out.fail(reason)
    here = device_arch(torch.cuda.current_device())
    if wanted and list(wanted) != [here]:
        out.fail(f"--arch {', '.join(wanted)}: the current GPU is {here}")
    return [here]


def reason_of(row: Row) -> str:
    if row.error is not None:
        return " | ".join(line.strip() for line in row.error.splitlines()[:3])[:MAX_REASON]
    if row.findings:
        return f"{row.findings} findings"
    return f"error is {row.ratio:.3g} times the bound"


def show_rows(console: Console, arch: str, rows: Sequence[Row], backend: str) -> None:
    table = out.table()
    table.add_column("for", no_wrap=True)
    table.add_column("shape, layout, dtype, ...", overflow="fold")
    with_config = any(row.config for row in rows)
    if with_config:
        table.add_column("tile, stages, waves", overflow="fold")
    for heading in ("error/bound", "findings", "workgroups", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row.group):
            table.add_section()
        previous = row.group
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        style = None if row.passed else "bold red"
        findings = "-" if backend != "sim" else str(row.findings)
        table.add_row(
            row.group, escape(row.case), *([row.config] * with_config), ratio, findings, str(row.workgroups), f"{row.seconds * 1e3:.0f}",
            style=style,
        )  # fmt: skip
    kernels = dict.fromkeys(word for row in rows for word in (row.kernel, row.mma) if word)
    where = "simulated" if backend == "sim" else "on the GPU"
    out.show(console, table, f"{arch}: {', '.join(kernels)}, {where}")
