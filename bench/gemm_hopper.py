"""Time the Hopper GEMM against cuBLAS on an H100 or H200, interleaved in one process, and write a record.

    python bench/gemm_hopper.py --suite llm81 --layouts TN,NN,NT --out record.json
    python bench/gemm_hopper.py --suite decode --rows 1,16,64      # the suite's 27 weights at few rows
    python bench/gemm_hopper.py --suite sweep --configs all        # every config on a few shapes
    python bench/gemm_hopper.py --suite llm81 --dtype fp8          # e4m3fn, float32 sums every 128 k; fp8_fast: the unit's own
    python bench/gemm_hopper.py --suite decode --dtype mxfp4       # weights in MXFP4, a in bf16, against torch.mm in bf16
    python bench/gemm_hopper.py --suite decode --dtype mxfp4_shuffled  # the same, after fw.preshuffle; and plain
    python bench/gemm_hopper.py --suite promote --dtype fp8 --scaling block --configs all --deepgemm

cuBLAS is torch.mm, and torch._scaled_mm for FP8 (use_fast_accum for fp8_fast, not for fp8), with the scales of --scaling.

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
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm import sm90_choice, sm90_tiles
from fourwave.ops.gemm.preshuffled_mxfp4 import shuffle_codes, shuffle_scale
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import bounds
from fourwave.testing.llm_shapes import llm81

E4M3 = torch.float8_e4m3fn
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": E4M3,
    "fp8_fast": E4M3,
    "mxfp4": torch.bfloat16,
    "mxfp4_shuffled": torch.bfloat16,
}
SWEEP = (
    (4096, 4096, 4096), (4096, 12288, 4096), (4096, 22016, 4096), (4096, 4096, 11008), (8192, 6144, 4096),
    (8192, 3584, 18944), (16384, 10240, 8192), (8192, 16384, 16384),
)  # fmt: skip
SMALL = (
    (64, 4096, 4096), (128, 4096, 4096), (256, 8192, 8192), (512, 4096, 4096), (1024, 1024, 1024), (1024, 4096, 4096),
    (2048, 2048, 2048), (2048, 4096, 4096),
)  # fmt: skip
LARGE = ((16384, 8192, 28672), (16384, 16384, 53248), (32768, 18432, 16384), (59136, 8192, 32768), (8192, 57344, 8192))
PROMOTE = ((8192, 8192, 8192), (4096, 12288, 4096), (8192, 4096, 14336), (4096, 4096, 4096), (8192, 28672, 4096))
SHAPES = {"sweep": SWEEP, "small": SMALL, "large": LARGE, "promote": PROMOTE}
SCALINGS = {"block": ("1x128", "128x128"), "blocks_of_both": ("1x128", "1x128")}  # of blocks
SAMPLE_SECONDS = 1e-3


def operands(M: int, N: int, K: int, layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn((K, M) if layout == "NT" else (M, K), device="cuda", dtype=torch.bfloat16)
    b = torch.randn((N, K) if layout == "TN" else (K, N), device="cuda", dtype=torch.bfloat16)
    return a.to(dtype), b.to(dtype)


def mxfp4_weights(N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes, and scales from 1/16 to 8."""
    codes = torch.randint(0, 256, (N, K // 2), device="cuda", dtype=torch.uint8)
    return codes, torch.randint(123, 131, (N, K // 32), device="cuda", dtype=torch.uint8).view(torch.float8_e8m0fnu)


def in_bf16(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[N, K], exactly."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")
    b = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], -1).flatten(1)
    return (b * scale.float().repeat_interleave(32, 1)).to(torch.bfloat16)


def views(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """op(a)[M, K], op(b)[K, N]."""
    return (a.mT if layout == "NT" else a), (b.mT if layout == "TN" else b)


def pick(t: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """t.index_select, for FP8 too."""
    if t.dtype.itemsize == 1:
        return t.view(torch.uint8).index_select(dim, index).view(t.dtype)
    return t.index_select(dim, index)


class Truth:
    """Exact results and bounds of 128 rows and 128 columns that touch every tile."""

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, layout: str, out_dtype: torch.dtype, u_acc: float,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, scaling: str,
    ) -> None:  # fmt: skip
        """scale_a, scale_b: as broadcast against op(a), op(b); those of blocks as stored."""
        op_a, op_b = views(a, b, layout)
        scalings = SCALINGS.get(scaling)
        self.parts: list[tuple[int, torch.Tensor, int, torch.Tensor, torch.Tensor]] = []
        for dim in (0, 1):
            size = (op_a.shape[0], op_b.shape[1])[dim]
            index = torch.linspace(0, size - 1, min(size, 128), device=a.device).round().long()
            part_a, part_b = (pick(op_a, 0, index), op_b) if dim == 0 else (op_a, pick(op_b, 1, index))
            factor_a = factor_b = None
            if scale_a is not None and scale_b is not None:
                factor_a, factor_b = scale_a.double(), scale_b.double()
                if scalings is not None:
                    factor_a = expand_scale(scale_a, scalings[0], tuple(a.shape), True)
                    factor_b = expand_scale(scale_b, scalings[1], tuple(b.shape), True).T
                if factor_a.numel() > 1 and dim == 0:
                    factor_a = factor_a[index]
                if factor_b.numel() > 1 and dim == 1:
                    factor_b = factor_b[:, index]
            step = max(128, 2**31 // (8 * part_a.shape[1]))  # float64 copies of at most 2 GB
            for start in range(0, max(part_a.shape[0], part_b.shape[1]), step):
                rows = slice(None) if dim == 0 else slice(start, start + step)
                columns = slice(start, start + step) if dim == 0 else slice(None)
                x, y = part_a[rows].double(), part_b[:, columns].double()
                if factor_a is not None and factor_b is not None:
                    x = x * (factor_a[rows] if factor_a.numel() > 1 else factor_a)
                    y = y * (factor_b[:, columns] if factor_b.numel() > 1 else factor_b)
                bound = bounds.gemm_bound(x, y, out_dtype, trans_b=False, u_acc=u_acc)
                if factor_a is not None:
                    bound += 4 * bounds.U_FP32 * (x.abs() @ y.abs())  # the scales' products
                self.parts.append((dim, index, start, x @ y, bound))
            if dim == 0 and size <= 128:
                break  # all rows

    def error(self, out: torch.Tensor) -> float:
        """Largest error over its bound."""
        worst = 0.0
        for dim, index, start, exact, bound in self.parts:
            got = out.index_select(dim, index)
            stop = start + exact.shape[1 - dim]
            got = got[:, start:stop] if dim == 0 else got[start:stop]
            ratio, _ = bounds.error_ratio(got, exact, bound)
            worst = max(worst, ratio)
        return worst


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def captured(call: Callable[[int], None], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls. torch.cuda.graph would collect garbage and empty the allocator's cache each time, which takes longer
    than all samples of a small product."""
    graph, stream = torch.cuda.CUDAGraph(), _capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for turn in range(count):
                call(turn)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


ROTATION = 8
"""Operands in turn take as many times the memory of L2: of what leaves it first, a part outlives a round through twice as much."""


def time_interleaved(variants: dict[str, Callable[[int], None]], samples: int) -> dict[str, list[float]]:
    """Seconds per call, `samples` of each variant. A variant takes the number of the operand set to use.

    A variant's calls are captured as one CUDA graph, so that the host's speed does not show.
    """

    def interval() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    # Each graph's buffers are allocated anew, and while it is captured the allocator gives nothing back.
    free, total = torch.cuda.mem_get_info()
    if free < total / 2:
        torch.cuda.empty_cache()
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
        seconds = max(start.elapsed_time(end) * 1e-3 / 2, 1e-6)
        counts[name] = max(1 if seconds > 4 * SAMPLE_SECONDS else 2, math.ceil(SAMPLE_SECONDS / seconds))
        graphs[name] = captured(call, counts[name])
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


WRITE_SECONDS = 5.0
Measured = tuple[dict[str, Any], str]


def run_rows(
    todo: list[tuple[dict[str, Any], Callable[[], Measured]]],
    deadline: float,
    write: Callable[[list[dict[str, Any]], int], object],
) -> tuple[list[dict[str, Any]], int]:
    """Records of the rows of `todo`, each what it is called and what measures it; and how many did not start, because it was past
    `deadline` (time.monotonic) or because the device answers no more.

    A row that raises is one whose check failed. `write` gets both every few seconds: a run that is killed leaves what it had.
    """
    written = time.monotonic()
    rows: list[dict[str, Any]] = []
    for label, call in todo:
        if time.monotonic() > deadline:
            break
        failed = ""
        try:
            row, text = call()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if failed:
            row, text = (
                label | {"error": failed},
                f"{' '.join(map(str, label.values()))}  Error: {failed.splitlines()[0]}",
            )
        rows.append(row)
        print(text, flush=True)
        if failed:
            if not device_answers():
                break
            torch.cuda.empty_cache()
        if time.monotonic() - written > WRITE_SECONDS:
            write(rows, len(todo) - len(rows))
            written = time.monotonic()
    return rows, len(todo) - len(rows)


def conclude(record: dict[str, Any], began: float) -> None:
    """Print the summary of a record (of linear_hopper.py and others); exit with 1 where a check failed. began: of time.monotonic."""
    for what, numbers in record["summary"].items():
        print(what, {key: round(value, 3) for key, value in numbers.items()})
    seconds = round(time.monotonic() - began)
    print("failed", record["failed_checks"], "not started", record["rows_not_started"], "seconds", seconds)
    if record["failed_checks"]:
        sys.exit(1)


def device_answers() -> bool:
    """Not after a kernel's illegal access or instruction, for the rest of the process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


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
    need_hopper()
    fields = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    query = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[0]
    return dict(zip(fields.split(","), (value.strip() for value in query.split(",")), strict=True))


def record_head(
    bench: str, what: str, args: argparse.Namespace, before: Any, after: Any, versions: dict[str, Any]
) -> dict[str, Any]:
    """What every record begins with. bench: the script's __file__; versions: of what it measures besides PyTorch."""
    return {
        "what": what,
        "command": " ".join(["python", f"bench/{Path(bench).name}", *sys.argv[1:]]),
        "commit": args.commit,
        "device": before,
        "device_after": after,
        "versions": {"fourwave": fw.__version__, "torch": torch.__version__, "cuda": torch.version.cuda, **versions},
        "samples": args.samples,
    }


def cutedsl(*, python: bool = False) -> dict[str, str]:
    """For `record_head`: version of CuTe DSL, and of Python."""
    found = {"nvidia-cutlass-dsl": version("nvidia-cutlass-dsl")}
    return found | {"python": sys.version.split()[0]} if python else found


def need_hopper() -> None:
    """Ends with the reason where there is nothing to measure."""
    if (why := registry.get("hopper").unavailable()) is not None:
        raise SystemExit(f"this bench measures an H100 or H200: {why}")


def preheat(seconds: float) -> None:
    """Bring the chip to the clock that it can keep."""
    need_hopper()
    x = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()


def measure(
    name: str,
    M: int,
    N: int,
    K: int,
    layout: str,
    precision: str,
    scaling: str,
    sweep: bool,
    groups: list[int],
    tiles: str,
    samples: int,
    l2_bytes: int,
    deepgemm: bool,
) -> tuple[dict[str, Any], str]:
    """One row: its record, without times where a check failed, and what to print."""
    dtype, fast = DTYPES[precision], precision == "fp8_fast"
    is_fp8 = dtype == E4M3
    out_dtype = torch.bfloat16 if is_fp8 else dtype
    problem = GemmProblem(M, N, K, layout, dtype, dtype, out_dtype, device_type="cuda", fast_accum=fast)
    if is_fp8:
        a_scaling, b_scaling = SCALINGS.get(scaling, (scaling, scaling))
        problem = replace(problem, a_scaling=a_scaling, b_scaling=b_scaling)
    num_sets = max(1, math.ceil(ROTATION * l2_bytes / (dtype.itemsize * (M * K + N * K))))
    sets = [operands(M, N, K, layout, dtype) for _ in range(num_sets)]
    packed: list[tuple[torch.Tensor, torch.Tensor]] = []
    in_order: list[tuple[torch.Tensor, torch.Tensor]] = []
    if precision.startswith("mxfp4"):
        shuffled = precision == "mxfp4_shuffled"
        problem = replace(problem, b_dtype=torch.uint8, b_scaling="1x32", b_preshuffled=shuffled)
        packed = [mxfp4_weights(N, K) for _ in range(math.ceil(ROTATION * l2_bytes * 32 / (17 * N * K)))]
        sets[0] = sets[0][0], in_bf16(*packed[0])
        if shuffled:
            in_order = packed
            packed = [(shuffle_codes(codes), shuffle_scale(scale)) for codes, scale in packed]
    scale_a = scale_b = theirs_a = theirs_b = None
    if is_fp8 and scaling == "tensor":
        scale_a, scale_b = torch.tensor(0.75, device="cuda"), torch.tensor(0.25, device="cuda")
    elif is_fp8 and scaling in SCALINGS:
        scale_a, scale_b = (
            torch.rand(shape or (), device="cuda") + 0.5 for shape in (problem.a_scale_shape, problem.b_scale_shape)
        )
        # cuBLASLt's: 1x128 with rows contiguous; 128x128 padded so that a column of blocks starts at a multiple of 4.
        k_blocks = scale_b.shape[1]
        padded = scale_b.new_zeros(scale_b.shape[0], -(-k_blocks // 4) * 4)
        padded[:, :k_blocks] = scale_b
        theirs_a = scale_a.T.contiguous().T
        theirs_b = padded[:, :k_blocks].T if scaling == "block" else scale_b.T.contiguous()
    elif is_fp8:
        scale_a, scale_b = torch.rand(M, 1, device="cuda") + 0.5, torch.rand(1, N, device="cuda") + 0.5
    if theirs_a is None:
        theirs_a, theirs_b = scale_a, scale_b
    out = torch.empty(M, N, device="cuda", dtype=out_dtype)
    trans = {"trans_a": layout == "NT", "trans_b": layout == "TN"}
    configs: dict[str, Any] = {"fourwave": None}
    if sweep:
        tried = [
            replace(c, group=g)
            for c in sm90_tiles.candidates(problem)
            for g in (groups or [c.group])
            if tiles in (c.schedule, "")
        ]
        configs = {str(config): config for config in tried}
    backend = registry.get("hopper")

    def ours(turn: int, config: Any) -> None:
        a, b = sets[turn % num_sets]
        if packed:
            codes, scale = packed[turn % len(packed)]
            backend.run_gemm(problem, config, GemmTensors(a, codes, out, b_scale=scale))
        elif is_fp8:
            backend.run_gemm(problem, config, GemmTensors(a, b, out, a_scale=scale_a, b_scale=scale_b))
        else:
            fw.gemm(a, b, out=out, backend="hopper", config=config, **trans)

    def cublas(turn: int) -> None:
        a, b = views(*sets[turn % num_sets], layout)
        if is_fp8:
            torch._scaled_mm(a, b, theirs_a, theirs_b, out_dtype=out_dtype, use_fast_accum=fast)
        else:
            torch.mm(a, b, out=out)

    u_acc = bounds.hopper_fp8_u_acc(K, not fast) if is_fp8 else bounds.U_FP32
    truth = Truth(*sets[0], layout, out_dtype, u_acc, scale_a, scale_b, scaling)
    errors = {}
    for label, config in configs.items():
        out.fill_(float("nan"))
        ours(0, config)
        errors[label] = truth.error(out)
    of_plain = replace(problem, b_preshuffled=False)

    def plain(turn: int) -> None:
        codes, scale = in_order[turn % len(in_order)]
        backend.run_gemm(of_plain, None, GemmTensors(sets[turn % num_sets][0], codes, out, b_scale=scale))

    if problem.b_preshuffled:
        out.fill_(float("nan"))
        plain(0)
        errors["plain"] = truth.error(out)
    row: dict[str, Any] = {"name": name, "layout": layout, "M": M, "N": N, "K": K, "error_over_bound": errors}
    head = f"{layout} {M:6} {N:6} {K:6}"
    if not all(error <= 1 for error in errors.values()):
        return row, f"{head}  WRONG: {errors}"
    try:
        cublas(0)
    except RuntimeError as error:
        row["cublas_refuses"] = str(error).splitlines()[0]
        if not deepgemm:
            return row, f"{head}  cublas refuses: {row['cublas_refuses']}"
    variants: dict[str, Callable[[int], None]] = {} if "cublas_refuses" in row else {"cublas": cublas}
    if deepgemm:
        import deep_gemm  # type: ignore[import-not-found]  # its scales of a are transposed beforehand

        turned = deep_gemm.get_mn_major_tma_aligned_tensor(scale_a)

        def theirs(turn: int) -> None:
            a, b = sets[turn % num_sets]
            deep_gemm.fp8_gemm_nt((a, turned), (b, scale_b), out)

        variants["deepgemm"] = theirs
    if problem.b_preshuffled:
        variants["plain"] = plain
    variants |= {label: functools.partial(ours, config=config) for label, config in configs.items()}
    times = time_interleaved(variants, samples)
    medians = {label: statistics.median(values) for label, values in times.items()}
    best = min(configs, key=lambda label: medians[label])
    row["config"] = "the grouped weight gradient's"
    if scaling != "blocks_of_both":
        row["config"] = str(configs[best] or sm90_choice.default_config(problem)[0])
    row["seconds"] = times
    if "cublas" in medians:
        row["ratio"] = medians["cublas"] / medians[best]
    if deepgemm:
        row["ratio_deepgemm"] = medians["deepgemm"] / medians[best]
    if M <= 256:
        shown, unit = {label: seconds * 1e6 for label, seconds in medians.items()}, "us"
        read = dtype.itemsize * (M * K + N * K) + out_dtype.itemsize * M * N
        if packed:
            read -= dtype.itemsize * N * K - 17 * N * K // 32
        unit += f" ({read / medians[best] / 1e12:.2f} TB/s)"
    else:
        shown, unit = {label: problem.flops / seconds / 1e12 for label, seconds in medians.items()}, "TFLOP/s"
    compared = f"ours {shown[best]:6.1f} {unit}"
    if "cublas" in medians:
        compared = f"cublas {shown['cublas']:6.1f}  {compared}  {row['ratio']:.3f}"
    if deepgemm:
        compared += f"  deepgemm {shown['deepgemm']:6.1f}  {row['ratio_deepgemm']:.3f}"
    if "plain" in medians:
        compared += f"  plain {shown['plain']:6.1f}"
    lines = [f"{head}  {compared}  {row['config']}"]
    if sweep:
        lines += [f"      {shown[label]:6.1f}  {label}" for label in configs]
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
    parser.add_argument("--suite", choices=["llm81", "decode", *SHAPES], default="sweep")
    parser.add_argument("--rows", default="1,16,64", help="M of the suite decode")
    parser.add_argument("--layouts", default="TN")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument(
        "--scaling",
        choices=["tensor", "row", *SCALINGS],
        default="tensor",
        help="of FP8 operands; block: 1x128 of a with 128x128 of b; blocks_of_both: 1x128 of both, llm81's weight gradients as TN",
    )
    parser.add_argument("--preheat", type=float, default=0.0, help="seconds of products before the first row")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--configs", choices=["default", "all"], default="default")
    parser.add_argument("--groups", default="", help="with --configs all: each config at each of these band widths")
    parser.add_argument("--tiles", default="", help="with --configs all: only this schedule")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row of the suite")
    parser.add_argument("--deepgemm", action="store_true", help="with --scaling block: DeepGEMM beside cuBLASLt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.deepgemm and (args.dtype, args.scaling) != ("fp8", "block"):
        parser.error("--deepgemm compares --dtype fp8 --scaling block")

    began = time.monotonic()
    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    layouts = args.layouts.split(",")
    groups = [int(group) for group in args.groups.split(",") if group]
    todo: list[tuple[dict[str, Any], Callable[[], Measured]]] = []
    for layout in layouts:
        if args.suite == "llm81":
            gradients = args.scaling == "blocks_of_both"
            shapes = [(str(row), row.gemm("NT" if gradients else layout)) for row in llm81()]
        elif args.suite == "decode":
            weights = [row for row in llm81() if row.microbatch == 1]
            rows_m = [int(m) for m in args.rows.split(",")]
            shapes = [(f"{w.model} {w.layer}", (m, *w.gemm("TN")[1:])) for m in rows_m for w in weights]
        else:
            shapes = [(args.suite, shape) for shape in SHAPES[args.suite]]
        for name, (M, N, K) in shapes[:: args.every]:
            label = {"layout": layout, "M": M, "N": N, "K": K}
            call = functools.partial(
                measure, name, M, N, K, layout, args.dtype, args.scaling, args.configs == "all", groups, args.tiles, args.samples,
                l2_bytes, args.deepgemm,
            )  # fmt: skip
            todo.append((label, call))
    preheat(args.preheat)

    def record(rows: list[dict[str, Any]], skipped: int, ended: bool) -> dict[str, Any]:
        timed = [row for row in rows if "ratio" in row]
        refused = sum("cublas_refuses" in row for row in rows)
        by_layout = {
            layout: summary([row for row in timed if row["layout"] == layout])
            for layout in layouts
            if any(row["layout"] == layout for row in timed)
        }
        if args.suite == "decode":
            by_layout |= {
                f"{layout}, M={m}": summary([row for row in timed if row["layout"] == layout and row["M"] == m])
                for layout in layouts
                for m in sorted({row["M"] for row in timed if row["layout"] == layout})
            }
        what = f"{args.dtype}{f' ({args.scaling} scales)' if 'fp8' in args.dtype else ''} GEMM: ratio is cuBLAS's median time over fourwave's; graph replay, operands not in L2"
        after = machine() if ended else None
        made = {
            **record_head(__file__, what, args, before, after, cutedsl(python=True)),
            "host_seconds": host_seconds() if ended and device_answers() else {},
            "summary": by_layout,
            "failed_checks": len(rows) - len(timed) - refused,
            "refused_by_cublas": refused,
            "rows_not_started": skipped,
            "rows": rows,
        }
        if args.out:
            args.out.write_text(json.dumps(made) + "\n")
        return made

    rows, skipped = run_rows(todo, began + args.seconds, functools.partial(record, ended=False))
    made = record(rows, skipped, ended=True)
    shown = {"summary": made["summary"], "host_seconds": made["host_seconds"], "failed": made["failed_checks"]}
    print(json.dumps(shown | {"not started": skipped}, indent=1))
    if made["failed_checks"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
