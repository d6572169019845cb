"""A product whose every sum is exact in float32, and whose every result shows a scale that was taken from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fourwave.formats import encode, pack_e2m1
from fourwave.formats.element import E2M1, E8M0
from fourwave.ops.gemm.api import gemm
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
from fourwave.testing import bounds, buffers
from fourwave.testing.cases import CaseResult, GemmCase

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig

# 14 bits between the smallest product and the largest: matrix units drop bits far below the largest.
MODULI = (11, 5)  # periods of the exponents along K, in blocks: coprime to each other and to the 8 tiles of a page


@dataclass(frozen=True)
class ExactScales(GemmCase):
    """Ones, with a power of two of its own for each row and block of 32 k as MX scale (of a plain operand: as value).

    out is float32 and must be equal to the truth, bit for bit.
    """

    def factors(self, which: int) -> torch.Tensor:
        """float64 [rows of op(a) or columns of op(b), blocks]."""
        rows = torch.arange((self.shape.M, self.shape.N)[which])[:, None]
        block = torch.arange(-(-self.shape.K // 32))
        exponent = (block * (5, 3)[which] + rows * (7, 1)[which] + rows // (16, 8)[which]) % MODULI[which]
        return 2.0 ** exponent.double()

    def operands(
        self, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | QuantizedTensor]:
        made: list[torch.Tensor | QuantizedTensor] = []
        for which, name in enumerate((self.a_format, self.b_format)):
            factors = self.factors(which)
            k_last = self.layout != "NT" if which == 0 else self.layout == "TN"
            if name is None:
                values = factors.repeat_interleave(32, 1)[:, : self.shape.K]
                made.append((values if k_last else values.mT).to(device, self._dtypes[which]).contiguous())
                continue
            size = (len(factors), self.shape.K)
            codes = encode(torch.ones(size if k_last else size[::-1], dtype=torch.float64), FORMATS[name].code_format())
            scale = encode(factors if k_last else factors.mT.contiguous(), E8M0).to(device)
            if FORMATS[name].code_format() is E2M1:
                codes = pack_e2m1(codes)
            elif (dtype := FORMATS[name].code_format().torch_dtype) is not None:
                codes = codes.view(dtype)
            codes = codes.to(device)
            pairs = (codes, scale) if k_last else (None, None, codes, scale)
            made.append(QuantizedTensor.from_codes(name, *pairs))
        return made[0], made[1]

    def run(
        self,
        backend: str | None,
        *,
        device: torch.device | str = "cpu",
        config: GemmConfig | None = None,
        u_acc: float = bounds.U_FP32,
    ) -> CaseResult:
        """The ratio is 0, or infinite where a result is not the exact one."""
        a, b = self.operands(device)
        out = buffers.poisoned(self.shape.M, self.shape.N, torch.float32, device)
        trans_a, trans_b = self.layout == "NT", self.layout == "TN"
        gemm(a, b, trans_a=trans_a, trans_b=trans_b, out=out.tensor, config=config, backend=backend)
        per_block = torch.full((self.factors(0).shape[1],), 32.0, dtype=torch.float64)
        per_block[-1:] = self.shape.K - 32 * (len(per_block) - 1)
        exact = (self.factors(0) * per_block) @ self.factors(1).T
        ratio, worst = bounds.error_ratio(out.tensor.cpu(), exact, torch.zeros_like(exact))
        guards = None
        try:
            out.assert_guards_intact()
        except AssertionError as error:
            guards = str(error)
        return CaseResult(ratio, worst, guards)

    def __str__(self) -> str:
        return f"{super().__str__()}, exact sums"
