"""The rows of `fourwave check`: which calls, for which kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fourwave.backends import registry
from fourwave.backends.flydsl import describe_amd_gemm
from fourwave.cli import check_mxfp4
from fourwave.ops.gemm.config import FLOAT8, GemmConfig, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import FP8, MXFP8
from fourwave.quantize import FORMATS
from fourwave.testing import grouped_cases
from fourwave.testing.cases import GemmCase
from fourwave.testing.quantize_cases import QUANTIZE_CASES, QuantizeCase
from fourwave.testing.shapes import GEMM_SHAPES, GEMM_SHAPES_FULL, Shape, by_name

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISIONS = (*PLAIN, FP8, MXFP8)
DEFAULT_PRECISIONS = ("bf16", "fp16")
# "sliced" on rows of whole 16-byte chunks is read in place, the NaN right behind each row's end; the others are copied.
VIEWS = (
    ("sliced", by_name("tail K")),
    ("sliced", by_name("tail all")),
    ("offset", by_name("tail all")),
    ("transposed", by_name("tail all")),
)
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BATCHES = (1, 2, 17, 33, 128, 257)  # rows of batch-invariant products


@dataclass(frozen=True)
class Planned:
    """One row to be: a call, its config (None: the kernel's own choice), and what the row is for."""

    group: str
    case: Any  # GemmCase, GroupedCase or QuantizeCase
    config: GemmConfig | None = None

    def run(self, backend: str, device: str) -> tuple[float | None, str | None]:
        """(largest error over its bound, None for bits that are compared; what is wrong beside that, or None)."""
        if isinstance(self.case, QuantizeCase):
            problems = self.case.run(backend, device=device).problems
            return (None, "; ".join(problems)) if problems else (0.0, None)
        options = {} if self.config is None else {"config": self.config}
        result = self.case.run(backend, device=device, **options)
        return result.ratio, result.guards

    def describe(self, arch: str) -> tuple[str, str, str]:
        """(kernel, config, matrix instruction) in words."""
        if isinstance(self.case, GemmCase):
            told = describe_amd_gemm(self.case.problem, self.config, arch)
            assert isinstance(told.config, GemmConfig), "the case is not empty"
            return told.kernel, short(told.config), told.config.mma
        if isinstance(self.case, QuantizeCase):
            kernel = "mxfp4" if FORMATS[self.case.format].element == "e2m1" else "cdna"
            return f"quantize/{kernel}.py", "", ""
        described = registry.get(f"sim:{arch}").describe_grouped_gemm(self.case.problem(), None)
        return described.kernel, str(described.config or ""), ""


def short(config: GemmConfig) -> str:
    """256x256x32 s4 w2x2: tile m x n x k, LDS stages, waves m x n."""
    tile = f"{config.tile_m}x{config.tile_n}x{config.tile_k}"
    return f"{tile} s{config.num_stages} w{config.waves_m}x{config.waves_n}"


SUBJECTS = ("gemm", "mxfp4", "quantize", "grouped")
WITH_LAYOUTS = ("gemm", "mxfp4")


def rows(
    subject: str, arch: str, layouts: Sequence[str], precisions: Sequence[str], full: bool, seed: int
) -> Iterator[Planned]:
    """The rows of one subject for one architecture. Layouts are those of WITH_LAYOUTS, precisions are gemm's."""
    if subject == "gemm":
        yield from gemm_rows(arch, layouts, precisions, full, seed)
    elif subject == "mxfp4":
        for group, case, config in check_mxfp4.rows(arch, layouts, full, seed):
            yield Planned(group, case, config)
        for quantized in QUANTIZE_CASES:
            if FORMATS[quantized.format].element == "e2m1":
                yield Planned("quantize", replace(quantized, seed=seed))
    elif subject == "quantize":
        for quantized in sorted(QUANTIZE_CASES, key=lambda quantized: quantized.kind):
            fnuz = arch == "gfx942" and not FORMATS[quantized.format].is_mx
            yield Planned(quantized.kind, replace(quantized, fnuz=fnuz, seed=seed))
    else:
        for group, grouped in grouped_cases.plan(arch, seed):
            yield Planned(group, grouped)


def gemm_rows(arch: str, layouts: Sequence[str], precisions: Sequence[str], full: bool, seed: int) -> Iterator[Planned]:
    """The rows for one architecture.

    shapes    every shape class for each layout and pair of operands, with the config that the kernel chooses itself
    tiles     each other config of the kernel, on an even shape and one with tails in M, N and K
    split K   three parts of it; the last has no k of its own where parts are 512 k
    outputs   each other output dtype
    views     operands and output inside larger buffers, aligned and not, and transposed
    epilogue  bias, activation, alpha; adding to the output; the preactivation, the bias gradient; swiglu
    quantized results: given a scale, and MX in both directions
    batch     rows that may not depend on their number
    preshuffled  8-bit weights in the order that the matrix instruction reads
    """
    tails = by_name("tail all")
    for layout in layouts:
        for precision in precisions:
            for number, operands in enumerate(operand_pairs(arch, precision)):
                base = GemmCase(tails, layout, seed=seed, **operands)
                if base.a_format == "fp8_1x128" and layout != "TN":
                    continue
                for shape in GEMM_SHAPES:
                    yield Planned("shapes", replace(base, shape=shape))
                if number in (0, 5) or full:  # 5: scales of 1x128 and 128x128
                    split = replace(candidates_for(base.problem, arch)[2], split_k=3)
                    case = replace(base, shape=Shape("three parts of K", 77, 145, 1735), bias_dtype=torch.float32)
                    yield Planned("split K", case, split)
                if number and not full:
                    continue  # configs, outputs and views do not depend on which codes run: one pair covers them
                if full or precision != "fp16":  # the same kernels but for the instruction
                    for config in candidates_for(base.problem, arch):
                        for shape in tile_shapes(config, full):
                            case = replace(base, shape=shape)
                            if full or default_config(case.problem, arch)[0] != config:
                                yield Planned("tiles", case, config)
                for view, shape in VIEWS:
                    yield Planned("views", replace(base, shape=shape, a_view=view, b_view=view, out_view=view))
                for out_dtype in OUT_DTYPES if full else (torch.float32,):
                    if out_dtype != base.written:
                        for shape in (by_name("even"), tails):
                            yield Planned("outputs", replace(base, shape=shape, out_dtype=out_dtype))
                yield from epilogues(base, full or layout == layouts[0])
            if layout == "TN":
                yield from preshuffled_rows(arch, precision, full, seed)


def preshuffled_rows(arch: str, precision: str, full: bool, seed: int) -> Iterator[Planned]:
    """The same weights preshuffled, which need N % 16 == 0 and K % 64 == 0: tails of tiles beyond that, every tile, some epilogues."""
    shape = Shape("tails of tiles", 77, 144, 704)
    shapes = (shape, Shape("M = 1", 1, 192, 256), Shape("K = 64", 17, 272, 64), Shape("long K", 5, 32, 8256))
    for number, operands in enumerate(operand_pairs(arch, precision)):
        base = GemmCase(shape, seed=seed, preshuffled=True, **operands)
        if precision in PLAIN or why_unsupported(base.problem, None, arch) is not None:
            return
        for each in shapes[: None if number in (0, 4, 5) or full else 1]:
            yield Planned("preshuffled", replace(base, shape=each))
        for config in candidates_for(base.problem, arch) if number in (0, 5) or full else ():
            if default_config(base.problem, arch)[0] != config:
                yield Planned("preshuffled", base, config)
        if number:
            continue
        for case in (
            replace(base, bias_dtype=torch.float32, activation="gelu", accumulate=True, out_dtype=torch.float32),
            replace(base, activation="swiglu", preactivation=torch.bfloat16),
            replace(base, out_format="mxfp8_e4m3", out_direction="both"),
            replace(base, batch_invariant=True, out_format="fp8_e4m3"),
        ):
            yield Planned("preshuffled", case)


def operand_pairs(arch: str, precision: str) -> Iterator[dict[str, Any]]:
    """Fields of GemmCase for the operands of one precision: every mix of the 8-bit ones."""
    if precision in PLAIN:
        yield {"dtype": PLAIN[precision]}
    elif precision == FP8:
        fnuz = arch == "gfx942"
        for a in ("e4m3", "e5m2"):
            for b in ("e4m3", "e5m2"):
                yield {"a_format": f"fp8_{a}", "b_format": f"fp8_{b}", "fnuz": fnuz}
        yield {"a_format": "fp8_row", "b_format": "fp8_row", "fnuz": fnuz}
        yield {"a_format": "fp8_1x128", "b_format": "fp8_128x128", "fnuz": fnuz}  # TN only
        yield {"dtype": FLOAT8[arch][0], "b_dtype": FLOAT8[arch][1]}
    else:
        for a in ("e4m3", "e5m2"):
            for b in ("e4m3", "e5m2"):
                yield {"a_format": f"{precision}_{a}", "b_format": f"{precision}_{b}"}


def tile_shapes(config: GemmConfig, full: bool) -> tuple[Shape, ...]:
    """Shapes that give `config` more than one tile in M and N, or nearly."""
    if full:
        return (*GEMM_SHAPES, *GEMM_SHAPES_FULL)
    if max(config.tile_m, config.tile_n) >= 256:
        return (by_name("even, 4 tiles of 256"), by_name("tails, 4 tiles of 256"))
    return (by_name("even"), by_name("tail all"))


def epilogues(base: GemmCase, every: bool) -> Iterator[Planned]:
    """every: also what does not depend on the layout."""
    fp32 = torch.float32
    even = replace(base, shape=by_name("even"))
    cases = [
        replace(base, bias_dtype=torch.bfloat16, activation="gelu", alpha=0.75),
        replace(base, accumulate=True, out_dtype=fp32),
        replace(even, activation="swiglu", bias_dtype=fp32, preactivation=torch.bfloat16),
    ]
    if base.layout == "NT":
        cases += [
            replace(base, accumulate=True, out_dtype=fp32, bias_grad=fp32),
            replace(even, bias_grad=torch.bfloat16),
        ]
    if every:
        cases += [
            replace(even, bias_dtype=fp32, activation="relu"),
            replace(base, bias_dtype=fp32, activation="silu", preactivation=fp32, out_view="sliced"),
            replace(even, activation="gelu_tanh", accumulate=True),
            replace(base, shape=Shape("tails of halves", 77, 146, 203), activation="swiglu", alpha=0.5),
        ]
    blocks = base.a_format == "fp8_1x128"  # the kernels refuse swiglu of these
    for case in cases:
        if not (blocks and case.activation == "swiglu"):
            yield Planned("epilogue", case)
    if every:
        for out_format in ("fp8_e4m3", "fp8_e5m2"):
            yield Planned("quantized", replace(base, out_format=out_format, activation="silu"))
        for out_format, direction, rule in (
            ("mxfp8_e4m3", "rowwise", "floor"), ("mxfp8_e4m3", "both", "ceil"), ("mxfp8_e5m2", "columnwise", "floor"),
        ):  # fmt: skip
            case = replace(base, out_format=out_format, out_direction=direction, out_scale_rule=rule)
            yield Planned("quantized", case)
            if not blocks:
                yield Planned("quantized", replace(case, shape=by_name("even"), activation="swiglu"))
    for rows in BATCHES if every else BATCHES[::3]:
        case = replace(base, shape=Shape(f"{rows} rows", rows, 145, 203), batch_invariant=True)
        yield Planned("batch", case)
