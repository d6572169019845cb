"""Scales of both operands, one for each 128 k of a row of a and of b, from memory to a thread's sums of a k step.

A consumer warpgroup has 64 rows of a tile and all its columns; a thread's values are in wgmma's order: for each 8 columns, two of row
lane / 4 and two of row lane / 4 + 8.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fourwave.blocks.cutedsl import groups, ring_store
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.groups import LANES

QUAD = 4  # k blocks whose scales TMA brings together: 16 bytes of each row
AHEAD = 1  # times 16 columns, whose scales are read before their sums are there; of more there are too few registers
TURNERS = 2  # warps


@dataclass(frozen=True)
class BothScales:
    """Buffers of scales, and the ways into and out of them. Tuples are of a and of b.

    kind     "quads": TMA brings QUAD k blocks of a row at a time into a slot, whose scales TURNERS warps then put in the order in which
             threads read them. Rows of scales, and their starts, are multiples of 16 bytes. A slot begins at a multiple of QUAD k
             blocks, and where a tile does
             "words": warps copy those of a stage one by one, 32 bytes from L2 for each
             None: there are no scales
    extents  rows of a tile of a, and of one of b
    slots    buffers. Of quads as many as stages: a tile's first stage begins a new one, and as many tiles of one stage as stages are
             under way
    copiers  of words: warps that copy, the last ones of the four of the producer's warpgroup
    """

    kind: str | None
    extents: tuple[int, int]
    slots: int
    copiers: int

    @property
    def quads(self) -> bool:
        return self.kind == "quads"

    @property
    def words(self) -> bool:
        return self.kind == "words"

    @property
    def pitch(self) -> int:
        """Floats from one lane's columns to the next one's, of four lanes: 16 bytes more than they are, so that all are in banks of
        their own."""
        return self.extents[1] // 4 + 4

    @property
    def slot_bytes(self) -> tuple[int, int]:
        if self.quads:
            return self.extents[0] * 4 * QUAD, 16 * QUAD * self.pitch
        return self.extents[0] * 4, self.extents[1] * 4

    @property
    def step_bytes(self) -> tuple[int, int]:
        """From a k block of a slot to the next."""
        return (4 * self.extents[0], 16 * self.pitch) if self.quads else (4, 4)

    @property
    def elements(self) -> tuple[int, int]:
        if self.kind is None:
            return 4, 4
        return self.slots * self.slot_bytes[0] // 4, self.slots * self.slot_bytes[1] // 4

    # Quads.

    @property
    def quad_bytes(self) -> int:
        """Of both operands, that TMA brings."""
        return 4 * QUAD * sum(self.extents)

    @cute.jit
    def tma(self, operand: cutlass.Constexpr, scales: cute.Pointer, rows: Int32, K: Int32):
        """(copy atom, coordinate tensor) of scales [rows, K / 128]; called on the host side."""
        box = self.extents[operand], QUAD
        k_blocks = cute.assume(cute.ceil_div(K, 128), divby=QUAD)
        matrix = cute.make_tensor(scales, cute.make_layout((rows, k_blocks), stride=(k_blocks, 1)))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), matrix, cute.make_layout(box, stride=(QUAD, 1)), box
        )

    @cute.jit
    def partition(
        self, operand: cutlass.Constexpr, atom: cute.CopyAtom, coordinates: cute.Tensor, shared: cute.Pointer, row: Int32, block: Int32
    ):  # fmt: skip
        """(shared [copy, slot], global [copy, 1, quad]) from a row and a block of k on, a multiple of QUAD."""
        box = self.extents[operand], QUAD
        layout = cute.make_layout((*box, self.slots), stride=(QUAD, 1, self.slot_bytes[operand] // 4))
        tiles = cute.local_tile(cute.domain_offset((row, block), coordinates), box, (None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(cute.make_tensor(shared, layout), 0, 2), cute.group_modes(tiles, 0, 2)
        )  # fmt: skip

    @cute.jit
    def begins_quad(self, block: Int32, k: Int32):
        """Whether the scales of a tile's k-th step, whose first one is k block `block`, are in another slot than the one's before."""
        return (k == 0) | ((block + k) % QUAD == 0)

    @cute.jit
    def next_slot(self, slot: Int32, phase: Int32):
        slot = slot + 1
        if slot == self.slots:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    @cute.jit
    def turn(self, starts: tuple, slot: Int32, thread: Int32, barrier: cutlass.Constexpr):
        """A slot that TMA has brought row by row becomes one of k blocks, of which each has a's rows one after the other, and of b's
        columns those of a thread. TURNERS warps; starts: addresses of slot 0; barrier: a named one of theirs."""
        slot_a, slot_b = starts[0] + slot * self.slot_bytes[0], starts[1] + slot * self.slot_bytes[1]
        threads = TURNERS * LANES
        rows = [ring_store.load_quad(slot_a + thread * 16, 1024 * i) for i in range(self.extents[0] // threads)]
        columns = [ring_store.load_quad(slot_b + thread * 16, 1024 * i) for i in range(self.extents[1] // threads)]
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)  # all have been read
        for i in cutlass.range_constexpr(self.extents[0] // threads):
            for step in cutlass.range_constexpr(QUAD):
                ring_store.store(slot_a + thread * 4, step * self.step_bytes[0] + 256 * i, rows[i][step])
        # Column 8 i + 2 q + c: of a thread with lane % 4 == q the (2 i + c)-th.
        target = slot_b + (thread % 8 // 2 * self.pitch + thread // 8 * 2 + thread % 2) * 4
        for i in cutlass.range_constexpr(self.extents[1] // threads):
            for step in cutlass.range_constexpr(QUAD):
                ring_store.store(target, step * self.step_bytes[1] + 64 * i, columns[i][step])
        cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes there next
        cute.arch.sync_warp()

    # Words.

    @property
    def turns(self) -> tuple[int, int]:
        """Rows whose scales a lane of the copiers copies for a stage."""
        lanes = LANES * self.copiers
        return self.extents[0] // lanes, -(-self.extents[1] // lanes)

    @cute.jit
    def copier(self, warp: Int32, lane: Int32):
        """Number of a lane among the copiers'; warp: of the producer's warpgroup."""
        return LANES * (warp - (4 - self.copiers)) + lane

    @cute.jit
    def places(
        self, m_tile: Int32, n_tile: Int32, M: Int32, N: Int32, K: Int32, first: Int32, warp: Int32, lane: Int32
    ):
        """Where the scales of this lane's rows of a and of b are, of a tile and at k `first`, which begins a block: the copiers' lanes
        take a row each, in turns."""
        k_blocks = cute.ceil_div(K, 128)
        lanes = LANES * self.copiers
        places = cute.make_rmem_tensor(sum(self.turns), Int32)
        own = self.copier(warp, lane)
        for i in cutlass.range_constexpr(self.turns[0]):
            row = cutlass.min(m_tile * self.extents[0] + own + lanes * i, M - 1)
            places[i] = row * k_blocks + first // 128
        for i in cutlass.range_constexpr(self.turns[1]):
            row = cutlass.min(n_tile * self.extents[1] + own + lanes * i, N - 1)
            places[self.turns[0] + i] = row * k_blocks + first // 128
        return places

    @cute.jit
    def copy(
        self, sources: tuple, shared: tuple, slot: Int32, places: cute.Tensor, k: Int32, barrier: cute.Pointer, warp: Int32, lane: Int32
    ):  # fmt: skip
        """Of the tile's k-th step. Each lane arrives at the barrier when its own are there."""
        lanes = LANES * self.copiers
        own = self.copier(warp, lane)
        for i in cutlass.range_constexpr(self.turns[0]):
            groups.copy_word(shared[0] + (slot * self.extents[0] + own + lanes * i), sources[0] + (places[i] + k))
        for i in cutlass.range_constexpr(self.turns[1]):
            target = shared[1] + (slot * self.extents[1] + own + lanes * i)
            if cutlass.const_expr(lanes * (i + 1) <= self.extents[1]):
                groups.copy_word(target, sources[1] + (places[self.turns[0] + i] + k))
            elif own + lanes * i < self.extents[1]:
                groups.copy_word(target, sources[1] + (places[self.turns[0] + i] + k))
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    # Out of slots.

    @cute.jit
    def own(self, shared: tuple, row: Int32, thread: Int32, lane: Int32):
        """Addresses of a thread's first scales in slot 0, of its rows and of its columns; row: the warpgroup's first one in the tile."""
        return (
            shared[0].toint().to(Int32) + (row + thread // 32 * 16 + lane // 4) * 4,
            shared[1].toint().to(Int32) + lane % 4 * (4 * self.pitch if self.quads else 8),
        )

    def _columns(self, address: Int32, i: int):
        """Scales of a thread's four columns among 16, the i-th ones: of either 8 two."""
        if self.quads:
            return ring_store.load_quad(address, 16 * i)
        return [*ring_store.load_pair(address, 64 * i), *ring_store.load_pair(address, 64 * i + 32)]

    @cute.jit
    def read(self, own: tuple, slot: Int32, block):
        """(of this thread's two rows, of the first AHEAD times 16 columns, where those of all columns are), of a k block of a slot."""
        rows: list = []
        columns: list = []
        at_b = own[1]
        if cutlass.const_expr(self.kind is not None):
            # ptxas moves no access to memory across these: loads between the wgmmas would hold those up.
            cute.arch.sync_warp()
            at_a = own[0] + slot * self.slot_bytes[0] + block * self.step_bytes[0]
            at_b = own[1] + slot * self.slot_bytes[1] + block * self.step_bytes[1]
            rows = [ring_store.load(at_a, 32 * i) for i in range(2)]
            columns = [self._columns(at_b, i) for i in range(AHEAD)]
            cute.arch.sync_warp()
        return rows, columns, at_b

    @cute.jit
    def add(self, acc: cute.Tensor, total: cute.Tensor, rows: list, columns: list, at_b: Int32):
        """total += acc * scales, which `read` returns. Pinned: as in mma_block._promote."""
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = mma_block._pinned(acc[v])
        units = cute.size(acc) // 8  # of 16 columns
        for i in cutlass.range_constexpr(units):
            if cutlass.const_expr(self.kind is not None and len(columns) < units):
                columns = [*columns, self._columns(at_b, len(columns))]
            for v in cutlass.range_constexpr(8):
                value = acc[8 * i + v]
                if cutlass.const_expr(self.kind is not None):
                    value = value * rows[v // 2 % 2] * columns[i][v // 4 * 2 + v % 2]
                total[8 * i + v] = total[8 * i + v] + value
        for v in cutlass.range_constexpr(cute.size(acc)):
            total[v] = mma_block._pinned(total[v])
