"""The tables of docs/recipes.md are what the code does, those of docs/training.md what was recorded."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave as fw

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    rows = TEXT[TEXT.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def recipe(cell: str) -> Any:
    return eval(cell.strip("`"), vars(fw.recipes))


@pytest.mark.parametrize("row", table("| recipe | kept of x"), ids=lambda row: row[0])
def test_bytes_that_are_kept(row: list[str]) -> None:
    size = 512
    linear: Any = fw.nn.Linear(size, size, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(size, size, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), fw.autocast(recipe=recipe(row[0])):
        linear(x)
    weight = linear.weight.untyped_storage().data_ptr()
    saved = [t for t in saved if t.shape != (3, 4)]  # the scales themselves
    half = len(saved) // 2
    kept_x = sum(t.nbytes for t in saved[:half]) / size**2
    kept_w = sum(t.nbytes for t in saved[half:] if t.untyped_storage().data_ptr() != weight) / size**2
    assert kept_x == pytest.approx(float(row[1]), abs=1e-4) and kept_w == pytest.approx(float(row[2]), abs=1e-4)


@pytest.mark.parametrize("row", table("| recipe | x | w | dy"), ids=lambda row: row[0])
def test_formats(row: list[str]) -> None:
    plan = recipe(row[0]).plan
    named = [re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell)) for cell in row[1:4]]
    for names, pair in zip(named, ((plan.x, plan.x_t), (plan.w, plan.w_t), (plan.g, plan.g_t)), strict=True):
        expected = [names[0], names[-1]] if names else [None, None]
        assert list(pair) == expected


def test_bytes_of_delayed_state() -> None:
    linear = fw.nn.Linear(32, 32, recipe=fw.recipes.DelayedScaling(amax_history_len=20))
    assert "12 * (amax_history_len + 1)" in TEXT
    assert sum(t.nbytes for name, t in linear.state_dict().items() if "delayed" in name) == 12 * 21


def shown(heading: str) -> list[list[str]]:
    """Cells of the rows of the table of losses under a heading of docs/training.md."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split(heading)[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip(" |") for cell in row] for row in rows]


def final(losses: list[float]) -> float:
    return sum(losses[-100:]) / 100


def test_losses_of_the_tiny_model_are_those_of_the_record() -> None:
    losses = json.loads((ROOT / "bench" / "records" / "cpu_pretrain_tiny.json").read_text())["losses"]
    means = [final(values) for values in losses.values()]
    rows = shown("## On a CPU")
    assert len(rows) == len(means) == 6
    expected = {(f"{mean:.4f}", f"{100 * (mean / means[0] - 1):+.2f}%" if i else "") for i, mean in enumerate(means)}
    assert {tuple([*row, ""][1:3]) for row in rows} == expected


R = fw.recipes
TRAINED = {
    "bf16": R.Unquantized(), "fp32": R.Unquantized(), "fp8": R.CurrentScaling(), "delayed_e4m3": R.DelayedScaling("e4m3", amax_history_len=16),
    "mxfp8": R.MXFP8(), "mxfp4": R.MXFP4(), "delayed": R.DelayedScaling(amax_history_len=16), "delayed_1024": R.DelayedScaling(),
}  # fmt: skip
# What the recipes promise, of each seed: how far from BF16's loss. Delayed scaling with e5m2 gradients promises nothing (docs).
PROMISED = {"fp8": 0.01, "delayed_e4m3": 0.01, "mxfp8": 0.01, "mxfp4": 0.03, "fp32": 0.01}


def test_losses_on_an_h200_are_those_of_the_record() -> None:
    runs = json.loads((ROOT / "bench" / "records" / "h200_pretrain_small.json").read_text())["runs"]
    assert sorted(run["arguments"]["seed"] for run in runs) == [0, 1, 2]
    rows = {row[1].strip("`"): row for row in shown("## On an H200") if len(row) == 5}
    trained = {row[0].strip("`"): row[1:] for row in shown("## On an H200") if len(row) == 4}
    assert list(rows) == list(TRAINED) and list(trained) == list(TRAINED)[1:]
    for name, row in rows.items():
        plain = eval(row[0].split("`")[1], vars(fw.recipes))
        assert plain == TRAINED[name]
        cells, losses = [], []
        for run in runs:
            far = run["held_out"][name] / run["held_out"]["bf16"] - 1
            assert len(run["losses"][name]) == 1000 and abs(far) < PROMISED.get(name, 0.05)
            cells.append(f"{run['held_out'][name]:.4f}" + (f" ({100 * far:+.2f}%)" if name != "bf16" else ""))
            losses.append(f"{100 * (final(run['losses'][name]) / final(run['losses']['bf16']) - 1):+.2f}%")
        assert row[2:] == cells, name
        assert trained.get(name, losses) == losses, name


def test_names_are_those_of_the_example() -> None:
    spec: Any = importlib.util.spec_from_file_location("pretrain", ROOT / "examples" / "pretrain.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {name: module.RECIPES[name] for name in TRAINED} == TRAINED
