"""Scales that change along K: loaded once per workgroup, for SCALE_STEPS K tiles of 128 at a time, which is a step of the main loop.

The scales of the next step are brought to LDS during this one, with the K tiles, and read into registers when it begins or
before each K tile, 16 bytes a lane (8 where the read transposes). float32 scales of blocks of 128 are multiplied in by software
(BlockMma):

  rows      one per row (of M) and block: LDS holds [row][SCALE_STEPS]; a lane reads all blocks of its row at once
  cells     one per 128 columns (of N) and block (weights): the same, a wave's columns share one
  columns   one per column (of N) and block (wgrad): LDS holds [SCALE_STEPS][column], two steps of it; a lane reads its columns
            before each K tile

e8m0 scales of blocks of 32 go to the scaled matrix instruction, and lie in LDS as those of the GEMM kernels do (tiles.ScaleTile),
which also read them (loaders.FragmentScales), for the whole step at once:

  mx rows   four bytes per row and K tile, else as rows
  mx bytes  K not contiguous: LDS holds [4 * SCALE_STEPS blocks][column] bytes

Scales of neighbouring columns come 16 bytes a lane. Those of rows, of any strides, come 4 bytes a lane, one load in four K tiles for 64
rows.
"""

from dataclasses import dataclass

from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import (
    MAX_BUFFER_BYTES,
    OUT_OF_RANGE,
    Buffer,
    _i32,
    _lds_address,
    lds_read,
    lds_write,
    minimum,
    select,
)
from fourwave.blocks.flydsl.mma import ACC_PER_LANE, WaveMma
from fourwave.blocks.flydsl.tiles import CHUNK_BYTES, MMA_M, WAVE, WORKGROUP, ScaleTile

BLOCK_K = 128
SCALE_STEPS = 4
_LOAD_BYTES = 4 * WORKGROUP  # of LDS that all four waves fill with one load of 4 bytes per lane


@dataclass(frozen=True)
class ScalePart:
    """Scales of one operand that a step needs.

    kind    see the module; extent: rows, cells or columns
    tile    tiles.OperandTile of the operand. LDS holds the rows of one fragment next to each other, so that reads meet no bank
            twice
    """

    kind: str
    extent: int
    tile: object = None

    @property
    def elem_bytes(self):
        return 1 if self.kind.startswith("mx") else 4

    @property
    def each_tile(self):
        """Whether they are read before each K tile."""
        return self.kind == "columns"

    @property
    def slots(self):
        return 2 if self.each_tile else 1

    @property
    def wide(self):
        """Whether they come 16 bytes a lane: neighbouring columns of one unit of k. There are as many chunks as columns."""
        return self.kind in ("columns", "mx bytes")

    @property
    def loads(self):
        """Loads of 4 or 16 bytes per lane that bring them."""
        return 1 if self.wide else -(-self.extent * SCALE_STEPS * 4 // _LOAD_BYTES)

    @property
    def waves(self):
        """Wide: that it takes to bring them. The others load as often, so that all wait alike: nothing, to a place of their own."""
        return max(1, self.extent // WAVE)

    @property
    def slot_bytes(self):
        return self.waves * WAVE * CHUNK_BYTES if self.wide else self.loads * _LOAD_BYTES

    @property
    def scale_tile(self):
        """mx: where they lie in a slot."""
        return ScaleTile(self.tile, self.slots)

    @property
    def idle_bytes(self):
        return (WORKGROUP // WAVE - self.waves) * WAVE * CHUNK_BYTES if self.wide else 0

    @property
    def lds_bytes(self):
        return self.slots * self.slot_bytes + self.idle_bytes

    @property
    def units(self):
        """Units of k that a step has: blocks, or for "mx rows" K tiles."""
        return 4 * SCALE_STEPS if self.kind == "mx bytes" else SCALE_STEPS

    @property
    def unit_k(self):
        return 32 if self.kind == "mx bytes" else BLOCK_K

    def source(self, at):
        """(unit of k, row or first column) of the 4 or, if wide, 16 bytes that lie `at` times as many into a slot."""
        if self.kind == "columns":
            return at // (self.extent // 4), at % (self.extent // 4) * 4
        if self.kind == "mx bytes":
            tile = self.scale_tile
            line = at // tile.line_chunks
            return tile.block_of(line), ((at % tile.line_chunks) ^ tile.key(line)) * CHUNK_BYTES
        place = at // SCALE_STEPS
        if self.kind != "cells":
            place = self.tile.fragment_row(place // MMA_M, place % MMA_M)
        return at % SCALE_STEPS, place


class GlobalScales128:
    """Brings the scales of one operand.

    tensor            flat
    base              byte of (row 0 of the tile, k 0) (Int64)
    stride, k_stride  bytes between rows (columns, cells) and between units of k (Int32)
    count             how many rows there are from the tile's first on
    k_first, k_end    k that the workgroup sums (Int32, uniform); scales of other blocks are zeros
    """

    def __init__(self, tensor, part, base, stride, k_stride, count, k_first, k_end, thread):
        self.tensor, self.part, self.base, self.k_stride = tensor, part, base, k_stride
        self.first = k_first // part.unit_k
        self.end = (k_end + (part.unit_k - 1)) // part.unit_k
        self.total = fx.Int64(fx.get_scalar(tensor.shape)) * part.elem_bytes
        self.k, self.offsets = [], []
        for i in range(part.loads):
            k, row = part.source(thread + i * WORKGROUP)
            inside = (row < minimum(count, fx.Int32(part.extent))) & (k < part.units)
            if part.wide:
                inside = inside & (thread < part.extent)
            self.k.append(k)
            self.offsets.append(select(inside, row * stride + k * k_stride, OUT_OF_RANGE))

    def _step(self, k0):
        """(Buffer, offsets) for the units from that of k0 (Int32, uniform) on."""
        unit0 = k0 // self.part.unit_k
        byte_offset = self.base + fx.Int64(unit0) * fx.Int64(self.k_stride)
        left = self.total - byte_offset
        left = (left < fx.Int64(0)).select(fx.Int64(0), minimum(left, fx.Int64(MAX_BUFFER_BYTES)))
        buffer = Buffer(self.tensor, byte_offset, left)
        offsets = []
        for k, offset in zip(self.k, self.offsets, strict=True):
            inside = k < self.end - unit0
            if self.part.kind == "mx bytes":
                # A NaN scale of a block before the first k would meet zeros.
                inside = inside & (k >= self.first - unit0)
            offsets.append(select(inside, offset, OUT_OF_RANGE))
        return buffer, offsets

    @dsl_loc_tracing
    def to_lds(self, lds, place, slot, k0, wave):
        """Straight to LDS, part.loads loads of each wave (vmcnt). place: of the part; slot: offset in it."""
        buffer, offsets = self._step(k0)
        if self.part.wide:
            buffer.load_to_lds(lds, place + self._chunk(slot, wave * WAVE), offsets[0])
            return
        for i, offset in enumerate(offsets):
            at = place + slot + (wave + i * (WORKGROUP // WAVE)) * (WAVE * 4)
            _rocdl.raw_ptr_buffer_load_async_lds(
                buffer.rsrc, _lds_address(lds, at), _i32(4), _i32(offset), _i32(0), _i32(0)
            )

    def _chunk(self, slot, number):
        """Offset of a chunk in a slot, or behind all slots."""
        part = self.part
        return select(number < part.waves * WAVE, slot, (part.slots - 1) * part.slot_bytes) + number * CHUNK_BYTES

    def to_registers(self, k0):
        """This lane's, as Float32 Vectors of one, or of four neighbouring columns."""
        buffer, offsets = self._step(k0)
        return [buffer.load(offset, 4 if self.part.wide else 1, fx.Float32) for offset in offsets]

    @dsl_loc_tracing
    def write(self, values, lds, place, slot, thread):
        """What to_registers brought, to LDS. place: of the part; slot: offset in it."""
        if self.part.wide:
            lds_write(lds, place + self._chunk(slot, thread), values[0])
            return
        for i, value in enumerate(values):
            at = place + slot + (thread + i * WORKGROUP) * 4
            _llvm.StoreOp(as_ir_value(value[0]), _lds_address(lds, at), alignment=4)


class Scales128:
    """Reads the float32 scales that belong to one wave's fragments."""

    def __init__(self, part, lds, place, rows):
        """place: bytes of the first slot in lds; rows: for each value to read its row's place, its cell or its first column in the
        tile (Int32)."""
        self.part, self.lds = part, lds
        self.bases = [place + row * (4 if part.kind == "columns" else 4 * SCALE_STEPS) for row in rows]

    def read(self, tile=0, slot=None):
        """rows, cells: Vectors of the step's four K tiles. columns: Vectors of the lane's neighbouring columns for one K tile of the
        step in `slot`."""
        at = slot * self.part.slot_bytes + tile * self.part.extent * 4 if self.part.each_tile else 0
        return [lds_read(self.lds, base + at, 4, fx.Float32) for base in self.bases]


class BlockMma(WaveMma):
    """acc += (a[i] @ b[j] over 128 k) * scale of the row * scale of the column. a[i], b[j]: all 128 k of a fragment."""

    def __init__(self, fmt, arch, frags_m, frags_n, parts):
        super().__init__(fmt, arch, frags_m, frags_n)
        self.parts = parts

    def fold(self, a, b, acc, row_scales, column_scales):
        """row_scales: Float32 of each i; column_scales: Float32 of all j, or of each j a Vector of the lane's four columns."""
        out = list(acc)
        zero = fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32)
        whole = not isinstance(column_scales, list)
        factors = [scale * column_scales for scale in row_scales] if whole else row_scales
        for j in range(self.frags_n):
            for i in range(self.frags_m):
                index = i * self.frags_n + j
                part = zero
                for p in range(self.parts):
                    part = self._mfma(self._part(b[j], p), self._part(a[i], p), part)
                factor = fx.Vector.filled(ACC_PER_LANE, factors[i], fx.Float32)
                if not whole:
                    factor = factor * column_scales[j]
                out[index] = fx.Vector(fx.fma(part, factor, out[index]))
        return out

    def _operand(self, fragment):
        if self.parts > 1 and self.fmt.elem_bytes == 1:
            return as_ir_value(fragment.bitcast(fx.Int64)[0])
        return super()._operand(fragment)
