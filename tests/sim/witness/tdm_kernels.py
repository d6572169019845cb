"""Compiles Triton kernels that use gfx1250's tensor data mover and transposing LDS reads; prints their modules as JSON.

Run by an interpreter that has Triton (3.9.0 was used), never by the one that has FlyDSL:
    python tdm_kernels.py | xz -9e > tdm_modules.json.xz
Output: {name: {"text", "shared", "threads"}}, one module in the llvm and rocdl dialects for each, taken as triton_kernels.py does.
"""

import json
import re

import triton
import triton.language as tl
from triton.backends.amd import compiler as amd
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kernels import POINTERS, Captured, Llvm


@triton.jit
def copy1(x, y, n, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [n], [1], [tile])
    target = tl.make_tensor_descriptor(y, [n], [1], [tile])
    at = tl.program_id(0) * tile
    target.store([at], source.load([at]))


@triton.jit
def copy2(x, y, m, n, s0, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [m, n], [s0, 1], [16, tile])
    target = tl.make_tensor_descriptor(y, [m, n], [s0, 1], [16, tile])
    i, j = tl.program_id(0) * 16, tl.program_id(1) * tile
    target.store([i, j], source.load([i, j]))


@triton.jit
def copy3(x, y, k, m, n, s0, s1, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [k, m, n], [s0, s1, 1], [2, 8, tile])
    target = tl.make_tensor_descriptor(y, [k, m, n], [s0, s1, 1], [2, 8, tile])
    i, j = tl.program_id(0) * 2, tl.program_id(1) * 8
    target.store([i, j, 0], source.load([i, j, 0]))


@triton.jit
def copy4(x, y, a, b, c, d, s0, s1, s2, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [a, b, c, d], [s0, s1, s2, 1], [2, 4, 4, tile])
    target = tl.make_tensor_descriptor(y, [a, b, c, d], [s0, s1, s2, 1], [2, 4, 4, tile])
    i = tl.program_id(0) * 2
    target.store([i, 0, 0, 0], source.load([i, 0, 0, 0]))


@triton.jit
def copy5(x, y, a, b, c, d, e, s0, s1, s2, s3, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [a, b, c, d, e], [s0, s1, s2, s3, 1], [2, 2, 2, 4, tile])
    target = tl.make_tensor_descriptor(y, [a, b, c, d, e], [s0, s1, s2, s3, 1], [2, 2, 2, 4, tile])
    i = tl.program_id(0) * 2
    target.store([i, 0, 2, 0, 0], source.load([i, 0, 2, 0, 0]))


@triton.jit
def gather(x, index, y, m, n, s0, tile: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [m, n], [s0, 1], [1, tile])
    rows, columns = tl.arange(0, 32), tl.program_id(0) * tile + tl.arange(0, tile)
    value = source.gather(tl.load(index + rows), tl.program_id(0) * tile)
    tl.store(y + rows[:, None] * n + columns[None, :], value)


@triton.jit
def scatter(x, index, y, m, n, s0, tile: tl.constexpr):
    target = tl.make_tensor_descriptor(y, [m, n], [s0, 1], [1, tile])
    rows, columns = tl.arange(0, 32), tl.program_id(0) * tile + tl.arange(0, tile)
    value = tl.load(x + rows[:, None] * n + columns[None, :])
    target.scatter(value, tl.load(index + rows), tl.program_id(0) * tile)


@triton.jit
def dot(x, b, y, m, n, k, s0, s1, s2, tile: tl.constexpr, stored_kn: tl.constexpr):
    """y[m, n] = sum_k x[m, k] b[k, n], tiles of 64; b stored [k, n] (transposing LDS reads) or [n, k]."""
    left = tl.make_tensor_descriptor(x, [m, k], [s0, 1], [tile, tile])
    if stored_kn:
        right = tl.make_tensor_descriptor(b, [k, n], [s1, 1], [tile, tile])
    else:
        right = tl.make_tensor_descriptor(b, [n, k], [s1, 1], [tile, tile])
    out = tl.make_tensor_descriptor(y, [m, n], [s2, 1], [tile, tile])
    i, j = tl.program_id(0) * tile, tl.program_id(1) * tile
    acc = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, k, tile):
        if stored_kn:
            r = right.load([first, j])
        else:
            r = right.load([j, first]).T
        acc = tl.dot(left.load([i, first]), r, acc)
    out.store([i, j], acc)


CASES = {
    "copy1-i8": (copy1, "i8", 128, 4), "copy2-f16": (copy2, "f16", 32, 4), "copy2-i8-one-wave": (copy2, "i8", 64, 1),
    "copy3-f32": (copy3, "f32", 32, 4), "copy4-i8": (copy4, "i8", 64, 2), "copy5-f16": (copy5, "f16", 32, 4),
    "gather-i8-i16": (gather, "i8", 64, 4), "gather-f32-i32": (gather, "f32", 32, 4), "scatter-f16-i16": (scatter, "f16", 32, 4),
    "scatter-f32-i32": (scatter, "f32", 32, 4), "dot-f16-nk": (dot, "f16", 64, 4), "dot-f16-kn": (dot, "f16", 64, 4),
    "dot-fp8-kn": (dot, "fp8", 64, 4),
}  # fmt: skip


def compile_case(name: str) -> dict:
    function, element, tile, warps = CASES[name]
    constants = {"tile": tile}
    pointers = {"x": POINTERS[element], "y": POINTERS[element]}
    if function is dot:
        constants["stored_kn"] = name.endswith("kn")
        pointers |= {"b": POINTERS[element], "y": POINTERS["f32"]}
    if "index" in function.arg_names:
        pointers["index"] = "*" + name[-3:]
    names = function.arg_names
    signature = {n: pointers.get(n) or ("constexpr" if n in constants else "i32") for n in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(names) if n in pointers or re.fullmatch(r"s\d", n)}
    source = ASTSource(
        function, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attributes
    )
    try:
        triton.compile(source, target=GPUTarget("hip", "gfx1250", 32), options={"num_warps": warps, "num_stages": 2})
    except Captured as captured:
        text = re.sub(r" ?loc\([^()]*(\([^()]*\)[^()]*)*\)|#loc\d* = .*\n?", "", str(captured))
        shared = text.partition("ttg.shared = ")[2].partition(" ")[0]
        return {"text": text, "shared": int(shared or 0), "threads": 32 * warps}
    raise RuntimeError(f"{name}: Triton compiled it without passing the place where the module is taken")


if __name__ == "__main__":
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = True
    amd.llvm = Llvm(amd.llvm)
    print(json.dumps({name: compile_case(name) for name in CASES}))
