"""Winners on disk: one file per key, for any number of processes and threads at once.

A file is written under another name and renamed, so that a reader sees all of it or nothing; a process that dies while writing
leaves a file that nobody reads, which is removed a day later. What cannot be read, or holds another key than its name says (a
key has the version of the kernels in it), is a miss. Where the folder cannot be written, winners live in memory, after one
warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

FORMAT = 1
STALE_SECONDS = 86400
LOCK_SECONDS = 600  # longer than a search takes: who waits so long searches for itself

Key = Mapping[str, Any]


class WinnerCache:
    """Maps keys (flat mappings of strings and numbers) to winners (likewise)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Any]] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()
        self._warned = False

    def get(self, key: Key) -> dict[str, Any] | None:
        """The winner for key, or None."""
        name = self._name(key)
        if (known := self._memory.get(name)) is not None:
            return dict(known)
        try:
            entry = json.loads((self.folder / f"{name}.json").read_text())
        except (OSError, ValueError, RecursionError):  # RecursionError: thousands of nested lists
            return None
        if not isinstance(entry, dict) or entry.get("format") != FORMAT or entry.get("key") != _plain(key):
            return None
        if not isinstance(winner := entry.get("winner"), dict):
            return None
        self._memory[name] = winner
        return dict(winner)

    def in_memory(self, key: Key) -> dict[str, Any] | None:
        """`get` without a look at the disk."""
        known = self._memory.get(self._name(key))
        return None if known is None else dict(known)

    def put(self, key: Key, winner: Mapping[str, Any]) -> None:
        name = self._name(key)
        self._memory[name] = dict(winner)
        text = json.dumps({"format": FORMAT, "key": _plain(key), "winner": _plain(winner)}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            with tempfile.NamedTemporaryFile(
                "w", dir=self.folder, prefix=f"{name}.", suffix=".tmp", delete=False
            ) as file:
                try:
                    file.write(text)
                    file.close()
                    os.replace(file.name, self.folder / f"{name}.json")
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(file.name)
                    raise
        except OSError as error:
            self._warn(error)

    @contextlib.contextmanager
    def searching(self, key: Key) -> Iterator[None]:
        """Hold this while searching: one thread of one process at a time for each key. Ask `get` again inside."""
        name = self._name(key)
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock, contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(str(self.folder / f"{name}.lock"), timeout=LOCK_SECONDS))
            except (OSError, Timeout) as error:
                self._warn(error)
            yield

    def _remove_stale(self) -> None:
        before = time.time() - STALE_SECONDS
        for path in self.folder.glob("*.tmp"):
            with contextlib.suppress(OSError):  # another process was faster
                if path.stat().st_mtime < before:
                    path.unlink()

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"winners stay in memory: {self.folder} cannot be used ({error})", RuntimeWarning, stacklevel=4
            )

    @staticmethod
    def _name(key: Key) -> str:
        return hashlib.sha256(json.dumps(_plain(key), sort_keys=True).encode()).hexdigest()[:32]


def _plain(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON makes of a mapping and back."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(mapping)))
    return plain
