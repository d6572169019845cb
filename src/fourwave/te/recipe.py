"""Recipe classes with the names and arguments of transformer_engine.common.recipe. They are fourwave.recipes' own."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fourwave import recipes


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(str, enum.Enum):
    """Formats of the forward and the backward pass. Members equal fourwave.recipes' names; values have the largest numbers."""

    E2M1 = "e2m1", 6, 6
    E4M3 = "e4m3", 448, 448
    E5M2 = "e5m2", 57344, 57344
    HYBRID = "hybrid", 448, 57344

    def __new__(cls, name: str, max_fwd: float, max_bwd: float) -> Format:
        member = str.__new__(cls, name)
        member._value_ = _Largest(max_fwd, max_bwd)  # type: ignore[assignment]
        return member

    __hash__ = str.__hash__

    def __repr__(self) -> str:
        return f"Format.{self.name}"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


@dataclass(frozen=True)
class MMParams:
    """use_split_accumulator: the opposite of fast_accum of `fourwave.gemm`."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How an operand is quantized; recipes show it, and take none."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe(recipes.Recipe):
    """Base class; tells of what kind a recipe, or a class of recipes, is."""

    fp8_format: Any
    fp8_dpa: bool
    fp8_mha: bool
    backward_override: str | None

    @classmethod
    def delayed(cls) -> bool:
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        return issubclass(cls, CustomRecipe)

    def _keep(self, **values: Any) -> None:
        """Arguments that the fields of fourwave.recipes say in other words."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _format(fp8_format: Format) -> Format:
    if not isinstance(fp8_format, Format):
        raise ValueError(f"fp8_format is {fp8_format!r}; it must be Format.E4M3 or Format.HYBRID")
    if fp8_format is Format.E5M2:
        raise ValueError("fp8_format is Format.E5M2: training with it alone is not supported; use E4M3 or HYBRID")
    if fp8_format is Format.E2M1:
        raise ValueError("fp8_format is Format.E2M1, a format of 4 bits: use E4M3 or HYBRID, or fourwave.recipes.MXFP4")
    return fp8_format


def _backward(backward_override: str | None) -> str:
    if backward_override == "dequantized":
        raise NotImplementedError("backward_override='dequantized': None and 'high_precision' are here")
    if backward_override not in (None, "high_precision"):
        raise ValueError(f"backward_override is {backward_override!r}; it must be None or 'high_precision'")
    return backward_override or "quantized"


def _no_attention(fp8_dpa: bool, fp8_mha: bool) -> None:
    _flags(fp8_dpa=fp8_dpa, fp8_mha=fp8_mha)
    if fp8_dpa or fp8_mha:
        raise NotImplementedError("fp8_dpa and fp8_mha: there is no attention here")


def _flags(**values: Any) -> None:
    """Formats in the place of flags, say, of other versions' order of arguments, are true of all."""
    for name, value in values.items():
        if value is not True and value is not False:
            raise ValueError(f"{name} is {value!r}; it must be True or False")


def _split(recipe: str, fprop: MMParams, dgrad: MMParams, wgrad: MMParams, *, fixed: bool) -> bool:
    """fast_accum of fprop. Sums of dgrad and wgrad are always whole; fixed: those of fprop, too."""
    for name, params in (("fp8_gemm_fprop", fprop), ("fp8_gemm_dgrad", dgrad), ("fp8_gemm_wgrad", wgrad)):
        if not isinstance(params, MMParams):
            raise ValueError(f"{name} is {params!r}; it must be recipe.MMParams(use_split_accumulator=...)")
        if not params.use_split_accumulator and (fixed or name != "fp8_gemm_fprop"):
            raise NotImplementedError(f"{recipe}({name}={params}): it is MMParams(use_split_accumulator=True) here")
    return not fprop.use_split_accumulator


_SPLIT, _FAST = MMParams(True), MMParams(False)


# Fields that the constructors do not take say in fourwave.recipes' words what those that they take say.
def _said() -> Any:
    return field(init=False, repr=False)


class _OverrideLinearPrecision(NamedTuple):
    """Which products are in high precision."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


_NOTHING = _OverrideLinearPrecision()


def _overridden(given: Any) -> _OverrideLinearPrecision:
    if not isinstance(given, (tuple, list)) or len(given) != 3 or any(each not in (False, True) for each in given):
        raise ValueError(f"override_linear_precision is {given!r}; it must be a flag each for fprop, dgrad and wgrad")
    override = _OverrideLinearPrecision(*map(bool, given))
    if override.fprop or override.dgrad:
        raise NotImplementedError(
            f"override_linear_precision={tuple(override)}: (False, False, True), wgrad in high precision, is here, as in Transformer "
            "Engine; Float8CurrentScaling(backward_override='high_precision') has dgrad so, too"
        )
    return override


@dataclass(frozen=True, init=False)
class DelayedScaling(recipes.DelayedScaling, Recipe):
    """As recipes.DelayedScaling, fprop with the fast accumulation as there. scaling_factor_compute_algo takes and returns factors
    that values are multiplied with.

    Of Transformer Engine 1.x, by name: override_linear_precision, a flag each for fprop, dgrad and wgrad, of which the last may be
    True (wgrad in high precision); interval, 1 or -1: scales are made anew at every step."""

    fast_accum: bool = _said()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    interval: int = -1
    override_linear_precision: _OverrideLinearPrecision = _NOTHING

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
        *,
        interval: int = -1,
        override_linear_precision: Any = _NOTHING,
    ) -> None:
        if isinstance(fp8_format, int):
            raise ValueError(
                f"fp8_format is {fp8_format}; it must be Format.E4M3 or Format.HYBRID. Transformer Engine 1.x had interval before it: give "
                "arguments by name"
            )
        _flags(reduce_amax=reduce_amax)
        _no_attention(fp8_dpa, fp8_mha)
        if backward_override is not None:
            raise ValueError(
                f"backward_override={backward_override!r} with DelayedScaling: it has None only, as in Transformer Engine; "
                "override_linear_precision=(False, False, True) has wgrad in high precision"
            )
        if interval not in (-1, 1):
            raise NotImplementedError(
                f"interval={interval!r}: scales are made anew at every step, which is interval=1; Transformer Engine has done so "
                "whatever it is since 1.8"
            )
        override = _overridden(override_linear_precision)
        algo = scaling_factor_compute_algo
        super().__init__(
            _format(fp8_format), margin, amax_history_len, amax_compute_algo,
            algo if algo is None or isinstance(algo, _Reciprocal) else _Reciprocal(algo), reduce_amax, fast_accum=True,
        )  # fmt: skip
        self._keep(
            fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, backward_override=backward_override, interval=interval,
            override_linear_precision=override,
        )  # fmt: skip

    @property
    def plan(self) -> recipes.Plan:
        plan = super().plan
        if self.override_linear_precision[2]:
            plan = plan._replace(x_t=None, g_t=None).check()
        return plan


@dataclass(frozen=True)
class _Reciprocal:
    """A function of factors as one of scales."""

    algo: Callable[..., Any]

    def __call__(self, amax: Any, old: Any, largest: Any, recipe: Any) -> Any:
        return 1 / self.algo(amax, 1 / old, largest, recipe)


@dataclass(frozen=True, init=False)
class Float8CurrentScaling(recipes.CurrentScaling, Recipe):
    """fprop has the fast accumulation by default, as there: fp8_gemm_fprop=MMParams(use_split_accumulator=True) leaves it out."""

    scale: str = _said()
    backward: str = _said()
    fast_accum: bool = _said()
    use_power_2_scales: bool = False
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __init__(
        self,
        use_power_2_scales: bool = False,
        fp8_format: Format = Format.HYBRID,
        fp8_gemm_fprop: MMParams = _FAST,
        fp8_gemm_dgrad: MMParams = _SPLIT,
        fp8_gemm_wgrad: MMParams = _SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        _flags(use_power_2_scales=use_power_2_scales)
        fast = _split("Float8CurrentScaling", fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad, fixed=False)
        super().__init__(
            _format(fp8_format), "pow2" if use_power_2_scales else "fp32", _backward(backward_override), fast
        )  # fmt: skip
        self._keep(
            use_power_2_scales=use_power_2_scales, fp8_gemm_fprop=fp8_gemm_fprop, fp8_gemm_dgrad=fp8_gemm_dgrad,
            fp8_gemm_wgrad=fp8_gemm_wgrad, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, backward_override=backward_override,
        )  # fmt: skip

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=self.use_power_2_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp


@dataclass(frozen=True, init=False)
class MXFP8BlockScaling(recipes.MXFP8, Recipe):
    """Scales round up, as Transformer Engine's do: nothing saturates."""

    scale_rule: str = _said()
    backward: str = _said()
    margin: int = 0
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        enable_2d_quantization: bool = False,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        if margin:
            raise NotImplementedError(f"margin={margin} with MXFP8: scales come from their blocks alone")
        _flags(enable_2d_quantization=enable_2d_quantization)
        if enable_2d_quantization:
            raise NotImplementedError("enable_2d_quantization=True: MXFP8's blocks are 1x32 here, of weights, too")
        super().__init__(_format(fp8_format), "ceil", _backward(backward_override))
        self._keep(
            margin=margin, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, backward_override=backward_override,
            enable_2d_quantization=enable_2d_quantization,
        )  # fmt: skip


@dataclass(frozen=True, init=False)
class Float8BlockScaling(recipes.BlockScaling, Recipe):
    scale: str = _said()
    weight_block: str = _said()
    backward: str = _said()
    use_f32_scales: bool = False
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SPLIT
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __init__(
        self,
        use_f32_scales: bool = False,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_gemm_fprop: MMParams = _SPLIT,
        fp8_gemm_dgrad: MMParams = _SPLIT,
        fp8_gemm_wgrad: MMParams = _SPLIT,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
    ) -> None:
        _no_attention(fp8_dpa, fp8_mha)
        _flags(use_f32_scales=use_f32_scales)
        _split("Float8BlockScaling", fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad, fixed=True)
        if (x_block_scaling_dim, grad_block_scaling_dim) != (1, 1) or w_block_scaling_dim not in (1, 2):
            raise NotImplementedError(
                f"blocks of {x_block_scaling_dim}, {w_block_scaling_dim}, {grad_block_scaling_dim} dimensions for input, weight "
                "and gradient: inputs and gradients have 1, weights 1 or 2"
            )
        super().__init__(
            _format(fp8_format), "fp32" if use_f32_scales else "pow2", "128x128" if w_block_scaling_dim == 2 else "1x128",
            _backward(backward_override),
        )  # fmt: skip
        self._keep(
            use_f32_scales=use_f32_scales, x_block_scaling_dim=x_block_scaling_dim, w_block_scaling_dim=w_block_scaling_dim,
            grad_block_scaling_dim=grad_block_scaling_dim, fp8_gemm_fprop=fp8_gemm_fprop, fp8_gemm_dgrad=fp8_gemm_dgrad,
            fp8_gemm_wgrad=fp8_gemm_wgrad, fp8_dpa=fp8_dpa, fp8_mha=fp8_mha, backward_override=backward_override,
        )  # fmt: skip

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=not self.use_f32_scales)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp


class NVFP4BlockScaling(Recipe):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("NVFP4 is not here; fourwave.recipes.MXFP4 is the 4-bit recipe")


class CustomRecipe(Recipe):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("recipes of quantizers are not here: fourwave.recipes has those that are")


__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MMParams", "MXFP8BlockScaling",
    "NVFP4BlockScaling", "QParams", "Recipe",
]  # fmt: skip
