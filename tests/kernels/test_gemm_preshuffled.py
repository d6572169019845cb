"""fw.gemm with preshuffled weights: the bits of the product in plain order, in every kernel, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm.config import ARCHS, FLOAT8, GemmConfig, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled
from fourwave.quantize import QuantizedTensor
from fourwave.testing import GemmCase
from fourwave.testing.shapes import Shape

simulated = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

BF16, FP32 = torch.bfloat16, torch.float32
OPERANDS: dict[str, dict[str, Any]] = {
    "fp8": {"a_format": "fp8_e4m3", "b_format": "fp8_e5m2"},
    "rows": {"a_format": "fp8_row", "b_format": "fp8_row"},
    "mxfp8": {"a_format": "mxfp8_e5m2", "b_format": "mxfp8_e4m3"},
    "blocks": {"a_format": "fp8_1x128", "b_format": "fp8_128x128"},
}
PAIRS = [
    (arch, operands) for arch in ARCHS for operands in OPERANDS if (arch, operands) != ("gfx942", "mxfp8")
]  # fmt: skip


def case_of(arch: str, operands: str, shape: Shape, **options: Any) -> GemmCase:
    return GemmCase(shape, fnuz=arch == "gfx942", preshuffled=True, **{**OPERANDS[operands], **options})


def product(a: Any, b: Any, arch: str, **options: Any) -> torch.Tensor:
    with sim.session(arch=arch, on_finding="raise"):
        return fw.gemm(a, b, backend=f"sim:{arch}", out_dtype=FP32, **options)


@simulated
@pytest.mark.parametrize(("arch", "operands"), PAIRS)
def test_same_bits_as_plain_weights(arch: str, operands: str) -> None:
    """One row, tails in M and N, K of less than one tile and of an odd number of 64, K that is split."""
    for m, n, k in ((1, 64, 64), (17, 272, 704), (77, 144, 1088), (5, 32, 8256)):
        case = case_of(arch, operands, Shape("", m, n, k), seed=m)
        a, b = case.operands()
        plain = product(a, b, arch)
        assert torch.isfinite(plain).all()
        split = default_config(case.problem, arch)[0].split_k
        assert split == default_config(replace(case.problem, b_preshuffled=False), arch)[0].split_k
        assert split > 1 or k < 8000 or operands in ("mxfp8", "blocks")
        assert torch.equal(product(a, fw.preshuffle(b), arch), plain), f"{m}x{n}x{k}"


QUICK = (("gfx950", "mxfp8"), ("gfx950", "rows"), ("gfx942", "blocks"))
some_quick = pytest.mark.parametrize(
    ("arch", "operands"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)


@simulated
@some_quick
def test_same_bits_as_plain_weights_in_every_tile(arch: str, operands: str) -> None:
    case = case_of(arch, operands, Shape("", 17, 272, 704), seed=17)
    a, b = case.operands()
    plain = product(a, b, arch)
    assert torch.isfinite(plain).all()
    for config in candidates_for(case.problem, arch):
        assert torch.equal(product(a, fw.preshuffle(b), arch, config=config), plain), config


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_same_bits_with_parts_of_k(arch: str) -> None:
    """Parts begin where they do without preshuffling, whatever the tiles and the number of parts."""
    case = case_of(arch, "rows", Shape("", 9, 48, 3008))
    a, b = case.operands()
    plain_configs = [c for c in candidates_for(replace(case.problem, b_preshuffled=False), arch) if c.tile_m <= 64]
    for split in (2, 3, 7):
        plain = product(a, b, arch, config=replace(plain_configs[-1], split_k=split))
        other = product(a, b, arch, config=replace(plain_configs[0], split_k=split))
        assert torch.equal(plain, other)
        for config in candidates_for(case.problem, arch):
            got = product(a, fw.preshuffle(b), arch, config=replace(config, split_k=split))
            assert torch.equal(got, plain), f"{split} parts, {config}"


@simulated
@some_quick
def test_against_float64(arch: str, operands: str) -> None:
    """Distinct scales, a poisoned output, several workgroups; every epilogue."""
    shape = Shape("", 33, 144, 320)
    cases = [
        case_of(arch, operands, shape, bias_dtype=FP32, activation="gelu", alpha=0.75, out_view="sliced"),
        case_of(arch, operands, shape, out_dtype=FP32, accumulate=True, preactivation=BF16),
        case_of(arch, operands, shape, out_format="mxfp8_e4m3", out_direction="both"),
        case_of(arch, operands, replace(shape, N=160), out_format="fp8_e4m3", batch_invariant=True),
    ]
    if operands != "blocks":
        cases.append(case_of(arch, operands, replace(shape, N=160), activation="swiglu", preactivation=FP32))
        cases.append(case_of(arch, operands, replace(shape, N=176), activation="swiglu", bias_dtype=BF16))
    for case in cases:
        sim.reset_report()
        result = case.run(f"sim:{arch}")
        assert result.passed, f"{case}: {result}"
        assert not sim.current_report().findings, sim.current_report()


@simulated
@pytest.mark.slow
@pytest.mark.parametrize(("arch", "operands"), PAIRS)
def test_every_tile_against_float64(arch: str, operands: str) -> None:
    """Two workgroups in each direction, two steps of the main loop and part of a third."""
    base = case_of(arch, operands, Shape("", 1, 16, 64), bias_dtype=FP32, activation="silu")
    for config in candidates_for(base.problem, arch):
        case = replace(base, shape=Shape("", config.tile_m + 5, config.tile_n + 16, 1344))
        result = case.run(f"sim:{arch}", config=config)
        assert result.passed, f"{case}, {config}: {result}"


@simulated
@pytest.mark.parametrize("arch", ARCHS)
def test_codes_past_k_are_not_read(arch: str) -> None:
    """What lies behind K in memory is the next 16 rows: NaN there must not meet the zeros of a."""
    a = torch.ones(3, 64).to(FLOAT8[arch][0])
    w = torch.full((48, 64), float("nan"))
    w[16:32] = 2.0
    got = product(a, fw.preshuffle(w.to(FLOAT8[arch][0])), arch)
    assert torch.equal(got[:, 16:32], torch.full((3, 16), 128.0))
    assert got[:, :16].isnan().all() and got[:, 32:].isnan().all()


@simulated
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_of_powers_of_two_are_exact(arch: str) -> None:
    """Ones, with a distinct power of two for every row and, of MX, for every block of K: torch.equal for K = 512."""
    m, n, k = 24, 64, 512
    ones, fnuz = torch.ones, arch == "gfx942"
    a_scale, b_scale = 2.0 ** (torch.arange(m) - 7), 2.0 ** (torch.arange(n) // 2 - 9)
    codes = FLOAT8[arch][0]
    a = QuantizedTensor.from_codes("fp8_row", ones(m, k).to(codes), a_scale)
    b = QuantizedTensor.from_codes("fp8_row", ones(n, k).to(codes), b_scale)
    got = product(a, fw.preshuffle(b), arch)
    assert torch.equal(got, k * a_scale[:, None] * b_scale[None])
    if fnuz:
        return
    blocks = torch.arange(k // 32)
    a_codes = (120 + (torch.arange(m)[:, None] + 3 * blocks) % 7).to(torch.uint8)
    b_codes = (119 + (5 * torch.arange(n)[:, None] + blocks) % 6).to(torch.uint8)
    a = QuantizedTensor.from_codes("mxfp8_e4m3", ones(m, k).to(codes), a_codes)
    b = QuantizedTensor.from_codes("mxfp8_e4m3", ones(n, k).to(codes), b_codes)
    got = product(a, fw.preshuffle(b), arch)
    exact = 32 * (2.0 ** (a_codes.double() - 127)) @ (2.0 ** (b_codes.double() - 127)).T
    assert torch.equal(got.double(), exact)


@simulated
@pytest.mark.parametrize("arch", ARCHS)
def test_wrong_order_is_seen(arch: str) -> None:
    """The bound is no similarity score: weights of which two rows, or two runs of 16 k, changed places fail."""
    case = case_of(arch, "rows", Shape("", 16, 64, 256), out_dtype=FP32)
    a, b = case.operands()
    assert isinstance(b, QuantizedTensor)
    right = product(a, b, arch)
    shuffled = fw.preshuffle(b)
    assert isinstance(shuffled.weights, QuantizedTensor) and shuffled.weights.data is not None
    flat = shuffled.weights.data.view(torch.uint8).view(-1)
    for first, second in ((0, 16), (0, 256), (1024, 0)):
        swapped = flat.clone()
        swapped[first : first + 16], swapped[second : second + 16] = (
            flat[second : second + 16].clone(),
            flat[first : first + 16].clone(),
        )
        wrong = swapped.view(64, 256).view(shuffled.weights.data.dtype)
        assert not torch.equal(product(a, Preshuffled(replace(shuffled.weights, data=wrong)), arch), right)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "mxfp8_e5m2", "fp8_128x128"])
def test_unshuffle_is_the_inverse(name: str) -> None:
    w = fw.quantize(torch.randn(48, 192), name, "both")
    back = fw.preshuffle(w).unshuffle()
    assert isinstance(back, QuantizedTensor) and back.data is not None and w.data is not None
    assert torch.equal(back.data.view(torch.uint8), w.data.view(torch.uint8))
    assert torch.equal(back.dequantize(), w.dequantize())
    plain = torch.randn(32, 64).to(torch.float8_e5m2)
    again = fw.preshuffle(plain).unshuffle()
    assert isinstance(again, torch.Tensor) and torch.equal(again.view(torch.uint8), plain.view(torch.uint8))


def test_preshuffled_weights_are_a_copy() -> None:
    """Whatever way the weights are changed afterwards, codes and scales are those of the moment they were made."""
    for name in ("fp8_row", "mxfp8_e4m3"):
        w = fw.quantize(torch.randn(32, 64), name)
        x = torch.randn(4, 64).to(BF16)
        shuffled = fw.preshuffle(w)
        before = fw.gemm(x, shuffled, backend="native")
        assert w.data is not None and w.scale is not None
        w.data.data.view(torch.uint8).zero_()
        w.scale.view(torch.uint8).fill_(1)
        assert torch.equal(fw.gemm(x, shuffled, backend="native"), before)


@pytest.mark.parametrize("blocks", [4, 16, 17])
def test_scales_of_preshuffled_mxfp8_are_one_copy(blocks: int) -> None:
    """What is changed in one place is read by gemm, grouped_gemm, unshuffle and dequantize alike; unshuffle's result is apart."""
    w = fw.quantize(torch.randn(64, 64 * blocks), "mxfp8_e4m3")
    x = fw.quantize(torch.randn(8, 64 * blocks), "mxfp8_e4m3")
    shuffled, sizes = fw.preshuffle(w), torch.tensor([8])
    assert isinstance(shuffled.weights, QuantizedTensor)
    scale, packed = shuffled.weights.scale, shuffled.packed_scale
    assert scale is not None and packed is not None and w.scale is not None
    apart = shuffled.unshuffle()
    assert isinstance(apart, QuantizedTensor) and apart.scale is not None and apart.scale.is_contiguous()
    right = fw.gemm(x, w, backend="native")
    for changed in (scale, packed[:, : 2 * blocks]):
        changed.view(torch.uint8).add_(1)
        right = 2 * right
        for got in (
            fw.gemm(x, shuffled, backend="native"),
            fw.grouped_gemm(x, shuffled, sizes, backend="native"),
            fw.gemm(x, shuffled.unshuffle(), backend="native"),
        ):
            assert torch.equal(got, right)
    assert not packed[:, 2 * blocks :].view(torch.uint8).any()
    assert torch.equal(apart.dequantize(), w.dequantize())
    apart.scale.view(torch.uint8).zero_()
    assert torch.equal(fw.gemm(x, shuffled, backend="native"), right)


def test_preshuffled_as_an_object(tmp_path: Path) -> None:
    """Shape, device and copies, torch.save; what is loaded or made by hand is checked."""
    plain = torch.randn(3, 32, 64).to(torch.float8_e5m2)
    ones = [fw.preshuffle(fw.quantize(torch.randn(32, 192), name)) for name in ("fp8_e4m3", "fp8_row", "mxfp8_e4m3")]
    for one in (fw.preshuffle(plain), *ones):
        torch.save({"w": one}, tmp_path / "w.pt")
        for other in (torch.load(tmp_path / "w.pt", weights_only=True)["w"], copy.deepcopy(one), one.to("cpu")):
            assert isinstance(other, Preshuffled) and (other.shape, other.device) == (one.shape, one.device)
            assert torch.equal(other.data.view(torch.uint8), one.data.view(torch.uint8))
            if isinstance(one.weights, QuantizedTensor):
                a, b = other.unshuffle(), one.unshuffle()
                assert isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)
                assert torch.equal(a.dequantize(), b.dequantize())
            assert (other.packed_scale is None) == (one.packed_scale is None)
        assert str(list(one.shape)) in repr(one) and len(repr(one)) < 120
        assert one.to("meta").device == torch.device("meta")
        with pytest.raises(ValueError, match="type of their codes"):
            one.to(torch.bfloat16)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="it takes a device"):
            one.to(torch.zeros(1))  # type: ignore[arg-type]
    assert fw.preshuffle(plain).shape == (3, 32, 64) and ones[0].shape == (32, 192)
    assert isinstance(ones[2].weights, QuantizedTensor)
    by_hand = Preshuffled(ones[2].weights)
    assert by_hand.packed_scale is not None and by_hand.packed_scale.shape == (32, 16)
    for wrong in (torch.zeros(32, 64), torch.zeros(24, 64).to(torch.float8_e5m2), None):
        with pytest.raises(ValueError):
            Preshuffled(wrong)  # type: ignore[arg-type]


def test_what_preshuffle_refuses() -> None:
    w = torch.randn(32, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="preshuffled already"):
        fw.preshuffle(fw.preshuffle(w))  # type: ignore[arg-type]
    for given, text in ((None, "w is of None"), ([w], "w is of type list")):
        with pytest.raises(ValueError, match=text):
            fw.preshuffle(given)  # type: ignore[arg-type]
    for dtype in (torch.uint8, torch.int8, torch.bool, torch.float8_e8m0fnu, torch.bfloat16):
        with pytest.raises(ValueError, match=f"weights are {dtype}; .*float8_e4m3fn"):
            fw.preshuffle(torch.ones(32, 64).to(dtype))
    with pytest.raises(ValueError, match="rowwise codes; this mxfp4 tensor has none"):
        fw.preshuffle(fw.quantize(torch.randn(32, 64), "mxfp4", "columnwise"))
    scale = torch.ones(32, requires_grad=True)
    for wanting in (w.clone().requires_grad_(), QuantizedTensor.from_codes("fp8_row", w, scale)):
        with pytest.raises(ValueError, match="requires grad"):
            fw.preshuffle(wanting)
        with torch.no_grad():
            shuffled = fw.preshuffle(wanting)
        assert not shuffled.data.requires_grad
        if isinstance(shuffled.weights, QuantizedTensor):
            assert shuffled.weights.scale is not None and not shuffled.weights.scale.requires_grad


def test_a_repeated_element_becomes_a_copy() -> None:
    w = torch.zeros(1).to(torch.float8_e4m3fn)
    shuffled = fw.preshuffle(w.expand(32, 64))
    w.fill_(3)
    assert not shuffled.data.float().any()


@pytest.mark.parametrize("operands", list(OPERANDS))
def test_native(operands: str) -> None:
    case = case_of("gfx950", operands, Shape("", 9, 48, 448), bias_dtype=FP32)
    result = case.run("native")
    assert result.passed, result
    told = fw.explain(*case.operands(), backend="native")
    assert "preshuffled" not in str(told)
    a, b = case.operands()
    assert "plain order" in str(fw.explain(a, fw.preshuffle(b), backend="native"))


def test_refusals() -> None:
    w, x = torch.zeros(32, 64).to(torch.float8_e4m3fn), torch.zeros(8, 64).to(torch.float8_e4m3fn)
    shuffled = fw.preshuffle(w)
    with pytest.raises(ValueError, match="preshuffled"):
        fw.gemm(x, shuffled, trans_b=False)
    with pytest.raises(ValueError, match="preshuffled"):
        fw.gemm(x, shuffled, trans_a=True, trans_b=False)
    with pytest.raises(ValueError, match="a is preshuffled"):
        fw.gemm(shuffled, w)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="multiple of 16"):
        fw.preshuffle(torch.zeros(24, 64).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="8-bit"):
        fw.preshuffle(torch.zeros(32, 64))
    with pytest.raises(ValueError, match="matrix"):
        fw.gemm(x, fw.preshuffle(torch.zeros(2, 32, 64).to(torch.float8_e4m3fn)))
    problem = GemmProblem(
        8, 32, 64, "TN", w.dtype, w.dtype, BF16, a_scaling="1x32", b_scaling="1x32", b_preshuffled=True
    )
    assert "preshuffled" in (why_unsupported(problem, None, "gfx942") or "")
    halves = GemmConfig(256, 256, 128, 2, 2, 2, mma="16x16x128")
    assert "halves" in (why_unsupported(problem, halves, "gfx950") or "")
    with pytest.raises(ValueError, match="TN"):
        replace(problem, layout="NN")


def test_operator_and_gradients() -> None:
    """One operator under a dispatch mode; an activation that requires grad is refused with fp8, as plain weights are."""
    from torch.fx.experimental.proxy_tensor import make_fx

    w, x = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.randn(8, 64).to(torch.float8_e4m3fn)
    shuffled = fw.preshuffle(w)
    right = fw.gemm(x, w, backend="native")
    traced = make_fx(lambda a: fw.gemm(a, shuffled, backend="native"))(x)
    assert "gemm_out" in traced.code
    assert torch.equal(traced(x), right)


def test_decode_chooses_preshuffled_tiles_and_says_why() -> None:
    problem = GemmProblem(4, 4096, 4096, "TN", *FLOAT8["gfx950"][:1] * 2, BF16, b_preshuffled=True)
    config, reasons = default_config(problem, "gfx950")
    assert config.tile_m == 16 and config.waves_n == 4
    assert any("preshuffled" in reason for reason in reasons)
