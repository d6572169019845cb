"""Shared by all tests: the backends to run on, and no backend choice left over from the shell or another test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "archs(*names): run the test once for each arch of the simulator (tests/sim/machine.py)"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--handled",
        metavar="FILE",
        help="record which of the simulator's operations the tests of tests/sim prove right (prove.py); without -n",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if marker := metafunc.definition.get_closest_marker("archs"):
        metafunc.parametrize("_on_arch", marker.args, indirect=True)


@pytest.fixture(autouse=True)
def _on_arch(request: pytest.FixtureRequest) -> Iterator[None]:
    if not hasattr(request, "param"):
        yield
        return
    from machine import on

    with on(request.param):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not pyfuncitem.config.getoption("--handled") or pyfuncitem.path.parent.name != "sim":
        return None
    from prove import Prover

    prover = pyfuncitem.config.stash.setdefault(_PROVER, Prover())
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    prover.run(pyfuncitem.path.name, pyfuncitem.name, pyfuncitem.module, lambda: pyfuncitem.obj(**arguments))
    return True


_PROVER: pytest.StashKey[Any] = pytest.StashKey()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (path := session.config.getoption("--handled")) and (prover := session.config.stash.get(_PROVER, None)):
        prover.write(Path(path))
