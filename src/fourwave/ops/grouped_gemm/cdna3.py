"""Four-wave grouped GEMM for CDNA3 (gfx942): the products of cdna4.py, 8-bit floats being fnuz.

Data moves as in ops/gemm/cdna3.py: operand tiles go from global memory to registers and from there to swizzled LDS, turned on the
way where K is not contiguous, so that operands move 16 bytes a lane everywhere and K is added in one order in all layouts;
preshuffled weights go straight to registers, B_TILES_AHEAD K tiles ahead. Where blocks of 128 k have scales, a fragment is all
128 of them, four v_mfma_f32_16x16x32 each, summed in registers of their own; these times the block's scales are added to
the sums.

Schedule, K tile k, with two LDS buffers and AHEAD more tiles in registers; a step of the loop covers SCALE_STEPS K tiles:
  this wave's LDS reads of tile k and writes of tile k + 1 are done; barrier: so are every wave's
  write tile k + 2, which was loaded AHEAD tiles ago, to the buffer of tile k; issue the loads of tile k + 2 + AHEAD
  in a step's first tile: issue the loads of the next step's scales; in its last but one: write them to LDS, which has room for
  them since this step's were read in the last step's last tile
  read the first fragments of tile k + 1 (in a step's last tile, the next step's scales too); multiply tile k
The compiler counts the waits for the loads, since their results are ordinary registers.
Every wave of a workgroup passes every barrier equally often.

Blocks of 32 k with e8m0 scales: codes, in OCP formats, become bfloat16 between registers and LDS (loaders.StagedCodes,
turned.TurnedCodes) and are multiplied as such. In wgrad the first K tile begins with the block that the group begins in.

Limits  config.py, amd.py
Source  as ops/gemm/cdna3.py; order of preshuffled weights: preshuffle.py
"""

import itertools
from typing import Any

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.block128 import BlockMma
from fourwave.blocks.flydsl.control import loop, when
from fourwave.blocks.flydsl.loaders import Fragments
from fourwave.blocks.flydsl.memory import barrier, interleave, keep_order, wait_lds
from fourwave.blocks.flydsl.mma import WaveMma
from fourwave.blocks.flydsl.schedule import num_tiles
from fourwave.blocks.flydsl.tiles import WORKGROUP
from fourwave.blocks.flydsl.turned import TurnedFragments
from fourwave.ops.grouped_gemm.cdna import Work, epilogue, launcher, operand_format, scale_parts
from fourwave.ops.grouped_gemm.config import (
    B_TILES_AHEAD,
    brings_scales,
    dequantizes,
    geometry,
    in_memory,
    tiles_per_step,
)

ARCH = "gfx942"
NUM_STAGES = 2  # LDS buffers per operand
AHEAD = 2  # tiles in registers, or on their way there
PARTS = 4  # v_mfma_f32_16x16x32 of 128 k


def build(spec):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    problem, config = spec.problem, spec.config
    geo, fmt, epi = geometry(problem, config, ARCH), operand_format(problem, ARCH), epilogue(spec)
    assert geo.num_stages == NUM_STAGES, "why_unsupported lets nothing else through"
    blocks, direct_b = brings_scales(problem, ARCH), problem.b_preshuffled
    per_step = tiles_per_step(problem, config, ARCH)
    parts = scale_parts(problem, config, geo, ARCH)
    bytes_a = NUM_STAGES * geo.a.stage_bytes
    bytes_b = 0 if direct_b else NUM_STAGES * geo.b.stage_bytes
    columns = blocks and parts[1].kind == "columns"

    @fx.struct
    class Storage:
        tiles: fx.Array[fx.Uint8, bytes_a + bytes_b + sum(part.lds_bytes for part in parts), 16]

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def grouped_gemm_cdna3(arguments):
        lds = fx.SharedAllocator().allocate(Storage).peek().tiles.ptr
        step_k = per_step * config.tile_k
        tiles = [in_memory(tile, problem, ARCH) for tile in (geo.a, geo.b)]
        work = Work(arguments, problem, geo, config.split_k, step_k, dequantizes(problem, ARCH), tiles)
        when(work.active, lambda: compute(work, lds))

    def fragments_of(tile, *which):
        return (Fragments if tile.k_contiguous else TurnedFragments)(tile, *which)

    def compute(work, lds):
        lane, thread = work.lane, work.thread
        staged_a = work.staged_a(fmt.dtype)
        global_b: Any = work.global_b() if direct_b else None
        staged_b: Any = None if direct_b else work.staged_b(fmt.dtype)
        moving = (staged_a,) if direct_b else (staged_a, staged_b)
        fragments_a: Any = fragments_of(geo.a, fmt, work.wave_m * geo.wave_tile_m, geo.frags_m, lane)
        fragments_b: Any = (
            None if direct_b else fragments_of(geo.b, fmt, work.wave_n * geo.wave_tile_n, geo.frags_n, lane)
        )
        if blocks:
            mma: Any = BlockMma(fmt, ARCH, geo.frags_m, geo.frags_n, PARTS)
            place = bytes_a + bytes_b
            (scales_a, row_scales), (scales_b, column_scales) = work.scales(
                parts, lds, (place, place + parts[0].lds_bytes)
            )
        else:
            mma = WaveMma(fmt, ARCH, geo.frags_m, geo.frags_n)
        num_a = fragments_a.values

        def load_tile(tile_index):
            k0 = work.k0(tile_index)
            return staged_a.load(k0) + ([] if direct_b else staged_b.load(k0))

        def load_b(tile_index):
            return [global_b.load(work.k0(tile_index))] if direct_b else []

        def direct_fragments(fragments, k_slice):
            """Those of one slice, of preshuffled fragments of 128 k."""
            if geo.num_slices == 1:
                return fragments
            words = geo.b.fragment_bytes // 4
            return [each.shuffle(each, list(range(k_slice * words, (k_slice + 1) * words))) for each in fragments]

        def write_tile(values, stage):
            staged_a.store(values[: staged_a.values], lds, stage * geo.a.stage_bytes)
            if not direct_b:
                staged_b.store(values[staged_a.values :], lds, bytes_a + stage * geo.b.stage_bytes)

        def load_scales(step):
            k0 = work.k0(step * per_step)
            return scales_a.to_registers(k0) + scales_b.to_registers(k0)

        def write_scales(values, step):
            place = bytes_a + bytes_b
            slot = (step & 1) * parts[1].slot_bytes if columns else 0
            scales_a.write(values[: parts[0].loads], lds, place, 0, thread)
            scales_b.write(values[parts[0].loads :], lds, place + parts[0].lds_bytes, slot, thread)

        def read_fragments(stage, k_slice):
            b = [] if direct_b else fragments_b.read(lds, bytes_a + stage * geo.b.stage_bytes, k_slice)
            return fragments_a.read(lds, stage * geo.a.stage_bytes, k_slice) + b

        def read_scales(step):
            """Of the whole step."""
            if not blocks:
                return []
            return row_scales.read() + ([] if columns else column_scales.read())

        def read_columns(step, tile):
            """Of one K tile."""
            return column_scales.read(tile, step & 1) if columns else []

        # Prologue: tiles 0 and 1 and the first step's scales to LDS, more tiles in registers; the first fragments.
        tile0, tile1 = load_tile(fx.Int32(0)), load_tile(fx.Int32(1))
        if blocks:
            write_scales(load_scales(fx.Int32(0)), fx.Int32(0))
        write_tile(tile0, 0)
        write_tile(tile1, 1)
        staged = [value for tile in range(AHEAD) for value in load_tile(fx.Int32(NUM_STAGES + tile))]
        b_ahead = [b for tile in range(B_TILES_AHEAD) for b in load_b(fx.Int32(tile))]
        wait_lds()
        barrier()
        frags = read_fragments(fx.Int32(0), 0)
        scales, at_columns = read_scales(fx.Int32(0)), read_columns(fx.Int32(0), 0)

        # Main loop. State: stage of tile k, tiles k + 2 .., the first fragments of tile k, the step's scales, those of tile k,
        # weights on their way, the sums.
        counts = [
            1, len(staged), len(frags), len(scales), len(at_columns), len(b_ahead) * geo.frags_n, geo.frags_m * geo.frags_n,
        ]  # fmt: skip

        def step(number, state):
            cut = [sum(counts[:i]) for i in range(len(counts) + 1)]
            (stage,), staged, frags, scales, at_columns, flat_b, acc = (state[i:j] for i, j in itertools.pairwise(cut))
            ahead = [flat_b[i : i + geo.frags_n] for i in range(0, len(flat_b), geo.frags_n)]
            fresh: list[Any] = []
            for tile in range(per_step):
                k_tile = number * per_step + tile
                for k_slice in range(geo.num_slices):
                    last = k_slice == geo.num_slices - 1
                    next_scales, next_columns = scales, at_columns
                    if last:
                        wait_lds()
                        barrier()
                        keep_order()
                        write_tile(staged[: len(staged) // AHEAD], stage)
                        if blocks and tile == per_step - 2:
                            write_scales(fresh, number + 1)
                        if blocks and tile == 0:
                            fresh = load_scales(number + 1)
                        staged = staged[len(staged) // AHEAD :] + load_tile(k_tile + (NUM_STAGES + AHEAD))
                        ahead += load_b(k_tile + B_TILES_AHEAD)
                        next_frags = read_fragments(1 - stage, 0)
                        if tile == per_step - 1:
                            next_scales, next_columns = read_scales(number + 1), read_columns(number + 1, 0)
                        else:
                            next_columns = read_columns(number, tile + 1)
                    else:
                        next_frags = read_fragments(stage, k_slice + 1)
                    a = fragments_a.sort(frags[:num_a])
                    b = direct_fragments(ahead[0], k_slice) if direct_b else fragments_b.sort(frags[num_a:])
                    if blocks:
                        rows = [scale[tile] for scale in scales[: geo.frags_m]]
                        acc = mma.fold(
                            a, b, acc, rows, work.columns(at_columns) if columns else scales[geo.frags_m][tile]
                        )
                    else:
                        acc = mma.step(a, b, acc)
                    writes = sum(each.writes for each in moving) if last else 0
                    loads = sum(each.loads for each in moving) + (2 * geo.frags_n if direct_b else 0) if last else 0
                    interleave(mma.instructions, writes=writes, loads=loads)
                    keep_order()
                    frags, scales, at_columns = next_frags, next_scales, next_columns
                ahead = ahead[1:]
                stage = 1 - stage
            return [stage, *staged, *frags, *scales, *at_columns, *(b for each in ahead for b in each), *acc]

        state = [
            fx.Int32(0), *staged, *frags, *scales, *at_columns, *(b for each in b_ahead for b in each), *mma.zero(),
        ]  # fmt: skip
        state = loop(num_tiles(work.num_k_tiles, per_step), state, step)

        # Drain: nothing; what is still in flight are registers of tiles past the last.

        # Epilogue.
        work.finish(state[-geo.frags_m * geo.frags_n :], epi)

    return launcher(grouped_gemm_cdna3, spec, geo)
