"""out[t, c] = sum over j of weight[t, j] * rows[place[t, j], c] for Hopper, in float32 and in the order of j, rounded once.

rows    [M, C] float32, bfloat16 or float16, inner stride 1
place   [T, top_k] int64, weight [T, top_k] float32, both contiguous
out     [T, C], contiguous

A thread has 16 bytes of a token's row, all of whose sources are loaded before they are added: top_k loads in flight. A CTA of 256 threads
has 256 such chunks of one token. Products and sums are rounded apart, no fused multiplication and addition.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute

from fourwave.blocks.cutedsl import access
from fourwave.blocks.cutedsl.access import assembly
from fourwave.blocks.cutedsl.convert import float_of_half, product

THREADS = 256
CHUNK = 16  # bytes of a thread


@dataclass(frozen=True)
class Combine:
    """One specialisation: __call__ is the launcher, kernel the device code.

    dtype   "float32", "bfloat16" or "float16"
    top_k   rows of a token
    whole_chunks  rows and their starts, and out's, are multiples of 16 bytes: else a thread has one element
    """

    dtype: str
    top_k: int
    whole_chunks: bool

    @property
    def element_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def elements(self) -> int:
        """Of a thread."""
        return CHUNK // self.element_bytes if self.whole_chunks else 1

    @cute.jit
    def __call__(
        self, rows: Int64, row_stride: Int64, places: Int64, weights: Int64, out: Int64, T: Int32, C: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        """Addresses; row_stride in bytes."""
        per_cta = THREADS * self.elements
        self.kernel(rows, row_stride, places, weights, out, C).launch(
            grid=(T * ((C + per_cta - 1) // per_cta), 1, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(self, rows: Int64, row_stride: Int64, places: Int64, weights: Int64, out: Int64, C: Int32):
        per_cta = THREADS * self.elements
        parts = (C + per_cta - 1) // per_cta
        cta = cute.arch.block_idx()[0]
        token = cta // parts
        column = ((cta - token * parts) * THREADS + cute.arch.thread_idx()[0]) * self.elements
        self.body(rows, row_stride, places, weights, out, C, token, column)

    # -- Python that runs while the kernel is traced

    def body(self, rows, row_stride, places, weights, out, C, token, column):
        first = Int64(token) * self.top_k
        one, limit = Int32(0), Int32(1)  # always
        loaded, factors = [], []
        for j in range(self.top_k):
            place = access.load_words(places + (first + j) * 8, 1, one, limit)[0]
            factors.append(access.load_words(weights + (first + j) * 4, 1, one, limit)[0])
            address = rows + Int64(place) * row_stride + Int64(column) * self.element_bytes
            loaded.append(self.load(address, column, C))
        total = [product(value, factors[0]) for value in loaded[0]]
        for values, factor in zip(loaded[1:], factors[1:], strict=True):
            total = [_sum(part, product(value, factor)) for part, value in zip(total, values, strict=True)]
        self.store(out + (Int64(token) * C + column) * self.element_bytes, total, column, C)

    def load(self, address, column, C):
        """The thread's elements as float32; zeros past the row."""
        if self.element_bytes == 4:
            return access.load_words(address, self.elements, column, C)
        if self.elements == 1:
            words = [access.load_half(address, column, C)]
            return [float_of_half(words[0], False, self.dtype == "float16")]
        words = access.load_words(address, 4, column, C)
        return [float_of_half(word, high, self.dtype == "float16") for word in words for high in (False, True)]

    def store(self, address, values, column, C):
        if self.element_bytes == 4:
            access.store_words(address, values, column, C)
            return
        kind = "f16x2" if self.dtype == "float16" else "bf16x2"
        pack = f"{{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.{kind}.f32 $0, b, a; }}"
        if self.elements == 1:
            word = assembly(pack, "=r,r,r", [values[0], values[0]])
            access.store_byte(address, word, column, C)
            access.store_byte(address + 1, word >> 8, column, C)
            return
        words = [assembly(pack, "=r,r,r", values[j : j + 2]) for j in range(0, self.elements, 2)]
        access.store_words(address, words, column, C)


def _sum(a, b):
    text = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; add.rn.f32 a, a, b; mov.b32 $0, a; }"
    return assembly(text, "=r,r,r", [a, b])
