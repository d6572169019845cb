"""LDS images of operand tiles: where each 16-byte chunk lies, and which banks a read touches. Host side.

An operand tile has `extent` rows or columns of the output (tile_m or tile_n) and tile_k steps of the reduction.
Its image in LDS keeps the memory order of the operand, so that global memory is read in 16-byte chunks:

  k_contiguous      [extent][tile_k]   fragments are read with ds_read_b128
  otherwise         [tile_k][extent]   gfx950: transposing reads (ds_read_b64_tr_b16, ds_read_b64_tr_b8)
                                       its 32-bit operands: column_chunks.py; gfx942: turned_tiles.py

Two permutations make the reads free of bank conflicts without padding (a direct load to LDS cannot pad):
  lines   source_row: which row each LDS line holds; lines that one read touches at once are consecutive
  key     XORed onto the chunk index inside a line; spreads those lines over the banks

Which output rows or columns a fragment stands for is free as long as the epilogue knows (fragment_row, run_element). A
lane of a 16 x 16 result holds four rows of the instruction's first operand, the N operand (mma.py); `group` fragments
are woven so that the lane's 4 * group columns of the output are neighbours (a run), for wide stores.

All index functions take Python ints or FlyDSL integers alike (they use only + * & | ^ << >>).

Lanes served together by one LDS cycle group, measured by others (not in AMD's guides):
  ds_read_b128, gfx950  16 lanes over 64 banks: {0-3, 12-15, 20-27}, {4-11, 16-19, 28-31}, and both + 32
                        (HipKittens, analysis/paper_experiments/phases)
  ds_read_b128, gfx942  8 lanes over 32 banks: {0-3, 20-23}, {4-7, 16-19}, {8-11, 28-31}, {12-15, 24-27}, and + 32
                        (lane groups measured on MI300 by the pyhip project; AMD's blog on CK-Tile LDS bank conflicts)
  ds_write_b128         8 consecutive lanes (CK-Tile documentation, LDS bank conflicts)
  ds_read_b64 on gfx950 32 consecutive lanes (HipKittens); the transposing form is taken to be the same
  narrower reads        as many consecutive lanes as fill the banks; assumed
"""

from dataclasses import dataclass, replace

CHUNK_BYTES = 16  # bytes per lane of one global load
WAVE = 64  # lanes
WORKGROUP = 256  # threads: four waves
MMA_M = 16  # rows of one result
MMA_N = 16  # columns of one result
LANE_GROUPS = WAVE // MMA_M  # lanes that share a row of a fragment, each with its part of K
LOAD_BYTES = WORKGROUP * CHUNK_BYTES  # bytes all four waves bring in with one load instruction each

SCALE_BLOCKS = 16  # of 32 k each: scales of a row that one chunk holds
SCALE_K = 32 * SCALE_BLOCKS
SHUFFLED_K = (
    LANE_GROUPS * CHUNK_BYTES
)  # of preshuffled 8-bit weights, which lie together for 16 rows (ops/grouped_gemm/preshuffle.py)

LDS_BYTES = {"gfx950": 160 * 1024, "gfx942": 64 * 1024}  # per workgroup
LDS_BANKS = {"gfx950": 64, "gfx942": 32}  # 4 bytes wide each
REGISTERS = 512  # 32-bit vector registers (VGPR + AGPR) per lane at one wave per SIMD


def log2(value):
    assert value > 0 and value & (value - 1) == 0, f"{value} is not a power of two"
    return value.bit_length() - 1


def key_of_pairs(line, chunks):
    """XORed onto the chunk index of lines of `chunks` chunks, where half a wave reads two neighbouring chunks of each of eight
    consecutive lines: 64 banks are 8 such pairs, which then lie in different ones."""
    pairs = chunks // 2
    if pairs >= 8:
        return (line & 7) << 1
    if pairs == 4:
        return ((line >> 1) & 3) << 1
    if pairs == 2:
        return ((line >> 2) & 1) << 1
    return line & 0


@dataclass(frozen=True)
class OperandTile:
    """One operand's tile of one pipeline stage. See the module docstring for the two layouts."""

    extent: int  # elements of M or N
    tile_k: int  # elements of K
    k_contiguous: bool
    elem_bytes: int
    banks: int
    group: int = 1  # fragments woven together, see the module docstring
    fragment_bytes: int = CHUNK_BYTES  # per lane; a multiple of 16 where K is contiguous
    packed: bool = False  # two codes of 4 bits in a byte: elements here, and tile_k or extent, are bytes
    split: int = 0  # > 0: half of a larger tile, which after so many elements of M or N skips as many; a power of two
    pairs: int = (
        0  # > 0: as many elements of M or N come in turn from the first and from the second half of the operand
    )
    together: int = 1  # slices of K of which each lane group has its chunks side by side (chunk)

    @property
    def transposing(self):
        """Whether fragments are read with the transposing reads of gfx950, which know 8 and 16 bits."""
        return not self.k_contiguous and self.banks == 64 and self.elem_bytes < 4

    @property
    def in_columns(self):
        """Whether fragments are read by chunks of four columns (column_chunks.py)."""
        return not self.k_contiguous and self.banks == 64 and self.elem_bytes == 4

    @property
    def slice_k(self):
        """k of one fragment; where packed bytes run along K, the bytes of it."""
        across = 2 if self.packed and not self.k_contiguous else 1  # elements of k in a byte of a fragment
        return LANE_GROUPS * self.fragment_bytes // self.elem_bytes * across

    def chunk(self, group, k_slice):
        """Which 16 bytes of a line lane group `group` reads of a slice (fragments of 16 bytes, K contiguous). together 4, beside packed
        codes of the other operand: a lane's chunk of those is 32 k, and this one's four of 8."""
        first = k_slice - k_slice % self.together
        return first * LANE_GROUPS + group * self.together + k_slice % self.together

    @property
    def unpacked(self):
        """The tile with as many columns as it has codes, for what there is one of for each."""
        if not self.packed:
            return self
        return replace(self, packed=False, **({} if self.k_contiguous else {"extent": 2 * self.extent}))

    @property
    def lines(self):
        return self.extent if self.k_contiguous else self.tile_k

    @property
    def line_bytes(self):
        return (self.tile_k if self.k_contiguous else self.extent) * self.elem_bytes

    @property
    def stage_bytes(self):
        return self.lines * self.line_bytes

    @property
    def chunk_elems(self):
        return CHUNK_BYTES // self.elem_bytes

    @property
    def chunks_per_line(self):
        return self.line_bytes // CHUNK_BYTES

    @property
    def loads(self):
        """16-byte loads per lane that fill one stage."""
        return self.stage_bytes // LOAD_BYTES

    @property
    def lines_per_load(self):
        """Lines that one load instruction of all four waves covers."""
        return LOAD_BYTES // self.line_bytes

    def problem(self):
        """Why this tile cannot be laid out, or None."""
        if self.stage_bytes % LOAD_BYTES:
            return (
                f"an operand tile of {self.extent} x {self.tile_k} has {self.stage_bytes} bytes; "
                f"four waves load {LOAD_BYTES} at a time"
            )
        least = CHUNK_BYTES if self.elem_bytes == 1 and not self.k_contiguous else 2 * CHUNK_BYTES
        if self.line_bytes > LOAD_BYTES or self.line_bytes < least:
            return f"a line of {self.line_bytes} bytes in LDS; {least} to {LOAD_BYTES} are possible"
        for size in (self.extent, self.tile_k):
            if size & (size - 1):
                return f"tile size {size} is not a power of two"
        # A lane fetches the same chunk of a line in every load.
        if any(self.key(line) != self.key(line + self.lines_per_load) for line in range(16)):
            return f"a line of {self.line_bytes} bytes in LDS: a load covers {self.lines_per_load} lines, fewer than the swizzle's period"
        return None

    # ---- global memory <-> lines -----------------------------------------------------------------------------

    def first_chunk(self, thread):
        """(line, chunk of it in memory) of a thread's first load: load i of thread t brings chunk t + i * WORKGROUP of the stage."""
        line = thread // self.chunks_per_line
        return line, (thread % self.chunks_per_line) ^ self.key(line)

    def source_row(self, line):
        """Row of the tile (of M, N or, where K is not contiguous, of K) that LDS line `line` holds.

        k_contiguous: lines are in the order of the fragments, see fragment_row.
        K not contiguous, 64 banks: bits 2 and 3 of k are swapped. One transposing read of half a wave touches k = 0-3
        and 8-11 (or 4-7 and 12-15); the swap makes these eight lines consecutive. 8-bit operands: bits 3 and 4; the
        read touches k = 0-7 and 16-23 (or 8-15 and 24-31), sixteen lines. Packed ones: bits 4 and 5; k = 0-15 and 32-47.
        K not contiguous, 64 banks, 32 bits: lines are in memory's order; those that lanes who share a chunk's columns read at once
        are consecutive k.
        """
        if self.k_contiguous:
            if self.group == 1:
                return line
            return (line & ~31) | ((line & 12) << 1) | ((line & 16) >> 2) | (line & 3)
        if self.transposing:
            if self.packed:
                return (line & ~48) | ((line & 16) << 1) | ((line & 32) >> 1)
            if self.elem_bytes == 1:
                return (line & ~24) | ((line & 8) << 1) | ((line & 16) >> 1)
            return (line & ~12) | ((line & 4) << 1) | ((line & 8) >> 1)
        assert self.in_columns, self
        return line

    @property
    def source_period(self):
        """Lines after which source_row repeats, so many further."""
        if self.k_contiguous:
            return MMA_M * self.group
        if self.transposing:
            return 64 if self.packed else 32 // self.elem_bytes
        return 1

    def half(self, waves):
        """One of two halves that `waves` waves share: each has the first (or second) half of its part of the tile."""
        part = self.extent // waves // 2
        return replace(self, extent=self.extent // 2, split=part)

    def spread(self, element):
        """Place of element 0 .. extent - 1 (of M or N) relative to the tile's first."""
        return element + (element & self.split) if self.split else element

    def paired(self, element, half):
        """Place, relative to the tile's first, of what spread() gives, where the operand's halves are `half` apart."""
        if not self.pairs:
            return element
        odd = (element & self.pairs) // self.pairs
        return ((element & ~(2 * self.pairs - 1)) >> 1) + (element & (self.pairs - 1)) + odd * half

    # ---- fragments <-> rows of the output tile ---------------------------------------------------------------

    def fragment_row(self, fragment, row):
        """Row (of M or N), relative to the wave's first, that row 0..15 of a fragment stands for."""
        p, q = fragment // self.group, fragment % self.group
        if self.k_contiguous and self.group == 2:
            return p * 32 + ((row >> 2) << 3) + q * 4 + (row & 3)
        return p * 16 * self.group + row * self.group + q

    @property
    def run(self):
        """Neighbouring columns of the output that a lane holds in the results of one group of fragments."""
        return 4 * self.group

    def run_element(self, e):
        """(fragment of the group, element of that result) of a lane's column e of its run."""
        if self.k_contiguous:
            return e // 4, e % 4
        return e % self.group, e // self.group

    # ---- swizzle ---------------------------------------------------------------------------------------------

    def key(self, line):
        """XORed onto the chunk index of every chunk in `line`. Depends on line % 16 only."""
        if not self.k_contiguous:
            return self._key_transposed(line)
        chunks = self.chunks_per_line
        if self.banks == 64:
            # 16 lanes cover 16 lines and 64 banks are 16 chunks: all 16 must differ.
            if self.together == 4:
                # Lines 0-3 and 12-15 are read at another chunk than 4-11, whose number differs in bit 2.
                return (line & 7) | ((((line >> 3) ^ (line >> 2)) & 1) << 3)
            if chunks >= 16:
                return line & 15
            if chunks == 8:
                return (line >> 1) & 7
            if chunks == 4:
                # 0, 2, 3, 1 for lines 0-3, 4-7, 8-11, 12-15: the middle two are read at another chunk (k group)
                # than the outer two, so a plain count would collide with itself one chunk further.
                return ((line >> 3) & 1) | (((line >> 1) ^ (line >> 2)) & 2)
        else:
            # 8 lanes cover 8 lines and 32 banks are 8 chunks.
            if chunks >= 8:
                return line & 7
            if chunks == 4:
                return (line >> 1) & 3
        return line & 0

    def _key_transposed(self, line):
        chunks = self.chunks_per_line
        if not self.transposing:
            # Lanes that share chunks read consecutive lines, 16 * group elements of each: as many lines at once as fill the banks.
            at_once = self.banks * 4 // CHUNK_BYTES
            span = max(1, MMA_M * self.group * self.elem_bytes // CHUNK_BYTES)
            together = min(LANE_GROUPS, max(1, at_once // span))
            return ((line & (together - 1)) >> max(0, log2(at_once) - log2(chunks))) * span
        if self.elem_bytes == 1:
            # Half a wave reads one chunk of each of sixteen consecutive lines; 64 banks are 16 chunks. Packed: half a chunk,
            # and the other half of another sixteen (loaders.Fragments).
            return (line & 15) >> max(0, 4 - log2(chunks))
        return key_of_pairs(line, chunks)

    # ---- bank model ------------------------------------------------------------------------------------------

    def address(self, line, chunk):
        """Byte offset of a 16-byte chunk (index before the swizzle) inside the stage."""
        return line * self.line_bytes + ((chunk ^ self.key(line)) * CHUNK_BYTES)


@dataclass(frozen=True)
class CodeTile(OperandTile):
    """8-bit codes in global memory of a tile whose LDS image holds them as 16-bit numbers: the lines are the image's."""

    image: OperandTile | None = None

    @classmethod
    def of(cls, image):
        return cls(
            image.extent,
            image.tile_k,
            image.k_contiguous,
            1,
            image.banks,
            image.group,
            CHUNK_BYTES,
            pairs=image.pairs,
            image=image,
        )

    def source_row(self, line):
        return self.image.source_row(line)

    @property
    def source_period(self):
        return self.image.source_period

    def key(self, line):
        return line & 0


@dataclass(frozen=True)
class ScaleTile:
    """Scales of one operand tile in LDS: one byte per row (of M or N) and block of 32 k, SCALE_BLOCKS blocks at a time.

    They come in chunks of 16 bytes, as many as the tile has rows, in the operand's memory order:
      k_contiguous   chunk c: all blocks of the row that line c of the operand's image holds
      otherwise      SCALE_BLOCKS lines of `extent` columns; line l holds block block_of(l), its chunks are XORed with key(l)
    What a lane needs are bytes: those of row lane % 16 of a fragment, block lane // 16 of each slice of 128 k. How they are
    read is in loaders.FragmentScales.
    """

    tile: OperandTile  # of 8-bit elements, not halved
    slots: int  # a power of two; SCALE_K k each
    block_k = 32
    elem_bytes = 1

    def row_of(self, chunk):
        """Row of the tile whose scales chunk `chunk` holds, where K is contiguous."""
        return self.tile.source_row(chunk)

    def first_row(self, row0):
        """Row of the scales that belongs to row row0 of the operand."""
        return row0

    @property
    def chunks(self):
        return self.tile.extent

    @property
    def slot_bytes(self):
        return max(self.chunks, WAVE) * CHUNK_BYTES  # waves write whole

    @property
    def line_chunks(self):
        """Where K is not contiguous."""
        return self.tile.extent // CHUNK_BYTES

    def block_of(self, line):
        """Block that line `line` holds where K is not contiguous: the eight lines that half a wave reads at once, blocks g and
        g + 1 of four slices, are consecutive."""
        return (line & 1) | ((line & 8) >> 2) | ((line & 6) << 1)

    def key(self, line):
        """XORed onto the chunk index."""
        return key_of_pairs(line, self.line_chunks)

    def at_once(self, count):
        """Of a wave's `count` fragments, those whose scales one read brings (loaders.FragmentScales)."""
        return min(count, 4 if self.tile.k_contiguous else 2)

    def chunk_address(self, line, chunk):
        """Byte offset inside a slot where K is not contiguous. Linear over XOR."""
        return line * self.tile.extent + (chunk ^ self.key(line)) * CHUNK_BYTES


@dataclass(frozen=True)
class WideScaleTile:
    """The same for float32 scales of blocks of 128 k, where K is contiguous: one for each row, or one for 128 rows (cells)."""

    tile: OperandTile
    slots: int
    cells: bool
    block_k = 128
    elem_bytes = 4
    fragment_bytes = MMA_M * CHUNK_BYTES  # between those of successive fragments

    @property
    def chunks(self):
        return max(1, self.tile.extent // 128) if self.cells else self.tile.extent

    @property
    def slot_bytes(self):
        return max(self.chunks, WAVE) * CHUNK_BYTES

    def row_of(self, chunk):
        return chunk if self.cells else self.tile.source_row(chunk)

    def first_row(self, row0):
        return row0 >> 7 if self.cells else row0

    def address(self, row):
        return (row >> 7 if self.cells else row) * CHUNK_BYTES


@dataclass(frozen=True)
class Geometry:
    """Every size a GEMM kernel derives from its configuration and layout."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    waves_m: int
    waves_n: int
    group_m: int
    a: OperandTile
    b: OperandTile
    scales: bool | str = False  # True: of blocks of 32 k, "b": of b alone, "128": of 128, brought beside the operands
    b_ahead: int = 0  # preshuffled b: K tiles it is loaded ahead, straight into registers; 0: b comes through LDS

    @property
    def scale_slots(self):
        """Slots of scales that are in use at once: of the tiles being loaded, and of the one being multiplied."""
        need = -(-(self.num_stages - 1) * self.tile_k // SCALE_K) + 1
        return 1 << (need - 1).bit_length()

    @property
    def scale_tiles(self):
        """(a, b); None: an operand has none."""
        if self.scales == "b":
            return None, ScaleTile(self.b.unpacked, self.scale_slots)
        if self.scales == "128":
            return WideScaleTile(self.a, self.scale_slots, False), WideScaleTile(self.b, self.scale_slots, True)
        return ScaleTile(self.a.unpacked, self.scale_slots), ScaleTile(self.b.unpacked, self.scale_slots)

    @property
    def scales_in_lds(self):
        """Those of 128 k gfx942 loads straight to registers."""
        return bool(self.scales) and not (self.scales == "128" and self.a.banks == LDS_BANKS["gfx942"])

    @property
    def scale_bytes(self):
        """LDS of the scales of both operands."""
        return sum(tile.slots * tile.slot_bytes for tile in self.scale_tiles if tile) if self.scales_in_lds else 0

    @property
    def idle_bytes(self):
        """LDS where loads that bring no scale leave zeros: every one that can be in flight has a place of its own."""
        return self.num_stages * self.scale_loads * LOAD_BYTES

    @property
    def scale_loads(self):
        """Loads one wave issues per K tile for scales. Most bring nothing: they keep the wait counts constant."""
        if not self.scales_in_lds:
            return 0
        return -(-sum(tile.slot_bytes for tile in self.scale_tiles if tile) // LOAD_BYTES)

    @property
    def wave_tile_m(self):
        return self.tile_m // self.waves_m

    @property
    def wave_tile_n(self):
        return self.tile_n // self.waves_n

    @property
    def frags_m(self):
        return self.wave_tile_m // MMA_M

    @property
    def frags_n(self):
        return self.wave_tile_n // MMA_N

    @property
    def num_slices(self):
        return self.a.tile_k // self.a.slice_k

    @property
    def slices_of_b(self):
        """Slices that one fragment of b is for."""
        return self.a.together

    @property
    def tiles_per_step(self):
        """K tiles per main-loop step: the fragments read ahead alternate between two sets of registers, so a step has an
        even number of slices; with an odd number they would have to be copied. Float32 scales are read once a step, for all
        its slices: SCALE_K. What a last step has too much of is zeros. Preshuffled b goes round as many sets as it is loaded ahead."""
        if self.b_ahead:
            return self.b_ahead
        if self.scales == "128":
            return SCALE_K // self.tile_k
        return 2 if self.num_slices % 2 else 1

    @property
    def b_loads(self):
        """Loads of b that one wave issues per K tile: its part of a tile in LDS, or the fragments of all its columns."""
        if self.b_ahead:
            return self.num_slices * self.frags_n * (self.b.fragment_bytes // CHUNK_BYTES)
        return self.b.loads

    @property
    def loads_per_tile(self):
        """Global loads one wave issues per K tile; each counts once in vmcnt."""
        return self.a.loads + self.b_loads + self.scale_loads


_READ_B128_LANES = {
    64: [[*range(4), *range(12, 16), *range(20, 28)], [*range(4, 12), *range(16, 20), *range(28, 32)]],
    32: [
        [*range(4), *range(20, 24)],
        [*range(4, 8), *range(16, 20)],
        [*range(8, 12), *range(28, 32)],
        [*range(12, 16), *range(24, 28)],
    ],
}


def read_b128_groups(banks):
    """Lane groups that ds_read_b128 serves together (module docstring)."""
    groups = _READ_B128_LANES[banks]
    return groups + [[lane + 32 for lane in group] for group in groups]


def bank_conflicts(addresses, groups, access_bytes, banks):
    """Extra LDS cycles of one instruction: addresses[lane] in bytes, lane groups that are served together."""
    extra = 0
    for group in groups:
        per_bank = {}
        for lane in group:
            for word in range(addresses[lane] // 4, (addresses[lane] + access_bytes) // 4):
                per_bank.setdefault(word % banks, set()).add(word)
        extra += max(len(words) for words in per_bank.values()) - 1
    return extra
