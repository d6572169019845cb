"""Pretrain a small Llama-style model on bytes of the Python standard library's source, once for each recipe, side by side.

    python examples/pretrain.py                                        # a tiny model; under a minute on a CPU
    python examples/pretrain.py --size small --steps 1000 --device cuda --out losses.json --plot losses.png
    python examples/pretrain.py --moe --recipes bf16,mxfp8             # 4 experts of which 2 see each token

Every recipe starts from the same weights and sees the same data. Recipes: bf16 (unquantized), fp8 (delayed scaling, e4m3 forward
and e5m2 gradients), current, block, mxfp8, mxfp4 (backward pass in mxfp8), mxfp4all. Embedding, attention, router and the last
layer stay in bfloat16. On a GPU a step is captured in a CUDA graph. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fourwave as fw

RECIPES = {
    "bf16": fw.recipes.Unquantized(),
    "fp8": fw.recipes.DelayedScaling(amax_history_len=16),
    "current": fw.recipes.CurrentScaling(),
    "block": fw.recipes.BlockScaling(),
    "mxfp8": fw.recipes.MXFP8(),
    "mxfp4": fw.recipes.MXFP4(),
    "mxfp4all": fw.recipes.MXFP4(backward="mxfp4"),
}
# width, layers, heads, width of the MLP, sequence, sequences in a batch
SIZES = {"tiny": (64, 2, 2, 128, 64, 4), "small": (384, 6, 6, 1024, 256, 32)}


# ---------------------------------------------------------------------------------------------------------------------
# data


def library_source(limit: int) -> torch.Tensor:
    """uint8 bytes of the standard library's modules, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    if len(text) < 100_000:
        raise SystemExit(f"{root} has {len(text)} bytes of Python source; this needs 100000 at least")
    return torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)


def batches(text: torch.Tensor, steps: int, batch: int, sequence: int, seed: int):
    """[batch, sequence + 1] int64 for each step, from anywhere in the text."""
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(sequence + 1)
    for _ in range(steps):
        start = torch.randint(len(text) - sequence - 1, (batch, 1), generator=generator)
        yield text[start + window].long()


# ---------------------------------------------------------------------------------------------------------------------
# model


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = fw.nn.LayerNormLinear(width, 3 * width, bias=False, normalization="RMSNorm")
        self.out = fw.nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, width))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [..., t, d], halves paired."""
    t, d = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, d, 2, device=x.device) / d)
    angle = torch.arange(t, device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Experts(nn.Module):
    """Each token's two best of four experts, weighted. Nothing here waits for the GPU: sizes of groups stay on it."""

    def __init__(self, width: int, hidden: int, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = fw.nn.GroupedLinear(experts, width, 2 * hidden, bias=False)
        self.down = fw.nn.GroupedLinear(experts, hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).view(-1, x.shape[-1])
        weight, expert = self.router(tokens).float().softmax(-1).topk(self.top, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        expert = expert.flatten()
        order = expert.argsort(stable=True)
        m_sizes = F.one_hot(expert, self.experts).sum(0)
        source = order // self.top
        gate, up = self.up(tokens[source], m_sizes).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up, m_sizes)
        y = y * weight.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(tokens, dtype=y.dtype).index_add(0, source, y).view(x.shape)


class Model(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, hidden: int, moe: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            mlp = (
                Experts(width, hidden // 2)
                if moe
                else fw.nn.LayerNormMLP(width, hidden, bias=False, activation="swiglu", normalization="RMSNorm")
            )
            self.layers.append(nn.ModuleList([Attention(width, heads), mlp]))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What ends a residual branch starts smaller, as in GPT-2.
                last = name.endswith(("out.weight", "fc2_weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if last else 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for attention, mlp in self.layers:
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# training


class Step:
    """One step of training: loss of a batch, gradients, clipping, optimizer. On a GPU it is a CUDA graph after the first few,
    so that the host has next to nothing to do; then `loss` is overwritten by each step."""

    EAGER = 3  # steps before the capture, which warm up what must not happen in it

    def __init__(self, model: nn.Module, recipe: fw.recipes.Recipe, lr: float, graph: bool) -> None:
        self.model, self.recipe, self.graph = model, recipe, graph
        device = next(model.parameters()).device
        self.lr = torch.tensor(lr, device=device) if graph else lr
        options = {"capturable": True, "fused": True} if graph else {}
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1, **options
        )
        self.taken = 0
        self.captured: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream() if graph else None

    def compute(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16), fw.autocast(recipe=self.recipe):
            logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def __call__(self, ids: torch.Tensor, lr: float) -> torch.Tensor:
        if not self.graph:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.zero_grad(set_to_none=True)
            return self.compute(ids)
        self.lr.fill_(lr)
        self.taken += 1
        if self.taken <= self.EAGER:
            self.optimizer.zero_grad(set_to_none=True)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                loss = self.compute(ids)
            torch.cuda.current_stream().wait_stream(self.stream)
            return loss
        if self.captured is None:
            self.ids = ids.clone()
            self.optimizer.zero_grad(set_to_none=True)
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self.loss = self.compute(self.ids)
        self.ids.copy_(ids)
        self.captured.replay()
        return self.loss.clone()


def train(recipe: str, text: torch.Tensor, args: argparse.Namespace) -> tuple[list[float], float]:
    """Loss in nats per byte of each step, and seconds."""
    width, layers, heads, hidden, sequence, batch = SIZES[args.size]
    torch.manual_seed(args.seed)
    model = Model(width, layers, heads, hidden, args.moe).to(args.device)
    on_gpu = torch.device(args.device).type == "cuda"
    step_of = Step(model, RECIPES[recipe], args.lr, on_gpu and not args.eager)
    warmup = max(1, args.steps // 20)
    losses = []
    start = time.perf_counter()
    for step, ids in enumerate(batches(text, args.steps, batch, sequence, args.seed)):
        lr = min((step + 1) / warmup, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / max(1, args.steps))))
        losses.append(step_of(ids.to(args.device, non_blocking=True), args.lr * lr))
        if args.every and (step % args.every == 0 or step == args.steps - 1):
            took = time.perf_counter() - start
            print(f"{recipe:>9} step {step:>5} loss {float(losses[-1]):.4f}  {took:.1f} s", flush=True)
    return torch.stack(losses).tolist(), time.perf_counter() - start


def final(losses: list[float]) -> float:
    """Mean of the last tenth: one batch alone says little."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def plot(curves: dict[str, list[float]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for recipe, losses in curves.items():
        span = max(1, len(losses) // 50)
        smooth = [sum(losses[max(0, i - span + 1) : i + 1]) / min(span, i + 1) for i in range(len(losses))]
        axes.plot(smooth, label=f"{recipe}  {final(losses):.4f}", linewidth=1)
    axes.set(xlabel="step", ylabel="nats per byte, running mean", title=title)
    axes.legend(title="recipe, mean of the last tenth")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="bf16,fp8,mxfp8,mxfp4", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--moe", action="store_true", help="experts in place of each MLP")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="on a GPU: no CUDA graph")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=8_000_000, help="of source, at most")
    parser.add_argument("--every", type=int, default=20, help="steps between lines; 0: none")
    parser.add_argument("--out", type=Path, help="write the losses as JSON")
    parser.add_argument("--plot", type=Path, help="write the curves as an image")
    args = parser.parse_args()
    names = args.recipes.split(",")
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"{', '.join(unknown)}: the recipes are {', '.join(RECIPES)}")
    text = library_source(args.bytes)
    print(
        f"{len(text)} bytes of source, {args.size} {'MoE' if args.moe else 'dense'} model on {args.device}, {args.steps} steps"
    )
    curves, seconds = {}, {}
    for name in names:
        curves[name], seconds[name] = train(name, text, args)
    print(f"{'recipe':>9}  mean loss of the last tenth")
    for name, losses in curves.items():
        far = f"  {100 * (final(losses) / final(curves['bf16']) - 1):+.2f}% of bf16" if "bf16" in curves else ""
        print(f"{name:>9}  {final(losses):.4f}{far}")
    where = torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else "CPU"
    if args.out:
        record = {
            "device": where, "torch": torch.__version__, "fourwave": fw.__version__, "python": sys.version.split()[0],
            "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "plot", "device")}, "bytes": len(text),
            "seconds": seconds, "losses": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
        }  # fmt: skip
        args.out.write_text(json.dumps(record) + "\n")
    if args.plot:
        kind = "MoE" if args.moe else "dense"
        plot(curves, args.plot, f"{args.size} {kind} byte model, {args.steps} steps, {where}")


if __name__ == "__main__":
    main()
