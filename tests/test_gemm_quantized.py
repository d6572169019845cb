"""fw.gemm of quantized operands, and its outputs beyond the product, against float64 on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fourwave as fw
from fourwave.backends import native
from fourwave.ops.gemm.problem import LAYOUTS
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
from fourwave.testing import GemmCase, bounds
from fourwave.testing.shapes import Shape, by_name
from targets import Target

BF16, FP32 = torch.bfloat16, torch.float32
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
FP8 = ("fp8_e4m3", "fp8_e5m2")
MX = ("mxfp8_e4m3", "mxfp8_e5m2")
slow = pytest.mark.slow


def mixes(names: tuple[str, str]) -> list[Any]:
    """(a, b, layout): every mix in TN; an operand read across K in the format that test_shapes and test_views leave out.

    The kernel reads each operand on its own: the other mixes are slow tests.
    """
    quick = (names[0], names[1], "NN"), (names[1], names[0], "NT")
    every = [(a, b, layout) for layout in LAYOUTS for a in names for b in names]
    return [pytest.param(*one, marks=() if one[2] == "TN" or one in quick else slow) for one in every]


# What ends a kernel does not know how its operands were read: all of it for one kind of operand in every layout, and for
# every kind in one.
ENDS = [
    pytest.param(name, layout, marks=() if name == "bf16" or layout == "TN" else slow)
    for name in ("bf16", "fp8_e4m3", "mxfp8_e4m3")
    for layout in LAYOUTS
]


def check(case: GemmCase, target: Target) -> None:
    fnuz = target.backend == "sim:gfx942"
    # Hopper's matrix unit reads 8-bit codes along the reduction only; MX codes are decoded first.
    case = replace(case, fnuz=fnuz, transposed=target.backend == "hopper" and case.problem.precision == "fp8")
    u_acc = bounds.U_FP32
    if target.device == "cuda" and target.backend in ("native", "hopper") and case.problem.precision == "fp8":
        u_acc = bounds.hopper_fp8_u_acc(case.shape.K, promote=True, wide=True)
    try:
        result = case.run(target.backend, device=target.device, u_acc=u_acc)
    except NotImplementedError as error:
        if target.backend != "hopper":
            raise
        pytest.skip(str(error))
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}: {result.ratio:.3g} times the bound at {list(result.worst)}"


@pytest.mark.parametrize(("a", "b", "layout"), mixes(FP8))
def test_one_scale_for_each_operand(target: Target, a: str, b: str, layout: str) -> None:
    for shape in ("even", "tail all"):
        check(GemmCase(by_name(shape), layout, a_format=a, b_format=b), target)


@pytest.mark.parametrize(("a", "b", "layout"), mixes(MX))
def test_mx(target: Target, a: str, b: str, layout: str) -> None:
    for shape in ("even", "tail all"):
        check(GemmCase(by_name(shape), layout, a_format=a, b_format=b), target)


@every_layout
@pytest.mark.parametrize("name", ["fp8_row", "mxfp8_e4m3"])
@pytest.mark.parametrize("shape", ["M = 1", "N = 1", "K = 1", "odd K", "small"])
def test_shapes(target: Target, layout: str, name: str, shape: str) -> None:
    check(GemmCase(by_name(shape), layout, a_format=name, b_format=name), target)


@every_layout
@pytest.mark.parametrize("name", ["fp8_e4m3", "mxfp8_e4m3"])
@pytest.mark.parametrize("view", ["sliced", "offset", "transposed"])
def test_views(target: Target, layout: str, name: str, view: str) -> None:
    case = GemmCase(by_name("tail all"), layout, a_format=name, b_format=name, a_view=view, b_view=view, out_view=view)
    check(case, target)


@pytest.mark.parametrize(("name", "layout"), ENDS)
def test_epilogues(target: Target, name: str, layout: str) -> None:
    formats: dict[str, Any] = {} if name == "bf16" else {"a_format": name, "b_format": name}
    base = GemmCase(by_name("tail all"), layout, **formats)
    check(replace(base, bias_dtype=BF16, activation="gelu", alpha=0.5, preactivation=FP32, out_view="offset"), target)
    check(replace(base, bias_dtype=FP32, activation="relu", preactivation=BF16, accumulate=True), target)
    # Scales of b where K is not contiguous come in chunks of 16, of which a half holds whole ones.
    halves = replace(base, shape=Shape("halves", 77, 160 if name.startswith("mx") and layout != "TN" else 146, 203))
    check(replace(halves, activation="swiglu", bias_dtype=FP32, preactivation=BF16, out_view="sliced"), target)


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "mxfp8_e4m3"])
def test_bias_gradients(target: Target, name: str) -> None:
    if target.backend == "hopper" and name == "fp8_e4m3":
        pytest.skip("hopper reads columnwise codes stored transposed, of which there is no bias gradient")
    formats: dict[str, Any] = {} if name == "bf16" else {"a_format": name, "b_format": name}
    base = GemmCase(by_name("tail all"), "NT", **formats)
    check(replace(base, bias_grad=FP32, accumulate=True, out_dtype=FP32), target)
    check(replace(base, bias_grad=BF16), target)


# kernels/test_epilogue.py has every format of a result with bf16 operands.
RESULTS = [
    pytest.param(name, out_format, marks=() if quick else slow)
    for name, few in (
        ("bf16", ("fp8_e5m2", "mxfp8_e4m3")),
        ("fp8_e4m3", ("fp8_e4m3", "mxfp8_e5m2")),
        ("mxfp8_e4m3", ("fp8_e5m2", "mxfp8_e4m3")),
    )
    for out_format in (*FP8, *MX)
    for quick in [out_format in few]
]


@pytest.mark.parametrize(("name", "out_format"), RESULTS)
def test_quantized_results(target: Target, name: str, out_format: str) -> None:
    """The bits are those of fw.quantize of the float32 result."""
    formats: dict[str, Any] = {} if name == "bf16" else {"a_format": name, "b_format": name}
    base = GemmCase(by_name("tail all"), out_format=out_format, activation="silu", **formats)
    check(base, target)
    if out_format.startswith("mx"):
        check(replace(base, out_direction="both", out_scale_rule="ceil", shape=by_name("even")), target)
        check(
            replace(base, out_direction="columnwise", activation="swiglu", shape=Shape("halves", 77, 146, 203)), target
        )


@pytest.mark.parametrize("out_format", FP8)
@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
def test_the_direction_of_fp8_results_names_the_codes_as_quantize_does(out_format: str, direction: str) -> None:
    x, w, scale = torch.randn(33, 48), torch.randn(20, 48), torch.tensor(0.25)
    q = fw.gemm(x, w, out_format=out_format, out_scale=scale, out_direction=direction, backend="native")
    want = fw.quantize(fw.gemm(x, w, backend="native"), out_format, direction, scale=scale)
    for name in ("data", "scale", "columnwise_data", "columnwise_scale"):
        got, expected = getattr(q, name), getattr(want, name)
        assert (got is None) == (expected is None), name
        assert got is None or torch.equal(got.float(), expected.float()), name
    assert q.amax is not None and want.amax is not None and torch.equal(q.amax, want.amax)
    with pytest.raises(ValueError, match="its scale is given"):
        fw.gemm(x, w, out_format=out_format, out_scale=scale, out_scale_rule="ceil")


def exponents(rows: int, k: int, step: int) -> torch.Tensor:
    """[rows, blocks of k], no two neighbours alike. Products with steps 1 and 4 span 15 bits: K = 512 of them fit in 24."""
    return torch.arange(rows)[:, None] % 5 + torch.arange(-(-k // 32))[None, :] // step % 4


def power_of_two_operand(rows: int, k: int, step: int, rowwise: bool, name: str, target: Target) -> QuantizedTensor:
    """Ones, with a power of two as scale of each row and block (exponents)."""
    fmt = FORMATS[name]
    codes = torch.ones(rows, k).to(fmt.code_format().torch_dtype)
    scale = (127 + exponents(rows, k, step)).to(torch.uint8)
    if not rowwise:
        codes, scale = codes.view(torch.uint8).mT.contiguous().view(codes.dtype), scale.mT.contiguous()
    codes, scale = codes.to(target.device), scale.to(target.device).view(torch.float8_e8m0fnu)
    if rowwise:
        return QuantizedTensor(fmt, (rows, k), codes, scale)
    return QuantizedTensor(fmt, (k, rows), None, None, codes, scale)


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(n, layout, marks=() if n == MX[0] or layout == "TN" else slow) for n in MX for layout in LAYOUTS],
)
def test_sums_of_powers_of_two_are_exact(target: Target, name: str, layout: str) -> None:
    """Each block adds 32 * 2^(e_a + e_b): a scale at a wrong row or block changes the sum, which is exact in float32."""
    M, N, K = 48, 80, 512
    a = power_of_two_operand(M, K, 1, layout != "NT", name, target)
    b = power_of_two_operand(N, K, 4, layout == "TN", name, target)
    trans_a, trans_b = layout == "NT", layout == "TN"
    try:
        out = fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=FP32, backend=target.backend)
    except NotImplementedError as error:
        if target.backend != "hopper":
            raise
        pytest.skip(str(error))
    exact = 32 * (2.0 ** exponents(M, K, 1).double() @ (2.0 ** exponents(N, K, 4).double()).mT)
    assert torch.equal(out.cpu().double(), exact)


def test_a_nan_scale_spoils_its_row_only(target: Target) -> None:
    a = power_of_two_operand(48, 96, 1, True, MX[0], target)
    b = power_of_two_operand(40, 96, 4, True, MX[0], target)
    assert a.scale is not None
    scale = a.scale.view(torch.uint8).clone()
    scale[5, 1] = 255
    a = replace(a, scale=scale.view(torch.float8_e8m0fnu))
    try:
        out = fw.gemm(a, b, backend=target.backend)
    except NotImplementedError as error:
        if target.backend != "hopper":
            raise
        pytest.skip(str(error))
    nan = out.isnan()
    assert nan[5].all() and int(nan.sum()) == 40


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "mxfp8_e4m3"])
def test_batch_invariance(target: Target, name: str) -> None:
    """Row 0 (and the others) has the same bits for every number of rows."""
    if target.backend == "native":
        x = torch.ones(2, 8, device=target.device)
        with pytest.raises(NotImplementedError, match="may depend on M"):
            fw.gemm(x, x, batch_invariant=True, backend="native")
        return
    formats: dict[str, Any] = {} if name == "bf16" else {"a_format": name, "b_format": name}
    fnuz = target.backend == "sim:gfx942"
    a, b = GemmCase(Shape("rows", 257, 72, 1088), fnuz=fnuz, **formats).operands(target.device)

    def rows(m: int) -> torch.Tensor | QuantizedTensor:
        if not isinstance(a, QuantizedTensor):
            return a[:m]
        assert a.data is not None and a.scale is not None
        scale = a.scale if a.scale.dim() == 0 else a.scale[:m]
        return replace(a, shape=(m, a.shape[1]), data=a.data[:m], scale=scale)

    try:
        whole = fw.gemm(rows(257), b, batch_invariant=True, out_dtype=FP32, backend=target.backend)
    except NotImplementedError as error:
        if target.backend != "hopper":
            raise
        pytest.skip(str(error))
    for m in (1, 2, 17, 33, 128):
        part = fw.gemm(rows(m), b, batch_invariant=True, out_dtype=FP32, backend=target.backend)
        assert torch.equal(part, whole[:m]), m


# ---------------------------------------------------------------------------------------------------- what is refused


def test_what_is_missing_or_wrong_is_told() -> None:
    x = torch.randn(64, 96)
    row = fw.quantize(x, "mxfp8_e4m3")
    both = fw.quantize(x, "mxfp8_e4m3", "both")
    crossed = fw.quantize(x, "mxfp8_e4m3", "both", columnwise_transposed=True)
    with pytest.raises(ValueError, match="no columnwise codes"):
        fw.gemm(row, row, trans_a=True, trans_b=False)
    with pytest.raises(ValueError, match="stored transposed"):
        fw.gemm(both, crossed, trans_a=True, trans_b=False)
    with pytest.raises(ValueError, match="swap the operands"):
        fw.gemm(both, both, trans_a=True, trans_b=True)
    options: list[dict[str, Any]] = [
        {"out_direction": "columnwise"},
        {"out_direction": "up"},
        {"out_scale_rule": "ceil"},
    ]
    for option in options:
        with pytest.raises(ValueError, match="is of a quantized output, and no out_format"):
            fw.gemm(torch.ones(4, 32), torch.ones(4, 32), **option)
    with pytest.raises(ValueError, match="a number that a float holds"):
        fw.gemm(torch.ones(4, 32), torch.ones(4, 32), alpha=10**400)
    with pytest.raises(ValueError, match="a is a ndarray; it must be"):
        fw.gemm(np.zeros((100, 100)), torch.ones(4, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out_scale is the scale of a quantized output"):
        fw.gemm(x, x, out_scale=torch.ones(()))
    with pytest.raises(ValueError, match="needs out_scale"):
        fw.gemm(x, x, out_format="fp8_e4m3")
    with pytest.raises(ValueError, match="out_format is 'int8'"):
        fw.gemm(x, x, out_format="int8")
    with pytest.raises(ValueError, match="computed from the result"):
        fw.gemm(x, x, out_format="mxfp8_e4m3", out_scale=torch.ones(()))
    with pytest.raises(ValueError, match="leave out"):
        fw.gemm(x, x, out_format="mxfp8_e4m3", out_dtype=FP32)
    with pytest.raises(ValueError, match="needs trans_a=True"):
        fw.gemm(x, x, bias_grad=torch.empty(64))
    with pytest.raises(ValueError, match=r"bias_grad is \(95,\)"):
        fw.gemm(x, x, trans_a=True, trans_b=False, bias_grad=torch.empty(95))
    with pytest.raises(ValueError, match=r"preactivation is \(64, 63\)"):
        fw.gemm(x, x, preactivation=torch.empty(64, 63))
    with pytest.raises(ValueError, match="must be even"):
        fw.gemm(x, x[:63], activation="swiglu")
    out = torch.empty(64, 64)
    with pytest.raises(ValueError, match="preactivation shares memory with out"):
        fw.gemm(x, x, out=out, preactivation=out)
    with pytest.raises(ValueError, match="without scales"):
        fw.gemm(torch.zeros(4, 48, dtype=torch.uint8), row)
    assert row.scale is not None
    with pytest.raises(ValueError, match=r"a_scale is \(64, 2\)"):
        fw.gemm(replace(row, scale=row.scale[:, :2].contiguous()), row)
    with pytest.raises(ValueError, match=r"a_scale is torch\.float32"):
        fw.gemm(replace(row, scale=torch.ones(64, 3)), row)
    with pytest.raises(ValueError, match="quantized and an argument requires grad"):
        fw.gemm(row, row, bias=torch.zeros(64, requires_grad=True))


def test_swiglu_gradients_are_those_of_autograd(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 32, generator=generator).to(target.device, BF16).requires_grad_()
    w = torch.randn(48, 32, generator=generator).to(target.device, BF16).requires_grad_()
    bias = torch.randn(48, generator=generator).to(target.device).requires_grad_()
    grad = torch.randn(12, 24, generator=generator).to(target.device, BF16)
    out = fw.gemm(x, w, bias=bias, activation="swiglu", backend=target.backend)
    got = torch.autograd.grad(out, (x, w, bias), grad)
    exact = [t.detach().double().requires_grad_() for t in (x, w, bias)]
    z = exact[0] @ exact[1].mT + exact[2]
    right = torch.autograd.grad(torch.nn.functional.silu(z[:, :24]) * z[:, 24:], exact, grad.double())
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_quantized_calls_compile_whole_and_trace_as_one_operator() -> None:
    x, w = torch.randn(24, 64), torch.randn(40, 64)

    def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = fw.gemm(fw.quantize(x, "mxfp8_e4m3"), fw.quantize(w, "mxfp8_e4m3"), out_dtype=FP32)
        z = torch.empty(x.shape[0], w.shape[0])
        fw.gemm(x, w, activation="gelu", preactivation=z)
        return y, z

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (24, 7):
        for got, right in zip(compiled(x[:rows], w), step(x[:rows], w), strict=True):
            assert torch.equal(got, right)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, w = torch.randn(24, 64, dtype=BF16), torch.randn(40, 64, dtype=BF16)
        q = fw.gemm(x, w, out_format="mxfp8_e4m3", out_direction="both", activation="swiglu")
        assert q.shape == (24, 20) and q.data.shape == (24, 20) and q.columnwise_scale.shape == (1, 20)
        y = fw.gemm(q, fw.quantize(torch.randn(8, 20), "mxfp8_e4m3"))
        assert y.shape == (24, 8) and y.dtype == BF16


def test_a_quantized_tensor_prints_what_it_is_and_its_format_can_be_used_again() -> None:
    q = fw.quantize(torch.randn(64, 96), "mxfp8_e4m3", "both")
    assert repr(q) == "QuantizedTensor([64, 96] mxfp8_e4m3, rowwise and columnwise, on cpu)"
    assert fw.quantize(torch.randn(8, 32), q.format).format is q.format


def test_arguments_of_a_wrong_type_are_told() -> None:
    x = torch.randn(8, 8)
    with pytest.raises(ValueError, match=r"out_scale is 0\.5; it must be a float32 tensor"):
        fw.gemm(x, x, out_format="fp8_e4m3", out_scale=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="preactivation is True; it must be a tensor"):
        fw.gemm(x, x, preactivation=True)  # type: ignore[arg-type]
    codes = torch.zeros(8, 8, dtype=torch.uint8)
    for a, b in ((x, codes), (codes, x)):
        with pytest.raises(ValueError, match=r"float32 .*torch\.uint8|torch\.uint8 .*float32"):
            fw.gemm(a, b)
    with pytest.raises(ValueError, match=r"b is torch\.uint8 without scales"):
        fw.gemm(fw.quantize(x, "fp8_row"), codes)
    with pytest.raises(ValueError, match="a is None; it must be a tensor"):
        fw.gemm(None, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="b is None; it must be a tensor"):
        fw.gemm(x, None)  # type: ignore[arg-type]
    for q in (x, fw.quantize(x, "fp8_row")):
        for name in ("trans_a", "trans_b", "batch_invariant", "fast_accum", "accumulate"):
            for wrong in ("no", None, 2, torch.zeros(())):
                with pytest.raises(ValueError, match=f"{name} is .*; it must be True or False"):
                    options: dict[str, Any] = {name: wrong}
                    fw.gemm(q, q, out=torch.empty(8, 8), **options)
        assert torch.equal(fw.gemm(q, q, trans_b=1), fw.gemm(q, q))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 3; it must be a string"):
        fw.use_backend(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the result are quantized and an argument requires grad"):
        fw.gemm(x.requires_grad_(), x, out_format="mxfp8_e4m3")


def test_every_call_of_a_kind_is_checked_for_shared_memory() -> None:
    a, b = torch.ones(8, 4), torch.ones(8, 6)
    for bias_grad in (torch.empty(4), b.view(-1)[:4]):
        if bias_grad.data_ptr() == b.data_ptr():
            with pytest.raises(ValueError, match="bias_grad shares memory with b"):
                fw.gemm(a, b, trans_a=True, trans_b=False, bias_grad=bias_grad)
        else:
            fw.gemm(a, b, trans_a=True, trans_b=False, bias_grad=bias_grad)
    assert torch.equal(b, torch.ones(8, 6))


def test_the_bias_gradient_does_not_depend_on_n() -> None:
    for accumulate, right in ((False, 8.0), (True, 15.0)):
        bias_grad, out = torch.full((4,), 7.0), torch.empty(4, 0)
        fw.gemm(
            torch.ones(8, 4), torch.ones(8, 0), trans_a=True, trans_b=False, bias_grad=bias_grad, out=out,
            accumulate=accumulate,
        )  # fmt: skip
        assert bias_grad.tolist() == [right] * 4


def test_negated_views(target: Target) -> None:
    """x.conj().imag is one: its memory holds the negated values."""
    if target.backend == "hopper":
        pytest.skip("tests/test_hopper_warm_call.py")
    ones = torch.ones(8, 16, device=target.device)

    def negated(t: torch.Tensor) -> torch.Tensor:
        view = torch._neg_view(t.to(target.device))
        assert view.is_neg()
        return view

    for _ in range(2):
        fw.gemm(ones, ones, out=torch.empty(8, 8, device=target.device), backend=target.backend)
    out, z = negated(torch.zeros(8, 8)), negated(torch.zeros(8, 8))
    fw.gemm(ones, ones, out=out, preactivation=z, backend=target.backend)
    assert (out == 16).all() and (z == 16).all()
    with pytest.raises(ValueError, match="bias_grad is a negated view"):
        fw.gemm(ones, ones, trans_a=True, trans_b=False, bias_grad=negated(torch.zeros(16)))
    fnuz = target.backend == "sim:gfx942"
    scale = negated(torch.tensor(-2.0))
    q = fw.quantize(ones, "fp8_e4m3", scale=scale, fnuz=fnuz, backend=target.backend)
    assert (q.dequantize() == 1).all()
    assert (fw.gemm(q, q, out_dtype=FP32, backend=target.backend) == 16).all()
    q = fw.gemm(q, q, out_format="fp8_e4m3", out_scale=scale, backend=target.backend)
    assert (q.dequantize() == 16).all()


def test_transposed_codes_of_one_block(target: Target) -> None:
    """Their scales are [rows, 1], whose strides PyTorch leaves as they come."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 40, generator=generator).to(target.device)
    q = fw.quantize(x, "mxfp8_e4m3", "columnwise", columnwise_transposed=True)
    try:
        out = fw.gemm(q, q, trans_a=True, trans_b=False, out_dtype=FP32, backend=target.backend)
    except NotImplementedError as error:
        if target.backend != "hopper":
            raise
        pytest.skip(str(error))
    values = q.dequantize(torch.float64)
    bounds.assert_within(out, values.mT @ values, bounds.gemm_bound(values, values, FP32, trans_a=True, trans_b=False))


def test_products_of_scales_may_leave_float32(target: Target) -> None:
    """Each scale multiplies the sum on its own: their product would be Inf, and Inf * 0 NaN."""
    fnuz = target.backend == "sim:gfx942"
    x, w = torch.zeros(16, 32), torch.eye(16, 32) * 1e15
    x[0] = 1e30
    a, b = (fw.quantize(t.to(target.device), "fp8_e4m3", fnuz=fnuz) for t in (x, w))
    if target.backend == "hopper":
        pytest.skip("hopper multiplies the two scales")
    if "_scaled_mm" in str(fw.explain(a, b, out_dtype=FP32, backend=target.backend)):
        pytest.skip("cuBLASLt multiplies the two scales")
    out = fw.gemm(a, b, alpha=1e-20, out_dtype=FP32, backend=target.backend)
    assert not out[1:].any() and not out.isnan().any()


GPU_CASES: dict[str, tuple[str | None, str | None, dict[str, Any]]] = {
    "fp8 in and out": ("fp8_e4m3", "fp8_e4m3", {"out_format": "fp8_e4m3", "out_scale": torch.tensor(2.0)}),
    "fp8 in, mxfp8 out": ("fp8_e4m3", "fp8_e4m3", {"out_format": "mxfp8_e4m3"}),
    "mxfp8 in and out": ("mxfp8_e4m3", "mxfp8_e4m3", {"out_format": "mxfp8_e4m3"}),
    "mxfp4": ("mxfp4", "mxfp4", {"out_dtype": BF16}),
    "bf16 with mxfp4": (None, "mxfp4", {}),
    "bf16 with mxfp8": (None, "mxfp8_e4m3", {}),
    "bf16 with fp8": (None, "fp8_e4m3", {}),
    "mxfp4 with bf16": ("mxfp4", None, {"out_dtype": BF16}),
    "bf16": (None, None, {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", GPU_CASES)
def test_nothing_quantized_is_multiplied_as_it_is(case: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """native's way on a GPU, taken on the CPU: torch.mm knows neither codes nor scales. Sums of small integers are the same bits."""
    generator = torch.Generator().manual_seed(0)
    trans_a, trans_b = layout == "NT", layout == "TN"
    a_format, b_format, more = GPU_CASES[case]

    def operand(rows: int, format_: str | None, k_last: bool) -> Any:
        t = torch.randint(-3, 4, (rows, 64) if k_last else (64, rows), generator=generator).to(BF16)
        return (
            t if format_ is None else fw.quantize(t, format_, "rowwise" if k_last else "columnwise", backend="native")
        )

    a, b = operand(32, a_format, not trans_a), operand(64, b_format, trans_b)

    def run() -> Any:
        return fw.gemm(a, b, trans_a=trans_a, trans_b=trans_b, backend="native", **more)

    expected = run()
    on_cpu = native.NativeBackend._run
    seen = []

    def as_on_a_gpu(self: Any, problem: Any, tensors: Any) -> Any:
        seen.append(problem)
        return on_cpu(self, replace(problem, device_type="cuda"), tensors)

    monkeypatch.setattr(native.NativeBackend, "_run", as_on_a_gpu)
    monkeypatch.setattr(native, "why_no_scaled_mm", lambda *_: "no GPU")
    monkeypatch.setattr(native, "_HAS_MM_OUT_DTYPE", False)
    got = run()
    assert len(seen) == 1
    if isinstance(expected, QuantizedTensor):
        got, expected = got.dequantize(), expected.dequantize()
    assert got.dtype == expected.dtype and torch.equal(got, expected)
