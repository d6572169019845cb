"""Launches of the AMD quantization kernels inside a session of one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from fourwave.quantize import FORMATS, QuantizedTensor, amd
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors
from fourwave.quantize.random import hadamard_signs
from fourwave.testing.quantize_cases import QuantizeCase, matrix


def kernels(arch: str) -> Iterator[QuantizeCase]:
    """A small call of every kernel that arch has, with tails in rows and columns: each format both ways, natural and transposed."""
    for name, fmt in FORMATS.items():
        case = QuantizeCase(44, 304, name, "both", kind="corners")
        if fmt.element == "e2m1":
            yield case
            yield dataclasses.replace(case, transposed=True)
            for transposed in (False, True):
                yield dataclasses.replace(
                    case, rows=48, transposed=transposed, rounding_seed=7, hadamard="both", hadamard_seed=3
                )
        elif arch in amd.ARCHS:
            yield dataclasses.replace(case, rows=150)
            yield dataclasses.replace(case, rows=150, transposed=True)
            if fmt.scaling == "tensor":
                yield dataclasses.replace(case, rows=150, transposed=True, scale=0.37)


def problem_of(case: QuantizeCase) -> QuantizeProblem:
    fmt = FORMATS[case.format]
    rowwise = case.direction != "columnwise"
    columnwise = case.direction != "rowwise" and (case.transposed or not fmt.one_copy)
    signs = [
        hadamard_signs(case.hadamard_seed) if case.hadamard in (direction, "both") else None
        for direction in ("rowwise", "columnwise")
    ]
    return QuantizeProblem(
        case.rows, case.columns, case.dtype, case.format, rowwise, columnwise, columnwise and case.transposed,
        case.rule or ("floor" if fmt.is_mx else "fp32"), case.fnuz, case.scale is not None,
        stochastic=case.rounding_seed is not None, row_signs=signs[0], column_signs=signs[1],
    )  # fmt: skip


def launch(case: QuantizeCase, arch: str, outputs: QuantizeTensors | None = None) -> QuantizeTensors:
    """The case's codes and scales; call it inside sim.session(arch, ...)."""
    x = matrix(case.rows, case.columns, case.dtype, case.kind, case.seed)
    scale = None if case.scale is None else torch.tensor(case.scale)
    seed = None if case.rounding_seed is None else torch.tensor(case.rounding_seed)
    return amd.run(problem_of(case), arch, x, scale, outputs, seed)[0]


def problems(case: QuantizeCase, out: QuantizeTensors) -> tuple[str, ...]:
    """What is wrong with a launch's result, in words."""
    scale = None if case.scale is None else torch.tensor(case.scale)
    scales = (out.scale, out.columnwise_scale) if scale is None else (scale, scale)
    shared = FORMATS[case.format].one_copy and not case.transposed
    columnwise = (out.data, scales[0]) if shared else (out.columnwise_data, scales[1])
    quantized = QuantizedTensor(
        FORMATS[case.format], (case.rows, case.columns), out.data, scales[0], *columnwise, case.transposed, out.amax
    )
    x = matrix(case.rows, case.columns, case.dtype, case.kind, case.seed)
    return case.compare(quantized, x).problems
