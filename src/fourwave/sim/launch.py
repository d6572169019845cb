"""Runs a lane program over a grid on the native core."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .lowering import LDS_BANKS
from .native import COUNTERS, EVENTS, Allocation, Output, RawEvent, RawFinding, RawLaunch, library
from .program import UNITS, Builder, Program
from .report import KINDS, Event, Launch, Report, finding_from_raw

LDS_CAPACITY = {"gfx942": 64 << 10, "gfx950": 160 << 10, "gfx1250": 320 << 10}
MAX_CLUSTER = 16  # workgroups
_MAX_FINDINGS = 128
_MAX_EVENTS = 1 << 20
COMPLETIONS = ("late", "early", "random")
CHECKS = ("memory", "init", "race", "wait", "barrier", "global")
# What compute-sanitizer and its like call them.
CHECKERS = {
    "memcheck": ("memory",),
    "initcheck": ("init",),
    "racecheck": ("race", "global"),
    "waitcheck": ("wait",),
    "synccheck": ("barrier",),
}


def checks_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """The checks that `names` means: "all", checks and checkers (memcheck, racecheck, ...), in a list or with commas between.

    An empty list means none. Raises ValueError for a name that is neither.
    """
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    if unknown := [name for name in given if name not in ("all", *CHECKS, *CHECKERS)]:
        raise ValueError(
            f"checks={unknown} are not known; the checks are {', '.join(CHECKS)}, or by checker {', '.join(CHECKERS)}, or all"
        )
    chosen = {check for name in given for check in (CHECKS if name == "all" else CHECKERS.get(name, (name,)))}
    return tuple(check for check in CHECKS if check in chosen)


@dataclass(frozen=True)
class Options:
    """How a session simulates; the fields are session()'s keywords."""

    checks: str | Iterable[str] = CHECKS  # kept as a tuple of CHECKS
    completion: str = "late"
    schedule: str = "forward"
    threads: int | None = None
    step_limit: int = 0
    count_bank_conflicts: bool = False
    workgroups: range | None = None
    mutate: Callable[[Builder], None] | None = None
    stop_at_finding: bool = False  # the first one ends the launch
    trace: bool = False  # of the first workgroup: Launch.events

    def __post_init__(self) -> None:
        object.__setattr__(self, "checks", checks_of(self.checks))
        if self.completion not in COMPLETIONS:
            raise ValueError(f"completion={self.completion!r}; it can be {', '.join(COMPLETIONS)}")
        if self.schedule not in ("forward", "reverse") and not self.schedule.startswith("random"):
            raise ValueError(
                f"schedule={self.schedule!r}; it can be 'forward', 'reverse' or 'random:SEED' (SEED an int above 1)"
            )
        _ = self.schedule_code  # its seed
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}; it must be at least 1")
        if self.step_limit < 0:
            raise ValueError(f"step_limit={self.step_limit}; it must be 0 (no limit) or more")
        if self.workgroups is not None and (self.workgroups.step != 1 or self.workgroups.start < 0):
            raise ValueError(f"workgroups={self.workgroups}; it must be a range with step 1 from 0 or later")

    @property
    def schedule_code(self) -> int:
        if self.schedule.startswith("random"):
            seed = self.schedule.partition(":")[2] or "2"
            if not seed.isdigit() or not 2 <= int(seed) < 1 << 31 or not re.fullmatch(r"random(:\d+)?", self.schedule):
                raise ValueError(f"schedule={self.schedule!r}; write 'random:SEED' with an int SEED from 2 to 2^31 - 1")
            return int(seed)
        return {"forward": 0, "reverse": 1}[self.schedule]


@dataclass
class Memory:
    """The launch's global allocations: [lo, hi) host addresses, merged and sorted.

    outputs: of those that kernels are to write, the range, and a byte for each of its bytes that becomes 1 when it is written
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[tuple[int, int, np.ndarray]] = field(default_factory=list)

    def as_array(self) -> ctypes.Array[Allocation]:
        merged: list[list[int]] = []
        for lo, hi in sorted(r for r in self.ranges if r[1] > r[0]):
            if merged and lo <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], hi)
            else:
                merged.append([lo, hi])
        return (Allocation * max(1, len(merged)))(*(Allocation(lo, hi, 2, i) for i, (lo, hi) in enumerate(merged)))


def _interruptible(core: Callable[..., int], raw: RawLaunch) -> int:
    """Call the core so that Ctrl-C stops it at its waves' next turn: only the main thread gets the signal, and not while in C.

    However often it is interrupted, this returns or raises only once the core has ended: it works on memory that the caller frees then. So what
    a signal's handler raises is kept until that moment (Thread.join would take an interrupted wait for the thread's end, CPython up to 3.12).
    """
    if threading.current_thread() is not threading.main_thread():
        return core(ctypes.byref(raw))
    results: list[int] = []
    raised: list[BaseException] = []
    ended = threading.Event()

    def call() -> None:
        try:
            results.append(core(ctypes.byref(raw)))
        finally:
            ended.set()

    def keeping(handler: Callable[[int, Any], Any]) -> Callable[[int, Any], None]:
        def kept(number: int, frame: Any) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                if ended.is_set():  # while the handlers are put back
                    raise
                raised.append(error)
                raw.stop = 1

        return kept

    handlers = {s: (h, keeping(h)) for s in signal.valid_signals() if callable(h := signal.getsignal(s))}
    try:
        for number, (_, kept) in handlers.items():
            signal.signal(number, kept)
        threading.Thread(target=call, name="fourwave-sim", daemon=True).start()
        while not ended.wait(0.2):
            pass
    finally:
        for number, (handler, kept) in handlers.items():
            if signal.getsignal(number) is kept:  # else a handler has put another in its place
                signal.signal(number, handler)
    if raised:
        raise raised[0]
    return results[0]


def run(
    program: Program,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_lds: int,
    arguments: list[list[int]],
    memory: Memory,
    options: Options,
    cluster: tuple[int, int, int] = (1, 1, 1),
) -> Report:
    """Simulate one launch.

    grid, block   workgroups and threads per dimension
    dynamic_lds   bytes; counted on top of the kernel's static LDS only where the kernel declares dynamic LDS
    arguments     dwords of each kernel argument
    cluster       workgroups per dimension that run together (gfx1250)
    Raises ValueError for a launch the hardware would refuse: no workgroups, no threads, over 1024, or more LDS than a compute unit has.
    """
    lds_bytes = program.lds_bytes + dynamic_lds if program.dynamic_lds else max(program.lds_bytes, dynamic_lds)
    capacity = LDS_CAPACITY[program.arch]
    threads = block[0] * block[1] * block[2]
    if lds_bytes > capacity:
        raise ValueError(
            f"kernel {program.name} asks for {lds_bytes} bytes of LDS; {program.arch} has {capacity} per compute unit"
        )
    if not 0 < threads <= 1024:
        raise ValueError(f"kernel {program.name} was launched with {block} threads; a workgroup has 1 to 1024")
    if min(grid) < 1:
        raise ValueError(
            f"kernel {program.name} was launched with a grid of {grid}; HIP refuses a grid without workgroups"
        )
    size = cluster[0] * cluster[1] * cluster[2]
    if size != 1 and program.arch != "gfx1250":
        raise ValueError(f"kernel {program.name} was launched in clusters of {cluster}; {program.arch} has no clusters")
    if not 0 < size <= MAX_CLUSTER or any(g % c for g, c in zip(grid, cluster)):
        raise ValueError(
            f"kernel {program.name}: clusters of {cluster} in a grid of {grid}; a cluster has at most {MAX_CLUSTER} workgroups and divides the grid"
        )
    if size != 1 and options.workgroups is not None:
        raise ValueError("workgroups= chooses single workgroups; this launch runs them in clusters")
    constants = program.constants.copy()
    if len(arguments) != len(program.argument_slots):
        raise ValueError(
            f"kernel {program.name} takes {len(program.argument_slots)} arguments; the launch passes {len(arguments)}"
        )
    for slots, words in zip(program.argument_slots, arguments):
        if len(slots) != len(words):
            raise ValueError(f"kernel {program.name}: an argument of {len(slots)} dwords was passed {len(words)}")
        constants[slots] = words
    total = grid[0] * grid[1] * grid[2]
    chosen = options.workgroups if options.workgroups is not None else range(total)
    if chosen.stop > total:
        raise ValueError(f"workgroups={chosen} goes past the launch's {total}")
    data = [(a.ctypes.data, a.ctypes.data + a.nbytes) for a in program.data]
    allocations = Memory(memory.ranges + data).as_array() if data else memory.as_array()
    findings = (RawFinding * _MAX_FINDINGS)()
    events = (RawEvent * (_MAX_EVENTS if options.trace else 1))()
    code = np.ascontiguousarray(program.code)
    raw = RawLaunch(
        code=code.ctypes.data,
        code_words=len(code),
        num_registers=program.num_registers,
        num_constants=len(constants),
        num_sites=program.num_sites,
        lds_bytes=lds_bytes,
        constants=constants.ctypes.data,
        grid=grid,
        block=block,
        cluster=cluster,
        allocations=ctypes.addressof(allocations),
        num_allocations=len(allocations),
        checks=sum(1 << KINDS.index(c) for c in (*options.checks, "limit")),
        completion=COMPLETIONS.index(options.completion),
        schedule=options.schedule_code,
        num_threads=options.threads or os.cpu_count() or 1,
        first_workgroup=chosen.start,
        num_workgroups=len(chosen),
        step_limit=options.step_limit,
        lds_banks=LDS_BANKS[program.arch] if options.count_bank_conflicts else 0,
        stop_at_finding=int(options.stop_at_finding),
        units=UNITS,
        events=ctypes.addressof(events),
        max_events=_MAX_EVENTS if options.trace else 0,
        findings=ctypes.addressof(findings),
        max_findings=_MAX_FINDINGS,
    )
    outputs = (Output * max(1, len(memory.outputs)))(
        *(Output(lo, hi, written.ctypes.data) for lo, hi, written in memory.outputs)
    )
    raw.num_outputs, raw.outputs = len(memory.outputs), ctypes.addressof(outputs)
    start = time.perf_counter()
    if _interruptible(library(program.wave_size).fourwave_sim_run, raw):
        raise ValueError(f"kernel {program.name}: too many waves in a workgroup of {block}")
    seconds = time.perf_counter() - start
    if raw.num_events > _MAX_EVENTS:
        raise ValueError(f"kernel {program.name}: its trace has {raw.num_events} events, more than {_MAX_EVENTS}")
    launch = Launch(
        kernel=program.name, arch=program.arch, grid=grid, block=block, workgroups=len(chosen), lds_bytes=lds_bytes, seconds=seconds,
        counters=dict(zip(COUNTERS, raw.counters)),
        events=[
            Event(EVENTS[e.kind], e.wave, e.line, e.detail, e.address, e.bytes) for e in events[: raw.num_events]
        ],
    )  # fmt: skip
    return Report(
        [launch], [finding_from_raw(findings[i], program.lines, program.name) for i in range(raw.num_findings)]
    )


@dataclass(frozen=True)
class Simulation:
    """One launch that waits for its program: what a harness runs, as often as it likes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_lds: int
    arguments: list[list[int]]
    memory: Memory
    options: Options
    cluster: tuple[int, int, int]

    def __call__(self, program: Program, **changes: Any) -> Report:
        """Run it; changes: of the session's Options."""
        return run(
            program, self.grid, self.block, self.dynamic_lds, self.arguments, self.memory, replace(self.options, **changes), self.cluster
        )  # fmt: skip
