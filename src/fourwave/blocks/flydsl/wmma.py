"""The scaled matrix instruction of gfx1250 for packed e2m1: v_wmma_scale_f32_16x16x128_f8f6f4, waves of 32 lanes.

Fragment of either operand, 16 rows and 128 k: lane l holds row l % 16, k = 32 * (l // 16) + 0..31 and 64 more, two chunks of
16 bytes. Scales: byte i of a register is that of the 32 k number i; the instruction takes the rows' scales from lanes 0-15
(row0) or 16-31 (row1), so that one register serves two fragments.

The N operand is the instruction's first one, so a result is transposed: lane l holds out[m = l % 16, n = 8 * (l // 16) + i],
i = 0..7, neighbours of one output row.

Source: AMD CDNA5 ISA guide, WMMA; confirmed by Triton's kernels (tests/sim/test_matrix_triton.py).
"""

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import _lds_address, lds_read, vector_type

WAVE = 32
MMA_M = MMA_N = 16
MMA_K = 128
ROW_BYTES = MMA_K // 2  # of a fragment
CHUNK_BYTES = 16  # 32 codes
ACC_PER_LANE = 8
BLOCKS = MMA_K // 32  # scales of a row: a register


def _attribute(text):
    return ir.Attribute.parse(f"#rocdl<{text}>")


class Operand:
    """Reads a wave's fragments of one operand, and their scales, from LDS, where k is contiguous in both.

    codes_at, scales_at   byte offsets of the operand in a tile and in a page; *_pitch: bytes from one row to the next
    first_row (Int32)     the wave's first; fragments is even
    """

    def __init__(self, first_row, fragments, codes_at, code_pitch, scales_at, scale_pitch, lane):
        self.fragments, self.code_pitch, self.scale_pitch = fragments, code_pitch, scale_pitch
        self._codes = codes_at + (first_row + lane % MMA_M) * code_pitch + (lane // MMA_M) * CHUNK_BYTES
        self._scales = scales_at + (first_row + lane) * scale_pitch

    def codes(self, lds, start):
        """start (Int32): byte offset of the tile in LDS."""
        out = []
        for i in range(self.fragments):
            at = start + self._codes + i * MMA_M * self.code_pitch
            low, high = (lds_read(lds, at + 2 * CHUNK_BYTES * j, 4, fx.Int32) for j in range(2))
            out.append(low.shuffle(high, list(range(8))))
        return out

    def scales(self, lds, page, tile):
        """page (Int32): byte offset in LDS; tile (Int32): which of the page's. A Vector of one for each two fragments."""
        start = page + self._scales + tile * BLOCKS
        return [lds_read(lds, start + i * MMA_M * self.scale_pitch, 1, fx.Int32) for i in range(0, self.fragments, 2)]


class TurnedOperand:
    """As Operand, where M or N is contiguous in LDS: each k has a row of codes, each 32 of them a row of scales.

    ds_load_tr4_b64 gives lane l column l % 16 of 16 rows: element e comes from the row that lane
    16 * (e // 8) + 8 * (l // 16) + e % 8 points at (ROCm/rocm-systems, emulation/rocjitsu, ds_transpose.h; confirmed by Triton's
    kernels, tests/sim/test_transpose_triton.py). So lane f points at row 32 * (f // 8 % 2) + 8 * (f // 16) + f % 8, and the next
    16 k and the next 64 lie as many rows further on.
    """

    def __init__(self, first_row, fragments, codes_at, code_pitch, scales_at, scale_pitch, lane):
        self.fragments, self.code_pitch, self.scale_pitch = fragments, code_pitch, scale_pitch
        row = ((lane >> 3) & 1) * 32 + (lane >> 4) * 8 + (lane & 7)
        self._codes = codes_at + row * code_pitch + (first_row >> 1)
        self._scales = scales_at + first_row + lane

    def codes(self, lds, start):
        out = []
        for i in range(self.fragments):
            at = start + self._codes + i * MMA_M // 2
            parts = [lds_read_turned(lds, at + k * self.code_pitch) for k in (0, 16, 64, 80)]
            low, high = (parts[j].shuffle(parts[j + 1], list(range(4))) for j in (0, 2))
            out.append(low.shuffle(high, list(range(8))))
        return out

    def scales(self, lds, page, tile):
        start = page + self._scales + tile * (BLOCKS * self.scale_pitch)
        out = []
        for i in range(0, self.fragments, 2):
            codes = [
                lds_read(lds, start + i * MMA_M + block * self.scale_pitch, 1, fx.Uint8)[0].to(fx.Int32)
                for block in range(BLOCKS)
            ]
            word = codes[0] | (codes[1] << 8) | (codes[2] << 16) | (codes[3] << 24)
            out.append(fx.Vector.filled(1, word, fx.Int32))
        return out


@dsl_loc_tracing
def lds_read_turned(lds, byte_offset):
    """16 codes of 4 bits of a column, where each lane points at 16 of a row (TurnedOperand)."""
    return fx.Vector(_rocdl.ds_load_tr4_b64(vector_type(2, fx.Int32), _lds_address(lds, byte_offset)))


def zero(results):
    return [fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32) for _ in range(results)]


@dsl_loc_tracing
def multiply(a, b, acc, scales_a, scales_b, rows):
    """acc[i][j] += a[i] @ b[j] for i in rows; acc is a flat list, j fastest."""
    out = list(acc)
    fp4 = _attribute("matrix_format fp4_e2m1")
    for i in rows:
        for j in range(len(b)):
            index = i * len(b) + j
            result = _rocdl.wmma_scale_f32_16x16x128_f8f6f4(
                vector_type(ACC_PER_LANE, fx.Float32),
                as_ir_value(b[j]),
                as_ir_value(a[i]),
                as_ir_value(out[index]),
                as_ir_value(scales_b[j // 2][0]),
                as_ir_value(scales_a[i // 2][0]),
                fmtA=fp4,
                fmtB=fp4,
                modC=_attribute("wmma_c_modifier none"),
                scaleAType=_attribute(f"wmma_matrix_scale row{j % 2}"),
                fmtScaleA=_attribute("wmma_matrix_scale_format e8"),
                scaleBType=_attribute(f"wmma_matrix_scale row{i % 2}"),
                fmtScaleB=_attribute("wmma_matrix_scale_format e8"),
            )
            out[index] = fx.Vector(getattr(result, "result", result))
    return out
