"""Launches the Hopper kernel of `combine`: compiles once per specialisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.backends.cutedsl_call import PackedCall

ALIGN_BYTES = 16


@dataclass(frozen=True)
class CombineSpec:
    """Everything that is fixed when a kernel is compiled. The fields are those of sm90.Combine."""

    dtype: str
    top_k: int
    whole_chunks: bool


_compiled: dict[CombineSpec, PackedCall] = {}
_ARGUMENTS = {
    "rows": "Q", "row_stride": "q", "places": "Q", "weights": "Q", "out": "Q", "T": "i", "C": "i", "stream": "Q",
}  # fmt: skip


def run(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As combine.combine, on the current device."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    places, weights = places.contiguous(), weights.float().contiguous()
    out = rows.new_empty(len(places), rows.shape[1])
    row_bytes = (rows.stride(0) if len(rows) > 1 else rows.shape[1]) * rows.element_size()
    whole = (rows.data_ptr() | row_bytes | rows.shape[1] * rows.element_size()) % ALIGN_BYTES == 0
    spec = CombineSpec(str(rows.dtype).removeprefix("torch."), places.shape[1], whole)
    kernel = cutedsl_cache.kernel(
        _compiled, spec, compile_kernel, lambda function: PackedCall(function.to(None), _ARGUMENTS)
    )
    kernel.launch(
        rows.data_ptr(), row_bytes, places.data_ptr(), weights.data_ptr(), out.data_ptr(), len(places), rows.shape[1],
        torch._C._cuda_getCurrentRawStream(rows.device.index),
    )  # fmt: skip
    return out


def compile_kernel(spec: CombineSpec, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU. keep: with the PTX and the cubin, also in the working directory."""
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64, cute

    from fourwave.ops.moe.sm90 import Combine

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    address, size = Int64(ALIGN_BYTES), Int32(1)
    return cute.compile[tuple(options)](
        Combine(spec.dtype, spec.top_k, spec.whole_chunks), address, address, address, address, address, size, size, cuda.CUstream(0)
    )  # fmt: skip
