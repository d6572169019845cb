"""A quantized matrix: codes and scales, along its rows, its columns or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave import formats
from fourwave.formats.element import ElementFormat
from fourwave.formats.scaling import expand_scale, scale_shape
from fourwave.quantize.random import HADAMARD, hadamard_signs, inverse_hadamard

Tensor = torch.Tensor

DIRECTIONS = ("rowwise", "columnwise", "both")


@dataclass(frozen=True)
class QuantFormat:
    """One way to quantize.

    name      as `fw.quantize` takes it
    element   "e4m3", "e5m2" or "e2m1"
    scaling   which elements share a scale: "tensor", "row", "1x128", "128x128" or "1x32" (MX)
    """

    name: str
    element: str
    scaling: str

    @property
    def block(self) -> tuple[int, int] | None:
        """(across, along) the reduction, or None for "tensor" and "row"."""
        return {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}.get(self.scaling)

    @property
    def is_mx(self) -> bool:
        """Scales are e8m0 codes of powers of two; float32 otherwise."""
        return self.scaling == "1x32"

    @property
    def one_copy(self) -> bool:
        """Whether rowwise and columnwise are the same codes and scales: a scale covers as much of a row as of a column."""
        return self.scaling in ("tensor", "128x128")

    def code_format(self, fnuz: bool = False) -> ElementFormat:
        """The codes' format; fnuz: gfx942's 8-bit floats."""
        if self.element == "e2m1":
            return formats.E2M1
        if fnuz:
            return formats.get(f"{self.element}fnuz")
        return formats.E4M3FN if self.element == "e4m3" else formats.E5M2


FORMATS: dict[str, QuantFormat] = {
    fmt.name: fmt
    for fmt in (
        QuantFormat("fp8_e4m3", "e4m3", "tensor"),
        QuantFormat("fp8_e5m2", "e5m2", "tensor"),
        QuantFormat("fp8_row", "e4m3", "row"),
        QuantFormat("fp8_row_e5m2", "e5m2", "row"),
        QuantFormat("fp8_1x128", "e4m3", "1x128"),
        QuantFormat("fp8_1x128_e5m2", "e5m2", "1x128"),
        QuantFormat("fp8_128x128", "e4m3", "128x128"),
        QuantFormat("fp8_128x128_e5m2", "e5m2", "128x128"),
        QuantFormat("mxfp8_e4m3", "e4m3", "1x32"),
        QuantFormat("mxfp8_e5m2", "e5m2", "1x32"),
        QuantFormat("mxfp4", "e2m1", "1x32"),
    )
}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [R, C] as codes and scales; value = code * scale.

    format      FORMATS[...]
    shape       (R, C)
    data        codes, blocks along C: [R, C], torch's 8-bit float type; mxfp4: uint8 [R, C / 2], element 0 in the low half
    scale       formats.scaling.scale_shape(format.scaling, R, C, k_last=True), contiguous; float32, or float8_e8m0fnu for MX
    columnwise_data, columnwise_scale  codes with blocks along R, where they were asked for. As `data` they are [R, C] (mxfp4 packed
                along C) with scale_shape(..., k_last=False); with columnwise_transposed both are transposed: codes [C, R]
                (mxfp4 packed along R) and scale_shape(format.scaling, C, R, k_last=True)
    amax        float32 (): largest magnitude of what was quantized, where it was computed
    row_hadamard, column_hadamard  seed of the random Hadamard transform that the rowwise (columnwise) values went through along
                their blocks before they were quantized (random.hadamard), or None. A product of two operands with one seed is
                that of the untransformed ones
    Where format.one_copy holds, the columnwise pair is the rowwise one unless it is transposed.
    A missing pair is None; at least one is there.
    """

    format: QuantFormat
    shape: tuple[int, int]
    data: Tensor | None = None
    scale: Tensor | None = None
    columnwise_data: Tensor | None = None
    columnwise_scale: Tensor | None = None
    columnwise_transposed: bool = False
    amax: Tensor | None = None
    row_hadamard: int | None = None
    column_hadamard: int | None = None

    @classmethod
    def from_codes(
        cls,
        format: str,
        data: Tensor | None = None,
        scale: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        columnwise_scale: Tensor | None = None,
        *,
        columnwise_transposed: bool = False,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """A QuantizedTensor of codes and scales that exist already, such as a checkpoint's. See the class for shapes and types.

        Codes may be fnuz; MX scales may be uint8; scales of another layout in memory are copied. The codes are not looked at.
        Raises ValueError, naming what came and what fits, for anything else.
        """
        fmt = FORMATS.get(format) if isinstance(format, str) else None
        if fmt is None:
            raise ValueError(f"format {format!r}: the formats are {', '.join(FORMATS)}")
        for name, t in (
            ("data", data), ("scale", scale), ("columnwise_data", columnwise_data), ("columnwise_scale", columnwise_scale),
            ("amax", amax),
        ):  # fmt: skip
            if t is not None and (not isinstance(t, Tensor) or t.layout is not torch.strided):
                told = t.layout if isinstance(t, Tensor) else f"of type {type(t).__name__}"
                raise ValueError(f"{name} is {told}; it must be a strided tensor or None")
        if not isinstance(columnwise_transposed, bool):
            raise ValueError(f"columnwise_transposed is {columnwise_transposed!r}; it must be True or False")
        if data is None and columnwise_data is None:
            raise ValueError("neither data nor columnwise_data was given")
        shape: tuple[int, int] | None = None
        pairs: list[Tensor | None] = []
        for name, codes, stored in (("", data, scale), ("columnwise_", columnwise_data, columnwise_scale)):
            if codes is None and stored is None:
                pairs += [None, None]
                continue
            if codes is None or stored is None:
                raise ValueError(f"{name}data and {name}scale belong together; only one was given")
            transposed = bool(name) and columnwise_transposed
            rows, columns = _code_shape(f"{name}data", codes, fmt)
            wanted = scale_shape(fmt.scaling, rows, columns, k_last=not name or transposed)
            own = (columns, rows) if transposed else (rows, columns)
            if shape not in (None, own):
                raise ValueError(f"data is of a matrix {shape}, columnwise_data of one {own}")
            shape = own
            pairs += [codes, _stored_scale(f"{name}scale", stored, wanted, fmt, codes)]
        assert shape is not None
        if data is not None and columnwise_data is not None and data.dtype != columnwise_data.dtype:
            raise ValueError(
                f"data is {data.dtype} and columnwise_data {columnwise_data.dtype}; both must be one format"
            )
        if data is not None and columnwise_data is not None and data.device != columnwise_data.device:
            raise ValueError(f"data is on {data.device} and columnwise_data on {columnwise_data.device}")
        codes = data if data is not None else columnwise_data
        assert codes is not None
        if amax is not None and (amax.numel() != 1 or amax.dtype != torch.float32 or amax.device != codes.device):
            raise ValueError(
                f"amax is {tuple(amax.shape)} {amax.dtype} on {amax.device}; it must be float32, one element, on {codes.device}"
            )
        amax = None if amax is None else amax.reshape(())
        transposed = columnwise_transposed and columnwise_data is not None
        return cls(fmt, shape, pairs[0], pairs[1], pairs[2], pairs[3], transposed, amax)

    def __repr__(self) -> str:
        has = [direction for direction in ("rowwise", "columnwise") if self.has(direction)]
        stored = " transposed" * (self.columnwise_transposed and "columnwise" in has)
        return f"QuantizedTensor({list(self.shape)} {self.format.name}, {' and '.join(has)}{stored}, on {self.device})"

    @property
    def device(self) -> torch.device:
        return self._any.device

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> QuantizedTensor:
        """The same codes and scales on another device. Other types are what `dequantize` and `quantize` are for."""
        check_device("a quantized tensor has the types of its format; dequantize gives numbers", device)
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def _map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """A copy with every tensor replaced; what is one tensor stays one."""
        made: dict[int, Tensor] = {}
        for name in _TENSORS:
            if (t := getattr(self, name)) is not None and id(t) not in made:
                made[id(t)] = function(t)
        tensors = {name: getattr(self, name) for name in _TENSORS}
        changes: dict[str, Any] = {name: None if t is None else made[id(t)] for name, t in tensors.items()}
        return replace(self, **changes)

    def __getitem__(self, rows: slice) -> QuantizedTensor:
        """Rows start:stop, which share memory with these where they can; without amax, which is of the whole tensor.

        Where a scale covers several rows the slice must begin and end with its blocks: 128x128, and every columnwise format with
        blocks. Raises ValueError otherwise, TypeError for what is no slice.
        """
        if not isinstance(rows, slice):
            raise TypeError(f"index {rows!r}: a quantized tensor gives slices of rows, q[start:stop]")
        start, stop, step = rows.indices(self.shape[0])
        stop = max(start, stop)
        if step != 1:
            raise ValueError(f"rows in steps of {step}: a slice of a quantized tensor has neighbouring rows")
        across, along = self.format.block or (1, 1)
        block = 1
        if self.has("rowwise"):
            block = across
        if self.has("columnwise"):
            block = max(block, along)
        if start % block or (stop % block and stop != self.shape[0]):
            raise ValueError(
                f"rows {start}:{stop} of a {self.format.name} tensor {list(self.shape)}: {block} rows share scales, so a slice begins "
                "and ends at multiples of that, or at the end"
            )
        made: dict[str, Any] = {}
        for prefix, covered in (("", across), ("columnwise_", along)):
            data, scale = getattr(self, f"{prefix}data"), getattr(self, f"{prefix}scale")
            if data is None or scale is None:
                continue
            transposed = bool(prefix) and self.columnwise_transposed
            packed = 2 if transposed and self.format.element == "e2m1" else 1
            codes = data[:, start // packed : stop // packed].contiguous() if transposed else data[start:stop]
            if self.format.block is not None:
                blocks = slice(start // covered, -(-stop // covered))
                scale = scale[:, blocks].contiguous() if transposed else scale[blocks]
            elif self.format.scaling == "row" and not prefix:
                scale = scale[start:stop]
            made |= {f"{prefix}data": codes, f"{prefix}scale": scale}
        if self.columnwise_data is not None and self.columnwise_data is self.data:
            made |= {"columnwise_data": made["data"], "columnwise_scale": made["scale"]}
        return replace(self, shape=(stop - start, self.shape[1]), amax=None, **made)

    def __reduce__(self) -> tuple[Any, ...]:
        """For torch.save; torch.load(weights_only=True) takes it once fourwave is imported. What is loaded is checked."""
        return _loaded, (
            self.format.name, *(getattr(self, name) for name in _TENSORS), self.columnwise_transposed, self.row_hadamard,
            self.column_hadamard,
        )  # fmt: skip

    @property
    def element_format(self) -> ElementFormat:
        """The codes' format, fnuz or not."""
        return self.format.code_format(self._any.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales; shared storage counts once."""
        tensors = (self.data, self.scale, self.columnwise_data, self.columnwise_scale)
        return sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors if t is not None}.values())

    @property
    def _any(self) -> Tensor:
        data = self.data if self.data is not None else self.columnwise_data
        assert data is not None
        return data

    def has(self, direction: str) -> bool:
        """Whether codes of "rowwise" or "columnwise" are there."""
        return (self.data if direction == "rowwise" else self.columnwise_data) is not None

    def hadamard(self, direction: str) -> int | None:
        """Seed of the transform of the "rowwise" or "columnwise" values, or None."""
        return self.row_hadamard if direction == "rowwise" else self.column_hadamard

    def operand(self, direction: str, *, hadamard: int | None = None) -> tuple[Tensor, Tensor, bool]:
        """(codes, scales, k_last) to multiply with, the reduction running along the rows ("rowwise") or the columns.

        hadamard: the transform that the caller knows of; the other operand has the same one.

        k_last: the reduction is the last dimension of the codes as stored; False only for columnwise codes in natural order.
        Raises ValueError where the codes of that direction are missing, or went through another transform.
        """
        pairs = {
            "rowwise": (self.data, self.scale, True),
            "columnwise": (self.columnwise_data, self.columnwise_scale, self.columnwise_transposed),
        }
        if not isinstance(direction, str) or direction not in pairs:
            raise ValueError(f"direction {direction!r}: 'rowwise' or 'columnwise'")
        data, scale, k_last = pairs[direction]
        if (seed := self.hadamard(direction)) != hadamard:
            raise ValueError(
                f"the {direction} codes of this {self.format.name} tensor were made "
                + (
                    "without a Hadamard transform"
                    if seed is None
                    else f"after a Hadamard transform, hadamard_seed={seed}"
                )
                + ", which this product does not reckon with: quantize both operands alike"
            )
        if data is None and self.format.one_copy and (direction == "columnwise" or not self.columnwise_transposed):
            data, scale, _ = pairs["rowwise" if direction == "columnwise" else "columnwise"]
            k_last = direction == "rowwise"
        if data is None or scale is None:
            raise ValueError(
                f"the {self.format.name} tensor {list(self.shape)} has no {direction} codes, which this product reduces over: "
                f"quantize with direction={direction!r} or 'both'"
            )
        return data, scale, k_last

    def dequantize(self, dtype: torch.dtype = torch.float32, *, direction: str | None = None) -> Tensor:
        """The values [R, C] of one direction (default: rowwise where it is there), rounded once to dtype.

        What was transformed (row_hadamard, column_hadamard) is transformed back, in float64. float64 is exact, and so is float32 for MX scales as long as the value is in float32's normal range.
        """
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype is {dtype}; values are float64, float32, bfloat16 or float16")
        if direction is None:
            direction = "rowwise" if self.has("rowwise") else "columnwise"
        if direction not in ("rowwise", "columnwise"):
            raise ValueError(f"direction {direction!r}: 'rowwise' or 'columnwise'")
        if not self.has(direction):
            raise ValueError(f"this {self.format.name} tensor has no {direction} codes: quantize with direction='both'")
        rowwise = direction == "rowwise"
        data, scale = (self.data, self.scale) if rowwise else (self.columnwise_data, self.columnwise_scale)
        assert data is not None and scale is not None
        k_last = rowwise or self.columnwise_transposed
        values = decode_codes(data, self.format)
        values = values * expand_scale(scale, self.format.scaling, values.shape, k_last)
        if not rowwise and self.columnwise_transposed:
            values = values.mT
        if (seed := self.hadamard(direction)) is not None:
            values = inverse_hadamard(values, hadamard_signs(seed), dim=1 if rowwise else 0)
        return values.to(dtype)


def check_device(types: str, device: object) -> None:
    """What `to` takes: Tensor.to would take a type for a conversion. types: what is said of these."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        told = device if isinstance(device, torch.dtype) else f"a {type(device).__name__}"
        raise ValueError(f"to({told}): it takes a device; {types}")


_TENSORS = ("data", "scale", "columnwise_data", "columnwise_scale", "amax")


def _loaded(
    name: str,
    data: Tensor | None,
    scale: Tensor | None,
    columnwise_data: Tensor | None,
    columnwise_scale: Tensor | None,
    amax: Tensor | None,
    transposed: bool,
    row_hadamard: int | None,
    column_hadamard: int | None,
) -> QuantizedTensor:
    q = QuantizedTensor.from_codes(
        name, data, scale, columnwise_data, columnwise_scale, columnwise_transposed=transposed, amax=amax
    )
    for direction, seed, size in (("rowwise", row_hadamard, q.shape[1]), ("columnwise", column_hadamard, q.shape[0])):
        if seed is None:
            continue
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise ValueError(
                f"the {direction} hadamard seed is {seed!r}; it must be an int from 0 to 2^63 - 1, or None"
            )
        if q.format.element != "e2m1" or not q.has(direction) or size % HADAMARD:
            raise ValueError(
                f"{q} has a {direction} hadamard seed: only mxfp4 codes of that direction have one, of a size that is a multiple "
                f"of {HADAMARD}"
            )
    return replace(q, row_hadamard=row_hadamard, column_hadamard=column_hadamard)


torch.serialization.add_safe_globals([_loaded])


def _code_shape(name: str, codes: Tensor, fmt: QuantFormat) -> tuple[int, int]:
    """(rows, columns) in memory of codes, which are checked."""
    if codes.dim() != 2:
        raise ValueError(f"{name} is {tuple(codes.shape)}; it must be a matrix")
    fits = {fmt.code_format().torch_dtype or torch.uint8}
    if fmt.element != "e2m1" and not fmt.is_mx:
        fits.add(fmt.code_format(True).torch_dtype)  # type: ignore[arg-type]
    if codes.dtype not in fits:
        raise ValueError(f"{name} is {codes.dtype}; codes of {fmt.name} are {' or '.join(sorted(map(str, fits)))}")
    return codes.shape[0], codes.shape[1] * (2 if fmt.element == "e2m1" else 1)


def _stored_scale(name: str, scale: Tensor, shape: tuple[int, ...], fmt: QuantFormat, codes: Tensor) -> Tensor:
    """scale as the class holds it."""
    mx = formats.E8M0.torch_dtype or torch.uint8
    if fmt.is_mx and scale.dtype == torch.uint8:
        scale = scale.view(mx)
    wanted = mx if fmt.is_mx else torch.float32
    if scale.dtype != wanted:
        raise ValueError(f"{name} is {scale.dtype}; scales of {fmt.name} are {wanted}")
    if scale.device != codes.device:
        raise ValueError(f"{name} is on {scale.device} and its codes are on {codes.device}")
    if tuple(scale.shape) != shape and not (fmt.scaling == "tensor" and scale.numel() == 1):
        raise ValueError(f"{name} is {tuple(scale.shape)}; these codes of {fmt.name} have scales {shape}")
    return scale.reshape(shape).contiguous()


def decode_codes(data: Tensor, fmt: QuantFormat) -> Tensor:
    """float64 values of codes as QuantizedTensor holds them; mxfp4 is unpacked."""
    if fmt.element == "e2m1":
        return formats.decode(formats.unpack_e2m1(data), formats.E2M1, torch.float64)
    return data.to(torch.float64)
