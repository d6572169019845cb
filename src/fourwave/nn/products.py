"""Operands and products of a linear layer: quantized once for the directions that are needed, multiplied by fw.gemm."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fourwave.ops.gemm.api import gemm
from fourwave.ops.gemm.check import Arguments
from fourwave.ops.gemm.execute import execute
from fourwave.ops.gemm.operators import flops_of, register_flops
from fourwave.ops.gemm.problem import SWIGLU
from fourwave.quantize import QuantizedTensor, quantize
from fourwave.quantize.random import HADAMARD
from fourwave.quantize.tensor import FORMATS
from fourwave.recipes import Plan

Tensor = torch.Tensor
Operand = Tensor | QuantizedTensor

HADAMARD_SEED = 0  # one for all: both operands of a product need the same


class Pair(NamedTuple):
    """One matrix as both operands of it that a layer needs: row with blocks along its rows, col along its columns."""

    row: Operand | None
    col: Operand | None
    amax: Tensor | None = None


def rows(t: Tensor) -> Tensor:
    """t with its leading dimensions flattened."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def shaped(t: Tensor, *shape: int) -> Tensor:
    """A module's result in the shape of its input, and no view of `t`, which nobody else has: FSDP2 hangs the hook that gathers
    parameters for the backward pass on a result, and a change in place of a view drops it.

    A selective checkpoint may have kept `t`: of a view it sees the change, and refuses.
    """
    if t.shape == shape:
        return t
    return t.view(shape) if functional() else torch.ops.aten._unsafe_view(t, shape)


def pair(
    t: Tensor,
    row: str | None,
    col: str | None,
    plan: Plan,
    *,
    need_row: bool,
    need_col: bool,
    scale: Tensor | None = None,
    fnuz: bool | None = None,
    backend: str | None = None,
    observe: bool = False,
    transposed: bool | None = None,
    seed: Tensor | None = None,
    hadamard: bool = False,
) -> Pair:
    """t [..., C], flattened to [R, C], in format `row` for one product and in `col` for another; from one reading where they are the same.

    A format None leaves t as it is. scale: given, for delayed scaling, which gives amax back. transposed: whether columnwise
    codes are stored transposed; default what the device's matrix units want.
    seed: of stochastic rounding, counted up afterwards. hadamard: columnwise codes are those of the transformed values
    """
    quantized: dict[str, Operand | None] = {"rowwise": None, "columnwise": None}
    amax = None
    wanted = [("rowwise", row)] * need_row + [("columnwise", col)] * need_col
    if len(wanted) == 2 and row == col and row is not None:
        wanted = [("both", row)]
    if transposed is None:
        transposed = _stores_transposed(t, plan, backend)
    for direction, name in wanted:
        if name is None:
            quantized[direction] = t
            continue
        fmt = FORMATS[name]
        rule = None if scale is not None else plan.mx_rule if fmt.is_mx else plan.block_rule
        extras: dict[str, Any] = {}
        if seed is not None and fmt.element == "e2m1":
            rule, extras = "ceil", {"rounding": "stochastic", "seed": seed}
        if hadamard and direction != "rowwise" and fmt.element == "e2m1":
            extras |= {"hadamard": "columnwise", "hadamard_seed": HADAMARD_SEED}
        q = quantize(
            t, name, direction, scale=scale, scale_rule=rule, fnuz=None if fmt.is_mx else fnuz,
            columnwise_transposed=transposed and direction != "rowwise", backend=backend, **extras,
        )  # fmt: skip
        if seed is not None:
            seed.add_(1)
        amax = q.amax
        for each in quantized:
            if direction in (each, "both"):
                quantized[each] = q
    if observe:
        amax = largest(t)
    return Pair(quantized["rowwise"], quantized["columnwise"], amax)


def transforms(plan: Plan, tokens: int) -> bool:
    """Whether wgrad's operands go through the Hadamard transform: both or neither, by the number of tokens."""
    return plan.hadamard and tokens % HADAMARD == 0


def largest(t: Tensor) -> Tensor:
    """float32 (): largest magnitude, 0 of nothing."""
    return t.abs().amax().float() if t.numel() else torch.zeros((), dtype=torch.float32, device=t.device)


def _stores_transposed(t: Tensor, plan: Plan, backend: str | None) -> bool:
    """Whether columnwise codes are stored transposed: where kernels read them along the reduction only. That is so of 8-bit
    operands on NVIDIA GPUs, and of scales of 128 x 128 in the AMD kernels."""
    if "mxfp4" in (plan.x_t, plan.w_t, plan.g_t):
        return False  # packed in pairs: either dimension could be odd
    blocks = "128" in (plan.w_t or "")
    if t.device.type == "cuda":
        return torch.version.hip is None or blocks
    return blocks and backend is not None and "sim" in backend


def in_dtype(operand: Operand, dtype: torch.dtype) -> Operand:
    """A plain operand in the precision of a product."""
    return operand.to(dtype) if isinstance(operand, Tensor) else operand


class Packed(NamedTuple):
    """What is constant of an operand whose tensors are saved; format None: a plain tensor."""

    format: str | None
    shape: tuple[int, int]
    direction: str
    transposed: bool = False
    hadamard: int | None = None


def pack(operand: Operand | None, direction: str) -> tuple[Packed | None, list[Tensor]]:
    """(constants, tensors) of the one direction of an operand that the backward pass uses."""
    if operand is None:
        return None, []
    if isinstance(operand, Tensor):
        return Packed(None, (0, 0), direction), [operand]
    hadamard = operand.hadamard(direction)
    codes, scale, k_last = operand.operand(direction, hadamard=hadamard)
    transposed = direction == "columnwise" and k_last
    return Packed(operand.format.name, operand.shape, direction, transposed, hadamard), [codes, scale]


def unpack(packed: Packed, tensors: list[Tensor]) -> Operand:
    """Inverse of pack; takes its tensors off the front of the list."""
    if packed.format is None:
        return tensors.pop(0)
    codes, scale = tensors.pop(0), tensors.pop(0)
    fmt = FORMATS[packed.format]
    if packed.direction == "rowwise" or (fmt.one_copy and not packed.transposed):
        return QuantizedTensor(fmt, packed.shape, codes, scale, row_hadamard=packed.hadamard)
    return QuantizedTensor(
        fmt, packed.shape, columnwise_data=codes, columnwise_scale=scale, columnwise_transposed=packed.transposed,
        column_hadamard=packed.hadamard,
    )  # fmt: skip


# Of torch.utils.checkpoint.create_selective_checkpoint_contexts: the modes of the first run and of the second.
_SELECTIVE = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


def functional() -> bool:
    """Whether products have to return what they make: torch.compile need not think of mutation then, and selective checkpoints keep what an
    operator returned, not what it wrote."""
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


class Product(NamedTuple):
    out: Tensor
    preactivation: Tensor | None = None
    bias_grad: Tensor | None = None


def product(
    a: Operand,
    b: Operand,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: str | None = None,
    preactivation: torch.dtype | None = None,
    bias_grad: torch.dtype | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    fast_accum: bool = False,
    backend: str | None = None,
) -> Product:
    """fw.gemm that makes what it writes: preactivation and bias_grad are dtypes. Operands are matrices."""
    if out is None and functional():
        return _traced_product(
            a, b, trans_a, trans_b, out_dtype, bias, activation, preactivation, bias_grad, fast_accum, backend
        )  # fmt: skip
    m, n = (a.shape[1] if trans_a else a.shape[0]), (b.shape[0] if trans_b else b.shape[1])
    z = None if preactivation is None else torch.empty(m, n, dtype=preactivation, device=a.device)
    db = None if bias_grad is None else torch.empty(m, dtype=bias_grad, device=a.device)
    result = gemm(
        a, b, trans_a=trans_a, trans_b=trans_b, out_dtype=None if out is not None else out_dtype, bias=bias,
        activation=activation, preactivation=z, bias_grad=db, out=out, accumulate=accumulate, fast_accum=fast_accum,
        backend=backend,
    )  # fmt: skip
    return Product(result, z, db)


def _traced_product(  # type: ignore[no-untyped-def]
    a, b, trans_a, trans_b, out_dtype, bias, activation, preactivation, bias_grad, fast_accum, backend
):  # fmt: skip
    a_scale = b_scale = a_scaling = b_scaling = None
    directions = ["columnwise" if first else "rowwise" for first in (trans_a, not trans_b)]
    seeds = [
        t.hadamard(direction) if isinstance(t, QuantizedTensor) else None
        for t, direction in zip((a, b), directions, strict=True)
    ]
    if not torch.compiler.is_compiling():
        register_flops((torch.ops.fourwave.product, flops_of(_product_op._init_fn)))
    assert seeds[0] == seeds[1], "both operands of a product are transformed, or neither"
    if isinstance(a, QuantizedTensor):
        a_scaling = a.format.scaling
        a, a_scale, k_last = a.operand(directions[0], hadamard=seeds[0])
        trans_a = not k_last
    if isinstance(b, QuantizedTensor):
        b_scaling = b.format.scaling
        b, b_scale, k_last = b.operand(directions[1], hadamard=seeds[1])
        trans_b = k_last
    out, z, db = torch.ops.fourwave.product(
        a, b, trans_a, trans_b, out_dtype, bias, activation, preactivation, bias_grad, a_scale, b_scale, a_scaling,
        b_scaling, fast_accum, backend,
    )  # fmt: skip
    return Product(out, None if preactivation is None else z, None if bias_grad is None else db)


@torch.library.custom_op("fourwave::product", mutates_args=())
def _product_op(
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: str | None = None,
    preactivation: torch.dtype | None = None,
    bias_grad: torch.dtype | None = None,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    a_scaling: str | None = None,
    b_scaling: str | None = None,
    fast_accum: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """gemm_out that returns what it writes, so that a compiler need not think of mutation: out, preactivation, bias_grad.
    What was not asked for is empty."""
    out, z, db = _product_fake(a, b, trans_a, trans_b, out_dtype, bias, activation, preactivation, bias_grad)
    arguments = Arguments(
        a=a, b=b, trans_a=trans_a, trans_b=trans_b, bias=bias, activation=activation, out=out, a_scale=a_scale,
        b_scale=b_scale, a_scaling=a_scaling, b_scaling=b_scaling, preactivation=None if preactivation is None else z,
        bias_grad=None if bias_grad is None else db, fast_accum=fast_accum, backend=backend,
    )  # fmt: skip
    execute(arguments)
    return out, z, db


@_product_op.register_fake
def _product_fake(  # type: ignore[no-untyped-def]
    a, b, trans_a, trans_b, out_dtype, bias=None, activation=None, preactivation=None, bias_grad=None, *_, **__
):  # fmt: skip
    from fourwave.ops.gemm.check import product_shape

    (m, n), _k = product_shape(a, b, trans_a, trans_b)
    out = a.new_empty((m, n // 2 if activation == SWIGLU else n), dtype=out_dtype)
    z = a.new_empty((0,) if preactivation is None else (m, n), dtype=preactivation or out_dtype)
    db = a.new_empty((0,) if bias_grad is None else (m,), dtype=bias_grad or out_dtype)
    return out, z, db
