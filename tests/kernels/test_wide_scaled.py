"""FP8 GEMM with float32 scales of 1x128 (a) and 128x128 (b) on the simulator: which scale meets which codes, tails, banks.

Truth is float64 from the values of the codes times the scales.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates_for, lds_bytes, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

needs_sim = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

FP32 = torch.float32
CONFIGS = range(4)


def problem_of(arch, M, N, K, mix=(0, 1)):
    a, b = (FLOAT8[arch][i] for i in mix)
    return GemmProblem(M, N, K, "TN", a, b, FP32, a_scaling="1x128", b_scaling="128x128")


def config_of(arch, index):
    configs = candidates_for(problem_of(arch, 64, 64, 64), arch)
    assert len(configs) == len(CONFIGS)
    return configs[index]


def codes(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype).float()
    return torch.where(values.abs() < 16, values, values.sign()).nan_to_num(1.0).to(dtype)


def spread(problem, a_scale, b_scale):
    """Scales of every element of a and b, float64."""
    along = [scale.double().repeat_interleave(128, 1)[:, : problem.K] for scale in (a_scale, b_scale)]
    return along[0], along[1].repeat_interleave(128, 0)[: problem.N]


def run(arch, problem, config, a, b, a_scale, b_scale, **options):
    out = torch.full((problem.M, problem.N), float("nan"))
    with sim.session(arch=arch, **options) as report:
        notes = amd.run(problem, config, arch, GemmTensors(a, b, out, a_scale=a_scale, b_scale=b_scale))
    assert not report.findings, report.findings
    return out, notes, report


def check(arch, problem, config, seed=0, **options):
    """Scales that differ by decades between rows and blocks, some negative; bound: K products and sums, and two roundings of
    each block's scale."""
    generator = torch.Generator().manual_seed(seed)
    a, b = codes(problem.a_shape, problem.a_dtype, seed), codes(problem.b_shape, problem.b_dtype, seed + 1)
    scales = [
        torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-2, 3, shape, generator=generator)
        for shape in (problem.a_scale_shape, problem.b_scale_shape)
    ]
    out, _, report = run(arch, problem, config, a, b, *scales, **options)
    factors = spread(problem, *scales)
    left, right = a.double() * factors[0], b.double() * factors[1]
    bound = (problem.K + 4) * 2.0**-24 * (left.abs() @ right.abs().T)
    assert ((out.double() - left @ right.T).abs() <= bound).all()
    return report


@needs_sim
@pytest.mark.parametrize("index", CONFIGS)
@pytest.mark.parametrize("arch", ARCHS)
def test_tails_and_banks(arch, index):
    config = config_of(arch, index)
    size = (config.tile_m, config.tile_n, config.tile_k)
    report = check(arch, problem_of(arch, *size), config, count_bank_conflicts=True)
    counters = report.launches[0].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"]
    check(arch, problem_of(arch, config.tile_m + 13, config.tile_n + 131, 1041), config)


@needs_sim
@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_and_mixes(arch):
    """K below a block, at whole chunks of scales, past them; one block of b's rows, and several."""
    for M, N, K in ((16, 48, 7), (48, 128, 512), (33, 300, 513), (64, 64, 2080), (80, 16, 96), (70, 130, 257)):
        for mix in ((0, 0), (1, 0)):
            check(arch, problem_of(arch, M, N, K, mix), config_of(arch, 1), seed=K)


@needs_sim
@pytest.mark.parametrize("options", [{"completion": "early"}, {"schedule": "reverse"}], ids=["early", "reverse"])
@pytest.mark.parametrize("arch", ARCHS)
def test_order_does_not_matter(arch, options):
    for index in (0, 3):
        config = config_of(arch, index)
        check(arch, problem_of(arch, config.tile_m, config.tile_n + 16, 1056), config, **options)


@needs_sim
@pytest.mark.parametrize("index", CONFIGS)
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_of_scales_are_exact(arch, index):
    """Ones, with a power of two of its own for each row and block of K: every sum is exact, and a scale taken from another
    row or block changes it."""
    config = config_of(arch, index)
    M, N, K = config.tile_m, 2 * config.tile_n + 128, 1536  # scales come for 512 at a time
    problem = problem_of(arch, M, N, K, (0, 0))
    block = torch.arange(K // 128)
    rows_a = 2.0 ** ((block * 3 + torch.arange(M)[:, None]) % 12)
    rows_b = 2.0 ** ((block + torch.arange(-(-N // 128))[:, None]) % 4)
    a, b = torch.ones(problem.a_shape).to(problem.a_dtype), torch.ones(problem.b_shape).to(problem.b_dtype)
    out, notes, _ = run(arch, problem, config, a, b, rows_a, rows_b)
    expected = 128 * (rows_a.double() @ rows_b.double().T).repeat_interleave(128, 1)[:, :N]
    assert notes == []
    assert torch.equal(out.double(), expected)


@needs_sim
@pytest.mark.parametrize("arch", ARCHS)
def test_a_scale_of_nan_or_zero_stays_in_its_row(arch):
    problem = problem_of(arch, 32, 48, 200, (0, 0))
    a, b = torch.ones(problem.a_shape).to(problem.a_dtype), torch.ones(problem.b_shape).to(problem.b_dtype)
    a_scale, b_scale = torch.ones(32, 2), torch.ones(1, 2)
    a_scale[17, 1], a_scale[5, 0] = float("nan"), 0.0
    out, _, _ = run(arch, problem, config_of(arch, 1), a, b, a_scale, b_scale)
    expected = torch.full((32, 48), 200.0)
    expected[17], expected[5] = float("nan"), 72.0
    assert torch.equal(out.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_supported(arch):
    good = problem_of(arch, 64, 64, 64)
    for config in (None, *candidates_for(good, arch)):
        assert why_unsupported(good, config, arch) is None
    assert lds_bytes(config_of("gfx950", 0), "TN", 1, "gfx950", "128") > lds_bytes(
        config_of("gfx950", 0), "TN", 1, "gfx950"
    )
    assert "TN" in (why_unsupported(dataclasses.replace(good, layout="NN"), None, arch) or "")
    assert "scales 128x128 and 1x128" in (
        why_unsupported(dataclasses.replace(good, a_scaling="128x128", b_scaling="1x128"), None, arch) or ""
    )
    plain = dataclasses.replace(good, a_dtype=torch.bfloat16, b_dtype=torch.bfloat16)
    assert "8-bit" in (why_unsupported(plain, None, arch) or "")
    large = dataclasses.replace(config_of(arch, 0), tile_m=256, tile_n=256, num_stages=2)
    assert why_unsupported(good, large, arch) is not None
