"""Launches of the AMD grouped GEMM kernels inside a session of one's own: what fw.grouped_gemm does, without its backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fourwave.ops.grouped_gemm import amd
from fourwave.ops.grouped_gemm.config import GroupedConfig, candidates, tiles_per_step, why_unsupported
from fourwave.ops.grouped_gemm.problem import GroupedTensors
from fourwave.testing.grouped_cases import GroupedCase

# Each is a case's (dtype, scaling, preshuffled); dtype of codes comes from the arch.
OPERANDS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"scaling": "tensor"},
    "fp8 preshuffled": {"scaling": "tensor", "preshuffled": True},
    "blocks": {"scaling": "blocks"},
    "blocks preshuffled": {"scaling": "blocks", "preshuffled": True},
    "mxfp8": {"scaling": "1x32"},
    "mxfp8 preshuffled": {"scaling": "1x32", "preshuffled": True},
}
KINDS = ("forward", "dgrad", "wgrad")


def case_of(arch: str, operands: str, kind: str, **more: Any) -> GroupedCase:
    case = GroupedCase(
        kind, (3, 0, 2), 64, 256, out_dtype=torch.float32, seed=3, fnuz=arch == "gfx942", extra=2, **OPERANDS[operands]
    )
    return replace(case, **more)


def kernels(arch: str) -> Iterator[tuple[str, str, GroupedConfig]]:
    """(operands, kind, config) of every grouped kernel that arch has; a config with split_k > 1 has a second kernel, which adds."""
    for operands in OPERANDS:
        for kind in KINDS if "preshuffled" not in operands else KINDS[:1]:
            problem = case_of(arch, operands, kind).problem()
            configs = candidates(problem, arch) if why_unsupported(problem, None, arch) is None else []
            for config in configs:
                yield operands, kind, config
            if configs and kind != "wgrad":
                yield operands, kind, replace(configs[-1], split_k=2)


def pipeline(arch: str, operands: str, kind: str, config: GroupedConfig) -> GroupedCase:
    """Three groups, one of them empty, of one tile of rows each, and one tile in N; more K steps than there are stages."""
    case = case_of(arch, operands, kind, config=config)
    step = tiles_per_step(case.problem(), config, arch) * config.tile_k
    reduction = (max(2 * step, 6 * config.tile_k) * config.split_k + config.tile_k) // 64 * 64
    rows = max(1, config.tile_m - 5)
    columns = config.tile_n - (0 if case.preshuffled or config.tile_n > 128 else 16)
    if kind == "forward":
        return replace(case, sizes=(rows, 0, 2), N=columns, K=reduction)
    if kind == "dgrad":
        return replace(case, sizes=(rows, 0, 2), N=reduction, K=columns)
    return replace(case, sizes=(reduction - 37, 0, 5), N=rows, K=columns)


def launch(case: GroupedCase, arch: str) -> torch.Tensor:
    """The case's product by its config's kernel, in the case's output dtype; call it inside sim.session(arch, ...)."""
    made, _, _ = case.make()
    problem = case.problem()
    out = torch.full(problem.out_shape, float("nan"), dtype=case.written)
    sizes = torch.tensor(case.sizes, dtype=case.sizes_dtype)
    tensors = GroupedTensors(made["a"], made["b"], sizes, out, None, made["a_scale"], made["b_scale"])
    amd.run(problem, case.config, arch, tensors)
    return out
