"""Products of one warp out of registers: mma.m16n8k16 in bfloat16, and its second operand out of swizzled shared memory.

Source  PTX ISA 8.x: mma.sync, ldmatrix.
"""

from cutlass import Float32, Int32, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fourwave.blocks.cutedsl.access import assembly

K = 16
TOKENS = 8  # columns of a product
LINE_BYTES = 128  # 64 k of a row of the second operand


@dsl_user_op
def multiply(acc: list, a: list, b: list, *, loc=None, ip=None) -> list:
    """acc + a @ b.T, acc and the result four Float32: rows g and g + 8, of each columns 2 * c and 2 * c + 1 (lane = 4 * g + c).

    a, b  four and two Int32
    """
    kind = llvm.StructType.get_literal([Float32.mlir_type] * 4)
    made = llvm.inline_asm(
        kind,
        [each.ir_value(loc=loc, ip=ip) for each in (*a, *b, *acc)],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, made, [i], loc=loc, ip=ip)) for i in range(4)]


def load_tokens(base: Int32, lane: Int32) -> list[Int32]:
    """The second operand for 64 k of 8 rows, two registers for each 16 k: LINE_BYTES a row, chunks of 16 as TMA's 128-byte swizzle
    puts them (number xor row), base a multiple of 1024."""
    text = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
    row = base + lane % 8 * LINE_BYTES
    chunk = lane // 8 ^ lane % 8
    halves = (assembly(text, "=r,=r,=r,=r,r", [row + (chunk ^ 4 * half) * 16], 4, True) for half in range(2))
    return [register for half in halves for register in half]


def write_sums(acc: cute.Tensor, column: int, columns: int, partial: cute.Pointer, pitch: int, lane: Int32) -> None:
    """Sums [16-row block, 8 tokens, value] of a warp, those of `columns` times 8 tokens from `column` on, to partial[token, row]."""
    target = partial + (lane // 4 + 2 * (lane % 4) * pitch)
    values = cute.make_tensor(target, cute.make_layout(TOKENS * columns * pitch))
    for block in range(cute.size(acc, mode=[0])):
        for each in range(columns):
            for v in range(4):
                values[(TOKENS * each + v % 2) * pitch + 16 * block + 8 * (v // 2)] = acc[block, column + each, v]
