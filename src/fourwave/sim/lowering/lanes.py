"""Who a lane is, and traffic between lanes."""

from __future__ import annotations

from typing import Any

from ..ir_types import dwords
from .base import WAVE_SIZE, Lowering, Value, handles


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
    if k.arch == "gfx942" or (k.arch == "gfx1250" and "32" in o.name):  # llvm-mc 22
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    a, b = k.b.new(), k.b.new()
    k.emit("PERMLANE_SWAP", a, b, k.operand(o, 0)[0], k.operand(o, 1)[0], 16 if "16" in o.name else 32)
    return [(a,), (b,)]


@handles("rocdl.wavefrontsize")
def _wavefrontsize(k: Lowering, o: Any) -> Value:
    return (k.const(WAVE_SIZE[k.arch]),)


def dpp_control_known(arch: str, control: int) -> bool:
    """Whether a DPP control word exists on `arch`: AMD CDNA3 ISA guide, "DPP_CTRL enumeration"; LLVM, AMDGPUAsmParser (isSupportedDPPCtrl).

    gfx9 has shifts across the wave and row broadcasts; gfx10 and later have row_share and row_xmask instead.
    """
    if control < 0x100 or (0x101 <= control <= 0x12F and control & 15):
        return True
    if control in (0x140, 0x141) or 0x150 <= control <= 0x15F:
        return True
    if arch.startswith("gfx9"):
        return control in (0x130, 0x134, 0x138, 0x13C, 0x142, 0x143)
    return 0x160 <= control <= 0x16F


@handles("rocdl.update.dpp")
def _update_dpp(k: Lowering, o: Any) -> Value:
    """(old, source): lanes whose row or bank the masks leave out keep `old`; so do lanes without a source, unless bound_ctrl gives them 0."""
    control, rows, banks = (k.integer_attribute(o, name) for name in ("dppCtrl", "rowMask", "bankMask"))
    zero = int("boundCtrl" in o.attributes and k.ir.BoolAttr(o.attributes["boundCtrl"]).value)
    if not dpp_control_known(k.arch, control):
        raise k.fail(f"the DPP control {control:#x} on {k.arch}", o)
    return tuple(
        k.out("DPP", old, new, control, rows, banks, zero) for old, new in zip(k.operand(o, 0), k.operand(o, 1))
    )


@handles("rocdl.ds_swizzle")
def _ds_swizzle(k: Lowering, o: Any) -> Value:
    offset = k.constant_of(k.operands[1])
    if offset is None:
        raise k.fail("ds_swizzle with a run-time offset", o)
    return (k.out("DS_SWIZZLE", k.operand(o, 0)[0], offset & 0xFFFF),)


def _fetch(k: Lowering, o: Any, name: str) -> int:
    return int(name in o.attributes and k.ir.BoolAttr(o.attributes[name]).value)


@handles("rocdl.permlanex16")
def _permlanex16(k: Lowering, o: Any) -> Value:
    if k.arch.startswith("gfx9"):
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    old, source, lo, hi = (k.operand(o, i)[0] for i in range(4))
    return (k.out("PERMLANE16", old, source, lo, hi, 1, _fetch(k, o, "fi"), _fetch(k, o, "boundControl")),)


@handles("rocdl.permlane16.var", "rocdl.permlanex16.var")
def _permlane16_var(k: Lowering, o: Any) -> Value:
    if k.arch.startswith("gfx9"):
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    old, source, select = (k.operand(o, i)[0] for i in range(3))
    crossed = int("x16" in o.name)
    return (k.out("PERMLANE16_VAR", old, source, select, crossed, _fetch(k, o, "fi"), _fetch(k, o, "boundControl")),)
