"""Launches the Hopper GEMM kernel: prepares operands, compiles once per specialisation, calls with little host work."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.backends.base import Relaunch
from fourwave.ops.gemm.problem import PACKED_E2M1, SWIGLU, GemmProblem, GemmTensors
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_config import (
    FP8,
    MAX_STRIDE_BYTES,
    SWIZZLE_BYTES,
    HopperConfig,
    more_outputs,
    num_clusters,
    promotes,
    single_tile,
    why_unsupported,
)

_SCALES_BY_TMA = ("128x128", "1x32")  # of b: the kernel reads scales by TMA
MAX_PLANS = 4096  # kept per thread: sizes that change with every batch must not fill the memory
ALIGN_BYTES = 16  # of bases and row strides, for TMA
_ALIGN_BITS = ALIGN_BYTES - 1
SCATTERED = "b copied: preshuffled weights are read from contiguous memory"


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
    preactivation_dtype: torch.dtype | None
    bias_grad_dtype: torch.dtype | None
    more_outputs: bool
    shuffled: bool
    read_once: bool
    runs_when: int | None = None  # Guard's


class Guard(NamedTuple):
    """A product that does nothing unless `flag` [1] int32, on the device, is runs_when when its turn comes: of a tiled kernel, without
    accumulation, and with no output but out, whose rows need no copy."""

    flag: torch.Tensor
    runs_when: int


def specialise(
    problem: GemmProblem, config: HopperConfig, vector: bool = True, runs_when: int | None = None
) -> Specialisation:
    """vector: rows of out and their starts allow stores of 4 elements; only a swapped tile cares."""
    if runs_when is not None:
        assert not (config.few_rows or problem.accumulate or more_outputs(problem))
    single = config.few_rows and single_tile(problem, config)
    read_once = config.few_rows and problem.M <= config.tile_m
    return Specialisation(
        replace(config, group=1), problem.layout, problem.a_dtype, problem.b_dtype, problem.out_dtype, problem.bias_dtype,
        problem.activation, problem.accumulate, problem.a_scaling, problem.b_scaling, promotes(problem), single, vector,
        problem.preactivation_dtype, problem.bias_grad_dtype, more_outputs(problem),
        problem.b_preshuffled, read_once, runs_when,
    )  # fmt: skip


_compiled: dict[Specialisation, Any] = {}
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

    from fourwave.blocks.cutedsl.convert import Codes
    from fourwave.blocks.cutedsl.epilogue import Epilogue
    from fourwave.blocks.cutedsl.loaders import TmaLoader
    from fourwave.formats.element import E4M3FN, E5M2
    from fourwave.ops.gemm import sm90, sm90_streamed, sm90_swapped

    types: dict[torch.dtype | None, Any] = {
        torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, None: None,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2,
    }  # fmt: skip
    config = spec.config
    packed = spec.b_scaling == "1x32"
    wide_codes = packed and spec.b_dtype != PACKED_E2M1
    types[PACKED_E2M1] = cutlass.Uint8
    if wide_codes:
        types[spec.b_dtype] = cutlass.Uint8
    a_type, b_type, out_type, bias_type, z_type, bias_grad_type = (
        types[dtype]
        for dtype in (
            spec.a_dtype, spec.b_dtype, spec.out_dtype, spec.bias_dtype, spec.preactivation_dtype, spec.bias_grad_dtype
        )
    )  # fmt: skip
    codes = None
    if spec.out_dtype in FP8:
        codes = Codes(E4M3FN if spec.out_dtype == torch.float8_e4m3fn else E5M2)
        out_type = cutlass.Uint8
    kernel: Any
    if config.schedule == "streamed":
        kernel = sm90_streamed.StreamedGemm(
            config.tile_n, config.tile_m, 4 * config.consumers, config.num_stages, config.split, out_type, bias_type,
            spec.activation, spec.accumulate, spec.single, spec.vector, config.overlap, spec.read_once,
        )  # fmt: skip
    elif config.schedule == "swapped":
        kernel = sm90_swapped.SwappedGemm(
            config.tile_n, config.tile_m, config.num_stages, config.split, config.cluster_n,
            TmaLoader(
                b_type, config.tile_n, config.tile_k // 2 if packed and not wide_codes else config.tile_k,
                spec.layout == "TN", config.num_stages, 1, -(-config.tile_n // 64) * 64,
                swizzle=64 if packed and not wide_codes else SWIZZLE_BYTES,
            ),
            TmaLoader(a_type, config.tile_m, config.tile_k, True, config.num_stages, config.cluster_n),
            out_type, bias_type, spec.activation, spec.accumulate, spec.a_scaling, None if packed else spec.b_scaling,
            spec.promote, spec.single, spec.vector, config.overlap, packed, wide_codes, spec.shuffled, spec.read_once,
        )  # fmt: skip
    else:
        swiglu = spec.activation == SWIGLU
        kind = sm90.GemmWithOutputs if spec.more_outputs else sm90.Gemm
        kernel = (kind if spec.runs_when is None else sm90.GuardedGemm)(
            sm90.geometry(config),
            TmaLoader(a_type, config.tile_m, config.tile_k, spec.layout != "NT", config.num_stages, config.cluster_n),
            TmaLoader(
                b_type,
                config.tile_n,
                config.tile_k,
                spec.layout == "TN",
                config.num_stages,
                config.cluster_m,
                parts=2 if swiglu else 1,
            ),
            Epilogue(
                out_type,
                bias_type,
                spec.activation,
                spec.accumulate,
                config.store_stages,
                spec.a_scaling == "row",
                spec.b_scaling == "row",
                codes,
                z_type,
                spec.promote,
            ),
            spec.a_scaling,
            spec.b_scaling,
            spec.promote,
            config.overlap,
            bias_grad_type,
            spec.runs_when,
        )
    out_align = ALIGN_BYTES
    if config.few_rows:
        out_align = spec.out_dtype.itemsize * (4 if spec.vector else 1)

    def pointer(dtype: Any, align: int | None = None) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    one, stride = Int32(1), Int64(ALIGN_BYTES)
    more: list[Any] = []
    if spec.more_outputs:
        more = [
            pointer(z_type or out_type, ALIGN_BYTES), pointer(bias_grad_type or out_type), pointer(Int32), pointer(Int32),
            stride, stride,
        ]  # fmt: skip
    if spec.runs_when is not None:
        more = [pointer(Int32)]
    return cute.compile[tuple(options)](
        kernel,
        pointer(a_type, ALIGN_BYTES),
        pointer(b_type, ALIGN_BYTES),
        pointer(out_type, out_align),
        pointer(bias_type or out_type),
        pointer(Float32),
        pointer(cutlass.Uint8, ALIGN_BYTES) if packed else pointer(Float32),
        one, one, one, stride, stride, stride, Float32(1.0), one, one, *more,
        cuda.CUstream(0),
    )  # fmt: skip


# The launcher's run-time arguments (sm90.Gemm.__call__), in its order, with their formats; the last is what it returns.
_ARGUMENTS = {
    "a": "Q", "b": "Q", "out": "Q", "bias": "Q", "scale_a": "Q", "scale_b": "Q", "M": "i", "N": "i", "K": "i",
    "a_stride": "q", "b_stride": "q", "out_stride": "q", "alpha": "f", "num_clusters": "i", "group": "i", "stream": "Q",
    "result": "i",
}  # fmt: skip
# Those of sm90.GemmWithOutputs: more before the stream.
_MORE = {"z": "Q", "bias_grad": "Q", "out_scale": "Q", "out_amax": "Q", "z_stride": "q", "z_distance": "q"}
_ARGUMENTS_AND_MORE = {**_ARGUMENTS, **_MORE}
for _name in ("stream", "result"):
    _ARGUMENTS_AND_MORE[_name] = _ARGUMENTS_AND_MORE.pop(_name)
# Those of sm90.GuardedGemm.
_ARGUMENTS_AND_GUARD = {**_ARGUMENTS, "guard": "Q"}
for _name in ("stream", "result"):
    _ARGUMENTS_AND_GUARD[_name] = _ARGUMENTS_AND_GUARD.pop(_name)
# How they lie in a plan's block: what changes with every call first, so that one call writes it, or two.
_PER_CALL = ("a", "b", "out", "bias", "scale_a", "scale_b", "stream", "alpha")
_MORE_PER_CALL = ("z", "bias_grad", "out_scale", "out_amax")


def _offsets(names: tuple[str, ...]) -> dict[str, int]:
    """Bytes before each of the arguments, laid out as C would."""
    known = _ARGUMENTS_AND_MORE | _ARGUMENTS_AND_GUARD
    formats = [known[name] for name in names]
    ends = [struct.calcsize("@" + "".join(formats[: i + 1])) for i in range(len(names))]
    return {name: end - struct.calcsize(f) for name, end, f in zip(names, ends, formats, strict=True)}


_pack_call = struct.Struct("@" + "".join(_ARGUMENTS[name] for name in _PER_CALL)).pack_into
_pack_more = struct.Struct("@" + "".join(_MORE[name] for name in _MORE_PER_CALL)).pack_into
_MORE_AT = _offsets((*_PER_CALL, *_MORE_PER_CALL))[_MORE_PER_CALL[0]]
_pack_guard = struct.Struct("@Q").pack_into
_GUARD_AT = _offsets((*_PER_CALL, "guard"))["guard"]


class _Plan:
    """A compiled kernel with an argument block of its own: a call writes a few words and jumps.

    CuTe DSL's own call converts every argument anew. Its calling convention, one address per argument and one for the
    result, is that of MLIR's packed interface; compile_kernel's DSL version range holds it.
    """

    def __init__(
        self, config: HopperConfig, executor: Any, problem: GemmProblem, strides: tuple[int, int, int, int, int],
        num_sms: int, guarded: bool = False,
    ):  # fmt: skip
        """strides: of a's, b's, out's and z's rows, and z's distance."""
        self._more = more_outputs(problem)
        arguments = _ARGUMENTS_AND_MORE if self._more else _ARGUMENTS_AND_GUARD if guarded else _ARGUMENTS
        values = dict.fromkeys(arguments, 0) | {
            "M": problem.M, "N": problem.N, "K": problem.K, "a_stride": strides[0], "b_stride": strides[1],
            "out_stride": strides[2], "num_clusters": num_clusters(problem, config, num_sms), "group": config.group,
        }  # fmt: skip
        first: tuple[str, ...] = _PER_CALL
        if self._more:
            values |= {"z_stride": strides[3], "z_distance": strides[4]}
            first = (*_PER_CALL, *_MORE_PER_CALL)
        if guarded:
            first = (*_PER_CALL, "guard")
        order = (*first, *(name for name in arguments if name not in first))
        self._block = bytearray(struct.pack("@" + "".join(arguments[n] for n in order), *(values[n] for n in order)))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        offsets = _offsets(order)
        self._packed = (ctypes.c_void_p * len(arguments))(*(base + offsets[name] for name in arguments))
        self._result = ctypes.c_int32.from_buffer(self._block, offsets["result"])
        self._executor = executor  # keeps the module loaded
        self._function = executor.capi_func

    def launch(
        self, a: int, b: int, out: int, z: int, tensors: GemmTensors, stream: int, guard: Guard | None = None
    ) -> None:
        bias, scale_a, scale_b = tensors.bias, tensors.a_scale, tensors.b_scale
        _pack_call(
            self._block, 0, a, b, out,
            0 if bias is None else bias.data_ptr(),
            0 if scale_a is None else scale_a.data_ptr(),
            0 if scale_b is None else scale_b.data_ptr(),
            stream, tensors.alpha,
        )  # fmt: skip
        if self._more:
            bias_grad, scale, amax = tensors.bias_grad, tensors.out_scale, tensors.out_amax
            if amax is not None:
                amax.zero_()
            _pack_more(
                self._block, _MORE_AT, z,
                0 if bias_grad is None else bias_grad.data_ptr(),
                0 if scale is None else scale.data_ptr(),
                0 if amax is None else amax.data_ptr(),
            )  # fmt: skip
        if guard is not None:
            _pack_guard(self._block, _GUARD_AT, guard.flag.data_ptr())
        self._function(self._packed)
        if self._result.value:
            self._failed()

    def _failed(self) -> None:
        raise RuntimeError(f"the launch failed with CUDA error {self._result.value}")

    def relaunch(self, device: int | None, scale_bits: int) -> Relaunch:
        """`launch` on the device's current stream, of a product with one output and without a guard. scale_bits: those that must be 0
        in the addresses of scales."""
        block, function, packed, result, failed = self._block, self._function, self._packed, self._result, self._failed
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def again(a: int, b: int, out: int, bias: int, scale_a: int, scale_b: int, alpha: float) -> bool:
            if (a | b | out) & _ALIGN_BITS or (scale_a | scale_b) & scale_bits or current_device() != device:
                return False
            _pack_call(block, 0, a, b, out, bias, scale_a, scale_b, current_stream(device), alpha)
            function(packed)
            if result.value:
                failed()
            return True

        return again


@functools.lru_cache(maxsize=16)
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _executor(spec: Specialisation) -> Any:
    return cutedsl_cache.kernel(_compiled, spec, compile_kernel, lambda function: function.to(None))


def warm_up(problem: GemmProblem, config: HopperConfig | None = None) -> None:
    """Have the kernel for `problem` ready, so that neither the first call nor a graph's capture has to compile it.

    Operands and out count as aligned (16 bytes, rows too); others may need another kernel. Raises NotImplementedError
    where there is no kernel.
    """
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    chosen = config or default_config(problem)[0]
    swapped = chosen.few_rows
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        problem = _in_float32(problem)
        chosen = chosen if why_unsupported(problem, chosen) is None else default_config(problem)[0]
    vector = not swapped or problem.N % 4 == 0
    _executor(specialise(problem, chosen, vector=vector))


def run(
    problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors, guard: Guard | None = None
) -> list[str]:
    """Run the problem on the current device.

    Returns notes, such as which operand had to be copied. Raises NotImplementedError (why_unsupported), RuntimeError
    when a kernel would have to be compiled while a CUDA graph is captured.
    """
    a, b, out, z = tensors.a, tensors.b, tensors.out, tensors.preactivation
    assert out is not None
    z_stride, z_pointer = (0, 0) if z is None else (z.stride(0), z.data_ptr())
    device = a.device.index
    recent = _local.__dict__.get("recent")
    if recent is None:
        recent = _local.recent = {}
        _local.plans = {}
    # By identity: hashing a problem's fields takes longer than a launch. An entry keeps its objects, so no id returns.
    runs_when = None if guard is None else guard.runs_when
    key = id(problem), id(config), device, a.stride(0), b.stride(0), out.stride(0), z_stride, runs_when
    entry = recent.get(key)
    pointers = a.data_ptr(), b.data_ptr(), out.data_ptr(), z_pointer
    if entry is None or (pointers[0] | pointers[1] | pointers[2] | z_pointer) % ALIGN_BYTES:
        return _prepare(device, problem, config, tensors, out, guard)
    if problem.b_scaling in _SCALES_BY_TMA and any(
        scale.data_ptr() % ALIGN_BYTES for scale in (tensors.a_scale, tensors.b_scale) if scale is not None
    ):
        return _prepare(device, problem, config, tensors, out, guard)
    entry[0].launch(*pointers, tensors, torch._C._cuda_getCurrentRawStream(device), guard)
    return []


def relaunch(problem: GemmProblem, tensors: GemmTensors) -> Relaunch | None:
    """A call of `run` without config and guard, of a problem with one output, from addresses alone: for this thread, and for tensors
    of the shapes, strides, types and device of `tensors`, whose like `run` has found to need no preparation. Else None."""
    a, b, out = tensors.a, tensors.b, tensors.out
    assert out is not None and not more_outputs(problem)
    device = a.device.index
    key = id(problem), id(None), device, a.stride(0), b.stride(0), out.stride(0), 0, None
    entry = _local.__dict__.get("recent", {}).get(key)
    if entry is None:
        return None
    return entry[0].relaunch(device, _ALIGN_BITS if problem.b_scaling in _SCALES_BY_TMA else 0)


def _prepare(
    device: int,
    problem: GemmProblem,
    config: HopperConfig | None,
    tensors: GemmTensors,
    out: torch.Tensor,
    guard: Guard | None,
) -> list[str]:
    """The first call of its kind, and every call with operands that TMA cannot address."""
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    chosen = config or default_config(problem)[0]
    swapped = chosen.few_rows
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        # TMA would add numbers that are already rounded to out's type. Add in float32, round once.
        total = torch.empty((problem.M, problem.out_columns), dtype=torch.float32, device=out.device)
        plain = _in_float32(problem)
        fitting = config if config is None or why_unsupported(plain, config) is None else None
        bias_grad = tensors.bias_grad
        sums = None if bias_grad is None else torch.empty_like(bias_grad, dtype=torch.float32)
        notes = run(plain, fitting, tensors._replace(out=total, bias_grad=sums))
        out.copy_(total.add_(out))
        if bias_grad is not None and sums is not None:
            bias_grad.copy_(sums.add_(bias_grad))
        return [*notes, f"accumulated through a float32 buffer: out is {problem.out_dtype}"]
    notes = []
    a = _aligned("a", tensors.a, notes)
    if (reason := _halves_of_b(problem, tensors.b)) is not None:
        notes.append(f"b copied: {reason}")
        b = _apart(tensors.b)
    elif _scattered(problem, tensors.b):
        notes.append(SCATTERED)
        b = tensors.b.contiguous()
    else:
        b = _aligned("b", tensors.b, notes)
    target = out
    runs_when = None if guard is None else guard.runs_when
    for name, scale in _scales_by_tma(problem, swapped, tensors).items():
        tensors = tensors._replace(**{name: _aligned(f"{name[0]}'s scales", scale, notes)})  # type: ignore[arg-type]
    if not swapped and (reason := _misaligned(out) or _partial_chunk(out)) is not None:
        assert guard is None, reason
        notes.append(f"out written through a copy: {reason}")
        target = _padded(out, copy=problem.accumulate)
    z = z_target = tensors.preactivation
    parts = problem.N // problem.out_columns
    z_stride, z_distance = 0, ALIGN_BYTES
    if z is not None:
        if (reason := _misaligned_halves(z, parts)) is not None:
            notes.append(f"preactivation written through a copy: {reason}")
            z_target = _padded_halves(z, parts)
        assert z_target is not None
        halves = z_target.unflatten(1, (parts, -1)) if z_target is z else z_target
        z_stride, z_distance = (
            (halves.stride(0), halves.stride(1)) if parts > 1 else (_row_stride(z_target), ALIGN_BYTES)
        )
    strides = (_row_stride(a), _row_stride(b), _row_stride(target), z_stride, z_distance)
    vector = True
    if swapped:
        quad = 4 * out.element_size()
        vector = problem.N % 4 == 0 and (out.data_ptr() | strides[2] * out.element_size()) % quad == 0
    plans, recent = _local.plans, _local.recent
    key = problem, config, device, strides, vector, runs_when
    plan = plans.get(key)
    if plan is None:
        executor = _executor(specialise(problem, chosen, vector, runs_when))
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plan = plans[key] = _Plan(chosen, executor, problem, strides, _num_sms(device), guard is not None)
    if not notes and (vector or out.data_ptr() % ALIGN_BYTES == 0):
        # The next call with these strides and aligned bases needs none of the above.
        if len(recent) >= MAX_PLANS:
            recent.clear()
        given_stride = 0 if z is None else z.stride(0)
        recent[id(problem), id(config), device, a.stride(0), b.stride(0), out.stride(0), given_stride, runs_when] = (
            plan,
            problem,
            config,
        )
    stream = torch._C._cuda_getCurrentRawStream(device)
    z_pointer = 0 if z_target is None else z_target.data_ptr()
    plan.launch(a.data_ptr(), b.data_ptr(), target.data_ptr(), z_pointer, tensors, stream, guard)
    if target is not out:
        out.copy_(target)
    if z is not None and z_target is not None and z_target is not z:
        z.unflatten(1, (parts, -1)).copy_(z_target)
    return notes


def copies(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """What `run` would note about copies."""
    swapped = (config or default_config(problem)[0]).few_rows
    if problem.accumulate and problem.out_dtype != torch.float32 and not swapped:
        plain = _in_float32(problem)
        fitting = config if config is None or why_unsupported(plain, config) is None else None
        notes = copies(plain, fitting, tensors._replace(out=None))
        return [*notes, f"accumulated through a float32 buffer: out is {problem.out_dtype}"]
    notes = []
    scales = _scales_by_tma(problem, swapped, tensors)
    read = {"a": tensors.a, "b": tensors.b} | {f"{name[0]}'s scales": scale for name, scale in scales.items()}
    for name, tensor in read.items():
        if name == "b" and _scattered(problem, tensor):
            notes.append(SCATTERED)
            continue
        reason = _halves_of_b(problem, tensor) if name == "b" else None
        if (reason := reason or _misaligned(tensor)) is not None:
            notes.append(f"{name} copied: {reason}")
    out = tensors.out
    if out is None:
        out = torch.empty((problem.M, problem.out_columns), dtype=problem.out_dtype, device="meta")
    if not swapped and (reason := _misaligned(out) or _partial_chunk(out)) is not None:
        notes.append(f"out written through a copy: {reason}")
    z = tensors.preactivation
    if z is not None and (reason := _misaligned_halves(z, problem.N // problem.out_columns)) is not None:
        notes.append(f"preactivation written through a copy: {reason}")
    return notes


def _scales_by_tma(problem: GemmProblem, swapped: bool, tensors: GemmTensors) -> dict[str, torch.Tensor]:
    """Scales that TMA reads, by field; those in e8m0 as bytes."""
    if problem.b_scaling == "1x32":
        names = ["b_scale"]
    else:
        names = ["a_scale", "b_scale"] if problem.a_scaling == "1x128" and not swapped else []
    scales = {name: getattr(tensors, name) for name in names}
    return {
        name: scale.view(torch.uint8) if scale.element_size() == 1 else scale
        for name, scale in scales.items()
        if scale is not None
    }


def _in_float32(problem: GemmProblem) -> GemmProblem:
    """The product that is added to `out` afterwards, and the bias gradient likewise."""
    sums = None if problem.bias_grad_dtype is None else torch.float32
    return replace(problem, out_dtype=torch.float32, accumulate=False, bias_grad_dtype=sums)


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


def _misaligned_halves(z: torch.Tensor, parts: int) -> str | None:
    """Why TMA cannot store `parts` matrices that lie beside each other in z's rows."""
    if (reason := _misaligned(z)) is not None:
        return reason
    row_bytes = z.shape[1] // parts * z.element_size()
    each = "its rows" if parts == 1 else "halves of its rows"
    return f"{each}, {row_bytes} bytes, end inside a chunk of {ALIGN_BYTES}" if row_bytes % ALIGN_BYTES else None


def _halves_of_b(problem: GemmProblem, b: torch.Tensor) -> str | None:
    """Why TMA cannot load tiles of both halves of b's columns (sm90.Gemm.second_half)."""
    row_bytes = problem.N // 2 * b.element_size()
    if problem.activation != SWIGLU or problem.layout == "TN" or row_bytes % ALIGN_BYTES == 0:
        return None
    return f"the second half of its rows, after {row_bytes} bytes, begins inside a chunk of {ALIGN_BYTES}"


def _scattered(problem: GemmProblem, b: torch.Tensor) -> bool:
    """Whether b has gaps between rows, which its order does not know."""
    return problem.b_preshuffled and not b.is_contiguous()


def _apart(b: torch.Tensor) -> torch.Tensor:
    """[K, ...]: the halves of b's columns, each from a multiple of 16 bytes on."""
    halves = b.unflatten(1, (2, -1))
    chunk = ALIGN_BYTES // b.element_size()
    apart = b.new_empty((b.shape[0], 2, -(-halves.shape[2] // chunk) * chunk))
    apart[..., : halves.shape[2]] = halves
    return apart.flatten(1)


def _padded_halves(z: torch.Tensor, parts: int) -> torch.Tensor:
    """[M, parts, N / parts], each row of each part at a multiple of 16 bytes."""
    rows, columns = z.shape[0], z.shape[1] // parts
    chunk = ALIGN_BYTES // z.element_size()
    return z.new_empty((rows, parts, -(-columns // chunk) * chunk))[..., :columns]


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
