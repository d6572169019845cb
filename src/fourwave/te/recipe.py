"""Recipe classes with the names and arguments of transformer_engine.common.recipe. They are fourwave.recipes' own."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from fourwave import recipes
from fourwave.recipes import Recipe


class Format(enum.Enum):
    """Formats of the forward and the backward pass."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


def _format(fp8_format: Format) -> str:
    if fp8_format is Format.E5M2:
        raise ValueError("fp8_format is Format.E5M2: training with it alone is not supported; use E4M3 or HYBRID")
    return str(fp8_format.value)


def _backward(backward_override: str | None) -> str:
    if backward_override == "dequantized":
        raise NotImplementedError("backward_override='dequantized': None and 'high_precision' are here")
    if backward_override not in (None, "high_precision"):
        raise ValueError(f"backward_override is {backward_override!r}; it must be None or 'high_precision'")
    return backward_override or "quantized"


def _no_attention(fp8_dpa: bool, fp8_mha: bool) -> None:
    if fp8_dpa or fp8_mha:
        raise NotImplementedError("fp8_dpa and fp8_mha: there is no attention here")


class DelayedScaling(recipes.DelayedScaling):
    """As recipes.DelayedScaling. scaling_factor_compute_algo takes and returns factors that values are multiplied with."""

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: str | Callable[..., Any] = "max",
        scaling_factor_compute_algo: Callable[..., Any] | None = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        if backward_override is not None:
            raise ValueError("backward_override with DelayedScaling: it has None only")
        algo = scaling_factor_compute_algo
        super().__init__(
            _format(fp8_format), margin, amax_history_len, amax_compute_algo, None if algo is None else _reciprocal(algo),
            reduce_amax,
        )  # fmt: skip


def _reciprocal(algo: Callable[..., Any]) -> Callable[..., Any]:
    def scale(amax: Any, old: Any, largest: Any, recipe: Any) -> Any:
        return 1 / algo(amax, 1 / old, largest, recipe)

    return scale


class Float8CurrentScaling(recipes.CurrentScaling):
    def __init__(
        self,
        use_power_2_scales: bool = False,
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        super().__init__(
            _format(fp8_format), "pow2" if use_power_2_scales else "fp32", _backward(backward_override)
        )  # fmt: skip


class Float8BlockScaling(recipes.BlockScaling):
    def __init__(
        self,
        use_f32_scales: bool = False,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        if (x_block_scaling_dim, grad_block_scaling_dim) != (1, 1) or w_block_scaling_dim not in (1, 2):
            raise NotImplementedError(
                f"blocks of {x_block_scaling_dim}, {w_block_scaling_dim}, {grad_block_scaling_dim} dimensions for input, weight "
                "and gradient: inputs and gradients have 1, weights 1 or 2"
            )
        super().__init__(
            _format(fp8_format), "fp32" if use_f32_scales else "pow2", "128x128" if w_block_scaling_dim == 2 else "1x128",
            _backward(backward_override),
        )  # fmt: skip


class MXFP8BlockScaling(recipes.MXFP8):
    """Scales round up, as Transformer Engine's do: nothing saturates."""

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        if margin:
            raise NotImplementedError(f"margin={margin} with MXFP8: scales come from their blocks alone")
        super().__init__(_format(fp8_format), "ceil", _backward(backward_override))


class NVFP4BlockScaling(Recipe):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("NVFP4 is not here; fourwave.recipes.MXFP4 is the 4-bit recipe")


__all__ = [
    "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP8BlockScaling", "NVFP4BlockScaling", "Recipe",
]  # fmt: skip
