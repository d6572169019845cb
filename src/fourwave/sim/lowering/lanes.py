"""Who a lane is, and traffic between lanes."""

from __future__ import annotations

from typing import Any

from ..ir_types import dwords
from .base import Lowering, Value, handles


@handles("rocdl.workitem.id.x", "rocdl.workitem.id.y", "rocdl.workitem.id.z")
def _workitem_id(k: Lowering, o: Any) -> Value:
    return (k.out("THREAD_ID", "xyz".index(o.name[-1])),)


@handles("rocdl.workgroup.id.x", "rocdl.workgroup.id.y", "rocdl.workgroup.id.z")
def _workgroup_id(k: Lowering, o: Any) -> Value:
    return (k.out("GROUP_ID", "xyz".index(o.name[-1])),)


@handles("rocdl.readfirstlane")
def _readfirstlane(k: Lowering, o: Any) -> Value:
    return tuple(k.out("READFIRSTLANE", r) for r in k.operand(o, 0))


@handles("rocdl.readlane")
def _readlane(k: Lowering, o: Any) -> Value:
    return tuple(k.out("READLANE", r, k.operand(o, 1)[0]) for r in k.operand(o, 0))


@handles("rocdl.ballot")
def _ballot(k: Lowering, o: Any) -> Value:
    lo, hi = k.b.new(), k.b.new()
    k.emit("BALLOT", lo, hi, k.operand(o, 0)[0])
    return (lo, hi)[: dwords(k.result_type(o))]


@handles("rocdl.ds_bpermute")
def _bpermute(k: Lowering, o: Any) -> Value:
    return (k.out("DS_BPERMUTE", k.operand(o, 0)[0], k.operand(o, 1)[0]),)


@handles("rocdl.mbcnt.lo", "rocdl.mbcnt.hi")
def _mbcnt(k: Lowering, o: Any) -> Value:
    mask, addend = k.operand(o, 0)[0], k.operand(o, 1)[0]
    return (k.out("MBCNT", mask, mask, addend, int(o.name.endswith("hi"))),)


@handles("rocdl.permlane16.swap", "rocdl.permlane32.swap")
def _permlane_swap(k: Lowering, o: Any) -> Value:
    a, b = k.b.new(), k.b.new()
    k.emit("PERMLANE_SWAP", a, b, k.operand(o, 0)[0], k.operand(o, 1)[0], 16 if "16" in o.name else 32)
    return [(a,), (b,)]
