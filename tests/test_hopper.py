"""The Hopper backend beyond what test_gemm_backends.py asks of every backend: its configurations, its host path, graphs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import registry, select
from fourwave.backends.hopper import cutedsl_missing
from fourwave.formats.scaling import expand_scale
from fourwave.ops.gemm import sm90_config, sm90_launch, sm90_one_group, sm90_tiles
from fourwave.ops.gemm.problem import LAYOUTS, GemmProblem, GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_config import HopperConfig, why_unsupported
from fourwave.ops.gemm.sm90_tiles import candidates, swapped
from fourwave.ops.grouped_gemm.problem import GroupedProblem, GroupedTensors
from fourwave.testing import GemmCase, bounds, buffers, inputs
from fourwave.testing.llm_shapes import llm81
from fourwave.testing.shapes import Shape
from hopper_stand_in import stand_in

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = sm90_config.FP8
UNAVAILABLE = registry.get("hopper").unavailable()
on_gpu = pytest.mark.skipif(UNAVAILABLE is not None, reason=str(UNAVAILABLE))
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def problem(M: int = 512, N: int = 512, K: int = 512, layout: str = "TN", out: torch.dtype = BF16) -> GemmProblem:
    return GemmProblem(M, N, K, layout, BF16, BF16, out, device_type="cuda")


# ---------------------------------------------------------------------------------------------------------------------
# Rules: no GPU, no DSL


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tile_m": 96}, "multiple of 64 rows"),
        ({"tile_n": 200}, "64 must divide"),
        ({"tile_n": 320}, "up to 256"),
        ({"tile_m": 512}, "at most 256 rows"),
        ({"tile_k": 32}, "128 bytes"),
        ({"tile_m": 256}, "256 accumulators"),
        ({"num_stages": 1}, "at least 2"),
        ({"num_stages": 5}, "bytes of shared memory"),
        ({"cluster_m": 3}, "powers of two"),
        ({"cluster_m": 4, "cluster_n": 2}, "at most 4"),
        ({"cluster_n": 4, "cluster_m": 1}, "its share"),
        ({"store_stages": 3}, "must divide"),
        ({"schedule": "stream"}, "cooperative, pingpong and swapped"),
        ({"split": 2}, "only a swapped or streamed tile"),
        ({"schedule": "swapped", "tile_m": 256}, "up to 128"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 192}, "multiples of 8 up to 128"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "split": 3}, "1, 2, 4 or 8"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "split": 4, "cluster_n": 4}, "up to 8"),
        ({"schedule": "swapped", "tile_m": 8, "tile_n": 128, "cluster_n": 2}, "slices of 8"),
        ({"schedule": "swapped", "tile_m": 64, "tile_n": 128, "num_stages": 10}, "bytes of shared memory"),
        ({"schedule": "pingpong", "consumers": 3}, "2 for pingpong"),
        ({"group": 0}, "at least 1"),
    ],
)
def test_configs_that_the_kernel_cannot_run_are_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    assert why_unsupported(problem(), HopperConfig()) is None
    assert said in (why_unsupported(problem(), replace(HopperConfig(), **change)) or "")  # type: ignore[arg-type]


def test_problems_that_the_kernel_cannot_run_are_refused_with_the_reason() -> None:
    fp32 = GemmProblem(8, 8, 8, "TN", FP32, FP32, FP32, device_type="cuda")
    assert "bfloat16 or float16" in (why_unsupported(fp32, None) or "")
    assert "32-bit" in (why_unsupported(problem(M=2**31), None) or "")
    from fourwave.ops.gemm.config import GemmConfig

    fp8 = GemmProblem(8, 16, 16, "NN", FP8[0], FP8[1], BF16, device_type="cuda")
    assert "K contiguous" in (why_unsupported(fp8, None) or "")
    assert why_unsupported(replace(fp8, layout="TN"), None) is None
    weights = GemmProblem(256, 512, 64, "TN", BF16, FP8[0], BF16, device_type="cuda", b_scaling="1x32")
    for packed in (weights, replace(weights, b_dtype=torch.uint8)):
        assert why_unsupported(packed, None) is None and default_config(packed)[0].schedule == "swapped"
        assert "up to 256 rows" in (why_unsupported(replace(packed, M=257), None) or "")
        assert "whole blocks" in (why_unsupported(replace(packed, K=80), None) or "")
        assert "a swapped tile takes them" in (why_unsupported(packed, sm90_tiles.SQUARE) or "")
    assert "MXFP4 or MXFP8 (e4m3fn)" in (why_unsupported(replace(weights, b_dtype=FP8[1]), None) or "")
    huge = replace(sm90_tiles.HUGE, tile_k=128)
    precise = replace(fp8, layout="TN", M=512, N=512, K=512)
    assert "288 accumulators" in (why_unsupported(precise, huge) or "")
    assert why_unsupported(replace(precise, fast_accum=True), huge) is None
    pingpong = replace(sm90_tiles.SQUARE, tile_k=128)
    assert "pingpong with promotion" in (why_unsupported(precise, pingpong) or "")
    blocks = replace(precise, a_scaling="1x32", b_scaling="1x32")
    assert "scales 1x32 and 1x32: this kernel does not multiply such a pair" in (why_unsupported(blocks, None) or "")
    assert why_unsupported(replace(precise, a_scaling="row", b_scaling="tensor"), None) is None
    few = problem(16, 512, 128)
    assert "64 or 128" in (why_unsupported(replace(few, layout="NN"), swapped(few, 96, 1)) or "")
    assert "layout NT" in (why_unsupported(replace(few, layout="NT"), swapped(few, 128, 1)) or "")
    assert "each CTA needs a k step" in (why_unsupported(few, swapped(few, 128, 4)) or "")
    assert "HopperConfig" in (why_unsupported(problem(), GemmConfig()) or "")  # type: ignore[arg-type]
    blocks = replace(precise, a_scaling="1x128", b_scaling="128x128")
    assert "halves of b" in (why_unsupported(replace(blocks, activation="swiglu"), None) or "")
    assert why_unsupported(replace(blocks, preactivation_dtype=BF16), None) is None
    mx = replace(problem(), out_dtype=FP8[0], out_scaling="1x32")
    assert "quantized with scales 1x32" in (why_unsupported(mx, None) or "")
    swiglu = replace(problem(), activation="swiglu")
    assert "128 must divide" in (why_unsupported(swiglu, sm90_tiles.LONG) or "")
    assert "either half" in (why_unsupported(swiglu, sm90_tiles.SQUARE) or "")
    saved = replace(problem(), preactivation_dtype=BF16)
    assert "the 3 buffers" in (why_unsupported(replace(swiglu, preactivation_dtype=BF16), sm90_tiles.LOW) or "")
    full = replace(sm90_tiles.WIDE, num_stages=4, store_stages=4)
    assert "bytes of shared memory" in (
        why_unsupported(replace(problem(layout="NT"), bias_grad_dtype=FP32), full) or ""
    )
    for p in (swiglu, saved, replace(problem(), out_dtype=FP8[1], out_scaling="tensor")):
        p = replace(p, M=16)
        assert "a swapped tile has no" in (why_unsupported(p, swapped(p, 64)) or "")
        assert default_config(p)[0].schedule != "swapped"


def more_problems() -> list[GemmProblem]:
    """With what sm90.GemmWithOutputs writes, and with swiglu."""
    e4m3 = replace(problem(), a_dtype=FP8[0], b_dtype=FP8[0], a_scaling="row", b_scaling="row")
    saved = {"preactivation_dtype": BF16, "activation": "gelu"}
    gated = {"preactivation_dtype": BF16, "activation": "swiglu"}
    made: list[tuple[GemmProblem, dict[str, object]]] = [
        (problem(), saved), (problem(layout="NN"), {**saved, "preactivation_dtype": FP32}), (problem(out=FP32), saved),
        (problem(), gated), (problem(layout="NN", out=FP32), gated), (problem(), {"activation": "swiglu"}), (e4m3, gated),
        (replace(e4m3, a_scaling="1x128", b_scaling="128x128"), saved),
        (problem(layout="NT", out=FP32), {"bias_grad_dtype": FP32}), (problem(layout="NT"), {"bias_grad_dtype": BF16}),
        (problem(), {"out_dtype": FP8[0], "out_scaling": "tensor"}),
        (e4m3, {"out_dtype": FP8[1], "out_scaling": "tensor", **gated}),
    ]  # fmt: skip
    return [replace(p, **change) for p, change in made]  # type: ignore[arg-type]


def test_every_problem_has_tiles_of_all_sizes() -> None:
    for p in more_problems():
        for M in (8, 100, 512):
            tiles = candidates(replace(p, M=M))
            assert len({(c.tile_m, c.tile_n) for c in tiles}) >= 3, (p, tiles)
            assert default_config(replace(p, M=M))[0] in tiles


@pytest.mark.parametrize("number", range(len(more_problems()) + 1))
def test_arguments_lie_where_the_kernel_looks(number: int) -> None:
    """The launcher's block, read as the compiled function reads it: one address per argument, in its order."""
    p = [problem(), *more_problems()][number]
    seen: dict[str, object] = {}
    more = sm90_config.more_outputs(p)
    arguments = sm90_launch._ARGUMENTS_AND_MORE if more else sm90_launch._ARGUMENTS
    kinds: dict[str, Any] = {"Q": ctypes.c_uint64, "q": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}

    class Executor:
        @staticmethod
        def capi_func(packed: ctypes.Array[ctypes.c_void_p]) -> None:
            for (name, kind), address in zip(arguments.items(), packed, strict=True):
                assert address is not None
                seen[name] = kinds[kind].from_address(address).value

    config = default_config(p)[0]
    plan = sm90_launch._Plan(config, Executor(), p, (1, 2, 3, 4, 5), 132)
    one = torch.zeros(1)
    given: dict[str, torch.Tensor] = {"bias": one.clone(), "a_scale": one.clone(), "b_scale": one.clone()}
    if more:
        given |= {"bias_grad": one.clone(), "out_scale": one.clone(), "out_amax": one + 7}
    plan.launch(11, 12, 13, 14, GemmTensors(one, one, one, alpha=0.5, **given), 15)
    pointers = {name: t.data_ptr() for name, t in given.items()}
    expected: dict[str, object] = {
        "a": 11, "b": 12, "out": 13, "bias": pointers["bias"], "scale_a": pointers["a_scale"], "scale_b": pointers["b_scale"],
        "M": p.M, "N": p.N, "K": p.K, "a_stride": 1, "b_stride": 2, "out_stride": 3, "alpha": 0.5, "group": config.group,
        "stream": 15, "result": 0,
    }  # fmt: skip
    if more:
        expected |= {"z": 14, "z_stride": 4, "z_distance": 5} | {
            name: pointers[name] for name in ("bias_grad", "out_scale", "out_amax")
        }
        assert given["out_amax"] == 0  # the kernel raises what is there
    tiles = -(-p.M // (config.tile_m * config.cluster_m)) * -(-p.N // (config.tile_n * config.cluster_n))
    expected["num_clusters"] = min(tiles, 132 // config.cluster_size)
    assert seen == expected and list(seen)[-2:] == ["stream", "result"]


@pytest.mark.parametrize("schedule", ["swapped", "streamed"])
def test_tiles_for_few_rows_do_not_depend_on_what_means_nothing_to_them(schedule: str) -> None:
    """A grid has a cluster for each tile, or the partial sums of a CTA's only tile would lie over the stages of its next."""
    p = problem(32 if schedule == "streamed" else 128, 2048, 1024)
    if schedule == "streamed":
        p = replace(p, b_dtype=torch.uint8, b_scaling="1x32", b_preshuffled=True)
    config = HopperConfig(32, 16, 64, "streamed") if schedule == "streamed" else HopperConfig(64, 32, 64, "swapped")
    tiles = p.M // config.tile_m * p.N // config.tile_n
    assert why_unsupported(p, config) is None and sm90_config.single_tile(p, config)
    for cluster_m in (1, 2, 4):
        c = replace(config, cluster_m=cluster_m, consumers=2, store_stages=1, group=3)
        seen: list[int] = []

        class Executor:
            @staticmethod
            def capi_func(packed: ctypes.Array[ctypes.c_void_p], seen: list[int] = seen) -> None:
                names = list(sm90_launch._ARGUMENTS)
                address = packed[names.index("num_clusters")]
                assert address is not None
                seen.append(ctypes.c_int32.from_address(address).value)

        one = torch.zeros(1)
        for num_sms in (132, 78):  # of an H100 or H200, and of an H20
            sm90_launch._Plan(c, Executor(), p, (1, 2, 3, 0, 0), num_sms).launch(
                1, 2, 3, 0, GemmTensors(one, one, one), 0
            )
        assert seen == [tiles, tiles]


def test_automatic_choice_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by stand-ins for a Hopper GPU; a config of the caller's, or anything not in the records, changes the answer."""
    backend = registry.get("hopper")
    monkeypatch.setattr(type(backend), "unavailable", lambda self, arch=None: None)
    monkeypatch.setattr(
        type(backend), "why_unsupported", lambda self, problem, config: why_unsupported(problem, config)
    )
    select.clear_cache()
    try:
        large = problem(4096, 4096, 4096)
        e4m3 = replace(large, a_dtype=FP8[0], b_dtype=FP8[0])
        rows = replace(e4m3, a_scaling="row", b_scaling="row")
        tensors = replace(e4m3, a_scaling="tensor", b_scaling="tensor", fast_accum=True)
        blocks = replace(e4m3, a_scaling="1x128", b_scaling="128x128")
        weights = replace(large, b_dtype=torch.uint8, b_scaling="1x32")
        taken = [
            large, replace(large, layout="NN"), replace(large, layout="NT"), replace(large, M=1), replace(large, M=64),
            rows, tensors, replace(tensors, M=16), blocks, replace(blocks, fast_accum=True),
            replace(tensors, a_dtype=FP8[1], fast_accum=False), replace(weights, M=16, b_preshuffled=True),
        ]  # fmt: skip
        for p in taken:
            assert select.select("auto", p, None).backend is backend, p
        left = [
            replace(large, M=65), replace(large, M=64, layout="NN"), replace(large, N=3000), replace(large, K=4100),
            replace(large, out_dtype=FP32), replace(large, bias_dtype=BF16), replace(large, activation="relu"),
            replace(large, accumulate=True), replace(large, a_dtype=FP16, b_dtype=FP16), replace(rows, M=16),
            replace(rows, fast_accum=True), replace(tensors, fast_accum=False), replace(blocks, M=64),
            replace(blocks, b_dtype=FP8[1]), replace(large, activation="swiglu"), replace(large, preactivation_dtype=BF16),
            replace(large, layout="NT", bias_grad_dtype=FP32), replace(large, out_dtype=FP8[0], out_scaling="tensor"),
            replace(tensors, a_dtype=FP8[1]), replace(tensors, a_dtype=FP8[1], fast_accum=False, M=64),
            replace(weights, M=16), replace(weights, M=16, b_preshuffled=True, N=3008),
            replace(weights, M=16, b_preshuffled=True, bias_dtype=BF16), replace(weights, M=200, b_dtype=FP8[0]),
        ]  # fmt: skip
        for p in left:
            assert why_unsupported(p, None) is None, p
            chosen = select.select("auto", p, None)
            assert chosen.backend.name == "native", p
            why = dict(chosen.rejected)["hopper"]
            assert ("works on a copy" if p.K == 4100 else "measured") in why
            assert select.select("hopper", p, None).backend is backend
        assert select.select("auto", replace(large, M=65), HopperConfig()).backend is backend  # type: ignore[arg-type]
    finally:
        monkeypatch.undo()
        select.clear_cache()


def test_tiles_are_stored_late_where_there_are_buffers_for_all_of_them() -> None:
    """And only with promotion, whose totals are not where the next tile's products are summed."""
    blocks = replace(
        problem(), a_dtype=FP8[0], b_dtype=FP8[0], a_scaling="1x128", b_scaling="128x128", M=8192, N=8192, K=8192
    )
    late = {(c.tile_m, c.tile_n): sm90_config.stores_late(blocks, c) for c in candidates(blocks)}
    assert late == {(128, 192): True, (256, 128): False, (128, 128): False, (64, 128): True}
    pairs = replace(blocks, a_scaling="row", b_scaling="row", activation="swiglu")
    assert not any(sm90_config.stores_late(pairs, c) for c in candidates(pairs) if c.tile_m == 256)
    wide = replace(blocks, out_dtype=FP32)
    assert not any(sm90_config.stores_late(wide, c) for c in candidates(wide))
    assert not any(sm90_config.stores_late(problem(), c) for c in candidates(problem()))


def test_the_default_is_one_of_the_candidates_and_allowed() -> None:
    shapes = [(1, 1, 1), (77, 145, 203), (1, 57344, 8192), (2**30, 8, 8), *(row.gemm("TN") for row in llm81())]
    for M, N, K in shapes:
        for layout in LAYOUTS:
            for out in (BF16, FP32):
                p = problem(M, N, K, layout, out)
                config, reasons = default_config(p)
                assert config in candidates(p) and why_unsupported(p, config) is None
                assert reasons


def test_shared_memory_of_every_candidate_fits() -> None:
    for config in candidates(problem()):
        assert sm90_config.smem_bytes(config, 2) <= 227 * 1024
    for M in (1, 16, 64, 128):
        few = problem(M, 5000, 4096)
        for config in candidates(few):
            if config.schedule == "swapped":
                assert sm90_config.swapped_smem_bytes(few, config) <= 227 * 1024


@pytest.mark.parametrize("num_stages", range(2, 13))
def test_scales_of_blocks_are_read_before_they_are_overwritten(num_stages: int) -> None:
    """Group i of four steps is read in step 4 i, whose stage is then released, and loaded with step 4 i: that is at most num_stages
    steps ahead of the release."""

    def safe(slots: int) -> bool:
        return all(4 * (i - slots) <= 4 * i - num_stages for i in range(slots, 40))

    slots = sm90_config.scale_slots(num_stages)
    assert safe(slots) and (slots == 1 or not safe(slots - 1))


def test_copies_are_told_without_a_launch() -> None:
    """What a launch would note; nothing here needs a GPU."""

    def told(M: int, N: int, K: int, out: torch.dtype = BF16, accumulate: bool = False) -> list[str]:
        p = replace(problem(M, N, K, out=out), accumulate=accumulate)
        rows = torch.zeros(M, K + K % 8, dtype=BF16)
        return sm90_launch.copies(p, None, GemmTensors(rows[:, :K], torch.zeros(N, K, dtype=BF16), None))

    assert told(512, 512, 512) == []
    stride = "row stride not a multiple of 16 bytes"
    assert told(512, 512, 71) == [f"a copied: {stride}", f"b copied: {stride}"]
    assert told(512, 509, 64) == ["out written through a copy: row stride not a multiple of 16 bytes"]
    assert told(16, 509, 64) == []
    assert told(512, 509, 64, accumulate=True)[-1] == "accumulated through a float32 buffer: out is torch.bfloat16"
    assert told(16, 509, 64, accumulate=True) == []
    swiglu = replace(problem(512, 1032, 64), activation="swiglu", preactivation_dtype=BF16)
    rows = torch.zeros(512, 64, dtype=BF16)
    weights = torch.zeros(1032, 64, dtype=BF16)
    z = torch.zeros(512, 1032, dtype=BF16)
    notes = sm90_launch.copies(swiglu, None, GemmTensors(rows, weights, None, preactivation=z))
    assert notes == [
        "out written through a copy: row stride not a multiple of 16 bytes",
        "preactivation written through a copy: halves of its rows, 1032 bytes, end inside a chunk of 16",
    ]
    odd = replace(swiglu, N=1034, layout="NN", preactivation_dtype=None)
    notes = sm90_launch.copies(odd, None, GemmTensors(rows, torch.zeros(64, 1036, dtype=BF16)[:, :1034], None))
    assert notes[0] == "b copied: the second half of its rows, after 1034 bytes, begins inside a chunk of 16"
    assert notes[1:] == ["out written through a copy: row stride not a multiple of 16 bytes"]
    even = replace(swiglu, N=1024)
    tensors = GemmTensors(rows, weights[:1024], None, preactivation=z[:, :1024])
    assert sm90_launch.copies(even, None, tensors) == []
    assert sm90_launch.copies(even, None, tensors._replace(preactivation=z[:, 4:1028])) == [
        "preactivation written through a copy: base not 16-byte aligned"
    ]


def test_without_a_hopper_gpu_a_named_backend_raises() -> None:
    if UNAVAILABLE is None:
        pytest.skip("there is one")
    x = torch.zeros(8, 8, dtype=BF16)
    with pytest.raises(fw.BackendUnavailable, match="hopper"):
        fw.gemm(x, x, backend="hopper")


def test_llm81() -> None:
    rows = llm81()
    assert len(rows) == 81 == len({(row.model, row.layer, row.microbatch) for row in rows})
    assert len({(row.out_features, row.in_features) for row in rows}) < 27  # models share weights, at other lengths
    published = {(32768, 16384, 53248), (32768, 37888, 3584), (32768, 59136, 8192)}
    assert published <= {row.gemm("TN") for row in rows}
    row = rows[0]
    assert row.gemm("NN") == (row.tokens, row.in_features, row.out_features)
    assert row.gemm("NT") == (row.out_features, row.in_features, row.tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Compiled code: CuTe DSL, no GPU. In a process of its own, which FlyDSL may be loaded in otherwise.

COMPILE = """
import re, sys, torch
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
from fourwave.ops.gemm.sm90_tiles import candidates
layout, out, index = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
p = GemmProblem(512, 512, 512, layout, torch.bfloat16, torch.bfloat16, out, torch.bfloat16, "silu", out == torch.float32,
                "cuda")
config = candidates(p)[index]
ptx = compile_kernel(specialise(p, config), keep=True).__ptx__
loop = re.findall(r"wgmma.mma_async.sync.aligned.(m64n\\d+k16).f32.bf16.bf16", ptx)
assert set(loop) == {f"m64n{config.tile_n}k16"}, set(loop)
assert len(re.findall("setmaxnreg", ptx)) == 2
assert "cp.async.bulk.tensor.2d.shared" in ptx
assert ("cp.reduce.async.bulk.tensor.2d.global" in ptx) == p.accumulate
assert ".local" not in ptx, "an array went to local memory"
print("compiled", len(loop), "wgmma")
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize(("layout", "out"), [("TN", "bfloat16"), ("NT", "float32")])
@pytest.mark.parametrize("index", [0, 1])
def test_compiled_code_has_the_instructions(layout: str, out: str, index: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE, layout, out, str(index)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    # CuTe DSL writes what it keeps into the working directory, under one name for all specialisations.
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr


class InPyTorch:
    """What the kernel does, on the CPU: writes every output through its pointer."""

    def __init__(self) -> None:
        self.calls = 0

    @staticmethod
    def matrix(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
        """As TMA stores it: rows at multiples of 16 bytes, and the chunk of 16 that a row's end cuts is spoiled."""
        chunk = 16 // dtype.itemsize
        assert address % 16 == 0 and stride % chunk == 0
        whole = -(-columns // chunk) * chunk
        size = ((rows - 1) * stride + whole) * dtype.itemsize
        flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)
        flat.as_strided((rows, whole), (stride, 1))[:, columns:] = float("nan")
        return flat.as_strided((rows, columns), (stride, 1))

    def run(self, spec: sm90_launch.Specialisation, got: dict[str, Any]) -> None:
        self.calls += 1
        M, N, K = got["M"], got["N"], got["K"]
        parts = 2 if spec.activation == "swiglu" else 1
        a_shape, b_shape = (K, M) if spec.layout == "NT" else (M, K), (N, K) if spec.layout == "TN" else (K, N)
        columns = list(range(b_shape[1]))
        if parts == 2 and spec.layout != "TN":  # each half begins at a multiple of 16 bytes
            half, chunk = N // 2, 16 // spec.b_dtype.itemsize
            columns = [*range(half), *range(-(-half // chunk) * chunk, -(-half // chunk) * chunk + half)]
        read = []
        for name, shape, dtype, last in (
            ("a", a_shape, spec.a_dtype, a_shape[1]),
            ("b", b_shape, spec.b_dtype, columns[-1] + 1),
        ):
            size = ((shape[0] - 1) * got[f"{name}_stride"] + last) * dtype.itemsize
            whole = torch.frombuffer((ctypes.c_uint8 * size).from_address(got[name]), dtype=dtype)
            read.append(whole.as_strided((shape[0], last), (got[f"{name}_stride"], 1)).double())
        read[1] = read[1][:, columns]
        told: dict[str, Any] = {"trans_a": spec.layout == "NT", "trans_b": spec.layout == "TN", "alpha": got["alpha"]}
        z = gemm_reference(*read, **told)
        y = gemm_reference(*read, **told, activation=spec.activation)
        out = self.matrix(got["out"], M, N // parts, got["out_stride"], spec.out_dtype)
        out.copy_(out + y if spec.accumulate else y)
        if spec.preactivation_dtype is not None:
            for part, half in enumerate(z.chunk(parts, 1)):
                at = got["z"] + part * got["z_distance"] * spec.preactivation_dtype.itemsize
                self.matrix(at, M, N // parts, got["z_stride"], spec.preactivation_dtype).copy_(half)
        if spec.bias_grad_dtype is not None:
            grad = torch.frombuffer(
                (ctypes.c_uint8 * (M * spec.bias_grad_dtype.itemsize)).from_address(got["bias_grad"]),
                dtype=spec.bias_grad_dtype,
            )
            sums = read[0].sum(0)
            grad.copy_(grad + sums if spec.accumulate else sums)


@pytest.mark.parametrize("layout", ["TN", "NT"])
@pytest.mark.parametrize("N", [512, 528, 522])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
@pytest.mark.parametrize(("out_dtype", "accumulate"), [(BF16, False), (FP32, True), (BF16, True)])
def test_launcher_hands_over_every_output(
    monkeypatch: pytest.MonkeyPatch, layout: str, N: int, activation: str, out_dtype: torch.dtype, accumulate: bool
) -> None:
    """On the CPU, with a stand-in for the kernel: halves of z, what goes through copies, sums into what is there; twice, since
    the second call of a kind goes a shorter way, which other strides do not take."""
    kernel = InPyTorch()
    stand_in(monkeypatch, kernel.run)
    M, K = 160, 64
    sums: dict[str, Any] = {"bias_grad_dtype": BF16} if layout == "NT" else {}
    p = replace(
        problem(M, N, K, layout, out_dtype),
        activation=activation,
        accumulate=accumulate,
        preactivation_dtype=BF16,
        **sums,
    )  # type: ignore[arg-type]
    a, b = inputs.spread(Shape("launch", M, N, K), BF16, layout=layout)
    told: dict[str, Any] = {"trans_a": layout == "NT", "trans_b": layout == "TN"}
    addend = torch.randn(M, p.out_columns).to(out_dtype) if accumulate else None
    grad_addend = torch.randn(1, M).to(BF16) if accumulate else None
    for shift, more in ((0, 16), (0, 16), (0, 32), (4, 16)):  # columns
        out = buffers.poisoned(M, p.out_columns, out_dtype, addend=addend)
        room = torch.full((M, -(-N // 8) * 8 + more), float("nan")).to(BF16)
        z = room[:, shift : shift + N]
        grad = buffers.poisoned(1, M, BF16, addend=grad_addend)
        tensors = GemmTensors(a, b, out.tensor, preactivation=z, bias_grad=grad.tensor[0] if sums else None)
        notes = sm90_launch.run(p, None, tensors)
        assert any("preactivation" in note for note in notes) == (shift > 0 or N // (N // p.out_columns) % 8 > 0)
        exact = gemm_reference(a, b, **told, activation=activation, addend=addend)
        bound = bounds.gemm_bound(a, b, out_dtype, **told, activation=activation, addend=addend)
        bounds.assert_within(out.tensor, exact, bound)
        bounds.assert_within(z, gemm_reference(a, b, **told), bounds.gemm_bound(a, b, BF16, **told))
        assert room[:, :shift].isnan().all() and room[:, shift + N :].isnan().all()
        if sums:
            expected = a.double().sum(0) + (0 if grad_addend is None else grad_addend[0].double())
            within = bounds.sum_bound(a.double(), BF16, None if grad_addend is None else grad_addend[0])
            bounds.assert_within(grad.tensor[0], expected, within)
        out.assert_guards_intact()
    assert kernel.calls == 4


COMPILE_ONCE = """
import re, sys, torch
from fourwave.blocks.cutedsl.loaders import EVICT_FIRST
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
M, shuffled = int(sys.argv[1]), sys.argv[2] == "True"
weights = dict(b_dtype=torch.uint8, b_scaling="1x32", b_preshuffled=True) if shuffled else dict(b_dtype=torch.bfloat16)
p = GemmProblem(M, 4096, 4096, "TN", torch.bfloat16, out_dtype=torch.bfloat16, device_type="cuda", **weights)
config = default_config(p)[0]
assert config.few_rows
spec = specialise(p, config)
assert spec.read_once == (M <= config.tile_m)
ptx = compile_kernel(spec, keep=True).__ptx__
loads = re.findall(r"cp.async.bulk.tensor.*shared.*, (%rd\\d+);", ptx)
first = re.findall(rf"mov.b64\\s+(%rd\\d+), {EVICT_FIRST};", ptx)
hinted = [policy for policy in loads if policy in first]
print("loads", loads, "hinted", hinted)
assert (0 < len(hinted) < len(loads)) == spec.read_once and (spec.read_once or not hinted)
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize(("M", "shuffled"), [(16, False), (16, True), (64, True), (256, True)])
def test_weights_that_are_read_once_leave_l2_first(M: int, shuffled: bool, tmp_path: Path) -> None:
    """And nothing else does: a and out are read again."""
    command = [sys.executable, "-c", COMPILE_ONCE, str(M), str(shuffled)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


COMPILE_MORE = """
import sys, torch
from dataclasses import replace
sys.path.insert(0, sys.argv[2])
from test_hopper import more_problems
from fourwave.ops.gemm.sm90_launch import compile_kernel, specialise
from fourwave.ops.gemm.sm90_tiles import candidates
p = replace(more_problems()[int(sys.argv[1])], bias_dtype=torch.bfloat16)
config = candidates(p)[0]
ptx = compile_kernel(specialise(p, config), keep=True).__ptx__
assert ptx.count("wgmma.mma_async.sync.aligned.m64n8k16") == (8 * config.warpgroup_m // 64 if p.bias_grad_dtype else 0)
assert ("cp.async.bulk.tensor.3d.global" in ptx) == (p.preactivation_dtype is not None and p.activation == "swiglu")
assert ("red.global.max.s32" in ptx) == (p.out_scaling is not None)
assert ptx.count("cvt.rn.satfinite") > 16 or p.out_scaling is None
assert ".local" not in ptx, "an array went to local memory"
print("compiled")
"""


@pytest.mark.slow
@pytest.mark.skipif(cutedsl_missing() is not None, reason=str(cutedsl_missing()))
@pytest.mark.parametrize("number", [3, 6, 8, 11])
def test_compiled_code_of_more_outputs(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMPILE_MORE, str(number), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# On a Hopper GPU


def run_case(case: GemmCase, config: HopperConfig | None = None) -> None:
    result = case.run("hopper", device="cuda", config=config)  # type: ignore[arg-type]
    assert result.guards is None, f"{case}: {result.guards}"
    assert result.ratio <= 1, f"{case}, {config}: {result.ratio:.3g} times the bound at {list(result.worst)}"


def all_candidates() -> tuple[HopperConfig, ...]:
    return candidates(problem())


@on_gpu
@every_layout
@pytest.mark.parametrize("config", all_candidates(), ids=str)
def test_configs(config: HopperConfig, layout: str) -> None:
    """Every candidate, several tiles of each CTA's cluster, tails in M, N and K, operands inside NaN."""
    M, N = 3 * config.tile_m * config.cluster_m - 12, 3 * config.tile_n * config.cluster_n - 8
    shape = Shape("tails", M, N, 9 * config.tile_k + 24)
    run_case(GemmCase(shape, layout, a_view="sliced", b_view="sliced", out_view="sliced"), config)


@on_gpu
@pytest.mark.parametrize("config", all_candidates(), ids=str)
def test_more_tiles_than_ctas(config: HopperConfig) -> None:
    """Persistent CTAs take several tiles each, and not all the same number; stages wrap at different tiles."""
    M, N = 13 * config.tile_m - 1, 37 * config.tile_n - 8
    run_case(GemmCase(Shape("persistent", M, N, 3 * config.tile_k + 8)), config)


@on_gpu
@pytest.mark.parametrize("out_dtype", [FP32, FP16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("index", range(3))
def test_epilogues_on_several_tiles(index: int, out_dtype: torch.dtype, accumulate: bool) -> None:
    p = problem(out=out_dtype)
    config = candidates(p)[index * (len(candidates(p)) - 1) // 2]
    shape = Shape("tails", 2 * config.tile_m + 60, 3 * config.tile_n + 24, 200)
    case = GemmCase(
        shape, "NT", BF16, out_dtype, bias_dtype=BF16, activation="gelu_tanh", alpha=0.5, accumulate=accumulate
    )
    run_case(case, config)


def each_candidate(case: GemmCase, u_acc: float = bounds.U_FP32) -> None:
    """The case, which has tails, with every tile that its problem has; several tiles each."""
    for config in candidates(replace(case.problem, device_type="cuda")):
        result = case.run("hopper", device="cuda", config=config, u_acc=u_acc)  # type: ignore[arg-type]
        assert result.guards is None, f"{case}, {config}: {result.guards}"
        assert result.ratio <= 1, f"{case}, {config}: {result.ratio:.3g} times the bound at {list(result.worst)}"


TAILS = Shape("tails", 700, 912, 1000)  # both halves of N end inside a tile
ODD = Shape("odd", 333, 654, 200)  # rows of out and halves of z are no multiples of 16 bytes


@on_gpu
@every_layout
@pytest.mark.parametrize(
    ("activation", "out_dtype", "z_dtype"),
    [(None, BF16, BF16), ("gelu", FP32, FP16), ("silu", BF16, FP32), ("swiglu", BF16, BF16), ("swiglu", FP32, FP32)],
)
def test_saved_preactivation(layout: str, activation: str | None, out_dtype: torch.dtype, z_dtype: torch.dtype) -> None:
    for shape in (TAILS, ODD):
        case = GemmCase(
            shape, layout, BF16, out_dtype, out_view="sliced", bias_dtype=FP32, activation=activation, alpha=0.5,
            preactivation=z_dtype,
        )  # fmt: skip
        each_candidate(case)


@on_gpu
@every_layout
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_swiglu(layout: str, out_dtype: torch.dtype, accumulate: bool) -> None:
    for shape in (TAILS, ODD, Shape("few rows", 5, 912, 200)):
        case = GemmCase(
            shape, layout, FP16, out_dtype, a_view="sliced", b_view="sliced", bias_dtype=BF16, activation="swiglu",
            accumulate=accumulate,
        )  # fmt: skip
        each_candidate(case)


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("activation", ["silu", "swiglu"])
@pytest.mark.parametrize("out_format", [None, "fp8_e4m3"])
def test_fp8_with_more_outputs(activation: str, name: str, fast: bool, out_format: str | None) -> None:
    if name == "fp8_1x128" and activation == "swiglu":
        pytest.skip("refused: test_problems_that_the_kernel_cannot_run_are_refused_with_the_reason")
    case = GemmCase(
        TAILS, a_format=name, b_format="fp8_128x128" if name == "fp8_1x128" else name, bias_dtype=BF16,
        activation=activation, preactivation=BF16, out_format=out_format, fast_accum=fast,
    )  # fmt: skip
    each_candidate(case, bounds.hopper_fp8_u_acc(TAILS.K, not fast or name == "fp8_1x128", wide=True))


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "accumulate", "grad_dtype"),
    [(BF16, BF16, False, BF16), (BF16, FP32, True, FP32), (BF16, BF16, True, FP16), (FP16, FP32, False, FP16)],
)
def test_bias_grad(dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, grad_dtype: torch.dtype) -> None:
    """alpha does not scale it; the tiles of the first columns alone make it."""
    for shape in (TAILS, ODD, Shape("persistent", 5000, 3300, 104)):
        case = GemmCase(
            shape, "NT", dtype, out_dtype, a_view="sliced", alpha=0.5, accumulate=accumulate, bias_grad=grad_dtype
        )
        each_candidate(case)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "activation", "out_format"),
    [(BF16, None, "fp8_e4m3"), (FP16, "gelu_tanh", "fp8_e5m2"), (BF16, "swiglu", "fp8_e4m3")],
)
def test_quantized_output(dtype: torch.dtype, activation: str | None, out_format: str) -> None:
    """Codes and amax have the bits that the reference quantizer makes of the float32 result."""
    for shape in (TAILS, ODD, Shape("persistent", 5000, 3328, 104), Shape("few rows", 3, 256, 200)):
        each_candidate(GemmCase(shape, "TN", dtype, bias_dtype=FP32, activation=activation, out_format=out_format))


@on_gpu
@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_amax_is_of_what_lies_inside(activation: str | None) -> None:
    """Every element is 0; past the last row and column bias alone would be left."""
    M, N = 130, 400
    bias = torch.arange(1, N + 1, device="cuda").float()
    a = torch.zeros(M, 64, dtype=BF16, device="cuda")
    a[:, 0] = 1
    b = torch.zeros(N, 64, dtype=BF16, device="cuda")
    b[:, 0] = -bias
    scale = torch.ones((), device="cuda")
    p = replace(problem(M, N, 64, out=FP8[0]), activation=activation, out_scaling="tensor", bias_dtype=FP32)
    bias = -b[:, 0].float()  # what bfloat16 holds
    for config in candidates(p):
        out = torch.full((M, p.out_columns), 1.0, device="cuda").to(FP8[0])
        amax = torch.full((), float("nan"), device="cuda")
        sm90_launch.run(p, config, GemmTensors(a, b, out, bias, out_scale=scale, out_amax=amax))
        assert amax == 0 and (out.float() == 0).all(), str(config)


@on_gpu
@pytest.mark.parametrize("out_format", ["fp8_e4m3", "fp8_e5m2"])
def test_quantized_output_saturates_and_keeps_nan(out_format: str) -> None:
    M, N = 192, 256
    generator = torch.Generator("cuda").manual_seed(2)
    a = torch.randn(M, 64, device="cuda", generator=generator).to(BF16)
    b = torch.randn(N, 64, device="cuda", generator=generator).to(BF16)
    for special in (None, float("inf"), float("nan")):
        if special is not None:
            a[70, 3] = special
        y = fw.gemm(a, b, out_dtype=FP32, backend="hopper")
        for factor in (1e-6, 0.02, 3e4):
            scale = torch.tensor(factor, device="cuda")
            z = torch.full((M, N), 7.0, device="cuda").to(BF16)
            got = fw.gemm(a, b, out_format=out_format, out_scale=scale, preactivation=z, backend="hopper")
            assert torch.equal(z.view(torch.int16)[~z.isnan()], y.to(BF16).view(torch.int16)[~z.isnan()])
            assert torch.equal(z.isnan(), y.isnan())
            right = fw.quantize(y, out_format, scale=scale, backend="native")
            assert got.data is not None and right.data is not None
            assert torch.equal(got.data.view(torch.uint8), right.data.view(torch.uint8))
            assert got.amax is not None and right.amax is not None
            assert torch.equal(got.amax, right.amax) or (got.amax.isnan() and right.amax.isnan())


@on_gpu
@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh", "gelu", "swiglu"])
@pytest.mark.parametrize("M", [256, 16])
def test_activations_of_extreme_values(M: int, activation: str) -> None:
    """Where an exponential overflows or vanishes, and at infinities and NaN; few rows take another kernel, but for swiglu."""
    values = [0.0, 1e-30, 3e-3, 1.0, 8.0, 40.0, 88.0, 104.0, 3e4, 1e30, float("inf")]
    values = [*values, *(-v for v in values), float("nan")]
    a = torch.zeros(M, 64, dtype=BF16, device="cuda")
    a[:, 0] = torch.tensor(values, device="cuda").repeat(M // len(values) + 1)[:M].to(BF16)
    b = torch.zeros(256, 64, dtype=BF16, device="cuda")
    b[:, 0] = 1
    out = fw.gemm(a, b, activation=activation, out_dtype=FP32, backend="hopper")
    bound = bounds.gemm_bound(a, b, FP32, activation=activation).nan_to_num(nan=0.0)  # of infinities
    bounds.assert_within(out, gemm_reference(a, b, activation=activation), bound, activation)


@on_gpu
def test_more_outputs_in_a_graph() -> None:
    """amax starts anew with every replay; z of the second call of a kind goes the short way."""
    a = torch.randn(300, 512, device="cuda").to(BF16)
    b = torch.randn(512, 512, device="cuda").to(BF16)
    out, z = torch.empty(300, 512, dtype=BF16, device="cuda"), torch.empty(300, 512, dtype=BF16, device="cuda")
    scale = torch.tensor(0.5, device="cuda")
    for _ in range(2):
        fw.gemm(a, b, out=out, preactivation=z, activation="relu", backend="hopper")
        codes = fw.gemm(a, b, out_format="fp8_e4m3", out_scale=scale, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, b, out=out, preactivation=z, activation="relu", backend="hopper")
        codes = fw.gemm(a, b, out_format="fp8_e4m3", out_scale=scale, backend="hopper")
    for factor in (2.0, 0.25):
        a.copy_(torch.randn(300, 512, device="cuda") * factor)
        out.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        bounds.assert_within(z, gemm_reference(a, b), bounds.gemm_bound(a, b, BF16))
        assert torch.equal(out, z.relu())
        y = fw.gemm(a, b, out_dtype=FP32, backend="hopper")
        assert codes.amax == y.abs().max()


def swapped_cases() -> list[tuple[int, int, int, int, int, str]]:
    """M and N that a tile does not divide, with clusters of every kind; tiles and layouts in turn."""
    sizes = [(1, 712), (8, 1027), (13, 256), (32, 8), (57, 1001), (64, 1304), (128, 999)]
    cases: list[tuple[int, int, int, int, int, str]] = []
    for M, N in sizes:
        for split, share in ((1, 1), (2, 1), (8, 1), (1, 2), (2, 2), (2, 4)):
            if share > 1 and M <= 4 * share:
                continue
            rows = (40, 64, 120, 128)[len(cases) % 4]
            cases.append((M, N, rows, split, share, "TN"))
            cases.append((M, N, max(64, rows // 64 * 64), split, share, "NN"))
    return cases


@on_gpu
@pytest.mark.parametrize(("M", "N", "rows", "split", "share", "layout"), swapped_cases())
def test_swapped_tiles(M: int, N: int, rows: int, split: int, share: int, layout: str) -> None:
    """Tails in M, N and K, parts of unequal length, operands inside NaN, rows of out that vectors do not fit."""
    shape = Shape("few rows", M, N, 64 * 19 + 40)
    config = swapped(problem(M, N, shape.K, layout), rows, split, share)
    run_case(GemmCase(shape, layout, a_view="sliced", b_view="sliced", out_view="sliced"), config)
    run_case(GemmCase(shape, layout), config)


@on_gpu
@pytest.mark.parametrize(("split", "share"), [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("rows", [48, 128])
@pytest.mark.parametrize("M", [60, 300])
def test_more_swapped_tiles_than_clusters(M: int, rows: int, split: int, share: int) -> None:
    """Several tiles per cluster, so partial sums follow each other in one buffer; with 300 rows several per row of tiles."""
    shape = Shape("persistent", M, rows * 301 - 8, 64 * split + 8)
    config = swapped(problem(64, shape.N, shape.K), rows, split, share)
    for _ in range(3):
        run_case(GemmCase(shape, "TN"), config)


@on_gpu
@pytest.mark.parametrize("out_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("N", [520, 517])
def test_epilogues_of_swapped_tiles(N: int, accumulate: bool, out_dtype: torch.dtype) -> None:
    """One rounding, accumulated or not."""
    shape = Shape("few rows", 43, N, 500)
    for activation in (None, "relu", "silu", "gelu_tanh", "gelu"):
        case = GemmCase(
            shape, "NN", BF16, out_dtype, bias_dtype=FP16, activation=activation, alpha=0.5, accumulate=accumulate
        )
        run_case(case, swapped(problem(43, N, 500), 128, 2))


@on_gpu
def test_swapped_tiles_are_repeatable_and_ordered_after_the_grid_before() -> None:
    """A grid is set up while the one before it ends: it may not read that one's output early, nor write what it reads."""
    torch.manual_seed(1)
    x = torch.randn(16, 4096, device="cuda").to(BF16)
    w = (torch.randn(4096, 4096, device="cuda") / 64).to(BF16)
    p = problem(16, 4096, 4096)
    configs = [
        swapped(p, rows, split, share)
        for rows in (32, 112)
        for split, share in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2))
    ]
    buffers_ = [torch.empty_like(x) for _ in range(3)]
    expected: list[torch.Tensor] = []
    for repeat in range(20):
        for number, config in enumerate(configs):
            source = x
            for turn in range(6):
                target = buffers_[turn % 3]
                sm90_launch.run(p, config, GemmTensors(source, w, target))
                source = target
            if repeat == 0:
                chain = x
                for _ in range(6):
                    target = torch.empty_like(x)
                    torch.cuda.synchronize()
                    sm90_launch.run(p, config, GemmTensors(chain, w, target))
                    torch.cuda.synchronize()
                    chain = target
                expected.append(chain)
                assert not chain.isnan().any() and chain.float().std() > 0.1
            assert torch.equal(source, expected[number]), f"{config}, repeat {repeat}"


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("a_dtype", "b_dtype", "scaling", "out_dtype", "accumulate"),
    [
        (FP8[0], FP8[0], ("tensor", "tensor"), BF16, False),
        (FP8[0], FP8[1], ("row", "row"), FP32, True),
        (FP8[1], FP8[0], ("row", "tensor"), BF16, False),
        (FP8[0], FP8[0], ("row", "row"), BF16, False),
        (FP8[1], FP8[0], (None, "row"), FP32, False),
    ],
)
@pytest.mark.parametrize("M", [700, 40])
def test_fp8(
    M: int,
    a_dtype: torch.dtype,
    b_dtype: torch.dtype,
    scaling: tuple[str | None, str | None],
    out_dtype: torch.dtype,
    accumulate: bool,
    fast: bool,
) -> None:
    """Scales per tensor and per row, bias, tails everywhere; every configuration, several tiles of each."""
    shape = Shape("tails", M, 456, 1000)
    p = GemmProblem(
        shape.M, shape.N, shape.K, "TN", a_dtype, b_dtype, out_dtype, FP32, None, accumulate, "cuda", *scaling,
        fast_accum=fast,
    )  # fmt: skip
    a, b = inputs.spread(shape, FP32, device="cuda")
    a, b = a.to(a_dtype), b.to(b_dtype)
    scales: list[torch.Tensor | None] = []
    values = []
    for kind, codes in zip(scaling, (a, b), strict=True):
        shape_of = () if kind == "tensor" else (codes.shape[0],)
        scale = None if kind is None else torch.rand(shape_of, device="cuda") + 0.25
        scales.append(scale)
        factor = torch.ones((), dtype=torch.float64) if scale is None else scale.double()
        values.append(codes.double() * (factor[:, None] if factor.dim() else factor))
    bias = torch.randn(shape.N, device="cuda")
    addend = torch.randn(shape.M, shape.N, device="cuda") if accumulate else None
    exact = gemm_reference(values[0], values[1], bias=bias, addend=addend, alpha=0.5)
    u_acc = bounds.hopper_fp8_u_acc(shape.K, not fast)
    bound = bounds.gemm_bound(values[0], values[1], out_dtype, bias=bias, alpha=0.5, addend=addend, u_acc=u_acc)
    bound += 4 * bounds.U_FP32 * (values[0] @ values[1].mT).abs()  # the scales' products
    for config in candidates(p)[:: 1 if scaling == ("tensor", "tensor") else 3]:
        out = buffers.poisoned(shape.M, shape.N, out_dtype, "cuda", layout="sliced", addend=addend)
        sm90_launch.run(p, config, GemmTensors(a, b, out.tensor, bias, 0.5, *scales))
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (700, 456, 1000),
        (129, 1025, 640),
        (40, 904, 2072),
        (3, 130, 128),
        (128, 100, 64),
        (130, 520, 128),
        (4300, 3000, 272),
        (5000, 3300, 528),
    ],
)
def test_fp8_blocks(M: int, N: int, K: int, fast: bool) -> None:
    """1x128 times 128x128: scales of widely different size, tails everywhere; every configuration. fast_accum changes nothing:
    scales that change with k are applied in float32."""
    shape = Shape("tails", M, N, K)
    p = GemmProblem(
        M, N, K, "TN", FP8[0], FP8[1], BF16, FP32, None, False, "cuda", "1x128", "128x128", fast_accum=fast
    )  # fmt: skip
    a, b = inputs.spread(shape, FP32, device="cuda")
    a, b = a.to(FP8[0]), b.to(FP8[1])
    generator = torch.Generator("cuda").manual_seed(3)
    scale_a = torch.exp2(6 * torch.rand(p.a_scale_shape or (), device="cuda", generator=generator) - 3)
    scale_b = torch.exp2(6 * torch.rand(p.b_scale_shape or (), device="cuda", generator=generator) - 3)
    values = (
        a.double() * expand_scale(scale_a, "1x128", (M, K), True),
        b.double() * expand_scale(scale_b, "128x128", (N, K), True),
    )
    bias = torch.randn(N, device="cuda")
    exact = gemm_reference(*values, bias=bias, alpha=0.5)
    u_acc = bounds.hopper_fp8_u_acc(K, True) + bounds.U_FP32
    bound = bounds.gemm_bound(*values, BF16, bias=bias, alpha=0.5, u_acc=u_acc)
    bound += 4 * bounds.U_FP32 * (values[0].abs() @ values[1].abs().mT)  # the scales' products
    for config in candidates(p):
        out = buffers.poisoned(M, N, BF16, "cuda", layout="sliced")
        sm90_launch.run(p, config, GemmTensors(a, b, out.tensor, bias, 0.5, scale_a, scale_b))
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("code", ["e2m1", "e4m3fn"])
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [
        (1, 300, 416),
        (16, 1096, 4096),
        (40, 520, 32),
        (64, 2056, 1568),
        (128, 264, 640),
        (200, 392, 672),
        (256, 136, 1024),
    ],
)
def test_mx_weights(M: int, N: int, K: int, code: str) -> None:
    """Codes of every value, scales of widely different size in each block, one of them NaN, tails everywhere; every configuration.
    e4m3fn: NaN in three rows, at either end of K and in the middle, which are NaN then."""
    b_dtype = torch.uint8 if code == "e2m1" else FP8[0]
    p = GemmProblem(M, N, K, "TN", BF16, b_dtype, BF16, FP32, None, False, "cuda", None, "1x32")
    generator = torch.Generator("cuda").manual_seed(5)
    codes = torch.randint(
        0, 256, (N, K // 2 if code == "e2m1" else K), device="cuda", dtype=torch.uint8, generator=generator
    )
    scale = torch.randint(107, 148, (N, K // 32), device="cuda", dtype=torch.uint8, generator=generator)
    if code == "e2m1":
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")
        values = torch.cat([values, -values])
        b = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], -1).reshape(N, K)
    else:
        codes[codes & 127 == 127] = 3
        for n, k, nan in ((5, K - 1, 0x7F), (N - 2, 0, 0xFF), (70, K // 2 + 1, 0x7F)):
            codes[n, k] = nan
        b = codes.view(FP8[0]).double()
    scale[9, -1] = 255
    factor = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127))
    b = b * factor.repeat_interleave(32, 1)
    a = torch.randn(M, K, device="cuda", generator=generator).to(BF16)
    bias = torch.randn(N, device="cuda", generator=generator)
    exact = gemm_reference(a.double(), b, bias=bias, alpha=0.5)
    bound = bounds.gemm_bound(a.double(), b, BF16, bias=bias, alpha=0.5)
    assert exact.isnan().sum() == (1 if code == "e2m1" else 4) * M
    for config in candidates(p):
        out = buffers.poisoned(M, N, BF16, "cuda", layout="sliced")
        tensors = GemmTensors(a, codes.view(b_dtype), out.tensor, bias, 0.5, None, scale.view(torch.float8_e8m0fnu))
        sm90_launch.run(p, config, tensors)
        bounds.assert_within(out.tensor, exact, bound, str(config))
        out.assert_guards_intact()


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("M", [512, 32])
def test_fp8_products_of_a_linear_layer(M: int, name: str, fast: bool) -> None:
    """Forward, input gradient and weight gradient through fw.gemm; Hopper's matrix unit wants 8-bit K contiguous, so what is
    reduced over rows is stored transposed."""
    N, K = 384, 640
    generator = torch.Generator("cuda").manual_seed(M)
    x, w, dy = (torch.randn(shape, device="cuda", generator=generator).to(BF16) for shape in ((M, K), (N, K), (M, N)))
    w_name = "fp8_128x128" if name == "fp8_1x128" else name
    quantized = {
        key: fw.quantize(value, w_name if key == "w" else name, "both", columnwise_transposed=True, backend="native")
        for key, value in (("x", x), ("w", w), ("dy", dy))
    }
    products: list[tuple[str, str, dict[str, bool], str, str]] = [
        ("x", "w", {"trans_a": False, "trans_b": True}, "rowwise", "rowwise"),
        ("dy", "w", {"trans_a": False, "trans_b": False}, "rowwise", "columnwise"),
        ("dy", "x", {"trans_a": True, "trans_b": False}, "columnwise", "columnwise"),
    ]
    for a, b, trans, a_direction, b_direction in products:
        out = fw.gemm(quantized[a], quantized[b], **trans, fast_accum=fast, backend="hopper")  # type: ignore[arg-type]
        values = [
            quantized[key].dequantize(torch.float64, direction=direction)
            for key, direction in ((a, a_direction), (b, b_direction))
        ]
        exact = gemm_reference(values[0], values[1], **trans)  # type: ignore[arg-type]
        reduced = values[0].shape[0 if trans["trans_a"] else 1]
        u_acc = bounds.hopper_fp8_u_acc(reduced, not fast or name == "fp8_1x128") + 4 * bounds.U_FP32
        bound = bounds.gemm_bound(values[0], values[1], BF16, **trans, u_acc=u_acc)  # type: ignore[arg-type]
        bounds.assert_within(out, exact, bound, f"{a} {b}")


def block_scaled_wgrad(
    M: int, N: int, K: int, out_dtype: torch.dtype, accumulate: bool, device: str
) -> tuple[GemmProblem, GemmTensors, torch.Tensor, torch.Tensor]:
    """A weight gradient with scales of 1x128 blocks of both operands, out inside guards; the truth and how far out may be from it."""
    p = GemmProblem(
        M, N, K, "TN", FP8[0], FP8[1], out_dtype, None, None, accumulate, device.split(":")[0], "1x128", "1x128"
    )
    a, b = (t.to(FP8[i]) for i, t in enumerate(inputs.spread(Shape("blocks", M, N, K), FP32, device=device)))
    scales, values = [], []
    for seed, codes in enumerate((a, b)):
        generator = torch.Generator().manual_seed(seed)
        scale = torch.exp2(6 * torch.rand(codes.shape[0], -(-K // 128), generator=generator) - 3).to(device)
        scales.append(scale)
        values.append(codes.double() * expand_scale(scale, "1x128", (codes.shape[0], K), True))
    addend = torch.randn(M, N, device=device).to(out_dtype) if accumulate else None
    out = buffers.poisoned(M, N, out_dtype, device, layout="sliced", addend=addend)
    exact = gemm_reference(values[0], values[1], alpha=0.5, addend=addend)
    u_acc = bounds.hopper_fp8_u_acc(K, True) + bounds.U_FP32
    bound = bounds.gemm_bound(values[0], values[1], out_dtype, alpha=0.5, addend=addend, u_acc=u_acc, scaled=True)
    return p, GemmTensors(a, b, out.tensor, None, 0.5, *scales), exact, bound


@on_gpu
@pytest.mark.parametrize(("out_dtype", "accumulate"), [(BF16, False), (FP32, True), (BF16, True)])
@pytest.mark.parametrize(("M", "N", "K"), [(384, 640, 512), (700, 456, 1000), (130, 72, 40), (1000, 3000, 4104)])
def test_fp8_blocks_of_both_operands(M: int, N: int, K: int, out_dtype: torch.dtype, accumulate: bool) -> None:
    p, tensors, exact, bound = block_scaled_wgrad(M, N, K, out_dtype, accumulate, "cuda")
    registry.get("hopper").run_gemm(p, None, tensors)
    assert tensors.out is not None
    bounds.assert_within(tensors.out, exact, bound)


@pytest.mark.parametrize("accumulate", [False, True])
def test_blocks_of_both_operands_go_to_the_grouped_kernel(monkeypatch: pytest.MonkeyPatch, accumulate: bool) -> None:
    """On the CPU, with a stand-in for the grouped launch."""

    def launch(problem: GroupedProblem, config: object, tensors: GroupedTensors) -> list[str]:
        assert (problem.G, problem.split, problem.layout) == (1, "reduction", "TN")
        assert problem.accumulate == accumulate and tensors.m_sizes.tolist() == [problem.K]
        assert tensors.a_scale is not None and tensors.b_scale is not None
        shapes = (problem.M, problem.K), (problem.N, problem.K)
        scales = [
            expand_scale(scale, "1x128", shape, True)
            for scale, shape in zip((tensors.a_scale, tensors.b_scale), shapes, strict=True)
        ]
        y = (tensors.a.double() * scales[0]) @ (tensors.b.double() * scales[1]).mT
        assert tensors.out.shape == (1, *y.shape)
        tensors.out.copy_(tensors.out + y if accumulate else y)
        return ["launched"]

    monkeypatch.setattr(sm90_one_group.sm90_launch, "run", launch)
    p, tensors, exact, bound = block_scaled_wgrad(40, 24, 328, FP32, accumulate, "cpu")
    assert sm90_one_group.why_unsupported(p, None) is None
    assert sm90_one_group.run(p, None, tensors) == ["launched"]
    assert tensors.out is not None
    bounds.assert_within(tensors.out, exact, bound)
    for change, said in (
        ({"bias_dtype": BF16}, "a bias or an activation"), ({"layout": "NN"}, "K contiguous"),
        ({"preactivation_dtype": BF16}, "preactivation"), ({"batch_invariant": True}, "batch"),
    ):  # fmt: skip
        reason = sm90_one_group.why_unsupported(replace(p, **change), None) or ""  # type: ignore[arg-type]
        assert said in reason, reason
    assert "choose theirs" in (sm90_one_group.why_unsupported(p, HopperConfig()) or "")  # type: ignore[arg-type]


def test_sizes_of_the_one_group_stay() -> None:
    """A captured graph has their address."""
    cpu = torch.device("cpu")
    first = sm90_one_group._sizes(128, cpu)
    for k in range(1, 5000):
        assert sm90_one_group._sizes(k, cpu).tolist() == [k]
    assert sm90_one_group._sizes(128, cpu) is first


@on_gpu
def test_a_kernel_is_kept_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, found again, and its results are the same; a damaged file is compiled anew, and said so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    a = torch.randn(24, 512, device="cuda").to(BF16)
    compiled = []
    real = sm90_launch.compile_kernel

    def compile_kernel(spec: sm90_launch.Specialisation) -> object:
        compiled.append(spec)
        return real(spec)

    monkeypatch.setattr(sm90_launch, "compile_kernel", compile_kernel)
    outs = []
    for turn in range(3):
        monkeypatch.setattr(sm90_launch, "_compiled", {})
        monkeypatch.setattr(sm90_launch, "_local", threading.local())
        select.clear_cache()
        outs.append(fw.gemm(a, a, backend="hopper"))
        files = list((tmp_path / "fourwave" / "sm90").iterdir())
        assert len(files) == 1, files
        assert len(compiled) == (1, 1, 2)[turn]
        if turn == 1:
            files[0].write_bytes(b"no object file")
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@on_gpu
@pytest.mark.parametrize("M", [24, 256])
def test_warm_up_lets_a_cold_process_capture(M: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_launch, "_compiled", {})
    monkeypatch.setattr(sm90_launch, "_local", threading.local())
    select.clear_cache()
    a = torch.randn(M, 512, device="cuda").to(BF16)
    out = torch.full((M, M), float("nan"), device="cuda").to(BF16)
    sm90_launch.warm_up(problem(M, M, 512))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, a, out=out, backend="hopper")
    graph.replay()
    torch.cuda.synchronize()
    bounds.assert_within(out, gemm_reference(a, a), bounds.gemm_bound(a, a, BF16))


@on_gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("M", [300, 20])
def test_fp8_small_integers_are_exact(M: int, fast: bool) -> None:
    """Sums below 2^11 fit in what the matrix unit keeps: not a bit may differ."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(-2, 3, (M, 500), generator=generator).float().to("cuda").to(FP8[0])
    b = torch.randint(-2, 3, (200, 500), generator=generator).float().to("cuda").to(FP8[0])
    p = GemmProblem(M, 200, 500, "TN", FP8[0], FP8[0], FP32, device_type="cuda", fast_accum=fast)
    for config in candidates(p):
        out = torch.full((M, 200), float("nan"), device="cuda")
        sm90_launch.run(p, config, GemmTensors(a, b, out))
        assert torch.equal(out.double(), a.double() @ b.double().mT), str(config)


@on_gpu
@pytest.mark.parametrize("M", [256, 128])
def test_promotion_is_more_precise(M: int) -> None:
    """K = 16384 equal products: the matrix unit's short sum loses what float32 additions keep."""
    K = 16384
    a = torch.full((M, K), 1.125, device="cuda").to(FP8[0])
    p = GemmProblem(M, M, K, "TN", FP8[0], FP8[0], FP32, device_type="cuda")
    errors = []
    for fast in (True, False):
        out = torch.empty(M, M, device="cuda")
        sm90_launch.run(replace(p, fast_accum=fast), None, GemmTensors(a, a, out))
        errors.append(float((out.double() - 1.125**2 * K).abs().max()))
    assert errors[1] < errors[0] / 4, errors


@on_gpu
def test_operands_past_two_to_the_31_elements() -> None:
    """Row m of a is m's parity in the last columns: a 32-bit offset would read another row."""
    M, K, stride = 40000, 128, 65536
    a = torch.zeros(M, stride, dtype=BF16, device="cuda")[:, stride - K :]
    a.copy_((torch.arange(M, device="cuda") % 251).to(BF16)[:, None].expand(M, K))
    b = torch.eye(K, dtype=BF16, device="cuda")
    assert a.stride(0) * M > 2**31
    assert torch.equal(fw.gemm(a, b, backend="hopper"), a)
    wide = torch.empty(M, stride, dtype=BF16, device="cuda")
    fw.gemm(a, b, out=wide[:, stride - K :], backend="hopper")
    assert torch.equal(wide[:, stride - K :], a)


@on_gpu
def test_repeats_and_streams_give_the_same_bits() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(1000, 1000, generator=generator, device="cuda").to(BF16)
    b = torch.randn(776, 1000, generator=generator, device="cuda").to(BF16)
    first = fw.gemm(a, b, backend="hopper")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            outs.append(fw.gemm(a, b, backend="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in outs)


@on_gpu
def test_a_call_runs_on_the_current_stream() -> None:
    a = torch.ones(256, 4096, dtype=BF16, device="cuda")
    b = torch.ones(256, 4096, dtype=BF16, device="cuda")
    fw.gemm(a, b, backend="hopper")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        a.fill_(2.0)
        out = fw.gemm(a, b, backend="hopper")
    stream.synchronize()
    assert (out == 8192).all()


@on_gpu
def test_graph_capture() -> None:
    """A warm call is captured and replayed with new contents; a cold one raises instead of compiling."""
    a = torch.randn(512, 512, device="cuda").to(BF16)
    b = torch.randn(512, 512, device="cuda").to(BF16)
    out = torch.empty(512, 512, dtype=BF16, device="cuda")
    fw.gemm(a, b, out=out, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fw.gemm(a, b, out=out, backend="hopper")
    for seed in range(3):
        torch.manual_seed(seed)
        a.copy_(torch.randn(512, 512, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        bounds.assert_within(out, gemm_reference(a, b), bounds.gemm_bound(a, b, BF16))
    cold = replace(HopperConfig(), num_stages=3)
    with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fw.gemm(a, b, out=out, backend="hopper", config=cold)  # type: ignore[arg-type]


@on_gpu
def test_notes_say_what_was_copied(caplog: pytest.LogCaptureFixture) -> None:
    a = torch.randn(165, 71, device="cuda").to(BF16)
    with caplog.at_level("DEBUG", logger="fourwave.dispatch"):
        fw.gemm(a, a, backend="hopper")
        assert "a copied: row stride not a multiple of 16 bytes" in caplog.text
        assert "out written through a copy" in caplog.text
        caplog.clear()
        fw.gemm(a[:65], a, backend="hopper")  # few rows are stored by other means
    assert "a copied: row stride not a multiple of 16 bytes" in caplog.text
    assert "out written through a copy" not in caplog.text


@on_gpu
def test_explain_names_kernel_and_config() -> None:
    a = torch.zeros(256, 256, dtype=BF16, device="cuda")
    told = fw.explain(a, a, backend="hopper")
    assert (told.backend, told.kernel, told.arch) == ("hopper", "ops/gemm/sm90.py", "sm_90a")
    assert isinstance(told.config, HopperConfig) and told.reasons
