"""--handled FILE: record which operations the tests lower, per arch, for `fourwave doctor --sim`. In one process, without -n."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

_files: dict[str, dict[str, set[str]]] = {}  # operation -> arch -> test files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--handled", metavar="FILE", help="write which operations the simulator's tests lower to FILE")


@pytest.fixture(autouse=True)
def _record_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--handled", default=None):
        yield
        return
    from fourwave.sim.coverage import recording

    with recording(lambda name, arch: _files.setdefault(name, {}).setdefault(arch, set()).add(request.path.name)):
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--handled", default=None)
    if path:
        record = {name: {a: sorted(f) for a, f in sorted(archs.items())} for name, archs in sorted(_files.items())}
        Path(path).write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
