"""What the compiler makes of the grouped kernels: no spills, loads two K tiles ahead, waits that mean what they say."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES, REGISTERS, WORKGROUP, CodeTile, OperandTile
from fourwave.ops.gemm.config import ARCHS, FLOAT8
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import (
    SCALE_STEPS,
    brings_scales,
    candidates,
    dequantizes,
    geometry,
    lds_bytes,
    scale_extents,
    tiles_per_step,
)
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.perf import waits
from fourwave.perf.grouped import compile_grouped_isa
from fourwave.testing.grouped_cases import GroupedCase

needs_flydsl = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
KINDS = ("forward", "preshuffled", "dgrad", "wgrad", "bf16 wgrad", "mx forward", "mx wgrad")


def problem_of(arch: str, kind: str) -> GroupedProblem:
    codes, scalings = (
        FLOAT8["gfx950" if kind.startswith("mx") else arch][0],
        ("1x128", "1x128" if kind == "wgrad" else "128x128"),
    )
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


QUICK = [
    ("gfx950", "forward", 1),
    ("gfx950", "forward", 2),
    ("gfx942", "mx wgrad", 0),
    ("gfx950", "preshuffled", 0),
    ("gfx942", "forward", 0),
    ("gfx950", "wgrad", 0),
]
REST = [
    (arch, kind, i)
    for arch in ARCHS
    for kind in KINDS
    for i in range(len(candidates(problem_of(arch, kind), arch)))
    if (arch, kind, i) not in QUICK
]
ALL = [
    pytest.param(*case, marks=() if case[2] == 0 and case[:2] != ("gfx950", "wgrad") else pytest.mark.slow)
    for case in QUICK
] + [pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for case in REST]


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
    # Every scale once for the workgroup and step, with the operands of its K tiles.
    codes = dequantizes(problem, arch)
    per_tile = operand_loads(geo.a, codes)
    per_tile += 2 * geo.frags_n if problem.b_preshuffled else operand_loads(geo.b, codes)
    of_scales = 0
    if brings_scales(problem, arch):
        of_scales = sum(-(-extent * SCALE_STEPS // WORKGROUP) for _, extent in scale_extents(problem, config))
    assert loop.loads + loop.loads_to_lds == tiles * per_tile + of_scales
    # Never a wait for everything, and never for what the last K tile but one has issued.
    least = operand_loads(geo.a, codes) + (0 if problem.b_preshuffled else operand_loads(geo.b, codes))
    assert counted and min(counted) >= (geo.num_stages - 2) * least if arch == "gfx950" else min(counted) >= least - 1


def operand_loads(tile: OperandTile, codes: bool) -> int:
    """Loads that bring one K tile of an operand; of codes that become bfloat16, with their scales."""
    if not codes:
        return tile.loads
    tile = CodeTile.of(tile)
    lines = [i * tile.lines_per_load for i in range(tile.loads)]
    return tile.loads + len(set(lines if tile.k_contiguous else [line // 32 for line in lines]))


def is_low(arch: str, kind: str, index: int) -> bool:
    return arch == "gfx950" and candidates(problem_of(arch, kind), arch)[index].tile_m <= 64


LOW = [pytest.param(*case) for case in QUICK if is_low(*case)] + [
    pytest.param(*case, marks=(pytest.mark.slow, pytest.mark.exhaustive)) for case in REST if is_low(*case)
]


@needs_flydsl
@pytest.mark.parametrize(("arch", "kind", "index"), LOW)
def test_two_workgroups_fit_where_tiles_are_low(arch, kind, index):
    """gfx950, up to 64 rows: memory is what such products wait for, and two workgroups have more loads in flight than one."""
    kernel = compiled(arch, kind, index)
    assert 2 * kernel.vgpr <= REGISTERS and 2 * kernel.lds_bytes <= LDS_BYTES[arch]


@needs_flydsl
@pytest.mark.parametrize(("arch", "kind", "index"), ALL)
def test_our_waits_mean_in_machine_code_what_they_mean_as_written(arch, kind, index):
    kernel = compiled(arch, kind, index)
    findings = waits.check(kernel.module, kernel.text, arch)
    assert not findings, "\n".join(map(str, findings))


CONFLICTS_QUICK = (("gfx950", "forward"), ("gfx950", "mx wgrad"), ("gfx942", "preshuffled"), ("gfx942", "dgrad"))


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        pytest.param(arch, kind, marks=[] if (arch, kind) in CONFLICTS_QUICK else [pytest.mark.slow])
        for arch in ARCHS
        for kind in ("forward", "preshuffled", "dgrad", "wgrad", "plain", "mx forward", "mx dgrad", "mx wgrad")
    ],
)
def test_lds_reads_without_bank_conflicts(arch, kind):
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
