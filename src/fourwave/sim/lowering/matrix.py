"""Matrix instructions."""

from __future__ import annotations

import re
from typing import Any

from .base import Lowering, Value, handles

_MFMA_TYPES = {"f32": 0, "f16": 1, "bf16": 2}
# Operations that are one name of the matrix unit: D rows, K, element type. gfx942 and gfx950 only where the ISA has them.
_MFMA = {
    "mfma.f32.16x16x4f32": (16, 4, "f32"), "mfma.f32.32x32x2f32": (32, 2, "f32"),
    "mfma.f32.16x16x16f16": (16, 16, "f16"), "mfma.f32.32x32x8f16": (32, 8, "f16"),
    "mfma.f32.16x16x16bf16.1k": (16, 16, "bf16"), "mfma.f32.32x32x8bf16.1k": (32, 8, "bf16"),
    "mfma.f32.16x16x32.f16": (16, 32, "f16"), "mfma.f32.16x16x32.bf16": (16, 32, "bf16"),
    "mfma.f32.32x32x16.f16": (32, 16, "f16"), "mfma.f32.32x32x16.bf16": (32, 16, "bf16"),
}  # fmt: skip
_GFX950_ONLY = {name for name in _MFMA if re.search(r"x(32|16)\.b?f16$", name)}


@handles(*(f"rocdl.{name}" for name in _MFMA))
def _mfma(k: Lowering, o: Any) -> Value:
    short = o.name.partition(".")[2]
    rows, depth, element = _MFMA[short]
    if short in _GFX950_ONLY and k.arch != "gfx950":
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    for name in ("cbsz", "abid"):
        if k.integer_attribute(o, name):
            raise k.fail(f"{o.name} with {name}", o)
    if "blgp" in o.attributes and not re.search(r"none|^0", str(o.attributes["blgp"])):
        raise k.fail(f"{o.name} with {o.attributes['blgp']}", o)
    a, b, c = (k.operand(o, i) for i in range(3))
    d = [k.b.new() for _ in c]
    k.emit("MFMA", rows, depth, _MFMA_TYPES[element], len(a), list(a), list(b), list(c), d)
    return tuple(d)
