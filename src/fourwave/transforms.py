"""Whether something other than plain eager execution looks at a call: then it must see one operator."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

_transforms_active, _num_modes, _tracing = (
    torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
)  # fmt: skip
PLAIN = (torch.Tensor, torch.nn.Parameter)  # other types of tensor may have a dispatch of their own


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor can go to a backend as it is: it has memory, and no dispatch of its own."""
    return type(t) in PLAIN and not t.is_meta


def is_special() -> bool:
    """Whether every call is looked at now: by torch.compile, a torch.func transform, a mode, tracing."""
    return (
        torch.compiler.is_compiling()
        or _transforms_active()
        # TorchDispatchMode (FakeTensorMode, make_fx, ...) and torch.jit.trace
        or _num_modes() > 0
        or _tracing() is not None
    )


def has_tangent(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether one of them carries a forward-mode tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def requires_grad(tensors: Iterable[torch.Tensor | None]) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)
