"""Low-precision GEMM for PyTorch.

gemm(a, b, ...)     out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out)
grouped_gemm(a, b, m_sizes, ...), grouped_gemm_wgrad(dout, x, m_sizes, ...)   one product for each group of rows (MoE)
preshuffle(w)       8-bit weights in the order that AMD matrix instructions read; grouped_gemm takes them
quantize(x, format, direction)   QuantizedTensor: codes and scales of x, which gemm takes
explain(a, b, ...)  which backend, kernel and config that would use, and why not another
use_backend(name)   choose the backend of later calls, or of a `with` block
"""

from fourwave.backends.select import use_backend
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.api import explain, gemm
from fourwave.ops.grouped_gemm.api import explain_grouped, grouped_gemm, grouped_gemm_wgrad
from fourwave.ops.grouped_gemm.preshuffle import preshuffle
from fourwave.quantize import QuantizedTensor, quantize

__version__ = "0.1.0.dev0"
__all__ = [
    "BackendUnavailable", "QuantizedTensor", "__version__", "explain", "explain_grouped", "gemm", "grouped_gemm",
    "grouped_gemm_wgrad", "preshuffle", "quantize", "use_backend",
]  # fmt: skip
