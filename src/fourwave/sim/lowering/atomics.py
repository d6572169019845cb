"""Atomic operations on global memory, LDS and buffers, and the waits that an ordering puts around them.

They are atomic across the host threads that run workgroups. On gfx9 each counts once in vmcnt (lgkmcnt on LDS), with a result or without
(AMD CDNA3 ISA guide, s_waitcnt). An ordering's waits are the compiler's: LLVM, AMDGPUUsage, "Memory Model GFX942".
"""

from __future__ import annotations

import re
from typing import Any

from ..ir_types import Float, Int, Ptr, Type, Vec, dwords
from .base import Lowering, Regs, Value, handles

# lanes.h: the numbers of MLIR's AtomicBinOp (LLVMEnums.td), and its own.
_XCHG, _FADD, _FMAX, _FMIN = 0, 11, 13, 14
_INTEGER = set(range(11)) | {15, 16, 17, 18}
_SMAX, _UMIN = 7, 10
LOAD, STORE, CMPXCHG = 30, 31, 32
_ACQUIRE, _RELEASE = {4, 6, 7}, {5, 6, 7}
_AMONG_LANES = ("workgroup", "wavefront", "singlethread")  # scopes within which vector memory is ordered without waits


def _kind(k: Lowering, o: Any, t: Type, op: int) -> int:
    """The type's number in lanes.h."""
    floating = op in (_FADD, 12, _FMAX, _FMIN)
    if not floating and (op in _INTEGER or op in (LOAD, STORE, CMPXCHG)):
        if (
            isinstance(t, (Int, Float, Ptr))
            and t.bits in (32, 64)
            and (op == _XCHG or op > 18 or not isinstance(t, Float))
        ):
            return 0 if t.bits == 32 else 1
    elif floating:
        if t == Float("f32"):
            return 2
        if t == Float("f64"):
            return 3
        if isinstance(t, Vec) and t.count == 2 and op == _FADD and t.element in (Float("f16"), Float("bf16")):
            return 4 if t.element == Float("f16") else 5
    raise k.fail(f"the atomic operation number {op} on {t}", o)


def _scope(k: Lowering, o: Any) -> str:
    scope = k.ir.StringAttr(o.attributes["syncscope"]).value if "syncscope" in o.attributes else ""
    return re.sub(r"-?one-as$", "", scope)


def order_before(k: Lowering, o: Any, ordering: int) -> None:
    """What a release waits for: LDS operations within a workgroup, vector memory (copies to LDS included) beyond it."""
    if ordering in _RELEASE:
        k.emit("FENCE", 1 if _scope(k, o) in _AMONG_LANES else 2, 0)


def order_after(k: Lowering, o: Any, ordering: int) -> None:
    """What an acquire waits for: its own return, in order behind everything issued before it."""
    if ordering in _ACQUIRE:
        k.emit("FENCE", 0 if _scope(k, o) in _AMONG_LANES else 2, 1)


def _emit(
    k: Lowering, space: int, op: int, kind: int, pointer: Regs, operands: Regs, result: list[int], o: Any
) -> None:
    if space == 3:
        k.emit("LDS_ATOMIC", op, kind, pointer[0], 0, list(operands), result)
    elif space in (0, 1):
        k.emit("GLOBAL_ATOMIC", op, kind, pointer[0], pointer[1], list(operands), result)
    else:
        raise k.fail(f"an atomic operation in address space {space}", o)


@handles("llvm.atomicrmw")
def _atomicrmw(k: Lowering, o: Any) -> Value:
    t, op, ordering = k.result_type(o), k.integer_attribute(o, "bin_op"), k.integer_attribute(o, "ordering")
    kind, result = _kind(k, o, t, op), [k.b.new() for _ in range(dwords(t))]
    order_before(k, o, ordering)
    _emit(k, k.operand_type(o, 0).space, op, kind, k.operand(o, 0), k.operand(o, 1), result, o)
    order_after(k, o, ordering)
    return tuple(result)


@handles("llvm.cmpxchg")
def _cmpxchg(k: Lowering, o: Any) -> Value:
    t, ordering = k.operand_type(o, 1), k.integer_attribute(o, "success_ordering")
    kind, old = _kind(k, o, t, CMPXCHG), [k.b.new() for _ in range(dwords(t))]
    compared = k.operand(o, 1)
    order_before(k, o, ordering)
    _emit(k, k.operand_type(o, 0).space, CMPXCHG, kind, k.operand(o, 0), compared + k.operand(o, 2), old, o)
    order_after(k, o, max(ordering, k.integer_attribute(o, "failure_ordering")))
    return [tuple(old), k.compare("EQ", tuple(old), compared, t.bits)]


_BUFFER = {"fadd": _FADD, "fmax": _FMAX, "smax": _SMAX, "umin": _UMIN, "cmpswap": CMPXCHG}


@handles(*(f"rocdl.raw.{ptr}buffer.atomic.{name}" for ptr in ("ptr.", "") for name in _BUFFER))
def _buffer_atomic(k: Lowering, o: Any) -> Value:
    """(value, resource, voffset, soffset), or (new value, compared value, resource, ...); the old contents where the operation has a result."""
    op = _BUFFER[o.name.rpartition(".")[2]]
    t, operands, first = k.operand_type(o, 0), k.operand(o, 0), 1
    if op == CMPXCHG:  # lanes.h wants the compared value first
        operands, first = k.operand(o, 1) + operands, 2
    resource, voffset, soffset = (k.operand(o, first + i) for i in range(3))
    old = [k.b.new() for _ in range(dwords(t))]
    k.emit("BUFFER_ATOMIC", op, _kind(k, o, t, op), *resource, voffset[0], soffset[0], list(operands), old)
    return tuple(old)
