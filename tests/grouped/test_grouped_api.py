"""fw.grouped_gemm and grouped_gemm_wgrad: numbers on the native backend, gradients, operators, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fourwave as fw
from fourwave import sim
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled, shuffle, unshuffle
from fourwave.ops.grouped_gemm.reference import grouped_reference, spans, wgrad_reference
from fourwave.testing import grouped_cases
from fourwave.testing.bounds import assert_within, gemm_bound
from fourwave.testing.grouped_cases import GroupedCase

PLAN = [case for _, case in grouped_cases.plan("gfx950") if len(case.sizes) < 20 and case.config is None]


@pytest.mark.parametrize("case", PLAN, ids=str)
def test_native(case: GroupedCase) -> None:
    result = case.run("native")
    assert result.passed, result


def test_cases_tell_experts_scales_and_rows_apart() -> None:
    """The comparison fails for each way to be wrong that it is meant to see."""
    case = GroupedCase("forward", (5, 130, 0, 1), 128, 256, scaling="blocks", scale_layout="groups")
    made, a, b = case.make()
    exact = grouped_reference(a, b, case.sizes)
    bound = case._bound(a, b, None, None)

    def ratio(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(((grouped_reference(a, b, case.sizes) - exact).abs() / bound).nan_to_num(0).max())

    assert ratio(a, b.roll(1, 0)) > 10
    assert ratio(a.roll(1, 0), b) > 10
    # One global transpose of the scales instead of a block for each group.
    blocks = case.K // 128
    codes = made["a"].double()
    as_one = made["a_scale"].view(blocks, case.rows).mT.double().repeat_interleave(128, 1)
    assert ratio(codes * as_one, b) > 10


def operands(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(140, 64, generator=random).to(dtype)
    w = torch.randn(4, 48, 64, generator=random).to(dtype)
    return x, w, torch.tensor([5, 130, 0, 1])


def test_gradients_are_the_other_two_products() -> None:
    x, w, sizes = operands(dtype=torch.float64)
    x, w = x.float().requires_grad_(), w.float().requires_grad_()
    bias = torch.randn(4, 48, requires_grad=True)
    out = fw.grouped_gemm(x, w, sizes, bias=bias)
    dout = torch.randn_like(out)
    out.backward(dout)
    exact_x, exact_w, exact_bias = (t.detach().double().requires_grad_() for t in (x, w, bias))
    parts = [exact_x[s:e] @ exact_w[g].mT + exact_bias[g] for g, (s, e) in enumerate(spans(sizes.tolist(), len(x)))]
    torch.cat(parts).backward(dout[:136].double())
    assert not out[136:].any()
    for got, exact in ((x, exact_x), (w, exact_w), (bias, exact_bias)):
        assert got.grad is not None and exact.grad is not None
        torch.testing.assert_close(got.grad.double(), exact.grad, rtol=2e-5, atol=2e-5)
    assert not w.grad[2].any()  # type: ignore[index]


def test_wgrad_accumulates_in_float32_and_leaves_empty_groups() -> None:
    x, _, sizes = operands()
    dout = torch.randn(140, 48).bfloat16()
    main = torch.randn(4, 48, 64)
    before = main.clone()
    fw.grouped_gemm_wgrad(dout, x, sizes, accumulate=True, out=main)
    exact = wgrad_reference(dout, x, sizes.tolist(), addend=before)
    for g, (s, e) in enumerate(spans(sizes.tolist(), 140)):
        assert_within(main[g], exact[g], gemm_bound(dout[s:e].mT, x[s:e].mT, torch.float32, addend=before[g]))
    assert torch.equal(main[2], before[2])
    assert not fw.grouped_gemm_wgrad(dout, x, sizes)[2].any()


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_row", "fp8_128x128", "mxfp8_e4m3"])
def test_quantized_tensors(format: str) -> None:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(140, 256, generator=random)
    w = torch.randn(3, 128, 256, generator=random)
    dout = torch.randn(140, 128, generator=random)
    sizes = torch.tensor([9, 0, 128], dtype=torch.int32)
    x_format = format.replace("128x128", "1x128")
    qx, qw, qd = fw.quantize(x, x_format, "both"), fw.quantize(w, format, "both"), fw.quantize(dout, x_format, "both")
    close = {"scaled": True}
    xs, ws, ds = (q.dequantize(torch.float64) for q in (qx, qw, qd))
    ws = ws.view(3, 128, 256)
    out = fw.grouped_gemm(qx, qw, sizes, out_dtype=torch.float32)
    ws_columnwise = qw.operand("columnwise")
    dx = fw.grouped_gemm(qd, qw, sizes, trans_b=False, out_dtype=torch.float32)
    dw = fw.grouped_gemm_wgrad(qd, qx, sizes, out_dtype=torch.float32)
    assert ws_columnwise is not None
    wc = qw.dequantize(torch.float64, direction="columnwise").view(3, 128, 256) if qw.has("columnwise") else ws
    xc, dc = (
        q.dequantize(torch.float64, direction="columnwise") if q.has("columnwise") else q.dequantize(torch.float64)
        for q in (qx, qd)
    )
    for g, (s, e) in enumerate(spans(sizes.tolist(), 140)):
        assert_within(out[s:e], xs[s:e] @ ws[g].mT, gemm_bound(xs[s:e], ws[g], torch.float32, **close))  # type: ignore[arg-type]
        assert_within(dx[s:e], ds[s:e] @ wc[g], gemm_bound(ds[s:e], wc[g].mT, torch.float32, **close))  # type: ignore[arg-type]
        assert_within(dw[g], dc[s:e].mT @ xc[s:e], gemm_bound(dc[s:e].mT, xc[s:e].mT, torch.float32, **close))  # type: ignore[arg-type]
    assert not out[137:].any() and not dx[137:].any()


def test_preshuffled_weights_give_the_same_bits() -> None:
    q = fw.quantize(torch.randn(2, 128, 256), "fp8_128x128")
    x = fw.quantize(torch.randn(20, 256), "fp8_1x128")
    sizes = torch.tensor([15, 5])
    assert torch.equal(fw.grouped_gemm(x, fw.preshuffle(q), sizes), fw.grouped_gemm(x, q, sizes))
    codes = torch.arange(2 * 32 * 128, dtype=torch.int64).to(torch.uint8).view(2, 32, 128)
    shuffled = shuffle(codes)
    assert not torch.equal(shuffled, codes)
    assert torch.equal(unshuffle(shuffled), codes)
    # 16 rows and 64 of K are 1024 bytes, lane l = 16 * (k lane) + row takes bytes 16 * l..
    block = shuffled[1].reshape(-1)[:1024].view(4, 16, 16)
    for lane in range(4):
        assert torch.equal(block[lane], codes[1, :16, 16 * lane : 16 * lane + 16])


def test_operators_pass_opcheck() -> None:
    x, w, sizes = operands()
    x.requires_grad_()
    torch.library.opcheck(torch.ops.fourwave.grouped_gemm, (x, w, sizes))
    torch.library.opcheck(torch.ops.fourwave.grouped_gemm, (x, w.mT.contiguous(), sizes, None, False, torch.float32))
    dout = torch.randn(140, 48).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.fourwave.grouped_gemm_wgrad, (dout, x, sizes))
    out = torch.zeros(4, 48, 64)
    torch.library.opcheck(
        torch.ops.fourwave.grouped_gemm_out,
        (dout.detach(), x.detach(), sizes, out, "reduction", False, False, None, True),
    )


def test_compiles_without_graph_breaks() -> None:
    x, w, sizes = operands()
    w.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, s: fw.grouped_gemm(x, w, s).float().sum(), fullgraph=True, backend="eager")
    compiled(x, w, sizes).backward()
    grad = w.grad
    w.grad = None
    fw.grouped_gemm(x, w, sizes).float().sum().backward()
    assert torch.equal(grad, w.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m_sizes": torch.tensor([5.0, 1, 1, 1])}, "int32 or int64"),
        ({"m_sizes": torch.tensor([5, 1])}, "m_sizes has 2 groups and b has 4"),
        ({"m_sizes": torch.tensor([[5, 1]])}, r"must be \[G\]"),
        ({"m_sizes": torch.tensor([5, 200, 0, 1])}, "206 in all, and there are 140 rows"),
        ({"m_sizes": torch.tensor([5, -1, 0, 1])}, "must not be negative"),
        ({"a": torch.zeros(140, 63).bfloat16()}, "must be equal, and are 63 and 64"),
        ({"b": torch.zeros(48, 64).bfloat16()}, r"must be \[G, N, K\]"),
        ({"b": torch.zeros(4, 48, 64).half()}, "both must have one dtype"),
        ({"bias": torch.zeros(48)}, r"must be \[G, N\] = \[4, 48\]"),
        ({"out": torch.zeros(140, 47)}, r"the result is \(140, 48\)"),
        ({"out_dtype": torch.int32}, "must be float32, bfloat16 or float16"),
        ({"a_scale": torch.ones(1)}, "go together"),
        ({"b_preshuffled": True}, "8-bit weights"),
        ({"config": 3}, "GroupedConfig"),
        ({"backend": "nobody"}, "the backends are"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], message: str) -> None:
    x, w, sizes = operands()
    call: dict[str, Any] = {"a": x, "b": w, "m_sizes": sizes, **change}
    with pytest.raises((ValueError, RuntimeError), match=message):
        fw.grouped_gemm(call.pop("a"), call.pop("b"), call.pop("m_sizes"), **call)


def test_weights_whose_blocks_straddle_groups_are_refused() -> None:
    q = fw.quantize(torch.randn(3, 64, 128), "fp8_128x128")
    x = fw.quantize(torch.randn(6, 128), "fp8_1x128")
    with pytest.raises(ValueError, match="64 rows for each group and scale blocks of 128 rows"):
        fw.grouped_gemm(x, q, torch.tensor([1, 2, 3]))


def test_empty_calls_have_answers() -> None:
    sizes = torch.tensor([0, 0])
    assert fw.grouped_gemm(torch.zeros(0, 8), torch.zeros(2, 4, 8), sizes).shape == (0, 4)
    assert fw.grouped_gemm_wgrad(torch.zeros(0, 8), torch.zeros(0, 4), sizes).eq(0).all()
    bias = torch.tensor([[1.0, 2], [3, 4]])
    out = fw.grouped_gemm(torch.zeros(4, 0), torch.zeros(2, 2, 0), torch.tensor([1, 2]), bias=bias)
    assert out.tolist() == [[1, 2], [3, 4], [3, 4], [0, 0]]


def test_sizes_can_be_checked_on_the_device() -> None:
    x, w, _ = operands()
    with pytest.raises((RuntimeError, ValueError), match="must not be negative"):
        fw.grouped_gemm(x, w, torch.tensor([1, 2, 200, 0]), check_sizes=True)
    with pytest.raises((RuntimeError, ValueError), match="must not be negative"):  # their sum wraps to 0
        fw.grouped_gemm(x, w, torch.tensor([2**62] * 4), check_sizes=True)


def test_explain_names_the_backend_and_why_no_other() -> None:
    x, w, sizes = operands()
    told = fw.explain_grouped(x, w, sizes)
    assert told.backend == "native"
    assert "hopper" in told.rejected and "grouped_gemm 4 groups, 140x48x64" in str(told)
    assert fw.explain_grouped(torch.zeros(140, 48).bfloat16(), x, sizes, wgrad=True).problem.split == "reduction"


def test_strided_operands_and_results() -> None:
    x, w, sizes = operands()
    out = torch.full((48, 150), float("nan")).bfloat16().mT[:140]
    fw.grouped_gemm(x.mT.contiguous().mT, w.mT.contiguous().mT, sizes, out=out)
    assert torch.equal(out, fw.grouped_gemm(x, w, sizes))
    assert replace(GroupedCase("forward", (3,), 16, 32), sliced=True).run("native").passed


@pytest.mark.parametrize("scaling", [None, "tensor", "row", "1x32"])
@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad"])
def test_native_is_within_the_bound(kind: str, scaling: str | None) -> None:
    assert GroupedCase(kind, (5, 130, 0, 1), 136, 264, scaling=scaling, extra=3).run("native").passed


def test_preshuffled_cannot_be_read_transposed() -> None:
    with pytest.raises(ValueError, match="trans_b=False"):
        fw.grouped_gemm(
            torch.zeros(1, 1), Preshuffled(torch.zeros(16, 64).to(torch.float8_e5m2)), torch.zeros(1), trans_b=False
        )
    with pytest.raises(ValueError, match="multiple of 16"):
        fw.preshuffle(torch.zeros(8, 64).to(torch.float8_e5m2))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "mxfp8_e4m3"])
def test_preshuffled_groups_have_whole_blocks_of_rows(name: str) -> None:
    """2 groups of 24 rows are 3 blocks of 16, of which the middle one has rows of both."""
    x, w, sizes = fw.quantize(torch.randn(8, 64), name), fw.quantize(torch.randn(48, 64), name), torch.tensor([3, 5])
    for call in (fw.grouped_gemm, fw.explain_grouped):
        with pytest.raises(ValueError, match="N=24 and K=64: preshuffled weights need N a multiple of 16"):
            call(x, fw.preshuffle(w), sizes)
    codes = torch.zeros(2, 24, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="N=24 and K=64: preshuffled weights need N a multiple of 16"):
        fw.grouped_gemm(torch.zeros(8, 64).to(codes.dtype), codes, sizes, b_preshuffled=True)
    codes = torch.zeros(2, 16, 96).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="N=16 and K=96: preshuffled weights need"):
        fw.grouped_gemm(torch.zeros(8, 96).to(codes.dtype), codes, sizes, b_preshuffled=True)


NO_SIM = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
BACKENDS = ["native", pytest.param("sim:gfx950", marks=NO_SIM)]


def negated(t: torch.Tensor) -> torch.Tensor:
    """t as a view of -t whose sign is not yet applied."""
    view: torch.Tensor = torch._neg_view(-t)  # type: ignore[attr-defined]
    assert view.is_neg()
    return view


@pytest.mark.parametrize("name", ["a", "b", "m_sizes", "bias", "out", "a_scale", "b_scale"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_negated_views(name: str, backend: str) -> None:
    """Kernels read memory: what is negated when it is read must be negated before, and out when it has been written."""
    x, w, _ = operands()
    call: dict[str, Any] = {"a": x[:20], "b": w, "m_sizes": torch.tensor([7, 0, 9, 2])}
    if name.endswith("scale"):
        call["a"], call["b"] = (fw.quantize(t, "fp8_e4m3").data for t in (x[:20], w))
        call["b"] = call["b"].view(w.shape)
        call |= {
            "a_scale": torch.full((20,), 3.0),
            "b_scale": torch.rand(4, 48) + 1,
            "a_scaling": "row",
            "b_scaling": "row",
        }
    else:
        call["bias"] = torch.randn(4, 48).bfloat16()
    call["out"] = torch.zeros(20, 48).bfloat16()
    right = fw.grouped_gemm(**call, backend=backend).clone()
    assert right.any()
    call["out"].zero_()
    call[name] = negated(call[name])
    out = fw.grouped_gemm(**call, backend=backend)
    assert out is call["out"] and torch.equal(out, right)


@pytest.mark.parametrize("name", ["dout", "x", "out"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_negated_views_in_wgrad(name: str, backend: str) -> None:
    x, _, _ = operands()
    dout = torch.randn(140, 48).bfloat16()
    call = {"dout": dout[:20], "x": x[:20], "m_sizes": torch.tensor([7, 0, 9]), "out": torch.randn(3, 48, 64)}
    before = call["out"].clone()
    right = fw.grouped_gemm_wgrad(**call, accumulate=True, backend=backend).clone()  # type: ignore[arg-type]
    call["out"] = before.clone()
    call[name] = negated(call[name])
    out = fw.grouped_gemm_wgrad(**call, accumulate=True, backend=backend)  # type: ignore[arg-type]
    assert torch.equal(out, right) and not torch.equal(right, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_may_lie_beside_what_is_read(backend: str) -> None:
    x, w, sizes = operands()
    rows = torch.zeros(140, 128).bfloat16()
    rows[:, :64] = x
    fw.grouped_gemm(rows[:, :64], w, sizes, out=rows[:, 64:112], backend=backend)
    assert torch.equal(rows[:, 64:112], fw.grouped_gemm(x, w, sizes, backend=backend))
    assert torch.equal(rows[:, :64], x) and not rows[:, 112:].any()
    with pytest.raises(ValueError, match="out shares memory with a"):
        fw.grouped_gemm(rows[:, :64], w, sizes, out=rows[:, 48:96], backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m_sizes": torch.tensor([5.0, 1, 1, 1])}, "int32 or int64"),
        ({"out_dtype": torch.int32}, "must be float32, bfloat16 or float16"),
        ({"b": torch.zeros(4, 48, 64).half()}, "both must have one dtype"),
        ({"bias": torch.zeros(2, 48)}, r"must be \[G, N\]"),
        ({"out": torch.zeros(140, 48, dtype=torch.int32)}, "must be float32, bfloat16 or float16"),
        ({"a_scale": torch.ones(3), "a_scaling": "row"}, "scaled operands are 8-bit floats"),
    ],
)
def test_tracing_refuses_what_the_call_refuses(change: dict[str, Any], message: str) -> None:
    """An error while a graph is traced, not when it runs."""
    x, w, sizes = operands()
    call: dict[str, Any] = {"a": x, "b": w, "m_sizes": sizes, **change}
    with pytest.raises(ValueError, match=message):
        fw.grouped_gemm(**call)
    with FakeTensorMode() as mode:
        fakes: dict[str, Any] = {
            key: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for key, t in call.items()
        }
        with pytest.raises(ValueError, match=message):
            fw.grouped_gemm(**fakes)
        assert fw.grouped_gemm(mode.from_tensor(x), mode.from_tensor(w), mode.from_tensor(sizes)).dtype == x.dtype


def test_compiles_for_any_number_of_rows() -> None:
    x, w, sizes = operands()
    bias = torch.randn(4, 48).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(fw.grouped_gemm, fullgraph=True, backend="eager", dynamic=True)
    for rows in (140, 137):
        assert torch.equal(compiled(x[:rows], w, sizes, bias=bias), fw.grouped_gemm(x[:rows], w, sizes, bias=bias))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m_sizes": [5, 130, 0, 1]}, "m_sizes is of type list"),
        ({"a": [[1.0]]}, "a is of type list"),
        ({"bias": 3}, "bias is of type int"),
        ({"m_sizes": [5, 130, 0, 1], "check_sizes": True}, "m_sizes is of type list"),
    ],
)
def test_what_is_no_tensor_is_named(change: dict[str, Any], message: str) -> None:
    x, w, sizes = operands()
    with pytest.raises(ValueError, match=message):
        fw.grouped_gemm(**{"a": x, "b": w, "m_sizes": sizes, **change})
    with pytest.raises(ValueError, match=message):
        fw.explain_grouped(**{"a": x, "b": w, "m_sizes": sizes, **change})


def test_flags_are_true_or_false() -> None:
    x, w, sizes = operands()
    dout = torch.randn(140, 48).bfloat16()
    for wrong in ("no", None, 2):
        for name in ("trans_b", "fast_accum", "b_preshuffled"):
            options: dict[str, Any] = {name: wrong}
            with pytest.raises(ValueError, match=f"{name} is {wrong!r}; it must be True or False"):
                fw.grouped_gemm(x, w, sizes, **options)
        with pytest.raises(ValueError, match=f"accumulate is {wrong!r}; it must be True or False"):
            fw.grouped_gemm_wgrad(dout, x, sizes, accumulate=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "backend", ["native", *(pytest.param(f"sim:{arch}", marks=NO_SIM) for arch in ("gfx950", "gfx942"))]
)
def test_sizes_of_one_group_with_any_stride(backend: str, dtype: torch.dtype) -> None:
    """One element is contiguous with any stride, but does not become two words of 32 bits with any."""
    a, w = torch.randn(12, 64).bfloat16(), torch.randn(1, 32, 64).bfloat16()
    sizes = torch.tensor([9, 100], dtype=dtype)[::2]
    assert sizes.stride(0) == 2
    out = fw.grouped_gemm(a, w, sizes, backend=backend)
    assert torch.equal(out, fw.grouped_gemm(a, w, sizes.clone(), backend=backend)) and not out[9:].any()
    dw = fw.grouped_gemm_wgrad(out, a, sizes, backend=backend)
    assert torch.equal(dw, fw.grouped_gemm_wgrad(out, a, torch.tensor([9], dtype=dtype), backend=backend))


@pytest.mark.parametrize(
    "backend", ["native", *(pytest.param(f"sim:{arch}", marks=NO_SIM) for arch in ("gfx950", "gfx942"))]
)
def test_one_column_of_any_stride(backend: str) -> None:
    """out [M, 1], and [G, M, 1] of wgrad, with strides that no row of one element needs."""
    a, w, sizes = torch.randn(7, 64).bfloat16(), torch.randn(2, 1, 64).bfloat16(), torch.tensor([3, 4])
    out = torch.full((40,), 9.0).bfloat16().as_strided((7, 1), (5, 7))
    fw.grouped_gemm(a, w, sizes, out=out, backend=backend)
    assert torch.equal(out, fw.grouped_gemm(a, w, sizes, backend=backend))
    dw = torch.full((200,), 9.0).bfloat16().as_strided((2, 64, 1), (80, 1, 9))
    fw.grouped_gemm_wgrad(a, out, sizes, out=dw, backend=backend)
    assert torch.equal(dw, fw.grouped_gemm_wgrad(a, out, sizes, backend=backend))
