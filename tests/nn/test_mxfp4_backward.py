"""MXFP4(backward="mxfp4") with stochastic rounding and the Hadamard transform: which numbers are multiplied, and seeds."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import nn as fnn
from fourwave.nn import products
from fourwave.testing import bounds

R = fw.recipes
BOTH = R.MXFP4(backward="mxfp4", stochastic_rounding=True, hadamard=True)


def tensors(tokens: int, k: int = 64, n: int = 96) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    linear = fnn.Linear(k, n)
    scale = torch.exp2(torch.randint(-2, 3, (tokens, 1)).float())
    return linear, (torch.randn(tokens, k) * scale).requires_grad_(), torch.randn(tokens, n) * scale.flip(0)


def step(linear: Any, x: torch.Tensor, g: torch.Tensor, recipe: Any) -> tuple[torch.Tensor, torch.Tensor]:
    linear.zero_grad()
    x.grad = None
    with fw.autocast(recipe=recipe):
        y = linear(x)
    y.backward(g)
    assert x.grad is not None
    return x.grad.clone(), linear.weight.grad.clone()


@pytest.mark.parametrize("tokens", [48, 40])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("hadamard", [False, True])
def test_products_are_those_of_the_codes(tokens: int, stochastic: bool, hadamard: bool) -> None:
    """Every element, against float64 products of fw.quantize's numbers; 40 tokens are no multiple of 16: no transform."""
    linear, x, g = tensors(tokens)
    recipe = R.MXFP4(backward="mxfp4", stochastic_rounding=stochastic, hadamard=hadamard)
    fnn.prepare(linear, recipe)
    seed = linear.rounding_seed.clone() if stochastic else None
    dx, dw = step(linear, x, g, recipe)
    transform: dict[str, Any] = {"hadamard": "columnwise"} if hadamard and tokens % 16 == 0 else {}
    rounding: dict[str, Any] = {"rounding": "stochastic", "seed": seed, "scale_rule": "ceil"} if stochastic else {}
    gs = fw.quantize(g, "mxfp4", "both", **rounding, **transform)
    xs = fw.quantize(x.detach(), "mxfp4", "columnwise", **transform)
    ws = fw.quantize(linear.weight.detach(), "mxfp4", "columnwise")
    a, b = gs.dequantize(torch.float64, direction="rowwise"), ws.dequantize(torch.float64, direction="columnwise")
    bounds.assert_within(dx, a @ b, bounds.gemm_bound(a, b, torch.float32, trans_b=False))
    # As they are multiplied: of the transformed values, if so.
    a, b = (
        dataclasses.replace(q, column_hadamard=None).dequantize(torch.float64, direction="columnwise") for q in (gs, xs)
    )
    bounds.assert_within(dw, a.mT @ b, bounds.gemm_bound(a, b, torch.float32, trans_a=True, trans_b=False))
    plain = fw.quantize(x.detach(), "mxfp4", "columnwise").dequantize(torch.float64)
    assert torch.equal(plain, b) is not bool(transform)


def test_gradients_are_right_on_average() -> None:
    """The mean over many roundings is the product of the unrounded gradient, within 5 standard errors; to nearest it is not."""
    linear, x, g = tensors(32)
    g = g * 0 + 0.3  # between codes, the same everywhere: to nearest the error is the same everywhere, too
    g[:, 0] = 1.0
    fixed = R.MXFP4(backward="mxfp4")
    drawn = R.MXFP4(backward="mxfp4", stochastic_rounding=True)
    count = 120
    samples = torch.stack([step(linear, x, g, drawn)[0] for _ in range(count)]).double()
    w = fw.quantize(linear.weight.detach(), "mxfp4", "columnwise").dequantize(torch.float64)
    exact = g.double() @ w
    off = (samples.mean(0) - exact).abs()
    error = samples.std(0) / count**0.5
    assert (off <= 5 * error + 1e-6).all()
    nearest = (step(linear, x, g, fixed)[0].double() - exact).abs()
    assert float(nearest.mean()) > 3 * float(off.mean())


def test_seeds_are_each_modules_own_and_move_on() -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(fnn.Linear(32, 32), fnn.LayerNormMLP(32, 32))
    fnn.prepare(model, BOTH)
    modules: list[Any] = list(model)
    before = [int(m.rounding_seed) for m in modules]
    assert before[0] != before[1]
    assert not any("seed" in name for name in model.state_dict())
    with fw.autocast(recipe=BOTH):
        model(torch.randn(16, 32)).sum().backward()
    assert [int(m.rounding_seed) for m in modules] == [before[0] + 1, before[1] + 2]
    with torch.no_grad(), fw.autocast(recipe=BOTH):
        model(torch.randn(16, 32))
    assert [int(m.rounding_seed) for m in modules] == [before[0] + 1, before[1] + 2]
    half: Any = copy.deepcopy(model).half()
    assert half[0].rounding_seed.dtype == torch.int64 and torch.equal(half[0].rounding_seed, modules[0].rounding_seed)


def test_a_gradient_of_which_only_one_direction_is_needed_counts_once() -> None:
    linear, x, g = tensors(32)
    linear.weight.requires_grad_(False)
    fnn.prepare(linear, BOTH)
    before = int(linear.rounding_seed)
    with fw.autocast(recipe=BOTH):
        linear(x).backward(g)
    assert int(linear.rounding_seed) == before + 1


def test_checkpointing_changes_nothing() -> None:
    linear, x, g = tensors(32)
    fnn.prepare(linear, BOTH)
    twin = copy.deepcopy(linear)
    results = []
    for module, run in ((linear, lambda f, x: f(x)), (twin, fnn.checkpoint)):
        x.grad = None
        with fw.autocast(recipe=BOTH):
            y = run(module, x)
        y.backward(g)
        results.append((x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(linear.rounding_seed, twin.rounding_seed)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()
    linear, _, _ = tensors(32)
    with pytest.raises(RuntimeError, match="prepare"), fw.autocast(recipe=BOTH):
        torch.compile(linear, fullgraph=True, backend="eager")(torch.randn(4, 64))
    torch._dynamo.reset()
    fnn.prepare(linear, BOTH)
    twin = copy.deepcopy(linear)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (48, 64):
        _, x, g = tensors(tokens)
        y = x.detach().clone().requires_grad_()
        linear.zero_grad()
        twin.zero_grad()
        with fw.autocast(recipe=BOTH):
            linear(x).backward(g)
            compiled(y).backward(g)
        assert torch.equal(linear.weight.grad, twin.weight.grad)
        assert x.grad is not None and y.grad is not None and torch.equal(x.grad, y.grad)
        assert torch.equal(linear.rounding_seed, twin.rounding_seed)


def test_grouped_linear_rounds_without_the_transform() -> None:
    torch.manual_seed(0)
    module = fnn.GroupedLinear(2, 64, 64, bias=False)
    x, m_sizes = torch.randn(32, 64), torch.tensor([10, 22])
    fnn.prepare(module, BOTH)
    grads = []
    for _ in range(2):
        module.zero_grad()
        with fw.autocast(recipe=BOTH):
            module(x, m_sizes).square().sum().backward()
        assert module.weight.grad is not None
        grads.append(module.weight.grad.clone())
    assert not torch.equal(*grads)  # another seed
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=float(grads[0].abs().max()) / 3)


def test_what_does_not_go_together() -> None:
    for name in ("stochastic_rounding", "hadamard"):
        with pytest.raises(ValueError, match=rf"{name}=True with backward='mxfp8'"):
            R.MXFP4(**{name: True})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=name):
            R.MXFP4(backward="mxfp4", **{name: "yes"})  # type: ignore[arg-type]
    assert products.transforms(BOTH.plan, 32) and not products.transforms(BOTH.plan, 24)
