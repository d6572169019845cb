"""Names of transformer_engine.pytorch that are not here, and what to use instead."""

from __future__ import annotations

from typing import Any

import torch

_SDPA = "torch.nn.functional.scaled_dot_product_attention between te.Linear or te.LayerNormLinear"
_SEVERAL_RANKS = "there is no tensor parallelism here, and no communication to overlap with; FSDP2 shards parameters"
_QUANTIZED = "fourwave.quantize makes fourwave.QuantizedTensor, which te.general_gemm takes"
_PERMUTATION = "fourwave.nn.MoEMLP routes tokens to experts and back; torch.argsort and index_select are its parts"
_RECIPES = "quantizers of one's own are not here; te.recipe and fourwave.recipes have recipes"

_INSTEAD = {
    "InferenceParams": _SDPA,
    "RotaryPositionEmbedding": _SDPA,
    "FusedMLAQUpProjRopeQuant": _SDPA,
    "attention": _SDPA,
    "moe_permute": _PERMUTATION,
    "moe_permute_with_probs": _PERMUTATION,
    "moe_permute_and_pad_with_probs": _PERMUTATION,
    "moe_unpermute": _PERMUTATION,
    "moe_sort_chunks_by_index": _PERMUTATION,
    "moe_sort_chunks_by_index_with_probs": _PERMUTATION,
    "permutation": _PERMUTATION,
    "graph": "torch.cuda.graph of the whole training step, or torch.cuda.make_graphed_callables",
    "make_graphed_callables": "torch.cuda.graph of the whole training step, or torch.cuda.make_graphed_callables",
    "optimizers": "torch.optim, with fused=True",
    "ops": "the modules of fourwave.nn, or torch.compile",
    "cross_entropy": "torch.nn.functional.cross_entropy",
    "parallel_cross_entropy": "torch.nn.functional.cross_entropy",
    "onnx_export": "torch.export",
    "CudaRNGStatesTracker": "te.distributed.CudaRNGStatesTracker",
    "initialize_ub": _SEVERAL_RANKS,
    "destroy_ub": _SEVERAL_RANKS,
    "UserBufferQuantizationMode": _SEVERAL_RANKS,
    "cpu_offload": "torch.autograd.graph.save_on_cpu",
    "get_cpu_offload_context": "torch.autograd.graph.save_on_cpu",
    "mark_not_offload": "torch.autograd.graph.save_on_cpu",
    "ManualOffloadSynchronizer": "torch.autograd.graph.save_on_cpu",
    "get_device_compute_capability": "torch.cuda.get_device_capability",
    "get_cudnn_version": "torch.backends.cudnn.version",
    "DType": "torch.dtype: te.general_gemm takes those",
    "tensor": _QUANTIZED,
    "float8_tensor": _QUANTIZED,
    "quantized_tensor": _QUANTIZED,
    "QuantizedTensor": _QUANTIZED,
    "Quantizer": _QUANTIZED,
    "QuantizerRole": _RECIPES,
    "QuantizerRequest": _RECIPES,
    "DelayedScalingRequest": _RECIPES,
    "newton_schulz": "torch.optim.Muon",
    "interleave_glu_tensor": "gated activations take the activated half first here",
    "deinterleave_glu_tensor": "gated activations take the activated half first here",
}
# Float8Tensor, MXFP8Quantizer, NVFP4TensorStorage, ...
_FAMILIES = {"Quantizer": _QUANTIZED, "Tensor": _QUANTIZED, "Storage": _QUANTIZED}


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
