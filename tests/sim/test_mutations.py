"""Faults planted in the real GEMM kernels: each must be named by a checker or change the output.

The faults are a kernel author's slips: a dropped barrier, a wait count one too high, a wait for LDS left out, an LDS offset 16 bytes off, a copy
left out, the last k step skipped, an operand's row stride taken as K. The unplanted kernel passes the same test. Other kernels: tests/kernels/test_faults.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

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
    arch: str,
    layout: str,
    mutation: mutate.Mutation | None = None,
    *,
    stored_k: int | None = None,
    skip_k: int = 0,
    harness: sim.Harness | None = None,
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
    with sim.session(arch, mutate=mutation, harness=harness, step_limit=10_000_000) as report:
        amd.run(problem, config, arch, GemmTensors(a, b, out))
    ratio, _ = bounds.error_ratio(out, exact, bound)
    return ratio, report.findings


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_without_a_fault(arch, layout):
    ratio, findings = run(arch, layout)
    assert not findings, "\n".join(map(str, findings))
    assert ratio <= 1


# What a missing wait or barrier lets happen is told by name, whatever it did to the output.
ORDER = ("barrier dropped", "vmcnt one higher", "vmcnt dropped", "lgkmcnt dropped")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_fault_is_caught(arch, layout):
    # Of three K steps some loads bring tiles past K; more steps are in tests/kernels/test_faults.py.
    harness = sim.Harness(choose=lambda fault: not fault.name.startswith("load off"))
    ratio, findings = run(arch, layout, harness=harness)
    assert ratio <= 1 and not findings
    kinds = Counter(o.fault.rpartition(" #")[0] for o in harness.outcomes)
    assert kinds["barrier dropped"] >= 2 and kinds["lgkmcnt dropped"] >= 1 and kinds["LDS read 16 bytes off"] >= 8
    if arch == "gfx950":  # gfx942 loads to registers, whose waits are the compiler's
        assert kinds["vmcnt one higher"] >= 2 and kinds["copy dropped"] >= 4
    assert not harness.survivors, harness.survivors
    unnamed = [o for o in harness.outcomes if o.fault.startswith(ORDER) and not o.how.startswith("finding: ")]
    assert not unnamed


def test_the_program_is_as_before_after_a_fault():
    """Faults edit one prepared program: each leaves its code as it was, and the last one is noticed like the first."""
    codes = []

    def keep(builder):
        before = builder.encode(**FACTS)
        for fault in mutate.faults(builder):
            with builder.edited(fault.mutation):
                mutant = builder.encode(**FACTS)
            assert len(mutant.code) != len(before.code) or (mutant.code != before.code).any(), fault.name
            after = builder.encode(**FACTS)
            assert (after.code == before.code).all() and after.num_registers == before.num_registers, fault.name
            assert (after.constants == before.constants).all(), fault.name
            codes.append(fault.name)

    ratio, findings = run("gfx950", "TN", keep)
    assert ratio <= 1 and not findings and len(codes) > 40


FACTS: dict[str, Any] = dict.fromkeys(
    ("name", "argument_slots", "lds_bytes", "dynamic_lds", "lines", "wave_size", "arch")
)


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
