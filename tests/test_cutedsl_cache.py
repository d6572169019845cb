"""backends.cutedsl_cache.kernel with stand-ins for CuTe DSL: what compiles when, and never two at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fourwave.backends import cutedsl_cache, guard


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What other processes have compiled."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(guard, "import_cutlass", lambda: None)
    monkeypatch.setattr(cutedsl_cache, "load", kept.get)
    monkeypatch.setattr(cutedsl_cache, "store", kept.__setitem__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kept


def test_a_kernel_is_compiled_once_and_loaded_once_in_each_process(disk: dict[Any, Any]) -> None:
    made: list[str] = []

    def compile_kernel(spec: str) -> str:
        made.append(spec)
        return f"function of {spec}"

    here: dict[Any, Any] = {}
    first = cutedsl_cache.kernel(here, "spec", compile_kernel, lambda function: [function])
    assert cutedsl_cache.kernel(here, "spec", compile_kernel, lambda function: [function]) is first
    assert cutedsl_cache.kernel({}, "spec", compile_kernel, lambda function: [function]) == ["function of spec"]
    assert made == ["spec"] and disk == {"spec": "function of spec"}


def test_launchers_do_not_trace_at_the_same_time(disk: dict[Any, Any]) -> None:
    """CuTe DSL traces one function at a time, whichever launcher asks."""
    running, most = 0, 0

    def compile_kernel(spec: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1
        return spec

    launchers: list[dict[Any, Any]] = [{} for _ in range(4)]
    arguments = [(launcher, number, compile_kernel, str) for number, launcher in enumerate(launchers)]
    threads = [threading.Thread(target=cutedsl_cache.kernel, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and launchers == [{number: str(number)} for number in range(4)]


def test_nothing_is_compiled_inside_a_capture(disk: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="warm up first"):
        cutedsl_cache.kernel({}, "spec", pytest.fail, str)
    assert cutedsl_cache.kernel({"spec": "loaded"}, "spec", pytest.fail, str) == "loaded"
