"""The only module that reads environment variables.

FOURWAVE_BACKEND    backend for calls that name none: ``auto`` (default), ``native``, ``flydsl``, ``hopper``, ``sim``,
                    ``sim:gfx942``, ``sim:gfx950``, or one per precision, ``bf16=sim,fp32=native``. Read on every call, so a change of
                    ``os.environ`` takes effect at once.
FOURWAVE_AUTOTUNE   ``1``: on an AMD GPU, time the candidates for each kind of GEMM and grouped GEMM once and keep the winners in the
                    cache. Unset: fixed defaults, nothing is timed and no winner is read.
CC                  C compiler that builds the simulator's native core; unset: cc, gcc, clang, then the ziglang package.
ROCM_PATH           where ROCm is, for the linker of `fourwave explain --isa`; unset: ``/opt/rocm``.
XDG_CACHE_HOME      folder that holds ``fourwave/``, the cache of what is built once per machine; unset: ``~/.cache``.
"""

from __future__ import annotations

import os
from pathlib import Path

BACKEND_VARIABLE = "FOURWAVE_BACKEND"


def backend() -> str | None:
    """Value of FOURWAVE_BACKEND, or None when it is unset or empty."""
    return os.environ.get(BACKEND_VARIABLE) or None


def autotune() -> bool:
    """Whether FOURWAVE_AUTOTUNE is 1. Raises ValueError for anything but 0, 1 and nothing."""
    value = os.environ.get("FOURWAVE_AUTOTUNE") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"FOURWAVE_AUTOTUNE={value}: it can be 0 or 1")
    return value == "1"


def c_compiler() -> str | None:
    """Value of CC, or None when it is unset or empty."""
    return os.environ.get("CC") or None


def cache_dir() -> Path:
    """fourwave's folder in the user's cache directory. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fourwave"


def rocm_path() -> Path:
    """ROCm's folder. It may not exist."""
    return Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
