"""out = act(alpha * scale_a * scale_b * acc + bias) (+ out), in float32, rounded once (ties to even) when it is converted.

Each consumer warpgroup stores by itself: 64 rows x 128 bytes at a time go through one of its shared-memory buffers, and
TMA writes them out, clipping what lies outside the matrix, while the next ones are computed. `accumulate` is TMA's
reduction: memory adds the float32 that arrives, so no addend is read here. As PTX says of that addition, subnormals count
as zeros.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64
ROW_BYTES = 128


def _sigmoid_times(x, y):
    """x * sigmoid(y). exp overflows to infinity for very negative y, which gives the right limit, 0."""
    return x / (cute.math.exp(-y) + 1.0)


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
class Epilogue:
    """What happens to the accumulator of a warpgroup; dtypes are CuTe DSL element types.

    buffers  shared-memory buffers of 64 rows x 128 bytes per warpgroup
    row_scaled, column_scaled  whether each row, each column of the accumulator has a float32 factor of its own
    """

    out_dtype: type
    bias_dtype: type | None
    activation: str | None
    accumulate: bool
    buffers: int
    row_scaled: bool
    column_scaled: bool

    @property
    def columns(self) -> int:
        """Columns of a buffer."""
        return ROW_BYTES * 8 // self.out_dtype.width

    def smem_layout(self, warpgroups):
        """[64, columns, buffer], swizzled against bank conflicts as TMA undoes it."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.out_dtype)
        return cute.tile_to_shape(atom, (ROWS, self.columns, warpgroups * self.buffers), order=(0, 1, 2))

    def matrix(self, pointer, M, N, row_stride):
        row_stride = cute.assume(row_stride, divby=128 // self.out_dtype.width)
        return cute.make_tensor(pointer, cute.make_layout((M, N), stride=(row_stride, 1)))

    def tma(self, matrix):
        op = cpasync.CopyReduceBulkTensorTileS2GOp() if self.accumulate else cpasync.CopyBulkTensorTileS2GOp()
        buffer = cute.slice_(self.smem_layout(1), (None, None, 0))
        return cpasync.make_tiled_tma_atom(op, matrix, buffer, (ROWS, self.columns))

    def _register_copy(self, mma):
        """Registers to shared memory: stmatrix for two-byte elements, pairs of floats otherwise."""
        if self.out_dtype.width == 16:
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.out_dtype)
        else:
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.out_dtype, num_bits_per_copy=64)
        # The thread layout is that of the accumulator, whatever the element size.
        accumulator = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.Float16)
        return cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(accumulator, mma))

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
    def store(
        self, acc: cute.Tensor, mma: cute.TiledMma, smem: cute.Tensor, atom: cute.CopyAtom, coordinates: cute.Tensor,
        bias: cute.Pointer, scales: cute.Pointer, N: Int32, factors: cute.Tensor, m0: Int32, n0: Int32, thread: Int32,
        consumer: Int32,
    ):  # fmt: skip
        """Store this warpgroup's accumulators, whose first element is row m0, column n0 of the output.

        acc     [mma values, 64-row blocks, 1]; a thread's values of a block, in order: for each 8 columns, columns
                2 * (lane % 4) + {0, 1} of row lane / 4 and of row lane / 4 + 8 (PTX ISA, wgmma's D fragment)
        scales  of the columns; factors: of the rows
        smem    this warpgroup's buffers, [64, columns, buffer]
        thread  in the warpgroup; consumer: its number, which names its barrier

        A buffer is written once the store from it `buffers` steps ago has been read out. The thread that issued it
        waits for that, the barrier tells the others; a second barrier, after each thread's fence, gives the buffer to TMA.
        """
        issuer = cute.arch.make_warp_uniform(thread // 32) == 0
        barrier = 1 + consumer
        per_buffer = ROWS * self.columns // WARPGROUP  # values of one thread
        blocks = cute.size(acc, mode=[1])
        per_block = cute.size(acc) // blocks
        tiled_copy = self._register_copy(mma)
        targets = tiled_copy.get_slice(thread).partition_D(smem)
        tiles = cute.local_tile(coordinates, (ROWS, self.columns), (None, None))
        shared, glob = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        row_tile, column_tile = m0 // ROWS, n0 // self.columns
        pair = n0 + 2 * (thread % 4)
        for step in cutlass.range_constexpr(per_block // per_buffer):
            offsets = cute.make_rmem_tensor(per_buffer, Float32)
            columns = cute.make_rmem_tensor(per_buffer, Float32)
            for v in cutlass.range_constexpr(0, per_buffer, 4):
                for c in cutlass.range_constexpr(2):
                    # Past the end any value will do: TMA clips the column.
                    column = cutlass.min(pair + step * self.columns + 2 * v + c, N - 1)
                    if cutlass.const_expr(self.bias_dtype is not None):
                        value = Float32(bias[column])
                        offsets[v + c] = value
                        offsets[v + c + 2] = value
                    if cutlass.const_expr(self.column_scaled):
                        scale = scales[column]
                        columns[v + c] = scale
                        columns[v + c + 2] = scale
            for block in cutlass.range_constexpr(blocks):
                values = cute.make_rmem_tensor(per_buffer, Float32)
                for v in cutlass.range_constexpr(per_buffer):
                    values[v] = acc[block * per_block + step * per_buffer + v] * factors[v // 2 % 2, block]
                result = values.load()
                if cutlass.const_expr(self.column_scaled):
                    result = result * columns.load()
                if cutlass.const_expr(self.bias_dtype is not None):
                    result = result + offsets.load()
                result = activate(result, self.activation)
                buffer = (step * blocks + block) % self.buffers
                source = cute.make_rmem_tensor(targets[(None, None, None, 0)].shape, self.out_dtype)
                converted = cute.make_rmem_tensor(per_buffer, self.out_dtype)
                converted.store(result.to(self.out_dtype))
                for v in cutlass.range_constexpr(per_buffer):
                    source[v] = converted[v]
                if issuer:
                    cute.arch.cp_async_bulk_wait_group(self.buffers - 1, read=True)
                cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                cute.copy(tiled_copy, source, targets[(None, None, None, buffer)])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
                if issuer:
                    cute.copy(atom, shared[(None, buffer)], glob[(None, row_tile + block, column_tile + step)])
                    cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self, thread: Int32):
        """Before a warpgroup ends: its buffers must have been read."""
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
