"""Loads, stores and matrix instructions in inline assembly: every mnemonic, on every arch that has it; the others refuse it.

Sources
  Which arch has which mnemonic: llvm-mc 22. Sizes; zero extension of bytes and shorts; range checks of buffers dword by dword; LDS address of a
  copy = m0 + offset + 4 (16 for three and four dwords) * lane: AMD CDNA3 and CDNA4 ISA guides, vector memory and LDS instructions.
  Matrix instructions: the operation of MLIR's ROCDL dialect that has the same shape and formats, which other tests compare with numpy.
  gfx1250's assembler takes the loads and stores, too (as aliases); the simulator does not follow its counters for them, and says so.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from machine import PROLOGUE, arch, launch, load_item, lower, store_item
from test_asm import asm

from fourwave.sim.lowering import UnknownOperation
from fourwave.sim.lowering.asm import MNEMONICS

pytestmark = pytest.mark.archs("gfx942", "gfx950")

N = 64
SIZES = {"ubyte": 1, "byte": 1, "u8": 1, "b8": 1, "ushort": 2, "short": 2, "u16": 2, "b16": 2, "dword": 4, "b32": 4, "dwordx2": 8, "b64": 8,
         "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16}  # fmt: skip
SETUP = """
  %c0 = llvm.mlir.constant(0 : i32) : i32
  %s0 = llvm.mlir.constant(0 : i16) : i16
  %c16 = llvm.mlir.constant(16 : i32) : i32
  %records64 = llvm.zext %records : i32 to i64
  %rsrc = rocdl.make.buffer.rsrc %mem, %s0, %records64, %c0 : !llvm.ptr<1> to <8>
  %byte = llvm.mul %tid, %c16 : i32
  %at = llvm.getelementptr %mem[%byte] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %slot = llvm.getelementptr %lds[%byte] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %ldsat = llvm.ptrtoint %slot : !llvm.ptr<3> to i32
"""
ARGUMENTS = "%mem: !llvm.ptr<1>, %other: !llvm.ptr<1>, %records: i32"


def vector(size: int) -> str:
    return {8: "vector<2xi32>", 12: "vector<3xi32>", 16: "vector<4xi32>"}.get(size, "i32")


def dwords(size: int) -> int:
    """Of an item of an array of vector(size): three take the place of four."""
    return {12: 4}.get(size, max(1, size // 4))


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


def piece(memory: np.ndarray, offset: int, size: int) -> np.ndarray:
    """Each lane's `size` bytes at 16 * lane + offset, as dwords, small ones zero-extended."""
    raw = memory.view(np.uint8).reshape(-1)
    rows = np.stack([raw[16 * lane + offset : 16 * lane + offset + size] for lane in range(N)])
    return np.pad(rows, ((0, 0), (0, -size % 4))).view(np.uint32)


FILL_LDS = """
  %given = llvm.load %at : !llvm.ptr<1> -> vector<4xi32>
  llvm.store %given, %slot : vector<4xi32>, !llvm.ptr<3>"""


@pytest.mark.parametrize("mnemonic", [
    *(f"{kind}_load_{size}" for kind in ("buffer", "global") for size in ("ubyte", "ushort", "dword", "dwordx2", "dwordx3", "dwordx4")),
    *(f"ds_read_{size}" for size in ("u8", "u16", "b32", "b64", "b96", "b128")),
])  # fmt: skip
def test_loads(mnemonic: str) -> None:
    """At offset 0 and 16; a buffer's last lanes are out of range and read 0."""
    size = SIZES[mnemonic.rpartition("_")[2]]
    t, memory, where = vector(size), random(1, N + 1, 4), mnemonic[0]
    address = {"b": "%byte", "g": "%at", "d": "%ldsat"}[where]
    if where == "b":
        text, constraints, given, types = (
            f"{mnemonic} $0, $1, $2, 0 offen offset:{{}}",
            "=v,v,s",
            f"{address}, %rsrc",
            "i32, !llvm.ptr<8>",
        )
    else:
        text = f"{mnemonic} $0, $1{', off' if where == 'g' else ''} offset:{{}}"
        constraints, given, types = "=v,v", address, "!llvm.ptr<1>" if where == "g" else "i32"
    for offset in (0, 16):
        body = (
            PROLOGUE
            + SETUP
            + (FILL_LDS if where == "d" else "")
            + "\n  "
            + asm(text.format(offset) + "\ns_waitcnt vmcnt(0) lgkmcnt(0)", constraints, given, types, t)
            + store_item("%r", t, "%other")
        )
        out = np.zeros((N, dwords(size)), np.uint32)
        last = "init" if where == "d" and offset else ""  # nothing fills what the last lane reads
        launch(lower(body, ARGUMENTS, lds=16 * (N + 1)), memory, out, 16 * 50, expect=last)
        want = piece(memory, offset, size)
        count = N - 1 if last else N
        if where == "b":
            want = np.where(np.arange(N)[:, None] * 16 + offset < 16 * 50, want, 0)
        np.testing.assert_array_equal(out[:count, : want.shape[1]], want[:count])


@pytest.mark.parametrize("mnemonic", [
    *(f"{kind}_store_{size}" for kind in ("buffer", "global") for size in ("byte", "short", "dword", "dwordx2", "dwordx3", "dwordx4")),
    *(f"ds_write_{size}" for size in ("b8", "b16", "b32", "b64", "b96", "b128")),
])  # fmt: skip
def test_stores(mnemonic: str) -> None:
    """Only the size's own bytes change, 16 behind the address; a buffer's last lanes are out of range and write nothing."""
    size = SIZES[mnemonic.rpartition("_")[2]]
    t, value, where = vector(size), random(2, N, dwords(size)), mnemonic[0]
    text, constraints, given, types = {
        "b": (f"{mnemonic} $0, $1, $2, 0 offen offset:16", "v,v,s", "%x, %byte, %rsrc", f"{t}, i32, !llvm.ptr<8>"),
        "g": (f"{mnemonic} $0, $1, off offset:16", "v,v", "%at, %x", f"!llvm.ptr<1>, {t}"),
        "d": (f"{mnemonic} $0, $1 offset:16", "v,v", "%ldsat, %x", f"i32, {t}"),
    }[where]
    body = PROLOGUE + SETUP + load_item("%x", t, "%other")
    if where == "d":
        body += """
  %next = llvm.getelementptr %slot[16] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
  %nextat = llvm.getelementptr %at[16] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i8
  %given = llvm.load %nextat : !llvm.ptr<1> -> vector<4xi32>
  llvm.store %given, %next : vector<4xi32>, !llvm.ptr<3>"""
    body += "\n  " + asm(text, constraints, given, types, "")
    if where == "d":
        body += "\n  " + asm("s_waitcnt lgkmcnt(0)", "", result="")
        body += "\n  %now = llvm.load %next : !llvm.ptr<3> -> vector<4xi32>\n  llvm.store %now, %nextat : vector<4xi32>, !llvm.ptr<1>"
    memory = random(3, N + 1, 4)
    want = memory.copy()
    raw, source = want.view(np.uint8), value.view(np.uint8)
    for lane in range(N):
        if where != "b" or 16 * (lane + 1) < 16 * 50:
            raw[lane + 1, :size] = source[lane, :size]
    launch(lower(body, ARGUMENTS, lds=16 * (N + 1)), memory, value, 16 * 50)
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("mnemonic", ["global_load_lds_dword", "global_load_lds_dwordx3", "global_load_lds_dwordx4",
                                      "buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4"])  # fmt: skip
def test_copies_to_lds(mnemonic: str) -> None:
    """Lane l's dwords land at m0 + offset + 4 * l, or 16 * l where there are more than one; each lane's source is its own."""
    size = SIZES[mnemonic.rpartition("_")[2]]
    memory, step = random(4, N + 1, 4), 4 if size == 4 else 16
    if mnemonic[0] == "g":
        text = asm(
            f"s_mov_b32 m0, 64\n{mnemonic} $0, off offset:16\ns_waitcnt vmcnt(0)", "v", "%at", "!llvm.ptr<1>", ""
        )
    else:
        text = asm(f"s_mov_b32 m0, 64\n{mnemonic} $0, $1, 0 offen offset:16 lds\ns_waitcnt vmcnt(0)", "v,s", "%byte, %rsrc",
                   "i32, !llvm.ptr<8>", "")  # fmt: skip
    body = PROLOGUE + SETUP + f"""
  %step = llvm.mlir.constant({step} : i32) : i32
  %mine = llvm.mul %tid, %step : i32
  %here = llvm.getelementptr %lds[%mine] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %there = llvm.getelementptr %here[80] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
  {text}
  %r = llvm.load %there : !llvm.ptr<3> -> {vector(size)}""" + store_item("%r", vector(size), "%other")  # fmt: skip
    out = np.zeros((N, dwords(size)), np.uint32)
    if size != 4 and arch() == "gfx942":
        with pytest.raises(UnknownOperation, match="gfx942"):
            lower(body, ARGUMENTS, lds=2048)
        return
    launch(lower(body, ARGUMENTS, lds=2048), memory, out, memory.nbytes)
    np.testing.assert_array_equal(out[:, : size // 4], piece(memory, 16, size))


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_transposing_reads(bits: int) -> None:
    """ds_read_b64_tr_b{bits}: of sixteen lanes' rows of 8 bytes, 64 / bits lanes make a matrix of which a lane gets a column.

    As the CDNA4 ISA guide's DS_READ_B64_TR_*: bits = 16: row r is lanes 4r to 4r + 3, sixteen columns, lane i gets column i (four rows);
    bits = 8: rows are pairs of lanes, eight of them; bits = 4: rows are lanes, sixteen of them.
    """
    memory = random(5, N, 4)
    text = asm(
        f"ds_read_b64_tr_b{bits} $0, $1 offset:8\ns_waitcnt lgkmcnt(0)", "=v,v", "%ldsat", "i32", "vector<2xi32>"
    )
    body = PROLOGUE + SETUP + FILL_LDS + "\n  " + text + store_item("%r", "vector<2xi32>", "%other")
    out = np.zeros((N, 2), np.uint32)
    launch(lower(body, ARGUMENTS, lds=16 * N), memory, out, memory.nbytes)
    per = 64 // bits  # elements of a lane's 8 bytes
    rows = memory[:, 2:].copy().view(np.uint64)[:, 0]  # the upper half of every lane's 16 bytes
    elements = (rows[:, None] >> (np.arange(per) * bits).astype(np.uint64)) & np.uint64((1 << bits) - 1)
    want = np.zeros(N, np.uint64)
    for first in range(0, N, 16):
        matrix = elements[first : first + 16].reshape(per, 16)
        for lane in range(16):
            want[first + lane] = sum(int(x) << (bits * i) for i, x in enumerate(matrix[:, lane]))
    np.testing.assert_array_equal(out.view(np.uint64)[:, 0], want)


# mnemonic -> (operation, dwords of A and B, of C): shapes and formats as in the name
def operation(mnemonic: str) -> tuple[str, int, int]:
    m = re.fullmatch(r"v_mfma_(f32|i32)_(\d+)x\d+x(\d+)_(\w+)", mnemonic)
    assert m
    d, side, depth, formats = m[1], int(m[2]), int(m[3]), m[4]
    bits = 16 if formats.endswith("16") else 8
    dot = formats.startswith(("fp8", "bf8", "i8")) or (side, depth) in ((16, 32), (32, 16))
    name = f"rocdl.mfma.{d}.{side}x{side}x{depth}{'.' if dot else ''}{formats.replace('_', '.')}"
    return name + (".1k" if formats == "bf16" and not dot else ""), side * depth * bits // (32 * N), side * side // N


MFMA = [n for n in MNEMONICS if re.match(r"v_mfma_[fi]32_\w+_(b?f16|[fb]p?f?8_[fb]p?f?8|i8)$", n)]
ON_GFX950 = ("v_mfma_f32_16x16x32_f16", "v_mfma_f32_16x16x32_bf16", "v_mfma_f32_32x32x16_f16", "v_mfma_f32_32x32x16_bf16", "v_mfma_i32_16x16x64_i8",
             "v_mfma_i32_32x32x32_i8")  # fmt: skip


def run_matrix(call: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, types: tuple[str, str]) -> np.ndarray:
    names = {"a": types[0], "b": types[0], "c": types[1]}
    body = PROLOGUE + "".join(load_item(f"%{n}", t, f"%{n}in") for n, t in names.items())
    body += "\n  " + call + store_item("%d", types[1], "%out")
    out = np.zeros((N, c.shape[1]), np.uint32)
    launch(lower(body, "%ain: !llvm.ptr<1>, %bin: !llvm.ptr<1>, %cin: !llvm.ptr<1>, %out: !llvm.ptr<1>"), a, b, c, out)
    return out


@pytest.mark.parametrize("mnemonic", MFMA)
def test_matrix_instructions_are_the_operations(mnemonic: str) -> None:
    name, width, results = operation(mnemonic)
    formats = mnemonic.split("_", 4)[4]
    integer = formats == "i8"
    element = {"f16": "f16", "bf16": "bf16"}.get(formats)
    if formats == "bf16" and name.endswith("1k"):
        element = "i16"
    if element:
        t = f"vector<{2 * width}x{element}>"
    else:
        t = "i32" if width == 1 else "i64" if width == 2 else f"vector<{width}xi32>"
    ct = f"vector<{results}x{'i32' if integer else 'f32'}>"
    rng = np.random.default_rng(6)
    if element:  # 16-bit values of moderate size
        bias = {"f16": 15 << 10, "bf16": 127 << 7, "i16": 127 << 7}[element]
        halves = rng.integers(0, 1 << 12, (2, N, 2 * width), dtype=np.uint16)
        a, b = ((h % 64 + bias) | (h & 1) << 15 for h in halves)
        a, b = (np.ascontiguousarray(x, np.uint16).view(np.uint32) for x in (a, b))
    else:
        a, b = (rng.integers(0, 128, (N, 4 * width), dtype=np.uint8) & 0x3F for _ in range(2))
        a, b = (x.view(np.uint32) for x in (a, b))
    c = rng.integers(-50, 50, (N, results))
    c = c.astype(np.int32 if integer else np.float32).view(np.uint32)
    text = asm(f"{mnemonic} $0, $1, $2, $3", "=v,v,v,v", "%a, %b, %c", f"{t}, {t}, {ct}", ct, "%d")
    if mnemonic in ON_GFX950 and arch() == "gfx942":
        with pytest.raises(UnknownOperation, match="gfx942 does not have it"):
            run_matrix(text, a, b, c, (t, ct))
        return
    call = f"%d = {name} %a, %b, %c, 0, 0, none : ({t}, {t}, {ct}) -> {ct}"
    got = run_matrix(text, a, b, c, (t, ct))
    np.testing.assert_array_equal(got, run_matrix(call, a, b, c, (t, ct)))
    assert len(np.unique(got)) > 100


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shape", ["16x16x128", "32x32x64"])
def test_f8f6f4_instructions_are_the_operations(shape: str, scaled: bool) -> None:
    results, v = (4, "vector<8xi32>") if shape.startswith("16") else (16, "vector<8xi32>")
    ct = f"vector<{results}xf32>"
    rng = np.random.default_rng(7)
    a, b = ((rng.integers(0, 256, (N, 32), dtype=np.uint8) & 0xB7).view(np.uint32) for _ in range(2))
    c = rng.standard_normal((N, results)).astype(np.float32).view(np.uint32)
    scales = "%sa = llvm.mlir.constant(2139127680 : i32) : i32\n  %sb = llvm.mlir.constant(2155905152 : i32) : i32\n  "  # 7F 80 ..., 80 ...
    zero = "%z = llvm.mlir.constant(0 : i32) : i32\n  "
    if scaled:
        text = scales + asm(f"v_mfma_scale_f32_{shape}_f8f6f4 $0, $1, $2, $3, $4, $5", "=v,v,v,v,v,v", "%a, %b, %c, %sa, %sb",
                            f"{v}, {v}, {ct}, i32, i32", ct, "%d")  # fmt: skip
    else:
        text = asm(f"v_mfma_f32_{shape}_f8f6f4 $0, $1, $2, $3", "=v,v,v,v", "%a, %b, %c", f"{v}, {v}, {ct}", ct, "%d")
    attributes = "cbsz = #rocdl<matrix_format fp8_e4m3>, blgp = #rocdl<matrix_format fp8_e4m3>, opselA = 0 : i32, opselB = 0 : i32"
    call = (scales if scaled else zero) + f'%d = "rocdl.mfma.scale.f32.{shape}.f8f6f4"(%a, %b, %c, {"%sa, %sb" if scaled else "%z, %z"}) <{{{attributes}}}> : ({v}, {v}, {ct}, i32, i32) -> {ct}'  # fmt: skip
    got = run_matrix(text, a, b, c, (v, ct))
    np.testing.assert_array_equal(got, run_matrix(call, a, b, c, (v, ct)))
    assert len(np.unique(got)) > 100


LACKING = {
    "gfx942": ["ds_read_b64_tr_b16 $0, $1", "ds_read_b64_tr_b8 $0, $1", "ds_read_b64_tr_b4 $0, $1", "v_mfma_f32_16x16x128_f8f6f4 $0, $1, $1, $0",
               "v_mfma_scale_f32_16x16x128_f8f6f4 $0, $1, $1, $0, $1, $1", "v_cvt_pk_bf16_f32 $0, $1, $1"],
    "gfx1250": ["s_waitcnt vmcnt(0)", "s_barrier", "buffer_inv sc1", "buffer_wbl2 sc1", "s_dcache_wb", "global_load_lds_dword $1, off",
                "v_accvgpr_read_b32 $0, $1", "v_accvgpr_write_b32 $0, $1", "v_accvgpr_mov_b32 $0, $1", "ds_read_b64_tr_b16 $0, $1",
                "v_mfma_f32_16x16x16_f16 $0, $1, $1, $0", "v_mfma_i32_16x16x64_i8 $0, $1, $1, $0", "v_mfma_f32_32x32x64_f8f6f4 $0, $1, $1, $0"],
}  # fmt: skip


@pytest.mark.archs("gfx942", "gfx1250")
def test_what_an_arch_lacks_is_refused() -> None:
    for text in LACKING[arch()]:
        with pytest.raises(UnknownOperation, match=f"{arch()} does not have it"):
            lower("  " + asm(text, "=v,v", "%a", "i32", "i32"), "%a: i32")


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize("text", ["global_load_dword $0, $1, off", "buffer_store_dword $1, $1, $1, 0 offen", "ds_read_b32 $0, $1", "ds_write_b64 $1, $1"])  # fmt: skip
def test_memory_in_assembly_is_not_modelled_on_gfx1250(text: str) -> None:
    with pytest.raises(UnknownOperation, match="on gfx1250 memory instructions in assembly are not modelled"):
        lower("  " + asm(text, "=v,v", "%a", "i32", "i32"), "%a: i32")
