"""An operand of a GEMM on its way from global to shared memory, by TMA."""

from dataclasses import dataclass

from cutlass import Float32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

SWIZZLE_BYTES = 128
EVICT_FIRST = 0x12F0000000000000
"""Policy of L2 for what one CTA reads once: it leaves before what others read again. As CUTLASS's TMA::CacheHintSm90 encodes it."""


def policy(read_once: bool):
    """Of a load (cute.copy's cache_policy)."""
    return Int64(EVICT_FIRST) if read_once else None


@dataclass(frozen=True)
class TmaLoader:
    """Tiles of extent x tile_k elements, as wgmma reads them: swizzled in rows of 128 bytes of the contiguous dimension.

    dtype        CuTe DSL element type
    extent       tile rows (A) or columns (B)
    k_contiguous whether K is the contiguous dimension; wgmma reads both, so nothing is transposed on the way
    num_stages   shared-memory buffers
    multicast    CTAs of the cluster that need the same tile; each loads its share and sends it to all
    read_extent  what is read of a tile, where that is more (K contiguous): the rest is whatever lies there
    swizzle      bytes, 128 or 64: of what wgmma reads the first; then K contiguous tiles have rows of as many bytes or several
                 slabs of them, one after the other
    parts        places of the matrix that a tile is put together from, equal parts of its extent: each its own TMA box

    What lies outside the matrix arrives as zeros, so tails need nothing more.
    """

    dtype: type
    extent: int
    tile_k: int
    k_contiguous: bool
    num_stages: int
    multicast: int
    read_extent: int = 0
    parts: int = 1
    swizzle: int = SWIZZLE_BYTES

    @property
    def major(self):
        return OperandMajorMode.K if self.k_contiguous else OperandMajorMode.MN

    @property
    def stage_bytes(self) -> int:
        return self.extent * self.tile_k * self.dtype.width // 8

    def matrix(self, pointer, extent, K, row_stride):
        """The operand as [extent, K]. row_stride: elements between rows as stored; TMA needs multiples of 16 bytes."""
        row_stride = cute.assume(row_stride, divby=128 // self.dtype.width)
        stride = (row_stride, 1) if self.k_contiguous else (1, row_stride)
        return cute.make_tensor(pointer, cute.make_layout((extent, K), stride=stride))

    def _atom(self):
        kinds = warpgroup.SmemLayoutAtomKind
        kind = kinds.K_SW128 if self.k_contiguous else kinds.MN_SW128
        if self.swizzle == 64:
            kind = kinds.K_SW64
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def stage_layout(self):
        """[extent, tile_k]."""
        return cute.tile_to_shape(
            self._atom(), (self.extent, self.tile_k), order=(0, 1) if self.k_contiguous else (1, 0)
        )

    def smem_layout(self):
        """[extent, tile_k, stage]. Slabs of 64 along a contiguous extent lie one after the other."""
        order = (0, 1, 2) if self.k_contiguous else (1, 0, 2)
        return cute.tile_to_shape(self._atom(), (self.extent, self.tile_k, self.num_stages), order=order)

    @property
    def smem_elements(self):
        """Of all stages, with what wgmma reads past the last one."""
        return (self.num_stages * self.extent + max(self.read_extent - self.extent, 0)) * self.tile_k

    def read_layout(self):
        """As smem_layout, [read_extent, tile_k, stage], with the stages where they are."""
        layout = self.smem_layout()
        if self.read_extent <= self.extent:
            return layout
        row = self.tile_k  # 128 bytes; the swizzle has them in groups of 8
        outer = cute.make_layout(
            ((8, self.read_extent // 8), (row, 1), (1, self.num_stages)),
            stride=((row, 8 * row), (1, 0), (0, self.extent * row)),
        )
        return cute.make_composed_layout(layout.inner, 0, outer)

    def tma(self, matrix):
        """(copy atom, coordinate tensor) for this matrix; called on the host side of the kernel."""
        op = cpasync.CopyBulkTensorTileG2SOp() if self.multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        box = self.extent // self.parts, self.tile_k
        stage = self.stage_layout()
        if self.parts > 1:
            stage = cute.tile_to_shape(self._atom(), box, order=(0, 1) if self.k_contiguous else (1, 0))
        return cpasync.make_tiled_tma_atom(op, matrix, stage, box, num_multicast=self.multicast)

    def partition_part(self, atom, coordinates, smem, rank, part: int, first):
        """As partition, of the part that begins at `first` of the matrix; tiles are numbered in its extent."""
        own = cute.local_tile(smem, (self.extent // self.parts, self.tile_k, self.num_stages), (part, 0, 0))
        return self.partition(atom, cute.domain_offset((first, 0), coordinates), own, rank)

    def partition(self, atom, coordinates, smem, rank):
        """(shared [copy, stage], global [copy, tile, k_tile]) of this CTA; rank: its number among the multicast CTAs."""
        tiles = cute.local_tile(coordinates, (self.extent // self.parts, self.tile_k), (None, None))
        return cpasync.tma_partition(
            atom, rank, cute.make_layout(self.multicast), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )


SCALE_STEPS = 4  # k steps whose scales are loaded together: 16 bytes of a row, the least that TMA takes
SCALE_BLOCK = 128  # of k, and of n


@dataclass(frozen=True)
class ScaleLoader:
    """Scales of several k steps, `blocks` times `rows` of them below each other, each by TMA into a buffer of its own.

    slots          buffers
    dtype, steps   elements of a row: float32 of SCALE_STEPS stages, 16 e8m0 codes, or any that fill a multiple of 16 bytes
    """

    rows: int
    blocks: int
    slots: int
    dtype: type = Float32
    steps: int = SCALE_STEPS

    @property
    def row_bytes(self) -> int:
        return self.steps * self.dtype.width // 8

    @property
    def block_elements(self) -> int:
        """TMA writes to multiples of 128 bytes."""
        return -(-self.rows * self.row_bytes // 128) * 1024 // self.dtype.width

    @property
    def slot_bytes(self) -> int:
        """Of what TMA brings."""
        return self.blocks * self.rows * self.row_bytes

    @property
    def elements(self) -> int:
        return self.slots * self.blocks * self.block_elements

    def matrix(self, pointer, rows, k_tiles, row_stride):
        """[rows, k_tiles]; row_stride: a multiple of `steps`."""
        row_stride = cute.assume(row_stride, divby=self.steps)
        return cute.make_tensor(pointer, cute.make_layout((rows, k_tiles), stride=(row_stride, 1)))

    def smem_layout(self):
        """[rows, step, block, slot]."""
        stride = (self.steps, 1, self.block_elements, self.blocks * self.block_elements)
        return cute.make_layout((self.rows, self.steps, self.blocks, self.slots), stride=stride)

    def tma(self, matrix):
        layout = cute.make_layout((self.rows, self.steps), stride=(self.steps, 1))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, layout, (self.rows, self.steps))

    def partition(self, atom, coordinates, smem):
        """(shared [copy, block, slot], global [copy, block of rows, steps])."""
        tiles = cute.local_tile(coordinates, (self.rows, self.steps), (None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
