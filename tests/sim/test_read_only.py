"""Memory that the host has mapped read-only: kernels may load from it, under a harness, too; a store to it is a finding."""

from __future__ import annotations

import mmap
import warnings

import numpy as np
import pytest
import torch
from machine import needs_rights  # tests/sim/machine.py

from fourwave import sim

if sim.unavailable() is not None:
    pytest.skip(f"no simulator: {sim.unavailable()}", allow_module_level=True)

import flydsl.compiler as flyc
from flydsl import expr as fx

pytestmark = needs_rights


@flyc.kernel(known_block_size=[64, 1, 1])
def double_kernel(x: fx.Tensor, y: fx.Tensor):
    i = fx.Int32(fx.thread_idx.x)
    y[i] = x[i] * 2.0


@flyc.jit
def double(x: fx.Tensor, y: fx.Tensor):
    double_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))


def read_only(values: np.ndarray, folder) -> torch.Tensor:
    values.tofile(folder / "values")
    with open(folder / "values", "rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch knows no read-only tensors, and says so
        return torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.float32))


@pytest.mark.parametrize("harness", [sim.Harness, sim.Orders])
def test_a_harness_leaves_inputs_alone(harness, tmp_path):
    x, y = read_only(np.arange(64, dtype=np.float32), tmp_path), torch.zeros(64)
    planted = harness()
    with sim.session(harness=planted) as report:
        double(x, y)
    assert not report.findings and torch.equal(y, torch.arange(64) * 2.0)
    if harness is sim.Harness:
        assert planted.outcomes and not planted.survivors
    else:
        assert planted.launches == 1 and not planted.differences


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_a_store_is_a_finding(arch, tmp_path):
    x = read_only(np.arange(64, dtype=np.float32), tmp_path)
    (finding,) = sim.run(double, torch.ones(64), x, arch=arch).findings
    assert finding.kind == "memory" and "mapped read-only" in finding.message and finding.count == 64
    assert torch.equal(x, torch.arange(64.0))
