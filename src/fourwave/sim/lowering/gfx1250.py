"""gfx1250: counters of its own, barriers in two halves, clusters, asynchronous copies, the tensor data mover, transposing loads.

Sources: LLVM's AMDGPU backend (AMDGPUUsage, IntrinsicsAMDGPU.td) for the operations; core.c's gfx1250.h and transpose.h cite theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..ir_types import dwords
from ..program import Block
from .base import Lowering, Value, handles
from .intrinsics import intrinsic

_DSCNT, _ASYNCCNT, _TENSORCNT, _OTHER = range(4)
_COUNTERS = {
    "dscnt": _DSCNT, "asynccnt": _ASYNCCNT, "tensorcnt": _TENSORCNT, "loadcnt": _OTHER, "storecnt": _OTHER, "kmcnt": _OTHER, "expcnt": _OTHER,
    "xcnt": _OTHER, "samplecnt": _OTHER, "bvhcnt": _OTHER,
}  # fmt: skip
_WORKGROUP_BARRIER, _CLUSTER_BARRIER = -1, -3
_NAMED = {"init": 0, "join": 1, "signal.var": 2}
_AXES = {"x": 0, "y": 1, "z": 2}


def _only_gfx1250(k: Lowering, o: Any) -> None:
    if k.arch != "gfx1250":
        raise k.fail(f"{_name(k, o)}: {k.arch} does not have it", o)


def _name(k: Lowering, o: Any) -> str:
    return k.ir.StringAttr(o.attributes["intrin"]).value if o.name == "llvm.call_intrinsic" else o.name


def _parameter(k: Lowering, o: Any, name: str, index: int) -> int:
    """A compile-time parameter: an attribute of a rocdl operation, a constant operand of an intrinsic."""
    if name in o.attributes:
        return k.integer_attribute(o, name)
    value = k.constant_of(k.operands[index]) if index < len(k.operands) else None
    if value is None:
        raise k.fail(f"{_name(k, o)} without a constant {name}", o)
    return value


def _signed16(value: int) -> int:
    return (value & 0xFFFF) - ((value & 0x8000) << 1)


# -- waits -------------------------------------------------------------------------------------------------------------


@handles(*(f"rocdl.s.wait.{name}" for name in ("dscnt", "asynccnt", "tensorcnt", "loadcnt", "storecnt", "expcnt")))
@intrinsic(*(f"llvm.amdgcn.s.wait.{name}" for name in _COUNTERS))
def _wait(k: Lowering, o: Any) -> Value:
    """Register loads and stores are complete when their values are used, so only dscnt, asynccnt and tensorcnt do something here."""
    _only_gfx1250(k, o)
    k.emit("WAIT_COUNTER", _COUNTERS[_name(k, o).rpartition(".")[2]], _parameter(k, o, "count", 0))


@handles("rocdl.asyncmark")
@intrinsic("llvm.amdgcn.asyncmark")
def _asyncmark(k: Lowering, o: Any) -> Value:
    """A mark behind the asynchronous copies issued so far: vector memory (vmcnt) before gfx1250."""
    k.emit("ASYNCMARK")


@handles("rocdl.wait.asyncmark")
@intrinsic("llvm.amdgcn.wait.asyncmark")
def _wait_asyncmark(k: Lowering, o: Any) -> Value:
    k.emit("WAIT_ASYNCMARK", _parameter(k, o, "count", 0))


# -- barriers ----------------------------------------------------------------------------------------------------------


def emit_barrier(k: Lowering) -> None:
    """The whole workgroup barrier, which gfx1250 has in two halves."""
    k.emit("BARRIER_SIGNAL", _WORKGROUP_BARRIER)
    k.emit("BARRIER_WAIT", _WORKGROUP_BARRIER)


def _barrier_id(k: Lowering, o: Any) -> int:
    number = _parameter(k, o, "id", 0)
    number = number - (1 << 32) if number >> 31 == 1 else _signed16(number) if number >> 15 == 1 else number
    if number not in (_WORKGROUP_BARRIER, _CLUSTER_BARRIER) and not 0 < number <= 16:
        raise k.fail(f"the barrier {number}", o)
    return number


@handles("rocdl.s.barrier.signal")
@intrinsic("llvm.amdgcn.s.barrier.signal")
def _signal(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    k.emit("BARRIER_SIGNAL", _barrier_id(k, o))


@handles("rocdl.s.barrier.signal.isfirst")
@intrinsic("llvm.amdgcn.s.barrier.signal.isfirst")
def _signal_isfirst(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    return (k.out("BARRIER_SIGNAL_ISFIRST", _barrier_id(k, o)),)


@handles("rocdl.s.barrier.wait")
@intrinsic("llvm.amdgcn.s.barrier.wait")
def _barrier_wait(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    k.emit("BARRIER_WAIT", _barrier_id(k, o))


@handles("rocdl.s.barrier.leave")
@intrinsic("llvm.amdgcn.s.barrier.leave")
def _barrier_leave(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    k.emit("BARRIER_LEAVE")


@handles(*(f"rocdl.s.barrier.{name}" for name in _NAMED))
@intrinsic(*(f"llvm.amdgcn.s.barrier.{name}" for name in _NAMED))
def _named_barrier(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    what = _name(k, o).partition("s.barrier.")[2]
    k.emit("BARRIER_NAMED", _NAMED[what], 0 if what == "join" else _parameter(k, o, "memberCnt", 1), k.operand(o, 0)[0])


@intrinsic("llvm.amdgcn.s.cluster.barrier")
def _cluster_barrier(k: Lowering, o: Any) -> Value:
    """What LLVM makes of it: the workgroup's barrier, then the cluster's, which the wave that was the first to signal the former signals."""
    _only_gfx1250(k, o)
    first = k.out("BARRIER_SIGNAL_ISFIRST", _WORKGROUP_BARRIER)
    k.emit("BARRIER_WAIT", _WORKGROUP_BARRIER)
    signal, after = Block(f"{k.block.name}-signal"), Block(f"{k.block.name}-met")
    k.b.blocks += [signal, after]
    k.emit("BRANCH", first, signal, after)
    k.block.successors = [signal, after]
    k.block, k.extracted = signal, {}
    k.emit("BARRIER_SIGNAL", _CLUSTER_BARRIER)
    k.emit("JUMP", after)
    k.block.successors = [after]
    k.block, k.extracted = after, {}
    k.emit("BARRIER_WAIT", _CLUSTER_BARRIER)


# -- who am I ----------------------------------------------------------------------------------------------------------


@handles("rocdl.wave.id")
@intrinsic("llvm.amdgcn.wave.id")
def _wave_id(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    return (k.out("WAVE_ID"),)


@handles(*(f"rocdl.cluster.{what}.{axis}" for what in ("id", "workgroup.id") for axis in _AXES))
@intrinsic(
    *(f"llvm.amdgcn.cluster.{what}.{axis}" for what in ("id", "workgroup.id", "workgroup.max.id") for axis in _AXES)
)
def _cluster_id(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    what, _, axis = _name(k, o).partition("cluster.")[2].rpartition(".")
    return (k.out("CLUSTER_ID", {"id": 0, "workgroup.id": 3, "workgroup.max.id": 6}[what] + _AXES[axis]),)


@intrinsic("llvm.amdgcn.cluster.workgroup.flat.id", "llvm.amdgcn.cluster.workgroup.max.flat.id")
def _cluster_flat_id(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    return (k.out("CLUSTER_ID", 10 if "max" in _name(k, o) else 9),)


# -- copies ------------------------------------------------------------------------------------------------------------

_WIDTHS = {"b8": 1, "b32": 4, "b64": 8, "b128": 16}


@handles(*(f"rocdl.{kind}.load.async.to.lds.{width}" for kind in ("global", "cluster") for width in _WIDTHS))
@intrinsic(*(f"llvm.amdgcn.{kind}.load.async.to.lds.{width}" for kind in ("global", "cluster") for width in _WIDTHS))
def _async_load(k: Lowering, o: Any) -> Value:
    """(global pointer, LDS pointer, offset, cache policy[, multicast mask]): each lane has an LDS address of its own."""
    _only_gfx1250(k, o)
    name = _name(k, o)
    pointer, lds = k.operand(o, 0), k.operand(o, 1)
    mask = k.operand(o, len(k.operands) - 1)[0] if ".cluster." in name else k.const(0)
    offset = _parameter(k, o, "offset", 2)
    k.emit("ASYNC_LOAD", offset, pointer[0], pointer[1], _WIDTHS[name.rpartition(".")[2]], lds[0], mask)


@handles(*(f"rocdl.global.store.async.from.lds.{width}" for width in _WIDTHS))
@intrinsic(*(f"llvm.amdgcn.global.store.async.from.lds.{width}" for width in _WIDTHS))
def _async_store(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    pointer, lds = k.operand(o, 0), k.operand(o, 1)
    offset, bytes_ = _parameter(k, o, "offset", 2), _WIDTHS[_name(k, o).rpartition(".")[2]]
    k.emit("ASYNC_STORE", offset, pointer[0], pointer[1], bytes_, lds[0])


@handles("rocdl.tensor.load.to.lds", "rocdl.tensor.store.from.lds")
@intrinsic(
    *(f"llvm.amdgcn.tensor.{what}{suffix}" for what in ("load.to.lds", "store.from.lds") for suffix in ("", ".d2"))
)
def _tensor(k: Lowering, o: Any) -> Value:
    """Descriptor groups 0 (four dwords), 1 (eight), 2 and 3 (four each), and a fifth that must be zero; .d2 has the first two only."""
    _only_gfx1250(k, o)
    groups = [i for i in range(len(k.operands)) if dwords(k.operand_type(o, i)) > 1]
    words = [r for i in groups for r in k.operand(o, i)]
    if len(words) not in (12, 20, 28):
        raise k.fail(f"a tensor descriptor of {len(words)} dwords", o)
    k.emit("TENSOR", int("store" in _name(k, o)), words)


# -- transposing loads -------------------------------------------------------------------------------------------------

_TRANSPOSES = {"tr16.b128": (16, 4), "tr8.b64": (8, 2), "tr4.b64": (4, 2), "tr6.b96": (6, 3)}
_GFX950_TRANSPOSES = {"tr8.b64": (8, 2), "tr4.b64": (4, 2), "tr6.b96": (6, 3)}
_GLOBAL_TRANSPOSES = {"tr.b128": (16, 4), "tr.b64": (8, 2), "tr4.b64": (4, 2), "tr6.b96": (6, 3)}


def _overloads(kind: str, names: Iterable[str]) -> list[str]:
    """The intrinsics by name, alone and with the result types that they take (IntrinsicsAMDGPU.td)."""
    types = {"b128": (".v8i16", ".v8f16", ".v8bf16"), "b64": (".v2i32",), "b96": (".v3i32",)}
    return [f"llvm.amdgcn.{kind}.{name}{t}" for name in names for t in ("", *types[name.rpartition(".")[2]])]


@handles(*(f"rocdl.ds.load.{name}" for name in _TRANSPOSES))
@intrinsic(*_overloads("ds.load", _TRANSPOSES))
def _ds_load_tr(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    short = _name(k, o).partition("ds.load.")[2]
    bits, count = _TRANSPOSES[".".join(short.split(".")[:2])]
    out = [k.b.new() for _ in range(count)]
    k.emit("TRANSPOSE_LDS", 0, k.operand(o, 0)[0], bits, 1, 0, out)
    return tuple(out)


@handles(*(f"rocdl.ds.read.{name}" for name in _GFX950_TRANSPOSES))
@intrinsic(*_overloads("ds.read", _GFX950_TRANSPOSES))
def _ds_read_tr(k: Lowering, o: Any) -> Value:
    if k.arch != "gfx950":
        raise k.fail(f"{_name(k, o)}: {k.arch} does not have it", o)
    short = _name(k, o).partition("ds.read.")[2]
    bits, count = _GFX950_TRANSPOSES[".".join(short.split(".")[:2])]
    out = [k.b.new() for _ in range(count)]
    k.emit("TRANSPOSE_LDS", 0, k.operand(o, 0)[0], bits, 0, 0, out)
    return tuple(out)


@handles(*(f"rocdl.global.load.{name}" for name in _GLOBAL_TRANSPOSES))
@intrinsic(*_overloads("global.load", _GLOBAL_TRANSPOSES))
def _global_load_tr(k: Lowering, o: Any) -> Value:
    _only_gfx1250(k, o)
    short = _name(k, o).partition("global.load.")[2]
    bits, count = _GLOBAL_TRANSPOSES[".".join(short.split(".")[:2])]
    pointer, out = k.operand(o, 0), [k.b.new() for _ in range(count)]
    k.emit("TRANSPOSE_GLOBAL", 0, pointer[0], pointer[1], bits, out)
    return tuple(out)


@handles("rocdl.global.prefetch", "rocdl.flat.prefetch")
@intrinsic("llvm.amdgcn.global.prefetch", "llvm.amdgcn.flat.prefetch")
def _prefetch(k: Lowering, o: Any) -> Value:
    """Into a cache: no value and no order depend on it."""
    _only_gfx1250(k, o)
