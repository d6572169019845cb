"""What `fw.explain` and its like return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fourwave.backends import registry, select


@dataclass(frozen=True)
class Explanation:
    """What a call of `operation` would do with the same arguments. str() of it is meant to be read.

    problem    the call as backends see it
    requested  the backend string in force; source says whether the "argument", "use_backend", "FOURWAVE_BACKEND" or
               the "default" gave it
    backend    name of the backend that would run, or None when the call would raise `error`
    kernel, arch, config, reasons   what that backend would run, and why that config
    rejected   for each other backend, why it would not run
    notes      what would be done on the way, such as "a copied: ..."
    """

    problem: Any
    requested: str
    source: str
    backend: str | None
    kernel: str | None = None
    arch: str | None = None
    config: Any = None
    reasons: list[str] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None
    operation: str = "gemm"

    def __str__(self) -> str:
        lines = [f"{self.operation} {self.problem}", f"  asked for   {self.requested} ({self.source})"]
        if self.error is not None:
            lines.append(f"  would raise {type(self.error).__name__}: {self.error}")
        else:
            lines.append(f"  backend     {self.backend}")
            lines.append(f"  kernel      {self.kernel}" + (f" for {self.arch}" if self.arch else ""))
            if self.config is not None:
                lines.append(f"  config      {self.config}")
            lines += [f"              {reason}" for reason in self.reasons]
        lines += [f"  note        {note}" for note in self.notes]
        lines += [
            f"  not {name:<8}{why}" if len(name) < 8 else f"  not {name} {why}" for name, why in self.rejected.items()
        ]
        return "\n".join(lines)


def reasons_against(
    chosen: str | None, asked: str, rejected: Mapping[str, str], why_not: Callable[[str], str | None]
) -> dict[str, str]:
    """`rejected`, and for every other backend but the chosen one why it would not run; why_not: why it cannot, or None."""
    told = dict(rejected)
    for name in registry.names():
        if name == chosen or name in told:
            continue
        why = why_not(name)
        if why is None:
            if asked != select.AUTO:
                why = f"could run; {asked} was asked for"
            elif name.startswith("sim"):
                why = "could run; the simulator runs only when asked for"
            else:
                why = f"could run; {chosen} comes first"
        told[name] = why
    return told
