"""Integer operations of the `llvm` dialect, element by element, against Python's exact integers.

Source: LLVM Language Reference, "Binary Operations", "Bitwise Binary Operations", "Conversion Operations", "icmp", and the intrinsics' own
sections. Pairs for which the reference says poison or undefined (a shift by the width or more, division by zero, INT_MIN / -1) are left out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from machine import BITS, itemwise

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

WIDTHS = [1, 8, 16, 32, 64]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


def quotient(a: int, b: int) -> int:
    """Rounds toward zero, as sdiv does."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def pairs(bits: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of the corner values, and random pairs."""
    top, ones = 1 << (bits - 1), (1 << bits) - 1
    corners = sorted(
        {x & ones for x in (0, 1, 2, 3, 5, 7, 8, 15, 31, top - 1, top, top + 1, ones - 1, ones, 0x55555555AAAAAAAA)}
    )
    rng = np.random.default_rng(seed)
    random = [int.from_bytes(rng.bytes(8), "little") & ones for _ in range(64)]
    a = [x for x in corners for _ in corners] + random
    b = [y for _ in corners for y in corners] + random[::-1]
    return bits_of(a, bits), bits_of(b, bits)


def bits_of(values: list[int], bits: int) -> np.ndarray:
    return np.array(values, dtype=BITS[memory(bits)])


def memory(bits: int) -> str:
    return f"i{max(8, bits)}"


Binary = tuple[Callable[[int, int, int], int], Callable[[int, int, int], bool]]
ALWAYS = lambda a, b, n: True  # noqa: E731
NONZERO = lambda a, b, n: b != 0  # noqa: E731
IN_RANGE = lambda a, b, n: b < n  # noqa: E731
NO_OVERFLOW = lambda a, b, n: b != 0 and not (a == 1 << (n - 1) and b == (1 << n) - 1)  # noqa: E731

BINARY: dict[str, Binary] = {
    "add": (lambda a, b, n: a + b, ALWAYS),
    "sub": (lambda a, b, n: a - b, ALWAYS),
    "mul": (lambda a, b, n: a * b, ALWAYS),
    "and": (lambda a, b, n: a & b, ALWAYS),
    "or": (lambda a, b, n: a | b, ALWAYS),
    "xor": (lambda a, b, n: a ^ b, ALWAYS),
    "shl": (lambda a, b, n: a << b, IN_RANGE),
    "lshr": (lambda a, b, n: a >> b, IN_RANGE),
    "ashr": (lambda a, b, n: signed(a, n) >> b, IN_RANGE),
    "udiv": (lambda a, b, n: a // b, NONZERO),
    "urem": (lambda a, b, n: a % b, NONZERO),
    "sdiv": (lambda a, b, n: quotient(signed(a, n), signed(b, n)), NO_OVERFLOW),
    "srem": (lambda a, b, n: signed(a, n) - signed(b, n) * quotient(signed(a, n), signed(b, n)), NO_OVERFLOW),
    "intr.smin": (lambda a, b, n: min(signed(a, n), signed(b, n)), ALWAYS),
    "intr.smax": (lambda a, b, n: max(signed(a, n), signed(b, n)), ALWAYS),
    "intr.umin": (lambda a, b, n: min(a, b), ALWAYS),
    "intr.umax": (lambda a, b, n: max(a, b), ALWAYS),
}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("op", BINARY)
def test_binary(op: str, bits: int) -> None:
    compute, valid = BINARY[op]
    a, b = pairs(bits)
    keep = np.array([valid(int(x), int(y), bits) for x, y in zip(a, b)])
    a, b = a[keep], b[keep]
    assert len(a)
    t = f"i{bits}"
    text = (
        f"%r = llvm.intr.{op[5:]}(%a, %b) : ({t}, {t}) -> {t}"
        if op.startswith("intr.")
        else f"%r = llvm.{op} %a, %b : {t}"
    )
    got = itemwise("\n  " + text, [(t, a), (t, b)], t)
    want = bits_of([compute(int(x), int(y), bits) & ((1 << bits) - 1) for x, y in zip(a, b)], bits)
    np.testing.assert_array_equal(got, want)


COMPARE: dict[str, Callable[[int, int, int], bool]] = {
    "eq": lambda a, b, n: a == b,
    "ne": lambda a, b, n: a != b,
    "slt": lambda a, b, n: signed(a, n) < signed(b, n),
    "sle": lambda a, b, n: signed(a, n) <= signed(b, n),
    "sgt": lambda a, b, n: signed(a, n) > signed(b, n),
    "sge": lambda a, b, n: signed(a, n) >= signed(b, n),
    "ult": lambda a, b, n: a < b,
    "ule": lambda a, b, n: a <= b,
    "ugt": lambda a, b, n: a > b,
    "uge": lambda a, b, n: a >= b,
}


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("predicate", COMPARE)
def test_icmp(predicate: str, bits: int) -> None:
    a, b = pairs(bits)
    t = f"i{bits}"
    got = itemwise(f'\n  %r = llvm.icmp "{predicate}" %a, %b : {t}', [(t, a), (t, b)], "i1")
    want = np.array([COMPARE[predicate](int(x), int(y), bits) for x, y in zip(a, b)], np.uint8)
    np.testing.assert_array_equal(got, want)


def test_icmp_of_pointers() -> None:
    a, b = pairs(64)
    body = """
  %p = llvm.inttoptr %a : i64 to !llvm.ptr<1>
  %q = llvm.inttoptr %b : i64 to !llvm.ptr<1>
  %r = llvm.icmp "ult" %p, %q : !llvm.ptr<1>"""
    np.testing.assert_array_equal(itemwise(body, [("i64", a), ("i64", b)], "i1"), (a < b).astype(np.uint8))


@pytest.mark.parametrize("bits", WIDTHS)
def test_select(bits: int) -> None:
    a, b = pairs(bits)
    c = np.arange(len(a)).astype(np.uint8) % 3 % 2
    t = f"i{bits}"
    got = itemwise(f"\n  %r = llvm.select %a, %b, %c : i1, {t}", [("i1", c), (t, a), (t, b)], t)
    np.testing.assert_array_equal(got, np.where(c, a, b))


@pytest.mark.parametrize(("source", "target"), [(s, t) for s in WIDTHS for t in WIDTHS if s != t])
def test_casts(source: int, target: int) -> None:
    a, _ = pairs(source)
    for op in ("trunc",) if target < source else ("zext", "sext"):
        got = itemwise(f"\n  %r = llvm.{op} %a : i{source} to i{target}", [(f"i{source}", a)], f"i{target}")
        values = [signed(int(x), source) if op == "sext" else int(x) for x in a]
        np.testing.assert_array_equal(got, bits_of([v & ((1 << target) - 1) for v in values], target), err_msg=op)


def reversed_bits(x: int) -> int:
    return int(f"{x:032b}"[::-1], 2)


UNARY: dict[str, tuple[str, Callable[[int], int]]] = {
    "ctpop": ("llvm.intr.ctpop(%a) : (i32) -> i32", lambda x: x.bit_count()),
    "ctlz": ('"llvm.intr.ctlz"(%a) <{is_zero_poison = false}> : (i32) -> i32', lambda x: 32 - x.bit_length()),
    "cttz": (
        '"llvm.intr.cttz"(%a) <{is_zero_poison = false}> : (i32) -> i32',
        lambda x: (x & -x).bit_length() - 1 if x else 32,
    ),
    "bitreverse": ("llvm.intr.bitreverse(%a) : (i32) -> i32", reversed_bits),
}


@pytest.mark.parametrize("op", UNARY)
def test_bit_counting(op: str) -> None:
    a, _ = pairs(32)
    text, compute = UNARY[op]
    got = itemwise(f"\n  %r = {text}", [("i32", a)], "i32")
    np.testing.assert_array_equal(got, bits_of([compute(int(x)) for x in a], 32))


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_abs(bits: int) -> None:
    """With is_int_min_poison false, the absolute value of the least integer is itself."""
    a, _ = pairs(bits)
    got = itemwise(
        f'\n  %r = "llvm.intr.abs"(%a) <{{is_int_min_poison = false}}> : (i{bits}) -> i{bits}',
        [(f"i{bits}", a)],
        f"i{bits}",
    )
    np.testing.assert_array_equal(got, bits_of([abs(signed(int(x), bits)) for x in a], bits))


@pytest.mark.parametrize("op", ["fshl", "fshr"])
def test_funnel_shift(op: str) -> None:
    """The shift amount is taken modulo the width, so an amount of 32 or more is defined."""
    a, b = pairs(32)
    c = np.arange(len(a), dtype=np.uint32) * 5 % 97
    got = itemwise(
        f"\n  %r = llvm.intr.{op}(%a, %b, %c) : (i32, i32, i32) -> i32", [("i32", a), ("i32", b), ("i32", c)], "i32"
    )
    both = [int(x) << 32 | int(y) for x, y in zip(a, b)]
    by = [int(z) % 32 for z in c]
    want = [v << s >> 32 if op == "fshl" else v >> s for v, s in zip(both, by)]
    np.testing.assert_array_equal(got, bits_of([v & 0xFFFFFFFF for v in want], 32))


@pytest.mark.parametrize("bits", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("value", [-1, 0, 1, -2, 0x7FFFFFFFFFFFFFFF])
def test_constants(bits: int, value: int) -> None:
    a, _ = pairs(bits)
    want = value & ((1 << bits) - 1)
    literal = ("true" if want else "false") if bits == 1 else f"{signed(want, bits)} : i{bits}"
    got = itemwise(
        f"\n  %k = llvm.mlir.constant({literal}) : i{bits}\n  %r = llvm.xor %a, %k : i{bits}",
        [(f"i{bits}", a)],
        f"i{bits}",
    )
    np.testing.assert_array_equal(got, a ^ BITS[memory(bits)](want))


def test_overflow_flags_and_freeze_change_nothing() -> None:
    a = np.arange(64, dtype=np.uint32)
    body = "\n  %s = llvm.add %a, %b overflow<nsw, nuw> : i32\n  %r = llvm.freeze %s : i32"
    np.testing.assert_array_equal(itemwise(body, [("i32", a), ("i32", a)], "i32"), a + a)


@pytest.mark.parametrize("text", [
    "%w = llvm.zext %a : i32 to i48\n  %s = llvm.shl %w, %w : i48\n  %r = llvm.trunc %s : i48 to i32",
    "%w = llvm.zext %a : i32 to i128\n  %s = llvm.add %w, %w : i128\n  %r = llvm.trunc %s : i128 to i32",
    "%r = llvm.intr.ctpop(%a) : (i32) -> i32\n  %x = llvm.zext %a : i32 to i64\n  %y = llvm.intr.ctpop(%x) : (i64) -> i64",
])  # fmt: skip
def test_widths_without_a_model_raise(text: str) -> None:
    from fourwave.sim import UnknownOperation

    with pytest.raises(UnknownOperation):
        itemwise("\n  " + text, [("i32", np.zeros(64, np.uint32))], "i32")
