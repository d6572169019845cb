"""`fourwave check`: every AMD kernel over layouts, dtypes and awkward shapes, against float64."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.markup import escape

import fourwave as fw
from fourwave.backends import registry
from fourwave.backends.flydsl import describe_amd_gemm, device_arch
from fourwave.cli import console as out
from fourwave.cli import names
from fourwave.ops.gemm.config import FLOAT8, GemmConfig, candidates, default_config
from fourwave.ops.gemm.problem import FP8, PRECISIONS
from fourwave.testing.cases import GemmCase
from fourwave.testing.shapes import GEMM_SHAPES, GEMM_SHAPES_FULL, Shape, by_name

BACKENDS = ("sim", "flydsl")
DTYPES = (torch.bfloat16, torch.float16)  # the default; FP8 (TN only, every mix) has to be named
# "sliced" on rows of whole 16-byte chunks is read in place, the NaN right behind each row's end; the others are copied.
VIEWS = (
    ("sliced", by_name("tail K")),
    ("sliced", by_name("tail all")),
    ("offset", by_name("tail all")),
    ("transposed", by_name("tail all")),
)
MAX_FAILURES = 20  # spelled out below the table; all are in it
MAX_REASON = 400  # characters of an error that are printed; the record has all of it
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Planned:
    """One row to be: a call, its config (None: the kernel's own choice), and what the row is for."""

    group: str
    case: GemmCase
    config: GemmConfig | None = None


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


def plan(arch: str, layouts: Sequence[str], dtypes: Sequence[torch.dtype], full: bool, seed: int) -> Iterator[Planned]:
    """The rows for one architecture.

    shapes    every shape class for each layout and dtype, with the config that the kernel chooses itself
    tiles     each other config of the kernel, on an even shape and one with tails in M, N and K
    outputs   each other output dtype
    views     operands and output inside larger buffers, aligned and not, and transposed
    epilogue  bias, activation, alpha; adding to the output
    """
    tails = by_name("tail all")
    for layout in layouts:
        for dtype, b_dtype in operands(arch, layout, dtypes):
            base = GemmCase(tails, layout, dtype, seed=seed, b_dtype=b_dtype)
            eight_bit = b_dtype is not None
            first = (dtype, b_dtype) == (FLOAT8[arch] if eight_bit else (dtypes[0], None))
            for shape in GEMM_SHAPES:
                yield Planned("shapes", replace(base, shape=shape))
            # Configs, outputs and views do not depend on which dtypes of one size run: one of them covers them.
            if full or first:
                for config in candidates(arch, dtype.itemsize):
                    for shape in tile_shapes(config, full):
                        case = replace(base, shape=shape)
                        if full or default_config(case.problem, arch)[0] != config:
                            yield Planned("tiles", case, config)
                for view, shape in VIEWS:
                    yield Planned("views", replace(base, shape=shape, a_view=view, b_view=view, out_view=view))
            for out_dtype in OUT_DTYPES if full else (torch.float32,):
                if out_dtype != base.written:
                    for shape in (by_name("even"), tails):
                        yield Planned("outputs", replace(base, shape=shape, out_dtype=out_dtype))
            for case in epilogues(base, full or (first and layout == layouts[0])):
                yield Planned("epilogue", case)


def operands(arch: str, layout: str, dtypes: Sequence[torch.dtype]) -> Iterator[tuple[torch.dtype, torch.dtype | None]]:
    """(a, b) for each dtype: b is None where it is a's; any 8-bit one stands for every mix that arch has."""
    for dtype in dtypes:
        if dtype.itemsize > 1:
            yield dtype, None
    if layout == "TN" and any(dtype.itemsize == 1 for dtype in dtypes):
        for a in FLOAT8[arch]:
            for b in FLOAT8[arch]:
                yield a, b


def tile_shapes(config: GemmConfig, full: bool) -> tuple[Shape, ...]:
    """Shapes that give `config` more than one tile in M and N, or nearly."""
    if full:
        return (*GEMM_SHAPES, *GEMM_SHAPES_FULL)
    if max(config.tile_m, config.tile_n) >= 256:
        return (by_name("even, 4 tiles of 256"), by_name("tails, 4 tiles of 256"))
    return (by_name("even"), by_name("tail all"))


def epilogues(base: GemmCase, every: bool) -> Iterator[GemmCase]:
    yield replace(base, bias_dtype=base.written, activation="gelu", alpha=0.75)
    yield replace(base, accumulate=True, out_dtype=torch.float32)
    if every:
        yield replace(base, bias_dtype=torch.float32, activation="relu", shape=by_name("even"))
        yield replace(base, bias_dtype=torch.float32, activation="silu")
        yield replace(base, activation="gelu_tanh", accumulate=True, shape=by_name("even"))


def short(config: GemmConfig | None) -> str:
    """256x256x32 s4 w2x2: tile m x n x k, LDS stages, waves m x n."""
    if config is None:
        return ""
    tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    return f"{tile} s{config.num_stages} w{config.waves_m}x{config.waves_n}"


def run_row(planned: Planned, arch: str, backend: str) -> Row:
    case = planned.case
    simulated = backend == "sim"
    if simulated:
        from fourwave import sim

        sim.reset_report()
    ratio, error = None, None
    start = time.perf_counter()
    try:
        result = case.run(
            f"sim:{arch}" if simulated else backend, device="cpu" if simulated else "cuda", config=planned.config
        )
        ratio, error = result.ratio, result.guards
    except Exception as raised:  # a row that cannot run fails; the others still run
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.perf_counter() - start
    findings = workgroups = 0
    if simulated:
        report = sim.current_report()
        findings, workgroups = len(report.findings), report.workgroups
        if error is None and workgroups == 0:
            error = "no workgroup was simulated"
    description = describe_amd_gemm(case.problem, planned.config, arch)
    assert description.config is not None, "the case is not empty"
    return Row(
        arch, description.kernel, short(description.config), description.config.mma, planned.group, str(case), ratio,
        findings, workgroups, seconds, error,
    )  # fmt: skip


def run_check(
    arch: Sequence[str],
    layout: Sequence[str],
    dtype: Sequence[str],
    backend: str,
    full: bool,
    seed: int,
    json: Path | None,
) -> None:
    (backend,) = names.choose("--backend", [backend], BACKENDS)
    archs, layouts = names.archs(arch), names.layouts(layout)
    words = [PRECISIONS[d] for d in DTYPES]
    chosen = names.choose("--dtype", dtype, (*words, FP8)) if dtype else words
    dtypes = [names.DTYPES[name] for name in chosen if name != FP8]
    if FP8 in chosen:
        dtypes.append(FLOAT8[archs[0]][0])
    if chosen == [FP8] and "TN" not in layouts:
        out.fail("--dtype fp8: the kernels have 8-bit operands in layout TN only")
    if backend == "flydsl":
        archs = gpu_archs(archs if arch else [])
    else:
        for each in archs:
            if reason := registry.get(f"sim:{each}").unavailable():
                out.fail(reason)
    plans = [(each, planned) for each in archs for planned in plan(each, layouts, dtypes, full, seed)]
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
            row.group, escape(row.case), row.config, ratio, findings, str(row.workgroups), f"{row.seconds * 1e3:.0f}",
            style=style,
        )  # fmt: skip
    instructions = " and ".join(dict.fromkeys(row.mma for row in rows))
    where = "simulated" if backend == "sim" else "on the GPU"
    out.show(console, table, f"{arch}: {rows[0].kernel}, {instructions}, {where}")
