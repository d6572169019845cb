"""gfx1250's tensor data mover: which bytes it moves, when, and what the checkers say.

Descriptor fields: AMD CDNA5 ISA guide, sections 10.11.1 to 10.11.6, as two readers of it agree: ROCm/rocm-systems emulation/rocjitsu
(isa/arch/amdgpu/shared/tensor_dma.h) and Triton (third_party/amd/lib/TritonAMDGPUToLLVM/TDMUtility.cpp, comments of createTDMDescriptor);
FlyDSL's expr/rocdl/tdm_ops.py builds the same for two dimensions and gather. Elements outside the tensor read as zero and are not written;
padding is of loads only; the pad interval is 2**(field + 1) dwords, the pad amount field + 1 dwords. `Tile` below writes the fields, and
`moves` says element by element where each comes from, both from those sources.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import machine
import numpy as np
import pytest
from machine import Address, launch, lower, only

from fourwave.sim import mutate
from fourwave.sim.lowering import lower_kernel
from fourwave.sim.report import Report

pytestmark = pytest.mark.archs("gfx1250", "gfx1250 by intrinsics")

LDS = 8192


@dataclass
class Tile:
    """A tile of a tensor; dimension 0 is the innermost. Strides are of dimensions 1 and up, in elements."""

    tile: tuple[int, ...]
    tensor: tuple[int, ...]
    strides: tuple[int, ...] = ()
    size: int = 2  # bytes an element
    lds: int = 0
    start: int = 0  # element of the array that the tile begins with
    pad: tuple[int, int] | None = None  # interval and amount in dwords
    rows: tuple[int, ...] | None = None  # gather
    wide_rows: bool = True
    mask: int = 0
    count: int = 1
    extra: dict[int, int] = field(default_factory=dict)  # descriptor word -> bits to set

    def words(self, address: int) -> np.ndarray:
        address += self.start * self.size
        bits = [0] * 20

        def put(first: int, width: int, value: int) -> None:
            assert 0 <= value < 1 << width, (first, width, value)
            for i in range(width):
                bits[(first + i) // 32] |= (value >> i & 1) << (first + i) % 32

        g1, g2, g3 = 128, 384, 512
        put(0, 2, self.count)
        put(32, 32, self.lds)
        put(64, 57, address)
        put(126, 2, 2)
        put(g1, 16, self.mask)
        put(g1 + 16, 2, self.size.bit_length() - 1)
        if self.pad:
            put(g1 + 20, 1, 1)
            put(g1 + 22, 3, self.pad[0].bit_length() - 2)
            put(g1 + 25, 7, self.pad[1] - 1)
        tensor, tile, strides = (*self.tensor, 0, 0, 0, 0), (*self.tile, 0, 0, 0, 0), (*self.strides, 0, 0, 0, 0)
        put(g1 + 48, 32, tensor[0])
        put(g1 + 80, 32, tensor[1])
        put(g1 + 112, 16, tile[0])
        put(g1 + 160, 48, strides[0])
        if self.rows is not None:
            put(31, 1, 1)
            put(30, 1, int(self.wide_rows))
            put(g1 + 128, 16, len(self.rows))
            width = 32 if self.wide_rows else 16
            for i, row in enumerate(self.rows):
                put(g2 + i * width, width, row)
        else:
            put(g1 + 128, 16, tile[1])
            put(g1 + 144, 16, tile[2])
            put(g1 + 208, 48, strides[1])
            put(g2, 32, tensor[2])
            put(g2 + 32, 32, tensor[3])
            put(g2 + 64, 48, strides[2])
            put(g2 + 112, 16, tile[3])
            put(g3, 48, strides[3])
            put(g3 + 48, 32, tensor[4])
            put(g3 + 80, 16, tile[4])
        for word, value in self.extra.items():
            bits[word] |= value
        return np.array(bits, np.uint32)

    def moves(self, store: bool = False) -> Iterator[tuple[int, int, bool]]:
        """(byte in the array, byte in LDS, inside the tensor) of each element, innermost dimension fastest."""
        if self.rows is not None:
            places: Iterator[tuple[int, ...]] = itertools.product(range(len(self.rows)), range(self.tile[0]))
        else:
            places = itertools.product(*(range(n) for n in reversed(self.tile)))
        for number, place in enumerate(places):
            at = list(reversed(place))
            if self.rows is not None:
                at[1] = self.rows[at[1]]
            inside = all(x < n for x, n in zip(at, self.tensor))
            element = self.start + at[0] + sum(x * s for x, s in zip(at[1:], self.strides))
            lds = number * self.size
            if self.pad and not store:
                lds += lds // (4 * self.pad[0]) * 4 * self.pad[1]
            yield element * self.size, self.lds + lds, inside


PROLOGUE = """
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %c0 = llvm.mlir.constant(0 : i32) : i32
  %p1 = llvm.getelementptr %words[16] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8
  %p2 = llvm.getelementptr %words[48] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8
  %p3 = llvm.getelementptr %words[64] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8
  %g0 = llvm.load %words : !llvm.ptr<1> -> vector<4xi32>
  %g1 = llvm.load %p1 : !llvm.ptr<1> -> vector<8xi32>
  %g2 = llvm.load %p2 : !llvm.ptr<1> -> vector<4xi32>
  %g3 = llvm.load %p3 : !llvm.ptr<1> -> vector<4xi32>
  %g4 = llvm.mlir.constant(dense<0> : vector<8xi32>) : vector<8xi32>
"""
LOAD = "\n  rocdl.tensor.load.to.lds %g0, %g1, %g2, %g3, %g4, 0 : vector<4xi32>, vector<8xi32>"
STORE = LOAD.replace("load.to", "store.from")
WAIT = "\n  rocdl.s.wait.tensorcnt 0"
DSWAIT = "\n  rocdl.s.wait.dscnt 0"
BARRIER = "\n  rocdl.s.barrier.signal id = -1\n  rocdl.s.barrier.wait id = -1"
LANE_BYTES = LDS // 32
FILL = f"""
  %mine = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<{LANE_BYTES} x i8>
  %from = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{LANE_BYTES} x i8>
  %before = llvm.load %from {{alignment = 4 : i64}} : !llvm.ptr<1> -> vector<{LANE_BYTES}xi8>
  llvm.store %before, %mine {{alignment = 4 : i64}} : vector<{LANE_BYTES}xi8>, !llvm.ptr<3>"""
DUMP = f"""
  %after = llvm.load %mine {{alignment = 4 : i64}} : !llvm.ptr<3> -> vector<{LANE_BYTES}xi8>
  llvm.store %after, %from {{alignment = 4 : i64}} : vector<{LANE_BYTES}xi8>, !llvm.ptr<1>"""


def run(
    body: str, tile: Tile, array: np.ndarray | Address, out: np.ndarray, block: int = 32, **options: object
) -> Report:
    address = array.array.ctypes.data + array.offset if isinstance(array, Address) else array.ctypes.data
    program = lower(PROLOGUE + body, "%words: !llvm.ptr<1>, %in: !llvm.ptr<1>, %out: !llvm.ptr<1>", LDS, "gfx1250")
    return launch(program, tile.words(address), array, out, block=block, **options)  # type: ignore[arg-type]


def pattern(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, count, dtype=np.uint8)


SHAPES = {
    "1d": Tile((100,), (4000,), size=4, start=7),
    "1d edge": Tile((100,), (61,), size=4),
    "2d": Tile((16, 8), (1000, 1000), (40,), start=83),
    "2d bytes": Tile((48, 20), (500, 500), (64,), size=1),
    "2d odd rows of bytes": Tile((3, 9), (500, 500), (61,), size=1, lds=5),
    "2d longs": Tile((8, 6), (500, 500), (20,), size=8),
    "2d inner edge": Tile((16, 8), (11, 1000), (40,)),
    "2d outer edge": Tile((16, 8), (1000, 5), (40,)),
    "2d both edges": Tile((16, 8), (3, 2), (40,), size=4),
    "2d empty": Tile((16, 8), (0, 8), (40,)),
    "2d stride 0": Tile((16, 8), (16, 8), (0,)),
    "3d": Tile((8, 4, 3), (100, 100, 100), (24, 200), size=4),
    "3d edges": Tile((8, 4, 3), (7, 3, 2), (24, 200), size=2),
    "4d": Tile((4, 3, 2, 3), (50, 50, 50, 50), (16, 80, 300)),
    "4d edges": Tile((4, 3, 2, 3), (3, 9, 1, 2), (16, 80, 300), size=4),
    "5d": Tile((4, 2, 3, 2, 2), (50, 50, 50, 50, 50), (16, 50, 200, 500), size=1),
    "5d edges": Tile((4, 2, 3, 2, 2), (4, 2, 2, 2, 1), (16, 50, 200, 500), size=4),
    "padded": Tile((32, 8), (1000, 1000), (64,), pad=(16, 4)),
    "padded bytes": Tile((128, 10), (1000, 1000), (200,), size=1, pad=(32, 4), lds=16),
    "padded within a row": Tile((64, 4), (1000, 1000), (64,), pad=(8, 1)),
    "padded across rows": Tile((12, 10), (1000, 1000), (20,), size=4, pad=(32, 2)),
    "padded edges": Tile((32, 8), (21, 5), (64,), pad=(16, 128)),
    "smallest padding": Tile((32, 8), (32, 8), (64,), pad=(2, 1)),
    "largest interval": Tile((128, 4), (128, 4), (128,), size=4, pad=(256, 3)),
    "gather 32": Tile((24,), (1000, 40), (40,), rows=(3, 0, 39, 7, 7, 40, 12, 100), size=4),
    "gather 16": Tile((24,), (1000, 60), (40,), rows=tuple((7 * i + 2) % 61 for i in range(16)), wide_rows=False),
    "gather few": Tile((16,), (9, 60), (40,), rows=(5, 1, 59), size=1, wide_rows=False),
    "gather padded": Tile((32,), (32, 60), (40,), rows=(5, 1, 60, 2), pad=(16, 4)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("completion", ["late", "early"])
def test_load(name: str, completion: str) -> None:
    tile = SHAPES[name]
    source, out = pattern(16384), pattern(LDS, 1)
    want = out.copy()
    for at, lds, inside in tile.moves():
        want[lds : lds + tile.size] = source[at : at + tile.size] if inside else 0
    run(FILL + DSWAIT + LOAD + WAIT + DUMP, tile, source, out, completion=completion)
    np.testing.assert_array_equal(out, want)


def test_a_shifted_tile_is_a_fault_to_plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """mutate.shift_copy, as for other copies to LDS: the descriptor's LDS address."""
    tile = Tile((32, 4), (64, 16), (64,))
    source, out, shifted = pattern(16384), pattern(LDS, 1), pattern(LDS, 1)
    run(FILL + DSWAIT + LOAD + WAIT + DUMP, tile, source, out)
    monkeypatch.setattr(machine, "lower_kernel", functools.partial(lower_kernel, mutate=mutate.shift_copy(0, by=32)))
    run(FILL + DSWAIT + LOAD + WAIT + DUMP, tile, source, shifted)
    size = 2 * 32 * 4
    np.testing.assert_array_equal(shifted[32 : 32 + size], out[:size])
    np.testing.assert_array_equal(shifted[:32], pattern(LDS, 1)[:32])


@pytest.mark.parametrize("name", [n for n in SHAPES if "stride 0" not in n])
@pytest.mark.parametrize("completion", ["late", "early"])
def test_store(name: str, completion: str) -> None:
    tile = SHAPES[name]
    target, data = pattern(16384), pattern(LDS, 1)
    want = target.copy()
    for at, lds, inside in tile.moves(store=True):
        if inside:
            want[at : at + tile.size] = data[lds : lds + tile.size]
    run(
        FILL + DSWAIT + STORE + WAIT,
        tile,
        target,
        data,
        completion=completion,
        checks=("memory", "init", "race", "wait", "barrier"),
    )
    np.testing.assert_array_equal(target, want)


def test_a_count_of_zero_moves_nothing() -> None:
    tile = Tile((16, 8), (16, 8), (40,), count=0)
    source, out = pattern(16384), pattern(LDS, 1)
    want = out.copy()
    run(FILL + DSWAIT + LOAD + WAIT + DUMP, tile, source, out)
    np.testing.assert_array_equal(out, want)


def test_the_intrinsic_with_two_groups() -> None:
    """llvm.amdgcn.tensor.load.to.lds.d2 (LLVM, IntrinsicsAMDGPU.td): groups 0 and 1 and a cache policy."""
    tile = SHAPES["2d both edges"]
    source, out = pattern(16384), pattern(LDS, 1)
    want = out.copy()
    for at, lds, inside in tile.moves():
        want[lds : lds + tile.size] = source[at : at + tile.size] if inside else 0
    call = (
        '\n  llvm.call_intrinsic "llvm.amdgcn.tensor.{}.d2"(%g0, %g1, %c0) : (vector<4xi32>, vector<8xi32>, i32) -> ()'
    )
    run(FILL + DSWAIT + call.format("load.to.lds") + WAIT + DUMP, tile, source, out)
    np.testing.assert_array_equal(out, want)


@pytest.mark.archs("gfx1250")
def test_the_intrinsic_that_stores_two_groups() -> None:
    tile = SHAPES["2d both edges"]
    data, memory = pattern(LDS, 1), pattern(16384)
    want = memory.copy()
    for at, lds, inside in tile.moves(store=True):
        if inside:
            want[at : at + tile.size] = data[lds : lds + tile.size]
    call = '\n  llvm.call_intrinsic "llvm.amdgcn.tensor.store.from.lds.d2"(%g0, %g1, %c0) : (vector<4xi32>, vector<8xi32>, i32) -> ()'
    run(FILL + DSWAIT + call + WAIT, tile, memory, data, checks=("memory", "init", "race", "wait", "barrier"))
    np.testing.assert_array_equal(memory, want)


def test_the_bounds_of_the_allocation() -> None:
    """The last row's elements outside the tensor may lie outside the allocation; one inside the tensor may not."""
    rows = Tile((16, 4), (16, 3), (16,), size=4)
    source, out = pattern(16384), pattern(LDS, 1)
    run(FILL + DSWAIT + LOAD + WAIT + DUMP, rows, Address(source, 0, 3 * 64), out)
    report = run(FILL + DSWAIT + LOAD + WAIT + DUMP, rows, Address(source, 0, 3 * 64 - 1), out, expect="memory")
    assert "reads global memory outside" in only(report).message
    assert (out[128:192] == 0).all()
    report = run(FILL + DSWAIT + STORE + WAIT, rows, Address(source, 0, 3 * 64 - 1), out, expect="memory")
    assert "writes global memory outside" in only(report).message


def test_past_the_end_of_lds() -> None:
    tile = Tile((16, 4), (16, 4), (16,), size=4, lds=LDS - 255)
    report = run(FILL + DSWAIT + LOAD + WAIT, tile, pattern(16384), pattern(LDS, 1), expect="memory")
    assert "writes LDS past" in only(report).message


@pytest.mark.parametrize(("tile", "kind", "text"), [
    (Tile((16, 4), (16, 4), (16,), extra={0: 2}), "memory", "malformed"),  # a count of 3
    (Tile((16, 4), (16, 4), (16,), extra={3: 1 << 30}), "memory", "malformed"),  # type 3
    (Tile((16, 4), (16, 4), (16,), extra={0: 1 << 30}), "memory", "malformed"),  # wide indices without gather
    (Tile((16, 0, 2), (16, 4, 2), (16, 64)), "memory", "malformed"),  # a hole among the tile's dimensions
    (Tile((16,), (16, 4), (16,), rows=tuple(range(8)), extra={8: 1}), "memory", "malformed"),  # nine wide indices
    (Tile((16, 4), (16, 4), (16,), extra={4: 1 << 19}), "limit", "not modelled"),  # iteration
    (Tile((16, 4), (16, 4), (16,), extra={4: 1 << 18}), "limit", "not modelled"),  # arrives at an LDS barrier
    (Tile((16, 4), (16, 4), (16,), mask=2), "memory", "leaves out the workgroup"),
])  # fmt: skip
def test_descriptors_that_are_refused(tile: Tile, kind: str, text: str) -> None:
    out = pattern(LDS, 1)
    want = out.copy()
    report = run(FILL + DSWAIT + LOAD + WAIT + DUMP, tile, pattern(16384), out, expect=kind)
    assert text in only(report).message
    np.testing.assert_array_equal(out, want)


def test_a_descriptor_that_differs_between_lanes() -> None:
    body = (
        FILL
        + DSWAIT
        + "\n  %bad = llvm.insertelement %tid, %g1[%c0 : i32] : vector<8xi32>"
        + LOAD.replace("%g1", "%bad")
        + WAIT
    )
    report = run(body, Tile((16,), (16,)), pattern(16384), pattern(LDS, 1), expect=None)
    assert any("differs between lanes" in f.message for f in report.findings), report


# -- order -------------------------------------------------------------------------------------------------------------

HALF = Tile((64,), (64,), size=4)  # 256 bytes: the LDS of lane 0 in FILL and DUMP


def test_reading_before_the_wait() -> None:
    """completion = late: the load has not landed; early: it has. The missing wait is reported either way only where it shows."""
    source, out = pattern(16384), pattern(LDS, 1)
    before = out.copy()
    report = run(FILL + DSWAIT + LOAD + DUMP + WAIT, HALF, source, out, expect="wait")
    assert "its own copy has not reached" in only(report).message
    np.testing.assert_array_equal(out, before)
    run(FILL + DSWAIT + LOAD + DUMP + WAIT, HALF, source, out, completion="early")
    np.testing.assert_array_equal(out[:256], source[:256])


def test_a_load_that_nothing_waits_for() -> None:
    report = run(FILL + DSWAIT + LOAD, HALF, pattern(16384), pattern(LDS, 1), expect="wait")
    assert "ends with a copy" in only(report).message


def test_a_store_that_nothing_waits_for_completes() -> None:
    """Global memory is read after the launch, which ends when its stores have."""
    target, data = pattern(16384), pattern(LDS, 1)
    run(FILL + DSWAIT + STORE, HALF, target, data)
    np.testing.assert_array_equal(target[:256], data[:256])


def test_tensorcnt_counts_in_order() -> None:
    """Two loads, a wait for all but one: the first has landed, the second has not."""
    second = "\n  %g0b = llvm.insertelement %there, %g0[%one : i32] : vector<4xi32>" + LOAD.replace("%g0", "%g0b")
    consts = "\n  %one = llvm.mlir.constant(1 : i32) : i32\n  %there = llvm.mlir.constant(4096 : i32) : i32"
    source, out = pattern(16384), pattern(LDS, 1)
    before = out.copy()
    body = FILL + DSWAIT + consts + LOAD + second + WAIT.replace("0", "1") + DUMP + WAIT
    report = run(body, HALF, source, out, expect="wait")
    np.testing.assert_array_equal(out[:256], source[:256])
    np.testing.assert_array_equal(out[256:], before[256:])
    assert only(report).address == 4096
    run(body.replace("tensorcnt 1", "tensorcnt 0"), HALF, source, out)
    np.testing.assert_array_equal(out[4096:4352], source[:256])


def test_storing_what_the_wave_has_not_waited_for() -> None:
    """The data mover is not behind the wave's own LDS stores in their queue."""
    report = run(FILL + STORE + WAIT, HALF, pattern(16384), pattern(LDS, 1), expect="wait")
    assert "dscnt" in only(report).message


OTHER_WAVE = """
  %c32 = llvm.mlir.constant(32 : i32) : i32
  %second = llvm.icmp "uge" %tid, %c32 : i32
"""


def two_waves(body: str) -> str:
    return body.replace(f"array<{LANE_BYTES} x i8>", f"array<{LANE_BYTES // 2} x i8>").replace(
        f"vector<{LANE_BYTES}xi8>", f"vector<{LANE_BYTES // 2}xi8>"
    )


ONE_LOADS = """
  llvm.cond_br %second, ^rest, ^load
^load:""" + LOAD + WAIT + "\n  llvm.br ^rest\n^rest:"  # fmt: skip


def test_between_waves() -> None:
    """Wave 0 loads and waits; both read after a barrier. Without it, and with the wait behind it, a race."""
    source, out = pattern(16384), pattern(LDS, 1)
    want = out.copy()
    want[:256] = source[:256]
    head = two_waves(FILL) + DSWAIT + OTHER_WAVE + BARRIER
    for schedule in ("forward", "reverse", "random:3"):
        copy = out.copy()
        run(head + ONE_LOADS + BARRIER + two_waves(DUMP), HALF, source, copy, block=64, schedule=schedule)
        np.testing.assert_array_equal(copy, want)
    # HALF covers LDS bytes 0 to 255, which lanes 0 and 1 of wave 0 read; let wave 1 read them by turning the lanes round
    turned = "\n  %turn = llvm.xor %tid, %c32 : i32\n" + two_waves(DUMP).replace("%mine", "%theirs").replace(
        "%from", "%back"
    )
    turned = turned.replace("%turn = llvm.xor %tid, %c32 : i32", f"""%turn = llvm.xor %tid, %c32 : i32
  %theirs = llvm.getelementptr %lds[%turn] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<{LANE_BYTES // 2} x i8>
  %back = llvm.getelementptr %out[%turn] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{LANE_BYTES // 2} x i8>""")  # fmt: skip
    nothing = ("memory", "init", "race", "wait", "barrier")
    run(head + ONE_LOADS + BARRIER + turned, HALF, source, out.copy(), block=64, checks=nothing)
    run(head + ONE_LOADS + turned, HALF, source, out.copy(), block=64, checks=nothing, expect="race")
    late = ONE_LOADS.replace(WAIT, "") + BARRIER + turned + WAIT
    report = run(head + late, HALF, source, out.copy(), block=64, checks=nothing, schedule="reverse", expect="wait")
    assert "another wave's copy" in only(report).message
    run(head + late, HALF, source, out.copy(), block=64, checks=nothing, expect="race")  # wave 0 has waited meanwhile
    # the wait between the barrier's halves: what the wave signals does not cover the load
    between = ONE_LOADS.replace(WAIT, "") + BARRIER.replace("signal id = -1", "signal id = -1" + WAIT) + turned
    run(head + between, HALF, source, out.copy(), block=64, checks=nothing, expect="race")


def test_overwriting_what_a_store_still_reads() -> None:
    """Wave 0 stores LDS to memory; wave 1 writes there after a barrier. The wait must come before the barrier."""
    one_stores = ONE_LOADS.replace("tensor.load.to.lds", "tensor.store.from.lds")
    write = two_waves(FILL).replace("%mine", "%again").replace("%from", "%whence").replace("%before", "%what")
    turned = "\n  %turn = llvm.xor %tid, %c32 : i32" + write.replace("[%tid]", "[%turn]")
    head = two_waves(FILL) + DSWAIT + OTHER_WAVE + BARRIER
    run(head + one_stores + BARRIER + turned, HALF, pattern(16384), pattern(LDS, 1), block=64)
    run(head + one_stores + turned, HALF, pattern(16384), pattern(LDS, 1), block=64, expect="race")
    late = one_stores.replace(WAIT, "") + BARRIER + turned + WAIT
    report = run(head + late, HALF, pattern(16384), pattern(LDS, 1), block=64, schedule="reverse", expect="race")
    assert "may still be reading" in only(report).message


def test_loads_of_one_wave_into_the_same_place_are_in_order() -> None:
    tile = Tile((3, 9), (500, 500), (61,), size=1, lds=5)  # rows that share dwords
    source, out = pattern(16384), pattern(LDS, 1)
    run(FILL + DSWAIT + LOAD + LOAD + WAIT + DUMP, tile, source, out)


def test_other_archs_do_not_have_it() -> None:
    from fourwave.sim import UnknownOperation

    with pytest.raises(UnknownOperation, match="gfx950 does not have it"):
        lower(PROLOGUE + LOAD, "%words: !llvm.ptr<1>", LDS, "gfx950")
