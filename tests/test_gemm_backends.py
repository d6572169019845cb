"""fw.gemm on every backend against float64, and against backend `native`: one file, whatever runs it. (Quantized operands against float64:
test_gemm_quantized.py.)

Every element is compared, outputs start as NaN with guard bytes around, and operands lie in buffers full of NaN. On the
simulator a finding of its checkers raises, so a passing test has none. Each kind of call is compiled once per process;
what a test varies beyond shapes, strides and alpha costs a compilation there, so it is varied on few cases.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm.config import GemmConfig, candidates
from fourwave.ops.gemm.problem import ACTIVATIONS, LAYOUTS
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import GemmCase, bounds, inputs
from fourwave.testing.shapes import GEMM_SHAPES, GEMM_SHAPES_FULL, Shape, by_name
from targets import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIM = registry.get("sim").unavailable()
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def check(case: GemmCase, target: Target, config: GemmConfig | None = None) -> None:
    # Hopper's matrix unit cuts off where float32 rounds, and products of small parts of float32 are left out.
    u_acc = bounds.U_FP32 * (2 if target.backend == "hopper" and case.dtype == FP32 else 1)
    result = case.run(target.backend, device=target.device, config=config, u_acc=u_acc)
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}: {result.ratio:.3g} times the bound at {list(result.worst)}"


@every_layout
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_shapes(target: Target, layout: str, shape: Shape) -> None:
    check(GemmCase(shape, layout), target)


@pytest.mark.slow
@every_layout
@pytest.mark.parametrize("shape", GEMM_SHAPES_FULL, ids=str)
def test_more_tiles(target: Target, layout: str, shape: Shape) -> None:
    check(GemmCase(shape, layout), target)


@pytest.mark.parametrize("layout", ["TN", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("NN", "NT"))])
@pytest.mark.parametrize("index", range(5))
def test_configs(target: Target, layout: str, index: int) -> None:
    """Every tile of the AMD kernels, on several tiles with tails in M, N and K."""
    if target.backend in ("native", "hopper"):
        pytest.skip("native takes no config; those of hopper are in tests/test_hopper.py")
    configs = candidates(registry.get(target.backend).describe_gemm(GemmCase(by_name("even")).problem, None).arch or "")
    assert len(configs) == 5, "one index per config"
    config = configs[index]
    shape = Shape("tails, 4 tiles", 2 * config.tile_m - 12, 2 * config.tile_n - 3, 3 * config.tile_k + 9)
    case = GemmCase(shape, layout, a_view="offset", b_view="sliced", out_view="sliced")
    check(case, target, config)
    check(replace(case, shape=replace(shape, K=7)), target, config)


# What `native` and each other backend are given alike: a, b (None: bfloat16; a dtype: plain operands of it), layouts.
PAIRS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "bf16": (BF16, BF16, LAYOUTS),
    "fp16": (FP16, FP16, ("TN",)),
    "fp32": (FP32, FP32, ("TN",)),
    "e4m3 x e5m2": ("fp8_e4m3", "fp8_e5m2", LAYOUTS),
    "rows": ("fp8_row", "fp8_row", ("TN",)),
    "blocks": ("fp8_1x128", "fp8_128x128", ("TN",)),
    "mxfp8": ("mxfp8_e5m2", "mxfp8_e4m3", LAYOUTS),
}


@pytest.mark.parametrize(
    ("pair", "layout"), [(name, layout) for name, (*_, layouts) in PAIRS.items() for layout in layouts]
)
def test_as_native(target: Target, pair: str, layout: str) -> None:
    """The same operands, tails in M, N and K, bias and activation: apart by no more than both may be from the exact result."""
    if target.backend == "native":
        pytest.skip("what the others are compared with")
    a_kind, b_kind, _ = PAIRS[pair]
    plain = isinstance(a_kind, torch.dtype)
    case = GemmCase(by_name("tail all"), layout, a_kind if plain else BF16, fnuz=target.backend == "sim:gfx942")
    if not plain:
        case = replace(
            case, a_format=a_kind, b_format=b_kind, transposed=target.backend == "hopper" and a_kind.startswith("fp8_")
        )
    a, b = case.operands(target.device)
    bias = torch.linspace(-2, 2, case.shape.N, device=target.device)
    told: dict[str, Any] = {"trans_a": layout == "NT", "trans_b": layout == "TN"}
    told |= {"bias": bias, "activation": "silu", "alpha": 0.7}
    ours, theirs = (fw.gemm(a, b, out_dtype=FP32, backend=name, **told) for name in (target.backend, "native"))
    a_values, b_values = (t if isinstance(t, torch.Tensor) else t.dequantize(torch.float64) for t in (a, b))
    u_acc = bounds.U_FP32 * (2 if target.backend == "hopper" and a_kind is FP32 else 1)
    if target.device == "cuda" and case.problem.precision == "fp8":
        u_acc = bounds.hopper_fp8_u_acc(case.shape.K, promote=True, wide=True)
    bounds.assert_within(
        ours, theirs.double(), 2 * bounds.gemm_bound(a_values, b_values, FP32, u_acc=u_acc, scaled=not plain, **told)
    )


@every_layout
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", ["even", "tail all"])
def test_dtypes(target: Target, layout: str, dtype: torch.dtype, shape: str) -> None:
    check(GemmCase(by_name(shape), layout, dtype), target)


@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, FP32), (BF16, FP16), (FP16, FP32), (FP16, BF16), (FP32, BF16)])
def test_out_dtypes(target: Target, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    check(GemmCase(by_name("tail all"), "TN", dtype, out_dtype), target)


@every_layout
@pytest.mark.parametrize("view", [view for view in inputs.VIEWS if view != "contiguous"])
def test_views(target: Target, layout: str, view: str) -> None:
    """Operands and output as slices, at odd offsets, transposed and with steps, alone and together."""
    shape = by_name("tail all")
    check(GemmCase(shape, layout, a_view=view), target)
    check(GemmCase(shape, layout, b_view=view), target)
    check(GemmCase(shape, layout, out_view=view), target)
    check(GemmCase(shape, layout, a_view=view, b_view=view, out_view=view), target)


@every_layout
def test_views_of_even_shapes(target: Target, layout: str) -> None:
    """Where the shape has no tail, only the stride says that the rows are apart."""
    for view in ("sliced", "offset"):
        check(GemmCase(by_name("even"), layout, a_view=view, b_view=view, out_view=view), target)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogue(target: Target, activation: str | None) -> None:
    bias_dtype = FP32 if activation is None else BF16
    case = GemmCase(by_name("tail all"), "TN", bias_dtype=bias_dtype, activation=activation, alpha=-0.75)
    check(case, target)


@pytest.mark.parametrize("backend", ["native", "sim:gfx950", "sim:gfx942"])
@pytest.mark.parametrize(
    "activation", ["gelu", *(pytest.param(name, marks=pytest.mark.slow) for name in ACTIVATIONS if name != "gelu")]
)
def test_activations_of_what_is_large_or_infinite(backend: str, activation: str) -> None:
    if why := registry.get(backend).unavailable():
        pytest.skip(why)
    largest = torch.finfo(FP32).max
    z = torch.tensor([17.0, 1e10, 2e19, 1e38, largest, math.inf, -1e10, -largest, -math.inf, math.nan])
    # 40 equal columns: vectors of PyTorch's CPU kernels, and what is left of them.
    out = fw.gemm(z[:, None], torch.ones(40, 1), activation=activation, backend=backend)
    of_minus_inf = 0.0 if activation == "relu" else math.nan  # -inf times 0
    want = torch.tensor([*z[:6].tolist(), 0.0, 0.0, of_minus_inf, math.nan])
    assert torch.equal(out.nan_to_num(123.0, math.inf), want.nan_to_num(123.0, math.inf)[:, None].expand(10, 40))


@pytest.mark.parametrize(("out_dtype", "activation"), [(FP32, None), (BF16, "relu")], ids=str)
def test_accumulate(target: Target, out_dtype: torch.dtype, activation: str | None) -> None:
    """wgrad's layout adds to a gradient, in a view of a larger buffer too; the addend is not activated."""
    case = GemmCase(by_name("tail all"), "NT", out_dtype=out_dtype, activation=activation, alpha=0.5, accumulate=True)
    for out_view in ("contiguous", "offset", "transposed"):
        check(replace(case, out_view=out_view), target)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -2.5, 1e-3])
def test_alpha(target: Target, alpha: float) -> None:
    check(GemmCase(by_name("small"), alpha=alpha), target)


@every_layout
def test_small_integers_are_exact(target: Target, layout: str) -> None:
    """Sums of small integers fit in every format on the way: not a bit may differ, whatever the order."""
    generator = torch.Generator().manual_seed(3)
    a_shape, b_shape = {
        "TN": ((70, 96), (40, 96)),
        "NN": ((70, 96), (96, 40)),
        "NT": ((96, 70), (96, 40)),
    }[layout]
    a = torch.randint(-4, 5, a_shape, generator=generator).to(target.device, BF16)
    b = torch.randint(-4, 5, b_shape, generator=generator).to(target.device, BF16)
    trans_a, trans_b = layout == "NT", layout == "TN"
    out = fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=FP32, backend=target.backend)
    exact = gemm_reference(a, b, trans_a=trans_a, trans_b=trans_b)
    assert torch.equal(out.double(), exact)


def test_sliced_and_offset_operands_give_the_contiguous_result(target: Target) -> None:
    """Bit for bit. Integers, because a library may sum in another order for another alignment (cuBLAS does)."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 9, shape, generator=generator).to(target.device, BF16)

    x, w, flat = integers(64, 160), integers(48, 128), integers(5 + 64 * 128)
    for view in (x[:, :128], x[:, 3:131], flat[5:].view(64, 128), x.mT[:128].mT, x[::2, :128]):
        contiguous = view.clone(memory_format=torch.contiguous_format)
        expected = fw.gemm(contiguous, w, backend=target.backend)
        assert torch.equal(expected.double(), (contiguous.double() @ w.double().mT).to(BF16).double())
        assert torch.equal(fw.gemm(view, w, backend=target.backend), expected)
        swapped = fw.gemm(w, contiguous, backend=target.backend)
        assert torch.equal(fw.gemm(w, view, backend=target.backend), swapped)


def test_a_bias_of_one_element_may_have_any_stride(target: Target) -> None:
    x, w = torch.ones(4, 16, dtype=BF16, device=target.device), torch.ones(1, 16, dtype=BF16, device=target.device)
    bias = torch.tensor([0.5, 9.0, 9.0], device=target.device)[::3]
    assert bias.stride() == (3,)
    out = fw.gemm(x, w, bias=bias, backend=target.backend)
    assert out.flatten().tolist() == [16.5] * 4


def test_expanded_and_negated_operands(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(1, 64, generator=generator).to(target.device, BF16)
    column = torch.randn(16, 1, generator=generator).to(target.device, BF16)
    w = torch.randn(24, 64, generator=generator).to(target.device, BF16)
    negated = torch._neg_view(w)
    assert negated.is_neg()
    for a, b in ((row.expand(16, 64), w), (column.expand(16, 64), w), (w, row.expand(16, 64)), (row, negated)):
        exact, bound = gemm_reference(a, b), bounds.gemm_bound(a, b, BF16)
        bounds.assert_within(fw.gemm(a, b, backend=target.backend), exact, bound)


def test_leading_dimensions(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 2, 48, generator=generator).to(target.device, BF16)
    w = torch.randn(24, 48, generator=generator).to(target.device, BF16)
    dout = torch.randn(3, 5, 2, 24, generator=generator).to(target.device, BF16)
    x2, dout2 = x.reshape(30, 48), dout.reshape(30, 24)

    def run(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        return fw.gemm(a, b, backend=target.backend, **options)  # type: ignore[arg-type]

    fprop = run(x, w)
    assert fprop.shape == (3, 5, 2, 24)
    assert torch.equal(fprop.reshape(30, 24), run(x2, w))
    dgrad = run(dout, w, trans_b=False)
    assert dgrad.shape == (3, 5, 2, 48)
    assert torch.equal(dgrad.reshape(30, 48), run(dout2, w, trans_b=False))
    wgrad = run(dout, x, trans_a=True, trans_b=False)
    assert wgrad.shape == (24, 48)
    assert torch.equal(wgrad, run(dout2, x2, trans_a=True, trans_b=False))
    # Leading dimensions that do not flatten into one stride, in the operand and in the output.
    crossed = x.transpose(0, 2)
    assert torch.equal(run(crossed, w), run(crossed.contiguous(), w))
    out = torch.full((2, 5, 3, 24), float("nan"), dtype=BF16, device=target.device).transpose(0, 2)
    assert run(x, w, out=out) is out
    assert torch.equal(out, fprop)
    vector = run(x2[0], w)
    assert vector.shape == (24,) and torch.equal(vector, run(x2[:1], w)[0])


@pytest.mark.parametrize("bias_dtype", [FP16, BF16, FP32], ids=str)
def test_bias_of_any_stride(target: Target, bias_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, 32, generator=generator).to(target.device, BF16)
    b = torch.randn(24, 32, generator=generator).to(target.device, BF16)
    wide = torch.full((72,), float("nan"), dtype=bias_dtype, device=target.device)
    values = torch.randn(24, generator=generator).to(target.device, bias_dtype)
    for bias in (wide[1:49:2], wide[7:31], values[:1].expand(24)):
        if bias.stride(0) != 0:
            bias.copy_(values)
        out = fw.gemm(a, b, bias=bias, out_dtype=FP32, backend=target.backend)
        bounds.assert_within(out, gemm_reference(a, b, bias=bias), bounds.gemm_bound(a, b, FP32, bias=bias))


def test_empty(target: Target) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=BF16, device=target.device)

    bias = torch.arange(-2, 3, device=target.device, dtype=BF16)

    def run(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        return fw.gemm(a, b, backend=target.backend, **options)  # type: ignore[arg-type]

    assert run(zeros(0, 8), zeros(5, 8)).shape == (0, 5)
    assert run(zeros(2, 0, 8), zeros(5, 8), bias=bias).shape == (2, 0, 5)
    assert run(zeros(4, 8), zeros(0, 8)).shape == (4, 0)
    assert run(zeros(8, 0), zeros(8, 5), trans_a=True, trans_b=False).shape == (0, 5)
    assert torch.equal(run(zeros(4, 0), zeros(5, 0)), zeros(4, 5))
    assert torch.equal(run(zeros(0, 4), zeros(0, 5), trans_a=True, trans_b=False), zeros(4, 5))
    assert torch.equal(run(zeros(4, 0), zeros(0, 5), trans_b=False, bias=bias), bias.expand(4, 5))
    assert torch.equal(run(zeros(4, 0), zeros(5, 0), bias=bias, activation="relu"), bias.relu().expand(4, 5))
    for out in (torch.full((4, 5), 3.0, device=target.device), torch.full((5, 4), 3.0, device=target.device).mT):
        assert torch.equal(run(zeros(4, 0), zeros(5, 0), out=out, accumulate=True), torch.full_like(out, 3.0))
        assert torch.equal(run(zeros(4, 0), zeros(5, 0), out=out, accumulate=True, bias=bias), 3.0 + bias.expand(4, 5))
        assert torch.equal(run(zeros(4, 0), zeros(5, 0), out=out), torch.zeros_like(out))


def test_gradients(target: Target) -> None:
    """Backward runs the other two layouts on the same backend."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 20, 32, generator=generator).to(target.device, BF16).requires_grad_()
    w = torch.randn(24, 32, generator=generator).to(target.device, BF16).requires_grad_()
    bias = torch.randn(24, generator=generator).to(target.device).requires_grad_()
    dout = torch.randn(2, 20, 24, generator=generator).to(target.device, BF16)
    out = fw.gemm(x, w, bias=bias, alpha=0.5, backend=target.backend)
    dx, dw, dbias = torch.autograd.grad(out, (x, w, bias), dout)
    x2, dout2 = x.detach().flatten(0, 1), dout.flatten(0, 1)
    assert dx.shape == x.shape and dx.dtype == BF16 and dbias.dtype == FP32
    for got, a, b, trans_a in ((dx.flatten(0, 1), dout2, w.detach(), False), (dw, dout2, x2, True)):
        exact = gemm_reference(a, b, trans_a=trans_a, trans_b=False, alpha=0.5)
        bound = bounds.gemm_bound(a, b, BF16, trans_a=trans_a, trans_b=False, alpha=0.5)
        bounds.assert_within(got, exact, bound)
    torch.testing.assert_close(dbias, dout2.double().sum(0).float())


@pytest.mark.skipif(SIM is not None, reason=f"sim: {SIM}")
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_a_single_element_of_any_stride(arch: str) -> None:
    """It counts as contiguous whatever its stride, and kernels are traced with stride 1."""
    x = torch.randn(5, 32).bfloat16()
    grad, bias = torch.full((8,), math.nan)[::8], torch.randn(8).bfloat16()[::8]
    kwargs: dict[str, Any] = {"trans_a": True, "trans_b": False, "backend": f"sim:{arch}"}
    product = fw.gemm(x[:, :1].contiguous(), x[:, 1:2].contiguous(), bias=bias, bias_grad=grad, **kwargs)
    assert abs(float(grad) - float(x[:, 0].double().sum())) < 1e-5
    right = fw.gemm(x[:, :1].contiguous(), x[:, 1:2].contiguous(), bias=bias.clone(), **kwargs)
    assert torch.equal(product, right)
