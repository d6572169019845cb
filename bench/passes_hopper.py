"""FP8 and BF16 training products on an H100 or H200, FP8 from codes and from BF16 tensors, against cuBLASLt; writes a record.

    python bench/passes_hopper.py --passes fprop,dgrad,wgrad --samples 7 --preheat 1 --out record.json

Per shape of the suite llm81 and pass of a linear layer, one scale per tensor made from its amax (CurrentScaling): e4m3 x e4m3 for
fprop, with the matrix unit's own sums in both libraries (fast accumulation); gradients in e5m2 by e4m3, float32 sums, in dgrad and
wgrad. Both libraries read 8-bit operands with the reduction contiguous only, so what a gradient sums over is transposed while it is
quantized. Variants, interleaved as in bench/gemm_hopper.py:

    kernel       fw.gemm's kernel, codes to bfloat16
    cublas       torch._scaled_mm on the same codes and scales
    end          fw.quantize of both BF16 operands, in the direction that the pass needs, then the kernel
    cublas end   the quantization in PyTorch, compiled (torch.compile, dynamic shapes), then torch._scaled_mm
    ours+cublas  fw.quantize, then torch._scaled_mm
    bf16         torch.mm of the BF16 tensors
    bf16 kernel  fw.gemm's kernel, of the BF16 tensors

Checked before timed: codes and scales bit for bit against the PyTorch code that defines them; the product as in bench/gemm_hopper.py;
the bits of `end` against those of `kernel`. A red check prints no speed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import (
    E4M3,
    Measured,
    Truth,
    conclude,
    cutedsl,
    machine,
    operands,
    preheat,
    record_head,
    run_rows,
    summary,
    time_interleaved,
    views,
)

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm import sm90_choice
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.testing import bounds
from fourwave.testing.llm_shapes import llm81

BF16, E5M2 = torch.bfloat16, torch.float8_e5m2
LAYOUTS = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}
NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}
PART_ROWS = 4096
VARIANTS = "kernel", "cublas", "end", "cublas end", "ours+cublas", "bf16", "bf16 kernel"
RATIOS = {
    "kernel": ("cublas", "kernel"),
    "end to end": ("cublas end", "end"),
    "end to end, our quantizers in both": ("ours+cublas", "end"),
    "BF16 kernel": ("bf16", "bf16 kernel"),
    "end to end over BF16": ("bf16", "end"),
    "cuBLASLt, end to end over BF16": ("bf16", "cublas end"),
}


def torch_quantize(x: torch.Tensor, dtype: torch.dtype, transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale, as a user of PyTorch would write them for the compiler, which is told that rows are whole chunks."""
    for size in x.shape:
        torch._check(size % 64 == 0)
    largest = torch.finfo(dtype).max
    scale = x.abs().amax().float().clamp(min=1e-12) / largest
    codes = (x.float() / scale).clamp(-largest, largest).to(dtype)
    return (codes.t().contiguous() if transposed else codes), scale


def compiled_quantize() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    import torch._dynamo.config
    import torch.fx.experimental._config

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would run uncompiled
    torch.fx.experimental._config.use_duck_shape = False  # a square tensor is no case of its own
    return torch.compile(torch_quantize, dynamic=True)


def operand(x: torch.Tensor, dtype: torch.dtype, transposed: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes with the reduction contiguous, and scale; transposed: the reduction runs along x's columns."""
    direction = "columnwise" if transposed else "rowwise"
    q = fw.quantize(x, NAMES[dtype], direction, columnwise_transposed=transposed, backend=backend)
    codes, scale, k_last = q.operand(direction)
    assert k_last or not transposed
    return codes, scale


def kinds_of(which: str) -> tuple[tuple[torch.dtype, bool], tuple[torch.dtype, bool]]:
    """Of a and b: the codes, and whether the reduction runs along the columns as stored."""
    return (E4M3 if which == "fprop" else E5M2, which == "wgrad"), (E4M3, which != "fprop")


def ratios_of(timed: list[str]) -> dict[str, tuple[str, str]]:
    return {what: pair for what, pair in RATIOS.items() if set(pair) <= set(timed)}


def right(x: torch.Tensor, dtype: torch.dtype, transposed: bool, codes: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether codes and scale are those of quantize/reference.py, compared in parts, whose float32 copies find room."""
    largest = torch.stack([part.abs().amax() for part in x.split(PART_ROWS)]).amax()
    if not same(scale, operand(largest.reshape(1, 1), dtype, False, "native")[1]):
        return False
    direction = "columnwise" if transposed else "rowwise"
    for start in range(0, x.shape[0], PART_ROWS):
        part = slice(start, start + PART_ROWS)
        q = fw.quantize(
            x[part], NAMES[dtype], direction, scale=scale, columnwise_transposed=transposed, backend="native"
        )
        if not same(q.operand(direction)[0], codes[:, part] if transposed else codes[part]):
            return False
    return True


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def measure(
    name: str,
    shape: tuple[int, int, int],
    which: str,
    timed: list[str],
    compiled: Callable[..., Any],
    samples: int,
    l2_bytes: int,
) -> tuple[dict[str, Any], str]:
    """One row: its record, without times where a check failed, and what to print."""
    M, N, K = shape
    layout, fast = LAYOUTS[which], which == "fprop"
    kinds = kinds_of(which)
    a_dtype = kinds[0][0]
    problem = GemmProblem(
        M, N, K, "TN", a_dtype, E4M3, BF16, device_type="cuda", a_scaling="tensor", b_scaling="tensor", fast_accum=fast
    )
    num_sets = max(1, math.ceil(2 * l2_bytes / (M * K + N * K)))
    plain = [operands(M, N, K, layout, BF16) for _ in range(num_sets)]
    coded = [tuple(operand(x, *kind, "hopper") for x, kind in zip(pair, kinds, strict=True)) for pair in plain]
    out = torch.empty(M, N, device="cuda", dtype=BF16)
    backend = registry.get("hopper")

    def kernel(turn: int) -> None:
        (a, a_scale), (b, b_scale) = coded[turn % num_sets]
        backend.run_gemm(problem, None, GemmTensors(a, b, out, a_scale=a_scale, b_scale=b_scale))

    def cublas(turn: int) -> None:
        (a, a_scale), (b, b_scale) = coded[turn % num_sets]
        torch._scaled_mm(a, b.mT, a_scale, b_scale, out_dtype=BF16, use_fast_accum=fast)

    def end(turn: int) -> None:
        (a, a_scale), (b, b_scale) = (
            operand(x, *kind, "hopper") for x, kind in zip(plain[turn % num_sets], kinds, strict=True)
        )
        backend.run_gemm(problem, None, GemmTensors(a, b, out, a_scale=a_scale, b_scale=b_scale))

    def cublas_end(turn: int) -> None:
        (a, a_scale), (b, b_scale) = (compiled(x, *kind) for x, kind in zip(plain[turn % num_sets], kinds, strict=True))
        torch._scaled_mm(a, b.mT, a_scale, b_scale, out_dtype=BF16, use_fast_accum=fast)

    def our_quantizers(turn: int) -> None:
        (a, a_scale), (b, b_scale) = (
            operand(x, *kind, "hopper") for x, kind in zip(plain[turn % num_sets], kinds, strict=True)
        )
        torch._scaled_mm(a, b.mT, a_scale, b_scale, out_dtype=BF16, use_fast_accum=fast)

    def bf16(turn: int) -> None:
        torch.mm(*views(*plain[turn % num_sets], layout), out=out)

    problem16 = GemmProblem(M, N, K, layout, BF16, BF16, BF16, device_type="cuda")

    def bf16_kernel(turn: int) -> None:
        backend.run_gemm(problem16, None, GemmTensors(*plain[turn % num_sets], out))

    row: dict[str, Any] = {"name": name, "pass": which, "M": M, "N": N, "K": K}
    head = f"{which} {M:6} {N:6} {K:6}"
    for label, x, kind, got in zip("ab", plain[0], kinds, coded[0], strict=True):
        if not right(x, *kind, *got):
            return row, f"{head}  WRONG: the codes of {label} are not those of quantize/reference.py"
    (a, a_scale), (b, b_scale) = coded[0]
    u_acc = bounds.hopper_fp8_u_acc(K, not fast)
    truth = Truth(a, b, "TN", BF16, u_acc, a_scale, b_scale, "tensor")
    out.fill_(float("nan"))
    kernel(0)
    row["error_over_bound"] = truth.error(out)
    del truth
    alone = out.clone()
    out.fill_(float("nan"))
    end(0)
    if not row["error_over_bound"] <= 1 or not same(out, alone):
        return row, f"{head}  WRONG: {row['error_over_bound']}, the same bits from BF16: {same(out, alone)}"
    del alone
    if "bf16 kernel" in timed:
        truth = Truth(*plain[0], layout, BF16, bounds.U_FP32, None, None, "")
        out.fill_(float("nan"))
        bf16_kernel(0)
        row["bf16_error_over_bound"] = truth.error(out)
        del truth
        if not row["bf16_error_over_bound"] <= 1:
            return row, f"{head}  WRONG: BF16 {row['bf16_error_over_bound']}"
    variants: dict[str, Callable[[int], None]] = {
        "kernel": kernel, "cublas": cublas, "end": end, "cublas end": cublas_end, "ours+cublas": our_quantizers,
        "bf16": bf16, "bf16 kernel": bf16_kernel,
    }  # fmt: skip
    variants = {label: call for label, call in variants.items() if label in timed}
    row["seconds"] = time_interleaved(variants, samples)
    medians = {label: statistics.median(values) for label, values in row["seconds"].items()}
    row["ratios"] = {what: medians[theirs] / medians[ours] for what, (theirs, ours) in ratios_of(timed).items()}
    row["config"] = str(sm90_choice.default_config(problem)[0])
    shown = "  ".join(f"{label} {medians[label] * 1e6:7.1f}" for label in variants)
    ratios = "  ".join(f"{value:.3f}" for value in row["ratios"].values())
    return row, f"{head}  {shown} us  {ratios}  {row['config']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", default="fprop,dgrad,wgrad")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="as listed above")
    parser.add_argument("--preheat", type=float, default=0.0, help="seconds of products before the first row")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row of the suite")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="only compile what --passes need of PyTorch's quantization, into its cache on disk",
    )
    parser.add_argument("--eager", action="store_true", help="PyTorch's quantization is not compiled")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    began = time.monotonic()
    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    compiled = torch_quantize if args.eager else compiled_quantize()
    passes, timed = args.passes.split(","), args.variants.split(",")
    if args.warm:
        for kind in dict.fromkeys(kind for which in passes for kind in kinds_of(which)):
            for size in ((1024, 2048), (2048, 1024), (512, 512), (65536, 65536)):
                compiled(torch.zeros(size, device="cuda", dtype=BF16), *kind)
                print(*kind, size, f"{time.monotonic() - began:.1f} s", flush=True)
        return
    if unknown := set(timed) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    preheat(args.preheat)
    todo: list[tuple[dict[str, Any], Callable[[], Measured]]] = []
    # Pass by pass within a shape, so that a run that ends early has as many rows of each.
    for shape in llm81()[:: args.every]:
        for which in passes:
            M, N, K = shape.gemm(LAYOUTS[which])
            label = {"pass": which, "M": M, "N": N, "K": K}
            call = functools.partial(measure, str(shape), (M, N, K), which, timed, compiled, args.samples, l2_bytes)
            todo.append((label, call))

    def record(rows: list[dict[str, Any]], skipped: int, ended: bool) -> dict[str, Any]:
        done = [row for row in rows if "ratios" in row]
        by_pass = {
            f"{which}, {what}": summary([{"ratio": row["ratios"][what]} for row in done if row["pass"] == which])
            for which in passes
            for what in ratios_of(timed)
            if any(row["pass"] == which for row in done)
        }
        what = "FP8 products of a linear layer's passes, from codes and from BF16 tensors: ratios of median times, see the bench; graph replay, operands not in L2"
        made = {
            **record_head(__file__, what, args, before, machine() if ended else None, cutedsl()),
            "summary": by_pass,
            "failed_checks": len(rows) - len(done),
            "rows_not_started": skipped,
            "rows": rows,
        }  # fmt: skip
        if args.out:
            args.out.write_text(json.dumps(made) + "\n")
        return made

    rows, skipped = run_rows(todo, began + args.seconds, functools.partial(record, ended=False))
    conclude(record(rows, skipped, ended=True), began)


if __name__ == "__main__":
    main()
