"""Which scale a block gets from its largest magnitude (amax). docs/quantize.md has the rules in a table.

Power-of-two scales are made from the bits of amax (float32), exactly. With exponent field E and mantissa field f, amax in
[2^(E - 127), 2^(E - 126)), the scale's exponent field (for MX: its E8M0 byte) is

    max(E + (f > top_mantissa) - emax, smallest)

emax is the exponent of the element format's largest value. Rounding up ("ceil", "pow2"), top_mantissa is that value's
mantissa, and the scale is the smallest power of two with amax / scale <= max. Rounding down ("floor") it is all ones:
scale = 2^(floor(log2(amax)) - emax), OCP Microscaling Formats (MX) v1.0, section 6.3, and a value between the largest one
and the next power of two saturates. Zero and subnormal amax have E = 0 and get the smallest scale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fourwave.formats.element import ElementFormat

MX_RULES = ("floor", "ceil")  # of "1x32"; the first is the default
BLOCK_RULES = ("fp32", "pow2")  # of every other scaling

# Smallest scale of BLOCK_RULES, float32's smallest normal number: its reciprocal is finite, and both survive arithmetic that
# flushes subnormals. MX scales reach 2^-127, E8M0's smallest.
SMALLEST_SCALE = 2.0**-126


class PowerOfTwo(NamedTuple):
    """Constants of the formula above."""

    emax: int
    top_mantissa: int
    smallest: int  # exponent field

    @classmethod
    def of(cls, fmt: ElementFormat, rule: str) -> PowerOfTwo:
        """rule: "floor", "ceil" or "pow2"."""
        significand, exponent = math.frexp(fmt.max)
        top = int((2 * significand - 1) * 2**23) if rule in ("ceil", "pow2") else 2**23 - 1
        return cls(exponent - 1, top, 1 if rule == "pow2" else 0)
