"""The command line: options, exit codes, what it prints, and that a wrong kernel or a missing part shows."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch
from typer.models import OptionInfo
from typer.testing import CliRunner

from fourwave import sim
from fourwave.backends import registry
from fourwave.cli import check, check_plan, console, doctor
from fourwave.cli.app import app, bench_app
from fourwave.ops.gemm.config import ARCHS, candidates_for, default_config, why_unsupported
from fourwave.ops.gemm.problem import LAYOUTS
from fourwave.quantize.tensor import QuantizedTensor
from fourwave.testing.cases import CaseResult, GemmCase
from fourwave.testing.exact_scales import ExactScales
from fourwave.testing.quantize_cases import QuantizeCase
from fourwave.testing.shapes import GEMM_SHAPES, Shape

SIM_MISSING = registry.get("sim:gfx950").unavailable()
NO_GPU = registry.get("flydsl").unavailable()
needs_sim = pytest.mark.skipif(SIM_MISSING is not None, reason=f"simulator: {SIM_MISSING}")


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def words(result) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["check"], ["doctor"], ["explain"], ["sim"], ["bench"], ["bench", "sim"]]
)
def test_every_command_has_help(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_option_is_named_where_it_is_declared():
    """typer 0.27 takes the name from metavar where it is the parameter's but for case: `arch` becomes `--ARCH`. Up to
    0.26, a parameter in capitals is handed over in small letters."""
    commands = [*app.registered_commands, *bench_app.registered_commands, app.registered_callback]
    functions: list[Any] = [None if command is None else command.callback for command in commands]
    for function in functions:
        for parameter, kind in typing.get_type_hints(function, include_extras=True).items():
            for declared in getattr(kind, "__metadata__", ()):
                if isinstance(declared, OptionInfo):
                    # Within Annotated, Option's first argument is the first name.
                    assert str(declared.default).startswith("-"), f"{function.__name__}: {parameter}"
            assert parameter == parameter.lower(), f"{function.__name__}: {parameter}"


def test_help_imports_no_dsl_and_no_model_library():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from fourwave.cli.app import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "heavy = {'flydsl', 'cutlass', 'transformers', 'fourwave.sim', 'fourwave.demo', 'fourwave.perf'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_version():
    assert invoke("--version").output.startswith("fourwave ")


def test_a_pipe_gets_no_colour_and_wide_lines():
    run = subprocess.run(
        [sys.executable, "-m", "fourwave.cli", "doctor"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout
    assert max(map(len, run.stdout.splitlines())) > 80


def test_json_to_a_folder_that_is_not_there_is_an_error(tmp_path):
    """Told before anything ran."""
    for command in (["doctor"], ["check", "gemm"]):
        result = invoke(*command, "--json", str(tmp_path / "no" / "file.json"))
        assert result.exit_code == 2 and "cannot write" in words(result) and "python" not in words(result).split()


def test_check_of_an_arch_that_has_one_subject():
    for subject in ("gemm", "grouped", "quantize"):
        result = invoke("check", subject, "--arch", "gfx1250")
        assert result.exit_code == 2 and "fourwave check mxfp4" in words(result)


@needs_sim
def test_explain_of_both_mixes_and_both_names_of_blocks():
    for dtype in ("mxfp8_mxfp4", "mxfp4_mxfp8"):
        result = invoke("explain", "gemm", "64", "64", "256", "--dtype", dtype, "--backend", "sim:gfx950")
        assert result.exit_code == 0 and "cdna4.py for gfx950" in words(result)
    told = [
        invoke("explain", "grouped", "64", "128", "256", "--dtype", dtype, "--backend", "sim:gfx950").output
        for dtype in ("fp8", "fp8_1x128")
    ]
    assert told[0] == told[1]


# doctor


def test_doctor_names_versions_backends_and_reasons(tmp_path):
    path = tmp_path / "doctor.json"
    result = invoke("doctor", "--json", str(path))
    assert result.exit_code == 0
    record = json.loads(path.read_text())
    assert record["packages"]["torch"] == torch.__version__
    assert record["backends"]["native"] == {"usable": True, "reason": None}
    for name in registry.names():
        assert record["backends"][name]["reason"] == registry.get(name).unavailable()
    if record["backends"]["flydsl"]["usable"] is False:
        assert record["backends"]["flydsl"]["reason"]


def test_doctor_survives_missing_and_broken_parts(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("this part is broken")

    monkeypatch.setattr(doctor, "PACKAGES", (("no-such-package", "nothing"),))
    monkeypatch.setattr(doctor, "tools", lambda: {"C compiler": None, "lld": ["no-such-linker"]})
    monkeypatch.setattr(doctor, "gpus", broken)
    monkeypatch.setattr(doctor, "cpu", broken)
    monkeypatch.setattr(registry, "get", broken)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert (
        "not installed" in result.output
        and "none: no $CC, cc" in words(result)
        and "FileNotFoundError" in words(result)
    )
    assert words(result).count("this part is broken") >= 2 + len(registry.names())


# explain


def test_explain_says_what_runs_and_why_others_do_not():
    result = invoke("explain", "gemm", "64", "96", "32", "--backend", "native", "--dtype", "fp16", "--layout", "nt")
    assert result.exit_code == 0
    assert "64x96x32 NT fp16" in result.output and "torch.mm" in result.output
    assert "sim:gfx942" in result.output and "flydsl" in result.output


def test_explain_a_simulated_backend_names_kernel_and_config():
    result = invoke("explain", "gemm", "64", "96", "32", "--backend", "sim:gfx942")
    if registry.get("sim:gfx942").unavailable():
        assert result.exit_code == 2 and "BackendUnavailable" in result.output
    else:
        assert result.exit_code == 0
        assert "cdna3.py" in result.output and "tile" in result.output


@needs_sim
@pytest.mark.parametrize("arch", ARCHS)
def test_explain_says_that_batch_invariant_keeps_k_whole(arch):
    call = ("explain", "gemm", "1", "1280", "8192", "--backend", f"sim:{arch}")
    split, whole = words(invoke(*call)), words(invoke(*call, "--batch-invariant"))
    assert re.search(r"config .*, K split in \d+", split) and "batch_invariant would keep K whole" in split
    assert "K split in" not in whole and "batch_invariant: K is not split" in whole


@needs_sim
@pytest.mark.parametrize("layout", ["TN", "NT"])
def test_explain_grouped_counts_the_steps_of_uneven_groups(layout, tmp_path):
    sizes = ["16384", "4096", "4096"] if layout == "TN" else ["4096", "4096", "16384"]
    options = ["--dtype", "fp8", "--layout", layout, "--backend", "sim:gfx942", "--json", str(tmp_path / "told.json")]
    result = invoke("explain", "grouped", *sizes, *options)
    assert result.exit_code == 0 and "cdna3.py for gfx942" in words(result) and "32 groups" in words(result)
    equal, uneven = json.loads((tmp_path / "told.json").read_text())["busiest_unit_steps"]
    assert f"{equal} with equal groups, {uneven} with half of all rows in one" in words(result)
    assert 0 < equal <= uneven <= 1.25 * equal


@needs_sim
@pytest.mark.slow
def test_explain_grouped_shows_what_the_compiler_made(tmp_path):
    out = tmp_path / "told.json"
    result = invoke(
        "explain",
        "grouped",
        "--isa",
        "--arch",
        "gfx942",
        "--dtype",
        "fp8",
        "--layout",
        "TN",
        "--waits",
        "--json",
        str(out),
    )
    assert result.exit_code == 0, result.output
    kernels = json.loads(out.read_text())["kernels"]
    assert len(kernels) == 2 and "preshuffled" in kernels[1]["problem"]
    for kernel in kernels:
        assert kernel["vgpr_spills"] == kernel["sgpr_spills"] == 0 and kernel["main_loop"]["mfma"] > 0
        assert kernel["LDS cycles lost to bank conflicts (simulated)"] == "0"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["conv", "1", "1", "1"], "choose from gemm, grouped"),
        (["gemm", "1", "2", "3", "--groups", "4"], "--groups goes with grouped"),
        (["grouped", "--dtype", "fp8"], "give M, N and K"),
        (["grouped", "1", "2", "3", "--dtype", "fp32"], "choose from bf16, fp16, fp8, fp8_1x128, fp8_tensor, mxfp8"),
        (["gemm"], "give M, N and K"),
        (["gemm", "1", "2"], "give M, N and K"),
        (["gemm", "1", "2", "3", "--layout", "TT"], "choose from TN, NN, NT"),
        (["gemm", "1", "2", "3", "--dtype", "int8"], "choose from bf16, fp16, fp32"),
        (["gemm", "1", "2", "3", "--backend", "nonsense"], "nonsense"),
        (["gemm", "1", "2", "3", "--arch", "gfx950"], "--arch gfx950 goes with --isa"),
        (["gemm", "--isa", "--arch", "gfx90a"], "choose from gfx950, gfx942"),
        (["gemm", "--isa", "--arch", "gfx1250"], "choose from gfx950, gfx942"),
        (["gemm", "--dtype", "mxfp4", "--schedule"], "goes with --arch gfx1250"),
        pytest.param(["gemm", "--schedule", "--arch", "gfx1250"], "takes MXFP4", marks=needs_sim),
        (["gemm", "1", "2", "3", "--svg", "x.svg"], "--svg goes with --schedule"),
        (["gemm", "--isa", "--backend", "sim:gfx942"], "--isa compiles for what --arch names"),
        (["grouped", "--isa", "--backend", "native"], "--isa compiles for what --arch names"),
        (["gemm", "--schedule", "--arch", "gfx1250", "--backend", "sim"], "--schedule simulates for what --arch names"),
        (["gemm", "--schedule", "--arch", "gfx1250", "--json", "x.json"], "--json goes with"),
        (["grouped", "1", "2", "3", "--schedule"], "--schedule goes with gemm"),
        (["grouped", "1", "2", "3", "--batch-invariant"], "--batch-invariant goes with gemm"),
    ],
)
def test_explain_refuses_what_it_cannot_answer(arguments, said):
    result = invoke("explain", *arguments)
    assert result.exit_code == 2
    assert said in words(result)


# check


def pretend_to_simulate(findings=()):
    """What a simulated call leaves in the process-wide report."""
    launch = sim.Launch("kernel", "gfx950", (4, 1, 1), (256, 1, 1), 4, 0, 0.01, {})
    sim.current_report().add(sim.Report([launch], list(findings)))


@needs_sim
def test_check_fails_when_nothing_was_simulated(monkeypatch):
    monkeypatch.setattr(GemmCase, "run", lambda case, backend, **options: CaseResult(0.25, (0, 0), None))
    result = invoke("check", "--arch", "gfx950", "--layout", "tn", "--dtype", "fp16")
    assert result.exit_code == 1 and "no workgroup was simulated" in words(result)


@needs_sim
@pytest.mark.parametrize("raised", [False, True])
def test_check_fails_when_the_simulator_finds_something(monkeypatch, raised):
    finding = sim.Finding("race", "two waves, one place", "kernel.py", 7, "kernel", 0, 1, 2, 64, 3)

    def run(case, backend, **options):
        pretend_to_simulate([finding] if case.shape.name == "K = 1" else ())
        if raised and case.shape.name == "K = 1":
            raise sim.SimulationError(sim.Report([], [finding]))
        return CaseResult(0.25, (0, 0), None)

    monkeypatch.setattr(GemmCase, "run", run)
    result = invoke("check", "--arch", "gfx942", "--layout", "nn", "--dtype", "fp16")
    assert result.exit_code == 1
    assert "1 failed" in words(result) and "1 findings" in words(result)
    assert ("kernel.py:7: race: two waves" in words(result)) is raised


@needs_sim
def test_check_simulates_for_real(monkeypatch):
    rows = check.rows_of
    monkeypatch.setattr(check, "rows_of", lambda *options: itertools.islice(rows(*options), 3))
    result = invoke("check", "--layout", "TN", "--dtype", "fp16")
    assert result.exit_code == 0, result.output
    assert "6 rows, 6 passed, 0 failed" in words(result) and " 0 findings" in words(result)


@needs_sim
@pytest.mark.slow
def test_check_passes_on_every_kernel(tmp_path):
    path = tmp_path / "check.json"
    result = invoke("check", "--arch", "gfx950", "--arch", "gfx942", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    planned = [check_plan.rows("gemm", arch, LAYOUTS, check_plan.DEFAULT_PRECISIONS, False, 0) for arch in ARCHS]
    assert len(rows) == sum(len(list(each)) for each in planned)
    assert all(row["passed"] and row["workgroups"] for row in rows)


@needs_sim
def test_bench_sim_times_a_right_product_and_says_what_it_is(tmp_path):
    path = tmp_path / "bench.json"
    result = invoke("bench", "sim", "--repeats", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "not the speed of any GPU" in words(result)
    record = json.loads(path.read_text())
    assert record["workgroups"] == 4 and record["shape"] == [512, 512, 1024]
    assert len(record["call_seconds"]) == 3 and min(record["launch_seconds"]) > 0


@needs_sim
@pytest.mark.slow
@pytest.mark.parametrize(
    "subject",
    [
        pytest.param(["gemm", "--dtype", "all"], marks=pytest.mark.exhaustive),
        ["quantize"],
        pytest.param(
            ["grouped"], marks=pytest.mark.exhaustive
        ),  # the rows are those of tests/grouped/test_grouped_amd.py
    ],
    ids=" ".join,
)
def test_check_passes_on_all(subject, tmp_path):
    path = tmp_path / "check.json"
    result = invoke("check", *subject, "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert {row["arch"] for row in rows} == set(ARCHS)
    assert all(row["passed"] and row["workgroups"] for row in rows)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("full", [False, True])
def test_check_covers_every_layout_precision_shape_class_config_and_output(arch, full):
    rows = list(check_plan.rows("gemm", arch, LAYOUTS, check_plan.PRECISIONS, full, seed=0))
    assert len({(row.case, row.config) for row in rows}) == len(rows)
    assert [str(row.case) for row in rows if why_unsupported(row.case.problem, row.config, arch)] == []
    for layout in LAYOUTS:
        for precision in check_plan.PRECISIONS:
            here = [row for row in rows if row.case.layout == layout and row.case.problem.precision == precision]
            pairs = {(row.case.a_format, row.case.b_format, row.case.dtype, row.case.b_dtype) for row in here}
            assert len(pairs) == {"fp8": 7 if layout == "TN" else 6, "mxfp8": 4}.get(precision, 1)
            for pair in pairs:
                shapes = {
                    row.case.shape
                    for row in here
                    if (row.case.a_format, row.case.b_format, row.case.dtype, row.case.b_dtype) == pair
                }
                assert shapes >= set(GEMM_SHAPES)
            if precision != "fp16" or full:
                ran = {row.config or default_config(row.case.problem, arch)[0] for row in here}
                assert ran >= set(candidates_for(here[0].case.problem, arch))
            cases = [row.case for row in here]
            assert any(case.accumulate for case in cases) and any(case.bias_dtype for case in cases)
            assert any(case.activation == "swiglu" for case in cases) and any(case.preactivation for case in cases)
            assert any(case.bias_grad for case in cases) is (layout == "NT")
            assert any(case.batch_invariant for case in cases)
            assert {case.a_view for case in cases} == {"contiguous", "sliced", "offset", "transposed"}
            if layout == "TN":
                assert {case.out_direction for case in cases if case.out_format} == {"rowwise", "columnwise", "both"}


@needs_sim
@pytest.mark.parametrize(
    ("dtype", "backend", "said"),
    [
        ("fp8", "sim:gfx942", "e4m3fnuz (tensor) x e4m3fnuz (tensor)"),
        ("fp8_1x128", "sim:gfx950", "e4m3fn (1x128) x e4m3fn (128x128)"),
        ("mxfp8", "sim:gfx942", "e4m3fn (1x32) x e4m3fn (1x32)"),
        ("mxfp4", "sim:gfx1250", "ops/gemm/gfx1250.py"),
        ("bf16_mxfp4", "sim:gfx1250", "128x256x128"),
    ],
)
def test_explain_takes_quantized_operands(dtype, backend, said):
    result = invoke("explain", "gemm", "512", "4096", "4096", "--dtype", dtype, "--backend", backend)
    assert result.exit_code == 0 and said in words(result)


@needs_sim
@pytest.mark.slow
def test_explain_of_mxfp4_shows_one_lds_for_every_k(tmp_path):
    path = tmp_path / "isa.json"
    options = ["--isa", "--dtype", "mxfp4", "--arch", "gfx1250", "--layout", "TN", "--json", str(path)]
    result = invoke("explain", "gemm", *options)
    assert result.exit_code == 0, result.output
    (kernel,) = json.loads(path.read_text())["kernels"]
    assert kernel["LDS bytes, K = 1024"] == kernel["LDS bytes, K = 65536"] == str(kernel["lds_bytes"]) == "137728"
    assert kernel["vgpr_spills"] == kernel["sgpr_spills"] == kernel["scratch_bytes"] == 0
    assert kernel["each step of 128 k: matrix instructions"] == "64"
    assert kernel["  tiles of the data mover that a wave issues"] == kernel["  waits for the data mover"] == "1"
    assert "16x16x128" in result.output


@needs_sim
@pytest.mark.slow
def test_check_mxfp4_passes(tmp_path):
    path = tmp_path / "check.json"
    result = invoke("check", "mxfp4", "--arch", "gfx1250", "--layout", "NN", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert all(row["passed"] and row["workgroups"] for row in rows)


@pytest.mark.parametrize("full", [False, True])
def test_check_of_mxfp4_covers_depths_outputs_tails_and_exact_sums(full):
    cases = [row.case for row in check_plan.rows("mxfp4", "gfx1250", LAYOUTS, (), full, seed=0)]
    assert len(set(cases)) == len(cases)
    quantized = [case for case in cases if isinstance(case, QuantizeCase)]
    assert any(case.rounding_seed and case.hadamard == "both" for case in quantized)
    assert {case.dtype for case in quantized} == {torch.bfloat16, torch.float16, torch.float32}
    cases = [case for case in cases if isinstance(case, GemmCase)]
    for layout in LAYOUTS:
        here = [case for case in cases if case.layout == layout]
        packed = [case for case in here if (case.a_format, case.b_format) == ("mxfp4", "mxfp4")]
        assert {case.shape.K for case in packed if (case.shape.M, case.shape.N) == (256, 256)} >= {
            128, 384, 1024, 1152, 8192
        }  # fmt: skip
        for K in (128, 384, 1024, 1152, 8192) if full else (1152,):
            assert len({case.written for case in packed if (case.shape.M, case.shape.K) == (256, K)}) == 3
        assert any(case.shape.M % 256 and case.shape.N % 256 and case.shape.K % 128 for case in packed)
        assert any(case.shape.M == 1 for case in packed) is (layout != "NT")
        assert any(case.bias_dtype and case.activation for case in packed) and any(case.accumulate for case in packed)
        assert any(isinstance(case, ExactScales) for case in packed)
        assert any(case.activation == "swiglu" for case in packed)
        mixes = {("mxfp8_e4m3", "mxfp4"), ("mxfp4", "mxfp8_e5m2"), ("mxfp8_e5m2", "mxfp8_e4m3")}
        assert mixes <= {(case.a_format, case.b_format) for case in here}


@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_check_of_mxfp4_asks_for_nothing_that_is_refused(arch):
    planned = [
        row for row in check_plan.rows("mxfp4", arch, LAYOUTS, (), False, seed=0) if isinstance(row.case, GemmCase)
    ]
    assert [str(row.case) for row in planned if why_unsupported(row.case.problem, row.config, arch)] == []
    assert {config for row in planned if (config := row.config) is not None}
    bf16 = {row.case.layout for row in planned if (row.case.a_format, row.case.b_format) == (None, "mxfp4")}
    assert bf16 == {"TN", "NN"}


@needs_sim
@pytest.mark.parametrize("which", [0, 1])
def test_exact_scales_show_one_scale_that_is_wrong(monkeypatch, which):
    """One of 2 x 256 x 12 scales, or of the ones."""
    case = ExactScales(Shape("", 256, 256, 384), a_format="mxfp4", b_format="mxfp4", out_dtype=torch.float32)
    assert case.run("native").ratio == 0
    right = ExactScales.operands

    def wrong(self, device="cpu"):
        pair = right(self, device)
        operand = pair[which]
        assert isinstance(operand, QuantizedTensor) and operand.scale is not None
        operand.scale.view(torch.uint8)[200, 7] += 1
        return pair

    monkeypatch.setattr(ExactScales, "operands", wrong)
    assert case.run("native").ratio == math.inf


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (CaseResult(1.5, (0, 0), None), "error is 1.5 times the bound"),
        (CaseResult(float("inf"), (0, 0), None), "inf times the bound"),
        (CaseResult(0.1, (0, 0), "3 guard bytes were overwritten"), "3 guard bytes were overwritten"),
        (NotImplementedError("no such kernel"), "NotImplementedError: no such kernel"),
    ],
)
@needs_sim
def test_check_fails_when_a_row_does(monkeypatch, tmp_path, outcome, said):
    def run(case, backend, **options):
        pretend_to_simulate()
        if case.shape.name != "M = 1":
            return CaseResult(0.25, (0, 0), None)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(GemmCase, "run", run)
    path = tmp_path / "check.json"
    result = invoke("check", "--arch", "gfx950", "--layout", "NT", "--dtype", "bf16", "--json", str(path))
    assert result.exit_code == 1
    assert "1 failed" in words(result) and said in words(result)
    rows = json.loads(path.read_text().replace("Infinity", "1e999"))["rows"]
    assert [row["case"].startswith("M = 1") for row in rows] == [not row["passed"] for row in rows]


@needs_sim
def test_check_passes_when_every_row_does(monkeypatch):
    def run(case, backend, **options):
        pretend_to_simulate()
        return CaseResult(0.25, (0, 0), None)

    monkeypatch.setattr(GemmCase, "run", run)
    result = invoke("check", "--layout", "tn")
    assert result.exit_code == 0
    assert "0 failed; largest error over bound 0.250; 0 findings" in words(result)
    assert "gfx950: ops/gemm/cdna4.py" in result.output and "gfx942: ops/gemm/cdna3.py" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "gfx1250"], "fourwave check mxfp4"),
        (["--arch", "gfx90a"], "choose from gfx950, gfx942"),
        (["--layout", "TT"], "choose from TN, NN, NT"),
        (["--dtype", "int8"], "choose from bf16, fp16, fp32, fp8, mxfp8, all"),
        (["nothing"], "choose from gemm, mxfp4, quantize, grouped"),
        (["quantize", "--layout", "TN"], "has a list of its own"),
        (["grouped", "--full"], "--full goes with gemm and mxfp4"),
        (["quantize", "--full"], "--full goes with gemm and mxfp4"),
        (["mxfp4", "--dtype", "bf16"], "has a list of its own"),
        (["mxfp4", "--arch", "gfx942"], "choose from gfx1250, gfx950"),
        (["--backend", "native"], "choose from sim, flydsl"),
    ],
)
def test_check_refuses_unknown_words(arguments, said):
    result = invoke("check", *arguments)
    assert result.exit_code == 2 and said in words(result)


@pytest.mark.skipif(NO_GPU is None, reason="an AMD GPU is here: check would run on it")
def test_check_on_the_gpu_says_what_is_missing():
    result = invoke("check", "--backend", "flydsl")
    missing = registry.get("flydsl").unavailable()  # by now CuTe DSL may have been loaded in this process
    assert result.exit_code == 2 and str(missing) in words(result)


# progress


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    now = iter([0.0, 1.0, 16.0, 17.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now))
    steps = console.PlainSteps("work")
    steps.start(3)
    for name in ("one", "two", "three"):
        steps.done(name)
    assert capsys.readouterr().err.strip() == "work: 2 of 3, 16 s  two"


def test_lists_with_commas() -> None:
    from fourwave.cli import names

    assert names.archs(["gfx942,gfx950"]) == ["gfx942", "gfx950"]
    assert names.layouts(["nt, TN", "NN"]) == ["NT", "TN", "NN"]
    assert names.split(["fp8,mxfp8", "bf16"]) == ["fp8", "mxfp8", "bf16"]
    result = invoke("check", "--dtype", "fp8,int8")
    assert result.exit_code == 2 and "'int8'" in result.output
    result = invoke("check", "gemm,quantize")
    assert result.exit_code == 2 and "choose from" in result.output
