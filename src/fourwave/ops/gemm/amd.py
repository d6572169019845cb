"""Launches the FlyDSL GEMM kernels: prepares operands, compiles once per specialisation, calls."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from fourwave.backends import guard
from fourwave.ops.gemm.config import MAX_TILE_BYTES, GemmConfig, default_config, operand_tiles, why_unsupported
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

ALIGN_BYTES = 16  # of bases and rows: global memory is read in chunks of 16 bytes


@dataclass(frozen=True)
class Specialisation:
    """Everything that is fixed when a kernel is compiled. Sizes, strides, pointers and alpha are run-time values."""

    arch: str
    config: GemmConfig
    layout: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    activation: str | None
    accumulate: bool
    vectorised: bool  # epilogue.Epilogue


def specialise(problem: GemmProblem, config: GemmConfig, arch: str, vectorised: bool = True) -> Specialisation:
    return Specialisation(
        arch, config, problem.layout, problem.a_dtype, problem.b_dtype, problem.out_dtype, problem.bias_dtype,
        problem.activation, problem.accumulate, vectorised,
    )  # fmt: skip


def build_launcher(spec: Specialisation):
    """The FlyDSL JIT function of a specialisation: (a, b, out, bias, M, N, K, alpha, stream)."""
    guard.import_flydsl()
    from flydsl import expr as fx

    from fourwave.blocks.flydsl.epilogue import Epilogue
    from fourwave.blocks.flydsl.mma import FORMATS

    if spec.arch == "gfx950":
        from fourwave.ops.gemm.cdna4 import build
    else:
        from fourwave.ops.gemm.cdna3 import build

    types = {torch.float32: fx.Float32, torch.bfloat16: fx.BFloat16, torch.float16: fx.Float16, None: None}
    a, b = (str(dtype).removeprefix("torch.") for dtype in (spec.a_dtype, spec.b_dtype))
    epilogue = Epilogue(
        types[spec.out_dtype], types[spec.bias_dtype], spec.activation, spec.accumulate, spec.vectorised
    )
    return build(spec.config, spec.layout, FORMATS[a, b], epilogue)


def placeholder_arguments(spec: Specialisation):
    """Arguments to compile with where nothing is launched; sizes do not matter."""
    shape = (8, 8)
    a = torch.zeros(shape, dtype=torch.uint8 if spec.a_dtype.itemsize == 1 else spec.a_dtype)
    out = torch.zeros(shape, dtype=spec.out_dtype)
    bias = torch.zeros(8, dtype=spec.bias_dtype or spec.out_dtype)
    return _jit_arguments(a, a, out, bias, 8, 8, 8, 1.0, None)


def _jit_arguments(a, b, out, bias, M, N, K, alpha, stream):
    """Arguments for tracing: every extent and row stride is a run-time value, the inner stride is 1."""
    import flydsl.compiler as flyc

    def dynamic(tensor):
        return flyc.from_torch_tensor(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)

    return dynamic(a), dynamic(b), dynamic(out), dynamic(bias), M, N, K, alpha, stream


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
    a, b, out, bias, alpha, *_ = tensors
    assert out is not None
    if config is None:
        config, _ = default_config(problem, arch)
    notes: list[str] = []
    if problem.K == 0:
        # No element of the operands is read; they only need an address.
        a = b = torch.zeros((1, ALIGN_BYTES), dtype=problem.a_dtype, device=out.device)
    if problem.a_dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)  # the kernel is compiled for the two formats
    rows_a, rows_b = _tile_rows(problem, config, arch)
    a = _readable("a", a, rows_a, notes)
    b = _readable("b", b, rows_b, notes)

    target = _writable(out, config.tile_m)
    if target is None:
        notes.append(_OUT_COPIED)
        target = out.clone(memory_format=torch.contiguous_format)
    vectorised = problem.N % 8 == 0 and _aligned(target)
    if bias is None:
        bias_arg = target[0]  # not read
    else:
        # A single element is contiguous whatever its stride, but the kernel is traced with stride 1.
        bias_arg = bias.as_strided((1,), (1,)) if problem.N == 1 else bias.contiguous()
        if bias_arg.data_ptr() % ALIGN_BYTES and vectorised:
            bias_arg = bias_arg.clone()
            notes.append(_BIAS_COPIED)

    spec = specialise(problem, config, arch, vectorised)
    _launch(spec, (a, b, target, bias_arg, problem.M, problem.N, problem.K, float(alpha)))
    if target.data_ptr() != out.data_ptr():
        out.copy_(target)
    return notes


_OUT_COPIED = "out written through a copy: its inner stride is not 1 or its row stride is beyond the limit"
_BIAS_COPIED = "bias copied: not 16-byte aligned"


def copies(
    problem: GemmProblem,
    config: GemmConfig,
    arch: str,
    tensors: GemmTensors,
) -> list[str]:
    """The notes that `run` would return for the same arguments; out None: a new, contiguous one. Nothing is copied."""
    a, b, out, bias, *_ = tensors
    notes = []
    for name, tensor, rows in zip("ab", (a, b), _tile_rows(problem, config, arch), strict=True):
        if (reason := _why_copied(_plain_strides(tensor), rows)) is not None:
            notes.append(f"{name} copied: {reason}")
    target = None if out is None else _writable(out, config.tile_m)
    if out is not None and target is None:
        notes.append(_OUT_COPIED)
    vectorised = problem.N % 8 == 0 and (target is None or _aligned(target))  # N % 8 aligns the rows of a new tensor
    if bias is not None and vectorised and bias.data_ptr() % ALIGN_BYTES:
        notes.append(_BIAS_COPIED)
    return notes


def _tile_rows(problem, config, arch):
    """Rows in memory of a tile of a and of b."""
    tile_a, tile_b = operand_tiles(config, problem.layout, problem.a_dtype.itemsize, arch)
    return (
        config.tile_k if problem.layout == "NT" else tile_a.extent,
        tile_b.extent if problem.layout == "TN" else config.tile_k,
    )


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
    return tensor.data_ptr() % ALIGN_BYTES == 0 and _rows_aligned(tensor)


def _plain_strides(tensor):
    """The same 2-D tensor with the strides of dims of size 1, which PyTorch leaves arbitrary, made ordinary."""
    rows, columns = tensor.shape
    inner = tensor.stride(1) if columns > 1 else 1
    chunk = ALIGN_BYTES // tensor.element_size()
    outer = tensor.stride(0) if rows > 1 else -(-columns // chunk) * chunk
    if (outer, inner) == tensor.stride():
        return tensor
    return tensor.as_strided((rows, columns), (outer, inner))


def _why_copied(tensor, tile_rows):
    """Why the kernel cannot read an operand with plain strides where it lies, or None."""
    chunk = ALIGN_BYTES // tensor.element_size()
    columns = tensor.shape[1]
    if tensor.stride(1) != 1:
        return "inner stride is not 1"
    if tensor.data_ptr() % ALIGN_BYTES:
        return "base not 16-byte aligned"
    if not _rows_aligned(tensor):
        return "row stride not 16-byte aligned"
    if columns % chunk:
        return f"row length {columns} is not a multiple of {chunk}"
    if tile_rows * tensor.stride(0) * tensor.element_size() >= MAX_TILE_BYTES:
        return f"row stride {tensor.stride(0)} is beyond the limit"
    return None


def _readable(name, tensor, tile_rows, notes):
    """tensor, or an aligned copy of it whose rows are padded with zeros to whole chunks."""
    tensor = _plain_strides(tensor)
    reason = _why_copied(tensor, tile_rows)
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
