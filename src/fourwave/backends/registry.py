"""The backends by name."""

from __future__ import annotations

from fourwave.backends.base import Backend
from fourwave.backends.flydsl import FlyDSLBackend
from fourwave.backends.hopper import HopperBackend
from fourwave.backends.native import NativeBackend
from fourwave.backends.sim import ARCHS, SimBackend

_BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (FlyDSLBackend(), HopperBackend(), NativeBackend(), *map(SimBackend, ARCHS))
}
_ALIASES = {"sim": "sim:gfx950"}


def names() -> list[str]:
    """Names of all backends, aliases left out: "flydsl", "hopper", "native", "sim:gfx942", "sim:gfx950", "sim:gfx1250"."""
    return list(_BACKENDS)


def known() -> list[str]:
    """Every word that may name a backend where one is asked for, "auto" included."""
    return ["auto", *_BACKENDS, *_ALIASES]


def get(name: str) -> Backend:
    """The backend called `name`; "sim" is "sim:gfx950". Raises ValueError, listing the known, for another name."""
    backend = _BACKENDS.get(_ALIASES.get(name, name))
    if backend is None:
        raise ValueError(f"backend {name!r}: the backends are {', '.join(known())}")
    return backend
