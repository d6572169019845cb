"""Weight gradient of a grouped GEMM for Hopper: out[g] = a[:, rows of g] @ b[:, rows of g].T (+ out[g]) for every group g.

a       [K, M] or [M, K];  b  [K, N] or [N, K], alike; K is the rows of all groups one after another. 8-bit floats: [M, K], [N, K]
m_sizes [G] int32 or int64, rows of each group, which only the device knows
scale_* of tensors; of a's and b's rows (as [M, K], [N, K]); or one for each 128 k of a row, counted from row 0 of the whole matrix,
        wherever groups begin, multiplied in by block (`promote`)
out     [G, M, N]; an empty group gives zeros, or the addend

CTA c takes tiles c, c + CTAs, ... of all groups' tiles, group by group. One producer warp and two consumer warpgroups of 64 rows each, as
in sm90.py; scales of blocks are copied by the producer and the three warps beside it, one of which takes longer than a step's products. A group's k begin and end anywhere. TMA brings tiles from its first row on, or, where k is contiguous, from the 16 bytes that
this row is in, with scales of blocks from the block. In a group's first and last tile the consumers overwrite what belongs to its
neighbours with zeros, of both operands, since zero times a neighbour's NaN is NaN.

Barriers
  full    1 arrival, which announces TMA's bytes, and with scales one for each lane of the four warps that copy them
  empty   of each consumer warp
  named   BOTH: of both consumers, when they have written zeros
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
LANES = 32
LINE = 128  # bytes of a tile's row in shared memory, of its k or of 64 of its rows
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
    a_scaling: str | None
    b_scaling: str | None
    promote: bool
    vector: bool
    overlap: bool
    store_columns: int = 64

    @property
    def blocks(self) -> bool:
        return self.a_scaling == "1x128"

    @property
    def ahead(self) -> bool:
        """Whether there are registers for the scales of a thread's columns beside the sums."""
        return self.tile_n <= 128

    @property
    def step(self) -> int:
        """Multiples of this many k are where loads begin: a block of scales, or what TMA takes, 16 bytes."""
        if self.blocks:
            return 128
        return 128 // self.loader_a.dtype.width if self.loader_a.k_contiguous else 1  # type: ignore[attr-defined]

    @property
    def turns_b(self) -> int:
        """Scales of b's rows that a lane of the four warps copies for a stage."""
        return -(-self.tile_n // WARPGROUP)

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
        self.kernel(
            tma_a, coordinates_a, tma_b, coordinates_b, out, scale_a, scale_b, sizes, G, M, N, K, out_stride, b_matrix, band
        ).launch(
            grid=(clusters, 1, 1), block=(3 * WARPGROUP, 1, 1), cluster=(1, 1, 1), min_blocks_per_mp=1, stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        out: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32,
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
            scales_a: cute.struct.Align[
                cute.struct.MemRange[Float32, self.num_stages * TILE_M if self.blocks else 4], 16
            ]
            scales_b: cute.struct.Align[
                cute.struct.MemRange[Float32, self.num_stages * self.tile_n if self.blocks else 4], 16
            ]
            out: cute.struct.Align[cute.struct.MemRange[self.out_dtype, 8 * writer.elements], 16]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        scales_a, scales_b = storage.scales_a.data_ptr(), storage.scales_b.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + i, 1 + WARPGROUP if self.blocks else 1)
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
            if cutlass.const_expr(self.blocks):
                if warp > 0:
                    self.bring_scales(
                        tile, num_tiles, ctas, per_group, tiles_m, tiles_n, band, M, N, K, row_end, full, empty, scale_a, scale_b,
                        scales_a, scales_b, warp, lane,
                    )  # fmt: skip
            if warp == 0:
                write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
                while tile < num_tiles:
                    g = tile // per_group
                    m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
                    first, steps, _ = self.span(row_end, g)
                    shared_a, global_a = loader_a.partition(
                        tma_a, cute.domain_offset((m_tile * TILE_M, first), coordinates_a), smem_a, 0
                    )
                    shared_b, global_b = loader_b.partition(
                        tma_b, cute.domain_offset((n_tile * self.tile_n, first), coordinates_b), smem_b, 0
                    )
                    places = self.places(m_tile, n_tile, M, N, K, first, warp, lane)
                    for k in cutlass.range(steps, unroll=1):
                        cute.arch.mbarrier_wait(empty + write.index, write.phase)
                        barrier = full + write.index
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(
                                barrier, loader_a.stage_bytes + loader_b.stage_bytes
                            )
                        cute.copy(tma_a, global_a[(None, 0, k)], shared_a[(None, write.index)], tma_bar_ptr=barrier)
                        cute.copy(tma_b, global_b[(None, 0, k)], shared_b[(None, write.index)], tma_bar_ptr=barrier)
                        if cutlass.const_expr(self.blocks):
                            self.copy_scales(
                                scale_a, scale_b, scales_a, scales_b, write.index, places, k, barrier, warp, lane
                            )
                        write.advance()
                    tile += ctas
        else:
            # Consumers.
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            both = thread - WARPGROUP  # in the two warpgroups
            buffer = storage.out.data_ptr() + (warp - 4) * writer.elements
            thread = thread % WARPGROUP
            mma = mma_block.tiled_mma(loader_a, loader_b, self.tile_n)
            slice_ = mma.get_slice(0)
            own_a = cute.local_tile(smem_a, (ROWS, tile_k, self.num_stages), (consumer, 0, 0))
            operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
            operand_b = mma.make_fragment_B(slice_.partition_B(smem_b))
            shape = mma.partition_shape_C((ROWS, self.tile_n))
            acc = cute.make_rmem_tensor(shape, Float32)
            total = acc
            if cutlass.const_expr(self.promote):
                total = cute.make_rmem_tensor(shape, Float32)
            bytes_a = cute.recast_ptr(storage.a.data_ptr(), dtype=Int32)
            bytes_b = cute.recast_ptr(storage.b.data_ptr(), dtype=Int32)
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            while tile < num_tiles:
                g = tile // per_group
                m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
                first, steps, end = self.span(row_end, g)
                start = groups.start_of(row_end, g)
                total.fill(0.0)
                row, n0 = m_tile * TILE_M + consumer * ROWS, n_tile * self.tile_n
                released = read.index
                ready = cute.arch.mbarrier_test_wait(full + read.index, read.phase)
                for k in cutlass.range(steps, unroll=1):
                    if cutlass.const_expr(self.promote):
                        if not ready:
                            cute.arch.mbarrier_wait(full + read.index, read.phase)
                    else:
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                    low = cutlass.max(start - (first + k * tile_k), 0)
                    high = cutlass.min(end - (first + k * tile_k), tile_k)
                    if (low > 0) | (high < tile_k):
                        self.clear(loader_a, bytes_a, read.index, low, high, both)
                        self.clear(loader_b, bytes_b, read.index, low, high, both)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.barrier(barrier_id=BOTH, number_of_threads=2 * WARPGROUP)
                    warpgroup.fence()
                    if cutlass.const_expr(self.promote):
                        self.issue(mma, acc, operand_a, operand_b, read.index, True)
                        rows, columns = self.load_factors(scales_a, scales_b, read.index, consumer, thread)
                        warpgroup.wait_group(0)
                        if cutlass.const_expr(self.ahead):
                            self.release(empty + read.index)
                        after = read.clone()
                        after.advance()
                        ready = cute.arch.mbarrier_test_wait(full + after.index, after.phase)
                        self.add(acc, total, rows, columns, scales_b, read.index, thread)
                        if cutlass.const_expr(not self.ahead):
                            self.release(empty + read.index)
                    else:
                        self.issue(mma, acc, operand_a, operand_b, read.index, False)
                        warpgroup.wait_group(1)
                        if k > 0:
                            self.release(empty + released)
                        released = read.index
                    read.advance()
                if cutlass.const_expr(not self.promote):
                    warpgroup.wait_group(0)
                    if steps > 0:
                        self.release(empty + released)
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
                if row < M:
                    writer.store(
                        total, 0, ROWS * self.tile_n // WARPGROUP, out + g * out_matrix, out_stride, row, M,
                        n0, N, factors, scale_b, out, thread, buffer,
                    )  # fmt: skip
                tile += ctas

    @cute.jit
    def bring_scales(
        self, tile: Int32, num_tiles: Int32, ctas: Int32, per_group: Int32, tiles_m: Int32, tiles_n: Int32, band: Int32, M: Int32,
        N: Int32, K: Int32, row_end: cute.Pointer, full: cute.Pointer, empty: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, scales_a: cute.Pointer, scales_b: cute.Pointer, warp: Int32, lane: Int32,
    ):  # fmt: skip
        """A warp's share of the scales of all stages, beside the producer's."""
        write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        while tile < num_tiles:
            g = tile // per_group
            m_tile, n_tile = tile_of(tile - g * per_group, tiles_m, tiles_n, band, "m")
            first, steps, _ = self.span(row_end, g)
            places = self.places(m_tile, n_tile, M, N, K, first, warp, lane)
            for k in cutlass.range(steps, unroll=1):
                cute.arch.mbarrier_wait(empty + write.index, write.phase)
                self.copy_scales(
                    scale_a, scale_b, scales_a, scales_b, write.index, places, k, full + write.index, warp, lane
                )
                write.advance()
            tile += ctas

    @cute.jit
    def places(
        self, m_tile: Int32, n_tile: Int32, M: Int32, N: Int32, K: Int32, first: Int32, warp: Int32, lane: Int32
    ):
        """Where the scales of this lane's rows of a and of b are, at the tile's first block: row 32 warp + lane, and each 128th after it."""
        k_blocks = cute.ceil_div(K, 128)
        places = cute.make_rmem_tensor(1 + self.turns_b, Int32)
        own = LANES * warp + lane
        places[0] = cutlass.min(m_tile * TILE_M + own, M - 1) * k_blocks + first // 128
        for i in cutlass.range_constexpr(self.turns_b):
            places[1 + i] = cutlass.min(n_tile * self.tile_n + own + WARPGROUP * i, N - 1) * k_blocks + first // 128
        return places

    @cute.jit
    def copy_scales(
        self, scale_a: cute.Pointer, scale_b: cute.Pointer, scales_a: cute.Pointer, scales_b: cute.Pointer, stage: Int32,
        places: cute.Tensor, k: Int32, barrier: cute.Pointer, warp: Int32, lane: Int32,
    ):  # fmt: skip
        own = LANES * warp + lane
        groups.copy_word(scales_a + (stage * TILE_M + own), scale_a + (places[0] + k))
        for i in cutlass.range_constexpr(self.turns_b):
            target = scales_b + (stage * self.tile_n + own + WARPGROUP * i)
            if cutlass.const_expr(WARPGROUP * (i + 1) <= self.tile_n):
                groups.copy_word(target, scale_b + (places[1 + i] + k))
            elif own + WARPGROUP * i < self.tile_n:
                groups.copy_word(target, scale_b + (places[1 + i] + k))
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
    def release(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

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
    def load_factors(
        self, scales_a: cute.Pointer, scales_b: cute.Pointer, stage: Int32, consumer: Int32, thread: Int32
    ):  # fmt: skip
        """Scales of a thread's two rows and, where there are registers (`ahead`), of its columns."""
        rows = cute.make_rmem_tensor(2, Float32)
        columns = cute.make_rmem_tensor(self.tile_n // 4 if self.ahead else 2, Float32)
        if cutlass.const_expr(self.blocks):
            own = scales_a + (stage * TILE_M + consumer * ROWS + thread // 32 * 16 + thread % 32 // 4)
            for i in cutlass.range_constexpr(2):
                rows[i] = (own + 8 * i)[0]
            if cutlass.const_expr(self.ahead):
                for i in cutlass.range_constexpr(self.tile_n // 8):
                    columns[2 * i], columns[2 * i + 1] = self.pair(scales_b, stage, i, thread)
        return rows, columns

    @cute.jit
    def pair(self, scales_b: cute.Pointer, stage: Int32, i: cutlass.Constexpr, thread: Int32):
        """Scales of a thread's two columns among 8, the i-th ones."""
        pair = cute.make_rmem_tensor(2, Float32)
        source = (scales_b + (stage * self.tile_n + 8 * i + thread % 4 * 2)).align(8)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
        return pair[0], pair[1]

    @cute.jit
    def add(
        self, acc: cute.Tensor, total: cute.Tensor, rows: cute.Tensor, columns: cute.Tensor, scales_b: cute.Pointer, stage: Int32,
        thread: Int32,
    ):  # fmt: skip
        """total += acc * scales."""
        for i in cutlass.range_constexpr(cute.size(acc) // 4):  # 8 columns
            if cutlass.const_expr(self.blocks):
                own = (columns[2 * i], columns[2 * i + 1]) if self.ahead else self.pair(scales_b, stage, i, thread)
                for v in cutlass.range_constexpr(4):
                    at = 4 * i + v
                    total[at] = total[at] + acc[at] * rows[v // 2] * own[v % 2]
            else:
                for v in cutlass.range_constexpr(4):
                    total[4 * i + v] = total[4 * i + v] + acc[4 * i + v]
