"""Operations with little or no effect, each on every arch that has it: undefined values, hints, fences, marks, unreachable, canonicalize.

Sources
  Hints (sched.*, s.nop, s.sleep, s.setprio, wave.barrier, iglp.opt, prefetches): LLVM, AMDGPUUsage: they move instructions or data, not values.
  s.setreg of SCHED_MODE (hardware register 26): LLVM, AMDGPU SIDefines.h. canonicalize, assume, unreachable: LLVM Language Reference.
  asyncmark, wait.asyncmark: LLVM, AMDGPUUsage, "Asynchronous operations": the wait completes what came before the mark N marks back.
  Fences: LLVM, AMDGPUUsage, memory models of gfx942 and gfx12: a release at workgroup scope waits for LDS operations.
What a register holds that nothing wrote no source says; the simulator has it full of ones, so that a use shows.
"""

from __future__ import annotations

import numpy as np
import pytest
from exact import F32, assert_codes
from machine import PROLOGUE, arch, itemwise, launch, load_item, lower, only, store_item, wave

from fourwave.sim import UnknownOperation

ARCHS = ("gfx942", "gfx950", "gfx1250")
pytestmark = pytest.mark.archs(*ARCHS)
A = np.random.default_rng(1).integers(0, 1 << 32, 64, dtype=np.uint32)


@pytest.mark.parametrize("what", ["undef", "poison"])
def test_undefined_values_are_full_of_ones(what: str) -> None:
    got = itemwise(f"\n  %u = llvm.mlir.{what} : i32\n  %r = llvm.xor %u, %a : i32", [("i32", A)], "i32")
    np.testing.assert_array_equal(got, ~A)


HINTS = [
    "rocdl.sched.barrier none", "rocdl.sched.group.barrier ds_read, 1, 0", "rocdl.s.setprio 1", "rocdl.s.sleep 1", "rocdl.iglp.opt 0",
    'rocdl.s.nop 3', "rocdl.wave.barrier",
    "%reg = llvm.mlir.constant(154 : i32) : i32\n  llvm.call_intrinsic \"llvm.amdgcn.s.setreg\"(%reg, %reg) : (i32, i32) -> ()",
    '%true = llvm.mlir.constant(true) : i1\n  llvm.intr.assume %true : i1',
]  # fmt: skip


@pytest.mark.parametrize("hint", HINTS)
def test_hints_change_nothing(hint: str) -> None:
    np.testing.assert_array_equal(itemwise(f"\n  {hint}\n  %r = llvm.add %a, %a : i32", [("i32", A)], "i32"), A + A)


@pytest.mark.archs("gfx1250", "gfx1250 by intrinsics")
@pytest.mark.parametrize("hint", [
    "rocdl.global.prefetch %p, 0 : !llvm.ptr<1>", "rocdl.flat.prefetch %p, 0 : !llvm.ptr",
    *(f"rocdl.s.wait.{name} 0" for name in ("loadcnt", "storecnt", "expcnt")),
    *(f"\n  %z = llvm.mlir.constant(0 : i16) : i16\n  llvm.call_intrinsic \"llvm.amdgcn.s.wait.{name}\"(%z) : (i16) -> ()"
      for name in ("kmcnt", "xcnt", "samplecnt", "bvhcnt")),
])  # fmt: skip
def test_prefetches_and_waits_for_registers_change_nothing(hint: str) -> None:
    space = "" if "flat" in hint else "<1>"
    pointer = f"%zero = llvm.mlir.constant(64 : i64) : i64\n  %p = llvm.inttoptr %zero : i64 to !llvm.ptr{space}"
    got = itemwise(f"\n  {pointer}\n  {hint}\n  %r = llvm.add %a, %a : i32", [("i32", A)], "i32")
    np.testing.assert_array_equal(got, A + A)


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize(
    "hint", ["rocdl.global.prefetch %p, 0 : !llvm.ptr<1>", "rocdl.s.wait.loadcnt 0", "rocdl.wave.id : i32"]
)
def test_hints_of_gfx1250_are_refused_elsewhere(hint: str) -> None:
    with pytest.raises(UnknownOperation, match=f"{arch()} does not have it"):
        lower("  " + ("%w = " if "wave.id" in hint else "") + hint, "%p: !llvm.ptr<1>")


def test_unreachable_that_is_reached_is_reported() -> None:
    body = """
  %tid = rocdl.workitem.id.x : i32
  %five = llvm.mlir.constant(5 : i32) : i32
  %rare = llvm.icmp "eq" %tid, %five : i32
  llvm.cond_br %rare, ^bad, ^good
^bad:
  llvm.unreachable
^good:"""
    assert "unreachable" in only(launch(lower(body), expect="barrier")).message
    launch(lower(body), block=4)


def test_canonicalize_quiets_a_signalling_nan_and_keeps_subnormals() -> None:
    codes = [0x7F800001, 0xFFBFFFFF, 0x7FC12345, 0, 0x80000000, 1, 0x807FFFFF, 0x3F800001, 0x7F800000, 0xFF7FFFFF]
    got = itemwise(
        '\n  %r = llvm.call_intrinsic "llvm.canonicalize"(%a) : (f32) -> f32', [("f32", F32.array(codes))], "f32"
    )
    assert_codes(F32, got, [None if F32.is_nan(c) else c for c in codes], F32.array(codes))
    assert all(int(g) & 1 << 22 for g, c in zip(got, codes) if F32.is_nan(c))  # quiet


# Two waves: each writes its place in LDS, and reads the other's after `between`.
EXCHANGE = """
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %turn = llvm.mlir.constant({turn} : i32) : i32
  %theirs = llvm.xor %tid, %turn : i32
  %mine = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %other = llvm.getelementptr %lds[%theirs] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  llvm.store %tid, %mine : i32, !llvm.ptr<3>
  {between}
  %v = llvm.load %other : !llvm.ptr<3> -> i32
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %v, %to : i32, !llvm.ptr<1>"""


def exchange(between: str, expect: str = "") -> None:
    n = wave()
    out = np.zeros(2 * n, np.uint32)
    program = lower(EXCHANGE.format(turn=n, between=between), "%out: !llvm.ptr<1>", lds=8 * n)
    launch(program, out, block=2 * n, expect=expect)
    if not expect:
        np.testing.assert_array_equal(out, np.arange(2 * n) ^ n)


def test_a_barrier_with_its_fences() -> None:
    exchange("rocdl.barrier")


@pytest.mark.parametrize("ordering", ["release", "acq_rel", "seq_cst"])
def test_a_fence_before_a_bare_barrier(ordering: str) -> None:
    exchange(f'llvm.fence syncscope("workgroup") {ordering}\n  rocdl.s.barrier')
    exchange("rocdl.s.barrier", "race")
    exchange('llvm.fence syncscope("workgroup") acquire\n  rocdl.s.barrier', "race")


@pytest.mark.archs("gfx942", "gfx950", "gfx942 by intrinsics", "gfx950 by intrinsics")
def test_marks_of_copies_to_lds() -> None:
    """Two copies, each with a mark behind it. wait.asyncmark 1 completes the first, 0 both."""
    body = PROLOGUE + load_item("%x", "i32", "%in") + """
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %second = llvm.getelementptr %lds[256] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
  %from = llvm.getelementptr %in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %next = llvm.getelementptr %from[64] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32
  %mine = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %there = llvm.getelementptr %mine[{read}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i32
  rocdl.load.to.lds %from, %lds, 4, 0, 0 : !llvm.ptr<1>
  rocdl.asyncmark
  rocdl.load.to.lds %next, %second, 4, 0, 0 : !llvm.ptr<1>
  rocdl.asyncmark
  rocdl.wait.asyncmark {wait}
  %r = llvm.load %there : !llvm.ptr<3> -> i32""" + store_item("%r", "i32", "%out") + "\n  rocdl.wait.asyncmark 0"  # fmt: skip
    source = np.random.default_rng(2).integers(0, 1 << 32, 128, dtype=np.uint32)
    for read, wait, covered in ((0, 0, True), (0, 1, True), (64, 0, True), (64, 1, False), (0, 2, False)):
        out = np.zeros(64, np.uint32)
        program = lower(body.format(read=read, wait=wait), "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=512)
        launch(program, source, out, expect="" if covered else "wait")
        if covered:
            np.testing.assert_array_equal(out, source[read : read + 64])
