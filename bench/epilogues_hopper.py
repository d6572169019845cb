"""What fused outputs cost, on an H100 or H200: products with SwiGLU, saved preactivation, bias gradient and FP8 output.

    python bench/epilogues_hopper.py --out record.json

Each row has three variants, interleaved as in bench/gemm_hopper.py: `fused`, one call of the hopper backend; `plain`, the same
product without the additional outputs; `separate`, cuBLAS through PyTorch followed by PyTorch's elementwise kernels or reductions
(eager), and by fw.quantize's kernel where out is FP8. Every output of 128 spread rows is checked against float64 before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gemm_hopper import cutedsl, machine, operands, preheat, record_head, time_interleaved, views
from torch.nn import functional

import fourwave as fw
from fourwave.backends import registry
from fourwave.ops.gemm import sm90_choice, sm90_tiles
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.quantize.reference import encode
from fourwave.testing import bounds

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MORE: dict[str, dict[str, Any]] = {
    "swiglu": {"activation": "swiglu"},
    "swiglu, z": {"activation": "swiglu", "preactivation_dtype": BF16},
    "gelu_tanh, z, bias": {"activation": "gelu_tanh", "preactivation_dtype": BF16, "bias_dtype": BF16},
    "bias gradient": {"bias_grad_dtype": FP32},
    "FP8 out": {"out_dtype": E4M3, "out_scaling": "tensor"},
    "swiglu, z, FP8 out": {
        "activation": "swiglu", "preactivation_dtype": BF16, "out_dtype": E4M3, "out_scaling": "tensor"
    },
}  # fmt: skip
ROWS = [
    ("swiglu", BF16, "TN", (8192, 8192, 4096)), ("swiglu", BF16, "TN", (8192, 28672, 4096)),
    ("swiglu, z", BF16, "TN", (8192, 28672, 4096)), ("gelu_tanh, z, bias", BF16, "TN", (8192, 16384, 4096)),
    ("bias gradient", BF16, "NT", (4096, 4096, 8192)), ("bias gradient", BF16, "NT", (28672, 4096, 8192)),
    ("FP8 out", BF16, "TN", (8192, 8192, 4096)), ("swiglu", E4M3, "TN", (8192, 28672, 4096)),
    ("swiglu, z, FP8 out", E4M3, "TN", (8192, 28672, 4096)), ("FP8 out", E4M3, "TN", (8192, 8192, 4096)),
]  # fmt: skip


def measure(
    what: str, dtype: torch.dtype, layout: str, shape: tuple[int, int, int], samples: int, l2: int, sweep: bool
) -> Any:
    M, N, K = shape
    fp8 = dtype == E4M3
    plain = GemmProblem(M, N, K, layout, dtype, dtype, BF16, device_type="cuda")
    if fp8:
        plain = replace(plain, a_scaling="row", b_scaling="row")
    fused = replace(plain, **MORE[what])
    num_sets = max(1, math.ceil(2 * l2 / (dtype.itemsize * (M * K + N * K))))
    sets = [operands(M, N, K, layout, dtype) for _ in range(num_sets)]
    scale_a = torch.rand(M, 1, device="cuda") + 0.5 if fp8 else None
    scale_b = torch.rand(1, N, device="cuda") + 0.5 if fp8 else None
    full = torch.empty(M, N, device="cuda", dtype=BF16)
    out = torch.empty(M, fused.out_columns, device="cuda", dtype=fused.out_dtype)
    z = torch.empty(M, N, device="cuda", dtype=BF16) if fused.preactivation_dtype else None
    bias = torch.randn(N, device="cuda").to(BF16) if fused.bias_dtype else None
    bias_grad = torch.empty(M, device="cuda") if fused.bias_grad_dtype else None
    out_scale = torch.tensor(4.0, device="cuda") if fused.out_scaling else None
    amax = torch.empty((), device="cuda") if fused.out_scaling else None
    backend = registry.get("hopper")
    scales = {"a_scale": scale_a, "b_scale": scale_b}

    def run_fused(turn: int, config: Any = None) -> None:
        a, b = sets[turn % num_sets]
        more = {"preactivation": z, "bias_grad": bias_grad, "out_scale": out_scale, "out_amax": amax}
        backend.run_gemm(fused, config, GemmTensors(a, b, out, bias, **scales, **more))  # type: ignore[arg-type]

    def run_plain(turn: int) -> None:
        backend.run_gemm(plain, None, GemmTensors(*sets[turn % num_sets], full, **scales))  # type: ignore[arg-type]

    def run_separate(turn: int) -> None:
        a, b = sets[turn % num_sets]
        op_a, op_b = views(a, b, layout)
        if fp8:
            y = torch._scaled_mm(op_a, op_b, scale_a, scale_b, out_dtype=BF16)  # type: ignore[arg-type]
        else:
            y = torch.mm(op_a, op_b, out=full) if bias is None else torch.addmm(bias, op_a, op_b, out=full)
        if fused.activation == "swiglu":
            y = functional.silu(y[:, : N // 2]) * y[:, N // 2 :]
        elif fused.activation:
            y = functional.gelu(y, approximate="tanh")
        if out_scale is not None:
            fw.quantize(y, "fp8_e4m3", scale=out_scale, backend="hopper")
        if bias_grad is not None:
            torch.sum(a, 0, dtype=FP32, out=bias_grad)

    out.view(torch.uint8).fill_(0xFF)
    for poisoned in (z, bias_grad, amax):
        if poisoned is not None:
            poisoned.fill_(float("nan"))
    run_fused(0)
    errors: dict[str, float] = {}
    index = torch.linspace(0, M - 1, 128, device="cuda").round().long()
    a, b = sets[0]
    rows = a.double()[:, index].T if layout == "NT" else a.double()[index]
    columns = b.double().T if layout == "TN" else b.double()
    if scale_a is not None and scale_b is not None:
        rows, columns = rows * scale_a.double()[index], columns * scale_b.double()
    u_acc = bounds.hopper_fp8_u_acc(K, True) if fp8 else bounds.U_FP32
    told: dict[str, Any] = {"trans_b": False, "bias": bias}
    room = 4 * bounds.U_FP32 if fp8 else 0.0  # the scales' products

    def check(name: str, got: torch.Tensor, written: torch.dtype, activation: str | None) -> None:
        exact = gemm_reference(rows, columns, **told, activation=activation)
        bound = bounds.gemm_bound(rows, columns, written, **told, activation=activation, u_acc=u_acc + room)
        if name == "codes":
            inverse = out_scale.reciprocal()  # type: ignore[union-attr]
            ends = [
                encode((exact + s * bound).float(), inverse, fw.formats.E4M3FN).view(E4M3).double() for s in (-1, 1)
            ]
            low, high = torch.minimum(*ends), torch.maximum(*ends)
            errors[name] = float(((got.double() < low) | (got.double() > high) | got.double().isnan()).sum()) * 2
        else:
            errors[name] = bounds.error_ratio(got, exact, bound)[0]

    picked = out.view(torch.uint8)[index].view(out.dtype) if out.dtype == E4M3 else out[index]
    check("codes" if fused.out_scaling else "out", picked, FP32 if fused.out_scaling else BF16, fused.activation)
    if z is not None:
        check("z", z[index], BF16, None)
    if bias_grad is not None:
        bound = bounds.sum_bound(a.double(), FP32)
        errors["bias_grad"] = bounds.error_ratio(bias_grad, a.double().sum(0), bound)[0]
    row: dict[str, Any] = {
        "what": what,
        "dtype": str(dtype),
        "layout": layout,
        "M": M,
        "N": N,
        "K": K,
        "error_over_bound": errors,
    }
    head = f"{what:20} {'fp8' if fp8 else 'bf16':4} {layout} {M:6} {N:6} {K:6}"
    if not all(error <= 1 for error in errors.values()):
        return row, f"{head}  WRONG: {errors}"
    variants: dict[str, Callable[[int], None]] = {"fused": run_fused, "plain": run_plain, "separate": run_separate}
    if sweep:
        variants |= {str(c): functools.partial(run_fused, config=c) for c in sm90_tiles.candidates(fused)}
    row["seconds"] = time_interleaved(variants, samples)
    medians = {name: statistics.median(values) for name, values in row["seconds"].items()}
    row["over_plain"], row["ratio"] = medians["fused"] / medians["plain"], medians["separate"] / medians["fused"]
    row["config"] = str(sm90_choice.default_config(fused)[0])
    shown = "  ".join(f"{name} {medians[name] * 1e6:7.1f}" for name in ("fused", "plain", "separate"))
    tiles = [f"\n      {seconds * 1e6:7.1f}  {name}" for name, seconds in list(medians.items())[3:]]
    return row, f"{head}  {shown} us  over plain {row['over_plain']:.3f}  ratio {row['ratio']:.3f}{''.join(tiles)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preheat", type=float, default=0.0, help="seconds of products before the first row")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument(
        "--configs", choices=["default", "all"], default="default", help="all: time every tile, too, unchecked"
    )
    parser.add_argument("--commit", default="", help="commit of the measured tree, for the record")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    before = machine()
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    torch.manual_seed(0)
    preheat(args.preheat)
    rows = []
    for what in ROWS:
        row, text = measure(*what, args.samples, l2, args.configs == "all")
        rows.append(row)
        print(text, flush=True)
    failed = sum("ratio" not in row for row in rows)
    about = (
        "fused outputs of the Hopper GEMM: over_plain is its median time over that of the product alone; ratio, that of "
        "cuBLAS and separate kernels over its own; graph replay, operands not in L2"
    )
    record = {
        **record_head(__file__, about, args, before, machine(), cutedsl()),
        "failed_checks": failed,
        "rows": rows,
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
