"""How training quantizes: which format each operand of the three GEMMs of a linear layer has, and where scales come from.

fprop  y  = x @ w.T      x and w, blocks of scales along the rows
dgrad  dx = dy @ w       dy along the rows, w along the columns
wgrad  dw = dy.T @ x     dy and x along the columns

A recipe is a frozen description; what a module remembers from step to step is in the module (fourwave.nn). docs/recipes.md
has the table. Names, arguments and the update of delayed scaling follow Transformer Engine's recipes
(transformer_engine/common/recipe, github.com/NVIDIA/TransformerEngine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fourwave.formats.scale_rules import BLOCK_RULES, MX_RULES
from fourwave.quantize.tensor import FORMATS

E4M3, HYBRID = "e4m3", "hybrid"
BACKWARDS = ("mxfp8", "mxfp4", "high_precision")


class Plan(NamedTuple):
    """A recipe as the modules read it: constants only, which torch.compile guards on.

    x, x_t   format of the input in fprop and in wgrad; w, w_t: of the weight in fprop and dgrad; g, g_t: of the gradient of
             the output in dgrad and wgrad. Names of fourwave.quantize.tensor.FORMATS, or None: not quantized
    mx_rule, block_rule   scale_rule of `fw.quantize` for MX formats and for the others
    fast_accum   of fprop, as in `fw.gemm`
    delayed  scales come from earlier steps: margin, history (length), algo and rescale as in DelayedScaling
    stochastic  gradients in mxfp4 are rounded stochastically
    hadamard  both operands of wgrad go through a random Hadamard transform along the tokens
    """

    x: str | None = None
    x_t: str | None = None
    w: str | None = None
    w_t: str | None = None
    g: str | None = None
    g_t: str | None = None
    mx_rule: str = MX_RULES[0]
    block_rule: str = BLOCK_RULES[0]
    fast_accum: bool = False
    delayed: bool = False
    margin: int = 0
    history: int = 0
    algo: Any = "max"
    rescale: Any = None
    stochastic: bool = False
    hadamard: bool = False

    def check(self) -> Plan:
        for pair in ((self.x, self.w), (self.g, self.w_t), (self.g_t, self.x_t)):
            assert (pair[0] is None) == (pair[1] is None), pair
            assert all(name is None or name in FORMATS for name in pair), pair
        return self


UNQUANTIZED = Plan()


@dataclass(frozen=True)
class Recipe:
    """Base of the recipes."""

    @property
    def plan(self) -> Plan:
        raise NotImplementedError("fourwave.recipes.Recipe is a base class: use DelayedScaling, CurrentScaling, ...")

    @property
    def reduces_amax(self) -> bool:
        """Whether autocast reduces amax over its group."""
        return False


def check_recipe(recipe: object, *, none: bool = False) -> None:
    """none: it may be None, too."""
    if isinstance(recipe, Recipe) or (none and recipe is None):
        return
    raise ValueError(f"recipe is {recipe!r}; it must be one of fourwave.recipes, such as MXFP8(){', or None' * none}")


def _choose(name: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; it must be {', '.join(map(repr, known))}")


def _grad_element(fp8_format: str) -> str:
    return "e5m2" if fp8_format == HYBRID else "e4m3"


@dataclass(frozen=True)
class Unquantized(Recipe):
    """Every product in the input's own precision."""

    @property
    def plan(self) -> Plan:
        return UNQUANTIZED


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, from the amax of earlier steps.

    fp8_format  "hybrid" (e4m3, gradients e5m2) or "e4m3"
    margin      the scale is amax / largest value * 2^margin
    amax_history_len   steps that are remembered
    amax_compute_algo  "max" of the history, "most_recent", or a function of the history float32 [amax_history_len, tensors], row
                0 the newest, that returns one amax per tensor
    scaling_factor_compute_algo  None, or a function (amax, scale, largest, recipe) -> scale of float32 tensors [tensors]. Here value
                = code * scale: this is the reciprocal of what Transformer Engine calls the scaling factor
    reduce_amax take the largest amax of autocast's amax_reduction_group (default: all ranks), where torch.distributed is set up
    fast_accum  of fprop

    At the first training forward of an autocast region (nested ones count with the outermost) a module turns the amax that
    the last step recorded into scales: amax over the history, history rotated by -1 along the steps, its row 0 zeroed; scale
    and history stay where the last step recorded nothing, and the scale where amax is not finite. The rule is that of
    transformer_engine/common/recipe/delayed_scaling.cu; Transformer Engine runs it when the region and the backward pass
    end, so the scales that a step uses are equal where a backward pass follows each forward pass; docs/recipes.md says what else
    happens.
    """

    fp8_format: str = HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fast_accum: bool = False

    def __post_init__(self) -> None:
        _choose("fp8_format", self.fp8_format, (E4M3, HYBRID))
        if not callable(self.amax_compute_algo):
            _choose("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        for name, least in (("amax_history_len", 1), ("margin", None)):
            value = getattr(self, name)
            if not isinstance(value, int) or (least is not None and value < least):
                raise ValueError(
                    f"{name} is {value!r}; it must be an integer" + ("" if least is None else f" of at least {least}")
                )

    @property
    def plan(self) -> Plan:
        forward, grad = "fp8_e4m3", f"fp8_{_grad_element(self.fp8_format)}"
        rescale = self.scaling_factor_compute_algo
        return Plan(
            forward, forward, forward, forward, grad, grad, fast_accum=self.fast_accum, delayed=True, margin=self.margin,
            history=self.amax_history_len, algo=self.amax_compute_algo, rescale=None if rescale is None else (rescale, self),
        ).check()  # fmt: skip

    @property
    def reduces_amax(self) -> bool:
        return self.reduce_amax


@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """FP8 with one scale per tensor, from the tensor itself.

    fp8_format  "hybrid" (e4m3, gradients e5m2) or "e4m3"
    scale       "fp32", or "pow2": the power of two above that
    backward    "quantized", or "high_precision": dgrad and wgrad in the input's precision
    fast_accum  of fprop
    """

    fp8_format: str = HYBRID
    scale: str = "fp32"
    backward: str = "quantized"
    fast_accum: bool = False

    def __post_init__(self) -> None:
        _choose("fp8_format", self.fp8_format, (E4M3, HYBRID))
        _choose("scale", self.scale, BLOCK_RULES)
        _choose("backward", self.backward, ("quantized", "high_precision"))

    @property
    def plan(self) -> Plan:
        forward, grad = "fp8_e4m3", f"fp8_{_grad_element(self.fp8_format)}"
        plan = Plan(
            forward, forward, forward, forward, grad, grad, block_rule=self.scale, fast_accum=self.fast_accum
        )  # fmt: skip
        return _high_precision(plan, self.backward)


@dataclass(frozen=True)
class BlockScaling(Recipe):
    """FP8 with a scale per 128 elements of inputs and gradients and per 128 x 128 of weights.

    fp8_format  "e4m3", or "hybrid": gradients e5m2
    scale       "pow2" or "fp32"
    weight_block  "128x128" or "1x128"
    backward    "quantized", or "high_precision": dgrad and wgrad in the input's precision
    """

    fp8_format: str = E4M3
    scale: str = "pow2"
    weight_block: str = "128x128"
    backward: str = "quantized"

    def __post_init__(self) -> None:
        _choose("fp8_format", self.fp8_format, (E4M3, HYBRID))
        _choose("scale", self.scale, BLOCK_RULES)
        _choose("weight_block", self.weight_block, ("128x128", "1x128"))
        _choose("backward", self.backward, ("quantized", "high_precision"))

    @property
    def plan(self) -> Plan:
        weight = f"fp8_{self.weight_block}"
        grad = "fp8_1x128" + ("_e5m2" if self.fp8_format == HYBRID else "")
        plan = Plan("fp8_1x128", "fp8_1x128", weight, weight, grad, grad, block_rule=self.scale)
        return _high_precision(plan, self.backward)


@dataclass(frozen=True)
class MXFP8(Recipe):
    """MXFP8: power-of-two scales of 32 elements along the reduction.

    fp8_format  "e4m3", or "hybrid": gradients e5m2
    scale_rule  "ceil" (nothing saturates) or "floor" (OCP MX v1.0, 6.3), with which pretraining may diverge (arXiv 2506.08027)
    backward    "quantized", or "high_precision": dgrad and wgrad in the input's precision
    """

    fp8_format: str = E4M3
    scale_rule: str = MX_RULES[1]
    backward: str = "quantized"

    def __post_init__(self) -> None:
        _choose("fp8_format", self.fp8_format, (E4M3, HYBRID))
        _choose("scale_rule", self.scale_rule, MX_RULES)
        _choose("backward", self.backward, ("quantized", "high_precision"))

    @property
    def plan(self) -> Plan:
        forward, grad = "mxfp8_e4m3", f"mxfp8_{_grad_element(self.fp8_format)}"
        plan = Plan(forward, forward, forward, forward, grad, grad, mx_rule=self.scale_rule)
        return _high_precision(plan, self.backward)


@dataclass(frozen=True)
class MXFP4(Recipe):
    """MXFP4 forward: e2m1 codes, power-of-two scales of 32 elements along the reduction.

    backward    "mxfp8" (e4m3 operands of dgrad and wgrad, from the same high-precision tensors), "mxfp4", or "high_precision"
    scale_rule  "floor" (OCP MX v1.0, 6.3) or "ceil" (nothing saturates)
    stochastic_rounding   with backward="mxfp4": gradients are rounded up or down at random, so that their mean is right; to
                nearest they are biased. Their scales then round up, whatever scale_rule says: saturated values would be biased
    hadamard    with backward="mxfp4": the operands of wgrad go through a random Hadamard transform of 16 neighbouring tokens, which
                spreads outliers and leaves the product as it is. Where the number of tokens is no multiple of 16, and in
                GroupedLinear, whose groups have any number of tokens, it is left out
    """

    backward: str = "mxfp8"
    scale_rule: str = MX_RULES[0]
    stochastic_rounding: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        _choose("backward", self.backward, BACKWARDS)
        _choose("scale_rule", self.scale_rule, MX_RULES)
        for name in ("stochastic_rounding", "hadamard"):
            _choose(name, getattr(self, name), (False, True))
            if getattr(self, name) and self.backward != "mxfp4":
                raise ValueError(f"{name}=True with backward={self.backward!r}: it is for gradients in mxfp4")

    @property
    def plan(self) -> Plan:
        other = {"mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4", "high_precision": None}[self.backward]
        plan = Plan("mxfp4", other, "mxfp4", other, other, other, mx_rule=self.scale_rule)
        return plan._replace(stochastic=self.stochastic_rounding, hadamard=self.hadamard).check()


def _high_precision(plan: Plan, backward: str) -> Plan:
    if backward == "high_precision":
        plan = plan._replace(x_t=None, w_t=None, g=None, g_t=None)
    return plan.check()
