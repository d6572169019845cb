"""Shapes whose operands have over 2^31 elements or bytes: workgroups of the real launch over memory that is mostly never touched.

The grid, the arguments and every pointer are those of the whole problem; the first, a middle and the last workgroup run,
with all K. Operands are small integers, so that every sum is exact.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import FLOAT8, default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

pytestmark = [
    pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}"),
    pytest.mark.slow,
]

# Three shapes that a published run had to leave out, since a launch argument did not fit 32 bits.
SHAPES = [(32768, 16384, 53248), (32768, 37888, 3584), (32768, 59136, 8192)]
LAYOUTS = ("TN", "NN", "NT")
NUM_XCDS = 8


def sparse(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which no page exists until it is written."""
    size = shape[0] * shape[1] * dtype.itemsize
    try:
        memory = np.zeros(size, dtype=np.uint8)  # calloc: pages of the system's zero page
    except MemoryError:
        pytest.skip(f"no address space for {size} bytes")
    return torch.from_numpy(memory).view(dtype).view(shape)


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
    """One operand, of which single blocks of rows (of M or N) are filled."""

    tensor: torch.Tensor
    k_last: bool

    def fill(self, first: int, count: int, seed: int) -> torch.Tensor:
        """float32 [count, K], written into the operand too."""
        shape = self.tensor.shape if self.k_last else self.tensor.shape[::-1]
        count = min(count, shape[0] - first)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        values = torch.randint(-2, 3, (count, shape[1]), generator=generator).float()
        block = self.tensor[first : first + count] if self.k_last else self.tensor[:, first : first + count].mT
        block.copy_(values)
        return values


def check(arch: str, shape: tuple[int, int, int], layout: str, dtype: torch.dtype) -> None:
    M, N, K = shape
    problem = GemmProblem(M, N, K, layout, dtype, dtype, torch.bfloat16)
    config = default_config(problem, arch)[0]
    a, b = sparse(problem.a_shape, dtype), sparse(problem.b_shape, dtype)
    out = sparse((M, N), torch.bfloat16)
    tiles_m, tiles_n = -(-M // config.tile_m), -(-N // config.tile_n)
    total = tiles_m * tiles_n
    for workgroup in (0, total // 2 + 4, total - 1):  # + 4: of a die whose tiles are in the middle too
        m_tile, n_tile = tile_of(workgroup, tiles_m, tiles_n, config.group_m)
        m0, n0 = m_tile * config.tile_m, n_tile * config.tile_n
        rows = Side(a, layout != "NT").fill(m0, config.tile_m, 1)
        columns = Side(b, layout == "TN").fill(n0, config.tile_n, 2)
        with sim.session(arch=arch, on_finding="raise", workgroups=range(workgroup, workgroup + 1)) as report:
            notes = amd.run(problem, config, arch, GemmTensors(a, b, out))
        assert notes == []
        (launch,) = report.launches
        assert launch.grid == (total, 1, 1) and launch.workgroups == 1
        print(
            f"{arch} {problem}: {config}; grid {launch.grid}, workgroup {workgroup} = tile ({m_tile}, {n_tile}); "
            f"a {tuple(a.shape)} stride {a.stride(0)} ({a.numel()} elements), b {tuple(b.shape)} stride {b.stride(0)} "
            f"({b.numel()}), out {tuple(out.shape)} stride {out.stride(0)} ({out.numel()}); M={M} N={N} K={K} alpha=1.0"
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
    every = itertools.product(("gfx950", "gfx942"), SHAPES, ("bf16", "fp8"), LAYOUTS)
    chosen = [
        (0, "bf16", "TN"),
        (1, "fp8", "NN"),
        (2, "fp8", "NT"),
        (0, "fp8", "TN"),
        (1, "bf16", "NT"),
        (2, "bf16", "NN"),
    ]
    kept = {
        ("gfx950" if i < 3 else "gfx942", SHAPES[number], kind, layout)
        for i, (number, kind, layout) in enumerate(chosen)
    }
    return [
        pytest.param(*case, marks=() if case in kept else pytest.mark.exhaustive, id="-".join(map(str, case)))
        for case in every
    ]


@pytest.mark.parametrize(("arch", "shape", "kind", "layout"), combinations())
def test_huge(arch: str, shape: tuple[int, int, int], kind: str, layout: str) -> None:
    check(arch, shape, layout, torch.bfloat16 if kind == "bf16" else FLOAT8[arch][0])
