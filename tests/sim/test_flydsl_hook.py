"""The hook into FlyDSL: it says when FlyDSL's private names have moved, changes nothing outside a session, and keeps sessions apart."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from fourwave import sim

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

if sim.unavailable() is None:
    import flydsl.compiler as flyc
    import flydsl.expr as fx
    from flydsl.compiler import backends, jit_executor, jit_function
    from flydsl.compiler.backends.rocm import RocmBackend
    from flydsl.expr import meta

    from fourwave.blocks.flydsl.memory import Buffer
    from fourwave.sim import flydsl_hook

    @flyc.kernel
    def scale_kernel(x: fx.Tensor, out: fx.Tensor, factor: fx.Int32, num_bytes: fx.Int64):
        i = fx.Int32(fx.block_idx.x) * 64 + fx.Int32(fx.thread_idx.x)
        value = Buffer(x, 0, num_bytes).load(i * 4, 1, fx.Int32)
        scaled = fx.Vector.filled(1, value[0] * factor, fx.Int32)
        Buffer(out, 0, num_bytes).store(scaled, i * 4)  # the line findings name

    @flyc.jit
    def scale(x: fx.Tensor, out: fx.Tensor, factor: fx.Int32, num_bytes: fx.Int64):
        scale_kernel(x, out, factor, num_bytes).launch(grid=(4, 1, 1), block=(64, 1, 1))


TARGET_VARIABLES = ("FLYDSL_GPU_ARCH", "ARCH", "FLYDSL_DEBUG_ENABLE_DEBUG_INFO", "COMPILE_ONLY")


def operands(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count, dtype=torch.int32), torch.full((count,), -1, dtype=torch.int32)


@pytest.fixture
def installed() -> None:
    with sim.session():
        pass


def test_the_installed_flydsl_is_the_tested_one() -> None:
    assert flydsl_hook.check_flydsl() is None


def test_the_check_holds_after_installation_too(installed: None) -> None:
    assert flydsl_hook.check_flydsl() is None


@pytest.mark.parametrize("version", ["0.4.9", "0.6.0", "1.5.0"])
def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    import flydsl

    monkeypatch.setattr(flydsl, "__version__", version)
    reason = flydsl_hook.check_flydsl()
    assert reason is not None and version in reason and "0.5" in reason


@pytest.mark.parametrize(
    "name",
    [
        "_build_call_spec",
        "_call_state_from_spec",
        "_is_compile_placeholder",
        "_has_live_device_argument",
        "CompiledArtifact",
    ],
)
def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(jit_function, name)
    reason = flydsl_hook.check_flydsl()
    assert reason is not None and name in reason


@pytest.mark.parametrize(
    ("module", "name"), [("jit_executor", "CallState"), ("backends", "_make_backend"), ("meta", "_tls")]
)
def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.delattr({"jit_executor": jit_executor, "backends": backends, "meta": meta}[module], name)
    reason = flydsl_hook.check_flydsl()
    assert reason is not None and name in reason


@pytest.mark.parametrize(
    "name", ["_build_call_spec", "_call_state_from_spec", "_is_compile_placeholder", "_has_live_device_argument"]
)
def test_other_parameters_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def moved(spec: Any, artifact: Any, one_more: Any) -> None: ...

    monkeypatch.setattr(jit_function, name, moved)
    reason = flydsl_hook.check_flydsl()
    assert reason is not None and name in reason


def test_a_session_does_not_open_on_a_flydsl_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flydsl_hook, "_installed", False)
    monkeypatch.delattr(jit_function, "_call_state_from_spec")
    with pytest.raises(RuntimeError, match="_call_state_from_spec"), sim.session():
        pass


def fragments(backend: Any) -> list[str]:
    return backend.pipeline_fragments(compile_hints={})


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_outside_a_session_the_pipeline_is_flydsls_own(installed: None, arch: str) -> None:
    """Same passes, binary step included; inside, all but the binary step. So the two never share a compiled kernel."""
    ours, theirs = backends.get_backend("rocm", arch=arch), RocmBackend(RocmBackend.make_target(arch))
    assert type(ours) is not RocmBackend and isinstance(ours, RocmBackend)
    assert fragments(ours) == fragments(theirs)
    assert any("gpu-module-to-binary" in f for f in fragments(ours))
    with sim.session(arch):
        inside = fragments(backends.get_backend("rocm", arch=arch))
        assert inside == fragments(theirs)[:-1]
    assert not any("gpu-module-to-binary" in f for f in inside)


def test_outside_a_session_cpu_tensors_are_placeholders_again(installed: None) -> None:
    """As in plain FlyDSL: a CPU tensor is no live device argument, and its compile is a compile only."""
    x, _ = operands()
    plain = jit_function._has_live_device_argument._fourwave_original(x)
    assert jit_function._has_live_device_argument(x) == plain == False  # noqa: E712
    placeholder = jit_function._is_compile_placeholder._fourwave_original(x)
    assert jit_function._is_compile_placeholder(x) == placeholder
    with sim.session():
        assert jit_function._has_live_device_argument(x)
        assert not jit_function._is_compile_placeholder(x)
    assert jit_function._has_live_device_argument(x) == plain


def test_a_launch_runs_on_the_tensors_it_is_given() -> None:
    x, out = operands()
    with sim.session() as report:
        scale(x, out, 7, 4 * len(x))
    assert torch.equal(out, x * 7) and not report.findings
    launch = report.launches[0]
    assert launch.kernel.startswith("scale_kernel") and (launch.grid, launch.block, launch.workgroups) == (
        (4, 1, 1),
        (64, 1, 1),
        4,
    )


def test_arguments_are_taken_anew_at_every_call() -> None:
    with sim.session() as report:
        for count, factor in ((200, 2), (10, 3), (256, -5)):
            x, out = operands(count)
            scale(x, out, factor, 4 * count)
            assert torch.equal(out, x * factor)
    assert len(report.launches) == 3 and not report.findings


def test_a_strided_view_is_its_own_allocation() -> None:
    """Bytes outside the view are out of bounds, even inside its storage; bytes between its rows belong to it."""
    storage = torch.arange(400, dtype=torch.int32)
    out = torch.zeros(200, dtype=torch.int32)
    with sim.session() as report:
        scale(storage[100:300], out, 1, 800)
    assert torch.equal(out, storage[100:300]) and not report.findings
    with sim.session() as report:
        scale(storage[100:299], out, 1, 800)
    assert {f.kind for f in report.findings} == {"memory"}
    assert flydsl_hook.tensor_range(storage[:396].view(4, 99)[:, :50]) == (
        storage.data_ptr(),
        storage.data_ptr() + 4 * (3 * 99 + 50),
    )
    lo, hi = flydsl_hook.tensor_range(storage[:0])
    assert lo == hi


def test_findings_name_the_kernels_python_line() -> None:
    x, out = operands()
    with sim.session() as report:
        scale(x, out[:150], 7, 4 * len(x))  # the resource claims more than the tensor has
    (finding,) = report.findings
    lines = open(__file__).read().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the line findings name"))
    assert finding.kind == "memory" and "writes" in finding.message
    places = [(finding.file, finding.line), *finding.stack]
    assert any(os.path.basename(file) == os.path.basename(__file__) and at == line for file, at in places), finding
    assert (finding.workgroup, finding.lane, finding.count) == (2, 150 % 64, 50)


def test_findings_raise_when_asked() -> None:
    x, out = operands()
    with sim.session(on_finding="raise") as report:
        with pytest.raises(sim.SimulationError, match="outside every allocation") as raised:
            scale(x, out[:150], 7, 4 * len(x))
        scale(x, out, 7, 4 * len(x))
    assert torch.equal(out, x * 7)
    assert len(raised.value.report.findings) == 1 and len(report.launches) == 2


def test_nested_sessions_of_two_archs() -> None:
    before = {name: os.environ.get(name) for name in TARGET_VARIABLES}
    x, out = operands()
    with sim.session("gfx950") as outer:
        scale(x, out, 2, 800)
        with sim.session("gfx942") as inner:
            assert os.environ["ARCH"] == os.environ["FLYDSL_GPU_ARCH"] == "gfx942"
            scale(x, out, 3, 800)
            assert torch.equal(out, x * 3)
        assert os.environ["ARCH"] == "gfx950"
        scale(x, out, 4, 800)
    assert torch.equal(out, x * 4)
    assert [launch.arch for launch in outer.launches] == ["gfx950", "gfx950"]
    assert [launch.arch for launch in inner.launches] == ["gfx942"]
    assert {name: os.environ.get(name) for name in TARGET_VARIABLES} == before


def test_the_environment_comes_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARCH", "gfx90a")
    monkeypatch.setenv("COMPILE_ONLY", "1")
    with pytest.raises(KeyError), sim.session("gfx942"):
        assert "COMPILE_ONLY" not in os.environ
        raise KeyError
    assert os.environ["ARCH"] == "gfx90a" and os.environ["COMPILE_ONLY"] == "1"
    assert sim.active_session() is None


def test_a_kernel_compiled_in_a_session_refuses_to_run_outside() -> None:
    x, out = operands()
    with sim.session():
        compiled = flyc.compile(scale, x, out, 7, 800)
        out.fill_(-1)
        compiled(x, out, 7, 800)
    assert torch.equal(out, x * 7)
    with pytest.raises(RuntimeError, match=r"inside `with fourwave\.sim\.session"):
        compiled(x, out, 9, 800)
    assert torch.equal(out, x * 7)
    with sim.session() as report:
        compiled(x, out, 9, 800)
    assert torch.equal(out, x * 9) and len(report.launches) == 1


def test_a_compile_with_cpu_tensors_launches_as_on_a_gpu() -> None:
    """flyc.compile runs its first call; with CPU tensors in plain FlyDSL it would compile only."""
    x, out = operands()
    with sim.session() as report:
        flyc.compile(scale, x, out, 5, 800)
    assert torch.equal(out, x * 5) and len(report.launches) == 1


def test_sessions_belong_to_their_thread() -> None:
    seen: list[Any] = []
    with sim.session():
        thread = threading.Thread(target=lambda: seen.append(sim.active_session()))
        thread.start()
        thread.join()
        assert sim.active_session() is not None
    assert seen == [None]


@pytest.mark.parametrize(("options", "text"), [
    ({"arch": "gfx90a"}, "gfx90a"), ({"arch": "sm_90a"}, "sm_90a"), ({"on_finding": "ignore"}, "on_finding"), ({"checks": ("everything",)}, "checks"),
    ({"completion": "never"}, "completion"), ({"schedule": "random:1"}, "schedule"),
])  # fmt: skip
def test_bad_options_raise_before_anything_runs(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text), sim.session(**options):
        raise AssertionError("the session opened")
    assert sim.active_session() is None
