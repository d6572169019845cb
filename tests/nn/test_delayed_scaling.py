"""Delayed scaling: scales and histories over steps, whatever else happens between and within them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import fourwave as fw
from fourwave import nn as fnn
from fourwave.nn import base

R = fw.recipes
FMAX = {"hybrid": (448.0, 448.0, 57344.0), "e4m3": (448.0, 448.0, 448.0)}


def data(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * 2.0 ** (seed % 5)


class Expected:
    """The rule of Transformer Engine (its kernel in common/recipe/delayed_scaling.cu), with value = code * scale: a tensor whose amax
    is 0 in a step, as that of one that was not seen, keeps its scale and its history."""

    def __init__(self, recipe: Any, largest: tuple[float, ...]) -> None:
        self.recipe, self.largest = recipe, largest
        self.scale = [1.0] * 3
        self.history = [[0.0] * 3 for _ in range(recipe.amax_history_len)]

    def update(self) -> None:
        for i, top in enumerate(self.largest):
            column = [row[i] for row in self.history]
            if column[0] == 0:
                continue
            amax = max(column) if self.recipe.amax_compute_algo == "max" else column[0]
            if 0 < amax < float("inf"):
                self.scale[i] = amax / top * 2.0**self.recipe.margin
            column = [0.0, *column[2:], column[0]] if len(column) > 1 else [0.0]
            for row, value in zip(self.history, column, strict=True):
                row[i] = value

    def record(self, *tensors: torch.Tensor) -> None:
        for i, t in enumerate(tensors):
            self.history[0][i] = max(self.history[0][i], float(t.detach().abs().max()))


@pytest.mark.parametrize("fp8_format", FMAX)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (3, 1), (8, 0)])
def test_scales_follow_the_rule(fp8_format: str, algo: str, length: int, margin: int) -> None:
    recipe = R.DelayedScaling(fp8_format, margin, length, algo)
    linear = fnn.Linear(32, 64)
    expected = Expected(recipe, FMAX[fp8_format])
    for step in range(8):
        x, g = data(step, 5, 32), data(step + 3, 5, 64)
        if step == 3:
            x = torch.zeros_like(x)
        with fw.autocast(recipe=recipe):
            y = linear(x.requires_grad_())
        expected.update() if step else None
        if step == 5:  # no backward pass: dy keeps what it has
            g = torch.zeros_like(g)
        else:
            y.backward(g)
        expected.record(x, linear.weight, g)
        scale, history = linear.delayed_scale, linear.delayed_amax_history
        assert scale is not None and history is not None
        torch.testing.assert_close(scale, torch.tensor(expected.scale), rtol=2**-22, atol=0)
        assert torch.equal(history, torch.tensor(expected.history)), step


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_step_with_nan_is_as_if_it_had_seen_nothing(algo: str) -> None:
    """Of the tensors that hold NaN: one step that GradScaler skips must not freeze a scale while the history remembers it."""
    scales = []
    for bad in (True, False):
        linear = fnn.Linear(32, 32)
        with torch.no_grad():
            linear.weight.fill_(0.5)
        for step in range(4):
            x = data(step, 4, 32)
            if step == 1:
                x = torch.full_like(x, torch.nan) if bad else torch.zeros_like(x)
            with fw.autocast(recipe=R.DelayedScaling(amax_history_len=8, amax_compute_algo=algo)):
                y = linear(x.requires_grad_())
            y.backward(torch.ones_like(y))
        assert linear.delayed_scale is not None and linear.delayed_amax_history is not None
        assert linear.delayed_amax_history.isfinite().all()
        scales.append(linear.delayed_scale)
    assert torch.equal(*scales) and float(scales[0][0]) == pytest.approx(float(data(2, 4, 32).abs().max()) / 448)


def test_amax_that_is_not_finite_keeps_the_scale() -> None:
    recipe = R.DelayedScaling(amax_history_len=2)
    linear = fnn.Linear(32, 32)
    before = None
    for step in range(3):
        x = data(step, 4, 32)
        if step == 1:
            x[0, 0] = float("inf")
        with fw.autocast(recipe=recipe):
            linear(x.requires_grad_()).sum().backward()
        assert linear.delayed_scale is not None
        if step == 1:
            before = linear.delayed_scale[0].clone()
    assert before is not None and linear.delayed_scale is not None
    assert torch.equal(linear.delayed_scale[0], before) and float(before) != 1.0


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_what_a_step_does_not_see_keeps_its_scale(algo: str) -> None:
    """Although rows of the history that are smaller than the one that made the scale are still there."""
    recipe = R.DelayedScaling(amax_history_len=3, amax_compute_algo=algo)
    linear = fnn.Linear(32, 32)
    for amax in (8.0, 1.0, 1.0, 0.0, 0.0):
        with fw.autocast(recipe=recipe):
            linear(torch.full((4, 32), amax, requires_grad=True)).sum().backward()
    assert linear.delayed_scale is not None
    assert float(linear.delayed_scale[0]) == pytest.approx((8.0 if algo == "max" else 1.0) / 448, rel=1e-6)


@pytest.mark.parametrize("given", [0.0, float("inf"), float("nan")])
def test_amax_of_a_function_that_is_no_amax_keeps_the_scale(given: float) -> None:
    amax = [4.48, given]
    recipe = R.DelayedScaling(amax_history_len=2, amax_compute_algo=lambda h: torch.full_like(h[0], amax[0]))
    linear = fnn.Linear(32, 32)
    for step in range(3):
        with fw.autocast(recipe=recipe):
            linear(data(step, 4, 32).requires_grad_()).sum().backward()
        if step == 1:
            amax.pop(0)
    assert linear.delayed_scale is not None
    torch.testing.assert_close(linear.delayed_scale, torch.tensor([4.48 / 448, 4.48 / 448, 4.48 / 57344]))


def test_functions_of_the_recipe_are_called() -> None:
    def amax(history: torch.Tensor) -> torch.Tensor:
        return history.mean(0)

    def scale(amax: torch.Tensor, old: torch.Tensor, largest: torch.Tensor, recipe: Any) -> torch.Tensor:
        assert largest.tolist() == [448, 448, 57344] and recipe.margin == 2
        return amax * 3

    recipe = R.DelayedScaling(margin=2, amax_history_len=2, amax_compute_algo=amax, scaling_factor_compute_algo=scale)
    linear = fnn.Linear(32, 32)
    for step in range(2):
        x = data(step, 4, 32)
        with fw.autocast(recipe=recipe):
            linear(x.requires_grad_()).sum().backward()
    assert linear.delayed_scale is not None
    assert torch.equal(linear.delayed_scale[0], data(0, 4, 32).abs().max() / 2 * 3)


class Net(torch.nn.Module):
    """Two blocks and a head, each of which may run through `run`; `branch` is used in every third step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList([fnn.LayerNormMLP(32, 64, activation="swiglu") for _ in range(2)])
        self.head = fnn.LayerNormLinear(32, 32)
        self.branch = fnn.Linear(32, 32)

    def forward(self, x: torch.Tensor, run: Callable[..., torch.Tensor], step: int) -> torch.Tensor:
        for block in self.blocks:
            x = x + run(block, x)
        if step % 3 == 2:
            x = x + run(self.branch, x)
        return self.head(x)


def plain(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return function(x)


def state(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in net.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def train(
    run: Callable[..., torch.Tensor] = plain,
    *,
    steps: int = 20,
    forwards: int = 1,
    between: Callable[[Net], None] = lambda net: None,
    inside: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights, scales and histories after some steps of SGD; `forwards` forward passes come before each backward pass."""
    recipe = R.DelayedScaling(amax_history_len=4)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        losses = []
        for i in range(forwards):
            region = fw.autocast(recipe=recipe)
            with region:
                y = net(data(step * forwards + i, 6, 32).requires_grad_(), run, step)
                losses.append(y.square().mean())
                if inside:
                    losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        between(net)
    return state(net)


def non_reentrant(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result = torch_checkpoint.checkpoint(function, x, use_reentrant=False)
    assert isinstance(result, torch.Tensor)
    return result


def reentrant(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result = torch_checkpoint.checkpoint(function, x, use_reentrant=True)
    assert isinstance(result, torch.Tensor)
    return result


CHECKPOINTS = {"fourwave": fnn.checkpoint, "non-reentrant": non_reentrant, "reentrant": reentrant}


@pytest.fixture(scope="module")
def without() -> dict[str, torch.Tensor]:
    return train()


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_20_steps_with_checkpointing_are_those_without(
    kind: str, inside: bool, without: dict[str, torch.Tensor]
) -> None:
    assert float(without["branch.delayed_amax_history"].abs().sum()) > 0
    same(train(CHECKPOINTS[kind], inside=inside), without)


def test_checkpoint_keeps_scales_over_several_forward_passes() -> None:
    same(train(fnn.checkpoint, steps=6, forwards=3), train(steps=6, forwards=3))


@pytest.mark.parametrize("twice", [False, True], ids=["several forward passes", "a module called twice"])
def test_checkpoint_keeps_scales_of_a_modules_own_recipe(twice: bool) -> None:
    results = []
    for run in (plain, fnn.checkpoint):
        torch.manual_seed(0)
        linear = fnn.Linear(32, 32, recipe=R.DelayedScaling(amax_history_len=4))
        for step in range(3):
            y = torch.zeros(())
            for i in range(3):
                x = (data(step * 3 + i, 6, 32) * 4**i).requires_grad_()
                y = y + (run(linear, run(linear, x) * 8) if twice else run(linear, x)).square().sum()
            y.backward()
        assert linear.weight.grad is not None
        results.append({**state(linear), "grad": linear.weight.grad})
    same(*results)


def test_checkpoint_outside_of_regions_computes_again_without_quantization() -> None:
    """Although the module was called in a region in between."""
    grads = []
    for run in (plain, fnn.checkpoint):
        torch.manual_seed(0)
        linear = fnn.Linear(32, 32)
        x = data(0, 6, 32).requires_grad_()
        y = run(linear, x)
        with fw.autocast(recipe=R.MXFP8()):
            linear(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, linear.weight]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_checkpoint_without_a_region_and_with_a_kept_graph() -> None:
    linear = fnn.Linear(32, 32)
    x = data(0, 4, 32).requires_grad_()
    y = fnn.checkpoint(linear, x)
    assert torch.equal(y, linear(x))
    with fw.autocast(recipe=R.DelayedScaling(amax_history_len=2)):
        y = fnn.checkpoint(linear, x)
    first = torch.autograd.grad(y.sum(), linear.weight, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y.sum(), linear.weight)[0])
    with pytest.raises(ValueError, match="use_reentrant"):
        fnn.checkpoint(linear, x, use_reentrant=True)


def twice_checkpointed(outer: str, inner: str, forwards: int, steps: int = 3) -> list[torch.Tensor]:
    """Scales and gradients where what is checkpointed checkpoints a part of itself; plain: neither."""
    torch.manual_seed(0)
    layers = [fnn.Linear(32, 32) for _ in range(3)]

    def function(x: torch.Tensor) -> torch.Tensor:
        run = CHECKPOINTS.get(inner, plain)
        x = layers[1](run(layers[0], x).tanh())
        return layers[1](run(lambda x: layers[2](layers[0](x).tanh()), x) * 2)

    found: list[torch.Tensor] = []
    for step in range(steps):
        losses, xs = [], []
        for i in range(forwards):
            xs.append((data(step * forwards + i, 6, 32) * 8**i).requires_grad_())
            with fw.autocast(recipe=R.DelayedScaling(amax_history_len=4)):
                losses.append(CHECKPOINTS.get(outer, plain)(function, xs[-1]).square().sum())
        torch.stack(losses).sum().backward()
        found += [x.grad for x in xs if x.grad is not None]
        for layer in layers:
            assert layer.weight.grad is not None and layer.delayed_scale is not None
            found += [layer.weight.grad, layer.delayed_scale.clone()]
            layer.zero_grad()  # sums over steps would be of another order where parts of a backward pass add to them
    return found


@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", CHECKPOINTS)
def test_a_checkpoint_within_a_checkpoint(outer: str, inner: str) -> None:
    for a, b in zip(twice_checkpointed(outer, inner, 1), twice_checkpointed("plain", "plain", 1), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_within_a_checkpoint_keeps_scales_over_several_forward_passes() -> None:
    found = twice_checkpointed("fourwave", "fourwave", 3)
    for a, b in zip(found, twice_checkpointed("plain", "plain", 3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
def test_a_module_that_was_checkpointed_goes_at_once(own: bool) -> None:
    """It has no circle for the collector of garbage, which each rank runs at its own time: until then it would be reduced."""
    recipe = R.DelayedScaling(amax_history_len=4)

    def gone() -> bool:
        module = fnn.Linear(32, 32, recipe=recipe if own else None)
        known = weakref.ref(module)
        with contextlib.nullcontext() if own else fw.autocast(recipe=recipe):
            y = fnn.checkpoint(module, data(0, 4, 32).requires_grad_())
        y.sum().backward()
        del module, y
        return known() is None

    gc.disable()
    try:
        gone()  # PyTorch's first checkpoint keeps a frame
        assert gone()
    finally:
        gc.enable()


@pytest.mark.parametrize("inputs", [False, True], ids=["inputs without gradient", "inputs with gradient"])
def test_evaluation_through_a_reentrant_checkpoint_changes_nothing(inputs: bool) -> None:
    """No gradients in its first run, as in training: but nothing will run again."""
    net = Net()
    recipe = R.DelayedScaling(amax_history_len=4)
    for step in range(2):
        with fw.autocast(recipe=recipe):
            net(data(step, 6, 32).requires_grad_(), reentrant, 2).square().mean().backward()
    before = state(net)
    x = (data(9, 6, 32) * 1000).requires_grad_(inputs)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, fw.autocast(recipe=recipe), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that inputs have no gradient
            y = net(x, reentrant, 2)
            assert torch.equal(y, net(x, plain, 2))
            reentrant(lambda x: net(x, reentrant, 2), x)
    same(state(net), before)


def checkpoint_of_torch_2_11(function: Any, *args: Any, use_reentrant: bool, context_fn: Any, **kwargs: Any) -> Any:
    """The part that matters: an exception of `function` is not thrown into the generator, which its traceback keeps."""

    def generator() -> Any:
        first, _ = context_fn()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, hook), first:
            yield

    def hook(_: Any) -> Any:
        raise AssertionError("a hook of a checkpoint that failed")

    gen = generator()
    next(gen)
    result = function(*args, **kwargs)
    with pytest.raises(StopIteration):
        next(gen)
    return result


@pytest.mark.parametrize("torch_is", ["installed", "2.11"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_exception_in_a_checkpoint_leaves_nothing_behind(
    torch_is: str, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a batch that does not fit and is tried again smaller: no region stays, in which all that follows would be quantized
    and of one step, and no hook of saved tensors."""
    if torch_is == "2.11":
        monkeypatch.setattr(torch_checkpoint, "checkpoint", checkpoint_of_torch_2_11)
    linear = fnn.Linear(32, 32)
    x = data(0, 4, 32)

    def fails(x: torch.Tensor) -> torch.Tensor:
        linear(x).square()
        raise MemoryError("too large")

    run = (lambda x: fnn.checkpoint(fails, x)) if nested else fails
    recipe = R.DelayedScaling(amax_history_len=4)
    with pytest.raises(MemoryError, match="too large") as kept, fw.autocast(recipe=recipe):
        fnn.checkpoint(run, x)
    assert fnn.context.entered() is None and not fnn.context.quantizes()
    assert fnn.context._KEEPS_SCALES.get() is None
    linear(x).square().sum().backward()
    assert linear.weight.grad is not None
    scales = []
    for step in range(3):
        with fw.autocast(recipe=recipe):
            linear(data(step, 4, 32)).sum().backward()
        assert linear.delayed_scale is not None
        scales.append(linear.delayed_scale[0].item())
    assert len(set(scales)) > 1
    del kept


def evaluate(net: Net) -> None:
    before = state(net)
    for length in (4, 1, 9):
        with torch.no_grad(), fw.autocast(recipe=R.DelayedScaling(amax_history_len=length)):
            net(data(99, 6, 32) * 1000, plain, 2)
    with torch.no_grad(), fw.autocast(recipe=R.MXFP8()):
        net(data(98, 6, 32), plain, 2)
    with torch.no_grad():
        net(data(97, 6, 32), plain, 2)
    after = state(net)
    same({n: t for n, t in after.items() if n in before}, before)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_evaluation_with_another_length_cuts_or_pads_what_it_reads(length: int) -> None:
    trained = fnn.Linear(32, 32, bias=False)
    for step in (4, 3, 0):  # the largest is the oldest
        with fw.autocast(recipe=R.DelayedScaling(amax_history_len=4)):
            trained(data(step, 6, 32).requires_grad_()).sum().backward()
    cut = fnn.prepare(copy.deepcopy(trained), R.DelayedScaling(amax_history_len=length))
    before = state(trained)
    with torch.no_grad(), fw.autocast(recipe=R.DelayedScaling(amax_history_len=length)):
        y = trained(data(9, 6, 32))
        assert torch.equal(y, cut(data(9, 6, 32)))
    with torch.no_grad(), fw.autocast(recipe=R.DelayedScaling(amax_history_len=4)):
        assert torch.equal(y, trained(data(9, 6, 32))) == (length == 9)
    same(state(trained), before)


@pytest.mark.parametrize("how", ["eager", "compiled", "loaded", "calibrated", "calibrated without gradients"])
def test_evaluation_knows_the_last_step(how: str) -> None:
    """One step, then evaluation: scales are those that the next step will have, and nothing is written."""
    recipe = R.DelayedScaling(amax_history_len=3)
    linear: Any = fnn.prepare(fnn.Linear(32, 32, bias=False), recipe)
    with torch.no_grad():
        linear.weight.fill_(2.0**-8)
    x = data(4, 8, 32)
    calibrates = how.startswith("calibrated")
    with fw.autocast(enabled=not calibrates, recipe=recipe, calibrating=calibrates):
        with torch.no_grad() if how.endswith("without gradients") else torch.enable_grad():
            linear(x)
    if how == "loaded":
        fresh: Any = fnn.Linear(32, 32, bias=False)
        fresh.load_state_dict(linear.state_dict())
        linear = fresh
    run = torch.compile(linear, backend="eager", fullgraph=True) if how == "compiled" else linear
    before = state(linear)
    with torch.no_grad(), fw.autocast(recipe=recipe):
        y = run(x)
    same(state(linear), before)
    assert linear.delayed_scale.tolist() == [1, 1, 1]
    q = [
        fw.quantize(t.detach(), "fp8_e4m3", scale=(t.detach().abs().max() * (1.0 / 448)).float(), backend="native")
        for t in (x, linear.weight)
    ]
    assert torch.equal(y, fw.gemm(*q, out_dtype=torch.float32, backend="native"))


KEPT = R.DelayedScaling(amax_history_len=3)


def evaluated(module: Any, recipe: Any = KEPT) -> torch.Tensor:
    with torch.no_grad(), fw.autocast(recipe=recipe):
        return module(data(3, 7, 32))


def training_step(module: Any, seed: int) -> None:
    with fw.autocast(recipe=KEPT):
        module(data(seed, 5, 32) * 8).square().sum().backward()


def other_state() -> dict[str, torch.Tensor]:
    module = fnn.Linear(32, 32, recipe=KEPT)
    training_step(module, 1)
    return module.state_dict()


def set_data(module: Any) -> None:
    module.delayed_amax_history.data = module.delayed_amax_history * 7


def unseen(module: Any) -> None:
    module.delayed_amax_history.data.mul_(7)
    module.delayed_recorded()


def compiled_step(module: Any) -> None:
    torch._dynamo.reset()
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    with fw.autocast(recipe=KEPT):
        run(data(4, 5, 32) * 8)


def captured_step(module: Any) -> None:
    """The replay of a CUDA graph, which moves no version counter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_capturing", lambda device: True)
        training_step(module, 4)
    evaluated(module)
    module.delayed_amax_history.data.mul_(7)


@torch.inference_mode()
def written_in_inference_mode(module: Any) -> None:
    module.delayed_amax_history.mul_(7)


def loaded_in_inference_mode(module: Any) -> None:
    loaded = other_state()
    with torch.inference_mode():
        module.load_state_dict(loaded)


WRITERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda module: training_step(module, 4),
    "compiled step": compiled_step,
    "captured step": captured_step,
    "load": lambda module: module.load_state_dict(other_state()),
    "load, assign": lambda module: module.load_state_dict(other_state(), assign=True),
    "load, inference mode": loaded_in_inference_mode,
    "reset": lambda module: module._reset_state(),
    "history": lambda module: module.delayed_amax_history.mul_(7),
    "history, inference mode": written_in_inference_mode,
    "data": set_data,
    "unseen": unseen,
    "detached": lambda module: module.delayed_amax_history.detach().mul_(7),
    "other tensor": lambda module: setattr(module, "delayed_amax_history", module.delayed_amax_history * 7),
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "float64 and back": lambda module: (module.double().float(), module.delayed_amax_history.mul_(7)),
}  # fmt: skip


@pytest.mark.parametrize("how", WRITERS)
def test_scales_that_evaluation_keeps_are_never_stale(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    original: Any = fnn.Linear._next_scale

    def counted(*args: Any) -> torch.Tensor:
        made.append(args)
        return original(*args)

    monkeypatch.setattr(fnn.Linear, "_next_scale", counted)
    torch.manual_seed(0)
    module: Any = fnn.Linear(32, 32)
    with torch.no_grad():
        module.weight.copy_(data(7, 32, 32) / 100)
    training_step(module, 0)
    training_step(module, 2)
    made.clear()
    before = [evaluated(module) for _ in range(3)]
    assert len(made) == 1 and torch.equal(before[0], before[2])  # kept, over regions
    with torch.inference_mode():
        assert torch.equal(evaluated(module), before[0]) and len(made) == 1
    WRITERS[how](module)
    after, again = evaluated(module), evaluated(module)
    assert torch.equal(after, again) and torch.equal(after, evaluated(copy.deepcopy(module)))
    assert not torch.equal(after, before[0])
    training_step(module, 0)  # what is kept is no inference tensor
    assert torch.equal(evaluated(module), evaluated(copy.deepcopy(module)))


def test_scales_that_evaluation_keeps_belong_to_a_recipe() -> None:
    module: Any = fnn.Linear(32, 32)
    training_step(module, 0)
    training_step(module, 1)
    for margin in (0, 1, 0):
        for algo in ("max", "most_recent"):
            recipe = R.DelayedScaling(margin=margin, amax_history_len=3, amax_compute_algo=algo)
            assert torch.equal(evaluated(module, recipe), evaluated(copy.deepcopy(module), recipe))
            assert float(module._evaluated.scales[0, 0]) == pytest.approx(
                2.0**margin
                / 448
                * float((module.delayed_amax_history.amax(0) if algo == "max" else module.delayed_amax_history[0])[0])
            )


def test_next_scales_take_few_operators() -> None:
    class Count(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    module: Any = fnn.Linear(32, 32)
    training_step(module, 0)
    with Count() as mode:
        module._next_scale(KEPT.plan, False)
    assert 5 < mode.count <= 20, mode.count


def test_evaluation_between_steps_changes_nothing(without: dict[str, torch.Tensor]) -> None:
    same(train(between=evaluate), without)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_evaluation_between_forward_and_backward(kind: str, without: dict[str, torch.Tensor]) -> None:
    """Under another recipe: the recomputation does not take it."""
    recipe = R.DelayedScaling(amax_history_len=4)
    results = []
    for run in (plain, CHECKPOINTS[kind]):
        net = Net()
        with fw.autocast(recipe=recipe):
            loss = net(data(1, 6, 32).requires_grad_(), run, 2).square().mean()
        with torch.no_grad(), fw.autocast(recipe=R.MXFP8()):
            net(data(2, 6, 32), plain, 2)
        loss.backward()
        results.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None} | state(net))
    same(*results)


def test_a_module_called_twice_records_the_larger() -> None:
    recipe = R.DelayedScaling(amax_history_len=3)
    linear = fnn.Linear(32, 32)
    small, large = data(0, 4, 32).requires_grad_(), (100 * data(1, 4, 32)).requires_grad_()
    with fw.autocast(recipe=recipe):
        (linear(large) + linear(small)).sum().backward()
    assert linear.delayed_amax_history is not None
    assert float(linear.delayed_amax_history[0, 0]) == float(large.abs().max())
    assert int((linear.delayed_amax_history != 0).any(1).sum()) == 1


def test_regions_nest() -> None:
    linear, x = fnn.Linear(32, 32), data(0, 4, 32)
    plain_y = linear(x)
    with fw.autocast(recipe=R.MXFP8()):
        mx = linear(x)
        with fw.autocast(enabled=False):
            assert torch.equal(linear(x), plain_y)
            with fw.autocast(recipe=R.MXFP4()):
                fp4 = linear(x)
        assert torch.equal(linear(x), mx)
    assert torch.equal(linear(x), plain_y)
    assert not torch.equal(mx, plain_y) and not torch.equal(fp4, mx)
    with pytest.raises(KeyError), fw.autocast(recipe=R.MXFP8()):
        raise KeyError("left by an error")
    assert torch.equal(linear(x), plain_y)
    same_region = fw.autocast(recipe=R.MXFP8())
    for _ in range(2):
        with same_region, same_region:
            assert torch.equal(linear(x), mx)
    assert torch.equal(linear(x), plain_y)


def test_a_region_as_a_decorator() -> None:
    """Each call is a region of its own, and so a step."""
    recipe = R.DelayedScaling(amax_history_len=4)
    results = []
    for decorated in (False, True):
        torch.manual_seed(0)
        linear = fnn.Linear(32, 32)

        def run(x: torch.Tensor, *, twice: bool, module: Any = linear) -> torch.Tensor:
            """What it does."""
            y = module(x) * (2 if twice else 1)
            return run(y, twice=False) if twice else y

        def within(x: torch.Tensor, *, twice: bool, inner: Any = run) -> torch.Tensor:
            with fw.autocast(recipe=recipe):
                return inner(x, twice=twice)

        call = fw.autocast(recipe=recipe)(run) if decorated else within
        for step in range(3):
            call(data(step, 4, 32).requires_grad_(), twice=step == 1).sum().backward()
        results.append(linear.state_dict())
        assert not decorated or call.__doc__ == "What it does."
    assert all(torch.equal(t, results[1][name]) for name, t in results[0].items())

    async def coroutine() -> None: ...

    def generator() -> Any:
        yield

    for later in (coroutine, generator):
        with pytest.raises(ValueError, match="after the region has ended"):
            fw.autocast()(later)
    assert fw.autocast(enabled=False)(lambda: fnn.context.quantizes())() is False
    assert fw.autocast()(lambda: fnn.context.quantizes())() is True and not fnn.context.quantizes()


@pytest.mark.parametrize("name", ["enabled", "calibrating"])
@pytest.mark.parametrize("value", [R.MXFP8(), None, "True", torch.tensor(True)], ids=str)
def test_flags_of_a_region_are_flags(name: str, value: Any) -> None:
    """A recipe that comes first would switch quantization on, by the default recipe."""
    with pytest.raises(ValueError, match=f"{name} is .*; it must be True or False, and a recipe comes by name"):
        fw.autocast(**{name: value})
    if name == "enabled":
        with pytest.raises(ValueError, match="enabled is"):
            fw.autocast(value)


def test_nested_regions_are_one_step() -> None:
    recipe = R.DelayedScaling(amax_history_len=3)
    first, second = fnn.Linear(32, 32), fnn.Linear(32, 32)
    second.load_state_dict(first.state_dict())
    for step in range(3):
        x = data(step, 4, 32)
        with fw.autocast(recipe=recipe):
            first(x.requires_grad_()).sum().backward()
        with fw.autocast(recipe=recipe):
            with fw.autocast(recipe=recipe):
                second(x)
            with fw.autocast(recipe=recipe):
                second(x).sum().backward()
    same(state(first), state(second))


def test_threads_and_tasks_do_not_see_each_others_regions() -> None:
    linear, x = fnn.Linear(32, 32), data(0, 4, 32)
    expected: dict[Any, torch.Tensor] = {None: linear(x)}
    for recipe in (R.MXFP8(), R.MXFP4()):
        with fw.autocast(recipe=recipe):
            expected[recipe] = linear(x)
    barrier, right = threading.Barrier(3, timeout=60), []

    def work(recipe: Any) -> None:
        with fw.autocast(enabled=recipe is not None, recipe=recipe):
            barrier.wait()
            right.append(all(torch.equal(linear(x), expected[recipe]) for _ in range(5)))
            barrier.wait()

    threads = [threading.Thread(target=work, args=(recipe,)) for recipe in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 3

    async def task(recipe: Any) -> bool:
        with fw.autocast(enabled=recipe is not None, recipe=recipe):
            await asyncio.sleep(0.01)
            return torch.equal(linear(x), expected[recipe])

    async def tasks() -> list[bool]:
        return list(await asyncio.gather(*(task(recipe) for recipe in expected)))

    assert all(asyncio.run(tasks()))


def test_calibrating_records_without_quantizing() -> None:
    recipe = R.DelayedScaling(amax_history_len=3)
    quantized, calibrated = fnn.Linear(32, 32), fnn.Linear(32, 32)
    calibrated.load_state_dict(quantized.state_dict())
    x = data(0, 4, 32)
    with fw.autocast(recipe=recipe):
        quantized(x.requires_grad_()).backward(x)
    with fw.autocast(enabled=False, recipe=recipe, calibrating=True):
        y = calibrated(x)
    y.backward(x)
    assert torch.equal(y, torch.nn.functional.linear(x, calibrated.weight, calibrated.bias))
    same(state(quantized), state(calibrated))
    with pytest.raises(ValueError, match="only DelayedScaling"):
        fw.autocast(recipe=R.MXFP8(), calibrating=True)


def test_copies_and_the_modules_own_recipe() -> None:
    recipe = R.DelayedScaling(amax_history_len=3)
    linear = fnn.Linear(32, 32, recipe=recipe)
    assert linear.delayed_scale is not None
    x = data(0, 4, 32)
    linear(x.requires_grad_()).sum().backward()
    twin = copy.deepcopy(linear)
    other = fnn.Linear(32, 32)
    other.load_state_dict(linear.state_dict())
    for step in range(1, 3):
        x = data(step, 4, 32)
        for module in (linear, twin):
            module(x.requires_grad_()).sum().backward()
        with fw.autocast(recipe=recipe):
            other(x).sum().backward()
    same(state(linear), state(twin))
    same(state(linear), state(other))
    with fw.autocast(enabled=False):
        assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_recipes_say_what_they_refuse() -> None:
    for wrong in (
        lambda: R.DelayedScaling("e5m2"),
        lambda: R.DelayedScaling(amax_history_len=0),
        lambda: R.DelayedScaling(amax_compute_algo="mean"),
        lambda: R.MXFP8(scale_rule="fp32"),
        lambda: R.MXFP4(backward="bf16"),
        lambda: R.BlockScaling(weight_block="64x64"),
        lambda: R.CurrentScaling(scale="ceil"),
        lambda: fw.autocast(recipe="mxfp8"),  # type: ignore[arg-type]
        lambda: fnn.Linear(4, 4, recipe="mxfp8"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_scales_are_16_bytes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt refuses others."""
    from fourwave.nn import products

    seen = []
    real = products.quantize

    def looked_at(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["scale"].data_ptr() % 16)
        return real(t, *args, **kwargs)

    monkeypatch.setattr(products, "quantize", looked_at)
    for module in (fnn.LayerNormMLP(32, 64), fnn.GroupedLinear(2, 32, 32)):
        rest = (torch.tensor([1, 3]),) if isinstance(module, fnn.GroupedLinear) else ()
        with fw.autocast(recipe=R.DelayedScaling(amax_history_len=2)):
            module(data(0, 4, 32).requires_grad_(), *rest).sum().backward()
    assert len(seen) == 9 and not any(seen)


def test_scales_and_codes_are_of_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where FP8 codes are gfx942's, which end at 240: scales made for 448 would saturate half of the range."""
    from fourwave.nn import base

    monkeypatch.setattr(base.quantize_api, "reads_fnuz", lambda *_: True)
    linear, x = fnn.Linear(32, 32), data(0, 4, 32)
    for _ in range(2):
        with fw.autocast(recipe=R.DelayedScaling(amax_history_len=2)):
            y = linear(x)
    assert linear.delayed_scale is not None
    for scale, t in zip(linear.delayed_scale, (x, linear.weight.detach()), strict=False):
        assert float(scale) == pytest.approx(float(t.abs().max()) / 240, rel=1e-6)
    exact = torch.nn.functional.linear(x, linear.weight, linear.bias)
    assert float((y - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("between", [None, R.MXFP4(), R.CurrentScaling(), R.DelayedScaling()], ids=str)
def test_an_evaluation_by_another_recipe_between_forward_and_backward(between: Any, reentrant: bool) -> None:
    """A reference's, say: what is computed again goes by the recipe of its first run."""
    linear = fw.nn.Linear(32, 32)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found = []
    for checkpointed in (False, True):
        with fw.autocast(recipe=R.MXFP8()):
            y = torch.utils.checkpoint.checkpoint(linear, x, use_reentrant=reentrant) if checkpointed else linear(x)
        with torch.no_grad(), fw.autocast(enabled=between is not None, recipe=between):
            linear(x)
        found.append((*_backward(y, x), y))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpointed_function_runs_without_gradients_goes_by_its_recipe(reentrant: bool) -> None:
    """Although the module ran with gradients before, by another one."""
    gate, linear = fw.nn.Linear(32, 32), fw.nn.Linear(32, 32)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gated(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = gate(x)
        return linear(x) * factor

    with fw.autocast(recipe=R.MXFP4()):
        gate(x).sum().backward()
    found = []
    for checkpointed in (False, True):
        with fw.autocast(recipe=R.MXFP8()):
            y = torch.utils.checkpoint.checkpoint(gated, x, use_reentrant=reentrant) if checkpointed else gated(x)
        found.append((*_backward(y, x), y))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _backward(y: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of x, which reentrant checkpoints do not give to torch.autograd.grad."""
    x.grad = None
    y.square().sum().backward()
    assert x.grad is not None
    return (x.grad,)
