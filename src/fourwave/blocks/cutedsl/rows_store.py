"""The way out of a tile whose last rows may belong to another group: from registers, each row only if it is the group's own.

Four neighbouring lanes hold the same rows, of each 8 columns two apiece. Of a 16-bit type they exchange what they have of 32
columns, after which each has 8 in a row, 16 bytes; of float32 two columns are 8 bytes already, and four lanes fill a sector.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64  # that a warpgroup stores
GROUP = 32  # columns that four lanes exchange


@cute.jit
def _exchange(words: cute.Tensor, quarter: Int32):
    """words [4] of four lanes, a 4 x 4 matrix, transposed; quarter: the lane's number among the four."""
    for bit in cutlass.range_constexpr(2):
        step = 1 << bit
        upper = (quarter & step) != 0
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                low, high = words[i], words[i + step]
                sent = cutlass.select_(upper, low, high)
                got = cute.arch.shuffle_sync_bfly(sent, step)
                words[i] = cutlass.select_(upper, got, low)
                words[i + step] = cutlass.select_(upper, high, got)


@dataclass(frozen=True)
class RowsStore:
    """out = acc * row factor * column scale + bias (+ out), in float32, rounded once.

    vector      N, the rows of out and their starts are multiples of 16 bytes
    accumulate  add to what out holds
    """

    out_dtype: type
    bias_dtype: type | None
    column_scaled: bool
    vector: bool
    accumulate: bool = False

    @cute.jit
    def store(
        self, acc: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr, out: cute.Pointer, stride: Int64,
        row0: Int32, end: Int32, n0: Int32, N: Int32, factors: cute.Tensor, scales: cute.Pointer, bias: cute.Pointer,
        thread: Int32,
    ):  # fmt: skip
        """acc[first ... first + count - 1]: a thread's values of 64 rows, in wgmma's order. factors [2]: of its two rows.

        end: the row past the group's last; thread: in the warpgroup.
        """
        lane = thread % 32
        row = row0 + thread // 32 * 16 + lane // 4
        for group in cutlass.range_constexpr(count * WARPGROUP // ROWS // GROUP):
            column = n0 + group * GROUP
            for half in cutlass.range_constexpr(2):
                m = row + 8 * half
                place = out + (m * stride + column)
                values = cute.make_rmem_tensor(8, Float32)
                for v in cutlass.range_constexpr(8):
                    value = acc[first + group * 16 + v // 2 * 4 + half * 2 + v % 2] * factors[half]
                    n = cutlass.min(column + v // 2 * 8 + lane % 4 * 2 + v % 2, N - 1)
                    if cutlass.const_expr(self.column_scaled):
                        value = value * scales[n]
                    if cutlass.const_expr(self.bias_dtype is not None):
                        value = value + Float32(bias[n])
                    values[v] = value
                if cutlass.const_expr(not self.vector):
                    for v in cutlass.range_constexpr(8):
                        at = v // 2 * 8 + lane % 4 * 2 + v % 2
                        if (m < end) & (column + at < N):
                            if cutlass.const_expr(self.accumulate):
                                values[v] = values[v] + Float32(place[at])
                            place[at] = self.out_dtype(values[v])
                else:
                    if cutlass.const_expr(self.accumulate):
                        for pair in cutlass.range_constexpr(4):
                            at = pair * 8 + lane % 4 * 2
                            if (m < end) & (column + at < N):
                                addend = cute.make_rmem_tensor(2, self.out_dtype)
                                cute.autovec_copy(self.pair(place, at), addend)
                                for c in cutlass.range_constexpr(2):
                                    values[2 * pair + c] = values[2 * pair + c] + Float32(addend[c])
                    result = cute.make_rmem_tensor(8, self.out_dtype)
                    result.store(values.load().to(self.out_dtype))
                    if cutlass.const_expr(self.out_dtype.width == 16):
                        words = cute.recast_tensor(result, Int32)
                        _exchange(words, lane % 4)
                        at = lane % 4 * 8
                        if (m < end) & (column + at < N):
                            target = cute.recast_ptr((place + at).align(16), dtype=Int32)
                            cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))
                    else:
                        for pair in cutlass.range_constexpr(4):
                            at = pair * 8 + lane % 4 * 2
                            if (m < end) & (column + at < N):
                                two = cute.make_rmem_tensor(2, self.out_dtype)
                                two[0], two[1] = result[2 * pair], result[2 * pair + 1]
                                cute.autovec_copy(two, self.pair(place, at))

    def pair(self, place, at):
        """Two neighbouring elements in memory."""
        return cute.make_tensor((place + at).align(self.out_dtype.width // 4), cute.make_layout(2))
