"""The way out of a tile whose last rows may belong to another group: from registers, each row only if it is the group's own.

Four neighbouring lanes hold the same rows, of each 8 columns two apiece. Of a 16-bit type they exchange what they have of 32
columns, after which each has 8 in a row, 16 bytes; of float32 two columns are 8 bytes already, and four lanes fill a sector.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

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


@dsl_user_op
def _store_matrices(target: cute.Pointer, words: cute.Tensor, *, loc=None, ip=None) -> None:
    """Four matrices of 8 x 8 two-byte elements to shared memory (stmatrix): lane l has the address of row l % 8 of matrix l // 8."""
    llvm.inline_asm(
        None,
        [target.to_llvm_ptr(loc=loc, ip=ip), *[Int32(words[i]).ir_value(loc=loc, ip=ip) for i in range(4)]],
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dataclass(frozen=True)
class RowsStore:
    """out = acc * row factor * column scale + bias (+ out), in float32, rounded once.

    vector      N, the rows of out and their starts are multiples of 16 bytes
    accumulate  add to what out holds
    columns     of 16 rows that a warp passes through shared memory at a time; 0: four lanes exchange
    """

    out_dtype: type
    bias_dtype: type | None
    column_scaled: bool
    vector: bool
    accumulate: bool = False
    columns: int = 0

    @property
    def shared(self) -> bool:
        return self.columns > 0 and self.vector and self.out_dtype.width == 16

    @property
    def pitch(self) -> int:
        """Of a warp's buffer; 16 bytes more than a row, so that 8 rows lie in 32 banks."""
        return self.columns + 8

    @property
    def elements(self) -> int:
        """Of a warp's buffer."""
        return 16 * self.pitch if self.shared else 8

    @cute.jit
    def store(
        self, acc: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr, out: cute.Pointer, stride: Int64,
        row0: Int32, end: Int32, n0: Int32, N: Int32, factors: cute.Tensor, scales: cute.Pointer, bias: cute.Pointer,
        thread: Int32, buffer: cute.Pointer,
    ):  # fmt: skip
        """acc[first ... first + count - 1]: a thread's values of 64 rows, in wgmma's order. factors [2]: of its two rows.

        end: the row past the group's last; thread: in the warpgroup; buffer: the warp's.
        """
        lane = thread % 32
        row = row0 + thread // 32 * 16 + lane // 4
        for group in cutlass.range_constexpr(count * WARPGROUP // ROWS // GROUP):
            column = n0 + group * GROUP
            halves = []
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
                    if cutlass.const_expr(self.shared):
                        halves.append(cute.recast_tensor(result, Int32))
                    elif cutlass.const_expr(self.out_dtype.width == 16):
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

            if cutlass.const_expr(self.shared):
                self.through_shared(
                    halves, buffer, group * GROUP % self.columns, out, stride, row0 + thread // 32 * 16, end, column + GROUP, N, lane
                )  # fmt: skip

    @cute.jit
    def through_shared(
        self, halves: cutlass.Constexpr, buffer: cute.Pointer, at: cutlass.Constexpr, out: cute.Pointer, stride: Int64, row: Int32,
        end: Int32, past: Int32, N: Int32, lane: Int32,
    ):  # fmt: skip
        """GROUP columns of a warp's 16 rows, from column `at` of its buffer on; when that is full, it goes out.

        halves: words [4] of rows 0 to 7 and of 8 to 15, of each 8 columns one; past: the column of out past them
        """
        if cutlass.const_expr(at == 0):
            cute.arch.sync_warp()  # what was there has been read
        for i in cutlass.range_constexpr(2):
            words = cute.make_rmem_tensor(4, Int32)
            for j in cutlass.range_constexpr(4):
                words[j] = halves[j % 2][2 * i + j // 2]
            place = (lane // 8 % 2 * 8 + lane % 8) * self.pitch + (at + 16 * i + lane // 16 * 8)
            _store_matrices(buffer + place, words)
        if cutlass.const_expr(at + GROUP == self.columns):
            cute.arch.sync_warp()
            per_row = self.columns // 8  # lanes
            m, n = row + lane // per_row, past - self.columns + lane % per_row * 8
            source = buffer + (lane // per_row * self.pitch + lane % per_row * 8)
            for i in cutlass.range_constexpr(16 * per_row // 32):
                step = 32 // per_row  # rows
                if (m + i * step < end) & (n < N):
                    words = cute.make_rmem_tensor(4, Int32)
                    shared = cute.recast_ptr((source + i * step * self.pitch).align(16), dtype=Int32)
                    cute.autovec_copy(cute.make_tensor(shared, cute.make_layout(4)), words)
                    target = cute.recast_ptr((out + ((m + i * step) * stride + n)).align(16), dtype=Int32)
                    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))

    def pair(self, place, at):
        """Two neighbouring elements in memory."""
        return cute.make_tensor((place + at).align(self.out_dtype.width // 4), cute.make_layout(2))
