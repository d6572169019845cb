"""Groups of rows whose sizes only the device knows: where each begins, which tile is whose, scales on their way to shared memory.

`build` makes a table in shared memory from m_sizes: for each group the row past its last and the number of the tile past its
last. Tiles are numbered group by group, or first those with many rows, group by group, and then those with few: so what is left for the
last CTAs is small. `find` searches it, 32 groups at a time, from a group that is not past the tile's.
Sizes below zero count as 0, and no group reaches past `rows`, so that no number in the table leaves the operands.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

LANES = 32
NONE = 2**31 - 1  # tile_end past the last group


@cute.jit
def size_of(sizes: cute.Pointer, g: Int32, G: Int32, rows: Int32):
    """Of a group, in [0, rows]."""
    return _size(sizes, g, G, rows)


@cute.jit
def _scan(value: Int32, limit: Int32, lane: Int32):
    """Inclusive sums over the lanes of values in [0, limit], not more than limit."""
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << i)
        if lane >= 1 << i:
            value = value + cutlass.min(other, limit - value)
    return value


@cute.jit
def _size(sizes: cute.Pointer, g: Int32, G: Int32, rows: Int32):
    size = Int32(0)
    if g < G:
        if cutlass.const_expr(sizes.dtype.width == 64):
            size = Int32(cutlass.min(cutlass.max(sizes[g], Int64(0)), Int64(rows)))
        else:
            size = cutlass.min(cutlass.max(sizes[g], Int32(0)), rows)
    return size


@cute.jit
def build(
    sizes: cute.Pointer, G: Int32, rows: Int32, tile_rows: cutlass.Constexpr, per_row: Int32, row_end: cute.Pointer,
    tile_end: cute.Pointer, lane: Int32, halves: cutlass.Constexpr = False,
):  # fmt: skip
    """One warp. per_row: tiles side by side in `tile_rows` rows of a group. row_end [G], tile_end [G + 32], both rounded up to 32.

    halves  tiles that have no more than half of their rows come last: tile_end [2 G + 32, rounded up], where group g is found for
            those as number `rest(G)` + g
    """
    row = Int32(0)
    tile = Int32(0)
    size = _size(sizes, lane, G, rows)
    for chunk in cutlass.range(cute.ceil_div(G, LANES), unroll=1):
        g = chunk * LANES + lane
        ahead = _size(sizes, g + LANES, G, rows)
        end = row + cutlass.min(_scan(size, rows, lane), rows - row)
        before = cute.arch.shuffle_sync_up(end, 1)
        if lane == 0:
            before = row
        count = (end - before + (tile_rows - 1)) // tile_rows
        if cutlass.const_expr(halves):
            count = whole(end - before, tile_rows)
        tiles = tile + _scan(count * per_row, Int32(NONE), lane)
        past = Int32(NONE)
        if cutlass.const_expr(halves):
            past = tiles
        if g < G:
            row_end[g] = end
            tile_end[g] = tiles
        else:
            tile_end[g] = past
        row = cute.arch.shuffle_sync(end, LANES - 1)
        tile = cute.arch.shuffle_sync(tiles, LANES - 1)
        size = ahead
    last = rest(G)
    if cutlass.const_expr(halves):
        cute.arch.sync_warp()
        for chunk in cutlass.range(cute.ceil_div(G, LANES), unroll=1):
            g = chunk * LANES + lane
            count = Int32(0)
            if g < G:
                size = row_end[g] - start_of(row_end, g)
                if size > whole(size, tile_rows) * tile_rows:
                    count = per_row
            tiles = tile + _scan(count, Int32(NONE), lane)
            if g < G:
                tile_end[last + g] = tiles
            else:
                tile_end[last + g] = Int32(NONE)
            tile = cute.arch.shuffle_sync(tiles, LANES - 1)
        last = 2 * last
    tile_end[last + lane] = Int32(NONE)


@cute.jit
def whole(size: Int32, tile_rows: cutlass.Constexpr):
    """Tiles of a group that have more than half of their rows."""
    return (size + (tile_rows // 2 - 1)) // tile_rows


@cute.jit
def tiles_of(row_end: cute.Pointer, G: Int32, tile_rows: cutlass.Constexpr, large: cutlass.Constexpr, lane: Int32):
    """Tiles of all groups below each other; large: of those with more than half of their rows. One warp."""
    tiles = Int32(0)
    for chunk in cutlass.range(cute.ceil_div(G, LANES), unroll=1):
        g = chunk * LANES + lane
        if g < G:
            size = row_end[g] - start_of(row_end, g)
            if cutlass.const_expr(large):
                tiles += whole(size, tile_rows)
            else:
                tiles += cute.ceil_div(size, tile_rows)
    return cute.arch.warp_redux_sync(tiles, "add")


@cute.jit
def rest(G: Int32):
    """Number of group 0 where `build` has its tiles with few rows."""
    return (G + LANES - 1) // LANES * LANES


@cute.jit
def find(tile_end: cute.Pointer, tile: Int32, g: Int32, lane: Int32):
    """The group of tile number `tile`, which exists; g: any group that is not past it. The whole warp."""
    passed = cute.arch.popc(cute.arch.vote_ballot_sync(tile_end[g + lane] <= tile))
    g = g + passed
    while passed == LANES:
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(tile_end[g + lane] <= tile))
        g = g + passed
    return cute.arch.make_warp_uniform(g)


@cute.jit
def start_of(end: cute.Pointer, g: Int32):
    """What the groups before g end with."""
    start = Int32(0)
    if g > 0:
        start = end[g - 1]
    return start


@dsl_user_op
def copy_word(target: cute.Pointer, source: cute.Pointer, *, loc=None, ip=None) -> None:
    """Four bytes from global to shared memory, asynchronously (cp.async)."""
    llvm.inline_asm(
        None,
        [target.to_llvm_ptr(loc=loc, ip=ip), source.to_llvm_ptr(loc=loc, ip=ip)],
        "cp.async.ca.shared.global [$0], [$1], 4;",
        "r,l,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def copy_bytes(
    target: cute.Pointer, source: cute.Pointer, size: Int32, barrier: cute.Pointer, *, loc=None, ip=None
) -> None:
    """`size` bytes, a multiple of 16 between multiples of 16, from global to shared memory (cp.async.bulk). One thread."""
    llvm.inline_asm(
        None,
        [
            target.to_llvm_ptr(loc=loc, ip=ip),
            source.to_llvm_ptr(loc=loc, ip=ip),
            Int32(size).ir_value(loc=loc, ip=ip),
            barrier.to_llvm_ptr(loc=loc, ip=ip),
        ],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        has_side_effects=True,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def clear_rows(out: cute.Pointer, stride: Int64, first: Int32, M: Int32, N: Int32, worker: Int32, workers: Int32):
    """Zeros in rows first ... M - 1 of out. Worker: a warp; the lanes of one take neighbouring elements."""
    lane = cute.arch.lane_idx()
    row = first + worker
    while row < M:
        n = lane
        while n < N:
            out[row * stride + n] = out.dtype(0.0)
            n += LANES
        row += workers
