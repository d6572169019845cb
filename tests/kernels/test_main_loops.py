"""Every GEMM kernel that gfx942 and gfx950 have: its main loop's accesses, spills and LDS bank conflicts.

Operands and scales move 16 bytes a lane, with one exception: where K is not contiguous and elements have less than 32 bits, gfx950 reads
LDS as wide as its transposing reads are, 8 bytes (ds_read_b64_tr_*): 16 would need what gfx942 does, a transposition in registers on the
way to LDS, and gfx950's loads go straight there. e8m0 scales on gfx950 move like operands, a read for several fragments and all K of a
step; float32 scales of 128 k too, a read for each fragment.
gfx942's e8m0 scales come 16 bytes a lane too, where K is contiguous those of 512 k of a row, in every step but the first of so many
k none; its 256 x 256 tile loads them in every step.
What else the compiler makes of packed operands is in test_packed_gemm.py; grouped kernels are in test_grouped_isa.py.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import every_kernel
import launches
import pytest

from fourwave import sim
from fourwave.ops.gemm.config import (
    ARCHS,
    GemmConfig,
    brings_scales,
    dequantizes,
    geometry,
    in_halves,
    keeps_scales,
    multiplied_bytes,
    packed_operands,
    shuffled_ahead,
)
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.perf import isa
from fourwave.testing.shapes import Shape

KERNELS = [(arch, *kernel) for arch in ARCHS for kernel in launches.kernels(arch)]
LONG = (pytest.mark.slow, pytest.mark.exhaustive)
# One that is quick to compile here, a few for the simulator; test_isa.py has the largest tiles.
COMPILED = [("gfx950", "mxfp8 preshuffled", "TN", 16), ("gfx942", "fp8", "NT", 64)]
SIMULATED = [
    ("gfx950", "fp8 preshuffled", "TN", 32),
    ("gfx950", "mxfp8", "NT", 64),
    ("gfx942", "fp8 preshuffled", "TN", 32),
    ("gfx942", "fp8", "NT", 64),
]


def smallest() -> dict[tuple[str, str, str], GemmConfig]:
    """The tile with the fewest results of each machine, kind of operands and layout: the least to compile and to simulate."""
    found: dict[tuple[str, str, str], GemmConfig] = {}
    for arch, precision, layout, config in KERNELS:
        before = found.setdefault((arch, precision, layout), config)
        if config.tile_m * config.tile_n < before.tile_m * before.tile_n:
            found[arch, precision, layout] = config
    return found


def parameters(quick: list[tuple[str, str, str, int]], packed: bool = True) -> list[Any]:
    """Those of `quick` run always, one of each kind in the slow tests, the others in the exhaustive ones."""
    each, found = smallest(), []
    for arch, precision, layout, config in KERNELS:
        if not packed and "mxfp4" in precision:
            continue
        one = each[arch, precision, layout] == config
        marks = () if (arch, precision, layout, config.tile_m) in quick else (pytest.mark.slow,) if one else LONG
        name = f"{arch}-{precision}-{layout}-{config.tile_m}x{config.tile_n}"
        found.append(pytest.param(arch, precision, layout, config, id=name, marks=marks))
    return found


def problem_of(arch: str, precision: str, layout: str) -> GemmProblem:
    return launches.case_of(arch, precision, layout, Shape("", 4096, 4096, 4096)).problem


def accesses(kernel: isa.CompiledKernel, pattern: str) -> list[str]:
    """Instructions of the main loop, operands included."""
    lines = kernel.text.splitlines()
    loops = [(first, last) for first, last in isa._loops(lines)]
    bodies = [lines[first : last + 1] for first, last in loops]
    body = max(bodies, key=lambda body: sum("v_mfma" in line for line in body))
    return [line.strip() for line in body if re.match(rf"\s+{pattern}", line)]


def transposing_reads(problem: GemmProblem, config: GemmConfig, arch: str) -> set[str]:
    """The only accesses of a main loop that may move fewer than 16 bytes a lane."""
    size, ahead = multiplied_bytes(problem, arch), shuffled_ahead(config) if problem.b_preshuffled else 0
    swiglu = problem.activation == "swiglu"
    scales, packed = brings_scales(problem, arch), packed_operands(problem)
    geo = geometry(config, problem.layout, size, arch, scales, swiglu, packed, ahead)
    sizes = {4 if tile.packed else 8 * tile.elem_bytes for tile in (geo.a, geo.b) if tile.transposing}
    sizes |= {8 for tile in (geo.scale_tiles if scales else ()) if tile is not None and not tile.tile.k_contiguous}
    return {f"ds_read_b64_tr_b{bits}" for bits in sizes}


needs_flydsl = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
FURTHER = [
    *(
        (arch, name, problem_of(arch, precision, layout), config)
        for arch, precision, layout, config in KERNELS
        if "mxfp4" in precision
        for name in [f"{precision} {layout} {config.tile_m}x{config.tile_n}"]
    ),
    *((arch, name, case.problem, config) for arch in ARCHS for name, case, config in every_kernel.further_gemms(arch)),
]
SOON = ("gfx942 gemm split-K: mxfp8", "gfx950 mxfp4 NT 64x64")


@needs_flydsl
@pytest.mark.parametrize(
    ("arch", "problem", "config"),
    [
        pytest.param(arch, *rest, id=f"{arch} {name}", marks=(pytest.mark.slow,) if f"{arch} {name}" in SOON else LONG)
        for arch, name, *rest in FURTHER
    ],
)
def test_accesses_of_packed_operands_epilogues_and_split_k(arch: str, problem: GemmProblem, config: GemmConfig) -> None:
    kernel = isa.compile_isa(problem, config, arch)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert set(kernel.main_loop.narrow) == transposing_reads(problem, config, arch)


@needs_flydsl
@pytest.mark.parametrize(("arch", "precision", "layout", "config"), parameters(COMPILED, packed=False))
def test_accesses_and_spills(arch: str, precision: str, layout: str, config: GemmConfig) -> None:
    problem = problem_of(arch, precision, layout)
    kernel = isa.compile_isa(problem, config, arch)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    size, ahead = multiplied_bytes(problem, arch), shuffled_ahead(config) if problem.b_preshuffled else 0
    geo = geometry(config, layout, size, arch, brings_scales(problem, arch), b_ahead=ahead)
    tiles = 2 if in_halves(config, size, arch) else geo.tiles_per_step
    loads = accesses(kernel, "(buffer|global|flat)_load")
    wide = [line for line in loads if line.startswith("buffer_load_dwordx4")]
    operand_loads = tiles * (geo.a.loads + geo.b_loads)
    if dequantizes(problem, arch):
        # Codes; of columns the scales of each tile, and so of rows by the largest tile; else of rows those of 512 k, by the first of their
        # steps, which the loop of the others is in.
        operands = [(tile, tile.loads // 2) for tile in (geo.a, geo.b)]
        rows = [count // 2 if count % 2 == 0 else count for tile, count in operands if tile.k_contiguous]
        columns = sum(not tile.k_contiguous for tile, _ in operands)
        if rows and keeps_scales(problem, config, arch):
            tiles, operand_loads = 2 * tiles, 2 * operand_loads
        row_loads = sum(rows) * (1 if keeps_scales(problem, config, arch) else tiles)
        assert len(loads) == len(wide) == operand_loads // 2 + columns * tiles + row_loads, loads
    elif arch == "gfx942":
        scale_loads = geo.frags_m + 1 if geo.scales == "128" else 0  # of rows, and of 128 rows; of 512 k, a step
        assert len(loads) == len(wide) == operand_loads + scale_loads, loads
    else:
        assert len(loads) == len(wide), loads
        assert len([line for line in wide if "lds" not in line]) == (tiles * geo.b_loads if ahead else 0)
    assert all(line.startswith("ds_write_b128") for line in accesses(kernel, "ds_write"))
    reads = kernel.main_loop.lds_reads
    contiguous = [(geo.frags_m, geo.a), (geo.frags_n, geo.b)][: 1 if ahead else 2]
    fragment_reads = sum(frags for frags, tile in contiguous if not tile.transposing)
    per_fragment = geo.a.fragment_bytes // 16 * tiles * geo.num_slices
    scales = launches.scale_reads(geo, in_halves(config, size, arch)) if geo.scales else {}
    assert reads.get("ds_read_b128", 0) == fragment_reads * per_fragment + scales.get("ds_read_b128", 0)
    narrow = {op for op in reads if op != "ds_read_b128"}
    columns = sum(frags for frags, tile in contiguous if tile.transposing)
    transposing = f"ds_read_b64_tr_b{8 * size}"
    assert narrow == ({transposing} if columns else set())
    assert set(kernel.main_loop.narrow) == narrow == transposing_reads(problem, config, arch)
    if columns:
        assert reads[transposing] == 2 * columns * per_fragment + scales.get(transposing, 0)


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
@pytest.mark.parametrize(("arch", "precision", "layout", "config"), parameters(SIMULATED))
def test_no_bank_conflicts(arch: str, precision: str, layout: str, config: GemmConfig) -> None:
    """The simulator's count of LDS cycles of the whole kernel is the least that its reads can take."""
    case = launches.case_of(arch, precision, layout, launches.pipeline(config, precision))
    with sim.session(arch, on_finding="raise", count_bank_conflicts=True, threads=1) as report:
        launches.launch(case, arch, config)
    for launch in report.launches:
        counters = launch.counters
        assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"]
        assert counters["lds_read_cycles"] > 0
