"""The matrix unit: which register bits of which lane are which element of A, B, C and D, and what the sums give.

Sources
  gfx942 forms: AMD's matrix instruction calculator (github.com/ROCm/amd_matrix_instruction_calculator), architecture CDNA3, options -A, -B,
  -C and -D with --matrix-layout. The closed forms below were compared with all of its tables; SAMPLES holds some of its lines.
  gfx950 forms, which that tool does not know: ROCm/rocm-systems, emulation/rocjitsu, .../amdgpu/shared/mma/layout.h (input_loc,
  output_loc_32), and its golden model amdisa/codegen/cts/mma_layout.py.
  Special values and rounding: mma/arithmetic.h there (IEEE fused multiply-add, nearest even). That subnormals are kept: no guide at hand
  says so for CDNA3 and CDNA4; flushing is documented for MI200 alone (MIOpen, "MI200 matrix fused multiply-add behavior specifics").
  The order of the sums inside one instruction is stated nowhere: tests use exact sums, or a single product.
A reordering of K that is the same in A and B cannot be seen in any product; test_each_slot therefore pins A and B one against the other only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from machine import launch, lower, only

from fourwave.sim import UnknownOperation
from fourwave.sim.lowering import HANDLERS

DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Form:
    name: str
    rows: int  # of A and D; B and D have as many columns
    depth: int  # K
    element: str
    operand: str  # MLIR type of A and B
    archs: tuple[str, ...]

    @property
    def per_lane(self) -> int:
        return self.rows * self.depth // 64

    @property
    def results(self) -> int:
        return self.rows * self.rows // 64

    @property
    def dtype(self) -> Any:
        return DTYPES[self.element]

    def place(self, index: int, k: int) -> tuple[int, int]:
        """Lane and element within the lane's operand of A[index, k], and of B[k, index]."""
        return index + self.rows * (k // self.per_lane), k % self.per_lane

    def result(self, i: int, j: int) -> tuple[int, int]:
        """Lane and register of C[i, j] and D[i, j]."""
        if self.rows == 16:
            return j + 16 * (i // 4), i % 4
        return j + 32 * (i // 4 % 2), 4 * (i // 8) + i % 4

    def spread_a(self, a: np.ndarray) -> np.ndarray:
        """[..., i, k] -> [..., lane, element]."""
        out = np.zeros((*a.shape[:-2], 64, self.per_lane), self.dtype)
        for i in range(self.rows):
            for k in range(self.depth):
                lane, e = self.place(i, k)
                out[..., lane, e] = a[..., i, k]
        return out

    def spread_b(self, b: np.ndarray) -> np.ndarray:
        """[..., k, j] -> [..., lane, element]."""
        return self.spread_a(np.swapaxes(b, -1, -2))

    def spread_c(self, c: np.ndarray) -> np.ndarray:
        out = np.zeros((*c.shape[:-2], 64, self.results), np.float32)
        for i in range(self.rows):
            for j in range(self.rows):
                lane, r = self.result(i, j)
                out[..., lane, r] = c[..., i, j]
        return out

    def gather_d(self, d: np.ndarray) -> np.ndarray:
        out = np.zeros((*d.shape[:-2], self.rows, self.rows), np.float32)
        for i in range(self.rows):
            for j in range(self.rows):
                lane, r = self.result(i, j)
                out[..., i, j] = d[..., lane, r]
        return out

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, arch: str) -> np.ndarray:
        """D of every group: a [G, 64, per_lane], b the same, c [G, 64, results], as registers hold them."""
        groups = len(a)
        out = np.full((groups, 64, self.results), np.nan, np.float32)
        arrays = [np.ascontiguousarray(v) for v in (a, b, c)]
        launch(self.program(arch), *arrays, out, grid=groups)
        return out

    def program(self, arch: str, modifiers: str = "0, 0, none", before: str = "", after: str = "") -> Any:
        """One instruction a workgroup on its own operands. Elements are loaded one by one, so nothing of the packing is taken for granted."""
        body = """
  %tid = rocdl.workitem.id.x : i32
  %gid = rocdl.workgroup.id.x : i32
  %c64 = llvm.mlir.constant(64 : i32) : i32
  %first = llvm.mul %gid, %c64 : i32
  %item = llvm.add %first, %tid : i32"""
        for name, count, t in (
            ("a", self.per_lane, self.element),
            ("b", self.per_lane, self.element),
            ("c", self.results, "f32"),
        ):
            scalar = count == 1
            body += f"\n  %{name}p = llvm.getelementptr %{name}in[%item] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{count} x {t}>"
            if not scalar:
                body += f"\n  %{name}v0 = llvm.mlir.poison : vector<{count}x{t}>"
            for e in range(count):
                body += f"""
  %{name}p{e} = llvm.getelementptr %{name}p[{e}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, {t}
  %{name}e{e} = llvm.load %{name}p{e} : !llvm.ptr<1> -> {t}"""
                if not scalar:
                    body += f"""
  %{name}k{e} = llvm.mlir.constant({e} : i32) : i32
  %{name}v{e + 1} = llvm.insertelement %{name}e{e}, %{name}v{e}[%{name}k{e} : i32] : vector<{count}x{t}>"""
            last = f"%{name}e0" if scalar else f"%{name}v{count}"
            if name == "c":
                body += f"\n  %{name} = llvm.bitcast {last} : vector<{count}xf32> to vector<{count}xf32>"
            else:
                held = t if scalar else f"vector<{count}x{t}>"
                body += f"\n  %{name} = llvm.bitcast {last} : {held} to {self.operand}"
        n = self.results
        body += (
            before
            + f"""
  %d = rocdl.{self.name} %a, %b, %c, {modifiers} : ({self.operand}, {self.operand}, vector<{n}xf32>) -> vector<{n}xf32> loc("kernel.py":40:1)
  %dp = llvm.getelementptr %out[%item] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, !llvm.array<{n} x f32>"""
        )
        for e in range(n):
            body += f"""
  %dk{e} = llvm.mlir.constant({e} : i32) : i32
  %de{e} = llvm.extractelement %d[%dk{e} : i32] : vector<{n}xf32>
  %dp{e} = llvm.getelementptr %dp[{e}] : (!llvm.ptr<1>) -> !llvm.ptr<1>, f32
  llvm.store %de{e}, %dp{e} : f32, !llvm.ptr<1>"""
        return lower(
            body + after, "%ain: !llvm.ptr<1>, %bin: !llvm.ptr<1>, %cin: !llvm.ptr<1>, %out: !llvm.ptr<1>", arch=arch
        )


BOTH, NEW = ("gfx942", "gfx950"), ("gfx950",)
FORMS = [  # operand types: mlir/include/mlir/Dialect/LLVMIR/ROCDLOps.td
    Form("mfma.f32.16x16x4f32", 16, 4, "f32", "f32", BOTH),
    Form("mfma.f32.32x32x2f32", 32, 2, "f32", "f32", BOTH),
    Form("mfma.f32.16x16x16f16", 16, 16, "f16", "vector<4xf16>", BOTH),
    Form("mfma.f32.32x32x8f16", 32, 8, "f16", "vector<4xf16>", BOTH),
    Form("mfma.f32.16x16x16bf16.1k", 16, 16, "bf16", "vector<4xi16>", BOTH),
    Form("mfma.f32.32x32x8bf16.1k", 32, 8, "bf16", "vector<4xi16>", BOTH),
    Form("mfma.f32.16x16x32.f16", 16, 32, "f16", "vector<8xf16>", NEW),
    Form("mfma.f32.16x16x32.bf16", 16, 32, "bf16", "vector<8xbf16>", NEW),
    Form("mfma.f32.32x32x16.f16", 32, 16, "f16", "vector<8xf16>", NEW),
    Form("mfma.f32.32x32x16.bf16", 32, 16, "bf16", "vector<8xbf16>", NEW),
]
CASES = [pytest.param(f, arch, id=f"{f.name}-{arch}") for f in FORMS for arch in f.archs]
each = pytest.mark.parametrize(("form", "arch"), CASES)

# Lines of the calculator's tables: instruction, matrix, lane, then the element in each register (16-bit ones: low half, high half, ...).
SAMPLES = [
    ("mfma.f32.16x16x4f32", "A", 17, [(1, 1)]),
    ("mfma.f32.16x16x4f32", "B", 63, [(3, 15)]),
    ("mfma.f32.16x16x4f32", "D", 33, [(8, 1), (9, 1), (10, 1), (11, 1)]),
    ("mfma.f32.32x32x2f32", "A", 16, [(16, 0)]),
    ("mfma.f32.32x32x2f32", "B", 40, [(1, 8)]),
    ("mfma.f32.16x16x16f16", "A", 16, [(0, 4), (0, 5), (0, 6), (0, 7)]),
    ("mfma.f32.16x16x16f16", "B", 35, [(8, 3), (9, 3), (10, 3), (11, 3)]),
    ("mfma.f32.16x16x16bf16.1k", "A", 1, [(1, 0), (1, 1), (1, 2), (1, 3)]),
    ("mfma.f32.16x16x16bf16.1k", "D", 50, [(12, 2), (13, 2), (14, 2), (15, 2)]),
    ("mfma.f32.32x32x8f16", "A", 33, [(1, 4), (1, 5), (1, 6), (1, 7)]),
    ("mfma.f32.32x32x8bf16.1k", "B", 2, [(0, 2), (1, 2), (2, 2), (3, 2)]),
    ("mfma.f32.32x32x8bf16.1k", "D", 33,
     [(4, 1), (5, 1), (6, 1), (7, 1), (12, 1), (13, 1), (14, 1), (15, 1), (20, 1), (21, 1), (22, 1), (23, 1), (28, 1), (29, 1), (30, 1), (31, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "matrix", "lane", "elements"), SAMPLES)
def test_the_closed_forms_against_the_calculators_lines(
    name: str, matrix: str, lane: int, elements: list[tuple[int, int]]
) -> None:
    form = next(f for f in FORMS if f.name == name)
    for slot, (row, column) in enumerate(elements):
        if matrix == "D":
            assert form.result(row, column) == (lane, slot)
        else:
            assert form.place(*((row, column) if matrix == "A" else (column, row))) == (lane, slot)


def test_the_simulator_knows_these_forms() -> None:
    known = {name.removeprefix("rocdl.") for name in HANDLERS if name.startswith("rocdl.mfma.f32.")}
    assert {f.name for f in FORMS} <= known  # test_matrix.py has the others, and these again


@each
def test_each_slot(form: Form, arch: str) -> None:
    """One register slot of A at a time holds 1, all others 0: D is one row of B in one row of D, which names the slot's row and k.
    Then the same for B. The other operand holds its k in one run and its row or column in the other."""
    slots = [(lane, e) for lane in range(64) for e in range(form.per_lane)]
    hot = np.zeros((len(slots), 64, form.per_lane), form.dtype)
    for g, (lane, e) in enumerate(slots):
        hot[g, lane, e] = 1
    owner = {form.place(i, k): (i, k) for i in range(form.rows) for k in range(form.depth)}
    assert len(owner) == len(slots)
    k_of, x_of = np.meshgrid(np.arange(1, form.depth + 1), np.arange(1, form.rows + 1), indexing="ij")  # [k, column]
    zero = np.zeros((len(slots), 64, form.results), np.float32)
    for numbers in (k_of, x_of):
        other = np.broadcast_to(form.spread_b(numbers), hot.shape)
        d = form.gather_d(form.run(hot, other, zero, arch))
        f = form.gather_d(form.run(other, hot, zero, arch))
        for g, slot in enumerate(slots):
            index, k = owner[slot]
            want = np.zeros((form.rows, form.rows), np.float32)
            want[index] = numbers[k]
            np.testing.assert_array_equal(d[g], want, err_msg=f"A, lane {slot[0]}, element {slot[1]}")
            np.testing.assert_array_equal(f[g], want.T, err_msg=f"B, lane {slot[0]}, element {slot[1]}")


@each
def test_integer_products_with_an_addend(form: Form, arch: str) -> None:
    """Sums that are exact in any order."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-8, 9, (4, form.rows, form.depth)), rng.integers(-8, 9, (4, form.depth, form.rows))
    c = rng.integers(-10000, 10000, (4, form.rows, form.rows))
    d = form.gather_d(form.run(form.spread_a(a), form.spread_b(b), form.spread_c(c), arch))
    np.testing.assert_array_equal(d, (a @ b + c).astype(np.float32))


@each
def test_the_addend_passes_through(form: Form, arch: str) -> None:
    """Zero products leave C's bits: every finite nonzero value, infinities; NaN stays NaN."""
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, (2, form.rows, form.rows), dtype=np.uint32)
    bits[0, 0, :4] = [0x7F800000, 0xFF800000, 0x00000001, 0x80000001]
    c = bits.view(np.float32)
    zero = np.zeros((2, 64, form.per_lane), form.dtype)
    d = form.gather_d(form.run(zero, zero, form.spread_c(c), arch))
    numbers = ~np.isnan(c)
    np.testing.assert_array_equal(d[numbers].view(np.uint32), c[numbers].view(np.uint32))
    assert np.isnan(d[~numbers]).all()


@each
def test_infinities_and_nans(form: Form, arch: str) -> None:
    """They reach exactly the rows and columns of theirs; infinity times zero and infinity minus infinity are NaN."""
    a, b = np.ones((3, form.rows, form.depth)), np.ones((3, form.depth, form.rows))
    c = np.zeros((3, form.rows, form.rows))
    a[0, 3, 1], b[0, 1, 5] = np.inf, 0  # row 3: inf, at column 5 inf * 0
    a[1, 2, 0] = np.nan
    b[1, 1, 7] = -np.inf
    a[2, 4, 0], c[2, 4, 6] = np.inf, -np.inf
    d = form.gather_d(form.run(form.spread_a(a), form.spread_b(b), form.spread_c(c), arch))
    with np.errstate(invalid="ignore"):
        want = np.einsum("gik,gkj->gij", a, b) + c
    np.testing.assert_array_equal(d, want.astype(np.float32))  # NaN equals NaN here
    assert np.isnan(want).sum() == 1 + form.rows + 1


@each
def test_one_product_is_rounded_once_to_nearest_even(form: Form, arch: str) -> None:
    """a * b + c with a single product: ties to even, and products whose rounding on their own would show (fused)."""
    if arch == "gfx942" and form.element != "f32":
        pytest.skip(
            "gfx942 cuts C and products before the sum (MMA-Sim): test_matrix_formats.py, test_fused_sums_of_gfx942"
        )
    rng = np.random.default_rng(2)
    shape = (8, form.rows, form.rows)
    x = rng.uniform(1, 2, shape[:2]).astype(form.dtype)
    y = rng.uniform(1, 2, (8, form.rows)).astype(form.dtype)
    a, b = np.zeros((8, form.rows, form.depth), form.dtype), np.zeros((8, form.depth, form.rows), form.dtype)
    k = rng.integers(0, form.depth, 8)
    for g in range(8):
        a[g, :, k[g]], b[g, k[g]] = x[g], y[g]
    c = (rng.uniform(-1, 1, shape) * 2.0 ** rng.integers(-3, 15, shape)).astype(np.float32)
    product = x[:, :, None].astype(np.longdouble) * y[:, None, :].astype(
        np.longdouble
    )  # exact: at most 48 bits; the sum spans at most 62
    d = form.gather_d(form.run(form.spread_a(a), form.spread_b(b), form.spread_c(c), arch))
    exact = product + c.astype(np.longdouble)
    np.testing.assert_array_equal(d, exact.astype(np.float32))


@each
def test_ties_go_to_even(form: Form, arch: str) -> None:
    a, b = np.zeros((1, form.rows, form.depth)), np.zeros((1, form.depth, form.rows))
    a[0, :, 0], b[0, 0, :] = 1, 1
    c = np.full((1, form.rows, form.rows), 2.0**24, np.float32)
    c[0, :, 1::2] = 2.0**24 + 2
    d = form.gather_d(form.run(form.spread_a(a), form.spread_b(b), form.spread_c(c), arch))[0]
    np.testing.assert_array_equal(d[:, 0::2], np.full_like(d[:, 0::2], 2.0**24))
    np.testing.assert_array_equal(d[:, 1::2], np.full_like(d[:, 1::2], 2.0**24 + 4))


@each
def test_subnormal_operands_and_results_are_kept(form: Form, arch: str) -> None:
    tiny = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149}[form.element]
    a, b = np.zeros((2, form.rows, form.depth)), np.zeros((2, form.depth, form.rows))
    a[0, :, 0], b[0, 0, :] = tiny * np.arange(1, form.rows + 1), 1
    a[1, :, 1], b[1, 1, :] = 2.0**-14, 2.0**-14 if form.element == "f16" else 2.0**-126
    c = np.zeros((2, form.rows, form.rows))
    d = form.gather_d(form.run(form.spread_a(a), form.spread_b(b), form.spread_c(c), arch))
    np.testing.assert_array_equal(d, (a @ b).astype(np.float32))
    assert d[0, 0, 0] == tiny and d[1, 0, 0] > 0


@pytest.mark.parametrize("form", [f for f in FORMS if f.archs == NEW], ids=lambda f: f.name)
def test_doubled_k_does_not_exist_on_gfx942(form: Form) -> None:
    with pytest.raises(UnknownOperation, match=r"kernel\.py:40: .*gfx942 does not have it"):
        form.program("gfx942")


@pytest.mark.parametrize("modifiers", ["1, 0, none", "0, 1, none", "0, 0, bcast_first_32"])
def test_broadcast_modifiers_raise(modifiers: str) -> None:
    with pytest.raises(UnknownOperation, match=r"kernel\.py:40"):
        FORMS[2].program("gfx942", modifiers)


def test_lanes_switched_off_are_reported() -> None:
    """The instruction ignores EXEC, so a kernel that runs it in divergent code is wrong."""
    form = FORMS[2]
    before = """
  %c8 = llvm.mlir.constant(8 : i32) : i32
  %go = llvm.icmp "ult" %tid, %c8 : i32
  llvm.cond_br %go, ^inside, ^outside
^inside:"""
    program = form.program("gfx950", before=before, after="\n  llvm.br ^outside\n^outside:")
    a = np.zeros((64, 4), np.float16)
    finding = only(
        launch(program, a, a, np.zeros((64, 4), np.float32), np.zeros((64, 4), np.float32), expect="barrier")
    )
    assert finding.line == 40 and "matrix instruction" in finding.message
