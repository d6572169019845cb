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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_autocast_changes_no_bit(dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        x, w = normal(40, 300, dtype=dtype), normal(24, 300, dtype=dtype, seed=1)
        x.requires_grad_()
        bias = normal(24, seed=2)
        y = fw.gemm(x, w, bias=bias, activation="silu", backend="native")
        (grad,) = torch.autograd.grad(y.float().square().sum(), x)
        plain = fw.gemm(x.detach(), w, out_dtype=torch.float32, backend="native")
        return [y.detach(), grad, plain]

    expected = run()
    with torch.autocast("cpu", dtype=BF16):
        got = run()
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and torch.equal(g, e)


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_float32_matmul_precision_rounds_no_operand_on_the_cpu(precision: str, dtype: torch.dtype) -> None:
    a, b, bias = normal(64, 512, dtype=dtype), normal(48, 512, dtype=dtype, seed=1), normal(48, seed=2)
    exact = a.double() @ b.double().mT
    for out_bias in (None, bias):
        got = fw.gemm(a, b, bias=out_bias, out_dtype=torch.float32, backend="native")
        error = (got.double() - exact - (0 if out_bias is None else out_bias.double())).abs().max()
        assert error < 2e-4, "bf16 products are off by 0.1"
    told = str(fw.explain(a, b, backend="native"))
    assert ("fp64" in told) == (precision != "highest")
    assert ("accumulated in fp32" in told or "true fp32" in told) == (precision == "highest")
