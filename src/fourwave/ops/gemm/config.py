"""Tunables of the CDNA GEMM kernels, the default choice, and the one rule for what they support.

Imports neither FlyDSL nor torch.cuda: the rule can be asked anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fourwave.blocks.flydsl.tiles import (
    LDS_BANKS,
    LDS_BYTES,
    REGISTERS,
    SCALE_K,
    WAVE,
    WORKGROUP,
    CodeTile,
    Geometry,
    OperandTile,
)
from fourwave.blocks.flydsl.turned_tiles import TurnedTile
from fourwave.ops.gemm import tuned_cdna
from fourwave.ops.gemm.problem import PACKED_E2M1

if TYPE_CHECKING:
    from fourwave.ops.gemm.problem import GemmProblem

ARCHS = ("gfx950", "gfx942")
NUM_XCDS = 8  # schedule.py
NUM_CUS = {"gfx950": 256, "gfx942": 304}  # MI350X, MI300X
MMA = {"gfx950": "16x16x32", "gfx942": "16x16x16"}  # of 16-bit operands
MMA_FLOAT32 = "16x16x4"
MMA_FLOAT8 = {"gfx950": "16x16x128", "gfx942": "16x16x32"}
FLOAT8 = {
    "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}  # the codes that the matrix unit knows
MAX_TILE_BYTES = 2**31  # one buffer resource: tile rows x row stride
MAX_EXTENT = 2**31 - 2**12  # sizes are int32, and rounding up to a tile must not overflow
RESERVED = 48  # registers per lane for addresses, loop state, epilogue
MAX_SPLIT_K = 32
GRID_THREADS = 2**32  # a launch has fewer in each dimension (HIP API reference, hipModuleLaunchKernel)
# What of GemmProblem.why_refused the kernels know, on either machine.
FEATURES = frozenset(f"scaling:{a}x{b}" for a in (None, "tensor", "row") for b in (None, "tensor", "row")) | {
    "scaling:1x32x1x32",
    "scaling:1x128x128x128",
    "preactivation",
    "bias_grad",
    "out:tensor",
    "swiglu",
    "batch_invariant",
    "out:1x32",
    "b_preshuffled",
    "scaling:Nonex1x32",
}
ACTIVATIONS = (None, "relu", "silu", "gelu_tanh", "gelu", "swiglu")


@dataclass(frozen=True)
class GemmConfig:
    """tile_*: output tile and reduction step of a workgroup; waves_m x waves_n = 4 waves share it.

    num_stages  LDS buffers per operand
    group_m     rows of tiles in a band that neighbouring workgroups walk through together (L2 reuse)
    mma         the matrix instruction; fixed by the machine
    split_k     workgroups that share the reduction of a tile (cdna.py)
    """

    tile_m: int = 256
    tile_n: int = 256
    tile_k: int = 32
    num_stages: int = 4
    waves_m: int = 2
    waves_n: int = 2
    group_m: int = 8
    mma: str = "16x16x32"
    split_k: int = 1

    def __str__(self):
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}, {self.num_stages} stages, "
            f"{self.waves_m}x{self.waves_n} waves, mma {self.mma}"
        ) + (f", K split in {self.split_k}" if self.split_k > 1 else "")


# tile_m, tile_n, tile_k, num_stages, waves_m, waves_n. One workgroup of the largest tile fills a compute unit's
# registers. Tiles of few rows are for small M, and give one wave all rows so that no two waves read the same B.
_CANDIDATES = {
    "gfx950": (
        (256, 256, 32, 4, 2, 2),
        (128, 128, 64, 4, 2, 2),
        (64, 64, 64, 4, 2, 2),
        (32, 128, 128, 3, 1, 4),
        (16, 64, 128, 4, 1, 4),
    ),
    "gfx942": (
        (256, 256, 32, 2, 2, 2),
        (128, 128, 32, 2, 2, 2),
        (64, 64, 64, 2, 2, 2),
        (32, 128, 64, 2, 1, 4),
        (16, 64, 128, 2, 1, 4),
    ),
}
# K as above in bytes, but whole fragments: with 128 of them LDS holds two stages of 256 x 256.
_CANDIDATES_FLOAT8 = {
    "gfx950": (
        (256, 256, 128, 2, 2, 2),
        (128, 128, 128, 4, 2, 2),
        (64, 64, 128, 4, 2, 2),
        (32, 128, 256, 3, 1, 4),
        (16, 64, 256, 4, 1, 4),
    ),
    "gfx942": (
        (256, 256, 64, 2, 2, 2),
        (128, 128, 64, 2, 2, 2),
        (64, 64, 128, 2, 2, 2),
        (32, 128, 128, 2, 1, 4),
        (16, 64, 256, 2, 1, 4),
    ),
}
# b preshuffled: one wave has all rows of the tile, so that no two waves load the same part of b. LDS has room for more stages of
# a alone, but a is small: what has to be ahead is b (SHUFFLED_AHEAD).
_CANDIDATES_SHUFFLED = {
    "gfx950": (
        (128, 128, 128, 4, 1, 4),
        (64, 128, 128, 4, 1, 4),
        (32, 128, 256, 3, 1, 4),
        (16, 64, 256, 3, 1, 4),
    ),
    "gfx942": (
        (128, 128, 128, 2, 1, 4),
        (64, 128, 128, 2, 1, 4),
        (32, 128, 128, 2, 1, 4),
        (16, 64, 256, 2, 1, 4),
    ),
}
SHUFFLED_AHEAD = 512  # k that preshuffled b is loaded ahead
# Parts of K of 8-bit operands in TN are whole multiples, whatever the tile, and b preshuffled or not: same bits. And of operands with scales
# that change along K, which come for as many k at a time.
SPLIT_STEP = SCALE_K
MAX_SCALED_K = 128  # tile_k of codes that become bfloat16 on their way to LDS
MAX_LOADS = 63  # in flight that s_waitcnt can count
# Of packed operands, and of one packed and one of 8 bits. Fragments of columns come in pairs (loaders.Fragments).
_CANDIDATES_FLOAT4 = (
    (256, 256, 128, 3, 2, 2),
    (128, 256, 128, 4, 2, 2),
    (128, 128, 256, 4, 2, 2),
    (64, 64, 256, 4, 2, 2),
    (32, 128, 256, 4, 1, 4),
)
_CANDIDATES_MIXED = (
    (128, 256, 128, 3, 2, 2),
    (128, 128, 128, 4, 2, 2),
    (64, 64, 128, 4, 2, 2),
    (32, 128, 256, 3, 1, 4),
)
# Of bfloat16 a and packed b, which is dequantized for each wave: few waves side by side in M. The last two: few rows.
_CANDIDATES_PLAIN_PACKED = (
    (128, 128, 128, 3, 2, 2),
    (64, 128, 128, 4, 1, 4),
    (32, 128, 128, 5, 1, 4),
    (16, 64, 128, 6, 1, 4),
)
# Per clock and compute unit: published peaks / CUs / clock. Of 16-bit operands; twice for 8-bit.
MATRIX_FLOPS = {"gfx950": 4096, "gfx942": 2048}
MATRIX_FLOPS_FLOAT32 = 256
LOAD_BYTES_PER_CLOCK = 64  # L1 to registers or LDS, per compute unit
MEMORY_BYTES_PER_CLOCK = {"gfx950": 3300, "gfx942": 2500}  # published bandwidth / clock
# Assumed, not measured: filling and draining a workgroup's pipeline; a second launch, from the end of the first.
WORKGROUP_CLOCKS = 2000
LAUNCH_CLOCKS = 4000
OVERLAP_LOSS = 0.3  # share of the shorter of the two that is not hidden; an assumption, not measured


def mma(elem_bytes: int, arch: str) -> str:
    """The matrix instruction for operands of 1, 2 or 4 bytes."""
    return MMA_FLOAT32 if elem_bytes == 4 else (MMA_FLOAT8 if elem_bytes == 1 else MMA)[arch]


def fragment_bytes(elem_bytes: int, arch: str) -> int:
    """Bytes per lane of what is read from LDS for one slice of K: one read of 16, and two for gfx950's K of 128."""
    return 32 if elem_bytes == 1 and arch == "gfx950" else 16


# Each operand tile is at least one load of four waves: 4096 codes.
_CANDIDATES_DEQUANTIZED = (
    (256, 256, 32, 2, 2, 2),
    (128, 128, 32, 2, 2, 2),
    (64, 64, 64, 2, 2, 2),
    (32, 64, 128, 2, 1, 4),
)


def candidates(arch: str, elem_bytes: int = 2) -> list[GemmConfig]:
    """The configurations that are compiled and tested for arch, for operands without scales of blocks."""
    if elem_bytes == 4:  # K as for 16 bits, in bytes
        halved = [(*sizes[:2], sizes[2] // 2, *sizes[3:]) for sizes in _CANDIDATES[arch]]
        return [GemmConfig(*sizes, mma=mma(4, arch)) for sizes in halved]
    table = _CANDIDATES_FLOAT8 if elem_bytes == 1 else _CANDIDATES
    return [GemmConfig(*sizes, mma=mma(elem_bytes, arch)) for sizes in table[arch]]


def candidates_for(problem: GemmProblem, arch: str) -> list[GemmConfig]:
    """The configurations that are compiled and tested for a problem's operands."""
    if arch == "gfx1250":
        from fourwave.ops.gemm import gfx1250_config

        return gfx1250_config.candidates(problem)
    if problem.b_preshuffled:
        return [GemmConfig(*sizes, mma=mma(1, arch)) for sizes in _CANDIDATES_SHUFFLED[arch]]
    if dequantizes(problem, arch):
        return [GemmConfig(*sizes, mma=mma(2, arch)) for sizes in _CANDIDATES_DEQUANTIZED]
    if dequantizes_b(problem):
        return [GemmConfig(*sizes, mma=mma(2, arch)) for sizes in _CANDIDATES_PLAIN_PACKED]
    if any(packed := packed_operands(problem)):
        table = _CANDIDATES_FLOAT4 if all(packed) else _CANDIDATES_MIXED
        return [GemmConfig(*sizes, mma=mma(1, arch)) for sizes in table]
    configs = candidates(arch, multiplied_bytes(problem, arch))
    # Scaling in software needs the accumulators in registers that vector instructions reach: 256, half of all.
    return [config for config in configs if not (wide_scaled(problem) and config.tile_m * config.tile_n > 128 * 256)]


def workspace_shape(problem: GemmProblem, config: GemmConfig) -> tuple[int, int]:
    """Of the float32 accumulators that the workgroups leave where K is split: a row for each part of each tile."""
    tiles = -(-problem.M // config.tile_m) * -(-problem.N // config.tile_n)
    sums = 0 if problem.bias_grad_dtype is None else config.tile_m // config.waves_m // 16
    if config.waves_n > 1 and sums % 2 == 0:
        sums //= 2  # epilogue.row_sums
    results = config.tile_m // config.waves_m // 16 * (config.tile_n // config.waves_n // 16) + sums
    return config.split_k * tiles, results * 1024


def modelled_clocks(
    config: GemmConfig, elem_bytes: float, arch: str, b_bytes: float | None = None
) -> tuple[float, float]:
    """(multiplying, loading): clocks per element of K that one tile takes on one compute unit. b_bytes: an element's of b, where it is
    loaded as another type than it is multiplied as."""
    rate = MATRIX_FLOPS_FLOAT32 if elem_bytes == 4 else MATRIX_FLOPS[arch] * 2 / elem_bytes
    matrix = 2 * config.tile_m * config.tile_n / rate
    loading = (config.tile_m * elem_bytes + config.tile_n * (b_bytes or elem_bytes)) / LOAD_BYTES_PER_CLOCK
    return matrix, loading


def modelled_time(problem: GemmProblem, config: GemmConfig, arch: str) -> float:
    """Clocks of the whole call: what the busiest compute unit does, or what memory takes; then the second launch."""
    cus, elem_bytes = NUM_CUS[arch], _modelled_bytes(problem, arch)
    tiles = _tiles(problem, config)
    matrix, loading = modelled_clocks(config, elem_bytes, arch, 0.5 if dequantizes_b(problem) else None)
    per_k = max(matrix, loading) + OVERLAP_LOSS * min(matrix, loading)
    k_each = -(-problem.K // config.split_k)
    if config.split_k > 1 and scaled_along_k(problem):
        k_each = -(-k_each // SPLIT_STEP) * SPLIT_STEP
    busiest = -(-tiles * config.split_k // cus) * (per_k * k_each + WORKGROUP_CLOCKS)
    sizes = zip((problem.M, problem.N), (problem.a_dtype, problem.b_dtype), packed_operands(problem), strict=True)
    operands = sum(rows * problem.K * dtype.itemsize / (1 + packed) for rows, dtype, packed in sizes)
    time = max(busiest, operands / MEMORY_BYTES_PER_CLOCK[arch])
    if config.split_k > 1:
        partials = 2 * 4 * config.split_k * tiles * config.tile_m * config.tile_n  # written and read
        time += LAUNCH_CLOCKS + partials / (LOAD_BYTES_PER_CLOCK * min(cus, tiles))
    return time


def _tiles(problem, config):
    return -(-problem.M // config.tile_m) * -(-problem.N // config.tile_n)


def default_config(problem: GemmProblem, arch: str) -> tuple[GemmConfig, list[str]]:
    """The configuration used when the caller names none, and the reasons in words.

    What was tuned for the problem's class (tuned_cdna.py), if anything; else the tile, and number of parts of K, with the
    least modelled time. A large tile loads least per multiplication, but leaves compute units idle where the output is
    small.
    """
    if arch == "gfx1250":
        from fourwave.ops.gemm import gfx1250_config

        return gfx1250_config.default_config(problem)
    config, reasons = _default_config(problem, arch)
    return config, list(reasons)


@functools.lru_cache(maxsize=4096)
def _default_config(problem, arch):
    tuned = tuned_cdna.lookup(problem, arch)
    if tuned is not None:
        if (why := _why_config_unsupported(problem, tuned, arch)) is None:
            return tuned, (f"tuned for {tuned_cdna.key(problem, arch)}", *_reasons(problem, tuned, arch))
        refused_tuned: tuple[str, ...] = (f"not what was tuned for {tuned_cdna.key(problem, arch)}, {tuned}: {why}",)
    else:
        refused_tuned = ()
    configs = candidates_for(problem, arch)
    if problem.b_preshuffled:
        # The order of a sum is not to depend on the order of weights in memory.
        split = _default_config(replace(problem, b_preshuffled=False), arch)[0].split_k
        configs = [replace(config, split_k=split) for config in configs]
    why_not = {config: _why_config_unsupported(problem, config, arch) for config in configs}
    supported = [config for config in configs if why_not[config] is None]
    choices = [
        choice
        for config in supported or configs
        for choice in (config, *(() if problem.b_preshuffled else split_candidates(problem, config, arch)))
    ]
    times = {config: modelled_time(problem, config, arch) for config in (*choices, *configs)}
    config = min(choices, key=times.__getitem__)  # the first of equals
    tiles, cus = _tiles(problem, config), NUM_CUS[arch]
    reasons = [
        f"tile {config.tile_m}x{config.tile_n}: {tiles} tile(s) for {cus} compute units of {arch}, "
        f"{-(-tiles * config.split_k // cus)} round(s); the least modelled time of {len(choices)} choices",
        *_reasons(problem, config, arch),
    ]
    whole = replace(config, split_k=1)
    if problem.b_preshuffled:
        times[whole] = modelled_time(problem, whole, arch)
        reasons.append(
            f"b is preshuffled: {SHUFFLED_AHEAD} of K of it on their way to registers, none through LDS; parts of K as "
            "without, so that sums have the same bits"
        )
    if config.split_k > 1:
        reasons.append(
            f"K split in {config.split_k}: {tiles} tile(s) would leave {cus - tiles} compute units idle; modelled "
            f"{times[config]:.0f} clocks, {times[whole]:.0f} without; batch_invariant would keep K whole"
        )
    elif problem.batch_invariant:
        reasons.append("batch_invariant: K is not split, and every tile adds along K in the same order")
    taller = [other for other in supported if other.tile_m > config.tile_m]
    if problem.M <= config.tile_m and taller and all(times[other] > times[whole] for other in taller):
        height = min(other.tile_m for other in taller)
        reasons.append(f"M={problem.M}: of a taller tile's rows at least {height - problem.M} would not exist")
    for other in configs:
        if why_not[other] is not None and times[other] < times[config]:
            reasons.append(f"not tile {other.tile_m}x{other.tile_n}: {why_not[other]}")
    return config, (*refused_tuned, *reasons)


def split_candidates(problem: GemmProblem, config: GemmConfig, arch: str) -> list[GemmConfig]:
    """config with K split, as long as there are compute units for the parts and each has a few K tiles."""
    parts = [
        split
        for split in (2, 4, 8, 16, 32)
        if _tiles(problem, config) * split <= NUM_CUS[arch] and problem.K >= split * 4 * config.tile_k
    ]
    if not parts or _why_config_unsupported(problem, replace(config, split_k=2), arch) is not None:
        return []
    return [replace(config, split_k=split) for split in parts]


def _reasons(problem, config, arch):
    """What is to be said of any configuration."""
    elem_bytes = multiplied_bytes(problem, arch)
    b_bytes = 0.5 if dequantizes_b(problem) else None
    matrix, loading = modelled_clocks(config, _modelled_bytes(problem, arch), arch, b_bytes)
    lds = lds_bytes(
        config, problem.layout, elem_bytes, arch, brings_scales(problem, arch), packed_operands(problem), problem.b_preshuffled
    )  # fmt: skip
    return (
        f"modelled, not measured: {matrix:g} clocks of multiplying and {loading:g} of loading per element of K",
        f"{config.num_stages} stages of tile_k={config.tile_k}: {lds} of {LDS_BYTES[arch]} bytes of LDS",
        f"each of {NUM_XCDS} dies (XCDs) has a contiguous range of tiles, in bands of {config.group_m} rows of tiles: what "
        "runs together on a die shares rows of a and columns of b in its L2",
    )


def in_halves(config: GemmConfig, elem_bytes: int, arch: str) -> bool:
    """Whether the kernel brings operand tiles in halves (cdna4_halves.py), for which two stages are enough."""
    return arch == "gfx950" and elem_bytes == 1 and config.num_stages == 2


def k_per_barrier(config: GemmConfig, elem_bytes: int, arch: str) -> int:
    """K that the main loop covers for each of its barriers: a tile, or one of four phases."""
    return config.tile_k // (4 if in_halves(config, elem_bytes, arch) else 1)


def shuffled_ahead(config: GemmConfig) -> int:
    """K tiles that preshuffled b is loaded ahead."""
    return SHUFFLED_AHEAD // config.tile_k


def split_step(problem: GemmProblem, geo: Geometry) -> int:
    """k that the parts of a split K are whole multiples of."""
    if scaled_along_k(problem) or (problem.layout == "TN" and problem.a_dtype.itemsize == 1):
        return SPLIT_STEP
    return geo.tile_k * geo.tiles_per_step


def dequantizes(problem: GemmProblem, arch: str) -> bool:
    """Whether codes become bfloat16 on their way to LDS: gfx942's matrix unit takes no scales of blocks."""
    return block_scaled(problem) and arch == "gfx942"


def keeps_scales(problem: GemmProblem, config: GemmConfig, arch: str) -> bool:
    """Whether scales of rows, of blocks of 32 k, stay in registers for 512 k. gfx942's largest tile has 256 results in a lane's registers,
    and the others have no room for that: it loads them again for each tile."""
    return dequantizes(problem, arch) and config.tile_m * config.tile_n < 256 * 256


def dequantizes_b(problem: GemmProblem) -> bool:
    """Whether b's packed codes become bfloat16 in registers, to be multiplied with bfloat16 a."""
    return problem.a_dtype == torch.bfloat16 and problem.b_dtype == PACKED_E2M1


def packed_operands(problem: GemmProblem) -> tuple[bool, bool]:
    """Whether a and b are packed e2m1, two codes in a byte."""
    return problem.a_dtype == PACKED_E2M1, problem.b_dtype == PACKED_E2M1


def _modelled_bytes(problem: GemmProblem, arch: str) -> float:
    """As multiplied_bytes; 1/2 where both operands are packed. The matrix unit takes a mix at the rate of 8 bits."""
    return 0.5 if all(packed_operands(problem)) else multiplied_bytes(problem, arch)


def multiplied_bytes(problem: GemmProblem, arch: str) -> int:
    """Bytes of an operand's element in LDS, as it is multiplied."""
    return 2 if dequantizes(problem, arch) else problem.a_dtype.itemsize


def block_scaled(problem: GemmProblem) -> bool:
    """Whether the operands have a scale for each block of 32 k."""
    return problem.a_scaling == problem.b_scaling == "1x32"


def wide_scaled(problem: GemmProblem) -> bool:
    """Whether each row of a has a scale for each 128 k, and each 128 x 128 elements of b one."""
    return (problem.a_scaling, problem.b_scaling) == ("1x128", "128x128")


def scaled_along_k(problem: GemmProblem) -> bool:
    """Whether an operand has scales that change along K."""
    return not {problem.a_scaling, problem.b_scaling} <= {None, "tensor", "row"}


def brings_scales(problem: GemmProblem, arch: str) -> bool | str:
    """Whether scales of blocks are brought beside the operands, and which (Geometry.scales)."""
    if wide_scaled(problem):
        return "128"
    if dequantizes_b(problem):
        return "b"
    return block_scaled(problem) and not dequantizes(problem, arch)


def code_format(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")[:4]


def operand_tiles(
    config: GemmConfig,
    layout: str,
    elem_bytes: int,
    arch: str,
    swiglu: bool = False,
    packed: tuple[bool, bool] = (False, False),
) -> tuple[OperandTile, OperandTile]:
    """(a, b) tiles as they lie in LDS: in the operand's memory order.

    group (OperandTile): pairs of N fragments are woven where K is contiguous; where it is not, up to four on gfx942, which turns
    such tiles on their way to LDS (turned_tiles.py), and of 32-bit operands on gfx950 (column_chunks.py).
    swiglu: a wave's groups of N fragments come in turn from the two halves of b, so that it holds both factors.
    """
    banks = LDS_BANKS[arch]
    fragment = fragment_bytes(elem_bytes, arch)

    def tile(extent, waves, k_contiguous, is_b):
        fragments = extent // waves // 16
        if k_contiguous:
            groups: tuple[int, ...] = (2, 1) if is_b else (1,)
        else:
            groups = (4, 2, 1) if arch == "gfx942" or elem_bytes == 4 else (1,)
        swiglu_b = swiglu and is_b
        group = next((g for g in groups if fragments % (2 * g if swiglu_b else g) == 0), 1)
        pairs = 16 * group if swiglu_b else 0
        if packed[is_b]:
            size = (extent, config.tile_k // 2) if k_contiguous else (extent // 2, config.tile_k)
            return OperandTile(*size, k_contiguous, 1, banks, group, 16, packed=True, pairs=pairs)
        if arch == "gfx942" and not k_contiguous:
            return TurnedTile.of(extent, config.tile_k, elem_bytes, banks, group, pairs)
        # Beside packed codes, of which a lane has 32 k in a row.
        together = 4 if elem_bytes == 2 and any(packed) else 1
        return OperandTile(
            extent, config.tile_k, k_contiguous, elem_bytes, banks, group, fragment, pairs=pairs, together=together
        )

    return (
        tile(config.tile_m, config.waves_m, layout != "NT", is_b=False),
        tile(config.tile_n, config.waves_n, layout == "TN", is_b=True),
    )


def geometry(
    config: GemmConfig,
    layout: str,
    elem_bytes: int,
    arch: str,
    scales: bool | str = False,
    swiglu: bool = False,
    packed: tuple[bool, bool] = (False, False),
    b_ahead: int = 0,
) -> Geometry:
    """scales: of blocks, brought beside the operands (brings_scales). swiglu: operand_tiles. packed: which of a and b is packed e2m1.
    b_ahead: shuffled_ahead, of preshuffled b."""
    a, b = operand_tiles(config, layout, elem_bytes, arch, swiglu, packed)
    return Geometry(
        config.tile_m, config.tile_n, config.tile_k, config.num_stages, config.waves_m, config.waves_n, config.group_m,
        a, b, scales, b_ahead,
    )  # fmt: skip


def lds_bytes(
    config: GemmConfig,
    layout: str,
    elem_bytes: int,
    arch: str,
    scales: bool | str = False,
    packed: tuple[bool, bool] = (False, False),
    b_preshuffled: bool = False,
) -> int:
    geo = geometry(config, layout, elem_bytes, arch, scales, packed=packed)
    idle = 0 if in_halves(config, elem_bytes, arch) else geo.idle_bytes
    stage_bytes = geo.a.stage_bytes + (0 if b_preshuffled else geo.b.stage_bytes)
    return config.num_stages * stage_bytes + geo.scale_bytes + idle


def min_registers(
    config: GemmConfig,
    elem_bytes: int,
    arch: str,
    packed: tuple[bool, bool] = (False, False),
    b_preshuffled: bool = False,
) -> int:
    """Registers per lane that cannot be avoided: accumulators, fragments, gfx942's loads in flight.

    The next set of fragments is read while this one is multiplied, which finishes with those of b one by one
    (mma.WaveMma.step): before the last of b, all of a and one of b are there twice.
    """
    frags_m, frags_n = config.tile_m // config.waves_m // 16, config.tile_n // config.waves_n // 16
    accumulators = frags_m * frags_n * 4
    size_a, size_b = (4 if each else fragment_bytes(elem_bytes, arch) // 4 for each in packed)
    of_b = frags_n + 1
    if b_preshuffled:
        of_b = frags_n * SHUFFLED_AHEAD * elem_bytes // (16 * size_b)
    fragments = 2 * frags_m * size_a + of_b * size_b
    staged = 0
    if arch == "gfx942":
        rows = config.tile_m + (0 if b_preshuffled else config.tile_n)
        staged = rows * config.tile_k * elem_bytes // (4 * 4 * WAVE)
    return accumulators + fragments + staged


def too_many_workgroups(workgroups: int, threads: int) -> str | None:
    """Why a launch of so many workgroups, each of so many threads, in one dimension is refused, or None."""
    if workgroups * threads < GRID_THREADS:
        return None
    return f"{workgroups} workgroups of {threads} threads: a launch has fewer than 2**32 threads; take larger tiles"


def why_unsupported(problem: GemmProblem, config: GemmConfig | None, arch: str) -> str | None:
    """Why the FlyDSL GEMM kernels cannot do this problem with this configuration (None: the default), or None.

    The row strides of the operands are not part of a problem: amd.run copies an operand that is not aligned or whose
    stride is beyond the limit.
    """
    if arch not in (*ARCHS, "gfx1250"):
        return f"arch {arch!r}: there are kernels for {', '.join((*ARCHS, 'gfx1250'))}"
    if config is not None and not isinstance(config, GemmConfig):
        return f"config is a {type(config).__name__}: the FlyDSL kernels take a GemmConfig"
    if arch == "gfx1250":
        from fourwave.ops.gemm import gfx1250_config

        return gfx1250_config.why_unsupported(problem, config)
    if problem.layout not in ("TN", "NN", "NT"):
        return f"layout {problem.layout!r}: the kernels have TN, NN and NT"
    if (reason := _why_operands_unsupported(problem, arch) or problem.why_refused(FEATURES)) is not None:
        return reason
    outputs = (torch.float32, torch.bfloat16, torch.float16)
    if problem.out_scaling is not None:
        codes = FLOAT8["gfx950"] + (FLOAT8["gfx942"] if arch == "gfx942" else ())
        if problem.out_dtype not in codes:
            return f"quantized out is {problem.out_dtype}: the kernels for {arch} write {', '.join(map(str, codes))}"
    elif problem.out_dtype not in outputs:
        return f"out is {problem.out_dtype}: the kernels write float32, bfloat16 and float16"
    if problem.bias_dtype is not None and problem.bias_dtype not in outputs:
        return f"bias is {problem.bias_dtype}: the kernels read float32, bfloat16 and float16"
    for name in ("preactivation", "bias_grad"):
        if (dtype := getattr(problem, f"{name}_dtype")) is not None and dtype not in outputs:
            return f"{name} is {dtype}: the kernels write float32, bfloat16 and float16"
    if problem.bias_grad_dtype is not None and problem.layout != "NT":
        return f"bias_grad with layout {problem.layout}: the kernels sum the rows of op(a) where a is [K, M], NT"
    if problem.bias_grad_dtype is not None and problem.a_scaling not in (None, "tensor", "row", "1x32"):
        return f"bias_grad with a_scaling {problem.a_scaling!r}: the kernels sum rows with the scales that go into the products"
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r}: the kernels have {', '.join(a for a in ACTIVATIONS if a)}"
    for name in ("M", "N", "K"):
        if getattr(problem, name) > MAX_EXTENT:
            return f"{name}={getattr(problem, name)}: sizes are 32-bit in the kernels, at most {MAX_EXTENT}"
    if problem.activation == "swiglu" and wide_scaled(problem):
        return "swiglu with scales of blocks of 128: the kernels do not bring those of both halves of b"
    if config is None:
        if min(problem.M, problem.N) == 0:
            return None
        config, _ = default_config(problem, arch)
        if (reason := _why_config_unsupported(problem, config, arch)) is None:
            return None
        # Every tile is refused: what stops the smallest is least about tiles.
        reason = _why_config_unsupported(problem, candidates_for(problem, arch)[-1], arch) or reason
        return f"none of the tiles of {arch} does: {reason}"
    return _why_config_unsupported(problem, config, arch)


def _why_operands_unsupported(problem, arch):
    a, b = problem.a_dtype, problem.b_dtype
    if problem.b_preshuffled and not all(each.itemsize == 1 and each.is_floating_point for each in (a, b)):
        return f"b is preshuffled with operands {a} and {b}: its order is that of fragments of two 8-bit floats"
    if any(packed_operands(problem)):
        return _why_packed_unsupported(problem, arch)
    if a.itemsize == b.itemsize == 1 and a.is_floating_point and b.is_floating_point:
        for name, dtype in (("a", a), ("b", b)):
            formats = FLOAT8["gfx950" if block_scaled(problem) else arch]
            if dtype not in formats:
                known = " and ".join(str(each).removeprefix("torch.") for each in formats)
                reader = "MX formats have" if block_scaled(problem) else f"the matrix unit of {arch} reads"
                hint = "" if block_scaled(problem) or arch != "gfx942" else "; fw.quantize makes them with fnuz=True"
                return f"{name} is {dtype}: {reader} codes as {known}{hint}"
        if problem.b_preshuffled and dequantizes(problem, arch):
            return f"b is preshuffled with scales of blocks of 32: {arch} makes their codes numbers on the way to LDS, which it skips"
        if wide_scaled(problem) and problem.layout != "TN":
            return f"layout {problem.layout} with scales of blocks of 128: the kernels have TN"
        return None
    if block_scaled(problem) or wide_scaled(problem):
        return f"scales of blocks and operands of {a} and {b}: they belong to 8-bit floats"
    if a != b:
        return f"a is {a} and b is {b}: the kernels take one type for both, or two 8-bit floats"
    if a not in (torch.float32, torch.bfloat16, torch.float16):
        return f"operands are {a}: the kernels take float32, bfloat16, float16 and 8-bit floats"
    return None


def _why_packed_unsupported(problem, arch):
    if arch != "gfx950":
        return f"packed e2m1 operands: {arch} has no matrix instruction for them, and no kernel that dequantizes them"
    if dequantizes_b(problem) and (problem.a_scaling, problem.b_scaling) == (None, "1x32"):
        if problem.layout == "NT":
            return f"a is {problem.a_dtype} in layout NT: the kernels multiply it with weights, in TN and NN"
        return _why_rows_uneven(problem)
    known = (PACKED_E2M1, *FLOAT8["gfx950"])
    for name, dtype, scaling in (("a", problem.a_dtype, problem.a_scaling), ("b", problem.b_dtype, problem.b_scaling)):
        if dtype not in known or scaling != "1x32":
            return (
                f"{name} is {dtype} with scales {scaling!r} beside packed e2m1: the kernels multiply MXFP4 with MXFP4 and "
                "MXFP8, both with scales '1x32', and bfloat16 a with MXFP4 b"
            )
    return _why_rows_uneven(problem)


def _why_rows_uneven(problem):
    """Of packed operands; and where swiglu does not find the halves of packed b."""
    lengths = {"TN": ("K", "K"), "NN": ("K", "N"), "NT": ("M", "N")}[problem.layout]
    for name, packed, length in zip("ab", packed_operands(problem), lengths, strict=True):
        if packed and getattr(problem, length) % 2:
            return (
                f"{length}={getattr(problem, length)}: rows of {name} are packed, two codes in a byte; {length} is even"
            )
    if problem.activation == "swiglu" and problem.layout != "TN" and problem.b_dtype == PACKED_E2M1:
        return f"swiglu with packed e2m1 in layout {problem.layout}: the kernels bring both halves of b where K is contiguous"
    return None


def _why_not_shuffled(problem, config, arch):
    """Why preshuffled b cannot be brought with a configuration."""
    if in_halves(config, 1, arch):
        return "b is preshuffled and num_stages=2: the kernel that brings tiles in halves takes both from LDS"
    ahead = shuffled_ahead(config)
    if SHUFFLED_AHEAD % config.tile_k or ahead < config.num_stages - 1:
        return (
            f"tile_k={config.tile_k} with {config.num_stages} stages: preshuffled b is loaded {SHUFFLED_AHEAD} of K ahead, which "
            "must be whole tiles, and no less than a"
        )
    if arch == "gfx950":
        swiglu = problem.activation == "swiglu"
        geo = geometry(config, problem.layout, 1, arch, brings_scales(problem, arch), swiglu, b_ahead=ahead)
        if (config.num_stages - 1) * geo.loads_per_tile > MAX_LOADS:
            return f"{(config.num_stages - 1) * geo.loads_per_tile} loads in flight: s_waitcnt counts to {MAX_LOADS}"
    return None


def _why_config_unsupported(problem, config, arch):
    for name in ("tile_m", "tile_n", "tile_k", "num_stages", "waves_m", "waves_n", "group_m", "split_k"):
        value = getattr(config, name)
        if not isinstance(value, int) or value < 1:
            return f"{name}={value!r}: an int of at least 1 is needed"
    elem_bytes, packed = multiplied_bytes(problem, arch), packed_operands(problem)
    if config.mma != mma(elem_bytes, arch):
        return f"mma {config.mma}: the {arch} kernel multiplies with {mma(elem_bytes, arch)}"
    if config.split_k > 1:
        if config.split_k > MAX_SPLIT_K:
            return f"split_k={config.split_k}: at most {MAX_SPLIT_K}"
        if problem.batch_invariant:
            return f"split_k={config.split_k} with batch_invariant: sums are not split, whatever M is"
        if in_halves(config, elem_bytes, arch):
            return (
                f"split_k={config.split_k} with num_stages=2: the kernel that brings tiles in halves does not split K"
            )
        if config.tile_m * config.tile_n > 128 * 256:
            return (
                f"split_k={config.split_k} with tile {config.tile_m}x{config.tile_n}: the launch that adds the parts has "
                "no matrix instructions, and so half of the registers for a wave's results"
            )
        if workspace_shape(problem, config)[0] >= 2**31:
            return f"split_k={config.split_k}: the workspace has 2**31 rows or more"
    if config.waves_m * config.waves_n != 4:
        return f"{config.waves_m} x {config.waves_n} waves: a workgroup has four"
    if config.tile_m > 256 or config.tile_n > 256:
        return f"tile {config.tile_m}x{config.tile_n}: at most 256 each"
    for name, tile, waves in (("tile_m", config.tile_m, config.waves_m), ("tile_n", config.tile_n, config.waves_n)):
        if tile % (16 * waves):
            return f"{name}={tile}: {waves} wave(s) need a multiple of {16 * waves}"
    slice_k = 128 if any(packed) else 4 * fragment_bytes(elem_bytes, arch) // elem_bytes
    if any(packed):
        if config.num_stages == 2 and elem_bytes == 1:
            return "num_stages=2: the kernel that brings tiles in halves does not take packed e2m1"
        if packed[0] and problem.layout == "NT" and config.tile_m * config.tile_n == 256 * 256:
            return (
                "tile 256x256 in layout NT: packed codes are put in order in registers, of which the compiler runs out"
            )
        for name, each, contiguous, tile, waves in (
            ("tile_m", packed[0], problem.layout != "NT", config.tile_m, config.waves_m),
            ("tile_n", packed[1], problem.layout == "TN", config.tile_n, config.waves_n),
        ):
            if each and not contiguous and tile % (32 * waves):
                return f"{name}={tile}: packed codes are read 32 columns at a time, {waves} wave(s) need a multiple of {32 * waves}"
    if config.tile_k % slice_k:
        return f"tile_k={config.tile_k}: a multiple of {slice_k} is needed"
    swiglu = problem.activation == "swiglu"
    if swiglu and config.tile_n // config.waves_n % 32:
        return f"swiglu with tile_n={config.tile_n}: {config.waves_n} waves need pairs of 16 columns, a multiple of {32 * config.waves_n}"
    if swiglu and block_scaled(problem) and in_halves(config, elem_bytes, arch):
        return "swiglu with scales of blocks of 32 and num_stages=2: the compiler runs out of registers"
    if problem.b_preshuffled and (reason := _why_not_shuffled(problem, config, arch)) is not None:
        return reason
    a, b = operand_tiles(config, problem.layout, elem_bytes, arch, swiglu, packed)
    for tile in (a, b, *((CodeTile.of(a), CodeTile.of(b)) if dequantizes(problem, arch) else ())):
        if (reason := tile.problem()) is not None:
            return reason
    lds = lds_bytes(
        config, problem.layout, elem_bytes, arch, brings_scales(problem, arch), packed, problem.b_preshuffled
    )  # fmt: skip
    if lds > LDS_BYTES[arch]:
        return f"{lds} bytes of LDS: {arch} has {LDS_BYTES[arch]} per workgroup"
    if arch == "gfx950":
        if config.num_stages < 2:
            return f"num_stages={config.num_stages}: at least 2 are needed"
        if in_halves(config, elem_bytes, arch):
            least = 256 if block_scaled(problem) else 128
            if (config.waves_m, config.waves_n, config.tile_k) != (2, 2, slice_k) or min(
                config.tile_m, config.tile_n
            ) < least:
                return (
                    f"num_stages=2: tiles of 8-bit operands are brought in halves, which takes 2x2 waves, "
                    f"tile_k={slice_k} and at least {least}x{least}"
                )
        elif config.num_stages == 2 and lds * 3 // 2 <= LDS_BYTES[arch]:
            return "num_stages=2: every wait would drain all loads, and LDS has room for a third stage"
        if brings_scales(problem, arch) and SCALE_K % config.tile_k:
            return f"tile_k={config.tile_k}: scales come for {SCALE_K} of K at a time, which it must divide"
        # 4 KiB of LDS for each load in flight: what fits in LDS is less than s_waitcnt can count.
    elif wide_scaled(problem) and SCALE_K % config.tile_k:
        return f"tile_k={config.tile_k}: scales come for {SCALE_K} of K at a time, which it must divide"
    elif dequantizes(problem, arch) and config.tile_k > MAX_SCALED_K:
        return f"tile_k={config.tile_k}: of scales that come for {SCALE_K} of K at a time, a tile uses those of at most {MAX_SCALED_K}"
    elif config.num_stages != 2:
        return f"num_stages={config.num_stages}: the gfx942 kernel has 2 LDS buffers and one more tile in registers"
    if problem.out_scaling == "1x32":
        columns = config.tile_n // config.waves_n // (problem.N // problem.out_columns)
        if columns % 32:
            return f"tile {config.tile_m}x{config.tile_n}: a wave has {columns} columns of out, no whole blocks of 32"
        if problem.out_direction != "rowwise" and config.tile_m // config.waves_m % 32:
            return f"tile {config.tile_m}x{config.tile_n}: a wave has {config.tile_m // config.waves_m} rows, no whole blocks of 32"
    if wide_scaled(problem):
        if config.tile_m * config.tile_n > 128 * 256 or config.tile_n // config.waves_n > 128:
            return f"tile {config.tile_m}x{config.tile_n}: products of 128 k are scaled in registers, at most 128x256 of them"
    registers = min_registers(config, elem_bytes, arch, packed, problem.b_preshuffled)
    if problem.bias_grad_dtype is not None:
        # gfx942, 16 bits: where gradients are 16-bit, too, and out is added to, 7 registers are spilled.
        crowded = arch == "gfx950" or (elem_bytes < 4 and problem.a_scaling != "1x32")
        if crowded and config.tile_m * config.tile_n == 256 * 256:
            return f"tile 256x256: with the sums for bias_grad the compiler runs out of registers on {arch}"
        if in_halves(config, elem_bytes, arch):
            return "bias_grad with num_stages=2: the kernel that brings tiles in halves does not sum their rows"
        registers += config.tile_m // config.waves_m // 16 * 4 + fragment_bytes(elem_bytes, arch) // 4  # sums, ones
    if registers > REGISTERS - RESERVED:
        return f"at least {registers} registers per lane and {RESERVED} for addresses: there are {REGISTERS}"
    for each, what, dtype, rows, inner in (
        (packed[0], "a", problem.a_dtype, config.tile_m if problem.layout != "NT" else config.tile_k, problem.M if problem.layout == "NT" else problem.K),
        (packed[1], "b", problem.b_dtype, config.tile_n + swiglu * problem.N // 2 if problem.layout == "TN" else config.tile_k, problem.K if problem.layout == "TN" else problem.N),
    ):  # fmt: skip
        if rows * inner * dtype.itemsize >= MAX_TILE_BYTES * (1 + each):
            return f"{what}: {rows} rows of {inner} elements span {MAX_TILE_BYTES} bytes or more, the limit of a tile"
    for what, columns, dtype in (
        ("out", problem.out_columns, problem.out_dtype),
        ("preactivation", problem.N, problem.preactivation_dtype),
    ):
        if dtype is not None and config.tile_m * columns * dtype.itemsize >= MAX_TILE_BYTES:
            return f"{what}: {config.tile_m} rows of {columns} elements span {MAX_TILE_BYTES} bytes or more, the limit of a tile"
    tiles = -(-problem.M // config.tile_m) * -(-problem.N // config.tile_n)
    if (reason := too_many_workgroups(tiles * config.split_k, WORKGROUP)) is not None:
        return f"tiles of {config.tile_m}x{config.tile_n}, split_k={config.split_k}: {reason}"
    return None
