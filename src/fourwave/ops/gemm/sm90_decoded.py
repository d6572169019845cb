"""Products of operands that Hopper's matrix unit does not read: MX codes and float32, multiplied as bfloat16 (sm90_decode.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fourwave.backends import cutedsl_cache, guard
from fourwave.backends.cutedsl_call import PackedCall
from fourwave.ops.gemm import sm90_choice, sm90_config, sm90_launch
from fourwave.ops.gemm.preshuffled_mxfp4 import unshuffle_codes, unshuffle_scale
from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem, GemmTensors
from fourwave.ops.gemm.sm90_config import HopperConfig

ALIGN_BYTES = 16  # of rows of what is written, for TMA and for stores of 8 elements
LINE = 8
BLOCK = 32  # k of a scale
UNSHUFFLED = f"b put back in plain order: more than {sm90_config.PACKED_ROWS} rows, or an output that kernels for few rows lack, take decoded weights"
# Products of three parts of a and of b (sm90_decode): small ones first, since the matrix unit cuts off what is below a sum's last bit.
SLICES = {"a": (2, 0, 1, 1, 0, 0), "b": (0, 2, 1, 0, 1, 0)}
CODES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", PACKED_E2M1: "e2m1"}


@dataclass(frozen=True)
class DecodeSpec:
    """Everything that is fixed when a kernel is compiled. The fields are those of sm90_decode.Decode."""

    code: str | None
    k_last: bool
    whole_chunks: bool
    slices: tuple[int, ...]


_compiled: dict[DecodeSpec, PackedCall] = {}

# The launcher's run-time arguments (sm90_decode.Decode.__call__), in its order, with their formats.
_ARGUMENTS = {
    "x": "Q", "x_stride": "q", "scale": "Q", "out": "Q", "out_stride": "q", "copy_stride": "q", "R": "i", "C": "i", "rows": "i",
    "columns": "i", "stream": "Q",
}  # fmt: skip


def decodes(problem: GemmProblem) -> bool:
    """Whether there is a plain_problem; quick for those of which there is none."""
    candidate = "1x32" in (problem.a_scaling, problem.b_scaling) or problem.a_dtype == torch.float32
    return candidate and plain_problem(problem) is not None


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def plain_problem(problem: GemmProblem) -> GemmProblem | None:
    """The product of bfloat16 operands that stands for `problem`, without its bias gradient where that is summed apart; None
    where the operands are read as they are, or not at all."""
    if problem.a_dtype == problem.b_dtype == torch.float32 and problem.a_scaling is problem.b_scaling is None:
        k = len(SLICES["a"]) * _padded(problem.K)
        return replace(problem, a_dtype=torch.bfloat16, b_dtype=torch.bfloat16, K=k, bias_grad_dtype=None)
    if "1x32" in (problem.a_scaling, problem.b_scaling) and sm90_config.why_unsupported(problem, None) is None:
        return None  # few rows with weights in MX
    # Weights are converted in registers where they can be, whatever a is.
    for names in ("a", "ab"):
        changes: dict[str, Any] = {}
        for name in names:
            if getattr(problem, f"{name}_scaling") == "1x32" and getattr(problem, f"{name}_dtype") in CODES:
                changes |= {f"{name}_dtype": torch.bfloat16, f"{name}_scaling": None}
        if names == "ab" and problem.b_dtype == PACKED_E2M1:
            changes["b_preshuffled"] = False  # `run` puts it back in order; MXFP8's order is one for AMD
        plain = replace(problem, **changes)
        if changes and (names == "ab" or sm90_config.why_unsupported(plain, None) is None):
            return plain
    return None


def chosen_config(problem: GemmProblem, plain: GemmProblem) -> tuple[HopperConfig, list[str]]:
    """The configuration of `plain` where none is given, and why."""
    return sm90_choice.default_config(plain, "1x32" in (problem.a_scaling, problem.b_scaling))


def decoded_operands(problem: GemmProblem, plain: GemmProblem) -> list[str]:
    """Names of those that are written anew for `plain`."""
    return [name for name in "ab" if getattr(problem, f"{name}_dtype") != getattr(plain, f"{name}_dtype")]


def why_unsupported(problem: GemmProblem, config: HopperConfig | None) -> str | None:
    """sm90_config.why_unsupported, of problems that are decoded too."""
    plain = plain_problem(problem)
    if plain is None:
        return sm90_config.why_unsupported(problem, config)
    if problem.bias_grad_dtype not in (None, *sm90_config.OUTPUTS):
        return f"bias_grad is {problem.bias_grad_dtype}: the kernel writes float32, bfloat16 and float16"
    reason = sm90_config.why_unsupported(plain, config)
    return None if reason is None else f"with what is decoded in bfloat16: {reason}"


def describe(problem: GemmProblem) -> list[str]:
    """How the operands become those of `plain_problem`."""
    if problem.a_dtype == problem.b_dtype == torch.float32:
        return ["float32 operands as three bfloat16 each, six products along K (sm90_decode.py)"]
    plain = plain_problem(problem)
    assert plain is not None
    names = decoded_operands(problem, plain)
    return [f"{' and '.join(names)} decoded into bfloat16, exactly, by a kernel of its own (sm90_decode.py)"]


def run(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """As sm90_launch.run, on the current device."""
    plain, config, operands = prepared(problem, config)
    notes: list[str] = []
    if problem.b_preshuffled and not plain.b_preshuffled:
        problem, tensors = unshuffled(problem, tensors)
        notes = [UNSHUFFLED]
    used = tensors
    for name, operand in operands:
        t = decoded(operand, getattr(tensors, name), getattr(tensors, f"{name}_scale"))
        changes: dict[str, Any] = {name: t, f"{name}_scale": None}
        used = used._replace(**changes)
    a, b = used.a, used.b
    sums = None if plain.bias_grad_dtype is problem.bias_grad_dtype else tensors.bias_grad
    notes += sm90_launch.run(plain, config, used if sums is None else used._replace(bias_grad=None))
    if sums is not None:
        # Of the three parts of a, the first half of its copies, with a product that nobody reads.
        k, n = plain.K // 2, min(LINE, problem.N)
        out = torch.zeros(problem.M, n, dtype=torch.float32, device=a.device)
        apart = GemmTensors(a[:k], b[:k, :n], out, bias_grad=sums)
        notes += sm90_launch.run(_sums_problem(problem, k, n), None, apart)
    return notes


class Prepared(NamedTuple):
    """What `run` needs to know of a problem: `plain_problem`, its configuration, and what is written anew, by name."""

    plain: GemmProblem
    config: HopperConfig | None
    operands: tuple[tuple[str, Operand], ...]


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def prepared(problem: GemmProblem, config: HopperConfig | None) -> Prepared:
    """Raises NotImplementedError where there is no plain_problem."""
    plain = plain_problem(problem)
    if plain is None:
        raise NotImplementedError(why_unsupported(problem, config))
    if config is None and sm90_config.why_unsupported(plain, None) is None:
        config = chosen_config(problem, plain)[0]
    operands = tuple((name, Operand.of(problem, name)) for name in decoded_operands(problem, plain))
    return Prepared(plain, config, operands)


def unshuffled(problem: GemmProblem, tensors: GemmTensors) -> tuple[GemmProblem, GemmTensors]:
    """With b, that is preshuffled MXFP4, in plain order."""
    assert tensors.b_scale is not None
    scale = unshuffle_scale(tensors.b_scale)[:, : problem.K // BLOCK].contiguous()
    tensors = tensors._replace(b=unshuffle_codes(tensors.b), b_scale=scale)
    return replace(problem, b_preshuffled=False), tensors


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def _sums_problem(problem: GemmProblem, k: int, n: int) -> GemmProblem:
    return GemmProblem(
        problem.M, n, k, "NT", torch.bfloat16, torch.bfloat16, torch.float32, accumulate=problem.accumulate,
        device_type=problem.device_type, bias_grad_dtype=problem.bias_grad_dtype,
    )  # fmt: skip


def copies(problem: GemmProblem, config: HopperConfig | None, tensors: GemmTensors) -> list[str]:
    """What `run` would note about copies."""
    plain = plain_problem(problem)
    assert plain is not None
    config = config or chosen_config(problem, plain)[0]
    for name in decoded_operands(problem, plain):
        changes: dict[str, Any] = {name: Operand.of(problem, name).target("meta"), f"{name}_scale": None}
        tensors = tensors._replace(**changes)
    notes = [UNSHUFFLED] if problem.b_preshuffled and not plain.b_preshuffled else []
    return notes + sm90_launch.copies(plain, config, tensors)


@dataclass(frozen=True)
class Operand:
    """An operand as stored, [rows, columns], and what is written for it: `copies` of [copy_rows, copy_columns] beside each other
    along the reduction."""

    rows: int
    columns: int
    k_last: bool
    slices: tuple[int, ...]

    @staticmethod
    def of(problem: GemmProblem, name: str) -> Operand:
        k_last = problem.trans_b if name == "b" else not problem.trans_a
        slices = SLICES[name] if problem.a_dtype == problem.b_dtype == torch.float32 else ()
        return Operand(*(problem.b_shape if name == "b" else problem.a_shape), k_last, slices)

    @property
    def copy_rows(self) -> int:
        return _padded(self.rows) if self.slices and not self.k_last else self.rows

    @property
    def copy_columns(self) -> int:
        return _padded(self.columns) if self.slices and self.k_last else self.columns

    def target(self, device: torch.device | str) -> torch.Tensor:
        """The operand of plain_problem, not filled, its rows at multiples of 16 bytes."""
        copies = len(self.slices) or 1
        rows, columns = self.copy_rows, self.copy_columns
        rows, columns = (rows, copies * columns) if self.k_last else (copies * rows, columns)
        return torch.empty(rows, _padded(columns), dtype=torch.bfloat16, device=device)[:, :columns]


def decoded(operand: Operand, t: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """The operand of plain_problem; t itself where it is in bfloat16 already."""
    if t.dtype == torch.bfloat16:
        return t
    code = None if t.dtype == torch.float32 else CODES[t.dtype]
    bits = 32 if code is None else 4 if code == "e2m1" else 8
    stride = t.stride(0) * t.element_size()
    whole = operand.columns % LINE == 0 and (t.data_ptr() | stride) % min(ALIGN_BYTES, LINE * bits // 8) == 0
    out = operand.target(t.device)
    row_bytes = 2 * out.stride(0)
    copy_stride = 2 * operand.copy_columns if operand.k_last else operand.copy_rows * row_bytes
    kernel = _kernel(DecodeSpec(code, operand.k_last, whole, operand.slices))
    kernel.launch(
        t.data_ptr(), stride, 0 if scale is None else scale.data_ptr(), out.data_ptr(), row_bytes, copy_stride, operand.rows,
        operand.columns, operand.copy_rows, _padded(operand.copy_columns),
        torch._C._cuda_getCurrentRawStream(t.device.index),
    )  # fmt: skip
    return out


def _padded(length: int) -> int:
    return -(-length // LINE) * LINE


def _kernel(spec: DecodeSpec) -> PackedCall:
    return cutedsl_cache.kernel(
        _compiled, spec, compile_kernel, lambda function: PackedCall(function.to(None), _ARGUMENTS)
    )


def compile_kernel(spec: DecodeSpec, *, keep: bool = False) -> Any:
    """CuTe DSL's compiled function. Needs no GPU. keep: with the PTX and the cubin, also in the working directory."""
    guard.import_cutlass()
    import cuda.bindings.driver as cuda
    from cutlass import Int32, Int64, cute

    from fourwave.ops.gemm.sm90_decode import Decode

    options = [cute.GPUArch("sm_90a")]
    if keep:
        options += [cute.KeepPTX(), cute.KeepCUBIN()]
    kernel = Decode(spec.code, spec.k_last, spec.whole_chunks, spec.slices)
    wide, size = Int64(ALIGN_BYTES), Int32(1)
    return cute.compile[tuple(options)](
        kernel, wide, wide, wide, wide, wide, wide, size, size, size, size, cuda.CUstream(0)
    )  # fmt: skip
