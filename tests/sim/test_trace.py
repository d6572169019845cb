"""What a trace says of a kernel: each event in its place, and none without asking."""

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

pytestmark = pytest.mark.skipif(
    sim.unavailable("gfx1250") is not None, reason=f"no simulator: {sim.unavailable('gfx1250')}"
)


def launch(**options):
    """Of two workgroups of a kernel for gfx1250."""
    codes = torch.uint8
    problem = GemmProblem(32, 512, 256, "TN", codes, codes, torch.float32, a_scaling="1x32", b_scaling="1x32")
    a, b, out = torch.zeros(32, 128, dtype=torch.uint8), torch.zeros(512, 128, dtype=torch.uint8), torch.empty(32, 512)
    scales = [torch.zeros(rows, 8, dtype=torch.uint8).view(torch.float8_e8m0fnu) for rows in (32, 512)]
    with sim.session(arch="gfx1250", on_finding="raise", **options) as report:
        amd.run(problem, None, "gfx1250", GemmTensors(a, b, out, a_scale=scales[0], b_scale=scales[1]))
    return report.launches[0]


def test_trace_is_of_one_workgroup_and_counts_what_counters_do():
    assert launch().events == []
    traced = launch(trace=True, workgroups=range(1))
    both = launch(trace=True, threads=1)
    assert both.events == traced.events, "the first workgroup's"
    kinds = [event.kind for event in traced.events]
    assert kinds.count("matrix") == traced.counters["mfma"] > 0
    assert kinds.count("barrier") == traced.counters["barriers"] > 0
    assert kinds.count("wait") == traced.counters["waits"] > 0
    assert {event.wave for event in traced.events} == {0, 1, 2, 3}


@pytest.mark.parametrize("completion", ["late", "early"])
def test_tiles_land_in_the_order_they_were_issued_and_when_they_must(completion):
    events = launch(trace=True, completion=completion, workgroups=range(1)).events
    for wave in range(4):
        own = [event for event in events if event.wave == wave]
        issued = [event[3:] for event in own if event.kind == "tile issued"]
        landed = [event[3:] for event in own if event.kind == "tile landed"]
        assert issued == landed and len(issued) > 4
        if completion == "early":
            at = [i for i, event in enumerate(own) if event.kind == "tile issued"]
            assert all(own[i + 1].kind == "tile landed" for i in at)
        else:
            for i, event in enumerate(own):
                if event.kind == "tile landed" and not event.detail:
                    following = next(other for other in own[i:] if other.kind != "tile landed")
                    assert (following.kind, following.detail) == ("wait", 2), "its wait follows, and nothing else"
    # Half of b's 256 rows of 64 bytes.
    assert {event.bytes for event in events if event.kind == "tile issued" and not event.detail} >= {128 * 64}
