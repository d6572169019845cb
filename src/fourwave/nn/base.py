"""What the modules share: the recipe of a call, the state of delayed scaling, and how both are saved and loaded."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fourwave.backends import select
from fourwave.nn import context
from fourwave.quantize import api as quantize_api
from fourwave.quantize.tensor import FORMATS
from fourwave.recipes import UNQUANTIZED, Plan, Recipe, check_recipe

Tensor = torch.Tensor

STATE_VERSION = 1
_STATE = ("delayed_scale", "delayed_amax_history")  # saved
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


class EvaluationScales(NamedTuple):
    """Scales that evaluation used, and what they were made of: scale and history, and their versions and the rest in `how`."""

    scale: Tensor
    history: Tensor
    how: tuple[Any, ...]
    scales: Tensor


class QuantizedModule(nn.Module):
    """Base of the modules. `linears` products each have three scales of delayed scaling: input, weight, gradient of the output.

    recipe  used where no fw.autocast is in force; None: unquantized

    delayed_scale float32 [slots], delayed_amax_history float32 [length, slots] and rounding_seed int64 () are made when they are
    first needed. They are tensors of the module and in its state_dict (but for the seed), and no buffers: those
    DistributedDataParallel overwrites with rank 0's at each forward pass.
    """

    linears = 1
    _version = STATE_VERSION
    delayed_scale: Tensor | None
    delayed_amax_history: Tensor | None
    rounding_seed: Tensor | None

    def __init__(self, recipe: Recipe | None = None) -> None:
        nn.Module.__init__(self)  # super() of fourwave.nn.Linear is torch.nn.Linear, whose constructor makes parameters
        self.recipe = recipe
        self.delayed_scale = self.delayed_amax_history = None
        # Not saved: a run that goes on from a checkpoint rounds otherwise.
        self.rounding_seed = None
        self._forget()

    @property
    def recipe(self) -> Recipe | None:
        """Used where no fw.autocast is in force; may be set."""
        return self.__dict__["recipe"]

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        check_recipe(recipe, none=True)
        self.__dict__["recipe"] = recipe
        self._plan = None if recipe is None else recipe.plan
        if "delayed_scale" in self.__dict__:  # the constructor prepares at its end
            self._prepare_default()

    def _forget(self) -> None:
        """What belongs to this process and is neither saved nor copied."""
        # Regions of the last calls outside a backward pass, which a recomputation finds again: of those that it runs with gradients, and of
        # those without. An evaluation between forward and backward pass, of a reference say, is among the latter.
        self._last: context.Region | None = None
        self._last_without: context.Region | None = None
        self._step: Any = None  # step of the last recorded training call
        self._evaluated: EvaluationScales | None = None
        self._captured = False  # a training step in a CUDA graph, whose replay moves no version counter

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_last", "_last_without", "_step", "_evaluated"):
            state[name] = None
        state["_captured"] = False
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of copies and of what was pickled."""
        super().__setstate__(state)
        if self.delayed_scale is not None:
            context.has_state(self)

    def _prepare_default(self) -> None:
        """The state that the module's own recipe needs; called at the end of __init__."""
        if self._plan is not None:
            self._prepare(self._plan)

    def _prepare(self, plan: Plan) -> None:
        """The state that `plan` needs."""
        device = self._device()
        if plan.delayed:
            self._allocate(plan.history, device)
        if plan.stochastic:
            self._make_seed(device)

    def _device(self) -> torch.device:
        for t in itertools.chain(self.parameters(), self.buffers()):
            return t.device
        return torch.get_default_device()

    @torch.inference_mode(False)
    def _make_seed(self, device: torch.device) -> Tensor:
        """int64 (): made at its first use from torch.initial_seed() and the number of seeds made before, far from every other
        module's."""
        if self.rounding_seed is None:
            start = (torch.initial_seed() + next(_SEEDS) * 0x9E3779B97F4A7C15) % 2**62
            self.rounding_seed = torch.full((), start, dtype=torch.int64, device=device)
        return self.rounding_seed

    def _reset_state(self) -> None:
        """What delayed scaling and stochastic rounding remember, as in a new module; for reset_parameters."""
        with torch.no_grad():
            if self.delayed_scale is not None:
                self.delayed_scale.fill_(1)
            if self.delayed_amax_history is not None:
                self.delayed_amax_history.zero_()
            if self.rounding_seed is not None:
                device, self.rounding_seed = self.rounding_seed.device, None
                self._make_seed(device)

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
        grad = torch.is_grad_enabled()
        region = context.active(self._last if grad else self._last_without)
        if region is None:
            if self._plan is None:
                return Step(UNQUANTIZED, backend=select.requested(None)[0])
            region = context.Region(self._plan)
        recomputed = context.in_backward()
        reentrant = not grad and not recomputed and context.in_reentrant_checkpoint()
        if not recomputed:
            if grad or reentrant:
                self._last = region
            if not grad:
                self._last_without = region
        plan = region.plan
        backend = select.requested(None)[0]
        fnuz = _fnuz(device, backend)
        stateful = plan if plan.delayed else region.observe
        if stateful is None:
            return Step(plan, fnuz=fnuz, backend=backend, seed=self._make_seed(device) if plan.stochastic else None)
        # Calibrating is done without gradients, too.
        trains = reentrant or (not recomputed and (grad or region.observe is not None))
        if trains or self.delayed_scale is None:
            self._allocate(stateful.history, device)
        assert self.delayed_scale is not None and self.delayed_amax_history is not None
        if trains:
            self._captured = self._captured or _capturing(device)
            if self._step is not region.step:
                self._step = region.step
                self._update(stateful, fnuz)
                context.joins(self, region)
        scales = context.kept_scales(self) if recomputed else None
        if scales is None:
            if recomputed or trains:
                scales = spaced(self.delayed_scale)
            else:
                scales = self._evaluation_scales(stateful, fnuz, self._step is not region.step)
            context.keep_scales(self, scales)
        history = self.delayed_amax_history if trains or torch.is_grad_enabled() else None
        return Step(plan, scales, history, trains, region.observe is not None, fnuz, backend)

    def _begin_traced(self) -> Step:
        plan, observe = context.traced()
        if plan is None:
            plan = UNQUANTIZED if self._plan is None else self._plan
        if plan.stochastic and self.rounding_seed is None:
            raise RuntimeError(
                "torch.compile cannot make the seed of stochastic rounding: call fourwave.nn.prepare(model, recipe) first, "
                "or give the module its recipe"
            )
        stateful = plan if plan.delayed else observe
        if stateful is None:
            return Step(plan, seed=self.rounding_seed if plan.stochastic else None)
        history, scale = self.delayed_amax_history, self.delayed_scale
        if history is None or scale is None or history.shape[0] != stateful.history:
            raise RuntimeError(
                "torch.compile cannot make the state of delayed scaling: call fourwave.nn.prepare(model, recipe) first, "
                "or give the module its recipe"
            )
        grad, fnuz = torch.is_grad_enabled() or observe is not None, _fnuz(scale.device, None)
        if grad:
            self._update(stateful, fnuz)
        else:
            scale = self._next_scale(stateful, fnuz)
        return Step(plan, spaced(scale), history if grad else None, grad, observe is not None, fnuz)

    # -- delayed scaling

    @property
    def _slots(self) -> int:
        return _SLOTS_PER_LINEAR * self.linears

    @torch.inference_mode(False)
    def _allocate(self, length: int, device: torch.device) -> None:
        """State of delayed scaling with a history of `length`: made, or the history cut or padded with zeros at its old end."""
        context.has_state(self)
        if self.delayed_scale is None or self.delayed_amax_history is None:
            self.delayed_scale = torch.ones(self._slots, dtype=torch.float32, device=device)
            self.delayed_amax_history = torch.zeros(length, self._slots, dtype=torch.float32, device=device)
        elif len(self.delayed_amax_history) != length:
            self.delayed_amax_history = resized(self.delayed_amax_history, length)

    @torch.no_grad()
    def _update(self, plan: Plan, fnuz: bool) -> None:
        """Scales from the history; see recipes.DelayedScaling."""
        assert self.delayed_scale is not None and self.delayed_amax_history is not None
        scale, history = self._next_scale(plan, fnuz), self._next_history(plan)
        self.delayed_scale.copy_(scale)
        self.delayed_amax_history.copy_(history)

    @torch.no_grad()
    def _next_scale(self, plan: Plan, fnuz: bool) -> Tensor:
        """Scale of the next step."""
        scale, history = self.delayed_scale, self.delayed_amax_history
        assert scale is not None and history is not None
        if len(history) != plan.history:  # of an evaluation
            history = resized(history, plan.history)
        newest = history[0]
        if callable(plan.algo):
            amax = plan.algo(history).clone()
        else:
            amax = history.amax(0) if plan.algo == "max" else newest
        largest = [_largest(name, fnuz) for name in (plan.x, plan.w, plan.g)]
        if plan.rescale is not None:
            function, recipe = plan.rescale
            fmax = amax.new_zeros(self._slots)
            for slot, value in enumerate(largest):
                fmax[slot::_SLOTS_PER_LINEAR].fill_(value)
            return function(amax.clone(), scale, fmax, recipe)
        # Few operators, for each is a launch, and numbers of the host: a tensor of them could not be captured.
        factors = [2.0**plan.margin / value for value in largest]
        new = amax * factors[0]
        for slot in range(1, _SLOTS_PER_LINEAR):
            if factors[slot] != factors[0]:
                new[slot::_SLOTS_PER_LINEAR] = amax[slot::_SLOTS_PER_LINEAR] * factors[slot]
        usable = (amax > 0) & (amax < float("inf"))
        if not callable(plan.algo):
            usable = usable & (newest != 0)  # a tensor that the step did not see keeps its scale
        return torch.where(usable, new.clamp(_SMALLEST_SCALE, _LARGEST_SCALE), scale)

    @torch.no_grad()
    def _next_history(self, plan: Plan) -> Tensor:
        """History of the next step."""
        history = self.delayed_amax_history
        assert history is not None
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        if callable(plan.algo) or plan.rescale is not None:
            return rolled
        return torch.where(history[0] != 0, rolled, history)  # what the step did not see keeps its history

    def _evaluation_scales(self, plan: Plan, fnuz: bool, ahead: bool) -> Tensor:
        """`spaced` scales of an evaluation: with `ahead` those of the next step, which it knows and does not make. Kept from call to call
        while scale and history are the same tensors of the same version."""
        scale, history = self.delayed_scale, self.delayed_amax_history
        assert scale is not None and history is not None
        # No version tells of what a graph writes, nor of tensors without one; what is captured or traced must compute them, and functions
        # of the recipe are anyone's.
        kept = (
            type(scale) is type(history) is Tensor
            and not scale.is_inference()
            and not history.is_inference()
            and not callable(plan.algo)
            and plan.rescale is None
            and not self._captured
            and not _capturing(scale.device)
            and _get_current_dispatch_mode() is None
        )
        how = None
        if kept:
            stream = torch.cuda.current_stream(scale.device).cuda_stream if scale.is_cuda else None
            how = (ahead, plan, fnuz, stream, scale._version, scale.data_ptr(), history._version, history.data_ptr())
            known = self._evaluated
            if known is not None and known.scale is scale and known.history is history and known.how == how:
                return known.scales
        with torch.inference_mode(False), torch.no_grad():
            scales = spaced(self._next_scale(plan, fnuz) if ahead else scale)
        self._evaluated = None if how is None else EvaluationScales(scale, history, how, scales)
        return scales

    def delayed_recorded(self) -> None:
        """Scale or history were written in a way that moves no version counter: evaluation makes its scales anew."""
        self._evaluated = None

    # -- saving and loading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedModule:
        # Scales and amax stay float32, and codes what they are, whatever the module is cast to.
        state = {name: tensor for name in self._uncast() if (tensor := getattr(self, name)) is not None}
        moved = {name: fn(tensor) for name, tensor in state.items()}
        filled = [name for name, tensor in state.items() if tensor.is_meta and not moved[name].is_meta]
        try:
            for name in state:
                setattr(self, name, None)
            super()._apply(fn, recurse)
            for name, tensor in state.items():
                state[name] = moved[name] if moved[name].dtype == tensor.dtype else tensor.to(moved[name].device)
        finally:  # also where a parameter cannot be moved: the tensors as they were
            for name, tensor in state.items():
                setattr(self, name, tensor)
        if any(name in filled for name in (*_STATE, "rounding_seed")):  # by to_empty, with anything
            self._reset_state()
        return self

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
        """Asked for this module alone, as torch.distributed.checkpoint and fully_shard do: with what state_dict holds."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            yield from (
                (f"{prefix}.{name}" if prefix else name, t) for name in _STATE if (t := getattr(self, name)) is not None
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _STATE:
            if (tensor := getattr(self, name)) is not None:
                destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _uncast(self) -> list[str]:
        """Tensors whose type is not the module's."""
        return [*_STATE, "rounding_seed"]

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
        # A checkpoint of another recipe, or of nn.Linear, has no such state.
        found = {name: state_dict.pop(prefix + name) for name in _STATE if prefix + name in state_dict}
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # fmt: skip
        if len(found) == 1:
            error_msgs.append(f"{prefix}{next(iter(found))} is there alone; {' and '.join(_STATE)} belong together")
        elif found:
            self._take_state(found[_STATE[0]], found[_STATE[1]], prefix, local_metadata, error_msgs)
        device = self._device()
        if self.delayed_scale is not None and self.delayed_scale.is_meta and device.type != "meta":
            # load_state_dict(assign=True) of a checkpoint without state.
            assert self.delayed_amax_history is not None
            length, self.delayed_scale = len(self.delayed_amax_history), None
            self._allocate(length, device)
        if self.rounding_seed is not None and self.rounding_seed.is_meta and device.type != "meta":
            self.rounding_seed = None
            self._make_seed(device)

    def _take_state(
        self, scale: Tensor, history: Tensor, prefix: str, metadata: dict[str, Any], errors: list[str]
    ) -> None:  # fmt: skip
        # safetensors, distributed checkpoints and plain dicts keep no versions.
        version = metadata.get("version", STATE_VERSION)
        if version < STATE_VERSION:
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
        if tuple(scale.shape) != (self._slots,) or history.dim() != 2 or history.shape[1] != self._slots:
            errors.append(
                f"{prefix}{_STATE[1]} is {tuple(history.shape)} and {prefix}{_STATE[0]} {tuple(scale.shape)}; this "
                f"{type(self).__name__} has {self._slots} scales"
            )
            return
        if not scale.is_meta and not bool((scale.isfinite() & (scale > 0)).all()):
            errors.append(f"{prefix}{_STATE[0]} is {scale.tolist()}; scales are positive and finite")
            return
        length = len(history) if self.delayed_amax_history is None else len(self.delayed_amax_history)
        device = self._device()
        if self.delayed_scale is None or self.delayed_scale.device != device:
            self.delayed_scale = None
            self._allocate(length, device)
        assert self.delayed_scale is not None and self.delayed_amax_history is not None
        with torch.no_grad():
            self.delayed_scale.copy_(scale)
            self.delayed_amax_history.copy_(resized(history, length))


def spaced(scale: Tensor) -> Tensor:
    """A copy of scales [slots] as [slots, 4], whose column 0 is theirs: 16 bytes apart, as cuBLASLt wants them."""
    if torch.compiler.is_compiling():
        return context.kept_spaced(scale)
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


def _capturing(device: torch.device) -> bool:
    """Whether what runs is recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _fnuz(device: torch.device, backend: str | None) -> bool:
    """Whether codes are gfx942's, decided once for scales and codes: their largest values differ."""
    return quantize_api.reads_fnuz(device, backend)


def record(history: Tensor, slot: int, amax: Tensor) -> None:
    """The newest row keeps the largest amax of all calls in a step. NaN is left out, as in Transformer Engine: a step that fails
    must not keep the scale for as long as the history remembers it."""
    newest = history[0, slot]
    newest.copy_(torch.fmax(newest, amax))


def prepare(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Make the state that `recipe` needs in every module of `model`, as a training step would; returns model.

    For loading a distributed checkpoint into a fresh model, with DelayedScaling, and before torch.compile, with that or
    stochastic rounding.
    """
    check_recipe(recipe)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    plan = recipe.plan
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module._prepare(plan)
    return model
