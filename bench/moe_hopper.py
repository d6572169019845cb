"""Time a whole mixture-of-experts MLP on an H100 or H200, forward, and write a record.

    python bench/moe_hopper.py --deep-gemm --out record.json

Route, gather, fc1, SwiGLU, fc2, weighted sum, of random tokens and weights: x [tokens, hidden] bf16 to as much.

fourwave fp8   fw.nn.MoEMLP under recipes.BlockScaling on the backend `hopper`, weights stored quantized
fourwave bf16  the same module unquantized
torch bf16     torch.nn.functional.grouped_mm and PyTorch's operations
deepgemm fp8   --deep-gemm: its contiguous grouped kernel between PyTorch's operations and fw.quantize, groups padded to 128 rows on the
               device; tokens are quantized before they are copied to their experts

Errors are relative: of the difference from float64 with the unquantized weights, root of the sum of squares over all elements of
some tokens. A variant of more than MOST is refused and not timed. Graph replay, the variants take turns, each round in another order, operands are not rotated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gemm_hopper import cutedsl, machine, preheat, record_head, time_interleaved

import fourwave as fw

BF16 = torch.bfloat16
Tensor = torch.Tensor
# hidden, ffn, experts, top_k: Mixtral 8x7B; DeepSeek-V3's on one of 8 GPUs; Qwen3-30B-A3B
MODELS = {"mixtral": (4096, 14336, 8, 2), "deepseek": (7168, 2048, 32, 8), "qwen3": (2048, 768, 128, 8)}
TOKENS = (16, 256, 4096)
CHECKED = 32  # tokens
MOST = {"bf16": 0.02, "fp8": 0.1}  # relative error: a few roundings of 2^-9; of 2^-4 in both operands of two products


def torch_moe(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> Tensor:
    weights, experts = F.linear(x.float(), router.float()).softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.view(-1)
    order = flat.argsort(stable=True)
    ends = torch.zeros(len(w1), dtype=torch.int32, device=x.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.int32)
    )
    ends = ends.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // top_k], w1.mT, offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
    rows = rows * weights.view(-1)[order].unsqueeze(-1)
    return torch.zeros(len(x), x.shape[1], device=x.device).index_add_(0, order // top_k, rows).to(x.dtype)


def quantized(t: Tensor, name: str) -> tuple[Tensor, Tensor]:
    q = fw.quantize(t, name, "rowwise")
    assert q.data is not None and q.scale is not None
    return q.data, q.scale


class DeepGemm:
    def __init__(self, library: Any, router: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> None:
        self.library, self.router, self.top_k, self.groups = library, router, top_k, len(w1)
        self.w1, self.w2 = self.weight(w1), self.weight(w2)

    @staticmethod
    def weight(w: Tensor) -> tuple[Tensor, Tensor]:
        data, scale = quantized(w, "fp8_128x128")
        return data.view(w.shape), scale.view(w.shape[0], -(-w.shape[1] // 128), -1)

    def product(self, a: Tensor, scale: Tensor, b: tuple[Tensor, Tensor], groups: Tensor) -> Tensor:
        out = torch.empty(len(a), b[0].shape[1], device=a.device, dtype=BF16)
        scale = self.library.utils.layout.get_mn_major_tma_aligned_tensor(scale)
        self.library.m_grouped_fp8_gemm_nt_contiguous((a, scale), b, out, groups)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        top_k, G = self.top_k, self.groups
        weights, experts = F.linear(x.float(), self.router.float()).softmax(-1).topk(top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = experts.view(-1)
        order = flat.argsort(stable=True)
        sizes = torch.zeros(G, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
        padded = (sizes + 127) // 128 * 128
        ends = padded.cumsum(0)
        shift = (ends - padded) - (sizes.cumsum(0) - sizes)
        high = -(-min(G, len(flat)) * 127 // 128) * 128 + -(-len(flat) // 128) * 128
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        places = places + shift[flat]  # of each choice
        row = torch.arange(high, device=x.device)
        groups = torch.searchsorted(ends, row, right=True)
        groups = torch.where(row < ends[-1], groups, -1).to(torch.int32)
        data, row_scale = quantized(x, "fp8_1x128")
        token = torch.arange(len(flat), device=x.device) // top_k
        a = torch.zeros(high, x.shape[1], device=x.device, dtype=torch.uint8)
        scale = torch.zeros(high, row_scale.shape[1], device=x.device)
        a[places], scale[places] = data.view(torch.uint8)[token], row_scale[token]
        gate, up = self.product(a.view(data.dtype), scale, self.w1, groups).chunk(2, dim=-1)
        rows = self.product(*quantized(F.silu(gate) * up, "fp8_1x128"), self.w2, groups)
        return (rows[places].view(len(x), top_k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def truth(module: fw.nn.MoEMLP, x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    experts, weights, _ = module.route(x)
    rows = []
    for t in range(len(x)):
        parts = []
        for j in range(module.top_k):
            e = experts[t, j]
            gate, up = (w1[e].double() @ x[t].double()).chunk(2)
            parts.append(weights[t, j].double() * (w2[e].double() @ (F.silu(gate) * up)))
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def measure(name: str, tokens: int, args: Any, library: Any) -> dict[str, Any]:
    hidden, ffn, G, top_k = MODELS[name]
    made: dict[str, Any] = {"params_dtype": BF16, "device": args.device}
    plain = fw.nn.MoEMLP(hidden, ffn, G, top_k, **made)
    w1, w2 = plain.fc1.weight.detach().clone(), plain.fc2.weight.detach().clone()
    stored = fw.nn.MoEMLP(hidden, ffn, G, top_k, recipe=fw.recipes.BlockScaling(), **made)
    stored.load_state_dict(plain.state_dict())
    with fw.use_backend(args.backend):
        for linear in (stored.fc1, stored.fc2):
            linear.store_quantized(fw.recipes.BlockScaling(), dgrad=False)
    x = torch.randn(tokens, hidden, device=args.device).to(BF16)
    router = plain.router_weight.detach()
    outs: dict[str, Tensor] = {}

    def ours(module: fw.nn.MoEMLP) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with fw.use_backend(args.backend):
                return module(x)

        return call

    calls: dict[str, Callable[[], Tensor]] = {
        "fourwave fp8": ours(stored),
        "fourwave bf16": ours(plain),
        "torch bf16": lambda: torch_moe(x, router, w1, w2, top_k),
    }
    if library is not None:
        with fw.use_backend(args.backend):
            deep = DeepGemm(library, router, w1, w2, top_k)

        def deepgemm() -> Tensor:
            with fw.use_backend(args.backend):
                return deep(x)

        calls["deepgemm fp8"] = deepgemm

    def timed(key: str) -> Callable[[int], None]:
        def call(_: int) -> None:
            outs[key] = calls[key]()

        return call

    exact = truth(plain, x[:CHECKED], w1, w2)
    errors, refused = {}, {}
    for key in list(calls):
        try:
            got = calls[key]()[:CHECKED].double()
        except Exception as why:  # what a variant refuses is reported, not measured
            refused[key] = str(why)[:300]
            del calls[key]
            continue
        error = float((got - exact).norm() / exact.norm())
        if not error <= MOST[key.split()[1]]:
            refused[key] = f"wrong: relative error {error:.3g}"
            del calls[key]
            continue
        errors[key] = error
    seconds = time_interleaved({key: timed(key) for key in calls}, args.samples) if args.device == "cuda" else {}
    return {
        "model": name, "hidden": hidden, "ffn": ffn, "experts": G, "top_k": top_k, "tokens": tokens, "error": errors,
        "refused": refused, "seconds": seconds, "median": {key: statistics.median(t) for key, t in seconds.items()},
    }  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--deep-gemm", action="store_true")
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--device", default="cuda", help="cpu: errors only")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    library = importlib.import_module("deep_gemm") if args.deep_gemm else None
    torch.manual_seed(0)
    before: Any = None
    if args.device == "cuda":
        preheat(1)
        before = machine()
    rows, began = [], time.monotonic()
    for name in args.models.split(","):
        for tokens in map(int, args.tokens.split(",")):
            row = measure(name, tokens, args, library)
            rows.append(row)
            words = [f"{name} {tokens}"]
            for key, error in row["error"].items():
                words.append(f"{key} {row['median'].get(key, 0) * 1e6:.1f} us, error {error:.2e}")
            print("; ".join([*words, *[f"refused {k}: {why}" for k, why in row["refused"].items()]]), flush=True)
    what = "MoE MLP, forward: seconds per call, graph replay"
    after = machine() if args.device == "cuda" else None
    record = {
        **record_head(__file__, what, args, before, after, cutedsl() if args.backend == "hopper" else {}),
        "wall_seconds": time.monotonic() - began,
        "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
