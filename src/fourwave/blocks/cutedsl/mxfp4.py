"""Weights in MXFP4 on their way to wgmma: packed e2m1 codes and e8m0 scales in shared memory, bf16 operands in registers.

A code's magnitude bits, put where bf16 keeps the last two bits of its exponent and the first of its mantissa, are a bf16 number:
the code's value times 2^-126, subnormals included. One multiplication by a power of two makes value * scale * 2^-SHIFT of it,
exactly; the sums are multiplied by 2^SHIFT at the end. Without the shift a scale of 4 would be out of bf16's range. With it,
scales from 2^-108 to 2^25 are exact; above them, and with the scale that is NaN, the products are infinite or NaN, below them they
round to multiples of 2^-109.
"""

from cutlass import Int32, cute

from fourwave.blocks.cutedsl.access import assembly

STEP = 128  # k of a stage
ROW_BYTES = STEP // 2  # of codes
BLOCK = 32  # k of a scale
PART_BLOCKS = STEP // 2 // BLOCK  # of a half of a step, which is converted at a time
GROUP = 16  # scales that are loaded together: 16 bytes of a row, 512 k
GROUP_STEPS = GROUP * BLOCK // STEP
SHIFT = 24
_BIAS = 126 - SHIFT  # a scale's code plus this is the exponent field of the factor
# In the order of ops.gemm.preshuffled_mxfp4: bytes of 16 rows and 64 k
BLOCK_K, BLOCK_ROWS = 64, 16
BLOCK_BYTES, BLOCK_SCALE_BYTES = 512, 32


def _load_quad(address):
    """Four words from shared memory."""
    return assembly("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address], 4, True)


def _factors(word, bias):
    """The four factors in bf16, each twice, of the four scale codes in `word`. bias: _BIAS."""
    text = (
        "{ .reg .b32 t, u; "
        "prmt.b32 t, $4, 0, 0x4140; mad.lo.u32 t, t, 128, $5; min.u16x2 t, t, $6; "
        "prmt.b32 u, $4, 0, 0x4342; mad.lo.u32 u, u, 128, $5; min.u16x2 u, u, $6; "
        "prmt.b32 $0, t, 0, 0x1010; prmt.b32 $1, t, 0, 0x3232; prmt.b32 $2, u, 0, 0x1010; prmt.b32 $3, u, 0, 0x3232; }"
    )
    nan = Int32(0x7FFF7FFF)  # of what is past bf16's exponents, 255 (NaN) with it
    return assembly(text, "=&r,=&r,=&r,=&r,r,r,r", [word, Int32(bias * 128 * 0x10001), nan], 4)


def _pair(word, selector, factor):
    """The two codes in byte lane % 4 of `word`, times factor, as bf16 pair. selector: 0x4440 + lane % 4."""
    text = (
        "{ .reg .b32 x, y, z; prmt.b32 x, $1, 0, $2; "
        "mul.lo.u32 y, x, 0x01001000; "  # bits 3 and 7, the signs, to 15 and 31
        "mul.lo.u32 z, x, 0x00040040; "  # bits 0..2 and 4..6 to 6..8 and 22..24
        "and.b32 z, z, 0x01C001C0; lop3.b32 z, y, 0x80008000, z, 0xEA; "  # (y & signs) | z
        "mul.rn.bf16x2 $0, z, $3; }"
    )
    return assembly(text, "=r,r,r,r", [word, selector, factor])


def _four_pairs(word, factors):
    """The four bf16 pairs of a word in preshuffled order, times the lower and the upper half of `factors` (rows g and g + 8) in turn."""
    text = (
        "{ .reg .b32 x, y, f, g; .reg .b16 l, h; mov.b32 {l, h}, $5; mov.b32 f, {l, l}; mov.b32 g, {h, h}; "
        "and.b32 x, $4, 0x81C081C0; mul.rn.bf16x2 $0, x, f; "
        "shl.b32 x, $4, 6; and.b32 x, x, 0x81C081C0; mul.rn.bf16x2 $1, x, g; "
        "shf.l.wrap.b32 x, $4, $4, 26; and.b32 x, x, 0x81C081C0; mul.rn.bf16x2 $2, x, f; "
        "shl.b32 x, $4, 4; and.b32 x, x, 0x81808180; shr.u32 y, $4, 4; lop3.b32 x, y, 0x00400040, x, 0xEA; "  # (y & m) | x
        "mul.rn.bf16x2 $3, x, g; }"
    )
    return assembly(text, "=&r,=&r,=&r,=&r,r,r", [word, factors], 4)


def _factor_pair(word, byte):
    """The factors in bf16 of the scale codes `byte` and `byte` + 1 of `word`; Inf where a code is one past bf16's range, NaN beyond."""
    text = f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {0x4140 + 0x101 * byte:#x}; mad.lo.u32 t, t, 128, $2; min.u16x2 $0, t, $3; }}"
    return assembly(text, "=r,r,r,r", [word, Int32(_BIAS * 128 * 0x10001), Int32(0x7FC07FC0)])


def _select(step, number, this, other):
    """`this` where step == number, else `other`."""
    text = "{ .reg .pred p; setp.eq.s32 p, $1, $2; selp.b32 $0, $3, $4, p; }"
    return assembly(text, "=r,r,r,r,r", [step, Int32(number), this, other])


# What follows runs while a kernel is traced: nothing in it depends on values, and its loops are unrolled.


def load_codes(base: cute.Pointer, row: Int32, part: int) -> list[list[list[Int32]]]:
    """Codes of rows `row` and row + 8 of a tile of ROW_BYTES per row, in the `part`-th half of the step: each row as 4 words for each
    block. Its 16-byte chunks lie as TMA's 64-byte swizzle puts them: number xor row / 2 % 4."""
    address = base.toint().to(Int32) + row * ROW_BYTES
    swizzle = row // 2 % 4
    return [
        [
            _load_quad(address + (half * 8 * ROW_BYTES + (Int32(PART_BLOCKS * part + block) ^ swizzle) * 16))
            for block in range(PART_BLOCKS)
        ]
        for half in range(2)
    ]


def load_scales(scales: cute.Tensor, base: cute.Pointer, row: Int32) -> None:
    """scales: 8 Int32, filled with the GROUP scale codes of each of rows `row` and row + 8 of a tile."""
    address = base.toint().to(Int32) + row * GROUP
    for half in range(2):
        for i, word in enumerate(_load_quad(address + half * 8 * GROUP)):
            scales[4 * half + i] = word


def step_factors(factors: cute.Tensor, scales: cute.Tensor, step: Int32, bias: int = _BIAS) -> None:
    """factors: 8 Int32, filled with those of the four blocks of each row in this STEP of the group, of scales as load_scales left them."""
    for half in range(2):
        word = scales[4 * half]
        for i in range(1, GROUP_STEPS):
            word = _select(step, i, scales[4 * half + i], word)
        for block, factor in enumerate(_factors(word, bias)):
            factors[4 * half + block] = factor


def convert(
    fragment: cute.Tensor, codes: list[list[list[Int32]]], factors: cute.Tensor, part: int, lane: Int32
) -> None:
    """Fill a 64 x STEP / 2 operand of wgmma in registers, of which this thread holds parts of two rows.

    fragment  Int32, for each 16 k: the first and the second row's of k + 0..7, then of k + 8..15; a thread has 2 k of each 8
    codes     as load_codes returns them; factors: as step_factors leaves them. part: which half of the step
    """
    selector = lane % 4 + 0x4440
    for half in range(2):
        for block in range(PART_BLOCKS):
            for chunk, codes_of_8 in enumerate(codes[half][block]):
                k16, upper = 2 * block + chunk // 2, chunk % 2
                factor = factors[4 * half + PART_BLOCKS * part + block]
                fragment[4 * k16 + 2 * upper + half] = _pair(codes_of_8, selector, factor)


def load_block(codes: Int32, scales: Int32, lane: Int32) -> tuple[list[Int32], Int32]:
    """A lane's part of a block in preshuffled order, from the addresses in shared memory where its codes and its scales begin."""
    word = assembly("ld.shared.b32 $0, [$1];", "=r,r", [scales + lane // 4 * 4], 1, True)
    return _load_quad(codes + lane * 16), word


def convert_block(codes: list[Int32], scales: Int32) -> list[list[Int32]]:
    """For each 16 k of a block the four registers of a product's first operand. codes, scales: as load_block returns them."""
    factors = [_factor_pair(scales, first) for first in (0, 2)]
    return [_four_pairs(word, factors[i // 2]) for i, word in enumerate(codes)]
