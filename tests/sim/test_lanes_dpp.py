"""DPP, ds_swizzle and the gfx10+ permlanes, against tables written out from the guides.

Sources
  DPP: AMD CDNA3 ISA guide, "DPP_CTRL enumeration" and its pseudo code (row_shl N: lane n reads n + N; row_shr N: n - N; row_ror N: n - N around the
  row; wave shifts and rotations by one; mirrors; row_bcast15 to the next row, row_bcast31 to rows 2 and 3). The same list with the assembler's
  names: CLRX documentation, GcnInstrsVop. row_newbcast: LLVM, AMDGPU assembler (gfx90a on); row_xmask: AMD RDNA ISA guides.
  Masks: lanes of rows and banks that a mask leaves out keep the old value. bound_ctrl: a lane without a source gets 0, else keeps it.
  A second witness of directions and masks: FlyDSL's dpp_xor (an XOR over 16 lanes built from row_shr:8, row_shl:8 and bank masks).
  ds_swizzle: AMD CDNA3 ISA guide, DS_SWIZZLE_B32, pseudo code of its modes; reading a lane that is off gives 0.
  permlanex16: AMD RDNA3 ISA guide, V_PERMLANEX16_B32.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from machine import PROLOGUE, arch, launch, load_item, lower, store_item, wave

from fourwave.sim.lowering import UnknownOperation

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

LANES = np.arange(64)
ROW = LANES // 16 * 16
AT = LANES % 16


def inside(lane: np.ndarray, ok: np.ndarray) -> np.ndarray:
    return np.where(ok, lane, -1)


# control word -> the lane that each lane reads, -1: none
SOURCES: dict[int, np.ndarray] = {
    0b11100100: LANES,
    0b00011011: LANES // 4 * 4 + 3 - LANES % 4,
    0b10110001: LANES ^ 1,
    0b01001110: LANES ^ 2,
    0b10101010: LANES // 4 * 4 + 2,
    **{0x100 + n: inside(LANES + n, AT + n < 16) for n in (1, 4, 8, 15)},
    **{0x110 + n: inside(LANES - n, AT >= n) for n in (1, 4, 8, 15)},
    **{0x120 + n: ROW + (AT - n) % 16 for n in (1, 4, 8, 15)},
    0x130: inside(LANES + 1, LANES < 63),
    0x134: (LANES + 1) % 64,
    0x138: inside(LANES - 1, LANES > 0),
    0x13C: (LANES - 1) % 64,
    0x140: ROW + 15 - AT,
    0x141: LANES // 8 * 8 + 7 - LANES % 8,
    0x142: inside(ROW - 1, LANES > 15),
    0x143: inside(np.full(64, 31), LANES > 31),
    **{0x150 + n: ROW + n for n in (0, 7, 15)},
}

ALL = '%go = llvm.icmp "eq" %tid, %tid : i32'
SOME = """%g5 = llvm.mlir.constant(5 : i32) : i32
  %g3 = llvm.mlir.constant(3 : i32) : i32
  %gm = llvm.urem %tid, %g5 : i32
  %go = llvm.icmp "ne" %gm, %g3 : i32"""
MASKS = {"all": (ALL, LANES >= 0), "some": (SOME, LANES % 5 != 3)}


def sources() -> dict[int, np.ndarray]:
    """SOURCES of the arch: from gfx10 on there is row_xmask, but nothing that crosses rows."""
    if wave() == 64:
        return SOURCES
    kept = {
        control: source[:32]
        for control, source in SOURCES.items()
        if not 0x130 <= control <= 0x13F and control not in (0x142, 0x143)
    }
    return kept | {0x160 + n: (ROW + (AT ^ n))[:32] for n in (0, 1, 5, 15)}


def run_all(active: str, bodies: list[str], *inputs: np.ndarray, arch: str | None = None) -> list[np.ndarray]:
    """Run bodies, each of which defines %r from %a, %b, ..., where %go holds, in one kernel; other lanes leave 0xDEAD in each result."""
    names, count = ["%a", "%b", "%c", "%d"][: len(inputs)], len(inputs[0])
    text = (
        PROLOGUE
        + "".join(load_item(n, "i32", f"{n}in") for n in names)
        + f"\n  {active}\n  llvm.cond_br %go, ^inside, ^end\n^inside:"
    )
    for i, body in enumerate(bodies):
        own = re.sub(r"%(r|o|first)\b", rf"%\1_{i}", body)
        text += (
            f"\n  {own}\n  %k{i} = llvm.mlir.constant({i * count} : i64) : i64\n  %i{i} = llvm.add %item, %k{i} : i64"
        )
        text += store_item(f"%r_{i}", "i32", "%out", f"%i{i}")
    arguments = ", ".join([f"{n}in: !llvm.ptr<1>" for n in names] + ["%out: !llvm.ptr<1>"])
    out = np.full((len(bodies), count), 0xDEAD, np.uint32)
    launch(lower(text + "\n  llvm.br ^end\n^end:", arguments, arch=arch), *inputs, out, block=count)
    return list(out)


def run(active: str, body: str, *inputs: np.ndarray, arch: str | None = None) -> np.ndarray:
    return run_all(active, [body], *inputs, arch=arch)[0]


def random(seed: int, count: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def dpp(control: int, rows: int = 15, banks: int = 15, zero: bool = False) -> str:
    return (
        f'%r = "rocdl.update.dpp"(%a, %b) <{{dppCtrl = {control} : i32, rowMask = {rows} : i32, bankMask = {banks} : i32, '
        f"boundCtrl = {str(zero).lower()}}}> : (i32, i32) -> i32"
    )


def expected_dpp(
    old: np.ndarray, new: np.ndarray, source: np.ndarray, on: np.ndarray, rows: int, banks: int, zero: bool
) -> np.ndarray:
    out = np.full(len(old), 0xDEAD, np.uint32)
    for lane in range(len(old)):
        if not on[lane]:
            continue
        if not (rows >> (lane // 16) & 1 and banks >> (lane % 16 // 4) & 1):
            out[lane] = old[lane]
        elif source[lane] < 0 or not on[source[lane]]:
            out[lane] = 0 if zero else old[lane]
        else:
            out[lane] = new[source[lane]]
    return out


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("lanes", MASKS)
def test_update_dpp_of_every_control(lanes: str, zero: bool) -> None:
    active, on = MASKS[lanes]
    old, new = random(1, wave()), random(2, wave())
    results = run_all(active, [dpp(control, zero=zero) for control in sources()], old, new)
    for (control, source), got in zip(sources().items(), results):
        want = expected_dpp(old, new, source, on, 15, 15, zero)
        np.testing.assert_array_equal(got, want, err_msg=f"dpp control {control:#x}")


@pytest.mark.parametrize(("rows", "banks"), [(5, 15), (15, 0xA), (8, 3), (0, 15), (15, 0)])
def test_update_dpp_masks_keep_the_old_value(rows: int, banks: int) -> None:
    old, new = random(3, wave()), random(4, wave())
    got = run(ALL, dpp(0x111, rows, banks, True), old, new)
    np.testing.assert_array_equal(got, expected_dpp(old, new, SOURCES[0x111], LANES >= 0, rows, banks, True))


@pytest.mark.parametrize(
    ("distance", "right", "left", "high", "low"), [(8, 280, 264, 0xC, 0x3), (4, 276, 260, 0xA, 0x5)]
)
def test_an_xor_over_sixteen_lanes_as_public_kernels_build_it(
    distance: int, right: int, left: int, high: int, low: int
) -> None:
    """FlyDSL's dpp_xor: the upper banks read lane - d, the lower ones lane + d, each keeping the other's lanes."""
    x = random(5)
    first = dpp(right, 15, high).replace("%a, %b", "%b, %b").replace("%r", "%first")
    body = first + "\n  " + dpp(left, 15, low).replace("%a, %b", "%first, %b")
    np.testing.assert_array_equal(run(ALL, body, x, x), x[LANES ^ distance])


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("control", [0x100, 0x131, 0x144, 0x160, 0x200])
def test_a_dpp_control_that_gfx9_lacks_raises(control: int) -> None:
    with pytest.raises(UnknownOperation, match="DPP control"):
        run(ALL, dpp(control), random(0), random(1))


def reversed5(i: int) -> int:
    return int(f"{i:05b}"[::-1], 2)


SWIZZLES: dict[int, np.ndarray] = {
    0x041F: LANES ^ 1,  # xor 1, 2, 4, 8, 16 in the and-or-xor mode: as Triton and HIP code reduce over lanes
    0x081F: LANES ^ 2,
    0x101F: LANES ^ 4,
    0x201F: LANES ^ 8,
    0x401F: LANES ^ 16,
    0x0000: LANES & 32,  # and 0: everyone reads lane 0 of its half
    0x0018 | 5 << 5: (LANES & 32) | (LANES & 0x18) | 5,
    0x8000 | 0b00011011: LANES // 4 * 4 + 3 - LANES % 4,
    0xC000 | 3 << 5: (LANES & 32) | (LANES + 3) % 32,
    0xC000 | 1 << 10 | 3 << 5: (LANES & 32) | (LANES - 3) % 32,
    0xC000 | 3 << 5 | 0x18: (LANES & 32) | (LANES & 0x18) | (LANES + 3) % 8,
    0xE000: np.array([(i & 32) | reversed5(i & 31) for i in range(64)]),
    0xE010: np.array([(i & 32) | reversed5(i & 31) >> 1 | (i & 16) for i in range(64)]),
}


@pytest.mark.parametrize("lanes", MASKS)
def test_ds_swizzle_of_every_mode(lanes: str) -> None:
    active, on = MASKS[lanes]
    x = random(6)
    text = "%o = llvm.mlir.constant({} : i32) : i32\n  %r = rocdl.ds_swizzle %a, %o : (i32, i32) -> i32"
    for (offset, source), got in zip(SWIZZLES.items(), run_all(active, [text.format(o) for o in SWIZZLES], x)):
        want = np.where(on, np.where(on[source], x[source], 0), 0xDEAD)
        np.testing.assert_array_equal(got, want, err_msg=f"ds_swizzle offset {offset:#x}")


def test_wavefrontsize() -> None:
    """64 on CDNA; gfx1250 has waves of 32 only (LLVM, AMDGPUUsage, wavefrontsize)."""
    want = 32 if arch() == "gfx1250" else 64
    np.testing.assert_array_equal(run(ALL, "%r = rocdl.wavefrontsize : i32", random(0)), want)


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize("control", [0x100, 0x130, 0x13C, 0x142, 0x143, 0x170])
def test_a_dpp_control_that_gfx1250_lacks_raises(control: int) -> None:
    with pytest.raises(UnknownOperation, match="DPP control"):
        run(ALL, dpp(control), random(0), random(1))


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize(("fi", "bound"), [(False, False), (True, False), (False, True)])
def test_permlanex16(fi: bool, bound: bool) -> None:
    """Lane i of a row reads, in the other row of its pair, the lane that its four bits of the two scalars name."""
    old, new = random(7, 32), random(8, 32)
    select = np.random.default_rng(9).integers(0, 16, 16)
    lo, hi = (sum(int(s) << (4 * i) for i, s in enumerate(select[h : h + 8])) for h in (0, 8))
    on = np.arange(32) % 5 != 3
    body = f'%r = "rocdl.permlanex16"(%a, %b, %c, %d) <{{fi = {str(fi).lower()}, boundControl = {str(bound).lower()}}}> : (i32, i32, i32, i32) -> i32'
    got = run(SOME, body, old, new, np.full(32, lo, np.uint32), np.full(32, hi, np.uint32), arch="gfx1250")
    want = np.full(32, 0xDEAD, np.uint32)
    for lane in range(32):
        source = (lane // 16 ^ 1) * 16 + int(select[lane % 16])
        if on[lane]:
            want[lane] = new[source] if fi or on[source] else 0 if bound else old[lane]
    np.testing.assert_array_equal(got, want)


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize("crossed", [False, True])
def test_permlane16_var(crossed: bool) -> None:
    """The same with a select per lane; AMD RDNA4 ISA guide, V_PERMLANE16_VAR_B32."""
    old, new, select = random(10, 32), random(11, 32), np.random.default_rng(12).integers(0, 16, 32, dtype=np.uint32)
    name = "permlanex16" if crossed else "permlane16"
    body = f'%r = "rocdl.{name}.var"(%a, %b, %c) <{{fi = false, boundControl = false}}> : (i32, i32, i32) -> i32'
    got = run(ALL, body, old, new, select, arch="gfx1250")
    row = np.arange(32) // 16 ^ int(crossed)
    np.testing.assert_array_equal(got, new[row * 16 + select])


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("name", ["permlanex16", "permlane16.var", "permlanex16.var"])
def test_permlanes_of_later_archs(name: str) -> None:
    selects, types = ("%a, %b", "i32, i32") if name == "permlanex16" else ("%a", "i32")
    body = f'%r = "rocdl.{name}"(%a, %b, {selects}) <{{fi = false, boundControl = false}}> : (i32, i32, {types}) -> i32'
    with pytest.raises(UnknownOperation, match=f"{arch()} does not have it"):
        run(ALL, body, random(0), random(1))
