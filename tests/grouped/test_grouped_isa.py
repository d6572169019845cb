"""What the compiler makes of the grouped kernels: no spills, loads two K tiles ahead, waits that mean what they say."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES
from fourwave.ops.gemm.config import ARCHS, FLOAT8, NUM_CUS
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import candidates, default_config, geometry, lds_bytes, tiles_per_step
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.perf import waits
from fourwave.perf.grouped import busiest_unit_steps, compile_grouped_isa
from fourwave.testing.grouped_cases import GroupedCase

needs_flydsl = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
KINDS = ("forward", "preshuffled", "dgrad", "wgrad", "bf16 wgrad", "mx forward", "mx wgrad")


def problem_of(arch: str, kind: str) -> GroupedProblem:
    codes, scalings = FLOAT8[arch][0], ("1x128", "1x128" if kind == "wgrad" else "128x128")
    if kind.startswith("bf16"):
        codes, scalings = torch.bfloat16, (None, None)  # type: ignore[assignment]
    if kind.startswith("mx"):
        scalings = ("1x32", "1x32")
    split = "reduction" if kind.endswith("wgrad") else "rows"
    layout = {"dgrad": "NN"}.get(kind, "NT" if split == "reduction" else "TN")
    return GroupedProblem(
        8, 8192, 4096, 4096, split, layout, codes, codes, torch.bfloat16, device_type="cuda", a_scaling=scalings[0],
        b_scaling=scalings[1], b_preshuffled=kind == "preshuffled",
    )  # fmt: skip


QUICK = [("gfx950", "forward", 1), ("gfx950", "preshuffled", 0), ("gfx942", "forward", 0), ("gfx950", "wgrad", 0)]
REST = [
    (arch, kind, i)
    for arch in ARCHS
    for kind in KINDS
    if not (arch == "gfx942" and kind.startswith("mx"))
    for i in range(len(candidates(problem_of(arch, kind), arch)))
    if (arch, kind, i) not in QUICK
]
ALL = [pytest.param(*case) for case in QUICK] + [
    pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for case in REST
]


@functools.cache
def compiled(arch, kind, index):
    problem = problem_of(arch, kind)
    return compile_grouped_isa(problem, candidates(problem, arch)[index], arch, lines=True)


@needs_flydsl
@pytest.mark.parametrize(("arch", "kind", "index"), ALL)
def test_no_spills_and_the_loop_as_designed(arch, kind, index):
    problem = problem_of(arch, kind)
    config = candidates(problem, arch)[index]
    kernel, geo = compiled(arch, kind, index), geometry(problem, config, arch)
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.lds_bytes == lds_bytes(problem, config, arch) <= LDS_BYTES[arch]
    loop, tiles = kernel.main_loop, tiles_per_step(problem, config, arch)
    assert loop.k == tiles * config.tile_k
    parts = 1 if arch == "gfx950" else 4 if problem.a_scaling == "1x128" else 2
    assert loop.mfma == tiles * geo.num_slices * geo.frags_m * geo.frags_n * parts
    assert loop.barriers == tiles and loop.stores == 0
    counted = [int(wait.split("vmcnt(")[1].split(")")[0]) for wait in loop.waits if "vmcnt" in wait]
    # Never a wait for everything, and never for what the last K tile but one has issued.
    least = geo.a.loads + (0 if problem.b_preshuffled else geo.b.loads)
    assert counted and min(counted) >= (geo.num_stages - 2) * least if arch == "gfx950" else min(counted) >= least - 1


@needs_flydsl
@pytest.mark.parametrize(("arch", "kind", "index"), ALL)
def test_our_waits_mean_in_machine_code_what_they_mean_as_written(arch, kind, index):
    kernel = compiled(arch, kind, index)
    findings = waits.check(kernel.module, kernel.text, arch)
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
@pytest.mark.parametrize(
    "kind", ["forward", "preshuffled", "dgrad", "wgrad", "plain", "mx forward", "mx dgrad", "mx wgrad"]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_lds_reads_without_bank_conflicts(arch, kind):
    if kind.startswith("mx") and arch == "gfx942":
        pytest.skip("its matrix unit takes no scales")
    scaling = {"plain": None, "mx": "1x32"}.get(kind.split()[0], "blocks")
    case = GroupedCase(
        {"preshuffled": "forward", "plain": "dgrad"}.get(kind, kind.split()[-1]), (130,), 128, 512, scaling=scaling,
        preshuffled=kind == "preshuffled", fnuz=arch == "gfx942",
    )  # fmt: skip
    made, _, _ = case.make()
    problem = case.problem()
    for config in candidates(problem, arch):
        out = torch.empty(problem.out_shape, dtype=torch.bfloat16)
        with sim.session(arch=arch, count_bank_conflicts=True, on_finding="raise", workgroups=range(1)) as report:
            tensors = GroupedTensors(
                made["a"], made["b"], torch.tensor(case.sizes), out, None, made["a_scale"], made["b_scale"]
            )
            amd.run(problem, config, arch, tensors)
        counters = report.launches[0].counters
        assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"] > 0, config


@pytest.mark.parametrize("kind", ["forward", "wgrad"])
@pytest.mark.parametrize("arch", ARCHS)
def test_uneven_groups(arch, kind):
    """One expert with half of all rows among 32 costs the busiest compute unit at most 1.25 times the steps of equal groups."""
    total = 16384
    even = [total // 32] * 32
    rest = (total // 2) // 31
    uneven = [total // 2] + [rest] * 30 + [total // 2 - 30 * rest]
    case = GroupedCase(kind, tuple(even), 4096, 4096, scaling="blocks", fnuz=arch == "gfx942")
    problem = case.problem("cuda")
    config = default_config(problem, arch)[0]
    balanced, skewed = (busiest_unit_steps(problem, config, sizes, NUM_CUS[arch]) for sizes in (even, uneven))
    assert skewed <= 1.25 * balanced, (config, balanced, skewed)
