"""Which workgroup computes which output tile, and which part of K."""

from flydsl import expr as fx

from fourwave.blocks.flydsl.memory import minimum
from fourwave.blocks.flydsl.tiles import log2

NUM_XCDS = 8  # accelerator dies of MI300X and MI350X; workgroups are dealt to them round robin, each has its own L2


def num_tiles(size, tile):
    """Tiles of a power of two elements that cover size (Int32, 1 .. 2**31 - tile)."""
    return (size + (tile - 1)) >> log2(tile)


def output_tile(workgroup, num_tiles_m, num_tiles_n, group_m):
    """(m_tile, n_tile) of a workgroup, all Int32.

    Workgroups with consecutive numbers run on different dies. They are renumbered so that each die works on a
    contiguous range of tiles, and tiles are walked in bands of group_m rows, columns slowest inside a band: the tiles
    that are in flight on one die share rows of A and columns of B in its L2.
    """
    # Unsigned: signed floor division costs several times as many instructions.
    workgroup, num_tiles_m, num_tiles_n = (fx.Uint32(v) for v in (workgroup, num_tiles_m, num_tiles_n))
    tiles = num_tiles_m * num_tiles_n
    die = workgroup % NUM_XCDS
    # Dies below `longer` have one tile more than the others.
    per_die, longer = tiles // NUM_XCDS, tiles % NUM_XCDS
    index = die * per_die + minimum(die, longer) + workgroup // NUM_XCDS

    band_tiles = num_tiles_n * group_m
    band = index // band_tiles
    in_band = index % band_tiles
    first_m = band * group_m
    rows = minimum(num_tiles_m - first_m, fx.Uint32(group_m))
    return fx.Int32(first_m + in_band % rows), fx.Int32(in_band // rows)


def k_part(workgroup, tiles, K, step_k, split, whole=False):
    """(number among the tiles, part, first k, end of k) of a workgroup where `split` of them share each tile's K; all Int32.

    Parts are whole steps of step_k; the last ones may have fewer, or none: these begin at K or, with `whole`, at the next whole step past it.
    All tiles' first parts have the lowest numbers: workgroups that run together read the same k.
    """
    if split == 1:
        return workgroup, fx.Int32(0), fx.Int32(0), K
    part = fx.Int32(fx.Uint32(workgroup) // fx.Uint32(tiles))
    steps = num_tiles(K, step_k)
    steps_each = fx.Int32(fx.Uint32(steps + (split - 1)) // split)
    first = minimum(part * steps_each, steps)
    last = minimum(first + steps_each, steps)
    return (
        workgroup - part * tiles,
        part,
        first * step_k if whole else minimum(first * step_k, K),
        minimum(last * step_k, K),
    )
