"""Each module against PyTorch's, and what training loops do with them: mixes of frozen weights, main_grad, delayed wgrad, odd
gradients and batches, torch.autocast."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.utils import checkpoint

import fourwave as fw
from fourwave import nn as fnn
from fourwave import te
from fourwave.nn import grouped_linear
from fourwave.quantize.tensor import FORMATS
from fourwave.testing import bounds

R = fw.recipes
RECIPES = {
    "unquantized": R.Unquantized(), "delayed": R.DelayedScaling(amax_history_len=2), "current": R.CurrentScaling(),
    "blocks": R.BlockScaling(), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(), "plain backward": R.MXFP8(backward="high_precision"),
}  # fmt: skip
QUANTIZED = {name: recipe for name, recipe in RECIPES.items() if name != "unquantized"}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def grads(y: torch.Tensor, g: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y, inputs, g))


def reference_norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    gamma = module.layer_norm_weight + 1 if module.zero_centered_gamma else module.layer_norm_weight
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], gamma, module.eps)
    return F.layer_norm(x, x.shape[-1:], gamma, module.layer_norm_bias, module.eps)


def halves(f: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return f(gate) * up

    return gated


def gelu_tanh(z: torch.Tensor) -> torch.Tensor:
    return F.gelu(z, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": gelu_tanh, "relu": F.relu, "silu": F.silu,
    "swiglu": halves(F.silu), "geglu": halves(F.gelu), "geglu_tanh": halves(gelu_tanh),
    "reglu": halves(F.relu), "glu": halves(torch.sigmoid),
}  # fmt: skip


def double(module: Any) -> Any:
    """The parameters in float64, as attributes."""
    return type("Double", (), {
        **{n: v for n, v in vars(module).items() if not n.startswith("_")},
        **{n: p if p is None else p.detach().double().requires_grad_() for n, p in module._parameters.items()},
    })  # fmt: skip


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_layernorm_mlp_is_its_formula(activation: str, normalization: str, zero_centered: bool) -> None:
    torch.manual_seed(0)
    module: Any = fnn.LayerNormMLP(
        24, 40, activation=activation, normalization=normalization, zero_centered_gamma=zero_centered,
        return_layernorm_output=True,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(randn(*parameter.shape, seed=5) * 0.3)
    x = randn(2, 5, 24).requires_grad_()
    y, normal = module(x)
    d, x64 = double(module), x.detach().double().requires_grad_()
    n = reference_norm(x64, d)
    y64 = F.linear(ACTIVATIONS[activation](F.linear(n, d.fc1_weight, d.fc1_bias)), d.fc2_weight, d.fc2_bias)
    torch.testing.assert_close(normal.double(), n, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-5)
    g = randn(*y.shape, seed=1)
    names = [name for name, p in module._parameters.items() if p is not None]
    got = grads(y, g, x, *[getattr(module, name) for name in names])
    right = grads(y64, g.double(), x64, *[getattr(d, name) for name in names])
    for name, a, b in zip(["x", *names], got, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5, msg=name)
    assert list(module.state_dict()) == [n for n in (
        "layer_norm_weight", "fc1_weight", "fc2_weight", "layer_norm_bias", "fc1_bias", "fc2_bias"
    ) if n in names]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_once(dtype: torch.dtype) -> None:
    for normalization in ("LayerNorm", "RMSNorm"):
        module: Any = fnn.LayerNormLinear(
            64, 32, normalization=normalization, params_dtype=dtype, return_layernorm_output=True
        )
        x = (randn(6, 64) * 10 + 3).to(dtype)
        _, normal = module(x)
        exact = reference_norm(x.double(), double(module))
        bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2**-19) + 2**-18
        assert normal.dtype == dtype
        assert float(((normal.double() - exact).abs() / bound).detach().max()) <= 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_on_layers_are_the_linear_in_them(recipe: str) -> None:
    """LayerNormLinear is Linear of the norm, bit for bit; LayerNormMLP two of them, with the activation on float32 sums."""
    torch.manual_seed(0)
    module: Any = fnn.LayerNormLinear(64, 96, return_layernorm_output=True)
    linear: Any = fnn.Linear(64, 96)
    linear.load_state_dict({"weight": module.weight.detach(), "bias": module.bias.detach()})
    x, g = randn(7, 64).requires_grad_(), randn(7, 96, seed=2)
    with fw.autocast(recipe=RECIPES[recipe]):
        y, normal = module(x)
    leaf = normal.detach().requires_grad_()
    with fw.autocast(recipe=RECIPES[recipe]):
        z = linear(leaf)
    assert torch.equal(y, z)
    for a, b in zip(grads(y, g, module.weight, module.bias), grads(z, g, linear.weight, linear.bias), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [[3, 0, 9, 5], [17, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 11]], ids=str)
def test_grouped_linear_is_one_linear_for_each_group(recipe: str, sizes: list[int]) -> None:
    """Against float64 products of the operands that the recipe says, 4 rows past the last group included."""
    torch.manual_seed(0)
    rows, k, n = sum(sizes) + 4, 64, 128
    module: Any = fnn.GroupedLinear(4, k, n)
    x, g = randn(rows, k).requires_grad_(), randn(rows, n, seed=1)
    with fw.autocast(recipe=RECIPES[recipe]):
        y = module(x, torch.tensor(sizes))
    dx, dw, db = grads(y, g, x, module.weight, module.bias)
    plan = RECIPES[recipe].plan
    used = torch.arange(rows)[:, None] < sum(sizes)  # the module reads zeros past the last group

    def values(t: torch.Tensor, name: str | None, direction: str) -> torch.Tensor:
        t = t.detach() if t.dim() == 3 else t.detach() * used
        if name is None:
            return t.double()
        rule = None if plan.delayed else plan.mx_rule if FORMATS[name].is_mx else plan.block_rule
        scale = torch.ones(()) if plan.delayed else None
        return fw.quantize(t, name, direction, scale=scale, scale_rule=rule).dequantize(torch.float64).view(t.shape)

    def close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> None:
        bias = kwargs.get("bias")
        exact = a @ b.mT + (0 if bias is None else bias.double())
        bounds.assert_within(out, exact, bounds.gemm_bound(a, b, torch.float32, scaled=True, **kwargs))

    xs, gs, ws = values(x, plan.x, "rowwise"), values(g, plan.g, "rowwise"), values(module.weight, plan.w, "rowwise")
    xt, gt, wt = (
        values(t, name, "columnwise") for t, name in ((x, plan.x_t), (g, plan.g_t), (module.weight, plan.w_t))
    )
    start = 0
    for group, size in enumerate(sizes):
        span = slice(start, start + size)
        close(y[span].detach(), xs[span], ws[group], bias=module.bias[group].detach())
        close(dx[span], gs[span], wt[group].mT)
        close(dw[group], gt[span].mT, xt[span].mT)
        exact = g[span].double().sum(0)
        bounds.assert_within(db[group], exact, bounds.sum_bound(g[span].double(), torch.float32))
        start += size
    assert not y[start:].any() and not dx[start:].any()
    if 0 in sizes:
        assert not dw[sizes.index(0)].any()


def state_of(module: Any) -> list[torch.Tensor]:
    return [t for name, t in module.state_dict().items() if "delayed" in name]


MIXES = [(x, w, b) for x in (False, True) for w in (False, True) for b in (False, True)]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass that makes what is past the last group zeros."""
    seen: list[int] = []
    original = grouped_linear._without_the_rest

    def counted(t: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
        seen.append(len(t))
        return original(t, m_sizes)

    monkeypatch.setattr(grouped_linear, "_without_the_rest", counted)
    return seen


def test_no_pass_over_the_rows_where_none_is_past_the_last_group(passes: list[int]) -> None:
    module, results = fnn.GroupedLinear(2, 64, 64), []
    for sizes, rows, expected in (((3, 5), 8, []), ((3, 5), 9, [9, 9])):
        x = torch.full((rows, 64), 100.0)
        x[:8] = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        module.zero_grad()
        with fw.autocast(recipe=R.CurrentScaling()):
            y = module(x.requires_grad_(), torch.tensor(sizes))
        y.square().sum().backward()
        assert passes == expected
        assert x.grad is not None
        results.append([y[:8], x.grad[:8], *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match=r"all_rows=True and m_sizes is \[3, 5\], 8 of 9 rows"):
        module(x, torch.tensor([3, 5]), all_rows=True)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("tensor", 2), ("all_rows", 0), ("te tensor", 2), ("te list", 0), ("moe", 0), ("moe of another router", 4)],
)
def test_what_is_known_of_sizes_that_cannot_be_read(how: str, expected: int, passes: list[int]) -> None:
    """Fake tensors, as those of a GPU, are not read."""
    with FakeTensorMode():
        x, sizes = torch.empty(8, 64, requires_grad=True), torch.empty(2, dtype=torch.int64)
        with fw.autocast(recipe=R.MXFP8()):
            if how in ("tensor", "all_rows"):
                y = fnn.GroupedLinear(2, 64, 64)(x, sizes, all_rows=how == "all_rows")
            elif how.startswith("te"):
                y = te.GroupedLinear(2, 64, 64, device="cpu")(x, [3, 5] if how == "te list" else sizes)
            else:
                routing = (torch.empty(8, 2, dtype=torch.int64), torch.empty(8, 2)) if how != "moe" else None
                y = fnn.MoEMLP(64, 64, 4, 2)(x, routing=routing)
        y.sum().backward()
    assert len(passes) == expected


@pytest.mark.parametrize("rest", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_past_the_last_group_do_not_matter(recipe: str, rest: float) -> None:
    """MoE buffers are made for the most rows that may come: what the others hold reaches no result and no scale."""
    sizes, rows = torch.tensor([10, 0, 25]), 35
    results = []
    for fill in (0.0, rest):
        torch.manual_seed(0)
        module = fnn.GroupedLinear(3, 128, 256, recipe=RECIPES[recipe])
        x, dy = randn(48, 128, seed=1), randn(48, 256, seed=2)
        x[rows:] = fill
        dy[rows:] = fill
        x.requires_grad_()
        y = module(x, sizes)
        y.backward(dy)
        assert not y[rows:].any() and x.grad is not None and not x.grad[rows:].any()
        results.append([y, x.grad, *(p.grad for p in module.parameters()), *state_of(module)])
    assert len(results[0]) == (6 if recipe == "delayed" else 4)
    for zeros, other in zip(*results, strict=True):
        assert other is not None and zeros is not None and other.isfinite().all() and torch.equal(zeros, other)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_mix_of_requires_grad(recipe: str) -> None:
    """A frozen weight, LoRA's adapters beside one, a frozen bias, an input without gradient: the others' gradients do not change."""
    for make in (lambda: fnn.Linear(64, 128), lambda: fnn.GroupedLinear(2, 64, 128)):
        everything: Any = None
        for mix in reversed(MIXES):
            torch.manual_seed(0)
            module: Any = make()
            rest = (torch.tensor([2, 3]),) if isinstance(module, fnn.GroupedLinear) else ()
            x = randn(5, 64).requires_grad_(mix[0])
            module.weight.requires_grad_(mix[1])
            module.bias.requires_grad_(mix[2])
            with fw.autocast(recipe=RECIPES[recipe]):
                y = module(x, *rest)
            assert y.requires_grad is any(mix)
            if not any(mix):
                continue
            y.backward(randn(5, 128, seed=3))
            got = (x.grad, module.weight.grad, module.bias.grad)
            everything = everything or got
            for wanted, mine, all_ in zip(mix, got, everything, strict=True):
                assert (mine is not None) is wanted
                if mine is not None and all_ is not None:
                    torch.testing.assert_close(mine, all_, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (1, 64), (64,)], ids=str)
def test_empty_and_single_batches(recipe: str, shape: tuple[int, ...]) -> None:
    modules: list[Any] = [
        fnn.Linear(64, 96),
        fnn.LayerNormLinear(64, 96),
        fnn.LayerNormMLP(64, 96, activation="swiglu"),
    ]
    for module in modules:
        for _ in range(2):
            x = randn(*shape).requires_grad_()
            with fw.autocast(recipe=RECIPES[recipe]):
                y = module(x)
            assert y.shape[:-1] == x.shape[:-1] and y.isfinite().all()
            y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            if not x.numel():
                assert not parameter.grad.any(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_any_strides(recipe: str) -> None:
    """Expanded (stride 0), transposed and sliced gradients and inputs give what their contiguous copies give."""
    torch.manual_seed(0)
    for module in (fnn.Linear(64, 96), fnn.LayerNormMLP(64, 32)):
        n = module(randn(1, 64)).shape[-1]
        weight: Any = next(p for p in module.parameters() if p.dim() == 2)
        for g in (
            randn(1, 1).expand(6, n), randn(1, n).expand(6, n), randn(n, 6).mT, randn(6, 2 * n)[:, ::2],
            randn(6, n + 3)[:, 3:], randn(6, 1).expand(6, n),
        ):  # fmt: skip
            for x in (randn(6, 64), randn(64, 6).mT, randn(6, 128)[:, ::2], randn(1, 64).expand(6, 64)):
                results = []
                for view in (lambda t: t, lambda t: t.contiguous()):
                    module.delayed_scale = module.delayed_amax_history = None
                    leaf = view(x.detach()).requires_grad_()
                    with fw.autocast(recipe=RECIPES[recipe]):
                        y = module(leaf)
                    results.append((y, *grads(y, view(g), leaf, weight)))
                for a, b in zip(*results, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", ["unquantized", "mxfp8", "delayed"])
def test_main_grad_and_delayed_wgrad(recipe: str) -> None:
    def run(module: Any, rest: tuple[Any, ...], **kwargs: Any) -> None:
        x = randn(6, 64).requires_grad_()
        with fw.autocast(recipe=RECIPES[recipe]):
            y = module(x, *rest, **kwargs)
        y.backward(randn(*y.shape, seed=4))

    makes: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (lambda **k: fnn.Linear(64, 96, **k), ()),
        (lambda **k: fnn.LayerNormLinear(64, 96, **k), ()),
        (lambda **k: fnn.LayerNormMLP(64, 96, activation="swiglu", **k), ()),
        (lambda **k: fnn.GroupedLinear(2, 64, 96, **k), (torch.tensor([4, 2]),)),
    ]
    for make, rest in makes:
        torch.manual_seed(0)
        plain = make()
        run(plain, rest)
        for fused, delayed in ((True, False), (False, True), (True, True)):
            module = make(fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed)
            module.load_state_dict({n: t for n, t in plain.state_dict().items() if not n.startswith("delayed")})
            weights = [(n, p) for n, p in module.named_parameters() if n in ("weight", "fc1_weight", "fc2_weight")]
            addend = {n: randn(*p.shape, seed=8) for n, p in weights}
            if fused:
                with pytest.raises(ValueError, match="no main_grad"):
                    run(module, rest)
                module.delayed_scale = module.delayed_amax_history = None
                for name, parameter in weights:
                    parameter.main_grad = addend[name].clone()
                    parameter.grad_added_to_main_grad = False
            module.zero_grad()
            run(module, rest)
            if delayed:
                for name, parameter in weights:
                    if fused:
                        assert torch.equal(parameter.main_grad, addend[name])
                    else:
                        assert parameter.grad is None
                module.backward_dw()
                assert not module._delayed
            for name, parameter in module.named_parameters():
                right = dict(plain.named_parameters())[name].grad
                if fused and name in addend:
                    assert parameter.grad_added_to_main_grad
                    torch.testing.assert_close(parameter.main_grad, addend[name] + right, rtol=1e-5, atol=1e-5)
                else:
                    torch.testing.assert_close(parameter.grad, right, rtol=1e-6, atol=1e-6)
            if fused and not delayed:
                # The first microbatch overwrites what is there.
                module.delayed_scale = module.delayed_amax_history = None
                run(module, rest, is_first_microbatch=True)
                for name, parameter in weights:
                    right = dict(plain.named_parameters())[name].grad
                    torch.testing.assert_close(parameter.main_grad, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_is_what_the_backward_pass_finds(delay: bool) -> None:
    """Given anew between the passes, where training loops have zero_grad()."""
    makes: list[tuple[Any, tuple[Any, ...]]] = [
        (lambda **k: fnn.Linear(64, 96, **k), ()),
        (lambda **k: fnn.LayerNormMLP(64, 96, **k), ()),
        (lambda **k: fnn.GroupedLinear(2, 64, 96, **k), (torch.tensor([4, 2]),)),
        (lambda **k: te.GroupedLinear(2, 64, 96, device="cpu", **k), ([4, 2],)),
    ]
    for make, rest in makes:
        module = make(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
        weights = [p for n, p in module.named_parameters() if "weight" in n and "norm" not in n]
        first = [torch.zeros_like(p) for p in weights]
        for weight, main_grad in zip(weights, first, strict=True):
            weight.main_grad = main_grad
        with fw.autocast(recipe=R.MXFP8()):
            y = module(randn(6, 64), *rest)
        for weight in weights:
            weight.main_grad = torch.zeros_like(weight)
        y.sum().backward()
        if delay:
            module.backward_dw()
        assert all(weight.main_grad.any() for weight in weights) and not any(each.any() for each in first)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_chooses_the_precision(recipe: str) -> None:
    """float32 parameters and input: the products and what is kept are bfloat16, gradients have their own types."""
    torch.manual_seed(0)
    module: Any = fnn.LayerNormMLP(64, 96)
    x = randn(5, 64).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16), fw.autocast(recipe=RECIPES[recipe]):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    # Parameters in another precision than the input's, without autocast.
    module = fnn.Linear(64, 96)
    x = randn(5, 64, dtype=torch.bfloat16).requires_grad_()
    with fw.autocast(recipe=RECIPES[recipe]):
        y = module(x)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, module.weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_each_tensor_is_quantized_once(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fourwave.nn import products

    seen = []
    real = products.quantize

    def counted(t: torch.Tensor, name: str, direction: str, **kwargs: Any) -> Any:
        seen.append((tuple(t.shape), direction))
        return real(t, name, direction, **kwargs)

    monkeypatch.setattr(products, "quantize", counted)
    linear, x = fnn.Linear(64, 96), randn(5, 64).requires_grad_()
    with fw.autocast(recipe=RECIPES[recipe]):
        y = linear(x)
    y.sum().backward()
    plan = RECIPES[recipe].plan
    expected: list[Any] = []
    for shape, row, col in (((5, 64), plan.x, plan.x_t), ((96, 64), plan.w, plan.w_t), ((5, 96), plan.g, plan.g_t)):
        if row == col and row is not None:
            expected.append((shape, "both"))
        else:
            expected += [(shape, d) for d, name in (("rowwise", row), ("columnwise", col)) if name is not None]
    assert seen == expected
    seen.clear()
    with torch.no_grad(), fw.autocast(recipe=RECIPES[recipe]):
        linear(x)
    assert seen == [((5, 64), "rowwise"), ((96, 64), "rowwise")]


def test_a_weight_changed_before_the_backward_pass_is_an_error_or_harmless() -> None:
    for recipe, harmless in ((R.Unquantized(), False), (R.MXFP8(), True)):
        torch.manual_seed(0)
        linear, x = fnn.Linear(64, 96), randn(5, 64).requires_grad_()
        with fw.autocast(recipe=recipe):
            y = linear(x)
        with torch.no_grad():
            linear.weight.zero_()
        if harmless:
            y.sum().backward()
            assert x.grad is not None and x.grad.any()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_bad_input_is_told() -> None:
    linear, x = fnn.Linear(64, 96), randn(5, 32)
    for wrong in (x, torch.tensor(1.0)):
        with pytest.raises(ValueError, match="last dimension must be 64"):
            linear(wrong)
    for options in ({"amax_history_len": 4.5}, {"amax_history_len": 0}, {"margin": "x"}):
        with pytest.raises(ValueError, match="must be an integer"):
            R.DelayedScaling(**options)  # type: ignore[arg-type]
    for module in (fnn.LayerNormLinear(64, 96), fnn.LayerNormMLP(64, 96)):
        with pytest.raises(ValueError, match="last dimension must be 64"):
            module(x)
    with pytest.raises(ValueError, match="activation"):
        fnn.LayerNormMLP(64, 96, activation="tanh")
    with pytest.raises(ValueError, match="normalization"):
        fnn.LayerNormLinear(64, 96, normalization="BatchNorm")
    grouped = fnn.GroupedLinear(2, 64, 96)
    with pytest.raises(ValueError, match="m_sizes"):
        grouped(randn(5, 64), torch.tensor([5]))
    with pytest.raises(ValueError, match="m_sizes is a list"):
        grouped(randn(5, 64), [2, 3])
    with pytest.raises(ValueError, match="rows of all groups"):
        grouped(x, torch.tensor([2, 3]))
    refusing: tuple[Any, ...] = (linear, fnn.LayerNormLinear(64, 96), fnn.LayerNormMLP(64, 96))
    for each in refusing:
        wrongs: tuple[Any, ...] = (torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 64, dtype=torch.float64), None)
        for value in wrongs:
            with pytest.raises(ValueError, match=r"it must be float32, bfloat16 or float16|it must be a tensor"):
                each(value)
    with pytest.raises(ValueError, match=r"x is torch.bool"):
        grouped(torch.ones(5, 64, dtype=torch.bool), torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=r"out_features is 40; .* multiple of 32"), fw.autocast(recipe=R.MXFP8()):
        fnn.GroupedLinear(2, 64, 40)(randn(5, 64).requires_grad_(), torch.tensor([2, 3])).sum().backward()
    with (
        pytest.raises(ValueError, match=r"out_features is 64; .* multiple of 128"),
        fw.autocast(recipe=R.BlockScaling()),
    ):
        fnn.GroupedLinear(2, 64, 64)(randn(5, 64), torch.tensor([2, 3]))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        leaf = randn(2, 64).requires_grad_()
        (dx,) = torch.autograd.grad(linear(leaf).square().sum(), leaf, create_graph=True)
        dx.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_without_memory(recipe: str) -> None:
    for module in (fnn.Linear(64, 96), fnn.LayerNormMLP(64, 128, activation="gelu")):
        with fw.autocast(recipe=RECIPES[recipe]):
            y = module.to("meta")(torch.randn(32, 64, device="meta"))
        assert y.is_meta and y.shape == (32, 96 if isinstance(module, fnn.Linear) else 64)


def test_parameters_that_wrap_others_are_refused() -> None:
    """As torchao's: read as a plain tensor, with a plain gradient, what they are would be lost."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor", reason="this PyTorch has no TwoTensor")
    linear = fnn.Linear(32, 32)
    values = linear.weight.detach()
    linear.weight = torch.nn.Parameter(two_tensor.TwoTensor(values, values.clone()))
    with pytest.raises(NotImplementedError, match="weight is a TwoTensor"):
        linear(randn(2, 32))


def test_initial_values_are_those_of_nn_linear() -> None:
    torch.manual_seed(0)
    mine = fnn.Linear(64, 96)
    torch.manual_seed(0)
    theirs = torch.nn.Linear(64, 96)
    assert torch.equal(mine.weight, theirs.weight) and torch.equal(mine.bias, theirs.bias)  # type: ignore[arg-type]
    filled: Any = fnn.Linear(64, 96, init_method=lambda w: torch.nn.init.constant_(w, 2.0))
    assert (filled.weight == 2).all() and not filled.bias.any()
    y, bias = fnn.Linear(64, 96, return_bias=True)(randn(2, 64))
    assert y.shape == (2, 96) and isinstance(bias, torch.nn.Parameter)
    assert fnn.Linear(64, 96, bias=False)(randn(2, 64)).shape == (2, 96)


@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_mode_and_functional_call(recipe: str) -> None:
    torch.manual_seed(0)
    linear, x = fnn.Linear(64, 96), randn(5, 64)
    with torch.no_grad(), fw.autocast(recipe=RECIPES[recipe]):
        expected = linear(x)
    with torch.inference_mode(), fw.autocast(recipe=RECIPES[recipe]):
        assert torch.equal(linear(x), expected)
    other = {name: (p.detach() * 2).requires_grad_() for name, p in linear.named_parameters()}
    with fw.autocast(recipe=RECIPES[recipe]):
        y = torch.func.functional_call(linear, other, (x,))
    y.sum().backward()
    assert other["weight"].grad is not None and linear.weight.grad is None
    twice = fnn.Linear(64, 96)
    twice.load_state_dict({name: p.detach() for name, p in other.items()})
    with torch.no_grad(), fw.autocast(recipe=RECIPES[recipe]):
        assert torch.equal(y, twice(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_may_be_changed_in_place(recipe: str) -> None:
    """A residual that is added with +=, a dropout in place."""
    for module in (
        fnn.Linear(64, 64), fnn.LayerNormLinear(64, 64), fnn.LayerNormMLP(64, 96, activation="swiglu"),
        fnn.GroupedLinear(2, 64, 128),
    ):  # fmt: skip
        for shape in ((5, 64), (1, 5, 64), (64,)):
            if isinstance(module, fnn.GroupedLinear) and len(shape) != 2:
                continue
            rest = (torch.tensor([2, 3]),) if isinstance(module, fnn.GroupedLinear) else ()
            x = randn(*shape).requires_grad_()
            with fw.autocast(recipe=RECIPES[recipe]):
                y = module(x, *rest)
            assert not y._is_view()
            y += 1
            y.relu_().sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("kept", ["product", "gemm_out", "quantize", "grouped_gemm"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_selective_checkpoints(recipe: str, kept: str) -> None:
    """What they keep of an operator is what it returned, not what it wrote."""
    contexts = functools.partial(
        checkpoint.create_selective_checkpoint_contexts, [getattr(torch.ops.fourwave, kept).default]
    )
    makes: list[tuple[Any, tuple[Any, ...]]] = [
        (lambda: fnn.LayerNormMLP(64, 96, activation="swiglu"), ()),
        (lambda: fnn.GroupedLinear(2, 64, 128), (torch.tensor([4, 2]),)),
    ]
    for make, rest in makes:
        results = []
        for selective in (False, True):
            torch.manual_seed(0)
            module = make()
            for step in range(3):
                module.zero_grad()
                x = randn(6, 64, seed=step).requires_grad_()
                with fw.autocast(recipe=RECIPES[recipe]):
                    run = functools.partial(checkpoint.checkpoint, module, use_reentrant=False, context_fn=contexts)
                    y = (run if selective else module)(x, *rest)
                y.square().sum().backward()
            results.append([y, x.grad, *[p.grad for p in module.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, lambda f: torch.func.jvp(f, (torch.ones(2, 32),), (torch.ones(2, 32),))],
)
def test_transforms_are_refused(transform: Any) -> None:
    linear = fnn.Linear(32, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear(x)
        return y.sum()

    with pytest.raises(NotImplementedError, match=r"transforms of torch\.func"):
        transform(run)(torch.ones(2, 32))


@pytest.mark.parametrize("recipe", [None, R.MXFP8(), R.BlockScaling()], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_flops_are_counted(recipe: Any, grouped: bool) -> None:
    """Of all three products, of a selective checkpoint's, too, which keeps those of the forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    module: Any = fnn.GroupedLinear(2, 128, 256, bias=False) if grouped else fnn.Linear(128, 256, bias=False)
    rest = (torch.tensor([2, 4]),) if grouped else ()
    kept = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts,
        [torch.ops.fourwave.product.default, torch.ops.fourwave.grouped_gemm.default],
    )

    def checkpointed(*args: Any) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(module, *args, use_reentrant=False, context_fn=kept)

    for call in (module, checkpointed):
        with FlopCounterMode(display=False) as counter, fw.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(randn(6, 128).requires_grad_(), *rest)
            assert counter.get_total_flops() == 2 * 6 * 128 * 256
            y.sum().backward()
            assert counter.get_total_flops() == 3 * 2 * 6 * 128 * 256
