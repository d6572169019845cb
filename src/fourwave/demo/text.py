"""Sentences for the demo: from arguments, a file or a stream, one a line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

DEFAULT_SENTENCES = (
    "A musician plays guitar on a small stage.",
    "Someone is strumming a guitar for a crowd.",
    "Heavy rain flooded the streets overnight.",
    "The storm left the roads under water.",
    "Matrix multiplication dominates training time.",
    "Most of the training cost is in GEMM calls.",
    "My grandmother bakes bread every Sunday.",
    "The spacecraft entered orbit around Mars.",
)


def clean(lines: Iterable[str]) -> list[str]:
    """Strip each line and drop the blank ones."""
    return [line.strip() for line in lines if line.strip()]


def read_sentences(texts: Iterable[str] = (), file: str | Path | None = None, stdin: TextIO | None = None) -> list[str]:
    """The sentences to embed: `texts`, then the lines of `file`, then those of `stdin`; the defaults if none was named.

    A text "-" stands for `stdin`; a file "-" too.
    Raises ValueError when what was named holds no text, or is not UTF-8.
    """
    texts = list(texts)
    from_stdin = "-" in texts or str(file) == "-"
    if not texts and file is None:
        return list(DEFAULT_SENTENCES)
    sentences = clean(text for text in texts if text != "-")
    try:
        if file is not None and str(file) != "-":
            sentences += clean(Path(file).read_text(encoding="utf-8").splitlines())
        if from_stdin:
            if stdin is None:
                raise ValueError("text was to come from standard input, but there is none")
            sentences += clean(stdin)
    except UnicodeDecodeError as error:
        raise ValueError(f"the input is not UTF-8 text: {error}") from None
    if not sentences:
        raise ValueError("no text: give at least one sentence, one a line (blank lines do not count)")
    return sentences
