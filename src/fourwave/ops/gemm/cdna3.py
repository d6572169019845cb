"""Four-wave GEMM for CDNA3 (gfx942): out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

a        TN, NN: [M, K]; NT: [K, M]          float32, bfloat16 or float16, inner stride 1, rows 16-byte aligned
         or float8_e4m3fnuz and float8_e5m2fnuz, in any mix of a and b
         or float8_e4m3fn and float8_e5m2 with scales of blocks, see below
b        TN: [N, K]; NN, NT: [K, N]          as a
a_scale, b_scale   TN, "1x128" of a with "128x128" of b: float32, straight to registers, for 512 k (a step of the main loop) at once;
                   each product of 128 k is scaled before it is added. "1x32": float8_e8m0fnu in the operand's memory order
                   ("tensor" and "row": epilogue.py)
out      [M, N] float32, bfloat16 or float16, inner stride 1; accumulation and epilogue in float32
bias     [N], optional

Four waves of 64 lanes compute one tile_m x tile_n tile; each wave holds its share of the accumulator in registers for
all of K. Operand tiles go from global memory to registers and from there to swizzled LDS (blocks/flydsl/tiles.py); this
machine's direct loads to LDS bring 4 bytes per lane only. Where K is not contiguous, they are turned in registers on the
way (turned_tiles.py), since this machine's LDS does not transpose: every access to global memory and LDS moves 16 bytes a
lane, and K is added in the same order in all layouts.

Schedule, K step k, with two LDS buffers per operand, one more tile in registers, and num_slices = tile_k / slice_k (32; 64 for 8-bit):
  slices 0 .. last - 1: read the next slice's fragments of tile k; multiply this slice's
  last slice: this wave's LDS reads of tile k and writes of tile k + 1 are done; barrier: so are every wave's
              write tile k + 2, which was loaded during the last step, to the buffer of tile k
              issue the loads of tile k + 3 into the registers this frees
              read the first fragments of tile k + 1; multiply the last slice of tile k
The compiler counts the waits for the loads, since their results are ordinary registers. The raw barrier does not wait
for LDS writes, so wait_lds comes before it. Tiles past K fetch nothing and are zeros.
Every wave passes every barrier equally often, tails included.

Preshuffled b (8-bit, TN) skips LDS: fragments come from global memory in the order of the matrix instruction, b_ahead K tiles
ahead; a step of the loop goes round as many sets of registers. Each slice's set is loaded anew right behind the
multiplications that were the last to read it. K is added in the same order as through LDS: the results are the same bits.

Block scales: this machine's matrix unit takes none, so codes become bfloat16 between registers and LDS, exactly
(blocks/flydsl/dequantize.py), and are multiplied as such. Where K is contiguous, a lane writes every second chunk of a
line: two lanes meet in a bank. Where it is not, codes are turned before they become numbers. Scales come 16 bytes a lane: of
columns those of each tile, with the codes; of rows those of 512 k at once, kept in registers (loaders.ScaledRows). The loop is
then one over the steps of 512 k in one over K; the first step, which has its own code, loads the scales of the next 512 k.
The 256 x 256 tile has no registers for that (config.keeps_scales), loads scales of rows with each tile's codes, and has one loop.

Limits  tails in M, N and K are handled; 16-byte alignment and the row stride limit are checked in config.py and amd.py.
Source  operand layout of V_MFMA_F32_16X16X16_BF16, V_MFMA_F32_16X16X32_FP8_FP8: AMD CDNA3 ISA guide, AMD matrix instruction calculator.
"""

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.control import loop
from fourwave.blocks.flydsl.epilogue import SWIGLU, row_sums
from fourwave.blocks.flydsl.loaders import (
    Fragments,
    GlobalTile,
    PreshuffledRows,
    RegisterScales,
    ScaledRows,
    StagedTile,
)
from fourwave.blocks.flydsl.memory import (
    barrier,
    interleave,
    keep_order,
    lds_struct,
    minimum,
    select,
    uniform,
    wait_lds,
)
from fourwave.blocks.flydsl.mma import WaveMma
from fourwave.blocks.flydsl.schedule import k_part, num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import SCALE_K, WAVE, WORKGROUP
from fourwave.blocks.flydsl.turned import TurnedCodes, TurnedColumns, TurnedFragments
from fourwave.ops.gemm.cdna import finish, launcher
from fourwave.ops.gemm.config import (
    block_scaled,
    brings_scales,
    code_format,
    geometry,
    keeps_scales,
    shuffled_ahead,
    split_step,
    wide_scaled,
)

ARCH = "gfx942"
NUM_STAGES = 2  # LDS buffers per operand


def build(spec, fmt, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    b_ahead = spec.problem.b_preshuffled and shuffled_ahead(spec.config)
    through_lds = not b_ahead  # b
    geo = geometry(
        spec.config,
        spec.problem.layout,
        fmt.elem_bytes,
        ARCH,
        brings_scales(spec.problem, ARCH),
        swiglu=epi.activation == SWIGLU,
        b_ahead=b_ahead,
    )
    split_k = split_step(spec.problem, geo)
    codes, wide = block_scaled(spec.problem), wide_scaled(spec.problem)
    kept = keeps_scales(spec.problem, spec.config, ARCH)
    assert geo.num_stages == NUM_STAGES, "why_unsupported lets nothing else through"

    storage = lds_struct(
        {
            "a": NUM_STAGES * geo.a.stage_bytes,
            **({"b": NUM_STAGES * geo.b.stage_bytes} if through_lds else {}),
        }
    )

    def on_its_way(tensor, scale, tile, dtype, row0, K, thread):
        """An operand on its way to LDS."""
        if codes:
            operand = scale, tile, code_format(dtype), row0, K, thread
            if tile.k_contiguous:
                return ScaledRows(tensor, *operand, kept=kept)
            return TurnedCodes(GlobalTile(tensor, tile.in_memory(1), row0, K, thread), *operand)
        if tile.k_contiguous:
            return StagedTile(GlobalTile(tensor, tile, row0, K, thread), fmt.dtype, thread)
        return TurnedColumns(GlobalTile(tensor, tile.in_memory(tile.elem_bytes), row0, K, thread), tile, thread)

    def fragments_of(tile, *which):
        return (Fragments if tile.k_contiguous else TurnedFragments)(tile, *which)

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def gemm_cdna3(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % WAVE
        wave = uniform(thread // WAVE)
        wave_m, wave_n = wave // geo.waves_n, wave % geo.waves_n
        tiles_m, tiles_n = num_tiles(M, geo.tile_m), num_tiles(N, geo.tile_n)
        step_k = geo.tile_k * geo.tiles_per_step
        split, row_k = spec.config.split_k, K
        tile, share, k_first, K = k_part(fx.Int32(fx.block_idx.x), tiles_m * tiles_n, K, split_k, split)
        m_tile, n_tile = output_tile(tile, tiles_m, tiles_n, geo.group_m)
        m0, n0 = m_tile * geo.tile_m, n_tile * geo.tile_n

        lds = fx.SharedAllocator().allocate(storage).peek()
        lds_a = lds.a.ptr
        if fx.const_expr(through_lds):
            lds_b = lds.b.ptr
        staged_a = on_its_way(arguments.a, arguments.a_scale, geo.a, spec.problem.a_dtype, m0, K, thread)
        if fx.const_expr(through_lds):
            staged_b = on_its_way(arguments.b, arguments.b_scale, geo.b, spec.problem.b_dtype, n0, K, thread)
        fragments_a = fragments_of(geo.a, fmt, wave_m * geo.wave_tile_m, geo.frags_m, lane)
        fragments_b = fragments_of(geo.b, fmt, wave_n * geo.wave_tile_n, geo.frags_n, lane)
        values_b = fragments_b.values if through_lds else 0
        if fx.const_expr(b_ahead):
            rows_b = PreshuffledRows(arguments.b, geo, n0, N, row_k, K, wave_n * geo.wave_tile_n, lane)
        # Where codes are made numbers, elements are wide, or both operands of 8 bits are turned, spread reads cost registers that
        # a 256 x 256 tile does not have.
        crowded = (
            fmt.elem_bytes == 1
            and not (geo.a.k_contiguous or geo.b.k_contiguous)
            and geo.tile_m * geo.tile_n == 256 * 256
        )
        spread = not codes and fmt.elem_bytes < 4 and not crowded
        hinted_reads = fragments_a.reads + fragments_b.reads if spread else 0
        mma = WaveMma(fmt, ARCH, geo.frags_m, geo.frags_n, row_sums(epi, geo, wave_n))

        def load_tile(tile_index):
            k0 = k_first + tile_index * geo.tile_k
            return staged_a.load(k0) + (staged_b.load(k0) if through_lds else [])

        def load_b(tile_index, k_slice):
            """Preshuffled fragments of one slice, on their way."""
            return rows_b.load(k_first + tile_index * geo.tile_k + k_slice * geo.b.slice_k)

        def write_tile(values, stage, scales, tile, number):
            """number: of the tile; scales: of rows, that are kept, from some tile on; tile: the number from there."""
            at = tile if kept else number
            of_a = [scales[:num_a], at] if codes and geo.a.k_contiguous else []
            staged_a.store(values[: staged_a.values], *of_a, lds_a, stage * geo.a.stage_bytes)
            if fx.const_expr(through_lds):
                of_b = [scales[num_a:], at] if codes and geo.b.k_contiguous else []
                staged_b.store(values[staged_a.values :], *of_b, lds_b, stage * geo.b.stage_bytes)

        # Scales of 512 k of a lane's rows that are kept (ScaledRows), of those operands that have them.
        num_a = staged_a.scale_loads if kept and geo.a.k_contiguous else 0
        num_b = staged_b.scale_loads if kept and geo.b.k_contiguous else 0
        num_rows = num_a + num_b

        def load_rows_scales(part):
            """Of the 512 k number `part` (Int32)."""
            k0 = k_first + part * SCALE_K
            return (staged_a.load_scales(k0) if num_a else []) + (staged_b.load_scales(k0) if num_b else [])

        def after_tiles(scales, tiles):
            of_a = staged_a.after(scales[:num_a], tiles) if num_a else []
            return of_a + (staged_b.after(scales[num_a:], tiles) if num_b else [])

        def read_fragments(stage, k_slice):
            return (
                fragments_a.read(lds_a, stage * geo.a.stage_bytes, k_slice),
                fragments_b.read(lds_b, stage * geo.b.stage_bytes, k_slice) if through_lds else [],
            )

        num_scales = 0
        # The next step's float32 scales: 128 k before the first are needed, or, where sums and products are 128 registers, 64 later, into
        # the registers of this step's.
        late = geo.frags_m * geo.frags_n >= 16
        if fx.const_expr(wide):
            scales = RegisterScales(arguments, geo, m0, n0, K, wave_m, wave_n, lane)
            num_scales = geo.frags_m + 1

        def load_scales(step):
            return scales.load(k_first + step * step_k) if wide else []

        # Prologue: tiles 0 and 1 to LDS, tile 2 in registers; the first fragments.
        tile0, tile1 = load_tile(fx.Int32(0)), load_tile(fx.Int32(1))
        rows_scales = load_rows_scales(fx.Int32(0))
        write_tile(tile0, 0, rows_scales, 0, fx.Int32(0))
        write_tile(tile1, 1, rows_scales, 1, fx.Int32(1))
        rows_scales = after_tiles(rows_scales, NUM_STAGES)
        staged = load_tile(fx.Int32(NUM_STAGES))
        ahead = []
        for index in fx.range_constexpr(b_ahead * geo.num_slices):
            # In this order: the loop waits for the oldest.
            keep_order()
            ahead.append(load_b(fx.Int32(index // geo.num_slices), index % geo.num_slices))
        wait_lds()
        barrier()
        frag_a, frag_b = read_fragments(fx.Int32(0), 0)
        scale = load_scales(fx.Int32(0))

        # Main loop, tiles_per_step K tiles a step. State: stage of tile k, tile k + 2 in registers, the first fragments
        # of tile k, float32 scales of the step, scales of rows from tile k + 2 on, those of the next 512 k, the accumulators.
        num_steps = num_tiles(K - k_first, step_k)
        counts = [len(staged), fragments_a.values, values_b, num_scales, len(ahead) * geo.frags_n, 2 * num_rows]
        state = [fx.Int32(0)] + staged + frag_a + frag_b + scale + [b for each in ahead for b in each]
        state += rows_scales + rows_scales + mma.zero()

        def one_step(step, state, rows_part=None):
            """rows_part: which 512 k of scales of rows to load on the way."""
            stage = fx.Int32(state[0])
            values = [fx.Vector(value) for value in state[1:]]
            staged = values[: counts[0]]
            frag_a = values[counts[0] : sum(counts[:2])]
            frag_b = values[sum(counts[:2]) : sum(counts[:3])]
            scale = values[sum(counts[:3]) : sum(counts[:4])]
            flat_b = values[sum(counts[:4]) : sum(counts[:5])]
            ahead = [flat_b[i : i + geo.frags_n] for i in range(0, len(flat_b), geo.frags_n)]
            rows_scales = values[sum(counts[:5]) : sum(counts[:5]) + num_rows]
            rows_scales_next = values[sum(counts[:5]) + num_rows : sum(counts)]
            acc = values[sum(counts) :]
            for k_tile_of_step in fx.range_constexpr(geo.tiles_per_step):
                k_tile = fx.Int32(step) * geo.tiles_per_step + k_tile_of_step
                for k_slice in fx.range_constexpr(geo.num_slices):
                    more_loads = 0
                    if fx.const_expr(k_slice < geo.num_slices - 1):
                        next_a, next_b = read_fragments(stage, k_slice + 1)
                    else:
                        wait_lds()
                        barrier()
                        keep_order()
                        write_tile(staged, stage, rows_scales, k_tile_of_step, k_tile + NUM_STAGES)
                        if fx.const_expr(rows_part is not None and k_tile_of_step == 0):
                            # Older than the next tile, which is waited for first.
                            rows_scales_next, more_loads = load_rows_scales(rows_part), num_rows
                        staged = load_tile(k_tile + (NUM_STAGES + 1))
                        next_a, next_b = read_fragments(1 - stage, 0)
                    slice_of_step = k_tile_of_step * geo.num_slices + k_slice
                    multiplied_b = fragments_b.sort(frag_b) if through_lds else ahead[slice_of_step]
                    if fx.const_expr(wide):
                        # Two slices are the 128 k of a scale, a step those of four.
                        block, second = divmod(slice_of_step, 2)
                        last = block == step_k // 128 - 1
                        if fx.const_expr(second == 0):
                            part = mma.zero()
                            if fx.const_expr(last and not late):
                                next_scale = load_scales(fx.Int32(step) + 1)
                        part = mma.step(fragments_a.sort(frag_a), multiplied_b, part)
                        if fx.const_expr(second == 1):
                            acc = mma.add_scaled(part, acc, scale[: geo.frags_m], scale[geo.frags_m], block)
                            if fx.const_expr(last):
                                scale = load_scales(fx.Int32(step) + 1) if late else next_scale
                    else:
                        acc = mma.step(fragments_a.sort(frag_a), multiplied_b, acc)
                    moves = k_slice == geo.num_slices - 1
                    writes = staged_a.writes + (staged_b.writes if through_lds else 0) if moves else 0
                    loads = staged_a.loads + (staged_b.loads if through_lds else 0) if moves else 0
                    interleave(mma.instructions, writes=writes, loads=loads + more_loads, reads=hinted_reads)
                    # Multiplications of one slice stay with its reads: behind the barrier they would hold it up.
                    keep_order()
                    if fx.const_expr(b_ahead):
                        # Into the registers that were just multiplied.
                        ahead[slice_of_step] = load_b(k_tile + b_ahead, k_slice)
                        keep_order()
                    frag_a, frag_b = next_a, next_b
                stage = 1 - stage
            rows_scales = after_tiles(rows_scales, geo.tiles_per_step)
            flat_b = [b for each in ahead for b in each]
            return [stage] + staged + frag_a + frag_b + scale + flat_b + rows_scales + rows_scales_next + acc

        def one_part(part, state):
            """The steps that write the tiles of 512 k, whose scales are there. The first one loads those of the next 512 k."""
            end = (part + 1) * steps_per_part - steps_ahead
            first = select(part == 0, 0, end - steps_per_part)
            state = one_step(first, state, part + 1)
            rest = minimum(end, num_steps) - first - 1
            state = loop(rest, state, lambda i, state: one_step(first + 1 + i, state))
            at = 1 + sum(counts[:5])
            return state[:at] + state[at + num_rows : at + 2 * num_rows] * 2 + state[at + 2 * num_rows :]

        if fx.const_expr(num_rows):
            # Tiles are written two ahead: the last ones of 512 k of scales are multiplied with the next.
            steps_per_part, steps_ahead = SCALE_K // step_k, NUM_STAGES // geo.tiles_per_step
            num_parts = num_tiles(num_steps + steps_ahead, steps_per_part)
            results = loop(num_parts, state, one_part)
        else:
            for step, state in range(fx.Int32(0), num_steps, fx.Int32(1), init=state, unroll=1):
                results = yield one_step(step, state)

        # Drain: nothing; what is still in flight are registers of tiles past K.

        # Epilogue.
        acc = [fx.Vector(value) for value in results[1 + sum(counts) :]]
        finish(acc, epi, arguments, geo, split, (m0, n0), tiles_m * tiles_n, tile, share, wave_m, wave_n, lane)

    return launcher(gemm_cdna3, geo, epi, spec.config.split_k)
