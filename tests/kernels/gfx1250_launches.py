"""The kernels for gfx1250 by name, each with a call that brings every page of scales twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fourwave.ops.gemm.config import candidates_for
from fourwave.testing import GemmCase
from fourwave.testing.shapes import Shape

ARCH = "gfx1250"
DEPTH = 22 * 128
OPERANDS: dict[str, dict[str, Any]] = {
    "mxfp4": {"a_format": "mxfp4", "b_format": "mxfp4"},
    "mxfp8 x mxfp4": {"a_format": "mxfp8_e4m3", "b_format": "mxfp4"},
    "mxfp4 x mxfp8": {"a_format": "mxfp4", "b_format": "mxfp8_e5m2"},
    "mxfp8": {"a_format": "mxfp8_e5m2", "b_format": "mxfp8_e4m3"},
    "bf16 x mxfp4": {"dtype": torch.bfloat16, "b_format": "mxfp4"},
}


def layouts(operands: str) -> tuple[str, ...]:
    return ("TN", "NN") if operands.startswith("bf16") else ("TN", "NN", "NT")


def case_of(operands: str, layout: str, shape: Shape, **fields: Any) -> GemmCase:
    return GemmCase(shape, layout, **({"out_dtype": torch.float32} | OPERANDS[operands] | fields))


def kernels() -> Iterator[tuple[str, GemmCase, Any]]:
    """(name, case, config) of every kernel: operands, layout and tile.

    22 steps: the pages of scales are filled twice, and the last tile past K comes to stage 0, where the epilogue begins. alpha is
    not 1, so that the epilogue changes what it finds in LDS.
    """
    for operands in OPERANDS:
        for layout in layouts(operands):
            for config in candidates_for(case_of(operands, layout, Shape("", 64, 64, 64)).problem, ARCH):
                shape = Shape("pages", config.tile_m, config.tile_n, DEPTH)
                name = f"gemm {operands} {layout} {config.tile_m}x{config.tile_n}"
                yield name, case_of(operands, layout, shape, alpha=0.75), config
    for name, case, config in further():
        yield f"gemm {name}", case, config


def further() -> Iterator[tuple[str, GemmCase, Any]]:
    """What an epilogue can do beside: all at once, for the largest tile and a small one, the bias gradient, swiglu, and quantized results."""
    for rows in (256, 32):
        case = case_of("mxfp4", "TN", Shape("pages", rows, 256, DEPTH), out_dtype=torch.bfloat16)
        full: dict[str, Any] = {
            "bias_dtype": torch.float32,
            "activation": "gelu",
            "accumulate": True,
            "preactivation": torch.bfloat16,
        }
        yield f"mxfp4 TN epilogue, {rows} rows", replace(case, **full), None
        grad = case_of(
            "mxfp4", "NT", case.shape, bias_grad=torch.float32, bias_dtype=torch.bfloat16, accumulate=True, alpha=0.75
        )
        yield f"mxfp4 NT bias_grad, {rows} rows", grad, None
    for operands, layout, rows in (
        ("mxfp4", "TN", 256),
        ("mxfp4", "NN", 32),
        ("mxfp8", "NT", 64),
        ("bf16 x mxfp4", "TN", 32),
    ):
        fields: dict[str, Any] = {"preactivation": torch.float32, "accumulate": True, "bias_dtype": torch.bfloat16}
        case = case_of(operands, layout, Shape("pages", rows, 256, DEPTH), activation="swiglu", **fields)
        yield f"{operands} {layout} swiglu, {rows} rows", case, None
    for operands, layout, rows, quantized in (
        ("mxfp4", "TN", 256, {"out_format": "mxfp8_e4m3", "out_direction": "both"}),
        ("mxfp4", "TN", 32, {"out_format": "mxfp8_e5m2", "activation": "swiglu", "preactivation": torch.bfloat16}),
        ("mxfp8", "NT", 32, {"out_format": "mxfp8_e4m3", "out_direction": "columnwise"}),
        ("bf16 x mxfp4", "NN", 32, {"out_format": "fp8_e4m3", "bias_dtype": torch.bfloat16}),
    ):
        case = case_of(operands, layout, Shape("pages", rows, 256, DEPTH), out_dtype=None, alpha=0.75, **quantized)
        yield f"{operands} {layout} out {quantized['out_format']}, {rows} rows", case, None
