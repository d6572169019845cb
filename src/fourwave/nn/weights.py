"""Weights quantized once for several microbatches, and never used after they have changed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fourwave.nn.products import Pair

Tensor = torch.Tensor


class WatchedParameter(torch.nn.Parameter):
    """A parameter that counts who took its `.data` or its storage, or handed it to another library through DLPack: writes through
    those do not move the version counter.

    A module makes its weight one when it first keeps a quantized copy. Operations on it give plain tensors. PyTorch's
    optimizers choose their fused and foreach forms by themselves for plain parameters only: ask for them (fused=True).
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        if torch.compiler.is_compiling():
            # Dynamo would read `_DATA` by calling this function. What compiled code writes moves the version counter.
            return self.detach()
        self.aliases_taken = getattr(self, "aliases_taken", 0) + 1
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.aliases_taken = getattr(self, "aliases_taken", 0) + 1
        _DATA.__set__(self, value)

    def detach(self) -> Tensor:
        """A plain tensor, but to `torch.nn.Parameter(weight)`, which refuses a weight whose detach() is of another type."""
        alias = _detach(self)
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            return torch.Tensor._make_subclass(WatchedParameter, alias)
        return alias

    def untyped_storage(self) -> Any:
        self.aliases_taken = getattr(self, "aliases_taken", 0) + 1
        return _storage(self)

    def storage(self) -> Any:
        self.aliases_taken = getattr(self, "aliases_taken", 0) + 1
        return super().storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        self.aliases_taken = getattr(self, "aliases_taken", 0) + 1
        return super().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


_DATA: Any = torch._C.TensorBase.data
_detach: Any = torch._C.TensorBase.detach
_storage: Any = torch._C.TensorBase.untyped_storage


class _Steps:
    """Counts the steps of all optimizers of the process."""

    def __init__(self) -> None:
        self.taken = 0
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            register_optimizer_step_post_hook(self._step)

    def _step(self, *_: Any) -> None:
        self.taken += 1


_STEPS = _Steps()


class WeightCache:
    """The quantized form of one weight, with what tells that the weight is still the one it was made from.

    It is the same parameter object, at the same address of the same storage, with the same version counter; no optimizer has
    taken a step (fused ones leave the version counter alone); nobody took its `.data` or its storage, and nobody but the parameter
    holds its storage, neither then nor now. What is not seen: docs/modules.md.
    """

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._pair: Pair | None = None

    def get(
        self,
        weight: Tensor,
        how: tuple[Any, ...],
        make: Callable[[], Pair],
        *,
        refresh: bool,
        parts: Sequence[Tensor] = (),
    ) -> Pair:
        """The kept pair where it is right, else a new one, kept if it can be watched. how: all that `make` depends on.

        parts  the parameters that the weight was joined of, if it is none itself; they may share its storage
        """
        watched = list(parts) or [weight]
        for each in watched:
            if type(each) is torch.nn.Parameter:
                each.__class__ = WatchedParameter
        if any(not isinstance(each, WatchedParameter) or each.is_inference() for each in watched):  # no version counter
            return make()
        _STEPS.watch()
        known = [*watched, *[weight] * bool(parts)]
        if self._pair is not None and not refresh and (how, *_identity(watched)) == self._key and not _shared(known):
            return self._pair
        self.clear()
        pair = make()
        if not _shared(known):
            self._key, self._pair = (how, *_identity(watched)), pair
        return pair

    def clear(self) -> None:
        self._key = self._pair = None


def _identity(weights: Sequence[Any]) -> tuple[Any, ...]:
    return (_STEPS.taken, *(_identity_of(weight) for weight in weights))


def _identity_of(weight: WatchedParameter) -> tuple[Any, ...]:
    # Kept on the parameter: an object of its own tells it from all others, where a weak reference would forbid swap_tensors.
    token = weight.__dict__.setdefault("identity", object())
    taken = getattr(weight, "aliases_taken", 0)
    storage = _storage(weight)._cdata
    return (token, weight.data_ptr(), storage, weight._version, taken, weight.dtype, weight.shape)


def _shared(known: Sequence[Tensor]) -> bool:
    """Whether anything but these tensors may hold their storages, a tensor, an array or another process: a write through it may go unseen.

    Memory that PyTorch did not allocate (`torch.from_numpy`, `from_dlpack`, a mapped file) or once gave to NumPy cannot be
    resized: who else holds it is unknown.
    """
    holders = Counter(_storage(each)._cdata for each in known)
    for each in known:
        if not _storage(each).resizable() or (each.device.type == "cpu" and _storage(each).is_shared()):
            return True
        objects, uses = _held(each)
        if objects > _ALONE.objects or uses > _ALONE.uses + holders[_storage(each)._cdata] - 1:
            return True
    return False


class _Held(NamedTuple):
    """Who holds a tensor's storage: references to the Python object of it, which all tensors have in common, and uses in C++."""

    objects: int
    uses: int


def _held(tensor: Tensor) -> _Held:
    storage = _storage(tensor)
    return _Held(sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata))


_ALONE = _held(torch.nn.Parameter(torch.empty(1)))
