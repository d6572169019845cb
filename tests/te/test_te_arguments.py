"""fourwave.te takes Transformer Engine's arguments in its order with its defaults, and each does what it says or is refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch

import fourwave.te as te
from fourwave import recipes as R
from fourwave.te import recipe
from fourwave.te.recipe import Format, MMParams

SPLIT, FAST = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)

# Of Transformer Engine 2.20: names, in the order of positions, and defaults, those of environment variables that are not set. Its default
# device is "cuda", and the CPU here where there is no GPU.
SIGNATURES: dict[Any, str] = {
    te.Linear.__init__: "in_features out_features sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None tp_size=1 "
    "get_rng_state_tracker=None rng_tracker_name=None init_method=None bias=True return_bias=False "
    "params_dtype=None parallel_mode=None parameters_split=None device=None ub_overlap_ag=False ub_overlap_rs=False "
    "ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False ub_name=None delay_wgrad_compute=False "
    "symmetric_ar_type=None save_original_input=False name=None",
    te.LayerNormLinear.__init__: "in_features out_features eps=1e-05 sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None "
    "tp_size=1 get_rng_state_tracker=None init_method=None bias=True normalization=LayerNorm return_bias=False "
    "params_dtype=None parallel_mode=None return_layernorm_output=False return_layernorm_output_gathered=False "
    "parameters_split=None zero_centered_gamma=False device=None ub_overlap_ag=False ub_overlap_rs=False "
    "ub_overlap_rs_dgrad=False ub_bulk_wgrad=False ub_bulk_dgrad=False ub_name=None delay_wgrad_compute=False "
    "symmetric_ar_type=None name=None",
    te.LayerNormMLP.__init__: "hidden_size ffn_hidden_size eps=1e-05 sequence_parallel=False return_bias=False get_rng_state_tracker=None "
    "tp_group=None tp_size=1 init_method=None bias=True normalization=LayerNorm activation=gelu "
    "activation_params=None output_layer_init_method=None fuse_wgrad_accumulation=False params_dtype=None "
    "return_layernorm_output=False return_layernorm_output_gathered=False seq_length=None micro_batch_size=None "
    "set_parallel_mode=False zero_centered_gamma=False device=None ub_overlap_ag=False name=None "
    "ub_overlap_rs=False ub_overlap_rs_dgrad=False ub_bulk_dgrad=False ub_bulk_wgrad=False "
    "delay_wgrad_compute=False symmetric_ar_type=None checkpoint=False",
    te.GroupedLinear.__init__: "num_gemms in_features out_features sequence_parallel=False fuse_wgrad_accumulation=False tp_group=None "
    "tp_size=1 get_rng_state_tracker=None rng_tracker_name=None init_method=None bias=True return_bias=False "
    "params_dtype=None parallel_mode=None device=None ub_overlap_rs=False ub_overlap_ag=False ub_name=None "
    "delay_wgrad_compute=False save_original_input=False single_grouped_weight=False single_grouped_bias=False "
    "name=None use_grouped_tensor=None",
    te.LayerNorm.__init__: "normalized_shape=None eps=1e-05 sequence_parallel=None params_dtype=None zero_centered_gamma=False "
    "hidden_size=None",
    te.RMSNorm.__init__: "normalized_shape=None eps=1e-05 sequence_parallel=None params_dtype=None zero_centered_gamma=False "
    "hidden_size=None",
    te.Fp8Padding.__init__: "num_gemms align_size=None",
    te.Fp8Unpadding.__init__: "num_gemms align_size=None",
    te.Linear.forward: "inp is_first_microbatch=None fp8_output=False fp8_grad=False",
    te.LayerNormLinear.forward: "inp is_first_microbatch=None fp8_output=False fp8_grad=False",
    te.LayerNormMLP.forward: "inp is_first_microbatch=None",
    te.GroupedLinear.forward: "inp m_splits is_first_microbatch=None out=None dgrad_out=None",
    te.Fp8Padding.forward: "inp m_splits",
    te.Fp8Unpadding.forward: "inp m_splits",
    te.autocast.__init__: "enabled=True calibrating=False recipe=None amax_reduction_group=None _graph=False",
    te.fp8_autocast: "enabled=True calibrating=False fp8_recipe=None fp8_group=None _graph=False",
    te.quantized_model_init: "enabled=True recipe=None preserve_high_precision_init_val=False",
    te.fp8_model_init: "enabled=True recipe=None preserve_high_precision_init_val=False",
    te.is_fp8_available: "return_reason=False",
    te.get_default_recipe: "",
    te.general_gemm: "A B out_dtype=None quantization_params=None gelu=False gelu_in=None alpha=1.0 beta=None accumulate=False "
    "layout=TN out=None bias=None use_split_accumulator=False grad=False ub=None ub_type=None extra_output=None "
    "bulk_overlap=False",
    te.general_grouped_gemm: "A B out quantization_params out_dtype layout=TN m_splits=None gelu=False grad=False accumulate=False bias=None "
    "use_bias=False use_split_accumulator=False D_dtype=None single_output=False",
    te.recipe.DelayedScaling.__init__: "margin=0 fp8_format=HYBRID amax_history_len=1024 amax_compute_algo=max scaling_factor_compute_algo=None "
    "reduce_amax=True fp8_dpa=False fp8_mha=False backward_override=None",
    te.recipe.Float8CurrentScaling.__init__: "use_power_2_scales=False fp8_format=HYBRID fp8_gemm_fprop=fast fp8_gemm_dgrad=split fp8_gemm_wgrad=split "
    "fp8_dpa=False fp8_mha=False backward_override=None",
    te.recipe.Float8BlockScaling.__init__: "use_f32_scales=False fp8_format=E4M3 x_block_scaling_dim=1 w_block_scaling_dim=2 grad_block_scaling_dim=1 "
    "fp8_gemm_fprop=split fp8_gemm_dgrad=split fp8_gemm_wgrad=split fp8_dpa=False fp8_mha=False "
    "backward_override=None",
    te.recipe.MXFP8BlockScaling.__init__: "margin=0 fp8_format=E4M3 fp8_dpa=False fp8_mha=False backward_override=None enable_2d_quantization=False",
}  # fmt: skip
DEFAULTS = {"None": None, "True": True, "False": False, "split": SPLIT, "fast": FAST, **Format.__members__}
RECIPES: list[Any] = [
    recipe.DelayedScaling,
    recipe.Float8CurrentScaling,
    recipe.Float8BlockScaling,
    recipe.MXFP8BlockScaling,
]
# Of Transformer Engine 1.x, by name.
OLDER = {recipe.DelayedScaling: {"interval", "override_linear_precision"}}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("which", SIGNATURES, ids=lambda c: c.__qualname__)
def test_arguments_their_order_and_their_defaults(which: Any) -> None:
    parameters = inspect.signature(which).parameters.values()
    found = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    expected = [each.split("=") for each in SIGNATURES[which].split()]
    assert [p.name for p in found] == [name for name, *_ in expected]
    for p, (name, *default) in zip(found, expected, strict=True):
        if not default:
            assert p.default is p.empty, name
            continue
        assert type(p.default) in (bool, int, float, str, type(None), MMParams, Format), name
        assert p.default == DEFAULTS[default[0]] if default[0] in DEFAULTS else str(p.default) == default[0], name


@pytest.mark.parametrize("which", RECIPES, ids=lambda c: c.__name__)
def test_recipes_are_replaced_by_their_arguments(which: Any) -> None:
    """Fields are the constructor's arguments."""
    names = {each.split("=")[0] for each in SIGNATURES[which.__init__].split()} | OLDER.get(which, set())
    assert set(inspect.signature(which).parameters) == names
    made = which(fp8_format=Format.E4M3)
    assert {f.name for f in dataclasses.fields(made) if f.init} == names
    again = dataclasses.replace(made, fp8_format=Format.HYBRID)
    assert again == which(fp8_format=Format.HYBRID) != made and hash(again) == hash(which(fp8_format=Format.HYBRID))
    assert again.plan == which(fp8_format=Format.HYBRID).plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.fp8_format = Format.HYBRID
    if which is recipe.DelayedScaling:
        factor = dataclasses.replace(which(scaling_factor_compute_algo=lambda amax, old, largest, _: 2 * old), margin=1)
        assert factor.margin == 1 and factor.plan.rescale[0](1.0, 0.5, 448.0, factor) == 0.25


REFUSED: dict[str, list[tuple[Any, dict[str, Any], type[Exception], str]]] = {
    "everywhere": [
        *[(which, {name: True}, NotImplementedError, "no attention here") for which in RECIPES for name in ("fp8_dpa", "fp8_mha")],
        *[(which, {"fp8_dpa": 1}, ValueError, "fp8_dpa is 1; it must be True or False") for which in RECIPES],
        *[(which, {"fp8_format": Format.E5M2}, ValueError, "use E4M3 or HYBRID") for which in RECIPES],
        *[(which, {"backward_override": "fp8"}, ValueError, "backward_override") for which in RECIPES],
        *[(which, {"backward_override": "dequantized"}, NotImplementedError, "None and 'high_precision'") for which in RECIPES[1:]],
    ],
    "delayed": [
        (recipe.DelayedScaling, {"backward_override": "high_precision"}, ValueError, "it has None only"),
        (recipe.DelayedScaling, {"interval": 16}, NotImplementedError, "interval=16: scales are made anew at every step"),
        (recipe.DelayedScaling, {"interval": 0}, NotImplementedError, "interval=0"),
        (recipe.DelayedScaling, {"fp8_format": 1}, ValueError, "1.x had interval before it"),
        (recipe.DelayedScaling, {"reduce_amax": None}, ValueError, "reduce_amax is None"),
        (recipe.DelayedScaling, {"amax_compute_algo": "min"}, ValueError, "amax_compute_algo"),
        (recipe.DelayedScaling, {"amax_history_len": 0}, ValueError, "amax_history_len"),
        *[
            (recipe.DelayedScaling, {"override_linear_precision": given}, NotImplementedError, r"\(False, False, True\), wgrad in high")
            for given in ((True, False, False), (False, True, False), (False, True, True), (True, True, True))
        ],
        *[
            (recipe.DelayedScaling, {"override_linear_precision": given}, ValueError, "a flag each for fprop, dgrad and wgrad")
            for given in (True, None, (False, True), (False, False, None), "wgrad")
        ],
    ],
    "current": [
        (recipe.Float8CurrentScaling, {"use_power_2_scales": Format.HYBRID}, ValueError, "use_power_2_scales is"),
        (recipe.Float8CurrentScaling, {"fp8_gemm_wgrad": FAST}, NotImplementedError, "fp8_gemm_wgrad"),
        (recipe.Float8CurrentScaling, {"fp8_gemm_dgrad": FAST}, NotImplementedError, "fp8_gemm_dgrad"),
        (recipe.Float8CurrentScaling, {"fp8_gemm_fprop": True}, ValueError, "MMParams"),
    ],
    "blocks": [
        (recipe.Float8BlockScaling, {"use_f32_scales": Format.E4M3}, ValueError, "use_f32_scales is"),
        *[(recipe.Float8BlockScaling, {f"fp8_gemm_{g}": FAST}, NotImplementedError, g) for g in ("fprop", "dgrad", "wgrad")],
        (recipe.Float8BlockScaling, {"x_block_scaling_dim": 2}, NotImplementedError, "inputs and gradients have 1"),
        (recipe.Float8BlockScaling, {"grad_block_scaling_dim": 2}, NotImplementedError, "inputs and gradients have 1"),
        (recipe.Float8BlockScaling, {"w_block_scaling_dim": 3}, NotImplementedError, "weights 1 or 2"),
    ],
    "mx": [
        (recipe.MXFP8BlockScaling, {"margin": 1}, NotImplementedError, "margin=1"),
        (recipe.MXFP8BlockScaling, {"enable_2d_quantization": True}, NotImplementedError, "blocks are 1x32"),
        (recipe.MXFP8BlockScaling, {"enable_2d_quantization": 2}, ValueError, "enable_2d_quantization is 2"),
    ],
    "others": [
        (recipe.NVFP4BlockScaling, {"disable_rht": True}, NotImplementedError, "MXFP4 is the 4-bit recipe"),
        (recipe.CustomRecipe, {"qfactory": lambda role: None}, NotImplementedError, "fourwave.recipes has"),
    ],
    "modules": [
        *[(make, {"tp_size": 2}, NotImplementedError, "2 tensor-parallel ranks") for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP)],
        *[(make, {"parameters_split": {"q": 8}}, NotImplementedError, "the weight is one parameter") for make in (te.Linear, te.LayerNormLinear)],
        (te.LayerNormMLP, {"activation_params": {"limit": 7.0}}, NotImplementedError, "take none"),
        (te.LayerNormMLP, {"activation": "qgelu"}, NotImplementedError, "'qgelu'"),
        (lambda *sizes, **given: te.GroupedLinear(2, *sizes, **given), {"single_grouped_weight": True}, NotImplementedError, "single_grouped_weight"),
        (lambda *sizes, **given: te.GroupedLinear(2, *sizes, **given), {"single_grouped_bias": True}, NotImplementedError, "single_grouped_bias"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_here_is_refused_and_says_so(kind: str) -> None:
    sizes = (8, 8) if kind == "modules" else ()
    for which, given, error, says in REFUSED[kind]:
        with pytest.raises(error, match=says):
            which(*sizes, **given)


def test_products_refuse_what_they_would_leave_out() -> None:
    t = torch.ones(8, 8)
    refused: list[dict[str, Any]] = [
        {"quantization_params": object()}, {"ub": object()}, {"extra_output": t}, {"bulk_overlap": True},
    ]  # fmt: skip
    for given in refused:
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            te.general_gemm(t, t, **given)
    with pytest.raises(NotImplementedError, match=r"beta=0\.5"):
        te.general_gemm(t, t, beta=0.5)
    of_groups: list[dict[str, Any]] = [
        {"quantization_params": [object()]}, {"quantization_params": None, "D_dtype": torch.float16},
    ]  # fmt: skip
    for given in of_groups:
        with pytest.raises(NotImplementedError, match=list(given)[-1]):
            te.general_grouped_gemm([t], [t], [None], out_dtype=torch.float32, **given)


MODULES: dict[str, Any] = {
    "linear": lambda **k: te.Linear(32, 32, **k),
    "layernorm_linear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "mlp": lambda **k: te.LayerNormMLP(32, 32, **k),
    "grouped": lambda **k: te.GroupedLinear(2, 32, 32, **k),
}


def trained(kind: str, how: Any, **options: Any) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A module after three steps; the last one's output, its gradient and that of the input."""
    torch.manual_seed(0)
    module = MODULES[kind](**options)
    for step in range(3):
        module.zero_grad()
        x = randn(8, 32, seed=step).requires_grad_()
        with te.autocast(recipe=how):
            y = module(x, *[[3, 5]] * (kind == "grouped"))
        dy = randn(8, 32, seed=step + 10)
        y.backward(dy)
        if module.delay_wgrad_compute:
            module.backward_dw()
    return module, y, dy, x


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_wgrad_in_high_precision(kind: str, delay: bool) -> None:
    override = recipe._OverrideLinearPrecision(wgrad=True)
    how = recipe.DelayedScaling(amax_history_len=4, override_linear_precision=override)
    assert how.override_linear_precision.wgrad and how == recipe.DelayedScaling(
        amax_history_len=4, override_linear_precision=(False, False, True), interval=-1
    )
    for again in (pickle.loads(pickle.dumps(how)), copy.deepcopy(how), dataclasses.replace(how, margin=0)):
        assert again == how and again.plan == how.plan
    plain = recipe.DelayedScaling(amax_history_len=4, interval=1)
    assert how.plan == plain.plan._replace(x_t=None, g_t=None)
    module, y, dy, x = trained(kind, how, delay_wgrad_compute=delay)
    other, other_y, _, other_x = trained(kind, plain)
    # fprop and dgrad are as before, and so is what delayed scaling remembers.
    assert torch.equal(y, other_y)
    torch.testing.assert_close(x.grad, other_x.grad, rtol=0, atol=0)
    assert torch.equal(module.delayed_scale, other.delayed_scale)
    assert torch.equal(module.delayed_amax_history, other.delayed_amax_history)
    for (name, p), (_, q) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        if "weight" not in name or "norm" in name:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5)
    last = {"mlp": "fc2_weight", "grouped": "weight1"}.get(kind, "weight")
    grad, quantized = getattr(module, last).grad, getattr(other, last).grad
    assert not torch.allclose(grad, quantized, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(grad, quantized, rtol=0.2, atol=2.0)
    if kind in ("linear", "grouped"):
        rows = slice(3, 8) if kind == "grouped" else slice(0, 8)
        right = (dy[rows].double().mT @ x[rows].double()).float()
        torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-5)


def test_recipes_of_subclasses() -> None:
    """Megatron-LM makes one that passes what it was given on."""

    class Own(recipe.DelayedScaling):
        def __init__(self, wgrad: bool) -> None:
            super().__init__(
                margin=1, fp8_format=Format.E4M3, amax_compute_algo="most_recent", amax_history_len=16,
                override_linear_precision=(False, False, wgrad), interval=1, fp8_dpa=False, fp8_mha=False,
            )  # fmt: skip

    made = Own(True)
    assert isinstance(made, R.DelayedScaling) and made.delayed() and made.plan.g_t is None and made.plan.margin == 1
    assert Own(False).plan.g_t == "fp8_e4m3" and Own(False) == Own(False) != made
