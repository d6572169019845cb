"""The GEMM kernel for gfx1250 with MXFP8 and bfloat16 operands, few rows and further outputs; MXFP4 alone: test_gfx1250.py."""

from __future__ import annotations

import functools
from typing import Any

import gfx1250_launches
import pytest
import torch
from gfx1250_launches import OPERANDS, case_of, layouts
from launches import every_code_and_scale

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm.config import why_unsupported
from fourwave.ops.gemm.gfx1250_config import LDS_LIMIT, candidates, geometry
from fourwave.perf import isa
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
from fourwave.testing.cases import GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.shapes import Shape

ARCH = "gfx1250"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
needs_sim = pytest.mark.skipif(
    sim.unavailable("gfx1250") is not None, reason=f"no simulator: {sim.unavailable('gfx1250')}"
)
EACH = [
    pytest.param(
        operands, layout, marks=[] if (operands, layout) in (("mxfp8 x mxfp4", "TN"), ("bf16 x mxfp4", "NN")) else pytest.mark.slow
    )
    for operands in OPERANDS
    for layout in layouts(operands)
]  # fmt: skip


def passes(case, config=None):
    result = case.run("sim:gfx1250", config=config)
    assert result.passed, result


@needs_sim
@pytest.mark.parametrize(("operands", "layout"), EACH)
def test_tails(operands, layout):
    """In M, N and K, past the first page of scales; and what fits a small tile. NaN lies between the rows of what is not packed."""
    passes(case_of(operands, layout, Shape("", 290, 270, 1090), a_view="sliced", b_view="sliced"))
    passes(case_of(operands, layout, Shape("", 18, 146, 202)))


@needs_sim
@pytest.mark.parametrize("index", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(("operands", "layout"), EACH)
def test_sums_of_scales_are_exact(operands, layout, index):
    """Every sum is exact, and a scale taken from another row, block or page changes it; each tile."""
    config = candidates(case_of(operands, layout, Shape("", 64, 64, 64)).problem)[index]
    case = ExactScales(Shape("", config.tile_m, 256, 2304), layout, out_dtype=FP32, **OPERANDS[operands])
    passes(case, config)


@needs_sim
@pytest.mark.parametrize(("operands", "layout"), EACH)
def test_codes_meet_their_own(operands, layout):
    """One value that is not zero in each row of a, at a k of its own: row m of out is column k of b's values."""
    M, N, K = 64, 256, 384
    case = case_of(operands, layout, Shape("", M, N, K), seed=4)
    _, b = case.operands()
    assert isinstance(b, QuantizedTensor)
    k = (torch.arange(M) * 37 + 5) % K
    values = torch.zeros(M, K)
    values[torch.arange(M), k] = 1.0
    values = values if layout != "NT" else values.mT.contiguous()
    name = case.a_format
    a = values.bfloat16() if name is None else fw.quantize(values, name, "columnwise" if layout == "NT" else "rowwise")
    out = fw.gemm(
        a, b, trans_a=layout == "NT", trans_b=layout == "TN", backend="sim:gfx1250", out_dtype=FP32
    )  # fmt: skip
    right = b.dequantize(torch.float64)
    assert torch.equal(out.double(), right[:, k].mT if layout == "TN" else right[k])


@needs_sim
@pytest.mark.parametrize("layout", ["TN", pytest.param("NN", marks=pytest.mark.slow)])
def test_each_code_and_scale_becomes_its_bfloat16(layout):
    """Every e2m1 code with every scale that keeps it in bfloat16's range, times one: bit for bit. NaN scales give NaN."""
    a, b, exact = every_code_and_scale(layout)
    out = fw.gemm(a, b, trans_b=layout == "TN", backend="sim:gfx1250", out_dtype=FP32)
    assert torch.equal(out.double().nan_to_num(-1.0), exact.nan_to_num(-1.0))


@needs_sim
@pytest.mark.slow
@pytest.mark.parametrize(("operands", "layout"), [("mxfp8 x mxfp4", "TN"), ("bf16 x mxfp4", "NN")])
@pytest.mark.parametrize("options", [{"completion": "random", "schedule": "reverse"}])
def test_order_does_not_matter(operands, layout, options, monkeypatch):
    monkeypatch.setattr(sim, "session", functools.partial(sim.session, **options))
    passes(case_of(operands, layout, Shape("", 64, 250, 2592)))


@needs_sim
@pytest.mark.parametrize("rows", [pytest.param(300, marks=pytest.mark.slow), 18])
@pytest.mark.parametrize(
    "fields",
    [
        {"bias_dtype": FP32, "activation": "silu", "preactivation": BF16},
        {"out_dtype": BF16, "activation": "gelu", "preactivation": FP32, "accumulate": True, "out_view": "sliced"},
        {"out_dtype": FP16, "preactivation": FP16, "accumulate": True, "alpha": 0.5},
    ],
)
def test_preactivation(fields, rows):
    passes(case_of("mxfp4", "TN", Shape("", rows, 274, 160), **fields))


@needs_sim
@pytest.mark.parametrize(
    ("operands", "rows", "fields"),
    [
        pytest.param("mxfp4", 300, {"bias_grad": FP32}, marks=pytest.mark.slow),
        ("mxfp4", 32, {"bias_grad": BF16, "accumulate": True}),
        pytest.param(
            "mxfp8 x mxfp4",
            50,
            {"bias_grad": FP16, "accumulate": True, "bias_dtype": BF16, "preactivation": BF16},
            marks=pytest.mark.slow,
        ),
        pytest.param("mxfp8", 142, {"bias_grad": FP32, "out_dtype": BF16}, marks=pytest.mark.slow),
    ],
)
def test_bias_grad(operands, rows, fields):
    """NaN scales of b do not reach it."""
    case = case_of(operands, "NT", Shape("", rows, 514, 1090), **fields)
    passes(case)
    a, b = case.operands()
    assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and b.columnwise_scale is not None
    b.columnwise_scale.view(torch.uint8)[3] = 255
    sums = torch.full((rows,), float("nan"))
    out = fw.gemm(a, b, trans_a=True, trans_b=False, bias_grad=sums, backend="sim:gfx1250", out_dtype=FP32)
    assert out.isnan().all() and sums.isfinite().all()


SWIGLU = [
    ("mxfp4", "TN", Shape("", 18, 274, 1090), {"preactivation": FP32}),
    ("mxfp4", "NN", Shape("", 18, 300, 160), {"preactivation": FP32, "bias_dtype": BF16, "accumulate": True, "out_dtype": BF16}),
    pytest.param("mxfp4", "TN", Shape("", 300, 514, 2304), {"preactivation": FP32, "accumulate": True}, marks=pytest.mark.slow),
    pytest.param("mxfp8", "NT", Shape("", 300, 546, 202), {"preactivation": FP32, "bias_grad": FP32}, marks=pytest.mark.slow),
    pytest.param("mxfp8 x mxfp4", "NN", Shape("", 142, 512, 1184), {"preactivation": FP32, "alpha": 0.5}, marks=pytest.mark.slow),
    pytest.param("bf16 x mxfp4", "TN", Shape("", 300, 530, 1090), {"preactivation": FP32, "out_dtype": BF16}, marks=pytest.mark.slow),
    pytest.param("bf16 x mxfp4", "NN", Shape("", 50, 532, 202), {"preactivation": FP32, "out_dtype": FP16}, marks=pytest.mark.slow),
]  # fmt: skip


@needs_sim
@pytest.mark.parametrize(("operands", "layout", "shape", "fields"), SWIGLU)
def test_swiglu(operands, layout, shape, fields):
    """Both factors come from their halves of b: z, which is saved, has the bits of the product without an activation."""
    passes(case_of(operands, layout, shape, activation="swiglu", **fields))
    case = case_of(operands, layout, shape)
    z = torch.full((shape.M, shape.N), float("nan"))
    told = {"trans_a": layout == "NT", "trans_b": layout == "TN", "backend": "sim:gfx1250", "out_dtype": FP32}
    fw.gemm(*case.operands(), activation="swiglu", preactivation=z, **told)
    assert torch.equal(z, fw.gemm(*case.operands(), **told))


QUANTIZED = [
    ("mxfp4", "TN", Shape("", 40, 274, 202), {"out_format": "mxfp8_e4m3", "out_direction": "both", "preactivation": BF16}),
    ("mxfp4", "NN", Shape("", 18, 300, 160), {"out_format": "mxfp8_e5m2", "out_direction": "columnwise", "activation": "swiglu"}),
    ("mxfp4", "TN", Shape("", 300, 274, 160), {"out_format": "fp8_e4m3", "activation": "gelu"}),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("mxfp4", "TN", Shape("", 300, 290, 1090), {"out_format": "mxfp8_e4m3", "bias_dtype": BF16, "out_scale_rule": "ceil"}),
            ("mxfp8", "NT", Shape("", 150, 274, 202), {"out_format": "mxfp8_e4m3", "out_direction": "both", "bias_grad": FP32}),
            ("mxfp8 x mxfp4", "NN", Shape("", 300, 580, 202), {"out_format": "fp8_e5m2", "activation": "swiglu", "alpha": 0.5}),
            ("bf16 x mxfp4", "TN", Shape("", 150, 530, 202), {"out_format": "mxfp8_e5m2", "out_direction": "both", "activation": "swiglu"}),
            ("bf16 x mxfp4", "NN", Shape("", 50, 274, 202), {"out_format": "mxfp8_e4m3", "out_direction": "columnwise"}),
            ("mxfp4", "TN", Shape("", 1, 2, 64), {"out_format": "mxfp8_e4m3", "out_direction": "both"}),
        )
    ),
]  # fmt: skip


@needs_sim
@pytest.mark.parametrize(("operands", "layout", "shape", "fields"), QUANTIZED)
def test_quantized_results(operands, layout, shape, fields):
    """The bytes of the quantizer, given the same kernel's float32 result: codes, scales of rows and columns, amax."""
    passes(case_of(operands, layout, shape, out_dtype=None, **fields))


@needs_sim
def test_quantized_results_with_nan_and_infinity():
    """A block that holds one of them has scale NaN; amax of FP8 is NaN; other blocks do not change."""
    a, b = case_of("mxfp4", "TN", Shape("", 40, 130, 96)).operands()
    assert isinstance(a, QuantizedTensor) and a.scale is not None
    a.scale.view(torch.uint8)[37, 1] = 255
    bias = torch.zeros(130)
    bias[70] = float("inf")
    told: Any = {"bias": bias, "backend": "sim:gfx1250"}
    got: Any
    right: Any
    y = fw.gemm(a, b, out_dtype=FP32, **told)
    assert y[37].isnan().all() and y[:37, 70].isinf().all()
    got = fw.gemm(a, b, out_format="mxfp8_e4m3", out_direction="both", **told)
    right = fw.quantize(y, "mxfp8_e4m3", "both", backend="native")
    for name in ("data", "scale", "columnwise_data", "columnwise_scale"):
        assert torch.equal(getattr(got, name).view(torch.uint8), getattr(right, name).view(torch.uint8)), name
    assert (right.scale.view(torch.uint8) == 255).sum() == 5 + 39
    scale = torch.tensor(0.25)
    got, right = (
        fw.gemm(a, b, out_format="fp8_e4m3", out_scale=scale, **told),
        fw.quantize(y, "fp8_e4m3", scale=scale, backend="native"),
    )
    assert got.amax.isnan() and right.amax.isnan()
    assert torch.equal(got.data.view(torch.uint8), right.data.view(torch.uint8))


@needs_sim
@pytest.mark.slow
def test_rows_do_not_depend_on_their_number():
    """Each tile adds along K in the same order."""
    a, b = case_of("mxfp4", "TN", Shape("", 300, 128, 640)).operands()
    assert isinstance(a, QuantizedTensor) and a.data is not None and a.scale is not None
    every = fw.gemm(a, b, backend="sim:gfx1250", out_dtype=FP32, batch_invariant=True)
    for rows in (1, 33, 64, 65):
        few = QuantizedTensor.from_codes("mxfp4", a.data[:rows], a.scale[:rows])
        out = fw.gemm(few, b, backend="sim:gfx1250", out_dtype=FP32, batch_invariant=True)
        assert torch.equal(out, every[:rows])


def _skewed(monkeypatch, kernel):
    """The next tile's codes."""
    codes = kernel.wmma.Operand.codes

    def moved(self, lds, start):
        return codes(self, lds, start + 16 * (self.side.bits != 4))

    monkeypatch.setattr(kernel.wmma.Operand, "codes", moved)


def _other_scale(monkeypatch, kernel):
    make = kernel._Strip.scales

    def one_further(geo, which, tensor, first, size, K, lds):
        return make(geo, which, tensor, first + (which == 1), size, K, lds)

    monkeypatch.setattr(kernel._Strip, "scales", staticmethod(one_further))


def _half_of_scales(monkeypatch, kernel):
    """Wave 3 brings what wave 2 does."""
    half = kernel._Strip.half
    monkeypatch.setattr(kernel._Strip, "half", lambda self, second: half(self, second & (self.per_page == 0)))


@needs_sim
@pytest.mark.parametrize(
    ("operands", "break_it"),
    [
        ("mxfp8 x mxfp4", _skewed),
        pytest.param("bf16 x mxfp4", _skewed, marks=pytest.mark.slow),
        pytest.param("bf16 x mxfp4", _other_scale, marks=pytest.mark.slow),
        ("mxfp8", _other_scale),
        pytest.param("bf16 x mxfp4", _half_of_scales, marks=pytest.mark.slow),
    ],
)
def test_broken_kernels_are_seen(monkeypatch, operands, break_it):
    from fourwave.ops.gemm import amd, gfx1250

    monkeypatch.setattr(amd, "_compiled", {})
    break_it(monkeypatch, gfx1250)
    try:
        result = case_of(operands, "TN", Shape("", 32, 256, 2560)).run("sim:gfx1250")
    except sim.SimulationError:
        return
    assert not result.passed


SUMS = {"bias_grad": FP32, "bias_dtype": BF16, "accumulate": True}
SAVED = {"preactivation": BF16, "accumulate": True}


@needs_sim
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "fields", "which"),
    [
        pytest.param("NT", SUMS, 4, id="what was in bias_grad"),
        pytest.param("NT", SUMS, 5, id="bias_grad, whose place the bias takes"),
        pytest.param("TN", SAVED, 5, id="between passes: two stores of a pass may not stay"),
        pytest.param("TN", {**SAVED, "activation": "swiglu"}, 5, id="between passes: three"),
    ],
)
def test_each_wait_for_further_outputs_is_needed(monkeypatch, layout, fields, which):
    """Those that test_gfx1250.py's call has not; the first four are prologue, main loop (2) and drain."""
    from fourwave.ops.gemm import amd, gfx1250

    monkeypatch.setattr(amd, "_compiled", {})
    wait, seen = gfx1250.tdm.wait_tiles, []

    def raised(in_flight):
        seen.append(in_flight)
        wait(in_flight + (len(seen) == which + 1))

    monkeypatch.setattr(gfx1250.tdm, "wait_tiles", raised)
    with pytest.raises(sim.SimulationError):
        case_of("mxfp4", layout, Shape("", 256, 256, 2560), out_dtype=BF16, **fields).run("sim:gfx1250")
    assert len(seen) > which


def _scale_of_the_next_block(monkeypatch):
    from fourwave.blocks.flydsl import lds_codes

    store = lds_codes.LdsCodes._store
    moved = staticmethod(
        lambda tensor, row, column, lds, tile, left: store(tensor, row, column, lds + (tile[1] <= 4), tile, left)
    )
    monkeypatch.setattr(lds_codes.LdsCodes, "_store", moved)


def _rows_past_the_end_count(monkeypatch):
    from fourwave.blocks.flydsl import lds_codes

    row = lds_codes.LdsCodes.row
    monkeypatch.setattr(
        lds_codes.LdsCodes, "row", lambda self, at, values, used, state: row(self, at, values, at >= 0, state)
    )


def _one_lane_less(monkeypatch):
    from fourwave.blocks.flydsl import lds_codes

    monkeypatch.setattr(
        lds_codes, "lane_max", lambda value, mask, arch, found=lds_codes.lane_max: found(value, mask & ~1, arch)
    )


@needs_sim
@pytest.mark.parametrize(
    ("break_it", "fields"),
    [
        (_one_lane_less, {"out_format": "mxfp8_e4m3"}),
        pytest.param(_scale_of_the_next_block, {"out_format": "mxfp8_e4m3"}, marks=pytest.mark.slow),
        pytest.param(_one_lane_less, {"out_format": "fp8_e4m3"}, marks=pytest.mark.slow),
    ],
)
def test_broken_quantizing_is_seen(monkeypatch, break_it, fields):
    from fourwave.ops.gemm import amd

    monkeypatch.setattr(amd, "_compiled", {})
    break_it(monkeypatch)
    case = case_of("mxfp4", "TN", Shape("", 20, 130, 96), out_dtype=None, **fields)
    try:
        result = case.run("sim:gfx1250")
    except sim.SimulationError:
        return
    assert not result.passed


@needs_sim
@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_past_the_end_are_in_no_amax(monkeypatch, broken):
    """They hold the bias, 50, where the others hold 50 - 48."""
    from fourwave.ops.gemm import amd

    if broken:
        monkeypatch.setattr(amd, "_compiled", {})
        _rows_past_the_end_count(monkeypatch)
    weights, bias = torch.zeros(130, 96), torch.zeros(130)
    weights[7], bias[7] = -0.5, 50
    a, b = fw.quantize(torch.ones(20, 96), "mxfp4"), fw.quantize(weights, "mxfp4")
    y: Any = fw.gemm(a, b, bias=bias, out_format="fp8_e4m3", out_scale=torch.tensor(1.0), backend="sim:gfx1250")
    assert y.amax == (50 if broken else 2)


def test_what_is_refused():
    def refused(**fields):
        return why_unsupported(GemmCase(Shape("", 64, 64, 64), out_dtype=FP32, **fields).problem, None, ARCH) or ""

    assert "a is torch.bfloat16 in layout NT" in refused(layout="NT", **OPERANDS["bf16 x mxfp4"])
    assert "a is torch.float16 with scales None" in refused(dtype=FP16, b_format="mxfp4")
    assert "b is torch.bfloat16 with scales None" in refused(a_format="mxfp4")
    assert "b is torch.bfloat16 with scales None" in refused()
    assert "b is torch.float8_e4m3fn" in refused(b_format="mxfp8_e4m3")
    assert "N=64 in layout" not in refused(activation="swiglu", layout="NN", **OPERANDS["mxfp4"])
    odd = GemmCase(Shape("", 64, 66, 64), "NN", activation="swiglu", **OPERANDS["mxfp4"])
    assert "N is a multiple of 4" in (why_unsupported(odd.problem, None, ARCH) or "")
    mixed = case_of("bf16 x mxfp4", "TN", Shape("", 64, 64, 64)).problem
    packed = case_of("mxfp4", "TN", Shape("", 64, 64, 64)).problem
    assert "16x16x128" in (why_unsupported(mixed, candidates(packed)[0], ARCH) or "")


def test_what_is_refused_of_formats_is_all_that_is_not_built():
    for name in FORMATS:
        built = name in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")
        problem = GemmCase(Shape("", 64, 64, 64), a_format=name, b_format="mxfp4", out_dtype=FP32).problem
        assert (why_unsupported(problem, None, ARCH) is None) is built, name


@needs_sim
@pytest.mark.parametrize("operands", ["mxfp8", pytest.param("bf16 x mxfp4", marks=pytest.mark.slow)])
def test_reads_of_contiguous_k_have_no_bank_conflicts(operands, monkeypatch):
    monkeypatch.setattr(sim, "session", functools.partial(sim.session, count_bank_conflicts=True))
    sim.reset_report()
    passes(case_of(operands, "TN", Shape("", 32, 256, 256)))
    counters = sim.current_report().launches[-1].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"] > 0


def test_lds_fits_and_does_not_depend_on_k():
    for _, case, config in gfx1250_launches.kernels():
        if config is not None:
            assert geometry(case.problem, config).lds <= LDS_LIMIT


VARIANTS = [
    ("mxfp8 x mxfp4", "TN", 0),
    ("bf16 x mxfp4", "TN", 0),
    ("mxfp8", "NT", 0),
    ("mxfp4", "TN", 1),
    ("mxfp4", "TN", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("operands", "layout", "index"), VARIANTS)
def test_what_the_compiler_makes_of_it(operands, layout, index):
    """Per iteration of two steps: two tiles of the data mover, as many waits for one; nothing spilled."""
    problem = case_of(operands, layout, Shape("", 4096, 4096, 4096)).problem
    config = candidates(problem)[index]
    kernel = isa.compile_isa(problem, config, ARCH)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    geo = geometry(problem, config)
    loop = kernel.main_loop
    assert kernel.lds_bytes == geo.lds
    products = geo.a.fragments * geo.b.fragments * (1 if geo.a.scaled else 4)
    assert (loop.k, loop.mfma, loop.loads_to_lds, loop.barriers) == (256, 2 * products, 2, 2)
    assert loop.waits.count("tensorcnt(1)") == 2 and (loop.loads, loop.stores) == (0, 0)
