"""Tunables of the CDNA grouped GEMM kernels, the default choice, and the one rule for what they support.

Imports neither FlyDSL nor torch.cuda: the rule can be asked anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fourwave.blocks.flydsl.tiles import (
    LDS_BANKS,
    LDS_BYTES,
    LOAD_BYTES,
    REGISTERS,
    WAVE,
    WORKGROUP,
    CodeTile,
    Geometry,
    OperandTile,
)
from fourwave.blocks.flydsl.turned_tiles import TurnedTile
from fourwave.ops.gemm.config import (
    ARCHS,
    FLOAT8,
    LOAD_BYTES_PER_CLOCK,
    MATRIX_FLOPS,
    MAX_EXTENT,
    MAX_SPLIT_K,
    MAX_TILE_BYTES,
    MEMORY_BYTES_PER_CLOCK,
    NUM_CUS,
    OVERLAP_LOSS,
    RESERVED,
    too_many_workgroups,
)
from fourwave.ops.grouped_gemm.problem import REDUCTION, ROWS

if TYPE_CHECKING:
    from fourwave.ops.grouped_gemm.problem import GroupedProblem

BLOCK_K = 128  # k that share a scale of "1x128" and "128x128"
SCALE_STEPS = 4  # such blocks in a step of the main loop (blocks/flydsl/block128.py)
# K tiles of preshuffled weights that are in registers, or on their way there, when a step begins. With the one that each tile
# loads, as many as a step has tiles: then every tile of a step has registers of its own, and none are copied.
B_TILES_AHEAD = 3
MAX_GROWTH = 1.25  # steps of the busiest compute unit with half of all rows in one group, to those with equal groups


@dataclass(frozen=True)
class GroupedConfig:
    """tile_*: output tile and reduction step of a workgroup; waves_m x waves_n = 4 waves share it.

    num_stages  LDS buffers per operand
    group_m     rows of tiles in a band that neighbouring workgroups walk through together (L2 reuse)
    split_k     workgroups that share the reduction of a tile (cdna.py); of split rows only
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 128
    num_stages: int = 4
    waves_m: int = 2
    waves_n: int = 2
    group_m: int = 8
    split_k: int = 1

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}, {self.num_stages} stages, {self.waves_m}x{self.waves_n} waves, "
            f"bands of {self.group_m}"
        ) + (f", K split in {self.split_k}" if self.split_k > 1 else "")


# tile_m, tile_n, tile_k (of 8-bit operands; half as many of 16 bits), num_stages, waves_m, waves_n.
# gfx950, up to 64 rows: three stages, so that two workgroups fit a compute unit (at most 256 registers and half the LDS each). They
# have two K tiles each in flight, four together, where one workgroup with four stages has three and idles at its barriers.
_CANDIDATES = {
    "gfx950": (
        (256, 128, 128, 3, 2, 2),
        (128, 128, 128, 4, 2, 2),
        (64, 128, 128, 3, 1, 4),
        (32, 128, 128, 3, 1, 4),
        (16, 128, 128, 3, 1, 4),
    ),
    "gfx942": (
        (128, 64, 128, 2, 2, 2),
        (64, 128, 128, 2, 1, 4),
        (32, 128, 128, 2, 1, 4),
        (16, 128, 128, 2, 1, 4),
    ),
}
_CANDIDATES_PRESHUFFLED = {
    "gfx950": (
        (128, 128, 128, 4, 2, 2),
        (64, 128, 128, 4, 1, 4),
        (32, 128, 128, 4, 1, 4),
        (16, 128, 128, 4, 1, 4),
    ),
    "gfx942": (
        (128, 128, 128, 2, 2, 2),
        (64, 128, 128, 2, 1, 4),
        (32, 128, 128, 2, 1, 4),
        (16, 128, 128, 2, 1, 4),
    ),
}


def candidates(problem: GroupedProblem, arch: str) -> list[GroupedConfig]:
    """The configurations that are compiled and tested for problems of this kind."""
    table = (_CANDIDATES_PRESHUFFLED if problem.b_preshuffled else _CANDIDATES)[arch]
    size = elem_bytes(problem, arch)
    configs = [GroupedConfig(m, n, k // size, stages, wm, wn) for m, n, k, stages, wm, wn in table]
    return [config for config in configs if _why_config_unsupported(problem, config, arch) is None]


def fragment_bytes(problem: GroupedProblem, arch: str) -> int:
    """Bytes per lane of a fragment: all of 128 k where blocks of them have scales."""
    if elem_bytes(problem, arch) == 1 and (arch == "gfx950" or block_scaled(problem)):
        return 32
    return 16


def block_scaled(problem: GroupedProblem) -> bool:
    """Whether scales change along K."""
    return problem.a_scaling in ("1x128", "1x32")


def is_mx(problem: GroupedProblem) -> bool:
    return problem.a_scaling == "1x32"


def dequantizes(problem: GroupedProblem, arch: str) -> bool:
    """Whether codes become bfloat16 on their way to LDS: the matrix unit of gfx942 takes no scales."""
    return is_mx(problem) and arch == "gfx942"


def elem_bytes(problem: GroupedProblem, arch: str) -> int:
    """Bytes of an operand's element in LDS."""
    return 2 if dequantizes(problem, arch) else problem.a_dtype.itemsize


def brings_scales(problem: GroupedProblem, arch: str) -> bool:
    """Whether scales of blocks lie in LDS beside the operands."""
    return block_scaled(problem) and not dequantizes(problem, arch)


def operand_tiles(problem: GroupedProblem, config: GroupedConfig, arch: str) -> tuple[OperandTile, OperandTile]:
    """As fourwave.ops.gemm.config.operand_tiles."""
    banks, size = LDS_BANKS[arch], elem_bytes(problem, arch)
    fragment = fragment_bytes(problem, arch)

    def tile(extent: int, waves: int, k_contiguous: bool, pairs: bool) -> OperandTile:
        fragments = extent // waves // 16
        if k_contiguous:
            group = 2 if pairs and fragments % 2 == 0 else 1
        elif arch == "gfx942":
            group = next(g for g in (4, 2, 1) if fragments % g == 0)
            return TurnedTile.of(extent, config.tile_k, size, banks, group, fragment_bytes=fragment)
        else:
            group = 1
        return OperandTile(extent, config.tile_k, k_contiguous, size, banks, group, fragment)

    # All four waves load: of a tile of 16 rows, half of them nothing.
    loaded = problem.a_dtype.itemsize
    rows = max(config.tile_m, LOAD_BYTES // (config.tile_k * loaded)) if problem.a_k_last else config.tile_m
    return (
        tile(rows, config.waves_m, problem.a_k_last, False),
        tile(config.tile_n, config.waves_n, problem.b_k_last, True),
    )


def in_memory(tile: OperandTile, problem: GroupedProblem, arch: str) -> OperandTile:
    """The tile as it lies in global memory."""
    if isinstance(tile, TurnedTile):
        return tile.in_memory(problem.a_dtype.itemsize)
    return CodeTile.of(tile) if dequantizes(problem, arch) else tile


def geometry(problem: GroupedProblem, config: GroupedConfig, arch: str) -> Geometry:
    a, b = operand_tiles(problem, config, arch)
    return Geometry(
        config.tile_m,
        config.tile_n,
        config.tile_k,
        config.num_stages,
        config.waves_m,
        config.waves_n,
        config.group_m,
        a,
        b,
    )


def tiles_per_step(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    """K tiles that one step of the main loop covers."""
    if brings_scales(problem, arch):
        return SCALE_STEPS
    if elem_bytes(problem, arch) == 1 and problem.split == ROWS and problem.layout == "TN":
        return B_TILES_AHEAD + 1  # preshuffled or not: the order of a sum depends on the steps
    if arch == "gfx942":
        return 2  # as many as are in registers (cdna3.AHEAD), so that none are copied
    return geometry(problem, config, arch).tiles_per_step


def scale_extents(problem: GroupedProblem, config: GroupedConfig) -> tuple[tuple[str, int], tuple[str, int]]:
    """(kind, extent) of block128.ScalePart for a and b."""
    if is_mx(problem):
        return (
            ("mx rows" if problem.a_k_last else "mx bytes", config.tile_m),
            ("mx rows" if problem.b_k_last else "mx bytes", config.tile_n),
        )
    if problem.split == ROWS:
        return ("rows", config.tile_m), ("cells", max(1, config.tile_n // BLOCK_K))
    return ("rows", config.tile_m), ("columns", config.tile_n)


def scale_bytes(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    """LDS of the scales."""
    if not brings_scales(problem, arch):
        return 0
    parts = scale_extents(problem, config)
    slots = sum((2 if kind == "columns" else 1) * -(-extent * SCALE_STEPS // WORKGROUP) for kind, extent in parts)
    # Places of waves that bring none of them (block128.ScalePart).
    wide = [extent for kind, extent in parts if kind in ("columns", "mx bytes")]
    return 4 * WORKGROUP * (slots + sum(WORKGROUP // WAVE - max(1, extent // WAVE) for extent in wide))


def lds_bytes(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    a, b = operand_tiles(problem, config, arch)
    stage = a.stage_bytes + (0 if problem.b_preshuffled else b.stage_bytes)
    return config.num_stages * stage + scale_bytes(problem, config, arch)


def min_registers(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    """Registers per lane that cannot be avoided, as in fourwave.ops.gemm.config, and those of scales and preshuffled weights."""
    frags_m, frags_n = config.tile_m // config.waves_m // 16, config.tile_n // config.waves_n // 16
    fragment = fragment_bytes(problem, arch) // 4
    registers = frags_m * frags_n * 4
    if problem.b_preshuffled:
        registers += 2 * frags_m * fragment + (B_TILES_AHEAD + 1) * frags_n * BLOCK_K * 16 // (4 * WAVE)
    else:
        registers += (2 * frags_m + frags_n + 1) * fragment
    if brings_scales(problem, arch):
        registers += frags_m + frags_n if is_mx(problem) else SCALE_STEPS * (frags_m + 1)
    if arch == "gfx942":
        staged = config.tile_m + (0 if problem.b_preshuffled else config.tile_n)
        registers += 2 * staged * config.tile_k * problem.a_dtype.itemsize // (4 * 4 * WAVE)
    return registers


def grid_tiles(problem: GroupedProblem, config: GroupedConfig) -> int:
    """Workgroups that are launched: enough for any m_sizes, since these are not known on the host.

    Split rows: every group, and what is left of the rows, may end in a tile that is not full.
    """
    columns = -(-problem.N // config.tile_n)
    if problem.split == REDUCTION:
        return problem.G * -(-problem.M // config.tile_m) * columns
    return (problem.M // config.tile_m + min(problem.G + 1, problem.M)) * columns


def workspace_shape(problem: GroupedProblem, config: GroupedConfig) -> tuple[int, int]:
    """Of the float32 sums that workgroups leave where K is split: a row for each part of each tile."""
    results = config.tile_m // config.waves_m // 16 * (config.tile_n // config.waves_n // 16)
    return config.split_k * grid_tiles(problem, config), results * 4 * WORKGROUP


def workgroups_per_unit(problem: GroupedProblem, config: GroupedConfig, arch: str) -> int:
    """Workgroups that fit a compute unit together. Tiles of up to 64 rows need at most 256 registers (tests/grouped/test_grouped_isa.py)."""
    return 2 if config.tile_m <= 64 and 2 * lds_bytes(problem, config, arch) <= LDS_BYTES[arch] else 1


def split_of(problem: GroupedProblem, config: GroupedConfig, arch: str, tiles: int) -> int:
    """Parts of K for which the tiles fill the compute units, if each part still has two steps of the main loop; else 1.

    Low tiles, whose sums are few, are also split where they fill more than half of the units, if that shortens what the busiest one
    does by a quarter.
    """
    steps = -(-problem.K // (config.tile_k * tiles_per_step(problem, config, arch)))
    most = min(MAX_SPLIT_K, steps // 2)
    places, tiles = NUM_CUS[arch] * workgroups_per_unit(problem, config, arch), max(tiles, 1)
    if problem.split == REDUCTION or most < 2 or tiles > places:
        return 1
    if places >= 2 * tiles:
        return min(most, places // tiles)
    parts = range(2, min(most, 4) + 1) if config.tile_m <= 32 else ()
    return next((p for p in parts if -(-tiles * p // places) * -(-steps // p) <= 0.75 * steps), 1)


def expected_tiles(problem: GroupedProblem, config: GroupedConfig) -> int:
    """Tiles there are if half of the last one of every group is empty."""
    columns = -(-problem.N // config.tile_n)
    if problem.split == REDUCTION:
        return problem.G * -(-problem.M // config.tile_m) * columns
    used = max(1, min(problem.G, problem.M))
    return max(used, -(-problem.M // config.tile_m) + used // 2) * columns


def _row_tiles(rows: int, groups: int, tile_m: int) -> int:
    """Tiles of rows that groups share as equally as can be."""
    each, more = divmod(rows, max(groups, 1))
    return more * -(-(each + 1) // tile_m) + (groups - more) * -(-each // tile_m)


@dataclass(frozen=True)
class _Rating:
    """A configuration in the model, in clocks of the whole call: with half of the last tile of every group empty, with equal groups,
    and with half of all rows in one group. *_busy: of the busiest compute unit; without: or what memory takes, if that is more."""

    config: GroupedConfig
    tiles: int
    expected_busy: float
    expected: float
    equal: float
    uneven: float
    growth: float  # main-loop steps of the busiest compute unit, uneven groups to equal ones


def _rate(problem: GroupedProblem, config: GroupedConfig, arch: str) -> _Rating:
    cus, size = NUM_CUS[arch], elem_bytes(problem, arch)
    expected = expected_tiles(problem, config)
    config = replace(config, split_k=split_of(problem, config, arch, expected))
    equal = uneven = expected
    k = problem.K
    if problem.split == ROWS:
        columns, half = -(-problem.N // config.tile_n), problem.M // 2
        equal = _row_tiles(problem.M, problem.G, config.tile_m) * columns
        if problem.G > 1:
            rest = _row_tiles(problem.M - half, problem.G - 1, config.tile_m)
            uneven = (-(-half // config.tile_m) + rest) * columns
    else:
        k = -(-problem.K // problem.G)
    matrix = size * config.tile_m * config.tile_n / MATRIX_FLOPS[arch]
    loading = (config.tile_m + config.tile_n) * size / LOAD_BYTES_PER_CLOCK
    clocks = (max(matrix, loading) + OVERLAP_LOSS * min(matrix, loading)) * k / config.split_k
    rounds = [-(-tiles * config.split_k // cus) for tiles in (expected, equal, uneven)]
    weights = problem.N * (min(problem.G, problem.M) * problem.K if problem.split == ROWS else problem.K)
    operands = (weights + problem.M * problem.K) * problem.a_dtype.itemsize
    memory = operands / MEMORY_BYTES_PER_CLOCK[arch]
    times = [max(each * clocks, memory) for each in rounds]
    return _Rating(config, expected, rounds[0] * clocks, times[0], times[1], times[2], rounds[2] / max(1, rounds[1]))


def default_config(problem: GroupedProblem, arch: str) -> tuple[GroupedConfig, list[str]]:
    """The configuration used when the caller names none, and the reasons in words.

    m_sizes is not known: half of the last tile of every group is taken to be empty. Then as in fourwave.ops.gemm.config: rounds of
    workgroups over the compute units, times what one tile takes, or the time to read the operands once. Of the tiles that are best by
    that, and with equal groups no slower than the best, one for which a group with half of all rows costs least.
    """
    cus = NUM_CUS[arch]
    ratings = [_rate(problem, config, arch) for config in candidates(problem, arch)]
    if not ratings:
        raise NotImplementedError(f"no tile of {arch} fits {problem}")
    best = min(ratings, key=lambda r: (r.expected, r.expected_busy))
    no_slower = [r for r in ratings if r.expected <= best.expected and r.equal <= best.equal]
    chosen = min(no_slower, key=lambda r: (r.growth > MAX_GROWTH, r.uneven, r.expected_busy))
    config, tiles = chosen.config, chosen.tiles
    split_as = (problem, config)  # what decided about split_k
    if problem.b_preshuffled:
        # The order of a sum is not to depend on the order of weights in memory.
        plain = replace(problem, b_preshuffled=False)
        split_as = (plain, default_config(plain, arch)[0])
        config = replace(config, split_k=split_as[1].split_k)
    workgroups = tiles * config.split_k
    count = f"{tiles} workgroup(s)" if config.split_k == 1 else f"{tiles} tile(s) and so {workgroups} workgroups"
    filled = "" if problem.split == REDUCTION else " if half of each group's last tile is empty"
    reasons = [
        f"tile {config.tile_m}x{config.tile_n}: {count} for {cus} compute units of {arch}{filled}, {-(-workgroups // cus)} round(s); "
        "no tile takes less modelled time, and of those that take as much none is better for uneven groups",
        f"with half of all rows in one group: {chosen.uneven / chosen.equal:.2f} times the modelled time of equal groups",
        f"{lds_bytes(problem, config, arch)} of {LDS_BYTES[arch]} bytes of LDS",
    ]
    if config.split_k > 1:
        each, decided = workgroups_per_unit(*split_as, arch), expected_tiles(*split_as)
        reasons.append(
            f"K split in {config.split_k}, whose sums a second launch adds"
            + (", as with plain weights, for the same bits" if problem.b_preshuffled else "")
            + f": {decided} tiles for {cus * each} places, {each} to a compute unit"
        )
    return config, reasons


def why_unsupported(problem: GroupedProblem, config: GroupedConfig | None, arch: str) -> str | None:
    """Why the FlyDSL grouped kernels cannot do this problem with this configuration (None: the default), or None."""
    if arch not in ARCHS:
        return f"arch {arch!r}: there are kernels for {', '.join(ARCHS)}"
    if config is not None and not isinstance(config, GroupedConfig):
        return f"config is a {type(config).__name__}: the grouped FlyDSL kernels take a GroupedConfig"
    if (reason := _why_operands_unsupported(problem, arch)) is not None:
        return reason
    if problem.split == REDUCTION and problem.layout != "NT":
        return "operands of wgrad are stored transposed: the kernels read them in natural order"
    outputs = (torch.float32, torch.bfloat16, torch.float16)
    if problem.out_dtype not in outputs:
        return f"out is {problem.out_dtype}: the kernels write float32, bfloat16 and float16"
    for name in ("M", "N", "K", "G"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: sizes are 32-bit in the kernels, at most {MAX_EXTENT}"
    if config is not None:
        return _why_config_unsupported(problem, config, arch)
    if not candidates(problem, arch):
        return f"no tile of {arch} fits it"
    return None


def _why_operands_unsupported(problem: GroupedProblem, arch: str) -> str | None:
    a, b = problem.a_dtype, problem.b_dtype
    plain = (None, "tensor", "row")
    weights = "128x128" if problem.split == ROWS else "1x128"
    known = [(x, y) for x in plain for y in plain] + [("1x128", weights), ("1x32", "1x32")]
    if (problem.a_scaling, problem.b_scaling) not in known:
        return f"scales {problem.a_scaling} x {problem.b_scaling} are not in this kernel"
    if dequantizes(problem, arch) and problem.b_preshuffled:
        return f"b is preshuffled with scales of blocks of 32: {arch} makes such codes bfloat16 on their way to LDS"
    if a.itemsize == b.itemsize == 1 and a.is_floating_point and b.is_floating_point:
        known_codes = FLOAT8["gfx950" if is_mx(problem) else arch]
        for name, dtype in (("a", a), ("b", b)):
            if dtype not in known_codes:
                codes = " and ".join(str(each).removeprefix("torch.") for each in known_codes)
                reader = "MX formats have" if is_mx(problem) else f"the matrix unit of {arch} reads"
                return f"{name} is {dtype}: {reader} codes as {codes}"
        return None
    if problem.a_scaling is not None or problem.b_scaling is not None or a != b:
        return f"a is {a} and b is {b}: the kernels take one type for both, or two 8-bit floats"
    if a not in (torch.bfloat16, torch.float16):
        return f"operands are {a}: the kernels take bfloat16, float16 and 8-bit floats"
    return None


def _why_config_unsupported(problem: GroupedProblem, config: GroupedConfig, arch: str) -> str | None:
    for name in ("tile_m", "tile_n", "tile_k", "num_stages", "waves_m", "waves_n", "group_m", "split_k"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: an int of at least 1 is needed"
    if config.waves_m * config.waves_n != 4:
        return f"{config.waves_m} x {config.waves_n} waves: a workgroup has four"
    if config.tile_m > 256 or config.tile_n > 256:
        return f"tile {config.tile_m}x{config.tile_n}: at most 256 each"
    for name, tile, waves in (("tile_m", config.tile_m, config.waves_m), ("tile_n", config.tile_n, config.waves_n)):
        if tile % (16 * waves):
            return f"{name}={tile}: {waves} wave(s) need a multiple of {16 * waves}"
    size = elem_bytes(problem, arch)
    slice_k = 4 * fragment_bytes(problem, arch) // size
    if config.tile_k % slice_k:
        return f"tile_k={config.tile_k}: a multiple of {slice_k} is needed"
    if (brings_scales(problem, arch) or problem.b_preshuffled) and config.tile_k != BLOCK_K:
        return f"tile_k={config.tile_k}: a K tile has {BLOCK_K} k where blocks of them have scales, or b is preshuffled"
    if problem.b_scaling == "128x128" and config.tile_n // config.waves_n > BLOCK_K:
        return f"{config.tile_n // config.waves_n} columns for each wave: they share a scale, which {BLOCK_K} have"
    if problem.a_scaling == "1x128" and problem.split == REDUCTION and config.tile_m > 128:
        return f"tile_m={config.tile_m}: with scales of columns, more than 128 rows need more registers than there are"
    a, b = operand_tiles(problem, config, arch)
    for each in (a, b)[: 1 if problem.b_preshuffled else 2]:
        loaded = in_memory(each, problem, arch)
        if (reason := each.problem() or loaded.problem()) is not None:
            return reason
    lds = lds_bytes(problem, config, arch)
    if lds > LDS_BYTES[arch]:
        return f"{lds} bytes of LDS: {arch} has {LDS_BYTES[arch]} per workgroup"
    if arch == "gfx950" and not 3 <= config.num_stages <= (4 if block_scaled(problem) or problem.b_preshuffled else 8):
        return f"num_stages={config.num_stages}: 3 or 4 LDS buffers, of which all but two are in flight at every wait"
    if arch == "gfx942" and config.num_stages != 2:
        return f"num_stages={config.num_stages}: the gfx942 kernel has 2 LDS buffers and two more tiles in registers"
    registers = min_registers(problem, config, arch)
    if registers > REGISTERS - RESERVED:
        return f"at least {registers} registers per lane and {RESERVED} for addresses: there are {REGISTERS}"
    if config.split_k > 1:
        if problem.split == REDUCTION:
            return f"split_k={config.split_k}: the reduction is split into groups already"
        if config.split_k > MAX_SPLIT_K:
            return f"split_k={config.split_k}: at most {MAX_SPLIT_K}"
    spans = (
        ("a", config.tile_m if problem.a_k_last else config.tile_k, problem.a_shape[-1] * problem.a_dtype.itemsize),
        ("b", config.tile_n if problem.b_k_last else config.tile_k, problem.b_shape[-1] * problem.b_dtype.itemsize),
        ("out", config.tile_m, problem.N * problem.out_dtype.itemsize),
    )
    for what, rows, row_bytes in spans:
        if rows * row_bytes >= MAX_TILE_BYTES:
            return f"{what}: {rows} rows of {row_bytes} bytes span {MAX_TILE_BYTES} bytes or more, the limit of a tile"
    if (reason := too_many_workgroups(grid_tiles(problem, config) * config.split_k, WORKGROUP)) is not None:
        return f"tiles of {config.tile_m}x{config.tile_n}, split_k={config.split_k}: {reason}"
    return None
