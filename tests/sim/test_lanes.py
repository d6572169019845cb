"""Traffic between lanes, and what a lane knows of itself.

Sources
  readfirstlane, readlane: AMD CDNA3 ISA guide, V_READFIRSTLANE_B32 (the lowest active lane's value; lane 0's if EXEC is zero) and
  V_READLANE_B32 (EXEC is ignored: an inactive lane's register is read).
  ballot, mbcnt: LLVM AMDGPUUsage, llvm.amdgcn.ballot (inactive lanes give 0), llvm.amdgcn.mbcnt.lo/hi (bits of the mask below the lane, plus
  the addend).
  ds_bpermute, ds_permute: gpuopen.com "AMD GCN Assembly: Cross-Lane Operations"; Rust's core::arch::amdgpu documentation, made from LLVM's
  intrinsics, adds: from inactive lanes 0 is read; of several writers to one lane the highest wins.
  permlane16_swap, permlane32_swap: the same documentation: odd rows (of 16 lanes; rows 2 and 3) of the first operand trade places with even
  rows (rows 0 and 1) of the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machine import PROLOGUE, arch, itemwise, launch, load_item, lower, store_item, wave

from fourwave.sim.lowering import UnknownOperation
from fourwave.sim.program import Builder, Instruction, Program

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

LANES = np.arange(64)


def prologue() -> str:
    """PROLOGUE for workgroups of one wave."""
    return PROLOGUE.replace("constant(64 ", f"constant({wave()} ")


def values(seed: int, waves: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, waves * 64, dtype=np.uint32)


def guarded(active: str, body: str, inputs: list[np.ndarray], results: int = 1) -> list[np.ndarray]:
    """Run `body`, which defines %r0, %r1, ... from %a and %b, in the lanes where `active` (a function of %tid) holds; others store nothing."""
    names = ["%a", "%b"][: len(inputs)]
    text = (
        prologue()
        + "".join(load_item(n, "i32", f"{n}in") for n in names)
        + f"\n  {active}\n  llvm.cond_br %go, ^inside, ^end\n^inside:\n"
        + body
    )
    text += "".join(store_item(f"%r{i}", "i32", f"%out{i}") for i in range(results)) + "\n  llvm.br ^end\n^end:"
    arguments = ", ".join([f"{n}in: !llvm.ptr<1>" for n in names] + [f"%out{i}: !llvm.ptr<1>" for i in range(results)])
    out = [np.full(len(inputs[0]), 0xDEAD, np.uint32) for _ in range(results)]
    launch(lower(text, arguments), *inputs, *out, grid=len(inputs[0]) // wave(), block=wave())
    return out


ALL = '%go = llvm.icmp "eq" %tid, %tid : i32'
ODD = (
    '%g1 = llvm.mlir.constant(1 : i32) : i32\n  %gb = llvm.and %tid, %g1 : i32\n  %go = llvm.icmp "ne" %gb, %g0 : i32\n'
)
ODD = "%g0 = llvm.mlir.constant(0 : i32) : i32\n  " + ODD
HIGH = '%g40 = llvm.mlir.constant(20 : i32) : i32\n  %go = llvm.icmp "uge" %tid, %g40 : i32'
MASKS: list[tuple[str, np.ndarray]] = [(ALL, LANES >= 0), (ODD, LANES % 2 == 1), (HIGH, LANES >= 20)]
masked = pytest.mark.parametrize(("active", "on"), MASKS, ids=["all", "odd", "high"])


@masked
def test_readfirstlane_takes_the_first_active_lane(active: str, on: np.ndarray) -> None:
    a, n = values(1), wave()
    on = on[:n]
    (got,) = guarded(active, "  %r0 = rocdl.readfirstlane %a : i32", [a])
    first = np.flatnonzero(on)[0]
    want = np.where(np.tile(on, 128 // n), np.repeat(a.reshape(-1, n)[:, first], n), 0xDEAD)
    np.testing.assert_array_equal(got, want)


def test_readfirstlane_of_two_dwords() -> None:
    a = np.random.default_rng(2).integers(0, 1 << 63, 128, dtype=np.uint64)
    got = itemwise("\n  %r = rocdl.readfirstlane %a : i64", [("i64", a)], "i64")
    np.testing.assert_array_equal(got, np.repeat(a[:: wave()], wave()))


@masked
def test_readlane_reads_any_lane_even_an_inactive_one(active: str, on: np.ndarray) -> None:
    """The lane number is a scalar; the simulator takes it from the first active lane, modulo the wave's size."""
    a, n = values(3), wave()
    on = on[:n]
    for lane in (0, 5, 42, 63, 64 + 7):
        body = f"  %l = llvm.mlir.constant({lane} : i32) : i32\n  %r0 = rocdl.readlane %a, %l : (i32, i32) -> i32"
        (got,) = guarded(active, body, [a])
        want = np.where(np.tile(on, 128 // n), np.repeat(a.reshape(-1, n)[:, lane % n], n), 0xDEAD)
        np.testing.assert_array_equal(got, want)


@masked
def test_ballot(active: str, on: np.ndarray) -> None:
    a = values(4)
    body = """  %c3 = llvm.mlir.constant(3 : i32) : i32
  %c1 = llvm.mlir.constant(1 : i32) : i32
  %m = llvm.urem %a, %c3 : i32
  %c = llvm.icmp "eq" %m, %c1 : i32
  %bits = rocdl.ballot %c : i64
  %c32 = llvm.mlir.constant(32 : i64) : i64
  %hi = llvm.lshr %bits, %c32 : i64
  %r0 = llvm.trunc %bits : i64 to i32
  %r1 = llvm.trunc %hi : i64 to i32"""
    low, high = guarded(active, body, [a], results=2)
    n = wave()
    on = on[:n]
    for first in range(0, 128, n):
        here = slice(first, first + n)
        bits = sum(1 << lane for lane in range(n) if on[lane] and a[here][lane] % 3 == 1)
        np.testing.assert_array_equal(low[here], np.where(on, bits & 0xFFFFFFFF, 0xDEAD))
        np.testing.assert_array_equal(high[here], np.where(on, bits >> 32, 0xDEAD))


@masked
def test_ds_bpermute_pulls_from_the_lane_at_a_byte_address(active: str, on: np.ndarray) -> None:
    """Address / 4 modulo the wave's size: the two low bits and the high ones do not count."""
    rng, n = np.random.default_rng(5), wave()
    on = on[:n]
    source = rng.integers(0, n, 128)
    address = (source * 4 + rng.integers(0, 4, 128) + 4 * n * rng.integers(0, 3, 128)).astype(np.uint32)
    a = values(6)
    (got,) = guarded(active, "  %r0 = rocdl.ds_bpermute %a, %b : (i32, i32) -> i32", [address, a])
    want = np.where(on[source], a[np.arange(128) // n * n + source], 0)
    np.testing.assert_array_equal(got, np.where(np.tile(on, 128 // n), want, 0xDEAD))


@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mbcnt_counts_the_masks_bits_below_the_lane(half: str) -> None:
    mask, addend = values(7), values(8) >> 8
    got = itemwise(f"\n  %r = rocdl.mbcnt.{half} %a, %b : (i32, i32) -> i32", [("i32", mask), ("i32", addend)], "i32")
    for i, (m, base) in enumerate(zip(mask, addend)):
        lane = i % wave()
        below = min(lane, 32) if half == "lo" else max(lane - 32, 0)
        assert int(got[i]) == int(base) + (int(m) & ((1 << below) - 1)).bit_count()


def test_mbcnt_of_ones_is_the_lane_number() -> None:
    body = """
  %ones = llvm.mlir.constant(-1 : i32) : i32
  %lo = rocdl.mbcnt.lo %ones, %a : (i32, i32) -> i32
  %r = rocdl.mbcnt.hi %ones, %lo : (i32, i32) -> i32"""
    np.testing.assert_array_equal(itemwise(body, [("i32", np.zeros(128, np.uint32))], "i32"), np.arange(128) % wave())


@pytest.mark.parametrize("width", [16, 32])
def test_permlane_swap(width: int) -> None:
    """gfx942 has neither, gfx1250 the one of 16 (llvm-mc 22)."""
    a, b = values(9), values(10)
    body = f"""  %s = rocdl.permlane{width}.swap %a, %b, false, false : (i32, i32) -> !llvm.struct<(i32, i32)>
  %r0 = llvm.extractvalue %s[0] : !llvm.struct<(i32, i32)>
  %r1 = llvm.extractvalue %s[1] : !llvm.struct<(i32, i32)>"""
    if arch() == "gfx942" or (arch() == "gfx1250" and width == 32):
        with pytest.raises(UnknownOperation, match=f"permlane{width}.swap: {arch()} does not have it"):
            guarded(ALL, body, [a, b], results=2)
        return
    first, second = guarded(ALL, body, [a, b], results=2)
    rows_a, rows_b = a.reshape(-1, wave() // width, width).copy(), b.reshape(-1, wave() // width, width).copy()
    for row in range(0, wave() // width, 2):
        rows_a[:, row + 1], rows_b[:, row] = rows_b[:, row].copy(), rows_a[:, row + 1].copy()
    np.testing.assert_array_equal(first, rows_a.reshape(-1))
    np.testing.assert_array_equal(second, rows_b.reshape(-1))


# -- opcodes of the core that no operation is lowered to yet ------------------------------------------------------------------------------


def single(op: str, inputs: list[np.ndarray], *immediates: int) -> np.ndarray:
    """One opcode with one result, built by hand: out[lane] = op(inputs[lane] ...)."""
    b = Builder()
    block = b.blocks
    from fourwave.sim.program import Block

    entry = Block("entry")
    block.append(entry)

    def emit(name: str, *args: Any) -> None:
        entry.code.append(Instruction(name, 0, list(args)))

    pointers = [(b.placeholder(), b.placeholder()) for _ in range(len(inputs) + 1)]
    lane, four, scaled = b.new(), b.constant(4), b.new()
    emit("LANE_ID", lane)
    emit("MUL", scaled, lane, four)

    def address(i: int) -> tuple[int, int]:
        lo, hi = b.new(), b.new()
        emit("ADD64", lo, hi, *pointers[i], scaled, b.constant(0))
        return lo, hi

    loaded = []
    for i in range(len(inputs)):
        value = b.new()
        emit("GLOBAL_LOAD", 0, *address(i), 4, [value])
        loaded.append(value)
    result = b.new()
    emit(op, result, *loaded, *immediates)
    emit("GLOBAL_STORE", 0, *address(len(inputs)), 4, [result])
    emit("END")
    slots = {register: i for i, register in enumerate(b.fixed)}
    program: Program = b.finish(
        name="k", argument_slots=[[slots[r] for r in p] for p in pointers], lds_bytes=0, dynamic_lds=False, lines=[((), 0)], wave_size=64,
        arch="gfx950",
    )  # fmt: skip
    out = np.zeros(64, np.uint32)
    launch(program, *inputs, out)
    return out


def permute_bytes(a: int, b: int, select: int) -> int:
    """V_PERM_B32 (CDNA3 ISA guide): bytes of {a, b}, b the low half; 8 to 11 replicate the sign of a 16-bit half, 12 is 0, from 13 on 0xFF."""
    data = b.to_bytes(4, "little") + a.to_bytes(4, "little")
    out = 0
    for i in range(4):
        s = select >> (8 * i) & 0xFF
        byte = data[s] if s < 8 else (0xFF if data[2 * (s - 8) + 1] & 0x80 else 0) if s < 12 else 0 if s == 12 else 0xFF
        out |= byte << (8 * i)
    return out


def half_toward_zero(x: int) -> int:
    """f32 to f16, toward zero: overflow stops at the largest finite value."""
    from fractions import Fraction

    from exact import F16, F32

    if F32.is_nan(x):
        return F16.nan
    sign = F16.sign if x & F32.sign else 0
    if F32.is_inf(x):
        return sign | F16.inf
    magnitude = abs(F32.value(x))
    code = min(F16.encode(magnitude), F16.inf - 1)
    return sign | (code - 1 if F16.value(code) > magnitude else code) if magnitude != Fraction(0) else sign


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


HAND_BUILT: dict[str, tuple[int, Callable[..., int]]] = {
    "PERM": (3, permute_bytes),
    "ALIGNBYTE": (3, lambda a, b, s: (a << 32 | b) >> (8 * (s & 3)) & 0xFFFFFFFF),
    "UMULH": (2, lambda a, b: a * b >> 32),
    "SMULH": (2, lambda a, b: signed(a) * signed(b) >> 32 & 0xFFFFFFFF),
}


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize("op", HAND_BUILT)
def test_opcodes_built_by_hand(op: str) -> None:
    count, compute = HAND_BUILT[op]
    inputs = [values(20 + i, 1) for i in range(count)]
    if op == "PERM":
        inputs[2] = np.random.default_rng(30).integers(0, 16, (64, 4), dtype=np.uint8).view(np.uint32)[:, 0]
    got = single(op, inputs)
    np.testing.assert_array_equal(got, np.array([compute(*(int(x) for x in row)) for row in zip(*inputs)], np.uint32))


@pytest.mark.archs("gfx950")
def test_ds_permute_pushes_and_the_highest_lane_wins() -> None:
    rng = np.random.default_rng(31)
    target = rng.integers(0, 64, 64)
    a = values(32, 1)
    want = np.zeros(64, np.uint32)
    for lane in range(64):
        want[target[lane]] = a[lane]
    np.testing.assert_array_equal(single("DS_PERMUTE", [(target * 4).astype(np.uint32), a]), want)


@pytest.mark.archs("gfx950")
def test_f32_to_f16_toward_zero() -> None:
    from exact import F16, F32

    codes = [c for c in F32.corners() if not F32.is_nan(c)] + [
        0x477FE000,
        0x477FFFFF,
        0x47800000,
        0x387FFFFF,
        0x33800000,
        0x337FFFFF,
        0x3F801FFF,
    ]
    codes = (codes + F32.random(200, 33))[:64]
    codes = [c for c in codes if not F32.is_nan(c)]
    codes += [0] * (64 - len(codes))
    got = single("F32_TO_F16_RTZ", [F32.array(codes)])
    assert F16.bits == 16
    np.testing.assert_array_equal(got, np.array([half_toward_zero(c) for c in codes], np.uint32))
