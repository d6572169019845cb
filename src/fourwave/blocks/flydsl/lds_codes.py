"""gfx1250: rows of results that a wave of 32 lanes has in LDS become codes with scales, there and in memory.

A lane holds `run` neighbouring columns of a row, so that 32 / run lanes hold a block of 32. Codes, and bytes of scales, get places of their
own in the wave's part of LDS, from which the tensor data mover stores them. The numbers are convert.py's, as on the other machines.
"""

from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl import tdm
from fourwave.blocks.flydsl.control import loop, when
from fourwave.blocks.flydsl.convert import INF_BITS, NAN_BITS, BlockScale, Codes, lane_max, larger, magnitude
from fourwave.blocks.flydsl.memory import lds_read, lds_write, select
from fourwave.blocks.flydsl.wmma_tiles import code_pitch

BLOCK = 32  # elements that share a scale
WAVE = 32
_ALL_LANES = 31


@dsl_loc_tracing
def _scalar(tensor):
    """The one element of a float32 tensor."""
    return fx.Float32(_llvm.LoadOp(fx.Float32.ir_type, fx.get_iter(tensor).llvm_ptr, alignment=4).result)


@dsl_loc_tracing
def _atomic_max(tensor, value):
    """max(memory, value) of signed 32-bit integers."""
    pointer = fx.get_iter(tensor).llvm_ptr
    _llvm.AtomicRMWOp(_llvm.AtomicBinOp.max, pointer, as_ir_value(value), _llvm.AtomicOrdering.monotonic, alignment=4)


def _largest(bits):
    result = bits[0]
    for each in bits[1:]:
        result = larger(result, each)
    return result


class LdsCodes:
    """What a wave quantizes of out, a pass of `rows` rows and `columns` columns at a time.

    place       byte offset in LDS of rows * (code_pitch and, of scales for each block, columns / 32 bytes) for rowwise or "tensor" codes,
                then of the same with columns instead of rows
    n0          first column of out
    """

    def __init__(self, epi, arguments, lds, place, rows, columns, n0, columns_left, lane):
        self.epi, self.arguments, self.lds, self.lane = epi, arguments, lds, lane
        self.rows, self.columns, self.n0, self.columns_left = rows, columns, n0, columns_left
        self.codes = Codes(epi.code_format, epi.arch)
        self.run, self.column = columns // WAVE, lane * (columns // WAVE)
        self.blocks = epi.out_scaling == "1x32"
        self.rowwise = self.blocks and epi.out_direction != "columnwise"
        self.columnwise = self.blocks and epi.out_direction != "rowwise"
        self.saturate = not self.blocks or epi.out_scale_rule == "floor"
        self.pitch, self.scale_pitch = code_pitch(columns), columns // BLOCK
        self.row_codes = place
        self.row_scales = self.row_codes + rows * self.pitch
        self.column_codes = self.row_scales + rows * self.scale_pitch if self.rowwise else place
        self.column_scales = self.column_codes + rows * self.pitch
        self.inside = [self.column + e < columns_left for e in range(self.run)]
        if not self.blocks:
            self.inv_scale = BlockScale.given(_scalar(arguments.out_scale)).inv

    def row(self, row, values, used, state):
        """Float32 of the lane's columns of a row, which exists where `used`. state: what of the rows before it goes on."""
        bits = [select(inside, magnitude(value), 0) for value, inside in zip(values, self.inside, strict=True)]
        amax = _largest(bits)
        if not self.blocks:
            scaled = [value * self.inv_scale for value in values]
            self._write(self.row_codes + row * self.pitch, scaled, [value == value for value in scaled])
            return [larger(state[0], select(used, amax, 0))]
        if self.rowwise:
            scale = BlockScale.of(
                lane_max(amax, BLOCK // self.run - 1, self.epi.arch), self.epi.code_format, self.epi.out_scale_rule
            )
            self._write(self.row_codes + row * self.pitch, [value * scale.inv for value in values], scale.finite)
            at = self.row_scales + row * self.scale_pitch + self.column // BLOCK
            when(self.column % BLOCK == 0, lambda: lds_write(self.lds, at, scale.byte.to(fx.Uint8), 1))
        return state

    def turn(self, results, pitch, rows_left):
        """Blocks of 32 rows, of which Float32 lie in LDS from `results` on, where this lane has written them."""
        for block in range(self.rows // BLOCK):

            def read(i, block=block):
                return lds_read(self.lds, results + (block * BLOCK + i) * pitch + self.column * 4, self.run, fx.Float32)

            def find(i, state, block=block, read=read):
                value, used = read(i), block * BLOCK + i < rows_left
                return [larger(old, select(used, magnitude(value[e]), 0)) for e, old in enumerate(state)]

            maxima = loop(BLOCK, [fx.Int32(0)] * self.run, find)
            scales = [BlockScale.of(amax, self.epi.code_format, self.epi.out_scale_rule) for amax in maxima]
            finite = [scale.finite for scale in scales]

            def convert(i, state, block=block, read=read, scales=scales, finite=finite):
                value = read(i)
                scaled = [value[e] * scale.inv for e, scale in enumerate(scales)]
                self._write(self.column_codes + (block * BLOCK + i) * self.pitch, scaled, finite)
                return state

            loop(BLOCK, [], convert)
            word = scales[0].byte
            for e, scale in enumerate(scales[1:], 1):
                word = word | (scale.byte << (8 * e))
            self._write_bytes(self.column_scales + block * self.columns, word)

    def _write(self, line, scaled, finite):
        """finite: of the row's block, or one for each value."""
        if isinstance(finite, list):
            finite = self.codes.masks(finite + finite[-1:] * (4 - self.run))
        four = scaled + [fx.Float32(0.0)] * (4 - self.run)
        self._write_bytes(line, self.codes.pack(four, saturate=self.saturate, nan=False, finite=finite))

    def _write_bytes(self, line, word):
        """The lane's `run` bytes of a line."""
        kept = {4: word, 2: (word & 0xFFFF).to(fx.Uint16), 1: (word & 0xFF).to(fx.Uint8)}[self.run]
        lds_write(self.lds, line + self.column, kept, self.run)

    def store(self, base, row0, rows_left):
        """To memory, by the data mover; LDS writes have been waited for."""
        arguments, columns = self.arguments, self.columns
        used = select(self.columns_left < columns, self.columns_left, columns)
        if not self.blocks or self.rowwise:
            self._store(arguments.out, row0, self.n0, base + self.row_codes, (self.rows, self.pitch), (rows_left, used))
        if self.rowwise:
            left = (rows_left, (self.columns_left + (BLOCK - 1)) >> 5)
            tile = (self.rows, self.scale_pitch)
            self._store(arguments.out_scale, row0, self.n0 >> 5, base + self.row_scales, tile, left)
        if self.columnwise:
            tile, left = (self.rows, self.pitch), (rows_left, used)
            self._store(arguments.out_columnwise, row0, self.n0, base + self.column_codes, tile, left)
            tile, left = (self.rows // BLOCK, columns), ((rows_left + (BLOCK - 1)) >> 5, used)
            self._store(arguments.out_columnwise_scale, row0 >> 5, self.n0, base + self.column_scales, tile, left)

    @staticmethod
    def _store(tensor, row, column, lds, tile, left):
        stride = fx.Int64(fx.get_scalar(tensor.stride[0]))
        start = tdm.address(tensor) + fx.Int64(row) * stride + fx.Int64(column)
        tdm.Tile.of(start, lds, tile, left, stride, tdm.layout(1)).store()

    def keep_amax(self, state):
        """The largest magnitude of what was stored, as the other waves' and workgroups' are kept."""
        if self.blocks:
            return
        amax = lane_max(state[0], _ALL_LANES, self.epi.arch)
        # A NaN is the largest of all.
        amax = (amax > INF_BITS).select(fx.Int32(NAN_BITS), amax)
        when(self.lane == 0, lambda: _atomic_max(self.arguments.out_amax, amax))
