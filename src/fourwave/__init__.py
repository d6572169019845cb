"""Low-precision GEMM for PyTorch."""

from fourwave.errors import BackendUnavailable

__version__ = "0.1.0.dev0"
__all__ = ["BackendUnavailable", "__version__"]
