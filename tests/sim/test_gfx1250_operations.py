"""gfx1250 in the simulator: wave32, buffer resources, counters, barriers in two halves, clusters, asynchronous copies.

Sources
  Barrier numbers (-1 the workgroup's, -3 the cluster's, named ones above 0), their halves and s_wait_* counters: LLVM, AMDGPUUsage and
  IntrinsicsAMDGPU.td (llvm.amdgcn.s.barrier.*, s.wait.*). That a cluster's barrier counts one signal a workgroup: LLVM's lowering of
  s.cluster.barrier (AMDGPULowerIntrinsics: only the wave that signals the workgroup's barrier first signals -3), and FlyDSL's
  expr/rocdl/cluster.py.
  Workgroups of a cluster: x fastest (FlyDSL kernels/common/gfx1250_cluster.py, after the shader programming guide's TTMP6 layout).
  Asynchronous copies: each lane has its own LDS address, the offset applies to both sides, asynccnt counts them: ROCm/rocm-systems
  emulation/rocjitsu, tests of cluster and global loads to LDS. Masks: vm/amdgpu/cluster_lds_multicast there - peers named by the mask take
  part with loads of their own; nobody writes into another's LDS; an issuer the mask leaves out receives nothing.
  Buffer resource: LLVM, AMDGPULegalizerInfo (make.buffer.rsrc with 45-bit num_records).
"""

from __future__ import annotations

import numpy as np
import pytest
from machine import Address, launch, lower, only

from fourwave.sim import UnknownOperation

pytestmark = pytest.mark.archs("gfx1250", "gfx1250 by intrinsics")

SIGNAL, WAITB = "\n  rocdl.s.barrier.signal id = -1", "\n  rocdl.s.barrier.wait id = -1"
BARRIER = SIGNAL + WAITB
DSWAIT = "\n  rocdl.s.wait.dscnt 0"
POINTERS = "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"
HEAD = """
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %c32 = llvm.mlir.constant(32 : i32) : i32
  %turn = llvm.xor %tid, %c32 : i32
  %mine = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %theirs = llvm.getelementptr %lds[%turn] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
"""
STORE_MINE = "\n  llvm.store %tid, %mine : i32, !llvm.ptr<3>"
READ_THEIRS = "\n  %v = llvm.load %theirs : !llvm.ptr<3> -> i32\n  llvm.store %v, %to : i32, !llvm.ptr<1>"
SCHEDULES = ["forward", "reverse", "random:5"]


def run(body: str, out: np.ndarray, *arrays: object, lds: int = 4096, **options: object):  # type: ignore[no-untyped-def]
    names = [f"%a{i}: !llvm.ptr<1>" for i in range(len(arrays))]
    program = lower(body, ", ".join([*names, "%out: !llvm.ptr<1>"]), lds, "gfx1250")
    return launch(program, *arrays, out, **options)  # type: ignore[arg-type]


def test_waves_have_32_lanes() -> None:
    body = """
  %tid = rocdl.workitem.id.x : i32
  %wave = rocdl.wave.id : i32
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %wave, %to : i32, !llvm.ptr<1>"""
    out = np.zeros(100, np.uint32)
    run(body, out, block=100, lds=0)
    np.testing.assert_array_equal(out, np.arange(100) // 32)


@pytest.mark.archs("gfx1250")
def test_lds_holds_320_kilobytes() -> None:
    launch(lower("", lds=320 << 10, arch="gfx1250"))
    with pytest.raises(ValueError, match="has 327680"):
        launch(lower("", lds=(320 << 10) + 4, arch="gfx1250"))


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.archs("gfx1250")
def test_buffer_resource_words() -> None:
    body = """
  %flags = llvm.mlir.constant(5 : i32) : i32
  %stride = llvm.mlir.constant(0x123 : i16) : i16
  %base = llvm.mlir.constant(0x1ABCDEF12345678 : i64) : i64
  %records = llvm.mlir.constant(0x1FEDCBA98765 : i64) : i64
  %p = llvm.inttoptr %base : i64 to !llvm.ptr<1>
  %r = rocdl.make.buffer.rsrc %p, %stride, %records, %flags : !llvm.ptr<1> to !llvm.ptr<8>
  %bits = llvm.ptrtoint %r : !llvm.ptr<8> to i128
  %v = llvm.bitcast %bits : i128 to vector<4xi32>
  llvm.store %v, %out : vector<4xi32>, !llvm.ptr<1>"""
    out = np.zeros(4, np.uint32)
    run(body, out, block=1, lds=0)
    want = 0x1ABCDEF12345678 | 0x1FEDCBA98765 << 57 | 0x123 << 108 | 5 << 124
    assert sum(int(w) << 32 * i for i, w in enumerate(out)) == want


def test_buffer_loads_and_stores_stop_at_num_records() -> None:
    body = """
  %tid = rocdl.workitem.id.x : i32
  %c0 = llvm.mlir.constant(0 : i32) : i32
  %c4 = llvm.mlir.constant(4 : i32) : i32
  %stride = llvm.mlir.constant(0 : i16) : i16
  %records = llvm.mlir.constant(80 : i64) : i64
  %r = rocdl.make.buffer.rsrc %a0, %stride, %records, %c0 : !llvm.ptr<1> to !llvm.ptr<8>
  %w = rocdl.make.buffer.rsrc %out, %stride, %records, %c0 : !llvm.ptr<1> to !llvm.ptr<8>
  %at = llvm.mul %tid, %c4 : i32
  %v = rocdl.raw.ptr.buffer.load %r, %at, %c0, 0 : i32
  %to = llvm.getelementptr %a1[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %v, %to : i32, !llvm.ptr<1>
  rocdl.raw.ptr.buffer.store %v, %w, %at, %c0, 0 : i32"""
    source, loaded, stored = (np.arange(1, 33, dtype=np.uint32) + 100 * i for i in range(3))
    first = source.copy()
    want = np.where(np.arange(32) < 20, first, stored)
    run(body, stored, source, loaded, block=32, lds=0)
    np.testing.assert_array_equal(loaded, np.where(np.arange(32) < 20, first, 0))
    np.testing.assert_array_equal(stored, want)


# -- barriers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_two_halves_of_a_barrier_order_two_waves(schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    run(HEAD + STORE_MINE + DSWAIT + BARRIER + READ_THEIRS, out, block=64, schedule=schedule)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("body", [
    STORE_MINE + BARRIER + READ_THEIRS,  # the store is not complete when its wave signals
    SIGNAL + STORE_MINE + DSWAIT + WAITB + READ_THEIRS,  # between the halves: what was signalled does not cover the store
    STORE_MINE + DSWAIT + SIGNAL + READ_THEIRS + WAITB,  # read before the second half
    BARRIER + STORE_MINE + DSWAIT + READ_THEIRS,
])  # fmt: skip
def test_races_around_the_halves(body: str, schedule: str) -> None:
    report = run(HEAD + body, np.zeros(64, np.uint32), block=64, schedule=schedule, expect=None)
    assert "race" in {f.kind for f in report.findings}, report
    assert {f.kind for f in report.findings} <= {"race", "init"}


READ = "\n  %r = llvm.load %theirs : !llvm.ptr<3> -> i32\n  %sum = llvm.add %r, %tid : i32"
USE = "\n  llvm.store %sum, %to : i32, !llvm.ptr<1>"
FILLED = HEAD + STORE_MINE + DSWAIT + BARRIER


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_overwriting_what_another_wave_reads(schedule: str) -> None:
    run(FILLED + READ + USE + BARRIER + STORE_MINE, np.zeros(64, np.uint32), block=64, schedule=schedule)
    run(FILLED + READ + USE + SIGNAL + WAITB + STORE_MINE, np.zeros(64, np.uint32), block=64, schedule=schedule)
    for body in (
        READ + USE + STORE_MINE,
        READ + USE + SIGNAL + STORE_MINE + WAITB,  # the other wave may not have signalled yet
        SIGNAL + READ + USE + WAITB + STORE_MINE,  # the read is behind the signal: no barrier after it
    ):
        run(FILLED + body, np.zeros(64, np.uint32), block=64, schedule=schedule, expect="race")


def test_a_read_that_has_not_returned_when_its_wave_signals() -> None:
    unused = "\n  %r = llvm.load %theirs : !llvm.ptr<3> -> i32"
    late = FILLED + unused + BARRIER + STORE_MINE
    report = run(late + "\n  llvm.store %r, %to : i32, !llvm.ptr<1>", np.zeros(64, np.uint32), block=64, expect="race")
    assert "may still be reading" in only(report).message
    run(
        FILLED + unused + DSWAIT + BARRIER + STORE_MINE + "\n  llvm.store %r, %to : i32, !llvm.ptr<1>",
        np.zeros(64, np.uint32),
        block=64,
    )


def test_s_barrier_is_both_halves() -> None:
    out = np.zeros(64, np.uint32)
    run(HEAD + STORE_MINE + "\n  rocdl.barrier" + READ_THEIRS, out, block=64)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)
    run(HEAD + STORE_MINE + "\n  rocdl.s.barrier" + READ_THEIRS, out, block=64, expect="race")


ONLY_FIRST = """
  %first = llvm.icmp "ult" %tid, %c32 : i32
  llvm.cond_br %first, ^only, ^all
^only:"""
ALL = "\n  llvm.br ^all\n^all:"


def test_a_barrier_that_not_all_signal() -> None:
    body = HEAD + ONLY_FIRST + SIGNAL + ALL + WAITB
    report = run(body, np.zeros(64, np.uint32), block=64, expect="barrier")
    assert "can never be complete" in only(report).message


def test_waves_that_ended() -> None:
    body = HEAD + ONLY_FIRST + BARRIER + ALL
    report = run(body, np.zeros(64, np.uint32), block=64, expect="barrier")
    assert "after others have ended" in only(report).message


def test_the_first_to_signal() -> None:
    body = (
        HEAD
        + '\n  %is = "rocdl.s.barrier.signal.isfirst"() <{id = -1 : i32}> : () -> i1\n  %v = llvm.zext %is : i1 to i32\n  llvm.store %v, %to : i32, !llvm.ptr<1>'
        + WAITB
    )
    out = np.full(96, 7, np.uint32)
    run(body, out, block=96)
    np.testing.assert_array_equal(out.reshape(3, 32).max(axis=1), out.reshape(3, 32).min(axis=1))
    assert out.sum() == 32  # one wave of three


NAMED = """llvm.mlir.global external @lds() {addr_space = 3 : i32, alignment = 16 : i64} : !llvm.array<4096 x i8>"""


def test_named_barriers() -> None:
    """Waves 0 and 1 of three meet at a named barrier of two members; the third goes its way. Its number is in bits 9:4 of its address."""
    named = """
  %where = llvm.mlir.constant(48 : i32) : i32
  %bar = llvm.inttoptr %where : i32 to !llvm.ptr<3>
  rocdl.s.barrier.init %bar member_cnt = 2 : !llvm.ptr<3>""" + BARRIER  # fmt: skip
    two = """
  %c64 = llvm.mlir.constant(64 : i32) : i32
  %early = llvm.icmp "ult" %tid, %c64 : i32
  llvm.cond_br %early, ^two, ^rest
^two:
  rocdl.s.barrier.join %bar : !llvm.ptr<3>""" + STORE_MINE + DSWAIT + """
  rocdl.s.barrier.signal id = 3
  rocdl.s.barrier.wait id = 3""" + READ_THEIRS + """
  rocdl.s.barrier.leave id = 3
  llvm.br ^rest
^rest:"""  # fmt: skip
    out = np.zeros(96, np.uint32)
    run(HEAD + named + two, out, block=96)
    np.testing.assert_array_equal(out[:64], np.arange(64) ^ 32)
    report = run(HEAD + named.replace("= 2 :", "= 3 :") + two, out, block=96, expect=None)
    assert "barrier" in {f.kind for f in report.findings}


def test_a_named_barrier_by_its_address_sets_its_count() -> None:
    """signal.var: the address names the barrier, the member count comes with the signal (LLVM, IntrinsicsAMDGPU.td)."""
    body = HEAD + """
  %where = llvm.mlir.constant(48 : i32) : i32
  %bar = llvm.inttoptr %where : i32 to !llvm.ptr<3>
  rocdl.s.barrier.init %bar member_cnt = 2 : !llvm.ptr<3>""" + BARRIER + """
  rocdl.s.barrier.join %bar : !llvm.ptr<3>""" + STORE_MINE + DSWAIT + """
  rocdl.s.barrier.signal.var %bar member_cnt = 2 : !llvm.ptr<3>
  rocdl.s.barrier.wait id = 3""" + READ_THEIRS  # fmt: skip
    out = np.zeros(64, np.uint32)
    run(body, out, block=64)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


def test_a_wave_that_leaves_a_named_barrier_is_no_longer_waited_for() -> None:
    """Three join; wave 2 leaves, and waves 0 and 1 meet. Nobody meets if it stays."""
    body = HEAD + """
  %where = llvm.mlir.constant(48 : i32) : i32
  %bar = llvm.inttoptr %where : i32 to !llvm.ptr<3>
  rocdl.s.barrier.init %bar member_cnt = 3 : !llvm.ptr<3>""" + BARRIER + """
  rocdl.s.barrier.join %bar : !llvm.ptr<3>
  %c64 = llvm.mlir.constant(64 : i32) : i32
  %early = llvm.icmp "ult" %tid, %c64 : i32
  llvm.cond_br %early, ^two, ^third
^third:
  {leave}
  llvm.br ^rest
^two:""" + STORE_MINE + DSWAIT + """
  rocdl.s.barrier.signal id = 3
  rocdl.s.barrier.wait id = 3""" + READ_THEIRS + """
  llvm.br ^rest
^rest:"""  # fmt: skip
    out = np.zeros(96, np.uint32)
    run(body.format(leave="rocdl.s.barrier.leave id = 3"), out, block=96)
    np.testing.assert_array_equal(out[:64], np.arange(64) ^ 32)
    report = run(body.format(leave=""), out, block=96, expect=None)
    assert "barrier" in {f.kind for f in report.findings}


# -- clusters ----------------------------------------------------------------------------------------------------------

IDS = """
  %x = rocdl.workgroup.id.x : i32
  %y = rocdl.workgroup.id.y : i32
  %z = rocdl.workgroup.id.z : i32
  %cx = rocdl.cluster.id.x : i32
  %cy = rocdl.cluster.id.y : i32
  %cz = rocdl.cluster.id.z : i32
  %wx = rocdl.cluster.workgroup.id.x : i32
  %wy = rocdl.cluster.workgroup.id.y : i32
  %wz = rocdl.cluster.workgroup.id.z : i32
  %flat = llvm.call_intrinsic "llvm.amdgcn.cluster.workgroup.flat.id"() : () -> i32
  %last = llvm.call_intrinsic "llvm.amdgcn.cluster.workgroup.max.flat.id"() : () -> i32
  %maxx = llvm.call_intrinsic "llvm.amdgcn.cluster.workgroup.max.id.x"() : () -> i32
  %maxy = llvm.call_intrinsic "llvm.amdgcn.cluster.workgroup.max.id.y"() : () -> i32
  %maxz = llvm.call_intrinsic "llvm.amdgcn.cluster.workgroup.max.id.z"() : () -> i32
"""


def test_ids_in_clusters() -> None:
    names = ["x", "y", "z", "cx", "cy", "cz", "wx", "wy", "wz", "flat", "last", "maxx", "maxy", "maxz"]
    grid, cluster = (4, 6, 2), (2, 3, 1)
    body = IDS + """
  %n = rocdl.grid.dim.x : i32""".replace("rocdl.grid.dim.x : i32", "llvm.mlir.constant(4 : i32) : i32") + """
  %m = llvm.mlir.constant(6 : i32) : i32
  %zy = llvm.mul %z, %m : i32
  %zyy = llvm.add %zy, %y : i32
  %row = llvm.mul %zyy, %n : i32
  %group = llvm.add %row, %x : i32
  %to = llvm.getelementptr %out[%group] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<14 x i32>
  """  # fmt: skip
    for i, name in enumerate(names):
        body += f"\n  %p{i} = llvm.getelementptr %to[{4 * i}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8\n  llvm.store %{name}, %p{i} : i32, !llvm.ptr<1>"
    out = np.zeros((2, 6, 4, 14), np.uint32)
    program = lower(body, "%out: !llvm.ptr<1>", 0, "gfx1250")
    launch_in_clusters(program, out, grid=grid, cluster=cluster, block=1)
    for z, y, x in np.ndindex(2, 6, 4):
        want = [x, y, z, x // 2, y // 3, z, x % 2, y % 3, 0, x % 2 + 2 * (y % 3), 5, 1, 2, 0]
        assert list(out[z, y, x]) == want


def launch_in_clusters(program, *arrays, grid, cluster, block=32, expect="", **options):  # type: ignore[no-untyped-def]
    from machine import words

    from fourwave.sim.launch import Memory, Options
    from fourwave.sim.launch import run as run_program

    passed = [words(a) for a in arrays]
    memory = Memory([r for _, ranges in passed for r in ranges])
    options.setdefault("threads", 2)
    report = run_program(program, grid, (block, 1, 1), 0, [w for w, _ in passed], memory, Options(**options), cluster)
    if expect is not None:
        assert {f.kind for f in report.findings} == ({expect} if expect else set()), str(report)
    return report


def test_a_cluster_must_fit() -> None:
    program = lower("", arch="gfx1250")
    with pytest.raises(ValueError, match="divides the grid"):
        launch_in_clusters(program, grid=(3, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(ValueError, match="at most 16"):
        launch_in_clusters(program, grid=(32, 1, 1), cluster=(32, 1, 1))
    with pytest.raises(ValueError, match="has no clusters"):
        launch_in_clusters(lower("", arch="gfx950"), grid=(2, 1, 1), cluster=(2, 1, 1), block=64)


CLUSTER_BARRIER = """
  %wave = rocdl.wave.id : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %leader = llvm.icmp "eq" %wave, %zero : i32
  llvm.cond_br %leader, ^signal, ^after
^signal:
  rocdl.s.barrier.signal id = -3
  llvm.br ^after
^after:
  rocdl.s.barrier.wait id = -3"""


BOTH_AT_ONCE = '\n  llvm.call_intrinsic "llvm.amdgcn.s.cluster.barrier"() : () -> ()'


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("meet", [BARRIER + CLUSTER_BARRIER, BOTH_AT_ONCE], ids=["written out", "s.cluster.barrier"])
def test_workgroups_of_a_cluster_meet_at_its_barrier(meet: str, schedule: str) -> None:
    """Each workgroup writes to memory, meets the others, and reads what its neighbour wrote; 8 clusters of 4."""
    body = HEAD + """
  %g = rocdl.workgroup.id.x : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %next = llvm.xor %g, %one : i32
  %mem = llvm.getelementptr %a0[%g] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %other = llvm.getelementptr %a0[%next] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %g, %mem : i32, !llvm.ptr<1>""" + meet + """
  %v = llvm.load %other : !llvm.ptr<1> -> i32
  %res = llvm.getelementptr %out[%g] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %v, %res : i32, !llvm.ptr<1>"""  # fmt: skip
    memory, out = np.full(32, 99, np.uint32), np.zeros(32, np.uint32)
    program = lower(body, "%a0: !llvm.ptr<1>, %out: !llvm.ptr<1>", 4096, "gfx1250")
    checks = ("memory", "init", "race", "wait", "barrier")
    launch_in_clusters(
        program, memory, out, grid=(32, 1, 1), cluster=(4, 1, 1), block=64, schedule=schedule, checks=checks
    )
    np.testing.assert_array_equal(out, np.arange(32) ^ 1)


def test_a_workgroup_that_does_not_signal_the_cluster() -> None:
    """Workgroup 1 ends at once; workgroup 0 waits for it at the cluster's barrier."""
    body = HEAD + """
  %g = rocdl.workgroup.id.x : i32
  %none = llvm.mlir.constant(0 : i32) : i32
  %stays = llvm.icmp "eq" %g, %none : i32
  llvm.cond_br %stays, ^here, ^end
^here:""" + CLUSTER_BARRIER + "\n  llvm.br ^end\n^end:"  # fmt: skip
    program = lower(body, "%out: !llvm.ptr<1>", 64, "gfx1250")
    report = launch_in_clusters(program, np.zeros(32, np.uint32), grid=(2, 1, 1), cluster=(2, 1, 1), expect="barrier")
    assert "can never be complete" in only(report).message


# -- asynchronous copies -----------------------------------------------------------------------------------------------

WIDTHS = {"b8": 1, "b32": 4, "b64": 8, "b128": 16}
ASYNC = """
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %c7 = llvm.mlir.constant(7 : i32) : i32
  %c31 = llvm.mlir.constant(31 : i32) : i32
  %mixed = llvm.mul %tid, %c7 : i32
  %slot = llvm.and %mixed, %c31 : i32
  %src = llvm.getelementptr %a0[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<24 x i8>
  %dst = llvm.getelementptr %lds[%slot] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<32 x i8>
  %whole = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<32 x i8>
  %res = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<32 x i8>
  %old = llvm.load %res {alignment = 4 : i64} : !llvm.ptr<1> -> vector<32xi8>
  llvm.store %old, %whole {alignment = 4 : i64} : vector<32xi8>, !llvm.ptr<3>
  rocdl.s.wait.dscnt 0
"""
DUMP = """
  %now = llvm.load %whole {alignment = 4 : i64} : !llvm.ptr<3> -> vector<32xi8>
  llvm.store %now, %res {alignment = 4 : i64} : vector<32xi8>, !llvm.ptr<1>"""
ASYNC_WAIT = "\n  rocdl.s.wait.asynccnt 0"


def pattern(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, count, dtype=np.uint8)


@pytest.mark.parametrize("kind", ["global", "cluster"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("completion", ["late", "early", "random"])
def test_async_load(kind: str, width: str, completion: str) -> None:
    """Lane i copies to the slot 7 i mod 32; the offset 16 moves both addresses (24-byte steps in memory, 32 in LDS)."""
    size = WIDTHS[width]
    source, out = pattern(24 * 33), pattern(1024, 1)
    want = out.copy()
    for lane in range(32):
        at = lane * 7 % 32 * 32 + 16
        want[at : at + size] = source[24 * lane + 16 : 24 * lane + 16 + size]
    mask = ", %c7" if kind == "cluster" else ""
    copy = f"\n  rocdl.{kind}.load.async.to.lds.{width} %src, %dst, 16, 0{mask} : !llvm.ptr<1>, !llvm.ptr<3>"
    copy += "\n  rocdl.global.prefetch %src, 0 : !llvm.ptr<1>"  # a hint
    run(ASYNC + copy + ASYNC_WAIT + DUMP, out, source, block=32, completion=completion)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("completion", ["late", "early"])
def test_async_store(width: str, completion: str) -> None:
    size = WIDTHS[width]
    target, out = pattern(24 * 33), pattern(1024, 1)
    want = target.copy()
    for lane in range(32):
        at = lane * 7 % 32 * 32 + 16
        want[24 * lane + 16 : 24 * lane + 16 + size] = out[at : at + size]
    copy = f"\n  rocdl.global.store.async.from.lds.{width} %src, %dst, 16, 0 : !llvm.ptr<1>, !llvm.ptr<3>"
    run(ASYNC + copy + ASYNC_WAIT, out, target, block=32, completion=completion)
    np.testing.assert_array_equal(target, want)


LOAD = "\n  rocdl.global.load.async.to.lds.b128 %src, %dst, 0, 0 : !llvm.ptr<1>, !llvm.ptr<3>"
STORE = LOAD.replace("load.async.to", "store.async.from")


def test_async_copies_and_their_waits() -> None:
    source, out = pattern(24 * 33), pattern(1024, 1)
    report = run(ASYNC + LOAD + DUMP + ASYNC_WAIT, out, source, block=32, expect="wait")
    assert "its own copy has not reached" in only(report).message
    report = run(ASYNC + LOAD, out, source, block=32, expect="wait")
    assert "ends with a copy" in only(report).message
    run(ASYNC + STORE, out, source, block=32)  # a store ends with the launch
    report = run(ASYNC.replace("rocdl.s.wait.dscnt 0", "") + STORE + ASYNC_WAIT, out, source, block=32, expect="wait")
    assert "dscnt" in only(report).message
    other = (
        ASYNC_WAIT.replace("asynccnt", "tensorcnt")
        + "\n  rocdl.s.wait.loadcnt 0\n  rocdl.s.wait.storecnt 0\n  rocdl.s.wait.expcnt 0"
    )
    run(ASYNC + LOAD + other + DUMP + ASYNC_WAIT, out, source, block=32, expect="wait")


def test_async_marks() -> None:
    """wait.asyncmark 1 leaves what was issued after the mark before the newest (LLVM, AMDGPUAsyncOperations)."""
    second = LOAD.replace("%src, %dst, 0", "%src, %dst, 16").replace("b128", "b32")
    source, out = pattern(24 * 33), pattern(1024, 1)
    mark = "\n  rocdl.asyncmark"
    body = ASYNC + LOAD + mark + second + mark
    slot = "\n  %first = llvm.load %dst {alignment = 4 : i64} : !llvm.ptr<3> -> vector<16xi8>\n  llvm.store %first, %res {alignment = 4 : i64} : vector<16xi8>, !llvm.ptr<1>"
    run(body + "\n  rocdl.wait.asyncmark 1" + slot + "\n  rocdl.wait.asyncmark 0", out, source, block=32)
    report = run(
        body + "\n  rocdl.wait.asyncmark 2" + slot + "\n  rocdl.wait.asyncmark 0", out, source, block=32, expect="wait"
    )
    assert "its own copy" in only(report).message


def test_lanes_that_are_off_copy_nothing() -> None:
    body = ASYNC + """
  %c5 = llvm.mlir.constant(5 : i32) : i32
  %some = llvm.icmp "ult" %tid, %c5 : i32
  llvm.cond_br %some, ^copy, ^done
^copy:""" + LOAD + "\n  llvm.br ^done\n^done:" + ASYNC_WAIT + DUMP  # fmt: skip
    source, out = pattern(24 * 33), pattern(1024, 1)
    want = out.copy()
    for lane in range(5):
        at = lane * 7 % 32 * 32
        want[at : at + 16] = source[24 * lane : 24 * lane + 16]
    run(body, out, Address(source, 0, 24 * 4 + 16), block=32)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("mask", "arrives"), [(0, True), (1, True), (3, True), (2, False)])
def test_multicast_masks(mask: int, arrives: bool) -> None:
    """Outside a launch in clusters the workgroup's rank is 0."""
    copy = f"""
  %mask = llvm.mlir.constant({mask} : i32) : i32
  rocdl.cluster.load.async.to.lds.b128 %src, %dst, 0, 0, %mask : !llvm.ptr<1>, !llvm.ptr<3>"""
    source, out = pattern(24 * 33), pattern(1024, 1)
    want = out.copy()
    for lane in range(32):
        at = lane * 7 % 32 * 32
        if arrives:
            want[at : at + 16] = source[24 * lane : 24 * lane + 16]
    report = run(ASYNC + copy + ASYNC_WAIT + DUMP, out, source, block=32, expect="" if arrives else "memory")
    np.testing.assert_array_equal(out, want)
    assert arrives or "leaves out the workgroup" in only(report).message


def test_a_mask_does_not_write_into_other_workgroups() -> None:
    """Only workgroup 0 loads, with both in its mask: workgroup 1's LDS keeps what it had."""
    body = ASYNC.replace("%out[%tid]", "%here[%tid]").replace("  %tid = rocdl.workitem.id.x : i32", """  %tid = rocdl.workitem.id.x : i32
  %g = rocdl.workgroup.id.x : i32
  %here = llvm.getelementptr %out[%g] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<1024 x i8>""") + """
  %three = llvm.mlir.constant(3 : i32) : i32
  %no = llvm.mlir.constant(0 : i32) : i32
  %zeroth = llvm.icmp "eq" %g, %no : i32
  llvm.cond_br %zeroth, ^copy, ^done
^copy:
  rocdl.cluster.load.async.to.lds.b128 %src, %dst, 0, 0, %three : !llvm.ptr<1>, !llvm.ptr<3>
  llvm.br ^done
^done:""" + ASYNC_WAIT + CLUSTER_BARRIER + DUMP  # fmt: skip
    source, out = pattern(24 * 33), pattern(2048, 1)
    want = out.copy()
    for lane in range(32):
        at = lane * 7 % 32 * 32
        want[at : at + 16] = source[24 * lane : 24 * lane + 16]
    program = lower(body, "%a0: !llvm.ptr<1>, %out: !llvm.ptr<1>", 4096, "gfx1250")
    launch_in_clusters(program, source, out, grid=(2, 1, 1), cluster=(2, 1, 1))
    np.testing.assert_array_equal(out, want)


# -- what it does not have -----------------------------------------------------------------------------------------------


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize(("text", "match"), [
    ("rocdl.s.waitcnt 0", "a wait for each counter"),
    ("rocdl.s.barrier.signal id = -2", "the barrier -2"),
    ("rocdl.s.barrier.wait id = 40", "the barrier 40"),
])  # fmt: skip
def test_operations_that_raise(text: str, match: str) -> None:
    with pytest.raises(UnknownOperation, match=match):
        lower(text, arch="gfx1250")


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize(
    "text",
    [
        "rocdl.s.wait.dscnt 0",
        "rocdl.s.barrier.signal id = -1",
        "%w = rocdl.wave.id : i32",
        "%w = rocdl.cluster.id.x : i32",
    ],
)
def test_other_archs_raise(text: str) -> None:
    with pytest.raises(UnknownOperation, match="gfx950 does not have it"):
        lower(text, arch="gfx950")
