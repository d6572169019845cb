"""One grouped call with inputs that tell experts, rows and scale blocks apart, a poisoned output and its bound."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.formats import encode
from fourwave.formats.scaling import scale_shape
from fourwave.ops.gemm.problem import FLOAT8
from fourwave.ops.grouped_gemm.api import grouped_gemm, grouped_gemm_wgrad
from fourwave.ops.grouped_gemm.config import GroupedConfig, candidates
from fourwave.ops.grouped_gemm.preshuffle import shuffle
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS, GroupedProblem
from fourwave.ops.grouped_gemm.reference import grouped_reference, values, wgrad_reference
from fourwave.quantize.tensor import FORMATS
from fourwave.testing import bounds, inputs
from fourwave.testing.buffers import poisoned
from fourwave.testing.cases import CaseResult

Tensor = torch.Tensor
KINDS = ("forward", "dgrad", "wgrad")
# a's and b's scales. Blocks of b are those of weights; of wgrad both operands have a's kind.
SCALINGS = (None, "tensor", "blocks", "1x32")


def many(seed: int, groups: int, most: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.choice((0, 1, 2, source.randrange(most + 1))) for _ in range(groups))


# Two and three groups, decode, many rows, odd and empty groups, hundreds of them.
SIZES: dict[str, tuple[int, ...]] = {
    "two": (128, 64),
    "three": (512, 256, 128),
    "decode": (1, 128, 256),
    "large": (2048, 1024),
    "odd": (5, 130, 0, 1),
    "last": (0, 0, 7),
    "64 random": many(0, 64, 24),
    "257 of 1": (1,) * 257,
}


def group_scales(scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """Scales [M, blocks] in the per-group block layout (GroupedProblem.a_scale_layout "groups"), flat. Rows past the groups: NaN."""
    rows, blocks = scale.shape
    out = torch.full((rows * blocks,), float("nan"), dtype=scale.dtype)
    start = 0
    for size in sizes:
        out[start * blocks : (start + size) * blocks] = scale[start : start + size].mT.reshape(-1)
        start += size
    return out


@dataclass(frozen=True)
class GroupedCase:
    """A call of fw.grouped_gemm or grouped_gemm_wgrad.

    kind        "forward" x[M, K] @ w[g][N, K].T;  "dgrad" dout[M, N] @ w[g][N, K];  "wgrad" dout[rows, N].T @ x[rows, K]
    sizes       rows of each group
    N, K        of the weights [G, N, K]
    extra       rows past the groups, which hold NaN
    dtype       of plain operands; scaling None
    scaling     None, "tensor" (FP8), "blocks" (FP8: 1x128 activations, 128x128 weights) or "1x32" (MXFP8)
    scale_layout  GroupedProblem.a_scale_layout
    fnuz        gfx942's codes
    """

    kind: str
    sizes: tuple[int, ...]
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    scaling: str | None = None
    scale_layout: str = "rows"
    preshuffled: bool = False
    fnuz: bool = False
    out_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    accumulate: bool = False
    extra: int = 0
    sizes_dtype: torch.dtype = torch.int64
    sliced: bool = False
    seed: int = 0
    config: GroupedConfig | None = None
    u_acc: float = bounds.U_FP32  # of the accumulator, see bounds.gemm_bound
    like_plain: bool = False  # preshuffled: the product of the weights in plain order has the same bits

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.extra

    @property
    def reduction(self) -> int:
        return {"forward": self.K, "dgrad": self.N, "wgrad": self.rows}[self.kind]

    @property
    def codes(self) -> torch.dtype:
        if self.scaling is None:
            return self.dtype
        fmt = FORMATS["mxfp8_e4m3" if self.scaling == "1x32" else "fp8_e4m3"]
        dtype = fmt.code_format(self.fnuz and not fmt.is_mx).torch_dtype
        assert dtype is not None
        return dtype

    @property
    def written(self) -> torch.dtype:
        return self.out_dtype or (self.codes if self.codes not in FLOAT8 else torch.bfloat16)

    def __str__(self) -> str:
        names = {sizes: name for name, sizes in SIZES.items()}
        words = [self.kind, names.get(self.sizes, str(list(self.sizes))), f"{self.N}x{self.K}"]
        words.append(self.scaling or str(self.dtype).removeprefix("torch."))
        words += [f"scales by {self.scale_layout}"] * (self.scaling == "blocks" and self.kind != "wgrad")
        words += ["preshuffled"] * self.preshuffled + ["accumulate"] * self.accumulate
        words += [f"{self.extra} rows more"] * bool(self.extra)
        words += [f"out {str(self.out_dtype).removeprefix('torch.')}"] * (self.out_dtype is not None)
        words += ["bias"] * (self.bias_dtype is not None)
        return " ".join(words)

    def scalings(self) -> tuple[str | None, str | None]:
        if self.scaling != "blocks":
            return self.scaling, self.scaling
        return ("1x128", "1x128") if self.kind == "wgrad" else ("1x128", "128x128")

    def problem(self, device_type: str = "cpu") -> GroupedProblem:
        rows, n, k = self.rows, self.N, self.K
        m_n_k = {"forward": (rows, n, k), "dgrad": (rows, k, n), "wgrad": (n, k, rows)}[self.kind]
        split = REDUCTION if self.kind == "wgrad" else ROWS
        layout = {"forward": "TN", "dgrad": "NN", "wgrad": "NT"}[self.kind]
        groups = self.scale_layout == "groups" and self.scalings()[0] == "1x128" and split == ROWS
        return GroupedProblem(
            len(self.sizes), *m_n_k, split, layout, self.codes, self.codes, self.written, self.bias_dtype, self.accumulate,
            device_type, *self.scalings(), "groups" if groups else "rows", self.preshuffled, self.sizes_dtype,
        )  # fmt: skip

    def make(self) -> tuple[dict[str, Any], Tensor, Tensor]:
        """(keyword arguments of the call, a's and b's float64 values: [M, K] and [G, N, K], or [rows, N] and [rows, K])."""
        generator = torch.Generator().manual_seed(self.seed)
        a_scaling, b_scaling = self.scalings()
        rows, used = self.rows, sum(self.sizes)
        if self.kind == "wgrad":
            a, a_scale = self._operand(self.N, rows, a_scaling, True, generator)
            b, b_scale = self._operand(self.K, rows, b_scaling, True, generator)
            values_a, values_b = values(a, a_scale, a_scaling, False), values(b, b_scale, b_scaling, False)
            for t in (a, b):
                t[used:] = float("nan")
            return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}, values_a, values_b
        a, a_scale = self._operand(rows, self.reduction, a_scaling, False, generator)
        n = self.N if self.kind == "forward" else self.K
        made = [self._operand(n, self.reduction, b_scaling, self.kind == "dgrad", generator) for _ in self.sizes]
        b = torch.stack([codes for codes, _ in made])
        scales = [scale for _, scale in made if scale is not None]
        b_scale = torch.stack([s.view(torch.uint8) if s.element_size() == 1 else s for s in scales]) if scales else None
        if b_scale is not None and b_scale.dtype == torch.uint8:
            b_scale = b_scale.view(scales[0].dtype)
        k_last = self.kind == "forward"
        values_a = values(a, a_scale, a_scaling, True)
        values_b = torch.stack([values(codes, scale, b_scaling, k_last) for codes, scale in made])
        values_b = values_b if k_last else values_b.mT
        a[used:] = float("nan")
        if self.problem().a_scale_layout == "groups":
            assert a_scale is not None
            a_scale = group_scales(a_scale, self.sizes)
        if self.preshuffled:
            b = shuffle(b.view(torch.uint8)).view(b.dtype)
        return {"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}, values_a, values_b

    def _operand(
        self, rows: int, k: int, scaling: str | None, k_first: bool, generator: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of a matrix [rows, k], stored [k, rows] with k_first."""
        if scaling is None:
            plain = inputs.matrix(rows, k, generator=generator).to(self.dtype)
            return self._stored(plain, k_first), None
        if scaling == "1x32":
            name = "mxfp8_e4m3"
        else:
            name = {"tensor": "fp8_e4m3", "row": "fp8_row", "1x128": "fp8_1x128", "128x128": "fp8_128x128"}[scaling]
        codec = FORMATS[name].code_format(self.fnuz and scaling != "1x32")
        assert codec.torch_dtype is not None
        sign = torch.where(torch.rand(rows, k, generator=generator) < 0.5, -1.0, 1.0).double()
        codes = encode(sign * (0.5 + 3.5 * torch.rand(rows, k, generator=generator).double()), codec).view(
            codec.torch_dtype
        )
        shape = scale_shape(scaling, rows, k, True)
        scale = 2.0 ** torch.randint(-5, 6, shape, generator=generator).double()
        if len(shape) == 2 and shape[1] > 0:
            # Neighbours along either dimension differ, and the first and last block count.
            at = torch.arange(shape[0])[:, None] + 2 * torch.arange(shape[1])
            scale = scale * 2.0 ** (at % 3).double()
            scale[:, 0] *= 8
            scale[:, -1] *= 8
        if scaling == "1x32":
            stored = encode(scale, _e8m0()).view(torch.float8_e8m0fnu)
        else:
            stored = scale.float()
        codes = self._stored(codes.view(torch.uint8), k_first).view(codes.dtype)
        if k_first and stored.dim() == 2:
            stored = (
                (stored.view(torch.uint8).mT.contiguous().view(stored.dtype))
                if scaling == "1x32"
                else stored.mT.contiguous()
            )
        return codes, stored

    @staticmethod
    def _stored(t: Tensor, k_first: bool) -> Tensor:
        return t.mT.contiguous() if k_first else t

    def run(self, backend: str | None, device: torch.device | str = "cpu", **more: Any) -> CaseResult:
        """Call it on `backend` and compare every element with float64, and with like_plain the bits with the plain order's."""
        result, out = self.outcome(backend, device, **more)
        if self.like_plain and not torch.equal(
            out, replace(self, preshuffled=False).outcome(backend, device, **more)[1]
        ):
            return replace(result, guards="the weights in plain order give other bits")
        return result

    def outcome(
        self, backend: str | None, device: torch.device | str = "cpu", **more: Any
    ) -> tuple[CaseResult, Tensor]:
        """`run`, and the result itself on the CPU."""
        made, values_a, values_b = self.make()
        problem = self.problem()
        a_scaling, b_scaling = self.scalings()
        on_device: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in made.items()}
        a, b, a_scale, b_scale = (on_device[name] for name in ("a", "b", "a_scale", "b_scale"))
        if self.sliced:
            a = _sliced(a)
        sizes = torch.tensor(self.sizes, dtype=self.sizes_dtype, device=device)
        shape = problem.out_shape
        flat = (math.prod(shape[:-1]), shape[-1])
        random = torch.Generator().manual_seed(self.seed + 1)
        addend = torch.randn(flat, generator=random).to(self.written) if self.accumulate else None
        bias = None
        if self.bias_dtype is not None:
            bias = torch.randn(len(self.sizes), problem.N, generator=random).to(self.bias_dtype)
        out = poisoned(*flat, self.written, device, addend=None if addend is None else addend.to(device))
        common: dict[str, Any] = {"out": out.tensor.view(shape), "config": self.config, "backend": backend, **more}
        if self.kind == "wgrad":
            grouped_gemm_wgrad(
                a, b, sizes, accumulate=self.accumulate, dout_scale=a_scale, x_scale=b_scale, dout_scaling=a_scaling,
                x_scaling=b_scaling, **common,
            )  # fmt: skip
            addend = None if addend is None else addend.view(shape)
            exact = wgrad_reference(values_a, values_b, self.sizes, addend=addend)
        else:
            grouped_gemm(
                a, b, sizes, trans_b=self.kind == "forward", a_scale=a_scale, b_scale=b_scale, a_scaling=a_scaling,
                b_scaling=b_scaling, a_scale_layout=problem.a_scale_layout, b_preshuffled=self.preshuffled,
                bias=None if bias is None else bias.to(device), **common,
            )  # fmt: skip
            exact = grouped_reference(values_a, values_b, self.sizes, bias=bias)
        result = out.tensor.view(shape).cpu()
        ratio, worst = bounds.error_ratio(result, exact, self._bound(values_a, values_b, bias, addend))
        guards = None
        try:
            out.assert_guards_intact()
        except AssertionError as error:
            guards = str(error)
        return CaseResult(ratio, worst, guards), result

    def _bound(self, a: Tensor, b: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
        scaled = self.scaling is not None
        parts, start = [], 0
        for g, size in enumerate(self.sizes):
            span, start = slice(start, start + size), start + size
            if self.kind == "wgrad":
                more: dict[str, Any] = {"addend": None if addend is None else addend[g]}
                parts.append(
                    bounds.gemm_bound(a[span].mT, b[span].mT, self.written, scaled=scaled, u_acc=self.u_acc, **more)
                )
            else:
                more = {"bias": None if bias is None else bias[g]}
                parts.append(bounds.gemm_bound(a[span], b[g], self.written, scaled=scaled, u_acc=self.u_acc, **more))
        if self.kind == "wgrad":
            return torch.stack(parts)
        parts.append(torch.full((self.extra, b.shape[1]), torch.finfo(torch.float32).tiny, dtype=torch.float64))
        return torch.cat(parts)


def _e8m0() -> Any:
    from fourwave.formats.element import E8M0

    return E8M0


def _sliced(t: Tensor) -> Tensor:
    """t as columns of a wider buffer of NaN, rows 16-byte aligned."""
    wide = torch.full((t.shape[0], -(-t.shape[1] // 16) * 16 + 64), float("nan"), device=t.device).to(t.dtype)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def plan(arch: str, seed: int = 0) -> Iterator[tuple[str, GroupedCase]]:
    """(what it is for, case) for `fourwave check grouped --arch ARCH`."""
    fnuz = arch == "gfx942"
    blocks = GroupedCase("forward", (), 128, 256, scaling="blocks", scale_layout="groups", fnuz=fnuz, seed=seed)
    for name, sizes in SIZES.items():
        for preshuffled in (False, True):
            yield f"sizes {name}", replace(blocks, sizes=sizes, preshuffled=preshuffled, like_plain=preshuffled)
        yield f"sizes {name}", replace(blocks, sizes=sizes, kind="dgrad", scale_layout="rows", sizes_dtype=torch.int32)
        yield f"sizes {name}", replace(blocks, sizes=sizes, kind="wgrad")
    odd = replace(blocks, sizes=SIZES["odd"], extra=3)
    for kind in KINDS:
        yield "tails", replace(odd, kind=kind, N=200, K=328, scale_layout="rows")
        yield "tails", replace(odd, kind=kind, N=72, K=173, scale_layout="rows", out_dtype=torch.float32)
        for dtype in (torch.bfloat16, torch.float16):
            yield "plain", replace(odd, kind=kind, scaling=None, dtype=dtype, N=136, K=264)
        yield "tensor", replace(odd, kind=kind, scaling="tensor", N=144, K=272)
        if kind == "forward":
            yield "tensor", replace(odd, scaling="tensor", N=144, K=320, preshuffled=True, like_plain=True)
        yield "mx", replace(odd, kind=kind, scaling="1x32", fnuz=False, N=144, K=272)
    for more in ({}, {"scaling": None}, {"scaling": "tensor"}, {"scaling": "1x32", "fnuz": False}):
        yield "outputs", replace(odd, kind="wgrad", accumulate=True, out_dtype=torch.float32, **more)  # type: ignore[arg-type]
    yield "outputs", replace(odd, bias_dtype=torch.bfloat16)
    # More than two steps of the main loop, of every tile.
    deep = replace(odd, N=136, K=1352, scale_layout="rows", extra=2)
    for case in (
        deep,
        replace(deep, preshuffled=True, N=144, K=1344),
        replace(deep, kind="dgrad", N=1352, K=136),
        replace(deep, kind="wgrad", sizes=(5, 1300, 0, 1, 700), K=136),
        replace(deep, scaling=None),
        replace(deep, scaling="1x32", fnuz=False),
    ):
        for config in candidates(case.problem(), arch):
            yield "every tile", replace(case, config=config)
