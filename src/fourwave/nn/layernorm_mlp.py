"""fw.nn.LayerNormMLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fourwave.nn.base import _SLOTS_PER_LINEAR
from fourwave.nn.function import compute_dtype
from fourwave.nn.layernorm_linear import check_features
from fourwave.nn.linear import LinearBase, made_parameter, reset_linear
from fourwave.nn.norm import check_normalization, norm, reset_norm
from fourwave.recipes import Recipe

Tensor = torch.Tensor

# In the epilogue of fc1, from its float32 sums.
_FUSED = ("relu", "gelu", "gelu_tanh", "silu", "swiglu")


def _geglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _geglu_tanh(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _reglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return F.relu(gate) * up


def _glu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, dim=-1)
    return torch.sigmoid(gate) * up


# Computed by PyTorch between the two products.
_SEPARATE: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": _geglu, "geglu_tanh": _geglu_tanh, "reglu": _reglu, "glu": _glu,
}  # fmt: skip
_GATED = ("swiglu", *_SEPARATE)
MLP_ACTIVATIONS = (*_FUSED, *_SEPARATE)


class LayerNormMLP(LinearBase):
    """y = act(norm(x) @ fc1_weight.T + fc1_bias) @ fc2_weight.T + fc2_bias.

    activation  "gelu" (erf), "gelu_tanh", "relu", "silu"; or gated, "swiglu", "geglu", "geglu_tanh", "reglu", "glu": fc1 then has
                2 * ffn_hidden_size outputs, and act(z) = f(z[:, :ffn]) * z[:, ffn:]. The first four and "swiglu" are applied to the
                float32 sums of fc1, the others to its rounded output
    init_method, output_layer_init_method  fill fc1_weight and fc2_weight in place
    return_bias  do not add fc2_bias but return it
    The rest as in `LayerNormLinear`. Parameters: layer_norm_weight, layer_norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias.
    """

    linears = 2
    _weights = ("fc1_weight", "fc2_weight")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        bias: bool = True,
        *,
        activation: str = "gelu",
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(recipe, fuse_wgrad_accumulation, delay_wgrad_compute)
        check_normalization(normalization)
        if activation not in MLP_ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; it must be {', '.join(MLP_ACTIVATIONS)}")
        self.hidden_size, self.ffn_hidden_size, self.activation = hidden_size, ffn_hidden_size, activation
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output, self.return_bias = return_layernorm_output, return_bias
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        fc1 = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.layer_norm_weight = made_parameter((hidden_size,), device, params_dtype)
        self.fc1_weight = made_parameter((fc1, hidden_size), device, params_dtype)
        self.fc2_weight = made_parameter((hidden_size, ffn_hidden_size), device, params_dtype)
        for name, size, wanted in (
            ("layer_norm_bias", hidden_size, normalization == "LayerNorm"),
            ("fc1_bias", fc1, bias),
            ("fc2_bias", hidden_size, bias),
        ):
            self.register_parameter(name, made_parameter((size,), device, params_dtype) if wanted else None)
        self.reset_parameters()
        self._prepare_default()

    layer_norm_bias: nn.Parameter | None
    fc1_bias: nn.Parameter | None
    fc2_bias: nn.Parameter | None

    def _initialize(self) -> None:
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        reset_linear(self.fc1_weight, self.fc1_bias, self.init_method)
        reset_linear(self.fc2_weight, self.fc2_bias, self.output_layer_init_method)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """x [..., hidden_size] -> [..., hidden_size], then fc2_bias with return_bias, then norm(x) with
        return_layernorm_output. is_first_microbatch: see Linear.forward."""
        check_features(x, self.hidden_size)
        step, later = self._begin(x.device), self._later()
        normal = norm(
            x, self.layer_norm_weight, self.layer_norm_bias, normalization=self.normalization, eps=self.eps,
            zero_centered=self.zero_centered_gamma, dtype=compute_dtype(x),
        )  # fmt: skip
        separate = _SEPARATE.get(self.activation)
        h = self._product(
            normal, "fc1_weight", self.fc1_bias, step, is_first_microbatch=is_first_microbatch,
            later=later, activation=self.activation if separate is None else None,
        )  # fmt: skip
        if separate is not None:
            h = separate(h)
        bias = None if self.return_bias else self.fc2_bias
        y = self._product(
            h, "fc2_weight", bias, step, is_first_microbatch=is_first_microbatch, later=later, slot=_SLOTS_PER_LINEAR
        )  # fmt: skip
        results = [y, *[self.fc2_bias] * self.return_bias, *[normal] * self.return_layernorm_output]
        return results[0] if len(results) == 1 else tuple(results)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.fc1_bias is not None}, "
            f"activation={self.activation!r}, normalization={self.normalization!r}, eps={self.eps}"
            f"{self._repr_of_weights()}"
        )
