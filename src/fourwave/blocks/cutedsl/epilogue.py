"""z = alpha * scale_a * scale_b * acc + bias, out = act(z) (+ out), in float32, rounded once (ties to even) when it is converted.

Each consumer warpgroup stores by itself: 64 rows x 128 bytes at a time go through one of its shared-memory buffers, and
TMA writes them out, clipping what lies outside the matrix, while the next ones are computed; where there are buffers for all of
a tile, they are filled at once and the next tile begins. `accumulate` is TMA's
reduction: memory adds the float32 that arrives, so no addend is read here. As PTX says of that addition, subnormals count
as zeros. z is stored likewise, where it is asked for. Of swiglu the left half of a tile's columns is the gate, the right
one what it multiplies: a thread has both of each output in its registers. A quantized out has codes of out / out_scale, and
each thread keeps the largest magnitude that it has seen.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Uint8, cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from fourwave.blocks.cutedsl import access, convert
from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64
ROW_BYTES = 128
BUFFER_BYTES = ROWS * ROW_BYTES
ABSOLUTE = 0x7FFFFFFF  # all bits of a float32 but the sign


@dsl_user_op
def _multiply_add(a: Float32, b: Float32, c: Float32, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once whatever stands around it: one call's z has the bits of another's with other outputs."""
    operands = [Float32(each).ir_value(loc=loc, ip=ip) for each in (a, b, c)]
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, operands, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@dsl_user_op
def _sigmoid(y: Float32, *, loc=None, ip=None) -> Float32:
    """By the machine's own exponential and reciprocal, each within 2^-22: a division would be four times the instructions, and
    far more where the exponential overflows, which gives the right limit, 0."""
    text = (
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; "  # -log2(e)
        "ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }"
    )
    return Float32(
        llvm.inline_asm(
            Float32.mlir_type, [Float32(y).ir_value(loc=loc, ip=ip)], text, "=f,f", has_side_effects=False,
            asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
        )
    )  # fmt: skip


@cute.jit
def _sigmoid_times(x: cute.TensorSSA, y: cute.TensorSSA):
    """x * sigmoid(y)."""
    factors = cute.make_rmem_tensor(cute.size(y.shape), Float32)
    factors.store(y.reshape(cute.size(y.shape)))
    for i in cutlass.range_constexpr(cute.size(factors)):
        factors[i] = _sigmoid(factors[i])
    return x * factors.load().reshape(x.shape)


@cute.jit
def activate(x: cute.TensorSSA, activation: cutlass.Constexpr):
    """x: float32 vector. The formulas are those of torch.nn.functional."""
    if cutlass.const_expr(activation is None):
        return x
    if cutlass.const_expr(activation == "relu"):
        return cute.where(x < 0.0, cute.full_like(x, 0.0), x)  # NaN stays NaN
    if cutlass.const_expr(activation == "silu"):
        return _sigmoid_times(x, x)
    if cutlass.const_expr(activation == "gelu_tanh"):
        # 0.5 * (1 + tanh(u)) == sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
        return _sigmoid_times(x, x * (x * x * (2 * 0.7978845608 * 0.044715) + 2 * 0.7978845608))
    return x * (cute.math.erf(x * 0.7071067811865476) * 0.5 + 0.5)


@dataclass(frozen=True)
class Output:
    """A matrix on its way from registers to global memory: 64 rows x 128 bytes at a time, of 8-bit elements 64 bytes.

    reduce  memory adds what arrives
    box     rows that TMA stores at a time: a warpgroup's 64, or a warp's 16
    """

    dtype: type
    reduce: bool = False
    box: int = ROWS

    @property
    def columns(self) -> int:
        """Of a piece, which takes one buffer."""
        return min(64, ROW_BYTES * 8 // self.dtype.width)

    @property
    def per_buffer(self) -> int:
        """Pieces that a buffer has room for."""
        return ROW_BYTES * 8 // (self.columns * self.dtype.width)

    @property
    def values(self) -> int:
        """Of one thread in a piece."""
        return ROWS * self.columns // WARPGROUP

    def _atom(self):
        kinds = warpgroup.SmemLayoutAtomKind
        return warpgroup.make_smem_layout_atom(kinds.K_SW128 if self.per_buffer == 1 else kinds.K_SW64, self.dtype)

    def smem_layout(self, buffers):
        """[64, columns, piece], swizzled against bank conflicts as TMA undoes it; buffer i begins with piece i * per_buffer."""
        return cute.tile_to_shape(self._atom(), (ROWS, self.columns, buffers * self.per_buffer), order=(0, 1, 2))

    def matrix(self, pointer, M, N, row_stride):
        row_stride = cute.assume(row_stride, divby=128 // self.dtype.width)
        return cute.make_tensor(pointer, cute.make_layout((M, N), stride=(row_stride, 1)))

    def halves(self, pointer, M, N, parts: int, row_stride, distance):
        """[M, N, parts]: `parts` matrices beside each other, `distance` elements apart."""
        divisor = 128 // self.dtype.width
        stride = (cute.assume(row_stride, divby=divisor), 1, cute.assume(distance, divby=divisor))
        return cute.make_tensor(pointer, cute.make_layout((M, N, parts), stride=stride))

    def tma(self, matrix):
        op = cpasync.CopyReduceBulkTensorTileS2GOp() if self.reduce else cpasync.CopyBulkTensorTileS2GOp()
        piece = cute.tile_to_shape(self._atom(), (self.box, self.columns), order=(0, 1))
        return cpasync.make_tiled_tma_atom(op, matrix, piece, (self.box, self.columns))

    def register_copy(self, mma):
        """Registers to shared memory: stmatrix for two-byte elements, pairs of others."""
        if self.dtype.width == 16:
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=2 * self.dtype.width)
        # The thread layout is that of the accumulator, whatever the element size.
        accumulator = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(accumulator, mma))

    def partition(self, atom, coordinates, smem, part: Int32 | int = 0):
        """(shared [copy, piece], global [copy, tile of `box` rows, column tile (, part)]); part: of a piece's rows."""
        own = cute.local_tile(smem, (self.box, self.columns, cute.size(smem, mode=[2])), (part, 0, 0))
        tiles = cute.local_tile(coordinates, (self.box, self.columns), (None,) * cute.rank(coordinates))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(own, 0, 2), cute.group_modes(tiles, 0, 2)
        )


@dataclass(frozen=True)
class Epilogue:
    """What happens to the accumulator of a warpgroup; dtypes are CuTe DSL element types.

    buffers  shared-memory buffers of 64 rows x 128 bytes per warpgroup
    by_warp  whether each warp stores its 16 rows of a piece when they are there, without a barrier of the warpgroup
    row_scaled, column_scaled  whether each row, each column of the accumulator has a float32 factor of its own
    codes    of a quantized out, whose out_dtype is then Uint8, or None
    z_dtype  of the z that is stored, or None
    """

    out_dtype: type
    bias_dtype: type | None
    activation: str | None
    accumulate: bool
    buffers: int
    row_scaled: bool
    column_scaled: bool
    codes: convert.Codes | None = None
    z_dtype: type | None = None
    by_warp: bool = False

    @property
    def box(self) -> int:
        """Rows that TMA stores at a time."""
        return ROWS * 32 // WARPGROUP if self.by_warp else ROWS

    @property
    def out(self) -> Output:
        return Output(self.out_dtype, self.accumulate, self.box)

    @property
    def z(self) -> Output | None:
        return None if self.z_dtype is None else Output(self.z_dtype, box=self.box)

    @property
    def paired(self) -> bool:
        return self.activation == "swiglu"

    @property
    def parts(self) -> int:
        """Columns of the product for one of out."""
        return 2 if self.paired else 1

    @property
    def columns(self) -> int:
        """Of out that are computed at a time."""
        return max(self.out.columns, 0 if self.z is None else self.z.columns)

    def pieces(self, blocks: int, columns: int) -> int:
        """That a warpgroup stores, each through a buffer, of as many 64-row blocks and columns of the product."""
        count = columns // self.parts // self.out.columns
        if self.z is not None:
            count += columns // self.z.columns
        return blocks * count

    def smem(self, storage, warpgroups: int, consumer: Int32):
        """A warpgroup's buffers out of those of all, as out's pieces and as z's (or None)."""
        views = []
        for output in (self.out, self.z):
            if output is None:
                views.append(None)
                continue
            layout = output.smem_layout(warpgroups * self.buffers)
            whole = storage.get_tensor(layout.outer, swizzle=layout.inner, dtype=output.dtype)
            own = ROWS, output.columns, self.buffers * output.per_buffer
            views.append(cute.local_tile(whole, own, (0, 0, consumer)))
        return tuple(views)

    @cute.jit
    def factors(
        self, scales: cute.Pointer, blocks: cutlass.Constexpr, M: Int32, m0: Int32, alpha: Float32, thread: Int32
    ):
        """[2, blocks]: what this thread's rows of each 64-row block, lane / 4 and lane / 4 + 8, are multiplied by.

        Asked for before the products, so that they hide the loads.
        """
        factors = cute.make_rmem_tensor((2, blocks), Float32)
        factors.fill(alpha)
        if cutlass.const_expr(self.row_scaled):
            row = m0 + thread // 32 * 16 + thread % 32 // 4
            for block in cutlass.range_constexpr(blocks):
                for half in cutlass.range_constexpr(2):
                    # Past the end any value will do: TMA clips the row.
                    factors[half, block] = alpha * scales[cutlass.min(row + block * ROWS + half * 8, M - 1)]
        return factors

    @cute.jit
    def _of_columns(self, bias: cute.Pointer, scales: cute.Pointer, first: Int32, N: Int32):
        """(offsets, factors) of a thread's values in columns first, first + 1, first + 8, ...; None where there are none."""
        count = ROWS * self.columns // WARPGROUP
        offsets = cute.make_rmem_tensor(count, Float32) if self.bias_dtype is not None else None
        factors = cute.make_rmem_tensor(count, Float32) if self.column_scaled else None
        for v in cutlass.range_constexpr(0, count, 4):
            for c in cutlass.range_constexpr(2):
                # Past the end any value will do: TMA clips the column.
                column = cutlass.min(first + 2 * v + c, N - 1)
                if cutlass.const_expr(offsets is not None):
                    value = Float32(bias[column])
                    offsets[v + c] = value
                    offsets[v + c + 2] = value
                if cutlass.const_expr(factors is not None):
                    scale = scales[column]
                    factors[v + c] = scale
                    factors[v + c + 2] = scale
        return offsets, factors

    @cute.jit
    def _values(
        self, acc: cute.Tensor, first: cutlass.Constexpr, block: cutlass.Constexpr, factors: cute.Tensor, of_columns
    ):
        """z of a thread's values acc[first ...], as a vector."""
        offsets, column_factors = of_columns
        values = cute.make_rmem_tensor(ROWS * self.columns // WARPGROUP, Float32)
        for v in cutlass.range_constexpr(cute.size(values)):
            value, factor = acc[first + v], factors[v // 2 % 2, block]
            if cutlass.const_expr(column_factors is not None):
                value, factor = value * factor, column_factors[v]
            if cutlass.const_expr(offsets is not None):
                values[v] = _multiply_add(value, factor, offsets[v])
            else:
                values[v] = value * factor
        return values.load()

    @cute.jit
    def _quantize(
        self, result: cute.TensorSSA, inverse: Int32, amax: cute.Tensor, columns: Int32, row: Int32, M: Int32
    ):
        """Codes of result / out_scale, in Uint8; amax[0] becomes what it was or a larger magnitude.

        columns  from this thread's first one on to the end. row: its first one; it has row + 8 too
        """
        count = ROWS * self.columns // WARPGROUP
        values = cute.make_rmem_tensor(count, Float32)
        values.store(result)
        bits = cute.recast_tensor(values, Int32)
        largest = [Int32(0), Int32(0)]  # as integers, so NaN is larger than all
        for v in cutlass.range_constexpr(0, count, 4):
            for c in cutlass.range_constexpr(2):
                mask = access.where_less(Int32(2 * v + c), columns, Int32(ABSOLUTE), Int32(0))
                for half in cutlass.range_constexpr(2):
                    largest[half] = cutlass.max(largest[half], bits[v + 2 * half + c] & mask)
        for half in cutlass.range_constexpr(2):
            amax[0] = cutlass.max(amax[0], access.where_less(row + 8 * half, M, largest[half], Int32(0)))
        words = cute.make_rmem_tensor(count // 4, Int32)
        for v in cutlass.range_constexpr(0, count, 4):
            words[v // 4] = self.codes.pack4([convert.product(bits[v + i], inverse) for i in range(4)])
        return cute.recast_tensor(words, Uint8)

    @cute.jit
    def _meet(self, barrier: Int32):
        """Of those who store together."""
        if cutlass.const_expr(self.by_warp):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)

    @cute.jit
    def _await_buffers(self, in_flight: cutlass.Constexpr, thread: Int32, barrier: Int32):
        """Until TMA has read all buffers but those of the last `in_flight` groups of stores: their issuer waits, and tells."""
        if cutlass.const_expr(self.by_warp):
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)
        elif cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)
        self._meet(barrier)

    @cute.jit
    def _write(
        self, output: cutlass.Constexpr, copy: cute.TiledCopy, targets: cute.Tensor, values: cute.Tensor,
        first: cutlass.Constexpr, piece: cutlass.Constexpr,
    ):  # fmt: skip
        """values[first ...], a thread's share of a piece, to shared memory."""
        source = cute.make_rmem_tensor(targets[(None, None, None, 0)].shape, output.dtype)
        for v in cutlass.range_constexpr(output.values):
            source[v] = values[first + v]
        cute.copy(copy, source, targets[(None, None, None, piece)])

    @cute.jit
    def _issue(self, written: cutlass.Constexpr, thread: Int32, barrier: Int32, sends=None):
        """Have TMA store what has been written: (copy atom, source, target) of each piece, as one group. sends: as in store."""
        cute.arch.fence_proxy("async.shared", space="cta")
        self._meet(barrier)
        if cutlass.const_expr(self.by_warp):
            if cutlass.const_expr(sends is None):
                for atom, source, target in written:
                    cute.copy(atom, source, target)
            elif sends:
                for atom, source, target in written:
                    cute.copy(atom, source, target)
            cute.arch.cp_async_bulk_commit_group()
        elif cute.arch.make_warp_uniform(thread // 32) == 0:
            for atom, source, target in written:
                cute.copy(atom, source, target)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store(
        self, acc: cute.Tensor, mma: cute.TiledMma, smem: tuple, atoms: tuple, coordinates: tuple,
        bias: cute.Pointer, scales: cute.Pointer, M: Int32, N: Int32, factors: cute.Tensor, m0: Int32, n0: Int32,
        thread: Int32, warp: Int32, consumer: Int32, inverse, amax, sends=None,
    ):  # fmt: skip
        """Store this warpgroup's accumulators, whose first element is row m0, column n0 of the output.

        A buffer is written once the store that was in it has been read out. Where a tile has more pieces than there are
        buffers, they take turns, and each piece waits for the one `buffers` before it; else all are written, then stored.

        acc     [mma values, 64-row blocks, 1]; a thread's values of a block, in order: for each 8 columns, columns
                2 * (lane % 4) + {0, 1} of row lane / 4 and of row lane / 4 + 8 (PTX ISA, wgmma's D fragment). Of swiglu
                the second half of the columns belongs to column N / 2 + n0 of the product and those after it
        scales  of the columns; factors: of the rows
        smem, atoms, coordinates  of out, and of z or None; smem: this warpgroup's buffers (smem)
        thread, warp  in the warpgroup; consumer: its number, which names its barrier
        inverse, amax  of a quantized out: 1 / out_scale, and the largest magnitude so far [1], both the bits of a float32
        sends   None, or whether there is a tile: else m0 is -1, n0 is 0, and what is in acc goes into the buffers and no further
        """
        barrier = 1 + consumer
        out, z = self.out, self.z
        per_step = ROWS * self.columns // WARPGROUP  # values of one thread
        blocks = cute.size(acc, mode=[1])
        per_block = cute.size(acc) // blocks
        per_part = per_block // self.parts
        out_copy = out.register_copy(mma)
        out_targets = out_copy.get_slice(thread).partition_D(smem[0])
        part, boxes = 0, 1
        if cutlass.const_expr(self.by_warp):
            part, boxes = warp, WARPGROUP // 32
        out_shared, out_global = out.partition(atoms[0], coordinates[0], smem[0], part)
        if cutlass.const_expr(z is not None):
            z_copy = z.register_copy(mma)
            z_targets = z_copy.get_slice(thread).partition_D(smem[1])
            z_shared, z_global = z.partition(atoms[1], coordinates[1], smem[1], part)
            z_pieces = self.columns // z.columns
        out_pieces = self.columns // out.columns
        row_tile = m0 // self.box + part
        row = m0 + thread // 32 * 16 + thread % 32 // 4
        if cutlass.const_expr(sends is not None):
            M = M if sends else Int32(0)  # for amax
        pair = n0 + 2 * (thread % 4)
        whole = self.pieces(blocks, per_block * WARPGROUP // ROWS) == self.buffers
        if cutlass.const_expr(whole):
            self._await_buffers(0, thread, barrier)
        sent = 0
        written = []
        for step in cutlass.range_constexpr(per_part // per_step):
            column = pair + step * self.columns
            of_columns = None
            if cutlass.const_expr(not self.paired):
                of_columns = self._of_columns(bias, scales, column, N)
            for block in cutlass.range_constexpr(blocks):
                vectors = ()
                for half in cutlass.range_constexpr(self.parts):
                    first = block * per_block + half * per_part + step * per_step
                    if cutlass.const_expr(self.paired):
                        # For each block anew: both halves' take more registers than there are.
                        of_columns = self._of_columns(bias, scales, half * (N // 2) + column, N)
                    vector = self._values(acc, first, block, factors, of_columns)
                    vectors = (*vectors, vector)
                    if cutlass.const_expr(z is not None):
                        converted = cute.make_rmem_tensor(per_step, z.dtype)
                        converted.store(vector.to(z.dtype))
                        for piece in cutlass.range_constexpr(z_pieces):
                            if cutlass.const_expr(not whole):
                                self._await_buffers(self.buffers - 1, thread, barrier)
                            place = sent % self.buffers * z.per_buffer
                            self._write(z, z_copy, z_targets, converted, piece * z.values, place)
                            tile = n0 // z.columns + step * z_pieces + piece
                            target = z_global[(None, row_tile + block * boxes, tile, half)]
                            written.append((atoms[1], z_shared[(None, place)], target))
                            if cutlass.const_expr(not whole):
                                self._issue(written, thread, barrier, sends)
                                written = []
                            sent += 1
                if cutlass.const_expr(self.paired):
                    result = activate(vectors[0], "silu") * vectors[1]
                else:
                    result = activate(vectors[0], self.activation)
                if cutlass.const_expr(self.codes is not None):
                    converted = self._quantize(result, inverse, amax, N // self.parts - column, row + block * ROWS, M)
                else:
                    converted = cute.make_rmem_tensor(per_step, out.dtype)
                    converted.store(result.to(out.dtype))
                for piece in cutlass.range_constexpr(out_pieces):
                    if cutlass.const_expr(not whole):
                        self._await_buffers(self.buffers - 1, thread, barrier)
                    place = sent % self.buffers * out.per_buffer
                    self._write(out, out_copy, out_targets, converted, piece * out.values, place)
                    tile = n0 // out.columns + step * out_pieces + piece
                    target = out_global[(None, row_tile + block * boxes, tile)]
                    written.append((atoms[0], out_shared[(None, place)], target))
                    if cutlass.const_expr(not whole):
                        self._issue(written, thread, barrier, sends)
                        written = []
                    sent += 1
        if cutlass.const_expr(whole):
            self._issue(written, thread, barrier, sends)

    @cute.jit
    def finish_amax(self, target: cute.Pointer, amax: cute.Tensor, thread: Int32):
        """*target = max(*target, the largest of this warp), NaN where there was one."""
        largest = access.where_less(Int32(convert.INFINITY), amax[0], Int32(convert.NAN), amax[0])
        for distance in (16, 8, 4, 2, 1):
            largest = cutlass.max(largest, access.from_lane(largest, distance))
        access.largest_into(target.toint(), largest, thread % 32, Int32(1))

    @cute.jit
    def drain(self, thread: Int32):
        """Before a warpgroup ends: its buffers must have been read."""
        if cutlass.const_expr(self.by_warp):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        elif cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
