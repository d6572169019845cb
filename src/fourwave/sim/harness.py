"""Harnesses run every launch of a session more than once: with planted faults, or in other orders.

Harness plants every fault of mutate.faults in every kernel that is launched, one at a time, and tells which go unnoticed.

A fault is caught when a checker reports it or when it changes a byte of the launch's memory. One that does neither is a survivor: either the
instruction is redundant there, or the simulator has a hole. Each kernel is tried at its first launch only, on a copy of the memory it met.

Orders lets copies complete at other moments and waves take turns in other orders: no byte of the launch's memory may depend on it.

Fingerprints runs launches as they are and tells, by a fingerprint of each, whether a harness would find again what it found.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from .launch import Memory, Simulation
from .mutate import Fault, faults
from .program import Block, Builder, Program
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


# What of the simulator decides how a lane program runs and which faults are planted in it; how it came about is in the program itself.
# counters.h only counts.
_DECIDING = ("core.c", "[!c]*.h", "*.inc", "*.def", "program.py", "mutate.py", "harness.py", "launch.py", "native.py")


def _without_comments(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return " ".join(re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


@cache
def simulator_fingerprint(folder: Path = Path(__file__).parent) -> str:
    """Of the simulator's code that decides what becomes of a fault in a lane program; comments and docstrings do not count."""
    files = sorted(file for pattern in _DECIDING for file in folder.glob(pattern))
    return hashlib.sha256("\0".join(f"{f.name}\0{_without_comments(f)}" for f in files).encode()).hexdigest()[:24]


def launch_fingerprint(builder: Builder, facts: dict[str, Any], launch: Simulation) -> str:
    """Of all that a launch's outcome depends on beside the simulator itself: the lane program, the faults it has a place for, the launch's
    sizes, arguments and options, and its memory's contents.

    Source lines and addresses do not count: pointers are taken by what they point to.
    """
    program = builder.encode(**facts)
    number = {block: n for n, block in enumerate(builder.blocks)}
    parts: list[Any] = [
        {key: value for key, value in facts.items() if key not in ("lines", "data")},
        [array.tobytes() for array in program.data],
        (launch.grid, launch.block, launch.cluster, launch.dynamic_lds),
        replace(launch.options, threads=None),
        [fault.name for fault in faults(builder)],
    ]
    for block in builder.blocks:
        parts.append((number.get(block.meet), block.joins))  # type: ignore[arg-type]
        for i in block.code:
            assert i.words is not None
            # The second word is the line; a jump's are its targets' places.
            targets = [number[a] for a in i.args if isinstance(a, Block)]
            own = i.words[8:12] if i.op == "BRANCH" else b"" if i.op == "JUMP" else i.words[8:]
            parts.append((i.op, own, targets))
    addresses = {part for a in program.data for part in (a.ctypes.data & 0xFFFFFFFF, a.ctypes.data >> 32)}
    parts.append([None if int(value) in addresses else int(value) for value in program.constants])
    ranges = launch.memory.ranges
    for words in launch.arguments:
        pointer = words[0] | words[1] << 32 if len(words) == 2 else -1
        at = next((n for n, (lo, hi) in enumerate(ranges) if lo <= pointer < hi or lo == pointer), None)
        parts.append(words if at is None else (at, pointer - ranges[at][0]))
    digest = hashlib.sha256(repr(parts).encode())
    for data in read(launch.memory):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


@dataclass
class Fingerprints:
    """Session.harness: runs every launch as it is, or by `then`, and keeps its fingerprint.

    launches    (kernel, fingerprint) of each launch
    places      where each kernel's faults are: (kernel, fault) -> its line and the helpers', innermost last
    """

    then: Any = None
    launches: list[tuple[str, str]] = field(default_factory=list)
    places: dict[tuple[str, str], tuple[tuple[str, int], ...]] = field(default_factory=dict)

    def __call__(
        self,
        kernel: str,
        key: Any,
        prepare: Callable[[], tuple[Builder, dict[str, Any]]],
        simulate: Any,
        memory: Memory,
    ) -> Report:
        builder, facts = prepare()
        self.launches.append((kernel, launch_fingerprint(builder, facts, simulate)))
        for fault in faults(builder):
            lines = facts["lines"][fault.line] if fault.line >= 0 else (("unknown", 0),)
            self.places[kernel, fault.name] = tuple(lines)
        if self.then is not None:
            return self.then(kernel, key, prepare, simulate, memory)
        return simulate(builder.encode(**facts))


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
