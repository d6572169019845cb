"""What a mixture of experts does between its products: quantized rows in another order, quantized SwiGLU, the weighted sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.formats import decode
from fourwave.formats.scaling import expand_scale
from fourwave.ops.moe.combine import MAX_CHOICES
from fourwave.quantize import FORMATS, gather
from fourwave.quantize.reference import encode
from fourwave.quantize.tensor import decode_codes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
FORMATS_OF_BLOCKS = ["fp8_1x128", "fp8_1x128_e5m2", "mxfp8_e4m3", "mxfp4"]


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows and columns of many magnitudes, columns of a wider buffer of NaN."""
    random = torch.Generator().manual_seed(seed)
    powers = torch.randint(-6, 7, (rows, 1), generator=random) + torch.randint(-3, 4, (1, columns), generator=random)
    wide = torch.full((rows, columns + 8), float("nan"), dtype=dtype)
    wide[:, :columns] = torch.randn(rows, columns, generator=random) * 2.0**powers
    return wide[:, :columns]


def same(a: fw.QuantizedTensor, b: fw.QuantizedTensor) -> None:
    assert a.shape == b.shape and a.format == b.format
    for x, y in ((a.data, b.data), (a.scale, b.scale)):
        assert x is not None and y is not None and x.dtype == y.dtype
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@every_device
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", [*FORMATS_OF_BLOCKS, "fp8_row"])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(70, 300, 264), (5, 3, 130), (300, 130, 512), (1, 1, 2)])
def test_gathered_rows(tokens: int, rows: int, columns: int, name: str, dtype: torch.dtype, device: str) -> None:
    x = matrix(tokens, columns, dtype).to(device)
    order = torch.randint(0, tokens, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    rule = "ceil" if FORMATS[name].is_mx else "pow2"
    for scale_rule in (None, rule):
        right = fw.quantize(x[order], name, scale_rule=scale_rule)
        same(fw.moe.gather_quantize(x, order, name, scale_rule=scale_rule), right)


def test_what_is_refused() -> None:
    x, one = torch.ones(2, 128), torch.tensor([0])
    for name in ("fp8_e4m3", "fp8_128x128", "fp9"):
        with pytest.raises(ValueError, match="rows are quantized one by one in fp8_row"):
            fw.moe.gather_quantize(x, one, name)
    for rows in ([0], one.int(), one.view(1, 1)):
        with pytest.raises(ValueError, match=r"it must be \[M\] int64"):
            fw.moe.gather_quantize(x, rows, "fp8_1x128")  # type: ignore[arg-type]
    for bad in (x.double(), x[0]):
        with pytest.raises(ValueError, match="it must be a matrix"):
            fw.moe.silu_mul_quantize(bad, "fp8_1x128")
    with pytest.raises(ValueError, match=r"must be \[M, 2 C\]"):
        fw.moe.silu_mul_quantize(torch.ones(2, 129), "fp8_1x128")
    with pytest.raises(ValueError, match="formats are"):
        fw.moe.silu_mul_quantize(x, "fp9")
    with pytest.raises(ValueError, match="must both be"):
        fw.moe.combine(x, one.view(1, 1), torch.ones(2, 1))
    with pytest.raises(ValueError, match="int64 and floating point"):
        fw.moe.combine(x, one.view(1, 1), one.view(1, 1))
    three = (x, one.view(1, 1), torch.ones(1, 1))
    for backend, error, said in (
        ("nonsense", ValueError, "the backends are"), (3, ValueError, "must be a string"), ("", ValueError, "must be a string"),
        ("flydsl", NotImplementedError, "has no combine"), ("sim:gfx950", NotImplementedError, "has no combine"),
        ("hopper", (fw.BackendUnavailable, NotImplementedError), "was asked for and cannot"),
    ):  # fmt: skip
        with pytest.raises(error, match=said):  # type: ignore[arg-type]
            fw.moe.combine(*three, backend=backend)  # type: ignore[arg-type]
    for runs in (None, "auto", "native"):
        assert torch.equal(fw.moe.combine(*three, backend=runs), x[:1])
    grad = torch.ones(2, 128, requires_grad=True)
    for call in (
        lambda: fw.moe.gather_quantize(grad, one, "fp8_1x128"), lambda: fw.moe.silu_mul_quantize(grad, "mxfp4"),
        lambda: fw.moe.combine(grad, one.view(1, 1), torch.ones(1, 1)),
        lambda: fw.moe.combine(x, one.view(1, 1), torch.ones(1, 1, requires_grad=True)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="requires grad"):
            call()


@pytest.mark.parametrize(
    ("name", "columns", "options", "said"),
    [
        ("fp8_1x128", 128, {"scale_rule": "ceil"}, "scale_rule 'ceil'"),
        ("mxfp8_e4m3", 128, {"scale_rule": "pow2"}, "scale_rule 'pow2'"),
        ("mxfp4", 129, {}, "must be even"),
        ("mxfp8_e4m3", 128, {"fnuz": True}, "OCP codes only"),
        ("fp8_1x128", 128, {"backend": ""}, "must be a string"),
    ],
)
def test_what_quantize_refuses_is_refused_before_a_kernel_is_chosen(
    name: str, columns: int, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_on_hopper", lambda *_, **__: pytest.fail("a kernel was chosen"))
    with pytest.raises(ValueError, match=said):
        fw.moe.gather_quantize(torch.ones(2, columns), torch.tensor([0]), name, **options)
    with pytest.raises(ValueError, match=said):
        fw.moe.silu_mul_quantize(torch.ones(2, 2 * columns), name, **options)


@every_device
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", FORMATS_OF_BLOCKS)
@pytest.mark.parametrize(("rows", "columns"), [(300, 264), (3, 130), (1, 2)])
def test_swiglu(rows: int, columns: int, name: str, dtype: torch.dtype, device: str) -> None:
    """Scales and codes are those of h itself, or of what a relative error of 2^-15 of silu makes of it."""
    z = matrix(rows, 2 * columns, dtype)
    z[0, 0] = float("inf")
    if rows > 2:
        z[1, 1], z[2, 0] = -200.0, float("nan")
    gate, up = z.double().chunk(2, -1)
    exact = gate * gate.sigmoid() * up
    q = fw.moe.silu_mul_quantize(z.to(device), name).to("cpu")
    low, high = ((exact * (1 + e * exact.sign())).to(dtype) for e in (-(2.0**-15), 2.0**-15))
    assert q.data is not None and q.scale is not None
    fmt = FORMATS[name]
    scales = [fw.quantize(h, name, backend="native").scale for h in (low, high)]
    ends = [scale.float() for scale in scales if scale is not None]
    nan = ends[0].isnan() | ends[1].isnan()
    got = q.scale.float()
    assert (nan & got.isnan() | (got >= torch.minimum(*ends)) & (got <= torch.maximum(*ends))).all()
    # The codes that the scale makes of either end; they grow with the value.
    inverse = expand_scale(q.scale, fmt.scaling, tuple(low.shape), True, FP32).reciprocal()
    coder = fmt.code_format()
    codes = [decode(encode(h, inverse, coder), coder, torch.float64) for h in (low, high)]
    value = decode_codes(q.data, fmt)
    known = ~(codes[0].isnan() | codes[1].isnan())
    assert torch.equal(value.isnan(), ~known)
    assert ((value >= torch.minimum(*codes)) & (value <= torch.maximum(*codes)))[known].all()
    assert (codes[0] == codes[1])[known].double().mean() > 0.9 or rows < 3


@every_device
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "columns"), [(5, 8, 2056), (3, 2, 72), (7, 1, 37), (4, 16, 4096), (2, 17, 64)]
)
def test_weighted_sum(tokens: int, top_k: int, columns: int, dtype: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    wide = torch.full((tokens * top_k + 3, columns + 8), float("nan"), dtype=dtype)
    wide[:, :columns] = torch.randn(len(wide), columns, generator=random)
    rows = wide[:, :columns]
    places = torch.randperm(len(rows), generator=random)[: tokens * top_k].view(tokens, top_k)
    weights = torch.rand(tokens, top_k, generator=random)
    on_device = [t.to(device) for t in (wide, places, weights)]
    out = fw.moe.combine(on_device[0][:, :columns], on_device[1], on_device[2]).cpu()
    exact = (rows[places].double() * weights.double().unsqueeze(-1)).sum(1)
    size = (rows[places].double() * weights.double().unsqueeze(-1)).abs().sum(1)
    bound = (top_k + 1) * 2.0**-24 * size + torch.finfo(dtype).eps / 2 * exact.abs() * (1 + 2.0**-20)
    bound += torch.finfo(dtype).smallest_normal
    assert out.dtype == dtype and ((out.double() - exact).abs() <= bound).all()
    if device == "cuda" and top_k <= MAX_CHOICES:
        total = rows[places[:, 0]].float() * weights[:, :1]
        for j in range(1, top_k):
            total = total + rows[places[:, j]].float() * weights[:, j : j + 1]
        assert torch.equal(out, total.to(dtype))  # in the order of the choices


@on_gpu
def test_a_whole_layer_without_gradients() -> None:
    """The kernels' results against those of PyTorch's operations between the same products, in a graph, too."""
    module = fw.nn.MoEMLP(256, 384, 8, 3, params_dtype=BF16, device="cuda")
    x = torch.randn(70, 256, device="cuda").to(BF16)
    recipe = fw.recipes.BlockScaling()
    with fw.use_backend("hopper"), fw.autocast(recipe=recipe):
        right = module(x).detach()  # with gradients: PyTorch's SwiGLU, then quantized
        with torch.no_grad():
            out = module(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = module(x)
            graph.replay()
    assert torch.equal(out, captured)
    # A code of h may be a step of 1/16 off where PyTorch's exponential is another: seldom, and summed over 384 of them.
    assert (out.double() - right.double()).norm() <= 2.0**-9 * right.double().norm()
