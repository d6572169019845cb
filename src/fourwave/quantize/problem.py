"""Description of one quantization: everything that backends and caches may look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fourwave.formats.element import E8M0, ElementFormat
from fourwave.formats.scaling import scale_shape
from fourwave.quantize.tensor import FORMATS, QuantFormat

INPUTS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
SCALE_DTYPE = E8M0.torch_dtype or torch.uint8  # of MX scales; the type came with torch 2.7


class QuantizeTensors(NamedTuple):
    """What a quantization writes; None: not asked for. Shapes and types: QuantizeProblem.outputs. All contiguous."""

    data: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    columnwise_data: torch.Tensor | None = None
    columnwise_scale: torch.Tensor | None = None
    amax: torch.Tensor | None = None


Spec = tuple[tuple[int, ...], torch.dtype]  # shape and type


class OutputSpecs(NamedTuple):
    """QuantizeTensors' fields."""

    data: Spec | None
    scale: Spec | None
    columnwise_data: Spec | None
    columnwise_scale: Spec | None
    amax: Spec | None


@dataclass(frozen=True)
class QuantizeProblem:
    """Codes and scales of x [rows, columns].

    format       name of a FORMATS entry
    rowwise, columnwise   which pairs are computed. Where the format needs one copy and it is not transposed, rowwise only
    transposed   the columnwise pair is stored transposed
    scale_rule   "floor" or "ceil" for MX, "fp32" or "pow2" for others (formats/scale_rules.py)
    fnuz         codes are gfx942's 8-bit floats
    given_scale  the scale is an input (scaling "tensor" only); scale is not among the outputs
    stochastic   codes are rounded stochastically (mxfp4 only); a seed is an input
    row_signs, column_signs   random Hadamard transform of the rowwise or columnwise pair (mxfp4 only): its signs
                 (random.hadamard_signs)
    """

    rows: int
    columns: int
    x_dtype: torch.dtype
    format: str
    rowwise: bool = True
    columnwise: bool = False
    transposed: bool = False
    scale_rule: str = "fp32"
    fnuz: bool = False
    given_scale: bool = False
    device_type: str = "cpu"
    stochastic: bool = False
    row_signs: int | None = None
    column_signs: int | None = None

    @property
    def quant_format(self) -> QuantFormat:
        return FORMATS[self.format]

    @property
    def code_format(self) -> ElementFormat:
        return self.quant_format.code_format(self.fnuz)

    @property
    def precision(self) -> str:
        """The word for it in backend strings."""
        fmt = self.quant_format
        return "mxfp4" if fmt.element == "e2m1" else "mxfp8" if fmt.is_mx else "fp8"

    @property
    def is_empty(self) -> bool:
        return self.rows == 0 or self.columns == 0

    def block(self, rowwise: bool) -> tuple[int, int]:
        """Rows and columns of x that share a scale; at least 1 each."""
        across, along = self.quant_format.block or (1, max(1, self.columns if rowwise else self.rows))
        if self.quant_format.scaling == "tensor":
            return max(1, self.rows), max(1, self.columns)
        return (across, along) if rowwise else (along, across)

    def outputs(self) -> OutputSpecs:
        """What is written."""
        row: tuple[Spec | None, Spec | None] = (None, None)
        column: tuple[Spec | None, Spec | None] = (None, None)
        if self.rowwise:
            row = self._pair(self.rows, self.columns, True)
        if self.columnwise and self.transposed:
            column = self._pair(self.columns, self.rows, True)
        elif self.columnwise:
            column = self._pair(self.rows, self.columns, False)
        amax: Spec | None = ((), torch.float32) if self.quant_format.scaling == "tensor" else None
        return OutputSpecs(row[0], row[1], column[0], column[1], amax)

    def _pair(self, rows: int, columns: int, k_last: bool) -> tuple[Spec, Spec | None]:
        fmt = self.quant_format
        code = self.code_format.torch_dtype
        codes: Spec = ((rows, columns // 2), torch.uint8) if code is None else ((rows, columns), code)
        if self.given_scale:
            return codes, None
        shape = scale_shape(fmt.scaling, rows, columns, k_last)
        return codes, (shape, SCALE_DTYPE if fmt.is_mx else torch.float32)

    def allocate(self, like: torch.Tensor) -> QuantizeTensors:
        """New tensors for all outputs, on like's device."""
        new = (None if spec is None else like.new_empty(spec[0], dtype=spec[1]) for spec in self.outputs())
        return QuantizeTensors(*new)

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.columns} {INPUTS[self.x_dtype]} to {self.format}"]
        words.append(" and ".join(["rowwise"] * self.rowwise + ["columnwise"] * self.columnwise))
        words += ["transposed"] * (self.transposed and self.columnwise) + [f"scale rule {self.scale_rule}"]
        words += (
            ["fnuz"] * self.fnuz + ["scale given"] * self.given_scale + ["rounded stochastically"] * self.stochastic
        )
        for name, signs in (("rowwise", self.row_signs), ("columnwise", self.column_signs)):
            words += [] if signs is None else [f"{name} Hadamard transform"]
        return ", ".join(words)
