"""fourwave sim: run a FlyDSL script written for a GPU on the simulator, with its checkers; with --mutate, also every planted fault, with
--waits, its counted waits against machine code."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from fourwave import sim
from fourwave.cli import console as con
from fourwave.sim.harness import STEP_LIMIT, Harness, Outcome, read_expectations
from fourwave.sim.report import describe
from fourwave.sim.script import Run, execute


def run(
    script: Path,
    arguments: list[str],
    *,
    arch: str,
    checks: str,
    completion: str,
    schedule: str,
    threads: int | None,
    step_limit: int,
    mutate: bool,
    expect: Path | None,
    waits: bool,
    json_file: Path | None,
) -> None:
    """Exit status: the script's own if not 0; else 1 with findings, with no launch at all, with survivors that `expect` does not accept, or with
    waits that mean something else in machine code or could not be matched; else 0."""
    if script.is_dir():
        con.fail(f"{script} is a directory; name the script in it")
    if not script.is_file():
        con.fail(f"no such script: {script}")
    if expect is not None and not mutate:
        con.fail("--expect lists accepted survivors of --mutate; give both")
    accepted: dict[str, str] = {}
    if expect is not None:
        try:
            accepted = read_expectations(expect.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            con.fail(f"{expect}: {error}")
    err = con.stderr()

    def progress(kernel: str, done: int, total: int) -> None:
        if err.is_terminal or done in (1, total) or done % 25 == 0:
            err.print(f"{kernel}: fault {done} of {total}", end="\r" if err.is_terminal and done < total else "\n")

    harness = Harness(progress=progress) if mutate else None
    try:
        ran = execute(
            script, arguments, arch, checks=checks, completion=completion, schedule=schedule, threads=threads,
            step_limit=step_limit or (STEP_LIMIT if mutate else 0), harness=harness,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:  # the script's own are in ran.error
        con.fail(str(error))
    report, status = ran.report, ran.status
    if ran.error is not None:
        print_exception(ran.error, script)
    out = con.stdout()
    out.print(f"\n[bold]{script}[/] on the simulated {arch}: {_summary(report)}", soft_wrap=True)
    if ran.own_launches:
        out.print(
            f"{ran.own_launches} of the launches in sessions that the script opened itself: with their own arch and options, "
            f"{'no faults planted, ' * mutate}CPU tensors allowed",
            soft_wrap=True,
        )
    if report.findings:
        out.print(escape(describe(report.findings)), soft_wrap=True)
    unexpected: list[Outcome] = []
    if harness is not None:
        unexpected = _show_faults(out, harness, accepted)
    matched = _show_waits(out, ran) if waits else []
    if ran.processes:
        err.print(
            f"[bold]not checked:[/] what {len(ran.processes)} processes that the script started did ({escape(', '.join(ran.processes[:4]))}"
            f"{', ...' * (len(ran.processes) > 4)}); the simulated GPU is the script's own process's",
            soft_wrap=True,
        )
    if not report.launches and ran.error is None:
        err.print(
            "[bold red]nothing was launched:[/] no kernel of the script reached the simulator, so nothing was checked",
            soft_wrap=True,
        )
    if json_file is not None:
        con.write_json(json_file, _record(script, arch, ran, harness, matched))
    failed = any(each.get("failed") or each["findings"] for each in matched)
    raise typer.Exit(status or int(bool(report.findings or unexpected or failed or not report.launches)))


def print_exception(error: Exception, script: Path) -> None:
    """As `python script` prints it: the frames from the script on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames, file=sys.stderr)


def _show_waits(out: Any, ran: Run) -> list[dict[str, Any]]:
    """Compile each kernel that ran and print how its own waits stand to the machine code's order; a record for each counter."""
    from fourwave.cli.isa import print_waits
    from fourwave.perf.waits import match

    records: list[dict[str, Any]] = []
    out.print(f"\ncounted waits against machine code, {len(ran.kernels)} kernels:", soft_wrap=True)
    for kernels, name in ran.kernels:
        of = {"kernel": name, "arch": kernels.arch}
        try:
            matched = match(kernels.text, kernels.assembly(), kernels.arch, name)
        except (RuntimeError, ValueError) as error:
            out.print(f"[bold red]not matched:[/] {escape(f'{kernels.arch} {name}: {error}')}", soft_wrap=True)
            records.append(of | {"failed": str(error), "findings": []})
            continue
        print_waits(out, f"{kernels.arch} {name}", matched)
        records += [of | dataclasses.asdict(each) for each in matched]
    return records


def _summary(report: sim.Report) -> str:
    return (
        f"{len(report.launches)} launches, {report.workgroups} workgroups, {report.seconds:.2f} s in the simulator, "
        f"{len(report.findings)} findings"
    )


def _show_faults(out: Any, harness: Harness, accepted: dict[str, str]) -> list[Outcome]:
    """Print the faults by kernel and the survivors; return those that are not accepted."""
    table = con.table()
    for name in ("kernel", "fault", "planted", "by a finding", "by the output", "survived"):
        table.add_column(name, justify="left" if name in ("kernel", "fault") else "right")
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in harness.outcomes:
        groups.setdefault((outcome.kernel, outcome.fault.rpartition(" #")[0]), []).append(outcome)
    for (kernel, kind), outcomes in groups.items():
        counts = [sum(o.how.startswith(how) for o in outcomes) for how in ("finding", "output")]
        table.add_row(kernel, kind, str(len(outcomes)), *map(str, counts), str(sum(o.survived for o in outcomes)))
    con.show(out, table, "Planted faults")
    unexpected = []
    for outcome in harness.survivors:
        reason = accepted.get(outcome.key)
        if reason is None:
            unexpected.append(outcome)
        out.print(
            escape(f"survivor: {outcome.key} at {outcome.file}:{outcome.line}" + (f"  # {reason}" if reason else "")),
            soft_wrap=True,
        )
    for key in accepted.keys() - {o.key for o in harness.survivors}:
        out.print(escape(f"accepted survivor that is now caught, or no longer there: {key}"), soft_wrap=True)
    caught = len(harness.outcomes) - len(harness.survivors)
    out.print(
        f"{caught} of {len(harness.outcomes)} faults caught; {len(harness.survivors) - len(unexpected)} accepted; {len(unexpected)} unexplained"
    )
    return unexpected


def _record(
    script: Path, arch: str, ran: Run, harness: Harness | None, matched: list[dict[str, Any]]
) -> dict[str, Any]:
    report = ran.report
    record: dict[str, Any] = {
        "script": str(script), "arch": arch, "status": ran.status, "python": sys.version.split()[0],
        "launches_in_own_sessions": ran.own_launches, "error": None if ran.error is None else repr(ran.error),
        "launches": [dataclasses.asdict(x) for x in report.launches],
        "findings": [dataclasses.asdict(x) for x in report.findings],
    }  # fmt: skip
    if matched:
        record["waits"] = matched
    if harness is not None:
        record["faults"] = [dataclasses.asdict(x) for x in harness.outcomes]
    return record
