"""Tiles for few rows of the Hopper GEMM kernel whose b rides the matrix unit's rows; of preshuffled weights: test_hopper_streamed.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fourwave.backends.hopper import cutedsl_missing
from fourwave.ops.gemm import sm90_launch
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.ops.gemm.sm90_tiles import swapped
from fourwave.testing import GemmCase
from fourwave.testing.shapes import Shape
from hopper_cases import BF16, FP16, FP32, on_gpu, problem, run_case

# Compiled in a process of its own: CuTe DSL, no GPU. FlyDSL may be loaded in this one.
COMPILE_ONCE = """
import re, sys, torch
from fourwave.blocks.cutedsl.loaders import EVICT_FIRST
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
M, shuffled = int(sys.argv[1]), sys.argv[2] == "True"
weights = dict(b_dtype=torch.uint8, b_scaling="1x32", b_preshuffled=True) if shuffled else dict(b_dtype=torch.bfloat16)
p = GemmProblem(M, 4096, 4096, "TN", torch.bfloat16, out_dtype=torch.bfloat16, device_type="cuda", **weights)
config = default_config(p)[0]
assert config.few_rows
spec = specialise(p, config)
assert spec.read_once == (M <= config.tile_m)
ptx = compile_kernel(spec, keep=True).__ptx__
loads = re.findall(r"cp.async.bulk.tensor.*shared.*, (%rd\\d+);", ptx)
first = re.findall(rf"mov.b64\\s+(%rd\\d+), {EVICT_FIRST};", ptx)
hinted = [policy for policy in loads if policy in first]
print("loads", loads, "hinted", hinted)
assert (0 < len(hinted) < len(loads)) == spec.read_once and (spec.read_once or not hinted)
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize(("M", "shuffled"), [(16, False), (16, True), (64, True), (256, True)])
def test_weights_that_are_read_once_leave_l2_first(M: int, shuffled: bool, tmp_path: Path) -> None:
    """And nothing else does: a and out are read again."""
    command = [sys.executable, "-c", COMPILE_ONCE, str(M), str(shuffled)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def swapped_cases() -> list[tuple[int, int, int, int, int, str]]:
    """M and N that a tile does not divide, with clusters of every kind; tiles and layouts in turn."""
    sizes = [(1, 712), (8, 1027), (13, 256), (32, 8), (57, 1001), (64, 1304), (128, 999)]
    cases: list[tuple[int, int, int, int, int, str]] = []
    for M, N in sizes:
        for split, share in ((1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (2, 4)):
            if share > 1 and M <= 4 * share:
                continue
            rows = (40, 64, 120, 128)[len(cases) % 4]
            cases.append((M, N, rows, split, share, "TN"))
            cases.append((M, N, max(64, rows // 64 * 64), split, share, "NN"))
    return cases


@on_gpu
@pytest.mark.parametrize(("M", "N", "rows", "split", "share", "layout"), swapped_cases())
def test_swapped_tiles(M: int, N: int, rows: int, split: int, share: int, layout: str) -> None:
    """Tails in M, N and K, parts of unequal length, operands inside NaN, rows of out that vectors do not fit."""
    shape = Shape("few rows", M, N, 64 * 19 + 40)
    config = swapped(problem(M, N, shape.K, layout), rows, split, share)
    run_case(GemmCase(shape, layout, a_view="sliced", b_view="sliced", out_view="sliced"), config)
    run_case(GemmCase(shape, layout), config)


@on_gpu
@pytest.mark.parametrize(("split", "share"), [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("rows", [48, 128])
@pytest.mark.parametrize("M", [60, 300])
def test_more_swapped_tiles_than_clusters(M: int, rows: int, split: int, share: int) -> None:
    """Several tiles per cluster, so partial sums follow each other in one buffer; with 300 rows several per row of tiles."""
    shape = Shape("persistent", M, rows * 301 - 8, 64 * split + 8)
    config = swapped(problem(64, shape.N, shape.K), rows, split, share)
    for _ in range(3):
        run_case(GemmCase(shape, "TN"), config)


@on_gpu
@pytest.mark.parametrize("out_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("N", [520, 517])
def test_epilogues_of_swapped_tiles(N: int, accumulate: bool, out_dtype: torch.dtype) -> None:
    """One rounding, accumulated or not."""
    shape = Shape("few rows", 43, N, 500)
    for activation in (None, "relu", "silu", "gelu_tanh", "gelu"):
        case = GemmCase(
            shape, "NN", BF16, out_dtype, bias_dtype=FP16, activation=activation, alpha=0.5, accumulate=accumulate
        )
        run_case(case, swapped(problem(43, N, 500), 128, 2))


@on_gpu
def test_swapped_tiles_are_repeatable_and_ordered_after_the_grid_before() -> None:
    """A grid is set up while the one before it ends: it may not read that one's output early, nor write what it reads."""
    torch.manual_seed(1)
    x = torch.randn(16, 4096, device="cuda").to(BF16)
    w = (torch.randn(4096, 4096, device="cuda") / 64).to(BF16)
    p = problem(16, 4096, 4096)
    configs = [
        swapped(p, rows, split, share)
        for rows in (32, 112)
        for split, share in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2))
    ]
    buffers_ = [torch.empty_like(x) for _ in range(3)]
    expected: list[torch.Tensor] = []
    for repeat in range(20):
        for number, config in enumerate(configs):
            source = x
            for turn in range(6):
                target = buffers_[turn % 3]
                sm90_launch.run(p, config, GemmTensors(source, w, target))
                source = target
            if repeat == 0:
                chain = x
                for _ in range(6):
                    target = torch.empty_like(x)
                    torch.cuda.synchronize()
                    sm90_launch.run(p, config, GemmTensors(chain, w, target))
                    torch.cuda.synchronize()
                    chain = target
                expected.append(chain)
                assert not chain.isnan().any() and chain.float().std() > 0.1
            assert torch.equal(source, expected[number]), f"{config}, repeat {repeat}"
