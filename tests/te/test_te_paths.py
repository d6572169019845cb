"""fourwave.te in the place of transformer_engine in import lines; what scripts ask of FP8GlobalStateManager; padding."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import fourwave as fw
import fourwave.te as te
from fourwave.te import recipe

Manager = te.quantization.FP8GlobalStateManager

LINES = [
    ("import fourwave.te.pytorch as found", te),
    ("from fourwave.te import pytorch as found", te),
    ("import fourwave.te.common.recipe as found", recipe),
    ("from fourwave.te.common import recipe as found", recipe),
    ("from fourwave.te.common.recipe import Format as found", recipe.Format),
    ("from fourwave.te.pytorch import fp8_autocast as found", te.fp8_autocast),
    ("from fourwave.te.pytorch.fp8 import FP8GlobalStateManager as found", Manager),
    ("from fourwave.te.pytorch.quantization import FP8GlobalStateManager as found", Manager),
    ("from fourwave.te.pytorch.distributed import checkpoint as found", te.checkpoint),
    ("from fourwave.te.pytorch.cpp_extensions import general_gemm as found", te.general_gemm),
    ("from fourwave.te.pytorch.cpp_extensions.gemm import general_gemm as found", te.general_gemm),
    ("from fourwave.te.pytorch.module import LayerNormMLP as found", te.LayerNormMLP),
    ("from fourwave.te.pytorch.module.linear import Linear as found", te.Linear),
    ("from fourwave.te.pytorch.module.grouped_linear import GroupedLinear as found", te.GroupedLinear),
    ("from fourwave.te.pytorch.module.rmsnorm import RMSNorm as found", te.RMSNorm),
    ("from fourwave.te.fp8 import FP8GlobalStateManager as found", Manager),
    (
        "from fourwave.te.module.base import TransformerEngineBaseModule as found",
        te.modules.TransformerEngineBaseModule,
    ),
    ("import fourwave.te as t; found = t.pytorch.module.base.TransformerEngineBaseModule", te.modules._Module),
    ("import fourwave.te as t; found = t.module.linear.Linear", te.Linear),
    ("import fourwave.te as t; found = t.pytorch.cpp_extensions.gemm.general_gemm", te.general_gemm),
    ("from fourwave.te.pytorch.module import base; found = base.TransformerEngineBaseModule", te.modules._Module),
    ("import fourwave.te.quantization as found", te.quantization),
    ("import fourwave.te as t; found = t.pytorch.fp8.FP8GlobalStateManager", Manager),
    ("import fourwave.te.pytorch.module.base; import fourwave; found = fourwave.te.pytorch.Linear", te.Linear),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_transformer_engines_paths(line: str, expected: Any) -> None:
    names: dict[str, Any] = {}
    exec(line, names)
    assert names["found"] is expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from fourwave.te.pytorch import moe_permute", "MoEMLP"),
        ("from fourwave.te.pytorch.permutation import moe_permute", "MoEMLP"),
        ("import fourwave.te.pytorch.attention", "scaled_dot_product_attention"),
        ("from fourwave.te.pytorch.attention.rope import apply_rotary_pos_emb", "scaled_dot_product_attention"),
        ("from fourwave.te.pytorch.optimizers import FusedAdam", "torch.optim"),
        ("from fourwave.te.pytorch import Float8Tensor", "fourwave.quantize"),
        ("from fourwave.te.pytorch.tensor.mxfp8_tensor import MXFP8Tensor", "fourwave.quantize"),
        ("from fourwave.te.pytorch.module.base import get_ub", "no tensor parallelism"),
        ("from fourwave.te.pytorch.distributed import gather_along_first_dim", "no tensor parallelism"),
        ("from fourwave.te.pytorch.quantization import DelayedScalingRecipeState", "delayed_amax_history"),
        ("from fourwave.te.pytorch.cpp_extensions import fused_attn_fwd", "scaled_dot_product_attention"),
        ("from fourwave.te.pytorch.utils import get_device_compute_capability", "torch.cuda.get_device_capability"),
        ("from fourwave.te.pytorch.router import fused_moe_aux_loss", "MoEMLP"),
        ("from fourwave.te.common.recipe import CurrentScaling", "Float8CurrentScaling"),
        ("from fourwave.te.common.recipe import nonsense", "cannot import name 'nonsense'"),
        ("import fourwave.te.quantization.nonsense", "No module named 'fourwave.te.quantization.nonsense'"),
        ("from fourwave.te import nonsense", "cannot import name 'nonsense'"),
        ("import fourwave.te.pytorch.nonsense", "No module named 'fourwave.te.pytorch.nonsense'"),
    ],
)
def test_what_an_import_does_not_find_is_told(line: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        exec(line, {})


# What `transformer_engine.pytorch` of 2.20 has.
NAMES = """CudaRNGStatesTracker CusolverMpCtx DType DelayedScalingRequest DotProductAttention Float8BlockQuantizer Float8BlockwiseQTensor
Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer Float8Quantizer Float8Tensor Float8TensorStorage Fp8Padding Fp8Unpadding
FusedMLAQUpProjRopeQuant GroupedLinear HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer IdentityQuantizer IdentityTensor
IdentityTensorStorage InferenceParams LayerNorm LayerNormLinear LayerNormMLP Linear MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage
ManualOffloadSynchronizer MultiheadAttention NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage QuantizedTensor QuantizedTensorStorage Quantizer
QuantizerRequest QuantizerRole RMSNorm RotaryPositionEmbedding TransformerLayer UserBufferQuantizationMode autocast checkpoint constants
deinterleave_glu_tensor destroy_ub fp8_autocast fp8_model_init get_cpu_offload_context get_cudnn_version get_default_recipe
get_device_compute_capability initialize_ub interleave_glu_tensor is_bf16_available is_fp8_available is_fp8_block_scaling_available
is_mxfp8_available is_nvfp4_available make_graphed_callables mark_not_offload moe_permute moe_permute_and_pad_with_probs
moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute newton_schulz onnx_export ops optimizers
parallel_cross_entropy prepare_for_saving quantized_model_init restore_from_func_ctx restore_from_saved""".split()
HERE = """CudaRNGStatesTracker DotProductAttention Fp8Padding Fp8Unpadding GroupedLinear LayerNorm LayerNormLinear LayerNormMLP Linear
MultiheadAttention RMSNorm TransformerLayer autocast checkpoint fp8_autocast fp8_model_init get_default_recipe is_bf16_available
is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available quantized_model_init""".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_here_or_told(name: str) -> None:
    assert hasattr(te, name) == (name in HERE) == (name in te.__all__)
    if name not in HERE:
        with pytest.raises(AttributeError, match=f"fourwave.te has no {name}; instead: "):
            getattr(te, name)
        with pytest.raises(ImportError, match=f"fourwave.te has no {name}; instead: "):
            exec(f"from fourwave.te.pytorch import {name}", {})


@pytest.mark.parametrize("module", [te.distributed, te.cpp_extensions, te.module, te.quantization, te.recipe])
def test_what_a_module_lacks_is_told(module: Any) -> None:
    for name, says in (
        ("MXFP8Quantizer", "quantize makes"),
        ("nonsense", f"module '{module.__name__}' has no attribute"),
    ):
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=says):
            getattr(module, name)


def test_other_imports_go_on_as_before() -> None:
    assert importlib.util.find_spec("fourwave.te.pytorch.nonsense") is None
    assert importlib.util.find_spec("attention") is None and importlib.util.find_spec("optimizers") is None


def test_scripts_may_ask_for_the_version() -> None:
    """As Megatron-LM does, to know which arguments there are."""
    assert tuple(int(part) for part in te.pytorch.__version__.split(".")[:2]) >= (2, 0)


def test_every_module_is_of_the_base_class() -> None:
    base = te.modules.TransformerEngineBaseModule
    made = (te.Linear(8, 8), te.LayerNormLinear(8, 8), te.LayerNormMLP(8, 8), te.GroupedLinear(2, 8, 8))
    assert all(isinstance(module, base) for module in made) and not isinstance(te.LayerNorm(8), base)


def state() -> tuple[bool, bool, Any, Any]:
    return Manager.is_fp8_enabled(), Manager.is_fp8_calibration(), Manager.get_fp8_recipe(), Manager.get_fp8_group()


def test_the_manager_tells_what_is_in_force() -> None:
    outside = False, False, te.get_default_recipe(), None
    mxfp8, delayed = recipe.MXFP8BlockScaling(), recipe.DelayedScaling(amax_history_len=4)
    assert state() == outside
    with te.fp8_autocast(fp8_recipe=mxfp8):
        assert state() == (True, False, mxfp8, None) and isinstance(Manager.get_fp8_recipe(), recipe.MXFP8BlockScaling)
        with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=delayed):
            assert state() == (False, True, delayed, None)
        with te.autocast(recipe=delayed, amax_reduction_group="group"):
            assert state() == (True, False, delayed, "group")
        with fw.autocast(recipe=fw.recipes.Unquantized()):
            assert not Manager.is_fp8_enabled()
        Manager.reset()
        assert state() == (True, False, mxfp8, None)
    assert state() == outside
    assert not Manager.with_fp8_parameters() and not Manager.fp8_graph_capturing()
    assert (
        Manager.is_fp8_available()
        == Manager.is_mxfp8_available()
        == te.quantization.check_mxfp8_support()
        == (True, "")
    )
    assert Manager.is_nvfp4_available()[0] is False
    with pytest.raises(AttributeError, match="no add_fp8_tensors_to_global_buffer here"):
        getattr(Manager, "add_fp8_tensors_to_global_buffer")  # noqa: B009


@pytest.mark.parametrize("reentrant", [None, False])
def test_the_manager_says_the_same_when_a_checkpoint_computes_again(reentrant: bool | None) -> None:
    seen = []

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(state())
        return layer(x)

    layer, mxfp8 = te.Linear(32, 32), recipe.MXFP8BlockScaling()
    x = torch.randn(4, 32, requires_grad=True)
    with te.fp8_autocast(fp8_recipe=mxfp8):
        y = te.checkpoint(run, x, **({} if reentrant is None else {"use_reentrant": reentrant}))
    y.sum().backward()
    assert seen == [(True, False, mxfp8, None)] * 2


def test_the_manager_in_compiled_code() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if Manager.is_fp8_enabled() else x - 1

    x = torch.zeros(())
    assert run(x) == -1
    with te.fp8_autocast():
        assert run(x) == 1
        with te.fp8_autocast(enabled=False):
            assert run(x) == -1
    assert run(x) == -1


def test_reducing_by_hand_changes_nothing() -> None:
    """Scripts call it after a backward pass whose region Transformer Engine does not see."""
    delayed = recipe.DelayedScaling(amax_history_len=4)
    results = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        layer = te.Linear(32, 32)
        for _ in range(3):
            x = torch.randn(4, 32, requires_grad=True)
            with te.fp8_autocast(fp8_recipe=delayed):
                y = layer(x)
            y.square().sum().backward()
            if by_hand:
                Manager.reduce_and_update_fp8_tensors(forward=False)
        results.append(layer.state_dict())
    assert all(torch.equal(t, results[1][name]) for name, t in results[0].items())


@pytest.mark.parametrize(("align", "padded"), [(None, [3, 0, 9, 16]), (1, [3, 0, 9, 16]), (16, [16, 0, 16, 16])])
def test_padding_and_back(align: int | None, padded: list[int]) -> None:
    sizes = [3, 0, 9, 16]
    x = torch.arange(1.0, 28 * 8 + 1).view(28, 8).requires_grad_()
    pad, unpad = te.Fp8Padding(4, align), te.Fp8Unpadding(4, align)
    y, got = pad(x, sizes)
    assert got == padded and y.shape == (sum(padded), 8)
    for part, whole in zip(x.split(sizes), y.split(padded), strict=True):
        assert torch.equal(whole[: len(part)], part) and not whole[len(part) :].any()
    back = unpad(y, sizes)
    assert torch.equal(back, x)
    weight = torch.arange(28.0).view(28, 1)
    (back * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, weight.expand(28, 8))


def test_experts_of_padded_rows() -> None:
    torch.manual_seed(0)
    sizes = [3, 0, 9, 4]
    x = torch.randn(16, 32)
    experts, pad, unpad = te.GroupedLinear(4, 32, 24, bias=False), te.Fp8Padding(4, 32), te.Fp8Unpadding(4, 32)
    with te.fp8_autocast(fp8_recipe=recipe.MXFP8BlockScaling()):
        plain = experts(x, sizes)
        padded = unpad(experts(*pad(x, sizes)), sizes)
    assert torch.equal(plain, padded)


def test_padding_that_does_not_fit_is_told() -> None:
    x = torch.zeros(5, 8)
    for wrong, says in (
        (lambda: te.Fp8Padding(2, 0), "align_size is 0"),
        (lambda: te.Fp8Padding(2)(x, [5]), "1 numbers for 2 products"),
        (lambda: te.Fp8Padding(2)(x, [3, 3]), r"5 rows; m_splits \[3, 3\] are 6"),
        (lambda: te.Fp8Padding(2)(x, [6, -1]), "5 rows"),
        (lambda: te.Fp8Unpadding(2, 4)(x, [3, 2]), r"m_splits \[3, 2\] in multiples of 4 are 8"),
    ):
        with pytest.raises(ValueError, match=says):
            wrong()
