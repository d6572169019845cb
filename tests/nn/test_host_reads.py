"""A training step reads no tensor on the host: on a GPU it would wait there, and a CUDA graph could not hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fourwave as fw

R = fw.recipes
RECIPES = {
    "unquantized": R.Unquantized(), "delayed": R.DelayedScaling(amax_history_len=4), "current": R.CurrentScaling(),
    "blocks": R.BlockScaling(), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(), "mxfp4all": R.MXFP4(backward="mxfp4"),
}  # fmt: skip
# What gives a number, or a shape that depends on numbers. (A dispatch mode does not see inside custom operators.)
READS = ("item", "tolist", "numpy", "nonzero", "unique", "equal", "__int__", "__float__", "__bool__", "__index__")


def forbid_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like torch.cuda.set_sync_debug_mode("error"), on any device."""
    for name in READS:

        def refuse(self: torch.Tensor, *_: Any, name: str = name) -> None:
            raise AssertionError(f"Tensor.{name} of {tuple(self.shape)} reads a tensor on the host")

        monkeypatch.setattr(torch.Tensor, name, refuse, raising=False)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = fw.nn.LayerNormLinear(64, 128)
        self.mlp = fw.nn.LayerNormMLP(128, 64, activation="swiglu", normalization="RMSNorm")
        self.last = fw.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mlp(self.first(x)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_reads_nothing(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(32, 64)
    for step in range(2):
        if step:  # tables of formats are made at the first
            forbid_reads(monkeypatch)
        with torch.autocast("cpu", torch.bfloat16), fw.autocast(recipe=RECIPES[recipe]):
            loss = net(x).float().square().mean()
        loss.backward()


def test_reads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_reads(monkeypatch)
    for read in (float, int, bool, torch.Tensor.item, torch.Tensor.tolist):
        with pytest.raises(AssertionError, match="reads a tensor"):
            read(torch.ones(()))
