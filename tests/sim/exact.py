"""Floating-point formats as exact rationals: the arithmetic the tests compare with, written from IEEE 754 and independent of any host float."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from machine import BITS


@dataclass(frozen=True)
class Format:
    name: str  # MLIR's
    exponent: int  # bits
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def inf(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa

    @property
    def nan(self) -> int:
        return self.inf | 1 << (self.mantissa - 1)

    @property
    def one(self) -> int:
        return self.bias << self.mantissa

    def is_nan(self, code: int) -> bool:
        return code & ~self.sign > self.inf

    def is_inf(self, code: int) -> bool:
        return code & ~self.sign == self.inf

    def value(self, code: int) -> Fraction:
        """The value of a finite code."""
        e, m = code >> self.mantissa & ((1 << self.exponent) - 1), code & ((1 << self.mantissa) - 1)
        assert e != (1 << self.exponent) - 1
        magnitude = Fraction(m if e == 0 else m | 1 << self.mantissa) * Fraction(2) ** (
            max(e, 1) - self.bias - self.mantissa
        )
        return -magnitude if code & self.sign else magnitude

    def encode(self, value: Fraction, negative_zero: bool = False) -> int:
        """The code nearest to `value`, ties to even; overflow gives infinity."""
        sign = self.sign if value < 0 or (value == 0 and negative_zero) else 0
        magnitude = abs(value)
        if magnitude == 0:
            return sign
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        if Fraction(2) ** exponent > magnitude:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)  # below that: subnormals, one spacing
        steps = magnitude / Fraction(2) ** (exponent - self.mantissa)
        whole = steps.numerator // steps.denominator
        rest = steps - whole
        if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
            whole += 1
        # `whole` carries into the exponent field by itself: the implicit one is subtracted by the bias.
        code = ((exponent + self.bias - 1) << self.mantissa) + whole
        return sign | min(code, self.inf)

    def round(self, value: Fraction) -> Fraction | None:
        code = self.encode(value)
        return None if self.is_inf(code) else self.value(code)

    def corners(self) -> list[int]:
        """Codes at the edges: zeros, subnormals, powers, ties' neighbours, the largest, infinities, a quiet NaN."""
        positive = [
            0, 1, 2, (1 << self.mantissa) - 1, 1 << self.mantissa, (1 << self.mantissa) + 1, self.one, self.one + 1, self.one - 1,
            self.one + (1 << self.mantissa), self.one + (3 << (self.mantissa - 1)), self.inf - 1, self.inf - 2, self.inf,
            self.encode(Fraction(1, 10)), self.encode(Fraction(7, 3)), self.encode(Fraction(5, 2)),
        ]  # fmt: skip
        return positive + [c | self.sign for c in positive] + [self.nan]

    def random(self, count: int, seed: int) -> list[int]:
        """Random codes, half of them with nearby exponents so that sums and quotients round in interesting places."""
        rng = np.random.default_rng(seed)
        whole = [int.from_bytes(rng.bytes(8), "little") & ((1 << self.bits) - 1) for _ in range(count // 2)]
        near = [
            (self.bias + int(rng.integers(-3, 4))) << self.mantissa
            | int.from_bytes(rng.bytes(8), "little") & ((1 << self.mantissa) - 1)
            | (self.sign if rng.integers(2) else 0)
            for _ in range(count - count // 2)
        ]
        return whole + near

    def array(self, codes: list[int]) -> np.ndarray:
        return np.array(codes, dtype=BITS[self.name])


F16, BF16 = Format("f16", 5, 10), Format("bf16", 8, 7)
F32, F64 = Format("f32", 8, 23), Format("f64", 11, 52)
FORMATS = [F16, BF16, F32, F64]


def assert_codes(f: Format, got: np.ndarray, want: list[int | None], *operands: np.ndarray) -> None:
    """Bit for bit; None stands for any NaN (LLVM leaves the payload open)."""
    for i, (g, w) in enumerate(zip(got, want)):
        good = f.is_nan(int(g)) if w is None else int(g) == w
        shown = ", ".join(f"{int(o[i]):#x}" for o in operands)
        assert good, f"item {i}: {f.name}({shown}) gave {int(g):#x}, not {'NaN' if w is None else hex(w)}"
    assert len(got) == len(want)
