"""One kernel DSL per process.

FlyDSL and CuTe DSL each carry an MLIR of their own; loading both into one process aborts inside their bindings, in either
order. All imports of a DSL go through this module, which refuses the second one instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from fourwave.errors import BackendUnavailable

# The modules whose presence means that the DSL's bindings are loaded. `cutlass` alone could be another package.
FLYDSL_MODULES = ("flydsl._mlir", "flydsl.compiler")
CUTEDSL_MODULES = ("cutlass._mlir", "cutlass.cute")


def _loaded(modules: tuple[str, ...]) -> str | None:
    return next((name for name in modules if name in sys.modules), None)


def flydsl_conflict() -> str | None:
    """Why FlyDSL may not be imported now, or None."""
    if name := _loaded(CUTEDSL_MODULES):
        return (
            f"CuTe DSL is loaded in this process ({name}) and FlyDSL cannot be loaded beside it: use another process "
            "for FlyDSL kernels"
        )
    return None


def cutlass_conflict() -> str | None:
    """Why CuTe DSL may not be imported now, or None."""
    if name := _loaded(FLYDSL_MODULES):
        return (
            f"FlyDSL is loaded in this process ({name}) and CuTe DSL cannot be loaded beside it: use another process "
            "for CuTe DSL kernels"
        )
    return None


def import_flydsl() -> ModuleType:
    """Import and return flydsl. Raises BackendUnavailable when CuTe DSL is loaded or flydsl is not installed."""
    if conflict := flydsl_conflict():
        raise BackendUnavailable(conflict)
    if importlib.util.find_spec("flydsl") is None:
        raise BackendUnavailable("flydsl is not installed: pip install 'fourwave[amd]'")
    return importlib.import_module("flydsl")


def import_cutlass() -> ModuleType:
    """Import and return CuTe DSL's cutlass. Raises BackendUnavailable when FlyDSL is loaded or it is not installed."""
    if conflict := cutlass_conflict():
        raise BackendUnavailable(conflict)
    if importlib.util.find_spec("cutlass") is None:
        raise BackendUnavailable("nvidia-cutlass-dsl is not installed: pip install 'fourwave[hopper]'")
    return importlib.import_module("cutlass")
