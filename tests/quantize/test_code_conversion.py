"""The device helpers of blocks/flydsl/convert.py on the simulator, bits against fourwave.formats and plain Python."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch

from fourwave import formats, sim
from fourwave.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

if sim.unavailable() is None:
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    from fourwave.blocks.flydsl import convert
    from fourwave.blocks.flydsl.memory import Buffer

    def elementwise(body, inputs, outputs):
        """A launcher: thread i gives body(list of `inputs` Int32) -> list of `outputs` Int32."""

        @flyc.kernel(known_block_size=[256, 1, 1])
        def kernel(x: fx.Tensor, out: fx.Tensor, count: fx.Int32):
            i = fx.Int32(fx.block_idx.x) * 256 + fx.Int32(fx.thread_idx.x)
            words = Buffer(x, fx.Int64(0), fx.Int64(count) * 4 * inputs).load(i * 4 * inputs, inputs, fx.Int32)
            results = body([words[j] for j in range(inputs)])
            buffer = Buffer(out, fx.Int64(0), fx.Int64(count) * 4 * outputs)
            for j, result in enumerate(results):
                buffer.store(fx.Vector.filled(1, fx.Int32(result), fx.Int32), (i * outputs + j) * 4)

        @flyc.jit
        def launch(x: fx.Tensor, out: fx.Tensor, count: fx.Int32):
            kernel(x, out, count).launch(grid=((count + 255) >> 8, 1, 1), block=(256, 1, 1))

        return launch


def run(arch, body, x, outputs):
    """x [n, inputs] int32 -> [n, outputs] int32."""
    out = torch.full((len(x), outputs), -1, dtype=torch.int32)
    with sim.session(arch=arch, on_finding="raise"):
        elementwise(body, x.shape[1], outputs)(x.contiguous(), out, len(x))
    return out


def floats(bits):
    return bits.view(torch.float32)


@functools.cache
def probes(fmt):
    """float32 bits: around every value and tie of fmt and its limits, bf16's every pattern, NaNs with payload."""
    values = sorted({float(v) for v in formats.decode(torch.arange(256), fmt) if math.isfinite(v)})
    ties = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    edges = [fmt.max * f for f in (1, 1.03125, 1.0625, 1.125, 1.25, 2, 4)]
    points = np.array(values + ties + edges + [-e for e in edges] + [fmt.smallest / 2, fmt.smallest / 4, 2.0**-149])
    points = points.astype(np.float32)
    around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    fp32 = torch.from_numpy(np.concatenate(around)).view(torch.int32)
    bf16 = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x400000, -0x7FFFFF], dtype=torch.int32)
    bits = torch.cat([fp32, bf16, nans])
    return torch.cat([bits, torch.zeros(-len(bits) % 4, dtype=torch.int32)])


def expected_codes(bits, fmt):
    """formats.encode, with every NaN the format's one code."""
    x = floats(bits)
    code = formats.encode(x, fmt, saturate=True)
    return torch.where(x.isnan(), fmt.nan_code, code).to(torch.uint8)


ARCH_FORMATS = [
    ("gfx950", E4M3FN), ("gfx950", E5M2),
    ("gfx942", E4M3FNUZ), ("gfx942", E5M2FNUZ), ("gfx942", E4M3FN), ("gfx942", E5M2),
]  # fmt: skip
arch_format = pytest.mark.parametrize(("arch", "fmt"), ARCH_FORMATS, ids=lambda v: getattr(v, "name", v))
every_arch = pytest.mark.parametrize("arch", ["gfx950", "gfx942"])


@arch_format
def test_codes_of_every_kind_of_value(arch, fmt):
    bits = probes(fmt)
    # each value in every place of a word, beside NaNs and numbers alike
    for shift in range(4):
        x = bits.roll(shift).view(-1, 4)
        got = run(arch, lambda v: [convert.Codes(fmt, arch).pack([w.bitcast(fx.Float32) for w in v])], x, 1)
        assert torch.equal(got.view(torch.uint8).flatten(), expected_codes(x.flatten(), fmt))


@arch_format
def test_codes_without_clamp_or_nan(arch, fmt):
    """What callers may leave out where they know the values."""
    bits = probes(fmt)
    x = floats(bits)
    x = torch.where(x.abs() <= fmt.max * (1 + 2**-20), x, 0.0).view(-1, 4)
    body = lambda v: [convert.Codes(fmt, arch).pack([w.bitcast(fx.Float32) for w in v], saturate=False, nan=False)]  # noqa: E731
    got = run(arch, body, x.view(torch.int32), 1)
    assert torch.equal(got.view(torch.uint8).flatten(), expected_codes(x.view(torch.int32).flatten(), fmt))


@arch_format
def test_codes_of_a_block_that_is_not_finite(arch, fmt):
    x = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32)  # the last word says "finite"
    body = lambda v: [convert.Codes(fmt, arch).pack([fx.Float32(1.0)] * 4, nan=False, finite=v[3] == 1)]  # noqa: E731
    got = run(arch, body, x, 1).view(torch.uint8)
    one = int(formats.encode(torch.tensor([1.0]), fmt))
    assert got.tolist() == [[fmt.nan_code] * 4, [one] * 4]


def amax_probes():
    """Magnitudes: every exponent with mantissas around those where rules turn; Inf and NaN."""
    mantissas = [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x700000, 0x700001, 0x7FFFFF]
    bits = [(e << 23) | m for e in range(255) for m in mantissas]
    return torch.tensor([*bits, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32)


def exact_power(amax, fmt, rule):
    """The rule's exponent in plain Python, from its definition; amax: a positive finite float."""
    exponent = math.frexp(amax)[1]  # of a significand in [1/2, 1)
    if rule == "floor":
        return exponent - 1 - (math.frexp(fmt.max)[1] - 1)
    power = exponent - 20
    while amax > fmt.max * 2.0**power:
        power += 1
    return power


@every_arch
@pytest.mark.parametrize("rule", ["floor", "ceil"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_mx_scales(arch, fmt, rule):
    bits = amax_probes()

    def body(v):
        block = convert.BlockScale.of(v[0], fmt, rule)
        return [block.byte, block.inv.bitcast(fx.Int32), block.finite.select(fx.Int32(1), fx.Int32(0))]

    got = run(arch, body, bits.view(-1, 1), 3)
    for amax, (byte, inv, finite) in zip(floats(bits).tolist(), got.tolist()):
        if not math.isfinite(amax):
            assert (byte, inv, finite) == (255, 0x7FC00000, 0)
            continue
        power = -127 if amax == 0 else max(-127, exact_power(amax, fmt, rule))
        assert (byte, finite) == (power + 127, 1), (amax, rule)
        assert floats(torch.tensor([inv], dtype=torch.int32)).item() == 2.0**-power


@every_arch
@pytest.mark.parametrize("rule", ["fp32", "pow2"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ], ids=lambda f: f.name)
def test_float32_scales(arch, fmt, rule):
    bits = amax_probes()
    body = lambda v: [t.bitcast(fx.Int32) for t in (lambda b: (b.scale, b.inv))(convert.BlockScale.of(v[0], fmt, rule))]  # noqa: E731
    scale, inv = floats(run(arch, body, bits.view(-1, 1), 2)).numpy().T
    amax = floats(bits).numpy()
    finite = np.isfinite(amax)
    assert np.isnan(scale[~finite]).all() and np.isnan(inv[~finite]).all()
    amax, scale, inv = amax[finite], scale[finite], inv[finite]
    if rule == "fp32":
        expected = np.maximum((amax.astype(np.float64) / fmt.max).astype(np.float32), np.float32(2.0**-126))
        assert (scale == expected).all()
    else:
        expected = [2.0 ** max(-126, exact_power(float(a), fmt, rule)) if a else 2.0**-126 for a in amax]
        assert (scale == np.array(expected)).all()
    assert (inv == (1 / scale.astype(np.float64)).astype(np.float32)).all()
    assert np.isfinite(inv).all() and (scale > 0).all()


@every_arch
def test_e8m0_as_float32(arch):
    codes = torch.arange(256, dtype=torch.int32)
    body = lambda v: [f(v[0]).bitcast(fx.Int32) for f in (convert.e8m0_scale, convert.e8m0_inverse)]  # noqa: E731
    scale, inv = floats(run(arch, body, codes.view(-1, 1), 2)).T.double()
    exact = formats.decode(codes, E8M0, torch.float64)
    assert torch.equal(scale[:255], exact[:255]) and torch.equal(inv[:255], 1 / exact[:255])
    assert scale[255].isnan() and inv[255].isnan()


@every_arch
@pytest.mark.parametrize("mask", [1, 2, 4, 7, 8, 12, 15, 16, 31, 32, 48, 56, 63])
def test_lane_max(arch, mask):
    generator = torch.Generator().manual_seed(mask)
    x = torch.randperm(1 << 16, generator=generator)[:512].to(torch.int32) * 32749 % (1 << 31)
    got = run(arch, lambda v: [convert.lane_max(v[0], mask, arch)], x.view(-1, 1), 1).flatten()
    lanes = torch.arange(512)
    expected = torch.stack([x[lanes ^ other] for other in range(64) if other & ~mask == 0]).amax(0)
    assert torch.equal(got, expected)
