"""Divergent control flow against a plain Python interpretation of the same program, one lane at a time.

Source: LLVM Language Reference, "br", "phi": every lane is a thread of its own; how lanes are grouped must not show in any value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from machine import PROLOGUE, launch, load_item, lower, only, store_item

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

MASK = 0xFFFFFFFF
LANES = np.arange(64, dtype=np.uint32)


def run(body: str, x: np.ndarray = LANES, lanes: int = 64, **options: object) -> np.ndarray:
    """Run blocks that start with %x (this lane's input) and %tid, and end at ^end with %r, which is stored."""
    text = PROLOGUE + load_item("%x", "i32", "%in") + constants() + body + store_item("%r", "i32", "%out")
    out = np.full(len(x), 0xDEAD, np.uint32)
    launch(lower(text, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), x, out, grid=len(x) // 64, block=lanes, **options)  # type: ignore[arg-type]
    return out


def constants() -> str:
    return "".join(f"\n  %k{n} = llvm.mlir.constant({n} : i32) : i32" for n in range(12))


def test_if_else_with_a_value() -> None:
    body = """
  %c = llvm.icmp "ult" %x, %k7 : i32
  llvm.cond_br %c, ^yes, ^no
^yes:
  %a = llvm.mul %x, %k3 : i32
  llvm.br ^end(%a : i32)
^no:
  %b = llvm.add %x, %k5 : i32
  llvm.br ^end(%b : i32)
^end(%r: i32):"""
    np.testing.assert_array_equal(run(body), np.where(LANES < 7, LANES * 3, LANES + 5))


def test_conditional_branch_with_arguments_on_both_edges_to_one_block() -> None:
    body = """
  %c = llvm.icmp "ult" %x, %k7 : i32
  %a = llvm.mul %x, %k3 : i32
  llvm.cond_br %c, ^end(%a : i32), ^end(%x : i32)
^end(%r: i32):"""
    np.testing.assert_array_equal(run(body), np.where(LANES < 7, LANES * 3, LANES))


def test_values_live_across_a_divergent_region() -> None:
    """Written before, used after; the two sides use many registers of their own in between."""
    side = "".join(f"\n  %{{p}}{i} = llvm.add %{{p}}{i - 1}, %k{i % 12} : i32" for i in range(1, 20))
    body = f"""
  %live = llvm.mul %x, %x : i32
  %c = llvm.and %x, %k1 : i32
  %odd = llvm.icmp "ne" %c, %k0 : i32
  llvm.cond_br %odd, ^yes, ^no
^yes:
  %y0 = llvm.add %x, %k1 : i32{side.format(p="y")}
  llvm.br ^meet(%y19 : i32)
^no:
  %n0 = llvm.add %x, %k2 : i32{side.format(p="n")}
  llvm.br ^meet(%n19 : i32)
^meet(%m: i32):
  %r = llvm.add %m, %live : i32"""
    total = sum(i % 12 for i in range(1, 20))
    np.testing.assert_array_equal(
        run(body), LANES * LANES + LANES + total + np.where(LANES % 2, 1, 2).astype(np.uint32)
    )


def test_nested_branches() -> None:
    body = """
  %b0 = llvm.and %x, %k1 : i32
  %b1 = llvm.and %x, %k2 : i32
  %b2 = llvm.and %x, %k4 : i32
  %c0 = llvm.icmp "ne" %b0, %k0 : i32
  %c1 = llvm.icmp "ne" %b1, %k0 : i32
  %c2 = llvm.icmp "ne" %b2, %k0 : i32
  llvm.cond_br %c0, ^a, ^b
^a:
  llvm.cond_br %c1, ^aa, ^ab
^aa:
  llvm.cond_br %c2, ^end(%k1 : i32), ^end(%k2 : i32)
^ab:
  llvm.cond_br %c2, ^join(%k3 : i32), ^end(%k4 : i32)
^b:
  llvm.cond_br %c1, ^join(%k5 : i32), ^bb
^bb:
  llvm.cond_br %c2, ^end(%k6 : i32), ^join(%k7 : i32)
^join(%j: i32):
  %j10 = llvm.mul %j, %k10 : i32
  llvm.br ^end(%j10 : i32)
^end(%r: i32):"""

    def one(x: int) -> int:
        if x & 1:
            if x & 2:
                return 1 if x & 4 else 2
            return 30 if x & 4 else 4
        if x & 2:
            return 50
        return 6 if x & 4 else 70

    assert list(run(body)) == [one(int(x)) for x in LANES]


def test_loops_with_a_trip_count_per_lane() -> None:
    """Collatz steps: each lane leaves when it is done; two phis and a value from outside."""
    body = """
  llvm.br ^head(%x, %k0 : i32, i32)
^head(%v: i32, %n: i32):
  %done = llvm.icmp "ule" %v, %k1 : i32
  llvm.cond_br %done, ^end(%n : i32), ^body
^body:
  %next = llvm.add %n, %k1 : i32
  %bit = llvm.and %v, %k1 : i32
  %odd = llvm.icmp "ne" %bit, %k0 : i32
  llvm.cond_br %odd, ^up, ^down
^up:
  %v3 = llvm.mul %v, %k3 : i32
  %v31 = llvm.add %v3, %k1 : i32
  llvm.br ^head(%v31, %next : i32, i32)
^down:
  %half = llvm.lshr %v, %k1 : i32
  llvm.br ^head(%half, %next : i32, i32)
^end(%r: i32):"""

    def steps(v: int) -> int:
        n = 0
        while v > 1:
            v, n = (3 * v + 1 if v & 1 else v >> 1), n + 1
        return n

    x = np.arange(256, dtype=np.uint32)
    assert list(run(body, x)) == [steps(int(v)) for v in x]


def test_phis_swap_in_parallel() -> None:
    """Block arguments are assigned at once: swaps and rotations, on a back edge, a different number of times a lane."""
    body = """
  %x1 = llvm.add %x, %k1 : i32
  %x2 = llvm.add %x, %k2 : i32
  llvm.br ^head(%x, %x1, %x2, %k0 : i32, i32, i32, i32)
^head(%a: i32, %b: i32, %c: i32, %i: i32):
  %n = llvm.and %x, %k7 : i32
  %more = llvm.icmp "ult" %i, %n : i32
  %j = llvm.add %i, %k1 : i32
  llvm.cond_br %more, ^swap, ^end
^swap:
  %even = llvm.and %i, %k1 : i32
  %rotate = llvm.icmp "eq" %even, %k0 : i32
  llvm.cond_br %rotate, ^head(%b, %c, %a, %j : i32, i32, i32, i32), ^head(%b, %a, %c, %j : i32, i32, i32, i32)
^end:
  %s = llvm.mul %a, %k11 : i32
  %t = llvm.add %s, %b : i32
  %u = llvm.mul %t, %k11 : i32
  %r = llvm.add %u, %c : i32"""

    def one(x: int) -> int:
        a, b, c = x, x + 1, x + 2
        for i in range(x & 7):
            a, b, c = (b, c, a) if i % 2 == 0 else (b, a, c)
        return ((a * 11 + b) * 11 + c) & MASK

    assert list(run(body)) == [one(int(x)) for x in LANES]


def test_loop_with_a_break_and_a_continue() -> None:
    body = """
  llvm.br ^head(%k0, %k0 : i32, i32)
^head(%i: i32, %sum: i32):
  %more = llvm.icmp "ult" %i, %x : i32
  llvm.cond_br %more, ^body, ^end(%sum : i32)
^body:
  %j = llvm.add %i, %k1 : i32
  %m = llvm.urem %i, %k5 : i32
  %skip = llvm.icmp "eq" %m, %k3 : i32
  llvm.cond_br %skip, ^head(%j, %sum : i32, i32), ^work
^work:
  %new = llvm.add %sum, %i : i32
  %limit = llvm.mul %x, %k9 : i32
  %stop = llvm.icmp "ugt" %new, %limit : i32
  llvm.cond_br %stop, ^broke, ^head(%j, %new : i32, i32)
^broke:
  %neg = llvm.sub %k0, %new : i32
  llvm.br ^end(%neg : i32)
^end(%r: i32):"""

    def one(x: int) -> int:
        total = 0
        for i in range(x):
            if i % 5 == 3:
                continue
            total += i
            if total > 9 * x:
                return -total & MASK
        return total

    assert list(run(body)) == [one(int(x)) for x in LANES]


def test_some_lanes_return_early() -> None:
    body = PROLOGUE + load_item("%x", "i32", "%in") + constants() + """
  %m = llvm.urem %x, %k3 : i32
  %c = llvm.icmp "eq" %m, %k0 : i32
  llvm.cond_br %c, ^gone, ^stay
^gone:
  llvm.return
^stay:
  %low = llvm.icmp "ult" %x, %k10 : i32
  llvm.cond_br %low, ^a, ^b
^a:
  llvm.br ^store(%k5 : i32)
^b:
  llvm.br ^loop(%x : i32)
^loop(%v: i32):
  %less = llvm.sub %v, %k7 : i32
  %more = llvm.icmp "sgt" %less, %k0 : i32
  %tiny = llvm.icmp "eq" %less, %k1 : i32
  llvm.cond_br %tiny, ^gone, ^again
^again:
  llvm.cond_br %more, ^loop(%less : i32), ^store(%less : i32)
^store(%r: i32):""" + store_item("%r", "i32", "%out")  # fmt: skip

    def one(x: int) -> int:
        if x % 3 == 0:
            return 0xDEAD
        if x < 10:
            return 5
        v = x
        while True:
            v -= 7
            if v == 1:
                return 0xDEAD
            if v <= 0:
                return v & MASK

    out = np.full(64, 0xDEAD, np.uint32)
    launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), LANES, out)
    assert list(out) == [one(int(x)) for x in LANES]


def test_a_partial_last_wave_and_thread_numbers_in_three_dimensions() -> None:
    body = (
        PROLOGUE
        + """
  %y = rocdl.workitem.id.y : i32
  %z = rocdl.workitem.id.z : i32
  %gy = rocdl.workgroup.id.y : i32
  %gz = rocdl.workgroup.id.z : i32
  %k5 = llvm.mlir.constant(5 : i32) : i32
  %k7 = llvm.mlir.constant(7 : i32) : i32
  %k3 = llvm.mlir.constant(3 : i32) : i32
  %k210 = llvm.mlir.constant(105 : i32) : i32
  %k2 = llvm.mlir.constant(2 : i32) : i32
  %zy = llvm.mul %z, %k7 : i32
  %zy1 = llvm.add %zy, %y : i32
  %zyx = llvm.mul %zy1, %k5 : i32
  %flat = llvm.add %zyx, %tid : i32
  %g = llvm.mul %gz, %k3 : i32
  %g1 = llvm.add %g, %gy : i32
  %g2 = llvm.mul %g1, %k2 : i32
  %g3 = llvm.add %g2, %gid : i32
  %start = llvm.mul %g3, %k210 : i32
  %place = llvm.add %start, %flat : i32
  %p = llvm.getelementptr %out[%place] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %old = llvm.load %p : !llvm.ptr<1> -> i32
  %one = llvm.add %place, %k5 : i32
  %new = llvm.add %old, %one : i32
  llvm.store %new, %p : i32, !llvm.ptr<1>"""
    )
    count = 5 * 7 * 3 * (2 * 3 * 2)
    out = np.zeros(count, np.uint32)
    report = launch(lower(body, "%out: !llvm.ptr<1>"), out, grid=(2, 3, 2), block=(5, 7, 3))
    np.testing.assert_array_equal(out, np.arange(count) + 5)  # every thread once, and no others
    assert report.workgroups == 12


def test_workgroups_option_runs_a_part() -> None:
    body = PROLOGUE + store_item("%item32", "i32", "%out")
    out = np.zeros(64 * 8, np.uint32)
    launch(lower(body, "%out: !llvm.ptr<1>"), out, grid=8, workgroups=range(2, 5), threads=2)
    np.testing.assert_array_equal(np.flatnonzero(out), np.arange(128, 320))


def test_endless_loops_are_stopped() -> None:
    body = """
  llvm.br ^loop
^loop:
  llvm.br ^loop loc("kernel.py":3:1)
^never:"""
    finding = only(launch(lower(body), block=64, grid=4, step_limit=1000, expect="limit"))
    assert "step limit" in finding.message and finding.line == 3
    divergent = """
  %tid = rocdl.workitem.id.x : i32
  %k0 = llvm.mlir.constant(0 : i32) : i32
  llvm.br ^loop(%tid : i32)
^loop(%v: i32):
  %c = llvm.icmp "eq" %v, %k0 : i32
  llvm.cond_br %c, ^loop(%v : i32), ^out loc("kernel.py":4:1)
^out:"""
    assert only(launch(lower(divergent), block=64, step_limit=1000, expect="limit")).kind == "limit"
    loop = divergent.replace('"eq"', '"ult"')  # nobody is below zero: it ends
    launch(lower(loop), block=64, step_limit=1000)


def test_unreachable_that_is_reached_is_reported() -> None:
    body = """
  %tid = rocdl.workitem.id.x : i32
  %k5 = llvm.mlir.constant(5 : i32) : i32
  %c = llvm.icmp "eq" %tid, %k5 : i32
  llvm.cond_br %c, ^bad, ^good
^bad:
  llvm.unreachable loc("kernel.py":8:1)
^good:"""
    assert "unreachable" in only(launch(lower(body), expect="barrier")).message
    launch(lower(body), block=4)


# -- random programs ---------------------------------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Writes one random structured program twice: as MLIR blocks and as a Python function of one lane's inputs."""

    random: random.Random
    mlir: list[str] = field(default_factory=list)
    python: list[str] = field(default_factory=list)
    count: int = 0
    depth: int = 0
    loops: list[tuple[str, str, list[str]]] = field(
        default_factory=list
    )  # (continue block, break block, variables) of open loops

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}_{self.count}"

    def emit(self, mlir: str, python: str = "") -> None:
        self.mlir.append("  " + mlir)
        if python:
            self.python.append("  " * (self.depth + 1) + python)

    def label(self, text: str) -> None:
        self.mlir.append(text + ":")

    def value(self, variables: list[str]) -> str:
        return self.random.choice(variables)

    def arithmetic(self, variables: list[str]) -> str:
        op, python = self.random.choice([
            ("add", "({a} + {b}) & M"), ("sub", "({a} - {b}) & M"), ("mul", "({a} * {b}) & M"), ("xor", "{a} ^ {b}"), ("and", "{a} & {b}"),
            ("or", "{a} | {b}"), ("rot", "(({a} << 7) | ({a} >> 25)) & M"), ("sel", "{a} if {a} % 3 == 1 else {b}"),
        ])  # fmt: skip
        a, b, r = self.value(variables), self.value(variables), self.name("v")
        if op == "rot":
            self.emit(f"%{r} = llvm.intr.fshl(%{a}, %{a}, %k7) : (i32, i32, i32) -> i32")
        elif op == "sel":
            m, c = self.name("m"), self.name("c")
            self.emit(f"%{m} = llvm.urem %{a}, %k3 : i32")
            self.emit(f'%{c} = llvm.icmp "eq" %{m}, %k1 : i32')
            self.emit(f"%{r} = llvm.select %{c}, %{a}, %{b} : i1, i32")
        else:
            self.emit(f"%{r} = llvm.{op} %{a}, %{b} : i32")
        self.python.append("  " * (self.depth + 1) + f"{r} = " + python.format(a=a, b=b))
        return r

    def condition(self, variables: list[str]) -> tuple[str, str]:
        a, m, c = self.value(variables), self.name("m"), self.name("c")
        divisor, limit = self.random.choice([(2, 1), (3, 1), (5, 2), (7, 3), (11, 9)])
        self.emit(f"%{m} = llvm.urem %{a}, %k{divisor} : i32")
        self.emit(f'%{c} = llvm.icmp "ult" %{m}, %k{limit} : i32')
        return c, f"{a} % {divisor} < {limit}"

    def arguments(self, names: list[str]) -> str:
        return f"({', '.join('%' + n for n in names)} : {', '.join('i32' for _ in names)})" if names else ""

    def parameters(self, names: list[str]) -> str:
        return f"({', '.join(f'%{n}: i32' for n in names)})" if names else ""

    def statements(self, variables: list[str], budget: int) -> tuple[list[str], bool]:
        """Random statements; returns the variables in scope at their end and whether that end is reached."""
        variables = list(variables)
        for _ in range(self.random.randint(1, 4)):
            kind = self.random.random()
            if budget <= 0 or kind < 0.4:
                variables.append(self.arithmetic(variables))
            elif kind < 0.65:
                variables, open_end = self.if_else(variables, budget - 1)
                if not open_end:
                    return variables, False
            elif kind < 0.9:
                variables = self.loop(variables, budget - 1)
            elif self.loops and self.depth:
                self.leave(variables)
                return variables, False
            elif kind > 0.97:
                self.emit("llvm.br ^return" + self.arguments([self.value(variables)]))
                self.python.append("  " * (self.depth + 1) + f"return {self.mlir[-1].split('%')[1].split(' ')[0]}")
                return variables, False
        return variables, True

    def leave(self, variables: list[str]) -> None:
        """break or continue of the innermost loop, with new values of its variables."""
        go_on, out, names = self.loops[-1]
        new = [self.value(variables) for _ in names]
        target, word = self.random.choice([(go_on, "continue"), (out, "break")])
        self.emit(f"llvm.br ^{target}" + self.arguments(new))
        pad = "  " * (self.depth + 1)
        self.python.append(pad + f"{', '.join(names)}, = {', '.join(new)},")
        self.python.append(pad + word)

    def if_else(self, variables: list[str], budget: int) -> tuple[list[str], bool]:
        c, python = self.condition(variables)
        yes, no, meet, merged = self.name("yes"), self.name("no"), self.name("meet"), self.name("p")
        two_sided, direct = self.random.random() < 0.7, self.value(variables)
        no_target = f"^{no}" if two_sided else f"^{meet}" + self.arguments([direct])
        self.emit(f"llvm.cond_br %{c}, ^{yes}, {no_target}")
        pad = "  " * (self.depth + 1)
        self.python.append(pad + f"if {python}:")
        reached = []
        for label in (yes, no) if two_sided else (yes,):
            if label == no:
                self.python.append(pad + "else:")
            self.label(f"^{label}")
            self.depth += 1
            inside, open_end = self.statements(variables, budget)
            if open_end:
                result = self.value(inside)
                self.emit(f"llvm.br ^{meet}" + self.arguments([result]))
                self.python.append("  " * (self.depth + 1) + f"{merged} = {result}")
            self.depth -= 1
            reached.append(open_end)
        if not two_sided:
            self.python += [pad + "else:", pad + f"  {merged} = {direct}"]
            reached.append(True)
        if not any(reached):
            return variables, False
        self.label(f"^{meet}" + self.parameters([merged]))
        return [*variables, merged], True

    def loop(self, variables: list[str], budget: int) -> list[str]:
        """A loop of at most a few trips, a number of its own for every lane, that carries one to three variables."""
        head, body, latch, out = self.name("head"), self.name("body"), self.name("latch"), self.name("out")
        carried = [self.name("w") for _ in range(self.random.randint(1, 3))]
        i, n, more = self.name("i"), self.name("n"), self.name("more")
        start = [self.value(variables) for _ in carried]
        bound, modulus = self.value(variables), self.random.choice([2, 3, 5, 7])
        self.emit(f"%{n} = llvm.urem %{bound}, %k{modulus} : i32")
        self.emit(f"llvm.br ^{head}" + self.arguments(["k0", *start]))
        self.label(f"^{head}" + self.parameters([i, *carried]))
        self.emit(f'%{more} = llvm.icmp "ult" %{i}, %{n} : i32')
        after = [self.name("z") for _ in carried]
        self.emit(f"llvm.cond_br %{more}, ^{body}, ^{out}" + self.arguments(carried))
        pad = "  " * (self.depth + 1)
        self.python.append(pad + f"{', '.join(carried)}, = {', '.join(start)},")
        self.python.append(pad + f"for {i} in range({bound} % {modulus}):")
        self.label(f"^{body}")
        self.loops.append((latch, out, carried))
        self.depth += 1
        inside, open_end = self.statements([*variables, i, *carried], budget)
        if open_end:
            new = [self.value(inside) for _ in carried]
            if self.random.random() < 0.3 and len(carried) > 1:
                new = carried[1:] + carried[:1]
            self.emit(f"llvm.br ^{latch}" + self.arguments(new))
            self.python.append("  " * (self.depth + 1) + f"{', '.join(carried)}, = {', '.join(new)},")
        self.depth -= 1
        self.loops.pop()
        latched, step = [self.name("l") for _ in carried], self.name("s")
        if any(f"^{latch}(" in line for line in self.mlir):
            self.label(f"^{latch}" + self.parameters(latched))
            self.emit(f"%{step} = llvm.add %{i}, %k1 : i32")
            self.emit(f"llvm.br ^{head}" + self.arguments([step, *latched]))
        self.label(f"^{out}" + self.parameters(after))
        self.python.append(pad + f"{', '.join(after)}, = {', '.join(carried)},")
        return [*variables, *after]


def write_program(seed: int) -> tuple[str, str]:
    """A program of a few branches and moderate length: MLIR blocks, and a Python function."""
    for attempt in range(100):
        mlir, python = write_any_program(seed * 100 + attempt)
        if mlir.count("cond_br") >= 3 and mlir.count("\n") <= 300:
            return mlir, python
    raise AssertionError("no such program")


def write_any_program(seed: int) -> tuple[str, str]:
    w = Writer(random.Random(seed))
    variables, open_end = w.statements(["x", "tid", "k9"], budget=4)
    if open_end:
        final = w.value(variables)
        for v in variables[3:]:  # everything counts
            r = w.name("f")
            w.emit(
                f"%{r} = llvm.intr.fshl(%{final}, %{v}, %k5) : (i32, i32, i32) -> i32",
                f"{r} = (({final} << 5) | ({v} >> 27)) & M",
            )
            t = w.name("f")
            w.emit(f"%{t} = llvm.xor %{r}, %{v} : i32", f"{t} = {r} ^ {v}")
            final = t
        w.emit(f"llvm.br ^return(%{final} : i32)", f"return {final}")
    return "\n" + "\n".join(
        w.mlir
    ) + "\n^return(%r: i32):", "def lane(x, tid, k9=9, k0=0, M=0xFFFFFFFF):\n" + "\n".join(w.python)


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize(
    "first", [*range(0, 100, 20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(100, 600, 20))]
)
def test_random_programs(first: int) -> None:
    """Ifs, loops with break and continue, early exits and phis at random, nested up to four deep, different paths in every lane."""
    rng = np.random.default_rng(first)
    for seed in range(first, first + 20):
        mlir, python = write_program(seed)
        namespace: dict = {}
        exec(python, namespace)
        x = rng.integers(0, 1 << 32, 128, dtype=np.uint32)
        want = [namespace["lane"](int(v), i % 64) for i, v in enumerate(x)]
        assert list(run(mlir, x)) == want, f"seed {seed}\n{mlir}\n{python}"


@pytest.mark.archs("gfx950")
def test_random_programs_are_varied() -> None:
    texts = [write_program(seed) for seed in range(100)]
    for word, least in (("break", 25), ("continue", 25), ("for ", 75), ("else", 75)):
        assert sum(word in python for _, python in texts) >= least, word
    assert sum(python.count("return") > 1 for _, python in texts) >= 10
