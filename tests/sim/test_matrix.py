"""Every matrix instruction: random operands spread over the lanes by layouts written down here, against exact integer
or float64 products.

Layouts, none of them taken from the simulator
  wave64  AMD's matrix instruction calculator (ROCm/amd_matrix_instruction_calculator, class InstCalcGfx9: register and
          lane of inputs and outputs, CBSZ and ABID, BLGP), which covers CDNA3; witness/calculator.py runs it against the
          functions below. For gfx950's doubled K and f8f6f4: ROCm/rocm-systems, emulation/rocjitsu, mma/layout.h
          (input_loc), and the Triton kernels of witness/triton_cases.py.
  wave32  mma/layout.h there (wmma_input_loc, wmma_block_scaled_input_loc, wmma_output_loc_32 and _16), and the same
          Triton kernels.
Values  ml_dtypes' tables of the formats. Operands are small multiples of a power of two and scales near one, so every
        sum is exact in fp32 in any order; order and rounding: test_matrix_formats.py.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from machine import launch, lower

from fourwave.sim import UnknownOperation
from fourwave.sim.lowering import HANDLERS

DTYPES: dict[str, Any] = {
    "f32": np.float32, "xf32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8, "u8": np.uint8,
    "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2, "fp8_fnuz": ml_dtypes.float8_e4m3fnuz, "bf8_fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6": ml_dtypes.float6_e2m3fn, "bf6": ml_dtypes.float6_e3m2fn, "fp4": ml_dtypes.float4_e2m1fn, "i32": np.int32,
}  # fmt: skip
BITS = {n: 6 if n in ("fp6", "bf6") else 4 if n == "fp4" else np.dtype(t).itemsize * 8 for n, t in DTYPES.items()}
F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")
SPELLED = dict(zip(F8F6F4, ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")))


def values_of(element: str) -> np.ndarray:
    """The value of each code."""
    dtype = np.dtype(DTYPES[element])
    codes = np.arange(1 << BITS[element], dtype=np.uint8)
    return codes.view(dtype).astype(np.float64)


def codes_of(values: np.ndarray, element: str) -> np.ndarray:
    """Codes of exactly representable values."""
    dtype = np.dtype(DTYPES[element])
    codes = values.astype(dtype)
    assert np.array_equal(codes.astype(np.float64), values), element
    return codes.view(f"u{dtype.itemsize}")


@dataclass(frozen=True)
class Form:
    name: str  # of the operation, without rocdl.
    arch: str
    m: int
    n: int
    k: int
    blocks: int
    a: str
    b: str
    c: str
    d: str
    operands: tuple[str, ...]  # MLIR types of a, b, c, d
    attributes: str = ""
    scaled: int = 0  # K per scale
    modifiers: dict = field(default_factory=dict, hash=False)
    by_intrinsic: bool = False  # a call of LLVM's intrinsic instead of the rocdl operation

    @property
    def id(self) -> str:
        return f"{self.arch}-{self.name}-{self.a}-{self.b}" + "".join(f"-{k}{v}" for k, v in self.modifiers.items())

    @property
    def wave(self) -> int:
        return 32 if self.arch == "gfx1250" else 64

    def input(self, side: str, i: int, k: int, block: int) -> tuple[int, int]:
        """Lane and element within the lane of A[i, k] or B[k, i]."""
        dim, element = (self.m, self.a) if side == "a" else (self.n, self.b)
        bits = BITS[element]
        if self.wave == 32:
            if dim == 32:  # A of 32x16x128_f4: rows 16 to 31 in the second eight registers
                lane, e = self._wave32(i % 16, k, bits)
                return lane, e + 64 * (i // 16)
            return self._wave32(i, k, bits)
        lanes = 64 // (dim * self.blocks)
        each = self.k // lanes
        if each > 16 and bits == 8:
            chunk, group = k // 16 // lanes, k // 16 % lanes
            lane, e = block * dim + group * dim * self.blocks + i, chunk * 16 + k % 16
        else:
            lane, e = block * dim + k // each * dim * self.blocks + i, k % each
        return lane, e

    def _wave32(self, i: int, k: int, bits: int) -> tuple[int, int]:
        if self.k * bits == 4 * 32:  # f32, K 4
            return i + 16 * (k // 2), k % 2
        piece = {16: 8, 8: 16, 6: 32, 4: 32}[bits]
        return i + 16 * (k // piece % 2), k // (2 * piece) * piece + k % piece

    def output(self, i: int, j: int, block: int) -> tuple[int, int]:
        """Lane and element (of the result's type) of D[i, j]."""
        if self.wave == 32:
            return i % 16 // 8 * 16 + j, 8 * (i // 16) + i % 8
        height, rows = (1 if self.d == "f64" else 4), 64 // self.n
        per_register = -(-64 // (self.n * self.m // height))
        element = block * (self.m * self.n // 64) + i // (height * rows) * height + i % height
        return block % per_register * self.n + i // height % rows * per_register * self.n + j, element

    def scale_lane(self, side: str, i: int, block: int) -> tuple[int, int]:
        """Lane and byte of the scale of row i, K block `block`. gfx950: the byte is opsel's and the lane that of the K
        block's data."""
        if self.wave == 64:
            return i + self.m * block, self.modifiers.get(f"opsel{side.upper()}", 0)
        half = self.modifiers.get(f"scale{side.upper()}Type", 0)
        return (i if self.m == 32 and side == "a" else i + 16 * half), block


def words(lanes: np.ndarray, bits: int) -> np.ndarray:
    """[lane, element] codes -> [lane, dword], little-endian, elements side by side."""
    count, each = lanes.shape
    stream = (lanes.astype(np.uint64)[:, :, None] >> np.arange(bits, dtype=np.uint64)) & 1
    packed = np.packbits(stream.reshape(count, each * bits).astype(np.uint8), axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view(np.uint32)


def unwords(dwords: np.ndarray, element: str) -> np.ndarray:
    return dwords.view(DTYPES[element])


@functools.cache
def place(form: Form, side: str) -> np.ndarray:
    """[block, i, k] -> lane * elements + element, for A, B; [block, i, j] for D."""
    if side == "d":
        each = form.m * form.n * form.blocks // form.wave
        return np.array(
            [
                [[(lambda p: p[0] * each + p[1])(form.output(i, j, b)) for j in range(form.n)] for i in range(form.m)]
                for b in range(form.blocks)
            ]
        )
    dim = form.m if side == "a" else form.n
    each = dim * form.k * form.blocks // form.wave
    return np.array(
        [
            [[(lambda p: p[0] * each + p[1])(form.input(side, i, k, b)) for k in range(form.k)] for i in range(dim)]
            for b in range(form.blocks)
        ]
    )


def spread(form: Form, side: str, codes: np.ndarray, element: str) -> np.ndarray:
    """[block, row, column] codes -> [lane, dword]; B comes as [block, column, k]."""
    flat = np.zeros(codes.size, codes.dtype)
    flat[place(form, side).ravel()] = codes.ravel()
    return words(flat.reshape(form.wave, -1), BITS[element])


def program(form: Form) -> Any:
    types = [*form.operands[:3], *(["i64" if form.scaled == 16 else "i32"] * 2 if form.scaled else [])]
    return _program(form.name, form.arch, form.operands, form.attributes, bool(form.scaled), form.scaled == 16,
                    intrinsic(form, types) if form.by_intrinsic else "")  # fmt: skip


@functools.cache
def _program(
    name: str, arch: str, operands: tuple[str, ...], attributes: str, scaled: bool, wide: bool, call: str
) -> Any:
    body = "%tid = rocdl.workitem.id.x : i32\n"
    scale = "i64" if wide else "i32"
    types = [*operands[:3], scale, scale]
    for v, t in zip("abcst"[: 5 if scaled else 3], types):
        stride = t.replace("vector", "!llvm.array").replace("x", " x ")  # a vector's would be a power of two
        body += f"""%{v}p = llvm.getelementptr %{v}in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {stride}
          %{v} = llvm.load %{v}p {{alignment = 4 : i64}} : !llvm.ptr<1> -> {t}\n"""
    values = "%a, %b, %c" + (", %s, %t" if scaled else "")
    listed = ", ".join(types[: 5 if scaled else 3])
    body += (
        (call or f'%d = "rocdl.{name}"({values}) {{{attributes}}} : ({listed}) -> {operands[3]}')
        + f"""
      %dp = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {operands[3]}
      llvm.store %d, %dp {{alignment = 4 : i64}} : {operands[3]}, !llvm.ptr<1>"""
    )
    return lower(body, ", ".join(f"%{v}: !llvm.ptr<1>" for v in ("ain", "bin", "cin", "sin", "tin", "out")), arch=arch)


def run(
    form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray, s: np.ndarray | None = None, t: np.ndarray | None = None
) -> np.ndarray:
    """D [block, i, j] for codes a [block, i, k], b [block, j, k], values c [block, i, j]; scales [row, K block] codes."""
    registers = [
        spread(form, "a", a, form.a),
        spread(form, "b", b, form.b),
        spread(form, "d", codes_of(c, form.c), form.c),
    ]
    scales = []
    for side, codes in (("a", s), ("b", t)):
        held = np.full((form.wave, 8 if form.scaled == 16 else 4), 0x5A, np.uint8)  # bytes nothing must read
        if codes is not None:
            for i, block in np.ndindex(*codes.shape):
                lane, byte = form.scale_lane(side, i, block)
                held[lane, byte] = codes[i, block]
        scales.append(held)
    size = {"f16": 2, "bf16": 2, "f64": 8}.get(form.d, 4)
    out = np.full((form.wave, form.m * form.n * form.blocks * size // form.wave), 0xA5, np.uint8)
    launch(program(form), *registers, *scales, out, block=form.wave)
    flat = np.ascontiguousarray(out).view(DTYPES[form.d]).ravel()
    return flat[place(form, "d")].astype(np.float64)


def random_codes(rng: np.random.Generator, element: str, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Codes of small values, and the values."""
    if element in ("i8", "u8"):
        codes = rng.integers(0, 256, shape, dtype=np.uint8)
        return codes, codes.view(DTYPES[element]).astype(np.float64)
    if BITS[element] <= 8:
        table = values_of(element)
        with np.errstate(invalid="ignore"):
            good = np.flatnonzero((np.abs(table) <= 4) & (table * 16 == np.round(table * 16)))
        codes = rng.choice(good, shape).astype(np.uint8)
        return codes, table[codes]
    values = rng.integers(-64, 65, shape) / 16.0
    return codes_of(values, element), values


def check(form: Form, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    a, va = random_codes(rng, form.a, (form.blocks, form.m, form.k))
    b, vb = random_codes(rng, form.b, (form.blocks, form.n, form.k))
    c = rng.integers(-1000, 1000, (form.blocks, form.m, form.n)) / (1.0 if form.c == "i32" else 16.0)
    if form.c in ("f16", "bf16"):
        c = np.round(c / 16)
    s = t = None
    if form.scaled:
        blocks = form.k // form.scaled
        s, t = (rng.integers(125, 130, (dim, blocks)).astype(np.uint8) for dim in (form.m, form.n))
        va = va * np.repeat(2.0 ** (s.astype(float) - 127), form.scaled, axis=1)
        vb = vb * np.repeat(2.0 ** (t.astype(float) - 127), form.scaled, axis=1)
    cbsz, abid, blgp = (form.modifiers.get(x, 0) for x in ("cbsz", "abid", "blgp"))
    if cbsz:  # each group of 2^cbsz blocks takes A from its block abid
        va = va[[block >> cbsz << cbsz | abid for block in range(form.blocks)]]
    vb = moved_b(form, vb, blgp) if blgp and form.d != "f64" else vb
    negate = form.modifiers.get("negate", "")
    exact = (-1.0 if "a" in negate else 1.0) * (-1.0 if "b" in negate else 1.0) * (va @ vb.swapaxes(1, 2))
    cc = np.abs(c) if "|" in negate else c
    exact = exact + (-cc if "c" in negate else cc)
    got = run(form, a, b, c, s, t)
    if form.d in ("f16", "bf16"):
        exact = exact.astype(np.float32).astype(DTYPES[form.d]).astype(np.float64)
    assert np.array_equal(got, exact), f"{form.id}: {np.argwhere(got != exact)[:4].tolist()}"


def moved_b(form: Form, values: np.ndarray, blgp: int) -> np.ndarray:
    """B as the multiplier sees it: lane l reads lane from(l) (the calculator's table of BLGP)."""
    source = [
        lambda l: l, lambda l: l % 32, lambda l: l % 32 + 32, lambda l: (l + 16) % 64,
        lambda l: l % 16, lambda l: l % 16 + 16, lambda l: l % 16 + 32, lambda l: l % 16 + 48,
    ][blgp]  # fmt: skip
    at = place(form, "b")
    each = at.size // 64
    flat = np.empty(at.size)
    flat[at.ravel()] = values.ravel()
    lanes = flat.reshape(64, each)[[source(l) for l in range(64)]]
    return lanes.ravel()[at]


Row = tuple[str, int, int, int, str, str]  # operation, rows, K, blocks, element, MLIR type of A and B


def mfma(row: Row, arch: str, b: str = "", **modifiers: Any) -> Form:
    name, m, k, blocks, element, operand = row
    d = "i32" if name.startswith("mfma.i32") else "f64" if "f64" in name else "f32"
    count = m * m * blocks // 64
    vector = f"vector<{count}x{d}>" if count > 1 else d
    x, y = (f + "_fnuz" if arch == "gfx942" and f in ("fp8", "bf8") else f for f in (element, b or element))
    perm = (
        "none",
        "bcast_first_32",
        "bcast_second_32",
        "rotate_16_right",
        "bcast_first_16",
        "bcast_second_16",
        "bcast_third_16",
        "bcast_fourth_16",
    )
    if d == "f64":
        neg = "|".join(f"neg_{s}" for s in modifiers.get("negate", "")) or "none"
        blgp = f"#rocdl<mfma_neg_modifier {neg}>"
    else:
        blgp = f"#rocdl<mfma_perm_b {perm[modifiers.get('blgp', 0)]}>"
    attributes = f"cbsz = {modifiers.get('cbsz', 0)} : i32, abid = {modifiers.get('abid', 0)} : i32, blgp = {blgp}"
    types = (operand, operand, vector, vector)
    return Form(name, arch, m, m, k, blocks, x, y, d, d, types, attributes, modifiers=modifiers)


PLAIN: list[Row] = [  # operand types: ROCDLOps.td
    ("mfma.f32.32x32x1f32", 32, 1, 2, "f32", "f32"), ("mfma.f32.16x16x1f32", 16, 1, 4, "f32", "f32"), ("mfma.f32.4x4x1f32", 4, 1, 16, "f32", "f32"),
    ("mfma.f32.32x32x2f32", 32, 2, 1, "f32", "f32"), ("mfma.f32.16x16x4f32", 16, 4, 1, "f32", "f32"),
    ("mfma.f32.32x32x4f16", 32, 4, 2, "f16", "vector<4xf16>"), ("mfma.f32.16x16x4f16", 16, 4, 4, "f16", "vector<4xf16>"),
    ("mfma.f32.4x4x4f16", 4, 4, 16, "f16", "vector<4xf16>"), ("mfma.f32.32x32x8f16", 32, 8, 1, "f16", "vector<4xf16>"),
    ("mfma.f32.16x16x16f16", 16, 16, 1, "f16", "vector<4xf16>"),
    ("mfma.f32.32x32x4bf16.1k", 32, 4, 2, "bf16", "vector<4xi16>"), ("mfma.f32.16x16x4bf16.1k", 16, 4, 4, "bf16", "vector<4xi16>"),
    ("mfma.f32.4x4x4bf16.1k", 4, 4, 16, "bf16", "vector<4xi16>"), ("mfma.f32.32x32x8bf16.1k", 32, 8, 1, "bf16", "vector<4xi16>"),
    ("mfma.f32.16x16x16bf16.1k", 16, 16, 1, "bf16", "vector<4xi16>"),
    ("mfma.i32.32x32x4i8", 32, 4, 2, "i8", "i32"), ("mfma.i32.16x16x4i8", 16, 4, 4, "i8", "i32"), ("mfma.i32.4x4x4i8", 4, 4, 16, "i8", "i32"),
    ("mfma.i32.32x32x16.i8", 32, 16, 1, "i8", "i64"), ("mfma.i32.16x16x32.i8", 16, 32, 1, "i8", "i64"),
    ("mfma.f64.16x16x4f64", 16, 4, 1, "f64", "f64"), ("mfma.f64.4x4x4f64", 4, 4, 4, "f64", "f64"),
]  # fmt: skip
DOUBLED: list[Row] = [
    ("mfma.f32.16x16x32.f16", 16, 32, 1, "f16", "vector<8xf16>"), ("mfma.f32.16x16x32.bf16", 16, 32, 1, "bf16", "vector<8xbf16>"),
    ("mfma.f32.32x32x16.f16", 32, 16, 1, "f16", "vector<8xf16>"), ("mfma.f32.32x32x16.bf16", 32, 16, 1, "bf16", "vector<8xbf16>"),
    ("mfma.i32.16x16x64.i8", 16, 64, 1, "i8", "vector<4xi32>"), ("mfma.i32.32x32x32.i8", 32, 32, 1, "i8", "vector<4xi32>"),
]  # fmt: skip


def forms() -> Iterator[Form]:
    for arch in ("gfx942", "gfx950"):
        yield from (mfma(row, arch) for row in PLAIN)
        for (shape, m, k), x, y in itertools.product(
            (("16x16x32", 16, 32), ("32x32x16", 32, 16)), ("fp8", "bf8"), ("fp8", "bf8")
        ):
            yield mfma((f"mfma.f32.{shape}.{x}.{y}", m, k, 1, x, "i64"), arch, y)
    yield mfma(("mfma.f32.16x16x8.xf32", 16, 8, 1, "xf32", "vector<2xf32>"), "gfx942")
    yield mfma(("mfma.f32.32x32x4.xf32", 32, 4, 1, "xf32", "vector<2xf32>"), "gfx942")
    yield from (mfma(row, "gfx950") for row in DOUBLED)
    yield from scaled_mfma()
    yield from wmma()


def scaled_mfma() -> Iterator[Form]:
    for (m, k), x, y in itertools.product(((16, 128), (32, 64)), F8F6F4, F8F6F4):
        for opsel in ((0, 0), (3, 1)) if x == "fp8" else ((1, 2),):
            attributes = f"cbsz = #rocdl<matrix_format {SPELLED[x]}>, blgp = #rocdl<matrix_format {SPELLED[y]}>"
            attributes += f", opselA = {opsel[0]} : i32, opselB = {opsel[1]} : i32"
            types = tuple(f"vector<{BITS[e]}xi32>" for e in (x, y))
            d = f"vector<{m * m // 64}xf32>"
            yield Form(
                f"mfma.scale.f32.{m}x{m}x{k}.f8f6f4", "gfx950", m, m, k, 1, x, y, "f32", "f32", (*types, d, d), attributes, 32,
                {"opselA": opsel[0], "opselB": opsel[1]},
            )  # fmt: skip


def wmma() -> Iterator[Form]:
    def form(
        name: str, k: int, x: str, y: str, c: str, d: str, operand: str, attributes: str = "", **modifiers: Any
    ) -> Form:
        return Form(
            f"wmma.{name}",
            "gfx1250",
            16,
            16,
            k,
            1,
            x,
            y,
            c,
            d,
            (operand, operand, f"vector<8x{c}>", f"vector<8x{d}>"),
            attributes,
            modifiers=modifiers,
        )

    yield form("f32.16x16x4.f32", 4, "f32", "f32", "f32", "f32", "vector<2xf32>")
    for d, x in (("f32", "f16"), ("f32", "bf16"), ("f16", "f16"), ("bf16", "bf16")):
        yield form(f"{d}.16x16x32.{x}", 32, x, x, d, d, f"vector<16x{x}>")
    yield form("bf16f32.16x16x32.bf16", 32, "bf16", "bf16", "f32", "bf16", "vector<16xbf16>")
    for k, x, y, d in itertools.product((64, 128), ("fp8", "bf8"), ("fp8", "bf8"), ("f32", "f16")):
        yield form(f"{d}.16x16x{k}.{x}_{y}", k, x, y, d, d, f"vector<{k // 8}xi32>")
    for x, y in itertools.product(("i8", "u8"), ("i8", "u8")):
        signs = f"signA = {str(x == 'i8').lower()}, signB = {str(y == 'i8').lower()}"
        yield form("i32.16x16x64.iu8", 64, x, y, "i32", "i32", "vector<8xi32>", signs)
    for spelled, negate in (("neg", "c"), ("abs", "|"), ("neg_abs", "|c")):
        yield form(
            "f32.16x16x32.f16",
            32,
            "f16",
            "f16",
            "f32",
            "f32",
            "vector<16xf16>",
            f"modC = #rocdl<wmma_c_modifier {spelled}>",
            negate=negate,
        )
    yield form(
        "f32.16x16x32.bf16",
        32,
        "bf16",
        "bf16",
        "f32",
        "f32",
        "vector<16xbf16>",
        "reuseA = true, reuseB = true",
        reuse="AB",
    )
    for block, x, y in itertools.product((32, 16), F8F6F4, F8F6F4):
        for half in ((0, 1), (1, 0)) if x == "fp8" else ((1, 1),):
            rows = [f"scale{s}Type = #rocdl<wmma_matrix_scale row{h}>" for s, h in zip("AB", half)]
            formats = [f"fmt{s} = #rocdl<matrix_format {SPELLED[e]}>" for s, e in zip("AB", (x, y))]
            types = tuple(f"vector<{2 * BITS[e]}xi32>" for e in (x, y))
            yield Form(
                f"wmma.scale{'' if block == 32 else 16}.f32.16x16x128.f8f6f4", "gfx1250", 16, 16, 128, 1, x, y, "f32", "f32",
                (*types, "vector<8xf32>", "vector<8xf32>"), ", ".join(formats + rows), block, {"scaleAType": half[0], "scaleBType": half[1]},
            )  # fmt: skip
    for block in (32, 16):
        yield Form(
            f"wmma.scale{'' if block == 32 else 16}.f32.32x16x128.f4", "gfx1250", 32, 16, 128, 1, "fp4", "fp4", "f32", "f32",
            ("vector<16xi32>", "vector<8xi32>", "vector<16xf32>", "vector<16xf32>"), "scaleBType = #rocdl<wmma_matrix_scale row1>", block, {"scaleBType": 1},
        )  # fmt: skip


FORMS = list(forms())


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.id)
def test_exact(form: Form) -> None:
    check(form)


WMMA_FORMS = [
    f for f in FORMS if f.name.startswith("wmma") and "modC" not in f.attributes and "reuse" not in f.attributes
]


@pytest.mark.parametrize("form", WMMA_FORMS, ids=lambda f: f.id)
def test_wmma_intrinsics(form: Form) -> None:
    """The same by LLVM's intrinsics, operands as in IntrinsicsAMDGPU.td of LLVM 22: signs or negations before A and B, formats before scaled A and
    B, the modifier of C before C, row and format before each scale, then reuse flags, clamp."""
    check(replace(form, by_intrinsic=True))


def intrinsic(form: Form, types: list[str]) -> str:
    """Text that defines %d from %a, %b, %c, %s, %t."""
    flags = dict(re.findall(r"(\w+) = (?:#rocdl<\w+ )?(\w+)", form.attributes))
    no, yes = ("i1", "false"), ("i1", "true")
    wide, short = form.name.startswith("wmma.scale"), form.name.removeprefix("wmma.")
    a, b, c, s, t = (("", v) for v in "abcst")
    if wide:
        formats = [
            ("i32", str(list(SPELLED.values()).index(flags[f"fmt{x}"]))) if "fmtA" in flags else None for x in "AB"
        ]
        rows = [("i32", flags.get(f"scale{x}Type", "row0")[-1]) for x in "AB"]
        given = [
            formats[0],
            a,
            formats[1],
            b,
            ("i16", "0"),
            c,
            rows[0],
            ("i32", "0"),
            s,
            rows[1],
            ("i32", "0"),
            t,
            no,
            no,
        ]
    elif form.d == "i32":
        signs = [yes if flags.get(f"sign{x}") == "true" else no for x in "AB"]
        given = [signs[0], a, signs[1], b, c, no, no, no]
    elif BITS[form.a] == 8:
        given = [a, b, ("i16", "0"), c, no, no]
    else:
        given = [no, a, no, b, ("i16", "0"), c, no, no]
    shapes = dict(zip("abcst", types))
    text, names, listed = "", [], []
    for i, (kind, value) in enumerate(g for g in given if g is not None):
        if kind:
            text += f"%i{i} = llvm.mlir.constant({value}{'' if kind == 'i1' else f' : {kind}'}) : {kind}\n"
        names.append(f"%i{i}" if kind else f"%{value}")
        listed.append(kind or shapes[value])
    name = f"llvm.amdgcn.wmma.{short.replace('_', '.')}"
    return text + f'%d = llvm.call_intrinsic "{name}"({", ".join(names)}) : ({", ".join(listed)}) -> {form.operands[3]}'


def test_every_matrix_operation_is_tested() -> None:
    known = {n.removeprefix("rocdl.") for n in HANDLERS if n.startswith(("rocdl.mfma", "rocdl.wmma"))}
    assert known == {f.name for f in FORMS}


BROADCASTS: list[tuple[Row, int, int]] = [
    *((("mfma.f32.4x4x4f16", 4, 4, 16, "f16", "vector<4xf16>"), z, i) for z, i in ((1, 0), (1, 1), (2, 3), (3, 5), (4, 11))),
    *((("mfma.f32.16x16x4bf16.1k", 16, 4, 4, "bf16", "vector<4xi16>"), z, i) for z, i in ((1, 1), (2, 2))),
    (("mfma.f32.32x32x1f32", 32, 1, 2, "f32", "f32"), 1, 1), (("mfma.i32.16x16x4i8", 16, 4, 4, "i8", "i32"), 2, 3),
]  # fmt: skip


@pytest.mark.parametrize(("row", "cbsz", "abid"), BROADCASTS, ids=lambda x: x if isinstance(x, int) else x[0])
def test_cbsz_and_abid_broadcast_a_block_of_a(row: Row, cbsz: int, abid: int) -> None:
    check(mfma(row, "gfx942", cbsz=cbsz, abid=abid))


@pytest.mark.parametrize("blgp", range(1, 8))
@pytest.mark.parametrize("row", [PLAIN[1], PLAIN[4], PLAIN[7], PLAIN[15]], ids=lambda r: r[0])
def test_blgp_permutes_the_lanes_of_b(row: Row, blgp: int) -> None:
    check(mfma(row, "gfx942", blgp=blgp))


@pytest.mark.parametrize("negate", ["a", "b", "c", "ac", "abc"])
def test_blgp_of_f64_negates(negate: str) -> None:
    check(mfma(("mfma.f64.16x16x4f64", 16, 4, 1, "f64", "f64"), "gfx950", negate=negate))


@pytest.mark.parametrize(
    ("arch", "row", "modifiers"),
    [
        pytest.param("gfx942", PLAIN[9], {"blgp": 1}, id="an f16 form of one block takes no blgp"),
        pytest.param("gfx942", PLAIN[4], {"cbsz": 1}, id="no broadcast within one block"),
        pytest.param("gfx942", PLAIN[1], {"cbsz": 3}, id="more blocks than there are"),
        pytest.param("gfx950", ("mfma.f32.16x16x8.xf32", 16, 8, 1, "xf32", "vector<2xf32>"), {}, id="xf32 is CDNA3's"),
        pytest.param("gfx942", DOUBLED[4], {}, id="doubled K is CDNA4's"),
    ],
)
def test_what_an_arch_does_not_have_raises(arch: str, row: Row, modifiers: dict) -> None:
    with pytest.raises(UnknownOperation, match=r"mfma"):
        program(mfma(row, arch, **modifiers))
