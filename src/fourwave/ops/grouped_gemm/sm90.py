"""Grouped GEMM for Hopper: out[m] = scale_a[m] * scale_b[g, n] * a[m] @ b[g].T (+ bias[g]) for every row m of group g.

a       [M, K], K contiguous, the rows of all groups one after another
b       [G, N, K] or [G, K, N] (16-bit types), the inner dimension contiguous
m_sizes [G] int32 or int64, rows of each group, which only the device knows
scale_* "1x128" of a with "128x128" of b, multiplied in by block of 128 k (`promote`); else of tensors, a's rows, b's columns

A CTA has one producer warp (in a warpgroup, which gives its registers away) and two consumer warpgroups. Tiles have 128 or 256
rows (`halves` of 128, 64 for each consumer) of one group; they are numbered group by group (blocks.cutedsl.groups), in a group in
bands (blocks.cutedsl.schedule). Clusters take them in rounds, of which every other one goes backwards (`round_of`). The CTAs of a cluster have tiles
side by side, and each loads its share of a's rows for both; or below each other (`pair`), and share b's. A tile's rows past its
group's end belong to a neighbour: they are multiplied, each by itself, and not stored; a second half that has no row of the group is
neither loaded nor multiplied, nor does a pair's second CTA multiply where it has none. Of no more than 64 rows each consumer takes half of the
columns (`narrow`).

Producer: find a tile (with scales of blocks by copy engines, while the one before is loaded: `ahead`), tell the consumers with its first stage
which it is. For every k step: wait until the stage is empty, TMA all tiles into it; with every fourth, the scales of
four steps (blocks.cutedsl.stacked.SlotScales).
Consumer: for every half issue the products of a stage, wait for them, and with `promote` add them, times their scales, to float32
sums; meanwhile the other consumer's products run (blocks.cutedsl.mma.accumulate_promoted, as in the dense kernel).

Barriers
  full    1 arrival, behind which are TMA's bytes; where cp.async brings scales, one for each of the producer's lanes, too
  empty   of each consumer warp of each CTA of the cluster
  named   BEHIND (`stagger`): consumer 1 starts a tile when consumer 0's first products are there, so that one adds while the
          other's products run
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import groups
from fourwave.blocks.cutedsl import mma as mma_block
from fourwave.blocks.cutedsl.epilogue import BUFFER_BYTES, Epilogue
from fourwave.blocks.cutedsl.loaders import SCALE_STEPS, SWIZZLE_BYTES, TmaLoader
from fourwave.blocks.cutedsl.mma import WARPGROUP
from fourwave.blocks.cutedsl.rows_store import RowsStore
from fourwave.blocks.cutedsl.schedule import tile_of
from fourwave.blocks.cutedsl.stacked import BlockScales, SlotScales, StackedLoader, Stages, partition_from, release
from fourwave.ops.gemm.sm90_config import SMEM_BYTES
from fourwave.ops.grouped_gemm.sm90_config import LAST_BESIDE, LAST_TENTHS

HALF = 128  # rows of both consumers
ROWS = 64  # of one
SMEM_ALIGN = 1024
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
BEHIND = 4  # a named barrier
TOLD = 8  # words that the producer tells the consumers of a tile


@dataclass(frozen=True)
class Problem:
    """What both roles know: arguments of the kernel, its tables and buffers, and which tiles are this cluster's.

    tiles_n     of clusters, side by side in a group; rank: this CTA's number in its cluster
    tile        its first tile. Every other round of tiles goes in the opposite order: who had the larger of one has the smaller of the next
    large       tiles before those that come last
    rounds      of tiles, of which the cluster has one in each but perhaps the last: `count`
    """

    out: cute.Pointer
    bias: cute.Pointer
    scale_a: cute.Pointer
    scale_b: cute.Pointer
    G: Int32
    N: Int32
    out_stride: Int64
    scale_g: Int32
    scale_n: Int32
    scale_k: Int32
    band: Int32
    k_tiles: Int32
    full: cute.Pointer
    empty: cute.Pointer
    row_end: cute.Pointer
    tile_end: cute.Pointer
    stages: cute.Pointer
    rank: Int32
    clusters: Int32
    tile: Int32
    tiles_n: Int32
    num_tiles: Int32
    large: Int32
    rounds: Int32
    count: Int32


@dataclass(frozen=True)
class GroupedGemm:
    """One specialisation: __call__ is the launcher, kernel the device code.

    halves      of 128 rows in a tile; loader_a brings one at a time
    share       CTAs of a cluster
    groups      that the table has room for, a multiple of 32
    by_group    a's scales of blocks are in blocks of groups (GroupedProblem.a_scale_layout)
    bulk        copy engines bring a's scales, which begin at 16 bytes: "strips" of those by group, "quads" of those by row
                (blocks.cutedsl.stacked.SlotScales). Else cp.async does, word by word
    vector      N, rows of out and their starts are multiples of 16 bytes
    whole       a tile has a multiple of SCALE_STEPS steps
    narrow      tiles of no more than 64 rows: both consumers have those, each half of the columns
    late        a tile is stored while the next one's first products run, by TMA where all of a warp's 16 rows are the group's own: one half,
                not narrow, scales of blocks, SCALE_STEPS steps at least
    other       a GroupedGemm with other tiles in clusters of as many CTAs, or None: the kernel takes what needs less time for the groups
                that there are, were a round of tiles to take `cost`
    """

    halves: int
    tile_n: int
    num_stages: int
    share: int
    groups: int
    loader_a: TmaLoader
    loader_b: StackedLoader
    out_dtype: type
    bias_dtype: type | None
    a_scaling: str | None
    b_scaling: str | None
    by_group: bool
    bulk: bool
    promote: bool
    vector: bool
    overlap: bool
    last_halves: bool = False
    store_columns: int = 64
    along: str = "n"
    whole: bool = False
    narrow: bool = False
    late: bool = False
    cost: int = 0
    other: Any = None

    @property
    def blocks(self) -> bool:
        return self.a_scaling == "1x128"

    @property
    def forms(self) -> tuple:
        return (self,) if self.other is None else (self, self.other)

    @property
    def thin_loader(self) -> TmaLoader:
        """Of a's rows of a tile of no more than ROWS."""
        return replace(self.loader_a, extent=ROWS, num_stages=2 * self.loader_a.num_stages)

    @property
    def stagger(self) -> bool:
        """Whether consumer 1 starts a tile when consumer 0 has its first products: of one half it pays nothing."""
        return self.promote and self.halves == 2

    @property
    def pair(self) -> bool:
        """Whether the cluster's tiles lie below each other and share b; else side by side, and share a."""
        return self.share > 1 and self.along == "m"

    @property
    def cluster_rows(self) -> int:
        """Of a cluster's tiles below each other."""
        return HALF * self.halves * (self.share if self.pair else 1)

    @property
    def scales(self) -> SlotScales:
        kind = ("strips" if self.by_group else "quads") if self.bulk else "words"
        return SlotScales(kind, HALF * self.halves, self.tile_n, self.num_stages, self.whole)

    @property
    def words(self) -> bool:
        """Whether cp.async brings scales, whose arrival each lane of the producer announces."""
        return self.blocks and not self.bulk

    @property
    def ahead(self) -> bool:
        """Whether the producer finds a tile while it fills the stages of the one before."""
        return self.blocks and self.bulk

    @property
    def writer(self) -> RowsStore:
        return RowsStore(
            self.out_dtype,
            self.bias_dtype,
            self.b_scaling == "row",
            self.vector,
            columns=32 if self.late else self.store_columns,
        )

    @property
    def epilogue(self) -> Epilogue:
        """Of tiles that are stored late."""
        return Epilogue(self.out_dtype, self.bias_dtype, None, False, self.tile_n // 64, False, False, by_warp=True)

    @property
    def out_bytes(self) -> int:
        """Of shared memory, for results on their way out."""
        if self.late:
            return 2 * self.epilogue.buffers * BUFFER_BYTES
        return 8 * self.writer.elements * self.out_dtype.width // 8  # type: ignore[attr-defined]

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer,
        scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, K: Int32, a_stride: Int64, b_stride: Int64,
        b_matrix: Int64, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32, clusters: Int32, band: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        """*_stride: elements between stored rows; b_matrix: between b's matrices; scale_*: strides of b's scales;
        band: tiles side by side along a group's rows that are walked through together, see tile_of."""
        tma_a, coordinates_a = self.loader_a.tma(self.loader_a.matrix(a, M, K, a_stride))
        tma_b, coordinates_b = self.loader_b.tma(self.loader_b.stack(b, N, K, G, b_stride, b_matrix))
        other_a, other_b = (tma_a, coordinates_a), (tma_b, coordinates_b)
        if cutlass.const_expr(self.other is not None):
            other_a = self.other.loader_a.tma(self.other.loader_a.matrix(a, M, K, a_stride))
            other_b = self.other.loader_b.tma(self.other.loader_b.stack(b, N, K, G, b_stride, b_matrix))
        thin_a = tma_a, coordinates_a
        for form in self.forms:
            if cutlass.const_expr(form.narrow):
                thin_a = form.thin_loader.tma(form.thin_loader.matrix(a, M, K, a_stride))
        tma_scale, coordinates_scale = tma_a, coordinates_a
        if cutlass.const_expr(self.blocks and self.scales.kind == "quads"):
            k_blocks = cute.ceil_div(K, self.loader_a.tile_k)
            tma_scale, coordinates_scale = self.scales.quad_tma(scale_a, M, k_blocks)
        tma_out, coordinates_out = tma_a, coordinates_a
        for form in self.forms:
            if cutlass.const_expr(form.late):
                output = form.epilogue.out
                tma_out, coordinates_out = output.tma(output.matrix(out, M, N, out_stride))
        self.kernel(
            tma_out, coordinates_out, tma_a, coordinates_a, tma_b, coordinates_b, *other_a, *other_b, *thin_a, tma_scale, coordinates_scale, out, bias, scale_a, scale_b, sizes, G, M, N, K,
            out_stride, scale_g, scale_n, scale_k, band,
        ).launch(
            grid=(clusters * self.share, 1, 1),
            block=(3 * WARPGROUP, 1, 1),
            cluster=(self.share, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.overlap,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, tma_out: cute.CopyAtom, coordinates_out: cute.Tensor, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor,
        other_tma_a: cute.CopyAtom, other_coordinates_a: cute.Tensor, other_tma_b: cute.CopyAtom, other_coordinates_b: cute.Tensor,
        thin_tma_a: cute.CopyAtom, thin_coordinates_a: cute.Tensor, tma_scale: cute.CopyAtom, coordinates_scale: cute.Tensor,
        out: cute.Pointer, bias: cute.Pointer, scale_a: cute.Pointer, scale_b: cute.Pointer, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, K: Int32, out_stride: Int64, scale_g: Int32, scale_n: Int32, scale_k: Int32,
        band: Int32,
    ):  # fmt: skip
        share, forms = self.share, self.forms
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
            row_end: cute.struct.MemRange[Int32, self.groups]
            tile_end: cute.struct.MemRange[
                Int32, self.groups * (2 if any(form.last_halves for form in forms) else 1) + 32
            ]
            stages: cute.struct.Align[cute.struct.MemRange[Uint8, max(form.places[-1] for form in forms)], SMEM_ALIGN]
            out: cute.struct.Align[
                cute.struct.MemRange[Uint8, max(form.out_bytes for form in forms)],
                SMEM_ALIGN if any(form.late for form in forms) else 16,
            ]
            choice: cute.struct.MemRange[Int32, 1]

        size = Storage.size_in_bytes()  # type: ignore[attr-defined]
        assert size <= SMEM_BYTES, f"{size} bytes of shared memory; sm90_config.smem_bytes says less"
        storage = SmemAllocator().allocate(Storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        row_end, tile_end = storage.row_end.data_ptr(), storage.tile_end.data_ptr()
        if thread == 0:
            for i in cutlass.range_constexpr(num_stages):
                cute.arch.mbarrier_init(full + i, 33 if self.words else 1)
                cute.arch.mbarrier_init(empty + i, 8 * share)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        cute.arch.griddepcontrol_wait()
        clusters = cute.arch.grid_dim()[0] // share
        choice = storage.choice.data_ptr()
        if warp == 0:
            self.table(sizes, G, M, N, row_end, tile_end, clusters, choice, lane)
        rank = Int32(0)
        if cutlass.const_expr(share > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier()

        chosen, tiles_n, num_tiles = Int32(0), self.tiles_n(N), self.num_tiles(tile_end, G)
        if cutlass.const_expr(self.other is not None):
            chosen = cute.arch.make_warp_uniform(choice[0])
            if chosen == 1:
                tiles_n, num_tiles = self.other.tiles_n(N), self.other.num_tiles(tile_end, G)
        cluster, rounds = cute.arch.block_idx()[0] // share, cute.ceil_div(num_tiles, clusters)
        count = rounds
        if rounds > 0:
            if self.tile_in(rounds - 1, cluster, clusters) >= num_tiles:
                count -= 1
        work = Problem(
            out, bias, scale_a, scale_b, G, N, out_stride, scale_g, scale_n, scale_k, band, cute.ceil_div(K, self.loader_b.tile_k), full, empty,
            row_end, tile_end, storage.stages.data_ptr(), rank, clusters,
            cluster, tiles_n, num_tiles, tile_end[G - 1], rounds, count,
        )  # fmt: skip
        warpgroup_index = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                scale_tma, thin_tma = (tma_scale, coordinates_scale), (thin_tma_a, thin_coordinates_a)
                if chosen == 0:
                    self.produce(work, tma_a, coordinates_a, tma_b, coordinates_b, scale_tma, thin_tma, lane)
                if cutlass.const_expr(self.other is not None):
                    if chosen == 1:
                        self.other.produce(
                            work, other_tma_a, other_coordinates_a, other_tma_b, other_coordinates_b, scale_tma, thin_tma,
                            lane,
                        )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            consumer = warpgroup_index - 1
            buffer = storage.out.data_ptr()
            if chosen == 0:
                self.consume(work, buffer, consumer, thread % WARPGROUP, tma_out, coordinates_out)
            if cutlass.const_expr(self.other is not None):
                if chosen == 1:
                    self.other.consume(work, buffer, consumer, thread % WARPGROUP, tma_out, coordinates_out)
            groups.clear_rows(
                out,
                out_stride,
                row_end[G - 1],
                M,
                N,
                cute.arch.block_idx()[0] * 8 + warp - 4,
                cute.arch.grid_dim()[0] * 8,
            )
        if cutlass.const_expr(share > 1):
            # Another CTA may still arrive at this one's barriers, or send into its stages.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def table(
        self, sizes: cute.Pointer, G: Int32, M: Int32, N: Int32, row_end: cute.Pointer, tile_end: cute.Pointer, clusters: Int32,
        choice: cute.Pointer, lane: Int32,
    ):  # fmt: skip
        """groups.build, and where there are other tiles, which of the two: choice[0] is 1 for those. One warp."""
        groups.build(sizes, G, M, self.cluster_rows, self.tiles_n(N), row_end, tile_end, lane, self.last_halves)
        if cutlass.const_expr(self.other is not None):
            cute.arch.sync_warp()
            better = Int32(0)
            if self.other.work_of(row_end, G, N, clusters, lane) < self.work_of(row_end, G, N, clusters, lane):
                better = Int32(1)
                cute.arch.sync_warp()
                groups.build(
                    sizes,
                    G,
                    M,
                    self.other.cluster_rows,
                    self.other.tiles_n(N),
                    row_end,
                    tile_end,
                    lane,
                    self.other.last_halves,
                )
            if lane == 0:
                choice[0] = better

    @cute.jit
    def work_of(self, row_end: cute.Pointer, G: Int32, N: Int32, clusters: Int32, lane: Int32):
        """What a cluster has to do with these tiles, in units of `cost`. One warp."""
        tiles = groups.tiles_of(row_end, G, self.cluster_rows, False, lane) * self.tiles_n(N)
        large = tiles
        if cutlass.const_expr(self.tenths < 10):
            large = groups.tiles_of(row_end, G, self.cluster_rows, True, lane) * self.tiles_n(N)
        rounds, small = cute.ceil_div(large, clusters), tiles - large
        tenths, free = 10 * rounds, rounds * clusters - large
        if small > 2 * free:
            spread = cute.ceil_div(10 * large + self.tenths * small, clusters)
            tenths = cutlass.max(tenths + self.tenths, spread)
        elif small > free:
            # Two of them beside a large one.
            tenths = cutlass.max(tenths, tenths - 10 + 2 * min(self.tenths, LAST_BESIDE))
        return tenths * self.cost

    @property
    def tenths(self) -> int:
        """Of a tile's time, what one takes with no more than half of its rows, where those come last."""
        if not self.last_halves or self.pair:
            return 10
        return LAST_TENTHS[HALF * self.halves]

    @cute.jit
    def num_tiles(self, tile_end: cute.Pointer, G: Int32):
        """That the table ends with."""
        last = G - 1
        if cutlass.const_expr(self.last_halves):
            last += groups.rest(G)
        return tile_end[last]

    @property
    def places(self):
        """Where in a CTA's stages a, b, what the producer tells, the scales of rows and those of columns are, and the end; in bytes."""
        slots = self.scales.slots if self.blocks else 1
        sizes = (
            *(x.smem_elements // x.tile_k * SWIZZLE_BYTES for x in (self.loader_a, self.loader_b)), 4 * TOLD * self.num_stages,
            4 * slots * self.scales.row_elements if self.blocks else 16, 4 * slots * self.scales.column_elements if self.blocks else 16,
        )  # fmt: skip
        return list(itertools.accumulate((-(-size // 128) * 128 for size in sizes), initial=0))

    def buffers(self, stages):
        """a's and b's [extent, tile_k, stage], then pointers to the others of `places`."""
        found = []
        for loader, place in zip((self.loader_a, self.loader_b), self.places, strict=False):
            layout = loader.smem_layout()
            found.append(
                cute.make_tensor(cute.recast_ptr(stages + place, layout.inner, dtype=loader.dtype), layout.outer)
            )
        told, *scales = self.places[2:-1]
        return (
            *found,
            cute.recast_ptr(stages + told, dtype=Int32),
            *(cute.recast_ptr(stages + x, dtype=Float32) for x in scales),
        )

    def tiles_n(self, N):
        """Of clusters, side by side."""
        return cute.ceil_div(N, self.tile_n * (1 if self.pair else self.share))

    @cute.jit
    def produce(
        self, work, tma_a: cute.CopyAtom, coordinates_a: cute.Tensor, tma_b: cute.CopyAtom, coordinates_b: cute.Tensor, scale_tma: tuple,
        thin_tma: tuple, lane: Int32,
    ):  # fmt: skip
        """The producer warp. work: a Problem."""
        loader_a, loader_b, share, halves, slots = self.loader_a, self.loader_b, self.share, self.halves, self.scales
        tile_m = HALF * halves
        full, empty, rank, k_tiles, N = work.full, work.empty, work.rank, work.k_tiles, work.N
        scale_a, scale_b, scale_n, scale_k = work.scale_a, work.scale_b, work.scale_n, work.scale_k
        smem_a, smem_b, told, row_scales, column_scales = self.buffers(work.stages)
        part = Int32(0)
        shared_b, global_b = loader_b.partition_stack(tma_b, coordinates_b, smem_b, rank if self.pair else 0)
        mask_a = mask_b = None
        if cutlass.const_expr(share > 1):
            if cutlass.const_expr(self.pair):
                mask_b = cutlass.Int16((1 << share) - 1)
            else:
                mask_a = cutlass.Int16((1 << share) - 1)
        write = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.num_stages)
        slot = Int32(0)
        begun = cute.make_rmem_tensor(slots.slots, Int32)
        begun.fill(-self.num_stages)
        cells = Float32(0.0)
        g, start, end, m_tile, n_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        # Of the next tile: a find and a load from far away take longer than a step, and stages are to be filled meanwhile.
        coming = part, g, start, end, m_tile, n_tile, cells
        if cutlass.const_expr(self.ahead):
            if work.count > 0:
                coming = self.begin(work, Int32(0), part, lane)
        for turn in cutlass.range(work.count, unroll=1):
            if cutlass.const_expr(not self.ahead):
                coming = self.begin(work, turn, part, lane)
            part, g, start, end, m_tile, n_tile, cells = coming
            row0 = start + m_tile * self.cluster_rows
            if cutlass.const_expr(self.pair):
                row0 += rank * tile_m
            else:
                n_tile = n_tile * share + rank
            shared_a, global_a = partition_from(loader_a, tma_a, coordinates_a, smem_a, 0 if self.pair else rank, row0)
            if cutlass.const_expr(self.narrow):
                layout = self.thin_loader.smem_layout()
                thin_smem = cute.make_tensor(
                    cute.recast_ptr(work.stages, layout.inner, dtype=loader_a.dtype), layout.outer
                )
                thin_shared, thin_global = partition_from(
                    self.thin_loader, thin_tma[0], thin_tma[1], thin_smem, rank, row0
                )
            # Of a pair's second CTA without rows all is loaded as if it had the group's last one.
            top = cutlass.min(row0, end - 1)
            live = Int32(1)
            if cutlass.const_expr(halves == 2):
                live = cutlass.min(cute.ceil_div(end - row0, HALF), 2)
            # Scales of a: the first row's first one, elements from step to step and from row to row; those of b.
            along, first, stride = Int32(1), start * k_tiles, k_tiles
            if cutlass.const_expr(self.by_group):
                along, stride = end - start, Int32(1)
            strip, rows = first + (top - start) * stride, cutlass.min(end - top, tile_m)
            first_b = g * work.scale_g
            places = cute.make_rmem_tensor(1, Int32)
            if cutlass.const_expr(self.words):
                places = BlockScales(tile_m, 0).places(top, end, start, stride, first, lane)
            if cutlass.const_expr(self.blocks):
                if cutlass.const_expr(slots.kind == "quads"):
                    shared_scale, global_scale = slots.quad_partition(scale_tma[0], scale_tma[1], row_scales, row0)
            for k in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(empty + write.index, write.phase)
                barrier = full + write.index
                arriving = loader_a.stage_bytes * live + loader_b.stage_bytes
                if cutlass.const_expr(self.narrow):
                    if end - row0 <= ROWS:
                        arriving = self.thin_loader.stage_bytes + loader_b.stage_bytes
                if cutlass.const_expr(self.blocks):
                    if k % SCALE_STEPS == 0:
                        if cutlass.const_expr(not self.whole):
                            slots.wait(empty, begun, write.count)
                        if cutlass.const_expr(slots.kind == "quads"):
                            arriving += 4 * slots.row_elements
                with cute.arch.elect_one():
                    if k == 0:
                        self.tell(told + TOLD * write.index, (row0, end, n_tile * self.tile_n, g, start))
                    if cutlass.const_expr(self.blocks):
                        # The arrival follows, behind what the warp itself writes.
                        cute.arch.mbarrier_expect_tx(barrier, arriving)
                    else:
                        cute.arch.mbarrier_arrive_and_expect_tx(barrier, arriving)
                if cutlass.const_expr(self.narrow):
                    if end - row0 <= ROWS:
                        cute.copy(
                            thin_tma[0], thin_global[(None, 0, k)], thin_shared[(None, write.index * halves * 2)], tma_bar_ptr=barrier,
                            mcast_mask=mask_a,
                        )  # fmt: skip
                    else:
                        cute.copy(
                            tma_a, global_a[(None, 0, k)], shared_a[(None, write.index * halves)], tma_bar_ptr=barrier, mcast_mask=mask_a,
                        )  # fmt: skip
                else:
                    cute.copy(
                        tma_a, global_a[(None, 0, k)], shared_a[(None, write.index * halves)], tma_bar_ptr=barrier, mcast_mask=mask_a,
                    )  # fmt: skip
                if cutlass.const_expr(halves == 2):
                    if live == 2:
                        cute.copy(
                            tma_a, global_a[(None, 1, k)], shared_a[(None, write.index * halves + 1)],
                            tma_bar_ptr=barrier, mcast_mask=mask_a,
                        )  # fmt: skip
                cute.copy(
                    tma_b, global_b[(None, n_tile, k, g)], shared_b[(None, write.index)], tma_bar_ptr=barrier,
                    mcast_mask=mask_b,
                )  # fmt: skip
                if cutlass.const_expr(self.blocks):
                    # Behind a's and b's, which take longer.
                    if k % SCALE_STEPS == 0:
                        if cutlass.const_expr(slots.kind == "quads"):
                            cute.copy(
                                scale_tma[0], global_scale[(None, 0, k // SCALE_STEPS)], shared_scale[(None, slot)],
                                tma_bar_ptr=barrier,
                            )  # fmt: skip
                        elif cutlass.const_expr(slots.kind == "strips"):
                            with cute.arch.elect_one():
                                cute.arch.mbarrier_expect_tx(
                                    barrier, slots.strips_bytes(rows, strip + along * k, along, k_tiles - k)
                                )
                                slots.bring_strips(
                                    row_scales, slot, scale_a, rows, strip + along * k, along, k_tiles - k, barrier,
                                )  # fmt: skip
                        else:
                            slots.bring_words(row_scales, slot, scale_a, places, along, k, k_tiles, lane)
                        slots.leave_columns(column_scales, slot, cells, lane)
                        # Asked now, here when the next ones are due.
                        cells = slots.fetch_columns(
                            scale_b, first_b, n_tile * self.tile_n, N, scale_n, scale_k, k + SCALE_STEPS, k_tiles, lane,
                        )  # fmt: skip
                        slot = (slot + 1) % slots.slots
                    if cutlass.const_expr(self.words):
                        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(barrier)
                if cutlass.const_expr(self.ahead):
                    if k == 0:
                        if turn + 1 < work.count:
                            coming = self.begin(work, turn + 1, part, lane)
                write.advance()

    @cute.jit
    def begin(self, work, turn: Int32, part: Int32, lane: Int32):
        """Of the tile of a turn: where `groups.find` finds it, `place`, and this lane's scale of b for its first steps. part: of a tile before."""
        tile = self.tile_in(self.round_of(work, turn), work.tile, work.clusters)
        if cutlass.const_expr(self.mixes):
            part = Int32(0)
            if tile >= work.large:
                part = groups.rest(work.G)
        part = groups.find(work.tile_end, tile, part, lane)
        g, start, end, m_tile, n_tile = self.place(work, part, tile)
        cells = Float32(0.0)
        if cutlass.const_expr(self.blocks):
            column = n_tile if self.pair else n_tile * self.share + work.rank
            cells = self.scales.fetch_columns(
                work.scale_b, g * work.scale_g, column * self.tile_n, work.N, work.scale_n, work.scale_k, Int32(0), work.k_tiles, lane
            )  # fmt: skip
        return part, g, start, end, m_tile, n_tile, cells

    @cute.jit
    def consume(
        self, work, buffer: cute.Pointer, consumer: Int32, thread: Int32, tma_out: cute.CopyAtom, coordinates_out: cute.Tensor
    ):  # fmt: skip
        """A consumer warpgroup. work: a Problem; buffer: of all warps, for what they store."""
        loader_a, halves, slots = self.loader_a, self.halves, self.scales
        full, empty, k_tiles, lane = work.full, work.empty, work.k_tiles, thread % 32
        smem_a, smem_b, told, row_scales, column_scales = self.buffers(work.stages)
        mma = self.mma()
        slice_ = mma.get_slice(0)
        own_a = cute.local_tile(smem_a, (ROWS, loader_a.tile_k, loader_a.num_stages), (consumer, 0, 0))
        operand_a = mma.make_fragment_A(slice_.partition_A(own_a))
        operand_b = mma.make_fragment_B(slice_.partition_B(smem_b))
        # Descriptors of each half alone, whose stages are `halves` buffers apart.
        halves_a: tuple = ()
        for i in cutlass.range_constexpr(halves):
            every = cute.logical_divide(smem_a, (None, None, cute.make_layout(halves)))[(None, None, (i, None))]
            rows_a = cute.local_tile(every, (ROWS, loader_a.tile_k, self.num_stages), (consumer, 0, 0))
            halves_a = (*halves_a, mma.make_fragment_A(slice_.partition_A(rows_a)))
        thin_a = thin_b = None
        if cutlass.const_expr(self.narrow):
            every = cute.logical_divide(smem_a, (None, None, cute.make_layout(halves)))[(None, None, (0, None))]
            rows_a = cute.local_tile(every, (ROWS, loader_a.tile_k, self.num_stages), (0, 0, 0))
            thin_a = mma.make_fragment_A(slice_.partition_A(rows_a))
            columns_b = cute.local_tile(smem_b, (self.tile_n // 2, loader_a.tile_k, self.num_stages), (consumer, 0, 0))
            thin_b = self.thin_mma().make_fragment_B(self.thin_mma().get_slice(0).partition_B(columns_b))
        per_half = ROWS * self.tile_n // WARPGROUP
        total = cute.make_rmem_tensor(per_half * halves, Float32)
        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(not self.late):
            buffer = (
                cute.recast_ptr(buffer, dtype=self.out_dtype) + (4 * consumer + thread // 32) * self.writer.elements
            )
        else:
            # What is in `total` waits for the next tile's first products, or for the end: where it belongs, and whether TMA stores it.
            total = cute.make_rmem_tensor(mma.partition_shape_C((ROWS, self.tile_n)), Float32)
            total.fill(0.0)
            last_row, last_n0, last_g, waits = Int32(0), Int32(0), Int32(0), Int32(0)
            epilogue = self.epilogue
            layout = epilogue.out.smem_layout(2 * epilogue.buffers)
            every = cute.make_tensor(cute.recast_ptr(buffer, layout.inner, dtype=self.out_dtype), layout.outer)
            own_out = cute.local_tile(every, (ROWS, epilogue.out.columns, epilogue.buffers), (0, 0, consumer)), None
            ones = cute.make_rmem_tensor((2, 1), Float32)
            ones.fill(1.0)
            warp = cute.arch.make_warp_uniform(thread // 32)
            # Of this warp: its rows of the first piece.
            buffer = cute.recast_ptr(
                buffer + (consumer * epilogue.buffers * BUFFER_BYTES + warp * (BUFFER_BYTES // 4)), dtype=self.out_dtype
            )
        for _ in cutlass.range(work.count, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            row0, end, n0, g, start = self.hear(told + TOLD * stage)
            reader = thin_reader = None
            if cutlass.const_expr(self.blocks):
                row, place = thread // 32 * 16 + lane // 4, start * k_tiles + (row0 - start)
                reader = slots.reader(row_scales, column_scales, consumer * ROWS + row, n0, place, end - start)
                if cutlass.const_expr(self.narrow):
                    thin_reader = slots.narrow_reader(
                        row_scales, column_scales, row, n0, self.tile_n // 2, consumer, place, end - start
                    )
            left, least = end - row0, Int32(0)
            if cutlass.const_expr(self.narrow):
                least = Int32(ROWS)
                if (left > 0) & (left <= ROWS):
                    stage, phase = self.multiply(
                        1, full, empty, stage, phase, total, operand_a, operand_b, (thin_a,), k_tiles, thin_reader, slot, consumer, thread,
                        thin_b,
                    )  # fmt: skip
            if cutlass.const_expr(halves == 2):
                if left > HALF:
                    stage, phase = self.multiply(
                        2, full, empty, stage, phase, total, operand_a, operand_b, halves_a, k_tiles, reader, slot, consumer,
                        thread,
                    )  # fmt: skip
            if cutlass.const_expr(self.late):
                if left > 0:
                    arguments = (
                        total, mma, own_out, (tma_out, None), (cute.domain_offset((last_row, 0), coordinates_out), None),
                        work.bias + last_g * work.N, work.bias, Int32(0), work.N, ones, Int32(0), last_n0, thread, warp, consumer, None, None,
                    )  # fmt: skip
                    stage, phase = self.multiply(
                        1, full, empty, stage, phase, total, operand_a, operand_b, halves_a, k_tiles, reader, slot, consumer, thread,
                        unfinished=(epilogue, arguments, waits > 0),
                    )  # fmt: skip
                    last_row, last_n0, last_g, waits = row0 + consumer * ROWS, n0, g, Int32(0)
                    if last_row + warp * 16 + 16 <= end:
                        waits = Int32(1)
                    elif last_row + warp * 16 < end:
                        # A neighbour has the other rows. TMA must have read what was in the buffer.
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.sync_warp()
                        self.store(work, total, 0, row0, end, n0, g, buffer, consumer, thread)
                else:
                    stage, phase = self.pass_by(full, empty, stage, phase, k_tiles, thread)
            elif (left <= HALF) | (halves == 1):
                if left > least:
                    stage, phase = self.multiply(
                        1, full, empty, stage, phase, total, operand_a, operand_b, halves_a, k_tiles, reader, slot, consumer,
                        thread,
                    )  # fmt: skip
                elif left <= 0:
                    stage, phase = self.pass_by(full, empty, stage, phase, k_tiles, thread)
            slot = (slot + cute.ceil_div(k_tiles, SCALE_STEPS)) % slots.slots
            for half in cutlass.range_constexpr(0 if self.late else halves):
                if (row0 + half * HALF + consumer * ROWS < end) & (left > least):
                    self.store(work, total, half, row0, end, n0, g, buffer, consumer, thread)
            if cutlass.const_expr(self.narrow):
                if (left > 0) & (left <= ROWS):
                    self.store(work, total, 0, row0, end, n0, g, buffer, consumer, thread, True)
        if cutlass.const_expr(self.late):
            epilogue.store(
                total, mma, own_out, (tma_out, None), (cute.domain_offset((last_row, 0), coordinates_out), None),
                work.bias + last_g * work.N, work.bias, Int32(0), work.N, ones, Int32(0), last_n0, thread, warp, consumer, None, None,
                waits > 0,
            )  # fmt: skip
            epilogue.drain(thread)

    @cute.jit
    def store(
        self, work, total: cute.Tensor, half: cutlass.Constexpr, row0: Int32, end: Int32, n0: Int32, g: Int32, buffer: cute.Pointer,
        consumer: Int32, thread: Int32, thin: cutlass.Constexpr = False,
    ):  # fmt: skip
        """A half of a tile goes out: its rows from row0 on, of which those from `end` on do not. thin: 64 rows, of this consumer's columns."""
        per_half, row = ROWS * self.tile_n // WARPGROUP, row0 + half * HALF + consumer * ROWS
        if cutlass.const_expr(thin):
            per_half, row, n0 = per_half // 2, row0, n0 + consumer * (self.tile_n // 2)
        scale_a, scale_b = work.scale_a, work.scale_b
        factors = cute.make_rmem_tensor(2, Float32)
        alpha = Float32(1.0)
        if cutlass.const_expr(self.a_scaling == "tensor"):
            alpha = alpha * scale_a[0]
        if cutlass.const_expr(self.b_scaling == "tensor"):
            alpha = alpha * scale_b[g * work.scale_g]
        factors.fill(alpha)
        if cutlass.const_expr(self.a_scaling == "row"):
            for i in cutlass.range_constexpr(2):
                own = row + thread // 32 * 16 + thread % 32 // 4 + 8 * i
                factors[i] = alpha * scale_a[cutlass.min(own, end - 1)]
        self.writer.store(
            total, half * per_half, per_half, work.out, work.out_stride, row, end, n0, work.N, factors, scale_b + g * work.N,
            work.bias + g * work.N, thread, buffer,
        )  # fmt: skip

    @property
    def mixes(self) -> bool:
        return self.last_halves and not self.pair

    @cute.jit
    def tile_in(self, turn: Int32, cluster: Int32, clusters: Int32):
        """The cluster's tile in a round, which may be past the last."""
        place = cluster
        if turn % 2 == 1:
            place = clusters - 1 - cluster
        return turn * clusters + place

    @cute.jit
    def round_of(self, work, turn: Int32):
        """Which round of tiles is the cluster's `turn`-th.

        Rounds of tiles with few rows lie between the others, for each cluster elsewhere: those tiles bring b for little work, and all at
        once would wait for memory. The round that has both kinds, and the last, come last: there they make up for each other.
        """
        found = turn
        if cutlass.const_expr(self.mixes):
            whole = work.large // work.clusters
            small = work.rounds - 2 - whole
            if (small > 0) & (turn < whole + small):
                of = whole + small
                shift = work.tile * of // work.clusters
                before = (turn * small + shift) // of
                found = turn - before
                if ((turn + 1) * small + shift) // of > before:
                    found = whole + 1 + before
            elif small > 0:
                found = work.rounds - 1
                if turn == whole + small:
                    found = whole
        return found

    @cute.jit
    def place(self, work, part: Int32, tile: Int32):
        """(group, its first row, the row past its last, m_tile, n_tile of clusters) of a tile; part: where `groups.find` found it."""
        tile_m = self.cluster_rows
        g = part
        if cutlass.const_expr(self.last_halves):
            if part >= groups.rest(work.G):
                g = part - groups.rest(work.G)
        start, end = groups.start_of(work.row_end, g), work.row_end[g]
        tiles_m, first = cute.ceil_div(end - start, tile_m), Int32(0)
        if cutlass.const_expr(self.last_halves):
            tiles_m = groups.whole(end - start, tile_m)
            if part >= groups.rest(work.G):
                tiles_m, first = Int32(1), tiles_m
        m_tile, n_tile = tile_of(tile - groups.start_of(work.tile_end, part), tiles_m, work.tiles_n, work.band, "m")
        return g, start, end, first + m_tile, n_tile

    @cute.jit
    def multiply(
        self, live: cutlass.Constexpr, full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32, total: cute.Tensor,
        a: cute.Tensor, b: cute.Tensor, halves_a: tuple, k_tiles: Int32, reader, slot: Int32, consumer: Int32, thread: Int32,
        thin_b: cutlass.Constexpr = None, unfinished=None,
    ):  # fmt: skip
        """total = a @ b of a tile's first `live` halves; returns the next stage and its phase. thin_b: half of b's columns, instead of b;
        unfinished: as accumulate_promoted."""
        per_half = ROWS * self.tile_n // WARPGROUP
        # Its own: what one branch sets in it must not be seen in the other.
        mma = self.mma()
        shape = mma.partition_shape_C((ROWS, self.tile_n))
        if cutlass.const_expr(self.promote):
            read = pipeline.PipelineState(self.num_stages, Int32(0), stage, phase)
            if cutlass.const_expr(self.whole and self.num_stages == SCALE_STEPS):
                read = pipeline.PipelineState(self.num_stages, Int32(0), Int32(0), phase)
            pipe = Stages(full, empty, self.num_stages, self.share)
            of_b, columns, mma_of = b, self.tile_n, self.mma
            if cutlass.const_expr(thin_b is not None):
                of_b, columns, mma_of = thin_b, self.tile_n // 2, self.thin_mma
            read = mma_block.accumulate_promoted(
                pipe, read, mma_of, total, halves_a[:live], (of_b,), columns, k_tiles, reader, slot, self.stagger, consumer,
                BEHIND, tail=not self.whole, behind=self.late, unfinished=unfinished,
            )  # fmt: skip
            stage, phase = read.index, read.phase
        else:
            # Registers of this branch's own, and a fence before each batch: else ptxas waits for each wgmma.
            parts = [cute.make_rmem_tensor(shape, Float32) for _ in range(live)]
            cute.arch.mbarrier_wait(full + stage, phase)
            for half in cutlass.range_constexpr(live):
                warpgroup.fence()
                self.issue(mma, parts[half], a, b, stage * self.halves + half, stage, True)
            last = stage
            stage, phase = self.next(stage, phase)
            for _ in cutlass.range(1, k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                for half in cutlass.range_constexpr(live):
                    warpgroup.fence()
                    self.issue(mma, parts[half], a, b, stage * self.halves + half, stage, False)
                warpgroup.wait_group(live)
                self.release(empty + last, thread)
                last = stage
                stage, phase = self.next(stage, phase)
            warpgroup.wait_group(0)
            self.release(empty + last, thread)
            for half in cutlass.range_constexpr(live):
                for v in cutlass.range_constexpr(per_half):
                    total[half * per_half + v] = parts[half][v]
        return stage, phase

    def thin_mma(self):
        return mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n // 2)

    def mma(self):
        return mma_block.tiled_mma(self.loader_a, self.loader_b, self.tile_n)

    @cute.jit
    def release(self, barrier: cute.Pointer, thread: Int32):
        release(barrier, self.share)

    @cute.jit
    def pass_by(
        self, full: cute.Pointer, empty: cute.Pointer, stage: Int32, phase: Int32, k_tiles: Int32, thread: Int32
    ):  # fmt: skip
        """As multiply, of a tile without rows: the stages are released."""
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            self.release(empty + stage, thread)
            stage, phase = self.next(stage, phase)
        return stage, phase

    @cute.jit
    def tell(self, place: cute.Pointer, words: tuple):
        """What the consumers are to know of a tile, behind the barrier of its first stage."""
        held = cute.make_rmem_tensor(TOLD, Int32)
        held.fill(0)
        for i in cutlass.range_constexpr(len(words)):
            held[i] = words[i]
        cute.autovec_copy(held, cute.make_tensor(place.align(16), cute.make_layout(TOLD)))

    @cute.jit
    def hear(self, place: cute.Pointer):
        held = cute.make_rmem_tensor(TOLD, Int32)
        cute.autovec_copy(cute.make_tensor(place.align(16), cute.make_layout(TOLD)), held)
        return held[0], held[1], held[2], held[3], held[4]

    @cute.jit
    def next(self, stage: Int32, phase: Int32):
        stage = stage + 1
        if stage == self.num_stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def issue(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        stage_a,
        stage_b,
        first: cutlass.Constexpr,
    ):
        """acc (+)= a @ b over the k steps of a stage, as one group."""
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (first and k == 0))
            cute.gemm(mma, acc, a[(None, None, k, stage_a)], b[(None, None, k, stage_b)], acc)
        warpgroup.commit_group()
