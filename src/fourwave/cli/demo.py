"""`fourwave demo`: prints what fourwave.demo.run measured."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console
from rich.markup import escape

from fourwave.cli import console as out
from fourwave.demo import text
from fourwave.demo.model import ModelUnavailable
from fourwave.demo.run import MIN_COSINE, choose_backend, run
from fourwave.errors import BackendUnavailable

if TYPE_CHECKING:
    from fourwave.demo.run import DemoResult

MAX_TABLE = 16  # sentences whose similarities are shown as a full table
MIN_SENTENCE = 16  # columns that a sentence needs beside its numbers
MAX_FINDINGS = 10  # printed; all are counted


def run_demo(texts: list[str], file: Path | None, backend: str, threads: int | None, json: Path | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    try:
        sentences = text.read_sentences(texts, file, sys.stdin)
    except OSError as error:
        out.fail(f"cannot read {file}: {error.strerror}")
    except ValueError as error:
        out.fail(str(error))
    console = out.stdout()
    start = time.perf_counter()
    try:
        chosen, why = choose_backend(backend)
        console.print(f"backend [bold]{escape(chosen)}[/] ({escape(why)})", soft_wrap=True)
        with out.steps(f"{len(sentences)} sentences, Linears on {chosen}", "loading the model") as steps:
            result = run(
                sentences,
                chosen,
                on_start=steps.start,
                on_call=lambda record: steps.done(f"{record.name} {record.M}x{record.N}x{record.K}"),
            )
    except (ModelUnavailable, BackendUnavailable, ValueError, NotImplementedError) as error:
        out.fail(str(error))
    wall = time.perf_counter() - start
    failures = result.failures()
    show(console, result, wall)
    if json:
        out.write_json(json, as_record(result, wall, failures))
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    if failures:
        raise typer.Exit(1)
    found = ", no findings" if result.simulated else ""
    console.print(f"[bold green]OK[/] every Linear within its bound, every embedding within its cosine{found}")


def show(console: Console, result: DemoResult, wall: float) -> None:
    for index, tokens in result.truncated.items():
        console.print(
            f"[yellow]note:[/] sentence {index + 1} has {tokens} tokens; the model takes {result.max_tokens}, "
            f"so the last {tokens - result.max_tokens} were cut off by the tokenizer"
        )
    show_similarity(console, result)
    show_errors(console, result)
    show_findings(console, result)
    show_summary(console, result, wall)


def show_similarity(console: Console, result: DemoResult) -> None:
    """Every pair as a table where it fits, else the most similar pairs."""
    similarity = result.similarity
    count = len(result.sentences)
    room = console.width - 6 * count - 6  # for the sentence; a number and its gap are 6 wide
    if count > MAX_TABLE or room < MIN_SENTENCE:
        table = out.table()
        table.add_column("cosine", justify="right", no_wrap=True, min_width=6)
        for _ in range(2):
            table.add_column("sentence", overflow="ellipsis", no_wrap=True, max_width=(console.width - 16) // 2)
        rows, columns = torch.triu_indices(count, count, offset=1)
        for pair in similarity[rows, columns].argsort(descending=True)[:MAX_TABLE].tolist():
            i, j = int(rows[pair]), int(columns[pair])
            table.add_row(f"{similarity[i, j]:.3f}", escape(result.sentences[i]), escape(result.sentences[j]))
        out.show(console, table, f"Most similar pairs of {count} sentences (cosine)")
        return
    table = out.table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", justify="right", no_wrap=True, min_width=2)
    table.add_column("sentence", overflow="ellipsis", no_wrap=True, max_width=min(room, 60))
    for index in range(count):
        table.add_column(str(index + 1), justify="right", no_wrap=True, min_width=5)
    for i, sentence in enumerate(result.sentences):
        cells = []
        for j in range(count):
            value = similarity[i, j].item()
            style = "dim" if i == j else "bold green" if value > 0.3 else ""
            cells.append(f"[{style}]{value:.2f}[/]" if style else f"{value:.2f}")
        table.add_row(str(i + 1), escape(sentence), *cells)
    out.show(console, table, "Similarity of the sentences (cosine)")


def show_errors(console: Console, result: DemoResult) -> None:
    """One row per layer of the encoder, one column per Linear in it: the largest error over bound of its calls."""
    worst: dict[tuple[str, str], float] = {}
    for record in result.records:
        match = re.match(r".*?\b(layer\.\d+)\.(.*)", record.name)
        layer, linear = match.groups() if match else (record.name.removesuffix(".dense"), "")
        key = (layer, linear)
        ratio = record.max_ratio
        if key not in worst or not ratio <= worst[key]:
            worst[key] = ratio
    linears = list(dict.fromkeys(linear for _, linear in worst if linear))
    table = out.table()
    table.add_column("layer", no_wrap=True)
    for linear in linears:
        table.add_column(linear.replace("attention.self.", "").removesuffix(".dense"), justify="right")
    alone = {layer: value for (layer, linear), value in worst.items() if not linear}
    for layer in dict.fromkeys(layer for layer, linear in worst if linear):
        table.add_row(layer, *(ratio_cell(worst[layer, linear]) for linear in linears))
    for layer, value in alone.items():
        table.add_row(layer, ratio_cell(value), *[""] * (len(linears) - 1))
    out.show(console, table, "Largest error over bound of each Linear (against float64; at most 1 is right)")


def ratio_cell(value: float) -> str:
    return f"{value:.3f}" if value <= 1 else f"[bold red]{value:.3g}[/]"


def show_findings(console: Console, result: DemoResult) -> None:
    if not result.findings:
        return
    table = out.table()
    for heading in ("kind", "where", "message", "count"):
        table.add_column(heading)
    for finding in result.findings[:MAX_FINDINGS]:
        table.add_row(finding.kind, f"{finding.file}:{finding.line}", escape(finding.message), str(finding.count))
    out.show(console, table, "Findings of the simulator's checkers")


def show_summary(console: Console, result: DemoResult, wall: float) -> None:
    cosine = result.cosine
    products = sum(2 * record.M * record.N * record.K for record in result.records)
    table = out.table(show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "Linears through fourwave.gemm",
        f"{result.num_linears}, in {len(result.records)} calls, {products / 1e9:.2f} GFLOP, "
        "bf16 operands, float32 sums and output",
    )
    table.add_row(
        "cosine to full float32 precision",
        f"smallest {cosine.min().item():.6f}, mean {cosine.mean().item():.6f} (must be at least {MIN_COSINE})",
    )
    if result.simulated:
        per = result.gemm_seconds / result.workgroups * 1e3 if result.workgroups else float("nan")
        table.add_row("workgroups simulated", f"{result.workgroups} ({per:.1f} ms each, compiling included)")
        table.add_row("findings of the checkers", str(len(result.findings)))
    else:
        table.add_row("workgroups simulated", "none: the kernels did not run in the simulator")
    table.add_row(
        "time",
        f"{wall:.1f} s: {result.load_seconds:.1f} s loading and the float32 pass, {result.seconds:.1f} s the fourwave "
        f"pass: {result.gemm_seconds:.1f} s in gemm, most of the rest comparing with float64",
    )
    out.show(console, table)


def as_record(result: DemoResult, wall: float, failures: list[str]) -> dict[str, object]:
    return {
        "backend": result.backend,
        "sentences": result.sentences,
        "similarity": result.similarity.tolist(),
        "cosine_to_float32": result.cosine.tolist(),
        "linears": [asdict(record) for record in result.records],
        "workgroups": result.workgroups,
        "findings": [asdict(finding) for finding in result.findings],
        "truncated_tokens": {str(index + 1): tokens for index, tokens in result.truncated.items()},
        "seconds": wall,
        "failures": failures,
    }
