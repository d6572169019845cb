"""autocast and its relatives, with Transformer Engine's order of arguments and defaults."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fourwave.nn import context
from fourwave.nn.context import autocast as _autocast
from fourwave.nn.context import checkpoint as _checkpoint
from fourwave.recipes import Recipe
from fourwave.te.recipe import DelayedScaling


def get_default_recipe() -> Recipe:
    """DelayedScaling(), on every device."""
    return DelayedScaling()


class autocast(_autocast):
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        super().__init__(enabled, get_default_recipe() if recipe is None else recipe, amax_reduction_group, calibrating)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As fourwave.nn.checkpoint; use_reentrant is ignored: it is always the non-reentrant kind, for which, as there,
    distribute_saved_activations and tp_group mean nothing. get_rng_state_tracker: a function that returns an object with get_states
    and set_states, of which each run starts with the same. Older scripts give distribute_saved_activations,
    get_rng_state_tracker and tp_group by position, before the function's arguments."""
    if len(args) > 3 and isinstance(args[0], bool) and callable(args[1]) and _is_group(args[2]):
        warnings.warn(
            "checkpoint: distribute_saved_activations, get_rng_state_tracker and tp_group are now given by name",
            DeprecationWarning,
            stacklevel=2,
        )
        names = "distribute_saved_activations", "get_rng_state_tracker", "tp_group"
        kwargs, args = {**kwargs, **dict(zip(names, args[:3], strict=True))}, args[3:]
    reentrant = kwargs.pop("use_reentrant", True)
    kwargs.pop("tp_group", None)
    if kwargs.pop("distribute_saved_activations", False) and reentrant:
        raise NotImplementedError("distribute_saved_activations=True: activations are not distributed here")
    get_rng_state_tracker = kwargs.pop("get_rng_state_tracker", None)
    if get_rng_state_tracker is not None:
        function = _replaying(function, get_rng_state_tracker)
    return _checkpoint(function, *args, **kwargs)


def _is_group(value: Any) -> bool:
    return value is None or (torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup))


def _replaying(function: Callable[..., Any], get_tracker: Callable[[], Any]) -> Callable[..., Any]:
    """function, whose runs after the first one start with the tracker's states of that one and leave them as they were."""
    first: list[Any] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        tracker = get_tracker()
        before = tracker.get_states()
        if not first:
            first.append(before)
            return function(*args, **kwargs)
        tracker.set_states(first[0])
        try:
            return function(*args, **kwargs)
        finally:
            tracker.set_states(before)

    return run


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    if enabled:
        raise NotImplementedError(
            "parameters of a quantized type are not here: module.store_quantized(recipe) keeps weights in quantized form, and "
            "is_first_microbatch a quantized copy of a parameter"
        )
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    warnings.warn("fp8_model_init is now called quantized_model_init", DeprecationWarning, stacklevel=3)
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield


def _available(return_reason: bool) -> bool | tuple[bool, str]:
    return (True, "") if return_reason else True


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True on every device: the native backend multiplies what the GPU cannot, slowly (fw.explain says which it is)."""
    return _available(return_reason)


is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    return _available(return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    return (False, "NVFP4 is not here") if return_reason else False


def check_fp8_support() -> tuple[bool, str]:
    return True, ""


check_mxfp8_support = check_fp8_block_scaling_support = check_fp8_support


def check_nvfp4_support() -> tuple[bool, str]:
    return False, "NVFP4 is not here"


get_default_fp8_recipe = get_default_recipe


class _Manager(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(
            f"FP8GlobalStateManager has no {name} here: it tells what autocast is in force; the state of delayed scaling is in each module "
            "(delayed_scale, delayed_amax_history)"
        )


class FP8GlobalStateManager(metaclass=_Manager):
    """What scripts ask of Transformer Engine's class of this name. There is no state of the process behind it."""

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether modules quantize in the autocast that is in force."""
        return context.quantizes()

    @staticmethod
    def is_fp8_calibration() -> bool:
        entered = context.entered()
        return entered is not None and entered.calibrating

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """That of the autocast in force, the default one outside."""
        entered = context.entered()
        return get_default_recipe() if entered is None else entered.recipe

    @staticmethod
    def get_fp8_group() -> Any:
        entered = context.entered()
        return None if entered is None else entered.group

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Parameters of a quantized type are not here."""
        return False

    with_high_precision_init_val = with_fp8_parameters

    @staticmethod
    def fp8_graph_capturing() -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    @staticmethod
    def reset() -> None:
        """Nothing: what is in force ends with its `with`, and modules keep their own state."""

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """Nothing: a module makes scales of what it recorded when its next step begins, and evaluation uses them before."""
