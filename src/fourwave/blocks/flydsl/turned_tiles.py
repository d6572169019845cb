"""LDS images of gfx942's operands whose K is not contiguous in memory, dense and grouped. Host side.

gfx942 has no transposing LDS reads. Such a tile is turned in registers between global memory and LDS (turned.py), so that both
sides of LDS move 16 bytes a lane, without bank conflicts. A chunk of the image holds `columns` neighbouring fragments' elements
of one row of theirs, each with as many k as one matrix instruction takes of a lane:

  16 and 8 bits   two columns, 8 bytes of k each (one column and 16 bytes where a wave has a single fragment)
  32 bits         four columns, one k each: the chunk of memory as it is (two or one where a wave has fewer fragments)

A lane then reads `columns` chunks for as many fragments, and takes each instruction's operand out of them by name: nothing is
sorted. The k of a lane are those of a tile whose K is contiguous, so that results are the same bits.

Which columns a fragment stands for is what OperandTile says where K is not contiguous (`group` fragments woven).
"""

import functools
import itertools
from dataclasses import dataclass

from fourwave.blocks.flydsl.tiles import (
    CHUNK_BYTES,
    LANE_GROUPS,
    LOAD_BYTES,
    MMA_M,
    WORKGROUP,
    OperandTile,
    log2,
)

BANK_GROUPS = 8  # of 16 bytes: gfx942's 32 banks; eight consecutive lanes write at once


@dataclass(frozen=True)
class TurnedTile(OperandTile):
    """The image. elem_bytes: in LDS; codes that become 16-bit numbers on the way have 1 in memory (`in_memory`)."""

    columns: int = 1  # that share a chunk; divides group

    @classmethod
    def of(cls, extent, tile_k, elem_bytes, banks, group, pairs=0, fragment_bytes=CHUNK_BYTES):
        """columns: what the matrix instruction allows, and the fragments that are woven."""
        columns = min(group, 4 if elem_bytes == 4 else 2)
        return cls(extent, tile_k, False, elem_bytes, banks, group, fragment_bytes, pairs=pairs, columns=columns)

    @property
    def chunk_k(self):
        """k of each column in a chunk."""
        return CHUNK_BYTES // self.elem_bytes // self.columns

    @property
    def lines(self):
        return self.extent // self.columns

    @property
    def line_bytes(self):
        return self.tile_k * self.columns * self.elem_bytes

    def problem(self):
        """Why this tile cannot be laid out, or None."""
        if self.line_bytes > LOAD_BYTES:
            return f"a line of {self.line_bytes} bytes in LDS; at most {LOAD_BYTES} are possible"
        return self.in_memory(self.elem_bytes).problem()

    def in_memory(self, elem_bytes):
        """The tile as it lies in memory, with elements of elem_bytes."""
        return TurnedSource(self.extent, self.tile_k, False, elem_bytes, self.banks, pairs=self.pairs, image=self)

    def place(self, column, k):
        """(line, chunk) of an element. Bits of the two come from bits of column and k one by one."""
        per_fragment, per_chunk = log2(self.group), log2(self.columns)
        row = (column >> per_fragment) & (MMA_M - 1)
        woven = column & (self.group - 1)
        others = column >> (per_fragment + log2(MMA_M)) << per_fragment
        line = (((others | woven) >> per_chunk) << log2(MMA_M)) | row
        # Of a slice of K: the chunks that lane groups 0 to 3 read with one instruction lie side by side.
        part, unit = k >> log2(self.chunk_k), LANE_GROUPS * self.columns
        lane_group = (part >> per_chunk) & (LANE_GROUPS - 1)
        chunk = (part & -unit) | ((part & (self.columns - 1)) << log2(LANE_GROUPS)) | lane_group
        return line, chunk

    def key(self, line):
        """XORed onto the chunk index: lines 0-3, and 4-7 at the next lane group's chunk, lie in different banks (as where K is
        contiguous). Bit 3 takes part for writes, whose lanes hold lines further apart."""
        bit3 = (line >> 3) & 1
        if self.chunks_per_line == LANE_GROUPS:
            return ((line >> 1) & 3) ^ bit3
        return (line & 7) ^ bit3


@dataclass(frozen=True)
class Exchange:
    """Two lanes that differ in one bit change places with a bit of the columns: each keeps the columns whose bit is its own,
    and receives the other's k of them."""

    lane_bit: int
    column_bit: int
    k_bit: int


@dataclass(frozen=True)
class Plan:
    """How a workgroup's threads turn a tile.

    threads     for each bit of the thread's number: ("column" | "k", bit) of the chunk that it loads
    exchanges   in this order; the first ones move registers, the others parts of them
    """

    threads: tuple
    exchanges: tuple


@dataclass(frozen=True)
class TurnedSource(OperandTile):
    """The tile in memory: 16 bytes are neighbouring columns of one k. Load i of a thread brings k + i of the same columns."""

    image: TurnedTile | None = None

    lines_per_load = 1
    source_period = 1

    @property
    def loads(self):
        return self.stage_bytes // LOAD_BYTES

    def source_row(self, line):
        return line

    def key(self, line):
        return line & 0

    def first_chunk(self, thread):
        """(line, chunk) of a thread's first load."""
        line = chunk = thread & 0
        for at, (kind, bit) in enumerate(self.plan.threads):
            value = ((thread >> at) & 1) << (bit if kind == "k" else bit - log2(self.chunk_elems))
            line, chunk = (line | value, chunk) if kind == "k" else (line, chunk | value)
        return line, chunk

    def held(self, thread):
        """(column, k) of the first element of a thread's once all lanes have exchanged."""
        column = k = thread & 0
        moved = {each.lane_bit: each for each in self.plan.exchanges}
        for at, (kind, bit) in enumerate(self.plan.threads):
            value = (thread >> at) & 1
            if at in moved:
                column = column | value << moved[at].column_bit
            elif kind == "k":
                k = k | value << bit
            else:
                column = column | value << bit
        return column, k

    @property
    def plan(self):
        return _plan(self)

    @property
    def word_bits(self):
        """Bits of a column that tell elements of one 32-bit register apart."""
        return log2(4 // self.elem_bytes)


@functools.cache
def _plan(source):
    """The way to turn a tile that writes LDS without bank conflicts and loads runs of memory that are as long as can be.

    All tiles of config.candidates have one. Where a wave has a single fragment (or swiglu two) and tile_k is one slice, which none of
    them is, two lanes that write meet in a bank.

    A lane's loads and the lanes it exchanges with bring the k of one chunk. Lanes that differ in bits 2 and 3 exchange whole
    registers, those that differ in bits 0 and 1 parts of one (turned.py).
    """
    image, words = source.image, source.word_bits
    chunk_bits, load_bits = log2(image.chunk_k), log2(source.loads)
    column_bits = range(log2(source.chunk_elems), log2(source.extent))  # of whole chunks of memory
    number = max(0, chunk_bits - load_bits)
    in_chunk = log2(image.columns)
    registers = [bit for bit in (words + 1, words) if bit >= in_chunk]
    parts = list(reversed(range(in_chunk, words)))
    by_register = min(number, len(registers))
    by_part = parts[: number - by_register]
    assert len(by_part) == number - by_register, source
    left = [bit for bit in range(chunk_bits) if bit not in by_part]
    assert left[: min(load_bits, len(left))] == list(range(min(load_bits, len(left)))), source
    inner = left[load_bits:]
    free_k = [("k", bit) for bit in range(max(chunk_bits, load_bits), log2(source.tile_k))]
    free = [("column", bit) for bit in column_bits] + free_k

    def bank(column, k):
        line, chunk = image.place(column, k)
        return image.address(line, chunk) // CHUNK_BYTES % BANK_GROUPS

    best = None
    for chosen in itertools.permutations(registers, by_register):
        for lanes in itertools.permutations((2, 3), by_register):
            for part_lanes in itertools.permutations((0, 1), len(by_part)):
                exchanges = tuple(
                    Exchange(*each)
                    for each in (
                        *zip(lanes, chosen, inner, strict=True),
                        *((lane, bit, bit) for lane, bit in zip(part_lanes, by_part, strict=True)),
                    )
                )
                images = {each.lane_bit: bank(1 << each.column_bit, 0) for each in exchanges}
                low = [bit for bit in range(3) if bit not in images]
                for rank, taken in enumerate(itertools.permutations(free, len(low))):
                    banks = images | {
                        at: bank(1 << bit, 0) if kind == "column" else bank(0, 1 << bit)
                        for at, (kind, bit) in zip(low, taken, strict=True)
                    }
                    spanned = {0}
                    for bit in range(3):
                        spanned |= {each ^ banks[bit] for each in spanned}
                    cost = (-len(spanned), rank)
                    if best is None or cost < best[0]:
                        best = cost, exchanges, dict(zip(low, taken, strict=True))
    assert best is not None, source
    _, exchanges, low = best
    threads = {each.lane_bit: ("k", each.k_bit) for each in exchanges} | low
    rest = iter([each for each in free if each not in low.values()])
    threads |= {at: next(rest) for at in range(log2(WORKGROUP)) if at not in threads}
    assert next(rest, None) is None, source
    return Plan(tuple(threads[at] for at in range(log2(WORKGROUP))), exchanges)
