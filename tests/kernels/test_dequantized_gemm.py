"""GEMM of bfloat16 activations with packed e2m1 weights on gfx950, on the simulator; what the compiler makes of it."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from launches import every_code_and_scale, scale_reads

import fourwave as fw
from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES, OperandTile, bank_conflicts, read_b128_groups
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import GemmConfig, candidates_for, geometry, lds_bytes, why_unsupported
from fourwave.perf import isa
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.testing import GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.shapes import Shape

needs_flydsl = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")

ARCH, BACKEND = "gfx950", "sim:gfx950"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PACKED = (False, True)
needs_sim = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")


def case_of(layout: str, shape: Shape, **fields: Any) -> GemmCase:
    return GemmCase(shape, layout, **{"dtype": BF16, "b_format": "mxfp4", "out_dtype": FP32, "seed": 1, **fields})


def configs(layout: str) -> list[GemmConfig]:
    problem = case_of(layout, Shape("any", 64, 64, 64)).problem
    return [config for config in candidates_for(problem, ARCH) if why_unsupported(problem, config, ARCH) is None]


def every_config() -> list[Any]:
    return [
        pytest.param(
            layout,
            config,
            id=f"{layout}-{config.tile_m}x{config.tile_n}",
            marks=() if config.tile_m == 32 else pytest.mark.slow,
        )
        for layout in ("TN", "NN")
        for config in configs(layout)
    ]


def assert_right(case: GemmCase, config: GemmConfig | None = None) -> None:
    result = case.run(BACKEND, config=config)
    assert result.passed, f"{case}: {result}"


@needs_sim
@pytest.mark.parametrize(("layout", "config"), every_config())
def test_tails_exact_scales_and_banks(layout: str, config: GemmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tails in M, N and K, over more slots of scales than there are; a scale of its own for every row and block: equal sums."""
    monkeypatch.setattr(sim, "session", functools.partial(sim.session, count_bank_conflicts=True))
    shape = Shape("tails", config.tile_m + 14, config.tile_n + 18, 13 * config.tile_k - 26)
    assert_right(case_of(layout, shape, a_view="sliced", b_view="sliced", out_view="sliced"), config)
    exact = ExactScales(
        Shape("two", config.tile_m, 2 * config.tile_n, 2304), layout, dtype=BF16, b_format="mxfp4", out_dtype=FP32
    )
    sim.reset_report()
    result = exact.run(BACKEND, config=config)
    assert result.passed, result
    counters = sim.current_report().launches[-1].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"] > 0


@needs_sim
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("TN", Shape("M = 1", 1, 130, 320)), ("NN", Shape("K odd", 3, 66, 161)), ("TN", Shape("K = 2", 33, 7, 2))],
)
def test_shapes(layout: str, shape: Shape) -> None:
    assert_right(case_of(layout, shape))


@needs_sim
@pytest.mark.parametrize("layout", ["TN", pytest.param("NN", marks=pytest.mark.slow)])
def test_each_code_and_scale_becomes_its_bfloat16(layout: str) -> None:
    """Every e2m1 code with every scale that keeps it in bfloat16's range, times one, bit for bit. A NaN scale gives NaN."""
    a, b, exact = every_code_and_scale(layout)
    out = fw.gemm(a, b, trans_b=layout == "TN", backend=BACKEND, out_dtype=FP32)
    assert torch.equal(out.double().nan_to_num(-1.0), exact.nan_to_num(-1.0))


@needs_sim
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_codes_meet_their_own(layout: str) -> None:
    """One value that is not zero in each row of a, at a k of its own: row m of out is column k of b's values."""
    shape = Shape("", 64, 128, 384)
    _, b = case_of(layout, shape, seed=4).operands()
    assert isinstance(b, QuantizedTensor)
    k = (torch.arange(64) * 37 + 5) % 384
    a = torch.zeros(64, 384, dtype=BF16)
    a[torch.arange(64), k] = 1.0
    out = fw.gemm(a, b, trans_b=layout == "TN", backend=BACKEND, out_dtype=FP32)
    right = b.dequantize(torch.float64)
    assert torch.equal(out.double(), right[:, k].mT if layout == "TN" else right[k])


@needs_sim
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        ("TN", {"bias_dtype": BF16, "activation": "gelu", "preactivation": BF16, "alpha": 0.75, "out_dtype": FP16}),
        ("TN", {"activation": "swiglu", "preactivation": BF16, "out_dtype": BF16}),
        pytest.param("NN", {"accumulate": True, "out_view": "sliced"}, marks=pytest.mark.slow),
        pytest.param(
            "NN", {"out_format": "mxfp8_e4m3", "out_direction": "both", "out_dtype": None}, marks=pytest.mark.slow
        ),
        pytest.param("TN", {"out_format": "fp8_e5m2", "activation": "silu", "out_dtype": None}, marks=pytest.mark.slow),
    ],
)
def test_epilogues(layout: str, fields: dict[str, Any]) -> None:
    case = case_of(layout, Shape("even tails", 78, 160, 202), **fields)
    assert_right(case, next(config for config in configs(layout) if config.tile_m == 64))


@needs_sim
@pytest.mark.slow
def test_rows_do_not_depend_on_their_number() -> None:
    a, b = case_of("TN", Shape("", 150, 128, 640)).operands()
    assert isinstance(a, torch.Tensor)
    every = fw.gemm(a, b, backend=BACKEND, out_dtype=FP32, batch_invariant=True)
    for rows in (1, 17, 33, 65):
        assert torch.equal(fw.gemm(a[:rows], b, backend=BACKEND, out_dtype=FP32, batch_invariant=True), every[:rows])


def _words_in_other_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from fourwave.blocks.flydsl import e2m1

    eight = e2m1.scaled_eight
    monkeypatch.setattr(
        e2m1, "scaled_eight", lambda word, scale: eight(word, scale).shuffle(eight(word, scale), [1, 0, *range(2, 8)])
    )


def _scale_of_the_next_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    from fourwave.blocks.flydsl.loaders import FragmentScales

    sort = FragmentScales.sort
    monkeypatch.setattr(FragmentScales, "sort", lambda self, values, k_slice: sort(self, values, k_slice)[::-1])


def _chunks_as_beside_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperandTile, "chunk", lambda self, group, k_slice: 4 * k_slice + group)


@needs_sim
@pytest.mark.parametrize(
    "break_it",
    [
        _chunks_as_beside_bfloat16,
        pytest.param(_words_in_other_order, marks=pytest.mark.slow),
        pytest.param(_scale_of_the_next_fragment, marks=pytest.mark.slow),
    ],
)
def test_broken_dequantizing_is_seen(monkeypatch: pytest.MonkeyPatch, break_it: Any) -> None:
    monkeypatch.setattr(amd, "_compiled", {})
    break_it(monkeypatch)
    assert not case_of("TN", Shape("", 32, 128, 256)).run(BACKEND, config=configs("TN")[0]).passed


# ---- LDS images, machine code, what there is --------------------------------------------------------------------------


def test_images_of_chunks_side_by_side() -> None:
    """A lane group reads four neighbouring chunks, one a slice, without bank conflicts; the plain swizzle would have some."""
    tile = OperandTile(64, 128, True, 2, 64, together=4)
    assert tile.problem() is None and sorted(tile.chunk(g, s) for g in range(4) for s in range(4)) == list(range(16))

    def lost(tile: OperandTile) -> int:
        slices = ([tile.address(lane % 16, 4 * (lane // 16) + s) for lane in range(64)] for s in range(4))
        return sum(bank_conflicts(lanes, read_b128_groups(64), 16, 64) for lanes in slices)

    assert lost(tile) == 0 < lost(replace(tile, together=1))


@needs_flydsl
def test_a_swizzle_that_loads_do_not_repeat_is_refused() -> None:
    """Four waves bring 4096 bytes with one load: eight lines of 512, and line 8 would be swizzled as line 0."""
    problem = GemmCase(Shape("", 64, 64, 1024)).problem
    config = GemmConfig(32, 64, 256, 3, 1, 4)
    assert "fewer than the swizzle's period" in (why_unsupported(problem, config, ARCH) or "")
    assert_right(GemmCase(Shape("", 40, 72, 600)), replace(config, tile_k=128))


@needs_flydsl
@pytest.mark.parametrize(
    ("layout", "index"), [("TN", 0), *(pytest.param("NN", i, marks=pytest.mark.slow) for i in range(3))]
)
def test_the_main_loop(layout: str, index: int) -> None:
    """b and its scales are read once for 128 k, a in chunks of 16 bytes; nothing spills; waits leave tiles in flight."""
    config = configs(layout)[index]
    problem = case_of(layout, Shape("large", 4096, 4096, 4096), out_dtype=BF16).problem
    kernel = isa.compile_isa(problem, config, ARCH)
    print(kernel)
    geo = geometry(config, layout, 2, ARCH, "b", packed=PACKED)
    loop = kernel.main_loop
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.lds_bytes == lds_bytes(config, layout, 2, ARCH, "b", PACKED) <= LDS_BYTES[ARCH]
    assert (loop.k, loop.mfma) == (128, geo.frags_m * geo.frags_n * 4)
    of_b = {"ds_read_b128": geo.frags_n} if layout == "TN" else {"ds_read_b64_tr_b4": 2 * geo.frags_n}
    of_a, scales = {"ds_read_b128": 4 * geo.frags_m}, scale_reads(geo)
    assert loop.lds_reads == Counter(of_a) + Counter(of_b) + Counter(scales)
    assert kernel.text.count("v_cvt_scalef32_pk_bf16_fp4") == geo.frags_n * 16
    assert (loop.loads_to_lds, loop.loads) == (geo.loads_per_tile, 0)
    counted = [wait for wait in loop.waits if "vmcnt" in wait]
    assert len(counted) == loop.barriers == 1 and f"vmcnt({(geo.num_stages - 2) * geo.loads_per_tile})" in counted[0]


def test_what_is_refused() -> None:
    def refused(layout: str = "TN", N: int = 64, K: int = 64, arch: str = ARCH, **fields: Any) -> str:
        return why_unsupported(case_of(layout, Shape("", 64, N, K), **fields).problem, None, arch) or ""

    assert refused() == refused("NN") == ""
    assert "in layout NT" in refused("NT")
    assert "a is torch.float16 with scales None beside packed e2m1" in refused(dtype=FP16)
    assert "a is torch.float32 with scales None beside packed e2m1" in refused(dtype=FP32)
    assert "K=63: rows of b are packed" in refused(K=63)
    assert "N=63: rows of b are packed" in refused("NN", N=63)
    assert "swiglu with packed e2m1 in layout NN" in refused("NN", activation="swiglu")
    assert "no kernel that dequantizes" in refused(arch="gfx942")
    assert "the kernels take one type for both" in refused(b_format="mxfp8_e4m3")
