"""Compiles Triton kernels whose B operand is stored [k, n], so that they read LDS with transposing loads; prints their modules as JSON.

Run by an interpreter that has Triton (3.9.0 was used), never by the one that has FlyDSL:
    python transpose_kernels.py | xz -9e > transpose_modules.json.xz
Output: {name: {"text", "shared", "threads"}}, one module in the llvm and rocdl dialects for each, taken as triton_kernels.py does.
"""

import json
import re

import triton
import triton.language as tl
from triton.backends.amd import compiler as amd
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kernels import Captured, Llvm, compile_case


@triton.jit
def dot_scaled_kn(
    a_ptr, b_ptr, out_ptr, scale_a_ptr, scale_b_ptr, k, stride_a, stride_b, stride_out, stride_sa, stride_sb,
    tile: tl.constexpr, tile_k: tl.constexpr, format_a: tl.constexpr, pack_a: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k a[m, k] b[k, n]; b is fp4, two codes of neighbouring n a byte; one e8m0 scale per row of a or column of b and 32 k."""
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    pairs = tl.program_id(1) * (tile // 2) + tl.arange(0, tile // 2)
    step_a, step_b, blocks = tl.arange(0, tile_k // pack_a), tl.arange(0, tile_k), tl.arange(0, tile_k // 32)
    acc = tl.zeros((tile, tile), dtype=tl.float32)
    for first in range(0, k, tile_k):
        a = tl.load(a_ptr + rows[:, None] * stride_a + (first // pack_a + step_a)[None, :])
        b = tl.load(b_ptr + (first + step_b)[:, None] * stride_b + pairs[None, :])
        sa = tl.load(scale_a_ptr + rows[:, None] * stride_sa + (first // 32 + blocks)[None, :])
        sb = tl.load(scale_b_ptr + columns[:, None] * stride_sb + (first // 32 + blocks)[None, :])
        acc = tl.dot_scaled(a, sa, format_a, b, sb, "e2m1", acc, rhs_k_pack=False)
    tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], acc)


def plain(text: str) -> str:
    """Without source locations."""
    return re.sub(r" ?loc\([^()]*(\([^()]*\)[^()]*)*\)|#loc\d* = .*\n?", "", text)


def compile_scaled(arch: str, format_a: str, shape: int) -> dict:
    names = dot_scaled_kn.arg_names
    constants = {"tile": 64, "tile_k": 128, "format_a": format_a, "pack_a": 2 if format_a == "e2m1" else 1}
    pointers = {n: "*fp32" if n == "out_ptr" else "*u8" for n in names if n.endswith("_ptr")}
    signature = {n: pointers.get(n) or ("constexpr" if n in constants else "i32") for n in names}
    attributes = {}
    for i, n in enumerate(names):
        if n in pointers:
            attributes[(i,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
        elif n in ("k", "stride_a", "stride_b", "stride_out"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        dot_scaled_kn, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attributes
    )
    wave = 32 if arch == "gfx1250" else 64
    try:
        triton.compile(
            source,
            target=GPUTarget("hip", arch, wave),
            options={"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": shape},
        )
    except Captured as captured:
        text = str(captured)
        shared = text.partition("ttg.shared = ")[2].partition(" ")[0]
        return {"text": plain(text), "shared": int(shared or 0), "threads": 4 * wave}
    raise RuntimeError("Triton compiled it without passing the place where the module is taken")


def compile_plain(arch: str, element: str, shape: int) -> dict:
    case = {
        "id": arch, "kernel": "dot", "arch": arch, "a": element, "b": element, "tile_m": 64, "tile_n": 64, "tile_k": 64, "k": 128,
        "b_stored": "kn", "warps": 4, "nonkdim": shape,
    }  # fmt: skip
    made = compile_case(case)
    return {"text": plain(made["text"]), "shared": made["shared"], "threads": made["threads"]}


if __name__ == "__main__":
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = True
    amd.llvm = Llvm(amd.llvm)
    modules = {}
    for shape in (16, 32):
        for element in ("bf16", "fp8"):
            modules[f"gfx950-{element}-{shape}"] = compile_plain("gfx950", element, shape)
        modules[f"gfx950-fp4-{shape}"] = compile_scaled("gfx950", "e4m3", shape)
    for element in ("bf16", "fp8"):
        modules[f"gfx1250-{element}-16"] = compile_plain("gfx1250", element, 0)
    modules["gfx1250-fp4-16"] = compile_scaled("gfx1250", "e2m1", 0)
    print(json.dumps(modules))
