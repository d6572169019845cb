"""Preshuffled MXFP4 weights on Hopper: their order and its inverse, the tiles that take them, products with few rows."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm import sm90_config, sm90_decoded, sm90_launch, sm90_tiles
from fourwave.ops.gemm.preshuffled_mxfp4 import shuffle_codes, shuffle_scale, unshuffle_codes, unshuffle_scale
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_config import HopperConfig, why_unsupported
from fourwave.ops.gemm.sm90_tiles import candidates, streamed
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled
from fourwave.testing import bounds, buffers
from fourwave.testing.llm_shapes import llm81

BF16, FP32 = torch.bfloat16, torch.float32
E8M0 = torch.float8_e8m0fnu
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
_POSITIVE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
VALUES = torch.cat([_POSITIVE, -_POSITIVE])


def problem(M: int, N: int, K: int, *, out: torch.dtype = BF16, bias: torch.dtype | None = None) -> GemmProblem:
    return GemmProblem(
        M, N, K, "TN", BF16, torch.uint8, out, bias, None, False, "cuda", None, "1x32", b_preshuffled=True
    )  # fmt: skip


def random_codes(rows: int, k: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rows + k)
    return torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator, device=device)


def numbers(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [N, K] of codes [N, K / 2] and e8m0 codes [N, K / 32]."""
    values = VALUES.to(codes.device)
    plain = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).flatten(1)
    return plain * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The order: no GPU


@pytest.mark.parametrize(("N", "K"), [(16, 64), (48, 192)])
def test_every_code_lies_where_the_order_says(N: int, K: int) -> None:
    codes = random_codes(N, K)
    stored = shuffle_codes(codes).reshape(-1).view(torch.int32)
    for n in range(N):
        for k in range(K):
            lane, word = 4 * (n % 8) + k % 8 // 2, k % 64 // 16
            pair, half = 2 * (k % 16 // 8) + n % 16 // 8, k % 2
            at = (n // 16 * (K // 64) + k // 64) * 128 + lane * 4 + word
            own = 16 * half
            mantissa, low, high, sign = {
                0: (own + 6, own + 7, own + 8, own + 15),
                1: (own, own + 1, own + 2, own + 9),
                2: (own + 12, own + 13, own + 14, 16 - own + 5),
                3: (own + 10, own + 3, own + 4, own + 11),
            }[pair]
            bits = [int(stored[at]) >> place & 1 for place in (mantissa, low, high, sign)]
            code = int(codes[n, k // 2]) >> 4 * half & 15
            assert bits == [code >> i & 1 for i in range(4)], (n, k)


@pytest.mark.parametrize(("N", "K"), [(16, 64), (48, 192), (32, 1088)])
def test_codes_and_scales_come_back(N: int, K: int) -> None:
    codes = random_codes(N, K)
    assert torch.equal(unshuffle_codes(shuffle_codes(codes)), codes)
    scale = torch.arange(N * K // 32).to(torch.uint8).reshape(N, K // 32)
    packed = shuffle_scale(scale)
    assert packed.shape == (N, -(-K // 512) * 16)
    assert torch.equal(unshuffle_scale(packed)[:, : K // 32], scale)
    assert not unshuffle_scale(packed)[:, K // 32 :].any()
    block = packed.reshape(N // 16, -1, 32)  # of 16 rows and 64 of K
    for n in range(N):
        for k32 in range(K // 32):
            assert block[n // 16, k32 // 2, 4 * (n % 8) + 2 * (k32 % 2) + n % 16 // 8] == scale[n, k32], (n, k32)


def test_a_mask_a_shift_and_a_multiplication_make_numbers_of_a_word() -> None:
    """What blocks/cutedsl/mxfp4.py does to a word, in integers, for all pairs of codes, at scale 1."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1).flatten()[: 16 * 32].reshape(16, 32)
    codes[:, 0] = torch.arange(16).to(torch.uint8) * 17
    word = shuffle_codes(codes).reshape(-1).view(torch.int32).reshape(8, 4, 4).to(torch.int64) & 0xFFFFFFFF
    turned = (word >> 6 | word << 26) & 0xFFFFFFFF
    pairs = [
        word & 0x81C081C0, word << 6 & 0x81C081C0, turned & 0x81C081C0, word << 4 & 0x81808180 | word >> 4 & 0x00400040,
    ]  # fmt: skip
    scale = torch.full((16, 2), 127, dtype=torch.uint8)
    expected = numbers(codes, scale)
    for p, pair in enumerate(pairs):
        for half in range(2):
            bits = pair >> 16 * half & 0xFFFF
            number = (bits - (bits >> 15 << 16)).to(torch.int16).view(BF16).double() * 2.0**126
            rows = expected[8 * (p % 2) : 8 * (p % 2) + 8]
            at = torch.arange(64).reshape(4, 2, 4, 2)[:, p // 2, :, half].T  # [c, word]
            assert torch.equal(number, rows[:, at]), (p, half)


def test_products_are_those_of_plain_weights() -> None:
    x = torch.randn(5, 320).to(BF16)
    w = fw.quantize(torch.randn(48, 320), "mxfp4")
    prepared = fw.preshuffle(w)
    assert prepared.shape == (48, 320) and prepared.packed_scale is not None
    assert prepared.packed_scale.shape == (48, 16)
    assert torch.equal(fw.gemm(x, prepared, backend="native"), fw.gemm(x, w, backend="native"))
    plain = prepared.unshuffle()
    assert torch.equal(plain.dequantize(), w.dequantize())  # type: ignore[union-attr]
    file = io.BytesIO()
    torch.save(prepared, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, Preshuffled) and torch.equal(loaded.data, prepared.data)
    assert loaded.packed_scale is not None
    assert torch.equal(loaded.packed_scale.view(torch.uint8), prepared.packed_scale.view(torch.uint8))


@pytest.mark.parametrize(("N", "K"), [(0, 128), (16, 0), (0, 0)])
def test_nothing_can_be_reordered(N: int, K: int) -> None:
    weights = fw.quantize(torch.zeros(N, K), "mxfp4")
    prepared = fw.preshuffle(weights)
    assert weights.data is not None and prepared.data.shape == weights.data.shape
    back = prepared.unshuffle()
    assert torch.equal(back.dequantize(), weights.dequantize())
    y = fw.gemm(torch.ones(3, K, dtype=BF16), prepared)
    assert y.shape == (3, N) and not y.any()


def test_what_cannot_be_reordered_is_refused() -> None:
    for rows, k in ((24, 128), (64, 96)):
        with pytest.raises(ValueError, match="N a multiple of 16 and K of 64"):
            fw.preshuffle(fw.quantize(torch.randn(rows, k), "mxfp4"))
    prepared = fw.preshuffle(fw.quantize(torch.randn(64, 128), "mxfp4"))
    with pytest.raises(ValueError, match="preshuffled already"):
        fw.preshuffle(prepared)  # type: ignore[arg-type]
    if registry.get("sim").unavailable() is None:
        with pytest.raises(NotImplementedError, match="its order is that of fragments of two 8-bit floats"):
            fw.gemm(torch.randn(4, 128).to(BF16), prepared, backend="sim:gfx950")


# ---------------------------------------------------------------------------------------------------------------------
# Rules: no GPU, no DSL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile_m": 12}, "multiples of 8 up to 32"),
        ({"tile_m": 64}, "up to 32"),
        ({"tile_m": 8}, "has all rows"),
        ({"tile_n": 40}, "multiples of 16 up to 256"),
        ({"tile_n": 272}, "up to 256"),
        ({"tile_k": 128}, "a stage has 64 k"),
        ({"consumers": 5}, "1 to 4 warpgroups"),
        ({"consumers": 4, "tile_n": 224}, "room for 64"),
        ({"split": 3}, "1, 2, 4 or 8"),
        ({"cluster_n": 2}, "not shared"),
        ({"num_stages": 0}, "1 to 16"),
        ({"num_stages": 12}, "bytes of shared memory"),
    ],
)
def test_tiles_that_the_kernel_cannot_run_are_refused_with_the_reason(change: dict[str, int], said: str) -> None:
    p = problem(16, 4096, 4096)
    config = streamed(p, 112)
    assert why_unsupported(p, config) is None
    assert said in (why_unsupported(p, replace(config, **change)) or "")  # type: ignore[arg-type]


def test_what_streamed_tiles_do_not_multiply() -> None:
    p = problem(16, 4096, 4096)
    config = streamed(p, 112)
    assert "preshuffled" in (why_unsupported(replace(p, b_preshuffled=False), config) or "")
    assert "has all rows" in (why_unsupported(replace(p, M=40), config) or "")
    for more in ({"N": 4104}, {"K": 4128}):
        assert "16 rows and 64 of K" in (why_unsupported(replace(p, **more), None) or "")  # type: ignore[arg-type]
    many = replace(p, M=128)
    assert "registers for 64 rows" in (why_unsupported(many, sm90_tiles.swapped(many, 208)) or "")
    assert why_unsupported(many, sm90_tiles.swapped(many, 192)) is None
    swapped = sm90_tiles.swapped(p, 208)
    assert why_unsupported(p, swapped) is None
    assert "up to 128" in (why_unsupported(replace(p, b_preshuffled=False), swapped) or "")


def test_every_weight_of_the_llms_has_tiles_and_one_is_chosen() -> None:
    for row in llm81()[::3]:
        for M in (1, 16, 32, 33, 64, 128, 256):
            p = problem(M, row.out_features, row.in_features)
            tiles = candidates(p)
            config, reasons = default_config(p)
            assert config in tiles and all(why_unsupported(p, c) is None for c in tiles) and reasons
            kinds = {c.schedule for c in tiles if c.few_rows}
            assert kinds == ({"swapped", "streamed"} if M <= 32 else {"swapped"}), (str(row), M)
            for c in tiles:
                if c.schedule == "streamed":
                    assert c.tile_m >= M and c.num_stages > 1
                    in_flight = 4 * c.consumers * c.num_stages * c.tile_n * 34
                    assert in_flight >= 32 * 1024, (str(row), M, str(c), in_flight)


def test_explain_names_the_kernel() -> None:
    for M, kernel in ((1, "sm90_streamed"), (64, "sm90_swapped")):
        described = registry.get("hopper").describe_gemm(problem(M, 8192, 8192), None)
        assert described.kernel == f"ops/gemm/{kernel}.py" and described.config in candidates(problem(M, 8192, 8192))
        assert "us" in described.reasons[0]


def test_the_order_of_sums_does_not_depend_on_rows_where_the_tile_is_the_same() -> None:
    """By the rule that the kernel follows: a tile's K is split by warps and CTAs of the configuration, not by M."""
    p = problem(1, 8192, 8192)
    kernels = [
        sm90_launch.specialise(replace(p, M=M), replace(streamed(p, 64), tile_m=16, num_stages=4)) for M in (1, 9, 16)
    ]
    assert kernels[0] == kernels[1] == kernels[2]


def test_more_rows_take_decoded_weights() -> None:
    p = problem(300, 256, 512)
    plain = sm90_decoded.plain_problem(p)
    assert plain == replace(p, b_dtype=BF16, b_scaling=None, b_preshuffled=False)
    assert sm90_decoded.why_unsupported(p, None) is None
    assert sm90_decoded.plain_problem(replace(p, M=256)) is None


# ---------------------------------------------------------------------------------------------------------------------
# Products


def tried(p: GemmProblem) -> list[HopperConfig]:
    """The candidates, and tiles that cut N, K and the stages differently."""
    tiles = [c for c in candidates(p) if c.few_rows]
    if p.M <= sm90_config.STREAMED_ROWS:
        few = streamed(p, 48)
        tiles += [
            few, replace(few, num_stages=1), replace(few, consumers=1, num_stages=2), replace(few, consumers=3, num_stages=2),
            replace(few, consumers=4, num_stages=1), replace(few, split=4), replace(few, split=8), replace(few, overlap=False),
        ]  # fmt: skip
    tiles += [sm90_tiles.swapped(p, 208), sm90_tiles.swapped(p, 112, 2)]
    return [c for c in dict.fromkeys(tiles) if why_unsupported(p, c) is None]


@on_gpu
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 304, 448), (5, 320, 384), (8, 16, 64), (16, 1104, 4096), (17, 2064, 1600), (32, 528, 8192), (33, 528, 192),
        (64, 2064, 1600), (128, 272, 640), (200, 528, 1088), (3, 7168, 2880),
    ],
)  # fmt: skip
def test_products(M: int, N: int, K: int) -> None:
    """Codes of every value, scales of widely different size in each block, tails everywhere; every configuration."""
    p = problem(M, N, K, bias=FP32)
    codes = random_codes(N, K, "cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    scale = torch.randint(107, 148, (N, K // 32), device="cuda", dtype=torch.uint8, generator=generator)
    around = torch.full((M + 2, K + 64), float("nan"), device="cuda", dtype=BF16)
    a = around[1 : M + 1, 32 : K + 32]
    a.copy_(torch.randn(M, K, device="cuda", generator=generator))
    b = numbers(codes, scale)
    bias = torch.randn(N, device="cuda", generator=generator)
    exact = gemm_reference(a.double(), b, bias=bias, alpha=0.5)
    bound = bounds.gemm_bound(a.double(), b, BF16, bias=bias, alpha=0.5)
    shuffled, packed = shuffle_codes(codes), shuffle_scale(scale).view(E8M0)
    for config in tried(p):
        seen = []
        for _ in range(2):
            out = buffers.poisoned(M, N, BF16, "cuda", layout="sliced")
            sm90_launch.run(p, config, GemmTensors(a, shuffled, out.tensor, bias, 0.5, None, packed))
            bounds.assert_within(out.tensor, exact, bound, str(config))
            out.assert_guards_intact()
            seen.append(out.tensor.clone())
        assert torch.equal(*seen), str(config)


@on_gpu
@pytest.mark.parametrize("M", [1, 7, 16, 32, 40])
def test_epilogues(M: int) -> None:
    N, K = 528, 704
    codes = random_codes(N, K, "cuda")
    scale = torch.randint(117, 130, (N, K // 32), device="cuda", dtype=torch.uint8)
    shuffled, packed = shuffle_codes(codes), shuffle_scale(scale).view(E8M0)
    a, b = torch.randn(M, K, device="cuda").to(BF16), numbers(codes, scale)
    bias = torch.randn(N, device="cuda").to(BF16)
    for out_dtype, activation, accumulate in (
        (FP32, None, True), (BF16, None, True), (torch.float16, "gelu_tanh", False), (BF16, "silu", False), (FP32, "relu", False),
    ):  # fmt: skip
        p = replace(problem(M, N, K, out=out_dtype, bias=BF16), activation=activation, accumulate=accumulate)
        addend = torch.randn(M, N, device="cuda").to(out_dtype) if accumulate else None
        exact = gemm_reference(
            a.double(), b, bias=bias.double(), alpha=0.01, activation=activation,
            addend=None if addend is None else addend.double(),
        )  # fmt: skip
        bound = bounds.gemm_bound(
            a.double(), b, out_dtype, bias=bias.double(), alpha=0.01, activation=activation,
            addend=None if addend is None else addend.double(),
        )  # fmt: skip
        tiles = [streamed(p, 48), sm90_tiles.swapped(p, 112, 2)]
        for config in tiles if M <= 32 else tiles[1:]:
            out = buffers.poisoned(M, N, out_dtype, "cuda", addend=addend)
            sm90_launch.run(p, config, GemmTensors(a, shuffled, out.tensor, bias, 0.01, None, packed))
            bounds.assert_within(out.tensor, exact, bound, f"{config} {out_dtype} {activation}")
            out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("schedule", ["streamed", "swapped"])
def test_every_code_with_every_scale(schedule: str) -> None:
    """Row n has scale code n, column k code k % 16, token t picks code t. Exact from 2^-108 to 2^25; NaN above; below, multiples of 2^-109."""
    p = problem(16, 256, 128, out=FP32)
    k = torch.arange(64, device="cuda")
    codes = ((2 * k % 16) | ((2 * k + 1) % 16 << 4)).to(torch.uint8).expand(256, 64).contiguous()
    scale = torch.arange(256, device="cuda").to(torch.uint8)[:, None].expand(256, 4).contiguous()
    a = torch.eye(128, device="cuda", dtype=BF16)[:16].contiguous()
    packed = shuffle_scale(scale).view(E8M0)
    config = streamed(p, 64) if schedule == "streamed" else sm90_tiles.swapped(p, 128)
    out = torch.full((16, 256), float("nan"), device="cuda")
    sm90_launch.run(p, config, GemmTensors(a, shuffle_codes(codes), out, None, 1.0, None, packed))
    exact = VALUES.to("cuda")[:, None] * torch.exp2(torch.arange(256, device="cuda").double() - 127)
    got = out.double()
    assert torch.equal(got[:, 19:153], exact[:, 19:153])
    assert got[:, 153:].isnan().all()
    assert ((got - exact)[:, :19].abs() <= 2.0**-110).all()


@on_gpu
def test_through_gemm_and_when_b_is_a_view() -> None:
    x, w = torch.randn(3, 512, device="cuda").to(BF16), fw.quantize(torch.randn(1024, 512, device="cuda"), "mxfp4")
    prepared = fw.preshuffle(w)
    truth = x.double() @ w.dequantize(torch.float64).T
    bound = bounds.gemm_bound(x.double(), w.dequantize(torch.float64), BF16)
    for rows in (3, 1):
        out = fw.gemm(x[:rows], prepared, backend="hopper")
        bounds.assert_within(out, truth[:rows], bound[:rows], f"{rows} rows")
    many = torch.randn(300, 512, device="cuda").to(BF16)
    out = fw.gemm(many, prepared, backend="hopper")
    assert torch.equal(out, fw.gemm(many, w, backend="hopper"))
    p = problem(3, 1024, 512)
    wide = torch.zeros(1024, 512, device="cuda", dtype=torch.uint8)
    wide[:, :256] = prepared.data
    out = torch.full((3, 1024), float("nan"), device="cuda", dtype=BF16)
    notes = sm90_launch.run(p, None, GemmTensors(x, wide[:, :256], out, b_scale=prepared.packed_scale))
    assert notes == [sm90_launch.SCATTERED]
    bounds.assert_within(out, truth, bound, "a view of b")
