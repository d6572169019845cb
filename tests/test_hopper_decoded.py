"""Operands that the Hopper backend writes in bfloat16 first: MX codes and float32. What they become, bit for bit, and products of them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import formats
from fourwave.backends import registry
from fourwave.formats.scaling import expand_scale, scale_shape
from fourwave.ops.gemm import sm90_choice, sm90_decoded, sm90_tiles
from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem
from fourwave.ops.gemm.sm90_decoded import SLICES, Operand
from fourwave.testing import GemmCase, bounds
from fourwave.testing.shapes import GEMM_SHAPES, Shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
missing = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(missing is not None, reason=f"no hopper: {missing}")
CODES = {"e4m3fn": E4M3, "e5m2": E5M2, "e2m1": PACKED_E2M1}
every_code = pytest.mark.parametrize("code", CODES)
# rows, columns, bytes between rows: loads of 8 elements, or of one
SIZES = [(128, 256, 0), (40, 72, 16), (37, 70, 6), (135, 130, 8), (1, 8, 0), (1, 2, 1)]


def problem(a: torch.dtype, b: torch.dtype, layout: str = "TN", **more: Any) -> GemmProblem:
    scaling = {f"{name}_scaling": "1x32" for name, t in (("a", a), ("b", b)) if t in CODES.values()}
    return GemmProblem(64, 96, 70, layout, a, b, BF16, device_type="cuda", **{**scaling, **more})


def test_what_is_multiplied() -> None:
    for a, b in ((E4M3, E5M2), (BF16, PACKED_E2M1), (PACKED_E2M1, BF16)):
        plain = sm90_decoded.plain_problem(problem(a, b, activation="silu"))
        assert plain == GemmProblem(64, 96, 70, "TN", BF16, BF16, BF16, device_type="cuda", activation="silu")
        assert sm90_decoded.why_unsupported(problem(a, b, activation="silu"), None) is None
    assert sm90_decoded.why_unsupported(problem(E4M3, E4M3, "NT", bias_grad_dtype=BF16), None) is None
    plain = sm90_decoded.plain_problem(problem(FP32, FP32, "NT", bias_grad_dtype=FP32))
    assert plain == GemmProblem(64, 96, 6 * 72, "NT", BF16, BF16, BF16, device_type="cuda")
    few_rows = replace(problem(BF16, PACKED_E2M1), K=64)  # converted in registers
    wide = replace(problem(BF16, E4M3), K=64)
    for p in (problem(BF16, BF16), problem(FP16, FP16), problem(FP32, BF16), few_rows, wide):
        assert sm90_decoded.plain_problem(p) is None and not sm90_decoded.decodes(p)
    for a, weights in itertools.product(
        (E4M3, E5M2, PACKED_E2M1), (few_rows, wide)
    ):  # with any a: that is decoded alone
        p = replace(weights, a_dtype=a, a_scaling="1x32")
        assert sm90_decoded.plain_problem(p) == weights and sm90_decoded.decodes(p)
        assert sm90_decoded.describe(p)[0].startswith("a decoded")
        both = replace(p, M=257, a_dtype=BF16, a_scaling=None, b_dtype=BF16, b_scaling=None)
        assert sm90_decoded.plain_problem(replace(p, M=257)) == both
        assert sm90_decoded.describe(replace(p, M=257))[0].startswith("a and b decoded")
        swiglu = replace(both, M=few_rows.M, activation="swiglu")
        assert sm90_decoded.plain_problem(replace(p, activation="swiglu")) == swiglu
    # What those tiles do not write is a reason to decode; there is a tile for each then.
    mores: list[dict[str, Any]] = [
        {"activation": "swiglu"}, {"preactivation_dtype": FP32, "activation": "silu"}, {"bias_grad_dtype": BF16},
        {"out_dtype": E4M3, "out_scaling": "tensor"},
    ]  # fmt: skip
    for more in mores:
        for rows in (1, 64, 128):
            p = replace(few_rows, M=rows, **more)
            plain = sm90_decoded.plain_problem(p)
            assert plain == replace(p, b_dtype=BF16, b_scaling=None)
            assert sm90_choice.default_config(plain)[0] in sm90_tiles.candidates(plain)


@pytest.mark.parametrize(
    ("a", "b", "more", "said"),
    [
        (FP16, E4M3, {}, "operands are torch.float16 and torch.bfloat16"),
        (E4M3, FP32, {}, "operands are torch.bfloat16 and torch.float32"),
        (FP32, FP32, {"batch_invariant": True}, "batch_invariant is not in this kernel"),
        (E4M3, E4M3, {"out_scaling": "1x32", "out_dtype": E4M3}, "quantized with scales 1x32"),
        (E4M3, E4M3, {"b_preshuffled": True}, "b is preshuffled, an order for AMD"),
        (torch.float8_e4m3fnuz, E4M3, {"a_scaling": "1x32"}, "operands with scales 1x32"),
    ],
)
def test_what_is_refused(a: torch.dtype, b: torch.dtype, more: dict[str, Any], said: str) -> None:
    given = {
        "M": 64,
        "N": 96,
        "K": 64,
        "layout": "TN",
        "a_dtype": a,
        "b_dtype": b,
        "out_dtype": BF16,
        "device_type": "cuda",
    }
    scaling = {f"{name}_scaling": "1x32" for name, t in (("a", a), ("b", b)) if t in CODES.values()}
    reason = sm90_decoded.why_unsupported(GemmProblem(**{**given, **scaling, **more}), None)
    assert reason is not None and said in reason


def test_values_of_few_bits_take_wide_tiles() -> None:
    """128x128 tiles were up to 1.6 times as slow as cuBLAS on values that were MX codes, where 256x128 was as fast."""
    for M, N, K in ((4096, 10240, 8192), (4096, 18432, 16384), (8192, 12288, 4096)):
        p = GemmProblem(M, N, K, "TN", E4M3, PACKED_E2M1, BF16, device_type="cuda", a_scaling="1x32", b_scaling="1x32")
        plain = sm90_decoded.plain_problem(p)
        assert plain is not None
        assert sm90_choice.default_config(plain)[0] == sm90_tiles.SQUARE
        assert sm90_decoded.chosen_config(p, plain)[0] == sm90_tiles.WIDE
        floats = replace(p, a_dtype=FP32, b_dtype=FP32, a_scaling=None, b_scaling=None)
        plain = sm90_decoded.plain_problem(floats)
        assert plain is not None
        assert sm90_decoded.chosen_config(floats, plain) == sm90_choice.default_config(plain)


def test_the_six_products() -> None:
    """All pairs of parts whose product may reach the last bits of float32, once; the first half of a's copies are its parts."""
    pairs = Counter(zip(SLICES["a"], SLICES["b"], strict=True))
    assert pairs == Counter({(i, j): 1 for i in range(3) for j in range(3) if i + j <= 2})
    assert sorted(SLICES["a"][:3]) == [0, 1, 2]


def test_targets_have_aligned_rows() -> None:
    for layout in ("TN", "NN", "NT"):
        for a, b in ((FP32, FP32), (E4M3, PACKED_E2M1)):
            p = problem(a, b, layout)
            plain = sm90_decoded.plain_problem(p)
            assert plain is not None
            for name, shape in (("a", plain.a_shape), ("b", plain.b_shape)):
                target = Operand.of(p, name).target("meta")
                assert target.shape == shape and target.stride(0) % 8 == 0 and target.stride(1) == 1
            tensors: Any = fw.ops.gemm.problem.GemmTensors(
                torch.empty(p.a_shape, dtype=a, device="meta"), torch.empty(p.b_shape, dtype=b, device="meta"), None
            )
            assert sm90_decoded.copies(p, None, tensors) == []


# ---------------------------------------------------------------------------------------------------------------------
# On a Hopper GPU


def within(t: torch.Tensor, gap: int) -> torch.Tensor:
    """t on the GPU, `gap` bytes of 0xff after each row."""
    rows = t.contiguous().view(torch.uint8)
    wide = torch.full((rows.shape[0], rows.shape[1] + gap), 0xFF, dtype=torch.uint8, device="cuda")
    wide[:, : rows.shape[1]] = rows
    if gap % t.element_size():
        raise ValueError(f"{gap} bytes are no whole elements")
    return wide.view(t.dtype)[:, : t.shape[1]]


@on_gpu
@pytest.mark.parametrize("k_last", [True, False])
@pytest.mark.parametrize(("rows", "columns", "gap"), SIZES)
@every_code
def test_every_code_and_scale(code: str, rows: int, columns: int, gap: int, k_last: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = columns // 2 if code == "e2m1" else columns
    raw = torch.randint(0, 256, (rows, packed), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, scale_shape("1x32", rows, columns, k_last), generator=generator, dtype=torch.uint8)
    operand = Operand(rows, columns, k_last, ())
    given = within(raw.view(CODES[code]) if code != "e2m1" else raw, gap)
    out = sm90_decoded.decoded(operand, given, scale.view(torch.float8_e8m0fnu).cuda()).cpu()
    codes = formats.unpack_e2m1(raw) if code == "e2m1" else raw
    exact = formats.decode(codes, formats.get(code), torch.float64)
    exact = exact * expand_scale(scale, "1x32", (rows, columns), k_last)
    right = exact.float().bfloat16()
    assert ((out == right) | (out.isnan() & right.isnan())).all()
    # Exact but for the ends of the range.
    middle = exact.isnan() | (exact.abs().clamp(2.0**-126, 2.0**127) == exact.abs()) | (exact == 0)
    assert (out.double() == exact)[middle & ~exact.isnan()].all() and middle.float().mean() > 0.9


@on_gpu
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("k_last", [True, False])
@pytest.mark.parametrize(("rows", "columns", "gap"), [(40, 72, 16), (37, 70, 4), (1, 1, 0)])
def test_three_parts_of_float32(rows: int, columns: int, gap: int, k_last: bool, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-60, 60, x.shape, generator=generator).float())
    ends = torch.tensor([torch.finfo(FP32).max, -torch.finfo(FP32).max, torch.inf, torch.nan, 0.0, -1.0])
    x.view(-1)[: len(ends)] = ends[: x.numel()]
    operand = Operand(rows, columns, k_last, SLICES[name])
    out = sm90_decoded.decoded(operand, within(x, gap), None).cpu()
    copies = out.view(rows, 6, -1).transpose(0, 1) if k_last else out.view(6, -1, columns)
    rest = copies[:, :, columns:] if k_last else copies[:, rows:]
    assert not rest.any()
    copies = copies[:, :, :columns] if k_last else copies[:, :rows]
    parts = [copies[SLICES[name].index(i)] for i in range(3)]
    for copy, each in zip(copies, SLICES[name], strict=True):
        assert torch.equal(copy.view(torch.int16), parts[each].view(torch.int16))
    finite = x.isfinite()
    assert torch.equal(sum(part.double() for part in parts)[finite], x.double()[finite])  # type: ignore[index]
    assert torch.equal(parts[0][~finite].float().nan_to_num(7, 8, 9), x[~finite].nan_to_num(7, 8, 9))
    assert not parts[1][~finite].any() and not parts[2][~finite].any()
    small = parts[1].double().abs() <= 2.0**-8 * x.double().abs()
    assert small[finite & (x.abs() < 2.0**127)].all()


def check(case: GemmCase) -> None:
    # In float32, products are left out (2^-23), and the matrix unit cuts off where float32 rounds.
    u_acc = 2 * bounds.U_FP32 if case.dtype == FP32 else bounds.U_FP32
    result = case.run("hopper", device="cuda", u_acc=u_acc)
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}: {result.ratio:.3g} times the bound at {list(result.worst)}"


MIXES: list[dict[str, Any]] = [
    {"dtype": FP32}, {"a_format": "mxfp8_e4m3", "b_format": "mxfp8_e4m3"}, {"a_format": "mxfp8_e5m2", "b_format": "mxfp8_e4m3"},
    {"a_format": "mxfp4", "b_format": "mxfp4"}, {"b_format": "mxfp4"}, {"a_format": "mxfp8_e4m3"},
]  # fmt: skip
every_mix = pytest.mark.parametrize(
    "mix", MIXES, ids=lambda mix: "-".join(str(v).removeprefix("torch.") for v in mix.values())
)


@on_gpu
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@every_mix
def test_products(mix: dict[str, Any], layout: str) -> None:
    for shape in GEMM_SHAPES:
        if "mxfp4" in mix.values() and (shape.N % 2 or shape.M % 2 or shape.K % 2):
            shape = Shape(shape.name, *(length + length % 2 for length in (shape.M, shape.N, shape.K)))
        check(GemmCase(shape, layout, **mix))


@on_gpu
@every_mix
def test_epilogues(mix: dict[str, Any]) -> None:
    shape = Shape("tails", 330, 152, 204)
    check(GemmCase(shape, bias_dtype=BF16, activation="gelu", alpha=0.5, preactivation=FP32, out_view="offset", **mix))
    check(GemmCase(shape, "NN", activation="swiglu", bias_dtype=FP32, preactivation=BF16, out_view="sliced", **mix))
    check(GemmCase(shape, "NT", bias_grad=FP32, accumulate=True, out_dtype=FP32, **mix))
    check(GemmCase(shape, "NT", bias_grad=BF16, **mix))
    check(GemmCase(shape, out_format="fp8_e4m3", bias_dtype=FP32, **mix))
    check(GemmCase(Shape("few rows", 3, 154, 204), bias_dtype=FP32, activation="relu", accumulate=True, **mix))
    # Whole blocks: weights in MXFP4 stay as they are.
    check(GemmCase(Shape("few rows", 3, 154, 224), bias_dtype=FP32, activation="relu", accumulate=True, **mix))
    check(GemmCase(Shape("few rows", 66, 154, 224), activation="swiglu", preactivation=FP32, **mix))


@pytest.mark.parametrize(
    ("a", "M", "left"), [(E4M3, 40, ["b"]), (PACKED_E2M1, 40, ["b"]), (E4M3, 300, []), (BF16, 300, [])]
)
def test_what_the_kernel_gets(a: torch.dtype, M: int, left: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for both kernels: operands decoded as `plain_problem` says, the others with their scales as given."""
    more: dict[str, Any] = {} if a == BF16 else {"a_scaling": "1x32"}
    p = GemmProblem(M, 96, 64, "TN", a, PACKED_E2M1, BF16, device_type="cuda", b_scaling="1x32", **more)
    generator = torch.Generator().manual_seed(M)
    given: dict[str, torch.Tensor] = {}
    for name, rows, t in (("a", M, a), ("b", 96, PACKED_E2M1)):
        q = fw.quantize(torch.randn(rows, 64, generator=generator), "mxfp4" if t == PACKED_E2M1 else "mxfp8_e4m3")
        given[name], given[f"{name}_scale"], _ = q.operand("rowwise")
    if a == BF16:
        given = {**given, "a": torch.randn(M, 64, generator=generator).bfloat16(), "a_scale": None}  # type: ignore[dict-item]
    seen: list[Any] = []

    def decoded(operand: Operand, t: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        assert scale is not None and operand.k_last
        codes = formats.unpack_e2m1(t) if t.dtype == PACKED_E2M1 else t.view(torch.uint8)
        fmt = formats.get("e2m1" if t.dtype == PACKED_E2M1 else "e4m3fn")
        factor = expand_scale(scale, "1x32", (operand.rows, operand.columns), True)
        return (formats.decode(codes, fmt, torch.float64) * factor).bfloat16()

    def run(plain: GemmProblem, config: Any, tensors: Any) -> list[str]:
        seen.append((plain, tensors))
        return []

    monkeypatch.setattr(sm90_decoded, "decoded", decoded)
    monkeypatch.setattr(sm90_decoded.sm90_launch, "run", run)
    out = torch.empty(M, 96, dtype=BF16)
    tensors = fw.ops.gemm.problem.GemmTensors(
        given["a"], given["b"], out, a_scale=given["a_scale"], b_scale=given["b_scale"]
    )
    assert sm90_decoded.run(p, None, tensors) == []
    ((plain, got),) = seen
    assert plain == sm90_decoded.plain_problem(p) and got.out is out
    for name, k in (("a", 64), ("b", 64)):
        t, scale = getattr(got, name), getattr(got, f"{name}_scale")
        if name in left or given[f"{name}_scale"] is None:
            assert t is given[name] and scale is given[f"{name}_scale"]
        else:
            assert scale is None and t.shape == (given[name].shape[0], k) and t.dtype == BF16
            assert t.dtype == getattr(plain, f"{name}_dtype")


@on_gpu
def test_float32_is_more_than_bfloat16() -> None:
    """Integers of 12 bits have products and sums that float32 holds."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2047, 2048, (n, 3), generator=generator).float().cuda() for n in (200, 72))
    assert torch.equal(fw.gemm(a, b, backend="hopper").double(), a.double() @ b.double().mT)


@on_gpu
@every_mix
def test_in_a_graph(mix: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, 160, generator=generator).cuda().to(mix.get("dtype", BF16)) for n in (96, 64)]
    a, b = (
        t if name is None else fw.quantize(t, name)
        for t, name in zip(values, (mix.get("a_format"), mix.get("b_format")), strict=True)
    )
    right = fw.gemm(a, b, out_dtype=FP32, backend="hopper")
    out = torch.full_like(right, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, b, out=out, backend="hopper")
    graph.replay()
    assert torch.equal(out, right)


@on_gpu
def test_explain_tells_it() -> None:
    a = fw.quantize(torch.randn(64, 64, device="cuda"), "mxfp8_e4m3")
    told = str(fw.explain(a, a, backend="hopper"))
    assert "decoded into bfloat16" in told and "sm90" in told
    told = str(fw.explain(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"), backend="hopper"))
    assert "six products along K" in told
