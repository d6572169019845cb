"""Branches and their block arguments."""

from __future__ import annotations

import re
from typing import Any

from ..program import Block
from .base import Lowering, Value, handles


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


@handles("llvm.return")
def _return(k: Lowering, o: Any) -> Value:
    if k.operands:
        raise k.fail("a kernel that returns a value", o)
    k.emit("END")


@handles("llvm.unreachable")
def _unreachable(k: Lowering, o: Any) -> Value:
    k.emit("UNREACHABLE")


@handles("llvm.intr.assume")
def _nothing(k: Lowering, o: Any) -> Value:
    return None
