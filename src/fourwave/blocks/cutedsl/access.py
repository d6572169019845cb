"""Global memory by address, where a row's number says whether there is anything; 16-bit pairs; warp shuffles.

`row < limit` is the condition of every access: a limit of 0 switches it off. Nothing branches, so the loads of a thread are
all in flight together.
"""

import cutlass
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_WORDS = {1: ".b32", 2: ".v2.b32", 4: ".v4.b32"}


@dsl_user_op
def assembly(text, constraints, operands, results=1, effects=False, *, loc=None, ip=None):
    """PTX: `results` Int32, a list where there are several; constraints as LLVM writes them."""
    kind = None
    if results == 1:
        kind = T.i32()
    elif results > 1:
        kind = llvm.StructType.get_literal([T.i32()] * results)
    made = llvm.inline_asm(
        kind,
        [each.ir_value(loc=loc, ip=ip) for each in operands],
        text,
        constraints,
        has_side_effects=effects,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    if results == 1:
        return Int32(made)
    return [Int32(llvm.extractvalue(T.i32(), made, [i], loc=loc, ip=ip)) for i in range(results)]


def load_words(address: Int64, words, row: Int32, limit: Int32):
    """`words` (1, 2, 4) Int32 from an address that is a multiple of their size; zeros unless row < limit. Read only."""
    names = [f"${i}" for i in range(words)]
    target = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    text = (
        f"{{ .reg .pred p; setp.lt.s32 p, ${words + 1}, ${words + 2}; {zeros} "
        f"@p ld.global.nc{_WORDS[words]} {target}, [${words}]; }}"
    )
    made = assembly(text, ",".join(["=&r"] * words + ["l", "r", "r"]), [address, row, limit], words)
    return [made] if words == 1 else made


def load_half(address: Int64, row: Int32, limit: Int32):
    """16 bits in an Int32; zero unless row < limit."""
    text = "{ .reg .pred p; setp.lt.s32 p, $2, $3; mov.b32 $0, 0; @p ld.global.nc.u16 $0, [$1]; }"
    return assembly(text, "=&r,l,r,r", [address, row, limit])


def store_words(address: Int64, values, row: Int32, limit: Int32):
    """1, 2 or 4 Int32 to an address that is a multiple of their size, where row < limit."""
    words = len(values)
    names = [f"${i + 3}" for i in range(words)]
    source = names[0] if words == 1 else "{" + ", ".join(names) + "}"
    text = f"{{ .reg .pred p; setp.lt.s32 p, $1, $2; @p st.global{_WORDS[words]} [$0], {source}; }}"
    assembly(text, ",".join(["l", "r", "r"] + ["r"] * words), [address, row, limit, *values], 0, True)


def store_byte(address: Int64, value: Int32, row: Int32, limit: Int32):
    """The low 8 bits, where row < limit."""
    text = "{ .reg .pred p; setp.lt.s32 p, $1, $2; @p st.global.u8 [$0], $3; }"
    assembly(text, "l,r,r,r", [address, row, limit, value], 0, True)


def largest_into(address: Int64, value: Int32, row: Int32, limit: Int32):
    """*address = max(*address, value), signed, at once for all threads of the grid, where row < limit."""
    text = "{ .reg .pred p; setp.lt.s32 p, $1, $2; @p red.global.max.s32 [$0], $3; }"
    assembly(text, "l,r,r,r", [address, row, limit, value], 0, True)


def where_less(a: Int32, b: Int32, value: Int32, other: Int32):
    """value where a < b, else other."""
    return assembly(
        "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $3, $4, p; }", "=r,r,r,r,r", [a, b, value, other]
    )


def kept(value: Int32):
    """The same value, which is then kept in a register: the compiler would read the thread's number anew in every loop, tens of
    cycles, rather than keep what follows from it."""
    return assembly("mov.b32 $0, $1;", "=r,r", [value], effects=True)


def larger_halves(a: Int32, b: Int32):
    """The larger of the low and of the high halves, unsigned."""
    return assembly("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b])


def permute_bytes(a: Int32, b: Int32, selector):
    """PTX prmt."""
    return assembly(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", [a, b])


def from_lane(value: Int32, distance):
    """The value of the lane whose number differs in the bits of `distance`."""
    return cutlass.cute.arch.shuffle_sync_bfly(value, offset=distance)
