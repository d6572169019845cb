"""The GEMM kernel for gfx1250 with MXFP4 operands on the simulator, and what the compiler makes of it (other operands, further
outputs and few rows: test_gfx1250_mixed.py).

Truth is float64 from the values of the codes times the scales; the bound is that of a float32 sum in any order.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import default_config, why_unsupported
from fourwave.ops.gemm.gfx1250_config import CONFIG, candidates, geometry
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.perf import isa
from fourwave.testing.bounds import assert_within, gemm_bound
from fourwave.testing.buffers import poisoned

needs_sim = pytest.mark.skipif(
    sim.unavailable("gfx1250") is not None, reason=f"no simulator: {sim.unavailable('gfx1250')}"
)

ARCH = "gfx1250"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def problem_of(M, N, K, out_dtype=FP32, layout="TN", **fields):
    scaled = {"a_scaling": "1x32", "b_scaling": "1x32"}
    return GemmProblem(M, N, K, layout, torch.uint8, torch.uint8, out_dtype, **{**scaled, **fields})


LDS = geometry(problem_of(256, 256, 1024), CONFIG).lds


def values(codes):
    """Of packed e2m1, element 0 in the low half."""
    return torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(1)


def dequantized(codes, scale):
    factors = torch.exp2(scale.double() - 127).masked_fill(scale == 255, float("nan"))
    decoded = values(codes)
    return decoded * factors.repeat_interleave(32, 1)[:, : decoded.shape[1]]


def in_place(tensor):
    """The same bytes where 0xFF (-6, a NaN scale) lies before, behind and between the rows, which are aligned."""
    rows, columns = tensor.shape
    pitch = -(-columns // 16) * 16 + 16
    view = torch.full((rows + 2, pitch), 255, dtype=torch.uint8)[1:-1, :columns]
    return view.copy_(tensor)


def turned(codes, scale, K):
    """What is [rows, K] as it is stored where k is not contiguous: [K, rows], two rows in a byte; [K / 32, rows]."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).T[:K]
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous(), scale.T.contiguous()


def stored(problem, a, a_scale, b, b_scale):
    return [
        *(turned(a, a_scale, problem.K) if problem.layout == "NT" else (a, a_scale)),
        *(turned(b, b_scale, problem.K) if problem.layout != "TN" else (b, b_scale)),
    ]


def operands(problem, seed):
    generator = torch.Generator().manual_seed(seed)
    result = []
    for rows in (problem.M, problem.N):
        codes = torch.randint(0, 256, (rows, -(-problem.K // 2)), generator=generator).to(torch.uint8)
        if problem.K % 2:
            codes[:, -1] &= 15
        scale = torch.randint(121, 134, (rows, -(-problem.K // 32)), generator=generator).to(torch.uint8)
        result += [codes, scale]
    return result


def run(problem, given, out, bias=None, alpha=1.0, **options):
    a, a_scale, b, b_scale = given
    with sim.session(arch=ARCH, **options) as report:
        notes = amd.run(problem, None, ARCH, GemmTensors(a, b, out, bias, alpha, a_scale=a_scale, b_scale=b_scale))
    assert not report.findings, report.findings
    return notes, report


def check(problem, seed=0, alpha=1.0, layout="sliced", **options):
    a, a_scale, b, b_scale = operands(problem, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    bias = addend = None
    if problem.bias_dtype is not None:
        bias = (torch.randn(problem.N, generator=generator) * 64).to(problem.bias_dtype)
    if problem.accumulate:
        addend = (torch.randn(problem.M, problem.N, generator=generator) * 64).to(problem.out_dtype)
    target = poisoned(problem.M, problem.N, problem.out_dtype, layout=layout, addend=addend)
    out = target.tensor
    notes, report = run(problem, map(in_place, stored(problem, a, a_scale, b, b_scale)), out, bias, alpha, **options)
    assert notes == []
    exact, bound = gemm_bound_of(problem, dequantized(a, a_scale), dequantized(b, b_scale), bias, alpha, addend)
    assert_within(out, exact, bound)
    target.assert_guards_intact()
    return report


def refused(problem):
    return why_unsupported(problem, None, ARCH) or ""


def gemm_bound_of(problem, left, right, bias, alpha, addend):
    z = alpha * (left @ right.T) + (0 if bias is None else bias.double())
    activations = {
        None: lambda x: x,
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    }
    exact = activations[problem.activation](z) + (0 if addend is None else addend.double())
    bound = gemm_bound(
        left, right, problem.out_dtype, bias=bias, activation=problem.activation, alpha=alpha, addend=addend
    )
    return exact, bound


@needs_sim
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (256, 256, 128),
        (256, 512, 384),
        (512, 256, 1024),
        (256, 256, 1152),
        (1, 256, 2304),
        (255, 129, 2),
        (300, 270, 1090),
        (128, 640, 3072),
        pytest.param(256, 256, 8192, marks=pytest.mark.slow),
    ],
)
def test_shapes(M, N, K):
    """Whole tiles; K within a group of scales, at its end and beyond two; tails of each size."""
    check(problem_of(M, N, K), seed=K)


@needs_sim
@pytest.mark.parametrize("layout", ["NN", "NT"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(256, 256, 128), (2, 130, 1088), pytest.param(300, 270, 2308, marks=pytest.mark.slow), (256, 512, 3072)],
)
def test_k_is_not_contiguous(layout, M, N, K):
    check(problem_of(M, N, K, layout=layout), seed=K)


@needs_sim
def test_odd_k():
    check(problem_of(64, 66, 161, layout="NT"))


@needs_sim
@pytest.mark.parametrize("options", [{"completion": "early"}, {"completion": "random"}, {"schedule": "reverse"}])
def test_order_does_not_matter(options):
    check(problem_of(257, 256, 2592), **options)


@needs_sim
@pytest.mark.parametrize(
    ("out_dtype", "bias_dtype", "activation", "accumulate", "alpha"),
    [
        (BF16, None, None, False, 1.0),
        (FP16, FP32, "relu", False, 2.0**-7),
        (BF16, BF16, "gelu", True, 2.0**-7),
        (FP32, FP16, "silu", True, 0.01),
        (FP32, BF16, "gelu_tanh", False, -0.01),
        (FP16, None, None, True, 2.0**-7),
    ],
)
def test_epilogue(out_dtype, bias_dtype, activation, accumulate, alpha):
    problem = problem_of(141, 275, 160, out_dtype, bias_dtype=bias_dtype, activation=activation, accumulate=accumulate)
    check(problem, alpha=alpha)


@needs_sim
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_sums_of_scales_are_exact(layout):
    """Ones, with a power of two of its own for each row and block of K: every sum is exact, and a scale taken from another
    row or block changes it."""
    M = N = 256
    K = 3072
    block = torch.arange(K // 32)
    rows_a = (block * 5 + torch.arange(M)[:, None] * 7 + torch.arange(M)[:, None] // 16) % 11
    rows_b = (block * 3 + torch.arange(N)[:, None] + torch.arange(N)[:, None] // 8) % 7
    expected = 32 * (2.0 ** rows_a.double() @ 2.0 ** rows_b.double().T)
    ones = torch.full((M, K // 2), 0x22, dtype=torch.uint8)
    out = torch.full((M, N), float("nan"))
    problem = problem_of(M, N, K, layout=layout)
    scales = [(rows + 127).to(torch.uint8) for rows in (rows_a, rows_b)]
    notes, _ = run(problem, stored(problem, ones, scales[0], ones, scales[1]), out)
    assert notes == []
    assert torch.equal(out.double(), expected)


@needs_sim
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_codes_meet_their_own(layout):
    """One code that is not zero in each row of a, at a k of its own: row m of out is column k of b's values."""
    M, N, K = 256, 256, 1024
    problem = problem_of(M, N, K, layout=layout)
    _, _, b, b_scale = operands(problem, 3)
    k = (torch.arange(M) * 37 + 5) % K
    a = torch.zeros((M, K // 2), dtype=torch.uint8)
    a[torch.arange(M), k // 2] = (2 << (k % 2 * 4)).to(torch.uint8)
    out = torch.full((M, N), float("nan"))
    a_scale = torch.full((M, K // 32), 127, dtype=torch.uint8)
    run(problem, stored(problem, a, a_scale, b, b_scale), out)
    assert torch.equal(out.double(), dequantized(b, b_scale)[:, k].T)


@needs_sim
def test_nan_scales():
    """0xFF makes a row or a column of NaN, also in the last block; its neighbours are as they are without."""
    problem = problem_of(33, 65, 1056)
    a, a_scale, b, b_scale = operands(problem, 5)
    outs = []
    for spoiled in (False, True):
        if spoiled:
            a_scale[7, -1] = 255
            b_scale[64, 0] = 255
        out = torch.full((33, 65), 7.0)
        run(problem, (a, in_place(a_scale), b, in_place(b_scale)), out)
        outs.append(out)
    clean, out = outs
    assert out[7].isnan().all() and out[:, 64].isnan().all() and not clean.isnan().any()
    clean[7] = clean[:, 64] = float("nan")
    assert torch.equal(clean.nan_to_num(3), out.nan_to_num(3))


@needs_sim
def test_no_bank_conflicts_and_lds():
    report = check(problem_of(256, 256, 256), count_bank_conflicts=True)
    counters = report.launches[0].counters
    assert counters["lds_read_cycles"] == counters["lds_read_cycles_ideal"]


@needs_sim
def test_backend():
    """fw.gemm of quantized tensors; K ends within a block of scales."""
    x, w = torch.randn(70, 200), torch.randn(90, 200)
    a, b = fw.quantize(x, "mxfp4"), fw.quantize(w, "mxfp4")
    out = fw.gemm(a, b, backend="sim:gfx1250", out_dtype=FP32)
    left, right = (t.dequantize(torch.float64) for t in (a, b))
    assert_within(out, left @ right.T, gemm_bound(left, right, FP32))
    told = fw.explain(a, b, backend="sim:gfx1250", out_dtype=FP32)
    assert (told.backend, told.arch, told.config) == ("sim:gfx1250", ARCH, CONFIG)
    with pytest.raises(NotImplementedError, match="takes MXFP4"):
        fw.gemm(x, w, backend="sim:gfx1250")


@needs_sim
def test_gradients_by_the_backend():
    """dout @ w and dout.T @ x of tensors quantized along what is summed, as PyTorch multiplies their values."""
    dout, w, x = (
        fw.quantize(torch.randn(*size), "mxfp4", direction="both") for size in ((96, 64), (64, 160), (96, 160))
    )
    for b, trans_a in ((w, False), (x, True)):
        ours, theirs = (
            fw.gemm(dout, b, trans_a=trans_a, trans_b=False, backend=name, out_dtype=FP32)
            for name in ("sim:gfx1250", "native")
        )
        assert_within(ours, theirs.double(), torch.full_like(theirs, 96 * 2.0**-22).double() * theirs.abs().max())


def test_what_is_refused():
    good = {"M": 64, "N": 64, "K": 64, "out_dtype": FP32}
    assert why_unsupported(problem_of(**good), None, ARCH) is None
    known = candidates(problem_of(**good))
    assert [default_config(problem_of(**{**good, "M": M}), ARCH)[0] for M in (1, 32, 33, 64, 65)] == [
        known[2], known[2], known[1], known[1], CONFIG
    ]  # fmt: skip
    for fields, why in (
        ({"K": 63}, "K=63: rows of a are packed, two codes in a byte"),
        ({"bias_grad_dtype": FP32}, "bias_grad with layout TN"),
        ({"preactivation_dtype": torch.float8_e5m2}, "preactivation is torch.float8_e5m2"),
        ({"out_dtype": torch.float8_e4m3fnuz, "out_scaling": "1x32"}, "writes float8_e4m3fn and float8_e5m2"),
        ({"b_scaling": "tensor"}, "b is torch.uint8 with scales 'tensor'"),
        ({"M": 2**31}, "M=2147483648"),
        ({"M": 2**23, "N": 2**18}, "33554432 workgroups of 128 threads"),
    ):
        assert why in refused(problem_of(**{**good, **fields}))
    plain = GemmProblem(64, 64, 64, "TN", BF16, BF16, BF16)
    assert "takes MXFP4" in refused(plain)
    for sizes, layout, why in (
        ((64, 63, 64), "NN", "N=63: rows of b are packed"),
        ((63, 64, 63), "NT", "M=63: rows of a are packed"),
        ((64, 64, 63), "NN", "K=63: rows of a are packed"),
    ):
        assert why in refused(problem_of(*sizes, layout=layout))
    assert not refused(problem_of(63, 64, 64, layout="NN"))
    assert not refused(problem_of(64, 64, 63, layout="NT"))
    x = torch.zeros(64, 64, dtype=BF16)
    with pytest.raises(NotImplementedError, match="takes MXFP4"):
        amd.run(plain, None, ARCH, GemmTensors(x, x, x))


@functools.cache
def compiled(**fields):
    return isa.compile_isa(problem_of(4096, 4096, 4096, **fields), None, ARCH)


@pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param(
            {"out_dtype": BF16, "bias_dtype": BF16, "activation": "gelu", "accumulate": True}, marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "epilogue"],
)
def test_what_the_compiler_makes_of_it(fields):
    """Per iteration of two steps: 64 WMMA each, one tile of the data mover, one wait for one; nothing spilled or copied."""
    kernel = compiled(**fields)
    print(kernel)
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes) == (0, 0, 0)
    assert kernel.lds_bytes == LDS, "whatever K is"
    loop = kernel.main_loop
    assert (loop.k, loop.mfma, loop.loads_to_lds, loop.barriers) == (256, 128, 2, 2)
    assert loop.waits.count("tensorcnt(1)") == 2 and all(wait in ("tensorcnt(1)", "dscnt(0)") for wait in loop.waits)
    assert loop.lds_reads == {"ds_load_b128": 2 * 2 * 8 * 2, "ds_load_b32": 2 * 2 * 4}
    assert (loop.loads, loop.stores, loop.copies, loop.lds_writes) == (0, 0, 0, {})


@needs_sim
@pytest.mark.slow
def test_each_wait_barrier_and_copy_is_needed():
    """But for two waits for LDS reads, which may leave one on its way: the last read is one of scales, whose page no one
    overwrites in an even step, and no epilogue reaches."""
    from fourwave.ops.gemm import gfx1250

    problem = problem_of(256, 256, 2560, BF16, bias_dtype=FP32, accumulate=True)
    a, a_scale, b, b_scale = operands(problem, 1)
    out, bias = torch.randn(256, 256).to(BF16), torch.randn(256)
    kinds = ("counter", "barrier", "copy")
    harness = sim.Harness(choose=lambda fault: fault.name.startswith(kinds))
    with sim.session(arch=ARCH, harness=harness, step_limit=10_000_000):
        amd.run(problem, None, ARCH, GemmTensors(a, b, out, bias, a_scale=a_scale, b_scale=b_scale))
    assert len(harness.outcomes) > 30
    source = Path(gfx1250.__file__).read_text().splitlines()
    survivors = [(outcome.fault[:18], source[outcome.line - 1].strip()) for outcome in harness.survivors]
    assert survivors == [("counter one higher", "tdm.wait_lds()")] * 2


def _next_stage(monkeypatch, kernel):
    codes = kernel.wmma.Operand.codes
    stage = geometry(problem_of(256, 256, 1024), CONFIG).stage
    monkeypatch.setattr(kernel.wmma.Operand, "codes", lambda self, lds, start: codes(self, lds, start + stage))


def _other_page(monkeypatch, kernel):
    def eighth(self, group, stage):
        strip = self._eighth
        return strip.tile(strip.first_at + group * strip.per_group, stage, (group + 1) & 1)

    monkeypatch.setattr(kernel.Bring, "eighth", eighth)


def _half_stays(monkeypatch, kernel):
    def eighth(self, group, stage):
        strip = self._eighth
        half = self._half.otherwise(self._first_group == 0, strip)
        return half.tile(strip.first_at + group * strip.per_group, stage, group & 1)

    monkeypatch.setattr(kernel.Bring, "eighth", eighth)


def _group_late(monkeypatch, kernel):
    def eighth(self, group, stage):
        strip = self._eighth
        return strip.tile(strip.first_at + (group - 1) * strip.per_group, stage, group & 1)

    monkeypatch.setattr(kernel.Bring, "eighth", eighth)


@needs_sim
@pytest.mark.parametrize("break_it", [None, _next_stage, _other_page, _half_stays, _group_late])
def test_broken_kernels_are_seen(monkeypatch, break_it):
    """Findings, or sums that are wrong: 20 steps, in which scales are brought twice."""
    from fourwave.ops.gemm import gfx1250

    monkeypatch.setattr(amd, "_compiled", {})
    if break_it is not None:
        break_it(monkeypatch, gfx1250)
    problem = problem_of(256, 256, 2560)
    if break_it is None:
        check(problem)
        return
    with pytest.raises(AssertionError):
        check(problem)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "turned_operands"), [("NN", 1), ("NT", 2)])
def test_what_the_compiler_makes_of_turned_operands(layout, turned_operands):
    kernel = compiled(layout=layout)
    lds = geometry(problem_of(256, 256, 1024, layout=layout), CONFIG).lds
    assert (kernel.vgpr_spills, kernel.sgpr_spills, kernel.scratch_bytes, kernel.lds_bytes) == (0, 0, 0, lds)
    assert lds == LDS - 256 * turned_operands, "no gaps in scales that are read byte by byte"
    loop = kernel.main_loop
    assert (loop.k, loop.mfma, loop.loads_to_lds, loop.barriers) == (256, 128, 2, 2)
    assert loop.waits.count("tensorcnt(1)") == 2 and loop.copies == 0
    assert loop.lds_reads["ds_load_tr4_b64"] == 64 * turned_operands
    assert loop.lds_reads["ds_load_u8"] == 32 * turned_operands


def test_lds_is_what_the_stages_need():
    geo = geometry(problem_of(64, 64, 1024), CONFIG)
    assert (geo.stage, geo.page) == (512 * (64 + 4), 512 * 32 + 64 * 4)
    assert geo.lds == 3 * 34816 + 2 * 16640 == 137728
    assert geo.lds < 144 * 1024, "what a published kernel of this design takes"
    short, long = (amd.specialise(problem_of(64, 64, K), CONFIG, ARCH) for K in (1024, 65536))
    assert short == long, "one kernel for every K, and its LDS"


def _wait(monkeypatch, kernel, which):
    """The which-th of the kernel's waits for the data mover, in its source, lets one more tile stay in flight."""
    wait, seen = kernel.tdm.wait_tiles, []

    def raised(in_flight):
        seen.append(in_flight)
        wait(in_flight + (len(seen) == which + 1))

    monkeypatch.setattr(kernel.tdm, "wait_tiles", raised)
    return seen


@needs_sim
@pytest.mark.parametrize("which", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 7))])
def test_each_wait_for_the_data_mover_is_needed(monkeypatch, which):
    """Prologue; the two steps of an iteration; drain; bias; what was in out, of the first pass; between passes."""
    from fourwave.ops.gemm import gfx1250

    monkeypatch.setattr(amd, "_compiled", {})
    seen = _wait(monkeypatch, gfx1250, which)
    problem = problem_of(256, 256, 2560, BF16, bias_dtype=FP32, accumulate=True)
    with pytest.raises(AssertionError):
        check(problem)
    assert len(seen) > which
