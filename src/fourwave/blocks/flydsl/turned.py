"""gfx942: operand tiles whose K is not contiguous, turned in registers on their way from global memory to LDS.

    load        a lane's 16-byte chunks, each neighbouring columns of one k; its loads bring successive k of the same columns
    exchange    lanes that hold other k of the same columns: each keeps a part of the columns and gets all k of them
    transpose   inside a lane, with byte permutes
    write       16 bytes: a few columns with as many k as one matrix instruction takes of a lane (turned_tiles.TurnedTile)

Which lanes hold what is turned_tiles.Plan's. Exchanges move whole registers where they can: a move across lanes (DPP) that leaves
half of the banks of four lanes as they are.
"""

from flydsl import expr as fx

from fourwave.blocks.flydsl.dequantize import bfloat16_pairs, scale_factor
from fourwave.blocks.flydsl.memory import (
    ALL_BANKS,
    OUT_OF_RANGE,
    QUAD_XOR,
    Buffer,
    lds_read,
    lds_write,
    minimum,
    move_lanes,
    permute_bytes,
    select,
)
from fourwave.blocks.flydsl.tiles import CHUNK_BYTES, LANE_GROUPS, MMA_M, log2

# DPP controls (memory.QUAD_XOR).
_FROM_BELOW = {2: 0x114, 3: 0x118}  # row_shr: lane n takes lane n - 4, or n - 8
_FROM_ABOVE = {2: 0x104, 3: 0x108}  # row_shl
_BANKS_SET = {2: 0b1010, 3: 0b1100}  # banks of the lanes whose bit is set

# Bytes 0-3 are the first word's, 4-7 the second's (memory.permute_bytes): lower or upper halves of both, even or odd bytes.
_HALVES = (0x05040100, 0x07060302)
_BYTES = (0x06020400, 0x07030501)
# The same of a lane's own word (first) and another lane's; the lane whose bit is set has the later k.
_OWN_HALVES = (0x05040100, 0x03020706)
_OWN_BYTES = (0x06020400, 0x03070105)


class TurnedColumns:
    """An operand tile on its way through registers; the interface is that of loaders.StagedTile."""

    def __init__(self, source, image, thread):
        """source: GlobalTile of image.in_memory(...); image: TurnedTile."""
        self.image, self.tile, self.source = image, source.tile, source
        self.plan, self.word_bits = self.tile.plan, self.tile.word_bits
        self.loads = self.values = self.tile.loads
        self.writes = image.loads
        self.selectors = {
            each: select(((thread >> each.lane_bit) & 1) == 1, selectors[1], selectors[0])
            for each in self.plan.exchanges
            if each.column_bit < self.word_bits
            for selectors in [_OWN_BYTES if (self.word_bits, each.column_bit) == (2, 0) else _OWN_HALVES]
        }
        self.held = self.tile.held(thread)
        self.bases = {}

    def load(self, k0):
        """This lane's chunks of one stage, `values` Vectors of four Int32."""
        buffer, offsets = self.source.step(k0)
        return [buffer.load(offset, 4, fx.Int32) for offset in offsets]

    def store(self, values, lds, stage_offset):
        """What load() brought, turned, to LDS."""
        words = self._turned(values)
        for column, k in self._chunks(words):
            chunk = [word for c in range(self.image.columns) for word in self._run(words, column + c, k)]
            self._write(chunk, lds, stage_offset, column, k)

    def _chunks(self, words):
        """(column, k), relative to the lane's first, of the chunks that it writes."""
        image = self.image
        return [(c, k) for k, c in sorted(words) if c % image.columns == 0 and k % image.chunk_k == 0]

    def _run(self, words, column, k):
        """The words of one column's part of a chunk."""
        return [words[k + step, column] for step in range(0, self.image.chunk_k, 1 << self.word_bits)]

    def _write(self, chunk, lds, stage_offset, column, k):
        image = self.image
        line, place = image.place(column, k)
        low = line % MMA_M
        if (low, place) not in self.bases:
            # Bits of the lane's own place are others.
            first_line, first = image.place(*self.held)
            self.bases[low, place] = image.address(first_line | low, first | place)
        at = self.bases[low, place] + stage_offset + (line - low) * image.line_bytes
        lds_write(lds, at, fx.Vector.from_elements(chunk, fx.Int32))

    def _turned(self, values):
        """{(k, column): Int32}: as many k of one column as a word holds; both relative to the lane's first (tile.held)."""
        bits = self.word_bits
        words = {(k, j << bits): chunk[j] for k, chunk in enumerate(values) for j in range(4)}
        in_word = list(range(bits))
        for each in self.plan.exchanges:
            if each.column_bit < bits:
                words = {at: self._swap_parts(word, each) for at, word in words.items()}
                in_word.remove(each.column_bit)
                continue
            column_bit, k_bit, exchanged = 1 << each.column_bit, 1 << each.k_bit, {}
            for (k, column), low in words.items():
                if not column & column_bit:
                    high, lanes = words[k, column | column_bit], _BANKS_SET[each.lane_bit]
                    exchanged[k, column] = move_lanes(high, low, _FROM_BELOW[each.lane_bit], lanes)
                    exchanged[k | k_bit, column] = move_lanes(low, high, _FROM_ABOVE[each.lane_bit], ALL_BANKS ^ lanes)
            words = exchanged
        for bit in reversed(in_word):
            selectors = _BYTES if (bits, bit) == (2, 0) else _HALVES
            transposed = {}
            for (k, column), first in words.items():
                if not k & (1 << bit):
                    second = words[k | (1 << bit), column]
                    for half in (0, 1):
                        transposed[k, column | half << bit] = permute_bytes(second, first, selectors[half])
            words = transposed
        return words

    def _swap_parts(self, word, each):
        other = move_lanes(word, word, QUAD_XOR[each.lane_bit])
        return permute_bytes(other, word, self.selectors[each])


class TurnedCodes(TurnedColumns):
    """8-bit codes with scales of blocks of 32 k, which become bfloat16 once they are turned (as loaders.StagedCodes).

    A lane loads those of the 16 columns of one chunk, of the one block that its k are in. All lanes that exchange columns load the same
    16, and each uses those of the columns that it ends up with.
    """

    def __init__(self, source, scale, image, code_format, row0, K, thread):
        super().__init__(source, image, thread)
        self.format, self.K, self.scale = code_format, K, scale
        if image.pairs:
            row0 = row0 >> 1
        self.row0 = row0
        self.scale_rows = fx.Int32(fx.get_scalar(scale.shape[0]))
        self.scale_columns = fx.Int32(fx.get_scalar(scale.shape[1]))
        self.scale_row_bytes = fx.Int64(fx.get_scalar(scale.stride[0]))
        column, k = self.held
        exchanged = {each.column_bit for each in self.plan.exchanges}
        # Four columns are a word. Of the lane's words these bits of the number are its own.
        self.own = [bit - 2 for bit in sorted(exchanged) if bit >= 2]
        self.column = column
        # Where lanes have exchanged parts of words, a lane has some columns of four.
        self.shift = (column & 3) * 8 if min(exchanged, default=2) < 2 else None
        at = image.paired(column & -CHUNK_BYTES, self.scale_columns >> 1)
        offset = (k >> 5) * fx.Int32(self.scale_row_bytes) + at
        self.offset = select(at < self.scale_columns - row0, offset, OUT_OF_RANGE)
        self.loads = self.values = self.tile.loads + 1

    def load(self, k0):
        """This lane's chunks of codes of one stage, then their scales: `values` Vectors."""
        block = k0 >> 5
        used_rows = minimum(self.scale_rows - block, fx.Int32(max(1, self.image.tile_k // 32)))
        num_bytes = (used_rows - 1) * fx.Int32(self.scale_row_bytes) + (self.scale_columns - self.row0)
        byte_offset = fx.Int64(block) * self.scale_row_bytes + fx.Int64(self.row0)
        scales = Buffer(self.scale, byte_offset, select(k0 < self.K, num_bytes, 0))
        return [*super().load(k0), scales.load(self.offset, 4, fx.Int32)]

    def _scale_words(self, scales):
        """{first column of four, relative to the lane's first: Int32 of their scales}"""
        words = {i: scales[i] for i in range(4)}
        for bit in self.own:
            has_bit = ((self.column >> (bit + 2)) & 1) == 1
            words = {i: select(has_bit, words[i | 1 << bit], word) for i, word in words.items() if not (i >> bit) & 1}
        if self.shift is not None:
            words = {i: fx.Int32(fx.Uint32(word) >> fx.Uint32(self.shift)) for i, word in words.items()}
        return {4 * i: word for i, word in words.items()}

    def store(self, values, lds, stage_offset):
        """What load() brought, turned and dequantized, to LDS."""
        words = self._turned(values[: self.tile.loads])
        scale_of = self._scale_words(values[self.tile.loads])
        factors = {column: scale_factor(scale_of[column & -4], column & 3) for _, column in words}
        for column, k in self._chunks(words):
            chunk = []
            for c in range(column, column + self.image.columns):
                for word in self._run(words, c, k):
                    chunk += bfloat16_pairs([word], [factors[c]] * 4, self.format)
            self._write(chunk, lds, stage_offset, column, k)


class TurnedFragments:
    """Reads one wave's fragments from a stage of a TurnedTile; the interface is that of loaders.Fragments."""

    def __init__(self, tile, fmt, first_row, count, lane):
        """first_row: first column of the wave's part of the tile; count: fragments of 16 each."""
        assert count % tile.columns == 0, (count, tile)
        self.tile, self.count = tile, count
        self.dtype, self.elems = fmt.dtype, fmt.fragment_elems(CHUNK_BYTES)
        self.chunks = tile.fragment_bytes // CHUNK_BYTES
        self.reads = self.values = count * self.chunks
        line = (first_row >> log2(tile.columns)) + lane % MMA_M
        # The swizzle reaches eight chunks: two reads of four lane groups.
        units = range(0, min(tile.chunks_per_line, 2 * LANE_GROUPS), LANE_GROUPS)
        self.bases = [tile.address(line, lane // MMA_M + unit) for unit in units]

    def read(self, lds, stage_offset, k_slice):
        """What LDS holds of one slice: chunks of tile.columns fragments each, a list of Vectors."""
        columns, line_bytes = self.tile.columns, self.tile.line_bytes
        out = []
        for first in range(0, self.count, columns):
            for part in range(self.chunks * columns):
                unit = k_slice * self.chunks * columns + part
                at = unit // len(self.bases) * (len(self.bases) * LANE_GROUPS * CHUNK_BYTES)
                at += first // columns * MMA_M * line_bytes
                base = self.bases[unit % len(self.bases)] + stage_offset
                out.append(lds_read(lds, base + at, self.elems, self.dtype))
        return out

    def sort(self, values):
        """Fragments out of what read() returned: names of parts of registers."""
        columns, fragments = self.tile.columns, []
        for first in range(0, self.values, self.chunks * columns):
            parts = [values[first + c * columns : first + (c + 1) * columns] for c in range(self.chunks)]
            for q in range(columns):
                chunks = [self._column(part, q) for part in parts]
                fragments.append(
                    chunks[0] if self.chunks == 1 else chunks[0].shuffle(chunks[1], list(range(2 * self.elems)))
                )
        return fragments

    def _column(self, chunks, q):
        """16 bytes of fragment q of those that share `chunks`."""
        columns, share = self.tile.columns, self.elems // self.tile.columns
        if columns == 1:
            return chunks[0]
        if columns == 2:
            places = [*range(q * share, (q + 1) * share)]
            return chunks[0].shuffle(chunks[1], places + [self.elems + place for place in places])
        assert share == 1, self.tile
        return fx.Vector.from_elements([chunk[q] for chunk in chunks], self.dtype)
