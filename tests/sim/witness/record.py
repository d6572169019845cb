"""Runs the witnesses and writes down what each confirmed: records.json, modules.json.xz, and the table in
docs/simulator_witnesses.md.

    python record.py --triton PYTHON      interpreter with triton==3.9.0: compile and simulate all of triton_cases.py
    python record.py --calculator FILE    AMD's matrix_calculator.py
    python record.py                      only write the table anew from records.json
Run it with the interpreter that has FlyDSL. Triton takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import triton_cases as cases  # noqa: E402
from test_matrix import FORMS, SPELLED  # noqa: E402

RECORDS, MODULES = HERE / "records.json", HERE / "modules.json.xz"
DOCS = HERE.parents[2] / "docs" / "simulator_witnesses.md"
KERNELS = {"dot": "tl.dot", "dot_scaled": "tl.dot_scaled", "dot_tdm": "tl.dot on descriptors", "gluon_scaled": "Gluon"}
BEGIN, END = "<!-- table: tests/sim/witness/record.py -->", "<!-- end of table -->"


def operations() -> list[tuple[str, str]]:
    """(arch, operation, with its formats where the name leaves them open)."""
    found = dict.fromkeys(
        (f.arch, f"{f.name} {SPELLED[f.a]} {SPELLED[f.b]}" if f.name.endswith("f8f6f4") else f.name) for f in FORMS
    )  # fmt: skip
    return list(found)


def strip(text: str) -> str:
    """A module without its locations."""
    text = re.sub(r" loc\((?:[^()]|\([^()]*\))*\)", "", text)
    return re.sub(r"^#loc.*\n", "", text, flags=re.M)


def load_modules() -> dict[str, dict]:
    return json.loads(lzma.decompress(MODULES.read_bytes()))


def witness_triton(python: str) -> dict[str, list[str]]:
    """Run all cases; returns "arch operation" -> cases that confirmed it."""
    confirmed: dict[str, list[str]] = {}
    every = list(cases.cases())
    lines = cases.capture(python, every)
    for c in every:
        line = lines[c["id"]]
        if "error" in line:
            print(f"{c['id']}: Triton refuses: {line['error'].splitlines()[0][:120]}")
            continue
        error = cases.run_case(c, line)
        print(f"{c['id']}: error {error:.3g} of its bound", flush=True)
        if error >= 1:
            raise SystemExit(f"{c['id']} does not match float64")
        for operation in cases.matrix_operations(line["text"]):
            confirmed.setdefault(f"{c['arch']} {operation}", []).append(c["id"])
    kept = {
        c["id"]: lines[c["id"]] | {"text": strip(lines[c["id"]]["text"])}
        for c in cases.chosen()
        if "text" in lines[c["id"]]
    }
    MODULES.write_bytes(lzma.compress(json.dumps(kept).encode(), preset=9 | lzma.PRESET_EXTREME))
    return confirmed


def table(records: dict) -> str:
    rows = ["| arch | instruction | Triton kernels | AMD's calculator | read from layout.h |", "|---|---|---|---|---|"]
    for arch, operation in operations():
        triton = records["triton"].get(f"{arch} {operation}", [])
        shapes = sorted({KERNELS[c.split("-")[1]] for c in triton})
        kernels = f"{len(triton)} ({', '.join(shapes)})" if triton else "-"
        calculator = "every element" if arch == "gfx942" and operation in records["calculator"] else "-"
        reading = "-" if arch == "gfx942" and calculator != "-" else "yes"
        rows.append(f"| {arch} | `{operation}` | {kernels} | {calculator} | {reading} |")
    listed = operations()
    both = sum(bool(records["triton"].get(f"{a} {o}")) for a, o in listed)
    alone = sum(
        a == "gfx942" and o in records["calculator"] and not records["triton"].get(f"{a} {o}") for a, o in listed
    )
    rows += [
        "",
        f"{len(listed)} in all: {both} confirmed by Triton, {alone} more by the calculator, {len(listed) - both - alone} read only.",
    ]
    return "\n".join(rows)


def write_docs(records: dict) -> None:
    text = DOCS.read_text()
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n{table(records)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton")
    parser.add_argument("--calculator")
    options = parser.parse_args()
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {"triton": {}, "calculator": []}
    if options.triton:
        records["triton"] = witness_triton(options.triton)
    if options.calculator:
        from calculator import check

        results = check(options.calculator)
        if wrong := {n: d for n, d in results.items() if d}:
            raise SystemExit(f"the calculator says otherwise: {wrong}")
        records["calculator"] = sorted(results)
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
    write_docs(records)


if __name__ == "__main__":
    main()
