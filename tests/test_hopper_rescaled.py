"""MXFP4 with MXFP4 as FP8 products with scales of rows on Hopper: which products, what the kernel writes, and both ways it may go."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fourwave as fw
from fourwave import formats
from fourwave.backends import registry
from fourwave.backends.hopper import cutedsl_missing
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm import sm90_choice, sm90_config, sm90_decoded, sm90_launch, sm90_rescaled, sm90_tiles
from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.quantize import QuantizedTensor
from fourwave.testing import bounds
from hopper_stand_in import stand_in

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
missing = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(missing is not None, reason=f"no hopper: {missing}")
ZERO, NAN = 133, 255  # scale of a row whose factor is 1; of no number
FAST: Any = replace(
    sm90_tiles.PROMOTING_SQUARE, tile_k=128, cluster_m=1, cluster_n=2
)  # asks for the FP8 product, of any size


def problem(M: int = 8192, N: int = 4096, K: int = 4096, **more: Any) -> GemmProblem:
    given = {"layout": "TN", "out_dtype": BF16, "device_type": "cuda", **more}
    return GemmProblem(M, N, K, a_dtype=PACKED_E2M1, b_dtype=PACKED_E2M1, a_scaling="1x32", b_scaling="1x32", **given)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    exact = formats.decode(formats.unpack_e2m1(codes.cpu()), formats.get("e2m1"), torch.float64)
    return exact * expand_scale(scale.cpu(), "1x32", tuple(exact.shape), True)


def operand(rows: int, K: int, seed: int, spread: int = sm90_rescaled.SPREAD) -> tuple[Tensor, Tensor]:
    """Codes and bytes of scales; every row has scales at both ends of what `spread` allows, another one its own."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, K // 2), generator=generator, dtype=torch.uint8)
    codes[:, ::16] |= 0x11  # in each block there is something
    scale = torch.randint(0, spread + 1, (rows, K // 32), generator=generator)
    scale[:, 0], scale[:, -1] = 0, spread
    return codes, (scale + torch.randint(112, 128, (rows, 1), generator=generator)).to(torch.uint8)


# name, what is changed, whether it fits. Where not, only the block that does not fit meets elements of a[4], so an error of its own
# shows in out[4].
def _nothing(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
    pass


def _border(difference: int) -> Callable[..., None]:
    def change(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
        a[4, :32], a[4, 48:] = 0, 0
        sa[4], sb[70], sb[70, 2] = 133, 135, 135 - difference

    return change


def _zero_blocks(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
    a[3, 16:32], sa[3, 1] = 0, 0
    a[5, 16:32], sa[5, 1] = 0x88, 254  # of -0
    b[1, :16], sb[1, 0] = 0x80, 254
    a[6], sa[6] = 0, 0
    b[2], sb[2] = 0, 254


def _half_a_block(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
    a[3, 16:32], sa[3, 1] = 0, 60
    a[3, 31] = 0x10


def _nan(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
    sa[7, 1], sa[8, 2] = NAN, NAN
    a[8, 32:48] = 0
    sb[9] = NAN


def _ends(scale: int) -> Callable[..., None]:
    def change(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> None:
        sa[11] = scale

    return change


LIMIT = sm90_rescaled.LIMIT
CASES: dict[str, tuple[Callable[..., None], bool]] = {
    "as it is": (_nothing, True),
    "14 apart": (_border(14), True),
    "15 apart": (_border(15), False),
    "zero blocks": (_zero_blocks, True),
    "half a block": (_half_a_block, False),
    "nan": (_nan, True),
    "least factor": (_ends(ZERO - LIMIT), True),
    "below it": (_ends(ZERO - LIMIT - 1), False),
    "largest factor": (_ends(ZERO + LIMIT), True),
    "above it": (_ends(ZERO + LIMIT + 1), False),
    "least scale": (_ends(0), False),
}
every_case = pytest.mark.parametrize("name", CASES)


def operands(name: str, M: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = (*operand(M, K, 0), *operand(N, K, 1))
    CASES[name][0](*made)
    return made


def model(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, bool]:
    """(E4M3, factors, whether it fits) as sm90_rescale.py defines them; in float64, and rounded at the end."""
    rows, blocks = scale.shape
    there = (codes & 0x77).view(rows, blocks, 16).amax(-1) != 0
    counts = there & (scale != NAN)
    number = scale.int()
    largest = torch.where(counts, number, -1).amax(-1)
    least = torch.where(counts, number, 300).amin(-1)
    largest = torch.where(largest < 0, ZERO, largest)
    fits = (largest - least <= sm90_rescaled.SPREAD) & ((largest - ZERO).abs() <= LIMIT)
    factors = torch.exp2((largest - ZERO).double())
    return (values(codes, scale) / factors[:, None]).to(E4M3), factors.float(), bool(fits.all())


@every_case
def test_the_model(name: str) -> None:
    a, sa, b, sb = operands(name, 40, 72, 160)
    made = [model(a, sa), model(b, sb)]
    assert (made[0][2] and made[1][2]) == CASES[name][1]
    for (codes, factors, fits), exact in zip(made, (values(a, sa), values(b, sb)), strict=True):
        if fits:
            assert torch.allclose(codes.double() * factors.double()[:, None], exact, rtol=0, atol=0, equal_nan=True)
        elif name in ("15 apart", "half a block"):
            assert not torch.equal(codes.double() * factors.double()[:, None], exact)


def test_which_products() -> None:
    p = problem()
    fp8 = sm90_rescaled.fp8_problem(p, None)
    assert fp8 == replace(p, a_dtype=E4M3, b_dtype=E4M3, a_scaling="row", b_scaling="row")
    assert sm90_config.promotes(fp8) and not sm90_config.promotes(replace(fp8, fast_accum=True))
    assert "sm90_rescale.py" in sm90_rescaled.describe(p, None)[0]
    for more in (
        {"activation": "silu"},
        {"activation": "swiglu"},
        {"bias_dtype": FP32},
        {"out_dtype": FP16},
        {"M": 257, "N": 16384},
    ):
        assert sm90_rescaled.fp8_problem(problem(**more), None) is not None, more
    refused: list[tuple[dict[str, Any], str]] = [
        ({"layout": "NT"}, "K contiguous"),
        ({"K": 4112}, "whole blocks of 32"),
        ({"out_dtype": FP32}, "fewer bits"),
        ({"accumulate": True}, "accumulation"),
        ({"preactivation_dtype": BF16}, "saved preactivation"),
        ({"out_dtype": E4M3, "out_scaling": "tensor"}, "float8_e4m3fn"),
        ({"N": 4100}, "inside a chunk"),
        ({"N": 4104, "activation": "swiglu"}, "inside a chunk"),
        ({"M": 256, "N": 2**15}, "256 rows"),
        ({"M": 1024, "N": 1024}, "pays from"),
    ]
    for more, said in refused:
        p = problem(**more)
        assert sm90_rescaled.fp8_problem(p, None) is None
        reason = sm90_rescaled.why_not(p, None)
        assert reason is not None and said in reason, (more, reason)
        assert reason in sm90_rescaled.describe(p, None)[-1]
        assert sm90_rescaled.why_unsupported(p, None) is None  # in bfloat16
    assert sm90_rescaled.why_unsupported(problem(batch_invariant=True), None) is not None
    assert sm90_rescaled.fp8_problem(replace(problem(), a_dtype=E4M3), None) is None
    # Configurations of either product choose it.
    assert sm90_rescaled.fp8_problem(problem(700, 208, 704, activation="swiglu"), FAST) is not None
    small = problem(300, 72, 160)
    assert sm90_rescaled.fp8_problem(small, None) is None and sm90_rescaled.fp8_problem(small, FAST) is not None
    assert sm90_rescaled.fp8_problem(problem(), sm90_tiles.WIDE) is None
    for config in (sm90_tiles.WIDE, FAST, None):
        assert sm90_rescaled.why_unsupported(small, config) is None
    few = problem(64, 128, 256)  # their weights are converted in registers, a step of 128, too
    swapped = sm90_choice.default_config(sm90_decoded.plain_problem(few) or few)[0]
    assert swapped.few_rows and swapped.tile_k == 128
    assert sm90_rescaled.why_unsupported(few, swapped) is None and sm90_rescaled.fp8_problem(few, swapped) is None
    assert "tile_m" in (sm90_rescaled.why_unsupported(small, replace(FAST, tile_m=130)) or "")
    assert "fewer bits" in (sm90_rescaled.why_unsupported(replace(small, out_dtype=FP32), FAST) or "")


# ---------------------------------------------------------------------------------------------------------------------
# With stand-ins for the kernels


def memory(address: int, rows: int, stride: int, width: int) -> Tensor:
    """Bytes [rows, width] that begin `stride` bytes apart."""
    lines = [ctypes.string_at(address + row * stride, width) for row in range(rows)]
    return torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.uint8).view(rows, width)


class Rescale:
    """As sm90_rescale.Rescale.__call__."""

    def launch(
        self, a: int, a_stride: int, a_scale: int, a_out: int, b: int, b_stride: int, b_scale: int, b_out: int, factors: int,
        flag: int, M: int, N: int, K: int, stream: int,
    ) -> None:  # fmt: skip
        assert (a | b | a_stride | b_stride) % 8 == 0 == a_out % 16 == b_out % 16 and K % 32 == 0
        assert ctypes.string_at(flag, 4) == bytes(4)
        given = ((a, a_stride, a_scale, a_out, M, factors), (b, b_stride, b_scale, b_out, N, factors + 4 * M))
        for codes, stride, scale, out, rows, of_rows in given:
            scales = memory(scale, rows, K // 32, K // 32)
            made, factor, fits = model(memory(codes, rows, stride, K // 2), scales)
            ctypes.memmove(out, made.contiguous().data_ptr(), rows * K)
            ctypes.memmove(of_rows, factor.data_ptr(), 4 * rows)
            if not fits:
                ctypes.memmove(flag, (1).to_bytes(4, "little"), 4)


class Decode:
    """As sm90_rescale.Decode.__call__."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def launch(
        self, a: int, a_stride: int, a_scale: int, a_out: int, b: int, b_stride: int, b_scale: int, b_out: int, flag: int,
        M: int, N: int, K: int, ctas: int, stream: int,
    ) -> None:  # fmt: skip
        assert 1 <= ctas <= (-(-M // 128) + -(-N // 128)) * -(-K // 128)
        if ctypes.string_at(flag, 4) == bytes(4):
            return
        self.done.append("decode")
        for codes, stride, scale, out, rows in ((a, a_stride, a_scale, a_out, M), (b, b_stride, b_scale, b_out, N)):
            made = values(memory(codes, rows, stride, K // 2), memory(scale, rows, K // 32, K // 32)).to(BF16)
            ctypes.memmove(out, made.contiguous().data_ptr(), rows * K * 2)


class Product:
    """What sm90_launch calls: sm90.Gemm and sm90.GuardedGemm, of TN."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def run(self, spec: sm90_launch.Specialisation, got: dict[str, Any]) -> None:
        if "guard" in got and ctypes.c_int32.from_address(got["guard"]).value != spec.runs_when:
            return
        self.done.append("fp8" if spec.a_dtype == E4M3 else "bf16")
        read = []
        for name, rows, dtype in (("a", got["M"], spec.a_dtype), ("b", got["N"], spec.b_dtype)):
            stride, width = got[f"{name}_stride"] * dtype.itemsize, got["K"] * dtype.itemsize
            assert got[name] % 16 == stride % 16 == 0
            value = memory(got[name], rows, stride, width).view(dtype).double()
            if spec.a_scaling == "row":
                value = value * memory(got[f"scale_{name}"], rows, 4, 4).view(FP32).double()
            read.append(value)
        bias = memory(got["bias"], 1, 0, 4 * got["N"]).view(FP32)[0]
        y = gemm_reference(*read, bias=bias, alpha=got["alpha"], activation=spec.activation).to(spec.out_dtype)
        assert got["out"] % 16 == got["out_stride"] * 2 % 16 == y.shape[1] * 2 % 16 == 0
        for row, line in enumerate(y):
            ctypes.memmove(got["out"] + row * got["out_stride"] * 2, line.data_ptr(), 2 * len(line))


@pytest.mark.parametrize("alpha", [0.5, 0.0, 2.0**20])
@pytest.mark.parametrize("how", ["plain", "strided", "preshuffled"])
@every_case
def test_the_way_it_goes(name: str, how: str, alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that the flag leaves has the right operands, the other does nothing. Twice: the second call goes a shorter way."""
    M, N, K = 264, 80, 192
    a, sa, b, sb = operands(name, M, N, K)
    p = problem(M, N, K, bias_dtype=FP32, activation="silu", b_preshuffled=how == "preshuffled")
    A, B = values(a, sa), values(b, sb)
    done: list[str] = []
    stand_ins: dict[str, Any] = {"Rescale": Rescale(), "Decode": Decode(done)}
    monkeypatch.setattr(sm90_rescaled, "_kernel", stand_ins.__getitem__)

    def decoded(*given: Any) -> Tensor:
        done.append("bf16 operand")
        operand, t, scale = given
        return operand.target("cpu").copy_(values(t, scale))

    monkeypatch.setattr(sm90_decoded, "decoded", decoded)
    stand_in(monkeypatch, Product(done).run)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(3))
    scale_b: Tensor = sb.view(torch.float8_e8m0fnu)
    if how == "strided":
        a, b = (torch.nn.functional.pad(t, (0, 5), value=255)[:, : K // 2] for t in (a, b))
    elif how == "preshuffled":
        shuffled = fw.preshuffle(QuantizedTensor.from_codes("mxfp4", b, scale_b))
        assert isinstance(shuffled.weights, QuantizedTensor)
        assert shuffled.weights.data is not None and shuffled.packed_scale is not None
        b, scale_b = shuffled.weights.data, shuffled.packed_scale
    right = gemm_reference(A, B, bias=bias, alpha=alpha, activation="silu").to(BF16)
    config = FAST
    if alpha > 2.0**16:
        with pytest.raises(NotImplementedError, match=r"alpha=1.04858e\+06"):
            sm90_rescaled.run(p, FAST, GemmTensors(a, b, torch.empty(M, N, dtype=BF16), bias, alpha=alpha))
        config = None
    for gap in (8, 8, 3):
        out = torch.full((M, N + gap), torch.nan, dtype=BF16)[:, :N]
        tensors = GemmTensors(a, b, out, bias, a_scale=sa.view(torch.float8_e8m0fnu), b_scale=scale_b, alpha=alpha)
        told = sm90_rescaled.copies(p, config, tensors)
        notes = sm90_rescaled.run(p, config, tensors)
        by_host = alpha >= 2.0**16  # it knows that without the device
        assert done == (
            ["bf16 operand"] * 2 + ["bf16"] if by_host else ["fp8"] if CASES[name][1] else ["decode", "bf16"]
        )
        done.clear()
        assert torch.equal(out.nan_to_num(7.0), right.nan_to_num(7.0)) and torch.equal(out.isnan(), right.isnan())
        assert ("alpha=1.04858e+06" in "".join(notes)) == ("alpha=" in "".join(told)) == by_host
        if not by_host:
            assert notes == told
            said = "".join(notes)
            assert ("a copied" in said) == (how == "strided") and ("out written through a copy" in said) == (gap == 3)
            assert (sm90_decoded.UNSHUFFLED in notes) == (how == "preshuffled")
            # The product that stood behind the flag, without it: kernels of either kind are not taken for each other.
            sm90_decoded.run(p, None, tensors)
            assert done == ["bf16 operand"] * 2 + ["bf16"]
            done.clear()


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
def test_kernels_compile_without_a_gpu() -> None:
    for name in ("Rescale", "Decode"):
        assert sm90_rescaled.compile_kernel(sm90_rescaled.RescaleSpec(name)) is not None
    p = problem()
    for q, runs_when in ((sm90_rescaled.fp8_problem(p, None), 0), (sm90_decoded.plain_problem(p), 1)):
        assert q is not None
        spec = sm90_launch.specialise(q, sm90_choice.default_config(q)[0], runs_when=runs_when)
        assert sm90_launch.compile_kernel(spec) is not None


# ---------------------------------------------------------------------------------------------------------------------
# On a Hopper GPU


def quantized(codes: Tensor, scale: Tensor) -> QuantizedTensor:
    return QuantizedTensor.from_codes("mxfp4", codes, scale.view(torch.float8_e8m0fnu))


@on_gpu
@pytest.mark.parametrize(("M", "N", "K"), [(300, 77, 192), (12, 75, 2176), (13, 71, 4128)])
@every_case
def test_codes_and_factors(name: str, M: int, N: int, K: int) -> None:
    a, sa, b, sb = operands(name, M, N, K)
    made = sm90_rescaled.rescaled(*(t.cuda() for t in (a, sa, b, sb)))
    assert bool(made.flag.item()) is not CASES[name][1]
    if not CASES[name][1]:
        return
    for buffer, factors, (codes, right, _) in zip(
        made.buffers, made.factors.split([M, N]), (model(a, sa), model(b, sb)), strict=True
    ):
        got = buffer[: len(codes)].cpu()
        assert torch.equal(factors.cpu(), right)
        same = (got.view(torch.uint8) == codes.view(torch.uint8)) | (got.float().isnan() & codes.float().isnan())
        assert same.all(), f"{int((~same).sum())} codes"


@on_gpu
@pytest.mark.parametrize("more", [{}, {"activation": "swiglu"}, {"activation": "gelu", "alpha": -2.0}], ids=str)
@every_case
def test_products(name: str, more: dict[str, Any]) -> None:
    """Within the bound; and the bits of the FP8 product of what was written in E4M3, or of the one in bfloat16."""
    M, N, K = 700, 208, 704
    a, sa, b, sb = operands(name, M, N, K)
    x, w = quantized(a.cuda(), sa.cuda()), quantized(b.cuda(), sb.cuda())
    given = dict(more)
    if more:  # beside it small products would not show
        given["bias"] = torch.randn(N, generator=torch.Generator().manual_seed(3)).cuda()
    columns = N // 2 if more.get("activation") == "swiglu" else N
    out = torch.full((M, columns), torch.nan, dtype=BF16, device="cuda")
    fw.gemm(x, w, out=out, config=FAST, backend="hopper", **given)
    told: dict[str, Any] = dict(given)
    if more:
        told["bias"] = given["bias"].cpu()
    A, B = values(a, sa), values(b, sb)
    u_acc = bounds.hopper_fp8_u_acc(K, True, wide=True) if CASES[name][1] else bounds.U_FP32
    bound = bounds.gemm_bound(A, B, out.dtype, **told, u_acc=u_acc, scaled=True)
    bounds.assert_within(out.cpu(), gemm_reference(A, B, **told), bound)
    if CASES[name][1]:
        left, right = (
            QuantizedTensor.from_codes("fp8_row", t[0].cuda(), t[1].cuda()) for t in (model(a, sa), model(b, sb))
        )
        other = fw.gemm(left, right, config=FAST, backend="hopper", **given)
    else:
        other = fw.gemm(x, w, config=_in_bf16(M, N, K, **more), backend="hopper", **given)
    assert torch.equal(out.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(out.isnan(), other.isnan())


def _in_bf16(M: int, N: int, K: int, **more: Any) -> Any:
    more = {key: value for key, value in more.items() if key != "alpha"}
    p = problem(M, N, K, bias_dtype=FP32 if more else None, **more)
    plain = sm90_decoded.plain_problem(p)
    assert plain is not None
    return sm90_decoded.chosen_config(p, plain)[0]


@on_gpu
def test_in_a_graph() -> None:
    """The device decides at each replay."""
    M, N, K = 640, 144, 512
    made = {name: [t.cuda() for t in operands(name, M, N, K)] for name in ("as it is", "15 apart")}
    a, sa, b, sb = (t.clone() for t in made["as it is"])
    x, w = quantized(a, sa), quantized(b, sb)
    right = {
        name: fw.gemm(quantized(*t[:2]), quantized(*t[2:]), config=FAST, backend="hopper") for name, t in made.items()
    }
    out = torch.full_like(right["as it is"], torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(x, w, out=out, config=FAST, backend="hopper")
    for name in ("15 apart", "as it is", "15 apart", "15 apart", "as it is"):
        for t, new in zip((a, sa, b, sb), made[name], strict=True):
            t.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, right[name]), name


@on_gpu
def test_default_of_large_products() -> None:
    """4096 rows and more, quantized by a quantizer: fw.explain says FP8, and so do the bits."""
    torch.manual_seed(0)
    x, w = (fw.quantize(torch.randn(n, 2048, device="cuda", dtype=BF16), "mxfp4") for n in (4096, 2048))
    told = fw.explain(x, w, backend="hopper")
    config: Any = told.config
    assert "E4M3" in str(told) and config.tile_k == 128
    codes = [model(q.data.cpu(), q.scale.view(torch.uint8).cpu()) for q in (x, w)]  # type: ignore[union-attr]
    left, right = (QuantizedTensor.from_codes("fp8_row", t[0].cuda(), t[1].cuda()) for t in codes)
    A, B = (q.dequantize(torch.float64)[:256].cpu() for q in (x, w))
    for dtype in (BF16, FP16):
        out = fw.gemm(x, w, out_dtype=dtype, backend="hopper")
        assert torch.equal(out, fw.gemm(left, right, out_dtype=dtype, config=config, backend="hopper"))
        bound = bounds.gemm_bound(A, B, dtype, u_acc=bounds.hopper_fp8_u_acc(2048, True), scaled=True)
        bounds.assert_within(out[:256, :256].cpu(), A @ B.mT, bound)
