"""Four-wave grouped GEMM for CDNA4 (gfx950), GroupedProblem's products:

split "rows"       out[m] = a[m] @ op(b[g])           a[M, K]; b[G, N, K] (TN), [G, K, N] (NN), or preshuffled [G, N, K]
split "reduction"  out[g] = a[rows].T @ b[rows] (+ out[g])   a[K, M], b[K, N]

8-bit floats with a scale for each 1 x 128 of a and 128 x 128 (wgrad: 1 x 128) of b; with e8m0 scales of 1 x 32 of both; with scales of tensors and rows, or
none; bfloat16 and float16. Groups are found in the kernel (blocks/flydsl/groups.py): the grid is large enough for any
m_sizes, workgroups past the last tile leave at once, and tiles of rows in no group store zeros.

A workgroup of four waves computes one tile_m x tile_n tile of one group. Operand tiles go from global memory straight to
LDS, as in ops/gemm/cdna4.py; preshuffled weights go straight to registers, B_TILES_AHEAD K tiles ahead. Every K tile of 128
is multiplied into registers of its own, and these times the block's scales are added to the sums; e8m0 scales go to the
scaled matrix instruction.

Schedule, K tile k, num_stages LDS buffers; a step of the loop covers SCALE_STEPS K tiles (blocks/flydsl/block128.py):
  all reads of tile k are back; wait until tile k + 1 has landed; barrier: in every wave
  issue the loads of tile k + num_stages into the buffer of tile k; in a step's first tile also those of the next step's scales,
  which LDS has room for since this step's were read in the last step's last tile
  read the fragments of tile k + 1 (in a step's last tile, the next step's scales too); multiply tile k
num_stages - 1 tiles are in flight while one is multiplied, and no wait in the loop is for all of them. Tiles past the last
one fetch nothing and land as zeros, so that the wait counts hold.
Every wave of a workgroup passes every barrier equally often.

Limits  config.py, amd.py
Source  as ops/gemm/cdna4.py; order of preshuffled weights: preshuffle.py
"""

import itertools
from typing import Any

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.block128 import BlockMma
from fourwave.blocks.flydsl.control import loop, when
from fourwave.blocks.flydsl.loaders import Fragments, load_direct
from fourwave.blocks.flydsl.memory import barrier, interleave, keep_order, wait_lds, wait_loads
from fourwave.blocks.flydsl.mma import WaveMma
from fourwave.blocks.flydsl.schedule import num_tiles
from fourwave.blocks.flydsl.tiles import WORKGROUP
from fourwave.ops.grouped_gemm.cdna import Work, epilogue, launcher, operand_format, scale_parts
from fourwave.ops.grouped_gemm.config import B_TILES_AHEAD, block_scaled, geometry, is_mx, tiles_per_step

ARCH = "gfx950"


def build(spec):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    problem, config = spec.problem, spec.config
    geo, fmt, epi = geometry(problem, config, ARCH), operand_format(problem, ARCH), epilogue(spec)
    blocks, direct_b = block_scaled(problem), problem.b_preshuffled
    per_step = tiles_per_step(problem, config, ARCH)
    parts = scale_parts(problem, config, geo, ARCH)
    scale_loads = sum(part.loads for part in parts)
    tile_loads = geo.a.loads + (2 * geo.frags_n if direct_b else geo.b.loads)
    bytes_a = geo.num_stages * geo.a.stage_bytes
    bytes_b = 0 if direct_b else geo.num_stages * geo.b.stage_bytes
    mx = is_mx(problem)
    # Whether b's scales are read for a whole step, as a's are, or before each K tile.
    step_b = bool(parts) and not parts[1].each_tile

    @fx.struct
    class Storage:
        tiles: fx.Array[fx.Uint8, bytes_a + bytes_b + sum(part.lds_bytes for part in parts), 16]

    def loads_of(tile):
        """Loads that follow the wait of a step's tile number `tile` (which may be negative)."""
        return tile_loads + (scale_loads if tile % per_step == 0 else 0)

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def grouped_gemm_cdna4(arguments):
        lds = fx.SharedAllocator().allocate(Storage).peek().tiles.ptr
        work = Work(arguments, problem, geo, config.split_k, per_step * config.tile_k)
        when(work.active, lambda: compute(work, lds))

    def compute(work, lds):
        lane, wave = work.lane, work.wave
        global_a, global_b = work.global_a(), work.global_b()
        fragments_a = Fragments(geo.a, fmt, work.wave_m * geo.wave_tile_m, geo.frags_m, lane)
        fragments_b: Any = None if direct_b else Fragments(geo.b, fmt, work.wave_n * geo.wave_tile_n, geo.frags_n, lane)
        mma: Any = (
            BlockMma(fmt, ARCH, geo.frags_m, geo.frags_n, 1)
            if blocks and not mx
            else WaveMma(fmt, ARCH, geo.frags_m, geo.frags_n)
        )
        if blocks:
            place = bytes_a + bytes_b
            (scales_a, row_scales), (scales_b, column_scales) = work.scales(
                parts, lds, (place, place + parts[0].lds_bytes)
            )

        def load_a(tile_index, stage):
            load_direct(global_a, lds, stage * geo.a.stage_bytes, work.k0(tile_index), wave)

        def load_b(tile_index, stage):
            """Preshuffled: a list of the tile's fragments, on their way."""
            k0 = work.k0(tile_index)
            if direct_b:
                return [global_b.load(k0)]
            load_direct(global_b, lds, bytes_a + stage * geo.b.stage_bytes, k0, wave)
            return []

        def issue_scales(step):
            if blocks:
                k0 = work.k0(step * per_step)
                slot_b = 0 if step_b else (step & 1) * parts[1].slot_bytes
                scales_a.to_lds(lds, bytes_a + bytes_b, 0, k0, wave)
                scales_b.to_lds(lds, bytes_a + bytes_b + parts[0].lds_bytes, slot_b, k0, wave)

        def read_fragments(stage, k_slice):
            b = [] if direct_b else fragments_b.read(lds, bytes_a + stage * geo.b.stage_bytes, k_slice)
            return fragments_a.read(lds, stage * geo.a.stage_bytes, k_slice) + b

        def read_scales():
            """Of a whole step, the one that LDS holds."""
            if mx:
                return row_scales.read(fx.Int32(0)) + column_scales.read(fx.Int32(0))
            return (row_scales.read() if blocks else []) + (column_scales.read() if step_b else [])

        def read_tile_scales(step, tile):
            """Of one K tile."""
            return column_scales.read(tile, step & 1) if blocks and not step_b else []

        def sort_scales(scales):
            """mx: for each fragment a word of the step's four K tiles, of what read_scales returned."""
            count = len(row_scales)
            return row_scales.sort(scales[:count], 0), column_scales.sort(scales[count:], 0)

        def multiply(a, b, acc, scales, of_tile, tile):
            if not blocks:
                return mma.step(a, b, acc)
            if mx:
                return mma.step(a, b, acc, *scales, tile)
            rows = [scale[tile] for scale in scales[: geo.frags_m]]
            return mma.fold(a, b, acc, rows, scales[geo.frags_m][tile] if step_b else work.columns(of_tile))

        # Prologue: scales of the first step, then tiles into every stage; the first fragments once tile 0 has landed.
        issue_scales(fx.Int32(0))
        b_ahead = []
        for tile in range(geo.num_stages):
            load_a(fx.Int32(tile), tile)
            if tile < B_TILES_AHEAD or not direct_b:
                b_ahead += load_b(fx.Int32(tile), tile)
        # Behind tile 0 of a; enough weights have been issued for the counts of the loop, too.
        assert B_TILES_AHEAD >= geo.num_stages - 1 or not direct_b
        wait_loads(in_flight=(geo.num_stages - 1) * tile_loads)
        barrier()
        frags = read_fragments(fx.Int32(0), 0)
        scales, of_tile = read_scales(), read_tile_scales(fx.Int32(0), 0)

        # Main loop. State: stage of tile k, its first fragments, the step's scales, those of tile k, weights on their way,
        # the sums.
        counts = [1, len(frags), len(scales), len(of_tile), len(b_ahead) * geo.frags_n, geo.frags_m * geo.frags_n]

        def step(number, state):
            cut = [sum(counts[:i]) for i in range(len(counts) + 1)]
            (stage,), frags, scales, of_tile, flat_b, acc = (state[i:j] for i, j in itertools.pairwise(cut))
            ahead = [flat_b[i : i + geo.frags_n] for i in range(0, len(flat_b), geo.frags_n)]
            # Before the next fragments need registers.
            factors = sort_scales(scales) if mx else scales
            for tile in range(per_step):
                k_tile = number * per_step + tile
                next_stage = (stage == geo.num_stages - 1).select(fx.Int32(0), stage + 1)
                for k_slice in range(geo.num_slices):
                    last = k_slice == geo.num_slices - 1
                    next_scales, next_of_tile = scales, of_tile
                    reads = fragments_a.reads + (0 if direct_b else fragments_b.reads)
                    if last:
                        wait_lds()
                        # In flight: tiles k + 1 .. k + num_stages - 1. All but the oldest may stay so. Preshuffled weights are loaded
                        # fewer tiles ahead than a: the first tiles after the prologue need this count; later ones could leave 2 *
                        # frags_n more in flight, the weights of tile k, which this step uses anyway.
                        wait_loads(in_flight=sum(loads_of(tile - d) for d in range(1, geo.num_stages - 1)))
                        barrier()
                        keep_order()
                        if tile == 0:
                            issue_scales(number + 1)
                        load_a(k_tile + geo.num_stages, stage)
                        ahead += load_b(k_tile + (B_TILES_AHEAD if direct_b else geo.num_stages), stage)
                        next_frags = read_fragments(next_stage, 0)
                        if tile == per_step - 1:
                            next_scales = read_scales()
                            next_of_tile = read_tile_scales(number + 1, 0)
                            reads += len(next_scales) + len(next_of_tile)
                        else:
                            next_of_tile = read_tile_scales(number, tile + 1)
                            reads += len(next_of_tile)
                    else:
                        next_frags = read_fragments(stage, k_slice + 1)
                    a = frags[: geo.frags_m]
                    b = ahead[0] if direct_b else frags[geo.frags_m :]
                    acc = multiply(a, b, acc, factors, of_tile, tile)
                    loads = loads_of(tile) if last else 0
                    interleave(mma.instructions, loads=loads, reads=reads)
                    keep_order()
                    frags, scales, of_tile = next_frags, next_scales, next_of_tile
                if direct_b:
                    ahead = ahead[1:]
                stage = next_stage
            return [stage, *frags, *scales, *of_tile, *(b for each in ahead for b in each), *acc]

        state = [fx.Int32(0), *frags, *scales, *of_tile, *(b for each in b_ahead for b in each), *mma.zero()]
        state = loop(num_tiles(work.num_k_tiles, per_step), state, step)

        # Drain: only loads past the last tile are left; they must not land in LDS that another workgroup may own by then.
        wait_loads(in_flight=0)

        # Epilogue.
        work.finish(state[-geo.frags_m * geo.frags_n :], epi)

    return launcher(grouped_gemm_cdna4, spec, geo)
