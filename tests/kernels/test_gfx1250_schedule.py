"""The schedule of the gfx1250 kernel as a trace of the simulator shows it, and the one that docs/mxfp4.md prints."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch

from fourwave import sim
from fourwave.cli.explain import SCHEDULE_SHAPE
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.perf.schedule import Place, markdown, svg, trace_steps

pytestmark = pytest.mark.skipif(
    sim.unavailable("gfx1250") is not None, reason=f"no simulator: {sim.unavailable('gfx1250')}"
)
DOCS = Path(__file__).parents[2] / "docs"
MARK = "<!-- made by: fourwave explain gemm --dtype mxfp4 --arch gfx1250 --schedule"


def problem_of(M=SCHEDULE_SHAPE[0], layout="TN", a_dtype=torch.uint8):
    codes = torch.uint8
    return GemmProblem(
        M, *SCHEDULE_SHAPE[1:], layout, a_dtype, codes, torch.bfloat16, a_scaling="1x32", b_scaling="1x32"
    )  # fmt: skip


@functools.cache
def steps_of(**fields):
    return trace_steps(problem_of(**fields))


def test_the_schedule_in_the_docs_is_the_kernels():
    steps = steps_of()
    text = (DOCS / "mxfp4.md").read_text()
    table = text.partition(MARK)[2].partition("-->\n")[2].strip()
    table = "\n".join(itertools.takewhile(lambda line: line.startswith("|"), table.splitlines()))
    assert table == markdown(steps), "make it again with the command above the table"
    assert (DOCS / "mxfp4_gfx1250_schedule.svg").read_text() == svg(steps)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"layout": "NT"}, marks=pytest.mark.slow),
        pytest.param({"M": 64, "a_dtype": torch.float8_e4m3fn}, marks=pytest.mark.slow),
    ],
)
def test_a_tile_is_on_its_way_while_two_are_multiplied(fields):
    prologue, *steps = steps_of(**fields)
    products = sum(steps[0].products)
    assert prologue.waits == {2} and len(steps) == 20
    for step in steps:
        j = step.number
        assert step.waits == {1} and sum(step.products) == products > 0
        # Tile j + 1 lands for this step's reads; it was issued two steps before, behind that step's first products.
        stage = f"stage {(j + 1) % 3}"
        assert step.landed[stage] == {max(j - 2, -1)} and step.products[0] > 0
        assert step.read == {stage, f"page {(j + 1) // 8 % 2}"}
        codes = [f"stage {j % 3}"] * 4
        if j % 8 == 7:
            group = j // 8
            assert [str(step.issued[wave][0]) for wave in range(4)] == codes[:2] + [f"page {group % 2}"] * 2
            whole = [step.issued[wave][0] for wave in range(2)]
            assert whole == [Place("stage", j % 3, operand, True) for operand in "ab"]
            assert steps[j + 2].landed[f"page {group % 2}"] == {j} if j + 2 < 20 else True
        else:
            assert [str(step.issued[wave][0]) for wave in range(4)] == codes
            assert [step.issued[wave][0].operand for wave in range(4)] == list("aabb")
            assert not any(place.whole for (place,) in step.issued.values())
        assert all(len(places) == 1 for places in step.issued.values())


def test_a_kernel_whose_pages_are_swapped_has_another_schedule(monkeypatch):
    from fourwave.ops.gemm import gfx1250

    monkeypatch.setattr(amd, "_compiled", {})
    eighth = gfx1250.Bring.eighth
    monkeypatch.setattr(gfx1250.Bring, "eighth", lambda self, group, stage: eighth(self, group + 1, stage))
    try:
        other = trace_steps(problem_of())
    except sim.SimulationError:
        return
    assert markdown(other) != markdown(steps_of())
