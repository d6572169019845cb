"""Time the Hopper grouped GEMM (FP8, 1x128 with 128x128 scales) against what users have today, and write a record.

    python bench/grouped_hopper.py --suite published --out record.json
    python bench/grouped_hopper.py --suite published,sweep,sweep:skewed --deep-gemm --triton fp8_groupwise_grouped_gemm.py --cutlass mslk.so
    python bench/grouped_hopper.py --suite published --configs all         # every candidate, to see what the default misses

--suite      one or more: published, sweep (9 pairs of N and K, 1 to 16384 rows), dgrad (published with weights transposed, from 128 rows
             on), each with even groups or, as NAME:skewed, random ones of which some are empty; decode; skew

--deep-gemm  DeepGEMM's contiguous kernel, rows of each group padded to 128 beforehand, and its masked one; their scales are laid
             out beforehand, and the copies that lay out operands are not in their times
--triton     a file with MSLK's Triton kernel (matmul_f8f8bf16_groupwise_grouped), autotuned for each row over the tiles in TRITON_TILES
--cutlass    mslk.so of the package mslk-cuda: its CUTLASS operator, which makes a new output in each call

The suite decode has a variant `copy`, too: PyTorch's copy_ of half as many bytes as the product must move, so that as many move: what a
launch and this memory take, whoever moves them.

Every variant is checked first: every element against float64 with the bound of fourwave.testing, in a poisoned output. One that
fails prints no speed. A sample is one CUDA-event interval around the replay of enough captured calls to last about a
millisecond; the variants take turns, each round in another order. Operands are rotated among sets that together exceed twice the
L2 cache. floor: the larger of the bytes that must move over the copy rate, and the operations over the FP8 peak, both of --rates.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import ROTATION, cutedsl, machine, record_head, time_interleaved

from fourwave.ops.grouped_gemm import sm90_choice, sm90_launch, sm90_tiles
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.ops.grouped_gemm.sm90_config import HopperGroupedConfig
from fourwave.testing import bounds
from fourwave.testing.grouped_cases import group_scales

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
GROUPS = 8
# Rows of all groups, N, K of the rows published with MSLK's kernels.
PUBLISHED = (
    (32, 1280, 8192), (128, 1280, 8192), (1024, 2048, 7168), (16384, 2048, 7168), (1024, 7168, 2304), (16384, 7168, 2304),
    (32, 7168, 8192), (128, 7168, 8192), (1, 8192, 1024), (128, 8192, 1024), (32, 8192, 3584), (128, 8192, 3584),
    (32, 13312, 6656), (128, 13312, 6656), (32, 13312, 16384), (128, 13312, 16384), (32, 16384, 6656), (128, 16384, 6656),
)  # fmt: skip
WEIGHTS = (
    (1280, 8192), (2048, 7168), (7168, 2304), (7168, 8192), (8192, 1024), (8192, 3584), (13312, 6656), (13312, 16384), (16384, 6656),
)  # fmt: skip
SWEEP = tuple((m, n, k) for n, k in WEIGHTS for m in (1, 32, 128, 1024, 4096, 16384) if m * n * k < 3e12)
DECODE = tuple((g, g * rows, 2048, 7168) for g in (1, 32, 128, 256) for rows in (1, 4, 16, 64))
SKEW = (
    4, 1026, 1799, 166, 694, 753, 0, 16, 0, 240, 1119, 19, 6, 0, 46, 659, 10, 0, 112, 808, 181, 0, 28, 22, 90, 0, 176, 0, 37, 5, 10,
    22,
)  # fmt: skip
TRITON_TILES = (
    (16, 32, 4, 4),
    (16, 64, 4, 4),
    (32, 64, 4, 4),
    (64, 64, 4, 4),
    (64, 128, 4, 4),
    (128, 128, 8, 3),
    (128, 256, 8, 3),
)


def even(groups: int, rows: int) -> list[int]:
    return [rows // groups + (g < rows % groups) for g in range(groups)]


def skewed(groups: int, rows: int, seed: int = 0) -> list[int]:
    """Shares of a random walk over powers of two: some groups empty, one with a third of the rows or so."""
    source = random.Random(seed)
    weights = [2.0 ** source.uniform(-6, 2) if source.random() > 0.15 else 0.0 for _ in range(groups)]
    weights[0] += 1e-9
    cuts = [0.0]
    for weight in weights:
        cuts.append(cuts[-1] + weight)
    edges = [round(rows * cut / cuts[-1]) for cut in cuts]
    return [b - a for a, b in itertools.pairwise(edges)]


def with_fields(config: HopperGroupedConfig, text: str) -> HopperGroupedConfig:
    """config with the fields of --fields, where it is one of the schedule "rows"."""
    if config.schedule != "rows" or not text:
        return config
    fields = {name: ast.literal_eval(value) for name, value in (word.split("=") for word in text.split(","))}
    return replace(config, **fields)


class Operands:
    """One set of operands for sizes, N and K."""

    def __init__(self, sizes: list[int], N: int, K: int) -> None:
        M, G = sum(sizes), len(sizes)
        self.sizes, self.N, self.K, self.M, self.G = sizes, N, K, M, G
        self.a = torch.randn(M, K, device="cuda", dtype=BF16).to(E4M3)
        self.b = torch.empty(G, N, K, device="cuda", dtype=E4M3)
        for g in range(G):
            self.b[g] = torch.randn(N, K, device="cuda", dtype=BF16).to(E4M3)
        self.rows_scale = torch.rand(M, K // 128, device="cuda") + 0.5
        self.a_scale = group_scales(self.rows_scale.cpu(), sizes).cuda()
        self.b_scale = torch.rand(G, -(-N // 128), K // 128, device="cuda") + 0.5
        self.m_sizes = torch.tensor(sizes, device="cuda")
        self.out = torch.empty(M, N, device="cuda", dtype=BF16)

    @property
    def bytes(self) -> int:
        """That must move: weights of groups that have rows, rows, scales, out."""
        used = sum(size > 0 for size in self.sizes)
        scales = 4 * (self.M * (self.K // 128) + used * self.b_scale[0].numel())
        return used * self.N * self.K + self.M * (self.K + 2 * self.N) + scales

    def truth(self) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(rows, exact result, bound) of each group, in parts of at most 2048 rows."""
        parts, start = [], 0
        u_acc = bounds.hopper_fp8_u_acc(self.K, True)
        for g, size in enumerate(self.sizes):
            for first in range(start, start + size, 2048):
                rows = slice(first, min(first + 2048, start + size))
                a = self.a[rows].double() * self.rows_scale[rows].double().repeat_interleave(128, 1)
                cells = self.b_scale[g].double().repeat_interleave(128, 0)[: self.N].repeat_interleave(128, 1)
                b = self.b[g].double() * cells
                parts.append((rows, a @ b.mT, bounds.gemm_bound(a, b, BF16, u_acc=u_acc, scaled=True)))
            start += size
        return parts


def error(parts: list[tuple[slice, torch.Tensor, torch.Tensor]], out: torch.Tensor) -> float:
    return max((bounds.error_ratio(out[rows], exact, bound)[0] for rows, exact, bound in parts), default=0.0)


def problem_of(G: int, M: int, N: int, K: int, layout: str) -> GroupedProblem:
    return GroupedProblem(
        G, M, N, K, "rows", "TN", E4M3, E4M3, BF16, device_type="cuda", a_scaling="1x128", b_scaling="128x128",
        a_scale_layout=layout,
    )  # fmt: skip


class Ours:
    def __init__(self, sets: list[Operands], config: HopperGroupedConfig | None, layout: str) -> None:
        x = sets[0]
        self.sets, self.config, self.problem = sets, config, problem_of(x.G, x.M, x.N, x.K, layout)
        self.out = x.out

    def __call__(self, turn: int) -> None:
        x = self.sets[turn % len(self.sets)]
        scale = x.rows_scale if self.problem.a_scale_layout == "rows" else x.a_scale
        tensors = GroupedTensors(x.a, x.b, x.m_sizes, self.out, None, scale, x.b_scale)
        sm90_launch.run(self.problem, self.config, tensors)

    def result(self) -> torch.Tensor:
        return self.out


class Triton:
    def __init__(self, sets: list[Operands], module: Any) -> None:
        self.sets, self.module = sets, module
        self.out = torch.empty_like(sets[0].out)
        self.scales = [x.b_scale.mT.contiguous() for x in sets]
        kernel = module._f8f8bf16_groupwise_grouped_kernel
        kernel.cache.clear()

    def __call__(self, turn: int) -> None:
        i = turn % len(self.sets)
        x = self.sets[i]
        scale = x.a_scale.view(x.M, -1)
        self.module.matmul_f8f8bf16_groupwise_grouped(x.a, x.b, scale, self.scales[i], x.m_sizes, self.out)

    def result(self) -> torch.Tensor:
        return self.out


class Cutlass:
    def __init__(self, sets: list[Operands], operator: Any) -> None:
        self.sets, self.operator = sets, operator
        self.out = torch.empty_like(sets[0].out)
        self.scales = [x.b_scale.mT.contiguous() for x in sets]

    def __call__(self, turn: int) -> None:
        i = turn % len(self.sets)
        x = self.sets[i]
        self.out = self.operator(x.a, x.b, x.a_scale.view(x.M, -1), self.scales[i], x.m_sizes)

    def result(self) -> torch.Tensor:
        return self.out


class DeepGemm:
    """Contiguous: rows of each group padded to 128; masked: a buffer of equal height for each group."""

    def __init__(self, sets: list[Operands], library: Any, masked: bool) -> None:
        self.library, self.masked, self.sets = library, masked, sets
        x = sets[0]
        self.operands = []
        high = -(-max(x.sizes) // 128) * 128
        layout = library.utils.layout.get_mn_major_tma_aligned_tensor
        for x in sets:
            if masked:
                a = torch.zeros(x.G, high, x.K, device="cuda", dtype=E4M3)
                scale = torch.zeros(x.G, high, x.K // 128, device="cuda")
            else:
                padded = [-(-size // 128) * 128 for size in x.sizes]
                a = torch.zeros(sum(padded), x.K, device="cuda", dtype=E4M3)
                scale = torch.zeros(sum(padded), x.K // 128, device="cuda")
                groups = torch.full((sum(padded),), -1, device="cuda", dtype=torch.int32)
            start = place = 0
            self.places = []
            for g, size in enumerate(x.sizes):
                rows, own = slice(start, start + size), slice(place, place + size)
                if masked:
                    a[g, :size], scale[g, :size] = x.a[rows], x.rows_scale[rows]
                    self.places.append((g, slice(0, size)))
                else:
                    a[own], scale[own] = x.a[rows], x.rows_scale[rows]
                    groups[place : place + padded[g]] = g
                    self.places.append((g, own))
                    place += padded[g]
                start += size
            last = torch.tensor(x.sizes, device="cuda", dtype=torch.int32) if masked else groups
            self.operands.append((a, layout(scale), x.b, x.b_scale, last))
        self.out = torch.zeros((x.G, high, x.N) if masked else (sum(padded), x.N), device="cuda", dtype=BF16)
        self.expected = max(1, -(-x.M // x.G))

    def __call__(self, turn: int) -> None:
        a, a_scale, b, b_scale, last = self.operands[turn % len(self.operands)]
        if self.masked:
            self.library.fp8_m_grouped_gemm_nt_masked((a, a_scale), (b, b_scale), self.out, last, self.expected)
        else:
            self.library.m_grouped_fp8_gemm_nt_contiguous((a, a_scale), (b, b_scale), self.out, last)

    def result(self) -> torch.Tensor:
        return torch.cat([self.out[g, rows] if self.masked else self.out[rows] for g, rows in self.places])


class Copy:
    """copy_ of half as many bytes as the product must move."""

    def __init__(self, sets: list[Operands]) -> None:
        size = sets[0].bytes // 2
        # Apart: beside each other, some sizes were copied at two thirds of the rate of others.
        self.pairs = [[torch.zeros(size, device="cuda", dtype=torch.uint8) for _ in range(2)] for _ in sets]

    def __call__(self, turn: int) -> None:
        pair = self.pairs[turn % len(self.pairs)]
        pair[0].copy_(pair[1])


def load_triton(path: str) -> Any:
    if not path.endswith(".py") or not Path(path).is_file():
        raise SystemExit(f"--triton {path}: no such Python file; it is MSLK's fp8_groupwise_grouped_gemm.py")
    spec = importlib.util.spec_from_file_location("mslk_triton", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import triton

    module._f8f8bf16_groupwise_grouped_kernel.configs = [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in TRITON_TILES
    ]
    bench: Any = triton.testing.do_bench
    module._f8f8bf16_groupwise_grouped_kernel.do_bench = functools.partial(bench, warmup=2, rep=8)
    return module


def measure(
    suite: str, sizes: list[int], N: int, K: int, args: Any, peers: dict[str, Any], l2_bytes: int
) -> dict[str, Any]:
    first = Operands(sizes, N, K)
    sets = [first] + [Operands(sizes, N, K) for _ in range(min(16, ROTATION * l2_bytes // max(1, first.bytes)))]
    problem = problem_of(first.G, first.M, N, K, args.scales)
    default = with_fields(sm90_choice.default_config(problem)[0], args.fields)
    variants: dict[str, Any] = {"ours": Ours(sets, default, args.scales)}
    if args.configs == "all":
        for config in sm90_tiles.candidates(problem):
            variants[str(config)] = Ours(sets, config, args.scales)
    failed: dict[str, str] = {}
    for name, make in peers.items():
        try:
            variants[name] = make(sets)
            variants[name](0)
            torch.cuda.synchronize()
        except Exception as problem_with:  # a peer that refuses a shape is reported, not measured
            failed[name] = str(problem_with)[:200]
            variants.pop(name, None)
    truth = first.truth()
    wrong = {}
    for name, variant in list(variants.items()):
        variant.out.fill_(float("nan"))
        variant(0)
        ratio = error(truth, variant.result())
        if not ratio <= 1:
            wrong[name] = ratio
            del variants[name]
    del truth
    if suite.startswith("decode"):
        variants["copy"] = Copy(sets)
    times = time_interleaved(variants, args.samples) if variants else {}
    flops = 2 * first.M * N * K
    floor = max(first.bytes / args.rates[0], flops / args.rates[1])
    return {
        "suite": suite, "sizes": sizes, "N": N, "K": K, "config": str(default), "bytes": first.bytes, "flops": flops, "floor": floor, "wrong": wrong,
        "refused": failed, "seconds": times, "median": {name: statistics.median(t) for name, t in times.items()},
    }  # fmt: skip


def shown(row: dict[str, Any], every: bool) -> str:
    median = row["median"]
    names = ("ours", "triton", "cutlass", "deepgemm", "deepgemm masked", "copy")
    words = [
        row["suite"],
        f"G{len(row['sizes'])} M{sum(row['sizes'])} {row['N']}x{row['K']}",
        f"floor {row['floor'] * 1e6:.1f}",
    ]
    words += [f"{name} {median[name] * 1e6:.1f}" for name in names if name in median]
    peers = [median[name] for name in names[1:-1] if name in median]
    if "ours" in median:
        words.append(f"x{median['ours'] / row['floor']:.2f} of floor")
        if peers:
            words.append(f"ratio {min(peers) / median['ours']:.3f}")
    words.append(row["config"])
    lines = ["  ".join(words)]
    lines += [f"   WRONG {name}: {ratio:.3g}" for name, ratio in row["wrong"].items()]
    lines += [f"   refused {name}: {why}" for name, why in row["refused"].items()]
    if every:
        others = sorted((t, name) for name, t in median.items() if name not in names)
        lines += [f"   {t * 1e6:8.1f}  {name}" for t, name in others]
    return "\n".join(lines)


def rows_of(suite: str, sizes: str = "even") -> list[tuple[list[int], int, int]]:
    if suite == "decode":
        return [(even(g, m), n, k) for g, m, n, k in DECODE]
    if suite == "skew":
        total = sum(SKEW)
        return [(s, n, k) for n, k in ((2048, 7168), (7168, 2304)) for s in (list(SKEW), even(len(SKEW), total))]
    split = skewed if sizes == "skewed" else even
    if suite == "dgrad":
        return [(split(GROUPS, m), k, n) for m, n, k in PUBLISHED if m >= 128]
    return [(split(GROUPS, m), n, k) for m, n, k in (PUBLISHED if suite == "published" else SWEEP)]


SUITES = ("published", "sweep", "dgrad", "decode", "skew")


def suites_of(text: str) -> list[tuple[str, str]]:
    """(suite, sizes) of --suite."""
    found = []
    for word in text.split(","):
        suite, _, sizes = word.partition(":")
        if suite not in SUITES or sizes not in ("", "even", "skewed") or (sizes and suite in ("decode", "skew")):
            raise argparse.ArgumentTypeError(
                f"{word!r}: the suites are {', '.join(SUITES)}; the first three with :skewed, too"
            )
        found.append((suite, sizes or "even"))
    return found


def summary_of(rows: list[dict[str, Any]], peers: Any) -> dict[str, Any]:
    timed = [row for row in rows if "ours" in row["median"]]
    against = [
        min(t for name, t in row["median"].items() if name in peers) / row["median"]["ours"]
        for row in timed
        if any(name in peers for name in row["median"])
    ]
    triton = [row["median"]["triton"] / row["median"]["ours"] for row in timed if "triton" in row["median"]]
    return {
        "rows": len(rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "ours wrong": sum("ours" in row["wrong"] for row in rows),
        "median of time over floor": statistics.median(row["median"]["ours"] / row["floor"] for row in timed)
        if timed
        else None,
        "geomean against the best peer": statistics.geometric_mean(against) if against else None,
        "lowest": min(against, default=None),
        "wins": sum(ratio >= 1 for ratio in against),
        "median against triton": statistics.median(triton) if triton else None,
    }


def compile_all(rows: list[tuple[list[int], int, int]], part: str, every: bool, layout: str, fields: str) -> None:
    """Every k-th kernel that the rows need, into the cache; no GPU is used."""
    from fourwave.backends import cutedsl_cache

    index, count = (int(word) for word in part.split("/"))
    specs: dict[Any, None] = {}
    for sizes, n, k in rows:
        problem = problem_of(len(sizes), sum(sizes), n, k, layout)
        configs = [
            with_fields(sm90_choice.default_config(problem)[0], fields),
            *(sm90_tiles.candidates(problem) if every else ()),
        ]
        for config in configs:
            specs[sm90_launch.specialise(problem, config)] = None
    for spec in list(specs)[index::count]:
        if not (cutedsl_cache.directory() / f"{cutedsl_cache._name(spec)}.o").exists():
            cutedsl_cache.store(spec, sm90_launch.compile_kernel(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", type=suites_of, default="published", metavar="NAME[:skewed],...")
    parser.add_argument("--configs", choices=["default", "all"], default="default")
    parser.add_argument("--fields", default="", metavar="NAME=VALUE,...", help="of the defaults of the schedule rows")
    parser.add_argument("--scales", choices=["groups", "rows"], default="groups", help="layout of a's")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--deep-gemm", action="store_true")
    parser.add_argument("--triton", default="")
    parser.add_argument("--cutlass", default="")
    parser.add_argument(
        "--rates", type=float, nargs=2, default=[4.3e12, 1.5e15], help="copy bytes/s and FP8 operations/s"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--compile", default="", metavar="I/N", help="only compile every N-th kernel, from the I-th")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [(f"{suite}:{sizes}", *row) for suite, sizes in args.suite for row in rows_of(suite, sizes)[:: args.every]]
    if args.compile:
        compile_all([row[1:] for row in shapes], args.compile, args.configs == "all", args.scales, args.fields)
        return
    peers: dict[str, Callable[[list[Operands]], Any]] = {}
    if args.triton:
        peers["triton"] = functools.partial(Triton, module=load_triton(args.triton))
    if args.cutlass:
        torch.ops.load_library(args.cutlass)
        peers["cutlass"] = functools.partial(Cutlass, operator=torch.ops.mslk.f8f8bf16_groupwise_grouped)
    if args.deep_gemm:
        deep_gemm = importlib.import_module("deep_gemm")
        peers["deepgemm"] = functools.partial(DeepGemm, library=deep_gemm, masked=False)
        peers["deepgemm masked"] = functools.partial(DeepGemm, library=deep_gemm, masked=True)
    began = time.monotonic()
    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    rows, skipped = [], 0
    for suite, sizes, n, k in shapes:
        if time.monotonic() - began > args.seconds:
            skipped += 1
            continue
        rows.append(measure(suite, sizes, n, k, args, peers, l2_bytes))
        print(shown(rows[-1], args.configs == "all"), flush=True)
    names = dict.fromkeys(row["suite"] for row in rows)
    summaries = {name: summary_of([row for row in rows if row["suite"] == name], peers) for name in names}
    what = "FP8 grouped GEMM, 1x128 with 128x128 scales, bf16 out: seconds per call, graph replay, operands not in L2"
    versions = cutedsl(python=True)
    versions |= {name: sys.modules[name].__version__ for name in ("deep_gemm", "triton") if name in sys.modules}
    record = {
        **record_head(__file__, what, args, before, machine(), versions),
        "summary": summaries,
        "rows_not_started": skipped,
        "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    for name, summary in summaries.items():
        print(name, json.dumps(summary))
    if any(summary["wrong"] for summary in summaries.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
