"""fw.gemm, fw.explain and the operators torch.ops.fourwave.gemm and gemm_out.

A call is checked, flattened to two dimensions, given to a backend that `backends.select` chose, and that is all that
happens in eager mode without gradients. Calls that need autograd, and calls that torch.compile or another transform looks
at, go through the operators, whose implementation comes back to the same code.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fourwave.backends import registry, select
from fourwave.ops.gemm.problem import ACTIVATIONS, FLOAT8, PRECISIONS, GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import activate

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig

Tensor = torch.Tensor

_DTYPES = "float32, bfloat16 or float16"
_logger = select.logger
_problem = functools.lru_cache(maxsize=4096)(GemmProblem)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    out: Tensor | None = None,
    config: GemmConfig | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

    a           [..., K]; [..., M] with trans_a, whose leading dimensions are then K. float32, bfloat16, float16 or an 8-bit
                float (float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz)
    b           [N, K]; [K, N] without trans_b; [..., N] with trans_a. a's dtype; of 8-bit floats any two go together
    trans_a, trans_b  False, True: fprop, x @ w.T ("TN"). False, False: dgrad, dout @ w ("NN").
                True, False: wgrad, dout.T @ x ("NT"). There is no True, True.
    out_dtype   float32, bfloat16 or float16; default out's dtype, else the operands', or bfloat16 for 8-bit operands
    bias        [N] float32, bfloat16 or float16, of any stride
    activation  None, "relu", "gelu" (erf), "gelu_tanh" or "silu"
    alpha       number; multiplies the product before the bias
    accumulate  add the result to what `out` holds
    out         written and returned: [..., N], or [M, N] with trans_a. Any strides that do not map two elements to one
                place; no element may be shared with a, b or bias
    config      the kernel's tunables; default the backend's choice
    backend     "auto", "native", "flydsl", "hopper", "sim", "sim:gfx942", "sim:gfx950"; default what `use_backend`
                or FOURWAVE_BACKEND says, else "auto"
    returns     [..., N], or [M, N] with trans_a; contiguous unless `out` is given

    Operands may be views with any strides and offset; leading dimensions are flattened. Sums are kept in float32; alpha,
    bias, activation and the addend are applied to the float32 sum, and the one rounding, to nearest even, is that to
    out_dtype (NativeBackend states PyTorch's exception on GPUs). float32 operands are multiplied in float32; see
    NativeBackend for TF32. The
    value of an 8-bit operand is that of its codes; alpha can carry the product of two scales. K = 0 gives act(bias) (+ out); M = 0 or N = 0 an empty result.

    Differentiable in a, b (not 8-bit ones) and bias when no `out` is given. The backward pass runs the other two layouts on the same
    backend, with the gradient rounded to the operands' dtype; with an activation it first recomputes the product.
    Forward-mode tangents and torch.func transforms raise NotImplementedError. torch.jit.trace, make_fx and dispatch modes see
    one operator, torch.ops.fourwave.gemm or gemm_out.

    Raises ValueError for what the caller must change, BackendUnavailable when a backend that was asked for is not here,
    NotImplementedError when it cannot run this.
    """
    if config is not None or backend is not None:
        _check_choice(config, backend)
    if not _needs_operator(a, b, bias, out):
        return _eager(a, b, trans_a, trans_b, out_dtype, bias, activation, alpha, accumulate, out, config, backend)
    if not torch.compiler.is_compiling():
        _register_flops()
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("torch.func transforms (grad, vmap, ...) cannot go through gemm: use torch.autograd")
    if _has_tangent(a, b, bias, out):
        raise NotImplementedError(
            "an argument has a forward-mode tangent, which would be dropped: gemm has backward-mode gradients only"
        )
    if config is not None:
        raise NotImplementedError(
            "config is not supported with autograd, torch.compile, tracing or a dispatch mode: the operator has no such field"
        )
    if a.dtype in FLOAT8 and torch.is_grad_enabled() and _requires_grad(a, b):
        raise ValueError("8-bit operands require grad: their gradient would be rounded to 8 bits; detach them")
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True adds to `out`, and no out was given")
        return torch.ops.fourwave.gemm(a, b, bias, trans_a, trans_b, out_dtype, activation, float(alpha), backend)
    if torch.is_grad_enabled() and _requires_grad(a, b, bias, out):
        raise ValueError(
            "out= was given and an argument requires grad; gemm does not record writes to out: call it without out, or "
            "under torch.no_grad()"
        )
    _check_out_dtype(out_dtype, out)
    torch.ops.fourwave.gemm_out(a, b, out, bias, trans_a, trans_b, activation, float(alpha), accumulate, backend)
    return out


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _check_choice(config: object, backend: object) -> None:
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


def _has_tangent(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


_PLAIN = (Tensor, torch.nn.Parameter, type(None))


def _needs_operator(*tensors: Tensor | None) -> bool:
    """Whether something other than plain eager execution has to see the call as one operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    # TorchDispatchMode (FakeTensorMode, make_fx, ...) and torch.jit.trace
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None:
        return True
    if forward_ad._current_level >= 0 and _has_tangent(*tensors):
        return True
    for t in tensors:
        if type(t) not in _PLAIN:
            return True
    return torch.is_grad_enabled() and _requires_grad(*tensors)


class _Call(NamedTuple):
    """A checked call, two-dimensional."""

    problem: GemmProblem
    a: Tensor
    b: Tensor
    bias: Tensor | None
    shape: tuple[int, ...]  # of the result, leading dimensions included
    notes: list[str]


def _prepare(
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    activation: str | None,
    accumulate: bool,
    out: Tensor | None,
) -> _Call:
    shape, k = _result_shape(a, b, trans_a, trans_b)
    if (a.dtype != b.dtype or a.dtype not in PRECISIONS) and not (a.dtype in FLOAT8 and b.dtype in FLOAT8):
        raise ValueError(
            f"a is {a.dtype} and b is {b.dtype}; both must have one dtype, {_DTYPES}, or both be 8-bit floats"
        )
    device = a.device
    if b.device != device or device.type not in ("cpu", "cuda"):
        raise ValueError(f"a is on {device} and b on {b.device}; both must be on one CPU or GPU")
    if a.layout is not torch.strided or b.layout is not torch.strided:
        raise ValueError(f"a has layout {a.layout} and b {b.layout}; gemm takes torch.strided tensors only")
    _check_epilogue(shape, bias, activation, device)
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to `out`, and no out was given")
    if out is not None:
        _check_out_dtype(out_dtype, out)
        if tuple(out.shape) != shape:
            raise ValueError(f"out is {tuple(out.shape)}; a {tuple(a.shape)} and b {tuple(b.shape)} give {shape}")
        if out.device != device:
            raise ValueError(f"out is on {out.device} and the operands are on {device}")
        out_dtype = out.dtype
    elif out_dtype is None:
        out_dtype = _default_out_dtype(a)
    if out_dtype not in PRECISIONS:
        raise ValueError(f"out_dtype is {out_dtype}; it must be {_DTYPES}")
    n = shape[-1]
    m = shape[0] if trans_a else math.prod(shape[:-1])
    notes: list[str] = []
    a2 = _matrix(a, k if trans_a else m, "a", notes)
    b2 = _matrix(b, n if trans_b else k, "b", notes)
    bias_dtype = None
    if bias is not None:
        bias_dtype = bias.dtype
        if bias.is_neg() or (n > 1 and bias.stride(0) != 1):
            notes.append("bias copied: not contiguous")
            bias = bias.resolve_neg().contiguous()
    problem = _problem(
        m, n, k, "NT" if trans_a else ("TN" if trans_b else "NN"), a.dtype, b.dtype, out_dtype, bias_dtype, activation,
        bool(accumulate), device.type,
    )  # fmt: skip
    return _Call(problem, a2, b2, bias, shape, notes)


def _default_out_dtype(a: Tensor) -> torch.dtype:
    return torch.bfloat16 if a.dtype in FLOAT8 else a.dtype


def _result_shape(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool) -> tuple[tuple[int, ...], int]:
    """Shape of the result and K, from metadata alone."""
    if trans_a and trans_b:
        raise ValueError(
            "trans_a=True with trans_b=True is not a layout here: swap the operands and transpose the result, "
            "gemm(b, a, trans_a=False, trans_b=False).mT"
        )
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(f"a is {tuple(a.shape)} and b is {tuple(b.shape)}; both need at least one dimension")
    if trans_a:
        k_a, k_b = math.prod(a.shape[:-1]), math.prod(b.shape[:-1])
        names = "the leading dimensions of a and of b, multiplied (K)"
        shape: tuple[int, ...] = (a.shape[-1], b.shape[-1])
    else:
        if b.dim() != 2:
            raise ValueError(
                f"b is {tuple(b.shape)}; without trans_a it is a matrix, {'[N, K]' if trans_b else '[K, N]'} "
                "(this is no batched product: only a's leading dimensions are flattened)"
            )
        k_a, k_b = a.shape[-1], b.shape[1 if trans_b else 0]
        names = f"a's last dimension and b's {'last' if trans_b else 'first'} (K)"
        shape = (*a.shape[:-1], b.shape[0 if trans_b else 1])
    if k_a != k_b:
        raise ValueError(
            f"a {tuple(a.shape)} and b {tuple(b.shape)} with trans_a={trans_a}, trans_b={trans_b}: {names} must be equal, "
            f"and are {k_a} and {k_b}"
        )
    return shape, k_a


def _check_epilogue(shape: tuple[int, ...], bias: Tensor | None, activation: str | None, device: torch.device) -> None:
    if bias is not None:
        if bias.dim() != 1 or bias.shape[0] != shape[-1]:
            raise ValueError(f"bias is {tuple(bias.shape)}; it must be [N] = [{shape[-1]}]")
        if bias.dtype not in PRECISIONS:
            raise ValueError(f"bias is {bias.dtype}; it must be {_DTYPES}")
        if bias.device != device:
            raise ValueError(f"bias is on {bias.device} and the operands are on {device}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: the activations are None, {', '.join(ACTIVATIONS)}")


def _check_out_dtype(out_dtype: torch.dtype | None, out: Tensor) -> None:
    if out_dtype is not None and out_dtype != out.dtype:
        raise ValueError(f"out_dtype is {out_dtype} and out is {out.dtype}: leave out_dtype away, or make them equal")


def _matrix(t: Tensor, rows: int, name: str, notes: list[str]) -> Tensor:
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


def _eager(
    a: Tensor,
    b: Tensor,
    trans_a: bool,
    trans_b: bool,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    activation: str | None,
    alpha: float,
    accumulate: bool,
    out: Tensor | None,
    config: GemmConfig | None,
    backend: str | None,
) -> Tensor:
    call = _prepare(a, b, trans_a, trans_b, out_dtype, bias, activation, accumulate, out)
    problem = call.problem
    selection = select.select(select.requested(backend)[0], problem, config)
    if out is None:
        target = torch.empty((problem.M, problem.N), dtype=problem.out_dtype, device=a.device)
        result = target if len(call.shape) == 2 else target.view(call.shape)
        copy_back = False
    else:
        _check_overlap(out, a, b, bias)
        result = out
        target = _matrix(out, problem.M, "out", call.notes)
        copy_back = target.numel() > 0 and target.data_ptr() != out.data_ptr()
    if problem.is_empty:
        _empty(problem, target, call.bias)
        notes = []
    else:
        notes = selection.backend.run_gemm(
            problem, config, GemmTensors(call.a, call.b, target, call.bias, float(alpha))
        )
        if out is not None and selection.backend.name != "native" and not out.is_inference():
            # A kernel writes through a pointer, which autograd does not see: it must know that saved values are gone.
            torch.autograd.graph.increment_version(out)
    if copy_back:
        out.copy_(target.view(call.shape))  # type: ignore[union-attr]
    if _logger.isEnabledFor(logging.DEBUG):
        select.log(selection, problem, config, call.notes + notes)
    return result


def _empty(problem: GemmProblem, out: Tensor, bias: Tensor | None) -> None:
    """The answer where there is nothing to multiply: act(0 + bias) (+ out)."""
    if out.numel() == 0:
        return
    value = out.new_zeros(problem.N, dtype=torch.float32) if bias is None else bias.float()
    value = activate(value, problem.activation)
    out.copy_(out.float() + value if problem.accumulate else value.expand_as(out))


def _check_overlap(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    if out.numel() == 0:
        return
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ValueError(f"out has strides {out.stride()} and shape {tuple(out.shape)}: two elements share one place")
    low, high = _byte_range(out)
    for name, t in (("a", a), ("b", b), ("bias", bias)):
        if t is None or t.numel() == 0:
            continue
        t_low, t_high = _byte_range(t)
        if t_low < high and low < t_high and not _interleaved(out, t, t_low - low):
            raise ValueError(f"out shares memory with {name}, which would be overwritten while it is read")


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


# ---------------------------------------------------------------------------------------------------------------------
# explain


@dataclass(frozen=True)
class Explanation:
    """What `fw.gemm` would do with the same arguments. str() of it is meant to be read.

    problem    the call as backends see it
    requested  the backend string in force; source says whether the "argument", "use_backend", "FOURWAVE_BACKEND" or
               the "default" gave it
    backend    name of the backend that would run, or None when the call would raise `error`
    kernel, arch, config, reasons   what that backend would run, and why that config
    rejected   for each other backend, why it would not run
    notes      what would be done on the way, such as "a copied: ..."
    """

    problem: GemmProblem
    requested: str
    source: str
    backend: str | None
    kernel: str | None = None
    arch: str | None = None
    config: Any = None
    reasons: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None

    def __str__(self) -> str:
        lines = [f"gemm {self.problem}", f"  asked for   {self.requested} ({self.source})"]
        if self.error is not None:
            lines.append(f"  would raise {type(self.error).__name__}: {self.error}")
        else:
            lines.append(f"  backend     {self.backend}")
            lines.append(f"  kernel      {self.kernel}" + (f" for {self.arch}" if self.arch else ""))
            if self.config is not None:
                lines.append(f"  config      {self.config}")
            lines += [f"              {reason}" for reason in self.reasons]
        lines += [f"  note        {note}" for note in self.notes]
        lines += [
            f"  not {name:<8}{why}" if len(name) < 8 else f"  not {name} {why}" for name, why in self.rejected.items()
        ]
        return "\n".join(lines)


def explain(
    a: Tensor,
    b: Tensor,
    *,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    out: Tensor | None = None,
    config: GemmConfig | None = None,
    backend: str | None = None,
) -> Explanation:
    """Which backend, kernel and config `fw.gemm` would use with the same arguments, and why each other one would not run.

    Runs no kernel and writes nothing. What the caller must change raises ValueError as it does in `gemm`; that no
    backend could run is told in the result (`error`).
    """
    _check_choice(config, backend)
    call = _prepare(a, b, trans_a, trans_b, out_dtype, bias, activation, accumulate, out)
    problem, notes = call.problem, call.notes
    if out is not None:
        _check_overlap(out, a, b, bias)
        out = _matrix(out, problem.M, "out", notes)
    told = explain_problem(problem, config=config, backend=backend, notes=notes)
    if told.backend is not None and not problem.is_empty:
        notes += registry.get(told.backend).copies(problem, config, GemmTensors(call.a, call.b, out, call.bias))
    return told


def explain_problem(
    problem: GemmProblem,
    *,
    config: GemmConfig | None = None,
    backend: str | None = None,
    notes: list[str] | None = None,
) -> Explanation:
    """`explain` for a problem without tensors."""
    spec, source = select.requested(backend)
    chosen: str | None = None
    error: Exception | None = None
    rejected: dict[str, str] = {}
    details: dict[str, Any] = {}
    try:
        selection = select.select(spec, problem, config)
    except (RuntimeError, NotImplementedError) as raised:  # BackendUnavailable is a RuntimeError
        error = raised
        asked = select.parse(spec)[problem.precision]
    else:
        chosen, asked = selection.backend.name, selection.asked
        if problem.is_empty:
            details = {"kernel": "nothing to launch"}
        else:
            description = selection.backend.describe_gemm(problem, config)
            details = {
                "kernel": description.kernel,
                "arch": description.arch,
                "config": description.config,
                "reasons": description.reasons,
            }
        rejected = dict(selection.rejected)
    for name in registry.names():
        if name == chosen or name in rejected:
            continue
        why = select.why_not(name, problem, config)
        if why is None:
            if asked != select.AUTO:
                why = f"could run; {asked} was asked for"
            elif name.startswith("sim"):
                why = "could run; the simulator runs only when asked for"
            else:
                why = f"could run; {chosen} comes first"
        rejected[name] = why
    return Explanation(
        problem, spec, source, chosen, rejected=rejected, notes=[] if notes is None else notes, error=error, **details
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# torch.ops.fourwave


@torch.library.custom_op("fourwave::gemm", mutates_args=())
def _gemm_op(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    return _eager(a, b, trans_a, trans_b, out_dtype, bias, activation, alpha, False, None, None, backend)


@torch.library.custom_op("fourwave::gemm_out", mutates_args=("out",))
def _gemm_out_op(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    backend: str | None = None,
) -> None:
    _eager(a, b, trans_a, trans_b, None, bias, activation, alpha, accumulate, out, None, backend)


@_gemm_op.register_fake
def _gemm_fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    shape, _ = _result_shape(a, b, trans_a, trans_b)
    _check_epilogue(shape, bias, activation, a.device)
    return a.new_empty(shape, dtype=out_dtype or _default_out_dtype(a))


@_gemm_out_op.register_fake
def _gemm_out_fake(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = True,
    activation: str | None = None,
    alpha: float = 1.0,
    accumulate: bool = False,
    backend: str | None = None,
) -> None:
    shape, _ = _result_shape(a, b, trans_a, trans_b)
    _check_epilogue(shape, bias, activation, a.device)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out is {tuple(out.shape)}; a {tuple(a.shape)} and b {tuple(b.shape)} give {tuple(shape)}")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, trans_a, trans_b, _, activation, alpha, backend = inputs
    ctx.save_for_backward(a, b, bias)
    ctx.layout = (trans_a, trans_b)
    ctx.activation, ctx.alpha = activation, alpha
    # The backward pass may run in another thread, after a `with use_backend` block has ended: keep the choice. While
    # compiling it stays open, to be made when the compiled code runs.
    ctx.backend = backend if torch.compiler.is_compiling() else select.requested(backend)[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """With z = alpha * op(a) @ op(b) + bias and dz = grad * act'(z):

    TN  da = alpha * dz @ b (NN)      db = alpha * dz.T @ a (NT)
    NN  da = alpha * dz @ b.T (TN)    db = alpha * a.T @ dz (NT)
    NT  da = alpha * b @ dz.T (TN)    db = alpha * a @ dz (NN)
    dbias = dz summed over M.
    """
    a, b, bias = ctx.saved_tensors
    trans_a, trans_b = ctx.layout
    op = functools.partial(torch.ops.fourwave.gemm, backend=ctx.backend)
    dz = grad
    if ctx.activation is not None:
        z = op(a, b, bias, trans_a, trans_b, torch.float32, None, ctx.alpha)
        dz = grad.float() * _activation_slope(z, ctx.activation)
    dbias = None
    if bias is not None and ctx.needs_input_grad[2]:
        dbias = _rows(dz.float()).sum(0).to(bias.dtype)
    dz = dz.to(a.dtype)
    product = functools.partial(op, bias=None, activation=None, alpha=ctx.alpha, out_dtype=a.dtype)
    da = db = None
    if trans_a:
        a2, b2 = _rows(a), _rows(b)
        if ctx.needs_input_grad[0]:
            da = product(b2, dz, trans_a=False, trans_b=True).reshape(a.shape)
        if ctx.needs_input_grad[1]:
            db = product(a2, dz, trans_a=False, trans_b=False).reshape(b.shape)
    else:
        if ctx.needs_input_grad[0]:
            da = product(dz, b, trans_a=False, trans_b=not trans_b)
        if ctx.needs_input_grad[1]:
            left, right = (dz, a) if trans_b else (a, dz)
            db = product(left, right, trans_a=True, trans_b=False)
    return da, db, dbias, None, None, None, None, None, None


def _rows(t: Tensor) -> Tensor:
    """t with its leading dimensions flattened; a -1 could not be inferred where the last one is 0."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _activation_slope(z: Tensor, activation: str) -> Tensor:
    """act'(z), elementwise, from differentiable operations."""
    if activation == "relu":
        return (z > 0).to(z.dtype)
    if activation == "silu":
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    # gelu_tanh: z / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (z + 0.044715 z^3)
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (z + 0.044715 * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * c * (1 + 3 * 0.044715 * z * z)


torch.library.register_autograd("fourwave::gemm", _backward, setup_context=_setup_context)


def _flops(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 M N K: a has M K elements in every layout, and N is the result's last dimension."""
    result = args[0] if out_val is None else out_val  # gemm_out returns nothing: a, b, out, ...
    return 2 * a.numel() * result.shape[-1]


def _register_flops() -> None:
    """Tell PyTorch's FLOP counter what the operators cost. Only where the caller has imported it: it imports Triton."""
    module = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return
    registries = [module.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        copied = getattr(getattr(mode, "counter", None), "flop_registry", None)  # when the counter was made
        if isinstance(copied, dict):
            registries.append(copied)
    for each in registries:
        for operator in (torch.ops.fourwave.gemm, torch.ops.fourwave.gemm_out):
            each.setdefault(operator, _flops)
