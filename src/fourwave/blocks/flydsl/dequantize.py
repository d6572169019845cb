"""OCP 8-bit codes times scales of powers of two, as bfloat16.

A code has at most four significant bits and a bfloat16 eight, so the product is exact wherever bfloat16 has its exponent:
from 2**-133 on (subnormal numbers included; bits below are dropped) and below 2**128 (above: infinity). A NaN code or a NaN
scale (0xFF) gives NaN.

Both formats are read by way of float16, whose exponent is no narrower (OCP 8-bit Floating Point Specification, 5.1):
  e5m2   is the upper byte of a float16: infinities, NaN and subnormal numbers included
  e4m3   moved to the exponent's low bits is the float16 of value * 2**-8, subnormal numbers included; 0x7F is NaN
"""

from flydsl import expr as fx

from fourwave.blocks.flydsl.memory import permute_bytes

_SMALLEST_SCALE_BITS = 0x00400000  # 2**-127 is subnormal
FORMATS = ("e4m3", "e5m2")


def scale_factor(word, byte):
    """The e8m0 scale in a byte of an Int32, as Float32. OCP Microscaling Formats (MX) v1.0, 5.4.1."""
    code = fx.Uint32((fx.Uint32(word) >> (8 * byte)) & 255)
    bits = code << 23
    bits = (bits < _SMALLEST_SCALE_BITS).select(fx.Uint32(_SMALLEST_SCALE_BITS), bits)
    quiet = ((code + 1) & 256) << 14  # of 0xFF, whose bits are those of infinity otherwise
    return (bits | quiet).bitcast(fx.Float32)


def bfloat16_pairs(words, factors, code_format):
    """words: Int32 of four codes each; factors: a Float32 for each code. Int32 of two bfloat16 each, in order."""
    out = []
    for w, word in enumerate(words):
        for half in (0, 1):
            # Bytes 2 * half and 2 * half + 1 as upper bytes of two float16.
            pair = permute_bytes(fx.Int32(0), word, 0x010C000C + 0x02000200 * half)
            values = _values(pair, code_format)
            products = [value * factors[4 * w + 2 * half + i] for i, value in enumerate(values)]
            low, high = (product.bitcast(fx.Int32) for product in products)
            out.append(permute_bytes(high, low, 0x07060302))
    return out


def _values(pair, code_format):
    """Two Float32 of the codes in the upper bytes of an Int32's halves."""
    if code_format == "e5m2":
        halves = fx.Vector.filled(1, pair, fx.Int32).bitcast(fx.Float16).to(fx.Float32)
        return halves[0], halves[1]
    # 16-bit halves, each shifted right by one without the bit that the sign leaves; NaN, 0x3F80 by now, gets the bit that
    # makes its exponent the float16's largest. Selecting instead would fill the scalar registers with conditions.
    shifted = (fx.Uint32(pair) >> 1) & 0x3F803F80
    nan = (shifted + 0x00800080) & 0x40004000
    halves = fx.Int32(shifted | nan) | (pair & fx.Int32(-0x7FFF8000))  # 0x80008000
    values = (fx.Vector.filled(1, halves, fx.Int32).bitcast(fx.Float16) * 256.0).to(fx.Float32)
    return values[0], values[1]
