"""Random bits and the random Hadamard transform of mxfp4: the definition, which kernels match bit for bit.

Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011) makes four words of 32 bits
from a key, the seed, and a counter, so that an element's bits depend on nothing but the seed and the element's place:

  stochastic rounding   16 bits of each element. The element is number p along its block's direction in line l (rowwise: column
                        p of row l; columnwise: row p of column l). Counter (l, p / 8, 0 rowwise or 1 columnwise, 0) makes the
                        bits of eight elements: word w has those of elements 2 w (low half) and 2 w + 1 of the eight
  signs                 of the Hadamard transform: the low 16 bits of word 0 at counter (0, 0, 2, 0)

Transform of 16 neighbours x along the direction, with signs s = -1 where a bit is set: y = H (s x) / 4, H the Hadamard matrix in
Sylvester's order, in float32, as four rounds of sums and differences of elements 1, 2, 4 and 8 apart. It is orthogonal: the
product of two operands that were transformed along the reduction with one seed is that of the untransformed ones.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

HADAMARD = 16  # elements that are transformed together
ELEMENTS_PER_COUNTER = 8
SIGNS_STREAM = 2  # third word of the counter
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words; counters and keys are Python ints or int64 tensors (broadcast) from 0 to 2^32 - 1."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # Of a tensor the product wraps, which leaves all 64 bits as they are.
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _MASK) ^ c1 ^ k0, second & _MASK, ((first >> 32) & _MASK) ^ c3 ^ k1, first & _MASK,
        )  # fmt: skip
        k0, k1 = (k0 + WEYL[0]) & _MASK, (k1 + WEYL[1]) & _MASK
    return c0, c1, c2, c3


def hadamard_signs(seed: int) -> int:
    """16 bits; a set one negates."""
    return int(philox((0, 0, SIGNS_STREAM, 0), (seed & _MASK, seed >> 32))[0]) & 0xFFFF


def random_bits(seed: Tensor, lines: int, length: int, columnwise: bool) -> Tensor:
    """int64 [lines, length], 0 .. 65535: the bits of element p of line l; seed: int64 of one element."""
    seed = seed.reshape(()).to(torch.int64)
    line = torch.arange(lines, device=seed.device)[:, None]
    eight = torch.arange(-(-length // ELEMENTS_PER_COUNTER), device=seed.device)[None, :]
    words = philox(
        (line, eight, torch.full_like(line, int(columnwise)), torch.zeros_like(line)),
        (seed & _MASK, seed >> 32 & _MASK),
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(lines, -1)[:, :length]


def _rounds(x: Tensor) -> Tensor:
    """H x of the last dimension, of 16 elements."""
    shape = x.shape
    for distance in (1, 2, 4, 8):
        pairs = x.reshape(*shape[:-1], HADAMARD // (2 * distance), 2, distance)
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), -2).reshape(shape)
    return x


def _signs(mask: int, like: Tensor) -> Tensor:
    return torch.tensor([1.0 - 2 * (mask >> i & 1) for i in range(HADAMARD)], dtype=like.dtype, device=like.device)


def hadamard(x: Tensor, signs: int) -> Tensor:
    """The transform of the last dimension, a multiple of 16, of a float32 tensor."""
    blocks = x.unflatten(-1, (-1, HADAMARD))
    return (_rounds(blocks * _signs(signs, x)) * 0.25).flatten(-2)


def inverse_hadamard(y: Tensor, signs: int, dim: int) -> Tensor:
    """Its inverse along dimension dim, in y's precision."""
    blocks = y.movedim(dim, -1).unflatten(-1, (-1, HADAMARD))
    return (_rounds(blocks) * 0.25 * _signs(signs, y)).flatten(-2).movedim(-1, dim)
