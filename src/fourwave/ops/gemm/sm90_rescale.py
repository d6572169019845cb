"""MXFP4 rows written in E4M3, with one power of two for each row: operands of an FP8 product that have the same values.

out[r, c] * factor[r] = code[r, c] * scale of its block, exactly. An E2M1 number, 0.5 to 6, times 2^s is an E4M3 number for s from
-8 (0.5 * 2^-8 is the least subnormal, 2^-9) to 6 (6 * 2^6 = 384). So a row's largest scale becomes 2^6 * factor, and scales down to
2^-14 of it (SPREAD) fit. Blocks of nothing but zeros have no say, whatever their scales. A scale that is NaN makes its block's codes NaN.

Where a row's scales differ by more, or its factor lies outside 2^-LIMIT to 2^LIMIT (past which a product that is still to be
scaled might leave float32's range where the result does not), `flag` becomes 1, and what is written means nothing.

Rows of a, then of b; a warp has a row, 8 of them a CTA. A lane takes 16 codes, half a block, 4 times in each step over the row:
once to find the largest and the least scale, once more (then out of a cache) to convert. In the second the eight magnitudes times
the block's power of two are made by conversion, and codes select from their bytes.

Decode writes both operands in bfloat16 where the flag is set, and is soon over where it is not.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, cute

from fourwave.blocks.cutedsl import access
from fourwave.blocks.cutedsl.access import assembly
from fourwave.ops.gemm import sm90_decode
from fourwave.ops.gemm.sm90_decode import TILE
from fourwave.ops.gemm.sm90_rescaled import LIMIT, SPREAD

WARPS = 8
LANES = 32
UNIT = 16  # codes of a lane at a time
UNITS = 4  # of a lane in a step
STEP = UNITS * LANES
TOP = 6  # exponent of the largest scale over the factor
BIAS = 127  # of E8M0
ALL_NAN = 0x7F7F7F7F
DECODE = sm90_decode.Decode("e2m1", k_last=True, whole_chunks=True)


class Rescale:
    """__call__ is the launcher, kernel the device code."""

    @cute.jit
    def __call__(
        self, a: Int64, a_stride: Int64, a_scale: Int64, a_out: Int64, b: Int64, b_stride: Int64, b_scale: Int64, b_out: Int64,
        factors: Int64, flag: Int64, M: Int32, N: Int32, K: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Addresses; strides in bytes, of rows of codes, multiples of 8 like a and b. Scales [M or N, K / 32], a_out and b_out
        [M or N, K] have no gaps; factors: of a's rows, then of b's; K is a multiple of 32."""
        self.kernel(a, a_stride, a_scale, a_out, b, b_stride, b_scale, b_out, factors, flag, M, N, K).launch(
            grid=((M + N + WARPS - 1) // WARPS, 1, 1), block=(WARPS * LANES, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, a: Int64, a_stride: Int64, a_scale: Int64, a_out: Int64, b: Int64, b_stride: Int64, b_scale: Int64, b_out: Int64,
        factors: Int64, flag: Int64, M: Int32, N: Int32, K: Int32,
    ):  # fmt: skip
        # The product may be set up meanwhile; it waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        thread = cute.arch.thread_idx()[0]
        lane = thread % LANES
        row = cute.arch.make_warp_uniform(cute.arch.block_idx()[0] * WARPS + thread // LANES)
        codes, stride, scales, out, at = a, a_stride, a_scale, a_out, row
        if row >= M:
            codes, stride, scales, out, at = b, b_stride, b_scale, b_out, row - M
        units = K // UNIT
        limit = access.where_less(row, M + N, units, Int32(0))
        codes += stride * at
        scales += Int64(at) * (K // (2 * UNIT))
        out += Int64(at) * K
        found = Int32(0)
        for first in cutlass.range(0, units, STEP, unroll=1):
            found = _find(codes, scales, _units(first + lane), limit, found)
        largest, wrong = _of_row(_of_warp(found))
        there = access.where_less(lane, Int32(1), limit, Int32(0))
        access.store_words(factors + Int64(row) * 4, [(largest - TOP) << 23], Int32(0), there)
        access.store_words(flag, [Int32(1)], Int32(0), there * wrong)
        for first in cutlass.range(0, units, STEP, unroll=1):
            _convert(codes, scales, out, _units(first + lane), limit, largest)


class Decode:
    """Rows of a and of b in bfloat16, as sm90_decode.py has them, where the flag is not 0: tiles of a, then of b."""

    @cute.jit
    def __call__(
        self, a: Int64, a_stride: Int64, a_scale: Int64, a_out: Int64, b: Int64, b_stride: Int64, b_scale: Int64, b_out: Int64,
        flag: Int64, M: Int32, N: Int32, K: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """As Rescale.__call__, with a_out and b_out in bfloat16; ctas: of the grid."""
        self.kernel(a, a_stride, a_scale, a_out, b, b_stride, b_scale, b_out, flag, M, N, K, ctas).launch(
            grid=(ctas, 1, 1), block=(sm90_decode.THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self, a: Int64, a_stride: Int64, a_scale: Int64, a_out: Int64, b: Int64, b_stride: Int64, b_scale: Int64, b_out: Int64,
        flag: Int64, M: Int32, N: Int32, K: Int32, ctas: Int32,
    ):  # fmt: skip
        cute.arch.griddepcontrol_launch_dependents()
        tiles_k = (K + TILE - 1) // TILE
        tiles_a = (M + TILE - 1) // TILE * tiles_k
        tiles = tiles_a + (N + TILE - 1) // TILE * tiles_k
        thread = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0]
        # Also where there is nothing to do: who waits for this grid counts on what it waited for.
        cute.arch.griddepcontrol_wait()
        if _word(flag) == 0:
            first = tiles
        for tile in cutlass.range(first, tiles, ctas, unroll=1):
            x, stride, scales, out, rows, at = a, a_stride, a_scale, a_out, M, tile
            if tile >= tiles_a:
                x, stride, scales, out, rows, at = b, b_stride, b_scale, b_out, N, tile - tiles_a
            tile_m = at // tiles_k
            row = tile_m * TILE + thread // 16 * sm90_decode.LINE
            column = (at - tile_m * tiles_k) * TILE + thread % 16 * sm90_decode.LINE
            DECODE.body(x, stride, scales, out, Int64(K) * 2, Int64(0), rows, K, rows, K, row, column)


def _units(first):
    """Those of a lane in a step."""
    return [first + i * LANES for i in range(UNITS)]


def _find(codes, scales, units, limit, found):
    loaded = [_load(codes, scales, unit, limit) for unit in units]  # all in flight together
    for words, scale in loaded:
        found = access.larger_halves(found, _of_unit(words, scale))
    return found


def _of_warp(found):
    for distance in (16, 8, 4, 2, 1):
        found = access.larger_halves(found, access.from_lane(found, distance))
    return found


def _convert(codes, scales, out, units, limit, largest):
    loaded = [_load(codes, scales, unit, limit) for unit in units]
    for unit, (words, scale) in zip(units, loaded, strict=True):
        table = _magnitudes(scale, largest)
        made = [each for word in words for each in _select(word, table)]
        access.store_words(out + Int64(unit) * UNIT, made, unit, limit)


# -- numbers travel as Int32 that hold their bits


def _word(address):
    """32 bits that an earlier grid has written."""
    return assembly("ld.global.b32 $0, [$1];", "=r,l", [address], effects=True)


def _load(codes, scales, unit, limit):
    """(two words of codes, their scale); zeros from `limit` on."""
    words = access.load_words(codes + Int64(unit) * (UNIT // 2), 2, unit, limit)
    text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.u8 $0, [$1]; }"
    return words, assembly(text, "=&r,l,r,r", [scales + Int64(unit // 2), unit, limit])


def _of_unit(words, scale):
    """scale + 1 and 255 - scale, as halves; 0 where the codes are zeros or the scale is NaN."""
    text = (
        "{ .reg .pred p, q; .reg .b32 t; or.b32 t, $1, $2; and.b32 t, t, 0x77777777; setp.ne.b32 p, t, 0; "
        "setp.ne.b32 q, $3, 255; and.pred p, p, q; mad.lo.s32 t, $3, 0xFFFF, 0x100FF; selp.b32 $0, t, 0, p; }"
    )
    return assembly(text, "=&r,r,r,r", [*words, scale])


def _of_row(found):
    """(largest scale, 1 where the row cannot be written, else 0) of what `_of_unit` finds in it."""
    least = BIAS + TOP - LIMIT
    text = (
        "{ .reg .pred p, q; .reg .b32 high, low, t; shr.u32 high, $2, 16; and.b32 low, $2, 0xFFFF; "
        # largest - least scale = high - 1 - (255 - low)
        f"add.s32 t, high, low; setp.gt.s32 p, t, {SPREAD + 256}; sub.s32 high, high, 1; sub.s32 t, high, {least}; "
        f"setp.gt.u32 q, t, {2 * LIMIT}; or.pred p, p, q; selp.b32 t, 1, 0, p; setp.eq.b32 p, $2, 0; "
        f"selp.b32 $0, {BIAS + TOP}, high, p; selp.b32 $1, 0, t, p; }}"
    )
    return assembly(text, "=&r,=&r,r", [found], 2)


def _magnitudes(scale, largest):
    """The bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times scale / factor. Of a block of zeros only the first is used."""
    text = (
        "{ .reg .pred p; .reg .b32 t; .reg .f32 f, x, y; .reg .b16 l, h; "
        f"sub.s32 t, $2, $3; add.s32 t, t, {127 + TOP}; shl.b32 t, t, 23; mov.b32 f, t; setp.eq.b32 p, $2, 255; "
        "mul.rn.f32 x, f, 0f3F000000; cvt.rn.satfinite.e4m3x2.f32 l, x, 0f00000000; "
        "mul.rn.f32 x, f, 0f3FC00000; cvt.rn.satfinite.e4m3x2.f32 h, x, f; "
        f"mov.b32 t, {{l, h}}; selp.b32 $0, {ALL_NAN:#x}, t, p; "
        "mul.rn.f32 x, f, 0f40400000; mul.rn.f32 y, f, 0f40000000; cvt.rn.satfinite.e4m3x2.f32 l, x, y; "
        "mul.rn.f32 x, f, 0f40C00000; mul.rn.f32 y, f, 0f40800000; cvt.rn.satfinite.e4m3x2.f32 h, x, y; "
        f"mov.b32 t, {{l, h}}; selp.b32 $1, {ALL_NAN:#x}, t, p; }}"
    )
    return assembly(text, "=&r,=&r,r,r", [scale, largest], 2)


def _select(word, table):
    """E4M3 of the 8 codes of a word, in two words."""
    text = (
        "{ .reg .b32 t, s, m; and.b32 t, $2, 0x77777777; shr.u32 s, $2, 3; and.b32 s, s, 0x11111111; "
        "prmt.b32 $0, $3, $4, t; prmt.b32 m, 0x8000, 0, s; or.b32 $0, $0, m; "
        "shr.u32 t, t, 16; shr.u32 s, s, 16; "
        "prmt.b32 $1, $3, $4, t; prmt.b32 m, 0x8000, 0, s; or.b32 $1, $1, m; }"
    )
    return assembly(text, "=&r,=&r,r,r,r", [word, *table], 2)
