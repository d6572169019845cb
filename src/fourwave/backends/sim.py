"""The FlyDSL kernels for AMD GPUs, executed on the CPU by fourwave.sim with all its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourwave.backends import guard
from fourwave.backends.base import Backend, Description
from fourwave.backends.flydsl import describe_amd_gemm, describe_amd_grouped_gemm, flydsl_missing

if TYPE_CHECKING:
    import torch

    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
    from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors


ARCHS = ("gfx942", "gfx950", "gfx1250")


class SimBackend(Backend):
    """Simulated `arch`. A finding of the checkers raises fourwave.sim.SimulationError: no result comes with one.

    Every call adds what it simulated to fourwave.sim.current_report(), findings included.
    """

    def __init__(self, arch: str) -> None:
        if arch not in ARCHS:
            raise ValueError(f"arch {arch!r}: the simulated architectures are {', '.join(ARCHS)}")
        self.arch = arch
        self.name = f"sim:{arch}"

    def unavailable(self, arch: str | None = None) -> str | None:
        if arch is not None and arch != self.arch:
            return f"{self.name} simulates {self.arch}, not {arch}"
        if why := flydsl_missing() or guard.flydsl_conflict():
            return why
        try:
            from fourwave.sim import unavailable
        except ImportError as error:
            return f"the simulator cannot be imported: {error}"
        return unavailable(self.arch)

    def why_unsupported(self, problem: GemmProblem, config: GemmConfig | None) -> str | None:
        if problem.device_type != "cpu":
            return "the simulator takes CPU tensors only"
        from fourwave.ops.gemm import config as gemm_config

        return gemm_config.why_unsupported(problem, config, self.arch)

    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        return describe_amd_gemm(problem, config, self.arch)

    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        from fourwave import sim
        from fourwave.ops.gemm import amd
        from fourwave.ops.gemm.config import default_config

        if config is None:
            config = default_config(problem, self.arch)[0]
        with sim.session(arch=self.arch, on_finding="raise") as report:
            try:
                return amd.run(problem, config, self.arch, tensors)
            finally:
                sim.current_report().add(report)

    def why_grouped_unsupported(self, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
        if problem.device_type != "cpu":
            return "the simulator takes CPU tensors only"
        from fourwave.ops.grouped_gemm.config import why_unsupported

        return why_unsupported(problem, config, self.arch)

    def describe_grouped_gemm(self, problem: GroupedProblem, config: GroupedConfig | None) -> Description:
        return describe_amd_grouped_gemm(problem, config, self.arch)

    def run_grouped_gemm(
        self, problem: GroupedProblem, config: GroupedConfig | None, tensors: GroupedTensors
    ) -> list[str]:
        from fourwave import sim
        from fourwave.ops.grouped_gemm import amd

        with sim.session(arch=self.arch, on_finding="raise") as report:
            try:
                return amd.run(problem, config, self.arch, tensors)
            finally:
                sim.current_report().add(report)

    def copies(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        from fourwave.ops.gemm import amd
        from fourwave.ops.gemm.config import default_config

        return amd.copies(problem, config or default_config(problem, self.arch)[0], self.arch, tensors)

    def why_quantize_unsupported(self, problem: QuantizeProblem) -> str | None:
        from fourwave.quantize import amd

        if problem.device_type != "cpu":
            return "the simulator takes CPU tensors only"
        return amd.why_unsupported(problem, self.arch)

    def quantize_kernel(self, problem: QuantizeProblem) -> str:
        return f"quantize/{'mxfp4' if problem.quant_format.element == 'e2m1' else 'cdna'}.py"

    def run_quantize(
        self, problem: QuantizeProblem, x: torch.Tensor, scale: torch.Tensor | None, seed: torch.Tensor | None = None
    ) -> tuple[QuantizeTensors, list[str]]:
        from fourwave import sim
        from fourwave.quantize import amd

        with sim.session(arch=self.arch, on_finding="raise") as report:
            try:
                return amd.run(problem, self.arch, x, scale, seed=seed)
            finally:
                sim.current_report().add(report)
