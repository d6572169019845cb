"""A function in the place of the kernels that sm90_launch launches, on the CPU."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fourwave.ops.gemm import sm90_launch

_TYPES: dict[str, Any] = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}
Run = Callable[[sm90_launch.Specialisation, dict[str, Any]], int | None]


class _Executor:
    """What CuTe DSL would have compiled: takes one address for each argument and one for its result."""

    def __init__(self, spec: sm90_launch.Specialisation, run: Callable[[dict[str, Any]], int | None]) -> None:
        self.run, self.arguments = run, sm90_launch._ARGUMENTS
        if spec.runs_when is not None:
            self.arguments = sm90_launch._ARGUMENTS_AND_GUARD
        elif spec.more_outputs:
            self.arguments = sm90_launch._ARGUMENTS_AND_MORE

    def capi_func(self, packed: ctypes.Array[ctypes.c_void_p]) -> None:
        got = {}
        for (name, kind), address in zip(self.arguments.items(), packed, strict=True):
            assert address is not None, name
            got[name] = _TYPES[kind].from_address(address)
        got["result"].value = self.run({name: each.value for name, each in got.items()}) or 0


def stand_in(monkeypatch: pytest.MonkeyPatch, run: Run, stream: Callable[[], int] = lambda: 0) -> None:
    """Have launches call `run` with their specialisation and their arguments by name; what it returns, None for 0, is the launch's
    result. `stream`: tells the current one."""
    monkeypatch.setattr(sm90_launch, "_executor", lambda spec: _Executor(spec, functools.partial(run, spec)))
    monkeypatch.setattr(sm90_launch, "_num_sms", lambda device: 132)
    monkeypatch.setattr(sm90_launch, "_local", threading.local())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: stream(), raising=False)
