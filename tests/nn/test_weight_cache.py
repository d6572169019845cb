"""is_first_microbatch=False never multiplies with a weight that is no more."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.nn import products
from fourwave.nn.weights import WatchedParameter

R = fw.recipes
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def fresh() -> Any:
    torch.manual_seed(1)
    return fw.nn.Linear(64, 64)


def run(linear: Any, first: bool | None, recipe: Any = R.MXFP8()) -> torch.Tensor:  # noqa: B008
    with fw.autocast(recipe=recipe):
        return linear(X.clone().requires_grad_(), is_first_microbatch=first)


def new_values(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7))


def step_of(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any], None]:
    def change(linear: Any) -> None:
        linear.weight.grad = new_values(linear.weight)
        make([linear.weight], lr=0.5, **options).step()

    return change


def copy_data(linear: Any) -> None:
    linear.weight.data.copy_(new_values(linear.weight))


def set_data(linear: Any) -> None:
    linear.weight.data = new_values(linear.weight)


def set_data_twice_to_one_place(linear: Any) -> None:
    place = linear.weight.data
    linear.weight.data = new_values(linear.weight)
    place.copy_(new_values(linear.weight))
    linear.weight.data = place


def load(linear: Any) -> None:
    linear.load_state_dict({"weight": new_values(linear.weight), "bias": linear.bias.detach()})


def load_assigned(linear: Any) -> None:
    linear.load_state_dict({"weight": new_values(linear.weight), "bias": linear.bias.detach()}, assign=True)


def through_the_state_dict(linear: Any) -> None:
    linear.state_dict()["weight"].copy_(new_values(linear.weight))


def another_parameter(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(new_values(linear.weight))


def another_at_the_same_address(linear: Any) -> None:
    """As an allocator does that gives freed memory out again: same address, same storage, same version."""
    version, storage = linear.weight._version, linear.weight.untyped_storage()
    place = torch.empty(0).set_(storage, 0, linear.weight.shape, linear.weight.stride())
    del linear.weight
    gc.collect()
    place.copy_(new_values(place))
    fresh_view = torch.empty(0).set_(storage, 0, place.shape, place.stride())
    linear.weight = torch.nn.Parameter(fresh_view)
    linear.weight.__class__ = WatchedParameter
    with torch.no_grad():
        while linear.weight._version < version:
            linear.weight.add_(0)
    del place, fresh_view, storage


def in_place(linear: Any) -> None:
    with torch.no_grad():
        linear.weight.mul_(2)


def foreach(linear: Any) -> None:
    with torch.no_grad():
        torch._foreach_add_([linear.weight], 1.0)


def without_version(linear: Any) -> None:
    with torch.no_grad():
        linear.weight.detach().fill_(1.5)


def numpy_alias(linear: Any) -> None:
    linear.weight.detach().numpy()[:] = 1.25


def set_storage(linear: Any) -> None:
    with torch.no_grad():
        linear.weight.set_(new_values(linear.weight))


def fill_the_storage(linear: Any) -> None:
    storage = linear.weight.untyped_storage()
    storage.fill_(60 if storage[0] != 60 else 61)


def copy_into_the_storage(linear: Any) -> None:
    linear.weight.storage().copy_(new_values(linear.weight).storage())


def swap(linear: Any) -> None:
    torch.utils.swap_tensors(linear.weight, torch.nn.Parameter(new_values(linear.weight)))


def load_by_swapping(linear: Any) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        load(linear)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def init(linear: Any) -> None:
    torch.manual_seed(9)
    linear.reset_parameters()


def to_other_dtype_and_back(linear: Any) -> None:
    linear.to(torch.bfloat16)
    linear.to(torch.float32)


CHANGES = [
    step_of(torch.optim.SGD), step_of(torch.optim.SGD, foreach=True), step_of(torch.optim.AdamW),
    step_of(torch.optim.AdamW, foreach=True), step_of(torch.optim.Adam, fused=True), copy_data, set_data,
    set_data_twice_to_one_place, load, load_assigned, through_the_state_dict, another_parameter,
    another_at_the_same_address, in_place, foreach, without_version, set_storage, init, to_other_dtype_and_back,
    fill_the_storage, copy_into_the_storage, swap, load_by_swapping, numpy_alias,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__qualname__.replace(".<locals>.change", ""))
def test_a_changed_weight_is_quantized_again(change: Callable[[Any], None]) -> None:
    linear = fresh()
    before = run(linear, True).detach()  # the graph would keep the old weight alive
    assert torch.equal(run(linear, False), before)
    change(linear)
    after = run(linear, False).detach()
    assert not torch.equal(after, before)
    assert torch.equal(after, run(linear, None))
    change(linear)
    assert torch.equal(run(linear, False), run(linear, None))


def test_weights_of_inference_mode() -> None:
    """They have no version counter: nothing is kept of them."""
    with torch.inference_mode():
        linear = fresh()
        for factor in (1, 2):
            linear.weight.mul_(factor)
            assert torch.equal(run(linear, factor == 1), run(linear, None))


def quantizations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    from fourwave.nn import products

    seen: list[tuple[int, ...]] = []
    real = products.quantize

    def counted(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(t.shape))
        return real(t, *args, **kwargs)

    monkeypatch.setattr(products, "quantize", counted)
    return seen


def test_the_kept_form_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would pass if nothing was ever kept."""
    seen = quantizations(monkeypatch)
    linear = fresh()
    for first, weights in ((True, 1), (False, 0), (False, 0), (None, 1), (False, 0), (True, 1)):
        seen.clear()
        run(linear, first).sum().backward()
        assert seen.count((64, 64)) == weights, first
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    optimizer.step()
    for first, weights in ((False, 1), (False, 0)):
        seen.clear()
        run(linear, first)
        assert seen.count((64, 64)) == weights


def test_an_alias_taken_earlier_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = quantizations(monkeypatch)
    linear = fresh()
    takes: tuple[tuple[bool, Callable[[Any], Any]], ...] = (
        (True, lambda t: t.detach()), (True, lambda t: t.untyped_storage()), (True, lambda t: t.storage()),
        (False, lambda t: t.detach().numpy()),
    )  # fmt: skip
    for kept, take in takes:
        alias = take(linear.weight)
        run(linear, True)
        alias.fill_(65) if hasattr(alias, "fill_") else alias.fill(65)
        assert torch.equal(run(linear, False), run(linear, None))
        del alias
        gc.collect()
        run(linear, True)
        seen.clear()
        run(linear, False)
        # A storage that was once an array stays marked.
        assert (seen.count((64, 64)) == 0) == kept


def test_recipes_are_kept_apart() -> None:
    linear = fresh()
    run(linear, True)
    for recipe in (R.MXFP8("e4m3", "floor"), R.MXFP4(), R.CurrentScaling(), R.Unquantized()):
        assert torch.equal(run(linear, False, recipe), run(linear, None, recipe))
    with torch.no_grad():
        assert torch.equal(run(linear, False, R.DelayedScaling()), run(linear, None, R.DelayedScaling()))


@pytest.mark.parametrize("backward", ["quantized", "high_precision"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_directions_are_kept_apart(kind: str, backward: Any) -> None:
    """Kept without gradients, then used with them: dgrad needs the columns, or the weight itself, too."""
    torch.manual_seed(0)
    recipe = R.MXFP8(backward=backward)
    module: Any = {
        "linear": fresh, "mlp": lambda: fw.nn.LayerNormMLP(64, 96), "grouped": lambda: fw.nn.GroupedLinear(2, 64, 64),
    }[kind]()  # fmt: skip
    rest = (torch.tensor([1, 3]),) if kind == "grouped" else ()
    with torch.no_grad(), fw.autocast(recipe=recipe):
        module(X, *rest, is_first_microbatch=True)
    grads: list[Any] = []
    for first in (False, None):
        x = X.clone().requires_grad_()
        with fw.autocast(recipe=recipe):
            module(x, *rest, is_first_microbatch=first).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize(
    "recipe", [R.CurrentScaling(), R.BlockScaling(), R.MXFP8(), R.MXFP4()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_kept_weights_where_columnwise_codes_are_stored_transposed(
    kind: str, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NVIDIA GPUs: a step with kept weights is the one without."""
    monkeypatch.setattr(products, "_stores_transposed", lambda t, plan, backend: "mxfp4" not in (plan.w_t, plan.g_t))
    torch.manual_seed(1)
    module: Any = {
        "linear": lambda: fw.nn.Linear(64, 128), "mlp": lambda: fw.nn.LayerNormMLP(64, 128),
        "grouped": lambda: fw.nn.GroupedLinear(2, 64, 128),
    }[kind]()  # fmt: skip
    sizes = [torch.tensor([32, 32])] * (kind == "grouped")
    results = []
    for first in (None, True, False):
        module.zero_grad()
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with fw.autocast(recipe=recipe):
            y = module(x, *sizes, is_first_microbatch=first)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    for kept in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept, results[0], strict=True))


@pytest.mark.parametrize("backward", ["quantized", "high_precision"])
def test_kept_forms_serve_every_forward_pass_of_a_step(backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a backward pass and after it."""
    seen = quantizations(monkeypatch)
    linear = fresh()
    for together in (False, True):
        results = []
        for first in (True, False, False):
            results.append(run(linear, first, R.MXFP8(backward=backward)))
            if not together:
                results[-1].sum().backward()
        for y in results * together:
            y.sum().backward()
    assert seen.count((64, 64)) == 2


def test_watched_weights_are_parameters_in_every_other_way() -> None:
    linear = fresh()
    run(linear, True)
    weight = linear.weight
    assert isinstance(weight, torch.nn.Parameter) and isinstance(weight, WatchedParameter)
    for result in (weight.detach(), weight * 2, weight[0], weight.clone()):
        assert type(result) is torch.Tensor
    twin = copy.deepcopy(linear)
    assert torch.equal(run(twin, False), run(linear, None))
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(run(twin, False), run(twin, None)) and not torch.equal(run(twin, False), run(linear, False))
    file = io.BytesIO()
    torch.save(linear, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.weight) is torch.nn.Parameter and torch.equal(run(loaded, False), run(linear, False))
    assert type(linear.state_dict()["weight"]) is torch.Tensor
    torch.testing.assert_close(weight.data, weight.detach(), rtol=0, atol=0)


def test_watched_weights_make_parameters() -> None:
    """As torch.nn.utils.parametrize does, of LoRA say: a parameter in the same memory, which the kept form sees."""
    linear = fresh()
    run(linear, True)
    for wants in (True, False):
        made = torch.nn.Parameter(linear.weight, requires_grad=wants)
        assert made.is_leaf and made.requires_grad == wants and made.data_ptr() == linear.weight.data_ptr()
    run(linear, True)
    with torch.no_grad():
        made.mul_(2)
    assert torch.equal(run(linear, False), run(linear, None))

    class Half(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Half())
    assert torch.equal(run(linear, True), run(fresh(), None))
    run(linear, False).sum().backward()
    assert linear.parametrizations.weight.original.grad is not None


@pytest.mark.parametrize("kind", ["mlp", "grouped"])
def test_other_modules_keep_weights_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = quantizations(monkeypatch)
    torch.manual_seed(0)
    module: Any
    rest: tuple[torch.Tensor, ...]
    weights: list[tuple[int, ...]]
    if kind == "mlp":
        module, rest, weights = fw.nn.LayerNormMLP(64, 96), (), [(96, 64), (64, 96)]
    else:
        module, rest, weights = fw.nn.GroupedLinear(2, 64, 64), (torch.tensor([1, 3]),), [(2, 64, 64)]
    for first, count in ((True, 1), (False, 0), (None, 1)):
        seen.clear()
        with fw.autocast(recipe=R.MXFP8()):
            y = module(X.clone().requires_grad_(), *rest, is_first_microbatch=first)
        assert [seen.count(shape) for shape in weights] == [count] * len(weights)
        y.sum().backward()
    next(p for p in module.parameters() if p.dim() > 1).data.zero_()
    with fw.autocast(recipe=R.MXFP8()):
        assert torch.equal(module(X, *rest, is_first_microbatch=False), module(X, *rest))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_may_take_data(fullgraph: bool) -> None:
    """Moving averages, say: Dynamo reads the property that counts who took it."""
    linear = fresh()
    before = run(linear, True).detach()
    double = torch.compile(lambda weight: weight.data.mul_(2), backend="aot_eager", fullgraph=fullgraph)
    double(linear.weight)
    after = run(linear, False).detach()
    assert not torch.equal(after, before) and torch.equal(after, run(linear, None))
    assert linear.weight.data.abs().sum() == 2 * fresh().weight.abs().sum()


@pytest.mark.parametrize("owner", ["numpy", "dlpack", "another process"])
def test_memory_that_others_write_is_not_trusted(owner: str) -> None:
    linear = fresh()
    array = new_values(linear.weight).numpy()
    if owner == "another process":
        linear.share_memory()
        array = linear.weight.detach().numpy()
    else:
        linear.weight = torch.nn.Parameter(torch.from_numpy(array) if owner == "numpy" else torch.from_dlpack(array))
    before = run(linear, True).detach()
    array *= 2
    after = run(linear, False).detach()
    assert not torch.equal(after, before) and torch.equal(after, run(linear, None))
