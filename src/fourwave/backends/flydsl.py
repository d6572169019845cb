"""FlyDSL kernels on an AMD GPU, through PyTorch's ROCm build."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fourwave.backends import guard
from fourwave.backends.base import Backend, Description

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
    from fourwave.ops.grouped_gemm.config import GroupedConfig
    from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
    from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors

ARCHS = ("gfx942", "gfx950", "gfx1250")
FLYDSL_RANGE = ((0, 5), (0, 6))  # the range in pyproject.toml's extra `amd`: first version, first version past it


@functools.lru_cache(maxsize=1)
def flydsl_missing() -> str | None:
    """Why FlyDSL cannot be used, from its metadata alone (nothing is imported), or None."""
    if importlib.util.find_spec("flydsl") is None:
        return "flydsl is not installed: pip install 'fourwave[amd]'"
    version = importlib.metadata.version("flydsl")
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    low, high = FLYDSL_RANGE
    if not low <= parts < high:
        wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
        return f"flydsl {version} is installed and {wanted} is needed: pip install 'fourwave[amd]'"
    return None


@functools.lru_cache(maxsize=16)
def device_arch(index: int) -> str:
    """Architecture of GPU `index` as ROCm names it, features cut off: "gfx950" of "gfx950:sramecc+:xnack-"."""
    name = getattr(torch.cuda.get_device_properties(index), "gcnArchName", "")
    return name.split(":")[0]


@functools.lru_cache(maxsize=1)
def _device_missing() -> str | None:
    need = f"needs an AMD GPU ({', '.join(ARCHS[:-1])} or {ARCHS[-1]}) and a ROCm build of PyTorch"
    if torch.version.hip is None:
        return f"{need}; this PyTorch ({torch.__version__}) has no ROCm support"
    if not torch.cuda.is_available():
        return f"{need}; PyTorch {torch.__version__} sees no GPU"
    found = [device_arch(i) for i in range(torch.cuda.device_count())]
    if not any(arch in ARCHS for arch in found):
        return f"{need}; the GPUs here are {', '.join(found)}"
    return None


class FlyDSLBackend(Backend):
    """The kernels in ops/*/cdna3.py, cdna4.py and gfx1250.py on the GPU that holds the operands."""

    name = "flydsl"
    gpu = ("hip", "an AMD GPU")

    def unavailable(self, arch: str | None = None) -> str | None:
        missing = [why for why in (flydsl_missing(), guard.flydsl_conflict(), _device_missing()) if why]
        if missing:
            return "; ".join(missing)
        if arch is not None and arch not in (device_arch(i) for i in range(torch.cuda.device_count())):
            return f"no {arch} device"
        return None

    def forget(self) -> None:
        for known in (flydsl_missing, device_arch, _device_missing):
            known.cache_clear()

    def _arch(self) -> str:
        return device_arch(torch.cuda.current_device())

    def why_unsupported(self, problem: GemmProblem, config: GemmConfig | None) -> str | None:
        if problem.device_type != "cuda":
            return f"the operands are on the {problem.device_type.upper()}, not on an AMD GPU"
        arch = self._arch()
        if arch not in ARCHS:
            return f"the current device is {arch}; there are kernels for {', '.join(ARCHS)}"
        from fourwave.ops.gemm import config as gemm_config

        return gemm_config.why_unsupported(problem, config, arch)

    def describe_gemm(self, problem: GemmProblem, config: GemmConfig | None) -> Description:
        arch = self._arch()
        if config is not None:
            return describe_amd_gemm(problem, config, arch)
        from fourwave.tune.gemm import described

        config, reasons = described(problem, arch)
        return replace(describe_amd_gemm(problem, config, arch), reasons=reasons)

    def run_gemm(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        from fourwave.ops.gemm import amd
        from fourwave.tune.gemm import config_for

        arch = device_arch(tensors.a.device.index)
        with torch.cuda.device(tensors.a.device):
            return amd.run(problem, config or config_for(problem, arch, tensors), arch, tensors)

    def why_grouped_unsupported(self, problem: GroupedProblem, config: GroupedConfig | None) -> str | None:
        if problem.device_type != "cuda":
            return f"the operands are on the {problem.device_type.upper()}, not on an AMD GPU"
        from fourwave.ops.grouped_gemm.config import why_unsupported

        return why_unsupported(problem, config, self._arch())

    def describe_grouped_gemm(self, problem: GroupedProblem, config: GroupedConfig | None) -> Description:
        return describe_amd_grouped_gemm(problem, config, self._arch())

    def run_grouped_gemm(
        self, problem: GroupedProblem, config: GroupedConfig | None, tensors: GroupedTensors
    ) -> list[str]:
        from fourwave.ops.grouped_gemm import amd
        from fourwave.tune.grouped import config_for

        arch = device_arch(tensors.a.device.index)
        with torch.cuda.device(tensors.a.device):
            return amd.run(problem, config or config_for(problem, arch, tensors), arch, tensors)

    def copies(self, problem: GemmProblem, config: GemmConfig | None, tensors: GemmTensors) -> list[str]:
        from fourwave.ops.gemm import amd
        from fourwave.tune.gemm import chosen

        arch = self._arch()
        return amd.copies(problem, config or chosen(problem, arch), arch, tensors)

    def why_quantize_unsupported(self, problem: QuantizeProblem) -> str | None:
        from fourwave.quantize import amd

        if problem.device_type != "cuda":
            return f"x is on the {problem.device_type.upper()}, not on an AMD GPU"
        return amd.why_unsupported(problem, self._arch())

    def quantize_kernel(self, problem: QuantizeProblem) -> str:
        return f"quantize/{'mxfp4' if problem.quant_format.element == 'e2m1' else 'cdna'}.py"

    def run_quantize(
        self, problem: QuantizeProblem, x: torch.Tensor, scale: torch.Tensor | None, seed: torch.Tensor | None = None
    ) -> tuple[QuantizeTensors, list[str]]:
        from fourwave.quantize import amd

        with torch.cuda.device(x.device):
            return amd.run(problem, device_arch(x.device.index), x, scale, seed=seed)


def describe_amd_grouped_gemm(problem: GroupedProblem, config: GroupedConfig | None, arch: str) -> Description:
    """Kernel file and config for `arch`; the same for a GPU and for the simulator."""
    from fourwave.ops.grouped_gemm.config import default_config

    reasons = ["config given by the caller"]
    if config is None:
        config, reasons = default_config(problem, arch)
    kernel = {"gfx942": "ops/grouped_gemm/cdna3.py", "gfx950": "ops/grouped_gemm/cdna4.py"}[arch]
    return Description(kernel=kernel, arch=arch, config=config, reasons=list(reasons))


def describe_amd_gemm(problem: GemmProblem, config: GemmConfig | None, arch: str) -> Description:
    """Kernel file and config for `arch`; the same for a GPU and for the simulator."""
    from fourwave.ops.gemm.config import default_config, in_halves

    reasons = ["config given by the caller"]
    if config is None:
        config, reasons = default_config(problem, arch)
    kernel = {"gfx942": "ops/gemm/cdna3.py", "gfx950": "ops/gemm/cdna4.py", "gfx1250": "ops/gemm/gfx1250.py"}[arch]
    if config is not None and in_halves(config, problem.a_dtype.itemsize, arch):
        kernel = "ops/gemm/cdna4_halves.py"
    return Description(kernel=kernel, arch=arch, config=config, reasons=list(reasons))
