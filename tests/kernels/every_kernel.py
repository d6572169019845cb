"""Every FlyDSL kernel that fourwave has, each in a call of the public functions: what faults and orders are tried on.

A call compares its result with the truth, as its case does; `sessions` gives the simulator sessions that the backend opens
a harness. The calls are made from the code's own lists of configurations, so that a new one is tried as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import gfx1250_launches
import grouped_launches
import launches
import quantize_launches
import torch

from fourwave import sim
from fourwave.ops.gemm import config as gemm_config
from fourwave.quantize import amd as quantizers
from fourwave.quantize.tensor import FORMATS
from fourwave.testing import GemmCase
from fourwave.testing.quantize_cases import QuantizeCase
from fourwave.testing.shapes import Shape

ARCHS = ("gfx950", "gfx942", "gfx1250")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class KernelCall:
    """name: what a record calls it; run: makes the call on sim:<arch> and returns what was wrong."""

    name: str
    arch: str
    run: Callable[[], list[str]]


@contextlib.contextmanager
def sessions(**options: Any) -> Iterator[None]:
    """Sessions opened meanwhile get these options, too; memory that torch leaves as it was holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with mock.patch.object(sim, "session", functools.partial(sim.session, **options)):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _gemm(arch: str, case: GemmCase, config: Any) -> Callable[[], list[str]]:
    def run() -> list[str]:
        result = case.run(f"sim:{arch}", config=config)
        return [] if result.passed else [str(result)]

    return run


def _epilogues(arch: str) -> Iterator[tuple[str, GemmCase]]:
    """Calls that need more of a kernel than the product, for a tile of several fragments a wave."""
    shape, odd = Shape("tails", 77, 160, 0), Shape("odd tails", 77, 145, 0)
    yield (
        "bias gelu preactivation accumulate",
        GemmCase(shape, bias_dtype=BF16, activation="gelu", preactivation=BF16, accumulate=True, out_dtype=FP32),
    )
    yield "odd silu sliced", GemmCase(odd, bias_dtype=FP32, activation="silu", out_dtype=FP16, out_view="sliced")
    yield "bias_grad", GemmCase(shape, layout="NT", bias_grad=FP32, accumulate=True, out_dtype=FP32)
    yield "swiglu", GemmCase(shape, activation="swiglu", preactivation=BF16)
    yield "out mxfp8", GemmCase(shape, out_format="mxfp8_e4m3", out_direction="both", alpha=0.5)
    yield "out fp8", GemmCase(shape, out_format="fp8_e4m3")
    for name in ("fp8_e4m3", "fp8_row"):
        rows = GemmCase(shape, a_format=name, b_format=name, fnuz=arch == "gfx942", activation="relu")
        yield f"{name} relu", rows


def _splits(arch: str) -> Iterator[tuple[str, GemmCase]]:
    shape = Shape("", 77, 160, 0)
    yield "bias relu", GemmCase(shape, bias_dtype=FP32, activation="relu")
    yield "bias_grad", GemmCase(shape, layout="NT", bias_grad=FP32, out_dtype=FP32, accumulate=True)
    yield "swiglu", GemmCase(shape, activation="swiglu", preactivation=BF16, bias_dtype=BF16)
    yield "out mxfp8", GemmCase(shape, layout="NN", out_format="mxfp8_e4m3", out_direction="both")
    yield "fp8_row", GemmCase(shape, a_format="fp8_row", b_format="fp8_row", fnuz=arch == "gfx942")
    for name in ("mxfp8", "mxfp4", "bf16 x mxfp4", "blocks"):
        yield name, GemmCase(shape, fnuz=arch == "gfx942", **launches.OPERANDS[name])


def _gemms(arch: str) -> Iterator[KernelCall]:
    if arch == "gfx1250":
        for name, case, config in gfx1250_launches.kernels():
            yield KernelCall(name, arch, _gemm(arch, case, config))
        return
    for precision, layout, config in launches.kernels(arch):
        case = launches.case_of(arch, precision, layout, launches.pipeline(config, precision))
        name = f"gemm {precision} {layout} {config.tile_m}x{config.tile_n}x{config.tile_k}"
        more = [f"{key} {value}" for key, value in _further(config)]
        yield KernelCall(" ".join([name, *more]), arch, _gemm(arch, case, config))
    for name, case, config in further_gemms(arch):
        yield KernelCall(name, arch, _gemm(arch, case, config))


def further_gemms(arch: str) -> Iterator[tuple[str, GemmCase, Any]]:
    """(name, case, config) of gfx942's and gfx950's calls beside launches.kernels: epilogues, and K split."""
    for kind, cases, split in (("epilogue", _epilogues(arch), 1), ("split-K", _splits(arch), 3)):
        for name, case in cases:
            # The third: more than one fragment in a wave, and small. Six steps for every part of K (whole 512, of scaled operands).
            config = replace(gemm_config.candidates_for(case.problem, arch)[2], split_k=split)
            packed = "mxfp4" in (case.a_format, case.b_format)  # rows of an even length
            part = 6 * config.tile_k
            if name == "mxfp8" and part <= 512:
                part = 1024  # scales that come for 512 k at a time come twice
            case = replace(case, shape=replace(case.shape, K=part * split - (6 if packed else 5)))
            if gemm_config.why_unsupported(case.problem, config, arch) is None:
                yield f"gemm {kind}: {name}", case, config


def _further(config: Any) -> Iterator[tuple[str, Any]]:
    """A configuration's fields beside its tile that are not as usual."""
    usual = gemm_config.GemmConfig(config.tile_m, config.tile_n, config.tile_k, config.num_stages)
    for key, value in vars(config).items():
        if value != getattr(usual, key):
            yield key, value


def _grouped(arch: str) -> Iterator[KernelCall]:
    for operands, kind, config in grouped_launches.kernels(arch):
        case = grouped_launches.pipeline(arch, operands, kind, config)

        def run(case: Any = case) -> list[str]:
            result = case.run(f"sim:{arch}")
            return [] if result.passed else [str(result)]

        name = f"grouped {operands} {kind} {config.tile_m}x{config.tile_n}x{config.tile_k}"
        yield KernelCall(name + (f" split_k {config.split_k}" if config.split_k > 1 else ""), arch, run)


def _quantizers(arch: str) -> Iterator[KernelCall]:
    cases: list[QuantizeCase] = []
    for case in quantize_launches.kernels(arch):
        fmt = FORMATS[case.format]
        cases.append(case)
        if fmt.element != "e5m2" and not case.transposed and case.rounding_seed is None:
            cases += [
                replace(case, direction="rowwise"),
                replace(case, direction="columnwise", transposed=True, dtype=FP32),
                replace(case, rows=78, columns=146, transposed=True, dtype=FP16),
            ]
    for case in cases:
        # No NaN or Inf: where one scale is everything's, they would make all codes NaN.
        case = replace(
            case,
            kind="spread",
            fnuz=arch == "gfx942" and FORMATS[case.format].element != "e2m1" and not FORMATS[case.format].is_mx,
        )

        def run(case: QuantizeCase = case) -> list[str]:
            return list(case.run(f"sim:{arch}").problems)

        if quantizers.why_unsupported(quantize_launches.problem_of(case), arch) is None:
            yield KernelCall(f"quantize {case}", arch, run)


def calls(arch: str) -> list[KernelCall]:
    found = [*_gemms(arch), *_grouped(arch), *_quantizers(arch)]
    names = [call.name for call in found]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1]
    return found
