"""The order of 8-bit weights that the AMD matrix instructions take from memory straight into registers.

Trailing [N, K] is cut into [N / 16, 16, K / 64, 4, 16] = (n block, n lane, k block, k lane, k) and stored as (n block, k block,
k lane, n lane, k): 1024 bytes for 16 rows and 64 of K, of which lane l = 16 * (k lane) + (n lane) takes the 16 bytes l. The
order is that of MSLK's `preshuffle_b_mfma`.

MXFP4 weights have another order, for Hopper: ops/gemm/preshuffled_mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fourwave.ops.gemm.preshuffled_mxfp4 import check_codes, shuffle_codes, shuffle_scale, unshuffle_codes
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1
from fourwave.quantize.tensor import QuantizedTensor, check_device

ROWS, K_BLOCK, K_LANES, K_PACK = 16, 64, 4, 16


@dataclass(frozen=True, eq=False)
class Preshuffled:
    """8-bit floating-point or MXFP4 weights in preshuffled order, made by `preshuffle`: a copy of what it was given, codes reordered.

    weights         codes [N, K] or [G, N, K], or a QuantizedTensor of rowwise codes. MXFP8's scales are a view of packed_scale, so
                    what changes one changes both; MXFP4's are a copy that `gemm` does not read
    packed_scale    scales "1x32" [N, K / 32] in rows of whole chunks of 16, zeros behind the last block, as `gemm` reads them: MXFP4's
                    reordered, too
    """

    weights: torch.Tensor | QuantizedTensor
    packed_scale: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        weights = self.weights
        if not isinstance(weights, (torch.Tensor, QuantizedTensor)):
            raise ValueError(f"Preshuffled of {_told(weights)}; its weights are a tensor or a QuantizedTensor")
        check_shuffled(_codes(weights))
        if isinstance(weights, QuantizedTensor) and weights.format.is_mx:
            assert weights.scale is not None
            if weights.format.element == "e2m1":
                object.__setattr__(self, "packed_scale", shuffle_scale(weights.scale))
                return
            packed = _packed(weights.scale)
            object.__setattr__(self, "packed_scale", packed)
            object.__setattr__(self, "weights", replace(weights, scale=packed[:, : weights.scale.shape[1]]))

    def __repr__(self) -> str:
        what = repr(self.weights)
        if isinstance(self.weights, torch.Tensor):
            what = f"{list(self.shape)} {self.data.dtype}, on {self.device}"
        return f"Preshuffled({what})"

    @property
    def data(self) -> torch.Tensor:
        """The codes, reordered."""
        return _codes(self.weights)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights in plain order."""
        return tuple(self.weights.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Preshuffled:
        """The same weights on another device."""
        check_device("preshuffled weights have the type of their codes; unshuffle() gives plain ones", device)
        return Preshuffled(self.weights.to(device, non_blocking=non_blocking))

    def unshuffle(self) -> torch.Tensor | QuantizedTensor:
        """A copy in plain order, scales included: the inverse of `preshuffle`."""
        if isinstance(self.weights, QuantizedTensor):
            plain = unshuffle_codes(self.data) if self.data.dtype == PACKED_E2M1 else unshuffle(self.data)
            return _copied(self.weights, plain)
        return unshuffle(self.weights)

    def __reduce__(self) -> tuple[Any, ...]:
        """For torch.save; torch.load(weights_only=True) takes it once fourwave is imported. What is loaded is checked."""
        return _loaded_preshuffled, (self.weights,)


def _loaded_preshuffled(weights: torch.Tensor | QuantizedTensor) -> Preshuffled:
    return Preshuffled(weights)


torch.serialization.add_safe_globals([_loaded_preshuffled])


def shuffle(t: torch.Tensor) -> torch.Tensor:
    """t [..., N, K], an 8-bit dtype, reordered: a new tensor of the same shape."""
    lead, (n, k) = _checked(t)
    blocks = t.reshape(*lead, n // ROWS, ROWS, k // K_BLOCK, K_LANES, K_PACK)
    return blocks.transpose(-4, -3).transpose(-3, -2).reshape(t.shape).contiguous()


def unshuffle(t: torch.Tensor) -> torch.Tensor:
    """Inverse of shuffle."""
    lead, (n, k) = _checked(t)
    blocks = t.reshape(*lead, n // ROWS, k // K_BLOCK, K_LANES, ROWS, K_PACK)
    return blocks.transpose(-3, -2).transpose(-4, -3).reshape(t.shape).contiguous()


def check_shuffled(t: torch.Tensor) -> None:
    """Raises ValueError where t cannot be preshuffled weights."""
    if isinstance(t, torch.Tensor) and t.dtype == PACKED_E2M1:
        check_codes(t)
    else:
        _checked(t)


def _checked(t: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, int]]:
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"weights are of {_told(t)}; they must be a tensor [N, K] or [G, N, K] of an 8-bit dtype")
    if t.dim() < 2 or t.element_size() != 1:
        raise ValueError(f"weights are {tuple(t.shape)} {t.dtype}; they must be [N, K] or [G, N, K] of an 8-bit dtype")
    n, k = t.shape[-2:]
    if n % ROWS or k % K_BLOCK:
        raise ValueError(f"N={n} and K={k}: preshuffled weights need N a multiple of {ROWS} and K of {K_BLOCK}")
    return tuple(t.shape[:-2]), (n, k)


def _codes(weights: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """Codes that can be multiplied, or ValueError."""
    codes = weights
    if isinstance(weights, QuantizedTensor):
        if weights.data is None:
            raise ValueError(f"preshuffled weights have rowwise codes; this {weights.format.name} tensor has none")
        codes = weights.data
        if weights.format.element == "e2m1":
            return codes
    assert isinstance(codes, torch.Tensor)
    if codes.dtype not in FLOAT8:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT8)
        raise ValueError(
            f"weights are {codes.dtype}; preshuffled weights are 8-bit floats ({known}) or a QuantizedTensor of them"
        )
    return codes


def _told(given: object) -> str:
    return "None" if given is None else f"type {type(given).__name__}"


def preshuffle(w: torch.Tensor | QuantizedTensor) -> Preshuffled:
    """Weights w for b of `gemm` ([N, K] or a rowwise QuantizedTensor) or `grouped_gemm` (also [G, N, K]), reordered once: 8-bit
    floats, and for `gemm` MXFP4.

    The product has the same bits as that of the weights in plain order (MXFP4: Hopper's adds in another order). The result is a copy, scales included: it does not
    see later changes of w. Raises ValueError where N is no multiple of 16 or K none of 64, where w is no such weights, and where
    codes or scales require grad outside torch.no_grad(), as no gradient is recorded.
    """
    if isinstance(w, Preshuffled):
        raise ValueError("w is preshuffled already; its unshuffle() gives plain weights")
    if not isinstance(w, (torch.Tensor, QuantizedTensor)):
        raise ValueError(f"w is of {_told(w)}; weights are an 8-bit tensor or a QuantizedTensor")
    tensors = (w.data, w.scale) if isinstance(w, QuantizedTensor) else (w,)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise ValueError(
            "w requires grad, and preshuffle records no gradient: use it under torch.no_grad(), or detach w"
        )
    with torch.no_grad():
        codes = _codes(w)
        codes = shuffle_codes(codes) if codes.dtype == PACKED_E2M1 else shuffle(codes)
        return Preshuffled(_copied(w, codes) if isinstance(w, QuantizedTensor) else codes)


def _copied(w: QuantizedTensor, codes: torch.Tensor) -> QuantizedTensor:
    """A rowwise tensor of these codes, with copies of w's scales and amax."""
    assert w.scale is not None
    return replace(
        w, data=codes, scale=w.scale.clone(memory_format=torch.contiguous_format), columnwise_data=None, columnwise_scale=None,
        columnwise_transposed=False, amax=None if w.amax is None else w.amax.clone(),
    )  # fmt: skip


def _packed(scale: torch.Tensor) -> torch.Tensor:
    rows, blocks = scale.shape
    packed = torch.zeros((rows, -(-blocks // 16) * 16), dtype=torch.uint8, device=scale.device)
    packed[:, :blocks] = scale.view(torch.uint8)
    return packed.view(scale.dtype)
