"""Which products go to the Hopper GEMM kernels where the caller names no backend: those that were measured beside PyTorch's."""

from __future__ import annotations

import torch

from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem
from fourwave.ops.gemm.sm90_config import PACKED_ROWS, more_outputs

MEASURED_EXTENT = 3584  # least extent of the products that were timed; with few rows of all but M
MEASURED_ROWS = 64  # at most, with few rows
_MEASURED_MX = (
    (torch.float8_e4m3fn, "1x32", "1x32", torch.float8_e4m3fn), (PACKED_E2M1, "1x32", "1x32", PACKED_E2M1),
    (torch.bfloat16, None, "1x32", PACKED_E2M1),
)  # fmt: skip
_MEASURED_GRADIENT = torch.float8_e5m2, "tensor", "tensor", torch.float8_e4m3fn


def why_not_automatic(problem: GemmProblem) -> str | None:
    """Why automatic choice leaves a problem that this kernel can do to PyTorch, or None.

    It takes classes of which at least five shapes were timed beside cuBLAS on an H200, and whose records (docs/hopper.md) have no
    more than one shape in eighty below 0.96 of it (of MX: of what PyTorch takes to dequantize and multiply): no epilogue, bfloat16
    out.
    """
    least = MEASURED_EXTENT
    large = min(problem.M, problem.N, problem.K) >= least
    few = problem.layout == "TN" and problem.M <= MEASURED_ROWS and min(problem.N, problem.K) >= least
    scalings = problem.a_scaling, problem.b_scaling
    if problem.a_dtype == problem.b_dtype == torch.bfloat16:
        measured = large or few
    elif (problem.a_dtype, *scalings, problem.b_dtype) in _MEASURED_MX:
        # Weights that few rows convert in registers leave bfloat16's range at scales past 2^25 or 2^31: only when asked for.
        measured = problem.layout == "TN" and min(problem.N, problem.K) >= least
        measured = measured and (problem.M > PACKED_ROWS or problem.b_preshuffled)
    elif (problem.a_dtype, *scalings, problem.b_dtype) == _MEASURED_GRADIENT:
        measured = large and not problem.fast_accum
    elif problem.a_dtype == problem.b_dtype == torch.float8_e4m3fn:
        fast = problem.fast_accum and scalings == ("tensor", "tensor") and (large or few)
        measured = fast or (large and (not problem.fast_accum, *scalings) == (True, "row", "row"))
        measured = measured or (large and scalings == ("1x128", "128x128"))
    else:
        measured = False
    plain = problem.bias_dtype is None and problem.activation is None and not problem.accumulate
    plain = plain and not more_outputs(problem)
    if not (measured and plain and problem.out_dtype == torch.bfloat16):
        return "not among what was measured to be as fast as cuBLAS (docs/hopper.md); it runs when asked for"
    lengths = {
        "a": (problem.a_shape[1], problem.a_dtype), "b": (problem.b_shape[1], problem.b_dtype),
        "out": (problem.N, problem.out_dtype),
    }  # fmt: skip
    for name, (length, dtype) in lengths.items():
        if length * dtype.itemsize % 16:
            return f"rows of {name} have {length * dtype.itemsize} bytes: where 16 do not divide that, the kernel works on a copy"
    return None
