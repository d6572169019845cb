"""fw.nn.MoEMLP: a mixture of experts, router included, on grouped products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from fourwave.nn.function import has_autocast
from fourwave.nn.grouped_linear import GroupedLinear
from fourwave.nn.layernorm_mlp import _GATED, _SEPARATE, MLP_ACTIVATIONS
from fourwave.nn.linear import made_parameter, reset_linear
from fourwave.nn.products import shaped
from fourwave.ops.gemm.operators import _activation_backward
from fourwave.ops.gemm.reference import activate
from fourwave.ops.moe.combine import combine
from fourwave.recipes import Recipe

Tensor = torch.Tensor


# Scores of logits, and their logarithms but for a summand that all scores of a token share.
_SCORES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (lambda logits: logits.softmax(-1), lambda logits: logits),
    "sigmoid": (torch.sigmoid, F.logsigmoid),
}


class MoEMLP(nn.Module):
    """y[t] = sum over the top_k experts e of token t of weight[t, e] * fc2[e](act(fc1[e](x[t]))).

    activation  as in `LayerNormMLP`, gated ones with 2 * ffn_hidden_size outputs of fc1; of fc1's rounded output, the first four
                and "swiglu" in float32
    scoring     of the logits x @ router_weight.T, float32: "softmax" over all experts, or "sigmoid" of each. A token goes to the
                top_k experts of the largest scores, which are its weights; normalize: divided by their sum, also where all of
                them underflow. With top_k=1 that is 1 whatever the router says, which then gets no gradient: normalize=False
    return_logits  return (y, logits), for a loss that balances the experts
    recipe, fuse_wgrad_accumulation, delay_wgrad_compute  of fc1 and fc2, see `Linear`; the router is not quantized

    Parameters: router_weight [num_experts, hidden_size]; fc1.* and fc2.* of two `GroupedLinear`.

    Every token is computed, whatever the router chooses: there is no capacity, no padding, and the host reads nothing. Tokens are
    copied to the order of their experts (top_k rows each; without gradients as codes, where no two rows share a scale), and results summed in float32 in the order of a token's choices, so
    that repeats give equal bits if the backend's products do.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        *,
        activation: str = "swiglu",
        scoring: str = "softmax",
        normalize: bool = True,
        return_logits: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        output_layer_init_method: Callable[[Tensor], Any] | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        if activation not in MLP_ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; it must be {', '.join(MLP_ACTIVATIONS)}")
        if scoring not in _SCORES:
            raise ValueError(f"scoring is {scoring!r}; it must be {' or '.join(_SCORES)}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} of {num_experts} experts; it must be between 1 and their number")
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts, self.top_k = num_experts, top_k
        self.activation, self.scoring, self.normalize = activation, scoring, normalize
        self.return_logits, self.init_method = return_logits, init_method
        shared: dict[str, Any] = {
            "params_dtype": params_dtype, "device": device, "recipe": recipe,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "delay_wgrad_compute": delay_wgrad_compute,
        }  # fmt: skip
        fc1 = ffn_hidden_size * (2 if activation in _GATED else 1)
        self.router_weight = made_parameter((num_experts, hidden_size), device, params_dtype)
        self.fc1 = GroupedLinear(num_experts, hidden_size, fc1, bias, init_method=init_method, **shared)
        self.fc2 = GroupedLinear(
            num_experts, ffn_hidden_size, hidden_size, bias, init_method=output_layer_init_method, **shared
        )
        reset_linear(self.router_weight, None, init_method)

    def reset_parameters(self) -> None:
        reset_linear(self.router_weight, None, self.init_method)
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden_size] -> experts [tokens, top_k] int64, weights [tokens, top_k] and logits [tokens, num_experts],
        float32. Equal scores: either expert."""
        kind = x.device.type
        with torch.autocast(kind, enabled=False) if has_autocast(kind) else nullcontext():
            logits = F.linear(x.float(), self.router_weight.float())
            chosen, experts = logits.topk(self.top_k, dim=-1)  # both scores grow with their logit
            scores, logarithms = _SCORES[self.scoring]
            weights = logarithms(chosen).softmax(-1) if self.normalize else scores(logits).gather(-1, experts)
        return experts, weights, logits

    def forward(
        self, x: Tensor, is_first_microbatch: bool | None = None, *, routing: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        """x [..., hidden_size] -> [..., hidden_size], or with return_logits (that, logits [..., num_experts] float32).

        is_first_microbatch  see Linear.forward
        routing   (experts [tokens, top_k] int64, each below num_experts, weights [tokens, top_k], floating point) of another router;
                  the module's is not run then, and its logits are not returned. A choice of a negative expert is dropped: it adds
                  nothing. Values are not read on the host
        """
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[-1] != self.hidden_size:
            came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {came}; its last dimension must be {self.hidden_size}, the hidden size")
        tokens = x.reshape(-1, self.hidden_size)
        logits = None
        if routing is None:
            experts, weights, logits = self.route(tokens)
        else:
            experts, weights = routing
            shape = (len(tokens), self.top_k)
            right = tuple(experts.shape) == tuple(weights.shape) == shape
            if not right or experts.dtype != torch.int64 or not weights.is_floating_point():
                raise ValueError(
                    f"routing is {tuple(experts.shape)} of {experts.dtype} and {tuple(weights.shape)} of {weights.dtype}; it must be "
                    f"experts, int64, and weights, floating point, both {shape}"
                )
            weights = torch.where(experts < 0, 0, weights)
        order, places, m_sizes = self._order(experts)
        all_rows = routing is None  # of which choices may be dropped
        if torch.is_grad_enabled():
            z = self.fc1(_ToExperts.apply(tokens, order, places), m_sizes, is_first_microbatch, all_rows=all_rows)
        else:
            z = self.fc1(tokens, m_sizes, is_first_microbatch, rows=order // self.top_k, all_rows=all_rows)
        if self.activation == "swiglu" and not torch.is_grad_enabled():
            h = self.fc2(z, m_sizes, is_first_microbatch, swiglu=True, all_rows=all_rows)
        else:
            separate = _SEPARATE.get(self.activation)
            h = _Activation.apply(z, self.activation) if separate is None else separate(z)
            h = self.fc2(h, m_sizes, is_first_microbatch, all_rows=all_rows)
        y = shaped(_ToTokens.apply(h, weights, order, places), *x.shape)
        if self.return_logits and logits is not None:
            return y, shaped(logits, *x.shape[:-1], self.num_experts)
        return y

    def _order(self, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choices [tokens * top_k] are numbered token by token. Which choice each row is, rows in the order of experts and, of one,
        of tokens, dropped ones last; which row each choice [tokens, top_k] is; rows of each expert."""
        choices = experts.reshape(-1)
        # Dropped ones have the number behind the last; an expert that is not there stays an index out of range.
        choices = torch.where(choices < 0, self.num_experts, choices + (choices >= self.num_experts))
        order = choices.argsort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        m_sizes = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=order.device)
        m_sizes.scatter_add_(0, choices, torch.ones_like(choices))
        return order, places.view(experts.shape), m_sizes[:-1]

    def backward_dw(self) -> None:
        """The weight gradients that delay_wgrad_compute put off, see `Linear`."""
        self.fc1.backward_dw()
        self.fc2.backward_dw()

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, activation={self.activation!r}, scoring={self.scoring!r}, normalize={self.normalize}"
        )


class _ToExperts(torch.autograd.Function):
    """rows[i] = tokens[order[i] // top_k]. The gradient is a sum of top_k rows, in float32 and in their order: no atomics."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(places)
        return tokens.index_select(0, order // places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return _gathered(drows, places).sum(1, dtype=torch.float32).to(drows.dtype), None, None


class _ToTokens(torch.autograd.Function):
    """out[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows, weights, order, places)
        return combine(rows, places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        rows, weights, order, places = ctx.saved_tensors
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            factors = weights.float().reshape(-1).index_select(0, order)
            drows = (dout.index_select(0, order // places.shape[1]) * factors.unsqueeze(-1)).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            dweights = (_gathered(rows, places) * dout.float().unsqueeze(1)).sum(-1).to(weights.dtype)
        return drows, dweights, None, None


def _gathered(rows: Tensor, places: Tensor) -> Tensor:
    """[tokens, top_k, columns]"""
    return rows.index_select(0, places.reshape(-1)).view(*places.shape, rows.shape[1])


class _Activation(torch.autograd.Function):
    """act(z) in float32, rounded once; z is all that is kept."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(z)
        ctx.activation = activation
        y = activate(z.float(), activation)
        return y if y.dtype == z.dtype else y.to(z.dtype)  # as in norm.py

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> Any:
        (z,) = ctx.saved_tensors
        return _activation_backward(z.float(), dh.float(), ctx.activation).to(z.dtype), None
