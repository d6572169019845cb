"""Planted faults: small changes to a lane program that stand for a kernel author's slips, to try tests and checkers on.

A mutation is a function that edits a Builder's blocks in place; session(mutate=...) applies it to every kernel it lowers. Each raises ValueError if its place is not in the kernel, so a test cannot pass by mutating nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from .program import Block, Builder, Instruction

Mutation = Callable[[Builder], None]
_COPIES = ("BUFFER_LOAD_LDS", "GLOBAL_LOAD_LDS")
_LDS_READS = ("LDS_LOAD", "DS_READ_TR16_B64")


def places(builder: Builder, ops: tuple[str, ...]) -> list[tuple[Block, Instruction]]:
    """Every instruction of the kinds `ops`, in program order."""
    builder.order_blocks()
    return [(b, i) for b in builder.blocks for i in b.code if i.op in ops]


def _place(builder: Builder, ops: tuple[str, ...], index: int) -> tuple[Block, Instruction]:
    found = places(builder, ops)
    if not -len(found) <= index < len(found):
        raise ValueError(f"the kernel has {len(found)} of {'/'.join(ops)}; there is no number {index}")
    return found[index]


def drop_barrier(index: int) -> Mutation:
    """Remove one barrier."""

    def mutation(builder: Builder) -> None:
        block, instruction = _place(builder, ("BARRIER",), index)
        block.code.remove(instruction)

    return mutation


def loosen_wait(index: int, by: int = 1) -> Mutation:
    """Raise one vmcnt by `by` operations; `index` counts the waits that name a vmcnt."""

    def mutation(builder: Builder) -> None:
        found = [i for _, i in places(builder, ("WAIT",)) if i.args[0] >= 0]
        if not -len(found) <= index < len(found):
            raise ValueError(f"the kernel has {len(found)} waits with a vmcnt; there is no number {index}")
        found[index].args[0] += by

    return mutation


def drop_lds_wait(index: int) -> Mutation:
    """Remove one wait for LDS operations (lgkmcnt)."""

    def mutation(builder: Builder) -> None:
        found = [i for _, i in places(builder, ("WAIT",)) if i.args[1] >= 0]
        if not -len(found) <= index < len(found):
            raise ValueError(f"the kernel has {len(found)} waits with an lgkmcnt; there is no number {index}")
        found[index].args[1] = -1

    return mutation


def shift_lds_read(index: int, by: int = 16) -> Mutation:
    """Move one LDS read by `by` bytes."""

    def mutation(builder: Builder) -> None:
        _, instruction = _place(builder, _LDS_READS, index)
        instruction.args[0] += by

    return mutation


def drop_copy(index: int) -> Mutation:
    """Remove one copy to LDS."""

    def mutation(builder: Builder) -> None:
        block, instruction = _place(builder, _COPIES, index)
        block.code.remove(instruction)

    return mutation


def compose(*mutations: Mutation) -> Mutation:
    def mutation(builder: Builder) -> None:
        for m in mutations:
            m(builder)

    return mutation
