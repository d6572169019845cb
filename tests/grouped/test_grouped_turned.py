"""gfx942's dgrad and wgrad: operands turned on their way to LDS give the bits of forward, whose K is contiguous."""

from __future__ import annotations

from dataclasses import replace

import grouped_launches
import pytest
import torch

from fourwave import sim
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import candidates
from fourwave.ops.grouped_gemm.problem import REDUCTION, GroupedProblem, GroupedTensors

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

ARCH = "gfx942"
LONG = (pytest.mark.slow, pytest.mark.exhaustive)
OPERANDS = [
    pytest.param(operands, index, marks=() if index == -1 else LONG)
    for operands in ("bf16", "fp8", "blocks", "mxfp8")
    for index in (-1, -2, -3)[: 2 if operands == "mxfp8" else 3]
]


def turned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The last two dimensions exchanged, in memory too."""
    return None if tensor is None or tensor.dim() < 2 else tensor.mT.contiguous()


@pytest.mark.parametrize(("operands", "index"), OPERANDS)
def test_kinds_of_products_have_the_same_bits(operands: str, index: int) -> None:
    wgrad = grouped_launches.case_of(ARCH, operands, "wgrad").problem()
    configs = candidates(wgrad, ARCH)
    config = configs[index]
    # Groups begin their steps at different eighths of K: of fewer than eight steps, all at the first.
    rows, N, K = config.tile_m - 3, 128 + 16, 5 * config.tile_k - 32
    case = grouped_launches.case_of(ARCH, operands, "forward", sizes=(rows, 0, 2), N=N, K=K, extra=0, config=config)
    made, _, _ = case.make()
    forward = case.problem()

    def product(problem: GroupedProblem, **tensors: torch.Tensor | None) -> torch.Tensor:
        out = torch.full(problem.out_shape, float("nan"))
        given = {"a_scale": made["a_scale"], "b_scale": made["b_scale"]} | tensors
        sizes = given.pop("m_sizes", torch.tensor(case.sizes))
        amd.run(
            problem,
            config,
            ARCH,
            GroupedTensors(given["a"], given["b"], sizes, out, None, given["a_scale"], given["b_scale"]),
        )
        return out

    a, b, a_scale, b_scale = made["a"], made["b"], made["a_scale"], made["b_scale"]
    with sim.session(ARCH, on_finding="raise", threads=1):
        expected = product(forward, a=a, b=b)
        assert torch.isfinite(expected).all() and expected.unique().numel() > expected.numel() // 2
        scale = b_scale if turned(b_scale) is None or forward.b_scaling == "tensor" else turned(b_scale)
        dgrad = replace(forward, layout="NN")
        assert torch.equal(product(dgrad, a=a, b=turned(b), b_scale=scale), expected)
        # One group's rows, as the columns of a whose rows are summed.
        if forward.b_scaling == "128x128":
            b_scale = b_scale[0].repeat_interleave(128, 0)[:N]
        elif forward.b_scaling == "1x32":
            b_scale = b_scale[0]
        blocks = forward.a_scaling in ("1x128", "1x32")
        one = replace(
            forward, split=REDUCTION, layout="NT", G=1, M=rows, b_scaling=wgrad.b_scaling, a_scaling=wgrad.a_scaling
        )
        out = product(
            one, a=turned(a[:rows]), b=turned(b[0]), m_sizes=torch.tensor([K]),
            a_scale=turned(a_scale[:rows]) if blocks else a_scale, b_scale=turned(b_scale) if blocks else b_scale,
        )  # fmt: skip
        assert torch.equal(out[0], expected[:rows])
