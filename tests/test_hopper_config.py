"""What the Hopper GEMM kernels support, which tile is taken, and what automatic choice takes. No GPU, no DSL."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry, select
from fourwave.ops.gemm import sm90_config, sm90_tiles
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_config import HopperConfig, why_unsupported
from fourwave.ops.gemm.sm90_tiles import candidates, swapped
from fourwave.testing.llm_shapes import llm81
from hopper_cases import BF16, FP8, FP16, FP32, UNAVAILABLE, more_problems, problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile_m": 96}, "multiple of 64 rows"),
        ({"tile_n": 200}, "64 must divide"),
        ({"tile_n": 320}, "up to 256"),
        ({"tile_m": 512}, "at most 256 rows"),
        ({"tile_k": 32}, "128 bytes"),
        ({"tile_m": 256}, "256 accumulators"),
        ({"num_stages": 1}, "at least 2"),
        ({"num_stages": 5}, "bytes of shared memory"),
        ({"cluster_m": 3}, "powers of two"),
        ({"cluster_m": 4, "cluster_n": 2}, "at most 4"),
        ({"cluster_n": 4, "cluster_m": 1}, "its share"),
        ({"store_stages": 3}, "must divide"),
        ({"schedule": "stream"}, "cooperative, pingpong and swapped"),
        ({"split": 2}, "only a swapped or streamed tile"),
        ({"schedule": "swapped", "tile_m": 256}, "up to 128"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 192}, "multiples of 8 up to 128"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "split": 3}, "1, 2, 4 or 8"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "split": 4, "cluster_n": 4}, "up to 8"),
        ({"schedule": "swapped", "tile_m": 8, "tile_n": 128, "cluster_n": 2}, "slices of 8"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "num_stages": 10}, "bytes of shared memory"),
        ({"schedule": "pingpong", "consumers": 3}, "2 for pingpong"),
        ({"group": 0}, "at least 1"),
    ],
)
def test_configs_that_the_kernel_cannot_run_are_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    assert why_unsupported(problem(), HopperConfig()) is None
    assert said in (why_unsupported(problem(), replace(HopperConfig(), **change)) or "")  # type: ignore[arg-type]


def test_problems_that_the_kernel_cannot_run_are_refused_with_the_reason() -> None:
    fp32 = GemmProblem(8, 8, 8, "TN", FP32, FP32, FP32, device_type="cuda")
    assert "bfloat16 or float16" in (why_unsupported(fp32, None) or "")
    assert "32-bit" in (why_unsupported(problem(M=2**31), None) or "")
    from fourwave.ops.gemm.config import GemmConfig

    fp8 = GemmProblem(8, 16, 16, "NN", FP8[0], FP8[1], BF16, device_type="cuda")
    assert "K contiguous" in (why_unsupported(fp8, None) or "")
    assert why_unsupported(replace(fp8, layout="TN"), None) is None
    weights = GemmProblem(256, 512, 64, "TN", BF16, FP8[0], BF16, device_type="cuda", b_scaling="1x32")
    for packed in (weights, replace(weights, b_dtype=torch.uint8)):
        assert why_unsupported(packed, None) is None and default_config(packed)[0].schedule == "swapped"
        assert "up to 256 rows" in (why_unsupported(replace(packed, M=257), None) or "")
        assert "whole blocks" in (why_unsupported(replace(packed, K=80), None) or "")
        assert "a swapped tile takes them" in (why_unsupported(packed, sm90_tiles.SQUARE) or "")
    assert "MXFP4 or MXFP8 (e4m3fn)" in (why_unsupported(replace(weights, b_dtype=FP8[1]), None) or "")
    huge = replace(sm90_tiles.HUGE, tile_k=128)
    precise = replace(fp8, layout="TN", M=512, N=512, K=512)
    assert "288 accumulators" in (why_unsupported(precise, huge) or "")
    assert why_unsupported(replace(precise, fast_accum=True), huge) is None
    pingpong = replace(sm90_tiles.SQUARE, tile_k=128)
    assert "pingpong with promotion" in (why_unsupported(precise, pingpong) or "")
    blocks = replace(precise, a_scaling="1x32", b_scaling="1x32")
    assert "scales 1x32 and 1x32: this kernel does not multiply such a pair" in (why_unsupported(blocks, None) or "")
    assert why_unsupported(replace(precise, a_scaling="row", b_scaling="tensor"), None) is None
    few = problem(16, 512, 128)
    assert "64 or 128" in (why_unsupported(replace(few, layout="NN"), swapped(few, 96, 1)) or "")
    assert "layout NT" in (why_unsupported(replace(few, layout="NT"), swapped(few, 128, 1)) or "")
    assert "each CTA needs a k step" in (why_unsupported(few, swapped(few, 128, 4)) or "")
    assert "HopperConfig" in (why_unsupported(problem(), GemmConfig()) or "")  # type: ignore[arg-type]
    blocks = replace(precise, a_scaling="1x128", b_scaling="128x128")
    assert "halves of b" in (why_unsupported(replace(blocks, activation="swiglu"), None) or "")
    assert why_unsupported(replace(blocks, preactivation_dtype=BF16), None) is None
    mx = replace(problem(), out_dtype=FP8[0], out_scaling="1x32")
    assert "quantized with scales 1x32" in (why_unsupported(mx, None) or "")
    swiglu = replace(problem(), activation="swiglu")
    assert "128 must divide" in (why_unsupported(swiglu, sm90_tiles.LONG) or "")
    assert "either half" in (why_unsupported(swiglu, sm90_tiles.SQUARE) or "")
    saved = replace(problem(), preactivation_dtype=BF16)
    assert "the 3 buffers" in (why_unsupported(replace(swiglu, preactivation_dtype=BF16), sm90_tiles.LOW) or "")
    full = replace(sm90_tiles.WIDE, num_stages=4, store_stages=4)
    assert "bytes of shared memory" in (
        why_unsupported(replace(problem(layout="NT"), bias_grad_dtype=FP32), full) or ""
    )
    for p in (swiglu, saved, replace(problem(), out_dtype=FP8[1], out_scaling="tensor")):
        p = replace(p, M=16)
        assert "a swapped tile has no" in (why_unsupported(p, swapped(p, 64)) or "")
        assert default_config(p)[0].schedule != "swapped"


def test_every_problem_has_tiles_of_all_sizes() -> None:
    for p in more_problems():
        for M in (8, 100, 512):
            tiles = candidates(replace(p, M=M))
            assert len({(c.tile_m, c.tile_n) for c in tiles}) >= 3, (p, tiles)
            assert default_config(replace(p, M=M))[0] in tiles


def test_the_default_is_one_of_the_candidates_and_allowed() -> None:
    shapes = [(1, 1, 1), (77, 145, 203), (1, 57344, 8192), (2**30, 8, 8), *(row.gemm("TN") for row in llm81())]
    for M, N, K in shapes:
        for layout in LAYOUTS:
            for out in (BF16, FP32):
                p = problem(M, N, K, layout, out)
                config, reasons = default_config(p)
                assert config in candidates(p) and why_unsupported(p, config) is None
                assert reasons


def test_tiles_are_stored_late_where_there_are_buffers_for_all_of_them() -> None:
    """And only with promotion, whose totals are not where the next tile's products are summed."""
    blocks = replace(
        problem(), a_dtype=FP8[0], b_dtype=FP8[0], a_scaling="1x128", b_scaling="128x128", M=8192, N=8192, K=8192
    )
    late = {(c.tile_m, c.tile_n): sm90_config.stores_late(blocks, c) for c in candidates(blocks)}
    assert late == {(128, 192): True, (256, 128): False, (128, 128): False, (64, 128): True}
    pairs = replace(blocks, a_scaling="row", b_scaling="row", activation="swiglu")
    assert not any(sm90_config.stores_late(pairs, c) for c in candidates(pairs) if c.tile_m == 256)
    wide = replace(blocks, out_dtype=FP32)
    assert not any(sm90_config.stores_late(wide, c) for c in candidates(wide))
    assert not any(sm90_config.stores_late(problem(), c) for c in candidates(problem()))


def test_shared_memory_of_every_candidate_fits() -> None:
    for config in candidates(problem()):
        assert sm90_config.smem_bytes(config, 2) <= 227 * 1024
    for M in (1, 16, 64, 128):
        few = problem(M, 5000, 4096)
        for config in candidates(few):
            if config.schedule == "swapped":
                assert sm90_config.swapped_smem_bytes(few, config) <= 227 * 1024


@pytest.mark.parametrize("num_stages", range(2, 13))
def test_scales_of_blocks_are_read_before_they_are_overwritten(num_stages: int) -> None:
    """Group i of four steps is read in step 4 i, whose stage is then released, and loaded with step 4 i: that is at most num_stages
    steps ahead of the release."""

    def safe(slots: int) -> bool:
        return all(4 * (i - slots) <= 4 * i - num_stages for i in range(slots, 40))

    slots = sm90_config.scale_slots(num_stages)
    assert safe(slots) and (slots == 1 or not safe(slots - 1))


def test_automatic_choice_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by stand-ins for a Hopper GPU; a config of the caller's, or anything not in the records, changes the answer."""
    backend = registry.get("hopper")
    monkeypatch.setattr(type(backend), "unavailable", lambda self, arch=None: None)
    monkeypatch.setattr(
        type(backend), "why_unsupported", lambda self, problem, config: why_unsupported(problem, config)
    )
    select.clear_cache()
    try:
        large = problem(4096, 4096, 4096)
        e4m3 = replace(large, a_dtype=FP8[0], b_dtype=FP8[0])
        rows = replace(e4m3, a_scaling="row", b_scaling="row")
        tensors = replace(e4m3, a_scaling="tensor", b_scaling="tensor", fast_accum=True)
        blocks = replace(e4m3, a_scaling="1x128", b_scaling="128x128")
        weights = replace(large, b_dtype=torch.uint8, b_scaling="1x32")
        taken = [
            large, replace(large, layout="NN"), replace(large, layout="NT"), replace(large, M=1), replace(large, M=64),
            rows, tensors, replace(tensors, M=16), blocks, replace(blocks, fast_accum=True),
            replace(tensors, a_dtype=FP8[1], fast_accum=False), replace(weights, M=16, b_preshuffled=True),
        ]  # fmt: skip
        for p in taken:
            assert select.select("auto", p, None).backend is backend, p
        left = [
            replace(large, M=65), replace(large, M=64, layout="NN"), replace(large, N=3000), replace(large, K=4100),
            replace(large, out_dtype=FP32), replace(large, bias_dtype=BF16), replace(large, activation="relu"),
            replace(large, accumulate=True), replace(large, a_dtype=FP16, b_dtype=FP16), replace(rows, M=16),
            replace(rows, fast_accum=True), replace(tensors, fast_accum=False), replace(blocks, M=64),
            replace(blocks, b_dtype=FP8[1]), replace(large, activation="swiglu"), replace(large, preactivation_dtype=BF16),
            replace(large, layout="NT", bias_grad_dtype=FP32), replace(large, out_dtype=FP8[0], out_scaling="tensor"),
            replace(tensors, a_dtype=FP8[1]), replace(tensors, a_dtype=FP8[1], fast_accum=False, M=64),
            replace(weights, M=16), replace(weights, M=16, b_preshuffled=True, N=3008),
            replace(weights, M=16, b_preshuffled=True, bias_dtype=BF16), replace(weights, M=200, b_dtype=FP8[0]),
        ]  # fmt: skip
        for p in left:
            assert why_unsupported(p, None) is None, p
            chosen = select.select("auto", p, None)
            assert chosen.backend.name == "native", p
            why = dict(chosen.rejected)["hopper"]
            assert ("works on a copy" if p.K == 4100 else "measured") in why
            assert select.select("hopper", p, None).backend is backend
        assert select.select("auto", replace(large, M=65), HopperConfig()).backend is backend  # type: ignore[arg-type]
    finally:
        monkeypatch.undo()
        select.clear_cache()


def test_without_a_hopper_gpu_a_named_backend_raises() -> None:
    if UNAVAILABLE is None:
        pytest.skip("there is one")
    x = torch.zeros(8, 8, dtype=BF16)
    with pytest.raises(fw.BackendUnavailable, match="hopper"):
        fw.gemm(x, x, backend="hopper")


def test_llm81() -> None:
    rows = llm81()
    assert len(rows) == 81 == len({(row.model, row.layer, row.microbatch) for row in rows})
    assert len({(row.out_features, row.in_features) for row in rows}) < 27  # models share weights, at other lengths
    published = {(32768, 16384, 53248), (32768, 37888, 3584), (32768, 59136, 8192)}
    assert published <= {row.gemm("TN") for row in rows}
    row = rows[0]
    assert row.gemm("NN") == (row.tokens, row.in_features, row.out_features)
    assert row.gemm("NT") == (row.out_features, row.in_features, row.tokens)
