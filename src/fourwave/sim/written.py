"""Outputs that no kernel wrote: which bytes of a tensor a session's launches have stored to."""

from __future__ import annotations

from typing import Any

import numpy as np

from .report import Finding, Report


class Written:
    """A CPU tensor that a session's launches are to fill, and which of its bytes they have."""

    def __init__(self, tensor: Any) -> None:
        from .flydsl_hook import tensor_range

        if tensor.device.type != "cpu":
            raise ValueError(f"an output on {tensor.device}: the simulator takes CPU tensors only")
        self.tensor = tensor
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
        index = tuple(int(i) for i in np.argwhere(~elements)[0])
        offset = sum(i * s for i, s in zip(index, self.tensor.stride(), strict=True)) * size
        shape, count = tuple(self.tensor.shape), int((~elements).sum())
        return Finding(
            kind="init",
            message=f"no launch wrote {count} of {elements.size} elements of an output {shape}; the first is {index}",
            file="unknown", line=0, kernel=report.launches[-1].kernel if report.launches else "none",
            workgroup=0, wave=0, lane=0, address=self.lo + offset, count=count,
        )  # fmt: skip
