"""Quantization for Hopper: codes and scales of x [R, C], as quantize/reference.py defines them, from one reading of x.

x       float32, bfloat16 or float16, C contiguous, any row stride
codes   rowwise [R, C]; columnwise [R, C], or transposed [C, R]; 8 bits, or e2m1 in pairs
scales  as formats.scaling.scale_shape

A CTA of 256 threads has a tile of 128 x 128. A warp has 32 rows of 64 columns of it, a thread 8 x 8: lane l rows 8 * (l / 8)
and columns 8 * (l % 8), so that each of its loads takes 128 bytes of each of 4 rows (float32: 256), and a thread's codes of a
row, or of a column, are 8 bytes. A transposed tile needs no shared memory: the 4 lanes that share columns write 32 bytes.

1 load 8 rows; largest magnitude of each row's 32 columns and each column's 32 rows, within the warp, to shared memory
2 barrier; one thread per row and one per column of the tile makes its scales, stores them, and leaves their inverses
3 barrier; codes

Magnitudes are compared as integers, where NaN is larger than Inf. One scale for all, or one per row, needs amax first:
`amax` of the same class (an atomic maximum), which also goes with a scale that is given. The pass that follows takes the
tiles in the opposite order, so that it begins with what the first one left in L2.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import access
from fourwave.blocks.cutedsl.convert import Codes, Scales, float_of_half, product, reciprocal

TILE = 128
THREADS = 256
PART = 32  # columns of a row, or rows of a column, whose magnitudes are compared within a warp
PARTS = TILE // PART
LINE = 8  # rows and columns of a thread
ROWS, COLUMNS = 0, 1  # rows' amax and scales in shared memory, and columns'


@dataclass(frozen=True)
class Quantize:
    """One specialisation: __call__ is the launcher, kernel the device code.

    x_dtype  "float32", "bfloat16" or "float16"
    codes, scales  of a row's and a column's blocks; None: amax only
    scaling  "tensor", "row", "1x128", "128x128" or "1x32"
    rowwise, columnwise, transposed  which codes (amax: of rows, of columns) are written
    given    the scale is an input, and amax is written (scaling "tensor")
    whole_chunks   x's rows and their starts are multiples of 16 bytes and C is one of 8: else elements are taken one by one
    whole_rows     R is a multiple of 8: else transposed codes are stored one by one
    """

    x_dtype: str
    codes: Codes | None
    scales: Scales | None
    scaling: str
    rowwise: bool
    columnwise: bool
    transposed: bool
    given: bool
    whole_chunks: bool
    whole_rows: bool

    @property
    def x_bytes(self) -> int:
        return 4 if self.x_dtype == "float32" else 2

    @property
    def one_scale(self) -> bool:
        """Of the whole tile: rows and columns share it."""
        return self.scaling in ("tensor", "128x128")

    @cute.jit
    def __call__(
        self, x: Int64, x_stride: Int64, data: Int64, scale: Int64, columnwise_data: Int64, columnwise_scale: Int64,
        row_amax: Int64, column_amax: Int64, R: Int32, C: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Addresses; x_stride in bytes. amax: bits of float32, of the tensor (row_amax) or of each row and column; read for
        "row" and for "tensor" without a given scale, which would be at `scale`."""
        self.kernel(
            x, x_stride, data, scale, columnwise_data, columnwise_scale, row_amax, column_amax, R, C
        ).launch(
            grid=((R + TILE - 1) // TILE * ((C + TILE - 1) // TILE), 1, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x: Int64, x_stride: Int64, data: Int64, scale: Int64, columnwise_data: Int64, columnwise_scale: Int64,
        row_amax: Int64, column_amax: Int64, R: Int32, C: Int32,
    ):  # fmt: skip
        # A product that follows may be set up meanwhile; it waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()

        @cute.struct
        class Storage:
            amax: cute.struct.Align[cute.struct.MemRange[Int32, 2 * PARTS * TILE], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Int32, 2 * PARTS * TILE], 16]
            warps: cute.struct.MemRange[Int32, THREADS // 32]

        storage = SmemAllocator().allocate(Storage)
        self.body(
            storage.amax.data_ptr(), storage.inverse.data_ptr(), storage.warps.data_ptr(), x, x_stride, data, scale,
            columnwise_data, columnwise_scale, row_amax, column_amax, R, C,
        )  # fmt: skip

    # -- Python that runs while the kernel is traced: every `if` is decided then

    def body(
        self, amax, inverse, warps, x, x_stride, data, scale, columnwise_data, columnwise_scale, row_amax, column_amax, R, C
    ):  # fmt: skip
        amax_is_known = self.codes is not None and not self.given and self.scaling in ("tensor", "row")
        place = Place(R, C, backwards=amax_is_known)
        words = self.load(x, x_stride, place, R, C)
        if not amax_is_known:
            self.write_amax(words, amax, place)
            cute.arch.barrier()
        if self.codes is None:
            self.merge_amax(amax, warps, row_amax, column_amax, place, R, C)
            return
        if self.one_scale:
            inv = self.one_inverse(amax, warps, scale, columnwise_scale, row_amax, place, R, C)
            row_inverses = column_inverses = [inv] * LINE
        else:
            self.line_inverses(amax, inverse, scale, columnwise_scale, row_amax, column_amax, place, R, C)
            cute.arch.barrier()
            row_inverses, column_inverses = (self.inverses_of(inverse, kind, place) for kind in (ROWS, COLUMNS))
        self.store(words, data, columnwise_data, row_inverses, column_inverses, place, R, C)

    def load(self, x, x_stride, place, R, C):
        """The thread's 8 x 8 elements, [row][word]: Int32 of one float32 or of two 16-bit elements; zeros past the matrix."""
        start = x + Int64(place.row) * x_stride + Int64(place.column) * self.x_bytes
        return [self.load_line(place.row + i, start + x_stride * i, place, R, C) for i in range(LINE)]

    def load_line(self, row, address, place, R, C):
        """8 elements from `address` on, of row `row` of the result."""
        if self.whole_chunks:
            limit = access.where_less(place.column, C, R, Int32(0))
            return [
                word
                for chunk in range(LINE * self.x_bytes // 16)
                for word in access.load_words(address + 16 * chunk, 4, row, limit)
            ]
        elements = []
        for j in range(LINE):
            limit = access.where_less(place.column + j, C, R, Int32(0))
            at = address + j * self.x_bytes
            if self.x_bytes == 4:
                elements += access.load_words(at, 1, row, limit)
            else:
                elements.append(access.load_half(at, row, limit))
        if self.x_bytes == 2:
            elements = [elements[j] | (elements[j + 1] << 16) for j in range(0, LINE, 2)]
        return elements

    def write_amax(self, words, amax, place):
        """amax[ROWS][part][row] and amax[COLUMNS][part][column] of the warp's 32 rows and twice 32 columns, as float32 bits.
        The lanes that have the same one write it together."""
        if self.x_bytes == 4:
            magnitude = [[word & 0x7FFFFFFF for word in line] for line in words]
            larger, rows = _larger, [_reduce(line, _larger) for line in magnitude]
            columns = [_reduce([line[j] for line in magnitude], _larger) for j in range(LINE)]
        else:
            magnitude = [[word & 0x7FFF7FFF for word in line] for line in words]
            larger, rows = access.larger_halves, []
            pairs = [_reduce(line, larger) for line in magnitude]
            for a, b in zip(pairs[::2], pairs[1::2], strict=True):
                # two rows in one word
                rows.append(larger(access.permute_bytes(a, b, 0x5410), access.permute_bytes(a, b, 0x7632)))
            columns = [_reduce([line[j] for line in magnitude], larger) for j in range(LINE // 2)]
        if self.rowwise or self.one_scale:
            for distance in (1, 2):
                rows = [larger(value, access.from_lane(value, distance)) for value in rows]
            at = (ROWS * PARTS + place.column_part) * TILE + place.tile_row
            _write8(amax + at, self._floats(rows))
        if self.columnwise and not self.one_scale:
            for distance in (8, 16):
                columns = [larger(value, access.from_lane(value, distance)) for value in columns]
            at = (COLUMNS * PARTS + place.row_part) * TILE + place.tile_column
            _write8(amax + at, self._floats(columns))

    def _floats(self, values):
        if self.x_bytes == 4:
            return values
        return [float_of_half(v, high, self.x_dtype == "float16") for v in values for high in (False, True)]

    def merge_amax(self, amax, warps, row_amax, column_amax, place, R, C):
        """Into memory: the tile's amax, or each row's and column's."""
        if self.scaling == "tensor":
            largest = self.tile_amax(amax, warps, place)
            access.largest_into(row_amax, largest, place.thread, Int32(1))
            return
        mine = Line(self, place, R, C)
        largest = _reduce(mine.parts(amax), _larger)
        access.largest_into(row_amax + Int64(mine.row) * 4, largest, mine.row, mine.row_limit)
        access.largest_into(column_amax + Int64(mine.column) * 4, largest, mine.column, mine.column_limit)

    def tile_amax(self, amax, warps, place):
        """Of the whole tile, in every thread."""
        line = place.thread % TILE
        largest = _reduce([_read(amax + (part * TILE + line), 1)[0] for part in range(PARTS)], _larger)
        for distance in (1, 2, 4, 8, 16):
            largest = _larger(largest, access.from_lane(largest, distance))
        _write(warps + place.warp, [largest])
        cute.arch.barrier()
        return _reduce([_read(warps + i, 1)[0] for i in range(TILE // 32)], _larger)

    def one_inverse(self, amax, warps, scale, columnwise_scale, row_amax, place, R, C):
        """1 / scale of a tile with one scale, which is stored where it is made."""
        everywhere, first = Int32(0), place.thread
        if self.given:
            largest = self.tile_amax(amax, warps, place)
            access.largest_into(row_amax, largest, place.thread, Int32(1))
            return reciprocal(access.load_words(scale, 1, everywhere, Int32(1))[0])
        at = columnwise_at = Int64(0)
        if self.scaling == "tensor":
            largest = access.load_words(row_amax, 1, everywhere, Int32(1))[0]
            first = place.thread + place.tile  # of thread 0 of tile 0 only is it 0
        else:
            largest = self.tile_amax(amax, warps, place)
            at = Int64(place.tile_m) * ((C + TILE - 1) // TILE) + place.tile_n
            columnwise_at = Int64(place.tile_n) * ((R + TILE - 1) // TILE) + place.tile_m
        assert self.scales is not None
        stored, inv = self.scales.of(largest)
        if self.rowwise:
            access.store_words(scale + at * 4, [stored], first, Int32(1))
        if self.columnwise:  # stored transposed: else one copy serves both directions
            access.store_words(columnwise_scale + columnwise_at * 4, [stored], first, Int32(1))
        return inv

    def line_inverses(self, amax, inverse, scale, columnwise_scale, row_amax, column_amax, place, R, C):
        """Thread t stores the scales of row or column t % 128 of the tile and writes their inverses, as amax lies."""
        assert self.scales is not None
        mine = Line(self, place, R, C)
        if self.scaling == "row":
            row = access.load_words(row_amax + Int64(mine.row) * 4, 1, mine.row, mine.is_row)[0]
            column = access.load_words(column_amax + Int64(mine.column) * 4, 1, mine.column, mine.is_column)[0]
            parts = [row | column]  # one of them is off
        else:
            parts = mine.parts(amax)
            if self.scaling == "1x128":
                parts = [_reduce(parts, _larger)]
        made = [self.scales.of(part) for part in parts]
        for i, (_stored, inv) in enumerate(made):
            _write(inverse + ((mine.kind * PARTS + i) * TILE + place.thread % TILE), [inv])
        stored = [s for s, _inv in made]
        if self.rowwise:
            blocks = Int32(1) if self.scaling == "row" else (C + (TILE // len(parts) - 1)) // (TILE // len(parts))
            self._store_scales(scale, stored, mine.row, mine.row_limit, blocks, place.tile_n)
        if self.columnwise and (self.transposed or self.scaling == "row"):
            blocks = Int32(1) if self.scaling == "row" else (R + (TILE // len(parts) - 1)) // (TILE // len(parts))
            self._store_scales(columnwise_scale, stored, mine.column, mine.column_limit, blocks, place.tile_m)
        elif self.columnwise:
            for i, value in enumerate(stored):
                block = place.tile_m * len(parts) + i
                at = Int64(block) * C + mine.column
                if self.scaling == "1x32":
                    limit = access.where_less(block * PART, R, mine.column_limit, Int32(0))
                    access.store_byte(columnwise_scale + at, value, mine.column, limit)
                else:
                    access.store_words(columnwise_scale + at * 4, [value], mine.column, mine.column_limit)

    def _store_scales(self, scale, stored, line, limit, blocks, tile):
        """Scales [line, blocks] of one line's part of the tile: one float32, or 4 bytes, together where rows of 4 allow it."""
        if self.scaling == "row":
            access.store_words(scale + Int64(line) * 4, stored, line, limit)
            return
        if len(stored) == 1:
            access.store_words(scale + (Int64(line) * blocks + tile) * 4, stored, line, limit)
            return
        first = tile * PARTS
        address = scale + Int64(line) * blocks + first
        word = stored[0] | (stored[1] << 8) | (stored[2] << 16) | (stored[3] << 24)
        uneven = blocks % PARTS
        access.store_words(address, [word], line, access.where_less(uneven, Int32(1), limit, Int32(0)))
        for i, value in enumerate(stored):
            # off where uneven is 0 and past the last block
            inside = access.where_less(first + i, blocks, limit, Int32(0))
            access.store_byte(address + i, value, line, access.where_less(Int32(0), uneven, inside, Int32(0)))

    def inverses_of(self, inverse, kind, place):
        """Of the thread's 8 rows or columns."""
        if not (self.rowwise if kind == ROWS else self.columnwise):
            return None
        part = Int32(0)
        if self.scaling == "1x32":
            part = place.column_part if kind == ROWS else place.row_part
        line = place.tile_row if kind == ROWS else place.tile_column
        return _read(inverse + ((kind * PARTS + part) * TILE + line), LINE)

    def store(self, words, data, columnwise_data, row_inverses, column_inverses, place, R, C):
        """Codes of the thread's 8 x 8 elements."""
        assert self.codes is not None
        values = []
        for line in words:
            values.append(line if self.x_bytes == 4 else self._floats(line))
        if self.rowwise:
            for i in range(LINE):
                codes = self.codes.pack8([product(v, row_inverses[i]) for v in values[i]])
                self._store_line(data, codes, place.row + i, R, place.column, C, self.whole_chunks)
        if self.columnwise and self.transposed:
            for j in range(LINE):
                codes = self.codes.pack8([product(line[j], column_inverses[j]) for line in values])
                self._store_line(columnwise_data, codes, place.column + j, C, place.row, R, self.whole_rows)
        elif self.columnwise:
            for i in range(LINE):
                codes = self.codes.pack8([product(v, inv) for v, inv in zip(values[i], column_inverses, strict=True)])
                self._store_line(columnwise_data, codes, place.row + i, R, place.column, C, self.whole_chunks)

    def _store_line(self, data, codes, line, lines, first, length, whole):
        """8 codes from element `first` of a line of `length` elements."""
        assert self.codes is not None
        per_byte = 8 // self.codes.bits
        address = data + Int64(line) * (length // per_byte) + first // per_byte
        if whole:
            access.store_words(address, codes, line, access.where_less(first, length, lines, Int32(0)))
            return
        for i in range(LINE // per_byte):
            limit = access.where_less(first + i * per_byte, length, lines, Int32(0))
            access.store_byte(address + i, codes[i // 4] >> (8 * (i % 4)), line, limit)


class Place:
    """Where a thread is: tile, and the first of its 8 rows and 8 columns, in the tile and in the matrix."""

    def __init__(self, R, C, backwards):
        tiles_n = (C + TILE - 1) // TILE
        tile = cute.arch.block_idx()[0]
        self.tile = cute.arch.grid_dim()[0] - 1 - tile if backwards else tile
        self.tile_m = self.tile // tiles_n
        self.tile_n = self.tile - self.tile_m * tiles_n
        self.thread = cute.arch.thread_idx()[0]
        self.warp, lane = self.thread // 32, self.thread % 32
        self.row_part = self.warp // 2
        self.tile_row = self.row_part * PART + lane // 8 * LINE
        self.tile_column = self.warp % 2 * (TILE // 2) + lane % 8 * LINE
        self.column_part = self.tile_column // PART
        self.row = self.tile_m * TILE + self.tile_row
        self.column = self.tile_n * TILE + self.tile_column


class Line:
    """The row or the column of the tile whose scales a thread makes: threads of the first half have rows, the others columns.
    Where only one kind is wanted, both halves have the same and the second stores nothing.

    is_row, is_column  the end of the matrix, 0 where the thread's line is of the other kind
    row_limit, column_limit  the same, 0 where the thread stores nothing, too
    """

    def __init__(self, kernel, place, R, C):
        half, line, none = place.thread // TILE, place.thread % TILE, Int32(0)
        both = kernel.rowwise and kernel.columnwise
        self.kind = half if both else Int32(ROWS if kernel.rowwise else COLUMNS)
        self.row, self.column = place.tile_m * TILE + line, place.tile_n * TILE + line
        self.is_row = access.where_less(self.kind, Int32(1), R, none)
        self.is_column = access.where_less(self.kind, Int32(1), none, C)
        self.row_limit = self.is_row if both else access.where_less(half, Int32(1), self.is_row, none)
        self.column_limit = self.is_column if both else access.where_less(half, Int32(1), self.is_column, none)
        self._start = self.kind * (PARTS * TILE) + line

    def parts(self, amax):
        return [_read(amax + (self._start + part * TILE), 1)[0] for part in range(PARTS)]


def _larger(a, b):
    return access.where_less(a, b, b, a)


def _reduce(values, larger):
    while len(values) > 1:
        values = [larger(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _write(pointer, values):
    cute.make_tensor(pointer, cute.make_layout(len(values)))[0] = values[0]


def _write8(pointer, values):
    """16 bytes at a time."""
    for half in range(2):
        target = cute.make_tensor((pointer + 4 * half).align(16), cute.make_layout(4))
        source = cute.make_rmem_tensor(4, Int32)
        for i in range(4):
            source[i] = values[4 * half + i]
        cute.autovec_copy(source, target)


def _read(pointer, count):
    if count == 1:
        return [cute.make_tensor(pointer, cute.make_layout(1))[0]]
    values = []
    for start in range(0, count, 4):
        source = cute.make_tensor((pointer + start).align(16), cute.make_layout(4))
        target = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(source, target)
        values += [target[i] for i in range(4)]
    return values
