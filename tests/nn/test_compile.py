"""torch.compile(fullgraph=True) of each module, FakeTensor, and code compiled under one recipe and run under another."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode

import fourwave as fw
from fourwave import nn as fnn

R = fw.recipes
RECIPES = {
    "unquantized": R.Unquantized(), "delayed": R.DelayedScaling(amax_history_len=3), "current": R.CurrentScaling(),
    "blocks": R.BlockScaling(), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(),
}  # fmt: skip
MODULES = {
    "Linear": lambda: fnn.Linear(64, 96),
    "LayerNormLinear": lambda: fnn.LayerNormLinear(64, 96, normalization="RMSNorm"),
    "LayerNormMLP": lambda: fnn.LayerNormMLP(64, 96, activation="swiglu"),
    "GroupedLinear": lambda: fnn.GroupedLinear(2, 64, 128),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def state_of(module: Any) -> list[torch.Tensor]:
    return [t for name, t in module.state_dict().items() if "delayed" in name]


def arguments(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 64, generator=generator), torch.tensor([rows // 3, rows - rows // 3])


def compare(
    name: str, recipe: Any, backend: str, rows: tuple[int, ...], autocast: bool = False, exact: bool = True
) -> None:
    torch.manual_seed(0)
    eager: Any = MODULES[name]()
    twin: Any = MODULES[name]()
    twin.load_state_dict(eager.state_dict())
    fnn.prepare(twin, recipe)
    compiled = torch.compile(twin, fullgraph=True, dynamic=True, backend=backend)
    for step, m in enumerate(rows):
        x, sizes = arguments(m, step)
        rest = (sizes,) if name == "GroupedLinear" else ()
        results: list[Any] = []
        for module, run in ((eager, eager), (twin, compiled)):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), fw.autocast(recipe=recipe):
                y = run(leaf, *rest)
            y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in module.parameters()), *state_of(module)])
        for a, b in zip(*results, strict=True):
            if exact:
                assert torch.equal(a, b), (name, m)
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


QUICK = [("Linear", recipe) for recipe in RECIPES] + [(name, "mxfp8") for name in MODULES if name != "Linear"]
CASES = [
    pytest.param(name, recipe, marks=() if (name, recipe) in QUICK else pytest.mark.slow)
    for name in MODULES
    for recipe in RECIPES
]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_compiled_equals_eager(name: str, recipe: str) -> None:
    compare(name, RECIPES[recipe], "aot_eager", (48, 15))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_inductor(name: str, recipe: str) -> None:
    """Its own sums differ in the last bits."""
    compare(name, RECIPES[recipe], "inductor", (32, 48), exact=False)


def test_with_torch_autocast() -> None:
    compare("LayerNormLinear", RECIPES["mxfp8"], "aot_eager", (48,), autocast=True)


def test_one_graph_for_all_batch_sizes_and_one_for_each_recipe() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    # Up to 32 rows there is one block of columnwise MX scales, which PyTorch makes a graph of its own.
    counter = CompileCounterWithBackend("eager")
    linear = fnn.Linear(64, 96)
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend=counter)
    for rows in (48, 80, 112):
        for _ in range(2):
            with fw.autocast(recipe=R.MXFP8()):
                compiled(arguments(rows, 0)[0])
    assert counter.frame_count == 1
    x = arguments(48, 0)[0]
    for recipe in (R.MXFP4(), R.MXFP8(), R.CurrentScaling(), R.MXFP8(scale_rule="floor")):
        with fw.autocast(recipe=recipe):
            assert torch.equal(compiled(x), linear(x))
            with fw.autocast(enabled=False):
                assert torch.equal(compiled(x), linear(x))
    assert torch.equal(compiled(x), linear(x))
    assert counter.frame_count == 6  # no region at all is a plan of its own


def test_a_region_inside_compiled_code() -> None:
    linear = fnn.Linear(64, 96)

    def function(x: torch.Tensor) -> torch.Tensor:
        with fw.autocast(recipe=R.MXFP8()):
            y = linear(x)
            with fw.autocast(enabled=False):
                return y + linear(x)

    x = arguments(32, 0)[0]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), function(x))
    assert torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_the_modules_own_recipe(recipe: str) -> None:
    torch.manual_seed(0)
    eager: Any = fnn.Linear(64, 96, recipe=RECIPES[recipe])
    twin: Any = fnn.Linear(64, 96, recipe=RECIPES[recipe])
    twin.load_state_dict(eager.state_dict())
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x, results = arguments(48, step)[0], []
        for module, run in ((eager, eager), (twin, compiled)):
            module.zero_grad()
            y = run(x)
            y.square().sum().backward()
            results.append([y, module.weight.grad, *state_of(module)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step


def test_a_recipe_that_is_set_later() -> None:
    """Is the module's own, in compiled code, too."""
    torch.manual_seed(0)
    linear: Any = fnn.Linear(64, 96)
    twin: Any = copy.deepcopy(linear)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = arguments(48, 0)[0]
    for recipe in (None, R.MXFP4(), R.DelayedScaling(amax_history_len=2), R.MXFP8(), None):
        linear.recipe = twin.recipe = recipe
        right = fnn.Linear(64, 96, recipe=recipe)
        right.load_state_dict(linear.state_dict())
        for _ in range(2):
            y = right(x)
            assert torch.equal(linear(x), y) and torch.equal(compiled(x), y)
        assert ("recipe" in repr(linear)) == (recipe is not None) and copy.deepcopy(linear).recipe == recipe
    with pytest.raises(ValueError, match="one of fourwave"):
        linear.recipe = R.MXFP8


def test_main_grad_in_compiled_code() -> None:
    torch.manual_seed(0)
    linear: Any = fnn.Linear(64, 96, fuse_wgrad_accumulation=True)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    x, results = arguments(8, 0)[0], []
    for run in (linear, compiled):
        linear.weight.main_grad = torch.ones(96, 64)
        with fw.autocast(recipe=R.MXFP8()):
            run(x).sum().backward()
        results.append(linear.weight.main_grad)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)
    assert not torch.equal(results[0], torch.ones(96, 64))


def test_calibrating() -> None:
    """Amax is recorded, and nothing quantized."""
    recipe, results = R.DelayedScaling(amax_history_len=3), []
    for compiled in (False, True):
        torch.manual_seed(0)
        module: Any = fnn.prepare(fnn.Linear(64, 96), recipe)
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        for step in range(2):
            x = arguments(8, step)[0].requires_grad_()
            with fw.autocast(enabled=False, recipe=recipe, calibrating=True):
                y = run(x)
            y.square().sum().backward()
        torch.testing.assert_close(y, torch.nn.functional.linear(x, module.weight, module.bias))
        results.append(state_of(module))
    assert results[0][1][0].all() and all(torch.equal(a, b) for a, b in zip(*results, strict=True))


CHECKPOINTS = {
    "none": lambda function, x: function(x),
    "fourwave": fnn.checkpoint,
    "torch": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False),
    "reentrant": lambda function, x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True),
    "selective": lambda function, x: torch.utils.checkpoint.checkpoint(
        function, x, use_reentrant=False, context_fn=saves_products
    ),
}  # fmt: skip


def saves_products() -> Any:
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.fourwave.product.default])


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("delayed", "fourwave"),
        ("delayed", "torch"),
        *(pytest.param("delayed", kind, marks=pytest.mark.slow) for kind in ("reentrant", "selective")),
        pytest.param("mxfp8", "torch", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_in_compiled_code(recipe: str, kind: str) -> None:
    """The second computation finds the scales of the first, though the forward pass made new ones in place."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = fnn.prepare(fnn.Linear(64, 64), RECIPES[recipe])
            self.mlp = fnn.prepare(fnn.LayerNormMLP(64, 96), RECIPES[recipe])

        def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
            return CHECKPOINTS[kind](torch.nn.Sequential(self.linear, self.mlp).forward, x)

    results: list[list[Any]] = []
    for each in ("none", kind):
        torch.manual_seed(0)
        net: Any = Net()
        run = torch.compile(net, fullgraph=True, backend="aot_eager") if each != "none" else net
        results.append([])
        for step in range(3):
            x = (arguments(8, step)[0] * 10**step).requires_grad_()
            net.zero_grad()
            with fw.autocast(recipe=RECIPES[recipe]):
                y = run(x, each)
            y.square().sum().backward()
            results[-1] += [y, x.grad, *(p.grad for p in net.parameters()), *(t.clone() for t in state_of(net))]
    assert len(results[0]) == len(results[1])
    assert [i for i, (a, b) in enumerate(zip(*results, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.slow
def test_compiled_gradient_checkpointing_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, vocab_size=100, use_cache=False
    )  # fmt: skip
    recipe = RECIPES["delayed"]
    results: list[list[Any]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net: Any = fnn.prepare(fnn.convert(transformers.LlamaForCausalLM(config)), recipe)
        if compiled:
            net.gradient_checkpointing_enable()
        run = torch.compile(net, backend="aot_eager") if compiled else net
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        results.append([])
        for step in range(3):
            ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(step))
            with fw.autocast(recipe=recipe):
                loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            results[-1] += [
                loss.detach(),
                *(p.grad.clone() for p in net.parameters()),
                *map(torch.clone, state_of(net)),
            ]
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_no_function_ends_in_a_conversion_that_may_do_nothing() -> None:
    """PyTorch 2.11 compiles such an autograd.Function and loses its gradient, silently; this PyTorch may not."""
    found, bad = 0, []
    for path in sorted((Path(fnn.__file__).parent).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef) or not any(ast.unparse(b).endswith("Function") for b in node.bases):
                continue
            (forward,) = (f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward")
            returns = [r.value for r in ast.walk(forward) if isinstance(r, ast.Return)]
            found += len(returns) > 0
            converts = ("to", "float", "contiguous", "type")
            bad += [
                f"{path.name}: {ast.unparse(r)}"
                for r in returns
                if isinstance(r, ast.Call) and isinstance(r.func, ast.Attribute) and r.func.attr in converts
            ]
    assert found >= 7 and not bad, bad


def test_what_does_not_compile_is_told() -> None:
    delayed = fnn.Linear(64, 96, delay_wgrad_compute=True)
    stored = fnn.Linear(64, 96)
    stored.store_quantized(R.MXFP8(), main_grad=True)
    for module, said in ((delayed, "delay_wgrad_compute"), (stored, "main_grad=True")):
        run = torch.compile(module, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=said), fw.autocast(recipe=R.MXFP8()):
            run(arguments(8, 0)[0].requires_grad_())
        with torch.no_grad(), fw.autocast(recipe=R.MXFP8()):
            assert run(arguments(8, 0)[0]).shape == (8, 96)


def test_delayed_scaling_must_be_prepared() -> None:
    compiled = torch.compile(fnn.Linear(64, 96), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"fourwave\.nn\.prepare"), fw.autocast(recipe=R.DelayedScaling()):
        compiled(arguments(8, 0)[0])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_fake_tensors(name: str, recipe: str) -> None:
    """Shapes and types without data, forward and backward."""
    with FakeTensorMode():
        module: Any = MODULES[name]()
        x = torch.empty(12, 64, requires_grad=True)
        rest = (torch.empty(2, dtype=torch.int64),) if name == "GroupedLinear" else ()
        with fw.autocast(recipe=RECIPES[recipe]):
            y = module(x, *rest)
        assert y.shape == (12, {"Linear": 96, "LayerNormLinear": 96, "LayerNormMLP": 64, "GroupedLinear": 128}[name])
        y.sum().backward()
    assert x.grad is not None and x.grad.shape == (12, 64)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in module.parameters())
