"""Conversions between float32, float16, bfloat16 and the 8-, 6- and 4-bit float formats; the median of three.

Sources: AMD CDNA3 and CDNA4 ISA guides (V_CVT_PK_FP8_F32, V_CVT_SR_FP8_F32, V_CVT_SCALEF32_*), LLVM's AMDGPU backend
for which bytes a selector names, MLIR's ROCDL dialect. Only the exponent of a float32 scale counts; packing divides by
it, unpacking multiplies, and all of it is rounded once. 32 six-bit codes are one little-endian stream; 2xpk16
interleaves its two sources (AMD's FPSan tests state both as seen on gfx950). The 8-bit formats are the fnuz ones on
gfx942, OCP's on gfx950 and gfx1250. Rounding, overflow and NaN: encode_small in formats.h.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..ir_types import Vec
from .base import Lowering, Value, handles
from .intrinsics import intrinsic
from .matrix import BITS, FORMAT

_MANTISSA = {"f32": 23, "f16": 10, "bf16": 7}
_SMALL = ("fp8", "bf8", "fp6", "bf6", "fp4")


def _format(k: Lowering, name: str) -> str:
    return name + "_fnuz" if k.arch == "gfx942" and name in ("fp8", "bf8") else name


def _require(k: Lowering, o: Any, *archs: str) -> None:
    if k.arch not in archs:
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)


def narrow(
    k: Lowering, value: int, source: str, target: str, *, scale: int | None = None, seed: int | None = None
) -> int:
    """One element: a register that holds it as `source` to one with its code in `target`, upper bits clear."""
    zero = k.const(0)
    flags = (scale is not None) | (seed is not None) << 1
    return k.out(
        "NARROW", k.to_f32(value, source), zero if seed is None else seed, zero if scale is None else scale,
        FORMAT[_format(k, target)], flags, _MANTISSA[source],
    )  # fmt: skip


def widen(k: Lowering, code: int, source: str, target: str, scale: int | None = None) -> int:
    """A code of `source` (bits above it are ignored) as `target`."""
    return k.out(
        "WIDEN",
        code,
        k.const(0) if scale is None else scale,
        FORMAT[_format(k, source)],
        int(scale is not None),
        FORMAT[target],
    )


def _pack(k: Lowering, codes: Sequence[int], bits: int) -> list[int]:
    """Codes as one little-endian stream of dwords."""
    words: list[int] = []
    for i, code in enumerate(codes):
        at, shift = i * bits // 32, i * bits % 32
        if at == len(words):
            words.append(code if shift == 0 else k.const(0))
            if shift == 0:
                continue
        mask = (1 << bits) - 1
        words[at] = k.out("INSERT", words[at], code, shift, mask & (0xFFFFFFFF >> shift))
        if shift + bits > 32:
            words.append(k.field(code, 32 - shift, mask >> (32 - shift)))
    return words


def _unpack(k: Lowering, words: Sequence[int], bits: int, count: int) -> list[int]:
    codes = []
    for i in range(count):
        at, shift = i * bits // 32, i * bits % 32
        code = k.field(words[at], shift, ((1 << bits) - 1) & (0xFFFFFFFF >> shift))
        if shift + bits > 32:
            code = k.out("INSERT", code, words[at + 1], 32 - shift, (1 << (shift + bits - 32)) - 1)
        codes.append(code)
    return codes


def _put(k: Lowering, old: int, value: int, index: int, bits: int) -> tuple[int]:
    """`value` in place number `index`, `bits` wide, of the register `old`."""
    return (k.out("INSERT", old, value, index * bits, (1 << bits) - 1),)


def _select(k: Lowering, o: Any, *names: str) -> int:
    for name in names:
        if name in o.attributes:
            text = str(o.attributes[name])
            return int(text == "true") if text in ("true", "false") else k.integer_attribute(o, name)
    raise k.fail(f"{o.name} without {' or '.join(names)}", o)


def _values(k: Lowering, o: Any, index: int) -> list[int]:
    """The elements of an operand, one register each."""
    return [e[0] for e in k.elements(k.operand(o, index), k.operand_type(o, index))]


def _result(k: Lowering, o: Any, values: Sequence[int]) -> Value:
    return k.pack([(v,) for v in values], k.result_type(o))


@handles("rocdl.cvt.pk.fp8.f32", "rocdl.cvt.pk.bf8.f32")
def _pk_narrow(k: Lowering, o: Any) -> Value:
    """(a, b, old): two codes into the half of `old` that wordSel names."""
    target = o.name.split(".")[3]
    codes = [narrow(k, k.operand(o, i)[0], "f32", target) for i in range(2)]
    return _put(k, k.operand(o, 2)[0], _pack(k, codes, 8)[0], _select(k, o, "wordSel"), 16)


@handles("rocdl.cvt.sr.fp8.f32", "rocdl.cvt.sr.bf8.f32")
def _sr_narrow(k: Lowering, o: Any) -> Value:
    """(a, seed, old): one code into the byte of `old` that byteSel names."""
    code = narrow(k, k.operand(o, 0)[0], "f32", o.name.split(".")[3], seed=k.operand(o, 1)[0])
    return _put(k, k.operand(o, 2)[0], code, _select(k, o, "byteSel"), 8)


@handles("rocdl.cvt.f32.fp8", "rocdl.cvt.f32.bf8")
def _one_widen(k: Lowering, o: Any) -> Value:
    byte = k.field(k.operand(o, 0)[0], 8 * _select(k, o, "byteSel"), 0xFF)
    return (widen(k, byte, o.name.split(".")[3], "f32"),)


@handles("rocdl.cvt.pk.f32.fp8", "rocdl.cvt.pk.f32.bf8")
def _pk_widen(k: Lowering, o: Any) -> Value:
    word, first = k.operand(o, 0)[0], 2 * _select(k, o, "wordSel")
    return tuple(widen(k, k.field(word, 8 * (first + i), 0xFF), o.name.split(".")[4], "f32") for i in range(2))


@handles("rocdl.cvt.pkrtz")
def _pkrtz(k: Lowering, o: Any) -> Value:
    """Two float32 to float16, toward zero."""
    halves = [k.out("F32_TO_F16_RTZ", k.operand(o, i)[0]) for i in range(2)]
    return (k.out("INSERT", halves[0], halves[1], 16, 0xFFFF),)


_WIDE = ("f32", "f16", "bf16")


@handles(*(f"rocdl.cvt.scalef32.pk.{t}.{s}" for t in ("fp8", "bf8", "fp4") for s in _WIDE))
def _scaled_pk_narrow(k: Lowering, o: Any) -> Value:
    """(old, a, b, scale), or (old, vector of two, scale): two codes into a half (fp4: a byte) of `old`."""
    _require(k, o, "gfx950")
    target, source = o.name.split(".")[4:]
    values = [k.operand(o, 1)[0], k.operand(o, 2)[0]] if source == "f32" else _values(k, o, 1)
    scale = k.operand(o, len(k.operands) - 1)[0]
    codes = [narrow(k, v, source, target, scale=scale) for v in values]
    word = _pack(k, codes, BITS[target])[0]
    return _put(k, k.operand(o, 0)[0], word, _select(k, o, "dstSelIndex", "dstLoHiSel"), 2 * BITS[target])


@handles(*(f"rocdl.cvt.scalef32.sr.{t}.{s}" for t in ("fp8", "bf8", "pk.fp4") for s in _WIDE))
def _scaled_sr_narrow(k: Lowering, o: Any) -> Value:
    """(old, value, seed, scale): a code into a byte of `old`; fp4: two, with the same seed (HIP's host model)."""
    _require(k, o, "gfx950")
    target, source = o.name.split(".")[-2:]
    seed, scale = k.operand(o, 2)[0], k.operand(o, 3)[0]
    codes = [narrow(k, v, source, target, scale=scale, seed=seed) for v in _values(k, o, 1)]
    return _put(k, k.operand(o, 0)[0], _pack(k, codes, BITS[target])[0], _select(k, o, "dstSelIndex"), 8)


@handles(*(f"rocdl.cvt.scalef32.pk.{t}.{s}" for t in _WIDE for s in ("fp8", "bf8", "fp4")))
def _scaled_pk_widen(k: Lowering, o: Any) -> Value:
    """(packed, scale): the two codes in a half (fp4: a byte) of the register."""
    _require(k, o, "gfx950")
    target, source = o.name.split(".")[4:]
    bits = BITS[source]
    first = 2 * bits * _select(k, o, "srcSelIndex", "srcLoHiSel")
    word, scale = k.operand(o, 0)[0], k.operand(o, 1)[0]
    return _result(
        k, o, [widen(k, k.field(word, first + bits * i, (1 << bits) - 1), source, target, scale) for i in range(2)]
    )


@handles("rocdl.cvt.scalef32.f32.fp8", "rocdl.cvt.scalef32.f32.bf8")
def _scaled_one_widen(k: Lowering, o: Any) -> Value:
    _require(k, o, "gfx950")
    byte = k.field(k.operand(o, 0)[0], 8 * _select(k, o, "srcSelIndex"), 0xFF)
    return (widen(k, byte, o.name.split(".")[4], "f32", k.operand(o, 1)[0]),)


@handles("rocdl.cvt.scalef32.f16.fp8", "rocdl.cvt.scalef32.f16.bf8")
def _scaled_one_widen_half(k: Lowering, o: Any) -> Value:
    """(old, packed, scale): the byte srcSelIndex to the half dstLoHiSel of `old`."""
    _require(k, o, "gfx950")
    byte = k.field(k.operand(o, 1)[0], 8 * _select(k, o, "srcSelIndex"), 0xFF)
    half = widen(k, byte, o.name.split(".")[4], "f16", k.operand(o, 2)[0])
    return _put(k, k.operand(o, 0)[0], half, _select(k, o, "dstLoHiSel"), 16)


@handles(
    *(f"rocdl.cvt.scalef32.2xpk16.{t}.f32" for t in ("fp6", "bf6")),
    *(f"rocdl.cvt.scalef32.pk32.{t}.{s}" for t in ("fp6", "bf6") for s in ("f16", "bf16")),
    *(f"rocdl.cvt.scalef32.pk8.{t}.{s}" for t in ("fp8", "bf8", "fp4") for s in _WIDE),
    *(f"rocdl.cvt.scalef32.pk16.{t}.{s}" for t in ("fp6", "bf6") for s in _WIDE),
    *(f"rocdl.cvt.scalef32.sr.pk32.{t}.{s}" for t in ("fp6", "bf6") for s in _WIDE),
    *(f"rocdl.cvt.scalef32.sr.pk8.{t}.{s}" for t in ("fp8", "bf8", "fp4") for s in _WIDE),
    *(f"rocdl.cvt.scalef32.sr.pk16.{t}.{s}" for t in ("fp6", "bf6") for s in _WIDE),
)
def _scaled_vector_narrow(k: Lowering, o: Any) -> Value:
    """(vector, scale), (two vectors, scale) or (vector, seed, scale): every element has the same scale and, by HIP's
    host model, seed."""
    *_, shape, target, source = o.name.split(".")
    _require(k, o, "gfx950" if "32" in shape or "2x" in shape else "gfx1250")
    scale = k.operand(o, len(k.operands) - 1)[0]
    seed = k.operand(o, 1)[0] if ".sr." in o.name else None
    values = _values(k, o, 0)
    if shape == "2xpk16":
        values = [v for pair in zip(values, _values(k, o, 1)) for v in pair]
    codes = [narrow(k, v, source, target, scale=scale, seed=seed) for v in values]
    return tuple(_pack(k, codes, BITS[target]))


@handles(*(f"rocdl.cvt.scalef32.pk32.{t}.{s}" for t in _WIDE for s in ("fp6", "bf6")))
def _scaled_vector_widen(k: Lowering, o: Any) -> Value:
    _require(k, o, "gfx950")
    target, source = o.name.split(".")[4:]
    t = k.result_type(o)
    assert isinstance(t, Vec)
    codes = _unpack(k, k.operand(o, 0), BITS[source], t.count)
    return _result(k, o, [widen(k, c, source, target, k.operand(o, 1)[0]) for c in codes])


@handles("rocdl.fmed3")
def _fmed3(k: Lowering, o: Any) -> Value:
    name = k._float_element(k.result_type(o))
    if not re.fullmatch("f32|f16|bf16", name):
        raise k.fail(f"{o.name} on {name}", o)
    return k._each(o, lambda *x: (k.from_f32(k.out("FMED3", *(k.to_f32(v[0], name) for v in x)), name),))


@intrinsic("llvm.canonicalize")
def _canonicalize(k: Lowering, o: Any) -> Value:
    """Times one: a signalling NaN becomes quiet, subnormals stay (LLVM Language Reference; AMDGPUUsage, denormal mode
    of amdhsa kernels)."""
    if k._float_element(k.result_type(o)) != "f32":
        raise k.fail(f"llvm.canonicalize of {o.results[0].type}", o)
    return k._each(o, lambda a: (k.out("FMUL", a[0], k.const(0x3F800000)),))
