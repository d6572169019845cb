"""Triton's kernels as a witness of the tensor data mover and of gfx1250's transposing LDS reads.

The modules are Triton 3.9's (witness/tdm_kernels.py makes them): descriptors, padding, waits and fragment layouts as its authors tested them on
hardware. Tensor edges cut tiles in every dimension; strides are wider than the tensors; what lies outside must stay as it is.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fourwave.sim.module import run_module
from fourwave.sim.report import Report

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
CODES: dict[str, Any] = {"i8": np.uint8, "f16": np.uint16, "f32": np.uint32}


@lru_cache(maxsize=1)
def modules() -> dict[str, dict]:
    return json.loads(lzma.decompress((Path(__file__).parent / "witness" / "tdm_modules.json.xz").read_bytes()))


def codes(shape: tuple[int, ...], element: str) -> np.ndarray:
    return np.random.default_rng(3).integers(1, 250, shape).astype(CODES[element])


def run(name: str, arguments: list, grid: tuple[int, int, int], **options: Any) -> Report:
    module = modules()[name]
    report = run_module(module["text"], arguments, grid, module["threads"], "gfx1250", module["shared"], **options)
    assert not report.findings, report
    return report


# Which part of a tensor of this shape a kernel copies: shape in memory, extents, grid, the slices copied.
COPIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, int, int], tuple[slice, ...]]] = {
    "copy1-i8": ((512,), (300,), (3, 1, 1), (slice(300),)),
    "copy2-f16": ((53, 112), (53, 91), (4, 3, 1), (slice(53), slice(91))),
    "copy2-i8-one-wave": ((53, 208), (50, 187), (4, 3, 1), (slice(50), slice(187))),
    "copy3-f32": ((5, 16, 48), (5, 13, 25), (3, 2, 1), (slice(5), slice(13), slice(25))),
    "copy4-i8": ((6, 4, 4, 80), (5, 3, 3, 61), (3, 1, 1), (slice(5), slice(3), slice(3), slice(61))),
    "copy5-f16": ((6, 3, 4, 4, 48), (5, 2, 3, 4, 29), (3, 1, 1), (slice(5), slice(2), slice(2, 3), slice(4), slice(29))),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("completion", ["late", "early"])
def test_copies(name: str, completion: str) -> None:
    shape, extents, grid, part = COPIES[name]
    source = codes(shape, name.split("-")[1])
    target, want = np.zeros_like(source), np.zeros_like(source)
    want[part] = source[part]
    strides = [s // source.itemsize for s in source.strides[:-1]]
    run(name, [source, target, *extents, *strides], grid, completion=completion)
    np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("name", ["gather-i8-i16", "gather-f32-i32", "scatter-f16-i16", "scatter-f32-i32"])
@pytest.mark.parametrize("completion", ["late", "early"])
def test_rows_by_index(name: str, completion: str) -> None:
    """32 rows of a tensor of 70, some of the indices past it."""
    what, element, width = name.split("-")
    columns = 128 if element == "i8" else 64
    index = np.random.default_rng(5).permutation(80)[:32].astype(np.int16 if width == "i16" else np.int32)
    assert (index >= 70).any()
    tensor, rows = codes((70, columns + 16), element), codes((32, columns), element)
    if what == "gather":
        out = np.zeros_like(rows)
        run(name, [tensor, index, out, 70, columns, columns + 16], (2, 1, 1), completion=completion)
        want = np.where((index < 70)[:, None], tensor[np.minimum(index, 69), :columns], 0)
    else:
        out, want = np.zeros_like(tensor), np.zeros_like(tensor)
        run(name, [rows, index, out, 70, columns, columns + 16], (2, 1, 1), completion=completion)
        for i, row in enumerate(index):
            if row < 70:
                want[row, :columns] = rows[i]
    np.testing.assert_array_equal(out, want)


ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda x: x.astype(np.float16),
    "fp8": lambda x: x.astype(ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("name", ["dot-f16-nk", "dot-f16-kn", "dot-fp8-kn"])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:4"])
def test_products_of_tiles_that_the_data_mover_loads(name: str, schedule: str) -> None:
    """B stored [k, n] is read by ds_load_tr16_b128 (fp16) and ds_load_tr8_b64 (fp8)."""
    _, element, stored = name.split("-")
    assert ("ds.load.tr" in modules()[name]["text"]) == (stored == "kn")
    rng = np.random.default_rng(9)
    m, n, k = 100, 112, 160
    a, b = (ROUND[element](rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-2, 3, (rows, 1))) for rows in (m, n))
    right = b if stored == "nk" else np.ascontiguousarray(b.T)
    out = np.full((m, 128), np.nan, np.float32)
    run(name, [a, right, out, m, n, k, k, right.shape[1], 128], (2, 2, 1), schedule=schedule)
    x, y = a.astype(np.float64), b.astype(np.float64)
    error, bound = np.abs(out[:, :n] - x @ y.T), k * 2.0**-24 * (np.abs(x) @ np.abs(y).T)
    assert (error <= bound).all()
    assert np.isnan(out[:, n:]).all()
