"""Every operation that `fourwave doctor --sim` lists for an arch has a test there that fails when the operation is wrong.

handled.json is the record; prove.py makes it, and says what counts. A new handler turns the first test red until a test of it is recorded.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from prove import PASSED_OVER, RECORD, broken

from fourwave.sim import native
from fourwave.sim.coverage import Operation, operations, unhandled
from fourwave.sim.lowering import HANDLERS

HERE = Path(__file__).parent


def untested(found: list[Operation]) -> list[str]:
    return [f"{o.name} on {arch}" for o in found for arch in o.archs if arch not in o.tests]


def test_every_listed_operation_is_proven_on_every_arch_that_has_it() -> None:
    missing = untested(operations(RECORD))
    assert not missing, (
        f"no test fails when these are wrong: {missing}. Write one, then: {sys.modules['prove'].__doc__}"
    )


def test_an_operation_without_a_test_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HANDLERS, "rocdl.new.operation", lambda k, o: None)
    assert untested(operations(RECORD)) == [
        f"rocdl.new.operation on {arch}" for arch in ("gfx942", "gfx950", "gfx1250")
    ]


def test_the_record_names_what_there_is() -> None:
    listed = {o.name: o.archs for o in operations(RECORD)}
    for name, archs in json.loads(RECORD.read_text()).items():
        assert set(archs) <= set(listed[name]), name
        for files in archs.values():
            assert files and all((HERE / f).is_file() and f not in PASSED_OVER for f in files), (name, files)


def test_a_broken_operation_is_found() -> None:
    """The prover's own: wrong results, and effects left out, show."""
    import numpy as np
    from machine import itemwise

    def add() -> None:
        a = np.arange(64, dtype=np.uint32)
        np.testing.assert_array_equal(
            itemwise("\n  %r = llvm.add %a, %a : i32", [("i32", a)], "i32", arch="gfx950"), a + a
        )

    add()
    for name in ("llvm.add", "llvm.store"):
        with broken(name, "gfx950"), pytest.raises(AssertionError):
            add()
        with broken(name, "gfx942"):
            add()
    add()


@pytest.mark.skipif(importlib.util.find_spec("flydsl") is None, reason="FlyDSL is not installed")
def test_unhandled_operations_are_listed() -> None:
    found = unhandled()
    assert found and not set(found) & set(HANDLERS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_record_is_what_the_tests_prove(tmp_path: Path) -> None:
    """Runs prove.py over the tests (minutes)."""
    path = tmp_path / "handled.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        str(HERE),
        "-m",
        "not slow",
        "--handled",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
    assert not untested(operations(path))


@pytest.mark.parametrize("wave_size", [32, 64])
def test_the_core_compiles_without_warnings(wave_size: int, tmp_path: Path) -> None:
    """With every warning of -Wall -Wextra an error, as the machine's own compiler sees it."""
    compiler = native.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    assert compiler is not None
    flags = [f for f in native.flags(wave_size) if f not in ("-shared", "-O3")]
    command = [
        *compiler,
        *flags,
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-c",
        str(native._HERE / "core.c"),
        "-o",
        str(tmp_path / "core.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
