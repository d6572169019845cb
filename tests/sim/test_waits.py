"""Counted waits against machine code: our kernels' mean what they say; a moved, added or removed memory operation shows."""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from fourwave import sim
from fourwave.cli.app import app
from fourwave.ops.gemm.config import candidates
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem
from fourwave.perf import isa, waits
from fourwave.perf.waits import Node, Step

needs_flydsl = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
SMALL = 2  # of candidates(): a small tile, quick to compile


@functools.cache
def compiled(arch: str, layout: str, index: int, lines: bool = True) -> isa.CompiledKernel:
    problem = GemmProblem(4096, 4096, 4096, layout, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    return isa.compile_isa(problem, candidates(arch)[index], arch, lines=lines)


QUICK = [("gfx950", "TN", SMALL)]
REST = [
    (a, layout, i) for a in ("gfx950", "gfx942") for layout in LAYOUTS for i in range(5) if (a, layout, i) not in QUICK
]
ALL = [pytest.param(*c) for c in QUICK] + [pytest.param(*c, marks=pytest.mark.slow) for c in REST]


@needs_flydsl
@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_our_waits_mean_in_machine_code_what_they_mean_as_written(arch, layout, index):
    kernel = compiled(arch, layout, index)
    source = waits.read_module(kernel.module, arch)
    own = [s for n in source for s in n.steps if s.kind == "wait"]
    copies = [s for n in source for s in n.steps if s.kind == "copy"]
    assert (len(own) >= 3 and len(copies) >= 4) if arch == "gfx950" else not copies
    findings = waits.check(kernel.module, kernel.text, arch)
    assert not findings, "\n".join(map(str, findings))


def instructions(text: str) -> list[str]:
    return [line.split(";")[0].strip() for line in text.splitlines() if re.match(r"\t[a-z]", line)]


@needs_flydsl
@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_source_lines_do_not_change_the_code(arch, layout, index):
    assert instructions(compiled(arch, layout, index).text) == instructions(compiled(arch, layout, index, False).text)


def parts():
    """Line numbers in the gfx950 kernel's assembly: copies before the first wait, that wait, the loop's wait, the loop's copies."""
    lines = compiled("gfx950", "TN", SMALL).text.splitlines()
    copies = [i for i, line in enumerate(lines) if re.match(r"\tbuffer_load_dwordx4 .* lds", line)]
    counted = [i for i, line in enumerate(lines) if re.match(r"\ts_waitcnt.*vmcnt\([1-9]", line)]
    assert len(counted) == 2
    before = [i for i in copies if i < counted[0]]
    return lines, before, counted[0], counted[1], [i for i in copies if i > counted[1]]


def moved(lines: list[str], start: int, to: int) -> str:
    """The line `start` in front of the line `to`."""
    rest = [*lines[:start], *lines[start + 1 :]]
    at = to - (start < to)
    # It keeps its source line: .loc holds for all that follows.
    loc = next(line for line in reversed(lines[:start]) if line.startswith("\t.loc"))
    back = next(line for line in reversed(lines[:to]) if line.startswith("\t.loc"))
    return "\n".join([*rest[:at], loc, lines[start], back, *rest[at:]])


def check(text: str) -> list[waits.WaitFinding]:
    kernel = compiled("gfx950", "TN", SMALL)
    return waits.check(kernel.module, text, "gfx950")


@needs_flydsl
def test_a_copy_that_sinks_below_its_wait_is_found():
    lines, before, first, _, _ = parts()
    findings = check(moved(lines, before[-1], first + 1))
    assert findings and findings[0].kind == "uncovered"
    assert findings[0].place[0] == "cdna4.py" and "no longer covers 1 copies" in findings[0].message
    text = str(findings[0])
    assert "as written, up to the wait" in text and "as machine code, up to the wait" in text
    assert "buffer_load_lds" in text and "buffer_load_dwordx4" in text and "loaders.py:" in text


@needs_flydsl
def test_a_copy_that_rises_above_a_wait_is_found():
    lines, _, _, loop, copies = parts()
    findings = check(moved(lines, copies[0], loop))
    assert [f.kind for f in findings] == ["early"], findings
    assert "waits for 1 copies" in findings[0].message


@needs_flydsl
def test_a_changed_count_is_found():
    lines, _, first, loop, _ = parts()
    for at in (first, loop):
        for by, kind in ((1, "uncovered"), (-1, "early")):
            count = re.search(r"vmcnt\((\d+)\)", lines[at])
            assert count
            changed = lines[at].replace(count[0], f"vmcnt({int(count[1]) + by})")
            findings = check("\n".join([*lines[:at], changed, *lines[at + 1 :]]))
            assert [f.kind for f in findings] == [kind], (at, by, findings)


@needs_flydsl
def test_a_memory_operation_that_the_compiler_added_is_found():
    lines, before, *_ = parts()
    spill = "\tscratch_load_dword v1, off, off offset:4"
    findings = check("\n".join([*lines[: before[-1]], spill, *lines[before[-1] :]]))
    assert findings and findings[0].kind == "early"  # it takes a place in the count
    assert "scratch_load_dword" in str(findings[0])


@needs_flydsl
def test_what_cannot_be_matched_is_said():
    lines, before, first, _, _ = parts()
    (finding,) = check("\n".join([*lines[: before[0]], *lines[before[0] + 1 :]]))
    assert finding.kind == "unmatched" and "copies to LDS as written" in finding.message
    (finding,) = check("\n".join([*lines[:first], *lines[first + 1 :]]))
    assert finding.kind == "unmatched" and "1 waits on vmcnt as written, 0 in machine code" in finding.message


# Small kernels by hand: two waits in a loop, register loads in the count


def kernel(prologue: list[Step], loop: list[Step], end: list[Step]) -> list[Node]:
    nodes = [Node("entry", prologue), Node("loop", loop), Node("end", end)]
    nodes[0].successors, nodes[1].successors = [nodes[1]], [nodes[1], nodes[2]]
    return nodes


def copy(line: int) -> Step:
    return Step("copy", ("k.py", line), f"copy {line}")


def wait(line: int, count: int) -> Step:
    return Step("wait", ("k.py", line), f"vmcnt({count})", count)


LOAD = Step("access", ("k.py", 1), "load")


def test_two_waits_in_a_loop():
    c, d, w, v = copy(11), copy(12), wait(21, 2), wait(22, 2)
    source = kernel([c, d], [w, copy(13), v, copy(14)], [wait(23, 0)])
    assert waits.compare(source, source) == []
    sunk = kernel([c, d], [w, v, copy(13), copy(14)], [wait(23, 0)])  # 13 below the wait that counts it
    assert {f.kind for f in waits.compare(source, sunk)} == {"uncovered"}
    risen = kernel([c, d], [w, copy(13), copy(14), v], [wait(23, 0)])
    assert {f.kind for f in waits.compare(source, risen)} == {"early"}


def test_a_register_load_that_left_the_count():
    source = kernel([copy(11), copy(12)], [LOAD, wait(21, 2), copy(13)], [wait(23, 0)])
    hoisted = kernel([LOAD, copy(11), copy(12)], [wait(21, 2), copy(13)], [wait(23, 0)])
    (finding,) = waits.compare(source, hoisted)
    assert finding.kind == "uncovered" and finding.place == ("k.py", 21)
    assert waits.compare(source, source) == []


def test_a_wait_of_the_compilers_own_counts():
    source = kernel([copy(11), copy(12)], [wait(21, 1), copy(13)], [wait(23, 0)])
    drained = kernel([copy(11), copy(12)], [wait(21, 1), copy(13), LOAD, wait(99, 0)], [wait(23, 0)])
    (finding,) = waits.compare(source, drained)
    assert finding.kind == "early" and "a wait of the compiler before it" in finding.message


def test_a_kernel_without_waits_has_nothing_to_check():
    assert waits.compare([Node("entry", [LOAD])], [Node("entry", [])]) == []


@functools.cache
def compiled_gfx1250(layout: str) -> isa.CompiledKernel:
    problem = GemmProblem(
        4096, 4096, 4096, layout, torch.uint8, torch.uint8, torch.bfloat16, a_scaling="1x32", b_scaling="1x32"
    )
    return isa.compile_isa(problem, None, "gfx1250", lines=True)


@needs_flydsl
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gfx1250_counters_mean_in_machine_code_what_they_mean_as_written(layout):
    """The data mover's counter; the waits that the compiler adds (its queue is short) are not the kernel's."""
    kernel = compiled_gfx1250(layout)
    source = waits.read_module(kernel.module, "gfx1250", "tensorcnt")
    kinds = Counter(s.kind for n in source for s in n.steps)
    assert kinds["wait"] >= 4 and kinds["copy"] >= 6, kinds
    assert not [s for n in waits.read_module(kernel.module, "gfx1250", "asynccnt") for s in n.steps if s.kind == "copy"]
    findings = waits.check(kernel.module, kernel.text, "gfx1250")
    assert not findings, "\n".join(map(str, findings))


@needs_flydsl
@pytest.mark.slow
@pytest.mark.parametrize(("by", "kind"), [(1, "uncovered"), (-1, "early")])
def test_a_changed_tensorcnt_is_found(by, kind):
    kernel = compiled_gfx1250("TN")
    lines = kernel.text.splitlines()
    counted = [i for i, line in enumerate(lines) if re.match(r"\ts_wait_tensorcnt 0x1\b", line)]
    assert len(counted) == 2  # of the loop's two steps
    for at in counted:
        changed = lines[at].replace("0x1", hex(1 + by))
        findings = waits.check(kernel.module, "\n".join([*lines[:at], changed, *lines[at + 1 :]]), "gfx1250")
        assert [f.kind for f in findings] == [kind], findings
        assert f"tensorcnt({1 + by})" in findings[0].message and "tensor_load_to_lds" in str(findings[0])


@needs_flydsl
@pytest.mark.slow
def test_a_tensor_load_that_rises_above_its_wait_is_found():
    kernel = compiled_gfx1250("TN")
    lines = kernel.text.splitlines()
    loop = [i for i, line in enumerate(lines) if re.match(r"\ts_wait_tensorcnt 0x1\b", line)]
    load = next(i for i, line in enumerate(lines) if i > loop[0] and line.startswith("\ttensor_load_to_lds"))
    findings = waits.check(kernel.module, moved(lines, load, loop[0]), "gfx1250")
    assert [f.kind for f in findings] == ["early"], findings


@needs_flydsl
def test_explain_prints_the_waits(monkeypatch):
    ready = compiled("gfx950", "TN", SMALL)
    monkeypatch.setattr(isa, "compile_isa", lambda *arguments, lines, **options: ready)
    command = ["explain", "gemm", "--isa", "--waits", "--arch", "gfx950", "--layout", "TN"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert re.search(
        r"waits on vmcnt, gfx950 TN: 3 \(cdna4.py:\d+, cdna4.py:\d+, cdna4.py:\d+\); 0 findings", result.output
    )

    lines, before, first, _, _ = parts()
    object.__setattr__(ready, "text", moved(lines, before[-1], first + 1))
    try:
        result = CliRunner().invoke(app, command)
    finally:
        object.__setattr__(ready, "text", "\n".join(lines))
    assert result.exit_code == 1 and "uncovered" in result.output and "FAILED" in result.output
    assert CliRunner().invoke(app, ["explain", "gemm", "1", "1", "1", "--waits"]).exit_code == 2


def test_gfx1250_counters_are_read_apart():
    """Waits on tensorcnt do not cover asynchronous copies, nor the other way round."""
    text = """
\t.file 1 "k.py"
\t.loc 1 1
\ttensor_load_to_lds s[36:39], s[12:19]
\t.loc 1 2
\tglobal_load_async_to_lds_b128 v1, v[2:3], off
\t.loc 1 3
\ts_wait_tensorcnt 0x0
\t.loc 1 4
\ts_wait_asynccnt 0x1
\ts_endpgm
"""
    for counter, copy, wait in (("tensorcnt", 1, (3, 0)), ("asynccnt", 2, (4, 1))):
        steps = [s for n in waits.read_assembly(text, counter) for s in n.steps]
        assert [(s.kind, s.place[1]) for s in steps] == [("copy", copy), ("wait", wait[0])]
        assert steps[1].count == wait[1]
    source = [
        Node("entry", [Step("copy", ("k.py", 2), "async_load"), Step("wait", ("k.py", 4), "wait asynccnt(0)", 0)])
    ]
    (finding,) = waits.compare(source, waits.read_assembly(text, "asynccnt"), "asynccnt")
    assert finding.kind == "uncovered" and finding.message.startswith("asynccnt(1) no longer covers 1 copies")
