"""Several parameters that are multiplied as one tensor, such as the weights of experts.

They are made as slices of one tensor, so that joining them copies nothing. Frameworks may put each elsewhere (FSDP2, `.data`, deepcopy,
load_state_dict(assign=True)): then they are copied for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from fourwave.nn.function import _told
from fourwave.nn.weights import WatchedParameter

Tensor = torch.Tensor

_DENSE = (Tensor, nn.Parameter, WatchedParameter, FakeTensor)
_storage: Any = torch._C.TensorBase.untyped_storage  # of WatchedParameter's it would count as an alias taken
_DATA: Any = torch._C.TensorBase.data


def split(whole: Tensor) -> list[nn.Parameter]:
    """Parameters that are the slices of whole [parts, ...]. They share its memory and a version counter."""
    return [nn.Parameter(part, whole.requires_grad) for part in whole.detach().unbind(0)]


def alike(parts: Sequence[Tensor]) -> bool:
    """Whether they could lie together."""
    first = parts[0]
    return all(
        type(part) in _DENSE and (part.dtype, part.shape, part.device) == (first.dtype, first.shape, first.device)
        for part in parts
    )


def lie_together(parts: Sequence[Tensor]) -> bool:
    """Whether they are, in order, slices of one contiguous tensor."""
    first = parts[0]
    if any(type(part) not in _DENSE or not part.is_contiguous() for part in parts):
        return False
    storage, start, step = _storage(first)._cdata, first.storage_offset(), first.numel()
    return all(
        part.dtype == first.dtype
        and part.shape == first.shape
        and _storage(part)._cdata == storage
        and part.storage_offset() == start + i * step
        for i, part in enumerate(parts)
    )


def view(parts: Sequence[Tensor]) -> Tensor:
    """[parts, ...] of what lies together. It has the version counter of the first."""
    first = parts[0].detach()
    # Detached again, it is no view of `first` to autograd, and holds nothing but the memory.
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride())).detach()


def joined(parts: Sequence[Tensor], in_main_grad: bool = False) -> Tensor:
    """[parts, ...], with the parts' gradients: their memory if they lie together, else a copy.

    in_main_grad  the gradient goes to main_grad: autograd hands on what tells so
    """
    if torch.compiler.is_compiling():
        return torch.stack(list(parts))
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _Joined.apply(in_main_grad, *parts)
    return view(parts) if lie_together(parts) else torch.stack([part.detach() for part in parts])


def of(whole: Tensor) -> Sequence[Tensor]:
    """The parts that `joined` has made a tensor of, with gradients."""
    function: Any = whole.grad_fn
    return function.parts


def lay_together(parts: Sequence[Tensor]) -> None:
    """Move them into one tensor."""
    with torch.no_grad():
        for part, place in zip(parts, torch.stack([part.detach() for part in parts]).unbind(0), strict=True):
            _DATA.__set__(part, place)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_main_grad: bool, *parts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.in_main_grad, ctx.parts = in_main_grad, parts
        ctx.set_materialize_grads(False)
        return view(parts) if lie_together(parts) else torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        grads: Sequence[Tensor | None]
        if grad is not None:
            grads = grad.unbind(0)
        elif ctx.in_main_grad:
            grads = [_told(part) if part.requires_grad else None for part in ctx.parts]
        else:  # backward_dw gives it
            grads = [None] * len(ctx.parts)
        return None, *(each if part.requires_grad else None for part, each in zip(ctx.parts, grads, strict=True))


class MainGrads:
    """main_grad of each part, None of a frozen one, for a gradient that is computed of all."""

    def __init__(self, grads: Sequence[Tensor | None]) -> None:
        self.grads = list(grads)
        self.dtype = next(grad.dtype for grad in grads if grad is not None)

    def add(self, grad: Tensor, overwrite: bool) -> None:
        for main, each in zip(self.grads, grad.unbind(0), strict=True):
            if main is not None:
                main.copy_(each) if overwrite else main.add_(each)
