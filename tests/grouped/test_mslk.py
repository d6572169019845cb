"""MSLK's names: contract, numbers of the quantizers, and the published test cases of the operator."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import mslk, sim
from fourwave.ops.gemm.config import ARCHS
from fourwave.ops.grouped_gemm.reference import grouped_reference
from fourwave.testing.bounds import error_ratio, gemm_bound

NO_SIM = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
OPS = torch.ops.fourwave
# m_sizes, N, K: meta-pytorch/MSLK, test/gemm/gemm_test.py, test_f8f8bf16_groupwise_grouped
PUBLISHED = [([128, 64], 128, 256), ([512, 256, 128], 256, 512), ([1, 128, 256], 128, 256), ([2048, 1024], 512, 512)]


def operands(sizes: list[int], N: int, K: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(3)
    x = (torch.randn(sum(sizes), K, generator=random) * 0.1).bfloat16()
    w = (torch.randn(len(sizes), N, K, generator=random) * 0.01).bfloat16()
    pairs = [mslk.quantize_fp8_block(each, block_m=128, block_k=128, k_major=False) for each in w]
    wq, w_scale = torch.stack([q for q, _ in pairs]), torch.stack([s for _, s in pairs])
    m_sizes = torch.tensor(sizes)
    xq, x_scale = mslk.quantize_fp8_group(x, m_sizes=m_sizes)
    return x, w, xq, wq, x_scale, w_scale, m_sizes


@pytest.mark.parametrize("backend", ["native", *(pytest.param(f"sim:{arch}", marks=NO_SIM) for arch in ARCHS)])
@pytest.mark.parametrize("preshuffled", [False, True])
@pytest.mark.parametrize(("sizes", "N", "K"), PUBLISHED, ids=str)
def test_published_cases(sizes: list[int], N: int, K: int, preshuffled: bool, backend: str) -> None:
    with fw.use_backend(backend):
        x, w, xq, wq, x_scale, w_scale, m_sizes = operands(sizes, N, K)
        if preshuffled:
            weights = mslk.preshuffle_b_mfma(wq)
            out = OPS.f8f8bf16_groupwise_grouped_preshuffle(xq, weights, x_scale, w_scale, m_sizes)
        else:
            out = OPS.f8f8bf16_groupwise_grouped(xq, wq, x_scale, w_scale, m_sizes)
    assert xq.dtype == (torch.float8_e4m3fnuz if backend == "sim:gfx942" else torch.float8_e4m3fn)
    near = torch.cat([part @ w[g].mT for g, part in enumerate(x.split(sizes))])
    torch.testing.assert_close(out, near, atol=1e-2, rtol=4e-2)
    # And what such tolerances do not see: the values of codes and scales.
    parts, start = [], 0
    for size in sizes:
        block = x_scale.view(-1)[start * (K // 128) : (start + size) * (K // 128)].view(K // 128, size)
        parts.append(xq[start : start + size].double() * block.mT.double().repeat_interleave(128, 1))
        start += size
    a = torch.cat(parts)
    b = wq.double() * w_scale.mT.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    exact = grouped_reference(a, b, sizes)
    bound = torch.cat([gemm_bound(p, b[g], torch.bfloat16, scaled=True) for g, p in enumerate(a.split(sizes))])
    ratio, worst = error_ratio(out, exact, bound)
    assert ratio <= 1, (ratio, worst)


def test_group_quantizer() -> None:
    x = torch.randn(10, 300) * torch.logspace(-3, 3, 10)[:, None]
    x[4] = 0
    q, scale = mslk.quantize_fp8_group(x)
    assert scale.shape == (10, 3) and q.dtype == torch.float8_e4m3fn
    for row in range(10):
        for block in range(3):
            part = x[row, 128 * block : 128 * block + 128]
            inv = torch.tensor(448.0) / part.abs().max().clamp(min=1e-12)
            assert torch.equal(scale[row, block], 1 / inv)
            codes = (part * inv).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(q[row, 128 * block : 128 * block + 128].float(), codes.float())
    assert not q[4].float().any()
    assert torch.equal(mslk.quantize_fp8_group(x, k_major=False)[1], scale.mT)
    assert torch.equal(mslk.quantize_fp8_group(x.view(2, 5, 300))[0].float(), q.float().view(2, 5, 300))


def test_scales_in_blocks_of_groups() -> None:
    x = torch.randn(12, 256)
    plain = mslk.quantize_fp8_group(x)[1]
    sizes = torch.tensor([3, 0, 7], dtype=torch.int32)
    scale = mslk.quantize_fp8_group(x, m_sizes=sizes)[1]
    assert scale.shape == (12, 2)
    flat, start = scale.view(-1), 0
    for size in [3, 0, 7, 2]:  # the last two belong to no group
        for m in range(size):
            for kb in range(2):
                assert flat[start * 2 + m + kb * size] == plain[start + m, kb]
        start += size


def test_block_quantizer() -> None:
    w = torch.randn(200, 300)
    q, scale = mslk.quantize_fp8_block(w, 128, 128)
    assert scale.shape == (2, 3)
    inv = torch.tensor(448.0) / w[128:, 128:256].abs().max()
    assert scale[1, 1] == 1 / inv
    assert torch.equal(q[128:, 128:256].float(), (w[128:, 128:256] * inv).to(q.dtype).float())
    assert torch.equal(mslk.quantize_fp8_block(w, 128, 128, k_major=False)[1], scale.mT)
    bounded, low = mslk.quantize_fp8_block(w, 128, 128, torch.tensor([1.0]))
    assert torch.allclose(low, torch.full_like(low, 1 / 448)) and bounded.float().abs().max() == 448


def test_operators_have_schema_and_fake() -> None:
    *_, xq, wq, x_scale, w_scale, m_sizes = operands([5, 2], 128, 256)
    schema = "fourwave::f8f8bf16_groupwise_grouped(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor M_sizes) -> Tensor"
    assert str(OPS.f8f8bf16_groupwise_grouped.default._schema) == schema
    for op in (OPS.f8f8bf16_groupwise_grouped, OPS.f8f8bf16_groupwise_grouped_preshuffle):
        torch.library.opcheck(op, (xq, wq, x_scale, w_scale, m_sizes), test_utils="test_faketensor")


def test_fakes_refuse_what_the_operators_do() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    *_, xq, wq, x_scale, w_scale, m_sizes = operands([5, 2], 128, 256)
    for op in (OPS.f8f8bf16_groupwise_grouped, OPS.f8f8bf16_groupwise_grouped_preshuffle):
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (xq, wq, x_scale, w_scale, m_sizes)]
            assert op(*fake).shape == (7, 128)
            wrong = [(0, fake[0][:, :128]), (4, fake[4][:1]), (3, fake[3].double()), (0, fake[0].to(torch.float32))]
            for place, other in wrong:
                with pytest.raises(ValueError, match=r"XQ|M_sizes|scale|a is"):
                    op(*fake[:place], other, *fake[place + 1 :])


def test_import_again_and_install() -> None:
    importlib.reload(importlib.import_module("fourwave.ops.grouped_gemm.groupwise"))
    code = (
        "import torch, fourwave as fw\n"
        "torch.library.define('mslk::f8f8bf16_groupwise_grouped', '(Tensor XQ) -> Tensor')\n"
        "assert fw.mslk.install() == ['f8f8bf16_groupwise_grouped_preshuffle']\n"
        "assert fw.mslk.install() == []\n"
        "assert len(torch.ops.mslk.f8f8bf16_groupwise_grouped.default._schema.arguments) == 1\n"
        "assert len(torch.ops.mslk.f8f8bf16_groupwise_grouped_preshuffle.default._schema.arguments) == 5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w_scale": torch.ones(2, 1, 2)}, r"\[G, K / 128, N / 128\] = \(2, 2, 1\)"),
        ({"x_scale": torch.ones(7)}, "7 elements"),
        ({"M_sizes": torch.tensor([1, 2, 3])}, "M_sizes 3 groups"),
        ({"M_sizes": torch.tensor([[1, 2]])}, r"\[G\]"),
        ({"XQ": torch.zeros(7, 128, dtype=torch.float8_e4m3fn)}, "XQ has K=128"),
        ({"x_scale": torch.ones(14).double()}, "x_scale is torch.float64; it must be torch.float32"),
        ({"w_scale": torch.ones(2, 2, 1).half()}, "w_scale is torch.float16; it must be torch.float32"),
        ({"XQ": torch.zeros(7, 256, dtype=torch.bfloat16)}, "XQ is torch.bfloat16; it must be torch.float8_e4m3fn or"),
        ({"WQ": torch.zeros(2, 128, 256)}, "WQ is torch.float32; it must be torch.float8_e4m3fn or"),
        ({"M_sizes": torch.tensor([5.0, 2.0])}, "M_sizes is torch.float32; it must be torch.int32 or torch.int64"),
        ({"w_scale": torch.ones(2, 2, 1, device="meta")}, "w_scale is on meta"),
    ],
)
def test_refusals(change: dict[str, torch.Tensor], message: str) -> None:
    *_, xq, wq, x_scale, w_scale, m_sizes = operands([5, 2], 128, 256)
    call = {"XQ": xq, "WQ": wq, "x_scale": x_scale, "w_scale": w_scale, "M_sizes": m_sizes, **change}
    with pytest.raises(ValueError, match=message):
        OPS.f8f8bf16_groupwise_grouped(*call.values())


def test_what_is_no_tensor_of_numbers_is_refused() -> None:
    for quantize in (mslk.quantize_fp8_group, mslk.quantize_fp8_block):
        for x in (None, torch.zeros(4, 128, dtype=torch.int32), torch.tensor(1.0)):
            with pytest.raises(ValueError, match=r"it must be a tensor \[\.\.\., K\]"):
                quantize(x)  # type: ignore[arg-type]
    for reorder in (mslk.preshuffle_b_mfma, mslk.unpreshuffle_b_mfma):
        with pytest.raises(ValueError, match="weights are of None"):
            reorder(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["XQ", "WQ", "x_scale", "w_scale", "M_sizes"])
def test_what_is_no_dense_tensor_is_refused_by_name(name: str) -> None:
    *_, xq, wq, x_scale, w_scale, m_sizes = operands([5, 2], 128, 256)
    call = {"XQ": xq, "WQ": wq, "x_scale": x_scale, "w_scale": w_scale, "M_sizes": m_sizes}
    for other in (None, [1, 2]):
        with pytest.raises(ValueError, match=f"{name} is of type"):
            mslk.f8f8bf16_groupwise_grouped(**{**call, name: other})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name} has layout"):
        mslk.f8f8bf16_groupwise_grouped(**{**call, name: torch.zeros(2, 2).to_sparse()})


@pytest.mark.parametrize("op", [mslk.f8f8bf16_groupwise_grouped, OPS.f8f8bf16_groupwise_grouped])
def test_scales_that_require_grad_are_refused(op: Any) -> None:
    *_, xq, wq, x_scale, w_scale, m_sizes = operands([5, 2], 128, 256)
    for scales in ((x_scale.clone().requires_grad_(), w_scale), (x_scale, w_scale.clone().requires_grad_())):
        with pytest.raises(ValueError, match="requires grad"):
            op(xq, wq, *scales, m_sizes)
        with torch.no_grad():
            assert not op(xq, wq, *scales, m_sizes).requires_grad


@pytest.mark.parametrize(
    ("more", "message"),
    [
        *(({"group_size": value}, "group_size is") for value in (0, -1, 128.0, None, True)),
        *(({"scale_ub": value}, "scale_ub is") for value in (1.0, torch.ones(2))),
        *(({"m_sizes": value}, "m_sizes is") for value in ([3, 4], torch.tensor([[3, 4]]), torch.tensor([3.0, 4.0]))),
        ({"m_sizes": torch.tensor([3, 4], dtype=torch.int16)}, "int32 or int64"),
        ({"m_sizes": torch.tensor([3, 5])}, "at most the 7 rows"),
        ({"m_sizes": torch.tensor([-1, 3])}, "at least 0"),
    ],
)
def test_wrong_arguments_of_the_group_quantizer(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mslk.quantize_fp8_group(torch.randn(7, 256), **more)


def test_wrong_arguments_of_both_quantizers() -> None:
    x = torch.randn(7, 256)
    for blocks in ((0, 128), (128, 0), (-1, 128), (1.5, 128)):
        with pytest.raises(ValueError, match=r"block_[mk] is"):
            mslk.quantize_fp8_block(x, *blocks)  # type: ignore[arg-type]
    for quantize in (mslk.quantize_fp8_group, mslk.quantize_fp8_block):
        with pytest.raises(ValueError, match="K must be at least 1"):
            quantize(x[:, :0])
        with pytest.raises(ValueError, match="requires grad"):
            quantize(x.clone().requires_grad_())
        with torch.no_grad():
            assert not quantize(x.clone().requires_grad_())[1].requires_grad
        # A bound below the least amax is that: scales stay positive.
        scale = quantize(x, scale_ub=torch.tensor(-1.0))[1]
        assert torch.allclose(scale, torch.full_like(scale, 1e-12 / 448))


def test_no_rows_by_groups() -> None:
    sizes = torch.zeros(2, dtype=torch.int64)
    for k_major, shape in ((True, (0, 2)), (False, (2, 0))):
        codes, scale = mslk.quantize_fp8_group(torch.zeros(0, 256), m_sizes=sizes, k_major=k_major)
        assert codes.shape == (0, 256) and scale.shape == shape
