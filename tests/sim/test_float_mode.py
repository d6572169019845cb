"""Simulated arithmetic has denormals in whatever mode the process is, and leaves that mode alone."""

from __future__ import annotations

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.sim.float_mode import default_float_mode

SMALL = 1e-39  # a denormal of float32 and of bfloat16


@pytest.fixture
def flushed():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    yield
    torch.set_flush_denormal(False)


def twice(x: float) -> float:
    return float((torch.tensor([x]) * 2).item())


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_denormals_are_kept_where_the_process_flushes_them(arch: str, flushed: None) -> None:
    x = torch.full((16, 32), 1.0)
    x.view(torch.int32).fill_(713624)  # 1e-39, which a constructor would flush
    out = fw.gemm(x, torch.eye(32), backend=f"sim:{arch}")
    assert torch.equal(out.view(torch.int32), x.view(torch.int32))
    assert twice(SMALL) == 0  # the caller's mode is as it was


def test_the_mode_comes_back_after_an_error(flushed: None) -> None:
    with pytest.raises(KeyError), default_float_mode():
        raise KeyError
    assert twice(SMALL) == 0


def test_a_mode_without_flushing_stays() -> None:
    with default_float_mode():
        assert twice(SMALL) != 0
    assert twice(SMALL) != 0
