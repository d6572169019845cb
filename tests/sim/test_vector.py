"""Vectors, packed as in registers, and aggregates: extract, insert, shuffle, bitcast, and arithmetic on every element.

Source: LLVM Language Reference, "Vector Operations", "Aggregate Operations", "bitcast" (as if stored and loaded, little-endian).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from exact import BF16, F16, F32, Format
from machine import BITS, itemwise

from fourwave.sim import UnknownOperation

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

ELEMENTS = ["i8", "i16", "bf16", "f16", "i32", "f32", "i64"]
COUNTS = [2, 3, 8]
ITEMS = 128


def padded(count: int) -> int:
    """Elements from one vector in memory to the next: an allocation is a power of two."""
    return 1 << (count - 1).bit_length()


def random(t: str, count: int, seed: int = 0, items: int = ITEMS) -> np.ndarray:
    dtype = BITS[t]
    rng = np.random.default_rng(seed)
    return rng.integers(0, np.iinfo(dtype).max, (items, padded(count)), dtype=dtype, endpoint=True)


def vector(t: str, count: int) -> str:
    return f"vector<{count}x{t}>"


def check(
    body: str,
    inputs: list[tuple[str, np.ndarray]],
    t: str,
    count: int,
    want: np.ndarray,
    cares: list[int] | None = None,
) -> None:
    """Compare %r, a vector of `count` elements, with `want`; `cares`: the elements that are defined."""
    got = itemwise("\n  " + body, inputs, vector(t, count), width=padded(count))
    columns = list(range(count)) if cares is None else cares
    np.testing.assert_array_equal(got[:, columns], want[:, columns])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("t", ELEMENTS)
def test_extract_and_insert(t: str, count: int) -> None:
    """Constant indices, every position, and run-time ones, different in each lane."""
    a, e = random(t, count), random(t, 1, 1)[:, 0]
    v = vector(t, count)
    for i in sorted({0, 1, count // 2, count - 1}):
        k = f"%k = llvm.mlir.constant({i} : i32) : i32\n  "
        got = itemwise(f"\n  {k}%r = llvm.extractelement %a[%k : i32] : {v}", [(v, a)], t)
        np.testing.assert_array_equal(got, a[:, i])
        want = a.copy()
        want[:, i] = e
        check(f"{k}%r = llvm.insertelement %b, %a[%k : i32] : {v}", [(v, a), (t, e)], t, count, want)
    index = (np.arange(ITEMS) * 7 % count).astype(np.uint32)
    lanes = np.arange(ITEMS)
    got = itemwise(f"\n  %r = llvm.extractelement %a[%b : i32] : {v}", [(v, a), ("i32", index)], t)
    np.testing.assert_array_equal(got, a[lanes, index])
    want = a.copy()
    want[lanes, index] = e
    check(f"%r = llvm.insertelement %b, %a[%c : i32] : {v}", [(v, a), (t, e), ("i32", index)], t, count, want)


@pytest.mark.parametrize("t", ELEMENTS)
def test_shuffles(t: str) -> None:
    """Random masks of every length from two sources of any length, with undefined elements; and the dword-aligned ones."""
    rng = np.random.default_rng(len(t))
    masks: list[tuple[int, list[int]]] = [
        (4, [2, 3]), (4, [1, 2]), (4, [0, 1, 2, 3, 4, 5, 6, 7]), (4, [4, 5, 6, 7]), (4, [3, 2, 1, 0]), (8, [4, 5, 6, 7]), (8, [3, 4, 5, 6]),
        (8, [6, 7, 8, 9]), (8, [7, 8, 9, 10]), (2, [3, 0]), (2, [0, 0, 0]), (3, [5, 4, 3, 2, 1, 0]), (4, [0, -1, 2, -1]), (4, [-1, -1, 0, 1]),
    ]  # fmt: skip
    for _ in range(6):
        source, length = int(rng.integers(2, 9)), int(rng.integers(2, 9))
        masks.append((source, [int(x) for x in rng.integers(-1, 2 * source, length)]))
    for source, mask in masks:
        a, b = random(t, source, 2), random(t, source, 3)
        both = np.concatenate([a[:, :source], b[:, :source]], axis=1)
        v = vector(t, source)
        cares = [i for i, m in enumerate(mask) if m >= 0]
        if not cares:
            continue
        check(f"%r = llvm.shufflevector %a, %b {mask} : {v}", [(v, a), (v, b)], t, len(mask), both[:, mask], cares)


CASTS = [
    ("vector<4xi8>", "i32"), ("i32", "vector<4xi8>"), ("vector<2xbf16>", "i32"), ("f32", "vector<2xi16>"), ("vector<8xi8>", "vector<2xf32>"),
    ("vector<4xbf16>", "vector<4xi16>"), ("vector<4xbf16>", "i64"), ("i64", "vector<4xf16>"), ("vector<2xi64>", "vector<16xi8>"),
    ("vector<16xi8>", "vector<8xbf16>"), ("vector<4xi32>", "vector<8xf16>"), ("i16", "bf16"), ("f16", "i16"), ("vector<2xi8>", "i16"), ("f32", "i32"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_bitcast(source: str, target: str) -> None:
    def shape(t: str) -> tuple[str, int]:
        return (t[t.index("x") + 1 : -1], int(t[7 : t.index("x")])) if t.startswith("vector") else (t, 1)

    t, count = shape(source)
    u, length = shape(target)
    a = random(t, count, 4)
    got = itemwise(
        f"\n  %r = llvm.bitcast %a : {source} to {target}",
        [(source, a if count > 1 else a[:, 0])],
        target,
        width=length,
    )
    np.testing.assert_array_equal(np.asarray(got).reshape(ITEMS, length), a.view(BITS[u]).reshape(ITEMS, length))


def test_bitcast_between_bits_and_integers() -> None:
    a, b = random("i16", 8, 5), random("i16", 8, 6)
    less = a[:, :8] < b[:, :8]
    body = """
  %m = llvm.icmp "ult" %a, %b : vector<8xi16>
  %r = llvm.bitcast %m : vector<8xi1> to i8"""
    want = np.packbits(less, axis=1, bitorder="little")[:, 0]
    np.testing.assert_array_equal(itemwise(body, [("vector<8xi16>", a), ("vector<8xi16>", b)], "i8"), want)
    back = """
  %m = llvm.bitcast %a : i8 to vector<8xi1>
  %s = llvm.select %m, %b, %c : vector<8xi1>, vector<8xi16>
  %r = llvm.bitcast %s : vector<8xi16> to vector<8xi16>"""
    c = random("i16", 8, 7)
    got = itemwise(back, [("i8", want), ("vector<8xi16>", b), ("vector<8xi16>", c)], "vector<8xi16>", width=8)
    np.testing.assert_array_equal(got, np.where(less, b, c))


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("t", ["i8", "i16", "i32", "i64"])
def test_integer_arithmetic_on_vectors(t: str, count: int) -> None:
    """The neighbours in a register must not see each other's carries and borrows."""
    a, b = random(t, count, 8), random(t, count, 9)
    v = vector(t, count)
    with np.errstate(over="ignore"):
        for op, want in (("add", a + b), ("sub", a - b), ("mul", a * b), ("xor", a ^ b), ("and", a & b), ("or", a | b)):
            check(f"%r = llvm.{op} %a, %b : {v}", [(v, a), (v, b)], t, count, want)
    by = b % np.array(a.dtype.itemsize * 8, a.dtype)
    check(f"%r = llvm.shl %a, %b : {v}", [(v, a), (v, by)], t, count, a << by)
    check(f"%r = llvm.lshr %a, %b : {v}", [(v, a), (v, by)], t, count, a >> by)
    signed = a.view(a.dtype.name[1:])
    check(f"%r = llvm.ashr %a, %b : {v}", [(v, a), (v, by)], t, count, (signed >> by.view(signed.dtype)).view(a.dtype))
    check(
        f"%r = llvm.intr.smax(%a, %b) : ({v}, {v}) -> {v}",
        [(v, a), (v, b)],
        t,
        count,
        np.maximum(signed, b.view(signed.dtype)).view(a.dtype),
    )
    mask = f'%m = llvm.icmp "slt" %a, %b : {v}\n  %r = llvm.select %m, %a, %b : vector<{count}xi1>, {v}'
    check(mask, [(v, a), (v, b)], t, count, np.minimum(signed, b.view(signed.dtype)).view(a.dtype))


@pytest.mark.parametrize(("source", "target"), [("i8", "i32"), ("i8", "i16"), ("i16", "i64"), ("i32", "i64")])
def test_casts_of_vectors(source: str, target: str) -> None:
    a = random(source, 4, 10)
    wide, u = BITS[target], vector(target, 4)
    check(f"%r = llvm.zext %a : {vector(source, 4)} to {u}", [(vector(source, 4), a)], target, 4, a.astype(wide))
    signed = a.view(a.dtype.name[1:]).astype(np.dtype(wide).name[1:]).view(wide)
    check(f"%r = llvm.sext %a : {vector(source, 4)} to {u}", [(vector(source, 4), a)], target, 4, signed)
    b = random(target, 4, 11)
    check(f"%r = llvm.trunc %a : {u} to {vector(source, 4)}", [(u, b)], source, 4, b.astype(a.dtype))


@pytest.mark.parametrize("f", [BF16, F16, F32], ids=lambda f: f.name)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_float_arithmetic_on_vectors(f: Format, count: int) -> None:
    rng = np.random.default_rng(12)
    values = [[Fraction(int(x), 16) for x in rng.integers(-400, 400, padded(count))] for _ in range(64)]
    other = [[Fraction(int(x), 16) for x in rng.integers(1, 400, padded(count))] for _ in range(64)]
    a, b = (np.array([[f.encode(x) for x in row] for row in rows], BITS[f.name]) for rows in (values, other))
    v = vector(f.name, count)

    def rounded(compute) -> np.ndarray:  # type: ignore[no-untyped-def]
        return np.array(
            [[f.encode(compute(f.value(int(x)), f.value(int(y)))) for x, y in zip(p, q)] for p, q in zip(a, b)],
            BITS[f.name],
        )

    check(f"%r = llvm.fadd %a, %b : {v}", [(v, a), (v, b)], f.name, count, rounded(lambda x, y: x + y))
    check(f"%r = llvm.fmul %a, %b : {v}", [(v, a), (v, b)], f.name, count, rounded(lambda x, y: x * y))
    check(f"%r = llvm.fneg %a : {v}", [(v, a)], f.name, count, a ^ a.dtype.type(f.sign))
    if f is not F32:
        w = vector("f32", count)
        wide = np.array([[F32.encode(f.value(int(x))) for x in p] for p in a], np.uint32)
        check(f"%r = llvm.fpext %a : {v} to {w}", [(v, a)], "f32", count, wide)
        raw = random("f32", count, 13, 64) & np.uint32(0xBFFFFFFF) | np.uint32(0x20000000)
        narrow = np.array(
            [[f.sign * (int(x) >> 31) | f.encode(abs(F32.value(int(x)))) for x in p] for p in raw], BITS[f.name]
        )
        check(f"%r = llvm.fptrunc %a : {w} to {v}", [(w, raw)], f.name, count, narrow)
    want = np.array([[f.value(int(x)) < f.value(int(y)) for x, y in zip(p, q)] for p, q in zip(a, b)])
    compare = f'%m = llvm.fcmp "olt" %a, %b : {v}\n  %r = llvm.zext %m : vector<{count}xi1> to {vector("i8", count)}'
    check(compare, [(v, a), (v, b)], "i8", count, want.astype(np.uint8))


@pytest.mark.parametrize(("t", "literal", "want"), [
    ("vector<4xi8>", "dense<[1, -1, 127, -128]>", [1, 255, 127, 128]),
    ("vector<3xi16>", "dense<[1, -2, 32767]>", [1, 65534, 32767]),
    ("vector<2xi64>", "dense<[-1, 4294967296]>", [2**64 - 1, 2**32]),
    ("vector<4xbf16>", "dense<[1.0, -2.5, 0x7FC0, 0xFF80]>", [0x3F80, 0xC020, 0x7FC0, 0xFF80]),
    ("vector<2xf16>", "dense<[0x7C00, 1.0]>", [0x7C00, 0x3C00]),
    ("vector<4xf32>", "dense<1.5>", [0x3FC00000] * 4),
    ("vector<2xf32>", "dense<[1.0e-3, -0.0]>", [0x3A83126F, 0x80000000]),
    ("vector<5xi8>", "dense<7>", [7] * 5),
])  # fmt: skip
def test_vector_constants(t: str, literal: str, want: list[int]) -> None:
    element, count = t[t.index("x") + 1 : -1], int(t[7 : t.index("x")])
    bits = {"bf16": "i16", "f16": "i16", "f32": "i32"}.get(element, element)
    body = f"%k = llvm.mlir.constant({literal} : {t}) : {t}\n  %i = llvm.bitcast %k : {t} to {vector(bits, count)}\n"
    zero = np.zeros((64, padded(count)), BITS[bits])
    check(
        body + f"  %r = llvm.or %a, %i : {vector(bits, count)}",
        [(vector(bits, count), zero)],
        bits,
        count,
        np.array([want] * 64, BITS[bits]),
    )


def test_constants_of_bits() -> None:
    body = """
  %k = llvm.mlir.constant(dense<[true, false, true, true]> : vector<4xi1>) : vector<4xi1>
  %r = llvm.select %k, %a, %b : vector<4xi1>, vector<4xi8>"""
    a, b = random("i8", 4, 14, 64), random("i8", 4, 15, 64)
    got = itemwise(body, [("vector<4xi8>", a), ("vector<4xi8>", b)], "vector<4xi8>", width=4)
    np.testing.assert_array_equal(got, np.where([True, False, True, True], a, b))


def test_aggregates() -> None:
    """Structs and arrays within each other, values of one and two dwords, select between whole aggregates."""
    t = "!llvm.struct<(i32, struct<(i64, array<2 x i16>)>, vector<2xbf16>)>"
    body = f"""
  %u = llvm.mlir.poison : {t}
  %s0 = llvm.insertvalue %a, %u[0] : {t}
  %s1 = llvm.insertvalue %b, %s0[1, 0] : {t}
  %low = llvm.trunc %a : i32 to i16
  %one = llvm.mlir.constant(1 : i16) : i16
  %next = llvm.add %low, %one : i16
  %s2 = llvm.insertvalue %low, %s1[1, 1, 0] : {t}
  %s3 = llvm.insertvalue %next, %s2[1, 1, 1] : {t}
  %z = llvm.mlir.zero : {t}
  %limit = llvm.mlir.constant(100 : i32) : i32
  %small = llvm.icmp "ult" %a, %limit : i32
  %pick = llvm.select %small, %s3, %z : i1, {t}
  %inner = llvm.extractvalue %pick[1] : {t}
  %w = llvm.extractvalue %inner[0] : !llvm.struct<(i64, array<2 x i16>)>
  %e0 = llvm.extractvalue %pick[1, 1, 0] : {t}
  %e1 = llvm.extractvalue %inner[1, 1] : !llvm.struct<(i64, array<2 x i16>)>
  %x = llvm.extractvalue %pick[0] : {t}
  %x64 = llvm.zext %x : i32 to i64
  %p0 = llvm.zext %e0 : i16 to i64
  %p1 = llvm.zext %e1 : i16 to i64
  %t0 = llvm.xor %w, %x64 : i64
  %c16 = llvm.mlir.constant(16 : i64) : i64
  %t1 = llvm.shl %p1, %c16 : i64
  %t2 = llvm.or %t1, %p0 : i64
  %r = llvm.add %t0, %t2 : i64"""
    a = np.arange(0, 256, 2, dtype=np.uint32)
    b = np.random.default_rng(16).integers(0, 1 << 62, 128, dtype=np.uint64)
    want = [(int(y) ^ int(x)) + ((int(x) + 1) % 65536 << 16 | int(x) % 65536) if x < 100 else 0 for x, y in zip(a, b)]
    got = itemwise(body, [("i32", a), ("i64", b)], "i64")
    np.testing.assert_array_equal(got, np.array([w % 2**64 for w in want], np.uint64))


def test_memory_of_bit_vectors_raises() -> None:
    with pytest.raises(UnknownOperation, match="vector of i1"):
        itemwise(
            "\n  %r = llvm.xor %a, %a : vector<4xi1>", [("vector<4xi1>", np.zeros((64, 1), np.uint8))], "vector<4xi1>"
        )
