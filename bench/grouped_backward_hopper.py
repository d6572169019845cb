"""Time the weight gradient of the Hopper grouped GEMM, and dgrad of bfloat16, against DeepGEMM's, and write a record.

    python bench/grouped_backward_hopper.py --deep-gemm --out record.json

wgrad fp8   out[g] += dout[:, rows of g] @ x[:, rows of g].T, codes stored transposed, scales 1x128 of both, out float32.
            DeepGEMM: k_grouped_fp8_gemm_nt_contiguous, whose operands are a matrix for each group, laid out beforehand
wgrad bf16  out[g] += dout[rows of g].T @ x[rows of g]. DeepGEMM: k_grouped_bf16_gemm_tn_contiguous
dgrad bf16  dout @ w[g]. DeepGEMM: m_grouped_bf16_gemm_nn_contiguous
dgrad fp8 is the forward product of weights that are stored transposed: bench/grouped_hopper.py --suite dgrad

Groups are multiples of 128 rows, as DeepGEMM wants them. DeepGEMM takes the sizes on the host as well. Every variant is checked first: each
element against float64 with the bound of fourwave.testing, added to what out held. Graph replay, variants take turns, operands are rotated
where they fit the L2 cache. floor: as in bench/grouped_hopper.py, out read and written.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import cutedsl, machine, record_head, time_interleaved

from fourwave.ops.grouped_gemm import sm90_choice, sm90_launch
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.testing import bounds

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
Tensor = torch.Tensor
KINDS = ("wgrad fp8", "wgrad bf16", "dgrad bf16")
# groups, rows of each, N and K of the weights: the first three are of DeepGEMM's own tests
SHAPES = (
    (4, 8192, 4096, 7168), (8, 4096, 7168, 2048), (16, 2048, 4096, 7168), (8, 2048, 2048, 7168), (8, 2048, 7168, 2304),
    (8, 512, 8192, 3584), (8, 128, 7168, 8192), (32, 256, 4096, 7168), (128, 128, 1536, 2048),
)  # fmt: skip
SPREAD = (0.25, 2.0, 0.5, 1.0, 1.25, 1.0, 1.5, 0.5)  # of uneven groups, of eight their mean


def sizes_of(G: int, rows: int, uneven: bool) -> list[int]:
    if not uneven:
        return [rows] * G
    return [round(SPREAD[g % len(SPREAD)] * rows / 128) * 128 for g in range(G)]


def problem_of(kind: str, G: int, rows: int, N: int, K: int) -> GroupedProblem:
    if kind == "dgrad bf16":
        return GroupedProblem(G, rows, K, N, "rows", "NN", BF16, BF16, BF16, device_type="cuda")
    dtype, scaling = (E4M3, "1x128") if kind == "wgrad fp8" else (BF16, None)
    layout = "TN" if dtype == E4M3 else "NT"
    return GroupedProblem(G, N, K, rows, "reduction", layout, dtype, dtype, FP32, None, True, "cuda", scaling, scaling)


class Row:
    """Operands of one row, and what is right of the first set."""

    def __init__(self, kind: str, sizes: list[int], N: int, K: int) -> None:
        self.kind, self.sizes, self.N, self.K = kind, sizes, N, K
        self.rows, self.G = sum(sizes), len(sizes)
        self.m_sizes = torch.tensor(sizes, device="cuda")
        dout = torch.randn(self.rows, N, device="cuda").to(BF16)
        self.a_scale: Tensor | None = None
        self.b_scale: Tensor | None = None
        if kind == "dgrad bf16":
            self.a, self.b = dout, torch.randn(self.G, N, K, device="cuda").to(BF16)
            self.out = torch.empty(self.rows, K, device="cuda", dtype=BF16)
            return
        x = torch.randn(self.rows, K, device="cuda").to(BF16)
        self.a, self.b = dout, x
        if kind == "wgrad fp8":
            self.a, self.b = (t.mT.contiguous().to(E4M3) for t in (dout, x))
            blocks = -(-self.rows // 128)
            self.a_scale, self.b_scale = (torch.rand(t.shape[0], blocks, device="cuda") + 0.5 for t in (self.a, self.b))
        self.out = torch.randn(self.G, N, K, device="cuda")

    @property
    def problem(self) -> GroupedProblem:
        return problem_of(self.kind, self.G, self.rows, self.N, self.K)

    @property
    def bytes(self) -> int:
        """That must move: operands, and out, which is read as well where it is added to."""
        read = [self.a, self.b, self.a_scale, self.b_scale, *([self.out] if self.problem.accumulate else [])]
        return sum(t.numel() * t.element_size() for t in (*read, self.out) if t is not None)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.N * self.K

    def spans(self) -> list[slice]:
        ends = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        return [slice(first, last) for first, last in itertools.pairwise(ends)]

    def error(self, out: Tensor, before: Tensor | None) -> float:
        """The largest share of its bound, of out [G, N, K] or [rows, K]."""
        worst = 0.0
        for g, span in enumerate(self.spans()):
            if self.kind == "dgrad bf16":
                left, right = self.a[span].double(), self.b[g].double().mT
                exact, bound = left @ right.mT, bounds.gemm_bound(left, right, BF16)
                got = out[span]
            else:
                left, right = self.operand(self.a, self.a_scale, span), self.operand(self.b, self.b_scale, span)
                scaled = self.a_scale is not None
                u_acc = bounds.hopper_fp8_u_acc(left.shape[1], True) if scaled else bounds.U_FP32
                addend = None if before is None else before[g]
                exact = left @ right.mT + (0 if addend is None else addend.double())
                bound = bounds.gemm_bound(left, right, FP32, addend=addend, u_acc=u_acc, scaled=scaled)
                got = out[g]
            worst = max(worst, bounds.error_ratio(got, exact, bound)[0])
        return worst

    @staticmethod
    def operand(t: Tensor, scale: Tensor | None, span: slice) -> Tensor:
        """[columns, rows of a group], float64."""
        if scale is None:
            return t[span].double().mT
        return t[:, span].double() * scale[:, span.start // 128 : span.stop // 128].double().repeat_interleave(128, 1)


class Ours:
    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.problem, self.out = rows, rows[0].problem, rows[0].out

    def __call__(self, turn: int) -> None:
        r = self.rows[turn % len(self.rows)]
        tensors = GroupedTensors(r.a, r.b, r.m_sizes, self.out, None, r.a_scale, r.b_scale)
        sm90_launch.run(self.problem, None, tensors)


class DeepGemm:
    def __init__(self, rows: list[Row], library: Any) -> None:
        self.library, self.rows, self.kind, self.out = library, rows, rows[0].kind, rows[0].out
        first = rows[0]
        self.ks = first.sizes
        self.ks_tensor = torch.tensor(first.sizes, device="cuda", dtype=torch.int32)
        self.groups = torch.arange(first.G, device="cuda", dtype=torch.int32).repeat_interleave(self.ks_tensor)
        self.operands = [self.laid_out(r) for r in rows]

    def laid_out(self, r: Row) -> list[Any]:
        if r.kind != "wgrad fp8":
            return [r.a, r.b]
        layout = getattr(self.library, "get_mn_major_tma_aligned_tensor", None)
        layout = layout or self.library.utils.layout.get_mn_major_tma_aligned_tensor
        made = []
        for t, scale in ((r.a, r.a_scale), (r.b, r.b_scale)):
            made.append((torch.cat([t[:, span].reshape(-1) for span in r.spans()]), layout(scale)))
        return made

    def __call__(self, turn: int) -> None:
        a, b = self.operands[turn % len(self.operands)]
        if self.kind == "dgrad bf16":
            self.library.m_grouped_bf16_gemm_nn_contiguous(a, b, self.out, self.groups)
        elif self.kind == "wgrad bf16":
            self.library.k_grouped_bf16_gemm_tn_contiguous(a, b, self.out, self.ks, self.ks_tensor, self.out)
        else:
            self.library.k_grouped_fp8_gemm_nt_contiguous(a, b, self.out, self.ks, self.ks_tensor, self.out)


def measure(kind: str, sizes: list[int], N: int, K: int, args: Any, library: Any, l2_bytes: int) -> dict[str, Any]:
    first = Row(kind, sizes, N, K)
    rows = [first] + [Row(kind, sizes, N, K) for _ in range(min(8, 2 * l2_bytes // first.bytes))]
    variants: dict[str, Any] = {"ours": Ours(rows)}
    wrong, refused = {}, {}
    if library is not None:
        try:
            variants["deepgemm"] = DeepGemm(rows, library)
            variants["deepgemm"](0)
            torch.cuda.synchronize()
        except Exception as why:  # a shape that it refuses is reported, not measured
            refused["deepgemm"] = str(why)[:200]
            variants.pop("deepgemm", None)
    for name, variant in list(variants.items()):
        before = None
        if first.problem.accumulate:
            first.out.normal_()
            before = first.out.clone()
        else:
            first.out.fill_(float("nan"))
        variant(0)
        ratio = first.error(first.out, before)
        if not ratio <= 1:
            wrong[name] = ratio
            del variants[name]
    times = time_interleaved(variants, args.samples) if variants else {}
    peak = args.rates[1] if kind == "wgrad fp8" else args.rates[2]
    return {
        "kind": kind, "sizes": sizes, "N": N, "K": K, "config": str(sm90_choice.default_config(first.problem)[0]),
        "bytes": first.bytes, "flops": first.flops, "floor": max(first.bytes / args.rates[0], first.flops / peak), "wrong": wrong,
        "refused": refused, "seconds": times, "median": {name: statistics.median(t) for name, t in times.items()},
    }  # fmt: skip


def compile_all(part: str, kinds: list[str]) -> None:
    """Every k-th kernel that the rows need, into the cache; no GPU is used."""
    from fourwave.backends import cutedsl_cache

    index, count = (int(word) for word in part.split("/"))
    specs: dict[Any, None] = {}
    for kind in kinds:
        for G, rows, N, K in SHAPES:
            problem = problem_of(kind, G, rows * G, N, K)
            specs[sm90_launch.specialise(problem, sm90_choice.default_config(problem)[0])] = None
    for spec in list(specs)[index::count]:
        if not (cutedsl_cache.directory() / f"{cutedsl_cache._name(spec)}.o").exists():
            cutedsl_cache.store(spec, sm90_launch.compile_kernel(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--deep-gemm", action="store_true")
    parser.add_argument("--uneven", action="store_true", help="groups of 0.25 to 2 times their mean")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument(
        "--warm",
        default="",
        metavar="I/N",
        help="run DeepGEMM once in every N-th row, from the I-th, so that it compiles",
    )
    parser.add_argument(
        "--rates", type=float, nargs=3, default=[4.3e12, 1.5e15, 7.5e14], help="copy bytes/s, FP8 and BF16 operations/s"
    )
    parser.add_argument("--compile", default="", metavar="I/N", help="only compile every N-th kernel, from the I-th")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    if args.compile:
        compile_all(args.compile, kinds)
        return
    library = importlib.import_module("deep_gemm") if args.deep_gemm else None
    if args.warm:
        index, count = (int(word) for word in args.warm.split("/"))
        todo = [(kind, shape) for kind in kinds for shape in SHAPES]
        for kind, (G, size, N, K) in todo[index::count]:
            DeepGemm([Row(kind, sizes_of(G, size, args.uneven), N, K)], library)(0)
            torch.cuda.synchronize()
        return
    torch.manual_seed(0)
    before, began = machine(), time.monotonic()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows = []
    for kind in kinds:
        for G, size, N, K in SHAPES[:: args.every]:
            row = measure(kind, sizes_of(G, size, args.uneven), N, K, args, library, l2_bytes)
            rows.append(row)
            times = [f"{name} {t * 1e6:.1f}" for name, t in row["median"].items()]
            words = [kind, f"G{G} rows {sum(row['sizes'])} {N}x{K}", f"floor {row['floor'] * 1e6:.1f}", *times]
            if len(row["median"]) == 2:
                words.append(f"ratio {row['median']['deepgemm'] / row['median']['ours']:.3f}")
            print(
                "  ".join([*words, row["config"], *(f"{k}: {v}" for k, v in (row["wrong"] | row["refused"]).items())]),
                flush=True,
            )
    what = "grouped wgrad and dgrad: seconds per call, graph replay"
    versions = cutedsl() | {"deep_gemm": getattr(library, "__version__", None)}
    record = {
        **record_head(__file__, what, args, before, machine(), versions),
        "wall_seconds": time.monotonic() - began,
        "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    if any("ours" in row["wrong"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
