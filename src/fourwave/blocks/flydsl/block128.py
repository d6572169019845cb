"""float32 scales of blocks of 128 k: loaded once per workgroup, SCALE_STEPS blocks at a time, and multiplied in by software.

A step of the main loop covers SCALE_STEPS K tiles of 128. The scales of the next step are brought to LDS during this one,
with the K tiles, and read into registers when it begins:

  rows      one scale per row (of M) and block: LDS holds [row][SCALE_STEPS]; a lane reads all blocks of its row at once
  cells     one per 128 columns (of N) and block (weights): the same, a wave's columns share one
  columns   one per column (of N) and block (wgrad): LDS holds [SCALE_STEPS][column], two steps of it; a lane reads its columns
            before each K tile
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
    minimum,
    select,
)
from fourwave.blocks.flydsl.mma import ACC_PER_LANE, WaveMma
from fourwave.blocks.flydsl.tiles import MMA_M, WAVE, WORKGROUP

BLOCK_K = 128
SCALE_STEPS = 4
_LOAD_BYTES = 4 * WORKGROUP  # of LDS that all four waves fill with one load of 4 bytes per lane


@dataclass(frozen=True)
class ScalePart:
    """Scales of one operand that a step needs.

    kind    "rows", "cells" or "columns"; extent: how many for each block of k
    group   rows: fragments that are woven (tiles.OperandTile). LDS holds the rows of one fragment next to each other, so that
            reads meet no bank twice
    """

    kind: str
    extent: int
    group: int = 1

    def row(self, place):
        """Row of the tile whose scales lie at `place` in LDS."""
        if self.group == 1:
            return place
        in_group = place % (MMA_M * self.group)
        return place - in_group + place % MMA_M * self.group + in_group // MMA_M

    @property
    def slots(self):
        return 2 if self.kind == "columns" else 1

    @property
    def loads(self):
        """Loads of 4 bytes per lane that bring them."""
        return -(-self.extent * SCALE_STEPS * 4 // _LOAD_BYTES)

    @property
    def slot_bytes(self):
        return self.loads * _LOAD_BYTES

    @property
    def lds_bytes(self):
        return self.slots * self.slot_bytes


class GlobalScales128:
    """Brings the scales of one operand.

    tensor            flat, float32
    base              element of (row 0 of the tile, block 0 of K) (Int64)
    stride, k_stride  elements between rows (columns, cells) and between blocks of k (Int32)
    count             how many rows there are from the tile's first on; blocks: how many blocks of k
    """

    def __init__(self, tensor, part, base, stride, k_stride, count, blocks, thread):
        self.tensor, self.part, self.base, self.k_stride, self.blocks = tensor, part, base, k_stride, blocks
        self.total = fx.Int64(fx.get_scalar(tensor.shape)) * 4
        self.k, self.offsets = [], []
        for i in range(part.loads):
            at = thread + i * WORKGROUP
            if part.kind == "columns":
                k, row = at // part.extent, at % part.extent
            else:
                k, row = at % SCALE_STEPS, part.row(at // SCALE_STEPS)
            inside = (row < minimum(count, fx.Int32(part.extent))) & (k < SCALE_STEPS)
            self.k.append(k)
            self.offsets.append(select(inside, (row * stride + k * k_stride) * 4, OUT_OF_RANGE))

    def _step(self, block0):
        """(Buffer, offsets) for the blocks from block0 (Int32, uniform) on."""
        byte_offset = (self.base + fx.Int64(block0) * fx.Int64(self.k_stride)) * 4
        left = self.total - byte_offset
        left = (left < fx.Int64(0)).select(fx.Int64(0), minimum(left, fx.Int64(MAX_BUFFER_BYTES)))
        buffer = Buffer(self.tensor, byte_offset, left)
        return buffer, [
            select(k < self.blocks - block0, offset, OUT_OF_RANGE)
            for k, offset in zip(self.k, self.offsets, strict=True)
        ]

    @dsl_loc_tracing
    def to_lds(self, lds, place, block0, wave):
        """Straight to LDS, part.loads loads of each wave (vmcnt)."""
        buffer, offsets = self._step(block0)
        for i, offset in enumerate(offsets):
            at = place + (wave + i * (WORKGROUP // WAVE)) * (WAVE * 4)
            _rocdl.raw_ptr_buffer_load_async_lds(
                buffer.rsrc, _lds_address(lds, at), _i32(4), _i32(offset), _i32(0), _i32(0)
            )

    def to_registers(self, block0):
        """This lane's, as Float32 Vectors of one."""
        buffer, offsets = self._step(block0)
        return [buffer.load(offset, 1, fx.Float32) for offset in offsets]

    @dsl_loc_tracing
    def write(self, values, lds, place, thread):
        """What to_registers brought, to LDS."""
        for i, value in enumerate(values):
            at = place + (thread + i * WORKGROUP) * 4
            _llvm.StoreOp(as_ir_value(value[0]), _lds_address(lds, at), alignment=4)


class Scales128:
    """Reads the scales that belong to one wave's fragments."""

    def __init__(self, part, lds, place, rows):
        """place: bytes of the first slot in lds; rows: for each vector to read, its row's place, its cell or its first column (Int32)."""
        self.part, self.lds = part, lds
        self.bases = [place + row * (4 if part.kind == "columns" else 4 * SCALE_STEPS) for row in rows]

    def read(self, tile=0, slot=None):
        """Vectors of 4: of "columns" those of neighbouring columns for one K tile of the step in `slot`, else those of one row
        for the four K tiles of the step."""
        at = 0 if slot is None else slot * self.part.slot_bytes + tile * self.part.extent * 4
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
