"""Runs a script written for an AMD GPU on a machine without one: `device="cuda"` is served on the CPU, launches go to the simulator.

Tensors that the script puts on the "GPU" are CPU tensors of a subclass that says it is on cuda:0; PyTorch's subclass rules carry the mark from
tensor to tensor. A TorchFunctionMode takes the device out of every call before PyTorch sees it. torch.cuda's functions for devices, streams
and events are replaced for the time the script runs; what is not replaced is PyTorch's own and says that there is no CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import runpy
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.dlpack
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

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
        return plain(self).__repr__(**kwargs)[:-1] + f", device='{DEVICE}')"

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return plain(self).clone()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert a {DEVICE} tensor to numpy; use .cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    def pin_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only host tensors can be pinned")

    def record_stream(self, stream: Any) -> None: ...

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return _on_gpu(copy.deepcopy(plain(self), memo))

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return plain(self).__dlpack__(**{k: v for k, v in kwargs.items() if k != "stream"})


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _is_gpu(device: Any) -> bool:
    """Whether a device argument names the GPU; PyTorch takes a bare number as one of the accelerator's."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, (str, torch.device)) and str(device).startswith(("cuda", "hip"))


def _on_gpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, DeviceTensor) else value.as_subclass(DeviceTensor)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_on_gpu(v) for v in value)
    return value


class _Devices(TorchFunctionMode):
    """Takes GPU devices out of calls and marks the results. default: what torch.set_default_device named, if anything."""

    def __init__(self) -> None:
        super().__init__()
        self.default: torch.device | None = None
        self.factories = _device_constructors()

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor):
            if name == "cuda":
                return args[0] if isinstance(args[0], DeviceTensor) else _on_gpu(plain(args[0]).clone())
            if name == "to":
                return _to(func, args, kwargs)
            if name == "type_as" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
                return _to(torch.Tensor.to, args, kwargs)
            if name == "pin_memory" and not isinstance(args[0], DeviceTensor):
                return args[0]
        device = kwargs.get("device")
        if device is None and self.default is not None and func in self.factories:
            device = self.default
        if device is not None and _is_gpu(device):
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
            if any(result is a for a in args):  # as_tensor(host tensor, device="cuda") is a copy
                result = result if isinstance(result, DeviceTensor) else result.clone()
            return _on_gpu(result)
        if device is not None and any(isinstance(a, DeviceTensor) for a in args):
            result = func(*args, **kwargs)  # randn_like(gpu_tensor, device="cpu") and the like
            if any(result is a for a in args):
                result = result.clone()
            return plain(result)
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """Tensor.to in its three forms: (device, dtype, ...), (dtype, ...), (other, ...), by position or by name."""
    source, *rest = args
    words = dict(kwargs)
    if rest and isinstance(rest[0], torch.Tensor):
        words["other"] = rest.pop(0)
        names = ["non_blocking", "copy"]
    elif rest and isinstance(rest[0], torch.dtype):
        names = ["dtype", "non_blocking", "copy"]
    else:
        names = ["device", "dtype", "non_blocking", "copy"]
    words.update(zip(names, rest))
    other = words.pop("other", None)
    device = words.pop("device", None)
    words = {name: value for name, value in words.items() if value is not None}
    gpu = isinstance(source, DeviceTensor)
    if other is not None:
        gpu = isinstance(other, DeviceTensor)
        words["dtype"] = other.dtype
    elif device is not None:
        if str(device).startswith("meta"):
            return func(plain(source), device, **words)
        gpu = _is_gpu(device)
    result = func(plain(source), **words) if words else plain(source)
    if gpu != isinstance(source, DeviceTensor):
        if result.data_ptr() == source.data_ptr():
            result = result.clone()
    elif result.data_ptr() == source.data_ptr() and result.dtype == source.dtype:
        return source
    return _on_gpu(result) if gpu else result


class Stream(torch.cuda.Stream):
    """Everything is done when a call returns, so streams have nothing to order."""

    cuda_stream = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["device"] = torch.device(DEVICE)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None: ...

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


_Generator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return _Generator("cpu" if _is_gpu(device) else device)


class Generator(metaclass=_AnyGenerator):
    """torch.Generator, whose GPU kind is a CPU generator."""


@contextlib.contextmanager
def served_on_cpu(arch: str) -> Iterator[None]:
    """Serve device="cuda" on the CPU for the block, as a GPU of `arch`."""
    from . import flydsl_hook

    stream = Stream()
    properties = types.SimpleNamespace(
        name=f"simulated {arch}", gcnArchName=arch, multi_processor_count=_COMPUTE_UNITS[arch], total_memory=1 << 38,
        warp_size=32 if arch == "gfx1250" else 64, major=9, minor=0,
    )  # fmt: skip

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(int(number))  # torch.manual_seed calls this function

    replaced = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "get_device_name": lambda device=None: properties.name, "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0), "synchronize": lambda device=None: None, "is_initialized": lambda: True,
        "init": lambda: None, "empty_cache": lambda: None, "manual_seed": seed, "manual_seed_all": seed,
        "current_stream": lambda device=None: stream, "default_stream": lambda device=None: stream, "Stream": Stream, "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(), "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False, "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_allocated": lambda device=None: 0, "memory_allocated": lambda device=None: 0, "set_stream": lambda stream: None,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
    }  # fmt: skip
    accelerator = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "synchronize": lambda device=None: None, "current_stream": lambda device=None: stream, "current_device_index": lambda: 0,
        "set_device_index": lambda device: None,
    }  # fmt: skip
    devices = _Devices()
    from_dlpack = torch.from_dlpack

    def set_default_device(device: Any) -> None:
        devices.default = None if device is None else torch.device(device)

    def import_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = from_dlpack(tensor, *args, **kwargs)
        return _on_gpu(result) if isinstance(tensor, DeviceTensor) else result

    def ranges(value: Any) -> list[tuple[int, int]]:
        """A host tensor is not among the memory that a GPU's kernel may touch."""
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "torch_tensor", None)
        return [] if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DeviceTensor) else all_ranges(value)

    all_ranges = flydsl_hook._ranges
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(flydsl_hook, "_ranges", ranges))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in accelerator.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, value))
        for owner, name, value in (
            (torch, "Generator", Generator), (torch.version, "hip", "simulated"), (torch, "set_default_device", set_default_device),
            (torch, "get_default_device", lambda: devices.default or torch.device("cpu")), (torch, "from_dlpack", import_dlpack),
            (torch.utils.dlpack, "from_dlpack", import_dlpack),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        # Module.cuda() makes new parameters; by default it would keep the old ones' class and change their storage.
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.enter_context(devices)
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
                status = int(stop.code) if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
    return status, report
