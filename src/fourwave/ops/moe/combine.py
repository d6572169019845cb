"""The weighted sum of what a token's experts give."""

from __future__ import annotations

import torch

from fourwave.backends import registry, select
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.problem import PRECISIONS
from fourwave.transforms import PLAIN, is_special

Tensor = torch.Tensor
MAX_CHOICES = 16  # of a token, in the Hopper kernel: all of them are in flight


def combine(rows: Tensor, places: Tensor, weights: Tensor, backend: str | None = None) -> Tensor:
    """out[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once: [T, C] of rows' type.

    rows [M, C], places [T, top_k] int64 in [0, M), weights [T, top_k]. The order of summation depends on shapes only: no atomics.
    On Hopper one kernel adds in the order of j.
    backend  "hopper" or "native", PyTorch's operations, which runs or raises; None, "auto": the kernel where it can and no other
             backend is in force
    """
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise ValueError(f"backend is {backend!r}; it must be a string, one of {', '.join(registry.known())}, or None")
    asked, why = select.AUTO, _why_not_on_hopper(rows, places)
    if backend is not None or why is None:
        asked = select.parse(select.requested(backend)[0])[PRECISIONS[rows.dtype]]
    if backend is not None and asked not in (select.AUTO, "hopper", "native"):
        raise NotImplementedError(f"backend {asked!r} was asked for and has no combine: hopper and native have")
    if why is None and asked in (select.AUTO, "hopper"):
        from fourwave.ops.moe import sm90_launch

        with torch.cuda.device(rows.device):
            return sm90_launch.run(rows.detach(), places.detach(), weights.detach())
    if backend is not None and asked == "hopper" and rows.numel() and places.numel():
        if missing := registry.get("hopper").unavailable():
            raise BackendUnavailable(f"backend 'hopper' was asked for and cannot run here: {missing}")
        raise NotImplementedError(f"backend 'hopper' was asked for and cannot combine: {why}")
    gathered = rows.index_select(0, places.reshape(-1)).view(*places.shape, rows.shape[1])
    total = (gathered * weights.float().unsqueeze(-1)).sum(1)
    # A conversion that does nothing loses its gradient in code that PyTorch 2.11 compiles (nn/norm.py).
    return total if total.dtype == rows.dtype else total.to(rows.dtype)


def _why_not_on_hopper(rows: Tensor, places: Tensor) -> str | None:
    if rows.device.type != "cuda":
        return f"rows are on {rows.device}"
    if is_special() or any(type(t) not in PLAIN for t in (rows, places)):
        return "the call is traced or transformed"
    if places.shape[1] > MAX_CHOICES:
        return f"top_k is {places.shape[1]}: at most {MAX_CHOICES}"
    if not rows.numel() or not places.numel():
        return "there is nothing to add"
    from fourwave.backends import hopper

    index = torch.cuda.current_device() if rows.device.index is None else rows.device.index
    if why := registry.get("hopper").unavailable():
        return why
    return None if hopper._is_hopper(index) else f"device {index} is no Hopper GPU"
