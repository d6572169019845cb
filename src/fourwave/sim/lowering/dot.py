"""Dot products of packed elements within a lane.

Which arch has which: what llc 22 selects. Sums: LLVM, IntrinsicsAMDGPU.td (c plus the products). Clamping keeps an integer sum within 32 bits.
"""

from __future__ import annotations

import re
from typing import Any

from .base import Lowering, Value, handles

_GFX9, _GFX950, _GFX1250 = ("gfx942", "gfx950"), ("gfx950",), ("gfx1250",)
_EVERY = (*_GFX9, *_GFX1250)
# name -> archs
_INTEGER = {
    "sdot2": _GFX9, "udot2": _GFX9, "sdot4": _EVERY, "udot4": _EVERY, "sdot8": _EVERY, "udot8": _EVERY, "sudot4": _GFX1250, "sudot8": _GFX1250,
}  # fmt: skip
_FLOAT = {"fdot2": _GFX9, "fdot2.f32.bf16": _GFX950}


def _flag(o: Any, name: str) -> int:
    return int(name in o.attributes and "true" in str(o.attributes[name]))


def _require(k: Lowering, o: Any, archs: tuple[str, ...]) -> None:
    if k.arch not in archs:
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)


@handles(*(f"rocdl.{name}" for name in _INTEGER))
def _integer_dot(k: Lowering, o: Any) -> Value:
    name = o.name.removeprefix("rocdl.")
    _require(k, o, _INTEGER[name])
    unsigned = name.startswith("u")
    signs = (_flag(o, "signA"), _flag(o, "signB")) if name.startswith("su") else (int(not unsigned),) * 2
    a, b, c = (k.operand(o, i)[0] for i in range(3))
    return (k.out("DOT", a, b, c, 32 // int(re.findall(r"\d", name)[0]), *signs, int(not unsigned), _flag(o, "clamp")),)


@handles(*(f"rocdl.{name}" for name in _FLOAT))
def _float_dot(k: Lowering, o: Any) -> Value:
    """c plus the first product, plus the second, each sum rounded: the order of the ISA guides' pseudo code for V_DOT2_F32_F16. They do not say how
    the hardware rounds inside."""
    _require(k, o, _FLOAT[o.name.removeprefix("rocdl.")])
    if _flag(o, "clamp"):
        raise k.fail(f"{o.name} that clamps", o)
    element = k.operand_type(o, 0).element.name
    sum_ = k.operand(o, 2)[0]
    for a, b in zip(*(k.elements(k.operand(o, i), k.operand_type(o, i)) for i in range(2))):
        sum_ = k.out("FMA", k.to_f32(a[0], element), k.to_f32(b[0], element), sum_)
    return (sum_,)
