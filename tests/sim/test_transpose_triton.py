"""Triton's kernels as a witness of the transposing LDS reads: B stored [k, n], so a wrong lane or element would put a value at another k or n.

The modules are Triton 3.9's (witness/transpose_kernels.py makes them), with layouts its authors tested on hardware.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
from functools import lru_cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fourwave.sim.module import run_module

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
READS = {
    "gfx950": {"bf16": "tr16.b64", "fp8": "tr8.b64", "fp4": "tr4.b64"},
    "gfx1250": {"bf16": "tr16.b128", "fp8": "tr8.b64", "fp4": "tr4.b64"},
}
TYPES = {"bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn, "fp4": ml_dtypes.float4_e2m1fn}
NAMES = [f"gfx950-{e}-{s}" for e in TYPES for s in (16, 32)] + [f"gfx1250-{e}-16" for e in TYPES]


@lru_cache(maxsize=1)
def modules() -> dict[str, dict]:
    return json.loads(lzma.decompress((Path(__file__).parent / "witness" / "transpose_modules.json.xz").read_bytes()))


def packed(values: np.ndarray) -> np.ndarray:
    codes = values.view(np.uint8)
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)


@pytest.mark.parametrize("name", NAMES)
def test_products(name: str) -> None:
    module, (arch, element, _) = modules()[name], name.split("-")
    assert re.search(rf"ds\.(read|load)\.{READS[arch][element]}\b", module["text"])
    rng = np.random.default_rng(1)
    m, n, k = 128, 192, 256
    left = "fp4" if name == "gfx1250-fp4-16" else "fp8" if element == "fp4" else element
    a = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-1, 2, (m, 1))).astype(TYPES[left])
    b = (rng.standard_normal((k, n)) * 2.0 ** rng.integers(-1, 2, (1, n))).astype(TYPES[element])
    x, y = a.astype(np.float64), b.astype(np.float64)
    out = np.full((m, n), np.nan, np.float32)
    if element == "fp4":
        sa, sb = (rng.integers(119, 136, (rows, k // 32)).astype(np.uint8) for rows in (m, n))
        x = x * np.repeat(2.0 ** (sa.astype(float) - 127), 32, axis=1)
        y = y * np.repeat(2.0 ** (sb.astype(float) - 127), 32, axis=1).T
        stored_a, stored_b = packed(a) if left == "fp4" else a, packed(b)
        arguments = [stored_a, stored_b, out, sa, sb, k, stored_a.shape[1], n // 2, n, k // 32, k // 32]
    else:
        arguments = [a, b, out, k, k, n, n]
    report = run_module(module["text"], arguments, (m // 64, n // 64, 1), module["threads"], arch, module["shared"])
    assert not report.findings, report
    assert (np.abs(out - x @ y) <= k * 2.0**-24 * (np.abs(x) @ np.abs(y))).all()
