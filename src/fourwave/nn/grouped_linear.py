"""fw.nn.GroupedLinear: a linear layer for each group of rows, one expert of a mixture say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fourwave.nn import products
from fourwave.nn.base import GRAD, INPUT, WEIGHT, record
from fourwave.nn.function import Call, Later, _told, alone, check_input, compute_dtype
from fourwave.nn.linear import LinearBase, made_parameter, reset_linear
from fourwave.nn.parts import MainGrads
from fourwave.nn.products import Operand, Pair, in_dtype, pack, pair, unpack
from fourwave.ops.gemm.reference import activate
from fourwave.ops.grouped_gemm.api import grouped_gemm, grouped_gemm_wgrad
from fourwave.quantize.gather import ROW_SCALINGS, quantize_gathered, quantize_swiglu
from fourwave.quantize.tensor import FORMATS
from fourwave.recipes import Plan, Recipe

Tensor = torch.Tensor


class GroupedLinear(LinearBase):
    """y[m] = x[m] @ weight[g].T + bias[g] for every row m of group g.

    Parameters  weight [num_groups, out_features, in_features], bias [num_groups, out_features]
    The rest as in `Linear`. With delayed scaling all groups' weights share a scale. With MX formats and 1x128 blocks the weights
    of a group are quantized along their out_features, too, which must be a multiple of the block (32, 128), in training.
    """

    _stores_transposed = False  # as of its operands that are not kept: transposed, all groups would be side by side

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        recipe: Recipe | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(recipe, fuse_wgrad_accumulation, delay_wgrad_compute)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.init_method = init_method
        self.weight = made_parameter((num_groups, out_features, in_features), device, params_dtype)
        if bias:
            self.bias: nn.Parameter | None = made_parameter((num_groups, out_features), device, params_dtype)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()
        self._prepare_default()

    def _initialize(self) -> None:
        """Each group as a Linear of its own."""
        for g in range(self.num_groups):
            reset_linear(self.weight[g], None if self.bias is None else self.bias[g], self.init_method)

    def forward(
        self,
        x: Tensor,
        m_sizes: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        rows: Tensor | None = None,
        all_rows: bool = False,
        swiglu: bool = False,
    ) -> Tensor:
        """x [M, in_features], rows of group 0 first -> [M, out_features]; rows past the last group are zeros, whatever x
        and the gradient hold there.

        m_sizes  [num_groups] int32 or int64 on x's device, rows of each group, 0 included; a GPU's are never read on the host
        is_first_microbatch  see Linear.forward
        rows     [M] int64, without gradients only: the result is that for x[rows], M rows. Where no two rows share a scale, rows of x are
                 quantized before they are copied, each once
        all_rows m_sizes add up to M, says the caller: spares a pass over x, and one over the gradient, that keep rows past the last group
                 out of the scales. Not checked on a GPU; on the CPU the sizes themselves tell
        swiglu   without gradients only: the result for silu(gate) * up of x = [gate, up], [M, 2 * in_features], in float32, rounded to x's
                 type. On Hopper one kernel makes its codes, and does not write it
        """
        for name, t in (("x", x), ("m_sizes", m_sizes)):
            if not isinstance(t, Tensor):
                raise ValueError(f"{name} is a {type(t).__name__}; it must be a tensor")
        columns = self.in_features * (2 if swiglu else 1)
        if x.dim() != 2 or x.shape[1] != columns:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [M, {columns}], the rows of all groups")
        if m_sizes.shape != (self.num_groups,):
            raise ValueError(
                f"m_sizes is {tuple(m_sizes.shape)}; it must be [{self.num_groups}], the rows of each group"
            )
        check_input(x)
        grad = torch.is_grad_enabled()
        if rows is not None:
            if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device:
                told = f"{tuple(rows.shape)} {rows.dtype} on {rows.device}" if isinstance(rows, Tensor) else rows
                raise ValueError(f"rows is {told}; it must be [M] int64 on {x.device}, the rows of x to multiply")
        all_rows = _all_rows(m_sizes, len(x) if rows is None else len(rows), all_rows)
        if (rows is not None or swiglu) and grad and any(t.requires_grad for t in (x, *self.parameters())):
            raise ValueError(
                f"{'swiglu' if rows is None else 'rows'}= records no gradient, and x or a parameter requires one: compute what it stands "
                "for yourself, or use torch.no_grad()"
            )
        step = self._begin(x.device)
        self._check_blocks(step.plan, grad and x.requires_grad)
        bias = self.bias
        weight, cached, main_grad, overwrite = self._weight("weight", x, step, 0, is_first_microbatch)
        call = Call(
            step.plan, compute_dtype(x), weight.dtype, None, grad and x.requires_grad, grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad, step.observe, 0, step.fnuz, step.backend, overwrite,
        )  # fmt: skip
        later = self._later()
        result = _Grouped.apply(
            x,
            weight,
            bias,
            m_sizes,
            step.scales,
            step.history,
            main_grad,
            call,
            cached,
            later,
            step.seed,
            rows,
            all_rows,
            swiglu,
        )
        if not isinstance(result, tuple):
            return result
        y, *amax = result
        if step.records and step.history is not None:
            with torch.no_grad():
                for slot, value in zip((INPUT, WEIGHT), amax, strict=True):
                    record(step.history, slot, value)
        return y

    def _check_blocks(self, plan: Plan, needs_dgrad: bool) -> None:
        """A block of a weight's scales must not reach into the next group."""
        for name, along in ((plan.w, False), (plan.w_t if needs_dgrad else None, True)):
            scaling = None if name is None else FORMATS[name].scaling
            block = {"128x128": 128, "1x128": 128 * along, "1x32": 32 * along}.get(scaling or "", 0)
            if block and self.out_features % block:
                raise ValueError(
                    f"out_features is {self.out_features}; with weights in {name}{' and a gradient of the input' * along} it must be a "
                    f"multiple of {block}, so that no block of scales belongs to two groups"
                )

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}{self._repr_of_weights()}"
        )


class _Grouped(torch.autograd.Function):
    """As function._Linear, with grouped products."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        m_sizes: Tensor,
        scales: Tensor | None,
        history: Tensor | None,
        main_grad: Tensor | Callable[[], Tensor | MainGrads] | None,
        call: Call,
        cached: Pair | None,
        later: Later | None,
        seed: Tensor | None,
        rows: Tensor | None,
        all_rows: bool,
        swiglu: bool,
    ) -> Any:
        plan = call.plan
        options: dict[str, Any] = {
            "fnuz": call.fnuz, "backend": call.backend, "observe": call.observe, "transposed": False,
        }  # fmt: skip
        x_scale = w_scale = None
        if plan.delayed:
            assert scales is not None
            x_scale, w_scale = scales[INPUT, 0], scales[WEIGHT, 0]
        fmt = None if plan.x is None else FORMATS[plan.x]
        by_row = fmt is not None and fmt.scaling in ROW_SCALINGS and not call.observe
        if fmt is not None and by_row and (rows is not None) != swiglu:
            one: dict[str, Any] = {
                "scale_rule": plan.mx_rule if fmt.is_mx else plan.block_rule, "fnuz": None if fmt.is_mx else call.fnuz,
                "backend": call.backend,
            }  # fmt: skip
            q = quantize_swiglu(x, fmt.name, **one) if rows is None else quantize_gathered(x, rows, fmt.name, **one)
            xs = Pair(q, None)
        else:
            if rows is not None:
                x = x.index_select(0, rows)
            if swiglu:
                x = activate(x.float(), "swiglu").to(x.dtype)
            if not all_rows and (plan.x is not None or plan.x_t is not None or call.observe):
                x = _without_the_rest(x, m_sizes)
            xs = pair(x, plan.x, plan.x_t, plan, need_row=True, need_col=call.need_w, scale=x_scale, **options)
        ws = cached
        if ws is None:
            ws = pair(
                weight, plan.w, plan.w_t, plan, need_row=True, need_col=call.need_x, scale=w_scale, **options
            )  # fmt: skip
        assert xs.row is not None and ws.row is not None
        y = grouped_gemm(
            in_dtype(xs.row, call.dtype), in_dtype(ws.row, call.dtype), m_sizes, bias=bias, out_dtype=call.dtype,
            fast_accum=plan.fast_accum, backend=call.backend,
        )  # fmt: skip
        x_meta, x_saved = pack(xs.col if call.need_w else None, "columnwise")
        w_meta, w_saved = pack(ws.col if call.need_x else None, "columnwise")
        ctx.metas = (x_meta, w_meta)
        ctx.save_for_backward(m_sizes, *x_saved, *w_saved, *([scales] if scales is not None else []))
        ctx.call, ctx.history, ctx.main_grad, ctx.later, ctx.seed = call, history, main_grad, later, seed
        # A weight that is joined of parameters is an alias of their memory, which forbids keeping its quantized form. Nobody is told of it.
        ctx.weight = weight if later is not None or (main_grad is not None and weight.is_leaf) else None
        ctx.bias_dtype, ctx.all_rows = None if bias is None else bias.dtype, all_rows
        if not plan.delayed and not call.observe:
            return y
        amax = [each if each is not None else products.largest(t) for each, t in ((xs.amax, x), (ws.amax, weight))]
        ctx.mark_non_differentiable(*amax)
        return y, *amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        call: Call = ctx.call
        plan = call.plan
        saved = list(ctx.saved_tensors)
        m_sizes = saved.pop(0)
        x_meta, w_meta = ctx.metas
        x_col = None if x_meta is None else unpack(x_meta, saved)
        w_col = None if w_meta is None else unpack(w_meta, saved)
        dz = dy.to(call.dtype)
        if not ctx.all_rows and (plan.g is not None or plan.g_t is not None or call.observe):
            dz = _without_the_rest(dz, m_sizes)
        gs = pair(
            dz, plan.g, plan.g_t, plan, need_row=call.need_x, need_col=call.need_w,
            scale=saved[0][GRAD, 0] if plan.delayed else None, fnuz=call.fnuz, backend=call.backend, observe=call.observe,
            transposed=False, seed=ctx.seed,
        )  # fmt: skip
        if ctx.history is not None and gs.amax is not None:
            record(ctx.history, GRAD, gs.amax)
        dx = dw = db = None
        if call.need_x:
            assert gs.row is not None and w_col is not None
            dx = grouped_gemm(
                gs.row, in_dtype(w_col, call.dtype), m_sizes, trans_b=False, out_dtype=call.dtype, backend=call.backend
            )
        if call.need_b:
            # The sum of the gradient before it is quantized over each group's rows, as a product with ones.
            # It is none of the layer's products: where kernels do not take float32, PyTorch sums.
            ones = dz.new_ones(dz.shape[0], 8)
            backend = "native" if dz.dtype == torch.float32 else call.backend
            db = grouped_gemm_wgrad(dz, ones, m_sizes, out_dtype=torch.float32, backend=backend)[..., 0]
            db = db.to(ctx.bias_dtype)
        if call.need_w:
            assert gs.col is not None and x_col is not None
            if ctx.later is not None:
                x_col = alone(x_col)
            main_grad = ctx.main_grad() if callable(ctx.main_grad) else ctx.main_grad
            wgrad = _GroupedWgrad(call, gs.col, x_col, m_sizes, main_grad)
            if ctx.later is not None:
                ctx.later.put(ctx.weight, wgrad)
            else:
                dw, _none = wgrad.run()
        if ctx.main_grad is not None:
            dw = None if ctx.weight is None else _told(ctx.weight)
        return dx, dw, db, *[None] * 11


def _all_rows(m_sizes: Tensor, rows: int, told: bool) -> bool:
    """Whether no row is past the last group: read where that waits for nothing, else what the caller said."""
    if torch.compiler.is_compiling() or m_sizes.device.type != "cpu" or _get_current_dispatch_mode() is not None:
        return told
    total = int(m_sizes.sum())
    if told and total != rows:
        raise ValueError(f"all_rows=True and m_sizes is {m_sizes.tolist()}, {total} of {rows} rows")
    return total == rows


def _without_the_rest(t: Tensor, m_sizes: Tensor) -> Tensor:
    """t [M, any] with zeros in the rows past the last group: scales of the tensor, or of blocks that begin in a group, do not
    see what a buffer made for more rows holds there."""
    past = torch.arange(t.shape[0], device=t.device) >= m_sizes.sum()
    return t.masked_fill(past.unsqueeze(1), 0)


class _GroupedWgrad:
    """dw[g] = dz[rows of g].T @ x[rows of g], now or later."""

    def __init__(
        self, call: Call, dz: Operand, x: Operand, m_sizes: Tensor, main_grad: Tensor | MainGrads | None
    ) -> None:
        self.call, self.dz, self.x, self.m_sizes, self.main_grad = call, dz, x, m_sizes, main_grad

    def run(self) -> tuple[Tensor, None]:
        call, out = self.call, self.main_grad
        if isinstance(out, MainGrads):
            dw = grouped_gemm_wgrad(
                self.dz, in_dtype(self.x, call.dtype), self.m_sizes, out_dtype=out.dtype, backend=call.backend
            )
            out.add(dw, call.overwrite)
            return dw, None
        dw = grouped_gemm_wgrad(
            self.dz, in_dtype(self.x, call.dtype), self.m_sizes, out_dtype=call.weight_dtype if out is None else None,
            out=out, accumulate=out is not None and not call.overwrite, backend=call.backend,
        )  # fmt: skip
        return dw, None
