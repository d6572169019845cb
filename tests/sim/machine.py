"""Runs small kernels, written as MLIR text, on the simulator: one instruction or one idiom at a time, without FlyDSL's tracer."""

from __future__ import annotations

import contextlib
import functools
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from fourwave.sim.launch import Memory, Options
from fourwave.sim.launch import run as run_program
from fourwave.sim.lowering import WAVE_SIZE, lower_kernel
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
    return pytest.importorskip("flydsl._mlir.ir", reason="FlyDSL is not installed")


@lru_cache(maxsize=1)
def context() -> Any:
    bindings()
    from flydsl.compiler.jit_function import _create_mlir_context

    return _create_mlir_context()


_arch, _intrinsics = "gfx950", False
step_limit: int | None = None  # of every launch, where it is set: prove.py's broken loops need not end


@contextlib.contextmanager
def on(arch: str) -> Iterator[None]:
    """In the block, kernels are lowered for `arch` where nothing else is said. "... by intrinsics": calls of intrinsics take the place of
    those operations of the rocdl dialect that by_intrinsics() knows."""
    global _arch, _intrinsics
    before = _arch, _intrinsics
    _arch, _, spelled = arch.partition(" by ")
    _intrinsics = spelled == "intrinsics"
    try:
        yield
    finally:
        _arch, _intrinsics = before


def arch() -> str:
    return _arch


def wave() -> int:
    """Lanes of a wave."""
    return WAVE_SIZE[_arch]


# an operation's text, the intrinsic's operands (a group of the text; with a type before it: that number as a constant), the types of those that are
# no constants, the result's type (text, or a group); group 1 is the name (LLVM, IntrinsicsAMDGPU.td and AMDGPUUsage)
_SPELLINGS: list[tuple[str, list[str], list[int], str | int]] = [
    (r"rocdl\.(s\.barrier\.signal) id = (-?\d+)", ["i32 2"], [], "()"),
    (r"rocdl\.(s\.barrier\.(?:wait|leave)) id = (-?\d+)", ["i16 2"], [], "()"),
    (r'"rocdl\.(s\.barrier\.signal\.isfirst)"\(\) <\{id = (-?\d+) : i32\}> : \(\) -> i1', ["i32 2"], [], "i1"),
    (r"rocdl\.(s\.barrier\.join) (%\w+) : (\S+)", ["2"], [3], "()"),
    (r"rocdl\.(s\.barrier\.(?:init|signal\.var)) (%\w+) member_cnt = (\d+) : (\S+)", ["2", "i32 3"], [4], "()"),
    (r"rocdl\.(s\.wait\.\w+) (\d+)", ["i16 2"], [], "()"),
    (r"rocdl\.(wait\.asyncmark) (\d+)", ["i16 2"], [], "()"),
    (r"rocdl\.(asyncmark)\b", [], [], "()"),
    (r"rocdl\.(wave\.id|cluster\.(?:workgroup\.)?id\.[xyz]) : i32", [], [], "i32"),
    (r"rocdl\.(global\.(?:load|store)\.async\.(?:to|from)\.lds\.b\d+) (%\w+), (%\w+), (\d+), (\d+) : (\S+), (\S+)",
     ["2", "3", "i32 4", "i32 5"], [6, 7], "()"),
    (r"rocdl\.(cluster\.load\.async\.to\.lds\.b\d+) (%\w+), (%\w+), (\d+), (\d+), (%\w+) : (\S+), (\S+)",
     ["2", "3", "i32 4", "i32 5", "6"], [7, 8], "()"),
    (r"rocdl\.((?:global|flat)\.prefetch) (%\w+), (\d+) : (\S+)", ["2", "i32 3"], [4], "()"),
    (r"rocdl\.(tensor\.(?:load\.to|store\.from)\.lds) (%\w+), (%\w+), (%\w+), (%\w+), (%\w+), (\d+) : (\S+), (\S+)",
     ["2", "3", "4", "5", "6", "i32 7"], [8, 9, 8, 8, 9], "()"),
    (r"rocdl\.((?:ds\.load|ds\.read|global\.load)\.tr\d?\d?\.b\d+) (%\w+) : (\S+) -> (\S+)", ["2"], [3], 4),
]  # fmt: skip


def by_intrinsics(text: str) -> str:
    """MLIR text whose rocdl operations of _SPELLINGS are calls of the intrinsics."""
    count = 0

    def call(m: re.Match[str], operands: list[str], types: list[int], result: str | int) -> str:
        nonlocal count
        names, shapes, constants = [], [], ""
        rest = iter(types)
        for operand in operands:
            kind, _, group = operand.rpartition(" ")
            value = m[int(group) + 1]  # the result's group comes first
            if kind:
                count += 1
                constants += f"%immediate{count} = llvm.mlir.constant({value} : {kind}) : {kind}\n  "
                value = f"%immediate{count}"
            else:
                kind = m[number + 1] if (number := next(rest, None)) is not None else "i32"
            names.append(value)
            shapes.append(kind)
        returned = m[result + 1] if isinstance(result, int) else result
        what = f'"llvm.amdgcn.{m[2]}"({", ".join(names)}) : ({", ".join(shapes)}) -> {returned}'
        return f"{constants}{m[1] or ''}llvm.call_intrinsic {what}"

    for pattern, operands, types, result in _SPELLINGS:
        found = r"(%\w+ = )?" + pattern
        text = re.sub(found, functools.partial(call, operands=operands, types=types, result=result), text)
    return text


def lower(body: str, arguments: str = "", lds: int | str = 0, arch: str | None = None) -> Program:
    """Lower one kernel, for arch() unless `arch` says otherwise.

    body        operations of the kernel, blocks included, without the final llvm.return
    arguments   the kernel's parameters as MLIR text
    lds         bytes of one static LDS array @lds, or the text of the module's globals
    """
    if _intrinsics:
        body = by_intrinsics(body)
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
        return lower_kernel(ir, gpu_module, function, arch or _arch)


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
    if step_limit is not None:
        options["step_limit"] = step_limit
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


def host_tells_rights() -> bool:
    """Whether the host says that a page may be read only: MADV_POPULATE_READ (22), Linux 5.14. Elsewhere a store to one ends the process."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(22)
    except (AttributeError, OSError, ValueError):
        return False
    return True


needs_rights = pytest.mark.skipif(
    not host_tells_rights(), reason="the rights of a page are asked of Linux 5.14 or later"
)


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


def alignment(t: str) -> str:
    """What a load or store of one item of an array states: a vector is only as aligned as its elements (LLVM's default would be more)."""
    if not (vector := re.fullmatch(r"vector<\d+x[a-z]+(\d+)>", t)):
        return ""
    return f" {{alignment = {max(1, int(vector[1]) // 8)} : i64}}"


def load_item(name: str, t: str, pointer: str, item: str = "%item") -> str:
    """Text that loads element `item` of an array of `t`; an i1 is a byte in memory."""
    m = memory_type(t)
    raw = f"{name}_byte" if t == "i1" else name
    text = f"""
  {name}_ptr = llvm.getelementptr {pointer}[{item}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {m}
  {raw} = llvm.load {name}_ptr{alignment(m)} : !llvm.ptr<1> -> {m}"""
    return text + (f"\n  {name} = llvm.trunc {raw} : i8 to i1" if t == "i1" else "")


def store_item(name: str, t: str, pointer: str, item: str = "%item") -> str:
    m = memory_type(t)
    text = f"\n  {name}_byte = llvm.zext {name} : i1 to i8" if t == "i1" else ""
    value = f"{name}_byte" if t == "i1" else name
    return (
        text
        + f"""
  {name}_to = llvm.getelementptr {pointer}[{item}] : (!llvm.ptr<1>, i64) -> !llvm.ptr<1>, {m}
  llvm.store {value}, {name}_to{alignment(m)} : {m}, !llvm.ptr<1>"""
    )


def itemwise(
    body: str, inputs: list[tuple[str, np.ndarray]], result: str, arch: str | None = None, width: int = 1
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
