"""The matrix instructions of gfx1250 for MX operands, waves of 32 lanes: v_wmma_scale_f32_16x16x128_f8f6f4 and, for bfloat16 with
packed e2m1, v_wmma_f32_16x16x32_bf16 of dequantized codes.

Fragment of either operand, 16 rows and 128 k: lane l holds row l % 16 and, of packed e2m1, k = 32 * (l // 16) + 0..31 and 64 more,
two chunks of 16 bytes; of 8 bits, k = 16 * (l // 16) + 0..15 and 32, 64, 96 more, four chunks. Scales: byte i of a register is
that of the 32 k number i; the instruction takes the rows' scales from lanes 0-15 (row0) or 16-31 (row1), so that one register
serves two fragments.

The N operand is the instruction's first one, so a result is transposed: lane l holds out[m = l % 16, n = 8 * (l // 16) + i],
i = 0..7, neighbours of one output row.

With bfloat16, four instructions multiply the 128 k. Which k an element of a lane belongs to is free as long as both operands
agree, so those of packed e2m1 stay: of each chunk of 32, the first 16 are one instruction's and the rest another's.

Source: AMD CDNA5 ISA guide, WMMA; confirmed by Triton's kernels (tests/sim/test_matrix_triton.py).
"""

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl import e2m1
from fourwave.blocks.flydsl.dequantize import scale_factor
from fourwave.blocks.flydsl.memory import _lds_address, lds_read, vector_type
from fourwave.blocks.flydsl.wmma_tiles import BLOCKS, CODE_GAP, GAP_EVERY, with_gaps

WAVE = 32
MMA_M = MMA_N = 16
MMA_K = 128
ACC_PER_LANE = 8
WORDS = 8  # registers of a fragment of packed e2m1, and of 32 k of bfloat16
FORMATS = {"uint8": "fp4_e2m1", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_CHUNK = 16  # bytes of a read


def _attribute(text):
    return ir.Attribute.parse(f"#rocdl<{text}>")


def _joined(parts):
    """One Vector of several equally long ones."""
    while len(parts) > 1:
        parts = [
            low.shuffle(high, list(range(2 * low.numel))) for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def _gapped(offset, gap):
    """Place in LDS of a byte of a tile (Int32)."""
    return offset + (offset >> 8) * gap if gap else offset


assert GAP_EVERY == 1 << 8


class Operand:
    """Reads a wave's fragments of one operand, and their scales, from LDS, where k is contiguous in both.

    side                  gfx1250_config.Side; an even number of fragments
    codes_at, scales_at   byte offsets of the operand in a stage and in a page
    first_row (Int32)     the wave's first; a multiple of 16
    dequantized           scales are those of each lane's own row and k: bytes 0 and 2 of a register for each fragment
    """

    def __init__(self, side, first_row, codes_at, scales_at, lane, dequantized=False):
        self.side, self._lane, self._dequantized = side, lane, dequantized
        self.values = side.fragments * (4 if side.bits == 16 else 1)  # Vectors of all fragments
        chunk = {4: _CHUNK, 8: _CHUNK, 16: 4 * _CHUNK}[side.bits]
        start = (first_row + lane % MMA_M) * side.row_bytes + (lane // MMA_M) * chunk
        self._codes = codes_at + _gapped(start, CODE_GAP)
        row = first_row + (lane % MMA_M if dequantized else lane)
        self._scales = scales_at + _gapped(row * side.scale_row_bytes, side.scale_gap)

    def codes(self, lds, start):
        """start (Int32): byte offset of the stage in LDS."""
        out = []
        for i in range(self.side.fragments):
            at = start + self._codes + with_gaps(self.side.fragment_row(i) * self.side.row_bytes, CODE_GAP)

            def read(offset, at=at):
                return lds_read(lds, at + offset, 4, fx.Int32)

            if self.side.bits == 16:
                for first in (0, 128):
                    for second in (0, 32):
                        out.append(_joined([read(first + second + third) for third in (0, _CHUNK)]))
            else:
                out.append(_joined([read(2 * _CHUNK * j) for j in range(self.side.bits // 2)]))
        return out

    def scales(self, lds, page, tile):
        """page (Int32): byte offset in LDS; tile (Int32): which of the page's. A Vector of one for each two fragments;
        dequantized, for each."""
        start = page + self._scales + tile * BLOCKS
        step = 1 if self._dequantized else 2
        rows = [self.side.fragment_row(i) for i in range(0, self.side.fragments * self.side.scaled, step)]
        words = [
            lds_read(lds, start + with_gaps(row * self.side.scale_row_bytes, self.side.scale_gap), 1, fx.Int32)
            for row in rows
        ]
        if self._dequantized:
            return [word >> ((self._lane // MMA_M) * 8) for word in words]
        return words


class TurnedOperand:
    """As Operand, where M or N is contiguous in LDS: each k has a row of codes, each 32 of them a row of scales.

    ds_load_tr4_b64 gives lane l column l % 16 of 16 rows: element e comes from the row that lane
    16 * (e // 8) + 8 * (l // 16) + e % 8 points at. So lane f points at row 32 * (f // 8 % 2) + 8 * (f // 16) + f % 8, and the next
    16 k and the next 64 lie as many rows further on.
    ds_load_tr8_b64, lanes 0-15 and 16-31 each for themselves, gives lane l a column of 8 rows: element e from what lane
    8 * (e // 4) + 4 * (l // 8 % 2) + e % 4 points at, 8 columns of a row. So lane f points at row 4 * (f // 8 % 2) + f % 4 and the
    first or last 8 columns, by f // 4 % 2, of 16; lanes from 16 on 16 rows further down.
    (ROCm/rocm-systems, emulation/rocjitsu, ds_transpose.h; confirmed by Triton's kernels, tests/sim/test_transpose_triton.py)
    """

    def __init__(self, side, first_row, codes_at, scales_at, lane, dequantized=False):
        self.side, self._lane, self._dequantized = side, lane, dequantized
        self.values = side.fragments
        if side.bits == 4:
            row, column = ((lane >> 3) & 1) * 32 + (lane >> 4) * 8 + (lane & 7), first_row >> 1
        else:
            row, column = ((lane >> 3) & 1) * 4 + (lane >> 4) * 16 + (lane & 3), first_row + ((lane >> 2) & 1) * 8
        self._codes = codes_at + _gapped(row * side.row_bytes, CODE_GAP) + column
        self._scales = scales_at + first_row + (lane % MMA_M if dequantized else lane)

    def codes(self, lds, start):
        side = self.side
        rows = (0, 16, 64, 80) if side.bits == 4 else (0, 8, 32, 40, 64, 72, 96, 104)
        read = lds_read_turned4 if side.bits == 4 else lds_read_turned8
        assert all(k * side.row_bytes % GAP_EVERY == 0 for k in rows), "whole intervals between gaps"
        out = []
        for i in range(side.fragments):
            at = start + self._codes + side.fragment_row(i) * side.bits // 8
            parts = [read(lds, at + with_gaps(k * side.row_bytes, CODE_GAP)) for k in rows]
            out.append(_joined(parts))
        return out

    def scales(self, lds, page, tile):
        pitch = self.side.scale_row_bytes
        start = page + self._scales + tile * (BLOCKS * pitch)

        def read(offset):
            return lds_read(lds, start + offset, 1, fx.Uint8)[0].to(fx.Int32)

        out = []
        if self._dequantized:
            half = (self._lane // MMA_M) * pitch
            for i in range(self.side.fragments):
                row = self.side.fragment_row(i)
                low, high = (read(half + row + 2 * block * pitch) for block in range(2))
                out.append(fx.Vector.filled(1, low | (high << 16), fx.Int32))
            return out
        for i in range(0, self.side.fragments, 2):
            codes = [read(self.side.fragment_row(i) + block * pitch) for block in range(BLOCKS)]
            word = codes[0] | (codes[1] << 8) | (codes[2] << 16) | (codes[3] << 24)
            out.append(fx.Vector.filled(1, word, fx.Int32))
        return out


@dsl_loc_tracing
def lds_read_turned4(lds, byte_offset):
    """16 codes of 4 bits of a column, where each lane points at 16 of a row (TurnedOperand)."""
    return fx.Vector(_rocdl.ds_load_tr4_b64(vector_type(2, fx.Int32), _lds_address(lds, byte_offset)))


@dsl_loc_tracing
def lds_read_turned8(lds, byte_offset):
    """8 codes of 8 bits of a column, where each lane points at 8 of a row (TurnedOperand)."""
    return fx.Vector(_rocdl.ds_load_tr8_b64(vector_type(2, fx.Int32), _lds_address(lds, byte_offset)))


def zero(results):
    return [fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32) for _ in range(results)]


class Scaled:
    """acc[i][j] += a[i] @ b[j] of two MX operands; acc is a flat list, j fastest. row_sums: behind it one result for each i, in
    which each row of op(a) is summed."""

    def __init__(self, a_type, b_type, frags_m, frags_n, row_sums=False):
        """a_type, b_type: names of torch types, of FORMATS."""
        self._formats = [_attribute(f"matrix_format {FORMATS[each]}") for each in (b_type, a_type)]
        self._frags_m, self._frags_n, self._row_sums = frags_m, frags_n, row_sums
        self.results = frags_m * frags_n + row_sums * frags_m
        first = max(1, frags_m // 4)
        self.first = [(i, j) for i in range(first) for j in range(frags_n)]  # about a quarter of a tile
        self.rest = [(i, j) for i in range(first, frags_m) for j in range(frags_n)]

    def multiply(self, a, b, acc, scales_a, scales_b, cells):
        out = list(acc)
        for i, j in cells:
            index = i * self._frags_n + j
            scales = (scales_b[j // 2][0], j % 2), (scales_a[i // 2][0], i % 2)
            out[index] = _scaled(b[j], a[i], out[index], *scales, self._formats)
            if self._row_sums and j == 0:
                index = self._frags_m * self._frags_n + i
                ones = fx.Vector.filled(WORDS, 0x22222222, fx.Int32), (fx.Int32(0x7F7F7F7F), 0)
                formats = [_attribute(f"matrix_format {FORMATS['uint8']}"), self._formats[1]]
                out[index] = _scaled(ones[0], a[i], out[index], ones[1], scales[1], formats)
        return out


@dsl_loc_tracing
def _scaled(first, second, acc, first_scale, second_scale, formats):
    """Scales: (register, which half of the lanes)."""
    result = _rocdl.wmma_scale_f32_16x16x128_f8f6f4(
        vector_type(ACC_PER_LANE, fx.Float32),
        as_ir_value(first),
        as_ir_value(second),
        as_ir_value(acc),
        as_ir_value(first_scale[0]),
        as_ir_value(second_scale[0]),
        fmtA=formats[0],
        fmtB=formats[1],
        modC=_attribute("wmma_c_modifier none"),
        scaleAType=_attribute(f"wmma_matrix_scale row{first_scale[1]}"),
        fmtScaleA=_attribute("wmma_matrix_scale_format e8"),
        scaleBType=_attribute(f"wmma_matrix_scale row{second_scale[1]}"),
        fmtScaleB=_attribute("wmma_matrix_scale_format e8"),
    )
    return fx.Vector(getattr(result, "result", result))


class Dequantized:
    """As Scaled, of a in bfloat16 (four Vectors a fragment) and b in packed e2m1."""

    def __init__(self, frags_m, frags_n, lane):
        self._frags_n, self._lane = frags_n, lane
        self.results = frags_m * frags_n
        first = max(1, frags_n // 4)
        # Column by column: each fragment of b is dequantized once.
        self.first = [(i, j) for j in range(first) for i in range(frags_m)]
        self.rest = [(i, j) for j in range(first, frags_n) for i in range(frags_m)]

    def multiply(self, a, b, acc, scales_a, scales_b, cells):
        out = list(acc)
        done, values = None, []
        for i, j in cells:
            if j != done:
                done, values = j, self._bfloat16(b[j], scales_b[j][0])
            index = i * self._frags_n + j
            for part in range(4):
                out[index] = _bfloat16_product(values[part], a[4 * i + part], out[index])
        return out

    def _bfloat16(self, codes, scales):
        """Four Vectors, of 16 elements each. The lane's scales are bytes 0 and 2."""
        words = []
        for half in range(2):
            factor = scale_factor(scales, 2 * half)
            for w in range(4):
                words += e2m1.bfloat16_pairs(codes[4 * half + w], factor)
        return [fx.Vector.from_elements(words[8 * part : 8 * part + 8], fx.Int32) for part in range(4)]


@dsl_loc_tracing
def _bfloat16_product(first, second, acc):
    result = _rocdl.wmma_f32_16x16x32_bf16(
        vector_type(ACC_PER_LANE, fx.Float32),
        as_ir_value(first.bitcast(fx.BFloat16)),
        as_ir_value(second.bitcast(fx.BFloat16)),
        as_ir_value(acc),
    )
    return fx.Vector(getattr(result, "result", result))
