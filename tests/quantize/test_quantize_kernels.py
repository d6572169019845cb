"""The FlyDSL quantization kernels on the simulator, which raises for any finding: bits, addressing, LDS banks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave import sim
from fourwave.blocks.flydsl import tiles
from fourwave.quantize import FORMATS, QuantizedTensor, amd
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors
from fourwave.testing import inputs
from fourwave.testing.quantize_cases import QUANTIZE_CASES, QuantizeCase, matrix

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = [name for name in FORMATS if name != "mxfp4"]
TAILS = [
    (1, 1), (33, 31), (129, 112), (144, 250),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 16), (16, 1), (127, 129), (2, 257))),
]  # fmt: skip
# e5m2 differs from e4m3 in the conversion only: where that is not the question it waits for the slow tests.
SOME_KERNELS = [pytest.param(name, marks=pytest.mark.slow) if name.endswith("_e5m2") else name for name in KERNELS]
every_arch = pytest.mark.parametrize("arch", amd.ARCHS)
GUARD = 0xA5


def assert_right(case: QuantizeCase, arch: str) -> None:
    result = case.run(f"sim:{arch}")
    assert result.passed, f"{case}: {result.problems}"


FNUZ = [case for case in QUANTIZE_CASES if case.format.startswith("fp8")][::2]


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        # gfx942 in quick tests: the codes that it reads, where FNUZ has the case.
        pytest.param(
            case,
            arch,
            id=f"{case}-{arch}",
            marks=pytest.mark.slow if "_e5m2" in case.format[4:] or (arch == "gfx942" and case in FNUZ) else (),
        )
        for case in QUANTIZE_CASES
        for arch in amd.ARCHS
        if case.format != "mxfp4"
    ],
)
def test_cases(case: QuantizeCase, arch: str) -> None:
    assert_right(case, arch)


@pytest.mark.parametrize("case", FNUZ, ids=str)
def test_fnuz_cases(case: QuantizeCase) -> None:
    assert_right(dataclasses.replace(case, fnuz=True), "gfx942")


@every_arch
@pytest.mark.parametrize("name", SOME_KERNELS)
def test_every_bf16_pattern(name: str, arch: str) -> None:
    for rule in ("floor", "ceil") if FORMATS[name].is_mx else ("fp32", "pow2"):
        assert_right(QuantizeCase(256, 256, name, "both", True, BF16, "patterns", rule=rule), arch)


@every_arch
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_every_pattern_with_a_given_scale(dtype: torch.dtype, name: str, arch: str) -> None:
    """Ties, subnormals, saturation, Inf and NaN of every kind meet the conversion itself."""
    for scale in (1.0, 0.37, 2.0**-126, 2.0**100):
        for fnuz in (False, True) if arch == "gfx942" else (False,):
            assert_right(QuantizeCase(256, 256, name, "both", True, dtype, "patterns", scale=scale, fnuz=fnuz), arch)


@every_arch
@pytest.mark.parametrize("view", inputs.VIEWS)
def test_views_that_nan_surrounds(view: str, arch: str) -> None:
    assert_right(QuantizeCase(70, 144, "mxfp8_e4m3", "both", view=view), arch)
    assert_right(QuantizeCase(70, 144, "fp8_1x128", "both", True, view=view), arch)


@every_arch
@pytest.mark.parametrize(("rows", "columns"), TAILS)
@pytest.mark.parametrize("name", ["fp8_row", "fp8_1x128", "mxfp8_e5m2"])
def test_tails(name: str, rows: int, columns: int, arch: str) -> None:
    assert_right(QuantizeCase(rows, columns, name, "both", True, kind="corners"), arch)
    assert_right(QuantizeCase(rows, columns, name, "both", False, FP32), arch)


# ---- outputs --------------------------------------------------------------------------------------------------------


class Guarded:
    """A problem's outputs, poisoned, each amid guard bytes."""

    def __init__(self, problem: QuantizeProblem) -> None:
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self.tensors = QuantizeTensors(*(spec and self._new(*spec) for spec in problem.outputs()))

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        buffer = torch.full((256 + size + 256,), GUARD, dtype=torch.uint8)
        self._buffers.append((buffer, size))
        return buffer[256 : 256 + size].view(dtype).view(shape)

    def check(self) -> None:
        for buffer, size in self._buffers:
            assert (buffer[:256] == GUARD).all() and (buffer[256 + size :] == GUARD).all()


def quantized(problem: QuantizeProblem, out: QuantizeTensors, scale: torch.Tensor | None) -> QuantizedTensor:
    scales = (scale, scale) if problem.given_scale else (out.scale, out.columnwise_scale)
    return QuantizedTensor(
        problem.quant_format, (problem.rows, problem.columns), out.data, scales[0], out.columnwise_data, scales[1],
        problem.transposed, out.amax,
    )  # fmt: skip


@every_arch
@pytest.mark.parametrize(("rows", "columns"), [(150, 208), pytest.param(61, 77, marks=pytest.mark.slow)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SOME_KERNELS)
def test_everything_is_written_and_nothing_else(
    name: str, transposed: bool, rows: int, columns: int, arch: str
) -> None:
    """Two poisons: what is not written keeps the poison in one of the runs at least."""
    fmt = FORMATS[name]
    columnwise = transposed or not fmt.one_copy
    rule = "floor" if fmt.is_mx else "fp32"
    problem = QuantizeProblem(rows, columns, BF16, name, True, columnwise, transposed, rule)
    case = QuantizeCase(rows, columns, name, "both" if columnwise else "rowwise", transposed)
    x = matrix(rows, columns, BF16)
    for poison in (GUARD, 0x5A):
        out = Guarded(problem)
        for t in out.tensors:
            if t is not None:
                t.view(-1).view(torch.uint8).fill_(poison)
        with sim.session(arch=arch, on_finding="raise"):
            amd.run(problem, arch, inputs.view(x, "sliced"), None, out.tensors)
        out.check()
        result = case.compare(quantized(problem, out.tensors, None), x)
        assert result.passed, result.problems


@every_arch
@pytest.mark.parametrize("options", [{"schedule": "reverse"}, {"schedule": "random:7"}], ids=str)
def test_order_of_waves_does_not_matter(options: dict[str, Any], arch: str) -> None:
    x = matrix(200, 272, FP32, "corners")
    for name in ("fp8_1x128", "fp8_128x128", "fp8_row", "mxfp8_e4m3", "fp8_e4m3"):
        rule = "floor" if FORMATS[name].is_mx else "fp32"
        problem = QuantizeProblem(200, 272, FP32, name, True, True, True, rule)
        with sim.session(arch=arch, on_finding="raise", **options):
            out, notes = amd.run(problem, arch, x)
        assert notes == []
        result = QuantizeCase(200, 272, name, "both", True, FP32, "corners").compare(quantized(problem, out, None), x)
        assert result.passed, result.problems


# ---- addressing -----------------------------------------------------------------------------------------------------


@every_arch
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "fp8_row"])
def test_rows_far_apart(name: str, arch: str) -> None:
    """x spans more than 2^31 elements and 4 GiB; few pages are ever touched."""
    pitch = 2**24 + 8  # elements: 32 MiB between rows
    x = matrix(140, 48, BF16)
    try:
        view = torch.empty(140 * pitch, dtype=BF16).as_strided((140, 48), (pitch, 1))
    except RuntimeError as error:
        pytest.skip(f"no address space for {140 * pitch} elements: {error}")
    assert 139 * pitch > 2**31
    view.copy_(x)
    q = fw.quantize(view, name, "both", backend=f"sim:{arch}")
    fnuz = arch == "gfx942" and not FORMATS[name].is_mx  # what that arch reads
    result = QuantizeCase(140, 48, name, "both", fnuz=fnuz).compare(q, x)
    assert result.passed, result.problems


@every_arch
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "fp8_1x128", "fp8_128x128"])
def test_codes_and_scales_beyond_2_to_31(name: str, transposed: bool, arch: str) -> None:
    """The last workgroup of a launch whose codes have more than 2^31 elements, in memory that is never filled."""
    rows, columns = 128 * 2 + 48, 2**23 + 128  # 2.5e9
    problem = QuantizeProblem(
        rows, columns, BF16, name, True, True, transposed, "floor" if FORMATS[name].is_mx else "fp32"
    )
    assert rows * columns > 2**31
    try:
        x = torch.empty(rows, columns, dtype=BF16)
        out = problem.allocate(x)
    except RuntimeError as error:
        pytest.skip(f"no address space: {error}")
    corner = matrix(48, 128, BF16)
    x[256:, -128:].copy_(corner)
    count = 3 * (columns // 128)
    with sim.session(arch=arch, on_finding="raise", workgroups=range(count - 1, count)) as report:
        amd.run(problem, arch, x, None, out)
    assert report.workgroups == 1
    assert out.data is not None and out.scale is not None
    assert out.columnwise_data is not None and out.columnwise_scale is not None
    across, along = FORMATS[name].block or (1, 1)
    k_rows, k_columns = -(-48 // across), 128 // along
    last = QuantizeTensors(
        out.data[256:, -128:],
        out.scale[-k_rows:, -k_columns:],
        out.columnwise_data[-128:, 256:] if transposed else out.columnwise_data[256:, -128:],
        out.columnwise_scale[-128 // across :, -(-48 // along) * -1 :]
        if transposed
        else out.columnwise_scale[-(-48 // along) * -1 :, -128 // across :],
    )
    small = QuantizeTensors(*(None if t is None else t.contiguous() for t in last))
    shape = dataclasses.replace(problem, rows=48, columns=128)
    result = QuantizeCase(48, 128, name, "both", transposed).compare(quantized(shape, small, None), corner)
    assert result.passed, result.problems


@every_arch
def test_what_is_copied_is_named(arch: str) -> None:
    x = matrix(40, 48, BF16)
    problem = QuantizeProblem(40, 48, BF16, "mxfp8_e4m3", scale_rule="floor")
    with sim.session(arch=arch, on_finding="raise"):
        assert amd.run(problem, arch, inputs.view(x, "offset"))[1] == []
        assert amd.run(problem, arch, inputs.view(x, "strided"))[1] == ["x copied: inner stride is not 1"]
        assert amd.run(problem, arch, x[:1].expand(40, 48))[1] == []
    q = fw.quantize(x[:1].expand(40, 48), "mxfp8_e4m3", backend=f"sim:{arch}")
    assert QuantizeCase(40, 48, "mxfp8_e4m3").compare(q, x[:1].expand(40, 48)).passed


# ---- LDS banks ------------------------------------------------------------------------------------------------------


@every_arch
@pytest.mark.parametrize("name", SOME_KERNELS)
def test_lds_reads_without_bank_conflicts(name: str, arch: str) -> None:
    rule = "floor" if FORMATS[name].is_mx else "fp32"
    problem = QuantizeProblem(256, 256, BF16, name, True, True, True, rule)
    with sim.session(arch=arch, on_finding="raise", count_bank_conflicts=True) as report:
        amd.run(problem, arch, matrix(256, 256, BF16))
    for launch in report.launches:
        assert launch.counters["lds_read_cycles"] == launch.counters["lds_read_cycles_ideal"], launch


@every_arch
def test_lds_writes_without_bank_conflicts(arch: str) -> None:
    from fourwave.quantize import cdna

    banks = tiles.LDS_BANKS[arch]
    in_order = [list(range(lane, lane + banks)) for lane in range(0, 64, banks)]  # 4 bytes per lane
    eighths = [list(range(lane, lane + 8)) for lane in range(0, 64, 8)]  # ds_write_b128 (tiles.py)
    for wave in range(4):
        for c in range(16):
            words = [
                cdna.codes_address(lane % 8, c, wave * 2 + (lane // 8 >> 2)) + (lane // 8 & 3) * 4 for lane in range(64)
            ]
            assert len(set(words)) == 64
            assert tiles.bank_conflicts(words, in_order, 4, banks) == 0
    for c in range(0, 16, 4):
        chunks = [cdna.columns_address(lane % 8, c) for lane in range(64)]
        assert tiles.bank_conflicts(chunks, eighths, 16, banks) == 0


# ---- what there is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "arch", "text"),
    [
        ({"fnuz": True}, "gfx950", "gfx950 converts to OCP's codes only"),
        ({"columns": 2**25}, "gfx942", "rows of 67108864 bytes; the kernels take less than 67108864"),
        ({"rows": 2**24, "columns": 8, "transposed": True}, "gfx950", "16777216 rows; transposed codes"),
        ({"rows": 2**30, "columns": 2**12}, "gfx950", "tiles of 128 x 128"),
        ({}, "gfx1250", "kernels for gfx942, gfx950, not for gfx1250"),
    ],
)
def test_what_the_kernels_refuse(change: dict[str, Any], arch: str, text: str) -> None:
    fields: dict[str, Any] = {"rows": 8, "columns": 8, "x_dtype": BF16, "format": "fp8_1x128", "columnwise": True}
    problem = QuantizeProblem(**(fields | change))
    reason = amd.why_unsupported(problem, arch)
    assert reason is not None and text in reason
    with pytest.raises(NotImplementedError, match=text):
        amd.run(problem, arch, torch.empty(problem.rows, problem.columns, device="meta", dtype=BF16))


def test_a_named_backend_refuses_and_auto_goes_on() -> None:
    x = matrix(8, 64, BF16)
    with pytest.raises(
        NotImplementedError, match="'sim:gfx1250' was asked for and cannot quantize 8x64 bf16 to mxfp8_e4m3"
    ):
        fw.quantize(x, "mxfp8_e4m3", backend="sim:gfx1250")
    assert fw.quantize(x, "mxfp8_e4m3", backend="auto").shape == (8, 64)


def test_the_simulation_is_reported() -> None:
    before = sim.current_report().workgroups
    fw.quantize(matrix(256, 128, BF16), "fp8_e4m3", backend="sim")
    assert sim.current_report().workgroups == before + 4  # two launches of two tiles


def test_the_backend_in_force_is_asked(caplog: pytest.LogCaptureFixture, told: Any) -> None:
    x = matrix(16, 64, BF16)
    with fw.use_backend("mxfp8=sim:gfx942,fp8=native"), caplog.at_level("DEBUG", "fourwave.dispatch"):
        before = sim.current_report().workgroups
        fw.quantize(x, "fp8_e4m3")
        assert sim.current_report().workgroups == before
        fw.quantize(x.mT, "mxfp8_e4m3", "both", columnwise_transposed=True)
        assert sim.current_report().workgroups == before + 1
    assert [record.getMessage() for record in told()] == [
        "quantize 16x64 bf16 to fp8_e4m3, rowwise, scale rule fp32: native",
        "quantize 64x16 bf16 to mxfp8_e4m3, rowwise and columnwise, transposed, scale rule floor: sim:gfx942; "
        "x copied: inner stride is not 1",
    ]


def test_a_finding_raises() -> None:
    """Codes into memory that no tensor owns: the checks of the simulator are on."""
    x = matrix(64, 64, BF16)
    problem = QuantizeProblem(64, 64, BF16, "mxfp8_e4m3", scale_rule="floor")
    out = problem.allocate(x)
    short = torch.empty(32 * 64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(32, 64)
    with (
        pytest.raises(sim.SimulationError, match="writes global memory outside every allocation"),
        sim.session(on_finding="raise"),
    ):
        amd.run(problem, "gfx950", x, None, out._replace(data=short))
