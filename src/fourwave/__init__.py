"""Low-precision GEMM for PyTorch.

gemm(a, b, ...)     out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out)
quantize(x, format, direction)   QuantizedTensor: codes and scales of x, which gemm takes
explain(a, b, ...)  which backend, kernel and config that would use, and why not another
use_backend(name)   choose the backend of later calls, or of a `with` block
"""

from fourwave.backends.select import use_backend
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.api import explain, gemm
from fourwave.quantize import QuantizedTensor, quantize

__version__ = "0.1.0.dev0"
__all__ = ["BackendUnavailable", "QuantizedTensor", "__version__", "explain", "gemm", "quantize", "use_backend"]
