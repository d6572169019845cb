"""Shared by all tests: the backends to run on, and no choice left over from the shell or another test."""

from __future__ import annotations

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry
from targets import TARGETS, Target


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    # The cores are shared by the test processes (pytest -n 2 on two); the simulator takes its threads itself.
    processes = max(2, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 2)))
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // processes))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    # Which tests ran before in this process, pytest-xdist decides by how long they take. (torch.manual_seed takes a millisecond.)
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FOURWAVE_BACKEND", "FOURWAVE_AUTOTUNE", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with fw.use_backend(None):
        yield


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[logging.LogRecord]]:
    """What fourwave has logged. FlyDSL's records are in caplog's, too, where it was imported before the test began and compiles in it."""
    return lambda: [record for record in caplog.records if record.name.startswith("fourwave")]


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
    config.addinivalue_line("markers", "each_device: of tests/te: run the test on the CPU and on a GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--handled",
        metavar="FILE",
        help="record which of the simulator's operations the tests of tests/sim prove right (prove.py); without -n",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if marker := metafunc.definition.get_closest_marker("archs"):
        metafunc.parametrize("_on_arch", marker.args, indirect=True)
    if metafunc.definition.get_closest_marker("each_device"):
        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        metafunc.parametrize("_te_device", ["cpu", pytest.param("cuda", marks=no_gpu)], indirect=True)


@pytest.fixture(autouse=True)
def _te_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One device for modules of fourwave.te and for a test's inputs.

    Without `device=` these modules are on the GPU where there is one, and most tests' inputs are on the CPU. So for the time of a test of
    tests/te the modules' default is the CPU; what is marked `each_device` runs on a GPU, too, and puts its inputs where the modules are.
    """
    if request.path.parent.name == "te" and getattr(request, "param", "cpu") == "cpu":
        from fourwave.te import distributed, modules

        monkeypatch.setattr(modules, "_device", lambda device: device)
        monkeypatch.setattr(distributed, "_random", lambda: torch)


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


def pytest_collection_finish() -> None:
    # What torch, FlyDSL and pytest hold stays to the end, and tracing a kernel makes many small objects: fewer collections,
    # which leave the former alone.
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why tests were skipped, each reason once. (-rs would repeat it for each line of each file.)"""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        file, _, reason = (
            report.longrepr if isinstance(report.longrepr, (tuple, list)) else ("", 0, str(report.longrepr))
        )
        places[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0] or file)
    if places:
        terminalreporter.section("why tests were skipped")
    for reason, files in sorted(places.items(), key=lambda each: -len(each[1])):
        names = sorted(set(files))
        where = names[0] + (f" and {len(names) - 1} more files" if len(names) > 1 else "")
        terminalreporter.write_line(f"{len(files):5}  {reason}  [{where}]")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (path := session.config.getoption("--handled")) and (prover := session.config.stash.get(_PROVER, None)):
        prover.write(Path(path))
