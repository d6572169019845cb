"""Constants, integers, floats, casts."""

from __future__ import annotations

from typing import Any

from ..ir_types import Vec
from ..program import FUNARY
from .base import Lowering, Regs, Value, handles

_INT_OPS = {
    "add": "ADD", "sub": "SUB", "mul": "MUL", "and": "AND", "or": "OR", "xor": "XOR", "shl": "SHL", "lshr": "LSHR", "ashr": "ASHR",
    "udiv": "UDIV", "sdiv": "SDIV", "urem": "UREM", "srem": "SREM",
    "intr.smin": "SMIN", "intr.smax": "SMAX", "intr.umin": "UMIN", "intr.umax": "UMAX",
}  # fmt: skip
_ICMP = ["EQ", "NE", "SLT", "SLE", "SGT", "SGE", "ULT", "ULE", "UGT", "UGE"]
# llvm.fcmp predicate, in the dialect's order -> bits of core.c's compare_bits (1 equal, 2 greater, 4 less, 8 unordered).
# The dialect numbers uno after une (mlir/include/mlir/Dialect/LLVMIR/LLVMEnums.td, FCmpPredicate), unlike LLVM's own CmpInst::Predicate.
_FCMP = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 8, 15]
_FLOAT_OPS = {
    "fadd": "FADD", "fsub": "FSUB", "fmul": "FMUL", "fdiv": "FDIV", "frem": "FREM", "intr.maxnum": "FMAXNUM", "intr.minnum": "FMINNUM",
    "intr.maximum": "FMAXIMUM", "intr.minimum": "FMINIMUM", "intr.copysign": "COPYSIGN", "intr.pow": "FPOW",
}  # fmt: skip
_DOUBLE_OPS = {"fadd": "DFADD", "fsub": "DFSUB", "fmul": "DFMUL", "fdiv": "DFDIV"}
_FLOAT_UNARY = {
    "fneg": "neg", "intr.fabs": "abs", "intr.sqrt": "sqrt", "intr.exp2": "exp2", "intr.exp": "exp", "intr.log2": "log2", "intr.log": "log",
    "intr.sin": "sin", "intr.cos": "cos", "intr.tanh": "tanh", "intr.floor": "floor", "intr.ceil": "ceil", "intr.trunc": "trunc",
    "intr.rint": "rint", "intr.roundeven": "rint", "intr.nearbyint": "rint", "intr.round": "round",
}  # fmt: skip
_ROCDL_UNARY = {
    "rcp": "rcp",
    "rsq": "rsq",
    "sqrt": "sqrt",
    "exp2": "exp2",
    "log": "log2",
    "tanh": "tanh",
}


@handles("llvm.mlir.constant")
def _constant(k: Lowering, o: Any) -> Value:
    return k.literal(o.attributes["value"], k.result_type(o), o)


@handles("llvm.mlir.poison", "llvm.mlir.undef")
def _undefined(k: Lowering, o: Any) -> Value:
    return k._blank(k.result_type(o), 0xFFFFFFFF)


@handles("llvm.mlir.zero")
def _zero(k: Lowering, o: Any) -> Value:
    return k._blank(k.result_type(o), 0)


@handles(*(f"llvm.{name}" for name in _INT_OPS))
def _integer(k: Lowering, o: Any) -> Value:
    op = _INT_OPS[o.name.partition(".")[2]]
    t = k.result_type(o)
    if op in ("AND", "OR", "XOR"):
        return tuple(k.out(op, a, b) for a, b in zip(k.operand(o, 0), k.operand(o, 1)))
    element = t.element if isinstance(t, Vec) else t
    return k._each(o, lambda a, b: k.int_op(op, a, b, element.bits))


@handles("llvm.icmp")
def _icmp(k: Lowering, o: Any) -> Value:
    predicate = _ICMP[k.integer_attribute(o, "predicate")]
    t = k.operand_type(o, 0)
    element = t.element if isinstance(t, Vec) else t
    return k._each(o, lambda a, b: k.compare(predicate, a, b, element.bits))


@handles("llvm.select")
def _select(k: Lowering, o: Any) -> Value:
    condition, a, b = (k.operand(o, i) for i in range(3))
    if isinstance(k.operand_type(o, 0), Vec):
        return k._each(o, lambda c, x, y: tuple(k.out("SELECT", c[0], p, q) for p, q in zip(x, y)))
    return k._choose(condition[0], a, b)


@handles("llvm.sext")
def _sext(k: Lowering, o: Any) -> Value:
    source, target = k.operand_type(o, 0), k.result_type(o)
    source, target = getattr(source, "element", source), getattr(target, "element", target)

    def one(a: Regs) -> Regs:
        low = k.sext(a[0], source.bits)
        if target.bits > 64:
            raise k.fail(f"sext to i{target.bits}", o)
        if target.bits == 64:
            return low, k.out("ASHR", low, k.const(31))
        return (k.clean(low, target.bits),)

    return k._each(o, one)


@handles("llvm.zext")
def _zext(k: Lowering, o: Any) -> Value:
    target = k.result_type(o)
    bits = getattr(target, "element", target).bits
    return k._each(o, lambda a: tuple(a) + tuple(k.const(0) for _ in range(max(1, bits // 32) - len(a))))


@handles("llvm.trunc")
def _trunc(k: Lowering, o: Any) -> Value:
    target = k.result_type(o)
    bits = getattr(target, "element", target).bits
    return k._each(o, lambda a: (k.clean(a[0], bits),) if bits < 32 else tuple(a[: bits // 32]))


@handles("llvm.intr.ctpop", "llvm.intr.ctlz", "llvm.intr.cttz", "llvm.intr.bitreverse")
def _int_unary(k: Lowering, o: Any) -> Value:
    op = {
        "llvm.intr.ctpop": "CTPOP",
        "llvm.intr.ctlz": "CTLZ",
        "llvm.intr.cttz": "CTTZ",
        "llvm.intr.bitreverse": "BITREV",
    }[o.name]
    t = k.result_type(o)
    if getattr(t, "element", t).bits != 32:
        raise k.fail(f"{o.name} on {o.results[0].type}", o)
    return k._each(o, lambda a: (k.out(op, a[0]),), operands=1)


@handles("llvm.intr.abs")
def _abs(k: Lowering, o: Any) -> Value:
    t = k.result_type(o)
    bits = getattr(t, "element", t).bits
    zero = tuple(k.const(0) for _ in range(max(1, bits // 32)))

    def one(a: Regs) -> Regs:
        return k.int_op("SMAX", a, k.int_op("SUB", zero, a, bits), bits)

    return k._each(o, one, operands=1)


@handles("llvm.intr.fshl", "llvm.intr.fshr")
def _fshl(k: Lowering, o: Any) -> Value:
    """Funnel shifts of i32: the high (or low) dword of the pair a:b shifted by c modulo 32."""
    left = o.name == "llvm.intr.fshl"
    t = k.result_type(o)
    if getattr(t, "element", t).bits != 32:
        raise k.fail(f"{o.name} on {o.results[0].type}", o)

    def one(a: Regs, b: Regs, c: Regs) -> Regs:
        by = (k.out("AND", c[0], k.const(31)), k.const(0))
        lo, hi = k.int_op("SHL" if left else "LSHR", (b[0], a[0]), by, 64)
        return (hi if left else lo,)

    return k._each(o, one)


@handles(*(f"llvm.{name}" for name in _FLOAT_OPS))
def _float(k: Lowering, o: Any) -> Value:
    short = o.name.partition(".")[2]
    name = k._float_element(k.result_type(o))
    if name == "f64":
        if short not in _DOUBLE_OPS:
            raise k.fail(f"{o.name} on f64", o)

        def wide(a: Regs, b: Regs) -> Regs:
            lo, hi = k.b.new(), k.b.new()
            k.emit(_DOUBLE_OPS[short], lo, hi, *a, *b)
            return lo, hi

        return k._each(o, wide)
    op = _FLOAT_OPS[short]
    if op == "COPYSIGN" and name != "f32":  # bits only: a signalling NaN stays one
        return k._each(o, lambda a, b: (k.out("INSERT", a[0], k.out("EXTRACT", b[0], 15, 1), 15, 1),))
    # One fp32 operation and one rounding: for + - * / of fp16 and bf16 this equals rounding once (24 >= 2 * 11 + 2 bits).
    return k._each(
        o,
        lambda a, b: (k.from_f32(k.out(op, k.to_f32(a[0], name), k.to_f32(b[0], name)), name),),
        operands=2,
    )


@handles(*(f"llvm.{name}" for name in _FLOAT_UNARY), *(f"rocdl.{name}" for name in _ROCDL_UNARY))
def _float_unary(k: Lowering, o: Any) -> Value:
    dialect, _, short = o.name.partition(".")
    which = (_FLOAT_UNARY if dialect == "llvm" else _ROCDL_UNARY)[short]
    if o.name == "rocdl.tanh" and k.arch != "gfx1250":  # LLVM's assembler knows v_tanh_* there alone
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    name = k._float_element(k.result_type(o))
    if dialect == "rocdl" and name == "bf16" and k.arch != "gfx1250":  # so are its v_*_bf16
        raise k.fail(f"{o.name} of bf16: {k.arch} does not have it", o)
    if name == "f64":
        if which not in ("neg", "abs"):
            raise k.fail(f"{o.name} on f64", o)
        return k._each(o, lambda a: (a[0], k.out("FUNARY", a[1], FUNARY.index(which))), operands=1)
    if which in ("neg", "abs") and name != "f32":  # bits only: a signalling NaN stays one
        op, mask = ("XOR", 0x8000) if which == "neg" else ("AND", 0x7FFF)
        return k._each(o, lambda a: (k.out(op, a[0], k.const(mask)),), operands=1)
    return k._each(
        o,
        lambda a: (k.from_f32(k.out("FUNARY", k.to_f32(a[0], name), FUNARY.index(which)), name),),
        operands=1,
    )


@handles("llvm.intr.fma", "llvm.intr.fmuladd")
def _fma(k: Lowering, o: Any) -> Value:
    name = k._float_element(k.result_type(o))
    if name == "f64":

        def wide(a: Regs, b: Regs, c: Regs) -> Regs:
            lo, hi = k.b.new(), k.b.new()
            k.emit("DFMA", lo, hi, *a, *b, *c)
            return lo, hi

        return k._each(o, wide)
    if name != "f32":
        raise k.fail(f"{o.name} on {name} (one rounding, which fp32 arithmetic cannot give)", o)
    return k._each(o, lambda a, b, c: (k.out("FMA", a[0], b[0], c[0]),))


@handles("llvm.fcmp")
def _fcmp(k: Lowering, o: Any) -> Value:
    predicate = _FCMP[k.integer_attribute(o, "predicate")]
    name = k._float_element(k.operand_type(o, 0))
    if name == "f64":
        return k._each(o, lambda a, b: (k.out("DFCMP", *a, *b, predicate),))
    return k._each(o, lambda a, b: (k.out("FCMP", k.to_f32(a[0], name), k.to_f32(b[0], name), predicate),))


@handles("llvm.fpext", "llvm.fptrunc")
def _float_cast(k: Lowering, o: Any) -> Value:
    source, target = k._float_element(k.operand_type(o, 0)), k._float_element(k.result_type(o))

    def one(a: Regs) -> Regs:
        if source == target:
            return a
        if source == "f64":
            if target != "f32":
                raise k.fail(f"f64 to {target}", o)
            return (k.out("F64_TO_F32", *a),)
        wide = k.to_f32(a[0], source)
        if target == "f64":
            lo, hi = k.b.new(), k.b.new()
            k.emit("F32_TO_F64", lo, hi, wide)
            return lo, hi
        return (k.from_f32(wide, target),)

    return k._each(o, one, operands=1)


@handles("llvm.sitofp", "llvm.uitofp")
def _int_to_float(k: Lowering, o: Any) -> Value:
    signed = o.name == "llvm.sitofp"
    source, target = k.operand_type(o, 0), k._float_element(k.result_type(o))
    bits = getattr(source, "element", source).bits

    def one(a: Regs) -> Regs:
        if target == "f64":
            if bits > 32:
                raise k.fail("i64 to f64", o)
            lo, hi = k.b.new(), k.b.new()
            k.emit("SI32_TO_F64" if signed else "UI32_TO_F64", lo, hi, k.sext(a[0], bits) if signed else a[0])
            return lo, hi
        if bits == 64:
            value = k.out("SITOFP64" if signed else "UITOFP64", *a)
        else:
            value = k.out("SITOFP" if signed else "UITOFP", k.sext(a[0], bits) if signed else a[0])
        return (k.from_f32(value, target),)

    return k._each(o, one)


@handles("llvm.fptosi", "llvm.fptoui")
def _float_to_int(k: Lowering, o: Any) -> Value:
    signed = o.name == "llvm.fptosi"
    target, source = k.result_type(o), k._float_element(k.operand_type(o, 0))
    bits = getattr(target, "element", target).bits

    def one(a: Regs) -> Regs:
        if source == "f64":
            raise k.fail("f64 to integer", o)
        value = k.to_f32(a[0], source)
        if bits == 64:
            lo, hi = k.b.new(), k.b.new()
            k.emit("FPTOSI64" if signed else "FPTOUI64", lo, hi, value)
            return lo, hi
        return (k.clean(k.out("FPTOSI" if signed else "FPTOUI", value), bits),)

    return k._each(o, one)
