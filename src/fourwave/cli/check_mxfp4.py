"""The rows of `fourwave check mxfp4`: GEMM of packed e2m1 with scales of 1x32, and of such weights with other activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fourwave.ops.gemm.config import ARCHS, GemmConfig, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import MXFP4, SWIGLU
from fourwave.testing.cases import GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.shapes import Shape

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DEPTHS = (128, 384, 1024, 1152, 8192)  # within a page of scales, its whole, past it, four times round both pages
TAILS = (
    Shape("M = 1", 1, 512, 1152),
    Shape("M = 2", 2, 130, 384),
    Shape("tail M", 300, 256, 256),
    Shape("tail N", 256, 270, 256),
    Shape("tail K", 128, 128, 1090),
    Shape("tail all", 77, 145, 202),
    Shape("even tails", 78, 146, 202),
    Shape("odd K", 66, 98, 161),
    Shape("N = 1", 130, 1, 130),
    Shape("K = 2", 255, 129, 2),
    Shape("small", 4, 6, 2),
)
ROWS = (1, 16, 17, 33, 64, 65)  # of activations in decoding: whole fragments and one more


def packable(case: GemmCase) -> bool:
    """Two codes share a byte along the stored rows: their length is even."""
    shape = case.shape
    lengths = {"TN": (shape.K, shape.K), "NN": (shape.K, shape.N), "NT": (shape.M, shape.N)}[case.layout]
    formats = (case.a_format, case.b_format)
    return not any(name == MXFP4 and length % 2 for name, length in zip(formats, lengths, strict=True))


def rows(arch: str, layouts: Sequence[str], full: bool, seed: int) -> Iterator[tuple[str, GemmCase, GemmConfig | None]]:
    """(what the row is for, case, config or None for the kernel's choice), the same on either architecture, as far as both have a kernel.

    depths    256 x 256 for each K of DEPTHS, each output dtype
    shapes    several tiles; tails in M, N and K; M = 1, for the layouts that can store them
    epilogue  bias, activations, alpha; adding to the output; and the further outputs
    exact     a scale of its own for each row and block: equal to the truth, bit for bit
    decode    few rows of activations
    mixed     MXFP8 beside MXFP4, on either side, or itself; and, where the weights are b, bfloat16 activations
    tiles     the kernels' other configurations
    quantized results in MXFP8 and FP8
    split K   three workgroups to a tile, gfx950
    """
    for layout in layouts:
        base = GemmCase(TAILS[0], layout, a_format=MXFP4, b_format=MXFP4, out_dtype=FP32, seed=seed)
        plain = replace(base, a_format=None, dtype=BF16)
        mixed = [replace(base, a_format="mxfp8_e4m3"), replace(base, b_format="mxfp8_e5m2")]
        if arch == "gfx1250":  # on gfx950: check gemm
            mixed.append(replace(base, a_format="mxfp8_e5m2", b_format="mxfp8_e4m3"))
        if why_unsupported(plain.problem, None, arch) is None:
            mixed.append(plain)
        for group, case in (*_packed(base, layout, full), *(each for pair in mixed for each in _mixed(pair))):
            if _has_kernel(case, arch):
                yield group, case, None
        yield "mixed", replace(base, shape=MIXED_TAILS, a_format="mxfp8_e5m2", out_dtype=BF16), None
        if arch in ARCHS:
            yield from _split(base, arch)
            if layout != "NT":
                yield from _split(plain, arch)
        for number, case in enumerate((base, *mixed)):
            configs = list(_tiles(case, arch))
            yield from configs if full or number == 0 else configs[-1:]


MIXED_TAILS = Shape("tails", 142, 274, 202)


def _split(base: GemmCase, arch: str) -> Iterator[tuple[str, GemmCase, GemmConfig]]:
    config = replace(candidates_for(base.problem, arch)[2], split_k=3)
    yield "split K", replace(base, shape=Shape("three parts of K", 78, 146, 1734), bias_dtype=FP32), config


def _has_kernel(case: GemmCase, arch: str) -> bool:
    """Whether arch has what not both have."""
    ask = case.activation == SWIGLU or case.out_format is not None
    return not ask or why_unsupported(case.problem, None, arch) is None


def _tiles(base: GemmCase, arch: str) -> Iterator[tuple[str, GemmCase, GemmConfig]]:
    """Each configuration, with tails, where the kernel would not choose it for them."""
    for config in candidates_for(base.problem, arch):
        case = replace(base, shape=Shape("tails", config.tile_m + 22, config.tile_n + 18, 2 * config.tile_k + 74))
        if why_unsupported(case.problem, config, arch) is None and default_config(case.problem, arch)[0] != config:
            yield "tiles", case, config


def _packed(base: GemmCase, layout: str, full: bool) -> Iterator[tuple[str, GemmCase]]:
    for K in DEPTHS:
        for out_dtype in (FP32, BF16, FP16) if full or K == 1152 else (FP32,):
            yield "depths", replace(base, shape=Shape("one tile", 256, 256, K), out_dtype=out_dtype)
    for shape in (Shape("four tiles", 512, 512, 384), *TAILS):
        for out_dtype in (FP32, BF16, FP16) if full or shape.name == "even tails" else (FP32,):
            case = replace(base, shape=shape, out_dtype=out_dtype)
            if packable(case):
                yield "shapes", case
    for case in epilogues(replace(base, shape=Shape("even tails", 142, 274, 160)), full or layout == "TN"):
        if packable(case):
            yield "epilogue" if case.out_format is None else "quantized", case
    for K in (1152, 3072):
        yield "exact", exact(base, Shape("one tile", 256, 256, K))
    for M in ROWS:
        case = replace(base, shape=Shape(f"{M} rows", M, 192, 640))
        if packable(case):
            yield "decode", case


def exact(base: GemmCase, shape: Shape) -> ExactScales:
    fields = {"a_format": base.a_format, "b_format": base.b_format, "dtype": base.dtype}
    return ExactScales(shape, base.layout, out_dtype=FP32, **fields)  # type: ignore[arg-type]


def _mixed(base: GemmCase) -> Iterator[tuple[str, GemmCase]]:
    yield "mixed", replace(base, shape=Shape("one tile", 256, 256, 1152))
    yield "mixed", replace(base, shape=MIXED_TAILS, out_dtype=BF16, bias_dtype=BF16, activation="silu")
    yield "mixed", replace(base, shape=Shape("16 rows", 16, 192, 640), out_dtype=BF16)
    yield "mixed", exact(base, Shape("one tile", 256, 256, 1152))
    halves = Shape("even tails", 142, 276, 202)  # halves of packed rows are whole bytes
    yield "mixed", replace(base, shape=halves, out_dtype=BF16, activation=SWIGLU, preactivation=FP32)


def epilogues(base: GemmCase, every: bool) -> Iterator[GemmCase]:
    """every: also what does not depend on the layout."""
    fields: list[dict[str, Any]] = [
        {"bias_dtype": BF16, "activation": "gelu", "alpha": 0.75, "out_dtype": BF16},
        {"accumulate": True},
    ]
    if base.layout == "NT":
        fields += [{"accumulate": True, "bias_grad": FP32}, {"out_dtype": BF16, "bias_grad": BF16}]
    if every:
        fields += [
            {"bias_dtype": FP32, "activation": "relu", "out_dtype": FP16, "out_view": "sliced"},
            {"bias_dtype": FP16, "activation": "silu", "accumulate": True, "out_dtype": BF16},
            {"activation": "gelu_tanh", "accumulate": True, "out_dtype": FP16, "alpha": -0.5},
            {"bias_dtype": BF16, "activation": "gelu", "preactivation": BF16, "out_view": "sliced"},
            {"accumulate": True, "preactivation": FP32, "out_dtype": BF16},
        ]
    for each in fields:
        yield replace(base, **each)
    # Both pages of scales come twice before the epilogue; one row.
    yield replace(base, shape=Shape("two tiles", 256, 512, 1152), **fields[0])
    yield replace(base, shape=Shape("M = 1", 1, 512, 1152), out_dtype=BF16, bias_dtype=FP32, activation="silu")
    halves = replace(base, shape=Shape("halves", 142, 292, 160), activation=SWIGLU)
    yield replace(halves, preactivation=BF16, bias_dtype=FP32, out_dtype=BF16)
    yield replace(halves, accumulate=True)
    for name, direction in (("mxfp8_e4m3", "both"), ("mxfp8_e5m2", "rowwise"), ("fp8_e4m3", "rowwise")):
        yield replace(base, out_dtype=None, out_format=name, out_direction=direction, activation="silu")
