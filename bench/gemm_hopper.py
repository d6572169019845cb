"""Time the Hopper GEMM against cuBLAS on an H100 or H200, interleaved in one process, and write a record.

    python bench/gemm_hopper.py --suite llm81 --layouts TN,NN,NT --out record.json
    python bench/gemm_hopper.py --suite sweep --configs all        # every config on a few shapes
    python bench/gemm_hopper.py --suite llm81 --dtype fp8          # e4m3fn, per-tensor scales; fp8_promoted: summed in fp32

cuBLAS is torch.mm, and torch._scaled_mm for FP8 (use_fast_accum for fp8, not for fp8_promoted).

Every row is checked before it is timed: all columns of 128 spread rows and all rows of 128 spread columns, so every output
tile is touched, against float64 with the bound of fourwave.testing. A row that fails prints no speed.
A sample is one CUDA-event interval around the replay of enough captured calls to last about a millisecond; the variants take turns, each round in another order.
Operands are rotated among sets that together exceed twice the L2 cache, so no call finds its inputs there.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm import sm90_config, sm90_launch
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import bounds
from fourwave.testing.llm_shapes import llm81

E4M3 = torch.float8_e4m3fn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": E4M3, "fp8_promoted": E4M3}
SWEEP = (
    (4096, 4096, 4096), (4096, 12288, 4096), (4096, 22016, 4096), (4096, 4096, 11008), (8192, 6144, 4096),
    (8192, 3584, 18944), (16384, 10240, 8192), (8192, 16384, 16384),
)  # fmt: skip
SMALL = (
    (64, 4096, 4096), (128, 4096, 4096), (256, 8192, 8192), (512, 4096, 4096), (1024, 1024, 1024), (1024, 4096, 4096),
    (2048, 2048, 2048), (2048, 4096, 4096),
)  # fmt: skip
LARGE = ((16384, 8192, 28672), (16384, 16384, 53248), (32768, 18432, 16384), (59136, 8192, 32768), (8192, 57344, 8192))
SHAPES = {"sweep": SWEEP, "small": SMALL, "large": LARGE}
SAMPLE_SECONDS = 1e-3


def operands(M: int, N: int, K: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn((K, M) if layout == "NT" else (M, K), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((N, K) if layout == "TN" else (K, N), device="cuda", dtype=torch.bfloat16)
    return a.to(dtype), b.to(dtype)


def views(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """op(a)[M, K], op(b)[K, N]."""
    return (a.mT if layout == "NT" else a), (b.mT if layout == "TN" else b)


def pick(t: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """t.index_select, for FP8 too."""
    return t.view(torch.uint8).index_select(dim, index).view(t.dtype) if t.dtype == E4M3 else t.index_select(dim, index)


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layout: str, alpha: float, u_acc: float) -> float:
    """Largest error over its bound, on 128 rows and 128 columns that touch every tile."""
    op_a, op_b = views(a, b, layout)
    worst = 0.0
    for dim in (0, 1):
        size = out.shape[dim]
        index = torch.linspace(0, size - 1, min(size, 128), device=out.device).round().long()
        part_a, part_b = (pick(op_a, 0, index), op_b) if dim == 0 else (op_a, pick(op_b, 1, index))
        step = max(128, 2**31 // (8 * part_a.shape[1]))  # float64 copies of at most 2 GB
        for start in range(0, max(part_a.shape[0], part_b.shape[1]), step):
            x = part_a if dim == 0 else part_a[start : start + step]
            y = part_b[:, start : start + step] if dim == 0 else part_b
            got = out.index_select(dim, index)
            got = got[:, start : start + step] if dim == 0 else got[start : start + step]
            bound = bounds.gemm_bound(x, y, out.dtype, trans_b=False, alpha=alpha, u_acc=u_acc)
            ratio, _ = bounds.error_ratio(got, alpha * (x.double() @ y.double()), bound)
            worst = max(worst, ratio)
    return worst


def time_interleaved(variants: dict[str, Callable[[int], None]], samples: int) -> dict[str, list[float]]:
    """Seconds per call, `samples` of each variant. A variant takes the number of the operand set to use.

    A variant's calls are captured as one CUDA graph, so that the host's speed does not show.
    """

    def interval() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    counts: dict[str, int] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in variants.items():
        call(0)
        start, end = interval()
        start.record()
        call(1)
        call(2)
        end.record()
        end.synchronize()
        counts[name] = max(2, math.ceil(SAMPLE_SECONDS / max(start.elapsed_time(end) * 1e-3 / 2, 1e-6)))
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for turn in range(counts[name]):
                call(turn)
    order = list(variants)
    shuffle = random.Random(0).shuffle
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(samples):
        shuffle(order)  # a variant's clock depends on what ran before it
        for name in order:
            start, end = interval()
            start.record()
            graphs[name].replay()
            end.record()
            events.append((name, start, end))
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, start, end in events:
        times[name].append(start.elapsed_time(end) * 1e-3 / counts[name])
    return times


def host_seconds(calls: int = 2000) -> dict[str, float]:
    """Host time of one warm call of a tiny product, queue never full; run_gemm is the part past fw.gemm's checks."""
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    result = {}
    problem = GemmProblem(64, 64, 64, "TN", a.dtype, a.dtype, a.dtype, device_type="cuda")
    backend = registry.get("hopper")
    for name, call in {
        "fw.gemm": lambda: fw.gemm(a, a, out=out, backend="hopper"),
        "fw.gemm, no out": lambda: fw.gemm(a, a, backend="hopper"),
        "backend.run_gemm": lambda: backend.run_gemm(problem, None, GemmTensors(a, a, out)),
        "torch.mm": lambda: torch.mm(a, a.mT, out=out),
    }.items():
        times = []
        for _ in range(calls // 200):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            times.append((time.perf_counter() - start) / 200)
        result[name] = statistics.median(times)
    return result


def machine() -> dict[str, object]:
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    return dict(zip(fields.split(","), (value.strip() for value in query.split(",")), strict=True))


def measure(
    name: str,
    M: int,
    N: int,
    K: int,
    layout: str,
    precision: str,
    sweep: bool,
    groups: list[int],
    tiles: int | None,
    samples: int,
    l2_bytes: int,
) -> tuple[dict[str, Any], str]:
    """One row: its record, without times where a check failed, and what to print."""
    dtype, promote = DTYPES[precision], precision == "fp8_promoted"
    is_fp8 = dtype == E4M3
    out_dtype = torch.bfloat16 if is_fp8 else dtype
    problem = GemmProblem(M, N, K, layout, dtype, dtype, out_dtype, device_type="cuda")
    num_sets = max(1, math.ceil(2 * l2_bytes / (dtype.itemsize * (M * K + N * K))))
    sets = [operands(M, N, K, layout, dtype) for _ in range(num_sets)]
    scales = torch.tensor([0.75], device="cuda"), torch.tensor([0.25], device="cuda")
    out = torch.empty(M, N, device="cuda", dtype=out_dtype)
    trans = {"trans_a": layout == "NT", "trans_b": layout == "TN"}
    configs: dict[str, Any] = {"fourwave": None}
    if sweep:
        tried = [
            replace(c, group=g) for c in sm90_config.candidates(problem, promote)[:tiles] for g in (groups or [c.group])
        ]
        configs = {str(config): config for config in tried}

    def ours(turn: int, config: Any) -> None:
        a, b = sets[turn % num_sets]
        if is_fp8:
            sm90_launch.run(problem, config, a, b, out, scales=scales, promote=promote)
        else:
            fw.gemm(a, b, out=out, backend="hopper", config=config, **trans)

    def cublas(turn: int) -> None:
        a, b = views(*sets[turn % num_sets], layout)
        if is_fp8:
            torch._scaled_mm(a, b, *scales, out_dtype=out_dtype, use_fast_accum=not promote)
        else:
            torch.mm(a, b, out=out)

    alpha, u_acc = (0.75 * 0.25, bounds.hopper_fp8_u_acc(K, promote)) if is_fp8 else (1.0, bounds.U_FP32)
    errors = {}
    for label, config in configs.items():
        out.fill_(float("nan"))
        ours(0, config)
        errors[label] = check(out, *sets[0], layout, alpha, u_acc)
    row: dict[str, Any] = {"name": name, "layout": layout, "M": M, "N": N, "K": K, "error_over_bound": errors}
    head = f"{layout} {M:6} {N:6} {K:6}"
    if not all(error <= 1 for error in errors.values()):
        return row, f"{head}  WRONG: {errors}"
    variants: dict[str, Callable[[int], None]] = {"cublas": cublas}
    variants |= {label: functools.partial(ours, config=config) for label, config in configs.items()}
    times = time_interleaved(variants, samples)
    medians = {label: statistics.median(values) for label, values in times.items()}
    best = min(configs, key=lambda label: medians[label])
    row["config"] = str(configs[best] or sm90_config.default_config(problem, promote)[0])
    row["seconds"] = times
    row["ratio"] = medians["cublas"] / medians[best]
    tflops = {label: problem.flops / seconds / 1e12 for label, seconds in medians.items()}
    lines = [f"{head}  cublas {tflops['cublas']:6.1f}  ours {tflops[best]:6.1f}  {row['ratio']:.3f}  {row['config']}"]
    if sweep:
        lines += [f"      {tflops[label]:6.1f}  {label}" for label in configs]
    return row, "\n".join(lines)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["ratio"] for row in rows]
    return {
        "rows": len(ratios),
        "geomean": statistics.geometric_mean(ratios),
        "median": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
        "wins": sum(ratio >= 1 for ratio in ratios),
        "below_0.95": sum(ratio < 0.95 for ratio in ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["llm81", *SHAPES], default="sweep")
    parser.add_argument("--layouts", default="TN")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--configs", choices=["default", "all"], default="default")
    parser.add_argument("--groups", default="", help="with --configs all: each config at each of these band widths")
    parser.add_argument("--tiles", type=int, help="with --configs all: the first n candidates only")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row of the suite")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    began = time.monotonic()
    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    layouts = args.layouts.split(",")
    groups = [int(group) for group in args.groups.split(",") if group]
    rows: list[dict[str, Any]] = []
    skipped = 0
    for layout in layouts:
        if args.suite == "llm81":
            shapes = [(str(row), row.gemm(layout)) for row in llm81()]
        else:
            shapes = [(args.suite, shape) for shape in SHAPES[args.suite]]
        for name, shape in shapes[:: args.every]:
            if time.monotonic() - began > args.seconds:
                skipped += 1
                continue
            row, text = measure(
                name, *shape, layout, args.dtype, args.configs == "all", groups, args.tiles, args.samples, l2_bytes
            )
            rows.append(row)
            print(text, flush=True)
    host = host_seconds()
    timed = [row for row in rows if "ratio" in row]
    failed = len(rows) - len(timed)
    by_layout = {
        layout: summary([row for row in timed if row["layout"] == layout])
        for layout in layouts
        if any(row["layout"] == layout for row in timed)
    }
    record = {
        "what": f"{args.dtype} GEMM: ratio is cuBLAS's median time over fourwave's; graph replay, operands not in L2",
        "command": " ".join(["python", "bench/gemm_hopper.py", *sys.argv[1:]]),
        "commit": args.commit,
        "device": before,
        "device_after": machine(),
        "versions": {
            "fourwave": fw.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvidia-cutlass-dsl": version("nvidia-cutlass-dsl"),
            "python": sys.version.split()[0],
        },
        "samples": args.samples,
        "host_seconds": host,
        "summary": by_layout,
        "failed_checks": failed,
        "rows_not_started": skipped,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    print(json.dumps({"summary": by_layout, "host_seconds": host, "failed": failed, "not started": skipped}, indent=1))
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
