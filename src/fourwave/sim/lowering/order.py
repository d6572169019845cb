"""Barriers, waits, fences, and hints without effect on values or order."""

from __future__ import annotations

from typing import Any

from .atomics import order_after, order_before
from .base import Lowering, Value, handles
from .gfx1250 import emit_barrier

# Hints to the scheduler or the clock: no effect on values or order.
_NOTES = {
    "sched.barrier", "sched.group.barrier", "iglp.opt", "s.setprio", "s.sleep", "s.nop", "wave.barrier",
}  # fmt: skip


@handles("rocdl.s.barrier")
def _barrier(k: Lowering, o: Any) -> Value:
    _emit_barrier(k)


def _emit_barrier(k: Lowering) -> None:
    if k.arch == "gfx1250":
        emit_barrier(k)
    else:
        k.emit("BARRIER")


@handles("rocdl.barrier")
def _fenced_barrier(k: Lowering, o: Any) -> Value:
    """rocdl.barrier: release fence, s_barrier, acquire fence at workgroup scope."""
    k.emit("FENCE", 1, 0)
    _emit_barrier(k)


@handles("rocdl.s.waitcnt")
def _waitcnt(k: Lowering, o: Any) -> Value:
    """Fields of s_waitcnt on gfx9: vmcnt bits 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8 (CDNA3 ISA guide, S_WAITCNT)."""
    if k.arch == "gfx1250":
        raise k.fail("s_waitcnt on gfx1250, which has a wait for each counter", o)
    bits = k.integer_attribute(o, "bitfield")
    vm = (bits & 15) | (bits >> 14 & 3) << 4
    lgkm = bits >> 8 & 15
    k.emit("WAIT", vm if vm < 63 else -1, lgkm if lgkm < 15 else -1)


@handles("llvm.fence")
def _fence(k: Lowering, o: Any) -> Value:
    ordering = k.integer_attribute(o, "ordering")
    order_before(k, o, ordering)
    order_after(k, o, ordering)


@handles(*(f"rocdl.{name}" for name in _NOTES))
def _note(k: Lowering, o: Any) -> Value:
    return None
