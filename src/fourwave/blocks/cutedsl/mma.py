"""wgmma: the products of one consumer warpgroup."""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils import hopper_helpers

from fourwave.blocks.cutedsl.loaders import SCALE_BLOCK, SCALE_STEPS

WARPGROUP = 128  # threads


def tiled_mma(loader_a, loader_b, tile_n, registers=False):
    """64 x tile_n per instruction, float32 accumulators; both operands in shared memory, or the first one in `registers`."""
    source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    return hopper_helpers.make_trivial_tiled_mma(
        loader_a.dtype, loader_b.dtype, loader_a.major, loader_b.major, Float32, (1, 1, 1), (64, tile_n), source
    )


@cute.jit
def multiply(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage, first: cutlass.Constexpr, sums: tuple = ()
):  # fmt: skip
    """Issue acc (+)= a @ b over the k steps of one stage, as one group; `first` overwrites acc.

    a, b  descriptors [mma, 64-row blocks, k steps, stage]
    sums  empty, or (mma, acc, a, b) of a product with the same a and a b of one stage, which is issued beside it
    """
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, not (first and k == 0))
        cute.gemm(mma, acc, a[(None, None, k, stage)], b[(None, None, k, stage)], acc)
        if cutlass.const_expr(len(sums) > 0):
            other, total, rows, ones = sums
            other.set(warpgroup.Field.ACCUMULATE, not (first and k == 0))
            cute.gemm(other, total, rows[(None, None, k, stage)], ones[(None, None, k, 0)], total)
    warpgroup.commit_group()


@cute.jit
def multiply_registers(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage, first: cutlass.Constexpr = 0
):  # fmt: skip
    """As multiply, acc += a @ b, with a [mma, 64-row blocks, k steps] in registers, and b's k steps from `first` on."""
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[(None, None, k)], b[(None, None, k + first, stage)], acc)
    warpgroup.commit_group()


@cute.jit
def accumulate(
    pipe, read, release, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, k_tiles, sums: tuple = ()
):  # fmt: skip
    """Start acc = a @ b over k_tiles >= 1 stages of the pipeline; returns the two pipeline states. `finish` ends it.

    One stage's wgmmas are in flight while the next one's are issued, so a stage is released one step late: `release`
    trails `read` by one, and the last stage is still in use on return.
    """
    warpgroup.fence()
    pipe.consumer_wait(read)
    multiply(mma, acc, a, b, read.index, True, sums)
    read.advance()
    for _ in cutlass.range(1, k_tiles, unroll=1):
        pipe.consumer_wait(read)
        multiply(mma, acc, a, b, read.index, False, sums)
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


@dsl_user_op
def _pinned(value: Float32, *, loc=None, ip=None) -> Float32:
    """The same value, computed between the asm statements before and after this one: no instruction."""
    operand = Float32(value).ir_value(loc=loc, ip=ip)
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, [operand], "", "=f,0", has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc,
            ip=ip,
        )
    )  # fmt: skip


@cute.jit
def _promote(
    sums: cute.Tensor, total: cute.Tensor, first: cutlass.Constexpr, factors, block: cutlass.Constexpr,
    column: cutlass.Constexpr, group: cutlass.Constexpr,
):  # fmt: skip
    """total[first ...] += sums (* factors): those of a 64-row block from `column` on.

    Pinned: the compiler would move additions across the next wgmmas, and ptxas then put a wait behind each of those.
    """
    for v in cutlass.range_constexpr(cute.size(sums)):
        sums[v] = _pinned(sums[v])
    for v in cutlass.range_constexpr(cute.size(sums)):
        if cutlass.const_expr(factors is not None):
            # Values in order: for each 8 columns, two of the thread's first row, two of its second one.
            total[first + v] = total[first + v] + sums[v] * factors[v // 2 % 2, block, (column + 2 * v) // group]
        else:
            total[first + v] = total[first + v] + sums[v]
    for v in cutlass.range_constexpr(cute.size(sums)):
        total[first + v] = _pinned(total[first + v])


@dsl_user_op
def _load_quad(address: Int32, *, loc=None, ip=None) -> list:
    """Four float32 of shared memory."""
    kind = llvm.StructType.get_literal([Float32.mlir_type] * 4)
    made = llvm.inline_asm(
        kind, [Int32(address).ir_value(loc=loc, ip=ip)], "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r",
        has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return [Float32(llvm.extractvalue(Float32.mlir_type, made, [i], loc=loc, ip=ip)) for i in range(4)]


@cute.jit
def _read_scales(
    of_rows: cute.Tensor, of_columns: cute.Tensor, scales_a: cute.Tensor, scales_b: cute.Tensor, slot: Int32, row: Int32,
    column: Int32,
):  # fmt: skip
    """Of SCALE_STEPS k steps: of_rows [2, 64-row blocks, step], of_columns [groups of columns, step]; column: the tile's
    first one."""
    start = scales_a.iterator.toint().to(Int32) + slot * (4 * scales_a.stride[3])
    for block in cutlass.range_constexpr(cute.size(of_rows, mode=[1])):
        for half in cutlass.range_constexpr(2):
            quad = _load_quad(start + (row + 64 * block + 8 * half) * (4 * SCALE_STEPS))
            for step in cutlass.range_constexpr(SCALE_STEPS):
                of_rows[half, block, step] = quad[step]
    start = scales_b.iterator.toint().to(Int32) + slot * (4 * scales_b.stride[3])
    for g in cutlass.range_constexpr(cute.size(of_columns, mode=[0])):
        block = Int32(0)
        if cutlass.const_expr(cute.size(of_columns, mode=[0]) > 1):
            block = (column % SCALE_BLOCK + g * 64) // SCALE_BLOCK
        quad = _load_quad(start + block * (4 * scales_b.stride[2]))
        for step in cutlass.range_constexpr(SCALE_STEPS):
            of_columns[g, step] = quad[step]


@cute.jit
def accumulate_promoted(
    pipe, read, mma: cute.TiledMma, total: cute.Tensor, a: tuple, b: tuple, k_tiles: Int32, scales_a, scales_b, slot: Int32,
    row: Int32, column: Int32, stagger: cutlass.Constexpr, consumer: Int32, turn: cutlass.Constexpr,
):  # fmt: skip
    """total = a @ b, where the matrix unit sums one stage at a time and float32 additions sum the stages.

    For FP8, whose products the matrix unit adds with fewer bits than float32, and for scales that change with k.
    Another warpgroup's wgmmas run during the additions. The unit serves two warpgroups in turn, instruction by instruction:
    those that start together also end together, and would add together, too. So the second one starts a tile (`stagger`)
    when the first has its first sums.
    Unrolled: what lies between a batch's wgmmas, such as the next one's addresses, competes with the other warpgroup's
    additions for issue slots, and forty instructions there outlast a wgmma.
    Returns the pipeline state, past the tile.

    k_tiles       a multiple of SCALE_STEPS
    total         [mma values, 64-row blocks, parts]
    a, b          descriptors as in multiply: a tuple of 64-row blocks, and one of parts of the columns. A block's parts are
                  issued together, so that one is added while the next one's wgmmas run
    scales_*      None, or as ScaleLoader brings them: each stage's sums are multiplied by those of a's rows and of b's
                  columns. slot: where the tile's first ones are
    row           this thread's first one in the tile; it has row + 8 too. column: the tile's first one
    turn          named barrier of the stagger
    """
    parts = len(b)
    columns = cute.size(total) * WARPGROUP // 64 // len(a)
    shape = mma.partition_shape_C((64, columns // parts))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(parts)]
    factors, group = None, columns
    if cutlass.const_expr(scales_a is not None):
        group = columns if SCALE_BLOCK % columns == 0 else 64
        factors = cute.make_rmem_tensor((2, len(a), columns // group), Float32)
        of_rows = cute.make_rmem_tensor((2, len(a), SCALE_STEPS), Float32)
        of_columns = cute.make_rmem_tensor((columns // group, SCALE_STEPS), Float32)
    total.fill(0.0)
    if cutlass.const_expr(stagger):
        if consumer == 1 and k_tiles >= pipe.num_stages:
            cute.arch.barrier(barrier_id=turn, number_of_threads=2 * WARPGROUP)
    ready = pipe.consumer_try_wait(read)
    for turns in cutlass.range(k_tiles // SCALE_STEPS, unroll=1):
        for step in cutlass.range_constexpr(SCALE_STEPS):
            pipe.consumer_wait(read, ready)
            if cutlass.const_expr(scales_a is not None):
                if cutlass.const_expr(step == 0):
                    of_slot = (slot + turns) % cute.size(scales_a, mode=[3])
                    _read_scales(of_rows, of_columns, scales_a, scales_b, of_slot, row, column)
                for half in cutlass.range_constexpr(2):
                    for block in cutlass.range_constexpr(len(a)):
                        for g in cutlass.range_constexpr(columns // group):
                            factors[half, block, g] = of_rows[half, block, step] * of_columns[g, step]
            for block in cutlass.range_constexpr(len(a)):
                warpgroup.fence()
                for part in cutlass.range_constexpr(parts):
                    multiply(mma, acc[part], a[block], b[part], read.index, True)
                for part in cutlass.range_constexpr(parts):
                    warpgroup.wait_group(parts - 1 - part)
                    if cutlass.const_expr(stagger and step == 0 and block == 0 and part == 0):
                        if consumer == 0 and turns == 0 and k_tiles >= pipe.num_stages:
                            cute.arch.barrier_arrive(barrier_id=turn, number_of_threads=2 * WARPGROUP)
                    if cutlass.const_expr(block == len(a) - 1 and part == parts - 1):
                        pipe.consumer_release(read)
                        read.advance()
                        ready = pipe.consumer_try_wait(read)
                    first = (block * parts + part) * cute.size(acc[part])
                    _promote(acc[part], total, first, factors, block, part * (columns // parts), group)
    return read
