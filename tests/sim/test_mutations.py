"""Faults planted in the real GEMM kernels: each must be named by a checker or break the error bound.

The faults are a kernel author's slips: a dropped barrier, a wait count one too high, a wait for LDS left out, an LDS offset 16 bytes off, a copy
left out, the last k step skipped, an operand's row stride taken as K. The unplanted kernel passes the same test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm.config import default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.sim import mutate
from fourwave.testing import bounds, inputs
from fourwave.testing.shapes import Shape

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

# Six K steps of 64 and more than one workgroup: the pipeline fills, runs full and drains.
SHAPE = Shape("pipeline", 128, 64, 384)
ARCHS = ["gfx950", "gfx942"]
LAYOUTS = ["TN", "NN", "NT"]


def run(
    arch: str, layout: str, mutation: mutate.Mutation | None = None, *, stored_k: int | None = None, skip_k: int = 0
):
    """(largest error over bound, findings) of the kernel with a fault.

    stored_k    row length of the buffer that a K-contiguous `a` is a view of; the kernel is told K instead
    skip_k      the kernel is told a K this much shorter
    """
    from fourwave.ops.gemm import amd

    a, b = inputs.spread(SHAPE, torch.bfloat16, layout=layout, seed=3)
    problem = GemmProblem(
        SHAPE.M, SHAPE.N, SHAPE.K, layout, torch.bfloat16, torch.bfloat16, torch.float32, None, None, False, "cpu"
    )
    config, _ = default_config(problem, arch)
    op_a = a.T if layout == "NT" else a
    op_b = b.T if layout == "TN" else b
    exact = op_a.double() @ op_b.double()
    bound = bounds.gemm_bound(a, b, torch.float32, trans_a=layout == "NT", trans_b=layout == "TN")
    if stored_k is not None:
        buffer = torch.full((SHAPE.M, stored_k), float("nan"), dtype=a.dtype)
        buffer[:, : SHAPE.K] = a
        a = buffer.as_strided((SHAPE.M, SHAPE.K), (SHAPE.K, 1))  # the fault: the rows are stored_k apart
    if skip_k:
        problem = dataclasses.replace(problem, K=SHAPE.K - skip_k)
        a = a[: problem.K] if layout == "NT" else a[:, : problem.K]
        b = b[:, : problem.K] if layout == "TN" else b[: problem.K]
    out = torch.full((SHAPE.M, SHAPE.N), float("nan"))
    with sim.session(arch, mutate=mutation, step_limit=10_000_000) as report:
        amd.run(problem, config, arch, GemmTensors(a, b, out))
    ratio, _ = bounds.error_ratio(out, exact, bound)
    return ratio, report.findings


def count(arch: str, layout: str, places: Callable) -> int:
    """How many places of a kind the kernel has."""
    found = []
    run(arch, layout, lambda builder: found.append(len(places(builder))))
    return found[0]


def vm_waits(builder):
    return [i for _, i in mutate.places(builder, ("WAIT",)) if i.args[0] >= 0]


def lds_waits(builder):
    return [i for _, i in mutate.places(builder, ("WAIT",)) if i.args[1] >= 0]


def survivors(arch: str, layout: str, faults: dict[str, mutate.Mutation]) -> list[str]:
    """Names of the faults that neither a finding nor the bound shows."""
    alive = []
    for name, fault in faults.items():
        ratio, findings = run(arch, layout, fault)
        if ratio <= 1 and not findings:
            alive.append(name)
    return alive


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_fault(arch, layout):
    ratio, findings = run(arch, layout)
    assert not findings, "\n".join(map(str, findings))
    assert ratio <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_dropped_barrier_is_caught(arch, layout):
    n = count(arch, layout, lambda b: mutate.places(b, ("BARRIER",)))
    assert n >= 2
    assert not survivors(arch, layout, {f"barrier {i} dropped": mutate.drop_barrier(i) for i in range(n)})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_loosened_wait_is_caught(arch, layout):
    n = count(arch, layout, vm_waits)
    if arch == "gfx950":  # gfx942 loads to registers, whose waits are the compiler's
        assert n >= 2
    assert not survivors(arch, layout, {f"vmcnt {i} one higher": mutate.loosen_wait(i) for i in range(n)})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_dropped_lds_wait_is_caught(arch, layout):
    n = count(arch, layout, lds_waits)
    assert n >= 1
    assert not survivors(arch, layout, {f"lgkmcnt {i} dropped": mutate.drop_lds_wait(i) for i in range(n)})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_shifted_lds_reads_are_caught(arch, layout):
    n = count(arch, layout, lambda b: mutate.places(b, ("LDS_LOAD", "DS_READ_TR16_B64")))
    chosen = sorted({0, 1, n // 3, n // 2, n - 1})
    assert not survivors(arch, layout, {f"LDS read {i} 16 bytes off": mutate.shift_lds_read(i) for i in chosen})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropped_copies_are_caught(layout):
    n = count("gfx950", layout, lambda b: mutate.places(b, ("BUFFER_LOAD_LDS",)))
    assert n >= 4
    chosen = sorted({0, 1, n // 2, n - 2, n - 1})
    assert not survivors("gfx950", layout, {f"copy {i} dropped": mutate.drop_copy(i) for i in chosen})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_skipped_last_k_step_is_caught(arch, layout):
    ratio, findings = run(arch, layout, skip_k=32)
    assert ratio > 1 or findings


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_stride_taken_as_k_is_caught(arch):
    ratio, findings = run(arch, "TN", stored_k=SHAPE.K + 64)
    assert ratio > 1 or findings


def test_a_fault_needs_its_place():
    with pytest.raises(ValueError, match="there is no number 99"):
        run("gfx950", "TN", mutate.drop_barrier(99))


def test_a_finding_names_the_kernels_line_and_what_to_do():
    _, findings = run("gfx950", "TN", mutate.loosen_wait(0))
    waits = [f for f in findings if f.kind in ("wait", "race")]
    assert waits
    assert all(f.file.endswith("cdna4.py") and f.line > 0 for f in waits)
    assert all(any(file.endswith("loaders.py") for file, _ in f.stack) for f in waits)
    assert "s_waitcnt" in str(waits[0]) or "barrier" in str(waits[0])
