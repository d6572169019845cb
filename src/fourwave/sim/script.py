"""Runs a script written for an AMD GPU on a machine without one: `device="cuda"` is served on the CPU, launches go to the simulator.

Tensors that the script puts on the "GPU" are CPU tensors of a subclass that says it is on cuda:0. A TorchFunctionMode takes the device out of
every call before PyTorch sees it. PyTorch keeps the subclass from tensor to tensor, but not in gradients and saved tensors, so the storages are
marked: a TorchDispatchMode sees what autograd's C++ does, and marks what is computed from marked storage. torch.cuda's functions for devices,
streams and events are replaced for the time the script runs (torch_cuda.py).
"""

from __future__ import annotations

import contextlib
import copy
import runpy
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
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

from .torch_cuda import DEVICE, is_gpu, replacements


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

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        return False

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as PyTorch's own class; torch.save asks _Checkpoints where the storage lies."""
        with torch._C.DisableTorchFunction():
            return plain(self).__reduce_ex__(protocol)

    def __dlpack_device__(self) -> Any:
        return plain(self).__dlpack_device__()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return plain(self).__dlpack__(**{k: v for k, v in kwargs.items() if k != "stream"})


# What a tensor on the GPU answers for itself, by any of the names through which a function mode sees the question.
_ANSWERS = {"device", "is_cuda", "is_cpu", "get_device", "cpu", "numpy", "record_stream", "__repr__", "__array__", "__deepcopy__", "__dlpack__", "__dlpack_device__"}  # fmt: skip


class _Marks:
    """The storages that are on the GPU. A weak reference keeps a storage's address from being used again."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[StorageWeakRef, int, int]] = {}  # and address, bytes
        self.limit = self.least = 1024  # storages at which the dead are dropped
        self.bytes = self.most = 0  # of all in storages, and of the living at their most

    @staticmethod
    def storage(tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            try:
                return tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # sparse tensors and other kinds without a storage
                return None

    def add(self, tensor: torch.Tensor) -> None:
        if (storage := self.storage(tensor)) is not None:
            self.add_storage(storage)

    def add_storage(self, storage: Any) -> None:
        if storage._cdata in self.storages:
            return
        if len(self.storages) >= self.limit:
            self.drop_dead()
            self.limit = max(self.least, 2 * len(self.storages))
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
        size = storage.nbytes()
        self.storages[storage._cdata] = StorageWeakRef(storage), address, size
        self.bytes += size
        if self.bytes > self.most:
            self.most = max(self.most, self.allocated())

    def drop_dead(self) -> None:
        self.storages = {key: mark for key, mark in self.storages.items() if not mark[0].expired()}
        self.bytes = sum(size for _, _, size in self.storages.values())

    def remove(self, tensor: torch.Tensor) -> None:
        if (storage := self.storage(tensor)) is not None and (mark := self.storages.pop(storage._cdata, None)):
            self.bytes -= mark[2]

    def clear(self) -> None:
        self.storages.clear()
        self.bytes = self.most = 0

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return (storage := self.storage(tensor)) is not None and storage._cdata in self.storages

    def allocated(self) -> int:
        """Bytes of the living."""
        self.drop_dead()
        return self.bytes

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.allocated()

    def allocation(self, address: int) -> tuple[int, int] | None:
        """The living storage that an address lies in, from its first byte to behind its last."""
        if address < 1 << 16:  # where no process has memory: a size or a stride
            return None
        for reference, first, size in self.storages.values():
            if first <= address < first + size and not reference.expired():
                return first, first + size
        return None


_marks = _Marks()
_pinned = _Marks()  # host memory that kernels may touch


class Allocations:
    """Session.devices: what of a launch's memory a GPU can reach."""

    @staticmethod
    def holds(tensor: Any) -> bool:
        return is_on_gpu(tensor) or (isinstance(tensor, torch.Tensor) and tensor in _pinned)

    @staticmethod
    def allocation(address: int) -> tuple[int, int] | None:
        return _marks.allocation(address) or _pinned.allocation(address)


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
                is_gpu(args[1] if len(args) > 1 else kwargs.get("device"))
                return args[0] if is_on_gpu(args[0]) else _transfer(args[0], True)
            if name == "to":
                return _to(func, args, kwargs)
            if name == "type_as" and is_on_gpu(args[0]) != is_on_gpu(args[1]):
                return _to(torch.Tensor.to, args, kwargs)
            if name in ("pin_memory", "is_pinned") and not is_on_gpu(args[0]):
                pinned = args[0] in _pinned
                return pinned if name == "is_pinned" else args[0] if pinned else _pin(plain(args[0]).clone())
        device = kwargs.get("device")
        if device is None and self.default is not None and func in self.factories:
            device = self.default
        if device is not None and is_gpu(device):
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
        pinned = kwargs.pop("pin_memory", None) and func in self.factories
        result = func(*args, **kwargs)
        return _pin(result) if pinned else result


def _pin(host: torch.Tensor) -> torch.Tensor:
    """Mark host memory as pinned."""
    _pinned.add(host)
    return host


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
        gpu = is_gpu(device)
    result = func(plain(source), **words) if words else plain(source)
    if gpu != here:
        return _transfer(result, gpu)
    if result.data_ptr() == source.data_ptr() and result.dtype == source.dtype:
        return source
    return _on_gpu(result) if gpu else result


_Generator = torch.Generator


class _AnyGenerator(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _Generator)

    def __call__(cls, device: Any = "cpu") -> Any:
        return _Generator("cpu" if is_gpu(device) else device)


class Generator(metaclass=_AnyGenerator):
    """torch.Generator, whose GPU kind is a CPU generator."""


def _location(storage: Any) -> str | None:
    return DEVICE if storage._cdata in _marks.storages else None


def _restore(storage: Any, location: str) -> Any:
    if not is_gpu(location):
        return None
    _marks.add_storage(storage)
    return storage


# For torch.save and torch.load: which storages lie on the GPU, and how one gets there.
_CHECKPOINTS = (0, _location, _restore)


@contextlib.contextmanager
def served_on_cpu(arch: str) -> Iterator[None]:
    """Serve device="cuda" on the CPU for the block, as a GPU of `arch`."""
    import torch._dynamo  # PyTorch does at the first call; its tables are to hold torch.cuda's own functions

    from fourwave.backends import select

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

    with contextlib.ExitStack() as stack:
        # What fourwave knows of devices is another matter in here, and again afterwards.
        stack.callback(select.clear_cache)
        select.clear_cache()
        for owner, name, value in (
            *replacements(arch, _marks), (torch, "Generator", Generator), (torch, "set_default_device", set_default_device),
            (torch, "get_default_device", lambda: devices.default or torch.device("cpu")), (torch, "from_dlpack", import_dlpack),
            (torch.utils.dlpack, "from_dlpack", import_dlpack), (torch.autograd, "_engine_run_backward", backward),
            (torch.autograd.graph, "_engine_run_backward", backward),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, value))
        # Module.cuda() makes new parameters; by default it would keep the old ones' class and change their storage.
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        for marks in (_marks, _pinned):
            stack.callback(marks.clear)
        stack.enter_context(
            mock.patch.object(
                torch.serialization, "_package_registry", [_CHECKPOINTS, *torch.serialization._package_registry]
            )
        )
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


@dataclass
class Run:
    """What a script did: its exit status, the session's report, the exception that ended it; launches in sessions that it opened itself;
    the processes that it started, which nothing was checked of; and the kernels that ran (flydsl_hook.Kernels, name)."""

    status: int
    report: Any
    error: Exception | None = None
    own_launches: int = 0
    processes: list[str] = field(default_factory=list)
    kernels: list[tuple[Any, str]] = field(default_factory=list)


def execute(path: str | Path, arguments: list[str], arch: str = "gfx950", **options: Any) -> Run:
    """run_script, with the script's exception in the result: what it launched before has its report all the same."""
    from . import active_session, session
    from .flydsl_hook import tool

    path = Path(path)
    start = BaseProcess.start
    started: list[str] = []

    def start_and_note(process: BaseProcess) -> None:
        start(process)
        started.append(process.name)

    with session(arch, **options) as report, served_on_cpu(arch):
        ours = active_session()
        assert ours is not None
        ours.devices = Allocations
        run = Run(0, report, processes=started)
        with (
            tool(ours) as ran,
            mock.patch.object(sys, "argv", [str(path), *arguments]),
            mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
            mock.patch.object(BaseProcess, "start", start_and_note),
            _own_modules(),
        ):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as stop:
                run.status = int(stop.code) if isinstance(stop.code, int) else int(stop.code is not None)
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
            except Exception as error:
                run.status, run.error = 1, error
        run.own_launches = len(ours.collected)
        run.kernels = [(kernels, name) for (_, name), kernels in ran.kernels.items()]
    return run


def run_script(path: str | Path, arguments: list[str], arch: str = "gfx950", **options: Any) -> tuple[int, Any]:
    """Run a Python script as `python path arguments` would, with a simulated GPU of `arch`.

    options   of fourwave.sim.session
    returns   (the script's exit status, the session's Report). Exceptions of the script are raised.
    Modules that the script imports from elsewhere than installed packages are its own: another script's import loads them again.
    Launches in sessions that the script opens itself are in the report, too; they keep those sessions' options, and CPU tensors are theirs.
    """
    run = execute(path, arguments, arch, **options)
    if run.error is not None:
        raise run.error
    return run.status, run.report
