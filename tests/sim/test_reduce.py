"""llvm.intr.vector.reduce.*, against numpy. fadd and fmul start from their first operand and go on in order (LLVM Language Reference)."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import pytest
from machine import PROLOGUE, launch, load_item, lower, store_item

pytestmark = pytest.mark.archs("gfx942", "gfx950", "gfx1250")

INTEGER = {
    "add": np.add, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "smax": np.maximum, "smin": np.minimum,
}  # fmt: skip
UNSIGNED = {"umax": np.maximum, "umin": np.minimum}
FLOAT = {"fmax": np.maximum, "fmin": np.minimum, "fmaximum": np.maximum, "fminimum": np.minimum}


def run(vector: str, text: str, scalar: str, values: np.ndarray) -> np.ndarray:
    body = PROLOGUE + load_item("%v", vector, "%in") + text + store_item("%r", scalar, "%out")
    out = np.zeros(64, values.dtype)
    launch(lower(body, "%in: !llvm.ptr<1>, %out: !llvm.ptr<1>"), values, out)
    return out


@pytest.mark.parametrize(("t", "dtype"), [("i32", np.int32), ("i64", np.int64), ("i16", np.int16), ("i8", np.int8)])
@pytest.mark.parametrize("name", [*INTEGER, *UNSIGNED])
def test_integers(name: str, t: str, dtype: type) -> None:
    info = np.iinfo(dtype)
    values = np.random.default_rng(0).integers(info.min, info.max, (64, 4), dtype=dtype, endpoint=True)
    if name in UNSIGNED:
        values = values.view(np.dtype(dtype).str.replace("i", "u"))
    got = run(f"vector<4x{t}>", f'\n  %r = "llvm.intr.vector.reduce.{name}"(%v) : (vector<4x{t}>) -> {t}', t, values)
    with np.errstate(over="ignore"):
        want = (INTEGER | UNSIGNED)[name].reduce(values, axis=1, dtype=values.dtype)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", FLOAT)
@pytest.mark.parametrize(("t", "dtype"), [("f32", np.float32), ("f16", np.float16)])
def test_largest_and_smallest(name: str, t: str, dtype: type) -> None:
    values: np.ndarray = np.random.default_rng(1).standard_normal((64, 8)).astype(dtype)
    values[3, 5] = np.nan
    got = run(f"vector<8x{t}>", f'\n  %r = "llvm.intr.vector.reduce.{name}"(%v) : (vector<8x{t}>) -> {t}', t, values)
    want = FLOAT[name].reduce(values, axis=1)
    if len(name) == 4:  # maxnum and minnum pass a NaN by
        want = (np.nanmax if name == "fmax" else np.nanmin)(values, axis=1)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("name", "step"), [("fadd", lambda x, y: x + y), ("fmul", lambda x, y: x * y)])
def test_sums_and_products_go_in_order(name: str, step: Any) -> None:
    values = np.random.default_rng(2).standard_normal((64, 8)).astype(np.float32) * 1000
    text = f'\n  %start = llvm.mlir.constant(1.5 : f32) : f32\n  %r = "llvm.intr.vector.reduce.{name}"(%start, %v) : (f32, vector<8xf32>) -> f32'
    want = [reduce(step, row, np.float32(1.5)) for row in values]
    np.testing.assert_array_equal(run("vector<8xf32>", text, "f32", values), np.array(want, np.float32))
