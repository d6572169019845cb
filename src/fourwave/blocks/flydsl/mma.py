"""Number formats and the matrix instructions that take them.

A wave computes its part of the output as 16 x 16 results over K slices of 32. The N operand is the instruction's first
one, so a result is transposed: lane l holds out[m = l % 16, n = 4 * (l // 16) + i], i = 0..3, four neighbours of one
output row.

Fragment of either operand, 16-bit formats: lane l holds row l % 16, k = 8 * (l // 16) + 0..7 of the slice.
  gfx950  v_mfma_f32_16x16x32: exactly its operand layout (AMD CDNA4 ISA guide, matrix instructions)
  gfx942  two v_mfma_f32_16x16x16: the first takes elements 0..3 of every lane, the second 4..7. Each instruction then
          sums k = 8 * g + 0..3 (or 4..7), g = 0..3; both operands agree, so all 32 are summed
          (AMD CDNA3 ISA guide; AMD matrix instruction calculator).
"""

from dataclasses import dataclass

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import vector_type
from fourwave.blocks.flydsl.tiles import MMA_M, SLICE_K, WAVE

ACC_PER_LANE = 4  # float32 values of one 16 x 16 result per lane


@dataclass(frozen=True)
class OperandFormat:
    """What loaders and the MMA driver need to know of an operand's number format."""

    name: str
    dtype: type  # FlyDSL element type
    mma: dict  # arch -> (rocdl op name, instructions per slice)

    @property
    def elem_bytes(self):
        return self.dtype.width // 8

    @property
    def fragment_elems(self):
        """Elements of one fragment per lane."""
        return MMA_M * SLICE_K // WAVE


FORMATS = {
    "bf16": OperandFormat(
        "bf16", fx.BFloat16, {"gfx950": ("mfma_f32_16x16x32_bf16_", 1), "gfx942": ("mfma_f32_16x16x16bf16_1k_", 2)}
    ),
    "fp16": OperandFormat(
        "fp16", fx.Float16, {"gfx950": ("mfma_f32_16x16x32_f16_", 1), "gfx942": ("mfma_f32_16x16x16f16_", 2)}
    ),
}


class WaveMma:
    """acc[i][j] += fragments a[i] (rows of M), b[j] (rows of N) of one K slice; acc is a flat list, j fastest."""

    def __init__(self, fmt, arch, frags_m, frags_n):
        self.fmt, self.frags_m, self.frags_n = fmt, frags_m, frags_n
        op, self.parts = fmt.mma[arch]
        self._op = getattr(_rocdl, op)

    @property
    def instructions(self):
        """Matrix instructions per slice."""
        return self.frags_m * self.frags_n * self.parts

    def zero(self):
        return [fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32) for _ in range(self.frags_m * self.frags_n)]

    def step(self, a, b, acc):
        """The fragments b[j] are finished with one by one, which frees their registers for those of the next slice."""
        out = list(acc)
        for j in range(self.frags_n):
            for part in range(self.parts):
                for i in range(self.frags_m):
                    index = i * self.frags_n + j
                    out[index] = self._mfma(self._part(b[j], part), self._part(a[i], part), out[index])
        return out

    def _part(self, fragment, part):
        if self.parts == 1:
            return fragment
        size = self.fmt.fragment_elems // self.parts
        return fragment.shuffle(fragment, list(range(part * size, (part + 1) * size)))

    @dsl_loc_tracing
    def _mfma(self, first, second, acc):
        first, second = self._operand(first), self._operand(second)
        plain = ir.Attribute.parse("#rocdl<mfma_perm_b none>")
        result = self._op(vector_type(ACC_PER_LANE, fx.Float32), first, second, as_ir_value(acc), 0, 0, plain)
        return fx.Vector(result)

    def _operand(self, fragment):
        # The bf16 form with K = 16 is declared on 16-bit integers.
        if self.parts == 2 and self.fmt.name == "bf16":
            fragment = fragment.bitcast(fx.Int16)
        return as_ir_value(fragment)
