"""gfx942's operand tiles that are turned on their way to LDS: who loads, exchanges, writes and reads what; all of it on the host.

The reads and writes are those of blocks/flydsl/turned.py, worked out here from the lane layouts of the matrix instructions.
"""

from __future__ import annotations

import dataclasses

import pytest

from fourwave.blocks.flydsl.tiles import LDS_BANKS, bank_conflicts, read_b128_groups
from fourwave.blocks.flydsl.turned_tiles import TurnedSource, TurnedTile
from fourwave.ops.gemm.config import GemmConfig, candidates, candidates_for, operand_tiles
from fourwave.ops.gemm.problem import GemmProblem
from fourwave.ops.grouped_gemm import config as grouped_config
from fourwave.testing.grouped_cases import GroupedCase

ARCH = "gfx942"
WRITE_GROUPS = [range(first, first + 8) for first in range(0, 64, 8)]


def dequantized() -> list[GemmConfig]:
    import torch

    codes = torch.float8_e4m3fn
    problem = GemmProblem(64, 64, 64, "NN", codes, codes, torch.bfloat16, a_scaling="1x32", b_scaling="1x32")
    return candidates_for(problem, ARCH)


def grouped() -> set[tuple[int, TurnedTile]]:
    """Those of dgrad and wgrad."""
    found = set()
    for scaling in (None, "tensor", "blocks", "1x32"):
        for kind in ("dgrad", "wgrad"):
            problem = GroupedCase(kind, (3, 0, 2), 64, 256, scaling=scaling, fnuz=True).problem()
            for config in grouped_config.candidates(problem, ARCH):
                for tile in grouped_config.operand_tiles(problem, config, ARCH):
                    if isinstance(tile, TurnedTile):
                        found.add((problem.a_dtype.itemsize, tile))
    return found


# (bytes of an element in memory, image)
TILES = sorted(
    grouped()
    | {
        (loaded, tile)
        for loaded, size, configs in (
            *((size, size, candidates(ARCH, size)) for size in (1, 2, 4)),
            (1, 2, dequantized()),
        )
        for config in configs
        for swiglu in (False, True)
        for tile in operand_tiles(config, "NT", size, ARCH, swiglu)
        if isinstance(tile, TurnedTile)
    },
    key=str,
)
IDS = [
    f"{tile.extent}x{tile.tile_k}-{8 * loaded}-{8 * tile.elem_bytes}-{tile.group}-{tile.columns}-{tile.pairs}-{tile.fragment_bytes}"
    for loaded, tile in TILES
]
each_tile = pytest.mark.parametrize(("loaded", "tile"), TILES, ids=IDS)


def exchanged(source: TurnedSource) -> tuple[int, int]:
    """Masks: bits of columns inside a chunk of memory, and of k inside a chunk of the image, that the lanes tell apart."""
    exchanges = source.plan.exchanges
    return sum(1 << each.column_bit for each in exchanges), sum(1 << each.k_bit for each in exchanges)


def writes(source: TurnedSource) -> list[list[tuple[int, int]]]:
    """For each write, (column, k) of the chunk's first element by thread."""
    image = source.image
    assert image is not None
    columns, _ = exchanged(source)
    at = [
        (c, k)
        for k in range(0, max(source.loads, 1), image.chunk_k)
        for c in range(0, source.chunk_elems, image.columns)
        if not c & columns
    ]
    held = [source.held(thread) for thread in range(256)]
    return [[(column | c, first | k) for column, first in held] for c, k in at]


@each_tile
def test_every_chunk_of_memory_is_loaded_once(loaded: int, tile: TurnedTile) -> None:
    source = tile.in_memory(loaded)
    assert source.problem() is None and tile.problem() is None
    first = [source.first_chunk(thread) for thread in range(256)]
    chunks = [(line + load, chunk) for line, chunk in first for load in range(source.loads)]
    assert sorted(chunks) == [(k, c) for k in range(tile.tile_k) for c in range(source.chunks_per_line)]


@each_tile
def test_lanes_exchange_with_those_that_hold_other_k_of_the_same_columns(loaded: int, tile: TurnedTile) -> None:
    source = tile.in_memory(loaded)
    before = [source.first_chunk(thread) for thread in range(256)]
    after = [source.held(thread) for thread in range(256)]
    for each in source.plan.exchanges:
        # turned.py moves whole registers over bits 2 and 3, parts of them over 0 and 1.
        assert each.lane_bit in ((2, 3) if each.column_bit >= source.word_bits else (0, 1))
        for thread in range(256):
            other = thread ^ (1 << each.lane_bit)
            assert before[other] == (before[thread][0] ^ (1 << each.k_bit), before[thread][1])
            assert after[other] == (after[thread][0] ^ (1 << each.column_bit), after[thread][1])
    columns, k = exchanged(source)
    # All k of a chunk come together, and the columns that share it stay in one lane.
    assert k | (source.loads - 1) >= tile.chunk_k - 1 and columns & (tile.columns - 1) == 0


@each_tile
def test_every_element_is_written_once(loaded: int, tile: TurnedTile) -> None:
    places = set()
    elements = set()
    for threads in writes(tile.in_memory(loaded)):
        for column, k in threads:
            places.add(tile.address(*tile.place(column, k)))
            for c in range(tile.columns):
                for step in range(tile.chunk_k):
                    # One chunk in LDS holds them all.
                    assert tile.place(column + c, k + step) == tile.place(column, k)
                    elements.add((column + c, k + step))
    assert places == set(range(0, tile.stage_bytes, 16))
    assert elements == {(column, k) for column in range(tile.extent) for k in range(tile.tile_k)}


def reads(tile: TurnedTile) -> list[list[int]]:
    """Addresses by lane of each read: those of `columns` fragments at the k that one matrix instruction takes."""
    lane_k = 16 // tile.elem_bytes  # of a slice
    return [
        [
            tile.address(
                *tile.place(
                    tile.fragment_row(fragment, lane % 16), k0 + lane // 16 * lane_k + part * tile.chunk_k
                )
            )
            for lane in range(64)
        ]
        for k0 in range(0, tile.tile_k, 4 * lane_k)
        for fragment in range(0, tile.extent // 16, tile.columns)
        for part in range(tile.columns)
    ]  # fmt: skip


@each_tile
def test_no_bank_conflicts(loaded: int, tile: TurnedTile) -> None:
    banks = LDS_BANKS[ARCH]
    for addresses in reads(tile):
        assert bank_conflicts(addresses, read_b128_groups(banks), 16, banks) == 0
    for threads in writes(tile.in_memory(loaded)):
        for first in range(0, 256, 64):
            addresses = [tile.address(*tile.place(*at)) for at in threads[first : first + 64]]
            assert bank_conflicts(addresses, WRITE_GROUPS, 16, banks) == 0


@each_tile
def test_without_the_swizzle_there_are_conflicts(loaded: int, tile: TurnedTile) -> None:
    class Plain(TurnedTile):
        def key(self, line):
            return 0

    plain = Plain(**{f.name: getattr(tile, f.name) for f in dataclasses.fields(tile)})
    groups, banks = read_b128_groups(tile.banks), tile.banks
    assert sum(bank_conflicts(addresses, groups, 16, banks) for addresses in reads(plain)) > 0


@each_tile
def test_fragments_that_share_a_chunk_are_neighbours(loaded: int, tile: TurnedTile) -> None:
    for fragment in range(0, tile.extent // 16, tile.columns):
        for row in range(16):
            column = tile.fragment_row(fragment, row)
            assert [tile.fragment_row(fragment + q, row) for q in range(tile.columns)] == [
                column + q for q in range(tile.columns)
            ]


@each_tile
def test_runs_are_neighbouring_columns(loaded: int, tile: TurnedTile) -> None:
    """Element e of a lane group's run is column run * lane group + e of the group of fragments."""
    for lane_group in range(4):
        for e in range(tile.run):
            q, i = tile.run_element(e)
            assert tile.fragment_row(q, 4 * lane_group + i) == tile.run * lane_group + e
