"""fw.quantize on PyTorch: the numbers against an independent definition, corner cases by hand, errors, tracing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fourwave as fw
from fourwave import formats
from fourwave.formats.scaling import expand_scale
from fourwave.quantize import FORMATS, QuantizedTensor
from fourwave.quantize.problem import QuantizeProblem
from fourwave.quantize.reference import quantize_reference
from fourwave.testing import inputs
from fourwave.testing.quantize_cases import QUANTIZE_CASES, QuantizeCase, matrix

NAN, INF = float("nan"), float("inf")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MX = [name for name, fmt in FORMATS.items() if fmt.is_mx]
PER_TENSOR = ("fp8_e4m3", "fp8_e5m2")
every_format = pytest.mark.parametrize("name", FORMATS)


def codes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def assert_right(case: QuantizeCase, backend: str = "native") -> None:
    result = case.run(backend)
    assert result.passed, f"{case}: {result.problems}"


@pytest.mark.parametrize("case", QUANTIZE_CASES, ids=str)
def test_cases(case: QuantizeCase) -> None:
    assert_right(case)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@every_format
def test_every_pattern(name: str, dtype: torch.dtype) -> None:
    """All 65536 patterns of 16-bit types, ties around every code from float32; both rules."""
    for rule in ("floor", "ceil") if FORMATS[name].is_mx else ("fp32", "pow2"):
        assert_right(QuantizeCase(256, 256, name, "both", True, dtype, "patterns", rule=rule))


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", PER_TENSOR)
def test_every_pattern_with_a_given_scale(name: str, dtype: torch.dtype, fnuz: bool) -> None:
    for scale in (1.0, 0.37, 2.0**-20, 2.0**-126, 2.0**100):
        assert_right(QuantizeCase(256, 256, name, "rowwise", False, dtype, "patterns", scale=scale, fnuz=fnuz))


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in MX])
def test_fnuz(name: str) -> None:
    assert_right(QuantizeCase(100, 300, name, "both", True, kind="corners", fnuz=True))


@pytest.mark.parametrize("view", inputs.VIEWS)
@every_format
def test_views(name: str, view: str) -> None:
    assert_right(QuantizeCase(70, 134, name, "both", False, kind="spread", view=view))


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 2), (1, 128), (2, 1), (128, 128), (129, 127), (3, 1000), (31, 33), (257, 8)]
)
@every_format
def test_shapes(name: str, rows: int, columns: int) -> None:
    if name == "mxfp4" and columns % 2:
        columns += 1
    assert_right(QuantizeCase(rows, columns, name, "both"))
    if name != "mxfp4" or rows % 2 == 0:
        assert_right(QuantizeCase(rows, columns, name, "both", True))


# ---- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "x", "byte", "code"),
    [
        ("mxfp8_e4m3", "floor", 1.0, 119, 256.0),  # floor(log2 1) - 8 = -8
        ("mxfp8_e4m3", "floor", 1.99, 119, 448.0),  # 509 saturates
        ("mxfp8_e4m3", "floor", 448.0, 127, 448.0),
        ("mxfp8_e4m3", "ceil", 448.0, 127, 448.0),
        ("mxfp8_e4m3", "ceil", 1.75, 119, 448.0),
        ("mxfp8_e4m3", "ceil", 1.7500001, 120, 224.0),
        ("mxfp8_e5m2", "floor", 1.0, 112, 32768.0),
        ("mxfp8_e5m2", "ceil", 1.99, 113, 32768.0),
        ("mxfp4", "floor", 1.0, 125, 4.0),
        ("mxfp4", "floor", 1.99, 125, 6.0),
        ("mxfp4", "ceil", 1.5, 125, 6.0),
        ("mxfp4", "ceil", 1.99, 126, 4.0),
        ("mxfp8_e4m3", "floor", 0.0, 0, 0.0),
        ("mxfp8_e4m3", "ceil", 2.0**-149, 0, 0.0),
        ("mxfp8_e5m2", "floor", 2.0**-130, 0, 2.0**-3),
        ("mxfp8_e4m3", "floor", 3.4e38, 246, 448.0),
        ("mxfp8_e4m3", "ceil", 3.4e38, 247, 256.0),
    ],
)
def test_mx_by_hand(name: str, rule: str, x: float, byte: int, code: float) -> None:
    q = fw.quantize(torch.tensor([[x] + [0.0] * 31]), name, scale_rule=rule)
    assert q.scale is not None and q.data is not None
    assert codes(q.scale).tolist() == [[byte]]
    raw = formats.unpack_e2m1(q.data) if name == "mxfp4" else q.data
    assert formats.decode(raw, q.element_format)[0].tolist() == [code] + [0.0] * 31


def test_mx_default_is_floor() -> None:
    q = fw.quantize(torch.full((1, 32), 1.99), "mxfp8_e4m3")
    assert q.scale is not None and codes(q.scale).item() == 119


@pytest.mark.parametrize(
    ("rule", "x", "scale"),
    [
        ("fp32", 448.0, 1.0), ("fp32", 1.0, 1 / 448), ("fp32", 0.0, 2.0**-126), ("fp32", 2.0**-149, 2.0**-126),
        ("fp32", 3.4e38, 3.4e38 / 448), ("pow2", 448.0, 1.0), ("pow2", 448.0001, 2.0), ("pow2", 225.0, 1.0),
        ("pow2", 224.0, 0.5), ("pow2", 0.0, 2.0**-126), ("pow2", 3.4e38, 2.0**120),
    ],
)  # fmt: skip
def test_float32_scales_by_hand(rule: str, x: float, scale: float) -> None:
    for name in ("fp8_e4m3", "fp8_row", "fp8_1x128", "fp8_128x128"):
        q = fw.quantize(torch.tensor([[x, 0.0]]), name, scale_rule=rule)
        assert q.scale is not None
        assert q.scale.flatten().tolist() == [float(torch.tensor(scale, dtype=FP32))]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@every_format
def test_a_block_that_is_not_finite(name: str, bad: float) -> None:
    """Its scale is NaN and so is every value in it; blocks beside it are as without it."""
    x = matrix(256, 256, FP32)
    good = fw.quantize(x, name, "both").dequantize()
    x[3, 5] = bad
    q = fw.quantize(x, name, "both")
    assert q.scale is not None and q.columnwise_scale is not None
    for direction in ("rowwise", "columnwise"):
        rows, columns = QuantizeProblem(256, 256, FP32, name).block(direction == "rowwise")
        r0, c0 = 3 // rows * rows, 5 // columns * columns
        block = torch.zeros(256, 256, dtype=torch.bool)
        block[r0 : r0 + rows, c0 : c0 + columns] = True
        assert torch.equal(q.dequantize(direction=direction).isnan(), block)
        data = q.data if direction == "rowwise" else q.columnwise_data
        assert data is not None
        if name == "mxfp4":
            assert (formats.unpack_e2m1(data)[block] == 0x7).all()
        else:
            assert torch.equal(codes(data).eq(q.element_format.nan_code or 0), block)
    values = q.dequantize()
    kept = ~values.isnan()
    assert torch.equal(values[kept], good[kept])
    if name in PER_TENSOR:
        assert q.amax is not None
        assert q.amax.isnan() if math.isnan(bad) else q.amax == INF


@every_format
def test_zeros(name: str) -> None:
    for zero in (0.0, -0.0):
        q = fw.quantize(torch.full((64, 256), zero), name, "both", columnwise_transposed=True)
        for scale in (q.scale, q.columnwise_scale):
            assert scale is not None
            smallest = 2.0**-127 if name in MX else 2.0**-126
            values = scale.to(torch.float64)
            assert (values == smallest).all()
        assert (q.dequantize() == 0).all() and (q.dequantize(direction="columnwise") == 0).all()


@pytest.mark.parametrize("fnuz", [False, True])
@pytest.mark.parametrize("name", PER_TENSOR)
def test_given_scale(name: str, fnuz: bool) -> None:
    scale = torch.tensor([0.5])
    x = torch.tensor([[1.0, -1.0, 1e30, -1e30, INF, -INF, NAN, -NAN, 0.0, -0.0]])
    q = fw.quantize(x, name, "both", scale=scale, fnuz=fnuz)
    assert q.data is not None and q.scale is not None and q.data is q.columnwise_data and q.scale is q.columnwise_scale
    assert q.scale.shape == () and q.scale.data_ptr() == scale.data_ptr() and q.amax is not None and q.amax.isnan()
    fmt = q.element_format
    top = fmt.max
    assert q.data.to(FP32)[0, :6].tolist() == [2, -2, top, -top, top, -top]
    zero = 0 if fnuz else 0x80
    assert codes(q.data)[0, 6:].tolist() == [fmt.nan_code] * 2 + [0, zero]
    x[x.isnan()] = 0
    assert fw.quantize(x, name, scale=scale).amax == INF
    assert fw.quantize(x[:, :4], name, scale=scale).amax == torch.tensor(1e30)


# ---- properties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@every_format
def test_dequantize_is_near(name: str, dtype: torch.dtype) -> None:
    """Half a step of the element format, plus float32's rounding of x * inv; what saturates is named by "floor" alone."""
    fmt = FORMATS[name]
    x = matrix(150, 258, dtype).double()
    for rule in ("floor", "ceil") if fmt.is_mx else ("fp32", "pow2"):
        q = fw.quantize(x.to(dtype), name, "both", scale_rule=rule)
        for direction, k_last in (("rowwise", True), ("columnwise", False)):
            stored = q.scale if k_last else q.columnwise_scale
            assert stored is not None
            scale = expand_scale(stored, fmt.scaling, (150, 258), k_last)
            element = q.element_format
            bound = x.abs() * (element.eps / 2 + 2.0**-22) + scale * element.smallest / 2
            if rule == "floor":
                bound = torch.maximum(bound, x.abs() - scale * element.max)
            error = (q.dequantize(torch.float64, direction=direction) - x).abs()
            assert (error <= bound).all(), (rule, direction, float((error / bound).max()))


@every_format
def test_quantizing_again_changes_nothing(name: str) -> None:
    """Of dequantized values: "floor" and "fp32" keep every code, the other rules every value (a scale may halve where the
    largest element was rounded down)."""
    fmt = FORMATS[name]
    x = matrix(150, 258, FP32)
    for rule in ("floor", "ceil") if fmt.is_mx else ("fp32", "pow2"):
        for direction in ("rowwise", "columnwise"):
            q = fw.quantize(x, name, direction, scale_rule=rule)
            values = q.dequantize(torch.float32)
            again = fw.quantize(values, name, direction, scale_rule=rule)
            if rule in ("floor", "fp32"):
                for got, wanted in ((again.data, q.data), (again.columnwise_data, q.columnwise_data)):
                    assert got is wanted is None or torch.equal(codes(got), codes(wanted))  # type: ignore[arg-type]
            if rule != "fp32":
                assert torch.equal(again.dequantize(torch.float64), q.dequantize(torch.float64))


@every_format
def test_directions_are_transposes_of_each_other(name: str) -> None:
    x = matrix(160, 96, BF16, "corners")
    q = fw.quantize(x, name, "columnwise", columnwise_transposed=True)
    t = fw.quantize(x.mT, name, "rowwise")
    assert (
        q.columnwise_data is not None and q.columnwise_scale is not None and t.data is not None and t.scale is not None
    )
    assert torch.equal(codes(q.columnwise_data), codes(t.data))
    assert torch.equal(codes(q.columnwise_scale.view(-1)), codes(t.scale.view(-1)))


def test_one_scale_of_both_directions_is_one_copy() -> None:
    x = matrix(160, 96, BF16)
    for name in ("fp8_e4m3", "fp8_128x128"):
        q = fw.quantize(x, name, "both")
        assert q.data is q.columnwise_data and q.scale is q.columnwise_scale
        only = fw.quantize(x, name, "columnwise")
        assert only.data is None and only.columnwise_data is not None and q.data is not None
        assert torch.equal(codes(only.columnwise_data), codes(q.data))
        turned = fw.quantize(x, name, "both", columnwise_transposed=True)
        assert turned.columnwise_data is not None and torch.equal(codes(turned.columnwise_data), codes(q.data).mT)


def test_leading_dimensions_are_flattened() -> None:
    x = matrix(24, 64, BF16).view(2, 3, 4, 64)
    for name in FORMATS:
        q, flat = fw.quantize(x, name), fw.quantize(x.view(24, 64), name)
        assert q.shape == (24, 64) and q.data is not None and flat.data is not None
        assert torch.equal(codes(q.data), codes(flat.data))
    assert fw.quantize(x[0, 0, 0], "fp8_row").shape == (1, 64)


@pytest.mark.parametrize("shape", [(0, 64), (6, 0), (0, 0), (2, 0, 4)])
@every_format
def test_nothing_to_quantize(name: str, shape: tuple[int, ...]) -> None:
    q = fw.quantize(torch.empty(shape), name, "both", columnwise_transposed=True)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    assert q.shape == (rows, columns) and q.data is not None and q.columnwise_data is not None and q.scale is not None
    assert q.data.numel() == q.columnwise_data.numel() == 0
    assert q.dequantize().shape == (rows, columns) and not q.scale.to(FP32).isnan().any()
    if name in PER_TENSOR:
        assert q.amax == 0


# ---- tracing --------------------------------------------------------------------------------------------------------


@every_format
def test_compiles_as_a_full_graph(name: str) -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        q = fw.quantize(x * 2, name, "both", columnwise_transposed=True)
        return q.data, q.scale, q.columnwise_data, q.columnwise_scale, q.amax, q.shape

    torch._dynamo.reset()  # its limit of recompilations is for all formats together
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for x in (matrix(64, 96, BF16), matrix(130, 66, BF16)):
        for a, b in zip(compiled(x), function(x), strict=True):
            if isinstance(b, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(codes(a.view(-1)), codes(b.view(-1)))
            else:
                assert a == b


@every_format
def test_operator_is_well_formed(name: str) -> None:
    fmt = FORMATS[name]
    rule = "floor" if fmt.is_mx else "fp32"
    x = matrix(34, 66, FP32)
    torch.library.opcheck(torch.ops.fourwave.quantize, (x, name, True, True, True, rule, False, None, "native"))
    if fmt.scaling == "tensor":
        arguments = (x, name, True, False, False, rule, False, torch.tensor(0.5), "native")
        torch.library.opcheck(torch.ops.fourwave.quantize, arguments)


@every_format
def test_nothing_is_read_on_the_host(name: str) -> None:
    """Fake tensors have no values: reading one raises."""
    rule = "floor" if FORMATS[name].is_mx else "fp32"
    problem = QuantizeProblem(64, 96, BF16, name, True, True, True, rule)
    with FakeTensorMode():
        result = quantize_reference(problem, torch.empty(64, 96, dtype=BF16))
        for got, spec in zip(result, problem.outputs(), strict=True):
            assert (got is None) == (spec is None)
            if got is not None and spec is not None:
                assert (tuple(got.shape), got.dtype) == spec and got.is_contiguous()


def test_fake_tensors_and_meta() -> None:
    with FakeTensorMode():
        q = fw.quantize(torch.empty(6, 64), "mxfp8_e4m3", "both")
        assert q.columnwise_scale is not None and q.columnwise_scale.shape == (1, 64)
    q = fw.quantize(torch.empty(6, 64, device="meta"), "fp8_1x128")
    assert q.data is not None and q.data.is_meta and q.data.dtype == torch.float8_e4m3fn


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.ones(4, 64)
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"format": "fp8"}, "format 'fp8': the formats are fp8_e4m3, .*mxfp4"),
    ({"format": None}, "format None: the formats are"),
    ({"direction": "both ways"}, "direction 'both ways': the directions are rowwise, columnwise, both"),
    ({"x": [1.0]}, "x is list; it must be a float32, bfloat16 or float16 tensor"),
    ({"x": X.double()}, "x is torch.float64; it must be"),
    ({"x": torch.tensor(1.0)}, "no dimensions"),
    ({"x": X.to_sparse()}, "quantize takes strided tensors"),
    ({"scale_rule": "floor"}, "scale_rule 'floor': fp8_e4m3 has fp32 and pow2"),
    ({"format": "mxfp4", "scale_rule": "fp32"}, "mxfp4 has floor and ceil"),
    ({"format": "mxfp8_e4m3", "fnuz": True}, "MX formats have OCP codes only"),
    ({"columnwise_transposed": True}, "no columnwise codes to transpose"),
    ({"format": "fp8_row", "scale": torch.tensor(1.0)}, "fp8_row makes its own scales"),
    ({"scale": 0.5}, "scale is 0.5; it must be a float32 tensor of one element"),
    ({"scale": torch.ones(2)}, r"scale is torch.float32 \(2,\); it must be"),
    ({"scale": torch.ones((), dtype=BF16)}, "scale is torch.bfloat16"),
    ({"scale": torch.ones((), device="meta")}, "scale is on meta and x is on cpu"),
    ({"scale": torch.tensor(1.0), "scale_rule": "pow2"}, "leave one away"),
    ({"x": torch.ones(4, 63), "format": "mxfp4"}, "the last dimension must be even"),
    ({"x": torch.ones(3, 64), "format": "mxfp4", "direction": "columnwise", "columnwise_transposed": True}, "number of rows must be even"),
    ({"x": X.clone().requires_grad_()}, "quantize has no gradient: detach it, or use torch.no_grad"),
    ({"backend": "gpu"}, "backend 'gpu' in 'gpu': the backends are"),
    ({"backend": 3}, "backend is 3; it must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=[text[:30] for _, text in ERRORS])
def test_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call: dict[str, Any] = {"x": X, "format": "fp8_e4m3"}
        fw.quantize(**(call | arguments))


def test_grad_is_refused_only_where_it_would_be_lost() -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        q = fw.quantize(x, "fp8_e4m3")
    assert q.data is not None and not q.data.requires_grad
    assert fw.quantize(x.detach(), "fp8_e4m3").shape == (4, 64)


def test_a_named_backend_that_is_not_here() -> None:
    with pytest.raises(fw.BackendUnavailable, match="'flydsl' was asked for"):
        fw.quantize(X, "fp8_e4m3", backend="flydsl")


def test_dequantize_asks_for_what_is_there() -> None:
    q = fw.quantize(X, "mxfp8_e4m3")
    with pytest.raises(ValueError, match="no columnwise codes: quantize with direction='both'"):
        q.dequantize(direction="columnwise")
    with pytest.raises(ValueError, match="direction 'x'"):
        q.dequantize(direction="x")


# ---- from_codes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@every_format
def test_from_codes(name: str, transposed: bool) -> None:
    """What quantize makes, taken apart and put together: values and shapes are the same."""
    q = fw.quantize(matrix(64, 256, BF16), name, "both", columnwise_transposed=transposed)
    for row, column in ((True, True), (True, False), (False, True)):
        made = QuantizedTensor.from_codes(
            name,
            q.data if row else None,
            q.scale if row else None,
            q.columnwise_data if column else None,
            q.columnwise_scale if column else None,
            columnwise_transposed=transposed,
        )
        assert made.shape == q.shape and made.has("rowwise") == row and made.has("columnwise") == column
        for direction, there in (("rowwise", row), ("columnwise", column)):
            if there:
                assert torch.equal(made.dequantize(direction=direction), q.dequantize(direction=direction))


def test_from_codes_takes_bytes_views_and_fnuz() -> None:
    q = fw.quantize(matrix(64, 256, BF16), "mxfp8_e4m3")
    assert q.data is not None and q.scale is not None
    spread = torch.empty(64, 16, dtype=torch.uint8)[:, ::2].copy_(q.scale.view(torch.uint8))
    made = QuantizedTensor.from_codes("mxfp8_e4m3", q.data, spread)
    assert made.scale is not None and made.scale.is_contiguous() and torch.equal(made.dequantize(), q.dequantize())
    f = fw.quantize(matrix(64, 256, BF16), "fp8_row", fnuz=True)
    assert QuantizedTensor.from_codes("fp8_row", f.data, f.scale).element_format is formats.E4M3FNUZ
    one = QuantizedTensor.from_codes("fp8_e5m2", torch.ones(2, 3).to(torch.float8_e5m2), torch.ones(1))
    assert one.scale is not None and one.scale.shape == ()


E4M3 = torch.zeros(4, 256).to(torch.float8_e4m3fn)
FROM_CODES_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"format": "fp8"}, "format 'fp8': the formats are"),
    ({"data": None, "scale": None}, "neither data nor columnwise_data"),
    ({"scale": None}, "data and scale belong together"),
    ({"data": E4M3[0]}, r"data is \(256,\); it must be a matrix"),
    ({"data": E4M3.view(torch.uint8)}, "data is torch.uint8; codes of fp8_1x128 are torch.float8_e4m3fn or torch.float8_e4m3fnuz"),
    ({"scale": torch.ones(4, 3)}, r"scale is \(4, 3\); these codes of fp8_1x128 have scales \(4, 2\)"),
    ({"scale": torch.ones(4, 2, dtype=BF16)}, "scale is torch.bfloat16; scales of fp8_1x128 are torch.float32"),
    ({"scale": torch.ones(4, 2, device="meta")}, "scale is on meta and its codes are on cpu"),
    ({"format": "mxfp8_e4m3"}, "scales of mxfp8_e4m3 are torch.float8_e8m0fnu"),
    ({"columnwise_data": E4M3.mT, "columnwise_scale": torch.ones(2, 4)}, r"of a matrix \(4, 256\), columnwise_data of one \(256, 4\)"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), FROM_CODES_ERRORS, ids=[text[:30] for _, text in FROM_CODES_ERRORS])
def test_from_codes_errors(arguments: dict[str, Any], text: str) -> None:
    call: dict[str, Any] = {"format": "fp8_1x128", "data": E4M3, "scale": torch.ones(4, 2)}
    with pytest.raises(ValueError, match=text):
        QuantizedTensor.from_codes(**(call | arguments))
