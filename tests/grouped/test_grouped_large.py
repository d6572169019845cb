"""Weights of 2^31 bytes and of 4.5 GiB: single simulated workgroups over memory that is mapped and hardly touched."""

from __future__ import annotations

import mmap

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm.config import ARCHS, FLOAT8
from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import candidates
from fourwave.ops.grouped_gemm.preshuffle import shuffle
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.testing.bounds import assert_within, gemm_bound

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")


def mapped(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    count = 1
    for size in shape:
        count *= size
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("layout", ["TN", "NN", "preshuffled"])
@pytest.mark.parametrize(("G", "N", "K"), [(8, 16384, 16384), (9, 32768, 16384)], ids=["2^31 bytes", "4.5 GiB"])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_last_columns_of_the_last_expert(arch: str, G: int, N: int, K: int, layout: str) -> None:
    """Tokens on the last expert only, and a short reduction's worth of numbers in it: everything else in the weights is zero."""
    if layout == "NN":
        N, K = K, N
    codes = FLOAT8[arch][0]
    rows, tile, used = 5, 128, 256  # k that are not zero: the first and the last 128
    random = torch.Generator().manual_seed(0)
    a = torch.zeros(rows, K, dtype=codes)
    b = mapped((G, N, K) if layout != "NN" else (G, K, N), codes)
    where = torch.cat((torch.arange(128), torch.arange(K - 128, K)))
    part_a = torch.randn(rows, used, generator=random).to(codes)
    part_b = torch.randn(tile, used, generator=random).to(codes)
    a.view(torch.uint8)[:, where] = part_a.view(torch.uint8)
    last = torch.zeros(tile, K, dtype=torch.uint8)
    last[:, where] = part_b.view(torch.uint8)
    if layout == "NN":
        b.view(torch.uint8)[-1, :, -tile:] = last.mT
    elif layout == "preshuffled":
        b.view(torch.uint8)[-1, -tile:] = shuffle(last)
    else:
        b.view(torch.uint8)[-1, -tile:] = last
    blocks = -(-K // 128)
    a_scale = 2.0 ** torch.randint(-3, 3, (rows, blocks), generator=random).float()
    b_scale = torch.ones(G, *((N // 128, blocks) if layout != "NN" else (blocks, N // 128)))
    b_scale[-1] = 2.0 ** torch.randint(-3, 3, b_scale.shape[1:], generator=random).float()
    problem = GroupedProblem(
        G, rows, N, K, "rows", "NN" if layout == "NN" else "TN", codes, codes, torch.float32, a_scaling="1x128",
        b_scaling="128x128", b_preshuffled=layout == "preshuffled",
    )  # fmt: skip
    config = candidates(problem, arch)[-1]
    out = torch.full((rows, N), float("nan"))
    sizes = torch.tensor([0] * (G - 1) + [rows])
    tiles = N // config.tile_n  # of one row of tiles, dealt to 8 dies: the last one's number is theirs, too
    with sim.session(arch=arch, on_finding="raise", workgroups=range(tiles - 1, tiles)):
        amd.run(problem, config, arch, GroupedTensors(a, b, sizes, out, None, a_scale, b_scale))
    assert out[:, : N - tile].isnan().all()
    ends = [0, blocks - 1]
    of_b = b_scale[-1, -1, ends] if layout != "NN" else b_scale[-1, ends, -1]
    values_a = part_a.double() * a_scale[:, ends].double().repeat_interleave(128, 1)
    values_b = part_b.double() * of_b.double().repeat_interleave(128)
    assert_within(
        out[:, N - tile :], values_a @ values_b.mT, gemm_bound(values_a, values_b, torch.float32, scaled=True)
    )
