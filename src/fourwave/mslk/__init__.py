"""MSLK's names for grouped, group-wise scaled FP8 GEMM, over fourwave's kernels.

f8f8bf16_groupwise_grouped, f8f8bf16_groupwise_grouped_preshuffle   also as torch.ops.fourwave.*
quantize_fp8_group, quantize_fp8_block     codes and scales of activations and weights
preshuffle_b_mfma, unpreshuffle_b_mfma     weights into the order of the matrix instructions, and back
install()                                  torch.ops.mslk.* where MSLK itself does not provide them
"""

from __future__ import annotations

import torch

from fourwave.mslk.quantize import quantize_fp8_block, quantize_fp8_group
from fourwave.ops.grouped_gemm.groupwise import (
    f8f8bf16_groupwise_grouped,
    f8f8bf16_groupwise_grouped_preshuffle,
    register,
)
from fourwave.ops.grouped_gemm.preshuffle import shuffle, unshuffle

__all__ = [
    "f8f8bf16_groupwise_grouped", "f8f8bf16_groupwise_grouped_preshuffle", "install", "preshuffle_b_mfma", "quantize_fp8_block",
    "quantize_fp8_group", "unpreshuffle_b_mfma",
]  # fmt: skip


def preshuffle_b_mfma(src: torch.Tensor) -> torch.Tensor:
    """8-bit weights [N, K] or [G, N, K] in the order that the preshuffle operator reads. N % 16 == 0, K % 64 == 0."""
    return shuffle(src)


def unpreshuffle_b_mfma(src: torch.Tensor) -> torch.Tensor:
    """Inverse of preshuffle_b_mfma."""
    return unshuffle(src)


def install() -> list[str]:
    """Provide torch.ops.mslk.f8f8bf16_groupwise_grouped and ..._preshuffle; returns the names that MSLK has not registered.

    An operator that MSLK has registered stays its own. Import MSLK first where it is installed: it registers without asking.
    """
    return register("mslk")
