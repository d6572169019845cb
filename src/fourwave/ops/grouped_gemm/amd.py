"""Launches the FlyDSL grouped GEMM kernels: prepares operands, compiles once per specialisation, calls."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.backends import guard
from fourwave.ops.gemm.config import MAX_TILE_BYTES
from fourwave.ops.grouped_gemm.config import (
    GroupedConfig,
    block_scaled,
    brings_scales,
    default_config,
    grid_tiles,
    is_mx,
    why_unsupported,
    workspace_shape,
)
from fourwave.ops.grouped_gemm.problem import ROWS, GroupedProblem, GroupedTensors

Tensor = torch.Tensor
ALIGN_BYTES = 16


@dataclass(frozen=True)
class Specialisation:
    """Everything that is fixed when a kernel is compiled. Sizes, strides, pointers and m_sizes are run-time values."""

    arch: str
    config: GroupedConfig
    problem: GroupedProblem  # without sizes
    vectorised: bool  # epilogue.Epilogue


@functools.lru_cache(maxsize=4096)
def specialise(problem: GroupedProblem, config: GroupedConfig, arch: str, vectorised: bool = True) -> Specialisation:
    kind = replace(problem, G=0, M=0, N=0, K=0, device_type="cuda", a_scale_layout="rows", fast_accum=False)
    return Specialisation(arch, config, kind, vectorised)


def build_launcher(spec: Specialisation) -> Any:
    """The FlyDSL JIT function of a specialisation."""
    guard.import_flydsl()
    if spec.arch == "gfx950":
        from fourwave.ops.grouped_gemm.cdna4 import build
    else:
        from fourwave.ops.grouped_gemm.cdna3 import build
    return build(spec)


def placeholder_arguments(spec: Specialisation) -> list[Any]:
    """Arguments to compile with where nothing is launched; sizes do not matter."""
    problem = replace(spec.problem, G=2, M=128, N=128, K=128)

    def zeros(shape: Any, dtype: torch.dtype | None) -> Any:
        return None if shape is None else torch.zeros(shape, dtype=dtype)

    scales = torch.uint8 if is_mx(problem) else torch.float32
    tensors = GroupedTensors(
        torch.zeros(problem.a_shape).to(problem.a_dtype), torch.zeros(problem.b_shape).to(problem.b_dtype),
        torch.zeros(2, dtype=problem.m_sizes_dtype), torch.zeros(problem.out_shape, dtype=problem.out_dtype),
        zeros((3, 128) if problem.bias_dtype is not None else None, problem.bias_dtype),
        zeros(problem.a_scale_shape, scales), zeros(problem.b_scale_shape, scales),
    )  # fmt: skip
    workspace = None if spec.config.split_k == 1 else torch.zeros(1, 1024, dtype=torch.float32)
    return _jit_arguments(*_arguments(problem, spec.config, tensors, workspace), None)


def _arguments(
    problem: GroupedProblem, config: GroupedConfig, tensors: GroupedTensors, workspace: Tensor | None
) -> tuple[Any, ...]:
    """Arguments of the launchers but for the stream."""
    unused = _bytes(tensors.out).reshape(-1)[:1] if tensors.out.is_contiguous() else _flat(_bytes(tensors.out))
    a_scale = unused if tensors.a_scale is None else _bytes(_flat(tensors.a_scale))
    b_scale = unused if tensors.b_scale is None else _bytes(_flat(tensors.b_scale))
    a_strides, b_strides = _scale_strides(problem, tensors)
    return (
        _bytes(tensors.a), _bytes(tensors.b), tensors.out, tensors.m_sizes.view(torch.int32), a_scale, b_scale,
        unused if tensors.bias is None else tensors.bias.view(-1), unused if workspace is None else workspace,
        problem.G, problem.M, problem.N, problem.K, *a_strides, *b_strides, grid_tiles(problem, config),
    )  # fmt: skip


def _scale_strides(problem: GroupedProblem, tensors: GroupedTensors) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """a: (elements between rows, between units of k); 0 and 0 for layout "groups". b: (between groups, columns or cells, units).

    Units of k are blocks, but for e8m0 scales along the last dimension the four blocks of a K tile.
    """
    a_strides, b_strides = (0, 0), (0, 0, 0)
    if tensors.b_scale is not None and problem.split == ROWS and problem.b_scaling in ("tensor", "row"):
        b_strides = (tensors.b_scale.stride(0), 0, 0)
    if not block_scaled(problem):
        return a_strides, b_strides
    assert tensors.a_scale is not None and tensors.b_scale is not None
    unit = 4 if is_mx(problem) else 1
    if problem.split == ROWS:
        if problem.a_scale_layout == "rows":
            a_strides = (tensors.a_scale.stride(0), unit)
        per_group, first, second = tensors.b_scale.stride()
        return a_strides, (per_group, *((first, second * unit) if problem.b_k_last else (second, first)))
    return (1, tensors.a_scale.stride(0)), (0, 1, tensors.b_scale.stride(0))


def _flat(t: Tensor) -> Tensor:
    """The span of t's elements as a vector."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    return t.as_strided((max(span, 1),), (1,))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _jit_arguments(*arguments: Any) -> list[Any]:
    """Arguments for tracing: every extent and stride but the inner one is a run-time value."""
    import flydsl.compiler as flyc

    def dynamic(tensor: Tensor) -> Any:
        return flyc.from_torch_tensor(tensor).mark_layout_dynamic(leading_dim=tensor.dim() - 1)

    return [dynamic(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]


_compiled: dict[Any, Any] = {}  # (Specialisation, target) -> FlyDSL CompiledFunction
_lock = threading.Lock()  # FlyDSL traces one function at a time


def run(problem: GroupedProblem, config: GroupedConfig | None, arch: str, tensors: GroupedTensors) -> list[str]:
    """The product by the FlyDSL kernel for arch. G, M, N and K are at least 1. Raises NotImplementedError (why_unsupported).

    Tensors are on a GPU of that arch, or on the CPU inside a fourwave.sim session of that arch. Nothing is read on the host.
    """
    if (reason := why_unsupported(problem, config, arch)) is not None:
        raise NotImplementedError(reason)
    if config is None:
        config, _ = default_config(problem, arch)
    notes: list[str] = []
    a = _readable("a", tensors.a, notes)
    b = tensors.b if problem.b_preshuffled else _readable("b", tensors.b, notes)
    if problem.b_preshuffled and (not b.is_contiguous() or b.data_ptr() % ALIGN_BYTES):
        b = b.clone(memory_format=torch.contiguous_format)
        notes.append("b copied: preshuffled weights are read from contiguous, 16-byte aligned memory")
    # One column may have any stride; the kernels take 1.
    out = tensors.out.as_strided(tensors.out.shape, (*tensors.out.stride()[:-1], 1))
    m_sizes, b_scale = tensors.m_sizes, tensors.b_scale
    pitch = out.stride(-2) * out.element_size()
    if config.tile_m * pitch >= MAX_TILE_BYTES:
        raise NotImplementedError(
            f"out has rows {pitch} bytes apart: {config.tile_m} of them span {MAX_TILE_BYTES} bytes or more"
        )
    if m_sizes.data_ptr() % m_sizes.element_size():
        m_sizes = m_sizes.clone()
    if b_scale is not None and problem.b_scaling == "row" and not b_scale[0].is_contiguous():
        b_scale = b_scale.contiguous()
    a_scale = tensors.a_scale
    if is_mx(problem):
        assert a_scale is not None and b_scale is not None
        # Of neighbouring columns gfx950 loads 16 bytes, of rows 4.
        wide = brings_scales(problem, arch)
        a_scale, b_scale = (
            _whole_units(name, scale.view(torch.uint8), ALIGN_BYTES if wide and not k_last else 4, notes)
            for name, scale, k_last in (("a_scale", a_scale, problem.a_k_last), ("b_scale", b_scale, problem.b_k_last))
        )
    elif block_scaled(problem) and problem.split != ROWS:
        assert b_scale is not None
        b_scale = _whole_units("b_scale", b_scale, ALIGN_BYTES, notes)
    vectorised = problem.N % 8 == 0 and out.data_ptr() % ALIGN_BYTES == 0
    vectorised = vectorised and all(stride * out.element_size() % ALIGN_BYTES == 0 for stride in out.stride()[:-1])
    bias = tensors.bias
    if bias is not None:
        bias = torch.cat((bias, bias.new_zeros(1, problem.N)))
        notes.append("bias copied: a row of zeros for rows in no group")
    prepared = tensors._replace(a=a, b=b, out=out, m_sizes=m_sizes, a_scale=a_scale, b_scale=b_scale, bias=bias)
    workspace = None
    if config.split_k > 1:
        workspace = torch.empty(workspace_shape(problem, config), dtype=torch.float32, device=a.device)
    _launch(specialise(problem, config, arch, vectorised), _arguments(problem, config, prepared, workspace))
    return notes


def _readable(name: str, t: Tensor, notes: list[str]) -> Tensor:
    """t, or a copy whose rows are whole 16-byte chunks, padded with zeros, and aligned."""
    chunk = ALIGN_BYTES // t.element_size()
    shape = t.shape
    strides = [
        stride if size > 1 else -(-(shape[-1] if dim == t.dim() - 2 else shape[-2] * t.stride(-2)) // chunk) * chunk
        for dim, (size, stride) in enumerate(zip(shape[:-1], t.stride()[:-1], strict=True))
    ]
    columns = shape[-1]
    if t.data_ptr() % ALIGN_BYTES == 0 and columns % chunk == 0 and not any(stride % chunk for stride in strides):
        return t.as_strided(shape, (*strides, 1))
    notes.append(f"{name} copied: rows of whole 16-byte chunks, 16-byte aligned, are needed")
    padded = torch.zeros((*shape[:-1], -(-columns // chunk) * chunk), dtype=t.dtype, device=t.device)
    padded[..., :columns].copy_(t)
    return padded


def _whole_units(name: str, scale: Tensor, unit_bytes: int, notes: list[str]) -> Tensor:
    """Scales in aligned rows of whole units of 4 or 16 bytes, zeros behind their ends."""
    columns, unit = scale.shape[-1], unit_bytes // scale.element_size()
    strides = scale.stride()[:-1]
    if (
        columns % unit == 0
        and scale.stride(-1) == 1
        and scale.data_ptr() % unit_bytes == 0
        and not any(stride % unit for stride in strides)
    ):
        return scale
    what = "32-bit words" if unit_bytes == 4 else "16-byte chunks, 16-byte aligned,"
    notes.append(f"{name} copied: rows of whole {what} are needed")
    padded = scale.new_zeros((*scale.shape[:-1], -(-columns // unit) * unit))
    padded[..., :columns].copy_(scale)
    return padded


def _launch(spec: Specialisation, arguments: tuple[Any, ...]) -> None:
    tensor = arguments[0]
    if tensor.device.type != "cuda":
        from fourwave import sim

        session = sim.active_session()
        if session is None:
            raise RuntimeError("CPU tensors need an open fourwave.sim session")
        _call(spec, ("sim", session.key), (*arguments, None))
        return
    with torch.cuda.device(tensor.device):
        _call(spec, ("cuda", tensor.device.index), (*arguments, torch.cuda.current_stream()))


def _call(spec: Specialisation, target: Any, arguments: tuple[Any, ...]) -> None:
    compiled = _compiled.get((spec, target))
    if compiled is None:
        if target[0] == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a graph is being captured and this grouped GEMM is not compiled yet: warm up first, by one call with operands of "
                "these dtypes, layouts and sizes"
            )
        with _lock:
            compiled = _compiled.get((spec, target))
            if compiled is None:
                launcher = build_launcher(spec)
                import flydsl.compiler as flyc

                # compile() also launches, since the arguments are live.
                _compiled[spec, target] = flyc.compile(launcher, *_jit_arguments(*arguments))
                return
    compiled(*arguments)
