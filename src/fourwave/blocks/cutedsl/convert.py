"""Scales from amax and codes from float32, bit for bit those of quantize/reference.py.

Numbers travel as Int32 that hold their bits. Arithmetic is in PTX, spelled out: rounded to nearest, subnormals kept, no fused
multiplication and addition.
"""

import struct
from dataclasses import dataclass

from cutlass import Int32

from fourwave.blocks.cutedsl.access import assembly, permute_bytes
from fourwave.formats.element import ElementFormat
from fourwave.formats.scale_rules import SMALLEST_SCALE, PowerOfTwo

NAN = 0x7FC00000
INFINITY = 0x7F800000


def _literal(value: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"


@dataclass(frozen=True)
class Scales:
    """(stored, inverse) of a scale from amax; rule as in formats/scale_rules.py. Stored is an E8M0 code with "floor" and "ceil"."""

    fmt: ElementFormat
    rule: str

    def of(self, amax: Int32) -> list[Int32]:
        finite = f".reg .pred p; setp.lt.u32 p, $2, {INFINITY:#x};"
        if self.rule == "fp32":
            text = (
                f"{{ {finite} .reg .f32 a, s, i; mov.b32 a, $2; div.rn.f32 s, a, {_literal(self.fmt.max)}; "
                f"max.f32 s, s, {_literal(SMALLEST_SCALE)}; rcp.rn.f32 i, s; "
                f"mov.b32 $0, s; mov.b32 $1, i; selp.b32 $0, $0, {NAN:#x}, p; selp.b32 $1, $1, {NAN:#x}, p; }}"
            )
        else:
            power = PowerOfTwo.of(self.fmt, self.rule)
            stored = (
                f"shl.b32 $0, f, 23; selp.b32 $0, $0, {NAN:#x}, p;"
                if self.rule == "pow2"
                else "selp.b32 $0, f, 255, p;"
            )
            text = (
                f"{{ {finite} .reg .s32 f, i; selp.b32 f, $2, 0, p; add.s32 f, f, {0x7FFFFF - power.top_mantissa}; "
                f"shr.s32 f, f, 23; sub.s32 f, f, {power.emax}; max.s32 f, f, {power.smallest}; "
                f"sub.s32 i, 254, f; shl.b32 i, i, 23; {stored} selp.b32 $1, i, {NAN:#x}, p; }}"
            )
        made: list[Int32] = assembly(text, "=&r,=&r,r", [amax], 2)
        return made


def reciprocal(value: Int32) -> Int32:
    return assembly("{ .reg .f32 a; mov.b32 a, $1; rcp.rn.f32 a, a; mov.b32 $0, a; }", "=r,r", [value])


def product(a: Int32, b: Int32) -> Int32:
    text = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; mul.rn.f32 a, a, b; mov.b32 $0, a; }"
    return assembly(text, "=r,r,r", [a, b])


def float_of_half(pair: Int32, high: bool, fp16: bool) -> Int32:
    """The float32 value of the low or high half of a pair of float16 or bfloat16."""
    if not fp16:
        return (pair & -0x10000) if high else pair << 16
    half = "{d, h}" if high else "{h, d}"
    text = f"{{ .reg .b16 h, d; .reg .f32 a; mov.b32 {half}, $1; cvt.f32.f16 a, h; mov.b32 $0, a; }}"
    return assembly(text, "=r,r", [pair])


@dataclass(frozen=True)
class Codes:
    """Codes of float32 values, rounded to nearest even and saturated; a NaN gets the format's NaN without sign (e2m1: +6).

    halves  every value above 2^-24 is a float16 (16-bit elements times powers of two, below 8): e2m1 codes are made in pairs
    """

    fmt: ElementFormat
    halves: bool = False

    @property
    def bits(self) -> int:
        return self.fmt.bits

    def pack8(self, values: list[Int32]) -> list[Int32]:
        """Codes of 8 values, the first in the lowest bits: 2 Int32, e2m1: 1."""
        if self.bits == 4:
            return [self._pack_e2m1_halves(values) if self.halves else self._pack_e2m1(values)]
        return [self.pack4(values[:4]), self.pack4(values[4:])]

    def pack4(self, values: list[Int32]) -> Int32:
        """8-bit codes of 4 values, the first in the lowest bits."""
        kind = "e4m3x2" if self.fmt.name == "e4m3fn" else "e5m2x2"
        convert = f"cvt.rn.satfinite.{kind}.f32"
        text = (
            "{ .reg .b16 l, h; .reg .f32 a, b, c, d; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; "
            f"{convert} l, b, a; {convert} h, d, c; mov.b32 $0, {{l, h}}; }}"
        )
        code = assembly(text, "=r,r,r,r,r", values)
        if kind == "e5m2x2":
            # NaN is 0x7f or 0x7e as the machine likes; saturated numbers end at 0x7b. Adding 4 carries into bit 7 of a NaN.
            nan = ((code & 0x7C7C7C7C) + 0x04040404) & -0x7F7F7F80
            code = code & ~((nan >> 7) & 0x01010101)
        return code

    def _pack_e2m1(self, values: list[Int32]) -> Int32:
        """In steps of 0.5, 1, 2 for magnitudes below 2, below 4, above: adding c, whose last bit is worth a step, rounds to
        a whole number of steps. c is 2^22, 2^23 or 2^24."""
        total = None
        for i, value in enumerate(values):
            text = (
                "{ .reg .f32 t, v; .reg .b32 b, c, k, s; mov.b32 t, $1; abs.f32 t, t; "
                f"min.f32 t, t, {_literal(6.0)}; mov.b32 b, t; max.s32 b, b, 0x3f800000; "
                "and.b32 c, b, 0x7f800000; add.s32 c, c, 0x0b000000; mov.b32 v, c; add.rn.f32 v, v, t; mov.b32 k, v; "
                # the exponent of c, twice, is 298, 300 or 302: the codes below 2, below 4 and above start at 0, 2, 4
                "shr.u32 s, c, 22; add.s32 k, k, s; sub.s32 k, k, 298; and.b32 k, k, 7; "
                "shr.u32 s, $1, 28; and.b32 s, s, 8; or.b32 $0, k, s; }"
            )
            code = assembly(text, "=r,r", [value])
            total = code if total is None else total | (code << (4 * i))
        assert total is not None
        return total

    def _pack_e2m1_halves(self, values: list[Int32]) -> Int32:
        """As _pack_e2m1, two values at a time in float16, whose last bit is worth a step at 2^9, 2^10 and 2^11."""
        pairs = []
        for low, high in zip(values[::2], values[1::2], strict=True):
            text = (
                "{ .reg .f32 a, b; .reg .b32 y, t, c, v, s; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.f16x2.f32 y, b, a; "
                "and.b32 t, y, 0x7fff7fff; min.f16x2 t, t, $3; "  # 6 instead of NaN
                "max.u16x2 c, t, $4; and.b32 c, c, 0x7c007c00; add.s32 c, c, 0x24002400; add.rn.f16x2 v, c, t; "
                # the exponent of c, twice, is 48, 50 or 52, and 48 is a multiple of 8
                "shr.u32 s, c, 9; add.s32 v, v, s; and.b32 v, v, 0x00070007; shr.u32 s, y, 12; and.b32 s, s, 0x00080008; "
                "or.b32 v, v, s; shr.u32 s, v, 12; or.b32 $0, v, s; }"  # both codes in byte 0
            )
            pairs.append(assembly(text, "=r,r,r,r,r", [low, high, Int32(0x46004600), Int32(0x3C003C00)]))
        halves = [permute_bytes(a, b, 0x0040) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return permute_bytes(*halves, 0x5410)
