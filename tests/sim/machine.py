"""Runs small kernels, written as MLIR text, on the simulator: one instruction or one idiom at a time, without FlyDSL's tracer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fourwave.sim.launch import Memory, Options
from fourwave.sim.launch import run as run_program
from fourwave.sim.lowering import lower_kernel
from fourwave.sim.program import Program
from fourwave.sim.report import Finding, Report

POISON = 0xFFFFFFFF  # what LDS and undefined registers hold

# MLIR type -> numpy type that holds its bits.
BITS: dict[str, Any] = {
    "i8": np.uint8, "i16": np.uint16, "i32": np.uint32, "i64": np.uint64,
    "f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64,
}  # fmt: skip


@lru_cache(maxsize=1)
def bindings() -> Any:
    from flydsl._mlir import ir

    return ir


@lru_cache(maxsize=1)
def context() -> Any:
    from flydsl.compiler.jit_function import _create_mlir_context

    return _create_mlir_context()


def lower(body: str, arguments: str = "", lds: int | str = 0, arch: str = "gfx950") -> Program:
    """Lower one kernel.

    body        operations of the kernel, blocks included, without the final llvm.return
    arguments   the kernel's parameters as MLIR text
    lds         bytes of one static LDS array @lds, or the text of the module's globals
    """
    globals_ = lds if isinstance(lds, str) else ""
    if isinstance(lds, int) and lds:
        globals_ = (
            f"llvm.mlir.global external @lds() {{addr_space = 3 : i32, alignment = 16 : i64}} : !llvm.array<{lds} x i8>"
        )
    text = f"""module attributes {{gpu.container_module}} {{ gpu.module @kernels {{
      {globals_}
      llvm.func @k({arguments}) attributes {{rocdl.kernel, gpu.kernel}} {{
        {body}
        llvm.return
      }} }} }}"""
    ir = bindings()
    with context():
        try:
            module = ir.Module.parse(text)
        except Exception as error:
            numbered = "\n".join(f"{i + 1:4} {line}" for i, line in enumerate(text.splitlines()))
            raise ValueError(f"{error}\n{numbered}") from error
        gpu_module = module.body.operations[0].operation
        functions = [o.operation for o in gpu_module.regions[0].blocks[0].operations]
        function = next(f for f in functions if f.name == "llvm.func")
        return lower_kernel(ir, gpu_module, function, arch)


@dataclass(frozen=True)
class Address:
    """A pointer argument: `offset` bytes into a numpy array, whose bytes [0, visible) are the allocation the launch declares."""

    array: np.ndarray
    offset: int = 0
    visible: int | None = None


def words(value: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """A kernel argument's dwords, and the allocations it brings: an array or Address is a pointer, an int i32, a (int,) i64, a list a struct."""
    if isinstance(value, list):
        parts = [words(v) for v in value]
        return [w for p, _ in parts for w in p], [r for _, ranges in parts for r in ranges]
    if isinstance(value, np.ndarray):
        value = Address(value)
    if isinstance(value, Address):
        lo = value.array.ctypes.data
        size = value.array.nbytes if value.visible is None else value.visible
        address = lo + value.offset
        return [address & 0xFFFFFFFF, address >> 32], [(lo, lo + size)]
    if isinstance(value, tuple):
        return [value[0] & 0xFFFFFFFF, value[0] >> 32 & 0xFFFFFFFF], []
    return [value & 0xFFFFFFFF], []


def launch(
    program: Program,
    *arguments: Any,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 64,
    dynamic_lds: int = 0,
    expect: str | None = "",
    **options: Any,
) -> Report:
    """Run a program; `expect` names the one kind of finding the launch must have ("": none at all, None: anything)."""
    passed = [words(a) for a in arguments]
    memory = Memory([r for _, ranges in passed for r in ranges])
    options.setdefault("threads", 1)
    report = run_program(
        program,
        (grid, 1, 1) if isinstance(grid, int) else grid,
        (block, 1, 1) if isinstance(block, int) else block,
        dynamic_lds,
        [w for w, _ in passed],
        memory,
        Options(**options),
    )
    if expect is not None:
        kinds = {f.kind for f in report.findings}
        assert kinds == ({expect} if expect else set()), str(report)
    return report


def only(report: Report) -> Finding:
    assert len(report.findings) == 1, str(report)
    return report.findings[0]


PROLOGUE = """
  %tid = rocdl.workitem.id.x : i32
  %gid = rocdl.workgroup.id.x : i32
  %c64 = llvm.mlir.constant(64 : i32) : i32
  %base = llvm.mul %gid, %c64 : i32
  %item32 = llvm.add %base, %tid : i32
  %item = llvm.sext %item32 : i32 to i64
"""


def memory_type(t: str) -> str:
    return "i8" if t == "i1" else t


def load_item(name: str, t: str, pointer: str, item: str = "%item") -> str:
    """Text that loads element `item` of an array of `t`; an i1 is a byte in memory."""
    m = memory_type(t)
    raw = f"{name}_byte" if t == "i1" else name
    text = f"""
  {name}_ptr = llvm.getelementptr {pointer}[{item}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {m}
  {raw} = llvm.load {name}_ptr : !llvm.ptr<1> -> {m}"""
    return text + (f"\n  {name} = llvm.trunc {raw} : i8 to i1" if t == "i1" else "")


def store_item(name: str, t: str, pointer: str, item: str = "%item") -> str:
    m = memory_type(t)
    text = f"\n  {name}_byte = llvm.zext {name} : i1 to i8" if t == "i1" else ""
    value = f"{name}_byte" if t == "i1" else name
    return (
        text
        + f"""
  {name}_to = llvm.getelementptr {pointer}[{item}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {m}
  llvm.store {value}, {name}_to : {m}, !llvm.ptr<1>"""
    )


def itemwise(
    body: str, inputs: list[tuple[str, np.ndarray]], result: str, arch: str = "gfx950", width: int = 1
) -> np.ndarray:
    """Apply `body`, which defines %r from %a, %b, %c, to every item of the inputs.

    inputs   (MLIR type, bits): one item a lane; the number of items is padded to whole waves
    result   MLIR type of %r
    width    elements of BITS an item of the result has (vectors)
    returns  the result's bits
    """
    names = ["%a", "%b", "%c", "%d"][: len(inputs)]
    text = (
        PROLOGUE
        + "".join(load_item(n, t, f"{n}in") for n, (t, _) in zip(names, inputs))
        + body
        + store_item("%r", result, "%out")
    )
    arguments = ", ".join(f"{n}in: !llvm.ptr<1>" for n in names) + ", %out: !llvm.ptr<1>"
    program = lower(text, arguments, arch=arch)
    per_item = [np.ascontiguousarray(v) for _, v in inputs]
    count = len(per_item[0])
    waves = -(-count // 64)
    padded = []
    for v in per_item:
        assert len(v) == count
        p = np.zeros((waves * 64, *v.shape[1:]), v.dtype)
        p[:count] = v
        p[count:] = v[-1]
        padded.append(p)
    element = BITS[
        "i8" if result == "i1" else result.split("x")[-1].rstrip(">") if result.startswith("vector") else result
    ]
    out = np.full((waves * 64, width), 0xA5, np.uint8).astype(element)
    launch(program, *padded, out, grid=waves)
    return out[:count] if width > 1 else out[:count, 0]
