"""Shared by all tests: the backends to run on, and no backend choice left over from the shell or another test."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from targets import TARGETS, Target


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    # Two test processes (pytest -n 2) on two cores; the simulator takes its threads itself.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


@pytest.fixture(autouse=True)
def _no_backend_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FOURWAVE_BACKEND", raising=False)
    with fw.use_backend(None):
        yield


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Each backend that can run here; the others skip with the reason that the backend gives."""
    target: Target = request.param
    if why := registry.get(target.backend).unavailable():
        pytest.skip(f"{target.backend}: {why}")
    if target.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return target


_handled: dict[str, dict[str, set[str]]] = {}  # the simulator's operations: name -> arch -> test files that lower it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--handled",
        metavar="FILE",
        help="record which operations the tests simulate, for `fourwave doctor --sim`; without -n",
    )


@pytest.fixture(autouse=True)
def _record_operations(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--handled"):
        yield
        return
    from fourwave.sim.coverage import recording

    with recording(lambda name, arch: _handled.setdefault(name, {}).setdefault(arch, set()).add(request.path.name)):
        yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--handled"):
        record = {name: {a: sorted(f) for a, f in sorted(archs.items())} for name, archs in sorted(_handled.items())}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(archs)}" for name, archs in record.items())
        Path(path).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
