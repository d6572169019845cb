"""What modules save, and what they load."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes
RECIPE = R.DelayedScaling(amax_history_len=4)


def trained(module: Any = None, recipe: Any = RECIPE, steps: int = 3) -> Any:
    torch.manual_seed(0)
    module = fnn.LayerNormMLP(32, 64) if module is None else module
    for step in range(steps):
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
        with fw.autocast(recipe=recipe):
            module(x.requires_grad_()).square().sum().backward()
    return module


def saved(module: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(a: Any, b: Any) -> bool:
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_state_dict_is_plain_tensors_and_loads_safely() -> None:
    module = trained()
    state = saved(module)
    assert all(type(t) is torch.Tensor for t in state.values())
    for other in (fnn.LayerNormMLP(32, 64), fnn.prepare(fnn.LayerNormMLP(32, 64), RECIPE), trained(steps=1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other.load_state_dict(state)
        assert equal(module, other)
        assert equal(trained(module=copy.deepcopy(module), steps=2), trained(module=other, steps=2))


def test_without_delayed_scaling_there_is_no_state() -> None:
    linear = fnn.Linear(32, 32)
    for recipe in (R.MXFP8(), R.CurrentScaling(), R.Unquantized()):
        trained(linear, recipe)
    assert linear.state_dict().keys() == torch.nn.Linear(32, 32).state_dict().keys()
    torch.nn.Linear(32, 32).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["fresh", "with state"])
def test_checkpoints_of_nn_linear_load_strictly(recipe: Any) -> None:
    reference = torch.nn.Linear(32, 48)
    for file in (reference.state_dict(), saved(reference), dict(reference.state_dict())):
        linear = fnn.Linear(32, 48, recipe=recipe)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = linear.load_state_dict(file, strict=True)
        assert not result.missing_keys and not result.unexpected_keys
        assert torch.equal(linear.weight, reference.weight)
    linear = fnn.Linear(32, 48)
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear.load_state_dict(torch.nn.Linear(32, 40).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        linear.load_state_dict({"weight": reference.weight.detach()})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        linear.load_state_dict({**reference.state_dict(), "scale": torch.ones(1)})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_history_of_another_length_is_cut_or_padded(length: int) -> None:
    module = trained(fnn.Linear(32, 32), steps=6)
    state = saved(module)
    history = state["delayed_amax_history"]
    other = fnn.Linear(32, 32, recipe=R.DelayedScaling(amax_history_len=length))
    other.load_state_dict(state)
    got = other.delayed_amax_history
    assert got is not None and got.shape == (length, 3)
    assert torch.equal(got[0], history[0])  # the newest
    kept = min(length, 4) - 1
    assert torch.equal(got[length - kept :], history[4 - kept :])  # the newest of the others, at the end
    assert not got[1 : length - kept].any()
    # A module without state takes the checkpoint's length; a recipe of another length changes it, but not in an evaluation.
    fresh = fnn.Linear(32, 32)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.delayed_amax_history, history)  # type: ignore[arg-type]
    with torch.no_grad(), fw.autocast(recipe=R.DelayedScaling(amax_history_len=length)):
        fresh(torch.zeros(1, 32))
    assert torch.equal(fresh.delayed_amax_history, history)  # type: ignore[arg-type]
    fnn.prepare(fresh, R.DelayedScaling(amax_history_len=length))
    assert torch.equal(fresh.delayed_amax_history, got)  # type: ignore[arg-type]


def test_versions() -> None:
    module = trained(fnn.Linear(32, 32))
    for change, message in ((0, "version 0"), (9, "newer than")):
        state = module.state_dict()
        state._metadata[""]["version"] = change
        other = fnn.Linear(32, 32)
        with pytest.warns(UserWarning, match=message):
            other.load_state_dict(state)
        assert equal(module, other)


def test_checkpoints_without_versions_load_quietly() -> None:
    """Those of safetensors, which keeps tensors only, and of torch.distributed.checkpoint."""
    module = trained(fnn.Linear(32, 32))
    other = fnn.Linear(32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(dict(module.state_dict()))
    assert equal(module, other)


def test_foreign_and_broken_state() -> None:
    linear = fnn.Linear(32, 32)
    state = {**linear.state_dict(), "_extra_state": torch.zeros(8, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="Transformer Engine"):
        linear.load_state_dict(state)
    state = trained(fnn.LayerNormMLP(32, 64)).state_dict()
    names = ("delayed_scale", "delayed_amax_history")
    broken = {**linear.state_dict(), **{name: state[name] for name in names}}
    with pytest.raises(RuntimeError, match="has 3 scales"):
        linear.load_state_dict(broken)


def test_casts_and_moves_keep_scales_in_float32() -> None:
    for cast in (lambda m: m.bfloat16(), lambda m: m.to(torch.float16), lambda m: m.double(), lambda m: m.half()):
        module = trained()
        scale, history = module.delayed_scale.clone(), module.delayed_amax_history.clone()
        cast(module)
        assert module.fc1_weight.dtype != torch.float32
        assert torch.equal(module.delayed_scale, scale) and torch.equal(module.delayed_amax_history, history)
    module = fnn.prepare(fnn.Linear(32, 32, device="meta"), RECIPE)
    module.to_empty(device="cpu")
    assert module.delayed_scale is not None and module.delayed_scale.device.type == "cpu"
    module = trained()
    module.to("meta")
    assert module.delayed_scale is not None and module.delayed_scale.is_meta


@pytest.mark.parametrize(
    "recipe",
    [R.DelayedScaling(amax_history_len=2), R.BlockScaling(scale="fp32"), R.MXFP4()],
    ids=lambda r: type(r).__name__,
)
def test_models_made_in_bfloat16(recipe: Any) -> None:
    """By torch.set_default_dtype, as transformers and training scripts do: scales are float32 all the same."""
    results: list[list[Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(0)
            module = fnn.LayerNormMLP(32, 64, params_dtype=torch.bfloat16)
            for step in range(3):
                x = torch.randn(8, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(step))
                with fw.autocast(recipe=recipe):
                    y = module(x)
                    module(x[:0])
                y.sum().backward()
            results.append([y, module.fc1_weight.grad, *module.state_dict().values()])
        finally:
            torch.set_default_dtype(torch.float32)
    assert len(results[0]) == len(results[1])
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["prepared", "own recipe"])
def test_memory_that_to_empty_gives_is_not_taken_for_state(kind: str) -> None:
    """Models that are made on the meta device get parameters from reset_parameters or from a checkpoint, which may be without state."""
    recipe = R.MXFP4(backward="mxfp4", stochastic_rounding=True)
    for name in ("reset_parameters", "load", "assign"):
        for each in (RECIPE, recipe):
            own = each if kind == "own recipe" else None
            module = fnn.LayerNormMLP(32, 64, device="meta", recipe=own)
            fnn.prepare(module, each)
            weights = fnn.LayerNormMLP(32, 64).state_dict()
            if name == "assign":
                module.load_state_dict(weights, assign=True)
            else:
                torch.empty(3000).fill_(torch.nan)  # for to_empty to find
                module.to_empty(device="cpu")
                module.reset_parameters() if name == "reset_parameters" else module.load_state_dict(weights)
            if each is RECIPE:
                assert torch.equal(module.delayed_scale, torch.ones(6))  # type: ignore[arg-type]
                assert not module.delayed_amax_history.any()  # type: ignore[union-attr]
            else:
                assert module.rounding_seed is not None and module.rounding_seed.device.type == "cpu"
            with fw.autocast(recipe=each):
                assert module(torch.ones(2, 32)).isfinite().all()
    module = trained()
    module.reset_parameters()
    assert not module.delayed_amax_history.any() and (module.delayed_scale == 1).all()
    stored = fnn.Linear(32, 32)
    stored.store_quantized(recipe)
    assert "weight stored as mxfp4" in repr(stored)
    with pytest.raises(ValueError, match="set_weight"):
        stored.reset_parameters()
    without_bias = fnn.Linear(32, 32, bias=False)
    without_bias.store_quantized(recipe)
    fnn.prepare(without_bias, recipe)
    assert without_bias.rounding_seed is not None


@pytest.mark.parametrize(
    "recipe", [RECIPE, R.MXFP4(backward="mxfp4", stochastic_rounding=True)], ids=["delayed", "rounding"]
)
def test_a_first_call_in_inference_mode(recipe: Any) -> None:
    """As Lightning's check before training is one. State is made there, and changes its length."""
    module = fnn.Linear(32, 32)
    with torch.inference_mode(), fw.autocast(recipe=recipe):
        module(torch.ones(2, 32))
    if recipe is RECIPE:
        with torch.inference_mode(), fw.autocast(recipe=R.DelayedScaling(amax_history_len=7)):
            module(torch.ones(2, 32))
    trained(recipe=recipe, module=module)


def test_state_is_no_buffer_and_yet_in_checkpoints() -> None:
    """DistributedDataParallel broadcasts a model's buffers; DCP and fully_shard ask each module for its own."""
    model = torch.nn.Sequential(trained(), fnn.Linear(32, 32))
    assert not list(model.buffers())
    own = dict(model[0].named_buffers(recurse=False))
    assert set(own) == {"delayed_scale", "delayed_amax_history"} <= set(model[0].state_dict())
    assert all(own[name].data_ptr() == model.state_dict()[f"0.{name}"].data_ptr() for name in own)
    state = model.state_dict()
    del state["0.delayed_scale"]
    with pytest.raises(RuntimeError, match="delayed_amax_history is there alone"):
        model.load_state_dict(state)
    state["0.delayed_scale"] = torch.tensor([1.0, torch.nan, 0.0, 1.0, 1.0, 1.0])
    with pytest.raises(RuntimeError, match="positive and finite"):
        model.load_state_dict(state)
    state["0.delayed_scale"] = torch.full((6,), 0.25, dtype=torch.bfloat16)
    model.load_state_dict(state, assign=True)
    assert model[0].delayed_scale.dtype == torch.float32 and bool(torch.as_tensor(model[0].delayed_scale == 0.25).all())


def test_pickles_and_copies() -> None:
    module = trained()
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert equal(module, other) and type(other) is type(module)
        assert equal(trained(module=other, steps=2), trained(module=copy.deepcopy(module), steps=2))


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = fnn.LayerNormMLP(32, 64), fnn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_distributed_checkpoint_round_trip(tmp_path: Any) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    torch.manual_seed(0)
    model: Any = trained(TwoLayers())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that there is one process
        dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
        fresh: Any = fnn.prepare(TwoLayers(), RECIPE)
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(fresh, state)
    assert equal(model, fresh)
    assert float(fresh.second.delayed_amax_history.sum()) > 0
    assert equal(trained(module=model, steps=2), trained(module=fresh, steps=2))


@pytest.mark.parametrize("recipe", [RECIPE, R.MXFP8(), R.CurrentScaling()], ids=lambda r: type(r).__name__)
def test_size_is_flat_over_10_steps(recipe: Any) -> None:
    """Neither the state nor what the process holds grows from step to step."""
    import gc

    def tensors_alive() -> list[torch.Tensor]:
        gc.collect()
        return [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]

    others = tensors_alive()  # of earlier tests: they stay as long as this list
    torch.manual_seed(0)
    module: Any = TwoLayers()
    x = torch.randn(5, 32)
    sizes, tensors = [], []
    for step in range(10):
        with fw.autocast(recipe=recipe):
            y = module(x.requires_grad_())
        y.sum().backward()
        del y
        sizes.append(sum(t.numel() * t.element_size() for t in module.state_dict().values()))
        if step in (2, 9):
            live = tensors_alive()
            tensors.append((len(live), sum(t.numel() for t in live)))
            del live
    assert len(set(sizes)) == 1
    assert tensors[0] == tensors[1] and tensors[0][0] > len(others)


@pytest.mark.parametrize("fails", ["a buffer", "a parameter"])
def test_a_move_that_fails_loses_nothing(fails: str) -> None:
    module, stored = trained(), fnn.Linear(32, 32)
    stored.store_quantized(fw.recipes.MXFP8())

    def move(t: torch.Tensor) -> torch.Tensor:
        if isinstance(t, torch.nn.Parameter) == (fails == "a parameter"):
            raise RuntimeError("out of memory")
        return t.clone()

    for each in (module, stored):
        before = {name: t.clone() for name, t in each.state_dict().items()}
        with pytest.raises(RuntimeError, match="out of memory"):
            each._apply(move)
        after = each.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert stored(torch.ones(2, 32)).isfinite().all()
