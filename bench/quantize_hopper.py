"""Time fw.quantize on an H100 or H200 against a copy of as many bytes, and write a record.

    python bench/quantize_hopper.py --samples 20 --out record.json

Bytes are the fewest that a quantization moves: x read once, codes and scales written once. One scale for a tensor, and one for
each row, need amax first, so x is read twice; the ratio does not excuse it. `rate` is those bytes over the median time, `of copy`
that rate over the rate of a device-to-device copy in the same run. Each row is first compared with the PyTorch code that defines
the numbers, bit for bit; a row that differs prints no speed. Graph replay, the variants take turns, operands are not in L2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import cutedsl, machine, record_head, time_interleaved

import fourwave as fw
from fourwave.backends import registry
from fourwave.quantize import sm90_launch
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors
from fourwave.quantize.reference import quantize_reference

BF16, FP32 = torch.bfloat16, torch.float32
# format, scale rule, directions (rowwise, columnwise, transposed), given scale
ROWWISE, COLUMNWISE, BOTH, TRANSPOSED = (
    (True, False, False),
    (False, True, False),
    (True, True, False),
    (True, True, True),
)
CASES = (
    ("fp8_e4m3", "fp32", ROWWISE, True), ("fp8_e4m3", "fp32", TRANSPOSED, True), ("fp8_e4m3", "fp32", ROWWISE, False),
    ("fp8_e5m2", "fp32", TRANSPOSED, True), ("fp8_row", "fp32", ROWWISE, False), ("fp8_1x128", "pow2", ROWWISE, False),
    ("fp8_1x128", "fp32", TRANSPOSED, False), ("fp8_128x128", "fp32", ROWWISE, False), ("fp8_128x128", "pow2", TRANSPOSED, False),
    ("mxfp8_e4m3", "ceil", ROWWISE, False), ("mxfp8_e4m3", "ceil", COLUMNWISE, False), ("mxfp8_e4m3", "ceil", BOTH, False),
    ("mxfp8_e4m3", "ceil", TRANSPOSED, False), ("mxfp4", "floor", ROWWISE, False), ("mxfp4", "floor", BOTH, False),
)  # fmt: skip
SHAPES = ((16384, 8192), (8192, 4096), (4096, 1024))


def nbytes(tensors: QuantizeTensors) -> int:
    return sum(t.nbytes for t in tensors if t is not None)


def same(a: QuantizeTensors, b: QuantizeTensors) -> bool:
    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.contiguous().reshape(-1).view(torch.uint8)

    return all(
        torch.equal(bits(x), bits(y)) if x is not None and y is not None else x is y for x, y in zip(a, b, strict=True)
    )


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    hopper = registry.get("hopper")
    rows, failed, skipped = [], [], []
    start = time.monotonic()
    for R, C in SHAPES:
        for dtype in (BF16, FP32):
            # Two sets for the large shapes, more for the small ones: together beyond twice the 60 MB of L2.
            sets = max(2, -(-150 * 2**20 // (R * C * dtype.itemsize)))
            xs = [torch.randn(R, C, device="cuda").mul_(3).to(dtype) for _ in range(sets)]
            moved: dict[str, int] = {}
            for name, rule, (rowwise, columnwise, transposed), given in CASES:
                label = f"{R}x{C} {str(dtype)[6:]} {name} {rule}"
                label += {ROWWISE: " rowwise", COLUMNWISE: " columnwise", BOTH: " both", TRANSPOSED: " both, transposed"}[
                    rowwise, columnwise, transposed
                ] + " given" * given  # fmt: skip
                if time.monotonic() - start > args.seconds:
                    skipped.append(label)
                    continue
                problem = QuantizeProblem(
                    R, C, dtype, name, rowwise, columnwise, transposed, rule, False, given, "cuda"
                )
                scale = torch.tensor(0.37, device="cuda") if given else None
                if (why := hopper.why_quantize_unsupported(problem)) is not None:
                    raise SystemExit(f"{label}: {why}")
                right = quantize_reference(problem, xs[0], scale)
                outputs = problem.allocate(xs[0])
                for t in outputs:
                    if t is not None:
                        t.reshape(-1).view(torch.uint8).fill_(0xA5)
                sm90_launch.run(problem, xs[0], scale, outputs)
                if not same(outputs, right):
                    failed.append(label)
                    print(f"WRONG {label}", flush=True)
                    continue
                del right
                outs = [outputs, *(problem.allocate(xs[0]) for _ in range(sets - 1))]

                def call(turn: int, problem: Any = problem, scale: Any = scale, outs: Any = outs, xs: Any = xs) -> None:
                    sm90_launch.run(problem, xs[turn % len(xs)], scale, outs[turn % len(xs)])

                moved[label] = xs[0].nbytes + nbytes(outputs)
                half = moved[label] // 2 // 4096 * 4096
                copies = [torch.empty(2, half, dtype=torch.uint8, device="cuda") for _ in range(sets)]

                def copy(turn: int, copies: Any = copies) -> None:
                    copies[turn % len(copies)][0].copy_(copies[turn % len(copies)][1])

                times = time_interleaved({"quantize": call, "copy": copy}, args.samples)
                medians = {key: statistics.median(value) for key, value in times.items()}
                rate = moved[label] / medians["quantize"]
                row = {
                    "case": label, "bytes": moved[label], "seconds": times, "rate": rate,
                    "of_copy": medians["copy"] / medians["quantize"],
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{label:<58} {medians['quantize'] * 1e6:8.1f} us {rate / 1e12:5.2f} TB/s {row['of_copy']:5.2f} of copy",
                    flush=True,
                )
    return rows, failed, skipped


def against_reference(samples: int) -> dict[str, dict[str, float]]:
    """Median seconds of one call, kernels and PyTorch code, graph replay; and the host's of one eager call."""
    result = {}
    x = torch.randn(8192, 4096, device="cuda").to(BF16)
    for name in ("fp8_e4m3", "mxfp8_e4m3", "mxfp4"):

        def call(backend: str, name: str = name) -> Any:
            return lambda turn: fw.quantize(x, name, "both", backend=backend)

        times = time_interleaved({"hopper": call("hopper"), "native": call("native")}, samples)
        result[name] = {key: statistics.median(value) for key, value in times.items()}
        small = torch.randn(64, 256, device="cuda").to(BF16)
        for backend in ("hopper", "native"):
            host = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(100):
                    fw.quantize(small, name, "both", backend=backend)
                host.append((time.perf_counter() - start) / 100)
            result[name][f"{backend}, host"] = statistics.median(host)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60, help="start no case later than that")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    before = machine()
    reference = against_reference(args.samples)
    print(json.dumps(reference))
    rows, failed, skipped = measure(args)
    what = "fw.quantize: bytes that must move over median time, and that over the rate of a copy; graph replay, operands not in L2"
    record = {
        **record_head(__file__, what, args, before, machine(), cutedsl(python=True)),
        "against_reference_8192x4096_bf16": reference,
        "failed_checks": failed,
        "cases_not_started": skipped,
        "rows": rows,
    }
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
