"""On a CUDA or ROCm GPU: modules against the CPU, a training step in a CUDA graph, memory that stays flat, no host reads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import nn as fnn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

R = fw.recipes
RECIPES = {
    "unquantized": R.Unquantized(), "delayed": R.DelayedScaling(amax_history_len=4), "current": R.CurrentScaling(),
    "blocks": R.BlockScaling(), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(),
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = fnn.LayerNormLinear(128, 256, normalization="RMSNorm")
        self.mlp = fnn.LayerNormMLP(256, 256, activation="swiglu")
        self.last = fnn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mlp(self.first(x)))


def data(step: int) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(step))


def train_step(net: torch.nn.Module, x: torch.Tensor, recipe: Any, lr: float = 0.05) -> torch.Tensor:
    """Forward, backward and SGD in place, all on the device."""
    with torch.autocast(x.device.type, torch.bfloat16), fw.autocast(recipe=recipe):
        loss = net(x).float().square().mean()
    for parameter, grad in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
        with torch.no_grad():
            parameter.sub_(grad, alpha=lr)
    return loss.detach()


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_the_cpu(recipe: str) -> None:
    torch.manual_seed(0)
    nets: list[Any] = [Net()]
    nets.append(copy.deepcopy(nets[0]).cuda())
    losses = [
        [float(train_step(net, data(i).to(d), RECIPES[recipe])) for i in range(4)]
        for net, d in zip(nets, ("cpu", "cuda"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_reads_nothing_on_the_host(recipe: str) -> None:
    net = Net().cuda()
    x = data(0).cuda()
    train_step(net, x, RECIPES[recipe])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(net, x, RECIPES[recipe])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_training_step_is_the_eager_one(recipe: str) -> None:
    torch.manual_seed(0)
    eager = Net().cuda()
    captured = copy.deepcopy(eager)
    x = data(0).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step(captured, x, RECIPES[recipe])
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(2):
        train_step(eager, x, RECIPES[recipe])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step(captured, x, RECIPES[recipe])
    for step in range(1, 5):  # the weights change from replay to replay
        x.copy_(data(step))
        graph.replay()
        right = train_step(eager, x, RECIPES[recipe])
        assert torch.equal(loss, right), step
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, captured.state_dict()[name]), name


def test_evaluation_sees_what_a_captured_step_recorded() -> None:
    """A replay moves no version counter, by which evaluation keeps scales."""
    torch.manual_seed(0)
    recipe = RECIPES["delayed"]
    net, x = Net().cuda(), data(0).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            train_step(net, x, recipe)
    torch.cuda.current_stream().wait_stream(stream)

    y = data(9).cuda()

    def evaluated(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad(), fw.autocast(recipe=recipe):
            return module(y)

    evaluated(net)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(net, x, recipe)
    before = evaluated(net)
    evaluation = torch.cuda.CUDAGraph()
    with torch.cuda.graph(evaluation):
        captured = evaluated(net)
    for step in range(1, 4):
        x.copy_(data(step) * 4**step)
        graph.replay()
        right = evaluated(copy.deepcopy(net))
        assert torch.equal(evaluated(net), right) and not torch.equal(right, before), step
        evaluation.replay()
        assert torch.equal(captured, right), step


@pytest.mark.parametrize("recipe", RECIPES)
def test_peak_memory_is_flat(recipe: str) -> None:
    net = Net().cuda()
    peaks = []
    for step in range(10):
        torch.cuda.reset_peak_memory_stats()
        train_step(net, data(step).cuda(), RECIPES[recipe])
        peaks.append(torch.cuda.max_memory_allocated())
    # Which thread frees a tensor last differs from step to step, so the peak may have two levels.
    assert max(peaks[5:]) <= max(peaks[:5]), peaks
