"""MXFP4: stochastic rounding, the Hadamard transform, and the kernels on the simulator, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from quantize_launches import kernels, launch, problems
from test_quantize_kernels import Guarded, quantized

import fourwave as fw
from fourwave import sim, te
from fourwave.formats import decode
from fourwave.formats.element import E2M1
from fourwave.quantize import amd
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors
from fourwave.quantize.random import hadamard, hadamard_signs, inverse_hadamard, philox, random_bits
from fourwave.testing import inputs
from fourwave.testing.quantize_cases import QUANTIZE_CASES, QuantizeCase, matrix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [case for case in QUANTIZE_CASES if case.format == "mxfp4"]
# The kernels differ in accesses to memory and barriers only; gfx942's are gfx950's.
every_arch = pytest.mark.parametrize("arch", ["gfx950", "gfx1250", pytest.param("gfx942", marks=pytest.mark.slow)])
needs_sim = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
STOCHASTIC: dict[str, Any] = {"rounding": "stochastic"}


# ---- random bits ----------------------------------------------------------------------------------------------------


def test_philox_is_the_published_generator():
    """Known answers of Random123's kat_vectors for philox4x32, 10 rounds."""
    ones, zero = 0xFFFFFFFF, 0
    assert philox((zero,) * 4, (zero,) * 2) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    many = torch.tensor([ones])
    words = philox((many, many, many, many), (many, many))
    assert [int(word) for word in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_bits_depend_on_seed_place_and_direction_only():
    seed = torch.tensor(2**45 + 17)
    whole = random_bits(seed, 5, 100, False)
    assert torch.equal(random_bits(seed, 3, 40, False), whole[:3, :40])
    assert 0 <= int(whole.min()) and int(whole.max()) < 2**16
    for other in (
        random_bits(seed, 5, 100, True),
        random_bits(seed + 1, 5, 100, False),
        random_bits(seed % 2**40, 5, 100, False),
    ):
        assert (other == whole).float().mean() < 0.05


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_element_0_is_the_low_half(dtype: torch.dtype) -> None:
    q = fw.quantize(torch.tensor([[1.0, 6.0]], dtype=dtype), "mxfp4", backend="native")
    assert q.data is not None and q.scale is not None
    assert q.data.tolist() == [[0x72]]
    assert q.scale.view(torch.uint8).tolist() == [[127]]


def test_every_input_type_of_the_same_values_gives_the_same_bytes():
    x = matrix(64, 96, BF16).to(torch.float32) / 2**6
    x = x.masked_fill(x.abs() < 2.0**-10, 0).clamp(-(2.0**14), 2.0**14)  # of which float16 holds every bfloat16
    assert torch.equal(x.to(FP16).to(FP32), x) and torch.equal(x.to(BF16).to(FP32), x)
    choices: tuple[dict[str, Any], ...] = ({}, {"rounding": "stochastic", "seed": 3, "hadamard": "both"})
    for options in choices:
        results = [
            fw.quantize(x.to(dtype), "mxfp4", "both", backend="native", **options) for dtype in (FP32, BF16, FP16)
        ]
        for other in results[1:]:
            for name in ("data", "scale", "columnwise_data", "columnwise_scale"):
                first = getattr(results[0], name).view(torch.uint8)
                assert torch.equal(first, getattr(other, name).view(torch.uint8))


@pytest.mark.parametrize("value", [0.25, -0.25, 0.8, 1.6, 2.3, 3.9, 4.5, 5.9, 2.0**-9])
@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
def test_the_mean_of_stochastic_roundings_is_the_value(value: float, direction: str) -> None:
    """10^5 of them, in blocks whose scale a 6 makes 1; within 4 sigma."""
    count, block = 100_000 // 31 + 1, 32
    x = torch.full((count, block), value)
    x[:, 0] = 6.0
    x = x if direction == "rowwise" else x.mT
    q = fw.quantize(x, "mxfp4", direction, rounding="stochastic", seed=2024, backend="native")
    values = q.dequantize(torch.float64)
    values = (values if direction == "rowwise" else values.mT)[:, 1:].reshape(-1)
    assert values.numel() >= 100_000
    grid = decode(torch.arange(8, dtype=torch.uint8), E2M1, torch.float64)
    below = grid[grid <= abs(value)].max()
    above = grid[grid > abs(value)].min()
    assert set(values.abs().unique().tolist()) == {float(below), float(above)}
    p = (abs(x.to(torch.float64)[-1, -1]) - below) / (above - below)
    sigma = (above - below) * (p * (1 - p) / values.numel()).sqrt()
    assert abs(values.mean() - x.to(torch.float64)[-1, -1]) < 4 * sigma
    # Neighbours are independent: so is what their product says.
    centred = (values - values.mean()) / values.std()
    for distance in (1, 2, 8, 31):
        assert abs((centred[distance:] * centred[:-distance]).mean()) < 5 / values.numel() ** 0.5


def test_codes_stay_and_what_is_past_the_largest_saturates():
    grid = torch.cat([decode(torch.arange(16, dtype=torch.uint8), E2M1), torch.tensor([6.0] * 16)])
    for seed in range(20):
        q = fw.quantize(grid[None], "mxfp4", rounding="stochastic", seed=seed, backend="native")
        assert torch.equal(q.dequantize()[0], grid)
        q = fw.quantize(torch.full((1, 32), -7.9), "mxfp4", rounding="stochastic", seed=seed, backend="native")
        assert torch.equal(q.dequantize(), torch.full((1, 32), -6.0))


def test_seeds():
    x = matrix(64, 64, BF16)

    def codes(seed: Any) -> torch.Tensor:
        q = fw.quantize(x, "mxfp4", rounding="stochastic", seed=seed, backend="native")
        assert q.data is not None
        return q.data

    assert torch.equal(codes(5), codes(5)) and torch.equal(codes(5), codes(torch.tensor([5])))
    assert not torch.equal(codes(5), codes(6)) and not torch.equal(codes(5), codes(5 + 2**32))


def test_the_transform_is_orthogonal_and_undone():
    x = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    signs = hadamard_signs(12)
    matrix16 = hadamard(torch.eye(16, dtype=torch.float64), signs)
    assert torch.equal(matrix16.abs(), torch.full_like(matrix16, 0.25))
    assert torch.equal(matrix16 @ matrix16.mT, torch.eye(16, dtype=torch.float64))
    assert torch.allclose(inverse_hadamard(hadamard(x, signs), signs, 1), x, rtol=0, atol=1e-14)
    assert len({hadamard_signs(seed) for seed in range(200)}) > 150
    # An outlier is spread over its 16.
    spread = hadamard(torch.tensor([[0.0] * 5 + [16.0] + [0.0] * 26]), signs)
    assert torch.equal(spread.abs()[0], torch.tensor([4.0] * 16 + [0.0] * 16))


@pytest.mark.parametrize("transposed", [False, True])
def test_dequantize_undoes_the_transform(transposed: bool) -> None:
    x = matrix(64, 96, FP32)
    q = fw.quantize(
        x, "mxfp4", "both", hadamard="both", hadamard_seed=4, columnwise_transposed=transposed, backend="native"
    )
    for direction, dim in (("rowwise", 1), ("columnwise", 0)):
        values = q.dequantize(torch.float64, direction=direction)
        # Orthogonal: the error of a block of 16 is what rounding did to its transform, of which each is within 1/6 or so.
        error = (values - x).square().unflatten(dim, (-1, 16)).sum(dim + 1)
        size = x.double().square().unflatten(dim, (-1, 32)).sum(dim + 1).repeat_interleave(2, dim)
        assert (error <= 0.2 * size).all()


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_products_of_transformed_operands(layout: str) -> None:
    """What cancels gives the product of the dequantized values, which are transformed back; anything else is refused."""
    a, b = matrix(64, 96, FP32, seed=1), matrix(96, 64, FP32, seed=2)
    a, b = (a.mT if layout == "NT" else a), (b.mT if layout == "TN" else b)
    directions = ("columnwise" if layout == "NT" else "rowwise", "rowwise" if layout == "TN" else "columnwise")

    def operands(a_seed: int | None, b_seed: int | None) -> list[Any]:
        return [
            fw.quantize(
                t.contiguous(), "mxfp4", direction, hadamard=None if seed is None else direction, hadamard_seed=seed or 0,
                backend="native",
            )
            for t, direction, seed in zip((a, b), directions, (a_seed, b_seed), strict=True)
        ]  # fmt: skip

    layouts: dict[str, Any] = {
        "trans_a": layout == "NT",
        "trans_b": layout == "TN",
        "out_dtype": FP32,
        "backend": "native",
    }
    qa, qb = operands(3, 3)
    da, db = qa.dequantize(torch.float64), qb.dequantize(torch.float64)
    da, db = (da.mT if layout == "NT" else da), (db.mT if layout == "TN" else db)
    exact = da @ db
    bound = 2.0**-18 * (da.abs() @ db.abs())
    assert ((fw.gemm(qa, qb, **layouts).double() - exact).abs() <= bound).all()
    for seeds in ((3, 4), (None, 3), (3, None)):
        with pytest.raises(ValueError, match="cancels in a product only where both"):
            fw.gemm(*operands(*seeds), **layouts)


def test_sums_of_the_transform_overflow_from_2_to_the_124() -> None:
    """16 equal magnitudes with the signs' own signs: all of their sum is in one element."""
    ones = torch.tensor([[1.0 - 2 * (hadamard_signs(5) >> i & 1) for i in range(16)] * 4])
    for exponent, finite in ((123.0, True), (124.0, False)):
        x = torch.cat((ones[:, :32] * 2.0**exponent, ones[:, 32:]), 1)
        q = fw.quantize(x, "mxfp4", hadamard="rowwise", hadamard_seed=5, backend="native")
        values = q.dequantize(torch.float64)
        assert bool(values[:, :32].isfinite().all()) is finite and bool(values[:, :32].isnan().all()) is not finite
        assert torch.equal(values[:, 32:], ones[:, 32:].double())


def test_bias_grad_of_transformed_values_is_refused() -> None:
    """Product and preactivation are of untransformed values; the sum of a's codes would be of transformed ones."""
    a, b = (
        fw.quantize(matrix(64, n, FP32, seed=n), "mxfp4", "both", hadamard="columnwise", hadamard_seed=9, backend="native")
        for n in (48, 80)
    )  # fmt: skip
    z, bias_grad = torch.empty(48, 80), torch.full((48,), 7.0)
    wgrad: dict[str, Any] = {"trans_a": True, "trans_b": False, "backend": "native"}
    for call in (fw.gemm, fw.explain):
        with pytest.raises(ValueError, match=r"bias_grad sums a's values.*hadamard_seed=9"):
            call(a, b, bias_grad=bias_grad, **wgrad)
    with pytest.raises(ValueError, match=r"sums B's values.*hadamard_seed=9"):
        te.general_gemm(b, a, FP32, layout="NT", grad=True, bias=torch.empty(48))
    assert (bias_grad == 7).all()
    product = fw.gemm(a, b, preactivation=z, activation="relu", out_dtype=FP32, **wgrad)
    da, db = (t.dequantize(torch.float64, direction="columnwise") for t in (a, b))
    assert ((z.double() - da.mT @ db).abs() <= 2.0**-18 * (da.abs().mT @ db.abs())).all()
    assert torch.equal(product, z.relu())
    assert torch.equal(te.general_gemm(b, a, FP32, layout="NT", grad=True)[0].relu(), product)
    # The sum of the other direction's values, which were not transformed, is right.
    plain = fw.quantize(matrix(64, 48, FP32, seed=48), "mxfp4", "columnwise", backend="native")
    other = fw.quantize(matrix(64, 80, FP32, seed=80), "mxfp4", "columnwise", backend="native")
    fw.gemm(plain, other, bias_grad=bias_grad, **wgrad)
    right = plain.dequantize(torch.float64)
    assert ((bias_grad.double() - right.sum(0)).abs() <= 2.0**-18 * right.abs().sum(0)).all()


def test_products_that_do_not_know_the_transform_refuse_it():
    q = fw.quantize(matrix(32, 64, BF16), "mxfp4", "both", hadamard="columnwise", hadamard_seed=8, backend="native")
    assert q.operand("rowwise")[2] and not q.operand("columnwise", hadamard=8)[2]
    for given in ({}, {"hadamard": 9}):
        with pytest.raises(ValueError, match="after a Hadamard transform, hadamard_seed=8"):
            q.operand("columnwise", **given)
    with pytest.raises(ValueError, match="without a Hadamard transform"):
        q.operand("rowwise", hadamard=8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rounding": "up"}, "'nearest' or 'stochastic'"),
        ({"rounding": "stochastic"}, "a seed belongs to 'stochastic'"),
        ({"seed": 1}, "a seed belongs to 'stochastic'"),
        ({**STOCHASTIC, "seed": -1}, "an int from 0 to 2"),
        ({**STOCHASTIC, "seed": 2**63}, "an int from 0 to 2"),
        ({**STOCHASTIC, "seed": True}, "an int from 0 to 2"),
        ({**STOCHASTIC, "seed": torch.tensor([1, 2])}, "int64 tensor of one element"),
        ({**STOCHASTIC, "seed": torch.tensor(1, dtype=torch.int32)}, "int64 tensor of one element"),
        ({**STOCHASTIC, "seed": 1, "format": "mxfp8_e4m3"}, "only mxfp4 has it"),
        ({"hadamard": "rowwise", "format": "fp8_e4m3"}, "only mxfp4 has it"),
        ({"hadamard": "diagonal"}, "None, rowwise, columnwise, both"),
        ({"hadamard": "columnwise"}, "those codes were not asked for"),
        ({"hadamard": "both"}, "those codes were not asked for"),
        ({"hadamard": "both", "direction": "both"}, "the number of rows must be a multiple of 16"),
        ({"hadamard": "rowwise", "hadamard_seed": "a"}, "hadamard_seed is 'a'"),
    ],
)  # fmt: skip
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fw.quantize(torch.zeros(8, 32), **{"format": "mxfp4", "backend": "native", **options})


def test_compiled_with_a_seed_on_the_device():
    x, seed = matrix(32, 64, BF16), torch.tensor(40)

    def call(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        q = fw.quantize(x, "mxfp4", "both", rounding="stochastic", seed=seed, hadamard="columnwise", backend="native")
        assert q.data is not None and q.columnwise_data is not None
        return torch.cat([q.data, q.columnwise_data])

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for value in (40, 41):
        assert torch.equal(compiled(x, seed.fill_(value)), call(x, torch.tensor(value)))
    arguments = (x, "mxfp4", True, True, False, "floor", False, None, "native", seed, None, 99)
    torch.library.opcheck(torch.ops.fourwave.quantize, arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference(case: QuantizeCase) -> None:
    result = case.run("native")
    assert result.passed, f"{case}: {result.problems}"


# ---- kernels --------------------------------------------------------------------------------------------------------


@needs_sim
@every_arch
@pytest.mark.parametrize(
    "case", [case if case.hadamard == "both" else pytest.param(case, marks=pytest.mark.slow) for case in CASES], ids=str
)
def test_cases(case: QuantizeCase, arch: str) -> None:
    result = case.run(f"sim:{arch}")
    assert result.passed, f"{case}: {result.problems}"


@needs_sim
@pytest.mark.slow
@every_arch
@pytest.mark.parametrize(("rows", "columns"), [(34, 258), (1, 2), (33, 30), (64, 512)])
def test_tails(rows: int, columns: int, arch: str) -> None:
    for transposed in (False, True) if rows % 2 == 0 else (False,):
        case = QuantizeCase(rows, columns, "mxfp4", "both", transposed, kind="corners", rounding_seed=rows)
        result = case.run(f"sim:{arch}")
        assert result.passed, f"{case}: {result.problems}"


@needs_sim
@every_arch
@pytest.mark.parametrize("view", [pytest.param(view, marks=pytest.mark.slow) for view in inputs.VIEWS])
def test_views_that_nan_surrounds(view: str, arch: str) -> None:
    result = QuantizeCase(36, 144, "mxfp4", "both", view=view).run(f"sim:{arch}")
    assert result.passed, result.problems


@needs_sim
@every_arch
@pytest.mark.parametrize(("rows", "columns", "transposed"), [(64, 288, True), (38, 270, False)])
def test_everything_is_written_and_nothing_else(rows: int, columns: int, transposed: bool, arch: str) -> None:
    """Two poisons: what is not written keeps the poison in one of the runs at least."""
    case = QuantizeCase(rows, columns, "mxfp4", "both", transposed)
    problem = QuantizeProblem(rows, columns, BF16, "mxfp4", True, True, transposed, "floor")
    x = matrix(rows, columns, BF16)
    for poison in (0xA5, 0x5A):
        out = Guarded(problem)
        for t in out.tensors:
            if t is not None:
                t.view(-1).view(torch.uint8).fill_(poison)
        with sim.session(arch=arch, on_finding="raise"):
            amd.run(problem, arch, inputs.view(x, "sliced"), None, out.tensors)
        out.check()
        result = case.compare(quantized(problem, out.tensors, None), x)
        assert result.passed, result.problems


@needs_sim
@pytest.mark.slow
@every_arch
def test_the_order_of_waves_does_not_matter(arch: str) -> None:
    case = QuantizeCase(64, 288, "mxfp4", "both", rounding_seed=1, hadamard="rowwise")
    orders: tuple[dict[str, Any], ...] = (
        {"schedule": "reverse"},
        {"schedule": "random:7", "completion": "random"},
        {"completion": "early"},
    )
    for options in orders:
        with sim.session(arch=arch, on_finding="raise", **options):
            out = launch(case, arch)
        assert problems(case, out) == ()


@needs_sim
@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
@pytest.mark.parametrize("transposed", [False, True])
def test_lds_without_bank_conflicts(transposed: bool, arch: str) -> None:
    case = QuantizeCase(64, 512, "mxfp4", "both", transposed)
    with sim.session(arch=arch, on_finding="raise", count_bank_conflicts=True) as report:
        launch(case, arch)
    (counted,) = report.launches
    assert counted.counters["lds_read_cycles"] == counted.counters["lds_read_cycles_ideal"] > 0


@needs_sim
@every_arch
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_and_scales_beyond_2_to_31(transposed: bool, arch: str) -> None:
    """The last workgroup of a launch whose packed codes have more than 2^31 bytes, in memory that is never filled."""
    rows, columns = 32 * 15 + 16, 2**23 + 256
    case = QuantizeCase(16, 256, "mxfp4", "both", transposed)
    problem = QuantizeProblem(rows, columns, BF16, "mxfp4", True, True, transposed, "floor")
    assert rows * columns // 2 > 2**30
    try:
        x = torch.empty(rows, columns, dtype=BF16)
        out = problem.allocate(x)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    corner = matrix(16, 256, BF16)
    x[-16:, -256:].copy_(corner)
    count = 16 * (columns // 256)
    with sim.session(arch=arch, on_finding="raise", workgroups=range(count - 1, count)) as report:
        amd.run(problem, arch, x, None, out)
    assert report.workgroups == 1
    data, scale, columnwise, columnwise_scale = out[:4]
    assert data is not None and scale is not None and columnwise is not None and columnwise_scale is not None
    last = QuantizeTensors(
        data[-16:, -128:], scale[-16:, -8:],
        columnwise[-256:, -8:] if transposed else columnwise[-16:, -128:],
        columnwise_scale[-256:, -1:] if transposed else columnwise_scale[-1:, -256:],
    )  # fmt: skip
    small = QuantizeTensors(*(None if t is None else t.contiguous() for t in last))
    shape = dataclasses.replace(problem, rows=16, columns=256)
    result = case.compare(quantized(shape, small, None), corner)
    assert result.passed, result.problems


@needs_sim
@pytest.mark.slow
@every_arch
def test_every_kernel_that_is_listed(arch: str) -> None:
    """quantize_launches: its calls are right, so that a fault in one is seen."""
    for case in kernels(arch):
        if case.format == "mxfp4":
            with sim.session(arch=arch, on_finding="raise"):
                out = launch(case, arch)
            assert problems(case, out) == (), case


@pytest.mark.parametrize(
    ("change", "arch", "text"),
    [
        ({}, "gfx90a", "kernels for gfx942, gfx950, gfx1250, not for gfx90a"),
        ({"columns": 2**25}, "gfx950", "rows of 67108864 bytes"),
        ({"rows": 2**24, "columns": 8, "transposed": True}, "gfx1250", "16777216 rows; transposed codes"),
        ({"rows": 2**29, "columns": 2**12}, "gfx950", "tiles of 32 x 256"),
        ({"format": "mxfp8_e4m3"}, "gfx1250", "kernels for gfx942, gfx950, not for gfx1250"),
    ],
)
def test_what_the_kernels_refuse(change: dict[str, Any], arch: str, text: str) -> None:
    fields: dict[str, Any] = {
        "rows": 8,
        "columns": 8,
        "x_dtype": BF16,
        "format": "mxfp4",
        "columnwise": True,
        "scale_rule": "floor",
    }
    problem = QuantizeProblem(**(fields | change))
    assert text in (amd.why_unsupported(problem, arch) or "")
