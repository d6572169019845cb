"""Launches the FlyDSL GEMM kernels: prepares operands, compiles once per specialisation, calls."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave import formats
from fourwave.backends import guard
from fourwave.ops.gemm.check import packed
from fourwave.ops.gemm.config import (
    MAX_TILE_BYTES,
    GemmConfig,
    brings_scales,
    default_config,
    dequantizes,
    in_halves,
    why_unsupported,
    workspace_shape,
)
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1, SWIGLU, GemmProblem, GemmTensors

_CODE_FORMATS = {fmt.torch_dtype: fmt for fmt in (formats.E4M3FN, formats.E5M2, formats.E4M3FNUZ, formats.E5M2FNUZ)}
ALIGN_BYTES = 16  # of bases and rows: global memory is read in chunks of 16 bytes


@dataclass(frozen=True)
class Specialisation:
    """Everything that is fixed when a kernel is compiled. Sizes, strides, pointers and alpha are run-time values."""

    arch: str
    config: GemmConfig
    problem: GemmProblem  # without what the kernel is not compiled for: sizes are 0
    vectorised: bool  # epilogue.Epilogue


@functools.lru_cache(maxsize=4096)
def specialise(problem: GemmProblem, config: GemmConfig, arch: str, vectorised: bool = True) -> Specialisation:
    kind = replace(problem, M=0, N=0, K=0, device_type="cuda", batch_invariant=False, fast_accum=False)
    return Specialisation(arch, config, kind, vectorised)


def build_launcher(spec: Specialisation):
    """The FlyDSL JIT function of a specialisation (cdna.launcher)."""
    guard.import_flydsl()
    from flydsl import expr as fx

    from fourwave.blocks.flydsl.epilogue import Epilogue
    from fourwave.blocks.flydsl.mma import FORMATS

    problem = spec.problem
    types = {torch.float32: fx.Float32, torch.bfloat16: fx.BFloat16, torch.float16: fx.Float16, None: None}
    types |= dict.fromkeys(FLOAT8, fx.Uint8)
    a, b = (str(dtype).removeprefix("torch.") for dtype in (problem.a_dtype, problem.b_dtype))
    epilogue = Epilogue(
        spec.arch,
        types[problem.out_dtype],
        types[problem.bias_dtype],
        problem.activation,
        problem.accumulate,
        problem.a_scaling,
        problem.b_scaling,
        types[problem.preactivation_dtype],
        types[problem.bias_grad_dtype],
        problem.out_scaling,
        problem.out_direction,
        problem.out_scale_rule,
        None if problem.out_scaling is None else _CODE_FORMATS[problem.out_dtype],
        spec.vectorised,
    )
    if spec.arch == "gfx1250":
        from fourwave.ops.gemm import gfx1250

        return gfx1250.build(spec, epilogue)
    if in_halves(spec.config, spec.problem.a_dtype.itemsize, spec.arch):
        from fourwave.ops.gemm.cdna4_halves import build
    elif spec.arch == "gfx950":
        from fourwave.ops.gemm.cdna4 import build
    else:
        from fourwave.ops.gemm.cdna3 import build
    if dequantizes(problem, spec.arch):
        a = b = "bfloat16"
    return build(spec, FORMATS[a, b], epilogue)


def placeholder_arguments(spec: Specialisation):
    """Arguments to compile with where nothing is launched; sizes do not matter."""
    problem = replace(
        spec.problem, M=8, N=16 if spec.problem.b_preshuffled else 8, K=64 if spec.problem.b_preshuffled else 8
    )

    def zeros(shape, dtype):
        return None if shape is None or dtype is None else torch.zeros(shape, dtype=dtype)

    scale_dtype = {None: None, "1x32": torch.uint8}
    tensors = GemmTensors(
        torch.zeros(problem.a_shape).to(problem.a_dtype),
        torch.zeros(problem.b_shape).to(problem.b_dtype),
        torch.zeros(8, 8).to(problem.out_dtype),
        zeros(8, problem.bias_dtype),
        1.0,
        zeros(problem.a_scale_shape, scale_dtype.get(problem.a_scaling, torch.float32)),
        zeros(problem.b_scale_shape, scale_dtype.get(problem.b_scaling, torch.float32)),
        zeros((8, 8), problem.preactivation_dtype),
        zeros(8, problem.bias_grad_dtype),
        zeros(() if problem.out_scaling == "tensor" else (8, 1), scale_dtype.get(problem.out_scaling, torch.float32)),
        zeros((), torch.float32 if problem.out_scaling == "tensor" else None),
        zeros((8, 8), torch.uint8 if problem.out_scaling == "1x32" else None),
        zeros((1, 8), torch.uint8 if problem.out_scaling == "1x32" else None),
    )
    workspace = None if spec.config.split_k == 1 else torch.zeros(1, 1024, dtype=torch.float32)
    return _jit_arguments(*_arguments(problem, tensors, workspace), None)


def _arguments(problem: GemmProblem, tensors: GemmTensors, workspace: torch.Tensor | None) -> tuple[Any, ...]:
    """Arguments of cdna.launcher but for the stream. What is None becomes a placeholder: a row of what is written."""
    unused = _bytes(tensors.out if tensors.out is not None else tensors.out_columnwise)[0]
    given = [tensors.a, tensors.b, tensors.out, tensors.bias, *tensors[5:], workspace]
    kernel_tensors = [unused if tensor is None else _bytes(tensor) for tensor in given]
    return (*kernel_tensors, problem.M, problem.N, problem.K, float(tensors.alpha))


def _bytes(tensor):
    """tensor as FlyDSL takes it: 8-bit types as bytes, a scalar as one element."""
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _jit_arguments(*arguments):
    """Arguments for tracing: every extent and row stride is a run-time value, the inner stride is 1."""
    import flydsl.compiler as flyc

    def dynamic(tensor):
        return flyc.from_torch_tensor(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)

    return [dynamic(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]


_compiled: dict = {}  # (Specialisation, target) -> FlyDSL CompiledFunction
_lock = threading.Lock()  # FlyDSL traces one function at a time


def run(
    problem: GemmProblem,
    config: GemmConfig | None,
    arch: str,
    tensors: GemmTensors,
) -> list[str]:
    """out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out) by the FlyDSL kernel for arch.

    Nothing outside tensors.out is written, which may be a strided view. Tensors are on a GPU of that arch, or on the CPU inside a fourwave.sim session of that arch; the caller has made
    sure of it. Returns notes, such as which operand had to be copied. Raises NotImplementedError (why_unsupported).
    """
    if (reason := why_unsupported(problem, config, arch)) is not None:
        raise NotImplementedError(reason)
    if problem.M == 0 or problem.N == 0:
        return []
    assert tensors.out is not None or tensors.out_columnwise is not None
    if config is None:
        config, _ = default_config(problem, arch)
    notes: list[str] = []
    if _halves_copied(problem):
        notes.append(_HALVES_COPIED)
        tensors = tensors._replace(b=_whole_chunks(tensors.b))
        if problem.b_scaling == "1x32":
            assert tensors.b_scale is not None
            tensors = tensors._replace(b_scale=_whole_chunks(tensors.b_scale))
    if problem.b_preshuffled and (not tensors.b.is_contiguous() or tensors.b.data_ptr() % ALIGN_BYTES):
        notes.append(_SHUFFLED_COPIED)
        tensors = tensors._replace(b=tensors.b.clone(memory_format=torch.contiguous_format))
    bias = tensors.bias
    operands = {
        name: _readable(name, tensor, rows, notes, arch)
        for name, tensor, rows in _read_in_chunks(problem, config, arch, tensors)
    }
    targets = {name: _writable(getattr(tensors, name), config.tile_m) for name in _written(tensors)}
    for name, target in targets.items():
        if target is None:
            notes.append(_written_through_a_copy(name))
            targets[name] = getattr(tensors, name).clone(memory_format=torch.contiguous_format)
    vectorised = _vectorised(problem, targets.values())
    if bias is not None:
        bias = packed(bias)
        if bias.data_ptr() % ALIGN_BYTES and vectorised:
            bias = bias.clone()
            notes.append(_BIAS_COPIED)
    if tensors.out_amax is not None:
        tensors.out_amax.zero_()  # the kernel's workgroups take the maximum with what is there
    if tensors.bias_grad is not None:
        targets["bias_grad"] = packed(tensors.bias_grad)
    prepared = tensors._replace(**operands, bias=bias, **targets)
    workspace = None
    if config.split_k > 1:
        workspace = torch.empty(workspace_shape(problem, config), dtype=torch.float32, device=tensors.a.device)
    _launch(specialise(problem, config, arch, vectorised), _arguments(problem, prepared, workspace))
    for name, target in targets.items():
        written = getattr(tensors, name)
        if target.data_ptr() != written.data_ptr():
            written.copy_(target)
    return notes


_SHUFFLED_COPIED = "b copied: preshuffled weights are read from contiguous, 16-byte aligned memory"
_HALVES_COPIED = "b copied: the halves of its rows are not whole chunks of 16 bytes"


def _halves_copied(problem):
    """Whether the second half of b's rows does not begin at a chunk."""
    return (
        problem.activation == SWIGLU
        and problem.layout != "TN"
        and problem.N // (4 if problem.b_dtype == PACKED_E2M1 else 2) * problem.b_dtype.itemsize % ALIGN_BYTES != 0
    )


def _whole_chunks(b):
    """b [K, N], or its scales [K / 32, N], with both halves of its rows padded with zeros to whole chunks."""
    rows, half = b.shape[0], b.shape[1] // 2
    chunk = ALIGN_BYTES // b.element_size()
    padded = torch.zeros((rows, 2, -(-half // chunk) * chunk), dtype=torch.uint8, device=b.device)
    if b.element_size() > 1:
        padded = padded.to(b.dtype)
    else:
        padded = padded.view(b.dtype)
    padded[:, :, :half].copy_(b.reshape(rows, 2, half))
    return padded.view(rows, -1)


_BIAS_COPIED = "bias copied: not 16-byte aligned"


def _written(tensors: GemmTensors) -> list[str]:
    """Names of the matrices that are written."""
    return [name for name in ("out", "preactivation", "out_columnwise") if getattr(tensors, name) is not None]


def _written_through_a_copy(name: str) -> str:
    return f"{name} written through a copy: its inner stride is not 1 or its row stride is beyond the limit"


def _vectorised(problem, targets):
    """Whether whole chunks are stored: every row starts at a multiple of 16 bytes and is whole chunks of 16-bit elements."""
    return problem.N % 8 == 0 and problem.out_columns % 8 == 0 and all(_aligned(target) for target in targets)


def copies(
    problem: GemmProblem,
    config: GemmConfig,
    arch: str,
    tensors: GemmTensors,
) -> list[str]:
    """The notes that `run` would return for the same arguments; out None: a new, contiguous one. Nothing is copied."""
    notes = []
    if _halves_copied(problem):
        notes.append(_HALVES_COPIED)
        tensors = tensors._replace(b=_whole_chunks(tensors.b.to("meta")))
        if problem.b_scaling == "1x32":
            assert tensors.b_scale is not None
            tensors = tensors._replace(b_scale=_whole_chunks(tensors.b_scale.to("meta")))
    if problem.b_preshuffled and (not tensors.b.is_contiguous() or tensors.b.data_ptr() % ALIGN_BYTES):
        notes.append(_SHUFFLED_COPIED)
        tensors = tensors._replace(b=torch.empty_like(tensors.b, memory_format=torch.contiguous_format))
    for name, tensor, rows in _read_in_chunks(problem, config, arch, tensors):
        if (reason := _why_copied(_plain_strides(tensor), rows, arch)) is not None:
            notes.append(f"{name} copied: {reason}")
    targets = {name: _writable(getattr(tensors, name), config.tile_m) for name in _written(tensors)}
    notes += [_written_through_a_copy(name) for name, target in targets.items() if target is None]
    # N % 8 aligns the rows of a new tensor.
    vectorised = _vectorised(problem, [target for target in targets.values() if target is not None])
    if tensors.bias is not None and vectorised and tensors.bias.data_ptr() % ALIGN_BYTES:
        notes.append(_BIAS_COPIED)
    return notes


def _read_in_chunks(problem, config, arch, tensors):
    """(name, tensor, rows in memory of a tile) of what the kernel reads in chunks of 16 bytes."""
    rows_a = config.tile_k if problem.layout == "NT" else config.tile_m
    rows_b = config.tile_k
    if problem.layout == "TN":
        rows_b = config.tile_n + (problem.N // 2 if problem.activation == SWIGLU else 0)  # of both halves
    read = [("a", tensors.a, rows_a), ("b", tensors.b, rows_b)]
    if "1x32" in (problem.a_scaling, problem.b_scaling) or brings_scales(problem, arch):
        scales = ((name, getattr(tensors, name)) for name in ("a_scale", "b_scale"))
        scales = (
            (name, scale.view(torch.uint8) if scale is not None and scale.element_size() == 1 else scale)
            for name, scale in scales
        )
        read += [
            (name, scale, rows)
            for (name, scale), rows in zip(scales, (rows_a, rows_b), strict=True)
            if scale is not None
        ]
    if problem.K > 0:
        return read
    # No element is read; they only need an address.
    empty = torch.zeros((1, ALIGN_BYTES), dtype=torch.uint8, device=tensors.a.device)
    return [(name, empty.view(tensor.dtype), rows) for name, tensor, rows in read]


def _launch(spec, arguments):
    tensor = arguments[0]
    if tensor.device.type != "cuda":
        _call(spec, _session_key(), (*arguments, None))
        return
    with torch.cuda.device(tensor.device):
        _call(spec, ("cuda", tensor.device.index), (*arguments, torch.cuda.current_stream()))


def _session_key():
    from fourwave import sim

    session = sim.active_session()
    if session is None:
        raise RuntimeError("CPU tensors need an open fourwave.sim session")
    return ("sim", session.key)


def _call(spec, target, arguments):
    compiled = _compiled.get((spec, target))
    if compiled is not None:
        compiled(*arguments)
        return
    with _lock:
        compiled = _compiled.get((spec, target))
        if compiled is None:
            launcher = build_launcher(spec)
            import flydsl.compiler as flyc

            # compile() also launches, since the arguments are live.
            _compiled[spec, target] = flyc.compile(launcher, *_jit_arguments(*arguments))
            return
    compiled(*arguments)


def _rows_aligned(tensor):
    return tensor.stride(0) * tensor.element_size() % ALIGN_BYTES == 0


def _aligned(tensor):
    """Whether rows start where whole chunks can be stored; codes are stored by eight."""
    align = ALIGN_BYTES if tensor.element_size() > 1 else 8
    return tensor.data_ptr() % align == 0 and tensor.stride(0) * tensor.element_size() % align == 0


def _plain_strides(tensor):
    """The same 2-D tensor with the strides of dims of size 1, which PyTorch leaves arbitrary, made ordinary."""
    rows, columns = tensor.shape
    inner = tensor.stride(1) if columns > 1 else 1
    chunk = ALIGN_BYTES // tensor.element_size()
    outer = tensor.stride(0) if rows > 1 else -(-columns // chunk) * chunk
    if (outer, inner) == tensor.stride():
        return tensor
    return tensor.as_strided((rows, columns), (outer, inner))


def _why_copied(tensor, tile_rows, arch):
    """Why the kernel cannot read an operand with plain strides where it lies, or None."""
    chunk = ALIGN_BYTES // tensor.element_size()
    columns = tensor.shape[1]
    if tensor.stride(1) != 1:
        return "inner stride is not 1"
    if tensor.data_ptr() % ALIGN_BYTES:
        return "base not 16-byte aligned"
    if not _rows_aligned(tensor):
        return "row stride not 16-byte aligned"
    if columns % chunk and arch != "gfx1250":  # whose data mover ends at any element
        return f"row length {columns} is not a multiple of {chunk}"
    if tile_rows * tensor.stride(0) * tensor.element_size() >= MAX_TILE_BYTES:
        return f"row stride {tensor.stride(0)} is beyond the limit"
    return None


def _readable(name, tensor, tile_rows, notes, arch):
    """tensor, or an aligned copy of it whose rows are padded with zeros to whole chunks."""
    tensor = _plain_strides(tensor)
    reason = _why_copied(tensor, tile_rows, arch)
    if reason is None:
        return tensor
    notes.append(f"{name} copied: {reason}")
    chunk = ALIGN_BYTES // tensor.element_size()
    rows, columns = tensor.shape
    padded = torch.zeros((rows, -(-columns // chunk) * chunk), dtype=tensor.dtype, device=tensor.device)
    padded[:, :columns].copy_(tensor)
    return padded


def _writable(out, tile_m):
    """out with plain strides, or None if the kernel cannot address it."""
    out = _plain_strides(out)
    if out.stride(1) != 1 or tile_m * out.stride(0) * out.element_size() >= MAX_TILE_BYTES:
        return None
    return out
