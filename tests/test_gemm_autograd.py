"""What PyTorch's own machinery sees of fw.gemm: version counters, autocast, precision settings, modes, tracing, gradients."""

from __future__ import annotations

from typing import Any

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


def graph_targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


@backends
def test_tracing_sees_one_operator(backend: str) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = normal(16, 32, dtype=BF16), normal(24, 32, dtype=BF16, seed=1)
    other = normal(16, 32, dtype=BF16, seed=2)

    def call(t: torch.Tensor) -> torch.Tensor:
        return fw.gemm(t, w, backend=backend)

    traced = torch.jit.trace(call, (x,))
    assert "fourwave::gemm" in str(traced.graph) and torch.equal(traced(other), call(other))
    graph = make_fx(call)(x)
    assert "fourwave.gemm.default" in graph_targets(graph.graph) and torch.equal(graph(other), call(other))


@backends
def test_a_dispatch_mode_sees_one_operator(backend: str) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, w = normal(16, 32, dtype=BF16), normal(24, 32, dtype=BF16, seed=1)
    out = torch.empty(16, 24, dtype=BF16)
    with Record():
        got = fw.gemm(x, w, backend=backend)
        fw.gemm(x, w, out=out, backend=backend)
    assert seen == ["fourwave.gemm.default", "fourwave.gemm_out.default"]
    assert torch.equal(got, fw.gemm(x, w, backend=backend)) and torch.equal(out, got)
    with FakeTensorMode(), pytest.raises(Exception, match="convert all Tensors to FakeTensors"):
        fw.gemm(x, w, backend=backend)  # real tensors
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert fw.gemm(x, w, backend=backend).shape == (16, 24)


@backends
def test_forward_mode_raises(backend: str) -> None:
    from torch.autograd import forward_ad

    x, w = normal(16, 32, dtype=BF16), normal(24, 32, dtype=BF16, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="tangent"):
            fw.gemm(dual, w, backend=backend)
        assert torch.equal(fw.gemm(x, w, backend=backend), fw.gemm(x.clone(), w, backend=backend))


LAYOUT_FLAGS = {"TN": (False, True), "NN": (False, False), "NT": (True, False)}


@backends
@pytest.mark.parametrize("layout", LAYOUT_FLAGS)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 16), (4, 0, 16), (4, 8, 0), (0, 0, 16), (0, 0, 0)])
def test_backward_of_empty_shapes(backend: str, layout: str, m: int, n: int, k: int) -> None:
    trans_a, trans_b = LAYOUT_FLAGS[layout]
    a_shape, b_shape = (k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)
    for lead in ((), (2,)):
        extra = lead if trans_a else ()  # NT flattens the leading dimensions of both
        a = normal(*lead, *a_shape, dtype=BF16).requires_grad_()
        b = normal(*extra, *b_shape, dtype=BF16, seed=1).requires_grad_()
        bias = normal(n, seed=2).requires_grad_()
        y = fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, bias=bias, activation="silu", backend=backend)
        y.sum().backward()
        z = bias.detach().expand(y.shape).clone().requires_grad_()  # the product is 0
        (slope,) = torch.autograd.grad(torch.nn.functional.silu(z).sum(), z)
        rows = slope.reshape(y.numel() // n if n else 0, n).sum(0)
        assert a.grad is not None and a.grad.shape == a.shape and not a.grad.any()
        assert b.grad is not None and b.grad.shape == b.shape and not b.grad.any()
        torch.testing.assert_close(bias.grad, rows, rtol=1e-2, atol=1e-2)


@backends
@pytest.mark.parametrize("layout", LAYOUT_FLAGS)
def test_flops_are_counted(backend: str, layout: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    m, n, k = 6, 8, 16
    trans_a, trans_b = LAYOUT_FLAGS[layout]
    a = normal(*((k, m) if trans_a else (m, k)), dtype=BF16).requires_grad_()
    b = normal(*((n, k) if trans_b else (k, n)), dtype=BF16, seed=1)
    with FlopCounterMode(display=False) as counter:
        y = fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, backend=backend)
        assert counter.get_total_flops() == 2 * m * n * k
        y.sum().backward()
        assert counter.get_total_flops() == 4 * m * n * k
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out=y.detach(), backend=backend)
    assert counter.get_total_flops() == 2 * m * n * k


def test_tensors_without_memory_give_shapes() -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    a, b = empty(2, 3, 32), empty(5, 32)
    for y in (fw.gemm(a, b), fw.gemm(a, b, out=empty(2, 3, 5)), fw.gemm(a, b, bias=empty(5), activation="relu")):
        assert y.is_meta and y.shape == (2, 3, 5)
    quantized: Any = fw.gemm(a[0], b, out_format="mxfp8_e4m3")
    assert quantized.data.is_meta and quantized.shape == (3, 5)
    with pytest.raises(ValueError, match="on cpu"):
        fw.gemm(a, torch.empty(5, 32))
    with pytest.raises(ValueError, match="on cpu"):
        fw.gemm(a, b, bias=torch.empty(5))
    groups = fw.grouped_gemm(a[0], empty(2, 8, 32), torch.tensor([1, 2], device="meta"))
    assert groups.is_meta and groups.shape == (3, 8)
