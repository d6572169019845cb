"""Weight gradient of a grouped GEMM for Hopper: out[g] = a[:, rows of g] @ b[:, rows of g].T (+ out[g]) for every group g.

a       [K, M] or [M, K];  b  [K, N] or [N, K], alike; K is the rows of all groups one after another. 8-bit floats: [M, K], [N, K]
m_sizes [G] int32 or int64, rows of each group, which only the device knows
scale_* of tensors; of a's and b's rows (as [M, K], [N, K]); or one for each 128 k of a row, counted from row 0 of the whole matrix,
        wherever groups begin, multiplied in by block (`promote`)
out     [G, M, N]; an empty group gives zeros, or the addend

Cluster c takes tiles c, c + clusters, ... of all groups' tiles, group by group (`Walk`). The CTAs of a pair have tiles side by side and
load a's for each other, or below each other and load b's. A group's k begin and end anywhere: TMA brings tiles from its first row on, or,
where k is contiguous, from the 16 bytes that this row is in, with scales of blocks from the block.

Roles of the producer's warps
  produce      warp 0: has TMA bring operands, and scales of blocks where it can (`quads`)
  serve        warp SERVER: hands float32 results to TMA beside the next tile's products (blocks.cutedsl.ring_store); where their rows are
               not multiples of 16 bytes, and those of other types, they leave from the consumers' registers
  turn_scales  the last two warps: put what TMA brought in order (blocks.cutedsl.both_scales)
  copy_scales  instead, without quads: the last two warps, or where there is no SERVER all four, `produce` among them; a single one would
               take longer than a step's products
Role of two consumer warpgroups, 64 rows each
  consume      waits for a stage, overwrites what belongs to neighbours in a group's first and last one with zeros
               (blocks.cutedsl.other_groups), multiplies it, and with `promote` adds the sums, times their scales, to float32 registers.
               Of tiles of up to 128 columns it has two sets of sums: one is added while the matrix unit makes the other (`four`)

Barriers
  full    1 arrival, which announces TMA's bytes, and where warps copy scales one for each lane of those
  brought 1 arrival, which announces TMA's bytes of a slot of scales: of its own, and each use of it is waited for. A parity does not tell
          the use before the last from the last one, so who waits for only some of a stage's uses takes one for another
  turned  of the two warps that put a slot of scales in order
  free    of each consumer warp, when it has read a slot of scales
  empty   of each consumer warp of each CTA of the cluster
  named   BOTH: of both consumers, when they have written zeros; TURN: of the two warps, when they have read a slot
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import groups, other_groups
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.both_scales import QUAD, TURNERS, BothScales
from fourwave.blocks.cutedsl.epilogue import BUFFER_BYTES
from fourwave.blocks.cutedsl.groups import LANES
from fourwave.blocks.cutedsl.loaders import TmaLoader
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.ring_store import CONSUMERS
from fourwave.blocks.cutedsl.rows_store import RowsStore
from fourwave.blocks.cutedsl.schedule import tile_of

TILE_M = 128
ROWS = 64  # of a consumer
BOTH, TURN = 4, 5  # named barriers
SERVER = 1  # the warp that sees to the ring
SMEM_ALIGN = 1024
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@dataclass(frozen=True)
class Walk:
    """A cluster's way through the tiles of all groups: tiles first, first + stride, ... below count.

    tiles_m, tiles_n  of clusters, in a group; band: as tile_of's
    rank              this CTA's in its cluster
    row_end           the table of groups, as groups.build makes it
    """

    first: Int32
    count: Int32
    stride: Int32
    tiles_m: Int32
    tiles_n: Int32
    band: Int32
    rank: Int32
    row_end: cute.Pointer


@dataclass(frozen=True)
class Barriers:
    """The first one of each, of the kinds that the module's docstring tells; ready, done: the ring's."""

    full: cute.Pointer
    empty: cute.Pointer
    brought: cute.Pointer
    turned: cute.Pointer
    free: cute.Pointer
    ready: cute.Pointer
    done: cute.Pointer


@dataclass(frozen=True)
class GroupedWgrad:
    """One specialisation: __call__ is the launcher, kernel the device code.

    groups      that the table has room for, a multiple of 32
    vector      N, rows of out and their starts are multiples of 16 bytes
    quads       scales of blocks come as "quads", else as "words": BothScales
    share       CTAs of a cluster; along: "m", they have tiles below each other and share b, or "n", side by side
    ring        a RingStore, of float32 results, or None
    """

    tile_n: int
    num_stages: int
    groups: int
    loader_a: TmaLoader
    loader_b: TmaLoader
    out_dtype: type
    accumulate: bool
    a_scaling: str | None
    b_scaling: str | None
    promote: bool
    vector: bool
    overlap: bool
    store_columns: int = 64
    share: int = 1
    along: str = "m"
    ring: Any = None
    quads: bool = False

    @property
    def scales(self) -> BothScales:
        kind = None
        if self.a_scaling == "1x128":
            kind = "quads" if self.quads else "words"
        # Beside the warps of the producer and of the ring.
        return BothScales(kind, (TILE_M, self.tile_n), self.num_stages, 4 if self.ring is None else 2)

    @property
    def pair(self) -> bool:
        """Whether the cluster's tiles lie below each other and share b; else side by side, and share a."""
        return self.share > 1 and self.along == "m"

    @property
    def double(self) -> bool:
        """Whether there are registers for two sets of sums beside the tile's."""
        return self.promote and self.tile_n <= 128 and not self.scales.words

    @property
    def step(self) -> int:
        """Multiples of this many k are where loads begin: a block of scales, or what TMA takes, 16 bytes."""
        if self.scales.kind is not None:
            return 128
        return 128 // self.loader_a.dtype.width if self.loader_a.k_contiguous else 1  # type: ignore[attr-defined]

    @property
    def writer(self) -> RowsStore:
        return RowsStore(
            self.out_dtype, None, self.b_scaling == "row", self.vector, self.accumulate, self.store_columns
        )

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, K: Int32, a_stride: Int64, b_stride: Int64,
        b_matrix: Int64, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32, clusters: Int32, band: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """As sm90.GroupedGemm.__call__, but b_matrix: elements between out's matrices. bias, scale_*: not used but for the pointers."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        tma_b, coordinates_b = self.loader_b.tma(self.loader_b.matrix(b, N, K, b_stride))
        tma_out, coordinates_out, tma_old, coordinates_old = tma_a, coordinates_a, tma_a, coordinates_a
        if cutlass.const_expr(self.ring is not None):
            (tma_out, coordinates_out), (tma_old, coordinates_old) = self.ring.tma(out, M, N, G, out_stride, b_matrix)
        tma_sa, coordinates_sa, tma_sb, coordinates_sb = tma_a, coordinates_a, tma_b, coordinates_b
        if cutlass.const_expr(self.quads):
            tma_sa, coordinates_sa = self.scales.tma(0, scale_a, M, K)
            tma_sb, coordinates_sb = self.scales.tma(1, scale_b, N, K)
        self.kernel(
            tma_a, coordinates_a, tma_b, coordinates_b, tma_out, coordinates_out, tma_old, coordinates_old, tma_sa, coordinates_sa,
            tma_sb, coordinates_sb, out, scale_a, scale_b, sizes, G, M, N, K, out_stride, b_matrix, band,
        ).launch(
            grid=(clusters * self.share, 1, 1), block=(3 * WARPGROUP, 1, 1), cluster=(self.share, 1, 1), min_blocks_per_mp=1,
            stream=stream, use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        tma_out: cute.CopyAtom, coordinates_out: cute.Tensor, tma_old: cute.CopyAtom, coordinates_old: cute.Tensor,
        tma_sa: cute.CopyAtom, coordinates_sa: cute.Tensor, tma_sb: cute.CopyAtom, coordinates_sb: cute.Tensor,
        out: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32,
        K: Int32, out_stride: Int64, out_matrix: Int64, band: Int32,
    ):  # fmt: skip
        loader_a, loader_b, scales = self.loader_a, self.loader_b, self.scales
        writer, ring, share = self.writer, self.ring, self.share
        slots = 0 if ring is None else CONSUMERS * ring.slots
        ring_elements = 0 if ring is None else ring.elements
        out_elements = 8 * writer.elements if ring is None else 8
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        layout_a, layout_b = loader_a.smem_layout(), loader_b.smem_layout()

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.num_stages]
            empty: cute.struct.MemRange[Int64, self.num_stages]
            ready: cute.struct.MemRange[Int64, max(1, slots)]
            done: cute.struct.MemRange[Int64, max(1, slots)]
            brought: cute.struct.MemRange[Int64, scales.slots]
            turned: cute.struct.MemRange[Int64, scales.slots]
            free: cute.struct.MemRange[Int64, scales.slots]
            row_end: cute.struct.MemRange[Int32, self.groups]
            tile_end: cute.struct.MemRange[Int32, self.groups + 32]
            a: cute.struct.Align[cute.struct.MemRange[loader_a.dtype, cute.cosize(layout_a)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[loader_b.dtype, cute.cosize(layout_b)], SMEM_ALIGN]
            pieces: cute.struct.Align[cute.struct.MemRange[Float32, ring_elements], SMEM_ALIGN]
            scales_a: cute.struct.Align[cute.struct.MemRange[Float32, scales.elements[0]], 128]
            scales_b: cute.struct.Align[cute.struct.MemRange[Float32, scales.elements[1]], 128]
            out: cute.struct.Align[cute.struct.MemRange[self.out_dtype, out_elements], 16]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        barriers = Barriers(
            storage.full.data_ptr(), storage.empty.data_ptr(), storage.brought.data_ptr(), storage.turned.data_ptr(),
            storage.free.data_ptr(), storage.ready.data_ptr(), storage.done.data_ptr(),
        )  # fmt: skip
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        shared_scales = storage.scales_a.data_ptr(), storage.scales_b.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(barriers.full + i, 1 + LANES * scales.copiers if scales.words else 1)
                cute.arch.mbarrier_init(barriers.empty + i, 8 * share)
            for i in cutlass.range_constexpr(scales.slots):
                cute.arch.mbarrier_init(barriers.brought + i, 1)
                cute.arch.mbarrier_init(barriers.turned + i, TURNERS)
                cute.arch.mbarrier_init(barriers.free + i, 8)
            for i in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(barriers.ready + i, 1)
                cute.arch.mbarrier_init(barriers.done + i, 4)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            groups.build(sizes, G, K, 1, Int32(1), row_end, tile_end, lane)
        rank = Int32(0)
        if cutlass.const_expr(share > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

        # Of clusters.
        tiles_m = cute.ceil_div(M, TILE_M * (share if self.pair else 1))
        tiles_n = cute.ceil_div(N, self.tile_n * (1 if self.pair else share))
        num_tiles = tiles_m * tiles_n * G
        tile = cute.arch.block_idx()[0] // share
        clusters = cute.arch.grid_dim()[0] // share
        walk = Walk(tile, num_tiles, clusters, tiles_m, tiles_n, band, rank, row_end)

        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if cutlass.const_expr(ring is not None):
                if warp == SERVER:
                    smem_ring = ring.smem(storage.pieces)
                    self.serve(
                        walk,
                        (tma_out, tma_old),
                        (
                            ring.output.partition(tma_out, coordinates_out, smem_ring),
                            ring.output.partition(tma_old, coordinates_old, smem_ring),
                        ),
                        barriers,
                    )
            if cutlass.const_expr(scales.words):
                if warp >= max(1, 4 - scales.copiers):
                    self.copy_scales(walk, barriers, (scale_a, scale_b), shared_scales, M, N, K, warp, lane)
            if cutlass.const_expr(scales.quads):
                if warp >= 4 - TURNERS:
                    self.turn_scales(walk, barriers, shared_scales, warp, lane)
            if warp == 0:
                self.produce(
                    walk, barriers, (tma_a, tma_b), (coordinates_a, coordinates_b), (smem_a, smem_b), (tma_sa, tma_sb),
                    (coordinates_sa, coordinates_sb), (scale_a, scale_b), shared_scales, M, N, K, warp, lane,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            both = thread - WARPGROUP  # in the two warpgroups
            buffer = storage.out.data_ptr()
            if cutlass.const_expr(ring is None):
                buffer += (warp - 4) * writer.elements
            ring_start = storage.pieces.data_ptr().toint().to(Int32)
            self.consume(
                walk, barriers, (smem_a, smem_b), (storage.a.data_ptr(), storage.b.data_ptr()), (scale_a, scale_b), shared_scales,
                out, out_stride, out_matrix, buffer, ring_start, M, N, consumer, both, thread % WARPGROUP, lane,
            )  # fmt: skip
        if cutlass.const_expr(share > 1):
            # Another CTA may still arrive at this one's barriers, or send into its stages.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def place(self, walk: Walk, tile: Int32):
        """(group, m_tile, n_tile) of a cluster's tile number `tile`, this CTA's."""
        per_group = walk.tiles_m * walk.tiles_n
        g = tile // per_group
        m_tile, n_tile = tile_of(tile - g * per_group, walk.tiles_m, walk.tiles_n, walk.band, "m")
        if cutlass.const_expr(self.pair):
            m_tile = m_tile * self.share + walk.rank
        else:
            n_tile = n_tile * self.share + walk.rank
        return g, m_tile, n_tile

    @cute.jit
    def span(self, walk: Walk, g: Int32):
        """(first k that is loaded, k steps, k past the last) of group g."""
        start, end = groups.start_of(walk.row_end, g), walk.row_end[g]
        first = start // self.step * self.step
        steps = cute.ceil_div(end - first, self.loader_a.tile_k)
        if end == start:
            steps = Int32(0)
        return first, steps, end

    @cute.jit
    def produce(
        self, walk: Walk, barriers: Barriers, atoms: tuple, coordinates: tuple, smem: tuple, scale_atoms: tuple,
        scale_coordinates: tuple, sources: tuple, shared: tuple, M: Int32, N: Int32, K: Int32, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """The warp that has TMA bring operands and quads of scales; without a ring it copies its share of words, too.

        atoms, coordinates, smem  of a and of b; scale_*: of their scales
        sources, shared           scales of a and of b, in memory and in slots
        """
        loader_a, loader_b, scales = self.loader_a, self.loader_b, self.scales
        mask_a = mask_b = None
        if cutlass.const_expr(loader_a.multicast > 1):
            mask_a = cutlass.Int16((1 << self.share) - 1)
        if cutlass.const_expr(loader_b.multicast > 1):
            mask_b = cutlass.Int16((1 << self.share) - 1)
        write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        slot, phase = Int32(scales.slots - 1), Int32(0)
        tile = walk.first
        while tile < walk.count:
            g, m_tile, n_tile = self.place(walk, tile)
            first, steps, _ = self.span(walk, g)
            m0 = m_tile * TILE_M
            shared_a, global_a = loader_a.partition(
                atoms[0], cute.domain_offset((m0, first), coordinates[0]), smem[0], 0 if self.pair else walk.rank
            )
            n0 = n_tile * self.tile_n
            shared_b, global_b = loader_b.partition(
                atoms[1], cute.domain_offset((n0, first), coordinates[1]), smem[1], walk.rank if self.pair else 0
            )
            if cutlass.const_expr(scales.words):
                places = scales.places(m_tile, n_tile, M, N, K, first, warp, lane)
            if cutlass.const_expr(scales.quads):
                block = first // 128
                # A box begins at a multiple of 16 bytes, or the instruction is illegal.
                quad = block // QUAD * QUAD
                shared_sa, global_sa = scales.partition(0, scale_atoms[0], scale_coordinates[0], shared[0], m0, quad)
                shared_sb, global_sb = scales.partition(1, scale_atoms[1], scale_coordinates[1], shared[1], n0, quad)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(barriers.empty + write.index, write.phase)
                full = barriers.full + write.index
                if cutlass.const_expr(scales.quads):
                    if scales.begins_quad(block, k):
                        slot, phase = scales.next_slot(slot, phase)
                        at, brought = (block - quad + k) // QUAD, barriers.brought + slot
                        cute.arch.mbarrier_wait(barriers.free + slot, phase)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(brought, scales.quad_bytes)
                        cute.copy(
                            scale_atoms[0], global_sa[(None, 0, at)], shared_sa[(None, slot)], tma_bar_ptr=brought
                        )
                        cute.copy(
                            scale_atoms[1], global_sb[(None, 0, at)], shared_sb[(None, slot)], tma_bar_ptr=brought
                        )
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, loader_a.stage_bytes + loader_b.stage_bytes)
                cute.copy(
                    atoms[0], global_a[(None, 0, k)], shared_a[(None, write.index)], tma_bar_ptr=full, mcast_mask=mask_a
                )
                cute.copy(
                    atoms[1], global_b[(None, 0, k)], shared_b[(None, write.index)], tma_bar_ptr=full, mcast_mask=mask_b
                )
                if cutlass.const_expr(scales.words and scales.copiers == 4):
                    scales.copy(sources, shared, write.index, places, k, full, warp, lane)
                write.advance()
            tile += walk.stride

    @cute.jit
    def copy_scales(
        self, walk: Walk, barriers: Barriers, sources: tuple, shared: tuple, M: Int32, N: Int32, K: Int32, warp: Int32, lane: Int32
    ):  # fmt: skip
        """A warp's share of the words of all stages, beside the producer's."""
        scales = self.scales
        write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        tile = walk.first
        while tile < walk.count:
            g, m_tile, n_tile = self.place(walk, tile)
            first, steps, _ = self.span(walk, g)
            places = scales.places(m_tile, n_tile, M, N, K, first, warp, lane)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(barriers.empty + write.index, write.phase)
                full = barriers.full + write.index
                scales.copy(sources, shared, write.index, places, k, full, warp, lane)
                write.advance()
            tile += walk.stride

    @cute.jit
    def turn_scales(self, walk: Walk, barriers: Barriers, shared: tuple, warp: Int32, lane: Int32):
        """The last two warps, which put quads in order."""
        scales = self.scales
        own = LANES * (warp - (4 - TURNERS)) + lane
        starts = tuple(pointer.toint().to(Int32) for pointer in shared)
        slot, phase = Int32(scales.slots - 1), Int32(1)
        tile = walk.first
        while tile < walk.count:
            g, _, _ = self.place(walk, tile)
            first, steps, _ = self.span(walk, g)
            for k in cutlass.range(steps, unroll=1):
                if scales.begins_quad(first // 128, k):
                    slot, phase = scales.next_slot(slot, phase)
                    cute.arch.mbarrier_wait(barriers.brought + slot, phase)
                    scales.turn(starts, slot, own, TURN)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(barriers.turned + slot)
            tile += walk.stride

    @cute.jit
    def serve(self, walk: Walk, atoms: tuple, parts: tuple, barriers: Barriers):
        """The warp SERVER: RingStore.serve, of all tiles."""
        turn = Int32(0)
        first = Boolean(True)
        tile = walk.first
        while tile < walk.count:
            g, m_tile, n_tile = self.place(walk, tile)
            here = m_tile * CONSUMERS, n_tile * self.ring.pieces, g
            after = tile + walk.stride
            g, m_tile, n_tile = self.place(walk, cutlass.min(after, walk.count - 1))
            there = m_tile * CONSUMERS, n_tile * self.ring.pieces, g
            turn = self.ring.serve(
                atoms, parts, barriers.ready, barriers.done, turn, here, there, after < walk.count, first
            )
            first = Boolean(False)
            tile = after

    @cute.jit
    def consume(
        self, walk: Walk, barriers: Barriers, smem: tuple, memory: tuple, sources: tuple, shared: tuple, out: cute.Pointer,
        out_stride: Int64, out_matrix: Int64, buffer: cute.Pointer, ring_start: Int32, M: Int32, N: Int32, consumer: Int32,
        both: Int32, thread: Int32, lane: Int32,
    ):  # fmt: skip
        """A consumer warpgroup.

        smem, memory     stages of a and of b, and their first bytes
        sources, shared  scales of a and of b, in memory and in slots
        buffer           where a warp's results leave
        both, thread     this one's number in the two consumers, and in its own
        """
        loader_a, ring, scales, tile_k = self.loader_a, self.ring, self.scales, self.loader_a.tile_k
        mma = mma_block.tiled_mma(loader_a, self.loader_b, self.tile_n)
        slice_ = mma.get_slice(0)
        own_a = cute.local_tile(smem[0], (ROWS, tile_k, self.num_stages), (consumer, 0, 0))
        operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
        operand_b = mma.make_fragment_B(slice_.partition_B(smem[1]))
        total = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        tiles = tuple(cute.recast_ptr(pointer, dtype=Int32) for pointer in memory)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
        turn = Int32(0)
        own_scales = scales.own(shared, consumer * ROWS, thread, lane)
        slot, phase = Int32(scales.slots - 1), Int32(1)
        tile = walk.first
        while tile < walk.count:
            g, m_tile, n_tile = self.place(walk, tile)
            first, steps, end = self.span(walk, g)
            start = groups.start_of(walk.row_end, g)
            total.fill(0.0)
            row, n0 = m_tile * TILE_M + consumer * ROWS, n_tile * self.tile_n
            k = Int32(0)
            while k < steps:
                low = cutlass.max(start - (first + k * tile_k), 0)
                left = end - (first + k * tile_k)
                block = first // 128 + k
                if cutlass.const_expr(not self.promote):
                    cute.arch.mbarrier_wait(barriers.full + read.index, read.phase)
                    self.clear(tiles, read.index, low, cutlass.min(left, tile_k), both)
                    warpgroup.fence()
                    mma_block.multiply(mma, total, operand_a, operand_b, read.index, False)
                    warpgroup.wait_group(0)
                    self.release(barriers.empty + read.index, lane)
                    read.advance()
                    k += 1
                elif cutlass.const_expr(self.double):
                    whole = (low == 0) & (left >= QUAD * tile_k)
                    if cutlass.const_expr(scales.quads):
                        whole = whole & (block % QUAD == 0)
                    if whole:
                        read, slot, phase = self.four(
                            total, operand_a, operand_b, barriers, read, slot, phase, own_scales, lane
                        )
                        k += QUAD
                    else:
                        read, slot, phase = self.one(
                            total, operand_a, operand_b, barriers, read, slot, phase, own_scales, lane, tiles, low,
                            cutlass.min(left, tile_k), block % QUAD, k == 0, k == steps - 1, both,
                        )  # fmt: skip
                        k += 1
                else:
                    read, slot, phase = self.one(
                        total, operand_a, operand_b, barriers, read, slot, phase, own_scales, lane, tiles, low,
                        cutlass.min(left, tile_k), block % QUAD, k == 0, k == steps - 1, both,
                    )  # fmt: skip
                    k += 1
            factors = self.factors(sources, row + thread // 32 * 16 + lane // 4, M)
            if cutlass.const_expr(ring is not None):
                own = consumer * ring.slots
                turn = ring.put(
                    total, ring_start + own * BUFFER_BYTES, barriers.ready + own, barriers.done + own, turn, factors,
                    sources[1], n0, N, thread,
                )  # fmt: skip
            elif row < M:
                self.writer.store(
                    total, 0, ROWS * self.tile_n // WARPGROUP, out + g * out_matrix, out_stride, row, M,
                    n0, N, factors, sources[1], out, thread, buffer,
                )  # fmt: skip
            tile += walk.stride

    @cute.jit
    def factors(self, sources: tuple, row: Int32, M: Int32):
        """What a tile's sums are multiplied by besides, of a thread's rows `row` and the one 8 further."""
        alpha = Float32(1.0)
        if cutlass.const_expr(self.a_scaling == "tensor"):
            alpha = alpha * sources[0][0]
        if cutlass.const_expr(self.b_scaling == "tensor"):
            alpha = alpha * sources[1][0]
        factors = cute.make_rmem_tensor(2, Float32)
        factors.fill(alpha)
        if cutlass.const_expr(self.a_scaling == "row"):
            for i in cutlass.range_constexpr(2):
                factors[i] = alpha * sources[0][cutlass.min(row + 8 * i, M - 1)]
        return factors

    @cute.jit
    def clear(self, tiles: tuple, stage: Int32, low: Int32, high: Int32, both: Int32):
        other_groups.clear((self.loader_a, self.loader_b), tiles, stage, low, high, both, BOTH)

    @cute.jit
    def release(self, barrier: cute.Pointer, lane: Int32):
        """A warp has read a stage: tell the CTAs whose loads reach it."""
        if cutlass.const_expr(self.share == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)
        elif lane < self.share:
            cute.arch.mbarrier_arrive(barrier, lane)

    @cute.jit
    def release_slot(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def one(
        self, total: cute.Tensor, a: cute.Tensor, b: cute.Tensor, barriers: Barriers, read, slot: Int32, phase: Int32, own_scales: tuple,
        lane: Int32, tiles: tuple, low: Int32, high: Int32, block: Int32, first, last, both: Int32,
    ):  # fmt: skip
        """total += the products of a k step; returns the pipeline state, and slot and phase of the scales that were read last.

        own_scales  BothScales.own
        tiles       memory of both operands' stages
        low, high   k of the step that are the group's; block: of a quad; first, last: of the tile; both: thread of both consumers
        """
        scales = self.scales
        mma = mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        cute.arch.mbarrier_wait(barriers.full + read.index, read.phase)
        self.clear(tiles, read.index, low, high, both)
        own = read.index
        if cutlass.const_expr(scales.quads):
            if first | (block == 0):
                slot, phase = scales.next_slot(slot, phase)
                cute.arch.mbarrier_wait(barriers.turned + slot, phase)
            own = slot
        else:
            block = Int32(0)
        warpgroup.fence()
        mma_block.multiply(mma, acc, a, b, read.index, True)
        rows, columns, at_b = scales.read(own_scales, own, block)
        warpgroup.wait_group(0)
        if cutlass.const_expr(not scales.words):
            self.release(barriers.empty + read.index, lane)
        scales.add(acc, total, rows, columns, at_b)
        if cutlass.const_expr(scales.words):
            self.release(barriers.empty + read.index, lane)
        if cutlass.const_expr(scales.quads):
            if last | (block == QUAD - 1):
                self.release_slot(barriers.free + slot)
        read.advance()
        return read, slot, phase

    @cute.jit
    def four(
        self, total: cute.Tensor, a: cute.Tensor, b: cute.Tensor, barriers: Barriers, read, slot: Int32, phase: Int32, own_scales: tuple,
        lane: Int32,
    ):  # fmt: skip
        """As `one`, QUAD steps that are all the group's, whose scales are one slot's: a step's products run while the sums of the one
        before are added. Not across these four: ptxas puts a wait behind each wgmma whose sums a loop carries."""
        scales = self.scales
        mma = mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n)
        shape = mma.partition_shape_C((ROWS, self.tile_n))
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        cute.arch.mbarrier_wait(barriers.full + read.index, read.phase)
        warpgroup.fence()
        mma_block.multiply(mma, acc[0], a, b, read.index, True)
        if cutlass.const_expr(scales.quads):
            slot, phase = scales.next_slot(slot, phase)
            cute.arch.mbarrier_wait(barriers.turned + slot, phase)
        for step in cutlass.range_constexpr(QUAD):
            rows, columns, at_b = scales.read(own_scales, slot, step)
            after = read.clone()
            after.advance()
            if cutlass.const_expr(step < QUAD - 1):
                cute.arch.mbarrier_wait(barriers.full + after.index, after.phase)
                warpgroup.fence()
                mma_block.multiply(mma, acc[(step + 1) % 2], a, b, after.index, True)
            warpgroup.wait_group(1 if step < QUAD - 1 else 0)
            self.release(barriers.empty + read.index, lane)
            scales.add(acc[step % 2], total, rows, columns, at_b)
            read = after
        if cutlass.const_expr(scales.quads):
            self.release_slot(barriers.free + slot)
        return read, slot, phase
