"""What the simulator handles, per arch, and which tests prove it right: from the registered handlers, and a record that the tests make.

The record, tests/sim/handled.json, names for each operation and arch a file of tests of which one fails once the operation is made wrong there
(tests/sim/prove.py says how it is made).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lowering import HANDLERS, WAVE_SIZE, UnknownOperation
from .lowering.asm import MNEMONICS
from .lowering.intrinsics import INTRINSICS

_TITLES = {
    "arith": "integers and floats", "asm": "inline assembly", "atomics": "atomics", "control": "control flow", "convert": "conversions", "dot": "dot products",
    "gfx1250": "gfx1250's own", "intrinsics": "calls of intrinsics", "lanes": "between lanes", "matrix": "matrix unit", "memory": "memory",
    "order": "order", "private": "private memory", "reduce": "reductions", "vectors": "vectors",
}  # fmt: skip

_TABLES: dict[str, dict[str, Any]] = {"operation": HANDLERS, "intrinsic": INTRINSICS, "assembly": MNEMONICS}


@dataclass(frozen=True)
class Operation:
    """kind: "operation" (of the llvm or rocdl dialect), "intrinsic" (called by name) or "assembly" (in an inline-asm string)."""

    name: str
    kind: str
    group: str
    archs: tuple[str, ...]
    tests: dict[str, tuple[str, ...]]  # arch -> files of tests/sim that prove it there; empty outside a checkout


class _Passed(Exception):
    """A handler got past its check of the arch."""


class _Probe:
    """Stands for the lowering, an operation and a line of assembly: knows the arch and the name, nothing else."""

    def __init__(self, arch: str, name: str) -> None:
        self.arch, self.name, self.mnemonic = arch, name, name

    def fail(self, what: str, o: Any = None) -> UnknownOperation:
        return UnknownOperation(what)

    def __getattr__(self, name: str) -> Any:
        raise _Passed(name)


def _has(handler: Callable[..., Any], name: str, arch: str) -> bool:
    """Whether a handler takes the operation on an arch: those that do not have it are refused before anything else is looked at."""
    probe = _Probe(arch, name)
    try:
        handler(probe, probe)
    except UnknownOperation:
        return False
    except Exception:  # whatever a handler does next, it does with what the probe does not have
        return True
    return True


def find_record() -> Path | None:
    """The checkout's record of which tests lower which operation on which arch, or None where there is none."""
    path = Path(__file__).parents[3] / "tests" / "sim" / "handled.json"
    return path if path.is_file() else None


def operations(record: Path | None = None) -> list[Operation]:
    """Every operation that has a handler, by group and name. record: as recording() makes it; None: find_record()."""
    record = record or find_record()
    ran = json.loads(record.read_text(encoding="utf-8")) if record else {}
    found = []
    for kind, table in _TABLES.items():
        for name, handler in table.items():
            archs = tuple(arch for arch in WAVE_SIZE if _has(handler, name, arch))
            module = handler.__module__.rpartition(".")[2]
            tests = {arch: tuple(files) for arch, files in ran.get(name, {}).items()}
            found.append(Operation(name, kind, _TITLES.get(module, module), archs, tests))
    return sorted(found, key=lambda o: (o.group, o.kind, o.name))


def unhandled() -> list[str]:
    """Operations of FlyDSL's rocdl dialect that have no handler: kernels that hold them raise UnknownOperation."""
    from flydsl._mlir.dialects import rocdl

    named = {getattr(value, "OPERATION_NAME", "") for value in vars(rocdl).values()}
    return sorted(name for name in named if name.startswith("rocdl.") and name not in HANDLERS)


@contextlib.contextmanager
def recording(note: Callable[[str, str], None]) -> Iterator[None]:
    """Call note(operation, arch) for each operation that is lowered in the block."""

    def noted(name: str, handler: Any) -> Any:
        @functools.wraps(handler)
        def handle(k: Any, o: Any) -> Any:
            result = handler(k, o)
            if not isinstance(k, _Probe):
                note(name, k.arch)
            return result

        return handle

    before = {kind: dict(table) for kind, table in _TABLES.items()}
    for table in _TABLES.values():
        table.update({name: noted(name, handler) for name, handler in table.items()})
    try:
        yield
    finally:
        for kind, table in _TABLES.items():
            table.update(before[kind])
