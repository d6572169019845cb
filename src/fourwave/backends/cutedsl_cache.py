"""Compiled Hopper kernels on disk, so that another process need not compile them again.

One object file per specialisation, named by a hash of the specialisation, of the kernels' sources and of CuTe DSL's version:
what was compiled from other sources is never found. Files are written under another name and then renamed, so processes
may share the folder. Nothing depends on the cache: a file that cannot be written or read costs a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fourwave import env
from fourwave.backends import guard

logger = logging.getLogger("fourwave.dispatch")
_lock = threading.Lock()  # CuTe DSL traces one function at a time


def kernel(
    compiled: dict[Any, Any], spec: Any, compile_kernel: Callable[[Any], Any], loaded: Callable[[Any], Any]
) -> Any:
    """compiled[spec], made at its first use: loaded(CuTe DSL's compiled function), which compile_kernel(spec) makes if no process has
    done so before. RuntimeError where that comes inside a CUDA graph's capture."""
    found = compiled.get(spec)
    if found is not None:
        return found
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the kernel for {spec} is not compiled yet, and compiling inside a CUDA graph's capture is not possible: "
            "warm up first, with one call of the same kind outside the capture"
        )
    with _lock:
        found = compiled.get(spec)
        if found is None:
            guard.import_cutlass()
            function = load(spec)
            if function is None:
                function = compile_kernel(spec)
                store(spec, function)
            found = compiled[spec] = loaded(function)
    return found


def directory() -> Path:
    return env.cache_dir() / "sm90"


@functools.cache
def _fingerprint(module: str) -> str:
    """Of all that a kernel is compiled from besides its specialisation, whose class is in `module`: the sm90 files beside that,
    the shared blocks and the formats' constants."""
    package = Path(__file__).parents[1]
    beside = Path(sys.modules[module].__file__ or "").parent
    sources = sorted([*(package / "blocks" / "cutedsl").glob("*.py"), *beside.glob("sm90*.py")])
    sources += [package / "formats" / name for name in ("element.py", "scale_rules.py")]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for distribution in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base"):
        try:
            digest.update(importlib.metadata.version(distribution).encode() + b"\0")
        except importlib.metadata.PackageNotFoundError:
            digest.update(b"\0")
    return digest.hexdigest()


def _name(spec: object) -> str:
    return "fourwave_" + hashlib.sha256(f"{_fingerprint(type(spec).__module__)} {spec!r}".encode()).hexdigest()[:40]


def load(spec: object) -> Any:
    """CuTe DSL's compiled function of an earlier process, or None."""
    name = _name(spec)
    path = directory() / f"{name}.o"
    if not path.is_file():
        return None
    from cutlass.cute.runtime import load_module

    try:
        return getattr(load_module(str(path)), name)
    except Exception as error:  # whatever a damaged file makes of the loader
        logger.warning("the cached kernel %s cannot be loaded (%s): it is compiled again", path, error)
        return None


def store(spec: object, compiled: Any) -> None:
    """Keep CuTe DSL's compiled function."""
    name = _name(spec)
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory()) as folder:
            compiled.export_to_c(folder, name)
            os.replace(Path(folder) / f"{name}.o", directory() / f"{name}.o")
    except Exception as error:  # a full disk, a folder that cannot be written, an exporter that fails
        logger.warning("the kernel cannot be kept in %s: %s", directory(), error)
