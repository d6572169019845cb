"""delay_wgrad_compute: the gradients that backward_dw gives go the way of others, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes
MODULES: dict[str, Any] = {
    "linear": lambda **k: fnn.Linear(32, 32, **k),
    "layernorm_linear": lambda **k: fnn.LayerNormLinear(32, 32, **k),
    "mlp": lambda **k: fnn.LayerNormMLP(32, 32, **k),
    "grouped": lambda **k: fnn.GroupedLinear(2, 32, 32, **k),
}


def run(module: Any, seed: int = 0) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    with fw.autocast(recipe=R.MXFP8()):
        y = module(x, *[torch.tensor([1, 3])] * isinstance(module, fnn.GroupedLinear))
    y.square().sum().backward()


def watch(name: str, parameter: Any, seen: list[tuple[str, torch.Tensor]]) -> None:
    """The gradients that its hooks see. Those of a gradient that is put off run in the backward pass, too, without any."""

    def note(grad: torch.Tensor | None) -> None:
        if grad is not None:
            seen.append((name, grad.clone()))

    parameter.register_hook(note)
    parameter.register_post_accumulate_grad_hook(lambda p: note(p.grad))


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_and_hooks(kind: str) -> None:
    results = []
    for delay in (False, True):
        torch.manual_seed(0)
        module = MODULES[kind](delay_wgrad_compute=delay)
        seen: list[tuple[str, torch.Tensor]] = []
        for name, p in module.named_parameters():
            watch(name, p, seen)
        for step in range(2):
            module.zero_grad()
            run(module, step)
            module.backward_dw()
        counted = len(seen)
        run(module, 2)  # adds
        module.backward_dw()
        del seen[counted:]
        results.append([*[(n, p.grad) for n, p in module.named_parameters()], *sorted(seen, key=lambda pair: pair[0])])
    assert len(results[0]) == len(results[1]) == 5 * len(list(module.parameters()))
    for (name, a), (other, b) in zip(*results, strict=True):
        assert name == other and torch.equal(a, b), name


@pytest.mark.parametrize("kind", MODULES)
def test_weights_that_are_frozen_since_get_none(kind: str) -> None:
    module = MODULES[kind](delay_wgrad_compute=True)
    run(module)
    first = next(p for n, p in module.named_parameters() if n in ("weight", "fc1_weight"))
    first.requires_grad_(False)
    module.backward_dw()
    assert first.grad is None and (kind != "mlp" or module.fc2_weight.grad is not None)


def test_computed_weights_are_refused() -> None:
    module = nn.utils.parametrizations.weight_norm(fnn.Linear(32, 32, delay_wgrad_compute=True))
    with pytest.raises(ValueError, match="weight is computed from others"):
        run(module)
    with torch.no_grad():
        module(torch.ones(2, 32))


def test_gradients_of_sharded_parameters_are_not_lost_in_silence() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module: Any = nn.Sequential(fnn.Linear(32, 32, delay_wgrad_compute=True))
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        run(module)
        with pytest.raises(RuntimeError, match="fully_shard exclude each other"):
            module[0].backward_dw()
    finally:
        dist.destroy_process_group()
