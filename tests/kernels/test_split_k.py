"""Split K and batch invariance of the CDNA kernels, on the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import GemmCase, inputs
from fourwave.testing.exact_scales import ExactScales
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


SCALED: dict[str, dict[str, Any]] = {
    "mxfp8": {"a_format": "mxfp8_e4m3", "b_format": "mxfp8_e5m2"},
    "mxfp4": {"a_format": "mxfp4", "b_format": "mxfp4"},
    "mxfp8 x mxfp4": {"a_format": "mxfp8_e4m3", "b_format": "mxfp4"},
    "bf16 x mxfp4": {"dtype": BF16, "b_format": "mxfp4"},
    "blocks": {"a_format": "fp8_1x128", "b_format": "fp8_128x128"},
}


def scaled_splits() -> list[Any]:
    found = []
    for arch in ARCHS:
        for name, operands in SCALED.items():
            for layout in LAYOUTS:
                case = GemmCase(Shape("", 32, 128, 64), layout, fnuz=arch == "gfx942", out_dtype=FP32, **operands)
                if why_unsupported(case.problem, None, arch) is None:
                    quick = (arch, layout, name) in (
                        ("gfx950", "TN", "mxfp8"),
                        ("gfx950", "NN", "bf16 x mxfp4"),
                        ("gfx942", "NT", "mxfp8"),
                    )
                    found.append(
                        pytest.param(arch, case, id=f"{arch}-{name}-{layout}", marks=() if quick else pytest.mark.slow)
                    )
    return found  # fmt: skip


@pytest.mark.parametrize(("arch", "case"), scaled_splits())
def test_split_k_with_scales_along_k(arch: str, case: GemmCase) -> None:
    """Parts of 512 k, each with the scales of its own k: of 1734, the third of three parts has nothing; exact sums."""
    configs = [
        config for config in candidates_for(case.problem, arch) if why_unsupported(case.problem, config, arch) is None
    ]
    config = replace(configs[-1], split_k=3)
    for K in (1734, 2570):
        shape = Shape("tails", config.tile_m + 2, config.tile_n + 18, K)
        result = replace(case, shape=shape, bias_dtype=FP32, activation="relu").run(f"sim:{arch}", config=config)
        assert result.passed, f"{case}, {config}: {result}"
    if case.a_format == "fp8_1x128":
        return
    exact = ExactScales(
        Shape("", 32, 128, 1664),
        case.layout,
        dtype=case.dtype,
        a_format=case.a_format,
        b_format=case.b_format,
        out_dtype=FP32,
    )
    result = exact.run(f"sim:{arch}", config=config)
    assert result.passed, result


def test_parts_with_scales_do_not_depend_on_the_tile() -> None:
    """Nor on whether weights are preshuffled."""
    case = GemmCase(Shape("", 20, 48, 1344), out_dtype=FP32, **SCALED["mxfp8"])
    a, b = case.operands()
    results = []
    for weights, problem in ((b, case.problem), (fw.preshuffle(b), replace(case.problem, b_preshuffled=True))):
        for config in candidates_for(problem, "gfx950")[-2:]:
            config = replace(config, split_k=2)
            results.append(fw.gemm(a, weights, out_dtype=FP32, config=config, backend="sim:gfx950"))
    whole = fw.gemm(a, b, out_dtype=FP32, batch_invariant=True, backend="sim:gfx950")
    assert all(torch.equal(result, results[0]) for result in results[1:]) and not torch.equal(results[0], whole)


@pytest.mark.parametrize("operands", SCALED)
@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_fill_the_machine(arch: str, operands: str) -> None:
    """1280 x 8192 weights: 20 tiles of 64 columns, which at least 80 workgroups share; 160 where there is a tile of 16 or 32 rows by 64."""
    for rows in (1, 16, 32):
        case = GemmCase(Shape("", rows, 1280, 8192), fnuz=arch == "gfx942", **SCALED[operands])
        if why_unsupported(case.problem, None, arch) is None:
            config, reasons = default_config(case.problem, arch)
            workgroups = -(-rows // config.tile_m) * -(-1280 // config.tile_n) * config.split_k
            least = 80 if case.a_format == "mxfp4" or operands == "mxfp8 x mxfp4" else 160
            assert workgroups >= least and any("K split in" in reason for reason in reasons), config
            invariant = default_config(replace(case.problem, batch_invariant=True), arch)[0]
            assert invariant.split_k == 1


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_not_split(arch: str) -> None:
    problem = GemmProblem(64, 64, 512, "TN", BF16, BF16, BF16)
    config = replace(candidates(arch)[2], split_k=2)
    assert why_unsupported(problem, config, arch) is None
    assert "batch_invariant" in (why_unsupported(replace(problem, batch_invariant=True), config, arch) or "")
    assert "registers" in (why_unsupported(problem, replace(candidates(arch)[0], split_k=2), arch) or "")
    assert "split_k=33" in (why_unsupported(problem, replace(config, split_k=33), arch) or "")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch_has_fewer_than_2_32_threads(arch: str) -> None:
    """HIP refuses more (hipModuleLaunchKernel): 2**24 workgroups of 256 threads, parts of K included."""
    config = candidates(arch)[2]
    problem = GemmProblem((2**14 - 1) * config.tile_m, 2**10 * config.tile_n, 4096, "TN", BF16, BF16, BF16)
    assert why_unsupported(problem, config, arch) is None
    more = replace(problem, M=problem.M + 1)
    assert "16777216 workgroups of 256 threads" in (why_unsupported(more, config, arch) or "")
    half = replace(problem, N=problem.N // 2)
    assert why_unsupported(half, replace(config, split_k=2), arch) is None
    assert "workgroups of 256" in (why_unsupported(replace(half, M=half.M + 1), replace(config, split_k=2), arch) or "")


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
