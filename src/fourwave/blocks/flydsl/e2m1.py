"""Packed e2m1 codes times a scale of a power of two, as bfloat16: exact wherever bfloat16 has the exponent (dequantize.py).

bfloat16_pairs is for any machine: the eight magnitudes are bytes of two tables, the upper and the lower ones of their bfloat16; one
v_perm_b32 looks four up. gfx950 has an instruction, which scaled_eight uses.
"""

from flydsl import expr as fx
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import permute_bytes, vector_type

# Of 0, 1/2, 1, 3/2 and 2, 3, 4, 6 (OCP Microscaling Formats (MX) v1.0, 5.3.3).
_UPPER, _LOWER = (0x3F3F3F00, 0x40404040), (-0x3F800000, -0x3F7FC000)  # 0xC0800000, 0xC0804000
_SIGNS = -0x7F7F7F80  # 0x80808080


def bfloat16_pairs(word, factor):
    """word: Int32 of eight codes, element 0 in the lowest bits; factor: Float32. Four Int32 of two bfloat16 each, in order."""
    halves = []
    for codes, signs in ((word, word << 4), (fx.Int32(fx.Uint32(word) >> 4), word)):  # even elements, odd ones
        index = codes & 0x07070707
        upper, lower = (permute_bytes(fx.Int32(t[1]), fx.Int32(t[0]), index) for t in (_UPPER, _LOWER))
        upper = upper | (signs & _SIGNS)
        # Two bfloat16 each: elements 0, 2 and 4, 6, or 1, 3 and 5, 7.
        halves.append([permute_bytes(upper, lower, selectors) for selectors in (0x05010400, 0x07030602)])
    out = []
    for pair in range(2):
        for shift in (16, 0):  # the lower bfloat16 of a half comes first
            low, high = (((half[pair] << shift) & -0x10000).bitcast(fx.Float32) * factor for half in halves)
            out.append(permute_bytes(high.bitcast(fx.Int32), low.bitcast(fx.Int32), 0x07060302))
    return out


@dsl_loc_tracing
def scaled_eight(word, scale):
    """gfx950: eight codes of an Int32, element 0 in the lowest bits, times the e8m0 scale in byte 0 of an Int32, as a Vector of bfloat16.

    v_cvt_scalef32_pk_bf16_fp4 takes the exponent of a Float32 for its scale: 0 is 2**-127, 255 gives NaN (AMD CDNA4 ISA guide).
    """
    factor = as_ir_value((fx.Int32(scale) << 23).bitcast(fx.Float32))
    pairs = [
        fx.Vector(
            _rocdl.cvt_scalef32_pk_bf16_fp4(vector_type(2, fx.BFloat16), as_ir_value(fx.Int32(word)), factor, number)
        )
        for number in range(4)
    ]
    halves = [low.shuffle(high, list(range(4))) for low, high in zip(pairs[::2], pairs[1::2], strict=True)]
    return halves[0].shuffle(halves[1], list(range(8)))
