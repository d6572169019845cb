"""`fourwave sim --waits`: the counted waits of a script's own kernels against the machine code that FlyDSL makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_tool import EXAMPLES, invoke

from fourwave import sim
from fourwave.perf import waits
from fourwave.sim.flydsl_hook import Kernels
from fourwave.sim.script import execute

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

SCRIPT = """
import flydsl.compiler as flyc
import torch
from flydsl import expr as fx

@fx.struct
class Shared:
    tile: fx.Array[fx.Float32, 256, 16]

def body(x, y, offset, wait):
    lds = fx.SharedAllocator().allocate(Shared).peek()
    thread = fx.Int32(fx.thread_idx.x)
    quads = fx.logical_divide(fx.rocdl.make_buffer_tensor(x, max_size=False), fx.make_layout(4, 1))
    copy = fx.make_copy_atom(fx.rocdl.cdna4.BufferLoadAsyncLDS128b(), fx.Float32)
    fx.copy(copy, fx.slice(quads, (None, thread)), fx.make_view(lds.tile.ptr, fx.make_layout(4, 1)))
    extra = x[thread + offset]
    fx.rocdl.s_waitcnt(vmcnt=wait)  # the wait
    fx.gpu.barrier()
    y[thread] = lds.tile[thread * 4] + extra

@flyc.kernel(known_block_size=[64, 1, 1])
def counting_kernel(x: fx.Tensor, y: fx.Tensor):
    body(x, y, 5, 1)  # the copy and not the load, which comes after it

@flyc.kernel(known_block_size=[64, 1, 1])
def draining_kernel(x: fx.Tensor, y: fx.Tensor):
    body(x, y, 3, 0)

@flyc.jit
def counting(x: fx.Tensor, y: fx.Tensor):
    counting_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

@flyc.jit
def draining(x: fx.Tensor, y: fx.Tensor):
    draining_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

@flyc.jit
def both(x: fx.Tensor, y: fx.Tensor):
    draining_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))
    counting_kernel(x, y).launch(grid=(1, 1, 1), block=(64, 1, 1))

x = torch.arange(256.0).cuda()
y = torch.empty(64).cuda()
"""
LINE = next(n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# the wait"))


def script(folder: Path, calls: str) -> Path:
    path = folder / "counted.py"
    path.write_text(SCRIPT + calls, encoding="utf-8")
    return path


def test_a_load_that_the_compiler_moved_out_of_the_count_is_found(tmp_path):
    """Right as written, so no checker finds it; LLVM issues the load before the copy, and vmcnt(1) leaves the copy in flight."""
    record = tmp_path / "record.json"
    path = script(tmp_path, "counting(x, y)\nassert torch.equal(y, x[::4] + x[5:69])\n")
    plain = invoke(str(path))
    assert plain.exit_code == 0 and "counted waits" not in plain.output, plain.output
    result = invoke("--waits", "--json", str(record), str(path))
    assert result.exit_code == 1, result.output
    assert "1 launches" in result.output and " 0 findings\n" in result.output
    assert f"waits on vmcnt, gfx950 counting_kernel_0: 1 (counted.py:{LINE}); 1 findings" in result.output
    assert f"counted.py:{LINE}: uncovered: vmcnt(1) no longer covers 1 copies to LDS" in result.output
    written, machine = re.findall(r"up to the wait:\n((?: {6}.*\n)+)", result.output)
    assert re.search(r"buffer_load_lds.*\n.*global_load.*\n.*wait vmcnt\(1\)", written)
    assert re.search(r"global_load_dword .*\n.*buffer_load_dwordx4.*lds.*\n.*s_waitcnt vmcnt\(1\)", machine)
    (kept,) = json.loads(record.read_text())["waits"]
    assert (kept["kernel"], kept["counter"], kept["findings"][0]["kind"]) == ("counting_kernel_0", "vmcnt", "uncovered")


def test_every_kernel_that_ran_is_matched_by_its_name(tmp_path):
    result = invoke("--waits", str(script(tmp_path, "draining(x, y)\ndraining(x, y)\n")))
    assert result.exit_code == 0 and "machine code, 1 kernels:" in result.output, result.output
    assert re.search(r"waits on vmcnt, gfx950 draining_kernel_0: 1 \(counted.py:\d+\); 0 findings", result.output)
    result = invoke("--waits", str(script(tmp_path, "both(x, y)\n")))
    assert result.exit_code == 1 and "machine code, 2 kernels:" in result.output, result.output
    found = re.findall(r"waits on vmcnt, gfx950 (\w+?)_kernel_\d+: 1 .*; (\d) findings", result.output)
    assert found == [("draining", "0"), ("counting", "1")]


def test_kernels_of_the_scripts_own_sessions_are_matched(tmp_path):
    calls = "from fourwave import sim\nsim.run(counting, x.cpu(), y.cpu())\n"
    result = invoke("--waits", str(script(tmp_path, calls)))
    assert result.exit_code == 1 and "uncovered" in result.output, result.output


def test_without_code_generation_it_says_so(tmp_path, monkeypatch):
    def fail(kernels):
        raise RuntimeError("code generation failed: no such target")

    monkeypatch.setattr(Kernels, "assembly", fail)
    record = tmp_path / "record.json"
    result = invoke("--waits", "--json", str(record), str(script(tmp_path, "draining(x, y)\n")))
    assert result.exit_code == 1
    assert "not matched: gfx950 draining_kernel_0: code generation failed: no such target" in result.output
    assert json.loads(record.read_text())["waits"][0]["failed"].endswith("no such target")


def test_llvms_options_are_those_of_the_launcher(tmp_path):
    """amdgpu-waitcnt-forcezero waits for everything after every access."""
    texts = []
    for options in ("{}", '{"amdgpu-waitcnt-forcezero": True}'):
        calls = f'counting.compile_hints = {{"llvm_options": {options}}}\ncounting(x, y)\n'
        run = execute(script(tmp_path, calls), [])
        ((kernels, name),) = run.kernels
        texts.append(kernels.assembly())
    assert name == "counting_kernel_0"
    assert texts[0].count("s_waitcnt") < texts[1].count("s_waitcnt")


# A loop that LLVM unrolls


def example(name: str):
    ((kernels, kernel),) = execute(EXAMPLES / f"{name}.py", []).kernels
    return kernels, kernel


def test_an_unrolled_loop_is_followed():
    """One wait in the loop as written, five in machine code: four of the unrolled body, one of the remainder's."""
    kernels, name = example("missing_wait_fixed")
    text = kernels.assembly()
    lines = text.splitlines()
    counted = [n for n, line in enumerate(lines) if re.match(r"\ts_waitcnt.*vmcnt\(1\)", line)]
    assert len(counted) > 2, "LLVM no longer unrolls this loop: choose another"
    (matched,) = waits.match(kernels.text, text, "gfx950", name)
    assert matched.counter == "vmcnt" and len(matched.places) == 2 and not matched.findings, matched.findings
    for at in counted:
        for count, kind in ((2, "uncovered"), (0, "early")):
            changed = [*lines[:at], lines[at].replace("vmcnt(1)", f"vmcnt({count})"), *lines[at + 1 :]]
            (finding,) = waits.check(kernels.text, "\n".join(changed), "gfx950", name)
            assert finding.kind == kind and f"vmcnt({count})" in finding.message, (at, finding)
        (finding, *_) = waits.check(kernels.text, "\n".join([*lines[:at], *lines[at + 1 :]]), "gfx950", name)
        assert finding.kind == "unmatched"


def test_a_copy_of_an_unrolled_loop_that_changes_places_is_found():
    kernels, name = example("missing_wait_fixed")
    lines = kernels.assembly().splitlines()
    wait = [n for n, line in enumerate(lines) if re.match(r"\ts_waitcnt.*vmcnt\(1\)", line)][1]
    copy = max(n for n in range(wait) if re.match(r"\tbuffer_load_dwordx4 .* lds", lines[n]))
    loc = max(n for n in range(copy) if lines[n].startswith("\t.loc"))
    sunk = [*lines[:copy], *lines[copy + 1 : wait + 1], lines[loc], lines[copy], *lines[wait + 1 :]]
    findings = waits.check(kernels.text, "\n".join(sunk), "gfx950", name)
    assert [f.kind for f in findings] == ["uncovered"], findings


def test_a_kernel_that_is_not_there():
    kernels, _ = example("missing_wait_fixed")
    with pytest.raises(ValueError, match="0 kernels named other in the module"):
        waits.match(kernels.text, kernels.assembly(), "gfx950", "other")
    with pytest.raises(ValueError, match="no kernel named other in the assembly"):
        waits.read_assembly(kernels.assembly(), kernel="other")
