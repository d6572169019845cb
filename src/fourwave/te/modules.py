"""Modules with Transformer Engine's arguments, in its order. They are fourwave.nn's, with its initial values and its names of
activations.

One rank has the whole of a weight. What asks for the parts of several does nothing here where it does nothing there, with a
tensor-parallel size of 1: parallel_mode, sequence_parallel, set_parallel_mode, ub_* and symmetric_ar_type. Streams of random
numbers (get_rng_state_tracker, rng_tracker_name), names, sizes that are only hints (seq_length, micro_batch_size) and
save_original_input, which keeps other bytes for the same numbers, change nothing.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fourwave import nn as fnn
from fourwave.nn import parts
from fourwave.nn.function import check_input, compute_dtype
from fourwave.nn.linear import _backward, reset_linear
from fourwave.nn.norm import norm, reset_norm
from fourwave.nn.products import shaped
from fourwave.te.padding import Fp8Padding as Fp8Padding
from fourwave.te.padding import Fp8Unpadding as Fp8Unpadding

Tensor = torch.Tensor
Init = Callable[[Tensor], Any] | None

_PARALLEL_MODES = (None, "column", "row")


def normal_init(weight: Tensor) -> None:
    """Transformer Engine's initial values: normal, deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class _Module(fnn.QuantizedModule):
    """What scripts ask of Transformer Engine's modules besides arguments."""

    delay_wgrad_compute: bool
    _under_construction = True

    def _set_up(self, bias: bool, return_bias: bool, tp_group: Any, tp_size: int, parallel_mode: Any = None) -> None:
        """Called after the constructor of fourwave.nn's module."""
        if parallel_mode not in _PARALLEL_MODES:
            raise ValueError(f"parallel_mode is {parallel_mode!r}; it must be None, 'column' or 'row'")
        _one_rank(type(self).__name__, tp_group, tp_size)
        self._under_construction = False
        self.use_bias, self.apply_bias = bias, bias and not return_bias
        self.tp_group, self.tp_size, self.parallel_mode, self.sequence_parallel = tp_group, 1, parallel_mode, False
        self._after_wgrad: list[Callable[[], Any]] = []
        if self.delay_wgrad_compute:
            for parameter in self.parameters(recurse=False):
                parameter.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        _one_rank(type(self).__name__, tp_group, 1)
        self.tp_group = tp_group

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Parameters on the meta device get memory first, on the GPU where there is one."""
        if defer_init:
            return
        if not self._under_construction and any(p.is_meta for p in self.parameters(recurse=False)):
            self.to_empty(device=_device(None) or "cpu", recurse=False)
        super().reset_parameters()  # type: ignore[misc]

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing: the state of delayed scaling is made when it is first needed."""

    def need_backward_dw(self) -> bool:
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """`backward_dw` calls them after the gradients of weights are there."""
        self._after_wgrad.append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Of one backward pass, the earliest that waits."""
        if not self.need_backward_dw():
            return
        waiting: Any = self._delayed
        if not waiting and any(weight.requires_grad for weight in self.parameters(recurse=False) if weight.dim() > 1):
            raise RuntimeError(
                "backward_dw: no backward pass waits for its weight gradients; each call computes those of one"
            )
        self._run_delayed(1)  # type: ignore[operator]
        for hook in self._after_wgrad:
            hook()


TransformerEngineBaseModule = _Module  # of scripts that ask what a module is


def _one_rank(module: str, tp_group: Any, tp_size: int) -> None:
    if tp_group is not None:
        tp_size = torch.distributed.get_world_size(tp_group)
    if tp_size != 1:
        raise NotImplementedError(
            f"{module} on {tp_size} tensor-parallel ranks: a module has the whole weight here (tp_size=1); FSDP2 shards parameters"
        )


def _quantized_ends(module: torch.nn.Module, fp8_output: bool | None, fp8_grad: bool | None) -> None:
    for name, value in (("fp8_output", fp8_output), ("fp8_grad", fp8_grad)):
        if value:
            raise NotImplementedError(
                f"{type(module).__name__}.forward({name}=True): outputs and gradients are not quantized"
            )


def _with_bias(module: Any, results: Any, bias: Tensor | None, inp: Tensor) -> Any:
    """With return_bias: the bias in the type of the activations, empty where there is none."""
    if not module.return_bias:
        return results
    y, _, *rest = results
    dtype = compute_dtype(inp)
    return (y, inp.new_empty(0, dtype=dtype) if bias is None else bias.to(dtype), *rest)


class Linear(_Module, fnn.Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        _whole("Linear", parameters_split)
        super().__init__(
            in_features, out_features, bias, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self._set_up(bias, return_bias, tp_group, tp_size, parallel_mode)

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        _quantized_ends(self, fp8_output, fp8_grad)
        return _with_bias(self, super().forward(inp, is_first_microbatch), self.bias, inp)


def _whole(module: str, parameters_split: Any) -> None:
    if parameters_split is not None:
        raise NotImplementedError(f"{module}(parameters_split={parameters_split!r}): the weight is one parameter here")


class LayerNormLinear(_Module, fnn.LayerNormLinear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Init = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        _whole("LayerNormLinear", parameters_split)
        super().__init__(
            in_features, out_features, bias, eps=eps, normalization=normalization, zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self._set_up(bias, return_bias, tp_group, tp_size, parallel_mode)

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        _quantized_ends(self, fp8_output, fp8_grad)
        return _with_bias(self, super().forward(inp, is_first_microbatch), self.bias, inp)


# Transformer Engine's gelu is the tanh form.
_ACTIVATIONS = {
    "gelu": "gelu_tanh", "geglu": "geglu_tanh", "relu": "relu", "reglu": "reglu", "silu": "silu", "swiglu": "swiglu",
    "glu": "glu",
}  # fmt: skip


class LayerNormMLP(_Module, fnn.LayerNormMLP):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Init = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Init = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise NotImplementedError(f"activation={activation!r}: {', '.join(_ACTIVATIONS)} are here")
        if activation_params:
            raise NotImplementedError(f"activation_params={activation_params!r}: the activations here take none")
        super().__init__(
            hidden_size, ffn_hidden_size, bias, activation=_ACTIVATIONS[activation], eps=eps, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma, return_layernorm_output=return_layernorm_output,
            params_dtype=params_dtype, device=_device(device), init_method=init_method or normal_init,
            output_layer_init_method=output_layer_init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.checkpoint = checkpoint
        self._set_up(bias, return_bias, tp_group, tp_size)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        if self.checkpoint and torch.is_grad_enabled():
            results = fnn.checkpoint(super().forward, inp, is_first_microbatch)
        else:
            results = super().forward(inp, is_first_microbatch)
        return _with_bias(self, results, self.fc2_bias, inp)


class GroupedLinear(_Module, fnn.GroupedLinear):
    """Parameters weight0, weight1, ... and bias0, bias1, ..., slices of one tensor, which `weight` and `bias` give as a whole."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Init = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        if num_gemms < 1:
            raise ValueError(f"num_gemms is {num_gemms}; it must be at least 1")
        for argument, given in (
            ("single_grouped_weight", single_grouped_weight),
            ("single_grouped_bias", single_grouped_bias),
        ):
            if given:
                raise NotImplementedError(
                    f"GroupedLinear({argument}=True): each of the {num_gemms} experts has parameters of its own here, slices of one tensor"
                )
        super().__init__(
            num_gemms, in_features, out_features, bias, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.num_gemms, self.return_bias = num_gemms, return_bias
        wholes = {name: self._parameters.pop(name) for name in ("weight", "bias")}
        for g in range(num_gemms):
            for name in wholes:
                self.register_parameter(f"{name}{g}", None)
        for name, whole in wholes.items():
            if whole is not None:
                for g, part in enumerate(parts.split(whole)):
                    self.register_parameter(f"{name}{g}", part)
        self._set_up(bias, return_bias, tp_group, tp_size, parallel_mode)

    def _parts(self, name: str) -> list[torch.nn.Parameter]:
        """weight0, weight1, ... or bias0, bias1, ...; none where there are no such parameters."""
        found = [getattr(self, f"{name}{g}") for g in range(self.num_gemms)]
        return [part for part in found if part is not None]

    def _whole(self, name: str) -> Any:
        if name in self._parameters:  # in the constructor
            return self._parameters[name]
        if "num_gemms" not in self.__dict__:
            raise AttributeError(name)
        found = self._parts(name)
        return parts.joined(found, self.fuse_wgrad_accumulation and name == "weight") if found else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and isinstance(value, Tensor) and "num_gemms" in self.__dict__:
            raise AttributeError(
                f"{name} is read only: set {name}0, {name}1, ..., or load_state_dict({{{name!r}: ...}})"
            )
        super().__setattr__(name, value)

    @property  # type: ignore[override]
    def weight(self) -> Any:
        """[num_gemms, out_features, in_features]: to read. Writes reach the parameters only where they lie together."""
        return self._whole("weight")

    @weight.setter
    def weight(self, value: Any) -> None:
        """store_quantized takes the parameters away."""
        assert value is None
        for g in range(self.num_gemms):
            setattr(self, f"weight{g}", None)

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """[num_gemms, out_features], None with return_bias: what is added."""
        return None if self.__dict__.get("return_bias") else self._whole("bias")

    def _initialize(self) -> None:
        if "num_gemms" not in self.__dict__:
            super()._initialize()
            return
        biases = self._parts("bias")
        for g, weight in enumerate(self._parts("weight")):
            reset_linear(weight, biases[g] if biases else None, self.init_method)

    def _main_grad(self, name: str, is_first_microbatch: bool | None) -> tuple[Callable[[], Any], bool]:
        """Of all parts: main_grad is one tensor where theirs lie together."""
        weights: list[Any] = self._parts(name)
        trained = [g for g, weight in enumerate(weights) if weight.requires_grad]
        overwrite = {
            bool(is_first_microbatch) or bool(getattr(weights[g], "overwrite_main_grad", False)) for g in trained
        }

        def find() -> Any:
            missing = [f"{name}{g}" for g in trained if getattr(weights[g], "main_grad", None) is None]
            if missing:
                raise ValueError(
                    f"fuse_wgrad_accumulation=True and {', '.join(missing)} has no main_grad: give it a tensor of its shape, float32 say"
                )
            if len(overwrite) > 1:
                raise ValueError(f"overwrite_main_grad is set of some of {name}0, {name}1, ... only")
            grads: list[Any] = [weight.main_grad if g in trained else None for g, weight in enumerate(weights)]
            whole = len(trained) == len(weights) and parts.lie_together(grads)
            return parts.view(grads) if whole else parts.MainGrads(grads)

        return find, any(overwrite)

    def _add_grad(self, weight: Tensor, grad: Tensor) -> None:
        _backward(parts.of(weight), grad.unbind(0), self._parts("weight"))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        together = self._together()
        super()._apply(fn, recurse)
        for name in together:
            self._lay_together(name)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for name in self._together():
            new._lay_together(name)
        return new

    def _together(self) -> list[str]:
        return [name for name in ("weight", "bias") if (found := self._parts(name)) and parts.lie_together(found)]

    def _lay_together(self, name: str) -> None:
        found = self._parts(name)
        if found and parts.alike(found) and not parts.lie_together(found):
            parts.lay_together(found)

    def forward(  # type: ignore[override]
        self,
        inp: Tensor,
        m_splits: Tensor | Iterable[int],
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        """m_splits: a list is copied to the device; int32 and int64 tensors there are taken as they are. With return_bias the list of
        biases is returned, too, and not added."""
        for name, given in (("out", out), ("dgrad_out", dgrad_out)):
            if given is not None:
                raise NotImplementedError(f"GroupedLinear.forward({name}=...): results are new tensors here")
        sizes = m_splits if isinstance(m_splits, Tensor) else _sizes(m_splits, inp)
        rows = inp.reshape(-1, inp.shape[-1]) if inp.numel() else inp.reshape(0, inp.shape[-1])
        # A list's sum was checked.
        y = super().forward(
            rows, sizes.to(inp.device, non_blocking=True), is_first_microbatch, all_rows=sizes is not m_splits
        )
        y = shaped(y, *inp.shape[:-1], y.shape[-1])
        if not self.return_bias:
            return y
        dtype = compute_dtype(inp)
        biases = [bias.to(dtype) for bias in self._parts("bias")]
        return y, biases or [inp.new_empty(0, dtype=dtype) for _ in range(self.num_gemms)]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes `weight` and `bias` of all experts, too."""
        for name in ("weight", "bias"):
            whole, names = prefix + name, [f"{prefix}{name}{g}" for g in range(self.num_gemms)]
            if whole in state_dict and self._parts(name) and not any(each in state_dict for each in names):
                if len(state_dict[whole]) == self.num_gemms:
                    state_dict.update(zip(names, state_dict.pop(whole).unbind(0), strict=True))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _sizes(m_splits: Iterable[int], inp: Tensor) -> Tensor:
    """m_splits on the host, integers of Python or NumPy, as int64."""
    total = inp.numel() // inp.shape[-1] if inp.numel() else 0
    given = list(m_splits)
    try:
        sizes = [operator.index(size) for size in given]
    except TypeError:
        sizes = [-1]
    if any(size < 0 for size in sizes) or sum(sizes) != total:
        raise ValueError(f"m_splits is {given}; it must be integers from 0 on that sum to the {total} rows of inp")
    return torch.tensor(sizes, dtype=torch.int64)


class _Norm(torch.nn.Module):
    normalization = ""
    bias: Tensor | None

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        """sm_margin, of Transformer Engine's kernels, changes nothing. sequence_parallel is kept, in the parameters, too."""
        super().__init__()
        kind = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(f"{kind}: give normalized_shape, or hidden_size, its old name")
        if dtype is not None and params_dtype is not None:
            raise ValueError(f"{kind}: dtype={dtype} and params_dtype={params_dtype}, its old name: give one")
        if hidden_size is not None:
            warnings.warn(f"{kind}: hidden_size is now called normalized_shape", DeprecationWarning, stacklevel=2)
            normalized_shape = hidden_size
        assert normalized_shape is not None
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps, self.zero_centered_gamma = shape, eps, zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        dtype = dtype or params_dtype
        self.weight = torch.nn.Parameter(torch.empty(shape, device=_device(device), dtype=dtype))
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.empty(shape, device=_device(device), dtype=dtype))
        else:
            self.bias = None
        self._fill()

    def _fill(self) -> None:
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)
        if self.sequence_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Parameters on the meta device get memory first, on the GPU where there is one."""
        if defer_init:
            return
        if self.weight.is_meta:
            self.to_empty(device=_device(None) or "cpu", recurse=False)
        self._fill()

    def forward(self, input: Tensor) -> Tensor:
        check_input(input, "input")
        inner = len(self.normalized_shape)
        if input.shape[max(input.dim() - inner, 0) :] != self.normalized_shape:
            raise ValueError(f"input is {tuple(input.shape)}; its last dimensions must be {self.normalized_shape}")
        y = norm(
            input.flatten(-inner) if inner > 1 else input, self.weight.flatten(),
            None if self.bias is None else self.bias.flatten(), normalization=self.normalization, eps=self.eps,
            zero_centered=self.zero_centered_gamma, dtype=compute_dtype(input),
        )  # fmt: skip
        return shaped(y, *input.shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "_extra_state", None)  # Transformer Engine's: norms have nothing to keep there
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    normalization = "LayerNorm"


class RMSNorm(_Norm):
    normalization = "RMSNorm"


def _device(device: Any) -> Any:
    """Transformer Engine's default is the GPU; without one, the CPU."""
    if device is not None:
        return device
    return "cuda" if torch.cuda.is_available() else None
