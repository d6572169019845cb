"""gfx942, operands whose K is not contiguous: turned on their way to LDS, they give the bits of those whose K is."""

from __future__ import annotations

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm.config import candidates

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

LONG = (pytest.mark.slow, pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("dtype", "index"),
    [
        pytest.param(dtype, index, marks=() if (dtype, index) == (torch.bfloat16, 3) else LONG)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fnuz)
        for index in range(5)
    ],
)
def test_layouts_have_the_same_bits(dtype: torch.dtype, index: int) -> None:
    """Each operand's elements are distinct; K is added in the same order, whatever the layout."""
    config = candidates("gfx942", dtype.itemsize)[index]
    M, N, K = config.tile_m - 3, config.tile_n + 5, 5 * config.tile_k - 3
    generator = torch.Generator().manual_seed(index)
    a = torch.randn(M, K, generator=generator).to(dtype)
    b = torch.randn(N, K, generator=generator).to(dtype)
    results = []
    for trans_a, trans_b in ((False, True), (False, False), (True, False)):
        left = a.T.contiguous() if trans_a else a
        right = b if trans_b else b.T.contiguous()
        out = torch.full((M, N), float("nan"))
        fw.gemm(left, right, trans_a=trans_a, trans_b=trans_b, out=out, config=config, backend="sim:gfx942")
        results.append(out)
    assert torch.isfinite(results[0]).all()
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])
