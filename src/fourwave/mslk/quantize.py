"""quantize_fp8_group and quantize_fp8_block with MSLK's arguments and numbers, on any device. Codes are fnuz where `fw.quantize`'s are:
on a gfx942 GPU, or with sim:gfx942 as the backend for FP8.

With amax the largest magnitude of a block (at least 1e-12, at most scale_ub) and MAX the format's largest value, all in
float32:  inv = MAX / amax, code = clamp(x * inv, -MAX, MAX) rounded to nearest even, scale = 1 / inv.
Source: meta-pytorch/MSLK, mslk/quantize/triton/fp8_quantize.py. Unlike there, a last block may be cut off, and the CPU has m_sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fourwave.ops.grouped_gemm.operators import group_of_rows
from fourwave.ops.grouped_gemm.problem import SIZE_DTYPES
from fourwave.quantize.api import reads_fnuz
from fourwave.transforms import is_special

Tensor = torch.Tensor
SMALLEST_AMAX = 1e-12


def quantize_fp8_group(
    x: Tensor,
    group_size: int = 128,
    scale_ub: Tensor | None = None,
    m_sizes: Tensor | None = None,
    k_major: bool = True,
    use_triton: bool = True,
    output_device: torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes of x [..., K] and one float32 scale for each 1 x group_size.

    m_sizes   rows of each group, on x's device: scales lie in a block for each group, element (row m of the group, k block kb)
              at (first row) * blocks + m + kb * (rows of the group)
    k_major   without m_sizes: scales [M, ceil(K / group_size)], else [ceil(K / group_size), M]. The shape, with m_sizes too
    use_triton is accepted and not looked at; output_device: where the results go
    """
    _check(x, scale_ub, group_size=group_size)
    rows = x.reshape(-1, x.shape[-1])
    if m_sizes is not None:
        _check_sizes(m_sizes, rows)
    codes, scale = _quantize(rows, 1, group_size, scale_ub)
    if m_sizes is not None:
        scale = _in_groups(scale, m_sizes)
        scale = scale.view(scale.shape[1], scale.shape[0]) if not k_major else scale
    elif not k_major:
        scale = scale.mT.contiguous()
    return codes.view(x.shape).to(output_device or x.device), scale.to(output_device or x.device)


def quantize_fp8_block(
    x: Tensor,
    block_m: int = 256,
    block_k: int = 256,
    scale_ub: Tensor | None = None,
    use_triton: bool = True,
    output_device: torch.device | None = None,
    k_major: bool = True,
) -> tuple[Tensor, Tensor]:
    """Codes of x [..., K] and one float32 scale for each block_m x block_k: [ceil(M / block_m), ceil(K / block_k)], or its
    transpose without k_major."""
    _check(x, scale_ub, block_m=block_m, block_k=block_k)
    codes, scale = _quantize(x.reshape(-1, x.shape[-1]), block_m, block_k, scale_ub)
    scale = scale if k_major else scale.mT.contiguous()
    return codes.view(x.shape).to(output_device or x.device), scale.to(output_device or x.device)


def _check(x: Tensor, scale_ub: Tensor | None, **blocks: int) -> None:
    if not isinstance(x, Tensor) or x.dim() == 0 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        told = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
        raise ValueError(f"x is {told}; it must be a tensor [..., K] in float32, bfloat16 or float16")
    if x.shape[-1] == 0:
        raise ValueError(f"x is {tuple(x.shape)}: K must be at least 1")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("x requires grad, and quantizing has no gradient: detach it, or use torch.no_grad()")
    for name, value in blocks.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an int of at least 1")
    if scale_ub is not None and (not isinstance(scale_ub, Tensor) or scale_ub.numel() != 1):
        told = f"{tuple(scale_ub.shape)}" if isinstance(scale_ub, Tensor) else f"of type {type(scale_ub).__name__}"
        raise ValueError(f"scale_ub is {told}; it must be a tensor of one element, the most that amax may be, or None")


def _check_sizes(m_sizes: Tensor, rows: Tensor) -> None:
    if not isinstance(m_sizes, Tensor):
        raise ValueError(f"m_sizes is of type {type(m_sizes).__name__}; it must be a tensor [G], int32 or int64")
    if m_sizes.dim() != 1 or m_sizes.dtype not in SIZE_DTYPES:
        raise ValueError(f"m_sizes is {tuple(m_sizes.shape)} {m_sizes.dtype}; it must be [G], int32 or int64")
    if m_sizes.device != rows.device:
        raise ValueError(f"m_sizes is on {m_sizes.device} and x on {rows.device}")
    if m_sizes.device.type == "cpu" and not is_special():
        told = m_sizes.tolist()
        if min(told, default=0) < 0 or sum(told) > len(rows):
            raise ValueError(
                f"m_sizes is {told}; sizes must be at least 0 and add up to at most the {len(rows)} rows of x"
            )


def _quantize(x: Tensor, block_m: int, block_k: int, scale_ub: Tensor | None) -> tuple[Tensor, Tensor]:
    dtype = torch.float8_e4m3fnuz if reads_fnuz(x.device, None) else torch.float8_e4m3fn
    top = torch.finfo(dtype).max
    m, k = x.shape
    padded = F.pad(x.to(torch.float32), (0, -k % block_k, 0, -m % block_m))
    blocks = padded.view(-(-m // block_m), block_m, -(-k // block_k), block_k)
    amax = blocks.abs().amax(dim=(1, 3)).clamp(min=SMALLEST_AMAX)
    if scale_ub is not None:
        # Not below the least amax: a bound of 0 or less would give scales of 0 or less.
        amax = torch.minimum(amax, scale_ub.detach().to(amax).reshape(()).clamp(min=SMALLEST_AMAX))
    inv = torch.full_like(amax, top) / amax
    codes = (blocks * inv[:, None, :, None]).clamp(-top, top).view(padded.shape)[:m, :k].to(dtype)
    return codes.contiguous(), torch.ones_like(inv) / inv


def _in_groups(scale: Tensor, m_sizes: Tensor) -> Tensor:
    """Scales [M, blocks] in the order of groups, same shape; m_sizes is not read on the host. Rows past all groups stay behind
    them, as one more group."""
    rows, blocks = scale.shape
    # Wrong sizes on a GPU give wrong places, and none outside.
    ends = m_sizes.to(torch.int64).clamp(min=0).cumsum(0).clamp(max=rows)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    left = rows - sizes.sum().reshape(1)
    sizes = torch.cat((sizes, left))
    group = group_of_rows(sizes[:-1], rows)
    first = (sizes.cumsum(0) - sizes)[group]
    row = torch.arange(rows, device=scale.device)
    block = torch.arange(blocks, device=scale.device)
    at = first[:, None] * blocks + (row - first)[:, None] + block * sizes[group][:, None]
    return torch.empty_like(scale).view(-1).scatter_(0, at.reshape(-1), scale.reshape(-1)).view(rows, blocks)
