"""wgmma: the products of one consumer warpgroup."""

import cutlass
from cutlass import Float32, cute
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
def accumulate_promoted(
    pipe,
    read,
    release,
    mma: cute.TiledMma,
    acc: cute.Tensor,
    total: cute.Tensor,
    a: cute.Tensor,
    b: cute.Tensor,
    k_tiles,
):
    """total = a @ b, where the matrix unit sums one stage at a time and float32 additions sum the stages.

    For FP8, whose products the matrix unit adds with fewer bits than float32. Nothing of this warpgroup is in flight
    during its additions: another one's wgmmas must fill that time. Returns the two pipeline states, both past the tile.
    """
    total.fill(0.0)
    for _ in cutlass.range(k_tiles, unroll=1):
        pipe.consumer_wait(read)
        warpgroup.fence()
        multiply(mma, acc, a, b, read.index, True)
        warpgroup.wait_group(0)
        pipe.consumer_release(release)
        total.store(total.load() + acc.load())
        read.advance()
        release.advance()
    return read, release
