"""Aggregates, vectors, pointers: mostly renaming of registers."""

from __future__ import annotations

import re
from typing import Any

from ..ir_types import Array, Int, Ptr, Struct, Type, Vec, dwords, field_offset, parse, size_and_align
from .base import Lowering, Value, handles
from .private import global_data

LDS_APERTURE = 0x00010000  # upper dword of generic addresses of LDS, as in lanes.h


@handles("llvm.extractvalue")
def _extractvalue(k: Lowering, o: Any) -> Value:
    value = k.operand(o, 0)
    for i in k._position(o):
        value = value[i]
    return value


@handles("llvm.insertvalue")
def _insertvalue(k: Lowering, o: Any) -> Value:
    def put(whole: Value, path: list[int]) -> Value:
        return [put(x, path[1:]) if i == path[0] else x for i, x in enumerate(whole)] if path else k.operand(o, 1)

    return put(k.operand(o, 0), k._position(o))


@handles("llvm.extractelement")
def _extractelement(k: Lowering, o: Any) -> Value:
    t = k.operand_type(o, 0)
    value, index = k.operand(o, 0), k.constant_of(k.operands[1])
    if index is not None:
        bits = t.element.bits
        if bits == 1 or bits >= 32:
            n = max(1, bits // 32)
            return tuple(value[index * n : (index + 1) * n])
        per = 32 // bits
        return (k.field(value[index // per], index % per * bits, (1 << bits) - 1),)
    elements = k.elements(value, t)
    at = k.operand(o, 1)[0]
    return tuple(k.out("LOOKUP", at, [e[i] for e in elements]) for i in range(len(elements[0])))


@handles("llvm.insertelement")
def _insertelement(k: Lowering, o: Any) -> Value:
    t = k.result_type(o)
    value, new, index = list(k.operand(o, 0)), k.operand(o, 1), k.constant_of(k.operands[2])
    if index is not None:
        bits = t.element.bits
        if bits == 1 or bits >= 32:
            n = max(1, bits // 32)
            value[index * n : (index + 1) * n] = new
        else:
            per = 32 // bits
            value[index // per] = k.out("INSERT", value[index // per], new[0], index % per * bits, (1 << bits) - 1)
        return tuple(value)
    at = k.operand(o, 2)[0]
    elements = k.elements(tuple(value), t)
    return k.pack([tuple(k.out("STOW", at, n, old, i) for n, old in zip(new, e)) for i, e in enumerate(elements)], t)


@handles("llvm.shufflevector")
def _shufflevector(k: Lowering, o: Any) -> Value:
    source, target = k.operand_type(o, 0), k.result_type(o)
    mask = [int(x) for x in re.findall(r"-?\d+", str(o.attributes["mask"]).split(":", 1)[1])]
    first, second = k.operand(o, 0), k.operand(o, 1)
    bits = source.element.bits
    if bits not in (1,) and bits < 32 and len(mask) * bits % 32 == 0 and source.bits % 32 == 0:
        per, whole = 32 // bits, []
        for i in range(0, len(mask), per):
            run = mask[i : i + per]
            if run[0] >= 0 and run[0] % per == 0 and run == list(range(run[0], run[0] + per)):
                dword = run[0] // per
                whole.append(first[dword] if dword < len(first) else second[dword - len(first)])
            else:
                break
        else:
            return tuple(whole)
    parts = k.elements(first, source)
    if any(i >= source.count for i in mask):
        parts = parts + k.elements(second, source)
    undefined = tuple(k.const(0xFFFFFFFF) for _ in parts[0])
    return k.pack([parts[i] if i >= 0 else undefined for i in mask], target)


@handles("llvm.freeze", "llvm.bitcast")
def _bitcast(k: Lowering, o: Any) -> Value:
    source, target = k.operand_type(o, 0), k.result_type(o)
    one = Int(1)
    if getattr(source, "element", source) == one and isinstance(source, Vec):
        if isinstance(target, Vec):
            raise k.fail("a bitcast of a vector of i1 to a vector", o)
        words = []
        for first in range(0, source.count, 32):
            word = k.const(0)
            for i, r in enumerate(k.operand(o, 0)[first : first + 32]):
                word = k.out("INSERT", word, r, i, 1)
            words.append(word)
        return tuple(words)
    if isinstance(target, Vec) and target.element == one:
        return tuple(k.field(k.operand(o, 0)[i // 32], i % 32, 1) for i in range(target.count))
    return k.operand(o, 0)


@handles("llvm.inttoptr", "llvm.ptrtoint", "llvm.addrspacecast")
def _same(k: Lowering, o: Any) -> Value:
    source, target = k.operand_type(o, 0), k.result_type(o)
    value = k.operand(o, 0)
    n = dwords(target)
    if isinstance(source, Ptr) and isinstance(target, Ptr) and source.space != target.space:
        if 5 in (source.space, target.space):
            raise k.fail("a generic pointer to private memory", o)
        if source.space == 3:  # the aperture's upper dword; null, all ones in LDS, stays null
            null = k.out("EQ", value[0], k.const(0xFFFFFFFF))
            zero = k.const(0)
            return k.out("SELECT", null, zero, value[0]), k.out("SELECT", null, zero, k.const(LDS_APERTURE))
        if target.space == 3:
            null = k.out("EQ", k.out("OR", value[0], value[1]), k.const(0))
            return (k.out("SELECT", null, k.const(0xFFFFFFFF), value[0]),)
    return tuple(value[:n]) + tuple(k.const(0) for _ in range(n - len(value)))


@handles("llvm.getelementptr")
def _getelementptr(k: Lowering, o: Any) -> Value:
    base, t = k.operand(o, 0), k.operand_type(o, 0)
    element: Type = parse(str(k.ir.TypeAttr(o.attributes["elem_type"]).value))
    raw = [int(x) for x in re.findall(r"-?\d+", str(o.attributes["rawConstantIndices"]).split(":", 1)[-1])]
    dynamic = iter(range(1, len(k.operands)))
    constant, address = 0, base
    for position, index in enumerate(raw):
        if position:
            if isinstance(element, Struct):
                constant += field_offset(element, index)
                element = element.fields[index]
                continue
            assert isinstance(element, (Array, Vec))
            element = element.element  # type: ignore[assignment]
        size, align = size_and_align(element)
        stride = -(-size // align) * align
        if index == -(1 << 31):
            i = next(dynamic)
            known = k.constant_of(k.operands[i])
            if known is not None:
                constant += known * stride
                continue
            address = k._advance(address, k.operand(o, i), k.operand_type(o, i).bits, stride, t)
        else:
            constant += index * stride
    if constant:
        bits = 32 if t.bits == 32 else 64
        address = k.int_op("ADD", address, tuple(k.const(constant >> (32 * i)) for i in range(bits // 32)), bits)
    return address


@handles("llvm.mlir.addressof")
def _addressof(k: Lowering, o: Any) -> Value:
    name = str(o.attributes["global_name"]).lstrip("@").strip('"')
    if name in k.lds_offsets:
        return (k.const(k.lds_offsets[name]),)
    address = global_data(k, name, o).ctypes.data
    return k.const(address), k.const(address >> 32)
