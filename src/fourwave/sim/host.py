"""Interprets the host `llvm.func` of a lowered module: scalar integer arithmetic that leads to `gpu.launch_func`."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ir_types import Array, Float, Int, Ptr, Struct, Type, dwords, field_offset, parse, size_and_align
from .lowering import UnknownOperation, describe_frames, find_frames, float_bits, plain

Dims = tuple[int, int, int]
Launcher = Callable[
    [str, Dims, Dims, int, list[list[int]], Dims], None
]  # kernel, grid, block, dynamic LDS, arguments, cluster


def read_argument(address: int, t: Type) -> Any:
    """The value of type `t` at a host address, as ints (raw bits) nested like the type."""
    if isinstance(t, Struct):
        return [read_argument(address + field_offset(t, i), f) for i, f in enumerate(t.fields)]
    if isinstance(t, Array):
        size, _ = size_and_align(t.element)  # type: ignore[arg-type]
        return [read_argument(address + i * size, t.element) for i in range(t.count)]  # type: ignore[arg-type]
    size, _ = size_and_align(t)
    value = int.from_bytes(ctypes.string_at(address, size), "little")
    return value & ((1 << t.bits) - 1)


def flat_dwords(value: Any, t: Type) -> list[int]:
    """A value's dwords in the order KernelLowering laid out the argument's registers."""
    if isinstance(t, Struct):
        return [d for v, f in zip(value, t.fields) for d in flat_dwords(v, f)]
    if isinstance(t, Array):
        return [d for v in value for d in flat_dwords(v, t.element)]  # type: ignore[arg-type]
    return [value >> (32 * i) & 0xFFFFFFFF for i in range(dwords(t))]


DEFAULT_THREADS = 256  # what MLIR compiles a kernel for that states no size (amdgpu-flat-work-group-size "1,256")


@dataclass(frozen=True)
class Bounds:
    """What a kernel was compiled for. required: its exact workgroup, if it states one; most: threads in one; both by its attributes."""

    required: Dims | None = None
    most: int = DEFAULT_THREADS


def bounds_of(function: Any, default: int = DEFAULT_THREADS) -> Bounds:
    """Of a lowered kernel (llvm.func). default: threads of one that states nothing."""
    named = {name: str(function.attributes[name]) for name in map(_attribute_name, function.attributes)}
    required = named.get("rocdl.reqd_work_group_size") or named.get("gpu.known_block_size")
    if required is not None:
        x, y, z = (int(n) for n in re.findall(r"\d+", required.partition(":")[2]))
        return Bounds((x, y, z), x * y * z)
    if flat := named.get("rocdl.flat_work_group_size"):
        return Bounds(None, int(re.findall(r"\d+", flat)[-1]))
    return Bounds(None, default)


def _attribute_name(attribute: Any) -> str:
    return attribute if isinstance(attribute, str) else attribute.name


def check_sizes(kernel: str, grid: Dims, block: Dims, bounds: Bounds) -> None:
    """Raise ValueError for a launch that HIP refuses, or leaves undefined, by its sizes alone."""
    if min(*grid, *block) < 0:
        raise ValueError(
            f"kernel {kernel} was launched with a grid of {grid} and {block} threads; sizes are not negative"
        )
    threads = block[0] * block[1] * block[2]
    if bounds.required is not None and block != bounds.required:
        raise ValueError(
            f"kernel {kernel} was launched with {block} threads; it was compiled for exactly {bounds.required} (known_block_size, or "
            "Triton's warps), and what another size does is undefined"
        )
    if threads > bounds.most:
        raise ValueError(
            f"kernel {kernel} was launched with {threads} threads in a workgroup, {block}; it was compiled for at most {bounds.most}, and HIP refuses "
            "launches larger than that: state known_block_size"
        )
    for g, b, axis in zip(grid, block, "xyz"):
        if g * b >= 1 << 32:
            raise ValueError(
                f"kernel {kernel} was launched with {g} workgroups of {b} threads in {axis}, {g * b} in all; HIP refuses 2^32 and more in one dimension"
            )


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _divide(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


_BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, n: a + b, "sub": lambda a, b, n: a - b, "mul": lambda a, b, n: a * b,
    "and": lambda a, b, n: a & b, "or": lambda a, b, n: a | b, "xor": lambda a, b, n: a ^ b,
    "shl": lambda a, b, n: a << b, "lshr": lambda a, b, n: a >> b, "ashr": lambda a, b, n: _signed(a, n) >> b,
    "udiv": lambda a, b, n: a // b, "urem": lambda a, b, n: a % b,
    "sdiv": lambda a, b, n: _divide(_signed(a, n), _signed(b, n)),
    "srem": lambda a, b, n: _signed(a, n) - _signed(b, n) * _divide(_signed(a, n), _signed(b, n)),
    "intr.smin": lambda a, b, n: min(_signed(a, n), _signed(b, n)), "intr.smax": lambda a, b, n: max(_signed(a, n), _signed(b, n)),
    "intr.umin": lambda a, b, n: min(a, b), "intr.umax": lambda a, b, n: max(a, b),
}  # fmt: skip
_COMPARE: list[Callable[[int, int, int], bool]] = [
    lambda a, b, n: a == b, lambda a, b, n: a != b,
    lambda a, b, n: _signed(a, n) < _signed(b, n), lambda a, b, n: _signed(a, n) <= _signed(b, n),
    lambda a, b, n: _signed(a, n) > _signed(b, n), lambda a, b, n: _signed(a, n) >= _signed(b, n),
    lambda a, b, n: a < b, lambda a, b, n: a <= b, lambda a, b, n: a > b, lambda a, b, n: a >= b,
]  # fmt: skip


class HostInterpreter:
    def __init__(self, ir: Any, function: Any, launch: Launcher) -> None:
        self.ir, self.function, self.launch = ir, function, launch

    def __call__(self, packed: int) -> None:
        """Run with FlyDSL's packed ABI: an array of pointers, one to each argument's storage."""
        blocks = list(self.function.regions[0].blocks)
        values: dict[Any, Any] = {}
        pointers = (ctypes.c_void_p * len(blocks[0].arguments)).from_address(packed)
        for argument, pointer in zip(blocks[0].arguments, pointers):
            values[plain(self.ir, argument)] = read_argument(pointer, parse(str(argument.type)))
        block = blocks[0]
        while block is not None:
            following = None
            for op in block.operations:
                o = op.operation
                if o.name == "llvm.return":
                    return
                if o.name == "llvm.br":
                    following = self._enter(o.successors[0], self._operands(o), values)
                elif o.name == "llvm.cond_br":
                    sizes = [
                        int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])
                    ]
                    condition, *rest = self._operands(o)
                    taken = values[condition] & 1
                    following = self._enter(
                        o.successors[0 if taken else 1], rest[: sizes[1]] if taken else rest[sizes[1] :], values
                    )
                elif o.name == "gpu.launch_func":
                    self._launch(o, values)
                else:
                    result = self._evaluate(o, values)
                    if len(o.results) == 1:
                        values[plain(self.ir, o.results[0])] = result
            block = following

    def _operands(self, o: Any) -> list[Any]:
        return [plain(self.ir, x) for x in o.operands]

    def _enter(self, block: Any, arguments: list[Any], values: dict[Any, Any]) -> Any:
        incoming = [values[a] for a in arguments]
        for target, value in zip(block.arguments, incoming):
            values[plain(self.ir, target)] = value
        return block

    def _evaluate(self, o: Any, values: dict[Any, Any]) -> Any:
        ir, short = self.ir, o.name.removeprefix("llvm.")
        operands = [values[x] for x in self._operands(o)]
        t = parse(str(o.results[0].type)) if len(o.results) == 1 else None
        if short == "mlir.constant":
            attribute = o.attributes["value"]
            if isinstance(attribute, ir.BoolAttr):
                return int(ir.BoolAttr(attribute).value)
            if isinstance(attribute, ir.IntegerAttr):
                return ir.IntegerAttr(attribute).value & ((1 << t.bits) - 1)  # type: ignore[union-attr]
            if isinstance(t, Float) and isinstance(attribute, ir.FloatAttr):
                return float_bits(ir.FloatAttr(attribute).value, t)
        elif short in ("mlir.zero", "mlir.undef", "mlir.poison"):
            return self._blank(t)  # type: ignore[arg-type]
        elif short in _BINARY and isinstance(t, Int):
            return _BINARY[short](operands[0], operands[1], t.bits) & ((1 << t.bits) - 1)
        elif short == "icmp":
            bits = parse(str(o.operands[0].type)).bits  # type: ignore[union-attr]
            return int(_COMPARE[ir.IntegerAttr(o.attributes["predicate"]).value](operands[0], operands[1], bits))
        elif short == "select":
            return operands[1] if operands[0] & 1 else operands[2]
        elif short == "sext":
            return _signed(operands[0], parse(str(o.operands[0].type)).bits) & ((1 << t.bits) - 1)  # type: ignore[union-attr]
        elif short in ("zext", "trunc", "ptrtoint", "inttoptr", "bitcast", "addrspacecast"):
            return operands[0] & ((1 << t.bits) - 1)  # type: ignore[union-attr]
        elif short in ("extractvalue", "insertvalue"):
            path = [int(x) for x in re.findall(r"-?\d+", str(o.attributes["position"]).split(":", 1)[-1])]
            if short == "extractvalue":
                value = operands[0]
                for i in path:
                    value = value[i]
                return value
            return self._put(operands[0], path, operands[1])
        where = describe_frames(find_frames(str(o.location)))
        raise UnknownOperation(f"{where}: the simulator does not model {o.name} in a host function\n  {str(o)[:300]}")

    def _blank(self, t: Type) -> Any:
        if isinstance(t, (Struct, Array)):
            fields = t.fields if isinstance(t, Struct) else (t.element,) * t.count
            return [self._blank(f) for f in fields]  # type: ignore[arg-type]
        return 0

    def _put(self, whole: Any, path: list[int], value: Any) -> Any:
        return [self._put(x, path[1:], value) if i == path[0] else x for i, x in enumerate(whole)] if path else value

    def _launch(self, o: Any, values: dict[Any, Any]) -> None:
        sizes = [int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])]
        operands = self._operands(o)
        groups, at = [], 0
        for size in sizes:
            groups.append(operands[at : at + size])
            at += size
        # gpu.launch_func: async dependencies, grid x y z, block x y z, cluster x y z, dynamic LDS, kernel operands, async object
        dims = [_signed(values[g[0]], parse(str(g[0].type)).bits) if g else 1 for g in groups[1:10]]  # type: ignore[union-attr]
        dynamic = values[groups[10][0]] if groups[10] else 0
        arguments = [flat_dwords(values[a], parse(str(a.type))) for a in groups[11]]
        kernel = re.findall(r"@([\w$.]+)", str(o.attributes["kernel"]))[-1]
        self.launch(kernel, tuple(dims[:3]), tuple(dims[3:6]), dynamic, arguments, tuple(dims[6:9]))  # type: ignore[arg-type]


__all__ = ["HostInterpreter", "Ptr", "flat_dwords", "read_argument"]
