"""The Hopper grouped kernels: configurations, every tile against float64, sizes that only the device knows."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.backends.hopper import cutedsl_missing
from fourwave.ops.gemm.sm90_config import NUM_SMS
from fourwave.ops.grouped_gemm import sm90_launch
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.sm90_choice import default_config
from fourwave.ops.grouped_gemm.sm90_config import HopperGroupedConfig, why_unsupported
from fourwave.ops.grouped_gemm.sm90_tiles import candidates, rows_tile, swapped, with_other
from fourwave.testing import bounds
from fourwave.testing.grouped_cases import SIZES, GroupedCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))


def problem(G: int = 8, M: int = 1024, N: int = 2048, K: int = 7168) -> GroupedProblem:
    return GroupedProblem(
        G, M, N, K, "rows", "TN", E4M3, E4M3, BF16, device_type="cuda", a_scaling="1x128", b_scaling="128x128"
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Rules: no GPU, no DSL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile_m": 64}, "128 or 256"),
        ({"tile_n": 72}, "multiples of 16"),
        ({"tile_k": 64}, "128 bytes"),
        ({"tile_m": 256, "tile_n": 256}, "accumulators"),
        ({"num_stages": 1}, "at least 2"),
        ({"num_stages": 8}, "bytes of shared memory"),
        ({"cluster_n": 4}, "1 or 2 CTAs"),
        ({"cluster_n": 2, "cluster_m": 2}, "1 or 2 CTAs"),
        ({"tile_m": 256, "cluster_m": 2, "num_stages": 4}, "of 128 only"),
        ({"tile_n": 80, "late": True}, "late: "),
        ({"split": 2}, "only a swapped tile"),
        ({"schedule": "pingpong"}, "rows and swapped"),
        ({"schedule": "swapped", "tile_m": 136}, "up to 128"),
        ({"schedule": "swapped", "tile_n": 12}, "multiples of 8"),
        ({"schedule": "swapped", "split": 3, "num_stages": 3}, "1, 2, 4 or 8"),
        ({"band": 0}, "at least 1"),
        ({"other_n": 64}, "num_stages=0"),
        ({"other_n": 72, "other_stages": 4}, "multiples of 16"),
        ({"other_n": -16, "other_stages": 4}, "at least 1"),
        ({"other_n": 192, "other_stages": 8}, "bytes of shared memory"),
        ({"tile_m": 256, "num_stages": 4, "other_n": 144, "other_stages": 3}, "accumulators"),
        ({"other_m": 64, "other_stages": 4}, "128 or 256"),
        ({"turned": True, "other_stages": 4}, "below each other"),
        ({"narrow": True, "cluster_m": 2}, "do not share b"),
        ({"narrow": True, "tile_n": 144}, "multiples of 32"),
        ({"schedule": "swapped", "other_n": 64, "other_stages": 4}, "another height"),
        ({"schedule": "swapped", "tile_m": 16, "other_m": 12, "other_stages": 4}, "multiples of 8"),
        ({"schedule": "swapped", "tile_m": 16, "single": True}, "more than a tile of one group"),
    ],
)
def test_configs_that_the_kernels_cannot_run_are_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    assert why_unsupported(problem(), HopperGroupedConfig()) is None
    assert said in (why_unsupported(problem(), replace(HopperGroupedConfig(), **change)) or "")  # type: ignore[arg-type]


def test_problems_that_the_kernels_cannot_run_are_refused_with_the_reason() -> None:
    assert "at most 1024 groups" in (why_unsupported(problem(G=1025), None) or "")
    assert "AMD" in (why_unsupported(replace(problem(), b_preshuffled=True), None) or "")
    assert "K contiguous" in (why_unsupported(replace(problem(), layout="NN"), None) or "")
    mx = replace(problem(), a_scaling="1x32", b_scaling="1x32")
    assert "does not multiply such a pair" in (why_unsupported(mx, None) or "")
    wgrad = GroupedProblem(
        2, 8, 8, 8, "reduction", "NT", E4M3, E4M3, FP32, device_type="cuda", a_scaling="row", b_scaling="row"
    )
    assert "K contiguous" in (why_unsupported(wgrad, None) or "")
    assert why_unsupported(replace(wgrad, layout="TN"), None) is None
    sixteen = replace(wgrad, a_dtype=BF16, b_dtype=BF16, a_scaling=None, b_scaling=None)
    assert why_unsupported(sixteen, None) is None and why_unsupported(replace(sixteen, layout="TN"), None) is None
    assert "one for both" in (why_unsupported(replace(sixteen, b_dtype=FP16), None) or "")
    few = swapped(wgrad, 8, 64)
    assert "there are none" in (why_unsupported(replace(wgrad, layout="TN"), few) or "")
    assert "HopperGroupedConfig" in (why_unsupported(problem(), object()) or "")  # type: ignore[arg-type]
    mixed = GroupedProblem(2, 8, 8, 8, "rows", "TN", BF16, FP16, BF16, device_type="cuda")
    assert "one for both" in (why_unsupported(mixed, None) or "")


def test_the_default_is_one_of_the_candidates_and_allowed() -> None:
    for G, M, N, K in [
        (1, 1, 1, 1),
        (8, 128, 1280, 8192),
        (8, 16384, 2048, 7168),
        (1024, 1024, 64, 256),
        (3, 5, 264, 136),
    ]:
        for split, layout, dtype in (
            ("rows", "TN", E4M3), ("rows", "TN", BF16), ("rows", "NN", BF16), ("reduction", "NT", BF16), ("reduction", "TN", E4M3),
        ):  # fmt: skip
            b_scaling = "128x128" if split == "rows" else "1x128"
            scaled = {"a_scaling": "1x128", "b_scaling": b_scaling} if dtype == E4M3 else {}
            p = GroupedProblem(G, M, N, K, split, layout, dtype, dtype, BF16, device_type="cuda", **scaled)  # type: ignore[arg-type]
            config, reasons = default_config(p)
            alone = replace(config, other_n=0, other_m=0, other_stages=0, turned=False, narrow=False)
            assert alone in candidates(p)
            assert why_unsupported(p, config) is None
            assert reasons


def test_problems_that_no_tile_is_for_have_no_candidates() -> None:
    for p in (problem(1025, 4096), problem(8, 0), replace(problem(), split="reduction", G=1025)):
        assert candidates(p) == ()
    assert "1025" in (why_unsupported(problem(1025, 4096), None) or "")


def test_few_rows_take_swapped_tiles_and_many_do_not() -> None:
    assert default_config(problem(8, 64, 1280, 8192))[0].schedule == "swapped"
    assert default_config(problem(8, 16384, 2048, 7168))[0].schedule == "rows"


def test_one_group_of_few_rows_has_a_cluster_for_each_tile_where_there_are_as_many() -> None:
    p = problem(1, 16, 2048, 7168)
    config = default_config(p)[0]
    assert config.single and config.split > 1
    assert sm90_launch._on_device(p, config, 132) == config
    assert sm90_launch._on_device(p, config, 66) == replace(config, single=False)
    assert not any(default_config(problem(G, M))[0].single for G, M in ((2, 2), (1, 4096)))


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
def test_kernels_compile_without_a_gpu() -> None:
    p = problem()
    row = replace(p, a_scaling="row", b_scaling="row")
    sixteen = replace(p, a_dtype=BF16, b_dtype=BF16, a_scaling=None, b_scaling=None)
    dgrad = replace(sixteen, layout="NN")
    wgrad = GroupedProblem(8, 512, 1024, 4096, "reduction", "NT", BF16, BF16, FP32, None, True, device_type="cuda")
    blocks = replace(wgrad, layout="TN", a_dtype=E4M3, b_dtype=E4M3, a_scaling="1x128", b_scaling="1x128")
    for config_problem, config in (
        (p, swapped(p, 16, 80)), (p, rows_tile(p, 256, 128, 2)), (p, rows_tile(p, 128, 112, 1, 2)), (p, rows_tile(p, 128, 192, 1, 2, late=True)),
        (p, with_other(p, rows_tile(p, 128, 80, 2), 128)), (p, replace(with_other(p, rows_tile(p, 256, 128), 192, 128), narrow=True)),
        (p, replace(with_other(p, rows_tile(p, 128, 160, 1, 2), 192, turned=True), narrow=True)), (p, with_other(p, swapped(p, 16, 80), 0, 48)), (row, rows_tile(row, 128, 144)),
        (replace(row, fast_accum=True), swapped(row, 16, 80)), (sixteen, swapped(sixteen, 16, 80, 2)), (sixteen, rows_tile(sixteen, 128, 256, 2)),
        (dgrad, swapped(dgrad, 8, 64)), (dgrad, rows_tile(dgrad, 128, 256, 1, 2)), (wgrad, default_config(wgrad)[0]),
        (wgrad, rows_tile(wgrad, 128, 128, 2)), (wgrad, rows_tile(wgrad, 128, 256, 1, 2)), (blocks, rows_tile(blocks, 128, 128, 1, 2)),
    ):  # fmt: skip
        spec = sm90_launch.specialise(config_problem, config)
        assert sm90_launch.compile_kernel(spec) is not None, f"{config_problem}, {config}"


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def run_case(case: GroupedCase, config: HopperGroupedConfig | None = None) -> None:
    if case.codes == E4M3:
        case = replace(case, u_acc=bounds.hopper_fp8_u_acc(case.reduction, True))
    result = case.run("hopper", "cuda", **({} if config is None else {"config": config}))
    assert result.passed, f"{case}, {config}: {result}"


@functools.lru_cache(maxsize=4)
def made(case: Kept) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    return GroupedCase.make(case)


@dataclass(frozen=True)
class Kept(GroupedCase):
    """A case whose operands are made once for all the tiles that it is tried with: hundreds of groups take seconds."""

    def make(self) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        return made(self)


BLOCKS = Kept("forward", (), 264, 400, scaling="blocks", extra=3)
SHAPES = (
    ("swapped", 8, 128, 1), ("swapped", 8, 40, 2), ("swapped", 16, 80, 1), ("swapped", 32, 72, 4), ("swapped", 64, 64, 1),
    ("swapped", 64, 96, 2), ("swapped", 128, 128, 1), ("swapped", 24, 112, 1), ("rows", 128, 128, 1), ("rows", 128, 128, 2),
    ("rows", 128, 192, 1), ("rows", 256, 128, 1), ("rows", 256, 128, 2), ("rows", 128, 64, 1), ("rows", 128, 192, 1, 2),
    ("rows", 128, 80, 1), ("rows", 128, 112, 2), ("rows", 128, 144, 1, 2), ("rows", 128, 160, 2),
)  # fmt: skip
WIDE = (("rows", 128, 256, 1), ("rows", 128, 256, 2), ("rows", 128, 256, 1, 2))  # for products without promotion


def config_of(p: GroupedProblem, shape: tuple[Any, ...]) -> HopperGroupedConfig:
    """shape: schedule, tile_m, tile_n, then split, or cluster_n and cluster_m."""
    return swapped(p, *shape[1:]) if shape[0] == "swapped" else rows_tile(p, *shape[1:])


@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "groups"])
@pytest.mark.parametrize("sizes", ["odd", "last", "decode", "64 random", "257 of 1"])
def test_tiles(sizes: str, layout: str, shape: tuple[Any, ...]) -> None:
    case = replace(
        BLOCKS, sizes=SIZES[sizes], scale_layout=layout, sizes_dtype=torch.int32 if layout == "rows" else torch.int64
    )
    run_case(case, config_of(case.problem("cuda"), shape))


@on_gpu
@pytest.mark.parametrize("shape", SHAPES + WIDE, ids=str)
@pytest.mark.parametrize(("kind", "dtype"), [("forward", FP16), ("dgrad", BF16)])
def test_sixteen_bit(kind: str, dtype: torch.dtype, shape: tuple[Any, ...]) -> None:
    case = GroupedCase(kind, (5, 130, 0, 1, 300), 264, 200, dtype=dtype, extra=2)
    p = case.problem("cuda")
    config = config_of(p, shape)
    if (why := why_unsupported(p, config)) is not None:
        pytest.skip(why)
    run_case(case, config)


@on_gpu
@pytest.mark.parametrize(
    ("N", "out_dtype", "bias_dtype"),
    [(264, FP32, None), (201, FP32, BF16), (264, BF16, FP32), (201, BF16, None), (264, FP16, BF16), (201, FP16, FP16)],
)
@pytest.mark.parametrize("scaling", ["blocks", "tensor", None])
def test_outputs(scaling: str | None, N: int, out_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    for sizes in ((5, 130, 0, 1), (3, 1, 2)):
        case = GroupedCase(
            "forward", sizes, N, 272, scaling=scaling, out_dtype=out_dtype, bias_dtype=bias_dtype, extra=1
        )
        run_case(case)
    p = case.problem("cuda")
    run_case(case, rows_tile(p, 256, 128))


@on_gpu
@pytest.mark.parametrize("K", [16, 136, 512, 1000, 1100])
@pytest.mark.parametrize("sizes", [(300, 300), (7, 0, 9), (0, 0), (1,)])
def test_reductions(sizes: tuple[int, ...], K: int) -> None:
    run_case(replace(BLOCKS, sizes=sizes, K=K, sliced=True))


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [16, 300])
def test_scales_of_rows_and_tensors(rows: int, fast: bool) -> None:
    a, b = torch.randn(2 * rows, 400, device="cuda"), torch.randn(2, 136, 400, device="cuda")
    sizes = torch.tensor([rows - 3, rows + 1], device="cuda")
    for name in ("fp8_row", "fp8_e4m3"):
        qa, qb = fw.quantize(a, name), fw.quantize(b, name)
        out = fw.grouped_gemm(qa, qb, sizes, fast_accum=fast, backend="hopper")
        x, w = qa.dequantize(torch.float64), qb.dequantize(torch.float64).view(2, 136, 400)
        u_acc = bounds.hopper_fp8_u_acc(400, not fast)
        for g, (first, last) in enumerate(((0, rows - 3), (rows - 3, 2 * rows - 2))):
            bound = bounds.gemm_bound(x[first:last], w[g], BF16, u_acc=u_acc, scaled=True)
            bounds.assert_within(out[first:last], x[first:last] @ w[g].mT, bound, name)
        assert not out[2 * rows - 2 :].any()


@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_tiles_for_each_cta(shape: tuple[Any, ...]) -> None:
    """More tiles than CTAs, stages that wrap, groups that begin anywhere."""
    case = GroupedCase(
        "forward", (70, 1, 0, 333, 129, 500), 2000, 520, scaling="blocks", extra=70, scale_layout="groups"
    )
    run_case(case, config_of(case.problem("cuda"), shape))


@on_gpu
@pytest.mark.parametrize("scaling", ["rows", "groups", None])
@pytest.mark.parametrize(("K", "num_stages"), [(100, 4), (512, 4), (1100, 2), (1100, 5), (2048, 4), (2048, 3)])
@pytest.mark.parametrize("shape", [(128, 192, 1, 2), (128, 144), (256, 128)], ids=str)
def test_steps_of_a_tile(shape: tuple[int, ...], K: int, num_stages: int, scaling: str | None) -> None:
    """Multiples of the steps whose scales come together and others; as many stages, whose places are known when compiled, and others."""
    sizes = (70, 1, 0, 333, 129, 500, 128, 256)
    case = replace(BLOCKS, sizes=sizes, N=2000, K=K, scale_layout=scaling or "rows")
    if scaling is None:
        case = Kept("forward", sizes, 2000, K, scaling="tensor", extra=3)
    p = case.problem("cuda")
    deepest = rows_tile(p, *shape)
    run_case(case, replace(deepest, num_stages=min(num_stages, deepest.num_stages)))


@on_gpu
@pytest.mark.parametrize(("out_dtype", "bias_dtype", "layout"), [(BF16, None, "groups"), (FP16, FP32, "rows")])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("tile_n", [64, 128, 192])
@pytest.mark.parametrize("K", [512, 2000])
def test_tiles_that_are_stored_late(
    K: int, tile_n: int, cluster: tuple[int, int], out_dtype: torch.dtype, bias_dtype: torch.dtype | None, layout: str
) -> None:
    """Groups that end within a warp's 16 rows and with them, a pair's second CTA without rows, columns past the last, more tiles than CTAs."""
    sizes = (70, 1, 0, 333, 129, 500, 128, 256, 16, 48, 1000)
    case = replace(BLOCKS, sizes=sizes, N=2000, K=K, scale_layout=layout, out_dtype=out_dtype, bias_dtype=bias_dtype)
    p = case.problem("cuda")
    run_case(case, rows_tile(p, 128, tile_n, *cluster, late=True))


@on_gpu
@pytest.mark.parametrize("sizes", [(256, 256, 512), (70, 1, 0, 333, 129, 500)], ids=["even", "uneven"])
def test_tiles_that_are_stored_late_or_others(sizes: tuple[int, ...]) -> None:
    case = replace(BLOCKS, sizes=sizes, N=2000, K=1000)
    p = case.problem("cuda")
    config = with_other(p, rows_tile(p, 128, 192, 1, 2, late=True), turned=True)
    assert config.late
    run_case(case, replace(config, narrow=True))


@on_gpu
@pytest.mark.parametrize("late", [False, True])
def test_results_that_begin_anywhere(late: bool) -> None:
    """Rows of out at multiples of 2 bytes: whatever the configuration says, TMA cannot store those."""
    case = replace(BLOCKS, sizes=(70, 129), N=201, K=512)
    run_case(case, rows_tile(case.problem("cuda"), 128, 192, late=late))


@on_gpu
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("sizes", [(70, 1, 0, 100, 90), (70, 1, 0, 333, 129)], ids=["four tiles high", "seven"])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_two_widths(dtype: torch.dtype | None, sizes: tuple[int, ...], cluster: tuple[int, int]) -> None:
    """Where there are four tiles of 128 rows, those of 80 columns take one round of 132 multiprocessors, where there are seven, two."""
    case = replace(BLOCKS, sizes=sizes, N=2000, K=1100, scale_layout="groups")
    if dtype is not None:
        case = Kept("forward", sizes, 2000, 400, dtype=dtype, extra=3)
    p = case.problem("cuda")
    run_case(case, with_other(p, rows_tile(p, 128, 80, *cluster), 128))


# What a kernel has besides its tiles: (tile, what with_other takes).
OTHERS = (
    ((256, 128), (192, 128)), ((256, 128, 2), (160, 128)), ((128, 192, 1, 2), (192, 0, True)), ((128, 160, 1, 2), (128, 0, True)),
    ((128, 128, 2), (192,)), ((128, 112, 2), (96,)),
)  # fmt: skip
# Groups of which most end with few rows, and groups that fill tiles of 256 rows: the other tiles are taken for some, not for others.
UNEVEN = {
    "few": (1, 0, 64, 65, 129, 192, 193, 257, 33, 0, 128), "many": (70, 1, 0, 333, 129, 500, 128, 256, 257, 384, 385, 1),
    "full": (256, 512, 256, 256), "halves": (128, 384, 640, 128, 0, 128, 384, 128), "one": (64,), "none": (0, 0),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("layout", ["rows", "groups", None])
@pytest.mark.parametrize("K", [400, 1100])
@pytest.mark.parametrize("sizes", UNEVEN, ids=str)
@pytest.mark.parametrize(("tile", "other"), OTHERS, ids=str)
def test_other_tiles(tile: tuple[int, ...], other: tuple[Any, ...], sizes: str, K: int, layout: str | None) -> None:
    """Of another height or width, or that share a and not b; those of few rows by columns, last."""
    case = replace(BLOCKS, sizes=UNEVEN[sizes], N=2000, K=K, scale_layout=layout or "rows")
    if layout is None:
        case = Kept("forward", UNEVEN[sizes], 2000, K, scaling="tensor", extra=3)
    p = case.problem("cuda")
    run_case(case, replace(with_other(p, rows_tile(p, *tile), *other), narrow=True))


@on_gpu
@pytest.mark.parametrize("layout", ["rows", "groups", None])
@pytest.mark.parametrize("K", [400, 1100])
@pytest.mark.parametrize("sizes", [*UNEVEN, "64 random", "257 of 1"], ids=str)
@pytest.mark.parametrize("tile", [(128, 192), (128, 160, 2), (128, 64, 2), (256, 128)], ids=str)
def test_tiles_of_few_rows(tile: tuple[int, ...], sizes: str, K: int, layout: str | None) -> None:
    """The same without other tiles; more groups than there is a table for have them where the others are."""
    case = replace(BLOCKS, sizes=UNEVEN.get(sizes) or SIZES[sizes], N=520, K=K, scale_layout=layout or "rows")
    if layout is None:
        case = Kept("forward", case.sizes, 520, K, scaling="row", extra=3)
    run_case(case, replace(rows_tile(case.problem("cuda"), *tile), narrow=True))


@on_gpu
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("sizes", [(10, 3, 6, 4, 0), (43, 3, 6, 4, 0)], ids=["even", "uneven"])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_two_heights(dtype: torch.dtype | None, sizes: tuple[int, ...], split: int) -> None:
    """A group of 43 rows makes a second round of tiles of 16 rows."""
    case = replace(BLOCKS, sizes=sizes, N=2000, K=1100, scale_layout="groups")
    if dtype is not None:
        case = Kept("forward", sizes, 2000, 400, dtype=dtype, extra=3)
    p = case.problem("cuda")
    run_case(case, with_other(p, swapped(p, 16, 80, split), 0, 48))


@on_gpu
@pytest.mark.parametrize("layout", ["rows", "groups"])
@pytest.mark.parametrize("tile", [(256, 128), (128, 192, 1, 2)], ids=str)
@pytest.mark.parametrize("K", [400, 1100])
@pytest.mark.parametrize("sizes", ["many", "odd", "257 of 1"])
def test_orders_of_tiles_and_consumers(sizes: str, K: int, tile: tuple[int, ...], layout: str) -> None:
    """256 rows of a cluster: those with few come last, consumer 1 starts late; groups with and without such tiles."""
    many = (70, 1, 0, 333, 129, 500, 128, 256, 257, 384, 385, 1)
    case = replace(BLOCKS, sizes=many if sizes == "many" else SIZES[sizes], K=K, scale_layout=layout)
    run_case(case, rows_tile(case.problem("cuda"), *tile))


@on_gpu
@pytest.mark.parametrize("rows", [0, 1, 7, 16])
@pytest.mark.parametrize("scaling", ["rows", "groups", "tensor", "row", None])
@pytest.mark.parametrize("K", [400, 1100, 2048])
@pytest.mark.parametrize(
    "shape",
    [
        ("swapped", 24, 32, 2),
        ("swapped", 24, 72, 4),
        ("swapped", 24, 16, 1),
        ("swapped", 16, 40, 2),
        ("swapped", 16, 128, 1),
    ],
    ids=str,
)
def test_one_group(shape: tuple[Any, ...], K: int, scaling: str | None, rows: int) -> None:
    """No table of groups; CTAs that share a tile send each other their sums; rows past the last."""
    if scaling is None:
        case = Kept("forward", (rows,), 520, K, dtype=BF16)
    elif scaling in ("rows", "groups"):
        case = replace(BLOCKS, sizes=(rows,), N=520, K=K, scale_layout=scaling, extra=0)
    else:
        case = Kept("forward", (rows,), 520, K, scaling=scaling)
    case = replace(case, extra=shape[1] - rows)
    config = config_of(case.problem("cuda"), shape)
    assert config.single
    run_case(case, config)


@on_gpu
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "shape", [("swapped", 8, 40, 1), ("swapped", 64, 40, 2), ("rows", 256, 128), ("rows", 128, 80)], ids=str
)
def test_few_stages(shape: tuple[Any, ...], num_stages: int) -> None:
    """Steps whose products are under way together are no more than there are stages."""
    case = replace(BLOCKS, sizes=(70, 1, 0, 333), K=1100, scale_layout="groups")
    run_case(case, replace(config_of(case.problem("cuda"), shape), num_stages=num_stages))


def quantized(sizes: list[int], N: int, K: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    random = torch.Generator("cuda").manual_seed(seed)
    a = torch.randn(sum(sizes), K, device="cuda", generator=random).to(E4M3)
    b = torch.randn(len(sizes), N, K, device="cuda", generator=random).to(E4M3)
    a_scale = torch.rand(sum(sizes), -(-K // 128), device="cuda", generator=random) + 0.5
    b_scale = torch.rand(len(sizes), -(-N // 128), -(-K // 128), device="cuda", generator=random) + 0.5
    return a, b, a_scale, b_scale, torch.tensor(sizes, device="cuda")


@on_gpu
@pytest.mark.parametrize("rows", [8, 200])
def test_sizes_edited_between_replays_take_effect(rows: int) -> None:
    a, b, a_scale, b_scale, sizes = quantized([rows, rows, rows], 256, 512)
    out = torch.empty(3 * rows, 256, device="cuda", dtype=BF16)

    def call() -> None:
        fw.grouped_gemm(
            a,
            b,
            sizes,
            a_scale=a_scale,
            b_scale=b_scale,
            a_scaling="1x128",
            b_scaling="128x128",
            out=out,
            backend="hopper",
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for new in ([rows, rows, rows], [2 * rows, 0, rows], [0, 1, 2], [0, 0, 3 * rows], [0, 0, 0]):
        sizes.copy_(torch.tensor(new))
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        call()
        assert torch.equal(got, out)
        values = a.double() * a_scale.double().repeat_interleave(128, 1)
        weights = b.double() * b_scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        start = 0
        for g, size in enumerate(new):
            x, w = values[start : start + size], weights[g]
            bound = bounds.gemm_bound(x, w, BF16, u_acc=bounds.hopper_fp8_u_acc(512, True), scaled=True)
            bounds.assert_within(got[start : start + size], x @ w.mT, bound)
            start += size
        assert not got[start:].any()


@on_gpu
def test_impossible_sizes_touch_nothing_outside() -> None:
    a, b, a_scale, b_scale, _ = quantized([40, 40], 256, 256)
    for bad in ([-5, 1000], [2**31 - 1, 2**31 - 1], [80, 80], [-(2**40), 2**40]):
        wide = torch.full((100, 256), 7.0, device="cuda", dtype=BF16)
        fw.grouped_gemm(
            a, b, torch.tensor(bad, device="cuda"), a_scale=a_scale, b_scale=b_scale, a_scaling="1x128", b_scaling="128x128",
            out=wide[10:90], backend="hopper",
        )  # fmt: skip
        torch.cuda.synchronize()
        assert (wide[:10] == 7).all() and (wide[90:] == 7).all()


@on_gpu
@pytest.mark.parametrize("sizes", [[3, 0, 9, 20], [130, 700, 1, 0]])
def test_a_neighbours_nan_stays_there(sizes: list[int]) -> None:
    a, b, a_scale, b_scale, m_sizes = quantized(sizes, 264, 384)
    scaled: dict[str, Any] = {
        "a_scale": a_scale,
        "b_scale": b_scale,
        "a_scaling": "1x128",
        "b_scaling": "128x128",
        "backend": "hopper",
    }
    before = fw.grouped_gemm(a, b, m_sizes, **scaled)
    start = 0
    for size in sizes:
        spoiled = a.clone()
        spoiled[:start], spoiled[start + size :] = float("nan"), float("nan")
        after = fw.grouped_gemm(spoiled, b, m_sizes, **scaled)
        assert torch.equal(before[start : start + size], after[start : start + size])
        start += size


@on_gpu
@pytest.mark.parametrize("sizes", [[16] * 8, [300, 0, 700, 5]])
def test_repeats_and_streams_give_the_same_bits(sizes: list[int]) -> None:
    a, b, a_scale, b_scale, m_sizes = quantized(sizes, 1280, 1024)
    scaled: dict[str, Any] = {
        "a_scale": a_scale,
        "b_scale": b_scale,
        "a_scaling": "1x128",
        "b_scaling": "128x128",
        "backend": "hopper",
    }
    first = fw.grouped_gemm(a, b, m_sizes, **scaled)
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    outs = [torch.empty_like(first) for _ in range(2)]
    for _ in range(500):
        fw.grouped_gemm(a, b, m_sizes, out=outs[0], **scaled)
        with torch.cuda.stream(other):
            fw.grouped_gemm(a, b, m_sizes, out=outs[1], **scaled)
    torch.cuda.synchronize()
    assert torch.equal(first, outs[0]) and torch.equal(first, outs[1])


def repeated(what: str) -> tuple[GroupedProblem, HopperGroupedConfig | None, GroupedTensors]:
    """A call of each kernel, with groups of any size and rows past the last."""
    random = torch.Generator("cuda").manual_seed(0)
    few = what.startswith("swapped")
    sizes = [13] if "single" in what else [3, 0, 17, 1, 8, 2] if few else [300, 0, 700, 5, 129, 64]
    M, N, K = sum(sizes) + 3, 1280, 1040
    m_sizes = torch.tensor(sizes, device="cuda")

    def operand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=random).to(dtype)

    def scale(shape: tuple[int, ...] | None) -> torch.Tensor | None:
        return None if shape is None else torch.rand(shape, device="cuda", generator=random) + 0.5

    wgrad = what.startswith("wgrad")
    dtype = BF16 if "16" in what else E4M3
    if wgrad:
        scaling = None if dtype == BF16 else "1x128"
        layout = "NT" if dtype == BF16 else "TN"
        p = GroupedProblem(
            len(sizes), 264, N, -(-M // 16) * 16, "reduction", layout, dtype, dtype, FP32, device_type="cuda", a_scaling=scaling,
            b_scaling=scaling,
        )  # fmt: skip
    else:
        scaled = {} if dtype == BF16 else {"a_scaling": "1x128", "b_scaling": "128x128"}
        layout = "NN" if "dgrad" in what else "TN"
        p = GroupedProblem(len(sizes), M, N, K, "rows", layout, dtype, dtype, BF16, device_type="cuda", **scaled)  # type: ignore[arg-type]
    tensors = GroupedTensors(
        operand(dtype, *p.a_shape), operand(dtype, *p.b_shape), m_sizes, torch.empty(0), None, scale(p.a_scale_shape),
        scale(p.b_scale_shape),
    )  # fmt: skip
    config = None
    if not wgrad:
        shapes: dict[str, tuple[Any, ...]] = {
            "swapped": ("swapped", 16, 80, 1),
            "swapped split": ("swapped", 16, 64, 4),
            "swapped single": ("swapped", 16, 40, 2),
            "rows": ("rows", 256, 128, 1),
        }
        shapes |= {"rows 128": ("rows", 128, 128, 1), "rows pairs": ("rows", 256, 128, 2)}
        shapes |= {"rows wide": ("rows", 128, 192, 1, 2), "rows widest": ("rows", 128, 256, 1, 2)}
        if what.startswith("rows others"):
            tile = rows_tile(p, 128, 192, 1, 2) if what.endswith("pairs") else rows_tile(p, 256, 128)
            return (
                p,
                replace(with_other(p, tile, 192, 0 if tile.cluster_m > 1 else 128, tile.cluster_m > 1), narrow=True),
                tensors,
            )
        config = config_of(p, shapes[what.removesuffix(" bf16").removesuffix(" dgrad")])
    elif what.endswith("pairs"):
        config = rows_tile(p, 128, 128, 1, 2)
    return p, config, tensors


@on_gpu
@pytest.mark.parametrize(
    "what",
    [
        "swapped",
        "swapped split",
        "swapped single",
        "rows",
        "rows 128",
        "rows pairs",
        "rows wide",
        "rows others",
        "rows others pairs",
        "rows widest bf16",
        "rows widest dgrad bf16",
        "rows 128 bf16",
        "rows 128 dgrad bf16",
        "wgrad bf16",
        "wgrad fp8",
        "wgrad bf16 pairs",
        "wgrad fp8 pairs",
    ],
)
def test_a_thousand_repeats_on_two_streams(what: str) -> None:
    """Each of 1000 results on each of two streams at once, bit by bit against the first, from an output of NaN."""
    p, config, tensors = repeated(what)
    first = torch.full(p.out_shape, float("nan"), device="cuda", dtype=p.out_dtype)
    sm90_launch.run(p, config, tensors._replace(out=first))
    assert not first.isnan().any()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [torch.empty_like(first) for _ in streams]
    wrong = [torch.zeros((), device="cuda", dtype=torch.int64) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(1000):
        for stream, out, count in zip(streams, outs, wrong, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                sm90_launch.run(p, config, tensors._replace(out=out))
                count.add_((out != first).any())
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


@on_gpu
def test_operator_and_plain_call_agree() -> None:
    sizes = [5, 0, 130, 60]
    a, b, a_scale, b_scale, m_sizes = quantized(sizes, 256, 384)
    from fourwave.testing.grouped_cases import group_scales

    blocks = group_scales(a_scale.cpu(), sizes).cuda()
    with fw.use_backend("hopper"):
        out = torch.ops.fourwave.f8f8bf16_groupwise_grouped(a, b, blocks, b_scale.transpose(1, 2), m_sizes)
        same = fw.grouped_gemm(a, b, m_sizes, a_scale=a_scale, b_scale=b_scale, a_scaling="1x128", b_scaling="128x128")
    assert torch.equal(out, same)


@on_gpu
@pytest.mark.parametrize("sizes", [[16, 3], [300, 140]])
def test_scales_that_begin_at_no_multiple_of_16_bytes(sizes: list[int]) -> None:
    from fourwave.testing.grouped_cases import group_scales

    a, b, a_scale, b_scale, m_sizes = quantized(sizes, 256, 512)
    shifted = torch.empty(a_scale.numel() + 1, device="cuda")[1:].view(a_scale.shape).copy_(a_scale)
    blocks = group_scales(a_scale.cpu(), sizes).cuda()
    shifted_blocks = torch.empty(blocks.numel() + 1, device="cuda")[1:].copy_(blocks)
    outs = [
        fw.grouped_gemm(
            a, b, m_sizes, a_scale=scale, b_scale=b_scale, a_scaling="1x128", b_scaling="128x128", a_scale_layout=layout,
            backend="hopper",
        )
        for scale, layout in ((a_scale, "rows"), (shifted, "rows"), (blocks, "groups"), (shifted_blocks, "groups"))
    ]  # fmt: skip
    assert all(torch.equal(outs[0], out) for out in outs)


@on_gpu
def test_explain_names_kernel_and_config() -> None:
    a, b, a_scale, b_scale, m_sizes = quantized([4, 4], 256, 256)
    told = fw.explain_grouped(
        a, b, m_sizes, a_scale=a_scale, b_scale=b_scale, a_scaling="1x128", b_scaling="128x128", backend="hopper"
    )
    assert "sm90_swapped.py" in str(told) and "swapped" in str(told)
    assert NUM_SMS == 132


# ---------------------------------------------------------------------------------------------------------------------
# wgrad


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tile_n", [64, 128, 192, 256])
@pytest.mark.parametrize("sizes", ["odd", "last", "three", "64 random"])
def test_wgrad_sixteen_bit(sizes: str, tile_n: int, dtype: torch.dtype) -> None:
    case = GroupedCase("wgrad", SIZES[sizes], 200, 328, dtype=dtype, extra=3)
    run_case(case, rows_tile(case.problem("cuda"), 128, tile_n))


WGRAD_TILES = (
    (64, 1, 1), (64, 2, 1), (128, 1, 1), (128, 2, 1), (128, 1, 2), (192, 1, 2), (192, 2, 1), (256, 2, 1), (256, 1, 2),
)  # fmt: skip
"""tile_n, CTAs side by side, CTAs below each other."""


@on_gpu
@pytest.mark.parametrize("addend", ["load", "reduce", None])
@pytest.mark.parametrize("tile", WGRAD_TILES, ids=str)
@pytest.mark.parametrize("sizes", ["odd", "64 random"])
@pytest.mark.parametrize("M", [200, 392])
def test_wgrad_shared_tiles(M: int, sizes: str, tile: tuple[int, int, int], addend: str | None) -> None:
    """Pairs of which one has a tile past the end, results on every way out."""
    case = GroupedCase(
        "wgrad", SIZES[sizes], M, 328, dtype=BF16, out_dtype=FP32, accumulate=addend is not None, extra=3
    )
    run_case(case, replace(rows_tile(case.problem("cuda"), 128, *tile), addend=addend or "load"))


@on_gpu
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("K", [328, 201])
def test_wgrad_outputs(K: int, accumulate: bool, out_dtype: torch.dtype) -> None:
    run_case(GroupedCase("wgrad", (5, 130, 0, 1), 136, K, out_dtype=out_dtype, accumulate=accumulate, extra=1))


def check_wgrad_fp8(
    tile: tuple[int, int, int], extra: int, scaling: str | None, fast: bool = False, out_dtype: torch.dtype = FP32,
    addend: str | None = None,
) -> None:  # fmt: skip
    """Codes stored transposed; groups that begin inside a block of scales and inside 16 bytes, and one of many that does not; NaN in the
    rows past the last, and so many of those that rows of scales are multiples of 16 bytes, or not."""
    sizes, M, N = [5, 130, 0, 1, 300, 128, 77, 127, 1536], 200, 328
    K = sum(sizes) + extra
    p = GroupedProblem(
        len(sizes), M, N, K, "reduction", "TN", E4M3, E4M3, out_dtype, accumulate=addend is not None, device_type="cuda",
        a_scaling=scaling, b_scaling=scaling, fast_accum=fast,
    )  # fmt: skip
    random = torch.Generator("cuda").manual_seed(0)

    def operand(rows: int, shape: tuple[int, ...] | None) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        codes = torch.randn(rows, K + (-K) % 16, device="cuda", generator=random).to(E4M3)[:, :K]
        values = codes.double()
        scale = None if shape is None else torch.rand(shape, device="cuda", generator=random) + 0.5
        if scale is not None:
            by_row = scale.double().view(rows, 1) if scaling == "row" else scale.double()
            values = values * (by_row.repeat_interleave(128, 1)[:, :K] if scaling == "1x128" else by_row)
        codes[:, sum(sizes) :] = float("nan")
        return codes, scale, values

    (a, a_scale, x), (b, b_scale, y) = operand(M, p.a_scale_shape), operand(N, p.b_scale_shape)
    out = torch.full((len(sizes), M, N), float("nan"), device="cuda", dtype=out_dtype)
    if addend is not None:
        out.normal_(generator=random)
    before = out.clone()
    tensors = GroupedTensors(a, b, torch.tensor(sizes, device="cuda"), out, None, a_scale, b_scale)
    sm90_launch.run(p, replace(rows_tile(p, 128, *tile), addend=addend or "load"), tensors)
    start = 0
    for g, size in enumerate(sizes):
        left, right = x[:, start : start + size], y[:, start : start + size]
        added = None if addend is None else before[g]
        # A group that begins inside a block, or inside 32 k, has a sum of the matrix unit more at either end.
        u_acc = bounds.hopper_fp8_u_acc(size, not fast or scaling == "1x128") + 2.0**-12 / (size + 1)
        bound = bounds.gemm_bound(left, right, out_dtype, addend=added, u_acc=u_acc, scaled=True)
        exact = left @ right.mT + (0 if added is None else added.double())
        bounds.assert_within(out[g], exact, bound, f"group {g}")
        start += size


@on_gpu
@pytest.mark.parametrize("scaling", [None, "tensor", "row", "1x128"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("tile", WGRAD_TILES[:7], ids=str)
@pytest.mark.parametrize("extra", [15, 143])
def test_wgrad_fp8(extra: int, tile: tuple[int, int, int], fast: bool, scaling: str | None) -> None:
    check_wgrad_fp8(tile, extra, scaling, fast)


@on_gpu
@pytest.mark.parametrize("addend", ["load", "reduce", None])
@pytest.mark.parametrize("tile", WGRAD_TILES[:7], ids=str)
def test_wgrad_fp8_ways_out(tile: tuple[int, int, int], addend: str | None) -> None:
    for out_dtype in (FP32, BF16):
        check_wgrad_fp8(tile, 143, "1x128", out_dtype=out_dtype, addend=addend)


@on_gpu
def test_gradients_through_the_backend() -> None:
    sizes = torch.tensor([40, 0, 100, 3], device="cuda")
    x = torch.randn(150, 128, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(4, 96, 128, device="cuda", dtype=BF16, requires_grad=True)
    dout = torch.randn(150, 96, device="cuda", dtype=BF16)
    fw.grouped_gemm(x, w, sizes, backend="hopper").backward(dout)
    assert x.grad is not None and w.grad is not None
    start = 0
    for g, size in enumerate(sizes.tolist()):
        rows = slice(start, start + size)
        d, v, m = dout[rows].double(), x.detach()[rows].double(), w.detach()[g].double()
        bounds.assert_within(x.grad[rows], d @ m, bounds.gemm_bound(d, m.mT, BF16))
        bounds.assert_within(w.grad[g], d.mT @ v, bounds.gemm_bound(d.mT, v.mT, BF16))
        start += size
    assert not x.grad[start:].any()
