"""Backends: their registry, the choice among them, and the guard that keeps two kernel DSLs out of one process."""

from fourwave.backends.base import Backend, Description
from fourwave.backends.registry import get, known, names
from fourwave.backends.select import Selection, use_backend

__all__ = ["Backend", "Description", "Selection", "get", "known", "names", "use_backend"]
