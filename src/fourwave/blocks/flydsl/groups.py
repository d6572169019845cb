"""Which group a workgroup belongs to, found in the kernel from m_sizes, and views of one group's matrices.

64 groups at a time: lane l has the size of group l, sums over the lanes give where groups begin, a ballot which group is
meant. Sizes are clamped to 0 .. rows, so that wrong ones lead to wrong results and not outside memory.
"""

from dataclasses import dataclass

from flydsl import expr as fx
from flydsl._mlir.dialects import llvm as _llvm
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.control import loop
from fourwave.blocks.flydsl.memory import OUT_OF_RANGE, Buffer, minimum, select
from fourwave.blocks.flydsl.schedule import num_tiles
from fourwave.blocks.flydsl.tiles import WAVE

# Shifts to the right by 1, 2, 4, 8 inside rows of 16 lanes; then lane 15 of a row to the whole next row, and lane 31 to the upper half
# (DPP row_shr, row_bcast; AMD CDNA3 ISA guide, "DPP_CTRL enumeration"): (control, rows that receive).
_SUM_STEPS = ((0x111, 0xF), (0x112, 0xF), (0x114, 0xF), (0x118, 0xF), (0x142, 0xA), (0x143, 0xC))


@dsl_loc_tracing
def running_sums(value):
    """Int32 -> Int32: the sum over this lane and all before it."""
    zero = as_ir_value(fx.Int32(0))
    for control, rows in _SUM_STEPS:
        moved = _rocdl.update_dpp(fx.Int32.ir_type, zero, as_ir_value(value), control, rows, 0xF, False)
        value = value + fx.Int32(moved)
    return value


@dsl_loc_tracing
def of_lane(value, lane):
    """The Int32 of one lane (Int32, uniform), for all."""
    return fx.Int32(_rocdl.readlane(fx.Int32.ir_type, as_ir_value(value), as_ir_value(fx.Int32(lane))))


@dsl_loc_tracing
def count_lanes(condition):
    """How many lanes hold the condition."""
    ballot = fx.Int64(_rocdl.ballot(fx.Int64.ir_type, as_ir_value(fx.Boolean(condition))))
    halves = [fx.Int32(ballot), fx.Int32(ballot >> 32)]
    return sum((fx.Int32(_llvm.intr_ctpop(as_ir_value(half))) for half in halves), fx.Int32(0))


@dataclass
class Group:
    """index: of the group; first, end: its first row, and the row past its last; m_tile: tile of rows inside it. All uniform Int32."""

    index: fx.Int32
    first: fx.Int32
    end: fx.Int32
    m_tile: fx.Int32


class Sizes:
    """m_sizes as a kernel argument. words: 32-bit words of one size (int64: the low one counts)."""

    def __init__(self, tensor, words, groups, rows, lane):
        self.words, self.groups, self.rows, self.lane = words, groups, rows, lane
        self.buffer = Buffer(tensor, fx.Int64(0), fx.Int64(groups) * (4 * words))
        self.chunks = (groups + (WAVE - 1)) // WAVE

    def read(self, chunk):
        """Sizes of groups 64 * chunk .., one per lane; 0 past the last."""
        index = chunk * WAVE + self.lane
        size = self.buffer.load(select(index < self.groups, index * (4 * self.words), OUT_OF_RANGE), 1, fx.Int32)[0]
        return minimum(select(size < 0, 0, size), self.rows)

    def totals(self, tile):
        """(rows in all groups, tiles of `tile` rows that cover them, group by group)."""

        def add(chunk, state):
            size = self.read(chunk)
            return [
                state[0] + of_lane(running_sums(size), WAVE - 1),
                state[1] + of_lane(running_sums(num_tiles(size, tile)), WAVE - 1),
            ]

        return loop(self.chunks, [fx.Int32(0), fx.Int32(0)], add)

    def with_tile(self, t, tile):
        """The Group that tile t belongs to; of tiles past all groups, group `groups` with the rows that are left."""
        zero = fx.Int32(0)

        def look(chunk, state):
            rows_before, tiles_before, index, first, end, m_tile = state
            size = self.read(chunk)
            rows_to, tiles_to = running_sums(size), running_sums(num_tiles(size, tile))
            at = count_lanes(tiles_before + tiles_to <= t)
            lane = minimum(at, fx.Int32(WAVE - 1))
            here = (index == self.groups) & (at < WAVE)
            group_size = of_lane(size, lane)
            group_first = rows_before + of_lane(rows_to, lane) - group_size
            before = tiles_before + of_lane(tiles_to, lane) - num_tiles(group_size, tile)
            return [
                rows_before + of_lane(rows_to, WAVE - 1),
                tiles_before + of_lane(tiles_to, WAVE - 1),
                select(here, chunk * WAVE + at, index),
                select(here, group_first, first),
                select(here, group_first + group_size, end),
                select(here, t - before, m_tile),
            ]

        state = [zero, zero, self.groups, zero, zero, zero]
        rows, tiles, index, first, end, m_tile = loop(self.chunks, state, look)
        none = index == self.groups
        return self._inside(
            index, select(none, rows, first), select(none, self.rows, end), select(none, t - tiles, m_tile)
        )

    def with_index(self, index):
        """The Group with number index; m_tile 0."""

        def add(chunk, state):
            size = self.read(chunk)
            to = running_sums(size)
            lane = index - chunk * WAVE
            inside = lane < WAVE
            return [
                state[0] + of_lane(to, select(inside, lane, WAVE - 1)),
                select(inside, of_lane(size, select(inside, lane, 0)), 0),
            ]

        end, size = loop(index // WAVE + 1, [fx.Int32(0), fx.Int32(0)], add)
        return self._inside(index, end - size, end, fx.Int32(0))

    def _inside(self, index, first, end, m_tile):
        """Sizes that add up to more rows than there are."""
        first, end = (minimum(select(row < 0, 0, row), self.rows) for row in (first, end))
        return Group(index, first, end, m_tile)


@dsl_loc_tracing
def matrix_view(tensor, offset, rows, columns, row_stride):
    """The matrix [rows, columns] that begins `offset` elements (Int64) into a kernel argument; the inner stride is 1."""
    start = fx.add_offset(fx.get_iter(tensor), fx.make_int_tuple(fx.Int64(offset)))
    return fx.make_view(start, fx.make_layout((rows, columns), (row_stride, 1)))


@dsl_loc_tracing
def vector_view(tensor, offset, count):
    """The `count` elements that begin `offset` elements (Int64) into a kernel argument."""
    start = fx.add_offset(fx.get_iter(tensor), fx.make_int_tuple(fx.Int64(offset)))
    return fx.make_view(start, fx.make_layout((count,), (1,)))
