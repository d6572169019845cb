"""Main-loop steps of the busiest compute unit: counted for sizes whose answer is plain, and for the uneven groups that matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fourwave.ops.gemm.config import ARCHS, FLOAT8, NUM_CUS
from fourwave.ops.grouped_gemm.config import GroupedConfig, default_config
from fourwave.ops.grouped_gemm.problem import GroupedProblem
from fourwave.perf.grouped import busiest_unit_steps, group_sizes

CODES = FLOAT8["gfx950"][0]
ROWS = GroupedProblem(4, 512, 256, 1024, "rows", "TN", CODES, CODES, torch.bfloat16)
CONFIG = GroupedConfig(128, 128, 128)


def test_counts() -> None:
    # 4 tiles of rows, 2 of columns, 8 steps each.
    assert busiest_unit_steps(ROWS, CONFIG, [128] * 4, 8) == 8
    assert busiest_unit_steps(ROWS, CONFIG, [128] * 4, 4) == 16
    assert busiest_unit_steps(ROWS, CONFIG, [129, 127, 128, 128], 8) == 16
    assert busiest_unit_steps(ROWS, replace(CONFIG, split_k=4), [128] * 4, 32) == 2
    assert busiest_unit_steps(ROWS, replace(CONFIG, split_k=4), [128] * 4, 8) == 8
    # Of a split reduction, steps are a group's rows: one tile of 512 rows beside three of none.
    wgrad = replace(ROWS, M=128, N=128, K=512, split="reduction", layout="NT")
    assert busiest_unit_steps(wgrad, CONFIG, [512, 0, 0, 0], 4) == 4
    assert busiest_unit_steps(wgrad, CONFIG, [128] * 4, 4) == 1
    assert busiest_unit_steps(wgrad, CONFIG, [128] * 4, 1) == 4


def test_sizes() -> None:
    assert group_sizes(replace(ROWS, G=3, M=10)) == ([4, 3, 3], [5, 3, 2])
    assert group_sizes(replace(ROWS, G=1)) == ([512], [512])


@pytest.mark.parametrize("preshuffled", [False, True])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("scaling", [None, "1x128", "1x32"])
@pytest.mark.parametrize("arch", ARCHS)
def test_half_of_all_rows_in_one_of_32_groups(arch: str, scaling: str | None, layout: str, preshuffled: bool) -> None:
    """At most 1.25 times the steps of equal groups."""
    if preshuffled and (layout != "TN" or scaling is None or (scaling, arch) == ("1x32", "gfx942")):
        pytest.skip("no such kernel")
    dtype = torch.bfloat16 if scaling is None else FLOAT8["gfx950" if scaling == "1x32" else arch][0]
    of_weights = "128x128" if scaling == "1x128" and layout != "NT" else scaling
    problem = GroupedProblem(
        32, 16384, 4096, 4096, "rows", layout if layout != "NT" else "TN", dtype, dtype, torch.bfloat16, device_type="cuda",
        a_scaling=scaling, b_scaling=of_weights if layout != "NT" else None, b_preshuffled=preshuffled,
    )  # fmt: skip
    if layout == "NT":
        problem = replace(problem, M=4096, K=16384, split="reduction", layout="NT", b_scaling=scaling)
    config = default_config(problem, arch)[0]
    balanced, skewed = (busiest_unit_steps(problem, config, sizes, NUM_CUS[arch]) for sizes in group_sizes(problem))
    assert skewed <= 1.25 * balanced, (config, balanced, skewed)
