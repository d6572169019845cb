"""Description of one GEMM call: everything that backends, heuristics and caches may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fourwave.formats.scaling import SCALINGS, scale_shape

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
SWIGLU = "swiglu"  # two columns of the product make one of the output
LAYOUTS = ("TN", "NN", "NT")
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = "fp8"  # any 8-bit float, in backend strings
MXFP8 = "mxfp8"  # with scales "1x32"
MXFP4 = "mxfp4"
PACKED_E2M1 = torch.uint8  # two 4-bit codes in a byte along the stored last dimension, element 0 in the low half
FLOAT8 = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}  # operands only
_NAMES = {**PRECISIONS, **FLOAT8, PACKED_E2M1: "e2m1"}
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in PRECISIONS}


def packed_scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of scales "1x32" [N, K / 32] beside preshuffled codes: rows of whole chunks of 16, zeros behind the last block."""
    return shape[0], -(-shape[1] // 16) * 16


class GemmTensors(NamedTuple):
    """What a call reads and writes, two-dimensional and as stored (GemmProblem.a_shape, ...).

    a, b            inner stride 1, row stride >= the row's length, any storage offset
    out             [M, out_columns], likewise; shares no element with what is read. Codes, where it is quantized
    bias            [N] contiguous, or None
    alpha           a number of the host
    a_scale, b_scale  contiguous, scale_shape; float32, or for "1x32" float8_e8m0fnu. None: plain numbers
    preactivation   [M, N], written with alpha * op(a) @ op(b) + bias
    bias_grad       [M], NT only: written with (or, accumulating, added) the sum of op(a) over K
    out_scale       scales of `out`. "tensor": float32 (), read: out = round(y / out_scale). "1x32": [M, ceil(out_columns / 32)]
                    float8_e8m0fnu, written
    out_amax        float32 (), "tensor" only: written with the largest |y| before quantization
    out_columnwise, out_columnwise_scale  "1x32" only, out_direction "columnwise" or "both": codes [M, out_columns] and scales
                    [ceil(M / 32), out_columns]
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor | None
    bias: torch.Tensor | None = None
    alpha: float = 1.0
    a_scale: torch.Tensor | None = None
    b_scale: torch.Tensor | None = None
    preactivation: torch.Tensor | None = None
    bias_grad: torch.Tensor | None = None
    out_scale: torch.Tensor | None = None
    out_amax: torch.Tensor | None = None
    out_columnwise: torch.Tensor | None = None
    out_columnwise_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class GemmProblem:
    """out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out), all matrices row-major.

    layout      "TN": a[M, K], b[N, K]    fprop, x @ w.T
                "NN": a[M, K], b[K, N]    dgrad, dout @ w
                "NT": a[K, M], b[K, N]    wgrad, dout.T @ x
                The names are column-major BLAS's: its first letter is T when b is transposed here, its second
                when a is.
    activation  None, "relu", "gelu" (erf), "gelu_tanh" or "silu"; or "swiglu": N is even, z[M, N] = alpha * op(a) @ op(b) + bias,
                out[M, N / 2] = silu(z[:, : N / 2]) * z[:, N / 2 :]
    accumulate  the result is added to what `out` holds
    device_type "cpu" or "cuda" (which is also what PyTorch calls an AMD GPU)
    a_scaling, b_scaling  None: the operand's codes are its values. Else value = code * scale, with scales as scale_shape says
    preactivation_dtype   of the z that is saved, or None
    bias_grad_dtype       of bias_grad (GemmTensors), or None
    out_scaling     None, "tensor" or "1x32": out is quantized, out_dtype is an 8-bit float
    out_direction   "rowwise", "columnwise" or "both": along which dimension of out the blocks of "1x32" lie
    out_scale_rule  of "1x32": "floor" (OCP MX v1.0, 6.3) or "ceil" (no element saturates)
    batch_invariant a row of out has the same bits whatever M and the other rows are
    b_preshuffled   b [N, K] (TN), 8-bit codes, is in the order of `fw.preshuffle`; its scales "1x32" are packed (b_scale_shape)
    fast_accum      the matrix unit's own accumulation will do, where it is less exact than float32 (Hopper's 8-bit floats)
    """

    M: int
    N: int
    K: int
    layout: str
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    activation: str | None = None
    accumulate: bool = False
    device_type: str = "cpu"
    a_scaling: str | None = None
    b_scaling: str | None = None
    preactivation_dtype: torch.dtype | None = None
    bias_grad_dtype: torch.dtype | None = None
    out_scaling: str | None = None
    out_direction: str = "rowwise"
    out_scale_rule: str = "floor"
    batch_invariant: bool = False
    fast_accum: bool = False
    b_preshuffled: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: the layouts are {', '.join(LAYOUTS)}")
        if self.activation not in (None, SWIGLU, *ACTIVATIONS):
            known = ", ".join((*ACTIVATIONS, SWIGLU))
            raise ValueError(f"activation {self.activation!r}: the activations are None, {known}")
        if self.activation == SWIGLU and self.N % 2:
            raise ValueError(f"activation 'swiglu' with N={self.N}: N holds two halves and must be even")
        if self.b_preshuffled and self.layout != "TN":
            raise ValueError(f"b is preshuffled with layout {self.layout}: the order is one for [N, K], TN")
        for name in ("a_scaling", "b_scaling", "out_scaling"):
            if (scaling := getattr(self, name)) not in (None, *SCALINGS):
                raise ValueError(f"{name} {scaling!r}: None, {', '.join(SCALINGS)}")

    @property
    def a_shape(self) -> tuple[int, int]:
        """Stored shape of a."""
        return (self.K, self.M) if self.layout == "NT" else (self.M, self.K)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Stored shape of b."""
        return (self.N, self.K) if self.layout == "TN" else (self.K, self.N)

    @property
    def a_scale_shape(self) -> tuple[int, ...] | None:
        return None if self.a_scaling is None else scale_shape(self.a_scaling, *self.a_shape, self.layout != "NT")

    @property
    def b_scale_shape(self) -> tuple[int, ...] | None:
        if self.b_scaling is None:
            return None
        shape = scale_shape(self.b_scaling, *self.b_shape, self.layout == "TN")
        return packed_scale_shape(shape) if self.b_preshuffled and self.b_scaling == "1x32" else shape

    @property
    def out_columns(self) -> int:
        return self.N // 2 if self.activation == SWIGLU else self.N

    @property
    def trans_a(self) -> bool:
        return self.layout == "NT"

    @property
    def trans_b(self) -> bool:
        return self.layout == "TN"

    @property
    def is_empty(self) -> bool:
        """True when there is nothing to multiply: the answer is empty, or what bias, activation and addend make of 0."""
        return self.M == 0 or self.N == 0 or self.K == 0

    @property
    def precision(self) -> str:
        """Name of the operands' precision in backend strings: "bf16", "fp16", "fp32", "fp8", "mxfp8" or "mxfp4"; of a
        mixed pair that of the quantized one."""
        if PACKED_E2M1 in (self.a_dtype, self.b_dtype):
            return MXFP4
        if "1x32" in (self.a_scaling, self.b_scaling):
            return MXFP8
        if self.b_dtype in FLOAT8:
            return FP8
        return PRECISIONS.get(self.a_dtype, FP8)

    def why_refused(self, supported: frozenset[str] = frozenset()) -> str | None:
        """The first feature that is not in `supported`, in words, or None.

        Features: "scaling:<a>x<b>" for scaled operands, "swiglu", "preactivation", "bias_grad", "out:tensor", "out:1x32",
        "batch_invariant", "b_preshuffled". Every kernel asks this, so that a feature it does not know is refused and not left out.
        """
        asked = []
        if self.a_scaling is not None or self.b_scaling is not None:
            asked.append(f"scaling:{self.a_scaling}x{self.b_scaling}")
        if self.activation == SWIGLU:
            asked.append("swiglu")
        if self.preactivation_dtype is not None:
            asked.append("preactivation")
        if self.bias_grad_dtype is not None:
            asked.append("bias_grad")
        if self.out_scaling is not None:
            asked.append(f"out:{self.out_scaling}")
        if self.batch_invariant:
            asked.append("batch_invariant")
        if self.b_preshuffled:
            asked.append("b_preshuffled")
        missing = [feature for feature in asked if feature not in supported]
        if not missing:
            return None
        feature, _, detail = missing[0].partition(":")
        if feature == "scaling":
            return (
                f"operands with scales {self.a_scaling} and {self.b_scaling}: this kernel does not multiply such a pair"
            )
        if feature == "out":
            return f"a result quantized with scales {detail}: this kernel does not make one"
        return f"{feature} is not in this kernel"

    @property
    def flops(self) -> int:
        """Multiplications plus additions of the product."""
        return 2 * self.M * self.N * self.K

    def __str__(self) -> str:
        operands = self.precision
        if operands in (FP8, MXFP8, MXFP4):
            operands = " x ".join(
                _NAMES[dtype] + (f" ({scaling})" if scaling else "")
                for dtype, scaling in ((self.a_dtype, self.a_scaling), (self.b_dtype, self.b_scaling))
            )
        parts = [f"{self.M}x{self.N}x{self.K} {self.layout} {operands}"]
        if self.out_dtype != self.a_dtype:
            name = _NAMES.get(self.out_dtype, self.out_dtype)
            scaling = ""
            if self.out_scaling == "1x32":
                scaling = f" (1x32 {self.out_direction}, {self.out_scale_rule})"
            elif self.out_scaling is not None:
                scaling = f" ({self.out_scaling})"
            parts.append(f"out {name}{scaling}")
        if self.bias_dtype is not None:
            parts.append(f"bias {PRECISIONS.get(self.bias_dtype, self.bias_dtype)}")
        if self.activation is not None:
            parts.append(self.activation)
        if self.preactivation_dtype is not None:
            parts.append(f"preactivation {PRECISIONS[self.preactivation_dtype]}")
        if self.bias_grad_dtype is not None:
            parts.append(f"bias_grad {PRECISIONS[self.bias_grad_dtype]}")
        for name in ("accumulate", "batch_invariant", "fast_accum", "b_preshuffled"):
            if getattr(self, name):
                parts.append(name)
        return ", ".join(parts) + f" on {self.device_type}"
