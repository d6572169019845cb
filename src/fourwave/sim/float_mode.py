"""The floating-point mode that a simulation runs in."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

_ENVIRONMENT_BYTES = 64  # fenv_t has 32 with glibc on x86-64
_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl


@functools.cache
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


@contextlib.contextmanager
def default_float_mode() -> Iterator[None]:
    """Round to nearest with denormals, whatever mode the thread was in; the core's threads inherit it.

    torch.set_flush_denormal(True), and libraries linked with -ffast-math, set another one. A simulated kernel's own modes are its own.
    """
    saved = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _libm().fegetenv(saved)
    _libm().fesetenv(_DEFAULT)
    try:
        yield
    finally:
        _libm().fesetenv(saved)
