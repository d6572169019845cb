"""Launches the Hopper quantization kernels: prepares x, compiles once per specialisation, calls with little host work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.backends.cutedsl_call import PackedCall
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors

ALIGN_BYTES = 16  # of x's rows and their starts, to be loaded in chunks of 16 bytes
LINE = 8  # elements of a row, or a column, that a thread has
TILE = 128
MAX_SIDE = 2**31 - 2 * TILE  # row and column numbers are 32-bit
MAX_TILES = 2**31 - 1  # CTAs of a grid


@dataclass(frozen=True)
class QuantizeSpec:
    """Everything that is fixed when a kernel is compiled. code None: amax only. The fields are those of sm90.Quantize."""

    x_dtype: str
    code: str | None
    scaling: str
    rule: str
    rowwise: bool
    columnwise: bool
    transposed: bool
    given: bool
    whole_chunks: bool
    whole_rows: bool


_compiled: dict[QuantizeSpec, PackedCall] = {}

# The launcher's run-time arguments (sm90.Quantize.__call__), in its order, with their formats.
_ARGUMENTS = {
    "x": "Q", "x_stride": "q", "data": "Q", "scale": "Q", "columnwise_data": "Q", "columnwise_scale": "Q", "row_amax": "Q",
    "column_amax": "Q", "R": "i", "C": "i", "stream": "Q",
}  # fmt: skip


def why_unsupported(problem: QuantizeProblem) -> str | None:
    """Why the kernels cannot quantize `problem`, or None. The only rule: backend and launcher ask it."""
    if problem.fnuz:
        return "fnuz codes are those of gfx942; there are kernels for OCP's"
    if problem.stochastic or problem.row_signs is not None or problem.column_signs is not None:
        return "stochastic rounding and Hadamard transforms are not in the kernels"
    if max(problem.rows, problem.columns) > MAX_SIDE:
        return f"{problem.rows} x {problem.columns}; the kernels take sides up to {MAX_SIDE}"
    if (tiles := -(-problem.rows // TILE) * -(-problem.columns // TILE)) > MAX_TILES:
        return f"{tiles} tiles of 128 x 128; a launch has at most {MAX_TILES}"
    return None


def run(
    problem: QuantizeProblem, x: torch.Tensor, scale: torch.Tensor | None = None, outputs: QuantizeTensors | None = None
) -> tuple[QuantizeTensors, list[str]]:
    """What problem.outputs() lists, and notes, such as that x had to be copied.

    x is [rows, columns] with at least one element and any strides, on the current device. outputs: contiguous tensors to
    write, new ones if None. Raises NotImplementedError (why_unsupported); RuntimeError where a kernel would have to be
    compiled while a CUDA graph is captured.
    """
    if (reason := why_unsupported(problem)) is not None:
        raise NotImplementedError(reason)
    notes: list[str] = []
    x = _readable(x, notes)
    out = problem.allocate(x) if outputs is None else outputs
    outer = x.stride(0) if problem.rows > 1 else problem.columns  # the stride of a single row says nothing
    stride_bytes = outer * x.element_size()
    whole_chunks = (x.data_ptr() | stride_bytes) % ALIGN_BYTES == 0 and problem.columns % LINE == 0
    whole_rows = problem.rows % LINE == 0 or not problem.transposed  # matters to transposed codes only
    x_dtype = str(problem.x_dtype).removeprefix("torch.")
    scaling = problem.quant_format.scaling
    row_scale = scale if problem.given_scale else out.scale
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    row_amax: torch.Tensor | None = None
    column_amax: torch.Tensor | None = None
    if scaling == "tensor":
        row_amax = out.amax
        assert row_amax is not None
        row_amax.zero_()
    elif scaling == "row":
        lines = problem.rows * problem.rowwise + problem.columns * problem.columnwise
        row_amax = x.new_zeros(lines, dtype=torch.int32)
        column_amax = row_amax[problem.rows * problem.rowwise :]

    def launch(spec: QuantizeSpec, *tensors: torch.Tensor | None) -> None:
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        _kernel(spec).launch(x.data_ptr(), stride_bytes, *addresses, problem.rows, problem.columns, stream)

    if scaling == "row" or (scaling == "tensor" and not problem.given_scale):
        lines_of = (problem.rowwise, problem.columnwise) if scaling == "row" else (True, False)
        amax_spec = QuantizeSpec(x_dtype, None, scaling, "", *lines_of, False, False, whole_chunks, True)
        launch(amax_spec, None, None, None, None, row_amax, column_amax)
    spec = QuantizeSpec(
        x_dtype, problem.code_format.name, scaling, "" if problem.given_scale else problem.scale_rule, problem.rowwise,
        problem.columnwise, problem.transposed, problem.given_scale, whole_chunks, whole_rows,
    )  # fmt: skip
    launch(spec, out.data, row_scale, out.columnwise_data, out.columnwise_scale, row_amax, column_amax)
    return out, notes


def _readable(x: torch.Tensor, notes: list[str]) -> torch.Tensor:
    """x, or a contiguous copy where the kernel cannot read it as it lies."""
    if x.is_neg():
        notes.append("x copied: it is a negated view")
        return x.resolve_neg().contiguous()
    if x.shape[1] > 1 and x.stride(1) != 1:
        notes.append("x copied: inner stride is not 1")
        return x.contiguous()
    return x


def _kernel(spec: QuantizeSpec) -> PackedCall:
    return cutedsl_cache.kernel(
        _compiled, spec, compile_kernel, lambda function: PackedCall(function.to(None), _ARGUMENTS)
    )


def compile_kernel(spec: QuantizeSpec, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU.

    keep: with the PTX and the cubin, for inspection; CuTe DSL also writes them into the working directory.
    """
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64, cute

    from fourwave import formats
    from fourwave.blocks.cutedsl.convert import Codes, Scales
    from fourwave.quantize.sm90 import Quantize

    fmt = None if spec.code is None else formats.get(spec.code)
    # In pairs where both directions are wanted: rowwise alone that was slower (docs/quantize.md).
    halves = spec.x_dtype != "float32" and spec.rowwise and spec.columnwise
    codes = None if fmt is None else Codes(fmt, halves)
    kernel = Quantize(
        spec.x_dtype, codes, Scales(fmt, spec.rule) if fmt and spec.rule else None, spec.scaling,
        spec.rowwise, spec.columnwise, spec.transposed, spec.given, spec.whole_chunks, spec.whole_rows,
    )  # fmt: skip
    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    address, size = Int64(ALIGN_BYTES), Int32(1)
    return cute.compile[tuple(options)](
        kernel, address, address, address, address, address, address, address, address, size, size, cuda.CUstream(0)
    )  # fmt: skip


# -- of what is made on the way (sm90_moe.py)


@dataclass(frozen=True)
class QuantizeFromSpec:
    """Everything that is fixed when a kernel is compiled. The fields are those of sm90_moe.QuantizeFrom."""

    source: str
    x_dtype: str
    code: str
    scaling: str
    rule: str
    whole_chunks: bool


_compiled_from: dict[QuantizeFromSpec, PackedCall] = {}
_FROM_ARGUMENTS = {
    "x": "Q", "x_stride": "q", "rows": "Q", "data": "Q", "scale": "Q", "R": "i", "C": "i", "stream": "Q",
}  # fmt: skip


def run_from(
    source: str, problem: QuantizeProblem, x: torch.Tensor, rows: torch.Tensor | None = None
) -> QuantizeTensors:
    """What problem.outputs() lists, of x[rows] ("rows"), or of SwiGLU of x, which has 2 * columns ("swiglu"). `problem` is the result's,
    rowwise, with scales of blocks, and has at least one element; x is on the current device."""
    if (reason := why_unsupported(problem)) is not None:
        raise NotImplementedError(reason)
    x = _readable(x, [])
    out = problem.allocate(x)
    assert out.data is not None and out.scale is not None
    stride_bytes = (x.stride(0) if x.shape[0] > 1 else x.shape[1]) * x.element_size()
    spec = QuantizeFromSpec(
        source, str(problem.x_dtype).removeprefix("torch."), problem.code_format.name, problem.quant_format.scaling,
        problem.scale_rule, (x.data_ptr() | stride_bytes) % ALIGN_BYTES == 0 and problem.columns % LINE == 0,
    )  # fmt: skip
    kernel = cutedsl_cache.kernel(
        _compiled_from, spec, compile_from, lambda function: PackedCall(function.to(None), _FROM_ARGUMENTS)
    )
    rows = None if rows is None else rows.contiguous()
    kernel.launch(
        x.data_ptr(), stride_bytes, 0 if rows is None else rows.data_ptr(), out.data.data_ptr(), out.scale.data_ptr(),
        problem.rows, problem.columns, torch._C._cuda_getCurrentRawStream(x.device.index),
    )  # fmt: skip
    return out


def compile_from(spec: QuantizeFromSpec, *, keep: bool = False) -> Any:
    """As compile_kernel."""
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64, cute

    from fourwave import formats
    from fourwave.blocks.cutedsl.convert import Codes, Scales
    from fourwave.quantize.sm90_moe import QuantizeFrom

    fmt = formats.get(spec.code)
    kernel = QuantizeFrom(
        spec.x_dtype, Codes(fmt, False), Scales(fmt, spec.rule), spec.scaling, True, False, False, False, spec.whole_chunks, True,
        spec.source,
    )  # fmt: skip
    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    address, size = Int64(ALIGN_BYTES), Int32(1)
    return cute.compile[tuple(options)](
        kernel, address, address, address, address, address, size, size, cuda.CUstream(0)
    )  # fmt: skip
