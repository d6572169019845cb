"""fw.quantize and the operator torch.ops.fourwave.quantize."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

import torch

from fourwave.backends import registry, select
from fourwave.backends.base import Backend
from fourwave.backends.explanation import Explanation, reasons_against
from fourwave.errors import BackendUnavailable
from fourwave.formats.scale_rules import BLOCK_RULES, MX_RULES
from fourwave.ops.gemm.problem import FP8
from fourwave.quantize.problem import INPUTS, QuantizeProblem, QuantizeTensors
from fourwave.quantize.random import HADAMARD, hadamard_signs
from fourwave.quantize.reference import quantize_nothing
from fourwave.quantize.tensor import DIRECTIONS, FORMATS, QuantFormat, QuantizedTensor
from fourwave.transforms import PLAIN, has_tangent, is_special

Tensor = torch.Tensor

_AUTO_ORDER = ("flydsl", "hopper", "native")


def quantize(
    x: Tensor,
    format: str | QuantFormat,
    direction: str = "rowwise",
    *,
    scale: Tensor | None = None,
    scale_rule: str | None = None,
    fnuz: bool | None = None,
    columnwise_transposed: bool = False,
    rounding: str = "nearest",
    seed: int | Tensor | None = None,
    hadamard: str | None = None,
    hadamard_seed: int = 0,
    backend: str | None = None,
) -> QuantizedTensor:
    """Codes and scales of x: value = code * scale.

    x           [..., C] float32, bfloat16 or float16, any strides. Leading dimensions are flattened: the result is a matrix [R, C]
    format      "fp8_e4m3", "fp8_e5m2" (one scale), "fp8_row" (one per row), "fp8_1x128", "fp8_128x128", each of the last three
                also with "_e5m2"; "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4" (E8M0 scales of 1 x 32 blocks)
    direction   along which scale blocks run: "rowwise" (C), "columnwise" (R), or "both", from one reading of x
    scale       float32 () or (1,) on x's device: use this scale instead of one from x's amax ("fp8_e4m3" and "fp8_e5m2" only; delayed
                scaling). From 2^-126 to 2^126, which is not checked; it becomes the result's scale, uncopied
    scale_rule  MX: "floor" (default; OCP MX: values up to twice the largest saturate) or "ceil" (nothing saturates).
                Others: "fp32" (default; amax / largest value) or "pow2" (the power of two above that)
    fnuz        codes are float8_e4m3fnuz or float8_e5m2fnuz, which gfx942 multiplies. Default: where x is on a gfx942 GPU,
                or the backend for FP8 is sim:gfx942. MX
                formats are OCP's everywhere
    columnwise_transposed   store the columnwise codes and scales transposed: codes [C, R]
    rounding    "nearest" (ties to even), or "stochastic" (mxfp4 only): up with a probability of how far the value is on the way
                there, so that the mean is the value. Values past the largest saturate: scale_rule="ceil" leaves none
    seed        of "stochastic": an int from 0 to 2^63 - 1, or an int64 tensor of one element on x's device. The bits depend on it
                and on the element's place only (fourwave/quantize/random.py)
    hadamard    "rowwise", "columnwise" or "both" (mxfp4 only): the codes of that direction are those of x after a random Hadamard
                transform of each 16 neighbours along it, which spreads outliers. The size along it is a multiple of 16. Such
                an operand multiplies with one that was transformed with the same seed
    hadamard_seed   of the transform's 16 signs, an int from 0 to 2^63 - 1
    backend     as in `gemm`; default what `use_backend` or FOURWAVE_BACKEND says, else "auto". All give the same bits
    returns     QuantizedTensor; with one scale for all, amax (float32 (), of x before rounding) is in it

    docs/quantize.md defines the numbers, those of zeros, subnormals, Inf and NaN included. Nothing is read on the host. There
    is no gradient: an x that requires grad is refused outside torch.no_grad().

    Raises ValueError for what the caller must change, BackendUnavailable when a backend that was asked for is not here,
    NotImplementedError when it cannot run this.
    """
    fmt, shared, transforms, arguments = _arguments(
        x,
        format,
        direction,
        scale,
        scale_rule,
        fnuz,
        columnwise_transposed,
        rounding,
        seed,
        hadamard,
        hadamard_seed,
        backend,
    )
    transposed, seed_tensor = arguments[4], arguments[9]
    if _needs_operator(x, scale, seed_tensor):
        data, stored, columnwise_data, columnwise_stored, amax = torch.ops.fourwave.quantize(*arguments)
    else:
        data, stored, columnwise_data, columnwise_stored, amax = _execute(*arguments)
    if scale is not None:
        stored = columnwise_stored = scale.resolve_neg().reshape(())
    if shared:
        columnwise_data, columnwise_stored = data, stored
    row, column = direction != "columnwise", direction != "rowwise"
    return QuantizedTensor(
        fmt,
        (math.prod(x.shape[:-1]), x.shape[-1]),
        data if row else None,
        stored if row else None,
        columnwise_data if column else None,
        columnwise_stored if column else None,
        transposed,
        amax if fmt.scaling == "tensor" else None,
        *transforms,
    )


def explain_quantize(x: Tensor, format: str | QuantFormat, direction: str = "rowwise", **options: Any) -> Explanation:
    """What `quantize` would do with the same arguments, and why not something else; nothing is computed.

    A call that would raise BackendUnavailable or NotImplementedError has that as `error`; ValueError is raised.
    """
    bound = inspect.signature(quantize).bind(x, format, direction, **options)
    bound.apply_defaults()
    _fmt, _shared, _transforms, arguments = _arguments(**bound.arguments)
    _x, name, rowwise, columnwise, transposed, rule, fnuz, scale, backend, seed, *signs = arguments
    problem = _problem(
        x, name, rowwise, columnwise, transposed, rule, fnuz, scale is not None, seed is not None, *signs
    )
    spec, source = select.requested(backend)
    asked, chosen, kernel, error = select.parse(spec)[problem.precision], None, None, None
    rejected: dict[str, str] = {}
    try:
        found, passed = choose(spec, problem)
    except (BackendUnavailable, NotImplementedError) as raised:
        error = raised
    else:
        chosen, rejected = found.name, dict(passed)
        kernel = "nothing to launch" if problem.is_empty else found.quantize_kernel(problem)
    rejected = reasons_against(chosen, asked, rejected, lambda other: _why_not(registry.get(other), problem))
    return Explanation(
        problem, spec, source, chosen, kernel=kernel, rejected=rejected, error=error, operation="quantize"
    )  # fmt: skip


def _arguments(
    x: Tensor,
    format: str | QuantFormat,
    direction: str,
    scale: Tensor | None,
    scale_rule: str | None,
    fnuz: bool | None,
    columnwise_transposed: bool,
    rounding: str,
    seed: int | Tensor | None,
    hadamard: str | None,
    hadamard_seed: int,
    backend: str | None,
) -> tuple[QuantFormat, bool, list[int | None], tuple[Any, ...]]:
    """Checked: the format, whether one copy serves both directions, the transforms' seeds, and _execute's arguments."""
    fmt = _check(x, format, direction, scale, scale_rule, fnuz, columnwise_transposed, backend)
    _check_random(x, fmt, direction, rounding, seed, hadamard, hadamard_seed)
    rule = scale_rule or (MX_RULES if fmt.is_mx else BLOCK_RULES)[0]
    if fnuz is None:
        fnuz = not fmt.is_mx and reads_fnuz(x.device, backend)
    # One copy serves both directions unless one of them is transposed.
    shared = fmt.one_copy and not columnwise_transposed
    rowwise = direction != "columnwise" or shared
    columnwise = direction != "rowwise" and not shared
    transposed = columnwise and columnwise_transposed
    if isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    transforms = [hadamard_seed if hadamard in (name, "both") else None for name in ("rowwise", "columnwise")]
    signs = [None if each is None else hadamard_signs(each) for each in transforms]
    arguments = (x, fmt.name, rowwise, columnwise, transposed, rule, fnuz, scale, backend, seed, *signs)
    return fmt, shared, transforms, arguments


def _check_random(
    x: Tensor,
    fmt: QuantFormat,
    direction: str,
    rounding: str,
    seed: int | Tensor | None,
    hadamard: str | None,
    hadamard_seed: int,
) -> None:
    """The arguments of stochastic rounding and of the Hadamard transform."""
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding {rounding!r}: 'nearest' or 'stochastic'")
    if (rounding == "stochastic") != (seed is not None):
        raise ValueError(f"rounding {rounding!r} with seed={seed!r}: a seed belongs to 'stochastic', which needs one")
    if hadamard not in (None, *DIRECTIONS):
        raise ValueError(f"hadamard {hadamard!r}: None, {', '.join(DIRECTIONS)}")
    for what, asked in (("rounding 'stochastic'", seed is not None), (f"hadamard {hadamard!r}", hadamard is not None)):
        if asked and fmt.element != "e2m1":
            raise ValueError(f"{what} with {fmt.name}: only mxfp4 has it")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != x.device:
            raise ValueError(
                f"seed is {tuple(seed.shape)} {seed.dtype} on {seed.device}; it must be an int64 tensor of one element on {x.device}"
            )
    for name, value in (("seed", seed), ("hadamard_seed", hadamard_seed)):
        if value is None or isinstance(value, Tensor):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r}; it must be an int from 0 to 2^63 - 1")
    if hadamard is None:
        return
    if direction != "both" and hadamard != direction:
        raise ValueError(f"hadamard {hadamard!r} with direction={direction!r}: those codes were not asked for")
    sizes = {"rowwise": ("last dimension", x.shape[-1]), "columnwise": ("number of rows", math.prod(x.shape[:-1]))}
    for each in ("rowwise", "columnwise") if hadamard == "both" else (hadamard,):
        what, size = sizes[each]
        if size % HADAMARD:
            raise ValueError(
                f"hadamard {hadamard!r} with x {tuple(x.shape)}: the {what} must be a multiple of {HADAMARD}; the last "
                f"{size % HADAMARD} elements could not be transformed alone"
            )


def _check(
    x: Tensor,
    format: str | QuantFormat,
    direction: str,
    scale: Tensor | None,
    scale_rule: str | None,
    fnuz: bool | None,
    columnwise_transposed: bool,
    backend: str | None,
) -> QuantFormat:
    if isinstance(format, QuantFormat):
        format = format.name
    fmt = FORMATS.get(format) if isinstance(format, str) else None
    if fmt is None:
        raise ValueError(f"format {format!r}: the formats are {', '.join(FORMATS)}")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction {direction!r}: the directions are {', '.join(DIRECTIONS)}")
    if not isinstance(x, Tensor) or x.dtype not in INPUTS:
        came = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {came}; it must be a float32, bfloat16 or float16 tensor")
    if x.dim() == 0:
        raise ValueError("x has no dimensions; it must be [..., C]")
    # Dynamo does not let a backward pass ask for a layout; what it traces is strided.
    strided = torch.compiler.is_compiling() or x.layout is torch.strided
    if not strided or x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"x is a {x.layout} tensor on {x.device}; quantize takes strided tensors on a CPU or GPU")
    rules = MX_RULES if fmt.is_mx else BLOCK_RULES
    if scale_rule is not None and scale_rule not in rules:
        raise ValueError(f"scale_rule {scale_rule!r}: {format} has {' and '.join(rules)}")
    if fnuz and fmt.is_mx:
        raise ValueError(f"fnuz=True with {format}: MX formats have OCP codes only")
    if columnwise_transposed and direction == "rowwise":
        raise ValueError(
            "columnwise_transposed=True with direction='rowwise': there are no columnwise codes to transpose"
        )
    if scale is not None:
        if fmt.scaling != "tensor":
            raise ValueError(f"scale= was given and {format} makes its own scales; fp8_e4m3 and fp8_e5m2 take one")
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1:
            came = f"{scale.dtype} {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
            raise ValueError(f"scale is {came}; it must be a float32 tensor of one element")
        if scale.device != x.device:
            raise ValueError(f"scale is on {scale.device} and x is on {x.device}")
        if scale_rule is not None:
            raise ValueError("scale_rule says how a scale is made, and scale= was given: leave one away")
    if fmt.element == "e2m1":
        packed = [] if direction == "columnwise" and columnwise_transposed else [("last dimension", x.shape[-1])]
        if columnwise_transposed:
            packed.append(("number of rows", math.prod(x.shape[:-1])))
        for name, size in packed:
            if size % 2:
                raise ValueError(f"x is {tuple(x.shape)}: two 4-bit codes make a byte, so the {name} must be even")
    if torch.is_grad_enabled() and (x.requires_grad or (scale is not None and scale.requires_grad)):
        raise ValueError("x or scale requires grad, and quantize has no gradient: detach it, or use torch.no_grad()")
    if backend is not None and (not isinstance(backend, str) or not backend):
        raise ValueError(f"backend is {backend!r}; it must be a string, one of {', '.join(registry.known())}, or None")
    if has_tangent((x,)):
        raise NotImplementedError("x has a forward-mode tangent, which would be dropped: quantize has no gradient")
    return fmt


def reads_fnuz(device: torch.device, backend: str | None) -> bool:
    """Whether FP8 codes for products on this backend are gfx942's."""
    if device.type == "cpu":
        spec = select.requested(backend)[0]
        # Few name it; the others need not be taken apart, of whose cache torch.compile warns.
        return "sim:gfx942" in spec and select.parse(spec)[FP8] == "sim:gfx942"
    return _is_gfx942(device)


def _is_gfx942(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is None:
        return False
    from fourwave.backends.flydsl import device_arch

    return device_arch(torch.cuda.current_device() if device.index is None else device.index) == "gfx942"


def _needs_operator(*tensors: Tensor | None) -> bool:
    """Whether something other than plain eager execution has to see the call as one operator."""
    return is_special() or any(t is not None and (type(t) not in PLAIN or t.is_meta) for t in tensors)


def _problem(
    x: Tensor, format: str, rowwise: bool, columnwise: bool, transposed: bool, rule: str, fnuz: bool, given: bool,
    stochastic: bool, row_signs: int | None, column_signs: int | None,
) -> QuantizeProblem:  # fmt: skip
    return QuantizeProblem(
        math.prod(x.shape[:-1]), x.shape[-1], x.dtype, format, rowwise, columnwise, transposed, rule, fnuz, given,
        x.device.type, stochastic, row_signs, column_signs,
    )  # fmt: skip


def _execute(
    x: Tensor,
    format: str,
    rowwise: bool,
    columnwise: bool,
    transposed: bool,
    rule: str,
    fnuz: bool,
    scale: Tensor | None,
    backend: str | None,
    seed: Tensor | None,
    row_signs: int | None,
    column_signs: int | None,
) -> QuantizeTensors:
    problem = _problem(
        x,
        format,
        rowwise,
        columnwise,
        transposed,
        rule,
        fnuz,
        scale is not None,
        seed is not None,
        row_signs,
        column_signs,
    )
    chosen, rejected = choose(select.requested(backend)[0], problem)
    x = x.detach().reshape(problem.rows, problem.columns)
    if problem.is_empty:
        return quantize_nothing(problem, x)
    scale = None if scale is None else scale.detach().resolve_neg().reshape(())
    seed = None if seed is None else seed.detach().resolve_neg().reshape(())
    result, notes = chosen.run_quantize(problem, x, scale, seed)
    if select.logger.isEnabledFor(logging.DEBUG):
        words = [f"not {name}: {why}" for name, why in rejected] + notes
        select.logger.debug("quantize %s: %s", problem, "; ".join([chosen.name, *words]))
    return result


def choose(spec: str, problem: QuantizeProblem) -> tuple[Backend, tuple[tuple[str, str], ...]]:
    """The backend for `problem` when `spec` is in force, and name and reason of each that was passed over.

    The same order and errors as in backends.select.
    """
    asked = select.parse(spec)[problem.precision]
    rejected: list[tuple[str, str]] = []
    for name in _AUTO_ORDER if asked == select.AUTO else (asked,):
        backend = registry.get(name)
        why = _why_not(backend, problem)
        if why is None:
            return backend, tuple(rejected)
        if asked != select.AUTO:
            if backend.unavailable():
                raise BackendUnavailable(f"backend {asked!r} was asked for and cannot run here: {why}")
            raise NotImplementedError(f"backend {asked!r} was asked for and cannot quantize {problem}: {why}")
        rejected.append((name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise NotImplementedError(f"no backend can quantize {problem}. {reasons}")


def _why_not(backend: Backend, problem: QuantizeProblem) -> str | None:
    missing = backend.unavailable_to(problem.device_type)
    return missing or (None if problem.is_empty else backend.why_quantize_unsupported(problem))


@torch.library.custom_op("fourwave::quantize", mutates_args=())
def _quantize_op(
    x: Tensor,
    format: str,
    rowwise: bool,
    columnwise: bool,
    transposed: bool,
    scale_rule: str,
    fnuz: bool,
    scale: Tensor | None = None,
    backend: str | None = None,
    seed: Tensor | None = None,
    row_signs: int | None = None,
    column_signs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Five tensors, QuantizeTensors; what was not asked for is an empty uint8 tensor."""
    result = _execute(
        x, format, rowwise, columnwise, transposed, scale_rule, fnuz, scale, backend, seed, row_signs, column_signs
    )
    return _filled(result, x)


@_quantize_op.register_fake
def _quantize_fake(
    x: Tensor,
    format: str,
    rowwise: bool,
    columnwise: bool,
    transposed: bool,
    scale_rule: str,
    fnuz: bool,
    scale: Tensor | None = None,
    backend: str | None = None,
    seed: Tensor | None = None,
    row_signs: int | None = None,
    column_signs: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = _problem(
        x, format, rowwise, columnwise, transposed, scale_rule, fnuz, scale is not None, seed is not None, row_signs,
        column_signs,
    )  # fmt: skip
    return _filled(problem.allocate(x), x)


def _filled(tensors: QuantizeTensors, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(like.new_empty(0, dtype=torch.uint8) if t is None else t for t in tensors)  # type: ignore[return-value]
