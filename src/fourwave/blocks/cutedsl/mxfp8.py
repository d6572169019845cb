"""Weights in MXFP8 on their way to wgmma: e4m3fn codes and e8m0 scales in shared memory, bf16 operands in registers.

As mxfp4.py: a code's magnitude bits, put where bf16 keeps the last four bits of its exponent and the first three of its mantissa,
are a bf16 number, the code's value times 2^-120, subnormals included; one multiplication by a power of two makes value * scale *
2^-SHIFT of it. Scales from 2^-100 to 2^31 are exact; above them, and with the scale that is NaN, the products are infinite or NaN,
below them they round to multiples of 2^-109. The code that is NaN would come out as 480: the largest magnitude of each row is kept instead, and a row that
has had one is NaN in the end.
"""

from cutlass import Float32, Int32, cute

from fourwave.blocks.cutedsl import access, mxfp4
from fourwave.blocks.cutedsl.access import assembly

ROW_BYTES = mxfp4.STEP  # of codes
_BIAS = 120 - mxfp4.SHIFT  # a scale's code plus this is the exponent field of the factor
_NAN = 0x7F0  # magnitude bits of the NaN, where `_pair` puts them


def _load_pair(address):
    """Two codes from shared memory."""
    return assembly("ld.shared.u16 $0, [$1];", "=r,r", [address], 1, True)


def _pair(codes, largest, factor):
    """The two codes, times factor, as bf16 pair; and `largest`, of their magnitude bits too."""
    text = (
        "{ .reg .b32 x, y; prmt.b32 x, $2, 0, 0x1100; shr.u32 y, x, 4; and.b32 y, y, 0x07F007F0; max.u16x2 $1, y, $3; "
        "lop3.b32 y, x, 0x80008000, y, 0xEA; "  # (x & signs) | y
        "mul.rn.bf16x2 $0, y, $4; }"
    )
    return assembly(text, "=&r,=&r,r,r,r", [codes, largest, factor], 2)


def _poison(largest):
    """The bits of NaN where one half is _NAN, else of 0."""
    text = (
        "{ .reg .pred p; .reg .b32 t, u; and.b32 t, $1, 0xFFFF; setp.eq.u32 p, t, $2; selp.b32 u, 0x7FC00000, 0, p; "
        "shr.u32 t, $1, 16; setp.eq.u32 p, t, $2; selp.b32 $0, 0x7FC00000, u, p; }"
    )
    return assembly(text, "=r,r,r", [largest, Int32(_NAN)])


# What follows runs while a kernel is traced: nothing in it depends on values, and its loops are unrolled.


def load_codes(base: cute.Pointer, row: Int32, part: int, lane: Int32) -> list[list[Int32]]:
    """This thread's codes of rows `row` and row + 8 of a tile of ROW_BYTES per row, in the `part`-th half of the step: each row as 8
    pairs, one of every 8 k. Its 16-byte chunks lie as TMA's 128-byte swizzle puts them: number xor row % 8."""
    address = base.toint().to(Int32) + (row * ROW_BYTES + lane % 4 * 2)
    swizzle = row % 8
    return [
        [
            _load_pair(address + (half * 8 * ROW_BYTES + (Int32(chunk) ^ swizzle) * 16 + 8 * upper))
            for chunk in range(part * ROW_BYTES // 32, (part + 1) * ROW_BYTES // 32)
            for upper in range(2)
        ]
        for half in range(2)
    ]


def convert(
    fragment: cute.Tensor, codes: list[list[Int32]], factors: cute.Tensor, part: int, largest: cute.Tensor
) -> None:
    """mxfp4.convert, of codes as load_codes returns them. largest: 2 Int32, of each row, which these codes join."""
    for half in range(2):
        for i, pair in enumerate(codes[half]):
            k16, upper = i // 2, i % 2
            factor = factors[4 * half + mxfp4.PART_BLOCKS * part + 16 * k16 // mxfp4.BLOCK]
            converted, largest[half] = _pair(pair, largest[half], factor)
            fragment[4 * k16 + 2 * upper + half] = converted


def step_factors(factors: cute.Tensor, scales: cute.Tensor, step: Int32) -> None:
    mxfp4.step_factors(factors, scales, step, _BIAS)


def spoil(acc: cute.Tensor, largest: cute.Tensor) -> None:
    """acc, the sums of a warpgroup: NaN in the rows of which the largest code is."""
    for half in range(2):
        bits = largest[half]
        for distance in (1, 2):  # the lanes that share a row
            bits = access.larger_halves(bits, access.from_lane(bits, distance))
        poison = cute.make_rmem_tensor(1, Int32)
        poison[0] = _poison(bits)
        value = cute.recast_tensor(poison, Float32)[0]
        for v in range(cute.size(acc)):
            if v // 2 % 2 == half:
                acc[v] = acc[v] + value
