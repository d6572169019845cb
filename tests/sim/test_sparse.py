"""Sparse matrix instructions (SMFMAC): of each four k of A two are stored, with two bits each that say which.

Sources
  Where the elements of A, B, D and the index lie, CBSZ and ABID: AMD's matrix instruction calculator, CDNA3 (`v_smfmac_*`, --register-layout,
  --compression). Row i, k group g (four k) of A: lane i + rows * (g // groups of a lane), elements 2 * (g % groups) and the one behind it; the index
  bits are in the same lane, four a group. gfx950 is taken to agree, as its other instructions of these sizes do.
  In which order the sums go and how they round no source says: values here are exact in any order.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from machine import PROLOGUE, arch, launch, load_item, lower, store_item

from fourwave.sim import UnknownOperation

pytestmark = pytest.mark.archs("gfx942", "gfx950")
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8}
FP8 = {
    "gfx942": {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz},
    "gfx950": {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2},
}
FORMS = [
    ("f32.16x16x32.f16", "f16", "f16"), ("f32.32x32x16.f16", "f16", "f16"), ("f32.16x16x32.bf16", "bf16", "bf16"),
    ("f32.32x32x16.bf16", "bf16", "bf16"), ("i32.16x16x64.i8", "i8", "i8"), ("i32.32x32x32.i8", "i8", "i8"),
    *((f"f32.{shape}.{a}.{b}", a, b) for shape in ("16x16x64", "32x32x32") for a in ("fp8", "bf8") for b in ("fp8", "bf8")),
]  # fmt: skip


def run(name: str, a_format: str, b_format: str, cbsz: int, abid: int, infinity: bool = False) -> None:
    rows, depth = (int(x) for x in name.split(".")[1].split("x")[1:])
    dtypes = [FLOATS.get(f) or FP8[arch()][f] for f in (a_format, b_format)]
    integer, bits = a_format == "i8", 16 if a_format.endswith("16") else 8
    rng = np.random.default_rng(3)
    values_a = rng.integers(1, 5, (rows, depth // 2)) * rng.choice([-1, 1], (rows, depth // 2))
    values_b = rng.integers(-4, 5, (depth, rows)).astype(np.float64)
    c = rng.integers(-100, 101, (rows, rows)).astype(np.float64)
    pairs = np.array([(i, j) for i in range(4) for j in range(i + 1, 4)])[
        rng.integers(0, 6, (rows, depth // 4))
    ]  # [row, group, 2]
    dense = np.zeros((rows, depth))
    for i, g in np.ndindex(rows, depth // 4):
        dense[i, 4 * g + pairs[i, g]] = values_a[i, 2 * g : 2 * g + 2]
    exact = c + dense @ values_b
    if infinity:
        values_b[5, 3] = np.inf  # one k, one column: it reaches the rows that have that k
        has = dense[:, 5] != 0
        assert has.any() and not has.all()
        exact[has, 3] = np.sign(dense[has, 5]) * np.inf
    lanes_a = np.zeros((64, depth * rows // 128), np.float64)
    lanes_b = np.zeros((64, depth * rows // 64), np.float64)
    index = np.full(64, 0x5AA55AA5 if cbsz == 0 else 0, np.uint32)
    each = depth * rows // 64  # k of a lane
    place = abid * each if cbsz == 0 else 0  # bits of index below this instruction's
    for i, g in np.ndindex(rows, depth // 4):
        lane, at = i + rows * (4 * g // each), 4 * g % each // 4
        lanes_a[lane, 2 * at : 2 * at + 2] = values_a[i, 2 * g : 2 * g + 2]
        code = int(pairs[i, g, 0]) | int(pairs[i, g, 1]) << 2
        shift = place + 4 * at
        index[lane] = int(index[lane]) & ~(15 << shift) & 0xFFFFFFFF | code << shift
    for k, j in np.ndindex(depth, rows):
        lanes_b[j + rows * (k // each), k % each] = values_b[k, j]
    element = {"f16": "f16", "bf16": "bf16"}.get(a_format)
    types = [f"vector<{n}x{element}>" if element else f"vector<{n * bits // 32}xi32>" for n in (each // 2, each)]
    d = f"vector<{rows * rows // 64}x{'i32' if integer else 'f32'}>"
    codes = [np.ascontiguousarray(x.astype(t)).view(np.uint32) for x, t in zip((lanes_a, lanes_b), dtypes)]
    if element == "bf16" and depth * rows == 512:
        types = [t.replace("bf16", "i16") for t in types]
    per_lane_c = np.zeros((64, rows * rows // 64))

    def spots():
        for r, j in np.ndindex(rows, rows):  # D as in the dense instructions: four rows a block, over the lanes' groups
            block, groups = r // 4, 64 // rows
            yield r, j, j + rows * (block % groups), block // groups * 4 + r % 4

    for r, j, lane, register in spots():
        per_lane_c[lane, register] = c[r, j]
    body = PROLOGUE
    for n, t in zip(("a", "b", "c", "i"), (*types, d, "i32")):
        body += load_item(f"%{n}", t, f"%{n}in")
    body += f"""
  %r = "rocdl.smfmac.{name}"(%a, %b, %c, %i) <{{cbsz = {cbsz} : i32, abid = {abid} : i32}}> : ({types[0]}, {types[1]}, {d}, i32) -> {d}""" + store_item("%r", d, "%out")  # fmt: skip
    kept = np.int32 if integer else np.float32
    out = np.zeros((64, rows * rows // 64), np.uint32)
    program = lower(body, ", ".join(f"%{n}: !llvm.ptr<1>" for n in ("ain", "bin", "cin", "iin", "out")))
    launch(program, *codes, per_lane_c.astype(kept).view(np.uint32), index, out)
    got = out.view(kept)
    for r, j, lane, register in spots():
        assert got[lane, register] == exact[r, j], (r, j, got[lane, register], exact[r, j])


@pytest.mark.parametrize(("name", "a", "b"), FORMS, ids=[f[0] for f in FORMS])
def test_exact(name: str, a: str, b: str) -> None:
    run(name, a, b, 0, 0)


@pytest.mark.parametrize(("name", "cbsz", "abid"), [("f32.16x16x32.f16", 0, 1), ("f32.16x16x32.f16", 0, 3), ("f32.16x16x32.f16", 1, 2), ("i32.32x32x32.i8", 0, 1)])  # fmt: skip
def test_which_bits_of_the_index_count(name: str, cbsz: int, abid: int) -> None:
    element = name.rpartition(".")[2]
    run(name, element, element, cbsz, abid)


def test_an_infinity_reaches_only_the_rows_that_have_its_k() -> None:
    run("f32.16x16x32.f16", "f16", "f16", 0, 0, infinity=True)


def zeros(name: str, a: str, b: str, c: str, abid: int = 0) -> str:
    return f"""%a = llvm.mlir.zero : {a}\n %b = llvm.mlir.zero : {b}\n %c = llvm.mlir.zero : {c}\n %i = llvm.mlir.zero : i32
      %d = "rocdl.smfmac.{name}"(%a, %b, %c, %i) {{cbsz = 0 : i32, abid = {abid} : i32}} : ({a}, {b}, {c}, i32) -> {c}"""


def test_what_raises() -> None:
    """gfx950's forms with a doubled K, for whose layout there is no source; an ABID past the register; other archs."""
    with pytest.raises(UnknownOperation, match=r"smfmac\.f32\.16x16x64\.f16"):
        lower(zeros("f32.16x16x64.f16", "vector<8xf16>", "vector<16xf16>", "vector<4xf32>"))
    with pytest.raises(UnknownOperation, match="abid = 2"):
        lower(zeros("i32.16x16x64.i8", "vector<2xi32>", "vector<4xi32>", "vector<4xi32>", abid=2))
    with pytest.raises(UnknownOperation, match="gfx1250 does not have it"):
        lower(zeros("f32.16x16x32.f16", "vector<4xf16>", "vector<8xf16>", "vector<4xf32>"), arch="gfx1250")
