"""LDS images of operand tiles: index maps are permutations, reads are free of bank conflicts, bytes add up.

The reads are those of loaders.Fragments, worked out here from the documented lane layouts, not from its code.
"""

from __future__ import annotations

import dataclasses

import pytest

from fourwave.blocks.flydsl.tiles import LDS_BANKS, OperandTile, bank_conflicts, read_b128_groups
from fourwave.blocks.flydsl.turned_tiles import TurnedTile
from fourwave.ops.gemm.config import candidates, in_halves, operand_tiles

LANES = range(64)


def stored_tiles(config, layout, elem_bytes, arch):
    """Tiles as they lie in LDS: halves where the kernel brings them so."""
    a, b = operand_tiles(config, layout, elem_bytes, arch)
    if in_halves(config, elem_bytes, arch):
        return a.half(config.waves_m), b.half(config.waves_n)
    return a, b


TILES = sorted(
    {
        (arch, tile)
        for arch in LDS_BANKS
        for elem_bytes in (1, 2, 4)
        for config in candidates(arch, elem_bytes)
        for layout in ("TN", "NN", "NT")
        for tile in stored_tiles(config, layout, elem_bytes, arch)
        if not isinstance(tile, TurnedTile)
    },
    key=str,
)
IDS = [
    f"{arch}-{tile.extent}x{tile.tile_k}-{8 * tile.elem_bytes}-{'k' if tile.k_contiguous else 'mn'}-{tile.group}-{tile.split}"
    for arch, tile in TILES
]


def line_of_k(tile: OperandTile) -> dict[int, int]:
    return {tile.source_row(line): line for line in range(tile.lines)}


def reads(arch: str, tile: OperandTile):
    """(addresses by lane, lane groups served together, bytes) of every LDS read of the first fragments."""
    size = tile.elem_bytes
    chunk = 16 // size  # elements
    lane_k = tile.fragment_bytes // size  # of a slice
    if tile.k_contiguous:
        for k0 in range(0, tile.tile_k, 4 * chunk):
            for fragment in range(tile.extent // 16):
                lines = [16 * fragment + lane % 16 for lane in LANES]
                chunks = [k0 // chunk + lane // 16 for lane in LANES]
                yield [tile.address(*at) for at in zip(lines, chunks)], read_b128_groups(tile.banks), 16
        return
    line_at = line_of_k(tile)
    if tile.transposing:
        rows = 8 // size  # of 16 columns, that 16 lanes read
        for k0 in range(0, tile.tile_k, 4 * chunk):
            for column0 in range(0, tile.extent, 16):
                for part in range(0, chunk, rows):
                    across = 16 // rows  # lanes that share a row
                    where = [
                        (k0 + chunk * (x // 16) + part + x % 16 // across, column0 + x % across * rows) for x in LANES
                    ]
                    addresses = [tile.address(line_at[k], m // chunk) + m % chunk * size for k, m in where]
                    yield addresses, [range(32), range(32, 64)], 8
        return
    assert tile.in_columns
    # Chunks of four columns; lanes that share one read it at neighbouring k.
    sharing = 4 // tile.group
    for k0 in range(0, tile.tile_k, 4 * lane_k):
        for column0 in range(0, tile.extent, 16 * tile.group):
            for k in range(0, lane_k, sharing):
                where = [(k0 + lane_k * (x // 16) + k + x % sharing, column0 + x % 16 // sharing * 4) for x in LANES]
                addresses = [tile.address(line_at[each], m // chunk) for each, m in where]
                yield addresses, read_b128_groups(tile.banks), 16


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_no_bank_conflicts(arch, tile):
    for addresses, groups, size in reads(arch, tile):
        words = [address // 4 * 4 for address in addresses]
        assert bank_conflicts(words, groups, max(size, 4), tile.banks) == 0


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_without_the_swizzle_there_are_conflicts(arch, tile):
    """The bank model can tell: with every key 0, lines of K collide. (Not every transposed tile needs its key.)"""

    class Plain(OperandTile):
        def key(self, line):
            return 0

    plain = Plain(**{f.name: getattr(tile, f.name) for f in dataclasses.fields(tile)})
    extra = sum(
        bank_conflicts([address // 4 * 4 for address in addresses], groups, max(size, 4), tile.banks)
        for addresses, groups, size in reads(arch, plain)
    )
    if tile.k_contiguous or (tile.transposing and tile.extent >= 32):
        assert extra > 0


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_maps_are_permutations(arch, tile):
    assert sorted(tile.source_row(line) for line in range(tile.lines)) == list(range(tile.lines))
    chunks = {(line, chunk ^ tile.key(line)) for line in range(tile.lines) for chunk in range(tile.chunks_per_line)}
    assert len(chunks) == tile.lines * tile.chunks_per_line
    assert max(chunk for _, chunk in chunks) < tile.chunks_per_line
    assert tile.loads * 256 * 16 == tile.stage_bytes
    fragments = tile.extent // 16
    rows = [tile.fragment_row(f, r) for f in range(fragments) for r in range(16)]
    assert sorted(rows) == list(range(tile.extent))


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_runs_are_neighbouring_columns(arch, tile):
    """Element e of a lane group's run is column run * lane group + e of the group of fragments."""
    for lane_group in range(4):
        for e in range(tile.run):
            q, i = tile.run_element(e)
            assert tile.fragment_row(q, 4 * lane_group + i) == tile.run * lane_group + e


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_k_contiguous_lines_are_in_fragment_order(arch, tile):
    if not tile.k_contiguous:
        pytest.skip("fragments of this tile are not lines")
    for line in range(tile.extent):
        assert tile.source_row(line) == tile.fragment_row(line // 16, line % 16)


@pytest.mark.parametrize(("arch", "tile"), TILES, ids=IDS)
def test_loads_bring_lines_a_known_distance_apart(arch, tile):
    for line in range(tile.lines - tile.source_period):
        assert tile.source_row(line + tile.source_period) == tile.source_row(line) + tile.source_period


def test_halves_cover_the_tile():
    """Each wave's part of a half is a half of its part of the tile."""
    tile = OperandTile(256, 128, True, 1, 64)
    half = tile.half(waves=2)
    for first in (0, half.split):
        rows = [first + half.spread(row) for row in range(half.extent)]
        assert rows == [*range(first, first + 64), *range(128 + first, 128 + first + 64)]


def test_bank_conflicts_counts_words_not_lanes():
    assert bank_conflicts([0] * 64, [range(64)], 4, 32) == 0  # a broadcast
    assert bank_conflicts([128 * lane for lane in range(64)], [range(32)], 4, 32) == 31
    assert bank_conflicts([4 * lane for lane in range(64)], [range(32), range(32, 64)], 4, 32) == 0
    assert bank_conflicts([16 * lane for lane in range(64)], read_b128_groups(64), 16, 64) == 0


@pytest.mark.parametrize("size", [24, 48])
def test_odd_sizes_are_refused(size):
    assert OperandTile(size, 128, True, 2, 64).problem() is not None
    assert OperandTile(16, 32, True, 2, 64).problem() is not None  # 1 KiB: less than one load of four waves
