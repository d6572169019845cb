"""Where the Hopper GEMM launcher puts a call's arguments, what it copies, and every output that it hands over. On the CPU, without kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourwave.ops.gemm import sm90_config, sm90_launch
from fourwave.ops.gemm.problem import GemmTensors
from fourwave.ops.gemm.reference import gemm_reference
from fourwave.ops.gemm.sm90_choice import default_config
from fourwave.ops.gemm.sm90_config import HopperConfig, why_unsupported
from fourwave.testing import bounds, buffers, inputs
from fourwave.testing.shapes import Shape
from hopper_cases import BF16, FP32, more_problems, problem
from hopper_stand_in import stand_in


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
