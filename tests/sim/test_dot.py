"""Dot products within a lane, bit for bit.

Sources
  Operands and sums: LLVM, IntrinsicsAMDGPU.td: c plus the products of the elements; clamp keeps the sum within 32 bits, signed or not.
  Which arch has which: llc 22 (sdot4 is V_DOT4_I32_IU8 with both signs on gfx1250).
  fdot2: order of the sums as in the ISA guides' pseudo code of V_DOT2_F32_F16. They are silent on roundings inside: exact sums are tested
  bit for bit, others within two roundings.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from machine import arch, itemwise, lower

from fourwave.sim import UnknownOperation

ARCHS = {
    "sdot2": ("gfx942", "gfx950"), "udot2": ("gfx942", "gfx950"), "sudot4": ("gfx1250",), "sudot8": ("gfx1250",),
    "fdot2": ("gfx942", "gfx950"), "fdot2.f32.bf16": ("gfx950",),
}  # fmt: skip
pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")


def lacking(name: str, text: str, types: str) -> bool:
    """Whether the arch lacks it; then it must say so."""
    if arch() in ARCHS.get(name, (arch(),)):
        return False
    with pytest.raises(UnknownOperation, match=f"{name}: {arch()} does not have it"):
        lower("  " + text, types)
    return True


def parts(x: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    fields = (x[:, None].astype(np.int64) >> np.arange(0, 32, bits)) & ((1 << bits) - 1)
    return np.where(signed & (fields >> (bits - 1) == 1), fields - (1 << bits), fields)


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize(
    ("name", "sign_a", "sign_b"),
    [*((f"{s}dot{n}", s == "s", s == "s") for s in "su" for n in (2, 4, 8)), *((f"sudot{n}", a, b) for n in (4, 8) for a in (False, True) for b in (False, True))],
)  # fmt: skip
def test_integer_dots(name: str, sign_a: bool, sign_b: bool, clamp: bool) -> None:
    count = int(name[-1])
    t = "vector<2xi16>" if count == 2 else "i32"
    signs = f", signA = {str(sign_a).lower()}, signB = {str(sign_b).lower()}" if name.startswith("su") else ""
    text = f'%r = "rocdl.{name}"(%a, %b, %c) <{{clamp = {str(clamp).lower()}{signs}}}> : ({t}, {t}, i32) -> i32'
    if lacking(name, text, f"%a: {t}, %b: {t}, %c: i32"):
        return
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 1 << 32, 192, dtype=np.uint32) for _ in range(3))
    a[:3], b[:3] = (0xFFFFFFFF, 0x80008000, 0x88888888), (0xFFFFFFFF, 0x80008000, 0x77777777)
    a[6], b[6] = 0xFFFFFFFF, 0x77777777
    c[:7] = (0x7FFFFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0, 0x80000001, 0x7FFFFFFF)
    convert = (lambda x: x.view(np.uint16).reshape(-1, 2)) if count == 2 else (lambda x: x)
    body = f"\n  {text}"
    got = itemwise(body, [(t, convert(a)), (t, convert(b)), ("i32", c)], "i32")
    signed = not name.startswith("u")
    start = c.view(np.int32).astype(np.int64) if signed else c.astype(np.int64)
    sums = start + (parts(a, 32 // count, sign_a) * parts(b, 32 // count, sign_b)).sum(axis=1)
    low, high = (-(1 << 31), (1 << 31) - 1) if signed else (0, (1 << 32) - 1)
    assert (sums > high).any() or (sums < low).any()
    want = (np.clip(sums, low, high) if clamp else sums) & 0xFFFFFFFF
    np.testing.assert_array_equal(got, want.astype(np.uint32))


@pytest.mark.parametrize("name", ["fdot2", "fdot2.f32.bf16"])
def test_float_dots(name: str) -> None:
    element, dtype = ("f16", np.float16) if name == "fdot2" else ("bf16", ml_dtypes.bfloat16)
    v = f"vector<2x{element}>"
    text = f'%r = "rocdl.{name}"(%a, %b, %c) <{{clamp = false}}> : ({v}, {v}, f32) -> f32'
    if lacking(name, text, f"%a: {v}, %b: {v}, %c: f32"):
        return
    rng = np.random.default_rng(2)
    for exact in (True, False):
        draw = (lambda n: rng.integers(-64, 65, n) / 8) if exact else (lambda n: rng.standard_normal(n))
        a, b = (draw((128, 2)).astype(dtype) for _ in range(2))
        c = draw(128).astype(np.float32)
        got = itemwise(
            f"\n  {text}", [(v, a.view(np.uint16)), (v, b.view(np.uint16)), ("f32", c.view(np.uint32))], "f32"
        ).view(np.float32)
        products = a.astype(np.float64) * b.astype(np.float64)
        want = c + products.sum(axis=1)
        if exact:
            np.testing.assert_array_equal(got, want)
        else:
            assert np.all(np.abs(got - want) <= 2**-24 * 2 * (np.abs(c) + np.abs(products).sum(axis=1)))
    with pytest.raises(UnknownOperation, match="that clamps"):
        lower("  " + text.replace("false", "true"), f"%a: {v}, %b: {v}, %c: f32")
