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
Operands = tuple[torch.dtype, torch.dtype, str | None, str | None]  # dtypes of a and b, and their scalings
E4M3, E4M3_FNUZ, E2M1 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8
OPERANDS: dict[str, Operands] = {
    **{name: (dtype, dtype, None, None) for name, dtype in DTYPES.items()},
    "fp8": (E4M3, E4M3, "tensor", "tensor"),
    "fp8_row": (E4M3, E4M3, "row", "row"),
    "fp8_1x128": (E4M3, E4M3, "1x128", "128x128"),
    "mxfp8": (E4M3, E4M3, "1x32", "1x32"),
    "mxfp4": (E2M1, E2M1, "1x32", "1x32"),
    "mxfp8_mxfp4": (E4M3, E2M1, "1x32", "1x32"),
    "mxfp4_mxfp8": (E2M1, E4M3, "1x32", "1x32"),
    "bf16_mxfp4": (torch.bfloat16, E2M1, None, "1x32"),
}  # the last three: activations and weights


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


def split(given: Iterable[str]) -> list[str]:
    """Words of an option that may be repeated, or be given a list with commas."""
    return [part.strip() for word in given for part in word.split(",")]


def dtype(option: str, word: str) -> torch.dtype:
    return DTYPES[choose(option, [word], DTYPES)[0]]


def operands(word: str, arch: str | None) -> Operands:
    """Of --dtype; on gfx942 the codes of FP8 are its own."""
    a, b, *scalings = OPERANDS[choose("--dtype", [word], OPERANDS)[0]]
    if arch == "gfx942" and "1x32" not in scalings:
        a, b = (E4M3_FNUZ if dtype == E4M3 else dtype for dtype in (a, b))
    return a, b, scalings[0], scalings[1]


def archs_for(word: str) -> tuple[str, ...]:
    """Those whose matrix instructions take the operands of --dtype."""
    a, b, *scalings = OPERANDS[choose("--dtype", [word], OPERANDS)[0]]
    if E2M1 in (a, b):
        return MXFP4_ARCHS
    return (*ARCHS, "gfx1250") if scalings == ["1x32", "1x32"] else ARCHS


def archs(given: Iterable[str], known: Iterable[str] = ARCHS) -> list[str]:
    return choose("--arch", split(given), known)


def layouts(given: Iterable[str]) -> list[str]:
    return choose("--layout", split(given), LAYOUTS)
