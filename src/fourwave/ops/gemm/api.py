"""fw.gemm and fw.explain.

A call's quantized tensors are taken apart; the rest of it is checked, flattened to two dimensions (check.py), and given to
a backend (execute.py). That is all that happens in eager mode without gradients. Calls that need autograd, and calls that
torch.compile or another transform looks at, go through the operators (operators.py), whose implementation comes back to
the same code.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from fourwave.backends.explanation import Explanation
from fourwave.formats.element import E8M0
from fourwave.ops.gemm.check import (
    NUM_TENSORS,
    Arguments,
    Tensor,
    check_choice,
    check_layout,
    check_out_dtype,
    default_out_dtype,
    product_shape,
)
from fourwave.ops.gemm.execute import execute
from fourwave.ops.gemm.explain import explain_arguments
from fourwave.ops.gemm.operators import register_flops
from fourwave.ops.gemm.problem import FLOAT8, SWIGLU
from fourwave.ops.gemm.quick import quick
from fourwave.ops.grouped_gemm.preshuffle import Preshuffled
from fourwave.quantize.api import reads_fnuz
from fourwave.quantize.tensor import DIRECTIONS, FORMATS, QuantizedTensor
from fourwave.transforms import has_tangent, is_plain, is_special, requires_grad

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig

OUT_FORMATS = ("fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2")
SCALE_RULES = ("floor", "ceil")


def gemm(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor | Preshuffled,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    out: Tensor | None = None,
    preactivation: Tensor | None = None,
    bias_grad: Tensor | None = None,
    out_format: str | None = None,
    out_scale: Tensor | None = None,
    out_direction: str = "rowwise",
    out_scale_rule: str = "floor",
    batch_invariant: bool = False,
    fast_accum: bool = False,
    config: GemmConfig | None = None,
    backend: str | None = None,
) -> Any:
    """out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

    a           [..., K]; [..., M] with trans_a, whose leading dimensions are then K. float32, bfloat16, float16, an 8-bit
                float (float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz), or a QuantizedTensor
    b           [N, K]; [K, N] without trans_b; [..., N] with trans_a. a's dtype; of 8-bit floats any two go together, and
                a QuantizedTensor with any other or with a plain a. Or 8-bit weights [N, K] that `fw.preshuffle` has brought
                into the order that AMD's matrix instructions read, for x @ w.T only: the product has the same bits
    trans_a, trans_b  False, True: fprop, x @ w.T ("TN"). False, False: dgrad, dout @ w ("NN").
                True, False: wgrad, dout.T @ x ("NT"). There is no True, True. Quantized tensors are named by their logical
                shape, and must hold codes along the reduction: both rowwise for fprop; dout rowwise and w columnwise for
                dgrad; both columnwise for wgrad. Whether columnwise codes are stored transposed is seen to here.
    out_dtype   float32, bfloat16 or float16; default out's dtype, else the operands' (a plain one's of a mixed pair), or
                bfloat16 for operands of 8 bits or less
    bias        [N] float32, bfloat16 or float16, of any stride
    activation  None, "relu", "gelu" (erf), "gelu_tanh" or "silu"; or "swiglu": with z = alpha * op(a) @ op(b) + bias of even N,
                out[M, N / 2] = silu(z[:, : N / 2]) * z[:, N / 2 :]
    alpha       number; multiplies the product before the bias
    accumulate  add the result to what `out` holds, and the bias gradient to what `bias_grad` holds
    out         written and returned: [..., N], or [M, N] with trans_a. Any strides that do not map two elements to one
                place; nothing that is written may share memory with anything else
    preactivation  [..., N] float32, bfloat16 or float16, any strides: written with alpha * op(a) @ op(b) + bias
    bias_grad   [M] float32, bfloat16 or float16, contiguous, with trans_a: written with the sum of a over K, in float32. Not of
                an a that went through a Hadamard transform
    out_format  quantize the float32 result instead of rounding it, by the rules of `fw.quantize`: "fp8_e4m3", "fp8_e5m2" (with
                the given scale; amax is returned), "mxfp8_e4m3" or "mxfp8_e5m2"
    out_scale   float32, one element: the scale for "fp8_e4m3" and "fp8_e5m2"
    out_direction  "rowwise", "columnwise" or "both", as `fw.quantize` has them; of FP8 the codes are the same
    out_scale_rule  of MX: "floor" or "ceil"
    batch_invariant  a row of out has the same bits whatever M and the other rows are
    fast_accum  allow the matrix unit's own accumulation where it is less exact than float32 (8-bit floats on Hopper)
    config      the kernel's tunables; default the backend's choice
    backend     "auto", "native", "flydsl", "hopper", "sim" (sim:gfx950), "sim:gfx942", "sim:gfx950",
                "sim:gfx1250"; default what `use_backend` or FOURWAVE_BACKEND says, else "auto"
    returns     [..., N], or [M, N] with trans_a ([..., N / 2] for swiglu); contiguous unless `out` is given. With out_format a
                QuantizedTensor of two dimensions

    Operands may be views with any strides and offset; leading dimensions are flattened. Sums are kept in float32; alpha,
    bias, activation and the addend are applied to the float32 sum, and the one rounding, to nearest even, is that to
    out_dtype (NativeBackend states PyTorch's exception on GPUs). float32 operands are multiplied in float32; see
    NativeBackend for TF32. The value of an 8-bit operand is that of its codes, of a quantized one code * scale; a scale for
    a whole tensor or row multiplies the float32 sum. K = 0 gives act(bias) (+ out); M = 0 or N = 0 an empty result.

    Differentiable in plain a, b (not 8-bit ones) and bias when nothing but the result is written. The backward pass runs
    the other two layouts on the same backend, with the gradient rounded to the operands' dtype; with an activation it first
    recomputes the product. Forward-mode tangents and torch.func transforms raise NotImplementedError. torch.jit.trace, make_fx
    and dispatch modes see one operator, torch.ops.fourwave.gemm or gemm_out.

    Raises ValueError for what the caller must change, BackendUnavailable when a backend that was asked for is not here,
    NotImplementedError when it cannot run this.
    """
    if (
        config is None and out_format is None and preactivation is None and bias_grad is None and out_scale is None
        and out_direction == "rowwise" and out_scale_rule == "floor"
    ):  # fmt: skip
        if backend is not None and type(backend) is not str:
            check_choice(None, backend)
        result = quick(
            a, b, trans_a, trans_b, out_dtype, bias, activation, alpha, accumulate, out, batch_invariant, fast_accum, backend
        )  # fmt: skip
        if result is not None:
            return result
    args, quantized = _arguments(
        a, b, trans_a, trans_b, out_dtype, bias, activation, alpha, accumulate, out, preactivation, bias_grad, out_format,
        out_scale, out_direction, out_scale_rule, batch_invariant, fast_accum, config, backend,
    )  # fmt: skip
    result = _call(args)
    return result if quantized is None else quantized


P = ParamSpec("P")
R = TypeVar("R")


def _with_arguments_of(model: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    def wrap(function: Callable[..., R]) -> Callable[P, R]:
        doc, name = function.__doc__, function.__name__
        wrapped = functools.wraps(model)(function)
        wrapped.__doc__, wrapped.__name__, wrapped.__qualname__ = doc, name, name
        wrapped.__annotations__ = {**model.__annotations__, "return": Explanation}
        return wrapped

    return wrap


@_with_arguments_of(gemm)
def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Which backend, kernel and config `fw.gemm` would use with the same arguments, and why each other one would not run.

    Runs no kernel and writes nothing. What the caller must change raises ValueError as it does in `gemm`; that no
    backend could run is told in the result (`error`).
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return explain_arguments(_arguments(**bound.arguments)[0])


_SIGNATURE = inspect.signature(gemm)


def _arguments(
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor | Preshuffled,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    accumulate: bool,
    out: Tensor | None,
    preactivation: Tensor | None,
    bias_grad: Tensor | None,
    out_format: str | None,
    out_scale: Tensor | None,
    out_direction: str,
    out_scale_rule: str,
    batch_invariant: bool,
    fast_accum: bool,
    config: GemmConfig | None,
    backend: str | None,
) -> tuple[Arguments, QuantizedTensor | None]:
    """The call with its quantized operands taken apart, and the quantized result, made to be written, if one is asked for."""
    a_scale = b_scale = a_scaling = b_scaling = packed_scale = None
    b_preshuffled = False
    if isinstance(b, Preshuffled):
        if trans_a or not trans_b:
            raise ValueError(
                f"b is preshuffled, an order for x @ w.T: it cannot be read with trans_a={trans_a}, trans_b={trans_b}"
            )
        b_preshuffled, packed_scale, b = True, b.packed_scale, b.weights
    if isinstance(a, Preshuffled):
        raise ValueError("a is preshuffled: only b, the weights of x @ w.T, has such an order")
    if isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor):
        check_layout(trans_a, trans_b)
        reduced = [trans_a, not trans_b]  # along the first dimension of the logical matrix
        directions = ["columnwise" if first else "rowwise" for first in reduced]
        transform = _transform(a, b, directions)
        if isinstance(a, QuantizedTensor):
            a_scaling = a.format.scaling
            a, a_scale, k_last = a.operand(directions[0], hadamard=transform)
            if bias_grad is not None and reduced[0] and transform is not None:
                raise ValueError(
                    f"bias_grad sums a's values over K, and a's columnwise values went through a random Hadamard transform "
                    f"(hadamard_seed={transform}), which cancels in the product only: sum the tensor that a was quantized from"
                )
            if bias_grad is not None and reduced[0] and k_last:
                raise ValueError("bias_grad needs a's columnwise codes in natural order; these are stored transposed")
            trans_a = not k_last
        if isinstance(b, QuantizedTensor):
            b_scaling = b.format.scaling
            b, b_scale, k_last = b.operand(directions[1], hadamard=transform)
            trans_b = k_last
            if packed_scale is not None:
                b_scale = packed_scale
        if trans_a and trans_b:
            raise ValueError(
                "b's columnwise codes are stored transposed and a is not: quantize both with columnwise_transposed=True or "
                "neither (a plain a: b without it)"
            )
    for name, t in (("a", a), ("b", b)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} is {_told(t)}; it must be a tensor or a QuantizedTensor")
    for name, given in (("out", out), ("bias", bias), ("preactivation", preactivation), ("bias_grad", bias_grad)):
        if given is not None and not isinstance(given, Tensor):
            raise ValueError(f"{name} is {_told(given)}; it must be a tensor")
    if not isinstance(alpha, (int, float, torch.SymInt, torch.SymFloat)) or (
        isinstance(alpha, int) and abs(alpha) > sys.float_info.max
    ):
        raise ValueError(
            f"alpha is {_told(alpha)}; it must be a number that a float holds (a tensor's gradient would be lost)"
        )
    args = Arguments(
        a, b, out, bias, a_scale, b_scale, preactivation, bias_grad, None, None, None, None, alpha, trans_a, trans_b,
        out_dtype, activation, accumulate, a_scaling, b_scaling, batch_invariant, fast_accum, b_preshuffled=b_preshuffled,
        config=config, backend=backend,
    )  # fmt: skip
    if out_format is None:
        if out_scale is not None:
            raise ValueError("out_scale is the scale of a quantized output, and no out_format was given")
        for name, option, default in (
            ("out_direction", out_direction, "rowwise"), ("out_scale_rule", out_scale_rule, "floor"),
        ):  # fmt: skip
            if option != default:
                raise ValueError(f"{name}={option!r} is of a quantized output, and no out_format was given")
        return args, None
    return _quantized_output(args, out_format, out_scale, out_direction, out_scale_rule)


def _told(given: Any) -> str:
    """What came, in a message: an array is not printed whole."""
    text = repr(given)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(given).__name__}"


def _transform(a: Tensor | QuantizedTensor, b: Tensor | QuantizedTensor, directions: list[str]) -> int | None:
    """Seed of the Hadamard transform that both operands went through along the reduction, where it cancels, or None."""
    seeds = [
        operand.hadamard(direction) if isinstance(operand, QuantizedTensor) else None
        for operand, direction in zip((a, b), directions, strict=True)
    ]
    if seeds[0] != seeds[1]:
        told = ["was not transformed" if seed is None else f"was, with hadamard_seed={seed}" for seed in seeds]
        raise ValueError(
            f"a {told[0]} and b {told[1]}: a random Hadamard transform (fw.quantize) cancels in a product only where both "
            "operands went through the same"
        )
    return seeds[0]


def _quantized_output(
    args: Arguments, out_format: str, out_scale: Tensor | None, out_direction: str, out_scale_rule: str
) -> tuple[Arguments, QuantizedTensor]:
    if out_scale is not None and not isinstance(out_scale, Tensor):
        raise ValueError(f"out_scale is {out_scale!r}; it must be a float32 tensor of one element")
    if out_format not in OUT_FORMATS:
        raise ValueError(f"out_format is {out_format!r}; it must be None, {', '.join(OUT_FORMATS)}")
    if args.out is not None or args.out_dtype is not None or args.accumulate:
        raise ValueError("out_format makes a new quantized tensor: leave out, out_dtype and accumulate away")
    if out_direction not in DIRECTIONS:
        raise ValueError(f"out_direction is {out_direction!r}; it must be {', '.join(DIRECTIONS)}")
    if out_scale_rule not in SCALE_RULES:
        raise ValueError(f"out_scale_rule is {out_scale_rule!r}; it must be {' or '.join(SCALE_RULES)}")
    shape, _ = product_shape(args.a, args.b, args.trans_a, args.trans_b)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if args.activation == SWIGLU:
        cols //= 2
    fmt, device = FORMATS[out_format], args.a.device
    fnuz = not fmt.is_mx and (
        any(str(t.dtype).endswith("fnuz") for t in (args.a, args.b)) or reads_fnuz(device, args.backend)
    )
    dtype = fmt.code_format(fnuz).torch_dtype
    if not fmt.is_mx:
        if (
            out_scale is None
            or out_scale.numel() != 1
            or out_scale.dtype != torch.float32
            or out_scale.device != device
        ):
            raise ValueError(
                f"out_format {out_format!r} needs out_scale, a float32 tensor of one element on {device}; it is "
                + ("None" if out_scale is None else f"{tuple(out_scale.shape)} {out_scale.dtype} on {out_scale.device}")
            )
        if out_scale_rule != "floor":
            raise ValueError(
                f"out_scale_rule {out_scale_rule!r} with {out_format!r}: its scale is given, none is made by a rule"
            )
        out_scale = out_scale.resolve_neg().reshape(())
        codes = torch.empty((rows, cols), dtype=dtype, device=device)
        amax = torch.empty((), dtype=torch.float32, device=device)
        args = args._replace(out=_nd(codes, shape), out_scaling=fmt.scaling, out_scale=out_scale, out_amax=amax)
        # One copy under the names that fw.quantize has for the direction.
        pair, none = (codes, out_scale), (None, None)
        row, column = (pair if out_direction in (each, "both") else none for each in ("rowwise", "columnwise"))
        return args, QuantizedTensor(fmt, (rows, cols), row[0], row[1], column[0], column[1], amax=amax)
    if out_scale is not None:
        raise ValueError(f"out_scale with {out_format!r}: the scales are computed from the result")
    made: list[Any] = []
    for direction, scales in (("rowwise", (rows, -(-cols // 32))), ("columnwise", (-(-rows // 32), cols))):
        if out_direction in (direction, "both"):
            made += [torch.empty((rows, cols), dtype=dtype, device=device)]
            made += [torch.empty(scales, dtype=E8M0.torch_dtype or torch.uint8, device=device)]
        else:
            made += [None, None]
    q = QuantizedTensor(fmt, (rows, cols), *made)
    args = args._replace(
        out=_nd(made[0], shape), out_scaling=fmt.scaling, out_direction=out_direction, out_scale_rule=out_scale_rule,
        out_scale=made[1], out_columnwise=_nd(made[2], shape), out_columnwise_scale=made[3],
    )  # fmt: skip
    return args, q


def _nd(t: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """[rows, columns] with the product's leading dimensions."""
    return None if t is None else t.view(*shape[:-1], t.shape[-1])


def _call(args: Arguments) -> Tensor:
    if args.config is not None or args.backend is not None:
        check_choice(args.config, args.backend)
    tensors: tuple[Any, ...] = args[:NUM_TENSORS]
    if not _needs_operator(tensors):
        return execute(args)
    a, b, out, bias = tensors[:4]
    if not torch.compiler.is_compiling():
        register_flops()
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("torch.func transforms (grad, vmap, ...) cannot go through gemm: use torch.autograd")
    if has_tangent(tensors):
        raise NotImplementedError(
            "an argument has a forward-mode tangent, which would be dropped: gemm has backward-mode gradients only"
        )
    if args.config is not None:
        raise NotImplementedError(
            "config is not supported with autograd, torch.compile, tracing or a dispatch mode: the operator has no such field"
        )
    grad = torch.is_grad_enabled()
    if grad and any(t.dtype in FLOAT8 and t.requires_grad for t in (a, b)):
        raise ValueError("8-bit operands require grad: their gradient would be rounded to 8 bits; detach them")
    written = (out, args.preactivation, args.bias_grad, args.out_columnwise)
    if args.accumulate and out is None and args.out_scaling is None:
        raise ValueError("accumulate=True adds to `out`, and no out was given")
    scaled = args.a_scaling is not None or args.b_scaling is not None
    if all(t is None for t in written) and not scaled and not args.b_preshuffled:
        return torch.ops.fourwave.gemm(
            a, b, bias, args.trans_a, args.trans_b, args.out_dtype, args.activation, float(args.alpha), args.batch_invariant,
            args.backend,
        )  # fmt: skip
    if grad and requires_grad(tensors):
        given = [name for name in ("out", "preactivation", "bias_grad") if getattr(args, name) is not None]
        if args.out_scaling is not None:
            given = []  # made by gemm
        what = f"{given[0]}= was given" if given else "operands or the result are quantized"
        raise ValueError(
            f"{what} and an argument requires grad; gemm records no gradient of such a call: use it without, or under "
            "torch.no_grad()"
        )
    if out is None and args.out_columnwise is None:
        shape, _ = product_shape(a, b, args.trans_a, args.trans_b)
        if args.activation == SWIGLU:
            shape = (*shape[:-1], shape[-1] // 2)
        out = torch.empty(shape, dtype=args.out_dtype or default_out_dtype(a, b), device=a.device)
    elif args.out_scaling is None and out is not None:
        check_out_dtype(args.out_dtype, out)
    torch.ops.fourwave.gemm_out(
        a, b, out, bias, args.trans_a, args.trans_b, args.activation, float(args.alpha), args.accumulate, args.backend,
        args.a_scale, args.b_scale, args.a_scaling, args.b_scaling, args.preactivation, args.bias_grad, args.batch_invariant,
        args.fast_accum, args.out_scaling, args.out_direction, args.out_scale_rule, args.out_scale, args.out_amax,
        args.out_columnwise, args.out_columnwise_scale, bool(args.b_preshuffled),
    )  # fmt: skip
    result = out if out is not None else args.out_columnwise
    assert result is not None
    return result


def _needs_operator(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether something other than plain eager execution has to see the call as one operator."""
    if is_special() or has_tangent(tensors):
        return True
    grad = torch.is_grad_enabled()
    for t in tensors:
        if t is not None and (not is_plain(t) or (grad and t.requires_grad)):
            return True
    return False
