"""Launches the Hopper GEMM kernel: prepares operands, compiles once per specialisation, calls with little host work."""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.backends import guard
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_config import MAX_STRIDE_BYTES, HopperConfig, default_config, why_unsupported

Tensor = torch.Tensor
Scales = tuple[Tensor, Tensor] | None
MAX_PLANS = 4096  # kept per thread: sizes that change with every batch must not fill the memory
ALIGN_BYTES = 16  # of bases and row strides, for TMA


@dataclass(frozen=True)
class Specialisation:
    """Everything that is fixed when a kernel is compiled. Sizes, strides, pointers, alpha and the width of the bands are
    run-time values: config.group is 1 here."""

    config: HopperConfig
    layout: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    activation: str | None
    accumulate: bool
    scaled: bool = False
    promote: bool = False


def specialise(
    problem: GemmProblem, config: HopperConfig, scaled: bool = False, promote: bool = False
) -> Specialisation:
    return Specialisation(
        replace(config, group=1), problem.layout, problem.a_dtype, problem.b_dtype, problem.out_dtype, problem.bias_dtype,
        problem.activation, problem.accumulate, scaled, promote,
    )  # fmt: skip


_compiled: dict[Specialisation, Any] = {}
_lock = threading.Lock()  # CuTe DSL traces one function at a time
_local = threading.local()  # each thread's plans: their argument blocks are written before every launch


def compile_kernel(spec: Specialisation, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU.

    keep: with the PTX and the cubin, for inspection; CuTe DSL also writes them into the working directory.
    """
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.runtime import make_ptr

    from fourwave.blocks.cutedsl.epilogue import Epilogue
    from fourwave.blocks.cutedsl.loaders import TmaLoader
    from fourwave.ops.gemm import sm90

    types: dict[torch.dtype | None, Any] = {
        torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, None: None,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2,
    }  # fmt: skip
    config = spec.config
    a_type, b_type, out_type, bias_type = (
        types[dtype] for dtype in (spec.a_dtype, spec.b_dtype, spec.out_dtype, spec.bias_dtype)
    )
    kernel = sm90.Gemm(
        sm90.geometry(config),
        TmaLoader(a_type, config.tile_m, config.tile_k, spec.layout != "NT", config.num_stages, config.cluster_n),
        TmaLoader(b_type, config.tile_n, config.tile_k, spec.layout == "TN", config.num_stages, config.cluster_m),
        Epilogue(out_type, bias_type, spec.activation, spec.accumulate, config.store_stages),
        spec.scaled,
        spec.promote,
    )

    def pointer(dtype: Any, align: int | None = None) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    one, stride = Int32(1), Int64(ALIGN_BYTES)
    return cute.compile[tuple(options)](
        kernel,
        pointer(a_type, ALIGN_BYTES),
        pointer(b_type, ALIGN_BYTES),
        pointer(out_type, ALIGN_BYTES),
        pointer(bias_type or out_type),
        pointer(Float32),
        pointer(Float32),
        one, one, one, stride, stride, stride, Float32(1.0), one, one,
        cuda.CUstream(0),
    )  # fmt: skip


class _Block(ctypes.Structure):
    """The launcher's run-time arguments (sm90.Gemm.__call__), in its order, and what it returns."""

    _fields_ = (
        ("a", ctypes.c_uint64), ("b", ctypes.c_uint64), ("out", ctypes.c_uint64), ("bias", ctypes.c_uint64),
        ("scale_a", ctypes.c_uint64), ("scale_b", ctypes.c_uint64),
        ("M", ctypes.c_int32), ("N", ctypes.c_int32), ("K", ctypes.c_int32),
        ("a_stride", ctypes.c_int64), ("b_stride", ctypes.c_int64), ("out_stride", ctypes.c_int64),
        ("alpha", ctypes.c_float), ("num_clusters", ctypes.c_int32), ("group", ctypes.c_int32), ("stream", ctypes.c_uint64),
        ("result", ctypes.c_int32),
    )  # fmt: skip


class _Plan:
    """A compiled kernel with an argument block of its own: a call writes a few words and jumps.

    CuTe DSL's own call converts every argument anew. Its calling convention, one address per argument and one for the
    result, is that of MLIR's packed interface; compile_kernel's DSL version range holds it.
    """

    def __init__(
        self, config: HopperConfig, executor: Any, problem: GemmProblem, strides: tuple[int, int, int], num_sms: int
    ):
        tiles_m = -(-problem.M // (config.tile_m * config.cluster_m))
        tiles_n = -(-problem.N // (config.tile_n * config.cluster_n))
        block = self.block = _Block(M=problem.M, N=problem.N, K=problem.K)
        block.a_stride, block.b_stride, block.out_stride = strides
        block.group = config.group
        block.num_clusters = min(tiles_m * tiles_n, num_sms // config.cluster_size)
        base = ctypes.addressof(block)
        addresses = [base + getattr(_Block, name).offset for name, *_ in _Block._fields_]
        self._packed = (ctypes.c_void_p * len(addresses))(*addresses)
        self._executor = executor  # keeps the module loaded
        self._function = executor.capi_func

    def launch(self, a: int, b: int, out: int, bias: Tensor | None, scales: Scales, alpha: float, stream: int) -> None:
        block = self.block
        block.a, block.b, block.out, block.alpha, block.stream = a, b, out, alpha, stream
        if bias is not None:
            block.bias = bias.data_ptr()
        if scales is not None:
            block.scale_a, block.scale_b = scales[0].data_ptr(), scales[1].data_ptr()
        self._function(self._packed)
        if block.result:
            raise RuntimeError(f"the launch failed with CUDA error {block.result}")


@functools.lru_cache(maxsize=16)
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _executor(spec: Specialisation) -> Any:
    """The loaded kernel; compiled at its first use."""
    executor = _compiled.get(spec)
    if executor is not None:
        return executor
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernel for {spec} is not compiled yet, and compiling inside a CUDA graph's capture is not possible: "
            "warm up first, with one call of the same kind outside the capture"
        )
    with _lock:
        executor = _compiled.get(spec)
        if executor is None:
            executor = _compiled[spec] = compile_kernel(spec).to(None)
    return executor


def run(
    problem: GemmProblem,
    config: HopperConfig | None,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    scales: Scales = None,
    promote: bool = False,
) -> list[str]:
    """out[M, N] = act(alpha * scale_a * scale_b * op(a) @ op(b) + bias) (+ out) on the current device.

    a, b    as stored (GemmProblem.a_shape, b_shape), inner stride 1, any row stride
    out     [M, N], inner stride 1, any row stride; nothing outside it is written
    bias    [N] contiguous, or None
    scales  (scale_a, scale_b), one float32 element each, or None
    promote FP8 only: float32 additions sum what the matrix unit makes of each 128 k (sm90.py)
    Returns notes, such as which operand had to be copied. Raises NotImplementedError (why_unsupported), RuntimeError
    when a kernel would have to be compiled while a CUDA graph is captured.
    """
    device = a.device.index
    key = (problem, config, device, a.stride(0), b.stride(0), out.stride(0), scales is None, promote, True)
    plans = _local.__dict__.get("plans")
    if plans is None:
        plans = _local.plans = {}
    plan = plans.get(key)
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
    if plan is None or (pointers[0] | pointers[1] | pointers[2]) % ALIGN_BYTES:
        return _prepare(plans, device, problem, config, a, b, out, bias, alpha, scales, promote)
    plan.launch(*pointers, bias, scales, alpha, torch._C._cuda_getCurrentRawStream(device))
    return []


def _prepare(
    plans: dict[Any, _Plan],
    device: int,
    problem: GemmProblem,
    config: HopperConfig | None,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    alpha: float,
    scales: Scales,
    promote: bool,
) -> list[str]:
    """The first call of its kind, and every call with operands that TMA cannot address."""
    if (reason := why_unsupported(problem, config, promote)) is not None:
        raise NotImplementedError(reason)
    if problem.accumulate and problem.out_dtype != torch.float32:
        # TMA would add numbers that are already rounded to out's type. Add in float32, round once.
        total = torch.empty((problem.M, problem.N), dtype=torch.float32, device=out.device)
        plain = GemmProblem(
            problem.M, problem.N, problem.K, problem.layout, problem.a_dtype, problem.b_dtype, torch.float32,
            problem.bias_dtype, problem.activation, False, problem.device_type,
        )  # fmt: skip
        fitting = config if config is None or why_unsupported(plain, config, promote) is None else None
        notes = run(plain, fitting, a, b, total, bias=bias, alpha=alpha, scales=scales, promote=promote)
        out.copy_(total.add_(out))
        return [*notes, f"accumulated through a float32 buffer: out is {problem.out_dtype}"]
    notes = []
    a, b = _aligned("a", a, notes), _aligned("b", b, notes)
    target = out
    if (reason := _misaligned(out) or _partial_chunk(out)) is not None:
        notes.append(f"out written through a copy: {reason}")
        target = _padded(out, copy=problem.accumulate)
    chosen = config or default_config(problem, promote)[0]
    strides = (_row_stride(a), _row_stride(b), _row_stride(target))
    key = (
        problem, config, device, a.stride(0), b.stride(0), target.stride(0), scales is None, promote, target is out
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        executor = _executor(specialise(problem, chosen, scales is not None, promote))
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plan = plans[key] = _Plan(chosen, executor, problem, strides, _num_sms(device))
    stream = torch._C._cuda_getCurrentRawStream(device)
    plan.launch(a.data_ptr(), b.data_ptr(), target.data_ptr(), bias, scales, alpha, stream)
    if target is not out:
        out.copy_(target)
    return notes


def _row_stride(tensor: torch.Tensor) -> int:
    """Elements between rows; where there is one row, any number that TMA takes."""
    if tensor.shape[0] > 1:
        return tensor.stride(0)
    chunk = ALIGN_BYTES // tensor.element_size()
    return -(-tensor.shape[1] // chunk) * chunk


def _misaligned(tensor: torch.Tensor) -> str | None:
    if tensor.data_ptr() % ALIGN_BYTES:
        return f"base not {ALIGN_BYTES}-byte aligned"
    row_bytes = _row_stride(tensor) * tensor.element_size()
    if row_bytes % ALIGN_BYTES:
        return f"row stride not a multiple of {ALIGN_BYTES} bytes"
    if row_bytes >= MAX_STRIDE_BYTES:
        return f"row stride of {row_bytes} bytes is beyond a tensor map"
    return None


def _partial_chunk(out: torch.Tensor) -> str | None:
    """TMA stores write whole chunks of 16 bytes: one that N cuts would spill past the row's end. (Loads do not.)"""
    row_bytes = out.shape[1] * out.element_size()
    return f"its rows, {row_bytes} bytes, end inside a chunk of {ALIGN_BYTES}" if row_bytes % ALIGN_BYTES else None


def _padded(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """A tensor like the 2-D one, with rows that start at multiples of 16 bytes."""
    rows, columns = tensor.shape
    chunk = ALIGN_BYTES // tensor.element_size()
    padded = tensor.new_empty((rows, -(-columns // chunk) * chunk))[:, :columns]
    return padded.copy_(tensor) if copy else padded


def _aligned(name: str, tensor: torch.Tensor, notes: list[str]) -> torch.Tensor:
    reason = _misaligned(tensor)
    if reason is None:
        return tensor
    notes.append(f"{name} copied: {reason}")
    return _padded(tensor, copy=True)
