"""An nn.Linear whose product is fourwave.gemm, checked element by element against float64."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import fourwave as fw
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import bounds


@dataclass(frozen=True)
class LinearRecord:
    """One call of one Linear."""

    name: str  # module path in the model
    M: int
    N: int
    K: int
    max_error: float  # largest |out - exact|
    max_ratio: float  # largest |out - exact| / bound; at most 1 when the kernel is right
    seconds: float  # of the gemm alone


class GemmLinear(torch.nn.Module):
    """out[..., N] = x[..., K] @ weight[N, K].T + bias[N], as fourwave.gemm computes it.

    x and weight are rounded to bfloat16, products are summed in float32, the bias (float32) is added before the
    result leaves the kernel, and out is float32: only the two operands lose precision.
    Exact means float64 from the *rounded* operands, so the check covers the kernel and not the rounding of its inputs.
    """

    def __init__(
        self, name: str, linear: torch.nn.Linear, backend: str, on_call: Callable[[LinearRecord], None]
    ) -> None:
        super().__init__()
        self.name, self.backend, self.on_call = name, backend, on_call
        self.weight = linear.weight.detach().to(torch.bfloat16)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x16 = x.to(torch.bfloat16)
        start = time.perf_counter()
        out = fw.gemm(x16, self.weight, bias=self.bias, out_dtype=torch.float32, backend=self.backend)
        if out.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.on_call(self._check(x16.reshape(-1, x16.shape[-1]), out.reshape(-1, out.shape[-1]), seconds))
        return out.to(x.dtype)

    def _check(self, a: torch.Tensor, out: torch.Tensor, seconds: float) -> LinearRecord:
        exact = gemm_reference(a, self.weight, bias=self.bias)
        bound = bounds.gemm_bound(a, self.weight, out.dtype, bias=self.bias)
        ratio, _ = bounds.error_ratio(out, exact, bound)
        (M, K), N = a.shape, out.shape[-1]
        return LinearRecord(self.name, M, N, K, (out.double() - exact).abs().max().item(), ratio, seconds)


def replace_linears(model: torch.nn.Module, backend: str, on_call: Callable[[LinearRecord], None]) -> list[str]:
    """Put a GemmLinear in the place of every nn.Linear of `model`; returns their module paths."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name in names:
        parent, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        setattr(model.get_submodule(parent), leaf, GemmLinear(name, linear, backend, on_call))
    return names
