"""The weighted sum of what a token's experts give."""

from __future__ import annotations

import torch

from fourwave.backends import registry, select
from fourwave.ops.gemm.problem import PRECISIONS
from fourwave.transforms import PLAIN, is_special

Tensor = torch.Tensor
MAX_CHOICES = 16  # of a token, in the Hopper kernel: all of them are in flight


def combine(rows: Tensor, places: Tensor, weights: Tensor, backend: str | None = None) -> Tensor:
    """out[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once: [T, C] of rows' type.

    rows [M, C], places [T, top_k] int64 in [0, M), weights [T, top_k]. The order of summation depends on shapes only: no atomics.
    On Hopper one kernel adds in the order of j.
    """
    if _on_hopper(rows, places, backend):
        from fourwave.ops.moe import sm90_launch

        with torch.cuda.device(rows.device):
            return sm90_launch.run(rows.detach(), places.detach(), weights.detach())
    gathered = rows.index_select(0, places.reshape(-1)).view(*places.shape, rows.shape[1])
    return (gathered * weights.float().unsqueeze(-1)).sum(1).to(rows.dtype)


def _on_hopper(rows: Tensor, places: Tensor, backend: str | None) -> bool:
    if rows.device.type != "cuda" or is_special() or not 1 <= places.shape[1] <= MAX_CHOICES or not places.shape[0]:
        return False
    if rows.dtype not in PRECISIONS or any(type(t) not in PLAIN for t in (rows, places)) or not rows.numel():
        return False
    asked = select.parse(select.requested(backend)[0])[PRECISIONS[rows.dtype]]
    if asked not in (select.AUTO, "hopper"):
        return False
    from fourwave.backends import hopper

    index = torch.cuda.current_device() if rows.device.index is None else rows.device.index
    return registry.get("hopper").unavailable() is None and hopper._is_hopper(index)
