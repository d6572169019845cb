"""fw.autocast: which recipe the modules of fourwave.nn use, and which step they are in.

The choice belongs to the context (contextvars), so threads and asyncio tasks do not see each other's. torch.compile cannot
trace a ContextVar: compiled code guards on `_TRACED`, what was entered last in the process.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode

from fourwave.recipes import UNQUANTIZED, CurrentScaling, Plan, Recipe, check_recipe


class Region:
    """One entered autocast.

    plan, observe   how modules quantize; whether they record amax although they do not (calibrating)
    entered         the autocast that it was entered by; None of a module's own recipe
    step            identity of the outermost region: what is in one step
    scales, unread  scales that modules used in the first run of `checkpoint`, and those that the second one has yet to use
    entered_in_backward   by a function that is being recomputed
    remembers  that of the checkpoint around the one whose scales these are: what it runs again finds them, too
    by_last    of a checkpoint that ran first in a recomputation that PyTorch alone knows of
    versions   of the histories that no rank reduces, when the region was entered
    """

    def __init__(
        self,
        plan: Plan,
        *,
        group: Any = None,
        reduces: bool = False,
        observe: Plan | None = None,
        outer: Region | None = None,
        entered: autocast | None = None,
    ) -> None:
        self.plan, self.observe, self.entered = plan, observe, entered
        self.group, self.reduces = group, reduces
        self.outer = outer
        self.step: Region = self if outer is None else outer.step
        self.reduced: set[Any] = self.step.reduced if outer is not None else set()
        self.entered_in_backward = not torch.compiler.is_compiling() and in_backward()
        self.scales: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] | None = None
        self.remembers: Region | None = None
        self.by_last = False
        self.unread: dict[Any, list[torch.Tensor]] = {}
        self.versions: dict[Any, int] = {}


_ACTIVE: contextvars.ContextVar[Region | None] = contextvars.ContextVar("fourwave.autocast", default=None)
_KEEPS_SCALES: contextvars.ContextVar[Region | None] = contextvars.ContextVar("fourwave.checkpoint", default=None)
_FIRST_RUN: contextvars.ContextVar[bool] = contextvars.ContextVar("fourwave.first_run", default=False)
_REPLAYS: contextvars.ContextVar[Region | None] = contextvars.ContextVar("fourwave.recompute", default=None)


class _Traced:
    """What code that torch.compile traces reads instead of _ACTIVE: plan and observe of a region."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.observe: Plan | None = None


_TRACED = _Traced()


def active(last: Region | None) -> Region | None:
    """The region that a module's call is in; `last` is that of its last call outside a backward pass.

    A backward pass runs in other threads, and after the region was left.
    """
    region = _ACTIVE.get()
    return last if last is not None and _goes_by_last(region) else region


def _goes_by_last(region: Region | None) -> bool:
    """Whether modules go by their last regions, not by the active one: in a recomputation that PyTorch alone knows of."""
    if not in_backward() or (region is not None and region.entered_in_backward):
        return False
    replayed = _REPLAYS.get()
    # A checkpoint that ran first in such a recomputation is replayed in the same way.
    return replayed is None or replayed.by_last


def entered() -> autocast | None:
    """The innermost autocast that this context is in."""
    region = _ACTIVE.get()
    return None if region is None else region.entered


def quantizes() -> bool:
    """Whether modules without a recipe of their own quantize in this context."""
    if torch.compiler.is_compiling():
        plan = _TRACED.plan
    else:
        region = _ACTIVE.get()
        plan = None if region is None else region.plan
    return plan is not None and plan.x is not None


def traced() -> tuple[Plan | None, Plan | None]:
    """plan, None where there is no region; observe."""
    return _TRACED.plan, _TRACED.observe


class autocast:  # a function to its callers, hence the name
    """Run the modules of `fourwave.nn` by a recipe: ``with fw.autocast(recipe=fw.recipes.MXFP8()): y = model(x)``.

    enabled     False: modules inside do not quantize, whatever surrounds them
    recipe      a fourwave.recipes.Recipe; default CurrentScaling()
    amax_reduction_group   ranks over which delayed scaling takes the largest amax; default all of them
    calibrating record amax for delayed scaling, with enabled=False too

    Regions nest, the innermost one counts. One region is one step of delayed scaling: enter it for each forward pass, not once for
    a training loop. The backward pass may run inside or outside. Activation checkpointing, reentrant or not, finds the
    region of the first run again; where several forward passes precede a backward pass, use `fourwave.nn.checkpoint`, which also
    keeps the scales of each. Code compiled by torch.compile takes the region entered last in the process. As a decorator,
    ``@fw.autocast(recipe=...)``, each call of the function is a region.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        calibrating: bool = False,
    ) -> None:
        for name, flag in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(flag, (bool, int)):
                raise ValueError(
                    f"{name} is {flag!r}; it must be True or False, and a recipe comes by name: recipe=..."
                )
        check_recipe(recipe, none=True)
        if recipe is None:
            recipe = CurrentScaling()
        self.enabled, self.recipe, self.group, self.calibrating = enabled, recipe, amax_reduction_group, calibrating
        plan = recipe.plan
        if calibrating and not plan.delayed:
            raise ValueError(f"calibrating=True with {recipe}: only DelayedScaling keeps what it would record")
        self._plan = plan if enabled else UNQUANTIZED
        self._observe = plan if calibrating and not enabled else None

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            if kind(function):
                raise ValueError(
                    f"{function!r} is a generator or coroutine, whose body would run after the region has ended: write `with "
                    "fw.autocast(...)` inside"
                )

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with autocast(self.enabled, self.recipe, self.group, self.calibrating):
                return function(*args, **kwargs)

        return run

    def __enter__(self) -> autocast:
        if torch.compiler.is_compiling():
            if self.recipe.reduces_amax and _num_ranks(self.group) > 1:
                raise RuntimeError(
                    "compiled code cannot reduce amax over the ranks: enter fw.autocast outside of it, or use "
                    "DelayedScaling(reduce_amax=False)"
                )
            self._before = _TRACED.plan, _TRACED.observe
            _TRACED.plan, _TRACED.observe = self._plan, self._observe
            return self
        outer = _ACTIVE.get()
        region = Region(
            self._plan, group=self.group, reduces=self.recipe.reduces_amax, observe=self._observe, outer=outer,
            entered=self,
        )  # fmt: skip
        if region.reduces and (torch.is_grad_enabled() or region.observe is not None) and not in_backward():
            _reduce_amax(region)
            _look(region)
        _ACTIVE.set(region)
        _TRACED.plan, _TRACED.observe = region.plan, region.observe
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if torch.compiler.is_compiling():
            _TRACED.plan, _TRACED.observe = self._before
            return
        region = _ACTIVE.get()
        if region is not None and region.reduces:
            _join_changed(region)
        outer = None if region is None else region.outer
        _ACTIVE.set(outer)
        _TRACED.plan, _TRACED.observe = (None, None) if outer is None else (outer.plan, outer.observe)


# ---------------------------------------------------------------------------------------------------------------------
# recomputation


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread: a module that is called then is being recomputed."""
    return torch._C._current_graph_task_id() != -1


def in_reentrant_checkpoint() -> bool:
    """Whether this is the first run of a reentrant checkpoint, which is without gradients although it trains.

    `first_run` says so; PyTorch does not: the frame of its function is looked for on the stack. Of an evaluation, or where no input wants a
    gradient, the function has no edges, and nothing will run again; those within another one have none either.
    """
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    if _FIRST_RUN.get():
        return True
    import sys

    code = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals["ctx"].next_functions:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """What runs inside without gradients is the first run of a checkpoint, and trains."""
    token = _FIRST_RUN.set(True)
    try:
        yield
    finally:
        _FIRST_RUN.reset(token)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint(function, ..., use_reentrant=False) that keeps the recipe and the scales of the
    first run for the second one, whatever happens in between.

    kwargs  those of torch.utils.checkpoint.checkpoint, except use_reentrant and context_fn; the others go to `function`
    """
    for name in ("use_reentrant", "context_fn"):
        if name in kwargs:
            raise ValueError(f"{name} is given by fourwave.nn.checkpoint; use torch.utils.checkpoint to choose it")
    if torch.compiler.is_compiling():
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=_compiled_contexts, **kwargs
        )
    surrounding = _ACTIVE.get()
    by_last = _goes_by_last(surrounding)

    def contexts() -> tuple[Any, Any]:
        # A region of its own, of the same step, so that two checkpoints of one module do not share scales. Without one around it only
        # remembers scales, and modules go by their own recipes.
        region = Region(UNQUANTIZED) if surrounding is None else Region(
            surrounding.plan, group=surrounding.group, reduces=surrounding.reduces, observe=surrounding.observe, outer=surrounding,
            entered=surrounding.entered,
        )  # fmt: skip
        region.scales, region.remembers = weakref.WeakKeyDictionary(), _KEEPS_SCALES.get()
        if by_last:
            region.by_last, region.entered_in_backward = True, False
        active = surrounding is not None
        return _Run(region, _KEEPS_SCALES, active), _Run(region, _REPLAYS, active)

    failure: list[BaseException] = []
    is_first = True

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if not is_first:
            return function(*args, **kwargs)
        is_first = False
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            failure.append(error)
            return None

    # Some releases of PyTorch (2.11 is one) leave their hooks, and the first of `contexts`, only when the traceback of an exception is
    # gone, by when this context is another one: they do not see the exception.
    result = torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    if failure:
        raise failure.pop()
    return result


@torch.library.custom_op("fourwave::spaced_scales", mutates_args=())
def kept_spaced(scale: torch.Tensor) -> torch.Tensor:
    """base.spaced as one operator, whose result compiled checkpoints keep: made again it would be of the next step's scales, since the
    forward pass has written these by then."""
    return scale.unsqueeze(1).expand(-1, 4).contiguous()


@kept_spaced.register_fake
def _(scale: torch.Tensor) -> torch.Tensor:
    return scale.new_empty(scale.shape[0], 4)


def _kept(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """What `mode` does with the operator, and then its node is marked as one that a partitioner must save: torch.utils.checkpoint marks
    all nodes of its function for a second computation."""
    proxies = get_proxy_mode() if not isinstance(mode, ProxyTorchDispatchMode) else mode
    graph = None if proxies is None else proxies.tracer.graph
    known = 0 if graph is None else len(graph.nodes)
    out = mode.__torch_dispatch__(func, types, args, kwargs or {})
    if graph is not None:
        for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - known):
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    return out


# Releases of PyTorch mark nodes as a graph is made, or after it in the mode of selective checkpoints.
for _mode in (ProxyTorchDispatchMode, torch.utils.checkpoint._CachingTorchDispatchMode):
    kept_spaced.register_torch_dispatch(_mode, _kept)


def _compiled_contexts() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.fourwave.spaced_scales.default])


class _Run:
    """A run of a checkpointed function: its region is active, if it is to be, and `variable` says which run it is."""

    def __init__(self, region: Region, variable: contextvars.ContextVar[Region | None], active: bool) -> None:
        self.region, self.variable, self.active = region, variable, active

    def __enter__(self) -> None:
        self._tokens = (_ACTIVE.set(self.region if self.active else None), self.variable.set(self.region))
        if self.variable is _REPLAYS and self.region.scales is not None:
            # A second backward pass through a kept graph recomputes again: each run starts with all of them.
            self.region.unread = {module: list(scales) for module, scales in self.region.scales.items()}

    def __exit__(self, *exc: object) -> None:
        _ACTIVE.reset(self._tokens[0])
        self.variable.reset(self._tokens[1])
        self.region.unread = {}  # modules, which keep their last region: a circle


def keep_scales(module: Any, scales: torch.Tensor) -> None:
    """Remember what `module` used, in the first run of `checkpoint`."""
    region = _KEEPS_SCALES.get()
    while region is not None:
        assert region.scales is not None
        region.scales.setdefault(module, []).append(scales)
        region = region.remembers


def kept_scales(module: Any) -> torch.Tensor | None:
    """What `module` used in the first run, in the second run of `checkpoint`."""
    region = _REPLAYS.get()
    if region is None:
        return None
    waiting = region.unread.get(module)
    return waiting.pop(0) if waiting else None


# ---------------------------------------------------------------------------------------------------------------------
# amax over ranks

# Modules that recorded amax for a group, in the order of their first step, which must be the same on all ranks. Kept with the group
# itself: a later one may get the id() of one that is gone.
_RECORDERS: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, None]] = weakref.WeakKeyDictionary()


class _Ranks:
    """Stands for a group that is no object: the default one (None), and one that this rank is no member of (an int)."""


_ALL_RANKS, _OTHER_RANKS = _Ranks(), _Ranks()
# All that have state, in the order in which they got it.
_STATEFUL: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()


def joins(module: Any, region: Region) -> None:
    """`module` records amax in `region`."""
    if region.reduces:
        _recorders(region.group).setdefault(module)


def _recorders(group: Any) -> weakref.WeakKeyDictionary[Any, None]:
    owner = _ALL_RANKS if group is None else _OTHER_RANKS if isinstance(group, int) else group
    return _RECORDERS.setdefault(owner, weakref.WeakKeyDictionary())


def has_state(module: Any) -> None:
    """`module` may record amax from compiled code, which cannot call `joins`: whether it did shows in its history's version."""
    _STATEFUL.setdefault(module)


def _look(region: Region) -> None:
    if _num_ranks(region.group) > 1:
        known = _recorders(region.group)
        region.versions = {module: module.delayed_amax_history._version for module in _STATEFUL if module not in known}


def _join_changed(region: Region) -> None:
    for module, version in region.versions.items():
        if module.delayed_amax_history._version != version:
            joins(module, region)
    # Modules keep their last region. In a circle they would live until garbage is collected, which each rank does at its own time, and
    # until then take part in the reduction.
    region.versions = {}


def _num_ranks(group: Any) -> int:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size(group)


def _reduce_amax(region: Region) -> None:
    """Once per step and group: the newest row of all histories becomes the largest over the ranks."""
    if region.group in region.reduced or _num_ranks(region.group) == 1:
        return
    region.reduced.add(region.group)
    modules = list(_recorders(region.group))
    rows = [module.delayed_amax_history[0] for module in modules if module.delayed_amax_history is not None]
    if not rows:
        return
    with torch.no_grad():
        amax = torch.cat(rows)
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=region.group)
        for row, reduced in zip(rows, amax.split([row.numel() for row in rows]), strict=True):
            row.copy_(reduced)
    for module in modules:
        module.delayed_recorded()
