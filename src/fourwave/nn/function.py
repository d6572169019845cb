"""A linear layer as one autograd function: each tensor is quantized once, and each product has both operands as it reads them.

forward   x -> rows for fprop, columns for wgrad; w -> rows for fprop, columns for dgrad; y = act(x @ w.T + bias)
backward  dz -> rows for dgrad, columns for wgrad; dx = dz @ w; dw = dz.T @ x; dbias = dz summed over the tokens

Between the two live the columns of x and w, or x and w where the recipe's backward pass is in high precision, and z where
there is an activation. Nothing is transposed and nothing is read on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fourwave.nn import products
from fourwave.nn.base import GRAD, INPUT, WEIGHT, Step, record
from fourwave.nn.products import Pair, Tensor, in_dtype, pack, pair, product, unpack
from fourwave.nn.weights import WatchedParameter
from fourwave.ops.gemm.operators import _activation_backward
from fourwave.ops.gemm.problem import SWIGLU
from fourwave.recipes import Plan

_FORWARDS = itertools.count()  # of forward passes that put off wgrad, in this process


class Pass(NamedTuple):
    """What one backward pass through one forward pass of a module put off: a parameter and its wgrad for each product."""

    forward: int
    task: int
    products: list[tuple[Tensor, Any]]


class Later:
    """Where the products of one forward pass put off wgrad. `waiting`, the module's, gets a Pass for each backward pass through it: two
    of a graph that is kept, or what backward_dw has not taken, are not one."""

    def __init__(self, waiting: list[Pass]) -> None:
        self.waiting, self.forward = waiting, next(_FORWARDS)

    def put(self, weight: Tensor, wgrad: Any) -> None:
        """Called in a backward pass."""
        task = torch._C._current_graph_task_id()
        for each in reversed(self.waiting):
            if (each.forward, each.task) == (self.forward, task):
                each.products.append((weight, wgrad))
                return
        self.waiting.append(Pass(self.forward, task, [(weight, wgrad)]))


def alone(operand: products.Operand) -> products.Operand:
    """Without the graph that made it, which would live as long."""
    return operand.detach() if isinstance(operand, Tensor) else operand


class Call(NamedTuple):
    """A call of `linear` in constants.

    dtype     of y and of the products; weight_dtype: of the weight's gradient
    need_x, need_w, need_b   which gradients there will be
    slot      first of the layer's three in the module's scales
    overwrite main_grad is written instead of added to
    """

    plan: Plan
    dtype: torch.dtype
    weight_dtype: torch.dtype
    activation: str | None
    need_x: bool
    need_w: bool
    need_b: bool
    observe: bool
    slot: int
    fnuz: bool | None
    backend: str | None
    overwrite: bool


def check_input(x: object, name: str = "x") -> None:
    """What modules take: a dense tensor of float32, bfloat16 or float16."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a tensor")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {x.dtype}; it must be float32, bfloat16 or float16")
    check_dense(**{name: x})


def check_dense(**tensors: Tensor) -> None:
    """What holds other tensors, or no dense memory: of a DTensor only this rank's part could be multiplied, of others what they hold
    would be lost."""
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        kind = type(tensor)
        if (
            kind in (Tensor, torch.nn.Parameter, WatchedParameter)
            and tensor.layout == torch.strided
            and not tensor.is_nested
        ):
            continue
        if kind.__name__ == "DTensor":
            raise NotImplementedError(
                f"{name} is a DTensor, {tuple(tensor.shape)} over several ranks: modules multiply whole tensors, tensor parallelism "
                "(parallelize_module) is not here. FSDP2 gathers the parameters of the modules that it wraps before their forward pass"
            )
        if tensor.is_nested or tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            what = f"{kind.__name__}{' (nested)' * tensor.is_nested}, {tensor.layout}"
            raise NotImplementedError(f"{name} is a {what}; modules multiply dense tensors")


def has_autocast(kind: str) -> bool:
    """Whether torch.autocast knows the devices of this kind. PyTorch 2.11 cannot trace its own function in some places."""
    return kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)


def compute_dtype(x: Tensor) -> torch.dtype:
    """torch.autocast's type where it is on, else x's."""
    kind = x.device.type
    if (
        has_autocast(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: Step,
    *,
    activation: str | None = None,
    slot: int = 0,
    cached: Pair | None = None,
    main_grad: Tensor | Callable[[], Tensor] | None = None,
    overwrite: bool = False,
    later: Later | None = None,
) -> Tensor:
    """act(x @ weight.T + bias) by the recipe of `step`.

    x           [..., K] float32, bfloat16 or float16; weight [N, K]; bias [N] or None
    activation  as in fw.gemm
    cached      weight quantized earlier, both directions that are needed
    main_grad   [N, K] float, or a function that the backward pass calls for it: the weight's gradient is added to it (or, with
                overwrite, replaces what it holds), and autograd gets none
    later       wgrad is not computed but put there
    returns     [..., N] ([..., N / 2] for swiglu) of compute_dtype(x)
    """
    grad = torch.is_grad_enabled()
    call = Call(
        step.plan, compute_dtype(x), weight.dtype, activation, grad and x.requires_grad, grad and weight.requires_grad,
        grad and bias is not None and bias.requires_grad, step.observe, slot, step.fnuz, step.backend, overwrite,
    )  # fmt: skip
    result = _Linear.apply(x, weight, bias, step.scales, step.history, main_grad, call, cached, later, step.seed)
    if not isinstance(result, tuple):
        return result
    y, *amax = result
    if step.records and step.history is not None:
        with torch.no_grad():
            for each, value in zip((INPUT, WEIGHT), amax, strict=True):
                record(step.history, slot + each, value)
    return y


def quantize_weight(
    weight: Tensor,
    call_plan: Plan,
    step: Step,
    slot: int,
    *,
    need_row: bool,
    need_col: bool,
    transposed: bool | None = None,
) -> Pair:
    """The weight as `linear` would quantize it. transposed: see `pair`."""
    scale = step.scales[slot + WEIGHT, 0] if call_plan.delayed and step.scales is not None else None
    return pair(
        weight.detach(), call_plan.w, call_plan.w_t, call_plan, need_row=need_row, need_col=need_col, scale=scale,
        fnuz=step.fnuz, backend=step.backend, transposed=transposed,
    )  # fmt: skip


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scales: Tensor | None,
        history: Tensor | None,
        main_grad: Tensor | Callable[[], Tensor] | None,
        call: Call,
        cached: Pair | None,
        later: Later | None,
        seed: Tensor | None,
    ) -> Any:
        plan, slot = call.plan, call.slot
        options: dict[str, Any] = {"fnuz": call.fnuz, "backend": call.backend, "observe": call.observe}
        x_scale = w_scale = None
        if plan.delayed:
            assert scales is not None
            x_scale, w_scale = scales[slot + INPUT, 0], scales[slot + WEIGHT, 0]
        if cached is not None and cached.col is None and call.need_x:
            raise ValueError(
                "the weight is stored for forward passes only, and the input requires grad: store it with dgrad=True"
            )
        tokens = products.rows(x)
        xs = pair(
            tokens, plan.x, plan.x_t, plan, need_row=True, need_col=call.need_w, scale=x_scale,
            hadamard=products.transforms(plan, tokens.shape[0]), **options,
        )  # fmt: skip
        ws = cached
        if ws is None:
            ws = pair(
                weight, plan.w, plan.w_t, plan, need_row=True, need_col=call.need_x, scale=w_scale, **options
            )  # fmt: skip
        assert xs.row is not None and ws.row is not None
        needs_z = call.activation is not None and (call.need_x or call.need_w or call.need_b)
        out = None
        if not products.functional():
            # Not a view of the product's matrix: what a function returns as a view may not be changed in place.
            columns = ws.row.shape[0] // (2 if call.activation == SWIGLU else 1)
            out = torch.empty(*x.shape[:-1], columns, dtype=call.dtype, device=x.device)
        y = product(
            in_dtype(xs.row, call.dtype), in_dtype(ws.row, call.dtype), bias=bias, activation=call.activation,
            out_dtype=call.dtype, out=None if out is None else out.view(products.rows(x).shape[0], columns),
            preactivation=call.dtype if needs_z else None, fast_accum=plan.fast_accum, backend=call.backend,
        )  # fmt: skip
        x_meta, x_saved = pack(xs.col if call.need_w else None, "columnwise")
        w_meta, w_saved = pack(ws.col if call.need_x else None, "columnwise")
        ctx.metas = (x_meta, w_meta)
        saved = [*x_saved, *w_saved]
        if y.preactivation is not None:
            saved.append(y.preactivation)
        if scales is not None:
            saved.append(scales)
        ctx.save_for_backward(*saved)
        # history is written by later steps, which is no mistake: it is not among the saved tensors.
        # Nor is the seed, which the backward pass counts up.
        ctx.call, ctx.history, ctx.main_grad, ctx.later, ctx.seed = call, history, main_grad, later, seed
        ctx.weight = weight if later is not None or main_grad is not None else None
        ctx.x_shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        if out is None:
            out = y.out.view(*x.shape[:-1], y.out.shape[-1])
        if not plan.delayed and not call.observe:
            return out
        amax = [each if each is not None else products.largest(t) for each, t in ((xs.amax, x), (ws.amax, weight))]
        ctx.mark_non_differentiable(*amax)
        return out, *amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        call: Call = ctx.call
        plan = call.plan
        saved = list(ctx.saved_tensors)
        x_meta, w_meta = ctx.metas
        x_col = None if x_meta is None else unpack(x_meta, saved)
        w_col = None if w_meta is None else unpack(w_meta, saved)
        dz = products.rows(dy)
        if call.activation is not None:
            dz = _activation_backward(saved.pop(0).float(), dz.float(), call.activation)
        dz = dz.to(call.dtype)
        gs = pair(
            dz, plan.g, plan.g_t, plan, need_row=call.need_x, need_col=call.need_w,
            scale=saved[0][call.slot + GRAD, 0] if plan.delayed else None, fnuz=call.fnuz, backend=call.backend,
            observe=call.observe, seed=ctx.seed, hadamard=products.transforms(plan, dz.shape[0]),
        )  # fmt: skip
        if ctx.history is not None and gs.amax is not None:
            record(ctx.history, call.slot + GRAD, gs.amax)
        dx = dw = db = None
        if call.need_x:
            assert gs.row is not None and w_col is not None
            dx = product(
                gs.row, in_dtype(w_col, call.dtype), trans_b=False, out_dtype=call.dtype, backend=call.backend
            ).out.view(ctx.x_shape)  # fmt: skip
        # An accumulating product would add to bias_grad, too.
        fused_bias = call.need_w and call.need_b and plan.g_t is None and ctx.later is None and ctx.main_grad is None
        if call.need_b and not fused_bias:
            # Of the gradient before it is quantized, in float32.
            db = dz.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if call.need_w:
            assert gs.col is not None and x_col is not None
            if ctx.later is not None:
                x_col = alone(x_col)
            main_grad = ctx.main_grad() if callable(ctx.main_grad) else ctx.main_grad
            wgrad = _Wgrad(call, gs.col, x_col, main_grad, ctx.bias_dtype if fused_bias else None)
            if ctx.later is not None:
                ctx.later.put(ctx.weight, wgrad)
            else:
                dw, fused = wgrad.run()
                db = fused if fused_bias else db
        if ctx.main_grad is not None:
            dw = _told(ctx.weight)
        return dx, dw, db, None, None, None, None, None, None, None


class _Wgrad(NamedTuple):
    """dw = dz.T @ x, now or later. bias_dtype: bias_grad is computed with it."""

    call: Call
    dz: products.Operand
    x: products.Operand
    main_grad: Tensor | None
    bias_dtype: torch.dtype | None

    def run(self) -> tuple[Tensor, Tensor | None]:
        call, out = self.call, self.main_grad
        traced = torch.compiler.is_compiling()  # where products make their results
        made = product(
            self.dz, in_dtype(self.x, call.dtype), trans_a=True, trans_b=False,
            out_dtype=call.weight_dtype if out is None else out.dtype, bias_grad=self.bias_dtype,
            out=None if traced else out, accumulate=out is not None and not call.overwrite and not traced,
            backend=call.backend,
        )  # fmt: skip
        if out is not None and traced:
            out.copy_(made.out if call.overwrite else out + made.out)
        return made.out, made.bias_grad


def _told(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient is in main_grad. Megatron-LM's hooks run on any gradient and look at
    the flag."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return weight.new_empty(1).expand(weight.shape)
