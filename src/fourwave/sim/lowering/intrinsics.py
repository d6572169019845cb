"""llvm.call_intrinsic: the amdgcn intrinsics that FlyDSL calls by name. Immediates come as constant operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ir_types import dwords
from .base import Handler, Lowering, Value, handles

INTRINSICS: dict[str, Handler] = {}


def intrinsic(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for calls of the intrinsics `names`."""

    def register(handler: Handler) -> Handler:
        for name in names:
            assert name not in INTRINSICS, name
            INTRINSICS[name] = handler
        return handler

    return register


@handles("llvm.call_intrinsic")
def _call_intrinsic(k: Lowering, o: Any) -> Value:
    name = k.ir.StringAttr(o.attributes["intrin"]).value
    handler = INTRINSICS.get(name)
    if handler is None:
        raise k.fail(f"the intrinsic {name}", o)
    return handler(k, o)


@intrinsic("llvm.amdgcn.perm")
def _perm(k: Lowering, o: Any) -> Value:
    """V_PERM_B32: bytes of the pair first:second, by selector."""
    return (k.out("PERM", *(k.operand(o, i)[0] for i in range(3))),)


@intrinsic("llvm.amdgcn.alignbit")
def _alignbit(k: Lowering, o: Any) -> Value:
    return (k.out("ALIGNBIT", *(k.operand(o, i)[0] for i in range(3))),)


@intrinsic("llvm.amdgcn.alignbyte")
def _alignbyte(k: Lowering, o: Any) -> Value:
    return (k.out("ALIGNBYTE", *(k.operand(o, i)[0] for i in range(3))),)


@intrinsic("llvm.amdgcn.s.buffer.load.i32", "llvm.amdgcn.s.buffer.load.v4i32")
def _s_buffer_load(k: Lowering, o: Any) -> Value:
    """(resource of four dwords, byte offset, cache policy): one address for the wave."""
    return _scalar_load(k, o)


@handles("rocdl.ptr.s.buffer.load")
def _ptr_s_buffer_load(k: Lowering, o: Any) -> Value:
    """(resource pointer, byte offset)."""
    return _scalar_load(k, o)


def _scalar_load(k: Lowering, o: Any) -> Value:
    out = [k.b.new() for _ in range(dwords(k.result_type(o)))]
    k.emit("S_BUFFER_LOAD", *k.operand(o, 0), k.operand(o, 1)[0], 4 * len(out), out)
    return tuple(out)


@intrinsic("llvm.amdgcn.s.setreg")
def _setreg(k: Lowering, o: Any) -> Value:
    """Only SCHED_MODE (register 26), which changes no value; MODE would change rounding and denormals."""
    which = k.constant_of(k.operands[0])
    if which is None or which & 63 != 26:
        raise k.fail(f"s_setreg of register {None if which is None else which & 63}", o)
    return None
