"""Names and arguments of transformer_engine.pytorch over fourwave: a training script changes its imports.

    import fourwave.te as te                                      # import transformer_engine.pytorch as te
    from fourwave.te.recipe import DelayedScaling, Format         # from transformer_engine.common.recipe import ...

Arguments that ask for what is not here (tensor parallelism, communication overlap, attention) raise NotImplementedError at
their first use, and are taken where they have their defaults. docs/modules.md lists what is here.
"""

from fourwave.te import recipe
from fourwave.te.gemm import general_gemm, general_grouped_gemm
from fourwave.te.modules import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from fourwave.te.quantization import (
    autocast,
    checkpoint,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

__all__ = [
    "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "autocast", "checkpoint", "fp8_autocast",
    "fp8_model_init", "general_gemm", "general_grouped_gemm", "get_default_recipe", "is_fp8_available",
    "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "quantized_model_init", "recipe",
]  # fmt: skip
