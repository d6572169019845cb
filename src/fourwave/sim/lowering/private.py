"""Private memory (address space 5) and globals outside LDS.

A wave's private memory is a run of registers at the end of the constant area: dword k of every lane's is one register.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ..ir_types import Array, Type, Vec, parse, size_and_align
from .base import Lowering, Value, handles


@handles("llvm.alloca")
def _alloca(k: Lowering, o: Any) -> Value:
    count = k.constant_of(k.operands[0])
    block = o.block
    if count is None or block != o.parent.regions[0].blocks[0]:
        raise k.fail("an alloca of run-time size, or outside a function's first block", o)
    size, align = size_and_align(parse(str(k.ir.TypeAttr(o.attributes["elem_type"]).value)))
    if "alignment" in o.attributes:
        align = max(align, k.ir.IntegerAttr(o.attributes["alignment"]).value)
    if k.frame is None:
        k.frame = k.b.new()
    at = -(-k.frame_bytes // max(4, align)) * max(4, align)
    k.frame_bytes = at + -(-size * count // 4) * 4
    return (k.const(at),)


def load_private(k: Lowering, address: int, bytes_: int, out: list[int], o: Any) -> None:
    for at, size, first, n in k.pieces(bytes_):
        k.emit("SCRATCH_LOAD", _frame(k, o), address, at, size, out[first : first + n])


def store_private(k: Lowering, address: int, bytes_: int, value: Any, o: Any) -> None:
    for at, size, first, n in k.pieces(bytes_):
        k.emit("SCRATCH_STORE", _frame(k, o), address, at, size, list(value[first : first + n]))


def _frame(k: Lowering, o: Any) -> int:
    if k.frame is None:
        raise k.fail("private memory without an alloca", o)
    return k.frame


def global_data(k: Lowering, name: str, o: Any) -> np.ndarray:
    """The bytes of a global outside LDS, made on first use; they live as long as the program."""
    if name in k.data:
        return k.data[name]
    found = next(
        (
            g.operation
            for g in k.module.regions[0].blocks[0].operations
            if g.operation.name == "llvm.mlir.global"
            and k.ir.StringAttr(g.operation.attributes["sym_name"]).value == name
        ),
        None,
    )
    if found is None:
        raise k.fail(f"the address of {name}, which is no global of the module", o)
    t = parse(str(k.ir.TypeAttr(found.attributes["global_type"]).value))
    size, _ = size_and_align(t)
    backing = np.zeros(size + 16, np.uint8)
    start = -backing.ctypes.data % 16
    k.data[name] = backing[start : start + size]
    if len(found.regions[0].blocks):
        raise k.fail(f"the global {name} with an initialiser region", o)
    if "value" in found.attributes:
        raw = _initial_bytes(k, found.attributes["value"], t, o)
        k.data[name][: len(raw)] = np.frombuffer(raw, np.uint8)
    return k.data[name]


def _initial_bytes(k: Lowering, attribute: Any, t: Type, o: Any) -> bytes:
    ir = k.ir
    if isinstance(attribute, ir.StringAttr):
        return ir.StringAttr(attribute).value_bytes
    element, count = t, 1
    while isinstance(element, (Array, Vec)):
        count *= element.count
        element = element.element  # type: ignore[assignment]
    bits = element.bits  # type: ignore[union-attr]
    if bits % 8:
        raise k.fail(f"a global of {element}", o)
    if isinstance(attribute, ir.DenseElementsAttr):
        dense = ir.DenseElementsAttr(attribute)
        if dense.is_splat:
            codes = [k._bits(dense.get_splat_value(), element, o)] * count
        else:
            inner = re.fullmatch(r"dense<(.*)> : .*", str(attribute), re.S)
            if inner and inner[1].startswith('"0x'):
                return bytes.fromhex(inner[1].strip('"')[2:])
            if not inner:
                raise k.fail("this initialiser", o)
            codes = [k._bits_of_text(x.strip(), element, o) for x in re.sub(r"[\[\]]", "", inner[1]).split(",")]
    else:
        codes = [k._bits(attribute, element, o)]
    return b"".join(code.to_bytes(bits // 8, "little") for code in codes)
