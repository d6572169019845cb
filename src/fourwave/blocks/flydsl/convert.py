"""Float32 to 8-bit codes, scales of blocks, and maxima over the lanes of a wave.

The numbers are those of quantize/reference.py, bit for bit:

  magnitude   bits of |x| as Int32. They order as the magnitudes do, with Inf above every number and NaN above Inf, so
              the maximum of a block tells its amax and whether it holds one of the two.
  scale       BlockScale.of(amax): the scale, its reciprocal, and for MX its byte. A block with NaN or Inf has scale NaN.
  codes       Codes.pack(values): round(value) to nearest even, saturated, four to a word. `values` are already multiplied
              by the reciprocal: x * inv_scale, one float32 rounding.

v_cvt_pk_fp8_f32 and v_cvt_pk_bf8_f32 turn what is past the largest value into NaN or Inf (AMD CDNA3 and CDNA4 ISA guides;
MODE.FP16_OVFL = 0), so values are clamped first. What they make of a NaN's sign and payload is not documented: NaNs take
another way.
"""

from dataclasses import dataclass

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import select
from fourwave.formats.element import ElementFormat
from fourwave.formats.scale_rules import SMALLEST_SCALE, PowerOfTwo

INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
ALL_LANES = 63

# DPP controls: AMD CDNA3 ISA guide, "DPP_CTRL enumeration"
_QUAD_XOR_1 = 0xB1  # quad_perm 1, 0, 3, 2
_QUAD_XOR_2 = 0x4E  # quad_perm 2, 3, 0, 1
_ROW_HALF_MIRROR = 0x141  # lane i of each 8 reads 7 - i
_ROW_ROTATE_8 = 0x128  # of each 16


# ---- maxima over lanes ----------------------------------------------------------------------------------------------


@dsl_loc_tracing
def magnitude(x):
    """Float32 -> Int32: the bits of |x|."""
    return fx.Float32(x).bitcast(fx.Int32) & 0x7FFFFFFF


def larger(a, b):
    """max of two signed integers."""
    return (a < b).select(b, a)


@dsl_loc_tracing
def _dpp(value, control):
    raw = as_ir_value(value)
    return fx.Int32(_rocdl.update_dpp(fx.Int32.ir_type, raw, raw, control, 0xF, 0xF, True))


@dsl_loc_tracing
def _from_lane_xor(value, bit, arch, halves_equal):
    """The Int32 of lane ^ bit; halves_equal: lanes that differ in lower bits hold the same."""
    if bit == 1:
        return _dpp(value, _QUAD_XOR_1)
    if bit == 2:
        return _dpp(value, _QUAD_XOR_2)
    if bit == 4 and halves_equal:
        return _dpp(value, _ROW_HALF_MIRROR)
    if bit == 8:
        return _dpp(value, _ROW_ROTATE_8)
    if bit <= 16:
        # ds_swizzle, bit-masked mode: and-mask 31, or-mask 0, xor-mask bit. Crosses lanes without touching LDS.
        pattern = as_ir_value(fx.Int32((bit << 10) | 31))
        return fx.Int32(_rocdl.ds_swizzle(fx.Int32.ir_type, as_ir_value(value), pattern))
    source = (fx.Int32(fx.thread_idx.x) ^ bit) * 4  # ds_bpermute takes lane * 4, and of it the low bits only
    return fx.Int32(_rocdl.ds_bpermute(fx.Int32.ir_type, as_ir_value(source), as_ir_value(value)))


@dsl_loc_tracing
def _max_with_swap(value, swap):
    """max of value over the two halves that v_permlane{16,32}_swap exchanges."""
    raw = as_ir_value(value)
    pair = swap(ir.Type.parse("!llvm.struct<(i32, i32)>"), raw, raw, False, False)
    low = _llvm.extractvalue(fx.Int32.ir_type, pair, [0])
    high = _llvm.extractvalue(fx.Int32.ir_type, pair, [1])
    return larger(fx.Int32(low), fx.Int32(high))


def lane_max(value, mask, arch):
    """Int32 -> Int32: the maximum over the lanes that differ from this one in the bits of `mask` only, in all of them.

    mask 1 is over pairs, 15 over 16 neighbours, 63 over the wave, 48 over lanes 16 apart. Signed. The workgroup is one row
    of threads (thread_idx.x).
    """
    for bit in (1, 2, 4, 8, 16, 32):
        if not mask & bit:
            continue
        if arch == "gfx950" and bit >= 16:
            value = _max_with_swap(value, _rocdl.permlane16_swap if bit == 16 else _rocdl.permlane32_swap)
        else:
            value = larger(value, _from_lane_xor(value, bit, arch, mask & 3 == 3))
    return value


# ---- scales ---------------------------------------------------------------------------------------------------------


def _float(bits):
    return fx.Int32(bits).bitcast(fx.Float32)


@dataclass(frozen=True)
class BlockScale:
    """The scale of a block, as traced values.

    scale   Float32, or None for MX
    byte    Int32: MX's E8M0 code; or None
    inv     Float32: what elements are multiplied by
    finite  Boolean: the block holds neither NaN nor Inf. Where it does, scale and inv are NaN and byte is 255
    """

    scale: object
    byte: object
    inv: object
    finite: object

    @classmethod
    def of(cls, amax, fmt, rule):
        """amax: Int32, magnitude; fmt: ElementFormat; rule: "floor" or "ceil" (MX), "fp32" or "pow2"."""
        finite = amax < INF_BITS
        if rule == "fp32":
            quotient = _float(amax) / fmt.max  # IEEE division, as in the reference
            scale = (quotient < SMALLEST_SCALE).select(fx.Float32(SMALLEST_SCALE), quotient)
            scale = finite.select(scale, _float(NAN_BITS))
            return cls(scale, None, fx.Float32(1.0) / scale, finite)
        field = _exponent_field(amax, PowerOfTwo.of(fmt, rule))
        inv = _float(select(finite, (254 - field) << 23, NAN_BITS))  # field is below 254 for every format
        if rule == "pow2":
            return cls(_float(select(finite, field << 23, NAN_BITS)), None, inv, finite)
        return cls(None, select(finite, field, 255), inv, finite)

    @classmethod
    def given(cls, scale):
        """A Float32 scale that was computed elsewhere."""
        return cls(scale, None, fx.Float32(1.0) / scale, None)


def _exponent_field(amax, power):
    """formats/scale_rules.py's formula."""
    # (f > top) carried into the exponent field; amax is below Inf, or the result is not used.
    field = ((amax + (0x7FFFFF - power.top_mantissa)) >> 23) - power.emax
    return (field < power.smallest).select(fx.Int32(power.smallest), field)


@dsl_loc_tracing
def e8m0_scale(byte):
    """Int32 E8M0 code -> Float32, exact: 0 is the subnormal 2^-127, 255 NaN."""
    bits = select(byte == 0, 0x00400000, byte << 23)
    return _float(select(byte == 255, NAN_BITS, bits))


@dsl_loc_tracing
def e8m0_inverse(byte):
    """Int32 E8M0 code -> Float32 1 / scale, exact: 254 gives the subnormal 2^-127, 255 NaN."""
    bits = select(byte == 254, 0x00400000, (254 - byte) << 23)
    return _float(select(byte == 255, NAN_BITS, bits))


# ---- codes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """Packs float32 values into 8-bit codes.

    fmt    formats.E4M3FN, E5M2, and on gfx942 E4M3FNUZ, E5M2FNUZ
    arch   "gfx950", whose instructions know OCP's codes; "gfx942", whose know fnuz

    An OCP code read as fnuz is worth half as much (the bias is larger by one), so gfx942 makes OCP codes from halved
    values. Only zeros differ: fnuz has none with a sign, so signs are put in afterwards.
    """

    fmt: ElementFormat
    arch: str

    def __post_init__(self):
        assert self.fmt.bits == 8 and self.fmt.mantissa_bits in (2, 3), self.fmt
        assert self.arch == "gfx942" or not self._fnuz, "gfx950 has no conversion to fnuz codes"

    @property
    def _fnuz(self):
        return self.fmt.name.endswith("fnuz")

    @property
    def _halved(self):
        return self.arch == "gfx942" and not self._fnuz

    @dsl_loc_tracing
    def pack(self, values, *, saturate=True, nan=True, finite=None):
        """Four Float32 -> Int32, values[0] in the low byte: to nearest even, past the largest value the largest.

        saturate  False where no value rounds past the largest (scales from amax, all rules but "floor")
        nan       True: a NaN becomes fmt.nan_code, without sign; `finite` is not looked at. False where no NaN can come, or
                  `finite` covers it
        finite    Boolean of all four (BlockScale.finite): where it is False all four are fmt.nan_code; or of each, what
                  masks() returned
        """
        top = self.fmt.max
        if nan:
            finite = self._nan_masks(values)
        if self._halved:
            values = [v * 0.5 for v in values]
            top *= 0.5
        if saturate:
            low, high = as_ir_value(fx.Float32(-top)), as_ir_value(fx.Float32(top))
            values = [fx.Float32(_rocdl.fmed3(fx.Float32.ir_type, as_ir_value(v), low, high)) for v in values]
        convert = _rocdl.cvt_pk_bf8_f32 if self.fmt.mantissa_bits == 2 else _rocdl.cvt_pk_fp8_f32
        word = as_ir_value(fx.Int32(0))
        for half in (0, 1):
            pair = (as_ir_value(v) for v in values[2 * half : 2 * half + 2])
            word = convert(fx.Int32.ir_type, *pair, word, bool(half))
        word = fx.Int32(word)
        if self._halved:
            for i, v in enumerate(values):
                word = word | ((fx.Float32(v).bitcast(fx.Uint32) >> 31) << (8 * i + 7)).bitcast(fx.Int32)
        if isinstance(finite, tuple):
            keep, codes = finite
            word = (word & keep) | codes
        elif finite is not None:
            word = select(finite, word, _signed(self.fmt.nan_code * 0x01010101))
        return word

    def _nan_masks(self, values):
        """For pack. By integers: lane masks of comparisons of all elements would not fit into scalar registers."""
        nans = fx.Int32(0)
        for i, v in enumerate(values):
            # What is above Inf carries into the sign.
            nans = nans | (((magnitude(v) + (0x7FFFFFFF - INF_BITS)) >> 31) & _signed(255 << 8 * i))
        return nans ^ -1, nans & _signed(self.fmt.nan_code * 0x01010101)

    @dsl_loc_tracing
    def masks(self, finite):
        """For pack: four Booleans, one per element."""
        keep = codes = fx.Int32(0)
        for i, each in enumerate(finite):
            keep = keep | select(each, _signed(255 << 8 * i), 0)
            codes = codes | select(each, 0, _signed(self.fmt.nan_code << 8 * i))
        return keep, codes


def _signed(bits):
    """A 32-bit pattern as the signed int that fx.Int32 takes."""
    bits &= 0xFFFFFFFF
    return bits - (bits >> 31 << 32)
