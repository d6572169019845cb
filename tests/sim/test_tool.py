"""The simulator as a tool: `fourwave sim`, sim.run, the pytest fixture, the mutation harness, and the examples' reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fourwave import sim
from fourwave.cli.app import app
from fourwave.ops.gemm.config import default_config
from fourwave.ops.gemm.problem import GemmProblem, GemmTensors
from fourwave.sim.harness import STEP_LIMIT, Harness, read_expectations
from fourwave.sim.mutate import Fault
from fourwave.sim.script import run_script
from fourwave.testing import inputs
from fourwave.testing.shapes import Shape

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")
pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HOME = str(Path.home())  # holds the compiled core; pytester moves it
SCRIPT = Path(__file__).with_name("gpu_script.py")
TRAINING = Path(__file__).with_name("gpu_training_script.py")


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["sim", *arguments])


def line_of(name: str, text: str) -> int:
    """Number of the one line of an example that holds `text`."""
    lines = [n for n, line in enumerate((EXAMPLES / name).read_text(encoding="utf-8").splitlines(), 1) if text in line]
    assert len(lines) == 1, (text, lines)
    return lines[0]


# GPU scripts


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_a_gpu_script_runs_unchanged(arch, capsys):
    status, report = run_script(SCRIPT, ["--size", "4"], arch)
    assert status == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip() == "all right"
    assert [launch.arch for launch in report.launches] == [arch] and report.workgroups == 4
    assert not report.findings, report


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_a_training_script_runs_unchanged(arch, capsys):
    status, report = run_script(TRAINING, [], arch)
    assert status == 0, capsys.readouterr().err
    assert capsys.readouterr().out.strip() == "all right"
    assert not report.findings, report
    assert len(report.launches) > 30 and {launch.arch for launch in report.launches} == {arch}


@pytest.mark.slow
def test_a_module_trains_in_a_script():
    """In a process of its own: fourwave keeps what it learns of the devices."""
    command = [sys.executable, "-m", "fourwave.cli", "sim", "--arch", "gfx942", str(TRAINING), "--module"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout and " 0 findings" in done.stdout


def test_a_backward_passs_kernel_must_not_touch_host_tensors(tmp_path):
    """The host's tensors stay the host's in a backward pass: the gradient is memory of the GPU, a new plain tensor is not."""
    script = tmp_path / "host_backward.py"
    script.write_text(
        LAUNCHER.replace("BARRIER", "fx.gpu.barrier()") + "class Reverse(torch.autograd.Function):\n"
        "    forward = staticmethod(lambda ctx, x: x * 1)\n"
        "    backward = staticmethod(lambda ctx, grad: (reverse(grad.contiguous(), torch.empty(256)), grad)[1])\n"
        "Reverse.apply(torch.rand(256).cuda().requires_grad_()).sum().backward()\n"
    )
    _, report = run_script(script, [])
    assert {(f.kind, f.message.split()[0]) for f in report.findings} == {("memory", "writes")}, report


def test_compiled_functions_run_uncompiled():
    from fourwave.sim.script import served_on_cpu

    def backend(graph, inputs):
        raise AssertionError("compiled")

    with served_on_cpu("gfx950"):
        y = torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(3, device="cuda"))
        assert y.is_cuda and y.tolist() == [3, 3, 3]


def test_marks_go_with_their_storage(monkeypatch):
    from fourwave.sim import script

    monkeypatch.setattr(script._marks, "limit", 8)
    monkeypatch.setattr(script._marks, "least", 8)
    with script.served_on_cpu("gfx950"):
        kept = [torch.zeros(4, device="cuda") for _ in range(5)]
        for _ in range(100):
            assert torch.zeros(4, device="cuda").is_cuda and not torch.zeros(4).is_cuda
        assert len(script._marks.storages) <= script._marks.limit < 20
        assert all(script.is_on_gpu(t) and script.is_on_gpu(script.plain(t)) for t in kept)
    assert not script._marks.storages


def test_the_process_is_as_before():
    from fourwave.sim.script import served_on_cpu

    def state():
        names = (
            torch.cuda,
            torch.accelerator,
            torch.utils.dlpack,
            torch.version,
            torch,
            torch.autograd,
            torch.autograd.graph,
        )
        kept = [{k: id(v) for k, v in vars(module).items() if not k.startswith("__")} for module in names]
        flag = torch.__future__.get_overwrite_module_params_on_conversion()
        return kept, flag, list(sys.path), list(sys.argv), torch.get_default_device(), torch.cuda.is_available()

    with sim.session():  # imports what a session needs
        pass
    before = state()
    assert run_script(SCRIPT, ["--size", "4"])[0] == 0
    after = state()
    assert after == before
    with pytest.raises(ZeroDivisionError), served_on_cpu("gfx950"):
        torch.set_default_device("cuda")
        assert torch.zeros(1).is_cuda
        raise ZeroDivisionError
    assert state() == before
    assert not torch.zeros(1).is_cuda and type(torch.zeros(1)) is torch.Tensor


def test_a_second_script_learns_its_own_gpu(tmp_path, capsys):
    """What the first one asked about its GPU, in a module of its folder or through fourwave, is not the second's."""
    from fourwave.backends import registry

    (tmp_path / "helper_of_two_scripts.py").write_text(
        "import torch\nARCH = torch.cuda.get_device_properties(0).gcnArchName\n", encoding="utf-8"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import helper_of_two_scripts\n"
        "from fourwave.backends import registry\n"
        "flydsl = registry.get('flydsl')\n"
        "print(helper_of_two_scripts.ARCH, flydsl._arch(), flydsl.unavailable())\n",
        encoding="utf-8",
    )
    before = registry.get("flydsl").unavailable()
    for arch in ("gfx942", "gfx950"):
        run_script(script, [], arch)
        assert capsys.readouterr().out == f"{arch} {arch} None\n"
        assert "helper_of_two_scripts" not in sys.modules
        assert registry.get("flydsl").unavailable() == before


def test_a_kernel_must_not_touch_host_tensors(tmp_path):
    script = tmp_path / "host.py"
    script.write_text(
        LAUNCHER.replace("BARRIER", "fx.gpu.barrier()") + "reverse(torch.rand(256).cuda(), torch.empty(256))\n"
    )
    _, report = run_script(script, [])
    assert {(f.kind, f.message.split()[0]) for f in report.findings} == {("memory", "writes")}, report


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit", 0), ("raise SystemExit(7)", 7), ("raise SystemExit('why')", 1)],
)
def test_the_scripts_exit_status(tmp_path, capsys, code, status):
    script = tmp_path / "s.py"
    script.write_text(code)
    assert run_script(script, [])[0] == status
    assert capsys.readouterr().err.strip() == ("why" if "why" in code else "")
    assert invoke(str(script)).exit_code == (status or 1)  # nothing was launched, so nothing was checked


def test_the_scripts_own_errors_are_its_own(tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import helper\nassert __name__ == '__main__'\nraise ValueError(helper.TEXT)")
    (tmp_path / "helper.py").write_text("TEXT = 'from the script'")
    with pytest.raises(ValueError, match="from the script"):
        run_script(script, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such.py"], "no such script"),
        ([str(EXAMPLES)], "is a directory; name the script in it"),
        (["--arch", "gfx90a", str(SCRIPT)], "gfx90a is not among them"),
        (["--checks", "memory,luck", str(SCRIPT)], "luck"),
        (["--completion", "never", str(SCRIPT)], "completion='never'"),
        (["--expect", str(SCRIPT), str(SCRIPT)], "give both"),
        (["--mutate", "--expect", "no_such.txt", str(SCRIPT)], "no_such.txt"),
    ],
)
def test_options_that_make_no_sense(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


# The examples: what a user gets to read

BUGS = [
    # example, kind, the line's text, the advice
    ("missing_wait", "wait", "lds.tiles[last - i]", "wait for the copy (s_waitcnt vmcnt) before this"),
    ("race", "race", "lds.row[thread] = value", "put the write's wait"),
    ("tail", "memory", "value = x[i] + bias", "check the tail handling"),
    ("tail", "memory", "y[i] = (value > 0.0)", "check the tail handling"),
]


@pytest.mark.parametrize(("name", "kind", "text", "advice"), BUGS)
def test_a_buggy_kernels_report_names_the_line_and_what_to_do(name, kind, text, advice):
    _, report = run_script(EXAMPLES / f"{name}.py", [])
    line = line_of(f"{name}.py", text)
    found = [f for f in report.findings if f.kind == kind and Path(f.file).name == f"{name}.py" and f.line == line]
    assert found, report
    assert advice in str(found[0]) and f"{name}.py:{line}: {kind}: " in str(found[0])


def test_findings_of_one_line_share_its_header():
    _, report = run_script(EXAMPLES / "missing_wait.py", [])
    line = line_of("missing_wait.py", "lds.tiles[last - i]")
    header = f"missing_wait.py:{line}: wait: reads LDS that another wave's copy has not reached"
    alike = [f for f in report.findings if f.kind == "wait" and f.line == line]
    assert len(alike) == 2 and str(report).count(header) == 1
    assert all(f._occurrence in str(report) and header in str(f) for f in alike)
    assert f"in {report.findings[0].file}:{line}" not in str(report), "no helper's line that is the header's"


@pytest.mark.parametrize("name", ["missing_wait", "race", "tail"])
def test_fourwave_sim_on_the_examples(name, tmp_path):
    record = tmp_path / "record.json"
    result = invoke("--json", str(record), str(EXAMPLES / f"{name}.py"))
    assert result.exit_code == 1 and "right: " in result.output
    kinds = {f["kind"] for f in json.loads(record.read_text())["findings"]}
    assert {"missing_wait": "wait", "race": "race", "tail": "memory"}[name] in kinds
    for kind in kinds:
        assert f"{name}.py:" in result.output and f": {kind}: " in result.output


@pytest.mark.parametrize("name", ["missing_wait", "race", "tail"])
def test_the_corrected_twins_have_no_findings(name):
    result = invoke(str(EXAMPLES / f"{name}_fixed.py"))
    assert result.exit_code == 0, result.output
    assert "right: True" in result.output and " 0 findings" in result.output


def test_checks_can_be_chosen():
    for checks, found in (
        ("memory,init", False),
        ("race", True),
        ("all", True),
        ("memcheck", False),
        ("racecheck,init", True),
    ):
        result = invoke("--checks", checks, str(EXAMPLES / "race.py"))
        assert (": race: " in result.output) is found and (" 0 findings" in result.output) is not found


# Mutation


@pytest.mark.slow
def test_the_survivor_of_an_example_is_expected(tmp_path):
    record = tmp_path / "record.json"
    expect = "--expect", str(EXAMPLES / "race_fixed.expect")
    result = invoke("--mutate", *expect, "--json", str(record), str(EXAMPLES / "race_fixed.py"))
    assert result.exit_code == 0, result.output
    assert "1 accepted; 0 unexplained" in result.output
    faults = [f["fault"] for f in json.loads(record.read_text())["faults"]]
    # One for each row, in front of the reads; those after the reads have nothing to wait for.
    assert sum(f.startswith("fence dropped") for f in faults) == 4
    assert sum(f.startswith("barrier dropped") for f in faults) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["missing_wait_fixed", "tail_fixed"])
def test_every_fault_of_a_corrected_twin_is_caught(name):
    result = invoke("--mutate", str(EXAMPLES / f"{name}.py"))
    assert result.exit_code == 0 and "0 accepted; 0 unexplained" in result.output, result.output


def test_mutate_lists_every_fault_of_a_kernel(tmp_path):
    record = tmp_path / "record.json"
    result = invoke("--mutate", "--json", str(record), str(EXAMPLES / "missing_wait_fixed.py"))
    faults = json.loads(record.read_text())["faults"]
    assert result.exit_code == int(any(not f["how"] for f in faults)), result.output
    kinds = {f["fault"].rpartition(" #")[0] for f in faults}
    assert {"barrier dropped", "vmcnt one higher", "vmcnt dropped", "copy dropped", "copy 16 bytes off"} <= kinds
    survivors = [f for f in faults if not f["how"]]
    assert not survivors, survivors
    assert f"{len(faults)} of {len(faults)} faults caught; 0 accepted; 0 unexplained" in result.output


def test_a_survivor_needs_a_reason(tmp_path):
    """A second barrier right after the first is redundant: dropping either one goes unnoticed."""
    script = tmp_path / "twice.py"
    script.write_text(
        LAUNCHER.replace("BARRIER", "fx.gpu.barrier()\n    fx.rocdl.s_barrier()")
        + "reverse(torch.arange(256.0).cuda(), torch.empty(256, device='cuda'))\n"
    )
    result = invoke("--mutate", str(script))
    assert result.exit_code == 1
    survivors = [s.split(": ", 1)[1] for s in result.output.splitlines() if s.startswith("survivor: ")]
    keys = [s.rpartition(" at ")[0] for s in survivors]
    assert keys and all("barrier dropped #" in key for key in keys)

    expect = tmp_path / "expect.txt"
    expect.write_text("# known\n\n" + "".join(f"{key}  # twice in a row\n" for key in keys))
    result = invoke("--mutate", "--expect", str(expect), str(script))
    assert result.exit_code == 0 and "twice in a row" in result.output and "0 unexplained" in result.output

    expect.write_text(expect.read_text() + "some_kernel: gone #0  # was once\n")
    assert "no longer there: some_kernel: gone #0" in invoke("--mutate", "--expect", str(expect), str(script)).output


def test_expectations_need_reasons():
    assert read_expectations("# all\n\nk: barrier dropped #1  # the last step\n") == {
        "k: barrier dropped #1": "the last step"
    }
    for bad in ("k: barrier dropped #1\n", "k: barrier dropped #1  # \n"):
        with pytest.raises(ValueError, match="line 1"):
            read_expectations(bad)


def gemm_outcomes(arch: str, layout: str, choose=None):
    """What becomes of the faults in our GEMM kernel, over six K steps and several workgroups."""
    from fourwave.ops.gemm import amd

    shape = Shape("pipeline", 128, 64, 384)
    a, b = inputs.spread(shape, torch.bfloat16, layout=layout, seed=3)
    problem = GemmProblem(
        shape.M, shape.N, shape.K, layout, torch.bfloat16, torch.bfloat16, torch.float32, None, None, False, "cpu"
    )
    config, _ = default_config(problem, arch)
    out = torch.full((shape.M, shape.N), float("nan"))
    harness = Harness(choose=choose)
    with sim.session(arch, harness=harness, step_limit=STEP_LIMIT) as report:
        amd.run(problem, config, arch, GemmTensors(a, b, out))
    assert not report.findings, report
    assert not out.isnan().any()
    return harness


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_the_harness_finds_a_few_faults_of_our_gemm(arch):
    def last_of_each(fault: Fault) -> bool:
        return fault.name.endswith(" #1")

    harness = gemm_outcomes(arch, "TN", last_of_each)
    kinds = {o.fault.rpartition(" #")[0] for o in harness.outcomes}
    assert {"barrier dropped", "LDS read 16 bytes off"} <= kinds
    assert not harness.survivors, harness.survivors


# sim.run and the fixture

LAUNCHER = """
import flydsl.compiler as flyc
import torch
from flydsl import expr as fx

@fx.struct
class Shared:
    values: fx.Array[fx.Float32, 256, 16]

@flyc.kernel(known_block_size=[256, 1, 1])
def reverse_kernel(x: fx.Tensor, y: fx.Tensor):
    lds = fx.SharedAllocator().allocate(Shared).peek()
    thread = fx.Int32(fx.thread_idx.x)
    lds.values[thread] = x[thread]
    BARRIER
    y[thread] = lds.values[255 - thread]

@flyc.jit
def reverse(x: fx.Tensor, y: fx.Tensor):
    reverse_kernel(x, y).launch(grid=(1, 1, 1), block=(256, 1, 1))
"""


def launcher(folder: Path, barrier: bool):
    path = folder / "kernels.py"
    path.write_text(LAUNCHER.replace("BARRIER", "fx.gpu.barrier()" if barrier else "pass"))
    return path


def load(path: Path):
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"kernels_{path.parent.name}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("arch", sim.ARCHS)
def test_run_returns_the_report_and_the_output(tmp_path, arch, barrier):
    x, y = torch.arange(256.0), torch.full((256,), float("nan"))
    report = sim.run(load(launcher(tmp_path, barrier)).reverse, x, y, arch=arch, schedule="reverse")
    assert len(report.launches) == 1 and report.launches[0].arch == arch
    assert torch.equal(y, x.flip(0)) is barrier
    assert bool(report.findings) is not barrier
    assert barrier or "race" in {f.kind for f in report.findings}


def test_run_takes_the_sessions_options(tmp_path):
    reverse = load(launcher(tmp_path, False)).reverse
    x, y = torch.arange(256.0), torch.empty(256)
    assert {f.kind for f in sim.run(reverse, x, y, checks=("race",)).findings} == {"race"}
    assert not sim.run(reverse, x, y, checks=("memory",)).findings
    assert {f.kind for f in sim.run(reverse, x, y, checks="racecheck").findings} == {"race"}
    assert {f.kind for f in sim.run(reverse, x, y, checks="all").findings} >= {"race"}
    assert not sim.run(reverse, x, y, checks="memcheck, synccheck").findings
    with pytest.raises(ValueError, match=r"checks=\['luck'\] are not known.*racecheck"):
        sim.run(reverse, x, y, checks="luck")
    with pytest.raises(sim.SimulationError):
        sim.run(reverse, x, y, on_finding="raise")
    with pytest.raises(ValueError, match="completion"):
        sim.run(reverse, x, y, completion="soon")


FIXTURE_TESTS = """
import pytest, torch
from kernels import reverse

def call():
    x, y = torch.arange(256.0), torch.empty(256)
    reverse(x, y)

def test_plain(fourwave_sim):
    call()
    assert [x.arch for x in fourwave_sim.launches] == ["gfx950"]

@pytest.mark.fourwave_sim(arch="gfx942", completion="early")
def test_named(fourwave_sim):
    call()
    assert [x.arch for x in fourwave_sim.launches] == ["gfx942"]

@pytest.mark.fourwave_sim("gfx1250", checks=("memory",))
def test_fewer_checks(fourwave_sim):
    call()
    assert [x.arch for x in fourwave_sim.launches] == ["gfx1250"]

def test_takes_its_findings(fourwave_sim):
    call()
    fourwave_sim.findings.clear()
"""


@pytest.mark.parametrize("barrier", [True, False])
def test_the_fixture(pytester, monkeypatch, barrier):
    monkeypatch.setenv("HOME", HOME)
    pytester.makeconftest('pytest_plugins = ["fourwave.sim.pytest_plugin"]')
    pytester.makepyfile(test_kernels=FIXTURE_TESTS)
    launcher(pytester.path, barrier)
    # A process of its own: in this one pytester forgets what its run imported, and FlyDSL cannot be imported twice.
    result = pytester.runpytest_subprocess("-q", "--strict-markers", "-p", "no:cacheprovider", "-n0")
    if barrier:
        result.assert_outcomes(passed=4)
    else:
        result.assert_outcomes(passed=4, errors=2)  # a finding is an error of the fixture, after the test
        result.stdout.fnmatch_lines(["*kernels.py:16: race: *", "*put the write's wait*"])


def test_the_fixture_skips_where_the_simulator_cannot_run(pytester, monkeypatch):
    monkeypatch.setattr(sim, "unavailable", lambda arch="gfx950": "no compiler")
    pytester.makeconftest('pytest_plugins = ["fourwave.sim.pytest_plugin"]')
    pytester.makepyfile("def test_it(fourwave_sim):\n    assert False")
    result = pytester.runpytest_inprocess("-q", "-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*fourwave.sim cannot run here: no compiler*"])


def test_the_fixture_does_not_skip_for_a_mistake(pytester):
    pytester.makeconftest('pytest_plugins = ["fourwave.sim.pytest_plugin"]')
    pytester.makepyfile(
        "import pytest\n@pytest.mark.fourwave_sim(arch='gfx999')\ndef test_it(fourwave_sim):\n    assert False"
    )
    result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*gfx999 is not among them*"])


def test_examples_are_all_tested():
    elsewhere = {"pretrain"}  # tests/nn/test_examples.py
    names = {p.stem.removesuffix("_fixed") for p in EXAMPLES.glob("*.py")} - elsewhere
    assert names == {name for name, *_ in BUGS}
    assert all((EXAMPLES / f"{name}_fixed.py").exists() for name in names)


# Coverage


def test_coverage_tells_the_archs_apart():
    from fourwave.sim.coverage import operations

    archs = {o.name: o.archs for o in operations()}
    assert archs["rocdl.mfma.scale.f32.16x16x128.f8f6f4"] == ("gfx950",)
    assert archs["rocdl.mfma.f32.16x16x8.xf32"] == ("gfx942",)
    assert archs["rocdl.mfma.f32.16x16x16f16"] == ("gfx942", "gfx950")
    assert archs["rocdl.wmma.f32.16x16x32.bf16"] == ("gfx1250",)
    assert archs["rocdl.s.waitcnt"] == ("gfx942", "gfx950")
    assert archs["llvm.add"] == sim.ARCHS


def test_what_is_lowered_is_recorded(tmp_path):
    from fourwave.sim.coverage import operations, recording
    from fourwave.sim.lowering import HANDLERS

    before = dict(HANDLERS)
    seen: set[tuple[str, str]] = set()
    with recording(lambda name, arch: seen.add((name, arch))):
        sim.run(load(launcher(tmp_path, True)).reverse, torch.arange(256.0), torch.empty(256), arch="gfx942")
    assert before == HANDLERS
    assert {("llvm.load", "gfx942"), ("llvm.store", "gfx942"), ("rocdl.s.barrier", "gfx942")} <= seen
    assert {arch for _, arch in seen} == {"gfx942"}

    record = tmp_path / "handled.json"
    record.write_text(json.dumps({"llvm.load": {"gfx942": ["test_a.py"]}}))
    (load_operation,) = [o for o in operations(record) if o.name == "llvm.load"]
    assert load_operation.tests == {"gfx942": ("test_a.py",)}


def test_doctor_lists_what_the_simulator_handles(tmp_path):
    from fourwave.sim.lowering import HANDLERS

    path = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--sim", "--json", str(path)])
    assert result.exit_code == 0, result.output
    listed = {o["name"] for o in json.loads(path.read_text())["operations"]}
    assert listed >= set(HANDLERS)
    assert "rocdl.mfma.scale.f32.16x16x128.f8f6f4" in result.output and "operations handled" in result.output


def test_a_script_that_launches_nothing_is_no_success(tmp_path):
    script = tmp_path / "nothing.py"
    script.write_text("print('hello')\n")
    done = subprocess.run(
        [sys.executable, "-m", "fourwave.cli", "sim", str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "nothing was launched" in done.stderr
