"""A simulator of FlyDSL kernels: what FlyDSL compiled runs on CPU tensors, and is checked harder than hardware can.

    from fourwave import sim
    with sim.session(arch="gfx950") as report:
        my_flydsl_launcher(a, b, out)          # CPU tensors
    assert not report.findings, report

docs/simulator.md says what is modelled. Importing this module imports no DSL; opening a session imports FlyDSL.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import native
from .harness import Harness, Orders
from .launch import CHECKS, Options
from .lowering import WAVE_SIZE, UnknownOperation
from .module import run_module
from .mutate import Mutation
from .report import Finding, Launch, Report, SimulationError
from .run import run
from .written import Written

ARCHS = tuple(WAVE_SIZE)


@dataclass
class Session:
    """An open session: the arch FlyDSL compiles for, how launches are simulated, and the report they add to."""

    arch: str
    options: Options
    on_finding: str
    report: Report
    tracked: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[Written] = field(default_factory=list)
    harness: Any = None  # harness.Harness, harness.Orders, or None
    # script.Allocations where GPU memory and the host's are told apart; None: kernels may touch every tensor.
    devices: Any = None
    # Of `fourwave sim`: launches of sessions that the script opened.
    collected: list[Launch] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        """What tells kernels compiled in this session from those compiled for a GPU or another arch."""
        return ("sim", self.arch)

    def track(self, *tensors: Any) -> None:
        """Count CPU tensors that reach a kernel as raw pointers among the session's allocations."""
        from .flydsl_hook import tensor_range

        self.tracked += [tensor_range(t) for t in tensors]

    def expect_written(self, *tensors: Any) -> None:
        """Tell the session which CPU tensors its launches are to fill: elements that none has written at its end are findings (init)."""
        if "init" in self.options.checks:
            self.outputs += [Written(t, f"outputs[{n}]") for n, t in enumerate(tensors, len(self.outputs))]


def unavailable(arch: str = "gfx950") -> str | None:
    """Why kernels for `arch` cannot be simulated here, or None."""
    if arch not in ARCHS:
        return f"the simulator models {', '.join(ARCHS)}; {arch} is not among them"
    if importlib.util.find_spec("flydsl") is None:
        return "FlyDSL is not installed (pip install 'fourwave[amd]')"
    return native.unavailable()


@contextlib.contextmanager
def session(
    arch: str = "gfx950",
    *,
    checks: str | Iterable[str] = "all",
    completion: str = "late",
    schedule: str = "forward",
    threads: int | None = None,
    on_finding: str = "record",
    step_limit: int = 0,
    count_bank_conflicts: bool = False,
    workgroups: range | None = None,
    trace: bool = False,
    mutate: Mutation | None = None,
    harness: Harness | Orders | Any = None,
    outputs: Sequence[Any] = (),
) -> Iterator[Report]:
    """Run the FlyDSL launches of the block on the simulator, with CPU tensors, and yield the Report they add to.

    arch        "gfx950", "gfx942" or "gfx1250": what FlyDSL compiles for
    checks      "all", or any of "memory", "init", "race", "wait", "barrier", "global", or by checker "memcheck", "initcheck", "racecheck"
                (race and global), "waitcheck", "synccheck" (barrier); a list, or with commas between
    completion  when a copy to LDS lands: "late", at the wait that covers it, "early", at once, or "random", in between
    schedule    order in which a workgroup's waves take turns: "forward", "reverse" or "random:SEED"
    threads     host threads; None: all cores
    on_finding  "record", or "raise": SimulationError at the end of the launch that had findings
    step_limit  instructions a wave may run before the launch is stopped with a finding; 0: no limit
    count_bank_conflicts   fill the counters lds_read_cycles and lds_read_cycles_ideal (slower)
    workgroups  simulate only this range of the launch's linear workgroup ids (x fastest)
    trace       keep what the first workgroup of each launch does (Launch.events): tiles of gfx1250's tensor data mover, waits for
                counters, split barriers, LDS reads, matrix instructions
    mutate      plant a fault in every kernel (fourwave.sim.mutate)
    harness     plant every fault, one at a time, at each kernel's first launch, or run each launch in every order
                (fourwave.sim.harness)
    outputs     CPU tensors that the launches are to fill: elements that none has written at the end are findings (init)
    Raises ValueError for an option that is not one of these, RuntimeError if the simulator cannot run here.
    """
    if on_finding not in ("record", "raise"):
        raise ValueError(f"on_finding={on_finding!r}; it can be 'record' or 'raise'")
    options = Options(
        checks, completion, schedule, threads, step_limit, count_bank_conflicts, workgroups, mutate, trace=trace
    )
    if reason := unavailable(arch):
        raise ValueError(reason) if arch not in ARCHS else RuntimeError(reason)
    from .flydsl_hook import add, enter

    opened = Session(arch, options, on_finding, Report(), harness=harness)
    opened.expect_written(*outputs)
    with enter(opened):
        yield opened.report
        missing = [finding for output in opened.outputs if (finding := output.finding(opened.report)) is not None]
    add(opened, Report([], missing))
    if missing and on_finding == "raise":
        raise SimulationError(Report(opened.report.launches, missing))


def active_session() -> Session | None:
    """The innermost open session of this thread, or None."""
    from .flydsl_hook import active

    return active()


_current = Report()


def current_report() -> Report:
    """What the `sim` backend has simulated in this process since reset_report()."""
    return _current


def reset_report() -> Report:
    """Start a new process-wide report; returns the old one."""
    global _current
    old, _current = _current, Report()
    return old


__all__ = [
    "ARCHS", "CHECKS", "Finding", "Harness", "Launch", "Orders", "Report", "Session", "SimulationError", "UnknownOperation", "active_session",
    "current_report", "reset_report", "run", "run_module", "session", "unavailable",
]  # fmt: skip
