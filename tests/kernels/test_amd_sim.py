"""The CDNA GEMM kernels on the simulator, below fw.gemm: addressing, copies, LDS banks, caching.

Numbers for every layout, tile, tail and epilogue are in test_gemm_backends.py, planted faults in sim/test_mutations.py.
"""

from __future__ import annotations

import threading

import pytest
import torch

from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import ARCHS, FLOAT8, candidates
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

LAYOUTS = ("TN", "NN", "NT")
BF16, FP32 = torch.bfloat16, torch.float32


def integers(*shape, seed, dtype=BF16):
    """Small integers: every sum of their products is exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(dtype)


def operands(M, N, K, layout, seed=0, dtypes=(BF16, BF16)):
    a_dtype, b_dtype = dtypes
    problem = GemmProblem(M, N, K, layout, a_dtype, b_dtype, FP32)
    a = integers(*problem.a_shape, seed=seed, dtype=dtypes[0])
    return problem, a, integers(*problem.b_shape, seed=seed + 1, dtype=dtypes[1])


def product(a, b, layout):
    a = a.T if layout == "NT" else a
    b = b.T if layout == "TN" else b
    return (a.double() @ b.double()).float()


def check(arch, problem, config, a, b, out=None, **options):
    out = torch.full((problem.M, problem.N), float("nan")) if out is None else out
    with sim.session(arch=arch, **options) as report:
        notes = amd.run(problem, config, arch, GemmTensors(a, b, out))
    assert not report.findings, report.findings
    assert torch.equal(out, product(a, b, problem.layout).to(out.dtype))
    return notes, report


@pytest.mark.parametrize(
    ("layout", "large"),
    [
        pytest.param(layout, large, marks=pytest.mark.slow if large and layout != "TN" else ())
        for layout in LAYOUTS
        for large in (False, True)
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [{"completion": "early"}, {"schedule": "reverse"}], ids=["early", "reverse"])
def test_order_does_not_matter(arch, layout, large, options):
    """Copies that land at once, and waves in the opposite order, change nothing."""
    if large:
        problem, a, b = operands(280, 272, 432, layout, dtypes=FLOAT8[arch])
        check(arch, problem, candidates(arch, 1)[0], a, b, **options)
        return
    problem, a, b = operands(72, 80, 328, layout)
    check(arch, problem, candidates(arch)[2], a, b, **options)


@pytest.mark.parametrize("arch", ARCHS)
def test_workgroups_cover_every_tile_once(arch):
    """19 x 9 tiles, which neither the dies nor the bands of the rasterisation divide."""
    problem, a, b = operands(16 * 18 + 5, 64 * 8 + 3, 8, "TN")
    _, report = check(arch, problem, candidates(arch)[4], a, b)
    assert report.workgroups == 19 * 9


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_beyond_2_to_31_elements(arch, layout):
    """Operands and output whose addresses span more than 2**31 elements and 4 GiB (few pages are ever touched)."""
    M, N, K = (72, 72, 300) if layout == "NT" else (300, 72, 72)
    pitch = 8 * 2**20  # elements between rows: 16 MiB

    def far_apart(tensor):
        rows, columns = tensor.shape
        try:
            storage = torch.empty(rows * pitch, dtype=tensor.dtype)
        except RuntimeError as error:
            pytest.skip(f"no address space for {rows * pitch} elements: {error}")
        view = storage.as_strided((rows, columns), (pitch, 1))
        view.copy_(tensor)
        return view

    problem, a, b = operands(M, N, K, layout)
    a = far_apart(a)
    assert a.shape[0] * pitch > 2**31
    if layout == "NT":
        b = far_apart(b)
    out = torch.full((M, N), float("nan"))
    if layout != "NT":
        out = far_apart(out.to(BF16))
        problem = GemmProblem(M, N, K, layout, BF16, BF16, BF16)
    notes, _ = check(arch, problem, candidates(arch)[2], a, b, out)
    assert notes == []


@pytest.mark.parametrize(
    ("elem_bytes", "layout"),
    [
        pytest.param(size, layout, marks=pytest.mark.slow if size == 4 and layout != "TN" else ())
        for size in (2, 1, 4)
        for layout in LAYOUTS
    ],
)
@pytest.mark.parametrize("arch", ARCHS)
def test_lds_reads_without_bank_conflicts(arch, layout, elem_bytes):
    for config in candidates(arch, elem_bytes):
        dtypes = {1: FLOAT8[arch], 2: (BF16, BF16), 4: (FP32, FP32)}[elem_bytes]
        problem, a, b = operands(config.tile_m, config.tile_n, config.tile_k, layout, dtypes=dtypes)
        _, report = check(arch, problem, config, a, b, count_bank_conflicts=True)
        counters = report.launches[0].counters
        assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"], config


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_float32_is_not_reduced(arch, layout):
    """Operands with all 24 bits: one product a sum, rounded once; and sums within the bound of float32."""
    problem, *_ = operands(80, 48, 40, layout, dtypes=(FP32, FP32))
    generator = torch.Generator().manual_seed(3)
    rows = torch.zeros(80, 40)
    rows[torch.arange(80), torch.arange(80) * 7 % 40] = 1 + torch.rand(80, generator=generator)
    columns = 1 + torch.rand(48, 40, generator=generator)
    a, b = (rows.T if layout == "NT" else rows).contiguous(), (columns if layout == "TN" else columns.T).contiguous()
    check(arch, problem, candidates(arch, 4)[2], a, b)

    a, b = (torch.randn(shape, generator=generator) for shape in (problem.a_shape, problem.b_shape))
    out = torch.full((80, 48), float("nan"))
    with sim.session(arch=arch) as report:
        amd.run(problem, candidates(arch, 4)[2], arch, GemmTensors(a, b, out))
    assert not report.findings
    left, right = (a.T if layout == "NT" else a).double(), (b.T if layout == "TN" else b).double()
    assert ((out - left @ right).abs() <= 40 * 2.0**-24 * (left.abs() @ right.abs())).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_unaligned_operands_are_copied_and_named(arch):
    problem, a, b = operands(40, 48, 64, "TN")
    config = candidates(arch)[2]
    assert check(arch, problem, config, a, b)[0] == []

    shifted = torch.full((40 * 64 + 1,), float("nan"), dtype=BF16)[1:].view(40, 64)
    shifted.copy_(a)
    assert check(arch, problem, config, shifted, b)[0] == ["a copied: base not 16-byte aligned"]

    wide = torch.full((48, 67), float("nan"), dtype=BF16)[:, :64]
    wide.copy_(b)
    assert check(arch, problem, config, a, wide)[0] == ["b copied: row stride not 16-byte aligned"]

    wide = torch.full((48, 72), float("nan"), dtype=BF16)[:, :64]
    wide.copy_(b)
    assert check(arch, problem, config, a, wide)[0] == []

    problem, a, b = operands(40, 48, 60, "TN")
    padded = torch.full((40, 64), float("nan"), dtype=BF16)[:, :60]
    padded.copy_(a)
    notes, _ = check(arch, problem, config, padded, b)
    assert notes == ["a copied: row length 60 is not a multiple of 8", "b copied: row stride not 16-byte aligned"]


@pytest.mark.parametrize("arch", ARCHS)
def test_transposed_output_is_written_through_a_copy(arch):
    problem, a, b = operands(40, 48, 64, "NN")
    out = torch.full((48, 40), float("nan")).T
    notes, _ = check(arch, problem, candidates(arch)[2], a, b, out)
    assert len(notes) == 1 and notes[0].startswith("out written through a copy")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_kernel_serves_all_sizes(layout, monkeypatch):
    """Sizes, strides, pointers and alpha are run-time values: one compilation, and none of them is baked in."""
    monkeypatch.setattr(amd, "_compiled", {})
    config = candidates("gfx950")[2]
    for M, N, K in ((64, 64, 64), (8, 136, 200), (200, 8, 8), (72, 64, 328)):
        problem, a, b = operands(M, N, K, layout, seed=M)
        check("gfx950", problem, config, a, b)
    assert len(amd._compiled) == 1
    problem, a, b = operands(64, 64, 64, layout)
    check("gfx942", problem, candidates("gfx942")[2], a, b)
    assert len(amd._compiled) == 2


def test_threads_share_one_compilation(monkeypatch):
    monkeypatch.setattr(amd, "_compiled", {})
    config = candidates("gfx950")[4]
    errors = []

    def work(seed):
        try:
            problem, a, b = operands(16, 64, 128, "TN", seed=seed)
            check("gfx950", problem, config, a, b)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(amd._compiled) == 1


def test_cpu_tensors_need_a_session():
    problem, a, b = operands(16, 16, 16, "TN")
    with pytest.raises(RuntimeError, match="session"):
        amd.run(problem, None, "gfx950", GemmTensors(a, b, torch.empty(16, 16)))


def test_unsupported_is_refused_before_anything_is_compiled():
    problem = GemmProblem(16, 16, 16, "TN", torch.float64, torch.float64, FP32)
    a = torch.zeros(16, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        amd.run(problem, None, "gfx950", GemmTensors(a, a, a))
