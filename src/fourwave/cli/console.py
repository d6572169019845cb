"""Where output goes: results on stdout, progress on stderr. NO_COLOR is respected; a pipe gets plain lines."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PIPE_WIDTH = 150  # columns when stdout is no terminal; COLUMNS overrides
PLAIN_INTERVAL = 15.0  # seconds between progress lines when stderr is no terminal


def stdout() -> Console:
    """Console for results. A new one each time, so that it follows a redirected sys.stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=shutil.get_terminal_size((PIPE_WIDTH, 50)).columns)
    return console


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def table(**options: Any) -> Table:
    """A table in the one style that all commands use."""
    return Table(header_style="bold", **options)


def show(console: Console, contents: Table, title: str | None = None) -> None:
    """Print a table under its title (rich would fold a title to the table's width)."""
    if title:
        console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    console.print(contents)


def fail(message: str, code: int = 2) -> NoReturn:
    """Say on stderr why the command cannot go on, and leave with `code`."""
    stderr().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(code)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record; a folder that does not exist is the caller's mistake."""
    try:
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


class Steps:
    """What `steps` yields: start(total) once the number is known, done(text) for each one that ended."""

    def start(self, total: int) -> None:
        raise NotImplementedError

    def done(self, text: str = "") -> None:
        raise NotImplementedError


class BarSteps(Steps):
    def __init__(self, progress: Progress, title: str, detail: str) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=None, detail=escape(detail))

    def start(self, total: int) -> None:
        self.progress.update(self.task, total=total)

    def done(self, text: str = "") -> None:
        self.progress.update(self.task, advance=1, detail=escape(text))


class PlainSteps(Steps):
    def __init__(self, title: str) -> None:
        self.title, self.total, self.count = title, 0, 0
        self.begun = self.said = time.monotonic()

    def start(self, total: int) -> None:
        self.total = total

    def done(self, text: str = "") -> None:
        self.count += 1
        now = time.monotonic()
        if now - self.said >= PLAIN_INTERVAL:
            self.said = now
            line = f"{self.title}: {self.count} of {self.total}, {now - self.begun:.0f} s  {text}"
            stderr().print(line.rstrip(), markup=False, soft_wrap=True)


@contextmanager
def steps(title: str, detail: str = "") -> Iterator[Steps]:
    """Progress of counted work: a bar on a terminal, a line now and then elsewhere. detail: shown until the first step."""
    console = stderr()
    if not console.is_terminal:
        yield PlainSteps(title)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield BarSteps(progress, title, detail)
