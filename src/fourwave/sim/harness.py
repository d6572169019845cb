"""Harnesses run every launch of a session more than once: with planted faults, or in other orders.

Harness plants every fault of mutate.faults in every kernel that is launched, one at a time, and tells which go unnoticed.

A fault is caught when a checker reports it or when it changes a byte of the launch's memory. One that does neither is a survivor: either the
instruction is redundant there, or the simulator has a hole. Each kernel is tried at its first launch only, on a copy of the memory it met.

Orders lets copies complete at other moments and waves take turns in other orders: no byte of the launch's memory may depend on it.
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
    """What became of one fault. how: "finding: <kinds>" (the first's, where the kernel as it is has none), "output", or "" for a survivor."""

    kernel: str
    fault: str
    file: str
    line: int
    how: str
    stack: tuple[tuple[str, int], ...] = ()  # the helpers' lines it went through

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
    """Puts back what has changed. Other ranges stay untouched: an input may be mapped read-only."""
    for (lo, hi), data in zip(memory.ranges, contents):
        if ctypes.string_at(lo, hi - lo) != data:
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
        prepare: Callable[[], tuple[Builder, dict[str, Any]]],
        simulate: Callable[..., Report],
        memory: Memory,
    ) -> Report:
        """Run the launch as it is; at a kernel's first one (by `key`), also once with each of its faults.

        prepare     lowering.prepare_kernel of the kernel
        simulate    runs the launch with a Program, and with keywords that change the session's Options
        """
        builder, facts = prepare()
        program = builder.encode(**facts)
        if key in self.tried:
            return simulate(program)
        self.tried.add(key)
        before = read(memory)
        report = simulate(program)
        after = read(memory)
        chosen = [f for f in faults(builder) if self.choose is None or self.choose(f)]
        for done, fault in enumerate(chosen, 1):
            write(memory, before)
            with builder.edited(fault.mutation):
                mutant = builder.encode(**facts)
            (file, line), *stack = program.lines[fault.line] if fault.line >= 0 else (("unknown", 0),)
            how = self._try(mutant, simulate, memory, report, after)
            self.outcomes.append(Outcome(kernel, fault.name, file, line, how, tuple(stack)))
            if self.progress is not None:
                self.progress(kernel, done, len(chosen))
        write(memory, after)
        return report

    @staticmethod
    def _try(
        mutant: Program, simulate: Callable[..., Report], memory: Memory, usual: Report, after: list[bytes]
    ) -> str:
        # Of a kernel without findings of its own the first finding tells; a mutant that runs this much longer hangs.
        limit = 100_000 + 4 * sum(launch.counters["instructions"] for launch in usual.launches)
        report = simulate(mutant, stop_at_finding=not usual.findings, step_limit=min(STEP_LIMIT, limit))
        known = {(f.kind, f.message, f.file, f.line) for f in usual.findings}
        new = sorted({f.kind for f in report.findings if (f.kind, f.message, f.file, f.line) not in known})
        if new:
            return "finding: " + ", ".join(new)
        return "output" if read(memory) != after else ""

    @property
    def survivors(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.survived]


# (completion, schedule) beside a session's own: each completion with each of three schedules.
ORDERS = tuple(
    (completion, schedule)
    for completion in ("late", "early", "random")
    for schedule in ("forward", "reverse", "random:7")
)


@dataclass
class Orders:
    """Session.harness: runs every launch in every order, too.

    launches    how many launches were compared
    differences what differed: kernel, completion, schedule, and the bytes that differ or the findings
    """

    orders: tuple[tuple[str, str], ...] = ORDERS
    launches: int = 0
    differences: list[str] = field(default_factory=list)

    def __call__(
        self,
        kernel: str,
        key: Any,
        prepare: Callable[[], tuple[Builder, dict[str, Any]]],
        simulate: Callable[..., Report],
        memory: Memory,
    ) -> Report:
        builder, facts = prepare()
        program = builder.encode(**facts)
        before = read(memory)
        report = simulate(program)
        after = read(memory)
        for completion, schedule in self.orders:
            write(memory, before)
            other = simulate(program, completion=completion, schedule=schedule)
            changed = sum(sum(x != y for x, y in zip(a, b)) for a, b in zip(read(memory), after, strict=True) if a != b)
            found = sorted({f.kind for f in other.findings} - {f.kind for f in report.findings})
            if changed or found:
                what = [f"{changed} bytes differ"] * bool(changed) + [f"findings: {', '.join(found)}"] * bool(found)
                self.differences.append(f"{kernel}, completion {completion}, schedule {schedule}: {'; '.join(what)}")
        write(memory, after)
        self.launches += 1
        return report


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
