"""Operand tiles: global memory to LDS, and LDS to fragments.

A GlobalTile is the operand as one workgroup sees it: the rows (of M or N) of its output tile, all of K. Each K step
re-bases the buffer resource with 64-bit arithmetic, so operands of any size are addressed with 32-bit offsets; the
offsets inside one step are fixed per lane. Rows past the operand and k past K read as zeros.
"""

from flydsl import expr as fx

from fourwave.blocks.flydsl.memory import (
    OUT_OF_RANGE,
    Buffer,
    lds_read,
    lds_read_transposed,
    lds_write,
    minimum,
    select,
    transpose_bytes,
)
from fourwave.blocks.flydsl.tiles import CHUNK_BYTES, LANE_GROUPS, MMA_M, WAVE, WORKGROUP


class GlobalTile:
    """The part of one operand that a workgroup reads.

    tensor      the kernel argument: [extent, K] or, where K is not contiguous, [K, extent]; the inner stride is 1
    tile        OperandTile
    row0        first row (of M or N) of the output tile
    K           reduction length; tensor may be longer along K, then with zeros from K on
    """

    def __init__(self, tensor, tile, row0, K, thread):
        self.tensor, self.tile = tensor, tile
        self.rows = fx.Int32(fx.get_scalar(tensor.shape[0]))
        self.columns = fx.Int32(fx.get_scalar(tensor.shape[1]))
        self.row_bytes = fx.Int64(fx.get_scalar(tensor.stride[0])) * tile.elem_bytes
        self.K = K
        self.row0 = row0

        # Load i of thread t brings chunk t + i * WORKGROUP of the stage; a line is a power of two of chunks.
        line = thread // tile.chunks_per_line
        chunk = (thread % tile.chunks_per_line) ^ tile.key(line)
        self.chunk_elem = chunk * tile.chunk_elems  # first element of this lane's chunks along a line
        lines = [line + i * tile.lines_per_load for i in range(tile.loads)]
        rows = [tile.source_row(at) for at in lines]
        if tile.k_contiguous:
            rows = [tile.spread(row) for row in rows]
            extent = self.rows
        else:
            self.chunk_elem = tile.spread(self.chunk_elem)
            extent = self.columns
        # The second half of a tile may begin past the operand.
        self.end = select(row0 < extent, K, 0) if tile.split else K
        pitch = fx.Int32(self.row_bytes)
        self.offsets = [row * pitch + self.chunk_elem * tile.elem_bytes for row in rows]
        # Where rows of successive loads are a known distance apart, one offset per lane does.
        self.load_rows = None
        if tile.lines_per_load % tile.source_period == 0:
            at = [i * tile.lines_per_load for i in range(tile.loads)]
            self.load_rows = [tile.spread(line) for line in at] if tile.k_contiguous else at
            self.pitch = pitch
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
        if tile.k_contiguous:
            first, start = self.row0, k0
            used_rows = minimum(self.rows - self.row0, fx.Int32(tile.extent + tile.split))
            used_columns = self.columns - k0
        else:
            first, start = k0, self.row0
            used_rows = minimum(self.rows - k0, fx.Int32(tile.tile_k))
            used_columns = self.columns - self.row0
        byte_offset = fx.Int64(first) * self.row_bytes + fx.Int64(start) * size
        num_bytes = fx.Int64(used_rows - 1) * self.row_bytes + fx.Int64(used_columns) * size
        num_bytes = (k0 < self.end).select(num_bytes, fx.Int64(0))
        buffer = Buffer(self.tensor, byte_offset, num_bytes)
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


def load_registers(source, k0, dtype):
    """gfx942: this lane's chunks of one stage, in registers (the compiler waits for them where they are used)."""
    buffer, offsets = source.step(k0)
    return [buffer.load(offset, CHUNK_BYTES * 8 // dtype.width, dtype) for offset in offsets]


def store_registers(chunks, lds, stage_offset, thread):
    """gfx942: what load_registers brought, to LDS. Lanes write 16 contiguous bytes each: no bank conflicts."""
    for i, chunk in enumerate(chunks):
        lds_write(lds, stage_offset + thread * CHUNK_BYTES + i * (WORKGROUP * CHUNK_BYTES), chunk)


class Fragments:
    """Reads one wave's fragments of an operand from a stage in LDS.

    Only the swizzle makes addresses differ in more than a constant, so a few per-lane bases and immediate offsets do.
    """

    def __init__(self, tile, fmt, first_row, count, lane):
        """first_row: first row (of M or N) of the wave's part of the tile; count: fragments of 16 rows each."""
        self.tile, self.fmt, self.count = tile, fmt, count
        self.elems = fmt.fragment_elems(tile.fragment_bytes)
        self.chunks = tile.fragment_bytes // CHUNK_BYTES
        self.sorted = tile.k_contiguous or tile.banks == 64
        group, in_group = lane // MMA_M, lane % MMA_M
        if tile.k_contiguous:
            # Lane: row in_group, chunk `group` of every four. One base per four chunks.
            line = first_row + in_group
            self.bases = [tile.address(line, group + c) for c in range(0, tile.chunks_per_line, LANE_GROUPS)]
            return
        if tile.banks == 64:
            # A transposing read takes `rows` rows of k and 16 columns from 16 lanes (memory.lds_read_transposed), a lane
            # receives `rows` k of one column. A lane group's k of a chunk are consecutive, as where K is contiguous.
            rows = self.rows = 8 // tile.elem_bytes
            line = tile.source_row(group * 2 * rows + in_group // (MMA_M // rows))
            columns = [first_row + i * MMA_M + in_group % (MMA_M // rows) * rows for i in range(count)]
        else:
            # Lane: columns tile.group * in_group + 0.. of each group of fragments; line of k = 8 (16) * group.
            line = group
            width = tile.group
            columns = [first_row + (i * MMA_M + in_group) * width for i in range(count // width)]
        # One base per address that the swizzle, which reaches 16 chunks, makes different; the others by offset.
        step = MMA_M * (1 if tile.banks == 64 else tile.group)
        self.period = min(len(columns), max(1, min(tile.extent, 16 * tile.chunk_elems) // step))
        self.step_bytes = step * tile.elem_bytes
        self.bases = [
            tile.address(line, column // tile.chunk_elems) + column % tile.chunk_elems * tile.elem_bytes
            for column in columns[: self.period]
        ]

    @property
    def reads(self):
        """LDS reads per slice."""
        if self.sorted:
            return self.count * self.chunks * (1 if self.tile.k_contiguous else 2)
        return self.values

    @property
    def _lane_k(self):
        """k of one lane in a slice."""
        return self.tile.slice_k // LANE_GROUPS

    def read(self, lds, stage_offset, k_slice):
        """What LDS holds of one slice, a list of Vectors: fragments, or what sort() makes into fragments."""
        if self.tile.k_contiguous:
            bases = self.bases[k_slice * self.chunks : (k_slice + 1) * self.chunks]
            return [self._read_row(lds, [base + stage_offset for base in bases], i) for i in range(self.count)]
        offset = stage_offset + k_slice * self.tile.slice_k * self.tile.line_bytes
        bases = [base + offset for base in self.bases]
        if self.tile.banks == 64:
            return [self._read_transposed(lds, self._at(bases, i)) for i in range(self.count)]
        # Rows of neighbours, one per k: k + 1 lies 4 lines further (tiles.source_row).
        step = 4 * self.tile.line_bytes
        return [
            self._read_neighbours(lds, self._at(bases, i) + k * step)
            for i in range(self.count // self.tile.group)
            for k in range(self._lane_k)
        ]

    @property
    def values(self):
        """Vectors that read() returns."""
        return self.count if self.sorted else self.count // self.tile.group * self._lane_k

    def sort(self, values):
        """Fragments out of what read() returned. Done when they are multiplied, not when they are read: a set of rows
        and the set of fragments made of it then need registers one after the other."""
        if self.sorted:
            return values
        size, group = self._lane_k, self.tile.group
        fragments = []
        for i in range(0, len(values), size):
            rows = values[i : i + size]
            if self.tile.elem_bytes == 1:
                words = [transpose_bytes([row[0] for row in rows[k : k + 4]], group) for k in range(0, size, 4)]
                fragments += [fx.Vector.from_elements([word[q] for word in words], fx.Int32) for q in range(group)]
            else:
                fragments += [fx.Vector.from_elements([row[q] for row in rows], self.fmt.dtype) for q in range(group)]
        return fragments

    def _read_neighbours(self, lds, at):
        group = self.tile.group
        if self.tile.elem_bytes > 1:
            return lds_read(lds, at, group, self.fmt.dtype)
        dtype = {1: fx.Uint8, 2: fx.Uint16, 4: fx.Uint32}[group]
        word = lds_read(lds, at, 1, dtype)[0]
        return fx.Vector.filled(1, word.to(fx.Int32), fx.Int32)

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
                lds, at + (chunk * self.tile.slice_k // self.chunks + half) * self.tile.line_bytes, self.fmt.dtype
            )
            for chunk in range(self.chunks)
            for half in (0, 2 * self.rows)
        ]
        while len(parts) > 1:
            parts = [
                low.shuffle(high, list(range(2 * low.numel))) for low, high in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]
