"""Planted faults: small changes to a lane program that stand for a kernel author's slips, to try tests and checkers on.

A mutation is a function that edits a Builder's blocks in place; session(mutate=...) applies it to every kernel it lowers. Each raises ValueError
if its place is not in the kernel, so a test cannot pass by mutating nothing. `faults` lists all that a kernel has a place for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .program import OPS, Block, Builder, Instruction

Mutation = Callable[[Builder], None]
_COPIES = ("BUFFER_LOAD_LDS", "GLOBAL_LOAD_LDS", "ASYNC_LOAD", "TENSOR")
# Reads of LDS carry a number of their own (letter s); which argument is the byte offset, where there is one.
_LDS_READS = tuple(
    name for name, (_, signature) in OPS.items() if "s" in signature and signature[0] == "i" and "ATOMIC" not in name
)
_BARRIERS = ("BARRIER", "BARRIER_WAIT")


def places(builder: Builder, ops: tuple[str, ...]) -> list[tuple[Block, Instruction]]:
    """Every instruction of the kinds `ops`, in program order."""
    builder.order_blocks()
    return [(b, i) for b in builder.blocks for i in b.code if i.op in ops]


def _place(builder: Builder, ops: tuple[str, ...], index: int) -> tuple[Block, Instruction]:
    found = places(builder, ops)
    if not -len(found) <= index < len(found):
        raise ValueError(f"the kernel has {len(found)} of {'/'.join(ops)}; there is no number {index}")
    return found[index]


def _remove(ops: tuple[str, ...], index: int) -> Mutation:
    def mutation(builder: Builder) -> None:
        block, instruction = _place(builder, ops, index)
        block.code = [i for i in block.code if i is not instruction]

    return mutation


def drop_barrier(index: int) -> Mutation:
    """Remove one barrier."""
    return _remove(_BARRIERS, index)


def drop_copy(index: int) -> Mutation:
    """Remove one copy to LDS."""
    return _remove(_COPIES, index)


def drop_lds_write(index: int) -> Mutation:
    """Remove one store to LDS."""
    return _remove(("LDS_STORE",), index)


def drop_fence(index: int) -> Mutation:
    """Remove one fence."""
    return _remove(("FENCE",), index)


def _vm_waits(builder: Builder) -> list[Instruction]:
    return [i for _, i in places(builder, ("WAIT",)) if i.args[0] >= 0]


def _lds_waits(builder: Builder) -> list[Instruction]:
    return [i for _, i in places(builder, ("WAIT",)) if i.args[1] >= 0]


def _counter_waits(builder: Builder) -> list[Instruction]:
    return [i for _, i in places(builder, ("WAIT_COUNTER",))]


def _edit(
    find: Callable[[Builder], list[Instruction]], what: str, index: int, change: Callable[[Instruction], None]
) -> Mutation:
    def mutation(builder: Builder) -> None:
        found = find(builder)
        if not -len(found) <= index < len(found):
            raise ValueError(f"the kernel has {len(found)} {what}; there is no number {index}")
        change(found[index])

    return mutation


def loosen_wait(index: int, by: int = 1) -> Mutation:
    """Raise one vmcnt by `by` operations; `index` counts the waits that name a vmcnt."""

    def change(i: Instruction) -> None:
        i.args[0] += by

    return _edit(_vm_waits, "waits with a vmcnt", index, change)


def drop_wait(index: int) -> Mutation:
    """Take the vmcnt out of one wait."""

    def change(i: Instruction) -> None:
        i.args[0] = -1

    return _edit(_vm_waits, "waits with a vmcnt", index, change)


def drop_lds_wait(index: int) -> Mutation:
    """Take the lgkmcnt out of one wait."""

    def change(i: Instruction) -> None:
        i.args[1] = -1

    return _edit(_lds_waits, "waits with an lgkmcnt", index, change)


def loosen_counter(index: int, by: int = 1) -> Mutation:
    """Raise one wait on a counter of gfx1250 (dscnt, asynccnt, tensorcnt) by `by` operations."""

    def change(i: Instruction) -> None:
        i.args[1] += by

    return _edit(_counter_waits, "waits on a counter", index, change)


def shift_lds_read(index: int, by: int = 16) -> Mutation:
    """Move one LDS read by `by` bytes."""

    def mutation(builder: Builder) -> None:
        _place(builder, _LDS_READS, index)[1].args[0] += by

    return mutation


def shift_lds_write(index: int, by: int = 16) -> Mutation:
    """Move one LDS store by `by` bytes."""

    def mutation(builder: Builder) -> None:
        _place(builder, ("LDS_STORE",), index)[1].args[0] += by

    return mutation


def shift_copy(index: int, by: int = 16) -> Mutation:
    """Move the LDS address of one buffer copy by `by` bytes."""

    def mutation(builder: Builder) -> None:
        block, instruction = _place(builder, ("BUFFER_LOAD_LDS",), index)
        moved = builder.new()
        block.code.insert(
            next(n for n, i in enumerate(block.code) if i is instruction),
            Instruction("ADD", instruction.line, [moved, instruction.args[-1], builder.constant(by)]),
        )
        instruction.args[-1] = moved

    return mutation


def _scaled(builder: Builder) -> list[Instruction]:
    return [i for _, i in places(builder, ("MFMA",)) if len(i.args[-2]) >= 2 and i.args[-2][0] != i.args[-2][-1]]


def swap_scales(index: int) -> Mutation:
    """Exchange the scales of A and B of one scaled matrix instruction (one whose scales are different registers)."""

    def change(i: Instruction) -> None:
        half = len(i.args[-2]) // 2
        i.args[-2] = i.args[-2][half:] + i.args[-2][:half]

    return _edit(_scaled, "scaled matrix instructions", index, change)


def shift_scales(index: int) -> Mutation:
    """Move the scale register of A of one scaled matrix instruction by one byte."""

    def mutation(builder: Builder) -> None:
        found = [(b, i) for b, i in places(builder, ("MFMA",)) if i.args[-2]]
        if not -len(found) <= index < len(found):
            raise ValueError(f"the kernel has {len(found)} scaled matrix instructions; there is no number {index}")
        block, instruction = found[index]
        shifted = builder.new()
        at = next(n for n, i in enumerate(block.code) if i is instruction)
        eight = builder.constant(8)
        block.code.insert(
            at,
            Instruction(
                "ALIGNBIT", instruction.line, [shifted, instruction.args[-2][0], instruction.args[-2][0], eight]
            ),
        )
        instruction.args[-2] = [shifted, *instruction.args[-2][1:]]

    return mutation


@dataclass(frozen=True)
class Fault:
    """One fault a kernel has a place for. name: kind and number, the same for the same kernel; line: index into Program.lines."""

    name: str
    line: int
    mutation: Mutation


def faults(builder: Builder) -> list[Fault]:
    """Every barrier, wait, LDS read, LDS store, copy, fence and scaled matrix instruction of a kernel, each with its fault, in program order."""

    def found(ops: tuple[str, ...]) -> list[Instruction]:
        return [i for _, i in places(builder, ops)]

    kinds: list[tuple[str, list[Instruction], Callable[[int], Mutation]]] = [
        ("barrier dropped", found(_BARRIERS), drop_barrier),
        ("vmcnt one higher", _vm_waits(builder), loosen_wait),
        ("vmcnt dropped", _vm_waits(builder), drop_wait),
        ("lgkmcnt dropped", _lds_waits(builder), drop_lds_wait),
        ("counter one higher", _counter_waits(builder), loosen_counter),
        ("LDS read 16 bytes off", found(_LDS_READS), shift_lds_read),
        ("LDS store 16 bytes off", found(("LDS_STORE",)), shift_lds_write),
        ("LDS store dropped", found(("LDS_STORE",)), drop_lds_write),
        ("copy dropped", found(_COPIES), drop_copy),
        ("copy 16 bytes off", found(("BUFFER_LOAD_LDS",)), shift_copy),
        ("scales swapped", _scaled(builder), swap_scales),
        ("scale one byte off", [i for i in found(("MFMA",)) if i.args[-2]], shift_scales),
    ]
    return [
        Fault(f"{kind} #{index}", instruction.line, make(index))
        for kind, instructions, make in kinds
        for index, instruction in enumerate(instructions)
    ]
