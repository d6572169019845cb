"""What the Hopper GEMM kernel writes beside plain products: swiglu, saved preactivation, bias gradients, quantized results; activations."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave.backends.hopper import cutedsl_missing
from fourwave.ops.gemm import sm90_launch
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_tiles import candidates
from fourwave.testing import GemmCase, bounds
from fourwave.testing.shapes import Shape
from hopper_cases import BF16, FP8, FP16, FP32, ODD, TAILS, each_candidate, every_layout, on_gpu, problem

# Compiled in a process of its own: CuTe DSL, no GPU. FlyDSL may be loaded in this one.
COMPILE_MORE = """
import sys, torch
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
from hopper_cases import more_problems
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
from fourwave.ops.gemm.sm90_tiles import candidates
p = replace(more_problems()[int(sys.argv[1])], bias_dtype=torch.bfloat16)
config = candidates(p)[0]
ptx = compile_kernel(specialise(p, config), keep=True).__ptx__
assert ptx.count("wgmma.mma_async.sync.aligned.m64n8k16") == (8 * config.warpgroup_m // 64 if p.bias_grad_dtype else 0)
assert ("cp.async.bulk.tensor.3d.global" in ptx) == (p.preactivation_dtype is not None and p.activation == "swiglu")
assert ("red.global.max.s32" in ptx) == (p.out_scaling is not None)
assert ptx.count("cvt.rn.satfinite") > 16 or p.out_scaling is None
assert ".local" not in ptx, "an array went to local memory"
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize("number", [3, 6, 8, 11])
def test_compiled_code_of_more_outputs(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE_MORE, str(number), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr


@on_gpu
@every_layout
@pytest.mark.parametrize(
    ("activation", "out_dtype", "z_dtype"),
    [(None, BF16, BF16), ("gelu", FP32, FP16), ("silu", BF16, FP32), ("swiglu", BF16, BF16), ("swiglu", FP32, FP32)],
)
def test_saved_preactivation(layout: str, activation: str | None, out_dtype: torch.dtype, z_dtype: torch.dtype) -> None:
    for shape in (TAILS, ODD):
        case = GemmCase(
            shape, layout, BF16, out_dtype, out_view="sliced", bias_dtype=FP32, activation=activation, alpha=0.5,
            preactivation=z_dtype,
        )  # fmt: skip
        each_candidate(case)


@on_gpu
@every_layout
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_swiglu(layout: str, out_dtype: torch.dtype, accumulate: bool) -> None:
    for shape in (TAILS, ODD, Shape("few rows", 5, 912, 200)):
        case = GemmCase(
            shape, layout, FP16, out_dtype, a_view="sliced", b_view="sliced", bias_dtype=BF16, activation="swiglu",
            accumulate=accumulate,
        )  # fmt: skip
        each_candidate(case)


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@pytest.mark.parametrize("out_format", [None, "fp8_e4m3"])
def test_fp8_with_more_outputs(activation: str, name: str, fast: bool, out_format: str | None) -> None:
    if name == "fp8_1x128" and activation == "swiglu":
        pytest.skip("refused: test_problems_that_the_kernel_cannot_run_are_refused_with_the_reason")
    case = GemmCase(
        TAILS, a_format=name, b_format="fp8_128x128" if name == "fp8_1x128" else name, bias_dtype=BF16,
        activation=activation, preactivation=BF16, out_format=out_format, fast_accum=fast,
    )  # fmt: skip
    each_candidate(case, bounds.hopper_fp8_u_acc(TAILS.K, not fast or name == "fp8_1x128", wide=True))


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "accumulate", "grad_dtype"),
    [(BF16, BF16, False, BF16), (BF16, FP32, True, FP32), (BF16, BF16, True, FP16), (FP16, FP32, False, FP16)],
)
def test_bias_grad(dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, grad_dtype: torch.dtype) -> None:
    """alpha does not scale it; the tiles of the first columns alone make it."""
    for shape in (TAILS, ODD, Shape("persistent", 5000, 3300, 104)):
        case = GemmCase(
            shape, "NT", dtype, out_dtype, a_view="sliced", alpha=0.5, accumulate=accumulate, bias_grad=grad_dtype
        )
        each_candidate(case)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "activation", "out_format"),
    [(BF16, None, "fp8_e4m3"), (FP16, "gelu_tanh", "fp8_e5m2"), (BF16, "swiglu", "fp8_e4m3")],
)
def test_quantized_output(dtype: torch.dtype, activation: str | None, out_format: str) -> None:
    """Codes and amax have the bits that the reference quantizer makes of the float32 result."""
    for shape in (TAILS, ODD, Shape("persistent", 5000, 3328, 104), Shape("few rows", 3, 256, 200)):
        each_candidate(GemmCase(shape, "TN", dtype, bias_dtype=FP32, activation=activation, out_format=out_format))


@on_gpu
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_amax_is_of_what_lies_inside(activation: str | None) -> None:
    """Every element is 0; past the last row and column bias alone would be left."""
    M, N = 130, 400
    bias = torch.arange(1, N + 1, device="cuda").float()
    a = torch.zeros(M, 64, dtype=BF16, device="cuda")
    a[:, 0] = 1
    b = torch.zeros(N, 64, dtype=BF16, device="cuda")
    b[:, 0] = -bias
    scale = torch.ones((), device="cuda")
    p = replace(problem(M, N, 64, out=FP8[0]), activation=activation, out_scaling="tensor", bias_dtype=FP32)
    bias = -b[:, 0].float()  # what bfloat16 holds
    for config in candidates(p):
        out = torch.full((M, p.out_columns), 1.0, device="cuda").to(FP8[0])
        amax = torch.full((), float("nan"), device="cuda")
        sm90_launch.run(p, config, GemmTensors(a, b, out, bias, out_scale=scale, out_amax=amax))
        assert amax == 0 and (out.float() == 0).all(), str(config)


@on_gpu
@pytest.mark.parametrize("out_format", ["fp8_e4m3", "fp8_e5m2"])
def test_quantized_output_saturates_and_keeps_nan(out_format: str) -> None:
    M, N = 192, 256
    generator = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(M, 64, device="cuda", generator=generator).to(BF16)
    b = torch.randn(N, 64, device="cuda", generator=generator).to(BF16)
    for special in (None, float("inf"), float("nan")):
        if special is not None:
            a[70, 3] = special
        y = fw.gemm(a, b, out_dtype=FP32, backend="hopper")
        for factor in (1e-6, 0.02, 3e4):
            scale = torch.tensor(factor, device="cuda")
            z = torch.full((M, N), 7.0, device="cuda").to(BF16)
            got = fw.gemm(a, b, out_format=out_format, out_scale=scale, preactivation=z, backend="hopper")
            assert torch.equal(z.view(torch.int16)[~z.isnan()], y.to(BF16).view(torch.int16)[~z.isnan()])
            assert torch.equal(z.isnan(), y.isnan())
            right = fw.quantize(y, out_format, scale=scale, backend="native")
            assert got.data is not None and right.data is not None
            assert torch.equal(got.data.view(torch.uint8), right.data.view(torch.uint8))
            assert got.amax is not None and right.amax is not None
            assert torch.equal(got.amax, right.amax) or (got.amax.isnan() and right.amax.isnan())


@on_gpu
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh", "gelu", "swiglu"])
@pytest.mark.parametrize("M", [256, 16])
def test_activations_of_extreme_values(M: int, activation: str) -> None:
    """Where an exponential overflows or vanishes, and at infinities and NaN; few rows take another kernel, but for swiglu."""
    values = [0.0, 1e-30, 3e-3, 1.0, 8.0, 40.0, 88.0, 104.0, 3e4, 1e30, float("inf")]
    values = [*values, *(-v for v in values), float("nan")]
    a = torch.zeros(M, 64, dtype=BF16, device="cuda")
    a[:, 0] = torch.tensor(values, device="cuda").repeat(M // len(values) + 1)[:M].to(BF16)
    b = torch.zeros(256, 64, dtype=BF16, device="cuda")
    b[:, 0] = 1
    out = fw.gemm(a, b, activation=activation, out_dtype=FP32, backend="hopper")
    bound = bounds.gemm_bound(a, b, FP32, activation=activation).nan_to_num(nan=0.0)  # of infinities
    bounds.assert_within(out, gemm_reference(a, b, activation=activation), bound, activation)


@on_gpu
def test_more_outputs_in_a_graph() -> None:
    """amax starts anew with every replay; z of the second call of a kind goes the short way."""
    a = torch.randn(300, 512, device="cuda").to(BF16)
    b = torch.randn(512, 512, device="cuda").to(BF16)
    out, z = torch.empty(300, 512, dtype=BF16, device="cuda"), torch.empty(300, 512, dtype=BF16, device="cuda")
    scale = torch.tensor(0.5, device="cuda")
    for _ in range(2):
        fw.gemm(a, b, out=out, preactivation=z, activation="relu", backend="hopper")
        codes = fw.gemm(a, b, out_format="fp8_e4m3", out_scale=scale, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, b, out=out, preactivation=z, activation="relu", backend="hopper")
        codes = fw.gemm(a, b, out_format="fp8_e4m3", out_scale=scale, backend="hopper")
    for factor in (2.0, 0.25):
        a.copy_(torch.randn(300, 512, device="cuda") * factor)
        out.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        bounds.assert_within(z, gemm_reference(a, b), bounds.gemm_bound(a, b, BF16))
        assert torch.equal(out, z.relu())
        y = fw.gemm(a, b, out_dtype=FP32, backend="hopper")
        assert codes.amax == y.abs().max()
