"""examples/pretrain.py runs as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *options: str) -> tuple[str, Any]:
    out = tmp_path / "losses.json"
    command = [sys.executable, str(ROOT / "examples" / "pretrain.py"), "--device", "cpu", "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


def test_dense(tmp_path: Path) -> None:
    text, record = run(tmp_path, "--steps", "12", "--every", "0", "--recipes", "bf16,fp8,mxfp8")
    losses = record["losses"]
    assert list(losses) == ["bf16", "fp8", "mxfp8"] and "of bf16" in text
    for name, values in losses.items():
        assert len(values) == 12 and values[-1] < values[0] - 0.5, (name, values)
        # The same start and data: quantization moves the first loss by less than 1%.
        assert abs(values[0] / losses["bf16"][0] - 1) < 0.01
    assert losses["fp8"] != losses["bf16"] != losses["mxfp8"]
    # The same seed gives the same run.
    _, again = run(tmp_path, "--steps", "2", "--every", "0", "--recipes", "mxfp8")
    assert again["losses"]["mxfp8"][0] == losses["mxfp8"][0]


@pytest.mark.slow
def test_mixture_of_experts(tmp_path: Path) -> None:
    _, record = run(tmp_path, "--steps", "8", "--every", "0", "--recipes", "bf16,mxfp8", "--moe")
    for values in record["losses"].values():
        assert values[-1] < values[0] - 0.3


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (of the bench extra) is not installed")
    image = tmp_path / "losses.png"
    run(tmp_path, "--steps", "3", "--recipes", "bf16", "--plot", str(image))
    assert image.read_bytes().startswith(b"\x89PNG")
