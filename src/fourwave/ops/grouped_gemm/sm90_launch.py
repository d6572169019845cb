"""Launches the Hopper grouped kernels: prepares operands, compiles once per specialisation, calls with little host work."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.ops.gemm.sm90_config import FOURS_SMS, NUM_SMS
from fourwave.ops.gemm.sm90_launch import ALIGN_BYTES, MAX_PLANS, _num_sms
from fourwave.ops.grouped_gemm.problem import REDUCTION, GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.sm90_choice import default_config, round_cost
from fourwave.ops.grouped_gemm.sm90_config import (
    HopperGroupedConfig,
    bulk_scales,
    is_narrow,
    last_halves,
    promotes,
    store_columns,
    table_groups,
    whole_steps,
    why_unsupported,
)


@dataclass(frozen=True)
class GroupedSpecialisation:
    """Everything that is fixed when a kernel is compiled."""

    config: HopperGroupedConfig
    groups: int
    layout: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    sizes_dtype: torch.dtype
    a_scaling: str | None
    b_scaling: str | None
    by_group: bool
    bulk: bool
    promote: bool
    vector: bool
    wgrad: bool
    accumulate: bool
    last_halves: bool
    store_columns: int
    whole: bool


def specialise(
    problem: GroupedProblem, config: HopperGroupedConfig, vector: bool = True, aligned: bool = True
) -> GroupedSpecialisation:
    """vector: rows of out and their starts allow stores of several elements; aligned: a's scales begin at 16 bytes, of wgrad b's too."""
    bulk = aligned and bulk_scales(problem, config) is not None
    return GroupedSpecialisation(
        replace(config, band=1), table_groups(problem), problem.layout, problem.a_dtype, problem.b_dtype, problem.out_dtype,
        problem.bias_dtype, problem.m_sizes_dtype, problem.a_scaling, problem.b_scaling, problem.a_scale_layout == "groups",
        bulk, promotes(problem), vector, problem.split == REDUCTION, problem.accumulate,
        any(last_halves(problem, form) for form in (config, config.other) if form is not None), store_columns(problem),
        problem.split != REDUCTION and config.schedule == "rows" and promotes(problem) and whole_steps(problem),
    )  # fmt: skip


_compiled: dict[GroupedSpecialisation, Any] = {}
_local = threading.local()


def compile_kernel(spec: GroupedSpecialisation, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU. keep: as fourwave.ops.gemm.sm90_launch.compile_kernel."""
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    import cutlass
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.runtime import make_ptr

    from fourwave.blocks.cutedsl.loaders import TmaLoader
    from fourwave.blocks.cutedsl.ring_store import RingStore
    from fourwave.blocks.cutedsl.stacked import StackedLoader
    from fourwave.ops.grouped_gemm import sm90, sm90_swapped, sm90_wgrad

    types: dict[torch.dtype | None, Any] = {
        torch.float32: cutlass.Float32, torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, None: None,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2, torch.int32: cutlass.Int32,
        torch.int64: cutlass.Int64,
    }  # fmt: skip
    config = spec.config
    a_type, b_type, out_type = types[spec.a_dtype], types[spec.b_dtype], types[spec.out_dtype]
    bias_type = types[spec.bias_dtype]
    k_last = spec.layout == "TN"
    kernel: Any

    def swapped(config: HopperGroupedConfig) -> Any:
        return sm90_swapped.SwappedGroupedGemm(
            config.tile_n, config.tile_m, config.num_stages, config.split, spec.groups,
            StackedLoader(
                b_type, config.tile_n, config.tile_k, k_last, config.num_stages, 1, -(-config.tile_n // 64) * 64
            ),
            TmaLoader(a_type, config.tile_m, config.tile_k, True, config.num_stages, 1),
            out_type, bias_type, spec.a_scaling, spec.b_scaling, spec.by_group, spec.promote, spec.vector, config.overlap,
            config.single, round_cost(config), swapped(config.other) if config.other is not None else None,
        )  # fmt: skip

    def rows(config: HopperGroupedConfig) -> Any:
        narrow = is_narrow(config) and spec.last_halves
        return sm90.GroupedGemm(
            config.tile_m // 128, config.tile_n, config.num_stages, config.cluster_size, spec.groups,
            TmaLoader(a_type, 128, config.tile_k, True, config.num_stages * (config.tile_m // 128), config.cluster_n),
            StackedLoader(b_type, config.tile_n, config.tile_k, k_last, config.num_stages, config.cluster_m),
            out_type, bias_type, spec.a_scaling, spec.b_scaling, spec.by_group, spec.bulk, spec.promote, spec.vector, config.overlap,
            spec.last_halves and (config.tile_m * config.cluster_m > 128 or narrow), spec.store_columns, "m" if config.cluster_m > 1 else "n",
            spec.whole, narrow, config.late and spec.vector and spec.bulk, round_cost(config), rows(config.other) if config.other is not None else None,
        )  # fmt: skip

    if config.schedule == "swapped":
        kernel = swapped(config)
        out_align = spec.out_dtype.itemsize * (4 if spec.vector else 1)
    elif spec.wgrad:
        ring = None
        if config.ring and spec.vector and spec.out_dtype == torch.float32:
            addend = config.addend if spec.accumulate else None
            ring = RingStore(config.tile_n, config.ring, addend, spec.b_scaling == "row")
        kernel = sm90_wgrad.GroupedWgrad(
            config.tile_n, config.num_stages, spec.groups,
            TmaLoader(a_type, config.tile_m, config.tile_k, k_last, config.num_stages, config.cluster_n),
            TmaLoader(b_type, config.tile_n, config.tile_k, k_last, config.num_stages, config.cluster_m),
            out_type, spec.accumulate, spec.a_scaling, spec.b_scaling, spec.promote, spec.vector, config.overlap,
            spec.store_columns, config.cluster_size, "m" if config.cluster_m > 1 else "n", ring, spec.bulk,
        )  # fmt: skip
        out_align = ALIGN_BYTES if spec.vector else spec.out_dtype.itemsize
    else:
        kernel = rows(config)
        out_align = ALIGN_BYTES if spec.vector else spec.out_dtype.itemsize

    def pointer(dtype: Any, align: int | None = None) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    one, stride = Int32(1), Int64(ALIGN_BYTES)
    band = () if config.schedule == "swapped" else (one,)
    return cute.compile[tuple(options)](
        kernel, pointer(a_type, ALIGN_BYTES), pointer(b_type, ALIGN_BYTES), pointer(out_type, out_align),
        pointer(bias_type or out_type), pointer(Float32, ALIGN_BYTES if spec.bulk else None),
        pointer(Float32, ALIGN_BYTES if spec.bulk and spec.wgrad else None), pointer(types[spec.sizes_dtype]),
        one, one, one, one, stride, stride, stride, stride, one, one, one, one, *band, cuda.CUstream(0),
    )  # fmt: skip


# The launcher's run-time arguments, in its order, with their formats; the last is what it returns.
_ARGUMENTS = {
    "a": "Q", "b": "Q", "out": "Q", "bias": "Q", "scale_a": "Q", "scale_b": "Q", "sizes": "Q", "G": "i", "M": "i", "N": "i",
    "K": "i", "a_stride": "q", "b_stride": "q", "b_matrix": "q", "out_stride": "q", "scale_g": "i", "scale_n": "i",
    "scale_k": "i", "clusters": "i", "band": "i", "stream": "Q", "result": "i",
}  # fmt: skip
_PER_CALL = ("a", "b", "out", "bias", "scale_a", "scale_b", "sizes", "stream")
_ORDER = (*_PER_CALL, *(name for name in _ARGUMENTS if name not in _PER_CALL))
_pack_call = struct.Struct("@" + "".join(_ARGUMENTS[name] for name in _PER_CALL)).pack_into


class _Plan:
    """A compiled kernel with an argument block of its own, as fourwave.ops.gemm.sm90_launch._Plan."""

    def __init__(self, config: HopperGroupedConfig, executor: Any, values: dict[str, int]):
        names = [name for name in _ARGUMENTS if name != "band" or config.schedule != "swapped"]
        values = dict.fromkeys(_ARGUMENTS, 0) | values
        layout = "@" + "".join(_ARGUMENTS[n] for n in _ORDER)
        self._block = bytearray(struct.pack(layout, *(values[n] for n in _ORDER)))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        offsets = {
            name: struct.calcsize("@" + "".join(_ARGUMENTS[n] for n in _ORDER[: i + 1]))
            - struct.calcsize(_ARGUMENTS[name])
            for i, name in enumerate(_ORDER)
        }
        self._packed = (ctypes.c_void_p * len(names))(*(base + offsets[name] for name in names))
        self._result = ctypes.c_int32.from_buffer(self._block, offsets["result"])
        self._executor = executor  # keeps the module loaded
        self._function = executor.capi_func

    def launch(self, *arguments: int) -> None:
        """_PER_CALL's."""
        _pack_call(self._block, 0, *arguments)
        self._function(self._packed)
        if self._result.value:
            raise RuntimeError(f"the launch failed with CUDA error {self._result.value}")


def _executor(spec: GroupedSpecialisation) -> Any:
    return cutedsl_cache.kernel(_compiled, spec, compile_kernel, lambda function: function.to(None))


def warm_up(problem: GroupedProblem, config: HopperGroupedConfig | None = None) -> None:
    """Have the kernel for `problem` ready, as fourwave.ops.gemm.sm90_launch.warm_up."""
    chosen = _chosen(problem, config)
    if torch.cuda.is_available():
        chosen = _on_device(problem, chosen, _num_sms(torch.cuda.current_device()))
    _executor(specialise(problem, chosen, problem.N * problem.out_dtype.itemsize % _chunk(problem, chosen) == 0))


def _chunk(problem: GroupedProblem, config: HopperGroupedConfig) -> int:
    """Bytes of out that a thread stores at a time, where rows and their starts are multiples of them."""
    return ALIGN_BYTES if config.schedule == "rows" else 4 * problem.out_dtype.itemsize


@functools.lru_cache(maxsize=4096)
def _chosen(problem: GroupedProblem, config: HopperGroupedConfig | None) -> HopperGroupedConfig:
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    return config or default_config(problem)[0]


def run(problem: GroupedProblem, config: HopperGroupedConfig | None, tensors: GroupedTensors) -> list[str]:
    """Run the problem on the current device; returns notes, such as which operand had to be copied.

    Raises NotImplementedError (why_unsupported), RuntimeError when a kernel would have to be compiled while a CUDA graph is
    captured.
    """
    chosen = _chosen(problem, config)
    notes: list[str] = []
    a, b = _aligned("a", tensors.a, notes), _aligned("b", tensors.b, notes)
    out, sizes, bias = tensors.out, tensors.m_sizes.contiguous(), tensors.bias
    scale_a, scale_b = tensors.a_scale, tensors.b_scale
    if scale_b is not None and problem.b_scaling == "row":
        scale_b = scale_b.contiguous()  # of weights it may be an expanded one
    scale_strides = (0, 0, 0)
    if scale_b is not None and problem.b_scaling == "128x128":
        scale_strides = scale_b.stride()  # type: ignore[assignment]
        if max(s * (n - 1) for s, n in zip(scale_strides, scale_b.shape, strict=True)) >= 2**31:
            scale_b = scale_b.contiguous()
            scale_strides = scale_b.stride()  # type: ignore[assignment]
    elif scale_b is not None and problem.split == REDUCTION:
        scale_b = scale_b.contiguous()
    elif scale_b is not None and problem.b_scaling == "tensor" and scale_b.numel() > 1:
        scale_b = scale_b.contiguous()
        scale_strides = (1, 0, 0)
    stacked = out if problem.split == REDUCTION else b
    strides = (_row_stride(a), _row_stride(b), _matrix_stride(stacked), _row_stride(out))
    chunk = _chunk(problem, chosen)
    size = out.element_size()
    apart = strides[3] * size | (strides[2] * size if stacked is out else 0)
    vector = problem.N * size % chunk == 0 and (out.data_ptr() | apart) % chunk == 0
    device = a.device.index
    plans = _local.__dict__.get("plans")
    if plans is None:
        plans = _local.plans = {}
    starts = scale_a, scale_b if problem.split == REDUCTION else None
    aligned = all(scale is None or scale.data_ptr() % ALIGN_BYTES == 0 for scale in starts)
    key = problem, config, device, strides, scale_strides, vector, aligned
    plan = plans.get(key)
    if plan is None:
        chosen = _on_device(problem, chosen, _num_sms(device))
        if len(plans) >= MAX_PLANS:
            plans.clear()
        executor = _executor(specialise(problem, chosen, vector, aligned))
        values = {
            "G": problem.G, "M": problem.M, "N": problem.N, "K": problem.K, "a_stride": strides[0], "b_stride": strides[1],
            "b_matrix": strides[2], "out_stride": strides[3], "scale_g": scale_strides[0], "scale_n": scale_strides[1],
            "scale_k": scale_strides[2], "clusters": _clusters(problem, chosen, _num_sms(device)), "band": chosen.band,
        }  # fmt: skip
        plan = plans[key] = _Plan(chosen, executor, values)
    plan.launch(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if scale_a is None else scale_a.data_ptr(), 0 if scale_b is None else scale_b.data_ptr(), sizes.data_ptr(),
        torch._C._cuda_getCurrentRawStream(device),
    )  # fmt: skip
    return notes


def _clusters(problem: GroupedProblem, config: HopperGroupedConfig, num_sms: int) -> int:
    """Clusters of the grid: no more than the tiles that there can be."""
    if problem.split == REDUCTION:
        high = -(-problem.M // (config.tile_m * config.cluster_m))
        wide = -(-problem.N // (config.tile_n * config.cluster_n))
        return max(1, min(num_sms // config.cluster_size, problem.G * high * wide))
    if config.cluster_size > 2:
        num_sms = num_sms * FOURS_SMS // NUM_SMS
    tiles = max(
        (problem.M // (form.tile_m * form.cluster_m) + min(problem.G, problem.M))
        * -(-problem.N // (form.tile_n * form.cluster_n))
        for form in (config, config.other)
        if form is not None
    )
    return max(1, min(tiles, num_sms // config.cluster_size))


def _on_device(problem: GroupedProblem, config: HopperGroupedConfig, num_sms: int) -> HopperGroupedConfig:
    """config, on a GPU that may have fewer multiprocessors than NUM_SMS: single tiles want a cluster each."""
    if config.single and _clusters(problem, config, num_sms) < -(-problem.N // config.tile_n):
        return replace(config, single=False)
    return config


def copies(problem: GroupedProblem, config: HopperGroupedConfig | None, tensors: GroupedTensors) -> list[str]:
    """What `run` would note about copies."""
    named = (("a", tensors.a), ("b", tensors.b))
    return [f"{name} copied: {reason}" for name, t in named if (reason := _misaligned(t)) is not None]


def _row_stride(tensor: torch.Tensor) -> int:
    """Elements between rows; where there is one row, any number that TMA takes."""
    if tensor.shape[-2] > 1:
        return tensor.stride(-2)
    chunk = ALIGN_BYTES // tensor.element_size()
    return -(-tensor.shape[-1] // chunk) * chunk


def _matrix_stride(tensor: torch.Tensor) -> int:
    if tensor.shape[0] > 1:
        return tensor.stride(0)
    return _row_stride(tensor) * tensor.shape[-2]


def _misaligned(tensor: torch.Tensor) -> str | None:
    if tensor.data_ptr() % ALIGN_BYTES:
        return f"base not {ALIGN_BYTES}-byte aligned"
    if _row_stride(tensor) * tensor.element_size() % ALIGN_BYTES:
        return f"row stride not a multiple of {ALIGN_BYTES} bytes"
    if tensor.dim() == 3 and _matrix_stride(tensor) * tensor.element_size() % ALIGN_BYTES:
        return f"stride of matrices not a multiple of {ALIGN_BYTES} bytes"
    return None


def _aligned(name: str, tensor: torch.Tensor, notes: list[str]) -> torch.Tensor:
    reason = _misaligned(tensor)
    if reason is None:
        return tensor
    notes.append(f"{name} copied: {reason}")
    chunk = ALIGN_BYTES // tensor.element_size()
    columns = tensor.shape[-1]
    padded = tensor.new_empty((*tensor.shape[:-1], -(-columns // chunk) * chunk))[..., :columns]
    return padded.copy_(tensor)
