"""Launches the Hopper GEMM kernel: prepares operands, compiles once per specialisation, calls with little host work."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.sm90_config import (
    MAX_STRIDE_BYTES,
    NUM_SMS,
    HopperConfig,
    clusters,
    default_config,
    promotes,
    single_tile,
    why_unsupported,
)

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
    a_scaling: str | None
    b_scaling: str | None
    promote: bool
    single: bool
    vector: bool


def specialise(
    problem: GemmProblem, config: HopperConfig, num_sms: int = NUM_SMS, vector: bool = True
) -> Specialisation:
    """vector: rows of out and their starts allow stores of 4 elements; only a swapped tile cares."""
    single = config.schedule == "swapped" and single_tile(problem, config, num_sms)
    return Specialisation(
        replace(config, group=1), problem.layout, problem.a_dtype, problem.b_dtype, problem.out_dtype, problem.bias_dtype,
        problem.activation, problem.accumulate, problem.a_scaling, problem.b_scaling, promotes(problem), single, vector,
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
    from fourwave.ops.gemm import sm90, sm90_swapped

    types: dict[torch.dtype | None, Any] = {
        torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, None: None,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2,
    }  # fmt: skip
    config = spec.config
    a_type, b_type, out_type, bias_type = (
        types[dtype] for dtype in (spec.a_dtype, spec.b_dtype, spec.out_dtype, spec.bias_dtype)
    )
    kernel: Any
    if config.schedule == "swapped":
        kernel = sm90_swapped.SwappedGemm(
            config.tile_n, config.tile_m, config.num_stages, config.split, config.cluster_n,
            TmaLoader(
                b_type, config.tile_n, config.tile_k, spec.layout == "TN", config.num_stages, 1,
                -(-config.tile_n // 64) * 64,
            ),
            TmaLoader(a_type, config.tile_m, config.tile_k, True, config.num_stages, config.cluster_n),
            out_type, bias_type, spec.activation, spec.accumulate, spec.a_scaling, spec.b_scaling, spec.promote,
            spec.single, spec.vector, config.overlap,
        )  # fmt: skip
    else:
        kernel = sm90.Gemm(
            sm90.geometry(config),
            TmaLoader(a_type, config.tile_m, config.tile_k, spec.layout != "NT", config.num_stages, config.cluster_n),
            TmaLoader(b_type, config.tile_n, config.tile_k, spec.layout == "TN", config.num_stages, config.cluster_m),
            Epilogue(
                out_type,
                bias_type,
                spec.activation,
                spec.accumulate,
                config.store_stages,
                spec.a_scaling == "row",
                spec.b_scaling == "row",
            ),
            spec.a_scaling,
            spec.b_scaling,
            spec.promote,
            config.overlap,
        )
    out_align = ALIGN_BYTES
    if config.schedule == "swapped":
        out_align = spec.out_dtype.itemsize * (4 if spec.vector else 1)

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
        pointer(out_type, out_align),
        pointer(bias_type or out_type),
        pointer(Float32),
        pointer(Float32),
        one, one, one, stride, stride, stride, Float32(1.0), one, one,
        cuda.CUstream(0),
    )  # fmt: skip


# The launcher's run-time arguments (sm90.Gemm.__call__), in its order, with their formats; the last is what it returns.
_ARGUMENTS = {
    "a": "Q", "b": "Q", "out": "Q", "bias": "Q", "scale_a": "Q", "scale_b": "Q", "M": "i", "N": "i", "K": "i",
    "a_stride": "q", "b_stride": "q", "out_stride": "q", "alpha": "f", "num_clusters": "i", "group": "i", "stream": "Q",
    "result": "i",
}  # fmt: skip
# How they lie in a plan's block: what changes with every call first, so that one call writes it.
_PER_CALL = ("a", "b", "out", "bias", "scale_a", "scale_b", "stream", "alpha")
_ORDER = (*_PER_CALL, *(name for name in _ARGUMENTS if name not in _PER_CALL))
_pack_call = struct.Struct("@" + "".join(_ARGUMENTS[name] for name in _PER_CALL)).pack_into
_RESULT = struct.calcsize("@" + "".join(_ARGUMENTS[name] for name in _ORDER)) - 4


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
        values = dict.fromkeys(_ARGUMENTS, 0) | {
            "M": problem.M, "N": problem.N, "K": problem.K, "a_stride": strides[0], "b_stride": strides[1],
            "out_stride": strides[2], "num_clusters": min(tiles_m * tiles_n, clusters(config, num_sms)), "group": config.group,
        }  # fmt: skip
        self._block = bytearray(struct.pack("@" + "".join(_ARGUMENTS[n] for n in _ORDER), *(values[n] for n in _ORDER)))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        offsets = {
            name: struct.calcsize("@" + "".join(_ARGUMENTS[n] for n in _ORDER[: i + 1]))
            - struct.calcsize(_ARGUMENTS[name])
            for i, name in enumerate(_ORDER)
        }
        self._packed = (ctypes.c_void_p * len(_ARGUMENTS))(*(base + offsets[name] for name in _ARGUMENTS))
        self._result = ctypes.c_int32.from_buffer(self._block, _RESULT)
        self._executor = executor  # keeps the module loaded
        self._function = executor.capi_func

    def launch(self, a: int, b: int, out: int, tensors: GemmTensors, stream: int) -> None:
        bias, scale_a, scale_b = tensors.bias, tensors.a_scale, tensors.b_scale
        _pack_call(
            self._block, 0, a, b, out,
            0 if bias is None else bias.data_ptr(),
            0 if scale_a is None else scale_a.data_ptr(),
            0 if scale_b is None else scale_b.data_ptr(),
            stream, tensors.alpha,
        )  # fmt: skip
        self._function(self._packed)
        if self._result.value:
            raise RuntimeError(f"the launch failed with CUDA error {self._result.value}")


@functools.lru_cache(maxsize=16)
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _executor(spec: Specialisation) -> Any:
    """The loaded kernel; compiled at its first use, if no process has done so before."""
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
            guard.import_cutlass()
            compiled = cutedsl_cache.load(spec)
            if compiled is None:
                compiled = compile_kernel(spec)
                cutedsl_cache.store(spec, compiled)
            executor = _compiled[spec] = compiled.to(None)
    return executor


def warm_up(problem: GemmProblem, config: HopperConfig | None = None) -> None:
    """Have the kernel for `problem` ready, so that neither the first call nor a graph's capture has to compile it.

    Operands and out count as aligned (16 bytes, rows too); others may need another kernel. Raises NotImplementedError
    where there is no kernel.
    """
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    chosen = config or default_config(problem)[0]
    swapped = chosen.schedule == "swapped"
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        problem = replace(problem, out_dtype=torch.float32, accumulate=False)
        chosen = chosen if why_unsupported(problem, chosen) is None else default_config(problem)[0]
    vector = not swapped or problem.N % 4 == 0
    _executor(specialise(problem, chosen, _num_sms(torch.cuda.current_device()), vector))


def run(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """Run the problem on the current device.

    Returns notes, such as which operand had to be copied. Raises NotImplementedError (why_unsupported), RuntimeError
    when a kernel would have to be compiled while a CUDA graph is captured.
    """
    a, b, out = tensors.a, tensors.b, tensors.out
    assert out is not None
    device = a.device.index
    recent = _local.__dict__.get("recent")
    if recent is None:
        recent = _local.recent = {}
        _local.plans = {}
    # By identity: hashing a problem's fields takes longer than a launch. An entry keeps its objects, so no id returns.
    entry = recent.get((id(problem), id(config), device, a.stride(0), b.stride(0), out.stride(0)))
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr()
    if entry is None or (pointers[0] | pointers[1] | pointers[2]) % ALIGN_BYTES:
        return _prepare(device, problem, config, tensors, out)
    if problem.a_scaling == "1x128" and (tensors.a_scale.data_ptr() | tensors.b_scale.data_ptr()) % ALIGN_BYTES:  # type: ignore[union-attr]
        return _prepare(device, problem, config, tensors, out)
    entry[0].launch(*pointers, tensors, torch._C._cuda_getCurrentRawStream(device))
    return []


def _prepare(
    device: int,
    problem: GemmProblem,
    config: HopperConfig | None,
    tensors: GemmTensors,
    out: torch.Tensor,
) -> list[str]:
    """The first call of its kind, and every call with operands that TMA cannot address."""
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    chosen = config or default_config(problem)[0]
    swapped = chosen.schedule == "swapped"
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        # TMA would add numbers that are already rounded to out's type. Add in float32, round once.
        total = torch.empty((problem.M, problem.N), dtype=torch.float32, device=out.device)
        plain = replace(problem, out_dtype=torch.float32, accumulate=False)
        fitting = config if config is None or why_unsupported(plain, config) is None else None
        notes = run(plain, fitting, tensors._replace(out=total))
        out.copy_(total.add_(out))
        return [*notes, f"accumulated through a float32 buffer: out is {problem.out_dtype}"]
    notes = []
    a, b = _aligned("a", tensors.a, notes), _aligned("b", tensors.b, notes)
    target = out
    if problem.a_scaling == "1x128" and not swapped:
        assert tensors.a_scale is not None and tensors.b_scale is not None
        tensors = tensors._replace(
            a_scale=_aligned("a's scales", tensors.a_scale, notes),
            b_scale=_aligned("b's scales", tensors.b_scale, notes),
        )
    if not swapped and (reason := _misaligned(out) or _partial_chunk(out)) is not None:
        notes.append(f"out written through a copy: {reason}")
        target = _padded(out, copy=problem.accumulate)
    strides = (_row_stride(a), _row_stride(b), _row_stride(target))
    vector = True
    if swapped:
        quad = 4 * out.element_size()
        vector = problem.N % 4 == 0 and (out.data_ptr() | strides[2] * out.element_size()) % quad == 0
    plans, recent = _local.plans, _local.recent
    key = problem, config, device, strides, vector
    plan = plans.get(key)
    if plan is None:
        executor = _executor(specialise(problem, chosen, _num_sms(device), vector))
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plan = plans[key] = _Plan(chosen, executor, problem, strides, _num_sms(device))
    if not notes and (vector or out.data_ptr() % ALIGN_BYTES == 0):
        # The next call with these strides and aligned bases needs none of the above.
        if len(recent) >= MAX_PLANS:
            recent.clear()
        recent[id(problem), id(config), device, a.stride(0), b.stride(0), out.stride(0)] = plan, problem, config
    stream = torch._C._cuda_getCurrentRawStream(device)
    plan.launch(a.data_ptr(), b.data_ptr(), target.data_ptr(), tensors, stream)
    if target is not out:
        out.copy_(target)
    return notes


def copies(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """What `run` would note about copies."""
    swapped = (config or default_config(problem)[0]).schedule == "swapped"
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        plain = replace(problem, out_dtype=torch.float32, accumulate=False)
        fitting = config if config is None or why_unsupported(plain, config) is None else None
        notes = copies(plain, fitting, tensors._replace(out=None))
        return [*notes, f"accumulated through a float32 buffer: out is {problem.out_dtype}"]
    notes = []
    read = [("a", tensors.a), ("b", tensors.b)]
    if problem.a_scaling == "1x128" and not swapped and tensors.a_scale is not None and tensors.b_scale is not None:
        read += [("a's scales", tensors.a_scale), ("b's scales", tensors.b_scale)]
    for name, tensor in read:
        if (reason := _misaligned(tensor)) is not None:
            notes.append(f"{name} copied: {reason}")
    out = tensors.out
    if out is None:
        out = torch.empty((problem.M, problem.N), dtype=problem.out_dtype, device="meta")
    if not swapped and (reason := _misaligned(out) or _partial_chunk(out)) is not None:
        notes.append(f"out written through a copy: {reason}")
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
