"""The commands of `fourwave`: options and help texts. A command's module is imported when the command runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="fourwave",
    help="Low-precision GEMM for PyTorch, with AMD kernels that run and are checked on any CPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # folds paragraphs to the terminal's width
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(
    help="Measure speed. So far only the simulator's own.", no_args_is_help=True, rich_markup_mode="markdown"
)
app.add_typer(bench_app, name="bench")


def _writable(path: Path | None) -> Path | None:
    """Before the command runs: what it finds out in an hour shall not be lost then."""
    if path is not None:
        place = path if path.exists() else path.parent
        if path.is_dir() or not place.exists() or not os.access(place, os.W_OK):
            raise typer.BadParameter(
                f"cannot write {path}: {'a folder' if path.is_dir() else f'no way to write to {place}'}"
            )
    return path


JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the record to FILE as well.", callback=_writable),
]


def show_version(value: bool) -> None:
    if value:
        import fourwave

        typer.echo(f"fourwave {fourwave.__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Sentences to embed, one an argument; - reads them from standard input, one a line."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read sentences from FILE, one a line.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            metavar="BACKEND",
            help="auto: what FOURWAVE_BACKEND names, else an AMD GPU if there is one, else sim:gfx950. Or sim:gfx950, sim:gfx942, flydsl, hopper, native.",
        ),
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, metavar="N", help="CPU threads for PyTorch. Default: PyTorch's.", show_default=False
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Embed sentences with a real model whose every Linear runs through fourwave.gemm.

    Prints the sentences' similarities, each Linear's error against float64 over its bound, the embeddings' cosine to
    full precision, and what the simulator ran and found. Exit status 1 if a bound is exceeded, a checker of the
    simulator reports anything, or a cosine is under 0.999.
    """
    from fourwave.cli.demo import run_demo

    run_demo(text or [], file, backend, threads, json)


@app.command()
def check(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="SUBJECT",
            help="gemm; mxfp4 (gemm of MXFP4 operands); quantize; or grouped (forward, dgrad and wgrad).",
        ),
    ] = "gemm",
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="gfx950 or gfx942 (mxfp4: gfx1250 or gfx950); repeat for several. Default: both.",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="Of gemm and mxfp4: TN, NN or NT; repeatable. Default: all. quantize and grouped refuse it.",
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Of gemm: bf16, fp16, fp32, fp8, mxfp8, or all; repeatable. Default: bf16, fp16. The others have a list of their own "
            "and refuse it.",
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            help="sim: the simulator; flydsl: the AMD GPU of this machine, whose architecture --arch may only repeat.",
        ),
    ] = "sim",
    full: Annotated[
        bool,
        typer.Option("--full", help="Of gemm and mxfp4: every combination, not a covering choice. An hour and more."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the inputs.")] = 0,
    json: JsonFile = None,
) -> None:
    """Run every AMD kernel over layouts, dtypes and awkward shapes, and compare with float64.

    Operands differ by decades from row to row, padding around views holds NaN, outputs start as NaN between guard
    bytes. A row passes when its largest error is within the bound and the simulator's checkers found nothing; exit
    status 1 if any row fails.
    """
    from fourwave.cli.check import run_check

    run_check(subject, arch or [], layout or [], dtype or [], backend, full, seed, json)


@app.command()
def doctor(
    sim: Annotated[
        bool, typer.Option("--sim", help="List what the simulator handles on each arch, and which tests cover it.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Say what is installed, which devices there are, and which backends can run here and why others cannot."""
    from fourwave.cli.doctor import run_doctor, run_doctor_sim

    if sim:
        run_doctor_sim(json)
    else:
        run_doctor(json)


@app.command()
def explain(
    op: Annotated[str, typer.Argument(help="The operation: gemm or grouped.")] = "gemm",
    m: Annotated[int | None, typer.Argument(metavar="M", help="Output rows.", show_default=False)] = None,
    n: Annotated[int | None, typer.Argument(metavar="N", help="Output columns.", show_default=False)] = None,
    k: Annotated[int | None, typer.Argument(metavar="K", help="Reduction length.", show_default=False)] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="LAYOUT", help="TN, NN or NT. Default: TN; with --isa all three.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Of the operands: bf16, fp16, fp32, fp8 (one scale), fp8_row, fp8_1x128, mxfp8, mxfp4, mxfp8_mxfp4, mxfp4_mxfp8 or "
            "bf16_mxfp4; "
            "grouped: bf16, fp16, fp8 or fp8_1x128 (blocks, 1x128 with 128x128), fp8_tensor or mxfp8.",
        ),
    ] = "bf16",
    out_dtype: Annotated[
        str | None,
        typer.Option(
            "--out-dtype", metavar="DTYPE", help="bf16, fp16 or fp32. Default: the operands', of 8 bits or fewer: bf16."
        ),
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option("--groups", min=1, metavar="G", help="grouped: how many groups. Default: 32.", show_default=False),
    ] = None,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="gemm: as if the call had asked for it, which keeps K whole.")
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend",
            metavar="BACKEND",
            help="As if the call had named this one: native, flydsl, hopper, sim:gfx950, sim:gfx942, sim:gfx1250 or auto. Default: "
            "FOURWAVE_BACKEND, else auto. Not with --isa or --schedule.",
        ),
    ] = None,
    isa: Annotated[
        bool, typer.Option("--isa", help="Compile and print registers, LDS, spills and main-loop instructions.")
    ] = False,
    waits: Annotated[
        bool, typer.Option("--waits", help="With --isa: check each counted wait against the machine code's order.")
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="With --isa: gfx950, gfx942 or (MX formats) gfx1250; repeatable. Default: all that apply.",
        ),
    ] = None,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="gemm, with --arch gfx1250 and a dtype of MX: simulate a workgroup, print what its waves do in each step.",
        ),
    ] = False,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="With --schedule: draw it.")] = None,
    json: JsonFile = None,
) -> None:
    """Say which backend, kernel and config a GEMM gets and why, or (--isa) what its compiled kernel looks like.

    Examples: `fourwave explain gemm 4096 4096 4096 --layout NT`, `fourwave explain gemm --isa --arch gfx950`,
    `fourwave explain grouped --isa --dtype fp8`. Of grouped GEMM, TN is the forward product, NN dgrad and NT wgrad (K: all rows).

    Nothing is run (but --schedule simulates). With --isa and no M N K, the kernels are those of a size that fills the chip. Exit status 1 if --isa
    shows a spill or --waits a finding, 2 if the call would raise.
    """
    from fourwave.cli.explain import run_explain

    run_explain(
        op,
        m,
        n,
        k,
        layout,
        dtype,
        out_dtype,
        backend,
        isa,
        arch or [],
        json,
        waits,
        groups,
        schedule,
        svg,
        batch_invariant,
    )


@bench_app.command("sim")
def bench_sim(
    arch: Annotated[
        str, typer.Option("--arch", metavar="ARCH", help="Whose kernels are simulated: gfx950 or gfx942.")
    ] = "gfx950",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, metavar="N", help="Launches to time, after one that is not timed.")
    ] = 7,
    json: JsonFile = None,
) -> None:
    """Time the simulator: milliseconds per 256x256x1024 workgroup of bf16 and of FP8, over launches of four.

    This is the speed of the simulator on this CPU. It says nothing about the speed of any GPU.
    """
    from fourwave.cli.bench import run_bench_sim

    run_bench_sim(arch, repeats, json)


@app.command(name="sim", context_settings={"allow_interspersed_args": False})
def sim_command(
    script: Annotated[
        Path, typer.Argument(metavar="SCRIPT", help="A Python script with FlyDSL launches, written for a GPU.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")] = None,
    arch: Annotated[
        str, typer.Option("--arch", metavar="ARCH", help="GPU to simulate: gfx950, gfx942, gfx1250.")
    ] = "gfx950",
    checks: Annotated[
        str,
        typer.Option(
            "--checks",
            metavar="LIST",
            help="all, or some of memory,init,race,wait,barrier,global; or memcheck,initcheck,racecheck,waitcheck,synccheck.",
        ),
    ] = "all",
    completion: Annotated[
        str, typer.Option("--completion", metavar="WHEN", help="When copies to LDS land: late, early or random.")
    ] = "late",
    schedule: Annotated[
        str,
        typer.Option(
            "--schedule", metavar="ORDER", help="Turns of a workgroup's waves: forward, reverse, random:SEED."
        ),
    ] = "forward",
    threads: Annotated[int | None, typer.Option("--threads", help="Host threads; all cores by default.")] = None,
    step_limit: Annotated[
        int, typer.Option("--step-limit", help="Stop a wave after so many instructions; 0: never.")
    ] = 0,
    mutate: Annotated[
        bool,
        typer.Option(
            "--mutate", help="Plant every fault, one at a time, in each kernel, and report which go unnoticed."
        ),
    ] = False,
    expect: Annotated[
        Path | None,
        typer.Option("--expect", metavar="FILE", help="Survivors of --mutate that are known, with reasons."),
    ] = None,
    waits: Annotated[
        bool,
        typer.Option(
            "--waits", help="Compile each kernel that ran and check its counted waits against the machine code's order."
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Run a FlyDSL script written for an AMD GPU on a machine without one, and check its kernels.

    `.cuda()`, `device="cuda"`, streams and events are served on the CPU for the script's process.
    Exit status: the script's own, or 1 when a checker found something.
    """
    from fourwave.cli.sim import run

    run(
        script, arguments or [], arch=arch, checks=checks, completion=completion, schedule=schedule, threads=threads,
        step_limit=step_limit, mutate=mutate, expect=expect, waits=waits, json_file=json_file,
    )  # fmt: skip
