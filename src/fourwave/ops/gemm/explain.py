"""Which backend, kernel and config a call would use, and why no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fourwave.backends import registry, select
from fourwave.ops.gemm.check import Arguments, check, check_choice, check_overlap, matrix
from fourwave.ops.gemm.problem import GemmProblem

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig


@dataclass(frozen=True)
class Explanation:
    """What `fw.gemm` would do with the same arguments. str() of it is meant to be read.

    problem    the call as backends see it
    requested  the backend string in force; source says whether the "argument", "use_backend", "FOURWAVE_BACKEND" or
               the "default" gave it
    backend    name of the backend that would run, or None when the call would raise `error`
    kernel, arch, config, reasons   what that backend would run, and why that config
    rejected   for each other backend, why it would not run
    notes      what would be done on the way, such as "a copied: ..."
    """

    problem: GemmProblem
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

    def __str__(self) -> str:
        lines = [f"gemm {self.problem}", f"  asked for   {self.requested} ({self.source})"]
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


def explain_arguments(args: Arguments) -> Explanation:
    """See ops.gemm.api.explain."""
    check_choice(args.config, args.backend)
    problem, tensors, _, notes = check(args)
    check_overlap(args)
    for name in ("out", "preactivation", "out_columnwise"):
        if (given := getattr(args, name)) is not None:
            tensors = tensors._replace(**{name: matrix(given, problem.M, name, notes)})  # type: ignore[arg-type]
    told = explain_problem(problem, config=args.config, backend=args.backend, notes=notes)
    if told.backend is not None and not problem.is_empty:
        notes += registry.get(told.backend).copies(problem, args.config, tensors)
    return told


def explain_problem(
    problem: GemmProblem,
    *,
    config: GemmConfig | None = None,
    backend: str | None = None,
    notes: list[str] | None = None,
) -> Explanation:
    """`explain` for a problem without tensors."""
    spec, source = select.requested(backend)
    chosen: str | None = None
    error: Exception | None = None
    rejected: dict[str, str] = {}
    details: dict[str, Any] = {}
    try:
        selection = select.select(spec, problem, config)
    except (RuntimeError, NotImplementedError) as raised:  # BackendUnavailable is a RuntimeError
        error = raised
        asked = select.parse(spec)[problem.precision]
    else:
        chosen, asked = selection.backend.name, selection.asked
        if problem.is_empty:
            details = {"kernel": "nothing to launch"}
        else:
            description = selection.backend.describe_gemm(problem, config)
            details = {
                "kernel": description.kernel,
                "arch": description.arch,
                "config": description.config,
                "reasons": description.reasons,
            }
        rejected = dict(selection.rejected)
    for name in registry.names():
        if name == chosen or name in rejected:
            continue
        why = select.why_not(name, problem, config)
        if why is None:
            if asked != select.AUTO:
                why = f"could run; {asked} was asked for"
            elif name.startswith("sim"):
                why = "could run; the simulator runs only when asked for"
            else:
                why = f"could run; {chosen} comes first"
        rejected[name] = why
    return Explanation(
        problem, spec, source, chosen, rejected=rejected, notes=[] if notes is None else notes, error=error, **details
    )  # fmt: skip
