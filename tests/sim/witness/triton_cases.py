"""Triton's kernels as an independent witness: the cases, and running a captured module in the simulator against float64.

Triton's layouts were tested on hardware by their authors and owe nothing to this simulator. A case is confirmed only
with random data, row scales that differ by decades, and for dot_scaled a random e8m0 scale per row and 32 k, so that a
wrong row, column, k block or scale shows.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

HERE = Path(__file__).parent
DTYPES: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.int8,
    "fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2, "fp8_fnuz": ml_dtypes.float8_e4m3fnuz, "bf8_fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def case(
    kernel: str,
    arch: str,
    a: str,
    b: str,
    tile: tuple[int, int, int],
    warps: int,
    nonkdim: int = 0,
    stored: str = "nk",
    steps: int = 2,
    **more: Any,
) -> dict:
    m, n, k = tile
    name = f"{arch}-{kernel}-{a}-{b}-{m}x{n}x{k}-w{warps}-{nonkdim or 'auto'}-{stored}" + "".join(
        f"-{x}{y}" for x, y in more.items()
    )
    return {
        "id": name, "kernel": kernel, "arch": arch, "a": a, "b": b, "tile_m": m, "tile_n": n, "tile_k": k, "k": k * steps, "b_stored": stored,
        "warps": warps, "nonkdim": nonkdim, **more,
    }  # fmt: skip


def cases() -> Iterator[dict]:
    """Every operand format, both MFMA shapes, several tiles and warp counts."""
    for arch, tail in (("gfx942", "_fnuz"), ("gfx950", "")):
        for nonkdim, stored in itertools.product((16, 32), ("nk", "kn")):
            for e in ("f16", "bf16", "f32", "i8"):
                yield case("dot", arch, e, e, (64, 64, 64), 4, nonkdim, stored)
            yield case("dot", arch, "bf16", "bf16", (128, 32, 32), 2, nonkdim, stored)
            yield case("dot", arch, "f16", "f16", (32, 64, 128), 1, nonkdim, stored)
        for nonkdim, x, y in itertools.product((16, 32), ("fp8", "bf8"), ("fp8", "bf8")):
            yield case("dot", arch, x + tail, y + tail, (64, 64, 64), 4, nonkdim)
    # small steps of k: the forms that gfx950 shares with gfx942
    yield from (case("dot", arch, "f64", "f64", (32, 32, 16), 1, 16) for arch in ("gfx942", "gfx950"))
    yield from (case("dot", "gfx950", e, e, (64, 64, 16), 4, 16, steps=4) for e in ("f16", "bf16"))
    yield from (
        case("dot", "gfx950", x, y, (64, 64, 32), 4, 32, steps=4) for x in ("fp8", "bf8") for y in ("fp8", "bf8")
    )
    yield case("dot", "gfx950", "i8", "i8", (64, 64, 32), 4, 16, steps=4)
    yield case("dot", "gfx950", "i8", "i8", (64, 64, 16), 4, 32, steps=4)
    for nonkdim, x, y in itertools.product((16, 32), ("fp8", "bf8", "fp4"), ("fp8", "bf8", "fp4")):
        yield case("dot_scaled", "gfx950", x, y, (64, 64, 128), 4, nonkdim)
        yield case("dot_scaled", "gfx950", x, y, (32, 128, 256), 2, nonkdim)
    for e, stored in itertools.product(("f16", "bf16", "f32", "i8"), ("nk", "kn")):
        yield case("dot", "gfx1250", e, e, (64, 64, 64), 4, 0, stored)
    yield case("dot", "gfx1250", "f16", "f16", (32, 32, 64), 1)
    for depth, x, y in itertools.product((64, 128), ("fp8", "bf8"), ("fp8", "bf8")):
        yield case("dot", "gfx1250", x, y, (64, 64, depth), 4)
    for x, y in itertools.product(("fp8", "bf8", "fp4"), ("fp8", "bf8", "fp4")):
        yield case("dot_scaled", "gfx1250", x, y, (64, 64, 128), 4)
        yield case("dot_scaled", "gfx1250", x, y, (32, 64, 256), 2)
    for x, y, swapped in itertools.product(("fp8", "bf8", "fp4"), ("fp8", "bf8", "fp4"), (True, False)):
        yield case("gluon_scaled", "gfx1250", x, y, (64, 64, 128), 4, block=16, instr_m=16, transposed=swapped)
    for block, swapped in itertools.product((32, 16), (True, False)):
        yield case(
            "gluon_scaled", "gfx1250", "fp4", "fp4", (64, 64, 128), 4, block=block, instr_m=32, transposed=swapped
        )
    for tile, warps in (((64, 64, 64), 4), ((32, 128, 32), 2)):
        yield case("dot_tdm", "gfx1250", "f16", "f16", tile, warps)
        yield case("dot_tdm", "gfx1250", "f16", "f16", tile, warps, tails=1)  # the last tile hangs over in m, n and k
        yield case("dot_tdm", "gfx1250", "bf16", "bf16", tile, warps, 0, "kn")
    yield case("dot_tdm", "gfx1250", "fp8", "bf8", (64, 64, 128), 4)


# One of each instruction: what the committed modules hold.
def chosen() -> Iterator[dict]:
    seen = set()
    for c in cases():
        depth = c["tile_k"] if c["kernel"] == "dot" and (c["arch"] == "gfx1250" or c["k"] == 4 * c["tile_k"]) else 0
        key = (c["arch"], c["kernel"], c["a"], c["b"], c["nonkdim"], depth, c.get("block"), c.get("instr_m"))
        if key not in seen:
            seen.add(key)
            yield c


def capture(python: str, wanted: Iterable[dict]) -> dict[str, dict]:
    """Compile the cases with the interpreter `python`, which has Triton. Returns its lines by id."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": ""}
        done = subprocess.run(
            [python, str(HERE / "triton_kernels.py")],
            input=json.dumps(list(wanted)),
            capture_output=True,
            text=True,
            env=environment,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return {line["id"]: line for line in map(json.loads, done.stdout.splitlines())}


def matrix_operations(text: str) -> list[str]:
    """Matrix instructions that a module holds, as the simulator names them; scaled forms with their formats."""
    found = set()
    for name, rest in re.findall(r"rocdl\.((?:mfma|wmma)\.[\w.]+)( .*)", text):
        formats = re.findall(r"\b(fp8_e4m3|fp8_e5m2|fp4_e2m1|fp6_e2m3|fp6_e3m2)\b", rest)
        found.add(" ".join([name, *formats]))
    constants = dict(re.findall(r"(%\w+) = llvm\.mlir\.constant\((\d+) : i32\)", text))
    for name, operands in re.findall(r'llvm\.call_intrinsic "llvm\.amdgcn\.(wmma\.[\w.]+)"\(([^)]*)\)', text):
        formats = []
        if name.endswith("f8f6f4"):
            listed = [x.strip() for x in operands.split(",")]
            formats = [
                ("fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")[int(constants[listed[i]])] for i in (0, 2)
            ]
        found.add(" ".join([re.sub(r"([fb]p8|[fb]f8)\.([fb]p8|[fb]f8)$", r"\1_\2", name), *formats]))
    return sorted(found)


def operand(rng: np.random.Generator, element: str, rows: int, k: int) -> np.ndarray:
    """Random values of the format whose rows differ by decades where the format's range allows."""
    if element == "i8":
        return rng.integers(-128, 128, (rows, k)).astype(np.int8)
    spread = (
        4.0 ** rng.integers(-3, 4, (rows, 1))
        if element in ("f16", "bf16", "f32", "f64")
        else 2.0 ** rng.integers(-1, 2, (rows, 1))
    )
    return (rng.standard_normal((rows, k)) * spread).astype(DTYPES[element])


def pack_fp4(values: np.ndarray) -> np.ndarray:
    codes = values.view(np.uint8)
    return np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4)


def run_case(c: dict, line: dict, grid: tuple[int, int] = (2, 2), seed: int = 0, **options: Any) -> float:
    """Run a captured case; returns the largest error in units of its bound (K roundings of fp32). Fails on any finding
    of the checkers."""
    from fourwave.sim.module import run_module

    rng = np.random.default_rng(seed)
    m, n, k = c["tile_m"] * grid[0], c["tile_n"] * grid[1], c["k"]
    if c.get("tails"):
        m, n, k = m - 5, n - 16, k - 16
    a, b = operand(rng, c["a"], m, k), operand(rng, c["b"], n, k)
    va, vb = a.astype(np.float64), b.astype(np.float64)
    integer = c["a"] == "i8"
    out = np.full(
        (m, n), -1 if integer else np.nan, np.int32 if integer else np.float64 if c["a"] == "f64" else np.float32
    )
    stored_a, stored_b = a, b
    if c["a"] == "fp4":
        stored_a = pack_fp4(a)
    if c["b"] == "fp4":
        stored_b = pack_fp4(b)
    arguments: list[Any]
    if c["kernel"] in ("dot_scaled", "gluon_scaled"):
        per = c.get("block", 32)
        sa, sb = (rng.integers(119, 136, (rows, k // per)).astype(np.uint8) for rows in (m, n))
        va = va * np.repeat(2.0 ** (sa.astype(float) - 127), per, axis=1)
        vb = vb * np.repeat(2.0 ** (sb.astype(float) - 127), per, axis=1)
        arguments = [stored_a, stored_b, out, sa, sb, k, stored_a.shape[1], stored_b.shape[1], n, k // per, k // per]
    else:
        if c["b_stored"] == "kn":
            stored_b = np.ascontiguousarray(b.T)
        arguments = [stored_a, stored_b, out, k, stored_a.shape[1], stored_b.shape[1], n]
        if c["kernel"] == "dot_tdm":
            arguments[3:3] = [m, n]
    if ".xf32" in line["text"]:  # operands are cut to 10 mantissa bits
        va, vb = (
            np.ascontiguousarray(v.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64)
            for v in (va, vb)
        )
    if (
        c["arch"] == "gfx1250" and c["a"] == "f32"
    ):  # Triton copies 16 bytes to LDS addresses aligned to 8; the simulator's rule is stricter
        options["checks"] = ("init", "race", "wait", "barrier")
    report = run_module(line["text"], arguments, (*grid, 1), line["threads"], c["arch"], line["shared"], **options)
    if report.findings:
        raise AssertionError(f"{c['id']}: {report}")
    exact = va @ vb.T
    bound = k * 2.0**-24 * (np.abs(va) @ np.abs(vb).T) + 1e-300
    error = np.abs(out.astype(np.float64) - exact) / (np.full_like(bound, 0.5) if integer else bound)
    return float(np.max(np.where(np.isnan(error), np.inf, error)))
