"""FlyDSL quantization kernels for CDNA3 and CDNA4: codes and scales of x[R, C], rowwise, columnwise or both from one reading.

x               float32, bfloat16 or float16, inner stride 1
codes           as QuantizeTensors: [R, C], and [C, R] where columnwise codes are stored transposed; bytes
scales          as QuantizeTensors; E8M0 bytes or float32

A workgroup of four waves takes a tile of 128 x 128, each wave 32 rows. Lane l of a wave holds 4 rows, 4 * (l / 8) + 0..3, and
16 columns, 16 * (l % 8) + 0..15, as float32:

  load      16 bytes per lane and access
  amax      of the lane's part, then over lanes (convert.lane_max), then over waves through LDS where a block spans them
  scale     convert.BlockScale; every lane computes the scales of its own rows and columns
  codes     rowwise and natural columnwise: four neighbours of a row per word, 16 bytes per lane and row to memory.
            transposed: four rows of a column per word; through LDS, so that a lane stores 16 rows of a column
There is no loop: the tiles are the grid. A scale that spans tiles ("tensor", "row") is made from an amax that an earlier
launch (build_amax) left in memory, or is given.

LDS images  codes: line c * 8 + j holds column 16 * j + c, 128 bytes of rows; 16-byte chunk k lies at k ^ j. Words that 32 lanes
            (gfx942) or 64 (gfx950) write at once, and chunks that tiles.read_b128_groups read at once, are in different
            banks.
            columns: 32-bit words, column 16 * j + c at word (c / 4) * 32 + 4 * j + c % 4: 128 contiguous bytes per access
Limits      rows of x and of the codes span less than 2^26 bytes, 2^24 transposed: a wave's offsets have 32 bits. Everything
            else is addressed with 64 bits.
"""

from dataclasses import dataclass

import flydsl.compiler as flyc
from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave import formats
from fourwave.blocks.flydsl.convert import (
    INF_BITS,
    BlockScale,
    Codes,
    lane_max,
    larger,
    magnitude,
)
from fourwave.blocks.flydsl.memory import (
    OUT_OF_RANGE,
    Buffer,
    _lds_address,
    barrier,
    lds_read,
    minimum,
    select,
    transpose_bytes,
    uniform,
    wait_lds,
)
from fourwave.blocks.flydsl.tiles import WAVE, WORKGROUP

TILE = 128  # rows and columns
WAVES = WORKGROUP // WAVE
WAVE_ROWS = TILE // WAVES
ROWS, COLUMNS = 4, 16  # of a lane
LANE_COLUMNS = TILE // COLUMNS  # lanes side by side: 8
ALL_COLUMNS, ALL_ROWS = (
    LANE_COLUMNS - 1,
    WAVE - LANE_COLUMNS,
)  # lane_max masks: over a row of lanes, over a column of them

DTYPES = {"float32": fx.Float32, "bfloat16": fx.BFloat16, "float16": fx.Float16}


def codes_address(j, c, chunk):
    """Byte of a 16-byte chunk of column 16 * j + c; Python ints or FlyDSL's."""
    return (c * LANE_COLUMNS + j) * TILE + ((chunk ^ j) << 4)


def columns_address(j, c):
    """Byte of the words of columns 16 * j + c .. + 3, c a multiple of 4."""
    return c // 4 * (LANE_COLUMNS * 16) + j * 16


def allocate_lds(columns=False, whole=False, transposed=False):
    """LDS for column_maxima and share_columns, for tile_max, and for transposed codes; what is not used has 16 bytes.

    column_amax: one row per wave; column_inv: one per half of the workgroup, of which the first is read.
    """

    @fx.struct
    class Storage:
        column_amax: fx.Array[fx.Int32, WAVES * TILE if columns else 4, 16]
        column_inv: fx.Array[fx.Int32, 2 * TILE if columns else 4, 16]
        wave_amax: fx.Array[fx.Int32, WAVES if whole else 4, 16]
        codes: fx.Array[fx.Uint8, TILE * TILE if transposed else 16, 16]

    return fx.SharedAllocator().allocate(Storage).peek()


@dsl_loc_tracing
def _lds_store(lds, byte_offset, value):
    """A Vector of 4 or 16 bytes."""
    size = value.numel * value.dtype.width // 8
    raw = as_ir_value(value[0]) if value.numel == 1 else as_ir_value(value)
    _llvm.StoreOp(raw, _lds_address(lds, byte_offset), alignment=size)


@dsl_loc_tracing
def _atomic_max(buffer, value, offset):
    zero = as_ir_value(fx.Int32(0))
    _rocdl.raw_ptr_buffer_atomic_smax(
        fx.Int32.ir_type, as_ir_value(value), buffer.rsrc, as_ir_value(fx.Int32(offset)), zero
    )


def _words(values, dtype=fx.Int32):
    return fx.Vector.from_elements(list(values), dtype)


def _both(a, b):
    return fx.Boolean(a) & fx.Boolean(b)


def _outside(index, count):
    """0 where index < count, OUT_OF_RANGE elsewhere; by integers, because a lane mask per element is more than the scalar
    registers hold."""
    return (count - 1 - index) & OUT_OF_RANGE


def _ceil_div(value, size):
    return (value + (size - 1)) // size if isinstance(value, int) else (value + (size - 1)) >> (size.bit_length() - 1)


class Lane:
    """Which part of which tile this thread has, all Int32, and x there.

    row0, col0      first row of the wave, first column of the tile; rows, columns: how many of 32 and of 128 there are
    row(r)          row of the lane's r-th, relative to row0
    """

    def __init__(self, R, C):
        self.R, self.C = R, C
        self.thread = fx.Int32(fx.thread_idx.x)
        lane = self.thread % WAVE
        self.wave = uniform(self.thread // WAVE)
        self.j, self.i = lane % LANE_COLUMNS, lane // LANE_COLUMNS
        workgroup = fx.Uint32(fx.block_idx.x)
        tiles_n = fx.Uint32(_ceil_div(C, TILE))
        self.m_tile, self.n_tile = fx.Int32(workgroup // tiles_n), fx.Int32(workgroup % tiles_n)
        self.m0 = self.m_tile * TILE
        self.row0, self.col0 = self.m0 + self.wave * WAVE_ROWS, self.n_tile * TILE
        self.rows = minimum(R - self.row0, fx.Int32(WAVE_ROWS))  # not positive for a wave past the end
        self.columns = minimum(C - self.col0, fx.Int32(TILE))

    def row(self, r):
        return self.i * ROWS + r

    def row_inside(self, r):
        return self.row(r) < self.rows

    def span(self, pitch, row_bytes):
        """Bytes from the wave's first row to the end of its last."""
        size = fx.Int64(self.rows - 1) * pitch + fx.Int64(row_bytes)
        return (self.rows > 0).select(size, fx.Int64(0))

    @dsl_loc_tracing
    def load(self, x, dtype, whole_chunks):
        """[ROWS][COLUMNS] Float32 of x; zeros outside. whole_chunks: bases and rows of x are 16-byte aligned, C % 16 == 0."""
        size = dtype.width // 8
        pitch = fx.Int64(fx.get_scalar(x.stride[0])) * size
        buffer = Buffer(
            x, fx.Int64(self.row0) * pitch + fx.Int64(self.col0) * size, self.span(pitch, self.columns * size)
        )
        values = []
        for r in range(ROWS):
            base = self.row(r) * fx.Int32(pitch) + self.j * (COLUMNS * size)
            if whole_chunks:
                inside = _both(self.row_inside(r), self.j * COLUMNS < self.columns)
                row = buffer.load(select(inside, base, OUT_OF_RANGE), COLUMNS, dtype).to(fx.Float32)
                values.append([row[c] for c in range(COLUMNS)])
                continue
            base = select(self.row_inside(r), base, OUT_OF_RANGE)
            count = self.columns - self.j * COLUMNS
            offsets = [(base + c * size) | _outside(c, count) for c in range(COLUMNS)]
            values.append([buffer.load(offset, 1, dtype).to(fx.Float32)[0] for offset in offsets])
        return values

    # ---- codes -----------------------------------------------------------------------------------------------------

    def row_codes_buffer(self, out):
        pitch = fx.Int64(self.C)
        return Buffer(out, fx.Int64(self.row0) * pitch + fx.Int64(self.col0), self.span(pitch, self.columns))

    def store_row_codes(self, buffer, r, words, whole_chunks):
        """words: four Int32, the lane's 16 codes of its row r."""
        base = self.row(r) * self.C + self.j * COLUMNS
        _store_bytes(buffer, base, _words(words), self.row_inside(r), self.columns - self.j * COLUMNS, whole_chunks)

    def stage_transposed(self, lds, c, word):
        """word: the lane's four rows of its column c, to LDS."""
        _lds_store(lds, codes_address(self.j, c, self.wave * 2 + (self.i >> 2)) + ((self.i & 3) << 2), _words([word]))

    def store_transposed(self, lds, out, whole_chunks):
        """From LDS to out [C, R], after a barrier: each lane 16 rows of four columns."""
        chunk, j = self.thread % 8, self.thread % WAVE // 8
        rows = minimum(self.R - self.m0, fx.Int32(TILE))
        pitch = fx.Int64(self.R)
        size = fx.Int64(self.columns - 1) * pitch + fx.Int64(rows)
        buffer = Buffer(out, fx.Int64(self.col0) * pitch + fx.Int64(self.m0), size)
        for n in range(COLUMNS // WAVES):
            c = self.wave * (COLUMNS // WAVES) + n
            words = lds_read(lds, codes_address(j, c, chunk), 4, fx.Int32)
            column = j * COLUMNS + c
            base = column * self.R + chunk * 16
            _store_bytes(buffer, base, words, column < self.columns, rows - chunk * 16, whole_chunks)


def _store_bytes(buffer, offset, words, inside, count, whole):
    """The first `count` of 16 bytes, if inside; whole: count is at least 16, or not positive."""
    if whole:
        buffer.store(words, select(_both(inside, count > 0), offset, OUT_OF_RANGE))
        return
    elements = words.bitcast(fx.Uint8)
    offset = select(inside, offset, OUT_OF_RANGE)
    for e in range(16):
        buffer.store(fx.Vector.from_elements([elements[e]], fx.Uint8), (offset + e) | _outside(e, count))


# ---- maxima that span waves ----------------------------------------------------------------------------------------


def _max_of_all(values):
    result = values[0]
    for value in values[1:]:
        result = larger(result, value)
    return result


def tile_max(lane, lds, value, arch):
    """Maximum over the workgroup. One barrier."""
    value = lane_max(value, WAVE - 1, arch)
    _lds_store(lds.wave_amax.ptr, lane.wave * 4, _words([value]))
    wait_lds()
    barrier()
    waves = lds_read(lds.wave_amax.ptr, fx.Int32(0), WAVES, fx.Int32)
    return _max_of_all([waves[w] for w in range(WAVES)])


def column_maxima(lane, lds, values):
    """values: COLUMNS maxima over the wave's rows. Returns the maximum over the tile's rows of one column per thread (both
    halves of the workgroup have all columns), and that column. One barrier."""
    for c in range(0, COLUMNS, 4):
        at = lane.wave * (TILE * 4) + columns_address(lane.j, c)
        _lds_store(lds.column_amax.ptr, at, _words(values[c : c + 4]))
    wait_lds()
    barrier()
    word = lane.thread % TILE
    amax = _max_of_all([lds_read(lds.column_amax.ptr, word * 4 + w * (TILE * 4), 1, fx.Int32)[0] for w in range(WAVES)])
    return amax, (word >> 2) % LANE_COLUMNS * COLUMNS + (word >> 5) * 4 + word % 4


def share_columns(lane, lds, inv):
    """inv: Float32 of the column that column_maxima gave this thread. Returns the COLUMNS ones of the lane. One barrier."""
    _lds_store(lds.column_inv.ptr, lane.thread * 4, _words([inv.bitcast(fx.Int32)]))
    wait_lds()
    barrier()
    bits = []
    for c in range(0, COLUMNS, 4):
        four = lds_read(lds.column_inv.ptr, columns_address(lane.j, c), 4, fx.Int32)
        bits += [four[e] for e in range(4)]
    return [fx.Int32(b).bitcast(fx.Float32) for b in bits]


# ---- amax ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AmaxSpec:
    """rows, columns: an amax for each; neither: one for all. Names of dtypes are torch's."""

    arch: str
    x_dtype: str
    rows: bool
    columns: bool
    whole_chunks: bool


def build_amax(spec):
    """Launcher (x, row_amax, column_amax, R, C, stream): max |x| as bits (convert.magnitude) into Int32 [R], [C]; with
    neither, into row_amax [1]. They must hold zeros before."""
    dtype = DTYPES[spec.x_dtype]

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def quantize_amax(x: fx.Tensor, row_amax: fx.Tensor, column_amax: fx.Tensor, R: fx.Int32, C: fx.Int32):
        _amax_tile(spec, dtype, x, row_amax, column_amax, R, C)

    @flyc.jit
    def launch_amax(
        x: fx.Tensor, row_amax: fx.Tensor, column_amax: fx.Tensor, R: fx.Int32, C: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):  # fmt: skip
        tiles = _ceil_div(R, TILE) * _ceil_div(C, TILE)
        quantize_amax(x, row_amax, column_amax, R, C).launch(grid=(tiles, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)

    return launch_amax


def _amax_tile(spec, dtype, x, row_amax, column_amax, R, C):
    lane = Lane(R, C)
    lds = allocate_lds(columns=spec.columns, whole=not (spec.rows or spec.columns))
    bits = [[magnitude(v) for v in row] for row in lane.load(x, dtype, spec.whole_chunks)]
    if not (spec.rows or spec.columns):
        amax = tile_max(lane, lds, _max_of_all([b for row in bits for b in row]), spec.arch)
        buffer = Buffer(row_amax, fx.Int64(0), fx.Int64(4))
        _atomic_max(buffer, amax, select(lane.thread == 0, 0, OUT_OF_RANGE))
        return
    if spec.rows:
        maxima = [lane_max(_max_of_all(row), ALL_COLUMNS, spec.arch) for row in bits]
        buffer = Buffer(row_amax, fx.Int64(lane.row0) * 4, lane.span(fx.Int64(4), 4))
        r = lane.j % ROWS
        at = select(_both(lane.j < ROWS, lane.row_inside(r)), lane.row(r) * 4, OUT_OF_RANGE)
        _atomic_max(buffer, _pick(maxima, r), at)
    if spec.columns:
        maxima = [lane_max(_max_of_all([row[c] for row in bits]), ALL_ROWS, spec.arch) for c in range(COLUMNS)]
        amax, column = column_maxima(lane, lds, maxima)
        buffer = Buffer(column_amax, fx.Int64(lane.col0) * 4, fx.Int64(lane.columns) * 4)
        at = select(_both(lane.thread < TILE, column < lane.columns), column * 4, OUT_OF_RANGE)
        _atomic_max(buffer, amax, at)


def _pick(values, index):
    """values[index], index an Int32."""
    result = values[0]
    for i, value in enumerate(values[1:], 1):
        result = (index == i).select(value, result)
    return result


# ---- quantization --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizeSpec:
    """Everything that is fixed when a kernel is compiled. Names of dtypes are torch's.

    code           name of the codes' format
    scaling        FORMATS' word
    given_scale    "tensor": the scale is an argument and amax is written; otherwise it is made from an amax argument
    whole_chunks   x and the codes: rows and bases 16-byte aligned, C % 16 == 0
    whole_columns  transposed codes: R % 16 == 0
    """

    arch: str
    x_dtype: str
    code: str
    scaling: str
    rule: str
    rowwise: bool
    columnwise: bool
    transposed: bool
    given_scale: bool
    whole_chunks: bool
    whole_columns: bool


# In the launchers' order. What a specialisation does not use is a placeholder.
TENSORS = ("x", "data", "scale", "columnwise_data", "columnwise_scale", "row_amax", "column_amax")


def build_quantize(spec):
    """Launcher (*TENSORS, R, C, stream). row_amax, column_amax: for "row" what build_amax left; for "tensor" row_amax [1] is
    read, or, where the scale is given (in `scale`), written as build_amax writes it: zero before."""

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def quantize_cdna(
        x: fx.Tensor, data: fx.Tensor, scale: fx.Tensor, columnwise_data: fx.Tensor, columnwise_scale: fx.Tensor,
        row_amax: fx.Tensor, column_amax: fx.Tensor, R: fx.Int32, C: fx.Int32,
    ):  # fmt: skip
        _QuantizeTile(spec, R, C).run(x, data, scale, columnwise_data, columnwise_scale, row_amax, column_amax)

    @flyc.jit
    def launch_quantize(
        x: fx.Tensor, data: fx.Tensor, scale: fx.Tensor, columnwise_data: fx.Tensor, columnwise_scale: fx.Tensor,
        row_amax: fx.Tensor, column_amax: fx.Tensor, R: fx.Int32, C: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):  # fmt: skip
        tiles = _ceil_div(R, TILE) * _ceil_div(C, TILE)
        quantize_cdna(
            x, data, scale, columnwise_data, columnwise_scale, row_amax, column_amax, R, C
        ).launch(grid=(tiles, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)  # fmt: skip

    return launch_quantize


class _QuantizeTile:
    """One workgroup's work. Each scaling gives the inverse scales of the lane's rows and columns; the codes are common."""

    def __init__(self, spec, R, C):
        self.spec = spec
        self.fmt = formats.get(spec.code)
        self.codes = Codes(self.fmt, spec.arch)
        self.lane = Lane(R, C)
        self.lds = allocate_lds(
            columns=spec.scaling == "1x128" and spec.columnwise,
            whole=spec.scaling == "128x128" or spec.given_scale,
            transposed=spec.columnwise and spec.transposed,
        )

    def run(self, x, data, scale, columnwise_data, columnwise_scale, row_amax, column_amax):
        spec, lane = self.spec, self.lane
        self.x = lane.load(x, DTYPES[spec.x_dtype], spec.whole_chunks)
        self.scales = (scale, columnwise_scale)
        self.amaxes = (row_amax, column_amax)
        scaling = {
            "1x32": self._mx, "1x128": self._block, "128x128": self._square, "row": self._rows, "tensor": self._tensor,
        }[spec.scaling]  # fmt: skip
        # (inverse scales, finite or None) of the lane's rows and of its columns
        by_row, by_column = scaling()
        shared = spec.scaling in ("tensor", "128x128")  # one code per element, whatever the direction
        if spec.rowwise or shared:
            words = [self._row(r, [by_row[r][0]] * COLUMNS, [by_row[r][1]] * (COLUMNS // 4)) for r in range(ROWS)]
        if spec.rowwise:
            self._store_rows(data, words)
        if not spec.columnwise:
            return
        if not spec.transposed:
            finite = [by_column[c][1] for c in range(COLUMNS)]
            masks = [self.codes.masks(finite[c : c + 4]) for c in range(0, COLUMNS, 4)]
            inverses = [inv for inv, _ in by_column]
            self._store_rows(columnwise_data, [self._row(r, inverses, masks) for r in range(ROWS)])
            return
        for c in range(0, COLUMNS, 4):
            if shared:
                columns = transpose_bytes([row[c // 4] for row in words], 4)
            else:
                columns = [
                    self._pack([row[c + e] * by_column[c + e][0] for row in self.x], by_column[c + e][1])
                    for e in range(4)
                ]
            for e in range(4):
                lane.stage_transposed(self.lds.codes.ptr, c + e, columns[e])
        wait_lds()
        barrier()
        lane.store_transposed(self.lds.codes.ptr, columnwise_data, spec.whole_columns)

    def _pack(self, values, finite):
        if finite is None:
            return self.codes.pack(values)
        return self.codes.pack(values, saturate=self.spec.rule == "floor", nan=False, finite=finite)

    def _row(self, r, inv, finite):
        """Four words of codes: the lane's row r. inv: of each column; finite: of each word (Codes.pack)."""
        return [
            self._pack([self.x[r][c + e] * inv[c + e] for e in range(4)], finite[c // 4]) for c in range(0, COLUMNS, 4)
        ]

    def _store_rows(self, out, words):
        buffer = self.lane.row_codes_buffer(out)
        for r in range(ROWS):
            self.lane.store_row_codes(buffer, r, words[r], self.spec.whole_chunks)

    def _row_maxima(self, mask):
        return [lane_max(_max_of_all([magnitude(v) for v in row]), mask, self.spec.arch) for row in self.x]

    def _column_maxima(self):
        return [
            lane_max(_max_of_all([magnitude(row[c]) for row in self.x]), ALL_ROWS, self.spec.arch)
            for c in range(COLUMNS)
        ]

    def _scale(self, amax):
        return BlockScale.of(amax, self.fmt, self.spec.rule)

    # ---- 1 x 32, E8M0 ----------------------------------------------------------------------------------------------

    def _mx(self):
        by_row = by_column = None
        if self.spec.rowwise:
            blocks = [self._scale(amax) for amax in self._row_maxima(1)]
            self._store_mx_rows([block.byte for block in blocks])
            by_row = [(block.inv, block.finite) for block in blocks]
        if self.spec.columnwise:
            blocks = [self._scale(amax) for amax in self._column_maxima()]
            self._store_mx_columns([block.byte for block in blocks])
            by_column = [(block.inv, block.finite) for block in blocks]
        return by_row, by_column

    def _store_mx_rows(self, bytes_):
        """scale [R, ceil(C / 32)]; two lanes share a block, the first stores rows 0 and 1, the other one 2 and 3."""
        lane = self.lane
        pitch = _ceil_div(lane.C, 32)
        blocks = _ceil_div(lane.columns, 32)
        buffer = Buffer(
            self.scales[0], fx.Int64(lane.row0) * fx.Int64(pitch) + fx.Int64(lane.n_tile * 4),
            lane.span(fx.Int64(pitch), blocks),
        )  # fmt: skip
        block, second = lane.j >> 1, lane.j & 1
        for e in range(2):
            byte = (second == 0).select(bytes_[e], bytes_[2 + e])
            r = second * 2 + e
            at = select(_both(lane.row_inside(r), block < blocks), lane.row(r) * pitch + block, OUT_OF_RANGE)
            buffer.store(_words([fx.Uint8(byte)], fx.Uint8), at)

    def _store_mx_columns(self, bytes_):
        """scale [ceil(R / 32), C], or transposed."""
        lane = self.lane
        packed = []
        for c in range(0, COLUMNS, 4):
            word = bytes_[c]
            for e in range(1, 4):
                word = word | (bytes_[c + e] << 8 * e)
            packed.append(word)
        block_row = lane.m_tile * WAVES + lane.wave
        there = lane.rows > 0
        if not self.spec.transposed:
            size = there.select(fx.Int64(lane.columns), fx.Int64(0))
            buffer = Buffer(self.scales[1], fx.Int64(block_row) * fx.Int64(lane.C) + fx.Int64(lane.col0), size)
            count = lane.columns - lane.j * COLUMNS
            _store_bytes(buffer, lane.j * COLUMNS, _words(packed), lane.i == 0, count, self.spec.whole_chunks)
            return
        pitch = _ceil_div(lane.R, 32)
        size = fx.Int64(lane.columns - 1) * fx.Int64(pitch) + fx.Int64(1)
        buffer = Buffer(
            self.scales[1], fx.Int64(lane.col0) * fx.Int64(pitch) + fx.Int64(block_row),
            there.select(size, fx.Int64(0)),
        )  # fmt: skip
        # The eight lanes of a column group have the same 16 bytes: each stores two of them.
        pair = _pick(packed, lane.i >> 1) >> ((lane.i & 1) * 16)
        for e in range(2):
            column = lane.j * COLUMNS + lane.i * 2 + e
            byte = _words([fx.Uint8(pair >> 8 * e)], fx.Uint8)
            buffer.store(byte, select(column < lane.columns, column * pitch, OUT_OF_RANGE))

    # ---- 1 x 128 ---------------------------------------------------------------------------------------------------

    def _block(self):
        lane = self.lane
        by_row = by_column = None
        if self.spec.rowwise:
            blocks = [self._scale(amax) for amax in self._row_maxima(ALL_COLUMNS)]
            pitch = fx.Int64(_ceil_div(lane.C, TILE)) * 4
            buffer = Buffer(
                self.scales[0], fx.Int64(lane.row0) * pitch + fx.Int64(lane.n_tile) * 4, lane.span(pitch, fx.Int32(4))
            )
            r = lane.j % ROWS
            at = select(_both(lane.j < ROWS, lane.row_inside(r)), lane.row(r) * fx.Int32(pitch), OUT_OF_RANGE)
            buffer.store(_words([_pick([block.scale for block in blocks], r)], fx.Float32), at)
            by_row = [(block.inv, block.finite) for block in blocks]
        if self.spec.columnwise:
            amax, column = column_maxima(lane, self.lds, self._column_maxima())
            block = self._scale(amax)
            self._store_column_scale(block.scale, column, lane.m_tile, _ceil_div(lane.R, TILE))
            by_column = self._shared(block.inv)
        return by_row, by_column

    def _shared(self, inv):
        """(inverse, finite) of the lane's columns from one column per thread."""
        inverses = share_columns(self.lane, self.lds, inv)
        return [(v, v.bitcast(fx.Int32) < INF_BITS) for v in inverses]

    def _store_column_scale(self, scale, column, block_row, block_rows):
        """Float32 of one column per thread of the first half: [block_rows, C], or transposed."""
        lane = self.lane
        if self.spec.transposed:
            pitch, size = fx.Int64(block_rows) * 4, fx.Int64(lane.columns - 1) * fx.Int64(block_rows) * 4 + 4
            start = fx.Int64(lane.col0) * pitch + fx.Int64(block_row) * 4
            at = column * (block_rows * 4)
        else:
            size = fx.Int64(lane.columns) * 4
            start = (fx.Int64(block_row) * fx.Int64(lane.C) + fx.Int64(lane.col0)) * 4
            at = column * 4
        inside = _both(lane.thread < TILE, column < lane.columns)
        buffer = Buffer(self.scales[1], start, size)
        buffer.store(_words([scale], fx.Float32), select(inside, at, OUT_OF_RANGE))

    # ---- 128 x 128 -------------------------------------------------------------------------------------------------

    def _square(self):
        lane = self.lane
        block = self._scale(tile_max(lane, self.lds, self._lane_maximum(), self.spec.arch))
        value = _words([block.scale], fx.Float32)
        at = select(lane.thread == 0, 0, OUT_OF_RANGE)
        if self.spec.rowwise:
            index = fx.Int64(lane.m_tile) * fx.Int64(_ceil_div(lane.C, TILE)) + fx.Int64(lane.n_tile)
            Buffer(self.scales[0], index * 4, fx.Int64(4)).store(value, at)
        if self.spec.columnwise:
            index = fx.Int64(lane.n_tile) * fx.Int64(_ceil_div(lane.R, TILE)) + fx.Int64(lane.m_tile)
            Buffer(self.scales[1], index * 4, fx.Int64(4)).store(value, at)
        return self._same(block)

    def _same(self, block):
        return [(block.inv, block.finite)] * ROWS, [(block.inv, block.finite)] * COLUMNS

    def _lane_maximum(self):
        return _max_of_all([magnitude(v) for row in self.x for v in row])

    # ---- scales that span tiles ------------------------------------------------------------------------------------

    def _rows(self):
        """Scales from the amaxes of build_amax; the first tile of each row (column) stores them."""
        lane = self.lane
        by_row = by_column = None
        if self.spec.rowwise:
            amaxes = Buffer(self.amaxes[0], fx.Int64(lane.row0) * 4, lane.span(fx.Int64(4), fx.Int32(4)))
            blocks = [self._scale(amaxes.load(lane.row(r) * 4, 1, fx.Int32)[0]) for r in range(ROWS)]
            scales = Buffer(self.scales[0], fx.Int64(lane.row0) * 4, lane.span(fx.Int64(4), fx.Int32(4)))
            r = lane.j % ROWS
            first = _both(lane.n_tile == 0, lane.j < ROWS)
            at = select(_both(first, lane.row_inside(r)), lane.row(r) * 4, OUT_OF_RANGE)
            scales.store(_words([_pick([block.scale for block in blocks], r)], fx.Float32), at)
            by_row = [(block.inv, block.finite) for block in blocks]
        if self.spec.columnwise:
            span = fx.Int64(lane.columns) * 4
            amaxes = Buffer(self.amaxes[1], fx.Int64(lane.col0) * 4, span)
            column = lane.thread % TILE
            block = self._scale(amaxes.load(column * 4, 1, fx.Int32)[0])
            scales = Buffer(self.scales[1], fx.Int64(lane.col0) * 4, span)
            first = _both(lane.m_tile == 0, lane.thread < TILE)
            at = select(_both(first, column < lane.columns), column * 4, OUT_OF_RANGE)
            scales.store(_words([block.scale], fx.Float32), at)
            by_column = self._columns_of(amaxes)
        return by_row, by_column

    def _columns_of(self, amaxes):
        """(inverse, finite) of the lane's columns, from Int32 maxima in memory."""
        blocks = [self._scale(amaxes.load((self.lane.j * COLUMNS + c) * 4, 1, fx.Int32)[0]) for c in range(COLUMNS)]
        return [(block.inv, block.finite) for block in blocks]

    def _tensor(self):
        lane = self.lane
        first = select(_both(lane.m_tile == 0, _both(lane.n_tile == 0, lane.thread == 0)), 0, OUT_OF_RANGE)
        scalar = Buffer(self.amaxes[0], fx.Int64(0), fx.Int64(4))
        scale = Buffer(self.scales[0], fx.Int64(0), fx.Int64(4))
        if self.spec.given_scale:
            block = BlockScale.given(scale.load(fx.Int32(0), 1, fx.Float32)[0])
            amax = tile_max(lane, self.lds, self._lane_maximum(), self.spec.arch)
            _atomic_max(scalar, amax, select(lane.thread == 0, 0, OUT_OF_RANGE))
            return self._same(block)
        block = self._scale(scalar.load(fx.Int32(0), 1, fx.Int32)[0])
        scale.store(_words([block.scale], fx.Float32), first)
        return self._same(block)
