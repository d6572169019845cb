"""Inline assembly: the instructions that kernels write as text.

Grammar (LLVM's AMDGPU assembler): one instruction a line, `;` or `//` begins a comment; operands are $N, integers, `m0`, `off`; modifiers follow
the last operand. Constraints (LLVM LangRef, inline assembler constraints): =v =a =s outputs, v a s inputs, a number ties an input to that output,
~{...} names what is clobbered. m0 keeps its value from one block to the next. Unknown mnemonics, operands and modifiers raise.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..ir_types import Type, dwords, parse
from ..program import FUNARY, Block
from .base import HANDLERS, WAVE_SIZE, Lowering, Regs, Value, handles


@dataclass
class Slot:
    """One operand of the block, $N: its registers now, and its type where it has an MLIR one."""

    registers: Regs
    type: Type | None
    output: bool


@dataclass
class State:
    """What lines of one block hand to later ones besides operands."""

    scc: int | None = None  # register of the scalar condition code
    labels: dict[str, Block] = field(default_factory=dict)  # forward branches' targets, not reached yet


class Line:
    """One instruction: mnemonic, operand texts, modifiers (name -> text; "" for a bare word)."""

    def __init__(self, k: Lowering, o: Any, text: str, slots: list[Slot], state: State) -> None:
        self.k, self.o, self.text, self.slots, self.state = k, o, text, slots, state
        self.mnemonic, _, rest = text.partition(" ")
        parts = [p.strip() for p in re.split(r",(?![^\[(]*[\])])", rest)] if rest.strip() else []
        words = re.findall(r"[\w$]+:\[[^\]]*\]|\S+", parts[-1]) if parts else []
        self.operands = parts[:-1] + words[:1]
        self.modifiers = {name: value for name, _, value in (w.partition(":") for w in words[1:])}

    def fail(self, what: str) -> Exception:
        return self.k.fail(f"inline assembly `{self.text}`: {what}", self.o)

    def take(self, *known: str) -> None:
        """Refuse modifiers other than `known`."""
        for name in self.modifiers:
            if name not in known:
                raise self.fail(f"the modifier {name}")

    def number(self, name: str) -> int:
        """An integer modifier; 0 where it is not written."""
        return int(self.modifiers.get(name, "0") or "0", 0)

    def bits(self, name: str) -> list[int]:
        return [int(x) for x in re.findall(r"\d+", self.modifiers.get(name, ""))]

    def count(self, *allowed: int) -> None:
        if len(self.operands) not in allowed:
            raise self.fail(f"{len(self.operands)} operands")

    def slot(self, index: int) -> Slot | None:
        m = re.fullmatch(r"\$\{?(\d+)\}?", self.operands[index])
        if not m:
            return None
        if int(m[1]) >= len(self.slots):
            raise self.fail(f"the operand {self.operands[index]}")
        return self.slots[int(m[1])]

    def read(self, index: int, size: int = 1) -> Regs:
        """The `size` dwords of an operand; an integer is the same in all lanes."""
        text = self.operands[index]
        if slot := self.slot(index):
            if len(slot.registers) != size:
                raise self.fail(f"the operand {text} of {len(slot.registers)} dwords where {size} are read")
            return slot.registers
        if size == 1 and text == "m0":
            return (m0(self.k),)
        try:
            value = int(text, 0)
        except ValueError:
            raise self.fail(f"the operand {text}") from None
        return tuple(self.k.const(value if i == 0 else -(value < 0)) for i in range(size))

    def write(self, index: int, registers: Regs) -> None:
        if self.operands[index] == "m0" and len(registers) == 1:
            self.k.emit("MOVN", [(m0(self.k), registers[0])])
            return
        slot = self.slot(index)
        if slot is None or not slot.output:
            raise self.fail(f"a result in {self.operands[index]}")
        if len(slot.registers) != len(registers):
            raise self.fail(f"a result of {len(registers)} dwords in {self.operands[index]} of {len(slot.registers)}")
        slot.registers = registers


def m0(k: Lowering) -> int:
    """The register that stands for m0 in the whole kernel; several instructions write it."""
    if k.m0 is None:
        k.m0 = k.b.new()
    return k.m0


Instruction = Callable[[Lowering, Line], None]
MNEMONICS: dict[str, Instruction] = {}


_GFX9, _GFX950 = ("gfx942", "gfx950"), ("gfx950",)
_UNCOUNTED = "on {arch} memory instructions in assembly are not modelled: the counters they wait by are not followed"

_NO_BRANCH = "on {arch} nothing is modelled in assembly that a branch could skip"


def _instruction(
    *names: str, archs: tuple[str, ...] = tuple(WAVE_SIZE), why: str = "{arch} does not have it"
) -> Callable[[Instruction], Instruction]:
    """Register a handler. archs: those that have the instructions, by what llvm-mc 22 takes; why: what others are told."""

    def register(f: Instruction) -> Instruction:
        @functools.wraps(f)
        def checked(k: Lowering, line: Line) -> None:
            if k.arch not in archs:
                raise line.fail(why.format(arch=k.arch))
            f(k, line)

        for name in names:
            assert name not in MNEMONICS, name
            MNEMONICS[name] = checked
        return f  # another @_instruction may follow

    return register


@handles("llvm.inline_asm")
def _inline_asm(k: Lowering, o: Any) -> Value:
    ir = k.ir
    text = ir.StringAttr(o.attributes["asm_string"]).value
    constraints = [c.strip() for c in ir.StringAttr(o.attributes["constraints"]).value.split(",") if c.strip()]
    types: list[Type] = []
    if len(o.results) == 1 and str(o.results[0].type) != "!llvm.void":
        t = parse(str(o.results[0].type))
        types = list(getattr(t, "fields", (t,)))
    slots: list[Slot] = []
    given = iter(range(len(k.operands)))
    for constraint in constraints:
        if constraint.startswith("~"):
            continue
        if m := re.fullmatch(r"=&?[vas]", constraint):
            if len([s for s in slots if s.output]) == len(types):
                raise k.fail(
                    f"inline assembly with the constraints {','.join(constraints)} and {len(types)} results", o
                )
            t = types[len(slots)]
            slots.append(Slot(tuple(k.const(0xFFFFFFFF) for _ in range(dwords(t))), t, True))
            continue
        m = re.fullmatch(r"(?P<tied>\d+)|[vasin]|VA", constraint)
        index = next(given, None)
        if not m or index is None:
            raise k.fail(f"inline assembly with the constraint {constraint!r}", o)
        value = k.operand(o, index)
        if isinstance(value, list):
            raise k.fail("inline assembly with a struct operand", o)
        slots.append(Slot(tuple(value), k.operand_type(o, index), False))
        if m["tied"] is not None:
            slots[int(m["tied"])].registers = tuple(value)
    if sum(s.output for s in slots) != len(types) or next(given, None) is not None:
        raise k.fail(f"inline assembly with the constraints {','.join(constraints)}", o)
    state = State()
    for line in text.split("\n"):
        line = re.sub(r"(;|//).*", "", line).replace("\t", " ").strip()
        if not line:
            continue
        if m := re.fullmatch(r"(\d+):", line):
            if m[1] not in state.labels:
                raise k.fail(f"the label `{line}` of inline assembly, to which nothing before it branches", o)
            _enter(k, state.labels.pop(m[1]), jump=True)
            continue
        one = Line(k, o, line, slots, state)
        handler = MNEMONICS.get(re.sub(r"_e(32|64)$", "", one.mnemonic))
        if handler is None:
            raise k.fail(f"the instruction `{line}` of inline assembly", o)
        handler(k, one)
    if state.labels:
        raise k.fail(f"inline assembly that branches to {', '.join(state.labels)}, which it does not hold", o)
    results = [s.registers for s in slots if s.output]
    if not results:
        return None
    return results if hasattr(parse(str(o.results[0].type)), "fields") else results[0]


def _enter(k: Lowering, block: Block, jump: bool) -> None:
    """Go on in another block of the program; `jump`: from the end of the one so far."""
    if jump:
        k.emit("JUMP", block)
        k.block.successors = [block]
    k.block = block
    k.extracted = {}


@_instruction("s_cmp_eq_u32", "s_cmp_lg_u32", "s_cmp_eq_i32", "s_cmp_lg_i32", archs=_GFX9, why=_NO_BRANCH)
def _compare_scalar(k: Lowering, line: Line) -> None:
    line.take()
    line.count(2)
    line.state.scc = k.out("EQ" if "_eq_" in line.mnemonic else "NE", line.read(0)[0], line.read(1)[0])


@_instruction("s_cbranch_scc0", "s_cbranch_scc1", archs=_GFX9, why=_NO_BRANCH)
def _branch(k: Lowering, line: Line) -> None:
    """Forward, to a numbered label of the same text; what lies between must not write results."""
    line.count(1)
    m = re.fullmatch(r"(\d+)f", line.operands[0])
    if not m or line.state.scc is None or any(s.output for s in line.slots):
        raise line.fail("its target, or a branch in a block with results")
    target = line.state.labels.setdefault(m[1], Block(f"{k.block.name}-asm{m[1]}"))
    following = Block(f"{k.block.name}-asm")
    k.b.blocks += [b for b in (following, target) if b not in k.b.blocks]
    sides = [target, following] if line.mnemonic.endswith("1") else [following, target]
    k.emit("BRANCH", line.state.scc, *sides)
    k.block.successors = sides
    line.state.scc = None
    _enter(k, following, jump=False)


# -- order, hints ------------------------------------------------------------------------------------------------------


@_instruction("s_nop", "s_setprio", "s_sleep", "s_sethalt", "s_ttracedata", "s_icache_inv")
def _hint(k: Lowering, line: Line) -> None:
    pass


@_instruction("s_dcache_inv")
@_instruction("buffer_inv", "buffer_wbl2", "s_dcache_wb", archs=_GFX9)
def _cache(k: Lowering, line: Line) -> None:
    """Caches are not modelled: memory is the one copy. What a kernel must wait for, other instructions say."""


@_instruction("s_barrier", archs=_GFX9)
def _barrier(k: Lowering, line: Line) -> None:
    line.count(0)
    k.emit("BARRIER")


@_instruction("s_waitcnt", archs=_GFX9)
def _waitcnt(k: Lowering, line: Line) -> None:
    """Named counters, or the encoded word of gfx9: vmcnt bits 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8 (CDNA3 ISA guide, S_WAITCNT)."""
    rest = line.text.partition(" ")[2].strip()
    if re.fullmatch(r"0x[0-9a-fA-F]+|\d+", rest):
        bits = int(rest, 0)
        counts = {"vmcnt": (bits & 15) | (bits >> 14 & 3) << 4, "lgkmcnt": bits >> 8 & 15}
    else:
        pieces = [p for p in re.split(r"[\s&,]+", rest) if p]
        matches = [re.fullmatch(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", p) for p in pieces]
        if not pieces or not all(matches):
            raise line.fail("its counters")
        counts = {m[1]: int(m[2]) for m in matches if m}
    vm, lgkm = counts.get("vmcnt", 63), counts.get("lgkmcnt", 15)
    k.emit("WAIT", vm if vm < 63 else -1, lgkm if lgkm < 15 else -1)


# -- memory ------------------------------------------------------------------------------------------------------------

_SIZES = {"ubyte": 1, "ushort": 2, "byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_CACHE = ("sc0", "sc1", "nt", "glc", "slc")


def _resource(line: Line, index: int) -> Regs:
    return line.read(index, 4)


@_instruction("buffer_load_dword", "buffer_load_dwordx3", "buffer_load_dwordx4", archs=_GFX9, why=_UNCOUNTED)
def _buffer_load_lds(k: Lowering, line: Line) -> None:
    """(vaddr, resource, soffset) with `lds`: LDS address = m0 + offset + the lane's place (CDNA3 ISA guide, section 9.1.9)."""
    if "lds" not in line.modifiers:
        return _buffer_load(k, line)
    line.take("lds", "offen", "offset", *_CACHE)
    line.count(3)
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    if size != 4 and k.arch != "gfx950":
        raise line.fail(f"a copy to LDS of {size} bytes a lane on {k.arch}")
    if ("offen" in line.modifiers) == (line.operands[0] == "off"):
        raise line.fail("its address")
    voffset = line.read(0)[0] if "offen" in line.modifiers else k.const(0)
    k.emit("BUFFER_LOAD_LDS", line.number("offset"), *_resource(line, 1), voffset, line.read(2)[0], size, m0(k))


def _loaded(k: Lowering, line: Line, loaded: list[int], lgkm: bool) -> None:
    """Put a load's result into operand 0. No compiler waits for it: a use before the kernel's own wait is a finding."""
    results = [k.b.new() for _ in loaded]
    k.emit("ASM_RESULT", int(lgkm), 0, results, loaded)
    line.write(0, tuple(results))


@_instruction("buffer_load_ubyte", "buffer_load_ushort", "buffer_load_dwordx2", archs=_GFX9, why=_UNCOUNTED)
def _buffer_load(k: Lowering, line: Line) -> None:
    line.take("offen", "offset", *_CACHE)
    line.count(4)
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    if ("offen" in line.modifiers) == (line.operands[1] == "off"):
        raise line.fail("its address")
    voffset = line.read(1)[0] if "offen" in line.modifiers else k.const(0)
    out = [k.b.new() for _ in range(max(1, size // 4))]
    k.emit("BUFFER_LOAD", line.number("offset"), *_resource(line, 2), voffset, line.read(3)[0], size, out)
    _loaded(k, line, out, False)


@_instruction(
    *(f"global_load_{name}" for name in ("ubyte", "ushort", "dword", "dwordx2", "dwordx3", "dwordx4")),
    archs=_GFX9,
    why=_UNCOUNTED,
)
def _global_load(k: Lowering, line: Line) -> None:
    line.take("offset", *_CACHE)
    line.count(3)
    if line.operands[2] != "off":
        raise line.fail("a scalar base address")
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    out = [k.b.new() for _ in range(max(1, size // 4))]
    if "sc0" in line.modifiers and "sc1" in line.modifiers:
        k.emit("ORDERED")
    k.emit("GLOBAL_LOAD", line.number("offset"), *line.read(1, 2), size, out)
    _loaded(k, line, out, False)


@_instruction(*(f"ds_read_{name}" for name in ("u8", "u16", "b32", "b64", "b96", "b128")), archs=_GFX9, why=_UNCOUNTED)
def _ds_read(k: Lowering, line: Line) -> None:
    line.take("offset")
    line.count(2)
    size = int(re.findall(r"\d+$", line.mnemonic)[0]) // 8
    out = [k.b.new() for _ in range(max(1, size // 4))]
    k.emit("LDS_LOAD", line.number("offset"), line.read(1)[0], size, 0, out)
    _loaded(k, line, out, True)


@_instruction("ds_read_b64_tr_b16", "ds_read_b64_tr_b8", "ds_read_b64_tr_b4", archs=_GFX950)
def _ds_read_transposed(k: Lowering, line: Line) -> None:
    line.take("offset")
    line.count(2)
    bits, out = int(line.mnemonic.rpartition("b")[2]), [k.b.new(), k.b.new()]
    if bits == 16:
        k.emit("DS_READ_TR16_B64", line.number("offset"), line.read(1)[0], 0, *out)
    else:
        k.emit("TRANSPOSE_LDS", line.number("offset"), line.read(1)[0], bits, 0, 0, out)
    _loaded(k, line, out, True)


@_instruction("global_load_lds_dword", archs=_GFX9)
@_instruction("global_load_lds_dwordx3", "global_load_lds_dwordx4", archs=_GFX950)
def _global_load_lds(k: Lowering, line: Line) -> None:
    """(address, off): LDS address = m0 + offset + the lane's place."""
    line.take("offset", *_CACHE)
    line.count(2)
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    if line.operands[1] != "off":
        raise line.fail("a scalar base address")
    k.emit("GLOBAL_LOAD_LDS", line.number("offset"), *line.read(0, 2), size, m0(k))


@_instruction("buffer_store_byte", "buffer_store_short", "buffer_store_dword", "buffer_store_dwordx2", "buffer_store_dwordx3", "buffer_store_dwordx4", archs=_GFX9, why=_UNCOUNTED)  # fmt: skip
def _buffer_store(k: Lowering, line: Line) -> None:
    line.take("offen", "offset", *_CACHE)
    line.count(4)
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    if ("offen" in line.modifiers) == (line.operands[1] == "off"):
        raise line.fail("its address")
    voffset = line.read(1)[0] if "offen" in line.modifiers else k.const(0)
    value = line.read(0, max(1, size // 4))
    k.emit("BUFFER_STORE", line.number("offset"), *_resource(line, 2), voffset, line.read(3)[0], size, list(value))


@_instruction("global_store_byte", "global_store_short", "global_store_dword", "global_store_dwordx2", "global_store_dwordx3", "global_store_dwordx4", archs=_GFX9, why=_UNCOUNTED)  # fmt: skip
def _global_store(k: Lowering, line: Line) -> None:
    line.take("offset", *_CACHE)
    line.count(3)
    if line.operands[2] != "off":
        raise line.fail("a scalar base address")
    size = _SIZES[line.mnemonic.rpartition("_")[2]]
    if "sc0" in line.modifiers and "sc1" in line.modifiers:
        k.emit("ORDERED")  # scope of the whole system: other workgroups may see it as soon as it is done
    value = line.read(1, max(1, size // 4))
    k.emit("GLOBAL_STORE", line.number("offset"), *line.read(0, 2), size, list(value))


@_instruction(
    "ds_write_b8",
    "ds_write_b16",
    "ds_write_b32",
    "ds_write_b64",
    "ds_write_b96",
    "ds_write_b128",
    archs=_GFX9,
    why=_UNCOUNTED,
)
def _ds_write(k: Lowering, line: Line) -> None:
    line.take("offset")
    line.count(2)
    size = int(line.mnemonic.rpartition("b")[2]) // 8
    k.emit("LDS_STORE", line.number("offset"), line.read(0)[0], size, list(line.read(1, max(1, size // 4))))


# -- matrix unit -------------------------------------------------------------------------------------------------------


class _Given:
    """Stands for an MLIR value and operation where a matrix instruction's handler is asked to lower one from text."""

    def __init__(self, name: str, **facts: Any) -> None:
        self.name = name
        self.__dict__.update(facts)


_PLAIN_MFMA = {
    "v_mfma_f32_16x16x32_bf16": "mfma.f32.16x16x32.bf16", "v_mfma_f32_16x16x32_f16": "mfma.f32.16x16x32.f16",
    "v_mfma_f32_32x32x16_bf16": "mfma.f32.32x32x16.bf16", "v_mfma_f32_32x32x16_f16": "mfma.f32.32x32x16.f16",
    "v_mfma_f32_16x16x16_bf16": "mfma.f32.16x16x16bf16.1k", "v_mfma_f32_16x16x16_f16": "mfma.f32.16x16x16f16",
    "v_mfma_f32_32x32x8_bf16": "mfma.f32.32x32x8bf16.1k", "v_mfma_f32_32x32x8_f16": "mfma.f32.32x32x8f16",
    "v_mfma_f32_16x16x32_fp8_fp8": "mfma.f32.16x16x32.fp8.fp8", "v_mfma_f32_16x16x32_bf8_bf8": "mfma.f32.16x16x32.bf8.bf8",
    "v_mfma_f32_16x16x32_fp8_bf8": "mfma.f32.16x16x32.fp8.bf8", "v_mfma_f32_16x16x32_bf8_fp8": "mfma.f32.16x16x32.bf8.fp8",
    "v_mfma_f32_32x32x16_fp8_fp8": "mfma.f32.32x32x16.fp8.fp8", "v_mfma_f32_32x32x16_bf8_bf8": "mfma.f32.32x32x16.bf8.bf8",
    "v_mfma_i32_16x16x32_i8": "mfma.i32.16x16x32.i8", "v_mfma_i32_32x32x16_i8": "mfma.i32.32x32x16.i8",
    "v_mfma_i32_16x16x64_i8": "mfma.i32.16x16x64.i8", "v_mfma_i32_32x32x32_i8": "mfma.i32.32x32x32.i8",
}  # fmt: skip
_F8F6F4 = {"16x16x128": "mfma.scale.f32.16x16x128.f8f6f4", "32x32x64": "mfma.scale.f32.32x32x64.f8f6f4"}
_F8F6F4_DWORDS = {
    0: 8,
    1: 8,
    2: 6,
    3: 6,
    4: 4,
}  # by format code: fp8, bf8, fp6, bf6, fp4 (CDNA4 ISA guide, CBSZ and BLGP)


def _matrix(k: Lowering, line: Line, name: str, operands: list[Any], attributes: dict[str, Any]) -> None:
    """Lower the rocdl operation `name` on `operands` (slots, or an int: a literal) and put its result into operand 0."""
    i32 = k.ir.IntegerType.get_signless(32)
    target = line.slot(0)
    if target is None or target.type is None:
        raise line.fail("its result")
    keys = []
    for operand in operands:
        if isinstance(operand, int):
            literal = _Given("llvm.mlir.constant", attributes={"value": k.ir.IntegerAttr.get(i32, operand)})
            key = _Given("literal", owner=literal)
            k.values[key], k.types[key] = (k.const(operand),), parse("i32")
        else:
            key = _Given("operand", owner=_Given("llvm.inline_asm"))
            k.values[key], k.types[key] = operand.registers, operand.type
        keys.append(key)
    attrs = {n: k.ir.IntegerAttr.get(i32, v) if isinstance(v, int) else v for n, v in attributes.items()}
    handler = HANDLERS.get(f"rocdl.{name}")
    if handler is None:
        raise line.fail(f"rocdl.{name}")
    before, k.operands = k.operands, keys
    fake = _Given(
        f"rocdl.{name}",
        attributes=attrs,
        results=[_Given("result", type=line.o.results[0].type)],
        location=line.o.location,
    )
    try:
        if len(line.o.results) != 1 or parse(str(line.o.results[0].type)) != target.type:
            raise line.fail("a matrix instruction among several results")
        line.write(0, tuple(handler(k, fake)))
    finally:
        k.operands = before
        for key in keys:
            del k.values[key], k.types[key]


def _accumulator(line: Line, index: int, like: Slot) -> Slot:
    """The addend: an operand, or the literal 0 in every element."""
    if (slot := line.slot(index)) is not None:
        return slot
    if line.operands[index] != "0":
        raise line.fail(f"the addend {line.operands[index]}")
    return Slot(tuple(line.k.const(0) for _ in like.registers), like.type, False)


def _source(line: Line, index: int) -> Slot:
    slot = line.slot(index)
    if slot is None:
        raise line.fail(f"the matrix operand {line.operands[index]}")
    return slot


_DOUBLED_K = [name for name in _PLAIN_MFMA if re.search(r"x32_b?f16|32x32x16_b?f16|x64_i8|32x32x32_i8", name)]


@_instruction(*_DOUBLED_K, archs=_GFX950)
@_instruction(*(name for name in _PLAIN_MFMA if name not in _DOUBLED_K), archs=_GFX9)
def _mfma(k: Lowering, line: Line) -> None:
    line.take()
    line.count(4)
    a, b = _source(line, 1), _source(line, 2)
    _matrix(k, line, _PLAIN_MFMA[line.mnemonic], [a, b, _accumulator(line, 3, _source(line, 0))], {})


@_instruction(
    *(f"v_mfma_f32_{shape}_f8f6f4" for shape in _F8F6F4),
    *(f"v_mfma_scale_f32_{shape}_f8f6f4" for shape in _F8F6F4),
    archs=_GFX950,
)
def _mfma_f8f6f4(k: Lowering, line: Line) -> None:
    """cbsz and blgp give A's and B's format; op_sel and op_sel_hi bits 0 and 1 the byte of A's and B's scales (LLVM, VOP3PInstructions.td)."""
    scaled = "_scale_" in line.mnemonic
    line.take("cbsz", "blgp", *(("op_sel", "op_sel_hi") if scaled else ()))
    line.count(6 if scaled else 4)
    low, high = [*line.bits("op_sel"), 0, 0], [*line.bits("op_sel_hi"), 0, 0]
    a, b = _source(line, 1), _source(line, 2)
    formats = line.number("cbsz"), line.number("blgp")
    for slot, code in zip((a, b), formats):
        if len(slot.registers) != _F8F6F4_DWORDS.get(code):
            raise line.fail(f"format {code} in {len(slot.registers)} dwords")
    scales: list[Any] = [_source(line, 4), _source(line, 5)] if scaled else [0, 0]
    shape = re.search(r"\d+x\d+x\d+", line.mnemonic)
    assert shape
    _matrix(
        k, line, _F8F6F4[shape[0]], [a, b, _accumulator(line, 3, _source(line, 0)), *scales],
        {"cbsz": formats[0], "blgp": formats[1], "opselA": low[0] | high[0] << 1, "opselB": low[1] | high[1] << 1},
    )  # fmt: skip


# -- scalar and vector arithmetic --------------------------------------------------------------------------------------

_SIMPLE: dict[str, tuple[str, tuple[int, ...]]] = {
    # mnemonic -> opcode, the order in which it takes the sources
    "v_add_f32": ("FADD", (1, 2)), "v_sub_f32": ("FSUB", (1, 2)), "v_mul_f32": ("FMUL", (1, 2)), "v_fma_f32": ("FMA", (1, 2, 3)),
    "v_max_f32": ("FMAXNUM", (1, 2)), "v_min_f32": ("FMINNUM", (1, 2)),
    "v_add_u32": ("ADD", (1, 2)), "v_sub_u32": ("SUB", (1, 2)), "s_add_u32": ("ADD", (1, 2)), "s_add_i32": ("ADD", (1, 2)),
    "s_sub_u32": ("SUB", (1, 2)), "v_mul_lo_u32": ("MUL", (1, 2)), "s_mul_i32": ("MUL", (1, 2)),
    "v_and_b32": ("AND", (1, 2)), "v_or_b32": ("OR", (1, 2)), "v_xor_b32": ("XOR", (1, 2)),
    "s_and_b32": ("AND", (1, 2)), "s_or_b32": ("OR", (1, 2)), "s_xor_b32": ("XOR", (1, 2)),
    "v_max_u32": ("UMAX", (1, 2)), "v_min_u32": ("UMIN", (1, 2)), "v_max_i32": ("SMAX", (1, 2)), "v_min_i32": ("SMIN", (1, 2)),
    "v_perm_b32": ("PERM", (1, 2, 3)), "v_alignbyte_b32": ("ALIGNBYTE", (1, 2, 3)), "v_alignbit_b32": ("ALIGNBIT", (1, 2, 3)),
}  # fmt: skip
_UNARY = {
    "v_exp_f32": "exp2",
    "v_log_f32": "log2",
    "v_rcp_f32": "rcp",
    "v_rsq_f32": "rsq",
    "v_sqrt_f32": "sqrt",
    "v_floor_f32": "floor",
}


@_instruction("v_mov_b32", "s_mov_b32")
@_instruction("v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_accvgpr_mov_b32", archs=_GFX9)
def _mov(k: Lowering, line: Line) -> None:
    line.take()
    line.count(2)
    line.write(0, line.read(1))


@_instruction("v_readfirstlane_b32")
def _readfirstlane(k: Lowering, line: Line) -> None:
    line.take()
    line.count(2)
    line.write(0, (k.out("READFIRSTLANE", line.read(1)[0]),))


@_instruction(*_SIMPLE)
def _simple(k: Lowering, line: Line) -> None:
    line.take()
    op, order = _SIMPLE[re.sub(r"_e(32|64)$", "", line.mnemonic)]
    line.count(1 + len(order))
    if op.startswith("F") and any(line.slot(i) is None for i in order):
        raise line.fail("a literal of a float instruction")
    line.write(0, (k.out(op, *(line.read(i)[0] for i in order)),))


@_instruction("v_lshlrev_b32", "v_lshrrev_b32", "v_ashrrev_i32", "s_lshl_b32", "s_lshr_b32", "s_ashr_i32")
def _shift(k: Lowering, line: Line) -> None:
    """The shift takes the low five bits of its count; the v_ forms have it first."""
    line.take()
    line.count(3)
    value, by = (2, 1) if line.mnemonic.startswith("v_") else (1, 2)
    op = "SHL" if "lshl" in line.mnemonic else "LSHR" if "lshr" in line.mnemonic else "ASHR"
    line.write(0, (k.out(op, line.read(value)[0], k.out("AND", line.read(by)[0], k.const(31))),))


_VECTOR_COMPARE = {
    f"v_cmp_{name}_{t}32": (op.format("S" if t == "i" else "U"), swap)
    for name, op, swap in (("lt", "{}LT", 0), ("le", "{}LE", 0), ("gt", "{}LT", 1), ("ge", "{}LE", 1), ("eq", "EQ", 0), ("ne", "NE", 0))
    for t in "iu"
}  # fmt: skip


@_instruction(*_VECTOR_COMPARE)
def _compare_vector(k: Lowering, line: Line) -> None:
    """A bit a lane, 0 where it is switched off, into a pair of scalar registers (one for waves of 32 lanes)."""
    line.take()
    line.count(3)
    op, swap = _VECTOR_COMPARE[re.sub(r"_e64$", "", line.mnemonic)]
    a, b = line.read(1 + swap)[0], line.read(2 - swap)[0]
    lo, hi = k.b.new(), k.b.new()
    k.emit("BALLOT", lo, hi, k.out(op, a, b))
    line.write(0, (lo, hi)[: WAVE_SIZE[k.arch] // 32])


@_instruction("v_cndmask_b32")
def _cndmask(k: Lowering, line: Line) -> None:
    """The second source where the lane's bit of the mask is set, else the first."""
    line.take()
    line.count(4)
    mask = line.read(3, WAVE_SIZE[k.arch] // 32)
    lane = k.out("LANE_ID")
    word = k.out("SELECT", k.out("ULT", lane, k.const(32)), mask[0], mask[-1])
    bit = k.out("AND", k.out("LSHR", word, k.out("AND", lane, k.const(31))), k.const(1))
    line.write(0, (k.out("SELECT", bit, line.read(2)[0], line.read(1)[0]),))


@_instruction(*_UNARY)
def _unary(k: Lowering, line: Line) -> None:
    line.take()
    line.count(2)
    if line.slot(1) is None:
        raise line.fail("a literal of a float instruction")
    name = _UNARY[re.sub(r"_e(32|64)$", "", line.mnemonic)]
    line.write(0, (k.out("FUNARY", line.read(1)[0], FUNARY.index(name)),))


@_instruction("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32")
def _packed(k: Lowering, line: Line) -> None:
    line.take()
    op = {"add": "FADD", "mul": "FMUL", "fma": "FMA"}[line.mnemonic.split("_")[2]]
    line.count(4 if op == "FMA" else 3)
    sources = [line.read(i, 2) for i in range(1, len(line.operands))]
    line.write(0, tuple(k.out(op, *(s[half] for s in sources)) for half in (0, 1)))


@_instruction("v_cvt_pk_bf16_f32", archs=("gfx950", "gfx1250"))
def _cvt_pk_bf16(k: Lowering, line: Line) -> None:
    """Low half from the first source, nearest even (CDNA4 ISA guide)."""
    line.take()
    line.count(3)
    low, high = (k.out("F32_TO_BF16", line.read(i)[0]) for i in (1, 2))
    line.write(0, (k.out("INSERT", low, high, 16, 0xFFFF),))


@_instruction("v_cvt_off_f32_i4")
@_instruction("v_cvt_off_f32_i4_sdwa", archs=_GFX9)
def _cvt_off(k: Lowering, line: Line) -> None:
    """The low four bits of the chosen byte, signed, over 16 (AMD CDNA3 ISA guide, V_CVT_OFF_F32_I4)."""
    line.take("dst_sel", "dst_unused", "src0_sel")
    line.count(2)
    chosen = line.modifiers.get("src0_sel", "BYTE_0")
    if line.modifiers.get("dst_sel", "DWORD") != "DWORD" or not re.fullmatch(r"BYTE_[0-3]", chosen):
        raise line.fail("its selects")
    shift = 8 * int(chosen[-1])
    nibble = k.out("SEXTRACT", line.read(1)[0], 28 - shift, 28)
    line.write(0, (k.out("FMUL", k.out("SITOFP", nibble), k.const(0x3D800000)),))
