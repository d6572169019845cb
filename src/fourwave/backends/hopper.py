"""CuTe DSL kernels on an NVIDIA Hopper GPU (sm_90)."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fourwave.backends import guard
from fourwave.backends.base import Backend, Description, Relaunch
from fourwave.ops.gemm import sm90_decoded, sm90_launch, sm90_one_group, sm90_rescaled

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
    from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors

CAPABILITY = (9, 0)
ARCH = "sm_90a"
CUTEDSL_RANGE = ((4, 8), (4, 9))  # the range in pyproject.toml's extra `hopper`: first version, first version past it


@functools.lru_cache(maxsize=1)
def cutedsl_missing() -> str | None:
    """Why CuTe DSL cannot be used, from its metadata alone (nothing is imported), or None."""
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed: pip install 'fourwave[hopper]'"
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return "the installed cutlass is not nvidia-cutlass-dsl: pip install 'fourwave[hopper]'"
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    low, high = CUTEDSL_RANGE
    if not low <= parts < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        return f"nvidia-cutlass-dsl {version} is installed and {wanted} is needed: pip install 'fourwave[hopper]'"
    return None


@functools.lru_cache(maxsize=16)
def _is_hopper(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == CAPABILITY


@functools.lru_cache(maxsize=1)
def _device_missing() -> str | None:
    need = "needs an NVIDIA Hopper GPU (H100, H200) and a CUDA build of PyTorch"
    if torch.version.cuda is None:
        return f"{need}; this PyTorch ({torch.__version__}) has no CUDA support"
    if not torch.cuda.is_available():
        return f"{need}; PyTorch {torch.__version__} sees no GPU"
    indices = range(torch.cuda.device_count())
    if not any(_is_hopper(i) for i in indices):
        return f"{need}; the GPUs here are {', '.join(torch.cuda.get_device_name(i) for i in indices)}"
    return None


def _way(problem: GemmProblem, config: GemmConfig | None) -> Any:
    """The module that runs the problem, whose run and copies take what the backend's do."""
    if sm90_one_group.takes(problem):
        return sm90_one_group
    if sm90_rescaled.fp8_problem(problem, config) is not None:  # type: ignore[arg-type]
        return sm90_rescaled
    return sm90_decoded if sm90_decoded.decodes(problem) else sm90_launch


class HopperBackend(Backend):
    """The kernels in ops/*/sm90.py on the GPU that holds the operands."""

    name = "hopper"
    gpu = ("cuda", "a Hopper GPU")

    def unavailable(self, arch: str | None = None) -> str | None:
        missing = [why for why in (cutedsl_missing(), guard.cutlass_conflict(), _device_missing()) if why]
        if missing:
            return "; ".join(missing)
        if arch is not None and arch != ARCH:
            return f"there are Hopper kernels for {ARCH}, not for {arch}"
        return None

    def forget(self) -> None:
        for known in (cutedsl_missing, _is_hopper, _device_missing):
            known.cache_clear()

    def why_unsupported(self, problem: GemmProblem, config: GemmConfig | None) -> str | None:
        if problem.device_type != "cuda":
            return f"the operands are on the {problem.device_type.upper()}, not on a Hopper GPU"
        if not _is_hopper(torch.cuda.current_device()):
            return f"the current device is a {torch.cuda.get_device_name()}; there are kernels for Hopper"
        if sm90_one_group.takes(problem):
            return sm90_one_group.why_unsupported(problem, config)  # type: ignore[arg-type]
        return sm90_rescaled.why_unsupported(problem, config)  # type: ignore[arg-type]

    def why_not_automatic(self, problem: GemmProblem) -> str | None:
        from fourwave.ops.gemm import sm90_automatic

        return sm90_automatic.why_not_automatic(problem)

    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        from fourwave.ops.gemm.sm90_choice import default_config

        if (grouped := sm90_one_group.grouped_problem(problem)) is not None:
            told = self.describe_grouped_gemm(grouped, config)  # type: ignore[arg-type]
            return replace(told, reasons=["the grouped weight gradient's kernel, as one group", *told.reasons])
        plain = sm90_decoded.plain_problem(problem)
        multiplied = sm90_rescaled.fp8_problem(problem, config) or plain or problem  # type: ignore[arg-type]
        reasons = ["config given by the caller"]
        chosen: object = config
        if config is None:
            if plain is multiplied:
                chosen, reasons = sm90_decoded.chosen_config(problem, plain)
            else:
                chosen, reasons = default_config(multiplied)
        if sm90_rescaled.is_pair(problem):
            reasons = [*sm90_rescaled.describe(problem, config), *reasons]  # type: ignore[arg-type]
        elif plain is not None:
            reasons = [*sm90_decoded.describe(problem), *reasons]
        schedule = getattr(chosen, "schedule", None)
        kernel = f"sm90_{schedule}" if schedule in ("swapped", "streamed") else "sm90"
        return Description(f"ops/gemm/{kernel}.py", ARCH, chosen, list(reasons))  # type: ignore[arg-type]

    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        device = tensors.a.device
        if device.index == torch.cuda.current_device():
            return self._run_gemm(problem, config, tensors)
        with torch.cuda.device(device):
            return self._run_gemm(problem, config, tensors)

    def _run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        return _way(problem, config).run(problem, config, tensors)

    def relaunches(self, problem: GemmProblem) -> bool:
        """Of what one kernel runs, that reads the operands as they are."""
        return _way(problem, None) is sm90_launch and not sm90_launch.more_outputs(problem)

    def relaunch(self, problem: GemmProblem, tensors: GemmTensors) -> Relaunch | None:
        return sm90_launch.relaunch(problem, tensors) if self.relaunches(problem) else None

    def copies(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        return _way(problem, config).copies(problem, config, tensors)

    def why_quantize_unsupported(self, problem: QuantizeProblem) -> str | None:
        if problem.device_type != "cuda":
            return f"x is on the {problem.device_type.upper()}, not on a Hopper GPU"
        if not _is_hopper(torch.cuda.current_device()):
            return f"the current device is a {torch.cuda.get_device_name()}; there are kernels for Hopper"
        from fourwave.quantize import sm90_launch as quantize_launch

        return quantize_launch.why_unsupported(problem)

    def quantize_kernel(self, problem: QuantizeProblem) -> str:
        return "quantize/sm90.py"

    def run_quantize(
        self, problem: QuantizeProblem, x: torch.Tensor, scale: torch.Tensor | None, seed: torch.Tensor | None = None
    ) -> tuple[QuantizeTensors, list[str]]:
        from fourwave.quantize import sm90_launch as quantize_launch

        if x.device.index == torch.cuda.current_device():
            return quantize_launch.run(problem, x, scale)
        with torch.cuda.device(x.device):
            return quantize_launch.run(problem, x, scale)

    def why_grouped_unsupported(self, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
        if problem.device_type != "cuda":
            return f"the operands are on the {problem.device_type.upper()}, not on a Hopper GPU"
        if not _is_hopper(torch.cuda.current_device()):
            return f"the current device is a {torch.cuda.get_device_name()}; there are kernels for Hopper"
        from fourwave.ops.grouped_gemm import sm90_decoded as grouped_decoded

        return grouped_decoded.why_unsupported(problem, config)  # type: ignore[arg-type]

    def describe_grouped_gemm(self, problem: GroupedProblem, config: GroupedConfig | None) -> Description:
        from fourwave.ops.grouped_gemm import sm90_decoded as grouped_decoded
        from fourwave.ops.grouped_gemm.sm90_choice import default_config

        plain = grouped_decoded.plain_problem(problem)
        reasons = ["config given by the caller"]
        chosen: object = config
        if config is None:
            chosen, reasons = default_config(plain or problem)
        if plain is not None:
            reasons = [*grouped_decoded.describe(problem), *reasons]
        kernel = "sm90_swapped" if getattr(chosen, "schedule", None) == "swapped" else "sm90"
        if problem.split == "reduction":
            kernel = "sm90_wgrad"
        kernel = f"ops/grouped_gemm/{kernel}.py"
        return Description(kernel, ARCH, chosen, list(reasons))  # type: ignore[arg-type]

    def run_grouped_gemm(
        self, problem: GroupedProblem, config: GroupedConfig | None, tensors: GroupedTensors
    ) -> list[str]:
        from fourwave.ops.grouped_gemm import sm90_decoded as grouped_decoded

        device = tensors.a.device
        if device.index == torch.cuda.current_device():
            return grouped_decoded.run(problem, config, tensors)  # type: ignore[arg-type]
        with torch.cuda.device(device):
            return grouped_decoded.run(problem, config, tensors)  # type: ignore[arg-type]
