"""PyTorch's own GEMM: CPU, cuBLASLt, hipBLASLt. Always there, and what the other backends are compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fourwave.backends.base import Backend, Description
from fourwave.ops.gemm.problem import FP8
from fourwave.ops.gemm.reference import activate

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

_HAS_MM_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # mm(a, b, out_dtype=float32) on CUDA, torch 2.8 and later


def _tf32_allowed() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _inexact_fp32() -> bool:
    """Whether PyTorch may multiply float32 on the CPU in bf16 or TF32: torch.set_float32_matmul_precision("medium")."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)  # torch 2.9 and later
    if getter is None:
        return torch.get_float32_matmul_precision() != "highest"
    return getter("mkldnn", "matmul") not in ("ieee", "none")


class NativeBackend(Backend):
    """torch.mm.

    8-bit floats are converted to float32, which is exact, and multiplied as float32.
    bf16 and fp16 are accumulated in float32; alpha, bias, activation and the addend are applied in float32, and the only
    rounding is the one to out_dtype. One exception: on a GPU, when out_dtype is the operands' and there is no epilogue,
    the call is torch.mm as it is, so torch.backends.cuda.matmul.allow_{bf16,fp16}_reduced_precision_reduction, which
    PyTorch turns on, lets the library round partial sums of a split K.
    fp32 is multiplied in fp32; on a GPU in TF32 only where the user asked PyTorch for it
    (torch.backends.cuda.matmul.allow_tf32, off by default). On the CPU torch.set_float32_matmul_precision does not change
    that: where it would let PyTorch round the operands, products are computed in float64. Autocast changes nothing either.
    """

    name = "native"

    def unavailable(self, arch: str | None = None) -> str | None:
        return None

    def why_unsupported(self, problem: GemmProblem, config: GemmConfig | None) -> str | None:
        if config is not None:
            return f"native takes no config; {config!r} would be ignored"
        return problem.why_refused()

    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        reasons = []
        if problem.device_type == "cpu" and _inexact_fp32():
            why = "multiplied in fp64, epilogue in fp32: PyTorch's setting would let it round fp32 operands"
            return Description(kernel="torch.mm", reasons=[why])
        on_gpu = problem.device_type == "cuda"
        if problem.precision == FP8:
            reasons.append("converted to fp32, which is exact; accumulated in fp32, one rounding to the output")
        elif problem.precision != "fp32":
            if on_gpu and self._is_plain(problem) and problem.out_dtype == problem.a_dtype:
                reasons.append(
                    f"accumulated by the GPU's library in fp32, and partial sums as "
                    f"torch.backends.cuda.matmul.allow_{problem.precision}_reduced_precision_reduction allows"
                )
            else:
                reasons.append("accumulated in fp32, epilogue in fp32, one rounding to the output")
        elif on_gpu and _tf32_allowed():
            reasons.append("TF32: torch.backends.cuda.matmul.allow_tf32 is set")
        else:
            reasons.append("true fp32")
        return Description(kernel="torch.mm", reasons=reasons)

    @staticmethod
    def _is_plain(problem: GemmProblem) -> bool:
        return problem.bias_dtype is None and problem.activation is None and not problem.accumulate

    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        if torch.is_autocast_enabled(problem.device_type):
            with torch.autocast(problem.device_type, enabled=False):
                return self._run(problem, tensors)
        return self._run(problem, tensors)

    def _run(self, problem: GemmProblem, tensors: GemmTensors) -> list[str]:
        a, b, out, bias, alpha, *_ = tensors
        assert out is not None
        op_a = a.mT if problem.trans_a else a
        op_b = b.mT if problem.trans_b else b
        is_fp32 = problem.a_dtype == torch.float32
        # The setting is the process's: changing it for one product would race with other threads.
        widen = problem.device_type == "cpu" and _inexact_fp32()
        if (
            not widen
            and alpha == 1.0
            and problem.out_dtype == problem.a_dtype
            and (is_fp32 or problem.device_type == "cuda")
            and self._is_plain(problem)
        ):
            torch.mm(op_a, op_b, out=out)
            return []
        if widen:
            acc = torch.mm(op_a.double(), op_b.double()).float()
        elif is_fp32:
            acc = torch.mm(op_a, op_b)
        elif problem.device_type == "cuda" and _HAS_MM_OUT_DTYPE and problem.precision != FP8:
            acc = torch.mm(op_a, op_b, out_dtype=torch.float32)
        else:
            # Products of such values are exact in fp32 (and TF32 holds the formats' significands).
            acc = torch.mm(op_a.float(), op_b.float())
        if alpha != 1.0:
            acc.mul_(alpha)
        if bias is not None:
            acc.add_(bias)  # promotes a bf16 or fp16 bias to float32
        acc = activate(acc, problem.activation)
        if problem.accumulate:
            acc.add_(out)
        out.copy_(acc)
        return []
