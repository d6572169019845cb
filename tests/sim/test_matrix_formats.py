"""What a matrix instruction makes of single codes, scales and sums: every code of every format, e8m0's corners, order
and rounding.

Sources
  Codes: ml_dtypes (OCP FP8 1.0, OCP MX 1.0; fnuz: CDNA3 ISA guide). Which arch reads which: CDNA3 and CDNA4 ISA guides,
  gfx1250: LLVM. e8m0: OCP MX 1.0, section 5.4.1: 2^(code - 127), 255 is NaN; 0 is 2^-127, not zero.
  E5M3 and E4M3 scales of gfx1250: LLVM names them; values as rocjitsu's data_types.h.
  Literal zeros for both scales mean the unscaled instruction: llc 22 selects it, whatever opsel says.
  Order and rounding: MMA-Sim (arXiv 2511.10909, github.com/microsoft/MMA-Sim, simulator/amd.py) for CDNA3's f32 and f64
  forms: a chain of fused multiply-adds, k ascending, subnormals kept; xf32: operands cut to 10 mantissa bits, then, as
  f16, bf16 and 8-bit forms, groups of k summed at once, see fused(). gfx950 and gfx1250: silent; those tests only pin
  what the simulator does, and say so in their names.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from exact import F32, F64
from machine import launch, lower
from test_matrix import FORMS, Form, codes_of, mfma, place, run, spread, values_of


def form(arch: str, name: str, a: str, b: str, **modifiers: Any) -> Form:
    found = [
        f
        for f in FORMS
        if f.arch == arch
        and f.name == name
        and (f.a, f.b) == (a, b)
        and all(f.modifiers.get(k) == v for k, v in modifiers.items())
    ]
    return found[0]


EIGHT = [
    *(("gfx942", f"mfma.f32.16x16x32.{x}.{x}", f"{x}_fnuz") for x in ("fp8", "bf8")), *(("gfx950", f"mfma.f32.32x32x16.{x}.{x}", x) for x in ("fp8", "bf8")),
    *(("gfx1250", f"wmma.f32.16x16x64.{x}_{x}", x) for x in ("fp8", "bf8")),
    *(("gfx950", "mfma.scale.f32.16x16x128.f8f6f4", x) for x in ("fp8", "bf8", "fp6", "bf6", "fp4")),
    *(("gfx1250", "wmma.scale.f32.16x16x128.f8f6f4", x) for x in ("fp8", "bf8", "fp6", "bf6", "fp4")),
]  # fmt: skip


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize(("arch", "name", "element"), EIGHT)
def test_every_code(arch: str, name: str, element: str, side: str) -> None:
    """Row i, k = 0 holds a code, the other operand one at k = 0; the rest is zero."""
    f = form(arch, name, element, element)
    table = values_of(element)
    one = int(codes_of(np.ones(1), element)[0])
    for first in range(0, len(table), f.m):
        codes = np.arange(first, first + f.m, dtype=np.uint8)
        a, b = np.zeros((1, f.m, f.k), np.uint8), np.zeros((1, f.n, f.k), np.uint8)
        (a if side == "a" else b)[0, :, 0] = codes
        (b if side == "a" else a)[0, :, 0] = one
        scales = {x: np.full((f.m, f.k // 32), 127, np.uint8) for x in "st"} if f.scaled else {}
        d = run(f, a, b, np.zeros((1, f.m, f.n)), **scales)
        want = np.broadcast_to(table[codes][:, None] if side == "a" else table[codes][None, :], (f.m, f.n))
        np.testing.assert_array_equal(d[0], want)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_every_16_bit_code(arch: str) -> None:
    for name, element, dtype in (
        ("mfma.f32.32x32x8f16", "f16", np.float16),
        ("mfma.f32.32x32x8bf16.1k", "bf16", ml_dtypes.bfloat16),
    ):
        f = form(arch, name, element, element)
        codes = np.arange(65536, dtype=np.uint16).reshape(-1, 1, 32)[:: 13 if arch == "gfx950" else 7]
        for row in codes:
            a, b = np.zeros((1, 32, 8), np.uint16), np.zeros((1, 32, 8), np.uint16)
            a[0, :, 3] = row
            b[0, :, 3] = codes_of(np.ones(1), element)[0]
            with np.errstate(invalid="ignore"):
                want = row[0].view(dtype).astype(np.float64)
            np.testing.assert_array_equal(run(f, a, b, np.zeros((1, 32, 32)))[0, :, 0], want)


SCALED = [
    ("gfx950", "mfma.scale.f32.16x16x128.f8f6f4"),
    ("gfx950", "mfma.scale.f32.32x32x64.f8f6f4"),
    ("gfx1250", "wmma.scale.f32.16x16x128.f8f6f4"),
    ("gfx1250", "wmma.scale16.f32.16x16x128.f8f6f4"),
]


@pytest.mark.parametrize(("arch", "name"), SCALED)
@pytest.mark.parametrize("side", ["s", "t"])
def test_every_e8m0_code(arch: str, name: str, side: str) -> None:
    """One times one, with a scale of each code on one side and its opposite on the other, so that the product is
    finite: also 2^-127 and 2^127."""
    f = form(arch, name, "fp8", "fp8")
    one = int(codes_of(np.ones(1), "fp8")[0])
    a, b = np.zeros((1, f.m, f.k), np.uint8), np.zeros((1, f.n, f.k), np.uint8)
    a[..., f.scaled + 3] = b[..., f.scaled + 3] = one
    blocks = f.k // f.scaled
    for first in range(0, 256, f.m):
        codes = np.arange(first, first + f.m, dtype=np.uint8)
        varied = np.repeat(codes[:, None], blocks, axis=1)
        for other in (127, 0, 254, 60):
            fixed = np.full((f.m, blocks), other, np.uint8)
            s, t = (varied, fixed) if side == "s" else (fixed, varied)
            d = run(f, a, b, np.zeros((1, f.m, f.n)), s, t)[0]
            value = np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127)) * np.exp2(other - 127.0)
            with np.errstate(over="ignore"):
                want = value.astype(np.float32).astype(np.float64)
            np.testing.assert_array_equal(d, np.broadcast_to(want[:, None] if side == "s" else want[None, :], d.shape))


def test_a_nan_scale_spoils_its_row_and_nothing_else() -> None:
    f = form("gfx950", "mfma.scale.f32.16x16x128.f8f6f4", "fp8", "fp4")
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 0x40, (1, 16, 128), dtype=np.uint8), rng.integers(0, 16, (1, 16, 128), dtype=np.uint8)
    s, t = np.full((16, 4), 127, np.uint8), np.full((16, 4), 126, np.uint8)
    good = run(f, a, b, np.zeros((1, 16, 16)), s, t)[0]
    s[5, 2] = 255
    bad = run(f, a, b, np.zeros((1, 16, 16)), s, t)[0]
    assert np.isnan(bad[5]).all()
    assert np.array_equal(np.delete(bad, 5, 0), np.delete(good, 5, 0))


def test_extreme_scales_give_the_sums_of_moderate_ones() -> None:
    """2^100 and 2^-100 on the two sides take the simulator's other path; the result must be that of 1 and 1."""
    f = form("gfx950", "mfma.scale.f32.32x32x64.f8f6f4", "bf8", "fp6")
    rng = np.random.default_rng(1)
    a = rng.integers(0, 0x78, (1, 32, 64), dtype=np.uint8) | rng.integers(0, 2, (1, 32, 64), dtype=np.uint8) << 7
    b = rng.integers(0, 64, (1, 32, 64), dtype=np.uint8)
    c = (rng.standard_normal((1, 32, 32)) * 1e3).astype(np.float32).astype(np.float64)
    plain = run(f, a, b, c, np.full((32, 2), 127, np.uint8), np.full((32, 2), 127, np.uint8))
    extreme = run(f, a, b, c, np.full((32, 2), 227, np.uint8), np.full((32, 2), 27, np.uint8))
    np.testing.assert_array_equal(plain, extreme)


@pytest.mark.parametrize(("kind", "codes"), [("e5m3", "e5m3"), ("e4m3", "e4m3")])
def test_scale_formats_of_gfx1250(kind: str, codes: str) -> None:
    base = form("gfx1250", "wmma.scale16.f32.16x16x128.f8f6f4", "fp4", "fp4")
    attributes = base.attributes + f", fmtScaleA = #rocdl<wmma_matrix_scale_format {kind}>"
    f = Form(**{**base.__dict__, "attributes": attributes})
    one = int(codes_of(np.ones(1), "fp4")[0])
    a, b = np.full((1, 16, 128), one, np.uint8), np.full((1, 16, 128), one, np.uint8)
    t = np.full((16, 8), 127, np.uint8)
    for first in range(0, 256 if kind == "e5m3" else 128, 16):
        row = np.arange(first, first + 16, dtype=np.uint8)
        d = run(f, a, b, np.zeros((1, 16, 16)), np.repeat(row[:, None], 8, 1), t)[0]
        if kind == "e4m3":
            value = values_of("fp8")[row]
        else:  # unsigned, bias 15, 0xff NaN
            e, m = row >> 3, (row & 7).astype(np.float64)
            value = np.where(e == 0, m * 2.0**-17, (8 + m) * np.exp2(e.astype(np.float64) - 18))
            value = np.where(row == 255, np.nan, value)
        np.testing.assert_array_equal(d, np.broadcast_to((value * 128)[:, None], (16, 16)))


@pytest.mark.parametrize("m", [16, 32])
def test_literal_zero_scales_mean_unscaled(m: int) -> None:
    f = form("gfx950", f"mfma.scale.f32.{m}x{m}x{2048 // m}.f8f6f4", "fp8", "fp8")
    types = f.operands
    body = "%tid = rocdl.workitem.id.x : i32\n%z = llvm.mlir.constant(0 : i32) : i32\n"
    for v, t in zip("abc", types):
        body += f"%{v}p = llvm.getelementptr %{v}in[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {t}\n%{v} = llvm.load %{v}p {{alignment = 4 : i64}} : !llvm.ptr<1> -> {t}\n"
    body += f"""%d = "rocdl.{f.name}"(%a, %b, %c, %z, %z) {{{f.attributes}}} : ({", ".join(types[:3])}, i32, i32) -> {types[3]}
      %dp = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {types[3]}
      llvm.store %d, %dp {{alignment = 4 : i64}} : {types[3]}, !llvm.ptr<1>"""
    program = lower(body, ", ".join(f"%{v}: !llvm.ptr<1>" for v in ("ain", "bin", "cin", "out")), arch="gfx950")
    rng = np.random.default_rng(2)
    a, b = (rng.integers(0x20, 0x40, (1, m, f.k), dtype=np.uint8) for _ in range(2))
    out = np.zeros((64, m * m // 64), np.float32)
    zeros = np.zeros((1, m, m))
    launch(
        program, spread(f, "a", a, "fp8"), spread(f, "b", b, "fp8"), spread(f, "d", codes_of(zeros, "f32"), "f32"), out
    )
    unit = np.full((m, f.k // 32), 127, np.uint8)
    np.testing.assert_array_equal(out.ravel()[place(f, "d")], run(f, a, b, zeros, unit, unit))


def chain(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: Any) -> np.ndarray:
    """Fused multiply-adds over k ascending, on exact rationals."""
    out = np.empty_like(c)
    for i, j in np.ndindex(*c.shape):
        acc = dtype(c[i, j])
        for k in range(a.shape[1]):
            exact = Fraction(float(a[i, k])) * Fraction(float(b[j, k])) + Fraction(float(acc))
            acc = round_once(exact, dtype)
        out[i, j] = acc
    return out


def round_once(x: Fraction, dtype: Any) -> Any:
    """A rational to fp32 or fp64, nearest even, subnormals kept."""
    f, bits = (F32, np.uint32) if dtype is np.float32 else (F64, np.uint64)
    return np.array([f.encode(x)], bits).view(dtype)[0] if x else dtype(0)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("mfma.f32.16x16x4f32", "f32"),
        ("mfma.f32.32x32x2f32", "f32"),
        ("mfma.f64.16x16x4f64", "f64"),
        ("mfma.f64.4x4x4f64", "f64"),
    ],
)
def test_chain_of_f32_and_f64_forms(arch: str, name: str, element: str) -> None:
    f = form(arch, name, element, element)
    rng = np.random.default_rng(3)
    dtype = np.float32 if element == "f32" else np.float64
    a, b, c = (
        rng.standard_normal((f.blocks, *shape)).astype(dtype) * dtype(2.0) ** rng.integers(-12, 12, (f.blocks, *shape))
        for shape in ((f.m, f.k), (f.n, f.k), (f.m, f.n))
    )
    a, b, c = (v.astype(dtype) for v in (a, b, c))
    a[0, 0], b[0, 0] = dtype(2.0**-80), dtype(2.0**-60)  # products below fp32's normal range
    c[0, 0, 0] = dtype(2.0**-130) if element == "f32" else c[0, 0, 0]
    got = run(f, codes_of(a.astype(np.float64), element), codes_of(b.astype(np.float64), element), c.astype(np.float64))
    for block in range(f.blocks):
        np.testing.assert_array_equal(got[block], chain(a[block], b[block], c[block], dtype).astype(np.float64))


def test_xf32_cuts_its_operands() -> None:
    f = form("gfx942", "mfma.f32.16x16x8.xf32", "xf32", "xf32")
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal((1, 16, 8)).astype(np.float32), np.zeros((1, 16, 8), np.float32)
    b[0, :, 5] = 1
    got = run(f, a.view(np.uint32), b.view(np.uint32), np.zeros((1, 16, 16)))
    cut = (a.view(np.uint32) & 0xFFFFE000).view(np.float32)
    np.testing.assert_array_equal(got[0], np.broadcast_to(cut[0, :, 5:6], (16, 16)))


LEAST = {"f16": -14, "bf16": -126, "xf32": -126, "fp8_fnuz": -7, "bf8_fnuz": -15}
GROUP = {"f16": 8, "bf16": 8, "xf32": 4, "fp8_fnuz": 16, "bf8_fnuz": 16}


def parts(x: float, least: int) -> tuple[Fraction, int]:
    """MMA-Sim's extract_significand_exponent: 1 <= |significand| < 2, below the format's least exponent less; zero has
    exponent -126."""
    if x == 0:
        return Fraction(0), -126
    e = max(int(np.frexp(x)[1]) - 1, least)
    return Fraction(x) / Fraction(2) ** e, e


def cut(x: Fraction, bits: int) -> Fraction:
    """Toward zero at 2^-bits."""
    return Fraction(int(x * 2**bits), 2**bits)


def down(x: Fraction, bits: int) -> Fraction:
    return Fraction(math.floor(x * 2**bits), 2**bits)


def sum_products(terms: list[tuple[Fraction, int]]) -> tuple[Fraction, int]:
    top = max(e for _, e in terms)
    return sum((cut(s * Fraction(2) ** (e - top), 24) for s, e in terms), Fraction(0)), top


def fused(a: np.ndarray, b: np.ndarray, c: float, x: str, y: str) -> Any:
    """MMA-Sim's amd_fused_dot_rd_add, simulator/arithmetic.py, over the groups of its mfma class, simulator/amd.py, for
    CDNA3."""
    acc = np.float32(c)
    eight = x.endswith("fnuz")
    for first in range(0, len(a), GROUP[x]):
        terms = []
        for u, v in zip(a[first : first + GROUP[x]], b[first : first + GROUP[x]]):
            (su, eu), (sv, ev) = parts(float(u), LEAST[x]), parts(float(v), LEAST[y])
            terms.append((su * sv, eu + ev))
        sc, ec = parts(float(acc), -126)
        if eight:
            (s0, e0), (s1, e1) = sum_products(terms[0::2]), sum_products(terms[1::2])
            e = max(e0, e1)
            s = down(s0 * Fraction(2) ** (e0 - e), 24) + down(s1 * Fraction(2) ** (e1 - e), 24)
        else:
            s, e = sum_products(terms)
        top = max(e, ec)
        s = down(s * Fraction(2) ** (e - top), 31)
        sc = down(sc * Fraction(2) ** (ec - top), 24) if not eight or ec >= top - 25 else Fraction(0)
        acc = round_once((s + sc) * Fraction(2) ** top, np.float32)
    return acc


FUSED = [
    ("mfma.f32.16x16x16f16", "f16", "f16"), ("mfma.f32.32x32x4f16", "f16", "f16"), ("mfma.f32.4x4x4f16", "f16", "f16"), ("mfma.f32.16x16x16bf16.1k", "bf16", "bf16"),
    ("mfma.f32.32x32x8bf16.1k", "bf16", "bf16"), ("mfma.f32.16x16x8.xf32", "xf32", "xf32"),
    *((f"mfma.f32.{shape}.{x}.{y}", f"{x}_fnuz", f"{y}_fnuz") for shape in ("16x16x32", "32x32x16") for x in ("fp8", "bf8") for y in ("fp8", "bf8")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "x", "y"), FUSED, ids=lambda v: v)
def test_fused_sums_of_gfx942(name: str, x: str, y: str) -> None:
    """Bit for bit, on data whose exponents differ enough for every cut to matter; also with subnormal factors and sums."""
    f = form("gfx942", name, x, y)
    rng = np.random.default_rng(6)
    operands = []
    for dim, element in ((f.m, x), (f.n, y)):
        if element.endswith("fnuz"):
            table = values_of(element)
            codes = rng.choice(np.flatnonzero(np.isfinite(table)), (f.blocks, dim, f.k)).astype(np.uint8)
            operands.append((codes, table[codes]))
        else:
            spread_ = np.exp2(rng.integers(-10, 8, (f.blocks, dim, f.k)))
            values = (rng.standard_normal((f.blocks, dim, f.k)) * spread_).astype(
                np.float16 if element == "f16" else ml_dtypes.bfloat16 if element == "bf16" else np.float32
            )
            values[:, 1] *= np.asarray(2.0**-12 if element == "f16" else 2.0**-120, values.dtype)
            if element == "xf32":
                values = (values.view(np.uint32) & 0xFFFFE000).view(np.float32)
            values[:, 2, :2] = 0
            values = values.astype(np.float64)
            operands.append((codes_of(values, element), values))
    (ca, a), (cb, b) = operands
    c = (
        (rng.standard_normal((f.blocks, f.m, f.n)) * np.exp2(rng.integers(-30, 20, (f.blocks, f.m, f.n))))
        .astype(np.float32)
        .astype(np.float64)
    )
    c[:, 0] = 0
    got = run(f, ca, cb, c)
    differs = False
    for block in range(min(f.blocks, 2)):
        for i, j in itertools.product(sorted({0, 1, 2, *range(0, f.m, 5)}), sorted({1, 2, *range(0, f.n, 6)})):
            if i >= f.m or j >= f.n:
                continue
            want = fused(a[block, i], b[block, j], c[block, i, j], x, y)
            assert got[block, i, j] == want, f"{name} block {block} [{i}, {j}]"
            differs |= (
                want
                != chain(a[block, i : i + 1], b[block, j : j + 1], c[block, i : i + 1, j : j + 1], np.float32)[0, 0]
            )
    assert differs or f.k < 4  # else this data could not tell the two apart


def test_fused_sums_with_infinities_and_overflow() -> None:
    f = form("gfx942", "mfma.f32.16x16x16bf16.1k", "bf16", "bf16")
    a, b = np.zeros((1, 16, 16)), np.zeros((1, 16, 16))
    a[0, 0, 3], b[0, :, 3] = 2.0**100, 2.0**100  # 2^200: infinite
    a[0, 1, :2] = 2.0**100, -(2.0**100)
    b[0, :, :2] = 2.0**100  # +inf - inf
    a[0, 2, 0] = np.inf
    a[0, 3, 0] = np.nan
    a[0, 4, 5], b[0, :, 5] = 3, 2
    d = run(f, codes_of_any(a), codes_of_any(b), np.zeros((1, 16, 16)))[0]
    assert (
        (d[0] == np.inf).all()
        and np.isnan(d[1]).all()
        and (d[2] == np.inf).all()
        and np.isnan(d[3]).all()
        and (d[4] == 6).all()
    )


def codes_of_any(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


ORDERED = [
    ("gfx950", "mfma.f32.16x16x32.bf16", "bf16"), ("gfx950", "mfma.f32.32x32x16.f16", "f16"),
    ("gfx1250", "wmma.f32.16x16x32.f16", "f16"), ("gfx950", "mfma.scale.f32.16x16x128.f8f6f4", "fp4"),
]  # fmt: skip


@pytest.mark.parametrize(("arch", "name", "element"), ORDERED)
def test_the_simulators_own_order_where_sources_are_silent(arch: str, name: str, element: str) -> None:
    """k ascending, fp32, one rounding a k. gfx950, gfx1250: nothing is published."""
    f = form(arch, name, element, element)
    rng = np.random.default_rng(5)
    if element in ("f16", "bf16"):
        a, b = (
            rng.standard_normal((1, 16 if f.m == 16 else 32, f.k))
            .astype(np.float16)
            .astype(ml_dtypes.bfloat16)
            .astype(np.float64)
            for _ in range(2)
        )
        if element == "f16":
            a, b = (v.astype(np.float16).astype(np.float64) for v in (a, b))
        codes = [codes_of(v, element) for v in (a, b)]
    else:
        table = values_of(element)
        good = np.flatnonzero(np.isfinite(table))
        codes = [rng.choice(good, (1, f.m, f.k)).astype(np.uint8) for _ in range(2)]
        a, b = (table[v] for v in codes)
    c = (rng.standard_normal((1, f.m, f.n)) * 1e4).astype(np.float32).astype(np.float64)
    scales = [np.full((f.m, f.k // 32), 127, np.uint8)] * 2 if f.scaled else []
    got = run(f, codes[0], codes[1], c, *scales)
    sample = list(itertools.product(range(0, f.m, 5), range(0, f.n, 7)))
    for i, j in sample:
        want = chain(a[0, i : i + 1], b[0, j : j + 1], c[0, i : i + 1, j : j + 1], np.float32)
        assert got[0, i, j] == want[0, 0]


def test_negated_and_cleared_signs_reach_nan_and_zero() -> None:
    """-|C| of gfx1250 works on the sign bit."""
    f = next(x for x in FORMS if x.modifiers.get("negate") == "|c")
    c = np.full((1, 16, 16), -0.0)
    c[0, 0, 0], c[0, 1, 1] = np.inf, -np.inf
    d = run(f, np.zeros((1, 16, 32), np.uint16), np.zeros((1, 16, 32), np.uint16), c)
    assert d[0, 0, 0] == -np.inf and d[0, 1, 1] == -np.inf


def test_integers_wrap_unless_clamped() -> None:
    f = mfma(("mfma.i32.16x16x32.i8", 16, 32, 1, "i8", "i64"), "gfx942")
    c = np.full((1, 16, 16), 2.0**31 - 1)
    one = np.zeros((1, 16, 32), np.uint8)
    one[..., 0] = 1
    assert (run(f, one, one, c) == -(2.0**31)).all()
    for x, wanted in (("u8", 2.0**31 - 1), ("i8", 2.0**31 - 1)):
        base = form("gfx1250", "wmma.i32.16x16x64.iu8", x, x)
        clamped = Form(**{**base.__dict__, "attributes": base.attributes + ", clamp = true"})
        k = np.zeros((1, 16, 64), np.uint8)
        k[..., :4] = 100
        assert (run(clamped, k, k, c) == wanted).all()
    low = np.full((1, 16, 16), -(2.0**31))
    minus = np.zeros((1, 16, 64), np.uint8)
    minus[..., 0] = 0x80
    assert (run(clamped, minus, np.where(minus, 0x7F, 0).astype(np.uint8), low) == -(2.0**31)).all()
