"""Products of MXFP8 and MXFP4 on an H100 or H200 against what PyTorch does with them: dequantize, then torch.mm; writes a record.

    python bench/mx_hopper.py --formats mxfp8,mxfp4,mxfp4_weights --rows 16,64,256,4096,8192 --every 3 --out record.json

The weights are those of the suite llm81, at the given numbers of rows; both operands quantized (e4m3 or e2m1, E8M0 scales of 1 x 32
along K), or the weights alone beside BF16 rows; out in BF16. Every variant starts from codes. Interleaved as in bench/gemm_hopper.py:

    fourwave   fw.gemm: decodes and multiplies; of MXFP4 with MXFP4 multiplies in FP8 where that is exact; or converts few rows'
               weights while it multiplies
    in bf16    the same by a configuration for bfloat16, where the one above is for FP8
    compiled   dequantization compiled by torch.compile (dynamic shapes), one kernel for each operand, then torch.mm
    eager      the same without the compiler
    mm         torch.mm of operands that are in BF16 already: no dequantization at all

Every row is checked before it is timed as in bench/gemm_hopper.py. A red check prints no speed.
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
    ROTATION,
    Measured,
    Truth,
    conclude,
    cutedsl,
    machine,
    preheat,
    record_head,
    run_rows,
    summary,
    time_interleaved,
)

import fourwave as fw
from fourwave.ops.gemm import sm90_decoded, sm90_rescaled
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.quantize import QuantizedTensor
from fourwave.testing import bounds
from fourwave.testing.llm_shapes import llm81

BF16, BLOCK = torch.bfloat16, 32
FORMATS = {"mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"), "mxfp4": ("mxfp4", "mxfp4"), "mxfp4_weights": (None, "mxfp4")}
RATIOS = {"compiled": "compiled", "eager": "eager", "mm alone": "mm", "in bf16": "in bf16"}
Operand = torch.Tensor | QuantizedTensor


def dequantize(codes: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[R, C] in BF16, exactly. codes: e4m3fn, or two e2m1 in a byte; scale: bytes of E8M0; values: of the 16 e2m1 codes."""
    torch._check(codes.shape[0] % 8 == 0)
    torch._check(codes.shape[1] % 16 == 0)
    factor = (scale.to(torch.int16) << 7).view(BF16)  # its bits are a bfloat16's exponent
    if codes.dtype == torch.uint8:
        plain = torch.stack([values[(codes & 15).int()], values[(codes >> 4).int()]], -1).flatten(1)
    else:
        plain = codes.to(BF16)
    return (plain.view(plain.shape[0], -1, BLOCK) * factor.unsqueeze(-1)).view(plain.shape)


def compiled_dequantize() -> Callable[..., torch.Tensor]:
    import torch._dynamo.config
    import torch.fx.experimental._config

    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # else it would run uncompiled
    torch.fx.experimental._config.use_duck_shape = False  # a square tensor is no case of its own
    return torch.compile(dequantize, dynamic=True)


def random_operand(rows: int, columns: int, name: str | None) -> Operand:
    x = torch.randn(rows, columns, device="cuda", dtype=BF16)
    return x if name is None else fw.quantize(x, name, backend="hopper")


def size(operand: Operand) -> int:
    if isinstance(operand, torch.Tensor):
        return operand.nbytes
    codes, scale, _ = operand.operand("rowwise")
    return codes.nbytes + scale.nbytes


def measure(
    name: str,
    shape: tuple[int, int, int],
    kind: str,
    compiled: Callable[..., torch.Tensor],
    samples: int,
    l2_bytes: int,
) -> tuple[dict[str, Any], str]:
    """One row: its record, without times where a check failed, and what to print."""
    M, N, K = shape
    formats = FORMATS[kind]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda", dtype=BF16)

    def pair() -> tuple[Operand, Operand]:
        return random_operand(M, K, formats[0]), random_operand(N, K, formats[1])

    sets = [pair()]
    sets += [pair() for _ in range(math.ceil(ROTATION * l2_bytes / sum(map(size, sets[0]))) - 1)]
    out = torch.empty(M, N, device="cuda", dtype=BF16)

    def plain(operand: Operand, how: Callable[..., torch.Tensor]) -> torch.Tensor:
        if isinstance(operand, torch.Tensor):
            return operand
        codes, scale, _ = operand.operand("rowwise")
        return how(codes, scale.view(torch.uint8), values)

    def ours(turn: int) -> None:
        a, b = sets[turn % len(sets)]
        fw.gemm(a, b, out=out, backend="hopper")

    def theirs(how: Callable[..., torch.Tensor]) -> Callable[[int], None]:
        def call(turn: int) -> None:
            a, b = sets[turn % len(sets)]
            torch.mm(plain(a, how), plain(b, how).mT, out=out)

        return call

    num_plain = max(1, math.ceil(ROTATION * l2_bytes / (2 * (M * K + N * K))))
    in_bf16 = [(plain(a, dequantize), plain(b, dequantize)) for a, b in sets[:num_plain]]

    def mm(turn: int) -> None:
        a, b = in_bf16[turn % len(in_bf16)]
        torch.mm(a, b.mT, out=out)

    row: dict[str, Any] = {"name": name, "formats": kind, "M": M, "N": N, "K": K}
    head = f"{kind:13} {M:6} {N:6} {K:6}"
    for operand, right in zip(sets[0], in_bf16[0], strict=True):
        if not isinstance(operand, torch.Tensor) and not torch.equal(operand.dequantize().to(BF16), right):
            return row, f"{head}  WRONG: the values are not QuantizedTensor.dequantize's"
        if not torch.equal(plain(operand, compiled), right):
            return row, f"{head}  WRONG: the compiled values differ"
    config: Any = fw.explain(*sets[0], out=out, backend="hopper").config
    in_fp8 = kind == "mxfp4" and not config.few_rows and config.tile_k == sm90_rescaled.PRODUCT_STEP
    u_acc = bounds.hopper_fp8_u_acc(K, True) if in_fp8 else bounds.U_FP32
    truth = Truth(*in_bf16[0], "TN", BF16, u_acc, None, None, "")
    out.fill_(float("nan"))
    ours(0)
    row["error_over_bound"] = truth.error(out)
    del truth
    if not row["error_over_bound"] <= 1:
        return row, f"{head}  WRONG: {row['error_over_bound']}"
    variants = {"fourwave": ours, "compiled": theirs(compiled), "eager": theirs(dequantize), "mm": mm}
    if in_fp8:
        p = GemmProblem(
            M, N, K, "TN", torch.uint8, torch.uint8, BF16, a_scaling="1x32", b_scaling="1x32", device_type="cuda"
        )
        decoded_problem = sm90_decoded.plain_problem(p)
        assert decoded_problem is not None
        plain_config: Any = sm90_decoded.chosen_config(p, decoded_problem)[0]

        def decoded(turn: int) -> None:
            a, b = sets[turn % len(sets)]
            fw.gemm(a, b, out=out, config=plain_config, backend="hopper")

        variants["in bf16"] = decoded
    row["seconds"] = time_interleaved(variants, samples)
    medians = {label: statistics.median(times) for label, times in row["seconds"].items()}
    row["ratios"] = {what: medians[label] / medians["fourwave"] for what, label in RATIOS.items() if label in medians}
    row["kernel"] = f"{config} in FP8" if in_fp8 else str(config)
    shown = "  ".join(f"{label} {medians[label] * 1e6:7.1f}" for label in variants)
    ratios = "  ".join(f"{value:.3f}" for value in row["ratios"].values())
    return row, f"{head}  {shown} us  {ratios}  {row['kernel']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="mxfp8,mxfp4,mxfp4_weights")
    parser.add_argument("--rows", default="16,64,256,4096,8192", help="M")
    parser.add_argument("--preheat", type=float, default=0.0, help="seconds of products before the first row")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--every", type=int, default=1, help="only every n-th of the 27 weights")
    parser.add_argument(
        "--warm", action="store_true", help="only compile the dequantization, into PyTorch's cache on disk"
    )
    parser.add_argument("--eager", action="store_true", help="nothing is compiled: `compiled` is what `eager` is")
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    began = time.monotonic()
    torch.manual_seed(0)
    compiled = dequantize if args.eager else compiled_dequantize()
    if args.warm:
        values = torch.zeros(16, device="cuda", dtype=BF16)
        for height, width in ((256, 512), (512, 256)):
            scale = torch.zeros(height, width // BLOCK, device="cuda", dtype=torch.uint8)
            for codes in (
                torch.zeros(height, width, device="cuda").to(torch.float8_e4m3fn),
                torch.zeros(height, width // 2, device="cuda", dtype=torch.uint8),
            ):
                compiled(codes, scale, values)
        return
    before = machine()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    preheat(args.preheat)
    kinds, all_rows = args.formats.split(","), [int(m) for m in args.rows.split(",")]
    weights = [weight for weight in llm81() if weight.microbatch == 1][:: args.every]
    todo: list[tuple[dict[str, Any], Callable[[], Measured]]] = []
    for weight in weights:
        for M in all_rows:
            for kind in kinds:
                shape = M, weight.out_features, weight.in_features
                label = {"formats": kind, "M": M, "N": shape[1], "K": shape[2]}
                name = f"{weight.model} {weight.layer}"
                todo.append((label, functools.partial(measure, name, shape, kind, compiled, args.samples, l2_bytes)))

    def record(rows: list[dict[str, Any]], skipped: int, ended: bool) -> dict[str, Any]:
        timed = [row for row in rows if "ratios" in row]
        groups = {
            f"{kind}, M={M}, {what}": [
                row["ratios"][what]
                for row in timed
                if (row["formats"], row["M"]) == (kind, M) and what in row["ratios"]
            ]
            for kind in kinds
            for M in all_rows
            for what in RATIOS
        }
        by_group = {what: summary([{"ratio": ratio} for ratio in ratios]) for what, ratios in groups.items() if ratios}
        what = "products of MX operands: median time of dequantization and torch.mm over fourwave's; graph replay, operands not in L2"
        made = {
            **record_head(__file__, what, args, before, machine() if ended else None, cutedsl()),
            "summary": by_group,
            "failed_checks": len(rows) - len(timed),
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
