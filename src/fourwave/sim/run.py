"""sim.run: one launcher call on the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .report import Report


def run(launcher: Callable[..., Any], *args: Any, arch: str = "gfx950", **options: Any) -> Report:
    """Call a @flyc.jit launcher once on the simulator and return its Report.

    launcher, args   as on a GPU, with CPU tensors in place of device tensors
    arch, options    of fourwave.sim.session, checks included
    Outputs are in the tensors passed. Raises what session() raises, and the launcher's own errors.
    """
    from . import session

    with session(arch, **options) as report:
        launcher(*args)
    return report
