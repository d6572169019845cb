"""Linears of any model replaced by those of this package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fourwave.nn.linear import Linear
from fourwave.recipes import Recipe


def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: Callable[[str, nn.Linear], bool] | None = None
) -> nn.Module:
    """Replace torch.nn.Linear modules of `model`, in place, by `fourwave.nn.Linear` with the same parameters; returns model.

    recipe  of the new modules, used where no fw.autocast is in force; None: by autocast only
    filter  function of the module's name and the module: True to replace it. Default: all

    Parameters are the same objects: an optimizer that has them, and weights that are tied, stay right. Names in state_dict do
    not change; hooks of a replaced module go with it. Subclasses of torch.nn.Linear are left alone, since their forward may
    be another. A module that occurs in several places is replaced by one.
    """
    made: dict[int, Linear] = {}
    for prefix, parent in list(model.named_modules(remove_duplicate=False)):
        for name, child in list(parent._modules.items()):  # named_children leaves repetitions out
            if type(child) is not nn.Linear:
                continue
            if id(child) not in made:
                path = f"{prefix}.{name}" if prefix else name
                if filter is not None and not filter(path, child):
                    continue
                made[id(child)] = _converted(child, recipe)
            setattr(parent, name, made[id(child)])
    if type(model) is nn.Linear:
        if filter is None or filter("", model):
            return _converted(model, recipe)
    return model


def _converted(old: nn.Linear, recipe: Recipe | None) -> Linear:
    with torch.device("meta"):
        new = Linear(old.in_features, old.out_features, old.bias is not None, recipe=recipe)
    new.weight, new.bias = old.weight, old.bias  # type: ignore[assignment]
    if new.delayed_scale is not None:
        new.delayed_scale = new.delayed_amax_history = None
        new._prepare_default()
    new.train(old.training)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
                 "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        setattr(new, name, getattr(old, name))
    return new
