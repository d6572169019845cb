"""The gfx1250 kernel where operands and output span more than 2^32 bytes: the last workgroup of the real launch over memory that is
mostly never touched, with a scale of its own for each row and block, and sums that are exact."""

from __future__ import annotations

import pytest
import torch
from test_huge import sparse, tile_of

from fourwave import sim
from fourwave.formats import pack_e2m1
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

ARCH = "gfx1250"
pytestmark = [
    pytest.mark.skipif(sim.unavailable(ARCH) is not None, reason=f"no simulator: {sim.unavailable(ARCH)}"),
    pytest.mark.slow,
]
CODES = torch.uint8
LONG, DEPTH = (
    600_032,
    16_384,
)  # rows of 8192 bytes: 4.9 GB; whole chunks of 16 bytes where they are rows' lengths, but no whole tiles


def filled(tensor, scale, first, count, k_last, seed):
    """Values of rows first.. of op: ones, each block of 32 k with a power of two; written into codes and scales."""
    K = DEPTH
    block = torch.arange(K // 32)
    exponent = (block * 5 + torch.arange(count)[:, None] * seed + torch.arange(count)[:, None] // 16) % 6
    ones = torch.full((count, K), 2, dtype=torch.uint8)
    if k_last:
        tensor[first : first + count] = pack_e2m1(ones)
        scale[first : first + count] = (exponent + 127).to(torch.uint8)
    else:
        tensor[:, first // 2 : (first + count) // 2] = pack_e2m1(ones.mT.contiguous())
        scale[:, first : first + count] = (exponent + 127).to(torch.uint8).mT
    return 2.0 ** exponent.double()


@pytest.mark.parametrize(
    ("layout", "M", "N"), [("TN", 256, LONG), pytest.param("NT", LONG, 2048, marks=pytest.mark.exhaustive)]
)
def test_huge(layout, M, N):
    problem = GemmProblem(M, N, DEPTH, layout, CODES, CODES, torch.float32, a_scaling="1x32", b_scaling="1x32")
    shapes = [(rows, columns // 2) for rows, columns in (problem.a_shape, problem.b_shape)]
    a, b = (sparse(shape, torch.uint8) for shape in shapes)
    k_blocks = DEPTH // 32
    a_scale, b_scale = (
        sparse((rows, k_blocks) if k_last else (k_blocks, rows), torch.uint8)
        for rows, k_last in ((M, layout != "NT"), (N, layout == "TN"))
    )
    out = sparse((M, N), torch.float32)
    assert max(a.numel(), b.numel()) > 2**32
    config = default_config(problem, ARCH)[0]
    tiles_m, tiles_n = -(-M // config.tile_m), -(-N // config.tile_n)
    last = tiles_m * tiles_n - 1
    m_tile, n_tile = tile_of(last, tiles_m, tiles_n, config.group_m)
    assert max(m_tile, n_tile) > 2000
    m0, n0 = m_tile * config.tile_m, n_tile * config.tile_n
    rows, columns = min(config.tile_m, M - m0), min(config.tile_n, N - n0)
    left = filled(a, a_scale, m0, rows, layout != "NT", 7)
    right = filled(b, b_scale, n0, columns, layout == "TN", 1)
    scales = [each.view(torch.float8_e8m0fnu) for each in (a_scale, b_scale)]
    with sim.session(arch=ARCH, on_finding="raise", workgroups=range(last, last + 1)):
        notes = amd.run(problem, config, ARCH, GemmTensors(a, b, out, a_scale=scales[0], b_scale=scales[1]))
    assert notes == []
    at = (slice(m0, m0 + rows), slice(n0, n0 + columns))
    assert torch.equal(out[at].double(), 32 * (left @ right.T))
    out[at] = 0
    assert not out[max(m0 - 8, 0) :, max(n0 - 64, 0) :].any()
