"""Launches of the AMD GEMM kernels inside a session of one's own: what fw.gemm does, without its backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fourwave.blocks.flydsl.tiles import Geometry
from fourwave.ops.gemm import amd
from fourwave.ops.gemm.api import _arguments
from fourwave.ops.gemm.check import check
from fourwave.ops.gemm.config import GemmConfig, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import LAYOUTS
from fourwave.ops.grouped_gemm.preshuffle import preshuffle
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.testing import GemmCase
from fourwave.testing.shapes import Shape

OPERANDS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp32": {"dtype": torch.float32},
    "fp8": {"a_format": "fp8_row", "b_format": "fp8_row"},
    "mxfp8": {"a_format": "mxfp8_e4m3", "b_format": "mxfp8_e5m2"},
    "blocks": {"a_format": "fp8_1x128", "b_format": "fp8_128x128"},
    "mxfp4": {"a_format": "mxfp4", "b_format": "mxfp4"},
    "mxfp8 x mxfp4": {"a_format": "mxfp8_e4m3", "b_format": "mxfp4"},
    "mxfp4 x mxfp8": {"a_format": "mxfp4", "b_format": "mxfp8_e5m2"},
    "bf16 x mxfp4": {"dtype": torch.bfloat16, "b_format": "mxfp4"},
    "fp8 preshuffled": {"a_format": "fp8_row", "b_format": "fp8_row", "preshuffled": True},
    "mxfp8 preshuffled": {"a_format": "mxfp8_e4m3", "b_format": "mxfp8_e5m2", "preshuffled": True},
    "blocks preshuffled": {"a_format": "fp8_1x128", "b_format": "fp8_128x128", "preshuffled": True},
}


def scale_reads(geo: Geometry, halves: bool = False) -> dict[str, int]:
    """LDS reads of scales in a step of the main loop, by name: 16 bytes a lane, or transposing; each serves the step."""
    if geo.scales == "128":
        return {"ds_read_b128": geo.frags_m + 1} if geo.scales_in_lds else {}
    reads = {"ds_read_b128": 0, "ds_read_b64_tr_b8": 0}
    parts = 2 if halves else 1
    for tile, fragments in zip(geo.scale_tiles, (geo.frags_m, geo.frags_n), strict=True):
        if tile is None:
            continue
        count = fragments // parts
        together = min(count, 4 if tile.tile.k_contiguous else 2)
        reads["ds_read_b128" if tile.tile.k_contiguous else "ds_read_b64_tr_b8"] += parts * count // together
    return reads


def case_of(arch: str, precision: str, layout: str, shape: Shape) -> GemmCase:
    return GemmCase(
        shape, layout, out_dtype=torch.float32, seed=3, fnuz=arch == "gfx942", **OPERANDS[precision]
    )  # fmt: skip


def kernels(arch: str) -> Iterator[tuple[str, str, GemmConfig]]:
    """(precision, layout, config) of every GEMM kernel that arch has."""
    for precision, operands in OPERANDS.items():
        only_tn = operands.get("a_format") == "fp8_1x128" or "preshuffled" in operands
        for layout in LAYOUTS[:1] if only_tn else LAYOUTS:
            problem = case_of(arch, precision, layout, Shape("any", 256, 256, 1024)).problem
            if why_unsupported(problem, None, arch) is None:
                for config in candidates_for(problem, arch):
                    if why_unsupported(problem, config, arch) is None:
                        yield precision, layout, config


def pipeline(config: GemmConfig, precision: str) -> Shape:
    """Two tiles in M, one in N, more K steps than there are stages; tails in all three where the tile is small."""
    cut = 0 if config.tile_m >= 128 else 6 if "mxfp4" in precision else 5  # packed rows have an even length
    rows = config.tile_m if config.tile_m >= 128 else 2 * config.tile_m
    if "preshuffled" in OPERANDS[precision]:
        # Two and a half rounds of b's registers.
        return Shape("pipeline", rows - cut, config.tile_n - 16, 1344)
    steps = 6 * config.tile_k
    if precision in ("mxfp8", "blocks"):
        # Scales that come for 512 k at a time come twice; where that is a step, every tile that the first one loads is there.
        steps = max(steps, 512 + (3 if precision == "blocks" else 1) * config.tile_k)
    return Shape("pipeline", rows - cut, config.tile_n - cut, steps - 3 * cut)


def launch(case: GemmCase, arch: str, config: GemmConfig | None = None) -> torch.Tensor:
    """The case's product, float32; call it inside sim.session(arch, ...)."""
    a, b = case.operands()
    weights = preshuffle(b) if case.preshuffled else b
    out = torch.full((case.shape.M, case.shape.N), float("nan"))
    arguments = dict.fromkeys(
        (
            "bias",
            "activation",
            "out_dtype",
            "preactivation",
            "bias_grad",
            "out_format",
            "out_scale",
            "config",
            "backend",
        )
    )
    args, _ = _arguments(
        a=a, b=weights, trans_a=case.layout == "NT", trans_b=case.layout == "TN", alpha=1.0, accumulate=False, out=out,
        out_direction="rowwise", out_scale_rule="floor", batch_invariant=case.batch_invariant, fast_accum=False,
        **arguments,
    )  # fmt: skip
    problem, tensors, _, _ = check(args)
    amd.run(problem, config or default_config(problem, arch)[0], arch, tensors)
    return out


def every_code_and_scale(layout: str) -> tuple[torch.Tensor, QuantizedTensor, torch.Tensor]:
    """bfloat16 a, MXFP4 b and their product: every e2m1 code with every scale that keeps it in bfloat16's range, times one; a scale is NaN."""
    K = 32 * 252
    scale = (torch.arange(252).repeat(16, 1) + torch.arange(16)[:, None] % 2).to(torch.uint8)
    scale[5, 100] = 255
    nibbles = torch.arange(16)[:, None].expand(16, K).to(torch.uint8)
    codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous()
    a = torch.zeros(252, K, dtype=torch.bfloat16)
    a[torch.arange(252), torch.arange(252) * 32 + torch.arange(252) % 32] = 1.0
    if layout == "TN":
        b = QuantizedTensor.from_codes("mxfp4", codes, scale)
    else:
        packed = (nibbles.mT[:, ::2] | nibbles.mT[:, 1::2] << 4).contiguous()
        b = QuantizedTensor.from_codes("mxfp4", None, None, packed, scale.mT.contiguous())
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    exact = torch.cat([magnitudes, -magnitudes]) * torch.exp2(scale.mT.double() - 127)
    exact[:, 5] = float("nan")  # NaN times a's zeros
    return a, b, exact
