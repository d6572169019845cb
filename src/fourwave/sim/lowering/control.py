"""Branches and their block arguments."""

from __future__ import annotations

import re
from typing import Any

from ..ir_types import dwords, parse
from ..program import FUNARY, Block
from .base import Lowering, Value, handles, plain


@handles("llvm.br")
def _br(k: Lowering, o: Any) -> Value:
    k._jump(o.successors[0], k.operands)


@handles("llvm.cond_br")
def _cond_br(k: Lowering, o: Any) -> Value:
    sizes = [int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])]
    operands = k.operands
    yes_args, no_args = operands[1 : 1 + sizes[1]], operands[1 + sizes[1] :]
    here, sides = k.block, []
    for target, args in zip(o.successors, (yes_args, no_args)):
        if not args:
            sides.append(k.by_block[target])
            continue
        edge = Block(f"{here.name}-edge")
        k.b.blocks.append(edge)
        k.block = edge
        k._jump(target, args)
        sides.append(edge)
    k.block = here
    if sides[0] is sides[1]:
        k.emit("JUMP", sides[0])
        here.successors = [sides[0]]
        return
    k.emit("BRANCH", k.operand(o, 0)[0], sides[0], sides[1])
    here.successors = sides


@handles("llvm.switch")
def _switch(k: Lowering, o: Any) -> Value:
    """A chain of comparisons, in the order of the cases."""
    sizes = [int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])]
    value, operands = k.operand(o, 0), k.operands
    default_args, rest = operands[1 : 1 + sizes[1]], operands[1 + sizes[1] :]
    counts = [int(x) for x in re.findall(r"\d+", str(o.attributes["case_operand_segments"]).split(":", 1)[-1])]
    attribute = o.attributes["case_values"] if "case_values" in o.attributes else None
    cases = list(k.ir.DenseIntElementsAttr(attribute)) if attribute is not None else []
    bits = k.operand_type(o, 0).bits
    for case, target, count in zip(cases, list(o.successors)[1:], counts):
        args, rest = rest[:count], rest[count:]
        wanted = tuple(k.const((case & ((1 << bits) - 1)) >> (32 * i)) for i in range(len(value)))
        here, taken, following = k.block, Block(f"{k.block.name}-case"), Block(f"{k.block.name}-next")
        k.b.blocks += [taken, following]
        k.emit("BRANCH", k.compare("EQ", value, wanted, bits)[0], taken, following)
        here.successors = [taken, following]
        k.block = taken
        k._jump(target, args)
        k.block = following
        k.extracted = {}
    k._jump(o.successors[0], default_args)


# Device library functions that FlyDSL and Triton leave to the linker (ROCm device libraries, ocml.h), and core.c's functions for them.
_OCML = {
    "exp": "exp", "exp2": "exp2", "log": "log", "log2": "log2", "sqrt": "sqrt", "rsqrt": "rsq", "sin": "sin", "cos": "cos", "tanh": "tanh",
    "floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "rint", "round": "round", "erf": "erf", "fabs": "abs",
    "native_exp2": "exp2", "native_recip": "rcp", "native_rsqrt": "rsq", "native_log2": "log2",
}  # fmt: skip


@handles("llvm.call")
def _call(k: Lowering, o: Any) -> Value:
    """A call of a function of the module, lowered in place; of a device library function, by name."""
    if "callee" not in o.attributes:
        raise k.fail("a call through a pointer", o)
    name = str(o.attributes["callee"]).lstrip("@").strip('"')
    sizes = [int(x) for x in re.findall(r"\d+", str(o.attributes["operandSegmentSizes"]).split(":", 1)[1])]
    if sizes[1]:
        raise k.fail("a call with operand bundles", o)
    function = next(
        (
            f.operation
            for f in k.module.regions[0].blocks[0].operations
            if f.operation.name == "llvm.func" and k.ir.StringAttr(f.operation.attributes["sym_name"]).value == name
        ),
        None,
    )
    if function is None or not len(function.regions[0].blocks):
        m = re.fullmatch(r"__ocml_(\w+)_f32", name)
        if m and m[1] in _OCML:
            return (k.out("FUNARY", k.operand(o, 0)[0], FUNARY.index(_OCML[m[1]])),)
        raise k.fail(f"a call of the external function {name}", o)
    if any(name == called for called, _, _ in k.calls):
        raise k.fail(f"the recursive function {name}", o)
    blocks = list(function.regions[0].blocks)
    body = {block: Block(f"{name}-bb{i}") for i, block in enumerate(blocks)}
    after = Block(f"{k.block.name}-after-{name}")
    k.b.blocks += [*body.values(), after]
    for argument, value in zip((plain(k.ir, x) for x in blocks[0].arguments), k.operands):
        k.values[argument], k.types[argument] = k.values[value], k.types[value]
    for block in blocks[1:]:
        for argument in (plain(k.ir, x) for x in block.arguments):
            t = parse(str(argument.type))
            k.types[argument] = t
            k.values[argument] = tuple(k.b.new() for _ in range(dwords(t)))
    result = [k.b.new() for _ in range(dwords(k.result_type(o)))] if len(o.results) else []
    k.emit("JUMP", body[blocks[0]])
    k.block.successors = [body[blocks[0]]]
    line, outer = k.line, k.by_block
    k.by_block = {**outer, **body}
    k.calls.append((name, after, result))
    k.lower_blocks(blocks)
    k.calls.pop()
    k.by_block, k.block, k.extracted, k.line = outer, after, {}, line
    return tuple(result)


@handles("llvm.return")
def _return(k: Lowering, o: Any) -> Value:
    if k.calls:
        _, after, result = k.calls[-1]
        if k.operands:
            k.emit("MOVN", list(zip(result, k.operand(o, 0))))
        k.emit("JUMP", after)
        k.block.successors = [after]
        return
    if k.operands:
        raise k.fail("a kernel that returns a value", o)
    k.emit("END")


@handles("llvm.unreachable")
def _unreachable(k: Lowering, o: Any) -> Value:
    k.emit("UNREACHABLE")


@handles("llvm.intr.assume")
def _nothing(k: Lowering, o: Any) -> Value:
    return None
