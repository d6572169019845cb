"""The choice of a GemmConfig by time: candidates, keys, order of precedence, what is never tuned. Times are made up here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fourwave.backends import flydsl
from fourwave.ops.gemm import amd, tuned_cdna
from fourwave.ops.gemm import config as gemm_config
from fourwave.ops.gemm.config import GemmConfig, default_config, why_unsupported
from fourwave.ops.gemm.problem import PACKED_E2M1, GemmProblem, GemmTensors
from fourwave.tune import gemm, search
from fourwave.tune.cache import WinnerCache

BF16, CODES, FNUZ = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz
PROBLEM = GemmProblem(13, 512, 4096, "TN", BF16, BF16, BF16, device_type="cuda")
FLOAT8 = replace(PROBLEM, a_dtype=CODES, b_dtype=CODES, a_scaling="row", b_scaling="row")
MXFP8 = replace(FLOAT8, a_scaling="1x32", b_scaling="1x32")
WGRAD = replace(PROBLEM, M=512, layout="NT", bias_grad_dtype=BF16, accumulate=True)
CASES = [
    (PROBLEM, "gfx950"), (PROBLEM, "gfx942"), (WGRAD, "gfx950"), (WGRAD, "gfx942"), (FLOAT8, "gfx950"), (MXFP8, "gfx950"),
    (replace(FLOAT8, a_dtype=FNUZ, b_dtype=FNUZ), "gfx942"), (replace(MXFP8, M=4096), "gfx942"),
    (replace(FLOAT8, b_preshuffled=True), "gfx950"), (replace(FLOAT8, a_scaling="1x128", b_scaling="128x128", M=700), "gfx950"),
    (replace(MXFP8, a_dtype=PACKED_E2M1, b_dtype=PACKED_E2M1, M=300), "gfx950"), (replace(MXFP8, M=300), "gfx1250"),
    (replace(PROBLEM, M=4096, N=4096), "gfx950"), (replace(PROBLEM, M=1, activation="swiglu", out_dtype=torch.float32), "gfx950"),
]  # fmt: skip


def never(config: GemmConfig) -> float:
    raise AssertionError(f"{config} was timed")


def preferring(wanted: GemmConfig, measured: list[GemmConfig]) -> Callable[[GemmConfig], float]:
    def measure(config: GemmConfig) -> float:
        measured.append(config)
        return 1.0 if config == wanted else 2.0

    return measure


@pytest.mark.parametrize(("problem", "arch"), CASES)
def test_candidates_are_few_and_can_run(problem: GemmProblem, arch: str) -> None:
    configs = gemm.pruned(problem, arch)
    assert configs[0] == default_config(problem, arch)[0]
    assert 1 < len(configs) <= gemm.MOST and len(set(configs)) == len(configs)
    assert [why_unsupported(problem, config, arch) for config in configs] == [None] * len(configs)


def test_candidates_are_pruned_by_the_model() -> None:
    large = replace(PROBLEM, M=8192, N=8192)
    tiles = {config.tile_m for config in gemm_config.candidates_for(large, "gfx950")}
    kept = {config.tile_m for config in gemm.pruned(large, "gfx950")}
    assert 16 in tiles and 256 in kept and 16 not in kept
    few = gemm.pruned(PROBLEM, "gfx950")
    assert max(config.split_k for config in few) > 1 and max(config.tile_m for config in few) < 256


@pytest.mark.parametrize(("problem", "arch"), CASES)
def test_a_kind_is_timed_once(problem: GemmProblem, arch: str, tmp_path: Path) -> None:
    store, measured = WinnerCache(tmp_path), list[GemmConfig]()
    wanted = gemm.pruned(problem, arch)[-1]
    assert gemm.choose(problem, arch, never, store=store, capturing=True) == default_config(problem, arch)[0]
    assert gemm.choose(problem, arch, preferring(wanted, measured), store=store) == wanted
    assert measured == gemm.pruned(problem, arch)
    for again, capturing in ((store, False), (store, True), (WinnerCache(tmp_path), False)):
        assert gemm.choose(problem, arch, never, store=again, capturing=capturing) == wanted
    # In a graph not even the disk is read.
    captured = gemm.choose(problem, arch, never, store=WinnerCache(tmp_path), capturing=True)
    assert captured == default_config(problem, arch)[0]


def test_what_shares_a_winner_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    key = gemm.key_of(PROBLEM, "gfx950")
    for same in (replace(PROBLEM, M=9), replace(PROBLEM, M=16), replace(PROBLEM, fast_accum=True)):
        assert gemm.key_of(same, "gfx950") == key
    others = [
        {"M": 17}, {"M": 8}, {"N": 520}, {"K": 4104}, {"layout": "NN"}, {"a_dtype": torch.float16}, {"b_dtype": torch.float16},
        {"out_dtype": torch.float32}, {"bias_dtype": BF16}, {"activation": "gelu"}, {"accumulate": True}, {"a_scaling": "row"},
        {"b_scaling": "row"}, {"preactivation_dtype": BF16}, {"bias_grad_dtype": BF16}, {"out_scaling": "1x32"},
        {"out_direction": "both"}, {"b_preshuffled": True},
    ]  # fmt: skip
    keys = [gemm.key_of(replace(PROBLEM, **change), "gfx950") for change in others]  # type: ignore[arg-type]
    assert key not in keys and len({str(each) for each in keys}) == len(keys)
    assert gemm.key_of(PROBLEM, "gfx942") != key
    monkeypatch.setattr(search, "kernel_version", lambda operation: "another")
    assert gemm.key_of(PROBLEM, "gfx950") != key


def test_kernels_of_each_operation_have_a_version() -> None:
    versions = {search.kernel_version(operation) for operation in ("gemm", "grouped_gemm", "no such folder")}
    assert len(versions) == 3


def test_another_compiler_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_compiler(version: str) -> str:
        monkeypatch.setattr(search, "_compiler_version", lambda: version)
        search.kernel_version.cache_clear()
        return search.kernel_version("grouped_gemm")

    try:
        assert of_compiler("0.5.0") == of_compiler("0.5.0") != of_compiler("0.5.1")
    finally:
        search.kernel_version.cache_clear()


def test_winners_that_cannot_run_are_not_used(tmp_path: Path) -> None:
    default, _ = default_config(PROBLEM, "gfx950")
    known = asdict(default)
    for winner in (
        {**known, "speed": 3},
        {**known, "tile_k": 48},
        {**known, "tile_m": "64"},
        {**known, "mma": "16x16x4"},
    ):
        store, measured = WinnerCache(tmp_path), list[GemmConfig]()
        store.put(gemm.key_of(PROBLEM, "gfx950"), winner)
        assert gemm.choose(PROBLEM, "gfx950", preferring(default, measured), store=store) == default
        assert measured == gemm.pruned(PROBLEM, "gfx950")


# ------------------------------------------------------------------------------------------------- same bits


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_batch_invariant_is_never_tuned(arch: str, tmp_path: Path) -> None:
    """Neither timed nor taken from what was timed, whatever M is."""
    store = WinnerCache(tmp_path)
    for m in (1, 13, 200, 3000):
        free = replace(PROBLEM, M=m)
        bound = replace(free, batch_invariant=True)
        wanted = next(each for each in gemm.pruned(free, arch)[::-1] if each != default_config(bound, arch)[0])
        assert gemm.choose(free, arch, preferring(wanted, []), store=store) == wanted
        for capturing in (False, True):
            chosen = gemm.choose(bound, arch, never, store=store, capturing=capturing)
            assert chosen == default_config(bound, arch)[0] and chosen.split_k == 1


@pytest.mark.parametrize("codes", [CODES, FNUZ])
def test_preshuffled_weights_keep_the_parts_of_k(codes: torch.dtype, tmp_path: Path) -> None:
    """K is split as the model says, whatever is fastest: the bits are those of plain weights for each M of a class."""
    arch = "gfx950" if codes == CODES else "gfx942"
    store, splits, timed = WinnerCache(tmp_path), set(), list[tuple[GemmProblem, GemmConfig]]()
    for n in (64, 256, 2048):
        for m in (16, 9, 40, 60, 129, 250):
            plain = replace(FLOAT8, M=m, N=n, K=2**16, a_dtype=codes, b_dtype=codes)
            split = default_config(plain, arch)[0].split_k
            splits.add(split)
            for problem in (plain, replace(plain, b_preshuffled=True)):
                assert {config.split_k for config in gemm.pruned(problem, arch)} == {split}
                slowest_first = iter(range(100, 0, -1))
                chosen = gemm.choose(problem, arch, lambda config, at=slowest_first: next(at), store=store)  # type: ignore[misc]
                assert chosen.split_k == split
                timed.append((problem, chosen))
    assert len(splits) > 1
    # Kinds with other parts of K do not take each other's place.
    assert [gemm.choose(problem, arch, never, store=store) for problem, _ in timed] == [chosen for _, chosen in timed]
    deep = replace(FLOAT8, K=2**16)
    default, _ = default_config(deep, "gfx950")
    edited = replace(default, split_k=default.split_k // 2)
    assert default.split_k > 1 and why_unsupported(deep, edited, "gfx950") is None
    store.put(gemm.key_of(deep, "gfx950"), asdict(edited))
    assert gemm.choose(deep, "gfx950", never, store=store, capturing=True) == default


# ----------------------------------------------------------------------------------------- the flydsl backend


class Machine:
    """A gfx950 GPU as far as the backend asks: what was launched, and times by config."""

    def __init__(self) -> None:
        self.arch, self.capturing, self.wanted = "gfx950", False, GemmConfig()
        self.timed: list[GemmConfig] = []
        self.ran: list[GemmConfig] = []
        self.backend = flydsl.FlyDSLBackend()
        self.tensors = GemmTensors(torch.zeros(0), torch.zeros(0), torch.zeros(0))

    def run(self, problem: GemmProblem, config: GemmConfig | None = None) -> GemmConfig:
        self.backend.run_gemm(problem, config, self.tensors)
        return self.ran[-1]

    def explained(self, problem: GemmProblem) -> tuple[object, str]:
        told = self.backend.describe_gemm(problem, None)
        return told.config, "\n".join(told.reasons)

    def copied_for(self, problem: GemmProblem) -> GemmConfig:
        self.backend.copies(problem, None, self.tensors)
        return self.ran.pop()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    made, cache = Machine(), search.cache

    def run(problem: GemmProblem, config: GemmConfig, arch: str, tensors: GemmTensors) -> list[str]:
        made.ran.append(config)
        return []

    monkeypatch.setattr(flydsl, "device_arch", lambda index: made.arch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(amd, "run", run)
    monkeypatch.setattr(amd, "copies", run)
    monkeypatch.setattr(gemm, "measure_on_gpu", lambda *_: lambda config: preferring(made.wanted, made.timed)(config))
    monkeypatch.setattr(gemm, "_known", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "1")
    cache.cache_clear()
    gemm_config._default_config.cache_clear()
    yield made
    cache.cache_clear()
    gemm_config._default_config.cache_clear()


def test_order_of_precedence(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = default_config(PROBLEM, "gfx950")[0]
    tabled, timed, given = (replace(modelled, split_k=split) for split in (2, 4, 16))
    assert len({modelled, tabled, timed, given}) == 4
    fields = {name: value for name, value in asdict(tabled).items() if value != getattr(GemmConfig(), name)}
    monkeypatch.setattr(tuned_cdna, "TABLE", {tuned_cdna.key(PROBLEM, "gfx950"): fields})
    gemm_config._default_config.cache_clear()
    machine.wanted = timed
    assert timed in gemm.pruned(PROBLEM, "gfx950")

    monkeypatch.delenv("FOURWAVE_AUTOTUNE")
    assert machine.run(PROBLEM) == tabled and not machine.timed
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "1")
    config, told = machine.explained(PROBLEM)
    assert config == tabled and "tuned for gfx950" in told and "no winner yet; the next call times" in told
    assert machine.run(PROBLEM, given) == given and not machine.timed
    assert machine.run(PROBLEM) == timed and machine.timed[0] == tabled
    assert machine.run(PROBLEM, given) == given
    config, told = machine.explained(PROBLEM)
    assert (
        config == timed and "the fastest of the candidates that were timed" in told and f"by default {tabled}" in told
    )
    # Without the variable the winner is not looked at; nor is the table, where there is none.
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "0")
    assert machine.run(PROBLEM) == tabled and machine.explained(PROBLEM)[0] == tabled
    monkeypatch.setattr(tuned_cdna, "TABLE", {})
    gemm_config._default_config.cache_clear()
    assert machine.run(PROBLEM) == modelled


def test_unset_nothing_is_timed_or_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("the cache was asked for")

    monkeypatch.setattr(search, "cache", unexpected)
    default, reasons = default_config(PROBLEM, "gfx950")
    for value in ("", "0"):
        monkeypatch.setenv("FOURWAVE_AUTOTUNE", value)
        assert machine.run(PROBLEM) == default and machine.explained(PROBLEM) == (default, "\n".join(reasons))
    assert not machine.timed
    monkeypatch.setenv("FOURWAVE_AUTOTUNE", "yes")
    with pytest.raises(ValueError, match="0 or 1"):
        machine.run(PROBLEM)


def test_timed_once_in_a_process_and_kept_for_the_next(machine: Machine, tmp_path: Path) -> None:
    machine.wanted = gemm.pruned(PROBLEM, "gfx950")[-1]
    machine.capturing = True
    assert machine.run(PROBLEM) == default_config(PROBLEM, "gfx950")[0] and not machine.timed
    machine.capturing = False
    for _ in range(2):
        assert machine.run(PROBLEM) == machine.wanted
    assert machine.timed == gemm.pruned(PROBLEM, "gfx950") and len(list(tmp_path.rglob("*.json"))) == 1
    machine.capturing = True
    assert machine.run(PROBLEM) == machine.wanted
    machine.capturing = False
    gemm._known.clear()  # as in another process
    search.cache.cache_clear()
    assert machine.explained(PROBLEM)[0] == machine.copied_for(PROBLEM) == machine.wanted
    assert machine.run(replace(PROBLEM, M=10)) == machine.wanted
    assert len(machine.timed) == len(gemm.pruned(PROBLEM, "gfx950"))


def test_batch_invariant_calls_run_the_default(machine: Machine) -> None:
    free = replace(PROBLEM, M=3000)
    bound = replace(free, batch_invariant=True)
    default, _ = default_config(bound, "gfx950")
    # A winner that could run for it, since K is whole.
    machine.wanted = next(each for each in gemm.pruned(free, "gfx950") if each.split_k == 1 and each != default)
    assert why_unsupported(bound, machine.wanted, "gfx950") is None
    assert machine.run(free) == machine.wanted != default
    timed = len(machine.timed)
    assert machine.copied_for(bound) == default
    config, told = machine.explained(bound)
    assert machine.run(bound) == config == default and len(machine.timed) == timed and "not tuned" in told


def test_where_nothing_can_be_timed_the_default_runs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fail(config: GemmConfig) -> float:
        tried.append(config)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gemm, "measure_on_gpu", lambda *_: fail)
    for _ in range(2):
        assert machine.run(PROBLEM) == default_config(PROBLEM, "gfx950")[0]
    assert tried == gemm.pruned(PROBLEM, "gfx950")  # not again on every call


def test_timing_writes_into_outputs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(i * i) for i in range(1, 100))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def run(problem: GemmProblem, config: GemmConfig, arch: str, tensors: GemmTensors) -> list[str]:
        launched.append(config)
        for name, (strides, value) in written.items():
            scratch = getattr(tensors, name)
            assert scratch.stride() == strides
            if problem.accumulate:
                assert value == 7.0 and not scratch.isnan().any() and scratch.abs().max() < 100.0 * len(launched)
                scratch += 1
            else:
                scratch.view(torch.uint8 if scratch.element_size() == 1 else scratch.dtype).fill_(3)
        assert tensors.a is given.a and tensors.bias is given.bias
        return []

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(amd, "run", run)
    launched: list[GemmConfig] = []
    config = default_config(PROBLEM, "gfx950")[0]
    out = torch.full((13, 640), 7.0, dtype=BF16)[:, :512]
    given = GemmTensors(
        torch.zeros(13, 4096, dtype=BF16), torch.zeros(512, 4096, dtype=BF16), out, torch.zeros(512),
        preactivation=torch.full((13, 512), 7.0), bias_grad=torch.full((13,), 7.0),
    )  # fmt: skip
    for problem in (PROBLEM, replace(PROBLEM, accumulate=True)):
        launched.clear()
        names: tuple[str, ...] = ("out", "preactivation", "bias_grad")
        written = {name: (getattr(given, name).stride(), 7.0) for name in names}
        seconds = gemm.measure_on_gpu(problem, "gfx950", given)(config)
        assert launched == [config] * (search.WARMUPS + search.SAMPLES) and 0 < seconds < 1
        assert all((getattr(given, name) == 7.0).all() for name in names)
    # The scales of an output in MX are written, that of one with a given scale is read.
    codes = torch.full((64, 512), 7, dtype=torch.uint8)
    scales = torch.full((64, 16), 7, dtype=torch.uint8)
    quantized = replace(PROBLEM, M=64, out_dtype=CODES, out_scaling="1x32", out_direction="both")
    given = given._replace(
        out=codes.view(CODES), bias_grad=None, preactivation=None, out_scale=scales.view(torch.float8_e8m0fnu),
        out_columnwise=codes.clone().view(CODES), out_columnwise_scale=torch.full((2, 512), 7, dtype=torch.uint8),
    )  # fmt: skip
    names = ("out", "out_scale", "out_columnwise", "out_columnwise_scale")
    written = {name: (getattr(given, name).stride(), 7.0) for name in names}
    gemm.measure_on_gpu(quantized, "gfx950", given)(config)
    assert all((getattr(given, name).view(torch.uint8) == 7).all() for name in names)
    fixed = gemm._scratch(replace(quantized, out_scaling="tensor"), given._replace(out_amax=torch.zeros(())))
    assert "out_amax" in fixed and "out_scale" not in fixed
