"""Forward and backward pass of one linear layer on an H100 or H200, by recipe, against BF16 and torchao's float8; writes a record.

    python bench/linear_hopper.py --every 4 --samples 5 --preheat 1 --torchao --out record.json

The layers and batches are those of the suite llm81: y, the gradient of x and the gradient of the weight, BF16 parameters and
activations, no bias, everything from BF16 tensors each time. Variants, interleaved as in bench/gemm_hopper.py, each captured as a
CUDA graph of whole passes, so that the host's speed does not show:

    bf16            torch.nn.Linear
    fourwave bf16   fw.nn.Linear without a recipe
    current, delayed, block, mxfp8   with CurrentScaling, DelayedScaling (both fast_accum=True), BlockScaling, MXFP8
    torchao         torchao.float8, tensorwise recipe (dynamic scales; its forward accumulates fast, its gradients do not),
                    compiled by torch.compile for the shape

Each is checked before it is timed: y and both gradients after four passes, against the BF16 layer, relative to their norms. That is a
check of the wiring; the kernels are checked element by element in the other benches and the tests.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import Measured, conclude, cutedsl, machine, preheat, record_head, run_rows, summary, time_interleaved

import fourwave as fw
from fourwave.recipes import MXFP8, BlockScaling, CurrentScaling, DelayedScaling, Recipe
from fourwave.testing.llm_shapes import llm81

BF16 = torch.bfloat16
RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(fast_accum=True),
    "delayed": DelayedScaling(fast_accum=True),
    "block": BlockScaling(),
    "mxfp8": MXFP8(),
}
# Relative to the norm: two rounded operands, of which e5m2 has 2 bits and e4m3 3; BF16 results differ by their roundings.
LIMITS = {"bf16": 0.0, "fourwave bf16": 0.004}
QUANTIZED_LIMIT = 0.1


def torchao_layer(weight: torch.Tensor) -> torch.nn.Module:
    from torchao.float8 import (  # type: ignore[import-not-found]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight)
    layer = convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name("tensorwise"))
    return torch.compile(layer, dynamic=False)  # type: ignore[return-value]


def compiled_layers(shapes: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], torch.nn.Module]:
    """torchao's layer for each (M, N, K), after a first pass, which compiles it."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = 4 * len(shapes) + 8  # one for each shape and pass
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would run uncompiled
    layers = {}
    for M, N, K in shapes:
        layer = layers[M, N, K] = torchao_layer(torch.randn(N, K, device="cuda", dtype=BF16) / math.sqrt(K))
        x = torch.randn(M, K, device="cuda", dtype=BF16, requires_grad=True)
        passes(layer, next(layer.parameters()), x, torch.randn(M, N, device="cuda", dtype=BF16), None)
    return layers


def passes(layer: Any, weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, recipe: Recipe | None) -> Any:
    """y and the gradients of x and the weight."""
    if recipe is None:
        y = layer(x)
    else:
        with fw.autocast(recipe=recipe):
            y = layer(x)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def measure(
    name: str, M: int, N: int, K: int, variants: list[str], torchao: torch.nn.Module | None, samples: int, l2_bytes: int
) -> tuple[dict[str, Any], str]:
    """One row: its record, without times where a check failed, and what to print."""
    num_sets = max(1, math.ceil(2 * l2_bytes / (2 * (M * K + M * N))))
    xs = [torch.randn(M, K, device="cuda", dtype=BF16, requires_grad=True) for _ in range(num_sets)]
    dys = [torch.randn(M, N, device="cuda", dtype=BF16) for _ in range(num_sets)]
    if torchao is None:
        value = torch.randn(N, K, device="cuda", dtype=BF16) / math.sqrt(K)
    else:
        value = next(torchao.parameters()).detach()
    calls: dict[str, Any] = {}
    for label in variants:
        weight, recipe = torch.nn.Parameter(value), RECIPES.get(label)
        if label == "torchao":
            layer: Any = torchao
            weight = next(layer.parameters())
        else:
            kind = torch.nn.Linear if label == "bf16" else fw.nn.Linear
            layer = kind(K, N, bias=False, device="cuda", dtype=BF16)
            layer.weight = weight

        def call(turn: int, layer: Any = layer, weight: Any = weight, recipe: Any = recipe) -> Any:
            return passes(layer, weight, xs[turn % num_sets], dys[turn % num_sets], recipe)

        calls[label] = call
    row: dict[str, Any] = {"name": name, "M": M, "N": N, "K": K, "error": {}}
    head = f"{M:6} {N:6} {K:6}"
    right: Any = None
    for label, call in calls.items():
        for _ in range(3):
            call(0)
        got = call(0)
        if right is None:
            right = got
        errors = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(got, right, strict=True)]
        row["error"][label] = errors
        if not max(errors) <= LIMITS.get(label, QUANTIZED_LIMIT):
            return row, f"{head}  WRONG: {label} {errors}"
    del right, got
    timed: dict[str, Callable[[int], None]] = {label: functools.partial(_drop, call) for label, call in calls.items()}
    row["seconds"] = time_interleaved(timed, samples)
    medians = {label: statistics.median(times) for label, times in row["seconds"].items()}
    row["over_bf16"] = {label: medians["bf16"] / seconds for label, seconds in medians.items()}
    if "torchao" in medians:
        row["over_torchao"] = {label: medians["torchao"] / seconds for label, seconds in medians.items()}
    shown = "  ".join(
        f"{label} {seconds * 1e6:.1f} ({row['over_bf16'][label]:.3f})" for label, seconds in medians.items()
    )
    return row, f"{head}  {shown} us"


def _drop(call: Callable[[int], Any], turn: int) -> None:
    call(turn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(["bf16", "fourwave bf16", *RECIPES]), help="the first is bf16")
    parser.add_argument("--torchao", action="store_true", help="torchao beside them; needs torchao")
    parser.add_argument("--preheat", type=float, default=0.0, help="seconds of products before the first row")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row of the suite")
    parser.add_argument("--part", default="0/1", help="i/n: of those rows the i-th of n parts")
    parser.add_argument("--wait", type=Path, help="compile torchao's layers, then measure as soon as this file exists")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    variants = args.variants.split(",") + ["torchao"] * args.torchao
    if variants[0] != "bf16":
        parser.error("--variants: bf16 first, which the others are compared with")
    part, parts = map(int, args.part.split("/"))
    shapes = llm81()[:: args.every][part::parts]
    layers = compiled_layers([shape.gemm("TN") for shape in shapes]) if args.torchao else {}
    torch.cuda.empty_cache()  # while it waits others may measure
    print(f"compiled {len(layers)}", flush=True)
    while args.wait is not None and not args.wait.exists():
        time.sleep(0.1)
    began = time.monotonic()
    preheat(args.preheat)
    todo: list[tuple[dict[str, Any], Callable[[], Measured]]] = []
    for shape in shapes:
        M, N, K = shape.gemm("TN")
        layer = layers.get((M, N, K))
        call = functools.partial(measure, str(shape), M, N, K, variants, layer, args.samples, l2_bytes)
        todo.append(({"M": M, "N": N, "K": K}, call))

    def record(rows: list[dict[str, Any]], skipped: int, ended: bool) -> dict[str, Any]:
        timed = [row for row in rows if "seconds" in row]
        tables = ["over_bf16", *["over_torchao"] * args.torchao]
        by_variant = {
            f"{label} {table}": summary([{"ratio": row[table][label]} for row in timed])
            for table in tables
            for label in variants
            if timed
        }
        versions = cutedsl() | ({"torchao": version("torchao")} if args.torchao else {})
        what = "forward and backward pass of a linear layer: median time of the BF16 layer, and of torchao's, over each variant's; graph replay, operands not in L2"
        made = {
            **record_head(__file__, what, args, before, machine() if ended else None, versions),
            "summary": by_variant,
            "failed_checks": len(rows) - len(timed),
            "rows_not_started": skipped,
            "rows": rows,
        }
        if args.out:
            args.out.write_text(json.dumps(made) + "\n")
        return made

    with fw.use_backend("hopper"):
        rows, skipped = run_rows(todo, began + args.seconds, functools.partial(record, ended=False))
    conclude(record(rows, skipped, ended=True), began)


if __name__ == "__main__":
    main()
