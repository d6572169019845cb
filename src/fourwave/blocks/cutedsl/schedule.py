"""Which output tile a cluster computes: a static walk of persistent clusters over the grid of tiles, in bands."""

import cutlass
from cutlass import Int32, cute


@cute.jit
def tile_of(index: Int32, tiles_m: Int32, tiles_n: Int32, group: Int32, along: cutlass.Constexpr):
    """(m_tile, n_tile) of tile number `index`.

    A band is `group` tiles wide along `along` and spans the other dimension; inside it the walk runs across the band
    first. So the clusters at work at one time share few rows of A and few columns of B, which L2 then serves.
    """
    tiles_wide, tiles_long = tiles_m, tiles_n
    if cutlass.const_expr(along == "n"):
        tiles_wide, tiles_long = tiles_n, tiles_m
    band_tiles = group * tiles_long
    band = index // band_tiles
    rest = index - band * band_tiles
    width = cutlass.min(group, tiles_wide - band * group)
    along_band = rest // width
    across = band * group + (rest - along_band * width)
    if cutlass.const_expr(along == "n"):
        return along_band, across
    return across, along_band
