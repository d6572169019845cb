"""fw.nn.Linear."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fourwave.nn.base import QuantizedModule, Step
from fourwave.nn.function import Later, Pass, check_input, compute_dtype, linear, quantize_weight
from fourwave.nn.products import Packed, Pair, pack, pair, unpack
from fourwave.nn.weights import WeightCache
from fourwave.quantize import QuantizedTensor
from fourwave.quantize.tensor import FORMATS
from fourwave.recipes import Plan, Recipe, check_recipe

Tensor = torch.Tensor


class LinearBase(QuantizedModule):
    """What modules with one or more weights share: main_grad, delayed wgrad, kept quantized weights."""

    _weights: tuple[str, ...] = ("weight",)
    _stores_transposed: bool | None = (
        None  # columnwise codes of kept weights; None: what the device's matrix units want
    )

    def __init__(self, recipe: Recipe | None, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool) -> None:
        super().__init__(recipe)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self._stored: dict[str, StoredWeight] = {}

    def _forget(self) -> None:
        super()._forget()
        self._caches: dict[str, WeightCache] = {}
        self._delayed: list[Pass] = []  # in the order of the backward passes

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_caches"], state["_delayed"] = {}, []
        return state

    def _product(
        self,
        x: Tensor,
        name: str,
        bias: Tensor | None,
        step: Step,
        *,
        is_first_microbatch: bool | None,
        later: Later | None,
        activation: str | None = None,
        slot: int = 0,
    ) -> Tensor:
        """act(x @ weight.T + bias) with the parameter called `name`. later: of the forward pass, see `_later`."""
        weight, cached, main_grad, overwrite = self._weight(name, x, step, slot, is_first_microbatch)
        columns = self._stored[name].shape[1] if name in self._stored else weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != columns:
            raise ValueError(
                f"x is {tuple(x.shape)}; its last dimension must be {columns}, the input features of {name}"
            )
        return linear(
            x, weight, bias, step, activation=activation, slot=slot, cached=cached, main_grad=main_grad, overwrite=overwrite,
            later=later,
        )  # fmt: skip

    def _later(self) -> Later | None:
        """Called once in a forward pass: where it puts off wgrad, if it does."""
        delays = self.delay_wgrad_compute and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return Later(self._delayed) if delays else None

    def _weight(
        self, name: str, x: Tensor, step: Step, slot: int, is_first_microbatch: bool | None
    ) -> tuple[Tensor, Pair | None, Any, bool]:
        """(weight, its quantized form if there is one, main_grad, whether that is overwritten) of the parameter `name`.

        main_grad is a function that gives it, but of compiled code and of stored weights: the backward pass takes what is there by then.
        Of a weight that is stored in quantized form, the first is an empty tensor that stands for it in autograd.
        """
        if torch.compiler.is_compiling() and self.delay_wgrad_compute and torch.is_grad_enabled():
            raise NotImplementedError(
                "torch.compile with delay_wgrad_compute=True: the backward pass would keep what it leaves out"
            )
        if name in self._stored:
            stored = self._stored[name]
            main_grad = getattr(self, f"{name}_main_grad")
            if torch.compiler.is_compiling() and main_grad is not None and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"torch.compile with {name} stored with main_grad=True: compiled code trains parameters"
                )
            trains = main_grad is not None and torch.is_grad_enabled()
            stand_in = torch.empty(0, dtype=stored.dtype, device=x.device, requires_grad=trains)
            return stand_in, stored.pair(self, step.plan, compute_dtype(x)), main_grad, bool(is_first_microbatch)
        weight = getattr(self, name)
        check_input(weight, name)
        _check_packed(step.plan, name, weight, torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        if self.delay_wgrad_compute and weight.requires_grad and not weight.is_leaf and not self._parts(name):
            raise ValueError(
                f"delay_wgrad_compute=True and {name} is computed from others (torch.nn.utils.parametrize, say): its gradient could not "
                "go on to them in backward_dw"
            )
        main_grad, overwrite = None, False
        if self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled():
            main_grad, overwrite = self._main_grad(name, is_first_microbatch)
            found = main_grad()
            if torch.compiler.is_compiling():
                main_grad = found
        return weight, self._quantized(name, weight, x, step, slot, is_first_microbatch), main_grad, overwrite

    def _main_grad(self, name: str, is_first_microbatch: bool | None) -> tuple[Callable[[], Any], bool]:
        """(function that gives main_grad of the parameter that is there now, whether it is overwritten)"""
        weight = getattr(self, name)

        def find() -> Tensor:
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is None:
                raise ValueError(
                    f"fuse_wgrad_accumulation=True and {name} has no main_grad: give it a tensor of its shape, float32 say"
                )
            if (
                main_grad.shape != weight.shape
                or main_grad.device != weight.device
                or not main_grad.is_floating_point()
            ):
                raise ValueError(
                    f"main_grad is {tuple(main_grad.shape)} of {main_grad.dtype} on {main_grad.device}; {name} is {tuple(weight.shape)} "
                    f"on {weight.device}, and main_grad must be floating-point numbers of that shape there"
                )
            return main_grad

        return find, bool(is_first_microbatch) or bool(getattr(weight, "overwrite_main_grad", False))

    def _quantized(
        self, name: str, weight: Tensor, x: Tensor, step: Step, slot: int, is_first_microbatch: bool | None
    ) -> Pair | None:
        """The weight's kept quantized form, where one is asked for and the recipe has one that outlives a step."""
        plan = step.plan
        if (
            is_first_microbatch is None
            or torch.compiler.is_compiling()
            or plan.w is None
            or plan.delayed
            or step.observe
        ):
            return None
        needed = torch.is_grad_enabled() and x.requires_grad
        need_col = needed and plan.w_t is not None
        how = (plan.w, plan.w_t if need_col else None, plan.mx_rule, plan.block_rule, step.fnuz)
        cache = self._caches.setdefault(name, WeightCache())
        kept = cache.get(
            weight, how,
            lambda: quantize_weight(
                weight, plan, step, slot, need_row=True, need_col=need_col, transposed=self._stores_transposed
            ),
            refresh=bool(is_first_microbatch), parts=self._parts(name),
        )  # fmt: skip
        # dgrad in high precision multiplies the weight itself. Kept, it would be an alias of its memory, which forbids keeping.
        return kept._replace(col=weight) if needed and not need_col else kept

    def _parts(self, name: str) -> Sequence[Tensor]:
        """The parameters that the weight is joined of, if it is none itself."""
        return ()

    def store_quantized(self, recipe: Recipe, *, dgrad: bool = True, main_grad: bool = False) -> None:
        """Keep the weights in the recipe's formats only, as buffers; the parameters are gone.

        dgrad      keep what dgrad reads, too; False: forward passes only
        main_grad  have `<name>_main_grad`, float32, which wgrad adds to. An optimizer with master weights reads it and gives the
                   new values to `set_weight`. False: the weights are frozen

        Modules then run under this recipe, or unquantized from the stored values. DelayedScaling has no scale to store by.
        """
        check_recipe(recipe)
        plan = recipe.plan
        if plan.w is None or plan.delayed or (dgrad and plan.w_t is None):
            raise ValueError(
                f"{recipe}: weights are stored in the formats of CurrentScaling, BlockScaling, MXFP8 or MXFP4, for dgrad with a "
                "quantized backward pass"
            )
        for name in self._weights:
            weight = getattr(self, name)
            if weight is None:
                raise ValueError(f"{name} is stored in quantized form already")
            stored = StoredWeight(name, plan, dgrad, tuple(weight.shape), weight.dtype)
            self._stored[name] = stored
            for part, tensor in stored.quantize(weight.detach()).items():
                self.register_buffer(part, tensor)
            grad = torch.zeros_like(weight, dtype=torch.float32) if main_grad else None
            self.register_buffer(f"{name}_main_grad", grad, persistent=False)
            setattr(self, name, None)

    def set_weight(self, name: str, values: Tensor) -> None:
        """Quantize new values of a stored weight into its buffers."""
        stored = self._stored.get(name)
        if stored is None:
            raise ValueError(f"{name} is not stored in quantized form: {', '.join(self._stored) or 'no weight'} is")
        if tuple(values.shape) != stored.shape:
            raise ValueError(f"values are {tuple(values.shape)}; {name} is {stored.shape}")
        with torch.no_grad():
            for part, tensor in stored.quantize(values.detach()).items():
                getattr(self, part).copy_(tensor)

    def _uncast(self) -> list[str]:
        parts = [part for stored in self._stored.values() for part in stored.parts()]
        return [*super()._uncast(), *parts, *[f"{name}_main_grad" for name in self._stored]]

    def reset_parameters(self) -> None:
        """New initial values, and the state of delayed scaling and stochastic rounding as in a new module."""
        if self._stored:
            raise ValueError(
                f"{', '.join(self._stored)} is stored in quantized form; set_weight(name, values) gives it new values"
            )
        self._initialize()
        self._reset_state()

    def _initialize(self) -> None:
        """Initial values of the parameters."""
        raise NotImplementedError

    def _repr_of_weights(self) -> str:
        """For extra_repr: weights that are stored in quantized form, and the module's recipe."""
        parts = [f"{name} stored as {stored.plan.w}" for name, stored in self._stored.items()]
        parts += [f"recipe={self.recipe}"] if self.recipe is not None else []
        return "".join(f", {part}" for part in parts)

    def backward_dw(self) -> None:
        """Compute the weight gradients that delay_wgrad_compute put off, of all backward passes, and add them to .grad or main_grad."""
        self._run_delayed(len(self._delayed))

    def _run_delayed(self, count: int) -> None:
        """Those of the first `count` backward passes that wait."""
        waiting, self._delayed[:] = self._delayed[:count], self._delayed[count:]
        with torch.no_grad():
            for each in waiting:
                for weight, wgrad in each.products:
                    dw, _ = wgrad.run()
                    if wgrad.main_grad is None:
                        self._add_grad(weight, dw)

    def _add_grad(self, weight: Tensor, grad: Tensor) -> None:
        _backward([weight], [grad], [getattr(self, name) for name in self._weights])


def _backward(leaves: Sequence[Tensor], grads: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> None:
    """Give gradients to the parameters of a forward pass, by way of autograd: their hooks run. parameters: the module's now."""
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        raise RuntimeError(
            "backward_dw: the parameters of the forward pass are gone, for fully_shard (FSDP2) has sharded them since, and their "
            "gradients would be lost; delay_wgrad_compute and fully_shard exclude each other"
        )
    trained = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if leaf.requires_grad]
    if trained:  # frozen since: none
        torch.autograd.backward([leaf for leaf, _ in trained], [grad for _, grad in trained])


def _check_packed(plan: Plan, name: str, weight: Tensor, trains: bool) -> None:
    """Codes of 4 bits fill whole bytes of each row of x and of the weight [..., rows, columns], and of the output's gradient."""
    rows, columns = weight.shape[-2:]
    for wanted, size, what in (
        ("mxfp4" in (plan.x, plan.w), columns, "input features"),
        (trains and "mxfp4" in (plan.g, plan.g_t), rows, "output features, with gradients in mxfp4,"),
    ):
        if wanted and size % 2:
            raise ValueError(
                f"{name} is {rows} x {columns}; in mxfp4 two codes share a byte, so that its {what} must be even. "
                "fw.nn.convert(filter=...) and fw.autocast(enabled=False) leave a layer in high precision"
            )


class StoredWeight:
    """A weight that exists in quantized form only: what its buffers mean."""

    def __init__(self, name: str, plan: Plan, dgrad: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.plan, self.dgrad, self.shape, self.dtype = name, plan, dgrad, shape, dtype
        self.rows = math.prod(shape[:-1])
        # One copy serves both directions where the formats say so.
        self.separate = dgrad and not (plan.w == plan.w_t and FORMATS[plan.w or ""].one_copy)

    def parts(self) -> list[str]:
        return [f"{self.name}_{part}" for part in ("row", "row_scale", *("col", "col_scale") * self.separate)]

    def quantize(self, values: Tensor) -> dict[str, Tensor]:
        plan = self.plan
        made = pair(values, plan.w, plan.w_t, plan, need_row=True, need_col=self.separate, transposed=False)
        tensors = [*pack(made.row, "rowwise")[1], *pack(made.col, "columnwise")[1]]
        return dict(zip(self.parts(), tensors, strict=True))

    def pair(self, module: nn.Module, plan: Plan, dtype: torch.dtype) -> Pair:
        """Both operands from the module's buffers."""
        tensors = [getattr(module, part) for part in self.parts()]
        row = unpack(Packed(self.plan.w, (self.rows, self.shape[-1]), "rowwise"), tensors)
        assert isinstance(row, QuantizedTensor)
        if plan.w is None:
            values = row.dequantize(dtype).view(self.shape)
            return Pair(values, values)
        if plan.w != self.plan.w or (self.dgrad and plan.w_t not in (self.plan.w_t, None)):
            raise ValueError(
                f"{self.name} is stored as {self.plan.w} and, for dgrad, {self.plan.w_t if self.dgrad else 'not at all'}; the recipe "
                f"in force wants {plan.w} and {plan.w_t}"
            )
        if not self.dgrad:
            return Pair(row, None)
        if plan.w_t is None:
            return Pair(row, row.dequantize(dtype).view(self.shape))
        if not self.separate:
            return Pair(row, row)
        return Pair(row, unpack(Packed(self.plan.w_t, (self.rows, self.shape[-1]), "columnwise"), tensors))


def made_parameter(shape: tuple[int, ...], device: Any, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class Linear(LinearBase, nn.Linear):
    """y = x @ weight.T + bias. A torch.nn.Linear, with its parameters, initial values and state_dict: code that asks for that class
    (optimizer groups, initialisation, LoRA adapters) finds it. Code that reads .weight and multiplies by itself does not quantize.

    device, dtype of weight and bias, as in torch.nn.Linear; default torch's default dtype. params_dtype: dtype's name in the other modules
    init_method   function that fills the weight in place; default that of torch.nn.Linear
    return_bias   do not add the bias but return (y, bias)
    recipe        used where no fw.autocast is in force
    fuse_wgrad_accumulation  add the weight's gradient to weight.main_grad, in its dtype, instead of giving it to autograd. With
                  is_first_microbatch=True, or an attribute overwrite_main_grad of the weight, what main_grad held is overwritten
                  A backward pass that asks for other gradients only (`torch.autograd.grad(y, x)`) adds to it too: PyTorch does
                  not tell a function which of its gradients are used
    delay_wgrad_compute  leave wgrad to backward_dw()

    Input float32, bfloat16 or float16, [..., in_features], of any strides; the output has its dtype, or torch.autocast's. Weights
    of another dtype are converted for unquantized products and quantized from their own. Gradients have the dtypes
    of what they belong to.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        if dtype is not None and params_dtype is not None:
            raise ValueError(f"dtype={dtype} and params_dtype={params_dtype} say the same thing: give one of them")
        params_dtype = params_dtype or dtype
        super().__init__(recipe, fuse_wgrad_accumulation, delay_wgrad_compute)
        self.in_features, self.out_features = in_features, out_features
        self.return_bias, self.init_method = return_bias, init_method
        self.weight = made_parameter((out_features, in_features), device, params_dtype)
        if bias:
            self.bias: nn.Parameter | None = made_parameter((out_features,), device, params_dtype)  # type: ignore[assignment]
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._prepare_default()

    def _initialize(self) -> None:
        reset_linear(self.weight, self.bias, self.init_method)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """x [..., in_features] -> [..., out_features].

        is_first_microbatch  None: quantize the weight. True: and keep it. False: use what was kept, if the weight has not
                changed since. Ignored with DelayedScaling and by torch.compile
        """
        check_input(x)
        step = self._begin(x.device)
        bias = None if self.return_bias else self.bias
        y = self._product(x, "weight", bias, step, is_first_microbatch=is_first_microbatch, later=self._later())
        return (y, self.bias) if self.return_bias else y

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return text + self._repr_of_weights()


def reset_linear(weight: Tensor, bias: Tensor | None, init_method: Callable[[Tensor], Any] | None) -> None:
    """torch.nn.Linear's initial values, or init_method's and a bias of zeros."""
    with torch.no_grad():
        if init_method is not None:
            init_method(weight)
            if bias is not None:
                nn.init.zeros_(bias)
            return
        nn.init.kaiming_uniform_(weight, a=5**0.5)
        if bias is not None:
            bound = weight.shape[1] ** -0.5 if weight.shape[1] else 0.0
            nn.init.uniform_(bias, -bound, bound)
