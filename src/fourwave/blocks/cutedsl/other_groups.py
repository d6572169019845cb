"""Zeros in the k of a stage that are other groups', where groups split a reduction. Of both operands: zero times a neighbour's NaN is NaN."""

import cutlass
from cutlass import Int32, cute

from fourwave.blocks.cutedsl.mma import WARPGROUP


@cute.jit
def clear(
    loaders: cutlass.Constexpr, tiles: tuple, stage: Int32, low: Int32, high: Int32, thread: Int32, barrier: cutlass.Constexpr
):  # fmt: skip
    """Zeros in a stage's tiles for k < low and k >= high. Two warpgroups, which then read them with wgmma.

    loaders, tiles  of a and of b: TmaLoader, the memory of all stages as Int32; thread: of both warpgroups
    barrier         a named one of theirs
    """
    if (low > 0) | (high < loaders[0].tile_k):
        _clear(loaders[0], tiles[0], stage, low, high, thread)
        _clear(loaders[1], tiles[1], stage, low, high, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=2 * WARPGROUP)


@cute.jit
def _clear(loader: cutlass.Constexpr, words: cute.Pointer, stage: Int32, low: Int32, high: Int32, thread: Int32):
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
