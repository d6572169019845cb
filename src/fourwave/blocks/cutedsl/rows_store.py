"""The way out of a tile whose last rows may belong to another group: from registers, each row only if it is the group's own.

Four neighbouring lanes hold the same rows, of each 8 columns two apiece. Of float32 two columns are 8 bytes, and four lanes fill a
sector. Of a 16-bit type a warp passes its 16 rows through shared memory, after which a lane has 8 columns of a row, 16 bytes.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64  # that a warpgroup stores
UNIT = 16  # columns that a warp's lanes store at a time: one stmatrix


def _asm(operands, code: str, constraints: str, loc, ip) -> None:
    llvm.inline_asm(
        None,
        [operand if not hasattr(operand, "ir_value") else operand.ir_value(loc=loc, ip=ip) for operand in operands],
        code,
        constraints + ",~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def _store_matrices(target: cute.Pointer, words: cute.Tensor, *, loc=None, ip=None) -> None:
    """Four matrices of 8 x 8 two-byte elements to shared memory (stmatrix): lane l has the address of row l % 8 of matrix l // 8."""
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};"
    _asm([target.to_llvm_ptr(loc=loc, ip=ip), *[Int32(words[i]) for i in range(4)]], code, "r,r,r,r,r", loc, ip)


@dsl_user_op
def _store_words(target: cute.Pointer, words: list, where: Boolean, *, loc=None, ip=None) -> None:
    """16 bytes to global memory, `where`: as a predicate, no branch."""
    code = "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p st.global.v4.b32 [$0], {$1, $2, $3, $4}; }"
    _asm(
        [target.to_llvm_ptr(loc=loc, ip=ip), *[Int32(word) for word in words], Int32(where)],
        code,
        "l,r,r,r,r,r",
        loc,
        ip,
    )


@dsl_user_op
def _store_pair(target: cute.Pointer, pair: list, where: Boolean, add: bool, *, loc=None, ip=None) -> None:
    """Two float32 to global memory, or added there by L2 (red: rounded once, what is subnormal becomes zero), `where`."""
    what = "red.relaxed.gpu.global.add.v2.f32" if add else "st.global.v2.f32"
    code = "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p " + what + " [$0], {$1, $2}; }"
    _asm(
        [target.to_llvm_ptr(loc=loc, ip=ip), *[Float32(value) for value in pair], Int32(where)],
        code,
        "l,f,f,r",
        loc,
        ip,
    )


@dataclass(frozen=True)
class RowsStore:
    """out = acc * row factor * column scale + bias (+ out), in float32, rounded once.

    vector      N, the rows of out and their starts are multiples of 16 bytes
    accumulate  add to what out holds
    columns     of 16 rows that a warp passes through shared memory at a time, a multiple of UNIT
    """

    out_dtype: type
    bias_dtype: type | None
    column_scaled: bool
    vector: bool
    accumulate: bool = False
    columns: int = 64

    @property
    def shared(self) -> bool:
        return self.vector and self.out_dtype.width == 16

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
        width = count * WARPGROUP // ROWS
        for unit in cutlass.range_constexpr(width // UNIT):
            column = n0 + unit * UNIT
            words = cute.make_rmem_tensor(4, Int32)
            for half in cutlass.range_constexpr(2):
                m = row + 8 * half
                place = out + (m * stride + column)
                values = cute.make_rmem_tensor(4, Float32)
                for v in cutlass.range_constexpr(4):
                    value = acc[first + unit * 8 + v // 2 * 4 + half * 2 + v % 2] * factors[half]
                    n = cutlass.min(column + v // 2 * 8 + lane % 4 * 2 + v % 2, N - 1)
                    if cutlass.const_expr(self.column_scaled):
                        value = value * scales[n]
                    if cutlass.const_expr(self.bias_dtype is not None):
                        value = value + Float32(bias[n])
                    values[v] = value
                if cutlass.const_expr(not self.vector):
                    for v in cutlass.range_constexpr(4):
                        at = v // 2 * 8 + lane % 4 * 2 + v % 2
                        if (m < end) & (column + at < N):
                            if cutlass.const_expr(self.accumulate):
                                values[v] = values[v] + Float32(place[at])
                            place[at] = self.out_dtype(values[v])
                elif cutlass.const_expr(not self.shared):
                    for pair in cutlass.range_constexpr(2):
                        at = pair * 8 + lane % 4 * 2
                        two = [values[2 * pair], values[2 * pair + 1]]
                        _store_pair((place + at).align(8), two, (m < end) & (column + at < N), self.accumulate)
                else:
                    if cutlass.const_expr(self.accumulate):
                        for pair in cutlass.range_constexpr(2):
                            at = pair * 8 + lane % 4 * 2
                            if (m < end) & (column + at < N):
                                addend = cute.make_rmem_tensor(2, self.out_dtype)
                                cute.autovec_copy(self.pair(place, at), addend)
                                for c in cutlass.range_constexpr(2):
                                    values[2 * pair + c] = values[2 * pair + c] + Float32(addend[c])
                    result = cute.make_rmem_tensor(4, self.out_dtype)
                    result.store(values.load().to(self.out_dtype))
                    two_words = cute.recast_tensor(result, Int32)
                    words[half], words[2 + half] = two_words[0], two_words[1]
            if cutlass.const_expr(self.shared):
                at = unit * UNIT % self.columns
                if cutlass.const_expr(at == 0):
                    cute.arch.sync_warp()  # what was there has been read
                _store_matrices(buffer + ((lane // 8 % 2 * 8 + lane % 8) * self.pitch + (at + lane // 16 * 8)), words)
                if cutlass.const_expr(at + UNIT == self.columns or (unit + 1) * UNIT == width):
                    cute.arch.sync_warp()
                    self.flush(buffer, at + UNIT, out, stride, row0 + thread // 32 * 16, end, column - at, N, lane)

    @cute.jit
    def flush(
        self, buffer: cute.Pointer, columns: cutlass.Constexpr, out: cute.Pointer, stride: Int64, row: Int32, end: Int32,
        n0: Int32, N: Int32, lane: Int32,
    ):  # fmt: skip
        """The first `columns` columns of a warp's buffer go out, to rows from `row` and columns from n0 on."""
        per_row = columns // 8  # lanes
        steps = 16 * per_row // 32
        words = cute.make_rmem_tensor(4 * steps, Int32)
        for i in cutlass.range_constexpr(steps):  # all are read before the first is stored: one wait for shared memory
            m, n = (lane + 32 * i) // per_row, (lane + 32 * i) % per_row * 8
            shared = cute.recast_ptr((buffer + (m * self.pitch + n)).align(16), dtype=Int32)
            four = cute.make_tensor(words.iterator + 4 * i, cute.make_layout(4))
            cute.autovec_copy(cute.make_tensor(shared, cute.make_layout(4)), four)
        for i in cutlass.range_constexpr(steps):
            m, n = row + (lane + 32 * i) // per_row, n0 + (lane + 32 * i) % per_row * 8
            target = cute.recast_ptr((out + (m * stride + n)).align(16), dtype=Int32)
            _store_words(target, [words[4 * i + j] for j in range(4)], (m < end) & (n < N))

    def pair(self, place, at):
        """Two neighbouring elements in memory."""
        return cute.make_tensor((place + at).align(self.out_dtype.width // 4), cute.make_layout(2))
