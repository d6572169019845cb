"""What a backend answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

# Addresses of a, b, out, bias, a_scale, b_scale (0 where there is none), and alpha. False: nothing was done, run_gemm must be called.
Relaunch = Callable[[int, int, int, int, int, int, float], bool]

if TYPE_CHECKING:
    import torch

    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
    from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors


@dataclass(frozen=True)
class Description:
    """How a backend would run a problem: for `fw.explain` and the dispatch log."""

    kernel: str
    arch: str | None = None
    config: GemmConfig | GroupedConfig | None = None
    reasons: list[str] = field(default_factory=list)


class Backend(ABC):
    """One way to run the operations. Stateless: one instance per name serves every call."""

    name: str
    gpu: tuple[str, str] | None = None  # whose builds of PyTorch it runs on, "cuda" or "hip", and what GPU it needs

    @abstractmethod
    def unavailable(self, arch: str | None = None) -> str | None:
        """Why this backend cannot run anything here (for `arch`, where it has several), or None."""

    def unavailable_to(self, device_type: str) -> str | None:
        """As `unavailable`, for operands there. For those on the CPU nothing is asked of a GPU: the question initializes it, after which
        forked processes cannot use it, and PyTorch does not let that happen within a checkpoint."""
        if device_type == "cpu" and self.gpu is not None:
            import torch

            builds, needed = self.gpu
            if getattr(torch.version, builds) is not None and torch.cuda.is_available():
                return f"the operands are on the CPU, not on {needed}"
        return self.unavailable()

    def forget(self) -> None:
        """Ask again, at the next question, which packages and devices there are."""
        return None

    @abstractmethod
    def why_unsupported(self, problem: GemmProblem, config: GemmConfig | None) -> str | None:
        """Why this backend cannot run this problem with this config (None: its own choice), or None."""

    def why_not_automatic(self, problem: GemmProblem) -> str | None:
        """Why automatic choice passes this backend over for a problem that it can run, or None."""
        return None

    @abstractmethod
    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        """Kernel, architecture and config that `run_gemm` would use, with the reasons for the config."""

    @abstractmethod
    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        """Write act(alpha * op(a) @ op(b) + bias) (+ out) into tensors.out; return notes on what was done on the way.

        Writes whatever else the problem says is written (GemmTensors). M, N and K are at least 1.
        """

    def relaunches(self, problem: GemmProblem) -> bool:
        """Whether `relaunch` may have an answer for this problem."""
        return False

    def relaunch(self, problem: GemmProblem, tensors: GemmTensors) -> Relaunch | None:
        """What does the same as `run_gemm` without a config, in the thread that asks, for tensors of the same shapes, strides, types
        and device as these, which it has run."""
        return None

    def copies(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        """What `run_gemm` would note about copies for the same tensors (out None: a new one), found without a launch."""
        return []

    def why_grouped_unsupported(self, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
        """Why this backend cannot run this grouped problem with this config (None: its own choice), or None."""
        return f"{self.name} has no grouped GEMM"

    def describe_grouped_gemm(self, problem: GroupedProblem, config: GroupedConfig | None) -> Description:
        """Kernel, architecture and config that `run_grouped_gemm` would use, with the reasons for the config."""
        raise NotImplementedError(f"{self.name} has no grouped GEMM")

    def run_grouped_gemm(
        self, problem: GroupedProblem, config: GroupedConfig | None, tensors: GroupedTensors
    ) -> list[str]:
        """Write the product into tensors.out, as GroupedProblem says; return notes. G, M, N and K are at least 1."""
        raise NotImplementedError(f"{self.name} has no grouped GEMM")

    def why_quantize_unsupported(self, problem: QuantizeProblem) -> str | None:
        """Why this backend cannot quantize `problem`, or None."""
        return None

    def quantize_kernel(self, problem: QuantizeProblem) -> str:
        """File of what `run_quantize` would run."""
        return "quantize/reference.py (PyTorch)"

    def run_quantize(
        self, problem: QuantizeProblem, x: torch.Tensor, scale: torch.Tensor | None, seed: torch.Tensor | None = None
    ) -> tuple[QuantizeTensors, list[str]]:
        """What problem.outputs() lists, new, and notes. x is [rows, columns] with any strides and at least one element.

        A backend without kernels for it runs the PyTorch code that defines the numbers.
        """
        from fourwave.quantize.reference import quantize_reference

        return quantize_reference(problem, x, scale, seed), []
