"""Which backend, kernel and config a grouped call would use, and why no other."""

from __future__ import annotations

from typing import Any

from fourwave.backends import select
from fourwave.backends.explanation import Explanation, reasons_against
from fourwave.ops.grouped_gemm.check import GroupedArguments, check
from fourwave.ops.grouped_gemm.execute import choose, through_a_copy, why_not, writable
from fourwave.ops.grouped_gemm.problem import GroupedProblem


def explain_arguments(args: GroupedArguments) -> Explanation:
    problem, _, notes = check(args)
    if args.out is not None and writable(args.out) is not args.out:
        notes.append(through_a_copy(args.out))
    return explain_problem(problem, config=args.config, backend=args.backend, notes=notes)


def explain_problem(
    problem: GroupedProblem, *, config: Any = None, backend: str | None = None, notes: list[str] | None = None
) -> Explanation:
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
    rejected = reasons_against(chosen, asked, rejected, lambda name: why_not(name, problem, config))
    return Explanation(
        problem,
        spec,
        source,
        chosen,
        rejected=rejected,
        notes=notes or [],
        error=error,
        operation="grouped_gemm",
        **details,
    )
