"""What the compiler makes of the GEMM kernels: no spills, and the main loop as it is designed.

Needs FlyDSL; the assembly needs no linker, code objects do.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections import Counter

import pytest
import torch
from launches import scale_reads

from fourwave.blocks.flydsl.tiles import LDS_BYTES
from fourwave.ops.gemm import config
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates, candidates_for, geometry, in_halves, lds_bytes
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.perf import isa

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")

LAYOUTS = ("TN", "NN", "NT")
# The largest tile of each layout and target: where registers are tight. All but TIGHTEST are slow tests.
QUICK = [(arch, layout, 0) for arch in ARCHS for layout in LAYOUTS]
REST = [(arch, layout, i) for arch in ARCHS for layout in LAYOUTS for i in range(1, 5)]
TIGHTEST = [("gfx950", "TN", 0), ("gfx942", "TN", 0)]
ALL = [pytest.param(*case, marks=() if case in TIGHTEST else pytest.mark.slow) for case in QUICK] + [
    pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for case in REST
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@functools.cache
def compiled(
    arch,
    layout,
    index,
    dtype=BF16,
    out_dtype=BF16,
    bias_dtype=None,
    activation=None,
    accumulate=False,
    vectorised=True,
    scaling=None,
):
    a, b = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    a_scaling, b_scaling = scaling if isinstance(scaling, tuple) else (scaling, scaling)
    problem = GemmProblem(
        4096, 4096, 4096, layout, a, b, out_dtype, bias_dtype, activation, accumulate,
        a_scaling=a_scaling, b_scaling=b_scaling,
    )  # fmt: skip
    return isa.compile_isa(problem, candidates_for(problem, arch)[index], arch, vectorised=vectorised)


@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_no_spills(arch, layout, index):
    kernel = compiled(arch, layout, index)
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgpr <= 512
    assert kernel.lds_bytes == lds_bytes(candidates(arch)[index], layout, 2, arch) <= LDS_BYTES[arch]


@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_main_loop_is_as_designed(arch, layout, index):
    config = candidates(arch)[index]
    geo = geometry(config, layout, 2, arch)
    loop = compiled(arch, layout, index).main_loop
    tiles = geo.tiles_per_step
    slices = tiles * geo.num_slices

    assert loop.k == tiles * config.tile_k
    # 16 x 16 x 32 on gfx950; gfx942 needs two instructions for as much.
    assert loop.mfma == slices * geo.frags_m * geo.frags_n * (1 if arch == "gfx950" else 2)
    assert loop.barriers == tiles
    assert loop.stores == 0

    bytes_read = sum(_read_bytes(op) * count for op, count in loop.lds_reads.items())
    assert bytes_read == slices * (geo.frags_m + geo.frags_n) * 16  # each fragment once, 16 bytes per lane
    transposing = sum(count for op, count in loop.lds_reads.items() if "_tr_" in op)
    if arch == "gfx950":
        fragments = (0 if geo.a.k_contiguous else geo.frags_m) + (0 if geo.b.k_contiguous else geo.frags_n)
        assert transposing == 2 * fragments * slices
        assert loop.loads_to_lds == tiles * geo.loads_per_tile
        assert (loop.loads, loop.lds_writes) == (0, {})
        # One counted wait for loads per tile, never a full drain.
        counted = [wait for wait in loop.waits if "vmcnt" in wait]
        expected = f"vmcnt({(geo.num_stages - 2) * geo.loads_per_tile})"
        assert len(counted) == tiles and all(expected in wait for wait in counted)
    else:
        assert set(loop.lds_reads) == {"ds_read_b128"}
        assert loop.loads == tiles * geo.loads_per_tile
        assert loop.loads_to_lds == 0
        assert loop.lds_writes == {"ds_write_b128": tiles * geo.loads_per_tile}


@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_float8(arch, layout, index):
    """No spills; 16-byte accesses, on gfx950 where K is contiguous; each operand names its own format."""
    config = candidates(arch, 1)[index]
    geo = geometry(config, layout, 1, arch)
    kernel = compiled(arch, layout, index, FLOAT8[arch])
    print(kernel)
    loop = kernel.main_loop
    halves = in_halves(config, 1, arch)
    tiles = 2 if halves else geo.tiles_per_step
    _check_spills(kernel)
    assert kernel.lds_bytes == lds_bytes(config, layout, 1, arch) <= LDS_BYTES[arch]
    assert loop.k == tiles * config.tile_k
    # Each fragment once. A step of K takes 64 bytes of a row for 16 bytes of each lane, whatever the instruction.
    slices = loop.k // 64
    assert sum(_read_bytes(op) * count for op, count in loop.lds_reads.items()) == slices * 16 * (
        geo.frags_m + geo.frags_n
    )
    operands = ((geo.frags_m, geo.a), (geo.frags_n, geo.b))
    contiguous = sum(f for f, tile in operands if tile.k_contiguous or arch == "gfx942")
    assert loop.lds_reads.get("ds_read_b128", 0) == slices * contiguous
    transposing = 2 * slices * (geo.frags_m + geo.frags_n - contiguous) if arch == "gfx950" else 0
    assert loop.lds_reads.get("ds_read_b64_tr_b8", 0) == transposing
    assert loop.mfma == geo.frags_m * geo.frags_n * loop.k // (128 if arch == "gfx950" else 32)
    assert (loop.stores, loop.barriers) == (0, tiles * (4 if halves else 1))
    if arch == "gfx950":
        assert (loop.loads_to_lds, loop.loads) == (tiles * geo.loads_per_tile, 0)
        # The instruction's first operand is b, e5m2 (1); a is e4m3 (0), which is not spelled.
        assert kernel.text.count("v_mfma_f32_16x16x128_f8f6f4") == kernel.text.count("cbsz:1") > 0
        assert "blgp" not in kernel.text and "v_mfma_scale" not in kernel.text
        # Counted waits, never a drain: all but the two oldest of eight half tiles, or all but the oldest tile.
        allowed = geo.loads_per_tile * 3 // 2 if halves else (geo.num_stages - 2) * geo.loads_per_tile
        counted = [wait for wait in loop.waits if "vmcnt" in wait]
        assert len(counted) == loop.barriers and all(f"vmcnt({allowed})" in wait for wait in counted)
    else:
        assert (loop.loads_to_lds, loop.loads) == (0, tiles * geo.loads_per_tile)
        assert "v_mfma_f32_16x16x32_bf8_fp8" in kernel.text


@pytest.mark.parametrize(
    ("layout", "index"), [pytest.param(*case[1:], marks=() if case in TIGHTEST else pytest.mark.slow if case in QUICK else (pytest.mark.slow, pytest.mark.exhaustive)) for case in QUICK + REST if case[0] == "gfx950"]
)  # fmt: skip
def test_block_scales(layout, index):
    """gfx950: scaled matrix instructions only; scales are read wide, and brought by loads that the waits count."""
    config = candidates("gfx950", 1)[index]
    geo = geometry(config, layout, 1, "gfx950", scales=True)
    kernel = compiled("gfx950", layout, index, FLOAT8["gfx950"], scaling="1x32")
    print(kernel)
    loop = kernel.main_loop
    halves = in_halves(config, 1, "gfx950")
    tiles = 2 if halves else geo.tiles_per_step
    _check_spills(kernel)
    assert kernel.lds_bytes == lds_bytes(config, layout, 1, "gfx950", True) <= LDS_BYTES["gfx950"]
    assert loop.k == tiles * config.tile_k
    fragments = geo.frags_m + geo.frags_n
    reads = Counter(loop.lds_reads) - Counter(scale_reads(geo, halves))
    assert set(loop.lds_reads) <= {"ds_read_b128", "ds_read_b64_tr_b8"}
    assert sum(_read_bytes(op) * count for op, count in reads.items()) == fragments * loop.k // 4
    assert loop.mfma == geo.frags_m * geo.frags_n * loop.k // 128
    assert kernel.text.count("v_mfma_scale_f32_16x16x128_f8f6f4") == kernel.text.count("v_mfma_") >= loop.mfma
    operand_loads = tiles * (geo.a.loads + geo.b.loads)
    assert (loop.loads, loop.loads_to_lds) == (0, operand_loads + (1 if halves else tiles * geo.scale_loads))
    counted = [wait for wait in loop.waits if "vmcnt" in wait]
    if halves:
        allowed = {"vmcnt(24)": 2, "vmcnt(25)": 6}
    else:
        allowed = {f"vmcnt({(geo.num_stages - 2) * geo.loads_per_tile})": tiles}
    assert {count: sum(count in wait for wait in counted) for count in allowed} == allowed
    assert len(counted) == loop.barriers


@pytest.mark.parametrize(("layout", "index"), [("TN", 0), pytest.param("NN", 0, marks=pytest.mark.slow), pytest.param("NT", 0, marks=pytest.mark.slow)] + [pytest.param(layout, i, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for layout in LAYOUTS for i in range(1, 4)])  # fmt: skip
def test_dequantized(layout, index):
    """gfx942: codes and scales to registers, bfloat16 to LDS, no conditions in scalar registers that would spill."""
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)
    problem = GemmProblem(64, 64, 64, layout, *dtypes, BF16, a_scaling="1x32", b_scaling="1x32")
    config = candidates_for(problem, "gfx942")[index]
    geo = geometry(config, layout, 2, "gfx942")
    kernel = compiled("gfx942", layout, index, dtypes, scaling="1x32")
    print(kernel)
    loop, tiles = kernel.main_loop, geo.tiles_per_step
    if layout != "NT" and index > 0:
        tiles *= 2  # the first step of 512 k loads scales of rows, the others are a loop in the loop
    _check_spills(kernel)
    assert kernel.lds_bytes == lds_bytes(config, layout, 2, "gfx942") <= LDS_BYTES["gfx942"]
    assert loop.k == tiles * config.tile_k
    assert loop.mfma == geo.frags_m * geo.frags_n * loop.k // 16
    assert loop.lds_writes == {"ds_write_b128": tiles * (geo.a.loads + geo.b.loads)}
    assert (loop.loads_to_lds, loop.stores, loop.barriers) == (0, 0, tiles)
    codes = tiles * (geo.a.loads + geo.b.loads) // 2
    assert codes < loop.loads <= 2 * codes  # and their scales


@pytest.mark.parametrize(
    "index", [0, *(pytest.param(i, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for i in range(1, 4))]
)
@pytest.mark.parametrize("arch", ["gfx950", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_wide_scales(arch, index):
    """Scales of 128 k by software: one of a for each fragment and block, one of b. No sums in AGPRs, which vector instructions do not
    reach: they would be copied for each block. gfx950 reads scales of four blocks together, which may be copied once or twice."""
    scaling = ("1x128", "128x128")
    problem = GemmProblem(64, 64, 64, "TN", *FLOAT8[arch], BF16, a_scaling=scaling[0], b_scaling=scaling[1])
    config = candidates_for(problem, arch)[index]
    geo = geometry(config, "TN", 1, arch, "128")
    kernel = compiled(arch, "TN", index, FLOAT8[arch], scaling=scaling)
    print(kernel)
    loop, tiles = kernel.main_loop, geo.tiles_per_step
    _check_spills(kernel)
    assert kernel.lds_bytes == lds_bytes(config, "TN", 1, arch, geo.scales) <= LDS_BYTES[arch]
    assert loop.k == tiles * config.tile_k
    assert loop.k == 512
    assert loop.mfma == geo.frags_m * geo.frags_n * 4 * (1 if arch == "gfx950" else 4)
    fragment_reads = (geo.frags_m + geo.frags_n) * loop.k // 64
    if arch == "gfx950":
        assert loop.lds_reads == {"ds_read_b128": fragment_reads + geo.frags_m + 1}
        assert loop.copies <= 2 * 4 * (geo.frags_m + 1)
        assert (loop.loads_to_lds, loop.loads) == (tiles * geo.loads_per_tile, 0)
        counted = [wait for wait in loop.waits if "vmcnt" in wait]
        assert len(counted) == tiles
        assert all(f"vmcnt({(geo.num_stages - 2) * geo.loads_per_tile})" in wait for wait in counted)
    else:
        assert loop.lds_reads == {"ds_read_b128": fragment_reads}
        assert kernel.agpr == 0
        assert (loop.loads_to_lds, loop.loads) == (0, tiles * (geo.a.loads + geo.b.loads) + geo.frags_m + 1)


@pytest.mark.parametrize(("arch", "layout", "index"), ALL)
def test_float32(arch, layout, index):
    """True float32 multiplications, every fragment read once."""
    config = candidates(arch, 4)[index]
    geo = geometry(config, layout, 4, arch)
    kernel = compiled(arch, layout, index, FP32, FP32)
    print(kernel)
    loop, tiles = kernel.main_loop, geo.tiles_per_step
    _check_spills(kernel)
    assert kernel.lds_bytes == lds_bytes(config, layout, 4, arch) <= LDS_BYTES[arch]
    assert loop.k == tiles * config.tile_k
    assert loop.mfma == geo.frags_m * geo.frags_n * loop.k // 4
    assert kernel.text.count("v_mfma_f32_16x16x4_f32") == kernel.text.count("v_mfma_") >= loop.mfma
    assert (loop.stores, loop.barriers) == (0, tiles)
    assert loop.lds_reads == {"ds_read_b128": loop.k * (geo.frags_m + geo.frags_n) // 16}
    operand_loads = tiles * (geo.a.loads + geo.b.loads)
    assert (loop.loads_to_lds, loop.loads) == ((operand_loads, 0) if arch == "gfx950" else (0, operand_loads))


def _read_bytes(op):
    """Bytes per lane of an LDS read; two-address forms read twice."""
    bits = {"b128": 128, "b64": 64, "b32": 32, "u16": 16, "u8": 8}
    size = next(value for key, value in bits.items() if key in op)
    return size // 8 * (2 if "read2" in op else 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_links_to_a_code_object(arch):
    if isa.find_linker() is None:
        pytest.skip("no ld.lld (LLVM 19 or newer): code objects cannot be linked")
    kernel = compiled(arch, "TN", 0)
    assert kernel.code_object is not None and kernel.code_object[:4] == b"\x7fELF"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": FP16, "out_dtype": BF16, "bias_dtype": FP32, "activation": "gelu", "accumulate": True},
        {"dtype": FP16, "out_dtype": FP32, "bias_dtype": BF16, "activation": "silu"},
        {"dtype": BF16, "out_dtype": FP16, "bias_dtype": FP32, "activation": "gelu_tanh", "accumulate": True, "vectorised": False},
    ],
    ids=["gelu", "silu", "elementwise"],
)  # fmt: skip
def test_epilogues_do_not_spill(arch, layout, options):
    _check_spills(compiled(arch, layout, 0, **options))
    mx = {"dtype": FLOAT8["gfx950"], "scaling": "1x32"}
    for operands in ({"dtype": FLOAT8[arch]}, mx, {"dtype": FP32}):
        _check_spills(compiled(arch, layout, 0, **(options | operands)))


def _check_spills(kernel):
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
def test_split_k(arch):
    """Two kernels; the one that adds the parts has no loop and no spills either."""
    problem = GemmProblem(16, 1280, 8192, "TN", BF16, BF16, BF16)
    kernel = isa.compile_isa(problem, None, arch)
    _check_spills(kernel)
    assert "gemm_reduction" in kernel.text and "gemm_reduction" not in kernel.name
    largest = dataclasses.replace(candidates(arch)[1], split_k=4)
    _check_spills(isa.compile_isa(problem, largest, arch))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "options",
    [
        {"a_scaling": "row", "b_scaling": "row", "bias_dtype": FP32, "activation": "gelu", "accumulate": True},
        {"preactivation_dtype": BF16, "activation": "gelu", "bias_dtype": BF16},
        {"activation": "swiglu", "preactivation_dtype": BF16, "a_scaling": "row", "b_scaling": "row"},
        {"out_scaling": "tensor", "out_dtype": torch.float8_e5m2, "activation": "gelu", "bias_dtype": BF16},
        {"out_scaling": "1x32", "out_dtype": torch.float8_e4m3fn, "out_direction": "both", "activation": "silu"},
    ],
    ids=["row scales", "preactivation", "swiglu", "quantized", "quantized blocks"],
)
def test_scales_and_outputs_do_not_spill(arch, options):
    for dtypes in ((BF16, BF16), FLOAT8[arch]):
        problem = GemmProblem(4096, 4096, 4096, "TN", *dtypes, **({"out_dtype": BF16} | options))
        _check_spills(isa.compile_isa(problem, candidates(arch, dtypes[0].itemsize)[0], arch))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
@pytest.mark.parametrize("out_dtype", [FP32, BF16])
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_does_not_spill(arch, out_dtype, grad_dtype):
    """Both leave it to the second largest tile."""
    options = {"bias_grad_dtype": grad_dtype, "accumulate": out_dtype == FP32}
    problem = GemmProblem(4096, 4096, 4096, "NT", BF16, BF16, out_dtype, **options)
    largest, second = candidates(arch)[:2]
    reason = config.why_unsupported(problem, largest, arch)
    assert reason is not None and "runs out of registers" in reason
    _check_spills(isa.compile_isa(problem, second, arch))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_of_8_bit_operands_does_not_spill(arch):
    """Both leave it to the second largest tile."""
    problem = GemmProblem(4096, 4096, 4096, "NT", *FLOAT8[arch], FP32, bias_grad_dtype=FP32, accumulate=True)
    largest, *rest = candidates_for(problem, arch)
    reason = config.why_unsupported(problem, largest, arch)
    assert reason is not None and "runs out of registers" in reason
    first = next(each for each in rest if config.why_unsupported(problem, each, arch) is None)
    _check_spills(isa.compile_isa(problem, first, arch))


LOOP = """
	.globl	k
.LBB0_1:
	v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]
	s_cbranch_scc1 .LBB0_1
.LBB0_2:
	s_waitcnt vmcnt(4) lgkmcnt(0)
	s_barrier
	buffer_load_dwordx4 v1, s[0:3], 0 offen lds
	buffer_load_dwordx4 v[4:7], v1, s[0:3], 0 offen
	buffer_load_ubyte v3, v1, s[0:3], 0 offen
	ds_write_b128 v2, v[4:7]
	ds_bpermute_b32 v3, v2, v3
	ds_read_b128 v[4:7], v2
	ds_read_b64_tr_b16 v[8:9], v2 offset:8
	v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]
	v_mfma_f32_16x16x32_bf16 a[0:3], v[4:7], v[8:11], a[0:3]
	v_accvgpr_read_b32 v1, a0
	v_add_u32_e32 v2, s1, v2
	s_add_i32 s1, s1, 1
	s_cbranch_scc1 .LBB0_2
	s_cbranch_scc0 .LBB0_3
.LBB0_3:
	s_endpgm
    .agpr_count:     4
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 0
    .sgpr_count:     8
    .sgpr_spill_count: 0
    .vgpr_count:     16
    .vgpr_spill_count: 3
"""


def test_parse_counts_the_loop_with_most_matrix_instructions():
    kernel = isa.parse(LOOP, "gfx950", None, "not linked", 64)
    loop = kernel.main_loop
    assert (kernel.name, kernel.vgpr, kernel.agpr, kernel.vgpr_spills) == ("k", 16, 4, 3)
    assert (loop.mfma, loop.k, loop.loads_to_lds, loop.loads, loop.barriers) == (2, 64, 1, 2, 1)
    assert loop.lds_reads == {"ds_read_b128": 1, "ds_read_b64_tr_b16": 1}
    assert loop.narrow == {"buffer_load_ubyte": 1, "ds_read_b64_tr_b16": 1}
    assert "1 buffer_load_ubyte, 1 ds_read_b64_tr_b16 accesses of fewer than 16 bytes" in str(kernel)
    assert loop.waits == ["vmcnt(4) lgkmcnt(0)"]
    assert (loop.valu, loop.copies, loop.salu) == (1, 1, 2)


def test_parse_refuses_what_has_no_loop():
    with pytest.raises(ValueError, match="no loop"):
        isa.parse(LOOP.replace("v_mfma", "v_add"), "gfx950", None, "", 64)
