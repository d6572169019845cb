"""What PyTorch's own machinery sees of fw.gemm: version counters, autocast, precision settings, modes, tracing, gradients."""

from __future__ import annotations

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry

SIM = registry.get("sim").unavailable()
needs_sim = pytest.mark.skipif(SIM is not None, reason=f"sim: {SIM}")
backends = pytest.mark.parametrize("backend", ["native", pytest.param("sim", marks=needs_sim)])

BF16 = torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@backends
def test_a_write_to_out_is_seen_by_autograd(backend: str) -> None:
    x, w = normal(16, 32, dtype=BF16), normal(24, 32, dtype=BF16, seed=1)
    a = normal(16, 24, dtype=BF16, seed=2).requires_grad_()
    s = a * 1
    view = s.detach()
    y = (s * s).sum()
    with torch.no_grad():
        fw.gemm(x, w, out=view, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        out = torch.empty(16, 24, dtype=BF16)
        fw.gemm(x, w, out=out, backend=backend)
