"""Loads, stores, buffer resources, copies to LDS, transposing LDS reads."""

from __future__ import annotations

from typing import Any

from ..ir_types import Int, dwords, size_and_align
from .atomics import LOAD, STORE, order_after, order_before
from .base import Lowering, Value, handles
from .private import load_private, store_private


def _stated(k: Lowering, o: Any, t: Any, at: int, size: int) -> int:
    """The size operand of an access's part: its bytes, and above them the alignment that the operation states, in its first part.

    Without an attribute it is the type's own (LLVM language reference, load: "the alignment of the type in the ABI"); other alignment is
    undefined behaviour, and the compiler may choose instructions that need it; none needs more than 16.
    """
    if at:
        return size
    return size | min(16, k.integer_attribute(o, "alignment", size_and_align(t)[1])) << 8


@handles("llvm.load")
def _load(k: Lowering, o: Any) -> Value:
    t, pointer, space = k.result_type(o), k.operand(o, 0), k.operand_type(o, 0).space
    bytes_, out = k.memory_bytes(t), [k.b.new() for _ in range(dwords(t))]
    ordering = k.integer_attribute(o, "ordering")
    if space == 5:
        load_private(k, pointer[0], bytes_, out, o)
        return tuple(k.clean(out[0], 1) if t == Int(1) else r for r in out)
    if ordering and space == 3 and bytes_ in (4, 8):
        k.emit("LDS_ATOMIC", LOAD, bytes_ // 8, pointer[0], 0, [], out)
        order_after(k, o, ordering)
        return tuple(out)
    if ordering and space != 3:
        k.emit("ORDERED")
    for at, size, first, n in k.pieces(bytes_):
        size = _stated(k, o, t, at, size)
        if space == 3:
            k.emit("LDS_LOAD", at, pointer[0], size, 0, out[first : first + n])
        elif space in (0, 1, 4):
            k.emit("GLOBAL_LOAD", at, pointer[0], pointer[1], size, out[first : first + n])
        else:
            raise k.fail(f"a load from address space {space}", o)
    order_after(k, o, ordering)
    return tuple(k.clean(out[0], 1) if t == Int(1) else r for r in out)


@handles("llvm.store")
def _store(k: Lowering, o: Any) -> Value:
    t, value, pointer, space = (
        k.operand_type(o, 0),
        k.operand(o, 0),
        k.operand(o, 1),
        k.operand_type(o, 1).space,
    )
    ordering = k.integer_attribute(o, "ordering")
    if space == 5:
        store_private(k, pointer[0], k.memory_bytes(t), value, o)
        return
    order_before(k, o, ordering)
    if ordering and space == 3 and k.memory_bytes(t) in (4, 8):
        k.emit("LDS_ATOMIC", STORE, k.memory_bytes(t) // 8, pointer[0], 0, list(value), [])
        return
    if ordering and space != 3:
        k.emit("ORDERED")
    for at, size, first, n in k.pieces(k.memory_bytes(t)):
        size = _stated(k, o, t, at, size)
        if space == 3:
            k.emit("LDS_STORE", at, pointer[0], size, list(value[first : first + n]))
        elif space in (0, 1):
            k.emit("GLOBAL_STORE", at, pointer[0], pointer[1], size, list(value[first : first + n]))
        else:
            raise k.fail(f"a store to address space {space}", o)


@handles("rocdl.make.buffer.rsrc")
def _make_buffer_rsrc(k: Lowering, o: Any) -> Value:
    """The four dwords of a buffer resource: base 48 bits, stride 14 bits, num_records, flags (CDNA3 ISA guide, table of the buffer
    resource descriptor). gfx1250: base 57 bits, num_records 45, six zeros, stride 14, flags from bit 124 (LLVM, AMDGPULegalizerInfo)."""
    base, stride, records, flags = (k.operand(o, i) for i in range(4))
    if k.arch == "gfx1250":
        wide = (records[0], records[1] if len(records) > 1 else k.const(0))
        shifted = k.int_op("LSHR", wide, (k.const(7), k.const(0)), 64)
        last = k.out(
            "OR",
            k.out("AND", shifted[1], k.const(63)),
            k.out("SHL", k.out("AND", stride[0], k.const(0xFFFF)), k.const(12)),
        )
        return (
            base[0],
            k.out("INSERT", base[1], records[0], 25, 127),
            shifted[0],
            k.out("OR", last, k.out("SHL", flags[0], k.const(28))),
        )
    return base[0], k.out("INSERT", base[1], stride[0], 16, 0xFFFF), records[0], flags[0]


@handles("rocdl.raw.ptr.buffer.load", "rocdl.raw.buffer.load")
def _buffer_load(k: Lowering, o: Any) -> Value:
    """(resource, voffset, soffset); raw.buffer.* has the resource's four dwords as a vector."""
    t, resource, voffset, soffset = k.result_type(o), k.operand(o, 0), k.operand(o, 1), k.operand(o, 2)
    bytes_ = k.memory_bytes(t)
    if bytes_ not in (1, 2, 4, 8, 12, 16):
        raise k.fail(f"a buffer load of {bytes_} bytes", o)
    out = [k.b.new() for _ in range(dwords(t))]
    k.emit("BUFFER_LOAD", 0, *resource, voffset[0], soffset[0], bytes_, out)
    return tuple(out)


@handles("rocdl.raw.ptr.buffer.store", "rocdl.raw.buffer.store")
def _buffer_store(k: Lowering, o: Any) -> Value:
    t, value = k.operand_type(o, 0), k.operand(o, 0)
    resource, voffset, soffset = k.operand(o, 1), k.operand(o, 2), k.operand(o, 3)
    bytes_ = k.memory_bytes(t)
    if bytes_ not in (1, 2, 4, 8, 12, 16):
        raise k.fail(f"a buffer store of {bytes_} bytes", o)
    k.emit("BUFFER_STORE", 0, *resource, voffset[0], soffset[0], bytes_, list(value))


@handles("rocdl.raw.ptr.buffer.load.lds", "rocdl.raw.ptr.buffer.load.async.lds")
def _buffer_load_lds(k: Lowering, o: Any) -> Value:
    """(resource, LDS pointer, size, voffset, soffset, offset), some of them attributes in the short form."""
    if k.arch == "gfx1250":
        raise k.fail(f"{o.name}: gfx1250 does not have it", o)
    resource, lds = k.operand(o, 0), k.operand(o, 1)
    rest = [k.operand(o, i)[0] for i in range(2, len(k.operands))]
    if len(rest) == 4:
        size, offset = k.constant_of(k.operands[2]), k.constant_of(k.operands[5])
        voffset, soffset = rest[1], rest[2]
    else:
        size, offset = k.integer_attribute(o, "size"), k.integer_attribute(o, "offset")
        voffset, soffset = rest[0], rest[1]
    if size not in (4, 12, 16) or offset is None or (size != 4 and k.arch != "gfx950"):
        raise k.fail(f"a copy to LDS of {size} bytes a lane on {k.arch}", o)
    k.emit("BUFFER_LOAD_LDS", offset, *resource, voffset, soffset, size, lds[0])


@handles("rocdl.load.to.lds", "rocdl.global.load.lds", "rocdl.global.load.async.lds", "rocdl.load.async.to.lds")
def _global_load_lds(k: Lowering, o: Any) -> Value:
    if k.arch == "gfx1250":
        raise k.fail(f"{o.name}: gfx1250 does not have it", o)
    pointer, lds = k.operand(o, 0), k.operand(o, 1)
    if len(k.operands) > 2:
        size, offset = k.constant_of(k.operands[2]), k.constant_of(k.operands[3])
    else:
        size, offset = k.integer_attribute(o, "size"), k.integer_attribute(o, "offset")
    if size not in (4, 12, 16) or offset is None or (size != 4 and k.arch != "gfx950"):
        raise k.fail(f"a copy to LDS of {size} bytes a lane on {k.arch}", o)
    k.emit("GLOBAL_LOAD_LDS", offset, pointer[0], pointer[1], size, lds[0])


@handles("rocdl.ds.read.tr16.b64")
def _ds_read_tr16(k: Lowering, o: Any) -> Value:
    if k.arch != "gfx950":
        raise k.fail(f"{o.name}: {k.arch} has no transposing LDS read", o)
    d0, d1 = k.b.new(), k.b.new()
    k.emit("DS_READ_TR16_B64", 0, k.operand(o, 0)[0], 0, d0, d1)
    return d0, d1
