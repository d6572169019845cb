"""FlyDSL kernel that makes MXFP4 of x[R, C]: rowwise, columnwise or both from one reading. gfx942, gfx950 and gfx1250.

x        float32, bfloat16 or float16, inner stride 1
codes    packed e2m1 as QuantizeTensors: [R, C / 2], natural columnwise codes too, transposed ones [C, R / 2]
scales   as QuantizeTensors, E8M0 bytes
seed     two words, for stochastic rounding; the signs of the Hadamard transforms are run-time integers

A workgroup of 256 threads takes a tile of 32 x 256, which it brings to LDS as float32. A thread then quantizes one block of 32,
first of a row, then of a column. It holds a block by itself: no lane needs another's values, so waves of 32 and of 64 lanes do
alike. Hadamard transform, scale and codes: the numbers of reference.py and random.py, bit for bit.

  load      16 bytes per lane and access, to LDS in chunks of 16 bytes
  rows      thread t: row t / 8, block t % 8; eight ds_read_b128, 16 bytes of codes and one of scales to memory
  columns   thread t: column t; 32 reads of a word. Transposed codes: 16 bytes to memory. Natural ones share each byte with the
            neighbour column's: words of 8 rows go through LDS, from where a thread packs 16 bytes of a row

LDS images  x: row r, 16-byte chunk c of 64 at x_address(r, c). Lanes that one ds_read_b128 serves together
            (tiles.read_b128_groups; or 16 neighbours) have 16 chunks of two or four rows, all in different banks; a read of
            a word of each column has 16 neighbouring chunks of a row
            codes: the word of rows 8 * w .. 8 * w + 7 of column c lies in the chunk at codes_address(w, c)
Limits      as cdna.py.
"""

from dataclasses import dataclass
from typing import Any

import flydsl.compiler as flyc
from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave import formats
from fourwave.blocks.flydsl.control import when
from fourwave.blocks.flydsl.convert import BlockScale, larger, magnitude
from fourwave.blocks.flydsl.memory import (
    OUT_OF_RANGE,
    Buffer,
    _global_ptr,
    barrier,
    lds_read,
    lds_struct,
    lds_write,
    minimum,
    select,
    vector_type,
    wait_lds,
)
from fourwave.blocks.flydsl.tdm import arrive, depart
from fourwave.blocks.flydsl.tdm import wait_lds as wait_lds_gfx1250
from fourwave.quantize.cdna import DTYPES, _outside
from fourwave.quantize.random import HADAMARD, MULTIPLIERS, ROUNDS, WEYL

TILE_ROWS, TILE_COLUMNS = 32, 256
THREADS = 256
BLOCK = 32
BLOCKS = TILE_COLUMNS // BLOCK  # of a row
CHUNKS = TILE_COLUMNS // 4  # of a row of float32
X_BYTES = TILE_ROWS * TILE_COLUMNS * 4
CODE_WORDS = TILE_ROWS // 8  # of a column
CODES_BYTES = CODE_WORDS * TILE_COLUMNS * 4


def x_address(row, chunk):
    """Byte of a 16-byte chunk of x; Python ints or FlyDSL's."""
    key = ((row & 1) << 2) | (chunk >> 4)
    return (row * CHUNKS + (chunk ^ key)) << 4


def codes_address(word, column):
    """Byte of the word of rows 8 * word .. of columns column .. column + 3, column a multiple of 4."""
    return (word * CHUNKS + ((column >> 2) ^ (column >> 6))) << 4


@dataclass(frozen=True)
class Mxfp4Spec:
    """Everything that is fixed when the kernel is compiled. Names of dtypes are torch's.

    whole_chunks   x: base and rows are 16-byte aligned, rows are whole chunks
    whole_blocks   C % 32 == 0; whole_columns: R % 32 == 0. Codes are then stored by 16 bytes
    """

    arch: str
    x_dtype: str
    rule: str
    rowwise: bool
    columnwise: bool
    transposed: bool
    stochastic: bool
    row_hadamard: bool
    column_hadamard: bool
    whole_chunks: bool
    whole_blocks: bool
    whole_columns: bool


# In the launcher's order. What a specialisation does not use is a placeholder.
TENSORS = ("x", "data", "scale", "columnwise_data", "columnwise_scale", "seed")


def build(spec):
    """Launcher (*TENSORS, R, C, row_signs, column_signs, stream)."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def quantize_mxfp4(
        x: fx.Tensor, data: fx.Tensor, scale: fx.Tensor, columnwise_data: fx.Tensor, columnwise_scale: fx.Tensor,
        seed: fx.Tensor, R: fx.Int32, C: fx.Int32, row_signs: fx.Int32, column_signs: fx.Int32,
    ):  # fmt: skip
        _Tile(spec, R, C, seed).run(x, (data, scale, row_signs), (columnwise_data, columnwise_scale, column_signs))

    @flyc.jit
    def launch_mxfp4(
        x: fx.Tensor, data: fx.Tensor, scale: fx.Tensor, columnwise_data: fx.Tensor, columnwise_scale: fx.Tensor,
        seed: fx.Tensor, R: fx.Int32, C: fx.Int32, row_signs: fx.Int32, column_signs: fx.Int32,
        stream: fx.Stream = fx.Stream(None),
    ):  # fmt: skip
        tiles = ((R + (TILE_ROWS - 1)) >> 5) * ((C + (TILE_COLUMNS - 1)) >> 8)
        quantize_mxfp4(
            x, data, scale, columnwise_data, columnwise_scale, seed, R, C, row_signs, column_signs
        ).launch(grid=(tiles, 1, 1), block=(THREADS, 1, 1), stream=stream)  # fmt: skip

    return launch_mxfp4


class _Flat:
    """Buffer for machines with another buffer resource: plain loads and stores, of lanes that are in range."""

    @dsl_loc_tracing
    def __init__(self, tensor, byte_offset, num_bytes):
        self._base = _offset(fx.get_iter(tensor).llvm_ptr, fx.Int64(byte_offset))
        self._num_bytes = fx.Int64(num_bytes)

    def _inside(self, offset, size):
        offset = fx.Int64(fx.Uint32(offset))
        return offset + size <= self._num_bytes

    @dsl_loc_tracing
    def load(self, offset, count, dtype):
        """What is not in range is zero; the first element is."""
        size = count * dtype.width // 8
        assert size <= 16, size
        inside = self._inside(offset, size)
        at = _offset(self._base, inside.select(fx.Int64(fx.Uint32(offset)), fx.Int64(0)))
        words = {1: fx.Uint8, 2: fx.Uint16}.get(size, fx.Int32)
        number = max(1, size // 4)
        result = vector_type(number, words) if number > 1 else words.ir_type
        value = _llvm.LoadOp(result, at, alignment=size).result
        vector = fx.Vector(value) if number > 1 else fx.Vector.filled(1, words(value), words)
        zero = words(0)
        kept = [inside.select(vector[i], zero) for i in range(number)]
        return fx.Vector.from_elements(kept, words).bitcast(dtype)

    @dsl_loc_tracing
    def store(self, value, offset):
        size = value.numel * value.dtype.width // 8
        raw = as_ir_value(value[0]) if value.numel == 1 else as_ir_value(value)

        def body():
            at = _offset(self._base, fx.Int64(fx.Uint32(offset)))
            _llvm.StoreOp(raw, at, alignment=size)

        when(self._inside(offset, size), body)


def _offset(pointer, byte_offset):
    return _llvm.getelementptr(_global_ptr(), pointer, [as_ir_value(byte_offset)], [-(2**31)], fx.Int8.ir_type, None)


def _float(bits):
    return fx.Int32(bits).bitcast(fx.Float32)


class _Tile:
    """One workgroup's work."""

    def __init__(self, spec, R, C, seed):
        self.spec, self.R, self.C = spec, R, C
        self.memory = _Flat if spec.arch == "gfx1250" else Buffer
        self.thread = fx.Int32(fx.thread_idx.x)
        tiles_n = fx.Uint32(C + (TILE_COLUMNS - 1)) >> 8
        workgroup = fx.Uint32(fx.block_idx.x)
        self.m_tile, self.n_tile = fx.Int32(workgroup // tiles_n), fx.Int32(workgroup % tiles_n)
        self.row0, self.col0 = self.m_tile * TILE_ROWS, self.n_tile * TILE_COLUMNS
        self.rows = minimum(R - self.row0, fx.Int32(TILE_ROWS))
        self.columns = minimum(C - self.col0, fx.Int32(TILE_COLUMNS))
        natural = spec.columnwise and not spec.transposed
        self.lds = lds_struct({"x": X_BYTES, "codes": CODES_BYTES if natural else 16})
        self.lds = fx.SharedAllocator().allocate(self.lds).peek()
        if spec.stochastic:
            words = self.memory(seed, fx.Int64(0), fx.Int64(8)).load(fx.Int32(0), 2, fx.Int32)
            self.key = tuple(words[i].bitcast(fx.Uint32) for i in range(2))

    def run(self, x, by_row, by_column):
        self._bring(x)
        self._meet()
        if self.spec.rowwise:
            self._rows(*by_row)
        if self.spec.columnwise:
            self._columns(*by_column)

    def _meet(self):
        """What every thread wrote to LDS is there."""
        if self.spec.arch == "gfx1250":
            wait_lds_gfx1250()
            arrive()
            depart()
        else:
            wait_lds()
            barrier()

    # ---- x to LDS --------------------------------------------------------------------------------------------------

    def _bring(self, x):
        dtype = DTYPES[self.spec.x_dtype]
        size = dtype.width // 8
        pitch = fx.Int64(fx.get_scalar(x.stride[0])) * size
        base = fx.Int64(self.row0) * pitch + fx.Int64(self.col0) * size
        span = fx.Int64(self.rows - 1) * pitch + fx.Int64(self.columns) * size
        buffer = self.memory(x, base, span)
        each = 16 // size  # elements of a thread and pass
        per_row = TILE_COLUMNS // each
        column = self.thread % per_row * each
        for i in range(TILE_ROWS * per_row // THREADS):
            row = self.thread // per_row + i * (THREADS // per_row)
            offset = row * fx.Int32(pitch) + column * size
            if self.spec.whole_chunks:
                inside = (row < self.rows) & (column < self.columns)
                values = buffer.load(select(inside, offset, OUT_OF_RANGE), each, dtype).to(fx.Float32)
                values = [values[e] for e in range(each)]
            else:
                offset = select(row < self.rows, offset, OUT_OF_RANGE)
                offsets = [(offset + e * size) | _outside(e, self.columns - column) for e in range(each)]
                values = [buffer.load(at, 1, dtype).to(fx.Float32)[0] for at in offsets]
            for e in range(0, each, 4):
                at = x_address(row, (column >> 2) + e // 4)
                lds_write(self.lds.x.ptr, at, fx.Vector.from_elements(values[e : e + 4], fx.Float32))

    # ---- a block ---------------------------------------------------------------------------------------------------

    def _transform(self, values, signs):
        """random.hadamard of each 16."""
        out = []
        for first in range(0, BLOCK, HADAMARD):
            bits = [values[first + e].bitcast(fx.Int32) for e in range(HADAMARD)]
            flips = [((signs >> e) & 1) << 31 for e in range(HADAMARD)]
            part = [_float(b ^ flip) for b, flip in zip(bits, flips, strict=True)]
            for distance in (1, 2, 4, 8):
                after = list(part)
                for e in range(HADAMARD):
                    if not e & distance:
                        after[e], after[e + distance] = part[e] + part[e + distance], part[e] - part[e + distance]
                part = after
            out += [value * 0.25 for value in part]
        return out

    def _bits(self, line, block, stream):
        """32 Uint32 of 16 random bits: random.random_bits of a block."""
        out = []
        for eight in range(BLOCK // 8):
            counter = [fx.Uint32(line), fx.Uint32(block * 4 + eight), fx.Uint32(stream), fx.Uint32(0)]
            for word in _philox(counter, self.key):
                out += [word & 0xFFFF, word >> 16]
        return out

    def _quantize(self, values, hadamard, signs, line, block, stream):
        """(four Int32 of eight codes each, the scale's byte) of 32 Float32."""
        if hadamard:
            values = self._transform(values, signs)
        amax = magnitude(values[0])
        for value in values[1:]:
            amax = larger(amax, magnitude(value))
        scale = BlockScale.of(amax, formats.E2M1, self.spec.rule)
        bits = self._bits(line, block, stream) if self.spec.stochastic else [None] * BLOCK
        codes = [_code(value * scale.inv, r) for value, r in zip(values, bits, strict=True)]
        words = []
        for first in range(0, BLOCK, 8):
            word = codes[first]
            for e in range(1, 8):
                word = word | (codes[first + e] << (4 * e))
            # No code is NaN: +6, which the NaN scale makes NaN.
            words.append(select(scale.finite, word, 0x77777777))
        return words, scale.byte

    # ---- rows ------------------------------------------------------------------------------------------------------

    def _rows(self, data, scale, signs):
        row, block = self.thread // BLOCKS, self.thread % BLOCKS
        values = []
        for chunk in range(BLOCK // 4):
            four = lds_read(self.lds.x.ptr, x_address(row, block * (BLOCK // 4) + chunk), 4, fx.Float32)
            values += [four[e] for e in range(4)]
        column_block = self.n_tile * BLOCKS + block
        words, byte = self._quantize(values, self.spec.row_hadamard, signs, self.row0 + row, column_block, 0)
        inside = row < self.rows
        left = self.columns - block * BLOCK

        pitch = fx.Int64(self.C >> 1)
        base = fx.Int64(self.row0) * pitch + fx.Int64(self.col0 >> 1)
        buffer = self.memory(data, base, fx.Int64(self.rows - 1) * pitch + fx.Int64(self.columns >> 1))
        offset = select(inside, row * fx.Int32(pitch) + block * (BLOCK // 2), OUT_OF_RANGE)
        _store_codes(buffer, offset, words, left >> 1, self.spec.whole_blocks)

        pitch = fx.Int64((self.C + (BLOCK - 1)) >> 5)
        count = (self.columns + (BLOCK - 1)) >> 5
        base = fx.Int64(self.row0) * pitch + fx.Int64(self.n_tile * BLOCKS)
        buffer = self.memory(scale, base, fx.Int64(self.rows - 1) * pitch + fx.Int64(count))
        at = select(inside & (left > 0), row * fx.Int32(pitch) + block, OUT_OF_RANGE)
        buffer.store(fx.Vector.from_elements([fx.Uint8(byte)], fx.Uint8), at)

    # ---- columns ---------------------------------------------------------------------------------------------------

    def _columns(self, data, scale, signs):
        column = self.thread
        values = []
        for row in range(TILE_ROWS):
            at = x_address(row, column >> 2) + ((column & 3) << 2)
            values.append(lds_read(self.lds.x.ptr, at, 1, fx.Float32)[0])
        words, byte = self._quantize(values, self.spec.column_hadamard, signs, self.col0 + column, self.m_tile, 1)
        inside = column < self.columns
        byte = fx.Vector.from_elements([fx.Uint8(byte)], fx.Uint8)
        if self.spec.transposed:
            pitch = fx.Int64(self.R >> 1)
            base = fx.Int64(self.col0) * pitch + fx.Int64(self.row0 >> 1)
            buffer = self.memory(data, base, fx.Int64(self.columns - 1) * pitch + fx.Int64(self.rows >> 1))
            offset = select(inside, column * fx.Int32(pitch), OUT_OF_RANGE)
            _store_codes(buffer, offset, words, self.rows >> 1, self.spec.whole_columns)
            pitch = fx.Int64((self.R + (BLOCK - 1)) >> 5)
            base = fx.Int64(self.col0) * pitch + fx.Int64(self.m_tile)
            buffer = self.memory(scale, base, fx.Int64(self.columns - 1) * pitch + 1)
            buffer.store(byte, select(inside, column * fx.Int32(pitch), OUT_OF_RANGE))
            return
        base = fx.Int64(self.m_tile) * fx.Int64(self.C) + fx.Int64(self.col0)
        self.memory(scale, base, fx.Int64(self.columns)).store(byte, select(inside, column, OUT_OF_RANGE))
        lds = self.lds.codes.ptr
        for w in range(CODE_WORDS):
            at = codes_address(w, column) + ((column & 3) << 2)
            lds_write(lds, at, fx.Vector.from_elements([words[w]], fx.Int32), 4)
        self._meet()
        # 16 bytes of a row: one nibble of 32 columns' words.
        row, first = self.thread // BLOCKS, self.thread % BLOCKS * BLOCK
        shift = (row & 7) * 4
        packed = []
        for w in range(4):
            word: Any = None
            for half in range(2):
                at = codes_address(row >> 3, first + 8 * w + 4 * half)
                four = lds_read(lds, at, 4, fx.Int32)
                for e in range(4):
                    nibble = ((four[e].bitcast(fx.Uint32) >> fx.Uint32(shift)) & 15) << (4 * (4 * half + e))
                    word = nibble if word is None else word | nibble
            packed.append(word.bitcast(fx.Int32))
        pitch = fx.Int64(self.C >> 1)
        base = fx.Int64(self.row0) * pitch + fx.Int64(self.col0 >> 1)
        buffer = self.memory(data, base, fx.Int64(self.rows - 1) * pitch + fx.Int64(self.columns >> 1))
        offset = select(row < self.rows, row * fx.Int32(pitch) + (first >> 1), OUT_OF_RANGE)
        _store_codes(buffer, offset, packed, (self.columns - first) >> 1, self.spec.whole_blocks)


def _store_codes(buffer, offset, words, count, whole):
    """The first `count` of 16 bytes; whole: count is at least 16, or not positive."""
    vector = fx.Vector.from_elements(words, fx.Int32)
    if whole:
        buffer.store(vector, select(count > 0, offset, OUT_OF_RANGE))
        return
    elements = vector.bitcast(fx.Uint8)
    for e in range(16):
        buffer.store(fx.Vector.from_elements([elements[e]], fx.Uint8), (offset + e) | _outside(e, count))


@dsl_loc_tracing
def _philox(counter, key):
    """random.philox of Uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = fx.Uint64(c0) * fx.Uint64(MULTIPLIERS[0]), fx.Uint64(c2) * fx.Uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (
            fx.Uint32(second >> 32) ^ c1 ^ k0, fx.Uint32(second), fx.Uint32(first >> 32) ^ c3 ^ k1, fx.Uint32(first),
        )  # fmt: skip
        k0, k1 = k0 + fx.Uint32(WEYL[0]), k1 + fx.Uint32(WEYL[1])
    return c0, c1, c2, c3


@dsl_loc_tracing
def _code(y, bits):
    """Int32 code of a Float32 below 8: to nearest even, or with 16 bits (Uint32) stochastically. reference.py."""
    size = magnitude(y)
    sign = fx.Int32((y.bitcast(fx.Uint32) >> 31) << 3)
    # Exponent of the spacing of codes: 0, 1, 2 below 2, 4 and from 4 on.
    exponent = larger(size >> 23, fx.Int32(127)) - 127
    if bits is None:
        # |y| + 2^(22 + exponent) is rounded to the spacing, and ends in the number of spacings.
        magic = (exponent + (127 + 22)) << 23
        count = (_float(size) + _float(magic)).bitcast(fx.Int32) - magic
    else:
        six = fx.Int32(0x40C00000)
        size = minimum(size, six)
        exponent = minimum(exponent, fx.Int32(2))
        fixed = (_float(size) * _float((127 + 17 - exponent) << 23)).to(fx.Int32)
        count = (fixed + bits.bitcast(fx.Int32)) >> 16
    return minimum(count + exponent * 2, fx.Int32(7)) | sign
