"""fourwave.te: the names, the meaning of layouts, and a training script as it would be written for Transformer Engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourwave as fw
import fourwave.te as te
from fourwave.te import recipe
from fourwave.te.recipe import DelayedScaling, Format

DEVICE = "cpu"


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_training_script() -> None:
    """Linear, LayerNormLinear and LayerNormMLP in fp8_autocast, with TE's arguments and order."""
    torch.manual_seed(0)
    fp8_recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    model = torch.nn.Sequential(
        te.LayerNormLinear(32, 64, 1e-5, bias=True, params_dtype=torch.float32, device=DEVICE),
        te.LayerNormMLP(64, 96, 1e-5, activation="swiglu", normalization="RMSNorm", seq_length=5, device=DEVICE),
        te.RMSNorm(64, device=DEVICE),
        te.Linear(64, 32, bias=True, tp_size=1, sequence_parallel=False, device=DEVICE),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = randn(8, 5, 32)
    losses = []
    for _ in range(12):
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            y = model(x)
        loss = F.mse_loss(y, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    first: Any = model[0]
    assert first.delayed_amax_history.shape == (16, 3)
    assert not torch.equal(first.delayed_scale, torch.ones(3))


def test_recipes_are_the_packages_own() -> None:
    R = fw.recipes
    for mine, theirs in (
        (R.DelayedScaling("e4m3", 1, 8, "most_recent", None, False, True), DelayedScaling(1, Format.E4M3, 8, "most_recent", None, False)),
        (R.CurrentScaling(fast_accum=True), recipe.Float8CurrentScaling()),
        (R.CurrentScaling("hybrid", "pow2", "high_precision", True), recipe.Float8CurrentScaling(True, backward_override="high_precision")),
        (R.BlockScaling(), recipe.Float8BlockScaling()),
        (R.BlockScaling(scale="fp32", weight_block="1x128"), recipe.Float8BlockScaling(True, w_block_scaling_dim=1)),
        (R.MXFP8("e4m3", "ceil"), recipe.MXFP8BlockScaling()),
    ):  # fmt: skip
        assert mine.plan == theirs.plan and isinstance(theirs, R.Recipe)
    for refused in (
        lambda: recipe.NVFP4BlockScaling(),
        lambda: DelayedScaling(fp8_dpa=True),
        lambda: recipe.MXFP8BlockScaling(margin=1),
        lambda: recipe.Float8BlockScaling(x_block_scaling_dim=2),
        lambda: recipe.Float8CurrentScaling(backward_override="dequantized"),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with pytest.raises(ValueError, match="E5M2"):
        DelayedScaling(fp8_format=Format.E5M2)


def test_scaling_factors_of_functions_multiply() -> None:
    seen: list[Any] = []

    def factor(amax: torch.Tensor, old: torch.Tensor, largest: torch.Tensor, _: Any) -> torch.Tensor:
        seen.append(old.clone())
        return torch.full_like(amax, 4.0)

    linear = te.Linear(32, 32, device=DEVICE)
    for _ in range(3):
        with te.autocast(recipe=DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=factor)):
            linear(randn(4, 32).requires_grad_()).sum().backward()
    assert linear.delayed_scale is not None and linear.delayed_scale.tolist() == [0.25] * 3
    assert seen[0].tolist() == [1.0] * 3 and seen[-1].tolist() == [4.0] * 3


def test_autocast_takes_its_arguments_in_their_order() -> None:
    linear, x = te.Linear(32, 32, device=DEVICE), randn(4, 32)
    plain = F.linear(x, linear.weight, linear.bias)
    with te.autocast(True, False, recipe.MXFP8BlockScaling(), None):
        quantized = linear(x)
        with te.fp8_autocast(False):
            assert torch.equal(linear(x), plain)
    assert not torch.equal(quantized, plain)
    with te.autocast(False, True, DelayedScaling()):
        assert torch.equal(linear(x.requires_grad_()), plain)
    assert linear.delayed_amax_history is not None and float(linear.delayed_amax_history[0, 0]) == float(
        x.detach().abs().max()
    )
    with te.autocast():
        y = te.checkpoint(linear, x, use_reentrant=False)
    y.sum().backward()
    with pytest.raises(NotImplementedError), te.quantized_model_init():
        pass
    with te.quantized_model_init(enabled=False):
        te.Linear(4, 4, device=DEVICE)
    assert te.is_fp8_available() is True and te.is_mxfp8_available(return_reason=True) == (True, "")
    assert te.is_nvfp4_available() is False


@pytest.mark.parametrize("quantized", [False, True])
def test_layouts_of_general_gemm(quantized: bool) -> None:
    w, x, dy = randn(64, 96, seed=1), randn(32, 96, seed=2), randn(32, 64, seed=3)

    def q(t: torch.Tensor, direction: str) -> Any:
        return fw.quantize(t, "mxfp8_e4m3", direction) if quantized else t

    def v(t: Any) -> torch.Tensor:
        return t.dequantize() if quantized else t

    a, b = q(w, "rowwise"), q(x, "rowwise")
    out, *rest = te.general_gemm(a, b, torch.float32)
    torch.testing.assert_close(out, v(b) @ v(a).mT, rtol=1e-5, atol=1e-5)
    assert rest == [None, None, None]
    a, b = q(w, "columnwise"), q(dy, "rowwise")
    torch.testing.assert_close(te.general_gemm(a, b, torch.float32, layout="NN")[0], v(b) @ v(a), rtol=1e-5, atol=1e-5)
    a, b = q(x, "columnwise"), q(dy, "columnwise")
    torch.testing.assert_close(
        te.general_gemm(a, b, torch.float32, layout="NT", use_split_accumulator=True)[0],
        v(b).mT @ v(a),
        rtol=1e-5,
        atol=1e-5,
    )
    main = torch.ones(64, 96)
    out, db, _, _ = te.general_gemm(
        a, b, layout="NT", out=main, accumulate=True, beta=1.0, grad=True, bias=torch.empty(64)
    )
    assert out is main and db is not None
    torch.testing.assert_close(main, 1 + v(b).mT @ v(a), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(db, v(b).sum(0), rtol=1e-5, atol=1e-5)


def test_gelu_and_errors_of_general_gemm() -> None:
    w, x, bias = randn(64, 96, seed=1) / 10, randn(2, 16, 96, seed=2), randn(64)
    z = F.linear(x, w, bias)
    out, _, gelu_in, _ = te.general_gemm(w, x, gelu=True, bias=bias)
    assert gelu_in is not None
    torch.testing.assert_close(out, F.gelu(z, approximate="tanh"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gelu_in, z, rtol=1e-5, atol=1e-5)
    dy, w2 = randn(2, 16, 32), randn(32, 64, seed=4)
    leaf = z.clone().requires_grad_()
    F.linear(F.gelu(leaf, approximate="tanh"), w2).backward(dy)
    dz = te.general_gemm(w2, dy, layout="NN", gelu=True, gelu_in=gelu_in, grad=True)[0]
    torch.testing.assert_close(dz, leaf.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="layout"):
        te.general_gemm(w, x, layout="TT")
    with pytest.raises(ValueError, match="the layouts are TN"):
        te.general_gemm(w, x, layout=["TN"])  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="beta"):
        te.general_gemm(w, x, beta=0.5)
    with pytest.raises(NotImplementedError, match="quantization_params"):
        te.general_gemm(w, x, quantization_params=object())


@pytest.mark.parametrize("single", [False, True])
def test_general_grouped_gemm(single: bool) -> None:
    splits = [5, 0, 11]
    w = [randn(24, 32, seed=i) for i in range(3)]
    x = list(randn(16, 32, seed=9).split(splits))
    biases = [randn(24, seed=5 + i) for i in range(3)]
    right = torch.cat([F.linear(a, b, c) for a, b, c in zip(x, w, biases, strict=True)])
    out = [torch.full((16, 24), float("nan"))] if single else [torch.full((m, 24), float("nan")) for m in splits]
    got, *_ = te.general_grouped_gemm(
        w, x, out, [None] * 3, torch.float32, m_splits=splits, bias=biases, use_bias=True, single_output=single
    )
    torch.testing.assert_close(got if single else torch.cat(got), right, rtol=1e-5, atol=1e-5)
    dw = [torch.zeros(24, 32) for _ in splits]
    dy = list(right.split(splits))
    _, db, _ = te.general_grouped_gemm(
        x, dy, dw, None, torch.float32, layout="NT", grad=True, accumulate=True, bias=biases, use_bias=True
    )
    for a, b, c, d in zip(dw, dy, x, db, strict=True):
        torch.testing.assert_close(a, b.mT @ c, rtol=1e-5, atol=1e-5)
        assert d is not None
        torch.testing.assert_close(d, b.sum(0), rtol=1e-5, atol=1e-5)


def test_grouped_linear() -> None:
    torch.manual_seed(0)
    module: Any = te.GroupedLinear(3, 32, 64, bias=True, device=DEVICE)
    x = randn(12, 32)
    y = module(x, [3, 0, 9])
    right = torch.cat(
        [F.linear(x[:3], module.weight[0], module.bias[0]), F.linear(x[3:], module.weight[2], module.bias[2])]
    )  # type: ignore[index]
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)
    state = module.state_dict()
    assert set(state) == {f"{name}{g}" for name in ("weight", "bias") for g in range(3)}
    other = te.GroupedLinear(3, 32, 64, device=DEVICE)
    other.load_state_dict(state)
    assert torch.equal(other(x, torch.tensor([3, 0, 9])), y)
    with te.autocast(recipe=recipe.MXFP8BlockScaling()):
        other(x.requires_grad_(), [3, 0, 9]).sum().backward()


def test_what_is_not_here_is_told() -> None:
    for refused in (
        lambda: te.Linear(4, 4, tp_size=2),
        lambda: te.LayerNormMLP(4, 4, sequence_parallel=True, tp_size=2),
        lambda: te.LayerNormLinear(4, 4, parameters_split=("q", "k")),
        lambda: te.LayerNormMLP(4, 4, activation="swiglu", activation_params={"limit": 7.0}),
        lambda: te.LayerNormMLP(4, 4, activation="srelu"),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with pytest.raises(TypeError, match="in_feature"):
        te.Linear(4, 4, in_feature=3)  # type: ignore[call-arg]


def test_initial_values_norms_and_checkpoint() -> None:
    torch.manual_seed(0)
    linear = te.Linear(256, 256, device=DEVICE)
    assert abs(float(linear.weight.std()) - 0.023) < 0.001 and linear.bias is not None and not linear.bias.any()
    x = randn(4, 32).requires_grad_()
    for module, right in (
        (te.LayerNorm(32, device=DEVICE), F.layer_norm(x, (32,))),
        (te.RMSNorm(32, zero_centered_gamma=True, device=DEVICE), F.rms_norm(x, (32,), eps=1e-5)),
    ):
        torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-5)
    torch.manual_seed(0)
    plain = te.LayerNormMLP(32, 48, device=DEVICE)
    kept = te.LayerNormMLP(32, 48, checkpoint=True, device=DEVICE)
    kept.load_state_dict(plain.state_dict())
    grads = []
    for each in (plain, kept):
        with te.autocast():
            y = each(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *each.parameters()]))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_splits_and_outputs_that_do_not_fit() -> None:
    grouped, x = te.GroupedLinear(3, 64, 64), torch.ones(8, 64)
    for splits in ([3, 0, 6], [3, -1, 6], [3.0, 0.0, 5.0]):
        with pytest.raises(ValueError, match="sum to the 8 rows"):
            grouped(x, splits)  # type: ignore[arg-type]
    assert torch.equal(grouped(x, [3, 0, 5]), grouped(x, torch.tensor([3, 0, 5])))
    with pytest.raises(ValueError, match="2 pairs of matrices and 1 outputs"):
        te.general_grouped_gemm([x, x], [x, x], [torch.empty(8, 8)], [None] * 2, torch.float32)
