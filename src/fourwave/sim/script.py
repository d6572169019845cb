"""Runs a script written for an AMD GPU on a machine without one: `device="cuda"` is served on the CPU, launches go to the simulator.

Tensors that the script puts on the "GPU" are CPU tensors of a subclass that says it is on cuda:0; PyTorch's subclass rules carry the mark from
tensor to tensor. A TorchFunctionMode takes the device out of every call before PyTorch sees it. torch.cuda's functions for devices, streams
and events are replaced for the time the script runs; what is not replaced is PyTorch's own and says that there is no CUDA.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

DEVICE = "cuda:0"
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}


class DeviceTensor(torch.Tensor):
    """A CPU tensor that the script believes to be on the GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(DEVICE)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return 0

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return plain(self).__repr__(**kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return plain(self).clone()

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return plain(self).__dlpack__(**{k: v for k, v in kwargs.items() if k != "stream"})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _is_gpu(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith(("cuda", "hip"))


def _on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, DeviceTensor) else value.as_subclass(DeviceTensor)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_on_gpu(v) for v in value)
    return value


class _Devices(TorchFunctionMode):
    """Takes GPU devices out of calls and marks the results."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return _on_gpu(plain(args[0]).clone())
        device = kwargs.get("device")
        if name == "to":
            device = (
                device
                if device is not None
                else next((x for x in args[1:] if isinstance(x, (str, torch.device))), None)
            )
            other = next((x for x in args[1:] if isinstance(x, torch.Tensor)), None)
            if device is not None or other is not None:
                gpu = _is_gpu(device) if device is not None else isinstance(other, DeviceTensor)
                moved = gpu != isinstance(args[0], DeviceTensor)
                if other is not None:
                    rest = (other.dtype,)
                else:
                    rest = tuple(x for x in args[1:] if not isinstance(x, (str, torch.device)))
                kwargs.pop("device", None)
                result = func(plain(args[0]), *rest, **kwargs) if rest or kwargs else plain(args[0])
                if moved and result.data_ptr() == args[0].data_ptr():
                    result = result.clone()
                return _on_gpu(result) if gpu else plain(result)
        if device is not None and _is_gpu(device):
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
            return _on_gpu(func(*args, **kwargs))
        if device is not None and any(isinstance(a, DeviceTensor) for a in args):
            return plain(func(*args, **kwargs))  # randn_like(gpu_tensor, device="cpu") and the like
        return func(*args, **kwargs)


class Stream(torch.cuda.Stream):
    """Everything is done when a call returns, so streams have nothing to order."""

    cuda_stream = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["device"] = torch.device(DEVICE)

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record()
        return event


class Event:
    """A point in host time. Times between events are the simulator's, not a GPU's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.seconds - self.seconds)


def _generator(device: Any = "cpu") -> torch.Generator:
    return _Generator("cpu" if _is_gpu(device) else device)


_Generator = torch.Generator


@contextlib.contextmanager
def served_on_cpu(arch: str) -> Iterator[None]:
    """Serve device="cuda" on the CPU for the block, as a GPU of `arch`."""
    stream = Stream()
    properties = types.SimpleNamespace(
        name=f"simulated {arch}", gcnArchName=arch, multi_processor_count=_COMPUTE_UNITS[arch], total_memory=1 << 38,
        warp_size=32 if arch == "gfx1250" else 64, major=9, minor=0,
    )  # fmt: skip
    replaced = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name, "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0), "synchronize": lambda device=None: None, "is_initialized": lambda: True,
        "init": lambda: None, "empty_cache": lambda: None, "manual_seed": torch.manual_seed, "manual_seed_all": torch.manual_seed,
        "current_stream": lambda device=None: stream, "default_stream": lambda device=None: stream, "Stream": Stream, "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(), "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False, "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0, "memory_allocated": lambda device=None: 0,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", _generator))
        stack.enter_context(mock.patch.object(torch.version, "hip", "simulated"))
        stack.enter_context(_Devices())
        yield


def run_script(path: str | Path, arguments: list[str], arch: str = "gfx950", **options: Any) -> tuple[int, Any]:
    """Run a Python script as `python path arguments` would, with a simulated GPU of `arch`.

    options   of fourwave.sim.session
    returns   (the script's exit status, the session's Report). Exceptions of the script are raised.
    """
    from . import session

    path = Path(path)
    with session(arch, **options) as report, served_on_cpu(arch):
        with (
            mock.patch.object(sys, "argv", [str(path), *arguments]),
            mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
        ):
            try:
                runpy.run_path(str(path), run_name="__main__")
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return status, report
