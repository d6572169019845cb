"""docs/simulator_triton.md: its Triton kernel, captured and run as the page says.

The module that capture.py made with Triton 3.9.0 is committed (witness/row_sums.json); where Triton can be imported, or TRITON_PYTHON names an
interpreter that has it, it is made anew.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourwave import sim

PAGE = Path(__file__).parents[2] / "docs" / "simulator_triton.md"
MODULE = Path(__file__).parent / "witness" / "row_sums.json"


def page() -> tuple[str, str, str]:
    """The two scripts, and what the second prints."""
    text = PAGE.read_text(encoding="utf-8")
    capture, run = re.findall(r"^```py\n(.*?)^```\n", text, re.M | re.S)
    return capture, run, re.findall(r"^```text\n(.*?)^```\n", text, re.M | re.S)[1]


def comparable(text: str) -> list[str]:
    text = re.sub(r"\d+\.\d+ s\b|0x[0-9a-f]+", "#", text)
    return [re.sub(r"^\S*capture\.py", "capture.py", line) for line in text.splitlines()]


def portable(text: str) -> str:
    """A module without the folders of its source files."""
    return re.sub(r' in "/[^"]*"', ' in ""', re.sub(r'"/[^"]*/(\w+\.py)"', r'"\1"', text))


def run_page(folder: Path, run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(compile(run, "run.py", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
def test_the_page_shows_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture, run, shown = page()
    (tmp_path / "row_sums.json").write_bytes(MODULE.read_bytes())
    assert comparable(run_page(tmp_path, run, monkeypatch, capsys)) == comparable(shown)
    found = re.search(r"^capture\.py:(\d+): memory", shown, re.M)
    assert found and "tl.load(x + row" in capture.splitlines()[int(found[1]) - 1]


@pytest.mark.slow
@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
def test_the_page_captures_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = os.environ.get("TRITON_PYTHON") or (sys.executable if importlib.util.find_spec("triton") else None)
    if python is None:
        pytest.skip("Triton is not installed, and TRITON_PYTHON names no interpreter that has it: make witness")
    capture, run, shown = page()
    (tmp_path / "capture.py").write_text(capture, encoding="utf-8")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": ""}
    subprocess.run([python, "capture.py"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    made, kept = (json.loads(file.read_text(encoding="utf-8")) for file in (tmp_path / "row_sums.json", MODULE))
    assert (made["threads"], made["shared"]) == (kept["threads"], kept["shared"])
    assert portable(made["text"]) == kept["text"]
    assert comparable(run_page(tmp_path, run, monkeypatch, capsys)) == comparable(shown)


DOUBLE = """
module {
  llvm.func @double(%x: !llvm.ptr<1>, %n: i32, %f: f32) attributes {rocdl.kernel} {
    %v = llvm.load %x : !llvm.ptr<1> -> f32
    %w = llvm.fmul %v, %f : f32
    llvm.store %w, %x : f32, !llvm.ptr<1>
    llvm.return
  }
}
"""


@pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
def test_arguments_that_do_not_fit() -> None:
    x = np.full(4, 3.0, np.float32)
    fitting: dict[str, Any] = {"arguments": [x, 4, 2.0], "grid": 1, "block": 1}
    assert not sim.run_module(DOUBLE, **fitting).findings and x.tolist() == [6, 3, 3, 3]
    sim.run_module(DOUBLE, [x, np.int64(4), np.float32(2)], grid=[1, 1, 1], block=(1, 1, 1), checks=["memory"])  # type: ignore[arg-type]
    assert x[0] == 12
    for change, said in (
        ({"arguments": [[1.0, 2.0], 4, 2.0]}, "for a pointer .*numpy array, a CPU tensor or None"),
        ({"arguments": [5, 4, 2.0]}, "5 for a pointer"),
        ({"arguments": [torch.empty(4, device="meta"), 4, 2.0]}, "a tensor on meta"),
        ({"arguments": [x, 5.0, 2.0]}, "5.0 for an argument of type i32; it takes an int"),
        ({"arguments": [x, torch.zeros(3), 2.0]}, "for an argument of type i32"),
        ({"arguments": [x, 1 << 40, 2.0]}, "does not fit an argument of type i32"),
        ({"arguments": [x, 4, "two"]}, "'two' for an argument of type f32; it takes a number"),
        ({"arguments": [x, 4]}, "takes 3 arguments"),
        ({"grid": (1,)}, r"grid=\(1,\); it takes an int, for x, or three"),
        ({"block": 1.5}, "block=1.5"),
        ({"speed": 3}, "unknown options speed; the options are checks, completion"),
    ):
        with pytest.raises(ValueError, match=said):
            sim.run_module(DOUBLE, **(fitting | change))
    assert x[0] == 12
