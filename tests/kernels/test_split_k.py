"""Split K and batch invariance of the CDNA kernels, on the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import GemmCase, inputs
from fourwave.testing.shapes import Shape

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("TN", "NN", "NT")


def check(case: GemmCase, arch: str, **changes: int) -> None:
    config = replace(candidates_for(case.problem, arch)[2], **changes)  # type: ignore[arg-type]
    result = case.run(f"sim:{arch}", config=config)
    assert result.passed, f"{case}, {config}: {result}"


@pytest.mark.parametrize("split_k", [2, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_split_k(arch: str, layout: str, split_k: int) -> None:
    """K of several steps with a tail; of fewer steps than parts, so that some have nothing to add."""
    for k in (667, 60):
        check(GemmCase(Shape("", 77, 145, k), layout=layout, bias_dtype=FP32, activation="relu"), arch, split_k=split_k)


@pytest.mark.parametrize("arch", ARCHS)
def test_split_k_with_every_epilogue(arch: str) -> None:
    shape = Shape("", 77, 160, 520)
    check(GemmCase(shape, layout="NT", bias_grad=FP32, out_dtype=FP32, accumulate=True), arch, split_k=3)
    check(GemmCase(shape, activation="swiglu", preactivation=BF16, bias_dtype=BF16), arch, split_k=3)
    check(GemmCase(shape, out_format="mxfp8_e4m3", out_direction="both", alpha=0.5), arch, split_k=2)
    scaled = {"a_format": "fp8_row", "b_format": "fp8_row", "fnuz": arch == "gfx942"}
    check(GemmCase(shape, **scaled), arch, split_k=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_split_k_is_one_fixed_sum(arch: str) -> None:
    """The parts' sums, added in order in float32: the bits do not depend on which workgroup or wave is first."""
    problem = GemmProblem(72, 80, 640, "TN", BF16, BF16, FP32)
    a, b = inputs.spread(Shape("", problem.M, problem.N, problem.K), BF16)
    config = replace(candidates(arch)[2], split_k=4)

    def run(problem: GemmProblem, a: torch.Tensor, b: torch.Tensor, split_k: int, **options: str) -> torch.Tensor:
        out = torch.full((problem.M, problem.N), float("nan"))
        with sim.session(arch=arch, on_finding="raise", **options):  # type: ignore[arg-type]
            amd.run(problem, replace(config, split_k=split_k), arch, GemmTensors(a, b, out))
        return out

    split = run(problem, a, b, 4)
    assert torch.equal(split, run(problem, a, b, 4, schedule="reverse", completion="early"))
    steps = -(-problem.K // 64)
    each = -(-steps // 4) * 64
    total: Any = None
    for first in range(0, problem.K, each):
        part_a, part_b = a[:, first : first + each].contiguous(), b[:, first : first + each].contiguous()
        part = run(replace(problem, K=part_a.shape[1]), part_a, part_b, 1)
        total = part if total is None else total + part
    assert torch.equal(split, total)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_not_split(arch: str) -> None:
    problem = GemmProblem(64, 64, 512, "TN", BF16, BF16, BF16)
    config = replace(candidates(arch)[2], split_k=2)
    assert why_unsupported(problem, config, arch) is None
    assert "batch_invariant" in (why_unsupported(replace(problem, batch_invariant=True), config, arch) or "")
    assert "registers" in (why_unsupported(problem, replace(candidates(arch)[0], split_k=2), arch) or "")
    assert "split_k=33" in (why_unsupported(problem, replace(config, split_k=33), arch) or "")


ROWS = (1, 2, 17, 33, 128, 257)


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(
            arch, kind, marks=() if (arch, kind) in (("gfx950", "mxfp8"), ("gfx942", "bf16")) else pytest.mark.slow
        )
        for arch in ARCHS
        for kind in ("bf16", "fp16", "fp32", "fp8", "mxfp8")
    ],
)
def test_batch_invariance(arch: str, kind: str) -> None:
    """Row 0 has the same bits at every M, with the configuration that each M gets, and the other rows change."""
    n, k = 136, 624
    if kind in ("bf16", "fp16", "fp32"):
        dtypes = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "fp32": (FP32, FP32)}[kind]
    else:
        dtypes = FLOAT8[arch] if kind == "fp8" else FLOAT8["gfx950"]
    rows = []
    for m in ROWS:
        scaling: dict[str, Any] = {"a_scaling": "1x32", "b_scaling": "1x32"} if kind == "mxfp8" else {}
        problem = GemmProblem(
            m, n, k, "TN", *dtypes, FP32, bias_dtype=FP32, activation="gelu_tanh", batch_invariant=True, **scaling
        )  # fmt: skip
        generator = torch.Generator().manual_seed(0)
        first, b, bias = (torch.randn(*size, generator=generator) for size in ((1, k), (n, k), (n,)))
        scales_first, scales_b = (torch.randint(120, 134, (r, -(-k // 32)), generator=generator) for r in (1, n))
        generator.manual_seed(m)
        others = torch.randn(m - 1, k, generator=generator)
        a = torch.cat([first, others]).to(dtypes[0])
        scales_a = torch.cat([scales_first, torch.randint(120, 134, (m - 1, -(-k // 32)), generator=generator)])
        given = {}
        if kind == "mxfp8":
            given = {
                name: scales.to(torch.uint8).view(torch.float8_e8m0fnu)
                for name, scales in (("a_scale", scales_a), ("b_scale", scales_b))
            }
        out = torch.full((m, n), float("nan"))
        config = default_config(problem, arch)[0]
        with sim.session(arch=arch, on_finding="raise"):
            amd.run(problem, config, arch, GemmTensors(a, b.to(dtypes[1]), out, bias, 0.75, **given))
        rows.append(out[0].clone())
        # And with every other tile.
        if m == 17:
            for config in candidates_for(problem, arch):
                other = torch.full((m, n), float("nan"))
                with sim.session(arch=arch, on_finding="raise"):
                    amd.run(problem, config, arch, GemmTensors(a, b.to(dtypes[1]), other, bias, 0.75, **given))
                assert torch.equal(out, other), config
    assert not rows[0].isnan().any()
    for m, row in zip(ROWS, rows, strict=True):
        assert torch.equal(row, rows[0]), f"M = {m}"
