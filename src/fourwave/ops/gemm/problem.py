"""Description of one GEMM call: everything that backends, heuristics and caches may look at."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
LAYOUTS = ("TN", "NN", "NT")
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
FP8 = "fp8"  # any 8-bit float, in backend strings
FLOAT8 = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fnuz: "e4m3fnuz",
    torch.float8_e5m2fnuz: "e5m2fnuz",
}  # operands only
DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in PRECISIONS}


@dataclass(frozen=True)
class GemmProblem:
    """out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out), all matrices row-major.

    layout      "TN": a[M, K], b[N, K]    fprop, x @ w.T
                "NN": a[M, K], b[K, N]    dgrad, dout @ w
                "NT": a[K, M], b[K, N]    wgrad, dout.T @ x
                The names are column-major BLAS's: its first letter is T when b is transposed here, its second
                when a is.
    activation  None, "relu", "gelu" (erf), "gelu_tanh" or "silu"
    accumulate  the result is added to what `out` holds
    device_type "cpu" or "cuda" (which is also what PyTorch calls an AMD GPU)
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

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r}: the layouts are {', '.join(LAYOUTS)}")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r}: the activations are None, {', '.join(ACTIVATIONS)}")

    @property
    def a_shape(self) -> tuple[int, int]:
        """Stored shape of a."""
        return (self.K, self.M) if self.layout == "NT" else (self.M, self.K)

    @property
    def b_shape(self) -> tuple[int, int]:
        """Stored shape of b."""
        return (self.N, self.K) if self.layout == "TN" else (self.K, self.N)

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
        """Name of the operands' precision in backend strings: "bf16", "fp16", "fp32" or "fp8"."""
        return PRECISIONS.get(self.a_dtype, FP8)

    @property
    def flops(self) -> int:
        """Multiplications plus additions of the product."""
        return 2 * self.M * self.N * self.K

    def __str__(self) -> str:
        operands = self.precision
        if operands == FP8:
            operands = " x ".join(FLOAT8[dtype] for dtype in (self.a_dtype, self.b_dtype))
        parts = [f"{self.M}x{self.N}x{self.K} {self.layout} {operands}"]
        if self.out_dtype != self.a_dtype:
            parts.append(f"out {PRECISIONS.get(self.out_dtype, self.out_dtype)}")
        if self.bias_dtype is not None:
            parts.append(f"bias {PRECISIONS.get(self.bias_dtype, self.bias_dtype)}")
        if self.activation is not None:
            parts.append(self.activation)
        if self.accumulate:
            parts.append("accumulate")
        return ", ".join(parts) + f" on {self.device_type}"
