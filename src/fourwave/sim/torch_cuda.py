"""torch.cuda as a script sees it in `fourwave sim`: streams, events, properties, memory and random numbers answer; the rest says that it is not served.

What torch.cuda has and this module neither serves nor keeps raises NotImplementedError with its name, so that no answer is made up.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.graphs
import torch.cuda.memory
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.cuda.profiler
import torch.cuda.random
import torch.cuda.streams
import torch.cuda.tunable

from .launch import LDS_CAPACITY

DEVICE = "cuda:0"
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "gfx1250": 256}
_TOTAL_MEMORY = 1 << 38
_KEPT = {"classproperty", "cast", "is_bf16_supported", "is_tf32_supported", "lru_cache"}
_GRAPHS = "a captured launch would run at once; run the code without capture"
_ALLOCATOR = "GPU tensors lie in host memory, and no allocator of a GPU is behind them"
_WHY = {
    "CUDAGraph": _GRAPHS, "graph": _GRAPHS, "make_graphed_callables": _GRAPHS, "graph_pool_handle": _GRAPHS, "Graph": _GRAPHS,
    "MemPool": _ALLOCATOR, "use_mem_pool": _ALLOCATOR, "CUDAPluggableAllocator": _ALLOCATOR, "memory_snapshot": _ALLOCATOR,
    "memory_summary": _ALLOCATOR, "set_per_process_memory_fraction": _ALLOCATOR, "get_allocator_backend": _ALLOCATOR,
}  # fmt: skip
_OWNERS = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs)


def is_gpu(device: Any) -> bool:
    """Whether a device argument names the GPU; PyTorch takes a bare number as one of the accelerator's.

    Raises RuntimeError for another GPU than the one there is.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        index = device
    elif isinstance(device, (str, torch.device)) and str(device).startswith(("cuda", "hip")):
        number = str(device).partition(":")[2]
        index = int(number) if number.isdigit() else 0
    else:
        return False
    if index > 0:
        raise RuntimeError(f"device {device!r}: fourwave sim serves one GPU, {DEVICE}")
    return True


class Stream(torch.cuda.Stream):
    """Everything is done when a call returns, so streams have nothing to order."""

    cuda_stream = 0
    stream_id = 0
    priority = 0
    device_index = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Stream:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__["device"] = torch.device(DEVICE)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1

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
        self.device = torch.device(DEVICE)
        self.seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds; raises where one of the two was never recorded, as on a GPU."""
        if self.seconds is None or end.seconds is None:
            raise RuntimeError("both events must be recorded before their elapsed time is asked for")
        return 1000 * (end.seconds - self.seconds)


def _either(original: Any, ours: Any, host: Callable[..., Any]) -> Any:
    """A class that stands for both: calls for the GPU go to `ours`, others to `host`."""

    class Either(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, (original, ours))

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.get("device", args[0] if args else None)
            return ours(*args, **kwargs) if device is None or is_gpu(device) else host(*args, **kwargs)

    return Either(original.__name__, (), {"__doc__": original.__doc__})


class _Properties(types.SimpleNamespace):
    """Of the simulated GPU. What is not known of it raises, with its name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the property {name!r} of a GPU is not served by fourwave sim")


def properties(arch: str) -> _Properties:
    """As PyTorch gives them on ROCm, with the compute units of the arch's largest product."""
    digits = arch.removeprefix("gfx")
    lds = LDS_CAPACITY[arch]
    return _Properties(
        name=f"simulated {arch}", gcnArchName=arch, major=int(digits[:-2]), minor=int(digits[-2]),
        multi_processor_count=_COMPUTE_UNITS[arch], total_memory=_TOTAL_MEMORY, warp_size=32 if arch == "gfx1250" else 64,
        max_threads_per_block=1024, max_threads_per_multi_processor=2048, shared_memory_per_block=lds,
        shared_memory_per_block_optin=lds, shared_memory_per_multiprocessor=lds, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip


class _Runtime:
    """torch.cuda.cudart(): starting and stopping a profiler does nothing, as nothing is profiled."""

    class cudaError:
        success = 0

    def cudaProfilerStart(self) -> int:
        return 0

    cudaProfilerStop = cudaDeviceSynchronize = cudaProfilerStart

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.cuda.cudart().{name} is not served by fourwave sim")


def _refuse(owner: str, name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        why = _WHY.get(name, "there is no GPU or driver to ask")
        if name.endswith("Tensor"):
            why = "write torch.empty(..., dtype=..., device='cuda')"
        raise NotImplementedError(f"{owner}.{name} is not served by fourwave sim: {why}")

    return refuse


def _refused_class(owner: str, name: str) -> type:
    refuse = _refuse(owner, name)
    return type(name, (), {"__new__": lambda cls, *args, **kwargs: refuse()})


def replacements(arch: str, memory: Any) -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of all that torch.cuda and torch.accelerator are to hold for a script on a simulated `arch`.

    memory: allocated(), peak() and reset_peak() tell of the bytes of GPU tensors.
    """
    stream = Stream()
    of_device = properties(arch)

    def seed(number: int) -> None:
        torch.default_generator.manual_seed(int(number))  # torch.manual_seed calls this function

    def at(value: Any) -> Callable[..., Any]:
        """Answers for the one GPU, named or not."""

        def answer(device: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_gpu(device)
            return value() if callable(value) else value

        return answer

    def statistics() -> dict[str, int]:
        bytes_of = {"current": memory.allocated(), "peak": memory.peak()}
        kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
        return {f"{kind}.all.{when}": n for kind in kinds for when, n in bytes_of.items()} | {
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def free_and_total() -> tuple[int, int]:
        return _TOTAL_MEMORY - memory.allocated(), _TOTAL_MEMORY

    both: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "synchronize": at(None), "current_stream": at(stream), "set_stream": lambda stream: None,
        "empty_cache": lambda: None, "memory_allocated": at(memory.allocated), "max_memory_allocated": at(memory.peak),
        "memory_reserved": at(memory.allocated), "max_memory_reserved": at(memory.peak), "memory_stats": at(statistics),
        "reset_peak_memory_stats": at(memory.reset_peak), "reset_accumulated_memory_stats": at(None),
        "get_device_capability": at((of_device.major, of_device.minor)),
    }  # fmt: skip
    cuda = both | {
        "current_device": lambda: 0, "set_device": at(None), "device": lambda device: contextlib.nullcontext(is_gpu(device)),
        "get_device_name": at(of_device.name), "get_device_properties": at(of_device), "get_arch_list": lambda: [arch],
        "is_initialized": lambda: True, "init": lambda: None, "ipc_collect": lambda: None, "mem_get_info": at(free_and_total),
        "default_stream": at(stream), "Stream": Stream, "Event": Event, "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False, "memory_cached": at(memory.allocated), "max_memory_cached": at(memory.peak),
        "reset_max_memory_allocated": at(memory.reset_peak), "reset_max_memory_cached": at(memory.reset_peak),
        "manual_seed": seed, "manual_seed_all": seed, "seed": torch.default_generator.seed, "seed_all": torch.default_generator.seed,
        "initial_seed": lambda: torch.default_generator.initial_seed(), "get_rng_state": at(torch.get_rng_state),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state), "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(next(iter(states))), "default_generators": (torch.default_generator,),
        "cudart": _Runtime, "_sleep": lambda cycles: None,
    }  # fmt: skip
    accelerator = both | {
        "current_accelerator": lambda check_available=False: torch.device("cuda"), "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0, "set_device_index": at(None), "set_device_idx": at(None), "get_memory_info": at(free_and_total),
        "device_index": lambda device: contextlib.nullcontext(is_gpu(device)),
        "get_device_capability": torch.accelerator.get_device_capability, "Graph": _refused_class("torch.accelerator", "Graph"),
    }  # fmt: skip
    for name, value in vars(torch.cuda).items():
        if name.startswith("_") or name in cuda or name in _KEPT:
            continue
        ours = getattr(value, "__module__", None) or ""
        if inspect.isfunction(value) and ours.startswith("torch.cuda"):
            cuda[name] = _refuse("torch.cuda", name)
        elif inspect.isclass(value) and (
            name in _WHY or name in ("ExternalStream", "GreenContext") or name.endswith("Tensor")
        ):
            cuda[name] = _refused_class("torch.cuda", name)
    others = [(torch.cuda.memory, name) for name in ("_record_memory_history", "_dump_snapshot", "_snapshot")]
    for module in (torch.cuda.tunable, torch.cuda.nccl):
        others += [
            (module, name)
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
    device_module = torch.get_device_module
    result = [(owner, name, value) for name, value in cuda.items() for owner in _OWNERS if name in vars(owner)]
    result += [
        (torch.accelerator, name, value) for name, value in accelerator.items() if hasattr(torch.accelerator, name)
    ]
    result += [(module, name, _refuse(module.__name__, name)) for module, name in others]
    result += [
        (torch.version, "hip", "7.0.0-simulated"),
        (torch, "get_device_module", lambda device=None: torch.cuda if device is None or is_gpu(device) else device_module(device)),
        (torch, "Event", _either(torch.Event, Event, torch.Event)),
        (torch, "Stream", _either(torch.Stream, Stream, torch.Stream)),
        (torch.cuda.nvtx, "_nvtx", types.SimpleNamespace(
            rangePushA=lambda text: 0, rangePop=lambda: 0, markA=lambda text: None, rangeStartA=lambda text: 0, rangeEnd=lambda number: None,
            deviceRangeStart=lambda text, stream: 0, deviceRangeEnd=lambda number, stream: None)),
        (torch.cuda.profiler, "start", lambda: None), (torch.cuda.profiler, "stop", lambda: None),
    ]  # fmt: skip
    return result
