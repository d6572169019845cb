"""Copies may complete late, early or at random and waves may take turns in any order: no bit of a GEMM may depend on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launches import case_of, kernels, launch, pipeline

from fourwave import sim
from fourwave.ops.gemm.config import GemmConfig

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

ARCHS = ("gfx950", "gfx942")
SLOW = pytest.mark.slow  # a minute for all


def every_kernel() -> list[Any]:
    """The tile of fewest rows of each precision in TN; the others in slow tests."""
    chosen = []
    for arch in ARCHS:
        found = list(kernels(arch))
        least = {
            precision: min(config.tile_m for name, _, config in found if name == precision) for precision, *_ in found
        }
        for precision, layout, config in found:
            quick = layout == "TN" and config.tile_m == least[precision]
            name = f"{arch}-{precision}-{layout}-{config.tile_m}x{config.tile_n}"
            marks = () if quick else SLOW
            chosen.append(pytest.param(arch, precision, layout, config, id=name, marks=marks))
    return chosen


@pytest.mark.parametrize(("arch", "precision", "layout", "config"), every_kernel())
def test_orders_do_not_change_a_bit(arch: str, precision: str, layout: str, config: GemmConfig) -> None:
    case = case_of(arch, precision, layout, pipeline(config))
    first = None
    for completion, schedule in (
        ("late", "forward"),
        ("early", "reverse"),
        ("random", "random:7"),
        ("late", "random:3"),
    ):
        with sim.session(arch, completion=completion, schedule=schedule) as report:
            out = launch(case, arch, config)
        assert not report.findings, report
        assert not out.isnan().any()
        first = out if first is None else first
        assert torch.equal(out.view(torch.int32), first.view(torch.int32)), (completion, schedule)
