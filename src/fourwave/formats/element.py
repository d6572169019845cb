"""Element formats and one codec for all of them.

A code is sign | exponent | mantissa, most significant first; e8m0 has no sign and no mantissa. With exponent field E and
mantissa field f of m bits, the value is (1 + f / 2^m) * 2^(E - bias), and f / 2^m * 2^(1 - bias) when E = 0 (e8m0 has
neither zero nor subnormals: its E = 0 is 2^-127).

            largest       smallest normal, subnormal   Inf          NaN                      overflow, Inf saturate to
e4m3fn      448           2^-6,   2^-9                 none         0x7F, 0xFF               448, or NaN
e4m3fnuz    240           2^-7,   2^-10                none         0x80 (no -0)             240, or NaN
e5m2        57344         2^-14,  2^-16                0x7C, 0xFC   mantissa not 0           57344, or Inf
e5m2fnuz    57344         2^-15,  2^-17                none         0x80 (no -0)             57344, or NaN
e2m1        6             1,      1/2                  none         none                     6
e8m0        2^127         2^-127, none                 none         0xFF                     2^127, or NaN
bf16        (2 - 2^-7) * 2^127,  2^-126, 2^-133        as IEEE      as IEEE                  largest, or Inf
fp16        65504         2^-14,  2^-24                as IEEE      as IEEE                  65504, or Inf

Sources: e4m3fn, e5m2: OCP 8-bit Floating Point Specification (OFP8) v1.0. e2m1, e8m0: OCP Microscaling Formats (MX) v1.0,
sections 5.3.3 and 5.4.1. e4m3fnuz, e5m2fnuz: Noune et al., "8-bit Numerical Formats for Deep Neural Networks" (2022), biases
8 and 16, as in AMD's CDNA3 ISA guide, where they are called FP8 and BF8. fp16: IEEE 754 binary16. bf16: the upper half of
IEEE 754 binary32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class ElementFormat:
    """One element format; see the module's table.

    bits, exponent_bits, mantissa_bits, bias   of the code; bits = sign + exponent + mantissa
    max_code   code of the largest finite value
    nan_code   code that encode gives for NaN (the sign bit is added where the format has signed NaNs); None: no NaN
    inf_code   code of +Inf, or None
    saturates  what encode does with overflow unless told: True clamps to the largest value, False gives Inf or NaN
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None
    inf_code: int | None
    saturates: bool
    has_negative_zero: bool = True
    torch_dtype: torch.dtype | None = None

    @property
    def has_sign(self) -> bool:
        return self.bits == 1 + self.exponent_bits + self.mantissa_bits

    @property
    def has_inf(self) -> bool:
        return self.inf_code is not None

    @property
    def has_nan(self) -> bool:
        return self.nan_code is not None

    @property
    def has_zero(self) -> bool:
        """Whether exponent field 0 means zero and subnormals (all formats but e8m0)."""
        return self.has_sign

    @property
    def num_codes(self) -> int:
        return 1 << self.bits

    @property
    def sign_bit(self) -> int:
        """Mask of the sign in a code; 0 where there is none."""
        return 1 << (self.bits - 1) if self.has_sign else 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return (1 if self.has_zero else 0) - self.bias

    @property
    def max(self) -> float:
        """Largest finite value."""
        return _magnitude(self, self.max_code)

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.min_exponent

    @property
    def smallest(self) -> float:
        """Smallest positive value, subnormal where there are such."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits) if self.has_zero else self.smallest_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return 2.0**-self.mantissa_bits

    @property
    def code_dtype(self) -> torch.dtype:
        """uint8, or uint16 for 16-bit formats. A 4-bit code is the low half of a uint8 (pack_e2m1 puts two in one)."""
        return torch.uint8 if self.bits <= 8 else torch.uint16


E4M3FN = ElementFormat("e4m3fn", 8, 4, 3, 7, 0x7E, 0x7F, None, True, torch_dtype=torch.float8_e4m3fn)
E4M3FNUZ = ElementFormat("e4m3fnuz", 8, 4, 3, 8, 0x7F, 0x80, None, True, False, torch.float8_e4m3fnuz)
E5M2 = ElementFormat("e5m2", 8, 5, 2, 15, 0x7B, 0x7E, 0x7C, True, torch_dtype=torch.float8_e5m2)
E5M2FNUZ = ElementFormat("e5m2fnuz", 8, 5, 2, 16, 0x7F, 0x80, None, True, False, torch.float8_e5m2fnuz)
E2M1 = ElementFormat("e2m1", 4, 2, 1, 1, 0x7, None, None, True)
# torch.float8_e8m0fnu came with torch 2.7
E8M0 = ElementFormat(
    "e8m0", 8, 8, 0, 127, 0xFE, 0xFF, None, False, False, getattr(torch, "float8_e8m0fnu", None)
)  # fmt: skip
BF16 = ElementFormat("bf16", 16, 8, 7, 127, 0x7F7F, 0x7FC0, 0x7F80, False, torch_dtype=torch.bfloat16)
FP16 = ElementFormat("fp16", 16, 5, 10, 15, 0x7BFF, 0x7E00, 0x7C00, False, torch_dtype=torch.float16)

ALL: tuple[ElementFormat, ...] = (E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E2M1, E8M0, BF16, FP16)
_BY_NAME = {fmt.name: fmt for fmt in ALL}


def get(name: str) -> ElementFormat:
    """The format called `name`. Raises ValueError, listing the names, for another."""
    fmt = _BY_NAME.get(name)
    if fmt is None:
        raise ValueError(f"format {name!r}: the formats are {', '.join(_BY_NAME)}")
    return fmt


def _magnitude(fmt: ElementFormat, code: int) -> float:
    """Value of a code without its sign, taken as finite."""
    exponent, mantissa = code >> fmt.mantissa_bits, code & ((1 << fmt.mantissa_bits) - 1)
    if fmt.has_zero and exponent == 0:
        return float(np.ldexp(mantissa, 1 - fmt.bias - fmt.mantissa_bits))
    return float(np.ldexp((1 << fmt.mantissa_bits) + mantissa, exponent - fmt.bias - fmt.mantissa_bits))


@functools.lru_cache(maxsize=8)
def _values(fmt: ElementFormat) -> tuple[float, ...]:
    """Value of every code."""
    values = []
    for code in range(fmt.num_codes):
        sign, rest = code & fmt.sign_bit, code & ~fmt.sign_bit
        if not fmt.has_negative_zero and fmt.has_sign and code == fmt.sign_bit:
            value = float("nan")
        elif rest <= fmt.max_code:
            value = _magnitude(fmt, rest)
        else:
            value = float("inf") if rest == fmt.inf_code else float("nan")
        values.append(-value if sign else value)
    return tuple(values)


def _new_table(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(_values(fmt), dtype=torch.float64, device="cpu").to(device=device, dtype=dtype)


@functools.lru_cache(maxsize=32)
def _table(fmt: ElementFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return _new_table(fmt, dtype, device)


@overload
def decode(codes: torch.Tensor, fmt: ElementFormat, dtype: torch.dtype = ..., *, known: bool = ...) -> torch.Tensor: ...
@overload
def decode(
    codes: np.ndarray, fmt: ElementFormat, dtype: torch.dtype = ..., *, known: bool = ...
) -> npt.NDArray[np.floating]: ...
def decode(codes, fmt, dtype=torch.float32, *, known=False):  # type: ignore[no-untyped-def]
    """Exact value of each code.

    codes   any shape; unsigned integers (uint8 or uint16, or any wider integer below 2^bits), or fmt's own torch dtype.
            torch or numpy. e2m1: one code per element (unpack_e2m1 takes packed bytes apart)
    dtype   float32 or float64; both hold every value of every format exactly
    known   the codes are below 2^bits: they are not looked at, which a GPU would have to be waited for
    returns the values, codes' shape, torch or numpy as codes were

    Raises ValueError for another dtype, and for a code of 2^bits or more where the integers are wide enough to hold one.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype {dtype}: float32 or float64 (others cannot hold every value)")
    if isinstance(codes, np.ndarray):
        if codes.dtype.kind not in "iu":
            raise ValueError(f"codes are {codes.dtype}; they must be integers")
        return decode(torch.from_numpy(codes.astype(np.int64)), fmt, dtype, known=known).numpy()
    if codes.dtype == fmt.torch_dtype:
        codes = codes.view(fmt.code_dtype)
    elif codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ValueError(
            f"codes are {codes.dtype}; they must be integers" + (f" or {fmt.torch_dtype}" * bool(fmt.torch_dtype))
        )
    index = codes.to(torch.int64)
    if not known and (codes.dtype != fmt.code_dtype or fmt.bits < 8):
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < fmt.num_codes):
            raise ValueError(f"codes run from {int(index.min())} to {int(index.max())}; {fmt.name} has {fmt.num_codes}")
    # What is made under a dispatch mode (FakeTensorMode, tracing) belongs to the mode and may not be kept.
    moded = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state()
    table = (_new_table if moded else _table)(fmt, dtype, codes.device)
    return table.index_select(0, index.reshape(-1)).view(index.shape)  # never a view of the table


@overload
def encode(x: torch.Tensor, fmt: ElementFormat, *, saturate: bool | None = ...) -> torch.Tensor: ...
@overload
def encode(x: np.ndarray, fmt: ElementFormat, *, saturate: bool | None = ...) -> npt.NDArray[np.unsignedinteger]: ...
def encode(x, fmt, *, saturate=None):  # type: ignore[no-untyped-def]
    """Code of the nearest value, ties to the even significand.

    x         any shape; float64, float32, float16 or bfloat16 (numpy: the first three). Rounded once, float64 too
    saturate  what becomes of a magnitude that rounds past the largest value, and of Inf: True gives the largest value of
              its sign (OFP8's saturating mode), False gives Inf where the format has it and NaN otherwise. Default
              fmt.saturates: True for e2m1 and the 8-bit formats with a sign, False for e8m0, bf16 and fp16. e2m1 has neither Inf
              nor NaN, so False raises
    returns   codes, uint8 or uint16 (fmt.code_dtype), x's shape, torch or numpy as x was. e2m1: one code per byte

    Rounding comes first, then the test for overflow: 464 is e4m3fn's 448 in both modes, as it ties with 480 and 448 is even.
    Small magnitudes round to zero of their sign; in e4m3fnuz and e5m2fnuz, which have no negative zero, to 0x00.
    NaN: with its sign 0x7F or 0xFF in e4m3fn, 0x7E or 0xFE in e5m2, 0x7FC0 in bf16, 0x7E00 in fp16; 0x80 in the fnuz formats; 0xFF
    in e8m0; in e2m1, which has none, +6 (0x7), as PTX's cvt.rn.satfinite.e2m1x2 has it.
    e8m0: anything from 0 to 2^-127 becomes 2^-127 (byte 0), zero included; below zero there is no value, so NaN. A tie goes
    up: of the significands 1 and 2 that 1.5 lies between, 2 is even. (torch and ml_dtypes agree on ties, but send all
    between 2^-127 and 2^-126 up; here the nearest decides there too.)

    Raises ValueError for another dtype.
    """
    if isinstance(x, np.ndarray):
        if x.dtype not in (np.float16, np.float32, np.float64):
            raise ValueError(f"x is {x.dtype}; it must be float64, float32 or float16")
        return encode(torch.from_numpy(np.array(x)), fmt, saturate=saturate).numpy()
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"x is {getattr(x, 'dtype', type(x))}; it must be a float64, float32, float16 or bfloat16 tensor"
        )
    if saturate is None:
        saturate = fmt.saturates
    if not saturate and not fmt.has_nan:
        raise ValueError(f"{fmt.name} has neither Inf nor NaN: saturate=False has no code to give")

    bits = x.to(torch.float64).contiguous().view(torch.int64)  # every input dtype is exact in float64
    magnitude = bits & 0x7FFF_FFFF_FFFF_FFFF
    negative = bits < 0
    field = magnitude >> 52
    is_nan = magnitude > 0x7FF0_0000_0000_0000
    is_inf = magnitude == 0x7FF0_0000_0000_0000
    # magnitude = significand * 2^(exponent - 52); float64's own subnormals are far below every format's half-smallest.
    significand = (magnitude & 0x000F_FFFF_FFFF_FFFF) | torch.where(field > 0, 1 << 52, 0)
    exponent = field - 1023
    quantum_exponent = exponent.clamp(min=fmt.min_exponent)  # below it the spacing of values stays the same
    # Drop `shift` bits of the significand. 54 drops them all, with less than half left over.
    shift = (quantum_exponent - exponent + (52 - fmt.mantissa_bits)).clamp(max=54)
    quotient = significand >> shift
    remainder = significand - (quotient << shift)
    half = torch.ones_like(shift) << (shift - 1)
    round_up = (remainder > half) | ((remainder == half) & ((quotient & 1) == 1))
    # The quotient holds the leading 1 of a normal value, so adding it carries into the exponent field, as does rounding up.
    base = (quantum_exponent - fmt.min_exponent) << fmt.mantissa_bits
    code = base + quotient + round_up.to(torch.int64)
    if not fmt.has_zero:
        code = (code - 1).clamp(min=0)  # the leading 1 is the value itself: 2^-127 is code 0, and so is all below
    overflow = ((code > fmt.max_code) | is_inf) & ~is_nan
    if saturate:
        past = fmt.max_code
    else:
        past = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    code = torch.where(overflow, past, code)
    if fmt.has_nan:
        code = torch.where(is_nan, fmt.nan_code, code)
    else:
        code = torch.where(is_nan, fmt.max_code, code)
        negative = negative & ~is_nan
    if fmt.has_sign:
        signed = code | torch.where(negative, fmt.sign_bit, 0)
        code = signed if fmt.has_negative_zero else torch.where(code == 0, 0, signed)
    else:
        code = torch.where(negative & (magnitude != 0), fmt.nan_code, code)
    return code.to(fmt.code_dtype)
