"""Every code and every tie of every element format, against ml_dtypes, numpy and torch."""

from __future__ import annotations

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import torch

from fourwave import formats
from fourwave.formats import BF16, E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FP16, ElementFormat

INDEPENDENT = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}
every_format = pytest.mark.parametrize("fmt", formats.ALL, ids=lambda fmt: fmt.name)


def code_array(fmt: ElementFormat) -> np.ndarray:
    return np.arange(fmt.num_codes, dtype=np.uint16 if fmt.bits == 16 else np.uint8)


@functools.cache
def independent_decode(fmt: ElementFormat) -> np.ndarray:
    """Value of every code by the independent library, float64."""
    with np.errstate(invalid="ignore"):  # NaN is expected
        return code_array(fmt).view(INDEPENDENT[fmt.name]).astype(np.float64)


@functools.cache
def finite_values(fmt: ElementFormat) -> np.ndarray:
    """All finite values by the independent library, sorted, zero once."""
    values = independent_decode(fmt)
    return np.unique(values[np.isfinite(values)])


def probes(fmt: ElementFormat) -> np.ndarray:
    """float64: every value, every midpoint of neighbours and one ulp of float64 on either side, the limits."""
    values = finite_values(fmt)
    middle = (values[:-1] + values[1:]) / 2
    last_step = values[-1] - values[-2]
    edges = np.array([values[-1] + last_step / 2, values[-1] + last_step, 2 * values[-1], 4 * values[-1], 1e300])
    tiny = np.array([fmt.smallest / 2, fmt.smallest / 4, 2.0**-149, 2.0**-1022, 5e-324])
    points = np.concatenate([values, middle, edges, tiny, -tiny])
    if fmt.has_sign:
        points = np.concatenate([points, -edges])
    return np.concatenate([points, np.nextafter(points, np.inf), np.nextafter(points, -np.inf)])


def nearest(fmt: ElementFormat, x: float) -> set[int]:
    """Codes of the values nearest to a finite x, by comparing distances exactly; a second definition of rounding."""
    values = finite_values(fmt)
    at = int(np.searchsorted(values, x))
    near = [values[i] for i in (at - 1, at) if 0 <= i < len(values)]
    # The difference of two float64 can round; compare twice x with the sum, which is exact here or decided by sign.
    if len(near) == 2:
        middle = (near[0] + near[1]) / 2
        near = [near[0]] if x < middle else [near[1]] if x > middle else near
    return {int(c) for v in near for c in np.flatnonzero(independent_decode(fmt) == v)}


# ---------------------------------------------------------------------------------------------------------------- decode


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_decodes_exactly(fmt: ElementFormat, dtype: torch.dtype) -> None:
    codes = code_array(fmt)
    expected = independent_decode(fmt)
    got = formats.decode(codes, fmt, dtype)
    assert got.dtype == (np.float32 if dtype == torch.float32 else np.float64)
    np.testing.assert_array_equal(got.astype(np.float64), expected)
    np.testing.assert_array_equal(np.signbit(got[expected == 0]), np.signbit(expected[expected == 0]))
    from_torch = formats.decode(torch.from_numpy(codes), fmt, dtype)
    assert torch.equal(from_torch.nan_to_num(nan=-12345.0), torch.from_numpy(got).nan_to_num(nan=-12345.0))


@pytest.mark.parametrize("fmt", [fmt for fmt in formats.ALL if fmt.torch_dtype is not None], ids=lambda fmt: fmt.name)
def test_every_code_decodes_as_torch_does(fmt: ElementFormat) -> None:
    assert fmt.torch_dtype is not None
    codes = torch.from_numpy(code_array(fmt))
    native = codes.view(fmt.torch_dtype)
    expected = native.to(torch.float32)
    for got in (formats.decode(codes, fmt), formats.decode(native, fmt)):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_special_codes() -> None:
    def value(code: int, fmt: ElementFormat) -> float:
        return float(formats.decode(torch.tensor([code]), fmt, torch.float64))

    assert value(0, E8M0) == 2.0**-127
    assert value(254, E8M0) == 2.0**127
    assert math.isnan(value(255, E8M0))
    assert math.isnan(value(0x80, E4M3FNUZ))
    assert math.isnan(value(0x7F, E4M3FN)) and math.isnan(value(0xFF, E4M3FN))
    assert value(0x7C, E5M2) == math.inf and value(0xFC, E5M2) == -math.inf
    assert all(math.isnan(value(c, E5M2)) for c in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))
    assert [value(c, E2M1) for c in range(16)] == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@every_format
def test_properties_agree_with_the_codes(fmt: ElementFormat) -> None:
    values = finite_values(fmt)
    assert fmt.max == values[-1]
    assert fmt.smallest == values[values > 0][0]
    assert fmt.eps == values[values > 1][0] - 1
    all_values = formats.decode(code_array(fmt), fmt, torch.float64)
    assert fmt.has_inf == bool(np.isinf(all_values).any())
    assert fmt.has_nan == bool(np.isnan(all_values).any())
    assert fmt.has_negative_zero == bool((np.signbit(all_values) & (all_values == 0)).any())
    if fmt.torch_dtype is not None:
        info = torch.finfo(fmt.torch_dtype)
        assert (fmt.max, fmt.smallest_normal) == (info.max, info.smallest_normal)
        if fmt not in (E8M0, E5M2FNUZ):  # torch gives 1 - 1/2 as e8m0's eps, and half of e5m2fnuz's
            assert fmt.eps == info.eps


# ---------------------------------------------------------------------------------------------------------------- encode


@every_format
def test_encode_returns_every_code(fmt: ElementFormat) -> None:
    codes = code_array(fmt)
    values = formats.decode(codes, fmt, torch.float64)
    keep = ~np.isnan(values)
    for saturate in (True, False) if fmt.has_nan else (True,):
        got = formats.encode(values, fmt, saturate=saturate)
        finite = keep & ~np.isinf(values)
        np.testing.assert_array_equal(got[finite], codes[finite])
        if not saturate:
            np.testing.assert_array_equal(got[keep], codes[keep])


@every_format
def test_every_tie_rounds_to_even(fmt: ElementFormat) -> None:
    """Against the nearest-value definition, and the even code (all but e8m0, whose ties go up)."""
    values = finite_values(fmt)
    if fmt.bits == 16:  # every neighbour pair is checked with ml_dtypes and torch below; here a sample
        at = np.unique(
            np.concatenate([np.arange(0, len(values) - 1, 97), np.arange(len(values) // 2 - 80, len(values) // 2 + 80)])
        )
    else:
        at = np.arange(len(values) - 1)
    for low, high in zip(values[at], values[at + 1], strict=True):
        middle = (low + high) / 2
        for x in (middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)):
            (code,) = formats.encode(np.array([x]), fmt)
            candidates = nearest(fmt, x)
            assert int(code) in candidates, (low, high, x)
            if x == middle:
                if fmt is E8M0:
                    assert formats.decode(code[None], fmt, torch.float64)[0] == high
                elif len({c & ~fmt.sign_bit for c in candidates}) > 1:
                    assert int(code) % 2 == 0, (low, high)


def independent_encode(x: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(INDEPENDENT[fmt.name]).view(np.uint16 if fmt.bits == 16 else np.uint8)


def where_ml_dtypes_agrees(x: np.ndarray, fmt: ElementFormat) -> np.ndarray:
    """x without what ml_dtypes' e8m0 has otherwise: zero is NaN, and all between 2^-127 and 2^-126 goes up."""
    if fmt is not E8M0:
        return x
    return x[(x != 0) & ~((x > 2.0**-127) & (x < 1.5 * 2.0**-127))]


@every_format
def test_float32_matches_ml_dtypes_without_saturation(fmt: ElementFormat) -> None:
    """All values, ties, float32 neighbours of ties, limits: ml_dtypes' policy is Inf or NaN past the end."""
    exact = probes(fmt)
    with np.errstate(over="ignore", under="ignore"):
        x = exact.astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    x = where_ml_dtypes_agrees(x, fmt)
    expected = independent_encode(x, fmt)
    got = formats.encode(x, fmt, saturate=not fmt.has_nan)
    np.testing.assert_array_equal(got, expected)
    random = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    random = where_ml_dtypes_agrees(random[np.isfinite(random)], fmt)
    np.testing.assert_array_equal(
        formats.encode(random, fmt, saturate=not fmt.has_nan), independent_encode(random, fmt)
    )


@every_format
def test_float64_is_rounded_once(fmt: ElementFormat) -> None:
    """One float64 ulp off a tie decides it; through float32 it would be lost."""
    values = finite_values(fmt)
    middle = (values[:-1] + values[1:]) / 2
    low_code = formats.encode(values[:-1], fmt)
    high_code = formats.encode(values[1:], fmt)
    below, above = np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)
    got_below = formats.decode(formats.encode(below, fmt), fmt, torch.float64)
    got_above = formats.decode(formats.encode(above, fmt), fmt, torch.float64)
    np.testing.assert_array_equal(got_below, formats.decode(low_code, fmt, torch.float64))
    np.testing.assert_array_equal(got_above, formats.decode(high_code, fmt, torch.float64))
    with np.errstate(over="ignore"):
        through_float32 = formats.encode(below.astype(np.float32), fmt)
    if fmt.bits < 16:
        assert (through_float32 != formats.encode(below, fmt)).any()  # or this test would show nothing


@every_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_input(fmt: ElementFormat, dtype: torch.dtype) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.isfinite()]
    got = formats.encode(x, fmt, saturate=not fmt.has_nan).numpy()
    exact = x.to(torch.float32).numpy()
    agreed = np.isin(exact, where_ml_dtypes_agrees(exact, fmt))
    np.testing.assert_array_equal(got[agreed], independent_encode(exact[agreed], fmt))


@pytest.mark.parametrize("fmt", [E5M2, E4M3FNUZ, E5M2FNUZ, BF16, FP16], ids=lambda fmt: fmt.name)
def test_matches_torch(fmt: ElementFormat) -> None:
    """torch's casts of these go to Inf or NaN, so saturate=False."""
    assert fmt.torch_dtype is not None
    x = torch.from_numpy(probes(fmt)).to(torch.float32)
    expected = x.to(fmt.torch_dtype).view(fmt.code_dtype)
    assert torch.equal(formats.encode(x, fmt, saturate=False).to(torch.int32), expected.to(torch.int32))


def test_matches_torch_e4m3fn_and_e8m0() -> None:
    """torch's e4m3fn cast has saturated or not, by version: it must be one of our two policies throughout."""
    x = torch.from_numpy(probes(E4M3FN)).to(torch.float32)
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert any(torch.equal(formats.encode(x, E4M3FN, saturate=saturate), expected) for saturate in (True, False))
    if E8M0.torch_dtype is not None:  # torch drops the sign
        x = torch.from_numpy(probes(E8M0)).to(torch.float32).abs()
        assert torch.equal(formats.encode(x, E8M0), x.to(E8M0.torch_dtype).view(torch.uint8))


SATURATION = [
    # format, value, saturate=True, saturate=False
    (E4M3FN, 448.0, 0x7E, 0x7E),
    (E4M3FN, 464.0, 0x7E, 0x7E),  # a tie that goes to the even 448
    (E4M3FN, math.nextafter(464.0, 500), 0x7E, 0x7F),
    (E4M3FN, 1e30, 0x7E, 0x7F),
    (E4M3FN, -1e30, 0xFE, 0xFF),
    (E4M3FN, math.inf, 0x7E, 0x7F),
    (E4M3FN, -math.inf, 0xFE, 0xFF),
    (E4M3FNUZ, math.nextafter(248.0, 0), 0x7F, 0x7F),
    (E4M3FNUZ, 248.0, 0x7F, 0x80),  # a tie that goes past the odd 240
    (E4M3FNUZ, -248.0, 0xFF, 0x80),
    (E4M3FNUZ, math.inf, 0x7F, 0x80),
    (E4M3FNUZ, -math.inf, 0xFF, 0x80),
    (E5M2FNUZ, math.nextafter(61440.0, 0), 0x7F, 0x7F),
    (E5M2FNUZ, 61440.0, 0x7F, 0x80),
    (E5M2FNUZ, -math.inf, 0xFF, 0x80),
    (E5M2, math.nextafter(61440.0, 0), 0x7B, 0x7B),
    (E5M2, 61440.0, 0x7B, 0x7C),
    (E5M2, -61440.0, 0xFB, 0xFC),
    (E5M2, math.inf, 0x7B, 0x7C),
    (E5M2, -math.inf, 0xFB, 0xFC),
    (E2M1, 5.0, 0x6, None),
    (E2M1, 1e9, 0x7, None),
    (E2M1, -math.inf, 0xF, None),
    (E8M0, math.nextafter(1.5 * 2.0**127, 0), 0xFE, 0xFE),
    (E8M0, 1.5 * 2.0**127, 0xFE, 0xFF),
    (E8M0, math.inf, 0xFE, 0xFF),
    (FP16, math.nextafter(65520.0, 0), 0x7BFF, 0x7BFF),
    (FP16, 65520.0, 0x7BFF, 0x7C00),
    (FP16, -math.inf, 0xFBFF, 0xFC00),
    (BF16, 2.0**128, 0x7F7F, 0x7F80),
    (BF16, (2 - 2.0**-8) * 2.0**127, 0x7F7F, 0x7F80),
]


@pytest.mark.parametrize(("fmt", "x", "clamped", "open_ended"), SATURATION, ids=lambda v: getattr(v, "name", str(v)))
def test_saturation(fmt: ElementFormat, x: float, clamped: int, open_ended: int | None) -> None:
    value = torch.tensor([x], dtype=torch.float64)
    assert int(formats.encode(value, fmt, saturate=True)) == clamped
    if open_ended is None:
        with pytest.raises(ValueError, match="neither Inf nor NaN"):
            formats.encode(value, fmt, saturate=False)
    else:
        assert int(formats.encode(value, fmt, saturate=False)) == open_ended
    default = clamped if fmt.saturates else open_ended
    assert int(formats.encode(value, fmt)) == default


@every_format
def test_nan(fmt: ElementFormat) -> None:
    x = np.array([0x7FF8000000000000, 0xFFF8000000000000, 0x7FF0000000000001], np.uint64).view(np.float64)
    expected = {
        "e4m3fn": [0x7F, 0xFF, 0x7F],
        "e4m3fnuz": [0x80] * 3,
        "e5m2fnuz": [0x80] * 3,
        "e5m2": [0x7E, 0xFE, 0x7E],
        "e2m1": [0x7] * 3,
        "e8m0": [0xFF] * 3,
        "bf16": [0x7FC0, 0xFFC0, 0x7FC0],
        "fp16": [0x7E00, 0xFE00, 0x7E00],
    }[fmt.name]
    for saturate in (True, False) if fmt.has_nan else (True,):
        assert formats.encode(x, fmt, saturate=saturate).tolist() == expected
    assert np.isnan(formats.decode(np.array(expected), fmt)).all() == fmt.has_nan


@every_format
def test_zero_and_underflow(fmt: ElementFormat) -> None:
    below_half = math.nextafter(fmt.smallest / 2, 0)
    x = torch.tensor([0.0, -0.0, below_half, -below_half, fmt.smallest / 2, -fmt.smallest / 2], dtype=torch.float64)
    got = formats.encode(x, fmt).tolist()
    if fmt is E8M0:
        assert got == [0, 0, 0, 0xFF, 0, 0xFF]
        steps = torch.tensor([1.0, 1.25, 1.499, 1.5, 1.75, 2.0, 2.5]) * 2.0**-127
        assert formats.encode(steps, fmt).tolist() == [0, 0, 0, 1, 1, 1, 1]
    elif fmt in (E4M3FNUZ, E5M2FNUZ):
        assert got == [0] * 6
    else:
        assert got == [0, fmt.sign_bit] * 3  # half the smallest ties with zero, which is even


def test_shapes_views_and_kinds() -> None:
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    sliced = x[:, 1:3, ::2].mT
    codes = formats.encode(sliced, E4M3FN)
    assert codes.shape == sliced.shape and codes.dtype == torch.uint8
    assert torch.equal(codes, formats.encode(sliced.contiguous(), E4M3FN))
    as_numpy = formats.encode(sliced.numpy(), E4M3FN)
    assert isinstance(as_numpy, np.ndarray) and as_numpy.dtype == np.uint8
    np.testing.assert_array_equal(as_numpy, codes.numpy())
    assert formats.encode(np.array(1.0), E5M2).shape == ()
    assert formats.encode(torch.empty(0, 5), BF16).shape == (0, 5)
    assert formats.encode(torch.empty(0, 5), BF16).dtype == torch.uint16


def test_errors() -> None:
    with pytest.raises(ValueError, match="int64"):
        formats.encode(torch.arange(3), E4M3FN)
    with pytest.raises(ValueError, match="must be integers"):
        formats.decode(torch.zeros(3), E4M3FN)
    with pytest.raises(ValueError, match="from 0 to 16; e2m1 has 16"):
        formats.decode(torch.tensor([0, 16], dtype=torch.uint8), E2M1)
    with pytest.raises(ValueError, match="float32 or float64"):
        formats.decode(torch.zeros(3, dtype=torch.uint8), E4M3FN, torch.float16)
    with pytest.raises(ValueError, match="e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, e2m1, e8m0, bf16, fp16"):
        formats.get("e3m4")
    assert formats.get("e5m2") is E5M2


def test_decode_gives_a_tensor_of_its_own() -> None:
    for codes in (torch.tensor(0x38, dtype=torch.uint8), torch.tensor([0x38], dtype=torch.uint8)):
        value = formats.decode(codes, E4M3FN)
        assert value.shape == codes.shape and value.item() == 1.0
        value.fill_(7.0)
        assert formats.decode(codes, E4M3FN).item() == 1.0
    assert formats.decode(np.array(0x38, np.uint8), E4M3FN) == 1.0
    assert formats.decode(torch.empty(0, 3, dtype=torch.uint8), E4M3FN).shape == (0, 3)


def test_a_table_made_under_a_mode_is_not_kept() -> None:
    from torch._subclasses import FakeTensorMode

    def under_fake() -> None:
        with FakeTensorMode():
            fake = formats.decode(torch.empty(3, dtype=torch.uint8), E5M2)
            assert fake.shape == (3,) and fake.dtype == torch.float32

    def under_inference() -> None:
        with torch.inference_mode():
            formats.decode(code, E5M2)

    def under_meta() -> None:
        with torch.device("meta"):
            assert formats.decode(code, E5M2).device.type == "cpu"
        assert formats.decode(code.to("meta"), E5M2).device.type == "meta"

    code = torch.tensor([0x3C], dtype=torch.uint8)
    for first in (under_fake, under_inference, under_meta):
        formats.element._table.cache_clear()
        first()
        value = formats.decode(code, E5M2)
        assert type(value) is torch.Tensor and value.item() == 1.0
        assert not formats.element._table(E5M2, torch.float32, code.device).is_inference()


# --------------------------------------------------------------------------------------------------------------- packing


def test_pack_puts_element_0_low() -> None:
    codes = torch.tensor([[1, 2, 3, 15], [0, 7, 8, 9]], dtype=torch.uint8)
    packed = formats.pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0xF3], [0x70, 0x98]]
    assert torch.equal(formats.unpack_e2m1(packed), codes)
    np.testing.assert_array_equal(formats.pack_e2m1(codes.numpy()), packed.numpy())
    np.testing.assert_array_equal(formats.unpack_e2m1(packed.numpy()), codes.numpy())


def test_pack_every_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(formats.pack_e2m1(formats.unpack_e2m1(every)), every)
    assert formats.unpack_e2m1(every)[0x53 * 2].item() == 3
    with pytest.raises(ValueError, match="must be even"):
        formats.pack_e2m1(every[:3])
    with pytest.raises(ValueError, match="uint8"):
        formats.pack_e2m1(every.to(torch.int32))
