"""general_gemm and general_grouped_gemm. Layouts are column-major BLAS's, as in Transformer Engine: the row-major result is
op(B) @ op(A).

TN  out = B @ A.T    fprop, A the weight, B the input
NN  out = B @ A      dgrad, A the weight, B the gradient of the output
NT  out = B.T @ A    wgrad, A the input, B the gradient of the output
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fourwave.ops.gemm.api import gemm as _gemm
from fourwave.ops.gemm.operators import _activation_backward
from fourwave.quantize import QuantizedTensor

Tensor = torch.Tensor
Operand = Tensor | QuantizedTensor

_LAYOUTS = {"TN": (False, True), "NN": (False, False), "NT": (True, False)}


def general_gemm(
    A: Operand,
    B: Operand,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(out, bias gradient, gelu input, None).

    A, B    tensors or QuantizedTensors, with codes along the reduction
    gelu    forward: out = gelu(z), tanh form, and z is returned; with grad: out is multiplied with the gelu's slope at gelu_in
    accumulate  add to out; beta must be 1 (or None) then, and 0 (or None) otherwise
    bias    forward: added. With grad and layout NT: its dtype is that of the bias gradient, the sum of B over its rows
    """
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout {layout!r}: the layouts are {', '.join(_LAYOUTS)}")
    if quantization_params is not None or ub is not None or extra_output is not None or bulk_overlap:
        raise NotImplementedError("quantization_params, ub, extra_output and bulk_overlap are not here")
    if beta is not None and beta != float(accumulate):
        raise NotImplementedError(f"beta={beta} with accumulate={accumulate}: out is kept (1) or replaced (0)")
    trans_a, trans_b = _LAYOUTS[layout]
    options: dict[str, Any] = {
        "trans_a": trans_a, "trans_b": trans_b, "alpha": alpha, "out": out, "accumulate": accumulate,
        "fast_accum": not use_split_accumulator and isinstance(A, QuantizedTensor),
    }  # fmt: skip
    if out is None:
        options["out_dtype"] = out_dtype
    with torch.no_grad():
        if not grad:
            z = _preactivation(A, B, trans_b, out_dtype, gelu_in, out) if gelu else None
            y = _gemm(B, A, bias=bias, activation="gelu_tanh" if gelu else None, preactivation=z, **options)
            return y, None, z, None
        if gelu:
            if gelu_in is None or accumulate or out is not None:
                raise NotImplementedError("gelu with grad needs gelu_in, and neither out nor accumulate")
            dh = _gemm(B, A, **{**options, "out_dtype": torch.float32})
            dtype = out_dtype or gelu_in.dtype
            return _activation_backward(gelu_in.float(), dh, "gelu_tanh").to(dtype), None, None, None
        if bias is None or layout != "NT":
            return _gemm(B, A, **options), None, None, None
        if isinstance(B, QuantizedTensor) and (seed := B.hadamard("columnwise")) is not None:
            raise ValueError(
                f"the bias gradient sums B's values, which went through a random Hadamard transform (hadamard_seed={seed}): leave "
                "bias away and sum the tensor that B was quantized from"
            )
        bias_grad = torch.zeros(B.shape[-1], dtype=bias.dtype, device=B.device)
        return _gemm(B, A, bias_grad=bias_grad, **options), bias_grad, None, None


def _preactivation(
    A: Operand, B: Operand, trans_b: bool, out_dtype: torch.dtype | None, gelu_in: Tensor | None, out: Tensor | None
) -> Tensor:
    if gelu_in is not None:
        return gelu_in
    plain = [t.dtype for t in (B, A) if isinstance(t, Tensor)]
    dtype = out_dtype or (out.dtype if out is not None else plain[0] if plain else torch.bfloat16)
    return torch.empty((*B.shape[:-1], A.shape[0 if trans_b else 1]), dtype=dtype, device=B.device)


def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: Sequence[Tensor | None],
    quantization_params: Sequence[Any] | None,
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> tuple[Any, list[Tensor | None], list[Tensor | None]]:
    """(results, biases or their gradients, gelu inputs): general_gemm of each pair.

    out     what the results are written into, one tensor for each pair, or None where a new one is wanted; with single_output a
            list of one, whose rows are those of all pairs (m_splits)
    bias    with use_bias: added; with grad, it says the dtypes of the bias gradients (default: those of the results)
    """
    if any(each is not None for each in quantization_params or []):
        raise NotImplementedError("quantization_params: outputs are not quantized here")
    if D_dtype is not None:
        raise NotImplementedError(f"D_dtype={D_dtype}: results have the type of out, or out_dtype where there is none")
    if len(A) != len(B):
        raise ValueError(f"{len(A)} matrices A and {len(B)} B")
    if use_bias and bias is None and not grad:
        raise ValueError("use_bias=True and bias is None: give one bias for each pair")
    if accumulate and any(each is None for each in out):
        raise ValueError("accumulate=True and an output is None: there is nothing to add to")
    whole = None
    if single_output:
        if m_splits is None:
            raise ValueError("single_output needs m_splits")
        if layout == "NT":
            raise ValueError(
                "single_output with layout NT: the rows of the results are no rows of the input; give one output for each"
            )
        rows = [int(m) for m in m_splits]
        if len(out) != 1:
            raise ValueError(f"single_output with {len(out)} outputs: out is a list of one")
        whole = out[0]
        if whole is None:
            if not A:
                raise ValueError("single_output of no pairs: give out, whose shape nothing else says")
            columns = A[0].shape[0 if layout == "TN" else 1]
            whole = torch.empty(sum(rows), columns, dtype=out_dtype, device=B[0].device)
        if sum(rows) != len(whole) or min(rows, default=0) < 0:
            raise ValueError(
                f"m_splits is {rows}; it must be integers from 0 on that sum to the {len(whole)} rows of out"
            )
        parts = list(whole.split(rows))
    else:
        parts = list(out)
    if len(parts) != len(A):
        raise ValueError(f"{len(A)} pairs of matrices and {len(parts)} outputs")
    results: list[Tensor] = []
    biases: list[Tensor | None] = []
    inputs: list[Tensor | None] = []
    for i, (a, b, part) in enumerate(zip(A, B, parts, strict=True)):
        given = None
        if use_bias:
            like = out_dtype if part is None else part.dtype
            given = bias[i] if bias is not None else torch.empty(0, dtype=like, device=a.device)
        result, bias_grad, gelu_input, _ = general_gemm(
            a, b, None if part is not None else out_dtype, gelu=gelu, accumulate=accumulate, layout=layout, out=part, bias=given,
            use_split_accumulator=use_split_accumulator, grad=grad,
        )  # fmt: skip
        results.append(result)
        biases.append(bias_grad if grad else given)
        inputs.append(gelu_input)
    return (whole if single_output else results), biases, inputs
