"""Facts of MSLK's public FlyDSL grouped FP8 kernel and of this project's, compiled with the same FlyDSL and read by the same code.

    git clone https://github.com/meta-pytorch/MSLK;  git clone https://github.com/ROCm/FlyDSL
    pip download --no-deps --only-binary=:all: --python-version 3.12 flydsl==0.2.4, and unzip it
    python bench/mslk_grouped.py --mslk MSLK --flydsl FlyDSL --flydsl-024 UNZIPPED

Nothing of these is copied: they are imported from where they lie. MSLK's kernel is written for FlyDSL 0.2.4; docs/simulator_kernels.md says
what of that version it needs besides. No GPU is used, and nothing here is a time: registers, LDS and spills are the compiler's metadata,
instruction counts those of its assembly, one wave's, for 128 of K of the main loop. MSLK's kernel is unrolled along K, so its counts
are the difference between K = 2048 and K = 1024. LDS cycles that bank conflicts cost come from the simulator.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pickle
import subprocess
import sys
import tempfile
import types
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fourwave.ops.gemm.config import ARCHS, FLOAT8
from fourwave.ops.grouped_gemm.config import candidates
from fourwave.ops.grouped_gemm.problem import GroupedProblem
from fourwave.perf.grouped import compile_grouped_isa, extra_lds_cycles
from fourwave.perf.isa import CompiledKernel, MainLoop, compile_spec

BLOCK = 128
DEPTHS = (1024, 2048)
WEIGHTS = (8, 4096)  # G, N
TILES = ((128, 128), (64, 128))


@dataclass(frozen=True)
class MslkKernel:
    mslk: str
    flydsl: str
    flydsl_024: str
    arch: str
    tile_m: int
    tile_n: int
    k: int
    preshuffled: bool


def build_launcher(spec: MslkKernel) -> Any:
    """MSLK's launcher, with what moved in FlyDSL since 0.2.4 put where it expects it."""
    import flydsl.expr
    from flydsl._mlir import ir
    from flydsl.expr.typing import T

    def put(name: str, path: Path) -> None:
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        setattr(flydsl.expr, name.rpartition(".")[2], module)

    put("flydsl.expr.vector", Path(spec.flydsl_024) / "flydsl/expr/vector.py")
    put("flydsl.expr.buffer_ops", Path(spec.flydsl) / "kernels/common/buffer_ops.py")
    kind = ir.Float8E4M3FNUZType if spec.arch == "gfx942" else ir.Float8E4M3FNType
    words: Any = T if isinstance(T, type) else type(T)
    words.f8 = property(lambda self: kind.get())

    def vector_type(count: int) -> property:
        return property(lambda self: ir.VectorType.get([count], kind.get()))

    for count in (2, 4, 8, 16, 32):
        setattr(words, f"f8x{count}", vector_type(count))
    # Packages without their __init__, which import MSLK's compiled parts.
    for name in ("mslk", "mslk.flydsl", *(f"mslk.flydsl.kernels{more}" for more in ("", ".common", ".gemm", ".mma"))):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(Path(spec.mslk) / name.replace(".", "/"))]
    source: Any = importlib.import_module("mslk.flydsl.kernels.gemm.grouped_gemm_blockscale_contiguous")
    return source.compile_grouped_gemm_blockscale_contiguous(
        n=WEIGHTS[1], k=spec.k, num_groups=WEIGHTS[0], tile_m=spec.tile_m, tile_n=spec.tile_n, tile_k=BLOCK, scale_block_k=BLOCK,
        scale_block_n=BLOCK, out_dtype="bf16", b_preshuffled=spec.preshuffled,
    )  # fmt: skip


def placeholder_arguments(spec: MslkKernel) -> list[Any]:
    from flydsl import expr as fx

    (G, N), K, M = WEIGHTS, spec.k, spec.tile_m
    sizes = torch.tensor([M] + [0] * (G - 1))
    return [
        torch.zeros(M, N, dtype=torch.bfloat16), torch.zeros(M, K, dtype=torch.int8), torch.zeros(G, N, K, dtype=torch.int8),
        torch.zeros(K // BLOCK, M), torch.zeros(G, K // BLOCK, N // BLOCK), sizes, M, N, K, G, M // spec.tile_m + G, fx.Stream(None),
    ]  # fmt: skip


def lost_cycles(spec: MslkKernel) -> int:
    """LDS cycles that bank conflicts cost its first workgroup, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec"
        path.write_bytes(pickle.dumps(spec))
        child = subprocess.run([sys.executable, __file__, "--simulate", str(path)], capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"simulating {spec} failed:\n{child.stderr[-3000:]}")
    return int(child.stdout.split()[-1])


def simulate(path: str) -> None:
    from fourwave import sim

    spec = pickle.loads(Path(path).read_bytes())
    with sim.session(arch=spec.arch, count_bank_conflicts=True, workgroups=range(1)) as report:
        build_launcher(spec)(*placeholder_arguments(spec))
    counters = report.launches[0].counters
    print(counters["lds_read_cycles"] - counters["lds_read_cycles_ideal"])


def facts(kernel: CompiledKernel, loop: MainLoop, blocks: int, lost: int, code_bytes: dict[int, int]) -> dict[str, Any]:
    """loop: of `blocks` blocks of 128 k. code_bytes: by K."""
    counted = [int(wait.split("vmcnt(")[1].split(")")[0]) for wait in loop.waits if "vmcnt" in wait]

    def each(count: int) -> float:
        return round(count / blocks, 1)

    return {
        "VGPRs": kernel.vgpr,
        "LDS bytes": kernel.lds_bytes,
        "spills": kernel.vgpr_spills + kernel.sgpr_spills,
        "scratch bytes": kernel.scratch_bytes,
        "MFMA": each(loop.mfma),
        "other vector": each(loop.valu + loop.copies),
        "scalar": each(loop.salu),
        "LDS reads": each(sum(loop.lds_reads.values())),
        "LDS writes": each(sum(loop.lds_writes.values())),
        "loads": each(loop.loads + loop.loads_to_lds),
        "vmcnt waits": each(len(counted)),
        "least vmcnt": min(counted, default=None),
        "barriers": each(loop.barriers),
        "instructions": each(loop.instructions),
        "MFMA share": f"{loop.mfma / loop.instructions:.1%}",
        "LDS cycles lost": lost,
        "code bytes at K=": code_bytes,
    }


def difference(deep: MainLoop, shallow: MainLoop) -> MainLoop:
    values: dict[str, Any] = {}
    for name, value in asdict(deep).items():
        less = getattr(shallow, name)
        if isinstance(value, dict):
            values[name] = dict(Counter(value) - Counter(less))
        elif isinstance(value, list):
            values[name] = list((Counter(value) - Counter(less)).elements())
        else:
            values[name] = value - less
    return MainLoop(**values)


def mslk(paths: dict[str, str], arch: str, tile: tuple[int, int], preshuffled: bool) -> dict[str, Any]:
    kernels = {}
    for k in DEPTHS:
        spec = MslkKernel(**paths, arch=arch, tile_m=tile[0], tile_n=tile[1], k=k, preshuffled=preshuffled)
        kernels[k] = compile_spec("mslk_grouped", spec, arch)
        if k == DEPTHS[0]:
            lost = lost_cycles(spec)
    deep, shallow = kernels[DEPTHS[1]], kernels[DEPTHS[0]]
    sizes = {k: len(kernel.code_object or b"") for k, kernel in kernels.items()}
    blocks = (DEPTHS[1] - DEPTHS[0]) // BLOCK
    return facts(deep, difference(deep.main_loop, shallow.main_loop), blocks, lost, sizes)


def ours(arch: str, tile: tuple[int, int], preshuffled: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The tile, and its facts: the one asked for, or that of as many rows which there is."""
    codes = FLOAT8[arch][0]
    G, N = WEIGHTS
    problem = GroupedProblem(
        G, 4096, N, DEPTHS[1], "rows", "TN", codes, codes, torch.bfloat16, device_type="cuda", a_scaling="1x128",
        b_scaling="128x128", a_scale_layout="groups", b_preshuffled=preshuffled,
    )  # fmt: skip
    config = min(candidates(problem, arch), key=lambda c: (c.tile_m != tile[0], c.tile_n != tile[1]))
    kernel = compile_grouped_isa(problem, config, arch)
    size = len(kernel.code_object or b"")
    lost = extra_lds_cycles(problem, config, arch)
    found = facts(kernel, kernel.main_loop, kernel.main_loop.k // BLOCK, lost, dict.fromkeys(DEPTHS, size))
    return (config.tile_m, config.tile_n), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mslk", help="checkout of meta-pytorch/MSLK")
    parser.add_argument("--flydsl", help="checkout of ROCm/FlyDSL")
    parser.add_argument("--flydsl-024", help="unpacked wheel of flydsl 0.2.4")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--simulate", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.simulate:
        simulate(given.simulate)
        return
    paths = {name: getattr(given, name) for name in ("mslk", "flydsl", "flydsl_024")}
    if None in paths.values():
        parser.error("give --mslk, --flydsl and --flydsl-024")
    paths = {name: str(Path(path).resolve()) for name, path in paths.items()}
    # The child that compiles imports this file as a module.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")])
    sys.modules["mslk_grouped"] = sys.modules[__name__]
    MslkKernel.__module__ = "mslk_grouped"
    rows = []
    for arch in given.arch or ARCHS:
        for tile in TILES:
            for preshuffled in (False, True):
                for whose, (shape, made) in (
                    ("MSLK", (tile, mslk(paths, arch, tile, preshuffled))),
                    ("fourwave", ours(arch, tile, preshuffled)),
                ):
                    name = {
                        "arch": arch,
                        "kernel": whose,
                        "tile": f"{shape[0]}x{shape[1]}",
                        "b": "preshuffled" if preshuffled else "plain",
                    }
                    rows.append(name | made)
                    if len(rows) == 1:
                        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
                    print("| " + " | ".join(map(str, rows[-1].values())) + " |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
