"""AMD's matrix instruction calculator against the layouts of test_matrix.py, which the simulator is tested with.

    python calculator.py /path/to/matrix_calculator.py     (needs tabulate, as the calculator does)
Prints a line for each gfx942 instruction: every element of A, B and D, every CBSZ and ABID, every BLGP that it takes.
Source: github.com/ROCm/amd_matrix_instruction_calculator; commit 2ef91896bcdc4d26624f952e5c905c787cd9bc9e was used.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from test_matrix import BITS, FORMS, Form

TYPES = {
    "fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "i8", "fp64": "f64", "amd_fp8": "fp8_fnuz", "amd_bf8": "bf8_fnuz", "int32": "i32", "xf32": "xf32",
    "tf32": "xf32",
}  # fmt: skip


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("matrix_calculator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["matrix_calculator"] = module
    spec.loader.exec_module(module)
    return module


def element(register: str, bits: int) -> int:
    """The calculator's register text -> position in the lane's registers, counted in elements."""
    pair = re.fullmatch(r"v\[(\d+):(\d+)\]", register)
    if pair:
        return int(pair[2]) * 32 // bits
    single = re.fullmatch(r"v(\d+)(?:\.\[(\d+):(\d+)\])?", register)
    assert single is not None, register
    return (int(single[1]) * 32 + int(single[3] or 0)) // bits


def compare(calculator: Any, form: Form, modifiers: tuple[int, int, int]) -> str | None:
    """The first difference, or None."""
    cbsz, abid, blgp = modifiers
    for block in range(form.blocks):
        for i in range(form.m):
            for k in range(form.k):
                source = (block >> cbsz << cbsz) + abid if cbsz else block
                _, register, lanes = calculator._get_reg_lanes("a", i, 0, k, block, cbsz, abid, 0, 0)
                if (lanes[0], element(register, BITS[form.a])) != form.input("a", i, k, source):
                    return f"A[{i}][{k}] of block {block}: {register} lanes {lanes}"
                _, register, lanes = calculator._get_reg_lanes("b", 0, i, k, block, 0, 0, blgp, 0)
                lane, at = form.input("b", i, k, block)
                moved = [lane, lane % 32, lane % 32 + 32, (lane + 16) % 64, *(lane % 16 + 16 * g for g in range(4))][
                    blgp
                ]
                if (lanes[0], element(register, BITS[form.b])) != (moved, at):
                    return f"B[{k}][{i}] of block {block}, BLGP {blgp}: {register} lanes {lanes}"
            for j in range(form.n):
                _, register, lanes = calculator._get_reg_lanes("d", i, j, 0, block, 0, 0, 0, 0)
                if (lanes[0], element(register, BITS[form.d])) != form.output(i, j, block):
                    return f"D[{i}][{j}] of block {block}: {register} lanes {lanes}"
    return None


def check(path: str) -> dict[str, str | None]:
    """Operation -> None where all agrees, else the first difference; operations that the calculator does not have are
    left out."""
    module = load(path)
    results: dict[str, str | None] = {}
    for name, info in module.dict_insts["cdna3"].items():
        if info["sparse"]:
            continue
        kinds = ("xf32", "xf32") if "xf32" in name else (TYPES[info["in_type"]], TYPES[info["in_type_src1"]])
        key = (info["m"], info["n"], info["k"], info["blocks"], *kinds)
        form = next((f for f in FORMS if f.arch == "gfx942" and (f.m, f.n, f.k, f.blocks, f.a, f.b) == key), None)
        if form is None:
            results[name] = "the simulator does not have it"
            continue
        calculator = module.InstCalcGfx9(name, info, 64)
        tried = [(0, 0, 0)]
        if info["blgp"] and form.d != "f64":
            tried += [(0, 0, blgp) for blgp in range(1, 8)]
        if info["cbsz_abid"]:
            tried += [(cbsz, abid, 0) for cbsz in range(1, form.blocks.bit_length()) for abid in range(1 << cbsz)]
        results[form.name] = next((d for t in tried if (d := compare(calculator, form, t))), None)
    return results


if __name__ == "__main__":
    for operation, difference in check(sys.argv[1]).items():
        print(f"{operation}: {difference or 'agrees'}")
