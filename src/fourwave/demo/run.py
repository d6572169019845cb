"""The demo's run: embed the sentences at full precision, then with every Linear through fourwave.gemm, and compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fourwave import env
from fourwave.backends import registry, select
from fourwave.demo.linear import LinearRecord, replace_linears
from fourwave.demo.model import EmbeddingModel
from fourwave.errors import BackendUnavailable

MIN_COSINE = 0.999  # of an embedding to its full-precision one


@dataclass
class DemoResult:
    sentences: list[str]
    backend: str
    embeddings: torch.Tensor  # [S, 384], unit length
    reference: torch.Tensor  # the same from float32 Linears
    num_linears: int
    truncated: dict[int, int]  # sentence index -> tokens it had before truncation
    max_tokens: int
    records: list[LinearRecord] = field(default_factory=list)
    simulated: bool = False
    workgroups: int = 0
    findings: list[Any] = field(default_factory=list)  # fourwave.sim Finding
    stopped: str | None = None  # what the simulator said when a finding ended the run
    seconds: float = 0.0  # the fourwave pass
    gemm_seconds: float = 0.0
    load_seconds: float = 0.0

    @property
    def similarity(self) -> torch.Tensor:
        """Cosine of each pair of sentences, [S, S]."""
        return self.embeddings @ self.embeddings.mT

    @property
    def cosine(self) -> torch.Tensor:
        """Cosine of each embedding to full float32 precision, [S], in float64."""
        return torch.nn.functional.cosine_similarity(self.embeddings.double(), self.reference.double(), dim=-1)

    def failures(self) -> list[str]:
        """What keeps this run from being right, in words; empty when nothing does."""
        problems = []
        worst = self.cosine.min().item()
        if not worst >= MIN_COSINE:  # NaN fails too
            problems.append(f"an embedding's cosine to full precision is {worst:.6f}, below {MIN_COSINE}")
        if not self.records:
            problems.append("no Linear ran through fourwave.gemm")
        bad = [record for record in self.records if not record.max_ratio <= 1]
        if bad:
            problems.append(f"{len(bad)} Linear calls exceed their error bound, first {bad[0].name}")
        if self.simulated and not self.workgroups:
            problems.append("no workgroup was simulated")
        if self.findings:
            problems.append(f"the simulator's checkers reported {len(self.findings)} findings")
        if self.stopped:
            problems.append(f"the run stopped: {self.stopped}")
        return problems


def choose_backend(requested: str) -> tuple[str, str]:
    """(backend, why). "auto" takes FOURWAVE_BACKEND's for bf16 where that names one; otherwise the AMD kernels, on a GPU where there is one for
    them, else simulated for gfx950.

    Raises ValueError for an unknown name, BackendUnavailable for a named backend that cannot run here.
    """
    why = "asked for"
    if requested == "auto" and (variable := env.backend()) is not None:
        requested, why = select.parse(variable)["bf16"], f"{env.BACKEND_VARIABLE}={variable}"
    if requested != "auto":
        backend = registry.get(requested)
        if reason := backend.unavailable():
            raise BackendUnavailable(f"backend {requested!r} was asked for and cannot run here: {reason}")
        return backend.name, why
    if registry.get("flydsl").unavailable() is None:
        return "flydsl", "its GPU is here"
    return "sim:gfx950", "no GPU that the AMD kernels run on; fourwave doctor says more"


def on_gpu(backend: str) -> bool:
    """Whether this backend takes operands on a GPU only."""
    return backend != "native" and not backend.startswith("sim")


def run(
    sentences: Sequence[str],
    backend: str,
    *,
    on_start: Callable[[int], None] = lambda calls: None,
    on_call: Callable[[LinearRecord], None] = lambda record: None,
) -> DemoResult:
    """Embed `sentences` with every Linear of the model on `backend`.

    on_start(calls) is told once how many Linear calls will come, on_call(record) each one.
    Raises BackendUnavailable and ModelUnavailable; a finding of the simulator is in the result, not raised.
    """
    simulated = backend.partition(":")[0] == "sim"
    start = time.perf_counter()
    embedder = EmbeddingModel.load("cuda" if on_gpu(backend) else "cpu")
    lengths = embedder.count_tokens(sentences)
    batches = embedder.batches(sentences)
    reference = embedder.embed(batches)
    load_seconds = time.perf_counter() - start

    records: list[LinearRecord] = []

    def note(record: LinearRecord) -> None:
        records.append(record)
        on_call(record)

    names = replace_linears(embedder.model, backend, note)
    on_start(len(names) * len(batches))
    findings: list[Any] = []
    stopped = None
    workgroups = 0
    start = time.perf_counter()
    if simulated:
        from fourwave import sim

        sim.reset_report()
        embeddings = torch.full_like(reference, torch.nan)  # what a run that a finding stopped leaves
        try:
            embeddings = embedder.embed(batches)
        except sim.SimulationError as error:
            stopped = str(error)
        report = sim.current_report()
        findings, workgroups = list(report.findings), report.workgroups
    else:
        embeddings = embedder.embed(batches)
    return DemoResult(
        sentences=list(sentences),
        backend=backend,
        embeddings=embeddings,
        reference=reference,
        num_linears=len(names),
        truncated={i: n for i, n in enumerate(lengths) if n > embedder.max_tokens},
        max_tokens=embedder.max_tokens,
        records=records,
        simulated=simulated,
        workgroups=workgroups,
        findings=findings,
        stopped=stopped,
        seconds=time.perf_counter() - start,
        gemm_seconds=sum(record.seconds for record in records),
        load_seconds=load_seconds,
    )
