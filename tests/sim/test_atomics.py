"""Atomic operations on global memory, LDS and buffers.

Sources
  Values: LLVM LangRef, atomicrmw (nand, uinc_wrap, udec_wrap, usub_cond, usub_sat included) and cmpxchg; AMD CDNA3 ISA guide, BUFFER_ATOMIC_*,
  DS_*_RTN: the result is what memory held before. Out of a buffer's range: nothing is written and 0 returned (CDNA3 ISA guide, range checking).
  Packed bf16 and f16: each half rounds by itself, nearest even.
  Counters: AMD CDNA3 ISA guide, s_waitcnt: vector-memory atomics count in vmcnt whether or not they return, LDS ones in lgkmcnt.
  Ordering: LLVM AMDGPUUsage, memory model gfx942: a release at agent scope waits for vmcnt(0) and lgkmcnt(0), at workgroup scope for LDS only;
  an acquire at agent scope waits for vmcnt(0).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from machine import PROLOGUE, Address, launch, load_item, lower, only, store_item

from fourwave.sim.lowering import UnknownOperation

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

N = 64
HALF = {"f16": torch.float16, "bf16": torch.bfloat16}


def to_bits(x: np.ndarray, t: str) -> np.ndarray:
    return torch.from_numpy(x).to(HALF[t]).view(torch.int16).numpy().view(np.uint16)


def from_bits(x: np.ndarray, t: str) -> np.ndarray:
    return torch.from_numpy(x.view(np.int16)).view(HALF[t]).to(torch.float64).numpy()


def numbers(seed: int, bits: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << bits, N, dtype=np.uint64)
    values[:8] = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 5, 7, 7]
    return values.astype(np.uint32 if bits == 32 else np.uint64)


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


INTEGER = {
    "xchg": lambda x, v, n: v,
    "add": lambda x, v, n: x + v,
    "sub": lambda x, v, n: x - v,
    "_and": lambda x, v, n: x & v,
    "nand": lambda x, v, n: ~(x & v),
    "_or": lambda x, v, n: x | v,
    "_xor": lambda x, v, n: x ^ v,
    "max": lambda x, v, n: x if signed(x, n) > signed(v, n) else v,
    "min": lambda x, v, n: x if signed(x, n) < signed(v, n) else v,
    "umax": lambda x, v, n: max(x, v),
    "umin": lambda x, v, n: min(x, v),
    "uinc_wrap": lambda x, v, n: 0 if x >= v else x + 1,
    "udec_wrap": lambda x, v, n: v if x == 0 or x > v else x - 1,
    "usub_cond": lambda x, v, n: x - v if x >= v else x,
    "usub_sat": lambda x, v, n: max(x - v, 0),
}


def in_memory(ops: list[str], t: str, x: np.ndarray, v: np.ndarray, space: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each operation on items of its own, all in one kernel: (what it returned, what memory held afterwards) of each."""
    pointer = "!llvm.ptr" if space == 0 else f"!llvm.ptr<{space}>"
    body = (
        PROLOGUE
        + load_item("%v", t, "%vin")
        + ("\n  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>" if space == 3 else "")
    )
    for i, op in enumerate(ops):
        body += f"""
  %k{i} = llvm.mlir.constant({N * i} : i64) : i64
  %i{i} = llvm.add %item, %k{i} : i64
  %mem{i} = llvm.getelementptr %mem[%i{i}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {t}"""
        slot = f"%mem{i}"
        if space == 0:
            body += f"\n  %generic{i} = llvm.addrspacecast %mem{i} : !llvm.ptr<1> to !llvm.ptr"
            slot = f"%generic{i}"
        elif space == 3:
            slot = f"%slot{i}"
            body += f"""
  {slot} = llvm.getelementptr %lds[%i{i}] : (!llvm.ptr<3>, i64) -> !llvm.ptr<3>, {t}
  %start{i} = llvm.load %mem{i} : !llvm.ptr<1> -> {t}
  llvm.store %start{i}, {slot} : {t}, !llvm.ptr<3>"""
        body += f"\n  %r{i} = llvm.atomicrmw {op} {slot}, %v monotonic : {pointer}, {t}"
        if space == 3:
            body += f"\n  %now{i} = llvm.load {slot} : !llvm.ptr<3> -> {t}\n  llvm.store %now{i}, %mem{i} : {t}, !llvm.ptr<1>"
        body += store_item(f"%r{i}", t, "%out", f"%i{i}")
    memory = np.tile(x, (len(ops), 1))
    out = np.zeros_like(memory)
    arguments = "%vin: !llvm.ptr<1>, %mem: !llvm.ptr<1>, %out: !llvm.ptr<1>"
    launch(lower(body, arguments, lds=memory.nbytes if space == 3 else 0), v, memory, out)
    return list(zip(out, memory))


@pytest.mark.parametrize("space", [0, 1, 3])
@pytest.mark.parametrize("bits", [32, 64])
def test_integer_operations(bits: int, space: int) -> None:
    x, v = numbers(1, bits), np.roll(numbers(2, bits), 3)
    v[:4] = x[:4]
    for (op, f), (returned, memory) in zip(INTEGER.items(), in_memory(list(INTEGER), f"i{bits}", x, v, space)):
        np.testing.assert_array_equal(returned, x, err_msg=op)
        want = np.array([f(int(a), int(b), bits) & ((1 << bits) - 1) for a, b in zip(x, v)], x.dtype)
        np.testing.assert_array_equal(memory, want, err_msg=op)


FLOAT = {"fadd": np.add, "fsub": np.subtract, "fmax": np.fmax, "fmin": np.fmin}


@pytest.mark.parametrize("space", [1, 3])
@pytest.mark.parametrize("t", ["f32", "f64"])
def test_float_operations(t: str, space: int) -> None:
    dtype = np.float32 if t == "f32" else np.float64
    rng = np.random.default_rng(3)
    x, v = ((rng.standard_normal(N) * 10.0 ** rng.integers(-6, 6, N)).astype(dtype) for _ in range(2))
    x[0], v[1], x[2] = np.nan, np.nan, np.inf  # maximum and minimum of a NaN and a number: the number
    kind = np.uint32 if t == "f32" else np.uint64
    for (op, f), (returned, memory) in zip(FLOAT.items(), in_memory(list(FLOAT), t, x.view(kind), v.view(kind), space)):
        np.testing.assert_array_equal(returned, x.view(kind), err_msg=op)
        np.testing.assert_array_equal(memory.view(dtype), f(x, v), err_msg=op)


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_packed_halves_round_each_for_itself(t: str) -> None:
    rng = np.random.default_rng(4)
    x, v = (to_bits((rng.standard_normal(2 * N) * 8).astype(np.float32), t) for _ in range(2))
    [(returned, memory)] = in_memory(["fadd"], f"vector<2x{t}>", x.view(np.uint32), v.view(np.uint32), 1)
    np.testing.assert_array_equal(returned, x.view(np.uint32))
    want = to_bits((from_bits(x, t) + from_bits(v, t)).astype(np.float32), t)
    np.testing.assert_array_equal(memory.view(np.uint16), want)


@pytest.mark.parametrize("space", [1, 3])
@pytest.mark.parametrize("bits", [32, 64])
def test_cmpxchg(bits: int, space: int) -> None:
    """(old, whether it was the compared value); memory changes only then."""
    t, dtype = f"i{bits}", np.uint32 if bits == 32 else np.uint64
    x, c, v = numbers(5, bits), numbers(5, bits), numbers(6, bits)
    c[::3] += dtype(1)
    if bits == 64:
        c[1] = x[1] ^ np.uint64(1 << 40)  # only the upper half differs
    lds = "%p" if space == 3 else "%g"
    body = (
        PROLOGUE
        + load_item("%c", t, "%cin")
        + load_item("%v", t, "%vin")
        + f"""
  %g = llvm.getelementptr %mem[%item] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {t}
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %p = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, {t}
  %start = llvm.load %g : !llvm.ptr<1> -> {t}
  llvm.store %start, %p : {t}, !llvm.ptr<3>
  %pair = llvm.cmpxchg {lds}, %c, %v monotonic monotonic : !llvm.ptr<{space}>, {t}
  %now = llvm.load {lds} : !llvm.ptr<{space}> -> {t}
  %old = llvm.extractvalue %pair[0] : !llvm.struct<({t}, i1)>
  %r = llvm.extractvalue %pair[1] : !llvm.struct<({t}, i1)>"""
        + store_item("%old", t, "%oldout")
        + store_item("%r", "i1", "%out")
        + store_item("%now", t, "%nowout")
    )
    names = ("cin", "vin", "mem", "oldout", "nowout", "out")
    program = lower(body, ", ".join(f"%{n}: !llvm.ptr<1>" for n in names), lds=512)
    old, now, success = np.zeros_like(x), np.zeros_like(x), np.zeros(N, np.uint8)
    launch(program, c, v, x.copy(), old, now, success)
    np.testing.assert_array_equal(old, x)
    np.testing.assert_array_equal(success, x == c)
    np.testing.assert_array_equal(now, np.where(x == c, v, x))


RESOURCE = """
  %stride = llvm.mlir.constant(0 : i16) : i16
  %flags = llvm.mlir.constant(0 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %four = llvm.mlir.constant(4 : i32) : i32
  %records64 = llvm.zext %records : i32 to i64
  %rsrc = rocdl.make.buffer.rsrc %mem, %stride, %records64, %flags : !llvm.ptr<1> to <8>
"""


@pytest.mark.parametrize("name", ["fadd", "fmax", "smax", "umin", "fadd_bf16", "fadd_f16"])
def test_buffer_atomics(name: str) -> None:
    """The last 20 lanes lie past num_records: memory keeps its bytes, the result is 0."""
    rng = np.random.default_rng(7)
    op, _, packed = name.partition("_")
    t = f"vector<2x{packed}>" if packed else "f32" if op[0] == "f" else "i32"
    if packed:
        halves = [to_bits((rng.standard_normal(2 * N) * 8).astype(np.float32), packed) for _ in range(2)]
        x, v = (h.view(np.uint32) for h in halves)
        total = from_bits(halves[0], packed) + from_bits(halves[1], packed)
        want = to_bits(total.astype(np.float32), packed).view(np.uint32)
    elif t == "f32":
        a, b = (rng.standard_normal(N).astype(np.float32) for _ in range(2))
        x, v = a.view(np.uint32), b.view(np.uint32)
        want = (a + b if op == "fadd" else np.fmax(a, b)).view(np.uint32)
    else:
        x, v = (rng.integers(0, 1 << 32, N, dtype=np.uint32) for _ in range(2))
        want = np.minimum(x, v) if op == "umin" else np.maximum(x.view(np.int32), v.view(np.int32)).view(np.uint32)
    body = (
        PROLOGUE
        + RESOURCE
        + load_item("%v", t, "%vin")
        + f"""
  %offset = llvm.mul %tid, %four : i32
  %r = "rocdl.raw.ptr.buffer.atomic.{op}"(%v, %rsrc, %offset, %zero) <{{aux = 0 : i32}}> : ({t}, !llvm.ptr<8>, i32, i32) -> {t}"""
        + store_item("%r", t, "%out")
    )
    memory, out, inside = x.copy(), np.full(N, 9, np.uint32), np.arange(N) < 44
    program = lower(body, "%vin: !llvm.ptr<1>, %mem: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32")
    launch(program, v, memory, out, 44 * 4)
    np.testing.assert_array_equal(memory, np.where(inside, want, x))
    np.testing.assert_array_equal(out, np.where(inside, x, 0))


def test_buffer_cmpswap_takes_the_new_value_first() -> None:
    """rocdl.raw.ptr.buffer.atomic.cmpswap(src, cmp, ...): mlir/include/mlir/Dialect/LLVMIR/ROCDLOps.td."""
    x = numbers(8, 32)
    cmp, new = np.where(np.arange(N) % 2, x, x + np.uint32(1)).astype(np.uint32), numbers(9, 32)
    body = (
        PROLOGUE
        + RESOURCE
        + load_item("%c", "i32", "%cin")
        + load_item("%v", "i32", "%vin")
        + """
  %offset = llvm.mul %tid, %four : i32
  %r = "rocdl.raw.ptr.buffer.atomic.cmpswap"(%v, %c, %rsrc, %offset, %zero) <{aux = 0 : i32}> : (i32, i32, !llvm.ptr<8>, i32, i32) -> i32"""
        + store_item("%r", "i32", "%out")
    )
    memory, out = x.copy(), np.zeros(N, np.uint32)
    program = lower(
        body, "%cin: !llvm.ptr<1>, %vin: !llvm.ptr<1>, %mem: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32"
    )
    launch(program, cmp, new, memory, out, 4 * N)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_array_equal(memory, np.where(np.arange(N) % 2, new, x))


COUNT = (
    PROLOGUE
    + """
  %one = llvm.mlir.constant(1 : i32) : i32
  %ticket = llvm.atomicrmw add %counter, %one monotonic : !llvm.ptr<1>, i32
  %wide = llvm.zext %ticket : i32 to i64
  %seat = llvm.getelementptr %taken[%wide] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, i32
  %again = llvm.atomicrmw add %seat, %one monotonic : !llvm.ptr<1>, i32
"""
)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_lane_of_every_workgroup_gets_a_ticket_of_its_own(threads: int) -> None:
    """Tickets from one counter, drawn by workgroups on several host threads: each number exactly once."""
    groups = 256
    counter, taken = np.zeros(1, np.uint32), np.zeros(groups * 64, np.uint32)
    launch(lower(COUNT, "%counter: !llvm.ptr<1>, %taken: !llvm.ptr<1>"), counter, taken, grid=groups, threads=threads)
    assert counter[0] == groups * 64
    np.testing.assert_array_equal(taken, 1)


def lds_text(first: str, second: str, between: str = "") -> str:
    """Wave 0 runs `first`, wave 1 `second`, on the same dword of LDS, which a barrier behind its initial store."""
    return (
        PROLOGUE
        + """
  %w64 = llvm.mlir.constant(64 : i32) : i32
  %low = llvm.icmp "ult" %tid, %w64 : i32
  %v = llvm.mlir.constant(3 : i32) : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  llvm.cond_br %low, ^init, ^ready
^init:
  llvm.store %v, %lds : i32, !llvm.ptr<3>
  llvm.br ^ready
^ready:
  rocdl.s.waitcnt 49279
  rocdl.s.barrier
  llvm.cond_br %low, ^first, ^second
^first:
  """
        + first
        + "\n  llvm.br ^end\n^second:\n  "
        + second
        + "\n  llvm.br ^end\n^end:"
    )


ADD = "%x{0} = llvm.atomicrmw add %lds, %v monotonic : !llvm.ptr<3>, i32"
LOAD = "%x{0} = llvm.load %lds : !llvm.ptr<3> -> i32"
STORE = "llvm.store %v, %lds : i32, !llvm.ptr<3>"
ORDERED_LOAD = (
    '%x{0} = llvm.load %lds atomic syncscope("workgroup") acquire {{alignment = 4 : i64}} : !llvm.ptr<3> -> i32'
)
ORDERED_STORE = 'llvm.store %v, %lds atomic syncscope("workgroup") release {{alignment = 4 : i64}} : i32, !llvm.ptr<3>'


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [(ADD, ADD, ""), (ADD, LOAD, "race"), (LOAD, ADD, "race"), (STORE, ADD, "race"), (ADD, STORE, "race"),
     (ADD, ORDERED_LOAD, ""), (ORDERED_STORE, ORDERED_LOAD, ""), (ORDERED_STORE, ADD, ""), (STORE, ORDERED_LOAD, "race"),
     (ORDERED_STORE, LOAD, "race"), (ORDERED_STORE, STORE, "race")],
)  # fmt: skip
def test_races_of_lds_atomics(first: str, second: str, kind: str) -> None:
    """Atomics of two waves need nothing between them; an atomic and a plain access do."""
    report = launch(lower(lds_text(first.format(1), second.format(2)), lds=64), block=128, expect=kind)
    if kind:
        assert only(report).address == 0


def copy_then(middle: str) -> str:
    """A copy to LDS, something in the middle, and a read of what was copied."""
    return (
        PROLOGUE
        + RESOURCE
        + f"""
  %offset = llvm.mul %tid, %four : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %one = llvm.mlir.constant(1 : i32) : i32
  rocdl.raw.ptr.buffer.load.lds %rsrc, %lds, %four, %offset, %zero, %zero, 0
  {middle}
  %slot = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %r = llvm.load %slot : !llvm.ptr<3> -> i32"""
        + store_item("%r", "i32", "%out")
    )


ATOMIC = "%t{0} = llvm.atomicrmw add %flag, %one {1} : !llvm.ptr<1>, i32"
WAIT1 = "rocdl.s.waitcnt 3953"  # vmcnt(1)


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize(
    ("middle", "kind"),
    [
        (WAIT1, "wait"),  # the copy is the newest operation: not covered
        (ATOMIC.format(1, "monotonic") + "\n  " + WAIT1, ""),  # one newer operation: vmcnt(1) covers the copy
        (
            '%t1 = "rocdl.raw.ptr.buffer.atomic.smax"(%one, %rsrc, %zero, %zero) <{aux = 0 : i32}> : (i32, !llvm.ptr<8>, i32, i32) -> i32\n  '
            + WAIT1,
            "",
        ),
        (ATOMIC.format(1, "monotonic"), "wait"),
        (ATOMIC.format(1, 'syncscope("workgroup") release'), "wait"),
        (ATOMIC.format(1, 'syncscope("agent") release'), ""),
        (ATOMIC.format(1, 'syncscope("agent") acquire'), ""),
        (ATOMIC.format(1, "seq_cst"), ""),
        ('llvm.fence syncscope("workgroup") acq_rel', "wait"),
        ('llvm.fence syncscope("agent") release', ""),
        ('llvm.fence syncscope("agent-one-as") acquire', ""),
    ],
    ids=[
        "none",
        "counts",
        "buffer-counts",
        "relaxed",
        "workgroup-release",
        "agent-release",
        "agent-acquire",
        "seq_cst",
        "workgroup-fence",
        "agent-fence",
        "agent-acquire-fence",
    ],
)
def test_atomics_in_vmcnt_and_their_orderings(middle: str, kind: str) -> None:
    source, flag, out = numbers(10, 32), np.zeros(1, np.uint32), np.zeros(N, np.uint32)
    program = lower(
        copy_then(middle), "%mem: !llvm.ptr<1>, %flag: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32", lds=256
    )
    launch(program, source, flag, out, 4 * N, expect=kind)
    if not kind and "buffer.atomic" not in middle:
        np.testing.assert_array_equal(out, source)


def one_atomic(t: str = "i32") -> str:
    return (
        PROLOGUE
        + f"\n  %v = llvm.mlir.constant(1 : {t}) : {t}\n  %r = llvm.atomicrmw add %mem, %v monotonic : !llvm.ptr<1>, {t}"
    )


def test_an_atomic_outside_every_allocation() -> None:
    memory = np.zeros(16, np.uint32)
    report = launch(lower(one_atomic(), "%mem: !llvm.ptr<1>"), Address(memory, 64, 64), expect="memory")
    assert only(report).message.startswith("writes global memory outside") and not memory.any()


@pytest.mark.parametrize("t", ["i32", "i64"])
def test_a_misaligned_atomic(t: str) -> None:
    memory = np.zeros(16, np.uint32)
    report = launch(
        lower(one_atomic(t), "%mem: !llvm.ptr<1>"), Address(memory, 2 if t == "i32" else 4), expect="memory"
    )
    assert "not a multiple of its size" in only(report).message


@pytest.mark.parametrize("t", ["i8", "i16", "f16"])
def test_sizes_the_machine_lacks_raise(t: str) -> None:
    value = f"%v = llvm.mlir.constant(1.0 : {t}) : {t}" if t == "f16" else f"%v = llvm.mlir.constant(1 : {t}) : {t}"
    op = "fadd" if t == "f16" else "add"
    with pytest.raises(UnknownOperation, match="atomic"):
        lower(
            PROLOGUE + f"\n  {value}\n  %r = llvm.atomicrmw {op} %mem, %v monotonic : !llvm.ptr<1>, {t}",
            "%mem: !llvm.ptr<1>",
        )


SPIN = (
    PROLOGUE
    + """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %last = llvm.icmp "ne" %gid, %zero : i32
  llvm.cond_br %last, ^signal, ^wait
^wait:
  %seen = llvm.load %flag atomic syncscope("agent") monotonic {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  %still = llvm.icmp "eq" %seen, %zero : i32
  llvm.cond_br %still, ^wait, ^got
^got:
  %value = llvm.load %data : !llvm.ptr<1> -> i32
  %r = llvm.add %value, %tid : i32
  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %r, %to : i32, !llvm.ptr<1>
  llvm.br ^end
^signal:
  %k = llvm.mlir.constant(1000 : i32) : i32
  llvm.store %k, %data : i32, !llvm.ptr<1>
  llvm.store %one, %flag atomic syncscope("agent") release {alignment = 4 : i64} : i32, !llvm.ptr<1>
  llvm.br ^end
^end:
"""
)


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_workgroup_that_spins_sees_what_another_one_released(threads: int) -> None:
    flag, data, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(N, np.uint32)
    program = lower(SPIN, "%flag: !llvm.ptr<1>, %data: !llvm.ptr<1>, %out: !llvm.ptr<1>")
    launch(program, flag, data, out, grid=2, threads=threads)
    np.testing.assert_array_equal(out, 1000 + np.arange(N))


VECTOR = """
  %wide = llvm.ptrtoint %rsrc : !llvm.ptr<8> to i128
  %words = llvm.bitcast %wide : i128 to vector<4xi32>
  %offset = llvm.mul %tid, %four : i32
"""


@pytest.mark.parametrize("op", ["fadd", "fmax", "smax", "umin", "cmpswap"])
def test_buffer_atomics_with_the_resource_as_a_vector(op: str) -> None:
    """rocdl.raw.buffer.atomic.*: operands as with a pointer (ROCDLOps.td)."""
    rng = np.random.default_rng(11)
    x, v = (rng.integers(0, 1 << 30, N, dtype=np.uint32) for _ in range(2))
    t = "f32" if op[0] == "f" else "i32"
    want = {
        "fadd": (x.view(np.float32) + v.view(np.float32)).view(np.uint32), "fmax": np.fmax(x.view(np.float32), v.view(np.float32)).view(np.uint32),
        "smax": np.maximum(x.view(np.int32), v.view(np.int32)).view(np.uint32), "umin": np.minimum(x, v), "cmpswap": np.where(np.arange(N) % 2, v, x),
    }[op]  # fmt: skip
    compared = np.where(np.arange(N) % 2, x, x + np.uint32(1)).astype(np.uint32)
    extra = ("%c, ", ", i32") if op == "cmpswap" else ("", "")
    call = f'"rocdl.raw.buffer.atomic.{op}"(%v, {extra[0]}%words, %offset, %zero) <{{aux = 0 : i32}}> : ({t}{extra[1]}, vector<4xi32>, i32, i32)'
    body = PROLOGUE + RESOURCE + load_item("%v", t, "%vin") + load_item("%c", "i32", "%cin") + VECTOR
    body += f"  %r = {call} -> {t}" + store_item("%r", t, "%out")
    names = ", ".join(f"%{n}: !llvm.ptr<1>" for n in ("vin", "cin", "mem", "out")) + ", %records: i32"
    memory, out, inside = x.copy(), np.zeros(N, np.uint32), np.arange(N) < 44
    launch(lower(body, names), v, compared, memory, out, 44 * 4)
    np.testing.assert_array_equal(memory, np.where(inside, want, x))
    np.testing.assert_array_equal(out, np.where(inside, x, 0))


@pytest.mark.parametrize("t", ["i32", "vector<4xi32>"])
def test_buffer_loads_and_stores_with_the_resource_as_a_vector(t: str) -> None:
    """rocdl.raw.buffer.load and .store; the last lanes lie past num_records."""
    count = 4 if t != "i32" else 1
    memory = np.random.default_rng(12).integers(0, 1 << 32, (N, count), dtype=np.uint32)
    body = PROLOGUE + RESOURCE + VECTOR + f"""
  %size = llvm.mlir.constant({4 * count} : i32) : i32
  %at = llvm.mul %tid, %size : i32
  %v = "rocdl.raw.buffer.load"(%words, %at, %zero) <{{aux = 0 : i32}}> : (vector<4xi32>, i32, i32) -> {t}
  %back = llvm.xor %v, %v : {t}
  "rocdl.raw.buffer.store"(%back, %words, %at, %zero) <{{aux = 0 : i32}}> : ({t}, vector<4xi32>, i32, i32) -> ()
  """ + store_item("%v", t, "%out")  # fmt: skip
    before, out, inside = memory.copy(), np.full((N, count), 9, np.uint32), np.arange(N)[:, None] < 44
    launch(lower(body, "%mem: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32"), memory, out, 44 * 4 * count)
    np.testing.assert_array_equal(out, np.where(inside, before, 0))
    np.testing.assert_array_equal(memory, np.where(inside, 0, before))
