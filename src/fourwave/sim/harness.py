"""The mutation harness: plants every fault of mutate.faults in every kernel that is launched, one at a time, and tells which go unnoticed.

A fault is caught when a checker reports it or when it changes a byte of the launch's memory. One that does neither is a survivor: either the
instruction is redundant there, or the simulator has a hole. Each kernel is tried at its first launch only, on a copy of the memory it met.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .launch import Memory
from .mutate import Fault, faults
from .program import Builder, Program
from .report import Report

# Instructions a wave may run before a mutant counts as hung, and so as caught.
STEP_LIMIT = 50_000_000


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. how: "finding: <kinds>", "output", "error", or "" for a survivor."""

    kernel: str
    fault: str
    file: str
    line: int
    how: str

    @property
    def survived(self) -> bool:
        return not self.how

    @property
    def key(self) -> str:
        """How an expectations file names it."""
        return f"{self.kernel}: {self.fault}"


def read(memory: Memory) -> list[bytes]:
    return [ctypes.string_at(lo, hi - lo) for lo, hi in memory.ranges]


def write(memory: Memory, contents: list[bytes]) -> None:
    for (lo, _), data in zip(memory.ranges, contents):
        ctypes.memmove(lo, data, len(data))


@dataclass
class Harness:
    """Session.harness: called for every launch in place of a plain run.

    choose      which of a kernel's faults to plant; None: all
    progress    called with (kernel, faults done, faults in all) after each
    """

    choose: Callable[[Fault], bool] | None = None
    progress: Callable[[str, int, int], None] | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    tried: set[Any] = field(default_factory=set)

    def __call__(
        self,
        kernel: str,
        key: Any,
        lower: Callable[[Callable[[Builder], None] | None], Program],
        simulate: Callable[[Program], Report],
        memory: Memory,
    ) -> Report:
        """Run the launch as it is; at a kernel's first one (by `key`), also once with each of its faults."""
        if key in self.tried:
            return simulate(lower(None))
        self.tried.add(key)
        before = read(memory)
        program = lower(None)
        report = simulate(program)
        after = read(memory)
        found: list[Fault] = []
        lower(lambda builder: found.extend(faults(builder)))
        chosen = [f for f in found if self.choose is None or self.choose(f)]
        for done, fault in enumerate(chosen, 1):
            write(memory, before)
            file, line = program.lines[fault.line][0] if fault.line >= 0 else ("unknown", 0)
            self.outcomes.append(
                Outcome(kernel, fault.name, file, line, self._try(fault, lower, simulate, memory, report, after))
            )
            if self.progress is not None:
                self.progress(kernel, done, len(chosen))
        write(memory, after)
        return report

    @staticmethod
    def _try(fault: Fault, lower: Any, simulate: Any, memory: Memory, usual: Report, after: list[bytes]) -> str:
        mutant = simulate(lower(fault.mutation))
        known = {(f.kind, f.message, f.file, f.line) for f in usual.findings}
        new = sorted({f.kind for f in mutant.findings if (f.kind, f.message, f.file, f.line) not in known})
        if new:
            return "finding: " + ", ".join(new)
        return "output" if read(memory) != after else ""

    @property
    def survivors(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.survived]


def read_expectations(text: str) -> dict[str, str]:
    """Accepted survivors: lines of `kernel: fault  # reason`; blank lines and lines that start with # do not count.

    Raises ValueError for a line without a reason.
    """
    accepted = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, mark, reason = line.partition("  # ")
        if not mark or not reason.strip():
            raise ValueError(f"line {number}: {line!r} has no reason; write 'kernel: fault  # why it may survive'")
        accepted[key.strip()] = reason.strip()
    return accepted
