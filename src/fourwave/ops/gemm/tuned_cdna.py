"""Configurations of the CDNA kernels that were tuned on hardware, by class of problem; config.default_config asks here first.

A class is everything of a problem but M, which counts as the next power of two, and what the epilogue does. The table is
empty as long as nothing was measured on an AMD GPU: default_config then goes by its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem

# key() -> the fields of a GemmConfig that differ from its defaults
TABLE: dict[str, dict[str, int | str]] = {}


def key(problem: GemmProblem, arch: str) -> str:
    """For example "gfx950 TN bfloat16 x bfloat16 M<=16 N=4096 K=4096"."""
    operands = [
        str(dtype).removeprefix("torch.") + (f" ({scaling})" if scaling else "")
        for dtype, scaling in ((problem.a_dtype, problem.a_scaling), (problem.b_dtype, problem.b_scaling))
    ]
    rows = 1 << max(problem.M - 1, 0).bit_length()
    words = [arch, problem.layout, " x ".join(operands), f"M<={rows}", f"N={problem.N}", f"K={problem.K}"]
    return " ".join(words)


def lookup(problem: GemmProblem, arch: str) -> GemmConfig | None:
    """What was tuned for the problem's class, or None. Without split K where the result must not depend on M."""
    if not TABLE:
        return None
    fields = TABLE.get(key(problem, arch))
    if fields is None:
        return None
    from fourwave.ops.gemm.config import GemmConfig

    if problem.batch_invariant:
        fields = {**fields, "split_k": 1}
    return GemmConfig(**fields)  # type: ignore[arg-type]
