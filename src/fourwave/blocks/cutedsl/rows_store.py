"""The way out of a tile whose last rows may belong to another group: through shared memory, by ordinary stores of 16 bytes, each
row only if it is the group's own."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fourwave.blocks.cutedsl.mma import WARPGROUP

ROWS = 64  # that a warpgroup stores
CHUNK_BYTES = 128  # of a row, at a time
PITCH_BYTES = CHUNK_BYTES + 16  # eight rows, four lanes each, then write to 32 banks


@dataclass(frozen=True)
class RowsStore:
    """out = acc * row factor * column scale + bias (+ out), in float32, rounded once.

    vector      N, the rows of out and their starts are multiples of 16 bytes
    accumulate  add to what out holds; then float32 goes through shared memory
    """

    out_dtype: type
    bias_dtype: type | None
    column_scaled: bool
    vector: bool
    accumulate: bool = False

    @property
    def buffered(self) -> type:
        """Type of the elements in shared memory."""
        return Float32 if self.accumulate else self.out_dtype

    @property
    def columns(self) -> int:
        """Of a chunk."""
        return CHUNK_BYTES * 8 // self.buffered.width

    @property
    def pitch(self) -> int:
        return PITCH_BYTES * 8 // self.buffered.width

    @property
    def elements(self) -> int:
        """Of a warpgroup's buffer."""
        return ROWS * self.pitch

    @cute.jit
    def store(
        self, acc: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr, buffer: cute.Pointer, out: cute.Pointer,
        stride: Int64, row0: Int32, end: Int32, n0: Int32, N: Int32, factors: cute.Tensor, scales: cute.Pointer,
        bias: cute.Pointer, thread: Int32, barrier: Int32,
    ):  # fmt: skip
        """acc[first ... first + count - 1]: a thread's values of 64 rows, in wgmma's order. factors [2]: of its two rows.

        end: the row past the group's last; thread: in the warpgroup; barrier: a named one of the warpgroup's own.
        """
        lane = thread % 32
        per_chunk = ROWS * self.columns // WARPGROUP
        wide = 128 // self.buffered.width  # elements of a store
        target = buffer + ((thread // 32 * 16 + lane // 4) * self.pitch + lane % 4 * 2)
        per_row = self.columns // wide  # threads
        source = buffer + (thread // per_row * self.pitch + thread % per_row * wide)
        for step in cutlass.range_constexpr(count * WARPGROUP // ROWS // self.columns):
            column = n0 + step * self.columns + lane % 4 * 2
            pairs = []
            for v in cutlass.range_constexpr(0, per_chunk, 2):
                values = cute.make_rmem_tensor(2, Float32)
                for c in cutlass.range_constexpr(2):
                    value = acc[first + step * per_chunk + v + c] * factors[v // 2 % 2]
                    n = cutlass.min(column + v // 4 * 8 + c, N - 1)
                    if cutlass.const_expr(self.column_scaled):
                        value = value * scales[n]
                    if cutlass.const_expr(self.bias_dtype is not None):
                        value = value + Float32(bias[n])
                    values[c] = value
                pair = cute.make_rmem_tensor(2, self.buffered)
                pair.store(values.load().to(self.buffered))
                pairs.append(pair)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            for v in cutlass.range_constexpr(0, per_chunk, 2):
                place = target + (v // 2 % 2 * 8 * self.pitch + v // 4 * 8)
                cute.autovec_copy(
                    pairs[v // 2], cute.make_tensor(place.align(self.buffered.width // 4), cute.make_layout(2))
                )
            cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
            n = n0 + step * self.columns + thread % per_row * wide
            for i in cutlass.range_constexpr(ROWS * per_row // WARPGROUP):
                row = row0 + thread // per_row + i * (WARPGROUP // per_row)
                if row < end:
                    words = cute.make_rmem_tensor(wide, self.buffered)
                    at = (source + i * (WARPGROUP // per_row) * self.pitch).align(16)
                    cute.autovec_copy(cute.make_tensor(at, cute.make_layout(wide)), words)
                    at_out = out + (row * stride + n)
                    if cutlass.const_expr(self.vector):
                        if n < N:
                            aligned = at_out.align(wide * self.out_dtype.width // 8)
                            self.write(words, cute.make_tensor(aligned, cute.make_layout(wide)))
                    else:
                        for c in cutlass.range_constexpr(wide):
                            if n + c < N:
                                if cutlass.const_expr(self.accumulate):
                                    at_out[c] = self.out_dtype(words[c] + Float32(at_out[c]))
                                else:
                                    at_out[c] = words[c]

    @cute.jit
    def write(self, words: cute.Tensor, target: cute.Tensor):
        if cutlass.const_expr(self.accumulate):
            addend = cute.make_rmem_tensor(cute.size(words), self.out_dtype)
            cute.autovec_copy(target, addend)
            result = cute.make_rmem_tensor(cute.size(words), self.out_dtype)
            result.store((words.load() + addend.load().to(Float32)).to(self.out_dtype))
            cute.autovec_copy(result, target)
        else:
            cute.autovec_copy(words, target)
