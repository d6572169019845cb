"""What the modules share: the recipe of a call, the state of delayed scaling, and how both are saved and loaded."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fourwave.backends import select
from fourwave.nn import context
from fourwave.quantize import api as quantize_api
from fourwave.quantize.tensor import FORMATS
from fourwave.recipes import UNQUANTIZED, Plan, Recipe

Tensor = torch.Tensor

STATE_VERSION = 1
_STATE = ("delayed_scale", "delayed_amax_history")
# Scales that `fw.quantize` takes as given.
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-126, 2.0**126
_SLOTS_PER_LINEAR = 3
INPUT, WEIGHT, GRAD = range(_SLOTS_PER_LINEAR)
_SEEDS = itertools.count()  # of stochastic rounding, made in this process


class Step(NamedTuple):
    """How one call of a module quantizes.

    scales   float32 [slots, 4], see `spaced`, for delayed scaling; history: of the module, to record amax of gradients in, or None
    records  amax of the forward pass is recorded, too: not when it is run a second time
    observe  amax is computed although nothing is quantized
    seed     int64 (), of stochastic rounding: the module's, which each use counts up
    """

    plan: Plan
    scales: Tensor | None = None
    history: Tensor | None = None
    records: bool = False
    observe: bool = False
    fnuz: bool | None = None
    backend: str | None = None
    seed: Tensor | None = None


class QuantizedModule(nn.Module):
    """Base of the modules. `linears` products each have three scales of delayed scaling: input, weight, gradient of the output.

    recipe  used where no fw.autocast is in force; None: unquantized
    """

    linears = 1
    _version = STATE_VERSION
    delayed_scale: Tensor | None
    delayed_amax_history: Tensor | None
    rounding_seed: Tensor | None

    def __init__(self, recipe: Recipe | None = None) -> None:
        nn.Module.__init__(self)  # super() of fourwave.nn.Linear is torch.nn.Linear, whose constructor makes parameters
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ValueError(f"recipe is {recipe!r}; it must be one of fourwave.recipes, such as MXFP8(), or None")
        self.recipe = recipe
        self._plan = None if recipe is None else recipe.plan
        self.register_buffer("delayed_scale", None)
        self.register_buffer("delayed_amax_history", None)
        # Not saved: a run that goes on from a checkpoint rounds otherwise.
        self.register_buffer("rounding_seed", None, persistent=False)
        self._forget()

    def _forget(self) -> None:
        """What belongs to this process and is neither saved nor copied."""
        self._last: context.Region | None = None  # region of the last call outside a backward pass
        self._step: Any = None  # step of the last recorded training call
        # Whether the newest row of the history may hold amax that the scales do not know: so after loading, too.
        self._recorded = True

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_last", "_step"):
            state[name] = None
        state["_recorded"] = True
        return state

    def _prepare_default(self) -> None:
        """The state that the module's own recipe needs; called at the end of __init__."""
        if self._plan is not None:
            self._prepare(self._plan)

    def _prepare(self, plan: Plan) -> None:
        """The state that `plan` needs."""
        device = next(iter(self.parameters())).device
        if plan.delayed:
            self._allocate(plan.history, device)
        if plan.stochastic:
            self._make_seed(device)

    def _make_seed(self, device: torch.device) -> Tensor:
        """int64 (): made at its first use from torch.initial_seed() and the number of seeds made before, far from every other
        module's."""
        if self.rounding_seed is None:
            start = (torch.initial_seed() + next(_SEEDS) * 0x9E3779B97F4A7C15) % 2**62
            self.rounding_seed = torch.full((), start, dtype=torch.int64, device=device)
        return self.rounding_seed

    # -- the recipe of a call

    def _begin(self, device: torch.device) -> Step:
        """Called once at the start of a forward pass."""
        if torch.compiler.is_compiling():
            return self._begin_traced()
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{type(self).__name__} does not run under transforms of torch.func (grad, vjp, vmap, ...): between forward and backward "
                "pass it keeps quantized operands, which they do not carry. torch.func.functional_call and backward() work"
            )
        region = context.active(self._last)
        if region is None:
            if self._plan is None:
                return Step(UNQUANTIZED, backend=select.requested(None)[0])
            region = context.Region(self._plan)
        recomputed = context.in_backward()
        if not recomputed:
            self._last = region
        plan = region.plan
        backend = select.requested(None)[0]
        fnuz = _fnuz(device, backend)
        stateful = plan if plan.delayed else region.observe
        if stateful is None:
            return Step(plan, fnuz=fnuz, backend=backend, seed=self._make_seed(device) if plan.stochastic else None)
        self._allocate(stateful.history, device)
        assert self.delayed_scale is not None and self.delayed_amax_history is not None
        trains = not recomputed and (torch.is_grad_enabled() or context.in_reentrant_checkpoint())
        if trains:
            if self._step is not region.step:
                self._step = region.step
                if self._recorded:
                    self._update(stateful, fnuz)
                context.joins(self, region)
            self._recorded = True
        scales = context.kept_scales(self) if recomputed else None
        if scales is None:
            scales = spaced(self.delayed_scale)
            context.keep_scales(self, scales)
        history = self.delayed_amax_history if trains or torch.is_grad_enabled() else None
        return Step(plan, scales, history, trains, region.observe is not None, fnuz, backend)

    def _begin_traced(self) -> Step:
        plan = context.traced_plan()
        if plan is None:
            plan = UNQUANTIZED if self._plan is None else self._plan
        if plan.stochastic and self.rounding_seed is None:
            raise RuntimeError(
                "torch.compile cannot make the seed of stochastic rounding: call fourwave.nn.prepare(model, recipe) first, "
                "or give the module its recipe"
            )
        if not plan.delayed:
            return Step(plan, seed=self.rounding_seed if plan.stochastic else None)
        history, scale = self.delayed_amax_history, self.delayed_scale
        if history is None or scale is None or history.shape[0] != plan.history:
            raise RuntimeError(
                "torch.compile cannot make the state of delayed scaling: call fourwave.nn.prepare(model, recipe) first, "
                "or give the module its recipe"
            )
        grad, fnuz = torch.is_grad_enabled(), _fnuz(scale.device, None)
        if grad:
            self._update(plan, fnuz)
        return Step(plan, spaced(scale), history if grad else None, grad, fnuz=fnuz)

    # -- delayed scaling

    @property
    def _slots(self) -> int:
        return _SLOTS_PER_LINEAR * self.linears

    def _allocate(self, length: int, device: torch.device) -> None:
        """State of delayed scaling with a history of `length`: made, or the history cut or padded with zeros at its old end."""
        if self.delayed_scale is None or self.delayed_amax_history is None:
            self.delayed_scale = torch.ones(self._slots, device=device)
            self.delayed_amax_history = torch.zeros(length, self._slots, device=device)
        elif len(self.delayed_amax_history) != length:
            self.delayed_amax_history = resized(self.delayed_amax_history, length)

    @torch.no_grad()
    def _update(self, plan: Plan, fnuz: bool) -> None:
        """Scales from the history; see recipes.DelayedScaling."""
        scale, history = self.delayed_scale, self.delayed_amax_history
        assert scale is not None and history is not None
        if callable(plan.algo):
            amax = plan.algo(history).clone()
        else:
            amax = history.amax(0) if plan.algo == "max" else history[0].clone()
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history.copy_(rolled)
        largest = [_largest(name, fnuz) for name in (plan.x, plan.w, plan.g)]
        if plan.rescale is not None:
            function, recipe = plan.rescale
            fmax = amax.new_zeros(self._slots)
            for slot, value in enumerate(largest):
                fmax[slot::_SLOTS_PER_LINEAR].fill_(value)
            scale.copy_(function(amax, scale, fmax, recipe))
            return
        new = torch.stack(
            [amax[slot::_SLOTS_PER_LINEAR] * (2.0**plan.margin / value) for slot, value in enumerate(largest)], dim=1
        ).flatten()
        usable = amax.isfinite() & (amax > 0)
        scale.copy_(torch.where(usable, new.clamp(_SMALLEST_SCALE, _LARGEST_SCALE), scale))
        if not torch.compiler.is_compiling():
            self._recorded = False

    def delayed_recorded(self) -> None:
        """The history's newest row was written by someone else: the next step makes scales of it."""
        self._recorded = True

    # -- saving and loading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        # Scales and amax stay float32, and codes what they are, whatever the module is cast to.
        state = {name: tensor for name in self._uncast() if (tensor := getattr(self, name)) is not None}
        moved = {name: fn(tensor) for name, tensor in state.items()}
        try:
            for name in state:
                setattr(self, name, None)
            super()._apply(fn, recurse)
            for name, tensor in state.items():
                state[name] = moved[name] if moved[name].dtype == tensor.dtype else tensor.to(moved[name].device)
        finally:  # also where a parameter cannot be moved: the tensors as they were
            for name, tensor in state.items():
                setattr(self, name, tensor)
        return self

    def _uncast(self) -> list[str]:
        """Buffers whose type is not the module's."""
        return list(_STATE)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        foreign = prefix + "_extra_state"
        if foreign in state_dict:
            state_dict.pop(foreign)
            warnings.warn(
                f"{foreign}: Transformer Engine's pickled state is not read; delayed scaling starts anew", stacklevel=2
            )
        names = [prefix + name for name in _STATE]
        if all(name in state_dict for name in names):
            self._take_state(state_dict, names, prefix, local_metadata, error_msgs)
        unasked: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, unasked, unexpected_keys, error_msgs
        )  # fmt: skip
        # A checkpoint of another recipe, or of nn.Linear, has no such state.
        missing_keys += [name for name in unasked if name not in names]

    def _take_state(
        self, state_dict: dict[str, Any], names: list[str], prefix: str, metadata: dict[str, Any], errors: list[str]
    ) -> None:
        version = metadata.get("version")
        if version is None or version < STATE_VERSION:
            warnings.warn(
                f"{prefix[:-1] or 'module'}: state of delayed scaling of version {version}; it is read as version {STATE_VERSION}",
                stacklevel=3,
            )
        elif version > STATE_VERSION:
            warnings.warn(
                f"{prefix[:-1] or 'module'}: state of delayed scaling of version {version}, newer than this package's "
                f"{STATE_VERSION}; it is read as version {STATE_VERSION}",
                stacklevel=3,
            )
        scale, history = (state_dict[name] for name in names)
        if tuple(scale.shape) != (self._slots,) or history.dim() != 2 or history.shape[1] != self._slots:
            errors.append(
                f"{names[1]} is {tuple(history.shape)} and {names[0]} {tuple(scale.shape)}; this {type(self).__name__} has "
                f"{self._slots} scales"
            )
            return
        if self.delayed_amax_history is None:
            device = next(iter(self.parameters()), scale).device
            self._allocate(len(history), device)
        assert self.delayed_amax_history is not None
        state_dict[names[1]] = resized(history, len(self.delayed_amax_history))
        self._recorded = True


def spaced(scale: Tensor) -> Tensor:
    """A copy of scales [slots] as [slots, 4], whose column 0 is theirs: 16 bytes apart, as cuBLASLt wants them."""
    return scale.unsqueeze(1).expand(-1, 4).contiguous()


def resized(history: Tensor, length: int) -> Tensor:
    """History with `length` rows. Row 0 is the newest, then comes the oldest (Transformer Engine's order): the oldest rows go
    where it is cut, and zeros come before the oldest where it is padded."""
    newest, rest = history[:1], history[1:]
    if length <= len(history):
        return torch.cat((newest, rest[len(history) - length :])).contiguous()
    return torch.cat((newest, history.new_zeros(length - len(history), history.shape[1]), rest))


def _largest(name: str | None, fnuz: bool) -> float:
    assert name is not None
    return FORMATS[name].code_format(fnuz).max


def _fnuz(device: torch.device, backend: str | None) -> bool:
    """Whether codes are gfx942's, decided once for scales and codes: their largest values differ."""
    return quantize_api.reads_fnuz(device, backend)


def record(history: Tensor, slot: int, amax: Tensor) -> None:
    """The newest row keeps the largest amax of all calls in a step; NaN stays."""
    newest = history[0, slot]
    newest.copy_(torch.maximum(newest, amax))


def prepare(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Make the state that `recipe` needs in every module of `model`, as a training step would; returns model.

    For loading a distributed checkpoint into a fresh model, with DelayedScaling, and before torch.compile, with that or
    stochastic rounding.
    """
    plan = recipe.plan
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module._prepare(plan)
    return model
