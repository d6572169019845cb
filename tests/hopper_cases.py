"""Problems and cases that tests of the Hopper GEMM kernels share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fourwave.backends import registry
from fourwave.ops.gemm import sm90_config
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem
from fourwave.ops.gemm.sm90_config import HopperConfig
from fourwave.ops.gemm.sm90_tiles import candidates
from fourwave.testing import GemmCase, bounds
from fourwave.testing.shapes import Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = sm90_config.FP8
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
TAILS = Shape("tails", 700, 912, 1000)  # both halves of N end inside a tile
ODD = Shape("odd", 333, 654, 200)  # rows of out and halves of z are no multiples of 16 bytes


def problem(M: int = 512, N: int = 512, K: int = 512, layout: str = "TN", out: torch.dtype = BF16) -> GemmProblem:
    return GemmProblem(M, N, K, layout, BF16, BF16, out, device_type="cuda")


def more_problems() -> list[GemmProblem]:
    """With what sm90.GemmWithOutputs writes, and with swiglu."""
    e4m3 = replace(problem(), a_dtype=FP8[0], b_dtype=FP8[0], a_scaling="row", b_scaling="row")
    saved = {"preactivation_dtype": BF16, "activation": "gelu"}
    gated = {"preactivation_dtype": BF16, "activation": "swiglu"}
    made: list[tuple[GemmProblem, dict[str, object]]] = [
        (problem(), saved), (problem(layout="NN"), {**saved, "preactivation_dtype": FP32}), (problem(out=FP32), saved),
        (problem(), gated), (problem(layout="NN", out=FP32), gated), (problem(), {"activation": "swiglu"}), (e4m3, gated),
        (replace(e4m3, a_scaling="1x128", b_scaling="128x128"), saved),
        (problem(layout="NT", out=FP32), {"bias_grad_dtype": FP32}), (problem(layout="NT"), {"bias_grad_dtype": BF16}),
        (problem(), {"out_dtype": FP8[0], "out_scaling": "tensor"}),
        (e4m3, {"out_dtype": FP8[1], "out_scaling": "tensor", **gated}),
    ]  # fmt: skip
    return [replace(p, **change) for p, change in made]  # type: ignore[arg-type]


def run_case(case: GemmCase, config: HopperConfig | None = None) -> None:
    result = case.run("hopper", device="cuda", config=config)  # type: ignore[arg-type]
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}, {config}: {result.ratio:.3g} times the bound at {list(result.worst)}"


def each_candidate(case: GemmCase, u_acc: float = bounds.U_FP32) -> None:
    """The case, which has tails, with every tile that its problem has; several tiles each."""
    for config in candidates(replace(case.problem, device_type="cuda")):
        result = case.run("hopper", device="cuda", config=config, u_acc=u_acc)  # type: ignore[arg-type]
        assert result.guards is None, f"{case}, {config}: {result.guards}"
        assert result.ratio <= 1, f"{case}, {config}: {result.ratio:.3g} times the bound at {list(result.worst)}"
