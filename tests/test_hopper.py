"""The Hopper backend beyond what test_gemm_backends.py asks of every backend: every tile, kernels that are kept, streams, graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave.backends import select
from fourwave.backends.hopper import cutedsl_missing
from fourwave.ops.gemm import sm90_launch
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_config import HopperConfig
from fourwave.ops.gemm.sm90_tiles import candidates
from fourwave.testing import GemmCase, bounds
from fourwave.testing.shapes import Shape
from hopper_cases import BF16, FP16, FP32, every_layout, on_gpu, problem, run_case

# Compiled in a process of its own: CuTe DSL, no GPU. FlyDSL may be loaded in this one.
COMPILE = """
import re, sys, torch
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
from fourwave.ops.gemm.sm90_tiles import candidates
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
def test_a_kernel_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, found again, and its results are the same; a damaged file is compiled anew, and said so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a = torch.randn(24, 512, device="cuda").to(BF16)
    compiled = []
    real = sm90_launch.compile_kernel

    def compile_kernel(spec: sm90_launch.Specialisation) -> object:
        compiled.append(spec)
        return real(spec)

    monkeypatch.setattr(sm90_launch, "compile_kernel", compile_kernel)
    outs = []
    for turn in range(3):
        monkeypatch.setattr(sm90_launch, "_compiled", {})
        monkeypatch.setattr(sm90_launch, "_local", threading.local())
        select.clear_cache()
        outs.append(fw.gemm(a, a, backend="hopper"))
        files = list((tmp_path / "fourwave" / "sm90").iterdir())
        assert len(files) == 1, files
        assert len(compiled) == (1, 1, 2)[turn]
        if turn == 1:
            files[0].write_bytes(b"no object file")
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@on_gpu
@pytest.mark.parametrize("M", [24, 256])
def test_warm_up_lets_a_cold_process_capture(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_launch, "_compiled", {})
    monkeypatch.setattr(sm90_launch, "_local", threading.local())
    select.clear_cache()
    a = torch.randn(M, 512, device="cuda").to(BF16)
    out = torch.full((M, M), float("nan"), device="cuda").to(BF16)
    sm90_launch.warm_up(problem(M, M, 512))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, a, out=out, backend="hopper")
    graph.replay()
    torch.cuda.synchronize()
    bounds.assert_within(out, gemm_reference(a, a), bounds.gemm_bound(a, a, BF16))


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
    a = torch.randn(165, 71, device="cuda").to(BF16)
    with caplog.at_level("DEBUG", logger="fourwave.dispatch"):
        fw.gemm(a, a, backend="hopper")
        assert "a copied: row stride not a multiple of 16 bytes" in caplog.text
        assert "out written through a copy" in caplog.text
        caplog.clear()
        fw.gemm(a[:65], a, backend="hopper")  # few rows are stored by other means
    assert "a copied: row stride not a multiple of 16 bytes" in caplog.text
    assert "out written through a copy" not in caplog.text


@on_gpu
def test_explain_names_kernel_and_config() -> None:
    a = torch.zeros(256, 256, dtype=BF16, device="cuda")
    told = fw.explain(a, a, backend="hopper")
    assert (told.backend, told.kernel, told.arch) == ("hopper", "ops/gemm/sm90.py", "sm_90a")
    assert isinstance(told.config, HopperConfig) and told.reasons
