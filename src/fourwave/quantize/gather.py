"""What is quantized on its way through a mixture of experts: rows in another order, and SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fourwave.backends import select
from fourwave.formats.scale_rules import BLOCK_RULES, MX_RULES
from fourwave.quantize.api import _check, _needs_operator, choose, quantize, reads_fnuz
from fourwave.quantize.problem import QuantizeProblem
from fourwave.quantize.tensor import FORMATS, QuantizedTensor

Tensor = torch.Tensor
ROW_SCALINGS = ("row", "1x128", "1x32")  # those of which no scale belongs to two rows
BLOCKS = ("1x128", "1x32")  # those that the Hopper kernels make in one launch


def quantize_gathered(x: Tensor, rows: Tensor, format: str, **options: Any) -> QuantizedTensor:
    """The bits of quantize(x[rows], format, "rowwise", **options), of a format with scales of single rows. x [T, C], rows [M] int64.
    options: scale_rule, fnuz, backend.

    The Hopper kernel reads x's rows where they are. Else, where M is at least T, each row of x is quantized once, and its codes and
    scales are copied: x[rows] is not made.
    """
    fmt = FORMATS[format]
    if fmt.scaling not in ROW_SCALINGS:
        raise ValueError(
            f"{format} has scales {fmt.scaling}, which rows share: they depend on the rows that are gathered"
        )
    _checked(x, format, **options)
    if (problem := _on_hopper((len(rows), x.shape[1]), x, format, **options)) is not None:
        return _run("rows", problem, x, rows)
    if len(rows) < len(x):
        return quantize(x.index_select(0, rows), format, "rowwise", **options)
    q = quantize(x, format, "rowwise", **options)
    assert q.data is not None and q.scale is not None
    return QuantizedTensor(fmt, (len(rows), q.shape[1]), _taken(q.data, rows), _taken(q.scale, rows))


def quantize_swiglu(z: Tensor, format: str, **options: Any) -> QuantizedTensor:
    """quantize(h, format, "rowwise", **options) of h = silu(gate) * up, in float32 and rounded to z's type; z = [gate, up] [M, 2 C].

    The Hopper kernel does not write h; its exponential is not PyTorch's, so that a code may be a step off.
    """
    if z.dim() != 2 or z.shape[1] % 2:
        raise ValueError(f"z is {tuple(z.shape)}; it must be [M, 2 C], gate and up side by side")
    _checked(z[:, : z.shape[1] // 2], format, **options)
    problem = None
    if FORMATS[format].scaling in BLOCKS:
        problem = _on_hopper((len(z), z.shape[1] // 2), z, format, **options)
    if problem is not None:
        return _run("swiglu", problem, z, None)
    gate, up = z.float().chunk(2, dim=-1)
    return quantize((F.silu(gate) * up).to(z.dtype), format, "rowwise", **options)


def _checked(
    x: Tensor, format: str, scale_rule: str | None = None, fnuz: bool | None = None, backend: str | None = None
) -> None:
    """Raises what `quantize` would for a matrix like x."""
    _check(x, format, "rowwise", None, scale_rule, fnuz, False, backend)


def _on_hopper(
    shape: tuple[int, int],
    x: Tensor,
    format: str,
    scale_rule: str | None = None,
    fnuz: bool | None = None,
    backend: str | None = None,
) -> QuantizeProblem | None:
    """The problem of the result, where Hopper kernels make it in one launch."""
    fmt = FORMATS[format]
    if x.device.type != "cuda" or fmt.scaling not in BLOCKS or _needs_operator(x) or not min(shape):
        return None
    if fnuz is None:
        fnuz = not fmt.is_mx and reads_fnuz(x.device, backend)
    rule = scale_rule or (MX_RULES if fmt.is_mx else BLOCK_RULES)[0]
    problem = QuantizeProblem(*shape, x.dtype, format, True, False, False, rule, fnuz, device_type="cuda")
    found, _ = choose(select.requested(backend)[0], problem)
    return problem if found.name == "hopper" else None


def _run(source: str, problem: QuantizeProblem, x: Tensor, rows: Tensor | None) -> QuantizedTensor:
    from fourwave.quantize import sm90_launch

    with torch.cuda.device(x.device):
        out = sm90_launch.run_from(source, problem, x.detach(), rows)
    return QuantizedTensor(problem.quant_format, (problem.rows, problem.columns), out.data, out.scale)


def _taken(t: Tensor, rows: Tensor) -> Tensor:
    """t[rows]. Bytes are copied: index_select knows few types of 8 bits."""
    plain = t.view(torch.uint8) if t.element_size() == 1 else t
    return plain.index_select(0, rows).view(t.dtype)
