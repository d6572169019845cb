"""Runs the kernel of one module in the `llvm` and `rocdl` dialects: what Triton's AMD backend holds before LLVM IR, or
hand-written text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np

from .float_mode import default_float_mode
from .host import Bounds, bounds_of, check_sizes
from .ir_types import Float, Int, Ptr, parse
from .launch import Memory, Options, run
from .lowering import lower_kernel
from .program import Program
from .report import Report


@lru_cache(maxsize=1)
def _context() -> Any:
    from flydsl.compiler.jit_function import _create_mlir_context

    context = _create_mlir_context()
    context.allow_unregistered_dialects = True  # attributes of Triton's own dialects
    return context


@lru_cache(maxsize=64)
def _lower(text: str, arch: str) -> tuple[Program, tuple[str, ...], Bounds]:
    from flydsl._mlir import ir

    with _context():
        module = ir.Module.parse(text)
        holder, functions = module.operation, []
        for op in module.body.operations:
            o = op.operation
            inner = [o] if o.name != "gpu.module" else [x.operation for x in o.regions[0].blocks[0].operations]
            defined = [f for f in inner if f.name == "llvm.func" and len(f.regions[0].blocks)]
            if o.name == "gpu.module" and defined:
                holder = o
            functions += defined
        if len(functions) > 1:
            functions = [f for f in functions if "rocdl.kernel" in f.attributes or "gpu.kernel" in f.attributes]
        if len(functions) != 1:
            raise ValueError(f"the module defines {len(functions)} kernels; this runs a module that holds one")
        types = tuple(str(a.type) for a in functions[0].regions[0].blocks[0].arguments)
        return lower_kernel(ir, holder, functions[0], arch), types, _bounds(module.operation, functions[0])


def _bounds(module: Any, function: Any) -> Bounds:
    """What the kernel states; a module of Triton's is for its own number of warps, which only its launcher knows otherwise."""
    attributes = module.attributes
    warps = next((n for n in ("ttg.total-num-warps", "ttg.num-warps") if n in attributes), None)
    if warps is None or "ttg.threads-per-warp" not in attributes:
        return bounds_of(function, default=1024)
    threads = attributes[warps].value * attributes["ttg.threads-per-warp"].value
    return Bounds((threads, 1, 1), threads)


def _pass(value: Any, text: str, memory: Memory) -> list[int]:
    """An argument's dwords; an array's or tensor's bytes become an allocation."""
    t = parse(text)
    if isinstance(t, Ptr):
        if value is None:
            return [0, 0]
        if not hasattr(value, "data_ptr") and not hasattr(value, "ctypes"):
            raise ValueError(
                f"{value!r} for a pointer ({text}); it takes a numpy array, a CPU tensor or None, whose bytes the kernel may touch"
            )
        if hasattr(value, "data_ptr"):
            if value.device.type != "cpu":
                raise ValueError(f"a tensor on {value.device} for a pointer; the simulator takes CPU tensors")
            address, size = value.data_ptr(), value.numel() * value.element_size()
            if size and not value.is_contiguous():
                raise ValueError("a tensor argument must be contiguous")
        else:
            if not value.flags.c_contiguous or not value.flags.writeable:
                raise ValueError(
                    "an array argument must be contiguous and writeable: a kernel may write what it points to"
                )
            address, size = value.ctypes.data, value.nbytes
        memory.ranges.append((address, address + size))
        return [address & 0xFFFFFFFF, address >> 32]
    if isinstance(t, Float):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ValueError(f"{value!r} for an argument of type {text}; it takes a number")
        if t.name == "f32":
            return list(struct.unpack("<I", struct.pack("<f", value)))
        if t.name == "f64":
            return list(struct.unpack("<II", struct.pack("<d", value)))
        raise NotImplementedError(f"an argument of type {text}")
    if not isinstance(t, Int):
        raise NotImplementedError(f"an argument of type {text}")
    if not isinstance(value, (int, np.integer)):
        raise ValueError(f"{value!r} for an argument of type {text}; it takes an int")
    value = int(value)
    if not -(1 << (t.bits - 1)) <= value < 1 << t.bits:
        raise ValueError(f"{value} does not fit an argument of type {text}")
    return [value >> (32 * i) & 0xFFFFFFFF for i in range(max(1, t.bits // 32))]


def _three(name: str, value: Any) -> tuple[int, int, int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, 1, 1
    if isinstance(value, (tuple, list)) and len(value) == 3 and all(isinstance(x, int) for x in value):
        return value[0], value[1], value[2]
    raise ValueError(f"{name}={value!r}; it takes an int, for x, or three")


def run_module(
    text: str,
    arguments: Sequence[Any],
    grid: tuple[int, int, int] | int,
    block: tuple[int, int, int] | int,
    arch: str = "gfx950",
    shared: int = 0,
    **options: Any,
) -> Report:
    """Run the module's one kernel on CPU memory.

    text        MLIR: a module with one defined `llvm.func`, directly or in a `gpu.module`
    arguments   numpy arrays or CPU tensors for pointers (None: a null pointer), ints, floats. Trailing pointers that
                are not passed are null: Triton appends two for scratch memory
    grid, block workgroups and threads; an int is the x dimension
    shared      bytes of LDS that the module declares without a size (Triton: attribute ttg.shared)
    options     as fourwave.sim.session's: checks, completion, schedule, threads, workgroups, step_limit, ...
    Raises UnknownOperation for what the simulator does not model, ValueError for arguments that do not fit and for sizes that HIP refuses or
    that the module was not compiled for (known_block_size, Triton's warps).
    """
    program, types, bounds = _lower(text, arch)
    given = list(arguments)
    if len(given) < len(types):
        missing = types[len(given) :]
        if not all(isinstance(parse(t), Ptr) for t in missing):
            raise ValueError(f"the kernel takes {len(types)} arguments ({', '.join(types)}); {len(given)} were passed")
        given += [None] * len(missing)
    if len(given) > len(types):
        raise ValueError(f"the kernel takes {len(types)} arguments ({', '.join(types)}); {len(given)} were passed")
    memory = Memory()
    words = [_pass(v, t, memory) for v, t in zip(given, types)]
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"unknown options {', '.join(unknown)}; the options are {', '.join(known)}")
    sizes = _three("grid", grid), _three("block", block)
    check_sizes(program.name, *sizes, bounds)
    with default_float_mode():
        return run(program, *sizes, shared, words, memory, Options(**options))
