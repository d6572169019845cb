"""Builds and binds core.c: the simulator's native core.

The C source is compiled once per machine by the C compiler found ($CC's program, cc, gcc, clang, or the `ziglang` package's) and kept in the
user's cache directory under a name made of the source, the flags, the compiler and the processor, so an edit or another machine never meets a
stale file. `unavailable()` says why it cannot be used.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

from fourwave import env

from .program import OPS

_HERE = Path(__file__).parent
_FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC"]
_lock = threading.Lock()

COUNTERS = (
    "instructions", "mfma", "lds_read_bytes", "lds_write_bytes", "global_read_bytes", "global_write_bytes", "copy_to_lds_bytes",
    "barriers", "waits", "lds_read_cycles", "lds_read_cycles_ideal", "global_instructions", "lds_instructions", "global_lines", "global_lines_ideal",
    "valu_instructions",
)  # fmt: skip
NUM_COUNTERS = 16
assert len(COUNTERS) == NUM_COUNTERS


class Allocation(ctypes.Structure):
    _fields_ = [
        ("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64), ("writable", ctypes.c_int32), ("id", ctypes.c_int32),
        ("writers", ctypes.c_void_p), ("readers", ctypes.c_void_p * 4), ("written", ctypes.c_int32), ("read", ctypes.c_int32),
    ]  # fmt: skip


class Output(ctypes.Structure):
    _fields_ = [("lo", ctypes.c_uint64), ("hi", ctypes.c_uint64), ("written", ctypes.c_void_p)]


class RawFinding(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("kind", "line", "other_line", "wave", "other_wave", "lane", "detail", "pad")
        ),
        *((name, ctypes.c_uint64) for name in ("workgroup", "address", "count")),
    ]


# Kinds of the trace's events. "tile issued", "tile landed": address in LDS and bytes of a tensor data mover's tile, detail 1 for a
# store; "wait": detail 0 dscnt, 1 asynccnt, 2 tensorcnt, 3 other, address: how many may be outstanding; "LDS read": the first lane's.
EVENTS = ("tile issued", "tile landed", "wait", "barrier", "LDS read", "matrix")


class RawEvent(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "wave", "line", "detail")),
        *((name, ctypes.c_uint64) for name in ("address", "bytes")),
    ]


class RawLaunch(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p),
        ("code_words", ctypes.c_int32), ("num_registers", ctypes.c_int32), ("num_constants", ctypes.c_int32), ("num_sites", ctypes.c_int32), ("lds_bytes", ctypes.c_int32),
        ("constants", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("cluster", ctypes.c_uint32 * 3),
        ("allocations", ctypes.c_void_p), ("num_allocations", ctypes.c_int32),
        ("checks", ctypes.c_uint32), ("completion", ctypes.c_int32), ("schedule", ctypes.c_int32), ("num_threads", ctypes.c_int32),
        ("first_workgroup", ctypes.c_uint64), ("num_workgroups", ctypes.c_uint64), ("step_limit", ctypes.c_uint64),
        ("lds_banks", ctypes.c_int32), ("stop_at_finding", ctypes.c_int32), ("units", ctypes.c_char_p),
        ("num_outputs", ctypes.c_int32), ("outputs", ctypes.c_void_p),
        ("events", ctypes.c_void_p), ("max_events", ctypes.c_int32), ("num_events", ctypes.c_int32),
        ("findings", ctypes.c_void_p), ("max_findings", ctypes.c_int32), ("num_findings", ctypes.c_int32),
        ("counters", ctypes.c_uint64 * NUM_COUNTERS),
        ("next", ctypes.c_uint64), ("done", ctypes.c_uint64), ("progress", ctypes.c_uint64), ("stop", ctypes.c_int32),
    ]  # fmt: skip


def find_compiler() -> list[str] | None:
    """Command of the C compiler to use, or None: $CC, cc, gcc, clang on PATH, else the ziglang package."""
    for name in (env.c_compiler(), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def unavailable() -> str | None:
    """Why the native core cannot be built here, or None."""
    if sys.platform == "win32":
        return "the simulator's native core needs a POSIX system (threads); this is Windows"
    if find_compiler() is None:
        return "no C compiler found for the simulator's native core (looked for $CC, cc, gcc, clang, and the ziglang package)"
    return None


def flags(wave_size: int) -> list[str]:
    """The compiler's options for the core of waves of `wave_size` lanes."""
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [*_FLAGS, f"-DW={wave_size}", native]


def _processor() -> str:
    """What -march=native depends on: the processor's feature list."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


@cache
def library(wave_size: int = 64) -> ctypes.CDLL:
    """The core for waves of `wave_size` lanes, built on first use. Raises RuntimeError with the compiler's words if that fails."""
    with _lock:
        reason = unavailable()
        compiler = find_compiler()
        if reason or compiler is None:
            raise RuntimeError(reason)
        options = flags(wave_size)
        sources = [_HERE / "core.c", *(f for kind in ("h", "inc", "def") for f in sorted(_HERE.glob(f"*.{kind}")))]
        key = hashlib.sha256(
            "\0".join(
                [*(s.read_text() for s in sources), *compiler, *options, _processor(), platform.machine()]
            ).encode()
        )
        path = env.cache_dir() / "sim" / f"core-{key.hexdigest()[:24]}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / "core.so"
                done = subprocess.run(
                    [*compiler, *options, str(sources[0]), "-o", str(built), "-lm", "-lpthread"],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    raise RuntimeError(
                        f"building the simulator's native core failed: {' '.join(done.args)}\n{done.stderr[-4000:]}"
                    )
                os.replace(built, path)
        loaded = ctypes.CDLL(str(path))
        sizes = (ctypes.c_uint64 * 5)()
        loaded.fourwave_sim_sizes(sizes)
        expected = [ctypes.sizeof(RawLaunch), ctypes.sizeof(RawFinding), ctypes.sizeof(Allocation), wave_size, len(OPS)]
        assert list(sizes) == expected, f"core.c and native.py disagree on layouts: {list(sizes)} against {expected}"
        loaded.fourwave_sim_run.argtypes = [ctypes.POINTER(RawLaunch)]
        loaded.fourwave_sim_run.restype = ctypes.c_int
        return loaded
