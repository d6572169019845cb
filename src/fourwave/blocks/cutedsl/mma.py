"""wgmma: the products of one consumer warpgroup."""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

WARPGROUP = 128  # threads


def tiled_mma(loader_a, loader_b, tile_n):
    """64 x tile_n per instruction, both operands in shared memory, float32 accumulators."""
    return hopper_helpers.make_trivial_tiled_mma(
        loader_a.dtype, loader_b.dtype, loader_a.major, loader_b.major, Float32, (1, 1, 1), (64, tile_n)
    )


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage, first: cutlass.Constexpr):
    """Issue acc (+)= a @ b over the k steps of one stage, as one group; `first` overwrites acc.

    a, b  descriptors [mma, 64-row blocks, k steps, stage]
    """
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (first and k == 0))
        cute.gemm(mma, acc, a[(None, None, k, stage)], b[(None, None, k, stage)], acc)
    warpgroup.commit_group()


@cute.jit
def accumulate(pipe, read, release, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, k_tiles):
    """Start acc = a @ b over k_tiles >= 1 stages of the pipeline; returns the two pipeline states. `finish` ends it.

    One stage's wgmmas are in flight while the next one's are issued, so a stage is released one step late: `release`
    trails `read` by one, and the last stage is still in use on return.
    """
    warpgroup.fence()
    pipe.consumer_wait(read)
    multiply(mma, acc, a, b, read.index, True)
    read.advance()
    for _ in cutlass.range(1, k_tiles, unroll=1):
        pipe.consumer_wait(read)
        multiply(mma, acc, a, b, read.index, False)
        warpgroup.wait_group(1)
        pipe.consumer_release(release)
        release.advance()
        read.advance()
    return read, release


@cute.jit
def finish(pipe, release):
    """Wait for the last wgmmas and release their stage; returns the pipeline state."""
    warpgroup.wait_group(0)
    pipe.consumer_release(release)
    release.advance()
    return release


@cute.jit
def scale_offsets(M: Int32, N: Int32, m: Int32, n0: Int32, k_tiles: Int32, groups: cutlass.Constexpr):
    """Where the scales of rows m and m + 8 of a ([M, k_tiles], one per 128 k) begin, and those of each 64 columns from n0 on
    of b ([N / 128, k_tiles], one per 128 n and 128 k). Past the end any will do: what they scale is not stored."""
    rows = cute.make_rmem_tensor(2, Int64)
    for half in cutlass.range_constexpr(2):
        rows[half] = Int64(cutlass.min(m + 8 * half, M - 1)) * k_tiles
    columns = cute.make_rmem_tensor(groups, Int64)
    for group in cutlass.range_constexpr(groups):
        columns[group] = Int64(cutlass.min(n0 + 64 * group, N - 1) // 128) * k_tiles
    return rows, columns


@cute.jit
def accumulate_promoted(
    pipe, read, release, mma: cute.TiledMma, total: cute.Tensor, a: cute.Tensor, b: tuple, k_tiles, scale_a: cute.Pointer,
    scale_b: cute.Pointer, rows: cute.Tensor, columns: cute.Tensor, scaled: cutlass.Constexpr,
):  # fmt: skip
    """total = a @ b, where the matrix unit sums one stage at a time and float32 additions sum the stages.

    For FP8, whose products the matrix unit adds with fewer bits than float32, and for scales that change with k.
    mma's columns are those of b's parts: a part is added while the next one's wgmmas run; meanwhile, and during the rest,
    those of another warpgroup do. (With wgmmas in flight across the loop's end, ptxas would put a wait behind each.)
    Returns the two pipeline states, both past the tile.

    total        [mma values, 1, parts]: one block of 64 rows
    a, b         descriptors as in multiply; a tuple of b's parts, one after the other
    scaled       multiply each stage's sum by scales, which begin at `rows` and `columns` (scale_offsets)
    """
    parts = len(b)
    groups = cute.size(columns)
    row_scales = cute.make_rmem_tensor(2, Float32)
    column_scales = cute.make_rmem_tensor(groups, Float32)
    factors = cute.make_rmem_tensor((2, groups), Float32)
    shape = mma.partition_shape_C((64, cute.size(total) * WARPGROUP // 64 // parts))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(parts)]
    total.fill(0.0)
    if cutlass.const_expr(scaled):
        _load_scales(row_scales, column_scales, scale_a, scale_b, rows, columns, Int32(0))
    for k_tile in cutlass.range(k_tiles, unroll=1):
        pipe.consumer_wait(read)
        warpgroup.fence()
        for part in cutlass.range_constexpr(parts):
            multiply(mma, acc[part], a, b[part], read.index, True)
        if cutlass.const_expr(scaled):
            # The next stage's are asked for before these products end, so that nothing waits for them.
            for half in cutlass.range_constexpr(2):
                for group in cutlass.range_constexpr(groups):
                    factors[half, group] = row_scales[half] * column_scales[group]
            _load_scales(
                row_scales, column_scales, scale_a, scale_b, rows, columns, cutlass.min(k_tile + 1, k_tiles - 1)
            )
        for part in cutlass.range_constexpr(parts):
            warpgroup.wait_group(parts - 1 - part)
            if cutlass.const_expr(part == parts - 1):
                pipe.consumer_release(release)
            first = part * cute.size(acc[part])
            for v in cutlass.range_constexpr(cute.size(acc[part])):
                if cutlass.const_expr(scaled):
                    # Values in order: for each 8 columns, two of the thread's first row, two of its second one.
                    factor = factors[v // 2 % 2, (first + v) // 32]
                    total[first + v] = total[first + v] + acc[part][v] * factor
                else:
                    total[first + v] = total[first + v] + acc[part][v]
        read.advance()
        release.advance()
    return read, release


@cute.jit
def _load_scales(
    row_scales: cute.Tensor, column_scales: cute.Tensor, scale_a: cute.Pointer, scale_b: cute.Pointer, rows: cute.Tensor,
    columns: cute.Tensor, k_tile: Int32,
):  # fmt: skip
    for half in cutlass.range_constexpr(2):
        row_scales[half] = scale_a[rows[half] + k_tile]
    for group in cutlass.range_constexpr(cute.size(columns)):
        column_scales[group] = scale_b[columns[group] + k_tile]
