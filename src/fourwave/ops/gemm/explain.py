"""Which backend, kernel and config a call would use, and why no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fourwave.backends import registry, select
from fourwave.backends.explanation import Explanation, reasons_against
from fourwave.ops.gemm.check import Arguments, check, check_choice, check_overlap, matrix
from fourwave.ops.gemm.problem import GemmProblem

if TYPE_CHECKING:
    from fourwave.ops.gemm.config import GemmConfig


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
    rejected = reasons_against(chosen, asked, rejected, lambda name: select.why_not(name, problem, config))
    return Explanation(
        problem, spec, source, chosen, rejected=rejected, notes=[] if notes is None else notes, error=error, **details
    )  # fmt: skip
