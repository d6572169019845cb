"""Names of transformer_engine.pytorch that are not here, and what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SDPA = "torch.nn.functional.scaled_dot_product_attention between te.Linear or te.LayerNormLinear"
_SEVERAL_RANKS = "there is no tensor parallelism here, and no communication to overlap with; FSDP2 shards parameters"
_QUANTIZED = "fourwave.quantize makes fourwave.QuantizedTensor, which te.general_gemm takes"
_DTYPES = "torch.dtype: te.general_gemm takes those"
_PERMUTATION = "fourwave.nn.MoEMLP routes tokens to experts and back; torch.argsort and index_select are its parts"
_RANKS_EXPERTS = "there is no expert parallelism here: fourwave.nn.MoEMLP and te.GroupedLinear have all experts"
_STATE = "the state of delayed scaling is in each module: delayed_scale and delayed_amax_history"
_LOGITS = "fourwave.nn.MoEMLP(return_logits=True), for a loss of one's own"
_RECIPES = "quantizers of one's own are not here; te.recipe and fourwave.recipes have recipes"

_INSTEAD = {
    "InferenceParams": _SDPA,
    "RotaryPositionEmbedding": _SDPA,
    "FusedMLAQUpProjRopeQuant": _SDPA,
    "attention": _SDPA,
    "transformer": _SDPA,
    "fused_attn": _SDPA,
    "fused_attn_fwd": _SDPA,
    "fused_attn_bwd": _SDPA,
    "moe_permute": _PERMUTATION,
    "moe_permute_with_probs": _PERMUTATION,
    "moe_permute_and_pad_with_probs": _PERMUTATION,
    "moe_unpermute": _PERMUTATION,
    "moe_sort_chunks_by_index": _PERMUTATION,
    "moe_sort_chunks_by_index_with_probs": _PERMUTATION,
    "permutation": _PERMUTATION,
    "router": _PERMUTATION,
    "fused_topk_with_score_function": _PERMUTATION,
    "fused_compute_score_for_moe_aux_loss": _LOGITS,
    "fused_moe_aux_loss": _LOGITS,
    "ep": _RANKS_EXPERTS,
    "graph": "torch.cuda.graph of the whole training step, or torch.cuda.make_graphed_callables",
    "make_graphed_callables": "torch.cuda.graph of the whole training step, or torch.cuda.make_graphed_callables",
    "optimizers": "torch.optim, with fused=True: AdamW for FusedAdam, SGD for FusedSGD",
    "FusedAdam": "torch.optim.AdamW(fused=True)",
    "FusedSGD": "torch.optim.SGD(fused=True)",
    "ops": "the modules of fourwave.nn, or torch.compile",
    "cross_entropy": "torch.nn.functional.cross_entropy",
    "parallel_cross_entropy": "torch.nn.functional.cross_entropy",
    "onnx_export": "torch.export",
    "export": "torch.export",
    "jit": "torch.compile",
    "initialize_ub": _SEVERAL_RANKS,
    "destroy_ub": _SEVERAL_RANKS,
    "UserBufferQuantizationMode": _SEVERAL_RANKS,
    "get_ub": _SEVERAL_RANKS,
    "gather_along_first_dim": _SEVERAL_RANKS,
    "reduce_scatter_along_first_dim": _SEVERAL_RANKS,
    "allreduce": _SEVERAL_RANKS,
    "symmetric_all_reduce": _SEVERAL_RANKS,
    "FullyShardedDataParallel": "torch.distributed.fsdp",
    "cpu_offload": "torch.autograd.graph.save_on_cpu",
    "get_cpu_offload_context": "torch.autograd.graph.save_on_cpu",
    "mark_not_offload": "torch.autograd.graph.save_on_cpu",
    "ManualOffloadSynchronizer": "torch.autograd.graph.save_on_cpu",
    "get_device_compute_capability": "torch.cuda.get_device_capability",
    "get_cudnn_version": "torch.backends.cudnn.version",
    "DType": _DTYPES,
    "TE_DType": _DTYPES,
    "constants": _DTYPES,
    "utils": "torch.cuda.get_device_capability, torch.backends.cudnn.version and PyTorch's own",
    "tensor": _QUANTIZED,
    "float8_tensor": _QUANTIZED,
    "quantized_tensor": _QUANTIZED,
    "QuantizedTensor": _QUANTIZED,
    "Quantizer": _QUANTIZED,
    "prepare_for_saving": _QUANTIZED,
    "restore_from_saved": _QUANTIZED,
    "restore_from_func_ctx": _QUANTIZED,
    "general_grouped_gemm_for_grouped_tensor": "te.general_grouped_gemm, or fourwave.grouped_gemm with sizes on the GPU",
    "get_align_size_for_quantization": "nothing: te.GroupedLinear takes any number of rows",
    "CurrentScaling": "te.recipe.Float8CurrentScaling",
    "FP8Recipe": "te.recipe.Recipe",
    "custom_recipes": _RECIPES,
    "QuantizerRole": _RECIPES,
    "QuantizerRequest": _RECIPES,
    "DelayedScalingRequest": _RECIPES,
    "newton_schulz": "torch.optim.Muon",
    "CusolverMpCtx": "torch.optim.Muon",
    "interleave_glu_tensor": "gated activations take the activated half first here",
    "deinterleave_glu_tensor": "gated activations take the activated half first here",
}
# DelayedScalingRecipeState, MXFP8Quantizer, Float8Tensor, NVFP4TensorStorage, ...
_FAMILIES = {"RecipeState": _STATE, "Quantizer": _QUANTIZED, "Tensor": _QUANTIZED, "Storage": _QUANTIZED}


class _NotHere(torch.nn.Module):
    """A class that scripts name (in tables of layers, in policies of wrapping) without making one."""

    instead = _SDPA

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"fourwave.te has no {type(self).__name__}; instead: {self.instead}")


class DotProductAttention(_NotHere): ...


class MultiheadAttention(_NotHere): ...


class TransformerLayer(_NotHere):
    instead = f"{_SDPA}, and te.LayerNormMLP"


def instead_of(name: str) -> str | None:
    """What an error says about a name of Transformer Engine's; None of others."""
    instead = _INSTEAD.get(name)
    if instead is None and not name.startswith("_"):
        instead = next((text for ending, text in _FAMILIES.items() if name.endswith(ending)), None)
    return None if instead is None else f"fourwave.te has no {name}; instead: {instead}"


def getattr_of(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module."""

    def told(name: str) -> Any:
        raise AttributeError(instead_of(name) or f"module {module!r} has no attribute {name!r}")

    return told
