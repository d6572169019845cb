"""Weight gradient of a grouped GEMM for Hopper: out[g] = a[:, rows of g] @ b[:, rows of g].T (+ out[g]) for every group g.

a       [K, M] or [M, K];  b  [K, N] or [N, K], alike; K is the rows of all groups one after another. 8-bit floats: [M, K], [N, K]
m_sizes [G] int32 or int64, rows of each group, which only the device knows
scale_* of tensors; of a's and b's rows (as [M, K], [N, K]); or one for each 128 k of a row, counted from row 0 of the whole matrix,
        wherever groups begin, multiplied in by block (`promote`)
out     [G, M, N]; an empty group gives zeros, or the addend

Cluster c takes tiles c, c + clusters, ... of all groups' tiles, group by group. One producer warp and two consumer warpgroups of 64 rows
each, as in sm90.py. The CTAs of a pair have tiles side by side and load a's for each other, or below each other and load b's. Scales of
blocks are brought by TMA and put in order by two warps beside the producer, or copied by such warps, one of which would take longer than a
step's products (`quads`). Of tiles of up to 128 columns each consumer has two sets of sums: one is multiplied by its scales and added to
float32 registers while the matrix unit makes the other (`four`). A group's k begin and end anywhere. TMA brings tiles from its first row on, or, where k is contiguous, from the 16 bytes that this row is in, with scales of blocks from the block.
In a group's first and last tile the consumers overwrite what belongs to its neighbours with zeros, of both operands, since zero times a
neighbour's NaN is NaN. Float32 results leave beside the next tile's products (blocks.cutedsl.ring_store), which another warp of the
producer's sees to; where their rows are not multiples of 16 bytes, and those of other types, from registers.

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

from fourwave.blocks.cutedsl import groups, ring_store
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.epilogue import BUFFER_BYTES
from fourwave.blocks.cutedsl.loaders import TmaLoader
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.ring_store import CONSUMERS
from fourwave.blocks.cutedsl.rows_store import RowsStore
from fourwave.blocks.cutedsl.schedule import tile_of

TILE_M = 128
ROWS = 64  # of a consumer
BOTH, TURN = 4, 5  # named barriers
SERVER = 1  # the warp that sees to the ring
QUAD = 4  # k blocks whose scales TMA brings together: 16 bytes of each row
AHEAD = 1  # times 16 columns, whose scales are read before their sums are there; of more there are too few registers
LANES = 32
LINE = 128  # bytes of a tile's row in shared memory, of its k or of 64 of its rows
SMEM_ALIGN = 1024
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@dataclass(frozen=True)
class GroupedWgrad:
    """One specialisation: __call__ is the launcher, kernel the device code.

    groups      that the table has room for, a multiple of 32
    vector      N, rows of out and their starts are multiples of 16 bytes
    quads       TMA brings scales of blocks, QUAD k blocks of a row at a time: rows of scales, and their starts, are multiples of 16
                bytes; two warps put them in the order in which threads read them. Else warps copy them word by word, 32 bytes from L2 for each
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
    def pitch(self) -> int:
        """Floats from one lane's columns to the next one's, of four lanes: 16 bytes more than they are, so that all are in banks of their own."""
        return self.tile_n // 4 + 4

    @property
    def slot_a_bytes(self) -> int:
        return TILE_M * self.scale_bytes

    @property
    def slot_b_bytes(self) -> int:
        return 16 * QUAD * self.pitch if self.quads else self.tile_n * self.scale_bytes

    @property
    def step_bytes(self) -> tuple[int, int]:
        """From a k block of a slot to the next, of a's scales and of b's."""
        return (4 * TILE_M, 16 * self.pitch) if self.quads else (4, 4)

    @property
    def pair(self) -> bool:
        """Whether the cluster's tiles lie below each other and share b; else side by side, and share a."""
        return self.share > 1 and self.along == "m"

    @property
    def words(self) -> bool:
        """Whether warps copy scales."""
        return self.blocks and not self.quads

    @property
    def scale_slots(self) -> int:
        """Buffers for scales. Of QUAD blocks: a tile's first stage begins a new one, and as many tiles of one stage as stages are under way."""
        return self.num_stages

    @property
    def scale_bytes(self) -> int:
        """Of a row in a buffer."""
        return 4 * QUAD if self.quads else 4

    def quad_layout(self, rows: int):
        return cute.make_layout((rows, QUAD), stride=(QUAD, 1))

    @cute.jit
    def quad_tma(self, scales: cute.Pointer, rows: Int32, K: Int32, extent: cutlass.Constexpr):
        k_blocks = cute.assume(cute.ceil_div(K, 128), divby=QUAD)
        matrix = cute.make_tensor(scales, cute.make_layout((rows, k_blocks), stride=(k_blocks, 1)))
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), matrix, self.quad_layout(extent), (extent, QUAD)
        )

    @cute.jit
    def quad_partition(
        self, atom: cute.CopyAtom, coordinates: cute.Tensor, shared: cute.Pointer, extent: cutlass.Constexpr, slot_bytes: cutlass.Constexpr,
        row: Int32, block: Int32,
    ):  # fmt: skip
        """(shared [copy, slot], global [copy, 1, quad]) from a row and a block of k on."""
        layout = cute.make_layout((extent, QUAD, self.scale_slots), stride=(QUAD, 1, slot_bytes // 4))
        tiles = cute.local_tile(cute.domain_offset((row, block), coordinates), (extent, QUAD), (None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(cute.make_tensor(shared, layout), 0, 2), cute.group_modes(tiles, 0, 2)
        )  # fmt: skip

    @property
    def copiers(self) -> int:
        """Warps that copy scales, the last ones of the producer's warpgroup."""
        return 4 if self.ring is None else 2

    @property
    def blocks(self) -> bool:
        return self.a_scaling == "1x128"

    @property
    def double(self) -> bool:
        """Whether there are registers for two sets of sums beside the tile's."""
        return self.promote and self.tile_n <= 128 and not self.words

    @property
    def step(self) -> int:
        """Multiples of this many k are where loads begin: a block of scales, or what TMA takes, 16 bytes."""
        if self.blocks:
            return 128
        return 128 // self.loader_a.dtype.width if self.loader_a.k_contiguous else 1  # type: ignore[attr-defined]

    @property
    def turns_a(self) -> int:
        """Scales of a's rows that a lane of the copiers copies for a stage."""
        return TILE_M // (LANES * self.copiers)

    @property
    def turns_b(self) -> int:
        return -(-self.tile_n // (LANES * self.copiers))

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
            tma_sa, coordinates_sa = self.quad_tma(scale_a, M, K, TILE_M)
            tma_sb, coordinates_sb = self.quad_tma(scale_b, N, K, self.tile_n)
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
        loader_a, loader_b, writer, ring, share = self.loader_a, self.loader_b, self.writer, self.ring, self.share
        slots = 0 if ring is None else CONSUMERS * ring.slots
        ring_elements = 0 if ring is None else ring.elements
        out_elements = 8 * writer.elements if ring is None else 8
        tile_k = loader_a.tile_k
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
            brought: cute.struct.MemRange[Int64, self.scale_slots]
            turned: cute.struct.MemRange[Int64, self.scale_slots]
            free: cute.struct.MemRange[Int64, self.scale_slots]
            row_end: cute.struct.MemRange[Int32, self.groups]
            tile_end: cute.struct.MemRange[Int32, self.groups + 32]
            a: cute.struct.Align[cute.struct.MemRange[loader_a.dtype, cute.cosize(layout_a)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[loader_b.dtype, cute.cosize(layout_b)], SMEM_ALIGN]
            pieces: cute.struct.Align[cute.struct.MemRange[Float32, ring_elements], SMEM_ALIGN]
            scales_a: cute.struct.Align[
                cute.struct.MemRange[Float32, self.scale_slots * self.slot_a_bytes // 4 if self.blocks else 4],
                128,
            ]
            scales_b: cute.struct.Align[
                cute.struct.MemRange[Float32, self.scale_slots * self.slot_b_bytes // 4 if self.blocks else 4],
                128,
            ]
            out: cute.struct.Align[cute.struct.MemRange[self.out_dtype, out_elements], 16]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        brought, turned, free = storage.brought.data_ptr(), storage.turned.data_ptr(), storage.free.data_ptr()
        ready, done = storage.ready.data_ptr(), storage.done.data_ptr()
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        scales_a, scales_b = storage.scales_a.data_ptr(), storage.scales_b.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + i, 1 + LANES * self.copiers if self.words else 1)
                cute.arch.mbarrier_init(empty + i, 8 * share)
            for i in cutlass.range_constexpr(self.scale_slots):
                cute.arch.mbarrier_init(brought + i, 1)
                cute.arch.mbarrier_init(turned + i, 2)
                cute.arch.mbarrier_init(free + i, 8)
            for i in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(ready + i, 1)
                cute.arch.mbarrier_init(done + i, 4)
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

        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warpgroup_index == 0:
            # Producer.
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if cutlass.const_expr(ring is not None):
                if warp == SERVER:
                    smem_ring = ring.smem(storage.pieces)
                    self.serve(
                        (tma_out, tma_old),
                        (
                            ring.output.partition(tma_out, coordinates_out, smem_ring),
                            ring.output.partition(tma_old, coordinates_old, smem_ring),
                        ),
                        ready, done, tile, num_tiles, clusters, tiles_m, tiles_n, band, rank,
                    )  # fmt: skip
            if cutlass.const_expr(self.words):
                if warp >= max(1, 4 - self.copiers):
                    self.bring_scales(
                        tile, num_tiles, clusters, tiles_m, tiles_n, band, rank, M, N, K, row_end, full, empty, scale_a, scale_b,
                        scales_a, scales_b, warp, lane,
                    )  # fmt: skip
            if cutlass.const_expr(self.quads):
                if warp >= 2:
                    self.turn_scales(
                        tile, num_tiles, clusters, tiles_m, tiles_n, band, rank, row_end, brought, turned, scales_a, scales_b,
                        warp, lane,
                    )  # fmt: skip
            if warp == 0:
                mask_a = mask_b = None
                if cutlass.const_expr(loader_a.multicast > 1):
                    mask_a = cutlass.Int16((1 << share) - 1)
                if cutlass.const_expr(loader_b.multicast > 1):
                    mask_b = cutlass.Int16((1 << share) - 1)
                write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
                slot, phase = Int32(self.scale_slots - 1), Int32(0)
                while tile < num_tiles:
                    g, m_tile, n_tile = self.place(tile, tiles_m, tiles_n, band, rank)
                    first, steps, _ = self.span(row_end, g)
                    shared_a, global_a = loader_a.partition(
                        tma_a,
                        cute.domain_offset((m_tile * TILE_M, first), coordinates_a),
                        smem_a,
                        0 if self.pair else rank,
                    )
                    shared_b, global_b = loader_b.partition(
                        tma_b,
                        cute.domain_offset((n_tile * self.tile_n, first), coordinates_b),
                        smem_b,
                        rank if self.pair else 0,
                    )
                    places = self.places(m_tile, n_tile, M, N, K, first, warp, lane)
                    if cutlass.const_expr(self.quads):
                        block = first // 128
                        # A box begins at a multiple of 16 bytes, or the instruction is illegal.
                        quad = block // QUAD * QUAD
                        shared_sa, global_sa = self.quad_partition(
                            tma_sa, coordinates_sa, scales_a, TILE_M, self.slot_a_bytes, m_tile * TILE_M, quad
                        )
                        shared_sb, global_sb = self.quad_partition(
                            tma_sb, coordinates_sb, scales_b, self.tile_n, self.slot_b_bytes, n_tile * self.tile_n, quad
                        )
                    for k in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(empty + write.index, write.phase)
                        barrier = full + write.index
                        if cutlass.const_expr(self.quads):
                            if self.begins_quad(block, k):
                                slot, phase = self.next_slot(slot, phase)
                                at, arrived = (block - quad + k) // QUAD, brought + slot
                                cute.arch.mbarrier_wait(free + slot, phase)
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive_and_expect_tx(
                                        arrived, self.scale_bytes * (TILE_M + self.tile_n)
                                    )
                                cute.copy(
                                    tma_sa, global_sa[(None, 0, at)], shared_sa[(None, slot)], tma_bar_ptr=arrived
                                )
                                cute.copy(
                                    tma_sb, global_sb[(None, 0, at)], shared_sb[(None, slot)], tma_bar_ptr=arrived
                                )
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                barrier, loader_a.stage_bytes + loader_b.stage_bytes
                            )
                        cute.copy(
                            tma_a,
                            global_a[(None, 0, k)],
                            shared_a[(None, write.index)],
                            tma_bar_ptr=barrier,
                            mcast_mask=mask_a,
                        )
                        cute.copy(
                            tma_b,
                            global_b[(None, 0, k)],
                            shared_b[(None, write.index)],
                            tma_bar_ptr=barrier,
                            mcast_mask=mask_b,
                        )
                        if cutlass.const_expr(self.words and self.copiers == 4):
                            self.copy_scales(
                                scale_a, scale_b, scales_a, scales_b, write.index, places, k, barrier, warp, lane
                            )
                        write.advance()
                    tile += clusters
        else:
            # Consumers.
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            both = thread - WARPGROUP  # in the two warpgroups
            barriers = full, empty, turned, free
            buffer = storage.out.data_ptr()
            if cutlass.const_expr(ring is None):
                buffer += (warp - 4) * writer.elements
            ring_start = storage.pieces.data_ptr().toint().to(Int32)
            thread = thread % WARPGROUP
            mma = mma_block.tiled_mma(loader_a, loader_b, self.tile_n)
            slice_ = mma.get_slice(0)
            own_a = cute.local_tile(smem_a, (ROWS, tile_k, self.num_stages), (consumer, 0, 0))
            operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
            operand_b = mma.make_fragment_B(slice_.partition_B(smem_b))
            total = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
            tiles = tuple(cute.recast_ptr(memory.data_ptr(), dtype=Int32) for memory in (storage.a, storage.b))
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            turn = Int32(0)
            scales = (
                scales_a.toint().to(Int32) + (consumer * ROWS + thread // 32 * 16 + lane // 4) * 4,
                scales_b.toint().to(Int32) + lane % 4 * (4 * self.pitch if self.quads else 8),
            )
            slot, phase = Int32(self.scale_slots - 1), Int32(1)
            while tile < num_tiles:
                g, m_tile, n_tile = self.place(tile, tiles_m, tiles_n, band, rank)
                first, steps, end = self.span(row_end, g)
                start = groups.start_of(row_end, g)
                total.fill(0.0)
                row, n0 = m_tile * TILE_M + consumer * ROWS, n_tile * self.tile_n
                k = Int32(0)
                while k < steps:
                    low = cutlass.max(start - (first + k * tile_k), 0)
                    left = end - (first + k * tile_k)
                    block = first // 128 + k
                    if cutlass.const_expr(not self.promote):
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                        self.clear_others(tiles, read.index, low, cutlass.min(left, tile_k), both)
                        warpgroup.fence()
                        self.issue(mma, total, operand_a, operand_b, read.index, False)
                        warpgroup.wait_group(0)
                        self.release(empty + read.index, lane)
                        read.advance()
                        k += 1
                    elif cutlass.const_expr(self.double):
                        whole = (low == 0) & (left >= QUAD * tile_k)
                        if cutlass.const_expr(self.quads):
                            whole = whole & (block % QUAD == 0)
                        if whole:
                            read, slot, phase = self.four(
                                total, operand_a, operand_b, barriers, read, slot, phase, scales, lane
                            )
                            k += QUAD
                        else:
                            read, slot, phase = self.one(
                                total, operand_a, operand_b, barriers, read, slot, phase, scales, lane, tiles, low,
                                cutlass.min(left, tile_k), block % QUAD, k == 0, k == steps - 1, both,
                            )  # fmt: skip
                            k += 1
                    else:
                        read, slot, phase = self.one(
                            total, operand_a, operand_b, barriers, read, slot, phase, scales, lane, tiles, low,
                            cutlass.min(left, tile_k), block % QUAD, k == 0, k == steps - 1, both,
                        )  # fmt: skip
                        k += 1
                alpha = Float32(1.0)
                if cutlass.const_expr(self.a_scaling == "tensor"):
                    alpha = alpha * scale_a[0]
                if cutlass.const_expr(self.b_scaling == "tensor"):
                    alpha = alpha * scale_b[0]
                factors = cute.make_rmem_tensor(2, Float32)
                factors.fill(alpha)
                if cutlass.const_expr(self.a_scaling == "row"):
                    for i in cutlass.range_constexpr(2):
                        own = row + thread // 32 * 16 + lane // 4 + 8 * i
                        factors[i] = alpha * scale_a[cutlass.min(own, M - 1)]
                if cutlass.const_expr(ring is not None):
                    own = consumer * ring.slots
                    turn = ring.put(
                        total,
                        ring_start + own * BUFFER_BYTES,
                        ready + own,
                        done + own,
                        turn,
                        factors,
                        scale_b,
                        n0,
                        N,
                        thread,
                    )
                elif row < M:
                    writer.store(
                        total, 0, ROWS * self.tile_n // WARPGROUP, out + g * out_matrix, out_stride, row, M,
                        n0, N, factors, scale_b, out, thread, buffer,
                    )  # fmt: skip
                tile += clusters
        if cutlass.const_expr(share > 1):
            # Another CTA may still arrive at this one's barriers, or send into its stages.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def place(self, tile: Int32, tiles_m: Int32, tiles_n: Int32, band: Int32, rank: Int32):
        """(group, m_tile, n_tile) of a cluster's tile number `tile`, this CTA's."""
        per_group = tiles_m * tiles_n
        g = tile // per_group
        m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
        if cutlass.const_expr(self.pair):
            m_tile = m_tile * self.share + rank
        else:
            n_tile = n_tile * self.share + rank
        return g, m_tile, n_tile

    @cute.jit
    def serve(
        self, atoms: tuple, parts: tuple, ready: cute.Pointer, done: cute.Pointer, tile: Int32, num_tiles: Int32, clusters: Int32,
        tiles_m: Int32, tiles_n: Int32, band: Int32, rank: Int32,
    ):  # fmt: skip
        """The warp SERVER: RingStore.serve, of all tiles."""
        turn = Int32(0)
        first = Boolean(True)
        while tile < num_tiles:
            g, m_tile, n_tile = self.place(tile, tiles_m, tiles_n, band, rank)
            here = m_tile * CONSUMERS, n_tile * self.ring.pieces, g
            g, m_tile, n_tile = self.place(cutlass.min(tile + clusters, num_tiles - 1), tiles_m, tiles_n, band, rank)
            after = m_tile * CONSUMERS, n_tile * self.ring.pieces, g
            turn = self.ring.serve(atoms, parts, ready, done, turn, here, after, tile + clusters < num_tiles, first)
            first = Boolean(False)
            tile += clusters

    @cute.jit
    def bring_scales(
        self, tile: Int32, num_tiles: Int32, clusters: Int32, tiles_m: Int32, tiles_n: Int32, band: Int32, rank: Int32, M: Int32,
        N: Int32, K: Int32, row_end: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, scales_a: cute.Pointer, scales_b: cute.Pointer, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """A warp's share of the scales of all stages, beside the producer's."""
        write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        while tile < num_tiles:
            g, m_tile, n_tile = self.place(tile, tiles_m, tiles_n, band, rank)
            first, steps, _ = self.span(row_end, g)
            places = self.places(m_tile, n_tile, M, N, K, first, warp, lane)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + write.index, write.phase)
                self.copy_scales(
                    scale_a, scale_b, scales_a, scales_b, write.index, places, k, full + write.index, warp, lane
                )
                write.advance()
            tile += clusters

    @cute.jit
    def places(
        self, m_tile: Int32, n_tile: Int32, M: Int32, N: Int32, K: Int32, first: Int32, warp: Int32, lane: Int32
    ):
        """Where the scales of this lane's rows of a and of b are, at the tile's first block: the copiers' lanes take a row each, in turns."""
        k_blocks = cute.ceil_div(K, 128)
        lanes = LANES * self.copiers
        places = cute.make_rmem_tensor(self.turns_a + self.turns_b, Int32)
        own = LANES * (warp - (4 - self.copiers)) + lane
        for i in cutlass.range_constexpr(self.turns_a):
            places[i] = cutlass.min(m_tile * TILE_M + own + lanes * i, M - 1) * k_blocks + first // 128
        for i in cutlass.range_constexpr(self.turns_b):
            row = cutlass.min(n_tile * self.tile_n + own + lanes * i, N - 1)
            places[self.turns_a + i] = row * k_blocks + first // 128
        return places

    @cute.jit
    def copy_scales(
        self, scale_a: cute.Pointer, scale_b: cute.Pointer, scales_a: cute.Pointer, scales_b: cute.Pointer, stage: Int32,
        places: cute.Tensor, k: Int32, barrier: cute.Pointer, warp: Int32, lane: Int32,
    ):  # fmt: skip
        lanes = LANES * self.copiers
        own = LANES * (warp - (4 - self.copiers)) + lane
        for i in cutlass.range_constexpr(self.turns_a):
            groups.copy_word(scales_a + (stage * TILE_M + own + lanes * i), scale_a + (places[i] + k))
        for i in cutlass.range_constexpr(self.turns_b):
            target = scales_b + (stage * self.tile_n + own + lanes * i)
            if cutlass.const_expr(lanes * (i + 1) <= self.tile_n):
                groups.copy_word(target, scale_b + (places[self.turns_a + i] + k))
            elif own + lanes * i < self.tile_n:
                groups.copy_word(target, scale_b + (places[self.turns_a + i] + k))
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    @cute.jit
    def span(self, row_end: cute.Pointer, g: Int32):
        """(first k that is loaded, k steps, k past the last) of group g."""
        start, end = groups.start_of(row_end, g), row_end[g]
        first = start // self.step * self.step
        steps = cute.ceil_div(end - first, self.loader_a.tile_k)
        if end == start:
            steps = Int32(0)
        return first, steps, end

    @cute.jit
    def release(self, barrier: cute.Pointer, lane: Int32):
        """A warp has read a stage: tell the CTAs whose loads reach it."""
        if cutlass.const_expr(self.share == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)
        elif lane < self.share:
            cute.arch.mbarrier_arrive(barrier, lane)

    @cute.jit
    def issue(
        self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage, fresh: cutlass.Constexpr
    ):
        """acc += a @ b over the k steps of a stage, as one group; with `fresh` acc is overwritten."""
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
            cute.gemm(mma, acc, a[(None, None, k, stage)], b[(None, None, k, stage)], acc)
        warpgroup.commit_group()

    @cute.jit
    def one(
        self, total: cute.Tensor, a: cute.Tensor, b: cute.Tensor, barriers: tuple, read, slot: Int32, phase: Int32, scales: tuple,
        lane: Int32, tiles: tuple, low: Int32, high: Int32, block: Int32, first, last, both: Int32,
    ):  # fmt: skip
        """total += the products of a k step; returns the pipeline state, and slot and phase of the scales that were read last.

        barriers  full, empty, turned, free
        scales    addresses of this thread's first ones in slot 0, of its rows and of its columns
        low, high  k of the step that are the group's; block: of the slot; first, last: of the tile; both: thread of both consumers
        """
        full, empty, turned, free = barriers
        mma = mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        cute.arch.mbarrier_wait(full + read.index, read.phase)
        self.clear_others(tiles, read.index, low, high, both)
        own = read.index
        if cutlass.const_expr(self.quads):
            if first | (block == 0):
                slot, phase = self.next_slot(slot, phase)
                cute.arch.mbarrier_wait(turned + slot, phase)
            own = slot
        else:
            block = Int32(0)
        warpgroup.fence()
        self.issue(mma, acc, a, b, read.index, True)
        rows, columns, at_b = self.read_scales(scales, own, block)
        warpgroup.wait_group(0)
        if cutlass.const_expr(not self.words):
            self.release(empty + read.index, lane)
        self.add(acc, total, rows, columns, at_b)
        if cutlass.const_expr(self.words):
            self.release(empty + read.index, lane)
        if cutlass.const_expr(self.quads):
            if last | (block == QUAD - 1):
                self.release_slot(free + slot)
        read.advance()
        return read, slot, phase

    @cute.jit
    def four(
        self, total: cute.Tensor, a: cute.Tensor, b: cute.Tensor, barriers: tuple, read, slot: Int32, phase: Int32, scales: tuple,
        lane: Int32,
    ):  # fmt: skip
        """As `one`, QUAD steps that are all the group's, whose scales are one slot's: a step's products run while the sums of the one before
        are added. Not across these four: ptxas puts a wait behind each wgmma whose sums a loop carries."""
        full, empty, turned, free = barriers
        mma = mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n)
        shape = mma.partition_shape_C((ROWS, self.tile_n))
        acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(2)]
        cute.arch.mbarrier_wait(full + read.index, read.phase)
        warpgroup.fence()
        self.issue(mma, acc[0], a, b, read.index, True)
        if cutlass.const_expr(self.quads):
            slot, phase = self.next_slot(slot, phase)
            cute.arch.mbarrier_wait(turned + slot, phase)
        for step in cutlass.range_constexpr(QUAD):
            rows, columns, at_b = self.read_scales(scales, slot, step)
            after = read.clone()
            after.advance()
            if cutlass.const_expr(step < QUAD - 1):
                cute.arch.mbarrier_wait(full + after.index, after.phase)
                warpgroup.fence()
                self.issue(mma, acc[(step + 1) % 2], a, b, after.index, True)
            warpgroup.wait_group(1 if step < QUAD - 1 else 0)
            self.release(empty + read.index, lane)
            self.add(acc[step % 2], total, rows, columns, at_b)
            read = after
        if cutlass.const_expr(self.quads):
            self.release_slot(free + slot)
        return read, slot, phase

    @cute.jit
    def release_slot(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def clear_others(self, tiles: tuple, stage: Int32, low: Int32, high: Int32, both: Int32):
        """Zeros in a stage's tiles for k < low and k >= high, which are other groups'."""
        if (low > 0) | (high < self.loader_a.tile_k):
            self.clear(self.loader_a, tiles[0], stage, low, high, both)
            self.clear(self.loader_b, tiles[1], stage, low, high, both)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=BOTH, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def clear(
        self, loader: cutlass.Constexpr, words: cute.Pointer, stage: Int32, low: Int32, high: Int32, thread: Int32
    ):
        """Zeros in a stage's tile for k < low and k >= high. words: the tiles' memory; thread: of both consumers."""
        size = loader.dtype.width // 8
        base = words + stage * (loader.stage_bytes // 4)
        count = loader.stage_bytes // 16  # chunks of 16 bytes
        masks = (0xFF, 0xFF00, 0xFF0000, -(1 << 24)) if size == 1 else (0xFFFF, -(1 << 16))
        for i in cutlass.range(thread, count, 2 * WARPGROUP, unroll=1):
            chunk = cute.make_tensor((base + i * 4).align(16), cute.make_layout(4))
            if cutlass.const_expr(loader.k_contiguous):
                # A line is 128 bytes of k of one row; the swizzle exchanges its chunks.
                k = ((i % 8) ^ (i // 8 % 8)) * (16 // size)
                if (k < low) | (k + 16 // size > high):
                    values = cute.make_rmem_tensor(4, Int32)
                    cute.autovec_copy(chunk, values)
                    for w in cutlass.range_constexpr(4):
                        mask = Int32(0)
                        for e in cutlass.range_constexpr(4 // size):
                            at = k + w * (4 // size) + e
                            if (at >= low) & (at < high):
                                mask = mask | Int32(masks[e])
                        values[w] = values[w] & mask
                    cute.autovec_copy(values, chunk)
            else:
                # A line is one k of 64 rows.
                k = i // 8 % loader.tile_k
                if (k < low) | (k >= high):
                    zeros = cute.make_rmem_tensor(4, Int32)
                    zeros.fill(0)
                    cute.autovec_copy(zeros, chunk)

    @cute.jit
    def begins_quad(self, block: Int32, k: Int32):
        """Whether the scales of a tile's k-th step, whose first one is k block `block`, are in another slot than the one's before."""
        return (k == 0) | ((block + k) % QUAD == 0)

    @cute.jit
    def next_slot(self, slot: Int32, phase: Int32):
        slot = slot + 1
        if slot == self.scale_slots:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    def columns_of(self, address: Int32, i: int):
        """Scales of a thread's four columns among 16, the i-th ones: of either 8 two."""
        if self.quads:
            return ring_store.load_quad(address, 16 * i)
        return [*ring_store.load_pair(address, 64 * i), *ring_store.load_pair(address, 64 * i + 32)]

    @cute.jit
    def turn_scales(
        self, tile: Int32, num_tiles: Int32, clusters: Int32, tiles_m: Int32, tiles_n: Int32, band: Int32, rank: Int32,
        row_end: cute.Pointer, brought: cute.Pointer, turned: cute.Pointer, scales_a: cute.Pointer, scales_b: cute.Pointer,
        warp: Int32, lane: Int32,
    ):  # fmt: skip
        """The last two warps: a slot of scales, which TMA has brought row by row, becomes one of k blocks, of which each has a's rows one after
        the other, and of b's columns those of a thread."""
        own = LANES * (warp - 2) + lane
        base_a, base_b = scales_a.toint().to(Int32), scales_b.toint().to(Int32)
        slot, phase = Int32(self.scale_slots - 1), Int32(1)
        while tile < num_tiles:
            g, _, _ = self.place(tile, tiles_m, tiles_n, band, rank)
            first, steps, _ = self.span(row_end, g)
            for k in cutlass.range(steps, unroll=1):
                if self.begins_quad(first // 128, k):
                    slot, phase = self.next_slot(slot, phase)
                    cute.arch.mbarrier_wait(brought + slot, phase)
                    slot_a, slot_b = base_a + slot * self.slot_a_bytes, base_b + slot * self.slot_b_bytes
                    rows = [ring_store.load_quad(slot_a + own * 16, 1024 * i) for i in range(TILE_M // 64)]
                    columns = [ring_store.load_quad(slot_b + own * 16, 1024 * i) for i in range(self.tile_n // 64)]
                    cute.arch.barrier(barrier_id=TURN, number_of_threads=64)  # all have been read
                    for i in cutlass.range_constexpr(TILE_M // 64):
                        for step in cutlass.range_constexpr(QUAD):
                            ring_store.store(slot_a + own * 4, step * (4 * TILE_M) + 256 * i, rows[i][step])
                    # Column 8 i + 2 q + c: of a thread with lane % 4 == q the (2 i + c)-th.
                    target = slot_b + (own % 8 // 2 * self.pitch + own // 8 * 2 + own % 2) * 4
                    for i in cutlass.range_constexpr(self.tile_n // 64):
                        for step in cutlass.range_constexpr(QUAD):
                            ring_store.store(target, step * (16 * self.pitch) + 64 * i, columns[i][step])
                    cute.arch.fence_proxy("async.shared", space="cta")  # TMA writes there next
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(turned + slot)
            tile += clusters

    @cute.jit
    def read_scales(self, scales: tuple, slot: Int32, block):
        """(of this thread's two rows, of the first AHEAD times 16 columns, where those of all columns are), of a k block of a slot."""
        rows: list = []
        columns: list = []
        at_b = scales[1]
        if cutlass.const_expr(self.blocks):
            # ptxas moves no access to memory across these: loads between the wgmmas would hold those up.
            cute.arch.sync_warp()
            at_a = scales[0] + slot * self.slot_a_bytes + block * self.step_bytes[0]
            at_b = scales[1] + slot * self.slot_b_bytes + block * self.step_bytes[1]
            rows = [ring_store.load(at_a, 32 * i) for i in range(2)]
            columns = [self.columns_of(at_b, i) for i in range(AHEAD)]
            cute.arch.sync_warp()
        return rows, columns, at_b

    @cute.jit
    def add(self, acc: cute.Tensor, total: cute.Tensor, rows: list, columns: list, at_b: Int32):
        """total += acc * scales, which read_scales returns. Pinned: as in mma_block._promote."""
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = mma_block._pinned(acc[v])
        units = cute.size(acc) // 8  # of 16 columns
        for i in cutlass.range_constexpr(units):
            if cutlass.const_expr(self.blocks and len(columns) < units):
                columns = [*columns, self.columns_of(at_b, len(columns))]
            for v in cutlass.range_constexpr(8):
                value = acc[8 * i + v]
                if cutlass.const_expr(self.blocks):
                    value = value * rows[v // 2 % 2] * columns[i][v // 4 * 2 + v % 2]
                total[8 * i + v] = total[8 * i + v] + value
        for v in cutlass.range_constexpr(cute.size(acc)):
            total[v] = mma_block._pinned(total[v])
