"""What the Hopper GEMM launcher hands to a kernel when a call differs from the one before in a single thing. On the CPU, without kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm import sm90_choice, sm90_config, sm90_decoded, sm90_launch
from fourwave.ops.gemm.preshuffled_mxfp4 import shuffle_codes, shuffle_scale
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.sm90_config import HopperConfig
from fourwave.ops.gemm.sm90_decoded import Operand
from hopper_stand_in import stand_in

BF16, FP32, E4M3, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8


class Calls:
    """Launches as they arrive: the specialisation, and the arguments by name."""

    def __init__(self) -> None:
        self.seen: list[tuple[sm90_launch.Specialisation, dict[str, Any]]] = []

    def run(self, spec: sm90_launch.Specialisation, got: dict[str, Any]) -> None:
        self.seen.append((spec, got))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    recorded = Calls()
    stand_in(monkeypatch, recorded.run)
    return recorded


def problem(M: int, N: int, K: int, dtype: torch.dtype = BF16, **more: Any) -> GemmProblem:
    b_dtype = more.pop("b_dtype", dtype)
    return GemmProblem(M, N, K, "TN", dtype, b_dtype, BF16, device_type="cuda", **more)


def aligned(rows: int, columns: int, dtype: torch.dtype, gap: int = 0, skip: int = 0) -> torch.Tensor:
    """[rows, columns], `gap` elements after each row, its base `skip` elements past a multiple of 16 bytes."""
    elements = rows * (columns + gap)
    flat = torch.zeros((elements + skip) * dtype.itemsize + 16, dtype=U8)
    start = -flat.data_ptr() % 16 + skip * dtype.itemsize
    values = flat[start : start + elements * dtype.itemsize].view(dtype)
    return values.reshape(rows, columns + gap)[:, :columns]


def test_another_stride_of_out(calls: Calls) -> None:
    p = problem(160, 512, 64)
    a, b = aligned(160, 64, BF16), aligned(512, 64, BF16)
    for gap in (0, 0, 8, 64, 8, 0):
        assert sm90_launch.run(p, None, GemmTensors(a, b, aligned(160, 512, BF16, gap))) == []
        assert calls.seen[-1][1]["out_stride"] == 512 + gap


def test_another_base_of_out_in_a_tile_for_few_rows(calls: Calls) -> None:
    """Stores of four elements where rows begin at multiples of four, of one elsewhere: another kernel, with the same strides."""
    p = problem(8, 512, 64)
    assert sm90_choice.default_config(p)[0].few_rows
    a, b = aligned(8, 64, BF16), aligned(512, 64, BF16)
    for skip in (0, 0, 1, 4, 1, 2, 0):
        out = aligned(8, 512, BF16, skip=skip)
        assert sm90_launch.run(p, None, GemmTensors(a, b, out)) == []
        spec, got = calls.seen[-1]
        assert got["out"] == out.data_ptr() and spec.vector == (skip % 4 == 0)


def test_rows_of_out_that_end_inside_a_chunk(calls: Calls) -> None:
    """Memory behind a row is the caller's, and a TMA store would write it."""
    p = problem(160, 522, 64)
    out = aligned(160, 522, BF16, 6)
    (note,) = sm90_launch.run(p, None, GemmTensors(aligned(160, 64, BF16), aligned(522, 64, BF16), out))
    got = calls.seen[-1][1]
    assert "end inside a chunk" in note and got["out"] != out.data_ptr() and got["out_stride"] % 8 == 0


def test_scales_of_blocks_at_another_base(calls: Calls) -> None:
    """TMA reads them: a second call, whose scales begin elsewhere, copies them, and a third one does not."""
    p = problem(256, 256, 512, E4M3, a_scaling="1x128", b_scaling="128x128")
    a, b, out = aligned(256, 512, E4M3), aligned(256, 512, E4M3), aligned(256, 256, BF16)
    for skip_a, skip_b in ((0, 0), (0, 1), (1, 0), (0, 0)):
        scales = aligned(256, 4, FP32, skip=skip_a), aligned(2, 4, FP32, skip=skip_b)
        notes = sm90_launch.run(p, None, GemmTensors(a, b, out, a_scale=scales[0], b_scale=scales[1]))
        got = calls.seen[-1][1]
        assert len(notes) == skip_a + skip_b
        assert got["scale_a"] % 16 == got["scale_b"] % 16 == 0
        assert (got["scale_a"] == scales[0].data_ptr()) == (skip_a == 0)
        assert (got["scale_b"] == scales[1].data_ptr()) == (skip_b == 0)


def test_preshuffled_weights_with_gaps_between_rows(calls: Calls) -> None:
    p = problem(8, 256, 128, BF16, b_dtype=U8, b_scaling="1x32", b_preshuffled=True)
    a, out, scale = aligned(8, 128, BF16), aligned(8, 256, BF16), aligned(256, 16, U8).view(torch.float8_e8m0fnu)
    for gap in (0, 64, 0):
        b = aligned(256, 64, U8, gap)
        notes = sm90_launch.run(p, None, GemmTensors(a, b, out, b_scale=scale))
        assert notes == ([sm90_launch.SCATTERED] if gap else [])
        assert (calls.seen[-1][1]["b"] == b.data_ptr()) == (gap == 0)


def test_more_rows_of_preshuffled_weights_are_decoded_from_plain_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales both."""
    p = problem(300, 96, 192, BF16, b_dtype=U8, b_scaling="1x32", b_preshuffled=True)
    codes = torch.randint(0, 256, (96, 96), dtype=U8)
    scale = torch.randint(100, 140, (96, 6), dtype=U8).view(torch.float8_e8m0fnu)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def decoded(operand: Operand, t: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        assert given is not None
        seen.append((t, given))
        return operand.target("cpu")

    monkeypatch.setattr(sm90_decoded, "decoded", decoded)
    monkeypatch.setattr(sm90_decoded.sm90_launch, "run", lambda *arguments: [])
    tensors = GemmTensors(
        torch.zeros(300, 192, dtype=BF16), shuffle_codes(codes), torch.empty(300, 96, dtype=BF16), b_scale=shuffle_scale(scale)
    )  # fmt: skip
    assert sm90_decoded.run(p, None, tensors) == [sm90_decoded.UNSHUFFLED]
    ((t, given),) = seen
    assert torch.equal(t, codes) and given.shape == scale.shape
    assert torch.equal(given.contiguous().view(U8), scale.view(U8))
    assert torch.equal(
        expand_scale(given.contiguous(), "1x32", (96, 192), True), expand_scale(scale, "1x32", (96, 192), True)
    )


def test_the_bias_gradient_of_float32_is_the_sum_of_its_three_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six copies of parts of a the first three are a; all six would be more."""
    M, N, K = 24, 16, 40
    p = GemmProblem(M, N, K, "NT", FP32, FP32, FP32, device_type="cuda", bias_grad_dtype=FP32)
    a, b = torch.randn(K, M), torch.randn(K, N)

    def decoded(operand: Operand, t: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        high = t.to(BF16).float()
        middle = (t - high).to(BF16).float()
        parts = high, middle, t - high - middle
        out = operand.target("cpu")
        for i, part in enumerate(operand.slices):
            out[i * operand.copy_rows : i * operand.copy_rows + operand.rows] = parts[part].to(BF16)
        return out

    def launch(plain: GemmProblem, config: Any, tensors: GemmTensors) -> list[str]:
        if plain.bias_grad_dtype is not None:
            assert tensors.bias_grad is not None and tensors.a.shape == (plain.K, M) and tensors.b.shape[0] == plain.K
            tensors.bias_grad.copy_(tensors.a.double().sum(0))
        return []

    monkeypatch.setattr(sm90_decoded, "decoded", decoded)
    monkeypatch.setattr(sm90_decoded.sm90_launch, "run", launch)
    sums = torch.full((M,), float("nan"))
    sm90_decoded.run(p, None, GemmTensors(a, b, torch.empty(M, N), bias_grad=sums))
    assert (sums.double() - a.double().sum(0)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config", "stages", "partial"),
    [
        # Bytes of a's and b's stages; of the sums of 64 tokens, padded by four rows. One tile each: the larger one.
        (HopperConfig(64, 64, 64, "swapped", num_stages=4), 4 * 2 * 64 * 128, 64 * 68 * 4),
        (HopperConfig(64, 128, 64, "swapped", num_stages=8), 8 * (64 + 128) * 128, 64 * 132 * 4),
    ],
)
def test_shared_memory_of_tiles_for_few_rows(config: HopperConfig, stages: int, partial: int) -> None:
    """mbarriers, and what aligning the buffers wastes, lie beside the stages: 1024 bytes each."""
    p = problem(64, 512, 4096)
    assert sm90_config.swapped_smem_bytes(p, config) == max(stages, partial) + 2048
    several = replace(p, N=64 * 132 * 4)
    assert not sm90_config.single_tile(several, config)
    assert sm90_config.swapped_smem_bytes(several, config) == stages + partial + 2048
