"""Names and arguments of transformer_engine.pytorch over fourwave: a training script changes its imports.

    import fourwave.te as te                                      # import transformer_engine.pytorch as te
    from fourwave.te.recipe import DelayedScaling, Format         # from transformer_engine.common.recipe import ...

Or `import fourwave.te.pytorch as te` and `from fourwave.te.common.recipe import ...` (paths.py).

Arguments that ask for what is not here (several tensor-parallel ranks, attention) raise NotImplementedError at their first use.
They are taken where they have their defaults, and where they change nothing in Transformer Engine either. docs/modules.md
lists what is here.
"""

import sys

from fourwave.te import distributed, paths, quantization, recipe
from fourwave.te import gemm as cpp_extensions
from fourwave.te import modules as module
from fourwave.te.distributed import CudaRNGStatesTracker
from fourwave.te.gemm import general_gemm, general_grouped_gemm
from fourwave.te.missing import DotProductAttention, MultiheadAttention, TransformerLayer, getattr_of
from fourwave.te.modules import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from fourwave.te.padding import Fp8Padding, Fp8Unpadding
from fourwave.te.quantization import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

# Of scripts that import transformer_engine as te: te.pytorch.Linear, te.common.recipe.Format.
pytorch = sys.modules[__name__]
common = paths.register(pytorch)
fp8 = quantization  # its older name

# The version of Transformer Engine whose names and arguments these are, for scripts that ask transformer_engine for its own.
__version__ = "2.20.0.dev0"

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear",
    "MultiheadAttention", "RMSNorm", "TransformerLayer", "autocast", "checkpoint", "common", "cpp_extensions", "distributed",
    "fp8_autocast", "fp8_model_init", "general_gemm", "general_grouped_gemm", "get_default_recipe", "is_bf16_available",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "module", "pytorch", "quantized_model_init",
    "recipe",
]  # fmt: skip

__getattr__ = getattr_of(__name__)
