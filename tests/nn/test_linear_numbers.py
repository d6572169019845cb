"""The three products of fw.nn.Linear on every backend, against float64 products of the same codes and scales.

What is expected is written out here from `fw.quantize` (whose numbers have tests of their own) and the table of docs/recipes.md,
not from the module's code.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.testing import bounds
from targets import Target

R = fw.recipes

# recipe, formats of (x, w) in fprop, (g, w) in dgrad, (g, x) in wgrad, scale_rule; None: plain
CASES: dict[str, tuple[Any, Any, Any, Any, str | None]] = {
    "unquantized": (R.Unquantized(), None, None, None, None),
    "delayed hybrid": (R.DelayedScaling(amax_history_len=3), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), None),
    "delayed e4m3": (R.DelayedScaling("e4m3", amax_history_len=3), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), None),
    "current": (R.CurrentScaling(), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), "fp32"),
    "current pow2": (R.CurrentScaling(scale="pow2"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), ("fp8_e5m2", "fp8_e4m3"), "pow2"),
    "current, plain backward": (R.CurrentScaling(backward="high_precision"), ("fp8_e4m3", "fp8_e4m3"), None, None, "fp32"),
    "blocks": (R.BlockScaling(), ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128"), "pow2"),
    "mxfp8": (R.MXFP8(), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e4m3"), "ceil"),
    "mxfp8 hybrid": (R.MXFP8("hybrid", "floor"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_e4m3"), "floor"),
    "mxfp4": (R.MXFP4(), ("mxfp4", "mxfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp8_e4m3"), "floor"),
    "mxfp4, mxfp4 backward": (R.MXFP4("mxfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp4"), "floor"),
}  # fmt: skip
SIZES = [(1, 64, 96), (3, 160, 64)]  # batch, in, out
SEQUENCE = 5
NATIVE = [(dtype, size) for dtype in (torch.float32, torch.float16, torch.bfloat16) for size in SIZES]
SIMULATED = [(torch.bfloat16, (2, 64, 96))]


def spread(*shape: int, dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    """Rows and columns of different sizes, within a decade so that one scale for all is no trouble."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(*shape, generator=generator)
    t = t * torch.exp2(torch.randint(-2, 2, (*shape[:-1], 1), generator=generator).float())
    return (t * torch.exp2(torch.randint(-1, 2, shape[-1:], generator=generator).float())).to(device, dtype)


def values(t: torch.Tensor, name: str | None, direction: str, rule: str | None, scale: Any, fnuz: bool | None) -> Any:
    """float64 values of t as one operand."""
    t = t.detach().reshape(-1, t.shape[-1])
    if name is None:
        return t.double()
    is_mx = name.startswith("mx")
    q = fw.quantize(
        t, name, direction, scale=scale, scale_rule=None if scale is not None else rule, fnuz=None if is_mx else fnuz,
        backend="native",
    )  # fmt: skip
    assert isinstance(q, QuantizedTensor)
    return q.dequantize(torch.float64)


def accumulator(backend: str, case: str, k: int) -> float:
    """u_acc of bounds.gemm_bound: Hopper's matrix unit keeps fewer bits of sums of 8-bit products."""
    if case == "unquantized" or not (backend == "hopper" or (backend == "native" and torch.cuda.is_available())):
        return bounds.U_FP32
    return bounds.hopper_fp8_u_acc(k, promote=True) + 4 * bounds.U_FP32


def check(
    linear: Any,
    case: str,
    x: torch.Tensor,
    g: torch.Tensor,
    y: torch.Tensor,
    scales: Any,
    fnuz: bool | None,
    backend: str = "native",
) -> dict[str, float]:
    """Ratios of error to bound of every element of y, dx, dw, dbias."""
    _, fprop, dgrad, wgrad, rule = CASES[case]
    w, dtype = linear.weight, x.dtype
    x_scale, w_scale, g_scale = [None] * 3 if scales is None else [scales[i] for i in range(3)]
    n, k = w.shape
    plain = (None, None)
    found = {}
    scaled = fprop is not None

    def ratio(out: torch.Tensor, a: Any, b: Any, rows_of_b: bool, out_dtype: torch.dtype, **kwargs: Any) -> float:
        a, b = (t.detach() if isinstance(t, torch.Tensor) else t for t in (a, b))
        bias = kwargs.get("bias")
        exact = a @ (b.mT if rows_of_b else b) + (0 if bias is None else bias.double())
        u_acc = accumulator(backend, case, a.shape[1])
        bound = bounds.gemm_bound(a, b, out_dtype, trans_b=rows_of_b, scaled=scaled, u_acc=u_acc, **kwargs)
        return bounds.error_ratio(out.reshape(exact.shape).detach(), exact, bound)[0]

    fx, fw_ = fprop or plain
    a, b = values(x, fx, "rowwise", rule, x_scale, fnuz), values(w, fw_, "rowwise", rule, w_scale, fnuz)
    found["y"] = ratio(y, a, b, True, dtype, bias=linear.bias.detach())
    dg, dw_ = dgrad or plain
    a, b = values(g, dg, "rowwise", rule, g_scale, fnuz), values(w, dw_, "columnwise", rule, w_scale, fnuz)
    assert b.shape == (n, k)
    found["dx"] = ratio(x.grad, a, b, False, dtype)  # type: ignore[arg-type]
    wg, wx = wgrad or plain
    a, b = values(g, wg, "columnwise", rule, g_scale, fnuz), values(x, wx, "columnwise", rule, x_scale, fnuz)
    if w.grad is not None:
        found["dw"] = ratio(w.grad, a.mT, b, False, w.dtype)
    total = g.double().reshape(-1, n)
    found["dbias"] = bounds.error_ratio(linear.bias.grad, total.sum(0), bounds.sum_bound(total, linear.bias.dtype))[0]
    return found


QUICK = ("unquantized", "delayed hybrid", "blocks", "mxfp8", "mxfp4")


@pytest.mark.parametrize("case", QUICK)
def test_products_on_each_backend(target: Target, case: str, caplog: pytest.LogCaptureFixture) -> None:
    run_case(target, case, caplog)


@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_other_recipes(case: str, caplog: pytest.LogCaptureFixture) -> None:
    run_case(Target("native", "cpu"), case, caplog)


@pytest.mark.parametrize("case", [case for case in CASES if "mxfp4" not in case])
def test_operands_stored_transposed(
    case: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NVIDIA GPUs: every product reaches the backend with the reduction last, and the numbers are the same."""
    from fourwave.nn import products

    monkeypatch.setattr(products, "_stores_transposed", lambda *_: True)
    run_case(Target("native", "cpu"), case, caplog)
    if CASES[case][2] is not None:
        assert all(" TN " in r.getMessage() for r in caplog.records if r.getMessage().startswith("gemm "))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_other_recipes_on_each_backend(target: Target, case: str, caplog: pytest.LogCaptureFixture) -> None:
    run_case(target, case, caplog)


def run_case(target: Target, case: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        run_products(target, case, caplog)
    except NotImplementedError as why:
        if target.backend == "native":
            raise
        try:
            run_products(target, case, caplog, trains=False)
        except NotImplementedError:
            pytest.skip(f"{target.backend} says: {why}")
        pytest.skip(f"fprop and dgrad are right; of wgrad {target.backend} says: {why}")


def run_products(target: Target, case: str, caplog: pytest.LogCaptureFixture, trains: bool = True) -> None:
    """trains: with wgrad."""
    device, backend = target.device, target.backend
    recipe = CASES[case][0]
    fnuz = backend == "sim:gfx942" or None
    for dtype, (batch, k, n) in SIMULATED if target.simulated else NATIVE:
        torch.manual_seed(0)
        linear = fw.nn.Linear(k, n, params_dtype=dtype, device=device)
        with torch.no_grad():
            linear.weight.copy_(spread(n, k, dtype=dtype, seed=1, device=device))
        linear.weight.requires_grad_(trains)
        is_delayed = "delayed" in case
        scales = None
        for step in range(2 if is_delayed else 1):
            x = spread(batch, SEQUENCE, k, dtype=dtype, seed=2 + step, device=device).requires_grad_()
            g = spread(batch, SEQUENCE, n, dtype=dtype, seed=7 + step, device=device)
            linear.zero_grad()
            caplog.clear()
            with fw.use_backend(backend), caplog.at_level(logging.DEBUG, logger="fourwave.dispatch"):
                with fw.autocast(recipe=recipe):
                    y = linear(x)
                if linear.delayed_scale is not None:
                    scales = linear.delayed_scale.clone()
                y.backward(g)
            records = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gemm ")]
            assert len(records) == 2 + trains
            assert all(f": {backend} (" in record for record in records), records
            found = check(linear, case, x, g, y, scales, fnuz, backend)
            assert ("dw" in found) is trains
            assert max(found.values()) <= 1, (dtype, (batch, k, n), step, found)
        if is_delayed:
            # The second step's scales are the first one's amax over the largest value.
            assert scales is not None and not torch.equal(scales, torch.ones_like(scales))


@pytest.mark.parametrize("case", ["current", "mxfp8", "mxfp4", "unquantized"])
def test_a_wrong_operand_is_seen(case: str) -> None:
    """The bound is sharp enough: a weight with one element of one block off, or the scales of two rows exchanged, is outside."""
    torch.manual_seed(0)
    linear = fw.nn.Linear(64, 96)
    x = spread(1, SEQUENCE, 64, dtype=torch.float32, seed=2, device="cpu").requires_grad_()
    g = spread(1, SEQUENCE, 96, dtype=torch.float32, seed=3, device="cpu")
    with fw.autocast(recipe=CASES[case][0]):
        y = linear(x)
    y.backward(g)
    assert max(check(linear, case, x, g, y, None, None).values()) <= 1
    with torch.no_grad():
        linear.weight[5, 7] += linear.weight.abs().max()
    found = check(linear, case, x, g, y, None, None)
    assert found["y"] > 1 and found["dx"] > 1


def test_columns_are_not_the_rows() -> None:
    """dgrad and wgrad use codes along the reduction, not the transposed rowwise ones: the numbers differ."""
    w = spread(96, 64, dtype=torch.float32, seed=1, device="cpu")
    rowwise = values(w, "mxfp8_e4m3", "rowwise", "floor", None, None)
    assert not torch.equal(rowwise, values(w, "mxfp8_e4m3", "columnwise", "floor", None, None))


@pytest.mark.parametrize("case", ["unquantized", "blocks", "mxfp8"])
def test_grouped_products_on_each_backend(target: Target, case: str) -> None:
    """fw.nn.GroupedLinear, forward, dgrad and wgrad, an empty group and rows past the last one included."""
    recipe, fprop, dgrad, wgrad, rule = CASES[case]
    device, backend, dtype = target.device, target.backend, torch.bfloat16
    fnuz = backend == "sim:gfx942" or None
    sizes, k, n = [3, 0, 9, 5], 128, 256
    rows = sum(sizes) + 4
    torch.manual_seed(0)
    module = fw.nn.GroupedLinear(4, k, n, bias=False, params_dtype=dtype, device=device)
    with torch.no_grad():
        module.weight.copy_(spread(4, n, k, dtype=dtype, seed=1, device=device))
    x = spread(rows, k, dtype=dtype, seed=2, device=device).requires_grad_()
    g = spread(rows, n, dtype=dtype, seed=3, device=device)
    try:
        with fw.use_backend(backend):
            with fw.autocast(recipe=recipe):
                y = module(x, torch.tensor(sizes, device=device))
            y.backward(g)
    except NotImplementedError as why:
        if backend == "native":
            raise
        pytest.skip(f"{backend} says: {why}")
    none = (None, None)

    def operand(t: torch.Tensor, name: str | None, direction: str) -> torch.Tensor:
        return values(t, name, direction, rule, None, fnuz).view(t.shape)

    def close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        bounds.assert_within(
            out.detach(),
            a @ b.mT,
            bounds.gemm_bound(a, b, dtype, scaled=True, u_acc=accumulator(backend, case, a.shape[1])),
        )

    fx, fw_ = fprop or none
    dg, dw_ = dgrad or none
    wg, wx = wgrad or none
    w = module.weight
    start = 0
    for group, size in enumerate(sizes):
        span = slice(start, start + size)
        close(y[span], operand(x, fx, "rowwise")[span], operand(w, fw_, "rowwise")[group])
        assert x.grad is not None and w.grad is not None
        close(x.grad[span], operand(g, dg, "rowwise")[span], operand(w, dw_, "columnwise")[group].mT)
        close(w.grad[group], operand(g, wg, "columnwise")[span].mT, operand(x, wx, "columnwise")[span].mT)
        start += size
    assert x.grad is not None and not y[start:].any() and not x.grad[start:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_gradients_of_groups(target: Target, dtype: torch.dtype) -> None:
    """The sum of the rows of each group, float32 included, which AMD's grouped kernels do not multiply."""
    if target.backend in ("hopper", "flydsl"):
        pytest.skip("the products have tests of their own")
    torch.manual_seed(0)
    sizes, rows = [17, 0, 15], 32
    module = fw.nn.GroupedLinear(3, 64, 128, params_dtype=dtype, device=target.device)
    x = spread(rows, 64, dtype=dtype, seed=2, device=target.device).requires_grad_()
    g = spread(rows, 128, dtype=dtype, seed=3, device=target.device)
    with fw.use_backend(target.backend), fw.autocast(recipe=R.MXFP8()):
        module(x, torch.tensor(sizes, device=target.device)).backward(g)
    assert module.bias is not None and module.bias.grad is not None
    for part, bias in zip(g.double().split(sizes), module.bias.grad, strict=True):
        assert bounds.error_ratio(bias, part.sum(0), bounds.sum_bound(part, dtype))[0] <= 1
