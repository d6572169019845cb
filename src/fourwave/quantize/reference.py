"""What quantization means, in plain PyTorch, written to be read. Kernels match it bit for bit.

For each block of elements that share a scale:

  amax  = max |x|                       NaN where the block holds NaN
  scale = rule(amax)                    NaN (E8M0: 255) where amax is Inf or NaN; never 0, never Inf
  inv   = 1 / scale                     one IEEE float32 division; exact for powers of two
  code  = round(x * inv)                one float32 multiplication, then to nearest even, saturated

mxfp4 may be rounded stochastically (encode_stochastic), and its blocks transformed before (random.py).
A NaN gets the format's NaN code without sign (mxfp4, which has none: +6). Runs on any device, reads nothing on the host.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fourwave import formats
from fourwave.formats.element import ElementFormat
from fourwave.formats.scale_rules import SMALLEST_SCALE, PowerOfTwo
from fourwave.quantize.problem import SCALE_DTYPE, QuantizeProblem, QuantizeTensors
from fourwave.quantize.random import hadamard, random_bits

Tensor = torch.Tensor


def quantize_reference(
    problem: QuantizeProblem, x: Tensor, scale: Tensor | None = None, seed: Tensor | None = None
) -> QuantizeTensors:
    """x [rows, columns], any strides; scale: float32 (), where problem.given_scale; seed: int64 (), where problem.stochastic."""
    shapes = problem.outputs()
    pairs: dict[bool, tuple[Tensor | None, Tensor | None]] = {True: (None, None), False: (None, None)}
    for rowwise, shape in ((True, shapes.scale), (False, shapes.columnwise_scale)):
        if not (problem.rowwise if rowwise else problem.columnwise):
            continue
        blocks = _blocks(_transformed(problem, x, rowwise), problem.block(rowwise))
        amax = blocks.abs().amax((1, 3), keepdim=True).to(torch.float32)
        if scale is None:
            made, inv = scale_from_amax(amax, problem.code_format, problem.scale_rule)
            stored: Tensor | None = made[:, 0, :, 0]
        else:
            stored, inv = None, scale.reciprocal()
        if problem.stochastic:
            assert seed is not None
            size = problem.rows, problem.columns
            bits = random_bits(seed, *size, False) if rowwise else random_bits(seed, *size[::-1], True).mT
            made_codes = encode_stochastic(blocks, inv, _blocks(bits, problem.block(rowwise)))
        else:
            made_codes = encode(blocks, inv, problem.code_format)
        codes = _unblock(made_codes, problem)
        if not rowwise and problem.transposed:
            codes, stored = codes.mT.contiguous(), None if stored is None else stored.mT.contiguous()
        if problem.code_format is formats.E2M1:
            codes = formats.pack_e2m1(codes)
        elif problem.code_format.torch_dtype is not None:
            codes = codes.view(problem.code_format.torch_dtype)
        pairs[rowwise] = codes, None if stored is None or shape is None else stored.reshape(shape[0])
    whole = amax.reshape(()) if problem.quant_format.scaling == "tensor" else None
    return QuantizeTensors(*pairs[True], *pairs[False], whole)


def quantize_nothing(problem: QuantizeProblem, x: Tensor) -> QuantizeTensors:
    """The answer for x without elements: scales, where there are any, are those of zeros."""
    out = problem.allocate(x)
    for scale in (out.scale, out.columnwise_scale):
        if scale is not None:
            zeros = torch.zeros(scale.shape, dtype=torch.float32, device=x.device)
            scale.copy_(scale_from_amax(zeros, problem.code_format, problem.scale_rule)[0])
    if out.amax is not None:
        out.amax.zero_()
    return out


def scale_from_amax(amax: Tensor, fmt: ElementFormat, rule: str) -> tuple[Tensor, Tensor]:
    """(scale, 1 / scale) of float32 amax, by formats/scale_rules.py. Scales of "floor" and "ceil" are E8M0 codes."""
    finite = amax.isfinite()
    nan = float("nan")
    if rule == "fp32":
        # A tensor as divisor: PyTorch multiplies by the reciprocal of a Python number on GPUs.
        scale = (amax / torch.full_like(amax, fmt.max)).clamp(min=SMALLEST_SCALE)
        scale = scale.masked_fill(~finite, nan)
        return scale, scale.reciprocal()
    power = PowerOfTwo.of(fmt, rule)
    bits = amax.masked_fill(~finite, 0).view(torch.int32)
    field = ((bits + (0x7FFFFF - power.top_mantissa)) >> 23) - power.emax  # (f > top) carries into the exponent
    field = field.clamp(min=power.smallest)
    inv = ((254 - field) << 23).view(torch.float32).masked_fill(~finite, nan)
    if rule == "pow2":
        return (field << 23).view(torch.float32).masked_fill(~finite, nan), inv
    return field.masked_fill(~finite, 255).to(torch.uint8).view(SCALE_DTYPE), inv


def _transformed(problem: QuantizeProblem, x: Tensor, rowwise: bool) -> Tensor:
    signs = problem.row_signs if rowwise else problem.column_signs
    if signs is None:
        return x
    x = x.to(torch.float32)
    return hadamard(x, signs) if rowwise else hadamard(x.mT, signs).mT


def encode_stochastic(x: Tensor, inv: Tensor, bits: Tensor) -> Tensor:
    """uint8 e2m1 codes of x * inv (float32): down where the 16 bits say so, else up, and always down on a code.

    With q the spacing of codes around |x * inv|, at most 6: floor(|x * inv| / q + bits / 2^16), the quotient cut off after 16 bits.
    """
    y = x.to(torch.float32) * inv
    t = y.abs().clamp(max=6.0).nan_to_num(nan=0.0)
    exponent = (t >= 2).to(torch.int32) + (t >= 4).to(torch.int32)
    fixed = (t * (2.0 ** (17 - exponent))).to(torch.int32)
    code = ((fixed + bits.to(torch.int32)) >> 16) + 2 * exponent
    code = code.masked_fill(y.isnan(), 7).to(torch.uint8)
    return code + ((y.signbit() & ~y.isnan()).to(torch.uint8) << 3)


def encode(x: Tensor, inv: Tensor, fmt: ElementFormat) -> Tensor:
    """uint8 codes of x * inv (float32), one per element."""
    y = x.to(torch.float32) * inv
    if fmt is formats.E2M1:
        return _encode_e2m1(y)
    assert fmt.torch_dtype is not None and fmt.nan_code is not None
    codes = y.clamp(-fmt.max, fmt.max).to(fmt.torch_dtype).view(torch.uint8)
    return codes.masked_fill(y.isnan(), fmt.nan_code)


def _encode_e2m1(y: Tensor) -> Tensor:
    """formats.encode of float32 y in float32: the values 0, 0.5 .. 2 are codes 0 .. 4, 2, 3, 4 are 4, 5, 6, and 4, 6 are 6, 7."""
    t = y.abs()
    code = torch.where(t < 2, (t * 2).round(), torch.where(t < 4, t.round() + 2, (t * 0.5).round() + 4))
    code = code.clamp(max=7).masked_fill(y.isnan(), 7).to(torch.uint8)
    return code + ((y.signbit() & ~y.isnan()).to(torch.uint8) << 3)


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[rows, columns] -> [row blocks, rows of a block, column blocks, columns of a block]; zeros past the matrix."""
    pad = [-size % b for size, b in zip(x.shape, block)]
    if any(pad):
        x = F.pad(x, (0, pad[1], 0, pad[0]))
    rows, columns = x.shape
    return x.reshape(rows // block[0], block[0], columns // block[1], block[1])


def _unblock(blocks: Tensor, problem: QuantizeProblem) -> Tensor:
    """Inverse of _blocks, contiguous."""
    n0, b0, n1, b1 = blocks.shape
    return blocks.reshape(n0 * b0, n1 * b1)[: problem.rows, : problem.columns].contiguous()
