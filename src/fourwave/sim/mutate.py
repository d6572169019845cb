"""Planted faults: small changes to a lane program that stand for a kernel author's slips, to try tests and checkers on.

A mutation is a function that edits a prepared Builder; session(mutate=...) applies it to every kernel it lowers. Each raises ValueError if its
place is not in the kernel, so a test cannot pass by mutating nothing. `faults` lists all that a kernel has a place for.

An edit puts new lists and instructions in place of those it changes, so that the program as it was can be put back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .program import OPS, USED, Block, Builder, Instruction

Mutation = Callable[[Builder], None]
Place = tuple[Block, Instruction]
Edit = Callable[[Builder, Block, Instruction], None]
_COPIES = ("BUFFER_LOAD_LDS", "GLOBAL_LOAD_LDS", "ASYNC_LOAD", "TENSOR")
# Reads of LDS carry a number of their own (letter s); which argument is the byte offset, where there is one.
_LDS_READS = tuple(
    name for name, (_, signature) in OPS.items() if "s" in signature and signature[0] == "i" and "ATOMIC" not in name
)
_BARRIERS = ("BARRIER", "BARRIER_WAIT")
# Copies to LDS, and which argument is the LDS address; a tile's is the second word of its descriptor.
_COPY_ADDRESS = {"BUFFER_LOAD_LDS": 8, "GLOBAL_LOAD_LDS": 4, "ASYNC_LOAD": 4}
_SHIFTED = (*_COPY_ADDRESS, "TENSOR")

# Loads from global memory to registers with a byte offset of their own (the first argument), and which argument is the size.
_LOAD_BYTES = {"GLOBAL_LOAD": 3, "BUFFER_LOAD": 7}


def places(builder: Builder, ops: tuple[str, ...]) -> list[Place]:
    """Every instruction of the kinds `ops`, in program order."""
    return [(b, i) for b in builder.blocks for i in b.code if i.op in ops]


def _index(block: Block, instruction: Instruction) -> int:
    return next(n for n, i in enumerate(block.code) if i is instruction)


def _splice(block: Block, at: int, remove: int, new: list[Instruction]) -> None:
    block.code = [*block.code[:at], *new, *block.code[at + remove :]]


def _remove(builder: Builder, block: Block, instruction: Instruction) -> None:
    at = _index(block, instruction)
    used = at and block.code[at - 1].op in USED
    _splice(block, at, 1, [])
    if used:  # the mark goes to the next use
        builder.mark_uses_again()


def _change(argument: int, new: Callable[[int], int]) -> Edit:
    """Edit of one argument."""

    def edit(builder: Builder, block: Block, i: Instruction) -> None:
        args = [*i.args]
        args[argument] = new(args[argument])
        _splice(block, _index(block, i), 1, [Instruction(i.op, i.line, args)])

    return edit


def _move_copy(by: int) -> Edit:
    def edit(builder: Builder, block: Block, i: Instruction) -> None:
        moved, args = builder.new(), [*i.args]
        if i.op == "TENSOR":
            address = args[1][1]
            args[1] = [args[1][0], moved, *args[1][2:]]
        else:
            address, args[_COPY_ADDRESS[i.op]] = args[_COPY_ADDRESS[i.op]], moved
        add = Instruction("ADD", i.line, [moved, address, builder.constant(by)])
        _splice(block, _index(block, i), 1, [add, Instruction(i.op, i.line, args)])

    return edit


def _next_element(builder: Builder, block: Block, i: Instruction) -> None:
    """A load to registers that reads what follows, as many bytes on as it reads."""
    size = i.args[_LOAD_BYTES[i.op]] & 0xFF
    _change(0, lambda n: n + size)(builder, block, i)


def _swap_scales(builder: Builder, block: Block, i: Instruction) -> None:
    scales = i.args[-2]
    half = len(scales) // 2
    args = [*i.args[:-2], scales[half:] + scales[:half], i.args[-1]]
    _splice(block, _index(block, i), 1, [Instruction(i.op, i.line, args)])


def _turn_scale(builder: Builder, block: Block, i: Instruction) -> None:
    shifted, scales = builder.new(), i.args[-2]
    turn = Instruction("ALIGNBIT", i.line, [shifted, scales[0], scales[0], builder.constant(8)])
    args = [*i.args[:-2], [shifted, *scales[1:]], i.args[-1]]
    _splice(block, _index(block, i), 1, [turn, Instruction(i.op, i.line, args)])


def _scaled(builder: Builder) -> list[Place]:
    return [p for p in places(builder, ("MFMA",)) if p[1].args[-2]]


def _scaled_differently(builder: Builder) -> list[Place]:
    return [p for p in _scaled(builder) if len(p[1].args[-2]) >= 2 and p[1].args[-2][0] != p[1].args[-2][-1]]


def _vm_waits(builder: Builder) -> list[Place]:
    return [p for p in places(builder, ("WAIT",)) if p[1].args[0] >= 0]


def _lds_waits(builder: Builder) -> list[Place]:
    return [p for p in places(builder, ("WAIT",)) if p[1].args[1] >= 0]


def _counting_lds_waits(builder: Builder) -> list[Place]:
    """Those that leave a number of LDS operations out: one higher is another count."""
    return [p for p in places(builder, ("WAIT",)) if p[1].args[1] > 0]


def _empties_lds(i: Instruction) -> bool:
    """Whether it waits for all of the wave's LDS operations."""
    return (
        (i.op == "FENCE" and i.args[0] > 0)
        or (i.op == "WAIT" and i.args[1] == 0)
        or (i.op == "WAIT_COUNTER" and i.args == [0, 0])
    )


def _releases(builder: Builder) -> list[Place]:
    """Fences that may have something to wait for: an LDS store of the wave is out, or the scope is wider than the workgroup."""
    out = dict.fromkeys(builder.blocks, False)  # at a block's end
    work = True
    while work:
        work = False
        for block in builder.blocks:
            state = any(out[b] for b in builder.blocks if block in b.successors)
            for i in block.code:
                state = i.op in ("LDS_STORE", "LDS_ATOMIC") or (state and not _empties_lds(i))
            if state != out[block]:
                out[block] = work = True
    found = []
    for block in builder.blocks:
        state = any(out[b] for b in builder.blocks if block in b.successors)
        for i in block.code:
            if i.op == "FENCE" and (i.args[0] > 1 or (i.args[0] and state)):
                found.append((block, i))
            state = i.op in ("LDS_STORE", "LDS_ATOMIC") or (state and not _empties_lds(i))
    return found


def _of(*ops: str) -> Callable[[Builder], list[Place]]:
    return lambda builder: places(builder, ops)


# What `faults` plants, in its order: kind of fault, where, and the edit.
KINDS: dict[str, tuple[Callable[[Builder], list[Place]], Edit]] = {
    "barrier dropped": (_of(*_BARRIERS), _remove),
    "barrier signal dropped": (_of("BARRIER_SIGNAL"), _remove),
    "fence dropped": (_releases, _remove),
    "vmcnt one higher": (_vm_waits, _change(0, lambda n: n + 1)),
    "vmcnt dropped": (_vm_waits, _change(0, lambda n: -1)),
    "lgkmcnt one higher": (_counting_lds_waits, _change(1, lambda n: n + 1)),
    "lgkmcnt dropped": (_lds_waits, _change(1, lambda n: -1)),
    "counter one higher": (_of("WAIT_COUNTER"), _change(1, lambda n: n + 1)),
    "counter dropped": (_of("WAIT_COUNTER"), _remove),
    "LDS read 16 bytes off": (_of(*_LDS_READS), _change(0, lambda n: n + 16)),
    "LDS store 16 bytes off": (_of("LDS_STORE"), _change(0, lambda n: n + 16)),
    "LDS store dropped": (_of("LDS_STORE"), _remove),
    "copy dropped": (_of(*_COPIES), _remove),
    "copy 16 bytes off": (_of(*_SHIFTED), _move_copy(16)),
    "load off by its size": (_of(*_LOAD_BYTES), _next_element),
    "scales swapped": (_scaled_differently, _swap_scales),
    "scale one byte off": (_scaled, _turn_scale),
}


def _nth(find: Callable[[Builder], list[Place]], what: str, index: int, edit: Edit) -> Mutation:
    def mutation(builder: Builder) -> None:
        found = find(builder)
        if not -len(found) <= index < len(found):
            raise ValueError(f"the kernel has {len(found)} {what}; there is no number {index}")
        edit(builder, *found[index])

    return mutation


def drop_barrier(index: int) -> Mutation:
    """Remove one barrier."""
    return _nth(_of(*_BARRIERS), "barriers", index, _remove)


def drop_copy(index: int) -> Mutation:
    """Remove one copy to LDS."""
    return _nth(_of(*_COPIES), "copies", index, _remove)


def drop_lds_write(index: int) -> Mutation:
    """Remove one store to LDS."""
    return _nth(_of("LDS_STORE"), "LDS stores", index, _remove)


def drop_fence(index: int) -> Mutation:
    """Remove one fence."""
    return _nth(_of("FENCE"), "fences", index, _remove)


def loosen_wait(index: int, by: int = 1) -> Mutation:
    """Raise one vmcnt by `by` operations; `index` counts the waits that name a vmcnt."""
    return _nth(_vm_waits, "waits with a vmcnt", index, _change(0, lambda n: n + by))


def drop_wait(index: int) -> Mutation:
    """Take the vmcnt out of one wait."""
    return _nth(_vm_waits, "waits with a vmcnt", index, _change(0, lambda n: -1))


def drop_lds_wait(index: int) -> Mutation:
    """Take the lgkmcnt out of one wait."""
    return _nth(_lds_waits, "waits with an lgkmcnt", index, _change(1, lambda n: -1))


def loosen_counter(index: int, by: int = 1) -> Mutation:
    """Raise one wait on a counter of gfx1250 (dscnt, asynccnt, tensorcnt) by `by` operations."""
    return _nth(_of("WAIT_COUNTER"), "waits on a counter", index, _change(1, lambda n: n + by))


def shift_lds_read(index: int, by: int = 16) -> Mutation:
    """Move one LDS read by `by` bytes."""
    return _nth(_of(*_LDS_READS), "LDS reads", index, _change(0, lambda n: n + by))


def shift_lds_write(index: int, by: int = 16) -> Mutation:
    """Move one LDS store by `by` bytes."""
    return _nth(_of("LDS_STORE"), "LDS stores", index, _change(0, lambda n: n + by))


def shift_copy(index: int, by: int = 16) -> Mutation:
    """Move the LDS address of one copy by `by` bytes."""
    return _nth(_of(*_SHIFTED), "copies", index, _move_copy(by))


def shift_load(index: int) -> Mutation:
    """Let one load from global memory to registers read what follows: operands, scales, bias, group sizes."""
    return _nth(_of(*_LOAD_BYTES), "loads to registers", index, _next_element)


def swap_scales(index: int) -> Mutation:
    """Exchange the scales of A and B of one scaled matrix instruction (one whose scales are different registers)."""
    return _nth(_scaled_differently, "scaled matrix instructions", index, _swap_scales)


def shift_scales(index: int) -> Mutation:
    """Move the scale register of A of one scaled matrix instruction by one byte."""
    return _nth(_scaled, "scaled matrix instructions", index, _turn_scale)


@dataclass(frozen=True)
class Fault:
    """One fault a kernel has a place for.

    name      kind and number, the same for the same kernel
    line      index into Program.lines
    mutation  for the builder it was found in
    """

    name: str
    line: int
    mutation: Mutation


def faults(builder: Builder) -> list[Fault]:
    """Every barrier, wait, LDS read, LDS store, copy, load and scaled matrix instruction of a kernel, each with its faults, in program order."""

    def planted(edit: Edit, place: Place) -> Mutation:
        return lambda builder: edit(builder, *place)

    return [
        Fault(f"{kind} #{index}", place[1].line, planted(edit, place))
        for kind, (find, edit) in KINDS.items()
        for index, place in enumerate(find(builder))
    ]
