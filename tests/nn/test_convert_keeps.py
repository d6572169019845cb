"""fw.nn.convert: what goes with a replaced Linear, which Linears are left alone, and what other code makes of the new ones."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hooked(calls: list[Any]) -> tuple[nn.Sequential, list[Any]]:
    """A model whose Linear has every kind of hook, and their handles."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)

    def named(name: str) -> Any:
        return lambda *a, **k: calls.append((name, type(a[0]).__name__))

    def with_module(module: nn.Module, *_: Any) -> None:
        calls.append(("load_pre_module", module.tag))

    handles = [
        linear.register_forward_pre_hook(named("pre")),
        linear.register_forward_pre_hook(
            lambda m, a, k: calls.append(("pre_kwargs", len(a), sorted(k))), with_kwargs=True
        ),
        linear.register_forward_hook(named("forward")),
        linear.register_forward_hook(lambda m, a, k, y: calls.append(("kwargs", len(a), sorted(k))), with_kwargs=True),
        linear.register_forward_hook(lambda *_: calls.append("always"), always_call=True),
        linear.register_full_backward_pre_hook(lambda m, dy: calls.append(("backward_pre", len(dy)))),
        linear.register_full_backward_hook(lambda m, dx, dy: calls.append(("backward", len(dx), len(dy)))),
        linear.register_state_dict_pre_hook(lambda *_: calls.append("state_pre")),
        linear.register_state_dict_post_hook(lambda *_: calls.append("state")),
        linear.register_load_state_dict_pre_hook(lambda *_: calls.append("load_pre")),
        linear._register_load_state_dict_pre_hook(with_module, with_module=True),
        linear.register_load_state_dict_post_hook(lambda *_: calls.append("load")),
    ]
    linear.tag = "first"  # type: ignore[assignment]
    return nn.Sequential(linear), handles


def test_every_hook_goes_along() -> None:
    seen = []
    for converts in (False, True):
        calls: list[Any] = []
        model, handles = hooked(calls)
        if converts:
            fnn.convert(model)
            assert type(model[0]) is fnn.Linear and model[0].tag == "first"
        model(randn(4, 8).requires_grad_()).sum().backward()
        model.load_state_dict(model.state_dict())
        with pytest.raises(Exception, match=r"shape|x is"):
            model(randn(4, 7))
        seen.append(list(calls))
        for handle in handles:
            handle.remove()
        calls.clear()
        model(randn(4, 8).requires_grad_()).sum().backward()
        model.load_state_dict(model.state_dict())
        assert not calls
    assert seen[0] == seen[1] and len(seen[0]) == 15, seen[0]


def test_buffers_submodules_and_attributes_go_along() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    linear: Any = model[0].eval()
    linear.register_buffer("kept", randn(3))
    linear.register_buffer("passing", randn(2), persistent=False)
    linear.register_parameter("gain", nn.Parameter(randn(1)))
    linear.inner = nn.Linear(4, 4)
    linear.told = linear.extra_repr
    names, inner = list(model.state_dict()), linear.inner
    fnn.convert(model)
    new: Any = model[0]
    told: Any = new.told
    assert type(new) is type(new.inner) is fnn.Linear and new.inner.weight is inner.weight
    assert list(model.state_dict()) == [names[i] for i in (0, 1, 2, 3, 4, 5)] and not new.training
    assert new.kept is linear.kept and new.passing is linear.passing and new.gain is linear.gain
    assert told.__self__ is new


@pytest.mark.parametrize(
    "recipe",
    [R.DelayedScaling(amax_history_len=3), R.MXFP4("mxfp4", stochastic_rounding=True)],
    ids=["delayed", "seed"],
)
def test_state_of_the_recipe_is_where_the_parameters_are(recipe: Any) -> None:
    model: Any = fnn.convert(nn.Sequential(nn.Linear(32, 32)), recipe)
    for name in ("delayed_scale", "delayed_amax_history", "rounding_seed"):
        state = getattr(model[0], name)
        assert state is None or state.device.type == "cpu"
    model(randn(32, 32)).sum().backward()


def patched(linear: Any) -> Any:
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)
    return linear


def compiled(linear: Any) -> Any:
    linear.compile(backend="eager")
    return linear


class Wrapped(torch.Tensor):
    pass


def of_a_subclass(linear: Any) -> Any:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))
    return linear


def with_a_name(linear: Any) -> Any:
    linear.recipe = "of somebody else's"
    return linear


LEFT_ALONE = {
    "weight_norm": (lambda m: nn.utils.weight_norm(m), "weight is no parameter"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m), "weight is no parameter"),
    "prune": (lambda m: prune.l1_unstructured(m, "weight", 0.5), "weight is no parameter"),
    "prune_bias": (lambda m: prune.l1_unstructured(m, "bias", 0.5), "bias is no parameter"),
    "parametrized": (lambda m: parametrizations.weight_norm(m), "ParametrizedLinear"),
    "forward": (patched, "forward of its own"),
    "compiled": (compiled, "_compiled_call_impl of its own"),
    "subclass": (of_a_subclass, "weight is a Wrapped"),
    "float64": (lambda m: m.double(), "torch.float64"),
    "attribute": (with_a_name, "recipe is one of"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_computes_something_else_is_left_alone(kind: str, caplog: Any, told: Any) -> None:
    change, says = LEFT_ALONE[kind]
    torch.manual_seed(0)
    model = nn.Sequential(change(nn.Linear(8, 8)), nn.Linear(8, 8)).eval()
    x = randn(4, 8).to(torch.float64 if kind == "float64" else torch.float32)
    expected: Any = None if kind == "compiled" else model[0](x)
    with caplog.at_level(logging.INFO, "fourwave.convert"):
        fnn.convert(model)
    assert not isinstance(model[0], fnn.Linear) and type(model[1]) is fnn.Linear
    assert expected is None or torch.equal(model[0](x), expected)
    (message,) = (record.getMessage() for record in told())
    assert says in message and message.startswith("0 is left alone")


def test_converted_ones_are_left_alone(caplog: Any, told: Any) -> None:
    """Whatever recipe is given: it is said."""
    model = fnn.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), R.MXFP8(), lambda name, _: name == "0")
    first: Any = model[0]  # type: ignore[index]
    with caplog.at_level(logging.INFO, "fourwave.convert"):
        fnn.convert(model, R.MXFP4())
    assert model[0] is first and first.recipe == R.MXFP8() and model[1].recipe == R.MXFP4()  # type: ignore[index]
    (message,) = (record.getMessage() for record in told())
    assert "0 is left alone: it is one of this package already, with recipe=MXFP8" in message


def test_a_model_is_converted_whole_or_not_at_all() -> None:
    def failing(name: str, _: nn.Linear) -> bool:
        if name == "2":
            raise RuntimeError("third")
        return True

    for arguments, error in (
        ((None, failing), RuntimeError),
        (("mxfp8",), ValueError),
    ):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        hook = model[0]._register_load_state_dict_pre_hook(lambda *_: None, with_module=True)
        before = list(model)
        with pytest.raises(error):
            fnn.convert(model, *arguments)  # type: ignore[arg-type]
        assert list(model) == before and all(type(m) is nn.Linear for m in model)
        model.load_state_dict(model.state_dict())
        hook.remove()
    with pytest.raises(ValueError, match="must be a torch"):
        fnn.convert([nn.Linear(2, 2)])  # type: ignore[arg-type]


def test_the_filter_is_asked_at_every_place() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": shared})
    fnn.convert(model, filter=lambda name, _: name != "b")
    assert model["a"] is model["c"] and type(model["a"]) is fnn.Linear and model["b"] is shared
    assert model["a"].weight is shared.weight


@pytest.mark.parametrize("masked", [False, True])
def test_encoders_do_not_pass_converted_linears_by(masked: bool) -> None:
    """PyTorch's fast path multiplies by the weights itself: what the recipe says must show all the same."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    plain = copy.deepcopy(model)
    x, mask = randn(2, 6, 32), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    arguments: dict[str, Any] = {"src_key_padding_mask": mask} if masked else {}
    fnn.convert(model, R.MXFP4())
    valid = ~mask if masked else torch.ones_like(mask)
    with torch.no_grad():
        y, expected = model(x, **arguments)[valid], plain(x, **arguments)[valid]
    with torch.enable_grad():  # not the fast path
        right = model(x, **arguments).detach()[valid]
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)
    assert 0.01 < float((y - expected).norm() / expected.norm()) < 0.5
    untouched: Any = fnn.convert(copy.deepcopy(plain), filter=lambda *_: False)
    assert untouched.layers[0].activation_relu_or_gelu and untouched.use_nested_tensor


def test_code_that_asks_for_torchs_linear_finds_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), fnn.LayerNormLinear(8, 8), fw.nn.Linear(8, 8, recipe=R.MXFP8()))
    fnn.convert(model)
    found = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert found == [model[0], model[2]]
    for linear in found:
        assert (linear.in_features, linear.out_features) == (8, 8)
        nn.init.zeros_(linear.weight)
    copied: Any = copy.deepcopy(model[2])
    assert type(copied) is fnn.Linear and copied.recipe == R.MXFP8()


def test_the_constructor_is_that_of_torchs_linear() -> None:
    """Such as `type(linear)(in, out, bias, device, dtype)` and skip_init, that code for nn.Linear has."""
    for arguments in ((8, 4), (8, 4, False), (8, 4, True, "meta"), (8, 4, True, "cpu", torch.bfloat16)):
        mine, theirs = fnn.Linear(*arguments), nn.Linear(*arguments)
        assert list(mine.state_dict()) == list(theirs.state_dict())
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (p.shape, p.dtype, p.device) == (q.shape, q.dtype, q.device)
    assert fnn.Linear(8, 4, dtype=torch.float16).weight.dtype == torch.float16
    assert type(nn.utils.skip_init(fnn.Linear, 8, 4)) is fnn.Linear
    with pytest.raises(ValueError, match="say the same thing"):
        fnn.Linear(8, 4, dtype=torch.float16, params_dtype=torch.float16)


def test_a_converted_model_of_transformers_resizes_its_embeddings() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers (of the demo extra) is not installed")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=False
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = fnn.convert(transformers.LlamaForCausalLM(config))
    head = model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(104)
    assert isinstance(model.lm_head, nn.Linear) and torch.equal(model.lm_head.weight[:96], head)
    assert model(torch.randint(0, 104, (1, 8))).logits.shape == (1, 8, 104)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_hold_others_are_refused() -> None:
    """What they are would be lost in silence."""
    from torch.testing._internal.two_tensor import TwoTensor

    x = randn(4, 32)
    jagged = torch.nested.nested_tensor([randn(2, 32), randn(3, 32)], layout=torch.jagged)
    for module in (fnn.Linear(32, 32), fnn.LayerNormLinear(32, 32)):
        for wrong in (TwoTensor(x, x.clone()), jagged, x.to_sparse()):
            for recipe in (None, R.MXFP8()):
                with (
                    pytest.raises((NotImplementedError, ValueError), match="x is a"),
                    fw.autocast(recipe is not None, recipe),
                ):
                    module(wrong)
        module.weight = nn.Parameter(TwoTensor(randn(32, 32), randn(32, 32)))
        with pytest.raises(NotImplementedError, match="weight is a TwoTensor"):
            module(x)


def test_sharded_parameters_are_told() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(nn.Sequential(fnn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
        with pytest.raises(NotImplementedError, match="tensor parallelism"):
            model(randn(4, 8))
        other = parallelize_module(nn.Sequential(nn.Linear(8, 8)), mesh, {"0": ColwiseParallel()})
        with pytest.raises(ValueError, match="convert before"):
            fnn.convert(other)
    finally:
        dist.destroy_process_group()
