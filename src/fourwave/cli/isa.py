"""`fourwave explain --isa`: registers, LDS, spills and main-loop instructions of compiled kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from fourwave.backends.flydsl import flydsl_missing
from fourwave.cli import console as out
from fourwave.ops.gemm.config import GemmConfig
from fourwave.ops.grouped_gemm.config import GroupedConfig

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem
    from fourwave.ops.grouped_gemm.problem import GroupedProblem
    from fourwave.perf.isa import CompiledKernel
    from fourwave.perf.waits import Matched, WaitFinding

    Problem = GemmProblem | GroupedProblem
Compiled = tuple["Problem", GemmConfig | GroupedConfig, "CompiledKernel"]
Extra = dict[str, list[str]]  # further rows of the table, a cell for each kernel


def show_isa(problems: Mapping[str, Sequence[Problem]], json: Path | None, *, check_waits: bool = False) -> None:
    """problems: of one operation, for each arch."""
    if reason := flydsl_missing():
        out.fail(reason)
    from fourwave.ops.grouped_gemm.problem import GroupedProblem

    rules: Any
    compile_isa: Any
    further: Callable[[str, Sequence[Compiled]], Extra] | None = None
    if all(isinstance(problem, GroupedProblem) for each in problems.values() for problem in each):
        from fourwave.cli.explain_grouped import further_facts as further
        from fourwave.ops.grouped_gemm import config as rules
        from fourwave.perf.grouped import compile_grouped_isa as compile_isa
    else:
        from fourwave.cli.isa_gfx1250 import further_facts as further
        from fourwave.ops.gemm import config as rules
        from fourwave.perf.isa import compile_isa
    for arch, of_arch in problems.items():
        for problem in of_arch:
            if problem.is_empty:
                out.fail(f"{problem}: there is nothing to multiply, so no kernel")
            if reason := rules.why_unsupported(problem, None, arch):
                out.fail(f"{problem} for {arch}: {reason}")

    console = out.stdout()
    spilled = []
    misplaced: list[str] = []
    record = []
    with out.steps("compiling") as steps:
        steps.start(sum(map(len, problems.values())))
        tables: list[list[Compiled]] = []
        for arch, of_arch in problems.items():
            compiled: list[Compiled] = []
            for problem in of_arch:
                config, _ = rules.default_config(problem, arch)
                kernel = compile_isa(problem, config, arch, lines=check_waits)
                compiled.append((problem, config, kernel))
                steps.done(f"{arch} {problem.layout}")
            tables.append(compiled)
    for arch, compiled in zip(problems, tables, strict=True):
        extra = {} if further is None else further(arch, compiled)
        show_kernels(console, arch, compiled, extra)
        for column, (problem, config, kernel) in enumerate(compiled):
            if kernel.vgpr_spills or kernel.sgpr_spills or kernel.scratch_bytes:
                spilled.append(f"{arch} {problem.layout} {config}")
            record.append(as_record(problem, config, kernel) | {name: cells[column] for name, cells in extra.items()})
            if check_waits:
                found = show_waits(console, problem, kernel)
                record[-1]["wait_findings"] = [asdict(f) for f in found]
                misplaced += [f"{arch} {problem.layout} {config}"] * bool(found)
    if json:
        out.write_json(json, {"kernels": record})
    for name in spilled:
        console.print(f"[bold red]FAILED[/] {escape(name)} spills registers or uses scratch memory")
    for name in misplaced:
        console.print(f"[bold red]FAILED[/] {escape(name)} has counted waits that mean something else in machine code")
    if spilled or misplaced:
        raise typer.Exit(1)


def show_waits(console: Console, problem: Problem, kernel: CompiledKernel) -> list[WaitFinding]:
    """Print how the kernel's own waits for copies stand to the machine code's order."""
    from fourwave.perf import waits

    return print_waits(console, f"{kernel.arch} {problem.layout}", waits.match(kernel.module, kernel.text, kernel.arch))


def print_waits(console: Console, kernel: str, matched: Sequence[Matched]) -> list[WaitFinding]:
    """A line for each counter and its findings with their listings; returns the findings."""
    for each in matched:
        listed = ", ".join(f"{file}:{line}" for file, line in dict.fromkeys(each.places)) or "none of its own"
        console.print(
            escape(f"waits on {each.counter}, {kernel}: {len(each.places)} ({listed}); {len(each.findings)} findings"),
            soft_wrap=True,
        )
        for finding in each.findings:
            console.print(escape(str(finding)), soft_wrap=True)
    return [finding for each in matched for finding in each.findings]


def show_kernels(console: Console, arch: str, compiled: Sequence[Compiled], extra: Extra) -> None:
    """One column per kernel. Counts are of the final assembly, one wave's."""
    table = out.table()
    table.add_column("")
    for problem, _, _ in compiled:
        table.add_column(str(problem).removesuffix(f" on {problem.device_type}"), justify="right")

    def row(name: str, cells: Sequence[str], end_section: bool = False) -> None:
        table.add_row(name, *cells, end_section=end_section)

    configs = [config for _, config, _ in compiled]
    kernels = [kernel for _, _, kernel in compiled]
    loops = [kernel.main_loop for kernel in kernels]
    row("tile m x n x k", [f"{c.tile_m}x{c.tile_n}x{c.tile_k}" for c in configs])
    row("waves m x n", [f"{c.waves_m}x{c.waves_n}" for c in configs])
    row("LDS stages", [str(c.num_stages) for c in configs])
    row("matrix instruction", [matrix_instruction(k) for k in kernels], end_section=True)
    row("vector registers (VGPR + AGPR)", [str(k.vgpr) for k in kernels])
    row("  of them AGPR", [str(k.agpr) for k in kernels])
    row("scalar registers (SGPR)", [str(k.sgpr) for k in kernels])
    row("LDS bytes", [str(k.lds_bytes) for k in kernels])
    row("spills, vector + scalar", [spills(k.vgpr_spills, k.sgpr_spills) for k in kernels])
    row("scratch bytes", [str(k.scratch_bytes) for k in kernels], end_section=True)
    row("main-loop step: K covered", [str(loop.k) for loop in loops])
    instruction, wait = ("WMMA", "s_wait_*") if arch == "gfx1250" else ("MFMA", "s_waitcnt")
    row(instruction, [str(loop.mfma) for loop in loops])
    row("LDS reads", [by_name(loop.lds_reads) for loop in loops])
    row("LDS writes", [by_name(loop.lds_writes) for loop in loops])
    row("global loads to LDS", [str(loop.loads_to_lds) for loop in loops])
    row("global loads to registers", [str(loop.loads) for loop in loops])
    row("stores", [str(loop.stores) for loop in loops])
    row(f"waits ({wait})", ["\n".join([str(len(loop.waits)), *waits(loop.waits)]) for loop in loops])
    row("barriers", [str(loop.barriers) for loop in loops])
    row("other vector / copies / scalar", [f"{loop.valu} / {loop.copies} / {loop.salu}" for loop in loops])
    row("instructions in all", [str(loop.instructions) for loop in loops])
    row(f"  of them {instruction}", [f"{loop.mfma / loop.instructions:.0%}" for loop in loops], end_section=True)
    for number, (name, cells) in enumerate(extra.items(), 1):
        row(name, cells, end_section=number == len(extra))
    row("code object", [linked(k) for k in kernels])
    out.show(console, table, f"{compiled[0][2].name} for {arch}")


def matrix_instruction(kernel: CompiledKernel) -> str:
    """Sizes m x n x k of those in the assembly: one, but for wgrad's sums of bias gradients."""
    return ", ".join(sorted(set(re.findall(r"v_(?:mfma|wmma)_(?:scale_)?f32_(\d+x\d+x\d+)", kernel.text))))


def spills(vector: int, scalar: int) -> str:
    text = f"{vector} + {scalar}"
    return text if vector == scalar == 0 else f"[bold red]{text}[/]"


def by_name(counts: dict[str, int]) -> str:
    return "\n".join([str(sum(counts.values())), *(f"{count} {name}" for name, count in counts.items())])


def waits(operands: Sequence[str]) -> list[str]:
    """Equal waits together: "4 lgkmcnt(0)"."""
    return [f"{operands.count(each)} {each}" for each in dict.fromkeys(operands)]


def linked(kernel: CompiledKernel) -> str:
    return f"{len(kernel.code_object)} bytes" if kernel.code_object is not None else escape(kernel.link_note)


def as_record(problem: Problem, config: GemmConfig | GroupedConfig, kernel: CompiledKernel) -> dict[str, object]:
    record = asdict(kernel)
    del record["text"], record["code_object"], record["module"]
    return {"problem": str(problem), "config": str(config), "linked": kernel.code_object is not None, **record}
