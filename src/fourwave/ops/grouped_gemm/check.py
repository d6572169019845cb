"""Checks the arguments of a grouped call, and turns them into a problem and tensors that backends take."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from fourwave.formats.element import E8M0
from fourwave.formats.scaling import SCALINGS
from fourwave.ops.gemm.check import columns, flag, matrix, packed
from fourwave.ops.gemm.problem import FLOAT8, PACKED_E2M1, PRECISIONS
from fourwave.ops.grouped_gemm.preshuffle import check_shuffled
from fourwave.ops.grouped_gemm.problem import (
    REDUCTION,
    ROWS,
    SCALE_LAYOUTS,
    SIZE_DTYPES,
    GroupedProblem,
    GroupedTensors,
)

if TYPE_CHECKING:
    from fourwave.ops.grouped_gemm.config import GroupedConfig

Tensor = torch.Tensor
_DTYPES = "float32, bfloat16 or float16"
_problem = functools.lru_cache(maxsize=4096)(GroupedProblem)


class GroupedArguments(NamedTuple):
    """A grouped call with its quantized tensors taken apart. Names as in GroupedProblem and GroupedTensors.

    k_last      whether the reduction is the last dimension of a and b: (True, trans_b) with split rows; both the same otherwise
    """

    a: Tensor
    b: Tensor
    m_sizes: Tensor
    split: str = ROWS
    k_last: tuple[bool, bool] = (True, True)
    out_dtype: torch.dtype | None = None
    bias: Tensor | None = None
    accumulate: bool = False
    out: Tensor | None = None
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    a_scaling: str | None = None
    b_scaling: str | None = None
    a_scale_layout: str = "rows"
    b_preshuffled: bool = False
    fast_accum: bool = False
    config: GroupedConfig | None = None
    backend: str | None = None


class GroupedCall(NamedTuple):
    problem: GroupedProblem
    tensors: GroupedTensors  # out None: still to be made
    notes: list[str]


def sizes(args: GroupedArguments) -> tuple[int, int, int, int]:
    """(G, M, N, K). Raises ValueError where shapes do not go together."""
    a, b, m_sizes = args.a, args.b, args.m_sizes
    if m_sizes.dim() != 1:
        raise ValueError(f"m_sizes is {tuple(m_sizes.shape)}; it must be [G], the number of rows of each group")
    groups = m_sizes.shape[0]
    if args.split == REDUCTION:
        if a.dim() != 2 or b.dim() != 2:
            raise ValueError(f"dout is {tuple(a.shape)} and x is {tuple(b.shape)}; both must be matrices [rows, ...]")
        (k_a, m), (k_b, n) = (
            (columns(t), t.shape[0]) if last else (t.shape[0], columns(t)) for t, last in zip((a, b), args.k_last)
        )
        if k_a != k_b:
            raise ValueError(f"dout has {k_a} rows and x has {k_b}; m_sizes divides the same rows of both")
        return groups, m, n, k_a
    if a.dim() != 2:
        raise ValueError(f"a is {tuple(a.shape)}; it must be [M, K], the rows of all groups one after another")
    if b.dim() != 3:
        raise ValueError(
            f"b is {tuple(b.shape)}; it must be [G, N, K], or [G, K, N] with trans_b=False: one matrix for each group"
        )
    if b.shape[0] != groups:
        raise ValueError(f"m_sizes has {groups} groups and b has {b.shape[0]} matrices")
    n, k_b = (b.shape[1], columns(b)) if args.k_last[1] else (columns(b), b.shape[1])
    if columns(a) != k_b:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} with trans_b={args.k_last[1]}: a's last dimension and b's "
            f"{'last' if args.k_last[1] else 'middle'} (K) must be equal, and are {columns(a)} and {k_b}"
        )
    return groups, a.shape[0], n, k_b


def default_out_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    return next((t.dtype for t in (a, b) if t.dtype in PRECISIONS), torch.bfloat16)


def check(args: GroupedArguments) -> GroupedCall:
    """Raises ValueError for what the caller must change. Reads no values."""
    problem = describe(args, _problem)
    a, b = args.a, args.b
    notes: list[str] = []
    tensors = GroupedTensors(
        matrix(a, a.shape[0], "a", notes),
        _stack(b, "b", notes) if args.split == ROWS else matrix(b, b.shape[0], "b", notes),
        packed(args.m_sizes.resolve_neg()),
        args.out,  # type: ignore[arg-type]
        None if args.bias is None else args.bias.resolve_neg().contiguous(),
        _a_scale(args, problem),
        _b_scale(args, problem),
    )
    _check_overlap(args)
    return GroupedCall(problem, tensors, notes)


def fake_result(args: GroupedArguments) -> Tensor:
    """The result of a call by shape and dtype alone; raises what the call itself would, but for memory that tensors share."""
    problem = describe(args, GroupedProblem)
    _a_scale(args, problem)
    _b_scale(args, problem)
    return args.a.new_empty(problem.out_shape, dtype=problem.out_dtype)


def describe(args: GroupedArguments, make: Callable[..., GroupedProblem]) -> GroupedProblem:
    flag("trans_b", args.k_last[1])
    for name in ("accumulate", "b_preshuffled", "fast_accum"):
        flag(name, getattr(args, name))
    groups, m, n, k = sizes(args)
    a, b, m_sizes = args.a, args.b, args.m_sizes
    device = a.device
    devices = ("cpu", "cuda") if make is _problem else ("cpu", "cuda", "meta")
    if device.type not in devices or b.device != device or m_sizes.device != device:
        raise ValueError(
            f"operands are on {device} and {b.device} and m_sizes on {m_sizes.device}; all must be on one CPU or GPU "
            "(m_sizes is read by the kernel, not on the host)"
        )
    if m_sizes.dtype not in SIZE_DTYPES:
        raise ValueError(f"m_sizes is {m_sizes.dtype}; it must be int32 or int64")
    if any(t.layout is not torch.strided for t in (a, b)):
        raise ValueError(f"operands have layouts {a.layout} and {b.layout}; torch.strided tensors are needed")
    _check_dtypes(args)
    out_dtype = _out_dtype(args, (m, n) if args.split == ROWS else (groups, m, n))
    layout = ("T" if args.k_last[1] else "N") + ("N" if args.k_last[0] else "T")
    if args.split == REDUCTION and args.k_last[0] != args.k_last[1]:
        raise ValueError("one of dout and x is stored transposed and the other is not: quantize both alike")
    if args.b_preshuffled and (args.split != ROWS or not args.k_last[1] or b.dtype not in FLOAT8):
        raise ValueError(
            f"b is preshuffled: that is an order of 8-bit weights [G, N, K] with trans_b=True; b is {b.dtype}"
        )
    if args.b_preshuffled:
        check_shuffled(b)  # of each group: the rows of all together may be a multiple of 16 where a group's are not
    if args.a_scale_layout not in SCALE_LAYOUTS:
        raise ValueError(f"a_scale_layout is {args.a_scale_layout!r}; it must be {' or '.join(SCALE_LAYOUTS)}")
    bias_dtype = None
    if args.bias is not None:
        if args.split != ROWS or tuple(args.bias.shape) != (groups, n) or args.bias.dtype not in PRECISIONS:
            raise ValueError(
                f"bias is {tuple(args.bias.shape)} {args.bias.dtype}; it must be [G, N] = [{groups}, {n}], {_DTYPES}"
            )
        if args.bias.device != device:
            raise ValueError(f"bias is on {args.bias.device} and the operands are on {device}")
        bias_dtype = args.bias.dtype
    return make(
        groups, m, n, k, args.split, layout, a.dtype, b.dtype, out_dtype, bias_dtype, bool(args.accumulate), device.type,
        args.a_scaling, args.b_scaling, args.a_scale_layout, bool(args.b_preshuffled), m_sizes.dtype,
        bool(args.fast_accum),
    )  # fmt: skip


def _stack(t: Tensor, name: str, notes: list[str]) -> Tensor:
    """t [G, rows, columns] with inner stride 1 and rows that do not overlap; copied, with a note, if it is not so."""
    if t.is_neg():
        notes.append(f"{name} copied: it is a negated view")
        t = t.resolve_neg()
    _, rows, cols = t.shape
    if t.numel() == 0 or t.is_contiguous():
        return t if t.numel() else t.new_empty(t.shape)
    ok = (t.stride(2) == 1 or cols == 1) and (rows == 1 or t.stride(1) >= cols) and t.stride(0) >= 0
    if ok and (t.shape[0] == 1 or t.stride(0) == 0 or t.stride(0) >= (rows - 1) * t.stride(1) + cols):
        return t
    notes.append(f"{name} copied: strides {t.stride()}, not matrices of contiguous rows")
    return t.contiguous()


def _check_dtypes(args: GroupedArguments) -> None:
    a, b = args.a, args.b
    for name, scale, scaling in (("a", args.a_scale, args.a_scaling), ("b", args.b_scale, args.b_scaling)):
        if (scale is None) != (scaling is None):
            raise ValueError(f"{name}_scale and {name}_scaling go together; {name}_scaling is {scaling!r}")
    if args.a_scaling is None and args.b_scaling is None:
        if (a.dtype == b.dtype and a.dtype in PRECISIONS) or (a.dtype in FLOAT8 and b.dtype in FLOAT8):
            return
        raise ValueError(
            f"operands are {a.dtype} and {b.dtype}; both must have one dtype, {_DTYPES}, or both be 8-bit floats, or be quantized"
        )
    for name, t, scaling in (("a", a, args.a_scaling), ("b", b, args.b_scaling)):
        if scaling is None:
            if t.dtype not in PRECISIONS and t.dtype not in FLOAT8:
                raise ValueError(f"{name} is {t.dtype} without scales; it must be {_DTYPES} or an 8-bit float")
        elif scaling not in SCALINGS:
            raise ValueError(f"{name}_scaling is {scaling!r}; it must be {', '.join(SCALINGS)}")
        elif t.dtype not in FLOAT8 and not (t.dtype == PACKED_E2M1 and scaling == "1x32"):
            raise ValueError(
                f"{name} is {t.dtype} with scales {scaling!r}; scaled operands are 8-bit floats, or packed e2m1 with '1x32'"
            )


def _scale_dtype(name: str, scale: Tensor, scaling: str, device: torch.device) -> Tensor:
    dtypes = (E8M0.torch_dtype, torch.uint8) if scaling == "1x32" else (torch.float32,)
    if scale.dtype not in dtypes:
        wanted = "float8_e8m0fnu, or its codes as uint8" if scaling == "1x32" else "float32"
        raise ValueError(f"{name}_scale is {scale.dtype}; scales {scaling!r} are {wanted}")
    if scale.device != device:
        raise ValueError(f"{name}_scale is on {scale.device} and the operands are on {device}")
    scale = scale.resolve_neg()
    return scale.view(E8M0.torch_dtype) if scaling == "1x32" and E8M0.torch_dtype is not None else scale


def _a_scale(args: GroupedArguments, problem: GroupedProblem) -> Tensor | None:
    scale, shape = args.a_scale, problem.a_scale_shape
    if scale is None or shape is None:
        return None
    scale = _scale_dtype("a", scale, problem.a_scaling or "", args.a.device)
    if args.a_scale_layout == "groups":
        wanted = problem.M * -(-problem.K // 128)
        if scale.numel() != wanted or not scale.is_contiguous():
            raise ValueError(
                f"a_scale is {tuple(scale.shape)}, strides {scale.stride()}; in layout 'groups' it is contiguous and has "
                f"M * ceil(K / 128) = {problem.M} * {-(-problem.K // 128)} elements"
            )
        return scale.view(-1)
    if shape == () and scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"a_scale is {tuple(scale.shape)}; scales {problem.a_scaling!r} of a {problem.a_shape} are {shape}"
        )
    return scale.contiguous()


def _b_scale(args: GroupedArguments, problem: GroupedProblem) -> Tensor | None:
    scale, shape = args.b_scale, problem.b_scale_shape
    if scale is None or shape is None:
        return None
    scale = _scale_dtype("b", scale, problem.b_scaling or "", args.b.device)
    if problem.b_scaling == "tensor" and scale.numel() == 1:
        return scale.reshape(1).expand(shape) if shape else scale.reshape(())
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"b_scale is {tuple(scale.shape)}; scales {problem.b_scaling!r} of b {problem.b_shape} are {shape}"
        )
    return scale


def _out_dtype(args: GroupedArguments, shape: tuple[int, ...]) -> torch.dtype:
    out = args.out
    if args.accumulate and out is None:
        raise ValueError("accumulate=True adds to `out`, and no out was given")
    if out is not None:
        if tuple(out.shape) != shape:
            raise ValueError(f"out is {tuple(out.shape)}; the result is {shape}")
        if out.device != args.a.device:
            raise ValueError(f"out is on {out.device} and the operands are on {args.a.device}")
        if args.out_dtype not in (None, out.dtype):
            raise ValueError(
                f"out_dtype is {args.out_dtype} and out is {out.dtype}: leave out_dtype away, or make them equal"
            )
        dtype = out.dtype
    else:
        dtype = args.out_dtype or default_out_dtype(args.a, args.b)
    if dtype not in PRECISIONS:
        raise ValueError(f"out_dtype is {dtype}; it must be {_DTYPES}")
    return dtype


def _check_overlap(args: GroupedArguments) -> None:
    from fourwave.ops.gemm.check import _byte_range, _interleaved, _overlaps_itself

    out = args.out
    if out is None or out.numel() == 0:
        return
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()} and shape {tuple(out.shape)}: two elements share one place")
    low, high = _byte_range(out)
    for name in ("a", "b", "m_sizes", "bias", "a_scale", "b_scale"):
        t = getattr(args, name)
        if t is not None and t.numel():
            t_low, t_high = _byte_range(t)
            if t_low < high and low < t_high and not _interleaved(out, t, t_low - low):
                raise ValueError(f"out shares memory with {name}, which would be overwritten while it is read")
