"""Delayed scaling over random steps, against a float64 model of Transformer Engine's kernel (common/recipe/delayed_scaling.cu)
that knows nothing of the modules: which scale each tensor is quantized with, what is recorded, and when histories move."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

import fourwave as fw
from fourwave import nn as fnn
from fourwave.nn import products

R = fw.recipes
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
INPUT, WEIGHT, GRAD = range(3)
# Two factors are rounded to float32, and the scale to the range that `fw.quantize` takes.
ROUNDING = 2.0**-23
RANGE = 2.0**-126, 2.0**126


class Kernel:
    """One tensor's history and `scale`, which is 1 / ours."""

    def __init__(self, recipe: Any, largest: float) -> None:
        self.most_recent = recipe.amax_compute_algo == "most_recent"
        self.scaled_max = largest * 2.0**-recipe.margin
        self.history = np.zeros(recipe.amax_history_len)
        self.scale = 1.0

    def record(self, amax: float) -> None:
        self.history[0] = np.fmax(self.history[0], amax)

    def update(self) -> None:
        last, amax = self.history[0], 0.0
        if last != 0:
            moved = np.append(self.history[1:], last)
            amax = float(np.fmax.reduce(moved))
            self.history[1:], self.history[0] = moved[1:], 0
        if self.most_recent:
            amax = float(last)
        if np.isfinite(amax) and amax > 0:
            self.scale = self.scaled_max / amax

    def check(self, used: float) -> None:
        expected = min(max(1 / self.scale, RANGE[0]), RANGE[1])
        assert abs(used - expected) <= ROUNDING * expected, (used, expected)


class Quantized:
    """Calls of fw.quantize that modules make: largest magnitude of the tensor, scale and format."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, float, str]] = []

    def take(self) -> list[tuple[float, float, str]]:
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> Quantized:
    spy, real = Quantized(), products.quantize

    def watched(t: torch.Tensor, name: str, *args: Any, **kwargs: Any) -> Any:
        spy.calls.append((float(np.abs(t.detach().double().numpy()).max()), float(kwargs["scale"]), name))
        return real(t, name, *args, **kwargs)

    monkeypatch.setattr(products, "quantize", watched)
    return spy


def plain(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return module(x)


def non_reentrant(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch_checkpoint.checkpoint(module, x, use_reentrant=False)
    return result


def reentrant(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch_checkpoint.checkpoint(module, x, use_reentrant=True)
    return result


# The last two keep the scales of the last forward pass only.
RUNS = plain, fnn.checkpoint, non_reentrant, reentrant


class Watched:
    """A module and the kernel's model of its tensors."""

    def __init__(self, module: Any, recipe: Any, spy: Quantized) -> None:
        self.module, self.spy = module, spy
        self.formats = "fp8_e4m3", "fp8_e4m3", "fp8_e5m2" if recipe.fp8_format == "hybrid" else "fp8_e4m3"
        self.kernels = [Kernel(recipe, LARGEST[self.formats[i % 3]]) for i in range(3 * module.linears)]
        self.seen_in: Any = None  # region of the last forward pass

    def look(
        self, calls: list[tuple[float, float, str]], slots: list[int], kernels: list[Kernel], record: bool
    ) -> None:
        assert len(calls) == len(slots)
        for (amax, scale, name), slot in zip(calls, slots, strict=True):
            assert name == self.formats[slot % 3]
            kernels[slot].check(scale)
            if record:
                self.kernels[slot].record(amax)

    def forward(
        self, run: Callable[..., torch.Tensor], x: torch.Tensor, region: object
    ) -> Callable[[torch.Tensor], None]:
        """Returns what runs the backward pass."""
        if self.seen_in is not region:
            self.seen_in = region
            for kernel in self.kernels:
                kernel.update()
        # Scales of the forward pass are those of its backward pass.
        before = [copy.copy(kernel) for kernel in self.kernels]
        forward = [3 * i + slot for i in range(self.module.linears) for slot in (INPUT, WEIGHT)]
        y = run(self.module, x)
        self.look(self.spy.take(), forward, before, True)

        def backward(g: torch.Tensor) -> None:
            y.backward(g)
            calls = self.spy.take()
            if run is not plain:
                self.look(calls[: len(forward)], forward, before, False)
                calls = calls[len(forward) :]
            self.look(calls, [3 * i + GRAD for i in reversed(range(self.module.linears))], before, True)

        return backward

    def check(self) -> None:
        history = self.module.delayed_amax_history
        if history is not None:
            expected = np.stack([kernel.history for kernel in self.kernels], 1).astype(np.float32)
            assert np.array_equal(history.numpy(), expected)
            for kernel, scale in zip(self.kernels, self.module.delayed_scale.tolist(), strict=True):
                kernel.check(scale)


def tensor(choose: random.Random, *shape: int) -> torch.Tensor:
    """Any magnitude; at times zeros, an Inf, a NaN, or next to nothing."""
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(choose.randrange(2**31)))
    t *= 2.0 ** choose.randint(-20, 20)
    kind = choose.choices(["plain", "zeros", "inf", "nan", "tiny"], [20, 2, 1, 1, 1])[0]
    if kind == "zeros":
        t.zero_()
    elif kind == "tiny":
        t *= 2.0**-120
    elif kind != "plain":
        t[choose.randrange(shape[0]), choose.randrange(shape[1])] = float(kind) * choose.choice((-1, 1))
    return t


@pytest.mark.parametrize("fp8_format", ["hybrid", "e4m3"])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, -1), (5, 3)])
def test_random_steps_follow_the_kernel(
    fp8_format: str, algo: str, length: int, margin: int, quantized: Quantized
) -> None:
    recipe = R.DelayedScaling(fp8_format, margin, length, algo)
    choose = random.Random(f"{fp8_format} {algo} {length}")
    torch.manual_seed(0)
    modules = [
        Watched(fnn.Linear(32, 48, bias=False), recipe, quantized),
        Watched(fnn.LayerNormMLP(32, 32, bias=False), recipe, quantized),
    ]
    for _ in range(14):
        for watched in modules:
            for parameter in watched.module.parameters():
                if parameter.dim() == 2 and choose.random() < 0.3:
                    with torch.no_grad():
                        parameter.copy_(tensor(choose, *parameter.shape))
        together = choose.random() < 0.3  # all forward passes first
        waiting: list[tuple[Watched, Callable[[torch.Tensor], None]]] = []

        def backward(watched: Watched, run: Callable[[torch.Tensor], None]) -> None:
            if choose.random() < 0.9:  # else a branch that the loss does not depend on
                run(tensor(choose, 8, 48 if watched is modules[0] else 32))

        for _ in range(choose.randint(1, 3)):  # microbatches
            region = object()
            with fw.autocast(recipe=recipe):
                made = []
                for watched in modules:
                    for _ in range(choose.choice((0, 1, 1, 2))):
                        run = choose.choice(RUNS[:2] if together else RUNS)
                        made.append((watched, watched.forward(run, tensor(choose, 8, 32).requires_grad_(), region)))
                        watched.check()
            waiting += made
            if not together:
                for each in reversed(waiting):
                    backward(*each)
                waiting.clear()
            if choose.random() < 0.3:
                with torch.no_grad(), fw.autocast(recipe=recipe):
                    modules[choose.randrange(2)].module(tensor(choose, 8, 32))
                quantized.take()
        for each in waiting:
            backward(*each)
        for watched in modules:
            watched.check()
    scales = [kernel.scale for watched in modules for kernel in watched.kernels]
    assert len(set(scales)) == 9 and 1.0 not in scales
