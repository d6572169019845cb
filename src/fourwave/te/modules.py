"""Modules with Transformer Engine's arguments. They are fourwave.nn's, with its initial values and its names of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fourwave import nn as fnn
from fourwave.nn.function import compute_dtype
from fourwave.nn.norm import norm, reset_norm

Tensor = torch.Tensor

# Arguments that may only have these values.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False, None), "tp_group": (None,), "tp_size": (1,), "parallel_mode": (None,),
    "set_parallel_mode": (False,), "parameters_split": (None,), "ub_overlap_ag": (False,), "ub_overlap_rs": (False,),
    "ub_overlap_rs_dgrad": (False,), "ub_bulk_dgrad": (False,), "ub_bulk_wgrad": (False,), "symmetric_ar_type": (None,),
    "save_original_input": (False,), "return_layernorm_output_gathered": (False,), "activation_params": (None,),
    "single_grouped_weight": (False,), "single_grouped_bias": (False,),
}  # fmt: skip
# What says nothing about the result.
_IGNORED = (
    "get_rng_state_tracker", "rng_tracker_name", "ub_name", "name", "seq_length", "micro_batch_size", "use_grouped_tensor",
)  # fmt: skip


def _others(module: str, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _IGNORED:
            continue
        if name not in _REFUSED:
            raise TypeError(f"{module} has no argument {name!r}")
        if value not in _REFUSED[name]:
            raise NotImplementedError(f"{module}({name}={value!r}): only {_REFUSED[name][0]!r} is here")


def normal_init(weight: Tensor) -> None:
    """Transformer Engine's initial values: normal, deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class Linear(fnn.Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        **kwargs: Any,
    ) -> None:
        _others("Linear", kwargs)
        super().__init__(
            in_features, out_features, bias, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip


class LayerNormLinear(fnn.LayerNormLinear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        **kwargs: Any,
    ) -> None:
        _others("LayerNormLinear", kwargs)
        super().__init__(
            in_features, out_features, bias, eps=eps, normalization=normalization, zero_centered_gamma=zero_centered_gamma,
            return_layernorm_output=return_layernorm_output, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip


# Transformer Engine's gelu is the tanh form.
_ACTIVATIONS = {
    "gelu": "gelu_tanh", "geglu": "geglu_tanh", "relu": "relu", "reglu": "reglu", "silu": "silu", "swiglu": "swiglu",
    "glu": "glu",
}  # fmt: skip


class LayerNormMLP(fnn.LayerNormMLP):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        _others("LayerNormMLP", kwargs)
        if activation not in _ACTIVATIONS:
            raise NotImplementedError(f"activation={activation!r}: {', '.join(_ACTIVATIONS)} are here")
        super().__init__(
            hidden_size, ffn_hidden_size, bias, activation=_ACTIVATIONS[activation], eps=eps, normalization=normalization,
            zero_centered_gamma=zero_centered_gamma, return_layernorm_output=return_layernorm_output,
            params_dtype=params_dtype, device=_device(device), init_method=init_method or normal_init,
            output_layer_init_method=output_layer_init_method or normal_init, return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation, delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.checkpoint = checkpoint

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.checkpoint and torch.is_grad_enabled():
            return fnn.checkpoint(super().forward, x, is_first_microbatch)
        return super().forward(x, is_first_microbatch)


class GroupedLinear(fnn.GroupedLinear):
    """One parameter [num_gemms, out_features, in_features]; state_dict has weight0, weight1, ... and loads them."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool = False,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        delay_wgrad_compute: bool = False,
        **kwargs: Any,
    ) -> None:
        _others("GroupedLinear", kwargs)
        if return_bias:
            raise NotImplementedError("GroupedLinear(return_bias=True): only False is here")
        super().__init__(
            num_gemms, in_features, out_features, bias, params_dtype=params_dtype, device=_device(device),
            init_method=init_method or normal_init, fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )  # fmt: skip
        self.num_gemms = num_gemms

    def forward(
        self, inp: Tensor, m_splits: Tensor | list[int], is_first_microbatch: bool | None = None
    ) -> Tensor:  # fmt: skip
        """m_splits: a list is copied to the device; int32 and int64 tensors there are taken as they are."""
        if not isinstance(m_splits, Tensor):
            total = inp.numel() // inp.shape[-1] if inp.numel() else 0
            if any(type(size) is not int or size < 0 for size in m_splits) or sum(m_splits) != total:
                raise ValueError(
                    f"m_splits is {m_splits}; it must be integers from 0 on that sum to the {total} rows of inp"
                )
            m_splits = torch.tensor(m_splits, dtype=torch.int64)
        rows = inp.reshape(-1, inp.shape[-1]) if inp.numel() else inp.reshape(0, inp.shape[-1])
        y = super().forward(rows, m_splits.to(inp.device, non_blocking=True), is_first_microbatch)
        return y.view(*inp.shape[:-1], y.shape[-1])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "bias"):
            whole = destination.pop(prefix + name, None)
            if whole is not None:
                destination.update({f"{prefix}{name}{g}": part for g, part in enumerate(whole.unbind(0))})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            parts = [f"{prefix}{name}{g}" for g in range(self.num_gemms)]
            if all(part in state_dict for part in parts):
                state_dict[prefix + name] = torch.stack([state_dict.pop(part) for part in parts])
        super()._load_from_state_dict(state_dict, prefix, *args)


class _Norm(torch.nn.Module):
    normalization = ""

    def __init__(
        self,
        normalized_shape: Iterable[int] | int,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _others(type(self).__name__, kwargs)
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if len(shape) != 1:
            raise NotImplementedError(f"normalized_shape={shape}: the last dimension only is normalized here")
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        dtype = dtype or params_dtype
        self.weight = torch.nn.Parameter(torch.empty(shape, device=_device(device), dtype=dtype))
        if self.normalization == "LayerNorm":
            self.bias: Tensor | None = torch.nn.Parameter(torch.empty(shape, device=_device(device), dtype=dtype))
        else:
            self.bias = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_norm(self.weight, self.bias, self.zero_centered_gamma)

    def forward(self, x: Tensor) -> Tensor:
        return norm(
            x, self.weight, self.bias, normalization=self.normalization, eps=self.eps, zero_centered=self.zero_centered_gamma,
            dtype=compute_dtype(x),
        )  # fmt: skip


class LayerNorm(_Norm):
    normalization = "LayerNorm"


class RMSNorm(_Norm):
    normalization = "RMSNorm"


def _device(device: Any) -> Any:
    """Transformer Engine's default is the GPU; without one, the CPU."""
    if device is not None:
        return device
    return "cuda" if torch.cuda.is_available() else None
