"""What `fourwave explain gemm --isa` adds for gfx1250: LDS for a short and a long K, and counts for each tile of K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fourwave.ops.gemm import amd
from fourwave.ops.gemm.config import GemmConfig, default_config
from fourwave.perf.isa import CompiledKernel, compile_isa

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

DEPTHS = (1024, 65536)


def further_facts(arch: str, compiled: Sequence[Any]) -> dict[str, list[str]]:
    if arch != "gfx1250":
        return {}
    facts: dict[str, list[str]] = {}
    for problem, config, kernel in compiled:
        steps = kernel.main_loop.k // config.tile_k
        loop = kernel.main_loop
        waits = [wait for wait in loop.waits if wait.startswith("tensorcnt")]
        for name, cell in (
            *((f"LDS bytes, K = {K}", lds_at(problem, config, kernel, K)) for K in DEPTHS),
            (f"each step of {config.tile_k} k: matrix instructions", loop.mfma / steps),
            ("  tiles of the data mover that a wave issues", loop.loads_to_lds / steps),
            ("  waits for the data mover", len(waits) / steps),
            ("  barriers", loop.barriers / steps),
        ):
            facts.setdefault(name, []).append(f"{cell:g}")
    return facts


def lds_at(problem: GemmProblem, config: GemmConfig, kernel: CompiledKernel, K: int) -> int:
    """Of the kernel that runs for another K: of this one, if it is the same kernel, or else of what is compiled for K."""
    other = replace(problem, K=K)
    if amd.specialise(other, default_config(other, "gfx1250")[0], "gfx1250") == amd.specialise(
        problem, config, "gfx1250"
    ):
        return kernel.lds_bytes
    return compile_isa(other, None, "gfx1250").lds_bytes
