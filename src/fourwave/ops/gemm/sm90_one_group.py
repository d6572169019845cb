"""Products with scales of 1x128 blocks of both operands, weight gradients of blockwise FP8: the grouped kernel's, as one group.

Its scales change along both dimensions of out with every 128 k, which the tiled kernel's loop does not multiply
(ops/grouped_gemm/sm90_wgrad.py does).
"""

from __future__ import annotations

import functools

import torch

from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.grouped_gemm import sm90_config, sm90_launch
from fourwave.ops.grouped_gemm.problem import REDUCTION, GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.sm90_config import HopperGroupedConfig

_FEATURES = frozenset(["scaling:1x128x1x128"])


def takes(problem: GemmProblem) -> bool:
    """Whether there is a grouped_problem; quicker than a look into its cache."""
    return problem.a_scaling == "1x128" == problem.b_scaling


@functools.lru_cache(maxsize=4096)
def grouped_problem(problem: GemmProblem) -> GroupedProblem | None:
    """The grouped problem that stands for `problem`, or None where it has other scales."""
    if not takes(problem):
        return None
    layout = problem.layout if problem.layout in ("NT", "TN") else "NT"  # why_unsupported refuses the others
    return GroupedProblem(
        1, problem.M, problem.N, problem.K, REDUCTION, layout, problem.a_dtype, problem.b_dtype, problem.out_dtype,
        accumulate=problem.accumulate, device_type=problem.device_type, a_scaling="1x128", b_scaling="1x128",
        fast_accum=problem.fast_accum,
    )  # fmt: skip


def why_unsupported(problem: GemmProblem, config: HopperGroupedConfig | None) -> str | None:
    """Of problems that have a grouped_problem."""
    grouped = grouped_problem(problem)
    assert grouped is not None
    if (reason := problem.why_refused(_FEATURES)) is not None:
        return reason
    if problem.layout == "NN":
        return "layout NN with FP8 operands: wgmma reads 8-bit operands with K contiguous only"
    if problem.bias_dtype is not None or problem.activation is not None:
        return "a bias or an activation with scales of 1x128 blocks of both operands: this kernel has neither"
    if config is not None and not isinstance(config, HopperGroupedConfig):
        return (
            f"config is a {type(config).__name__}: products with scales of 1x128 blocks of both operands choose theirs, or take a "
            "HopperGroupedConfig"
        )
    return sm90_config.why_unsupported(grouped, config)


def run(problem: GemmProblem, config: HopperGroupedConfig | None, tensors: GemmTensors) -> list[str]:
    """As sm90_launch.run of the dense kernels, on the current device."""
    if (reason := why_unsupported(problem, config)) is not None:
        raise NotImplementedError(reason)
    grouped = grouped_problem(problem)
    assert grouped is not None and tensors.out is not None and tensors.a_scale is not None
    # The kernel has no alpha.
    a_scale = tensors.a_scale if tensors.alpha == 1 else tensors.a_scale * tensors.alpha
    sizes = _sizes(problem.K, tensors.a.device)
    return sm90_launch.run(
        grouped, config,
        GroupedTensors(tensors.a, tensors.b, sizes, tensors.out[None], a_scale=a_scale, b_scale=tensors.b_scale),
    )  # fmt: skip


def copies(problem: GemmProblem, config: HopperGroupedConfig | None, tensors: GemmTensors) -> list[str]:
    """What `run` would note about copies."""
    grouped = grouped_problem(problem)
    assert grouped is not None
    sizes = torch.empty(1, dtype=torch.int64, device="meta")
    out = torch.empty(grouped.out_shape, dtype=problem.out_dtype, device="meta")
    return sm90_launch.copies(grouped, config, GroupedTensors(tensors.a, tensors.b, sizes, out))


# By K, device and stream, in whose order they are filled. Kept for good, 8 bytes each: a graph may have an address.
_known: dict[tuple[int, torch.device, int], torch.Tensor] = {}


def _sizes(K: int, device: torch.device) -> torch.Tensor:
    """m_sizes of one group of K rows."""
    on_gpu = device.type == "cuda"
    key = K, device, torch._C._cuda_getCurrentRawStream(device.index) if on_gpu else 0
    sizes = _known.get(key)
    if sizes is None:
        sizes = torch.full((1,), K, dtype=torch.int64, device=device)
        # What is made while a graph is captured is filled whenever it runs, in the graph's own memory.
        if not on_gpu or not torch.cuda.is_current_stream_capturing():
            _known[key] = sizes
    return sizes
