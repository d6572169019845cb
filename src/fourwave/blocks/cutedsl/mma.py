"""wgmma: the products of one consumer warpgroup."""

import math
from dataclasses import dataclass

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


@dsl_user_op
def _load_float(address: Int32, *, loc=None, ip=None) -> Float32:
    """One float32 of shared memory."""
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, [Int32(address).ir_value(loc=loc, ip=ip)], "ld.shared.f32 $0, [$1];", "=f,r",
            has_side_effects=True, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dataclass(frozen=True)
class ScaleReader:
    """Where a thread finds the scales of SCALE_STEPS k steps in shared memory, in slots. Addresses are those in slot 0, in bytes.

    rows           of the thread's first row of a (it has the one 8 further on too, and those of every 64-row block): one address,
                   where a row's scales of the steps lie side by side, or one of each step, where a step's scales of the rows do
    row_slot       bytes from slot to slot; block_rows: rows from one 64-row block to the next
    columns        of the first block of b's columns, whose scales of the steps lie side by side, the next one's column_block
                   bytes further on, and column_slot bytes from slot to slot
    column, cell   the tile's first column; columns of a tile that surely share a scale
    """

    rows: tuple
    row_slot: int
    block_rows: int
    columns: Int32
    column_block: int
    column_slot: int
    slots: int
    column: Int32
    cell: int

    @cute.jit
    def read(self, of_rows: cute.Tensor, of_columns: cute.Tensor, slot: Int32):
        """of_rows [2, 64-row blocks, step], of_columns [cells, step]."""
        # Volatile, and before the wgmmas: between them, what waits for shared memory would hold them up.
        for block in cutlass.range_constexpr(cute.size(of_rows, mode=[1])):
            for half in cutlass.range_constexpr(2):
                row = self.block_rows * block + 8 * half
                if cutlass.const_expr(len(self.rows) == 1):
                    quad = _load_quad(self.rows[0] + slot * self.row_slot + row * (4 * SCALE_STEPS))
                    for step in cutlass.range_constexpr(SCALE_STEPS):
                        of_rows[half, block, step] = quad[step]
                else:
                    for step in cutlass.range_constexpr(SCALE_STEPS):
                        of_rows[half, block, step] = _load_float(self.rows[step] + slot * self.row_slot + row * 4)
        for c in cutlass.range_constexpr(cute.size(of_columns, mode=[0])):
            block = Int32(0)
            if cutlass.const_expr(cute.size(of_columns, mode=[0]) > 1):
                block = (self.column // self.cell % (SCALE_BLOCK // self.cell) + c) // (SCALE_BLOCK // self.cell)
            quad = _load_quad(self.columns + slot * self.column_slot + block * self.column_block)
            for step in cutlass.range_constexpr(SCALE_STEPS):
                of_columns[c, step] = quad[step]


def scale_reader(scales_a: cute.Tensor, scales_b: cute.Tensor, row: Int32, column: Int32, tile_n: int) -> ScaleReader:
    """Of scales as ScaleLoader brings them."""
    start_a, start_b = (scales.iterator.toint().to(Int32) for scales in (scales_a, scales_b))
    return ScaleReader(
        (start_a + row * (4 * SCALE_STEPS),), 4 * scales_a.stride[3], 64, start_b, 4 * scales_b.stride[2], 4 * scales_b.stride[3],
        cute.size(scales_a, mode=[3]), column, math.gcd(tile_n, SCALE_BLOCK),
    )  # fmt: skip


@cute.jit
def _multiply_scales(factors: cute.Tensor, of_rows: cute.Tensor, of_columns: cute.Tensor, step: cutlass.Constexpr):
    for half in cutlass.range_constexpr(2):
        for block in cutlass.range_constexpr(cute.size(of_rows, mode=[1])):
            for c in cutlass.range_constexpr(cute.size(of_columns, mode=[0])):
                factors[half, block, c] = of_rows[half, block, step] * of_columns[c, step]


@cute.jit
def _promoted_step(
    pipe, read, ready, mma: cute.TiledMma, total: cute.Tensor, acc: list, a: tuple, b: tuple, factors, scales, of_rows, of_columns,
    cell: cutlass.Constexpr, step: cutlass.Constexpr, lead: tuple, behind: cutlass.Constexpr = False, slot=None, unfinished=None,
):  # fmt: skip
    """One k step of accumulate_promoted; returns the pipeline state and whether the next stage is there.

    lead    empty, or (when, named barrier): where this warpgroup arrives when its first sums are there
    behind  whether scales are read (where there is a `slot`) and multiplied behind the first wgmmas, or (read) before
    """
    pipe.consumer_wait(read, ready)
    parts = len(b)
    if cutlass.const_expr(scales is not None and not behind):
        _multiply_scales(factors, of_rows, of_columns, step)
    for block in cutlass.range_constexpr(len(a)):
        warpgroup.fence()
        for part in cutlass.range_constexpr(parts):
            multiply(mma, acc[part], a[block], b[part], read.index, True)
        if cutlass.const_expr(behind):
            # ptxas moves no access to memory across it, between these wgmmas.
            cute.arch.sync_warp()
            if cutlass.const_expr(unfinished is not None and block == 0):
                epilogue, arguments, exists = unfinished
                for v in cutlass.range_constexpr(cute.size(total)):
                    total[v] = _pinned(total[v])
                epilogue.store(*arguments, exists)
                total.fill(0.0)
            if cutlass.const_expr(scales is not None and block == 0):
                if cutlass.const_expr(slot is not None):
                    scales.read(of_rows, of_columns, slot)
                _multiply_scales(factors, of_rows, of_columns, step)
        for part in cutlass.range_constexpr(parts):
            warpgroup.wait_group(parts - 1 - part)
            if cutlass.const_expr(len(lead) > 0 and block == 0 and part == 0):
                when, turn = lead
                if when:
                    cute.arch.barrier_arrive(barrier_id=turn, number_of_threads=2 * WARPGROUP)
            if cutlass.const_expr(block == len(a) - 1 and part == parts - 1):
                pipe.consumer_release(read)
                read.advance()
                ready = pipe.consumer_try_wait(read)
            first = (block * parts + part) * cute.size(acc[part])
            columns = cute.size(acc[part]) * WARPGROUP // 64
            _promote(acc[part], total, first, factors, block, part * columns, cell)
    return read, ready


@cute.jit
def _promoted_steps(
    pipe, read, ready, mma: cute.TiledMma, total: cute.Tensor, acc: list, a: tuple, b: tuple, factors, scales, of_rows, of_columns,
    cell: cutlass.Constexpr, slot: Int32, turns: Int32, lead: tuple, behind: cutlass.Constexpr, unfinished,
):  # fmt: skip
    """SCALE_STEPS steps, whose number in units of those is `turns`; see _promoted_step."""
    of_turn = None
    if cutlass.const_expr(scales is not None):
        of_turn = (slot + turns) % scales.slots
        if cutlass.const_expr(not behind):
            pipe.consumer_wait(read, ready)
            ready = cutlass.Boolean(True)
            scales.read(of_rows, of_columns, of_turn)
    for step in cutlass.range_constexpr(SCALE_STEPS):
        read, ready = _promoted_step(
            pipe, read, ready, mma, total, acc, a, b, factors, scales, of_rows, of_columns, cell, step,
            lead if step == 0 else (), behind, of_turn if step == 0 else None, unfinished if step == 0 else None,
        )  # fmt: skip
    return read, ready


@cute.jit
def accumulate_promoted(
    pipe, read, mma_of: cutlass.Constexpr, total: cute.Tensor, a: tuple, b: tuple, columns: cutlass.Constexpr, k_tiles: Int32, scales,
    slot: Int32, stagger: cutlass.Constexpr, consumer: Int32, turn: cutlass.Constexpr, tail: cutlass.Constexpr = False,
    behind: cutlass.Constexpr = False, unfinished=None,
):  # fmt: skip
    """total = a @ b, where the matrix unit sums one stage at a time and float32 additions sum the stages.

    For FP8, whose products the matrix unit adds with fewer bits than float32, and for scales that change with k.
    Another warpgroup's wgmmas run during the additions. The unit serves two warpgroups in turn, instruction by instruction:
    those that start together also end together, and would add together, too. So the second one starts a tile (`stagger`)
    when the first has its first sums.
    Unrolled: what lies between a batch's wgmmas, such as the next one's addresses, competes with the other warpgroup's
    additions for issue slots, and forty instructions there outlast a wgmma.
    Returns the pipeline state, past the tile.

    pipe          consumer_wait, consumer_try_wait and consumer_release of PipelineTmaAsync, and num_stages
    mma_of        makes the instruction: one for each loop or branch, since what is set of it in one is not there in another
    k_tiles       a multiple of SCALE_STEPS, and with as many stages the compiler knows where each is; or with `tail` any number
    total         [mma values, 64-row blocks, parts], or more, of which these are the first
    a, b          descriptors as in multiply: a tuple of 64-row blocks, and one of parts of the `columns` columns. A block's parts
                  are issued together, so that one is added while the next one's wgmmas run
    scales        None, or a ScaleReader: each stage's sums are multiplied by those of a's rows and of b's columns.
                  slot: where the tile's first ones are
    turn          named barrier of the stagger
    behind        scales are read and multiplied behind a step's first wgmmas: nothing keeps those waiting
    unfinished    None, or, with `behind`, (epilogue, what its `store` takes, whether there is one): the tile before, which is in
                  `total` still and is stored while this one's first wgmmas run
    """
    parts = len(b)
    mma = mma_of()
    shape = mma.partition_shape_C((64, columns // parts))
    acc = [cute.make_rmem_tensor(shape, Float32) for _ in range(parts)]
    factors = of_rows = of_columns = None
    cell = columns
    if cutlass.const_expr(scales is not None):
        cell = scales.cell
        factors = cute.make_rmem_tensor((2, len(a), columns // cell), Float32)
        of_rows = cute.make_rmem_tensor((2, len(a), SCALE_STEPS), Float32)
        of_columns = cute.make_rmem_tensor((columns // cell, SCALE_STEPS), Float32)
    if cutlass.const_expr(unfinished is None):
        total.fill(0.0)
    # Else the first could arrive for two tiles before the second waits for one.
    late = k_tiles >= max(pipe.num_stages, SCALE_STEPS)
    if cutlass.const_expr(stagger):
        if late & (consumer == 1):
            cute.arch.barrier(barrier_id=turn, number_of_threads=2 * WARPGROUP)
    ready = pipe.consumer_try_wait(read)
    whole = k_tiles // SCALE_STEPS
    begin = 0
    if cutlass.const_expr(unfinished is not None):
        # Turns of its own: in a branch of the loop, the store would take more registers than there are.
        assert not tail
        begin = 1
        read, ready = _promoted_steps(
            pipe, read, ready, mma, total, acc, a, b, factors, scales, of_rows, of_columns, cell, slot, Int32(0),
            (late & (consumer == 0), turn) if stagger else (), behind, unfinished,
        )  # fmt: skip
    for turns in cutlass.range(begin, whole, unroll=1):
        lead = ()
        if cutlass.const_expr(stagger and unfinished is None):
            lead = late & (consumer == 0) & (turns == 0), turn
        read, ready = _promoted_steps(
            pipe, read, ready, mma, total, acc, a, b, factors, scales, of_rows, of_columns, cell, slot, turns, lead, behind, None
        )  # fmt: skip
    if cutlass.const_expr(tail):
        rest = k_tiles - whole * SCALE_STEPS
        if rest > 0:
            if cutlass.const_expr(scales is not None):
                pipe.consumer_wait(read, ready)
                ready = cutlass.Boolean(True)
                scales.read(of_rows, of_columns, (slot + whole) % scales.slots)
            for step in cutlass.range_constexpr(SCALE_STEPS - 1):
                if step < rest:
                    read, ready = _promoted_step(
                        pipe, read, ready, mma_of(), total, acc, a, b, factors, scales, of_rows, of_columns, cell, step, (),
                    )  # fmt: skip
    return read
