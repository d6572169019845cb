"""fw.gemm on 8-bit floats, every backend: all mixes of formats, tails, views, epilogues, and every code.

Truth is float64 from the values of the codes, as in test_gemm_backends.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import GemmCase
from fourwave.testing.shapes import GEMM_SHAPES, Shape, by_name
from targets import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
MIXES = list(itertools.product(range(2), repeat=2))  # which of the target's two formats a and b have


def arch_of(target: Target) -> str | None:
    """The AMD architecture that runs, or None. Hopper's FP8 sums have a bound of their own (test_hopper_fp8.py)."""
    if target.backend == "hopper":
        pytest.skip("tests/test_hopper_fp8.py")
    if target.backend == "native":
        return None
    arch = registry.get(target.backend).describe_gemm(GemmCase(by_name("even")).problem, None).arch
    assert arch is not None
    return arch


def formats(target: Target) -> tuple[torch.dtype, torch.dtype]:
    return FLOAT8[arch_of(target) or "gfx950"]


def check(case: GemmCase, target: Target, **options: object) -> None:
    result = case.run(target.backend, device=target.device, **options)  # type: ignore[arg-type]
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}: {result.ratio:.3g} times the bound at {list(result.worst)}"


def case(target: Target, shape: Shape, mix: tuple[int, int] = (0, 1), **options: object) -> GemmCase:
    a, b = (formats(target)[i] for i in mix)
    return GemmCase(shape, dtype=a, b_dtype=b, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_shapes(target: Target, shape: Shape) -> None:
    check(case(target, shape), target)


@pytest.mark.parametrize("mix", [pytest.param(m, marks=() if m[0] != m[1] else pytest.mark.slow) for m in MIXES])
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_layouts(target: Target, layout: str, mix: tuple[int, int]) -> None:
    """Operands that are read across K, each in either format. Sizes in whole chunks are read in place, others through copies."""
    for shape in (by_name("tail all"), Shape("chunks", 80, 144, 203)):
        check(case(target, shape, mix, layout=layout, out_dtype=FP32), target)


@pytest.mark.parametrize("mix", MIXES)
def test_mixes(target: Target, mix: tuple[int, int]) -> None:
    for name in ("even", "tail all"):
        check(case(target, by_name(name), mix), target)


@pytest.mark.parametrize("layout", ["TN", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("NN", "NT"))])
@pytest.mark.parametrize("index", range(5))
def test_configs(target: Target, index: int, layout: str) -> None:
    """Tails over several tiles. One tile of each in every layout is in kernels/test_amd_sim.py."""
    arch = arch_of(target)
    if arch is None:
        pytest.skip("native takes no config")
    configs = candidates(arch, 1)
    assert len(configs) == 5, "one index per config"
    config = configs[index]
    shape = Shape("tails, 4 tiles", 2 * config.tile_m - 12, 2 * config.tile_n - 3, 3 * config.tile_k + 9)
    call = case(target, shape, layout=layout, a_view="offset", b_view="sliced", out_view="sliced")
    check(call, target, config=config)
    check(replace(call, shape=replace(shape, K=7)), target, config=config)


@pytest.mark.parametrize("view", ["sliced", "offset", "transposed"])
def test_views(target: Target, view: str) -> None:
    """NaN right behind each row. K = 208 is whole chunks, so that aligned slices are read in place."""
    for shape in (by_name("tail all"), Shape("chunks", 77, 145, 208)):
        check(case(target, shape, a_view=view, b_view=view, out_view=view), target)


@pytest.mark.parametrize("out_dtype", [FP32, FP16])
def test_out_dtypes(target: Target, out_dtype: torch.dtype) -> None:
    check(case(target, by_name("tail all"), out_dtype=out_dtype), target)


def test_epilogue(target: Target) -> None:
    """alpha carries the product of the operands' scales."""
    check(case(target, by_name("tail all"), bias_dtype=FP32, activation="gelu", alpha=2.0**-5 * 0.75), target)
    check(case(target, by_name("tail all"), out_dtype=FP32, alpha=-3.5, accumulate=True), target)


@pytest.mark.parametrize("mix", MIXES)
def test_every_code(target: Target, mix: tuple[int, int]) -> None:
    """One code in each row, at another k each, against powers of two: NaN and infinities included, bit for bit."""
    a_dtype, b_dtype = (formats(target)[i] for i in mix)
    generator = torch.Generator().manual_seed(7)
    row = torch.arange(256)
    for code_side in (0, 1):
        codes_dtype, other_dtype = (a_dtype, b_dtype) if code_side == 0 else (b_dtype, a_dtype)
        codes = torch.zeros(256, 160, dtype=torch.uint8)
        codes[row, row * 37 % 160] = row.to(torch.uint8)
        others = 2.0 ** torch.randint(-2, 3, (24, 160), generator=generator)
        one_hot = codes.view(codes_dtype).to(target.device)
        powers = others.to(target.device, other_dtype)
        a, b = (one_hot, powers) if code_side == 0 else (powers, one_hot)
        out = fw.gemm(a, b, out_dtype=FP32, backend=target.backend).double().cpu()
        exact = gemm_reference(a.cpu(), b.cpu())
        assert exact.isnan().any(), "the NaN codes are among them"
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out.nan_to_num(0.0, 1e30, -1e30), exact.nan_to_num(0.0, 1e30, -1e30))


def test_default_output_is_bfloat16_and_empty_calls_have_answers(target: Target) -> None:
    a, b = (torch.zeros(4, 0, device=target.device).to(dtype) for dtype in formats(target))
    out = fw.gemm(a, b, backend=target.backend)
    assert out.dtype == BF16 and torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("mix", list(itertools.product((E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ), repeat=2)))
def test_native_takes_every_mix(mix: tuple[torch.dtype, torch.dtype]) -> None:
    result = GemmCase(by_name("tail all"), dtype=mix[0], b_dtype=mix[1], out_dtype=FP32).run("native")
    assert result.passed


@pytest.mark.parametrize("arch", ARCHS)
def test_what_the_kernels_refuse(arch: str) -> None:
    """Codes of the other kind are not reinterpreted."""
    own, other = FLOAT8[arch], FLOAT8["gfx942" if arch == "gfx950" else "gfx950"]
    good = GemmProblem(64, 64, 64, "TN", own[0], own[1], BF16)
    assert why_unsupported(good, None, arch) is None
    for foreign in (replace(good, a_dtype=other[0]), replace(good, b_dtype=other[1])):
        assert "codes" in (why_unsupported(foreign, None, arch) or "")
    for layout in ("NN", "NT"):
        assert why_unsupported(replace(good, layout=layout), None, arch) is None
    assert "two 8-bit" in (why_unsupported(replace(good, b_dtype=BF16), None, arch) or "")
    for config in candidates(arch, 1):
        assert why_unsupported(good, config, arch) is None
        assert why_unsupported(replace(good, a_dtype=BF16, b_dtype=BF16), config, arch) is not None


def test_what_gemm_refuses() -> None:
    fp8, bf16 = torch.ones(4, 16).to(E4M3FN), torch.ones(4, 16, dtype=BF16)
    with pytest.raises(ValueError, match="both be 8-bit"):
        fw.gemm(fp8, bf16)
    with pytest.raises(ValueError, match="out_dtype"):
        fw.gemm(fp8, fp8, out_dtype=E4M3FN)
    with pytest.raises(ValueError, match="gradient"):
        fw.gemm(fp8.requires_grad_(), bf16.to(E5M2))


def test_precision_in_backend_strings() -> None:
    a, b = torch.ones(4, 16).to(E4M3FN), torch.ones(4, 16).to(E5M2)
    explanation = fw.explain(a, b, backend="sim,fp8=native")
    assert explanation.backend == "native" and "e4m3fn x e5m2" in str(explanation)
