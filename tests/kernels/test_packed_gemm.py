"""GEMM of packed e2m1 on gfx950, with itself and with 8-bit codes, on the simulator; what the compiler makes of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import pytest
import torch
from launches import scale_reads

from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES, OperandTile, bank_conflicts, read_b128_groups
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import GemmConfig, candidates_for, default_config, geometry, lds_bytes, why_unsupported
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem, GemmTensors
from fourwave.perf import isa
from fourwave.testing import GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.shapes import Shape

ARCH, BACKEND = "gfx950", "sim:gfx950"
BF16, FP32, FP4 = torch.bfloat16, torch.float32, torch.uint8
PAIRS = (("mxfp4", "mxfp4"), ("mxfp8_e4m3", "mxfp4"), ("mxfp4", "mxfp8_e5m2"), ("mxfp8_e5m2", "mxfp4"))
TAILS = Shape("tails", 78, 146, 202)
needs_sim = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")


def case_of(pair: tuple[str, str], layout: str, shape: Shape = TAILS, **fields: Any) -> GemmCase:
    return GemmCase(shape, layout, a_format=pair[0], b_format=pair[1], **{"out_dtype": FP32, "seed": 1, **fields})


def configs(pair: tuple[str, str], layout: str) -> list[GemmConfig]:
    problem = case_of(pair, layout).problem
    return [config for config in candidates_for(problem, ARCH) if why_unsupported(problem, config, ARCH) is None]


def every_config() -> list[Any]:
    """The smallest tile of MXFP4 with itself, and of weights in MXFP4, in each layout; the others are slow tests."""
    found = []
    for pair in PAIRS:
        for layout in LAYOUTS:
            for config in configs(pair, layout):
                quick = pair in PAIRS[:2] and config.tile_m == 32
                name = f"{pair[0]}-{pair[1]}-{layout}-{config.tile_m}x{config.tile_n}"
                found.append(pytest.param(pair, layout, config, id=name, marks=() if quick else pytest.mark.slow))
    return found


def assert_right(case: GemmCase, config: GemmConfig | None = None) -> None:
    result = case.run(BACKEND, config=config)
    assert result.passed, f"{case}: {result}"


@needs_sim
@pytest.mark.parametrize(("pair", "layout", "config"), every_config())
def test_tails_scales_and_banks(pair: tuple[str, str], layout: str, config: GemmConfig) -> None:
    """Tails in M, N and K, over several tiles of small ones; the exact sums of a scale of its own for every row and block."""
    assert_right(case_of(pair, layout), config)
    shape = Shape("odd steps", 2 * config.tile_m - 2, config.tile_n - 2, 5 * config.tile_k - 26)
    with sim.session(ARCH, on_finding="raise", count_bank_conflicts=True) as report:
        case = ExactScales(shape, layout, a_format=pair[0], b_format=pair[1], out_dtype=FP32)
        (a, a_scale, _), (b, b_scale, _) = (
            operand.operand(direction)  # type: ignore[union-attr]
            for operand, direction in zip(case.operands(), directions(layout), strict=True)
        )
        out = torch.full((shape.M, shape.N), float("nan"))
        amd.run(case.problem, config, ARCH, GemmTensors(a, b, out, None, 1.0, a_scale, b_scale))
    exact = (case.factors(0).repeat_interleave(32, 1)[:, : shape.K]) @ (
        case.factors(1).repeat_interleave(32, 1)[:, : shape.K].mT
    )
    assert torch.equal(out.double(), exact)
    counters = report.launches[0].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"] > 0


def directions(layout: str) -> tuple[str, str]:
    return "columnwise" if layout == "NT" else "rowwise", "rowwise" if layout == "TN" else "columnwise"


@needs_sim
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        (Shape("M = 1", 1, 130, 320), "TN"),
        (Shape("M = 1", 1, 130, 320), "NN"),
        (Shape("K odd", 34, 66, 161), "NT"),
        (Shape("K = 2", 33, 7, 2), "TN"),
        (Shape("K = 1", 2, 2, 1), "NT"),
        pytest.param(Shape("deep", 33, 64, 8192), "TN", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_shapes(shape: Shape, layout: str) -> None:
    assert_right(case_of(PAIRS[0], layout, shape))


@needs_sim
@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (
            "TN",
            {
                "bias_dtype": BF16,
                "activation": "gelu",
                "preactivation": BF16,
                "alpha": 0.75,
                "out_dtype": torch.float16,
            },
        ),
        ("TN", {"activation": "swiglu", "preactivation": BF16, "out_dtype": BF16}),
        ("NT", {"bias_grad": FP32, "accumulate": True}),
        pytest.param(
            "NN", {"out_format": "mxfp8_e4m3", "out_direction": "both", "out_dtype": None}, marks=pytest.mark.slow
        ),
        pytest.param("TN", {"out_format": "fp8_e5m2", "activation": "silu", "out_dtype": None}, marks=pytest.mark.slow),
        pytest.param("NN", {"accumulate": True, "out_view": "sliced"}, marks=pytest.mark.slow),
    ],
)
def test_epilogues(layout: str, fields: dict[str, Any]) -> None:
    for pair in PAIRS[:2]:
        case = case_of(pair, layout, Shape("even tails", 78, 160, 202), **fields)
        assert_right(case, next(config for config in configs(pair, layout) if config.tile_m == 64))


@needs_sim
def test_bias_grad_of_packed_columns_beside_8_bits() -> None:
    """The ones that a's rows are multiplied with have the type of b."""
    for pair in PAIRS[1:3]:
        assert_right(case_of(pair, "NT", Shape("tails", 78, 160, 202), bias_grad=FP32))


@needs_sim
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beyond_2_to_31_bytes(layout: str) -> None:
    """Rows so far apart that the operands span more than 2^31 bytes; few pages are ever touched."""
    case = case_of(
        PAIRS[0],
        layout,
        {"TN": Shape("tall", 272, 64, 160), "NN": Shape("b", 40, 64, 320), "NT": Shape("deep", 64, 64, 320)}[layout],
    )
    pitch = 8 * 2**20 - 16

    def far_apart(codes: torch.Tensor) -> torch.Tensor:
        rows, columns = codes.shape
        if rows * pitch <= 2**31:
            return codes
        try:
            storage = torch.empty(rows * pitch, dtype=codes.dtype)
        except RuntimeError as error:
            pytest.skip(f"no address space for {rows * pitch} bytes: {error}")
        view = storage.as_strided((rows, columns), (pitch, 1))
        view.copy_(codes)
        return view

    operands = case.operands()
    (a, a_scale, _), (b, b_scale, _) = (
        operand.operand(direction)  # type: ignore[union-attr]
        for operand, direction in zip(operands, directions(layout), strict=True)
    )
    far_a, far_b = far_apart(a), far_apart(b)
    assert (far_a is not a, far_b is not b) == (layout != "NN", layout != "TN")
    config = next(config for config in configs(PAIRS[0], layout) if config.tile_m == 64)
    results = []
    for pair in ((a, b), (far_a, far_b)):
        out = torch.full((case.shape.M, case.shape.N), float("nan"))
        with sim.session(ARCH, on_finding="raise"):
            notes = amd.run(case.problem, config, ARCH, GemmTensors(*pair, out, None, 1.0, a_scale, b_scale))
        results.append(out)
    assert not any(note.startswith(("a copied", "b copied")) for note in notes)
    assert not results[0].isnan().any() and torch.equal(*results)


@needs_sim
def test_nan_scales_and_what_lies_behind_rows() -> None:
    """A NaN scale makes its row NaN and nothing else. Codes and scales behind the rows' ends are never multiplied."""
    case = case_of(PAIRS[0], "TN", Shape("tails", 40, 48, 96))
    (a, a_scale, _), (b, b_scale, _) = (operand.operand("rowwise") for operand in case.operands())  # type: ignore[union-attr]
    bytes_ = a_scale.view(torch.uint8).clone()
    bytes_[7, 2] = 255
    wide = torch.full((40, 64), 0x77, dtype=torch.uint8)  # rows of whole chunks, sixes behind them
    wide[:, :48].copy_(a)
    scales = torch.full((40, 16), 255, dtype=torch.uint8)
    scales[:, :3].copy_(bytes_)
    with sim.session(ARCH, on_finding="raise"):
        out = torch.full((40, 48), float("nan"))
        tensors = GemmTensors(wide[:, :48], b, out, None, 1.0, scales[:, :3].view(a_scale.dtype), b_scale)
        notes = amd.run(case.problem, None, ARCH, tensors)
    assert "a copied: row length 48 is not a multiple of 16" not in notes
    values: list[Any] = list(case.operands())
    exact = values[0].dequantize(torch.float64) @ values[1].dequantize(torch.float64).mT
    assert out[7].isnan().all()
    rest = torch.arange(40) != 7
    assert torch.allclose(out[rest].double(), exact[rest], rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


# ---- LDS images -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile_k", [128, 256])
@pytest.mark.parametrize("columns", [32, 64, 128, 256])
def test_images_of_packed_columns(columns: int, tile_k: int) -> None:
    """Lines are a permutation of k; a transposing read of half a wave touches each bank once; the bank model can tell."""
    tile = OperandTile(columns // 2, tile_k, False, 1, 64, 1, 16, packed=True)
    assert sorted(tile.source_row(line) for line in range(tile_k)) == list(range(tile_k))
    assert tile.slice_k == 128 and tile.unpacked.extent == columns
    line_of = {tile.source_row(line): line for line in range(tile_k)}
    seen = set()
    worst = 0
    for pair in range(columns // 32):
        for half in (0, 16):
            for k_slice in range(tile_k // 128):
                lanes = []
                for lane in range(64):
                    group, row = lane // 16, lane % 16
                    line = line_of[128 * k_slice + 32 * group + half + row]
                    assert line - line_of[128 * k_slice + 32 * group + row] == half * 2
                    lanes.append(tile.address(line, pair) + 8 * (group & 1))
                seen.update(lanes)
                assert bank_conflicts(lanes, [range(32), range(32, 64)], 8, 64) == 0
                straight = [address & ~15 for address in lanes]
                worst = max(worst, bank_conflicts(straight, [range(32), range(32, 64)], 8, 64))
    assert worst > 0 and len(seen) == columns // 32 * tile_k


@pytest.mark.parametrize("tile_k", [128, 256, 512])
def test_images_of_packed_rows(tile_k: int) -> None:
    for group in (1, 2):
        tile = OperandTile(64, tile_k // 2, True, 1, 64, group, 16, packed=True)
        assert tile.slice_k == 64
        for chunk in range(0, tile.chunks_per_line, 4):
            lanes = [tile.address(lane % 16, chunk + lane // 16) for lane in range(64)]
            assert bank_conflicts(lanes, read_b128_groups(64), 16, 64) == 0


# ---- machine code ---------------------------------------------------------------------------------------------------


@functools.cache
def compiled(pair: tuple[str, str], layout: str, index: int, K: int = 4096, **fields: Any) -> tuple[Any, Any]:
    problem = case_of(pair, layout, Shape("large", 4096, 4096, K), **fields).problem
    config = configs(pair, layout)[index]
    return isa.compile_isa(problem, config, ARCH), config


ISA_CASES = [
    (PAIRS[0], "TN", 0),
    *(pytest.param(PAIRS[0], layout, i, marks=pytest.mark.slow) for layout, i in (("NT", 0), ("NN", 0), ("NN", 1))),
    *(
        pytest.param(pair, layout, 0, marks=(pytest.mark.slow, pytest.mark.exhaustive))
        for pair in PAIRS[1:3] for layout in LAYOUTS
    ),
    *(
        pytest.param(PAIRS[0], layout, i, marks=(pytest.mark.slow, pytest.mark.exhaustive))
        for layout in LAYOUTS for i in (2, 3)
    ),
]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
@pytest.mark.parametrize(("pair", "layout", "index"), ISA_CASES)
def test_the_main_loop(pair: tuple[str, str], layout: str, index: int) -> None:
    kernel, config = compiled(pair, layout, index)
    print(kernel)
    packed = pair[0] == "mxfp4", pair[1] == "mxfp4"
    geo = geometry(config, layout, 1, ARCH, True, packed=packed)
    loop = kernel.main_loop
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.lds_bytes == lds_bytes(config, layout, 1, ARCH, True, packed) <= LDS_BYTES[ARCH]
    steps = loop.k // 128
    assert loop.k == geo.tiles_per_step * config.tile_k
    assert loop.mfma == geo.frags_m * geo.frags_n * steps
    assert kernel.text.count("v_mfma_scale_f32_16x16x128_f8f6f4") == kernel.text.count("v_mfma_")
    # The instruction's first operand is b: cbsz 4 is e2m1, as is blgp for a.
    assert ("cbsz:4" in kernel.text, "blgp:4" in kernel.text) == (packed[1], packed[0])
    widths = {"ds_read_b128": 16, "ds_read_b64_tr_b4": 8, "ds_read_b64_tr_b8": 8}
    assert set(loop.lds_reads) <= set(widths)
    read = sum(widths[name] * (count - scale_reads(geo).get(name, 0)) for name, count in loop.lds_reads.items())
    assert read == sum(
        frags * (16 if each else 32) * steps for frags, each in zip((geo.frags_m, geo.frags_n), packed, strict=True)
    )
    assert (loop.loads_to_lds, loop.loads) == (geo.tiles_per_step * geo.loads_per_tile, 0)
    assert kernel.text.count("buffer_load_dwordx4") == kernel.text.count(" lds") > 0
    counted = [wait for wait in loop.waits if "vmcnt" in wait]
    assert len(counted) == loop.barriers == geo.tiles_per_step
    assert all(f"vmcnt({(geo.num_stages - 2) * geo.loads_per_tile})" in wait for wait in counted)


@pytest.mark.slow
def test_lds_does_not_depend_on_k() -> None:
    shallow, config = compiled(PAIRS[0], "TN", 4, K=1024)
    deep, _ = compiled(PAIRS[0], "TN", 4, K=65536)
    assert shallow.lds_bytes == deep.lds_bytes == lds_bytes(config, "TN", 1, ARCH, True, (True, True))


# ---- what there is --------------------------------------------------------------------------------------------------


def problem_of(layout: str = "TN", **fields: Any) -> GemmProblem:
    base = GemmProblem(64, 64, 64, layout, FP4, FP4, BF16, a_scaling="1x32", b_scaling="1x32")
    return dataclasses.replace(base, **fields)


@pytest.mark.parametrize(
    ("problem", "arch", "text"),
    [
        (problem_of(), "gfx942", "gfx942 has no matrix instruction"),
        (problem_of(a_scaling=None, a_dtype=FP32), ARCH, "a is torch.float32 with scales None beside packed e2m1"),
        (problem_of(b_dtype=torch.float8_e4m3fn, b_scaling="row"), ARCH, "b is torch.float8_e4m3fn with scales 'row'"),
        (problem_of("NN", N=63), ARCH, "N=63: rows of b are packed"),
        (problem_of("NT", M=63), ARCH, "M=63: rows of a are packed"),
        (problem_of("TN", K=63), ARCH, "K=63: rows of a are packed"),
        (problem_of("NN", activation="swiglu"), ARCH, "swiglu with packed e2m1 in layout NN"),
    ],
)
def test_what_is_refused(problem: GemmProblem, arch: str, text: str) -> None:
    assert text in (why_unsupported(problem, None, arch) or "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_configs(layout: str) -> None:
    problem = problem_of(layout)
    good = candidates_for(problem, ARCH)[1]
    assert why_unsupported(problem, good, ARCH) is None
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_stages": 2}, "in halves"),
        ({"tile_k": 64}, "multiple of 128"),
        ({"tile_k": 1024, "num_stages": 3}, ""),
        ({"split_k": 33}, "at most 32"),
    )
    for changed, text in changes:
        assert text in (why_unsupported(problem, dataclasses.replace(good, **changed), ARCH) or "nothing")
        assert why_unsupported(problem, dataclasses.replace(good, **changed), ARCH) is not None
    narrow = dataclasses.replace(good, tile_n=64, waves_m=1, waves_n=4, tile_k=256)
    assert ("32 columns at a time" in (why_unsupported(problem, narrow, ARCH) or "")) == (layout != "TN")
    largest = candidates_for(problem, ARCH)[0]
    assert (why_unsupported(problem, largest, ARCH) is None) == (layout != "NT")
    large = dataclasses.replace(problem, M=8192, N=8192, K=8192)
    chosen, reasons = default_config(large, ARCH)
    assert chosen == configs(PAIRS[0], layout)[0]
    assert any("modelled, not measured" in reason for reason in reasons)
