"""What each argument and each scale of the modules does: faults planted there went unseen by the other tests."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourwave as fw
import fourwave.te as te
from fourwave import nn as fnn
from fourwave.nn import context, function, grouped_linear
from fourwave.te import gemm as te_gemm

R = fw.recipes
DELAYED = R.DelayedScaling(amax_history_len=3)


def data(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- delayed scaling of modules other than Linear, whose rule test_delayed_scaling.py tests


def trained(modules: list[Any], call: Any, rows: int, columns: int, out: int) -> tuple[list[torch.Tensor], list[Any]]:
    """Results of four steps, whose inputs and gradients differ by octaves, and the states of the modules after each."""
    results, states = [], []
    for step in range(4):
        x = (data(step, rows, columns) * 2.0 ** (3 * (step % 3))).requires_grad_()
        with fw.autocast(recipe=DELAYED):
            y = call(x)
        y.backward(data(step + 9, rows, out) * 2.0 ** (-4 - 2 * step))
        assert x.grad is not None
        results += [y.detach(), x.grad]
        states.append([(m.delayed_scale.clone(), m.delayed_amax_history.clone()) for m in modules])
    return results, states


def test_both_layers_of_an_mlp_have_scales_of_their_own() -> None:
    """LayerNormMLP is a LayerNormLinear, the activation, and a Linear: in each step's results, scales and histories."""
    torch.manual_seed(0)
    mlp = fnn.LayerNormMLP(32, 64, activation="reglu")
    first, second = fnn.LayerNormLinear(32, 128), fnn.Linear(64, 32)
    with torch.no_grad():
        mlp.fc2_weight.mul_(16)
        for ours, theirs in (
            (first.layer_norm_weight, mlp.layer_norm_weight), (first.layer_norm_bias, mlp.layer_norm_bias),
            (first.weight, mlp.fc1_weight), (first.bias, mlp.fc1_bias), (second.weight, mlp.fc2_weight), (second.bias, mlp.fc2_bias),
        ):  # fmt: skip
            assert ours is not None and theirs is not None
            ours.copy_(theirs)

    def parts(x: torch.Tensor) -> torch.Tensor:
        gate, up = first(x).chunk(2, -1)
        return second(F.relu(gate) * up)

    right, apart = trained([first, second], parts, 6, 32, 32)
    found, together = trained([mlp], mlp, 6, 32, 32)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for ((scale, history),), ((s1, h1), (s2, h2)) in zip(together, apart, strict=True):
        torch.testing.assert_close(scale, torch.cat((s1, s2)), rtol=1e-6, atol=0)
        torch.testing.assert_close(history, torch.cat((h1, h2), 1), rtol=1e-6, atol=0)
    assert len(set(together[-1][0][0].tolist())) == 6  # no two tensors share a scale


@pytest.mark.parametrize("kind", ["fw", "te"])
def test_groups_have_the_scales_of_one_linear(kind: str) -> None:
    """All rows in one of two groups, whose weight holds the largest number of both: as the Linear of that group."""
    torch.manual_seed(0)
    linear = fnn.Linear(64, 96)
    grouped: Any = fnn.GroupedLinear(2, 64, 96) if kind == "fw" else te.GroupedLinear(2, 64, 96, device="cpu")
    weights = [grouped.weight[g] for g in range(2)] if kind == "fw" else [grouped.weight0, grouped.weight1]
    biases = [grouped.bias[g] for g in range(2)] if kind == "fw" else [grouped.bias0, grouped.bias1]
    with torch.no_grad():
        for g, factor in enumerate((0.5, 1.0)):
            weights[g].copy_(linear.weight * factor)
            biases[g].copy_(linear.bias * factor)  # type: ignore[operator]

    def call(x: torch.Tensor) -> Any:
        return grouped(x, torch.tensor([0, 7])) if kind == "fw" else grouped(x, [0, 7])

    right, ones = trained([linear], linear, 7, 64, 96)
    found, many = trained([grouped], call, 7, 64, 96)
    for a, b in zip(found, right, strict=True):
        assert float((a - b).norm()) <= 1e-6 * float(b.norm())
    for ((scale, history),), ((s, h),) in zip(many, ones, strict=True):
        assert torch.equal(scale, s) and torch.equal(history, h)
    assert linear.weight.grad is not None
    dw = grouped.weight.grad[1] if kind == "fw" else grouped.weight1.grad
    assert float((dw - linear.weight.grad).norm()) <= 1e-6 * float(linear.weight.grad.norm())


def test_scales_stay_within_what_quantize_takes() -> None:
    for amax, margin, scale in ((2.0**-140, 0, 2.0**-126), (1.0, 140, 2.0**126)):
        linear = fnn.Linear(32, 32)
        recipe = R.DelayedScaling(amax_history_len=2, margin=margin)
        for _ in range(2):
            with fw.autocast(recipe=recipe):
                linear(torch.full((2, 32), amax))
        assert linear.delayed_scale is not None and float(linear.delayed_scale[0]) == scale


def test_evaluation_outside_training_makes_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank alone may evaluate."""
    calls: list[int] = []
    monkeypatch.setattr(context, "_num_ranks", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, *_, **__: calls.append(t.numel()))
    monkeypatch.setattr(context, "_RECORDERS", {})
    linear = fnn.Linear(32, 32)
    with fw.autocast(recipe=DELAYED):
        linear(data(0, 2, 32)).sum().backward()
    with torch.no_grad(), fw.autocast(recipe=DELAYED):
        linear(data(1, 2, 32))
    assert calls == []
    with fw.autocast(recipe=DELAYED):
        linear(data(2, 2, 32))
    assert calls == [3]


class Ranks:
    """Stands for a process group."""


def test_a_group_with_the_id_of_one_that_is_gone_has_modules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, Any]] = []
    monkeypatch.setattr(context, "_num_ranks", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: calls.append((t.numel(), group)))
    monkeypatch.setattr(context, "id", lambda group: 7, raising=False)  # of both groups
    one, two, other, another = fnn.Linear(32, 32), fnn.Linear(32, 32), Ranks(), Ranks()
    for step in range(2):
        with fw.autocast(recipe=DELAYED, amax_reduction_group=other):
            one(data(step, 2, 32))
    for step in range(2):
        with fw.autocast(recipe=DELAYED, amax_reduction_group=another):
            two(data(step, 2, 32))
    assert calls == [(3, other), (3, another)]


def test_a_module_of_a_group_that_this_rank_is_no_member_of_is_not_reduced_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The members, which reduce it among themselves, would not take part."""
    calls: list[tuple[int, Any]] = []
    monkeypatch.setattr(context, "_num_ranks", lambda group: 2)
    monkeypatch.setattr(context, "_RECORDERS", {})
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, op, group: calls.append((t.numel(), group)))
    others = torch.distributed.GroupMember.NON_GROUP_MEMBER
    modules = fnn.Linear(32, 32), fnn.Linear(32, 32)
    for module, group in zip(modules, (others, None), strict=True):
        for step in range(2):
            with fw.autocast(recipe=DELAYED, amax_reduction_group=group):
                module(data(step, 2, 32))
    assert [call for call in calls if call[1] != others] == [(3, None)]


def test_a_module_that_is_gone_takes_part_in_no_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when garbage is collected: that is at another time on each rank."""
    calls: list[int] = []
    monkeypatch.setattr(context, "_num_ranks", lambda group: 2)
    monkeypatch.setattr(context, "_RECORDERS", {})
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t, *_, **__: calls.append(t.numel()))
    gc.disable()
    try:
        for make in (lambda: fnn.Linear(32, 32), lambda: fnn.prepare(fnn.Linear(32, 32), DELAYED)):
            module = make()
            for step in range(2):
                with fw.autocast(recipe=DELAYED):
                    module(data(step, 2, 32)).sum().backward()
            assert calls == [3]
            del module
            with fw.autocast(recipe=DELAYED):
                pass
            assert calls == [3]
            calls.clear()
    finally:
        gc.enable()


@pytest.mark.parametrize("own", [False, True], ids=["region", "own recipe"])
def test_recomputation_finds_the_scales_of_each_call(own: bool) -> None:
    """A module called twice inside of one checkpoint, two of which come before a backward pass, which runs twice."""

    def run(checkpoint: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        linear = fnn.Linear(32, 32, recipe=DELAYED if own else None)

        def twice(x: torch.Tensor) -> torch.Tensor:
            return linear(linear(x) * 8)

        found: list[torch.Tensor] = []
        for step in range(3):
            results = []
            for i in range(2):
                x = (data(2 * step + i, 4, 32) * 4.0**i).requires_grad_()
                with contextlib.nullcontext() if own else fw.autocast(recipe=DELAYED):
                    results.append(fnn.checkpoint(twice, x) if checkpoint else twice(x))
            for retain in (True, False):
                found += torch.autograd.grad([y.square().sum() for y in results], linear.weight, retain_graph=retain)
        return found

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


# -- gradients of weights


@pytest.mark.parametrize("recipe", [R.Unquantized(), R.CurrentScaling(), R.MXFP8()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("grouped", [False, True])
def test_gradients_of_float32_weights_are_not_rounded_to_bfloat16(grouped: bool, recipe: Any) -> None:
    module: Any = fnn.GroupedLinear(1, 64, 32) if grouped else fnn.Linear(64, 32)
    x, dy = data(0, 8, 64).bfloat16(), data(1, 8, 32).bfloat16()
    with fw.autocast(recipe=recipe):
        y = module(x, torch.tensor([8])) if grouped else module(x)
    y.backward(dy)
    dw = module.weight.grad.view(32, 64)
    assert dw.dtype == torch.float32 and y.dtype == torch.bfloat16
    left, right = (_values(t, name, recipe.plan) for t, name in ((dy, recipe.plan.g_t), (x, recipe.plan.x_t)))
    bound = 2.0**-20 * (left.abs().T @ right.abs())  # far below bfloat16's 2^-9
    assert bool(((dw.double() - left.T @ right).abs() <= bound).all())


def _values(t: torch.Tensor, name: str | None, plan: Any) -> torch.Tensor:
    """float64 of what wgrad multiplies."""
    if name is None:
        return t.double()
    rule = plan.mx_rule if name.startswith("mx") else plan.block_rule
    return fw.quantize(t, name, "columnwise", scale_rule=rule).dequantize(torch.float64)


def test_an_attribute_of_the_weight_overwrites_main_grad() -> None:
    for make in (lambda: fnn.Linear(32, 32, fuse_wgrad_accumulation=True), lambda: te.Linear(32, 32, fuse_wgrad_accumulation=True, device="cpu")):  # fmt: skip
        module: Any = make()
        for overwrite in (True, False):
            module.weight.main_grad = torch.full((32, 32), 64.0)
            module.weight.overwrite_main_grad = overwrite
            x, dy = data(0, 4, 32), data(1, 4, 32)
            module(x).backward(dy)
            right = dy.T @ x + (0 if overwrite else 64)
            torch.testing.assert_close(module.weight.main_grad, right, rtol=1e-5, atol=1e-5)
            assert module.weight.grad is None


@pytest.mark.parametrize("wrong", [torch.zeros(32, 16), torch.zeros(32, 32, dtype=torch.int32)], ids=["shape", "dtype"])
def test_main_grad_of_another_kind_is_told(wrong: torch.Tensor) -> None:
    linear: Any = fnn.Linear(32, 32, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = wrong
    with pytest.raises(ValueError, match="main_grad is"):
        linear(data(0, 4, 32))


# -- recipes reach the products


@pytest.mark.parametrize("recipe", [R.DelayedScaling, R.CurrentScaling])
@pytest.mark.parametrize("fast", [False, True])
def test_fast_accumulation_is_that_of_fprop(recipe: Any, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            told.append(kwargs.get("fast_accum", False))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, run)

    watch(function, "product")
    watch(grouped_linear, "grouped_gemm")
    for module, rest in ((fnn.Linear(32, 32), ()), (fnn.GroupedLinear(1, 32, 32), (torch.tensor([4]),))):
        told.clear()
        with fw.autocast(recipe=recipe(fast_accum=fast)):
            y = module(data(0, 4, 32).requires_grad_(), *rest)
        y.sum().backward()
        assert told == ([fast, False, False] if not rest else [fast, False])  # wgrad of groups takes no such argument


def test_weights_in_blocks_of_one_row() -> None:
    linear, x = fnn.Linear(256, 128, bias=False), data(0, 4, 256)
    with torch.no_grad():
        linear.weight.mul_(torch.exp2(torch.arange(128.0) % 7).unsqueeze(1))
        for block in ("1x128", "128x128"):
            with fw.autocast(recipe=R.BlockScaling(weight_block=block)):
                y = linear(x)
            qx, qw = (fw.quantize(t.detach(), name, scale_rule="pow2") for t, name in ((x, "fp8_1x128"), (linear.weight, f"fp8_{block}")))  # fmt: skip
            assert torch.equal(y, fw.gemm(qx, qw, out_dtype=torch.float32)), block


def test_default_recipes() -> None:
    """fw.autocast(): CurrentScaling(); te.autocast() and te.fp8_autocast(): DelayedScaling()."""
    linear, x = fnn.Linear(64, 64), data(0, 4, 64)
    results = []
    for region in (fw.autocast(), fw.autocast(recipe=R.CurrentScaling())):
        with torch.no_grad(), region:
            results.append(linear(x))
    assert torch.equal(*results) and linear.delayed_scale is None
    for region in (te.autocast(), te.fp8_autocast()):
        assert type(region.recipe) is te.recipe.DelayedScaling and region.recipe.amax_history_len == 1024
        module = fnn.Linear(64, 64)
        with region:
            module(x)
        assert module.delayed_amax_history is not None and len(module.delayed_amax_history) == 1024


def test_compiled_code_after_a_nested_region_runs_by_the_outer_one() -> None:
    torch._dynamo.reset()
    linear, x = fnn.Linear(64, 64), data(0, 4, 64)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    with torch.no_grad():
        with fw.autocast(recipe=R.MXFP8()):
            with fw.autocast(enabled=False):
                plain = compiled(x)
            quantized = compiled(x)
        assert torch.equal(plain, linear(x)) and torch.equal(compiled(x), plain)
        with fw.autocast(recipe=R.MXFP8()):
            assert torch.equal(quantized, linear(x)) and not torch.equal(quantized, plain)


@pytest.mark.parametrize("how", ["other recipe", "numpy", "another place"])
def test_kept_weights_are_not_stale(how: str) -> None:
    linear, x = fnn.Linear(128, 128), data(0, 4, 128)
    recipe = R.BlockScaling()
    with fw.autocast(recipe=recipe):
        before = linear(x, is_first_microbatch=True).detach()
    if how == "other recipe":
        recipe = R.BlockScaling(scale="fp32")
    elif how == "numpy":
        alias = linear.weight.detach().numpy()
        alias[:] = data(1, 128, 128).numpy()
    else:  # past the attribute that is watched, as code in C++ does
        torch._C.TensorBase.data.__set__(linear.weight, data(1, 128, 128))  # type: ignore[attr-defined]
    with fw.autocast(recipe=recipe):
        after, right = linear(x, is_first_microbatch=False), linear(x)
    assert torch.equal(after, right) and not torch.equal(after, before)


# -- arguments of the norms and of fourwave.te


def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """gamma = 1 + weight"""
    x = x.double()
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("package", [fnn, te], ids=["fw", "te"])
def test_layer_norm_linear_takes_its_arguments(package: Any, normalization: str) -> None:
    module = package.LayerNormLinear(
        32, 48, eps=0.5, normalization=normalization, zero_centered_gamma=True, device="cpu",
        fuse_wgrad_accumulation=True,
    )  # fmt: skip
    _random(module)
    x = data(0, 5, 32)
    y = module(x)
    right = (
        normalized(x, module.layer_norm_weight, module.layer_norm_bias, 0.5) @ module.weight.double().T + module.bias
    )
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert module.weight.main_grad.any() and module.weight.grad is None


@pytest.mark.parametrize(("activation", "formula"), [
    ("gelu", lambda z: F.gelu(z, approximate="tanh")),
    ("geglu", lambda z: F.gelu(z.chunk(2, -1)[0], approximate="tanh") * z.chunk(2, -1)[1]),
    ("relu", F.relu), ("silu", F.silu),
    ("reglu", lambda z: F.relu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]),
    ("swiglu", lambda z: F.silu(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]),
    ("glu", lambda z: z.chunk(2, -1)[0].sigmoid() * z.chunk(2, -1)[1]),
])  # fmt: skip
@pytest.mark.parametrize("package", [fnn, te], ids=["fw", "te"])
def test_layer_norm_mlp_takes_its_arguments(package: Any, activation: str, formula: Any) -> None:
    """Transformer Engine's gelu is the tanh form, here "gelu_tanh" and "geglu_tanh"."""
    name = f"{activation}_tanh" if package is fnn and activation in ("gelu", "geglu") else activation
    module = package.LayerNormMLP(
        32, 48, eps=0.5, normalization="RMSNorm", zero_centered_gamma=True, activation=name, device="cpu",
        fuse_wgrad_accumulation=True,
    )  # fmt: skip
    _random(module)
    x = data(0, 5, 32)
    y = module(x)
    z = normalized(x, module.layer_norm_weight, None, 0.5) @ module.fc1_weight.double().T + module.fc1_bias
    right = formula(z) @ module.fc2_weight.double().T + module.fc2_bias
    torch.testing.assert_close(y.double(), right, rtol=5e-5, atol=5e-5)  # erf instead of the tanh form: 1e-3
    y.sum().backward()
    assert module.fc1_weight.main_grad.any() and module.fc2_weight.main_grad.any()


@pytest.mark.parametrize("make", [fnn.LayerNormLinear, fnn.LayerNormMLP])
def test_norms_follow_torch_autocast(make: Any) -> None:
    module = make(32, 48, return_layernorm_output=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, normal = module(data(0, 4, 32))
    assert y.dtype == normal.dtype == torch.bfloat16


def _random(module: Any) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(data(i, *parameter.shape) * 0.5)
            parameter.main_grad = torch.zeros_like(parameter)


def test_general_gemm_hands_alpha_and_the_accumulator_on(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = data(0, 8, 32), data(1, 4, 32)
    torch.testing.assert_close(te.general_gemm(a, b, alpha=3.0)[0], 3 * b @ a.T)
    told = []
    real = te_gemm._gemm

    def gemm(*args: Any, **kwargs: Any) -> Any:
        told.append(kwargs["fast_accum"])
        return real(*args, **kwargs)

    monkeypatch.setattr(te_gemm, "_gemm", gemm)
    qa, qb = (fw.quantize(t, "fp8_e4m3") for t in (a, b))
    for split in (True, False):
        te.general_gemm(qa, qb, torch.float32, use_split_accumulator=split)
    assert told == [False, True]


# -- what does not go is told before anything is computed, by the names of the module


@pytest.mark.parametrize("columns", [True, False], ids=["in_features", "out_features"])
def test_features_that_mxfp4_cannot_pack(columns: bool) -> None:
    """A head of three labels, say, whose gradient alone is packed along them."""
    modules: list[Any] = [fnn.Linear(33, 32), fnn.LayerNormLinear(33, 32), fnn.GroupedLinear(2, 33, 32)]
    if not columns:
        modules = [fnn.Linear(32, 3), fnn.LayerNormLinear(32, 3), fnn.GroupedLinear(2, 32, 3)]
    for module in modules:
        x = data(0, 4, module.in_features)
        sizes = (torch.tensor([1, 3]),) if isinstance(module, fnn.GroupedLinear) else ()
        told = rf"weight is \d+ x \d+; in mxfp4 .*{'input' if columns else 'output'} features"
        for first in (None, True):
            with fw.autocast(recipe=R.MXFP4(backward="mxfp4")), pytest.raises(ValueError, match=told):
                module(x, *sizes, is_first_microbatch=first)
        if not columns:
            with torch.no_grad(), fw.autocast(recipe=R.MXFP4(backward="mxfp4")):
                assert module(x, *sizes).isfinite().all()
            with fw.autocast(recipe=R.MXFP4()):
                module(x, *sizes).sum().backward()


@pytest.mark.parametrize("recipe", [None, R.MXFP8()], ids=str)
def test_float64_parameters_are_told_by_name(recipe: Any) -> None:
    modules: list[Any] = [fnn.Linear(32, 32), fnn.LayerNormLinear(32, 32), fnn.GroupedLinear(2, 32, 32)]
    for module in modules:
        sizes = (torch.tensor([1, 3]),) if isinstance(module, fnn.GroupedLinear) else ()
        with fw.autocast(enabled=recipe is not None, recipe=recipe):
            with pytest.raises(ValueError, match=r"^weight is torch\.float64; it must be float32"):
                module.double()(data(0, 4, 32), *sizes)


@pytest.mark.parametrize("wrong", ["mxfp8", R.MXFP8, None], ids=str)
def test_what_is_no_recipe_is_told(wrong: Any) -> None:
    for call in (lambda: fnn.prepare(fnn.Linear(32, 32), wrong), lambda: fnn.Linear(32, 32).store_quantized(wrong)):
        with pytest.raises(ValueError, match=r"recipe is .*; it must be one of fourwave\.recipes, such as MXFP8\(\)$"):
            call()
    with pytest.raises(ValueError, match="model is a type"):
        fnn.prepare(fnn.Linear, R.MXFP8())  # type: ignore[arg-type]
