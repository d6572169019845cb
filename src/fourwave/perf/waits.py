"""Checks a kernel's own counted waits against the order in which machine code issues what they count.

    kernel = compile_isa(problem, config, "gfx950", lines=True)
    for finding in check(kernel.module, kernel.text, kernel.arch):
        print(finding)

vmcnt counts every vector-memory instruction of the wave, in the order of the final ISA; the author counted in the order of the source. Where the
compiler moved, added or removed one, the count no longer means what it says. Both orders are run along one and the same path: a path of the
module before code generation, every loop taken a few times, and the path of the machine code that passes the same waits and issues each copy to
LDS equally often. At each wait, a copy that must have landed in the first but need not in the second is a finding; so is one that the first
leaves in flight and the second waits for. Register loads and stores count, but are the compiler's to wait for.

gfx1250 has counters that count copies between global memory and LDS alone, the tensor data mover's (tensorcnt) and the lanes' (asynccnt): each is
checked by itself, with no other operations in its order.

A wait or a copy is known by its source line and its place among those of the same line, where the compiler unrolled a loop by the order in which
they are issued. Two copies of one line that the compiler exchanged are taken for each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

Place = tuple[str, int]  # file name, line
Copy = tuple[Place, int]  # a copy's line, and which of that line's copies
_ACCESS = re.compile(r"(buffer|global|flat|scratch)_(load|store|atomic|wbl2)")
# gfx1250's counters of copies: number in the simulator's programs, those programs' copies, machine code's.
_COPY_COUNTERS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "asynccnt": (
        1,
        ("ASYNC_LOAD", "ASYNC_STORE"),
        r"global_(load_async_to|store_async_from)_lds_|cluster_load_async_to_lds_",
    ),
    "tensorcnt": (2, ("TENSOR",), r"tensor_(load_to|store_from)_lds"),
}


def counters(arch: str) -> tuple[str, ...]:
    """The counters of arch that kernels wait on for copies."""
    return tuple(_COPY_COUNTERS) if arch == "gfx1250" else ("vmcnt",)


# How often loops are gone round: more often than pipelines are deep, and as often as it takes to follow a loop that the compiler unrolled.
_LOOP_PASSES = (*range(5, 21), 4, 3, 2, 1)
_LISTED = 24  # instructions shown before a wait


@dataclass(frozen=True)
class Step:
    """One instruction that matters: "copy" to LDS (or from it, where the counter counts those), other vector-memory "access", "wait" on the
    counter, "other wait", or "barrier"."""

    kind: str
    place: Place
    text: str
    count: int = 1  # accesses it stands for; of a wait: its count


@dataclass(eq=False)
class Node:
    """A basic block."""

    name: str
    steps: list[Step] = field(default_factory=list)
    successors: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class WaitFinding:
    """kind: "uncovered" (copies that must have landed may not have), "early" (waits for copies that may stay in flight), "unmatched"."""

    kind: str
    place: Place
    message: str
    source_order: tuple[str, ...] = ()
    machine_order: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.place[0]}:{self.place[1]}: {self.kind}: {self.message}"]
        for title, listing in (("as written", self.source_order), ("as machine code", self.machine_order)):
            if listing:
                lines += [f"    {title}, up to the wait:", *(f"      {text}" for text in listing)]
        return "\n".join(lines)


def read_module(module: str, arch: str, counter: str = "vmcnt", kernel: str | None = None) -> list[Node]:
    """The blocks of a kernel in a FlyDSL module before code generation (text with locations), entry first: what `counter` counts.

    kernel: its name; None: the module's only one
    """
    from fourwave.backends import guard

    guard.import_flydsl()
    from flydsl._mlir import ir
    from flydsl.compiler.jit_function import _create_mlir_context

    from fourwave.sim.flydsl_hook import _without_source_capture
    from fourwave.sim.lowering import lower_kernel

    kept: list[Any] = []

    def keep(builder: Any) -> None:
        builder.order_blocks()
        kept.extend((b, list(b.code), list(b.successors)) for b in builder.blocks)

    context = _create_mlir_context()
    with context, _without_source_capture():
        parsed = ir.Module.parse(module)
        kernels = [
            (outer.operation, inner.operation)
            for outer in parsed.body.operations
            if outer.operation.name == "gpu.module"
            for inner in outer.operation.regions[0].blocks[0].operations
            if inner.operation.name == "llvm.func" and "gpu.kernel" in inner.operation.attributes
        ]
        if kernel is not None:
            kernels = [k for k in kernels if ir.StringAttr(k[1].attributes["sym_name"]).value == kernel]
        if len(kernels) != 1:
            raise ValueError(
                f"{len(kernels)} kernels{f' named {kernel}' * (kernel is not None)} in the module instead of one"
            )
        program = lower_kernel(ir, *kernels[0], arch, keep)
    nodes = {block: Node(block.name) for block, _, _ in kept}
    for block, code, successors in kept:
        nodes[block].successors = [nodes[s] for s in successors]
        for i in code:
            frames = program.lines[i.line] if i.line >= 0 else (("unknown", 0),)
            place = (Path(frames[-1][0]).name, frames[-1][1])
            step: Step | None = None
            if counter != "vmcnt":
                step = _counted(i, place, counter)
            elif i.op in ("BUFFER_LOAD_LDS", "GLOBAL_LOAD_LDS"):
                step = Step("copy", place, i.op.lower())
            elif i.op == "WAIT" and i.args[0] >= 0:
                step = Step("wait", place, f"wait vmcnt({i.args[0]})", i.args[0])
            elif i.op == "WAIT":
                step = Step("other wait", place, f"wait lgkmcnt({i.args[1]})")
            elif i.op == "BARRIER":
                step = Step("barrier", place, "barrier")
            elif i.op in ("GLOBAL_LOAD", "GLOBAL_STORE", "BUFFER_LOAD", "BUFFER_STORE"):
                size = i.args[3 if i.op.startswith("GLOBAL") else 7] & 0xFF  # above: the alignment it states
                step = Step("access", place, i.op.lower(), max(1, -(-size // 16)))
            elif i.op in ("GLOBAL_ATOMIC", "BUFFER_ATOMIC"):
                step = Step("access", place, i.op.lower())
            if step is not None:
                nodes[block].steps.append(step)
    return [nodes[block] for block, _, _ in kept]


def _counted(i: Any, place: Place, counter: str) -> Step | None:
    """An instruction of the simulator's program for gfx1250, as one of its counters sees it."""
    number, copies, _ = _COPY_COUNTERS[counter]
    if i.op in copies:
        return Step("copy", place, i.op.lower() + (" store" if i.op == "TENSOR" and i.args[0] else ""))
    if i.op == "WAIT_COUNTER":
        kind = "wait" if i.args[0] == number else "other wait"
        return Step(kind, place, f"wait {counter}({i.args[1]})" if kind == "wait" else "wait", i.args[1])
    return Step("barrier", place, i.op.lower()) if i.op in ("BARRIER_SIGNAL", "BARRIER_WAIT") else None


def read_assembly(text: str, counter: str = "vmcnt", kernel: str | None = None) -> list[Node]:
    """The blocks of a kernel in an assembly text with .loc directives, entry first: what `counter` counts.

    kernel: its name; None: the text's first
    """
    files: dict[str, str] = {}
    place: Place = ("unknown", 0)
    nodes = [Node("entry")]
    labels: dict[str, Node] = {}
    branches: list[tuple[Node, str | None, bool]] = []  # node, target, whether it can fall through
    fallthrough: dict[Node, Node] = {}
    open_block = True  # the last node still takes instructions
    started = False
    inside = kernel is None  # the kernel's own lines

    def begin(name: str) -> Node:
        node = Node(name)
        if open_block:
            fallthrough[nodes[-1]] = node
        nodes.append(node)
        return node

    for line in text.splitlines():
        code = line.split(";")[0].rstrip()
        if (m := re.match(r'\s+\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', code)) is not None:
            files[m[1]] = Path(m[2]).name
        elif not inside:
            inside = re.match(rf"{re.escape(kernel or '')}:", code) is not None
        elif (m := re.match(r"\s+\.loc\s+(\d+)\s+(\d+)", code)) is not None:
            place = (files.get(m[1], "unknown"), int(m[2]))
        elif (m := re.match(r"(\.LBB\w+):", code)) is not None:
            labels[m[1]] = begin(m[1])
            open_block = True
        elif re.match(r"\s+\.section|\.Lfunc_end", code) and started:
            break
        elif (m := re.match(r"\s+([a-z][a-z0-9_]*)(?:\s+(.*))?$", code)) is not None:
            op, operands = m[1], (m[2] or "").strip()
            started = True
            if not open_block:
                begin(f"after {nodes[-1].name}")
                open_block = True
            node = nodes[-1]
            if op.startswith(("s_branch", "s_cbranch")):
                conditional = op != "s_branch"
                branches.append((node, operands, conditional))
                following = Node(f"after {node.name}")
                if conditional:
                    fallthrough[node] = following
                nodes.append(following)
            elif op == "s_endpgm":
                open_block = False
            elif counter != "vmcnt":
                if re.match(_COPY_COUNTERS[counter][2], op):
                    node.steps.append(Step("copy", place, " ".join(code.split())))
                elif op == f"s_wait_{counter}":
                    node.steps.append(Step("wait", place, code.strip(), int(operands, 0)))
                elif op in ("s_barrier_signal", "s_barrier_wait"):
                    node.steps.append(Step("barrier", place, " ".join(code.split())))
            elif op == "s_barrier":
                node.steps.append(Step("barrier", place, code.strip()))
            elif op == "s_waitcnt" and (count := re.search(r"vmcnt\((\d+)\)", operands)) is not None:
                node.steps.append(Step("wait", place, code.strip(), int(count[1])))
            elif _ACCESS.match(op):
                to_lds = re.search(r"\blds\b", operands) is not None or "_lds_" in op
                node.steps.append(Step("copy" if to_lds else "access", place, " ".join(code.split())))
    if not inside:
        raise ValueError(f"no kernel named {kernel} in the assembly")
    for node, target, _ in branches:
        if target not in labels:
            raise ValueError(f"a branch to {target}, which is not in the assembly")
        node.successors.append(labels[target])
    for node, following in fallthrough.items():
        if following not in node.successors:
            node.successors.append(following)
    return nodes


def _merged(source: Sequence[Node], machine: Sequence[Node]) -> list[Node]:
    """The machine code with each wait on vmcnt at its source line: the compiler joins adjacent waits into one, at the line of either."""
    waits = {s.place for n in source for s in n.steps if s.kind == "wait"}
    joined: dict[Place, Place] = {}
    for node in source:
        for a, b in zip(node.steps, node.steps[1:]):
            if {a.kind, b.kind} == {"wait", "other wait"}:
                wait, other = (a, b) if a.kind == "wait" else (b, a)
                if other.place not in waits:
                    joined[other.place] = wait.place
    nodes = {n: Node(n.name) for n in machine}
    for n, new in nodes.items():
        new.successors = [nodes[x] for x in n.successors]
        new.steps = [replace(x, place=joined.get(x.place, x.place)) if x.kind == "wait" else x for x in n.steps]
    return list(nodes.values())


def _copies(nodes: Sequence[Node], by_line: bool = False) -> dict[int, Copy]:
    """Names of the copies, by id() of their step: line, and number among that line's (by_line: always 0)."""
    seen: Counter[Place] = Counter()
    names: dict[int, Copy] = {}
    for node in nodes:
        for step in node.steps:
            if step.kind == "copy":
                names[id(step)] = (step.place, seen[step.place])
                seen[step.place] += not by_line
    return names


def _components(nodes: Sequence[Node]) -> dict[Node, int]:
    """Number of the strongly connected component of each block; -1 for a block in no loop."""
    reach: dict[Node, set[Node]] = {}
    for node in nodes:
        found: set[Node] = set()
        stack = list(node.successors)
        while stack:
            n = stack.pop()
            if n not in found:
                found.add(n)
                stack += n.successors
        reach[node] = found
    numbers: dict[Node, int] = {}
    for index, node in enumerate(nodes):
        if node not in numbers:
            for other in [n for n in reach[node] if node in reach[n]]:
                numbers[other] = index
            numbers.setdefault(node, -1)
    return numbers


def _path(nodes: Sequence[Node], passes: int) -> list[Node]:
    """A path from the entry to an end that goes round each loop `passes` times and otherwise where most happens."""
    component = _components(nodes)
    ahead: dict[Node, int] = {}
    for node in nodes:
        found: set[Node] = {node}
        stack = list(node.successors)
        while stack:
            n = stack.pop()
            if n not in found:
                found.add(n)
                stack += n.successors
        ahead[node] = sum(len(n.steps) for n in found)
    visits: Counter[Node] = Counter()
    path = [nodes[0]]
    while path[-1].successors:
        here = path[-1]
        visits[here] += 1
        inside = [
            s for s in here.successors if component[s] != -1 and component[s] == component[here] and visits[s] < passes
        ]
        outside = [s for s in here.successors if component[s] == -1 or component[s] != component[here]]
        choice = inside or outside or here.successors
        path.append(
            min(choice, key=lambda s: (visits[s], -ahead[s]))
            if choice is inside
            else max(choice, key=lambda s: ahead[s])
        )
        if len(path) > 100_000:
            raise ValueError("no end of the kernel was reached")
    return path


def _along(
    nodes: Sequence[Node],
    names: dict[int, Copy],
    sequence: Sequence[Place],
    issued: Counter[Copy],
    through: Node,
    budget: int,
) -> list[Node] | None:
    """A path of the machine code by way of `through` whose waits at the places of `sequence` come in this order and that issues each copy as
    often as `issued`."""
    waited = set(sequence)

    def advance(
        node: Node, at: int, left: tuple[tuple[Copy, int], ...]
    ) -> tuple[int, tuple[tuple[Copy, int], ...]] | None:
        counts = dict(left)
        for step in node.steps:
            if step.kind == "wait" and step.place in waited:
                if at >= len(sequence) or sequence[at] != step.place:
                    return None
                at += 1
            elif step.kind == "copy":
                name = names[id(step)]
                if counts.get(name, 0) == 0:
                    return None
                counts[name] -= 1
        return at, tuple(counts.items())

    start = advance(nodes[0], 0, tuple(issued.items()))
    if start is None:
        return None
    stack: list[tuple[list[Node], bool, int, tuple[tuple[Copy, int], ...]]] = [
        ([nodes[0]], nodes[0] is through, *start)
    ]
    seen: set[Any] = set()
    while stack and budget:
        budget -= 1
        path, passed, at, left = stack.pop()
        key = (path[-1], passed, at, left)
        if key in seen:
            continue
        seen.add(key)
        if not path[-1].successors:
            if passed and at == len(sequence) and not any(n for _, n in left):
                return path
            continue
        for following in path[-1].successors:
            moved = advance(following, at, left)
            if moved is not None:
                stack.append(([*path, following], passed or following is through, *moved))
    return None


@dataclass
class _Passed:
    """A wait of the path: what it covers, and the instructions before it."""

    place: Place
    covered: set[tuple[Copy, int]]
    issued: set[tuple[Copy, int]]
    listing: tuple[str, ...]
    count: int


def _run(names: dict[int, Copy], path: Sequence[Node], places: set[Place]) -> Iterator[_Passed]:
    """Every wait at one of `places` along the path. A copy's instances are numbered as they are issued."""
    queue: list[tuple[Copy, int] | None] = []  # oldest first; None: a register access
    covered: set[tuple[Copy, int]] = set()
    issued: set[tuple[Copy, int]] = set()
    times: Counter[Copy] = Counter()
    listing: list[str] = []
    for node in path:
        for step in node.steps:
            where = f"{step.place[0]}:{step.place[1]}"
            listing.append(f"{step.text:<60} {where}")
            if step.kind == "copy":
                name = names[id(step)]
                queue.append((name, times[name]))
                issued.add((name, times[name]))
                times[name] += 1
            elif step.kind == "access":
                queue += [None] * step.count
            elif step.kind == "wait":
                done = queue[: max(0, len(queue) - step.count)]
                del queue[: len(done)]
                covered.update(d for d in done if d is not None)
                if step.place in places:
                    yield _Passed(step.place, set(covered), set(issued), tuple(listing[-_LISTED:]), step.count)


@dataclass(frozen=True)
class Matched:
    """A kernel's own waits on one counter, by their places, and what of them does not mean in machine code what it means as written."""

    counter: str
    places: tuple[Place, ...]
    findings: tuple[WaitFinding, ...]


def match(module: str, assembly: str, arch: str, kernel: str | None = None) -> list[Matched]:
    """Match a kernel's own waits for copies with its machine code, for each counter of arch.

    module     FlyDSL's module before code generation, with locations
    assembly   the final ISA with .loc directives (FLYDSL_DEBUG_ENABLE_DEBUG_INFO=1)
    kernel     its name; None: the only one
    Raises ValueError for texts that do not hold the kernel, UnknownOperation as the simulator does.
    """
    result = []
    for counter in counters(arch):
        source = read_module(module, arch, counter, kernel)
        places = tuple(step.place for node in source for step in node.steps if step.kind == "wait")
        found = compare(source, read_assembly(assembly, counter, kernel), counter)
        result.append(Matched(counter, places, tuple(found)))
    return result


def check(module: str, assembly: str, arch: str, kernel: str | None = None) -> list[WaitFinding]:
    """match()'s findings; [] if every wait covers exactly the copies it was meant to."""
    return [finding for matched in match(module, assembly, arch, kernel) for finding in matched.findings]


def compare(source: Sequence[Node], machine: Sequence[Node], counter: str = "vmcnt") -> list[WaitFinding]:
    """check() on blocks that were read before."""
    places = {s.place for n in source for s in n.steps if s.kind == "wait"}
    if not places:
        return []
    machine = _merged(source, machine)
    differ, lost = [], False
    for kind, wanted in (("wait", places), ("copy", None)):
        ours = Counter(s.place for n in source for s in n.steps if s.kind == kind)
        theirs = Counter(
            s.place for n in machine for s in n.steps if s.kind == kind and (wanted is None or s.place in wanted)
        )
        for place in sorted(ours.keys() | theirs.keys()):
            if ours[place] != theirs[place]:
                what = {"wait": f"waits on {counter}", "copy": "copies to LDS"}[kind]
                text = f"{ours[place]} {what} as written, {theirs[place]} in machine code"
                differ.append(WaitFinding("unmatched", place, text))
            lost = lost or not ours[place] or not theirs[place]
    if lost:
        return differ
    # Where the compiler unrolled, peeled or merged, a line's copies are known by the order in which they are issued, and every block of the
    # machine code that holds waits or copies of the path is gone through.
    names, others = _copies(source, bool(differ)), _copies(machine, bool(differ))
    left = [n for n in machine if any(s.kind == "copy" or (s.kind == "wait" and s.place in places) for s in n.steps)]
    left = left if differ else machine[:1]
    findings: dict[tuple[str, Place], WaitFinding] = {}
    while left:
        found = _both(source, machine, names, others, left[0])
        if found is None:
            first = next(s.place for s in (*left[0].steps, *(s for n in source for s in n.steps)) if s.kind == "wait")
            text = "no path of the machine code passes the same waits and issues the same copies"
            if left[0] is not machine[0]:
                text += f" by way of its block {left[0].name}"
            return differ or [WaitFinding("unmatched", first, text)]
        path, other = found
        left = [n for n in left[1:] if n not in other]
        for written, compiled in zip(_run(names, path, places), _run(others, other, places), strict=True):
            for finding in _differences(written, compiled, counter):
                findings.setdefault((finding.kind, finding.place), finding)
    return list(findings.values())


def _both(
    source: Sequence[Node], machine: Sequence[Node], names: dict[int, Copy], others: dict[int, Copy], through: Node
) -> tuple[list[Node], list[Node]] | None:
    """A path of the source and one of the machine code, by way of a block of its, with the same waits and copies."""
    for passes in _LOOP_PASSES:
        path = _path(source, passes)
        sequence = [s.place for n in path for s in n.steps if s.kind == "wait"]
        issued = Counter(names[id(s)] for n in path for s in n.steps if s.kind == "copy")
        budget = 200_000 if passes == _LOOP_PASSES[0] else 20_000
        if (other := _along(machine, others, sequence, issued, through, budget)) is not None:
            return path, other
    return None


def _differences(written: _Passed, compiled: _Passed, counter: str) -> Iterator[WaitFinding]:
    """What a wait covers in one order and not in the other."""
    missing = written.covered - compiled.covered
    early = (compiled.covered - written.covered) & written.issued
    for kind, copies in (("uncovered", missing), ("early", early)):
        if not copies:
            continue
        lines = ", ".join(f"{n} of {p[0]}:{p[1]}" for p, n in sorted(Counter(c[0] for c, _ in copies).items()))
        if kind == "uncovered":
            text = f"{counter}({compiled.count}) no longer covers {len(copies)} copies to LDS that it covers as written ({lines}): lower the count, or keep the compiler from moving memory operations"
        else:
            text = f"{counter}({compiled.count}), or a wait of the compiler before it, waits for {len(copies)} copies to LDS that may stay in flight as written ({lines})"
        yield WaitFinding(kind, written.place, text, written.listing, compiled.listing)


__all__ = ["Matched", "Node", "Step", "WaitFinding", "check", "compare", "match", "read_assembly", "read_module"]
