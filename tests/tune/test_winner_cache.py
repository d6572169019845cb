"""Winners on disk, with many processes and threads at once, and the choice of a GroupedConfig."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fourwave import env
from fourwave.ops.grouped_gemm.config import GroupedConfig, candidates, default_config
from fourwave.ops.grouped_gemm.problem import GroupedProblem
from fourwave.tune import grouped
from fourwave.tune.cache import STALE_SECONDS, WinnerCache

PROCESSES, KEYS = 16, 25
CODES = torch.float8_e4m3fn
PROBLEM = GroupedProblem(
    8, 4096, 1280, 8192, "rows", "TN", CODES, CODES, torch.bfloat16, a_scaling="1x128", b_scaling="128x128"
)


def key(process: int, index: int) -> dict[str, object]:
    return {"op": "test", "process": process, "index": index}


def write(folder: Path, process: int, dies: bool) -> None:
    cache = WinnerCache(folder)
    if dies:
        rename = os.replace

        def die(source: str, target: str) -> None:
            if str(target).endswith(f"{cache._name(key(process, KEYS // 2))}.json"):
                os.kill(os.getpid(), signal.SIGKILL)
            rename(source, target)

        os.replace = die  # type: ignore[assignment]
    for index in range(KEYS):
        with cache.searching(key(process, index)):
            cache.put(key(process, index), {"tile_m": process, "tile_n": index})


def test_sixteen_processes_one_of_which_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write, args=(tmp_path, p, p == 3)) for p in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [-signal.SIGKILL if p == 3 else 0 for p in range(PROCESSES)]
    cache = WinnerCache(tmp_path)
    for p in range(PROCESSES):
        for index in range(KEYS if p != 3 else KEYS // 2):
            assert cache.get(key(p, index)) == {"tile_m": p, "tile_n": index}
    assert cache.get(key(3, KEYS // 2)) is None
    for path in tmp_path.glob("*.json"):
        json.loads(path.read_text())
    left = list(tmp_path.glob("*.tmp"))
    assert len(left) == 1
    os.utime(left[0], (0, time.time() - STALE_SECONDS - 1))
    cache.put(key(3, KEYS // 2), {"tile_m": 3})
    assert not list(tmp_path.glob("*.tmp")) and WinnerCache(tmp_path).get(key(3, KEYS // 2)) == {"tile_m": 3}


def search(folder: Path, counter: Path) -> None:
    def measure(config: GroupedConfig) -> float:
        with counter.open("a") as file:
            file.write("x")
        time.sleep(0.01)
        return config.tile_m

    store = WinnerCache(folder)
    threads = [
        threading.Thread(target=lambda: grouped.choose(PROBLEM, "gfx950", measure, store=store)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_key_is_searched_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    counter = tmp_path / "measured"
    processes = [context.Process(target=search, args=(tmp_path / "cache", counter)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    assert len(counter.read_text()) == len(grouped.pruned(PROBLEM, "gfx950"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 200_000, '{"format": 0}', '{"format": 1, "key": {"op": "other"}, "winner": {}}'],
    ids=lambda text: text[:20],
)
def test_what_cannot_be_used_is_a_miss(tmp_path: Path, text: str) -> None:
    cache = WinnerCache(tmp_path)
    cache.put(key(0, 0), {"tile_m": 1})
    (path,) = tmp_path.glob("*.json")
    path.write_text(text)
    assert WinnerCache(tmp_path).get(key(0, 0)) is None
    path.unlink()
    path.mkdir()
    assert WinnerCache(tmp_path).get(key(0, 0)) is None


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = WinnerCache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="winners stay in memory") as raised, cache.searching(key(0, 0)):
        cache.put(key(0, 0), {"tile_m": 1})
        cache.put(key(0, 1), {"tile_m": 2})
    assert len(raised) == 1
    assert cache.get(key(0, 0)) == {"tile_m": 1} and cache.get(key(0, 1)) == {"tile_m": 2}


def test_choice(tmp_path: Path) -> None:
    store = WinnerCache(tmp_path)
    measured: list[GroupedConfig] = []

    def measure(config: GroupedConfig) -> float:
        measured.append(config)
        if config.tile_m == 32:
            raise RuntimeError("out of memory")
        return abs(config.tile_m - 64) + 1.0

    assert (
        grouped.choose(PROBLEM, "gfx950", measure, store=store, capturing=True) == default_config(PROBLEM, "gfx950")[0]
    )
    assert not measured
    best = grouped.choose(PROBLEM, "gfx950", measure, store=store)
    assert best.tile_m == 64 and measured == grouped.pruned(PROBLEM, "gfx950")
    # Other rows and groups of the same powers of two share it; from the disk, too. Another kind of problem does not.
    near = replace(PROBLEM, M=3000, G=5)
    assert grouped.choose(near, "gfx950", measure, store=WinnerCache(tmp_path)) == best
    assert grouped.choose(near, "gfx950", measure, store=store, capturing=True) == best
    assert len(measured) == len(grouped.pruned(PROBLEM, "gfx950"))
    for other in (replace(PROBLEM, M=5000), replace(PROBLEM, N=1408), replace(PROBLEM, b_preshuffled=True)):
        assert grouped.key_of(other, "gfx950") != grouped.key_of(PROBLEM, "gfx950")
    assert grouped.key_of(PROBLEM, "gfx942") != grouped.key_of(PROBLEM, "gfx950")


def test_a_winner_of_another_version_is_not_used(tmp_path: Path) -> None:
    store = WinnerCache(tmp_path)
    known = grouped.key_of(PROBLEM, "gfx950")
    for winner in ({"tile_m": 64, "speed": 3}, {**asdict(candidates(PROBLEM, "gfx950")[0]), "tile_k": 100}):
        store.put(known, winner)
        assert grouped.choose(PROBLEM, "gfx950", lambda c: -c.tile_m, store=store).tile_m == 256


def test_few_rows_are_not_timed_with_tall_tiles() -> None:
    few = grouped.pruned(replace(PROBLEM, M=8), "gfx950")
    assert max(config.tile_m for config in few) < 32
    assert max(config.split_k for config in few) > 1


def test_only_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOURWAVE_AUTOTUNE", raising=False)
    assert not env.autotune()
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "1")
    assert env.autotune()
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="0 or 1"):
        env.autotune()


def test_quiet_where_all_is_well(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = WinnerCache(tmp_path / "new" / "folder")
        with cache.searching(key(1, 1)):
            cache.put(key(1, 1), {"tile_m": 1})
