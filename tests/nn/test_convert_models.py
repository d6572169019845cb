"""fw.nn.convert: small models of its own, and transformers' BERT, Llama and Mixtral made from a config."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.tied = nn.Linear(64, 32)
        self.tied.weight = self.second.weight
        self.shared = self.first
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.tied(self.shared(x))


def test_parameters_ties_sharing_hooks_and_names_stay() -> None:
    torch.manual_seed(0)
    model = Small().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    model.first.register_forward_hook(lambda *_: calls.append("first"))
    names, x = list(model.state_dict()), torch.randn(4, 32)
    expected, parameters = model(x), dict(model.named_parameters())
    calls.clear()
    assert fnn.convert(model) is model
    converted: Any = model
    assert all(type(getattr(converted, n)) is fnn.Linear for n in ("first", "second", "tied", "shared"))
    assert converted.shared is converted.first and converted.tied.weight is converted.second.weight
    assert type(model.attention.out_proj) is not fnn.Linear  # a subclass, whose weights are read without its forward
    assert list(model.state_dict()) == names and not converted.first.training
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert torch.equal(model(x), expected) and calls == ["first", "first"]
    with fw.autocast(recipe=R.MXFP8()):
        y = model(x)
    assert not torch.equal(y, expected)
    y.sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), expected)


def test_filter_recipe_and_a_bare_linear() -> None:
    model: Any = Small()
    seen: list[str] = []

    def only_first(name: str, module: nn.Linear) -> bool:
        seen.append(name)
        return name == "first"

    fnn.convert(model, R.DelayedScaling(amax_history_len=3), only_first)
    first = model.first
    assert type(first) is fnn.Linear and type(model.second) is nn.Linear
    assert {"first", "second", "tied"} <= set(seen)
    assert first.delayed_amax_history is not None
    assert first.delayed_amax_history.shape == (3, 3) and first.delayed_amax_history.device.type == "cpu"
    assert type(fnn.convert(nn.Linear(4, 4))) is fnn.Linear


def hidden(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).last_hidden_state


def make(kind: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers", reason="transformers (of the demo extra) is not installed")
    small: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if kind == "bert":
        config: Any = transformers.BertConfig(**small, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return transformers.BertModel(config), 2 * 6 + 1
    if kind == "llama":
        return transformers.LlamaModel(transformers.LlamaConfig(**small, num_key_value_heads=2)), 2 * 7
    config = transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralModel(config), None


@pytest.mark.parametrize("kind", ["bert", "llama", "mixtral"])
def test_models_of_transformers(kind: str) -> None:
    """Converted: the same result without a recipe, close to it in MXFP8 and BF16, and training that lowers the loss."""
    torch.manual_seed(0)
    model, linears = make(kind)
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    names = list(model.state_dict())
    expected = hidden(model, ids).detach()
    before = sum(type(m) is nn.Linear for m in model.modules())
    fnn.convert(model)
    after = sum(isinstance(m, fnn.Linear) for m in model.modules())
    assert after == before and before > 0 and (linears is None or after == linears)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(hidden(model, ids), expected, rtol=1e-4, atol=1e-4)
    for recipe, far in ((R.MXFP8(), 0.1), (R.BlockScaling(), 0.1), (R.DelayedScaling(amax_history_len=4), 0.15)):
        with torch.no_grad(), fw.autocast(recipe=recipe):
            y = hidden(model, ids)
        error = float((y - expected).norm() / expected.norm())
        # Mixtral's router may choose another expert for a token.
        assert 1e-4 < error < far * (4 if kind == "mixtral" else 1), (recipe, error)
    head = torch.randn(64, 96, generator=torch.Generator().manual_seed(2)) / 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        with fw.autocast(recipe=R.MXFP8()):
            logits = hidden(model, ids) @ head
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
    file = io.BytesIO()
    torch.save({name: model.state_dict()[name] for name in names}, file)
    file.seek(0)
    original, _ = make(kind)
    original.load_state_dict(torch.load(file, weights_only=True))


def test_gradient_checkpointing_of_transformers() -> None:
    torch.manual_seed(0)
    model, _ = make("llama")
    fnn.convert(model)
    ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        for module in model.modules():
            if isinstance(module, fnn.QuantizedModule):
                module.delayed_scale = module.delayed_amax_history = None
        with fw.autocast(recipe=R.DelayedScaling(amax_history_len=4)):
            y = hidden(model, ids)
        y.square().mean().backward()
        results.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys() and len(results[0]) > 10
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name
