"""What a call of fw.gemm that has run before hands to a Hopper kernel is what the first call of its kind does. On the CPU, without kernels."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fourwave as fw
from fourwave.backends import hopper, select
from fourwave.ops.gemm import quick, sm90_launch, sm90_one_group, sm90_rescaled
from fourwave.quantize.tensor import FORMATS, QuantizedTensor
from hopper_stand_in import stand_in

BF16, FP16, FP32, E4M3, E5M2 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


class Machine:
    """Launches as they arrive; the device and the stream that are current."""

    def __init__(self) -> None:
        self.seen: list[tuple[sm90_launch.Specialisation, dict[str, Any]]] = []
        self.device: int | None = None  # as the index of tensors on the CPU
        self.stream = 0
        self.prepared = 0
        self.error = 0  # that launches return

    def run(self, spec: sm90_launch.Specialisation, got: dict[str, Any]) -> int:
        self.seen.append((spec, got))
        return self.error


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = Machine()

    def why_unsupported(self: Any, problem: Any, config: Any) -> str | None:
        if sm90_one_group.takes(problem):
            return sm90_one_group.why_unsupported(problem, config)
        return sm90_rescaled.why_unsupported(problem, config)

    prepare = sm90_launch._prepare

    def prepared(*arguments: Any) -> list[str]:
        found.prepared += 1
        return prepare(*arguments)

    monkeypatch.setattr(hopper.HopperBackend, "unavailable", lambda self, arch=None: None)
    monkeypatch.setattr(hopper.HopperBackend, "why_unsupported", why_unsupported)
    stand_in(monkeypatch, found.run, lambda: found.stream)
    monkeypatch.setattr(sm90_launch, "_prepare", prepared)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: found.device, raising=False)
    forget(monkeypatch)
    yield found
    select.clear_cache()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(sm90_launch, "_local", threading.local())
    select.clear_cache()


def matrix(rows: int, columns: int, dtype: torch.dtype = BF16, gap: int = 0, skip: int = 0) -> torch.Tensor:
    """[rows, columns], `gap` elements after each row, its base `skip` elements past a multiple of 16 bytes."""
    flat = torch.zeros((rows * (columns + gap) + skip) * dtype.itemsize + 16, dtype=torch.uint8)
    start = -flat.data_ptr() % 16 + skip * dtype.itemsize
    values = flat[start : start + rows * (columns + gap) * dtype.itemsize].view(dtype)
    return values.reshape(rows, columns + gap)[:, :columns]


def quantized(rows: int, columns: int, format: str = "fp8_row", **more: Any) -> QuantizedTensor:
    return fw.quantize(torch.ones(rows, columns), format, **more)


def shifted(q: QuantizedTensor) -> QuantizedTensor:
    """With scales at a base that TMA does not take."""
    assert q.scale is not None and q.scale.dim() == 2
    rows, columns = q.scale.shape
    scale = matrix(rows, columns, q.scale.dtype, skip=1)
    return QuantizedTensor(q.format, q.shape, q.data, scale)


def in_columns(q: QuantizedTensor) -> QuantizedTensor:
    assert q.scale is not None
    return QuantizedTensor(q.format, q.shape, q.data, q.scale.mT.contiguous().mT)


# Calls that differ in one thing or two from others of the list.
M, N, K = 160, 256, 128
SHAPES = [(M, N, K), (M, N, 192), (M, 264, K), (168, N, K), (N, M, K), (8, N, K), (16, N, K)]


def plain_calls() -> dict[str, dict[str, Any]]:
    a, b = matrix(M, K), matrix(N, K)
    bias = torch.zeros(N, dtype=BF16)
    calls: dict[str, dict[str, Any]] = {
        f"{m}x{n}x{k}": {"a": matrix(m, k), "b": matrix(n, k)} for m, n, k in SHAPES
    }  # fmt: skip
    few = {"a": matrix(8, K), "b": b}
    calls |= {
        "other memory": {"a": matrix(M, K), "b": matrix(N, K)},
        "a's rows apart": {"a": matrix(M, K, gap=8), "b": b},
        "b's rows apart": {"a": a, "b": matrix(N, K, gap=64)},
        "a between": {"a": matrix(M, K, skip=1), "b": b},
        "b between": {"a": a, "b": matrix(N, K, skip=4)},
        "a's columns apart": {"a": matrix(M, 2 * K)[:, ::2], "b": b},
        "a three": {"a": a.view(2, M // 2, K), "b": b},
        "a three otherwise": {"a": a.view(4, M // 4, K), "b": b},
        "a vector": {"a": matrix(1, K)[0], "b": b},
        "one row": {"a": matrix(1, K), "b": b},
        "NN": {"a": a, "b": matrix(K, N), "trans_b": False},
        "NN square": {"a": matrix(N, N), "b": matrix(N, N), "trans_b": False},
        "TN square": {"a": matrix(N, N), "b": matrix(N, N)},
        "NT square": {"a": matrix(N, N), "b": matrix(N, N), "trans_a": True, "trans_b": False},
        "fp16": {"a": matrix(M, K, FP16), "b": matrix(N, K, FP16)},
        "e4m3": {"a": matrix(M, K, E4M3), "b": matrix(N, K, E4M3)},
        "e4m3 fast": {"a": matrix(M, K, E4M3), "b": matrix(N, K, E4M3), "fast_accum": True},
        "e5m2 x e4m3": {"a": matrix(M, K, E5M2), "b": matrix(N, K, E4M3)},
        "e4m3 x e5m2": {"a": matrix(M, K, E4M3), "b": matrix(N, K, E5M2)},
        "float32 out": {"a": a, "b": b, "out_dtype": FP32},
        "fp16 out": {"a": a, "b": b, "out_dtype": FP16},
        "bias": {"a": a, "b": b, "bias": bias},
        "bias float32": {"a": a, "b": b, "bias": bias.float()},
        "bias apart": {"a": a, "b": b, "bias": torch.zeros(2 * N, dtype=BF16)[::2]},
        "bias elsewhere": {"a": a, "b": b, "bias": torch.zeros(N + 1, dtype=BF16)[1:]},
        "relu": {"a": a, "b": b, "activation": "relu"},
        "silu": {"a": a, "b": b, "activation": "silu"},
        "swiglu": {"a": a, "b": b, "activation": "swiglu"},
        "alpha": {"a": a, "b": b, "alpha": 0.5},
        "whole alpha": {"a": a, "b": b, "alpha": 3},
        "invariant": {**few, "batch_invariant": True},
        "out": {"a": a, "b": b, "out": matrix(M, N)},
        "out elsewhere": {"a": a, "b": b, "out": matrix(M, N)},
        "out's rows apart": {"a": a, "b": b, "out": matrix(M, N, gap=8)},
        "out between": {"a": a, "b": b, "out": matrix(M, N, skip=1)},
        "out float32": {"a": a, "b": b, "out": matrix(M, N, FP32)},
        "out three": {"a": a.view(2, M // 2, K), "b": b, "out": matrix(M, N).view(2, M // 2, N)},
        "out added": {"a": a, "b": b, "out": matrix(M, N, FP32), "accumulate": True},
        "out added in bf16": {"a": a, "b": b, "out": matrix(M, N), "accumulate": True},
        "few, out": {**few, "out": matrix(8, N)},
        "few, out between": {**few, "out": matrix(8, N, skip=4)},
        "few, out between pairs": {**few, "out": matrix(8, N, skip=1)},
        "few, out added": {**few, "out": matrix(8, N), "accumulate": True},
        "preactivation": {"a": a, "b": b, "preactivation": matrix(M, N)},
        "own config": {**few, "config": sm90_launch.HopperConfig(64, 64, 64, "swapped", num_stages=4)},
        "a negated": {"a": torch._neg_view(a), "b": b},
        "b negated": {"a": a, "b": torch._neg_view(b)},
        "bias negated": {"a": a, "b": b, "bias": torch._neg_view(bias)},
        "out negated": {"a": a, "b": b, "out": torch._neg_view(matrix(M, N))},
        "float32": {"a": matrix(M, K, FP32), "b": matrix(N, K, FP32)},
        "parameter": {"a": a, "b": torch.nn.Parameter(b, requires_grad=False)},
    }  # fmt: skip
    return calls


def quantized_calls() -> dict[str, dict[str, Any]]:
    row, each = (quantized(M, K), quantized(N, K)), (quantized(M, K, "fp8_e4m3"), quantized(N, K, "fp8_e4m3"))
    blocks = quantized(M, 512, "fp8_1x128"), quantized(N, 512, "fp8_128x128")  # rows of scales of 16 bytes
    weights = quantized(N, 512, "mxfp4")
    square = [quantized(N, N, direction="both", columnwise_transposed=True) for _ in range(2)]
    few = matrix(8, 512)
    return {
        "row": {"a": row[0], "b": row[1]},
        "row, other memory": {"a": quantized(M, K), "b": quantized(N, K)},
        "tensor": {"a": each[0], "b": each[1]},
        "e5m2": {"a": quantized(M, K, "fp8_row_e5m2"), "b": row[1]},
        "codes alone": {"a": row[0].data, "b": row[1].data},
        "row, out": {"a": row[0], "b": row[1], "out": matrix(M, N)},
        "row, bias": {"a": row[0], "b": row[1], "bias": torch.zeros(N)},
        "row, fast": {"a": row[0], "b": row[1], "fast_accum": True},
        "blocks": {"a": blocks[0], "b": blocks[1]},
        "blocks, a's scales in columns": {"a": in_columns(blocks[0]), "b": blocks[1]},
        "blocks, b's scales in columns": {"a": blocks[0], "b": in_columns(blocks[1])},
        "blocks, a's scales between": {"a": shifted(blocks[0]), "b": blocks[1]},
        "blocks, b's scales between": {"a": blocks[0], "b": shifted(blocks[1])},
        "square TN": {"a": square[0], "b": square[1]},
        "square NN": {"a": square[0], "b": square[1], "trans_b": False},
        "square NT": {"a": square[0], "b": square[1], "trans_a": True, "trans_b": False},
        "few": {"a": few, "b": weights},
        "few, preshuffled": {"a": few, "b": fw.preshuffle(weights)},
        "few, MXFP8": {"a": few, "b": quantized(N, 512, "mxfp8_e4m3")},
    }


def called(machine: Machine, call: dict[str, Any]) -> tuple[Any, ...]:
    """What arrives: kernels, arguments, and what came back; or the refusal. New memory is named, not numbered."""
    machine.seen.clear()
    try:
        result = fw.gemm(**call, backend="hopper")
    except NotImplementedError as refusal:
        assert not machine.seen
        return (str(refusal),)
    own = {t.data_ptr() for v in call.values() for t in memory(v)} | {0}
    launches = []
    for spec, got in machine.seen:
        names = [name for name, kind in sm90_launch._ARGUMENTS.items() if kind == "Q" and name != "stream"]
        pointers = {name: got[name] for name in names}
        told = {name: "result" if p == result.data_ptr() else p if p in own else "new" for name, p in pointers.items()}
        launches.append((spec, {**got, **told}))
    assert launches
    return launches, tuple(result.shape), result.stride(), result.dtype, result is call.get("out")


def counted_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One more for each call of run_gemm."""
    runs: list[int] = []
    real = hopper.HopperBackend.run_gemm

    def run(*arguments: Any) -> list[str]:
        runs.append(1)
        return real(*arguments)

    monkeypatch.setattr(hopper.HopperBackend, "run_gemm", run)
    return runs


def memory(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, QuantizedTensor):
        return [t for t in (value.data, value.scale, value.columnwise_data, value.columnwise_scale) if t is not None]
    return [value.data, value.packed_scale] if hasattr(value, "packed_scale") else []


@pytest.mark.parametrize("made", [plain_calls, quantized_calls])
def test_a_warm_call_of_each_kind_launches_what_a_first_one_does(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, made: Callable[[], dict[str, dict[str, Any]]]
) -> None:
    monkeypatch.setattr(sm90_rescaled.sm90_decoded, "decoded", lambda operand, t, scale: operand.target("cpu"))
    calls = made()
    first = {}
    for name, call in calls.items():
        forget(monkeypatch)
        first[name] = called(machine, call)
    forget(monkeypatch)
    rest = 4 * list(calls)
    random.Random(1).shuffle(rest)
    for name in rest:
        assert called(machine, calls[name]) == first[name], name


def test_which_warm_calls_prepare_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the tests would hold as well if none were short."""
    runs = counted_runs(monkeypatch)
    plain, codes = plain_calls(), quantized_calls()
    names = "160x256x128, a three, bias, out, out three, NN, swiglu, e4m3 fast, 8x256x128, out added".split(", ")
    scaled = "row/tensor/blocks/row, out/square NN/square NT/few, preshuffled/few".split("/")
    short = [plain[name] for name in names] + [codes[name] for name in scaled]
    for call in short:
        for _ in range(3):
            called(machine, call)
        runs.clear()
        machine.prepared = 0
        called(machine, call)
        assert not runs and not machine.prepared, call


def test_alpha_stream_device_and_memory_are_those_of_the_call(machine: Machine) -> None:
    a, b, bias = matrix(M, K), matrix(N, K), torch.zeros(N)
    for _ in range(3):
        fw.gemm(a, b, bias=bias, backend="hopper")
    for alpha, stream in ((1.0, 7), (2.5, 7), (-1, 9)):
        machine.stream = stream
        a, b, bias = matrix(M, K), matrix(N, K), torch.zeros(N)
        out = fw.gemm(a, b, bias=bias, alpha=alpha, backend="hopper")
        got = machine.seen[-1][1]
        assert (got["alpha"], got["stream"]) == (alpha, stream)
        assert [got[name] for name in ("a", "b", "bias", "out")] == [t.data_ptr() for t in (a, b, bias, out)]
    q, w = quantized(M, K), quantized(N, K)
    for _ in range(3):
        fw.gemm(q, w, backend="hopper")
    q, w = quantized(M, K), quantized(N, K)
    fw.gemm(q, w, backend="hopper")
    got = machine.seen[-1][1]
    given = [t.data_ptr() for t in (q.data, w.data, q.scale, w.scale) if t is not None]
    assert [got[name] for name in ("a", "b", "scale_a", "scale_b")] == given


def test_another_current_device_is_changed_for_the_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = matrix(M, K), matrix(N, K)
    for _ in range(3):
        fw.gemm(a, b, backend="hopper")
    runs = counted_runs(monkeypatch)
    fw.gemm(a, b, backend="hopper")
    assert not runs
    machine.device = 1
    fw.gemm(a, b, backend="hopper")
    assert runs == [1]


def test_threads_write_argument_blocks_of_their_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the kind is new to both, and one has called four times before the other knows what its first call found out."""
    a, b = matrix(M, K), matrix(N, K)
    idents: dict[str, int] = {}
    both, four_times = threading.Barrier(2, timeout=60), threading.Event()
    plan_of = quick.plan_of

    def found_out(args: Any) -> Any:
        both.wait()
        if threading.current_thread().name == "other":
            assert four_times.wait(60)
        return plan_of(args)

    def calls() -> None:
        for _ in range(4):
            fw.gemm(a, b, backend="hopper")
        name = threading.current_thread().name
        idents[name] = threading.get_ident()
        if name == "one":
            four_times.set()
        both.wait()  # a thread that is gone leaves its number to others

    monkeypatch.setattr(quick, "plan_of", found_out)
    threads = [threading.Thread(target=calls, name=name) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entry,) = quick._entries.values()
    assert entry.launches is not None and entry.launches.keys() == set(idents.values()) and len(idents) == 2
    blocks: list[set[int]] = []
    for ident in idents.values():
        launch: Any = entry.launches[ident]
        held = [cell.cell_contents for cell in launch.__closure__]
        blocks.append({id(each) for each in held if isinstance(each, bytearray)})
    assert len(blocks[0]) == len(blocks[1]) == 1 and blocks[0] != blocks[1]
    assert len(machine.seen) == 8


def test_what_a_warm_call_refuses_is_what_the_first_one_refuses(machine: Machine) -> None:
    q, w, out, wide, bias = quantized(M, K), quantized(N, K), matrix(M, N), matrix(M, N + 8), torch.zeros(N)
    both = quantized(N, N, direction="both", columnwise_transposed=True)
    down = quantized(N, N, direction="columnwise", columnwise_transposed=True)
    blocks = quantized(M, 512, "fp8_1x128"), quantized(N, 512, "fp8_128x128")
    turned = fw.quantize(torch.ones(N, 512), "mxfp4", hadamard="rowwise", hadamard_seed=3)
    weights = quantized(N, 512, "mxfp4")
    shuffled, shuffled_fp8 = fw.preshuffle(weights), fw.preshuffle(matrix(N, N, E4M3))
    few, codes = matrix(8, 512), matrix(N, N, E4M3)
    buffer = matrix(2 * M, N, E4M3)
    shared = (
        QuantizedTensor(q.format, (M, N), buffer[:M], torch.ones(M)),
        buffer.view(-1)[: 2 * M * N].view(BF16).view(M, N),
    )
    overlapped = QuantizedTensor(q.format, (M, M), buffer.view(-1)[: M * M].view(M, M), torch.ones(M))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("b was, with hadamard_seed=3", {"a": quantized(M, 512, "mxfp4"), "b": turned}),
        ("a was, with hadamard_seed=3", {"a": turned, "b": weights}),
        ("not a layout here", {"a": both, "b": both, "trans_a": True, "trans_b": True}),
        ("trans_b is 2", {"a": both, "b": both, "trans_b": 2}),
        ("trans_a is 2", {"a": both, "b": both, "trans_a": 2, "trans_b": False}),
        ("no columnwise codes", {"a": q, "b": w, "trans_b": False}),
        ("no rowwise codes", {"a": down, "b": both}),
        ("no rowwise codes", {"a": both, "b": down}),
        ("an order for x @ w.T", {"a": few, "b": shuffled, "trans_b": False}),
        ("an order for x @ w.T", {"a": codes, "b": shuffled_fp8, "trans_b": False}),
        ("a is preshuffled", {"a": shuffled, "b": few}),
        ("alpha", {"a": q, "b": w, "alpha": "1"}),
        ("bias", {"a": q, "b": w, "bias": [0]}),
        ("bias", {"a": q, "b": w, "bias": torch.zeros(N + 1)}),
        ("out is", {"a": q, "b": w, "out": wide}),
        ("out shares memory with bias", {"a": q, "b": w, "bias": out.view(-1).view(FP32)[:N], "out": out}),
        ("out shares memory with b_scale", {"a": q, "b": with_scale(w, out.view(-1).view(FP32)[:N]), "out": out}),
        ("out shares memory with b,", {"a": quantized(N, M), "b": overlapped, "out": shared[1].view(N, M)[:, :M]}),
        ("out shares memory with a_scale", {"a": scaled_from(out), "b": w, "out": out}),
        ("out shares memory with a", {"a": shared[0], "b": quantized(N, N), "out": shared[1]}),
        ("a_scale is", {"a": with_scale(q, torch.ones(M + 1)), "b": w}),
        ("b_scale is", {"a": q, "b": with_scale(w, torch.ones(N + 1))}),
        ("a_scale is torch.float64", {"a": with_scale(q, torch.ones(M).double()), "b": w}),
        ("b_scale is torch.float64", {"a": q, "b": with_scale(w, torch.ones(N).double())}),
        ("a_scale is", {"a": as_format(blocks[0], "mxfp8_e4m3"), "b": blocks[1]}),
        ("b_scale is", {"a": blocks[0], "b": as_format(blocks[1], "fp8_1x128")}),
        ("accumulate", {"a": q, "b": w, "accumulate": True}),
        ("activation", {"a": q, "b": w, "activation": ["relu"]}),
        ("requires grad", {"a": q, "b": w, "bias": torch.zeros(N, requires_grad=True)}),
        ("requires grad", {"a": q, "b": w, "out": matrix(M, N).requires_grad_()}),
        ("requires grad", {"a": with_scale(q, torch.ones(M, requires_grad=True)), "b": w}),
        ("requires grad", {"a": q, "b": with_scale(w, torch.ones(N, requires_grad=True))}),
        ("backend is 3", {"a": q, "b": w, "backend": 3}),
    ]  # fmt: skip
    for _ in range(3):
        for a, b in ((q, w), (both, both), (few, shuffled), blocks, (few, weights)):
            fw.gemm(a, b, backend="hopper")
        warm: list[dict[str, Any]] = [{"bias": bias}, {"out": out}, {"out": wide[:, :N]}]
        warm += [{"out": out, "bias": bias}]
        fw.gemm(quantized(M, N), quantized(N, N), out=out, backend="hopper")
        fw.gemm(quantized(N, M), quantized(M, M), out=matrix(N, M), backend="hopper")
        for more in warm:
            fw.gemm(q, w, **more, backend="hopper")
        for message, call in refused:
            with pytest.raises(ValueError, match=message):
                fw.gemm(**{"backend": "hopper", **call})


def test_a_warm_call_of_another_backend_is_its_own(machine: Machine) -> None:
    a, b = matrix(M, K).fill_(1), matrix(N, K).fill_(1)
    for backend in ("hopper", "native", "hopper", "native"):
        machine.seen.clear()
        out = fw.gemm(a, b, backend=backend)
        assert len(machine.seen) == (backend == "hopper")
        assert backend == "hopper" or bool((out == K).all())
    for backend in ("native", "hopper"):
        with fw.use_backend(backend):
            machine.seen.clear()
            fw.gemm(a, b)
            assert len(machine.seen) == (backend == "hopper")


def with_scale(q: QuantizedTensor, scale: torch.Tensor) -> QuantizedTensor:
    return QuantizedTensor(q.format, q.shape, q.data, scale)


def as_format(q: QuantizedTensor, format: str) -> QuantizedTensor:
    return QuantizedTensor(FORMATS[format], q.shape, q.data, q.scale)


def scaled_from(out: torch.Tensor) -> QuantizedTensor:
    """Codes of M rows whose scales lie in out."""
    q = quantized(M, K)
    return QuantizedTensor(q.format, q.shape, q.data, out.view(-1).view(FP32)[:M])


def test_a_written_out_is_told_to_autograd(machine: Machine) -> None:
    a, b, out = matrix(M, K), matrix(N, K), matrix(M, N)
    versions = []
    for _ in range(4):
        fw.gemm(a, b, out=out, backend="hopper")
        versions.append(out._version)
    assert [later - earlier for earlier, later in itertools.pairwise(versions)] == [1, 1, 1]


def test_a_warm_launch_that_fails_is_told(machine: Machine) -> None:
    a, b = matrix(M, K), matrix(N, K)
    for error in (0, 0, 0, 700, 0, 1):
        machine.error = error
        if error:
            with pytest.raises(RuntimeError, match=f"CUDA error {error}"):
                fw.gemm(a, b, backend="hopper")
        else:
            fw.gemm(a, b, backend="hopper")


def test_a_gradient_is_recorded_of_operands_that_need_one_alone(machine: Machine) -> None:
    a, b = matrix(M, K), matrix(N, K)
    wanted = {"a": a.clone().requires_grad_(), "b": torch.nn.Parameter(b)}
    for _ in range(3):
        assert not fw.gemm(a, b, backend="hopper").requires_grad
        for name, t in wanted.items():
            call = {"a": a, "b": b, name: t}
            assert fw.gemm(call["a"], call["b"], backend="hopper").requires_grad
            with torch.no_grad():
                assert not fw.gemm(call["a"], call["b"], backend="hopper").requires_grad
