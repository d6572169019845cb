"""Which backend runs a call.

Order: the call's argument, then `use_backend`, then the variable FOURWAVE_BACKEND, then automatic. A named backend runs or
raises. Automatic takes FlyDSL where it is usable, Hopper's kernels for what they were measured at, and native otherwise, never the
simulator, and keeps the reason for each backend that it passed over.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from fourwave import env
from fourwave.backends import registry
from fourwave.backends.base import Backend
from fourwave.errors import BackendUnavailable
from fourwave.ops.gemm.problem import FP8, MXFP4, MXFP8, PRECISIONS

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig
    from fourwave.ops.gemm.problem import GemmProblem

logger = logging.getLogger("fourwave.dispatch")

AUTO = "auto"
_AUTO_ORDER = ("flydsl", "native")
_GEMM_ORDER = ("flydsl", "hopper", "native")

_PRECISIONS = (*PRECISIONS.values(), FP8, MXFP8, MXFP4)

_override: str | None = None


@functools.lru_cache(maxsize=256)
def parse(spec: str) -> dict[str, str]:
    """Backend for each precision, from "sim", "bf16=sim,fp32=native" or "native,bf16=sim".

    A bare name is for every precision without one of its own; without a bare name that is "auto".
    Raises ValueError, listing the known names, for anything else.
    """
    default: str | None = None
    named: dict[str, str] = {}
    for part in spec.split(","):
        precision, equals, name = (word.strip() for word in part.rpartition("="))
        if name not in registry.known():
            raise ValueError(f"backend {name!r} in {spec!r}: the backends are {', '.join(registry.known())}")
        if not equals:
            if default is not None:
                raise ValueError(f"{spec!r} names two backends for every precision: {default} and {name}")
            default = name
        elif precision not in _PRECISIONS:
            known = ", ".join(_PRECISIONS)
            raise ValueError(f"precision {precision!r} in {spec!r}: the precisions are {known}")
        elif precision in named:
            raise ValueError(f"{spec!r} names precision {precision} twice")
        else:
            named[precision] = name
    return {precision: named.get(precision, default or AUTO) for precision in _PRECISIONS}


class use_backend:  # a function to its callers, hence the name
    """Choose the backend of calls that name none: ``fw.use_backend("native")``, or ``with fw.use_backend("sim"): ...``.

    spec  "auto", "native", "flydsl", "hopper", "sim", "sim:gfx942", "sim:gfx950", "sim:gfx1250", or one per precision as in
          "bf16=sim,fp32=native"; None returns to FOURWAVE_BACKEND

    As a plain call it holds until the next one; as a context manager until the block ends, when the previous choice
    returns. The choice is the process's, not the thread's, so that autograd's threads see it; a call that names its
    backend is never affected. Raises ValueError for a name that is not known; whether the backend can run is asked by
    each call.
    """

    def __init__(self, spec: str | None) -> None:
        global _override
        if spec is not None:
            if not isinstance(spec, str):
                raise ValueError(
                    f"backend is {spec!r}; it must be a string, one of {', '.join(registry.known())}, or None"
                )
            parse(spec)
        self.spec = spec
        self._previous = _override
        _override = spec

    def __enter__(self) -> use_backend:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _override
        _override = self._previous


def requested(argument: str | None) -> tuple[str, str]:
    """The backend string in force, and where it comes from: "argument", "use_backend", "FOURWAVE_BACKEND", "default"."""
    if argument is not None:
        return argument, "argument"
    if _override is not None:
        return _override, "use_backend"
    variable = env.backend()
    if variable is not None:
        return variable, env.BACKEND_VARIABLE
    return AUTO, "default"


@dataclass(frozen=True)
class Selection:
    """The choice for one problem.

    backend   who runs it
    asked     the name that the string in force gives for this precision, "auto" included
    rejected  for automatic choices: name and reason of each backend that was passed over
    """

    backend: Backend
    asked: str
    rejected: tuple[tuple[str, str], ...]


@functools.lru_cache(maxsize=4096)
def select(spec: str, problem: GemmProblem, config: GemmConfig | None) -> Selection:
    """Choose for `problem`. Cached: what is available is asked once per problem (see clear_cache).

    Raises ValueError for an unknown name, BackendUnavailable and NotImplementedError for a named backend that is not
    there or cannot, NotImplementedError when automatic finds nobody.
    """
    asked = parse(spec)[problem.precision]
    if asked != AUTO:
        backend = registry.get(asked)
        if why := backend.unavailable():
            raise BackendUnavailable(f"backend {asked!r} was asked for and cannot run here: {why}")
        if why := _why_unsupported(backend, problem, config):
            raise NotImplementedError(f"backend {asked!r} was asked for and cannot run {problem}: {why}")
        return Selection(backend, asked, ())
    rejected: list[tuple[str, str]] = []
    for name in _GEMM_ORDER:
        backend = registry.get(name)
        why = backend.unavailable_to(problem.device_type) or _why_unsupported(backend, problem, config)
        if why is None and config is None and not problem.is_empty:
            why = backend.why_not_automatic(problem)
        if why is None:
            return Selection(backend, AUTO, tuple(rejected))
        rejected.append((name, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise NotImplementedError(f"no backend can run {problem}. {reasons}")


def _why_unsupported(backend: Backend, problem: GemmProblem, config: GemmConfig | None) -> str | None:
    # An empty problem launches nothing: any backend can give its answer.
    return None if problem.is_empty else backend.why_unsupported(problem, config)


def why_not(name: str, problem: GemmProblem, config: GemmConfig | None) -> str | None:
    """Why backend `name` cannot run `problem` here, or None when it can."""
    backend = registry.get(name)
    return backend.unavailable_to(problem.device_type) or _why_unsupported(backend, problem, config)


def clear_cache() -> None:
    """Forget earlier choices, for when a device or a package has appeared or gone."""
    select.cache_clear()
    for name in registry.names():
        registry.get(name).forget()
    for forget in _on_clear:
        forget()


_on_clear: list[Callable[[], None]] = []


def on_clear(forget: Callable[[], None]) -> None:
    """Have `clear_cache` call `forget` too: for what was derived from a choice and kept."""
    _on_clear.append(forget)


def log(selection: Selection, problem: GemmProblem, config: GemmConfig | None, notes: list[str]) -> None:
    """One DEBUG record of a finished call; the caller has checked that the logger wants it."""
    if problem.is_empty:
        kernel = "nothing to launch"
    else:
        description = selection.backend.describe_gemm(problem, config)
        kernel = description.kernel
        if description.config is not None:
            kernel += f", {description.config}"
    rejected = "".join(f"; not {name}: {why}" for name, why in selection.rejected)
    noted = "".join(f"; {note}" for note in notes)
    logger.debug("gemm %s: %s (%s), %s%s%s", problem, selection.backend.name, selection.asked, kernel, rejected, noted)
