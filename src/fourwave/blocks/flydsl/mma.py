"""Number formats and the matrix instructions that take them.

A wave computes its part of the output as 16 x 16 results over slices of K. The N operand is the instruction's first
one, so a result is transposed: lane l holds out[m = l % 16, n = 4 * (l // 16) + i], i = 0..3, four neighbours of one
output row.

Fragment of either operand, 16-bit formats: lane l holds row l % 16, k = 8 * (l // 16) + 0..7 of the slice.
  gfx950  v_mfma_f32_16x16x32: exactly its operand layout (AMD CDNA4 ISA guide, matrix instructions)
  gfx942  two v_mfma_f32_16x16x16: the first takes elements 0..3 of every lane, the second 4..7. Each instruction then
          sums k = 8 * g + 0..3 (or 4..7), g = 0..3; both operands agree, so all 32 are summed
          (AMD CDNA3 ISA guide; AMD matrix instruction calculator).

32-bit floats, slices of 16: lane l holds row l % 16, k = 4 * (l // 16) + 0..3; four v_mfma_f32_16x16x4_f32 (row l % 16,
k = l // 16) take one element of every lane each. Products and sums are float32, no xf32 (AMD CDNA3 and CDNA4 ISA guides).

8-bit floats, slices of 128 and 64; registers hold them as 32-bit words:
  gfx950  v_mfma_f32_16x16x128_f8f6f4: row l % 16, k = 16 * (l // 16) + 0..15 and 64 more. OCP codes
          v_mfma_scale_f32_16x16x128_f8f6f4: the same, and the scale of row l % 16 and k = 32 * (l // 16) + 0..31 is a byte
          (which: op_sel) of a register of lane l: not the k of the lane's own elements (AMD CDNA4 ISA guide; confirmed by
          Triton's kernels, tests/sim/test_matrix_triton.py)
          packed e2m1: k = 32 * (l // 16) + 0..31, in any mix with the others
  gfx942  two v_mfma_f32_16x16x32: row l % 16, k = 16 * (l // 16) + 0..15; the first takes bytes 0..7 of every lane, the
          second 8..15, on both sides. fnuz codes
"""

from dataclasses import dataclass

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl as _rocdl
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

from fourwave.blocks.flydsl.memory import vector_type

E8M0_ONE = 127  # the code of 1
ACC_PER_LANE = 4  # float32 values of one 16 x 16 result per lane


@dataclass(frozen=True)
class OperandFormat:
    """What loaders and the MMA driver need to know of the operands' number formats."""

    name: str
    dtype: type  # FlyDSL element type that registers hold
    mma: dict  # arch -> (rocdl op name, instructions per slice)
    elem_bytes: int = 2
    one: int = 0  # the code of 1 as the instruction's first operand
    f8f6f4: tuple = ()  # formats of the instruction's first and second operand, where the opcode does not name them
    packed: tuple = (False, False)  # a, b: two codes of 4 bits in a byte

    def fragment_elems(self, fragment_bytes):
        """Elements of dtype that fragment_bytes hold."""
        return fragment_bytes * 8 // self.dtype.width


def _float8(a, b, arch):
    """a, b: "e4m3" or "e5m2". b is the instruction's first operand."""
    if arch == "gfx950":
        mma, f8f6f4 = ("mfma_scale_f32_16x16x128_f8f6f4_", 1), (f"fp8_{b}", f"fp8_{a}")
    else:
        old = {"e4m3": "fp8", "e5m2": "bf8"}
        mma, f8f6f4 = (f"mfma_f32_16x16x32_{old[b]}_{old[a]}_", 2), ()
    one = {"e4m3": 0x38, "e5m2": 0x3C}[b] + (0 if arch == "gfx950" else 8 if b == "e4m3" else 4)  # fnuz: one bias more
    return OperandFormat(f"{a} x {b}", fx.Int32, {arch: mma}, 1, one, f8f6f4)


def _float4(a, b):
    """a, b: "e4m3", "e5m2" or "e2m1", at least one of them the last."""
    spelled = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "e2m1": "fp4_e2m1"}
    one = {"e4m3": 0x38, "e5m2": 0x3C, "e2m1": 0x22}[b]
    op = ("mfma_scale_f32_16x16x128_f8f6f4_", 1)
    return OperandFormat(
        f"{a} x {b}", fx.Int32, {"gfx950": op}, 1, one, (spelled[b], spelled[a]), (a == "e2m1", b == "e2m1")
    )


_BF16 = {"gfx950": ("mfma_f32_16x16x32_bf16_", 1), "gfx942": ("mfma_f32_16x16x16bf16_1k_", 2)}
_TORCH_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "uint8": "e2m1"}  # gfx950's codes

# By the types of a and b, named as torch names them.
FORMATS = {
    ("bfloat16", "bfloat16"): OperandFormat("bf16", fx.BFloat16, _BF16),
    # b becomes bfloat16 in registers (e2m1.Dequantizer).
    ("bfloat16", "uint8"): OperandFormat("bf16", fx.BFloat16, _BF16, packed=(False, True)),
    ("float16", "float16"): OperandFormat(
        "fp16", fx.Float16, {"gfx950": ("mfma_f32_16x16x32_f16_", 1), "gfx942": ("mfma_f32_16x16x16f16_", 2)}
    ),
    ("float32", "float32"): OperandFormat(
        "fp32", fx.Float32, dict.fromkeys(("gfx950", "gfx942"), ("mfma_f32_16x16x4f32_", 4)), 4
    ),
    **{
        (f"float8_{a}{codes[a]}", f"float8_{b}{codes[b]}"): _float8(a, b, arch)
        for arch, codes in (
            ("gfx950", {"e4m3": "fn", "e5m2": ""}),
            ("gfx942", {"e4m3": "fnuz", "e5m2": "fnuz"}),
        )
        for a in codes
        for b in codes
    },
    **{
        (a, b): _float4(_TORCH_NAMES[a], _TORCH_NAMES[b])
        for a in _TORCH_NAMES
        for b in _TORCH_NAMES
        if "uint8" in (a, b)
    },
}


class WaveMma:
    """acc[i][j] += fragments a[i] (rows of M), b[j] (rows of N) of one K slice; acc is a flat list, j fastest.

    row_sums: None, or (parts, part): behind these come frags_m / parts more results, the sums over K of the rows of a's
    fragments part * frags_m / parts on: their products with ones, so that every column is the same. Waves with the same
    rows share the work; part (Int32) is uniform.
    """

    def __init__(self, fmt, arch, frags_m, frags_n, row_sums=None):
        self.fmt, self.frags_m, self.frags_n = fmt, frags_m, frags_n
        self.sums, self.sums_part = 0, None
        if row_sums is not None:
            parts, part = row_sums
            self.sums = frags_m // parts
            self.sums_part = part if parts > 1 else None
        op, self.parts = fmt.mma[arch]
        self._op = getattr(_rocdl, op)

    @property
    def instructions(self):
        """Matrix instructions per slice."""
        return self.results * self.parts

    @property
    def results(self):
        """Accumulators, ACC_PER_LANE registers each."""
        return self.frags_m * self.frags_n + self.sums

    def zero(self):
        return [fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32) for _ in range(self.results)]

    def step(self, a, b, acc, scales_a=(), scales_b=(), byte=0):
        """The fragments b[j] are finished with one by one, which frees their registers for those of the next slice.

        scales_*: none, or for each fragment an Int32 of which a byte is, in lane l, the e8m0 scale of row l % 16 and the block of
        32 k number l // 16 of the slice.
        """
        out = list(acc)
        for j in range(self.frags_n):
            for part in range(self.parts):
                for i in range(self.frags_m):
                    index = i * self.frags_n + j
                    scales = (scales_b[j][0], scales_a[i][0]) if scales_a else ()
                    out[index] = self._mfma(self._part(b[j], part), self._part(a[i], part), out[index], scales, byte)
        for i in range(self.sums):
            index = self.frags_m * self.frags_n + i
            out[index] = self._sum(a, i, out[index], scales_a, byte)
        return out

    def add_scaled(self, products, acc, row_scales, column_scale, block):
        """acc[i][j] + products[i][j] * (row_scales[i] * column_scale); scales: element `block` of Float32 Vectors."""
        of_column = column_scale[block]
        factors = [fx.Vector.filled(ACC_PER_LANE, scale[block] * of_column, fx.Float32) for scale in row_scales]
        return [
            fx.Vector(fx.fma(product, factors[index // self.frags_n], old))
            for index, (product, old) in enumerate(zip(products, acc, strict=True))
        ]

    def fold(self, a, b, acc, row_scales, column_scale, k_slice):
        """acc += (a[i] @ b[j]) * (row_scales[i] * column_scale), slices of 128 k of 8-bit operands on gfx950; scales: element
        `k_slice` of Vectors. One product at a time: all of them would need as many registers again as acc."""
        assert self.parts == 1
        zero = fx.Vector.filled(ACC_PER_LANE, 0.0, fx.Float32)
        of_column = column_scale[k_slice]
        factors = [fx.Vector.filled(ACC_PER_LANE, scale[k_slice] * of_column, fx.Float32) for scale in row_scales]
        out = list(acc)
        for j in range(self.frags_n):
            for i in range(self.frags_m):
                index = i * self.frags_n + j
                out[index] = fx.Vector(fx.fma(self._mfma(b[j], a[i], zero), factors[i], out[index]))
        return out

    def _sum(self, a, i, acc, scales_a, byte):
        def chosen(values):
            return (
                values[i] if self.sums_part is None else (self.sums_part == 0).select(values[i], values[i + self.sums])
            )

        fragment = chosen(a)
        ones = self._ones(fragment.numel)
        scales = (E8M0_ONE * 0x01010101, chosen(scales_a)[0]) if scales_a else ()
        for part in range(self.parts):
            acc = self._mfma(self._part(ones, part), self._part(fragment, part), acc, scales, byte)
        return acc

    def _ones(self, elems):
        if self.fmt.elem_bytes == 1:
            packed_a, packed_b = self.fmt.packed
            elems = elems * (2 if packed_a else 1) // (2 if packed_b else 1)
            return fx.Vector.filled(elems, self.fmt.one * 0x01010101, fx.Int32)
        return fx.Vector.filled(elems, 1.0, self.fmt.dtype)

    def _part(self, fragment, part):
        if self.parts == 1:
            return fragment
        size = fragment.numel // self.parts
        return fragment.shuffle(fragment, list(range(part * size, (part + 1) * size)))

    @dsl_loc_tracing
    def _mfma(self, first, second, acc, scales=(), byte=0):
        first, second = self._operand(first), self._operand(second)
        if self.fmt.f8f6f4:
            formats = [ir.Attribute.parse(f"#rocdl<matrix_format {name}>") for name in self.fmt.f8f6f4]
            # Literal zeros for both scales are the unscaled instruction, not scales of 2**-127.
            scale_first, scale_second = (as_ir_value(fx.Int32(scale)) for scale in scales or (0, 0))
            result = self._op(
                vector_type(ACC_PER_LANE, fx.Float32), first, second, as_ir_value(acc), *formats,
                byte, scale_first, byte, scale_second,
            )  # fmt: skip
            return fx.Vector(result)
        plain = ir.Attribute.parse("#rocdl<mfma_perm_b none>")
        result = self._op(vector_type(ACC_PER_LANE, fx.Float32), first, second, as_ir_value(acc), 0, 0, plain)
        return fx.Vector(result)

    def _operand(self, fragment):
        # The bf16 form with K = 16 is declared on 16-bit integers.
        if self.parts == 2 and self.fmt.name == "bf16":
            fragment = fragment.bitcast(fx.Int16)
        if self.fmt.elem_bytes == 4:
            return as_ir_value(fragment[0])
        if self.parts == 2 and self.fmt.elem_bytes == 1:
            return as_ir_value(fragment.bitcast(fx.Int64)[0])
        return as_ir_value(fragment)
