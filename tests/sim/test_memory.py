"""Loads, stores, addresses, buffer resources, copies to LDS, transposing reads: which bytes move, and which do not.

Sources
  LLVM Language Reference, "load", "store", "getelementptr"; struct layout: the host C ABI (ctypes), which LLVM's data layout for amdgcn
  agrees with for these types.
  Buffer range check: AMD CDNA3 and CDNA4 ISA guides, section 9.1.5 (out-of-range reads return zero, writes are dropped, dwords one by one).
  Whether soffset takes part, and where sums wrap, the guides leave to the reader; ROCm/rocm-systems emulation/rocjitsu
  .../amdgpu/shared/addr_calc_buffer.h, whose authors compared with a gfx950, says: voffset + instruction offset wraps at 32 bits, soffset is
  added without wrapping and takes part, dword i is in range while offset + 4 * (i + 1) <= num_records. (LLVM's IntrinsicsAMDGPU.td calls
  soffset "excluded from bounds checking"; the gfx950 observation is followed.)
  Copies to LDS: LLVM docs/AMDGPUDMAOperations.md and CDNA4 ISA guide, section 9.1.9: base + instruction offset + 4 * lane for a dword,
  16 * lane for three and four dwords; the base is the wave's (M0). Lanes with EXEC off move nothing. That lanes out of the buffer's range
  write zeros to LDS follows from "reads return zero"; no guide says it of LDS in so many words.
  Transposing read: CDNA4 ISA guide, section 11.4; the lane map is ck_tile's DefaultTranspose::Quad16 (composable_kernel
  include/ck_tile/core/tensor/load_tile_transpose.hpp): lane (group, row, block of 4 columns) reads, lane = column receives rows 0 to 3.
"""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from machine import PROLOGUE, Address, launch, load_item, lower, only, store_item

from fourwave.sim import UnknownOperation

TYPES = {
    "i8": 1, "i16": 2, "bf16": 2, "vector<3xi8>": 3, "i32": 4, "f32": 4, "vector<2xf16>": 4, "vector<5xi8>": 5, "vector<3xi16>": 6,
    "vector<7xi8>": 7, "i64": 8, "vector<4xbf16>": 8, "vector<9xi8>": 9, "vector<5xi16>": 10, "vector<11xi8>": 11, "vector<3xi32>": 12,
    "vector<13xi8>": 13, "vector<7xi16>": 14, "vector<15xi8>": 15, "vector<4xf32>": 16, "vector<8xi16>": 16, "vector<9xi16>": 18,
    "vector<8xi32>": 32, "vector<16xbf16>": 32,
}  # fmt: skip


def pattern(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, count, dtype=np.uint8)


@pytest.mark.parametrize("t", TYPES)
def test_global_loads_and_stores_touch_exactly_their_bytes(t: str) -> None:
    """Lane i moves size bytes at 40 * i; the allocations end with the last lane's last byte, the bytes between stay."""
    size = TYPES[t]
    body = f"""
  %tid = rocdl.workitem.id.x : i32
  %a = llvm.getelementptr %in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<40 x i8>
  %b = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<40 x i8>
  %v = llvm.load %a {{alignment = 1 : i64}} : !llvm.ptr<1> -> {t}
  llvm.store %v, %b {{alignment = 1 : i64}} : {t}, !llvm.ptr<1>"""
    source, out = pattern(40 * 64), np.full(40 * 64, 0xEE, np.uint8)
    end = 40 * 63 + size
    launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), Address(source, 0, end), Address(out, 0, end))
    moved = (np.arange(40 * 64) % 40) < size
    np.testing.assert_array_equal(out, np.where(moved, source, 0xEE))


@pytest.mark.parametrize("t", TYPES)
def test_lds_loads_and_stores_touch_exactly_their_bytes(t: str) -> None:
    size = TYPES[t]
    body = f"""
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %a = llvm.getelementptr %in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<40 x i8>
  %b = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<40 x i8>
  %c = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<40 x i8>
  %v = llvm.load %a {{alignment = 1 : i64}} : !llvm.ptr<1> -> {t}
  llvm.store %v, %c {{alignment = 1 : i64}} : {t}, !llvm.ptr<3>
  %w = llvm.load %c {{alignment = 1 : i64}} : !llvm.ptr<3> -> !llvm.array<1 x i8>
  %all = llvm.load %c {{alignment = 1 : i64}} : !llvm.ptr<3> -> vector<40xi8>
  llvm.store %all, %b {{alignment = 1 : i64}} : vector<40xi8>, !llvm.ptr<1>""".replace(
        "\n  %w = llvm.load %c {alignment = 1 : i64} : !llvm.ptr<3> -> !llvm.array<1 x i8>", ""
    )
    source, out = pattern(40 * 64), np.zeros(40 * 64, np.uint8)
    report = launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=40 * 64), source, out, expect=None)
    moved = (np.arange(40 * 64) % 40) < size
    np.testing.assert_array_equal(out, np.where(moved, source, 0xFF))  # LDS starts as 0xFF bytes
    assert {f.kind for f in report.findings} == {"init"}  # the bytes between
    exact = body.replace("vector<40xi8>", t)  # reading only what was written
    out[:] = 0
    launch(lower(exact, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=40 * 63 + size), source, out)
    np.testing.assert_array_equal(out, np.where(moved, source, 0))


class Record(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_int8), ("b", ctypes.c_int32), ("c", ctypes.c_int16 * 4), ("d", ctypes.c_int64), ("e", ctypes.c_int8),
    ]  # fmt: skip


class Packed(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = Record._fields_


RECORD = "struct<(i8, i32, array<4 x i16>, i64, i8)>"
PACKED = "struct<packed (i8, i32, array<4 x i16>, i64, i8)>"


def gep_offset(pointer: str, index: str, types: str, element: str, values: list[tuple[str, np.ndarray]]) -> np.ndarray:
    """Bytes that a getelementptr adds, per lane; values are %x, %y, one item a lane."""
    names = ["%x", "%y"][: len(values)]
    space = 3 if "ptr<3>" in pointer else 1
    base = "llvm.inttoptr %zero : i64 to !llvm.ptr<1>" if space == 1 else "llvm.mlir.addressof @lds : !llvm.ptr<3>"
    body = PROLOGUE + "".join(load_item(n, t, f"{n}in") for n, (t, _) in zip(names, values))
    body += f"""
  %zero = llvm.mlir.constant(0x500000000000 : i64) : i64
  %p = {base}
  %q = llvm.getelementptr %p[{index}] : ({", ".join([pointer, *([types] if types else [])])}) -> {pointer}, {element}
  %r = llvm.ptrtoint %q : {pointer} to i{64 if space == 1 else 32}"""
    t = "i64" if space == 1 else "i32"
    body += store_item("%r", t, "%out")
    arguments = ", ".join([*(f"{n}in: !llvm.ptr<1>" for n in names), "%out: !llvm.ptr<1>"])
    out = np.zeros(64, np.uint64 if space == 1 else np.uint32)
    launch(lower(body, arguments, lds=64), *(v for _, v in values), out)
    return (out - np.uint64(0x500000000000)).view(np.int64) if space == 1 else out.view(np.int32)


LANES = np.arange(64)


@pytest.mark.parametrize(("layout", "text"), [(Record, RECORD), (Packed, PACKED)], ids=["natural", "packed"])
def test_gep_through_structs_and_arrays(layout: type[ctypes.Structure], text: str) -> None:
    x, y = (LANES * 7 - 100).astype(np.int32), (LANES % 4).astype(np.int64)
    size = ctypes.sizeof(layout)
    for field, name in enumerate("abcde"):
        got = gep_offset("!llvm.ptr<1>", f"%x, {field}", "i32", f"!llvm.{text}", [("i32", x.view(np.uint32))])
        np.testing.assert_array_equal(got, x.astype(np.int64) * size + getattr(layout, name).offset, err_msg=name)
    got = gep_offset(
        "!llvm.ptr<1>",
        "%x, 2, %y",
        "i32, i64",
        f"!llvm.{text}",
        [("i32", x.view(np.uint32)), ("i64", y.view(np.uint64))],
    )
    np.testing.assert_array_equal(got, x.astype(np.int64) * size + layout.c.offset + 2 * y)
    got = gep_offset("!llvm.ptr<1>", "-3, 2, 3", "", f"!llvm.{text}", [])
    np.testing.assert_array_equal(got, np.full(64, -3 * size + layout.c.offset + 6))


@pytest.mark.parametrize(("element", "stride"), [
    ("i8", 1), ("i16", 2), ("bf16", 2), ("f32", 4), ("i64", 8), ("!llvm.ptr<1>", 8), ("!llvm.ptr<3>", 4), ("vector<4xf32>", 16), ("vector<3xi32>", 16),
    ("vector<2xi8>", 2), ("!llvm.array<3 x i16>", 6), ("!llvm.array<5 x vector<3xi32>>", 80),
])  # fmt: skip
def test_gep_strides(element: str, stride: int) -> None:
    """The allocation size of the element: a vector of three dwords takes four (LLVM Language Reference, data layout, v96:128)."""
    i32 = (LANES * 0x1000003 - 0x20000000).astype(np.int32)
    i64 = LANES.astype(np.int64) * 0x1_0000_0007 - 0x8_0000_0000
    got = gep_offset("!llvm.ptr<1>", "%x", "i32", element, [("i32", i32.view(np.uint32))])
    np.testing.assert_array_equal(got, i32.astype(np.int64) * stride)  # sign-extended before it is multiplied
    got = gep_offset("!llvm.ptr<1>", "%x", "i64", element, [("i64", i64.view(np.uint64))])
    np.testing.assert_array_equal(got, i64 * stride)
    got = gep_offset("!llvm.ptr<1>", "-5", "", element, [])
    np.testing.assert_array_equal(got, np.full(64, -5 * stride))
    small = (LANES - 32).astype(np.int16)
    got = gep_offset("!llvm.ptr<1>", "%x", "i16", element, [("i16", small.view(np.uint16))])
    np.testing.assert_array_equal(got, small.astype(np.int64) * stride)


def test_gep_of_lds_pointers_is_32_bit() -> None:
    i64 = LANES.astype(np.int64) * 3 - (5 << 32)
    got = gep_offset("!llvm.ptr<3>", "%x", "i64", "i32", [("i64", i64.view(np.uint64))])
    np.testing.assert_array_equal(got, LANES * 12)
    i32 = (LANES - 40).astype(np.int32)
    got = gep_offset("!llvm.ptr<3>", "%x", "i32", "vector<4xf32>", [("i32", i32.view(np.uint32))])
    np.testing.assert_array_equal(got, i32 * 16)


def test_lds_globals_lie_apart_and_aligned() -> None:
    """Each array at its own alignment, none overlapping; the launch's dynamic LDS after them (AMDGPUUsage: LDS is allocated per kernel)."""
    globals_ = """
  llvm.mlir.global external @a() {addr_space = 3 : i32, alignment = 4 : i64} : !llvm.array<5 x i8>
  llvm.mlir.global external @b() {addr_space = 3 : i32, alignment = 64 : i64} : !llvm.array<3 x i32>
  llvm.mlir.global external @c() {addr_space = 3 : i32, alignment = 16 : i64} : !llvm.array<1 x i64>
  llvm.mlir.global external @dynamic() {addr_space = 3 : i32, alignment = 16 : i64} : !llvm.array<0 x i8>"""
    body = "  %item = llvm.mlir.constant(0 : i64) : i64\n"
    for i, name in enumerate(["a", "b", "c", "dynamic"]):
        body += f"""
  %p{i} = llvm.mlir.addressof @{name} : !llvm.ptr<3>
  %i{i} = llvm.ptrtoint %p{i} : !llvm.ptr<3> to i32
  %o{i} = llvm.getelementptr %out[{i}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32
  llvm.store %i{i}, %o{i} : i32, !llvm.ptr<1>"""
    out = np.zeros(4, np.uint32)
    program = lower(body, "%out: !llvm.ptr<1>", lds=globals_)
    report = launch(program, out, dynamic_lds=100)
    a, b, c, d = (int(x) for x in out)
    spans = sorted([(a, a + 5), (b, b + 12), (c, c + 8), (d, d + 100)])
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert a % 4 == b % 64 == c % 16 == d % 16 == 0 and d == max(a, b, c, d)
    assert report.launches[0].lds_bytes == d + 100


# -- bounds -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [False, True], ids=["load", "store"])
@pytest.mark.parametrize(
    ("t", "size"), [("i8", 1), ("i16", 2), ("i32", 4), ("i64", 8), ("vector<4xi32>", 16), ("vector<8xi32>", 32)]
)
def test_global_access_straddling_an_end_is_found(t: str, size: int, write: bool) -> None:
    """One byte before the first or past the last: found, nothing stored; touching both ends exactly: fine."""
    load = (
        f"%v = llvm.load %p {{alignment = 1 : i64}} : !llvm.ptr<1> -> {t}"
        if not write
        else f"%v = llvm.mlir.zero : {t}"
    )
    store = (
        f"llvm.store %v, %p {{alignment = 1 : i64}} : {t}, !llvm.ptr<1>"
        if write
        else f"llvm.store %v, %out : {t}, !llvm.ptr<1>"
    )
    program = lower(
        f'  {load} loc("kernel.py":7:3)\n  {store} loc("kernel.py":7:3)', "%p: !llvm.ptr<1>, %out: !llvm.ptr<1>"
    )
    memory, out = pattern(256), np.zeros(32, np.uint8)
    inner = memory[64:192]
    before = memory.copy()
    for offset, good in (
        (0, True),
        (128 - size, True),
        (-1, False),
        (128 - size + 1, False),
        (128, False),
        (-size, False),
    ):
        report = launch(program, Address(inner, offset), out, block=1, expect="" if good else "memory")
        if not good:
            finding = only(report) if size <= 16 else report.findings[0]
            assert (finding.file, finding.line) == ("kernel.py", 7)
            assert finding.address in range(inner.ctypes.data + offset, inner.ctypes.data + offset + size)
            if size <= 16:
                np.testing.assert_array_equal(memory, before)
        if write and good:
            assert not np.any(inner[offset : offset + size])
        memory[:] = before
    launch(program, Address(inner, -1), out, block=1, checks=(), expect="")


def test_an_address_that_wraps_is_out_of_bounds() -> None:
    body = """
  %first = llvm.load %p : !llvm.ptr<1> -> i32
  %high = llvm.mlir.constant(-2 : i64) : i64
  %q = llvm.inttoptr %high : i64 to !llvm.ptr<1>
  %v = llvm.load %q {alignment = 1 : i64} : !llvm.ptr<1> -> i64
  %w = llvm.trunc %v : i64 to i32
  %s = llvm.add %first, %w : i32
  llvm.store %s, %p : i32, !llvm.ptr<1>"""
    finding = only(launch(lower(body, "%p: !llvm.ptr<1>"), np.zeros(64, np.uint8), block=1, expect="memory"))
    assert finding.address == (1 << 64) - 2


@pytest.mark.parametrize("write", [False, True], ids=["load", "store"])
@pytest.mark.parametrize(
    ("offset", "good"), [(0, True), (60, True), (61, False), (64, False), (-1, False), (-4, False), (1 << 20, False)]
)
def test_lds_access_past_its_end_is_found(offset: int, good: bool, write: bool) -> None:
    access = (
        "llvm.store %v, %q {alignment = 1 : i64} : i32, !llvm.ptr<3>"
        if write
        else "%x = llvm.load %q {alignment = 1 : i64} : !llvm.ptr<3> -> i32"
    )
    body = f"""
  %v = llvm.mlir.constant(5 : i32) : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %q = llvm.getelementptr %lds[{offset}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
  {access} loc("kernel.py":9:1)"""
    report = launch(lower(body, lds=64), block=1, checks=("memory",), expect="" if good else "memory")
    if not good:
        finding = only(report)
        assert finding.line == 9 and finding.address == offset % (1 << 32)


# -- buffer resources ---------------------------------------------------------------------------------------------------------------

RSRC = """
  %stride = llvm.mlir.constant({stride} : i16) : i16
  %flags = llvm.mlir.constant(159744 : i32) : i32
  %records64 = llvm.zext %records : i32 to i64
  %rsrc = rocdl.make.buffer.rsrc %buffer, %stride, %records64, %flags : !llvm.ptr<1> to <8>
"""
RANGE_OFFSETS = [0, 1, 2, 3, 4, 40, 44, 45, 46, 47, 48, 52, 56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 68, 200, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0,
                 0xFFFFFFFC, 0xFFFFFFFD, 0xFFFFFFFF]  # fmt: skip
BUFFER_TYPES = {
    "i8": 1,
    "i16": 2,
    "f32": 4,
    "vector<2xi32>": 8,
    "vector<4xbf16>": 8,
    "vector<3xi32>": 12,
    "vector<8xbf16>": 16,
    "vector<4xf32>": 16,
}


def bytes_in_range(offset: int, soffset: int, size: int, records: int) -> list[bool]:
    """Per byte of an access: dwords (or the one smaller element) by themselves."""
    step = min(size, 4)
    return [offset + soffset + (b // step + 1) * step <= records for b in range(size)]


@pytest.mark.parametrize("soffset", [0, 4, 6, 32])
@pytest.mark.parametrize("t", BUFFER_TYPES)
def test_buffer_loads_give_zero_out_of_range(t: str, soffset: int) -> None:
    size, records = BUFFER_TYPES[t], 60
    body = (
        PROLOGUE + RSRC.format(stride=0) + load_item("%o", "i32", "%offsets")
        + f"  %v = rocdl.raw.ptr.buffer.load %rsrc, %o, %soffset, 0 : {t}\n"
        + "  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<16 x i8>\n"
        + f"  llvm.store %v, %to : {t}, !llvm.ptr<1>"
    )  # fmt: skip
    program = lower(
        body, "%buffer: !llvm.ptr<1>, %records: i32, %offsets: !llvm.ptr<1>, %soffset: i32, %out: !llvm.ptr<1>"
    )
    buffer, offsets, out = pattern(records), np.zeros(64, np.uint32), np.full((64, 16), 0xEE, np.uint8)
    offsets[: len(RANGE_OFFSETS)] = RANGE_OFFSETS
    launch(program, buffer, records, offsets, soffset, out)
    for lane, offset in enumerate(RANGE_OFFSETS):
        inside = bytes_in_range(offset, soffset, size, records)
        want = [int(buffer[offset + soffset + b]) if inside[b] else 0 for b in range(size)]
        assert list(out[lane, :size]) == want, (offset, soffset)
        assert (out[lane, size:] == 0xEE).all()


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("soffset", [0, 6])
@pytest.mark.parametrize("t", BUFFER_TYPES)
def test_buffer_stores_out_of_range_are_dropped(t: str, soffset: int) -> None:
    """One offset a launch, so that lanes do not write over each other."""
    size, records = BUFFER_TYPES[t], 60
    body = (
        RSRC.format(stride=0)
        + f"""
  %v = llvm.load %in : !llvm.ptr<1> -> {t}
  rocdl.raw.ptr.buffer.store %v, %rsrc, %o, %soffset, 0 : {t}"""
    )
    program = lower(body, "%buffer: !llvm.ptr<1>, %records: i32, %o: i32, %soffset: i32, %in: !llvm.ptr<1>")
    for offset in RANGE_OFFSETS:
        buffer, source = np.zeros(128, np.uint8), pattern(16)
        launch(program, Address(buffer, 0, records), records, offset, soffset, source, block=1)
        want = np.zeros(128, np.uint8)
        for b, inside in enumerate(bytes_in_range(offset, soffset, size, records)):
            if inside:
                want[offset + soffset + b] = source[b]
        np.testing.assert_array_equal(buffer, want, err_msg=hex(offset))


@pytest.mark.archs("gfx942", "gfx950")
def test_num_records_is_unsigned_and_whole() -> None:
    body = (
        RSRC.format(stride=0)
        + """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %v = rocdl.raw.ptr.buffer.load %rsrc, %o, %zero, 0 : i32
  llvm.store %v, %out : i32, !llvm.ptr<1>"""
    )
    program = lower(body, "%buffer: !llvm.ptr<1>, %records: i32, %o: i32, %out: !llvm.ptr<1>")
    buffer, out = np.arange(16, dtype=np.uint32) + 1, np.zeros(1, np.uint32)
    launch(program, buffer, 0xFFFFFFFF, 60, out, block=1)
    assert out[0] == 16
    launch(program, buffer, 0, 0, out, block=1)
    assert out[0] == 0
    # in range of the resource, outside every allocation: that is what the memory check is for
    assert (
        "reads global memory outside"
        in only(launch(program, buffer, 0xFFFFFFFF, 64, out, block=1, expect="memory")).message
    )
    assert "reads global memory outside" in only(launch(program, buffer, 68, 64, out, block=1, expect="memory")).message


def test_a_resource_with_a_stride_is_reported() -> None:
    body = (
        RSRC.format(stride=16)
        + """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %v = rocdl.raw.ptr.buffer.load %rsrc, %zero, %zero, 0 : i32
  llvm.store %v, %buffer : i32, !llvm.ptr<1>"""
    )
    assert (
        "stride"
        in only(
            launch(
                lower(body, "%buffer: !llvm.ptr<1>, %records: i32"),
                np.zeros(16, np.uint32),
                64,
                block=1,
                expect="memory",
            )
        ).message
    )


@pytest.mark.parametrize("t", ["vector<3xi8>", "vector<3xi16>", "vector<8xi32>"])
def test_buffer_accesses_of_other_sizes_raise(t: str) -> None:
    body = RSRC.format(stride=0) + f"  %v = rocdl.raw.ptr.buffer.load %rsrc, %records, %records, 0 : {t}"
    with pytest.raises(UnknownOperation, match="buffer load"):
        lower(body, "%buffer: !llvm.ptr<1>, %records: i32")


# -- copies to LDS --------------------------------------------------------------------------------------------------------------------

WAIT = "\n  rocdl.s.waitcnt 0\n  rocdl.s.barrier\n"
DUMP = """
  %line = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, vector<{n}xi32>
  %got = llvm.load %line : !llvm.ptr<3> -> vector<{n}xi32>
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, vector<{n}xi32>
  llvm.store %got, %to : vector<{n}xi32>, !llvm.ptr<1>
"""
FORMS = [
    "raw.ptr.buffer.load.lds",
    "raw.ptr.buffer.load.async.lds",
    "global.load.lds",
    "global.load.async.lds",
    "load.to.lds",
    "load.async.to.lds",
]


def copy_text(form: str, size: int, offset: int, lds: str = "%lds") -> str:
    """A copy of `size` bytes a lane from byte %o of the buffer."""
    if form.startswith("raw"):
        return f"""
  %size = llvm.mlir.constant({size} : i32) : i32
  %imm = llvm.mlir.constant({offset} : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  rocdl.{form} %rsrc, {lds}, %size, %o, %zero, %imm, 0 loc("kernel.py":20:1)"""
    types = {"global.load.lds": "", "load.to.lds": ": !llvm.ptr<1>"}.get(form, ": !llvm.ptr<1>, !llvm.ptr<3>")
    return f"""
  %from = llvm.getelementptr %buffer[%o] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  rocdl.{form} %from, {lds}, {size}, {offset}, 0 {types} loc("kernel.py":20:1)"""


def copy_program(
    form: str, size: int, offset: int = 0, condition: str = "", arch: str = "gfx950", words: int = 8, base: str = ""
) -> str:
    copy = copy_text(form, size, offset, "%at" if base else "%lds")
    if condition:
        copy = f"\n  {condition}\n  llvm.cond_br %go, ^copy, ^after\n^copy:{copy}\n  llvm.br ^after\n^after:"
    return (
        PROLOGUE + "  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>" + RSRC.format(stride=0) + load_item("%o", "i32", "%offsets")
        + base + copy + WAIT + DUMP.format(n=words)
    )  # fmt: skip


ARGUMENTS = "%buffer: !llvm.ptr<1>, %records: i32, %offsets: !llvm.ptr<1>, %out: !llvm.ptr<1>"


def run_copy(
    text: str, arch: str, source: np.ndarray, offsets: np.ndarray, words: int = 8, lds: int = 2048, **options: Any
) -> tuple:
    out = np.zeros(64 * words * 4, np.uint8)
    options.setdefault("checks", ("memory", "race", "wait", "barrier"))
    report = launch(lower(text, ARGUMENTS, lds=lds, arch=arch), source, len(source), offsets, out, **options)
    return out, report


@pytest.mark.parametrize(("arch", "size"), [("gfx942", 4), ("gfx950", 4), ("gfx950", 12), ("gfx950", 16)])
@pytest.mark.parametrize("form", FORMS)
def test_where_a_copys_bytes_land(form: str, arch: str, size: int) -> None:
    source = pattern(4096)
    offsets = (np.random.default_rng(3).permutation(64) * 52).astype(np.uint32)
    out, _ = run_copy(copy_program(form, size), arch, source, offsets)
    want = np.full(2048, 0xFF, np.uint8)
    for lane, o in enumerate(offsets):
        at = lane * (4 if size == 4 else 16)
        want[at : at + size] = source[o : o + size]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [4, 16])
def test_the_instruction_offset_moves_both_addresses(form: str, size: int) -> None:
    source, offsets = pattern(4096), (LANES * 16).astype(np.uint32)
    out, _ = run_copy(copy_program(form, size, offset=48), "gfx950", source, offsets)
    want = np.full(2048, 0xFF, np.uint8)
    for lane, o in enumerate(offsets):
        at = 48 + lane * size
        want[at : at + size] = source[o + 48 : o + 48 + size]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [4, 16])
def test_inactive_lanes_leave_gaps_in_a_copy(form: str, size: int) -> None:
    """The place in LDS follows the lane's number in the wave, not its rank among active lanes; lane 0 is off too."""
    source, offsets = pattern(4096), (LANES * 32).astype(np.uint32)
    active = (LANES % 3) == 1
    condition = """%c3 = llvm.mlir.constant(3 : i32) : i32
  %c1 = llvm.mlir.constant(1 : i32) : i32
  %m = llvm.urem %tid, %c3 : i32
  %go = llvm.icmp "eq" %m, %c1 : i32"""
    out, _ = run_copy(copy_program(form, size, condition=condition), "gfx950", source, offsets)
    want = np.full(2048, 0xFF, np.uint8)
    for lane in LANES[active]:
        want[lane * size : lane * size + size] = source[32 * lane : 32 * lane + size]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("size", [4, 16])
def test_out_of_range_lanes_of_a_copy_write_zeros(size: int) -> None:
    source, offsets = pattern(1024), (LANES * 16).astype(np.uint32)
    offsets[5], offsets[6], offsets[63] = 0x80000000, 1024, 0xFFFFFFFC
    out, _ = run_copy(copy_program("raw.ptr.buffer.load.lds", size), "gfx950", source, offsets)
    for lane in LANES:
        want = np.zeros(size) if lane in (5, 6, 63) else source[16 * lane : 16 * lane + size]
        np.testing.assert_array_equal(out[lane * size : lane * size + size], want)


def test_voffset_and_instruction_offset_wrap_together() -> None:
    """As the hardware adds them; that they wrap is reported, since it is seldom meant."""
    source, offsets = pattern(1024), (LANES * 16 - 48).astype(np.uint32)  # lanes 0 to 2: negative
    out, report = run_copy(
        copy_program("raw.ptr.buffer.load.lds", 16, offset=48), "gfx950", source, offsets, expect="memory"
    )
    finding = only(report)
    assert "wraps past 4 GiB" in finding.message and (finding.lane, finding.count) == (0, 3)
    np.testing.assert_array_equal(out[48 : 48 + 1024], source)


def test_a_copy_that_straddles_its_buffers_end_is_reported() -> None:
    source, offsets = pattern(1024), (LANES * 16).astype(np.uint32)
    offsets[9] = 1016
    _, report = run_copy(copy_program("raw.ptr.buffer.load.lds", 16), "gfx950", source, offsets, expect="memory")
    finding = only(report)
    assert "straddles" in finding.message and (finding.line, finding.lane) == (20, 9)


def test_a_copy_uses_the_first_active_lanes_lds_address() -> None:
    """The base is a scalar (M0): one that differs between lanes is reported, the first active lane's is used."""
    base = """
  %c32 = llvm.mlir.constant(32 : i32) : i32
  %sum = llvm.add %tid, %c32 : i32
  %at = llvm.getelementptr %lds[%sum] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32"""
    source, offsets = pattern(1024), (LANES * 4).astype(np.uint32)
    out, report = run_copy(
        copy_program("raw.ptr.buffer.load.lds", 4, base=base), "gfx950", source, offsets, expect="memory"
    )
    assert "differs between lanes" in only(report).message
    np.testing.assert_array_equal(out[128 : 128 + 256], source[:256])


@pytest.mark.parametrize("form", ["raw.ptr.buffer.load.lds", "global.load.lds"])
def test_a_copy_past_the_end_of_lds_is_reported(form: str) -> None:
    source, offsets = pattern(1024), (LANES * 16).astype(np.uint32)
    text = copy_program(form, 16, words=2)
    _, report = run_copy(
        text, "gfx950", source, offsets, words=2, lds=1008, expect="memory"
    )  # lane 63 needs 1008..1024
    finding = only(report)
    assert "past the workgroup's allocation" in finding.message and (finding.lane, finding.line, finding.address) == (
        63,
        20,
        1008,
    )


def test_a_global_copy_outside_the_allocations_is_reported() -> None:
    source, offsets = pattern(1024), (LANES * 16).astype(np.uint32)
    offsets[7] = 1020
    _, report = run_copy(copy_program("global.load.lds", 16), "gfx950", source, offsets, expect="memory")
    assert only(report).lane == 7


@pytest.mark.parametrize(("arch", "size"), [("gfx942", 12), ("gfx942", 16), ("gfx950", 8), ("gfx950", 2)])
@pytest.mark.parametrize("form", ["raw.ptr.buffer.load.lds", "global.load.lds"])
def test_copies_of_other_sizes_raise(form: str, arch: str, size: int) -> None:
    """gfx942 copies dwords at most; 1, 2 and 8 bytes are not modelled (8 does not exist)."""
    with pytest.raises(UnknownOperation, match=rf"kernel.py:20: .*copy to LDS of {size} bytes a lane on {arch}"):
        lower(copy_program(form, size), ARGUMENTS, lds=2048, arch=arch)


# -- transposing read -------------------------------------------------------------------------------------------------------------------


def transposing_read(
    address: np.ndarray, contents: np.ndarray, t: str = "vector<4xi16>", block: int = 64, **options: Any
) -> tuple:
    """ds_read_tr16_b64 at per-lane byte addresses of an LDS array filled with `contents`; returns [lane, 4] and the report."""
    body = (
        PROLOGUE
        + """
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>"""
        + load_item("%fill", "vector<16xi32>", "%contents")
        + load_item("%o", "i32", "%addresses")
        + f"""
  %place = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, vector<16xi32>
  llvm.store %fill, %place : vector<16xi32>, !llvm.ptr<3>
  rocdl.s.waitcnt 0
  rocdl.s.barrier
  %at = llvm.getelementptr %lds[%o] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %v = rocdl.ds.read.tr16.b64 %at : <3> -> {t} loc("kernel.py":30:1)
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i64
  llvm.store %v, %to : {t}, !llvm.ptr<1>"""
    )
    out = np.zeros((64, 4), np.uint16)
    program = lower(body, "%contents: !llvm.ptr<1>, %addresses: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=4096)
    return out, launch(program, contents, address.astype(np.uint32), out, block=block, **options)


@pytest.mark.parametrize("t", ["vector<4xi16>", "vector<4xbf16>", "vector<4xf16>"])
def test_transposing_read(t: str) -> None:
    """Each group of 16 lanes reads four rows of 16 elements, anywhere in LDS; lane i of the group receives column i, rows 0 to 3."""
    contents = np.random.default_rng(1).permutation(2048).astype(np.uint16)
    rows = (
        np.random.default_rng(2).permutation(64)[: 4 * 4].reshape(4, 4) * 16
    )  # [group, row]: element index of the row's start
    address = np.array([2 * (rows[lane // 16, lane % 16 // 4] + 4 * (lane % 4)) for lane in range(64)])
    out, _ = transposing_read(address, contents, t)
    for lane in range(64):
        assert list(out[lane]) == [contents[rows[lane // 16, r] + lane % 16] for r in range(4)]


def test_transposing_read_takes_any_aligned_addresses() -> None:
    """The pieces need not be neighbours: the exchange is between lanes, after the reads."""
    contents = np.random.default_rng(4).permutation(2048).astype(np.uint16)
    address = np.random.default_rng(5).permutation(512)[:64] * 8
    out, _ = transposing_read(address, contents)
    for lane in range(64):
        first, column = lane // 16 * 16, lane % 16
        want = [contents[address[first + 4 * r + column // 4] // 2 + column % 4] for r in range(4)]
        assert list(out[lane]) == want


def test_transposing_read_wants_alignment() -> None:
    """CDNA4 ISA guide, section 11.4: the address is aligned to the data size."""
    contents = np.zeros(2048, np.uint16)
    address = np.arange(64) * 8
    address[3] += 4
    _, report = transposing_read(address, contents, expect="memory")
    finding = only(report)
    assert "aligned" in finding.message and (finding.lane, finding.line) == (3, 30)


def test_transposing_read_wants_all_lanes() -> None:
    """CDNA4 ISA guide, section 11.4: EXEC is all ones."""
    body = """
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %tid = rocdl.workitem.id.x : i32
  %c60 = llvm.mlir.constant(60 : i32) : i32
  %zero = llvm.mlir.constant(0 : i64) : i64
  %at = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i64
  llvm.store %zero, %at : i64, !llvm.ptr<3>
  rocdl.s.waitcnt 0
  %go = llvm.icmp "ult" %tid, %c60 : i32
  llvm.cond_br %go, ^inside, ^end
^inside:
  %v = rocdl.ds.read.tr16.b64 %at : <3> -> vector<4xi16> loc("kernel.py":31:1)
  llvm.br ^end
^end:"""
    finding = only(launch(lower(body, lds=512), expect="barrier"))
    assert finding.line == 31 and "switched off" in finding.message


def test_transposing_read_does_not_exist_on_gfx942() -> None:
    body = "  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>\n  %v = rocdl.ds.read.tr16.b64 %lds : <3> -> vector<4xi16>"
    with pytest.raises(UnknownOperation, match="gfx942 has no transposing"):
        lower(body, lds=64, arch="gfx942")


def test_bank_conflict_counters() -> None:
    """gfx942 has 32 banks of 4 bytes, gfx950 64 (CDNA3 and CDNA4 ISA guides, local data share). As many lanes at once as fill the banks: the
    counters compare the cycles with the least possible. Reads of 12 bytes are served like 16."""
    for arch, banks in (("gfx942", 32), ("gfx950", 64)):
        for words, stride, ways in (
            (1, 1, 1),
            (1, 2, 2),
            (1, banks, banks),
            (4, 4, 1),
            (3, 4, 1),
            (4, banks, banks // 4),
        ):
            t = f"vector<{words}xi32>"
            body = f"""
  %tid = rocdl.workitem.id.x : i32
  %stride = llvm.mlir.constant({stride * 4} : i32) : i32
  %at = llvm.mul %tid, %stride : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %p = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %v = llvm.load %p : !llvm.ptr<3> -> {t}
  %o = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {t}
  llvm.store %v, %o : {t}, !llvm.ptr<1>"""
            out = np.zeros(64 * 4, np.uint32)
            program = lower(body, "%out: !llvm.ptr<1>", lds=64 * banks * 4, arch=arch)
            counters = launch(program, out, checks=("memory",), count_bank_conflicts=True).launches[0].counters
            cycles = 64 * (1 if words == 1 else 4) // banks
            assert counters["lds_read_cycles_ideal"] == cycles, (arch, words, stride)
            assert counters["lds_read_cycles"] == cycles * ways, (arch, words, stride)


@pytest.mark.parametrize(("arch", "banks"), [("gfx942", 32), ("gfx950", 64)])
def test_bank_conflicts_of_wide_reads_are_those_of_the_lanes_served_together(arch: str, banks: int) -> None:
    """Random rows of 16 bytes: the groups of lanes are those that blocks/flydsl/tiles.py cites; in the order of the lanes it would be others."""
    from fourwave.blocks.flydsl.tiles import bank_conflicts, read_b128_groups

    body = """
  %tid = rocdl.workitem.id.x : i32
  %from = llvm.getelementptr %rows[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %at = llvm.load %from : !llvm.ptr<1> -> i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %p = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %v = llvm.load %p : !llvm.ptr<3> -> vector<4xi32>
  %o = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, vector<4xi32>
  llvm.store %v, %o : vector<4xi32>, !llvm.ptr<1>"""
    program = lower(body, "%rows: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=4096, arch=arch)
    groups = read_b128_groups(banks)
    in_order = [list(range(first, first + len(groups[0]))) for first in range(0, 64, len(groups[0]))]
    generator, differ = np.random.default_rng(7), 0
    for _ in range(8):
        at = (16 * generator.integers(0, 256, 64)).astype(np.uint32)
        out = np.zeros(64 * 4, np.uint32)
        counters = launch(program, at, out, checks=("memory",), count_bank_conflicts=True).launches[0].counters
        assert counters["lds_read_cycles_ideal"] == len(groups)
        extra = bank_conflicts(at.tolist(), groups, 16, banks)
        assert counters["lds_read_cycles"] - counters["lds_read_cycles_ideal"] == extra
        differ += extra != bank_conflicts(at.tolist(), in_order, 16, banks)
    assert differ
