"""gfx950: fragments of 32-bit operands whose K is not contiguous, for which there are no transposing LDS reads.

A chunk of 16 bytes in LDS is four neighbouring columns of one k, as in memory. Where a wave has four fragments to weave
(tiles.OperandTile.group), a lane reads its own four columns at each k, and fragments are parts of what it read by name. Where it has
two or one, as many lanes as share a chunk's columns (two or four) read it each at another k, and exchange: each keeps the columns
that are its own, and receives the others' k of them. All reads are 16 bytes a lane, and none brings a byte twice.
"""

from flydsl import expr as fx

from fourwave.blocks.flydsl.memory import QUAD_XOR, lds_read, move_lanes
from fourwave.blocks.flydsl.tiles import LANE_GROUPS, MMA_M, log2

COLUMNS = 4  # of a chunk
LANE_K = 4  # k of one lane in a slice


class ColumnFragments:
    """Reads one wave's fragments from a stage in LDS; the interface is that of loaders.Fragments."""

    def __init__(self, tile, fmt, first_row, count, lane):
        """first_row: first column of the wave's part of the tile; count: fragments of 16 each."""
        assert tile.in_columns and count % tile.group == 0, (count, tile)
        self.tile, self.dtype, self.count = tile, fmt.dtype, count
        self.reads = self.values = count
        self.sharing = COLUMNS // tile.group  # lanes that read the same columns
        in_group = lane % MMA_M
        self.odd = [((lane >> bit) & 1) == 1 for bit in range(log2(self.sharing))]
        line = lane // MMA_M * LANE_K + in_group % self.sharing
        # The swizzle reaches 16 chunks: one base per group of fragments that it makes different, the others by offset.
        group_chunks = MMA_M * tile.group // COLUMNS
        self.groups = count // tile.group
        self.period = min(self.groups, max(1, min(tile.chunks_per_line, 16) // group_chunks))
        self.group_bytes = MMA_M * tile.group * tile.elem_bytes
        chunk = first_row // COLUMNS + in_group // self.sharing
        self.bases = [tile.address(line, chunk + i * group_chunks) for i in range(self.period)]

    def read(self, lds, stage_offset, k_slice):
        """What LDS holds of one slice, a list of Vectors: of each group of fragments, chunks of successive k."""
        line_bytes = self.tile.line_bytes
        offset = stage_offset + k_slice * (LANE_GROUPS * LANE_K) * line_bytes
        bases = [base + offset for base in self.bases]
        return [
            lds_read(
                lds, bases[i % self.period] + (i - i % self.period) * self.group_bytes + k * line_bytes, 4, self.dtype
            )
            for i in range(self.groups)
            for k in range(0, LANE_K, self.sharing)
        ]

    def sort(self, values):
        """Fragments out of what read() returned."""
        group, per_group = self.tile.group, self.tile.group  # fragments, and chunks of each group
        fragments = []
        for first in range(0, len(values), per_group):
            words = [word for chunk in values[first : first + per_group] for word in self._exchanged(chunk)]
            # Word: fragment in the lowest bits, then k.
            fragments += [fx.Vector.from_elements(words[q::group], self.dtype) for q in range(group)]
        return fragments

    def _exchanged(self, chunk):
        """A bit of the column for a bit of k, for each bit of the lane's number that tells k apart."""
        words = [chunk[i] for i in range(COLUMNS)]
        for bit, odd in enumerate(self.odd):
            step = self.tile.group << bit
            for i in range(COLUMNS):
                if not i & step:
                    low, high = words[i], words[i | step]
                    words[i] = odd.select(_other_lane(high, bit), low)
                    words[i | step] = odd.select(high, _other_lane(low, bit))
        return words


def _other_lane(value, bit):
    """The Float32 of the lane whose number differs in one bit, 0 or 1."""
    word = value.bitcast(fx.Int32)
    return move_lanes(word, word, QUAD_XOR[bit]).bitcast(fx.Float32)
