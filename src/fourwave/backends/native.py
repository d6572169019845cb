"""PyTorch's own GEMM: CPU, cuBLASLt, hipBLASLt. Always there, and what the other backends are compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fourwave import formats
from fourwave.backends.base import Backend, Description
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm.preshuffled_mxfp4 import unshuffle_codes, unshuffle_scale
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1
from fourwave.ops.gemm.reference import activate
from fourwave.ops.grouped_gemm.preshuffle import unshuffle

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors

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
    """torch.mm; torch._scaled_mm for 8-bit floats with one scale each, where the GPU's library takes them.

    What torch._scaled_mm accumulates on Hopper keeps about 14 bits between promotions (testing.bounds.hopper_fp8_u_acc), and
    cuBLASLt multiplies the two scales with each other: of a product past float32's range all sums are Inf or NaN.
    Other operands of 8 bits and less are dequantized first, to float32, or for MX on a GPU to bfloat16: exact but for
    "1x128" and "128x128", whose values are rounded to float32.
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
        if problem.batch_invariant:
            return "batch_invariant: the order in which PyTorch sums may depend on M (the AMD and simulated kernels have it)"
        return None

    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        reasons = ["preshuffled weights are brought into plain order first, on every call"] * problem.b_preshuffled
        if problem.device_type == "cpu" and _inexact_fp32():
            why = "multiplied in fp64, epilogue in fp32: PyTorch's setting would let it round fp32 operands"
            return Description(kernel="torch.mm", reasons=[*reasons, why])
        on_gpu = problem.device_type == "cuda"
        if problem.precision not in ("bf16", "fp16", "fp32"):
            if why_no_scaled_mm(problem) is None:
                why = "torch._scaled_mm, or dequantized where rows are not 16-byte aligned; epilogue in fp32"
                return Description(kernel="torch._scaled_mm", reasons=[*reasons, why])
            reasons.append("dequantized, then torch.mm; accumulated in fp32, one rounding to the output")
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
        extras = (problem.bias_dtype, problem.activation, problem.preactivation_dtype, problem.bias_grad_dtype)
        return not problem.accumulate and all(extra is None for extra in extras)

    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        if torch.is_autocast_enabled(problem.device_type):
            with torch.autocast(problem.device_type, enabled=False):
                return self._run(problem, tensors)
        return self._run(problem, tensors)

    def why_grouped_unsupported(self, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
        return None if config is None else f"native takes no config; {config!r} would be ignored"

    def describe_grouped_gemm(self, problem: GroupedProblem, config: GroupedConfig | None) -> Description:
        from fourwave.ops.grouped_gemm import native

        kernel, reasons = native.describe(problem)
        return Description(kernel=kernel, reasons=reasons)

    def run_grouped_gemm(
        self, problem: GroupedProblem, config: GroupedConfig | None, tensors: GroupedTensors
    ) -> list[str]:
        from fourwave.ops.grouped_gemm import native

        return native.run(problem, tensors)

    def _run(self, problem: GemmProblem, tensors: GemmTensors) -> list[str]:
        if problem.b_preshuffled:
            problem, tensors = _in_plain_order(problem, tensors)
        a, b, out = tensors.a, tensors.b, tensors.out
        is_fp32 = problem.a_dtype == problem.b_dtype == torch.float32
        # The setting is the process's: changing it for one product would race with other threads.
        widen = problem.device_type == "cpu" and _inexact_fp32()
        if (
            not widen
            and tensors.alpha == 1.0
            and problem.precision in ("bf16", "fp16", "fp32")
            and problem.out_dtype == problem.a_dtype
            and (is_fp32 or problem.device_type == "cuda")
            and self._is_plain(problem)
        ):
            torch.mm(a.mT if problem.trans_a else a, b.mT if problem.trans_b else b, out=out)
            return []
        if why_no_scaled_mm(problem, tensors) is None:
            acc = _scaled_mm(problem, tensors)
        else:
            a, b = (_values(t, scale, scaling, k_last, problem) for t, scale, scaling, k_last in (
                (a, tensors.a_scale, problem.a_scaling, not problem.trans_a),
                (b, tensors.b_scale, problem.b_scaling, problem.trans_b),
            ))  # fmt: skip
            op_a, op_b = a.mT if problem.trans_a else a, b.mT if problem.trans_b else b
            if widen:
                acc = torch.mm(op_a.double(), op_b.double()).float()
            elif is_fp32:
                acc = torch.mm(op_a, op_b)
            elif problem.device_type == "cuda" and _HAS_MM_OUT_DTYPE and op_a.dtype == op_b.dtype != torch.float32:
                acc = torch.mm(op_a, op_b, out_dtype=torch.float32)
            else:
                # Products of 16- and 8-bit floats are exact in fp32 (and TF32 holds their significands).
                acc = torch.mm(op_a.float(), op_b.float())
            for scale, scaling, dim in (
                (tensors.a_scale, problem.a_scaling, 1),
                (tensors.b_scale, problem.b_scaling, 0),
            ):
                if scaling in ("tensor", "row"):
                    assert scale is not None
                    acc.mul_(scale if scaling == "tensor" else scale.unsqueeze(dim))
        finish(problem, acc, tensors)
        return []


def finish(problem: GemmProblem, acc: torch.Tensor, tensors: GemmTensors) -> None:
    """Write every output from the sums [M, N] in float32, scales of operands included; acc is used up."""
    if tensors.alpha != 1.0:
        acc.mul_(tensors.alpha)
    if tensors.bias is not None:
        acc.add_(tensors.bias)  # promotes a bf16 or fp16 bias to float32
    if tensors.preactivation is not None:
        tensors.preactivation.view(acc.shape).copy_(acc)
    y = activate(acc, problem.activation)
    write_bias_grad(problem, tensors)
    if problem.out_scaling is not None:
        _quantize_out(problem, y, tensors)
        return
    assert tensors.out is not None
    if problem.accumulate:
        y.add_(tensors.out)
    tensors.out.copy_(y)


def _in_plain_order(problem: GemmProblem, tensors: GemmTensors) -> tuple[GemmProblem, GemmTensors]:
    """The call without preshuffled weights and packed scales."""
    scale = tensors.b_scale
    if problem.b_scaling == "1x32":
        assert scale is not None
        if tensors.b.dtype == PACKED_E2M1:
            scale = unshuffle_scale(scale)
        scale = scale[:, : -(-problem.K // 32)]
    plain_order = unshuffle_codes if tensors.b.dtype == PACKED_E2M1 else unshuffle
    plain = tensors._replace(b=plain_order(tensors.b), b_scale=scale)
    return replace(problem, b_preshuffled=False), plain


def write_bias_grad(problem: GemmProblem, tensors: GemmTensors) -> None:
    """The sum of op(a) over K, where it is asked for."""
    if tensors.bias_grad is not None:
        total = _values(tensors.a, tensors.a_scale, problem.a_scaling, False, problem).float().sum(0)
        if problem.a_scaling in ("tensor", "row"):
            assert tensors.a_scale is not None
            total = total * tensors.a_scale
        tensors.bias_grad.copy_(total + tensors.bias_grad if problem.accumulate else total)


def _quantize_out(problem: GemmProblem, y: torch.Tensor, tensors: GemmTensors) -> None:
    from fourwave.quantize import quantize

    element = "e5m2" if FLOAT8[problem.out_dtype].startswith("e5m2") else "e4m3"
    fnuz = FLOAT8[problem.out_dtype].endswith("fnuz")
    if problem.out_scaling == "tensor":
        q = quantize(y, f"fp8_{element}", scale=tensors.out_scale, fnuz=fnuz, backend="native")
        pairs = [(tensors.out, q.data), (tensors.out_amax, q.amax)]
    else:
        q = quantize(
            y, f"mxfp8_{element}", problem.out_direction, scale_rule=problem.out_scale_rule, backend="native"
        )  # fmt: skip
        pairs = [
            (tensors.out, q.data), (tensors.out_scale, q.scale),
            (tensors.out_columnwise, q.columnwise_data), (tensors.out_columnwise_scale, q.columnwise_scale),
        ]  # fmt: skip
    for target, value in pairs:
        if target is not None:
            assert value is not None
            target.view(value.shape).copy_(value)


def _values(
    t: torch.Tensor, scale: torch.Tensor | None, scaling: str | None, k_last: bool, problem: GemmProblem
) -> torch.Tensor:
    """An operand as numbers to multiply, scales "tensor" and "row" left for the sums.

    MX on a GPU: bfloat16, which holds every code times a power of two within its range. Else float32: exact for MX,
    one rounding for blocks with float32 scales.
    """
    if t.dtype == PACKED_E2M1:
        values = formats.decode(formats.unpack_e2m1(t), formats.E2M1, known=True)
    elif t.dtype in FLOAT8:
        values = t.float()
    else:
        return t
    if scale is None or scaling in ("tensor", "row"):
        return values
    assert scaling is not None
    values = values * expand_scale(scale, scaling, tuple(values.shape), k_last, torch.float32)
    return values.bfloat16() if scaling == "1x32" and problem.device_type == "cuda" else values


def why_no_scaled_mm(problem: GemmProblem, tensors: GemmTensors | None = None) -> str | None:
    """Why torch._scaled_mm (cuBLASLt, hipBLASLt) does not multiply this, or None: 8-bit floats with one scale each on a GPU."""
    if problem.device_type != "cuda" or (problem.a_scaling, problem.b_scaling) != ("tensor", "tensor"):
        return "one scale for each operand, on a GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 9):
        return "compute capability 8.9 or higher"
    if problem.layout != "TN" or problem.a_dtype == problem.b_dtype == torch.float8_e5m2:
        return "TN, and not e5m2 with e5m2"
    if problem.K % 16 or problem.N % 16:
        return "K and N multiples of 16"
    if tensors is not None and any(t.data_ptr() % 16 or t.stride(0) % 16 for t in (tensors.a, tensors.b)):
        return "16-byte aligned rows"
    return None


def _scaled_mm(problem: GemmProblem, tensors: GemmTensors) -> torch.Tensor:
    assert tensors.a_scale is not None and tensors.b_scale is not None
    # cuBLASLt refuses a scale that is not 16-byte aligned, as one out of a vector of scales; a copy is.
    a_scale, b_scale = (t if t.data_ptr() % 16 == 0 else t.clone() for t in (tensors.a_scale, tensors.b_scale))
    return torch._scaled_mm(
        tensors.a, tensors.b.mT, a_scale, b_scale, out_dtype=torch.float32, use_fast_accum=problem.fast_accum
    )  # fmt: skip
