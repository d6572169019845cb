"""Grouped GEMM with few rows in each group, for Hopper: out[m] = scale_a[m] * scale_b[g, n] * a[m] @ b[g].T (+ bias[g]).

As ops/gemm/sm90_swapped.py: the time is that of reading b, so b is wgmma's first operand, whose 64 rows it fills, and the
tokens, rows of a, its second, whose extent goes down to 8. What is different: m_sizes, which only the device knows.

a       [M, K], K contiguous, the rows of all groups one after another
b       [G, N, K] or [G, K, N] (16-bit types), the inner dimension contiguous
m_sizes [G] int32 or int64, rows of each group
scale_* "1x128" of a with "128x128" of b, multiplied in by block of 128 k (`promote`); else of tensors, a's rows, b's columns

Tiles are numbered group by group, in a group those of the same rows of b one after another, so that CTAs that work at the same
time share them through L2. Cluster c of `split` CTAs takes tiles c, c + clusters, ... A tile's tokens are of one group: of a's
tile, which TMA brings, the rest belongs to a neighbour or to nobody; each column of wgmma depends on its own token alone, so
whatever it holds stays there, and is not stored.

Producer, a warp: for every tile and k step wait until the stage is empty, TMA both tiles into it, and copy the scales of the
tokens and of b's cells with cp.async, whose arrival counts at the same barrier. With few tokens and scales SCALE_STEPS stages have one
barrier, and their scales are copied together: a step of its own takes the producer longer than b's bytes take memory.
Consumers, 1 or 2 warpgroups: as in the dense kernel; with `promote` and few tokens the products of `batch` steps are under way together.

Of one group (`single`) there is no table, and the barriers are ready before the grid waits for the one before it; a cluster has one tile, and
its CTAs send each other their sums: an arrival that publishes them would wait for all memory.

Barriers
  full    1 arrival, which announces TMA's bytes, and with scales one for each of the producer's lanes
  empty   of each consumer warp
  arrived   with `single`, 1 arrival, with the bytes that the other CTAs will send
  ready, free, named barrier 1   as in the dense kernel
"""

import itertools
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import groups, reduction
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.loaders import SCALE_STEPS, SWIZZLE_BYTES, TmaLoader, policy
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.stacked import BlockScales, StackedLoader, partition_from
from fourwave.ops.gemm.sm90_config import SMEM_BYTES

ROWS = 64  # of a consumer warpgroup
CELL = 128  # rows of b and k that share a scale
SMEM_ALIGN = 1024


@dataclass(frozen=True)
class SwappedGroupedGemm:
    """One specialisation: __call__ is the launcher, kernel the device code.

    rows, tokens  tile of b and of a; loader_b and loader_a bring them
    groups        that the table has room for, a multiple of 32
    by_group      a's scales of blocks are in blocks of groups (GroupedProblem.a_scale_layout)
    vector        rows of out start at multiples of 4 elements and N is one: stores of 4 elements
    single        one group, whose rows one tile has, and a cluster for each tile
    other         a SwappedGroupedGemm with other tokens, or None: the kernel takes what needs less time for the groups that there are,
                  were a round of tiles to take `cost`
    """

    rows: int
    tokens: int
    num_stages: int
    split: int
    groups: int
    loader_b: StackedLoader
    loader_a: TmaLoader
    out_dtype: type
    bias_dtype: type | None
    a_scaling: str | None
    b_scaling: str | None
    by_group: bool
    promote: bool
    vector: bool
    overlap: bool
    single: bool = False
    cost: int = 0
    other: Any = None

    @property
    def consumers(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def consumer_threads(self) -> int:
        return WARPGROUP * self.consumers

    @property
    def steps(self) -> int:
        """k steps, and stages, that have one barrier."""
        together = self.blocks and self.tokens <= 16 and self.num_stages % SCALE_STEPS == 0
        return SCALE_STEPS if together else 1

    @property
    def sends(self) -> bool:
        """Whether the CTAs of a cluster send each other their sums."""
        return self.single and self.split > 1

    @property
    def batch(self) -> int:
        """k steps whose products are under way together, with promotion: no more than there are stages."""
        most = 4 if self.tokens <= 16 else 2 if self.tokens <= 64 else 1
        return most if self.promote and most <= self.num_stages else 1

    @property
    def blocks(self) -> bool:
        return self.a_scaling == "1x128"

    @property
    def places(self):
        """Where in a CTA's stages b, a, scales and partial sums are, and the end; in bytes."""
        sizes = (
            *(x.smem_elements // x.tile_k * SWIZZLE_BYTES for x in (self.loader_b, self.loader_a)),
            4 * self.num_stages * self.scales.pitch if self.blocks else 16,
            4 * reduction.partial_elements(ROWS * self.consumers, self.tokens),
        )
        # b is followed by a, which begins where eight rows of 128 bytes may.
        return list(
            itertools.accumulate(
                (
                    -(-size // SMEM_ALIGN) * SMEM_ALIGN if i == 0 else -(-size // 16) * 16
                    for i, size in enumerate(sizes)
                ),
                initial=0,
            )
        )

    @property
    def scales(self) -> BlockScales:
        return BlockScales(self.tokens, 2)

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, K: Int32, a_stride: Int64, b_stride: Int64,
        b_matrix: Int64, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32, clusters: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """*_stride: elements between stored rows; b_matrix: between b's matrices; scale_*: strides of b's scales."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        tma_b, coordinates_b = self.loader_b.tma(self.loader_b.stack(b, N, K, G, b_stride, b_matrix))
        other_a = tma_a, coordinates_a
        if cutlass.const_expr(self.other is not None):
            other_a = self.other.loader_a.tma(self.other.loader_a.matrix(a, M, K, a_stride))
        self.kernel(
            tma_a, coordinates_a, *other_a, tma_b, coordinates_b, out, bias, scale_a, scale_b, sizes, G, M, N, K, out_stride,
            scale_g, scale_n, scale_k,
        ).launch(
            grid=(clusters * self.split, 1, 1),
            block=(self.consumer_threads + 32, 1, 1),
            cluster=(self.split, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, other_tma_a: cute.CopyAtom, other_coordinates_a: cute.Tensor,
        tma_b: cute.CopyAtom, coordinates_b: cute.Tensor, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer, sizes: cute.Pointer,
        G: Int32, M: Int32, N: Int32, K: Int32, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32,
    ):  # fmt: skip
        split = self.split
        forms = (self,) if self.other is None else (self, self.other)
        thread = cute.arch.thread_idx()[0]
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        num_stages = max(form.num_stages for form in forms)

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, num_stages]
            empty: cute.struct.MemRange[Int64, num_stages]
            ready: cute.struct.MemRange[Int64, 1]
            free: cute.struct.MemRange[Int64, 1]
            row_end: cute.struct.MemRange[Int32, self.groups]
            tile_end: cute.struct.MemRange[Int32, self.groups + 32]
            stages: cute.struct.Align[cute.struct.MemRange[Uint8, max(form.places[-1] for form in forms)], SMEM_ALIGN]
            choice: cute.struct.MemRange[Int32, 1]
            arrived: cute.struct.MemRange[Int64, 1]
            inbox: cute.struct.Align[
                cute.struct.MemRange[
                    Float32, reduction.inbox_elements(ROWS * self.consumers, self.tokens, split) if self.sends else 0
                ],
                16,
            ]

        size = Storage.size_in_bytes()  # type: ignore[attr-defined]
        assert size <= SMEM_BYTES, f"{size} bytes of shared memory; sm90_config.smem_bytes says less"
        storage = SmemAllocator().allocate(Storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        ready, free = storage.ready.data_ptr(), storage.free.data_ptr()
        row_end, tile_end, choice = storage.row_end.data_ptr(), storage.tile_end.data_ptr(), storage.choice.data_ptr()
        arrived, inbox = storage.arrived.data_ptr(), storage.inbox.data_ptr()
        if thread < num_stages:
            cute.arch.mbarrier_init(full + thread, 33 if self.blocks else 1)
            cute.arch.mbarrier_init(empty + thread, self.consumer_threads // 32)
        if thread == num_stages:
            cute.arch.mbarrier_init(ready, split)
            cute.arch.mbarrier_init(free, split)
            cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        if warp == self.consumer_threads // 32:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        clusters = cute.arch.grid_dim()[0] // split
        if cutlass.const_expr(not self.single):
            cute.arch.griddepcontrol_wait()
            if warp == 0:
                self.table(sizes, G, M, N, row_end, tile_end, clusters, choice, lane)
        cute.arch.barrier()
        if cutlass.const_expr(split > 1):
            cute.arch.cluster_arrive_relaxed()  # all that others are to see are the barriers, behind their fence
            cute.arch.cluster_wait()
        rows = Int32(0)
        if cutlass.const_expr(self.single):
            cute.arch.griddepcontrol_wait()
            rows = groups.size_of(sizes, Int32(0), G, M)
        else:
            rows = row_end[G - 1]

        work = (
            out,
            bias,
            scale_a,
            scale_b,
            G,
            N,
            K,
            out_stride,
            scale_g,
            scale_n,
            scale_k,
            clusters,
            rows,
            arrived,
            inbox,
        )
        chosen = Int32(0)
        if cutlass.const_expr(self.other is not None):
            chosen = cute.arch.make_warp_uniform(choice[0])
        if chosen == 0:
            self.run(work, storage, tma_a, coordinates_a, tma_b, coordinates_b, thread, warp)
        if cutlass.const_expr(self.other is not None):
            if chosen == 1:
                self.other.run(work, storage, other_tma_a, other_coordinates_a, tma_b, coordinates_b, thread, warp)
        if warp < self.consumer_threads // 32:
            groups.clear_rows(
                out, out_stride, rows, M, N, cute.arch.block_idx()[0] * (self.consumer_threads // 32) + warp,
                cute.arch.grid_dim()[0] * (self.consumer_threads // 32),
            )  # fmt: skip

    @cute.jit
    def table(
        self, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, row_end: cute.Pointer, tile_end: cute.Pointer, clusters: Int32,
        choice: cute.Pointer, lane: Int32,
    ):  # fmt: skip
        """groups.build, and where there are other tokens, which of the two: choice[0] is 1 for those. One warp."""
        tiles_n = cute.ceil_div(N, self.rows)
        if cutlass.const_expr(self.other is not None):
            groups.build(sizes, G, M, self.other.tokens, tiles_n, row_end, tile_end, lane)
            cute.arch.sync_warp()
            others = cute.ceil_div(tile_end[G - 1], clusters) * self.other.cost
            cute.arch.sync_warp()
            groups.build(sizes, G, M, self.tokens, tiles_n, row_end, tile_end, lane)
            cute.arch.sync_warp()
            better = Int32(0)
            if others < cute.ceil_div(tile_end[G - 1], clusters) * self.cost:
                better = Int32(1)
                cute.arch.sync_warp()
                groups.build(sizes, G, M, self.other.tokens, tiles_n, row_end, tile_end, lane)
            if lane == 0:
                choice[0] = better
        else:
            groups.build(sizes, G, M, self.tokens, tiles_n, row_end, tile_end, lane)

    @cute.jit
    def run(
        self, work: tuple, storage, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        thread: Int32, warp: Int32,
    ):  # fmt: skip
        """All tiles of this CTA."""
        out, bias, scale_a, scale_b, G, N, K, out_stride, scale_g, scale_n, scale_k, clusters, rows, arrived, inbox = (
            work
        )
        loader_a, loader_b, split = self.loader_a, self.loader_b, self.split
        lane = thread % 32
        layout_a, layout_b, read_b = loader_a.smem_layout(), loader_b.smem_layout(), loader_b.read_layout()
        stages = storage.stages.data_ptr()
        _, place_a, place_scales, place_partial, _ = self.places
        smem_b = cute.make_tensor(cute.recast_ptr(stages, layout_b.inner, dtype=loader_b.dtype), layout_b.outer)
        read_smem_b = cute.make_tensor(cute.recast_ptr(stages, read_b.inner, dtype=loader_b.dtype), read_b.outer)
        stages_a = cute.recast_ptr(stages + place_a, layout_a.inner, dtype=loader_a.dtype)
        smem_a = cute.make_tensor(stages_a, layout_a.outer)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        ready, free = storage.ready.data_ptr(), storage.free.data_ptr()
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        scales, partial = (cute.recast_ptr(stages + x, dtype=Float32) for x in (place_scales, place_partial))
        part = Int32(0)
        if cutlass.const_expr(split > 1):
            part = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        k_tiles = cute.ceil_div(K, loader_b.tile_k)
        k_begin = k_tiles * part // split
        k_count = k_tiles * (part + 1) // split - k_begin
        num_tiles = cute.ceil_div(N, self.rows)
        if cutlass.const_expr(not self.single):
            num_tiles = tile_end[G - 1]
        tile = cute.arch.block_idx()[0] // split
        g = Int32(0)

        if warp == self.consumer_threads // 32:
            # Producer.
            shared_b, global_b = loader_b.partition_stack(tma_b, coordinates_b, smem_b, 0)
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages // self.steps)
            while tile < num_tiles:
                g, start, end, n_tile, row0 = self.place(row_end, tile_end, tile, g, lane, rows)
                shared_a, global_a = partition_from(loader_a, tma_a, coordinates_a, smem_a, 0, row0)
                along, first, stride = Int32(1), start * k_tiles, k_tiles
                if cutlass.const_expr(self.by_group):
                    along, stride = end - start, Int32(1)
                together = cutlass.const_expr(self.steps > 1)
                places = self.scales.places(row0, end, start, stride, first, lane, together)
                cell = cutlass.min(n_tile * self.rows // CELL + (lane % 2 if together else lane), (N - 1) // CELL)
                place_b = g * scale_g + cell * scale_n
                for k in cutlass.range(0, k_count, self.steps, unroll=1):
                    cute.arch.mbarrier_wait(empty + write.index, write.phase)
                    barrier = full + write.index
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(
                            barrier, self.steps * (loader_a.stage_bytes + loader_b.stage_bytes)
                        )
                    for u in cutlass.range_constexpr(self.steps):
                        # Past the last step comes what lies there, or zeros, and is not multiplied.
                        step, stage = k_begin + k + u, write.index * self.steps + u
                        cute.copy(
                            tma_b, global_b[(None, n_tile, step, g)], shared_b[(None, stage)], tma_bar_ptr=barrier,
                            cache_policy=policy(True),
                        )  # fmt: skip
                        cute.copy(tma_a, global_a[(None, 0, step)], shared_a[(None, stage)], tma_bar_ptr=barrier)
                    if cutlass.const_expr(together):
                        self.scales.copy_steps(
                            scales, write.index * self.steps, scale_a, places, along, k_begin + k, k_tiles, scale_b, place_b, scale_k,
                            barrier, lane,
                        )  # fmt: skip
                    elif cutlass.const_expr(self.blocks):
                        self.scales.copy(
                            scales, write.index, scale_a, places, along * (k_begin + k), scale_b, place_b + (k_begin + k) * scale_k,
                            barrier, lane,
                        )  # fmt: skip
                    write.advance()
                tile += clusters
        else:
            # Consumers.
            consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
            mma = mma_block.tiled_mma(loader_b, loader_a, self.tokens)
            slice_ = mma.get_slice(0)
            own_b = cute.local_tile(read_smem_b, (ROWS, loader_b.tile_k, self.num_stages), (consumer, 0, 0))
            operand_b = mma.make_fragment_A(slice_.partition_A(own_b))
            operand_a = mma.make_fragment_B(slice_.partition_B(smem_a))
            shape = mma.partition_shape_C((ROWS, self.tokens))
            accs = [cute.make_rmem_tensor(shape, Float32) for _ in range(self.batch)]
            acc = accs[0]
            total = acc
            if cutlass.const_expr(self.promote):
                total = cute.make_rmem_tensor(shape, Float32)
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages // self.steps)
            release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            turn = Int32(0)
            while tile < num_tiles:
                g, start, end, n_tile, row0 = self.place(row_end, tile_end, tile, g, lane, rows)
                alpha = Float32(1.0)
                if cutlass.const_expr(self.a_scaling == "tensor"):
                    alpha = alpha * scale_a[0]
                if cutlass.const_expr(self.b_scaling == "tensor"):
                    alpha = alpha * scale_b[g * scale_g]
                if cutlass.const_expr(self.promote):
                    total.fill(0.0)
                    n0 = n_tile * self.rows
                    row = n0 + consumer * ROWS + thread % WARPGROUP // 32 * 16 + lane // 4
                    cells = cute.make_rmem_tensor(2, Int32)
                    for half in cutlass.range_constexpr(2):
                        cells[half] = cutlass.min(cutlass.min(row + 8 * half, N - 1) // CELL - n0 // CELL, 1)
                    # Few tokens: a step's products take less time than waiting for them. `batch` steps are under way together.
                    if cutlass.const_expr(self.steps > 1):
                        read = self.add_steps(
                            full, empty, read, accs, total, operand_a, operand_b, scales, cells, k_count, lane
                        )
                    for _ in cutlass.range(0 if self.steps > 1 else k_count // self.batch, unroll=1):
                        product = mma_block.tiled_mma(loader_b, loader_a, self.tokens)
                        for u in cutlass.range_constexpr(self.batch):
                            cute.arch.mbarrier_wait(full + read.index, read.phase)
                            warpgroup.fence()
                            mma_block.multiply(product, accs[u], operand_b, operand_a, read.index, True)
                            read.advance()
                        for u in cutlass.range_constexpr(self.batch):
                            self.add(accs[u], total, scales, release.index, empty, cells, lane, self.batch - 1 - u)
                            release.advance()
                    if cutlass.const_expr(self.batch > 1 and self.steps == 1):
                        for _ in cutlass.range(k_count % self.batch, unroll=1):
                            product = mma_block.tiled_mma(loader_b, loader_a, self.tokens)
                            cute.arch.mbarrier_wait(full + read.index, read.phase)
                            warpgroup.fence()
                            mma_block.multiply(product, acc, operand_b, operand_a, read.index, True)
                            self.add(acc, total, scales, read.index, empty, cells, lane, 0)
                            read.advance()
                            release.advance()
                else:
                    warpgroup.fence()
                    cute.arch.mbarrier_wait(full + read.index, read.phase)
                    mma_block.multiply(mma, acc, operand_b, operand_a, read.index, True)
                    read.advance()
                    for _ in cutlass.range(1, k_count, unroll=1):
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                        mma_block.multiply(mma, acc, operand_b, operand_a, read.index, False)
                        warpgroup.wait_group(1)
                        self.release(empty + release.index)
                        release.advance()
                        read.advance()
                    warpgroup.wait_group(0)
                    self.release(empty + release.index)
                    release.advance()

                if cutlass.const_expr(split > 1 and not self.sends):
                    if turn > 0:
                        cute.arch.mbarrier_wait(free, (turn - 1) % 2)
                reduction.write_partial(total, partial, ROWS * self.consumers, consumer * ROWS, thread % WARPGROUP)
                if cutlass.const_expr(self.sends):
                    if thread == 0:
                        sent = (split - 1) * 4 * ROWS * self.consumers * reduction.own_tokens(end, part, split)
                        cute.arch.mbarrier_arrive_and_expect_tx(arrived, sent)
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.consumer_threads)
                    reduction.send_parts(
                        partial, inbox, arrived, end, part, thread, ROWS * self.consumers, self.tokens, split, self.consumer_threads, 1,
                    )  # fmt: skip
                else:
                    reduction.arrive_cluster(ready, split, 1, Int32(0), thread, self.consumer_threads, True)
                    if cutlass.const_expr(split > 1):
                        reduction.wait_cluster(ready, turn % 2)
                reduction.add_and_store(
                    partial, out, out_stride, bias + g * N, scale_a, scale_b + g * N, alpha, end, N, row0, n_tile * self.rows,
                    part, thread, 1, Int32(0), self.rows, ROWS * self.consumers, self.tokens, split, self.consumer_threads,
                    self.bias_dtype, self.a_scaling == "row", self.b_scaling == "row", None, False, self.vector, 1,
                    inbox if self.sends else None, arrived if self.sends else None,
                )  # fmt: skip
                if cutlass.const_expr(self.sends):
                    # What others send must find this CTA: who has no token waits, too.
                    cute.arch.mbarrier_wait(arrived, 0)
                else:
                    reduction.arrive_cluster(free, split, 1, Int32(0), thread, self.consumer_threads, False)
                turn += 1
                tile += clusters
            if cutlass.const_expr(split > 1 and not self.sends):
                if turn > 0:
                    cute.arch.mbarrier_wait(free, (turn - 1) % 2)

    @cute.jit
    def place(self, row_end: cute.Pointer, tile_end: cute.Pointer, tile: Int32, g: Int32, lane: Int32, rows: Int32):
        """(group, its first row, the row past its last, n_tile, first row) of a tile; g: any group that is not past its; rows: of all."""
        start, end, n_tile, row0 = Int32(0), rows, tile, Int32(0)
        if cutlass.const_expr(not self.single):
            g = groups.find(tile_end, tile, g, lane)
            start, end = groups.start_of(row_end, g), row_end[g]
            rest = tile - groups.start_of(tile_end, g)
            tiles_m = cute.ceil_div(end - start, self.tokens)
            n_tile = rest // tiles_m
            row0 = start + (rest - n_tile * tiles_m) * self.tokens
        return g, start, end, n_tile, row0

    @cute.jit
    def add_steps(
        self, full: cute.Pointer, empty: cute.Pointer, read, accs: list, total: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
        scales: cute.Pointer, cells: cute.Tensor, k_count: Int32, lane: Int32,
    ):  # fmt: skip
        """total += a @ b of a tile, `steps` stages at a time; returns the pipeline state."""
        for _ in cutlass.range(k_count // self.steps, unroll=1):
            product = mma_block.tiled_mma(self.loader_b, self.loader_a, self.tokens)
            cute.arch.mbarrier_wait(full + read.index, read.phase)
            for u in cutlass.range_constexpr(self.steps):
                warpgroup.fence()
                mma_block.multiply(product, accs[u], b, a, read.index * self.steps + u, True)
            for u in cutlass.range_constexpr(self.steps):
                self.add(accs[u], total, scales, read.index * self.steps + u, None, cells, lane, self.steps - 1 - u)
            self.release(empty + read.index)
            read.advance()
        if k_count % self.steps > 0:
            cute.arch.mbarrier_wait(full + read.index, read.phase)
            for u in cutlass.range(k_count % self.steps, unroll=1):
                product = mma_block.tiled_mma(self.loader_b, self.loader_a, self.tokens)
                warpgroup.fence()
                mma_block.multiply(product, accs[0], b, a, read.index * self.steps + u, True)
                self.add(accs[0], total, scales, read.index * self.steps + u, None, cells, lane, 0)
            self.release(empty + read.index)
            read.advance()
        return read

    @cute.jit
    def release(self, barrier: cute.Pointer):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def add(
        self, acc: cute.Tensor, total: cute.Tensor, scales: cute.Pointer, stage: Int32, empty,
        cells: cute.Tensor, lane: Int32, behind: cutlass.Constexpr,
    ):  # fmt: skip
        """total += acc * scales, once the products are there, but for those of the last `behind` stages; then the stage is free, where it
        has a barrier in `empty` (or that is None)."""
        factors = cute.make_rmem_tensor((2, self.tokens // 4), Float32)
        if cutlass.const_expr(self.blocks):
            base = scales + stage * self.scales.pitch
            weights = cute.make_rmem_tensor(2, Float32)
            for half in cutlass.range_constexpr(2):
                weights[half] = (base + (self.tokens + cells[half]))[0]
            for i in cutlass.range_constexpr(self.tokens // 8):
                pair = cute.make_rmem_tensor(2, Float32)
                source = (base + (8 * i + lane % 4 * 2)).align(8)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
                for c in cutlass.range_constexpr(2):
                    for half in cutlass.range_constexpr(2):
                        # Where tiles begin at multiples of 16 rows, a thread's two rows share a cell.
                        of = weights[0] if self.rows % 16 == 0 else weights[half]
                        factors[half, 2 * i + c] = pair[c] * of
        warpgroup.wait_group(behind)
        if cutlass.const_expr(empty is not None):
            self.release(empty + stage)
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = mma_block._pinned(acc[v]) if self.batch > 1 else acc[v]
        for v in cutlass.range_constexpr(cute.size(acc)):
            if cutlass.const_expr(self.blocks):
                total[v] = total[v] + acc[v] * factors[v // 2 % 2, v // 4 * 2 + v % 2]
            else:
                total[v] = total[v] + acc[v]
