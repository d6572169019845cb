"""Reductions of a vector to one element (LLVM Language Reference, llvm.vector.reduce.*)."""

from __future__ import annotations

from typing import Any

from ..ir_types import Float
from .base import Lowering, Regs, Value, handles

_INTEGER = {
    "add": "ADD",
    "mul": "MUL",
    "and": "AND",
    "or": "OR",
    "xor": "XOR",
    "smax": "SMAX",
    "smin": "SMIN",
    "umax": "UMAX",
    "umin": "UMIN",
}
# fadd and fmul begin with their first operand and go on in order; with `reassoc` any order is allowed, this one is.
_FLOAT = {
    "fadd": "FADD",
    "fmul": "FMUL",
    "fmax": "FMAXNUM",
    "fmin": "FMINNUM",
    "fmaximum": "FMAXIMUM",
    "fminimum": "FMINIMUM",
}


@handles(*(f"llvm.intr.vector.reduce.{name}" for name in _INTEGER))
def _reduce(k: Lowering, o: Any) -> Value:
    op = _INTEGER[o.name.rpartition(".")[2]]
    t = k.operand_type(o, 0)
    first, *rest = k.elements(k.operand(o, 0), t)
    value: Regs = first
    for e in rest:
        if op in ("AND", "OR", "XOR"):
            value = tuple(k.out(op, a, b) for a, b in zip(value, e))
        else:
            value = k.int_op(op, value, e, t.element.bits)
    return value


@handles(*(f"llvm.intr.vector.reduce.{name}" for name in _FLOAT))
def _reduce_float(k: Lowering, o: Any) -> Value:
    op = _FLOAT[o.name.rpartition(".")[2]]
    t = k.operand_type(o, len(k.operands) - 1)
    if t.element == Float("f64"):
        raise k.fail(f"{o.name} on f64", o)
    elements = [e[0] for e in k.elements(k.operand(o, len(k.operands) - 1), t)]
    if len(k.operands) == 2:
        elements.insert(0, k.operand(o, 0)[0])
    name = t.element.name
    value = elements[0]
    for e in elements[1:]:  # each step rounds to the element's type
        value = k.from_f32(k.out(op, k.to_f32(value, name), k.to_f32(e, name)), name)
    return (value,)
