"""The words that options take for dtypes, layouts and architectures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch

from fourwave.cli import console as out
from fourwave.ops.gemm.config import ARCHS
from fourwave.ops.gemm.problem import LAYOUTS, PRECISIONS

MXFP4_ARCHS = ("gfx1250", "gfx950")  # with matrix instructions for packed e2m1
DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}

T = TypeVar("T")


def choose(option: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """The words given, each once, or all the known when none was; another word ends the command."""
    known = list(known)
    by_lower = {word.lower(): word for word in known}
    chosen = []
    for word in given:
        if word.lower() not in by_lower:
            out.fail(f"{option} {word!r}: choose from {', '.join(known)}")
        chosen.append(by_lower[word.lower()])
    return list(dict.fromkeys(chosen)) or known


def dtype(option: str, word: str) -> torch.dtype:
    return DTYPES[choose(option, [word], DTYPES)[0]]


def archs(given: Iterable[str], known: Iterable[str] = ARCHS) -> list[str]:
    return choose("--arch", given, known)


def layouts(given: Iterable[str]) -> list[str]:
    return choose("--layout", given, LAYOUTS)
