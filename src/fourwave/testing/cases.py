"""One fw.gemm call with spread inputs, NaN-padded views, a poisoned output and its bound: for tests and `fourwave check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fourwave.ops.gemm.api import gemm
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1, PRECISIONS, SWIGLU, GemmProblem
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled, preshuffle
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
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

    dtype       of a plain a, and of a plain b where b_dtype is None
    a_format, b_format  names of fourwave.quantize.tensor.FORMATS: that operand is quantized (inputs.quantized), whatever the dtypes
    fnuz        quantized operands have gfx942's codes, where the format has such
    preshuffled b comes as `fw.preshuffle` of it; TN, N a multiple of 16 and K of 64
    transposed  columnwise codes are stored transposed
    out_dtype   None is gemm's default
    preactivation, bias_grad  dtypes of these outputs, or None; views as out_view
    out_format, out_direction, out_scale_rule  a quantized result
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
    a_format: str | None = None
    b_format: str | None = None
    fnuz: bool = False
    transposed: bool = False
    preactivation: torch.dtype | None = None
    bias_grad: torch.dtype | None = None
    out_format: str | None = None
    out_direction: str = "rowwise"
    out_scale_rule: str = "floor"
    batch_invariant: bool = False
    fast_accum: bool = False
    preshuffled: bool = False

    @property
    def written(self) -> torch.dtype:
        """out's dtype, or that of the codes."""
        if self.out_format is not None:
            fmt = FORMATS[self.out_format]
            dtype = fmt.code_format(self._fnuz_out).torch_dtype
            assert dtype is not None
            return dtype
        return self.out_dtype or next((t for t in self._dtypes if t in PRECISIONS), torch.bfloat16)

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        plain = (self.dtype, self.b_dtype or self.dtype)
        return tuple(  # type: ignore[return-value]
            each if name is None else _codes_dtype(name, self.fnuz)
            for name, each in zip((self.a_format, self.b_format), plain, strict=True)
        )

    @property
    def _fnuz_out(self) -> bool:
        is_mx = self.out_format is not None and FORMATS[self.out_format].is_mx
        return not is_mx and any(str(dtype).endswith("fnuz") for dtype in self._dtypes)

    @property
    def stored_layout(self) -> str:
        """The layout that backends see."""
        a_k_last = self.layout != "NT" or (self.transposed and self.a_format is not None)
        b_k_last = self.layout == "TN" or (self.transposed and self.b_format is not None)
        return "NT" if not a_k_last else "TN" if b_k_last else "NN"

    @property
    def problem(self) -> GemmProblem:
        scaling = {name: FORMATS[name].scaling for name in FORMATS}
        return GemmProblem(
            self.shape.M, self.shape.N, self.shape.K, self.stored_layout, *self._dtypes, self.written, self.bias_dtype,
            self.activation, self.accumulate,
            a_scaling=None if self.a_format is None else scaling[self.a_format],
            b_scaling=None if self.b_format is None else scaling[self.b_format],
            preactivation_dtype=self.preactivation, bias_grad_dtype=self.bias_grad,
            out_scaling=None if self.out_format is None else scaling[self.out_format],
            out_direction=self.out_direction, out_scale_rule=self.out_scale_rule, batch_invariant=self.batch_invariant,
            fast_accum=self.fast_accum, b_preshuffled=self.preshuffled,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [str(self.shape), self.layout]
        names = [
            _NAMES[dtype] if name is None else name + " fnuz" * (self.fnuz and not FORMATS[name].is_mx)
            for name, dtype in zip((self.a_format, self.b_format), self._dtypes, strict=True)
        ]
        words.append(names[0] if names[0] == names[1] and self.b_dtype is None else " x ".join(names))
        if self.transposed:
            words.append("stored transposed")
        if self.out_dtype is not None:
            words.append(f"out {PRECISIONS[self.out_dtype]}")
        if self.out_format is not None:
            words.append(f"out {self.out_format}")
            if FORMATS[self.out_format].is_mx:
                words[-1] += f" {self.out_direction} {self.out_scale_rule}"
        for name, kind in (("a", self.a_view), ("b", self.b_view), ("out", self.out_view)):
            if kind != "contiguous":
                words.append(f"{name} {kind}")
        if self.bias_dtype is not None:
            words.append(f"bias {PRECISIONS[self.bias_dtype]}")
        if self.activation is not None:
            words.append(self.activation)
        if self.alpha != 1.0:
            words.append(f"alpha {self.alpha:g}")
        for name in ("preactivation", "bias_grad"):
            if (dtype := getattr(self, name)) is not None:
                words.append(f"{name} {PRECISIONS[dtype]}")
        for name in ("accumulate", "batch_invariant", "fast_accum", "preshuffled"):
            if getattr(self, name):
                words.append(name)
        return ", ".join(words)

    def operands(
        self, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | QuantizedTensor]:
        """(a, b) as `run` hands them to gemm."""
        made: list[torch.Tensor | QuantizedTensor] = []
        for i, (name, kind) in enumerate(((self.a_format, self.a_view), (self.b_format, self.b_view))):
            if name is None:
                pair = inputs.spread(self.shape, self._dtypes[i], layout=self.layout, seed=self.seed, device=device)
                made.append(inputs.view(pair[i], kind))
                continue
            generator = torch.Generator().manual_seed(2 * self.seed + i)
            rowwise = self.layout != "NT" if i == 0 else self.layout == "TN"
            operand = inputs.quantized(
                (self.shape.M, self.shape.N)[i], self.shape.K, name, generator=generator, device=device,
                direction="rowwise" if rowwise else "columnwise", transposed=self.transposed and not rowwise,
                fnuz=self.fnuz, view_kind=kind,
            )  # fmt: skip
            made.append(operand)
        return made[0], made[1]

    def run(
        self,
        backend: str | None,
        *,
        device: torch.device | str = "cpu",
        config: GemmConfig | None = None,
        u_acc: float = bounds.U_FP32,
    ) -> CaseResult:
        """Run on `backend` and compare every element of every output with the float64 truth. Errors of gemm are raised.

        A quantized result must have the bits that the reference quantizer makes of the same backend's float32 result.
        """
        shape = self.shape
        a, b = self.operands(device)
        weights: torch.Tensor | QuantizedTensor | Preshuffled = preshuffle(b) if self.preshuffled else b
        generator = torch.Generator().manual_seed(self.seed + 1)

        def noise(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device=device, dtype=dtype)

        bias = None if self.bias_dtype is None else noise(shape.N, dtype=self.bias_dtype)
        columns = shape.N // 2 if self.activation == SWIGLU else shape.N
        out_dtype = torch.float32 if self.out_format is not None else self.written
        addend = noise(shape.M, columns, dtype=out_dtype) if self.accumulate else None
        out = buffers.poisoned(shape.M, columns, out_dtype, device, layout=self.out_view, addend=addend)
        outputs = [out]
        preactivation = bias_grad = grad_addend = None
        if self.preactivation is not None:
            preactivation = buffers.poisoned(shape.M, shape.N, self.preactivation, device, layout=self.out_view)
            outputs.append(preactivation)
        if self.bias_grad is not None:
            grad_addend = noise(1, shape.M, dtype=self.bias_grad) if self.accumulate else None
            bias_grad = buffers.poisoned(1, shape.M, self.bias_grad, device, addend=grad_addend)
            outputs.append(bias_grad)
        trans_a, trans_b = self.layout == "NT", self.layout == "TN"
        options: dict[str, Any] = {
            "trans_a": trans_a, "trans_b": trans_b, "bias": bias, "activation": self.activation, "alpha": self.alpha,
            "batch_invariant": self.batch_invariant, "fast_accum": self.fast_accum, "config": config, "backend": backend,
        }  # fmt: skip
        gemm(
            a, weights, accumulate=self.accumulate, out=out.tensor,
            preactivation=None if preactivation is None else preactivation.tensor,
            bias_grad=None if bias_grad is None else bias_grad.tensor[0], **options,
        )  # fmt: skip
        a_values, b_values = (
            t.dequantize(torch.float64) if isinstance(t, QuantizedTensor) else t.to(torch.float64) for t in (a, b)
        )
        told: dict[str, Any] = {"trans_a": trans_a, "trans_b": trans_b, "bias": bias, "alpha": self.alpha}
        close: dict[str, Any] = {
            **told,
            "u_acc": u_acc,
            "scaled": self.a_format is not None or self.b_format is not None,
        }
        finish: dict[str, Any] = {"activation": self.activation, "addend": addend}
        exact = gemm_reference(a_values, b_values, **told, **finish)
        bound = bounds.gemm_bound(a_values, b_values, out_dtype, **close, **finish)
        found = [bounds.error_ratio(out.tensor, exact, bound)]
        if preactivation is not None and self.preactivation is not None:
            exact = gemm_reference(a_values, b_values, **told)
            bound = bounds.gemm_bound(a_values, b_values, self.preactivation, **close)
            found.append(bounds.error_ratio(preactivation.tensor, exact, bound))
        if bias_grad is not None and self.bias_grad is not None:
            exact = a_values.sum(0) + (0 if grad_addend is None else grad_addend[0].to(torch.float64))
            bound = bounds.sum_bound(a_values, self.bias_grad, None if grad_addend is None else grad_addend[0])
            found.append(bounds.error_ratio(bias_grad.tensor[0], exact, bound))
        ratio, worst = max(found, key=lambda pair: pair[0])
        guards = None
        try:
            for each in outputs:
                each.assert_guards_intact()
            if self.out_format is not None:
                self._assert_quantized(a, weights, out.tensor, options)
        except AssertionError as error:
            guards = str(error)
        return CaseResult(ratio, worst, guards)

    def _assert_quantized(
        self,
        a: torch.Tensor | QuantizedTensor,
        b: torch.Tensor | QuantizedTensor | Preshuffled,
        y: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        """The quantized result of the same call has the bits of the reference quantizer's, given the float32 result y."""
        from fourwave.quantize import quantize
        from fourwave.quantize.api import reads_fnuz

        assert self.out_format is not None
        is_mx = FORMATS[self.out_format].is_mx
        fnuz = self._fnuz_out or reads_fnuz(y.device, options["backend"])
        scale = None if is_mx else (y.abs().max() / 300).reshape(())
        got = gemm(
            a, b, out_format=self.out_format, out_scale=scale, out_direction=self.out_direction,
            out_scale_rule=self.out_scale_rule, **options,
        )  # fmt: skip
        rules: dict[str, Any] = {"scale_rule": self.out_scale_rule} if is_mx else {"scale": scale, "fnuz": fnuz}
        right = quantize(y, self.out_format, self.out_direction, backend="native", **rules)
        for name in ("data", "scale", "columnwise_data", "columnwise_scale", "amax"):
            is_there, expected = getattr(got, name), getattr(right, name)
            if name.startswith("columnwise") and not is_mx:
                continue
            assert (is_there is None) == (expected is None), (
                f"{name} of the quantized result: {is_there} for {expected}"
            )
            if expected is None:
                continue
            left, other = (
                t.contiguous().view(torch.uint8) if t.dim() else t.view(torch.int32) for t in (is_there, expected)
            )
            wrong = int((left != other).sum())
            assert wrong == 0, (
                f"{wrong} of {left.numel()} bytes of the quantized result's {name} are not the quantizer's"
            )


def _codes_dtype(name: str, fnuz: bool) -> torch.dtype:
    fmt = FORMATS[name]
    return fmt.code_format(fnuz and not fmt.is_mx).torch_dtype or PACKED_E2M1


_NAMES: dict[torch.dtype, str] = {**PRECISIONS, **FLOAT8}
