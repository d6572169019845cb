"""Calls, switches, private memory, globals outside LDS, generic pointers, scalar loads, and the named intrinsics.

Sources
  switch, call, alloca, addrspacecast: LLVM LangRef. Null of LDS (address space 3) is all ones, of generic pointers 0: LLVM AMDGPUUsage, address
  spaces. Generic addresses of LDS lie in an aperture: AMDGPUUsage, "Flat"; where it lies is the driver's choice and no result depends on it.
  V_PERM_B32, V_ALIGNBIT_B32: AMD CDNA3 ISA guide. S_BUFFER_LOAD: one address for the wave, out of range reads 0 (the same guide).
"""

from __future__ import annotations

import numpy as np
import pytest
from machine import PROLOGUE, itemwise, launch, load_item, lower, only, store_item

from fourwave.sim.lowering import UnknownOperation, lower_kernel

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

N = 64


def words(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, N, dtype=np.uint32)


# -- control -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 32, 64])
def test_switch(bits: int) -> None:
    """Cases with and without arguments, a negative case, two cases of one block, lanes that go different ways."""
    value = np.tile(np.array([0, 1, 5, -3, 7, 9, -1, 5], np.int64), 8)
    body = f"""
  %x = llvm.trunc %a : i64 to i{bits}
  %one = llvm.mlir.constant(1 : i32) : i32
  %ten = llvm.mlir.constant(10 : i32) : i32
  %twenty = llvm.mlir.constant(20 : i32) : i32
  llvm.switch %x : i{bits}, ^default [ 1: ^with(%ten : i32), 5: ^with(%twenty : i32), -3: ^bare, 7: ^bare ]
^default:
  llvm.br ^end(%one : i32)
^with(%v: i32):
  llvm.br ^end(%v : i32)
^bare:
  %b = llvm.mlir.constant(30 : i32) : i32
  llvm.br ^end(%b : i32)
^end(%r: i32):
"""
    if bits == 64:
        body = body.replace("%x = llvm.trunc %a : i64 to i64", "%x = llvm.or %a, %a : i64")
    want = {1: 10, 5: 20, -3: 30, 7: 30}
    got = itemwise(body, [("i64", value.view(np.uint64))], "i32")
    np.testing.assert_array_equal(got, [want.get(int(v), 1) for v in value])


def test_switch_with_a_default_only() -> None:
    got = itemwise("\n  llvm.switch %a : i32, ^end(%a : i32) [ ]\n^end(%r: i32):", [("i32", words(1))], "i32")
    np.testing.assert_array_equal(got, words(1))


def module(functions: str, body: str, arguments: str, globals_: str = "", arch: str | None = None):
    """Lower the kernel @k of a module that holds other functions, too."""
    from machine import arch as chosen
    from machine import bindings, context

    ir = bindings()
    text = f"""module attributes {{gpu.container_module}} {{ gpu.module @kernels {{
      {globals_}
      {functions}
      llvm.func @k({arguments}) attributes {{rocdl.kernel, gpu.kernel}} {{ {body}
        llvm.return }} }} }}"""
    with context():
        parsed = ir.Module.parse(text)
        gpu_module = parsed.body.operations[0].operation
        kernel = next(
            o.operation
            for o in gpu_module.regions[0].blocks[0].operations
            if o.operation.name == "llvm.func" and ir.StringAttr(o.operation.attributes["sym_name"]).value == "k"
        )
        return lower_kernel(ir, gpu_module, kernel, arch or chosen())


COLLATZ = """
llvm.func @odd(%x: i32) -> i1 {
  %one = llvm.mlir.constant(1 : i32) : i32
  %bit = llvm.and %x, %one : i32
  %is = llvm.icmp "eq" %bit, %one : i32
  llvm.return %is : i1
}
llvm.func @steps(%x: i32, %limit: i32) -> i32 {
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %three = llvm.mlir.constant(3 : i32) : i32
  llvm.br ^loop(%x, %zero : i32, i32)
^loop(%v: i32, %n: i32):
  %done = llvm.icmp "ule" %v, %one : i32
  llvm.cond_br %done, ^out(%n : i32), ^check
^check:
  %over = llvm.icmp "uge" %n, %limit : i32
  llvm.cond_br %over, ^out(%limit : i32), ^step
^step:
  %m = llvm.add %n, %one : i32
  %is = llvm.call @odd(%v) : (i32) -> i1
  llvm.cond_br %is, ^up, ^down
^up:
  %t = llvm.mul %v, %three : i32
  %u = llvm.add %t, %one : i32
  llvm.br ^loop(%u, %m : i32, i32)
^down:
  %d = llvm.lshr %v, %one : i32
  llvm.br ^loop(%d, %m : i32, i32)
^out(%r: i32):
  llvm.return %r : i32
}
"""


def collatz(x: int, limit: int) -> int:
    n = 0
    while x > 1:
        if n >= limit:
            return limit
        x, n = (3 * x + 1 if x & 1 else x >> 1), n + 1
    return n


def test_calls_with_loops_of_their_own_twice_in_one_kernel() -> None:
    x = np.arange(1, N + 1, dtype=np.uint32)
    body = (
        PROLOGUE
        + load_item("%a", "i32", "%in")
        + """
  %c40 = llvm.mlir.constant(40 : i32) : i32
  %c1000 = llvm.mlir.constant(1000 : i32) : i32
  %p = llvm.call @steps(%a, %c40) : (i32, i32) -> i32
  %q = llvm.call @steps(%p, %c1000) : (i32, i32) -> i32
  %k = llvm.mul %p, %c1000 : i32
  %r = llvm.add %k, %q : i32"""
        + store_item("%r", "i32", "%out")
    )
    out = np.zeros(N, np.uint32)
    launch(module(COLLATZ, body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), x, out)
    first = [collatz(int(v), 40) for v in x]
    np.testing.assert_array_equal(out, [1000 * p + collatz(p, 1000) for p in first])


def test_a_device_library_function_by_name() -> None:
    x = np.random.default_rng(2).uniform(-4, 4, N).astype(np.float32)
    body = (
        PROLOGUE
        + load_item("%a", "f32", "%in")
        + "\n  %r = llvm.call @__ocml_exp2_f32(%a) : (f32) -> f32"
        + store_item("%r", "f32", "%out")
    )
    out = np.zeros(N, np.float32)
    launch(module("llvm.func @__ocml_exp2_f32(f32) -> f32", body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), x, out)
    assert np.all(np.abs(out - np.exp2(x.astype(np.float64))) <= np.spacing(out))


@pytest.mark.parametrize(
    ("functions", "match"),
    [
        ("llvm.func @f(i32) -> i32", "external function f"),
        ("llvm.func @f(%x: i32) -> i32 { %y = llvm.call @f(%x) : (i32) -> i32\n llvm.return %y : i32 }", "recursive"),
    ],
)
def test_calls_that_cannot_be_lowered_raise(functions: str, match: str) -> None:
    with pytest.raises(UnknownOperation, match=match):
        module(functions, PROLOGUE + "\n  %r = llvm.call @f(%tid) : (i32) -> i32", "")


# -- private memory ----------------------------------------------------------------------------------------------------------------------

PRIVATE = (
    PROLOGUE
    + """
  %eight = llvm.mlir.constant(8 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %array = llvm.alloca %eight x i32 {alignment = 16 : i64} : (i32) -> !llvm.ptr<5>
  %bytes = llvm.alloca %eight x i8 : (i32) -> !llvm.ptr<5>
  llvm.br ^loop(%zero : i32)
^loop(%i: i32):
  %square = llvm.mul %i, %i : i32
  %v = llvm.add %square, %tid : i32
  %slot = llvm.getelementptr %array[%i] : (!llvm.ptr<5>, i32) -> !llvm.ptr<5>, i32
  llvm.store %v, %slot : i32, !llvm.ptr<5>
  %low = llvm.trunc %v : i32 to i8
  %byte = llvm.getelementptr %bytes[%i] : (!llvm.ptr<5>, i32) -> !llvm.ptr<5>, i8
  llvm.store %low, %byte : i8, !llvm.ptr<5>
  %n = llvm.add %i, %one : i32
  %more = llvm.icmp "ult" %n, %eight : i32
  llvm.cond_br %more, ^loop(%n : i32), ^done
^done:
  %pick = llvm.urem %tid, {limit} : i32
  %from = llvm.getelementptr %array[%pick] : (!llvm.ptr<5>, i32) -> !llvm.ptr<5>, i32
  %r = llvm.load %from : !llvm.ptr<5> -> i32
  %wide = llvm.load %bytes : !llvm.ptr<5> -> vector<2xi32>
"""
    + store_item("%r", "i32", "%out")
    + store_item("%wide", "vector<2xi32>", "%wideout")
)


def test_private_arrays_with_run_time_indices() -> None:
    out, wide = np.zeros(N, np.uint32), np.zeros((N, 2), np.uint32)
    program = lower(PRIVATE.replace("{limit}", "%eight"), "%out: !llvm.ptr<1>, %wideout: !llvm.ptr<1>")
    launch(program, out, wide)
    lane = np.arange(N)
    np.testing.assert_array_equal(out, (lane % 8) ** 2 + lane)
    np.testing.assert_array_equal(wide.view(np.uint8), np.arange(8) ** 2 + lane[:, None] & 255)


def test_private_memory_past_the_end_is_found() -> None:
    text = PRIVATE.replace("{limit}", "%c64")
    out, wide = np.zeros(N, np.uint32), np.zeros((N, 2), np.uint32)
    report = launch(lower(text, "%out: !llvm.ptr<1>, %wideout: !llvm.ptr<1>"), out, wide, expect="memory")
    assert "private memory" in only(report).message


def test_an_alloca_of_run_time_size_raises() -> None:
    with pytest.raises(UnknownOperation, match="alloca"):
        lower(PROLOGUE + "\n  %p = llvm.alloca %tid x i32 : (i32) -> !llvm.ptr<5>")


# -- globals -------------------------------------------------------------------------------------------------------------------------------

GLOBALS = {
    "dense": ("dense<[10, -20, 30, 40]> : tensor<4xi32>", "!llvm.array<4 x i32>", [10, (1 << 32) - 20, 30, 40]),
    "splat": ("dense<7> : tensor<4xi32>", "!llvm.array<4 x i32>", [7, 7, 7, 7]),
    "nested": ("dense<[[1, 2], [3, 4]]> : tensor<2x2xi32>", "!llvm.array<2 x array<2 x i32>>", [1, 2, 3, 4]),
    "float": (
        "dense<[1.0, -2.0, 0.5, 0.0]> : tensor<4xf32>",
        "!llvm.array<4 x f32>",
        [0x3F800000, 0xC0000000, 0x3F000000, 0],
    ),
    "string": (
        '"abcdefgh\\00\\FF\\01\\02wxyz"',
        "!llvm.array<16 x i8>",
        [0x64636261, 0x68676665, 0x0201FF00, 0x7A797877],
    ),
}


@pytest.mark.parametrize("space", [0, 1, 4])
@pytest.mark.parametrize("name", GLOBALS)
def test_initialised_globals(name: str, space: int) -> None:
    value, t, want = GLOBALS[name]
    pointer = "!llvm.ptr" if space == 0 else f"!llvm.ptr<{space}>"
    globals_ = f"llvm.mlir.global internal constant @table({value}) {{addr_space = {space} : i32}} : {t}"
    if name == "string":
        globals_ = globals_.replace(f" : {t}", "")
    body = PROLOGUE + f"""
  %three = llvm.mlir.constant(3 : i32) : i32
  %i = llvm.and %tid, %three : i32
  %table = llvm.mlir.addressof @table : {pointer}
  %p = llvm.getelementptr %table[%i] : ({pointer}, i32) -> {pointer}, i32
  %r = llvm.load %p : {pointer} -> i32""" + store_item("%r", "i32", "%out")  # fmt: skip
    out = np.zeros(N, np.uint32)
    launch(lower(body, "%out: !llvm.ptr<1>", lds=globals_), out)
    np.testing.assert_array_equal(out, np.tile(np.array(want, np.uint32), 16))


def test_a_read_past_a_global_is_found() -> None:
    globals_ = "llvm.mlir.global internal constant @table(dense<1> : tensor<4xi32>) {addr_space = 4 : i32} : !llvm.array<4 x i32>"
    body = PROLOGUE + """
  %table = llvm.mlir.addressof @table : !llvm.ptr<4>
  %p = llvm.getelementptr %table[%tid] : (!llvm.ptr<4>, i32) -> !llvm.ptr<4>, i32
  %r = llvm.load %p : !llvm.ptr<4> -> i32"""  # fmt: skip
    report = launch(lower(body, lds=globals_), expect="memory")
    assert only(report).lane == 4


# -- generic pointers --------------------------------------------------------------------------------------------------------------------------

GENERIC = (
    PROLOGUE
    + """
  %two = llvm.mlir.constant(2 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %half = llvm.urem %tid, %two : i32
  %even = llvm.icmp "eq" %half, %zero : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %slot3 = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %slot1 = llvm.getelementptr %mem[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %g3 = llvm.addrspacecast %slot3 : !llvm.ptr<3> to !llvm.ptr
  %g1 = llvm.addrspacecast %slot1 : !llvm.ptr<1> to !llvm.ptr
  %p = llvm.select %even, %g3, %g1 : i1, !llvm.ptr
  llvm.store %tid, %p : i32, !llvm.ptr
  %old = llvm.atomicrmw add %p, %two monotonic : !llvm.ptr, i32
  %r = llvm.load %p : !llvm.ptr -> i32
"""
    + store_item("%r", "i32", "%out")
)


def test_a_generic_pointer_may_be_lds_or_global_lane_by_lane() -> None:
    memory, out = np.zeros(N, np.uint32), np.zeros(N, np.uint32)
    launch(lower(GENERIC, "%mem: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=256), memory, out)
    lane = np.arange(N)
    np.testing.assert_array_equal(out, lane + 2)
    np.testing.assert_array_equal(memory, np.where(lane % 2, lane + 2, 0))


def test_null_pointers_stay_null_across_casts() -> None:
    body = PROLOGUE + """
  %null3 = llvm.inttoptr %a : i32 to !llvm.ptr<3>
  %g = llvm.addrspacecast %null3 : !llvm.ptr<3> to !llvm.ptr
  %i = llvm.ptrtoint %g : !llvm.ptr to i64
  %back = llvm.addrspacecast %g : !llvm.ptr to !llvm.ptr<3>
  %r = llvm.ptrtoint %back : !llvm.ptr<3> to i32
""" + store_item("%i", "i64", "%iout") + store_item("%r", "i32", "%out")  # fmt: skip
    for value in (0xFFFFFFFF, 0, 64):
        wide, out = np.ones(N, np.uint64), np.ones(N, np.uint32)
        launch(lower(body, "%a: i32, %iout: !llvm.ptr<1>, %out: !llvm.ptr<1>"), value, wide, out)
        np.testing.assert_array_equal(out, value)
        assert (wide[0] == 0) == (value == 0xFFFFFFFF)


def test_a_generic_pointer_to_private_memory_raises() -> None:
    body = (
        PROLOGUE + "\n  %one = llvm.mlir.constant(1 : i32) : i32\n  %p = llvm.alloca %one x i32 : (i32) -> !llvm.ptr<5>"
    )
    with pytest.raises(UnknownOperation, match="private"):
        lower(body + "\n  %g = llvm.addrspacecast %p : !llvm.ptr<5> to !llvm.ptr")


# -- intrinsics by name --------------------------------------------------------------------------------------------------------------------------


def test_perm_and_alignbit_intrinsics() -> None:
    a, b, c = words(3), words(4), words(5) & np.uint32(0x07070707)
    both = (a.astype(np.uint64) << np.uint64(32)) | b
    call = '\n  %r = llvm.call_intrinsic "llvm.amdgcn.{}"(%a, %b, %c) : (i32, i32, i32) -> i32'
    given = [("i32", x) for x in (a, b, c)]
    want = np.zeros(N, np.uint32)
    for i in range(4):
        select = (c >> np.uint32(8 * i) & np.uint32(7)).astype(np.uint64) * np.uint64(8)
        want |= (both >> select & np.uint64(255)).astype(np.uint32) << np.uint32(8 * i)
    np.testing.assert_array_equal(itemwise(call.format("perm"), given, "i32"), want)
    shift = (c & np.uint32(31)).astype(np.uint64)
    np.testing.assert_array_equal(itemwise(call.format("alignbit"), given, "i32"), (both >> shift).astype(np.uint32))
    shift = (c & np.uint32(3)).astype(np.uint64) * np.uint64(8)
    np.testing.assert_array_equal(itemwise(call.format("alignbyte"), given, "i32"), (both >> shift).astype(np.uint32))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("by", ["intrinsic", "operation"])
def test_scalar_buffer_loads(count: int, by: str) -> None:
    """One address for the wave; dwords past num_records are 0."""
    t = "i32" if count == 1 else "vector<4xi32>"
    calls = {
        "intrinsic": f'%r = llvm.call_intrinsic "llvm.amdgcn.s.buffer.load.{"i32" if count == 1 else "v4i32"}"(%v, %at, %flags) : '
        f"(vector<4xi32>, i32, i32) -> {t}",
        "operation": f'%r = "rocdl.ptr.s.buffer.load"(%rsrc, %at) <{{aux = 0 : i32}}> : (!llvm.ptr<8>, i32) -> {t}',
    }
    body = PROLOGUE + """
  %stride = llvm.mlir.constant(0 : i16) : i16
  %flags = llvm.mlir.constant(0 : i32) : i32
  %records64 = llvm.zext %records : i32 to i64
  %rsrc = rocdl.make.buffer.rsrc %mem, %stride, %records64, %flags : !llvm.ptr<1> to <8>
  %wide = llvm.ptrtoint %rsrc : !llvm.ptr<8> to i128
  %v = llvm.bitcast %wide : i128 to vector<4xi32>
  """ + calls[by] + store_item("%r", t, "%out")  # fmt: skip
    memory = words(6)
    program = lower(body, "%mem: !llvm.ptr<1>, %records: i32, %at: i32, %out: !llvm.ptr<1>")
    for at in (0, 8, 4 * 30, 4 * 32):
        out = np.zeros((N, count), np.uint32)
        launch(program, memory, 4 * 32, at, out)
        want = [memory[at // 4 + i] if at // 4 + i < 32 else 0 for i in range(count)]
        np.testing.assert_array_equal(out, np.tile(np.array(want, np.uint32), (N, 1)))


def test_an_intrinsic_without_a_model_raises() -> None:
    with pytest.raises(UnknownOperation, match=r"llvm\.amdgcn\.sad\.u8"):
        itemwise(
            '\n  %r = llvm.call_intrinsic "llvm.amdgcn.sad.u8"(%a, %a, %a) : (i32, i32, i32) -> i32',
            [("i32", words(0))],
            "i32",
        )


def test_setreg_of_another_register_raises() -> None:
    text = (
        "\n  %w = llvm.mlir.constant({} : i32) : i32\n  %v = llvm.mlir.constant(1 : i32) : i32\n"
        + '  llvm.call_intrinsic "llvm.amdgcn.s.setreg"(%w, %v) : (i32, i32) -> ()'
    )
    lower(text.format(154))  # SCHED_MODE
    with pytest.raises(UnknownOperation, match="s_setreg of register 1"):
        lower(text.format(1 | 4 << 6 | 3 << 11))  # MODE: rounding and denormals
