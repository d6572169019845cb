"""A lane program under construction: blocks of instructions on virtual registers, then liveness, register assignment and encoding.

Registers are dwords; a virtual register is an int. The opcodes and their signatures come from ops.def, which core.c also includes.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

_HERE = Path(__file__).parent


def _definitions(name: str) -> str:
    """ops.def with its includes put in."""
    return re.sub(r'^#include "(\S+)"$', lambda m: _definitions(m[1]), (_HERE / name).read_text(), flags=re.M)


OPS: dict[str, tuple[int, str]] = {
    name: (number, signature)
    for number, (name, signature) in enumerate(re.findall(r'OP\((\w+), "([^"]*)"\)', _definitions("ops.def")))
}
# The order of core.c's enum that starts with U_NEG.
FUNARY = (
    "neg abs sqrt rcp rsq exp2 log2 exp log sin cos tanh floor ceil trunc rint round erf".split()
)  # fmt: skip
# Reads count as effects: their addresses are checked. So does everything without a result.
_EFFECTS = {name for name, (_, signature) in OPS.items() if "d" not in signature or "s" in signature} | {
    "GLOBAL_LOAD",
    "BUFFER_LOAD",
    "GLOBAL_ATOMIC",
    "BUFFER_ATOMIC",
    "S_BUFFER_LOAD",
    "SCRATCH_LOAD",
    "TRANSPOSE_GLOBAL",
    "BARRIER_SIGNAL_ISFIRST",
}
# With a result, and no arithmetic: who the lane is, scalar loads, private memory, moves, the matrix unit.
_NOT_VALU = {
    "MOVN", "LANE_ID", "THREAD_ID", "GROUP_ID", "WAVE_ID", "CLUSTER_ID", "BARRIER_SIGNAL_ISFIRST", "S_BUFFER_LOAD", "ASM_RESULT", "SCRATCH_LOAD",
    "MFMA",
}  # fmt: skip


def _unit(name: str, signature: str) -> int:
    """The part of the machine that an opcode is counted for, in the order of core.c's U_OTHER: other, VALU, LDS, global memory."""
    if name.startswith(("LDS_", "DS_")) or name == "TRANSPOSE_LDS":
        return 2
    if name.startswith(("GLOBAL_", "BUFFER_", "ASYNC_")) or name in ("TENSOR", "TRANSPOSE_GLOBAL"):
        return 3
    return int("d" in signature and name not in _NOT_VALU)


UNITS = bytes(_unit(name, signature) for name, (_, signature) in OPS.items())


@dataclass
class Instruction:
    op: str
    line: int
    args: list  # one entry a signature letter; a list for a starred one; a Block for t
    words: bytes | None = field(default=None, compare=False, repr=False)  # its code, once made; a jump's is made anew


@dataclass(eq=False)
class Block:
    name: str
    code: list[Instruction] = field(default_factory=list)
    successors: list[Block] = field(default_factory=list)
    meet: Block | None = None  # of its branch: where the two sides come together
    joins: bool = False  # some branch's sides meet here
    pc: int = -1
    encoded: Any = field(default=None, repr=False)  # the list of instructions encoded last, and what came of it


def _letters(signature: str) -> list[str]:
    return re.findall(r".\*?", signature)


_LETTERS = {name: _letters(signature) for name, (_, signature) in OPS.items()}
# Which argument of an LDS read is its number.
_SITE = {name: letters.index("s") for name, letters in _LETTERS.items() if "s" in letters}
USED = ("USED", "ASM_USED_VM", "ASM_USED_LGKM")


def defs_uses(i: Instruction) -> tuple[list[int], list[int]]:
    """Registers an instruction writes and reads."""
    defs: list[int] = []
    uses: list[int] = []
    for letter, arg in zip(_LETTERS[i.op], i.args):
        if letter == "d":
            defs.append(arg)
        elif letter == "u":
            uses.append(arg)
        elif letter == "d*":
            defs.extend(arg)
        elif letter == "u*":
            uses.extend(arg)
        elif letter == "p*":
            for d, u in arg:
                defs.append(d)
                uses.append(u)
    return defs, uses


@dataclass
class Program:
    """What core.c runs, with what a report needs to speak of it."""

    name: str
    code: np.ndarray  # int32
    constants: np.ndarray  # uint32; the launch fills in arguments at `argument_slots`
    argument_slots: list[list[int]]  # per kernel argument, the constant slots of its dwords
    num_registers: int
    lds_bytes: int
    dynamic_lds: bool
    lines: list[tuple[tuple[str, int], ...]]  # (file, line) frames, the kernel's own first
    wave_size: int
    arch: str
    num_instructions: int
    num_sites: int  # LDS reads, counted statically
    data: tuple[np.ndarray, ...] = ()  # globals outside LDS; the code holds their addresses


# Constant registers kept free for those that an edit after assign() adds.
_SPARE = 4


class Builder:
    """Collects a kernel's blocks and turns them into a Program.

    finish() is prepare() and encode(). A prepared program may be edited (mutate.py) and encoded again: an edit gives a block a new list of
    instructions, and new ones in place of those it changes.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_registers = 0
        self.constants: dict[int, int] = {}  # dword -> register
        self.fixed: list[int] = []  # registers that live in the constant area, in slot order
        self.fixed_values: list[int] = []
        self.slot: list[int] | None = None  # of each register, from prepare() on
        self.num_slots = self.num_sites = 0

    def new(self) -> int:
        if self.slot is not None:
            self.slot.append(self.num_slots)
            self.num_slots += 1
        self.num_registers += 1
        return self.num_registers - 1

    def constant(self, value: int) -> int:
        value &= 0xFFFFFFFF
        if value not in self.constants:
            self.constants[value] = self.placeholder(value)
        return self.constants[value]

    def placeholder(self, value: int = 0) -> int:
        """A register of the constant area that is not shared with an equal constant: kernel arguments."""
        if self.slot is not None:
            if len(self.fixed) == self.num_fixed:
                raise ValueError(f"an edit of a prepared program can add {_SPARE} constants; this is one more")
            self.slot.append(len(self.fixed))
            self.num_registers += 1
            register = self.num_registers - 1
        else:
            register = self.new()
        self.fixed.append(register)
        self.fixed_values.append(value)
        return register

    # -- control flow ----------------------------------------------------------------------------------------------

    def order_blocks(self) -> None:
        """Reverse post-order from the entry; drops unreachable blocks."""
        entry, seen, order = self.blocks[0], set(), []
        stack = [(entry, iter(entry.successors))]
        seen.add(entry)
        while stack:
            block, successors = stack[-1]
            for s in successors:
                if s not in seen:
                    seen.add(s)
                    stack.append((s, iter(s.successors)))
                    break
            else:
                order.append(block)
                stack.pop()
        self.blocks = order[::-1]

    def find_meets(self) -> None:
        """Immediate post-dominators of the branching blocks (Cooper, Harvey, Kennedy, on the reversed graph with one virtual end)."""
        blocks = self.blocks
        number = {b: i + 1 for i, b in enumerate(blocks)}  # 0 is the virtual end
        successors: list[list[int]] = [[]] + [[number[s] for s in b.successors] or [0] for b in blocks]
        predecessors: list[list[int]] = [[] for _ in range(len(blocks) + 1)]
        for i, following in enumerate(successors):
            for j in following:
                predecessors[j].append(i)
        order: list[int] = []  # post-order of the reversed graph from the end
        seen = {0}
        stack = [(0, iter(predecessors[0]))]
        while stack:
            node, rest = stack[-1]
            for n in rest:
                if n not in seen:
                    seen.add(n)
                    stack.append((n, iter(predecessors[n])))
                    break
            else:
                order.append(node)
                stack.pop()
        rank = {n: i for i, n in enumerate(order)}
        parent: dict[int, int] = {0: 0}
        changed = True
        while changed:
            changed = False
            for n in reversed(order[:-1]):
                known = [s for s in successors[n] if s in parent]
                if not known:
                    continue
                new = known[0]
                for s in known[1:]:
                    x, y = new, s
                    while x != y:
                        while rank[x] < rank[y]:
                            x = parent[x]
                        while rank[y] < rank[x]:
                            y = parent[y]
                    new = x
                if parent.get(n) != new:
                    parent[n] = new
                    changed = True
        for b in blocks:
            if len(b.successors) == 2:
                meet = parent.get(number[b], 0)
                if meet:
                    b.meet = blocks[meet - 1]
                    b.meet.joins = True

    # -- registers ---------------------------------------------------------------------------------------------------

    def drop_dead(self) -> None:
        used = [0] * self.num_registers
        for b in self.blocks:
            for i in b.code:
                for u in defs_uses(i)[1]:
                    used[u] += 1
        work = True
        while work:
            work = False
            for b in self.blocks:
                kept = []
                for i in reversed(b.code):
                    if i.op == "MOVN":
                        alive = [(d, u) for d, u in i.args[0] if used[d]]
                        if len(alive) != len(i.args[0]):
                            for d, u in i.args[0]:
                                if not used[d]:
                                    used[u] -= 1
                            i.args[0] = alive
                            work = True
                        if alive:
                            kept.append(i)
                        continue
                    defs, uses = defs_uses(i)
                    if i.op not in _EFFECTS and not any(used[d] for d in defs):
                        for u in uses:
                            used[u] -= 1
                        work = True
                        continue
                    kept.append(i)
                b.code = kept[::-1]

    def mark_uses(self) -> int:
        """Number the LDS reads and put a USED before the first use of each one's result, where the compiler will put its wait.

        A move for a block's argument is not a use: the value stays pending under its new name. Returns the number of reads.
        """
        sites = 0
        self.asm_sites: dict[
            int, str
        ] = {}  # loads of inline assembly: no compiler waits for them, so their use is checked
        for b in self.blocks:
            for i in b.code:
                if i.op in _SITE:
                    i.args[_SITE[i.op]] = sites
                    if i.op == "ASM_RESULT":
                        self.asm_sites[sites] = "ASM_USED_LGKM" if i.args[0] else "ASM_USED_VM"
                    sites += 1
        entry: dict[Block, dict[int, frozenset[int]]] = {b: {} for b in self.blocks}
        reached = {self.blocks[0]}
        work = [self.blocks[0]]
        while work:
            b = work.pop()
            pending = self._pending_after(b, dict(entry[b]), None)
            for s in b.successors:
                merged = {
                    r: entry[s].get(r, frozenset()) | pending.get(r, frozenset())
                    for r in entry[s].keys() | pending.keys()
                }
                if merged != entry[s] or s not in reached:
                    entry[s] = merged
                    reached.add(s)
                    work.append(s)
        for b in self.blocks:
            marked: list[Instruction] = []
            self._pending_after(b, dict(entry[b]), marked)
            b.code = marked
        return sites

    def _pending_after(
        self, b: Block, pending: dict[int, frozenset[int]], out: list[Instruction] | None
    ) -> dict[int, frozenset[int]]:
        """Registers that hold results nothing has waited for, after a block; with `out`, also the block's code with USED put in."""
        for i in b.code:
            defs, uses = defs_uses(i)
            if i.op == "MOVN":
                for d, u in i.args[0]:
                    if u in pending:
                        pending[d] = pending[u]
                    else:
                        pending.pop(d, None)
            else:
                sites = frozenset().union(*(pending[u] for u in uses if u in pending)) if pending else frozenset()
                if i.op == "ASM_RESULT":  # takes over what its load left pending
                    pending = {r: s for r, s in pending.items() if r not in uses}
                    sites = frozenset()
                if sites:
                    if out is not None:
                        for op in USED:
                            if named := sorted(s for s in sites if self.asm_sites.get(s, "USED") == op):
                                out.append(Instruction(op, i.line, [named]))
                    pending = {r: left for r, s in pending.items() if (left := s - sites)}
                for d in defs:
                    pending.pop(d, None)
                if i.op in _SITE:
                    for d in defs:
                        pending[d] = frozenset((i.args[_SITE[i.op]],))
            if out is not None:
                out.append(i)
        return pending

    def assign(self) -> tuple[list[int], int]:
        """Slot of each virtual register, and the number of slots: linear scan over live intervals.

        An interval covers every block through which its register is live, without holes; with writes masked to the active lanes (core.c),
        that is also right when lanes run the two sides of a branch, or a loop, one group after the other.
        """
        fixed = set(self.fixed)
        blocks = self.blocks
        use, define = [], []
        for b in blocks:
            u = d = 0
            for i in b.code:
                ds, us = defs_uses(i)
                for r in us:
                    if not d >> r & 1:
                        u |= 1 << r
                for r in ds:
                    d |= 1 << r
            use.append(u)
            define.append(d)
        index = {b: i for i, b in enumerate(blocks)}
        live_in = [0] * len(blocks)
        live_out = [0] * len(blocks)
        changed = True
        while changed:
            changed = False
            for n in range(len(blocks) - 1, -1, -1):
                out = 0
                for s in blocks[n].successors:
                    out |= live_in[index[s]]
                new = use[n] | (out & ~define[n])
                if new != live_in[n] or out != live_out[n]:
                    live_in[n], live_out[n], changed = new, out, True
        start: dict[int, int] = {}
        end: dict[int, int] = {}

        def touch(register: int, at: int) -> None:
            if register not in start:
                start[register] = at
            elif at < start[register]:
                start[register] = at
            if at > end.get(register, -1):
                end[register] = at

        position = 0
        for n, b in enumerate(blocks):
            first = position
            for instruction in b.code:
                ds, us = defs_uses(instruction)
                for r in us:
                    touch(r, 2 * position)
                for r in ds:  # a MOVN writes one pair before it reads the next, so nothing it reads may share a slot with what it writes
                    touch(r, 2 * position + (instruction.op != "MOVN"))
                position += 1
            for bits, at in ((live_in[n], 2 * first), (live_out[n], 2 * position)):
                while bits:
                    low = bits & -bits
                    touch(low.bit_length() - 1, at)
                    bits ^= low
        slot = [-1] * self.num_registers
        for position, register in enumerate(self.fixed):
            slot[register] = position
        top = self.num_fixed = len(self.fixed) + _SPARE
        free: list[int] = []
        active: list[tuple[int, int]] = []
        for register in sorted((r for r in start if r not in fixed), key=start.__getitem__):
            while active and active[0][0] < start[register]:
                heappush(free, heappop(active)[1])
            if free:
                slot[register] = heappop(free)
            else:
                slot[register] = top
                top += 1
            heappush(active, (end[register], slot[register]))
        return slot, top

    def finish(self, **facts: Any) -> Program:
        self.prepare()
        return self.encode(**facts)

    def prepare(self) -> None:
        """Drop what has no effect, mark the uses of LDS reads, give every register its slot."""
        self.order_blocks()
        self.drop_dead()
        self.find_meets()
        self.num_sites = self.mark_uses()
        self.slot, self.num_slots = self.assign()

    def mark_uses_again(self) -> None:
        """After an edit that took out an instruction before which uses were marked."""
        for b in self.blocks:
            b.code = [i for i in b.code if i.op not in USED]
        self.mark_uses()

    @contextlib.contextmanager
    def edited(self, edit: Callable[[Builder], None]) -> Iterator[None]:
        """The prepared program with an edit, which the end of the block takes back."""
        code = [(b, b.code, b.encoded) for b in self.blocks]
        sizes = self.num_registers, self.num_slots, len(self.fixed)
        constants = dict(self.constants)
        try:
            edit(self)
            yield
        finally:
            for b, instructions, encoded in code:
                b.code, b.encoded = instructions, encoded
            self.num_registers, self.num_slots, fixed = sizes
            self.constants = constants
            assert self.slot is not None
            del self.slot[self.num_registers :], self.fixed[fixed:], self.fixed_values[fixed:]

    def encode(self, **facts: Any) -> Program:
        at = count = 0
        for b in self.blocks:
            if b.encoded is None or b.encoded[0] is not b.code:
                b.encoded = b.code, *self._encode_block(b)
            b.pc = at
            at += len(b.encoded[1]) // 4
            count += len(b.code)
        code = np.frombuffer(b"".join(b.encoded[1] for b in self.blocks), dtype=np.int32).copy()
        for b in self.blocks:
            for offset, i in b.encoded[2]:
                targets = [a.pc for a in i.args if isinstance(a, Block)]
                if i.op == "BRANCH":
                    targets.append(b.meet.pc if b.meet else -1)
                code[b.pc + offset : b.pc + offset + len(targets)] = targets
        constants = np.zeros(self.num_fixed, dtype=np.uint32)
        constants[: len(self.fixed_values)] = self.fixed_values
        return Program(
            code=code,
            constants=constants,
            num_registers=self.num_slots,
            num_instructions=count,
            num_sites=self.num_sites,
            **facts,
        )

    def _encode_block(self, b: Block) -> tuple[bytes, list[tuple[int, Instruction]]]:
        """The block's code, and where in it (in words) each jump's targets go."""
        parts, jumps = [], []
        at = 0
        if b.joins:
            parts.append(array("i", (OPS["JOIN"][0], -1)).tobytes())
            at = 2
        for i in b.code:
            if i.words is None:
                i.words = self._words(i)
            if i.op in ("JUMP", "BRANCH"):
                jumps.append((at + (2 if i.op == "JUMP" else 3), i))
            parts.append(i.words)
            at += len(i.words) // 4
        return b"".join(parts), jumps

    def _words(self, i: Instruction) -> bytes:
        """An instruction's code; a jump's with room for its targets."""
        slot = self.slot
        assert slot is not None
        words = [OPS[i.op][0], i.line]
        if i.op == "BRANCH":
            words += [slot[i.args[0]], -1, -1, -1]
            return array("i", words).tobytes()
        for letter, arg in zip(_LETTERS[i.op], i.args):
            if letter in "du":
                words.append(slot[arg])
            elif letter in "is":
                words.append(arg if arg < 1 << 31 else arg - (1 << 32))
            elif letter == "t":
                words.append(-1)
            elif letter == "i*":
                words += [len(arg), *arg]
            elif letter in ("d*", "u*"):
                words.append(len(arg))
                words += [slot[r] for r in arg]
            else:
                words.append(len(arg))
                for d, u in arg:
                    words += [slot[d], slot[u]]
        return array("i", words).tobytes()
