"""Transposing loads: gfx950's of 8, 4 and 6 bits (16 bits: test_memory.py), gfx1250's from LDS and global memory.

gfx950: sixteen lanes' pieces, one after another, are rows of sixteen elements; lane i of the sixteen receives column i. AMD CDNA4 ISA guide,
section 11.4; composable_kernel's DefaultTranspose has the same map for 16 and 8 bits (Quad16: 4 rows of 4 lanes, Quad8: 8 rows of 2 lanes).
For 6 and 4 bits a lane's piece is a whole row. Triton's kernels confirm 16, 8 and 4 bits (test_transpose_triton.py).
gfx1250: ROCm/rocm-systems emulation/rocjitsu, isa/arch/amdgpu/shared/ds_transpose.h; the map is restated below from the source
lane's side: groups of 8 lanes at 16 and 4 bits, of 4 lanes at 8 bits, two passes of 16 lanes at 6 bits.
"""

from __future__ import annotations

import numpy as np
import pytest
from machine import launch, lower, only

from fourwave.sim import UnknownOperation

pytestmark = pytest.mark.archs("gfx1250", "gfx1250 by intrinsics")


def bits_of(rows: np.ndarray, bits: int) -> np.ndarray:
    """[lanes, bytes] -> [lanes, elements]."""
    flat = np.unpackbits(rows, axis=1, bitorder="little").reshape(len(rows), -1, bits)
    return (flat << np.arange(bits)).sum(axis=2)


def bytes_of(elements: np.ndarray, bits: int) -> np.ndarray:
    flat = (elements[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(flat.reshape(len(elements), -1).astype(np.uint8), axis=1, bitorder="little")


def gfx950(pieces: np.ndarray, bits: int) -> np.ndarray:
    e = bits_of(pieces, bits)
    out = np.concatenate([group.reshape(-1, 16).T for group in e.reshape(-1, 16 * e.shape[1])])
    return bytes_of(out, bits)


def gfx1250(pieces: np.ndarray, bits: int) -> np.ndarray:
    e = bits_of(pieces, bits)
    out = np.zeros_like(e)
    for source in range(32):
        for i in range(e.shape[1]):
            if bits == 16:
                lane, place = source // 8 * 8 + i, source % 8
            elif bits == 8:
                group = source // 4 * 4
                lane, place = group // 16 * 16 + group // 4 % 2 * 8 + i, group % 16 // 8 * 4 + source % 4
            elif bits == 4:
                group = source // 8 * 8
                lane, place = (group & 8) * 2 + i, (group // 16 & 1) * 8 + source % 8
            else:
                half, number = source // 4 % 2, source // 8 * 4 + source % 4
                lane, place = half * 16 + i, number
            out[lane, place] = e[source, i]
    return bytes_of(out, bits)


NAMES = {
    "tr16.b128": (16, 16, "vector<8xi16>"),
    "tr8.b64": (8, 8, "vector<2xi32>"),
    "tr4.b64": (4, 8, "vector<2xi32>"),
    "tr6.b96": (6, 12, "vector<3xi32>"),
}
GLOBAL = {"tr.b128": "tr16.b128", "tr.b64": "tr8.b64", "tr4.b64": "tr4.b64", "tr6.b96": "tr6.b96"}


def kernel(read: str, t: str, size: int, result: str) -> str:
    """Lane i takes the piece at slot 5 i mod lanes, 16 bytes a slot, so that addresses are not the lanes' order."""
    return f"""
  %tid = rocdl.workitem.id.x : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %slot = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<16 x i8>
  %from = llvm.getelementptr %in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<16 x i8>
  %data = llvm.load %from : !llvm.ptr<1> -> vector<4xi32>
  llvm.store %data, %slot : vector<4xi32>, !llvm.ptr<3>
  %c5 = llvm.mlir.constant(5 : i32) : i32
  %lanes = llvm.mlir.constant(64 : i32) : i32
  %times = llvm.mul %tid, %c5 : i32
  %which = llvm.urem %times, %lanes : i32
  %piece = llvm.getelementptr %lds[%which] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, !llvm.array<16 x i8>
  %there = llvm.getelementptr %in[%which] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<16 x i8>
  %v = {read} : {t} -> {result}
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{size} x i8>
  llvm.store %v, %to {{alignment = 4 : i64}} : {result}, !llvm.ptr<1>"""


def check(read: str, t: str, name: str, lanes: int, arch: str) -> None:
    bits, size, result = NAMES[name]
    text = kernel(read, t, size, result).replace("constant(64 : i32)", f"constant({lanes} : i32)")
    source = np.random.default_rng(7).integers(0, 256, (lanes, 16), dtype=np.uint8)
    out = np.zeros((lanes, size), np.uint8)
    program = lower(text, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", 16 * lanes, arch)
    launch(program, source, out, block=lanes)
    pieces = source[np.arange(lanes) * 5 % lanes, :size]
    np.testing.assert_array_equal(out, (gfx950 if arch == "gfx950" else gfx1250)(pieces, bits))


@pytest.mark.parametrize("name", ["tr8.b64", "tr4.b64", "tr6.b96"])
def test_gfx950(name: str) -> None:
    check(f"rocdl.ds.read.{name} %piece", "!llvm.ptr<3>", name, 64, "gfx950")


@pytest.mark.parametrize("name", NAMES)
def test_gfx1250_lds(name: str) -> None:
    check(f"rocdl.ds.load.{name} %piece", "!llvm.ptr<3>", name, 32, "gfx1250")


@pytest.mark.parametrize("name", GLOBAL)
def test_gfx1250_global(name: str) -> None:
    check(f"rocdl.global.load.{name} %there", "!llvm.ptr<1>", GLOBAL[name], 32, "gfx1250")


TYPED = {"b128": ("v8i16", "v8f16", "v8bf16"), "b64": ("v2i32",), "b96": ("v3i32",)}


@pytest.mark.archs("gfx1250")
@pytest.mark.parametrize("kind", ["ds.read", "ds.load", "global.load"])
def test_intrinsics_with_their_types(kind: str) -> None:
    """The overloads by result type (IntrinsicsAMDGPU.td)."""
    arch, lanes = ("gfx950", 64) if kind == "ds.read" else ("gfx1250", 32)
    for name in GLOBAL if kind == "global.load" else [n for n in NAMES if kind == "ds.load" or "16" not in n]:
        pointer, t = ("%there", "(!llvm.ptr<1>)") if kind == "global.load" else ("%piece", "(!llvm.ptr<3>)")
        plain = GLOBAL.get(name, name)
        for suffix in TYPED[name.partition(".")[2]]:
            before = NAMES[plain]
            NAMES[plain] = (*before[:2], f"vector<{suffix[1]}x{suffix[2:]}>")
            try:
                check(f'llvm.call_intrinsic "llvm.amdgcn.{kind}.{name}.{suffix}"({pointer})', t, plain, lanes, arch)
            finally:
                NAMES[plain] = before


@pytest.mark.archs("gfx1250")
def test_lanes_off_and_alignment() -> None:
    source = np.zeros((64, 16), np.uint8)
    out = np.zeros((64, 8), np.uint8)
    text = kernel("rocdl.ds.read.tr8.b64 %piece", "!llvm.ptr<3>", 8, "vector<2xi32>")
    program = lower(text, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", 1024, "gfx950")
    report = launch(program, source, out, block=60, expect=None)
    assert {f.kind for f in report.findings} == {"init"}  # a whole wave of 60 lanes; slots 60 to 63 are not filled
    shifted = text.replace("%lds[%which]", "%off[%which]").replace(
        "%piece =", "%off = llvm.getelementptr %lds[4] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8\n  %piece ="
    )
    report = launch(
        lower(shifted, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", 1028, "gfx950"), source, out, block=64, expect="memory"
    )
    assert "aligned" in only(report).message


@pytest.mark.archs("gfx1250")
def test_other_archs_raise() -> None:
    lds = "%p = llvm.mlir.addressof @lds : !llvm.ptr<3>\n"
    with pytest.raises(UnknownOperation, match="gfx942 does not have it"):
        lower(lds + "%v = rocdl.ds.read.tr8.b64 %p : !llvm.ptr<3> -> vector<2xi32>", lds=64, arch="gfx942")
    with pytest.raises(UnknownOperation, match="gfx950 does not have it"):
        lower(lds + "%v = rocdl.ds.load.tr8.b64 %p : !llvm.ptr<3> -> vector<2xi32>", lds=64, arch="gfx950")
