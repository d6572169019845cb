"""Which output tile a cluster computes: a static walk of persistent clusters over the grid of tiles, in bands.

A band is `group` tiles wide along `along` and spans the other dimension; inside it the walk runs across the band first. So the
clusters at work at one time share few rows of A and few columns of B, which L2 then serves.
"""

import cutlass
from cutlass import Int32, cute

from fourwave.blocks.cutedsl import access


@cute.jit
def tile_of(index: Int32, tiles_m: Int32, tiles_n: Int32, group: Int32, along: cutlass.Constexpr):
    """(m_tile, n_tile) of tile number `index`."""
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


@cute.jit
def bands(tiles_m: Int32, tiles_n: Int32, group: Int32, along: cutlass.Constexpr):
    """On the host: what `tile_in_bands` divides by: the tiles of a band, its width, the last one's width."""
    tiles_wide, tiles_long = tiles_m, tiles_n
    if cutlass.const_expr(along == "n"):
        tiles_wide, tiles_long = tiles_n, tiles_m
    last = tiles_wide - (cute.ceil_div(tiles_wide, group) - 1) * group
    return tuple(cute.fast_divmod_create_divisor_v2(count) for count in (group * tiles_long, group, last))


@cute.jit
def tile_in_bands(index: Int32, num_tiles: Int32, divisors: tuple, along: cutlass.Constexpr):
    """As tile_of, by multiplications: two divisions are a chain of some fifty instructions, during which a warpgroup does nothing.

    num_tiles  tiles_m * tiles_n
    """
    of_band, width, last_width = divisors
    band, rest = (Int32(each) for each in divmod(index, of_band))
    left = num_tiles - band * Int32(of_band.divisor)
    # Both, and no branch: so that other instructions can come between these.
    along_band, across = (
        access.where_less(left, Int32(of_band.divisor), Int32(of_last), Int32(of_others))
        for of_last, of_others in zip(divmod(rest, last_width), divmod(rest, width), strict=True)
    )
    across = band * Int32(width.divisor) + across
    if cutlass.const_expr(along == "n"):
        return along_band, across
    return across, along_band
