"""Operands of grouped products on their way to shared memory: weights [G, ...] of which a tile is of one group, and rows that
begin anywhere. Both are TmaLoader's tiles; what differs is where they come from."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import cpasync

from fourwave.blocks.cutedsl import groups
from fourwave.blocks.cutedsl.loaders import TmaLoader


@dataclass(frozen=True)
class StackedLoader(TmaLoader):
    """Tiles of one of G matrices. They end where their matrix does: what lies past it arrives as zeros."""

    def stack(self, pointer, extent, K, G, row_stride, matrix_stride):
        """[extent, K, G]. matrix_stride: elements from one matrix to the next."""
        divisor = 128 // self.dtype.width
        row_stride = cute.assume(row_stride, divby=divisor)
        matrix_stride = cute.assume(matrix_stride, divby=divisor)
        stride = (row_stride, 1, matrix_stride) if self.k_contiguous else (1, row_stride, matrix_stride)
        return cute.make_tensor(pointer, cute.make_layout((extent, K, G), stride=stride))

    def partition_stack(self, atom, coordinates, smem, rank):
        """(shared [copy, stage], global [copy, tile, k_tile, matrix])."""
        tiles = cute.local_tile(coordinates, (self.extent, self.tile_k), (None, None, None))
        return cpasync.tma_partition(
            atom, rank, cute.make_layout(self.multicast), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )


def partition_from(loader, atom, coordinates, smem, rank, row):
    """As TmaLoader.partition, of tiles that are numbered from row `row` on, which may be any."""
    return loader.partition(atom, cute.domain_offset((row, 0), coordinates), smem, rank)


@dataclass(frozen=True)
class BlockScales:
    """Scales of one stage in shared memory: one for each of `rows` rows of a (or none), then `cells` of b, 128 of its rows each.

    A warp copies them with cp.async and arrives at the stage's barrier when they are there, once per lane.
    """

    rows: int
    cells: int

    @property
    def turns(self) -> int:
        """Rows of one lane."""
        return -(-self.rows // groups.LANES)

    @property
    def pitch(self) -> int:
        """Floats of a stage."""
        return -(-(self.rows + self.cells) // 4) * 4

    @cute.jit
    def places(self, row0: Int32, end: Int32, start: Int32, stride: Int32, first: Int32, lane: Int32):
        """Where in the scales of a the rows of this lane begin: row0 + lane, + 32, ...; rows from `end` on take the last one's.

        start: the group's first row, whose scales begin at element `first`; stride: elements from row to row."""
        places = cute.make_rmem_tensor(max(1, self.turns), Int32)
        for i in cutlass.range_constexpr(cute.size(places)):
            row = cutlass.min(row0 + groups.LANES * i + lane, end - 1)
            places[i] = first + (row - start) * stride
        return places

    @cute.jit
    def copy(
        self, shared: cute.Pointer, stage: Int32, scale_a: cute.Pointer, places: cute.Tensor, along_a: Int32,
        scale_b: cute.Pointer, place_b: Int32, barrier: cute.Pointer, lane: Int32,
    ):  # fmt: skip
        """along_a: elements to this k block's scales from those of the first; place_b: where this lane's cell's scale is."""
        base = shared + stage * self.pitch
        for i in cutlass.range_constexpr(self.turns):
            if cutlass.const_expr((i + 1) * groups.LANES <= self.rows):
                groups.copy_word(base + (groups.LANES * i + lane), scale_a + (places[i] + along_a))
            elif groups.LANES * i + lane < self.rows:
                groups.copy_word(base + (groups.LANES * i + lane), scale_a + (places[i] + along_a))
        if lane < self.cells:
            groups.copy_word(base + (self.rows + lane), scale_b + place_b)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)
