"""The CDNA kernels' epilogues on the simulator: scales of operands that do not change along K.

Truth is float64 from the codes and scales that the kernel got; every element has its bound, outputs start as NaN inside
guard bytes. Bias, activations, alpha and accumulation alone are in test_gemm_backends.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import ARCHS, FLOAT8, GemmConfig, candidates
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import activate
from fourwave.testing import assert_within, buffers, gemm_bound, inputs
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
    notes: list[str]

    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """op(a) [M, K] and op(b) [K, N] as float64 values, scales included."""
        problem = self.problem
        a, b = self.tensors.a.double(), self.tensors.b.double()
        a, b = a.mT if problem.trans_a else a, b.mT if problem.trans_b else b
        if problem.a_scaling is not None:
            a = a * self.tensors.a_scale.double().reshape(-1, 1)
        if problem.b_scaling is not None:
            b = b * self.tensors.b_scale.double().reshape(1, -1)
        return a, b

    def check(self) -> None:
        """Every element of everything written is within its bound, and nothing else was written."""
        a, b = self.sums()
        alpha, bias = self.tensors.alpha, self.tensors.bias
        exact = alpha * (a @ b)
        if bias is not None:
            exact = exact + bias.double()
        # Four more roundings of the sum: the product of two scales, and what it multiplies.
        u_acc = U_FP32 * (self.problem.K + 5) / (self.problem.K + 1)
        options = {"trans_b": False, "bias": bias, "alpha": alpha, "u_acc": u_acc}
        activation = self.problem.activation
        exact = activate(exact, activation)
        if self.addend is not None:
            exact = exact + self.addend.double()
        bound = gemm_bound(a, b, self.problem.out_dtype, activation=activation, addend=self.addend, **options)
        assert_within(self.tensors.out, exact, bound, f"out of {self.problem}")
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
    tensors = GemmTensors(a, b, written["out"].tensor, bias, alpha, *scales)
    with sim.session(arch=arch, on_finding="raise"):
        notes = amd.run(problem, config, arch, tensors)
    return Call(problem, tensors, written, addend, notes)


def eight_bit(arch: str, shape: Shape = SHAPE, layout: str = "TN", **changes: object) -> GemmProblem:
    a, b = FLOAT8[arch]
    return replace(GemmProblem(shape.M, shape.N, shape.K, layout, a, b, BF16), **changes)  # type: ignore[arg-type]


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
    scaling = {"a_scaling": "row", "b_scaling": "row"}
    call = eight_bit(arch, bias_dtype=FP32, activation="gelu", out_dtype=FP32, accumulate=True, **scaling)
    run(arch, call, alpha=-1.5).check()
    run(arch, eight_bit(arch, ODD, bias_dtype=BF16, activation="silu", **scaling), views="sliced").check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_scales_of_16_bit_operands_in_every_layout(arch: str, layout: str) -> None:
    problem = GemmProblem(*SHAPE_SIZES, layout, BF16, BF16, FP32, a_scaling="row", b_scaling="row")
    run(arch, problem).check()


SHAPE_SIZES = (SHAPE.M, SHAPE.N, SHAPE.K)


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
