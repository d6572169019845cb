"""Number formats, bit-exact: what each code means, and which code a value rounds to.

e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, e2m1, e8m0, bf16, fp16   the formats (ElementFormat)
decode(codes, fmt), encode(x, fmt, saturate=...)   torch or numpy, in and out
pack_e2m1, unpack_e2m1                             two 4-bit codes in a byte
"""

from fourwave.formats.element import (
    ALL,
    BF16,
    E2M1,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FP16,
    ElementFormat,
    decode,
    encode,
    get,
)
from fourwave.formats.packing import pack_e2m1, unpack_e2m1

__all__ = [
    "ALL",
    "BF16",
    "E2M1",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "FP16",
    "ElementFormat",
    "decode",
    "encode",
    "get",
    "pack_e2m1",
    "unpack_e2m1",
]
