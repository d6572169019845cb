"""High precision to codes and scales: `quantize` and what it returns. docs/quantize.md defines the numbers."""

from fourwave.quantize.api import explain_quantize, quantize
from fourwave.quantize.tensor import FORMATS, QuantFormat, QuantizedTensor

__all__ = ["FORMATS", "QuantFormat", "QuantizedTensor", "explain_quantize", "quantize"]
