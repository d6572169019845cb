"""Scripts as a newcomer brings them to `fourwave sim`: host tensors, sessions of their own, errors, other processes and threads, torch.cuda."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import threading
from typing import Any

import pytest
import torch
from test_tool import LAUNCHER, invoke, load

from fourwave import sim
from fourwave.sim import torch_cuda
from fourwave.sim.report import describe
from fourwave.sim.script import execute, run_script, served_on_cpu

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

RIGHT = LAUNCHER.replace("BARRIER", "fx.gpu.barrier()")
WRONG = LAUNCHER.replace("BARRIER", "pass")


def written(folder, text: str, name: str = "script.py"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def found(report) -> list[tuple[str, str]]:
    return [(f.kind, f.message) for f in report.findings]


# Host tensors


def test_a_host_tensor_is_named_and_not_called_out_of_bounds(tmp_path):
    _, report = run_script(written(tmp_path, RIGHT + "reverse(torch.rand(256), torch.empty(256))\n"), [])
    assert found(report) == [
        ("memory", f"{verb} argument {name}, a host tensor (torch.float32 [256]), which a GPU cannot reach")
        for verb, name in (("reads", "x"), ("writes", "y"))
    ]
    assert "tail handling" not in str(report) and str(report).count("device='cuda'") == 2


def test_past_the_end_of_a_host_tensor_is_out_of_bounds(tmp_path):
    _, report = run_script(written(tmp_path, RIGHT + "reverse(torch.rand(256).cuda(), torch.empty(1024)[:1])\n"), [])
    assert ("memory", "writes argument y, a host tensor (torch.float32 [1]), which a GPU cannot reach") in found(report)
    _, report = run_script(
        written(tmp_path, RIGHT + "reverse(torch.rand(1024).cuda()[:255], torch.empty(256).cuda())\n"), []
    )
    assert found(report) == [("memory", "reads global memory outside every allocation of the launch")]


def test_pinned_memory_is_for_kernels(tmp_path):
    code = """
x, y = torch.rand(256).pin_memory(), torch.empty(256, pin_memory=True)
assert x.is_pinned() and y.is_pinned() and not x.is_cuda and not torch.rand(3).is_pinned()
assert x.pin_memory() is x and not x.cuda(non_blocking=True).is_pinned()
reverse(x, y)
assert torch.equal(y, x.flip(0))
"""
    status, report = run_script(written(tmp_path, RIGHT + code), [])
    assert status == 0 and len(report.launches) == 1 and not report.findings, report


POINTERS = """
import ctypes
from flydsl.compiler.jit_argument import PointerJitArg

@flyc.kernel(known_block_size=[64, 1, 1])
def negate_kernel(x: fx.Pointer, y: fx.Pointer):
    thread = fx.Int32(fx.thread_idx.x)
    y[thread] = -x[thread]

@flyc.jit
def negate(x: fx.Pointer, y: fx.Pointer):
    negate_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

def pointer(tensor):
    return PointerJitArg(fx.Float32, tensor.data_ptr())

x = torch.rand(64)
y = torch.full((SIZE,), float("nan"), device="cuda")
negate(pointer(INPUT), pointer(y))
"""


@pytest.mark.parametrize(
    ("size", "source", "messages"),
    [
        ("64", "(z := x.cuda())", []),
        ("63", "(z := x.cuda())", ["writes global memory outside every allocation of the launch"]),
        ("64", "x", ["reads global memory outside every allocation of the launch"]),
    ],
)
def test_a_pointer_brings_the_gpu_memory_that_it_points_into(tmp_path, size, source, messages):
    script = written(tmp_path, RIGHT + POINTERS.replace("SIZE", size).replace("INPUT", source))
    _, report = run_script(script, [])
    assert [m for _, m in found(report)] == messages, report
    assert len(report.launches) == 1


# Sessions of the script's own


OWN = """
from fourwave import sim
with sim.session(arch="gfx942") as report:
    reverse(torch.rand(256), torch.empty(256))
print(len(report.launches), len(report.findings) > 0)
reverse(torch.rand(256).cuda(), torch.empty(256).cuda())
"""


@pytest.mark.parametrize("text", [RIGHT, WRONG])
def test_a_scripts_own_session_counts(tmp_path, text):
    record = tmp_path / "record.json"
    result = invoke("--json", str(record), str(written(tmp_path, text + OWN)))
    wrong = text is WRONG
    assert result.exit_code == int(wrong), result.output
    assert f"1 {wrong}\n" in result.output
    assert "2 launches, 2 workgroups" in result.output and "host tensor" not in result.output
    assert "1 of the launches in sessions that the script opened itself" in result.output
    kept = json.loads(record.read_text())
    assert [launch["arch"] for launch in kept["launches"]] == ["gfx942", "gfx950"]
    assert kept["launches_in_own_sessions"] == 1
    assert bool(kept["findings"]) is wrong


def test_outputs_and_sim_run_of_a_script_count(tmp_path):
    code = """
from fourwave import sim
unwritten = torch.empty(3)
with sim.session(outputs=[unwritten]):
    pass
sim.run(reverse, torch.rand(256), torch.empty(256), arch="gfx1250")
try:
    with sim.session(on_finding="raise"):
        reverse(torch.rand(200), torch.empty(256))
except sim.SimulationError:
    print("raised")
"""
    run = execute(written(tmp_path, RIGHT + code), [])
    assert run.error is None and [launch.arch for launch in run.report.launches] == ["gfx1250", "gfx950"]
    assert [f.kind for f in run.report.findings] == ["init", "memory"] and run.own_launches == 2


def test_the_sim_backend_in_a_script_counts(tmp_path):
    code = """
import torch, fourwave as fw
a, b = torch.ones(64, 128, dtype=torch.bfloat16), torch.ones(64, 128, dtype=torch.bfloat16)
assert torch.equal(fw.gemm(a, b, backend="sim"), torch.full((64, 64), 128.0, dtype=torch.bfloat16))
"""
    run = execute(written(tmp_path, code), [])
    assert run.error is None and len(run.report.launches) == run.own_launches > 0 and not run.report.findings


# Reports


def test_equal_findings_of_several_launches_are_told_once(tmp_path):
    _, report = run_script(
        written(tmp_path, WRONG + "for _ in range(5):\n    reverse(torch.rand(256).cuda(), torch.empty(256).cuda())\n"),
        [],
    )
    kinds = {f.kind for f in report.findings}
    assert len(report.launches) == 5 and {"race", "init"} <= kinds
    text = describe(report.findings)
    headers = [line for line in text.splitlines() if not line.startswith(" ")]
    assert len(headers) == len({(f.kind, f.message, f.line) for f in report.findings}) < len(report.findings)
    assert all(line.endswith("(5 findings of this line)") for line in headers), text
    for line in (line for line in text.splitlines() if "occurrences" in line):
        assert line.endswith("occurrences in 5 launches, all waves and lanes")
    races = [f for f in report.findings if f.kind == "race" and f.message == report.findings[-1].message]
    assert f"the first of {sum(f.count for f in races)} occurrences" in text


def test_one_occurrence_is_said_to_be_the_only_one(tmp_path):
    _, report = run_script(written(tmp_path, RIGHT + "reverse(torch.rand(256).cuda(), torch.empty(255).cuda())\n"), [])
    (finding,) = report.findings
    assert (
        finding.count == 1 and "; the only occurrence\n" in str(finding) and "findings of this line" not in str(finding)
    )
    assert "; the first of 2 occurrences in all waves and lanes\n" in str(dataclasses.replace(finding, count=2))


# Errors


def test_a_script_that_raises_has_its_traceback_and_its_report(tmp_path):
    code = "def check():\n    raise ValueError('not close')\nreverse(torch.rand(256).cuda(), torch.empty(256).cuda())\ncheck()\n"
    record = tmp_path / "record.json"
    result = invoke("--json", str(record), str(written(tmp_path, WRONG + code)))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "ValueError: not close" in result.output and "in check" in result.output and "in <module>" in result.output
    for frame in ("runpy", "sim/script.py", "cli/sim.py"):
        assert frame not in result.output
    assert "1 launches" in result.output and ": race: " in result.output
    assert json.loads(record.read_text())["error"] == "ValueError('not close')"


def test_a_script_with_a_syntax_error(tmp_path):
    result = invoke(str(written(tmp_path, "x = 1\ndef f(:\n")))
    assert result.exit_code == 1 and "SyntaxError" in result.output and "line 2" in result.output
    assert "runpy" not in result.output and "nothing was launched" not in result.output


def test_other_threads_are_refused(tmp_path):
    code = """
import threading
from fourwave import sim
said = []
def work(call):
    try:
        call()
    except RuntimeError as error:
        said.append(str(error))
def own():
    with sim.session():
        pass
x, y = torch.rand(256).cuda(), torch.empty(256).cuda()
reverse(x, y)
for call in (lambda: reverse(x, y), own):
    thread = threading.Thread(target=work, args=(call,))
    thread.start()
    thread.join()
assert "another thread than the script's first" in said[0], said
assert "another thread cannot open one beside it" in said[1], said
"""
    status, report = run_script(written(tmp_path, RIGHT + code), [])
    assert status == 0 and len(report.launches) == 1


def test_other_processes_are_told(tmp_path):
    code = """
import multiprocessing
x, y = torch.rand(256).cuda(), torch.empty(256).cuda()
def child():
    try:
        reverse(x, y)
    except RuntimeError as error:
        raise SystemExit(7 if "fourwave sim would lose its report" in str(error) else 8)
if __name__ == "__main__":
    reverse(x, y)
    process = multiprocessing.get_context("fork").Process(target=child, name="worker")
    process.start()
    process.join()
    assert process.exitcode == 7, process.exitcode
"""
    result = invoke(str(written(tmp_path, RIGHT + code)))
    assert result.exit_code == 0, result.output
    assert "not checked: what 1 processes that the script started did (worker)" in " ".join(result.output.split())


LAUNCH = (
    RIGHT
    + """
def launch():
    x, y = torch.rand(256), torch.empty(256)
    reverse(x, y)
    return torch.equal(y, x.flip(0))
"""
)


class Held(threading.Thread):
    """A session of another thread, open until leave() is called."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.entered, self.over = threading.Event(), threading.Event()
        self.start()
        assert self.entered.wait(60)

    def run(self) -> None:
        with sim.session("gfx942"):
            self.entered.set()
            self.over.wait(60)

    def leave(self) -> None:
        self.over.set()
        self.join()


def test_a_launch_beside_another_threads_session_says_what_is_wrong(tmp_path):
    launch = load(written(tmp_path, LAUNCH)).launch
    held = Held()
    try:
        with pytest.raises(
            RuntimeError, match="session of another thread has FlyDSL compile for gfx942: open a session in this"
        ):
            launch()
    finally:
        held.leave()
    with sim.session() as report:
        assert launch()
    assert len(report.launches) == 1


def test_a_fork_while_another_thread_has_a_session(tmp_path):
    """The child has the locks and not the thread that held them."""
    launch = load(written(tmp_path, LAUNCH)).launch
    with sim.session():
        assert launch()
    held = Held()
    try:
        child = multiprocessing.get_context("fork").Process(target=simulate_once, args=(launch,))
        child.start()
        child.join(60)
        hung = child.exitcode is None
        if hung:
            child.kill()
        assert not hung and child.exitcode == 0
    finally:
        held.leave()


def simulate_once(launch) -> None:
    with sim.session() as report:
        right = launch()
    raise SystemExit(0 if right and len(report.launches) == 1 and not report.findings else 3)


def test_printf_is_named(tmp_path):
    text = RIGHT.replace("    lds.values[thread] =", '    fx.printf("{}\\n", thread)\n    lds.values[thread] =')
    with pytest.raises(sim.UnknownOperation, match=r"script.py:\d+: .*__ockl_printf\w*: that is fx.printf"):
        run_script(written(tmp_path, text + "reverse(torch.rand(256).cuda(), torch.empty(256).cuda())\n"), [])


# torch.cuda


@pytest.fixture
def gpu():
    with served_on_cpu("gfx950"):
        yield torch.cuda


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_properties(arch):
    with served_on_cpu(arch):
        of = torch.cuda.get_device_properties("cuda:0")
        capability = {"gfx942": (9, 4), "gfx950": (9, 5), "gfx1250": (12, 5)}[arch]
        assert (of.major, of.minor) == torch.cuda.get_device_capability() == capability
        assert (of.gcnArchName, of.warp_size) == (arch, 32 if arch == "gfx1250" else 64)
        assert torch.cuda.get_arch_list() == [arch] and arch in torch.cuda.get_device_name()
        with pytest.raises(AttributeError, match="'L2_cache_size' of a GPU is not served"):
            of.L2_cache_size  # noqa: B018
        assert not hasattr(of, "clock_rate")


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(2, device="cuda:1"),
        lambda: torch.ones(2).to("cuda:1"),
        lambda: torch.ones(2).cuda(1),
        lambda: torch.ones(2).cuda(device=torch.device("cuda", 2)),
        lambda: torch.cuda.set_device(1),
        lambda: torch.cuda.device(3),
        lambda: torch.cuda.get_device_properties(1),
        lambda: torch.cuda.synchronize("cuda:1"),
    ],
)
def test_another_gpu_is_refused(gpu, call):
    with pytest.raises(RuntimeError, match="fourwave sim serves one GPU, cuda:0"):
        call()


def test_memory_counts_gpu_tensors(gpu):
    start = gpu.memory_allocated()
    gpu.reset_peak_memory_stats()
    x = torch.zeros(1000, device="cuda")
    y = torch.zeros(500, dtype=torch.float64, device="cuda:0")
    host = torch.zeros(10_000)
    assert gpu.memory_allocated() - start == 8000 == torch.accelerator.memory_allocated() - start
    del y
    assert gpu.memory_allocated(0) - start == 4000 and gpu.max_memory_allocated() - start == 8000
    gpu.reset_peak_memory_stats()
    assert gpu.max_memory_allocated() - start == 4000 == gpu.memory_stats()["allocated_bytes.all.peak"] - start
    free, total = gpu.mem_get_info()
    assert total - free == gpu.memory_allocated() == gpu.memory.memory_reserved()
    assert x.is_cuda and not host.is_cuda
    for _ in range(50):
        x = torch.zeros(1000, device="cuda")  # at most two of them are alive
    assert gpu.max_memory_allocated() - start <= 8000


def test_random_states(gpu):
    gpu.manual_seed(3)
    state = gpu.get_rng_state()
    a = torch.rand(5, device="cuda")
    gpu.set_rng_state(state)
    assert torch.equal(a, torch.rand(5, device="cuda"))
    with torch.random.fork_rng():
        torch.rand(3, device="cuda")
        gpu.seed()
    gpu.random.set_rng_state_all([state])
    assert torch.equal(a, torch.rand(5, device="cuda"))


def test_events_and_streams(gpu):
    begin, end = gpu.Event(enable_timing=True), torch.Event(device="cuda", enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        begin.elapsed_time(end)
    begin.record()
    with gpu.stream(gpu.Stream(priority=-1)):
        end.record(gpu.current_stream())
    gpu.synchronize()
    assert 0 <= begin.elapsed_time(end) < 60_000 and isinstance(end, torch.Event)
    assert isinstance(torch.Stream(device="cuda"), gpu.Stream) and torch.get_device_module() is gpu
    assert torch.get_device_module("cpu") is torch.cpu
    gpu.nvtx.range_push("a")
    gpu.nvtx.range_pop()
    with gpu.nvtx.range("b"), gpu.profiler.profile():
        gpu._sleep(10)


def test_a_benchmark_loop_runs(gpu):
    """As Triton's do_bench measures: the cache cleared between calls, pairs of events."""
    cache = torch.empty(1 << 16, dtype=torch.int, device="cuda")
    x = torch.rand(64, device="cuda")
    pairs = [(gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)) for _ in range(4)]
    for begin, end in pairs:
        cache.zero_()
        begin.record()
        x * 2
        end.record()
    gpu.synchronize()
    assert torch.tensor([b.elapsed_time(e) for b, e in pairs]).median() > 0
    from torch.utils import benchmark

    assert benchmark.Timer("x * 2", globals={"x": x}).timeit(2).mean > 0


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("CUDAGraph", lambda gpu: gpu.CUDAGraph()),
        ("graph", lambda gpu: gpu.graph(None)),
        ("make_graphed_callables", lambda gpu: gpu.make_graphed_callables(abs, ())),
        ("memory_summary", lambda gpu: gpu.memory_summary()),
        ("_record_memory_history", lambda gpu: gpu.memory._record_memory_history()),
        ("utilization", lambda gpu: gpu.utilization()),
        ("FloatTensor", lambda gpu: gpu.FloatTensor(3)),
        ("MemPool", lambda gpu: gpu.MemPool()),
    ],
)
def test_what_is_not_served_says_so(gpu, name, call):
    with pytest.raises(NotImplementedError, match=rf"{name} is not served by fourwave sim: "):
        call(gpu)
    with pytest.raises(AttributeError, match="cudaMalloc is not served"):
        gpu.cudart().cudaMalloc(3)


def test_every_function_of_torch_cuda_answers_or_refuses(gpu):
    """None is left that would go to a driver: each public function is replaced, or among the few that ask nobody."""
    from types import FunctionType

    for name, value in vars(torch.cuda).items():
        if not name.startswith("_") and isinstance(value, FunctionType) and value.__module__.startswith("torch.cuda"):
            assert name in torch_cuda._KEPT, name


def test_checkpoints_keep_their_device(gpu, tmp_path):
    x = torch.arange(6.0, device="cuda")
    layer = torch.nn.Linear(2, 3).cuda()
    torch.save({"x": x, "view": x[2:4], "host": torch.ones(2), "layer": layer.state_dict()}, tmp_path / "c.pt")
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"map_location": "cpu"}, False),
        ({"map_location": "cuda:0"}, True),
    ]
    for options, on_gpu in cases:
        kept = torch.load(tmp_path / "c.pt", **options)
        assert kept["x"].is_cuda is on_gpu and kept["view"].tolist() == [2, 3]
        assert kept["host"].is_cuda is (on_gpu and bool(options)) and kept["layer"]["weight"].is_cuda is on_gpu
        assert torch.equal(kept["x"].cpu(), torch.arange(6.0))
    layer.load_state_dict(kept["layer"])
    with pytest.raises(RuntimeError, match="serves one GPU"):
        torch.load(tmp_path / "c.pt", map_location="cuda:1")
