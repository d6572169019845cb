"""Default configurations and the rule for what the kernels support."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fourwave.blocks.flydsl.tiles import LDS_BYTES
from fourwave.ops.gemm.config import (
    ARCHS,
    FLOAT8,
    candidates,
    default_config,
    geometry,
    lds_bytes,
    min_registers,
    why_unsupported,
)
from fourwave.ops.gemm.problem import GemmProblem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def problem(M=4096, N=4096, K=4096, layout="TN", **changes):
    base = GemmProblem(M, N, K, layout, BF16, BF16, BF16)
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_are_supported(arch, layout, dtype):
    size = dtype.itemsize
    for config in candidates(arch, size):
        assert why_unsupported(problem(layout=layout, a_dtype=dtype, b_dtype=dtype), config, arch) is None, config
        assert lds_bytes(config, layout, size, arch) <= LDS_BYTES[arch]
        assert min_registers(config, size, arch) < 512
        geo = geometry(config, layout, size, arch)
        assert geo.num_slices * geo.tiles_per_step % 2 == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("M", "N", "tile"),
    [
        (9728, 8192, (256, 256)),  # fills the chip several times
        (4096, 4096, (256, 256)),  # 256 tiles of 256 x 256: once
        (2048, 2048, (128, 128)),
        (1024, 1024, (64, 64)),
        (512, 512, (64, 64)),  # and K is split
        (1, 4096, (16, 64)),
        (16, 4096, (16, 64)),
    ],
)
def test_default_tile_follows_the_size(arch, M, N, tile):
    config, reasons = default_config(problem(M, N), arch)
    assert (config.tile_m, config.tile_n) == tile
    assert any("compute units" in reason for reason in reasons)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"a_dtype": torch.float64, "b_dtype": torch.float64}, "operands"),
        ({"b_dtype": FP16}, "one type"),
        ({"out_dtype": torch.float64}, "out is"),
        ({"bias_dtype": torch.int8}, "bias is"),
        ({"M": 2**31}, "M="),
        ({"K": 2**24}, "span"),
    ],
)
def test_unsupported_problems(arch, changes, word):
    reason = why_unsupported(problem(**changes), None, arch)
    assert reason is not None and word in reason


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"waves_m": 1}, "four"),
        ({"tile_m": 16}, "tile_m"),
        ({"tile_m": 512}, "at most 256"),
        ({"tile_k": 48}, "tile_k"),
        ({"tile_k": 256}, "LDS"),
        ({"num_stages": 1}, "num_stages"),
        ({"mma": "4x4x4"}, "mma"),
        ({"group_m": 0}, "group_m"),
    ],
)
def test_unsupported_configs(arch, changes, word):
    config = dataclasses.replace(candidates(arch)[1], **changes)
    reason = why_unsupported(problem(), config, arch)
    assert reason is not None and word in reason


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_waits_fit_the_counter(layout):
    """vmcnt counts to 63; LDS limits the loads in flight to fewer."""
    for config in candidates("gfx950"):
        geo = geometry(config, layout, 2, "gfx950")
        assert 0 < (geo.num_stages - 2) * geo.loads_per_tile < (geo.num_stages - 1) * geo.loads_per_tile <= 63
    assert LDS_BYTES["gfx950"] // 4096 <= 63


def test_unknown_arch():
    assert "gfx90a" in (why_unsupported(problem(), None, "gfx90a") or "")


def test_empty_problems_have_no_configuration_to_check():
    assert why_unsupported(problem(M=0), None, "gfx950") is None


def reasons_of(config_and_reasons):
    return "; ".join(config_and_reasons[1])


@pytest.mark.parametrize("arch", ARCHS)
def test_reasons(arch):
    """Each is there where it is the reason, and not elsewhere."""
    few = default_config(problem(16, 1280, 8192), arch)
    assert few[0].split_k > 1 and f"K split in {few[0].split_k}" in reasons_of(few) and "taller" in reasons_of(few)
    wgrad = default_config(problem(512, 512, 2**16, layout="NT"), arch)
    assert wgrad[0].split_k > 1
    invariant = default_config(problem(16, 1280, 8192, batch_invariant=True), arch)
    assert invariant[0].split_k == 1 and "K is not split" in reasons_of(invariant)
    large = default_config(problem(9728, 8192, 8192), arch)  # whole rounds of the largest tile, nearly
    assert (large[0].split_k, large[0].tile_m) == (1, 256)
    for word in ("split", "taller", "not tile"):
        assert word not in reasons_of(large)
    assert "dies" in reasons_of(large) and "modelled, not measured" in reasons_of(large)
    sums = default_config(problem(8192, 8192, 8192, layout="NT", bias_grad_dtype=FP32), "gfx950")
    assert sums[0].tile_m < 256 and "not tile 256x256: " in reasons_of(sums)


@pytest.mark.parametrize("arch", ARCHS)
def test_batch_invariant_problems_never_split_k(arch):
    for m in (1, 2, 17, 33, 128, 257, 4096):
        assert default_config(problem(m, 512, 2**16, batch_invariant=True), arch)[0].split_k == 1


def test_tuned_configurations_come_first(monkeypatch):
    from fourwave.ops.gemm import config as gemm_config
    from fourwave.ops.gemm import tuned_cdna

    gemm_config._default_config.cache_clear()
    small = problem(13, 512, 4096)
    tuned = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "num_stages": 4, "split_k": 8}
    name = "gfx950 TN bfloat16 x bfloat16 M<=16 N=512 K=4096"
    assert tuned_cdna.key(small, "gfx950") == name
    monkeypatch.setattr(tuned_cdna, "TABLE", {name: tuned})
    try:
        config, reasons = default_config(small, "gfx950")
        assert (config.tile_m, config.split_k) == (64, 8) and reasons[0] == f"tuned for {name}"
        assert default_config(problem(17, 512, 4096), "gfx950")[0] != config
        assert default_config(problem(13, 512, 4096, batch_invariant=True), "gfx950")[0].split_k == 1
        gemm_config._default_config.cache_clear()
        monkeypatch.setattr(tuned_cdna, "TABLE", {name: tuned | {"tile_k": 48}})
        config, reasons = default_config(small, "gfx950")
        assert config.tile_k != 48 and reasons[0].startswith("not what was tuned") and "tile_k=48" in reasons[0]
    finally:
        gemm_config._default_config.cache_clear()


def test_reasons_are_about_the_problem_where_every_tile_is_refused():
    """Not the largest tile's own limit."""
    codes = FLOAT8["gfx950"][0]
    blocks = problem(a_dtype=codes, b_dtype=codes, a_scaling="1x128", b_scaling="128x128")
    assert why_unsupported(blocks, None, "gfx950") is None
    reason = why_unsupported(dataclasses.replace(blocks, activation="swiglu"), None, "gfx950")
    assert reason is not None and reason.startswith("swiglu with scales of blocks of 128")
    # Rows so long that a tile of any height spans more than a buffer.
    wide = problem(64, 2**30, 64, out_dtype=FP32)
    reason = why_unsupported(wide, None, "gfx950")
    assert reason is not None and reason.startswith("none of the tiles of gfx950 does: out: 16 rows")
