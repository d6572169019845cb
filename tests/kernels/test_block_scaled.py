"""MXFP8 GEMM kernels on the simulator: which scale meets which codes, tails, NaN, LDS banks.

Truth is float64 from the values of the codes times the scales; the bound is that of a float32 sum in any order.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fourwave import sim
from fourwave.blocks.flydsl.tiles import bank_conflicts, read_b128_groups
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import block_scaled, candidates_for, geometry, in_halves, lds_bytes, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.shapes import Shape

needs_sim = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

LAYOUTS = ("TN", "NN", "NT")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
FP32 = torch.float32
CONFIGS = {"gfx950": 5, "gfx942": 4}  # gfx942 makes bfloat16 of the codes
# The largest tile takes longest: where rows of K are not contiguous it waits for the slow tests.
EVERY = [(arch, index, layout) for arch, count in CONFIGS.items() for index in range(count) for layout in LAYOUTS]
EACH, ENDS = (
    [pytest.param(*one, marks=pytest.mark.slow if one[1] == 0 and one[2] != "TN" else ()) for one in some]
    for some in (EVERY, [one for one in EVERY if one[1] in (0, CONFIGS[one[0]] - 1)])
)


def problem_of(M, N, K, layout, dtypes=(E4M3, E5M2)):
    a, b = dtypes
    return GemmProblem(M, N, K, layout, a, b, FP32, a_scaling="1x32", b_scaling="1x32")


def config_of(arch, layout, index):
    configs = candidates_for(problem_of(64, 64, 64, layout), arch)
    assert len(configs) == CONFIGS[arch]
    return configs[index]


def codes(shape, dtype, seed):
    """Every finite value of the format in the lower half of its range, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype).float()
    return torch.where(values.abs() < 16, values, values.sign()).nan_to_num(1.0).to(dtype)


def exponents(shape, low, high, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator) + 127


def by_row(tensor, rowwise):
    """[M or N, K or blocks]"""
    return tensor if rowwise else tensor.T


def dequantized(data, scale, rowwise):
    values = by_row(data.double(), rowwise)
    factors = torch.exp2(by_row(scale.view(torch.uint8), rowwise).double() - 127)
    factors = factors.masked_fill(by_row(scale.view(torch.uint8), rowwise) == 255, float("nan"))
    return values * factors.repeat_interleave(32, 1)[:, : values.shape[1]]


def in_place(tensor):
    """The same values where 0xFF (a NaN scale, NaN codes) lies before, behind and between the rows."""
    rows, columns = tensor.shape
    pitch = -(-columns // 16) * 16 + 16
    storage = torch.full((rows + 2, pitch), 255, dtype=torch.uint8)
    view = storage[1:-1, :columns]
    view.copy_(tensor.view(torch.uint8))
    return view.view(tensor.dtype)


def run(arch, problem, config, a, b, a_scale, b_scale, **options):
    out = torch.full((problem.M, problem.N), float("nan"))
    tensors = GemmTensors(a, b, out, a_scale=a_scale, b_scale=b_scale)
    with sim.session(arch=arch, **options) as report:
        notes = amd.run(problem, config, arch, tensors)
    assert not report.findings, report.findings
    return out, notes, report


def check(arch, problem, config, seed=0, **options):
    rowwise = (problem.layout != "NT", problem.layout == "TN")
    a, b = codes(problem.a_shape, problem.a_dtype, seed), codes(problem.b_shape, problem.b_dtype, seed + 1)
    scales = [
        exponents(shape, -6, 7, seed + 2 + i).to(torch.uint8).view(E8M0)
        for i, shape in enumerate((problem.a_scale_shape, problem.b_scale_shape))
    ]
    out, _, report = run(arch, problem, config, in_place(a), in_place(b), *scales, **options)
    left, right = (dequantized(*each) for each in zip((a, b), scales, rowwise))
    bound = problem.K * 2.0**-24 * (left.abs() @ right.abs().T)
    assert ((out.double() - left @ right.T).abs() <= bound).all()
    return report


@needs_sim
@pytest.mark.parametrize(("arch", "index", "layout"), EACH)
def test_tails_and_banks(arch, index, layout):
    config = config_of(arch, layout, index)
    report = check(
        arch, problem_of(config.tile_m, config.tile_n, config.tile_k, layout), config, count_bank_conflicts=True
    )
    counters = report.launches[0].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"]
    check(arch, problem_of(config.tile_m + 13, config.tile_n + 35, 1041, layout), config)


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", CONFIGS)
def test_sizes(arch, layout):
    """K below a block, at whole chunks of scales, past them; operands that are read in place and such that are copied."""
    for M, N, K in ((16, 48, 7), (48, 80, 512), (33, 31, 513), (64, 64, 2080), (80, 16, 96)):
        check(arch, problem_of(M, N, K, layout), config_of(arch, layout, 2), seed=K)


@needs_sim
@pytest.mark.parametrize("options", [{"completion": "early"}, {"schedule": "reverse"}], ids=["early", "reverse"])
@pytest.mark.parametrize(("arch", "index", "layout"), ENDS)
def test_order_does_not_matter(arch, index, layout, options):
    config = config_of(arch, layout, index)
    check(arch, problem_of(config.tile_m, config.tile_n + 16, 1056, layout), config, **options)


@needs_sim
@pytest.mark.parametrize(("arch", "index", "layout"), EACH)
def test_sums_of_scales_are_exact(arch, index, layout):
    """Ones, with a power of two of its own for each row and block of K: every sum is exact, and a scale taken from
    another row or block changes it (but for blocks that a and b confuse alike: test_sizes)."""
    config = config_of(arch, layout, index)
    M, N, K = config.tile_m, config.tile_n, 512
    problem = problem_of(M, N, K, layout, (E4M3, E4M3))
    block = torch.arange(K // 32)
    rows_a, rows_b = (block + torch.arange(M)[:, None] * 7) % 16, (block + torch.arange(N)[:, None]) % 4
    expected = 32 * (2.0 ** rows_a.double() @ 2.0 ** rows_b.double().T)
    assert len(set(map(tuple, rows_a[:16].tolist()))) == 16, "neighbouring rows differ"
    a, b = torch.ones(problem.a_shape).to(E4M3), torch.ones(problem.b_shape).to(E4M3)
    a_scale, b_scale = (
        by_row(rows + 127, rowwise).contiguous().to(torch.uint8).view(E8M0)
        for rows, rowwise in ((rows_a, layout != "NT"), (rows_b, layout == "TN"))
    )
    out, notes, _ = run(arch, problem, config, a, b, a_scale, b_scale)
    assert notes == []
    assert torch.equal(out.double(), expected)


@needs_sim
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("index", range(CONFIGS["gfx942"]))
def test_scales_of_several_512_k_are_exact(index, layout):
    """gfx942 loads the scales of 512 k of a row at once: of one workgroup's K the first, a middle and a last, short part; and K
    that ends where the next part's scales are loaded, two tiles before 512, one before it, at it and behind it."""
    config = config_of("gfx942", layout, index)
    step = config.tile_k
    for K in (1664, 512 - 2 * step, 512 - step, 512, 512 + step, 1024 - 2 * step + 32):
        case = ExactScales(
            Shape("", config.tile_m + 16, config.tile_n, K), layout, a_format="mxfp8_e4m3", b_format="mxfp8_e4m3",
            out_dtype=FP32,
        )  # fmt: skip
        result = case.run("sim:gfx942", config=config)
        assert result.passed, (K, result)


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", CONFIGS)
def test_extreme_scales_and_nan(arch, layout):
    """2**-127 times 2**127; a NaN scale makes its row NaN, and no other."""
    problem = problem_of(32, 48, 96, layout, (E4M3, E4M3))
    a, b = torch.ones(problem.a_shape).to(E4M3), torch.ones(problem.b_shape).to(E4M3)
    rows_a, rows_b = torch.zeros(32, 3, dtype=torch.uint8), torch.full((48, 3), 254, dtype=torch.uint8)
    rows_a[17, 2] = 255
    a_scale = by_row(rows_a, layout != "NT").contiguous().view(E8M0)
    b_scale = by_row(rows_b, layout == "TN").contiguous().view(E8M0)
    out, _, _ = run(arch, problem, config_of(arch, layout, 2), a, b, a_scale, b_scale)
    expected = torch.full((32, 48), 96.0)
    expected[17] = float("nan")
    assert torch.equal(out.nan_to_num(-1.0), expected.nan_to_num(-1.0))


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("arch", CONFIGS)
def test_every_code(arch, dtype, layout):
    """Each code in a row of its own, each with a scale of its own, times one: bit for bit, on either side."""
    row = torch.arange(256)
    codes_ = torch.zeros(256, 96, dtype=torch.uint8)
    codes_[row, row * 37 % 96] = row.to(torch.uint8)
    ones, scales = torch.ones(16, 96).to(dtype), exponents((256, 3), -100, 101, 5).to(torch.uint8)
    expected = dequantized(codes_.view(dtype), scales.view(E8M0), True).nansum(1)
    expected[torch.isnan(codes_.view(dtype).float()).any(1)] = float("nan")
    unit = torch.full((16, 3), 127, dtype=torch.uint8)
    for code_side in (0, 1):
        sides = [(codes_.view(dtype), scales), (ones, unit)]
        (a, a_scale), (b, b_scale) = sides if code_side == 0 else sides[::-1]
        problem = problem_of(len(a), len(b), 96, layout, (dtype, dtype))
        a, a_scale = (by_row(each, layout != "NT").contiguous() for each in (a, a_scale))
        b, b_scale = (by_row(each, layout == "TN").contiguous() for each in (b, b_scale))
        out, _, _ = run(arch, problem, config_of(arch, layout, 2), a, b, a_scale.view(E8M0), b_scale.view(E8M0))
        out = (out if code_side == 0 else out.T).double()
        assert expected.isnan().any()
        for column in out.unbind(1):
            assert torch.equal(column.nan_to_num(0.5, 1e300, -1e300), expected.nan_to_num(0.5, 1e300, -1e300))


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_bfloat16_ends(layout):
    """gfx942: what a code times its scale becomes at the ends of bfloat16's exponents, as dequantize.py says."""
    values = torch.tensor([2.0**-9, -(2.0**-6), 1.75 * 2.0**-2, 448.0, -1.0, 0.0])
    bytes_ = torch.tensor([0, 0, 0, 254, 254, 254])
    back = torch.tensor([254, 254, 254, 0, 0, 0])  # the other operand's scale
    a = torch.zeros(6, 192).to(E4M3)
    a_scale, b_scale = torch.full((6, 6), 127), torch.full((16, 6), 127)
    for i in range(6):
        a[i, 32 * i] = values[i]
        a_scale[i, i] = bytes_[i]
        b_scale[:, i] = back[i]
    problem = problem_of(6, 16, 192, layout, (E4M3, E4M3))
    a, a_scale = (by_row(each, layout != "NT").contiguous() for each in (a, a_scale.to(torch.uint8)))
    b, b_scale = (
        by_row(each, layout == "TN").contiguous() for each in (torch.ones(16, 192).to(E4M3), b_scale.to(torch.uint8))
    )
    out, _, _ = run("gfx942", problem, config_of("gfx942", layout, 2), a, b, a_scale.view(E8M0), b_scale.view(E8M0))
    expected = torch.tensor([0.0, -(2.0**-6), 1.75 * 2.0**-2, float("inf"), -1.0, 0.0])
    for column in out.unbind(1):
        assert torch.equal(column, expected)


@needs_sim
@pytest.mark.parametrize("arch", CONFIGS)
def test_scales_that_are_copied_are_named(arch):
    problem = problem_of(32, 48, 64, "TN")
    a, b = codes(problem.a_shape, E4M3, 0), codes(problem.b_shape, E5M2, 1)
    scales = [torch.full(shape, 127, dtype=torch.uint8).view(E8M0) for shape in ((32, 2), (48, 2))]
    tensors = GemmTensors(a, b, torch.empty(32, 48), None, 1.0, *scales)
    _, notes, _ = run(arch, problem, config_of(arch, "TN", 2), a, b, *scales)
    assert notes == [f"{name}_scale copied: row stride not 16-byte aligned" for name in "ab"]
    for index in range(CONFIGS[arch]):
        assert notes == amd.copies(problem, config_of(arch, "TN", index), arch, tensors)


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", range(CONFIGS["gfx950"]))
def test_scale_reads_without_bank_conflicts(index, layout):
    """gfx950, 64 banks: what the lanes of one read touch is what its fragments need, each bank once."""
    from fourwave.blocks.flydsl.loaders import FragmentScales

    config = config_of("gfx950", layout, index)
    geo = geometry(config, layout, 1, "gfx950", scales=True)
    halves = 2 if in_halves(config, 1, "gfx950") else 1
    for tile, frags in zip(geo.scale_tiles, (geo.frags_m // halves, geo.frags_n // halves), strict=True):
        held = {}  # byte -> (row or column, block), as the loads leave them
        for chunk in range(tile.chunks):
            for byte in range(16):
                if tile.tile.k_contiguous:
                    held[chunk * 16 + byte] = tile.tile.source_row(chunk), byte
                else:
                    line, column = divmod(chunk, tile.line_chunks)
                    held[chunk * 16 + byte] = (column ^ tile.key(line)) * 16 + byte, tile.block_of(line)
        assert len(set(held.values())) == tile.chunks * 16
        for first in range(0, tile.tile.extent // 16, frags):
            lanes = [FragmentScales(tile, None, 0, first * 16, frags, lane, 4) for lane in range(64)]
            for number in range(len(lanes[0])):
                at = [each.address(number) for each in lanes]
                fragments = [first + number * lanes[0].at_once + i for i in range(lanes[0].at_once)]
                if tile.tile.k_contiguous:
                    assert bank_conflicts(at, read_b128_groups(64), 16, 64) == 0
                    for lane, address in enumerate(at):
                        row = tile.tile.fragment_row(fragments[lane // 16 % len(fragments)], lane % 16)
                        assert [held[address + block] for block in range(16)] == [(row, block) for block in range(16)]
                    continue
                assert bank_conflicts(at, [range(32), range(32, 64)], 8, 64) == 0
                for lane in range(64):
                    # Lane r of 16 receives column r of eight rows: four slices of a fragment, and of the next.
                    r, group = lane % 16, lane // 16
                    received = [held[at[group * 16 + 2 * q + r // 8] + r % 8] for q in range(8)]
                    wanted = [
                        (fragment * 16 + r, 4 * k_slice + group) for fragment in fragments for k_slice in range(4)
                    ]
                    assert received == wanted * (2 // len(fragments))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_supported(layout):
    good = problem_of(64, 64, 64, layout)
    assert block_scaled(good)
    for config in (None, *candidates_for(good, "gfx942")):
        assert why_unsupported(good, config, "gfx942") is None
        if config is not None:
            least = dataclasses.replace(config, tile_m=config.tile_m // 2, tile_k=config.tile_k)
            assert config.tile_m * config.tile_k > 4096 or why_unsupported(good, least, "gfx942") is not None
    fnuz = dataclasses.replace(good, a_dtype=torch.float8_e4m3fnuz)
    for arch in CONFIGS:
        assert "MX formats" in (why_unsupported(fnuz, None, arch) or "")
    for config in (None, *candidates_for(good, "gfx950")):
        assert why_unsupported(good, config, "gfx950") is None
    for config in candidates_for(good, "gfx950"):
        assert lds_bytes(config, layout, 1, "gfx950", True) > lds_bytes(config, layout, 1, "gfx950")
    one_sided = dataclasses.replace(good, b_scaling=None)
    assert "scales 1x32 and None" in (why_unsupported(one_sided, None, "gfx950") or "")
    plain = dataclasses.replace(good, a_dtype=torch.bfloat16, b_dtype=torch.bfloat16)
    assert why_unsupported(plain, None, "gfx950") is not None
    small_halves = dataclasses.replace(candidates_for(good, "gfx950")[0], tile_m=128)
    assert "256x256" in (why_unsupported(good, small_halves, "gfx950") or "")
    deep = dataclasses.replace(candidates_for(good, "gfx950")[4], tile_k=1024, num_stages=3)
    assert why_unsupported(good, deep, "gfx950") is not None


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_swiglu_of_any_halves(arch, layout):
    """Halves of rows of codes and scales that are no whole chunks of 16."""
    for n in (146, 2):
        case = GemmCase(
            Shape("", 33, n, 203), layout, a_format="mxfp8_e4m3", b_format="mxfp8_e5m2", activation="swiglu",
            preactivation=torch.float32,
        )  # fmt: skip
        result = case.run(f"sim:{arch}")
        assert result.passed, f"{case}: {result}"
