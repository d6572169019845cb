"""fw.grouped_gemm and fw.grouped_gemm_wgrad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fourwave.backends import registry
from fourwave.backends.explanation import Explanation
from fourwave.ops.gemm.problem import FLOAT8
from fourwave.ops.grouped_gemm import groupwise, operators
from fourwave.ops.grouped_gemm.check import GroupedArguments, Tensor, sizes
from fourwave.ops.grouped_gemm.execute import execute
from fourwave.ops.grouped_gemm.explain import explain_arguments
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.transforms import has_tangent, is_plain, is_special, requires_grad

if TYPE_CHECKING:
    from fourwave.ops.grouped_gemm.config import GroupedConfig


def grouped_gemm(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor | Preshuffled,
    m_sizes: Tensor,
    *,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    a_scale_layout: str = "rows",
    b_preshuffled: bool = False,
    fast_accum: bool = False,
    check_sizes: bool = False,
    config: GroupedConfig | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[m] = a[m] @ op(b[g]) + bias[g] for every row m of group g; rows past the last group are zeros.

    a           [M, K], the rows of all groups one after another. float32, bfloat16, float16, an 8-bit float, or a rowwise
                QuantizedTensor [M, K]
    b           [G, N, K]; [G, K, N] without trans_b (dgrad, of the same weights: no copy). As a; a QuantizedTensor is what
                fw.quantize makes of such a tensor, [G * N, K], and its blocks must not straddle groups; or `preshuffle` of one
    m_sizes     [G] int32 or int64 on the operands' device: rows of each group, 0 included. Never read on the host but by the
                native backend on the CPU
    out_dtype   float32, bfloat16 or float16; default out's dtype, else the operands', or bfloat16 for 8-bit operands
    bias        [G, N]
    out         [M, N], written and returned
    a_scale, b_scale, a_scaling, b_scaling  scales of codes that are given as plain tensors, and which elements share one
                (fourwave.formats.scaling; GroupedProblem.a_scale_shape, b_scale_shape; b_scale may have any strides)
    a_scale_layout  "rows", or "groups": the per-group blocks of MSLK (GroupedProblem)
    b_preshuffled   b is a plain tensor in the order of `preshuffle`
    fast_accum  as in `gemm`
    check_sizes  have the device assert that no size is negative and that their sum is at most M: for debugging
    config, backend  as in `gemm`

    Differentiable in plain a, b and bias when no out is given. Sums are kept in float32 and rounded once. A scale of a whole
    tensor or row multiplies the sum, scales of blocks the block's share of it.
    Raises ValueError for what the caller must change, BackendUnavailable and NotImplementedError as `gemm`.
    """
    args = _forward_arguments(
        a, b, m_sizes, trans_b, out_dtype, bias, out, a_scale, b_scale, a_scaling, b_scaling, a_scale_layout, b_preshuffled,
        fast_accum, config, backend,
    )  # fmt: skip
    return _call(args, check_sizes)


def grouped_gemm_wgrad(
    dout: Tensor | QuantizedTensor,
    x: Tensor | QuantizedTensor,
    m_sizes: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    out: Tensor | None = None,
    dout_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dout_scaling: str | None = None,
    x_scaling: str | None = None,
    fast_accum: bool = False,
    check_sizes: bool = False,
    config: GroupedConfig | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[g] = dout[rows of g].T @ x[rows of g] (+ out[g]): [G, N, K]. Zeros for an empty group.

    dout        [rows, N]; x [rows, K]. Plain tensors, or QuantizedTensors with columnwise codes. Blocks of scales along the rows
                begin at row 0 of the whole matrix, wherever groups begin
    accumulate  add to `out`, a main_grad in float32 say
    The rest as in `grouped_gemm`. Differentiable in plain dout and x when no out is given.
    """
    args = _wgrad_arguments(
        dout,
        x,
        m_sizes,
        out_dtype,
        accumulate,
        out,
        dout_scale,
        x_scale,
        dout_scaling,
        x_scaling,
        fast_accum,
        config,
        backend,
    )
    return _call(args, check_sizes)


def explain_grouped(a: Any, b: Any, m_sizes: Tensor, *, wgrad: bool = False, **kwargs: Any) -> Explanation:
    """Which backend, kernel and config `grouped_gemm` (or, with wgrad, `grouped_gemm_wgrad`) would use with these arguments.

    Runs no kernel and writes nothing.
    """
    kwargs.pop("check_sizes", None)
    if wgrad:
        args = _wgrad_arguments(a, b, m_sizes, **{**_WGRAD_DEFAULTS, **kwargs})
    else:
        args = _forward_arguments(a, b, m_sizes, **{**_FORWARD_DEFAULTS, **kwargs})
    _check_choice(args)
    _tensors(args)
    return explain_arguments(args)


_FORWARD_DEFAULTS: dict[str, Any] = {
    name: value for name, value in (grouped_gemm.__kwdefaults__ or {}).items() if name != "check_sizes"
}
_WGRAD_DEFAULTS: dict[str, Any] = {
    name: value for name, value in (grouped_gemm_wgrad.__kwdefaults__ or {}).items() if name != "check_sizes"
}


def assert_sizes(m_sizes: Tensor, rows: int) -> None:
    """An assertion on the device; the host reads nothing on a GPU."""
    if m_sizes.dim() == 1 and m_sizes.dtype in (torch.int32, torch.int64):
        # One by one, too: a sum of int64 can wrap.
        right = ((m_sizes >= 0) & (m_sizes <= rows)).all() & (m_sizes.sum() <= rows)
        torch._assert_async(right, f"m_sizes must not be negative, nor add up to more than the {rows} rows there are")


def _forward_arguments(
    a: Any,
    b: Any,
    m_sizes: Tensor,
    trans_b: bool,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    out: Tensor | None,
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    a_scaling: str | None,
    b_scaling: str | None,
    a_scale_layout: str,
    b_preshuffled: bool,
    fast_accum: bool,
    config: GroupedConfig | None,
    backend: str | None,
) -> GroupedArguments:
    if isinstance(b, Preshuffled):
        if not trans_b:
            raise ValueError("b is preshuffled, an order for x @ w.T: it cannot be read with trans_b=False")
        b, b_preshuffled = b.weights, True
    if isinstance(a, QuantizedTensor):
        _no_scale("a", a_scale, a_scaling)
        a_scaling = a.format.scaling
        a, a_scale, _ = a.operand("rowwise")
    if isinstance(b, QuantizedTensor):
        _no_scale("b", b_scale, b_scaling)
        b_scaling = b.format.scaling
        b, b_scale, trans_b = _stacked(b, m_sizes, trans_b)
    return GroupedArguments(
        a, b, m_sizes, ROWS, (True, trans_b), out_dtype, bias, False, out, a_scale, b_scale, a_scaling, b_scaling,
        a_scale_layout, b_preshuffled, fast_accum, config, backend,
    )  # fmt: skip


def _stacked(w: QuantizedTensor, m_sizes: Tensor, trans_b: bool) -> tuple[Tensor, Tensor, bool]:
    """(codes, scales, k_last) of weights [G * rows, columns] as [G, ...]."""
    groups = m_sizes.shape[0] if isinstance(m_sizes, Tensor) and m_sizes.dim() == 1 else 0
    if groups == 0 or w.shape[0] % groups:
        raise ValueError(
            f"b is a QuantizedTensor {list(w.shape)}: its rows are those of {groups} groups, one after another"
        )
    rows = w.shape[0] // groups
    scaling = w.format.scaling
    data, scale, k_last = w.operand("rowwise" if trans_b else "columnwise")
    if not trans_b and k_last:
        raise ValueError(
            "b's columnwise codes are stored transposed, with all groups side by side: quantize weights for dgrad with "
            "columnwise_transposed=False"
        )
    along_rows = 128 if scaling == "128x128" else {"1x128": 128, "1x32": 32}.get(scaling, 1) if not trans_b else 1
    if rows % along_rows:
        raise ValueError(
            f"b has {rows} rows for each group and scale blocks of {along_rows} rows, which would straddle groups: pad the rows "
            "to a multiple, or give codes [G, ...] and b_scale of each group"
        )
    data = data.view(groups, rows, data.shape[-1])
    if scaling == "tensor":
        return data, scale, k_last
    if scaling == "row":
        # One for each row, or, reduced along the rows, one for each column of all groups.
        return data, scale.view(groups, rows) if trans_b else scale.expand(groups, -1), k_last
    return data, scale.view(groups, scale.shape[0] // groups, scale.shape[1]), k_last


def _wgrad_arguments(
    dout: Any,
    x: Any,
    m_sizes: Tensor,
    out_dtype: torch.dtype | None,
    accumulate: bool,
    out: Tensor | None,
    dout_scale: Tensor | None,
    x_scale: Tensor | None,
    dout_scaling: str | None,
    x_scaling: str | None,
    fast_accum: bool,
    config: GroupedConfig | None,
    backend: str | None,
) -> GroupedArguments:
    k_last = [False, False]
    if isinstance(dout, QuantizedTensor):
        _no_scale("dout", dout_scale, dout_scaling)
        dout_scaling = dout.format.scaling
        dout, dout_scale, k_last[0] = dout.operand("columnwise")
    if isinstance(x, QuantizedTensor):
        _no_scale("x", x_scale, x_scaling)
        x_scaling = x.format.scaling
        x, x_scale, k_last[1] = x.operand("columnwise")
    return GroupedArguments(
        dout, x, m_sizes, REDUCTION, (k_last[0], k_last[1]), out_dtype, None, accumulate, out, dout_scale, x_scale, dout_scaling,
        x_scaling, fast_accum=fast_accum, config=config, backend=backend,
    )  # fmt: skip


def _no_scale(name: str, scale: Tensor | None, scaling: str | None) -> None:
    if scale is not None or scaling is not None:
        raise ValueError(
            f"{name} is a QuantizedTensor, which has its scales: leave {name}_scale and {name}_scaling away"
        )


def _tensors(args: GroupedArguments) -> tuple[Tensor | None, ...]:
    """The call's tensors; what should be one and is not is refused."""
    names = ("a", "b", "m_sizes", "bias", "out", "a_scale", "b_scale")
    tensors = tuple(getattr(args, name) for name in names)
    for name, t in zip(names, tensors, strict=True):
        if not isinstance(t, Tensor) and (t is not None or name in names[:3]):
            name = name if args.split == ROWS else {"a": "dout", "b": "x"}.get(name, name)
            kinds = "a tensor or a QuantizedTensor is" if name in ("a", "b", "dout", "x") else "a tensor is"
            raise ValueError(f"{name} is of type {type(t).__name__}; {kinds} needed")
    return tensors


def _call(args: GroupedArguments, check_sizes: bool) -> Tensor:
    _check_choice(args)
    tensors = _tensors(args)
    if check_sizes:
        _, m, _, k = sizes(args)
        assert_sizes(args.m_sizes, m if args.split == ROWS else k)
    if not _needs_operator(*tensors):
        return execute(args)
    if not torch.compiler.is_compiling():
        operators.register_grouped_flops()
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "torch.func transforms (grad, vmap, ...) cannot go through grouped_gemm: use torch.autograd"
        )
    if has_tangent(tensors):
        raise NotImplementedError(
            "an argument has a forward-mode tangent, which would be dropped: grouped_gemm has backward-mode gradients only"
        )
    if args.config is not None:
        raise NotImplementedError("config is not supported with autograd, torch.compile, tracing or a dispatch mode")
    grad = torch.is_grad_enabled()
    if grad and any(t.dtype in FLOAT8 and t.requires_grad for t in (args.a, args.b)):
        raise ValueError("8-bit operands require grad: their gradient would be rounded to 8 bits; detach them")
    if args.out is not None or args.a_scaling is not None or args.b_scaling is not None:
        if grad and requires_grad(tensors):
            what = "out= was given" if args.out is not None else "operands are quantized"
            raise ValueError(
                f"{what} and an argument requires grad; no gradient is recorded of such a call: use torch.no_grad()"
            )
    if args.out is not None:
        if args.out_dtype not in (None, args.out.dtype):
            raise ValueError(f"out_dtype is {args.out_dtype} and out is {args.out.dtype}")
        torch.ops.fourwave.grouped_gemm_out(
            args.a, args.b, args.m_sizes, args.out, args.split, *args.k_last, args.bias, args.accumulate, args.a_scale, args.b_scale,
            args.a_scaling, args.b_scaling, args.a_scale_layout, args.b_preshuffled, args.fast_accum, args.backend,
        )  # fmt: skip
        return args.out
    if args.accumulate:
        raise ValueError("accumulate=True adds to `out`, and no out was given")
    if args.split == ROWS:
        return torch.ops.fourwave.grouped_gemm(
            args.a, args.b, args.m_sizes, args.bias, args.k_last[1], args.out_dtype, args.a_scale, args.b_scale, args.a_scaling,
            args.b_scaling, args.a_scale_layout, args.b_preshuffled, args.fast_accum, args.backend,
        )  # fmt: skip
    if args.k_last[0] != args.k_last[1]:
        raise ValueError("one of dout and x is stored transposed and the other is not: quantize both alike")
    return torch.ops.fourwave.grouped_gemm_wgrad(
        args.a, args.b, args.m_sizes, args.out_dtype, args.k_last[0], args.a_scale, args.b_scale, args.a_scaling, args.b_scaling,
        args.fast_accum, args.backend,
    )  # fmt: skip


def _needs_operator(*tensors: Tensor | None) -> bool:
    """Whether something other than plain eager execution has to see the call as one operator."""
    if is_special() or has_tangent(tensors) or not all(t is None or is_plain(t) for t in tensors):
        return True
    return torch.is_grad_enabled() and requires_grad(tensors)


def _check_choice(args: GroupedArguments) -> None:
    if args.backend is not None and not isinstance(args.backend, str):
        raise ValueError(
            f"backend is {args.backend!r}; it must be a string, one of {', '.join(registry.known())}, or None"
        )
    if args.config is not None:
        from fourwave.ops.grouped_gemm.config import GroupedConfig
        from fourwave.ops.grouped_gemm.sm90_config import HopperGroupedConfig

        if not isinstance(args.config, (GroupedConfig, HopperGroupedConfig)):
            raise ValueError(
                f"config is {args.config!r}; it must be a fourwave.ops.grouped_gemm.config.GroupedConfig (AMD), a "
                "sm90_config.HopperGroupedConfig of the same folder, or None"
            )


assert operators and groupwise  # they register torch.ops.fourwave.*
