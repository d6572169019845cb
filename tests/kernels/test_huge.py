"""Shapes whose operands have over 2^31 elements or bytes: workgroups of the real launch over memory that is mostly never touched.

The grid, the arguments and every pointer are those of the whole problem; the first, a middle and the last workgroup run,
with all K. Operands are small integers, and scales powers of two, one for each row and block, so that every sum is exact.
"""

from __future__ import annotations

import itertools
import mmap
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import FLOAT8, GemmConfig, candidates_for, default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

pytestmark = [
    pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}"),
    pytest.mark.slow,
]

# Three shapes that a published run had to leave out, since a launch argument did not fit 32 bits.
SHAPES = [(32768, 16384, 53248), (32768, 37888, 3584), (32768, 59136, 8192)]
LAYOUTS = ("TN", "NN", "NT")
NUM_XCDS = 8
NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on


def sparse(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which no page exists until it is written."""
    size = shape[0] * shape[1] * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except (OSError, ValueError) as error:
        pytest.skip(f"no address space for {size} bytes: {error}")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def tile_of(workgroup: int, tiles_m: int, tiles_n: int, group_m: int) -> tuple[int, int]:
    """schedule.output_tile, from its description: dies take contiguous ranges; bands of group_m rows, columns slowest."""
    tiles = tiles_m * tiles_n
    sizes = [tiles // NUM_XCDS + (die < tiles % NUM_XCDS) for die in range(NUM_XCDS)]
    index = sum(sizes[: workgroup % NUM_XCDS]) + workgroup // NUM_XCDS
    band, in_band = divmod(index, tiles_n * group_m)
    rows = min(group_m, tiles_m - band * group_m)
    return band * group_m + in_band % rows, in_band // rows


@dataclass
class Side:
    """One operand, of which single blocks of rows (of M or N) are filled, with their scales: one for each line x along of rows and K."""

    tensor: torch.Tensor
    k_last: bool
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (1, 32)

    def fill(self, first: int, count: int, seed: int) -> torch.Tensor:
        """float32 [count, K], values with their scales; codes and scales are written into the operand too."""
        shape = self.tensor.shape if self.k_last else self.tensor.shape[::-1]
        count = min(count, shape[0] - first)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        values = torch.randint(-2, 3, (count, shape[1]), generator=generator).float()
        self._rows(self.tensor, first, count).copy_(values)
        if self.scale is None:
            return values
        line, along = self.block
        lines = range(first // line, (first + count - 1) // line + 1)
        size = (len(lines), -(-shape[1] // along))
        exponents = torch.randint(-2, 3, size, generator=generator)
        mx = self.scale.dtype == torch.uint8
        self._rows(self.scale, lines[0], len(lines)).copy_(exponents + 127 if mx else 2.0**exponents)
        of_rows = 2.0 ** exponents[torch.arange(first, first + count) // line - lines[0]]
        return values * of_rows.repeat_interleave(along, 1)[:, : shape[1]]

    def _rows(self, of: torch.Tensor, first: int, count: int) -> torch.Tensor:
        return of[first : first + count] if self.k_last else of[:, first : first + count].mT


SCALINGS = {"mxfp8": ("1x32", "1x32"), "1x128": ("1x128", "128x128")}


def problem_of(arch: str, shape: tuple[int, int, int], layout: str, kind: str) -> GemmProblem:
    dtype = {"bf16": torch.bfloat16, "mxfp8": torch.float8_e4m3fn}.get(kind, FLOAT8[arch][0])
    a_scaling, b_scaling = SCALINGS.get(kind, (None, None))
    return GemmProblem(
        *shape, layout, dtype, dtype, torch.bfloat16, a_scaling=a_scaling, b_scaling=b_scaling
    )  # fmt: skip


def side_of(problem: GemmProblem, which: str) -> Side:
    k_last = problem.layout != "NT" if which == "a" else problem.layout == "TN"
    operand = sparse(getattr(problem, f"{which}_shape"), getattr(problem, f"{which}_dtype"))
    scaling = getattr(problem, f"{which}_scaling")
    if scaling is None:
        return Side(operand, k_last)
    line, along = (int(size) for size in scaling.split("x"))
    dtype = torch.uint8 if scaling == "1x32" else torch.float32
    return Side(operand, k_last, sparse(getattr(problem, f"{which}_scale_shape"), dtype), (line, along))


def check(arch: str, problem: GemmProblem, config: GemmConfig) -> None:
    M, N, K = problem.M, problem.N, problem.K
    sides = side_of(problem, "a"), side_of(problem, "b")
    (a, b), (a_scale, b_scale) = (side.tensor for side in sides), (side.scale for side in sides)
    if problem.a_scaling == "1x32":
        a_scale, b_scale = (scale.view(torch.float8_e8m0fnu) for scale in (a_scale, b_scale) if scale is not None)
    out = sparse((M, N), torch.bfloat16)
    tiles_m, tiles_n = -(-M // config.tile_m), -(-N // config.tile_n)
    total = tiles_m * tiles_n
    for workgroup in (0, total // 2 + 4, total - 1):  # + 4: of a die whose tiles are in the middle too
        m_tile, n_tile = tile_of(workgroup, tiles_m, tiles_n, config.group_m)
        m0, n0 = m_tile * config.tile_m, n_tile * config.tile_n
        rows = sides[0].fill(m0, config.tile_m, 1)
        columns = sides[1].fill(n0, config.tile_n, 2)
        with sim.session(arch=arch, on_finding="raise", workgroups=range(workgroup, workgroup + 1)) as report:
            notes = amd.run(problem, config, arch, GemmTensors(a, b, out, None, 1.0, a_scale, b_scale))
        assert notes == []
        (launch,) = report.launches
        assert launch.grid == (total, 1, 1) and launch.workgroups == 1
        scales = "".join(
            f", {name} {tuple(scale.shape)} stride {scale.stride(0)} ({scale.numel() * scale.itemsize} bytes)"
            for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)) if scale is not None
        )  # fmt: skip
        print(
            f"{arch} {problem}: {config}; grid {launch.grid}, workgroup {workgroup} = tile ({m_tile}, {n_tile}); "
            f"a {tuple(a.shape)} stride {a.stride(0)} ({a.numel()} elements), b {tuple(b.shape)} stride {b.stride(0)} "
            f"({b.numel()}), out {tuple(out.shape)} stride {out.stride(0)} ({out.numel()}){scales}; M={M} N={N} K={K} alpha=1.0"
        )
        expected = (rows @ columns.T).to(torch.bfloat16)
        at = (slice(m0, m0 + expected.shape[0]), slice(n0, n0 + expected.shape[1]))
        assert torch.equal(out[at], expected)
        # Next to the tile nothing was written.
        out[at] = 0
        near = out[max(m0 - 8, 0) : m0 + config.tile_m + 8, max(n0 - 64, 0) : n0 + config.tile_n + 64]
        assert not near.any()


def combinations() -> list[Any]:
    """Every shape, operand type and layout on both machines; but for one layout and type of each shape exhaustive."""
    every = itertools.product(("gfx950", "gfx942"), SHAPES, ("bf16", "fp8", "mxfp8"), LAYOUTS)
    chosen = {
        "gfx950": [(0, "bf16", "TN"), (1, "fp8", "NN"), (2, "fp8", "NT"), (0, "mxfp8", "NN"), (1, "mxfp8", "NT"), (2, "mxfp8", "TN")],
        "gfx942": [(0, "fp8", "TN"), (1, "bf16", "NT"), (2, "bf16", "NN"), (1, "mxfp8", "TN")],
    }  # fmt: skip
    kept = {(arch, SHAPES[number], kind, layout) for arch in chosen for number, kind, layout in chosen[arch]}
    return [
        pytest.param(*case, marks=() if case in kept else pytest.mark.exhaustive, id="-".join(map(str, case)))
        for case in every
    ]


@pytest.mark.parametrize(("arch", "shape", "kind", "layout"), combinations())
def test_huge(arch: str, shape: tuple[int, int, int], kind: str, layout: str) -> None:
    problem = problem_of(arch, shape, layout, kind)
    check(arch, problem, default_config(problem, arch)[0])


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize(("kind", "layout"), [("mxfp8", "TN"), ("mxfp8", "NT"), ("1x128", "TN")])
def test_scales_beyond_2_to_31_bytes(arch: str, kind: str, layout: str) -> None:
    """The last tile's scales lie behind 2^31 bytes of others; where K is not contiguous, so do all of the last block of K."""
    shape = (2**22 + 512, 64, 2**14 + 512) if layout == "NT" else (2**24 + 485, 64, 4096)
    problem = problem_of(arch, shape, layout, kind)
    assert problem.a_scale_shape is not None
    first_rows = (problem.a_scale_shape[0] - 8) * problem.a_scale_shape[1] * (1 if kind == "mxfp8" else 4)
    assert first_rows > 2**31
    config = next(config for config in reversed(candidates_for(problem, arch)) if config.tile_m == 64)
    assert -(-problem.M // config.tile_m) % NUM_XCDS == 0  # then the last workgroup has the last tile
    check(arch, problem, config)
