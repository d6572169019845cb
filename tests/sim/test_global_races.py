"""Races through global memory in which a store meets a load: found whatever the order, and only where they are; memory mapped read-only."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import launch, lower, needs_rights, only, wave  # tests/sim/machine.py
from machine import on as on_arch

from fourwave import sim

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
schedules = pytest.mark.parametrize("schedule", ["forward", "reverse", "random:5"])
archs = pytest.mark.parametrize("arch", sim.ARCHS)

SPLIT_BARRIER = "\n  rocdl.s.barrier.signal id = -1\n  rocdl.s.barrier.wait id = -1\n"


def barrier(arch: str) -> str:
    return SPLIT_BARRIER if arch == "gfx1250" else "\n  rocdl.s.barrier\n"


def prologue(lanes: int) -> str:
    return f"""
  %tid = rocdl.workitem.id.x : i32
  %g = rocdl.workgroup.id.x : i32
  %block = llvm.mlir.constant({lanes} : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %before = llvm.mul %g, %block : i32
  %i = llvm.add %before, %tid : i32
  %next = llvm.add %i, %one : i32
  %from = llvm.getelementptr %x[%next] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, TYPE
  %to = llvm.getelementptr %y[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, TYPE
"""


def shift(arch: str, waves: int, between: str = "", t: str = "i32", load: str = "", lds: int = 0):
    """y[i] = x[i + 1]"""
    with on_arch(arch):
        load = load or "  %v = llvm.load %from : !llvm.ptr<1> -> TYPE\n"
        body = prologue(waves * wave()) + load + between + "  llvm.store %v, %to : TYPE, !llvm.ptr<1>"
        return lower(body.replace("TYPE", t), "%x: !llvm.ptr<1>, %y: !llvm.ptr<1>", lds=lds), waves * wave()


OF_WAVES = {
    "writes global memory that another wave of the workgroup read with no barrier in between",
    "reads global memory that another wave of the workgroup wrote with no barrier in between",
}
OF_GROUPS = {
    "writes global memory that another workgroup read in this launch, with no atomic or ordered access before",
    "reads global memory that another workgroup wrote in this launch, with no atomic or ordered access before",
}


@archs
@schedules
@pytest.mark.parametrize("t", ["i8", "i16", "i32", "vector<4xi32>"])
def test_a_shift_in_place_within_a_workgroup(arch: str, schedule: str, t: str) -> None:
    size = {"i8": 1, "i16": 2, "i32": 4}.get(t, 16)
    program, block = shift(arch, 2, t=t)
    y = np.arange((block + 1) * size, dtype=np.uint8)
    finding = only(launch(program, y, y, block=block, expect="global", schedule=schedule))
    # wave 1's first lane stores what wave 0's last one loads
    assert finding.message in OF_WAVES and {finding.wave, finding.other_wave} == {0, 1}
    assert finding.count == (4 if t == "vector<4xi32>" and "reads" in finding.message else 1)
    assert finding.address == y.ctypes.data + block // 2 * size

    program, block = shift(arch, 2, barrier(arch), t=t)  # all have loaded before any stores
    before = y.copy()
    launch(program, y, y, block=block, schedule=schedule)
    np.testing.assert_array_equal(y[: block * size].reshape(-1, size), before.reshape(-1, size)[1:])
    program, block = shift(arch, 2, t=t)  # into another array
    launch(program, y, np.empty_like(y), block=block, schedule=schedule)


@archs
@schedules
@pytest.mark.parametrize("threads", [1, 2])
def test_a_shift_in_place_between_workgroups(arch: str, schedule: str, threads: int) -> None:
    program, block = shift(arch, 2, barrier(arch))
    y = np.arange(3 * block + 1, dtype=np.uint32)
    report = launch(program, y, y, block=block, grid=3, expect="global", schedule=schedule, threads=threads)
    assert {f.message for f in report.findings} <= OF_GROUPS
    # at the two seams; workgroups that run at the same time may both see it
    assert sum(f.count for f in report.findings) in ([2] if threads == 1 else [2, 3, 4]), report
    out = np.zeros_like(y)
    launch(program, y, out, block=block, grid=3, schedule=schedule, threads=threads)
    launch(program, y, y, block=block, grid=3, schedule=schedule, checks=("memory", "race"))


@archs
def test_no_race_is_lost_between_host_threads(arch: str) -> None:
    """Workgroups on two host threads read and write the same elements at the same time: each race is seen, by one of the two at least."""
    groups, elements = 64, 16
    body = "  %tid = rocdl.workitem.id.x : i32\n"
    with on_arch(arch):
        lanes = wave()
        for n in range(elements):
            body += f"""
  %start{n} = llvm.mlir.constant({n * lanes} : i32) : i32
  %i{n} = llvm.add %start{n}, %tid : i32
  %p{n} = llvm.getelementptr %x[%i{n}] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %v{n} = llvm.load %p{n} : !llvm.ptr<1> -> i32
  llvm.store %v{n}, %p{n} : i32, !llvm.ptr<1>
"""
        program = lower(body, "%x: !llvm.ptr<1>")
    x = np.zeros(elements * lanes, dtype=np.uint32)
    for _ in range(20):
        report = launch(program, x, block=lanes, grid=groups, expect="global", threads=2)
        counts = {
            m: sum(f.count for f in report.findings if f.message == m) for m in {f.message for f in report.findings}
        }
        read_and_written = sum(counts.pop(m, 0) for m in OF_GROUPS)
        # Every store but an element's first finds another workgroup's.
        assert counts == {"writes global memory that another workgroup wrote in this launch": (groups - 1) * x.size}
        # Were all loads before all stores, each store would find one: that is the least.
        assert groups * x.size <= read_and_written <= 2 * groups * x.size


def test_the_address_is_that_of_the_element() -> None:
    program, block = shift("gfx950", 1)
    y = np.arange(2 * block + 1, dtype=np.uint32)
    finding = only(launch(program, y, y, block=block, grid=2, expect="global"))
    assert (finding.workgroup, finding.wave, finding.lane) == (1, 0, 0)
    assert finding.address == y.ctypes.data + 4 * block


RSRC = """
  %stride = llvm.mlir.constant(0 : i16) : i16
  %flags = llvm.mlir.constant(159744 : i32) : i32
  %four = llvm.mlir.constant(4 : i32) : i32
  %offset = llvm.mul %next, %four : i32
  %records = llvm.mlir.constant(4096 : i64) : i64
  %rsrc = rocdl.make.buffer.rsrc %x, %stride, %records, %flags : !llvm.ptr<1> to <8>
"""
LDS = """
  %all = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %lds = llvm.getelementptr %all[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
"""
LOADS = {
    "buffer": (sim.ARCHS, RSRC + "  %v = rocdl.raw.ptr.buffer.load %rsrc, %offset, %zero, 0 : i32\n"),
    "buffer to LDS": (
        ("gfx942", "gfx950"),
        RSRC + LDS.replace("%all[%tid]", "%all[%zero]")
        + "  rocdl.raw.ptr.buffer.load.lds %rsrc, %lds, %four, %offset, %zero, %zero, 0\n  rocdl.s.waitcnt 0\n  %v = llvm.add %i, %one : i32\n",
    ),
    "global to LDS": (
        ("gfx942", "gfx950"),
        LDS.replace("%all[%tid]", "%all[%zero]")
        + "  rocdl.global.load.lds %from, %lds, 4, 0, 0\n  rocdl.s.waitcnt 0\n  %v = llvm.add %i, %one : i32\n",
    ),
    "async to LDS": (
        ("gfx1250",),
        LDS
        + "  rocdl.global.load.async.to.lds.b32 %from, %lds, 0, 0 : !llvm.ptr<1>, !llvm.ptr<3>\n  rocdl.s.wait.asynccnt 0\n  %v = llvm.add %i, %one : i32\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "arch"), [(kind, arch) for kind, (its, _) in LOADS.items() for arch in its])
def test_every_kind_of_load_is_a_reader(kind: str, arch: str) -> None:
    program, block = shift(arch, 1, load=LOADS[kind][1], lds=1024)
    y = np.arange(1, 1025, dtype=np.uint32)
    report = launch(program, y, y, block=block, grid=2, expect="global")
    assert {f.message for f in report.findings} <= OF_GROUPS and report.findings[0].address == y.ctypes.data + 4 * block
    launch(program, y, np.empty_like(y), block=block, grid=2)


@schedules
def test_a_waves_own_update_and_an_ordered_handover_are_no_races(schedule: str) -> None:
    """y[i] += 1, three times; then workgroups that take a ticket each, the last of which overwrites what all have read."""
    own = """
  %p = llvm.getelementptr %y[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32"""
    for n in range(3):
        own += f"""
  %v{n} = llvm.load %p : !llvm.ptr<1> -> i32
  %w{n} = llvm.add %v{n}, %one : i32
  llvm.store %w{n}, %p : i32, !llvm.ptr<1>"""
    y = np.zeros(512, np.uint32)
    program = lower((prologue(128) + own).replace("TYPE", "i32"), "%x: !llvm.ptr<1>, %y: !llvm.ptr<1>")
    launch(program, y, y, block=128, grid=3, schedule=schedule)
    assert y.tolist() == [3] * 384 + [0] * 128

    last = """
  %v = llvm.load %x : !llvm.ptr<1> -> i32
  llvm.store %v, %to : i32, !llvm.ptr<1>
  %ticket = llvm.atomicrmw add %n, %one acq_rel : !llvm.ptr<1>, i32
  %three = llvm.mlir.constant(3 : i32) : i32
  %is = llvm.icmp "eq" %ticket, %three : i32
  llvm.cond_br %is, ^reset, ^end
^reset:
  llvm.store %one, %x : i32, !llvm.ptr<1>
  llvm.br ^end
^end:
"""
    x, tickets, y = np.full(1, 7, np.uint32), np.zeros(1, np.uint32), np.zeros(5, np.uint32)
    arguments = "%x: !llvm.ptr<1>, %y: !llvm.ptr<1>, %n: !llvm.ptr<1>"
    program = lower((prologue(1) + last).replace("TYPE", "i32"), arguments)
    launch(program, x, y, tickets, block=1, grid=4, schedule=schedule)
    assert (y.tolist(), x[0]) == ([7, 7, 7, 7, 0], 1)
    program = lower((prologue(1) + last.replace("acq_rel", "monotonic").replace("%ticket = llvm.atomicrmw add %n, %one monotonic", "%ticket = llvm.load %n")
                     .replace("load %n : !llvm.ptr<1>, i32", "load %n : !llvm.ptr<1> -> i32")
                     .replace("(3 : i32)", "(0 : i32)")).replace("TYPE", "i32"), arguments)  # fmt: skip
    tickets[:] = 0
    launch(program, x, y, tickets, block=1, grid=4, schedule=schedule, expect="global")


def actions_kernel(actions: list[tuple[int, int, str, int, int]], waves: int) -> str:
    """(workgroup, wave, load, store or barrier, first byte, bytes); the first lane of a wave does them."""
    text = "\n  %tid = rocdl.workitem.id.x : i32\n  %g = rocdl.workgroup.id.x : i32\n  %out = llvm.mlir.constant(0 : i32) : i32\n"
    text += f"  %waves = llvm.mlir.constant({64 * waves} : i32) : i32\n  %first = llvm.mul %g, %waves : i32\n  %me = llvm.add %first, %tid : i32\n"
    for n, (group, wave_, what, at, size) in enumerate(actions):
        if what == "barrier":
            text += "  rocdl.s.barrier\n"
            continue
        t = {1: "i8", 2: "i16", 4: "i32"}.get(size, f"vector<{size // 4}xi32>")
        value = f"dense<7> : {t}" if size > 4 else f"7 : {t}"
        text += f"""  %c{n} = llvm.mlir.constant({64 * (waves * group + wave_)} : i32) : i32
  %is{n} = llvm.icmp "eq" %me, %c{n} : i32
  llvm.cond_br %is{n}, ^do{n}, ^after{n}
^do{n}:
  %p{n} = llvm.getelementptr %x[{at}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8
"""
        if what == "load":
            text += f"  %v{n} = llvm.load volatile %p{n} {{alignment = 1 : i64}} : !llvm.ptr<1> -> {t}\n"
        else:
            text += f"  %v{n} = llvm.mlir.constant({value}) : {t}\n  llvm.store %v{n}, %p{n} {{alignment = 1 : i64}} : {t}, !llvm.ptr<1>\n"
        text += f"  llvm.br ^after{n}\n^after{n}:\n"
    return text


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_accesses_against_a_plain_race_check(groups: int, seed: int) -> None:
    """Loads of 1 to 16 bytes and stores of 4 to 16 at any address by three waves: a race is reported exactly if two touch a byte, one of them
    stores, and they are of two workgroups or of two waves in one interval between barriers."""
    rng = np.random.default_rng([seed, groups])
    counts = {True: 0, False: 0}
    for _ in range(16):
        actions = []
        for _ in range(rng.integers(2, 8)):
            what = str(rng.choice(["load", "load", "store", "barrier"], p=[0.35, 0.2, 0.25, 0.2]))
            size = int(rng.choice([4, 8, 16] if what == "store" else [1, 2, 4, 8, 12, 16]))
            at = int(rng.integers(12)) * 4 + (int(rng.integers(4)) // size * size if what == "load" else 0)
            actions.append((int(rng.integers(groups)), int(rng.integers(3)), what, at, size))
        interval, placed = 0, []
        for group, wave_, what, at, size in actions:
            interval += what == "barrier"
            if what != "barrier":
                placed.append((group, wave_, what, at, at + size, interval))
        race = any(
            "store" in (a[2], b[2]) and a[3] < b[4] and b[3] < a[4]
            and (a[0] != b[0] or (a[1] != b[1] and a[5] == b[5]))
            for a, b in itertools.combinations(placed, 2)
        )  # fmt: skip
        program = lower(actions_kernel(actions, 3), "%x: !llvm.ptr<1>")
        x = np.zeros(80, np.uint8)
        first = 4 * int(rng.integers(4))  # the allocation need not begin at a multiple of 16
        options: dict[str, Any] = {"schedule": f"random:{seed + 2}", "checks": ("global",)}
        report = launch(program, x[first:], block=192, grid=groups, expect=None, **options)
        assert bool(report.findings) == race, (actions, report)
        counts[race] += 1
    assert min(counts.values()) >= 2, counts


@archs
@pytest.mark.parametrize("t", ["i8", "i32"])
def test_lanes_of_one_store_that_write_one_element(arch: str, t: str) -> None:
    """Lanes 2 n and 2 n + 1 store to element n: their own numbers, twice, which is two faults; then both n, which is none."""
    for same in (False, True):
        body = f"""
  %tid = rocdl.workitem.id.x : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %half = llvm.lshr %tid, %one : i32
  %value = llvm.add %{"half" if same else "tid"}, %one : i32
  %v = {"llvm.trunc %value : i32 to i8" if t == "i8" else "llvm.add %value, %one : i32"}
  %p = llvm.getelementptr %x[%half] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {t}
  llvm.store %v, %p : {t}, !llvm.ptr<1>
  llvm.store %v, %p : {t}, !llvm.ptr<1>
"""
        program = lower(body, "%x: !llvm.ptr<1>", arch=arch)
        x = np.zeros(128, np.uint8)
        report = launch(program, x, block=32, expect="" if same else "global")
        assert len(report.findings) == (0 if same else 2)  # one a store
        for finding in report.findings:
            assert "lanes of one store" in finding.message and (finding.lane, finding.count) == (0, 16)


def test_a_huge_allocation_costs_what_is_touched() -> None:
    """64 GiB of address space, of which a kernel touches both ends."""
    import resource

    size = 64 << 30
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    x = np.frombuffer(memory, np.uint8)
    actions = [(0, 0, "load", 0, 16), (0, 1, "store", 8, 4)]
    actions += [(0, 0, "load", size - 3, 1), (0, 1, "store", size - 4, 4)]
    text = actions_kernel(actions, 2)
    for at in (size - 3, size - 4):  # getelementptr's constant indices have 32 bits
        text = text.replace(f"%x[{at}] : (!llvm.ptr<1>)", f"%x[%far{at}] : (!llvm.ptr<1>, i64)")
        text = f"  %far{at} = llvm.mlir.constant({at} : i64) : i64\n" + text
    program = lower(text, "%x: !llvm.ptr<1>")
    launch(lower(actions_kernel(actions[:1], 2), "%x: !llvm.ptr<1>"), x, block=128)  # what a first launch brings
    with contextlib.suppress(OSError):  # Linux: the peak begins anew, that of earlier tests would hide this one's
        Path("/proc/self/clear_refs").write_text("5")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = launch(program, x, block=128, expect="global")
    assert sum(f.count for f in report.findings) == 2, report
    assert {f.message for f in report.findings} <= OF_WAVES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@needs_rights
@archs
def test_a_store_to_memory_that_is_mapped_read_only_is_found(arch: str) -> None:
    program, block = shift(arch, 1)
    readable = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), np.uint32)
    y = np.ones(block + 1, np.uint32)
    launch(program, readable, y, block=block)  # it can be read
    assert y.tolist() == [0] * block + [1]
    finding = only(launch(program, y, readable, block=block, expect="memory"))
    assert "read-only" in finding.message and finding.count == block
    assert not readable.any()


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("size", ["i8", "i32", "vector<4xi32>"])
@pytest.mark.parametrize("arch", sim.ARCHS)
def test_waves_that_store_equal_bytes_do_not_race(arch: str, size: str, same: bool) -> None:
    """A uniform value, stored by every lane of two waves: defined. The wave's number: not."""
    lanes = 32 if arch == "gfx1250" else 64
    body = f"""
  %tid = rocdl.workitem.id.x : i32
  %lanes = llvm.mlir.constant({lanes} : i32) : i32
  %wave = llvm.udiv %tid, %lanes : i32
  %seven = llvm.mlir.constant(7 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
"""
    value = "%seven" if same else "%wave"
    if size == "i32":
        body += f"  llvm.store {value}, %y : i32, !llvm.ptr<1>"
    elif size == "i8":
        body += f"  %v = llvm.trunc {value} : i32 to i8\n  llvm.store %v, %y : i8, !llvm.ptr<1>"
    else:  # only the last dword differs
        body += "  %three = llvm.mlir.constant(3 : i32) : i32\n  %z = llvm.mlir.constant(dense<9> : vector<4xi32>) : vector<4xi32>\n"
        body += f"  %v = llvm.insertelement {value}, %z[%three : i32] : vector<4xi32>\n  llvm.store %v, %y : vector<4xi32>, !llvm.ptr<1>"
    memory = np.zeros(64, np.uint8)
    memory = memory[-memory.ctypes.data % 16 :]
    report = launch(
        lower(body, "%y: !llvm.ptr<1>", arch=arch), memory, block=2 * lanes, expect="" if same else "global"
    )
    if not same:
        assert "another wave of the workgroup wrote" in only(report).message
