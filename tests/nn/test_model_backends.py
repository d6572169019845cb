"""A whole model through native and through each other backend: the same parameters, inputs and steps, the same results.

Two steps, so that delayed scaling uses scales that it made; the model and its state are copied anew for each backend. A backend that is named and
does not run every product fails: the log of the dispatch is read. Results differ by the order of float32 sums and, behind that, by
values that fall on the other side of a rounding. On the simulator they are equal, float32 sums aside; planted faults are outside.

With 16-bit input, delayed scaling makes much of a little: where results of products differ by a last bit, so do codes of three bits, layer
by layer. There each product is compared from the same operands, in lockstep, and the whole by how far native is from itself with such bits.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fourwave as fw
from fourwave.nn import base, function
from targets import Target

R = fw.recipes
RECIPES = {
    "unquantized": R.Unquantized(), "delayed": R.DelayedScaling(amax_history_len=2), "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(),
}  # fmt: skip
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Frobenius norm of the difference over that of native's tensor, by dtype: unquantized, quantized.
LIMITS = {FP32: (2e-6, 5e-3), FP16: (2e-3, 1e-2), BF16: (1e-2, 2e-2)}
# Hopper's matrix unit cuts off where float32 rounds.
FLOAT32_ON_HOPPER = 1e-5
# In lockstep, of one product. Hopper against native on an H200: 0.1% of a product's results differ, by one last bit (0.00024, 0.00005).
PRODUCT_LIMITS = {FP16: 2e-4, BF16: 1e-3}
SEQUENCE = 32
# width, hidden width of the MLP, heads, layers
SIZES = {"small": (64, 96, 2, 1), "wide": (128, 64, 4, 1), "deep": (64, 64, 2, 3)}
VOCABULARY = 32


class Block(torch.nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = fw.nn.LayerNormLinear(width, 3 * width, normalization="RMSNorm", params_dtype=dtype)
        self.out = fw.nn.Linear(width, width, params_dtype=dtype)
        self.mlp = fw.nn.LayerNormMLP(width, hidden, activation="swiglu", params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.mlp(x)


class Model(torch.nn.Module):
    def __init__(self, size: str, dtype: torch.dtype) -> None:
        super().__init__()
        width, hidden, heads, layers = SIZES[size]
        self.blocks = torch.nn.Sequential(*(Block(width, hidden, heads, dtype) for _ in range(layers)))
        self.head = fw.nn.Linear(width, VOCABULARY, bias=False, params_dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))

    @property
    def products(self) -> int:
        """Of one step: three for each linear layer."""
        return 3 * (4 * len(self.blocks) + 1)


def batch_of(size: str, batch: int, dtype: torch.dtype, step: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Input whose tokens differ by octaves, and labels."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(batch, SEQUENCE, SIZES[size][0], generator=generator)
    x = x * torch.exp2(torch.randint(-2, 2, (batch, SEQUENCE, 1), generator=generator).float())
    labels = torch.randint(VOCABULARY, (batch, SEQUENCE), generator=generator)
    return x.to(device, dtype), labels.to(device)


def run(model: Any, size: str, batch: int, dtype: torch.dtype, recipe: str, target: Target) -> dict[str, torch.Tensor]:
    """Results of two steps, by name, on the CPU. dtype: of the input; the parameters may have another."""
    model = copy.deepcopy(model).to(target.device)
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        x, labels = batch_of(size, batch, dtype, step, target.device)
        x.requires_grad_()
        with fw.use_backend(target.backend):
            with fw.autocast(recipe=RECIPES[recipe]):
                y = model(x)
            # Large enough that fp16 gradients are not subnormal.
            (F.cross_entropy(y.float().flatten(0, 1), labels.flatten()) * 64).backward()
        found |= {f"y {step}": y.detach(), f"dx {step}": x.grad}  # type: ignore[dict-item]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                found[f"{name} {step}"] = parameter.grad.clone()
                parameter.sub_(parameter.grad, alpha=1e-4)
                parameter.grad = None
        for name, tensor in model.state_dict().items():
            if "delayed_scale" in name:
                found[f"{name} {step}"] = tensor.clone()
    return {name: t.cpu().double() for name, t in found.items()}


def distances(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == right.keys()
    result = {}
    for name, t in right.items():
        assert t.isfinite().all() and t.any(), name
        result[name] = float((found[name] - t).norm() / t.norm())
    return result


def limit(recipe: str, dtype: torch.dtype) -> float:
    return LIMITS[dtype][recipe != "unquantized"]


def limit_of(name: str, target: Target, recipe: str, dtype: torch.dtype) -> float:
    """Of one tensor of `run`."""
    if target.backend == "hopper" and dtype == FP32 and recipe == "unquantized":
        return FLOAT32_ON_HOPPER
    return limit(recipe, dtype)


def magnifies(recipe: str, dtype: torch.dtype) -> bool:
    return recipe == "delayed" and dtype != FP32


def own_noise(model: Any, case: Case, device: str, right: dict[str, torch.Tensor]) -> float:
    """How far native is, in the second step, from itself with a last bit more in 0.3% of what its products give."""
    size, batch, dtype, recipe = case
    plain, most = function.product, 0.0
    for seed in range(3):
        generator = torch.Generator(device=device).manual_seed(seed)

        def nudged(*args: Any, generator: torch.Generator = generator, **kwargs: Any) -> Any:
            made = plain(*args, **kwargs)
            bits = made.out.view(torch.int16)
            bits += torch.rand(bits.shape, generator=generator, device=device) < 0.003
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(function, "product", nudged)
            found = run(model, size, batch, dtype, recipe, Target("native", device))
        most = max(most, *(far for name, far in distances(found, right).items() if name.endswith("1")))
    return most


def lockstep(model: Any, case: Case, target: Target) -> tuple[dict[str, torch.Tensor], float]:
    """`run`, in which native multiplies, too, each time from the same operands, and what it gives is what goes on. And how far the two
    were apart at most, in one product."""
    size, batch, dtype, recipe = case
    plain, most = function.product, 0.0

    def both(a: Any, b: Any, **kwargs: Any) -> Any:
        nonlocal most
        out = kwargs.get("out")
        right = plain(a, b, **{**kwargs, "backend": "native", "out": None if out is None else torch.empty_like(out)})
        made = plain(a, b, **kwargs)
        for each, other in zip(made, right, strict=True):
            if each is not None and other is not None:
                most = max(most, float((each.double() - other.double()).norm() / other.double().norm()))
                each.copy_(other)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function, "product", both)
        return run(model, size, batch, dtype, recipe, target), most


Case = tuple[str, int, torch.dtype, str]  # size, batch, dtype of parameters and input, recipe

# What a GPU's kernels do not multiply, in the words of the refusal. Everything else runs.
REFUSED = {("gfx942", "mxfp4"): "packed e2m1 operands: gfx942 has no matrix instruction for them"}


def gpu_of(target: Target) -> str:
    if target.backend == "flydsl":
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    return target.backend.partition(":")[2]


def compare(
    target: Target, case: Case, caplog: pytest.LogCaptureFixture, params_dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    size, batch, dtype, recipe = case
    torch.manual_seed(0)
    model = Model(size, params_dtype or dtype)
    refused = REFUSED.get((gpu_of(target), recipe))
    if refused is not None:
        with pytest.raises(NotImplementedError, match=refused):
            run(model, size, batch, dtype, recipe, target)
        return
    with pytest.MonkeyPatch.context() as patch:
        if gpu_of(target) == "gfx942":
            patch.setattr(base, "_fnuz", lambda *_: True)  # that GPU's 8-bit floats are other ones
        right = run(model, size, batch, dtype, recipe, Target("native", target.device))
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="fourwave.dispatch"):
        found = run(model, size, batch, dtype, recipe, target)
    records = [r.getMessage() for r in caplog.records if r.getMessage().startswith("gemm ")]
    assert len(records) == 2 * model.products
    assert all(f": {target.backend} (" in record for record in records), records
    far = distances(found, right)
    outside = {name: each for name, each in far.items() if each > limit_of(name, target, recipe, dtype)}
    if magnifies(recipe, dtype):
        stepped, most = lockstep(model, case, target)
        assert most <= PRODUCT_LIMITS[dtype]
        assert all(torch.equal(stepped[name], t) for name, t in right.items())
        if outside:
            second = 1.5 * own_noise(model, case, target.device, right)
            outside = {name: each for name, each in outside.items() if not name.endswith("1") or each > second}
    assert not outside, outside


QUICK = [
    ("small", 2, BF16, "delayed"), ("small", 1, BF16, "unquantized"), ("wide", 1, FP32, "mxfp8"), ("small", 3, FP16, "delayed"),
    ("small", 1, BF16, "mxfp4"),
]  # fmt: skip
ALL = [
    (size, batch, dtype, recipe)
    for size in SIZES
    for batch in (1, 2, 3)
    for dtype in (FP32, FP16, BF16)
    for recipe in RECIPES
]


def skip_what_is_compared_with(target: Target) -> None:
    if target.backend == "native":
        pytest.skip("what the others are compared with")


@pytest.mark.parametrize(
    "case", [QUICK[0], *(pytest.param(case, marks=pytest.mark.slow) for case in QUICK[1:])], ids=str
)
def test_a_model_on_each_backend(target: Target, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    skip_what_is_compared_with(target)
    compare(target, case, caplog)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [case for case in ALL if case not in QUICK], ids=str)
def test_models_on_each_backend(target: Target, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    skip_what_is_compared_with(target)
    compare(target, case, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_float32_parameters_under_bfloat16(target: Target, recipe: str, caplog: pytest.LogCaptureFixture) -> None:
    skip_what_is_compared_with(target)
    compare(target, ("small", 1, BF16, recipe), caplog, params_dtype=FP32)


@pytest.mark.parametrize("fault", ["dropped k", "scale of a block", "stale scales", "bias left out"])
@pytest.mark.parametrize(("dtype", "recipe"), [(BF16, "mxfp8"), (FP32, "delayed"), (BF16, "unquantized")])
def test_faults_are_outside(dtype: torch.dtype, recipe: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of the many gone wrong."""
    torch.manual_seed(0)
    model = Model("small", dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1, 1)
    native = Target("native", "cpu")
    right = run(model, "small", 2, dtype, recipe, native)
    if fault == "stale scales":
        if recipe != "delayed":
            pytest.skip("scales are made anew")
        monkeypatch.setattr(base.QuantizedModule, "_update", lambda *_: None)
    elif fault == "scale of a block":
        if recipe != "mxfp8":
            pytest.skip("there are no blocks")
        plain = function.pair
        calls = 0

        def off(t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            made = plain(t, *args, **kwargs)
            calls += 1
            if calls == 3:
                scale: Any = made.row.scale  # type: ignore[union-attr]
                scale.view(torch.uint8)[:4, 0] += 1
            return made

        monkeypatch.setattr(function, "pair", off)
    else:
        plain_product = function.product
        seen = 0

        def wrong(a: Any, b: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if fault == "bias left out" and seen == 2:
                kwargs["bias"] = None
            made = plain_product(a, b, **kwargs)
            if fault == "dropped k" and seen == 7:
                # An eighth of the sum of one tile: as if the last k step of a 256 were left out.
                target = made.out if kwargs.get("out") is None else kwargs["out"]
                target.view(-1, target.shape[-1])[:16] *= 0.875
            return made

        monkeypatch.setattr(function, "product", wrong)
    far = distances(run(model, "small", 2, dtype, recipe, native), right)
    assert max(far.values()) > 1.5 * limit(recipe, dtype), max(far.values())


def test_lockstep_sees_one_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 78 of a deep model with delayed scaling, whose results as a whole are as far apart when a last bit differs."""
    case = "deep", 2, BF16, "delayed"
    torch.manual_seed(0)
    model = Model("deep", BF16)
    right = run(model, *case[:3], "delayed", Target("native", "cpu"))
    stepped, most = lockstep(model, case, Target("native", "cpu"))
    assert most == 0 and all(torch.equal(stepped[name], t) for name, t in right.items())
    assert own_noise(model, case, "cpu", right) > limit("delayed", BF16)
    plain, calls = function.product, 0

    def wrong(a: Any, b: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += kwargs["backend"] != "native"
        made = plain(a, b, **kwargs)
        if calls == 50 and kwargs["backend"] != "native":
            made.out[:16] *= 0.875  # an eighth of the sum of one tile
        return made

    monkeypatch.setattr(function, "product", wrong)
    _, most = lockstep(model, case, Target("auto", "cpu"))
    assert calls == 2 * model.products and most > PRODUCT_LIMITS[BF16]
    monkeypatch.setattr(function, "product", plain)
    monkeypatch.setattr(base.QuantizedModule, "_update", lambda *_: None)
    stepped, _ = lockstep(model, case, Target("native", "cpu"))
    assert not all(torch.equal(stepped[name], t) for name, t in right.items())
