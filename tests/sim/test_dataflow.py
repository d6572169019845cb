"""Random straight-line and branching programs over many types against numpy, and kernel arguments, pointers, address spaces.

What is tried here is the translation, not the single operation: packed vectors next to scalars, values that share registers, multi-register
values through branches and loops, extracted elements used twice. Source: LLVM Language Reference, as in test_integer.py and test_vector.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from machine import BITS, PROLOGUE, Address, launch, load_item, lower, store_item

TYPES = [
    "i8",
    "i16",
    "i32",
    "i64",
    "2xi16",
    "4xi8",
    "4xi16",
    "8xi8",
    "2xi32",
    "3xi16",
    "3xi8",
    "4xi32",
    "2xi64",
    "16xi8",
]
ITEMS = 128


def spelled(t: str) -> str:
    return f"vector<{t}>" if "x" in t else t


def element(t: str) -> str:
    return t.rpartition("x")[2]


def count(t: str) -> int:
    return int(t.partition("x")[0]) if "x" in t else 1


def size(t: str) -> int:
    return count(t) * int(element(t)[1:])


@dataclass
class Value:
    name: str
    type: str
    data: np.ndarray  # [ITEMS, count]


class Program:
    """Random operations on values of random types, emitted as MLIR and computed with numpy at once."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.number = 0
        self.values: list[Value] = []

    def name(self) -> str:
        self.number += 1
        return f"%q{self.number}"

    def pick(self, t: str | None = None) -> Value:
        fitting = [v for v in self.values if t is None or v.type == t]
        if not fitting:
            return self.make(t or "i32")
        return self.random.choice(fitting[-12:])

    def add(self, text: str, t: str, data: np.ndarray) -> Value:
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        value = Value(name, t, np.ascontiguousarray(data).astype(BITS[element(t)]).reshape(ITEMS, count(t)))
        self.values.append(value)
        return value

    def make(self, t: str) -> Value:
        """A value of a type out of any other, so that every type can be had."""
        e, n, source = element(t), count(t), self.pick("i32")
        bits = int(e[1:])
        if bits < 32:
            scalar = self.add(f"llvm.trunc {source.name} : i32 to {e}", e, source.data)
        elif bits == 64:
            scalar = self.add(f"llvm.zext {source.name} : i32 to i64", e, source.data)
        else:
            scalar = source
        if n == 1:
            return scalar
        name = self.name()
        self.lines.append(f"  {name} = llvm.mlir.zero : {spelled(t)}")
        zero = Value(name, t, np.zeros((ITEMS, n), BITS[e]))
        for i in range(n):
            zero = self.insert(zero, scalar, i)
        return zero

    def constant(self, value: int) -> str:
        name = self.name()
        self.lines.append(f"  {name} = llvm.mlir.constant({value} : i32) : i32")
        return name

    def insert(self, into: Value, scalar: Value, at: int) -> Value:
        data = into.data.copy()
        data[:, at] = scalar.data[:, 0]
        k = self.constant(at)
        return self.add(
            f"llvm.insertelement {scalar.name}, {into.name}[{k} : i32] : {spelled(into.type)}", into.type, data
        )

    def step(self) -> Value:
        kind = self.random.choice(
            ["binary"] * 4 + ["cast", "bitcast", "extract", "insert", "shuffle", "select", "shift", "dynamic", "make"]
        )
        a = self.pick()
        t, e, n, s = a.type, element(a.type), count(a.type), spelled(a.type)
        if kind == "binary":
            b = self.pick(t)
            op = self.random.choice(["add", "sub", "mul", "xor", "and", "or", "intr.umin", "intr.smax"])
            x, y = a.data, b.data
            sx, sy = x.view(x.dtype.name[1:]), y.view(x.dtype.name[1:])
            with np.errstate(over="ignore"):
                data = {
                    "add": x + y, "sub": x - y, "mul": x * y, "xor": x ^ y, "and": x & y, "or": x | y, "intr.umin": np.minimum(x, y),
                    "intr.smax": np.maximum(sx, sy).view(x.dtype),
                }[op]  # fmt: skip
            text = f"llvm.{op} {a.name}, {b.name} : {s}"
            if op.startswith("intr"):
                text = f"llvm.{op}({a.name}, {b.name}) : ({s}, {s}) -> {s}"
            return self.add(text, t, data)
        if kind == "shift":
            bits = int(e[1:])
            by = self.random.randrange(bits)
            literal = f"dense<{by}> : {s}" if n > 1 else f"{by} : {s}"
            k = self.name()
            self.lines.append(f"  {k} = llvm.mlir.constant({literal}) : {s}")
            op = self.random.choice(["shl", "lshr", "ashr"])
            signed = a.data.view(a.data.dtype.name[1:])
            data = {"shl": a.data << by, "lshr": a.data >> by, "ashr": (signed >> by).view(a.data.dtype)}[op]
            return self.add(f"llvm.{op} {a.name}, {k} : {s}", t, data)
        if kind == "cast":
            others = [u for u in TYPES if count(u) == n and element(u) != e]
            if not others:
                return self.make(t)
            u = self.random.choice(others)
            if size(u) < size(t):
                return self.add(f"llvm.trunc {a.name} : {s} to {spelled(u)}", u, a.data.astype(BITS[element(u)]))
            op = self.random.choice(["zext", "sext"])
            wide = np.dtype(BITS[element(u)])
            data = (
                a.data.astype(wide)
                if op == "zext"
                else a.data.view(a.data.dtype.name[1:]).astype(wide.name[1:]).view(wide)
            )
            return self.add(f"llvm.{op} {a.name} : {s} to {spelled(u)}", u, data)
        if kind == "bitcast":
            u = self.random.choice([u for u in TYPES if size(u) == size(t)])
            return self.add(
                f"llvm.bitcast {a.name} : {s} to {spelled(u)}", u, np.ascontiguousarray(a.data).view(BITS[element(u)])
            )
        if kind == "select":
            b, c = self.pick(t), self.pick()
            k, flag = self.constant(3), self.name()
            scalar = self.extracted(c)
            wide = self.widened(scalar)
            m = self.add(f"llvm.urem {wide.name}, {k} : i32", "i32", wide.data % 3)
            self.lines.append(f'  {flag} = llvm.icmp "eq" {m.name}, {self.zero()} : i32')
            return self.add(
                f"llvm.select {flag}, {a.name}, {b.name} : i1, {s}", t, np.where(m.data[:, :1] == 0, a.data, b.data)
            )
        if n == 1 or kind == "make":
            return self.make(self.random.choice(TYPES))
        if kind == "extract":
            return self.extracted(a)
        if kind == "insert":
            return self.insert(a, self.pick(e), self.random.randrange(n))
        if kind == "dynamic":
            index = self.widened(self.extracted(self.pick()))
            k = self.constant(n)
            at = self.add(f"llvm.urem {index.name}, {k} : i32", "i32", index.data % n)
            lanes = np.arange(ITEMS)
            if self.random.random() < 0.5:
                return self.add(f"llvm.extractelement {a.name}[{at.name} : i32] : {s}", e, a.data[lanes, at.data[:, 0]])
            scalar, data = self.pick(e), a.data.copy()
            data[lanes, at.data[:, 0]] = scalar.data[:, 0]
            return self.add(f"llvm.insertelement {scalar.name}, {a.name}[{at.name} : i32] : {s}", t, data)
        b = self.pick(t)  # shuffle
        u = self.random.choice([u for u in TYPES if element(u) == e and count(u) > 1])
        mask = [self.random.randrange(2 * n) for _ in range(count(u))]
        both = np.concatenate([a.data, b.data], axis=1)
        return self.add(f"llvm.shufflevector {a.name}, {b.name} {mask} : {s}", u, both[:, mask])

    def zero(self) -> str:
        return self.constant(0)

    def extracted(self, a: Value) -> Value:
        if count(a.type) == 1:
            return a
        at = self.random.randrange(count(a.type))
        k = self.constant(at)
        return self.add(f"llvm.extractelement {a.name}[{k} : i32] : {spelled(a.type)}", element(a.type), a.data[:, at])

    def widened(self, a: Value) -> Value:
        """As an i32."""
        bits = int(a.type[1:])
        if bits == 32:
            return a
        op = "trunc" if bits > 32 else "zext"
        return self.add(f"llvm.{op} {a.name} : {a.type} to i32", "i32", a.data)

    def diamond(self, budget: int) -> None:
        """Two sides that end with values of the same types; which side a lane takes depends on its data."""
        k, flag, label = self.constant(2), self.name(), self.number
        wide = self.widened(self.extracted(self.pick()))
        m = self.add(f"llvm.urem {wide.name}, {k} : i32", "i32", wide.data % 2)
        self.lines.append(f'  {flag} = llvm.icmp "eq" {m.name}, {self.zero()} : i32')
        types = [self.random.choice(TYPES) for _ in range(3)]
        self.lines.append(f"  llvm.cond_br {flag}, ^yes{label}, ^no{label}")
        before, sides = list(self.values), []
        for side in ("yes", "no"):
            self.values = list(before)
            self.lines.append(f"^{side}{label}:")
            for _ in range(budget):
                self.step()
            ends = [self.pick(t) for t in types]
            sides.append(ends)
            names, spellings = ", ".join(v.name for v in ends), ", ".join(spelled(v.type) for v in ends)
            self.lines.append(f"  llvm.br ^meet{label}({names} : {spellings})")
        self.values = before
        merged = [self.name() for _ in types]
        self.lines.append(f"^meet{label}(" + ", ".join(f"{v}: {spelled(t)}" for v, t in zip(merged, types)) + "):")
        for v, t, yes, no in zip(merged, types, *sides):
            self.values.append(Value(v, t, np.where(m.data == 0, yes.data, no.data)))

    def loop(self, budget: int) -> None:
        """A loop whose trip count differs by lane and that carries values of several registers; its body only reads and mixes them."""
        label = self.number
        wide, k = self.widened(self.extracted(self.pick())), self.constant(4)
        trips = self.add(f"llvm.urem {wide.name}, {k} : i32", "i32", wide.data % 4)
        types = [self.random.choice(TYPES) for _ in range(2)]
        starts, extra = [self.pick(t) for t in types], [self.pick(t) for t in types]
        zero, one = self.zero(), self.constant(1)
        i, a, b = (self.name() for _ in range(3))
        header = ", ".join(f"{v}: {spelled(t)}" for v, t in zip((a, b), types))
        spellings = ", ".join(["i32", *(spelled(t) for t in types)])
        self.lines.append(f"  llvm.br ^head{label}({zero}, {starts[0].name}, {starts[1].name} : {spellings})")
        self.lines.append(f"^head{label}({i}: i32, {header}):")
        more, x, y, step = (self.name() for _ in range(4))
        self.lines.append(f'  {more} = llvm.icmp "ult" {i}, {trips.name} : i32')
        self.lines.append(f"  llvm.cond_br {more}, ^body{label}, ^out{label}\n^body{label}:")
        self.lines.append(f"  {x} = llvm.add {a}, {extra[0].name} : {spelled(types[0])}")
        self.lines.append(f"  {y} = llvm.xor {b}, {extra[1].name} : {spelled(types[1])}")
        self.lines.append(f"  {step} = llvm.add {i}, {one} : i32")
        swap = types[0] == types[1]
        self.lines.append(
            f"  llvm.br ^head{label}({step}, {y if swap else x}, {x if swap else y} : {spellings})\n^out{label}:"
        )
        p, q = starts[0].data.copy(), starts[1].data.copy()
        for trip in range(3):
            on = trips.data > trip
            with np.errstate(over="ignore"):
                new_p, new_q = p + extra[0].data, q ^ extra[1].data
            if swap:
                new_p, new_q = new_q, new_p
            p, q = np.where(on, new_p, p), np.where(on, new_q, q)
        self.values += [Value(a, types[0], p), Value(b, types[1], q)]


def run(program: Program, inputs: dict[str, np.ndarray], results: list[Value]) -> list[np.ndarray]:
    text = PROLOGUE + "".join(load_item(f"%{n}", "i32", f"%{n}in") for n in inputs) + "\n" + "\n".join(program.lines)
    outs = []
    for i, v in enumerate(results):
        text += store_item(v.name, spelled(v.type), f"%out{i}").replace(f"{v.name}_to", f"%to{i}")
        outs.append(np.zeros((ITEMS, 1 << (count(v.type) - 1).bit_length()), BITS[element(v.type)]))
    arguments = ", ".join(
        [f"%{n}in: !llvm.ptr<1>" for n in inputs] + [f"%out{i}: !llvm.ptr<1>" for i in range(len(results))]
    )
    launch(lower(text, arguments), *inputs.values(), *outs, grid=ITEMS // 64)
    return outs


@pytest.mark.parametrize(
    "first", [*range(0, 30, 6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(30, 180, 6))]
)
def test_random_dataflow(first: int) -> None:
    for seed in range(first, first + 6):
        program = Program(seed)
        rng = np.random.default_rng(seed)
        inputs = {n: rng.integers(0, 1 << 32, ITEMS, dtype=np.uint32) for n in "abc"}
        program.values = [Value(f"%{n}", "i32", data[:, None]) for n, data in inputs.items()]
        for _ in range(6):
            for _ in range(8):
                program.step()
            if program.random.random() < 0.6:
                program.diamond(6)
            else:
                program.loop(3)
        results = [v for v in program.values if v.name not in ("%a", "%b", "%c")][-30:]
        for value, got in zip(results, run(program, inputs, results)):
            wrong = np.flatnonzero((got[:, : count(value.type)] != value.data).any(axis=1))
            assert not len(wrong), (
                f"seed {seed}: {value.name} : {value.type}, lane {wrong[0]}: {got[wrong[0]]}, not {value.data[wrong[0]]}\n"
                + "\n".join(program.lines)
            )


# -- arguments, pointers ----------------------------------------------------------------------------------------------------------------


def test_kernel_arguments_of_every_kind() -> None:
    """Scalars of all widths, a struct within a struct, an array: in the order of their fields."""
    record = "!llvm.struct<packed (i32, struct<packed (i64, ptr<1>)>, array<2 x i16>)>"
    body = f"""
  %b64 = llvm.sext %b : i8 to i64
  %h64 = llvm.zext %h : i16 to i64
  %f = llvm.fptosi %x : f32 to i64
  %r0 = llvm.extractvalue %r[0] : {record}
  %r064 = llvm.sext %r0 : i32 to i64
  %r1 = llvm.extractvalue %r[1, 0] : {record}
  %to = llvm.extractvalue %r[1, 1] : {record}
  %e0 = llvm.extractvalue %r[2, 0] : {record}
  %e1 = llvm.extractvalue %r[2, 1] : {record}
  %e064 = llvm.zext %e0 : i16 to i64
  %e164 = llvm.zext %e1 : i16 to i64"""
    names = ["%b64", "%h64", "%w", "%f", "%r064", "%r1", "%e064", "%e164"]
    for i, name in enumerate(names):
        body += f"\n  %o{i} = llvm.getelementptr %to[{i}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i64\n  llvm.store {name}, %o{i} : i64, !llvm.ptr<1>"
    out = np.zeros(8, np.int64)
    program = lower(body, f"%b: i8, %h: i16, %w: i64, %x: f32, %r: {record}")
    x = int(np.float32(-77.5).view(np.uint32))
    launch(program, 0x80, 0xFFFE, (-5,), x, [-9, (1 << 40,), out, 7, 65535], block=1)
    assert list(out) == [-128, 65534, -5, -77, -9, 1 << 40, 7, 65535]


def test_a_wrong_number_of_arguments_raises() -> None:
    program = lower("  %c = llvm.trunc %a : i64 to i32", "%a: i64, %b: i32")
    with pytest.raises(ValueError, match="takes 2 arguments"):
        launch(program, (1,))
    with pytest.raises(ValueError, match="2 dwords"):
        launch(program, 1, 2)


def test_pointers_travel_like_integers() -> None:
    """Through generic address space, inttoptr, select, a block argument and memory."""
    body = """
  %generic = llvm.addrspacecast %in : !llvm.ptr<1> to !llvm.ptr
  %number = llvm.ptrtoint %generic : !llvm.ptr to i64
  %tid = rocdl.workitem.id.x : i32
  %four = llvm.mlir.constant(4 : i64) : i64
  %tid64 = llvm.zext %tid : i32 to i64
  %offset = llvm.mul %tid64, %four : i64
  %sum = llvm.add %number, %offset : i64
  %mine = llvm.inttoptr %sum : i64 to !llvm.ptr
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %bit = llvm.and %tid, %one : i32
  %odd = llvm.icmp "ne" %bit, %zero : i32
  %other = llvm.getelementptr %generic[63] : (!llvm.ptr) -> !llvm.ptr, i32
  %pick = llvm.select %odd, %mine, %other : i1, !llvm.ptr
  %slot = llvm.getelementptr %table[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.ptr
  llvm.store %pick, %slot : !llvm.ptr, !llvm.ptr<1>
  %again = llvm.load %slot : !llvm.ptr<1> -> !llvm.ptr
  llvm.cond_br %odd, ^end(%again : !llvm.ptr), ^low(%mine : !llvm.ptr)
^low(%p: !llvm.ptr):
  llvm.br ^end(%p : !llvm.ptr)
^end(%q: !llvm.ptr):
  %v = llvm.load %q : !llvm.ptr -> i32
  %w = llvm.load %pick : !llvm.ptr -> i32
  %s = llvm.mul %v, %w : i32
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %to0 = llvm.addrspacecast %to : !llvm.ptr<1> to !llvm.ptr
  llvm.store %s, %to0 : i32, !llvm.ptr"""
    source, table, out = np.arange(5, 69, dtype=np.uint32), np.zeros(64, np.uint64), np.zeros(64, np.uint32)
    launch(lower(body, "%in: !llvm.ptr<1>, %table: !llvm.ptr<1>, %out: !llvm.ptr<1>"), source, table, out)
    lanes = np.arange(64)
    np.testing.assert_array_equal(out, source * np.where(lanes % 2 == 1, source, source[63]))
    np.testing.assert_array_equal(table, source.ctypes.data + 4 * np.where(lanes % 2 == 1, lanes, 63).astype(np.uint64))


def test_constant_address_space_is_global_memory() -> None:
    body = """
  %c = llvm.addrspacecast %in : !llvm.ptr<1> to !llvm.ptr<4>
  %v = llvm.load %c : !llvm.ptr<4> -> i32
  llvm.store %v, %out : i32, !llvm.ptr<1>"""
    out = np.zeros(1, np.uint32)
    launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), np.array([42], np.uint32), out, block=1)
    assert out[0] == 42


def test_two_allocations_side_by_side_are_one_range() -> None:
    """An access may run from one into its neighbour without a byte between: host addresses know no tensors. One byte between is out of bounds."""
    memory = np.arange(64, dtype=np.uint8)
    body = """
  %v = llvm.load %a {alignment = 1 : i64} : !llvm.ptr<1> -> i64
  llvm.store %v, %out : i64, !llvm.ptr<1>"""
    program = lower(body, "%a: !llvm.ptr<1>, %b: !llvm.ptr<1>, %out: !llvm.ptr<1>")
    out = np.zeros(1, np.uint64)
    first, second, third = memory[:16], memory[16:32], memory[33:48]
    launch(program, Address(first, 12), second, out, block=1)
    assert out.view(np.uint8).tolist() == list(range(12, 20))
    launch(program, Address(second, 12), third, out, block=1, expect="memory")
