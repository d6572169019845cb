"""Order: when copies land, what wait counters, fences and barriers complete, and what each checker says where.

Sources
  s_waitcnt fields on gfx9: LLVM, AMDGPU "waitcnt" operand of GFX9 (VM_CNT in bits 15:14 and 3:0, values 0 to 63; EXP_CNT 6:4; LGKM_CNT 11:8).
  What the counters count and that loads, stores and copies to LDS share vmcnt, in issue order; LDS operations lgkmcnt, in order: AMD CDNA3 ISA
  guide, section 4.4; AMDGPUUsage, memory model gfx942.
  A release fence at workgroup scope waits for LDS stores (lgkmcnt(0)) before the barrier: AMDGPUUsage, memory model gfx942; that a raw
  s_barrier does not wait by itself: same place (gfx90a and later have back-off barriers).
  A read in flight needs its wait before its result is used; the compiler inserts it (LLVM, SIInsertWaitcnts), which is why a use counts.
That 0xFF bytes stand for bytes that have not arrived is the simulator's convention, and what the findings say is its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from machine import launch, lower, only

from fourwave.sim import UnknownOperation
from fourwave.sim.report import Report

SCHEDULES = ["forward", "reverse", "random:3", "random:77"]
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def waitcnt(vm: int = 63, lgkm: int = 15, exp: int = 7) -> int:
    return (vm & 15) | (vm >> 4) << 14 | exp << 4 | lgkm << 8


class Kernel:
    """Text of a kernel on LDS of 16 KiB: threads copy, store and load dwords at 4 * lane (or 4 * thread) past an offset."""

    def __init__(self) -> None:
        self.text = """
  %tid = rocdl.workitem.id.x : i32
  %group = rocdl.workgroup.id.x : i32
  %c2 = llvm.mlir.constant(2 : i32) : i32
  %c6 = llvm.mlir.constant(6 : i32) : i32
  %c63 = llvm.mlir.constant(63 : i32) : i32
  %wave = llvm.lshr %tid, %c6 : i32
  %lane = llvm.and %tid, %c63 : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>"""
        self.count = 0
        self.outputs = 0

    def name(self) -> str:
        self.count += 1
        return f"%n{self.count}"

    def add(self, text: str, line: int = 1) -> None:
        self.text += f'\n  {text} loc("kernel.py":{line}:1)'

    def define(self, text: str, line: int = 1) -> str:
        name = self.name()
        self.add(f"{name} = {text}", line)
        return name

    def constant(self, value: int, t: str = "i32") -> str:
        return self.define(f"llvm.mlir.constant({value} : {t}) : {t}")

    def at(self, offset: int, by: str = "%lane", t: str = "i32") -> str:
        base = self.define(f"llvm.getelementptr %lds[{offset}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8")
        return self.define(f"llvm.getelementptr {base}[{by}] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, {t}")

    def copy(self, offset: int, source: int, line: int) -> None:
        """Each lane's dword source + lane of the input goes to offset + 4 * lane."""
        s = self.define(f"llvm.getelementptr %in[{source}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32")
        p = self.define(f"llvm.getelementptr {s}[%lane] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32")
        d = self.define(f"llvm.getelementptr %lds[{offset}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8")
        self.add(f"rocdl.global.load.lds {p}, {d}, 4, 0, 0", line)

    def store(self, offset: int, value: str, line: int, by: str = "%lane", t: str = "i32") -> None:
        self.add(f"llvm.store {value}, {self.at(offset, by, t)} : {t}, !llvm.ptr<3>", line)

    def load(self, offset: int, line: int, by: str = "%lane", t: str = "i32") -> str:
        return self.define(f"llvm.load {self.at(offset, by, t)} : !llvm.ptr<3> -> {t}", line)

    def global_load(self, line: int = 1, t: str = "i32") -> str:
        p = self.define(f"llvm.getelementptr %in[%lane] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {t}")
        return self.define(f"llvm.load {p} : !llvm.ptr<1> -> {t}", line)

    def out(self, value: str) -> None:
        """The next 256 dwords of this workgroup's part of the output: one a thread."""
        part = self.define(
            "llvm.getelementptr %out[%group] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<16384 x i32>"
        )
        p = self.define(f"llvm.getelementptr {part}[{256 * self.outputs}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32")
        q = self.define(f"llvm.getelementptr {p}[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32")
        self.outputs += 1
        self.add(f"llvm.store {value}, {q} : i32, !llvm.ptr<1>")

    def wait(self, vm: int = 63, lgkm: int = 15, line: int = 1) -> None:
        self.add(f"rocdl.s.waitcnt {waitcnt(vm, lgkm)}", line)

    def barrier(self, line: int = 1) -> None:
        self.add("rocdl.s.barrier", line)

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        inside, after = f"^i{self.count}", f"^a{self.count}"
        self.add(f"llvm.cond_br {condition}, {inside}, {after}")
        self.text += f"\n{inside}:"
        yield
        self.add(f"llvm.br {after}")
        self.text += f"\n{after}:"
        self.count += 1

    @contextmanager
    def wave(self, number: int) -> Iterator[None]:
        with self.when(self.define(f'llvm.icmp "eq" %wave, {self.constant(number)} : i32')):
            yield

    def run(self, waves: int = 2, **options: Any) -> tuple[np.ndarray, Report]:
        program = lower(self.text, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=16384)
        assert self.outputs <= 64
        out = np.zeros((64 * options.get("grid", 1), 256), np.uint32)
        return out, launch(program, SOURCE, out, block=64 * waves, **options)


SOURCE = np.arange(1, 1 + 8192, dtype=np.uint32)


# -- copies and vmcnt ---------------------------------------------------------------------------------------------------------------


def test_a_copy_read_without_a_wait_shows_the_old_bytes() -> None:
    k = Kernel()
    k.copy(0, 100, line=10)
    k.out(k.load(0, line=11))
    k.wait(vm=0)
    out, report = k.run(waves=1, expect="wait")
    finding = only(report)
    assert (finding.line, finding.other_line, finding.wave, finding.other_wave) == (11, 10, 0, 0)
    assert "own copy" in finding.message and finding.count == 64
    assert (out[0, :64] == 0xFFFFFFFF).all()


def test_a_copy_over_stored_bytes_shows_the_stored_ones_until_the_wait() -> None:
    k = Kernel()
    k.store(0, "%lane", line=9)
    k.copy(0, 100, line=10)
    k.out(k.load(0, line=11))
    k.wait(vm=0)
    k.out(k.load(0, line=12))
    out, report = k.run(waves=1, expect="wait")
    assert only(report).line == 11
    np.testing.assert_array_equal(out[0, :64], np.arange(64))
    np.testing.assert_array_equal(out[1, :64], SOURCE[100:164])


OPERATIONS = {"copy": 1, "load": 1, "store": 1, "load32": 2, "buffer": 1}  # vector-memory instructions each makes


def issue(k: Kernel, kinds: list[str]) -> list[tuple[int, int]]:
    """Issue operations; returns (LDS offset, operations after it) of every copy."""
    copies: list[list[int]] = []
    for i, kind in enumerate(kinds):
        for c in copies:
            c[1] += OPERATIONS[kind]
        if kind == "copy":
            k.copy(256 * len(copies), 64 * i, line=10 + len(copies))
            copies.append([256 * len(copies), 0])
        elif kind == "load":
            k.global_load()
        elif kind == "load32":
            k.global_load(t="vector<8xi32>")
        elif kind == "store":
            k.out("%tid")
        else:
            zero16, zero32, records = k.constant(0, "i16"), k.constant(0), k.constant(4096, "i64")
            rsrc = k.define(f"rocdl.make.buffer.rsrc %in, {zero16}, {records}, {zero32} : !llvm.ptr<1> to <8>")
            k.define(f"rocdl.raw.ptr.buffer.load {rsrc}, {zero32}, {zero32}, 0 : i32")
    return [(c[0], c[1]) for c in copies]


@pytest.mark.parametrize("kinds", [
    ["copy"], ["copy", "copy", "copy"], ["copy", "load", "copy", "store"], ["load", "copy", "load", "load", "copy", "store", "store"],
    ["copy", "load32", "copy", "load32"], ["copy", "buffer", "store", "copy", "buffer"], ["store", "load", "copy"],
], ids=" ".join)  # fmt: skip
def test_vmcnt_counts_every_vector_memory_operation_in_order(kinds: list[str]) -> None:
    """For every count: a copy has landed if at most that many operations came after it, register loads and stores included."""
    for n in range(sum(OPERATIONS[kind] for kind in kinds) + 1):
        k = Kernel()
        copies = issue(k, kinds)
        k.wait(vm=n)
        first = k.outputs
        for i, (offset, _) in enumerate(copies):
            k.out(k.load(offset, line=50 + i))
        k.wait(vm=0)
        landed = [after >= n for _, after in copies]
        out, report = k.run(waves=1, expect="" if all(landed) else "wait")
        assert sorted(f.line for f in report.findings) == [50 + i for i, good in enumerate(landed) if not good], n
        sources = [64 * i for i, kind in enumerate(kinds) if kind == "copy"]
        for i, good in enumerate(landed):
            want = SOURCE[sources[i] : sources[i] + 64] if good else np.full(64, 0xFFFFFFFF)
            np.testing.assert_array_equal(out[first + i, :64], want, err_msg=f"vmcnt({n}), copy {i}")


def test_vmcnt_one_too_high_is_found_and_one_too_low_is_not() -> None:
    """The pipeline's arithmetic: three tiles of two copies in flight, wait for the oldest tile."""
    for n, good in ((3, True), (4, True), (5, False)):
        k = Kernel()
        issue(k, ["copy"] * 6)
        k.wait(vm=n)
        k.barrier()
        k.out(k.load(0, line=50))
        k.out(k.load(256, line=51))
        k.wait(vm=0)
        _, report = k.run(waves=1, expect="" if good else "wait")
        assert [f.line for f in report.findings] == ([] if good else [51])


@pytest.mark.parametrize("n", [0, 1, 2, 14, 15, 16, 17, 30, 31, 32, 33, 47, 48, 49, 62, 63])
def test_vmcnt_field_of_s_waitcnt(n: int) -> None:
    """All six bits. 63, the field's largest value, waits for nothing."""
    k = Kernel()
    issue(k, ["copy"] * 56)
    k.wait(vm=n)
    marks = [i for i in (0, 1, 6, 7, 8, 22, 23, 24, 38, 39, 40, 53, 54, 55) if i < 56]
    for i in marks:
        k.out(k.load(256 * i, line=100 + i))
    k.wait(vm=0)
    _, report = k.run(waves=1, expect=None)
    assert {f.line for f in report.findings} == {100 + i for i in marks if n == 63 or 55 - i < n}
    assert {f.kind for f in report.findings} <= {"wait"}


def test_other_fields_of_s_waitcnt_do_not_wait_for_copies() -> None:
    for bits in (waitcnt(63, 0, 0), waitcnt(63, 15, 0), waitcnt(63, 0, 7)):
        k = Kernel()
        k.copy(0, 0, line=10)
        k.add(f"rocdl.s.waitcnt {bits}")
        k.out(k.load(0, line=11))
        k.wait(vm=0)
        assert only(k.run(waves=1, expect="wait")[1]).line == 11
    k = Kernel()
    k.copy(0, 0, line=10)
    k.add(f"rocdl.s.waitcnt {waitcnt(0, 15, 7)}")
    k.out(k.load(0, line=11))
    k.run(waves=1)


@pytest.mark.parametrize("fence", ["release", "acq_rel", "seq_cst", "acquire"])
def test_fences_and_barriers_do_not_wait_for_copies(fence: str) -> None:
    """LLVM's fences order the program's own accesses; a copy that a counter covers is the kernel's to wait for."""
    k = Kernel()
    k.copy(0, 0, line=10)
    k.add(f'llvm.fence syncscope("workgroup") {fence}')
    k.add("rocdl.barrier")
    k.out(k.load(0, line=11))
    k.wait(vm=0)
    assert only(k.run(waves=1, expect="wait")[1]).line == 11


def test_a_copy_that_nothing_waits_for_is_found_at_the_end() -> None:
    k = Kernel()
    k.copy(0, 0, line=10)
    finding = only(k.run(waves=1, expect="wait")[1])
    assert "nothing waited" in finding.message and finding.line == 10


def test_the_counter_holds_sixty_three() -> None:
    """With more copies than vmcnt can count, an issue waits for the oldest (VM_CNT's range, 0 to 63; that the issue stalls at its end is the
    simulator's reading: the documents at hand do not spell it out)."""
    k = Kernel()
    issue(k, ["copy"] * 64)
    k.out(k.load(0, line=50))
    k.out(k.load(256, line=51))
    k.wait(vm=0)
    assert [f.line for f in k.run(waves=1, expect="wait")[1].findings] == [51]


def test_early_completion_lands_copies_at_once() -> None:
    k = Kernel()
    k.copy(0, 100, line=10)
    k.out(k.load(0, line=11))
    k.wait(vm=0)
    out, _ = k.run(waves=1, completion="early")
    np.testing.assert_array_equal(out[0, :64], SOURCE[100:164])


def pipelined(stages: int, steps: int) -> Kernel:
    """A correct two-wave pipeline: each wave copies half a tile, waits, passes a barrier, reads the other's half."""
    k = Kernel()

    def fetch(step: int) -> None:
        for half in range(2):
            with k.wave(half):
                k.copy(512 * (step % stages) + 256 * half, 128 * step + 64 * half, line=20)

    for step in range(stages - 1):
        fetch(step)
    total = k.constant(0)
    other = k.define(f"llvm.xor %wave, {k.constant(1)} : i32")
    place = k.define(f"llvm.mul {other}, {k.constant(64)} : i32")
    place = k.define(f"llvm.add {place}, %lane : i32")
    for step in range(steps):
        k.wait(vm=min(stages - 2, steps - 1 - step))
        k.barrier()
        if step + stages - 1 < steps:
            fetch(step + stages - 1)
        value = k.load(512 * (step % stages), line=30, by=place)
        total = k.define(f"llvm.mul {total}, {k.constant(3)} : i32")
        total = k.define(f"llvm.add {total}, {value} : i32")
    k.out(total)
    return k


@pytest.mark.parametrize("completion", ["late", "early"])
@schedules
def test_a_correct_pipeline_gives_the_same_values_in_any_order(completion: str, schedule: str) -> None:
    out, _ = pipelined(3, 7).run(completion=completion, schedule=schedule)
    want = np.zeros(128, np.uint32)
    for step in range(7):
        tile = SOURCE[128 * step : 128 * step + 128]
        want = want * np.uint32(3) + np.concatenate([tile[64:], tile[:64]])
    np.testing.assert_array_equal(out[0, :128], want)


# -- LDS stores, lgkmcnt, fences ------------------------------------------------------------------------------------------------------

COMPLETE = {
    "lgkmcnt(0)": f"rocdl.s.waitcnt {waitcnt(63, 0)}",
    "release fence": 'llvm.fence syncscope("workgroup") release',
    "acq_rel fence": 'llvm.fence syncscope("workgroup") acq_rel',
    "seq_cst fence": 'llvm.fence syncscope("workgroup") seq_cst',
}
NOT_COMPLETE = {
    "nothing": "",
    "vmcnt(0)": f"rocdl.s.waitcnt {waitcnt(0, 15)}",
    "acquire fence": 'llvm.fence syncscope("workgroup") acquire',
    "lgkmcnt(1)": f"rocdl.s.waitcnt {waitcnt(63, 1)}",
}


@schedules
@pytest.mark.parametrize("between", [*COMPLETE, *NOT_COMPLETE])
def test_a_store_is_visible_after_its_completion_and_a_barrier(between: str, schedule: str) -> None:
    k = Kernel()
    with k.wave(0):
        k.store(0, "%tid", line=10)
        if text := {**COMPLETE, **NOT_COMPLETE}[between]:
            k.add(text)
    k.barrier()
    with k.wave(1):
        k.out(k.load(0, line=11))
    good = between in COMPLETE
    out, report = k.run(schedule=schedule, expect="" if good else "race")
    if good:
        np.testing.assert_array_equal(out[0, 64:128], np.arange(64))
    else:
        finding = only(report)
        assert (finding.line, finding.other_line, finding.wave, finding.other_wave) == (11, 10, 1, 0)


def test_rocdl_barrier_completes_stores() -> None:
    """gpu.barrier becomes rocdl.barrier: fence, s_barrier, fence (mlir ROCDLOps.td)."""
    k = Kernel()
    with k.wave(0):
        k.store(0, "%tid", line=10)
    k.add("rocdl.barrier")
    with k.wave(1):
        k.out(k.load(0, line=11))
    k.run()


@pytest.mark.parametrize("n", range(4))
def test_lgkmcnt_completes_lds_operations_in_order(n: int) -> None:
    k = Kernel()
    with k.wave(0):
        for i in range(3):
            k.store(256 * i, "%tid", line=10 + i)
        k.wait(lgkm=n)
    k.barrier()
    with k.wave(1):
        for i in range(3):
            k.out(k.load(256 * i, line=20 + i))
    _, report = k.run(expect=None)
    assert [f.line for f in report.findings] == [20 + i for i in range(3) if 2 - i < n]


@pytest.mark.parametrize("use", [True, False])
def test_using_a_later_reads_result_completes_earlier_stores(use: bool) -> None:
    """LDS operations of a wave return in order, so the wait that the compiler puts before the use of a read covers the stores before it."""
    k = Kernel()
    k.store(1024, "%tid", line=5, by="%tid")
    with k.wave(0):
        k.store(0, "%tid", line=10)
        value = k.load(1024, line=6, by="%tid")
        if use:
            k.out(value)
    k.barrier()
    with k.wave(1):
        k.out(k.load(0, line=11))
    _, report = k.run(expect="" if use else "race")
    assert [f.line for f in report.findings] == ([] if use else [11])


def test_a_wait_after_the_barrier_is_too_late() -> None:
    k = Kernel()
    with k.wave(0):
        k.store(0, "%tid", line=10)
    k.barrier()
    k.wait(lgkm=0)
    with k.wave(1):
        k.out(k.load(0, line=11))
    assert only(k.run(expect="race")[1]).line == 11


def test_lgkmcnt_field_of_s_waitcnt() -> None:
    for n in (0, 1, 7, 8, 14, 15):
        k = Kernel()
        with k.wave(0):
            for i in range(16):
                k.store(256 * i, "%tid", line=10)
            k.wait(lgkm=n)
        k.barrier()
        with k.wave(1):
            for i in range(16):
                k.out(k.load(256 * i, line=20 + i))
        _, report = k.run(expect=None)
        assert {f.line for f in report.findings} == {20 + i for i in range(16) if n == 15 or 15 - i < n}, n


# -- races ------------------------------------------------------------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize(("first", "second"), [("store", "load"), ("load", "store"), ("store", "store"), ("copy", "load"), ("load", "copy"),
                                              ("copy", "copy"), ("copy", "store"), ("store", "copy"), ("load", "load")])  # fmt: skip
def test_a_missing_barrier_is_a_race_in_any_order(first: str, second: str, schedule: str) -> None:
    """Whichever wave runs first: one finding or more, on one of the two lines, naming the other. Two reads are no race."""

    def build(barrier: bool) -> Kernel:
        k = Kernel()
        with k.wave(0):
            k.store(0, "%tid", line=5)
            k.wait(lgkm=0)
        k.barrier()
        for wave, kind in ((0, first), (1, second)):
            with k.wave(wave):
                if kind == "store":
                    k.store(0, "%tid", line=10 + wave)
                elif kind == "copy":
                    k.copy(0, 0, line=10 + wave)
                else:
                    k.out(k.load(0, line=10 + wave))
                k.wait(vm=0, lgkm=0)
            if barrier and wave == 0:
                k.barrier()
        return k

    _, report = build(barrier=False).run(schedule=schedule, expect=None)
    if first == second == "load":
        assert not report.findings
    else:
        assert report.findings and all(
            {f.line, f.other_line} == {10, 11} and f.wave != f.other_wave for f in report.findings
        ), report
        kinds = {f.kind for f in report.findings}
        assert kinds == {"race"} or ("copy" in (first, second) and kinds <= {"race", "wait"})
    build(barrier=True).run(schedule=schedule)


@schedules
def test_a_copy_needs_its_own_waves_wait_before_the_barrier(schedule: str) -> None:
    for where in ("before, own wave", "before, other wave", "after, own wave"):
        k = Kernel()
        with k.wave(0):
            k.copy(0, 100, line=10)
            if where == "before, own wave":
                k.wait(vm=0)
        with k.wave(1):
            if where == "before, other wave":
                k.wait(vm=0)
        k.barrier()
        with k.wave(0):
            k.wait(vm=0)
        with k.wave(1):
            k.out(k.load(0, line=11))
        good = where == "before, own wave"
        out, report = k.run(schedule=schedule, expect=None)
        if good:
            assert not report.findings, report
            np.testing.assert_array_equal(out[0, 64:128], SOURCE[100:164])
        else:
            assert {f.kind for f in report.findings} <= {"race", "wait"}
            assert report.findings and all((f.line, f.other_line) == (11, 10) for f in report.findings), report


@schedules
@pytest.mark.parametrize("returned", ["never", "wait", "use", "fence"])
def test_a_read_still_out_at_the_barrier_conflicts_with_a_write_after_it(returned: str, schedule: str) -> None:
    """s_barrier does not wait for the wave's own reads; a wait or a use of the result before it does."""
    k = Kernel()
    with k.wave(0):
        k.store(0, "%tid", line=5)
        k.wait(lgkm=0)
    k.barrier()
    value = k.load(0, line=10)
    if returned == "wait":
        k.wait(lgkm=0)
    elif returned == "use":
        k.out(value)
    elif returned == "fence":
        k.add('llvm.fence syncscope("workgroup") release')
    k.barrier()
    with k.wave(0):
        k.store(0, "%lane", line=11)
    k.out(value)
    _, report = k.run(schedule=schedule, expect="race" if returned == "never" else "")
    if returned == "never":
        finding = only(report)
        assert (finding.line, finding.other_line) == (11, 10) and "may still be reading" in finding.message


def bytes_kernel(actions: list[tuple[int, str, int]]) -> Kernel:
    """(wave, store or load, byte) of one dword a lane, without barriers; the dword is written before."""
    k = Kernel()
    with k.wave(0):
        k.store(0, "%tid", line=5)
        k.wait(lgkm=0)
    k.barrier()
    four = k.define(f"llvm.shl %lane, {k.constant(2)} : i32")
    byte = k.constant(7, "i8")
    for i, (wave, action, at) in enumerate(actions):
        with k.wave(wave):
            if action == "store":
                k.store(at, byte, line=10 + i, by=four, t="i8")
            else:
                loaded = k.load(at, line=10 + i, by=four, t="i8")
                k.out(k.define(f"llvm.zext {loaded} : i8 to i32"))
    return k


@schedules
@pytest.mark.parametrize(("actions", "race"), [
    ([(0, "store", 0), (1, "store", 1)], False),
    ([(0, "store", 0), (1, "load", 1)], False),
    ([(0, "load", 0), (1, "store", 1)], False),
    ([(0, "load", 2), (1, "store", 1), (2, "store", 3), (0, "store", 2)], False),
    ([(0, "store", 0), (1, "load", 0)], True),
    ([(0, "load", 3), (1, "store", 3)], True),
    ([(0, "store", 0), (1, "store", 1), (2, "load", 0)], True),
    ([(0, "store", 0), (1, "store", 1), (2, "store", 0)], True),
    ([(0, "load", 0), (1, "load", 1), (2, "store", 0)], True),
    ([(0, "load", 0), (1, "load", 1), (0, "store", 0)], False),
    ([(0, "store", 0), (1, "store", 1), (0, "load", 0), (1, "load", 1)], False),
], ids=lambda v: " ".join(f"{w}{a[0]}{b}" for w, a, b in v) if isinstance(v, list) else "")  # fmt: skip
def test_bytes_of_one_dword_are_apart(actions: list[tuple[int, str, int]], race: bool, schedule: str) -> None:
    """Waves may share a dword if they keep to their own bytes; the same byte is a race whoever else touched the dword."""
    _, report = bytes_kernel(actions).run(waves=3, schedule=schedule, expect="race" if race else "")
    assert bool(report.findings) == race


@pytest.mark.parametrize("seed", range(4))
def test_random_byte_accesses_against_a_plain_race_check(seed: int) -> None:
    """Random stores and loads of the four bytes by three waves, one interval: a race is reported exactly if two waves touch a byte and one of
    them stores."""
    rng = np.random.default_rng(seed)
    for _ in range(12):
        actions = [
            (int(rng.integers(3)), str(rng.choice(["store", "load"])), int(rng.integers(4)))
            for _ in range(rng.integers(2, 7))
        ]
        race = any(
            a[0] != b[0] and a[2] == b[2] and "store" in (a[1], b[1]) for a, b in itertools.combinations(actions, 2)
        )
        _, report = bytes_kernel(actions).run(waves=3, schedule=f"random:{seed + 2}", expect=None)
        assert bool(report.findings) == race, (actions, report)


# -- initialisation, barriers -------------------------------------------------------------------------------------------------------------


def test_reading_lds_that_nothing_wrote_is_found() -> None:
    k = Kernel()
    half = k.define(f'llvm.icmp "ult" %lane, {k.constant(32)} : i32')
    with k.when(half):
        k.store(0, "%tid", line=10)
    k.out(k.load(0, line=11))
    out, report = k.run(waves=1, expect="init")
    finding = only(report)
    assert (finding.line, finding.lane, finding.address, finding.count) == (11, 32, 128, 32)
    np.testing.assert_array_equal(out[0, :64], np.where(np.arange(64) < 32, np.arange(64), 0xFFFFFFFF))


def test_one_uninitialised_byte_is_enough() -> None:
    k = Kernel()
    three = k.constant(0x010203, "i32")
    four = k.define(f"llvm.shl %lane, {k.constant(2)} : i32")
    for byte in range(3):
        shifted = k.define(f"llvm.lshr {three}, {k.constant(8 * byte)} : i32")
        k.store(byte, k.define(f"llvm.trunc {shifted} : i32 to i8"), line=10, by=four, t="i8")
    k.out(k.load(0, line=11))
    out, report = k.run(waves=1, expect="init")
    assert only(report).line == 11
    assert (out[0, :64] == 0xFF010203).all()


def test_lds_starts_anew_in_every_workgroup() -> None:
    k = Kernel()
    group = k.define("rocdl.workgroup.id.x : i32")
    with k.when(k.define(f'llvm.icmp "eq" {group}, {k.constant(0)} : i32')):
        k.store(0, "%tid", line=10)
        k.wait(lgkm=0)
    k.out(k.load(0, line=11))
    finding = only(k.run(waves=1, grid=2, expect="init")[1])
    assert finding.workgroup == 1 and finding.count == 64


@schedules
def test_a_barrier_in_divergent_code_is_found(schedule: str) -> None:
    k = Kernel()
    with k.when(k.define(f'llvm.icmp "ult" %lane, {k.constant(9)} : i32')):
        k.barrier(line=10)
    findings = k.run(waves=1, schedule=schedule, expect="barrier")[1].findings
    assert findings[0].line == 10 and "only some lanes" in findings[0].message


@schedules
def test_waves_that_end_while_others_wait_are_found(schedule: str) -> None:
    k = Kernel()
    with k.wave(0):
        k.barrier(line=10)
    finding = only(k.run(schedule=schedule, expect="barrier")[1])
    assert finding.line == 10 and "after others have ended" in finding.message and finding.wave == 0


def test_waves_at_different_barriers_meet() -> None:
    """The hardware counts arrivals and knows no names: waves that wait at two different s_barriers release each other."""
    k = Kernel()
    with k.wave(0):
        k.barrier(line=10)
    with k.wave(1):
        k.barrier(line=11)
    k.run()


@pytest.mark.parametrize("kind", ["memory", "init", "race", "wait", "barrier"])
def test_a_check_switched_off_is_silent(kind: str) -> None:
    k = Kernel()
    if kind == "memory":
        k.out(k.load(20000, line=10))
    elif kind == "init":
        k.out(k.load(0, line=10))
    elif kind == "race":
        with k.wave(0):
            k.store(0, "%tid", line=10)
        with k.wave(1):
            k.store(0, "%tid", line=11)
    elif kind == "wait":
        k.copy(0, 0, line=10)
    else:
        with k.wave(0):
            k.barrier(line=10)
    every = ("memory", "init", "race", "wait", "barrier")
    waves = 1 if kind == "wait" else 2
    k.run(waves=waves, expect=kind)
    k.run(waves=waves, checks=tuple(c for c in every if c != kind), expect="")
    k.run(waves=waves, checks=(kind,), expect=kind)


def test_findings_are_counted_once_a_line_and_name_their_first_place() -> None:
    k = Kernel()
    k.out(k.load(0, line=10))
    k.out(k.load(256, line=11))
    k.out(k.load(512, line=10))
    _, report = k.run(waves=2, grid=5, threads=2, expect="init")
    assert sorted((f.line, f.count) for f in report.findings) == [(10, 2 * 64 * 2 * 5), (11, 64 * 2 * 5)]
    assert all(f.file == "kernel.py" and f.kernel == "k" and f.lane == 0 for f in report.findings)
    assert "kernel.py:11: init:" in str(report)


def test_unknown_operations_name_themselves_and_their_line() -> None:
    with pytest.raises(UnknownOperation, match=r"kernel\.py:12: .*gfx942.*llvm\.intr\.stacksave"):
        lower('  %s = llvm.intr.stacksave : !llvm.ptr<5> loc("kernel.py":12:5)', arch="gfx942")


def test_scheduling_hints_change_nothing() -> None:
    k = Kernel()
    k.copy(0, 0, line=10)
    for text in (
        "rocdl.sched.barrier none",
        "rocdl.sched.group.barrier ds_read, 1, 0",
        "rocdl.s.setprio 1",
        "rocdl.s.sleep 1",
        "rocdl.iglp.opt 0",
    ):
        k.add(text)
    k.wait(vm=0)
    k.out(k.load(0, line=11))
    out, _ = k.run(waves=1)
    np.testing.assert_array_equal(out[0, :64], SOURCE[:64])


def test_counters() -> None:
    k = Kernel()
    k.copy(0, 0, line=1)
    k.wait(vm=0)
    k.barrier()
    value = k.load(0, line=1)
    k.store(4096, value, line=1)
    k.global_load()
    k.out(value)
    _, report = k.run(waves=1, grid=6)
    counters = report.launches[0].counters
    lanes = 64 * 6
    assert counters["copy_to_lds_bytes"] == counters["lds_read_bytes"] == counters["lds_write_bytes"] == 4 * lanes
    assert counters["global_read_bytes"] == counters["global_write_bytes"] == 4 * lanes
    assert counters["barriers"] == counters["waits"] == 6


@pytest.mark.parametrize(("options", "text"), [
    ({"checks": ("rases",)}, "rases"), ({"completion": "now"}, "completion"), ({"schedule": "backwards"}, "schedule"),
    ({"schedule": "random:x"}, "schedule"), ({"threads": 0}, "threads"), ({"workgroups": range(3, 1, -1)}, "workgroups"),
    ({"workgroups": range(2)}, "workgroups"), ({"block": 1088}, "1 to 1024"), ({"block": 0}, "1 to 1024"), ({"dynamic_lds": 200 << 10}, "LDS"),
])  # fmt: skip
def test_bad_options_raise(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launch(lower("  %tid = rocdl.workitem.id.x : i32"), **options)
