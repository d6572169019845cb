"""Pretrain a small Llama-style model on bytes of the Python standard library's source, once for each recipe, side by side.

    python examples/pretrain.py                                        # a tiny model; under a minute on a CPU
    python examples/pretrain.py --size small --steps 1000 --device cuda --out losses.json --plot losses.png
    python examples/pretrain.py --moe --recipes bf16,mxfp8             # 4 experts of which 2 see each token

Every recipe starts from the same weights and sees the same data. Recipes: bf16 (unquantized), fp8 (e4m3 forward and e5m2 gradients,
scales from each tensor), delayed (scales from earlier steps, 16 of them), delayed_1024, delayed_e4m3 (e4m3 gradients), block, mxfp8,
mxfp4 (backward pass in mxfp8), mxfp4all; fp32 (all in float32) tells how far two runs without quantization are apart. Embedding,
attention, router and the last layer stay in bfloat16. The learning rate falls to zero, and what is compared is the loss of the trained
model, under its recipe, on files that it has not seen. On a GPU a step is captured in a CUDA graph. --plot needs matplotlib.

Two things beside Llama's let runs differ by precision, not by luck: each position also sees the byte before it, so that copying from
earlier text takes one layer instead of two, which find each other sooner or later (docs/training.md), and queries and keys are normalized.
"""

from __future__ import annotations

import argparse
import importlib.util
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
    "fp32": fw.recipes.Unquantized(),
    "bf16": fw.recipes.Unquantized(),
    "fp8": fw.recipes.CurrentScaling(),
    "delayed": fw.recipes.DelayedScaling(amax_history_len=16),
    "delayed_1024": fw.recipes.DelayedScaling(),
    "delayed_e4m3": fw.recipes.DelayedScaling("e4m3", amax_history_len=16),
    "block": fw.recipes.BlockScaling(),
    "mxfp8": fw.recipes.MXFP8(),
    "mxfp4": fw.recipes.MXFP4(),
    "mxfp4all": fw.recipes.MXFP4(backward="mxfp4"),
}
# width, layers, heads, width of the MLP, sequence, sequences in a batch
SIZES = {"tiny": (64, 2, 2, 128, 64, 4), "small": (384, 6, 6, 1024, 256, 32)}
HELD_OUT = {"tiny": 65_536, "small": 1_000_000}  # bytes, at most


# ---------------------------------------------------------------------------------------------------------------------
# data


def library_source(limit: int, held_out: int) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 bytes of the standard library's modules, in the order of their names; every sixteenth file is held out of the first."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(root.glob("*.py"))]
    texts = (
        b"".join(file for i, file in enumerate(files) if i % 16 != 8)[:limit],
        b"".join(files[8::16])[:held_out],
    )
    if len(texts[0]) < 100_000 or len(texts[1]) < 8_192:
        raise SystemExit(f"{root} has {sum(map(len, files))} bytes of Python source; this needs 200000 or so")
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return first, second


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
        q, k = rotate(F.rms_norm(q, q.shape[-1:])), rotate(F.rms_norm(k, k.shape[-1:]))
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
        self.previous = nn.Embedding(256, width)  # of the byte before
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
        x = self.embedding(ids) + self.previous(F.pad(ids[:, :-1], (1, 0)))
        for attention, mlp in self.layers:
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------------------------------------
# training


def loss_of(model: nn.Module, ids: torch.Tensor, recipe: str) -> torch.Tensor:
    """Mean cross entropy of each next byte, in nats."""
    with (
        torch.autocast(ids.device.type, torch.bfloat16, enabled=recipe != "fp32"),
        fw.autocast(recipe=RECIPES[recipe]),
    ):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def held_out_loss(model: nn.Module, text: torch.Tensor, batch: int, sequence: int, recipe: str) -> float:
    """loss_of the whole text, in windows that follow one another."""
    windows = text[: (len(text) - 1) // sequence * sequence + 1].unfold(0, sequence + 1, sequence)
    device = next(model.parameters()).device
    losses = []
    model.eval()
    with torch.no_grad():
        for ids in windows.split(batch):
            losses.append(loss_of(model, ids.to(device).long(), recipe) * len(ids))
    model.train()
    return float(torch.stack(losses).sum()) / len(windows)


class Step:
    """One step of training: loss of a batch, gradients, clipping, optimizer. On a GPU it is a CUDA graph after the first few,
    so that the host has next to nothing to do; then `loss` is overwritten by each step."""

    EAGER = 3  # steps before the capture, which warm up what must not happen in it

    def __init__(self, model: nn.Module, recipe: str, lr: float, graph: bool) -> None:
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
        loss = loss_of(self.model, ids, self.recipe)
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


def train(
    recipe: str, text: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace
) -> tuple[list[float], float, float]:
    """Loss in nats per byte of each step, that of the trained model on held_out, and seconds of training."""
    width, layers, heads, hidden, sequence, batch = SIZES[args.size]
    torch.manual_seed(args.seed)
    model = Model(width, layers, heads, hidden, args.moe).to(args.device)
    on_gpu = torch.device(args.device).type == "cuda"
    step_of = Step(model, recipe, args.lr, on_gpu and not args.eager)
    warmup = max(1, args.steps // 20)
    losses = []
    start = time.perf_counter()
    for step, ids in enumerate(batches(text, args.steps, batch, sequence, args.seed)):
        lr = min(
            (step + 1) / warmup, args.final_lr + (1 - args.final_lr) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        )
        losses.append(step_of(ids.to(args.device, non_blocking=True), args.lr * lr))
        if args.every and (step % args.every == 0 or step == args.steps - 1):
            took = time.perf_counter() - start
            print(f"{recipe:>9} step {step:>5} loss {float(losses[-1]):.4f}  {took:.1f} s", flush=True)
    values, took = torch.stack(losses).tolist(), time.perf_counter() - start
    return values, held_out_loss(model, held_out, 8192 // sequence, sequence, recipe), took


def plot(curves: dict[str, list[float]], final: dict[str, float], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for recipe, losses in curves.items():
        span = max(1, len(losses) // 50)
        smooth = [sum(losses[max(0, i - span + 1) : i + 1]) / min(span, i + 1) for i in range(len(losses))]
        axes.plot(smooth, label=f"{recipe}  {final[recipe]:.4f}", linewidth=1)
    axes.set(xlabel="step", ylabel="nats per byte, running mean", title=title)
    axes.legend(title="recipe, loss on files held out")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="bf16,fp8,mxfp8,mxfp4", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--moe", action="store_true", help="experts in place of each MLP")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="on a GPU: no CUDA graph")
    parser.add_argument("--lr", type=float, default=1e-3, help="the largest; a larger one lets runs end farther apart")
    parser.add_argument("--final-lr", type=float, default=0.0, help="the last, as a part of --lr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes", type=int, default=8_000_000, help="of source to train on, at most")
    parser.add_argument("--held-out", type=int, help="of source to compare losses on, at most; default by --size")
    parser.add_argument("--every", type=int, default=20, help="steps between lines; 0: none")
    parser.add_argument("--out", type=Path, help="write the losses as JSON")
    parser.add_argument("--plot", type=Path, help="write the curves as an image")
    args = parser.parse_args()
    names = args.recipes.split(",")
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(f"{', '.join(unknown)}: the recipes are {', '.join(RECIPES)}")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: there must be one at least")
    for path in (args.out, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'fourwave[bench]'")
    args.held_out = HELD_OUT[args.size] if args.held_out is None else args.held_out
    text, held_out = library_source(args.bytes, args.held_out)
    print(
        f"{len(text)} bytes of source and {len(held_out)} held out, {args.size} {'MoE' if args.moe else 'dense'} model on "
        f"{args.device}, {args.steps} steps"
    )
    curves, final, seconds = {}, {}, {}
    for name in names:
        curves[name], final[name], seconds[name] = train(name, text, held_out, args)
    print(f"{'recipe':>9}  loss on files held out, nats per byte")
    for name, loss in final.items():
        far = f"  {100 * (loss / final['bf16'] - 1):+.2f}% of bf16" if "bf16" in final else ""
        print(f"{name:>9}  {loss:.4f}{far}")
    where = torch.cuda.get_device_name() if torch.device(args.device).type == "cuda" else "CPU"
    if args.out:
        record = {
            "device": where, "torch": torch.__version__, "fourwave": fw.__version__, "python": sys.version.split()[0],
            "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "plot", "device")}, "bytes": len(text),
            "bytes_held_out": len(held_out), "seconds": seconds, "held_out": {name: round(loss, 6) for name, loss in final.items()},
            "losses": {name: [round(loss, 5) for loss in losses] for name, losses in curves.items()},
        }  # fmt: skip
        args.out.write_text(json.dumps(record) + "\n")
    if args.plot:
        kind = "MoE" if args.moe else "dense"
        plot(curves, final, args.plot, f"{args.size} {kind} byte model, {args.steps} steps, {where}")


if __name__ == "__main__":
    main()
