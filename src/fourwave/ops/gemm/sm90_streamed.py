"""GEMM with few rows and preshuffled MXFP4 weights for Hopper: out[M, N] = act(alpha * sum_k a[m, k] * b[n, k] + bias[n]) (+ out).

The time is that of reading b. So nothing but the end of a tile makes one warp wait for another: each brings its own part of K
through buffers of its own, and what it waits for is memory.

a       [M, K], K contiguous, bfloat16; M up to `tokens`, K a multiple of 64
b       MXFP4 in the order of ops.gemm.preshuffled_mxfp4, N a multiple of 16; scales likewise
out     float32, bfloat16 or float16, N contiguous, any row stride, any base

A cluster of `split` CTAs computes tiles c, c + clusters, ... of `rows` rows of b, all tokens; its CTA r takes the r-th part of the
blocks of 64 k, and warp w of that blocks w, w + warps, .... Out is computed transposed: b is the first operand of
mma.m16n8k16, a the second.

Warp, for every tile and block: wait until its stage is full; ldmatrix a's part, which all products of the stage share; for each 16
rows load codes and scales, convert, multiply; ask for the block that is num_stages further on, of the next tile if need be.
Then, for each `tokens_at_once`: sums to shared memory; when all warps have, add them in the order of the warps (and, where the cluster
splits K, send that to the CTA that has the token, which adds in the order of the ranks; of several tiles, write it to the first warp's,
from where that CTA reads it), store. So the order of summation depends on K and the configuration only.

Barriers
  full [warp, stage]   one arrival, of the warp that loads, with the bytes of the stage. There is no `empty`: who loads has read
  inbox                with `single`, where K is split: one arrival, at the start, with the bytes that the other CTAs will send
  of the cluster       where K is split: all threads, at the start, that the barriers are there; with several tiles, for each
                       `tokens_at_once` when the parts are written and when they have been read
  named barrier 1      the CTA's threads

Overlap of grids as in sm90_swapped.py.

Source  PTX ISA 8.x: mma.sync, ldmatrix, cp.async.bulk.tensor, mbarrier, griddepcontrol.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import mxfp4, reduction, warp_mma
from fourwave.blocks.cutedsl.loaders import ScaleLoader, TmaLoader, policy
from fourwave.ops.gemm.sm90_config import ALONE_BYTES

SMEM_ALIGN = 1024
WORDS, SCALE_WORDS = mxfp4.BLOCK_BYTES // 4, mxfp4.BLOCK_SCALE_BYTES // 4  # of a block
SCALE_CHUNK = 16  # scales of a row are padded to these (ops.gemm.problem.packed_scale_shape)


@dataclass(frozen=True)
class StreamedGemm:
    """One specialisation: __call__ is the launcher, kernel the device code.

    rows        of b per tile, a multiple of 16
    tokens      rows of a, a multiple of 8
    num_stages  buffers per warp
    single, vector, overlap, read_once  as in SwappedGemm
    """

    rows: int
    tokens: int
    warps: int
    num_stages: int
    split: int
    out_dtype: type
    bias_dtype: type | None
    activation: str | None
    accumulate: bool
    single: bool
    vector: bool
    overlap: bool
    read_once: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Of 16 rows, in a tile."""
        return self.rows // mxfp4.BLOCK_ROWS

    @property
    def slots(self) -> int:
        return self.warps * self.num_stages

    @property
    def loader_a(self) -> TmaLoader:
        return TmaLoader(BFloat16, self.tokens, mxfp4.BLOCK_K, True, self.slots, 1)

    @property
    def loader_b(self) -> ScaleLoader:
        return ScaleLoader(self.blocks, 1, self.slots, Int32, WORDS)

    @property
    def loader_s(self) -> ScaleLoader:
        return ScaleLoader(self.blocks, 1, self.slots, Int32, SCALE_WORDS)

    @property
    def tokens_at_once(self) -> int:
        """Whose sums are in shared memory together: few, where they have none of the stages' memory."""
        return self.tokens if self.single else warp_mma.TOKENS

    @property
    def partial_elements(self) -> int:
        """Of one warp."""
        return reduction.partial_elements(self.rows, self.tokens_at_once)

    @property
    def more_elements(self) -> int:
        """Of `partial`, behind the stages: all, or with `single`, where it lies over them, what they leave over."""
        needed = self.warps * self.partial_elements
        if self.single:
            needed -= self.loader_a.smem_elements // 2 + self.loader_b.elements + self.loader_s.elements
        return max(4, needed)

    @property
    def padding_bytes(self) -> int:
        """So that no two CTAs share a multiprocessor: the next grid's would come in pairs wherever this one's end first, and leave
        others idle."""
        words = self.loader_a.smem_elements // 2 + self.loader_b.elements + self.loader_s.elements + self.more_elements
        if self.sends:
            words += reduction.inbox_elements(self.rows, self.tokens, self.split)
        return max(0, ALONE_BYTES - 4 * words)

    @property
    def sends(self) -> bool:
        """Parts of a split reduction to the CTA that adds them; else it reads them."""
        return self.single and self.split > 1

    @cute.jit
    def load(
        self, tma_a: cute.CopyAtom, from_a: cute.Tensor, to_a: cute.Tensor, tma_b: cute.CopyAtom, from_b: cute.Tensor,
        to_b: cute.Tensor, tma_s: cute.CopyAtom, from_s: cute.Tensor, to_s: cute.Tensor, full: cute.Pointer, slot: Int32,
        tile: Int32, k: Int32, tiles: Int32, clusters: Int32, warp: Int32, k_begin: Int32, k_count: Int32,
    ):  # fmt: skip
        """Ask for a warp's block k of a tile, if there is one; returns the tile and the block that follow."""
        if tile < tiles:
            barrier = full + slot
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    barrier, self.loader_a.stage_bytes + self.loader_b.slot_bytes + self.loader_s.slot_bytes
                )
            once = policy(self.read_once)
            at = (None, tile, k_begin + k)
            cute.copy(tma_b, from_b[at], to_b[(None, 0, slot)], tma_bar_ptr=barrier, cache_policy=once)
            cute.copy(tma_s, from_s[at], to_s[(None, 0, slot)], tma_bar_ptr=barrier, cache_policy=once)
            cute.copy(tma_a, from_a[(None, 0, k_begin + k)], to_a[(None, slot)], tma_bar_ptr=barrier)
            k += self.warps
            if k >= k_count:
                k = warp
                tile += clusters
        return tile, k

    @cute.jit
    def multiply(self, acc: cute.Tensor, a: Int32, b: Int32, scales: Int32, lane: Int32):
        """acc += the products of a stage, whose parts begin at these addresses."""
        line = warp_mma.TOKENS * warp_mma.LINE_BYTES
        tokens = [warp_mma.load_tokens(a + line * column, lane) for column in range(self.tokens // warp_mma.TOKENS)]
        for block in cutlass.range_constexpr(self.blocks):
            loaded = mxfp4.load_block(b + block * mxfp4.BLOCK_BYTES, scales + block * mxfp4.BLOCK_SCALE_BYTES, lane)
            for j, first in enumerate(mxfp4.convert_block(*loaded)):
                for column, second in enumerate(tokens):
                    sums = [acc[block, column, v] for v in range(4)]
                    for v, total in enumerate(warp_mma.multiply(sums, first, second[2 * j : 2 * j + 2])):
                        acc[block, column, v] = total

    @cute.jit
    def add_warps(self, partial: cute.Pointer, tokens: Int32, thread: Int32):
        """The first warp's sums become those of all, in the order of the warps, of the first `tokens`."""
        quads = self.rows // reduction.QUAD
        pitch = (self.rows + reduction.PAD) // reduction.QUAD
        for i in cutlass.range(thread, cutlass.min(tokens, self.tokens_at_once) * quads, self.threads, unroll=1):
            place = (i // quads * pitch + i % quads,)
            total = cute.make_rmem_tensor(reduction.QUAD, Float32)
            for w in cutlass.range_constexpr(self.warps):
                source = cute.make_tensor(partial + w * self.partial_elements, cute.make_layout(self.partial_elements))
                values = cute.make_rmem_tensor(reduction.QUAD, Float32)
                cute.autovec_copy(cute.local_tile(source, (reduction.QUAD,), place), values)
                if cutlass.const_expr(w == 0):
                    total.store(values.load())
                else:
                    total.store(total.load() + values.load())
            target = cute.make_tensor(partial, cute.make_layout(self.partial_elements))
            cute.autovec_copy(total, cute.local_tile(target, (reduction.QUAD,), place))

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, M: Int32, N: Int32, K: Int32,
        a_stride: Int64, b_stride: Int64, out_stride: Int64, alpha: Float32, num_clusters: Int32, group: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """As SwappedGemm.__call__; b_stride is not used: b is contiguous."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        row_blocks, k_blocks = N // mxfp4.BLOCK_ROWS, K // mxfp4.BLOCK_K
        words = cute.recast_ptr(b, dtype=Int32)
        tma_b, coordinates_b = self.loader_b.tma(
            self.loader_b.matrix(words, row_blocks, k_blocks * WORDS, Int64(k_blocks) * WORDS)
        )
        chunks = cute.ceil_div(K, mxfp4.BLOCK * SCALE_CHUNK)
        pitch = Int64(chunks) * (SCALE_CHUNK * mxfp4.BLOCK_ROWS // 4)
        scale_words = cute.recast_ptr(scale_b, dtype=Int32)
        tma_s, coordinates_s = self.loader_s.tma(
            self.loader_s.matrix(scale_words, row_blocks, k_blocks * SCALE_WORDS, pitch)
        )
        self.kernel(
            tma_a, coordinates_a, tma_b, coordinates_b, tma_s, coordinates_s, out, out_stride, bias, M, N, K, alpha
        ).launch(
            grid=(num_clusters * self.split, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.split, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(
        self, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        tma_s: cute.CopyAtom, coordinates_s: cute.Tensor, out: cute.Pointer, out_stride: Int64, bias: cute.Pointer, M: Int32,
        N: Int32, K: Int32, alpha: Float32,
    ):  # fmt: skip
        loader_a, loader_b, loader_s, split = self.loader_a, self.loader_b, self.loader_s, self.split
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % 32
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
        layout_a = loader_a.smem_layout()

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, self.slots]
            arrived: cute.struct.MemRange[Int64, 1]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, loader_a.smem_elements], SMEM_ALIGN]
            b: cute.struct.Align[cute.struct.MemRange[Int32, loader_b.elements], 128]
            scales: cute.struct.Align[cute.struct.MemRange[Int32, loader_s.elements], 128]
            partial: cute.struct.Align[cute.struct.MemRange[Float32, self.more_elements], 16]
            # Of its own: others send when they are done, and this CTA may still be reading its stages.
            inbox: cute.struct.Align[
                cute.struct.MemRange[
                    Float32, reduction.inbox_elements(self.rows, self.tokens, split) if self.sends else 0
                ],
                16,
            ]
            padding: cute.struct.MemRange[Uint8, self.padding_bytes]

        storage = SmemAllocator().allocate(Storage)
        full = storage.full.data_ptr()
        partial = storage.partial.data_ptr()
        if cutlass.const_expr(self.single):
            partial = cute.recast_ptr(storage.a.data_ptr(), dtype=Float32)
        if thread < self.slots:
            cute.arch.mbarrier_init(full + thread, 1)
        inbox = arrived = None
        if cutlass.const_expr(self.sends):
            inbox, arrived = storage.inbox.data_ptr(), storage.arrived.data_ptr()
            if thread == 0:
                cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(split > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

        rank = Int32(0)
        if cutlass.const_expr(split > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if cutlass.const_expr(self.sends):
            if thread == 0:
                tokens = reduction.own_tokens(cutlass.min(M, self.tokens), rank, split)
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, tokens * ((split - 1) * 4 * self.rows))
        k_blocks = K // mxfp4.BLOCK_K
        k_begin = k_blocks * rank // split
        k_count = k_blocks * (rank + 1) // split - k_begin
        own = (k_count - warp + self.warps - 1) // self.warps
        tiles = cute.ceil_div(N, self.rows)
        clusters = cute.arch.grid_dim()[0] // split
        tile = cute.arch.block_idx()[0] // split

        to_a, from_a = loader_a.partition(
            tma_a, coordinates_a, storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner), 0
        )
        to_b, from_b = loader_b.partition(tma_b, coordinates_b, storage.b.get_tensor(loader_b.smem_layout()))
        to_s, from_s = loader_s.partition(tma_s, coordinates_s, storage.scales.get_tensor(loader_s.smem_layout()))
        for atom in (tma_b, tma_s, tma_a):
            cpasync.prefetch_descriptor(atom)
        load_tile, load_k = tile, warp
        if own == 0:
            load_tile = tiles
        if load_tile < tiles:
            cute.prefetch(tma_b, from_b[(None, tile, k_begin + warp)])
        cute.arch.griddepcontrol_wait()
        base = warp * self.num_stages
        for i in cutlass.range(self.num_stages, unroll=1):
            load_tile, load_k = self.load(
                tma_a, from_a, to_a, tma_b, from_b, to_b, tma_s, from_s, to_s, full, base + i, load_tile, load_k, tiles, clusters,
                warp, k_begin, k_count,
            )  # fmt: skip

        address_a = storage.a.data_ptr().toint().to(Int32)
        address_b = storage.b.data_ptr().toint().to(Int32)
        address_s = storage.scales.data_ptr().toint().to(Int32)
        alpha = alpha * Float32(2.0**mxfp4.SHIFT)
        acc = cute.make_rmem_tensor((self.blocks, self.tokens // warp_mma.TOKENS, 4), Float32)
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        while tile < tiles:
            acc.fill(0.0)
            for _ in cutlass.range(own, unroll=1):
                slot = base + stage
                cute.arch.mbarrier_wait(full + slot, phase)
                self.multiply(
                    acc, address_a + slot * loader_a.stage_bytes, address_b + slot * loader_b.slot_bytes,
                    address_s + slot * (4 * loader_s.block_elements), lane,
                )  # fmt: skip
                cute.arch.sync_warp()
                load_tile, load_k = self.load(
                    tma_a, from_a, to_a, tma_b, from_b, to_b, tma_s, from_s, to_s, full, slot, load_tile, load_k, tiles, clusters,
                    warp, k_begin, k_count,
                )  # fmt: skip
                stage += 1
                if stage == self.num_stages:
                    stage = Int32(0)
                    phase = phase ^ 1

            if cutlass.const_expr(self.single):
                # Every warp must have read its stages.
                cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
            for first in cutlass.range_constexpr(0, self.tokens, self.tokens_at_once):
                if cutlass.const_expr(split > 1 and not self.sends):
                    if turn > 0:
                        cute.arch.cluster_wait()
                warp_mma.write_sums(
                    acc, first // warp_mma.TOKENS, self.tokens_at_once // warp_mma.TOKENS, partial + warp * self.partial_elements,
                    self.rows + reduction.PAD, lane,
                )  # fmt: skip
                if cutlass.const_expr(split > 1 and not self.sends):
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
                    self.add_warps(partial, M - first, thread)
                    cute.arch.cluster_arrive()
                    cute.arch.cluster_wait()
                else:
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
                if cutlass.const_expr(self.sends):
                    reduction.send_parts(
                        partial, inbox, arrived, cutlass.min(M, self.tokens), rank, thread, self.rows, self.tokens, split,
                        self.threads, self.warps,
                    )  # fmt: skip
                reduction.add_and_store(
                    partial, out, out_stride, bias, bias, bias, alpha, M, N, Int32(first), tile * self.rows, rank, thread, 1, 0,
                    self.rows, self.rows, self.tokens_at_once, split, self.threads, self.bias_dtype, False, False, self.activation,
                    self.accumulate, self.vector, self.warps if split == 1 or self.sends else 1, inbox, arrived,
                )  # fmt: skip
                if cutlass.const_expr(split == 1):
                    cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)
                elif cutlass.const_expr(not self.sends):
                    cute.arch.cluster_arrive()
                turn += 1
            tile += clusters
        if cutlass.const_expr(self.sends):
            # What others send must find this CTA: who has no token waits, too.
            cute.arch.mbarrier_wait(arrived, 0)
        elif cutlass.const_expr(split > 1):
            if turn > 0:
                cute.arch.cluster_wait()
