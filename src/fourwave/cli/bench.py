"""`fourwave bench sim`: the simulator's own speed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape

import fourwave as fw
from fourwave.cli import console as out
from fourwave.cli import names
from fourwave.cli.doctor import cpu
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.config import FLOAT8, candidates
from fourwave.ops.gemm.problem import FLOAT8 as FLOAT8_NAMES
from fourwave.ops.gemm.problem import PRECISIONS
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.testing import bounds

TILE = 256
SHAPE = (512, 512, 1024)  # M, N, K: 4 workgroups of 256 x 256


def run_bench_sim(arch: str, repeats: int, json: Path | None) -> None:
    (arch,) = names.archs([arch])
    records = [measure(arch, repeats, dtype) for dtype in (torch.bfloat16, FLOAT8[arch][0])]
    M, N, K = SHAPE
    console = out.stdout()
    table = out.table()
    table.add_column("milliseconds per workgroup", no_wrap=True)
    for heading in ("min", "median", "max"):
        table.add_column(heading, justify="right")
    for record in records:
        for name, key in (("whole call of fw.gemm", "call_seconds"), ("launch in the simulator", "launch_seconds")):
            values = [s / record["workgroups"] * 1e3 for s in record[key]]
            table.add_row(f"{record['dtype']}: {name}", *(f"{f(values):.1f}" for f in (min, statistics.median, max)))
    workgroups = records[0]["workgroups"]
    out.show(console, table, f"Simulator speed: {M}x{N}x{K} TN, {workgroups} workgroups of {TILE}x{TILE}x{K}, {arch}")
    processor = cpu()
    console.print(f"{repeats} launches of each after one that compiled")
    for record in records:
        console.print(f"config of {record['dtype']}: {escape(record['config'])}")
    console.print(f"CPU: {escape(processor)}; torch threads: {torch.get_num_threads()}")
    console.print("This is the speed of the simulator on this CPU. It is not the speed of any GPU.")
    if json:
        common = {
            "what": "simulator speed on a CPU; not the speed of any GPU",
            "arch": arch,
            "shape": SHAPE,
            "cpu": processor,
            "torch_threads": torch.get_num_threads(),
            "fourwave": fw.__version__,
            "torch": torch.__version__,
        }
        out.write_json(json, {**common, **records[0], "others": records[1:]})


def measure(arch: str, repeats: int, dtype: torch.dtype) -> dict[str, Any]:
    """Times of a product of two operands of dtype, which is checked."""
    config = next(c for c in candidates(arch, dtype.itemsize) if c.tile_m == c.tile_n == TILE)
    name = (PRECISIONS | FLOAT8_NAMES)[dtype]
    M, N, K = SHAPE
    torch.manual_seed(0)
    a = torch.randn(M, K).to(dtype)
    b = torch.randn(N, K).to(dtype)
    backend = f"sim:{arch}"
    walls: list[float] = []
    launches: list[float] = []
    with out.steps(f"bench sim {arch} {name}") as steps:
        steps.start(repeats + 1)
        try:
            result = fw.gemm(a, b, config=config, backend=backend)  # compiles
        except BackendUnavailable as error:
            out.fail(str(error))
        steps.done()
        from fourwave import sim

        for _ in range(repeats):
            sim.reset_report()
            start = time.perf_counter()
            again = fw.gemm(a, b, config=config, backend=backend)
            walls.append(time.perf_counter() - start)
            (launch,) = sim.current_report().launches
            launches.append(launch.seconds)
            workgroups = launch.workgroups
            steps.done()
            # A speed is only printed for a right result.
            if not torch.equal(again, result):
                out.fail("two launches of the same product differ", code=1)
    ratio, _ = bounds.error_ratio(result, gemm_reference(a, b), bounds.gemm_bound(a, b, result.dtype))
    if not ratio <= 1:
        out.fail(f"the product is wrong: its error is {ratio:.3g} times the bound", code=1)
    return {
        "dtype": name,
        "config": str(config),
        "workgroups": workgroups,
        "call_seconds": walls,
        "launch_seconds": launches,
        "median_seconds_per_workgroup": statistics.median(walls) / workgroups,
    }
