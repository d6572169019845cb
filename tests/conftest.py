"""Shared by all tests: the backends to run on, and no backend choice left over from the shell or another test."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
