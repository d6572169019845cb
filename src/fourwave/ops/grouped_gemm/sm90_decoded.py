"""Grouped products of MX codes, which Hopper's matrix unit does not read: the dense product's kernel (ops/gemm/sm90_decode.py) writes
them in bfloat16, exactly, and the 16-bit grouped kernels multiply them.

Weights [G, rows, columns] are decoded as one matrix [G * rows, columns], all groups of them, whichever have rows.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fourwave.ops.gemm import sm90_decoded, sm90_launch
from fourwave.ops.gemm.sm90_decoded import CODES, Operand
from fourwave.ops.grouped_gemm import sm90_config
from fourwave.ops.grouped_gemm import sm90_launch as grouped_launch
from fourwave.ops.grouped_gemm.problem import ROWS, GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.sm90_config import HopperGroupedConfig

BLOCK = 32  # elements of a scale
MX = "1x32"


@functools.lru_cache(maxsize=sm90_launch.MAX_PLANS)
def plain_problem(problem: GroupedProblem) -> GroupedProblem | None:
    """The product of bfloat16 operands that stands for `problem`; None where the operands are read as they are, or not at all."""
    changes: dict[str, Any] = {}
    for name in ("a", "b"):
        if getattr(problem, f"{name}_scaling") == MX and getattr(problem, f"{name}_dtype") in CODES:
            changes |= {f"{name}_dtype": torch.bfloat16, f"{name}_scaling": None}
    return replace(problem, **changes) if changes else None


def why_unsupported(problem: GroupedProblem, config: HopperGroupedConfig | None) -> str | None:
    """sm90_config.why_unsupported, of problems that are decoded too."""
    plain = plain_problem(problem)
    if plain is None:
        return sm90_config.why_unsupported(problem, config)
    if (reason := sm90_config.why_unsupported(plain, config)) is not None:
        return f"with what is decoded in bfloat16: {reason}"
    if problem.split == ROWS and problem.b_scaling == MX:
        rows = problem.b_shape[1]
        if not problem.b_k_last and problem.G > 1 and rows % BLOCK:
            return (
                f"b has {rows} rows for each group and scale blocks of {BLOCK} rows: all groups are decoded as one matrix, in which a "
                "block may not reach into the next group"
            )
        if problem.G * rows > sm90_config.MAX_EXTENT:
            return (
                f"b has {problem.G} x {rows} rows: they are decoded as one matrix of at most {sm90_config.MAX_EXTENT}"
            )
    return None


def describe(problem: GroupedProblem) -> list[str]:
    """How the operands become those of `plain_problem`."""
    names = [name for name in ("a", "b") if getattr(problem, f"{name}_scaling") == MX]
    return [f"{' and '.join(names)} decoded into bfloat16, exactly, by a kernel of its own (ops/gemm/sm90_decode.py)"]


def run(problem: GroupedProblem, config: HopperGroupedConfig | None, tensors: GroupedTensors) -> list[str]:
    """As sm90_launch.run of the grouped kernels, on the current device, of any problem."""
    plain = plain_problem(problem)
    if plain is None:
        return grouped_launch.run(problem, config, tensors)
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    notes: list[str] = []
    a, b = tensors.a, tensors.b
    if problem.a_scaling == MX:
        a = sm90_decoded.decoded(Operand(*problem.a_shape, problem.a_k_last, ()), a, tensors.a_scale)
    if problem.b_scaling == MX:
        b = _decoded_b(problem, b, tensors.b_scale, notes)
    return notes + grouped_launch.run(plain, config, tensors._replace(a=a, b=b, a_scale=None, b_scale=None))


def _decoded_b(problem: GroupedProblem, b: torch.Tensor, scale: torch.Tensor | None, notes: list[str]) -> torch.Tensor:
    assert scale is not None
    rows, columns = problem.b_shape[-2:]
    scale = scale.contiguous()  # its groups' blocks follow each other
    if b.dim() == 2:
        return sm90_decoded.decoded(Operand(rows, columns, problem.b_k_last, ()), b, scale)
    G = problem.G
    if (why := _apart(b)) is not None:
        notes.append(f"b copied: {why}")
        b = b.contiguous()
    # One matrix of all rows; of one row for each group, rows are as far apart as groups.
    flat = b.as_strided((G * rows, b.shape[2]), (b.stride(1) if rows > 1 else b.stride(0), 1))
    return sm90_decoded.decoded(Operand(G * rows, columns, problem.b_k_last, ()), flat, scale).unflatten(0, (G, rows))


def _apart(b: torch.Tensor) -> str | None:
    """Why b [G, rows, columns] is no matrix [G * rows, columns]."""
    if b.shape[0] == 1 or b.shape[1] == 1 or b.stride(0) == b.shape[1] * b.stride(1):
        return None
    return f"matrices are {b.stride(0)} elements apart, and not {b.shape[1]} rows of {b.stride(1)}"
