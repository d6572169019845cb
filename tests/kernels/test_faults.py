"""Every fault planted in every kernel of ours is noticed, or proven redundant (faults.REDUNDANT); and no order changes a bit of what it writes."""

from __future__ import annotations

import linecache
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gfx1250_launches
import pytest
from every_kernel import ARCHS, KernelCall, calls
from faults import forget_kernels, full_name, try_call, why_redundant

from fourwave import sim

pytestmark = [
    pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}"),
    pytest.mark.slow,
]

# Of each kind of kernel one that takes seconds; the rest take an hour.
CHOSEN = (
    r"gemm (bf16|mxfp8|fp32) TN 16x64x|gemm fp8 NN 16x64x|gemm (bf16|mxfp4) NT (32|64)x.*|gemm blocks TN 16x64x"
    r"|gemm split-K: bias relu|gemm epilogue: out mxfp8"
    r"|grouped (fp8 forward|mxfp8 dgrad|bf16 wgrad) (16|32)x128x\d+$"
    r"|quantize 78x146 float16, (fp8_row|fp8_1x128|mxfp8_e4m3|mxfp4), both"
    r"|quantize 48x304 .* mxfp4, both, corners"
)


def every_kernel() -> list[Any]:
    found = [call for arch in ARCHS for call in calls(arch)]
    return [
        pytest.param(call, id=full_name(call), marks=() if re.match(CHOSEN, call.name) else (pytest.mark.exhaustive,))
        for call in found
    ]


@pytest.mark.parametrize("call", every_kernel())
def test_every_fault_is_noticed_or_redundant(call: KernelCall) -> None:
    wrong, outcomes = try_call(call)
    forget_kernels()
    assert not wrong
    assert outcomes, "no place for a fault"
    left = [(o.fault, o.file, o.line) for o in outcomes if o.survived and why_redundant(full_name(call), o) is None]
    print(f"{full_name(call)}: {len(outcomes)} faults")
    assert not left


@pytest.mark.parametrize(
    ("tile", "fault", "line"),
    [
        ("mxfp4 TN 32x256", "counter dropped", "tdm.wait_lds()"), ("mxfp8 TN 64x256", "counter dropped", "tdm.wait_lds()"),
        ("bf16 x mxfp4 TN 64x256", "barrier dropped", "tdm.depart()"), ("bf16 x mxfp4 NN 64x256", "barrier dropped", "tdm.depart()"),
    ],
)  # fmt: skip
def test_the_drains_wait_and_barrier_are_needed(tile: str, fault: str, line: str) -> None:
    """What faults.REDUNDANT says of it: the launches there end with reads of stage 1, this one with reads of stage 0, where the epilogue begins."""
    name = f"gemm {tile}"
    case, config = next((case, config) for found, case, config in gfx1250_launches.kernels() if found == name)
    assert gfx1250_launches.DEPTH == 22 * 128
    longer = replace(case, shape=replace(case.shape, K=24 * 128))

    def run() -> list[str]:
        result = longer.run("sim:gfx1250", config=config)
        return [] if result.passed else [str(result)]

    call = KernelCall(name, "gfx1250", run)
    wrong, outcomes = try_call(call, lambda each: each.name.startswith(fault), orders=False)
    forget_kernels()
    waits = [o for o in outcomes if Path(o.file).name == "gfx1250.py" and line in linecache.getline(o.file, o.line)]
    assert not wrong and len(waits) >= 3 and all(o.how.startswith("finding: ") for o in waits), waits
