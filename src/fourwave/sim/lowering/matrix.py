"""Matrix instructions: MFMA on gfx942 and gfx950, WMMA on gfx1250.

A handler turns an operation's name and attributes into the words of matrix.h's struct Matrix. Which arch has which
form: LLVM's assembler (llvm-mc 22); operand sizes and layouts: matrix.h; what confirms them: docs/simulator_witnesses.md.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass
from typing import Any

from .base import Lowering, Value, handles
from .intrinsics import intrinsic

# The order of formats.h's enum that starts with T_F32.
FORMATS = (
    "f32", "f16", "bf16", "fp8", "bf8", "fp6", "bf6", "fp4", "fp8_fnuz", "bf8_fnuz", "e5m3", "e8m0", "xf32", "f64", "i8", "u8", "i4", "u4", "i32",
)  # fmt: skip
FORMAT = {name: i for i, name in enumerate(FORMATS)}
BITS = {
    "f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "fp6": 6, "bf6": 6, "fp4": 4, "fp8_fnuz": 8, "bf8_fnuz": 8, "xf32": 32, "f64": 64,
    "i8": 8, "u8": 8, "i32": 32,
}  # fmt: skip
# The f8f6f4 instructions' format codes (LLVM AMDGPUUsage, operand modifiers cbsz and blgp; matrix_a_fmt and matrix_b_fmt).
F8F6F4 = ("fp8", "bf8", "fp6", "bf6", "fp4")
_SPELLED = ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")  # the same in ROCDL


@dataclass
class Matrix:
    """The words of matrix.h's struct Matrix, in its order; formats by name."""

    m: int
    n: int
    k: int
    blocks: int
    format_a: str
    format_b: str
    format_c: str
    format_d: str
    chunk_a: int
    chunk_b: int
    cbsz: int = 0
    abid: int = 0
    blgp: int = 0
    negate: int = 0
    clamp: int = 0
    scale_block: int = 0
    scale_a: int = 0
    scale_b: int = 0
    scale_format_a: str = "e8m0"
    scale_format_b: str = "e8m0"
    fused: int = 0
    sparse: int = 0

    def words(self) -> list[int]:
        return [FORMAT[w] if isinstance(w, str) else w for w in astuple(self)]


def _emit(k: Lowering, o: Any, x: Matrix, a: Any, b: Any, c: Any, scales: tuple[Any, ...] = ()) -> Value:
    """Check the operands' sizes against the instruction's shape, and emit it."""
    wave = 64 if k.arch != "gfx1250" else 32
    for name, registers, side, element in (("A", a, x.m, x.format_a), ("B", b, x.n, x.format_b)):
        need = side * x.k * x.blocks * BITS[element] // (32 * wave)
        if len(registers) < need:
            raise k.fail(f"{o.name} with {len(registers)} registers of {name}, where {element} needs {need}", o)
    count = max(1, x.m * x.n * x.blocks * BITS[x.format_d] // (32 * wave))
    if len(c) != x.m * x.n * x.blocks * BITS[x.format_c] // (32 * wave):
        raise k.fail(f"{o.name} with {len(c)} registers of C", o)
    d = [k.b.new() for _ in range(count)]
    k.emit("MFMA", *x.words(), list(a), list(b), list(c), [r for s in scales for r in s], d)
    return tuple(d)


def _enum(o: Any, name: str, values: tuple[str, ...] = ()) -> int:
    """An integer or enum attribute as a number: its own, or the position of its spelling in `values`. Absent: 0."""
    if name not in o.attributes:
        return 0
    text = str(o.attributes[name])
    if number := re.fullmatch(r"(-?\d+)(?: : \w+)?", text):
        return int(number[1])
    word = re.sub(r"#rocdl<\w+ |[<>]", "", text)
    if word not in values:
        raise NotImplementedError(f"attribute {name} = {text}")
    return values.index(word)


_BLGP = (
    "none",
    "bcast_first_32",
    "bcast_second_32",
    "rotate_16_right",
    "bcast_first_16",
    "bcast_second_16",
    "bcast_third_16",
    "bcast_fourth_16",
)

# name -> (A's format, B's). Forms with a doubled K are gfx950's; xf32 is gfx942's; bf16 without 1k, 32x32x8i8 and
# 16x16x16i8 are neither's.
_BOTH = {
    "f32.32x32x1f32": "f32", "f32.16x16x1f32": "f32", "f32.4x4x1f32": "f32", "f32.32x32x2f32": "f32", "f32.16x16x4f32": "f32",
    "f32.32x32x4f16": "f16", "f32.16x16x4f16": "f16", "f32.4x4x4f16": "f16", "f32.32x32x8f16": "f16", "f32.16x16x16f16": "f16",
    "f32.32x32x4bf16.1k": "bf16", "f32.16x16x4bf16.1k": "bf16", "f32.4x4x4bf16.1k": "bf16", "f32.32x32x8bf16.1k": "bf16",
    "f32.16x16x16bf16.1k": "bf16",
    "i32.32x32x4i8": "i8", "i32.16x16x4i8": "i8", "i32.4x4x4i8": "i8", "i32.32x32x16.i8": "i8", "i32.16x16x32.i8": "i8",
    "f64.16x16x4f64": "f64", "f64.4x4x4f64": "f64",
    **{f"f32.{shape}.{a}.{b}": f"{a}.{b}" for shape in ("16x16x32", "32x32x16") for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}  # fmt: skip
_GFX942 = {"f32.16x16x8.xf32": "xf32", "f32.32x32x4.xf32": "xf32"}
_GFX950 = {
    "f32.16x16x32.f16": "f16", "f32.16x16x32.bf16": "bf16", "f32.32x32x16.f16": "f16", "f32.32x32x16.bf16": "bf16",
    "i32.16x16x64.i8": "i8", "i32.32x32x32.i8": "i8",
}  # fmt: skip
MFMA = {"gfx942": _BOTH | _GFX942, "gfx950": _BOTH | _GFX950}
# AMD's calculator: these take no BLGP on CDNA3 (blgp: False).
_NO_BLGP = re.compile(
    r"xf32|fp8|bf8|32x32x8f16|16x16x16f16|32x32x8bf16|16x16x16bf16|x16\.i8|x32\.i8|x64\.i8|x(32|16)\.b?f16"
)


@handles(*(f"rocdl.mfma.{name}" for name in (_BOTH | _GFX942 | _GFX950)))
def _mfma(k: Lowering, o: Any) -> Value:
    short = o.name.removeprefix("rocdl.mfma.")
    if short not in MFMA.get(k.arch, ()):
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    formats = (MFMA[k.arch][short].split(".") * 2)[:2]
    if k.arch == "gfx942":  # gfx942's 8-bit floats are the fnuz ones, gfx950's OCP's (CDNA3, CDNA4 ISA guides)
        formats = [f + "_fnuz" if f in ("fp8", "bf8") else f for f in formats]
    m, n, depth = (int(x) for x in re.findall(r"\d+", short.partition(".")[2])[:3])
    a, b, c = (k.operand(o, i) for i in range(3))
    blocks = len(a) * 32 * 64 // (m * depth * BITS[formats[0]])
    result = short.partition(".")[0]
    chunk = depth * m * blocks // 64
    x = Matrix(m, n, depth, blocks, formats[0], formats[1], result, result, chunk, chunk)
    neg = re.findall(r"neg_([abc])", str(o.attributes["blgp"])) if "blgp" in o.attributes else []
    blgp = sum(1 << "abc".index(side) for side in neg) or _enum(o, "blgp", _BLGP)
    cbsz, abid = _enum(o, "cbsz"), _enum(o, "abid")
    if result == "f64":  # CDNA3 ISA guide: BLGP of the F64 forms negates A, B, C
        x.negate = blgp
    elif blgp and _NO_BLGP.search(short):
        raise k.fail(f"{o.name} with blgp = {blgp}, which it does not take", o)
    else:
        x.blgp = blgp
    if (cbsz or abid) and (blocks == 1 or result == "f64" or 1 << cbsz > blocks or abid >= 1 << cbsz):
        raise k.fail(f"{o.name} with cbsz = {cbsz}, abid = {abid}: no such broadcast among {blocks} blocks", o)
    x.cbsz, x.abid = cbsz, abid
    if k.arch == "gfx942":  # groups of k that MMA-Sim found summed at once
        x.fused = {"f16": 8, "bf16": 8, "xf32": 4, "fp8_fnuz": 16, "bf8_fnuz": 16}.get(formats[0], 0)
    return _emit(k, o, x, a, b, c)


@handles("rocdl.mfma.scale.f32.16x16x128.f8f6f4", "rocdl.mfma.scale.f32.32x32x64.f8f6f4")
def _mfma_scale(k: Lowering, o: Any) -> Value:
    """(a, b, c, scale a, scale b). Literal zeros for both scales mean the unscaled instruction: so llc 22
    selects, whatever opsel says."""
    if k.arch != "gfx950":
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    m, _, depth = (int(x) for x in re.findall(r"\d+", o.name.partition("f32.")[2])[:3])
    formats = [F8F6F4[_enum(o, name, _SPELLED)] for name in ("cbsz", "blgp")]
    chunks = [16 if BITS[f] == 8 else 32 for f in formats]
    x = Matrix(m, m, depth, 1, formats[0], formats[1], "f32", "f32", chunks[0], chunks[1])
    a, b, c, scale_a, scale_b = (k.operand(o, i) for i in range(5))
    if [k.constant_of(k.operands[i]) for i in (3, 4)] == [0, 0]:
        return _emit(k, o, x, a, b, c)
    x.scale_block, x.scale_a, x.scale_b = 32, _enum(o, "opselA"), _enum(o, "opselB")
    return _emit(k, o, x, a, b, c, (scale_a, scale_b))


_SPARSE = {
    "f32.16x16x32.f16": "f16", "f32.32x32x16.f16": "f16", "f32.16x16x32.bf16": "bf16", "f32.32x32x16.bf16": "bf16",
    "i32.16x16x64.i8": "i8", "i32.32x32x32.i8": "i8",
    **{f"f32.{shape}.{a}.{b}": f"{a}.{b}" for shape in ("16x16x64", "32x32x32") for a in ("fp8", "bf8") for b in ("fp8", "bf8")},
}  # fmt: skip


@handles(*(f"rocdl.smfmac.{name}" for name in _SPARSE))
def _smfmac(k: Lowering, o: Any) -> Value:
    """(a, b, c, index): of each four k of A two are there, and two bits of the index for each say which.

    A lane's dense A has the layout of an MFMA with as many k, so A is spread out here. Layouts, cbsz and abid (which bits of the index count):
    AMD's matrix instruction calculator (CDNA3); gfx950's forms with a doubled K it does not have. No source says in which order they add.
    """
    if k.arch not in ("gfx942", "gfx950"):
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)
    short = o.name.removeprefix("rocdl.smfmac.")
    formats = (_SPARSE[short].split(".") * 2)[:2]
    bits = BITS[formats[0]]
    if k.arch == "gfx942":
        formats = [f + "_fnuz" if f in ("fp8", "bf8") else f for f in formats]
    m, _, depth = (int(x) for x in re.findall(r"\d+", short.partition(".")[2])[:3])
    a, b, c, index = (k.operand(o, i) for i in range(4))
    cbsz, abid = _enum(o, "cbsz"), _enum(o, "abid")
    held = depth * m // 64 // 2  # elements of A in a lane
    if cbsz == 0 and abid >= 32 // (2 * held):
        raise k.fail(f"{o.name} with abid = {abid}", o)
    if len(a) != held * bits // 32:
        raise k.fail(f"{o.name} with {len(a)} registers of A", o)
    shift, mask, zero = 0 if cbsz else abid * 2 * held, (1 << bits) - 1, k.const(0)
    values = [k.field(a[e * bits // 32], e * bits % 32, mask) for e in range(held)]
    places = [k.field(index[0], shift + 2 * e, 3) for e in range(held)]
    dense = []
    for first in range(0, held, 2):
        for at in range(4):
            place = k.const(at)
            later = k.out("SELECT", k.out("EQ", places[first + 1], place), values[first + 1], zero)
            dense.append(k.out("SELECT", k.out("EQ", places[first], place), values[first], later))
    per = 32 // bits
    words = []
    for first in range(0, len(dense), per):
        word = dense[first]
        for i in range(1, per):
            word = k.out("INSERT", word, dense[first + i], i * bits, mask)
        words.append(word)
    result = short.partition(".")[0]
    chunk = depth * m // 64
    x = Matrix(m, m, depth, 1, formats[0], formats[1], result, result, chunk, chunk, sparse=1)
    return _emit(k, o, x, tuple(words), b, c)


_MIXES = [f"{a}_{b}" for a in ("fp8", "bf8") for b in ("fp8", "bf8")]
# name -> format of A and B, or "A_B"
WMMA = {
    "f32.16x16x4.f32": "f32", "f32.16x16x32.f16": "f16", "f32.16x16x32.bf16": "bf16", "f16.16x16x32.f16": "f16", "bf16.16x16x32.bf16": "bf16",
    "bf16f32.16x16x32.bf16": "bf16", "i32.16x16x64.iu8": "iu8",
    **{f"{d}.16x16x{depth}.{mix}": mix for d in ("f32", "f16") for depth in (64, 128) for mix in _MIXES},
}  # fmt: skip


def _flag(o: Any, name: str) -> int:
    return int(name in o.attributes and "true" in str(o.attributes[name]))


def _gfx1250(k: Lowering, o: Any) -> None:
    if k.arch != "gfx1250":
        raise k.fail(f"{o.name}: {k.arch} does not have it", o)


def _plain_wmma(
    k: Lowering, o: Any, short: str, operands: list[Any], signs: tuple[int, int], negate: int, clamp: int
) -> Value:
    depth = int(re.findall(r"x(\d+)\.", short)[0])
    result = short.partition(".")[0]
    a, b = (WMMA[short].split("_") * 2)[:2]
    if a == "iu8":
        a, b = ("i8" if sign else "u8" for sign in signs)
    chunk = {32: 2, 16: 8, 8: 16}[BITS[a]]
    c = "f32" if result == "bf16f32" else result
    d = "bf16" if result == "bf16f32" else result
    x = Matrix(16, 16, depth, 1, a, b, c, d, chunk, chunk, negate=negate, clamp=clamp)
    return _emit(k, o, x, operands[0], operands[1], operands[2])


@handles(*(f"rocdl.wmma.{name}" for name in WMMA))
def _wmma(k: Lowering, o: Any) -> Value:
    """(a, b, c). reuseA and reuseB only tell the hardware that an operand comes again."""
    _gfx1250(k, o)
    signs = _flag(o, "signA"), _flag(o, "signB")
    negate = _enum(o, "modC", ("none", "neg", "abs", "neg_abs")) << 2
    return _plain_wmma(
        k, o, o.name.removeprefix("rocdl.wmma."), [k.operand(o, i) for i in range(3)], signs, negate, _flag(o, "clamp")
    )


def _immediate(k: Lowering, o: Any, index: int) -> int:
    value = k.constant_of(k.operands[index])
    if value is None:
        raise k.fail(f"{o.name} whose operand {index} is no constant", o)
    return value


def _short(k: Lowering, o: Any) -> str:
    return k.ir.StringAttr(o.attributes["intrin"]).value.removeprefix("llvm.amdgcn.wmma.")  # type: ignore[no-any-return]


@intrinsic(*(f"llvm.amdgcn.wmma.{name.replace('_', '.')}" for name in WMMA))
def _wmma_intrinsic(k: Lowering, o: Any) -> Value:
    """LLVM's operands (IntrinsicsAMDGPU.td): floats (a, b, mod c, c, reuse, reuse), those of 16 and 32 bits in LLVM 22
    and before with a sign flag before a and before b; integers (signed a, a, signed b, b, c, reuse, reuse, clamp)."""
    _gfx1250(k, o)
    short = re.sub(r"([fb][pf]8)\.([fb][pf]8)$", r"\1_\2", _short(k, o))
    if WMMA[short] == "iu8":
        signs = _immediate(k, o, 0) & 1, _immediate(k, o, 2) & 1
        clamp = _immediate(k, o, 7) & 1 if len(k.operands) > 7 else 0
        return _plain_wmma(k, o, short, [k.operand(o, i) for i in (1, 3, 4)], signs, 0, clamp)
    at = [0, 1, 2, 3]
    if len(k.operands) == 8:
        if _immediate(k, o, 0) & 1 or _immediate(k, o, 2) & 1:
            raise k.fail(f"{o.name} that negates A or B", o)
        at = [1, 3, 4, 5]
    operands = [k.operand(o, at[i]) for i in (0, 1, 3)]
    return _plain_wmma(k, o, short, operands, (0, 0), _immediate(k, o, at[2]) << 2, 0)


def _scaled_wmma(
    k: Lowering,
    o: Any,
    name: str,
    formats: list[str],
    operands: list[Any],
    negate: int,
    a: tuple[int, str],
    b: tuple[int, str],
) -> Value:
    """operands: a, b, c, scale a, scale b; a, b: which half of the lanes holds the scales, and their format.
    A scale register's bytes are the K blocks, of 32 (scale16: 16), its lane is the row."""
    m = 32 if "32x16" in name else 16
    chunks = [16 if BITS[f] == 8 else 32 for f in formats]
    block = 16 if "scale16" in name else 32
    if any(len(s) != 32 // block for s in operands[3:]):
        raise k.fail(f"{o.name} with scales of {len(operands[3])} and {len(operands[4])} registers", o)
    x = Matrix(
        m, 16, 128, 1, formats[0], formats[1], "f32", "f32", chunks[0], chunks[1], negate=negate, scale_block=block,
        scale_a=a[0], scale_b=b[0], scale_format_a=a[1], scale_format_b=b[1],
    )  # fmt: skip
    return _emit(k, o, x, operands[0], operands[1], operands[2], (operands[3], operands[4]))


_SCALE_FORMATS = ("e8m0", "e5m3", "fp8")
_SCALED_WMMA = [f"scale{s}.f32.{shape}" for s in ("", "16") for shape in ("16x16x128.f8f6f4", "32x16x128.f4")]


@handles(*(f"rocdl.wmma.{name}" for name in _SCALED_WMMA))
def _wmma_scale(k: Lowering, o: Any) -> Value:
    _gfx1250(k, o)
    formats = ["fp4", "fp4"] if "32x16" in o.name else [F8F6F4[_enum(o, f"fmt{side}", _SPELLED)] for side in "AB"]
    a, b = (
        (_enum(o, f"scale{s}Type", ("row0", "row1")), _SCALE_FORMATS[_enum(o, f"fmtScale{s}", ("e8", "e5m3", "e4m3"))])
        for s in "AB"
    )
    negate = _enum(o, "modC", ("none", "neg", "abs", "neg_abs")) << 2
    return _scaled_wmma(k, o, o.name, formats, [k.operand(o, i) for i in range(5)], negate, a, b)


@intrinsic(*(f"llvm.amdgcn.wmma.{name}" for name in _SCALED_WMMA))
def _wmma_scale_intrinsic(k: Lowering, o: Any) -> Value:
    """LLVM's operands: (format a, a, format b, b, mod c, c, half a, scale format a, scale a, half b, scale format b,
    scale b, reuse, reuse), without the formats where they are fixed."""
    _gfx1250(k, o)
    name = _short(k, o)
    at = list(range(12))
    if "32x16" in name:
        formats, at = ["fp4", "fp4"], [-1, 0, -1, 1, *range(2, 10)]
    else:
        formats = [F8F6F4[_immediate(k, o, i)] for i in (0, 2)]
    a, b = ((_immediate(k, o, at[i]), _SCALE_FORMATS[_immediate(k, o, at[i + 1])]) for i in (6, 9))
    return _scaled_wmma(
        k, o, name, formats, [k.operand(o, at[i]) for i in (1, 3, 5, 8, 11)], _immediate(k, o, at[4]) << 2, a, b
    )
