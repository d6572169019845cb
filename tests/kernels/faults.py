"""Plants every fault of fourwave.sim.mutate in every kernel of ours, and runs each launch in every order.

    python tests/kernels/faults.py [--only REGEX] [--record FILE] [--table FILE] [--commit TEXT] [--part I/N] [--again]

prints each kernel's numbers and the faults that nothing notices; the exit status is 1 where one of those is not in REDUNDANT, or where an
order changes a bit.

--record keeps what was found, a line of JSON a kernel, with a fingerprint of what it depends on: the lane program, the launch, the memory that
it met (fourwave.sim.harness.launch_fingerprint), and the simulator. A later run with that record makes every call again and tries the kernels
anew whose fingerprint is another; where no source file has changed at all it does not even make the call. --again tries all.
--table writes the numbers into a Markdown file, after its line <!-- made by ... -->. --commit: what the record and the table call the state of
the tree (without it: git's HEAD). --part: every Nth call from the Ith, for several processes with a record each; records may be joined.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import linecache
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "grouped", "quantize")]

from every_kernel import ARCHS, KernelCall, calls, sessions

from fourwave.sim.harness import Fingerprints, Harness, Orders, Outcome, read, simulator_fingerprint, write
from fourwave.sim.launch import Memory
from fourwave.sim.mutate import Fault
from fourwave.sim.report import Report


@dataclass(frozen=True)
class Redundant:
    """Faults that change nothing, and why.

    fault     regular expression for the fault's name without its number
    file      of the kernel's line, or a helper's that it went through
    text      what that line holds
    calls     regular expression for the kernels (arch and KernelCall.name) where it is so
    """

    fault: str
    file: str
    text: str
    calls: str
    reason: str

    def covers(self, call: str, outcome: Outcome) -> bool:
        return bool(
            re.fullmatch(self.fault, outcome.fault.rpartition(" #")[0])
            and re.search(self.calls, call)
            and any(
                Path(file).name == self.file and self.text in linecache.getline(file, line)
                for file, line in ((outcome.file, outcome.line), *outcome.stack)
            )
        )


REDUNDANT: tuple[Redundant, ...] = (
    Redundant(
        "load off by its size",
        "cdna.py",
        "magnitude(v) for v in row] for row in lane.load(",
        r" quantize .* fp8_(e4m3|e5m2|row)",
        "one element decides a maximum, and this load brings none that does; what is stored is compared bit for bit in test_quantize_kernels.py",
    ),
    Redundant(
        "copy 16 bytes off",
        "loaders.py",
        "buffer.load_to_lds(self.lds, place, offset)",
        r"gfx950 gemm (split-K: )?(bf16 x mxfp4|mxfp\d|blocks)\b",
        "the stage's k is no multiple of SCALE_K: the copy brings zeros to a place that nothing reads, for a constant number of copies a step",
    ),
    Redundant(
        "vmcnt one higher",
        "cdna4.py",
        "wait_loads(in_flight=sum(loads_of(tile - d)",
        r"gfx950 grouped .* preshuffled ",
        "only the first tiles after the prologue need this count: later the weights of tile k, loaded fewer tiles ahead than a, are in flight, too",
    ),
    Redundant(
        "scale one byte off",
        "wmma.py",
        "_scaled(ones[0], a[i]",
        r"gfx1250 gemm .* bias_grad",
        "the ones that rows are multiplied with for their sums have one scale in all bytes",
    ),
    Redundant(
        "lgkmcnt dropped",
        "cdna4.py",
        "wait_lds()",
        r"gfx950 grouped mxfp8 ",
        "the first wait of a step: its scales, the last that the step before read, are sorted before it, and that has waited for all reads",
    ),
    Redundant(
        "counter (one higher|dropped)",
        "gfx1250.py",
        "tdm.wait_lds()",
        r"gfx1250 gemm .*(bf16| NN | NT )",
        "scales are put together from bytes, or shifted, right after they are read, and that has waited for the last read",
    ),
    Redundant(
        "counter one higher",
        "gfx1250.py",
        "tdm.wait_lds()",
        r"gfx1250 gemm mxfp[48]( x mxfp[48])? TN ",
        "the one LDS read that may stay out is the last, of scales, whose page nothing overwrites in an even step and no epilogue reaches",
    ),
    Redundant(
        "barrier dropped",
        "gfx1250.py",
        "tdm.depart()",
        r"gfx1250 gemm bf16 x mxfp4 (TN|NN) 64x256$",
        "after 22 steps what other waves may still read is stage 1, which so small an epilogue does not reach; after 24 it is stage 0, and the "
        "fault is found (test_faults.py)",
    ),
    Redundant(
        "counter dropped",
        "gfx1250.py",
        "tdm.wait_lds()",
        r"gfx1250 gemm mxfp[48]( x mxfp[48])? TN (32|64)x256$",
        "after 22 steps the reads still out in the drain are of stage 1, which so small an epilogue does not reach; after 24 they are of stage 0, "
        "and the fault is found (test_faults.py)",
    ),
)


def why_redundant(call: str, outcome: Outcome) -> str | None:
    return next((r.reason for r in REDUNDANT if r.covers(call, outcome)), None)


@dataclass
class Both:
    """Session.harness: Orders, and Harness."""

    orders: Orders
    faults: Harness

    def __call__(self, kernel: str, key: Any, prepare: Any, simulate: Any, memory: Memory) -> Report:
        before = read(memory)
        self.orders(kernel, key, prepare, simulate, memory)
        write(memory, before)
        return self.faults(kernel, key, prepare, simulate, memory)


def try_call(
    call: KernelCall,
    choose: Callable[[Fault], bool] | None = None,
    orders: bool = True,
    prints: Fingerprints | None = None,
) -> tuple[list[str], list[Outcome]]:
    """(what was wrong with the result or differed between orders, what became of the faults). prints: filled."""
    turns, faults = Orders(), Harness(choose=choose)
    harness: Any = Both(turns, faults) if orders else faults
    if prints is not None:
        prints.then = harness
    with sessions(harness=harness if prints is None else prints, threads=1):
        wrong = call.run()
    return wrong + turns.differences, faults.outcomes


def forget_kernels() -> None:
    """Compiled kernels are kept; here each is met once, and they are large."""
    from fourwave.ops.gemm import amd as gemm
    from fourwave.ops.grouped_gemm import amd as grouped
    from fourwave.quantize import amd as quantizers

    for module in (gemm, grouped, quantizers):
        module._compiled.clear()
    gc.collect()


@functools.cache
def sources() -> str:
    """A fingerprint of every source file that a call could depend on."""
    root = Path(__file__).parents[2]
    folders = (root / "src", *(root / "tests" / name for name in ("kernels", "grouped", "quantize")))
    files = sorted(
        f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".c", ".h", ".inc", ".def", ".json")
    )
    digest = hashlib.sha256()
    for f in files:
        digest.update(f"{f.relative_to(root)}\0".encode() + f.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def commit() -> str:
    """git's HEAD of this tree, "+" where files differ from it; "" outside a repository."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(("git", *arguments), cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    return f"{head}{'+' if git('status', '--porcelain') else ''}" if head else ""


def survivor(call: KernelCall, outcome: Outcome) -> dict[str, Any]:
    return {
        "fault": outcome.fault,
        "kernel": outcome.kernel,
        "lines": [f"{Path(file).name}:{line}" for file, line in ((outcome.file, outcome.line), *outcome.stack)],
        "text": linecache.getline(*(outcome.stack or [(outcome.file, outcome.line)])[-1]).strip(),
        "reason": why_redundant(full_name(call), outcome),
    }


def record(call: KernelCall) -> dict[str, Any]:
    start = time.perf_counter()
    prints = Fingerprints()
    wrong, outcomes = try_call(call, prints=prints)
    hows = Counter(o.how or "survived" for o in outcomes)
    kinds = Counter(o.fault.rpartition(" #")[0] for o in outcomes)
    return {
        "arch": call.arch, "call": call.name, "wrong": wrong, "faults": len(outcomes), "how": dict(hows), "kinds": dict(kinds),
        "survivors": [survivor(call, o) for o in outcomes if o.survived], "seconds": round(time.perf_counter() - start, 1),
        "launches": prints.launches, "simulator": simulator_fingerprint(), "sources": sources(),
    }  # fmt: skip


def still_holds(call: KernelCall, row: dict[str, Any]) -> dict[str, Any] | None:
    """The record's row of a call, with what stands in the sources now about its survivors; None where it has to be tried again."""
    if row.get("simulator") != simulator_fingerprint():
        return None
    if row["sources"] == sources():
        return row
    if row["wrong"]:
        return None
    prints = Fingerprints()
    with sessions(harness=prints, threads=1):
        wrong = call.run()
    names = [kernel for kernel, _ in prints.launches]
    if wrong or [list(launch) for launch in prints.launches] != [list(launch) for launch in row["launches"]]:
        return None
    if row["survivors"] and len({(k, p) for k, p in prints.launches}) != len(set(names)):
        return None  # kernels of one name: whose the survivors are is not known
    moved = []
    for s in row["survivors"]:
        (file, line), *stack = prints.places[s["kernel"], s["fault"]]
        moved.append(survivor(call, Outcome(s["kernel"], s["fault"], file, line, "", tuple(stack))))
    return {**row, "survivors": moved, "sources": sources()}


def full_name(call: KernelCall) -> str:
    return f"{call.arch} {call.name}"


def summary(row: dict[str, Any]) -> str:
    accepted = sum(s["reason"] is not None for s in row["survivors"])
    left = len(row["survivors"]) - accepted
    caught = row["faults"] - len(row["survivors"])
    return (
        f"{row['arch']} {row['call']}: {row['faults']} faults, {caught} caught, {accepted} redundant, {left} unexplained; "
        f"{'; '.join(row['wrong']) or 'right in every order'}"
    )


def table(rows: Iterable[dict[str, Any]], state: str) -> Iterator[str]:
    """Markdown: a row a kernel."""
    yield f"State of the tree: {state}. A kernel tried at an earlier one had the same fingerprint there."
    yield ""
    yield "| arch | kernel | faults | by a finding | by the output | redundant | orders |"
    yield "|---|---|---|---|---|---|---|"
    total: Counter[str] = Counter()
    for row in rows:
        findings: Counter[str] = Counter()
        for how, count in row["how"].items():
            if how.startswith("finding: "):
                findings[how.removeprefix("finding: ")] += count
        told = "; ".join(f"{kind}: {count}" for kind, count in sorted(findings.items())) or "0"
        output, redundant = row["how"].get("output", 0), len(row["survivors"])
        total.update(
            kernels=1, faults=row["faults"], findings=sum(findings.values()), output=output, redundant=redundant
        )
        orders = "the same" if not row["wrong"] else "differ"
        yield f"| {row['arch']} | {row['call']} | {row['faults']} | {told} | {output} | {redundant} | {orders} |"
    yield ""
    yield (
        f"{total['kernels']} kernels, {total['faults']} faults in all: {total['findings']} caught by a finding, {total['output']} by the output, "
        f"{total['redundant']} redundant."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    state = arguments.commit or commit()
    held: dict[tuple[str, str], dict[str, Any]] = {}
    if arguments.record and arguments.record.exists():
        rows = [json.loads(line) for line in arguments.record.read_text(encoding="utf-8").splitlines()]
        held = {(row["arch"], row["call"]): row for row in rows}
    bad = tried = 0
    shown = []
    chosen = [call for arch in ARCHS for call in calls(arch) if re.search(arguments.only, full_name(call))]
    first, step = map(int, arguments.part.split("/"))
    for call in chosen[first::step]:
        old = held.get((call.arch, call.name))
        row = still_holds(call, old) if old is not None and not arguments.again else None
        if row is None:
            row = {**record(call), "tried": state}
            tried += 1
        row = {**row, "holds": state}
        if row != old:
            forget_kernels()
            if arguments.record:  # the last line of a call counts
                with arguments.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        shown.append(row)
        print(summary(row), flush=True)
        for s in row["survivors"]:
            print(
                f"    {s['fault']} at {' > '.join(s['lines'])}: {s['text']}  # {s['reason'] or 'UNEXPLAINED'}",
                flush=True,
            )
        bad += bool(row["wrong"]) or any(s["reason"] is None for s in row["survivors"])
    if arguments.table:
        text = arguments.table.read_text(encoding="utf-8")
        head, mark, _ = text.partition("<!-- made by ")
        line = mark + text.partition(mark)[2].partition("\n")[0]
        arguments.table.write_text("\n".join([head + line, *table(shown, state)]) + "\n", encoding="utf-8")
    print(
        f"{len(shown)} kernels ({tried} tried now), {sum(row['faults'] for row in shown)} faults; {bad} kernels with something unexplained"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
