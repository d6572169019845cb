"""The line that a finding names: the innermost statement of the kernel's own function, whatever blocks it is in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourwave import sim

if sim.unavailable() is not None:
    pytest.skip(f"no simulator: {sim.unavailable()}", allow_module_level=True)

import flydsl.compiler as flyc
from flydsl import expr as fx


def helper(y, i, value):
    y[i] = value  # helper


@flyc.kernel(known_block_size=[64, 1, 1])
def blocks(y: fx.Tensor, n: fx.Int32):
    i = fx.Int32(fx.thread_idx.x)
    if i < n:
        y[i + 100] = 1.0  # if
        helper(y, i + 400, 4.0)  # call
        for j in range(fx.Int32(0), n, fx.Int32(1)):
            if fx.Int32(j) < 1:
                y[i + 200] = 2.0  # if in for in if
            elif fx.Int32(j) < 2:
                y[i + 300] = 3.0  # elif
    else:
        y[i + 500] = 5.0  # else
    y[i + 600] = 6.0  # outside


@flyc.jit
def run(y: fx.Tensor, n: fx.Int32):
    blocks(y, n).launch(grid=(1, 1, 1), block=(64, 1, 1))


def line_of(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"  # {comment}"))


def test_a_finding_names_the_innermost_statement():
    report = sim.run(run, torch.zeros(64), 3)
    found = {(f.kind, f.line, tuple(line for _, line in f.stack)) for f in report.findings}
    plain = ("if", "if in for in if", "elif", "else", "outside")
    assert found == {
        *(("memory", line_of(comment), ()) for comment in plain),
        ("memory", line_of("call"), (line_of("helper"),)),
    }
