"""LDS images of operand tiles: index maps are permutations, reads are free of bank conflicts, bytes add up.

The reads are those of loaders.Fragments, worked out here from the documented lane layouts, not from its code.
"""

from __future__ import annotations

import dataclasses

import pytest

from fourwave.blocks.flydsl.tiles import LDS_BANKS, OperandTile, bank_conflicts, read_b128_groups
from fourwave.ops.gemm.config import candidates, operand_tiles

LANES = range(64)
TILES = sorted(
    {
        (arch, tile)
        for arch in LDS_BANKS
        for config in candidates(arch)
        for layout in ("TN", "NN", "NT")
        for tile in operand_tiles(config, layout, 2, arch)
    },
    key=str,
)
IDS = [f"{arch}-{tile.extent}x{tile.tile_k}-{'k' if tile.k_contiguous else 'mn'}-{tile.group}" for arch, tile in TILES]


def line_of_k(tile: OperandTile) -> dict[int, int]:
    return {tile.source_row(line): line for line in range(tile.lines)}


def reads(arch: str, tile: OperandTile):
    """(addresses by lane, lane groups served together, bytes) of every LDS read of the first fragments."""
    wave_first = 16 * tile.group
    for k0 in range(0, tile.tile_k, 32):
        if tile.k_contiguous:
            for fragment in range(tile.extent // 16):
                lines = [16 * fragment + lane % 16 for lane in LANES]
                chunks = [k0 // 8 + lane // 16 for lane in LANES]
                yield [tile.address(*at) for at in zip(lines, chunks)], read_b128_groups(tile.banks), 16
        elif arch == "gfx950":
            line_at = line_of_k(tile)
            for column0 in range(0, tile.extent, 16):
                for half in (0, 4):
                    where = [(k0 + 8 * (x // 16) + half + x % 16 // 4, column0 + x % 4 * 4) for x in LANES]
                    addresses = [tile.address(line_at[k], m // 8) + m % 8 * 2 for k, m in where]
                    yield addresses, [range(32), range(32, 64)], 8
        else:
            line_at = line_of_k(tile)
            size = 2 * tile.group
            together = max(1, min(64, tile.banks * 4 // max(size, 4)))
            groups = [range(first, first + together) for first in range(0, 64, together)]
            for column0 in range(0, tile.extent, wave_first):
                for k in range(8):
                    where = [(k0 + 8 * (x // 16) + k, column0 + x % 16 * tile.group) for x in LANES]
                    yield [tile.address(line_at[k], m // 8) + m % 8 * 2 for k, m in where], groups, size


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
    if tile.k_contiguous or (arch == "gfx950" and tile.extent >= 32):
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


def test_bank_conflicts_counts_words_not_lanes():
    assert bank_conflicts([0] * 64, [range(64)], 4, 32) == 0  # a broadcast
    assert bank_conflicts([128 * lane for lane in range(64)], [range(32)], 4, 32) == 31
    assert bank_conflicts([4 * lane for lane in range(64)], [range(32), range(32, 64)], 4, 32) == 0
    assert bank_conflicts([16 * lane for lane in range(64)], read_b128_groups(64), 16, 64) == 0


@pytest.mark.parametrize("size", [24, 48])
def test_odd_sizes_are_refused(size):
    assert OperandTile(size, 128, True, 2, 64).problem() is not None
    assert OperandTile(16, 32, True, 2, 64).problem() is not None  # 1 KiB: less than one load of four waves
