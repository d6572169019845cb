"""A record of faults is kept for as long as what it depends on stays: neither comments nor moved lines change a fingerprint, all else does."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import faults
import pytest
import torch
from every_kernel import KernelCall

from fourwave import sim
from fourwave.sim import harness
from fourwave.sim.program import Builder, Instruction

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

EXAMPLE = Path(__file__).parents[2] / "examples" / "missing_wait_fixed.py"
WAIT = "fx.rocdl.s_waitcnt(vmcnt=1)"
COMMENT = "fetch(fx.Int32(0))", "# The first tile,\n    # before the loop.\n    fetch(fx.Int32(0))"


AGAIN = (
    "        results = yield sums",
    "        fx.rocdl.s_waitcnt(vmcnt=2)\n        results = yield sums",
)  # nothing needs it


def kernel(folder: Path, name: str, old: str = "", new: str = "") -> ModuleType:
    """The example's kernel with one wait too many, and with `new` in place of `old`."""
    text, _, _ = EXAMPLE.read_text(encoding="utf-8").partition("\nx = torch.randint(")
    text = text.replace(*AGAIN)
    assert text.count(old or AGAIN[1]) == 1
    file = folder / f"{name}.py"
    file.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(tiles: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    x = (torch.arange(tiles * 1024, dtype=torch.float32) * 37 % 101).view(tiles, 1024)
    return x, torch.full((1024,), float("nan"))


def prints(module: ModuleType, x: torch.Tensor, y: torch.Tensor, tiles: int = 6) -> harness.Fingerprints:
    kept = harness.Fingerprints()
    with sim.session(harness=kept, threads=1):
        module.add_tiles(x.view(-1), y, tiles)
    assert len(kept.launches) == 1
    return kept


def test_what_a_fingerprint_depends_on(tmp_path: Path) -> None:
    usual = kernel(tmp_path, "usual")
    first = prints(usual, *inputs())
    assert prints(usual, *inputs()).launches == first.launches, "other addresses"
    commented = prints(kernel(tmp_path, "commented", *COMMENT), *inputs())
    assert commented.launches == first.launches
    place, other = (p.places["add_tiles_kernel_0", "vmcnt one higher #0"] for p in (first, commented))
    assert other[0][1] == place[0][1] + 2 and other[0][0].endswith("commented.py")

    x, y = inputs()
    changed = [
        prints(kernel(tmp_path, "loosened", WAIT, "fx.rocdl.s_waitcnt(vmcnt=3)"), x, y),
        prints(kernel(tmp_path, "shifted", "TILE - 1 - thread * WIDTH", "TILE - thread * WIDTH"), x, y),
        prints(kernel(tmp_path, "gridded", "grid=(1, 1, 1)", "grid=(2, 1, 1)"), x, y),
        prints(usual, x.flip(0), torch.full((1024,), float("nan"))),
        prints(usual, x, torch.zeros(1024)),
        prints(usual, x, torch.full((1024,), float("nan")), 5),
        prints(usual, x[:5], torch.full((1024,), float("nan")), 5),
    ]
    assert len({p.launches[0] for p in [first, *changed]}) == 8


def test_a_branch_on_another_register_is_another_program(tmp_path: Path) -> None:
    found: list[tuple[str, str]] = []

    def look(name: str, key: Any, prepare: Any, simulate: Any, memory: Any) -> Any:
        builder, facts = prepare()

        def other_condition(builder: Builder) -> None:
            block, branch = next((b, i) for b in builder.blocks for i in b.code if i.op == "BRANCH")
            new = Instruction("BRANCH", branch.line, [branch.args[0] - 1, *branch.args[1:]])
            block.code = [new if i is branch else i for i in block.code]

        usual = harness.launch_fingerprint(builder, facts, simulate)
        with builder.edited(other_condition):
            found.append((usual, harness.launch_fingerprint(builder, facts, simulate)))
        assert harness.launch_fingerprint(builder, facts, simulate) == usual
        return simulate(builder.encode(**facts))

    x, y = inputs()
    with sim.session(harness=look):
        kernel(tmp_path, "branching").add_tiles(x.view(-1), y, 6)
    assert found and found[0][0] != found[0][1]


def test_the_simulators_own_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "sim"
    shutil.copytree(Path(harness.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__"))

    def edit(name: str, old: str, new: str) -> str:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        try:
            return harness.simulator_fingerprint.__wrapped__(folder)
        finally:
            (folder / name).write_text(text, encoding="utf-8")

    usual = harness.simulator_fingerprint()
    assert edit("core.c", "static void run_wave(", "/* A note. */\n\nstatic void run_wave(") == usual
    assert edit("mutate.py", "def _index(", "# A note.\ndef _index(") == usual
    assert edit("mutate.py", '"""Remove one barrier."""', '"""Take one barrier away."""') == usual
    assert edit("report.py", "put the write's wait", "put that write's wait") == usual
    assert edit("counters.h", "banks = g->launch->lds_banks", "banks = 2 * g->launch->lds_banks") == usual
    assert edit("core.c", "w->lds_done = w->lds_seq;", "w->lds_done = w->lds_seq - 1;") != usual
    assert edit("gfx1250.h", "g->counters", "g -> counters") != usual
    assert edit("ops.def", 'OP(FENCE, "ii")', 'OP(FENCE, "iii")') != usual
    assert edit("mutate.py", "n + 16", "n + 32") != usual


def test_a_run_tries_again_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "record.jsonl"

    def run(name: str, *edit: str) -> tuple[int, str, dict[str, Any]]:
        module = kernel(tmp_path, name, *edit)

        def call() -> list[str]:
            x, y = inputs()
            with sim.session():
                module.add_tiles(x.view(-1), y, 6)
            return [] if torch.equal(y, x.flip(1).sum(0)) else ["wrong"]

        monkeypatch.setattr(faults, "calls", lambda arch: [KernelCall("add", arch, call)] if arch == "gfx950" else [])
        monkeypatch.setattr(faults, "sources", lambda: name)
        monkeypatch.setattr("sys.argv", ["faults.py", "--record", str(kept), "--commit", name])
        status = faults.main()
        rows = kept.read_text(encoding="utf-8").splitlines()
        return status, capsys.readouterr().out, json.loads(rows[-1])

    status, told, row = run("usual")
    assert "(1 tried now)" in told and (row["tried"], row["holds"]) == ("usual", "usual") and row["faults"] > 10
    again = run("usual")
    assert "(0 tried now)" in again[1] and again[0] == status and again[2] == row
    _, told, moved = run("commented", *COMMENT)
    assert "(0 tried now)" in told and (moved["tried"], moved["holds"]) == ("usual", "commented")
    for before, after in zip(row["survivors"], moved["survivors"], strict=True):
        assert (
            after["fault"] == before["fault"] and after["text"] == before["text"] and after["lines"] != before["lines"]
        )
    assert {s["fault"].split(" #")[0] for s in row["survivors"]} >= {"vmcnt one higher", "vmcnt dropped"}
    status, told, row = run("loosened", WAIT, "fx.rocdl.s_waitcnt(vmcnt=0)")
    assert "(1 tried now)" in told and row["tried"] == "loosened"
