"""The tensor data mover (TDM) of gfx1250: tiles of two or three dimensions between global memory and LDS, one instruction of one wave each.

A tile is tile_rows x tile_columns elements at an address, its rows `stride` elements apart; in LDS they follow each other. Or it is
several such planes, which follow each other in LDS, too. What lies past the tensor's `rows` x `columns`, counted from the tile's
first element, is zero where it is loaded and dropped where it is stored: that is all that tails need. A load can leave a gap of pad_bytes in LDS behind every pad_interval bytes. A
store cannot: it takes rows with their gap, as elements past the tensor's columns.

The instruction counts in tensorcnt; those of one wave complete in order. The compiler waits for none of them.

FlyDSL's own TDM atoms fix a tile's shape when they are compiled. Here a wave brings now half of a tile, now a whole one or
scales, so the descriptor is put together from words that can be selected (Tile.otherwise) without a branch.

Source: descriptor groups 0, 1 and 2, AMD CDNA5 ISA guide, section 10.11; LLVM's IntrinsicsAMDGPU.td.
"""

from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import select
from fourwave.blocks.flydsl.tiles import log2

WORKGROUP_BARRIER = -1


def not_negative(value):
    return select(value < 0, 0, value)


@dsl_loc_tracing
def address(tensor):
    """Of a kernel argument, Int64."""
    return fx.Int64(_llvm.ptrtoint(fx.Int64.ir_type, fx.get_iter(tensor).llvm_ptr))


@dsl_loc_tracing
def lds_base(lds):
    """Where a workgroup's LDS array begins, Int32."""
    return fx.Int32(_llvm.ptrtoint(fx.Int32.ir_type, lds.llvm_ptr))


def layout(elem_bytes, pad_interval=0, pad_bytes=0):
    """Size of the elements and gaps in LDS, as a descriptor's word."""
    word = log2(elem_bytes) << 16
    if pad_bytes:
        # In dwords: an interval of 2 << code, an amount of code + 1.
        word |= 1 << 20 | (log2(pad_interval // 4) - 1) << 22 | (pad_bytes // 4 - 1) << 25
    return word


class Tile:
    """A descriptor, uniform over the wave."""

    def __init__(self, words):
        self.words = words

    @classmethod
    @dsl_loc_tracing
    def of(cls, start, lds, tile, left, stride, layout, planes=None):
        """start: Int64 address of the first element; lds: Int32 address. tile: (rows, columns), at most 65535 each; left:
        (rows, columns), Int32, not negative, those of the tensor from the first element on. stride: Int64, elements.
        layout: as the function makes it. planes: (how many, how many are left, Int64 elements from one to the next); where there are none
        of a tile, it has two dimensions. All may be values of run time."""
        rows, columns = tile
        rows_left, columns_left = left
        size, along, last = fx.Int32(rows), fx.Int32(stride >> 32) & 0xFFFF, fx.Int32(0)
        further = []
        if planes is not None:
            count, planes_left, distance = planes
            size = size | (count << 16)
            along = along | (fx.Int32(distance) << 16)
            last = fx.Int32(distance >> 16)
            further = [planes_left]
        return cls([
            fx.Int32(1),  # one tile
            lds,
            fx.Int32(start),
            fx.Int32(start >> 32) & 0x01FFFFFF | -(2**31),  # a descriptor of a tensor
            fx.Int32(layout),
            (columns_left & 0xFFFF) << 16,
            (columns_left >> 16) | (rows_left & 0xFFFF) << 16,
            (rows_left >> 16) | (columns << 16),
            size,
            fx.Int32(stride),
            along,
            last,
            *further,
        ])  # fmt: skip

    def otherwise(self, condition, other):
        """This tile where condition (uniform) holds, else other."""
        return Tile([select(condition, a, b) for a, b in zip(self.words, other.words, strict=True)])

    @dsl_loc_tracing
    def load(self):
        """Global memory to LDS."""
        _rocdl.tensor_load_to_lds(*self._groups())

    @dsl_loc_tracing
    def store(self):
        """LDS to global memory. What LDS holds must have been waited for (wait_reads)."""
        _rocdl.tensor_store_from_lds(*self._groups())

    def _groups(self):
        zero = fx.Int32(0)
        groups = [self.words[:4], self.words[4:12], [*self.words[12:], *[zero] * 4][:4], [zero] * 4, [zero] * 8]
        return [as_ir_value(fx.Vector.from_elements(words, fx.Int32)) for words in groups]


@dsl_loc_tracing
def wait_tiles(in_flight):
    """Until at most in_flight of this wave's tiles are on their way, oldest first."""
    assert 0 <= in_flight <= 63, "tensorcnt has six bits"
    _rocdl.s_wait_tensorcnt(in_flight)


@dsl_loc_tracing
def wait_lds():
    """Until all of this wave's LDS reads and writes are done."""
    _rocdl.s_wait_dscnt(0)


@dsl_loc_tracing
def arrive():
    """First half of the workgroup's barrier: this wave has come. Waits for nothing."""
    _rocdl.s_barrier_signal(WORKGROUP_BARRIER)


@dsl_loc_tracing
def depart():
    """Second half: until every wave has arrived."""
    _rocdl.s_barrier_wait(WORKGROUP_BARRIER)
