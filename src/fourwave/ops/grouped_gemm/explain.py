"""Which backend, kernel and config a grouped call would use, and why no other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fourwave.backends import registry, select
from fourwave.ops.grouped_gemm.check import GroupedArguments, check
from fourwave.ops.grouped_gemm.execute import choose, why_not, writable
from fourwave.ops.grouped_gemm.problem import GroupedProblem


@dataclass(frozen=True)
class GroupedExplanation:
    """As fourwave.ops.gemm.explain.Explanation."""

    problem: GroupedProblem
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
        lines = [f"grouped_gemm {self.problem}", f"  asked for   {self.requested} ({self.source})"]
        if self.error is not None:
            lines.append(f"  would raise {type(self.error).__name__}: {self.error}")
        else:
            lines.append(f"  backend     {self.backend}")
            lines.append(f"  kernel      {self.kernel}" + (f" for {self.arch}" if self.arch else ""))
            if self.config is not None:
                lines.append(f"  config      {self.config}")
            lines += [f"              {reason}" for reason in self.reasons]
        lines += [f"  note        {note}" for note in self.notes]
        lines += [f"  not {name:<8}{' ' * (len(name) >= 8)}{why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def explain_arguments(args: GroupedArguments) -> GroupedExplanation:
    problem, _, notes = check(args)
    if args.out is not None and writable(args.out) is not args.out:
        notes.append(f"out written through a copy: strides {args.out.stride()}")
    return explain_problem(problem, config=args.config, backend=args.backend, notes=notes)


def explain_problem(
    problem: GroupedProblem, *, config: Any = None, backend: str | None = None, notes: list[str] | None = None
) -> GroupedExplanation:
    spec, source = select.requested(backend)
    chosen: str | None = None
    error: Exception | None = None
    rejected: dict[str, str] = {}
    details: dict[str, Any] = {}
    try:
        selection = choose(spec, problem, config)
    except (RuntimeError, NotImplementedError) as raised:  # BackendUnavailable is a RuntimeError
        error, asked = raised, select.parse(spec)[problem.precision]
    else:
        chosen, asked = selection.backend.name, selection.asked
        rejected = dict(selection.rejected)
        if problem.is_empty:
            details = {"kernel": "nothing to launch"}
        else:
            told = selection.backend.describe_grouped_gemm(problem, config)
            details = {"kernel": told.kernel, "arch": told.arch, "config": told.config, "reasons": told.reasons}
    for name in registry.names():
        if name == chosen or name in rejected:
            continue
        why = why_not(name, problem, config)
        if why is None:
            if asked != select.AUTO:
                why = f"could run; {asked} was asked for"
            elif name.startswith("sim"):
                why = "could run; the simulator runs only when asked for"
            else:
                why = f"could run; {chosen} comes first"
        rejected[name] = why
    return GroupedExplanation(
        problem, spec, source, chosen, rejected=rejected, notes=notes or [], error=error, **details
    )
