"""The one file that touches FlyDSL's private functions: it makes FlyDSL compile for the simulator and launch on it.

Inside a session FlyDSL traces and lowers a kernel as always, but stops before code generation; the module it holds then, in the `llvm` and
`rocdl` dialects, is what the simulator runs. Outside a session nothing changes: every replaced function asks for the active session first.

What is replaced, in FlyDSL 0.5 (`check_flydsl` says so when another version has moved it):
  compile backend `rocm`                       pipeline without the binary step (public: register_backend, force=True)
  jit_function.CompiledArtifact                keeps the lowered module's text with its source locations
  jit_function._build_call_spec                keeps the launcher's parameter names
  jit_function._call_state_from_spec           the launch goes to the simulator instead of an ExecutionEngine
  expr.meta._tls.active_loc                    set while the lowered module is read
  jit_function._is_compile_placeholder,
  jit_function._has_live_device_argument       CPU tensors count as device tensors
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, NamedTuple

from fourwave.backends import guard

from .float_mode import default_float_mode
from .host import HostInterpreter, bounds_of, check_sizes
from .launch import Memory, Simulation
from .lowering import lower_kernel, prepare_kernel
from .report import _TEXT, HOST_TENSOR, Finding, Report, SimulationError

if TYPE_CHECKING:
    from . import Session

TESTED = (0, 5)  # FlyDSL's major and minor version
_LLVM_OPTIONS = "\n// LLVM options: "  # behind a kept module's text, as JSON
_active = threading.local()
_install_lock = threading.Lock()
_environment_lock = threading.RLock()  # FlyDSL takes its target from os.environ: sessions of several threads take turns
_installed = False
_translated: weakref.WeakSet[Kernels] = weakref.WeakSet()


def active() -> Session | None:
    """The session of this thread, innermost first, or None."""
    stack = getattr(_active, "stack", None)
    return stack[-1] if stack else None


def check_flydsl() -> str | None:
    """Why the installed FlyDSL cannot be hooked, or None: another version, or a private name that moved."""
    import flydsl
    from flydsl.compiler import backends, jit_executor, jit_function
    from flydsl.expr import meta

    version = tuple(int(x) for x in flydsl.__version__.split(".")[:2])
    if version != TESTED:
        return f"FlyDSL {flydsl.__version__} is not the tested {TESTED[0]}.{TESTED[1]}"
    wanted = {
        "_build_call_spec": ["sig", "args_tuple"],
        "_call_state_from_spec": ["call_spec", "artifact"],
        "_is_compile_placeholder": ["value", "allow_null_pointers"],
        "_has_live_device_argument": ["value"],
    }
    for name, parameters in wanted.items():
        function = getattr(jit_function, name, None)
        original = getattr(function, "_fourwave_original", function)
        if original is None or list(inspect.signature(original).parameters) != parameters:
            return f"flydsl.compiler.jit_function.{name}({', '.join(parameters)}) is not where FlyDSL {TESTED[0]}.{TESTED[1]} had it"
    for module, name in (
        (jit_executor, "CallState"),
        (jit_function, "CompiledArtifact"),
        (backends, "_make_backend"),
        (meta, "_tls"),
    ):
        if not hasattr(module, name):
            return f"{module.__name__}.{name} is not where FlyDSL {TESTED[0]}.{TESTED[1]} had it"
    return None


@contextlib.contextmanager
def _without_source_capture() -> Iterator[None]:
    """FlyDSL wraps every MLIR value that Python touches and walks the stack for its source line; here nobody reads that line."""
    from flydsl._mlir import ir
    from flydsl.expr import meta

    before = getattr(meta._tls, "active_loc", None)
    meta._tls.active_loc = ir.Location.unknown()
    try:
        yield
    finally:
        meta._tls.active_loc = before


class Kernels:
    """A lowered module: its host function and its kernels, translated on first use."""

    def __init__(self, text: str, entry: str, arch: str) -> None:
        from flydsl._mlir import ir
        from flydsl.compiler.jit_function import _create_mlir_context

        self.ir, self.arch, self.text = ir, arch, text
        self.context = _create_mlir_context()
        with self.context:
            self.module = ir.Module.parse(text)
        self.kernels: dict[str, tuple[Any, Any]] = {}
        self.programs: dict[tuple[str, Any], Any] = {}
        self.prepared: dict[str, tuple[Any, dict[str, Any]]] = {}
        hosts: dict[str, Any] = {}
        for op in self.module.body.operations:
            o = op.operation
            if o.name == "llvm.func":
                hosts[ir.StringAttr(o.attributes["sym_name"]).value] = o
            elif o.name == "gpu.module":
                for inner in o.regions[0].blocks[0].operations:
                    if inner.operation.name == "llvm.func":
                        self.kernels[ir.StringAttr(inner.operation.attributes["sym_name"]).value] = (o, inner.operation)
        self.host = HostInterpreter(ir, hosts[entry], self._launch)
        self.lock = threading.Lock()
        _translated.add(self)

    def program(self, name: str, mutate: Any) -> Any:
        key = name, mutate
        if key not in self.programs:
            self.programs[key] = self.lower(name, mutate)
        return self.programs[key]

    def lower(self, name: str, mutate: Any) -> Any:
        with self.context, _without_source_capture():
            return lower_kernel(self.ir, *self.kernels[name], self.arch, mutate)

    def prepare(self, name: str) -> Any:
        """lowering.prepare_kernel of a kernel; kept."""
        if name not in self.prepared:
            with self.context, _without_source_capture():
                self.prepared[name] = prepare_kernel(self.ir, *self.kernels[name], self.arch)
        return self.prepared[name]

    def assembly(self) -> str:
        """The machine code that FlyDSL would make of the module, with source lines. Raises RuntimeError with LLVM's words where it cannot."""
        from flydsl._mlir.dialects import gpu
        from flydsl._mlir.passmanager import PassManager
        from flydsl.compiler.llvm_options import llvm_options

        ir = self.ir
        # FlyDSL's cache may hold modules from before these were kept.
        options = self.text.partition(_LLVM_OPTIONS)[2] or "{}"
        with ir.Context() as context, llvm_options(json.loads(options)):
            module = ir.Module.parse(self.text)
            try:
                PassManager.parse("builtin.module(gpu-module-to-binary{format=isa})", context).run(module.operation)
            except ir.MLIRError as error:
                raise RuntimeError(f"code generation failed: {error}") from error
            objects = [
                gpu.ObjectAttr(op.operation.attributes["objects"][0]).object
                for op in module.body.operations
                if op.operation.name == "gpu.binary"
            ]
        if len(objects) != 1:
            raise RuntimeError(f"code generation left {len(objects)} modules of kernels instead of one")
        return objects[0].decode()

    def call(self, packed: int, memory: Memory, hosts: list[tuple[int, int, str]]) -> None:
        """Run the host function. hosts: memory of the launcher's arguments that a kernel must not touch: from, to, which argument."""
        with self.lock:
            self.memory, self.hosts = memory, hosts
            with self.context, _without_source_capture():
                self.host(packed)

    def _launch(
        self, kernel: str, grid: Any, block: Any, dynamic_lds: int, arguments: list[list[int]], cluster: Any
    ) -> None:
        session = active()
        assert session is not None
        check_sizes(kernel, tuple(grid), tuple(block), bounds_of(self.kernels[kernel][1]))
        simulate = Simulation(
            tuple(grid), tuple(block), dynamic_lds, arguments, self.memory, session.options, tuple(cluster)
        )
        with default_float_mode():
            if session.harness is None:
                report = simulate(self.program(kernel, session.options.mutate))
            else:
                report = session.harness(
                    kernel, (id(self), kernel), lambda: self.prepare(kernel), simulate, self.memory
                )
        if _tool is not None:
            _tool.kernels[self.text, kernel] = self
        report.findings = [_of_host(finding, self.hosts) for finding in report.findings]
        add(session, report)
        if report.findings and session.on_finding == "raise":
            raise SimulationError(report)


def strided_range(address: int, shape: Any, strides: Any, element_bits: int) -> tuple[int, int]:
    """[lo, hi) host addresses that a strided tensor's elements lie in (strides in elements, none negative); empty if it has none."""
    if 0 in tuple(shape):
        return address, address
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    return address, address + ((last + 1) * element_bits + 7) // 8


def tensor_range(tensor: Any) -> tuple[int, int]:
    """strided_range of a CPU torch tensor."""
    return strided_range(tensor.data_ptr(), tensor.shape, tensor.stride(), 8 * tensor.element_size())


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors (torch.Tensor, DLTensorJitArg) and addresses (int) in a launcher argument, in any of FlyDSL's wrappings."""
    import torch
    from flydsl.compiler.jit_argument import DLTensorJitArg, PointerJitArg

    if isinstance(value, (torch.Tensor, DLTensorJitArg)):
        yield value
    elif (tensor := getattr(value, "torch_tensor", None)) is not None:
        yield tensor
    elif isinstance(value, PointerJitArg):
        yield value.pointer.value or 0
    elif isinstance(value, ctypes.c_void_p):
        yield value.value or 0
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _range(leaf: Any) -> tuple[int, int]:
    """strided_range of a tensor among _leaves."""
    if hasattr(leaf, "dladaptor"):
        return strided_range(leaf.dladaptor.data_ptr, leaf.shape, leaf.strides, leaf.element_bits)
    return tensor_range(leaf)


def _ranges(value: Any) -> list[tuple[int, int]]:
    """Address ranges of the tensors in a launcher argument."""
    return [_range(leaf) for leaf in _leaves(value) if not isinstance(leaf, int)]


def _launch_memory(
    session: Session, arguments: Any, names: tuple[str, ...]
) -> tuple[list[tuple[int, int]], list[tuple[int, int, str]]]:
    """What the launch's kernels may touch, and what of its arguments they must not: from, to, which argument.

    Where the session tells GPU memory from the host's (Session.devices), an address counts with the allocation it lies in.
    """
    ranges, hosts = [*session.tracked], []
    for name, argument in zip(names or map(str, range(len(arguments))), arguments):
        for leaf in _leaves(argument):
            if isinstance(leaf, int):
                if session.devices is not None and (allocation := session.devices.allocation(leaf)) is not None:
                    ranges.append(allocation)
            elif session.devices is None or session.devices.holds(getattr(leaf, "dltensor", leaf)):
                ranges.append(_range(leaf))
            else:
                shape = ", ".join(map(str, leaf.shape))
                hosts.append((*_range(leaf), f"argument {name}{HOST_TENSOR}{leaf.dtype} [{shape}])"))
    return ranges, hosts


def _of_host(finding: Finding, hosts: list[tuple[int, int, str]]) -> Finding:
    """The finding; one outside every allocation that lies in a host tensor names the argument."""
    for which, verb in enumerate(("reads", "writes")):
        if finding.message == _TEXT["memory", which]:
            for lo, hi, argument in hosts:
                if lo <= finding.address < hi:
                    return changed(finding, message=f"{verb} {argument}, which a GPU cannot reach")
    return finding


def add(session: Session, report: Report) -> None:
    """Add what ran in a session to its report, and to that of `fourwave sim` around it."""
    session.report.add(report)
    if _tool is not None and session is not _tool.session and active() is not None:
        _tool.session.report.add(report)
        _tool.session.collected += report.launches


class _Tool(NamedTuple):
    """The session of `fourwave sim`, which lasts as long as its script, its process, and the kernels that ran, by module and name."""

    session: Session
    process: int
    kernels: dict[tuple[str, str], Kernels]


_tool: _Tool | None = None
_open: list[Session] = []  # those of whichever thread has its turn


@contextlib.contextmanager
def tool(session: Session) -> Iterator[_Tool]:
    """Count what the block's own sessions launch with `session`, and refuse launches whose report would be lost."""
    global _tool
    before, _tool = _tool, _Tool(session, os.getpid(), {})
    try:
        yield _tool
    finally:
        _tool = before


def _refuse_elsewhere() -> None:
    """Refuse launches in other threads than the session's, and what `fourwave sim` would not see, those of processes that its script forked."""
    if active() is None and _tool is not None:
        raise RuntimeError(
            "a kernel launch in another thread than the script's first; fourwave sim serves that one alone, as PyTorch's modes are a thread's own"
        )
    if active() is None and _open:
        raise RuntimeError(
            f"a kernel launch while a simulator session of another thread has FlyDSL compile for {_open[-1].arch}: open a session in this thread, "
            "too, where it launches"
        )
    if _tool is not None and os.getpid() != _tool.process:
        raise RuntimeError(
            f"a kernel launch in process {os.getpid()}, a child of the script's; fourwave sim would lose its report: launch in the script's own process"
        )


def _install() -> None:
    global _installed
    if _installed:
        return
    guard.import_flydsl()
    if reason := check_flydsl():
        raise RuntimeError(f"the simulator cannot hook FlyDSL: {reason}")
    from flydsl.compiler import backends, jit_function
    from flydsl.compiler.backends.rocm import RocmBackend
    from flydsl.compiler.jit_executor import CallState, CompiledArtifact

    class SimulatedRocmBackend(RocmBackend):
        """FlyDSL's ROCm backend; inside a session its pipeline ends before code generation."""

        def pipeline_fragments(self, *, compile_hints: dict) -> list[str]:
            _refuse_elsewhere()
            if active() is None:
                return super().pipeline_fragments(compile_hints=compile_hints)
            before_binary, _ = self._pipeline_parts(compile_hints=compile_hints)
            _active.llvm_options = compile_hints.get("llvm_options") or {}
            return before_binary

    class SimulatedArtifact(CompiledArtifact):
        """A compiled launcher whose text is the lowered module with its source locations, and LLVM's options in a comment."""

        def __init__(self, compiled_module: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(compiled_module, *args, **kwargs)
            options = json.dumps(getattr(_active, "llvm_options", {}))
            self._ir_text = compiled_module.operation.get_asm(enable_debug_info=True) + _LLVM_OPTIONS + options

        def kernels(self, arch: str) -> Kernels:
            target = re.search(r'#rocdl\.target<[^>]*chip = "(\w+)"', self._ir_text)
            if target and target[1] != arch:
                raise RuntimeError(
                    f"this kernel was compiled for {target[1]}; the session simulates {arch}. Compile it in this session"
                )
            with _install_lock:
                if getattr(self, "_fourwave_kernels", None) is None:
                    self._fourwave_kernels = Kernels(self._ir_text, self._entry, arch)
            return self._fourwave_kernels

        def __reduce__(
            self,
        ) -> Any:  # a class of this function cannot be pickled by name; the disk cache gets the plain one
            return _restore, (self.__getstate__(),)

    class SimulatedCall(CallState):
        """Launches on the simulator; every tensor argument becomes an allocation of the launch."""

        def __init__(self, spec: Any, artifact: SimulatedArtifact) -> None:
            super().__init__(spec, self._run)
            self._artifact = artifact
            self._names = getattr(spec, "names", ())

        def __call__(self, args_tuple: Any) -> Any:
            _refuse_elsewhere()
            session = active()
            if session is None:
                raise RuntimeError(
                    "this kernel was compiled for the simulator; call it inside `with fourwave.sim.session(...)`"
                )
            ranges, self._hosts = _launch_memory(session, args_tuple, self._names)
            self._memory = Memory(ranges, [output.range for output in session.outputs])
            return super().__call__(args_tuple)

        def _run(self, packed: Any) -> None:
            session = active()
            assert session is not None
            self._artifact.kernels(session.arch).call(ctypes.addressof(packed), self._memory, self._hosts)

    def restore(state: dict) -> Any:
        artifact = SimulatedArtifact.__new__(SimulatedArtifact)
        artifact.__setstate__(state)
        return artifact

    global _restore_artifact
    _restore_artifact = restore

    def make_artifact(*args: Any, **kwargs: Any) -> Any:
        return (CompiledArtifact if active() is None else SimulatedArtifact)(*args, **kwargs)

    def replace(name: str, new: Any) -> None:
        new._fourwave_original = getattr(jit_function, name)
        setattr(jit_function, name, new)

    class NamedSpec(tuple):
        """A call's slots, and the names of the launcher's parameters."""

        names: tuple[str, ...]

    original_call_spec = jit_function._build_call_spec
    original_call_state = jit_function._call_state_from_spec
    original_placeholder = jit_function._is_compile_placeholder
    original_live = jit_function._has_live_device_argument

    def build_call_spec(sig: Any, args_tuple: Any) -> Any:
        spec = NamedSpec(original_call_spec(sig, args_tuple))
        spec.names = tuple(sig.parameters)
        return spec

    def call_state_from_spec(call_spec: Any, artifact: Any) -> Any:
        if isinstance(artifact, SimulatedArtifact):
            return SimulatedCall(call_spec, artifact)
        return original_call_state(call_spec, artifact)

    def is_compile_placeholder(value: Any, *, allow_null_pointers: bool = False) -> bool:
        if active() is not None and _ranges(value):
            return False
        return original_placeholder(value, allow_null_pointers=allow_null_pointers)

    def has_live_device_argument(value: Any) -> bool:
        return original_live(value) or bool(active() is not None and _ranges(value))

    backends.register_backend("rocm", SimulatedRocmBackend, force=True)
    backends._make_backend.cache_clear()
    replace("CompiledArtifact", make_artifact)
    replace("_build_call_spec", build_call_spec)
    replace("_call_state_from_spec", call_state_from_spec)
    replace("_is_compile_placeholder", is_compile_placeholder)
    replace("_has_live_device_argument", has_live_device_argument)
    _installed = True


_restore_artifact: Any = None


def _restore(state: dict) -> Any:
    """Unpickle an artifact of the simulator from FlyDSL's disk cache."""
    with _install_lock:
        _install()
    return _restore_artifact(state)


@contextlib.contextmanager
def enter(session: Session) -> Iterator[None]:
    """Make `session` the thread's active one; FlyDSL compiles for its arch meanwhile.

    FlyDSL's debug information is on, so that its disk cache tells kernels apart that differ only in their source lines.
    """
    with _install_lock:
        _install()
    if _tool is not None and active() is None:
        raise RuntimeError(
            "fourwave sim holds a session for the script's first thread; another thread cannot open one beside it"
        )
    with _environment_lock:
        wanted = {
            "FLYDSL_GPU_ARCH": session.arch,
            "ARCH": session.arch,
            "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1",
            "COMPILE_ONLY": None,
        }
        before = {name: os.environ.get(name) for name in wanted}
        _set_environment(wanted)
        stack = _active.__dict__.setdefault("stack", [])
        stack.append(session)
        _open.append(session)
        try:
            yield
        finally:
            _open.pop()
            stack.pop()
            _set_environment(before)


def _after_fork() -> None:
    """In a forked child: the threads that held locks are gone."""
    global _install_lock, _environment_lock
    _install_lock, _environment_lock = threading.Lock(), threading.RLock()
    _open[:] = getattr(_active, "stack", [])
    for kernels in list(_translated):
        kernels.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


__all__ = ["Report", "active", "check_flydsl", "enter", "tensor_range"]
