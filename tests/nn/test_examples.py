"""examples/pretrain.py runs as it stands."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, *options: str) -> tuple[str, Any]:
    out = tmp_path / "losses.json"
    command = [sys.executable, str(ROOT / "examples" / "pretrain.py"), "--device", "cpu", "--out", str(out), *options]
    # The fourwave that this process has, whether it is installed or on a relative PYTHONPATH.
    found = os.pathsep.join(
        path for path in (str(Path(fourwave.__path__[0]).parent), os.environ.get("PYTHONPATH", "")) if path
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.fixture(scope="module")
def pretrain() -> Any:
    spec: Any = importlib.util.spec_from_file_location("pretrain", ROOT / "examples" / "pretrain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dense(tmp_path: Path) -> None:
    text, record = run(
        tmp_path,
        "--steps",
        "12",
        "--every",
        "0",
        "--recipes",
        "bf16,fp8,delayed,mxfp8",
        "--held-out",
        "20000",
        "--lr",
        "3e-3",
    )
    losses = record["losses"]
    assert list(losses) == ["bf16", "fp8", "delayed", "mxfp8"] and "of bf16" in text
    for name, values in losses.items():
        assert len(values) == 12 and values[-1] < values[0] - 0.5, (name, values)
        # The same start and data: quantization moves the first loss by less than 1%.
        assert abs(values[0] / losses["bf16"][0] - 1) < 0.01
    assert len({tuple(values) for values in losses.values()}) == 4
    # The model has learnt what it has not seen, and is compared by that.
    held_out = record["held_out"]
    for name, loss in held_out.items():
        assert abs(loss / losses[name][-1] - 1) < 0.1, (name, loss, losses[name][-1])
    assert f"{100 * (held_out['fp8'] / held_out['bf16'] - 1):+.2f}% of bf16" in text
    # The same seed gives the same run.
    _, again = run(tmp_path, "--steps", "2", "--every", "0", "--recipes", "mxfp8", "--held-out", "9000", "--lr", "3e-3")
    assert again["losses"]["mxfp8"][0] == losses["mxfp8"][0] and again["bytes_held_out"] == 9000


def test_what_cannot_be_written_is_told_before_training(
    tmp_path: Path, pretrain: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(pretrain, "library_source", lambda *_: pytest.fail("it trains"))
    monkeypatch.setattr(pretrain.importlib.util, "find_spec", lambda name: None)
    for option, path, says in (
        ("--out", tmp_path / "none" / "x.json", "there is no folder"),
        ("--plot", tmp_path / "none" / "x.png", "there is no folder"),
        ("--plot", tmp_path / "x.png", "--plot needs matplotlib"),
    ):
        monkeypatch.setattr(sys, "argv", ["pretrain.py", option, str(path)])
        with pytest.raises(SystemExit):
            pretrain.main()
        assert says in capsys.readouterr().err


def test_held_out_text_is_not_trained_on(pretrain: Any) -> None:
    train, held_out = (bytes(text.numpy()) for text in pretrain.library_source(8_000_000, 8_000_000))
    files = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    assert len(train) + len(held_out) == sum(map(len, files)) and len(held_out) > len(train) / 40
    assert held_out.startswith(files[8]) and files[8] not in train and files[24] in held_out


def test_held_out_loss_is_the_mean_over_every_byte(pretrain: Any) -> None:
    """Windows of 5 that share their ends, in batches of which the last is smaller; each byte but the first is predicted once."""
    text = torch.arange(48, dtype=torch.uint8)
    seen = []

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = torch.nn.Parameter(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            assert not self.training and not torch.is_grad_enabled()
            seen.append(len(ids))
            return self.logits[ids]

    model = Table()
    loss = pretrain.held_out_loss(model, text, 4, 5, "fp32")
    right = torch.nn.functional.cross_entropy(model.logits[text[:45].long()], text[1:46].long())
    assert loss == pytest.approx(float(right), rel=1e-6) and seen == [4, 4, 1] and model.training


@pytest.mark.slow
def test_mixture_of_experts(tmp_path: Path) -> None:
    _, record = run(tmp_path, "--steps", "8", "--every", "0", "--recipes", "bf16,mxfp8", "--moe", "--lr", "3e-3")
    for values in record["losses"].values():
        assert values[-1] < values[0] - 0.3


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (of the bench extra) is not installed")
    image = tmp_path / "losses.png"
    run(tmp_path, "--steps", "3", "--recipes", "bf16", "--plot", str(image))
    assert image.read_bytes().startswith(b"\x89PNG")
