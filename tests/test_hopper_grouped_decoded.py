"""Grouped products of MX codes on Hopper: which are decoded, and what the two launches are given.

Without a GPU the kernels are replaced by PyTorch: the one that decodes takes the same addresses, strides and sizes, the 16-bit
grouped product is the native backend's.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.formats.scaling import scale_shape
from fourwave.ops.gemm import sm90_decoded as dense_decoded
from fourwave.ops.gemm.problem import PACKED_E2M1
from fourwave.ops.grouped_gemm import sm90_decoded, sm90_launch
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.reference import grouped_reference, values, wgrad_reference
from fourwave.testing import bounds
from fourwave.testing.buffers import poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
Tensor = torch.Tensor


def problem(a: torch.dtype, b: torch.dtype, split: str = "rows", layout: str = "TN", **more: Any) -> GroupedProblem:
    scaling = {f"{name}_scaling": "1x32" for name, t in (("a", a), ("b", b)) if t.itemsize == 1}
    return GroupedProblem(4, 96, 64, 160, split, layout, a, b, BF16, device_type="cuda", **{**scaling, **more})


def test_what_is_multiplied() -> None:
    plain = problem(BF16, BF16)
    for a, b in ((E4M3, E5M2), (BF16, PACKED_E2M1), (PACKED_E2M1, BF16), (E4M3, PACKED_E2M1)):
        assert sm90_decoded.plain_problem(problem(a, b)) == plain
        assert sm90_decoded.why_unsupported(problem(a, b), None) is None
    for layout in ("NT", "TN"):
        wgrad = sm90_decoded.plain_problem(problem(E4M3, E5M2, "reduction", layout, accumulate=True))
        assert wgrad == problem(BF16, BF16, "reduction", layout, accumulate=True)
    for p in (problem(BF16, BF16), problem(E4M3, E4M3, a_scaling="1x128", b_scaling="128x128")):
        assert sm90_decoded.plain_problem(p) is None and sm90_decoded.why_unsupported(p, None) is None
    told = sm90_decoded.describe(problem(E4M3, PACKED_E2M1))
    assert told[0].startswith("a and b decoded into bfloat16")


@pytest.mark.parametrize(
    ("p", "said"),
    [
        (problem(FP16, E4M3), "operands are torch.float16 and torch.bfloat16"),
        (problem(E4M3, E4M3, a_scaling="row"), "operands are torch.float8_e4m3fn and torch.bfloat16"),
        (problem(E4M3, E4M3, b_preshuffled=True), "AMD's matrix units"),
        (replace(problem(E4M3, E4M3, layout="NN"), K=168), "may not reach into the next group"),
        (replace(problem(BF16, PACKED_E2M1), G=1000, N=2**22), "decoded as one matrix of at most"),
        (replace(problem(E4M3, E4M3), G=1025), "at most 1024 groups"),
    ],
)
def test_what_is_refused(p: GroupedProblem, said: str) -> None:
    reason = sm90_decoded.why_unsupported(p, None)
    assert reason is not None and said in reason
    assert sm90_decoded.why_unsupported(replace(p, G=1), None) is None or "G=" not in reason


def test_one_group_has_no_next() -> None:
    assert sm90_decoded.why_unsupported(replace(problem(E4M3, E4M3, layout="NN"), G=1, K=168), None) is None


# ---------------------------------------------------------------------------------------------------------------------
# Products


@dataclass(frozen=True)
class Case:
    """kind, sizes, N, K as in GroupedCase; a, b: their dtypes; transposed: codes of wgrad are stored [columns, rows]."""

    kind: str
    a: torch.dtype
    b: torch.dtype
    sizes: tuple[int, ...] = (5, 70, 0, 1)
    N: int = 136
    K: int = 96
    extra: int = 3
    transposed: bool = False
    out_dtype: torch.dtype = BF16
    bias_dtype: torch.dtype | None = None
    accumulate: bool = False
    gap: int = 0  # elements between matrices of b, beyond their rows

    def problem(self) -> GroupedProblem:
        rows = sum(self.sizes) + self.extra
        m_n_k = {
            "forward": (rows, self.N, self.K),
            "dgrad": (rows, self.K, self.N),
            "wgrad": (self.N, self.K, rows),
        }[self.kind]
        layout = {"forward": "TN", "dgrad": "NN", "wgrad": "TN" if self.transposed else "NT"}[self.kind]
        a_scaling, b_scaling = ("1x32" if t.itemsize == 1 else None for t in (self.a, self.b))
        return GroupedProblem(
            len(self.sizes), *m_n_k, "reduction" if self.kind == "wgrad" else "rows", layout, self.a, self.b, self.out_dtype,
            self.bias_dtype, self.accumulate, "cuda", a_scaling, b_scaling,
        )  # fmt: skip


def operand(dtype: torch.dtype, shape: tuple[int, ...], k_last: bool, random: torch.Generator) -> Any:
    """(stored, scale, float64 values as stored) of a matrix, or of one for each group. Scale blocks differ by powers of two."""
    if len(shape) == 3:
        made = [operand(dtype, shape[1:], k_last, random) for _ in range(shape[0])]
        scales = [scale.view(torch.uint8) for _, scale, _ in made if scale is not None]
        stored = torch.stack([each.view(torch.uint8) if each.itemsize == 1 else each for each, _, _ in made])
        scale = torch.stack(scales).view(torch.float8_e8m0fnu) if scales else None
        return stored.view(dtype), scale, torch.stack([value for _, _, value in made])
    rows, columns = shape
    if dtype == BF16:
        stored = torch.randn(shape, generator=random).to(BF16)
        return stored, None, stored.double()
    packed = columns // 2 if dtype == PACKED_E2M1 else columns
    stored = torch.randint(0, 256, (rows, packed), generator=random, dtype=torch.uint8)
    if dtype != PACKED_E2M1:
        stored = stored & ~(0x40 if dtype == E5M2 else 0x04)  # below 2, and no NaN
    scale = torch.randint(122, 131, scale_shape("1x32", rows, columns, k_last), generator=random, dtype=torch.uint8)
    stored, scale = stored.view(dtype), scale.view(torch.float8_e8m0fnu)
    return stored, scale, values(stored, scale, "1x32", k_last)


def check(case: Case, device: str) -> list[str]:
    p = case.problem()
    random = torch.Generator().manual_seed(0)
    a, a_scale, left = operand(case.a, p.a_shape, p.a_k_last, random)
    b, b_scale, right = operand(case.b, p.b_shape, p.b_k_last, random)
    rows = sum(case.sizes)
    if a_scale is not None and case.kind != "wgrad":
        a_scale.view(torch.uint8)[rows:] = 255  # NaN
    for t in (a, b) if case.kind == "wgrad" else (a,):
        if t.dtype != PACKED_E2M1:
            (t[:, rows:] if case.transposed else t[rows:]).fill_(float("nan"))
    addend = torch.randn(p.out_shape, generator=random).to(case.out_dtype) if case.accumulate else None
    bias = None if case.bias_dtype is None else torch.randn(p.G, p.N, generator=random).to(case.bias_dtype)
    flat = (p.out_shape[0] if len(p.out_shape) == 2 else p.G * p.M, p.N)
    given = None if addend is None else addend.view(flat).to(device)
    out = poisoned(*flat, case.out_dtype, device, addend=given)
    tensors = GroupedTensors(
        *(None if t is None else t.to(device) for t in (a, b, torch.tensor(case.sizes), None, bias, a_scale, b_scale))  # type: ignore[arg-type]
    )
    if case.gap:
        wide = torch.empty(p.G, b[0].numel() + case.gap, dtype=b.dtype, device=device)
        apart = wide[:, : b[0].numel()].view(b.shape)
        tensors = tensors._replace(b=apart.copy_(tensors.b))
    notes = sm90_decoded.run(p, None, tensors._replace(out=out.tensor.view(p.out_shape)))
    more: dict[str, Any] = {"scaled": True}
    if case.kind == "wgrad":
        x, y = (left.mT, right.mT) if case.transposed else (left, right)
        exact, start, parts = wgrad_reference(x, y, case.sizes, addend=addend), 0, []
        for g, size in enumerate(case.sizes):
            span, start = slice(start, start + size), start + size
            told = None if addend is None else addend[g]
            parts.append(bounds.gemm_bound(x[span].mT, y[span].mT, case.out_dtype, addend=told, **more))
        bound = torch.stack(parts)
    else:
        right = right if p.b_k_last else right.mT
        exact, start, parts = grouped_reference(left, right, case.sizes, bias=bias), 0, []
        for g, size in enumerate(case.sizes):
            told = None if bias is None else bias[g]
            parts.append(bounds.gemm_bound(left[start : start + size], right[g], case.out_dtype, bias=told, **more))
            start += size
        parts.append(torch.full((case.extra, p.N), 0.0, dtype=torch.float64))
        bound = torch.cat(parts)
    bounds.assert_within(out.tensor.view(p.out_shape).cpu(), exact, bound, str(case))
    out.assert_guards_intact()
    return notes


MIXES = [(E4M3, E4M3), (E5M2, E4M3), (BF16, PACKED_E2M1), (E4M3, PACKED_E2M1), (PACKED_E2M1, PACKED_E2M1), (BF16, E4M3)]


def cases() -> list[Case]:
    made = [Case(kind, a, b) for kind in ("forward", "dgrad", "wgrad") for a, b in MIXES]
    made += [Case("wgrad", a, b, extra=4, transposed=True) for a, b in MIXES if BF16 not in (a, b)]
    # Loads of single codes: rows that are no multiple of 8.
    made += [Case(kind, E4M3, PACKED_E2M1, N=138, K=70) for kind in ("forward", "wgrad")]
    made += [Case("dgrad", E4M3, E4M3, N=160, K=75), Case("dgrad", E5M2, E4M3, sizes=(40,), N=75, K=72)]
    made += [
        Case("forward", E4M3, E4M3, sizes=(9,), N=1, K=40),
        Case("forward", E4M3, E4M3, sizes=(9, 3), N=1, K=40, gap=24),
    ]
    made += [Case("forward", BF16, PACKED_E2M1, sizes=(1,) * 40, N=24, K=32), Case("forward", E4M3, E4M3, gap=48)]
    made += [
        Case("forward", E4M3, E4M3, sizes=(300, 200), out_dtype=FP32, bias_dtype=BF16),
        Case("wgrad", E4M3, E4M3, sizes=(5, 300, 0, 77), out_dtype=FP32, accumulate=True),
        Case("wgrad", E4M3, PACKED_E2M1, accumulate=True),
    ]
    # dgrad reduces over N, blocks of 32 of which are a group's own.
    return [
        replace(case, N=-(-case.N // 32) * 32) if case.kind == "dgrad" and len(case.sizes) > 1 else case
        for case in made
    ]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_products_with_kernels_in_pytorch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []

    class Decode:
        def __init__(self, spec: dense_decoded.DecodeSpec) -> None:
            self.spec = spec

        def launch(
            self, x: int, x_stride: int, scale: int, out: int, out_stride: int, copy_stride: int, R: int, C: int, rows: int,
            columns: int, stream: int,
        ) -> None:  # fmt: skip
            """As sm90_decode.Decode.__call__."""
            spec = self.spec
            width = C // 2 if spec.code == "e2m1" else C
            if spec.whole_chunks:
                assert C % 8 == 0 and (x | x_stride) % (4 if spec.code == "e2m1" else 8) == 0
            assert out % 16 == out_stride % 16 == columns % 8 == 0 and columns >= C and rows == R and not spec.slices
            codes = memory(x, R, x_stride, width)
            shape = scale_shape("1x32", R, C, spec.k_last)
            scales = memory(scale, shape[0], shape[1], shape[1])
            dtype = {"e4m3fn": E4M3, "e5m2": E5M2, "e2m1": PACKED_E2M1}[spec.code or ""]
            made = torch.zeros(rows, columns, dtype=BF16)
            exact = values(codes.view(dtype), scales.view(torch.float8_e8m0fnu), "1x32", spec.k_last)
            made[:, :C] = exact.to(BF16)
            for row, line in enumerate(made):
                ctypes.memmove(out + row * out_stride, line.data_ptr(), 2 * columns)
            launched.append("decode")

    def grouped(p: GroupedProblem, config: Any, tensors: GroupedTensors) -> list[str]:
        assert config is None and p.a_dtype == p.b_dtype == BF16 and p.a_scaling is p.b_scaling is None
        for t, shape in ((tensors.a, p.a_shape), (tensors.b, p.b_shape)):
            assert tuple(t.shape) == shape and t.dtype == BF16
        decoded_only = [t for t, dtype in ((tensors.a, case.a), (tensors.b, case.b)) if dtype != BF16]
        assert all(sm90_launch._misaligned(t) is None for t in decoded_only)
        launched.append("grouped")
        return registry.get("native").run_grouped_gemm(replace(p, device_type="cpu"), None, tensors)

    monkeypatch.setattr(dense_decoded, "_kernel", Decode)
    monkeypatch.setattr(sm90_launch, "run", grouped)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    notes = check(case, "cpu")
    assert launched == ["decode"] * ((case.a != BF16) + (case.b != BF16)) + ["grouped"]
    assert ("b copied" in "".join(notes)) == (case.gap > 0 and case.N > 1)


def memory(address: int, rows: int, stride: int, width: int) -> Tensor:
    """Bytes [rows, width] that begin `stride` bytes apart."""
    lines = [ctypes.string_at(address + row * stride, width) for row in range(rows)]
    return torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.uint8).view(rows, width)


@on_gpu
@pytest.mark.parametrize("case", cases(), ids=str)
def test_products(case: Case) -> None:
    check(case, "cuda")


@on_gpu
def test_quantized_tensors_in_a_graph() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(76, 96, generator=random).to(BF16).cuda()
    w = torch.randn(3, 64, 96, generator=random).to(BF16).cuda()
    sizes = torch.tensor([40, 0, 36], device="cuda")
    for a, b in ((fw.quantize(x, "mxfp8_e4m3"), fw.quantize(w, "mxfp8_e4m3")), (x, fw.quantize(w, "mxfp4"))):
        right = fw.grouped_gemm(a, b, sizes, backend="hopper")
        assert "decoded into bfloat16" in str(fw.explain_grouped(a, b, sizes, backend="hopper"))
        out = torch.full_like(right, torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fw.grouped_gemm(a, b, sizes, out=out, backend="hopper")
        graph.replay()
        assert torch.equal(out, right)
