"""Linears of any model replaced by those of this package."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses import FakeTensor

from fourwave.nn.linear import Linear
from fourwave.nn.weights import WatchedParameter
from fourwave.recipes import Recipe

_LOG = logging.getLogger("fourwave.convert")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of a module's own attributes, those that the new module has itself, or takes one by one.
_TAKEN_APART = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: Callable[[str, nn.Linear], bool] | None = None
) -> nn.Module:
    """Replace torch.nn.Linear modules of `model`, in place, by `fourwave.nn.Linear` with the same parameters; returns model.

    recipe  of the new modules, used where no fw.autocast is in force; None: by autocast only
    filter  function of the module's name and the module: True to replace it. Default: all

    Parameters are the same objects: an optimizer that has them, and weights that are tied, stay right. Names in state_dict do
    not change; hooks, buffers, submodules and attributes of a replaced module go with it. A module that occurs in several
    places is replaced by one.

    Left alone, with the reason in logger "fourwave.convert": subclasses of torch.nn.Linear, and Linears with a `forward` of their
    own, which may compute something else; Linears whose weight is no parameter of its own (torch.nn.utils.weight_norm, spectral_norm,
    prune), is of a tensor subclass, or of a dtype that the modules do not multiply. Linears that FSDP2 or parallelize_module
    have sharded raise ValueError, for they keep hold of the old module. If something raises, the model is as it was.

    PyTorch's transformer encoders have a fast path for evaluation that reads the weights of their Linears; it is switched off
    where those are replaced.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    made: dict[int, tuple[nn.Linear, Linear]] = {}
    places: list[tuple[nn.Module, str, nn.Linear]] = []
    left: dict[str, str] = {}

    def chosen(path: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        reason = _why_left(path, module)
        if reason is not None:
            left[path] = reason
            return False
        if filter is not None and not filter(path, module):
            return False
        if id(module) not in made:
            made[id(module)] = (module, _new(module, recipe))
        return True

    if chosen("", model):
        for old, new in made.values():
            _adopt(new, old)
            return new
    for prefix, parent in model.named_modules(remove_duplicate=False):
        for name, child in parent._modules.items():  # named_children leaves repetitions out
            if child is not None and chosen(f"{prefix}.{name}" if prefix else name, child):
                assert isinstance(child, nn.Linear)
                places.append((parent, name, child))
    for old, new in made.values():
        _adopt(new, old)
    for parent, name, child in places:
        setattr(parent, name, made[id(child)][1])
        if id(parent) in made:  # a Linear that holds another
            setattr(made[id(parent)][1], name, made[id(child)][1])
    _without_fast_paths(model)
    for path, reason in left.items():
        _LOG.info("%s is left alone: %s", path, reason)
    return model


def _why_left(path: str, module: nn.Linear) -> str | None:
    if isinstance(module, Linear):
        return f"it is one of this package already, with recipe={module.recipe}, which may be set"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    for name in ("forward", "_compiled_call_impl"):
        if module.__dict__.get(name) is not None:
            return f"it has a {name} of its own"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return f"its {name} is no parameter but computed"
        parameter = module._parameters[name]
        if parameter is None:
            continue
        if type(parameter).__name__ == "DTensor":
            raise ValueError(
                f"{name} of {path or 'model'} is a DTensor: convert before fully_shard and parallelize_module"
            )
        if type(parameter) not in (nn.Parameter, WatchedParameter, FakeTensor):
            return f"its {name} is a {type(parameter).__name__}"
        if parameter.dtype not in _DTYPES:
            return f"its {name} is {parameter.dtype}"
    if module._parameters["weight"] is None:
        return "it has no weight"
    names = [*module.__dict__, *module._parameters, *module._buffers, *module._modules]
    taken = [name for name in names if name in _own()]
    if taken:
        return f"its attribute {taken[0]} is one of fourwave.nn.Linear's"
    return None


def _new(old: nn.Linear, recipe: Recipe | None) -> Linear:
    with torch.device("meta"):
        new = Linear(old.in_features, old.out_features, old.bias is not None, recipe=recipe)
    new.weight, new.bias = old.weight, old.bias
    new.delayed_scale = new.delayed_amax_history = new.rounding_seed = None  # on the meta device, too
    new._prepare_default()
    return new


def _adopt(new: Linear, old: nn.Linear) -> None:
    """All else that `old` has."""
    for name, parameter in old._parameters.items():
        if name not in new._parameters:
            new.register_parameter(name, parameter)
    for name, buffer in old._buffers.items():
        new.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
    for name, module in old._modules.items():
        new.add_module(name, module)
    for name, value in old.__dict__.items():
        if name in _TAKEN_APART:
            continue
        if isinstance(value, types.MethodType) and value.__self__ is old:
            value = types.MethodType(value.__func__, new)
        new.__dict__[name] = value
    for hook in old._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)  # type: ignore[attr-defined]


def _without_fast_paths(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _replaced(module):
            # What the layer asks before it takes the path.
            module.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(map(_replaced, module.layers)):
            module.use_nested_tensor = False  # which only that path takes


def _replaced(layer: nn.Module) -> bool:
    return any(isinstance(getattr(layer, name, None), Linear) for name in ("linear1", "linear2"))


@functools.cache
def _own() -> frozenset[str]:
    """Names that fourwave.nn.Linear has and torch.nn.Linear has not."""
    with torch.device("meta"):
        linear, plain = Linear(1, 1), nn.Linear(1, 1)
    return frozenset({*dir(linear)} - {*dir(plain)})
