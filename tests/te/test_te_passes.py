"""backward_dw of fourwave.te: each call computes the weight gradients of one backward pass, the earliest that waits."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import fourwave.te as te
from fourwave import nn as fnn

pytestmark = pytest.mark.each_device

FC1, FC2 = "fc1_weight", "fc2_weight"
NAMES = (FC1, FC2)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """On the device of modules that are given none."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(te.modules._device(None) or "cpu")


def train(module: Any, trained: tuple[str, ...]) -> None:
    for name in NAMES:
        getattr(module, name).requires_grad_(name in trained)


def pair() -> tuple[Any, Any]:
    """A module that puts wgrad off and one that does not, with the same parameters."""
    torch.manual_seed(0)
    delayed, plain = te.LayerNormMLP(32, 48, delay_wgrad_compute=True), te.LayerNormMLP(32, 48)
    plain.load_state_dict(delayed.state_dict())
    return delayed, plain


def check(delayed: Any, plain: Any) -> None:
    for name in NAMES:
        got, expected = getattr(delayed, name).grad, getattr(plain, name).grad
        assert (got is None) == (expected is None), name
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def none_waits(module: Any) -> None:
    train(module, NAMES)
    with pytest.raises(RuntimeError, match="no backward pass waits"):
        module.backward_dw()


TRAINED = [(FC1,), (FC2,), NAMES]


@pytest.mark.parametrize("order", list(itertools.product(TRAINED, repeat=2)), ids=lambda o: "-".join(map("+".join, o)))
def test_passes_that_train_other_weights(order: tuple[tuple[str, ...], ...]) -> None:
    delayed, plain = pair()
    for seed, trained in enumerate(order):
        train(delayed, trained)
        delayed(randn(4, 32, seed=seed)).square().sum().backward()
    train(delayed, NAMES)
    for seed, trained in enumerate(order):
        delayed.backward_dw()
        train(plain, trained)
        plain(randn(4, 32, seed=seed)).square().sum().backward()
        check(delayed, plain)
    none_waits(delayed)


@pytest.mark.parametrize("trained", TRAINED, ids="+".join)
def test_a_kept_graph_makes_a_pass_each_time(trained: tuple[str, ...]) -> None:
    delayed, plain = pair()
    losses = []
    for module in delayed, plain:
        train(module, trained)
        losses.append([module(randn(4, 32, seed=seed)).square().sum() for seed in range(2)])
    order = (0, 1, 0, 1, 1)
    for seed in order:
        losses[0][seed].backward(retain_graph=True)
    for seed in order:
        delayed.backward_dw()
        losses[1][seed].backward(retain_graph=True)
        check(delayed, plain)
    none_waits(delayed)


ONE_WEIGHT: dict[str, Any] = {
    "linear": lambda **k: te.Linear(32, 32, **k),
    "layernorm_linear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "grouped": lambda **k: te.GroupedLinear(2, 32, 32, **k),
}


@pytest.mark.parametrize("kind", ONE_WEIGHT)
def test_modules_of_one_weight(kind: str) -> None:
    torch.manual_seed(0)
    delayed, plain = ONE_WEIGHT[kind](delay_wgrad_compute=True), ONE_WEIGHT[kind]()
    plain.load_state_dict(delayed.state_dict())
    sizes = [[1, 3]] * (kind == "grouped")
    losses = [
        [module(randn(4, 32, seed=seed), *sizes).square().sum() for seed in range(2)] for module in (delayed, plain)
    ]
    order = (1, 0, 1)
    for seed in order:
        losses[0][seed].backward(retain_graph=True)
    for seed in order:
        delayed.backward_dw()
        losses[1][seed].backward(retain_graph=True)
        for (name, p), (_, q) in zip(delayed.named_parameters(), plain.named_parameters(), strict=True):
            if name.startswith("weight"):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="no backward pass waits"):
        delayed.backward_dw()


def direct(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def reentrant(module: Any, x: torch.Tensor) -> torch.Tensor:
    result = torch.utils.checkpoint.checkpoint(module, x.requires_grad_(), use_reentrant=True)
    assert isinstance(result, torch.Tensor)
    return result


def again(module: Any, x: torch.Tensor) -> torch.Tensor:
    result = fnn.checkpoint(module, x)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("run", [direct, reentrant, again])
def test_forward_passes_of_one_backward_pass(run: Any) -> None:
    """Layers that share a module, or a loss of several microbatches: autograd goes through the last one first."""
    delayed, plain = pair()
    h = run(delayed, randn(4, 32))
    (run(delayed, h).square().sum() + run(delayed, randn(6, 32, seed=1)).sum()).backward()
    last, h = randn(6, 32, seed=1), plain(randn(4, 32)).detach().requires_grad_()
    plain(last).sum().backward()
    delayed.backward_dw()
    check(delayed, plain)
    plain(h).square().sum().backward()
    delayed.backward_dw()
    check(delayed, plain)
    plain(randn(4, 32)).backward(h.grad)
    delayed.backward_dw()
    check(delayed, plain)
    none_waits(delayed)


def test_what_comes_after_a_call_within_the_pass_is_not_lost() -> None:
    delayed, plain = pair()
    # Runs between the products of the two weights.
    delayed.fc2_bias.register_post_accumulate_grad_hook(lambda _: calls.append(delayed.backward_dw()))
    calls: list[None] = []
    for module in delayed, plain:
        module(randn(4, 32)).square().sum().backward()
    assert len(calls) == 1 and delayed.fc2_weight.grad is not None and delayed.fc1_weight.grad is None
    delayed.backward_dw()
    check(delayed, plain)
    none_waits(delayed)


def mlp(x: torch.Tensor) -> Any:
    module = te.LayerNormMLP(32, 48, delay_wgrad_compute=True)
    module(x * 2).sum().backward()
    return module


def grouped(x: torch.Tensor) -> Any:
    module = te.GroupedLinear(2, 32, 48, delay_wgrad_compute=True)
    module(x * 2, [1, 3]).sum().backward()
    return module


@pytest.mark.parametrize("make", [mlp, grouped])
def test_what_waits_dies_with_its_module(make: Any) -> None:
    """Neither the graph of the forward pass is kept with it, nor does a cycle keep it until the garbage collector comes by."""
    gc.collect()
    gc.disable()
    try:
        module = make(randn(4, 32).requires_grad_())
        waiting = [wgrad.x for _, wgrad in module._delayed[0].products]
        assert waiting and all(x.grad_fn is None and not x.requires_grad for x in waiting)
        kept = [weakref.ref(x) for x in waiting]
        del module, waiting
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()
