"""GEMM for Hopper: z[M, N] = alpha * scale_a[m] * scale_b[n] * sum_k a[m, k] * b[n, k] + bias[n], out = act(z) (+ out).

a, b    bfloat16 or float16, each with either dimension contiguous; or float8_e4m3fn and float8_e5m2 in any pair, K
        contiguous (wgmma reads 8-bit operands no other way). Accumulated in float32; of FP8 the matrix unit keeps about
        14 bits of a sum, so `promote` moves it to float32 registers after each stage, 128 k
scale_* float32 in device memory: one, or one per row of a and of b; or absent; or, of FP8 with `promote`, one of a for each
        128 k of a row and one of b for 128 n x 128 k, which multiply what each stage adds. Those have rows that start at
        multiples of 16 bytes
out     float32, bfloat16 or float16, N contiguous; or codes of out / out_scale in float8_e4m3fn or float8_e5m2, with the
        largest |out| in out_amax (blocks.cutedsl.epilogue). [M, N / 2] with swiglu, whose tiles have half their columns from
        either half of b: two TMA boxes
z       where asked for: float32, bfloat16 or float16, N contiguous
bias_grad [M]  where asked for, the sum of a over K: the product of a and a column of ones that lies in shared memory, in the
        tiles of the first columns

A CTA has one producer warpgroup, of which one thread works, and `consumers` consumer warpgroups. CTAs are persistent:
cluster c computes tiles c, c + clusters, ... of the walk in blocks.cutedsl.schedule.

Producer, for every tile and k step: wait until the stage is empty, then TMA both operands' tiles into it; with every
fourth, the scales of four steps (blocks.cutedsl.loaders.ScaleLoader).
Consumer, for every tile: for each k step wait until the stage is full, issue its wgmmas, wait for those of the step
before, release that one's stage; then the epilogue (with promotion and buffers for all of a tile: while the next tile's first
products run; of 64 rows). Cooperative: all consumers take the same stages, each its own rows.
Pingpong: consumer i takes tiles i, i + 2, ... of the CTA and skips the other's stages, so one tile's epilogue runs beside
the next one's products.

Barriers, one pair per stage
  full    1 arrival, the producer's, which announces the bytes; TMA completes them. All threads of the consumers wait.
  empty   of every warp that consumes the stage, in this CTA and in those that receive its multicast: consumers' warps (4
          each; of one consumer in pingpong) times (cluster_m + cluster_n - 1). The producer waits.
Named barriers
  1 + i     the 128 threads of consumer i, around its output buffers (blocks.cutedsl.epilogue).
  TURN + i  pingpong: consumer i waits here for its turn at the stages; the other arrives when it has waited for the last
            stage of its tile, and consumer 1 once at the start. Without it consumer i would wait for a stage more than
            one phase ahead, and a wait that only knows the parity would return at once.
  ONES      all threads of the consumers, once: the ones are written.
  TURN      promotion with two consumers: the second waits here for the first one's first sums of a tile (blocks.cutedsl.mma).

Multicast: the CTAs of a cluster that share a row of tiles load A together, those that share a column B.

Limits  bases and row strides are multiples of 16 bytes (the launcher copies what is not); extents fit in int32, strides are
        64-bit; accumulate needs a float32 out.
Source  wgmma, cp.async.bulk.tensor, mbarrier and setmaxnreg: PTX ISA 8.x. The division of work follows CUTLASS 3's
        warp-specialised Hopper kernels and CuTe DSL's public examples.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import access, convert
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.epilogue import BUFFER_BYTES, Epilogue
from fourwave.blocks.cutedsl.loaders import SCALE_BLOCK, SCALE_STEPS, ScaleLoader, TmaLoader
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.schedule import bands, tile_in_bands
from fourwave.ops.gemm.sm90_config import scale_slots

TURN = 4  # named barriers of the pingpong order; those below belong to the epilogues
ONES = 6  # named barrier
ONES_COLUMNS = 8  # wgmma's least
SMEM_ALIGN = 1024  # bytes: eight rows of 128, the period of the swizzle
# Registers per thread after setmaxnreg; the kernel starts with 65536 / threads, rounded down to a multiple of 8.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # consumers: (producer, consumer)


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from a configuration."""

    tile_m: int
    tile_n: int
    pingpong: bool
    consumers: int
    warpgroup_m: int
    num_stages: int
    cluster_m: int
    cluster_n: int
    along: str
    scale_slots: int

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def empty_arrivals(self) -> int:
        return 4 * (1 if self.pingpong else self.consumers) * (self.cluster_m + self.cluster_n - 1)


def geometry(config) -> Geometry:
    return Geometry(
        config.tile_m, config.tile_n, config.schedule == "pingpong", config.consumers, config.warpgroup_m,
        config.num_stages, config.cluster_m, config.cluster_n, config.along,
        scale_slots(config.num_stages),
    )  # fmt: skip


class Gemm:
    """One specialisation: __call__ is the launcher, kernel the device code."""

    def __init__(
        self, geo: Geometry, loader_a: TmaLoader, loader_b: TmaLoader, epilogue: Epilogue, a_scaling: str | None,
        b_scaling: str | None, promote: bool, overlap: bool, bias_grad_dtype: type | None = None, runs_when: int | None = None,
    ):  # fmt: skip
        """*_scaling: None, "tensor" (one scale) or "row"; or "1x128" of a with "128x128" of b, and `promote`.

        bias_grad_dtype: of the sums of a, or None. They are added to what is there where out is.
        runs_when: of GuardedGemm
        """
        self.runs_when = runs_when
        self.bias_grad_dtype = bias_grad_dtype
        self.geo, self.loader_a, self.loader_b, self.epilogue = geo, loader_a, loader_b, epilogue
        self.a_scaling, self.b_scaling, self.promote, self.overlap = a_scaling, b_scaling, promote, overlap

    @property
    def parts(self) -> int:
        """Of a tile's columns, with promotion: a single warpgroup needs its own products beside the additions."""
        return 2 if self.promote and self.geo.consumers == 1 else 1

    @property
    def scaled(self) -> bool:
        """By blocks."""
        return self.a_scaling == "1x128"

    @property
    def out_tile_n(self) -> int:
        """Columns of out that a tile makes."""
        return self.geo.tile_n // self.epilogue.parts

    def second_half(self, N: Int32) -> Int32:
        """Where that of b begins: a TMA box begins at a multiple of 16 bytes along the contiguous dimension, or the instruction
        is illegal. The launcher moves b's second half there."""
        chunk = 128 // self.loader_b.dtype.width
        return N // 2 if self.loader_b.k_contiguous else (N // 2 + chunk - 1) // chunk * chunk

    @property
    def ones(self) -> TmaLoader:
        """An operand like b's; nothing loads it."""
        return TmaLoader(self.loader_a.dtype, ONES_COLUMNS, self.loader_a.tile_k, True, 1, 1)

    def mma(self):
        return mma_block.tiled_mma(self.loader_a, self.loader_b, self.geo.tile_n // self.parts)

    def column_mma(self):
        return mma_block.tiled_mma(self.loader_a, self.ones, ONES_COLUMNS)

    @property
    def stagger(self) -> bool:
        return self.geo.consumers == 2

    @property
    def late(self) -> bool:
        """Whether a tile is stored while the next one's first products run: where its totals are in registers of their own, those
        of one 64-row block, or the store's values have none, and there are buffers for all of it."""
        geo = self.geo
        return self.promote and geo.warpgroup_m == 64 and self.epilogue.pieces(1, geo.tile_n) == self.epilogue.buffers

    @property
    def scale_loaders(self) -> tuple[ScaleLoader, ScaleLoader]:
        """Of a's rows, and of the blocks of b's columns."""
        slots = self.geo.scale_slots
        blocks = -(-self.geo.tile_n // SCALE_BLOCK)
        return ScaleLoader(self.geo.tile_m, 1, slots), ScaleLoader(1, blocks, slots)

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """a, b, out: bases; *_stride: elements between stored rows; bias, scale_*: not read where absent;
        group: width of a band of clusters, see blocks.cutedsl.schedule."""
        self.start(
            a, b, out, bias, scale_a, scale_b, M, N, K, a_stride, b_stride, out_stride, alpha, num_clusters, group, stream,
            None, None, None, None, None, None, None,
        )  # fmt: skip

    @cute.jit
    def start(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        stream: cuda.CUstream, z, bias_grad, out_scale, out_amax, z_stride, z_distance, guard,
    ):  # fmt: skip
        geo = self.geo
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        extent_b = N
        if cutlass.const_expr(self.epilogue.paired):
            extent_b = self.second_half(N) + N // 2
        tma_b, coordinates_b = self.loader_b.tma(self.loader_b.matrix(b, extent_b, K, b_stride))
        parts = self.epilogue.parts
        output = self.epilogue.out
        tma_out, coordinates_out = output.tma(output.matrix(out, M, N // parts, out_stride))
        tma_z = coordinates_z = None
        if cutlass.const_expr(self.epilogue.z is not None):
            output = self.epilogue.z
            tma_z, coordinates_z = output.tma(output.halves(z, M, N // parts, parts, z_stride, z_distance))
        scale_tma = (None, None, None, None)
        if cutlass.const_expr(self.scaled):
            loader_sa, loader_sb = self.scale_loaders
            k_blocks = cute.ceil_div(K, SCALE_BLOCK)
            stride = Int64(cute.ceil_div(k_blocks, SCALE_STEPS)) * SCALE_STEPS
            scale_tma = (
                *loader_sa.tma(loader_sa.matrix(scale_a.align(16), M, k_blocks, stride)),
                *loader_sb.tma(loader_sb.matrix(scale_b.align(16), cute.ceil_div(N, SCALE_BLOCK), k_blocks, stride)),
            )
        tiles_m = cute.ceil_div(M, geo.tile_m * geo.cluster_m)  # of clusters
        tiles_n = cute.ceil_div(N // parts, self.out_tile_n * geo.cluster_n)
        self.kernel(
            tma_a, coordinates_a, tma_b, coordinates_b, tma_out, coordinates_out, *scale_tma, bias, scale_a, scale_b,
            M, N, K, alpha, tiles_m * tiles_n, bands(tiles_m, tiles_n, group, geo.along), tma_z, coordinates_z, bias_grad,
            out_scale, out_amax, guard,
        ).launch(
            grid=(num_clusters * geo.cluster_m * geo.cluster_n, 1, 1),
            block=(geo.threads, 1, 1),
            cluster=(geo.cluster_m * geo.cluster_n, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        tma_out: cute.CopyAtom, coordinates_out: cute.Tensor, tma_sa, coordinates_sa, tma_sb, coordinates_sb,
        bias: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32, alpha: Float32,
        num_tiles: Int32, divisors: tuple, tma_z, coordinates_z, bias_grad, out_scale, out_amax, guard,
    ):  # fmt: skip
        geo, loader_a, loader_b, epilogue = self.geo, self.loader_a, self.loader_b, self.epilogue
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.overlap):
            # The next grid may take what this one leaves free, and be set up; it waits below for this one to end.
            cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            cpasync.prefetch_descriptor(tma_out)
            if cutlass.const_expr(epilogue.z is not None):
                cpasync.prefetch_descriptor(tma_z)

        # Prologue: barriers, buffers, this CTA's place in its cluster and the cluster's in the walk.
        layout_a, layout_b = loader_a.smem_layout(), loader_b.smem_layout()
        layout_ones = self.ones.smem_layout()
        sums = self.bias_grad_dtype is not None
        loader_sa, loader_sb = self.scale_loaders

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[Int64, 2 * geo.num_stages]
            a: cute.struct.Align[cute.struct.MemRange[loader_a.dtype, cute.cosize(layout_a)], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[loader_b.dtype, cute.cosize(layout_b)], SMEM_ALIGN]
            out: cute.struct.Align[
                cute.struct.MemRange[Uint8, geo.consumers * epilogue.buffers * BUFFER_BYTES], SMEM_ALIGN
            ]
            ones: cute.struct.Align[
                cute.struct.MemRange[loader_a.dtype, cute.cosize(layout_ones) if sums else 0], SMEM_ALIGN
            ]
            scales_a: cute.struct.Align[cute.struct.MemRange[Float32, loader_sa.elements if self.scaled else 0], 128]
            scales_b: cute.struct.Align[cute.struct.MemRange[Float32, loader_sb.elements if self.scaled else 0], 128]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)

        scales_a = scales_b = None
        if cutlass.const_expr(self.scaled):
            scales_a = storage.scales_a.get_tensor(loader_sa.smem_layout())
            scales_b = storage.scales_b.get_tensor(loader_sb.smem_layout())

        cluster = cute.make_layout((geo.cluster_m, geo.cluster_n, 1))
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)
        pipe = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=geo.num_stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, geo.empty_arrivals),
            tx_count=loader_a.stage_bytes + loader_b.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, geo.cluster_m, geo.cluster_n, 1)),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(geo.cluster_m, geo.cluster_n), is_relaxed=True)

        k_tiles = cute.ceil_div(K, loader_a.tile_k)
        slots = loader_sa.slots
        if cutlass.const_expr(self.promote):
            k_tiles = cute.ceil_div(k_tiles, SCALE_STEPS) * SCALE_STEPS  # past the end all is zero
        tile_slots = cute.ceil_div(k_tiles, SCALE_STEPS)
        num_clusters = cute.arch.grid_dim()[0] // (geo.cluster_m * geo.cluster_n)
        first_tile = cute.arch.block_idx()[0] // (geo.cluster_m * geo.cluster_n)
        pipeline.pipeline_init_wait(cluster_shape_mn=(geo.cluster_m, geo.cluster_n))
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.runs_when is not None):
            # Read behind the wait: also so that this grid does not end before the one that the next one, too, depends on.
            if guard[0] != self.runs_when:
                num_tiles = Int32(0)

        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        producer_registers, consumer_registers = REGISTERS[geo.consumers]
        if warpgroup_index == 0:
            # Producer.
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == 0:
                shared_a, global_a = loader_a.partition(tma_a, coordinates_a, smem_a, place[1])
                if cutlass.const_expr(epilogue.paired):
                    shared_b, global_b = loader_b.partition_part(tma_b, coordinates_b, smem_b, place[0], 0, Int32(0))
                    shared_b2, global_b2 = loader_b.partition_part(
                        tma_b, coordinates_b, smem_b, place[0], 1, self.second_half(N)
                    )
                else:
                    shared_b, global_b = loader_b.partition(tma_b, coordinates_b, smem_b, place[0])
                mask_a = mask_b = None
                if cutlass.const_expr(geo.cluster_n > 1):
                    mask_a = cute.make_layout_image_mask(cluster, place, mode=1)
                if cutlass.const_expr(geo.cluster_m > 1):
                    mask_b = cute.make_layout_image_mask(cluster, place, mode=0)
                if cutlass.const_expr(self.scaled):
                    shared_sa, global_sa = loader_sa.partition(tma_sa, coordinates_sa, scales_a)
                    shared_sb, global_sb = loader_sb.partition(tma_sb, coordinates_sb, scales_b)
                write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, geo.num_stages)
                tile = first_tile
                slot = Int32(0)
                while tile < num_tiles:
                    m_tile, n_tile = tile_in_bands(tile, num_tiles, divisors, geo.along)
                    m_tile = m_tile * geo.cluster_m + place[0]
                    n_tile = n_tile * geo.cluster_n + place[1]
                    for k_tile in cutlass.range(k_tiles, unroll=1):
                        pipe.producer_acquire(write)
                        full = pipe.producer_get_barrier(write)
                        if cutlass.const_expr(self.scaled):
                            steps = k_tile // SCALE_STEPS
                            if k_tile % SCALE_STEPS == 0:
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_expect_tx(full, loader_sa.slot_bytes + loader_sb.slot_bytes)
                                cute.copy(
                                    tma_sa, global_sa[(None, m_tile, steps)], shared_sa[(None, 0, (slot + steps) % slots)],
                                    tma_bar_ptr=full,
                                )  # fmt: skip
                                for i in cutlass.range_constexpr(loader_sb.blocks):
                                    cute.copy(
                                        tma_sb, global_sb[(None, n_tile * geo.tile_n // SCALE_BLOCK + i, steps)],
                                        shared_sb[(None, i, (slot + steps) % slots)], tma_bar_ptr=full,
                                    )  # fmt: skip
                        cute.copy(
                            tma_a, global_a[(None, m_tile, k_tile)], shared_a[(None, write.index)],
                            tma_bar_ptr=full, mcast_mask=mask_a,
                        )  # fmt: skip
                        cute.copy(
                            tma_b, global_b[(None, n_tile, k_tile)], shared_b[(None, write.index)],
                            tma_bar_ptr=full, mcast_mask=mask_b,
                        )  # fmt: skip
                        if cutlass.const_expr(epilogue.paired):
                            cute.copy(
                                tma_b, global_b2[(None, n_tile, k_tile)], shared_b2[(None, write.index)],
                                tma_bar_ptr=full, mcast_mask=mask_b,
                            )  # fmt: skip
                        write.advance()
                    tile += num_clusters
                    slot = (slot + tile_slots) % slots
                # No CTA may end while another can still arrive at its barriers or send into its buffers.
                pipe.producer_tail(write)
        else:
            # Consumers.
            cute.arch.setmaxregister_increase(consumer_registers)
            consumer = warpgroup_index - 1
            if cutlass.const_expr(self.promote):
                thread = access.kept(thread)
            mma = self.mma()
            slice_ = mma.get_slice(0)
            row_block = Int32(0)
            if cutlass.const_expr(not geo.pingpong):
                row_block = consumer
            own_a = cute.local_tile(smem_a, (geo.warpgroup_m, loader_a.tile_k, geo.num_stages), (row_block, 0, 0))
            operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
            operand_b = mma.make_fragment_B(slice_.partition_B(smem_b))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((geo.warpgroup_m, geo.tile_n)), Float32)
            blocks_a = parts_b = ()
            if cutlass.const_expr(self.promote):
                blocks = geo.warpgroup_m // 64
                for i in cutlass.range_constexpr(blocks):
                    block = cute.local_tile(
                        smem_a, (64, loader_a.tile_k, geo.num_stages), (row_block * blocks + i, 0, 0)
                    )
                    blocks_a = (*blocks_a, mma.make_fragment_A(slice_.partition_A(block)))
                for i in cutlass.range_constexpr(self.parts):
                    shape = geo.tile_n // self.parts, loader_b.tile_k, geo.num_stages
                    part = cute.local_tile(smem_b, shape, (i, 0, 0))
                    parts_b = (*parts_b, mma.make_fragment_B(slice_.partition_B(part)))
            if cutlass.const_expr(self.a_scaling == "tensor"):
                alpha = alpha * scale_a[0]
            if cutlass.const_expr(self.b_scaling == "tensor"):
                alpha = alpha * scale_b[0]
            own_out = epilogue.smem(storage.out, geo.consumers, consumer)
            inverse = amax = None
            if cutlass.const_expr(epilogue.codes is not None):
                inverse = convert.reciprocal(out_scale[0])
                amax = cute.make_rmem_tensor(1, Int32)
                amax[0] = Int32(0)
            row_sums = ()
            if cutlass.const_expr(sums):
                self.write_ones(storage.ones.get_tensor(cute.make_layout(cute.cosize(layout_ones))), thread, consumer)
                column = self.column_mma()
                column_slice = column.get_slice(0)
                smem_ones = storage.ones.get_tensor(layout_ones.outer, swizzle=layout_ones.inner)
                totals = cute.make_rmem_tensor(column.partition_shape_C((geo.warpgroup_m, ONES_COLUMNS)), Float32)
                row_sums = (
                    totals, column.make_fragment_A(column_slice.partition_A(own_a)),
                    column.make_fragment_B(column_slice.partition_B(smem_ones)),
                )  # fmt: skip
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, geo.num_stages)
            release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, geo.num_stages)
            tile = first_tile
            slot = Int32(0)
            stride = num_clusters
            if cutlass.const_expr(geo.pingpong):
                tile += consumer * num_clusters
                stride = geo.consumers * num_clusters
                read.advance(consumer * k_tiles)
                release.advance(consumer * k_tiles)
                if consumer == 1:
                    cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * WARPGROUP)
            last_m0, last_n0 = Int32(-1), Int32(0)  # of the tile that waits for its store: none
            last_factors = cute.make_rmem_tensor((2, geo.warpgroup_m // 64), Float32)
            last_factors.fill(alpha)
            acc.fill(0.0)
            next_m, next_n = tile_in_bands(tile, num_tiles, divisors, geo.along)
            while tile < num_tiles:
                m_tile = next_m * geo.cluster_m + place[0]
                n_tile = next_n * geo.cluster_n + place[1]
                m0 = m_tile * geo.tile_m + row_block * geo.warpgroup_m
                factors = epilogue.factors(scale_a, geo.warpgroup_m // 64, M, m0, alpha, thread % WARPGROUP)
                if cutlass.const_expr(self.promote):
                    row = row_block * geo.warpgroup_m + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
                    reader = None
                    if cutlass.const_expr(self.scaled):
                        reader = mma_block.scale_reader(scales_a, scales_b, row, n_tile * geo.tile_n, geo.tile_n)
                    unfinished = None
                    if cutlass.const_expr(self.late):
                        arguments = (
                            acc, mma, own_out, (tma_out, tma_z), (coordinates_out, coordinates_z), bias, scale_b, M, N, last_factors,
                            last_m0, last_n0, thread % WARPGROUP, warp % 4, consumer, inverse, amax,
                        )  # fmt: skip
                        unfinished = epilogue, arguments, last_m0 >= 0
                    read = mma_block.accumulate_promoted(
                        pipe, read, self.mma, acc, blocks_a, parts_b, geo.tile_n, k_tiles, reader, slot, self.stagger, consumer,
                        TURN, behind=True, unfinished=unfinished,
                    )  # fmt: skip
                    slot = (slot + tile_slots) % slots
                else:
                    if cutlass.const_expr(geo.pingpong):
                        cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=2 * WARPGROUP)
                    if cutlass.const_expr(sums):
                        # Instructions of each branch's own: what `multiply` sets in one is not there in the other.
                        if n_tile == 0:
                            read, release = mma_block.accumulate(
                                pipe, read, release, self.mma(), acc, operand_a, operand_b, k_tiles,
                                (self.column_mma(), *row_sums),
                            )  # fmt: skip
                        else:
                            read, release = mma_block.accumulate(
                                pipe, read, release, self.mma(), acc, operand_a, operand_b, k_tiles
                            )
                    else:
                        read, release = mma_block.accumulate(
                            pipe, read, release, mma, acc, operand_a, operand_b, k_tiles
                        )
                    if cutlass.const_expr(geo.pingpong):
                        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=2 * WARPGROUP)
                    release = mma_block.finish(pipe, release)
                if cutlass.const_expr(sums):
                    if n_tile == 0:
                        self.store_sums(totals, bias_grad, m0, M, thread % WARPGROUP)
                # Here, among the instructions of the store, and not before the next tile's first products.
                next_m, next_n = tile_in_bands(tile + stride, num_tiles, divisors, geo.along)
                if cutlass.const_expr(self.late):
                    last_m0, last_n0 = m0, n_tile * self.out_tile_n
                    last_factors.store(factors.load())
                else:
                    epilogue.store(
                        acc, mma, own_out, (tma_out, tma_z), (coordinates_out, coordinates_z), bias, scale_b, M, N, factors, m0,
                        n_tile * self.out_tile_n, thread % WARPGROUP, warp % 4, consumer, inverse, amax,
                    )  # fmt: skip
                if cutlass.const_expr(geo.pingpong):
                    read.advance((geo.consumers - 1) * k_tiles)
                    release.advance((geo.consumers - 1) * k_tiles)
                tile += stride
            if cutlass.const_expr(self.late):
                if last_m0 >= 0:
                    epilogue.store(
                        acc, mma, own_out, (tma_out, tma_z), (coordinates_out, coordinates_z), bias, scale_b, M, N, last_factors,
                        last_m0, last_n0, thread % WARPGROUP, warp % 4, consumer, inverse, amax,
                    )  # fmt: skip
            if cutlass.const_expr(epilogue.codes is not None):
                epilogue.finish_amax(out_amax, amax, thread)
            epilogue.drain(thread % WARPGROUP)

    @cute.jit
    def write_ones(self, ones: cute.Tensor, thread: Int32, consumer: Int32):
        """ones: all elements; those that swizzling would exchange are alike."""
        if consumer == 0:
            for i in cutlass.range_constexpr(cute.size(ones) // WARPGROUP):
                ones[thread % WARPGROUP + i * WARPGROUP] = self.loader_a.dtype(1.0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=ONES, number_of_threads=self.geo.consumers * WARPGROUP)

    @cute.jit
    def store_sums(self, totals: cute.Tensor, target: cute.Pointer, m0: Int32, M: Int32, thread: Int32):
        """totals: of this warpgroup's rows, from m0 on, all columns alike; the first lane of each row's four stores it."""
        row = m0 + thread // 32 * 16 + thread % 32 // 4
        blocks = cute.size(totals, mode=[1])
        per_block = cute.size(totals) // blocks
        for block in cutlass.range_constexpr(blocks):
            for half in cutlass.range_constexpr(2):
                m = row + block * 64 + 8 * half
                if thread % 4 == 0 and m < M:
                    value = totals[block * per_block + 2 * half]
                    if cutlass.const_expr(self.epilogue.accumulate):
                        value = value + Float32(target[m])
                    target[m] = self.bias_grad_dtype(value)


class GemmWithOutputs(Gemm):
    """A Gemm that writes more than out, or quantizes it."""

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        z: cute.Pointer, bias_grad: cute.Pointer, out_scale: cute.Pointer, out_amax: cute.Pointer, z_stride: Int64,
        z_distance: Int64, stream: cuda.CUstream,
    ):  # fmt: skip
        """As Gemm.__call__; z_distance: elements between the halves of z (swiglu); out_scale: its bits."""
        self.start(
            a, b, out, bias, scale_a, scale_b, M, N, K, a_stride, b_stride, out_stride, alpha, num_clusters, group, stream,
            z, bias_grad, out_scale, out_amax, z_stride, z_distance, None,
        )  # fmt: skip


class GuardedGemm(Gemm):
    """A Gemm that does nothing unless the word at `guard`, which the kernels before it leave there, is `runs_when`."""

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        guard: cute.Pointer, stream: cuda.CUstream,
    ):  # fmt: skip
        """As Gemm.__call__."""
        self.start(
            a, b, out, bias, scale_a, scale_b, M, N, K, a_stride, b_stride, out_stride, alpha, num_clusters, group, stream,
            None, None, None, None, None, None, guard,
        )  # fmt: skip
