"""Operands of grouped products on their way to shared memory: weights [G, ...] of which a tile is of one group, and rows that
begin anywhere. Both are TmaLoader's tiles; what differs is where they come from."""

import math
from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fourwave.blocks.cutedsl import groups
from fourwave.blocks.cutedsl.loaders import SCALE_BLOCK, SCALE_STEPS, TmaLoader
from fourwave.blocks.cutedsl.mma import ScaleReader


@dataclass(frozen=True)
class StackedLoader(TmaLoader):
    """Tiles of one of G matrices. They end where their matrix does: what lies past it arrives as zeros."""

    def stack(self, pointer, extent, K, G, row_stride, matrix_stride):
        """[extent, K, G]. matrix_stride: elements from one matrix to the next."""
        divisor = 128 // self.dtype.width
        row_stride = cute.assume(row_stride, divby=divisor)
        matrix_stride = cute.assume(matrix_stride, divby=divisor)
        stride = (row_stride, 1, matrix_stride) if self.k_contiguous else (1, row_stride, matrix_stride)
        return cute.make_tensor(pointer, cute.make_layout((extent, K, G), stride=stride))

    def partition_stack(self, atom, coordinates, smem, rank):
        """(shared [copy, stage], global [copy, tile, k_tile, matrix])."""
        tiles = cute.local_tile(coordinates, (self.extent, self.tile_k), (None, None, None))
        return cpasync.tma_partition(
            atom, rank, cute.make_layout(self.multicast), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )


def partition_from(loader, atom, coordinates, smem, rank, row):
    """As TmaLoader.partition, of tiles that are numbered from row `row` on, which may be any."""
    return loader.partition(atom, cute.domain_offset((row, 0), coordinates), smem, rank)


@dataclass(frozen=True)
class BlockScales:
    """Scales of one stage in shared memory: one for each of `rows` rows of a (or none), then `cells` of b, 128 of its rows each.

    A warp copies them with cp.async and arrives at the stage's barrier when they are there, once per lane.
    """

    rows: int
    cells: int

    @property
    def turns(self) -> int:
        """Rows of one lane."""
        return -(-self.rows // groups.LANES)

    @property
    def pitch(self) -> int:
        """Floats of a stage."""
        return -(-(self.rows + self.cells) // 4) * 4

    @cute.jit
    def places(
        self, row0: Int32, end: Int32, start: Int32, stride: Int32, first: Int32, lane: Int32, steps: cutlass.Constexpr = False
    ):  # fmt: skip
        """Where in the scales of a the rows of this lane begin: row0 + lane, + 32, ...; rows from `end` on take the last one's.

        start: the group's first row, whose scales begin at element `first`; stride: elements from row to row; steps: for copy_steps."""
        turns = SCALE_STEPS * self.rows // groups.LANES if steps else self.turns
        places = cute.make_rmem_tensor(max(1, turns), Int32)
        for i in cutlass.range_constexpr(cute.size(places)):
            number = groups.LANES * i + lane
            row = row0 + (number % self.rows if steps else number)
            # Of a group without rows, the first place there is.
            places[i] = first + (cutlass.max(cutlass.min(row, end - 1), start) - start) * stride
        return places

    @cute.jit
    def copy(
        self, shared: cute.Pointer, stage: Int32, scale_a: cute.Pointer, places: cute.Tensor, along_a: Int32,
        scale_b: cute.Pointer, place_b: Int32, barrier: cute.Pointer, lane: Int32,
    ):  # fmt: skip
        """along_a: elements to this k block's scales from those of the first; place_b: where this lane's cell's scale is."""
        base = shared + stage * self.pitch
        for i in cutlass.range_constexpr(self.turns):
            if cutlass.const_expr((i + 1) * groups.LANES <= self.rows):
                groups.copy_word(base + (groups.LANES * i + lane), scale_a + (places[i] + along_a))
            elif groups.LANES * i + lane < self.rows:
                groups.copy_word(base + (groups.LANES * i + lane), scale_a + (places[i] + along_a))
        if lane < self.cells:
            groups.copy_word(base + (self.rows + lane), scale_b + place_b)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    @cute.jit
    def copy_steps(
        self, shared: cute.Pointer, stage: Int32, scale_a: cute.Pointer, places: cute.Tensor, along_a: Int32, k: Int32, k_tiles: Int32,
        scale_b: cute.Pointer, place_b: Int32, along_b: Int32, barrier: cute.Pointer, lane: Int32,
    ):  # fmt: skip
        """As copy, of SCALE_STEPS stages from `stage` on: lanes take rows, or cells, and then steps. k: the first of those; what is past the
        last takes its scales. along: elements from step to step."""
        base = shared + stage * self.pitch
        for i in cutlass.range_constexpr(cute.size(places)):
            number = groups.LANES * i + lane
            step = number // self.rows
            source = places[i] + along_a * cutlass.min(k + step, k_tiles - 1)
            groups.copy_word(base + (step * self.pitch + number % self.rows), scale_a + source)
        if lane < SCALE_STEPS * self.cells:
            step = lane // self.cells
            source = place_b + along_b * cutlass.min(k + step, k_tiles - 1)
            groups.copy_word(base + (step * self.pitch + self.rows + lane % self.cells), scale_b + source)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


@dataclass(frozen=True)
class SlotScales:
    """Scales of SCALE_STEPS k steps at a time in slots of shared memory: of a tile's `rows` rows of a, and of the blocks of b's
    columns. They arrive at the barrier of the first of the steps' stages.

    kind    how those of a come: "quads", which lie by row in memory, SCALE_STEPS of all rows by TMA; "strips", which lie by k block,
            each step's in one piece from the 16 bytes that the first row's are in, by cp.async.bulk; "words", any, by cp.async.
            In a slot a row's lie side by side, but of strips a step's
    whole   all tiles have a multiple of SCALE_STEPS steps
    """

    kind: str
    rows: int
    tile_n: int
    num_stages: int
    whole: bool

    @property
    def slots(self) -> int:
        """What is in a slot is read in the first of its stages, and the producer is at most num_stages ahead. Where a tile's steps are no
        multiple of SCALE_STEPS, one of the slots has a single stage, or more of them have: see `wait`."""
        return -(-(self.num_stages + (0 if self.whole else SCALE_STEPS - 1)) // SCALE_STEPS)

    @property
    def strip(self) -> int:
        """Elements of a step's strip."""
        return self.rows + 4

    @property
    def row_elements(self) -> int:
        """Of a slot."""
        return SCALE_STEPS * (self.strip if self.kind == "strips" else self.rows)

    @property
    def cell(self) -> int:
        """Columns of a tile that surely share a scale."""
        return math.gcd(self.tile_n, SCALE_BLOCK)

    @property
    def column_blocks(self) -> int:
        """That a tile's columns are in, at most."""
        return -(-(SCALE_BLOCK - self.cell + self.tile_n) // SCALE_BLOCK)

    @property
    def column_elements(self) -> int:
        """Of a slot."""
        return SCALE_STEPS * self.column_blocks

    def quad_layout(self):
        return cute.make_layout((self.rows, SCALE_STEPS), stride=(SCALE_STEPS, 1))

    def quad_tma(self, pointer, rows, k_blocks):
        """(copy atom, coordinate tensor) of scales [rows, k_blocks], a multiple of SCALE_STEPS; called on the host side."""
        k_blocks = cute.assume(k_blocks, divby=SCALE_STEPS)
        matrix = cute.make_tensor(pointer, cute.make_layout((rows, k_blocks), stride=(k_blocks, 1)))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), matrix, self.quad_layout(), (self.rows, SCALE_STEPS)
        )

    def quad_partition(self, atom, coordinates, shared, row):
        """(shared [copy, slot], global [copy, 1, steps]) of a tile from `row` on."""
        layout = cute.make_layout(
            (self.rows, SCALE_STEPS, self.slots), stride=(SCALE_STEPS, 1, SCALE_STEPS * self.rows)
        )
        smem = cute.make_tensor(shared, layout)
        tiles = cute.local_tile(cute.domain_offset((row, 0), coordinates), (self.rows, SCALE_STEPS), (None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )

    @cute.jit
    def strip_bytes(self, count: Int32, place: Int32):
        """Of a strip of `count` rows whose first one's scale is element `place`."""
        return (count + place % 4 + 3) // 4 * 16

    @cute.jit
    def strips_bytes(self, count: Int32, place: Int32, along: Int32, left: Int32):
        """Of the strips of SCALE_STEPS steps, or of the `left` ones that there are; along: elements from step to step."""
        total = Int32(0)
        for u in cutlass.range_constexpr(SCALE_STEPS):
            if u < left:
                total += self.strip_bytes(count, place + along * u)
        return total

    @cute.jit
    def bring_strips(
        self, shared: cute.Pointer, slot: Int32, scale_a: cute.Pointer, count: Int32, place: Int32, along: Int32, left: Int32,
        barrier: cute.Pointer,
    ):  # fmt: skip
        """As strips_bytes. One thread."""
        for u in cutlass.range_constexpr(SCALE_STEPS):
            if u < left:
                source = place + along * u
                target = shared + (slot * self.row_elements + u * self.strip)
                groups.copy_bytes(target, scale_a + source // 4 * 4, self.strip_bytes(count, source), barrier)

    @cute.jit
    def bring_words(
        self, shared: cute.Pointer, slot: Int32, scale_a: cute.Pointer, places: cute.Tensor, along: Int32, k: Int32,
        k_tiles: Int32, lane: Int32,
    ):  # fmt: skip
        """places: BlockScales.places; along: elements from step to step. Steps past the last take its."""
        for u in cutlass.range_constexpr(SCALE_STEPS):
            step = along * cutlass.min(k + u, k_tiles - 1)
            for i in cutlass.range_constexpr(self.rows // groups.LANES):
                target = slot * self.row_elements + (groups.LANES * i + lane) * SCALE_STEPS + u
                groups.copy_word(shared + target, scale_a + (places[i] + step))

    @cute.jit
    def fetch_columns(
        self, scale_b: cute.Pointer, first: Int32, column: Int32, N: Int32, stride_n: Int32, stride_k: Int32, k: Int32,
        k_tiles: Int32, lane: Int32,
    ):  # fmt: skip
        """This lane's scale of b for the steps from k on: lanes take steps, then blocks of columns. first: element of the matrix."""
        block = cutlass.min(column // SCALE_BLOCK + lane // SCALE_STEPS, (N - 1) // SCALE_BLOCK)
        step = cutlass.min(k + lane % SCALE_STEPS, k_tiles - 1)
        return scale_b[first + block * stride_n + step * stride_k]

    @cute.jit
    def leave_columns(self, shared: cute.Pointer, slot: Int32, value: Float32, lane: Int32):
        """What fetch_columns got, in the slot, for whoever waits for the barrier that one of the warp arrives at next."""
        if lane < self.column_elements:
            shared[slot * self.column_elements + lane] = value
        cute.arch.sync_warp()

    @cute.jit
    def wait(self, empty: cute.Pointer, begun: cute.Tensor, count: Int32):
        """Until the slot that is next is free, when `count` stages have been filled. begun [slots]: how many had been when those that
        are in use were, the oldest first. Few stages ago, which a short tile can make it, its first stage may still be in use."""
        before = begun[0]
        if count - before < self.num_stages:
            cute.arch.mbarrier_wait(empty + before % self.num_stages, before // self.num_stages % 2)
        for i in cutlass.range_constexpr(self.slots - 1):
            begun[i] = begun[i + 1]
        begun[self.slots - 1] = count

    def narrow_reader(self, rows, columns, row, n0, width, part, place, along) -> ScaleReader:
        """reader, of the part-th `width` of the tile's columns, which begin at n0."""
        column, of_tile = n0 + part * width, self.reader(rows, columns, row, n0, place, along)
        ahead = column // SCALE_BLOCK - n0 // SCALE_BLOCK
        return replace(
            of_tile,
            column=column,
            cell=math.gcd(self.cell, width),
            columns=of_tile.columns + ahead * of_tile.column_block,
        )

    def reader(self, rows, columns, row, column, place, along) -> ScaleReader:
        """rows, columns: slot 0 of a's scales and of b's; row: the thread's first one in the tile; place, along: of strips, as in
        bring_strips, of the tile's first step."""
        start = rows.toint().to(Int32)
        if self.kind == "strips":
            # 16 bytes hold four elements, and SCALE_STEPS steps are a multiple of four elements apart: so this is the same in all slots.
            own = tuple(start + 4 * (u * self.strip + (place + along * u) % 4 + row) for u in range(SCALE_STEPS))
        else:
            own = (start + row * (4 * SCALE_STEPS),)
        return ScaleReader(
            own, 4 * self.row_elements, 128, columns.toint().to(Int32), 4 * SCALE_STEPS, 4 * self.column_elements,
            self.slots, column, self.cell,
        )  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """The consumers' side of a ring of stages, as accumulate_promoted wants it."""

    full: cute.Pointer
    empty: cute.Pointer
    num_stages: int
    share: int

    @cute.jit
    def consumer_wait(self, state, ready):
        if not ready:
            cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    @cute.jit
    def consumer_try_wait(self, state):
        return cute.arch.mbarrier_test_wait(self.full + state.index, state.phase)

    @cute.jit
    def consumer_release(self, state):
        """A warp has read a stage: tell the CTAs whose loads reach it."""
        release(self.empty + state.index, self.share)


@cute.jit
def release(barrier: cute.Pointer, share: cutlass.Constexpr):
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(share == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)
    elif lane < share:
        cute.arch.mbarrier_arrive(barrier, lane)
