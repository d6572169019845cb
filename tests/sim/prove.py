"""Finds the tests that fail when the simulator gets an operation wrong. handled.json holds what this finds:

pytest tests/sim -n0 -m "not slow" --handled tests/sim/handled.json

Each test runs again for each operation that it lowers and no test has failed for yet, with that operation made wrong on that arch: its
results become a constant; where it has none, its effect is left out; where it has no effect either, the wave ends there. A test that then still
passes says nothing about the operation. Tests of whole kernels and of random programs are passed over: they meet many operations without saying which one is wrong.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _pytest.outcomes
import machine

from fourwave.sim.coverage import _Probe, recording
from fourwave.sim.ir_types import Array, Struct, Vec, dwords
from fourwave.sim.lowering import HANDLERS
from fourwave.sim.lowering.asm import MNEMONICS
from fourwave.sim.lowering.intrinsics import INTRINSICS
from fourwave.sim.program import Instruction

PASSED_OVER = {
    "test_conformance.py", "test_dataflow.py", "test_flydsl_hook.py", "test_matrix_triton.py", "test_mutations.py", "test_schedules.py", "test_tdm_triton.py",
    "test_tool.py", "test_transpose_triton.py", "test_waits.py",
}  # fmt: skip
RECORD = Path(__file__).with_name("handled.json")
_WRONG = 0x5A5A5A5A
_ENDS = {"JUMP", "BRANCH", "END", "UNREACHABLE"}
# No value and no order depends on them here: register loads and stores are complete when their values are used, prefetches and hints change nothing.
_NO_EFFECT = {
    *(f"{kind}.s.wait.{name}" for kind in ("rocdl", "llvm.amdgcn") for name in ("loadcnt", "storecnt", "kmcnt", "expcnt", "xcnt", "samplecnt", "bvhcnt")),
}  # fmt: skip
_TRIES = 20  # of a file's tests with one operation wrong, before it counts as untested there
_STEPS = 5000  # after which a loop that an operation broke is stopped


def _wrong(k: Any, t: Any) -> Any:
    if isinstance(t, Struct):
        return [_wrong(k, f) for f in t.fields]
    if isinstance(t, Array):
        return [_wrong(k, t.element) for _ in range(t.count)]
    bits = t.element.bits if isinstance(t, Vec) and t.element.bits == 1 else t.bits
    return tuple(k.const(_WRONG & ((1 << min(bits, 32)) - 1)) for _ in range(dwords(t)))


def _without_effect(name: str, k: Any, block: Any, length: int) -> None:
    """Take back what was emitted since `block` was `length` long, or end the wave where that is nothing, or where control leaves."""
    emitted = block.code[length:]
    if [i.op for i in emitted] == ["UNREACHABLE"]:
        emitted[0].op = "END"
    elif name not in _NO_EFFECT and emitted and k.block is block and not any(i.op in _ENDS for i in emitted):
        del block.code[length:]
        k.extracted.clear()
    else:
        block.code.insert(length, Instruction("UNREACHABLE", k.line, []))


@contextlib.contextmanager
def broken(name: str, arch: str) -> Iterator[None]:
    """In the block, the operation `name` is wrong on `arch`."""
    table = next(t for t in (HANDLERS, INTRINSICS, MNEMONICS) if name in t)
    handler: Any = table[name]

    def of_assembly(k: Any, line: Any) -> None:
        block, length = k.block, len(k.block.code)
        before = [slot.registers for slot in line.slots]
        handler(k, line)
        changed = [slot for slot, old in zip(line.slots, before) if slot.registers is not old]
        for slot in changed:
            slot.registers = tuple(k.const(_WRONG) for _ in slot.registers)
        if not changed:
            _without_effect(name, k, block, length)

    def of_mlir(k: Any, o: Any) -> Any:
        block, length = k.block, len(k.block.code)
        result = handler(k, o)
        if result is not None:
            return _wrong(k, k.result_type(o))
        _without_effect(name, k, block, length)
        return None

    def handle(k: Any, o: Any) -> Any:
        if isinstance(k, _Probe) or k.arch != arch:
            return handler(k, o)
        return of_assembly(k, o) if table is MNEMONICS else of_mlir(k, o)

    table[name] = handle
    try:
        yield
    finally:
        table[name] = handler


class Prover:
    def __init__(self) -> None:
        self.found: dict[str, dict[str, set[str]]] = {}  # operation -> arch -> files
        self.tries: dict[tuple[str, str, str], int] = {}

    def run(self, file: str, name_of_test: str, module: Any, test: Callable[[], Any]) -> None:
        """Run a test of a module, then again with each operation it lowered wrong."""
        if file in PASSED_OVER or name_of_test.startswith("test_random_programs"):
            return
        lowered: set[tuple[str, str]] = set()
        caches = [v for n, v in vars(module).items() if "program" in n and hasattr(v, "cache_clear")]
        self._clear(caches)
        with recording(lambda name, arch: lowered.add((name, arch))):
            test()
        for name, arch in sorted(lowered):
            key = (file, name, arch)
            if arch in self.found.get(name, {}) or self.tries.get(key, 0) >= _TRIES:
                continue
            self.tries[key] = self.tries.get(key, 0) + 1
            self._clear(caches)
            with broken(name, arch):
                machine.step_limit = _STEPS
                try:
                    test()
                except (Exception, _pytest.outcomes.Failed):
                    self.found.setdefault(name, {}).setdefault(arch, set()).add(file)
                finally:
                    machine.step_limit = None
        self._clear(caches)

    @staticmethod
    def _clear(caches: list[Any]) -> None:
        """Programs that a test module keeps are lowered again."""
        for kept in caches:
            kept.cache_clear()

    def write(self, path: Path) -> None:
        record = {name: {a: sorted(f) for a, f in sorted(archs.items())} for name, archs in sorted(self.found.items())}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(archs)}" for name, archs in record.items())
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
