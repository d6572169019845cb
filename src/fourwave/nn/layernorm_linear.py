"""fw.nn.LayerNormLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fourwave.nn.function import check_input, compute_dtype
from fourwave.nn.linear import LinearBase, made_parameter, reset_linear
from fourwave.nn.norm import check_normalization, norm, reset_norm
from fourwave.recipes import Recipe

Tensor = torch.Tensor


class LayerNormLinear(LinearBase):
    """y = norm(x) @ weight.T + bias.

    normalization  "LayerNorm" or "RMSNorm" (which has no bias of its own); over the last dimension, in float32
    zero_centered_gamma  the norm multiplies with 1 + layer_norm_weight, which starts at 0
    return_layernorm_output  return norm(x), too
    The rest as in `Linear`. Parameters: layer_norm_weight, layer_norm_bias, weight, bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        return_bias: bool = False,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(recipe, fuse_wgrad_accumulation, delay_wgrad_compute)
        check_normalization(normalization)
        self.in_features, self.out_features = in_features, out_features
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output, self.return_bias = return_layernorm_output, return_bias
        self.init_method = init_method
        self.layer_norm_weight = made_parameter((in_features,), device, params_dtype)
        self.weight = made_parameter((out_features, in_features), device, params_dtype)
        for name, size, wanted in (
            ("layer_norm_bias", in_features, normalization == "LayerNorm"),
            ("bias", out_features, bias),
        ):
            self.register_parameter(name, made_parameter((size,), device, params_dtype) if wanted else None)
        self.reset_parameters()
        self._prepare_default()

    layer_norm_bias: nn.Parameter | None
    bias: nn.Parameter | None

    def _initialize(self) -> None:
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        reset_linear(self.weight, self.bias, self.init_method)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """x [..., in_features] -> [..., out_features], then the bias with return_bias, then norm(x) with
        return_layernorm_output. is_first_microbatch: see Linear.forward."""
        check_features(x, self.in_features)
        step = self._begin(x.device)
        normal = norm(
            x, self.layer_norm_weight, self.layer_norm_bias, normalization=self.normalization, eps=self.eps,
            zero_centered=self.zero_centered_gamma, dtype=compute_dtype(x),
        )  # fmt: skip
        bias = None if self.return_bias else self.bias
        y = self._product(normal, "weight", bias, step, is_first_microbatch=is_first_microbatch, later=self._later())
        results = [y, *[self.bias] * self.return_bias, *[normal] * self.return_layernorm_output]
        return results[0] if len(results) == 1 else tuple(results)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"normalization={self.normalization!r}, eps={self.eps}{self._repr_of_weights()}"
        )


def check_features(x: Tensor, features: int) -> None:
    check_input(x)
    if x.dim() == 0 or x.shape[-1] != features:
        raise ValueError(f"x is {tuple(x.shape)}; its last dimension must be {features}")
