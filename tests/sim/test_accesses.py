"""What the simulator tells of accesses beside their bounds: alignment, outputs that nothing wrote, instructions and lines of memory counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from machine import PROLOGUE, launch, lower, only, words

from fourwave import sim
from fourwave.sim.launch import Memory, Options
from fourwave.sim.launch import run as run_program

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

# Lane i's 16 bytes begin at byte %at = 16 * i + shift.
AT = """
  %c16 = llvm.mlir.constant(16 : i32) : i32
  %shift = llvm.mlir.constant(SHIFT : i32) : i32
  %scaled = llvm.mul %tid, %c16 : i32
  %at = llvm.add %scaled, %shift : i32
"""
LDS = """
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %p = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  %v = llvm.mlir.constant(dense<7> : vector<4xi32>) : vector<4xi32>
  llvm.store %v, %p STATED : vector<4xi32>, !llvm.ptr<3>
  %r = llvm.load %p STATED : !llvm.ptr<3> -> vector<4xi32>
"""
GLOBAL = """
  %p = llvm.getelementptr %x[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %v = llvm.load %p STATED : !llvm.ptr<1> -> vector<4xi32>
  llvm.store %v, %p STATED : vector<4xi32>, !llvm.ptr<1>
"""


@pytest.mark.parametrize("shift", [0, 4, 8, 16])
@pytest.mark.parametrize(
    ("stated", "alignment"), [("", 16), ("{alignment = 8 : i64}", 8), ("{alignment = 4 : i64}", 4)]
)
@pytest.mark.parametrize("where", ["lds", "global"])
@pytest.mark.parametrize("arch", sim.ARCHS)
def test_an_access_that_is_not_aligned_as_it_states(
    arch: str, where: str, stated: str, alignment: int, shift: int
) -> None:
    """Stated by an attribute, or by the type (16 bytes for a vector of 16)."""
    lanes = 32 if arch == "gfx1250" else 64
    body = PROLOGUE + (AT + (LDS if where == "lds" else GLOBAL)).replace("SHIFT", str(shift)).replace("STATED", stated)
    memory = torch.zeros(1024 + 16 + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    program = lower(body, "%x: !llvm.ptr<1>", lds=1024 + 16, arch=arch)
    wrong = shift % alignment != 0
    report = launch(program, memory.numpy(), block=lanes, expect="memory" if wrong else "")
    if wrong:
        assert len(report.findings) == 2, "the load and the store"
        assert all("alignment" in f.message and f.count == lanes for f in report.findings)
        assert "state the alignment" in str(report.findings[0])


REVERSE = """
import flydsl.compiler as flyc
from flydsl import expr as fx

@flyc.kernel(known_block_size=[64, 1, 1])
def fill_kernel(y: fx.Tensor, first: fx.Int32, last: fx.Int32):
    i = fx.Int32(fx.block_idx.x) * 64 + fx.Int32(fx.thread_idx.x)
    if (i >= first) & (i < last):
        y[i] = fx.Float32(i)

@flyc.jit
def fill(y: fx.Tensor, first: fx.Int32, last: fx.Int32):
    fill_kernel(y, first, last).launch(grid=(4, 1, 1), block=(64, 1, 1))
"""


@pytest.fixture(scope="module")
def fill(tmp_path_factory):
    import importlib.util

    path = tmp_path_factory.mktemp("kernels") / "fill.py"
    path.write_text(REVERSE)
    spec = importlib.util.spec_from_file_location("fill_an_output", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fill


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_an_output_that_is_not_filled(fill, arch):
    y = torch.full((256,), float("nan"))
    report = sim.run(fill, y, 3, 250, arch=arch, outputs=[y])
    finding = only(report)
    assert finding.kind == "init" and finding.count == 9 and finding.address == y.data_ptr()
    assert "9 of the 256 elements of this output, a tensor of (256,): from (0,) to (255,)" in finding.message
    assert str(finding).startswith("outputs[0]: init: no launch wrote 9 of")
    assert f"\n    kernel fill_kernel_0, address {y.data_ptr():#x}; 9 occurrences\n" in str(finding)
    assert "let some workgroup store every element" in str(finding)
    assert int(y.isnan().sum()) == 9
    assert not sim.run(fill, y, 0, 256, arch=arch, outputs=[y]).findings
    assert not sim.run(fill, y, 3, 250, arch=arch, outputs=[y], checks=("memory",)).findings
    with pytest.raises(sim.SimulationError, match="this output"):
        sim.run(fill, y, 3, 250, arch=arch, outputs=[y], on_finding="raise")


# Lane i writes the dword at byte 8 * i.
EIGHT = """
  %c8 = llvm.mlir.constant(8 : i32) : i32
  %at = llvm.mul %tid, %c8 : i32
  %q = llvm.getelementptr %x[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
"""
RSRC = """
  %stride = llvm.mlir.constant(0 : i16) : i16
  %flags = llvm.mlir.constant(159744 : i32) : i32
  %zero = llvm.mlir.constant(0 : i32) : i32
  %records = llvm.mlir.constant(4096 : i64) : i64
  %rsrc = rocdl.make.buffer.rsrc %x, %stride, %records, %flags : !llvm.ptr<1> to <8>
"""
STORES = {
    "global": "  llvm.store %tid, %q : i32, !llvm.ptr<1>",
    "atomic": "  %old = llvm.atomicrmw add %q, %tid monotonic : !llvm.ptr<1>, i32",
    "buffer": RSRC + "  rocdl.raw.ptr.buffer.store %tid, %rsrc, %at, %zero, 0 : i32",
    "buffer atomic": RSRC
    + '  %old = "rocdl.raw.ptr.buffer.atomic.umin"(%tid, %rsrc, %at, %zero) <{aux = 0 : i32}> : (i32, !llvm.ptr<8>, i32, i32) -> i32',
    "from LDS": """
  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>
  %p = llvm.getelementptr %lds[%at] : (!llvm.ptr<3>, i32) -> !llvm.ptr<3>, i8
  llvm.store %tid, %p : i32, !llvm.ptr<3>
  rocdl.s.wait.dscnt 0
  rocdl.global.store.async.from.lds.b32 %q, %p, 0, 0 : !llvm.ptr<1>, !llvm.ptr<3>
  rocdl.s.wait.asynccnt 0""",
}


@pytest.mark.parametrize(
    ("arch", "kind"),
    [(arch, kind) for arch in sim.ARCHS for kind in STORES if arch == "gfx1250" or kind != "from LDS"],
)
def test_every_way_to_store_fills_an_output(arch: str, kind: str) -> None:
    lanes = 32 if arch == "gfx1250" else 64
    program = lower(PROLOGUE + EIGHT + STORES[kind], "%x: !llvm.ptr<1>", lds=1024, arch=arch)
    out = np.zeros(4096, np.uint8)
    arguments, ranges = words(out)
    lo, hi = ranges[0][0] + 8, ranges[0][1]  # the output begins at lane 1's dword
    written = np.zeros(hi - lo, np.uint8)
    memory = Memory(ranges, [(lo, hi, written)])
    report = run_program(program, (1, 1, 1), (lanes, 1, 1), 0, [arguments], memory, Options(threads=1))
    assert not report.findings
    expected = np.zeros(hi - lo, np.uint8)
    for lane in range(1, lanes):
        expected[8 * (lane - 1) : 8 * (lane - 1) + 4] = 1
    np.testing.assert_array_equal(written, expected)


def test_an_output_is_filled_by_all_launches_of_a_session_together(fill):
    y = torch.empty(256)
    with sim.session(outputs=[y]) as report:
        fill(y, 0, 100)
        fill(y, 100, 256)
    assert not report.findings
    with sim.session() as report:
        session = sim.active_session()
        assert session is not None
        session.expect_written(y[:100])
        fill(y, 0, 99)
        fill(y, 100, 256)
    assert "1 of the 100 elements" in only(report).message and only(report).message.endswith(": (99,)")


def test_a_strided_output_has_no_elements_between_its_rows(fill):
    y = torch.empty(256)
    view = y.as_strided((4, 32), (64, 1))  # the second half of each row of 64 is not among its elements
    with sim.session(outputs=[view]) as report:
        fill(y, 0, 225)  # all but the last row's last 31 elements, of which all lie outside or inside the view's row
    assert "no launch wrote" not in str(report)
    with sim.session(outputs=[view]) as report:
        fill(y, 0, 200)
    finding = only(report)
    assert finding.message.endswith("from (3, 8) to (3, 31)") and finding.count == 24
    assert finding.address == y.data_ptr() + 4 * 200


@pytest.mark.parametrize(("stride", "lines", "ideal"), [(4, 2, 2), (16, 8, 2), (128, 64, 2), (132, 64, 2), (0, 1, 2)])
def test_lines_of_global_memory_are_counted(stride: int, lines: int, ideal: int) -> None:
    """64 lanes of 4 bytes: 2 lines of 128 bytes where they are neighbours; where they lie apart, up to one a lane."""
    body = (
        PROLOGUE
        + f"""
  %stride = llvm.mlir.constant({stride} : i32) : i32
  %at = llvm.mul %tid, %stride : i32
  %p = llvm.getelementptr %x[%at] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i8
  %v = llvm.load %p : !llvm.ptr<1> -> i32
  %q = llvm.getelementptr %x[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, i32
  llvm.store %v, %q : i32, !llvm.ptr<1>"""
    )
    memory = np.zeros(64 * 132 + 128, np.uint8)
    memory = memory[-memory.ctypes.data % 128 :]
    counters = (
        launch(lower(body, "%x: !llvm.ptr<1>", arch="gfx950"), memory, checks=("memory",), count_bank_conflicts=True)
        .launches[0]
        .counters
    )
    assert counters["global_lines"] == lines + 2 and counters["global_lines_ideal"] == ideal + 2
    assert counters["global_instructions"] == 2 and counters["lds_instructions"] == 0


COUNTED = {
    "valu": ("%f{0} = llvm.add %v, %v : i32\n  llvm.store %f{0}, %lds : i32, !llvm.ptr<3>", {"valu": 1, "lds": 1}),
    "LDS store": ("llvm.store %v, %lds : i32, !llvm.ptr<3>", {"lds": 1}),
    "LDS atomic": ("%f{0} = llvm.atomicrmw add %lds, %v monotonic : !llvm.ptr<3>, i32", {"lds": 1}),
    "global load": ("%f{0} = llvm.load %x : !llvm.ptr<1> -> i32", {"global": 1}),
    "global atomic": ("%f{0} = llvm.atomicrmw add %x, %v monotonic : !llvm.ptr<1>, i32", {"global": 1}),
    "barrier": ("rocdl.s.barrier", {}),
}


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("arch", ["gfx950", "gfx1250"])
def test_instructions_are_counted_by_what_they_occupy(arch: str, kind: str) -> None:
    """Three more of a kind raise its counter by three, and no other one's."""
    text, each = COUNTED[kind]

    def counters(more: int) -> dict[str, int]:
        body = (
            PROLOGUE + "  %lds = llvm.mlir.addressof @lds : !llvm.ptr<3>\n  %v = llvm.load %x : !llvm.ptr<1> -> i32\n"
        )
        body += "".join(f"  {text.format(n)}\n" for n in range(more))
        program = lower(body, "%x: !llvm.ptr<1>", lds=64, arch=arch)
        lanes = 32 if arch == "gfx1250" else 64
        return launch(program, np.zeros(64, np.uint8), block=lanes, checks=("memory",)).launches[0].counters

    one, four = counters(1), counters(4)
    for name in ("valu", "lds", "global"):
        assert four[f"{name}_instructions"] - one[f"{name}_instructions"] == 3 * each.get(name, 0), name
    assert four["barriers"] - one["barriers"] == 3 * (kind == "barrier")
