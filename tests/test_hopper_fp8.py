"""Products of FP8 operands on Hopper with every kind of scale, and of bfloat16 with weights in MX."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm import sm90_launch, sm90_one_group
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_config import HopperConfig
from fourwave.ops.gemm.sm90_tiles import candidates
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.testing import bounds, buffers, inputs
from fourwave.testing.shapes import Shape
from hopper_cases import BF16, FP8, FP32, on_gpu


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "scaling", "out_dtype", "accumulate"),
    [
        (FP8[0], FP8[0], ("tensor", "tensor"), BF16, False),
        (FP8[0], FP8[1], ("row", "row"), FP32, True),
        (FP8[1], FP8[0], ("row", "tensor"), BF16, False),
        (FP8[0], FP8[0], ("row", "row"), BF16, False),
        (FP8[1], FP8[0], (None, "row"), FP32, False),
    ],
)
@pytest.mark.parametrize("M", [700, 40])
def test_fp8(
    M: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    scaling: tuple[str | None, str | None],
    out_dtype: torch.dtype,
    accumulate: bool,
    fast: bool,
) -> None:
    """Scales per tensor and per row, bias, tails everywhere; every configuration, several tiles of each."""
    shape = Shape("tails", M, 456, 1000)
    p = GemmProblem(
        shape.M, shape.N, shape.K, "TN", a_dtype, b_dtype, out_dtype, FP32, None, accumulate, "cuda", *scaling,
        fast_accum=fast,
    )  # fmt: skip
    a, b = inputs.spread(shape, FP32, device="cuda")
    a, b = a.to(a_dtype), b.to(b_dtype)
    scales: list[torch.Tensor | None] = []
    values = []
    for kind, codes in zip(scaling, (a, b), strict=True):
        shape_of = () if kind == "tensor" else (codes.shape[0],)
        scale = None if kind is None else torch.rand(shape_of, device="cuda") + 0.25
        scales.append(scale)
        factor = torch.ones((), dtype=torch.float64) if scale is None else scale.double()
        values.append(codes.double() * (factor[:, None] if factor.dim() else factor))
    bias = torch.randn(shape.N, device="cuda")
    addend = torch.randn(shape.M, shape.N, device="cuda") if accumulate else None
    exact = gemm_reference(values[0], values[1], bias=bias, addend=addend, alpha=0.5)
    u_acc = bounds.hopper_fp8_u_acc(shape.K, not fast)
    bound = bounds.gemm_bound(values[0], values[1], out_dtype, bias=bias, alpha=0.5, addend=addend, u_acc=u_acc)
    bound += 4 * bounds.U_FP32 * (values[0] @ values[1].mT).abs()  # the scales' products
    for config in candidates(p)[:: 1 if scaling == ("tensor", "tensor") else 3]:
        out = buffers.poisoned(shape.M, shape.N, out_dtype, "cuda", layout="sliced", addend=addend)
        sm90_launch.run(p, config, GemmTensors(a, b, out.tensor, bias, 0.5, *scales))
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (700, 456, 1000),
        (129, 1025, 640),
        (40, 904, 2072),
        (3, 130, 128),
        (128, 100, 64),
        (130, 520, 128),
        (4300, 3000, 272),
        (5000, 3300, 528),
    ],
)
def test_fp8_blocks(M: int, N: int, K: int, fast: bool) -> None:
    """1x128 times 128x128: scales of widely different size, tails everywhere; every configuration. fast_accum changes nothing:
    scales that change with k are applied in float32."""
    shape = Shape("tails", M, N, K)
    p = GemmProblem(
        M, N, K, "TN", FP8[0], FP8[1], BF16, FP32, None, False, "cuda", "1x128", "128x128", fast_accum=fast
    )  # fmt: skip
    a, b = inputs.spread(shape, FP32, device="cuda")
    a, b = a.to(FP8[0]), b.to(FP8[1])
    generator = torch.Generator("cuda").manual_seed(3)
    scale_a = torch.exp2(6 * torch.rand(p.a_scale_shape or (), device="cuda", generator=generator) - 3)
    scale_b = torch.exp2(6 * torch.rand(p.b_scale_shape or (), device="cuda", generator=generator) - 3)
    values = (
        a.double() * expand_scale(scale_a, "1x128", (M, K), True),
        b.double() * expand_scale(scale_b, "128x128", (N, K), True),
    )
    bias = torch.randn(N, device="cuda")
    exact = gemm_reference(*values, bias=bias, alpha=0.5)
    u_acc = bounds.hopper_fp8_u_acc(K, True) + bounds.U_FP32
    bound = bounds.gemm_bound(*values, BF16, bias=bias, alpha=0.5, u_acc=u_acc)
    bound += 4 * bounds.U_FP32 * (values[0].abs() @ values[1].abs().mT)  # the scales' products
    for config in candidates(p):
        out = buffers.poisoned(M, N, BF16, "cuda", layout="sliced")
        sm90_launch.run(p, config, GemmTensors(a, b, out.tensor, bias, 0.5, scale_a, scale_b))
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("code", ["e2m1", "e4m3fn"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 300, 416),
        (16, 1096, 4096),
        (40, 520, 32),
        (64, 2056, 1568),
        (128, 264, 640),
        (200, 392, 672),
        (256, 136, 1024),
    ],
)
def test_mx_weights(M: int, N: int, K: int, code: str) -> None:
    """Codes of every value, scales of widely different size in each block, one of them NaN, tails everywhere; every configuration.
    e4m3fn: NaN in three rows, at either end of K and in the middle, which are NaN then."""
    b_dtype = torch.uint8 if code == "e2m1" else FP8[0]
    p = GemmProblem(M, N, K, "TN", BF16, b_dtype, BF16, FP32, None, False, "cuda", None, "1x32")
    generator = torch.Generator("cuda").manual_seed(5)
    codes = torch.randint(
        0, 256, (N, K // 2 if code == "e2m1" else K), device="cuda", dtype=torch.uint8, generator=generator
    )
    scale = torch.randint(107, 148, (N, K // 32), device="cuda", dtype=torch.uint8, generator=generator)
    if code == "e2m1":
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")
        values = torch.cat([values, -values])
        b = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).reshape(N, K)
    else:
        codes[codes & 127 == 127] = 3
        for n, k, nan in ((5, K - 1, 0x7F), (N - 2, 0, 0xFF), (70, K // 2 + 1, 0x7F)):
            codes[n, k] = nan
        b = codes.view(FP8[0]).double()
    scale[9, -1] = 255
    factor = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    b = b * factor.repeat_interleave(32, 1)
    a = torch.randn(M, K, device="cuda", generator=generator).to(BF16)
    bias = torch.randn(N, device="cuda", generator=generator)
    exact = gemm_reference(a.double(), b, bias=bias, alpha=0.5)
    bound = bounds.gemm_bound(a.double(), b, BF16, bias=bias, alpha=0.5)
    assert exact.isnan().sum() == (1 if code == "e2m1" else 4) * M
    for config in candidates(p):
        out = buffers.poisoned(M, N, BF16, "cuda", layout="sliced")
        tensors = GemmTensors(a, codes.view(b_dtype), out.tensor, bias, 0.5, None, scale.view(torch.float8_e8m0fnu))
        sm90_launch.run(p, config, tensors)
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("M", [512, 32])
def test_fp8_products_of_a_linear_layer(M: int, name: str, fast: bool) -> None:
    """Forward, input gradient and weight gradient through fw.gemm; Hopper's matrix unit wants 8-bit K contiguous, so what is
    reduced over rows is stored transposed."""
    N, K = 384, 640
    generator = torch.Generator("cuda").manual_seed(M)
    x, w, dy = (torch.randn(shape, device="cuda", generator=generator).to(BF16) for shape in ((M, K), (N, K), (M, N)))
    w_name = "fp8_128x128" if name == "fp8_1x128" else name
    quantized = {
        key: fw.quantize(value, w_name if key == "w" else name, "both", columnwise_transposed=True, backend="native")
        for key, value in (("x", x), ("w", w), ("dy", dy))
    }
    products: list[tuple[str, str, dict[str, bool], str, str]] = [
        ("x", "w", {"trans_a": False, "trans_b": True}, "rowwise", "rowwise"),
        ("dy", "w", {"trans_a": False, "trans_b": False}, "rowwise", "columnwise"),
        ("dy", "x", {"trans_a": True, "trans_b": False}, "columnwise", "columnwise"),
    ]
    for a, b, trans, a_direction, b_direction in products:
        out = fw.gemm(quantized[a], quantized[b], **trans, fast_accum=fast, backend="hopper")  # type: ignore[arg-type]
        values = [
            quantized[key].dequantize(torch.float64, direction=direction)
            for key, direction in ((a, a_direction), (b, b_direction))
        ]
        exact = gemm_reference(values[0], values[1], **trans)  # type: ignore[arg-type]
        reduced = values[0].shape[0 if trans["trans_a"] else 1]
        u_acc = bounds.hopper_fp8_u_acc(reduced, not fast or name == "fp8_1x128") + 4 * bounds.U_FP32
        bound = bounds.gemm_bound(values[0], values[1], BF16, **trans, u_acc=u_acc)  # type: ignore[arg-type]
        bounds.assert_within(out, exact, bound, f"{a} {b}")


def block_scaled_wgrad(
    M: int, N: int, K: int, out_dtype: torch.dtype, accumulate: bool, device: str
) -> tuple[GemmProblem, GemmTensors, torch.Tensor, torch.Tensor]:
    """A weight gradient with scales of 1x128 blocks of both operands, out inside guards; the truth and how far out may be from it."""
    p = GemmProblem(
        M, N, K, "TN", FP8[0], FP8[1], out_dtype, None, None, accumulate, device.split(":")[0], "1x128", "1x128"
    )
    a, b = (t.to(FP8[i]) for i, t in enumerate(inputs.spread(Shape("blocks", M, N, K), FP32, device=device)))
    scales, values = [], []
    for seed, codes in enumerate((a, b)):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.exp2(6 * torch.rand(codes.shape[0], -(-K // 128), generator=generator) - 3).to(device)
        scales.append(scale)
        values.append(codes.double() * expand_scale(scale, "1x128", (codes.shape[0], K), True))
    addend = torch.randn(M, N, device=device).to(out_dtype) if accumulate else None
    out = buffers.poisoned(M, N, out_dtype, device, layout="sliced", addend=addend)
    exact = gemm_reference(values[0], values[1], alpha=0.5, addend=addend)
    u_acc = bounds.hopper_fp8_u_acc(K, True) + bounds.U_FP32
    bound = bounds.gemm_bound(values[0], values[1], out_dtype, alpha=0.5, addend=addend, u_acc=u_acc, scaled=True)
    return p, GemmTensors(a, b, out.tensor, None, 0.5, *scales), exact, bound


@on_gpu
@pytest.mark.parametrize(("out_dtype", "accumulate"), [(BF16, False), (FP32, True), (BF16, True)])
@pytest.mark.parametrize(("M", "N", "K"), [(384, 640, 512), (700, 456, 1000), (130, 72, 40), (1000, 3000, 4104)])
def test_fp8_blocks_of_both_operands(M: int, N: int, K: int, out_dtype: torch.dtype, accumulate: bool) -> None:
    p, tensors, exact, bound = block_scaled_wgrad(M, N, K, out_dtype, accumulate, "cuda")
    registry.get("hopper").run_gemm(p, None, tensors)
    assert tensors.out is not None
    bounds.assert_within(tensors.out, exact, bound)


@pytest.mark.parametrize("accumulate", [False, True])
def test_blocks_of_both_operands_go_to_the_grouped_kernel(monkeypatch: pytest.MonkeyPatch, accumulate: bool) -> None:
    """On the CPU, with a stand-in for the grouped launch."""

    def launch(problem: GroupedProblem, config: object, tensors: GroupedTensors) -> list[str]:
        assert (problem.G, problem.split, problem.layout) == (1, "reduction", "TN")
        assert problem.accumulate == accumulate and tensors.m_sizes.tolist() == [problem.K]
        assert tensors.a_scale is not None and tensors.b_scale is not None
        shapes = (problem.M, problem.K), (problem.N, problem.K)
        scales = [
            expand_scale(scale, "1x128", shape, True)
            for scale, shape in zip((tensors.a_scale, tensors.b_scale), shapes, strict=True)
        ]
        y = (tensors.a.double() * scales[0]) @ (tensors.b.double() * scales[1]).mT
        assert tensors.out.shape == (1, *y.shape)
        tensors.out.copy_(tensors.out + y if accumulate else y)
        return ["launched"]

    monkeypatch.setattr(sm90_one_group.sm90_launch, "run", launch)
    p, tensors, exact, bound = block_scaled_wgrad(40, 24, 328, FP32, accumulate, "cpu")
    assert sm90_one_group.why_unsupported(p, None) is None
    assert sm90_one_group.run(p, None, tensors) == ["launched"]
    assert tensors.out is not None
    bounds.assert_within(tensors.out, exact, bound)
    for change, said in (
        ({"bias_dtype": BF16}, "a bias or an activation"), ({"layout": "NN"}, "K contiguous"),
        ({"preactivation_dtype": BF16}, "preactivation"), ({"batch_invariant": True}, "batch"),
    ):  # fmt: skip
        reason = sm90_one_group.why_unsupported(replace(p, **change), None) or ""  # type: ignore[arg-type]
        assert said in reason, reason
    assert "choose theirs" in (sm90_one_group.why_unsupported(p, HopperConfig()) or "")  # type: ignore[arg-type]


def test_sizes_of_the_one_group_stay() -> None:
    """A captured graph has their address."""
    cpu = torch.device("cpu")
    first = sm90_one_group._sizes(128, cpu)
    for k in range(1, 5000):
        assert sm90_one_group._sizes(k, cpu).tolist() == [k]
    assert sm90_one_group._sizes(128, cpu) is first


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("M", [300, 20])
def test_fp8_small_integers_are_exact(M: int, fast: bool) -> None:
    """Sums below 2^11 fit in what the matrix unit keeps: not a bit may differ."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(-2, 3, (M, 500), generator=generator).float().to("cuda").to(FP8[0])
    b = torch.randint(-2, 3, (200, 500), generator=generator).float().to("cuda").to(FP8[0])
    p = GemmProblem(M, 200, 500, "TN", FP8[0], FP8[0], FP32, device_type="cuda", fast_accum=fast)
    for config in candidates(p):
        out = torch.full((M, 200), float("nan"), device="cuda")
        sm90_launch.run(p, config, GemmTensors(a, b, out))
        assert torch.equal(out.double(), a.double() @ b.double().mT), str(config)


@on_gpu
@pytest.mark.parametrize("M", [256, 128])
def test_promotion_is_more_precise(M: int) -> None:
    """K = 16384 equal products: the matrix unit's short sum loses what float32 additions keep."""
    K = 16384
    a = torch.full((M, K), 1.125, device="cuda").to(FP8[0])
    p = GemmProblem(M, M, K, "TN", FP8[0], FP8[0], FP32, device_type="cuda")
    errors = []
    for fast in (True, False):
        out = torch.empty(M, M, device="cuda")
        sm90_launch.run(replace(p, fast_accum=fast), None, GemmTensors(a, a, out))
        errors.append(float((out.double() - 1.125**2 * K).abs().max()))
    assert errors[1] < errors[0] / 4, errors
