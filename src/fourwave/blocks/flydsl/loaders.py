"""Operand tiles: global memory to LDS, and LDS to fragments.

A GlobalTile is the operand as one workgroup sees it: the rows (of M or N) of its output tile, all of K. Each K step
re-bases the buffer resource with 64-bit arithmetic, so operands of any size are addressed with 32-bit offsets; the
offsets inside one step are fixed per lane. Rows past the operand and k past K read as zeros.
"""

import itertools

from flydsl import expr as fx

from fourwave.blocks.flydsl.dequantize import bfloat16_pairs, scale_factor
from fourwave.blocks.flydsl.memory import (
    MAX_BUFFER_BYTES,
    OUT_OF_RANGE,
    QUAD_XOR,
    Buffer,
    lds_read,
    lds_read_transposed,
    lds_write,
    minimum,
    move_lanes,
    permute_bytes,
    select,
    swap_lanes,
)
from fourwave.blocks.flydsl.tiles import (
    CHUNK_BYTES,
    LANE_GROUPS,
    LOAD_BYTES,
    MMA_M,
    SCALE_BLOCKS,
    SCALE_K,
    SHUFFLED_K,
    WAVE,
    WORKGROUP,
    CodeTile,
    log2,
)


class GlobalTile:
    """The part of one operand that a workgroup reads.

    tensor      the kernel argument: [extent, K] or, where K is not contiguous, [K, extent]; the inner stride is 1
    tile        OperandTile
    row0        first row (of M or N) of the output tile; of a tile of pairs (OperandTile.pairs) half of it is in each half
                of the operand
    K           reduction length; tensor may be longer along K, then with zeros from K on
    """

    def __init__(self, tensor, tile, row0, K, thread):
        if tile.packed:  # a byte holds two codes
            row0, K = (row0, K >> 1) if tile.k_contiguous else (row0 >> 1, K)
        self.tensor, self.tile = tensor, tile
        self.rows = fx.Int32(fx.get_scalar(tensor.shape[0]))
        self.columns = fx.Int32(fx.get_scalar(tensor.shape[1]))
        self.row_bytes = fx.Int64(fx.get_scalar(tensor.stride[0])) * tile.elem_bytes
        self.K = K
        if tile.pairs:
            row0 = row0 >> 1
        self.row0 = row0
        self.half = (self.rows if tile.k_contiguous else self.columns) >> 1

        line, chunk = tile.first_chunk(thread)
        self.chunk_elem = chunk * tile.chunk_elems  # first element of this lane's chunks along a line
        lines = [line + i * tile.lines_per_load for i in range(tile.loads)]
        rows = [tile.source_row(at) for at in lines]
        if tile.k_contiguous:
            rows = [tile.paired(tile.spread(row), self.half) for row in rows]
            extent = self.rows
        else:
            self.chunk_elem = tile.paired(tile.spread(self.chunk_elem), self.half)
            extent = self.columns
        # The second half of a tile may begin past the operand.
        self.end = select(row0 < extent, K, 0) if tile.split else K
        self.pitch = pitch = fx.Int32(self.row_bytes)
        self.offsets = [row * pitch + self.chunk_elem * tile.elem_bytes for row in rows]
        # Where rows of successive loads are a known distance apart, one offset per lane does.
        self.load_rows = None
        if tile.lines_per_load % tile.source_period == 0 and not (tile.pairs and tile.k_contiguous):
            at = [i * tile.lines_per_load for i in range(tile.loads)]
            self.load_rows = [tile.spread(line) for line in at] if tile.k_contiguous else at
            self.offsets = self.offsets[:1]
        elif tile.packed and not tile.k_contiguous:
            # source_row moves bits, those of the load's number among them.
            self.load_rows = [tile.source_row(i * tile.lines_per_load) for i in range(tile.loads)]
            self.offsets = self.offsets[:1]
        if not tile.k_contiguous:
            # A chunk past the end of a row would read the next row; such columns are never stored, but what they
            # read must not be outside the operand.
            inside = self.chunk_elem < self.columns - row0
            self.offsets = [select(inside, offset, OUT_OF_RANGE) for offset in self.offsets]

    def step(self, k0):
        """(Buffer, offsets) for the K step that starts at k0 (Int32, uniform); everything is zero from K on."""
        tile = self.tile
        size = tile.elem_bytes
        if tile.packed and tile.k_contiguous:
            k0 = k0 >> 1
        if tile.k_contiguous:
            first, start = self.row0, k0
            reach = tile.extent + tile.split
            used_rows = minimum(self.rows - self.row0, self.half + reach if tile.pairs else fx.Int32(reach))
            used_columns = self.columns - k0
        else:
            first, start = k0, self.row0
            used_rows = minimum(self.rows - k0, fx.Int32(tile.tile_k))
            used_columns = self.columns - self.row0
        byte_offset = fx.Int64(first) * self.row_bytes + fx.Int64(start) * size
        # 32 bits: a tile spans less than 2**31 bytes.
        num_bytes = (used_rows - 1) * self.pitch + used_columns * size
        buffer = Buffer(self.tensor, byte_offset, select(k0 < self.end, num_bytes, 0))
        offsets = self.offsets
        if tile.k_contiguous:
            inside = self.chunk_elem < self.K - k0
            offsets = [select(inside, offset, OUT_OF_RANGE) for offset in offsets]
        if self.load_rows is not None:
            # A tile spans less than 2**31 bytes: what is out of range stays so.
            offsets = [offsets[0] + self.pitch * row if row else offsets[0] for row in self.load_rows]
        return buffer, offsets


def load_direct(source, lds, stage_offset, k0, wave):
    """gfx950: one stage straight into LDS. Each wave issues tile.loads loads (vmcnt)."""
    buffer, offsets = source.step(k0)
    for i, offset in enumerate(offsets):
        # 64 lanes x 16 bytes land contiguously; the swizzle is in which chunk each lane fetches.
        wave_offset = stage_offset + (wave + i * (WORKGROUP // WAVE)) * (WAVE * CHUNK_BYTES)
        buffer.load_to_lds(lds, wave_offset, offset)


class StagedTile:
    """gfx942: an operand tile on its way from global memory to LDS through registers."""

    def __init__(self, source, dtype, thread):
        self.source, self.dtype, self.thread = source, dtype, thread
        self.loads = self.values = self.writes = source.tile.loads

    def load(self, k0):
        """This lane's chunks of one stage, `values` Vectors (the compiler waits for them where they are used)."""
        buffer, offsets = self.source.step(k0)
        return [buffer.load(offset, CHUNK_BYTES * 8 // self.dtype.width, self.dtype) for offset in offsets]

    def store(self, values, lds, stage_offset):
        """What load() brought, to LDS. Lanes write 16 contiguous bytes each: no bank conflicts."""
        for i, chunk in enumerate(values):
            lds_write(lds, stage_offset + self.thread * CHUNK_BYTES + i * (WORKGROUP * CHUNK_BYTES), chunk)


class StagedCodes:
    """gfx942: 8-bit codes with scales of blocks of 32 k, which become bfloat16 on their way to LDS; K is contiguous. (Where it is not:
    turned.TurnedCodes.) A lane's chunk of 16 codes has one scale. Numbers: dequantize.bfloat16_pairs.
    """

    def __init__(self, tensor, scale, image, code_format, row0, K, thread):
        self.image, self.format, self.K = image, code_format, K
        self.tile = CodeTile.of(image)
        self.source = GlobalTile(tensor, self.tile, row0, K, thread)
        if image.pairs:
            row0 = row0 >> 1
        self.row0 = row0
        self.scale = scale
        self.scale_rows = fx.Int32(fx.get_scalar(scale.shape[0]))
        self.scale_columns = fx.Int32(fx.get_scalar(scale.shape[1]))
        self.scale_row_bytes = fx.Int64(fx.get_scalar(scale.stride[0]))
        self.half = self.scale_rows >> 1
        per_line = self.tile.chunks_per_line
        line, self.chunk = thread // per_line, thread % per_line
        self.line = line
        pitch = fx.Int32(self.scale_row_bytes)
        rows = [image.source_row(line + i * self.tile.lines_per_load) for i in range(self.tile.loads)]
        self.scale_offsets = [image.paired(row, self.half) * pitch + (self.chunk >> 1) for row in rows]
        self.loads = self.values = 2 * self.tile.loads
        self.writes = 2 * self.tile.loads

    def load_codes(self, k0):
        buffer, offsets = self.source.step(k0)
        return [buffer.load(offset, 4, fx.Int32) for offset in offsets]

    def store(self, values, lds, stage_offset):
        """Codes, dequantized, to LDS: two chunks for each. values: those, and for each an Int32 whose lowest byte is the scale."""
        codes, scales = values[: self.tile.loads], values[self.tile.loads :]
        factors = [[scale_factor(scale[0], 0)] * CHUNK_BYTES for scale in scales]
        for i, chunk in enumerate(codes):
            words = bfloat16_pairs([chunk[w] for w in range(4)], factors[i], self.format)
            for half in (0, 1):
                # Lines of successive loads are a whole number of the swizzle's periods apart.
                at = self.image.address(self.line, 2 * self.chunk + half)
                at = at + i * self.tile.lines_per_load * self.image.line_bytes
                lds_write(lds, stage_offset + at, fx.Vector.from_elements(words[4 * half : 4 * half + 4], fx.Int32))


class ScaledRows(StagedCodes):
    """StagedCodes whose scales a lane loads for SCALE_K k of a row at once, 16 bytes. Two lanes have chunks of the same rows and block:
    of two rows each loads the scales of one, and gives them to the other.

    kept: scales stay in registers for SCALE_K k, and the kernel loads them (load_scales), apart from the codes; else they come with
    each tile's codes, of which the tile uses its own, and are in registers no longer than these.
    Rows of scales are whole chunks, zeros behind the last block: its neighbours in a row's last chunk meet codes that are zeros.
    """

    def __init__(self, *operand, kept):
        super().__init__(*operand)
        assert self.image.k_contiguous and self.image.tile_k <= 128, self.image
        self.kept, self.shared = kept, self.tile.loads % 2 == 0
        self.scale_offsets = [offset - (self.chunk >> 1) for offset in self.scale_offsets]  # of the row's first block
        self.odd = (self.chunk & 1) == 1
        if self.shared:
            pairs = zip(self.scale_offsets[::2], self.scale_offsets[1::2], strict=True)
            self.scale_offsets = [select(self.odd, second, first) for first, second in pairs]
        self.scale_loads = len(self.scale_offsets)
        self.loads = self.values = self.tile.loads + (0 if kept else self.scale_loads)
        # A tile has at most one word of scales; of the lane's chunk of 16 codes it is this byte.
        self.shift = (self.chunk >> 1) * 8

    def load(self, k0):
        """This lane's chunks of codes of one stage, and where they are not kept scales: `values` Vectors."""
        codes = self.load_codes(k0)
        return codes if self.kept else codes + self.load_scales(k0 & -SCALE_K)

    def load_scales(self, k0):
        """Those of SCALE_K k from k0 (Int32, uniform, a multiple of it) on: scale_loads Vectors of four Int32; zeros past K."""
        block = k0 >> 5
        extent = fx.Int32(self.image.extent)
        used_rows = minimum(self.scale_rows - self.row0, self.half + extent if self.image.pairs else extent)
        num_bytes = (used_rows - 1) * fx.Int32(self.scale_row_bytes) + self.scale_columns - block
        byte_offset = fx.Int64(self.row0) * self.scale_row_bytes + fx.Int64(block)
        scales = Buffer(self.scale, byte_offset, select(k0 < self.K, num_bytes, 0))
        return [scales.load(offset, 4, fx.Int32) for offset in self.scale_offsets]

    def store(self, values, scales, tile, lds, stage_offset):
        """What load() brought, dequantized, to LDS.

        scales, tile    kept: load_scales(), the blocks before left out (after), and the tile's number from there on
                        else: none, and the tile's number (Int32, uniform) from a multiple of SCALE_K on
        """
        at = self.image.tile_k // 32 * tile
        if self.kept:
            words = [scale[at // 4] for scale in scales]
        else:
            values, scales = values[: self.tile.loads], values[self.tile.loads :]
            second, upper = (at & 4) == 4, (at & 8) == 8
            words = [select(upper, select(second, s[3], s[2]), select(second, s[1], s[0])) for s in scales]
        words = [fx.Int32(fx.Uint32(word) >> fx.Uint32(self.shift + (at & 3) * 8)) for word in words]
        if self.shared:
            both = [(word, move_lanes(word, word, QUAD_XOR[0])) for word in words]
            words = [select(self.odd, *each) for own, other in both for each in ((other, own), (own, other))]
        super().store([*values, *(fx.Vector.filled(1, word, fx.Int32) for word in words)], lds, stage_offset)

    def after(self, scales, tiles):
        """scales without those of the first `tiles` tiles."""
        at = self.image.tile_k // 32 * tiles
        words, bits = at // 4, at % 4 * 8
        out = []
        for scale in scales:
            left = [fx.Uint32(scale[i]) if i < 4 else fx.Uint32(0) for i in range(words, words + 5)]
            if bits:
                left = [(low >> bits) | (high << (32 - bits)) for low, high in itertools.pairwise(left)]
            out.append(fx.Vector.from_elements([fx.Int32(word) for word in left[:4]], fx.Int32))
        return out


class PreshuffledRows:
    """Fragments of preshuffled weights [N, K], 8-bit codes, straight from global memory to registers.

    16 rows and SHUFFLED_K of K are 1024 contiguous bytes, of which lane 16 * g + r takes the 16 of row r and k = 16 * g on;
    rows of 16 follow each other at 16 * K bytes (ops/grouped_gemm/preshuffle.py). A lane's rows are those of geo.b's fragments
    (tiles.OperandTile.fragment_row), as if they had come through LDS.
    """

    def __init__(self, tensor, geo, n0, N, k_stride, k_end, first_row, lane):
        """n0: first row of the workgroup's tile, of pairs as in GlobalTile; k_stride: length of the rows in memory; first_row:
        of the wave's part of the tile."""
        tile = geo.b
        self.tensor, self.k_end = tensor, k_end
        half = N >> 1
        if tile.pairs:
            n0 = n0 >> 1
        self.row_bytes, self.chunks = fx.Int64(k_stride), tile.fragment_bytes // CHUNK_BYTES
        self.base, self.left = fx.Int64(n0) * self.row_bytes, fx.Int64(N - n0) * self.row_bytes
        group_bytes = k_stride * MMA_M
        self.offsets = []
        for j in range(geo.frags_n):
            row = tile.paired(first_row + tile.fragment_row(j, lane % MMA_M), half)
            in_group = (lane // MMA_M) * (MMA_M * CHUNK_BYTES) + (row & (MMA_M - 1)) * CHUNK_BYTES
            self.offsets.append((row >> log2(MMA_M)) * group_bytes + in_group)

    def load(self, k0):
        """The slice's fragments from k0 (Int32, uniform) on, on their way; zeros past K and N."""
        parts = []
        for chunk in range(self.chunks):
            k = k0 + chunk * SHUFFLED_K
            before = fx.Int64(k) * MMA_M
            # What is behind K in memory is the next 16 rows.
            num_bytes = minimum(self.left - before, fx.Int64(MAX_BUFFER_BYTES))
            parts.append(Buffer(self.tensor, self.base + before, (k < self.k_end).select(num_bytes, fx.Int64(0))))
        fragments = []
        for offset in self.offsets:
            chunks = [buffer.load(offset, 4, fx.Int32) for buffer in parts]
            fragments.append(chunks[0] if len(chunks) == 1 else chunks[0].shuffle(chunks[1], list(range(8))))
        return fragments


class Fragments:
    """Reads one wave's fragments of an operand from a stage in LDS.

    Only the swizzle makes addresses differ in more than a constant, so a few per-lane bases and immediate offsets do.

    Where K is not contiguous: gfx950's transposing reads, of 8- and 16-bit operands and packed codes. (32 bits: column_chunks.py; gfx942:
    turned.py.) Packed codes: a fragment is half of a chunk, and so are two neighbours. That the lanes of half a wave
    reach all banks, those of odd lane groups read the other fragment of two; sort() puts both right.
    """

    def __init__(self, tile, fmt, first_row, count, lane):
        """first_row: first row (of M or N) of the wave's part of the tile; count: fragments of 16 rows each."""
        self.tile, self.fmt, self.count = tile, fmt, count
        self.elems = fmt.fragment_elems(tile.fragment_bytes)
        self.chunks = tile.fragment_bytes // CHUNK_BYTES
        assert tile.k_contiguous or tile.transposing, tile
        self.values = count  # Vectors that read() returns
        group, in_group = lane // MMA_M, lane % MMA_M
        if tile.k_contiguous:
            # Lane: row in_group, chunk `group` of every four. One base per four chunks.
            line = first_row + in_group
            if self.chunks == 1:
                chunks = [tile.chunk(group, k_slice) for k_slice in range(tile.chunks_per_line // LANE_GROUPS)]
            else:
                chunks = [group + c for c in range(0, tile.chunks_per_line, LANE_GROUPS)]
            self.bases = [tile.address(line, chunk) for chunk in chunks]
            return
        # A transposing read takes `rows` rows of k and 16 columns from 16 lanes (memory.lds_read_transposed), a lane
        # receives `rows` k of one column. A lane group's k of a chunk are consecutive, as where K is contiguous.
        rows = self.rows = 16 if tile.packed else 8 // tile.elem_bytes
        line = tile.source_row(group * 2 * rows + in_group // (MMA_M // rows))
        if tile.packed:
            assert count % 2 == 0, count
            self.swapped = group & 1
            columns = [((first_row >> 1) + (i & ~1) * 8) + ((i & 1) ^ self.swapped) * 8 for i in range(count)]
        else:
            columns = [first_row + i * MMA_M + in_group % (MMA_M // rows) * rows for i in range(count)]
        # One base per address that the swizzle, which reaches 16 chunks, makes different; the others by offset.
        step = MMA_M // (2 if tile.packed else 1)
        self.period = min(len(columns), max(1, min(tile.extent, 16 * tile.chunk_elems) // step))
        self.step_bytes = step * tile.elem_bytes
        self.bases = [
            tile.address(line, column // tile.chunk_elems) + column % tile.chunk_elems * tile.elem_bytes
            for column in columns[: self.period]
        ]

    @property
    def reads(self):
        """LDS reads per slice."""
        return self.count * self.chunks * (1 if self.tile.k_contiguous else 2)

    def read(self, lds, stage_offset, k_slice):
        """What LDS holds of one slice, a list of Vectors: fragments, or what sort() makes into fragments."""
        if self.tile.k_contiguous:
            bases = self.bases[k_slice * self.chunks : (k_slice + 1) * self.chunks]
            return [self._read_row(lds, [base + stage_offset for base in bases], i) for i in range(self.count)]
        offset = stage_offset + k_slice * self.tile.slice_k * self.tile.line_bytes
        bases = [base + offset for base in self.bases]
        return [self._read_transposed(lds, self._at(bases, i)) for i in range(self.count)]

    def sort(self, values):
        """Fragments out of what read() returned."""
        if not self.tile.packed or self.tile.k_contiguous:
            return values
        swapped = self.swapped != 0
        pairs = zip(values[::2], values[1::2], strict=True)
        return [each for a, b in pairs for each in (swapped.select(b, a), swapped.select(a, b))]

    def _at(self, bases, i):
        return bases[i % self.period] + (i - i % self.period) * self.step_bytes

    def _read_row(self, lds, bases, i):
        at = i * MMA_M * self.tile.line_bytes
        chunks = [lds_read(lds, base + at, self.elems // self.chunks, self.fmt.dtype) for base in bases]
        return chunks[0] if self.chunks == 1 else chunks[0].shuffle(chunks[1], list(range(self.elems)))

    def _read_transposed(self, lds, at):
        # k + rows lies 2 * rows lines further (tiles.source_row swaps these two bits), the next chunk a chunk's k.
        parts = [
            lds_read_transposed(
                lds,
                at + (chunk * self.tile.slice_k // self.chunks + half) * self.tile.line_bytes,
                self.fmt.dtype,
                4 if self.tile.packed else None,
            )
            for chunk in range(self.chunks)
            for half in (0, 2 * self.rows)
        ]
        while len(parts) > 1:
            parts = [
                low.shuffle(high, list(range(2 * low.numel))) for low, high in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]


class GlobalScales:
    """The scales of the rows of one operand that a workgroup reads, SCALE_K of K at a time.

    tensor  e8m0 bytes or float32, [extent, blocks] or, where K is not contiguous, [blocks, extent]; rows of whole chunks, zeros behind the last block
    chunk   which chunk of ScaleTile this lane brings; none from tile.chunks on
    """

    def __init__(self, tensor, scale_tile, row0, K, chunk):
        self.tensor, self.tile = tensor, scale_tile
        self.k_contiguous = scale_tile.tile.k_contiguous
        self.rows = fx.Int32(fx.get_scalar(tensor.shape[0]))
        self.columns = fx.Int32(fx.get_scalar(tensor.shape[1]))
        self.row_bytes = fx.Int64(fx.get_scalar(tensor.stride[0])) * scale_tile.elem_bytes
        self.blocks = (K + (scale_tile.block_k - 1)) >> log2(scale_tile.block_k)
        if scale_tile.tile.pairs:
            row0 = row0 >> 1
        self.row0 = row0 = scale_tile.first_row(row0)
        self.half = (self.rows if self.k_contiguous else self.columns) >> 1
        self.pitch = pitch = fx.Int32(self.row_bytes)
        if self.k_contiguous:
            inside = chunk < scale_tile.chunks
            offset = scale_tile.tile.paired(scale_tile.row_of(chunk), self.half) * pitch
        else:
            line = chunk // scale_tile.line_chunks
            column = ((chunk % scale_tile.line_chunks) ^ scale_tile.key(line)) * CHUNK_BYTES
            column = scale_tile.tile.paired(column, self.half)
            inside = (chunk < scale_tile.chunks) & (column < self.columns - row0)
            offset = scale_tile.block_of(line) * pitch + column
        self.offset = select(inside, offset, OUT_OF_RANGE)

    def step(self, k0):
        """Buffer of the blocks from that of k0 (Int32, uniform) on; everything is zero past K."""
        block0 = k0 >> log2(self.tile.block_k)
        if self.k_contiguous:
            first, start = self.row0, block0
            chunks = fx.Int32(self.tile.chunks)
            used_rows = minimum(self.rows - self.row0, self.half + chunks if self.tile.tile.pairs else chunks)
            used_columns = self.columns - block0
        else:
            first, start = block0, self.row0
            used_rows = minimum(self.rows - block0, fx.Int32(SCALE_BLOCKS))
            used_columns = self.columns - self.row0
        size = self.tile.elem_bytes
        byte_offset = fx.Int64(first) * self.row_bytes + fx.Int64(start) * size
        num_bytes = (used_rows - 1) * self.pitch + used_columns * size
        return Buffer(self.tensor, byte_offset, select(block0 < self.blocks, num_bytes, 0))


class FragmentScales:
    """Reads the e8m0 scales that belong to one wave's fragments, those of `slices` slices of 128 k at a time: 1, 2 or 4.

    read() gives what LDS holds, of the four slices that lie together; sort() makes of it an Int32 for each fragment: in lane l,
    byte s is the scale of row l % 16 and the block of 32 k number l // 16 of slice s of those that are read at a time.

      k_contiguous   ds_read_b128: lane 16 * i + r has all 16 blocks of row r of fragment i, of four fragments at once (of one or
                     two: several lane groups the same). Sorted by v_perm_b32 into words of the lane groups that need them, and
                     these sent there by v_permlane*_swap_b32
      otherwise      ds_read_b64_tr_b8: of its eight rows four are the blocks that a lane group needs of one fragment, and four
                     those of the next. What a lane receives is sorted
    """

    def __init__(self, scale_tile, lds, place, first_row, count, lane, slices):
        """place: offset of the first slot in lds; first_row: of the fragments in the tile, a multiple of 16 * count; count: a
        power of two."""
        self.tile, self.lds, self.place, self.count, self.slices = scale_tile, lds, place, count, slices
        self.at_once = scale_tile.at_once(count)
        group, in_group = lane // MMA_M, lane % MMA_M
        if scale_tile.tile.k_contiguous:
            row = first_row + (group % self.at_once) * MMA_M + in_group
            self.base = row * CHUNK_BYTES
            # Of the bytes of two words: those of a lane group's block, or of two groups', next to each other.
            self.selectors = {
                4: (0x05010400, 0x07030602),
                2: (0x05010400 + (group >> 1) * 0x02020202,),
                1: (0x0400 + group * 0x0101,),
            }[self.at_once]
        else:
            # Lane 2 * q + p points at row q, columns 8 * p + 0..7 (memory.lds_read_transposed).
            row, part = in_group >> 1, in_group & 1
            line = (group & 1) | ((row & 3) << 1) | ((group & 2) << 2)
            fragment = row >> 2 if self.at_once == 2 else 0
            chunk = (first_row >> log2(CHUNK_BYTES)) + fragment
            self.base = scale_tile.chunk_address(line, chunk) + part * (CHUNK_BYTES // 2)

    def __len__(self):
        """Vectors that read() returns."""
        return self.count // self.at_once

    @property
    def reads(self):
        return len(self)

    def address(self, number):
        """Of this lane's part of read `number`, inside a slot."""
        if self.tile.tile.k_contiguous:
            return self.base + number * (4 * MMA_M * CHUNK_BYTES)
        return self.base ^ (number * 2 * CHUNK_BYTES)

    def _if_bit(self, k_slice, bit, value):
        """value, a multiple of bit, where k_slice, the first slice that is read for, has this bit of 1 and 2; else 0."""
        return (fx.Int32(k_slice) & bit) * (value // bit) if self.slices <= bit else 0

    def read(self, k_slice):
        """k_slice: number of the first slice, counted from the operand's first (Int32, uniform); a multiple of `slices`."""
        slot = (fx.Uint32(k_slice) // (SCALE_BLOCKS // LANE_GROUPS)) % self.tile.slots
        slot = fx.Int32(slot * self.tile.slot_bytes) + self.place
        if self.tile.tile.k_contiguous:
            return [lds_read(self.lds, self.address(j) + slot, 4, fx.Int32) for j in range(len(self))]
        # Slices that come later in the places of 0 or 0 and 1, and the other way round.
        turn = self._if_bit(k_slice, 1, self.tile.chunk_address(2, 0)) ^ self._if_bit(
            k_slice, 2, self.tile.chunk_address(4, 0)
        )
        return [lds_read_transposed(self.lds, (self.address(j) ^ turn) + slot, fx.Int32) for j in range(len(self))]

    def sort(self, values, k_slice):
        """The words of read(k_slice), a Vector of one Int32 for each fragment."""
        if not self.tile.tile.k_contiguous:
            words = [value[i] for value in values for i in range(self.at_once)]
        else:
            words = [word for value in values for word in self._sort_rows(value, k_slice)]
        return [fx.Vector.filled(1, word, fx.Int32) for word in words]

    def _sort_rows(self, value, k_slice):
        # The other of two words first.
        swap, swap_pairs = (self._if_bit(k_slice, bit, 0x04040404) for bit in (1, 2))
        low, high = 0x05040100 ^ swap_pairs, 0x07060302 ^ swap_pairs
        pairs = [
            [permute_bytes(value[i + 1], value[i], selectors ^ swap) for i in (0, 2)] for selectors in self.selectors
        ]  # slices 0, 1 and slices 2, 3
        if self.at_once == 1:
            return [permute_bytes(pairs[0][1], pairs[0][0], low)]
        # Of this lane's row: words of lane groups 0, 1, .. 3, or of the first and second one of this half of the wave.
        words = [permute_bytes(last, first, each) for first, last in pairs for each in (low, high)]
        if self.at_once == 2:
            return list(swap_lanes(*words, 16))
        halves = [swap_lanes(words[i], words[i + 2], 32) for i in (0, 1)]
        return [*swap_lanes(halves[0][0], halves[1][0], 16), *swap_lanes(halves[0][1], halves[1][1], 16)]


class WideFragmentScales:
    """The same for float32 scales of blocks of 128 k, SCALE_K of K at a time: for each fragment a Vector of its slices' (ds_read_b128); of
    cells one for all."""

    slices = SCALE_K // 128

    def __init__(self, scale_tile, lds, place, first_row, count, lane):
        self.tile, self.lds, self.count = (
            scale_tile,
            lds,
            1 if scale_tile.cells else count,
        )  # a wave has at most 128 rows
        row = lane % MMA_M
        self.bases = [place + scale_tile.address(first_row + i * MMA_M + row) for i in range(0, self.count, 4)]

    def __len__(self):
        return self.count

    @property
    def reads(self):
        return len(self)

    def read(self, k_slice):
        """k_slice: number of the first slice (Int32, uniform), a multiple of `slices`."""
        slot = (fx.Uint32(k_slice) // self.slices) % self.tile.slots
        at = fx.Int32(slot * self.tile.slot_bytes)
        bases = [base + at for base in self.bases]
        at = [bases[i // 4] + i % 4 * self.tile.fragment_bytes for i in range(self.count)]
        return [lds_read(self.lds, each, self.slices, fx.Float32) for each in at]

    def sort(self, values, k_slice):
        return values


class NoScales:
    """Where there are none."""

    slices, reads = 1, 0

    def __len__(self):
        return 0

    def read(self, k_slice):
        return []

    def sort(self, values, k_slice):
        return []


class RegisterScales:
    """gfx942: float32 scales of blocks of 128 k straight into registers, of SCALE_K k at once: those of a wave's rows of a, and that of its
    rows of b.

    Rows of scales are whole chunks, zeros behind the last block (GlobalScales).
    """

    def __init__(self, arguments, geo, m0, n0, K, wave_m, wave_n, lane):
        self.K = K
        rows = [wave_m * geo.wave_tile_m + geo.a.fragment_row(i, lane % MMA_M) for i in range(geo.frags_m)]
        cell = ((n0 + wave_n * geo.wave_tile_n) >> 7) - (n0 >> 7)
        self.operands = []
        for tensor, row0, lines in ((arguments.a_scale, m0, rows), (arguments.b_scale, n0 >> 7, [cell])):
            shape = [fx.Int32(fx.get_scalar(size)) for size in tensor.shape]
            pitch = fx.Int64(fx.get_scalar(tensor.stride[0])) * 4
            offsets = [line * fx.Int32(pitch) for line in lines]
            self.operands.append((tensor, row0, shape, pitch, offsets))

    def load(self, k0):
        """Of the blocks from k0 (Int32, uniform, a multiple of SCALE_K) on; zeros past K. Float32 Vectors of four blocks: of a's fragments,
        then of b."""
        block = k0 >> 7
        values = []
        for tensor, row0, (rows, columns), pitch, offsets in self.operands:
            used = minimum(rows - row0, fx.Int32(256))
            num_bytes = (used - 1) * fx.Int32(pitch) + (columns - block) * 4
            base = fx.Int64(row0) * pitch + fx.Int64(block) * 4
            buffer = Buffer(tensor, base, select((k0 < self.K) & (used > 0), num_bytes, 0))
            values += [buffer.load(offset, SCALE_K // 128, fx.Float32) for offset in offsets]
        return values


class BlockScales:
    """gfx950: the scales of both operands of a workgroup's tile, from global memory to LDS; nothing where geo.scales is False."""

    @staticmethod
    def storage(geo, idle=False):
        """Bytes of LDS by name. idle: also for loads that bring nothing (issue)."""
        return {"scales": geo.scale_bytes + (geo.idle_bytes if idle else 0)} if geo.scales else {}

    def __init__(self, geo, lds, arguments, m0, n0, K, lane, wave):
        """K: everything is zero from there on; what is behind could be NaN, which zeros of codes do not hide."""
        self.geo, self.lane, self.wave = geo, lane, wave
        if not geo.scales:
            return
        self.lds = lds.scales.ptr
        self.tiles = dict(zip("ab", geo.scale_tiles, strict=True))
        self.place = {"a": 0, "b": self.tiles["a"].slots * self.tiles["a"].slot_bytes if self.tiles["a"] else 0}
        self.tensors = {"a": arguments.a_scale, "b": arguments.b_scale}
        self.first_row = {"a": m0, "b": n0}
        self.K = K

    def reader(self, name, first_row, count, step_slices):
        """FragmentScales of `count` fragments from a row of the tile on. step_slices: slices of 128 k of a step of the main loop."""
        if not self.geo.scales or self.tiles[name] is None:
            return NoScales()
        where = self.tiles[name], self.lds, self.place[name], first_row, count, self.lane
        if self.geo.scales == "128":
            return WideFragmentScales(*where)
        return FragmentScales(*where, min(step_slices, SCALE_BLOCKS // LANE_GROUPS))

    def waves(self, name):
        """Waves that it takes to bring the scales of SCALE_K k of an operand."""
        return self.tiles[name].slot_bytes // (WAVE * CHUNK_BYTES) if self.tiles[name] else 0

    def source(self, name, unit):
        """What one wave brings: GlobalScales of the chunks from WAVE * unit on; unit is uniform."""
        chunk = unit * WAVE + self.lane
        return GlobalScales(self.tensors[name], self.tiles[name], self.first_row[name], self.K, chunk)

    def slot(self, name, k0):
        """Where in LDS the scales of SCALE_K k from k0 on lie."""
        slot = (fx.Uint32(k0) // SCALE_K) % self.tiles[name].slots
        return fx.Int32(slot * self.tiles[name].slot_bytes) + self.place[name]

    def share(self):
        """Deals the work out to the waves for issue()."""
        if self.geo.scales:
            units = [self.wave + load * (WORKGROUP // WAVE) for load in range(self.geo.scale_loads)]
            self.units = [
                (unit, self.source("a", unit) if self.tiles["a"] else None, self.source("b", unit - self.waves("a")))
                for unit in units
            ]

    def issue(self, k0, stage):
        """This wave's share of the scales of SCALE_K k from k0 (Int32, uniform, a multiple of tile_k) on. geo.scale_loads
        loads, which bring nothing unless k0 is a multiple of SCALE_K. stage: that of the tile at k0."""
        if not self.geo.scales:
            return
        wave_bytes = WAVE * CHUNK_BYTES
        idle = self.geo.scale_bytes + stage * (self.geo.scale_loads * LOAD_BYTES)
        for unit, a, b in self.units:
            brings = ((k0 & (SCALE_K - 1)) == 0) & (unit < self.waves("a") + self.waves("b"))
            buffer, offset, place = b.step(k0), b.offset, self.slot("b", k0) - self.waves("a") * wave_bytes
            if a is not None:
                of_a = unit < self.waves("a")
                buffer = a.step(k0).otherwise(of_a, buffer)
                offset, place = select(of_a, a.offset, offset), select(of_a, self.slot("a", k0), place)
            offset = select(brings, offset, OUT_OF_RANGE)
            place = select(brings, place, idle) + unit * wave_bytes
            buffer.load_to_lds(self.lds, place, offset)

    def issue_one(self, name, k0):
        """All scales of SCALE_K k of one operand with 4 * WAVE chunks. One load."""
        if self.geo.scales:
            source = self.source(name, self.wave)
            source.step(k0).load_to_lds(self.lds, self.slot(name, k0) + self.wave * (WAVE * CHUNK_BYTES), source.offset)

    def issue_alternating(self, step):
        """In step 2 * i those of a, in step 2 * i + 1 those of b, both for the i + 1st SCALE_K of K. One load."""
        if not self.geo.scales:
            return
        step = fx.Int32(step)
        of_a = (step & 1) == 0
        k0 = ((step >> 1) + 1) * SCALE_K
        a, b = self.source("a", self.wave), self.source("b", self.wave)
        buffer = a.step(k0).otherwise(of_a, b.step(k0))
        place = select(of_a, self.slot("a", k0), self.slot("b", k0)) + self.wave * (WAVE * CHUNK_BYTES)
        buffer.load_to_lds(self.lds, place, select(of_a, a.offset, b.offset))
