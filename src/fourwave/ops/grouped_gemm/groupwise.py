"""torch.ops.fourwave.f8f8bf16_groupwise_grouped and ..._preshuffle: the contract of MSLK's operators of the same names.

XQ       [M_total, K] 8-bit floats, the rows of all groups one after another
WQ       [G, N, K] 8-bit floats; for ..._preshuffle in the order of `preshuffle`
x_scale  float32, M_total * ceil(K / 128) elements: the block of group g begins at (its first row) * ceil(K / 128) and holds element
         (row m of the group, k block kb) at m + kb * (its rows)
w_scale  [G, ceil(K / 128), ceil(N / 128)] float32
M_sizes  [G] int64 or int32
returns  [M_total, N] bfloat16, contiguous; rows past the sum of M_sizes are zeros

N and K need not be multiples of 128 (preshuffled: of 16 and 64). Source: meta-pytorch/MSLK, mslk/gemm/flydsl/fp8_groupwise_grouped_gemm.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fourwave.ops.gemm.problem import FLOAT8
from fourwave.ops.grouped_gemm.check import SIZE_DTYPES, GroupedArguments, fake_result
from fourwave.ops.grouped_gemm.execute import execute
from fourwave.ops.grouped_gemm.problem import ROWS

Tensor = torch.Tensor
NAMES = ("f8f8bf16_groupwise_grouped", "f8f8bf16_groupwise_grouped_preshuffle")
SCHEMA = "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor M_sizes) -> Tensor"


def f8f8bf16_groupwise_grouped(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor) -> Tensor:
    """Weights in plain order; see the module."""
    return _run(XQ, WQ, x_scale, w_scale, M_sizes, False)


def f8f8bf16_groupwise_grouped_preshuffle(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor
) -> Tensor:
    """Weights that `preshuffle_b_mfma` has reordered; see the module."""
    return _run(XQ, WQ, x_scale, w_scale, M_sizes, True)


def _run(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor, preshuffled: bool) -> Tensor:
    return execute(_arguments(XQ, WQ, x_scale, w_scale, M_sizes, preshuffled))


def _arguments(
    XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor, preshuffled: bool
) -> GroupedArguments:
    _check(XQ, WQ, x_scale, w_scale, M_sizes)
    return GroupedArguments(
        XQ,
        WQ,
        M_sizes,
        ROWS,
        (True, True),
        torch.bfloat16,
        None,
        False,
        None,
        x_scale.contiguous(),
        w_scale.transpose(1, 2),
        "1x128",
        "128x128",
        "groups",
        preshuffled,
    )


def _check(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor) -> None:
    """What the general checks would name by other names."""
    given = {"XQ": XQ, "WQ": WQ, "x_scale": x_scale, "w_scale": w_scale, "M_sizes": M_sizes}
    for name, each in given.items():
        if not isinstance(each, Tensor):
            raise ValueError(f"{name} is of type {type(each).__name__}; it must be a tensor")
        if each.layout != torch.strided:
            raise ValueError(f"{name} has layout {each.layout}; it must be a dense tensor")
    if any(each.device != XQ.device for each in given.values()):
        raise ValueError(
            f"{', '.join(f'{name} is on {each.device}' for name, each in given.items())}; all must be on one device"
        )
    wanted = {
        "XQ": FLOAT8,
        "WQ": FLOAT8,
        "x_scale": (torch.float32,),
        "w_scale": (torch.float32,),
        "M_sizes": SIZE_DTYPES,
    }
    for name, dtypes in wanted.items():
        if given[name].dtype not in dtypes:
            raise ValueError(f"{name} is {given[name].dtype}; it must be {' or '.join(map(str, dtypes))}")
    if torch.is_grad_enabled() and any(each.requires_grad for each in given.values()):
        names = ", ".join(name for name, each in given.items() if each.requires_grad)
        raise ValueError(f"{names} requires grad; no gradient is recorded of such a call: use torch.no_grad()")
    if XQ.dim() != 2 or WQ.dim() != 3 or M_sizes.dim() != 1:
        raise ValueError(
            f"XQ is {tuple(XQ.shape)}, WQ {tuple(WQ.shape)} and M_sizes {tuple(M_sizes.shape)}; they must be [M_total, K], "
            "[G, N, K] and [G]"
        )
    (_, k), (groups, n, k_w) = XQ.shape, WQ.shape
    if k != k_w or M_sizes.shape[0] != groups:
        raise ValueError(
            f"XQ has K={k}, WQ G={groups}, N={n}, K={k_w}, and M_sizes {M_sizes.shape[0]} groups: they must agree"
        )
    shape = (groups, -(-k // 128), -(-n // 128))
    if tuple(w_scale.shape) != shape:
        raise ValueError(
            f"w_scale is {tuple(w_scale.shape)}; for WQ {tuple(WQ.shape)} it is [G, K / 128, N / 128] = {shape}"
        )
    if x_scale.numel() != XQ.shape[0] * shape[1]:
        raise ValueError(
            f"x_scale has {x_scale.numel()} elements; XQ {tuple(XQ.shape)} has M_total * K / 128 = {XQ.shape[0] * shape[1]}"
        )


def _fake(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor) -> Tensor:
    return fake_result(_arguments(XQ, WQ, x_scale, w_scale, M_sizes, False))


def _fake_preshuffle(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, M_sizes: Tensor) -> Tensor:
    return fake_result(_arguments(XQ, WQ, x_scale, w_scale, M_sizes, True))


def register(namespace: str) -> list[str]:
    """Register the operators that `namespace` does not have yet; returns their names. Calling it again does nothing."""
    functions: tuple[Callable[..., Tensor], ...] = (f8f8bf16_groupwise_grouped, f8f8bf16_groupwise_grouped_preshuffle)
    fakes: tuple[Callable[..., Tensor], ...] = (_fake, _fake_preshuffle)
    done = []
    for name, function, fake in zip(NAMES, functions, fakes, strict=True):
        if hasattr(getattr(torch.ops, namespace), name):
            continue
        qualified = f"{namespace}::{name}"
        torch.library.define(qualified, SCHEMA)
        torch.library.impl(qualified, ("cpu", "cuda"), function)
        torch.library.register_fake(qualified, fake)
        done.append(name)
    return done


register("fourwave")
