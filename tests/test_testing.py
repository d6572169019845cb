"""The test tools themselves: a planted fault of each kind must be seen, and a right result must pass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fourwave as fw
from fourwave.backends.native import NativeBackend
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import GemmCase, assert_within, bounds, buffers, gemm_bound, inputs, shapes
from fourwave.testing.shapes import GEMM_SHAPES, by_name

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


# --------------------------------------------------------------------------------------------------------------- shapes


def test_shapes_have_what_their_names_say():
    for shape in (*GEMM_SHAPES, *shapes.GEMM_SHAPES_FULL):
        assert by_name(shape.name) is shape
        assert min(shape.M, shape.N, shape.K) >= 1
    assert by_name("M = 1").M == by_name("N = 1").N == by_name("K = 1").K == 1
    even = by_name("even")
    assert even.M % 64 == even.N % 64 == even.K % 64 == 0
    for name, size in (("tail M", "M"), ("tail N", "N"), ("tail K", "K")):
        shape = by_name(name)
        for other in "MNK":
            assert (getattr(shape, other) % 16 != 0) == (other == size)
    tails = by_name("tail all")
    assert all(getattr(tails, size) % 2 for size in "MNK")
    with pytest.raises(ValueError, match="tail all"):
        by_name("large")


# --------------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spread(dtype):
    shape = by_name("tail all")
    a, b = inputs.spread(shape, dtype, seed=5)
    assert a.shape == (77, 203) and b.shape == (145, 203) and a.dtype == b.dtype == dtype
    for t in (a, b):
        assert t.isfinite().all() and (t != 0).all()
        rows = t.double().abs().amax(1)
        assert rows.max() / rows.min() > 50 and len(rows.unique()) > 0.8 * len(rows)
        blocks = t[:, :192].double().abs().view(len(t), -1, inputs.K_BLOCK).amax(2)
        assert (blocks.max(1).values / blocks.min(1).values).min() > 2
        assert (t[:, -1].double().abs() > 0.05 * rows).all()  # the last k counts in every row
        assert (t < 0).any() and (t > 0).any()
    again = inputs.spread(shape, dtype, seed=5)
    assert torch.equal(a, again[0]) and torch.equal(b, again[1])
    assert not torch.equal(a, inputs.spread(shape, dtype, seed=6)[0])


def test_spread_has_one_truth_for_all_layouts():
    shape = by_name("small")
    a, b = inputs.spread(shape, torch.bfloat16)
    nn = inputs.spread(shape, torch.bfloat16, layout="NN")
    nt = inputs.spread(shape, torch.bfloat16, layout="NT")
    assert torch.equal(nn[0], a) and torch.equal(nn[1], b.mT) and nn[1].is_contiguous()
    assert torch.equal(nt[0], a.mT) and torch.equal(nt[1], b.mT) and nt[0].is_contiguous()
    with pytest.raises(ValueError, match="TN, NN, NT"):
        inputs.spread(shape, torch.bfloat16, layout="TT")


@pytest.mark.parametrize("kind", inputs.VIEWS)
def test_views_are_equal_and_surrounded_by_nan(kind):
    t = inputs.spread(by_name("small"), torch.bfloat16)[0]
    view = inputs.view(t, kind)
    assert torch.equal(view, t)
    storage = torch.empty(0, dtype=t.dtype).set_(view.untyped_storage())
    assert int((~storage.isnan()).sum()) == t.numel() < len(storage)
    strides = {"contiguous": (7, 1), "sliced": (72, 1), "offset": (20, 1), "transposed": (1, 11), "strided": (30, 2)}
    assert view.stride() == strides[kind]
    if kind in ("contiguous", "sliced"):
        assert view.data_ptr() % 16 == 0 and (kind == "contiguous" or view.stride(0) * 2 % 16 == 0)
    if kind == "offset":
        assert view.data_ptr() % 16 == 2


def test_unknown_view():
    with pytest.raises(ValueError, match="sliced"):
        inputs.view(torch.zeros(2, 2), "diagonal")
    with pytest.raises(ValueError, match="sliced"):
        buffers.poisoned(2, 2, torch.float32, layout="diagonal")


# -------------------------------------------------------------------------------------------------------------- buffers


@pytest.mark.parametrize("layout", buffers.LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poisoned(layout, dtype):
    out = buffers.poisoned(5, 7, dtype, layout=layout)
    assert out.tensor.shape == (5, 7) and out.tensor.isnan().all()
    out.tensor.copy_(torch.arange(35).view(5, 7))
    out.assert_guards_intact()
    assert torch.equal(out.tensor.double(), torch.arange(35.0, dtype=torch.float64).view(5, 7))
    added = buffers.poisoned(5, 7, dtype, layout=layout, addend=torch.ones(5, 7))
    assert (added.tensor == 1).all()
    added.assert_guards_intact()


@pytest.mark.parametrize("layout", buffers.LAYOUTS)
def test_a_write_beside_the_output_is_named(layout):
    for extent in ((6, 7), (5, 8)) if layout != "contiguous" else ((6, 7),):
        out = buffers.poisoned(5, 7, torch.bfloat16, layout=layout)
        out.tensor.as_strided(extent, out.tensor.stride()).fill_(0)
        with pytest.raises(AssertionError, match="guard bytes were overwritten; the first lies"):
            out.assert_guards_intact()
    before = buffers.poisoned(5, 7, torch.bfloat16, layout=layout)
    before.tensor.as_strided((1,), (1,), before.tensor.storage_offset() - 1).fill_(0)
    with pytest.raises(AssertionError, match="2 guard bytes were overwritten; the first lies -1 elements"):
        before.assert_guards_intact()


# --------------------------------------------------------------------------------------------------------------- bounds


def rounded(exact, dtype):
    return exact.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rounded_truth_is_within_the_bound_and_an_ulp_more_is_not(dtype):
    a, b = inputs.spread(by_name("tail all"), dtype)
    exact, bound = gemm_reference(a, b), gemm_bound(a, b, dtype)
    out = exact.to(dtype)
    assert 0 < assert_within(out, exact, bound) <= 1
    # The bound is no wider than two ulps where nothing cancels, so that it can see what it should.
    sums = a.double().abs() @ b.double().abs().mT
    plain = exact.abs() > 0.05 * sums
    if dtype != torch.float32:
        assert (bound[plain] <= 2 * torch.finfo(dtype).eps * exact.abs()[plain]).all()
    wrong = out.clone()
    wrong[3, 5] = float(exact[3, 5]) + 3 * float(bound[3, 5]) + 2 * abs(float(out[3, 5])) * torch.finfo(dtype).eps
    with pytest.raises(AssertionError, match=r"case: 1 of 11165 elements are off; the worst, \[3, 5\]"):
        assert_within(wrong, exact, bound, "case")


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_the_bound_holds_for_float32_arithmetic(out_dtype, activation):
    """Another order of the same float32 operations: blocks of K, added up one after the other."""
    a, b = inputs.spread(by_name("tail all"), torch.bfloat16, seed=2)
    generator = torch.Generator().manual_seed(0)
    bias, addend = torch.randn(145, generator=generator), torch.randn(77, 145, generator=generator).to(out_dtype)
    acc = torch.zeros(77, 145)
    for k in range(0, 203, 16):
        acc += a[:, k : k + 16].float() @ b[:, k : k + 16].float().mT
    from fourwave.ops.gemm.reference import activate

    out = (activate(acc * 0.3 + bias, activation) + addend.float()).to(out_dtype)
    options = {"bias": bias, "activation": activation, "alpha": 0.3, "addend": addend}
    assert_within(out, gemm_reference(a, b, **options), gemm_bound(a, b, out_dtype, **options))


def test_special_values():
    exact = torch.tensor([1.0, math.nan, math.inf, -math.inf, 1e5, 65519.0, 65521.0, 1.0, 1.0], dtype=torch.float64)
    bound = torch.full_like(exact, 1e-3)
    good = torch.tensor(
        [1.0, math.nan, math.inf, -math.inf, math.inf, 65504.0, math.inf, 1.0, 1.0], dtype=torch.float16
    )
    bound[5:7] = 40.0  # half an ulp of fp16 there, and some
    assert assert_within(good, exact, bound) <= 1
    for index, value in (
        (0, math.nan),
        (0, math.inf),
        (1, 0.0),
        (2, -math.inf),
        (3, math.nan),
        (4, -math.inf),
        (4, 65504),
    ):
        bad = good.clone()
        bad[index] = value
        with pytest.raises(AssertionError, match=rf"the worst, \[{index}\]"):
            assert_within(bad, exact, bound)
    zeros = torch.zeros(2, dtype=torch.float64)
    assert assert_within(torch.zeros(2), zeros, zeros) == 0
    with pytest.raises(AssertionError):
        assert_within(torch.tensor([0.0, 1e-30]), zeros, zeros)
    assert bounds.error_ratio(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3)) == (0.0, ())
    with pytest.raises(ValueError, match="bound"):
        assert_within(torch.zeros(2), zeros, zeros[:1])


# ---------------------------------------------------------------------------------------------------------------- cases


def plant(monkeypatch, fault):
    """Make the native backend wrong: fault(problem, a, b, out, bias, alpha, run) stands in for run_gemm."""
    real = NativeBackend.run_gemm

    def broken(self, problem, config, tensors):
        a, b, out, bias, alpha, *_ = tensors
        return fault(problem, a, b, out, bias, alpha, lambda *args: real(self, problem, config, GemmTensors(*args)))

    monkeypatch.setattr(NativeBackend, "run_gemm", broken)


def drop_last_k(problem, a, b, out, bias, alpha, run):
    a = a.clone()
    (a[-1] if problem.layout == "NT" else a[:, -1]).zero_()
    return run(a, b, out, bias, alpha)


def stride_taken_as_width(problem, a, b, out, bias, alpha, run):
    return run(a.as_strided(a.shape, (a.shape[1], 1)), b, out, bias, alpha)


def swap_two_rows(problem, a, b, out, bias, alpha, run):
    notes = run(a, b, out, bias, alpha)
    out[[0, 1]] = out[[1, 0]]
    return notes


def leave_last_column(problem, a, b, out, bias, alpha, run):
    kept = out[:, -1].clone()
    notes = run(a, b, out, bias, alpha)
    out[:, -1] = kept
    return notes


def write_one_row_more(problem, a, b, out, bias, alpha, run):
    notes = run(a, b, out, bias, alpha)
    out.as_strided((out.shape[0] + 1, out.shape[1]), out.stride())[-1] = 0
    return notes


def round_twice(problem, a, b, out, bias, alpha, run):
    product = torch.empty(problem.M, problem.N)
    op_a = a.mT if problem.trans_a else a
    op_b = b.mT if problem.trans_b else b
    product = (op_a.float() @ op_b.float()).to(problem.out_dtype).float() * alpha
    out.copy_(product if bias is None else product + bias)
    return []


def forget_alpha(problem, a, b, out, bias, alpha, run):
    return run(a, b, out, bias, 1.0)


def ignore_bias_of_one_column(problem, a, b, out, bias, alpha, run):
    bias = bias.clone()
    bias[7] = 0
    return run(a, b, out, bias, alpha)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize(
    "fault",
    [
        drop_last_k,
        stride_taken_as_width,
        swap_two_rows,
        leave_last_column,
        write_one_row_more,
        round_twice,
        forget_alpha,
        ignore_bias_of_one_column,
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_fails_the_case(monkeypatch, layout, fault):
    case = GemmCase(
        by_name("tail all"), layout, a_view="sliced", out_view="offset", bias_dtype=torch.float32, alpha=0.7
    )
    assert case.run("native").passed
    plant(monkeypatch, fault)
    result = case.run("native")
    assert not result.passed
    assert (result.guards is not None) == (fault is write_one_row_more)


def test_cases_describe_themselves():
    case = GemmCase(by_name("M = 1"), "NN", torch.float16, torch.float32, a_view="offset", bias_dtype=torch.float32)
    assert str(case) == "M = 1 1x192x256, NN, fp16, out fp32, a offset, bias fp32"
    text = str(replace(case, activation="relu", alpha=0.5, accumulate=True))
    assert text.endswith("bias fp32, relu, alpha 0.5, accumulate")
    problem = case.problem
    assert (problem.M, problem.N, problem.K, problem.layout) == (1, 192, 256, "NN")
    assert (
        problem
        == fw.explain(
            torch.zeros(1, 256, dtype=torch.float16),
            torch.zeros(256, 192, dtype=torch.float16),
            trans_b=False,
            bias=torch.zeros(192),
            out_dtype=torch.float32,
        ).problem
    )


@pytest.mark.parametrize("wrong", ["a_scale", "b_scale"])
def test_one_scale_taken_for_both_operands_fails_the_case(monkeypatch, wrong):
    case = GemmCase(by_name("tail all"), a_format="fp8_e4m3", b_format="fp8_e4m3")
    assert case.run("native").passed
    real = NativeBackend.run_gemm

    def broken(self, problem, config, tensors):
        return real(
            self, problem, config, tensors._replace(a_scale=getattr(tensors, wrong), b_scale=getattr(tensors, wrong))
        )

    monkeypatch.setattr(NativeBackend, "run_gemm", broken)
    assert not case.run("native").passed
