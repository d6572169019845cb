"""What a simulated launch did and what its checkers found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Order of core.c's F_ constants; also the names for session(checks=...).
KINDS = ("memory", "init", "race", "wait", "barrier", "limit", "global")

_TEXT: dict[tuple[str, int], str] = {
    ("memory", 0): "reads global memory outside every allocation of the launch",
    ("memory", 1): "writes global memory outside every allocation of the launch",
    ("memory", 2): "accesses LDS past the workgroup's allocation",
    ("memory", 3): "writes LDS past the workgroup's allocation",
    ("memory", 4): "a transposing read at an address that is not aligned to its size (8 or 16 bytes)",
    ("memory", 5): "a buffer resource with a stride; only raw buffers (stride 0) are modelled",
    ("memory", 6): "a copy to LDS that straddles the end of its buffer resource",
    ("memory", 7): "a copy to LDS whose LDS address differs between lanes; the hardware uses the first lane's",
    ("memory", 9): "a tensor descriptor that is malformed: its type, its count, or a tile dimension or number of indices that cannot be",
    ("memory", 11): "a multicast load whose mask leaves out the workgroup that issues it: its LDS receives nothing",
    ("memory", 12): "a copy between global memory and LDS at an LDS address that is not a multiple of four",
    ("memory", 13): "a tensor descriptor that differs between lanes; the hardware uses the first lane's",
    ("wait", 20): "uses the result of a load in inline assembly that nothing has waited for",
    ("memory", 20): "an atomic operation at an address that is not a multiple of its size",
    ("memory", 22): "accesses memory at an address that is not a multiple of the alignment it states",
    ("memory", 23): "a buffer offset that wraps past 4 GiB",
    ("memory", 24): "writes global memory that the host has mapped read-only",
    ("memory", 21): "accesses private memory past the kernel's own",
    ("init", 0): "reads LDS that nothing has written",
    ("race", 0): "reads LDS that another wave wrote with no completed write and barrier in between",
    ("race", 1): "writes LDS that another wave read since the last barrier",
    ("race", 2): "writes LDS that another wave wrote, or is copying to, with no barrier in between",
    ("race", 5): "writes LDS that a copy of its own is still on its way to",
    ("race", 3): "writes LDS that another wave may still be reading: its read was issued before the last barrier, but nothing waited for it there",
    ("race", 4): "writes LDS that a store from LDS to global memory may still be reading",
    ("wait", 0): "reads LDS that its own copy has not reached: no wait covers the copy",
    ("wait", 1): "reads LDS that another wave's copy has not reached: no wait covers the copy",
    ("wait", 2): "the kernel ends with a copy to LDS that nothing waited for",
    ("wait", 3): "copies LDS to global memory that its own wave has stored to, with no wait for that store (dscnt)",
    ("barrier", 0): "a barrier that only some lanes of the wave reach",
    ("barrier", 1): "waves wait at this barrier after others have ended",
    ("barrier", 2): "a matrix instruction or transposing LDS read with some lanes switched off",
    ("barrier", 3): "an unreachable instruction was reached",
    ("barrier", 4): "waves wait at this barrier that can never be complete: not all signal it",
    ("limit", 0): "the step limit was reached; the launch was stopped",
    ("limit", 1): "branches nest too deep for the simulator",
    ("limit", 3): "no workgroup gets on: they wait for something that none of them will do",
    ("limit", 4): "a tensor descriptor with iteration, an LDS barrier or a fifth group, which are not modelled",
    ("limit", 5): "a barrier number that the simulator does not know",
    ("global", 0): "writes global memory that another workgroup wrote in this launch",
    ("global", 1): "writes global memory that another wave of the workgroup wrote with no barrier in between",
    ("global", 2): "reads global memory that another workgroup wrote in this launch, with no atomic or ordered access before",
    ("global", 3): "reads global memory that another wave of the workgroup wrote with no barrier in between",
    ("global", 4): "writes global memory that another workgroup read in this launch, with no atomic or ordered access before",
    ("global", 5): "writes global memory that another wave of the workgroup read with no barrier in between",
    ("global", 6): "lanes of one store write one element with different values; which of them stays is not defined",
    ("limit", 2): "internal: an opcode the core does not know",
}  # fmt: skip
HOST_TENSOR = ", a host tensor ("  # in the message of a finding that names the launcher's argument
_ADVICE = {
    "memory": "check the tail handling: the tile's last rows, columns or k, and the buffer resource's num_records",
    "init": "make sure the copy or store that fills this LDS ran, for these lanes too",
    "race": "put the write's wait (vmcnt for copies, lgkmcnt for LDS stores) and a barrier between the two",
    "wait": "wait for the copy (s_waitcnt vmcnt) before this, and let a barrier follow where another wave issued it",
    "barrier": "let every lane and every wave pass every barrier equally often, tails included",
    "global": "give each element one writer, or order the two by a barrier (one workgroup) or an atomic flag (several)",
    "limit": "look for a loop that cannot end",
}


@dataclass(frozen=True)
class Finding:
    """One fault, with the first place it was seen and how often.

    kind        one of KINDS
    file, line  the kernel's Python line; stack: the helpers' lines it went through, outermost first. Of an output that nothing wrote: its
                name and 0
    other_file, other_line, other_stack   the same of the other party, where there is one
    workgroup, wave, lane   of the first occurrence (-1: no wave's doing); other_wave: the other party (-1: none)
    address     bytes: global address, or offset in LDS
    """

    kind: str
    message: str
    file: str
    line: int
    kernel: str
    workgroup: int
    wave: int
    lane: int
    address: int
    count: int
    other_file: str | None = None
    other_line: int | None = None
    other_wave: int = -1
    stack: tuple[tuple[str, int], ...] = ()
    other_stack: tuple[tuple[str, int], ...] = ()

    @property
    def _advice(self) -> str:
        if self.kind == "memory" and HOST_TENSOR in self.message:
            return "put it on the GPU: .cuda(), or device='cuda' where it is made (.pin_memory() makes host memory that kernels may touch)"
        if self.kind == "memory" and " LDS" in self.message and "copy" not in self.message:
            return "check the address arithmetic: stage, row and swizzle, and the size of the LDS array"
        if self.kind == "init" and "output" in self.message:
            return "let some workgroup store every element: check the grid, the tails and the masks of the stores"
        if self.kind == "memory" and "alignment" in self.message:
            return "state the alignment that the address has, or make the address a multiple of it"
        return _ADVICE[self.kind]

    @property
    def _header(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.kind}: {self.message}" + _helpers((self.file, self.line), self.stack)

    @property
    def _occurrence(self) -> str:
        return self._occurrences(self.count, 1)

    def _occurrences(self, count: int, launches: int) -> str:
        """Where it was seen first, how often in how many launches, and the other party."""
        lane = f"workgroup {self.workgroup}, wave {self.wave}, lane {self.lane}, " if self.workgroup >= 0 else ""
        text = f"\n    kernel {self.kernel}, {lane}address {self.address:#x}; "
        if not lane:
            text += f"{count} occurrences"
        elif count == 1:
            text += "the only occurrence"
        else:
            text += (
                f"the first of {count} occurrences in {f'{launches} launches, ' * (launches > 1)}all waves and lanes"
            )
        if self.other_file:
            text += f"\n    other party: wave {self.other_wave} at {self.other_file}:{self.other_line}"
            text += _helpers((self.other_file, self.other_line), self.other_stack)
        return text

    def __str__(self) -> str:
        return describe([self])


def _helpers(last: tuple[str, int | None], stack: tuple[tuple[str, int], ...]) -> str:
    """A line for each helper's line that is another than the one before."""
    text = ""
    for frame in stack:
        if frame != last:
            text += f"\n    in {frame[0]}:{frame[1]}"
        last = frame
    return text


def describe(findings: Sequence[Finding]) -> str:
    """Text of findings. Those of one line and kind share their first and last lines; those that also have one other party, of several
    launches, are told once, with their number."""
    groups: dict[tuple[str, str], dict[Any, list[Finding]]] = {}
    for finding in findings:
        parties = groups.setdefault((finding._header, finding._advice), {})
        other = (finding.kernel, finding.other_file, finding.other_line, finding.other_stack, finding.workgroup >= 0)
        parties.setdefault(other if finding.line else id(finding), []).append(finding)
    texts = []
    for (header, advice), parties in groups.items():
        first, *rest = header.split("\n", 1)
        number = sum(map(len, parties.values()))
        if number > 1:
            first += f" ({number} findings of this line)"
        occurrences = [same[0]._occurrences(sum(f.count for f in same), len(same)) for same in parties.values()]
        texts.append("\n".join([first, *rest]) + "".join(occurrences) + f"\n    {advice}")
    return "\n".join(texts)


class Event(NamedTuple):
    """What a wave did (native.EVENTS says what the fields mean for each kind). line: an index of the program's."""

    kind: str
    wave: int
    line: int
    detail: int
    address: int
    bytes: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch: sizes, host seconds spent simulating it, and the sums of the core's counters over its workgroups."""

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    workgroups: int
    lds_bytes: int
    seconds: float
    counters: dict[str, int]
    events: list[Event] = field(default_factory=list, repr=False)  # of the first workgroup, where they are traced


@dataclass
class Report:
    """Everything that ran in a session."""

    launches: list[Launch] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def workgroups(self) -> int:
        return sum(launch.workgroups for launch in self.launches)

    @property
    def seconds(self) -> float:
        return sum(launch.seconds for launch in self.launches)

    def add(self, other: Report) -> None:
        self.launches += other.launches
        self.findings += other.findings

    def __str__(self) -> str:
        head = f"{len(self.launches)} launches, {self.workgroups} workgroups, {self.seconds:.3f} s, {len(self.findings)} findings"
        return "\n".join([head, *([describe(self.findings)] if self.findings else [])])


class SimulationError(RuntimeError):
    """A launch had findings; `report` holds that launch and them."""

    def __init__(self, report: Report) -> None:
        super().__init__("the simulator found faults\n" + describe(report.findings))
        self.report = report


def finding_from_raw(raw: Any, lines: list[Any], kernel: str) -> Finding:
    def frames(index: int) -> tuple[tuple[str, int], ...]:
        return tuple((_short(file), line) for file, line in lines[index])

    kind = KINDS[raw.kind]
    here = frames(raw.line) if raw.line >= 0 else (("unknown", 0),)
    other = frames(raw.other_line) if raw.other_line >= 0 else ()
    return Finding(
        kind=kind, message=_TEXT[kind, raw.detail], file=here[0][0], line=here[0][1], stack=here[1:], kernel=kernel,
        workgroup=raw.workgroup, wave=raw.wave, lane=raw.lane, address=raw.address, count=raw.count,
        other_file=other[0][0] if other else None, other_line=other[0][1] if other else None, other_stack=other[1:],
        other_wave=raw.other_wave,
    )  # fmt: skip


def _short(file: str) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
