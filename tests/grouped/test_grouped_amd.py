"""The CDNA grouped kernels on the simulator: every kind of product, tile and m_sizes against float64, and what only they can get wrong."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm.config import ARCHS, FLOAT8, NUM_CUS
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import candidates, default_config, grid_tiles, tiles_per_step, why_unsupported
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.reference import grouped_reference
from fourwave.perf.grouped import busiest_unit_steps
from fourwave.testing import grouped_cases
from fourwave.testing.bounds import assert_within, error_ratio
from fourwave.testing.grouped_cases import GroupedCase

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

ODD = (5, 130, 0, 1)
PLAN = [
    pytest.param(
        arch,
        case,
        id=f"{arch} {case}",
        marks=[pytest.mark.slow]
        if group == "every tile" or case.rows > 300 or len(case.sizes) > (99 if arch == "gfx950" else 9)
        else [],
    )
    for arch in ARCHS
    for group, case in grouped_cases.plan(arch)
]


def blocks(arch: str, **more: object) -> GroupedCase:
    base = GroupedCase("forward", ODD, 128, 384, scaling="blocks", scale_layout="groups", fnuz=arch == "gfx942")
    return replace(base, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("arch", "case"), PLAN)
def test_plan(arch: str, case: GroupedCase) -> None:
    result = case.run(f"sim:{arch}")
    assert result.passed, result


KINDS = (
    "forward",
    "preshuffled",
    "tensor preshuffled",
    "dgrad",
    "wgrad",
    "plain dgrad",
    "mx forward",
    "mx preshuffled",
    "mx dgrad",
    "mx wgrad",
)
QUICK = (("gfx950", "forward"), ("gfx950", "mx wgrad"), ("gfx942", "tensor preshuffled"), ("gfx942", "mx wgrad"))


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(arch, kind, marks=[] if (arch, kind) in QUICK else [pytest.mark.slow])
        for arch in ARCHS
        for kind in KINDS
        if not (arch == "gfx942" and kind == "mx preshuffled")
    ],
)
def test_every_tile(arch: str, kind: str) -> None:
    case = blocks(
        arch, kind=kind.replace("preshuffled", "forward").split()[-1], preshuffled="preshuffled" in kind, extra=2
    )
    if kind != "forward":
        case = replace(case, scale_layout="rows")
    if kind.startswith("plain"):
        case = replace(case, scaling=None)
    if kind.startswith("tensor"):
        case = replace(case, scaling="tensor")
    if kind.startswith("mx"):
        case = replace(case, scaling="1x32", N=160, K=288)
    # More than two steps of the main loop; of wgrad they are m_sizes'.
    if case.kind == "dgrad":
        case = replace(case, N=1352)
    elif case.kind == "forward":
        case = replace(case, K=1344 if case.preshuffled else 1352)
    tiles = candidates(case.problem(), arch)
    assert len(tiles) >= (2 if (arch, kind) == ("gfx942", "mx wgrad") else 3)
    for config in tiles:
        result = replace(case, config=config).run(f"sim:{arch}")
        assert result.passed, (config, result)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "options", [{"completion": "early"}, {"schedule": "reverse"}, {"schedule": "random:3"}], ids=str
)
def test_order_does_not_matter(arch: str, options: dict[str, str]) -> None:
    for case in (blocks(arch), blocks(arch, preshuffled=True), blocks(arch, kind="wgrad")):
        made, _a, _b = case.make()
        problem = case.problem()
        out = torch.full(problem.out_shape, float("nan"), dtype=torch.bfloat16)
        tensors = GroupedTensors(
            made["a"], made["b"], torch.tensor(case.sizes), out, None, made["a_scale"], made["b_scale"]
        )
        with sim.session(arch=arch, **options) as report:  # type: ignore[arg-type]
            amd.run(problem, None, arch, tensors)
        assert not report.findings, report.findings
        assert torch.equal(out, case.outcome(f"sim:{arch}")[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_preshuffled_and_plain_have_the_same_bits(arch: str) -> None:
    for sizes in (ODD, (0, 0, 7)):
        plain = blocks(arch, sizes=sizes, extra=3).outcome(f"sim:{arch}")[1]
        shuffled = blocks(arch, sizes=sizes, extra=3, preshuffled=True).outcome(f"sim:{arch}")[1]
        assert torch.equal(plain, shuffled)


@pytest.mark.parametrize("arch", ARCHS)
def test_k_of_whole_64s_only(arch: str) -> None:
    """The last 64 of a K tile would be the next 16 rows' first in preshuffled order; here these are NaN codes."""
    case = blocks(arch, K=192, N=160, preshuffled=True)
    assert case.run(f"sim:{arch}").passed


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("arch", ARCHS)
def test_nan_in_a_neighbouring_group_stays_there(arch: str, kind: str) -> None:
    case = blocks(arch, kind=kind, sizes=(7, 9, 140, 3), scale_layout="rows")
    made, _, _ = case.make()
    clean = case.outcome(f"sim:{arch}")[1]
    nan = torch.tensor([float("nan")]).to(made["a"].dtype)
    made["a"][7:16] = nan
    if kind == "wgrad":
        made["b"][7:16] = nan
        out = fw.grouped_gemm_wgrad(
            made["a"], made["b"], torch.tensor(case.sizes), dout_scale=made["a_scale"], x_scale=made["b_scale"],
            dout_scaling="1x128", x_scaling="1x128", backend=f"sim:{arch}",
        )  # fmt: skip
        others = [0, 2, 3]
        assert torch.equal(out[others], clean[others]) and out[1].isnan().all()
        return
    made["b"][1] = nan
    out = fw.grouped_gemm(
        made["a"], made["b"], torch.tensor(case.sizes), trans_b=kind == "forward", a_scale=made["a_scale"],
        b_scale=made["b_scale"], a_scaling="1x128", b_scaling="128x128", backend=f"sim:{arch}",
    )  # fmt: skip
    assert torch.equal(out[:7], clean[:7]) and torch.equal(out[16:], clean[16:]) and out[7:16].isnan().all()


SPLIT_QUICK = (("gfx950", "forward"), ("gfx950", "preshuffled"), ("gfx942", "dgrad"), ("gfx942", "mx"))


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(arch, kind, marks=[] if (arch, kind) in SPLIT_QUICK else [pytest.mark.slow])
        for arch in ARCHS
        for kind in ("forward", "preshuffled", "dgrad", "mx", "plain")
    ],
)
def test_k_split_among_workgroups(arch: str, kind: str) -> None:
    """Parts of whole steps, the last ones shorter or empty; rows in no group; every part counts (blocks differ)."""
    case = blocks(arch, kind="dgrad" if kind == "dgrad" else "forward", extra=3, scale_layout="rows")
    case = replace(case, N=1100) if kind == "dgrad" else replace(case, K=1536 if kind == "preshuffled" else 1100)
    case = replace(case, preshuffled=kind == "preshuffled")
    if kind == "plain":
        case = replace(case, scaling=None)
    if kind == "mx":
        case = replace(case, scaling="1x32")
    smallest = candidates(case.problem(), arch)[-1]
    for split in (2, 5):
        result, out = replace(case, config=replace(smallest, split_k=split), out_dtype=torch.float32).outcome(
            f"sim:{arch}"
        )
        assert result.passed, result
        assert not out[-3:].any()


@pytest.mark.parametrize("arch", ARCHS)
def test_narrow_products_are_split(arch: str) -> None:
    """1280 x 8192, 1 to 96 rows: ten tiles for hundreds of compute units."""
    for rows in (1, 8, 16, 64, 96):
        problem = blocks(arch, sizes=(rows,), N=1280, K=8192).problem()
        config, reasons = default_config(problem, arch)
        assert config.split_k >= 4 and "K split" in reasons[-1]
        assert config.tile_m <= 2 * max(rows, 16)
        shuffled = default_config(replace(problem, b_preshuffled=True), arch)[0]
        assert shuffled.split_k == config.split_k
    assert default_config(blocks(arch, sizes=(4096,), N=4096, K=8192).problem(), arch)[0].split_k == 1


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("groups", [8, 16, 32])
def test_narrow_products_of_several_groups_are_split(arch: str, groups: int) -> None:
    """1280 x 8192, 16 to 96 rows in several groups: unsplit, the busiest compute unit has all 64 K tiles of a tile, or of two."""
    for rows in (16, 32, 64, 96):
        sizes = tuple(rows // groups + (i < rows % groups) for i in range(groups))
        problem = blocks(arch, sizes=sizes, N=1280, K=8192).problem()
        config = default_config(problem, arch)[0]
        whole, split = (
            busiest_unit_steps(problem, each, sizes, NUM_CUS[arch]) for each in (replace(config, split_k=1), config)
        )
        # With 32 groups of one row and more there are 320 tiles, more than the 304 units of gfx942, which one of its workgroups fills.
        if (arch, groups) == ("gfx942", 32) and rows >= 32:
            assert config.split_k == 1 and whole == 128
        else:
            assert config.split_k >= 3 and split <= 0.75 * whole


@pytest.mark.parametrize("arch", ARCHS)
def test_split_products_have_the_same_bits_preshuffled(arch: str) -> None:
    case = blocks(arch, sizes=(9, 2), N=256, K=2048)
    assert default_config(case.problem(), arch)[0].split_k > 1
    plain, shuffled = (replace(case, preshuffled=p).outcome(f"sim:{arch}")[1] for p in (False, True))
    assert torch.equal(plain, shuffled)


@pytest.mark.parametrize("arch", ARCHS)
def test_nan_scales_of_neighbours_stay_there(arch: str) -> None:
    """MX blocks of 32 rows that wholly belong to another group, in K tiles that begin before this one or end behind it."""
    case = blocks(arch, kind="wgrad", scaling="1x32", sizes=(64, 64, 96))
    made, _, _ = case.make()
    call: dict[str, Any] = {"dout_scaling": "1x32", "x_scaling": "1x32", "backend": f"sim:{arch}"}
    clean = case.outcome(f"sim:{arch}")[1]
    sizes = torch.tensor(case.sizes)
    for group in (0, 1):
        scales = [made[name].clone() for name in ("a_scale", "b_scale")]
        for scale in scales:
            scale.view(torch.uint8)[2 * group : 2 * group + 2] = 255
        out = fw.grouped_gemm_wgrad(made["a"], made["b"], sizes, dout_scale=scales[0], x_scale=scales[1], **call)
        others = [each for each in range(3) if each != group]
        assert torch.equal(out[others], clean[others]) and out[group].isnan().all()


@pytest.mark.parametrize("scaling", ["1x32", "blocks"])
@pytest.mark.parametrize("arch", ARCHS)
def test_an_empty_group_inside_a_nan_block_is_zeros(arch: str, scaling: str) -> None:
    """Rows 40 on are others'; the block of rows around 40 has NaN scales, and the empty group there has nothing of it."""
    case = blocks(arch, kind="wgrad", scaling=scaling, sizes=(40, 0, 90))
    made, _, _ = case.make()
    for name in ("a_scale", "b_scale"):
        made[name][0 if scaling == "blocks" else 1] = float("nan")
    call: dict[str, Any] = dict.fromkeys(("dout_scaling", "x_scaling"), case.scalings()[0])
    out = fw.grouped_gemm_wgrad(
        made["a"], made["b"], torch.tensor(case.sizes), dout_scale=made["a_scale"], x_scale=made["b_scale"],
        backend=f"sim:{arch}", **call,
    )  # fmt: skip
    assert not out[1].any() and out[0].isnan().all() and out[2].isnan().all()


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_are_read_when_the_kernel_runs(arch: str) -> None:
    """One compiled launch, m_sizes changed in place, as in replays of a captured graph."""
    case = blocks(arch, scaling=None, K=64, sizes=(3, 30, 7))
    made, a, b = case.make()
    sizes = torch.tensor(case.sizes)
    out = torch.empty(40, case.N, dtype=torch.bfloat16)
    tensors = GroupedTensors(made["a"], made["b"], sizes, out)
    problem = case.problem()
    config = default_config(problem, arch)[0]
    spec = amd.specialise(problem, config, arch)
    for now in ((3, 30, 7), (0, 40, 0), (1, 2, 3), (40, 0, 0)):
        sizes.copy_(torch.tensor(now))
        out.fill_(float("nan"))
        with sim.session(arch=arch, on_finding="raise"):
            amd.run(problem, config, arch, tensors)
            compiled = amd._compiled[spec, ("sim", ("sim", arch))]
        same = replace(case, sizes=now, extra=40 - sum(now))
        assert_within(out, grouped_reference(a, b, now), same._bound(a, b, None, None))
        assert compiled is amd._compiled[spec, ("sim", ("sim", arch))]


@pytest.mark.parametrize("arch", ARCHS)
def test_more_rows_than_there_are_stay_inside(arch: str) -> None:
    """Sizes that are wrong give wrong rows, and touch nothing outside."""
    case = blocks(arch, scaling=None, K=64, sizes=(20, 20))
    made, _, _ = case.make()
    for sizes in ((20, 30), (50, 1), (-5, 40), (2**31 - 1, 2**31 - 1)):
        out = torch.empty(40, case.N, dtype=torch.bfloat16)
        with sim.session(arch=arch, on_finding="raise"):
            amd.run(case.problem(), None, arch, GroupedTensors(made["a"], made["b"], torch.tensor(sizes), out))


BACKENDS = ["native", *(f"sim:{arch}" for arch in ARCHS)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_global_transpose_of_the_scales_is_seen(backend: str) -> None:
    """What the published kernel once got wrong: blocks of each group taken for one [K / 128, M] matrix.

    The same scales in the layout they have are right, and read wrongly, on each side of the call, they are not.
    """
    case = blocks(backend.removeprefix("sim:"))
    assert case.run(backend).passed
    made, a, b = case.make()
    blocks_k = case.K // 128
    wrong = made["a_scale"].view(blocks_k, case.rows).mT.contiguous()
    out = fw.grouped_gemm(
        made["a"], made["b"], torch.tensor(ODD), a_scale=wrong, b_scale=made["b_scale"], a_scaling="1x128",
        b_scaling="128x128", backend=backend,
    )  # fmt: skip
    truth, bound = grouped_reference(a, b, ODD), case._bound(a, b, None, None)
    assert error_ratio(out, truth, bound)[0] > 10
    # And a caller's: all rows' scales as one [K / 128, M] matrix, where the blocks of groups are meant.
    rows = replace(case, scale_layout="rows").make()[0]["a_scale"]
    with fw.use_backend(backend):
        out = torch.ops.fourwave.f8f8bf16_groupwise_grouped(
            made["a"], made["b"], rows.mT.contiguous(), made["b_scale"].mT, torch.tensor(ODD)
        )
    assert error_ratio(out, truth, bound)[0] > 10


def test_the_grid_is_enough_for_any_sizes() -> None:
    codes = FLOAT8["gfx950"][0]
    for M in (1, 3, 16, 17, 128, 129, 1000):
        for G in (1, 2, 7, 257):
            problem = GroupedProblem(G, M, 64, 64, "rows", "TN", codes, codes, torch.bfloat16)
            for config in candidates(problem, "gfx950"):
                worst = [1] * min(G, M)
                worst[0] += M - sum(worst)
                spread = sum(-(-size // config.tile_m) for size in worst)
                left = [1] * min(G, M - 1)
                partly = sum(-(-size // config.tile_m) for size in left) + -(-(M - sum(left)) // config.tile_m)
                columns = -(-64 // config.tile_n)
                assert grid_tiles(problem, config) >= columns * max(spread, partly)


@pytest.mark.parametrize("arch", ARCHS)
def test_refusals(arch: str) -> None:
    codes = FLOAT8[arch][0]
    problem = GroupedProblem(4, 512, 256, 256, "rows", "TN", codes, codes, torch.bfloat16)
    other = FLOAT8["gfx942" if arch == "gfx950" else "gfx950"][0]
    bad = (
        (replace(problem, a_dtype=other), "reads codes as"),
        (replace(problem, a_dtype=torch.float32, b_dtype=torch.float32), "take bfloat16, float16 and 8-bit floats"),
        (replace(problem, a_scaling="1x32", b_scaling="tensor"), "1x32 x tensor are not in this kernel"),
        (replace(problem, a_scaling="1x32", b_scaling="1x32", a_dtype=FLOAT8["gfx942"][0]), "MX formats have codes as"),
        (replace(problem, a_scaling="1x128", b_scaling="1x128"), "1x128 x 1x128 are not in this kernel"),
        (replace(problem, K=2**31 - 1), "limit of a tile|32-bit"),
        (replace(problem, M=2**30, N=2**20, a_scaling="tensor", b_scaling="tensor"), "fewer than 2**32 threads"),
    )
    assert why_unsupported(problem, None, arch) is None
    for each, message in bad:
        why = why_unsupported(each, candidates(problem, arch)[0], arch)
        assert why is not None and any(part in why for part in message.split("|")), (why, message)
    config = candidates(problem, arch)[0]
    for field, value in (
        ("tile_m", 24),
        ("waves_m", 3),
        ("tile_k", 100),
        ("num_stages", 1),
        ("tile_n", 512),
        ("split_k", 33),
    ):
        assert why_unsupported(problem, replace(config, **{field: value}), arch) is not None, field


@pytest.mark.parametrize("arch", ["gfx950", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_groups_begin_at_different_k(arch: str) -> None:
    """Nine groups and a K of many steps: whatever the order, every block counts once; tails in the last step."""
    for more in ({"K": 4096 + 200}, {"K": 4096 + 192, "preshuffled": True}, {"K": 2048, "scaling": None}):
        case = replace(blocks(arch, sizes=(3, 1, 0, 2, 1, 1, 1, 2, 4), scale_layout="rows"), **more)  # type: ignore[arg-type]
        config = replace(candidates(case.problem(), arch)[-1], split_k=1)
        result = replace(case, config=config, out_dtype=torch.float32).run(f"sim:{arch}")
        assert result.passed, result


@pytest.mark.parametrize("preshuffled", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_groups_sum_k_from_different_eighths_on(arch: str, preshuffled: bool) -> None:
    """K is a power of two: groups that read the same columns at once would meet at a few memory channels.

    Blocks of 128 k add 1 each, but for the first, which adds 2**24: the ones that come after it are lost in float32.
    """
    groups, K, tile_n = 9, 4096, 128
    case = blocks(arch, sizes=(1,) * groups, K=K, N=tile_n, scale_layout="rows", preshuffled=preshuffled)
    problem = replace(case.problem(), out_dtype=torch.float32)
    config = replace(candidates(problem, arch)[-1], split_k=1)
    step = tiles_per_step(problem, config, arch)
    block = torch.ones(K // 128)
    block[0] = 2.0**24
    expected = []
    for group in range(groups):
        first = group % 8 * (K // 128 // step) // 8 * step
        total = torch.tensor(0.0)
        for value in block.roll(-first):
            total = total + value
        expected.append(float(total))
    assert len(set(expected)) == 8
    a = torch.zeros(groups, K).to(case.codes)
    a[:, ::128] = torch.ones(groups, K // 128).to(case.codes)
    b = torch.ones(groups, tile_n, K).to(case.codes)  # the same in preshuffled order
    out = torch.full((groups, tile_n), float("nan"))
    tensors = GroupedTensors(
        a,
        b,
        torch.tensor(case.sizes),
        out,
        None,
        block.expand(groups, -1).contiguous(),
        torch.ones(groups, 1, K // 128),
    )
    with sim.session(arch=arch, on_finding="raise"):
        amd.run(problem, config, arch, tensors)
    assert torch.equal(out, torch.tensor(expected)[:, None].expand(-1, tile_n))


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("wait_loads", lambda wait, in_flight: wait(in_flight=in_flight + 1)),
        ("barrier", lambda barrier: None),
        ("wait_lds", lambda wait: None),
        ("num_tiles", lambda count, size, tile: count(size, tile) - 1),
    ],
)  # fmt: skip
def test_broken_kernels_are_seen(name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for one load too few, no barriers, no waits for LDS reads, and the last step left out."""
    from fourwave.ops.grouped_gemm import cdna4

    monkeypatch.setattr(cdna4, name, functools.partial(broken, getattr(cdna4, name)))
    monkeypatch.setattr(amd, "_compiled", {})
    case = blocks("gfx950", sizes=(20, 3), K=1152)
    config = replace(candidates(case.problem(), "gfx950")[1], split_k=1)
    try:
        result = replace(case, config=config).run("sim:gfx950")
    except sim.SimulationError:
        return
    assert not result.passed
