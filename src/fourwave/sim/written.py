"""Outputs that no kernel wrote: which bytes of a tensor a session's launches have stored to."""

from __future__ import annotations

from typing import Any

import numpy as np

from .report import Finding, Report


class Written:
    """A CPU tensor that a session's launches are to fill, and which of its bytes they have."""

    def __init__(self, tensor: Any, name: str) -> None:
        from .flydsl_hook import tensor_range

        if tensor.device.type != "cpu":
            raise ValueError(f"an output on {tensor.device}: the simulator takes CPU tensors only")
        self.tensor, self.name = tensor, name
        self.lo, self.hi = tensor_range(tensor)
        self.bytes = np.zeros(max(1, self.hi - self.lo), dtype=np.uint8)

    @property
    def range(self) -> tuple[int, int, np.ndarray]:
        """Memory.outputs' entry."""
        return self.lo, self.hi, self.bytes

    def finding(self, report: Report) -> Finding | None:
        """What of it is missing, or None."""
        if self.lo == self.hi:
            return None
        size = self.tensor.element_size()
        strides = (*(s * size for s in self.tensor.stride()), 1)
        elements = np.lib.stride_tricks.as_strided(self.bytes, (*self.tensor.shape, size), strides).all(-1)
        if elements.all():
            return None
        places = np.argwhere(~elements)
        first, last = (tuple(int(i) for i in places[n]) for n in (0, -1))
        offset = sum(i * s for i, s in zip(first, self.tensor.stride(), strict=True)) * size
        ran = list(dict.fromkeys(launch.kernel for launch in report.launches))
        return Finding(
            kind="init",
            message=f"no launch wrote {len(places)} of the {elements.size} elements of this output, a tensor of {tuple(self.tensor.shape)}: "
            + (f"from {first} to {last}" if first != last else f"{first}"),
            file=self.name, line=0, kernel=" and ".join(ran) or "none", workgroup=-1, wave=-1, lane=-1, address=self.lo + offset,
            count=len(places),
        )  # fmt: skip
