"""The CDNA kernels' epilogues on the simulator: scales of operands that do not change along K, the saved preactivation, the
bias gradient, quantized output, SwiGLU.

Truth is float64 from the codes and scales that the kernel got; every element has its bound, outputs start as NaN inside
guard bytes. Bias, activations, alpha and accumulation alone are in test_gemm_backends.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import (
    ARCHS,
    FLOAT8,
    GemmConfig,
    candidates,
    candidates_for,
    default_config,
    why_unsupported,
)
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import activate
from fourwave.quantize import quantize
from fourwave.testing import GemmCase, assert_within, buffers, gemm_bound, inputs
from fourwave.testing.bounds import U_FP32
from fourwave.testing.shapes import Shape

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ("TN", "NN", "NT")
SHAPE = Shape("tails", 77, 152, 208)  # rows of out are whole chunks of 16-bit elements
ODD = Shape("odd tails", 77, 145, 203)  # and here they are not: elements are stored one by one


def factors(count: int, seed: int) -> torch.Tensor:
    """float32 scales, no two alike, from 2^-8 to 2^8, no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    return 2 ** (16 * torch.rand(count, generator=generator, dtype=torch.float64) - 8).float()


@dataclass
class Call:
    """One run of a kernel: what it got, what it wrote."""

    problem: GemmProblem
    tensors: GemmTensors
    written: dict[str, buffers.Poisoned]
    addend: torch.Tensor | None
    grad_addend: torch.Tensor | None
    notes: list[str]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """op(a) [M, K] and op(b) [K, N] as float64 values, scales included."""
        problem = self.problem
        a, b = self.tensors.a.double(), self.tensors.b.double()
        a, b = a.mT if problem.trans_a else a, b.mT if problem.trans_b else b
        if self.tensors.a_scale is not None:
            a = a * self.tensors.a_scale.double().reshape(-1, 1)
        if self.tensors.b_scale is not None:
            b = b * self.tensors.b_scale.double().reshape(1, -1)
        return a, b

    def check(self) -> None:
        """Every element of everything written is within its bound, and nothing else was written."""
        a, b = self.sums()
        alpha, bias = self.tensors.alpha, self.tensors.bias
        z = alpha * (a @ b)
        if bias is not None:
            z = z + bias.double()
        # Four more roundings of the sum: the product of two scales, and what it multiplies.
        u_acc = U_FP32 * (self.problem.K + 5) / (self.problem.K + 1)
        options: dict[str, Any] = {"trans_b": False, "bias": bias, "alpha": alpha, "u_acc": u_acc}
        if (saved := self.tensors.preactivation) is not None:
            assert_within(saved, z, gemm_bound(a, b, saved.dtype, **options), f"preactivation of {self.problem}")
        activation = self.problem.activation
        exact = activate(z, activation)
        if self.addend is not None:
            exact = exact + self.addend.double()
        bound = gemm_bound(a, b, self.problem.out_dtype, activation=activation, addend=self.addend, **options)
        assert self.tensors.out is not None
        assert_within(self.tensors.out, exact, bound, f"out of {self.problem}")
        if (grad := self.tensors.bias_grad) is not None:
            ones = torch.ones(self.problem.K, 1, dtype=torch.float64)
            exact = a @ ones
            if self.grad_addend is not None:
                exact = exact + self.grad_addend.double()[:, None]
            bound = gemm_bound(
                a, ones, grad.dtype, trans_b=False, u_acc=u_acc,
                addend=None if self.grad_addend is None else self.grad_addend[:, None],
            )  # fmt: skip
            assert_within(grad[:, None], exact, bound, f"bias_grad of {self.problem}")
        for name, poisoned in self.written.items():
            try:
                poisoned.assert_guards_intact()
            except AssertionError as error:
                raise AssertionError(f"{name} of {self.problem}: {error}") from None


def run(
    arch: str,
    problem: GemmProblem,
    config: GemmConfig | None = None,
    *,
    alpha: float = 0.75,
    views: str = "contiguous",
    seed: int = 0,
) -> Call:
    shape = Shape("", problem.M, problem.N, problem.K)
    a, b = (
        inputs.view(inputs.spread(shape, dtype, layout=problem.layout, seed=seed)[i], "sliced")
        for i, dtype in enumerate((problem.a_dtype, problem.b_dtype))
    )
    generator = torch.Generator().manual_seed(seed + 1)
    bias = addend = None
    if problem.bias_dtype is not None:
        bias = torch.randn(problem.N, generator=generator).to(problem.bias_dtype)
    if problem.accumulate:
        addend = torch.randn(problem.M, problem.N, generator=generator).to(problem.out_dtype)
    scales = [
        None if shape is None else factors(torch.Size(shape).numel(), seed + 2 + i).reshape(shape)
        for i, shape in enumerate((problem.a_scale_shape, problem.b_scale_shape))
    ]
    written = {"out": buffers.poisoned(problem.M, problem.N, problem.out_dtype, layout=views, addend=addend)}
    grad_addend = None
    if (dtype := problem.preactivation_dtype) is not None:
        written["preactivation"] = buffers.poisoned(problem.M, problem.N, dtype, layout=views)
    if (dtype := problem.bias_grad_dtype) is not None:
        if problem.accumulate:
            grad_addend = torch.randn(problem.M, generator=generator).to(dtype)
        shown = None if grad_addend is None else grad_addend[None]
        written["bias_grad"] = buffers.poisoned(1, problem.M, dtype, addend=shown)
    given = {name: poisoned.tensor for name, poisoned in written.items()}
    if "bias_grad" in given:
        given["bias_grad"] = given["bias_grad"][0]
    tensors = GemmTensors(a, b, bias=bias, alpha=alpha, a_scale=scales[0], b_scale=scales[1], **given)
    # Not the default, whose waves hold one fragment each where the output is small.
    config = config or candidates(arch, problem.a_dtype.itemsize)[2]
    with sim.session(arch=arch, on_finding="raise"):
        notes = amd.run(problem, config, arch, tensors)
    return Call(problem, tensors, written, addend, grad_addend, notes)


def eight_bit(arch: str, shape: Shape = SHAPE, layout: str = "TN", **changes: Any) -> GemmProblem:
    a, b = FLOAT8[arch]
    return replace(GemmProblem(shape.M, shape.N, shape.K, layout, a, b, BF16), **changes)  # type: ignore[arg-type]


def plain(shape: Shape = SHAPE, layout: str = "TN", **changes: Any) -> GemmProblem:
    return replace(GemmProblem(shape.M, shape.N, shape.K, layout, BF16, BF16, BF16), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "scaling", [("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"), (None, "row")]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_scales(arch: str, scaling: tuple[str, str]) -> None:
    for shape in (SHAPE, ODD):
        run(arch, eight_bit(arch, shape, a_scaling=scaling[0], b_scaling=scaling[1])).check()


@pytest.mark.parametrize("arch", ARCHS)
def test_scales_with_everything_else(arch: str) -> None:
    """Scales come before the bias and the activation; the addend is not scaled."""
    scaling: dict[str, Any] = {"a_scaling": "row", "b_scaling": "row"}
    call = eight_bit(arch, bias_dtype=FP32, activation="gelu", out_dtype=FP32, accumulate=True, **scaling)
    run(arch, call, alpha=-1.5).check()
    run(arch, eight_bit(arch, ODD, bias_dtype=BF16, activation="silu", **scaling), views="sliced").check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_of_16_bit_operands_in_every_layout(arch: str, layout: str) -> None:
    run(arch, plain(layout=layout, out_dtype=FP32, a_scaling="row", b_scaling="row")).check()


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_of_every_tile(arch: str, index: int) -> None:
    """Two tiles in each direction: scales follow their rows and columns into the second one."""
    config = candidates(arch, 1)[index]
    shape = Shape("2 x 2 tiles", 2 * config.tile_m - 12, 2 * config.tile_n - 8, 48)
    run(arch, eight_bit(arch, shape, a_scaling="row", b_scaling="row"), config).check()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_nan_scale_makes_its_row_nan_and_no_other(arch: str) -> None:
    problem = eight_bit(arch, a_scaling="row", b_scaling="row", out_dtype=FP32)
    a = torch.ones(problem.a_shape).to(problem.a_dtype)
    b = torch.ones(problem.b_shape).to(problem.b_dtype)
    a_scale, b_scale = factors(problem.M, 1), factors(problem.N, 2)
    a_scale[problem.M - 1] = b_scale[5] = float("nan")
    out = torch.zeros(problem.M, problem.N)
    with sim.session(arch=arch, on_finding="raise"):
        amd.run(problem, None, arch, GemmTensors(a, b, out, None, 1.0, a_scale, b_scale))
    expected = torch.zeros(problem.M, problem.N, dtype=torch.bool)
    expected[-1] = expected[:, 5] = True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        # Where the product's layout is not TN, one type shows that the epilogue does not depend on it.
        pytest.param(dtype, layout, marks=() if layout == "TN" or dtype == BF16 else pytest.mark.slow)
        for layout in LAYOUTS
        for dtype in (FP32, BF16, FP16)
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_preactivation(arch: str, dtype: torch.dtype, layout: str) -> None:
    options: dict[str, Any] = {
        "layout": layout,
        "preactivation_dtype": dtype,
        "activation": "gelu_tanh",
        "bias_dtype": FP32,
    }
    for shape in (SHAPE, ODD):
        run(arch, plain(shape, **options)).check()


@pytest.mark.parametrize("arch", ARCHS)
def test_preactivation_with_everything_else(arch: str) -> None:
    """Saved before the activation, without the addend, scales and alpha included; out wider or narrower than it."""
    options: dict[str, Any] = {"preactivation_dtype": BF16, "activation": "silu", "out_dtype": FP32, "accumulate": True}
    run(arch, eight_bit(arch, a_scaling="row", b_scaling="tensor", bias_dtype=BF16, **options), alpha=-2.5).check()
    options |= {"preactivation_dtype": FP32, "out_dtype": FP16}
    run(arch, plain(activation=None, **{k: v for k, v in options.items() if k != "activation"})).check()


@pytest.mark.parametrize("views", ["sliced", "offset", "transposed", "strided"])
def test_preactivation_of_any_strides(views: str) -> None:
    call = run("gfx950", plain(preactivation_dtype=FP32, activation="relu"), views=views)
    call.check()
    copied = [note for note in call.notes if note.startswith("preactivation written through a copy")]
    assert len(copied) == (views in ("transposed", "strided"))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad(arch: str, dtype: torch.dtype) -> None:
    """Several tiles in both directions: each row is written once, by the first column of tiles."""
    for shape in (SHAPE, ODD, Shape("several tiles", 200, 136, 88)):
        run(arch, plain(shape, "NT", bias_grad_dtype=dtype)).check()


@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_with_everything_else(arch: str) -> None:
    """alpha and b's scale are not in it; a's scale is, and what bias_grad held where the call accumulates."""
    options: dict[str, Any] = {"layout": "NT", "bias_grad_dtype": FP32, "out_dtype": FP32, "accumulate": True}
    for scaling in ("tensor", "row"):
        run(arch, plain(a_scaling=scaling, b_scaling="row", **options), alpha=-2.5).check()
    run(arch, plain(preactivation_dtype=BF16, activation="relu", bias_dtype=FP32, **options)).check()


@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_of_every_tile(arch: str, index: int, bits: int) -> None:
    problem = plain(layout="NT", bias_grad_dtype=FP32)
    if bits == 8:
        problem = eight_bit(arch, layout="NT", bias_grad_dtype=FP32)
    config = candidates(arch, problem.a_dtype.itemsize)[index]
    problem = replace(problem, M=2 * config.tile_m - 12, N=2 * config.tile_n - 8, K=72)
    if index == 0:  # 256x256: no registers are left for the sums
        assert "bias_grad" in (why_unsupported(problem, config, arch) or "")
        return
    run(arch, problem, config).check()


@pytest.mark.parametrize("mix", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_of_8_bit_operands(arch: str, mix: tuple[int, int]) -> None:
    """The ones that a is multiplied by are in b's format."""
    a, b = (FLOAT8[arch][i] for i in mix)
    scaling: dict[str, Any] = {"a_scaling": "row", "b_scaling": "row"}
    run(arch, eight_bit(arch, ODD, "NT", a_dtype=a, b_dtype=b, bias_grad_dtype=FP32, **scaling)).check()


@pytest.mark.parametrize("format", ["mxfp8_e5m2", pytest.param("mxfp8_e4m3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_of_scaled_blocks(arch: str, format: str) -> None:
    """A scale for each 32 of K: each block of a row counts with its own."""
    for shape in (Shape("", 77, 160, 416), Shape("odd", 77, 145, 203)):
        case = GemmCase(shape, layout="NT", a_format=format, b_format="mxfp8_e4m3", out_dtype=FP32, bias_grad=FP32)
        for index in (1, 2):
            check_quantized(case, arch, candidates_for(case.problem, arch)[index])


@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_of_float32(arch: str) -> None:
    case = GemmCase(Shape("", 77, 145, 203), layout="NT", dtype=FP32, bias_grad=FP32)
    for index in (0, 2) if arch == "gfx942" else (1, 2):
        check_quantized(case, arch, candidates_for(case.problem, arch)[index])


@pytest.mark.parametrize("arch", ARCHS)
def test_bias_grad_is_for_wgrad(arch: str) -> None:
    assert "NT" in (why_unsupported(plain(layout="TN", bias_grad_dtype=FP32), None, arch) or "")
    blocks = eight_bit(arch, layout="NT", bias_grad_dtype=FP32, a_scaling="1x128", b_scaling="128x128")
    assert why_unsupported(blocks, None, arch) is not None


# format, direction, rule
QUANTIZED = [
    ("fp8_e4m3", "rowwise", "floor"), ("fp8_e5m2", "rowwise", "floor"),
    ("mxfp8_e4m3", "rowwise", "floor"), ("mxfp8_e5m2", "rowwise", "ceil"), ("mxfp8_e4m3", "columnwise", "ceil"),
    ("mxfp8_e5m2", "columnwise", "floor"), ("mxfp8_e4m3", "both", "floor"), ("mxfp8_e4m3", "both", "ceil"),
]  # fmt: skip


def check_quantized(case: GemmCase, arch: str, config: GemmConfig) -> None:
    """The bits of codes, scales and amax are those of the quantizer's definition, given the same call's float32 result."""
    result = case.run(f"sim:{arch}", config=config)
    assert result.passed, f"{case}: {result}"


@pytest.mark.parametrize(
    ("out_format", "direction", "rule", "layout"),
    [(*each, "TN") for each in QUANTIZED] + [("mxfp8_e4m3", "both", "floor", layout) for layout in ("NN", "NT")],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_quantized_output(arch: str, out_format: str, direction: str, rule: str, layout: str) -> None:
    for shape in (SHAPE, ODD):
        options: dict[str, Any] = {
            "out_format": out_format,
            "out_direction": direction,
            "out_scale_rule": rule,
            "layout": layout,
        }
        case = GemmCase(shape, **options, bias_dtype=FP32, activation="relu")  # type: ignore[arg-type]
        check_quantized(case, arch, candidates(arch)[2])


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("arch", ARCHS)
def test_quantized_output_of_every_tile(arch: str, index: int) -> None:
    """2 x 2 tiles each; those whose waves have no whole block of 32 say so."""
    config = candidates(arch, 1)[index]
    dtypes = FLOAT8[arch]
    shape = Shape("2 x 2 tiles", 2 * config.tile_m - 12, 2 * config.tile_n - 8, 64)
    case = GemmCase(shape, dtype=dtypes[0], b_dtype=dtypes[1], out_format="mxfp8_e4m3", out_direction="both")
    if config.tile_m // config.waves_m % 32 or config.tile_n // config.waves_n % 32:
        assert "blocks of 32" in (why_unsupported(case.problem, config, arch) or "")
        case = replace(case, out_format="fp8_e4m3", out_direction="rowwise")
    check_quantized(case, arch, config)


@pytest.mark.parametrize("shape", [SHAPE, ODD], ids=str)
@pytest.mark.parametrize("arch", ARCHS)
def test_quantized_output_writes_every_code_and_nothing_else(arch: str, shape: Shape) -> None:
    """Codes, scales and a preactivation in buffers of their own; NaN and infinities among the values."""
    direction, dtype = "both", torch.float8_e4m3fn
    problem = plain(
        shape, out_dtype=dtype, out_scaling="1x32", out_direction=direction, preactivation_dtype=FP32, activation="relu"
    )
    a, b = inputs.spread(shape, BF16)
    a[3] = float("nan")
    a[40, :2] = float("inf")  # Inf - Inf or Inf, by b's signs
    b[70] = 0
    sizes = {
        "out": ((shape.M, shape.N), dtype), "out_columnwise": ((shape.M, shape.N), dtype),
        "out_scale": ((shape.M, -(-shape.N // 32)), torch.uint8),
        "out_columnwise_scale": ((-(-shape.M // 32), shape.N), torch.uint8),
        "preactivation": ((shape.M, shape.N), FP32),
    }  # fmt: skip
    written = {}
    for name, (size, kind) in sizes.items():
        poison = torch.full(size, 0xA6, dtype=torch.uint8) if kind.itemsize == 1 else torch.full(size, float("nan"))
        written[name] = buffers.poisoned(*size, torch.uint8 if kind.itemsize == 1 else kind, addend=poison)
    given: Any = {name: buffer.tensor.view(sizes[name][1]) for name, buffer in written.items()}
    plain_out = torch.full((shape.M, shape.N), float("nan"))
    with sim.session(arch=arch, on_finding="raise"):
        amd.run(problem, candidates(arch)[2], arch, GemmTensors(a, b, **given))
        amd.run(
            plain(shape, out_dtype=FP32, activation="relu"), candidates(arch)[2], arch, GemmTensors(a, b, plain_out)
        )
    assert plain_out.isnan().any() and plain_out.isinf().any()
    right = quantize(plain_out, "mxfp8_e4m3", direction, backend="native")
    for name, expected in (
        ("out", right.data), ("out_scale", right.scale), ("out_columnwise", right.columnwise_data),
        ("out_columnwise_scale", right.columnwise_scale),
    ):  # fmt: skip
        assert expected is not None
        assert torch.equal(written[name].tensor.view(torch.uint8), expected.view(torch.uint8)), name
    for buffer in written.values():
        buffer.assert_guards_intact()


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_that_do_not_exist_are_in_no_block(arch: str) -> None:
    """relu(bias - K) is 0; in the rows past M, whose sums are 0, it would be the bias."""
    problem = plain(
        Shape("", 70, 72, 64), activation="relu", bias_dtype=FP32, out_dtype=torch.float8_e4m3fn, out_scaling="1x32",
        out_direction="columnwise",
    )  # fmt: skip
    codes, scales = torch.full((70, 72), 1, dtype=torch.uint8), torch.zeros(3, 72, dtype=torch.uint8)
    tensors = GemmTensors(
        torch.full((70, 64), -1.0, dtype=BF16), torch.ones(72, 64, dtype=BF16), None, torch.full((72,), 5.0),
        out_columnwise=codes.view(torch.float8_e4m3fn), out_columnwise_scale=scales.view(torch.float8_e8m0fnu),
    )  # fmt: skip
    with sim.session(arch=arch, on_finding="raise"):
        amd.run(problem, candidates(arch)[2], arch, tensors)
    right = quantize(torch.zeros(70, 72), "mxfp8_e4m3", "columnwise", backend="native")
    assert right.columnwise_scale is not None
    assert not codes.any() and torch.equal(scales, right.columnwise_scale.view(torch.uint8))


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-3.5"])
@pytest.mark.parametrize("arch", ARCHS)
def test_amax_of_quantized_output(arch: str, value: str) -> None:
    """One element stands out: amax is its magnitude, NaN for a NaN, whatever out_amax held before."""
    dtype = FLOAT8[arch][0]
    shape = Shape("", 70, 72, 32)
    a, b = torch.zeros(shape.M, shape.K, dtype=BF16), torch.zeros(shape.N, shape.K, dtype=BF16)
    a[69, 5], b[71, 5] = float(value), 1
    amax, scale = torch.tensor(1e9), torch.tensor(0.25)
    out = torch.zeros(shape.M, shape.N).to(dtype)
    problem = plain(shape, out_dtype=dtype, out_scaling="tensor")
    with sim.session(arch=arch, on_finding="raise"):
        tensors = GemmTensors(a, b, out, out_scale=scale, out_amax=amax)
        amd.run(problem, candidates(arch)[2], arch, tensors)
    expected = (a.float() @ b.float().T).abs().max()
    assert torch.equal(amax, expected) or (amax.isnan() and expected.isnan())
    right = quantize(a.float() @ b.float().T, "fp8_e4m3", scale=scale, fnuz=arch == "gfx942", backend="native")
    assert right.data is not None and torch.equal(out.view(torch.uint8), right.data.view(torch.uint8))


@pytest.mark.parametrize("shape", [Shape("tails", 77, 304, 208), Shape("odd tails", 77, 290, 203)], ids=str)
@pytest.mark.parametrize("index", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_swiglu(arch: str, layout: str, index: int, shape: Shape) -> None:
    """Halves of 152 and 145 columns: tiles end inside both. The preactivation is saved in its own order."""
    case = GemmCase(shape, layout=layout, bias_dtype=FP32, activation="swiglu", preactivation=BF16, a_view="sliced")
    check_quantized(case, arch, candidates(arch)[index])


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("arch", ARCHS)
def test_swiglu_of_every_tile(arch: str, index: int) -> None:
    """2 x 2 tiles; one fragment of columns in a wave is no pair."""
    config = candidates(arch, 1)[index]
    shape = Shape("2 x 2 tiles", 2 * config.tile_m - 12, 2 * config.tile_n - 16, 64)
    case = GemmCase(shape, dtype=FLOAT8[arch][0], b_dtype=FLOAT8[arch][1], activation="swiglu", preactivation=FP32)
    if config.tile_n // config.waves_n % 32:
        assert "pairs" in (why_unsupported(case.problem, config, arch) or "")
        assert why_unsupported(case.problem, None, arch) is None
        return
    check_quantized(case, arch, config)


@pytest.mark.parametrize("arch", ARCHS)
def test_swiglu_with_everything_else(arch: str) -> None:
    shape = Shape("", 77, 304, 208)
    options: dict[str, Any] = {"activation": "swiglu", "bias_dtype": BF16, "alpha": -0.5}
    config = candidates(arch)[1]
    check_quantized(GemmCase(shape, out_dtype=FP32, accumulate=True, **options), arch, config)  # type: ignore[arg-type]
    quantized = {"out_format": "mxfp8_e4m3", "out_direction": "both"}
    check_quantized(GemmCase(shape, preactivation=BF16, **options, **quantized), arch, config)  # type: ignore[arg-type]
    scaled = {"a_format": "fp8_row", "b_format": "fp8_row", "fnuz": arch == "gfx942"}
    check_quantized(GemmCase(shape, **options, **scaled), arch, candidates(arch, 1)[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("layout", ["TN", "NN"])
@pytest.mark.parametrize("arch", ARCHS)
def test_swiglu_of_scaled_blocks(arch: str, layout: str, index: int) -> None:
    """Both halves of b bring their own scales: tiles end inside both."""
    scaled = {"a_format": "mxfp8_e4m3", "b_format": "mxfp8_e5m2", "activation": "swiglu", "preactivation": FP32}
    shape = Shape("", 77, 608, 416) if index == 0 else Shape("", 77, 352, 288)
    case = GemmCase(shape, layout=layout, **scaled)  # type: ignore[arg-type]
    config = candidates_for(case.problem, arch)[index]
    if arch == "gfx950" and index == 0:
        assert "registers" in (why_unsupported(case.problem, config, arch) or "")
        assert default_config(case.problem, arch)[0] != config
        return
    check_quantized(case, arch, config)


def test_halves_of_b_that_are_no_whole_chunks_are_copied_and_named() -> None:
    for layout, columns, copied in (("NN", 290, True), ("NN", 304, False), ("TN", 290, False)):
        problem = plain(Shape("", 16, columns, 64), layout, activation="swiglu")
        a, b = torch.ones(problem.a_shape, dtype=BF16), torch.ones(problem.b_shape, dtype=BF16)
        tensors = GemmTensors(a, b, torch.zeros(16, columns // 2, dtype=BF16))
        with sim.session(arch="gfx950", on_finding="raise"):
            notes = amd.run(problem, candidates("gfx950")[2], "gfx950", tensors)
        assert notes == amd.copies(problem, candidates("gfx950")[2], "gfx950", tensors)
        assert [note for note in notes if "halves" in note] == notes and len(notes) == copied
