"""Types of the `llvm` dialect, parsed from their text into small tuples-of-facts that lowering and the host interpreter share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

FLOAT_BITS = {
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "f8E4M3FN": 8,
    "f8E4M3FNUZ": 8,
    "f8E5M2": 8,
    "f8E5M2FNUZ": 8,
    "f8E8M0FNU": 8,
}


@dataclass(frozen=True)
class Int:
    bits: int


@dataclass(frozen=True)
class Float:
    name: str

    @property
    def bits(self) -> int:
        return FLOAT_BITS[self.name]


@dataclass(frozen=True)
class Ptr:
    space: int

    @property
    def bits(self) -> int:
        """Width on AMDGPU: LDS (3) and private (5) pointers are 32-bit, buffer resources (8) 128, the rest 64."""
        return {3: 32, 5: 32, 2: 32, 6: 32, 8: 128}.get(self.space, 64)


@dataclass(frozen=True)
class Vec:
    count: int
    element: Int | Float | Ptr

    @property
    def bits(self) -> int:
        return self.count * self.element.bits


@dataclass(frozen=True)
class Struct:
    fields: tuple
    packed: bool


@dataclass(frozen=True)
class Array:
    count: int
    element: object


Type = Int | Float | Ptr | Vec | Struct | Array


@lru_cache(maxsize=4096)
def parse(text: str) -> Type:
    """The type that `text` spells. Raises NotImplementedError for one the simulator does not know."""
    value, rest = _parse(text.strip())
    if rest.strip():
        raise NotImplementedError(f"the simulator does not know the type {text!r}")
    return value


def _parse(text: str) -> tuple[Type, str]:
    text = text.removeprefix("!llvm.").lstrip()
    if m := re.match(r"(index)\b", text):
        return Int(64), text[m.end() :]
    if m := re.match(r"i(\d+)", text):
        if int(m[1]) > 32 and int(m[1]) % 32:  # its top register would hold bits above the value
            raise NotImplementedError(f"the simulator does not know the type i{m[1]}")
        return Int(int(m[1])), text[m.end() :]
    if m := re.match(r"(bf16|f8E\w+|f16|f32|f64)", text):
        if m[1] in FLOAT_BITS:
            return Float(m[1]), text[m.end() :]
    if m := re.match(r"ptr(?:<(\d+)>)?", text):
        return Ptr(int(m[1] or 0)), text[m.end() :]
    if m := re.match(r"(vector|vec)<\s*(\d+)\s*x\s*", text):
        element, rest = _parse(text[m.end() :])
        return Vec(int(m[2]), element), _close(rest)  # type: ignore[arg-type]
    if m := re.match(r"array<\s*(\d+)\s*x\s*", text):
        element, rest = _parse(text[m.end() :])
        return Array(int(m[1]), element), _close(rest)
    if m := re.match(r"struct<", text):
        rest = text[m.end() :].lstrip()
        packed = rest.startswith("packed")
        rest = rest.removeprefix("packed").lstrip().removeprefix("(").lstrip()
        fields = []
        while not rest.startswith(")"):
            field, rest = _parse(rest)
            fields.append(field)
            rest = rest.lstrip().removeprefix(",").lstrip()
        return Struct(tuple(fields), packed), _close(rest[1:])
    raise NotImplementedError(f"the simulator does not know the type {text!r}")


def _close(rest: str) -> str:
    rest = rest.lstrip()
    if not rest.startswith(">"):
        raise NotImplementedError(f"unbalanced type near {rest!r}")
    return rest[1:]


def size_and_align(t: Type) -> tuple[int, int]:
    """Bytes and alignment in memory, by the AMDGPU data layout (and the host's, which agrees for these types)."""
    if isinstance(t, Struct):
        size, align = 0, 1
        for f in t.fields:
            s, a = size_and_align(f)
            a = 1 if t.packed else a
            size = -(-size // a) * a + s
            align = max(align, a)
        return -(-size // align) * align, align
    if isinstance(t, Array):
        s, a = size_and_align(t.element)  # type: ignore[arg-type]
        return s * t.count, a
    size = max(1, -(-t.bits // 8))
    if isinstance(t, Vec):
        power = 1 << (size - 1).bit_length()
        return power, power
    return size, size


def field_offset(t: Struct, index: int) -> int:
    at = 0
    for i, f in enumerate(t.fields):
        s, a = size_and_align(f)
        a = 1 if t.packed else a
        at = -(-at // a) * a
        if i == index:
            return at
        at += s
    raise IndexError(index)


def dwords(t: Type) -> int:
    """Registers a value of the type takes (a vector of i1 takes one an element)."""
    if isinstance(t, Vec) and t.element == Int(1):
        return t.count
    assert isinstance(t, (Int, Float, Ptr, Vec))
    return -(-t.bits // 32)
