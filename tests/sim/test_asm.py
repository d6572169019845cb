"""Inline assembly: its small grammar, and each instruction's result.

Sources
  Constraints and operand numbers: LLVM LangRef, "Inline Assembler Expressions"; registers v, a, s: LLVM AMDGPU backend constraints.
  s_waitcnt, buffer_load ... lds (LDS address = m0 + offset + lane * size): AMD CDNA3 and CDNA4 ISA guides.
  v_mfma_*_f8f6f4 cbsz, blgp, op_sel: AMD CDNA4 ISA guide, "MFMA block-scaled"; the wrapped rocdl operation has its own tests.
  v_cvt_off_f32_i4: AMD CDNA3 ISA guide, table of its sixteen results. v_cvt_pk_bf16_f32: low half first, nearest even.
The texts of the first test are those that public FlyDSL kernels write.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from machine import PROLOGUE, arch, itemwise, launch, load_item, lower, store_item, wave

from fourwave.sim.lowering import UnknownOperation

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

N = 64


def asm(text: str, constraints: str, operands: str = "", types: str = "", result: str = "i32", name: str = "%r") -> str:
    text = text.replace("\n", "\\0A").replace("\t", "\\09")
    head = f"{name} = " if result else ""
    return (
        f'{head}llvm.inline_asm has_side_effects asm_dialect = att "{text}", "{constraints}" {operands} : ({types}) -> '
        + (result or "()")
    )


def words(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, N, dtype=np.uint32)


def floats(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(N) * 2.0 ** rng.integers(-8, 8, N)).astype(np.float32)


def item(
    text: str, constraints: str, *inputs: np.ndarray, t: str = "i32", result: str = "i32", arch: str | None = None
) -> np.ndarray:
    names = ", ".join(["%a", "%b", "%c"][: len(inputs)])
    body = "\n  " + asm(text, constraints, names, ", ".join([t] * len(inputs)), result)
    return itemwise(body, [(t, v) for v in inputs], result, arch=arch)


A, B, C = words(1), words(2), words(3)
FIVE = np.uint32(31)
INTEGER = {
    "v_add_u32": A + B, "v_sub_u32": A - B, "s_add_u32": A + B, "s_sub_u32": A - B, "v_mul_lo_u32": A * B, "s_mul_i32": A * B,
    "s_add_i32": A + B, "v_and_b32": A & B, "v_or_b32": A | B, "v_xor_b32": A ^ B, "s_and_b32": A & B, "s_or_b32": A | B, "s_xor_b32": A ^ B,
    "v_max_u32": np.maximum(A, B), "v_min_u32": np.minimum(A, B),
    "v_max_i32": np.maximum(A.view(np.int32), B.view(np.int32)).view(np.uint32),
    "v_min_i32": np.minimum(A.view(np.int32), B.view(np.int32)).view(np.uint32),
    "v_lshlrev_b32": B << (A & FIVE), "v_lshrrev_b32": B >> (A & FIVE), "v_ashrrev_i32": (B.view(np.int32) >> (A & FIVE).view(np.int32)).view(np.uint32),
    "s_lshl_b32": A << (B & FIVE), "s_lshr_b32": A >> (B & FIVE), "s_ashr_i32": (A.view(np.int32) >> (B & FIVE).view(np.int32)).view(np.uint32),
}  # fmt: skip


@pytest.mark.parametrize("mnemonic", INTEGER)
def test_integer_instructions(mnemonic: str) -> None:
    np.testing.assert_array_equal(item(f"{mnemonic} $0, $1, $2", "=v,v,v", A, B), INTEGER[mnemonic])


@pytest.mark.parametrize("suffix", ["", "_e32", "_e64"])
def test_an_encoding_suffix_changes_nothing(suffix: str) -> None:
    np.testing.assert_array_equal(item(f"v_add_u32{suffix} $0, $1, $2", "=v,v,v", A, B), A + B)


FA, FB, FC = floats(4), floats(5), floats(6)
FLOAT = {
    "v_add_f32": FA + FB, "v_sub_f32": FA - FB, "v_mul_f32": FA * FB, "v_max_f32": np.fmax(FA, FB), "v_min_f32": np.fmin(FA, FB),
}  # fmt: skip


@pytest.mark.parametrize("mnemonic", FLOAT)
def test_float_instructions(mnemonic: str) -> None:
    got = item(f"{mnemonic} $0, $1, $2", "=v,v,v", FA.view(np.uint32), FB.view(np.uint32), t="f32", result="f32")
    np.testing.assert_array_equal(got.view(np.float32), FLOAT[mnemonic])


def test_fma() -> None:
    bits = [x.view(np.uint32) for x in (FA, FB, FC)]
    got = item("v_fma_f32 $0, $1, $2, $3", "=v,v,v,v", *bits, t="f32", result="f32").view(np.float32)
    want = (FA.astype(np.float64) * FB + FC).astype(np.float32)  # the product is exact in double
    assert np.all(np.abs(got - want) <= np.spacing(np.abs(want)))


@pytest.mark.parametrize(
    ("mnemonic", "f"),
    [("v_exp_f32", np.exp2), ("v_log_f32", np.log2), ("v_rcp_f32", lambda x: 1 / x), ("v_rsq_f32", lambda x: x**-0.5), ("v_sqrt_f32", np.sqrt), ("v_floor_f32", np.floor)],
)  # fmt: skip
def test_float_functions(mnemonic: str, f) -> None:
    """Within one unit of the last place, as the guide states for the machine."""
    x = np.minimum(np.abs(FA), 100).astype(np.float32)
    got = item(f"{mnemonic} $0, $1", "=v,v", x.view(np.uint32), t="f32", result="f32").view(np.float32)
    want = f(x.astype(np.float64)).astype(np.float32)
    assert np.all(np.abs(got.astype(np.float64) - want) <= np.spacing(np.abs(want)))


def test_perm_and_align() -> None:
    select = np.tile(np.array([0x03020100, 0x07060504, 0x00040105, 0x0C0C0C07], np.uint32), 16)
    both = (A.astype(np.uint64) << np.uint64(32)) | B
    want = np.zeros(N, np.uint32)
    for i in range(4):
        s = select >> np.uint32(8 * i) & np.uint32(255)
        byte = (both >> (8 * np.minimum(s, 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        want |= np.where(s == 12, 0, byte).astype(np.uint32) << np.uint32(8 * i)
    np.testing.assert_array_equal(item("v_perm_b32 $0, $1, $2, $3", "=v,v,v,v", A, B, select), want)
    shift = (C & np.uint32(31)).astype(np.uint64)
    np.testing.assert_array_equal(
        item("v_alignbit_b32 $0, $1, $2, $3", "=v,v,v,v", A, B, C), (both >> shift).astype(np.uint32)
    )
    shift = (C & np.uint32(3)).astype(np.uint64) * np.uint64(8)
    np.testing.assert_array_equal(
        item("v_alignbyte_b32 $0, $1, $2, $3", "=v,v,v,v", A, B, C), (both >> shift).astype(np.uint32)
    )


@pytest.mark.archs("gfx950", "gfx1250")
def test_cvt_pk_bf16_f32() -> None:
    def bf16(x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)

    got = item("v_cvt_pk_bf16_f32 $0, $1, $2", "=v,v,v", FA.view(np.uint32), FB.view(np.uint32), t="f32")
    np.testing.assert_array_equal(got, bf16(FA) | bf16(FB) << np.uint32(16))


OFFSETS = [
    0,
    1 / 16,
    2 / 16,
    3 / 16,
    4 / 16,
    5 / 16,
    6 / 16,
    7 / 16,
    -8 / 16,
    -7 / 16,
    -6 / 16,
    -5 / 16,
    -4 / 16,
    -3 / 16,
    -2 / 16,
    -1 / 16,
]


@pytest.mark.parametrize("byte", [None, 0, 1, 2, 3])
def test_cvt_off_f32_i4(byte: int | None) -> None:
    x = A.copy()
    x[:16] = np.arange(16) * 0x01010101
    text = "v_cvt_off_f32_i4 $0, $1"
    if byte is not None:
        text = f"v_cvt_off_f32_i4_sdwa $0, $1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_{byte}"
    nibble = x >> np.uint32(8 * (byte or 0)) & np.uint32(15)
    if byte is not None and arch() == "gfx1250":  # no SDWA encodings
        with pytest.raises(UnknownOperation, match="gfx1250 does not have it"):
            item(text, "=v,v", x, result="f32")
        return
    got = item(text, "=v,v", x, result="f32").view(np.float32)
    np.testing.assert_array_equal(got, np.array(OFFSETS, np.float32)[nibble])


PACKED = {  # the product of two halves of float32 is exact in double, so the sum's one rounding is near enough the last
    "v_pk_mul_f32": lambda x, y, z: x * y,
    "v_pk_add_f32": lambda x, y, z: x + y,
    "v_pk_fma_f32": lambda x, y, z: x.astype(np.float64) * y + z,
}


@pytest.mark.parametrize("mnemonic", PACKED)
def test_packed_f32(mnemonic: str) -> None:
    x, y, z = (
        (np.random.default_rng(s).integers(-64, 65, (N, 2)) / 8).astype(np.float32) for s in (7, 8, 9)
    )  # every result is exact
    count = 3 if "fma" in mnemonic else 2
    v = "vector<2xf32>"
    text = f"{mnemonic} " + ", ".join(f"${i}" for i in range(count + 1))
    body = "\n  " + asm(text, "=v" + ",v" * count, ", ".join(["%a", "%b", "%c"][:count]), ", ".join([v] * count), v)
    got = itemwise(body, [(v, x.view(np.uint32)) for x in (x, y, z)[:count]], v, width=2)
    np.testing.assert_array_equal(got.view(np.float32), PACKED[mnemonic](x, y, z).astype(np.float32))


# -- grammar ---------------------------------------------------------------------------------------------------------------------


def test_lines_run_in_order_and_read_what_earlier_ones_wrote() -> None:
    text = "v_add_u32 $0, $1, $2 ; a comment\n\tv_add_u32 ${0}, $0, 0x10 // another\n\n  v_add_u32 $0, -1, $0"
    np.testing.assert_array_equal(item(text, "=&v,v,v", A, B), A + B + np.uint32(15))


def test_a_tied_operand_starts_as_its_input() -> None:
    np.testing.assert_array_equal(item("v_add_u32 $0, $0, $1", "=v,v,0", A, B), A + B)
    np.testing.assert_array_equal(item("v_mov_b32 $0, $2", "=v,v,0", A, B), B)
    np.testing.assert_array_equal(item("", "=v,0", A), A)  # an empty block pins a value to a register


def test_several_outputs() -> None:
    body = (
        "\n  "
        + asm(
            "v_mov_b32 $0, $3\nv_mov_b32 $1, $2",
            "=v,=v,v,v,~{memory}",
            "%a, %b",
            "i32, i32",
            "!llvm.struct<(i32, i32)>",
            "%p",
        )
        + "\n  %x = llvm.extractvalue %p[0] : !llvm.struct<(i32, i32)>\n  %y = llvm.extractvalue %p[1] : !llvm.struct<(i32, i32)>"
        + "\n  %r = llvm.sub %x, %y : i32"
    )
    np.testing.assert_array_equal(itemwise(body, [("i32", A), ("i32", B)], "i32"), B - A)


@pytest.mark.parametrize("move", ["v_mov_b32", "s_mov_b32"])
def test_moves(move: str) -> None:
    np.testing.assert_array_equal(item(f"{move} $0, $1", "=v,v", A), A)


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("move", ["v_accvgpr_write_b32", "v_accvgpr_read_b32", "v_accvgpr_mov_b32"])
def test_accumulation_registers(move: str) -> None:
    np.testing.assert_array_equal(item(f"{move} $0, $1", "=a,v", A), A)


def test_readfirstlane() -> None:
    want = np.repeat(A[:: wave()], wave())
    np.testing.assert_array_equal(item("v_readfirstlane_b32 $0, $1", "=s,v", A), want)


def test_hints_do_nothing() -> None:
    text = "s_nop 7\ns_setprio 1\nv_mov_b32 $0, $1\ns_sleep 1\ns_sethalt 0\ns_ttracedata\ns_icache_inv\ns_dcache_inv"
    if arch() != "gfx1250":
        text += "\nbuffer_inv sc1\nbuffer_wbl2 sc0 sc1\ns_dcache_wb"
    np.testing.assert_array_equal(item(text, "=v,v", A), A)


BAD = [
    ("v_frobnicate $0, $1", "=v,v", "instruction `v_frobnicate"),
    ("v_mov_b32 $0, v7", "=v,v", "operand v7"),
    ("v_mov_b32 $0, $2", "=v,v", "operand \\$2"),
    ("v_mov_b32 $1, $1", "=v,v", "a result in \\$1"),
    ("v_mov_b32 $0, $1 clamp", "=v,v", "modifier clamp"),
    ("v_add_u32 $0, $1", "=v,v", "2 operands"),
    ("v_mov_b32 $0, $1", "=v,r", "constraint 'r'"),
    ("v_mov_b32 $0, $1", "=v,{v3}", "constraint"),
    ("v_mul_f32 $0, $1, 2", "=v,v", "literal"),
    ("s_waitcnt depctr(3)", "=v,v", "counters"),
    ("s_cmp_eq_u32 $1, 0\ns_cbranch_scc0 1f\nv_mov_b32 $0, $1\n1:", "=v,v", "a branch in a block with results"),
    ("1:", "=v,v", "label `1:`"),
    ("global_load_dword $0, $1, s2", "=v,v", "scalar base"),
    ("ds_read_b64_tr_b16 $0, $1 gds", "=v,v", "modifier gds"),
]


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize(("text", "constraints", "match"), BAD, ids=[b[0] for b in BAD])
def test_what_is_not_known_raises_with_its_line(text: str, constraints: str, match: str) -> None:
    with pytest.raises(UnknownOperation, match=match) as error:
        item(text, constraints, A)
    assert "kernel.py" in str(error.value) or "unknown" in str(error.value) or ":" in str(error.value)


def test_compare_and_cndmask_as_a_public_attention_kernel_masks() -> None:
    """Two compares into scalar masks, two selects by them, on values tied to the outputs."""
    x = (A % np.uint32(200)).view(np.int32) - 100
    mask = "i64" if wave() == 64 else "i32"
    text = "v_cmp_lt_i32_e64 $0, $6, 7\n\tv_cmp_ge_u32_e64 $1, $6, 9\n\tv_cndmask_b32_e64 $2, $4, $7, $0\n\tv_cndmask_b32_e64 $3, $5, $7, $1"
    struct = f"!llvm.struct<({mask}, {mask}, i32, i32)>"
    body = (
        "\n  %z = llvm.mlir.constant(-1 : i32) : i32\n  "
        + asm(text, "=s,=s,=v,=v,2,3,v,v,~{vcc}", "%a, %b, %c, %z", "i32, i32, i32, i32", struct, "%p")
        + f"\n  %q = llvm.extractvalue %p[2] : {struct}\n  %w = llvm.extractvalue %p[3] : {struct}\n  %r = llvm.xor %q, %w : i32"
    )
    got = itemwise(body, [("i32", A), ("i32", B), ("i32", x.view(np.uint32))], "i32")
    all_ones = np.uint32(0xFFFFFFFF)
    np.testing.assert_array_equal(got, np.where(x < 7, all_ones, A) ^ np.where(x.view(np.uint32) >= 9, all_ones, B))


COMPARE = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@pytest.mark.parametrize("t", ["i", "u"])
@pytest.mark.parametrize("name", COMPARE)
def test_vector_comparisons(name: str, t: str) -> None:
    """A bit a lane, in two scalar registers, or one where a wave has 32 lanes."""
    mask = "i64" if wave() == 64 else "i32"
    x, y = A.copy(), B.copy()
    x[::3] = y[::3]
    body = "\n  " + asm(f"v_cmp_{name}_{t}32 $0, $1, $2", "=s,v,v", "%a, %b", "i32, i32", mask)
    got = itemwise(body, [("i32", x), ("i32", y)], mask)
    cast = np.int32 if t == "i" else np.uint32
    on = COMPARE[name](x.view(cast), y.view(cast)).reshape(-1, wave())
    want = [sum(1 << lane for lane, bit in enumerate(row) if bit) for row in on]
    np.testing.assert_array_equal(got, np.repeat(np.array(want, got.dtype), wave()))


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("branch", ["s_cbranch_scc0", "s_cbranch_scc1"])
@pytest.mark.parametrize("compare", ["s_cmp_eq_u32", "s_cmp_lg_u32", "s_cmp_eq_i32", "s_cmp_lg_i32"])
def test_scalar_comparisons_and_branches(compare: str, branch: str) -> None:
    """SCC is the comparison's result; scc0 branches where it is 0 (CDNA3 ISA guide, SOPC and SOPP). What a taken branch jumps over is a store."""
    text = f"{compare} $0, $1\n\t{branch} 1f\n\tglobal_store_dword $2, $3, off\n\t1:"
    body = (
        PROLOGUE
        + "\n  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32\n  "
        + asm(text, "s,s,v,v", "%a, %b, %to, %b", "i32, i32, !llvm.ptr<1>, i32", "")
    )
    program = lower(body, "%a: i32, %b: i32, %out: !llvm.ptr<1>")
    for a, b in ((7, 7), (7, 8), (0x80000007, 7)):
        out = np.zeros(N, np.uint32)
        launch(program, a, b, out)
        scc = (a == b) == ("_eq_" in compare)
        np.testing.assert_array_equal(out, 0 if scc == branch.endswith("1") else b)


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("taken", [False, True])
def test_a_barrier_jumped_over(taken: bool) -> None:
    """As a public attention kernel writes it: `s_cbranch_scc0 1f` past `s_barrier`. With one wave group only, the barrier is counted."""
    text = "s_cmp_eq_u32 $0, 0\n\ts_cbranch_scc0 1f\n\ts_barrier\n\t1:"
    body = (
        PROLOGUE
        + "\n  "
        + asm(text, "s", "%a", "i32", "")
        + "\n  %r = llvm.add %tid, %a : i32"
        + store_item("%r", "i32", "%out")
    )
    out = np.zeros(N, np.uint32)
    report = launch(lower(body, "%a: i32, %out: !llvm.ptr<1>"), 0 if taken else 5, out)
    np.testing.assert_array_equal(out, np.arange(N) + (0 if taken else 5))
    assert report.launches[0].counters["barriers"] == int(taken)


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize(("bits", "name"), [(16, "tr16.b64"), (8, "tr8.b64")])
def test_transposing_reads_are_the_operations(bits: int, name: str) -> None:
    """The text with an offset and a wait, against the rocdl operation at the moved address."""
    source = np.random.default_rng(14).integers(0, 1 << 32, (N, 2), dtype=np.uint32)
    start = """
  %eight = llvm.mlir.constant(8 : i32) : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %at = llvm.mul %tid, %eight : i32
  %slot = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %moved = llvm.getelementptr %slot[16] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i8
  llvm.store %x, %moved : vector<2xi32>, !llvm.ptr<3>
  %address = llvm.ptrtoint %slot : !llvm.ptr<3> to i32
"""
    plain = f"%r = rocdl.ds.read.{name} %moved : !llvm.ptr<3> -> vector<2xi32>"
    if bits == 16:
        plain = "%h = rocdl.ds.read.tr16.b64 %moved : !llvm.ptr<3> -> vector<4xf16>\n  %r = llvm.bitcast %h : vector<4xf16> to vector<2xi32>"
    text = asm(
        f"ds_read_b64_tr_b{bits} $0, $1 offset:16\ns_waitcnt lgkmcnt(0)", "=v,v", "%address", "i32", "vector<2xi32>"
    )
    results = []
    for read in (plain, text):
        body = (
            PROLOGUE
            + load_item("%x", "vector<2xi32>", "%in")
            + start
            + "  "
            + read
            + store_item("%r", "vector<2xi32>", "%out")
        )
        out = np.zeros((N, 2), np.uint32)
        launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>", lds=1024), source, out)
        results.append(out)
    np.testing.assert_array_equal(results[0], results[1])
    assert results[0].any()


# -- memory and order ------------------------------------------------------------------------------------------------------------

RESOURCE = """
  %stride = llvm.mlir.constant(0 : i16) : i16
  %flags = llvm.mlir.constant(0 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %four = llvm.mlir.constant(4 : i32) : i32
  %sixteen = llvm.mlir.constant(16 : i32) : i32
  %records64 = llvm.zext %records : i32 to i64
  %rsrc = rocdl.make.buffer.rsrc %mem, %stride, %records64, %flags : !llvm.ptr<1> to <8>
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
"""


def copies(
    blocks: list[str], wait: str, size: int = 16, arch: str = "gfx950", lds: int = 4096, expect: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Run blocks that copy to LDS, then `wait` as another block; returns (source, the LDS's dwords)."""
    source = np.random.default_rng(11).integers(0, 1 << 32, 4096, dtype=np.uint32)
    body = (
        PROLOGUE
        + RESOURCE
        + "\n  %bytes = llvm.mlir.constant("
        + str(size)
        + " : i32) : i32\n  %v = llvm.mul %tid, %bytes : i32\n"
    )
    body += "\n".join(blocks) + "\n  " + asm(wait, "", result="")
    for i in range(lds // 256):
        body += f"""
  %p{i} = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %q{i} = llvm.getelementptr %p{i}[{64 * i}] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i32
  %w{i} = llvm.load %q{i} : !llvm.ptr<3> -> i32
  %o{i} = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %t{i} = llvm.getelementptr %o{i}[{64 * i}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32
  llvm.store %w{i}, %t{i} : i32, !llvm.ptr<1>"""
    out = np.zeros(lds // 4, np.uint32)
    program = lower(body, "%mem: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32", lds=lds, arch=arch)
    report = launch(program, source, out, source.nbytes, expect=None)
    kinds = {f.kind for f in report.findings} - (
        {"init"} if lds > 1024 else set()
    )  # parts of a larger LDS stay unwritten
    assert kinds == ({expect} if expect else set()), str(report)
    return source, out


FIRST = "  " + asm(
    "s_mov_b32 m0, $0\nbuffer_load_dwordx4 $1, $2, $3 offen lds",
    "s,v,s,s",
    "%zero, %v, %rsrc, %zero",
    "i32, i32, !llvm.ptr<8>, i32",
    "",
)
NEXT = "  " + asm(
    "s_add_u32 m0, 1024, m0\nbuffer_load_dwordx4 $0, $1, $2 offen offset:{} lds",
    "v,s,s",
    "%v, %rsrc, %sixteen",
    "i32, !llvm.ptr<8>, i32",
    "",
)


@pytest.mark.archs("gfx950")
def test_m0_lives_on_between_blocks() -> None:
    """As public kernels copy: m0 set, then stepped, each copy behind the last. Offsets move source and LDS alike, soffset the source only."""
    blocks = [FIRST, NEXT.format(0), NEXT.format(64)]
    source, out = copies(blocks, "s_waitcnt vmcnt(0)", lds=4096)
    np.testing.assert_array_equal(out[:256], source[:256])
    np.testing.assert_array_equal(out[256:512], source[4:260])
    np.testing.assert_array_equal(out[512 + 16 : 768 + 16], source[4 + 16 : 260 + 16])


@pytest.mark.archs("gfx950")
def test_m0_lives_on_around_a_loop() -> None:
    blocks = [
        "  " + asm("s_mov_b32 m0, $0", "s", "%zero", "i32", ""),
        "  llvm.br ^loop(%zero : i32)\n^loop(%i : i32):",
        "  "
        + asm(
            "buffer_load_dword $0, $1, 0 offen lds\ns_add_u32 m0, m0, 256", "v,s", "%v, %rsrc", "i32, !llvm.ptr<8>", ""
        ),
        "  %n = llvm.add %i, %four : i32",
        '  %more = llvm.icmp "ult" %n, %sixteen : i32',
        "  llvm.cond_br %more, ^loop(%n : i32), ^done\n^done:",
    ]
    source, out = copies(blocks, "s_waitcnt vmcnt(0)", size=4, arch="gfx942", lds=1024)
    np.testing.assert_array_equal(out, np.tile(source[:64], 4))


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize(
    ("wait", "kind"),
    [("s_waitcnt vmcnt(0)", ""), ("s_waitcnt vmcnt(0) lgkmcnt(0)", ""), ("s_waitcnt vmcnt(0) & lgkmcnt(3)", ""), ("s_waitcnt 0x0f70", ""),
     ("s_waitcnt vmcnt(1)", "wait"), ("s_waitcnt lgkmcnt(0)", "wait"), ("s_waitcnt 0xc07f", "wait"), ("s_nop 0", "wait")],
)  # fmt: skip
def test_waits_in_text(wait: str, kind: str) -> None:
    """0x0f70 is vmcnt(0) alone, 0xc07f lgkmcnt(0) alone (CDNA3 ISA guide, S_WAITCNT's fields)."""
    source, out = copies([FIRST], wait, lds=1024, expect=kind)
    if not kind:
        np.testing.assert_array_equal(out, source[:256])


@pytest.mark.archs("gfx950")
def test_copies_of_gfx942_are_of_one_dword() -> None:
    with pytest.raises(UnknownOperation, match="16 bytes a lane on gfx942"):
        copies([FIRST], "s_waitcnt vmcnt(0)", arch="gfx942")


@pytest.mark.archs("gfx942", "gfx950")
def test_a_barrier_in_text_is_one() -> None:
    """Wave 1 reads what wave 0 stored, behind `s_waitcnt lgkmcnt(0)` and `s_barrier` in one block."""
    body = (
        PROLOGUE
        + """
  %c128 = llvm.mlir.constant(127 : i32) : i32
  %mirror = llvm.sub %c128, %tid : i32
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %mine = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %other = llvm.getelementptr %lds[%mirror] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %address = llvm.ptrtoint %mine : !llvm.ptr<3> to i32
  """
        + asm("ds_write_b32 $0, $1", "v,v", "%address, %tid", "i32, i32", "")
        + "\n  "
        + asm("s_waitcnt lgkmcnt(0)\n\ts_barrier", "", result="")
        + "\n  %r = llvm.load %other : !llvm.ptr<3> -> i32"
        + "\n  %to = llvm.getelementptr %out[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32\n  llvm.store %r, %to : i32, !llvm.ptr<1>"
    )
    out = np.zeros(128, np.uint32)
    launch(lower(body, "%out: !llvm.ptr<1>", lds=512), out, block=128)
    np.testing.assert_array_equal(out, 127 - np.arange(128))
    report = launch(
        lower(body.replace("s_barrier", "s_nop 0"), "%out: !llvm.ptr<1>", lds=512), out, block=128, expect=None
    )
    assert "race" in {f.kind for f in report.findings}


LOADS = {  # mnemonic: operands behind the result; the wait that covers it; one that does not
    "global_load_dword": ("$1, off offset:4", "s_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)"),
    "buffer_load_dword": ("$2, $3, 0 offen offset:4", "s_waitcnt vmcnt(0)", "s_waitcnt vmcnt(1)"),
    "ds_read_b32": ("$4 offset:4", "s_waitcnt lgkmcnt(0)", "s_waitcnt vmcnt(0)"),
}


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("where", ["same block", "block of its own", "too weak", "none", "after the use"])
@pytest.mark.parametrize("load", LOADS)
def test_a_load_into_registers_needs_the_kernels_own_wait(load: str, where: str) -> None:
    """The value is there in any case; what is checked is that a wait stands between the load and the first use."""
    operands, good, bad = LOADS[load]
    source = np.random.default_rng(13).integers(0, 1 << 32, N + 1, dtype=np.uint32)
    text = f"{load} $0, {operands}" + (f"\n{good}" if where == "same block" else "")
    wait = {"block of its own": good, "too weak": bad}.get(where)
    body = (
        PROLOGUE
        + RESOURCE
        + """
  %v = llvm.mul %tid, %four : i32
  %from = llvm.getelementptr %mem[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  %slot = llvm.getelementptr %lds[%tid] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i32
  %next = llvm.getelementptr %slot[1] : (!llvm.ptr<3>) -> !llvm.ptr<3>, i32
  %fill = llvm.getelementptr %from[1] : (!llvm.ptr<1>) -> !llvm.ptr<1>, i32
  %x = llvm.load %fill : !llvm.ptr<1> -> i32
  llvm.store %x, %next : i32, !llvm.ptr<3>
  %at = llvm.ptrtoint %slot : !llvm.ptr<3> to i32
  """
        + asm(text, "=v,v,v,s,v", "%from, %v, %rsrc, %at", "!llvm.ptr<1>, i32, !llvm.ptr<8>, i32", name="%got")
        + ("\n  " + asm(wait, "", result="") if wait else "")
        + "\n  %r = llvm.add %got, %four : i32"
        + ("\n  " + asm(good, "", result="") if where == "after the use" else "")
        + store_item("%r", "i32", "%out")
    )
    out = np.zeros(N, np.uint32)
    program = lower(body, "%mem: !llvm.ptr<1>, %out: !llvm.ptr<1>, %records: i32", lds=512)
    covered = where in ("same block", "block of its own")
    report = launch(program, source, out, source.nbytes, expect="" if covered else "wait")
    np.testing.assert_array_equal(out, source[1:] + np.uint32(4))
    if not covered:
        assert "inline assembly" in report.findings[0].message


STORES = {"dword": 1, "dwordx2": 2, "dwordx3": 3, "dwordx4": 4}


@pytest.mark.archs("gfx942", "gfx950")
@pytest.mark.parametrize("size", STORES)
def test_global_stores(size: str) -> None:
    n = STORES[size]
    values = np.random.default_rng(12).integers(0, 1 << 32, (N, n), dtype=np.uint32)
    t = "i32" if n == 1 else f"vector<{n}xi32>"
    stride = 16
    body = PROLOGUE + f"""
  %c = llvm.mlir.constant({stride} : i32) : i32
  %byte = llvm.mul %tid, %c : i32
  %from = llvm.getelementptr %in[%byte] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %x = llvm.load %from : !llvm.ptr<1> -> {t}
  %to = llvm.getelementptr %out[%byte] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  """ + asm(f"global_store_{size} $0, $1, off offset:16 sc0 sc1", "v,v", "%to, %x", f"!llvm.ptr<1>, {t}", "")  # fmt: skip
    padded = np.zeros((N, 4), np.uint32)
    padded[:, :n] = values
    out = np.zeros((N + 1, 4), np.uint32)
    launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), padded, out)
    np.testing.assert_array_equal(out[1:, :n], values)
    assert not out[0].any() and not out[:, n:].any()


@pytest.mark.archs("gfx942", "gfx950")
def test_buffer_store_drops_what_is_out_of_range() -> None:
    body = (
        PROLOGUE
        + RESOURCE
        + load_item("%x", "i32", "%in")
        + "\n  %v = llvm.mul %tid, %four : i32\n  "
        + asm("buffer_store_dword $0, $1, $2, 0 offen", "v,v,s", "%x, %v, %rsrc", "i32, i32, !llvm.ptr<8>", "")
    )
    out = np.zeros(N, np.uint32)
    launch(lower(body, "%in: !llvm.ptr<1>, %mem: !llvm.ptr<1>, %records: i32", lds=64), A, out, 4 * 40)
    np.testing.assert_array_equal(out, np.where(np.arange(N) < 40, A, 0))


# -- the matrix unit -------------------------------------------------------------------------------------------------------------


def matrix(call: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, sa: np.ndarray, sb: np.ndarray) -> np.ndarray:
    """Run `call`, which defines %d from the vectors %a, %b, %c and the scales %sa, %sb; one wave."""
    types = {
        "a": f"vector<{a.shape[1]}xi32>",
        "b": f"vector<{b.shape[1]}xi32>",
        "c": "vector<4xf32>",
        "sa": "i32",
        "sb": "i32",
    }
    body = (
        PROLOGUE
        + "".join(load_item(f"%{n}", t, f"%{n}in") for n, t in types.items())
        + "\n  "
        + call
        + store_item("%d", "vector<4xf32>", "%out")
    )
    out = np.zeros((N, 4), np.uint32)
    program = lower(body, ", ".join(f"%{n}in: !llvm.ptr<1>" for n in types) + ", %out: !llvm.ptr<1>")
    launch(program, a, b, c, sa, sb, out)
    return out


def operands(width: int, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    codes = [rng.integers(0, 256, (N, 4 * width), dtype=np.uint8) & 0xF7 for _ in range(2)]  # no NaN code of fp8
    scales = [rng.integers(120, 134, (N, 4), dtype=np.uint8).view(np.uint32)[:, 0].copy() for _ in range(2)]
    c = rng.standard_normal((N, 4)).astype(np.float32).view(np.uint32)
    return codes[0].view(np.uint32), codes[1].view(np.uint32), c, *scales


def rocdl(width: int, fmt: int, opsel_a: int, opsel_b: int, c: str = "%c", scales: str = "%sa, %sb") -> str:
    name = f"#rocdl<matrix_format {'fp4_e2m1' if fmt == 4 else 'fp8_e4m3'}>"
    attributes = f"cbsz = {name}, blgp = {name}, opselA = {opsel_a} : i32, opselB = {opsel_b} : i32"
    v = f"vector<{width}xi32>"
    return f'%d = "rocdl.mfma.scale.f32.16x16x128.f8f6f4"(%a, %b, {c}, {scales}) <{{{attributes}}}> : ({v}, {v}, vector<4xf32>, i32, i32) -> vector<4xf32>'


@pytest.mark.archs("gfx950")
def test_the_unscaled_f8f6f4_text_is_the_operation_with_literal_scales() -> None:
    """As in a public four-wave FP8 kernel: the accumulator in AGPRs, tied."""
    given = operands(8, 1)
    text = asm(
        "v_mfma_f32_16x16x128_f8f6f4 $0, $1, $2, $0",
        "=a,v,v,0",
        "%a, %b, %c",
        "vector<8xi32>, vector<8xi32>, vector<4xf32>",
        "vector<4xf32>",
        "%d",
    )
    literal = "%l0 = llvm.mlir.constant(0 : i32) : i32\n  " + rocdl(8, 0, 0, 0, scales="%l0, %l0")
    got = matrix(text, *given)
    np.testing.assert_array_equal(got, matrix(literal, *given))
    assert np.isfinite(got.view(np.float32)).all() and np.abs(got.view(np.float32)).max() > 1


@pytest.mark.archs("gfx950")
@pytest.mark.parametrize(
    ("low_a", "high_a", "low_b", "high_b"), [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 0, 0)]
)
@pytest.mark.parametrize("zero", [False, True])
def test_the_scaled_text_selects_its_scale_bytes(low_a: int, high_a: int, low_b: int, high_b: int, zero: bool) -> None:
    """As in a public four-wave FP4 kernel: op_sel is the low bit of the byte's number, op_sel_hi the high one; the addend tied or 0."""
    given = operands(4, 2)
    select = f"op_sel:[{low_a},{low_b},0] op_sel_hi:[{high_a},{high_b},0] cbsz:4 blgp:4"
    v, f = "vector<4xi32>", "vector<4xf32>"
    if zero:
        text = asm(
            f"v_mfma_scale_f32_16x16x128_f8f6f4 $0, $1, $2, 0, $3, $4 {select}",
            "=a,v,v,v,v",
            "%a, %b, %sa, %sb",
            f"{v}, {v}, i32, i32",
            f,
            "%d",
        )
    else:
        text = asm(
            f"v_mfma_scale_f32_16x16x128_f8f6f4 $0, $1, $2, $0, $3, $4 {select}",
            "=a,v,v,v,v,0",
            "%a, %b, %sa, %sb, %c",
            f"{v}, {v}, i32, i32, {f}",
            f,
            "%d",
        )
    plain = rocdl(4, 4, low_a | high_a << 1, low_b | high_b << 1, "%z" if zero else "%c")
    if zero:
        plain = "%z = llvm.mlir.zero : vector<4xf32>\n  " + plain
    np.testing.assert_array_equal(matrix(text, *given), matrix(plain, *given))


@pytest.mark.archs("gfx950")
def test_the_format_must_fit_the_registers() -> None:
    with pytest.raises(UnknownOperation, match="format 0 in 4 dwords"):
        v, f = "vector<4xi32>", "vector<4xf32>"
        matrix(
            asm("v_mfma_f32_16x16x128_f8f6f4 $0, $1, $2, $0", "=a,v,v,0", "%a, %b, %c", f"{v}, {v}, {f}", f, "%d"),
            *operands(4, 3),
        )
