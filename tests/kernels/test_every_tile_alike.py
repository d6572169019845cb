"""batch_invariant: whichever tile M or N asks for, a row's result has the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import launches
import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm.config import candidates_for, why_unsupported
from fourwave.testing.cases import GemmCase
from fourwave.testing.shapes import Shape

pytestmark = [
    pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}"),
    pytest.mark.slow,
]

SHAPE = Shape("few rows, several steps and a part of one", 18, 72, 1088)
OPERANDS = {name: options for name, options in launches.OPERANDS.items() if "preshuffled" not in name}
# Each way to read and to multiply once; the others are exhaustive.
CHOSEN = {
    ("gfx950", "bf16", "NN"),
    ("gfx950", "fp8", "TN"),
    ("gfx950", "mxfp8", "NN"),
    ("gfx950", "blocks", "TN"),
    ("gfx950", "mxfp4", "TN"),
    ("gfx950", "bf16 x mxfp4", "TN"),
    ("gfx942", "bf16", "TN"),
    ("gfx942", "fp32", "NN"),
    ("gfx942", "fp8", "NN"),
    ("gfx942", "mxfp8", "TN"),
}


def case_of(arch: str, kind: str, layout: str, **fields: Any) -> GemmCase:
    return GemmCase(SHAPE, layout, batch_invariant=True, out_dtype=torch.float32, fnuz=arch == "gfx942", **OPERANDS[kind], **fields)  # fmt: skip


def combinations() -> list[Any]:
    found = []
    for arch in ("gfx950", "gfx942"):
        for kind in OPERANDS:
            for layout in ("TN", "NN", "NT") if kind != "blocks" else ("TN",):
                if why_unsupported(case_of(arch, kind, layout).problem, None, arch) is None:
                    chosen = (arch, kind, layout) in CHOSEN
                    found.append(pytest.param(arch, kind, layout, marks=() if chosen else pytest.mark.exhaustive))
    return found


@pytest.mark.parametrize(("arch", "kind", "layout"), combinations())
def test_every_tile_has_the_same_bits(arch: str, kind: str, layout: str) -> None:
    case = case_of(arch, kind, layout)
    a, b = case.operands()
    options: dict[str, Any] = {
        "trans_a": layout == "NT", "trans_b": layout == "TN", "out_dtype": torch.float32, "backend": f"sim:{arch}"
    }  # fmt: skip
    configs = [
        config for config in candidates_for(case.problem, arch) if not why_unsupported(case.problem, config, arch)
    ]
    assert len(configs) >= 3
    results = [fw.gemm(a, b, batch_invariant=True, config=config, **options) for config in configs]
    assert not results[0].isnan().any() and bool(results[0].any())
    for config, result in zip(configs, results, strict=True):
        assert torch.equal(result, results[0]), config
    if kind in ("bf16", "fp8"):
        # Another order of the same sums shows.
        parts = fw.gemm(a, b, config=replace(configs[-1], split_k=2), **options)
        assert not torch.equal(parts, results[0])
