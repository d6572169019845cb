"""Conversions to and from the small float formats, bit for bit.

Sources
  Values of the codes: OCP FP8 1.0 and OCP MX 1.0, as ml_dtypes has them; fnuz: CDNA3 ISA guide, ml_dtypes likewise.
  Nearest even and stochastic rounding, saturation: CDNA3 and CDNA4 ISA guides, V_CVT_PK_FP8_F32, V_CVT_SR_FP8_F32
  ("stochastic rounding using seed data from the second input"); AMD's host model in HIP, amd_hip_ocp_host.hpp
  (from_float, from_float_sr), restated on exact rationals below. Overflow: MODE.FP16_OVFL = 0, which amdhsa kernels
  start with; HIP and Composable Kernel clamp before they convert for that reason. fp6 and fp4 saturate. Scales: the
  exponent of a float32 (CDNA4: "using the exponent provided by the ... single-precision float input"); packing divides,
  unpacking multiplies, the six-bit stream is little-endian, 2xpk16 interleaves its sources: AMD's FPSan tests, which
  say gfx950 showed so.
Silent, so any will do here: a NaN's payload; what NaN becomes in fp6 and fp4 (HIP's header says the largest, rocjitsu
zero).
"""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from machine import alignment, launch, lower

from fourwave.sim import UnknownOperation
from fourwave.sim.lowering import HANDLERS

# name -> (dtype, bits, mantissa, least exponent, largest exponent)
FORMATS: dict[str, tuple[Any, int, int, int, int]] = {
    "fp8": (ml_dtypes.float8_e4m3fn, 8, 3, -6, 8), "bf8": (ml_dtypes.float8_e5m2, 8, 2, -14, 15), "fp6": (ml_dtypes.float6_e2m3fn, 6, 3, 0, 2),
    "bf6": (ml_dtypes.float6_e3m2fn, 6, 2, -2, 4), "fp4": (ml_dtypes.float4_e2m1fn, 4, 1, 0, 2),
    "fp8_fnuz": (ml_dtypes.float8_e4m3fnuz, 8, 3, -7, 7), "bf8_fnuz": (ml_dtypes.float8_e5m2fnuz, 8, 2, -15, 15),
}  # fmt: skip
WIDE = {"f32": (np.float32, 23), "f16": (np.float16, 10), "bf16": (ml_dtypes.bfloat16, 7)}


@functools.cache
def table(fmt: str) -> np.ndarray:
    dtype, bits, *_ = FORMATS[fmt]
    return np.arange(1 << bits, dtype=np.uint8).view(dtype).astype(np.float64)


@functools.cache
def ladder(fmt: str) -> tuple[list[float], list[int]]:
    """Non-negative finite values in order, and their codes."""
    half = table(fmt)[: 1 << (FORMATS[fmt][1] - 1)]
    codes = [c for c, v in enumerate(half) if math.isfinite(v)]
    return [float(half[c]) for c in codes], codes


def overflow(fmt: str) -> int | None:
    """Code that a magnitude past the largest becomes; None: NaN."""
    return {"bf8": 0x7C, "fp6": 0x1F, "bf6": 0x1F, "fp4": 7}.get(fmt)


@functools.lru_cache(maxsize=1 << 16)
def nearest(x: Fraction, fmt: str) -> int | None:
    """Code of a magnitude, nearest even; None: NaN."""
    values, codes = ladder(fmt)
    top = Fraction(values[-1])
    step = top - Fraction(values[-2])
    if x > top + step / 2 or (x == top + step / 2 and codes[-1] % 2):
        return overflow(fmt)
    if x > top:
        return codes[-1]
    place = int(np.searchsorted(values, float(x), side="right")) - 1
    while Fraction(values[place]) > x:
        place -= 1
    if Fraction(values[place]) == x:
        return codes[place]
    below, above = Fraction(values[place]), Fraction(values[place + 1])
    if x - below == above - x:
        return codes[place] if codes[place] % 2 == 0 else codes[place + 1]
    return codes[place] if x - below < above - x else codes[place + 1]


def stochastic(x: Fraction, fmt: str, seed: int, source_mantissa: int) -> int | None:
    """from_float_sr of HIP's header: the source's mantissa, shifted and cut for a result below the normal range, plus
    the seed's highest bits."""
    _, _, mantissa, least, most = FORMATS[fmt]
    e = math.floor(math.log2(x)) if x else least
    while Fraction(2) ** e > x:
        e -= 1
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    if e > most:
        return overflow(fmt)
    whole = int(x * Fraction(2) ** (source_mantissa - max(e, least)))
    dropped = source_mantissa - mantissa
    kept = (whole + (seed >> (32 - dropped))) >> dropped
    value = kept * Fraction(2) ** (max(e, least) - mantissa)
    values, codes = ladder(fmt)
    return overflow(fmt) if value > Fraction(values[-1]) else codes[values.index(float(value))]


def signed(code: int | None, negative: bool, fmt: str) -> int | None:
    if code is None or not negative:
        return code
    if fmt.endswith("fnuz"):
        return code | 0x80 if code else 0
    return code | 1 << (FORMATS[fmt][1] - 1)


def expect(value: float, fmt: str, scale_exponent: int = 0, seed: int | None = None, source: str = "f32") -> int | None:
    """Code of value / 2^scale_exponent; None: NaN."""
    negative = math.copysign(1, value) < 0
    if math.isnan(value):
        return None
    if math.isinf(value):
        return signed(overflow(fmt), negative, fmt)
    x = abs(Fraction(value)) / Fraction(2) ** scale_exponent
    code = (nearest(x, fmt) if seed is None else stochastic(x, fmt, seed, WIDE[source][1])) if x else 0
    return signed(code, negative, fmt)


def is_nan(code: int, fmt: str) -> bool:
    return bool(np.isnan(table(fmt)[code])) if fmt not in ("fp6", "bf6", "fp4") else True


def assert_codes(got: np.ndarray, want: list[int | None], fmt: str, values: np.ndarray) -> None:
    for i, (g, w) in enumerate(zip(got, want)):
        good = is_nan(int(g), fmt) if w is None else int(g) == w
        assert good, f"item {i}: {fmt}({values[i]!r}) gave {int(g):#x}, not {'NaN' if w is None else hex(w)}"


def interesting(fmt: str, source: str = "f32", scale: int = 0) -> np.ndarray:
    """Every value of the format, the middles between neighbours and what lies just beside them, special values, random
    ones."""
    rng = np.random.default_rng(3)
    values, _ = ladder(fmt)
    edges = [
        *values,
        *((a + b) / 2 for a, b in itertools.pairwise(values)),
        values[-1] * 1.05,
        values[-1] * 1.2,
        values[-1] * 3,
        values[1] / 2,
        values[1] / 4,
    ]
    near = [v * f for v in edges for f in (1, 1 + 2**-7, 1 - 2**-7)]
    random = list(rng.standard_normal(80) * np.exp2(rng.integers(-8, 6, 80)))
    listed = np.array([*near, *random], np.float64) * 2.0**scale
    listed = np.concatenate([listed, -listed, [0.0, -0.0, np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore"):
        return listed.astype(WIDE[source][0])


def per_lane(body: str, inputs: list[tuple[str, np.ndarray]], result: str, arch: str) -> np.ndarray:
    """Run `body`, which makes %r from %a, %b, ..., on one item a lane; bytes [item, ...] of the result."""
    wave = 32 if arch == "gfx1250" else 64
    text = f"""%tid = rocdl.workitem.id.x : i32
      %gid = rocdl.workgroup.id.x : i32
      %wave = llvm.mlir.constant({wave} : i32) : i32
      %first = llvm.mul %gid, %wave : i32
      %item = llvm.add %first, %tid : i32\n"""
    names = "abcd"[: len(inputs)]
    count = len(inputs[0][1])
    padded = []
    for n, (t, v) in zip(names, inputs):
        stride = t.replace("vector", "!llvm.array").replace("x", " x ")
        text += f"""%{n}p = llvm.getelementptr %{n}in[%item] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {stride}
          %{n} = llvm.load %{n}p{alignment(t)} : !llvm.ptr<1> -> {t}\n"""
        raw = np.ascontiguousarray(v).view(np.uint8).reshape(count, -1)
        padded.append(np.concatenate([raw, np.zeros((-count % wave, raw.shape[1]), np.uint8)]))
    stride = result.replace("vector", "!llvm.array").replace("x", " x ")
    text += f"""{body}
      %rp = llvm.getelementptr %out[%item] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, {stride}
      llvm.store %r, %rp{alignment(result)} : {result}, !llvm.ptr<1>"""
    program = lower(text, ", ".join(f"%{n}in: !llvm.ptr<1>" for n in names) + ", %out: !llvm.ptr<1>", arch=arch)
    size = {"i32": 4, "f32": 4}.get(result) or int(result[7 : result.index("x")]) * {
        "f32": 4,
        "i32": 4,
        "f16": 2,
        "bf16": 2,
        "i16": 2,
    }[result[result.index("x") + 1 : -1]]
    out = np.full((len(padded[0]), size), 0xA5, np.uint8)
    launch(program, *padded, out, grid=len(padded[0]) // wave, block=wave)
    return out[:count]


OLD = 0x5AC3962B


def old(count: int) -> np.ndarray:
    return np.full(count, OLD, np.uint32)


ARCHS = ("gfx942", "gfx950", "gfx1250")


def named(fmt: str, arch: str) -> str:
    return fmt + "_fnuz" if arch == "gfx942" else fmt


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fmt", ["fp8", "bf8"])
@pytest.mark.parametrize("word", [0, 1])
def test_cvt_pk(fmt: str, arch: str, word: int) -> None:
    kind = named(fmt, arch)
    a = interesting(kind)
    b = a[::-1].copy()
    body = f'%r = "rocdl.cvt.pk.{fmt}.f32"(%a, %b, %c) {{wordSel = {"true" if word else "false"}}} : (f32, f32, i32) -> i32'
    got = per_lane(body, [("f32", a), ("f32", b), ("i32", old(len(a)))], "i32", arch)
    assert_codes(got[:, 2 * word], [expect(float(x), kind) for x in a], kind, a)
    assert_codes(got[:, 2 * word + 1], [expect(float(x), kind) for x in b], kind, b)
    kept = np.frombuffer(np.uint32(OLD).tobytes(), np.uint8)[2 - 2 * word : 4 - 2 * word]
    assert (got[:, 2 - 2 * word : 4 - 2 * word] == kept).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fmt", ["fp8", "bf8"])
def test_cvt_sr(fmt: str, arch: str) -> None:
    kind = named(fmt, arch)
    a = interesting(kind)
    seeds = np.random.default_rng(1).integers(0, 1 << 32, len(a), dtype=np.uint32)
    seeds[::7] = 0xFFFFFFFF
    seeds[1::7] = 0
    byte = 2
    body = f'%r = "rocdl.cvt.sr.{fmt}.f32"(%a, %b, %c) {{byteSel = {byte} : i32}} : (f32, i32, i32) -> i32'
    got = per_lane(body, [("f32", a), ("i32", seeds), ("i32", old(len(a)))], "i32", arch)
    assert_codes(got[:, byte], [expect(float(x), kind, seed=int(s)) for x, s in zip(a, seeds)], kind, a)
    assert (got[:, [0, 1, 3]] == np.frombuffer(np.uint32(OLD).tobytes(), np.uint8)[[0, 1, 3]]).all()


def words_of_codes(fmt: str) -> np.ndarray:
    """Dwords that hold every 8-bit code, each in every byte."""
    return np.array([c | (c + 1 & 255) << 8 | (c + 2 & 255) << 16 | (c + 3 & 255) << 24 for c in range(256)], np.uint32)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("fmt", ["fp8", "bf8"])
def test_cvt_back(fmt: str, arch: str) -> None:
    values = table(named(fmt, arch)).astype(np.float32)
    w = words_of_codes(fmt)
    for byte in range(4):
        body = f'%r = "rocdl.cvt.f32.{fmt}"(%a) {{byteSel = {byte} : i32}} : (i32) -> f32'
        got = per_lane(body, [("i32", w)], "f32", arch).view(np.float32)[:, 0]
        np.testing.assert_array_equal(got, values[(np.arange(256) + byte) % 256])
    for word in range(2):
        body = f'%r = "rocdl.cvt.pk.f32.{fmt}"(%a) {{wordSel = {"true" if word else "false"}}} : (i32) -> vector<2xf32>'
        got = per_lane(body, [("i32", w)], "vector<2xf32>", arch).view(np.float32)
        for i in range(2):
            np.testing.assert_array_equal(got[:, i], values[(np.arange(256) + 2 * word + i) % 256])


def scales(count: int) -> tuple[np.ndarray, np.ndarray]:
    """float32 scales and the exponents that count: mantissas and signs must not."""
    rng = np.random.default_rng(5)
    exponents = rng.integers(-6, 7, count)
    exponents[::11] = rng.integers(-127, 128, len(exponents[::11]))
    bits = (exponents + 127).astype(np.uint32) << 23 | rng.integers(0, 1 << 23, count, dtype=np.uint32)
    bits |= rng.integers(0, 2, count, dtype=np.uint32) << 31
    return bits.view(np.float32), exponents


def to_scale(fmt: str, source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a = interesting(fmt, source)
    s, exponents = scales(len(a))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = (a.astype(np.float64) * np.exp2(exponents)).astype(a.dtype)
    return scaled, s, exponents


@pytest.mark.parametrize("source", WIDE)
@pytest.mark.parametrize("fmt", ["fp8", "bf8", "fp4"])
def test_scalef32_pk(fmt: str, source: str) -> None:
    a, s, exponents = to_scale(fmt, source)
    b = np.roll(a, 1)
    bits = FORMATS[fmt][1]
    place = 1 if bits == 8 else 2
    select = "dstLoHiSel = true" if bits == 8 else f"dstSelIndex = {place} : i32"
    result = "vector<2xi16>" if bits == 8 else "i32"
    if source == "f32":
        inputs, types, names = [("f32", a), ("f32", b)], "f32, f32", "%b, %c"
    else:
        inputs, types, names = [(f"vector<2x{source}>", np.stack([a, b], 1))], f"vector<2x{source}>", "%b"
    scale = "%" + "abcd"[len(inputs) + 1]
    body = f'%r = "rocdl.cvt.scalef32.pk.{fmt}.{source}"(%a, {names}, {scale}) {{{select}}} : ({result}, {types}, f32) -> {result}'
    got = per_lane(body, [(result, old(len(a))), *inputs, ("f32", s)], result, "gfx950").view(np.uint32)[:, 0]
    field = got >> (place * 2 * bits) & ((1 << 2 * bits) - 1)
    for codes, values in ((field & ((1 << bits) - 1), a), (field >> bits, b)):
        assert_codes(
            codes, [expect(float(x), fmt, int(e)) if e < 128 else None for x, e in zip(values, exponents)], fmt, values
        )
    rest = ~np.uint32(((1 << 2 * bits) - 1) << (place * 2 * bits))
    assert (got & rest == OLD & rest).all()


@pytest.mark.parametrize("source", WIDE)
@pytest.mark.parametrize("fmt", ["fp8", "bf8", "fp4"])
def test_scalef32_sr(fmt: str, source: str) -> None:
    a, s, exponents = to_scale(fmt, source)
    seeds = np.random.default_rng(2).integers(0, 1 << 32, len(a), dtype=np.uint32)
    four = fmt == "fp4"
    values = [a, np.roll(a, 1)] if four else [a]
    t = f"vector<2x{source}>" if four else source
    held = np.stack(values, 1) if four else a
    body = f'%r = "rocdl.cvt.scalef32.sr.{"pk." if four else ""}{fmt}.{source}"(%a, %b, %c, %d) {{dstSelIndex = 3 : i32}} : (i32, {t}, i32, f32) -> i32'
    got = (
        per_lane(body, [("i32", old(len(a))), (t, held), ("i32", seeds), ("f32", s)], "i32", "gfx950").view(np.uint32)[
            :, 0
        ]
        >> 24
    )
    for i, v in enumerate(values):
        want = [
            expect(float(x), fmt, int(e), int(z), source) if e < 128 else None for x, e, z in zip(v, exponents, seeds)
        ]
        assert_codes(got >> (4 * i) & (15 if four else 255), want, fmt, v)


def unpacked(codes: np.ndarray, fmt: str, exponents: np.ndarray, target: str) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        exact = table(fmt)[codes] * np.exp2(exponents.astype(np.float64))
        if (
            target == "bf16"
        ):  # from float64 in one step: a float32 in between is exact, or its own rounding cannot make a tie of these few bits
            return exact.astype(np.float32).astype(ml_dtypes.bfloat16)
        return exact.astype(WIDE[target][0])


@pytest.mark.parametrize("target", WIDE)
@pytest.mark.parametrize("fmt", ["fp8", "bf8", "fp4"])
def test_scalef32_pk_back(fmt: str, target: str) -> None:
    w = words_of_codes(fmt)
    s, exponents = scales(len(w))
    exponents = np.where(exponents == 128, 0, exponents)
    bits = FORMATS[fmt][1]
    place = 1 if bits == 8 else 3
    select = "srcLoHiSel = true" if bits == 8 else f"srcSelIndex = {place} : i32"
    body = f'%r = "rocdl.cvt.scalef32.pk.{target}.{fmt}"(%a, %b) {{{select}}} : (i32, f32) -> vector<2x{target}>'
    got = per_lane(body, [("i32", w), ("f32", s)], f"vector<2x{target}>", "gfx950").view(WIDE[target][0])
    for i in range(2):
        codes = w >> (place * 2 * bits + bits * i) & ((1 << bits) - 1)
        np.testing.assert_array_equal(
            got[:, i].astype(np.float64), unpacked(codes, fmt, exponents, target).astype(np.float64)
        )


@pytest.mark.parametrize("fmt", ["fp8", "bf8"])
def test_scalef32_one_back(fmt: str) -> None:
    w = words_of_codes(fmt)
    s, exponents = scales(len(w))
    body = f'%r = "rocdl.cvt.scalef32.f32.{fmt}"(%a, %b) {{srcSelIndex = 3 : i32}} : (i32, f32) -> f32'
    got = per_lane(body, [("i32", w), ("f32", s)], "f32", "gfx950").view(np.float32)[:, 0]
    np.testing.assert_array_equal(got, unpacked(w >> 24, fmt, exponents, "f32"))
    body = f'%r = "rocdl.cvt.scalef32.f16.{fmt}"(%c, %a, %b) {{srcSelIndex = 1 : i32, dstLoHiSel = true}} : (vector<2xf16>, i32, f32) -> vector<2xf16>'
    got = per_lane(body, [("i32", w), ("f32", s), ("vector<2xf16>", old(len(w)))], "vector<2xf16>", "gfx950")
    np.testing.assert_array_equal(got.view(np.float16)[:, 1], unpacked(w >> 8 & 255, fmt, exponents, "f16"))
    assert (got.view(np.uint16)[:, 0] == OLD & 0xFFFF).all()


def stream(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """[item, byte] -> [item, code], a little-endian stream."""
    flat = np.unpackbits(words, axis=1, bitorder="little")[:, : bits * count].reshape(len(words), count, bits)
    return (flat.astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(2)


Vector = tuple[str, str, str, int, str]  # operation, format, source, elements, arch
NEAREST: list[Vector] = [
    *((f"pk32.{f}.{s}", f, s, 32, "gfx950") for f in ("fp6", "bf6") for s in ("f16", "bf16")),
    *((f"pk8.{f}.{s}", f, s, 8, "gfx1250") for f in ("fp8", "bf8", "fp4") for s in WIDE),
    *((f"pk16.{f}.{s}", f, s, 16, "gfx1250") for f in ("fp6", "bf6") for s in WIDE),
]
VECTORS: list[Vector] = [
    *NEAREST,
    *((f"2xpk16.{f}.f32", f, "f32", 32, "gfx950") for f in ("fp6", "bf6")),
    *((f"sr.{name}", f, s, n, arch) for name, f, s, n, arch in NEAREST),
    *((f"sr.pk32.{f}.f32", f, "f32", 32, "gfx950") for f in ("fp6", "bf6")),
]


@pytest.mark.parametrize("case", VECTORS, ids=lambda c: c[0])
def test_scalef32_vector(case: Vector) -> None:
    name, fmt, source, count, arch = case
    bits = FORMATS[fmt][1]
    a = interesting(fmt, source)
    a = np.resize(a, (-(-len(a) // count), count))
    s, exponents = scales(len(a))
    exponents = np.clip(exponents, -6, 6)
    s = ((exponents + 127).astype(np.uint32) << 23 | s.view(np.uint32) & 0x7FFFFF).view(np.float32)
    seeds = np.random.default_rng(4).integers(0, 1 << 32, len(a), dtype=np.uint32)
    n = bits * count // 32
    result = f"vector<{n}xi32>" if n > 1 else "i32"
    t = f"vector<{count}x{source}>"
    inputs: list[tuple[str, np.ndarray]] = [(t, a), ("f32", s)]
    operands, types = "%a, %b", f"{t}, f32"
    if name.startswith("2x"):
        t = f"vector<16x{source}>"
        inputs = [(t, np.ascontiguousarray(a[:, 0::2])), (t, np.ascontiguousarray(a[:, 1::2])), ("f32", s)]
        operands, types = "%a, %b, %c", f"{t}, {t}, f32"
    elif name.startswith("sr"):
        inputs.append(("i32", seeds))
        operands, types = "%a, %c, %b", f"{t}, i32, f32"
    body = f'%r = "rocdl.cvt.scalef32.{name}"({operands}) : ({types}) -> {result}'
    got = stream(per_lane(body, inputs, result, arch), bits, count)
    for i in range(count):
        want = [
            expect(float(x), fmt, int(e), int(z) if name.startswith("sr") else None, source)
            for x, e, z in zip(a[:, i], exponents, seeds)
        ]
        assert_codes(got[:, i], want, fmt, a[:, i])


@pytest.mark.parametrize("target", WIDE)
@pytest.mark.parametrize("fmt", ["fp6", "bf6"])
def test_scalef32_pk32_back(fmt: str, target: str) -> None:
    rng = np.random.default_rng(6)
    w = rng.integers(0, 1 << 32, (64, 6), dtype=np.uint32)
    s, exponents = scales(64)
    body = f'%r = "rocdl.cvt.scalef32.pk32.{target}.{fmt}"(%a, %b) : (vector<6xi32>, f32) -> vector<32x{target}>'
    got = per_lane(body, [("vector<6xi32>", w), ("f32", s)], f"vector<32x{target}>", "gfx950").view(WIDE[target][0])
    codes = stream(w.view(np.uint8), 6, 32)
    for i in range(32):
        np.testing.assert_array_equal(
            got[:, i].astype(np.float64), unpacked(codes[:, i], fmt, exponents, target).astype(np.float64)
        )


def test_a_scale_whose_exponent_is_all_ones_gives_nan() -> None:
    a = np.array([0.0, 1.0, -3.0], np.float32)
    s = np.array([np.inf, np.nan, np.inf], np.float32)
    body = '%r = "rocdl.cvt.scalef32.sr.fp8.f32"(%c, %a, %c, %b) {dstSelIndex = 0 : i32} : (i32, f32, i32, f32) -> i32'
    got = per_lane(body, [("f32", a), ("f32", s), ("i32", np.zeros(3, np.uint32))], "i32", "gfx950")
    assert all(c & 0x7F == 0x7F for c in got[:, 0])


@pytest.mark.parametrize("arch", ARCHS)
def test_pkrtz(arch: str) -> None:
    rng = np.random.default_rng(7)
    a = np.concatenate(
        [
            (rng.standard_normal(200) * np.exp2(rng.integers(-26, 17, 200))),
            [0.0, -0.0, np.inf, -np.inf, 65504.0, 65519.0, 70000.0, -1e30],
        ]
    ).astype(np.float32)
    body = '%r = "rocdl.cvt.pkrtz"(%a, %b) : (f32, f32) -> vector<2xf16>'
    b = a[::-1].copy()
    got = per_lane(body, [("f32", a), ("f32", b)], "vector<2xf16>", arch).view(np.float16)
    for i, v in enumerate((a, b)):
        with np.errstate(over="ignore"):
            down = v.astype(np.float16)
        down = np.where(
            np.isinf(down) & np.isfinite(v), np.copysign(np.float16(65504), v.astype(np.float32)), down
        ).astype(np.float16)
        toward = np.where(np.abs(down.astype(np.float32)) > np.abs(v), np.nextafter(down, np.float16(0)), down)
        np.testing.assert_array_equal(got[:, i].view(np.uint16), toward.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("arch", ARCHS)
def test_fmed3(arch: str) -> None:
    """V_MED3_F32: the middle one; with a NaN, the least of the others."""
    corners = [0.0, 1.0, -2.0, 5.5, np.inf, -np.inf, np.nan, 3.0]
    triples = np.array(list(itertools.product(corners, repeat=3)), np.float32)
    columns = [np.ascontiguousarray(triples[:, i]) for i in range(3)]
    body = '%r = "rocdl.fmed3"(%a, %b, %c) : (f32, f32, f32) -> f32'
    got = per_lane(body, [("f32", c) for c in columns], "f32", arch).view(np.float32)[:, 0]
    want = np.where(
        np.isnan(triples).any(1),
        np.fmin(np.fmin(triples[:, 0], triples[:, 1]), triples[:, 2]),
        np.sort(triples, 1)[:, 1],
    )
    np.testing.assert_array_equal(got, want)


def test_what_an_arch_does_not_have_raises() -> None:
    body = """%a = llvm.mlir.zero : f32\n %v = llvm.mlir.zero : vector<8xf32>
      %r = "rocdl.cvt.scalef32.pk8.fp8.f32"(%v, %a) : (vector<8xf32>, f32) -> vector<2xi32>"""
    with pytest.raises(UnknownOperation, match="gfx950 does not have it"):
        lower(body, arch="gfx950")


def test_every_conversion_is_tested() -> None:
    known = {n.removeprefix("rocdl.cvt.") for n in HANDLERS if n.startswith("rocdl.cvt.")}
    tested = {f"scalef32.{n[0]}" for n in VECTORS} | {"pkrtz"}
    tested |= {
        n
        for f in ("fp8", "bf8")
        for n in (f"pk.{f}.f32", f"sr.{f}.f32", f"f32.{f}", f"pk.f32.{f}", f"scalef32.f32.{f}", f"scalef32.f16.{f}")
    }
    tested |= {
        f"scalef32.{p}.{f}.{s}"
        for p, f, s in itertools.product(("pk", "sr"), ("fp8", "bf8", "fp4"), WIDE)
        if (p, f) != ("sr", "fp4")
    }
    tested |= {f"scalef32.sr.pk.fp4.{s}" for s in WIDE} | {
        f"scalef32.pk.{s}.{f}" for s in WIDE for f in ("fp8", "bf8", "fp4")
    }
    tested |= {f"scalef32.pk32.{s}.{f}" for s in WIDE for f in ("fp6", "bf6")}
    assert known == tested
