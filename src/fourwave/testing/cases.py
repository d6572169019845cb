"""One fw.gemm call with spread inputs, NaN-padded views, a poisoned output and its bound: for tests and `fourwave check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fourwave.ops.gemm.api import gemm
from fourwave.ops.gemm.problem import FLOAT8, PRECISIONS, GemmProblem
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import bounds, buffers, inputs
from fourwave.testing.shapes import Shape

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig


@dataclass(frozen=True)
class CaseResult:
    """ratio: largest error over its bound (right: at most 1); worst: its index; guards: None, or what was overwritten."""

    ratio: float
    worst: tuple[int, ...]
    guards: str | None

    @property
    def passed(self) -> bool:
        return self.ratio <= 1 and self.guards is None


@dataclass(frozen=True)
class GemmCase:
    """A call of fw.gemm. Views are those of inputs.view and buffers.LAYOUTS.

    out_dtype None is the operands' (8-bit: bfloat16); b_dtype None is a's, which is `dtype`.
    """

    shape: Shape
    layout: str = "TN"
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    a_view: str = "contiguous"
    b_view: str = "contiguous"
    out_view: str = "contiguous"
    bias_dtype: torch.dtype | None = None
    activation: str | None = None
    alpha: float = 1.0
    accumulate: bool = False
    seed: int = 0
    b_dtype: torch.dtype | None = None

    @property
    def written(self) -> torch.dtype:
        """out's dtype."""
        return self.out_dtype or (torch.bfloat16 if self.dtype in FLOAT8 else self.dtype)

    @property
    def problem(self) -> GemmProblem:
        return GemmProblem(
            self.shape.M,
            self.shape.N,
            self.shape.K,
            self.layout,
            self.dtype,
            self.b_dtype or self.dtype,
            self.written,
            self.bias_dtype,
            self.activation,
            self.accumulate,
        )

    def __str__(self) -> str:
        names = PRECISIONS | FLOAT8
        operands = names[self.dtype] + (f" x {names[self.b_dtype]}" if self.b_dtype is not None else "")
        words = [str(self.shape), self.layout, operands]
        if self.out_dtype is not None:
            words.append(f"out {PRECISIONS[self.out_dtype]}")
        for name, kind in (("a", self.a_view), ("b", self.b_view), ("out", self.out_view)):
            if kind != "contiguous":
                words.append(f"{name} {kind}")
        if self.bias_dtype is not None:
            words.append(f"bias {PRECISIONS[self.bias_dtype]}")
        if self.activation is not None:
            words.append(self.activation)
        if self.alpha != 1.0:
            words.append(f"alpha {self.alpha:g}")
        if self.accumulate:
            words.append("accumulate")
        return ", ".join(words)

    def run(
        self,
        backend: str | None,
        *,
        device: torch.device | str = "cpu",
        config: GemmConfig | None = None,
        u_acc: float = bounds.U_FP32,
    ) -> CaseResult:
        """Run on `backend` and compare every element with the float64 truth. Errors of gemm itself are raised."""
        a, b = inputs.spread(self.shape, self.dtype, layout=self.layout, seed=self.seed, device=device)
        if self.b_dtype is not None:
            _, b = inputs.spread(self.shape, self.b_dtype, layout=self.layout, seed=self.seed, device=device)
        a, b = inputs.view(a, self.a_view), inputs.view(b, self.b_view)
        generator = torch.Generator().manual_seed(self.seed + 1)
        bias = addend = None
        if self.bias_dtype is not None:
            bias = torch.randn(self.shape.N, generator=generator).to(device=device, dtype=self.bias_dtype)
        out_dtype = self.written
        if self.accumulate:
            addend = torch.randn(self.shape.M, self.shape.N, generator=generator).to(device=device, dtype=out_dtype)
        out = buffers.poisoned(self.shape.M, self.shape.N, out_dtype, device, layout=self.out_view, addend=addend)
        trans_a, trans_b = self.problem.trans_a, self.problem.trans_b
        gemm(
            a,
            b,
            trans_a=trans_a,
            trans_b=trans_b,
            bias=bias,
            activation=self.activation,
            alpha=self.alpha,
            accumulate=self.accumulate,
            out=out.tensor,
            config=config,
            backend=backend,
        )
        exact = gemm_reference(
            a,
            b,
            trans_a=trans_a,
            trans_b=trans_b,
            bias=bias,
            activation=self.activation,
            alpha=self.alpha,
            addend=addend,
        )
        bound = bounds.gemm_bound(
            a,
            b,
            out_dtype,
            trans_a=trans_a,
            trans_b=trans_b,
            bias=bias,
            activation=self.activation,
            alpha=self.alpha,
            addend=addend,
            u_acc=u_acc,
        )
        ratio, worst = bounds.error_ratio(out.tensor, exact, bound)
        try:
            out.assert_guards_intact()
        except AssertionError as error:
            return CaseResult(ratio, worst, str(error))
        return CaseResult(ratio, worst, None)
