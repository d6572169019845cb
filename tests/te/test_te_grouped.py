"""te.GroupedLinear: its parameters are weight0, weight1, ..., as in Transformer Engine, wherever a framework puts them."""

from __future__ import annotations

import copy
import functools
import io
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourwave as fw
import fourwave.te as te
from fourwave import nn as fnn
from fourwave.nn import parts
from fourwave.te import recipe

G, K, N = 3, 32, 64
SPLITS = [3, 0, 9]
RECIPES: dict[str, Any] = {
    "none": None,
    "mxfp8": recipe.MXFP8BlockScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(**arguments: Any) -> Any:
    torch.manual_seed(1)
    module: Any = te.GroupedLinear(G, K, N, device="cpu", **arguments)
    for bias in biases(module):
        torch.nn.init.normal_(bias)
    return module


def weights(module: Any) -> list[Any]:
    return [getattr(module, f"weight{g}") for g in range(G)]


def biases(module: Any) -> list[Any]:
    return [getattr(module, f"bias{g}") for g in range(G)]


def reference(module: Any) -> Any:
    """fw.nn.GroupedLinear with the same values in one parameter."""
    other: Any = fnn.GroupedLinear(G, K, N, bias=module.bias is not None)
    with torch.no_grad():
        other.weight.copy_(torch.stack(weights(module)))
        if other.bias is not None:
            other.bias.copy_(torch.stack(biases(module)))
    return other


def run(module: Any, how: str, first: bool | None = None, seed: int = 0, **_: Any) -> list[torch.Tensor]:
    x = randn(sum(SPLITS), K, seed=seed).requires_grad_()
    with te.autocast(enabled=how != "none", recipe=RECIPES[how]):
        y = module(x, SPLITS if isinstance(module, te.GroupedLinear) else torch.tensor(SPLITS), first)
    y.backward(randn(*y.shape, seed=seed + 1))
    assert x.grad is not None
    return [y.detach(), x.grad]


def apart(module: Any) -> Any:
    """Every weight in memory of its own, as FSDP2 or a buffer of Megatron-LM has it."""
    for weight in weights(module):
        weight.data = weight.data.clone()
    assert not parts.lie_together(weights(module))
    return module


def test_parameters_have_transformer_engines_names() -> None:
    module = made()
    names = [f"{name}{g}" for g in range(G) for name in ("weight", "bias")]
    assert [name for name, _ in module.named_parameters()] == names == list(module.state_dict())
    assert all(type(p) is torch.nn.Parameter and p.is_leaf for p in module.parameters())
    assert [tuple(w.shape) for w in weights(module)] == [(N, K)] * G
    for found, whole in ((weights(module), module.weight), (biases(module), module.bias)):
        assert parts.lie_together(found) and torch.equal(whole, torch.stack(found))
        assert whole.data_ptr() == found[0].data_ptr()
    plain = te.GroupedLinear(G, K, N, bias=False, device="cpu")
    assert plain.bias is None and plain.bias0 is None and len(list(plain.parameters())) == G
    with pytest.raises(ValueError, match="at least 1"):
        te.GroupedLinear(0, K, N)


@pytest.mark.parametrize("how", RECIPES)
@pytest.mark.parametrize("where", ["together", "apart"])
def test_results_and_gradients_are_those_of_one_parameter(how: str, where: str) -> None:
    module = made()
    other = reference(module)
    if where == "apart":
        apart(module)
    for step in range(3):
        for a, b in zip(run(module, how, seed=step), run(other, how, seed=step), strict=True):
            assert torch.equal(a, b)
    for g in range(G):
        assert torch.equal(weights(module)[g].grad, other.weight.grad[g])
        assert torch.equal(biases(module)[g].grad, other.bias.grad[g])


def test_parts_of_the_experts_may_be_frozen() -> None:
    module = made()
    other = reference(module)
    module.weight1.requires_grad_(False)
    module.bias0.requires_grad_(False)
    run(module, "mxfp8"), run(other, "mxfp8")
    assert module.weight1.grad is None and module.bias0.grad is None
    assert torch.equal(module.weight2.grad, other.weight.grad[2]) and torch.equal(module.bias1.grad, other.bias.grad[1])
    for weight in weights(module):
        weight.requires_grad_(False)
    module.zero_grad()
    run(module, "mxfp8")
    assert module.weight0.grad is None and module.bias2.grad is not None


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("lying", ["together", "reversed", "frozen"])
def test_main_grads_of_each_expert(lying: str, delay: bool) -> None:
    module = made(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    other = reference(module)
    buffer = randn(G, N, K, seed=5)
    before = buffer.clone()
    order = [G - 1 - g for g in range(G)] if lying == "reversed" else list(range(G))
    for weight, place in zip(weights(module), order, strict=True):
        weight.main_grad = buffer[place]
        weight.grad_added_to_main_grad = False
    if lying == "frozen":
        module.weight1.requires_grad_(False)
        del module.weight1.main_grad
    run(module, "mxfp8"), run(other, "mxfp8")
    if delay:
        assert torch.equal(buffer, before)
        module.backward_dw()
    for g, weight in enumerate(weights(module)):
        frozen = lying == "frozen" and g == 1
        expected = before[order[g]] + other.weight.grad[g] * (not frozen)
        torch.testing.assert_close(buffer[order[g]], expected, rtol=1e-5, atol=1e-5)
        assert weight.grad_added_to_main_grad is not frozen and (weight.grad is None) is frozen
    for weight in weights(module):
        weight.overwrite_main_grad = True
    run(module, "mxfp8", seed=7)
    module.backward_dw()
    other.zero_grad()
    run(other, "mxfp8", seed=7)
    torch.testing.assert_close(buffer[order[2]], other.weight.grad[2], rtol=1e-5, atol=1e-5)
    module.weight0.overwrite_main_grad = False
    with pytest.raises(ValueError, match="of some of"):
        run(module, "mxfp8")
    del module.weight2.main_grad
    with pytest.raises(ValueError, match="weight2 has no main_grad"):
        run(module, "mxfp8")


def test_delayed_wgrad() -> None:
    module = made(delay_wgrad_compute=True)
    other = reference(module)
    module.bias1.requires_grad_(False), module.weight2.requires_grad_(False)
    seen: list[int] = []
    module.weight0.register_post_accumulate_grad_hook(lambda p: seen.append(0 if p.grad is None else 1))
    for step in range(2):
        run(module, "mxfp8", seed=step), run(other, "mxfp8", seed=step)
    assert module.weight0.grad is None and torch.equal(module.bias0.grad, other.bias.grad[0])
    module.backward_dw(), module.backward_dw()
    for g in range(2):
        torch.testing.assert_close(weights(module)[g].grad, other.weight.grad[g], rtol=1e-5, atol=1e-5)
    assert module.weight2.grad is None and sum(seen) == 2


def write(module: Any) -> None:
    with torch.no_grad():
        module.weight2.add_(1)


def write_data(module: Any) -> None:
    module.weight1.data.mul_(2)


def step(module: Any) -> None:
    torch.optim.SGD([module.weight0], lr=0.5).step()


def replace(module: Any) -> None:
    module.weight1 = torch.nn.Parameter(randn(N, K, seed=8))


def load(module: Any) -> None:
    module.load_state_dict({name: 2 * t for name, t in module.state_dict().items()})


def elsewhere(module: Any) -> None:
    apart(module)
    write(module)


@pytest.mark.parametrize("where", ["together", "apart"])
@pytest.mark.parametrize(
    "change", [write, write_data, step, replace, load, elsewhere, None], ids=lambda f: f.__name__ if f else "none"
)
def test_kept_weights_are_kept_and_never_stale(change: Any, where: str, monkeypatch: Any) -> None:
    from fourwave.nn import linear

    made_anew: list[int] = []
    quantize = linear.quantize_weight

    def counted(*arguments: Any, **options: Any) -> Any:
        made_anew.append(1)
        return quantize(*arguments, **options)

    monkeypatch.setattr(linear, "quantize_weight", counted)
    module = made() if where == "together" else apart(made())
    run(module, "mxfp8", True)
    run(module, "mxfp8", False)
    assert len(made_anew) == 1  # kept, though the parameters may share memory
    if change is not None:
        change(module)
    kept = run(module, "mxfp8", False)
    assert len(made_anew) == (1 if change is None else 2)
    for a, b in zip(kept, run(module, "mxfp8", None), strict=True):
        assert torch.equal(a, b)


def test_weights_with_main_grad_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the graph of the microbatch before is still there."""
    from fourwave.nn import linear

    made_anew: list[int] = []
    quantize = linear.quantize_weight

    def counted(*arguments: Any, **options: Any) -> Any:
        made_anew.append(1)
        return quantize(*arguments, **options)

    monkeypatch.setattr(linear, "quantize_weight", counted)
    module = made(fuse_wgrad_accumulation=True)
    for weight in weights(module):
        weight.main_grad = torch.zeros(N, K)
    x = randn(sum(SPLITS), K).requires_grad_()
    results = []
    for first in (True, False, False):
        with te.autocast(recipe=RECIPES["mxfp8"]):
            results.append(module(x, SPLITS, first))
        results[-1].sum().backward()
    assert len(made_anew) == 1


def test_an_alias_of_the_whole_forbids_keeping() -> None:
    module = made()
    run(module, "mxfp8", True)
    alias = module.weight0.detach()
    run(module, "mxfp8", False)
    alias.add_(1)
    del alias
    for a, b in zip(run(module, "mxfp8", False), run(module, "mxfp8", None), strict=True):
        assert torch.equal(a, b)


def test_the_whole_is_read_only() -> None:
    module = made()
    for name in ("weight", "bias"):
        for value in (torch.nn.Parameter(randn(G, N, K)), randn(G, N, K)):
            with pytest.raises(AttributeError, match=f"{name} is read only: set {name}0"):
                setattr(module, name, value)
    module.weight0 = torch.nn.Parameter(randn(N, K))
    assert torch.equal(module.weight[0], randn(N, K))


def test_moves_casts_and_copies_lie_together_again() -> None:
    module = made()
    for each in (module.to(torch.bfloat16), module.float(), copy.deepcopy(module), module.to_empty(device="cpu")):
        assert parts.lie_together(weights(each)) and parts.lie_together(biases(each))
    module.reset_parameters()  # what to_empty found may be NaN, which equals nothing
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert parts.lie_together(weights(again))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True))
    separate = apart(made())
    where = separate.weight1.data_ptr()
    copy.copy(separate)
    separate.float()
    assert separate.weight1.data_ptr() == where  # what a framework has put elsewhere stays there
    both: Any = copy.deepcopy(torch.nn.ModuleList([module, torch.nn.ParameterList([module.weight1])]))
    assert both[0].weight1 is both[1][0] and both[0].weight1 is not module.weight1


def test_optimizers_initialisation_and_writes_reach_the_product() -> None:
    for module in (made(), apart(made())):
        groups: Any = [{"params": weights(module)}, {"params": biases(module), "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        for step in range(2):
            run(module, "none", seed=step)
            optimizer.step()
        x = randn(sum(SPLITS), K)
        right = torch.cat(
            [F.linear(x[:3], module.weight0, module.bias0), F.linear(x[3:], module.weight2, module.bias2)]
        )
        torch.testing.assert_close(module(x, SPLITS), right, rtol=1e-5, atol=1e-5)
        torch.manual_seed(4)
        module.reset_parameters()
        assert not module.bias2.any() and abs(float(module.weight2.detach().std()) - 0.023) < 0.002
        assert torch.equal(module.weight, torch.stack(weights(module)))


def test_a_write_between_forward_and_backward_is_told() -> None:
    """Of an unquantized product, whose backward pass reads the weight: of any expert."""
    module = made()
    y = module(randn(sum(SPLITS), K).requires_grad_(), SPLITS)
    with torch.no_grad():
        module.weight2.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpoints_of_both_kinds_load() -> None:
    module, other = made(), te.GroupedLinear(G, K, N, device="cpu")
    whole = {"weight": torch.stack(weights(module)), "bias": torch.stack(biases(module))}
    for state in (module.state_dict(), whole, {**module.state_dict(), "_extra_state": torch.empty(0)}):
        other.reset_parameters()
        other.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    nested = torch.nn.ModuleDict({"experts": made()})
    nested.load_state_dict({f"experts.{name}": t for name, t in whole.items()})
    state = module.state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match=re.escape('Missing key(s) in state_dict: "weight1". ')) as told:
        other.load_state_dict(state)
    assert "Unexpected" not in str(told.value)
    with pytest.raises(RuntimeError, match=r'Unexpected.*"weight"'):
        other.load_state_dict({**whole, "weight": whole["weight"][:2]})
    other.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)
    assert torch.equal(run(other, "mxfp8")[0], run(module, "mxfp8")[0])


def test_returned_biases() -> None:
    module, x = made(return_bias=True), randn(sum(SPLITS), K).bfloat16()
    y, returned = module(x, SPLITS)
    assert [b.dtype for b in returned] == [torch.bfloat16] * G
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(returned, biases(module), strict=True))
    plain = te.GroupedLinear(G, K, N, bias=False, device="cpu")
    plain.load_state_dict({f"weight{g}": w for g, w in enumerate(weights(module))})
    assert torch.equal(plain(x, SPLITS), y)
    sum(b.float().sum() for b in returned).backward()
    assert torch.equal(module.bias1.grad, torch.ones(N))
    _, empty = te.GroupedLinear(G, K, N, bias=False, return_bias=True, device="cpu")(x, SPLITS)
    assert [tuple(b.shape) for b in empty] == [(0,)] * G


def test_stored_weights() -> None:
    module = made()
    other = reference(module)
    for each in (module, other):
        each.store_quantized(recipe.MXFP8BlockScaling(), main_grad=True)
    assert module.weight is None and module.weight0 is None and "weight0" not in module.state_dict()
    for a, b in zip(run(module, "mxfp8"), run(other, "mxfp8"), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(module.weight_main_grad, other.weight_main_grad) and module.weight_main_grad.any()
    again = made()
    again.store_quantized(recipe.MXFP8BlockScaling(), main_grad=True)
    again.load_state_dict(module.state_dict())


def test_compiled_code_is_as_eager() -> None:
    results = []
    for compiled in (False, True):
        module = made()
        forward: Any = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else module
        for rows in (12, 20):
            x = randn(rows, K).requires_grad_()
            with fw.autocast(recipe=fw.recipes.MXFP8()):
                y = forward(x, torch.tensor([3, 0, rows - 3]))
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in module.parameters()]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)], ids=str)
def test_results_are_no_views(shape: tuple[int, ...]) -> None:
    """Of a view, a change in place (`y += x`) drops the hook that FSDP2 put on it."""
    for make in (lambda: te.GroupedLinear(2, 64, 64, device="cpu"), lambda: te.RMSNorm(64, device="cpu")):
        module: Any = make()
        x = torch.randn(shape, requires_grad=True)
        y = module(x, *([[2, 4]] if isinstance(module, te.GroupedLinear) else []))
        assert y.shape == x.shape and not y._is_view()
        y += x
        y.sum().backward()
        assert x.grad is not None


def test_a_selective_checkpoint_sees_that_a_result_it_keeps_was_changed() -> None:
    """It computes again from what it kept: a change that it did not see would be there twice."""
    module = te.GroupedLinear(2, 64, 64, device="cpu")
    kept = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.fourwave.grouped_gemm.default]
    )

    def changed(x: torch.Tensor) -> torch.Tensor:
        y = module(x, [2, 4])
        y += x
        return y.square()

    y = torch.utils.checkpoint.checkpoint(
        changed, torch.randn(2, 3, 64, requires_grad=True), use_reentrant=False, context_fn=kept
    )
    with pytest.raises(RuntimeError, match="has been mutated"):
        y.sum().backward()


def test_sharded_parameters_train_as_whole_ones() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results = []
        for shards in (False, True):
            module = made()
            if shards:
                fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for step in range(2):
                found = run(module, "mxfp8", step == 0, seed=step)
                optimizer.step()
                optimizer.zero_grad()
            results.append(found)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    finally:
        dist.destroy_process_group()
