"""Low-precision GEMM for PyTorch.

gemm(a, b, ...)     out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out)
grouped_gemm(a, b, m_sizes, ...), grouped_gemm_wgrad(dout, x, m_sizes, ...)   one product for each group of rows (MoE)
preshuffle(w)       8-bit weights in the order that AMD matrix instructions read; grouped_gemm takes them
quantize(x, format, direction)   QuantizedTensor: codes and scales of x, which gemm takes
explain(a, b, ...), explain_grouped, explain_quantize   which backend, kernel and config those would use, and why not another
use_backend(name)   choose the backend of later calls, or of a `with` block
nn                  Linear, LayerNormLinear, LayerNormMLP, GroupedLinear: modules that train by a recipe
autocast(recipe=recipes.MXFP8())   the recipe of the modules in a `with` block
moe                 quantized gather and SwiGLU, weighted sum: what lies between the products of a mixture of experts
mslk                names and arguments of MSLK's grouped FP8 GEMM
te                  names and arguments of transformer_engine.pytorch
"""

import importlib
from typing import TYPE_CHECKING, Any

from fourwave import recipes
from fourwave.backends.select import use_backend
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.api import explain, gemm
from fourwave.ops.grouped_gemm.api import explain_grouped, grouped_gemm, grouped_gemm_wgrad
from fourwave.ops.grouped_gemm.preshuffle import preshuffle
from fourwave.quantize import QuantizedTensor, explain_quantize, quantize

if TYPE_CHECKING:
    from fourwave import moe, mslk, nn, te
    from fourwave.nn import autocast

__version__ = "0.1.0.dev0"
__all__ = [
    "BackendUnavailable", "QuantizedTensor", "__version__", "autocast", "explain", "explain_grouped", "explain_quantize", "gemm", "grouped_gemm",
    "grouped_gemm_wgrad", "moe", "mslk", "nn", "preshuffle", "quantize", "recipes", "te", "use_backend",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Modules that are imported when they are first used."""
    if name in ("moe", "mslk", "nn", "te"):
        return importlib.import_module(f"fourwave.{name}")
    if name == "autocast":
        return importlib.import_module("fourwave.nn").autocast
    raise AttributeError(f"module 'fourwave' has no attribute {name!r}")
