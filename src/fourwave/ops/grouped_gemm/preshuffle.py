"""The order of 8-bit weights that the AMD matrix instructions take from memory straight into registers.

Trailing [N, K] is cut into [N / 16, 16, K / 64, 4, 16] = (n block, n lane, k block, k lane, k) and stored as (n block, k block,
k lane, n lane, k): 1024 bytes for 16 rows and 64 of K, of which lane l = 16 * (k lane) + (n lane) takes the 16 bytes l. The
order is that of MSLK's `preshuffle_b_mfma`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fourwave.quantize.tensor import QuantizedTensor

ROWS, K_BLOCK, K_LANES, K_PACK = 16, 64, 4, 16


@dataclass(frozen=True, eq=False)
class Preshuffled:
    """Weights in preshuffled order, made by `preshuffle`: a copy of what it was given, with the codes reordered.

    packed_scale    scales "1x32" [N, K / 32] in rows of whole chunks of 16, zeros behind the last block, as `gemm` reads them
    """

    weights: torch.Tensor | QuantizedTensor
    packed_scale: torch.Tensor | None = None

    @property
    def data(self) -> torch.Tensor:
        if isinstance(self.weights, QuantizedTensor):
            assert self.weights.data is not None
            return self.weights.data
        return self.weights

    def unshuffle(self) -> torch.Tensor | QuantizedTensor:
        """A copy in plain order: the inverse of `preshuffle`."""
        if isinstance(self.weights, QuantizedTensor):
            return replace(self.weights, data=unshuffle(self.data))
        return unshuffle(self.weights)


def shuffle(t: torch.Tensor) -> torch.Tensor:
    """t [..., N, K], an 8-bit dtype, reordered: a new tensor of the same shape."""
    lead, (n, k) = _checked(t)
    blocks = t.reshape(*lead, n // ROWS, ROWS, k // K_BLOCK, K_LANES, K_PACK)
    return blocks.transpose(-4, -3).transpose(-3, -2).reshape(t.shape)


def unshuffle(t: torch.Tensor) -> torch.Tensor:
    """Inverse of shuffle."""
    lead, (n, k) = _checked(t)
    blocks = t.reshape(*lead, n // ROWS, k // K_BLOCK, K_LANES, ROWS, K_PACK)
    return blocks.transpose(-3, -2).transpose(-4, -3).reshape(t.shape)


def check_shuffled(t: torch.Tensor) -> None:
    """Raises ValueError where t cannot be preshuffled weights."""
    _checked(t)


def _checked(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    if t.dim() < 2 or t.element_size() != 1:
        raise ValueError(f"weights are {tuple(t.shape)} {t.dtype}; they must be [N, K] or [G, N, K] of an 8-bit dtype")
    n, k = t.shape[-2:]
    if n % ROWS or k % K_BLOCK:
        raise ValueError(f"N={n} and K={k}: preshuffled weights need N a multiple of {ROWS} and K of {K_BLOCK}")
    return tuple(t.shape[:-2]), (n, k)


def preshuffle(w: torch.Tensor | QuantizedTensor) -> Preshuffled:
    """Weights w for b of `gemm` ([N, K] or a rowwise QuantizedTensor) or `grouped_gemm` (also [G, N, K]), reordered once. 8-bit
    codes only.

    The product has the same bits as that of the weights in plain order. The result is a copy, scales included: it does not
    see later changes of w. Raises ValueError where N is no multiple of 16 or K none of 64.
    """
    if not isinstance(w, QuantizedTensor):
        return Preshuffled(shuffle(w))
    if w.data is None or w.data.dtype == torch.uint8:
        raise ValueError(f"preshuffled weights have 8-bit rowwise codes; this {w.format.name} tensor has none")
    assert w.scale is not None
    packed = _packed(w.scale) if w.format.is_mx else None
    plain = replace(
        w, data=shuffle(w.data), scale=w.scale.clone(), columnwise_data=None, columnwise_scale=None,
        columnwise_transposed=False,
    )  # fmt: skip
    return Preshuffled(plain, packed)


def _packed(scale: torch.Tensor) -> torch.Tensor:
    rows, blocks = scale.shape
    packed = torch.zeros((rows, -(-blocks // 16) * 16), dtype=torch.uint8, device=scale.device)
    packed[:, :blocks] = scale.view(torch.uint8)
    return packed.view(scale.dtype)
