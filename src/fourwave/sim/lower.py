"""Lowers one kernel of a FlyDSL (or Triton) module, in the `llvm` and `rocdl` dialects, to a lane program.

Every value becomes dword registers. Vectors of 8- and 16-bit elements stay packed as in the machine, so a bitcast, a shuffle of dwords, an
insertvalue or a truncation costs nothing. An operation without a handler raises UnknownOperation with the kernel's Python line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .ir_types import Array, Float, Int, Ptr, Struct, Type, Vec, dwords, field_offset, parse, size_and_align
from .program import FUNARY, Block, Builder, Instruction, Program

WAVE_SIZE = {"gfx942": 64, "gfx950": 64}
LDS_BANKS = {"gfx942": 32, "gfx950": 64}


class UnknownOperation(NotImplementedError):
    """The kernel holds an operation the simulator does not model; the text names it and the Python line."""


Regs = tuple[int, ...]
Value = Any  # Regs, or a list of Values for a struct or array

_INT_OPS = {
    "add": "ADD", "sub": "SUB", "mul": "MUL", "and": "AND", "or": "OR", "xor": "XOR", "shl": "SHL", "lshr": "LSHR", "ashr": "ASHR",
    "udiv": "UDIV", "sdiv": "SDIV", "urem": "UREM", "srem": "SREM",
    "intr.smin": "SMIN", "intr.smax": "SMAX", "intr.umin": "UMIN", "intr.umax": "UMAX",
}  # fmt: skip
_SIGNED = {"SDIV", "SREM", "ASHR", "SMIN", "SMAX", "SLT", "SLE"}
_ICMP = ["EQ", "NE", "SLT", "SLE", "SGT", "SGE", "ULT", "ULE", "UGT", "UGE"]
# llvm.fcmp predicate, in the dialect's order -> bits of core.c's compare_bits (1 equal, 2 greater, 4 less, 8 unordered).
# The dialect numbers uno after une (mlir/include/mlir/Dialect/LLVMIR/LLVMEnums.td, FCmpPredicate), unlike LLVM's own CmpInst::Predicate.
_FCMP = [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 8, 15]
_FLOAT_OPS = {
    "fadd": "FADD", "fsub": "FSUB", "fmul": "FMUL", "fdiv": "FDIV", "frem": "FREM", "intr.maxnum": "FMAXNUM", "intr.minnum": "FMINNUM",
    "intr.maximum": "FMAXIMUM", "intr.minimum": "FMINIMUM", "intr.copysign": "COPYSIGN", "intr.pow": "FPOW",
    "intr.maximumnum": "FMAXNUM", "intr.minimumnum": "FMINNUM",
}  # fmt: skip
_DOUBLE_OPS = {"fadd": "DFADD", "fsub": "DFSUB", "fmul": "DFMUL", "fdiv": "DFDIV"}
_FLOAT_UNARY = {
    "fneg": "neg", "intr.fabs": "abs", "intr.sqrt": "sqrt", "intr.exp2": "exp2", "intr.exp": "exp", "intr.log2": "log2", "intr.log": "log",
    "intr.sin": "sin", "intr.cos": "cos", "intr.tanh": "tanh", "intr.floor": "floor", "intr.ceil": "ceil", "intr.trunc": "trunc",
    "intr.rint": "rint", "intr.roundeven": "rint", "intr.nearbyint": "rint", "intr.round": "round", "intr.erf": "erf",
}  # fmt: skip
_ROCDL_UNARY = {
    "rcp": "rcp",
    "rsq": "rsq",
    "sqrt": "sqrt",
    "exp2": "exp2",
    "log": "log2",
    "tanh": "tanh",
    "fract": "fract",
}
# Hints to the scheduler or the clock: no effect on values or order.
_NOTES = {
    "sched.barrier", "sched.group.barrier", "iglp.opt", "s.setprio", "s.sleep", "s.nop", "s.sethalt", "wave.barrier", "s.prefetch.inst",
}  # fmt: skip
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


Frames = tuple[tuple[str, int], ...]


def find_frames(location: str) -> Frames:
    """(file, line) of each Python frame in an MLIR location's text, the kernel's own first, then the helpers it called."""
    return tuple((file, int(line)) for file, line in re.findall(r'"([^"]+)":(\d+):\d+', location))[::-1] or (
        ("unknown", 0),
    )


def describe_frames(frames: Frames) -> str:
    """file:line of the kernel's line, and the helpers' where there are any."""
    return " > ".join(f"{file}:{line}" for file, line in frames)


def plain(ir: Any, value: Any) -> Any:
    """An MLIR value fit for a dict key. FlyDSL's own value class builds a comparison operation when asked for equality."""
    return ir.Value(value)


class KernelLowering:
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
        self.places: dict[str, int] = {}  # location text -> line index
        self.lines: dict[Frames, int] = {}
        self.line = 0
        self.block: Block = Block("entry")
        self.extracted: dict[tuple[int, int, int], int] = {}
        self.lds_offsets: dict[str, int] = {}
        self.lds_bytes = 0
        self.dynamic_lds = False
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

    # -- emitting -----------------------------------------------------------------------------------------------------

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
        return UnknownOperation(
            f"{where}: the simulator ({self.arch}) does not model {what}" + (f"\n  {text}" if text else "")
        )

    # -- elements of packed vectors -------------------------------------------------------------------------------------

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

    # -- the kernel -------------------------------------------------------------------------------------------------------

    def run(self) -> Program:
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
                self.values[argument] = tuple(self.b.new() for _ in range(dwords(t)))
        self.by_block = by_block
        for block in self._dominance_order(mlir_blocks):
            self.block = by_block[block]
            self.extracted = {}
            for op in block.operations:
                self._lower(op.operation)
        if self.mutate is not None:
            self.mutate(self.b)
        slot_of = {register: i for i, register in enumerate(self.b.fixed)}
        return self.b.finish(
            name=self.name,
            argument_slots=[[slot_of[r] for r in slots] for slots in argument_slots],
            lds_bytes=self.lds_bytes,
            dynamic_lds=self.dynamic_lds,
            lines=list(self.lines),
            wave_size=WAVE_SIZE[self.arch],
            arch=self.arch,
        )

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

    def _argument(self, t: Type, slots: list[int]) -> Value:
        if isinstance(t, Struct):
            return [self._argument(f, slots) for f in t.fields]
        if isinstance(t, Array):
            return [self._argument(t.element, slots) for _ in range(t.count)]  # type: ignore[arg-type]
        registers = tuple(self.b.placeholder() for _ in range(dwords(t)))
        slots.extend(registers)
        return registers

    def _line(self, o: Any) -> int:
        text = str(o.location)
        if text not in self.places:
            self.places[text] = self.lines.setdefault(find_frames(text), len(self.lines))
        return self.places[text]

    def _lower(self, o: Any) -> None:
        self.line = self._line(o)
        name = o.name
        handler = _HANDLERS.get(name)
        if handler is None:
            dialect, _, short = name.partition(".")
            if dialect == "llvm" and short in _INT_OPS:
                handler = KernelLowering._integer
            elif dialect == "llvm" and short in _FLOAT_OPS:
                handler = KernelLowering._float
            elif dialect == "llvm" and short in _FLOAT_UNARY:
                handler = KernelLowering._float_unary
            elif dialect == "rocdl" and short in _ROCDL_UNARY:
                handler = KernelLowering._float_unary
            elif dialect == "rocdl" and short in _NOTES:
                return
            elif dialect == "rocdl" and short in _MFMA:
                handler = KernelLowering._mfma
            else:
                raise self.fail(f"the operation {name}", o)
        self.operands = [plain(self.ir, x) for x in o.operands]
        try:
            results = handler(self, o)
        except UnknownOperation:
            raise
        except NotImplementedError as error:  # a type or constant without a model: say where
            raise self.fail(f"this {name}: {error}", o) from error
        if len(o.results) == 1:
            result = plain(self.ir, o.results[0])
            self.values[result] = results
            self.types[result] = parse(str(result.type))

    def operand(self, o: Any, index: int) -> Value:
        return self.values[self.operands[index]]

    def operand_type(self, o: Any, index: int) -> Any:
        return self.types[self.operands[index]]

    def result_type(self, o: Any) -> Any:
        return parse(str(o.results[0].type))

    def integer_attribute(self, o: Any, name: str, default: int = 0) -> int:
        return self.ir.IntegerAttr(o.attributes[name]).value if name in o.attributes else default

    # -- constants ---------------------------------------------------------------------------------------------------------

    def _constant(self, o: Any) -> Value:
        return self.literal(o.attributes["value"], self.result_type(o), o)

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

    def _undefined(self, o: Any) -> Value:
        return self._blank(self.result_type(o), 0xFFFFFFFF)

    def _zero(self, o: Any) -> Value:
        return self._blank(self.result_type(o), 0)

    def _blank(self, t: Type, fill: int) -> Value:
        if isinstance(t, Struct):
            return [self._blank(f, fill) for f in t.fields]
        if isinstance(t, Array):
            return [self._blank(t.element, fill) for _ in range(t.count)]  # type: ignore[arg-type]
        return tuple(self.const(fill) for _ in range(dwords(t)))

    def _addressof(self, o: Any) -> Value:
        name = str(o.attributes["global_name"]).lstrip("@").strip('"')
        if name not in self.lds_offsets:
            raise self.fail(f"the global {name} outside LDS", o)
        return (self.const(self.lds_offsets[name]),)

    # -- integers ------------------------------------------------------------------------------------------------------------

    def _each(self, o: Any, compute: Callable[..., Regs], operands: int | None = None) -> Value:
        """Apply `compute` to the operands' elements; the result's element type may differ."""
        n = len(self.operands) if operands is None else operands
        t = self.result_type(o)
        parts = [self.elements(self.operand(o, i), self.operand_type(o, i)) for i in range(n)]
        count = t.count if isinstance(t, Vec) else 1
        return self.pack([compute(*(p[i] for p in parts)) for i in range(count)], t)

    def _integer(self, o: Any) -> Value:
        op = _INT_OPS[o.name.partition(".")[2]]
        t = self.result_type(o)
        if op in ("AND", "OR", "XOR"):
            return tuple(self.out(op, a, b) for a, b in zip(self.operand(o, 0), self.operand(o, 1)))
        element = t.element if isinstance(t, Vec) else t
        return self._each(o, lambda a, b: self.int_op(op, a, b, element.bits))

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

    def _icmp(self, o: Any) -> Value:
        predicate = _ICMP[self.integer_attribute(o, "predicate")]
        t = self.operand_type(o, 0)
        element = t.element if isinstance(t, Vec) else t
        return self._each(o, lambda a, b: self.compare(predicate, a, b, element.bits))

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

    def _select(self, o: Any) -> Value:
        condition, a, b = (self.operand(o, i) for i in range(3))
        if isinstance(self.operand_type(o, 0), Vec):
            return self._each(o, lambda c, x, y: tuple(self.out("SELECT", c[0], p, q) for p, q in zip(x, y)))
        return self._choose(condition[0], a, b)

    def _choose(self, condition: int, a: Value, b: Value) -> Value:
        if isinstance(a, list):
            return [self._choose(condition, x, y) for x, y in zip(a, b)]
        return tuple(x if x == y else self.out("SELECT", condition, x, y) for x, y in zip(a, b))

    def _sext(self, o: Any) -> Value:
        source, target = self.operand_type(o, 0), self.result_type(o)
        source, target = getattr(source, "element", source), getattr(target, "element", target)

        def one(a: Regs) -> Regs:
            low = self.sext(a[0], source.bits)
            if target.bits > 64:
                raise self.fail(f"sext to i{target.bits}", o)
            if target.bits == 64:
                return low, self.out("ASHR", low, self.const(31))
            return (self.clean(low, target.bits),)

        return self._each(o, one)

    def _zext(self, o: Any) -> Value:
        target = self.result_type(o)
        bits = getattr(target, "element", target).bits
        return self._each(o, lambda a: tuple(a) + tuple(self.const(0) for _ in range(max(1, bits // 32) - len(a))))

    def _trunc(self, o: Any) -> Value:
        target = self.result_type(o)
        bits = getattr(target, "element", target).bits
        return self._each(o, lambda a: (self.clean(a[0], bits),) if bits < 32 else tuple(a[: bits // 32]))

    def _int_unary(self, o: Any) -> Value:
        op = {
            "llvm.intr.ctpop": "CTPOP",
            "llvm.intr.ctlz": "CTLZ",
            "llvm.intr.cttz": "CTTZ",
            "llvm.intr.bitreverse": "BITREV",
        }[o.name]
        t = self.result_type(o)
        if getattr(t, "element", t).bits != 32:
            raise self.fail(f"{o.name} on {o.results[0].type}", o)
        return self._each(o, lambda a: (self.out(op, a[0]),), operands=1)

    def _abs(self, o: Any) -> Value:
        t = self.result_type(o)
        bits = getattr(t, "element", t).bits
        zero = tuple(self.const(0) for _ in range(max(1, bits // 32)))

        def one(a: Regs) -> Regs:
            return self.int_op("SMAX", a, self.int_op("SUB", zero, a, bits), bits)

        return self._each(o, one, operands=1)

    def _fshl(self, o: Any) -> Value:
        """Funnel shifts of i32: the high (or low) dword of the pair a:b shifted by c modulo 32."""
        left = o.name == "llvm.intr.fshl"
        t = self.result_type(o)
        if getattr(t, "element", t).bits != 32:
            raise self.fail(f"{o.name} on {o.results[0].type}", o)

        def one(a: Regs, b: Regs, c: Regs) -> Regs:
            by = (self.out("AND", c[0], self.const(31)), self.const(0))
            lo, hi = self.int_op("SHL" if left else "LSHR", (b[0], a[0]), by, 64)
            return (hi if left else lo,)

        return self._each(o, one)

    # -- floats ----------------------------------------------------------------------------------------------------------------

    def _float_element(self, t: Type) -> str:
        element = t.element if isinstance(t, Vec) else t
        assert isinstance(element, Float)
        return element.name

    def _float(self, o: Any) -> Value:
        short = o.name.partition(".")[2]
        name = self._float_element(self.result_type(o))
        if name == "f64":
            if short not in _DOUBLE_OPS:
                raise self.fail(f"{o.name} on f64", o)

            def wide(a: Regs, b: Regs) -> Regs:
                lo, hi = self.b.new(), self.b.new()
                self.emit(_DOUBLE_OPS[short], lo, hi, *a, *b)
                return lo, hi

            return self._each(o, wide)
        op = _FLOAT_OPS[short]
        if op == "COPYSIGN" and name != "f32":  # bits only: a signalling NaN stays one
            return self._each(o, lambda a, b: (self.out("INSERT", a[0], self.out("EXTRACT", b[0], 15, 1), 15, 1),))
        # One fp32 operation and one rounding: for + - * / of fp16 and bf16 this equals rounding once (24 >= 2 * 11 + 2 bits).
        return self._each(
            o,
            lambda a, b: (self.from_f32(self.out(op, self.to_f32(a[0], name), self.to_f32(b[0], name)), name),),
            operands=2,
        )

    def _float_unary(self, o: Any) -> Value:
        dialect, _, short = o.name.partition(".")
        which = (_FLOAT_UNARY if dialect == "llvm" else _ROCDL_UNARY)[short]
        name = self._float_element(self.result_type(o))
        if name == "f64":
            if which not in ("neg", "abs"):
                raise self.fail(f"{o.name} on f64", o)
            return self._each(o, lambda a: (a[0], self.out("FUNARY", a[1], FUNARY.index(which))), operands=1)
        if which in ("neg", "abs") and name != "f32":  # bits only: a signalling NaN stays one
            op, mask = ("XOR", 0x8000) if which == "neg" else ("AND", 0x7FFF)
            return self._each(o, lambda a: (self.out(op, a[0], self.const(mask)),), operands=1)
        return self._each(
            o,
            lambda a: (self.from_f32(self.out("FUNARY", self.to_f32(a[0], name), FUNARY.index(which)), name),),
            operands=1,
        )

    def _fma(self, o: Any) -> Value:
        name = self._float_element(self.result_type(o))
        if name == "f64":

            def wide(a: Regs, b: Regs, c: Regs) -> Regs:
                lo, hi = self.b.new(), self.b.new()
                self.emit("DFMA", lo, hi, *a, *b, *c)
                return lo, hi

            return self._each(o, wide)
        if name != "f32":
            raise self.fail(f"{o.name} on {name} (one rounding, which fp32 arithmetic cannot give)", o)
        return self._each(o, lambda a, b, c: (self.out("FMA", a[0], b[0], c[0]),))

    def _fcmp(self, o: Any) -> Value:
        predicate = _FCMP[self.integer_attribute(o, "predicate")]
        name = self._float_element(self.operand_type(o, 0))
        if name == "f64":
            return self._each(o, lambda a, b: (self.out("DFCMP", *a, *b, predicate),))
        return self._each(
            o, lambda a, b: (self.out("FCMP", self.to_f32(a[0], name), self.to_f32(b[0], name), predicate),)
        )

    def _float_cast(self, o: Any) -> Value:
        source, target = self._float_element(self.operand_type(o, 0)), self._float_element(self.result_type(o))

        def one(a: Regs) -> Regs:
            if source == target:
                return a
            if source == "f64":
                if target != "f32":
                    raise self.fail(f"f64 to {target}", o)
                return (self.out("F64_TO_F32", *a),)
            wide = self.to_f32(a[0], source)
            if target == "f64":
                lo, hi = self.b.new(), self.b.new()
                self.emit("F32_TO_F64", lo, hi, wide)
                return lo, hi
            return (self.from_f32(wide, target),)

        return self._each(o, one, operands=1)

    def _int_to_float(self, o: Any) -> Value:
        signed = o.name == "llvm.sitofp"
        source, target = self.operand_type(o, 0), self._float_element(self.result_type(o))
        bits = getattr(source, "element", source).bits

        def one(a: Regs) -> Regs:
            if target == "f64":
                if bits > 32:
                    raise self.fail("i64 to f64", o)
                lo, hi = self.b.new(), self.b.new()
                self.emit("SI32_TO_F64" if signed else "UI32_TO_F64", lo, hi, self.sext(a[0], bits) if signed else a[0])
                return lo, hi
            if bits == 64:
                value = self.out("SITOFP64" if signed else "UITOFP64", *a)
            else:
                value = self.out("SITOFP" if signed else "UITOFP", self.sext(a[0], bits) if signed else a[0])
            return (self.from_f32(value, target),)

        return self._each(o, one)

    def _float_to_int(self, o: Any) -> Value:
        signed = o.name == "llvm.fptosi"
        target, source = self.result_type(o), self._float_element(self.operand_type(o, 0))
        bits = getattr(target, "element", target).bits

        def one(a: Regs) -> Regs:
            if source == "f64":
                raise self.fail("f64 to integer", o)
            value = self.to_f32(a[0], source)
            if bits == 64:
                lo, hi = self.b.new(), self.b.new()
                self.emit("FPTOSI64" if signed else "FPTOUI64", lo, hi, value)
                return lo, hi
            return (self.clean(self.out("FPTOSI" if signed else "FPTOUI", value), bits),)

        return self._each(o, one)

    # -- aggregates, vectors, pointers --------------------------------------------------------------------------------------------

    def _extractvalue(self, o: Any) -> Value:
        value = self.operand(o, 0)
        for i in self._position(o):
            value = value[i]
        return value

    def _insertvalue(self, o: Any) -> Value:
        def put(whole: Value, path: list[int]) -> Value:
            return (
                [put(x, path[1:]) if i == path[0] else x for i, x in enumerate(whole)] if path else self.operand(o, 1)
            )

        return put(self.operand(o, 0), self._position(o))

    def _position(self, o: Any) -> list[int]:
        return [int(x) for x in re.findall(r"-?\d+", str(o.attributes["position"]).split(":", 1)[-1])]

    def _extractelement(self, o: Any) -> Value:
        t = self.operand_type(o, 0)
        value, index = self.operand(o, 0), self.constant_of(self.operands[1])
        if index is not None:
            bits = t.element.bits
            if bits == 1 or bits >= 32:
                n = max(1, bits // 32)
                return tuple(value[index * n : (index + 1) * n])
            per = 32 // bits
            return (self.field(value[index // per], index % per * bits, (1 << bits) - 1),)
        elements = self.elements(value, t)
        at = self.operand(o, 1)[0]
        return tuple(self.out("LOOKUP", at, [e[i] for e in elements]) for i in range(len(elements[0])))

    def _insertelement(self, o: Any) -> Value:
        t = self.result_type(o)
        value, new, index = list(self.operand(o, 0)), self.operand(o, 1), self.constant_of(self.operands[2])
        if index is not None:
            bits = t.element.bits
            if bits == 1 or bits >= 32:
                n = max(1, bits // 32)
                value[index * n : (index + 1) * n] = new
            else:
                per = 32 // bits
                value[index // per] = self.out(
                    "INSERT", value[index // per], new[0], index % per * bits, (1 << bits) - 1
                )
            return tuple(value)
        at = self.operand(o, 2)[0]
        elements = self.elements(tuple(value), t)
        return self.pack(
            [tuple(self.out("STOW", at, n, old, i) for n, old in zip(new, e)) for i, e in enumerate(elements)], t
        )

    def constant_of(self, value: Any) -> int | None:
        owner = value.owner
        if getattr(owner, "name", None) != "llvm.mlir.constant":
            return None
        return self.ir.IntegerAttr(owner.attributes["value"]).value

    def _shufflevector(self, o: Any) -> Value:
        source, target = self.operand_type(o, 0), self.result_type(o)
        mask = [int(x) for x in re.findall(r"-?\d+", str(o.attributes["mask"]).split(":", 1)[1])]
        first, second = self.operand(o, 0), self.operand(o, 1)
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
        parts = self.elements(first, source)
        if any(i >= source.count for i in mask):
            parts = parts + self.elements(second, source)
        undefined = tuple(self.const(0xFFFFFFFF) for _ in parts[0])
        return self.pack([parts[i] if i >= 0 else undefined for i in mask], target)

    def _bitcast(self, o: Any) -> Value:
        source, target = self.operand_type(o, 0), self.result_type(o)
        one = Int(1)
        if getattr(source, "element", source) == one and isinstance(source, Vec):
            if isinstance(target, Vec):
                raise self.fail("a bitcast of a vector of i1 to a vector", o)
            words = []
            for first in range(0, source.count, 32):
                word = self.const(0)
                for i, r in enumerate(self.operand(o, 0)[first : first + 32]):
                    word = self.out("INSERT", word, r, i, 1)
                words.append(word)
            return tuple(words)
        if isinstance(target, Vec) and target.element == one:
            return tuple(self.field(self.operand(o, 0)[i // 32], i % 32, 1) for i in range(target.count))
        return self.operand(o, 0)

    def _same(self, o: Any) -> Value:
        source, target = self.operand_type(o, 0), self.result_type(o)
        value = self.operand(o, 0)
        n = dwords(target)
        if (
            isinstance(source, Ptr)
            and isinstance(target, Ptr)
            and source.space in (3, 5)
            and target.space not in (3, 5)
        ):
            raise self.fail(f"a generic pointer to LDS from {source} to {target}", o)
        return tuple(value[:n]) + tuple(self.const(0) for _ in range(n - len(value)))

    def _getelementptr(self, o: Any) -> Value:
        base, t = self.operand(o, 0), self.operand_type(o, 0)
        element: Type = parse(str(self.ir.TypeAttr(o.attributes["elem_type"]).value))
        raw = [int(x) for x in re.findall(r"-?\d+", str(o.attributes["rawConstantIndices"]).split(":", 1)[-1])]
        dynamic = iter(range(1, len(self.operands)))
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
                known = self.constant_of(self.operands[i])
                if known is not None:
                    constant += known * stride
                    continue
                address = self._advance(address, self.operand(o, i), self.operand_type(o, i).bits, stride, t)
            else:
                constant += index * stride
        if constant:
            bits = 32 if t.bits == 32 else 64
            address = self.int_op(
                "ADD", address, tuple(self.const(constant >> (32 * i)) for i in range(bits // 32)), bits
            )
        return address

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

    # -- memory ---------------------------------------------------------------------------------------------------------------------

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

    def _load(self, o: Any) -> Value:
        t, pointer, space = self.result_type(o), self.operand(o, 0), self.operand_type(o, 0).space
        bytes_, out = self.memory_bytes(t), [self.b.new() for _ in range(dwords(t))]
        for at, size, first, n in self.pieces(bytes_):
            if space == 3:
                self.emit("LDS_LOAD", at, pointer[0], size, 0, out[first : first + n])
            elif space in (0, 1, 4):
                self.emit("GLOBAL_LOAD", at, pointer[0], pointer[1], size, out[first : first + n])
            else:
                raise self.fail(f"a load from address space {space}", o)
        return tuple(self.clean(out[0], 1) if t == Int(1) else r for r in out)

    def _store(self, o: Any) -> Value:
        t, value, pointer, space = (
            self.operand_type(o, 0),
            self.operand(o, 0),
            self.operand(o, 1),
            self.operand_type(o, 1).space,
        )
        for at, size, first, n in self.pieces(self.memory_bytes(t)):
            if space == 3:
                self.emit("LDS_STORE", at, pointer[0], size, list(value[first : first + n]))
            elif space in (0, 1):
                self.emit("GLOBAL_STORE", at, pointer[0], pointer[1], size, list(value[first : first + n]))
            else:
                raise self.fail(f"a store to address space {space}", o)

    def _make_buffer_rsrc(self, o: Any) -> Value:
        """The four dwords of a buffer resource: base 48 bits, stride 14 bits, num_records, flags (CDNA3 ISA guide, table of the buffer
        resource descriptor)."""
        base, stride, records, flags = (self.operand(o, i) for i in range(4))
        return base[0], self.out("INSERT", base[1], stride[0], 16, 0xFFFF), records[0], flags[0]

    def _buffer_load(self, o: Any) -> Value:
        t, resource, voffset, soffset = self.result_type(o), self.operand(o, 0), self.operand(o, 1), self.operand(o, 2)
        bytes_ = self.memory_bytes(t)
        if bytes_ not in (1, 2, 4, 8, 12, 16):
            raise self.fail(f"a buffer load of {bytes_} bytes", o)
        out = [self.b.new() for _ in range(dwords(t))]
        self.emit("BUFFER_LOAD", 0, *resource, voffset[0], soffset[0], bytes_, out)
        return tuple(out)

    def _buffer_store(self, o: Any) -> Value:
        t, value = self.operand_type(o, 0), self.operand(o, 0)
        resource, voffset, soffset = self.operand(o, 1), self.operand(o, 2), self.operand(o, 3)
        bytes_ = self.memory_bytes(t)
        if bytes_ not in (1, 2, 4, 8, 12, 16):
            raise self.fail(f"a buffer store of {bytes_} bytes", o)
        self.emit("BUFFER_STORE", 0, *resource, voffset[0], soffset[0], bytes_, list(value))

    def _buffer_load_lds(self, o: Any) -> Value:
        """(resource, LDS pointer, size, voffset, soffset, offset), some of them attributes in the short form."""
        resource, lds = self.operand(o, 0), self.operand(o, 1)
        rest = [self.operand(o, i)[0] for i in range(2, len(self.operands))]
        if len(rest) == 4:
            size, offset = self.constant_of(self.operands[2]), self.constant_of(self.operands[5])
            voffset, soffset = rest[1], rest[2]
        else:
            size, offset = self.integer_attribute(o, "size"), self.integer_attribute(o, "offset")
            voffset, soffset = rest[0], rest[1]
        if size not in (4, 12, 16) or offset is None or (size != 4 and self.arch != "gfx950"):
            raise self.fail(f"a copy to LDS of {size} bytes a lane on {self.arch}", o)
        self.emit("BUFFER_LOAD_LDS", offset, *resource, voffset, soffset, size, lds[0])

    def _global_load_lds(self, o: Any) -> Value:
        pointer, lds = self.operand(o, 0), self.operand(o, 1)
        if len(self.operands) > 2:
            size, offset = self.constant_of(self.operands[2]), self.constant_of(self.operands[3])
        else:
            size, offset = self.integer_attribute(o, "size"), self.integer_attribute(o, "offset")
        if size not in (4, 12, 16) or offset is None or (size != 4 and self.arch != "gfx950"):
            raise self.fail(f"a copy to LDS of {size} bytes a lane on {self.arch}", o)
        self.emit("GLOBAL_LOAD_LDS", offset, pointer[0], pointer[1], size, lds[0])

    def _ds_read_tr16(self, o: Any) -> Value:
        if self.arch != "gfx950":
            raise self.fail(f"{o.name}: {self.arch} has no transposing LDS read", o)
        d0, d1 = self.b.new(), self.b.new()
        self.emit("DS_READ_TR16_B64", 0, self.operand(o, 0)[0], 0, d0, d1)
        return d0, d1

    # -- threads, lanes --------------------------------------------------------------------------------------------------------------

    def _workitem_id(self, o: Any) -> Value:
        return (self.out("THREAD_ID", "xyz".index(o.name[-1])),)

    def _workgroup_id(self, o: Any) -> Value:
        return (self.out("GROUP_ID", "xyz".index(o.name[-1])),)

    def _readfirstlane(self, o: Any) -> Value:
        return tuple(self.out("READFIRSTLANE", r) for r in self.operand(o, 0))

    def _readlane(self, o: Any) -> Value:
        return tuple(self.out("READLANE", r, self.operand(o, 1)[0]) for r in self.operand(o, 0))

    def _ballot(self, o: Any) -> Value:
        lo, hi = self.b.new(), self.b.new()
        self.emit("BALLOT", lo, hi, self.operand(o, 0)[0])
        return (lo, hi)[: dwords(self.result_type(o))]

    def _bpermute(self, o: Any) -> Value:
        return (self.out("DS_BPERMUTE", self.operand(o, 0)[0], self.operand(o, 1)[0]),)

    def _mbcnt(self, o: Any) -> Value:
        mask, addend = self.operand(o, 0)[0], self.operand(o, 1)[0]
        return (self.out("MBCNT", mask, mask, addend, int(o.name.endswith("hi"))),)

    def _permlane_swap(self, o: Any) -> Value:
        a, b = self.b.new(), self.b.new()
        self.emit("PERMLANE_SWAP", a, b, self.operand(o, 0)[0], self.operand(o, 1)[0], 16 if "16" in o.name else 32)
        return [(a,), (b,)]

    # -- matrix ------------------------------------------------------------------------------------------------------------------------

    def _mfma(self, o: Any) -> Value:
        short = o.name.partition(".")[2]
        m, k, element = _MFMA[short]
        if short in _GFX950_ONLY and self.arch != "gfx950":
            raise self.fail(f"{o.name}: {self.arch} does not have it", o)
        for name in ("cbsz", "abid"):
            if self.integer_attribute(o, name):
                raise self.fail(f"{o.name} with {name}", o)
        if "blgp" in o.attributes and not re.search(r"none|^0", str(o.attributes["blgp"])):
            raise self.fail(f"{o.name} with {o.attributes['blgp']}", o)
        a, b, c = (self.operand(o, i) for i in range(3))
        d = [self.b.new() for _ in c]
        self.emit("MFMA", m, k, _MFMA_TYPES[element], len(a), list(a), list(b), list(c), d)
        return tuple(d)

    # -- order --------------------------------------------------------------------------------------------------------------------------

    def _barrier(self, o: Any) -> Value:
        self.emit("BARRIER")

    def _fenced_barrier(self, o: Any) -> Value:
        """rocdl.barrier: release fence, s_barrier, acquire fence at workgroup scope."""
        self.emit("FENCE", 1, 0)
        self.emit("BARRIER")

    def _waitcnt(self, o: Any) -> Value:
        """Fields of s_waitcnt on gfx9: vmcnt bits 3:0 and 15:14, expcnt 6:4, lgkmcnt 11:8 (CDNA3 ISA guide, S_WAITCNT)."""
        bits = self.integer_attribute(o, "bitfield")
        vm = (bits & 15) | (bits >> 14 & 3) << 4
        lgkm = bits >> 8 & 15
        self.emit("WAIT", vm if vm < 63 else -1, lgkm if lgkm < 15 else -1)

    def _fence(self, o: Any) -> Value:
        text = str(o)
        self.emit(
            "FENCE",
            int(bool(re.search(r"release|acq_rel|seq_cst", text))),
            int(bool(re.search(r"acquire|acq_rel|seq_cst", text))),
        )

    # -- control ---------------------------------------------------------------------------------------------------------------------------

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

    def _br(self, o: Any) -> Value:
        self._jump(o.successors[0], self.operands)

    def _cond_br(self, o: Any) -> Value:
        sizes = [int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])]
        operands = self.operands
        yes_args, no_args = operands[1 : 1 + sizes[1]], operands[1 + sizes[1] :]
        here, sides = self.block, []
        for target, args in zip(o.successors, (yes_args, no_args)):
            if not args:
                sides.append(self.by_block[target])
                continue
            edge = Block(f"{here.name}-edge")
            self.b.blocks.append(edge)
            self.block = edge
            self._jump(target, args)
            sides.append(edge)
        self.block = here
        if sides[0] is sides[1]:
            self.emit("JUMP", sides[0])
            here.successors = [sides[0]]
            return
        self.emit("BRANCH", self.operand(o, 0)[0], sides[0], sides[1])
        here.successors = sides

    def _return(self, o: Any) -> Value:
        if self.operands:
            raise self.fail("a kernel that returns a value", o)
        self.emit("END")

    def _unreachable(self, o: Any) -> Value:
        self.emit("UNREACHABLE")

    def _nothing(self, o: Any) -> Value:
        return None


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


_L = KernelLowering
_HANDLERS: dict[str, Callable[[KernelLowering, Any], Value]] = {
    "llvm.mlir.constant": _L._constant, "llvm.mlir.poison": _L._undefined, "llvm.mlir.undef": _L._undefined, "llvm.mlir.zero": _L._zero,
    "llvm.mlir.addressof": _L._addressof, "llvm.freeze": _L._bitcast,
    "llvm.icmp": _L._icmp, "llvm.select": _L._select, "llvm.sext": _L._sext, "llvm.zext": _L._zext, "llvm.trunc": _L._trunc,
    "llvm.intr.ctpop": _L._int_unary, "llvm.intr.ctlz": _L._int_unary, "llvm.intr.cttz": _L._int_unary, "llvm.intr.bitreverse": _L._int_unary,
    "llvm.intr.abs": _L._abs, "llvm.intr.fshl": _L._fshl, "llvm.intr.fshr": _L._fshl,
    "llvm.intr.fma": _L._fma, "llvm.intr.fmuladd": _L._fma, "llvm.fcmp": _L._fcmp, "llvm.fpext": _L._float_cast, "llvm.fptrunc": _L._float_cast,
    "llvm.sitofp": _L._int_to_float, "llvm.uitofp": _L._int_to_float, "llvm.fptosi": _L._float_to_int, "llvm.fptoui": _L._float_to_int,
    "llvm.extractvalue": _L._extractvalue, "llvm.insertvalue": _L._insertvalue, "llvm.extractelement": _L._extractelement,
    "llvm.insertelement": _L._insertelement, "llvm.shufflevector": _L._shufflevector, "llvm.bitcast": _L._bitcast,
    "llvm.inttoptr": _L._same, "llvm.ptrtoint": _L._same, "llvm.addrspacecast": _L._same, "llvm.getelementptr": _L._getelementptr,
    "llvm.load": _L._load, "llvm.store": _L._store, "llvm.fence": _L._fence, "llvm.br": _L._br, "llvm.cond_br": _L._cond_br,
    "llvm.return": _L._return, "llvm.unreachable": _L._unreachable, "llvm.intr.assume": _L._nothing,
    "rocdl.make.buffer.rsrc": _L._make_buffer_rsrc, "rocdl.raw.ptr.buffer.load": _L._buffer_load, "rocdl.raw.ptr.buffer.store": _L._buffer_store,
    "rocdl.raw.ptr.buffer.load.lds": _L._buffer_load_lds, "rocdl.raw.ptr.buffer.load.async.lds": _L._buffer_load_lds,
    "rocdl.load.to.lds": _L._global_load_lds, "rocdl.global.load.lds": _L._global_load_lds, "rocdl.global.load.async.lds": _L._global_load_lds,
    "rocdl.load.async.to.lds": _L._global_load_lds,
    "rocdl.ds.read.tr16.b64": _L._ds_read_tr16,
    **{f"rocdl.workitem.id.{c}": _L._workitem_id for c in "xyz"}, **{f"rocdl.workgroup.id.{c}": _L._workgroup_id for c in "xyz"},
    "rocdl.readfirstlane": _L._readfirstlane, "rocdl.readlane": _L._readlane, "rocdl.ballot": _L._ballot, "rocdl.ds_bpermute": _L._bpermute,
    "rocdl.mbcnt.lo": _L._mbcnt, "rocdl.mbcnt.hi": _L._mbcnt,
    "rocdl.permlane16.swap": _L._permlane_swap, "rocdl.permlane32.swap": _L._permlane_swap,
    "rocdl.s.barrier": _L._barrier, "rocdl.barrier": _L._fenced_barrier, "rocdl.s.waitcnt": _L._waitcnt,
}  # fmt: skip


def lower_kernel(
    ir: Any, gpu_module: Any, function: Any, arch: str, mutate: Callable[[Builder], None] | None = None
) -> Program:
    """Lower one kernel function.

    ir          FlyDSL's MLIR bindings; gpu_module, function: operations of the module FlyDSL lowers to before code generation
    mutate      edits the program before registers are assigned (mutate.py)
    Raises UnknownOperation, naming the operation and the Python line, for what is not modelled.
    """
    if arch not in WAVE_SIZE:
        raise NotImplementedError(f"the simulator models {', '.join(WAVE_SIZE)}; {arch} is not among them")
    return KernelLowering(ir, gpu_module, function, arch, mutate).run()
