"""The order of MXFP4 weights [N, K] that Hopper's kernels for few rows take from shared memory straight into registers.

Codes: 16 rows and 64 of K are 512 bytes, of which lane l = 4 * g + c takes the 16 bytes l: word j is its part of the first operand
of mma.m16n8k16 (and of wgmma's 64 rows, warp by warp) for k from 16 * j on. A word holds four pairs of codes, k = 2 * c in its
low and k + 1 in its high half, in the operand's order: rows g and g + 8, then both at k + 8. Blocks that follow each other along K lie one
after the other.
Of a code's bits s e e m, each of the four in a half has (bit numbers)
  0   s 15, e e m 8 to 6, where bfloat16 wants them: a mask makes a number of them
  1   s 9, e e m 2 to 0: the same after a shift by 6
  2   e e m 14 to 12, s 5 of the other half: after a rotation by 6
  3   s 11, e e 4 and 3, m 10: after a shift of s e e by 4 and of m by -4
so that nine instructions take a word apart.

Scales: 32 bytes for the same 16 rows and 64 of K, four for each g: of rows g and g + 8 for the first 32 k, then for the others. Rows of
blocks are padded to multiples of 512 of K (`packed_scale_shape`) with zeros.
"""

from __future__ import annotations

import torch

from fourwave.ops.gemm.problem import PACKED_E2M1

ROWS, K_BLOCK = 16, 64
BLOCK_BYTES, BLOCK_SCALES = 512, 32


def check_codes(t: torch.Tensor) -> tuple[int, int]:
    """(N, K) of MXFP4 codes [N, K / 2] that have this order or can be brought into it, or ValueError."""
    if t.dim() != 2 or t.dtype != PACKED_E2M1:
        raise ValueError(f"weights are {tuple(t.shape)} {t.dtype}; MXFP4 weights are [N, K / 2] uint8")
    n, k = t.shape[0], 2 * t.shape[1]
    if n % ROWS or k % K_BLOCK:
        raise ValueError(f"N={n} and K={k}: preshuffled weights need N a multiple of {ROWS} and K of {K_BLOCK}")
    return n, k


def shuffle_codes(t: torch.Tensor) -> torch.Tensor:
    """Codes t [N, K / 2], reordered: a new tensor of the same shape."""
    n, k = check_codes(t)
    if t.numel() == 0:
        return t.new_empty(t.shape)
    # [n block, g + 8, g, k block, j, k + 8, c]: bytes of two codes
    pairs = t.reshape(n // 16, 2, 8, k // 64, 4, 2, 4).to(torch.int32)
    word = torch.zeros((n // 16, 8, k // 64, 4, 4), dtype=torch.int32, device=t.device)
    for p in range(4):
        for half in range(2):
            word |= _placed(pairs[:, p % 2, :, :, :, p // 2] >> 4 * half & 15, p, half)
    return word.permute(0, 2, 1, 4, 3).contiguous().view(torch.uint8).reshape(t.shape)


def unshuffle_codes(t: torch.Tensor) -> torch.Tensor:
    """Inverse of shuffle_codes."""
    n, k = check_codes(t)
    if t.numel() == 0:
        return t.new_empty(t.shape)
    words = t.contiguous().view(torch.int32).reshape(n // 16, k // 64, 8, 4, 4).permute(0, 2, 1, 4, 3)
    pairs = torch.empty((n // 16, 2, 8, k // 64, 4, 2, 4), dtype=torch.uint8, device=t.device)
    for p in range(4):
        low, high = (_taken(words, p, half) for half in range(2))
        pairs[:, p % 2, :, :, :, p // 2] = (low | high << 4).to(torch.uint8)
    return pairs.reshape(t.shape)


def _placed(code: torch.Tensor, p: int, half: int) -> torch.Tensor:
    sign, magnitude, first = code >> 3, code & 7, 16 * half
    if p == 0:
        return magnitude << first + 6 | sign << first + 15
    if p == 1:
        return magnitude << first | sign << first + 9
    if p == 2:
        return magnitude << first + 12 | sign << (first ^ 16) + 5
    return magnitude >> 1 << first + 3 | (magnitude & 1) << first + 10 | sign << first + 11


def _taken(word: torch.Tensor, p: int, half: int) -> torch.Tensor:
    first = 16 * half

    def bits(at: int, count: int = 1) -> torch.Tensor:
        return word >> at & (1 << count) - 1

    if p == 0:
        return bits(first + 6, 3) | bits(first + 15) << 3
    if p == 1:
        return bits(first, 3) | bits(first + 9) << 3
    if p == 2:
        return bits(first + 12, 3) | bits((first ^ 16) + 5) << 3
    return bits(first + 10) | bits(first + 3, 2) << 1 | bits(first + 11) << 3


def shuffle_scale(scale: torch.Tensor) -> torch.Tensor:
    """Scales [N, K / 32], reordered: a new tensor of packed_scale_shape and scale's dtype."""
    rows, blocks = scale.shape
    padded = torch.zeros((rows, -(-blocks // 16) * 16), dtype=torch.uint8, device=scale.device)
    if padded.numel() == 0:
        return padded.view(scale.dtype)
    padded[:, :blocks] = scale.view(torch.uint8)
    # [n block, g + 8, g, k block, half] -> [n block, k block, g, half, g + 8]
    order = padded.reshape(rows // 16, 2, 8, -1, 2).permute(0, 3, 2, 4, 1)
    return order.reshape(padded.shape).contiguous().view(scale.dtype)


def unshuffle_scale(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of shuffle_scale, with the padding: [N, K / 32 rounded up to a multiple of 16]."""
    if packed.numel() == 0:
        return packed.new_empty(packed.shape)
    rows = packed.shape[0]
    order = packed.view(torch.uint8).reshape(rows // 16, -1, 8, 2, 2).permute(0, 4, 2, 1, 3)
    return order.reshape(packed.shape).contiguous().view(packed.dtype)
