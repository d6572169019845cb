"""The Hopper backend beyond what test_gemm_backends.py asks of every backend: its configurations, its host path, graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.backends.hopper import cutedsl_missing
from fourwave.ops.gemm import sm90_config, sm90_launch
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_config import HopperConfig, candidates, default_config, why_unsupported
from fourwave.testing import GemmCase, bounds, buffers, inputs
from fourwave.testing.llm_shapes import llm81
from fourwave.testing.shapes import Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = sm90_config.FP8
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def problem(M: int = 512, N: int = 512, K: int = 512, layout: str = "TN", out: torch.dtype = BF16) -> GemmProblem:
    return GemmProblem(M, N, K, layout, BF16, BF16, out, device_type="cuda")


# ---------------------------------------------------------------------------------------------------------------------
# Rules: no GPU, no DSL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile_m": 96}, "multiple of 64 rows"),
        ({"tile_n": 200}, "64 must divide"),
        ({"tile_n": 320}, "up to 256"),
        ({"tile_m": 512}, "at most 256 rows"),
        ({"tile_k": 32}, "128 bytes"),
        ({"tile_m": 256}, "256 accumulators"),
        ({"num_stages": 1}, "at least 2"),
        ({"num_stages": 5}, "bytes of shared memory"),
        ({"cluster_m": 3}, "powers of two"),
        ({"cluster_m": 4, "cluster_n": 2}, "at most 4"),
        ({"cluster_n": 4, "cluster_m": 1}, "its share"),
        ({"store_stages": 3}, "must divide"),
        ({"schedule": "stream"}, "cooperative and pingpong"),
        ({"schedule": "pingpong", "consumers": 3}, "2 for pingpong"),
        ({"group": 0}, "at least 1"),
    ],
)
def test_configs_that_the_kernel_cannot_run_are_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    assert why_unsupported(problem(), HopperConfig()) is None
    assert said in (why_unsupported(problem(), replace(HopperConfig(), **change)) or "")  # type: ignore[arg-type]


def test_problems_that_the_kernel_cannot_run_are_refused_with_the_reason() -> None:
    fp32 = GemmProblem(8, 8, 8, "TN", FP32, FP32, FP32, device_type="cuda")
    assert "bfloat16 or float16" in (why_unsupported(fp32, None) or "")
    assert "32-bit" in (why_unsupported(problem(M=2**31), None) or "")
    from fourwave.ops.gemm.config import GemmConfig

    fp8 = GemmProblem(8, 16, 16, "NN", FP8[0], FP8[1], BF16, device_type="cuda")
    assert "K contiguous" in (why_unsupported(fp8, None) or "")
    assert why_unsupported(replace(fp8, layout="TN"), None) is None
    narrow = replace(HopperConfig(), tile_m=256, tile_n=128, cluster_m=1)
    assert "256 accumulators" in (why_unsupported(problem(), narrow, promote=True) or "")
    assert "pingpong with promotion" in (why_unsupported(problem(), sm90_config.SQUARE, promote=True) or "")
    assert "HopperConfig" in (why_unsupported(problem(), GemmConfig()) or "")  # type: ignore[arg-type]


def test_the_default_is_one_of_the_candidates_and_allowed() -> None:
    shapes = [(1, 1, 1), (77, 145, 203), (1, 57344, 8192), (2**30, 8, 8), *(row.gemm("TN") for row in llm81())]
    for M, N, K in shapes:
        for layout in LAYOUTS:
            for out in (BF16, FP32):
                p = problem(M, N, K, layout, out)
                config, reasons = default_config(p)
                assert config in candidates(p) and why_unsupported(p, config) is None
                assert reasons


def test_shared_memory_of_every_candidate_fits() -> None:
    for config in candidates(problem()):
        assert sm90_config.smem_bytes(config, 2) <= 227 * 1024


def test_without_a_hopper_gpu_a_named_backend_raises() -> None:
    if UNAVAILABLE is None:
        pytest.skip("there is one")
    x = torch.zeros(8, 8, dtype=BF16)
    with pytest.raises(fw.BackendUnavailable, match="hopper"):
        fw.gemm(x, x, backend="hopper")


def test_llm81() -> None:
    rows = llm81()
    assert len(rows) == 81 == len({(row.model, row.layer, row.microbatch) for row in rows})
    assert len({(row.out_features, row.in_features) for row in rows}) < 27  # models share weights, at other lengths
    published = {(32768, 16384, 53248), (32768, 37888, 3584), (32768, 59136, 8192)}
    assert published <= {row.gemm("TN") for row in rows}
    row = rows[0]
    assert row.gemm("NN") == (row.tokens, row.in_features, row.out_features)
    assert row.gemm("NT") == (row.out_features, row.in_features, row.tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled code: CuTe DSL, no GPU. In a process of its own, which FlyDSL may be loaded in otherwise.

COMPILE = """
import re, sys, torch
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_config import candidates
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
layout, out, index = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
p = GemmProblem(512, 512, 512, layout, torch.bfloat16, torch.bfloat16, out, torch.bfloat16, "silu", out == torch.float32,
                "cuda")
config = candidates(p)[index]
ptx = compile_kernel(specialise(p, config), keep=True).__ptx__
loop = re.findall(r"wgmma.mma_async.sync.aligned.(m64n\\d+k16).f32.bf16.bf16", ptx)
assert set(loop) == {f"m64n{config.tile_n}k16"}, set(loop)
assert len(re.findall("setmaxnreg", ptx)) == 2
assert "cp.async.bulk.tensor.2d.shared" in ptx
assert ("cp.reduce.async.bulk.tensor.2d.global" in ptx) == p.accumulate
assert ".local" not in ptx, "an array went to local memory"
print("compiled", len(loop), "wgmma")
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize(("layout", "out"), [("TN", "bfloat16"), ("NT", "float32")])
@pytest.mark.parametrize("index", [0, 1])
def test_compiled_code_has_the_instructions(layout: str, out: str, index: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE, layout, out, str(index)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # CuTe DSL writes what it keeps into the working directory, under one name for all specialisations.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# On a Hopper GPU


def run_case(case: GemmCase, config: HopperConfig | None = None) -> None:
    result = case.run("hopper", device="cuda", config=config)  # type: ignore[arg-type]
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}, {config}: {result.ratio:.3g} times the bound at {list(result.worst)}"


def all_candidates() -> tuple[HopperConfig, ...]:
    return candidates(problem())


@on_gpu
@every_layout
@pytest.mark.parametrize("config", all_candidates(), ids=str)
def test_configs(config: HopperConfig, layout: str) -> None:
    """Every candidate, several tiles of each CTA's cluster, tails in M, N and K, operands inside NaN."""
    M, N = 3 * config.tile_m * config.cluster_m - 12, 3 * config.tile_n * config.cluster_n - 8
    shape = Shape("tails", M, N, 9 * config.tile_k + 24)
    run_case(GemmCase(shape, layout, a_view="sliced", b_view="sliced", out_view="sliced"), config)


@on_gpu
@pytest.mark.parametrize("config", all_candidates(), ids=str)
def test_more_tiles_than_ctas(config: HopperConfig) -> None:
    """Persistent CTAs take several tiles each, and not all the same number; stages wrap at different tiles."""
    M, N = 13 * config.tile_m - 1, 37 * config.tile_n - 8
    run_case(GemmCase(Shape("persistent", M, N, 3 * config.tile_k + 8)), config)


@on_gpu
@pytest.mark.parametrize("out_dtype", [FP32, FP16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("index", range(3))
def test_epilogues_on_several_tiles(index: int, out_dtype: torch.dtype, accumulate: bool) -> None:
    p = problem(out=out_dtype)
    config = candidates(p)[index * (len(candidates(p)) - 1) // 2]
    shape = Shape("tails", 2 * config.tile_m + 60, 3 * config.tile_n + 24, 200)
    case = GemmCase(
        shape, "NT", BF16, out_dtype, bias_dtype=BF16, activation="gelu_tanh", alpha=0.5, accumulate=accumulate
    )
    run_case(case, config)


@on_gpu
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize(("a_dtype", "b_dtype"), [(FP8[0], FP8[0]), (FP8[0], FP8[1]), (FP8[1], FP8[0])])
@pytest.mark.parametrize(("out_dtype", "accumulate"), [(BF16, False), (FP32, True)])
def test_fp8(
    a_dtype: torch.dtype, b_dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, promote: bool
) -> None:
    """Per-tensor scales, bias, tails everywhere; every configuration, several tiles of each."""
    shape = Shape("tails", 700, 456, 1000)
    p = GemmProblem(
        shape.M, shape.N, shape.K, "TN", a_dtype, b_dtype, out_dtype, FP32, None, accumulate, "cuda"
    )  # fmt: skip
    a, b = inputs.spread(shape, FP32, device="cuda")
    a, b = a.to(a_dtype), b.to(b_dtype)
    scales = torch.tensor([0.3], device="cuda"), torch.tensor([7.0], device="cuda")
    alpha = float(scales[0]) * float(scales[1])
    bias = torch.randn(shape.N, device="cuda")
    addend = torch.randn(shape.M, shape.N, device="cuda") if accumulate else None
    exact = gemm_reference(a, b, bias=bias, alpha=alpha, addend=addend)
    u_acc = bounds.hopper_fp8_u_acc(shape.K, promote)
    bound = bounds.gemm_bound(a, b, out_dtype, bias=bias, alpha=alpha, addend=addend, u_acc=u_acc)
    for config in candidates(p, promote):
        out = buffers.poisoned(shape.M, shape.N, out_dtype, "cuda", layout="sliced", addend=addend)
        sm90_launch.run(p, config, a, b, out.tensor, bias=bias, scales=scales, promote=promote)
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("promote", [False, True])
def test_fp8_small_integers_are_exact(promote: bool) -> None:
    """Sums below 2^11 fit in what the matrix unit keeps: not a bit may differ."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(-2, 3, (300, 500), generator=generator).float().to("cuda").to(FP8[0])
    b = torch.randint(-2, 3, (200, 500), generator=generator).float().to("cuda").to(FP8[0])
    p = GemmProblem(300, 200, 500, "TN", FP8[0], FP8[0], FP32, device_type="cuda")
    for config in candidates(p, promote):
        out = torch.full((300, 200), float("nan"), device="cuda")
        sm90_launch.run(p, config, a, b, out, promote=promote)
        assert torch.equal(out.double(), a.double() @ b.double().mT), str(config)


@on_gpu
def test_promotion_is_more_precise() -> None:
    """K = 16384 equal products: the matrix unit's short sum loses what float32 additions keep."""
    K = 16384
    a = torch.full((128, K), 1.125, device="cuda").to(FP8[0])
    p = GemmProblem(128, 128, K, "TN", FP8[0], FP8[0], FP32, device_type="cuda")
    errors = []
    for promote in (False, True):
        out = torch.empty(128, 128, device="cuda")
        sm90_launch.run(p, None, a, a, out, promote=promote)
        errors.append(float((out.double() - 1.125**2 * K).abs().max()))
    assert errors[1] < errors[0] / 4 or errors[0] == errors[1] == 0, errors


@on_gpu
def test_operands_past_two_to_the_31_elements() -> None:
    """Row m of a is m's parity in the last columns: a 32-bit offset would read another row."""
    M, K, stride = 40000, 128, 65536
    a = torch.zeros(M, stride, dtype=BF16, device="cuda")[:, stride - K :]
    a.copy_((torch.arange(M, device="cuda") % 251).to(BF16)[:, None].expand(M, K))
    b = torch.eye(K, dtype=BF16, device="cuda")
    assert a.stride(0) * M > 2**31
    assert torch.equal(fw.gemm(a, b, backend="hopper"), a)
    wide = torch.empty(M, stride, dtype=BF16, device="cuda")
    fw.gemm(a, b, out=wide[:, stride - K :], backend="hopper")
    assert torch.equal(wide[:, stride - K :], a)


@on_gpu
def test_repeats_and_streams_give_the_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(1000, 1000, generator=generator, device="cuda").to(BF16)
    b = torch.randn(776, 1000, generator=generator, device="cuda").to(BF16)
    first = fw.gemm(a, b, backend="hopper")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(fw.gemm(a, b, backend="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs)


@on_gpu
def test_a_call_runs_on_the_current_stream() -> None:
    a = torch.ones(256, 4096, dtype=BF16, device="cuda")
    b = torch.ones(256, 4096, dtype=BF16, device="cuda")
    fw.gemm(a, b, backend="hopper")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        a.fill_(2.0)
        out = fw.gemm(a, b, backend="hopper")
    stream.synchronize()
    assert (out == 8192).all()


@on_gpu
def test_graph_capture() -> None:
    """A warm call is captured and replayed with new contents; a cold one raises instead of compiling."""
    a = torch.randn(512, 512, device="cuda").to(BF16)
    b = torch.randn(512, 512, device="cuda").to(BF16)
    out = torch.empty(512, 512, dtype=BF16, device="cuda")
    fw.gemm(a, b, out=out, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, b, out=out, backend="hopper")
    for seed in range(3):
        torch.manual_seed(seed)
        a.copy_(torch.randn(512, 512, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        bounds.assert_within(out, gemm_reference(a, b), bounds.gemm_bound(a, b, BF16))
    cold = replace(HopperConfig(), num_stages=3)
    with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fw.gemm(a, b, out=out, backend="hopper", config=cold)  # type: ignore[arg-type]


@on_gpu
def test_notes_say_what_was_copied(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(65, 71, device="cuda").to(BF16)
    with caplog.at_level("DEBUG", logger="fourwave.dispatch"):
        fw.gemm(a, a, backend="hopper")
    assert "a copied: row stride not a multiple of 16 bytes" in caplog.text
    assert "out written through a copy" in caplog.text


@on_gpu
def test_explain_names_kernel_and_config() -> None:
    a = torch.zeros(256, 256, dtype=BF16, device="cuda")
    told = fw.explain(a, a, backend="hopper")
    assert (told.backend, told.kernel, told.arch) == ("hopper", "ops/gemm/sm90.py", "sm_90a")
    assert isinstance(told.config, HopperConfig) and told.reasons
