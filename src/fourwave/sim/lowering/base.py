"""The state of lowering one kernel, and what every handler needs: emitting, registers of small elements, operands.

A handler is a function (lowering, operation) -> value, registered with @handles under the operations' names; the other modules of this package
hold them by subject. A new operation is a new handler; one without a handler raises UnknownOperation with the kernel's Python line.
"""

from __future__ import annotations

import ast
import linecache
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from ..ir_types import Array, Float, Int, Ptr, Struct, Type, Vec, dwords, parse, size_and_align
from ..program import Block, Builder, Instruction, Program

WAVE_SIZE = {"gfx942": 64, "gfx950": 64, "gfx1250": 32}
LDS_BANKS = {"gfx942": 32, "gfx950": 64, "gfx1250": 64}


class UnknownOperation(NotImplementedError):
    """The kernel holds an operation the simulator does not model; the text names it and the Python line."""


Regs = tuple[int, ...]
Value = Any  # Regs, or a list of Values for a struct or array
Handler = Callable[["Lowering", Any], Value]
HANDLERS: dict[str, Handler] = {}
H = TypeVar("H", bound=Handler)
_SIGNED = {"SDIV", "SREM", "ASHR", "SMIN", "SMAX", "SLT", "SLE"}


def handles(*names: str) -> Callable[[H], H]:
    """Register a handler for the operations `names`."""

    def register(handler: H) -> H:
        for name in names:
            assert name not in HANDLERS, name
            HANDLERS[name] = handler
        return handler

    return register


Frames = tuple[tuple[str, int], ...]


@cache
def _blocks(file: str) -> dict[int, int]:
    """First and last line of each `if` and loop of a Python file: FlyDSL makes functions of what is in them."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # not a Python file
        return {}
    found: dict[int, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.For, ast.While)):
            found[node.lineno] = max(node.end_lineno or node.lineno, found.get(node.lineno, 0))
    return found


def find_frames(location: str) -> Frames:
    """(file, line) of each Python function in an MLIR location's text, the kernel's own first, then the helpers it called."""
    frames = [(file, int(line)) for file, line in re.findall(r'"([^"]+)":(\d+):\d+', location)][::-1]
    if not frames:
        return (("unknown", 0),)
    # A block's frame goes: the statement in it belongs to the same function.
    return tuple(
        outer
        for outer, inner in zip(frames, [*frames[1:], ("", 0)])
        if outer[0] != inner[0] or not outer[1] < inner[1] <= _blocks(outer[0]).get(outer[1], 0)
    )


def describe_frames(frames: Frames) -> str:
    """file:line of the kernel's line, and the helpers' where there are any."""
    return " > ".join(f"{file}:{line}" for file, line in frames)


def plain(ir: Any, value: Any) -> Any:
    """An MLIR value fit for a dict key. FlyDSL's own value class builds a comparison operation when asked for equality."""
    return ir.Value(value)


def float_bits(value: float, t: Float) -> int:
    """The code of `value`, exactly representable or rounded to nearest even, in a float type."""
    if t.name == "f64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if t.name == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    if t.name == "f32":
        return word
    if t.name == "bf16":
        if value != value:
            return 0x7FC0
        return ((word + 0x7FFF + ((word >> 16) & 1)) >> 16) & 0xFFFF
    if value == 0.0:
        return 0
    raise NotImplementedError(f"a constant of {t.name}")


class Lowering:
    """State of lowering one `llvm.func` that is a kernel."""

    def __init__(
        self, ir: Any, module: Any, function: Any, arch: str, mutate: Callable[[Builder], None] | None
    ) -> None:
        self.ir, self.function, self.arch, self.mutate = ir, function, arch, mutate
        self.name = ir.StringAttr(function.attributes["sym_name"]).value
        self.b = Builder()
        self.values: dict[Any, Value] = {}
        self.types: dict[Any, Any] = {}
        self.operands: list[Any] = []  # of the operation being lowered; asking MLIR's bindings again is slow
        self.typed: tuple[Any, Any] = (None, None)  # the operation that result_type was last asked for, and its answer
        self.places: dict[Any, int] = {}  # location, as an attribute, which compares without its text -> line index
        self.lines: dict[Frames, int] = {}
        self.line = 0
        self.block: Block = Block("entry")
        self.extracted: dict[tuple[int, int, int], int] = {}
        self.lds_offsets: dict[str, int] = {}
        self.lds_bytes = 0
        self.dynamic_lds = False
        self.module = module
        self.frame: int | None = None  # private.py: first register of the wave's private memory
        self.frame_bytes = 0
        self.data: dict[str, Any] = {}  # private.py: globals outside LDS, name -> numpy array of their bytes
        self.m0: int | None = None  # asm.py: the register that stands for m0
        self.calls: list[tuple[str, Block, list[int]]] = []  # control.py: functions being lowered in place
        self._place_lds(module)

    def _place_lds(self, module: Any) -> None:
        """LDS globals one after another, each at its alignment; one without a size is the launch's dynamic LDS, at the end."""
        dynamic = []
        for op in module.regions[0].blocks[0].operations:
            o = op.operation
            if o.name != "llvm.mlir.global":
                continue
            space = self.ir.IntegerAttr(o.attributes["addr_space"]).value if "addr_space" in o.attributes else 0
            name = self.ir.StringAttr(o.attributes["sym_name"]).value
            if space != 3:
                continue
            t = parse(str(self.ir.TypeAttr(o.attributes["global_type"]).value))
            size, natural = size_and_align(t)
            align = self.ir.IntegerAttr(o.attributes["alignment"]).value if "alignment" in o.attributes else natural
            if size == 0:
                dynamic.append(name)
                continue
            self.lds_bytes = -(-self.lds_bytes // align) * align
            self.lds_offsets[name] = self.lds_bytes
            self.lds_bytes += size
        for name in dynamic:
            self.lds_bytes = -(-self.lds_bytes // 16) * 16
            self.lds_offsets[name] = self.lds_bytes
            self.dynamic_lds = True

    def emit(self, op: str, *args: Any) -> None:
        self.block.code.append(Instruction(op, self.line, list(args)))

    def out(self, op: str, *args: Any) -> int:
        d = self.b.new()
        self.emit(op, d, *args)
        return d

    def const(self, value: int) -> int:
        return self.b.constant(value)

    def fail(self, what: str, o: Any = None) -> UnknownOperation:
        where = describe_frames(list(self.lines)[self.line])
        text = str(o)[:300] if o is not None else ""
        if "__ockl_printf" in text:
            what += ": that is fx.printf, which needs a GPU's runtime; take it out, and store what you want to see to a tensor"
        return UnknownOperation(
            f"{where}: the simulator ({self.arch}) does not model {what}" + (f"\n  {text}" if text else "")
        )

    def field(self, register: int, shift: int, mask: int) -> int:
        if shift == 0 and mask == 0xFFFFFFFF:
            return register
        key = (register, shift, mask)
        if key not in self.extracted:
            self.extracted[key] = self.out("EXTRACT", register, shift, mask)
        return self.extracted[key]

    def elements(self, value: Regs, t: Type) -> list[Regs]:
        """Each element's registers, small ones zero-extended; a scalar is one element."""
        if not isinstance(t, Vec):
            return [value]
        bits = t.element.bits
        if bits == 1:
            return [(r,) for r in value]
        if bits >= 32:
            n = bits // 32
            return [value[i * n : (i + 1) * n] for i in range(t.count)]
        per = 32 // bits
        return [(self.field(value[i // per], i % per * bits, (1 << bits) - 1),) for i in range(t.count)]

    def pack(self, elements: Sequence[Regs], t: Type) -> Regs:
        if not isinstance(t, Vec):
            return tuple(elements[0])
        bits = t.element.bits
        if bits == 1 or bits >= 32:
            return tuple(r for e in elements for r in e)
        per, out = 32 // bits, []
        for first in range(0, t.count, per):
            register = elements[first][0]
            for i in range(1, min(per, t.count - first)):
                register = self.out("INSERT", register, elements[first + i][0], i * bits, (1 << bits) - 1)
            out.append(register)
        return tuple(out)

    def clean(self, register: int, bits: int) -> int:
        """Clear the bits above a small integer."""
        return register if bits >= 32 else self.out("EXTRACT", register, 0, (1 << bits) - 1)

    def sext(self, register: int, bits: int) -> int:
        return register if bits >= 32 else self.out("SEXTRACT", register, 32 - bits, 32 - bits)

    def to_f32(self, register: int, name: str) -> int:
        if name == "f32":
            return register
        if name in ("bf16", "f16"):
            return self.out("BF16_TO_F32" if name == "bf16" else "F16_TO_F32", register)
        raise self.fail(f"arithmetic on {name}")

    def from_f32(self, register: int, name: str) -> int:
        if name == "f32":
            return register
        if name in ("bf16", "f16"):
            return self.out("F32_TO_BF16" if name == "bf16" else "F32_TO_F16", register)
        raise self.fail(f"arithmetic on {name}")

    def run(self) -> Program:
        facts = self.prepare()
        if self.mutate is not None:
            self.mutate(self.b)
        return self.b.encode(**facts)

    def prepare(self) -> dict[str, Any]:
        """Lower the kernel as far as Builder.encode, and return that function's arguments."""
        region = self.function.regions[0]
        mlir_blocks = list(region.blocks)
        by_block = {block: Block(f"bb{i}") for i, block in enumerate(mlir_blocks)}
        self.b.blocks.extend(by_block.values())
        self.line = self._line(self.function)
        argument_slots: list[list[int]] = []
        for argument in (plain(self.ir, x) for x in mlir_blocks[0].arguments):
            t = parse(str(argument.type))
            slots: list[int] = []
            self.types[argument] = t
            self.values[argument] = self._argument(t, slots)
            argument_slots.append(slots)
        for block in mlir_blocks[1:]:
            for argument in (plain(self.ir, x) for x in block.arguments):
                t = parse(str(argument.type))
                self.types[argument] = t
                self.values[argument] = self._fresh(t)
        self.by_block = by_block
        self.lower_blocks(mlir_blocks)
        if self.frame is not None:
            self.b.fixed.append(self.frame)
            self.b.fixed_values.append(0xFFFFFFFF)
            for _ in range(self.frame_bytes // 4 - 1):
                self.b.placeholder(0xFFFFFFFF)
        slot_of = {register: i for i, register in enumerate(self.b.fixed)}
        self.b.prepare()
        return {
            "name": self.name,
            "argument_slots": [[slot_of[r] for r in slots] for slots in argument_slots],
            "lds_bytes": self.lds_bytes,
            "dynamic_lds": self.dynamic_lds,
            "lines": list(self.lines),
            "wave_size": WAVE_SIZE[self.arch],
            "arch": self.arch,
            "data": tuple(self.data.values()),
        }

    def lower_blocks(self, blocks: list[Any]) -> None:
        for block in self._dominance_order(blocks):
            self.block = self.by_block[block]
            self.extracted = {}
            for op in block.operations:
                self._lower(op.operation)

    def _dominance_order(self, blocks: list[Any]) -> list[Any]:
        """Reverse post-order, so that a value is lowered before its uses."""
        seen, order = {blocks[0]}, []
        stack = [(blocks[0], iter(self._successors(blocks[0])))]
        while stack:
            block, rest = stack[-1]
            for s in rest:
                if s not in seen:
                    seen.add(s)
                    stack.append((s, iter(self._successors(s))))
                    break
            else:
                order.append(block)
                stack.pop()
        return order[::-1]

    @staticmethod
    def _successors(block: Any) -> list[Any]:
        return list(block.operations[len(block.operations) - 1].operation.successors)

    def _fresh(self, t: Type) -> Value:
        """New registers for a value of the type; a struct's or an array's are nested like it."""
        if isinstance(t, Struct):
            return [self._fresh(f) for f in t.fields]
        if isinstance(t, Array):
            return [self._fresh(t.element) for _ in range(t.count)]  # type: ignore[arg-type]
        return tuple(self.b.new() for _ in range(dwords(t)))

    def _argument(self, t: Type, slots: list[int]) -> Value:
        if isinstance(t, Struct):
            return [self._argument(f, slots) for f in t.fields]
        if isinstance(t, Array):
            return [self._argument(t.element, slots) for _ in range(t.count)]  # type: ignore[arg-type]
        registers = tuple(self.b.placeholder() for _ in range(dwords(t)))
        slots.extend(registers)
        return registers

    def _line(self, o: Any) -> int:
        location = o.location.attr
        if location not in self.places:
            self.places[location] = self.lines.setdefault(find_frames(str(o.location)), len(self.lines))
        return self.places[location]

    def _lower(self, o: Any) -> None:
        self.line = self._line(o)
        handler = HANDLERS.get(o.name)
        if handler is None:
            raise self.fail(f"the operation {o.name}", o)
        self.operands = [plain(self.ir, x) for x in o.operands]
        try:
            results = handler(self, o)
        except UnknownOperation:
            raise
        except NotImplementedError as error:  # a type or constant without a model: say where
            raise self.fail(f"this {o.name}: {error}", o) from error
        if len(o.results) == 1:
            result = plain(self.ir, o.results[0])
            if self.typed[0] is o or str(result.type) != "!llvm.void":
                self.values[result] = results
                self.types[result] = self.result_type(o)

    def operand(self, o: Any, index: int) -> Value:
        return self.values[self.operands[index]]

    def operand_type(self, o: Any, index: int) -> Any:
        return self.types[self.operands[index]]

    def result_type(self, o: Any) -> Any:
        if self.typed[0] is not o:
            self.typed = o, parse(str(o.results[0].type))
        return self.typed[1]

    def integer_attribute(self, o: Any, name: str, default: int = 0) -> int:
        return self.ir.IntegerAttr(o.attributes[name]).value if name in o.attributes else default

    def literal(self, attribute: Any, t: Type, o: Any) -> Value:
        ir = self.ir
        if isinstance(t, Vec):
            if not isinstance(attribute, ir.DenseElementsAttr):
                raise self.fail("this constant", o)
            dense = ir.DenseElementsAttr(attribute)
            if dense.is_splat:
                element = self._bits(dense.get_splat_value(), t.element, o)
                bits = [element] * t.count
            else:
                text = str(attribute)
                inner = re.fullmatch(r"dense<\[(.*)\]> : .*", text, re.S)
                if not inner:
                    raise self.fail("this constant", o)
                bits = [self._bits_of_text(x.strip(), t.element, o) for x in inner[1].split(",")]
            width = t.element.bits
            if width == 1:
                return tuple(self.const(x) for x in bits)
            whole = sum(x << (i * width) for i, x in enumerate(bits))
            return tuple(self.const(whole >> (32 * i)) for i in range(dwords(t)))
        bits_ = self._bits(attribute, t, o)
        return tuple(self.const(bits_ >> (32 * i)) for i in range(dwords(t)))

    def _bits(self, attribute: Any, t: Type, o: Any) -> int:
        ir = self.ir
        if isinstance(attribute, ir.BoolAttr):
            return int(ir.BoolAttr(attribute).value)
        if isinstance(attribute, ir.IntegerAttr):
            return ir.IntegerAttr(attribute).value & ((1 << t.bits) - 1)  # type: ignore[union-attr]
        if isinstance(attribute, ir.FloatAttr):
            return float_bits(ir.FloatAttr(attribute).value, t)  # type: ignore[arg-type]
        raise self.fail("this constant", o)

    def _bits_of_text(self, text: str, t: Type, o: Any) -> int:
        if text in ("true", "false"):
            return int(text == "true")
        if isinstance(t, Float):
            return int(text, 16) if text.startswith("0x") else float_bits(float(text), t)
        return int(text, 0) & ((1 << t.bits) - 1)  # type: ignore[union-attr]

    def _blank(self, t: Type, fill: int) -> Value:
        if isinstance(t, Struct):
            return [self._blank(f, fill) for f in t.fields]
        if isinstance(t, Array):
            return [self._blank(t.element, fill) for _ in range(t.count)]  # type: ignore[arg-type]
        return tuple(self.const(fill) for _ in range(dwords(t)))

    def _each(self, o: Any, compute: Callable[..., Regs], operands: int | None = None) -> Value:
        """Apply `compute` to the operands' elements; the result's element type may differ."""
        n = len(self.operands) if operands is None else operands
        t = self.result_type(o)
        parts = [self.elements(self.operand(o, i), self.operand_type(o, i)) for i in range(n)]
        count = t.count if isinstance(t, Vec) else 1
        return self.pack([compute(*(p[i] for p in parts)) for i in range(count)], t)

    def int_op(self, op: str, a: Regs, b: Regs, bits: int) -> Regs:
        if bits == 64:
            lo, hi = self.b.new(), self.b.new()
            self.emit(op + "64", lo, hi, *a, *b)
            return lo, hi
        if bits > 64:
            raise self.fail(f"{op} on i{bits}")
        x, y = a[0], b[0]
        if bits < 32 and op in _SIGNED:
            x, y = self.sext(x, bits), y if op == "ASHR" else self.sext(y, bits)
        d = self.out(op, x, y)
        return (
            self.clean(d, bits) if op in ("ADD", "SUB", "MUL", "SHL", "ASHR", "SDIV", "SREM", "SMIN", "SMAX") else d,
        )

    def compare(self, predicate: str, a: Regs, b: Regs, bits: int) -> Regs:
        if predicate in ("SGT", "SGE", "UGT", "UGE"):
            a, b, predicate = b, a, predicate[0] + ("LT" if predicate[1:] == "GT" else "LE")
        if bits == 64:
            return (self.out(predicate + "64", *a, *b),)
        if bits > 64:
            raise self.fail(f"icmp on i{bits}")
        x, y = a[0], b[0]
        if predicate in _SIGNED:
            x, y = self.sext(x, bits), self.sext(y, bits)
        return (self.out(predicate, x, y),)

    def _choose(self, condition: int, a: Value, b: Value) -> Value:
        if isinstance(a, list):
            return [self._choose(condition, x, y) for x, y in zip(a, b)]
        return tuple(x if x == y else self.out("SELECT", condition, x, y) for x, y in zip(a, b))

    def _float_element(self, t: Type) -> str:
        element = t.element if isinstance(t, Vec) else t
        assert isinstance(element, Float)
        return element.name

    def _position(self, o: Any) -> list[int]:
        return [int(x) for x in re.findall(r"-?\d+", str(o.attributes["position"]).split(":", 1)[-1])]

    def constant_of(self, value: Any) -> int | None:
        owner = value.owner
        if getattr(owner, "name", None) != "llvm.mlir.constant":
            return None
        return self.ir.IntegerAttr(owner.attributes["value"]).value

    def _advance(self, address: Regs, index: Regs, bits: int, stride: int, t: Ptr) -> Regs:
        if t.bits == 32:
            step = self.sext(index[0], bits)
            return (self.out("ADD", address[0], self.out("MUL", step, self.const(stride)) if stride != 1 else step),)
        if bits == 64:
            wide: Regs = index
        else:
            low = self.sext(index[0], bits)
            wide = (low, self.out("ASHR", low, self.const(31)))
        if stride != 1:
            wide = self.int_op("MUL", wide, (self.const(stride), self.const(0)), 64)
        return self.int_op("ADD", address, wide, 64)

    def memory_bytes(self, t: Type) -> int:
        if isinstance(t, Vec) and t.element == Int(1):
            raise self.fail("memory of a vector of i1")
        return max(1, t.bits // 8)  # type: ignore[union-attr]

    def pieces(self, bytes_: int) -> list[tuple[int, int, int, int]]:
        """Split an access into instructions of at most 16 bytes, whole dwords or less than one: (byte offset, bytes, first register, registers)."""
        out, at = [], 0
        while at < bytes_:
            left = min(16, bytes_ - at)
            size = left & ~3 or left
            out.append((at, size, at // 4, max(1, size // 4)))
            at += size
        return out

    def _copies(self, targets: list[Any], sources: list[Any]) -> list[tuple[int, int]]:
        """Sequential moves for a block's arguments; a source that an earlier move would overwrite goes through a fresh register."""

        def flat(value: Value) -> list[int]:
            return [r for v in value for r in flat(v)] if isinstance(value, list) else list(value)

        pairs = [
            (d, s)
            for t, v in zip(targets, sources)
            for d, s in zip(flat(self.values[t]), flat(self.values[v]))
            if d != s
        ]
        written = {d for d, _ in pairs}
        saved: dict[int, int] = {}
        first = []
        for _, s in pairs:
            if s in written and s not in saved:
                saved[s] = self.b.new()
                first.append((saved[s], s))
        return first + [(d, saved.get(s, s)) for d, s in pairs]

    def _jump(self, target: Any, sources: list[Any]) -> None:
        copies = self._copies([plain(self.ir, x) for x in target.arguments], sources)
        if copies:
            self.emit("MOVN", copies)
        self.emit("JUMP", self.by_block[target])
        self.block.successors = [self.by_block[target]]


def prepare_kernel(ir: Any, gpu_module: Any, function: Any, arch: str) -> tuple[Builder, dict[str, Any]]:
    """As lower_kernel, but without its last step, for programs that are edited and encoded many times: builder.encode(**facts)."""
    if arch not in WAVE_SIZE:
        raise NotImplementedError(f"the simulator models {', '.join(WAVE_SIZE)}; {arch} is not among them")
    lowering = Lowering(ir, gpu_module, function, arch, None)
    facts = lowering.prepare()
    return lowering.b, facts


def lower_kernel(
    ir: Any, gpu_module: Any, function: Any, arch: str, mutate: Callable[[Builder], None] | None = None
) -> Program:
    """Lower one kernel function.

    ir          FlyDSL's MLIR bindings; gpu_module, function: operations of the module FlyDSL lowers to before code generation
    mutate      edits the prepared program before it is encoded (mutate.py)
    Raises UnknownOperation, naming the operation and the Python line, for what is not modelled.
    """
    if arch not in WAVE_SIZE:
        raise NotImplementedError(f"the simulator models {', '.join(WAVE_SIZE)}; {arch} is not among them")
    return Lowering(ir, gpu_module, function, arch, mutate).run()
