"""Compiles Triton kernels for AMD targets and prints, for each, the module in the llvm and rocdl dialects as it is just
before LLVM IR.

Run by an interpreter that has Triton (3.9.0 was used), never by the one that has FlyDSL:
    python triton_kernels.py < cases.json > modules.jsonl
A case: {"id", "kernel": "dot" | "dot_scaled" | "dot_tdm" | "gluon_scaled", "arch", "a", "b", "m", "n", "tile_m",
"tile_n", "tile_k", "k", "b_stored": "nk" | "kn", "warps", "nonkdim", "stages"}. A line of output: {"id", "text",
"shared", "threads", "error"}. No GPU is needed: Triton's translation to LLVM IR is replaced by a function that keeps
the module and stops.
"""

import json
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends.amd import compiler as amd
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource


@triton.jit
def dot(
    a_ptr, b_ptr, out_ptr, k, stride_a, stride_b, stride_out,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, b_kn: tl.constexpr, result: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum_k a[m, k] b[k, n]; b stored [n, k], or [k, n] with b_kn; one workgroup a tile."""
    rows = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    columns = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
    step = tl.arange(0, tile_k)
    acc = tl.zeros((tile_m, tile_n), dtype=result)
    for first in range(0, k, tile_k):
        a = tl.load(a_ptr + rows[:, None] * stride_a + (first + step)[None, :])
        if b_kn:
            b = tl.load(b_ptr + (first + step)[:, None] * stride_b + columns[None, :])
        else:
            b = tl.load(b_ptr + columns[None, :] * stride_b + (first + step)[:, None])
        acc = tl.dot(a, b, acc, out_dtype=result)
    tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], acc)


@triton.jit
def dot_scaled(
    a_ptr, b_ptr, out_ptr, scale_a_ptr, scale_b_ptr, k, stride_a, stride_b, stride_out, stride_sa, stride_sb,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, format_a: tl.constexpr, format_b: tl.constexpr,
    pack_a: tl.constexpr, pack_b: tl.constexpr,
):  # fmt: skip
    """The same with one e8m0 scale per row and 32 k; fp4 comes packed along k, two codes a byte."""
    rows = tl.program_id(0) * tile_m + tl.arange(0, tile_m)
    columns = tl.program_id(1) * tile_n + tl.arange(0, tile_n)
    step_a = tl.arange(0, tile_k // pack_a)
    step_b = tl.arange(0, tile_k // pack_b)
    blocks = tl.arange(0, tile_k // 32)
    acc = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for first in range(0, k, tile_k):
        a = tl.load(a_ptr + rows[:, None] * stride_a + (first // pack_a + step_a)[None, :])
        b = tl.load(b_ptr + columns[None, :] * stride_b + (first // pack_b + step_b)[:, None])
        sa = tl.load(scale_a_ptr + rows[:, None] * stride_sa + (first // 32 + blocks)[None, :])
        sb = tl.load(scale_b_ptr + columns[:, None] * stride_sb + (first // 32 + blocks)[None, :])
        acc = tl.dot_scaled(a, sa, format_a, b, sb, format_b, acc)
    tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], acc)


@triton.jit
def dot_tdm(
    a_ptr, b_ptr, out_ptr, m, n, k, stride_a, stride_b, stride_out,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, b_kn: tl.constexpr, result: tl.constexpr,
):  # fmt: skip
    """dot through tensor descriptors, which gfx1250's tensor data mover serves."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [m, k], [stride_a, 1], [tile_m, tile_k])
    if b_kn:
        b_desc = tl.make_tensor_descriptor(b_ptr, [k, n], [stride_b, 1], [tile_k, tile_n])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [n, k], [stride_b, 1], [tile_n, tile_k])
    out_desc = tl.make_tensor_descriptor(out_ptr, [m, n], [stride_out, 1], [tile_m, tile_n])
    m0 = tl.program_id(0) * tile_m
    n0 = tl.program_id(1) * tile_n
    acc = tl.zeros((tile_m, tile_n), dtype=result)
    for first in range(0, k, tile_k):
        a = a_desc.load([m0, first])
        if b_kn:
            b = b_desc.load([first, n0])
        else:
            b = b_desc.load([n0, first]).T
        acc = tl.dot(a, b, acc, out_dtype=result)
    out_desc.store([m0, n0], acc)


@gluon.jit
def gluon_scaled(
    a_ptr, b_ptr, out_ptr, scale_a_ptr, scale_b_ptr, k, stride_a, stride_b, stride_out, stride_sa, stride_sb,
    tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr, format_a: gl.constexpr, format_b: gl.constexpr,
    pack_a: gl.constexpr, pack_b: gl.constexpr, block: gl.constexpr, acc_layout: gl.constexpr, a_layout: gl.constexpr, b_layout: gl.constexpr,
):  # fmt: skip
    """dot_scaled with the layouts given: operands come from memory straight into the instruction's registers. One scale
    per row and `block` k."""
    sa_layout: gl.constexpr = gl.amd.cdna5.get_wmma_scale_layout(a_layout, [tile_m, tile_k // block], block)
    sb_layout: gl.constexpr = gl.amd.cdna5.get_wmma_scale_layout(b_layout, [tile_n, tile_k // block], block)
    m0 = gl.program_id(0) * tile_m
    n0 = gl.program_id(1) * tile_n
    a_rows = m0 + gl.arange(0, tile_m, gl.SliceLayout(1, a_layout))
    a_step = gl.arange(0, tile_k // pack_a, gl.SliceLayout(0, a_layout))
    b_columns = n0 + gl.arange(0, tile_n, gl.SliceLayout(0, b_layout))
    b_step = gl.arange(0, tile_k // pack_b, gl.SliceLayout(1, b_layout))
    sa_rows = m0 + gl.arange(0, tile_m, gl.SliceLayout(1, sa_layout))
    sa_blocks = gl.arange(0, tile_k // block, gl.SliceLayout(0, sa_layout))
    sb_rows = n0 + gl.arange(0, tile_n, gl.SliceLayout(1, sb_layout))
    sb_blocks = gl.arange(0, tile_k // block, gl.SliceLayout(0, sb_layout))
    acc = gl.zeros((tile_m, tile_n), gl.float32, acc_layout)
    for first in range(0, k, tile_k):
        a = gl.load(a_ptr + a_rows[:, None] * stride_a + (first // pack_a + a_step)[None, :])
        b = gl.load(b_ptr + b_columns[None, :] * stride_b + (first // pack_b + b_step)[:, None])
        sa = gl.load(scale_a_ptr + sa_rows[:, None] * stride_sa + (first // block + sa_blocks)[None, :])
        sb = gl.load(scale_b_ptr + sb_rows[:, None] * stride_sb + (first // block + sb_blocks)[None, :])
        acc = gl.amd.cdna5.wmma_scaled(a, sa, format_a, b, sb, format_b, acc)
    out_rows = m0 + gl.arange(0, tile_m, gl.SliceLayout(1, acc_layout))
    out_columns = n0 + gl.arange(0, tile_n, gl.SliceLayout(0, acc_layout))
    gl.store(out_ptr + out_rows[:, None] * stride_out + out_columns[None, :], acc)


def gluon_layouts(case: dict) -> dict:
    rows, bases = case["instr_m"], [[0, 1], [1, 0]] if case["warps"] == 4 else []
    swapped = case.get("transposed", True)
    made = {
        side: gl.amd.AMDWMMALayout(3, swapped, bases, [], [rows, 16, 64 if case[side] == "fp4" else 128])
        for side in "ab"
    }
    return {
        "acc_layout": gl.amd.AMDWMMALayout(3, swapped, bases, [], [rows, 16, 128]),
        "a_layout": gl.DotOperandLayout(0, made["a"], 16), "b_layout": gl.DotOperandLayout(1, made["b"], 16), "block": case["block"],
    }  # fmt: skip


class Captured(Exception):
    pass


class Llvm:
    """Triton's llvm module, but for the one function."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def to_module(self, module: Any, _context: Any) -> None:
        raise Captured(str(module))


POINTERS = {
    "f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "i8": "*i8", "fp8": "*fp8e4nv", "bf8": "*fp8e5", "fp8_fnuz": "*fp8e4b8", "bf8_fnuz": "*fp8e5b16",
    "fp4": "*u8", "f64": "*fp64",
}  # fmt: skip
SCALED = {"fp8": "e4m3", "bf8": "e5m2", "fp4": "e2m1"}


def compile_case(case: dict) -> dict:
    constants: dict = {name: case[name] for name in ("tile_m", "tile_n", "tile_k")}
    pointers = {"a_ptr": POINTERS[case["a"]], "b_ptr": POINTERS[case["b"]]}
    integers = ["m", "n", "k", "stride_a", "stride_b", "stride_out"]
    if case["kernel"] in ("dot", "dot_tdm"):
        function = dot if case["kernel"] == "dot" else dot_tdm
        integer, wide = case["a"] == "i8", case["a"] == "f64"
        constants |= {
            "b_kn": case["b_stored"] == "kn",
            "result": tl.int32 if integer else tl.float64 if wide else tl.float32,
        }
        pointers["out_ptr"] = "*i32" if integer else "*fp64" if wide else "*fp32"
    else:
        function = dot_scaled if case["kernel"] == "dot_scaled" else gluon_scaled
        if function is gluon_scaled:
            constants |= gluon_layouts(case)
        pointers |= {"out_ptr": "*fp32", "scale_a_ptr": "*u8", "scale_b_ptr": "*u8"}
        for side in "ab":
            four = case[side] == "fp4"
            constants |= {f"format_{side}": SCALED[case[side]], f"pack_{side}": 2 if four else 1}
            if not four:
                pointers[f"{side}_ptr"] = "*u8"
        integers += ["stride_sa", "stride_sb"]
    names = function.arg_names
    signature = {n: pointers.get(n) or ("i32" if n in integers else "constexpr") for n in names}
    attributes = {}
    for i, n in enumerate(names):
        if n in pointers:
            attributes[(i,)] = [["tt.divisibility", 16], ["tt.pointer_range", 32]]
        elif n in integers and n not in ("m", "stride_sa", "stride_sb"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    make = GluonASTSource if case["kernel"] == "gluon_scaled" else ASTSource
    source = make(
        function, signature, constexprs={(names.index(n),): v for n, v in constants.items()}, attrs=attributes
    )
    wave = 32 if case["arch"] == "gfx1250" else 64
    options = {
        "num_warps": case["warps"],
        "num_stages": case.get("stages", 2),
        "matrix_instr_nonkdim": case.get("nonkdim", 0),
    }
    result = {"id": case["id"], "threads": wave * case["warps"]}
    try:
        triton.compile(source, target=GPUTarget("hip", case["arch"], wave), options=options)
    except Captured as captured:
        text = str(captured)
        shared = text.partition("ttg.shared = ")[2].partition(" ")[0]
        return result | {"text": text, "shared": int(shared or 0)}
    raise RuntimeError(f"{case['id']}: Triton compiled it without passing the place where the module is taken")


def main() -> None:
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = True
    amd.llvm = Llvm(amd.llvm)
    for case in json.load(sys.stdin):
        try:
            line = compile_case(case)
        except Exception as error:  # one case that Triton refuses must not take the others with it
            line = {"id": case["id"], "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
