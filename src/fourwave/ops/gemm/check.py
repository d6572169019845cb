"""Checks the arguments of a call, and turns them into a problem and two-dimensional tensors that backends take."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from fourwave.backends import registry
from fourwave.formats.element import E8M0
from fourwave.formats.scaling import SCALINGS, scale_shape
from fourwave.ops.gemm.problem import (
    ACTIVATIONS,
    FLOAT8,
    PACKED_E2M1,
    PRECISIONS,
    SWIGLU,
    GemmProblem,
    GemmTensors,
    packed_scale_shape,
)
from fourwave.ops.grouped_gemm.preshuffle import check_shuffled

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig

Tensor = torch.Tensor

_DTYPES = "float32, bfloat16 or float16"
_problem = functools.lru_cache(maxsize=4096)(GemmProblem)


class Arguments(NamedTuple):
    """A call of `fw.gemm` with its quantized tensors taken apart. The names are those of gemm and of GemmTensors.

    Tensors first (NUM_TENSORS), then alpha, then what is fixed by the caller's code.
    """

    a: Tensor
    b: Tensor
    out: Tensor | None = None
    bias: Tensor | None = None
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    preactivation: Tensor | None = None
    bias_grad: Tensor | None = None
    out_scale: Tensor | None = None
    out_amax: Tensor | None = None
    out_columnwise: Tensor | None = None
    out_columnwise_scale: Tensor | None = None
    alpha: float = 1.0
    trans_a: bool = False
    trans_b: bool = True
    out_dtype: torch.dtype | None = None
    activation: str | None = None
    accumulate: bool = False
    a_scaling: str | None = None
    b_scaling: str | None = None
    batch_invariant: bool = False
    fast_accum: bool = False
    out_scaling: str | None = None
    out_direction: str = "rowwise"
    out_scale_rule: str = "floor"
    b_preshuffled: bool = False
    config: GemmConfig | None = None
    backend: str | None = None


NUM_TENSORS = 12


class Call(NamedTuple):
    """A checked call. tensors are two-dimensional; outputs that are None there are still to be made."""

    problem: GemmProblem
    tensors: GemmTensors
    shape: tuple[int, ...]  # of the result, leading dimensions included
    notes: list[str]


def check_choice(config: object, backend: object) -> None:
    if backend is not None and not isinstance(backend, str):
        raise ValueError(f"backend is {backend!r}; it must be a string, one of {', '.join(registry.known())}, or None")
    if config is not None:
        from fourwave.ops.gemm.config import GemmConfig
        from fourwave.ops.gemm.sm90_config import HopperConfig

        if not isinstance(config, (GemmConfig, HopperConfig)):
            raise ValueError(
                f"config is {config!r}; it must be a fourwave.ops.gemm.config.GemmConfig (flydsl, sim), a "
                "fourwave.ops.gemm.sm90_config.HopperConfig (hopper) or None"
            )


def check(args: Arguments) -> Call:
    """Raises ValueError for what the caller must change."""
    a, b, out, bias = args.a, args.b, args.out, args.bias
    # Before the shapes: a uint8 operand's columns are counted as those of packed codes.
    _check_operand_dtypes(a, b, args.a_scaling, args.b_scaling)
    shape, k = product_shape(a, b, args.trans_a, args.trans_b)
    device = a.device
    if b.device != device or device.type not in ("cpu", "cuda"):
        raise ValueError(f"a is on {device} and b on {b.device}; both must be on one CPU or GPU")
    if a.layout is not torch.strided or b.layout is not torch.strided:
        raise ValueError(f"a has layout {a.layout} and b {b.layout}; gemm takes torch.strided tensors only")
    scaled = args.a_scaling is not None or args.b_scaling is not None
    check_epilogue(shape, bias, args.activation, device)
    n = shape[-1]
    m = shape[0] if args.trans_a else math.prod(shape[:-1])
    if args.activation == SWIGLU:
        shape = (*shape[:-1], n // 2)
    out_dtype = _out_dtype(args, shape)
    notes: list[str] = []
    a2 = matrix(a, k if args.trans_a else m, "a", notes)
    b2 = matrix(b, n if args.trans_b else k, "b", notes)
    a_scale, b_scale = args.a_scale, args.b_scale
    if scaled:
        a_scale = _scale("a", a_scale, args.a_scaling, a2, not args.trans_a)
        b_scale = _scale("b", b_scale, args.b_scaling, b2, args.trans_b, args.b_preshuffled)
    if args.b_preshuffled:
        check_shuffled(b2)
    bias_dtype = None
    if bias is not None:
        bias_dtype = bias.dtype
        if bias.is_neg() or (n > 1 and bias.stride(0) != 1):
            notes.append("bias copied: not contiguous")
            bias = bias.resolve_neg().contiguous()
    preactivation_dtype = bias_grad_dtype = None
    if args.preactivation is not None:
        preactivation_dtype = _check_preactivation(args, (*shape[:-1], n))
    if args.bias_grad is not None:
        bias_grad_dtype = _check_bias_grad(args, m)
    problem = _problem(
        m, n, k, "NT" if args.trans_a else ("TN" if args.trans_b else "NN"), a.dtype, b.dtype, out_dtype, bias_dtype,
        args.activation, flag("accumulate", args.accumulate), device.type, args.a_scaling, args.b_scaling, preactivation_dtype,
        bias_grad_dtype, args.out_scaling, args.out_direction, args.out_scale_rule, flag("batch_invariant", args.batch_invariant),
        flag("fast_accum", args.fast_accum), bool(args.b_preshuffled),
    )  # fmt: skip
    tensors = GemmTensors(
        a2, b2, out, bias, float(args.alpha), a_scale, b_scale, args.preactivation, args.bias_grad, args.out_scale,
        args.out_amax, args.out_columnwise, args.out_columnwise_scale,
    )  # fmt: skip
    return Call(problem, tensors, shape, notes)


def default_out_dtype(a: Tensor, b: Tensor) -> torch.dtype:
    """The operands' dtype; that of the plain one of a mixed pair; bfloat16 for two of 8 bits or less."""
    return next((t.dtype for t in (a, b) if t.dtype in PRECISIONS), torch.bfloat16)


def columns(t: Tensor) -> int:
    """Elements of the last dimension."""
    return t.shape[-1] * 2 if t.dtype == PACKED_E2M1 else t.shape[-1]


def flag(name: str, value: object) -> bool:
    """value as a bool; what is neither that nor 0 nor 1 is refused: "no" would be True."""
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def check_layout(trans_a: bool, trans_b: bool) -> None:
    flag("trans_a", trans_a)
    flag("trans_b", trans_b)
    if trans_a and trans_b:
        raise ValueError(
            "trans_a=True with trans_b=True is not a layout here: swap the operands and transpose the result, "
            "gemm(b, a, trans_a=False, trans_b=False).mT"
        )


def product_shape(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool) -> tuple[tuple[int, ...], int]:
    """Shape of op(a) @ op(b), leading dimensions included, and K; from metadata alone."""
    check_layout(trans_a, trans_b)
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both need at least one dimension")
    if trans_a:
        k_a, k_b = math.prod(a.shape[:-1]), math.prod(b.shape[:-1])
        names = "the leading dimensions of a and of b, multiplied (K)"
        shape: tuple[int, ...] = (columns(a), columns(b))
    else:
        if b.dim() != 2:
            raise ValueError(
                f"b is {tuple(b.shape)}; without trans_a it is a matrix, {'[N, K]' if trans_b else '[K, N]'} "
                "(this is no batched product: only a's leading dimensions are flattened)"
            )
        k_a, k_b = columns(a), columns(b) if trans_b else b.shape[0]
        names = f"a's last dimension and b's {'last' if trans_b else 'first'} (K)"
        shape = (*a.shape[:-1], b.shape[0] if trans_b else columns(b))
    if k_a != k_b:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} with trans_a={trans_a}, trans_b={trans_b}: {names} must be equal, "
            f"and are {k_a} and {k_b}"
        )
    return shape, k_a


def _check_operand_dtypes(a: Tensor, b: Tensor, a_scaling: str | None, b_scaling: str | None) -> None:
    plain = a.dtype in PRECISIONS, b.dtype in PRECISIONS
    if a_scaling is None and b_scaling is None:
        if (a.dtype == b.dtype and all(plain)) or (a.dtype in FLOAT8 and b.dtype in FLOAT8):
            return
        raise ValueError(
            f"a is {a.dtype} and b is {b.dtype}; both must have one dtype, {_DTYPES}, or both be 8-bit floats, or "
            "be quantized (fw.quantize)"
        )
    for name, t, scaling, is_plain in (("a", a, a_scaling, plain[0]), ("b", b, b_scaling, plain[1])):
        if scaling is None:
            if not is_plain and t.dtype not in FLOAT8:
                raise ValueError(f"{name} is {t.dtype} without scales; it must be {_DTYPES} or an 8-bit float")
        elif scaling not in SCALINGS:
            raise ValueError(f"{name}_scaling is {scaling!r}; it must be {', '.join(SCALINGS)}")
        elif t.dtype not in FLOAT8 and not (t.dtype == PACKED_E2M1 and scaling == "1x32"):
            raise ValueError(
                f"{name} is {t.dtype} with scales {scaling!r}; scaled operands are 8-bit floats, or packed e2m1 (uint8) "
                "with '1x32'"
            )


def _scale(
    name: str, scale: Tensor | None, scaling: str | None, codes: Tensor, k_last: bool, packed: bool = False
) -> Tensor | None:
    """The scales of one operand as backends take them. packed: "1x32" are as beside preshuffled codes."""
    if (scale is None) != (scaling is None):
        raise ValueError(f"{name}_scale and {name}_scaling go together; {name}_scaling is {scaling!r}")
    if scale is None or scaling is None:
        return None
    dtypes = (E8M0.torch_dtype, torch.uint8) if scaling == "1x32" else (torch.float32,)
    if scale.dtype not in dtypes:
        wanted = "float8_e8m0fnu, or its codes as uint8" if scaling == "1x32" else "float32"
        raise ValueError(f"{name}_scale is {scale.dtype}; scales {scaling!r} are {wanted}")
    if scale.device != codes.device:
        raise ValueError(f"{name}_scale is on {scale.device} and {name} on {codes.device}")
    rows, cols = codes.shape[0], columns(codes)
    shape = scale_shape(scaling, rows, cols, k_last)
    if packed and scaling == "1x32":
        shape = packed_scale_shape(shape)
    # What fits goes on as it is, the same object: execute keeps no plan for what had to be viewed.
    if scaling == "tensor" and scale.numel() == 1:
        scale = scale.resolve_neg()
        return scale if scale.dim() == 0 else scale.reshape(())
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"{name}_scale is {tuple(scale.shape)}; {name} [{rows}, {cols}] with scales {scaling!r}, reduced along its "
            f"{'last' if k_last else 'first'} dimension, has {shape} of them"
        )
    if scaling == "1x32" and E8M0.torch_dtype not in (None, scale.dtype):
        scale = scale.view(E8M0.torch_dtype)
    scale = scale.resolve_neg().contiguous()
    if scale.dim() == 2 and scale.stride() != (shape[1], 1):
        # PyTorch leaves the strides of dimensions of size 1 as they were.
        scale = scale.as_strided(shape, (shape[1], 1))
    return scale


def packed(vector: Tensor) -> Tensor:
    """A vector, or a copy, with stride 1, as kernels are traced: one element counts as contiguous whatever its stride."""
    vector = vector.contiguous()
    return vector if vector.stride(0) == 1 else vector.as_strided(vector.shape, (1,))


def check_epilogue(shape: tuple[int, ...], bias: Tensor | None, activation: str | None, device: torch.device) -> None:
    if bias is not None:
        if bias.dim() != 1 or bias.shape[0] != shape[-1]:
            raise ValueError(f"bias is {tuple(bias.shape)}; it must be [N] = [{shape[-1]}]")
        if bias.dtype not in PRECISIONS:
            raise ValueError(f"bias is {bias.dtype}; it must be {_DTYPES}")
        if bias.device != device:
            raise ValueError(f"bias is on {bias.device} and the operands are on {device}")
    if activation is not None and activation not in ACTIVATIONS:
        if activation != SWIGLU:
            known = ", ".join((*ACTIVATIONS, SWIGLU))
            raise ValueError(f"activation {activation!r}: the activations are None, {known}")
        if shape[-1] % 2:
            raise ValueError(f"activation 'swiglu' with N = {shape[-1]}: N holds gate and up columns and must be even")


def _out_dtype(args: Arguments, shape: tuple[int, ...]) -> torch.dtype:
    """The dtype that is written, after checking everything that is said of it."""
    out, device = args.out, args.a.device
    if args.accumulate and out is None:
        raise ValueError("accumulate=True adds to `out`, and no out was given")
    if out is not None:
        if tuple(out.shape) != shape:
            raise ValueError(
                f"out is {tuple(out.shape)}; a {tuple(args.a.shape)} and b {tuple(args.b.shape)} give {shape}"
            )
        if out.device != device:
            raise ValueError(f"out is on {out.device} and the operands are on {device}")
    if args.out_scaling is not None:
        if args.accumulate:
            raise ValueError("accumulate=True with a quantized output: there is nothing to add to")
        codes = out if out is not None else args.out_columnwise
        assert codes is not None and codes.dtype in FLOAT8, "gemm makes the outputs that it quantizes"
        return codes.dtype
    if out is not None:
        check_out_dtype(args.out_dtype, out)
        dtype = out.dtype
    else:
        dtype = default_out_dtype(args.a, args.b) if args.out_dtype is None else args.out_dtype
    if dtype not in PRECISIONS:
        raise ValueError(f"out_dtype is {dtype}; it must be {_DTYPES}")
    return dtype


def check_out_dtype(out_dtype: torch.dtype | None, out: Tensor) -> None:
    if out_dtype is not None and out_dtype != out.dtype:
        raise ValueError(f"out_dtype is {out_dtype} and out is {out.dtype}: leave out_dtype away, or make them equal")


def _check_preactivation(args: Arguments, shape: tuple[int, ...]) -> torch.dtype:
    z = args.preactivation
    assert z is not None
    if tuple(z.shape) != shape or z.dtype not in PRECISIONS or z.device != args.a.device:
        raise ValueError(
            f"preactivation is {tuple(z.shape)} {z.dtype} on {z.device}; it must be {shape}, {_DTYPES}, on {args.a.device}"
        )
    return z.dtype


def _check_bias_grad(args: Arguments, m: int) -> torch.dtype:
    t = args.bias_grad
    assert t is not None
    if not args.trans_a:
        raise ValueError(
            "bias_grad is the sum of dout over the tokens, which wgrad reduces over: it needs trans_a=True"
        )
    if t.is_neg():
        raise ValueError("bias_grad is a negated view, which a kernel cannot write: give the tensor itself")
    if (
        t.dim() != 1
        or t.shape[0] != m
        or not t.is_contiguous()
        or t.dtype not in PRECISIONS
        or t.device != args.a.device
    ):
        raise ValueError(
            f"bias_grad is {tuple(t.shape)} {t.dtype}, strides {t.stride()}, on {t.device}; it must be [{m}], {_DTYPES}, "
            f"contiguous, on {args.a.device}"
        )
    return t.dtype


def matrix(t: Tensor, rows: int, name: str, notes: list[str]) -> Tensor:
    """t as [rows, last dim], inner stride 1, row stride >= the row's length; copied, with a note, if no view is so."""
    cols = t.shape[-1]
    if t.dim() == 2:
        flat = t
    else:
        try:
            flat = t.view(rows, cols)
        except RuntimeError:
            notes.append(f"{name} copied: its leading dimensions, strides {t.stride()[:-1]}, do not flatten")
            return t.resolve_neg().reshape(rows, cols).contiguous()
    if flat.is_neg():
        notes.append(f"{name} copied: it is a negated view")
        return flat.resolve_neg().contiguous()
    row_stride, col_stride = flat.stride()
    if col_stride == 1 and row_stride >= cols:
        return flat
    if flat.numel() == 0:
        return flat.new_empty(rows, cols)
    # The stride of a dimension of size 1 says nothing.
    if (cols == 1 or col_stride == 1) and (rows == 1 or row_stride >= cols):
        return flat.as_strided((rows, cols), (max(row_stride, cols) if rows > 1 else cols, 1))
    notes.append(f"{name} copied: strides {tuple(flat.stride())}, not rows of contiguous elements")
    return flat.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------------------------------
# memory shared between arguments

_WRITTEN = (
    "out", "preactivation", "bias_grad", "out_amax", "out_columnwise", "out_columnwise_scale",
)  # fmt: skip
_READ = ("a", "b", "bias", "a_scale", "b_scale")
_OUT_SCALE = ("out_scale",)


def check_overlap(args: Arguments) -> None:
    """Nothing that is written may share memory with itself, with what is read, or with another output."""
    mx = args.out_scaling == "1x32"  # whose scales are an output
    written = [
        (name, t) for name in (*_WRITTEN, *_OUT_SCALE[:mx]) if (t := getattr(args, name)) is not None and t.numel()
    ]
    if not written:
        return
    read = [(name, t) for name in (*_READ, *_OUT_SCALE[mx:]) if (t := getattr(args, name)) is not None and t.numel()]
    for i, (name, out) in enumerate(written):
        if not out.is_contiguous() and _overlaps_itself(out):
            raise ValueError(
                f"{name} has strides {out.stride()} and shape {tuple(out.shape)}: two elements share one place"
            )
        low, high = _byte_range(out)
        for other, t in (*read, *written[:i]):
            t_low, t_high = _byte_range(t)
            if t_low < high and low < t_high and not _interleaved(out, t, t_low - low):
                why = "is written too" if any(t is w for _, w in written) else "would be overwritten while it is read"
                raise ValueError(f"{name} shares memory with {other}, which {why}")


def _overlaps_itself(t: Tensor) -> bool:
    """True unless each stride steps over everything that the smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _byte_range(t: Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    return start, start + (last + 1) * t.element_size()


def _interleaved(out: Tensor, t: Tensor, offset: int) -> bool:
    """Whether two matrices, t starting `offset` bytes after out, are disjoint column slices of the same rows."""
    if out.dim() != 2 or t.dim() != 2 or out.stride(1) != 1 or t.stride(1) != 1:
        return False
    pitch = out.stride(0) * out.element_size()
    if pitch == 0 or pitch != t.stride(0) * t.element_size():
        return False
    gap = offset % pitch  # from the start of a row of out to the next start of a row of t
    return out.shape[1] * out.element_size() <= gap and gap + t.shape[1] * t.element_size() <= pitch
