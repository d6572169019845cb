"""Modules of fourwave.te that are given no device are on the GPU where there is one, and compute there what they do on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fourwave.te as te
from fourwave.te import recipe

BF16 = torch.bfloat16
MODULES: dict[str, Any] = {
    "linear": lambda **k: te.Linear(64, 96, **k),
    "layernorm_linear": lambda **k: te.LayerNormLinear(64, 96, normalization="RMSNorm", **k),
    "mlp": lambda **k: te.LayerNormMLP(64, 96, activation="swiglu", **k),
    "grouped": lambda **k: te.GroupedLinear(3, 64, 96, **k),
    "layernorm": lambda **k: te.LayerNorm(64, **k),
    "rmsnorm": lambda **k: te.RMSNorm(64, **k),
}
RECIPES: dict[str, Any] = {
    "none": None, "delayed": recipe.DelayedScaling(amax_history_len=2), "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}  # fmt: skip


def default_device() -> str:
    return te.modules._device(None) or "cpu"


@pytest.mark.each_device
@pytest.mark.parametrize("kind", MODULES)
def test_where_parameters_are(kind: str, request: pytest.FixtureRequest) -> None:
    asked = request.node.callspec.params["_te_device"]
    assert {p.device.type for p in MODULES[kind]().parameters()} == {asked}
    module = MODULES[kind](device="meta")
    module.reset_parameters()
    assert {p.device.type for p in module.parameters()} == {asked}
    assert {p.device.type for p in MODULES[kind](device="cpu").parameters()} == {"cpu"}


@pytest.mark.each_device
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "mlp", "grouped"])
def test_numbers_are_those_of_the_cpu(kind: str, name: str) -> None:
    """Of three steps, the last one with the weights that the second one quantized; to some codes that are rounded otherwise."""
    right, module = MODULES[kind](device="cpu", params_dtype=BF16), MODULES[kind](params_dtype=BF16)
    module.load_state_dict(right.state_dict())
    more = [[16, 0, 16]] * (kind == "grouped")
    for step in range(3):
        x, grad = (torch.randn(32, n, generator=torch.Generator().manual_seed(step + n)).to(BF16) for n in (64, 96))
        results = []
        for m in right, module:
            m.zero_grad()
            where = next(m.parameters()).device
            inp = x.detach().to(where).requires_grad_()
            with te.autocast(enabled=name != "none", recipe=RECIPES[name]):
                y = m(inp, *more, is_first_microbatch=step < 2)
            y.backward(grad[:, : y.shape[1]].to(where))
            assert y.device == where and inp.grad is not None
            results.append([y, inp.grad, *(p.grad for p in m.parameters())])
        for expected, got in zip(*results, strict=True):
            expected, got = expected.detach().double(), got.detach().cpu().double()
            assert (got - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.each_device
def test_a_checkpoint_draws_the_same_random_numbers_again() -> None:
    """From a stream of the tracker, which is the GPU's where there is one."""
    device = default_device()
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    linear = te.Linear(64, 64)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            kept = torch.rand(8, 64, device=device) < 0.5
        return linear(x * kept).square()

    y = te.checkpoint(run, x, get_rng_state_tracker=lambda: tracker)
    (got,) = torch.autograd.grad(y.sum(), x)
    tracker.reset()
    tracker.add("model-parallel-rng", 3)
    with tracker.fork():
        assert torch.equal(got != 0, torch.rand(8, 64, device=device) < 0.5)
