"""fw.nn.MoEMLP: exact against a loop over tokens and experts, bit for bit against one Linear per expert, no reads on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import nn as fnn
from fourwave.backends import registry

R = fw.recipes
BF16, FP32 = torch.bfloat16, torch.float32
SIM = registry.get("sim").unavailable()


def integers(*shape: int, low: int = -2, high: int = 3, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randint(low, high, shape).to(dtype)


def whole(module: fnn.MoEMLP) -> None:
    """Parameters of small integers: with activation "relu" and weights of powers of two, sums have no rounding."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(integers(*p.shape))


def loop(module: fnn.MoEMLP, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The definition, token by token, in float64."""
    w1, w2 = module.fc1.weight.double(), module.fc2.weight.double()
    b1 = None if module.fc1.bias is None else module.fc1.bias.double()
    b2 = None if module.fc2.bias is None else module.fc2.bias.double()
    rows = []
    for t in range(len(x)):
        y = torch.zeros(module.hidden_size, dtype=torch.float64)
        for j in range(module.top_k):
            e = int(experts[t, j])
            z = w1[e] @ x[t].double() + (0 if b1 is None else b1[e])
            if module.activation == "swiglu":
                gate, up = z.chunk(2)
                h = torch.nn.functional.silu(gate) * up
            else:
                h = z.relu()
            y = y + weights[t, j].double() * (w2[e] @ h + (0 if b2 is None else b2[e]))
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(13, 6, 3), (1, 4, 1), (9, 2, 2), (40, 16, 4)])
def test_exact_forward_and_gradients(tokens: int, num_experts: int, top_k: int, bias: bool, dtype: torch.dtype) -> None:
    """Integers and weights of powers of two: every sum is exact, and so must be each gradient. Experts without tokens included."""
    module = fnn.MoEMLP(16, 8, num_experts, top_k, bias, activation="relu")
    whole(module)
    x = integers(tokens, 16, low=-1, high=2, dtype=dtype).requires_grad_()
    # Skewed: the last expert gets nothing where there are others to choose.
    pool = num_experts - (num_experts > top_k)
    experts = torch.stack([torch.randperm(pool)[:top_k] for _ in range(tokens)])
    weights = (2.0 ** torch.randint(-2, 2, (tokens, top_k))).requires_grad_()
    y = module(x, routing=(experts, weights))
    assert y.dtype == dtype
    exact = loop(module, x, experts, weights)
    assert torch.equal(y, exact.to(dtype))
    dy = integers(tokens, 16, low=-1, high=2, dtype=dtype)
    inputs = [x, weights, *[p for p in module.parameters() if p is not module.router_weight]]
    got = torch.autograd.grad(y, inputs, dy)
    right = torch.autograd.grad(exact, inputs, dy.double())
    for g, r, t in zip(got, right, inputs, strict=True):
        assert g.dtype == t.dtype
        if dtype == FP32:
            assert torch.equal(g, r.to(g.dtype)), tuple(t.shape)
        else:  # gradients of h are rounded to bfloat16 on the way
            assert (g.double() - r.double()).abs().max() <= 2.0**-7 * max(1.0, float(r.double().abs().max())), t.shape
    unused = {id(p): g for p, g in zip(inputs, got, strict=True)}[id(module.fc1.weight)][pool:]
    assert not unused.any()


def test_dropped_choices_add_nothing() -> None:
    """Whatever their weight and their token: forward and gradients are those of a loop without them."""
    module = fnn.MoEMLP(16, 8, 5, 2, True, activation="relu")
    whole(module)
    x = integers(12, 16, low=-1, high=2)
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(12)])
    weights = 2.0 ** torch.randint(-2, 2, (12, 2))
    dropped = torch.rand(12, 2) < 0.4
    dropped[0], dropped[1] = True, torch.tensor([False, True])
    marked = torch.where(dropped, torch.tensor([-1, -7]), experts)
    x = x.requires_grad_()
    odd = torch.where(dropped, torch.nan, weights).requires_grad_()
    exact = loop(module, x, experts, torch.where(dropped, 0.0, weights))
    y = module(x, routing=(marked, odd))
    assert torch.equal(y, exact.float())
    dy = integers(12, 16)
    inputs = [x, *(p for p in module.parameters() if p is not module.router_weight)]
    got = torch.autograd.grad(y, [*inputs, odd], dy)
    for g, r in zip(got, torch.autograd.grad(exact, inputs, dy.double()), strict=False):
        assert torch.equal(g, r.float())
    assert (got[-1][dropped] == 0).all() and (got[-1][~dropped] != 0).any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_of_scores_that_underflow(scoring: str) -> None:
    """Normalized weights against float64, also where every chosen score is 0 in float32; the same experts."""
    module = fnn.MoEMLP(4, 8, 6, 3, scoring=scoring)
    with torch.no_grad():
        module.router_weight.copy_(torch.randn(6, 4))
        module.router_weight[:, 0] = -200.0
    x = torch.randn(32, 4)
    x[:, 0] = torch.rand(32) + 1
    experts, weights, logits = module.route(x)
    assert (logits < -104).all()  # a sigmoid in float32 is 0
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    right, chosen = scores.topk(3)
    assert torch.equal(chosen, experts)
    assert torch.allclose(weights.double(), right / right.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_swiglu_in_float32() -> None:
    module = fnn.MoEMLP(32, 24, 5, 2)
    x = torch.randn(2, 9, 32)
    experts, weights, _ = module.route(x.view(-1, 32))
    exact = loop(module, x.view(-1, 32), experts, weights)
    y = module(x)
    assert y.shape == x.shape
    # Each result is three products of at most 32 terms, of values below 1.
    assert (y.view(-1, 32).double() - exact).abs().max() < 200 * 2.0**-24


@pytest.mark.parametrize("activation", fnn.layernorm_mlp.MLP_ACTIVATIONS)
def test_gradients_of_every_activation(activation: str) -> None:
    """Against autograd of the definition with PyTorch's operations, in float64."""
    import torch.nn.functional as F

    module = fnn.MoEMLP(16, 12, 3, 2, activation=activation)
    x = torch.randn(7, 16, requires_grad=True)
    y = module(x)
    functions: dict[str, Any] = {
        "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "silu": F.silu,
        "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda z: F.gelu(z, approximate="tanh"), "reglu": F.relu,
        "glu": torch.sigmoid,
    }  # fmt: skip
    wide = x.detach().double().requires_grad_()
    w1, w2, router = (p.detach().double() for p in (module.fc1.weight, module.fc2.weight, module.router_weight))
    score, experts = (wide @ router.T).softmax(-1).topk(2)
    score = score / score.sum(-1, keepdim=True)
    exact = torch.zeros(7, 16, dtype=torch.float64)
    for j in range(2):
        z = torch.einsum("tk,tnk->tn", wide, w1[experts[:, j]])
        if "glu" in activation:
            gate, up = z.chunk(2, dim=-1)
            h = functions[activation](gate) * up
        else:
            h = functions[activation](z)
        exact = exact + score[:, j : j + 1] * torch.einsum("tk,tnk->tn", h, w2[experts[:, j]])
    dy = torch.randn(7, 16)
    (dx,) = torch.autograd.grad(y, x, dy)
    (right,) = torch.autograd.grad(exact, wide, dy.double())
    assert torch.allclose(y.double(), exact, rtol=0, atol=1e-5)
    assert torch.allclose(dx.double(), right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_router_trains(scoring: str, normalize: bool) -> None:
    module = fnn.MoEMLP(16, 8, 4, 2, scoring=scoring, normalize=normalize, return_logits=True)
    x = torch.randn(3, 5, 16)
    y, logits = module(x)
    assert logits.shape == (3, 5, 4) and logits.dtype == FP32
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    experts, weights, again = module.route(x.view(-1, 16))
    assert torch.equal(again, logits.view(-1, 4))
    best = scores.view(-1, 4).topk(2)[0]
    assert torch.allclose(weights, best / best.sum(-1, keepdim=True) if normalize else best)
    assert torch.equal(scores.view(-1, 4).gather(1, experts).sort(-1)[0], best.sort(-1)[0])
    y.square().sum().backward()
    assert module.router_weight.grad is not None and module.router_weight.grad.abs().min() > 0


@pytest.mark.parametrize("recipe", [R.MXFP8(), R.MXFP4(), R.BlockScaling()], ids=str)
def test_the_bits_of_one_linear_per_expert(recipe: R.Recipe) -> None:
    """Scales of these recipes are of a row's own blocks, so an expert's rows give what a Linear with its weight gives."""
    module = fnn.MoEMLP(256, 128, 3, 1, True, activation="relu")
    x = torch.randn(20, 256)
    experts = torch.randint(0, 2, (20, 1)) * 2
    with torch.no_grad(), fw.autocast(recipe=recipe):
        y = module(x, routing=(experts, torch.ones(20, 1)))
        for e in (0, 2):
            pair = [fnn.Linear(256, 128), fnn.Linear(128, 256)]
            for linear, grouped in zip(pair, (module.fc1, module.fc2), strict=True):
                assert grouped.bias is not None and linear.bias is not None
                linear.weight.copy_(grouped.weight[e])
                linear.bias.copy_(grouped.bias[e])
            mine = experts[:, 0] == e
            assert torch.equal(y[mine], pair[1](pair[0](x[mine]).relu()))


@pytest.mark.parametrize(
    "recipe", [R.Unquantized(), R.DelayedScaling(), R.CurrentScaling(), R.BlockScaling(), R.MXFP8(), R.MXFP4()], ids=str
)
def test_trains_under_every_recipe(recipe: R.Recipe) -> None:
    module = fnn.MoEMLP(128, 128, 4, 2)
    x, target = torch.randn(64, 128), torch.randn(64, 128)
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0)
    losses = []
    for _ in range(4):
        with torch.autocast("cpu", BF16), fw.autocast(recipe=recipe):
            loss = (module(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] * 0.999, losses


@pytest.mark.parametrize("recipe", [R.Unquantized(), R.MXFP8()], ids=str)
def test_reads_nothing_on_the_host(recipe: R.Recipe) -> None:
    """Meta tensors have no values to read."""
    module = fnn.MoEMLP(64, 64, 4, 2, device="meta")
    with pytest.raises(RuntimeError):
        module.router_weight.sum().item()
    x = torch.empty(3, 32, 64, device="meta", requires_grad=True)
    with fw.autocast(recipe=recipe):
        y = module(x)
    y.sum().backward()
    assert y.shape == x.shape and x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())


@pytest.mark.slow
@pytest.mark.skipif(SIM is not None, reason=f"sim: {SIM}")
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_runs_on_the_amd_kernels(arch: str) -> None:
    """Every product of a training step, simulated: the results of PyTorch's, but for the order of sums."""
    module = fnn.MoEMLP(128, 128, 3, 2, params_dtype=BF16)
    x = torch.randn(11, 128).to(BF16).requires_grad_()
    inputs = [x, *module.parameters()]

    def step(backend: str | None) -> list[torch.Tensor]:
        with fw.use_backend(backend), fw.autocast(recipe=R.MXFP8()):
            y = module(x)
            return [y, *torch.autograd.grad(y, inputs, torch.ones_like(y))]

    for got, right in zip(step(f"sim:{arch}"), step("native"), strict=True):
        assert got.dtype == right.dtype and right.any()
        # A sum that falls on the other side of a tie moves a code of h, or a bfloat16, by one step.
        assert (got.float() - right.float()).abs().max() <= 2.0**-6 * right.float().abs().max()


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    module = fnn.MoEMLP(64, 64, 4, 2)
    x = torch.randn(12, 64, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with fw.autocast(recipe=R.MXFP8()):
        eager, traced = module(x), compiled(x)
    assert torch.equal(eager, traced)
    dy = torch.randn_like(eager)
    inputs = [x, *module.parameters()]
    for a, b in zip(torch.autograd.grad(eager, inputs, dy), torch.autograd.grad(traced, inputs, dy), strict=True):
        assert torch.equal(a, b)


def test_arguments_of_the_experts_reach_them() -> None:
    module = fnn.MoEMLP(64, 64, 2, 1, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, params_dtype=BF16)
    assert module.router_weight.dtype == module.fc1.weight.dtype == BF16
    weights: list[Any] = [module.fc1.weight, module.fc2.weight]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    x = torch.randn(6, 64, dtype=BF16)
    module(x, True).sum().backward()
    assert not any(weight.main_grad.any() for weight in weights)
    module.backward_dw()
    assert all(weight.main_grad.any() for weight in weights)
    other = fnn.MoEMLP(64, 64, 2, 1, params_dtype=BF16)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(x), module(x))


def test_no_tokens() -> None:
    module = fnn.MoEMLP(32, 32, 4, 2)
    x = torch.randn(2, 0, 32, requires_grad=True)
    y = module(x)
    assert y.shape == (2, 0, 32)
    y.sum().backward()
    assert module.fc1.weight.grad is not None and not module.fc1.weight.grad.any()


def test_refusals_say_what_came() -> None:
    with pytest.raises(ValueError, match="top_k=5 of 4 experts"):
        fnn.MoEMLP(32, 32, 4, 5)
    with pytest.raises(ValueError, match="scoring is 'max'; it must be softmax or sigmoid"):
        fnn.MoEMLP(32, 32, 4, 2, scoring="max")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        fnn.MoEMLP(32, 32, 4, 2, activation="tanh")
    module = fnn.MoEMLP(32, 32, 4, 2)
    with pytest.raises(ValueError, match=r"x is \(3, 31\); its last dimension must be 32"):
        module(torch.randn(3, 31))
    with pytest.raises(ValueError, match=r"routing is \(3, 1\) of torch.int64"):
        module(torch.randn(3, 32), routing=(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)))
    with pytest.raises(ValueError, match=r"torch\.int32"):
        module(torch.randn(3, 32), routing=(torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)))
    whole_numbers = torch.ones(3, 2, dtype=torch.int64)
    for number in (4, 5):
        with pytest.raises(RuntimeError, match="out of bounds"):
            module(torch.randn(3, 32), routing=(whole_numbers * number, torch.ones(3, 2)))
    with pytest.raises(ValueError, match=r"weights, floating point"):
        module(torch.randn(3, 32), routing=(whole_numbers, whole_numbers))


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("recipe", "before"),
    [
        (R.Unquantized(), False), (R.CurrentScaling(), False), (R.BlockScaling(), True),
        (R.MXFP8(), True), (R.MXFP4(), True),
    ],
    ids=str,
)  # fmt: skip
def test_inference_quantizes_tokens_before_they_are_copied(
    recipe: R.Recipe, before: bool, stored: bool, dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a call that records gradients; which rows are quantized."""
    from fourwave.quantize import gather

    if stored and isinstance(recipe, R.Unquantized):
        pytest.skip("weights are not stored quantized under it")
    module = fnn.MoEMLP(128, 128, 4, 2, params_dtype=BF16)
    x = torch.randn(10, 128).to(BF16) * 2.0 ** torch.randint(-3, 4, (10, 1))
    experts, weights, _ = module.route(x)
    experts, weights = experts.clone(), weights.detach()
    if dropped:
        experts[3] = -1
        experts[7, 1] = -1
        x[3] = 1e4  # no expert sees it, nor may a scale
    with fw.autocast(recipe=recipe):
        right = module(x, routing=(experts, weights)).detach()
        if stored:
            for linear in (module.fc1, module.fc2):
                linear.store_quantized(recipe, dgrad=False)
        seen: list[int] = []
        original = gather.quantize

        def counted(t: torch.Tensor, *args: Any, **options: Any) -> Any:
            seen.append(len(t))
            return original(t, *args, **options)

        monkeypatch.setattr(gather, "quantize", counted)
        with torch.no_grad():
            got = module(x, routing=(experts, weights))
    assert seen == ([10, 20] if before else [])  # tokens, and rows of SwiGLU
    assert torch.equal(got, right)


def test_rows_of_a_grouped_linear() -> None:
    linear = fnn.GroupedLinear(2, 64, 32)
    x, sizes = torch.randn(5, 64), torch.tensor([2, 1])
    rows = torch.tensor([4, 0, 4])
    with fw.autocast(recipe=R.MXFP8()):
        right = linear(x[rows], sizes)
        with torch.no_grad():
            assert torch.equal(linear(x, sizes, rows=rows), right)
            assert torch.equal(linear(x, sizes, rows=rows[[0, 1, 2, 0, 1, 2]])[:3], right)  # more than x has
            for bad in ([4, 0, 4], rows.int(), rows.view(1, 3)):
                with pytest.raises(ValueError, match=r"must be \[M\] int64"):
                    linear(x, sizes, rows=bad)  # type: ignore[arg-type]
            z = torch.randn(6, 128)
            gate, up = z.chunk(2, -1)
            h = torch.nn.functional.silu(gate) * up
            assert torch.equal(linear(z, sizes, swiglu=True), linear(h, sizes))
            assert torch.equal(linear(z, sizes, rows=rows, swiglu=True), linear(h[rows], sizes))
            with pytest.raises(ValueError, match=r"it must be \[M, 128\]"):
                linear(x, sizes, swiglu=True)
        for more in ({"rows": rows}, {"swiglu": True}):
            with pytest.raises(ValueError, match="records no gradient"):
                linear(torch.cat([x, x], 1) if "swiglu" in more else x, sizes, **more)


def test_inference_compiles_whole() -> None:
    torch._dynamo.reset()
    module = fnn.MoEMLP(64, 64, 4, 2)
    x = torch.randn(12, 64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with fw.autocast(recipe=R.MXFP8()), torch.no_grad():
        assert torch.equal(compiled(x), module(x))


def test_results_are_no_views() -> None:
    """Of a view, a change in place (`y += x`) drops the hook that FSDP2 put on it."""
    moe = fnn.MoEMLP(64, 64, 4, 2, return_logits=True)
    for shape in ((6, 64), (2, 3, 64), (64,)):
        x = torch.randn(shape, requires_grad=True)
        y, logits = moe(x)
        assert y.shape == x.shape and logits.shape == (*shape[:-1], 4)
        assert not y._is_view() and not logits._is_view()
        y += x
        logits *= 2
        (y.sum() + logits.sum()).backward()
        assert x.grad is not None
