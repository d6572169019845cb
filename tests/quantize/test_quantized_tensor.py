"""QuantizedTensor as an object: devices, slices of rows, torch.save, copies; codes for gfx942 where that is the backend."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.quantize import FORMATS, QuantizedTensor

FIELDS = ("data", "scale", "columnwise_data", "columnwise_scale", "amax")


def made(name: str, direction: str = "both", transposed: bool = False, rows: int = 300) -> QuantizedTensor:
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)) * torch.arange(1, rows + 1)[:, None]
    return fw.quantize(x, name, direction, columnwise_transposed=transposed)


def same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.format, a.shape, a.columnwise_transposed) == (b.format, b.shape, b.columnwise_transposed)
    assert (a.row_hadamard, a.column_hadamard) == (b.row_hadamard, b.column_hadamard)
    for field in FIELDS:
        left, right = getattr(a, field), getattr(b, field)
        assert (left is None) == (right is None), field
        if left is not None:
            assert left.dtype == right.dtype and left.shape == right.shape, field
            assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))), field


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_save_and_load(name: str, transposed: bool, tmp_path: Path) -> None:
    """torch.load with weights_only=True, which is its default; shared storage stays shared; a copy is equal."""
    q = made(name, transposed=transposed, rows=64)
    torch.save({"w": q}, tmp_path / "q.pt")
    loaded = torch.load(tmp_path / "q.pt", weights_only=True)["w"]
    same(loaded, q)
    assert loaded.nbytes == q.nbytes
    same(copy.deepcopy(q), q)


def test_what_is_loaded_is_checked() -> None:
    q = made("fp8_row", "rowwise", rows=64)
    broken = QuantizedTensor(q.format, q.shape, q.data, torch.ones(3))
    file = io.BytesIO()
    torch.save(broken, file)
    file.seek(0)
    with pytest.raises(ValueError, match="scale"):
        torch.load(file, weights_only=True)


def test_types_are_no_devices_and_codes_no_values() -> None:
    """Tensor.to takes float, a tensor or a dtype for a conversion, which would turn codes into numbers."""
    q = made("mxfp8_e4m3", rows=64)
    for wrong in (torch.float32, float, 3.5, torch.zeros(1), True, None):
        with pytest.raises(ValueError, match="it takes a device; a quantized tensor has the types of its format"):
            q.to(wrong)  # type: ignore[arg-type]
    for dtype in ("float32", torch.int8, torch.float8_e4m3fn, None):
        with pytest.raises(ValueError, match="values are float64, float32"):
            q.dequantize(dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'rowwise' or 'columnwise'"):
        q.operand(["rowwise"])  # type: ignore[arg-type]


class Written:
    """Saved as a QuantizedTensor of these parts would be."""

    def __init__(self, q: QuantizedTensor, **changes: Any) -> None:
        function, parts = q.__reduce__()
        names = ("format", *FIELDS, "transposed", "row_hadamard", "column_hadamard")
        self.reduced = function, tuple((dict(zip(names, parts, strict=True)) | changes).values())

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("mxfp4", {"row_hadamard": -3}, "rowwise hadamard seed is -3"),
        ("mxfp4", {"column_hadamard": 2**80}, "columnwise hadamard seed is 12089"),
        ("mxfp4", {"row_hadamard": "x"}, "rowwise hadamard seed is 'x'"),
        ("mxfp4", {"row_hadamard": True}, "rowwise hadamard seed is True"),
        ("mxfp8_e4m3", {"row_hadamard": 5}, "only mxfp4"),
        ("mxfp4", {"columnwise_data": None, "columnwise_scale": None, "column_hadamard": 5}, "codes of that direction"),
        ("mxfp4", {"amax": "evil"}, "amax is of type str"),
        ("mxfp4", {"amax": torch.zeros(3, 3)}, r"amax is \(3, 3\)"),
        ("mxfp4", {"amax": torch.zeros((), dtype=torch.int64)}, "amax is .*int64"),
        ("mxfp4", {"data": "x"}, "data is of type str"),
        ("mxfp4", {"scale": torch.zeros(2, 2).to_sparse()}, "scale is torch.sparse_coo"),
        ("mxfp4", {"transposed": 7}, "columnwise_transposed is 7"),
        ("mxfp4", {"format": ["a"]}, r"format \['a'\]"),
        ("mxfp4", {"format": None}, "format None"),
    ],
)
def test_every_part_of_what_is_loaded_is_checked(name: str, changes: dict[str, Any], text: str) -> None:
    file = io.BytesIO()
    torch.save(Written(made(name, rows=64), **changes), file)
    file.seek(0)
    with pytest.raises(ValueError, match=text):
        torch.load(file, weights_only=True)


def test_seeds_of_sizes_that_have_no_transform_are_not_loaded() -> None:
    file = io.BytesIO()
    torch.save(Written(fw.quantize(torch.randn(4, 34), "mxfp4"), row_hadamard=5), file)
    file.seek(0)
    with pytest.raises(ValueError, match="a multiple of 16"):
        torch.load(file, weights_only=True)


def test_codes_of_another_type_or_device_are_refused() -> None:
    q = made("fp8_row", rows=64)
    with pytest.raises(ValueError, match="data is of type str"):
        QuantizedTensor.from_codes("fp8_row", "x", "y")  # type: ignore[arg-type]
    assert q.columnwise_data is not None and q.columnwise_scale is not None
    with pytest.raises(ValueError, match="data is on cpu and columnwise_data on meta"):
        QuantizedTensor.from_codes(
            "fp8_row", q.data, q.scale, q.columnwise_data.to("meta"), q.columnwise_scale.to("meta")
        )
    amax = torch.ones(1)
    assert QuantizedTensor.from_codes("fp8_row", q.data, q.scale, amax=amax).amax.shape == ()  # type: ignore[union-attr]


def test_hadamard_seeds_are_kept() -> None:
    q = fw.quantize(torch.randn(64, 64), "mxfp4", "both", hadamard="columnwise", hadamard_seed=7)
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same(loaded, q)
    assert loaded.column_hadamard == 7
    same(q.to("cpu"), q)
    assert torch.equal(q[32:].dequantize(direction="columnwise"), q.dequantize(direction="columnwise")[32:])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_128x128", "mxfp8_e4m3", "mxfp4"])
def test_to(name: str) -> None:
    q = made(name)
    moved = q.to("meta")
    assert moved.device.type == "meta"
    for field in FIELDS:
        assert (getattr(moved, field) is None) == (getattr(q, field) is None)
    if q.columnwise_data is q.data:
        assert moved.columnwise_data is moved.data
    same(q.to("cpu"), q)
    with pytest.raises(ValueError, match="dequantize"):
        q.to(torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_rows(name: str, direction: str, transposed: bool) -> None:
    """Slices dequantize to the rows of the whole; a slice through a block of scales is refused."""
    q = made(name, direction, transposed and direction != "rowwise")
    whole = {each: q.dequantize(direction=each) for each in ("rowwise", "columnwise") if q.has(each)}
    for rows in (slice(128, 256), slice(0, 128), slice(256, None), slice(None), slice(128, 128)):
        part = q[rows]
        for each, values in whole.items():
            assert torch.equal(part.dequantize(direction=each), values[rows]), rows
        for field in ("scale", "columnwise_scale"):
            assert (t := getattr(part, field)) is None or t.is_contiguous()
        assert part.amax is None
        if direction == "both" and rows.stop != 128:
            again = QuantizedTensor.from_codes(
                name, part.data, part.scale, part.columnwise_data, part.columnwise_scale, columnwise_transposed=transposed
            )  # fmt: skip
            assert again.shape == part.shape
    block = FORMATS[name].block
    shares = block is not None and (block[0] > 1 or q.has("columnwise"))
    if shares:
        with pytest.raises(ValueError, match="multiples"):
            q[16:144]
        with pytest.raises(ValueError, match="multiples"):
            q[128:200]
    else:
        assert torch.equal(q[5:77].dequantize(), q.dequantize()[5:77])


def test_indices() -> None:
    q = made("fp8_row", "rowwise", rows=64)
    with pytest.raises(TypeError, match="slice"):
        q[3]  # type: ignore[index]
    with pytest.raises(ValueError, match="steps"):
        q[::2]
    assert q[40:20].shape == (0, 256)
    assert torch.equal(q[-8:].dequantize(), q.dequantize()[-8:])
    x = torch.randn(4, 256)
    assert torch.equal(fw.gemm(x, q[:16], backend="native"), fw.gemm(x, q, backend="native")[:, :16])


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
def test_codes_are_those_that_the_backend_reads() -> None:
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    assert fw.quantize(x, "fp8_e4m3").data.dtype == torch.float8_e4m3fn  # type: ignore[union-attr]
    for backend, dtype in (("sim:gfx942", torch.float8_e4m3fnuz), ("sim:gfx950", torch.float8_e4m3fn)):
        qx, qw = (fw.quantize(t, "fp8_e4m3", backend=backend) for t in (x, w))
        assert qx.data is not None and qx.data.dtype == dtype
        fw.gemm(qx, qw, backend=backend)
        with fw.use_backend(f"fp8={backend}"):
            inside = fw.quantize(x, "fp8_e4m3")
            assert inside.data is not None and inside.data.dtype == dtype
        one = torch.ones(())
        y = fw.gemm(x.bfloat16(), w.bfloat16(), out_format="fp8_e4m3", out_scale=one, backend=backend)
        assert y.data.dtype == dtype
        assert fw.quantize(x, "mxfp8_e4m3", backend=backend).data.dtype == torch.float8_e4m3fn  # type: ignore[union-attr]
    ocp = fw.quantize(x, "fp8_e4m3", fnuz=False)
    with pytest.raises(NotImplementedError, match="fnuz=True"):
        fw.gemm(ocp, ocp, backend="sim:gfx942")
