"""Triton's kernels in the simulator, against float64: an independent witness of the matrix instructions' layouts
(docs/simulator_witnesses.md).

The committed modules were compiled by Triton 3.9.0 (witness/record.py). Where Triton can be imported, or TRITON_PYTHON
names an interpreter that has it, they are compiled anew as well.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "witness"))
import record
import triton_cases as cases

pytestmark = pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
MODULES = record.load_modules()
CASES = {c["id"]: c for c in cases.cases()}
QUICK = re.compile(
    r"gfx942-dot-(fp8_fnuz-bf8_fnuz-64x64x64-w4-32|i8-i8-.*-16)|gfx950-dot-bf16-bf16-64x64x64-w4-16|gfx950-dot_scaled-(fp8-fp4|fp4-bf8)-"
    r"64x64x128-w4-(16|32)|gfx1250-dot-(f16-f16-64|fp8-bf8-64x64x128)|gfx1250-dot_scaled-(fp8-fp4|bf8-bf8)-64"
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if QUICK.search(n) else pytest.mark.slow) for n in sorted(MODULES)]
)
def test_committed_module(name: str) -> None:
    assert cases.run_case(CASES[name], MODULES[name]) < 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "gfx950-dot_scaled-fp8-fp4-64x64x128-w4-16-nk",
            ("opsel", r"(mfma\.scale.*?fp4_e2m1, fp8_e4m3, )0(, %\w+, )0", r"\g<1>1\g<2>1"),
        ),
        ("gfx950-dot_scaled-fp8-fp4-64x64x128-w4-16-nk", ("formats", r"fp4_e2m1, fp8_e4m3", "fp4_e2m1, fp8_e5m2")),
    ],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_a_wrong_module_is_seen(name: str, wrong: tuple[str, str, str]) -> None:
    line = MODULES[name]
    _, pattern, replacement = wrong
    text = re.sub(pattern, replacement, line["text"])
    assert text != line["text"]
    assert cases.run_case(CASES[name], line | {"text": text}) > 1


def test_the_table_is_what_the_records_give() -> None:
    records = json.loads(record.RECORDS.read_text())
    assert record.table(records) in record.DOCS.read_text()


def test_every_matrix_instruction_that_triton_emits_is_recorded() -> None:
    records = json.loads(record.RECORDS.read_text())["triton"]
    for name, line in MODULES.items():
        found = cases.matrix_operations(line["text"])
        assert found, name
        for operation in found:
            assert name in records[f"{CASES[name]['arch']} {operation}"]


def triton_python() -> str | None:
    named = os.environ.get("TRITON_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("triton") else None)


@pytest.mark.slow
def test_compiled_anew() -> None:
    python = triton_python()
    if python is None:
        pytest.skip("Triton is not installed, and TRITON_PYTHON names no interpreter that has it: make witness")
    wanted = [c for c in cases.cases() if c["id"] in MODULES]
    lines = cases.capture(python, wanted)
    for c in wanted:
        assert "error" not in lines[c["id"]], lines[c["id"]]
        assert cases.run_case(c, lines[c["id"]], seed=1) < 1, c["id"]
