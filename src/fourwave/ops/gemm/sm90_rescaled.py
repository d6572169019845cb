"""Products of MXFP4 with MXFP4 as products of FP8 with one scale for each row (sm90_rescale.py), at twice the rate of bfloat16.

The values are the same where a row's scales lie within 2^SPREAD of each other. Whether they do is known on the device only, so both
ways are launched, and a word there, `flag`, says which one has something to do:

    rescale   codes in E4M3, factors of rows; sets the flag where a row does not fit
    product   FP8, leaves at once where the flag is set
    decode    a and b in bfloat16, over the codes in E4M3; leaves at once where it is not set
    product   bfloat16, the same
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.backends.cutedsl_call import PackedCall
from fourwave.ops.gemm import sm90_config, sm90_decoded, sm90_launch
from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem, GemmTensors
from fourwave.ops.gemm.sm90_config import HopperConfig
from fourwave.ops.gemm.sm90_decoded import BLOCK
from fourwave.ops.gemm.sm90_launch import Guard

SPREAD = 14  # log2 of the largest over the least scale of a row
# The epilogue multiplies a sum of up to 2^49 by alpha and a's factor, then by b's: neither may leave float32's range where the
# result does not.
LIMIT = 48  # exponent of a row's factor, at most
ALPHA_LIMIT = 2.0**16
LEAST_VOLUME = 2**34  # M * N * K: below it three launches more may outweigh what is won
PRODUCT_STEP = 128  # tile_k of the FP8 product
WORDS = 4  # float32 before the factors: the flag, and what keeps them at a multiple of 16 bytes
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class RescaleSpec:
    """kernel: "Rescale" or "Decode", of sm90_rescale.py."""

    kernel: str


# The launchers' run-time arguments (sm90_rescale.*.__call__), in their order, with their formats.
_OPERANDS = {
    "a": "Q", "a_stride": "q", "a_scale": "Q", "a_out": "Q", "b": "Q", "b_stride": "q", "b_scale": "Q", "b_out": "Q"
}  # fmt: skip
_ARGUMENTS = {
    "Rescale": {**_OPERANDS, "factors": "Q", "flag": "Q", "M": "i", "N": "i", "K": "i", "stream": "Q"},
    "Decode": {**_OPERANDS, "flag": "Q", "M": "i", "N": "i", "K": "i", "ctas": "i", "stream": "Q"},
}
TILE = 128  # rows and columns that a CTA decodes
DECODE_CTAS = 4 * sm90_config.NUM_SMS  # at most


def is_pair(problem: GemmProblem) -> bool:
    """Whether both operands are MXFP4."""
    return problem.a_scaling == problem.b_scaling == "1x32" and problem.a_dtype == problem.b_dtype == PACKED_E2M1


def _asks(config: HopperConfig) -> bool:
    """Whether it is one for FP8: swapped tiles with that step convert weights in registers."""
    return getattr(config, "tile_k", None) == PRODUCT_STEP and not getattr(config, "few_rows", False)


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def why_not(problem: GemmProblem, config: HopperConfig | None) -> str | None:
    """Why a product of MXFP4 with MXFP4 is not one of FP8, or None. A config with tile_k=128 asks for it whatever its size."""
    if config is not None and not _asks(config):
        return "the configuration is one for bfloat16"
    if problem.layout != "TN" or problem.K % BLOCK:
        return f"{problem.layout} with K={problem.K}: FP8 operands have K contiguous, here in whole blocks of {BLOCK}"
    if problem.out_dtype not in sm90_config.DTYPES:
        return f"out is {problem.out_dtype}: FP8 sums have fewer bits than float32's"
    if problem.accumulate or sm90_config.more_outputs(problem):
        return "accumulation, a saved preactivation, a bias gradient and a quantized result are not there for two products of one call"
    if problem.out_columns * problem.out_dtype.itemsize % sm90_launch.ALIGN_BYTES:
        return f"rows of out, {problem.out_columns} columns, end inside a chunk of {sm90_launch.ALIGN_BYTES} bytes"
    if problem.M <= sm90_config.PACKED_ROWS:
        return f"{problem.M} rows: taken for more than {sm90_config.PACKED_ROWS}, up to which weights may be converted in registers"
    if problem.M + problem.N > sm90_config.MAX_EXTENT:
        return f"{problem.M} + {problem.N} rows: numbered in 32 bits"
    if config is None and problem.M * problem.N * problem.K < LEAST_VOLUME:
        return f"M * N * K = {problem.M * problem.N * problem.K:.2g}: pays from {LEAST_VOLUME:.2g} on"
    return sm90_config.why_unsupported(_as_fp8(problem), config)


def fp8_problem(problem: GemmProblem, config: HopperConfig | None) -> GemmProblem | None:
    """The product of E4M3 operands that stands for `problem`, or None where it is not done so; quick for other pairs."""
    if not is_pair(problem) or why_not(problem, config) is not None:
        return None
    return _as_fp8(problem)


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def _as_fp8(problem: GemmProblem) -> GemmProblem:
    return replace(problem, a_dtype=E4M3, b_dtype=E4M3, a_scaling="row", b_scaling="row", b_preshuffled=False)


def why_unsupported(problem: GemmProblem, config: HopperConfig | None) -> str | None:
    """sm90_decoded.why_unsupported, and of configurations of the FP8 product."""
    if not is_pair(problem) or config is None or not _asks(config):
        return sm90_decoded.why_unsupported(problem, config)
    return why_not(problem, config)


def describe(problem: GemmProblem, config: HopperConfig | None) -> list[str]:
    """Of a pair of MXFP4: which way it takes, and why."""
    if fp8_problem(problem, config) is None:
        reason = why_not(problem, config)
        return [*sm90_decoded.describe(problem), f"in bfloat16 and not in FP8: {reason}"]
    return [
        "a and b written in E4M3 with a power of two for each row, exactly, by a kernel of its own (sm90_rescale.py), sums as those of FP8",
        f"decoded into bfloat16 instead, as the device finds, where scales of a row differ by more than 2^{SPREAD}",
    ]


def run(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """As sm90_launch.run, of problems that have an fp8_problem."""
    if (reason := _why_not_alpha(tensors.alpha)) is not None:
        if config is not None:
            raise NotImplementedError(reason)
        return [reason, *sm90_decoded.run(problem, None, tensors)]
    fp8, given = fp8_problem(problem, config), tensors.out
    assert fp8 is not None and given is not None
    in_bf16 = sm90_decoded.prepared(problem, None)
    notes: list[str] = []
    if problem.b_preshuffled:
        problem, tensors = sm90_decoded.unshuffled(problem, tensors)
        notes.append(sm90_decoded.UNSHUFFLED)
    M, N, K = problem.M, problem.N, problem.K
    a, b = (sm90_launch._aligned(name, getattr(tensors, name), notes) for name in "ab")
    a_scale, b_scale = tensors.a_scale, tensors.b_scale
    assert a_scale is not None and b_scale is not None
    out = given
    if (reason := sm90_launch._misaligned(out)) is not None:
        notes.append(f"out written through a copy: {reason}")
        out = sm90_launch._padded(out, copy=False)
    made = rescaled(a, a_scale, b, b_scale)
    codes, factors, flag = (made.buffers[0][:M], made.buffers[1][:N]), made.factors, made.flag
    used = tensors._replace(a=codes[0], b=codes[1], a_scale=factors[:M], b_scale=factors[M:], out=out)
    notes += sm90_launch.run(fp8, config, used, Guard(flag, 0))
    ctas = min(DECODE_CTAS, (-(-M // TILE) + -(-N // TILE)) * -(-K // TILE))
    _kernel("Decode").launch(
        *_addresses(a, a_scale, codes[0], b, b_scale, codes[1]), flag.data_ptr(), M, N, K, ctas,
        torch._C._cuda_getCurrentRawStream(a.device.index),
    )  # fmt: skip
    values = [buffer.view(torch.bfloat16).view(-1, K) for buffer in made.buffers]
    used = tensors._replace(a=values[0], b=values[1], a_scale=None, b_scale=None, out=out)
    notes += sm90_launch.run(in_bf16.plain, in_bf16.config, used, Guard(flag, 1))
    if out is not given:
        given.copy_(out)
    return notes


def _why_not_alpha(alpha: float) -> str | None:
    if not alpha or 1 / ALPHA_LIMIT <= abs(alpha) <= ALPHA_LIMIT:
        return None
    return f"in bfloat16 and not in FP8: alpha={alpha:g} is not between {1 / ALPHA_LIMIT:g} and {ALPHA_LIMIT:g}"


class Rescaled(NamedTuple):
    """buffers  of a and b, each [2 * rows, K] in E4M3, of which the codes are the first half: with all of it there is room for bfloat16
    factors  of the rows of a, then of b: value = code * factor
    flag     [1] int32, not 0 where some row does not fit: codes and factors mean nothing then"""

    buffers: tuple[torch.Tensor, torch.Tensor]
    factors: torch.Tensor
    flag: torch.Tensor


def rescaled(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> Rescaled:
    """a [M, K / 2], b [N, K / 2]: pairs of e2m1 codes, bases and rows at multiples of 8 bytes; scales [M or N, K / 32] without gaps."""
    (M, N), K = (a.shape[0], b.shape[0]), 2 * a.shape[1]
    a_out, b_out = (torch.empty(2 * rows, K, dtype=E4M3, device=a.device) for rows in (M, N))
    found = torch.zeros(WORDS + M + N, dtype=torch.float32, device=a.device)
    made = Rescaled((a_out, b_out), found[WORDS:], found.view(torch.int32)[:1])
    _kernel("Rescale").launch(
        *_addresses(a, a_scale, a_out, b, b_scale, b_out), made.factors.data_ptr(), found.data_ptr(), M, N, K,
        torch._C._cuda_getCurrentRawStream(a.device.index),
    )  # fmt: skip
    return made


def _addresses(
    a: torch.Tensor, a_scale: torch.Tensor, a_out: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, b_out: torch.Tensor
) -> tuple[int, ...]:  # fmt: skip
    """Of _OPERANDS."""
    return (
        a.data_ptr(), a.stride(0), a_scale.data_ptr(), a_out.data_ptr(), b.data_ptr(), b.stride(0), b_scale.data_ptr(),
        b_out.data_ptr(),
    )  # fmt: skip


def copies(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """What `run` would note about copies."""
    if config is None and (reason := _why_not_alpha(tensors.alpha)) is not None:
        return [reason, *sm90_decoded.copies(problem, None, tensors)]
    if problem.b_preshuffled:
        notes, names = [sm90_decoded.UNSHUFFLED], "a"
    else:
        notes, names = [], "ab"
    for name in names:
        if (reason := sm90_launch._misaligned(getattr(tensors, name))) is not None:
            notes.append(f"{name} copied: {reason}")
    if tensors.out is not None and (reason := sm90_launch._misaligned(tensors.out)) is not None:
        notes.append(f"out written through a copy: {reason}")
    return notes


_compiled: dict[RescaleSpec, PackedCall] = {}


def _kernel(name: str) -> PackedCall:
    return cutedsl_cache.kernel(
        _compiled, RescaleSpec(name), compile_kernel, lambda function: PackedCall(function.to(None), _ARGUMENTS[name])
    )


def compile_kernel(spec: RescaleSpec, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU. keep: with the PTX and the cubin, also in the working directory."""
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64, cute

    from fourwave.ops.gemm.sm90_rescale import Decode, Rescale

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    size, address = Int32(1), Int64(sm90_launch.ALIGN_BYTES)
    examples = {"Q": address, "q": address, "i": size}
    kinds = [kind for name, kind in _ARGUMENTS[spec.kernel].items() if name != "stream"]
    kernel = {"Rescale": Rescale, "Decode": Decode}[spec.kernel]()
    return cute.compile[tuple(options)](kernel, *[examples[kind] for kind in kinds], cuda.CUstream(0))
