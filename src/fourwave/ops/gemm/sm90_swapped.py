"""GEMM with few rows for Hopper: out[M, N] = act(alpha * scale_a[m] * scale_b[n] * sum_k a[m, k] * b[n, k] + bias[n]) (+ out).

With few rows the time is that of reading b. So b is wgmma's first operand, whose 64 rows it fills, and a, the few rows, its
second, whose extent goes down to 8: out is computed transposed. The reduction is split over the CTAs of a cluster so that
all multiprocessors read.

a       [M, K], K contiguous;  b  [N, K] or [K, N], either dimension contiguous (8-bit floats: K)
        bfloat16 or float16, one for both; or float8_e4m3fn and float8_e5m2 in any pair. Accumulated in float32; `promote`
        as in sm90.py. Or a bfloat16 and b `packed`: MXFP4, [N, K / 2] bytes with scales [N, K / 32] in rows that start at
        multiples of 16 bytes; the consumers turn it into bf16 in registers (blocks.cutedsl.mxfp4). Or `shuffled`, too: both in
        the order of ops.gemm.preshuffled_mxfp4, which takes fewer instructions; N and rows are multiples of 16 then, K of 64.
        `wide_codes`: MXFP8, [N, K] bytes (blocks.cutedsl.mxfp8)
scale_* as in sm90.py
out     float32, bfloat16 or float16, N contiguous, any row stride, any base

A cluster of `split` times `share` CTAs computes tiles c, c + clusters, ... of share * rows x tokens elements of out
transposed, `rows` of b per CTA by `tokens` of a; tiles that share rows follow each other. The p-th `share` CTAs of it take
the p-th part of the k steps: their tiles of a are the same, and each loads its share of them for all. Each CTA has up to four
consumer warpgroups, 64 rows each, and one producer warp:

Producer, for every tile and k step: wait until the stage is empty, then TMA both operands' tiles into it.
Consumer, for every tile: for each k step wait until the stage is full, issue its wgmmas, wait for those of the step before
and release that one's stage (packed: for each half of the step, convert, issue, wait for the half before); write the sums to shared memory as `partial` [token, row]; when all CTAs of the cluster have,
read every split-th token from each of them, add in the order of their ranks, and store. So the order of summation depends
on the shape and the configuration only.

A tile has up to 128 rows (256 of shuffled b), in steps of 8 where K is contiguous (16 of shuffled b), so that a weight can be cut into as many equal tiles as there
are clusters. wgmma reads 64 rows per consumer warpgroup all the same; what it makes of the rest is dropped.

Barriers
  full, empty [stage]   as in sm90.py; empty counts the consumer warps of the CTAs that share a
  of the cluster   where no cluster has more than one tile and split > 1: all threads, twice, in place of `ready` and `free`
  ready   `split` arrivals, of the CTAs that have parts of one tile: its partial is written. The consumers wait, then read.
  free    `split` arrivals, of the same: it has read. The consumers wait before they write the next partial, and before
          they end, since another CTA may still be reading theirs.
  named barrier 1       the consumers' threads

Where the launch allows it, a grid starts while the one before it ends (programmatic dependent launch): until
griddepcontrol.wait it only sets up and asks for its first tiles of b to be brought into L2, which is coherent, so that it
does not matter whether the grid before still writes them. Two CTAs fit into one SM where the configuration takes less than
half its shared memory; then the next grid is there from the start of this one.

Source  PTX ISA 8.x: wgmma, cp.async.bulk.tensor, mbarrier, mapa, griddepcontrol.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl import mxfp4, mxfp8, reduction
from fourwave.blocks.cutedsl.loaders import ScaleLoader, TmaLoader, policy
from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64  # of a consumer warpgroup
AHEAD_BYTES = 32 * 1024  # of b that a CTA asks for while the grid before runs; with more, both got slower
SMEM_ALIGN = 1024


@dataclass(frozen=True)
class SwappedGemm:
    """One specialisation: __call__ is the launcher, kernel the device code.

    rows, tokens  tile of b and of a; loader_b and loader_a bring them
    single        no cluster has more than one tile: `partial` may lie over the stages, which are read by then
    vector        rows of out start at multiples of 4 elements and N is one: stores of 4 elements
    read_once     each tile of b is read by one CTA only: it leaves L2 before a and out do
    """

    rows: int
    tokens: int
    num_stages: int
    split: int
    share: int
    loader_b: TmaLoader
    loader_a: TmaLoader
    out_dtype: type
    bias_dtype: type | None
    activation: str | None
    accumulate: bool
    a_scaling: str | None
    b_scaling: str | None
    promote: bool
    single: bool
    vector: bool
    overlap: bool
    packed: bool = False
    wide_codes: bool = False
    shuffled: bool = False
    read_once: bool = False

    @property
    def together(self) -> bool:
        """Whether all threads of the cluster meet when partials are written, and when they are read: the producer, too, which has
        nothing more to load."""
        return self.single and self.split > 1

    @property
    def consumers(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def consumer_threads(self) -> int:
        return WARPGROUP * self.consumers

    @property
    def partial_elements(self) -> int:
        """Of a buffer of its own."""
        return 4 if self.single else reduction.partial_elements(ROWS * self.consumers, self.tokens)

    @property
    def elements_a(self) -> int:
        """Of a's stages, which lie after b's and are extended where those two together are smaller than `partial`."""
        elements = self.loader_a.smem_elements
        if self.single:
            partial = reduction.partial_elements(ROWS * self.consumers, self.tokens) * 32 // self.loader_a.dtype.width
            of_b = self.loader_b.smem_elements * self.loader_b.dtype.width // self.loader_a.dtype.width
            elements += max(0, partial - of_b - elements)
        return elements

    @property
    def step(self) -> int:
        """k of a stage."""
        return mxfp4.STEP if self.packed else self.loader_b.tile_k

    @property
    def scale_elements(self) -> int:
        """Bytes, with what a warpgroup of less than 64 rows reads past the last buffer."""
        if not self.packed:
            return 0
        of_buffers = self.scale_loader.elements * self.scale_loader.dtype.width // 8
        return of_buffers + (ROWS * self.consumers - self.rows) * mxfp4.GROUP

    @property
    def code_loader(self) -> ScaleLoader:
        """Of packed b that is `shuffled`: 16 rows of a step are two blocks."""
        return ScaleLoader(self.rows // mxfp4.BLOCK_ROWS, 1, self.num_stages, Int32, 2 * mxfp4.BLOCK_BYTES // 4)

    @property
    def scale_loader(self) -> ScaleLoader:
        """Of packed b: a stage's buffer holds those of the steps from its own on that share their 16 bytes; of `shuffled` its own."""
        if self.shuffled:
            return ScaleLoader(
                self.rows // mxfp4.BLOCK_ROWS, 1, self.num_stages, Int32, 2 * mxfp4.BLOCK_SCALE_BYTES // 4
            )
        return ScaleLoader(self.rows, 1, self.num_stages, Uint8, mxfp4.GROUP)

    @cute.jit
    def release(self, barrier: cute.Pointer, part: Int32, thread: Int32):
        """A warp has read a stage: tell the CTAs whose loads reach it."""
        if cutlass.const_expr(self.share == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barrier)
        elif thread % 32 < self.share:
            cute.arch.mbarrier_arrive(barrier, part * self.share + thread % 32)

    @cute.jit
    def step_factors(
        self, factors: cute.Tensor, scale_words: cute.Tensor, scales: cute.Pointer, stage: Int32, k: Int32, k_begin: Int32,
        row: Int32,
    ):  # fmt: skip
        """factors, of a step's scales; `scale_words` keeps those of the steps that share 16 bytes."""
        step = (k_begin + k) % mxfp4.GROUP_STEPS
        if k == 0 or step == 0:
            mxfp4.load_scales(scale_words, scales + stage * self.scale_loader.block_elements, row)
        (mxfp8 if self.wide_codes else mxfp4).step_factors(factors, scale_words, step)

    @cute.jit
    def convert(
        self, words: cute.Tensor, codes: cute.Pointer, factors: cute.Tensor, stage: Int32, half: cutlass.Constexpr, row: Int32,
        thread: Int32, largest: cute.Tensor,
    ):  # fmt: skip
        """words, a fragment of half a step, from a stage. largest: as in mxfp8."""
        of_stage = codes + stage * self.loader_b.stage_bytes
        if cutlass.const_expr(self.wide_codes):
            loaded = mxfp8.load_codes(of_stage, row, half, thread % 32)
            mxfp8.convert(words, loaded, factors, half, largest)
        else:
            mxfp4.convert(words, mxfp4.load_codes(of_stage, row, half), factors, half, thread % 32)

    @cute.jit
    def convert_shuffled(
        self, words: cute.Tensor, codes: cute.Pointer, scales: cute.Pointer, stage: Int32, half: cutlass.Constexpr, thread: Int32
    ):  # fmt: skip
        """words, a fragment of half a step, from a stage."""
        block = 2 * (thread // 32) + half
        loaded = mxfp4.load_block(
            codes.toint().to(Int32) + stage * self.loader_b.stage_bytes + block * mxfp4.BLOCK_BYTES,
            scales.toint().to(Int32) + stage * (4 * self.scale_loader.block_elements) + block * mxfp4.BLOCK_SCALE_BYTES,
            thread % 32,
        )
        for j, registers in enumerate(mxfp4.convert_block(*loaded)):
            for i, pair in enumerate(registers):
                words[4 * j + i] = pair

    @cute.jit
    def scale_offsets(self, M: Int32, N: Int32, m0: Int32, n0: Int32, k_tiles: Int32, thread: Int32):
        """Where the scales of b ([N / 128, k_tiles]) for this thread's two rows begin, and those of a ([M, k_tiles]) for each
        of its tokens, in the order of its values. Past the end any will do: what they scale is not stored."""
        row = n0 + thread // 32 * 16 + thread % 32 // 4
        rows = cute.make_rmem_tensor(2, Int64)
        for half in cutlass.range_constexpr(2):
            rows[half] = Int64(cutlass.min(row + 8 * half, N - 1) // 128) * k_tiles
        tokens = cute.make_rmem_tensor(self.tokens // 4, Int32)
        for i in cutlass.range_constexpr(self.tokens // 4):
            token = m0 + i // 2 * 8 + thread % 4 * 2 + i % 2
            tokens[i] = cutlass.min(token, M - 1) * k_tiles
        return rows, tokens

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """As sm90.Gemm.__call__; group is not used."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        if cutlass.const_expr(self.shuffled):
            words = K // mxfp4.BLOCK_K * (mxfp4.BLOCK_BYTES // 4)
            tma_b, coordinates_b = self.code_loader.tma(
                self.code_loader.matrix(cute.recast_ptr(b, dtype=Int32), N // mxfp4.BLOCK_ROWS, words, Int64(words))
            )
        else:
            tma_b, coordinates_b = self.loader_b.tma(
                self.loader_b.matrix(
                    b, N, K // 2 if cutlass.const_expr(self.packed and not self.wide_codes) else K, b_stride
                )
            )
        tma_s = coordinates_s = None
        if cutlass.const_expr(self.shuffled):
            words = K // mxfp4.BLOCK_K * (mxfp4.BLOCK_SCALE_BYTES // 4)
            stride = Int64(cute.ceil_div(K, mxfp4.BLOCK * mxfp4.GROUP)) * (mxfp4.GROUP * mxfp4.BLOCK_ROWS // 4)
            tma_s, coordinates_s = self.scale_loader.tma(
                self.scale_loader.matrix(cute.recast_ptr(scale_b, dtype=Int32), N // mxfp4.BLOCK_ROWS, words, stride)
            )
        elif cutlass.const_expr(self.packed):
            blocks = cute.ceil_div(K, mxfp4.BLOCK)
            stride = Int64(cute.ceil_div(blocks, mxfp4.GROUP)) * mxfp4.GROUP
            tma_s, coordinates_s = self.scale_loader.tma(self.scale_loader.matrix(scale_b, N, blocks, stride))
        self.kernel(
            tma_a,
            coordinates_a,
            tma_b,
            coordinates_b,
            tma_s,
            coordinates_s,
            out,
            out_stride,
            bias,
            scale_a,
            scale_b,
            M,
            N,
            K,
            alpha,
        ).launch(
            grid=(num_clusters * self.split * self.share, 1, 1),
            block=(self.consumer_threads + 32, 1, 1),
            cluster=(self.split * self.share, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        tma_s, coordinates_s, out: cute.Pointer, out_stride: Int64, bias: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer,
        M: Int32, N: Int32, K: Int32, alpha: Float32,
    ):  # fmt: skip
        loader_a, loader_b, split, share = self.loader_a, self.loader_b, self.split, self.share
        cluster = split * share
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        layout_a, layout_b, read_b = loader_a.smem_layout(), loader_b.smem_layout(), loader_b.read_layout()

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.num_stages]
            empty: cute.struct.MemRange[Int64, self.num_stages]
            ready: cute.struct.MemRange[Int64, 1]
            free: cute.struct.MemRange[Int64, 1]
            b: cute.struct.Align[cute.struct.MemRange[loader_b.dtype, loader_b.smem_elements], SMEM_ALIGN]
            a: cute.struct.Align[cute.struct.MemRange[loader_a.dtype, self.elements_a], SMEM_ALIGN]
            scales: cute.struct.Align[cute.struct.MemRange[Uint8, self.scale_elements], 128]
            partial: cute.struct.Align[cute.struct.MemRange[Float32, self.partial_elements], 16]

        storage = SmemAllocator().allocate(Storage)
        smem_a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        smem_b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        ready, free = storage.ready.data_ptr(), storage.free.data_ptr()
        read_smem_b = storage.b.get_tensor(read_b.outer, swizzle=read_b.inner)
        partial = storage.partial.data_ptr()
        if cutlass.const_expr(self.single):
            partial = cute.recast_ptr(storage.b.data_ptr(), dtype=Float32)
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + i, 1)
                cute.arch.mbarrier_init(empty + i, self.consumer_threads // 32 * share)
            cute.arch.mbarrier_init(ready, split)
            cute.arch.mbarrier_init(free, split)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

        rank = Int32(0)
        if cutlass.const_expr(cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        part, column = rank // share, rank % share  # which k steps, and which of the cluster's tiles
        k_tiles = cute.ceil_div(K, self.step)
        k_begin = k_tiles * part // split
        k_count = k_tiles * (part + 1) // split - k_begin
        tiles_m = cute.ceil_div(M, self.tokens)
        num_tiles = tiles_m * cute.ceil_div(N, self.rows * share)
        num_clusters = cute.arch.grid_dim()[0] // cluster
        first_tile = cute.arch.block_idx()[0] // cluster

        scale_words = cute.make_rmem_tensor(8, Int32)  # of a consumer
        factors = cute.make_rmem_tensor(8, Int32)  # of its step
        largest = cute.make_rmem_tensor(2, Int32)  # of its codes
        if warp == self.consumer_threads // 32:
            # Producer.
            shared_a, global_a = loader_a.partition(tma_a, coordinates_a, smem_a, column)
            if cutlass.const_expr(self.shuffled):
                words = cute.make_tensor(
                    cute.recast_ptr(storage.b.data_ptr(), dtype=Int32), self.code_loader.smem_layout()
                )
                shared_b, global_b = self.code_loader.partition(tma_b, coordinates_b, words)
                shared_b = shared_b[(None, 0, None)]
            else:
                shared_b, global_b = loader_b.partition(tma_b, coordinates_b, smem_b, 0)
            if cutlass.const_expr(self.packed):
                start = cute.recast_ptr(storage.scales.data_ptr(), dtype=self.scale_loader.dtype)
                shared_s, global_s = self.scale_loader.partition(
                    tma_s, coordinates_s, cute.make_tensor(start, self.scale_loader.smem_layout())
                )
            mask_a = None
            if cutlass.const_expr(share > 1):
                mask_a = cutlass.Int16(((1 << share) - 1) << (part * share))
            cpasync.prefetch_descriptor(tma_a)
            ahead = cutlass.min(k_count, AHEAD_BYTES // loader_b.stage_bytes)
            for k in cutlass.range(ahead, unroll=1):
                cute.prefetch(tma_b, global_b[(None, first_tile // tiles_m * share + column, k_begin + k)])
            cute.arch.griddepcontrol_wait()
            write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
            tile = first_tile
            while tile < num_tiles:
                n_tile = tile // tiles_m
                m_tile = tile - n_tile * tiles_m
                n_tile = n_tile * share + column
                for k in cutlass.range(k_count, unroll=1):
                    cute.arch.mbarrier_wait(empty + write.index, write.phase)
                    barrier = full + write.index
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, loader_a.stage_bytes + loader_b.stage_bytes)
                    if cutlass.const_expr(self.shuffled):
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_expect_tx(barrier, self.scale_loader.slot_bytes)
                        cute.copy(
                            tma_s,
                            global_s[(None, n_tile, k_begin + k)],
                            shared_s[(None, 0, write.index)],
                            tma_bar_ptr=barrier,
                            cache_policy=policy(self.read_once),
                        )
                    elif cutlass.const_expr(self.packed):
                        if k == 0 or (k_begin + k) % mxfp4.GROUP_STEPS == 0:
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_expect_tx(barrier, self.scale_loader.slot_bytes)
                            cute.copy(
                                tma_s, global_s[(None, n_tile, (k_begin + k) // mxfp4.GROUP_STEPS)],
                                shared_s[(None, 0, write.index)], tma_bar_ptr=barrier, cache_policy=policy(self.read_once),
                            )  # fmt: skip
                    cute.copy(
                        tma_b, global_b[(None, n_tile, k_begin + k)], shared_b[(None, write.index)], tma_bar_ptr=barrier,
                        cache_policy=policy(self.read_once),
                    )  # fmt: skip
                    cute.copy(
                        tma_a, global_a[(None, m_tile, k_begin + k)], shared_a[(None, write.index)], tma_bar_ptr=barrier,
                        mcast_mask=mask_a,
                    )  # fmt: skip
                    write.advance()
                tile += num_clusters
            for _ in cutlass.range_constexpr(2 if self.together else 0):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
        else:
            # Consumers.
            consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
            if cutlass.const_expr(self.packed):
                mma = mma_block.tiled_mma(loader_a, loader_a, self.tokens, True)
                slice_ = mma.get_slice(0)
                shape_b = mma.partition_shape_A((ROWS, mxfp4.STEP // 2))
                operand_b = tuple(cute.make_rmem_tensor(shape_b, loader_a.dtype) for _ in range(2))
                words_b = tuple(cute.recast_tensor(each, Int32) for each in operand_b)
                alpha = alpha * Float32(2.0**mxfp4.SHIFT)
            else:
                mma = mma_block.tiled_mma(loader_b, loader_a, self.tokens)
                slice_ = mma.get_slice(0)
                own_b = cute.local_tile(read_smem_b, (ROWS, loader_b.tile_k, self.num_stages), (consumer, 0, 0))
                operand_b = mma.make_fragment_A(slice_.partition_A(own_b))
            operand_a = mma.make_fragment_B(slice_.partition_B(smem_a))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tokens)), Float32)
            total = acc
            if cutlass.const_expr(self.promote):
                total = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tokens)), Float32)
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(self.a_scaling == "tensor"):
                alpha = alpha * scale_a[0]
            if cutlass.const_expr(self.b_scaling == "tensor"):
                alpha = alpha * scale_b[0]
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.num_stages)
            tile = first_tile
            turn = Int32(0)
            while tile < num_tiles:
                n_tile = tile // tiles_m
                m_tile = tile - n_tile * tiles_m
                n_tile = n_tile * share + column
                if cutlass.const_expr(self.packed):
                    # Half a step is converted while the half before it is multiplied, out of another fragment.
                    acc.fill(0.0)
                    largest.fill(0)
                    row = consumer * ROWS + thread % WARPGROUP // 32 * 16 + thread % 32 // 4
                    for k in cutlass.range(k_count, unroll=1):
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                        if cutlass.const_expr(not self.shuffled):
                            self.step_factors(
                                factors, scale_words, storage.scales.data_ptr(), read.index, k, k_begin, row
                            )
                        for half in cutlass.range_constexpr(2):
                            if cutlass.const_expr(self.shuffled):
                                self.convert_shuffled(
                                    words_b[half],
                                    storage.b.data_ptr(),
                                    storage.scales.data_ptr(),
                                    read.index,
                                    half,
                                    thread,
                                )
                            else:
                                self.convert(
                                    words_b[half], storage.b.data_ptr(), factors, read.index, half, row, thread, largest
                                )
                            warpgroup.fence()
                            mma_block.multiply_registers(mma, acc, operand_b[half], operand_a, read.index, 4 * half)
                            warpgroup.wait_group(1)
                            if cutlass.const_expr(half == 0):
                                if k > 0:
                                    self.release(empty + release.index, part, thread)
                                    release.advance()
                        read.advance()
                    warpgroup.wait_group(0)
                    self.release(empty + release.index, part, thread)
                    release.advance()
                    if cutlass.const_expr(self.wide_codes):
                        mxfp8.spoil(acc, largest)
                elif cutlass.const_expr(self.promote):
                    total.fill(0.0)
                    rows, columns = self.scale_offsets(
                        M, N, m_tile * self.tokens, n_tile * self.rows + consumer * ROWS, k_tiles, thread % WARPGROUP
                    )
                    row_scales = cute.make_rmem_tensor(2, Float32)
                    token_scales = cute.make_rmem_tensor(self.tokens // 4, Float32)
                    for k in cutlass.range(k_count, unroll=1):
                        if cutlass.const_expr(self.a_scaling == "1x128"):
                            for i in cutlass.range_constexpr(2):
                                row_scales[i] = scale_b[rows[i] + (k_begin + k)]
                            for i in cutlass.range_constexpr(self.tokens // 4):
                                token_scales[i] = scale_a[columns[i] + (k_begin + k)]
                        warpgroup.fence()
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                        mma_block.multiply(mma, acc, operand_b, operand_a, read.index, True)
                        warpgroup.wait_group(0)
                        self.release(empty + read.index, part, thread)
                        for v in cutlass.range_constexpr(cute.size(acc)):
                            if cutlass.const_expr(self.a_scaling == "1x128"):
                                factor = row_scales[v // 2 % 2] * token_scales[v // 4 * 2 + v % 2]
                                total[v] = total[v] + acc[v] * factor
                            else:
                                total[v] = total[v] + acc[v]
                        read.advance()
                else:
                    warpgroup.fence()
                    cute.arch.mbarrier_wait(full + read.index, read.phase)
                    mma_block.multiply(mma, acc, operand_b, operand_a, read.index, True)
                    read.advance()
                    for _ in cutlass.range(1, k_count, unroll=1):
                        cute.arch.mbarrier_wait(full + read.index, read.phase)
                        mma_block.multiply(mma, acc, operand_b, operand_a, read.index, False)
                        warpgroup.wait_group(1)
                        self.release(empty + release.index, part, thread)
                        release.advance()
                        read.advance()
                    warpgroup.wait_group(0)
                    self.release(empty + release.index, part, thread)
                    release.advance()

                if cutlass.const_expr(split > 1):
                    if turn > 0:
                        cute.arch.mbarrier_wait(free, (turn - 1) % 2)
                if cutlass.const_expr(self.single):
                    # Every warpgroup must have read its stages.
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.consumer_threads)
                reduction.write_partial(total, partial, ROWS * self.consumers, consumer * ROWS, thread % WARPGROUP)
                if cutlass.const_expr(self.together):
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
                else:
                    reduction.arrive_cluster(ready, split, share, column, thread, self.consumer_threads, True)
                    if cutlass.const_expr(split > 1):
                        reduction.wait_cluster(ready, turn % 2)
                reduction.add_and_store(
                    partial, out, out_stride, bias, scale_a, scale_b, alpha, M, N, m_tile * self.tokens,
                    n_tile * self.rows, part, thread, share, column, self.rows, ROWS * self.consumers, self.tokens, split, self.consumer_threads, self.bias_dtype,
                    self.a_scaling == "row", self.b_scaling == "row", self.activation, self.accumulate, self.vector,
                )  # fmt: skip
                if cutlass.const_expr(self.together):
                    # Only that its reads are over: an arrival that publishes would wait until `out` is written.
                    cute.arch.cluster_arrive_relaxed()
                else:
                    reduction.arrive_cluster(free, split, share, column, thread, self.consumer_threads, False)
                turn += 1
                tile += num_clusters
            if cutlass.const_expr(self.together):
                cute.arch.cluster_wait()
            elif cutlass.const_expr(split > 1):
                if turn > 0:
                    cute.arch.mbarrier_wait(free, (turn - 1) % 2)
        if cutlass.const_expr(share > 1):
            # Others may still arrive at this CTA's barriers, or send into its stages.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
