"""What the compiler makes of the grouped kernels: no spills, loads two K tiles ahead, waits that mean what they say."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch

from fourwave import sim
from fourwave.blocks.flydsl.tiles import LDS_BYTES, REGISTERS, WORKGROUP, OperandTile
from fourwave.ops.gemm.config import ARCHS, FLOAT8
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import (
    SCALE_STEPS,
    GroupedConfig,
    brings_scales,
    candidates,
    dequantizes,
    geometry,
    in_memory,
    is_mx,
    lds_bytes,
    scale_extents,
    tiles_per_step,
)
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.perf import waits
from fourwave.perf.grouped import compile_grouped_isa
from fourwave.testing.grouped_cases import GroupedCase

needs_flydsl = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
KINDS = (
    "forward", "preshuffled", "dgrad", "wgrad", "bf16 forward", "bf16 dgrad", "bf16 wgrad", "tensor forward", "tensor preshuffled",
    "tensor dgrad", "tensor wgrad", "mx forward", "mx preshuffled", "mx dgrad", "mx wgrad",
)  # fmt: skip


def problem_of(arch: str, kind: str) -> GroupedProblem:
    codes, scalings = (
        FLOAT8["gfx950" if kind.startswith("mx") else arch][0],
        ("1x128", "1x128" if kind == "wgrad" else "128x128"),
    )
    if kind.startswith("tensor"):
        scalings = ("tensor", "tensor")
    if kind.startswith("bf16"):
        codes, scalings = torch.bfloat16, (None, None)  # type: ignore[assignment]
    if kind.startswith("mx"):
        scalings = ("1x32", "1x32")
    split = "reduction" if kind.endswith("wgrad") else "rows"
    layout = "NT" if split == "reduction" else "NN" if kind.endswith("dgrad") else "TN"
    return GroupedProblem(
        8, 8192, 4096, 4096, split, layout, codes, codes, torch.bfloat16, device_type="cuda", a_scaling=scalings[0],
        b_scaling=scalings[1], b_preshuffled=kind.endswith("preshuffled"),
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
    per_tile = operand_loads(geo.a, problem, arch)
    per_tile += 2 * geo.frags_n if problem.b_preshuffled else operand_loads(geo.b, problem, arch)
    assert loop.loads + loop.loads_to_lds == tiles * per_tile + sum(scale_loads(problem, config, arch))
    # Never a wait for everything, and never for what the last K tile but one has issued.
    least = operand_loads(geo.a, problem, arch)
    least += 0 if problem.b_preshuffled else operand_loads(geo.b, problem, arch)
    assert counted and min(counted) >= (geo.num_stages - 2) * least if arch == "gfx950" else min(counted) >= least - 1


def operand_loads(image: OperandTile, problem: GroupedProblem, arch: str) -> int:
    """Loads that bring one K tile of an operand; of codes that become bfloat16, with their scales: of a row each, or of 16 columns."""
    loads = in_memory(image, problem, arch).loads
    return loads + (loads if image.k_contiguous else 1) * dequantizes(problem, arch)


def scale_loads(problem: GroupedProblem, config: GroupedConfig, arch: str) -> tuple[int, int]:
    """Loads of 4 and of 16 bytes a lane that bring to LDS the scales of a step of the main loop: of rows, and of neighbouring columns."""
    extents = scale_extents(problem, config) if brings_scales(problem, arch) else ()
    rows = [extent for kind, extent in extents if kind not in ("columns", "mx bytes")]
    return sum(-(-extent * SCALE_STEPS // WORKGROUP) for extent in rows), len(extents) - len(rows)


@needs_flydsl
@pytest.mark.parametrize(("arch", "kind", "index"), ALL)
def test_what_moves_fewer_than_16_bytes_a_lane(arch, kind, index):
    """Operands do not, but for gfx950's transposing reads, which have 8 bytes at most, and scales are read from LDS as operands are. What
    brings scales of rows to LDS may: they have the strides that the caller gave them, in either direction, and a workgroup's threads
    bring those of 512 of K together, once. gfx942's MX scales of rows come by words with each tile's codes: groups begin their steps at
    different eighths of K, so 16 bytes would come with each tile as well, for 1 to 3% more instructions in all."""
    problem = problem_of(arch, kind)
    config = candidates(problem, arch)[index]
    geo, narrow = geometry(problem, config, arch), dict(compiled(arch, kind, index).main_loop.narrow)
    tiles, columns = tiles_per_step(problem, config, arch), [not problem.a_k_last, not problem.b_k_last]
    if arch == "gfx950" and any(columns):
        frags = sum(count for count, there in zip((geo.frags_m, geo.frags_n), columns, strict=True) if there)
        reads = frags * geo.a.fragment_bytes // 8 * geo.num_slices * tiles
        if is_mx(problem):
            sides = zip((geo.frags_m, geo.frags_n), columns, strict=True)
            reads += sum(-(-count // 2) for count, there in sides if there)  # scales of two fragments, for the step
        assert narrow.pop(f"ds_read_b64_tr_b{8 * problem.a_dtype.itemsize}") == reads
    loads, _ = scale_loads(problem, config, arch)
    if dequantizes(problem, arch):
        # Of a row each: a word, of which a K tile uses two bytes.
        rows = (tile for tile, there in zip((geo.a, geo.b), columns, strict=True) if not there)
        loads = tiles * sum(in_memory(tile, problem, arch).loads for tile in rows)
    assert narrow.pop("buffer_load_dword", 0) == loads
    if brings_scales(problem, arch):
        # gfx942: what the loads brought, to LDS.
        writes = narrow.pop("ds_write_b32", 0) + 2 * narrow.pop("ds_write2st64_b32", 0)
        assert writes == (loads if arch == "gfx942" else 0)
    assert not narrow


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
