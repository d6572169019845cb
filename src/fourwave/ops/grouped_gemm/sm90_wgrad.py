"""Weight gradient of a grouped GEMM for Hopper: out[g] = a[rows of g].T @ b[rows of g] (+ out[g]) for every group g.

a       [K, M];  b  [K, N]; bfloat16 or float16, one for both; K is the rows of all groups one after another
m_sizes [G] int32 or int64, rows of each group, which only the device knows
out     [G, M, N]; an empty group gives zeros, or the addend

CTA c takes tiles c, c + CTAs, ... of all groups' tiles, group by group. One producer warp and two consumer warpgroups of 64 rows each, as
in sm90.py. TMA brings tiles from the group's first k on, which may be any; in its last tile the consumers overwrite what belongs to the
next group with zeros, of both operands, since zero times a neighbour's NaN is NaN.

Barriers
  full    1 arrival, the producer's, which announces the bytes
  empty   of each consumer warp
  named   1 + i: the threads of consumer i, around its output buffer;  BOTH: of both, when they have written zeros
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import groups
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.loaders import TmaLoader
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.rows_store import RowsStore
from fourwave.blocks.cutedsl.schedule import tile_of

TILE_M = 128
ROWS = 64  # of a consumer
BOTH = 4  # a named barrier
CHUNK_BYTES = 16
SMEM_ALIGN = 1024
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


@dataclass(frozen=True)
class GroupedWgrad:
    """One specialisation: __call__ is the launcher, kernel the device code.

    groups      that the table has room for, a multiple of 32
    vector      N, rows of out and their starts are multiples of 16 bytes
    """

    tile_n: int
    num_stages: int
    groups: int
    loader_a: TmaLoader
    loader_b: TmaLoader
    out_dtype: type
    accumulate: bool
    vector: bool
    overlap: bool

    @property
    def writer(self) -> RowsStore:
        return RowsStore(self.out_dtype, None, False, self.vector, self.accumulate)

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, K: Int32, a_stride: Int64, b_stride: Int64,
        b_matrix: Int64, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32, clusters: Int32, band: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """As sm90.GroupedGemm.__call__, but b_matrix: elements between out's matrices. bias and scale_*: not read."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        tma_b, coordinates_b = self.loader_b.tma(self.loader_b.matrix(b, N, K, b_stride))
        self.kernel(
            tma_a, coordinates_a, tma_b, coordinates_b, out, bias, sizes, G, M, N, K, out_stride, b_matrix, band
        ).launch(
            grid=(clusters, 1, 1), block=(3 * WARPGROUP, 1, 1), cluster=(1, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        out: cute.Pointer, bias: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32,
        K: Int32, out_stride: Int64, out_matrix: Int64, band: Int32,
    ):  # fmt: skip
        loader_a, loader_b, writer = self.loader_a, self.loader_b, self.writer
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
            row_end: cute.struct.MemRange[Int32, self.groups]
            tile_end: cute.struct.MemRange[Int32, self.groups + 32]
            a: cute.struct.Align[cute.struct.MemRange[loader_a.dtype, cute.cosize(layout_a)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[loader_b.dtype, cute.cosize(layout_b)], SMEM_ALIGN]
            out: cute.struct.Align[cute.struct.MemRange[writer.buffered, 2 * writer.elements], 16]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, 8)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        cute.arch.griddepcontrol_wait()
        if warp == 0:
            groups.build(sizes, G, K, 1, Int32(1), row_end, tile_end, lane)
        cute.arch.barrier()

        tiles_m, tiles_n = cute.ceil_div(M, TILE_M), cute.ceil_div(N, self.tile_n)
        per_group = tiles_m * tiles_n
        num_tiles = per_group * G
        tile = cute.arch.block_idx()[0]
        ctas = cute.arch.grid_dim()[0]

        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warpgroup_index == 0:
            # Producer.
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
                while tile < num_tiles:
                    g = tile // per_group
                    m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
                    start = groups.start_of(row_end, g)
                    steps = cute.ceil_div(row_end[g] - start, tile_k)
                    shared_a, global_a = loader_a.partition(
                        tma_a, cute.domain_offset((m_tile * TILE_M, start), coordinates_a), smem_a, 0
                    )
                    shared_b, global_b = loader_b.partition(
                        tma_b, cute.domain_offset((n_tile * self.tile_n, start), coordinates_b), smem_b, 0
                    )
                    for k in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(empty + write.index, write.phase)
                        barrier = full + write.index
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                barrier, loader_a.stage_bytes + loader_b.stage_bytes
                            )
                        cute.copy(tma_a, global_a[(None, 0, k)], shared_a[(None, write.index)], tma_bar_ptr=barrier)
                        cute.copy(tma_b, global_b[(None, 0, k)], shared_b[(None, write.index)], tma_bar_ptr=barrier)
                        write.advance()
                    tile += ctas
        else:
            # Consumers.
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            both = thread - WARPGROUP  # in the two warpgroups
            thread = thread % WARPGROUP
            mma = mma_block.tiled_mma(loader_a, loader_b, self.tile_n)
            slice_ = mma.get_slice(0)
            own_a = cute.local_tile(smem_a, (ROWS, tile_k, self.num_stages), (consumer, 0, 0))
            operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
            operand_b = mma.make_fragment_B(slice_.partition_B(smem_b))
            shape = mma.partition_shape_C((ROWS, self.tile_n))
            acc = cute.make_rmem_tensor(shape, Float32)
            buffer = storage.out.data_ptr() + consumer * writer.elements
            words_a = cute.recast_ptr(storage.a.data_ptr(), dtype=Int32)
            words_b = cute.recast_ptr(storage.b.data_ptr(), dtype=Int32)
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            while tile < num_tiles:
                g = tile // per_group
                m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
                start, end = groups.start_of(row_end, g), row_end[g]
                steps = cute.ceil_div(end - start, tile_k)
                acc.fill(0.0)
                released = read.index
                for k in cutlass.range(steps, unroll=1):
                    cute.arch.mbarrier_wait(full + read.index, read.phase)
                    own = end - (start + k * tile_k)  # k of this tile that are the group's
                    if own < tile_k:
                        self.clear(loader_a, words_a, read.index, own, both)
                        self.clear(loader_b, words_b, read.index, own, both)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=BOTH, number_of_threads=2 * WARPGROUP)
                    warpgroup.fence()
                    self.issue(mma, acc, operand_a, operand_b, read.index)
                    warpgroup.wait_group(1)
                    if k > 0:
                        self.release(empty + released)
                    released = read.index
                    read.advance()
                warpgroup.wait_group(0)
                if steps > 0:
                    self.release(empty + released)
                row = m_tile * TILE_M + consumer * ROWS
                factors = cute.make_rmem_tensor(2, Float32)
                factors.fill(1.0)
                if row < M:
                    writer.store(
                        acc, 0, ROWS * self.tile_n // WARPGROUP, buffer, out + g * out_matrix, out_stride, row, M,
                        n_tile * self.tile_n, N, factors, bias, bias, thread, 1 + consumer,
                    )  # fmt: skip
                tile += ctas

    @cute.jit
    def release(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def issue(self, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage):
        """acc += a @ b over the k steps of a stage, as one group."""
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(mma, acc, a[(None, None, k, stage)], b[(None, None, k, stage)], acc)
        warpgroup.commit_group()

    @cute.jit
    def clear(self, loader: cutlass.Constexpr, words: cute.Pointer, stage: Int32, first: Int32, thread: Int32):
        """Zeros in a stage's tile from k `first` on. words: the tiles' memory; thread: of both consumers."""
        base = words + stage * (loader.stage_bytes // 4)
        for i in cutlass.range(thread, loader.stage_bytes // CHUNK_BYTES, 2 * WARPGROUP, unroll=1):
            # Eight chunks, 64 rows, are a line: one k.
            if i // 8 % loader.tile_k >= first:
                zeros = cute.make_rmem_tensor(4, Int32)
                zeros.fill(0)
                cute.autovec_copy(zeros, cute.make_tensor((base + i * 4).align(CHUNK_BYTES), cute.make_layout(4)))
