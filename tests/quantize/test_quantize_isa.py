"""What the compiler makes of the quantization kernels: no spills, 16-byte accesses, x read once.

Needs FlyDSL; no linker and no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import re

import pytest

from fourwave.perf import isa

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")

RULES = {"1x32": "floor", "1x128": "fp32", "128x128": "fp32", "row": "fp32", "tensor": "fp32"}
QUICK = [
    ("gfx950", "bfloat16", "1x32", True),
    ("gfx942", "float32", "1x128", True),
]
ALL = [
    (arch, dtype, scaling, transposed)
    for arch in ("gfx950", "gfx942")
    for dtype in ("bfloat16", "float32")
    for scaling in RULES
    for transposed in (False, True)
]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK)]


@functools.cache
def compiled(arch, dtype, scaling, transposed, given=False, code=None):
    from fourwave.quantize.cdna import QuantizeSpec

    columnwise = transposed or scaling not in ("tensor", "128x128")
    code = code or ("e4m3fnuz" if arch == "gfx942" and scaling != "1x32" else "e4m3fn")
    spec = QuantizeSpec(arch, dtype, code, scaling, RULES[scaling], True, columnwise, transposed, given, True, True)
    return isa.compile_spec("fourwave.quantize.amd", spec, arch)


def assert_good(kernel, dtype, small_loads=0, wide=None):
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgpr <= 168  # three waves per SIMD of 512 registers
    # 64 elements per lane, each read once, 16 bytes at a time.
    needed = 64 * (4 if dtype == "float32" else 2) // 16
    wide = needed if wide is None else wide
    assert needed <= wide <= needed + 5
    assert kernel.text.count("buffer_load_dwordx4") == wide
    assert kernel.main_loop.loads == wide + small_loads
    assert kernel.main_loop.loads_to_lds == 0


@pytest.mark.parametrize(("arch", "dtype", "scaling", "transposed"), CASES)
def test_quantize(arch, dtype, scaling, transposed):
    kernel = compiled(arch, dtype, scaling, transposed)
    # What is read besides x: the amax of the tensor; of 4 rows and of 1 + 16 columns per lane, which the compiler may join.
    narrow = len(re.findall("buffer_load_dword(x2|x3)? ", kernel.text))
    assert narrow <= {"tensor": 1, "row": 21}.get(scaling, 0)
    assert_good(kernel, dtype, narrow, kernel.text.count("buffer_load_dwordx4") if scaling == "row" else None)
    both = 1 + (transposed or scaling not in ("tensor", "128x128"))
    assert kernel.text.count("buffer_store_dwordx4") >= 4 * both  # the codes
    reads = kernel.main_loop.lds_reads
    if transposed:
        assert reads["ds_read_b128"] >= 4
        assert kernel.lds_bytes >= 128 * 128
    assert kernel.main_loop.barriers <= 3


@pytest.mark.parametrize(
    ("arch", "code"),
    [
        ("gfx950", "e5m2"),
        *(pytest.param("gfx942", code, marks=pytest.mark.slow) for code in ("e5m2", "e4m3fn", "e5m2fnuz")),
    ],
)
def test_given_scale(arch, code):
    kernel = compiled(arch, "bfloat16", "tensor", True, True, code)
    assert_good(kernel, "bfloat16", small_loads=1)
    assert "buffer_atomic_smax" in kernel.text
    assert ("v_cvt_pk_bf8_f32" if "e5m2" in code else "v_cvt_pk_fp8_f32") in kernel.text


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rows and columns", "tensor"]
)
@pytest.mark.parametrize("arch", ["gfx950", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_amax(arch, whole):
    from fourwave.quantize.cdna import AmaxSpec

    kernel = isa.compile_spec("fourwave.quantize.amd", AmaxSpec(arch, "bfloat16", not whole, not whole, True), arch)
    assert_good(kernel, "bfloat16")
    assert kernel.text.count("buffer_atomic_smax") == (1 if whole else 2)


def test_arithmetic_is_ieee():
    """Division without the fast-math forms: v_div_scale, v_div_fmas, v_div_fixup. Subnormals are numbers, in and out."""
    text = compiled("gfx950", "bfloat16", "tensor", False).text
    assert "v_div_fixup_f32" in text and "v_div_scale_f32" in text
    assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", text) and re.search(r"_mode_16_64 3\b", text)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("scaling", ["1x32", "1x128", "tensor"])
def test_no_spills_where_elements_go_one_by_one(scaling, arch):
    from fourwave.quantize.cdna import QuantizeSpec

    spec = QuantizeSpec(
        arch, "bfloat16", "e4m3fn", scaling, RULES[scaling], True, True, True, scaling == "tensor", False, False
    )
    kernel = isa.compile_spec("fourwave.quantize.amd", spec, arch)
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgpr <= 168


MXFP4 = [
    ("gfx950", "bfloat16", False, True),
    *(
        pytest.param(
            arch,
            dtype,
            transposed,
            extras,
            marks=[pytest.mark.slow]
            if (dtype, transposed, extras) == ("bfloat16", True, True)
            else (pytest.mark.slow, pytest.mark.exhaustive),
        )
        for arch in ("gfx950", "gfx1250", "gfx942")
        for dtype in ("bfloat16", "float32")
        for transposed in (False, True)
        for extras in (False, True)
        if (arch, dtype, transposed, extras) != ("gfx950", "bfloat16", False, True)
    ),
]


@pytest.mark.parametrize(("arch", "dtype", "transposed", "extras"), MXFP4)
def test_mxfp4(arch, dtype, transposed, extras):
    """extras: stochastic rounding and both Hadamard transforms."""
    from fourwave.quantize.mxfp4 import CODES_BYTES, X_BYTES, Mxfp4Spec

    spec = Mxfp4Spec(arch, dtype, "floor", True, True, transposed, extras, extras, extras, True, True, True)
    kernel = isa.compile_spec("fourwave.quantize.amd", spec, arch)
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.vgpr <= 128  # four waves per SIMD of 512 registers
    assert kernel.lds_bytes == X_BYTES + (0 if transposed else CODES_BYTES)
    loop = kernel.main_loop
    size = 4 if dtype == "float32" else 2
    wide = kernel.text.count("global_load_b128" if arch == "gfx1250" else "buffer_load_dwordx4")
    assert wide == 32 * size // 16  # 32 elements a thread, each read once
    assert loop.loads == wide + (extras and arch != "gfx1250")  # the seed
    assert kernel.text.count("global_store_b128" if arch == "gfx1250" else "buffer_store_dwordx4") == 2
    prefix = ("ds_load", "ds_store") if arch == "gfx1250" else ("ds_read", "ds_write")
    assert loop.lds_writes[f"{prefix[1]}_b128"] == 8
    assert loop.lds_reads[f"{prefix[0]}_b128"] == 8 + (0 if transposed else 8)
    assert loop.barriers == 1 + (not transposed)
    # No lane asks another: nothing but LDS is between them.
    assert not re.search(r"permlane|bpermute|dpp|swizzle", kernel.text)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ["gfx950", "gfx1250", "gfx942"])
def test_mxfp4_where_elements_go_one_by_one(arch):
    from fourwave.quantize.mxfp4 import Mxfp4Spec

    for transposed in (False, True):
        spec = Mxfp4Spec(arch, "bfloat16", "ceil", True, True, transposed, True, True, True, False, False, False)
        kernel = isa.compile_spec("fourwave.quantize.amd", spec, arch)
        assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
