"""The Hopper quantization kernels: every bit against the expectation of testing/quantize_cases.py, on a GPU; what they refuse."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.quantize import FORMATS, sm90_launch
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors
from fourwave.testing import inputs
from fourwave.testing.quantize_cases import QUANTIZE_CASES, QuantizeCase, matrix

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
missing = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(missing is not None, reason=f"no hopper: {missing}")
every_format = pytest.mark.parametrize("name", FORMATS)
CASES = [
    case
    for case in QUANTIZE_CASES
    if not case.fnuz and getattr(case, "rounding_seed", None) is None and getattr(case, "hadamard", None) is None
]
GUARD = 0xA5


def assert_right(case: QuantizeCase) -> None:
    result = case.run("hopper", device="cuda")
    assert result.passed, f"{case}: {result.problems}"


@on_gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case: QuantizeCase) -> None:
    assert_right(case)


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@every_format
def test_every_pattern(name: str, dtype: torch.dtype) -> None:
    """All 65536 patterns of 16-bit types, ties around every code from float32; both rules."""
    for rule in ("floor", "ceil") if FORMATS[name].is_mx else ("fp32", "pow2"):
        assert_right(QuantizeCase(256, 256, name, "both", True, dtype, "patterns", rule=rule))


@on_gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_pattern_with_a_given_scale(name: str, dtype: torch.dtype) -> None:
    for scale in (1.0, 0.37, 2.0**-20, 2.0**-126, 2.0**100):
        assert_right(QuantizeCase(256, 256, name, "both", True, dtype, "patterns", scale=scale))


@on_gpu
@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
@every_format
def test_directions(name: str, direction: str) -> None:
    assert_right(QuantizeCase(264, 392, name, direction, False, kind="corners"))
    if direction != "rowwise":
        assert_right(QuantizeCase(264, 392, name, direction, True, kind="corners"))


@on_gpu
@pytest.mark.parametrize("view", inputs.VIEWS)
@pytest.mark.parametrize("name", ["fp8_row", "fp8_128x128", "mxfp8_e4m3", "mxfp4"])
def test_views_that_nan_surrounds(name: str, view: str) -> None:
    assert_right(QuantizeCase(70, 136, name, "both", True, view=view))


@on_gpu
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 2), (1, 128), (2, 1), (128, 128), (129, 127), (3, 1000), (31, 33), (257, 8), (8, 4104)]
)
@every_format
def test_tails(name: str, rows: int, columns: int) -> None:
    if name == "mxfp4" and columns % 2:
        columns += 1
    assert_right(QuantizeCase(rows, columns, name, "both", kind="corners"))
    if name != "mxfp4" or rows % 2 == 0:
        assert_right(QuantizeCase(rows, columns, name, "both", True, kind="corners"))


@on_gpu
@every_format
def test_nothing_else_is_written_and_every_byte_is(name: str) -> None:
    problem = QuantizeProblem(
        130, 140, BF16, name, True, not FORMATS[name].one_copy, False, "ceil" if FORMATS[name].is_mx else "fp32",
        device_type="cuda",
    )  # fmt: skip
    x = matrix(130, 140, BF16, "corners").cuda()
    results = []
    for fill in (GUARD, 0x5A):
        buffers: list[tuple[torch.Tensor, int]] = []
        outputs: list[torch.Tensor | None] = []
        for spec in problem.outputs():
            if spec is None:
                outputs.append(None)
                continue
            size = torch.Size(spec[0]).numel() * spec[1].itemsize
            buffer = torch.full((64 + size + 64,), fill, dtype=torch.uint8, device="cuda")
            buffers.append((buffer, size))
            outputs.append(buffer[64 : 64 + size].view(spec[1]).view(spec[0]))
        sm90_launch.run(problem, x, None, QuantizeTensors(*outputs))
        assert all((b[:64] == fill).all() and (b[64 + size :] == fill).all() for b, size in buffers)
        results.append([b[64 : 64 + size].clone() for b, size in buffers])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_gpu
def test_matrices_beyond_4_gib() -> None:
    rows, columns = 2**17 + 8, 2**14 + 128  # 4.3 GB of bfloat16
    x = torch.zeros(rows, columns, dtype=BF16, device="cuda")
    x[-8:] = matrix(8, columns, BF16).cuda()
    q = fw.quantize(x, "mxfp8_e4m3", "both", columnwise_transposed=True, backend="hopper")
    tail = fw.quantize(x[-8:].clone(), "mxfp8_e4m3", "both", columnwise_transposed=True, backend="native")
    for name, part in (
        ("data", (slice(-8, None),)), ("scale", (slice(-8, None),)),
        ("columnwise_data", (slice(None), slice(-8, None))), ("columnwise_scale", (slice(None), slice(-1, None))),
    ):  # fmt: skip
        got, want = getattr(q, name)[part], getattr(tail, name)[part]
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), name


@on_gpu
def test_in_a_graph_and_as_auto_chooses() -> None:
    x = matrix(256, 512, BF16, "corners").cuda()
    fw.quantize(x, "fp8_e4m3", "both", columnwise_transposed=True)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = fw.quantize(x, "fp8_e4m3", "both", columnwise_transposed=True)
    for seed in (1, 2):
        x.copy_(matrix(256, 512, BF16, seed=seed))
        graph.replay()
        want = fw.quantize(x, "fp8_e4m3", "both", columnwise_transposed=True, backend="native")
        for name in ("data", "scale", "columnwise_data", "columnwise_scale", "amax"):
            got, right = (getattr(each, name).reshape(-1).view(torch.uint8) for each in (q, want))
            assert torch.equal(got, right), (seed, name)


def test_what_is_refused() -> None:
    base = QuantizeProblem(64, 64, BF16, "fp8_e4m3", device_type="cuda")
    assert sm90_launch.why_unsupported(base) is None
    for change, word in (
        ({"fnuz": True}, "fnuz"), ({"rows": 2**31}, "sides"), ({"rows": 2**30, "columns": 2**30}, "tiles"),
        ({"stochastic": True, "format": "mxfp4"}, "stochastic"), ({"row_signs": 5, "format": "mxfp4"}, "Hadamard"),
    ):  # fmt: skip
        reason = sm90_launch.why_unsupported(dataclasses.replace(base, **change))
        assert reason is not None and word in reason, change
    backend = registry.get("hopper")
    reason = backend.why_quantize_unsupported(dataclasses.replace(base, device_type="cpu"))
    assert reason is not None and "CPU" in reason


@pytest.mark.skipif(missing is None, reason="hopper is here")
def test_without_it_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(fw.BackendUnavailable, match=r"hopper.*cannot run here"):
        fw.quantize(torch.ones(2, 32), "mxfp8_e4m3", backend="hopper")
    with caplog.at_level("DEBUG", logger="fourwave.dispatch"):
        fw.quantize(torch.ones(2, 32), "mxfp8_e4m3")
    assert any("native; " in r.message and "not hopper: " in r.message for r in caplog.records), caplog.text
    told = fw.explain_quantize(torch.ones(2, 32), "mxfp8_e4m3", "both", columnwise_transposed=True)
    assert told.backend == "native" and told.kernel == "quantize/reference.py (PyTorch)"
    assert told.rejected["hopper"] == registry.get(
        "hopper"
    ).unavailable() and "quantize 2x32 fp32 to mxfp8_e4m3" in str(told)
    told = fw.explain_quantize(torch.ones(2, 32), "fp8_e4m3", backend="hopper")
    assert told.backend is None and isinstance(told.error, fw.BackendUnavailable)
    told = fw.explain_quantize(torch.ones(0, 32), "fp8_row")
    assert told.kernel == "nothing to launch"
    with pytest.raises(ValueError, match="formats are"):
        fw.explain_quantize(torch.ones(2, 32), "fp9")


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="CuTe DSL is not installed")
@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128", "1x32"])
def test_machine_code(scaling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without a GPU: no spills, no flushed subnormals, no fused multiplication and addition, 16-byte loads."""
    monkeypatch.chdir(tmp_path)  # CuTe DSL writes what it keeps into the working directory
    rule = "ceil" if scaling == "1x32" else "fp32"
    spec = sm90_launch.QuantizeSpec("bfloat16", "e4m3fn", scaling, rule, True, True, True, False, True, True)
    ptx = sm90_launch.compile_kernel(spec, keep=True).__ptx__
    assert ptx.count("ld.global.nc.v4.b32") == 8  # the thread's 64 elements, once
    assert ptx.count("st.global.v2.b32") == 16
    assert ".ftz" not in ptx and "fma." not in ptx and ".local" not in ptx
