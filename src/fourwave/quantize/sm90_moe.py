"""Quantization on the way through a mixture of experts: as sm90.Quantize, rowwise, of rows in another order, or of SwiGLU.

x  is what codes and scales are made of; it is never in memory:
rows    x[r] = source[rows[r]]: tokens on their way to their experts
swiglu  x[r, c] = silu(source[r, c]) * source[r, C + c] in float32, rounded to the source's type
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute
from cutlass.memory import SmemAllocator

from fourwave.blocks.cutedsl import access
from fourwave.blocks.cutedsl.access import assembly
from fourwave.quantize.sm90 import LINE, PARTS, THREADS, TILE, Quantize

ROWS, SWIGLU = "rows", "swiglu"
LOG2E = "0fBFB8AA3B"  # -log2(e)


@dataclass(frozen=True)
class QuantizeFrom(Quantize):
    """source: ROWS or SWIGLU. Codes are rowwise, scales those of blocks: one launch."""

    source: str = ROWS

    @cute.jit
    def __call__(  # type: ignore[override]
        self, x: Int64, x_stride: Int64, rows: Int64, data: Int64, scale: Int64, R: Int32, C: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        """Addresses; x_stride in bytes. rows: int64 numbers of x's rows. R, C: of the result."""
        self.kernel(x, x_stride, rows, data, scale, R, C).launch(
            grid=((R + TILE - 1) // TILE * ((C + TILE - 1) // TILE), 1, 1), block=(THREADS, 1, 1), stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(  # type: ignore[override]
        self, x: Int64, x_stride: Int64, rows: Int64, data: Int64, scale: Int64, R: Int32, C: Int32
    ):  # fmt: skip
        @cute.struct
        class Storage:
            amax: cute.struct.Align[cute.struct.MemRange[Int32, 2 * PARTS * TILE], 16]
            inverse: cute.struct.Align[cute.struct.MemRange[Int32, 2 * PARTS * TILE], 16]
            warps: cute.struct.MemRange[Int32, THREADS // 32]

        storage = SmemAllocator().allocate(Storage)
        none = Int64(0)
        self.body(
            storage.amax.data_ptr(), storage.inverse.data_ptr(), storage.warps.data_ptr(), (x, rows), x_stride, data, scale, none,
            none, none, none, R, C,
        )  # fmt: skip

    # -- Python that runs while the kernel is traced

    def load(self, x, x_stride, place, R, C):
        source, rows = x
        if self.source == SWIGLU:
            gates = super().load(source, x_stride, place, R, C)
            ups = super().load(source + Int64(C) * self.x_bytes, x_stride, place, R, C)
            return [self.products(gate, up) for gate, up in zip(gates, ups, strict=True)]
        numbers = [access.load_words(rows + Int64(place.row + i) * 8, 1, place.row + i, R)[0] for i in range(LINE)]
        start = source + Int64(place.column) * self.x_bytes
        return [self.load_line(place.row + i, start + Int64(numbers[i]) * x_stride, place, R, C) for i in range(LINE)]

    def products(self, gates, ups):
        """Words of silu(gate) * up."""
        if self.x_bytes == 4:
            return [_silu_times(gate, up) for gate, up in zip(gates, ups, strict=True)]
        values = [_silu_times(gate, up) for gate, up in zip(self._floats(gates), self._floats(ups), strict=True)]
        kind = "f16x2" if self.x_dtype == "float16" else "bf16x2"
        text = f"{{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.{kind}.f32 $0, b, a; }}"
        return [assembly(text, "=r,r,r", values[j : j + 2]) for j in range(0, LINE, 2)]


def _silu_times(gate, up):
    """gate / (1 + 2^(-gate * log2(e))) * up. Where the power overflows the quotient is 0."""
    text = (
        "{ .reg .f32 g, u, e; mov.b32 g, $1; mov.b32 u, $2; "
        f"mul.rn.f32 e, g, {LOG2E}; ex2.approx.f32 e, e; add.rn.f32 e, e, 0f3F800000; div.rn.f32 g, g, e; "
        "mul.rn.f32 g, g, u; mov.b32 $0, g; }"
    )
    return assembly(text, "=r,r,r", [gate, up])
