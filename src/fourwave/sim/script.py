"""Runs a script written for an AMD GPU on a machine without one: `device="cuda"` is served on the CPU, launches go to the simulator.

Tensors that the script puts on the "GPU" are CPU tensors of a subclass that says it is on cuda:0. A TorchFunctionMode takes the device out of
every call before PyTorch sees it. PyTorch keeps the subclass from tensor to tensor, but not in gradients and saved tensors, so the storages are
marked: a TorchDispatchMode sees what autograd's C++ does, and marks what is computed from marked storage. torch.cuda's functions for devices,
streams and events are replaced for the time the script runs; what is not replaced is PyTorch's own and says that there is no CUDA.
"""

from __future__ import annotations

import contextlib
import copy
import runpy
import sys
import sysconfig
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils.dlpack
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
        with torch._C.DisableTorchFunction():
            return plain(self).__repr__(**kwargs)[:-1] + f", device='{DEVICE}')"

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return _transfer(self, False)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        raise TypeError(f"can't convert a {DEVICE} tensor to numpy; use .cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    def pin_memory(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only host tensors can be pinned")

    def record_stream(self, stream: Any) -> None: ...

    def __deepcopy__(self, memo: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if not self.is_leaf:
                raise RuntimeError("only leaf tensors support deepcopy; detach the tensor first")
            result = _on_gpu(copy.deepcopy(plain(self.detach()), memo)).requires_grad_(self.requires_grad)
            result.__dict__.update(copy.deepcopy(self.__dict__, memo))
            if self.grad is not None:
                result.grad = copy.deepcopy(self.grad, memo)
            return result

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return plain(self).__dlpack__(**{k: v for k, v in kwargs.items() if k != "stream"})


# What a tensor on the GPU answers for itself, by any of the names through which a function mode sees the question.
_ANSWERS = {"device", "is_cuda", "is_cpu", "get_device", "cpu", "numpy", "record_stream", "__repr__", "__array__", "__deepcopy__", "__dlpack__", "__dlpack_device__"}  # fmt: skip


class _Marks:
    """The storages that are on the GPU. A weak reference keeps a storage's address from being used again."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}
        self.limit = self.least = 1024  # storages at which the dead are dropped

    @staticmethod
    def storage(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            try:
                return tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # sparse tensors and other kinds without a storage
                return None

    def add(self, tensor: torch.Tensor) -> None:
        if (storage := self.storage(tensor)) is None or storage._cdata in self.storages:
            return
        if len(self.storages) >= self.limit:
            self.storages = {key: mark for key, mark in self.storages.items() if not mark.expired()}
            self.limit = max(self.least, 2 * len(self.storages))
        self.storages[storage._cdata] = StorageWeakRef(storage)

    def remove(self, tensor: torch.Tensor) -> None:
        if (storage := self.storage(tensor)) is not None:
            self.storages.pop(storage._cdata, None)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return (storage := self.storage(tensor)) is not None and storage._cdata in self.storages


_marks = _Marks()


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, DeviceTensor) or (isinstance(value, torch.Tensor) and value in _marks)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as PyTorch's own class, to work on within this module."""
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(torch.Tensor)


def _moved(source: torch.Tensor, gpu: bool) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        result = plain(source).clone()
        if gpu:
            return _on_gpu(result)
        _marks.remove(result)  # the dispatch mode saw a copy of marked storage
        return result


class _Transfer(torch.autograd.Function):
    """A copy between host and GPU; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, gpu: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.gpu = gpu
        return _moved(source, gpu)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _transfer(grad, not ctx.gpu), None


def _transfer(source: torch.Tensor, gpu: bool) -> torch.Tensor:
    if source.requires_grad and torch.is_grad_enabled():
        return _Transfer.apply(source, gpu)
    return _moved(source, gpu)


def _is_gpu(device: Any) -> bool:
    """Whether a device argument names the GPU; PyTorch takes a bare number as one of the accelerator's."""
    if isinstance(device, int) and not isinstance(device, bool):
        return True
    return isinstance(device, (str, torch.device)) and str(device).startswith(("cuda", "hip"))


def _on_gpu(value: Any) -> Any:
    """Mark tensors; what PyTorch made as its own class becomes ours in place, so that leaves stay leaves."""
    if isinstance(value, torch.Tensor):
        _marks.add(value)
        return _claim(value)
    if isinstance(value, (tuple, list)):
        for v in value:
            _on_gpu(v)
    return value


def _claim(value: Any) -> Any:
    """Give tensors in marked storage our class."""
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor and value in _marks:
            value.__class__ = DeviceTensor  # type: ignore[assignment]
    elif isinstance(value, (tuple, list)):
        for v in value:
            _claim(v)
    return value


class _Memory(TorchDispatchMode):
    """Marks what is computed from marked storage, and has the function mode on in custom operators.

    PyTorch switches a function mode off while it handles a call, hence in the Python code of an operator as well.
    """

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        gpu = any(t in _marks for t in inputs)
        if func.namespace not in ("aten", "prim", "prims"):
            key = "CPU"
            if (
                (gpu or not inputs)
                and func._defined_in_python
                and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CUDA")
            ):
                key = "CUDA"
            with self, self.devices.on():
                # func itself would come to the function mode again, for the same call.
                return func.redispatch(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = func(*args, **kwargs)
        if gpu:
            given = {storage._cdata for t in inputs if (storage := _marks.storage(t)) is not None}
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and (storage := _marks.storage(t)) is not None:
                    if storage._cdata not in given:  # host.copy_(gpu) leaves the host's storage where it is
                        _marks.add(t)
        return result


class _Devices(TorchFunctionMode):
    """Takes GPU devices out of calls and marks the results. default: what torch.set_default_device named, if anything."""

    def __init__(self) -> None:
        super().__init__()
        self.default: torch.device | None = None
        self.factories = _device_constructors()

    def on(self) -> Any:
        """The mode on for a block, if it is not."""
        return contextlib.nullcontext() if self in _get_current_function_mode_stack() else self

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        _claim(args)
        return _claim(self.call(func, args, dict(kwargs or {})))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if args and isinstance(args[0], torch.Tensor):
            if name == "__get__":
                name = getattr(func.__self__, "__name__", "")
                if name in _ANSWERS and args[0] in _marks:
                    return getattr(DeviceTensor, name).fget(args[0])
            elif name in _ANSWERS and func is getattr(torch.Tensor, name) and isinstance(args[0], DeviceTensor):
                return getattr(args[0], name)(*args[1:], **kwargs)
            if name == "cuda":
                return args[0] if is_on_gpu(args[0]) else _transfer(args[0], True)
            if name == "to":
                return _to(func, args, kwargs)
            if name == "type_as" and is_on_gpu(args[0]) != is_on_gpu(args[1]):
                return _to(torch.Tensor.to, args, kwargs)
            if name == "pin_memory" and not is_on_gpu(args[0]):
                return args[0]
        device = kwargs.get("device")
        if device is None and self.default is not None and func in self.factories:
            device = self.default
        if device is not None and _is_gpu(device):
            kwargs["device"] = torch.device("cpu")
            kwargs.pop("pin_memory", None)
            result = func(*args, **kwargs)
            if any(result is a for a in args):  # as_tensor(host tensor, device="cuda") is a copy
                return result if is_on_gpu(result) else _transfer(result, True)
            return _on_gpu(result)
        if device is not None and any(isinstance(a, DeviceTensor) for a in args):
            result = func(*args, **kwargs)  # randn_like(gpu_tensor, device="cpu") and the like
            if any(result is a for a in args):
                return _transfer(result, False) if str(device).startswith("cpu") else result
            _marks.remove(result)
            if type(result) is DeviceTensor:
                result.__class__ = torch.Tensor  # type: ignore[assignment]
            return result
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
    here = is_on_gpu(source)
    gpu = here
    if other is not None:
        gpu = is_on_gpu(other)
        words["dtype"] = other.dtype
    elif device is not None:
        if str(device).startswith("meta"):
            return func(plain(source), device, **words)
        gpu = _is_gpu(device)
    result = func(plain(source), **words) if words else plain(source)
    if gpu != here:
        return _transfer(result, gpu)
    if result.data_ptr() == source.data_ptr() and result.dtype == source.dtype:
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
    from fourwave.backends import select

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
    run_backward = torch.autograd.graph._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with devices.on():  # Tensor.backward is a call that the mode handles, so it is off here
            return run_backward(*args, **kwargs)

    from_dlpack = torch.from_dlpack

    def set_default_device(device: Any) -> None:
        devices.default = None if device is None else torch.device(device)

    def import_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = from_dlpack(tensor, *args, **kwargs)
        return _on_gpu(result) if is_on_gpu(tensor) else result

    def ranges(value: Any) -> list[tuple[int, int]]:
        """A host tensor is not among the memory that a GPU's kernel may touch."""
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "torch_tensor", None)
        return [] if isinstance(tensor, torch.Tensor) and not is_on_gpu(tensor) else all_ranges(value)

    all_ranges = flydsl_hook._ranges
    with contextlib.ExitStack() as stack:
        # What fourwave knows of devices is another matter in here, and again afterwards.
        stack.callback(select.clear_cache)
        select.clear_cache()
        stack.enter_context(mock.patch.object(flydsl_hook, "_ranges", ranges))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, value in accelerator.items():
            stack.enter_context(mock.patch.object(torch.accelerator, name, value))
        for owner, name, value in (
            (torch, "Generator", Generator), (torch.version, "hip", "simulated"), (torch, "set_default_device", set_default_device),
            (torch, "get_default_device", lambda: devices.default or torch.device("cpu")), (torch, "from_dlpack", import_dlpack),
            (torch.utils.dlpack, "from_dlpack", import_dlpack), (torch.autograd, "_engine_run_backward", backward),
            (torch.autograd.graph, "_engine_run_backward", backward),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        # Module.cuda() makes new parameters; by default it would keep the old ones' class and change their storage.
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        stack.callback(lambda: _marks.storages.clear())
        stack.enter_context(_Memory(devices))
        stack.enter_context(devices)
        yield


@contextlib.contextmanager
def _own_modules() -> Iterator[None]:
    """Modules that the block imports go again, but for installed packages: they may have asked what the GPU is."""
    before = set(sys.modules)
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed.add(Path(__file__).resolve().parents[1])
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is None or installed & {*(parents := Path(file).resolve().parents)}:
                continue
            if not {"site-packages", "dist-packages"} & {parent.name for parent in parents}:
                del sys.modules[name]


def run_script(path: str | Path, arguments: list[str], arch: str = "gfx950", **options: Any) -> tuple[int, Any]:
    """Run a Python script as `python path arguments` would, with a simulated GPU of `arch`.

    options   of fourwave.sim.session
    returns   (the script's exit status, the session's Report). Exceptions of the script are raised.
    Modules that the script imports from elsewhere than installed packages are its own: another script's import loads them again.
    """
    from . import session

    path = Path(path)
    with session(arch, **options) as report, served_on_cpu(arch):
        with (
            mock.patch.object(sys, "argv", [str(path), *arguments]),
            mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
            _own_modules(),
        ):
            try:
                runpy.run_path(str(path), run_name="__main__")
                status = 0
            except SystemExit as stop:
                status = int(stop.code) if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
    return status, report
