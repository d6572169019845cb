"""One fw.quantize call with its expected bits: for tests and `fourwave check`.

The expectation is docs/quantize.md's definition, written anew: numpy, powers of two by frexp, codes by fourwave.formats.encode. It
shares no code with fourwave.quantize.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fourwave import formats
from fourwave.quantize import FORMATS, QuantizedTensor, quantize
from fourwave.testing import inputs

KINDS = ("spread", "corners", "patterns")
SMALLEST = np.float32(2.0**-126)


def matrix(rows: int, columns: int, dtype: torch.dtype, kind: str = "spread", seed: int = 0) -> torch.Tensor:
    """[rows, columns] of dtype, on the CPU.

    spread    rows and blocks of 32 columns differ by decades, no two rows alike
    corners   spread, and of its 32 x 32 blocks some hold zeros, negative zeros, subnormals, the smallest and largest numbers, one Inf,
              one NaN, or only such
    patterns  16-bit types: every bit pattern in order, repeated or cut off; float32: patterns from the whole range, rounding to
              and around ties of the 8-bit formats among them
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "patterns":
        count = rows * columns
        index = torch.arange(count)
        if dtype != torch.float32:
            bits = (index % 2**16).to(torch.int32)
            return torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16).view(dtype).view(rows, columns)
        # Exponents in runs of 64 elements, mantissas of few bits plus or minus an ulp.
        exponent = (index // 64 * 7919) % 256
        mantissa = (torch.randint(0, 64, (count,), generator=generator) << 17) + (index % 3 - 1)
        value = (exponent << 23) + mantissa.clamp(0, 2**23 - 1)
        sign = torch.where(index % 5 == 0, -(2**31), 0)
        return (value + sign).to(torch.int32).view(torch.float32).view(rows, columns)
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: the kinds are {', '.join(KINDS)}")
    x = inputs.matrix(rows, columns, generator=generator).to(dtype)
    if kind == "spread":
        return x
    info = torch.finfo(dtype)
    fills = [
        lambda b: b.zero_(), lambda b: b.fill_(-0.0), lambda b: b.mul_(info.smallest_normal * 0.1),
        lambda b: b.fill_(info.smallest_normal * info.eps), lambda b: b.fill_(info.max), lambda b: b[:1, :1].fill_(float("inf")),
        lambda b: b[-1:, -1:].fill_(float("nan")), lambda b: b.fill_(-float("inf")), lambda b: b.fill_(float("nan")),
        lambda b: b[:1].fill_(info.min), lambda b: b[:, :1].fill_(info.smallest_normal),
    ]  # fmt: skip
    blocks = [(r, c) for r in range(0, rows, 32) for c in range(0, columns, 32)]
    for n, (r, c) in enumerate(blocks):
        if n % 2:  # every second block stays as it was
            fills[n // 2 % len(fills)](x[r : r + 32, c : c + 32])  # type: ignore[no-untyped-call]
    return x


def scale_of(amax: np.ndarray, fmt: formats.ElementFormat, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(scale as stored, scale's reciprocal) of float32 amax, any shape. MX: uint8 codes."""
    finite = np.isfinite(amax)
    safe = np.where(finite, amax, 0).astype(np.float32)
    if rule == "fp32":
        scale = np.maximum((safe.astype(np.float64) / fmt.max).astype(np.float32), SMALLEST)
    else:
        wide = np.where(safe > 0, safe, 2.0**-149).astype(np.float64)
        exponent = np.frexp(wide)[1] - np.frexp(fmt.max)[1]  # floor(log2(amax)) - floor(log2(max))
        if rule != "floor":
            exponent += wide > fmt.max * 2.0**exponent
        exponent = np.maximum(exponent, -126 if rule == "pow2" else -127)
        scale = np.ldexp(1.0, exponent)
    inv = np.where(finite, (1.0 / scale.astype(np.float64)).astype(np.float32), np.float32(np.nan)).astype(np.float32)
    if rule in ("floor", "ceil"):
        return np.where(finite, np.log2(scale) + 127, 255).astype(np.uint8), inv
    return np.where(finite, scale, np.nan).astype(np.float32), inv


def random_words(lines: np.ndarray, eights: np.ndarray, stream: int, seed: int) -> np.ndarray:
    """uint32 [..., 4]: Philox-4x32-10 at counters (line, eight, stream, 0) with key `seed`."""
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    zero = np.zeros(np.broadcast(lines, eights).shape, np.uint64)
    c = [zero + lines.astype(np.uint64), zero + eights.astype(np.uint64), zero + np.uint64(stream), zero]
    for n in range(10):
        k = [np.uint64((word + n * step) % 2**32) for word, step in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85))]
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(q >> high) ^ c[1] ^ k[0], q & low, (p >> high) ^ c[3] ^ k[1], p & low]
    return np.stack(c, -1).astype(np.uint32)


def hadamard(values: np.ndarray, seed: int) -> np.ndarray:
    """float32 [R, C], each 16 neighbours of a row transformed: docs/quantize.md."""
    signs = int(random_words(np.zeros(1), np.zeros(1), 2, seed)[0, 0])
    y = values.reshape(len(values), -1, 16) * np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(16)], np.float32)
    index = np.arange(16)
    for distance in (1, 2, 4, 8):
        other = y[..., index ^ distance]
        y = np.where(index & distance, other - y, y + other)
    return (y / np.float32(4)).reshape(values.shape)


def stochastic_codes(y: np.ndarray, lines: np.ndarray, places: np.ndarray, stream: int, seed: int) -> np.ndarray:
    """e2m1 codes of float32 y; lines, places: where each element is. NaN: +6."""
    words = random_words(lines, places // 8, stream, seed)
    word = np.take_along_axis(words, np.broadcast_to(places % 8 // 2, y.shape)[..., None], -1)[..., 0]
    bits = np.where(places % 2, word >> 16, word & 0xFFFF).astype(np.int64)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = np.minimum(np.nan_to_num(np.abs(y), nan=6.0), 6).astype(np.float64)
    below = np.searchsorted(grid, size, side="right") - 1
    gap = np.append(np.diff(grid), 1.0)[below]
    fraction = np.floor((size - grid[below]) / gap * 2**16).astype(np.int64)
    code = below + (fraction + bits >= 2**16)
    return np.where(np.isnan(y), 7, code + 8 * np.signbit(y)).astype(np.uint8)


def expected(  # type: ignore[no-untyped-def]
    x: torch.Tensor,
    format: str,
    rowwise: bool,
    rule: str,
    fnuz: bool,
    scale: float | None = None,
    rounding_seed: int | None = None,
    hadamard_seed: int | None = None,
):
    """(codes [R, C] uint8, scales, amax of all) as numpy arrays; scales as in formats.scaling.scale_shape, None if given."""
    fmt = FORMATS[format]
    element = fmt.code_format(fnuz)
    values = x.to(torch.float32).numpy()
    rows, columns = values.shape
    if hadamard_seed is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            values = hadamard(values, hadamard_seed) if rowwise else hadamard(values.T, hadamard_seed).T
    across, along = fmt.block or (1, columns if rowwise else rows)
    if fmt.scaling == "tensor":
        across, along = rows, columns
    elif not rowwise:
        across, along = along, across
    starts = np.arange(0, rows, across), np.arange(0, columns, along)
    with np.errstate(invalid="ignore", over="ignore"):
        amax = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), starts[0], axis=0), starts[1], axis=1)
        if scale is None:
            stored, inv = scale_of(amax, element, rule)
        else:
            stored, inv = None, np.full_like(amax, np.float32(1) / np.float32(scale))
        inv = inv.repeat(across, 0)[:rows].repeat(along, 1)[:, :columns]
        y = values * inv
    if rounding_seed is not None:
        index = np.indices(y.shape)
        codes = stochastic_codes(y, index[1 - rowwise], index[int(rowwise)], 1 - rowwise, rounding_seed)
        return codes, stored, None
    codes = formats.encode(y, element, saturate=True)
    if element.nan_code is not None:
        codes = np.where(np.isnan(y), element.nan_code, codes)
    return codes.astype(np.uint8), stored, np.abs(values).max() if fmt.scaling == "tensor" else None


@dataclass(frozen=True)
class QuantizeResult:
    """problems: what differed, in words; none: every bit is right."""

    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class QuantizeCase:
    """A call of fw.quantize; view: one of inputs.VIEWS, with NaN wherever x is not. The other fields are quantize's."""

    rows: int
    columns: int
    format: str
    direction: str = "rowwise"
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16
    kind: str = "spread"
    view: str = "contiguous"
    rule: str | None = None
    scale: float | None = None
    fnuz: bool = False
    seed: int = 0
    rounding_seed: int | None = None
    hadamard: str | None = None
    hadamard_seed: int = 0

    def __str__(self) -> str:
        words = [f"{self.rows}x{self.columns} {str(self.dtype).removeprefix('torch.')}", self.format, self.direction]
        words += ["transposed"] * self.transposed + [self.kind] * (self.kind != "spread")
        words += [self.view] * (self.view != "contiguous") + ([] if self.rule is None else [self.rule])
        words += [] if self.scale is None else [f"scale {self.scale:g}"]
        words += ["fnuz"] * self.fnuz
        words += [] if self.rounding_seed is None else [f"stochastic {self.rounding_seed}"]
        words += [] if self.hadamard is None else [f"hadamard {self.hadamard} {self.hadamard_seed}"]
        return ", ".join(words)

    def run(self, backend: str | None, *, device: torch.device | str = "cpu") -> QuantizeResult:
        """Quantize on `backend` and compare every bit. Errors of quantize itself are raised."""
        x = matrix(self.rows, self.columns, self.dtype, self.kind, self.seed)
        scale = None if self.scale is None else torch.tensor(self.scale, device=device)
        quantized = quantize(
            inputs.view(x.to(device), self.view), self.format, self.direction, scale=scale, scale_rule=self.rule,
            fnuz=self.fnuz, columnwise_transposed=self.transposed, backend=backend,
            rounding="nearest" if self.rounding_seed is None else "stochastic", seed=self.rounding_seed,
            hadamard=self.hadamard, hadamard_seed=self.hadamard_seed,
        )  # fmt: skip
        return self.compare(quantized, x)

    def compare(self, quantized: QuantizedTensor, x: torch.Tensor) -> QuantizeResult:
        fmt = FORMATS[self.format]
        rule = self.rule or ("floor" if fmt.is_mx else "fp32")
        problems: list[str] = []
        for direction in ("rowwise", "columnwise"):
            rowwise = direction == "rowwise"
            data, stored = (
                (quantized.data, quantized.scale)
                if rowwise
                else (quantized.columnwise_data, quantized.columnwise_scale)
            )
            if self.direction not in (direction, "both"):
                if data is not None or stored is not None:
                    problems.append(f"{direction} codes were not asked for")
                continue
            transform = self.hadamard_seed if self.hadamard in (direction, "both") else None
            codes, scales, amax = expected(
                x, self.format, rowwise, rule, self.fnuz, self.scale, self.rounding_seed, transform
            )
            if self.transposed and not rowwise:
                codes = codes.T
                scales = scales if scales is None or scales.ndim < 2 else scales.T
            if fmt.element == "e2m1":
                codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
            if scales is None:
                scales = np.float32(self.scale)
            problems += _differences(f"{direction} codes", data, codes)
            problems += _differences(f"{direction} scales", stored, scales)
            if fmt.scaling == "tensor":
                problems += _differences("amax", quantized.amax, np.asarray(amax, np.float32))
        return QuantizeResult(tuple(problems))


def _differences(name: str, got: torch.Tensor | None, wanted: np.ndarray) -> list[str]:
    if got is None:
        return [f"{name} are missing"]
    found = (got.view(torch.uint8) if got.element_size() == 1 else got).cpu().numpy()
    wanted = np.asarray(wanted)
    if found.size != wanted.size:
        return [f"{name} have shape {found.shape} instead of {wanted.shape}"]
    wanted = wanted.reshape(found.shape)
    equal = (found == wanted) | ((found != found) & (wanted != wanted))
    if equal.all():
        return []
    where = tuple(int(i[0]) for i in np.nonzero(~equal)) if found.ndim else ()
    return [f"{(~equal).sum()} {name} differ, the first at {where}: {found[where]} instead of {wanted[where]}"]


def _cases() -> tuple[QuantizeCase, ...]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    return (
        *(QuantizeCase(150, 272, name, "both", False, bf16, "corners") for name in FORMATS),
        *(QuantizeCase(160, 144, name, "both", True, fp32) for name in FORMATS),
        QuantizeCase(256, 256, "fp8_e4m3", scale=0.37, kind="patterns"),
        QuantizeCase(256, 256, "fp8_e5m2", scale=3e-5, kind="patterns", dtype=fp16),
        QuantizeCase(256, 256, "mxfp8_e4m3", "both", kind="patterns", rule="ceil"),
        QuantizeCase(256, 256, "mxfp8_e5m2", "both", kind="patterns", dtype=fp32),
        QuantizeCase(77, 145, "fp8_1x128", "both", True, kind="corners", view="offset", rule="pow2"),
        QuantizeCase(77, 145, "fp8_128x128", "both", view="strided", rule="pow2"),
        QuantizeCase(33, 96, "mxfp8_e4m3", "both", True, fp16, "corners", "sliced"),
        QuantizeCase(1, 192, "fp8_row", "both"),
        QuantizeCase(130, 1, "mxfp8_e5m2", "both"),
        QuantizeCase(64, 128, "fp8_e4m3", "columnwise", True, kind="corners", scale=1e-3),
        QuantizeCase(256, 256, "mxfp4", "both", kind="patterns", rule="ceil"),
        QuantizeCase(34, 270, "mxfp4", "both", True, fp16, "corners", "offset", rounding_seed=2**40 + 3),
        QuantizeCase(
            48, 288, "mxfp4", "both", kind="corners", rounding_seed=11, hadamard="both", hadamard_seed=2**35 + 1, rule="ceil"
        ),
        QuantizeCase(80, 46, "mxfp4", "both", True, fp32, view="sliced", rounding_seed=5, hadamard="columnwise"),
        QuantizeCase(33, 64, "mxfp4", "rowwise", hadamard="rowwise", hadamard_seed=9),
    )  # fmt: skip


QUANTIZE_CASES: tuple[QuantizeCase, ...] = _cases()
