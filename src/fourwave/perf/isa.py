"""Reads what the compiler made of a GEMM kernel: registers, LDS, spills, and the instructions of its main loop.

    kernel = compile_isa(problem, config, "gfx950")
    print(kernel)

FlyDSL compiles in a child process without a GPU, so that the caller's process state (target, caches, bindings) stays as
it is. Assembly needs no linker; linking it to a code object does, and compile_isa says when none was found.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fourwave import env

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem

# The first that exists links code objects. LLVM 14's lld does not know gfx950.
LINKERS = ("ld.lld-22", "ld.lld-21", "ld.lld-20", "ld.lld-19", "ld.lld")
COMPILE_SECONDS = 300  # time limit of the child
_MATRIX = ("v_mfma", "v_wmma")
_ACCESS = re.compile(r"(ds_(read|write|load|store)|(buffer|global|flat|scratch)_(load|store|atomic))")
_WIDE = re.compile(r"(_b128|_dwordx4)$")  # 16 bytes a lane


@dataclass(frozen=True)
class MainLoop:
    """Instructions of one main-loop step, as they stand in the final assembly."""

    k: int  # elements of the reduction that one step covers
    mfma: int  # or WMMA
    lds_reads: dict[str, int]  # by mnemonic
    lds_writes: dict[str, int]
    narrow: dict[str, int]  # accesses to global memory and LDS of fewer than 16 bytes a lane, by mnemonic
    loads_to_lds: int
    loads: int  # global or buffer loads into registers
    stores: int
    waits: list[str]  # s_waitcnt operands, in order
    barriers: int
    valu: int  # vector instructions other than MFMA and register copies
    copies: int  # v_mov and v_accvgpr_*
    salu: int
    instructions: int


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel for one architecture, from its assembly and metadata."""

    name: str
    arch: str
    vgpr: int  # registers per lane, AGPRs included
    agpr: int
    sgpr: int
    lds_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    main_loop: MainLoop
    text: str = field(repr=False)
    code_object: bytes | None = field(repr=False)  # ELF
    link_note: str  # which linker made code_object, or why there is none
    module: str = field(repr=False, default="")  # FlyDSL's module before code generation, with source locations

    def __str__(self) -> str:
        loop = self.main_loop
        reads = ", ".join(f"{count} {name}" for name, count in loop.lds_reads.items()) or "0"
        writes = ", ".join(f"{count} {name}" for name, count in loop.lds_writes.items()) or "0"
        narrow = ", ".join(f"{count} {name}" for name, count in loop.narrow.items()) or "0"
        return "\n".join(
            [
                f"{self.name} for {self.arch}",
                f"  registers   {self.vgpr} vector ({self.agpr} of them AGPR), {self.sgpr} scalar",
                f"  LDS         {self.lds_bytes} bytes",
                f"  spills      {self.vgpr_spills} vector, {self.sgpr_spills} scalar; scratch {self.scratch_bytes} bytes",
                f"  main loop   {loop.k} of K per step, {loop.instructions} instructions:",
                f"    MFMA          {loop.mfma}",
                f"    LDS reads     {reads}",
                f"    LDS writes    {writes}",
                f"    loads         {loop.loads_to_lds} to LDS, {loop.loads} to registers",
                f"    narrow        {narrow} accesses of fewer than 16 bytes a lane",
                f"    waits         {len(loop.waits)}: {'; '.join(loop.waits)}",
                f"    barriers      {loop.barriers}",
                f"    other         {loop.valu} vector, {loop.copies} register copies, {loop.salu} scalar",
                f"  code object {self.link_note}",
            ]
        )


def find_linker() -> str | None:
    """Path of an LLVM linker for AMD code objects, or None."""
    rocm = env.rocm_path() / "llvm/bin/ld.lld"
    if rocm.exists():
        return str(rocm)
    return next((path for name in LINKERS if (path := shutil.which(name))), None)


def compile_isa(
    problem: GemmProblem, config: GemmConfig | None, arch: str, *, vectorised: bool = True, lines: bool = False
) -> CompiledKernel:
    """Compile the FlyDSL GEMM kernel for problem and config (None: the default) and read its assembly.

    vectorised: the variant for N % 8 == 0 and aligned rows of out; otherwise the one that stores single elements.
    lines: source lines (.loc) in the assembly.
    Raises NotImplementedError (why_unsupported), RuntimeError with the compiler's output when it fails.
    """
    from fourwave.ops.gemm import amd
    from fourwave.ops.gemm.config import default_config, k_per_barrier, why_unsupported

    if (reason := why_unsupported(problem, config, arch)) is not None:
        raise NotImplementedError(reason)
    if config is None:
        config, _ = default_config(problem, arch)
    spec = amd.specialise(problem, config, arch, vectorised)
    return compile_spec(amd.__name__, spec, arch, k_per_barrier(config, problem.a_dtype.itemsize, arch), lines=lines)


def compile_spec(
    module: str, spec: object, arch: str, k_per_barrier: int | None = None, *, lines: bool = False
) -> CompiledKernel:
    """Compile what `module` (its build_launcher and placeholder_arguments) makes of spec, and read its assembly.

    k_per_barrier: of the main loop; None: a kernel without one. Raises RuntimeError with the compiler's output.
    """
    with tempfile.TemporaryDirectory(prefix="fourwave-isa-") as folder:
        root = Path(folder)
        linker = find_linker()
        if linker:
            link = root / "rocm/llvm/bin/ld.lld"
            link.parent.mkdir(parents=True)
            link.symlink_to(linker)
        (root / "spec").write_bytes(pickle.dumps((module, spec)))
        environment = {
            **os.environ,
            "COMPILE_ONLY": "1",
            "ARCH": arch,
            "FLYDSL_GPU_ARCH": arch,
            "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": str(root / "dump"),
            "ROCM_PATH": str(root / "rocm"),
            "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": str(int(lines)),
        }
        child = subprocess.run(
            [sys.executable, "-m", "fourwave.perf.isa", str(root)],
            env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS,
        )  # fmt: skip
        result = root / "result.json"
        if child.returncode or not result.exists():
            raise RuntimeError(f"compiling {spec} failed:\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}")
        note = json.loads(result.read_text())["link_note"]
        elf = root / "kernel.hsaco"
        return parse(
            (root / "kernel.s").read_text(), arch, elf.read_bytes() if elf.exists() else None,
            f"linked by {linker}" if elf.exists() else note, k_per_barrier,
            (root / "kernel.mlir").read_text(),
        )  # fmt: skip


def _compile_in_child(root: Path) -> None:
    """Leaves kernel.s, kernel.hsaco (if a linker is there) and result.json in root."""
    name, spec = pickle.loads((root / "spec").read_bytes())
    source = importlib.import_module(name)
    launcher = source.build_launcher(spec)
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu
    from flydsl._mlir.passmanager import PassManager

    def dumped(pattern):
        files = list((root / "dump").glob(f"*/*_{pattern}"))
        if len(files) != 1:
            raise RuntimeError(f"FlyDSL wrote {len(files)} files *_{pattern} instead of one") from failure
        return files[0].read_text()

    def binary_object(text, passes=None):
        with ir.Context() as context:
            module = ir.Module.parse(text, context=context)
            if passes:
                PassManager.parse(f"builtin.module({passes})", context=context).run(module.operation)
            for op in module.body.operations:
                if op.operation.name == "gpu.binary":
                    return gpu.ObjectAttr(op.operation.attributes["objects"][0]).object
        raise RuntimeError("no gpu.binary in the compiled module")

    failure = None
    try:
        launcher(*source.placeholder_arguments(spec))
    except Exception as error:
        # Without a linker the last step fails, after the module for code generation has been written.
        if (root / "rocm/llvm/bin/ld.lld").exists():
            raise
        failure = error
    note = ""
    (root / "kernel.mlir").write_text(dumped("reconcile_unrealized_casts.mlir"))
    if failure is None:
        (root / "kernel.s").write_text(dumped("final_isa.s"))
        (root / "kernel.hsaco").write_bytes(binary_object(dumped("gpu_module_to_binary.mlir")))
    else:
        assembly = binary_object(dumped("reconcile_unrealized_casts.mlir"), "gpu-module-to-binary{format=isa}")
        (root / "kernel.s").write_bytes(assembly)
        note = "not linked: no ld.lld (LLVM 19 or newer) found"
    (root / "result.json").write_text(json.dumps({"link_note": note}))


def parse(
    text: str, arch: str, code_object: bytes | None, link_note: str, barrier_k: int | None, module: str = ""
) -> CompiledKernel:
    """Read the assembly of one kernel. barrier_k: K of the main loop for each of its barriers.

    Where K is split there are two, and registers, spills and LDS are the larger figures.
    """

    def metadata(key, default=None):
        found = re.findall(rf"^[\s-]+\.{key}:\s+(\S+)", text, re.MULTILINE)
        if not found and default is not None:
            return default
        if not found:
            raise ValueError(f"no entry .{key} in the kernel's metadata")
        return max(map(int, found))

    name = re.search(r"^\s+\.globl\s+(\S+)", text, re.MULTILINE)
    if name is None:
        raise ValueError("no kernel in the assembly")
    return CompiledKernel(
        name=name[1],
        arch=arch,
        vgpr=metadata("vgpr_count"),
        agpr=metadata("agpr_count", 0),
        sgpr=metadata("sgpr_count"),
        lds_bytes=metadata("group_segment_fixed_size"),
        vgpr_spills=metadata("vgpr_spill_count"),
        sgpr_spills=metadata("sgpr_spill_count"),
        scratch_bytes=metadata("private_segment_fixed_size"),
        main_loop=_main_loop(text, barrier_k),
        text=text,
        code_object=code_object,
        link_note=link_note,
        module=module,
    )


def _loops(lines):
    """(first, last) line of every backward branch's range."""
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"(\.L\w+):", line))}
    for i, line in enumerate(lines):
        branch = re.match(r"\s+s_c?branch\w*\s+(\.L\w+)", line)
        if branch and labels.get(branch[1], len(lines)) <= i:
            yield labels[branch[1]], i


def _main_loop(text, barrier_k):
    lines = text.splitlines()
    best: list[str] = []
    best_mfma = -1
    for first, last in [(0, len(lines))] if barrier_k is None else _loops(lines):
        body = [
            m[0].strip() for line in lines[first : last + 1] if (m := re.match(r"\t[a-z][a-z0-9_]+(\s[^;]*)?", line))
        ]
        mfma = sum(line.startswith(_MATRIX) for line in body)
        if mfma > best_mfma:
            best, best_mfma = body, mfma
    if barrier_k is not None and best_mfma <= 0:
        raise ValueError("no loop with matrix instructions in the assembly")
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    narrow: dict[str, int] = {}
    waits = []
    count = dict.fromkeys(("to_lds", "loads", "stores", "barriers", "valu", "copies", "salu"), 0)
    for line in best:
        op, _, operands = line.partition(" ") if " " in line else line.partition("\t")
        if op.startswith(_MATRIX):
            continue
        if _ACCESS.match(op) and not _WIDE.search(op):
            narrow[op] = narrow.get(op, 0) + 1
        if op.startswith(("ds_read", "ds_load")):
            reads[op] = reads.get(op, 0) + 1
        elif op.startswith("ds_"):
            writes[op] = writes.get(op, 0) + 1
        elif op.startswith(("buffer_load", "global_load", "flat_load", "scratch_load")):
            count["to_lds" if re.search(r"\blds\b", operands) or "_lds_" in op else "loads"] += 1
        elif op.startswith(("buffer_", "global_", "flat_", "scratch_")):
            count["stores"] += 1
        elif op == "tensor_load_to_lds":
            count["to_lds"] += 1
        elif op == "tensor_store_from_lds":
            count["stores"] += 1
        elif op == "s_waitcnt":
            waits.append(" ".join(operands.split()))
        elif op.startswith("s_wait_"):  # gfx1250: a counter each
            waits.append(f"{op.removeprefix('s_wait_')}({int(operands, 0)})")
        elif op in ("s_barrier", "s_barrier_wait"):  # gfx1250: the second half
            count["barriers"] += 1
        elif re.match(r"v_(mov|accvgpr)", op):
            count["copies"] += 1
        elif op.startswith("v_"):
            count["valu"] += 1
        elif op.startswith("s_"):
            count["salu"] += 1
        else:
            raise ValueError(f"unknown kind of instruction in the main loop: {line}")
    return MainLoop(
        k=max(1, count["barriers"]) * (barrier_k or 0), mfma=best_mfma, lds_reads=reads, lds_writes=writes, narrow=narrow, loads_to_lds=count["to_lds"],
        loads=count["loads"], stores=count["stores"], waits=waits, barriers=count["barriers"], valu=count["valu"],
        copies=count["copies"], salu=count["salu"], instructions=len(best),
    )  # fmt: skip


if __name__ == "__main__":
    _compile_in_child(Path(sys.argv[1]))
