"""Order between waves and workgroups: completion and schedule options, workgroups that wait for each other, races through global memory."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
import torch
from machine import launch, lower  # tests/sim/machine.py

from fourwave import sim
from fourwave.ops.gemm.config import default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.sim.launch import _interruptible
from fourwave.sim.native import RawLaunch

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

# Workgroup 0 writes a value, then a flag; the others spin on the flag, then copy the value.
HANDSHAKE = """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %seven = llvm.mlir.constant(7 : i32) : i32
  %g = rocdl.workgroup.id.x : i32
  %first = llvm.icmp "eq" %g, %FIRST : i32
  llvm.cond_br %first, ^write, ^wait
^write:
  llvm.store %seven, %value : i32, !llvm.ptr<1>
  llvm.store %one, %flag atomic syncscope("agent") release {alignment = 4 : i64} : i32, !llvm.ptr<1>
  llvm.br ^end
^wait:
  %f = llvm.load FLAG
  %ready = llvm.icmp "eq" %f, %one : i32
  llvm.cond_br %ready, ^read, ^wait
^read:
  %v = llvm.load %value : !llvm.ptr<1> -> i32
  %to = llvm.getelementptr %out[%g] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %v, %to : i32, !llvm.ptr<1>
  llvm.br ^end
^end:
"""
ORDERED_FLAG = '%flag atomic syncscope("agent") acquire {alignment = 4 : i64} : !llvm.ptr<1> -> i32'
PLAIN_FLAG = "%flag : !llvm.ptr<1> -> i32"


def handshake(flag: str, writer: int, groups: int, waiting: str = "", **options):
    """`waiting`: operations that run each time the flag has been looked at."""
    body = HANDSHAKE.replace("%FIRST", "%writer").replace("FLAG", flag + waiting)
    body = f"  %writer = llvm.mlir.constant({writer} : i32) : i32\n" + body
    out, value, flag_word = (np.zeros(n, dtype=np.int32) for n in (groups, 1, 1))
    program = lower(body, "%out: !llvm.ptr<1>, %value: !llvm.ptr<1>, %flag: !llvm.ptr<1>")
    report = launch(program, out, value, flag_word, grid=groups, block=1, expect=None, **options)
    return out, report


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("writer", [0, 5])
def test_workgroups_that_wait_for_a_later_one_get_on(writer, threads):
    out, report = handshake(ORDERED_FLAG, writer, 6, threads=threads)
    assert out.tolist() == [0 if g == writer else 7 for g in range(6)]
    assert not report.findings, report


BARRIERS = """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %g = rocdl.workgroup.id.x : i32
  %first = llvm.icmp "eq" %g, %zero : i32
  llvm.cond_br %first, ^loop(%zero : i32), ^wait
^loop(%i: i32):
  rocdl.barrier
  %next = llvm.add %i, %one : i32
  %again = llvm.icmp "slt" %next, %n : i32
  llvm.cond_br %again, ^loop(%next : i32), ^write
^write:
  llvm.store %one, %flag atomic syncscope("agent") release {alignment = 4 : i64} : i32, !llvm.ptr<1>
  llvm.br ^end
^wait:
  %f = llvm.load %flag atomic syncscope("agent") acquire {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  FENCES
  %ready = llvm.icmp "eq" %f, %one : i32
  llvm.cond_br %ready, ^end, ^wait
^end:
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_workgroup_that_goes_from_barrier_to_barrier_gets_on(threads):
    """Another one that spins on its flag meanwhile does not hang."""
    flag = np.zeros(1, dtype=np.int32)
    body = BARRIERS.replace("FENCES", '\n  llvm.fence syncscope("workgroup") release' * 400)
    launch(lower(body, "%flag: !llvm.ptr<1>, %n: i32"), flag, 8_000_000, grid=2, threads=threads)
    assert flag[0] == 1


LOOKS_BETWEEN_BARRIERS = """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  %g = rocdl.workgroup.id.x : i32
  %first = llvm.icmp "eq" %g, %zero : i32
  llvm.cond_br %first, ^wait(%zero : i32), ^write
^write:
  llvm.store %value, %flag atomic syncscope("agent") release {alignment = 4 : i64} : i32, !llvm.ptr<1>
  llvm.br ^end
^wait(%n: i32):
  rocdl.barrier
  %next = llvm.add %n, %counts : i32
  %f = llvm.load %flag atomic syncscope("agent") acquire {alignment = 4 : i64} : !llvm.ptr<1> -> i32
  %ready = llvm.icmp "eq" %f, %one : i32
  llvm.cond_br %ready, ^end, ^wait(%next : i32)
^end:
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("value", "counts"), [(1, 0), (1, 1), (2, 0)])
def test_a_workgroup_that_waits_from_barrier_to_barrier(value, counts, threads):
    """Others get their turns meanwhile, also if it counts its looks; that it waits for what never comes is reported."""
    flag = np.zeros(1, dtype=np.int32)
    program = lower(LOOKS_BETWEEN_BARRIERS, "%flag: !llvm.ptr<1>, %value: i32, %counts: i32")
    # One lane: of more, some may see the flag in the moment in which it is set, and others not.
    report = launch(
        program, flag, value, counts, grid=2, block=1, threads=threads, step_limit=20_000_000_000, expect=None
    )
    assert flag[0] == value
    assert ["no workgroup gets on" in f.message for f in report.findings] == [True] * (value != 1), report


def test_waiting_for_what_never_comes_is_reported():
    # A wave's turns are counted in instructions; these cost the simulator little.
    fences = '\n  llvm.fence syncscope("workgroup") release' * 400
    _, report = handshake(ORDERED_FLAG, 99, 3, fences, threads=1)
    assert [f.kind for f in report.findings] == ["limit"]
    assert "no workgroup gets on" in report.findings[0].message


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (2, 3, 0)])
def test_a_grid_without_workgroups_is_refused(grid):
    out = np.zeros(64 * 4, dtype=np.int16)
    program = lower("  %step = llvm.mlir.constant(64 : i32) : i32\n" + TWO_WRITERS, "%out: !llvm.ptr<1>")
    with pytest.raises(ValueError, match="HIP refuses a grid without workgroups"):
        launch(program, out, grid=grid)


def test_reading_what_another_workgroup_wrote_without_an_ordered_access_is_reported():
    _, report = handshake(PLAIN_FLAG, 0, 3, threads=1)
    assert {f.kind for f in report.findings} == {"global"}
    assert any("no atomic or ordered access" in f.message for f in report.findings)


TWO_WRITERS = """
  %t = rocdl.workitem.id.x : i32
  %g = rocdl.workgroup.id.x : i32
  %i = llvm.mul %g, %step : i32
  %j = llvm.add %i, %t : i32
  %to = llvm.getelementptr %out[%j] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i16
  %h = llvm.trunc %j : i32 to i16
  llvm.store %h, %to : i16, !llvm.ptr<1>
"""


@pytest.mark.parametrize(("step", "overlap"), [(64, False), (63, True), (1, True)])
def test_two_workgroups_that_write_the_same_element_are_reported(step, overlap):
    out = np.zeros(64 * 4, dtype=np.int16)
    program = lower(f"  %step = llvm.mlir.constant({step} : i32) : i32\n" + TWO_WRITERS, "%out: !llvm.ptr<1>")
    report = launch(program, out, grid=3, expect="global" if overlap else "")
    assert all("another workgroup wrote" in f.message for f in report.findings)
    launch(program, out, grid=3, checks=("memory",))


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_completion_and_schedule_do_not_change_a_result(arch, layout):
    from fourwave.ops.gemm import amd

    M, N, K = 70, 70, 200
    generator = torch.Generator().manual_seed(5)
    a = torch.randn((K, M) if layout == "NT" else (M, K), generator=generator).bfloat16()
    b = torch.randn((N, K) if layout == "TN" else (K, N), generator=generator).bfloat16()
    problem = GemmProblem(M, N, K, layout, a.dtype, b.dtype, torch.float32, None, None, False, "cpu")
    config, _ = default_config(problem, arch)
    results = []
    for completion in ("late", "early", "random"):
        for schedule in ("forward", "reverse", "random:7"):
            out = torch.full((M, N), float("nan"))
            with sim.session(arch, completion=completion, schedule=schedule) as report:
                amd.run(problem, config, arch, GemmTensors(a, b, out))
            assert not report.findings, report
            results.append(out)
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert np.array_equal(results[0].numpy().view(np.uint32), other.numpy().view(np.uint32))


LONG = """
  %zero = llvm.mlir.constant(0 : i32) : i32
  %one = llvm.mlir.constant(1 : i32) : i32
  llvm.br ^loop(%zero : i32)
^loop(%i: i32):
  %next = llvm.add %i, %one : i32
  %again = llvm.icmp "slt" %next, %n : i32
  llvm.cond_br %again, ^loop(%next : i32), ^end
^end:
  llvm.store %next, %out : i32, !llvm.ptr<1>
"""


def test_a_long_loop_is_not_taken_for_a_hang():
    out = np.zeros(1, dtype=np.int32)
    launch(lower(LONG, "%out: !llvm.ptr<1>, %n: i32"), out, 30_000_000, block=1)
    assert out[0] == 30_000_000


def test_an_interrupt_stops_a_launch():
    started, out = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    program = lower("  llvm.store %n, %started : i32, !llvm.ptr<1>\n" + LONG, "%out: !llvm.ptr<1>, %n: i32, %started: !llvm.ptr<1>")  # fmt: skip
    over = threading.Event()

    def interrupt():
        while not started[0] and not over.wait(0.01):
            pass
        if not over.is_set():
            signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            launch(program, out, 2**31 - 1, started, block=1)
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert out[0] == 0  # the loop, which would take minutes, did not end


def interrupted(handler, times: int, stops: bool) -> list[str]:
    """What becomes of a stand-in core that is interrupted `times` times and works on for a while after the last one.

    `stops`: whether it waits to be told to stop before that.
    """
    raw, told = RawLaunch(), []
    handled, left = threading.Semaphore(0), threading.Event()

    def counting(number, frame):
        handled.release()
        handler(number, frame)

    def core(_) -> int:
        for _ in range(times):
            if not left.is_set():
                signal.raise_signal(signal.SIGINT)  # Python runs its handler in the main thread
                assert handled.acquire(timeout=60)
        for _ in range(6000):
            if raw.stop or not stops or left.wait(0.01):
                break
        left.wait(0.5)
        told.append("stopped" if raw.stop else "ended")
        return 0

    before = signal.signal(signal.SIGINT, counting)
    try:
        _interruptible(core, raw)
        told.append("returned")
    except KeyboardInterrupt:
        told.append("raised")
    finally:
        left.set()
        assert signal.signal(signal.SIGINT, before) is counting
    return told


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_is_raised_once_the_core_has_ended(times):
    """The core works on memory that the caller may free afterwards."""
    assert interrupted(signal.default_int_handler, times, stops=True) == ["stopped", "raised"]


def test_a_handler_that_only_takes_note_does_not_stop_a_launch():
    seen = []
    assert interrupted(lambda number, frame: seen.append(number), 2, stops=False) == ["ended", "returned"]
    assert seen == [signal.SIGINT] * 2


def test_handlers_after_a_launch():
    """One that a handler put in its own place stays; one that was kept during the launch raises again, should it still be in place."""
    raw, kept, replaced = RawLaunch(), [], threading.Event()

    def replacing(number, frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        replaced.set()

    def core(_) -> int:
        kept.append(signal.getsignal(signal.SIGUSR1))
        signal.raise_signal(signal.SIGINT)
        assert replaced.wait(60)
        return 0

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, replacing),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.default_int_handler),
    }
    try:
        assert _interruptible(core, raw) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) is signal.default_int_handler
        assert kept[0] is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            assert callable(kept[0]) and kept[0](signal.SIGUSR1, None)
        assert not raw.stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("option", [{"schedule": "randomx"}, {"schedule": "random:4294967297"}, {"step_limit": -1}])
def test_options_that_mean_nothing_are_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        with sim.session("gfx950", **option):
            pass
