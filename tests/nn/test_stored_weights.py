"""Weights that exist in quantized form only: the same results as with a parameter, fewer bytes, and training with master weights."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes
RECIPES = {
    "current": R.CurrentScaling(), "blocks": R.BlockScaling(), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(),
    "mxfp4all": R.MXFP4("mxfp4"),
}  # fmt: skip
MODULES: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
    "Linear": (lambda: fnn.Linear(64, 128), ()),
    "LayerNormLinear": (lambda: fnn.LayerNormLinear(64, 96), ()),
    "LayerNormMLP": (lambda: fnn.LayerNormMLP(64, 96, activation="swiglu"), ()),
    "GroupedLinear": (lambda: fnn.GroupedLinear(2, 64, 128), (torch.tensor([4, 3]),)),
}
X = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))


def pairs(kind: str, recipe: Any, **kwargs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    plain = MODULES[kind][0]()
    stored = copy.deepcopy(plain)
    stored.store_quantized(recipe, **kwargs)
    return plain, stored, MODULES[kind][1]


def run(module: Any, recipe: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = X.clone().requires_grad_()
    with fw.autocast(recipe=recipe):
        y = module(x, *rest)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_results_are_those_of_the_parameter(kind: str, recipe: str) -> None:
    plain, stored, rest = pairs(kind, RECIPES[recipe], main_grad=True)
    weights = stored._weights
    assert not {n for n, _ in stored.named_parameters()} & set(weights)
    for _ in range(2):
        for a, b in zip(run(plain, RECIPES[recipe], *rest), run(stored, RECIPES[recipe], *rest), strict=True):
            assert torch.equal(a, b)
    for name in weights:
        torch.testing.assert_close(
            getattr(stored, f"{name}_main_grad"), getattr(plain, name).grad, rtol=1e-6, atol=1e-6
        )
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter.grad, dict(plain.named_parameters())[name].grad), name
    # Master weights: a step of their optimizer, quantized into the same buffers.
    addresses = {n: b.data_ptr() for n, b in stored.named_buffers()}
    for name in weights:
        master = getattr(plain, name)
        with torch.no_grad():
            master -= 0.5 * master.grad
        stored.set_weight(name, master)
    assert {n: b.data_ptr() for n, b in stored.named_buffers()} == addresses
    for a, b in zip(run(plain, RECIPES[recipe], *rest), run(stored, RECIPES[recipe], *rest), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("recipe", "full", "forward"), [
    ("current", 1.0, 1.0), ("blocks", 1.0, 1.0), ("mxfp8", 2.0625, 1.03125), ("mxfp4", 1.5625, 0.53125), ("mxfp4all", 1.0625, 0.53125),
])  # fmt: skip
def test_bytes_for_each_weight(recipe: str, full: float, forward: float) -> None:
    for dgrad, expected in ((True, full), (False, forward)):
        linear = fnn.Linear(512, 512, bias=False)
        linear.store_quantized(RECIPES[recipe], dgrad=dgrad)
        size = sum(t.nbytes for t in linear.state_dict().values())
        assert size / 512**2 == pytest.approx(expected, abs=1e-3)


def test_frozen_beside_an_adapter() -> None:
    """LoRA: the stored weight has no gradient, the input and the adapters have."""
    _, stored, _ = pairs("Linear", R.MXFP8())
    down, up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 128, bias=False)
    x = X.clone().requires_grad_()
    with fw.autocast(recipe=R.MXFP8()):
        y = stored(x) + up(down(x))
    y.sum().backward()
    assert x.grad is not None and up.weight.grad is not None and stored.bias.grad is not None
    with torch.no_grad(), fw.autocast(recipe=R.MXFP8()):
        assert not stored(X).requires_grad


def test_without_a_recipe_the_stored_values_are_multiplied() -> None:
    plain, stored, _ = pairs("Linear", R.MXFP8(), main_grad=True)
    with torch.no_grad():
        plain.weight.copy_(fw.quantize(plain.weight, "mxfp8_e4m3", scale_rule="ceil").dequantize())
    for a, b in zip(run(plain, R.Unquantized()), run(stored, R.Unquantized()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stored.weight_main_grad, plain.weight.grad, rtol=1e-5, atol=1e-5)
    other = pairs("Linear", R.MXFP8())[1]
    assert torch.equal(run(other, R.MXFP8(backward="high_precision"))[0], run(other, R.MXFP8())[0])


def test_saved_cast_and_copied() -> None:
    for recipe in RECIPES.values():
        _, stored, _ = pairs("LayerNormMLP", recipe)
        file = io.BytesIO()
        torch.save(stored.state_dict(), file)
        file.seek(0)
        _, other, _ = pairs("LayerNormMLP", recipe)
        for parameter in other.parameters():
            torch.nn.init.zeros_(parameter)
        for name in other._weights:
            other.set_weight(name, torch.zeros(other._stored[name].shape))
        other.load_state_dict(torch.load(file, weights_only=True))
        expected = run(stored, recipe)
        for module in (other, copy.deepcopy(stored)):
            for a, b in zip(run(module, recipe), expected, strict=True):
                assert torch.equal(a, b)
        types = {n: b.dtype for n, b in stored.named_buffers()}
        stored.to(torch.bfloat16)
        assert {n: b.dtype for n, b in stored.named_buffers()} == types
        assert stored.fc1_bias.dtype == torch.bfloat16


def test_what_does_not_fit_is_told() -> None:
    for recipe in (R.DelayedScaling(), R.Unquantized(), R.MXFP8(backward="high_precision")):
        with pytest.raises(ValueError, match="are stored in the formats"):
            fnn.Linear(64, 64).store_quantized(recipe)
    _, stored, _ = pairs("Linear", R.MXFP8())
    with pytest.raises(ValueError, match="the recipe in force wants"):
        run(stored, R.CurrentScaling())
    with pytest.raises(ValueError, match="already"):
        stored.store_quantized(R.MXFP8())
    with pytest.raises(ValueError, match="values are"):
        stored.set_weight("weight", torch.zeros(4, 4))
    with pytest.raises(ValueError, match="not stored"):
        fnn.Linear(4, 4).set_weight("weight", torch.zeros(4, 4))
    with pytest.raises(ValueError, match="last dimension must be 64"):
        stored(torch.zeros(2, 32))
    _, stored, _ = pairs("Linear", R.MXFP8(), dgrad=False)
    with torch.no_grad(), fw.autocast(recipe=R.MXFP8()):
        stored(X)
    with pytest.raises(ValueError, match="forward passes only"):
        run(stored, R.MXFP8())
