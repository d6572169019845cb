"""The figures of Hopper measurements in the docs are those of their records; nothing here needs a GPU."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import pytest
import torch

from fourwave.ops.gemm import sm90_choice
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.grouped_gemm import sm90_choice as sm90_grouped_choice
from fourwave.ops.grouped_gemm.problem import GroupedProblem

ROOT = Path(__file__).parents[1]
DENSE, GROUPED = "docs/hopper.md", "docs/hopper_grouped.md"
COPY = 4.3e12  # bytes a second of a copy, as the pages say
Row = dict[str, Any]
BF16, E4M3, E5M2, E2M1 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8


@lru_cache
def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@lru_cache
def rows_of(name: str) -> list[Row]:
    return json.loads((ROOT / "bench" / "records" / f"{name}.json").read_text())["rows"]


def table(page: str, header: str, after: str = "") -> list[list[str]]:
    """Cells of the table that begins so; an empty first cell is that of the row above."""
    start = text(page).index(after)
    lines = text(page)[text(page).index(f"\n{header}", start) + 1 :].split("\n\n")[0].splitlines()
    rows = [[cell.strip(" `") for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines]
    assert len(rows) > 2 and all(len(row) == len(rows[0]) for row in rows)
    for above, row in itertools.pairwise(rows[2:]):
        row[0] = row[0] or above[0]
    return rows[2:]


def fixed(digits: int, *values: float) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def us(row: Row, name: str) -> str:
    value = 1e6 * median(row["seconds"][name])
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def ratio(row: Row, ours: str = "fourwave", other: str = "cublas") -> float:
    return median(row["seconds"][other]) / median(row["seconds"][ours])


def mean(rows: Iterable[Row], ours: str = "fourwave", other: str = "cublas") -> float:
    return geometric_mean([ratio(row, ours, other) for row in rows])


def stats(ratios: Sequence[float]) -> list[str]:
    """geomean, median, min, max, wins, below 0.95."""
    middle = fixed(3, geometric_mean(ratios), median(ratios), min(ratios), max(ratios))
    return [*middle, f"{sum(r > 1 for r in ratios)}/{len(ratios)}", str(sum(r < 0.95 for r in ratios))]


def says(page: str, *words: str) -> None:
    plain = " ".join(text(page).split())
    for word in words:
        assert word in plain, word


def of_rows(name: str, M: int) -> list[Row]:
    return [row for row in rows_of(name) if row["M"] == M]


def test_each_record_is_named_and_each_name_is_a_record() -> None:
    records = {path.stem for path in (ROOT / "bench" / "records").glob("*.json")}
    pages = [ROOT / "CHANGELOG.md", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {word for page in pages for word in re.findall(r"\b(?:h200|cpu|mslk)_\w+", page.read_text("utf-8"))}
    assert records <= named
    assert {word for word in named if word.startswith("h200_")} - records == {"h200_grouped_many_rows"}  # of 3a5de3b
    for name in records - {"mslk_grouped_2a3c897", "cpu_pretrain_tiny"}:
        record = json.loads((ROOT / "bench" / "records" / f"{name}.json").read_text())
        assert "command" in record or name in ("h200_decode_tiles", "h200_pretrain_small"), name


@pytest.mark.parametrize("page", [DENSE, GROUPED])
def test_commands_are_those_of_the_records(page: str) -> None:
    """Of each command beside a record's name, every option is in the record's command; but for those that the page leaves out."""
    shown = re.findall(r"`(h200_\w+)`(?: \||,|:)\s+`((?:bench/|\.\.\. |--suite)[^`]*)`", text(page))
    assert len(shown) >= (14 if page == DENSE else 3)
    for name, command in shown:
        measured = json.loads((ROOT / "bench" / "records" / f"{name}.json").read_text())["command"]
        words = (measured if isinstance(measured, str) else measured[0]).split()
        missing = [word for word in command.split() if word not in words and word != "..."]
        assert not missing, (name, missing)


def test_bf16_products() -> None:
    first = rows_of("h200_llm81_bf16_f77d6e7")
    expected = [stats([ratio(r) for r in first if r["layout"] == layout]) for layout in ("TN", "NN", "NT")]
    expected.append(stats([ratio(r) for r in rows_of("h200_llm81_bf16_tn_f482130")]))
    assert [row[3:] for row in table(DENSE, "| record | command | layout")] == expected


def passes() -> list[list[float]]:
    """Ratios of each pass: the product's, from end to end."""
    pairs = [
        (name, *which)
        for name in ("fprop", "dgrad", "wgrad")
        for which in (("kernel", "cublas"), ("end", "cublas end"))
    ]
    rows = rows_of("h200_passes_fp8_f482130")
    return [[ratio(r, ours, other) for r in rows if r["pass"] == name] for name, ours, other in pairs]


def test_fp8_passes() -> None:
    assert [row[2:] for row in table(DENSE, "| pass | | geomean")] == [stats(ratios) for ratios in passes()]
    alone = stats([ratio(r) for r in rows_of("h200_llm81_fp8_fast_f77d6e7")])
    says(DENSE, f"forward came to {alone[0]} ({alone[2]} to {alone[3]}; `h200_llm81_fp8_fast_f77d6e7`")


def fastest(row: Row) -> str:
    return min(row["seconds"].keys() - {"cublas", "deepgemm"}, key=lambda name: median(row["seconds"][name]))


def test_fp8_with_sums_in_float32() -> None:
    rows = table(DENSE, "| record | command | against")
    assert len(rows) == 7
    for row in rows:
        other = {"cuBLASLt": "cublas", "DeepGEMM": "deepgemm"}[row[2]]
        ours: Callable[[Row], str] = fastest if "promote" in row[0] else lambda r: "fourwave"
        ratios = [ratio(r, ours(r), other) for r in rows_of(row[0])]
        assert row[3:] == [str(len(ratios)), *fixed(3, geometric_mean(ratios), min(ratios), max(ratios))]


def test_fused_outputs() -> None:
    names = {"swiglu": "SwiGLU", "z": "preactivation", "bias": "bias", "FP8 out": "FP8 out, amax"}
    dtypes = {"torch.bfloat16": "BF16", "torch.float8_e4m3fn": "FP8"}
    measured = rows_of("h200_fused_outputs_9cd1fd5")
    for row, r in zip(table(DENSE, "| product | inputs"), measured, strict=True):
        what = ", ".join(names.get(word, word) for word in r["what"].split(", "))
        speeds = fixed(3, ratio(r, "plain", "fused"), ratio(r, "fused", "separate"))
        assert row == [f"{r['layout']} {r['M']}x{r['N']}x{r['K']}", dtypes[r["dtype"]], what, *speeds]


def test_few_rows() -> None:
    for row in table(DENSE, "| record | command | M |"):
        assert row[3:] == stats([ratio(r) for r in rows_of(row[0]) if row[2] in (str(r["M"]), "all")])
    late = "h200_decode_bf16_f482130"
    one, some, many = fixed(3, *(mean(of_rows(late, M)) for M in (1, 16, 64)))
    least = min(ratio(r) for r in rows_of(late))
    says(DENSE, f"(`{late}`, `--samples 8`): {one}, {some} and {many} at M = 1, 16 and 64, at least {least:.3f}.")
    rates = {
        M: median(
            2 * r["N"] * r["K"] / median(r["seconds"]["fourwave"]) / 1e12
            for r in of_rows("h200_decode_bf16_f77d6e7", M)
            if 2 * r["N"] * r["K"] > 30e6
        )
        for M in (1, 16, 64)
    }
    assert f"{rates[1]:.1f}" == f"{rates[16]:.1f}"
    says(DENSE, f"a median of {rates[1]:.1f} TB/s at M = 1 and 16 and {rates[64]:.1f} TB/s at M = 64")


MX = {"MXFP8 x MXFP8": "mxfp8", "MXFP4 x MXFP4": "mxfp4", "BF16 x MXFP4": "mxfp4_weights"}


def at_copy_speed(row: Row) -> float:
    """What dequantization would take that reads codes and scales and writes bfloat16 at a copy's rate, and `mm`, over our time."""
    read = {"mxfp8": 33 / 32, "mxfp4": 17 / 32, "mxfp4_weights": 17 / 32}[row["formats"]]
    elements = row["N"] * row["K"] + (row["M"] * row["K"] if row["formats"] != "mxfp4_weights" else 0)
    return (elements * (read + 2) / COPY + median(row["seconds"]["mm"])) / median(row["seconds"]["fourwave"])


def test_mx() -> None:
    rows = table(DENSE, "| operands | M | over compiled")
    assert len(rows) == 15
    for row in rows:
        of = [r for r in of_rows("h200_mx_1e379ad", int(row[1])) if r["formats"] == MX[row[0]]]
        values = []
        for other in ("compiled", "eager"):
            values += [mean(of, other=other), min(ratio(r, other=other) for r in of)]
        ideal = [at_copy_speed(r) for r in of]
        assert row[2:] == fixed(3, *values, geometric_mean(ideal), min(ideal), mean(of, other="mm"))
    few = of_rows("h200_mx_few_f482130", 256)
    three = fixed(3, *(mean([r for r in few if r["formats"] == name], other="mm") for name in MX.values()))
    says(DENSE, f"{three[0]}, {three[1]} and {three[2]} of `torch.mm` alone (`h200_mx_few_f482130`)")


def test_mxfp4_in_fp8() -> None:
    def spread(values: list[float]) -> str:
        return f"{geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    rows = table(DENSE, "| M | rows | dequantize, compiled")
    assert len(rows) == 5
    for row in rows:
        of = of_rows("h200_mxfp4_in_fp8_6a60ec5", int(row[0]))
        compiled, mm = ([ratio(r, other=other) for r in of] for other in ("compiled", "mm"))
        slow = [ratio(r, other="in bf16") for r in of if "in bf16" in r["seconds"]]
        assert row[1].startswith(str(len(of))) and (len(slow) == len(of) or "two of them" in row[1])
        ideal = [at_copy_speed(r) for r in of]
        assert row[2:] == [
            spread(compiled), f"{mean(of, other='eager'):.3g}", spread(ideal), spread(mm), spread(slow),
        ]  # fmt: skip
    decoded = [
        ratio(r, "in bf16", "mm")
        for r in rows_of("h200_mxfp4_in_fp8_6a60ec5")
        if r["M"] >= 4096 and "in bf16" in r["seconds"]
    ]
    says(
        DENSE, f"our way in bfloat16 there is at {min(decoded):.2f} to {max(decoded):.2f} of `torch.mm` alone from 4096"
    )


def packed_bytes(row: Row) -> float:
    return row["N"] * row["K"] * 17 / 32


def test_preshuffled_weights() -> None:
    for row in table(DENSE, "| M | preshuffled |"):
        of = of_rows("h200_decode_mxfp4_shuffled_bf5380c", int(row[0]))
        big = [r for r in of if packed_bytes(r) > 30e6]
        rates = [packed_bytes(r) / median(r["seconds"]["fourwave"]) / 1e12 for r in big]
        ratios = [ratio(r) for r in of]
        speeds = fixed(3, geometric_mean(ratios), min(ratios), max(ratios), mean(big), mean(of, "plain"))
        assert row[1:] == [*speeds, *fixed(2, median(rates), max(rates))]


def test_linear_layers() -> None:
    names = {"Current": "current", "Delayed": "delayed", "Block": "block", "MXFP8": "mxfp8", "torchao": "torchao"}
    rows = table(DENSE, "| recipe | over BF16")
    assert len(rows) == len(names)
    for row, (first, ours) in zip(rows, names.items(), strict=True):
        assert row[0].startswith(first)
        both = [[ratio(r, ours, other) for r in rows_of("h200_linear_1e379ad")] for other in ("bf16", "torchao")]
        assert row[1:] == [cell for ratios in both for cell in stats(ratios)[:3]]


def test_aims() -> None:
    """The table of aims, README's and CHANGELOG's figures: computed from the same rows."""
    bf16 = (
        rows_of("h200_llm81_bf16_tn_f482130"),
        *([r for r in rows_of("h200_llm81_bf16_f77d6e7") if r["layout"] == layout] for layout in ("NN", "NT")),
    )
    each = fixed(3, *(mean(rows) for rows in bf16))
    ratios = passes()
    fp8, ends = (fixed(3, *map(geometric_mean, part)) for part in (ratios[::2], ratios[1::2]))
    least = min(min(map(min, ratios[::2])), min(ratio(r) for rows in bf16 for r in rows))
    says(DENSE, f"BF16 {', '.join(each)}, FP8 {', '.join(fp8)}; least {least:.3f}; end to end FP8 {', '.join(ends)}")
    says("README.md", f"BF16 {min(each)} to {max(each)}, FP8 {min(fp8)} to {max(fp8)}")

    blocks = rows_of("h200_llm81_fp8_block_bf5380c")
    lt, dg = fixed(3, mean(blocks), mean(blocks, other="deepgemm"))
    short, long = ([r for r in blocks if (r["K"] <= 4096) == is_short] for is_short in (True, False))
    assert all(r["K"] >= 8192 for r in long)
    says(
        DENSE,
        f"| {lt}; {dg}. Products with K of 4096 or less are at {mean(short, other='deepgemm'):.3f} of DeepGEMM, "
        f"with 8192 or more at {mean(long, other='deepgemm'):.3f} |",
    )
    says("README.md", f"{lt}; {dg}")
    says("CHANGELOG.md", f"{lt} of cuBLASLt and {dg} of DeepGEMM ({len(blocks)} products)")

    many, few, in_fp8 = (
        [r for r in rows_of(name) if low <= r["M"] <= high]
        for name, low, high in (
            ("h200_mx_1e379ad", 4096, 1 << 30), ("h200_mx_1e379ad", 0, 256), ("h200_mxfp4_in_fp8_6a60ec5", 4096, 1 << 30),
        )
    )  # fmt: skip
    kinds = [[r for r in many if r["formats"] == kind] for kind in ("mxfp8", "mxfp4_weights")] + [in_fp8]
    compiled = [min(ratio(r, other="compiled") for r in rows) for rows in (*kinds, few)]
    ideal = fixed(2, *(min(map(at_copy_speed, rows)) for rows in (*kinds, few)))
    says(
        DENSE,
        f"MXFP8 at least {compiled[0]:.3f}, BF16 with MXFP4 {compiled[1]:.3f}, MXFP4 with MXFP4 {compiled[2]:.3f}; "
        f"at least {compiled[3]:.3f}.",
        f"would leave {ideal[0]}, {ideal[1]} and {ideal[2]}; {ideal[3]})",
    )

    words, name = [], "h200_decode_mxfp4_shuffled_bf5380c"
    for M, rows in ((1, "1 row"), (16, "16 rows"), (64, "64 rows")):
        big = [r for r in of_rows(name, M) if packed_bytes(r) > 30e6]
        rates = [packed_bytes(r) / median(r["seconds"]["fourwave"]) / COPY for r in big]
        least_of = f" (median; least {min(rates):.0%})" if M == 1 else ""
        words.append(f"{rows}: {mean(big):.2f} and {median(rates):.0%}{least_of}")
    says(DENSE, "; ".join(words) + ": short")
    every = fixed(3, *(mean(of_rows(name, M)) for M in (1, 16, 64)))
    says("README.md", ", ".join(every))
    says("CHANGELOG.md", "{:.2f}, {:.2f} and {:.2f} times as fast as cuBLAS".format(*map(float, every)))
    plain = fixed(2, *(mean(of_rows(name, M), "plain") for M in (1, 16, 64)))
    slowest = min(ratio(r, "plain") for r in rows_of(name))
    says("CHANGELOG.md", f"{plain[0]}, {plain[1]} and {plain[2]} times as fast as", f"at least {slowest:.2f}.")
    decode = mean(rows_of("h200_decode_bf16_f482130")), mean(rows_of("h200_decode_fp8_fast_f77d6e7"))
    says(DENSE, "| up to 64 rows, BF16 and FP8: 1.05 | {:.3f}, {:.3f} |".format(*decode))

    layers = rows_of("h200_linear_1e379ad")
    current, delayed = ([mean(layers, ours, other) for other in ("bf16", "torchao")] for ours in ("current", "delayed"))
    says(
        DENSE,
        "{:.2f} and {:.2f} with `CurrentScaling`, ".format(*current)
        + "{:.2f} and {:.2f} with `DelayedScaling`".format(*delayed),
    )
    says("README.md", f"{current[0]:.3f} and {delayed[0]:.3f}; {current[1]:.3f} and {delayed[1]:.3f}")


def dense_problem(name: str, row: Row) -> GemmProblem:
    M, N, K, layout = row["M"], row["N"], row["K"], row.get("layout", "TN")
    if "bf16" in name:
        return GemmProblem(M, N, K, layout, BF16, BF16, BF16, device_type="cuda")
    if "shuffled" in name:
        return GemmProblem(M, N, K, "TN", BF16, E2M1, BF16, None, None, False, "cuda", None, "1x32", b_preshuffled=True)
    a_scaling, b_scaling = {"row": ("row", "row"), "block": ("1x128", "128x128")}.get(
        name.split("fp8_")[1].split("_")[0], ("tensor", "tensor")
    )
    gradient = row.get("pass", "fprop") != "fprop"
    return GemmProblem(
        M, N, K, "TN", E5M2 if gradient else E4M3, E4M3, BF16, device_type="cuda", a_scaling=a_scaling, b_scaling=b_scaling,
        fast_accum=a_scaling == "tensor" and not gradient,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("h200_llm81_bf16_f77d6e7", None), ("h200_llm81_bf16_tn_f482130", None), ("h200_llm81_fp8_row_9cd1fd5", None),
        ("h200_llm81_fp8_block_bf5380c", None), ("h200_passes_fp8_f482130", None), ("h200_decode_bf16_f482130", None),
        ("h200_decode_fp8_fast_f77d6e7", None), ("h200_llm81_fp8_fast_f77d6e7", "with other tiles\nwhere K is above 8192"),
        ("h200_decode_mxfp4_shuffled_bf5380c", None),
    ],
)  # fmt: skip
def test_tiles_are_those_that_were_measured(name: str, others: str | None) -> None:
    """Where the default takes another tile than it did in a record, the page says of which rows."""
    changed = {
        (row["N"], row["K"])
        for row in rows_of(name)
        if str(sm90_choice.default_config(dense_problem(name, row))[0]) != row["config"]
    }
    assert bool(changed) == (others is not None)
    if others is not None:
        assert others in text(DENSE)
        assert all(K > 8192 for _, K in changed), changed


SWEEP, OLD_SWEEP = "h200_grouped_published_sweep_bf5380c", "h200_grouped_published_sweep_cb8bd3f"
PEERS = ("deepgemm", "deepgemm masked", "cutlass", "triton")


def suite(name: str, record: str = SWEEP) -> list[Row]:
    return [row for row in rows_of(record) if row["suite"] == name]


def against_best(row: Row) -> float:
    return min(ratio(row, "ours", name) for name in PEERS if name in row["seconds"] and name not in row["wrong"])


def over_floor(row: Row) -> float:
    return median(row["seconds"]["ours"]) / row["floor"]


def shape(row: Row) -> tuple[int, int, int]:
    return sum(row["sizes"]), row["N"], row["K"]


def test_grouped_suites() -> None:
    for row in table(GROUPED, "| suite| rows"):
        of = suite(row[0])
        ratios = [against_best(r) for r in of]
        assert row[1:] == [
            str(len(of)), f"{geometric_mean(ratios):.3f}", f"{min(ratios):.2f}", str(sum(r >= 1 for r in ratios)),
            f"{median(map(over_floor, of)):.3f}",
        ]  # fmt: skip
    names = ("published:even", "sweep:even", "sweep:skewed", "dgrad:even")
    assert [row[0] for row in table(GROUPED, "| suite| rows")] == list(names)
    first, second = (
        fixed(2, *(median([ratio(r, "ours", other) for r in suite(name, OLD_SWEEP)]) for name in names))
        for other in ("triton", "cutlass")
    )
    says(
        GROUPED,
        f"Triton {', '.join(first[:3])} and {first[3]}, CUTLASS {', '.join(second[:3])} and {second[3]}.",
    )
    fastest_others = [min(PEERS, key=lambda n: median(r["seconds"][n])) for r in rows_of(OLD_SWEEP)]
    assert fastest_others.count("triton") == 2 and "cutlass" not in fastest_others
    assert all(max(r["bytes"] / COPY, r["flops"] / 1.5e15) == pytest.approx(r["floor"]) for r in rows_of(SWEEP))


@pytest.mark.parametrize(
    ("name", "after"), [("published:even", "The rows published with"), ("dgrad:even", "dgrad of FP8, weights stored")]
)
def test_grouped_rows(name: str, after: str) -> None:
    measured = {shape(r): r for r in suite(name)}
    rows = table(GROUPED, "| M, N, K | floor", after)
    assert len(rows) == len(measured)
    for row in rows:
        r = measured.pop(tuple(map(int, row[0].split(", "))))  # type: ignore[arg-type]
        floor = f"{1e6 * r['floor']:.1f}"
        times = [us(r, name) for name in PEERS[:2]]
        assert row[1:-1] == [floor, us(r, "ours"), f"{over_floor(r):.2f}", *times, f"{against_best(r):.2f}"]
        assert r["config"].startswith(row[-1].split()[0] + "x") and ("split 2" in row[-1]) == ("split 2" in r["config"])


@pytest.mark.parametrize(
    ("name", "after"), [("sweep:even", "The sweep, 8 even"), ("sweep:skewed", "The same with random groups")]
)
def test_grouped_sweep(name: str, after: str) -> None:
    measured = {shape(r): f"{us(r, 'ours')} ({against_best(r):.2f})" for r in suite(name)}
    for row in table(GROUPED, "| N, K | 1 |", after):
        N, K = map(int, row[0].split(", "))
        for M, cell in zip((1, 32, 128, 1024, 4096, 16384), row[1:], strict=True):
            assert cell == measured.pop((M, N, K), "")
    assert not measured


DECODE = "h200_grouped_decode_skew_975145a"


def test_grouped_decode_and_skew() -> None:
    for row in table(GROUPED, "| experts|"):
        of = [r for r in rows_of(DECODE) if r["suite"] == "decode:even" and len(r["sizes"]) == int(row[0])]
        assert [r["sizes"][0] for r in of] == [1, 4, 16, 64]
        assert row[1:] == [f"{us(r, 'ours')} ({1 / over_floor(r):.2f})" for r in of]
    skew = [r for r in rows_of(DECODE) if r["suite"] == "skew:even"]
    words = [
        f"{us(uneven, 'ours')} against {us(even, 'ours')}, {over_floor(uneven) * uneven['floor'] / over_floor(even) / even['floor']:.2f}"
        for uneven, even in zip(skew[::2], skew[1::2], strict=True)
    ]
    says(GROUPED, f"{words[0]} (2048, 7168), and {words[1]} (7168, 2304).")


BACKWARD, OLD_BACKWARD = "h200_grouped_backward_975145a", "h200_grouped_backward_cb8bd3f"


def gradients(kind: str, name: str = BACKWARD) -> list[Row]:
    return [row for row in rows_of(name) if row["kind"] == kind]


def test_grouped_gradients() -> None:
    for row, r in zip(table(GROUPED, "| product| groups x rows"), rows_of(BACKWARD), strict=True):
        measured = "deepgemm" in r["seconds"]
        ends = [us(r, "deepgemm"), f"{ratio(r, 'ours', 'deepgemm'):.2f}"] if measured else ["wrong", ""]
        groups = f"{len(r['sizes'])} x {r['sizes'][0]}"
        floor = f"{1e6 * r['floor']:.1f}" if r["floor"] < 1e-3 else f"{1e6 * r['floor']:.0f}"
        assert row == [r["kind"], groups, f"{r['N']}, {r['K']}", floor, us(r, "ours"), *ends]


def test_mixtures_of_experts() -> None:
    names = ("fourwave fp8", "fourwave bf16", "torch bf16", "deepgemm fp8")
    rows = rows_of("h200_moe_cb8bd3f")
    for row, r in zip(table(GROUPED, "| model| tokens"), rows, strict=True):
        errors = ", ".join(f"{r['error'][name]:.4f}" for name in names)
        assert row == [r["model"], str(r["tokens"]), *(us(r, name) for name in names), errors]


def test_grouped_aims() -> None:
    published, sweep = suite("published:even"), suite("sweep:even")
    wins = [
        f"{sum(against_best(r) >= 1 for r in rows)} of {len(rows)}, lowest {min(map(against_best, rows)):.2f}"
        for rows in (published, sweep)
    ]
    triton = [
        median([ratio(r, "ours", "triton") for r in suite(name, OLD_SWEEP)])
        for name in ("published:even", "sweep:even")
    ]
    floors = [median(map(over_floor, rows)) for rows in (published, sweep)]
    decode = [
        [sum(map(bool, r["sizes"])) * r["N"] * r["K"] / median(r["seconds"]["ours"]) / COPY for r in rows_of(DECODE)
         if r["suite"] == "decode:even" and (len(r["sizes"]) == 1) == alone]
        for alone in (True, False)
    ]  # fmt: skip
    dgrad8 = [against_best(r) for r in suite("dgrad:even")]
    other = {
        kind: [ratio(r, "ours", "deepgemm") for r in gradients(kind) if "deepgemm" in r["seconds"]]
        for kind in ("dgrad bf16", "wgrad fp8", "wgrad bf16")
    }
    means = {kind: f"{geometric_mean(ratios):.3f}" for kind, ratios in other.items()}
    ahead = {kind: f"{sum(r >= 1 for r in ratios)} of {len(ratios)}" for kind, ratios in other.items()}
    beside = fixed(2, *(ratio(r, "ours", "copy") for r in rows_of(DECODE) if len(r["sizes"]) == 1))
    skew = [median(r["seconds"]["ours"]) for r in rows_of(DECODE) if r["suite"] == "skew:even"]
    moe = rows_of("h200_moe_cb8bd3f")
    plain = [ratio(r, "fourwave bf16", "torch bf16") for r in moe]
    says(
        GROUPED,
        f"short: published rows {wins[0]}; sweep {wins[1]}, all of DeepGEMM's |",
        f"published rows {triton[0]:.2f}, short; sweep {triton[1]:.2f} (cb8bd3f) |",
        f"published rows {floors[0]:.2f}; sweep {floors[1]:.2f}, short |",
        f"{min(decode[1]):.2f} and more; one expert, beside a copy of as many bytes, {beside[0]}, {beside[1]} and {beside[2]}, with 64 rows "
        f"{beside[3]}: short |",
        f"| {skew[0] / skew[1]:.3f} and {skew[2] / skew[3]:.3f} |",
        f"FP8 dgrad (bf5380c) {sum(r >= 1 for r in dgrad8)} of {len(dgrad8)} rows, geomean of all {geometric_mean(dgrad8):.3f}, "
        f"wgrad {ahead['wgrad fp8']}, {means['wgrad fp8']}; BF16 dgrad {ahead['dgrad bf16']}, {means['dgrad bf16']}, "
        f"wgrad {ahead['wgrad bf16']}, {means['wgrad bf16']} |",
        "Geomeans "
        + ", ".join(
            f"{means[kind]} ({min(other[kind]):.2f} to {max(other[kind]):.2f}) {words}"
            for kind, words in (
                ("wgrad fp8", "of wgrad in FP8"),
                ("wgrad bf16", "in BF16"),
                ("dgrad bf16", "of dgrad."),
            )
        ),
        f"FP8 at least {min(ratio(r, 'fourwave fp8', 'deepgemm fp8') for r in moe):.2f} times as fast as DeepGEMM's, "
        f"{min(ratio(r, 'fourwave fp8', 'torch bf16') for r in moe):.2f} times as `grouped_mm` in BF16; "
        f"BF16 {min(plain):.2f} to {max(plain):.2f} times",
    )
    by_rows = {shape(r): median(r["seconds"]["ours"]) for r in rows_of("h200_grouped_published_rows_97e36f4")}
    over = [by_rows[shape(r)] / median(r["seconds"]["ours"]) for r in suite("published:even", OLD_SWEEP)]
    says(GROUPED, f"{min(over):.2f} to {max(over):.2f} of those of cb8bd3f")
    one = [over_floor(r) for r in sweep if shape(r)[0] == 1]
    theirs = [min(median(r["seconds"][n]) for n in PEERS[:2]) / r["floor"] for r in sweep if shape(r)[0] >= 4096]
    says(GROUPED, f"{min(one):.2f} to {max(one):.2f}, since", f"{min(theirs):.2f} to {max(theirs):.2f} as well")
    groups = [
        geometric_mean([against_best(r) for r in suite(name)])
        for name in ("sweep:even", "published:even", "sweep:skewed")
    ]
    says(
        "README.md",
        "{:.3f} (published rows {:.3f}); {:.3f}".format(*groups),
        f"FP8 {geometric_mean(dgrad8):.3f} and {means['wgrad fp8']}, "
        f"BF16 {means['dgrad bf16']} and {means['wgrad bf16']} (of x",
    )
    faster = {
        kind: [
            median(old["seconds"]["ours"]) / median(new["seconds"]["ours"])
            for old, new in zip(gradients(kind, OLD_BACKWARD), gradients(kind), strict=True)
        ]
        for kind in ("wgrad fp8", "wgrad bf16", "dgrad bf16")
    }
    spans = {kind: f"{min(values):.2f} to {max(values):.2f}" for kind, values in faster.items()}
    says(
        "CHANGELOG.md",
        f"FP8 forward {groups[0]:.3f} (equal groups) and {groups[2]:.3f} (random ones)",
        f"of FP8 {spans['wgrad fp8']} times as fast as before, of BF16 {spans['wgrad bf16']} (",
        f"dgrad of BF16 {spans['dgrad bf16']} times as fast as before",
    )


def test_published_rows_of_now() -> None:
    rows = rows_of("h200_grouped_published_975145a")
    before = {shape(r): r for r in suite("published:even")}
    ratios = [against_best(r) for r in rows]
    slow = min(rows, key=against_best)
    says(
        GROUPED,
        f"Of 975145a {len(rows)} of the published rows",
        f"{sum(r >= 1 for r in ratios)} at 1.00 or above, geomean {geometric_mean(ratios):.3f}; lowest {', '.join(map(str, shape(slow)))} at "
        f"{against_best(slow):.2f} ({us(slow, 'ours')} us).",
        f"1024, 2048, 7168: {us(slow, 'ours')} us at 975145a, {us(before[shape(slow)], 'ours')} at bf5380c",
    )
    gain = {
        shape(r): 1 - median(r["seconds"]["ours"]) / median(before[shape(r)]["seconds"]["ours"])
        for r in rows
        if r is not slow
    }
    assert all(0.02 < g < 0.075 for s, g in gain.items() if 1 < s[0] <= 128)
    assert all(abs(g) < 0.02 for s, g in gain.items() if s[0] > 128)


def grouped_problem(product: str, G: int, M: int, N: int, K: int) -> GroupedProblem:
    fp8, wgrad = product.endswith("fp8"), product.startswith("wgrad")
    scaling = ("1x128", "1x128" if wgrad else "128x128") if fp8 else (None, None)
    dtype, layout = (E4M3, "TN") if fp8 else (BF16, "NT" if wgrad else "NN")
    return GroupedProblem(
        G, M, N, K, "reduction" if wgrad else "rows", layout, dtype, dtype, torch.float32 if wgrad else BF16, accumulate=wgrad,
        device_type="cuda", a_scaling=scaling[0], b_scaling=scaling[1], m_sizes_dtype=torch.int32,
        a_scale_layout="groups" if fp8 and not wgrad else "rows",
    )  # fmt: skip


def default_tile(problem: GroupedProblem) -> str:
    return str(sm90_grouped_choice.default_config(problem)[0])


def first_tile(config: str) -> str:
    """Of a kernel that has two; few rows have other numbers of stages since."""
    if "swapped" in config:
        config = re.sub(r", \d+ stages", "", config)
    return re.sub(
        r"/\d+", "", re.sub(r"(cluster \dx\d)/\dx\d", r"\1", config.removesuffix(", late").removesuffix(", narrow"))
    )


def test_grouped_tiles() -> None:
    """The tiles of the records are those that the default takes, of FP8's forward the first ones where a kernel has two."""
    for r in (*rows_of(SWEEP), *rows_of(DECODE)):
        now = default_tile(grouped_problem("forward fp8", len(r["sizes"]), *shape(r)))
        since = (
            "128x192x128 rows, 4 stages, cluster 2x1"
            if shape(r) in ((16384, 8192, 1024), (16384, 7168, 2048))
            else None
        )
        assert first_tile(now) == (since or first_tile(r["config"]))
    for r in rows_of(BACKWARD):
        rows, wgrad = sum(r["sizes"]), r["kind"].startswith("wgrad")
        sizes = (r["N"], r["K"], rows) if wgrad else (rows, r["K"], r["N"])
        assert default_tile(grouped_problem(r["kind"], len(r["sizes"]), *sizes)) == r["config"]


def test_what_grouped_products_fall_short_of() -> None:
    """Ratios by rows of all groups, as the page tells them; tiles that random groups take."""
    by_rows = {
        name: {M: [against_best(r) for r in suite(name) if shape(r)[0] == M] for M in (32, 128, 1024, 4096, 16384)}
        for name in ("sweep:even", "sweep:skewed")
    }
    some, many = (by_rows["sweep:even"][M] for M in (4096, 16384))
    dgrad = sorted(against_best(r) for r in suite("dgrad:even") if shape(r)[0] == 16384)
    means = fixed(2, *map(geometric_mean, by_rows["sweep:skewed"].values()))
    says(
        GROUPED,
        f"{min(some):.2f} to {max(some):.2f} with 4096 rows, {min(many):.2f} to {max(many):.2f} with 16384, "
        f"dgrad's {dgrad[0]:.2f} and {dgrad[1]:.2f}.",
        f"{means[0]} with 32 rows in all and {means[1]} with 128 (geomeans), {means[2]} with 1024, {means[3]} with 4096, "
        f"{means[4]} with 16384.",
    )
    few, more = (
        [
            ratio(r, "ours", "deepgemm")
            for r in gradients("wgrad fp8")
            if "deepgemm" in r["seconds"] and wanted(r["sizes"][0])
        ]
        for wanted in (lambda rows: rows <= 512, lambda rows: rows >= 2048)
    )
    says(
        GROUPED,
        f"{min(more):.2f} to {max(more):.2f}; with 512 or fewer it is {min(few):.2f} to {max(few):.2f}.",
    )
    below = [r for r in (ratio(r, "ours", "deepgemm") for r in gradients("dgrad bf16")) if r < 1]
    says(GROUPED, f"dgrad of BF16 with 512 rows or more to a group, {min(below):.3f} to {max(below):.3f}: less")
    assert all((r["sizes"][0] < 512) == (ratio(r, "ours", "deepgemm") >= 1) for r in gradients("dgrad bf16"))
    for r in (r for r in suite("sweep:skewed") if shape(r)[0] == 4096):
        counts = [sum(-(-rows // each) * each // 128 for rows in r["sizes"]) for each in (256, 128)]
        assert [*counts, 4096 // 128] == [42, 35, 32]
    for lost in ((4096, 13312, 16384), (4096, 1280, 8192)):
        new, old = (next(r for r in suite("sweep:skewed", name) if shape(r) == lost) for name in (SWEEP, OLD_SWEEP))
        says(GROUPED, f"{lost[1]}, {lost[2]} ({against_best(new):.2f})", us(old, "ours"))


def test_quantization() -> None:
    measured = json.loads((ROOT / "bench" / "records" / "h200_quantize_18fc3d2.json").read_text())
    rows = {r["case"]: r for r in measured["rows"]}
    cases = (
        "fp8_e4m3 fp32 rowwise given", "fp8_e4m3 fp32 both, transposed given", "fp8_e4m3 fp32 rowwise", "fp8_row fp32 rowwise",
        "fp8_1x128 pow2 rowwise", "fp8_1x128 fp32 both, transposed", "fp8_128x128 fp32 rowwise", "fp8_128x128 pow2 both, transposed",
        "mxfp8_e4m3 ceil rowwise", "mxfp8_e4m3 ceil columnwise", "mxfp8_e4m3 ceil both", "mxfp8_e4m3 ceil both, transposed",
        "mxfp4 floor rowwise", "mxfp4 floor both",
    )  # fmt: skip
    for row, case in zip(table("docs/quantize.md", "| | 16384 x 8192 bfloat16"), cases, strict=True):
        of = [rows[f"{x} {case}"] for x in ("16384x8192 bfloat16", "16384x8192 float32", "4096x1024 bfloat16")]
        assert row[1:] == [f"{1e6 * median(r['seconds']['quantize']):.0f} us, {r['of_copy']:.2f}" for r in of]
    beside = measured["against_reference_8192x4096_bf16"]
    words = [f"`{name}` {1e6 * t['hopper']:.0f} us against {1e6 * t['native']:.0f}" for name, t in beside.items()]
    says("docs/quantize.md", ", ".join(words))
