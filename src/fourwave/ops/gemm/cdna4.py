"""Four-wave GEMM for CDNA4 (gfx950): out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

a        TN, NN: [M, K]; NT: [K, M]          float32, bfloat16 or float16, inner stride 1, rows 16-byte aligned
         or float8_e4m3fn and float8_e5m2, in any mix of a and b (the largest tile: cdna4_halves.py), and with "1x32" also
         packed e2m1: bytes of two codes along the stored row, element 0 in the low half
b        TN: [N, K]; NN, NT: [K, N]          as a; TN, NN with bfloat16 a also packed e2m1
a_scale, b_scale   of 8-bit operands, "1x32": float8_e8m0fnu in the operand's memory order, rows 16-byte aligned and zero
                   past K, for the scaled matrix instruction. TN also "1x128" of a with "128x128" of b: float32, each
                   product of 128 k is scaled before it is added ("tensor" and "row": epilogue.py)
out      [M, N] float32, bfloat16 or float16, inner stride 1; accumulation and epilogue in float32
bias     [N], optional

Four waves of 64 lanes compute one tile_m x tile_n tile; each wave holds its share of the accumulator in registers for
all of K. Operand tiles go from global memory straight to LDS (buffer_load_dwordx4 ... lds) in the operand's own
memory order; the swizzle is in which chunk a lane fetches (blocks/flydsl/tiles.py). Where K is not contiguous,
fragments are read with transposing LDS reads (ds_read_b64_tr_b16, _b8, _b4), or put together in registers (32 bits).

Schedule, K step k, with num_stages LDS buffers per operand and num_slices = tile_k / slice_k (32; 128 for 8-bit operands):
  slices 0 .. last - 1: read the next slice's fragments of tile k; multiply this slice's
  last slice: all reads of tile k are back; wait until tile k + 1 has landed; barrier: in every wave
              (tile k + 1 is complete, and the buffer of tile k is free)
              issue the loads of tile k + num_stages into the buffer of tile k
              read the first fragments of tile k + 1; multiply the last slice of tile k
Fragments are thus always read one slice ahead, and num_stages - 1 tiles are in flight while one is multiplied. Tiles
past K fetch nothing and land as zeros, so that the wait counts hold in the last steps as well.
Every wave passes every barrier equally often, tails included.

Preshuffled b (8-bit, TN) skips LDS: fragments come from global memory in the order of the matrix instruction, b_ahead K tiles
ahead; a step of the loop goes round as many sets of registers. Each slice's set is loaded anew right behind the
multiplications that were the last to read it. K is added in the same order as through LDS: the results are the same bits.

Bfloat16 a with packed b: a fragment of b is 128 k, of which a lane has 32 in a row, and serves four slices; each slice's 8 become
bfloat16 right before they are multiplied, exactly, and a's lanes read the same k (tiles.OperandTile.chunk).

Block scales come beside the first tile of every SCALE_K of K: a chunk of 16 bytes is 16 (of float32: four) blocks of a row,
so that one load of all four waves brings those of 256 rows of a and b. The other tiles issue the same loads with nothing to bring, so that
the wait counts hold. Scales are read from LDS 16 bytes a lane (8 where K is not contiguous: transposing) for all slices of a
step, and the matrix instruction picks a byte of four (loaders.FragmentScales).

Limits  tails in M, N and K are handled; 16-byte alignment and the row stride limit are checked in config.py and amd.py.
Source  operand layout of V_MFMA_F32_16X16X32_BF16, V_MFMA_F32_16X16X128_F8F6F4, DS_READ_B64_TR_B16/B8/B4 and LDS loads:
        AMD CDNA4 ISA guide.
"""

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl import e2m1
from fourwave.blocks.flydsl.column_chunks import ColumnFragments
from fourwave.blocks.flydsl.epilogue import SWIGLU, row_sums
from fourwave.blocks.flydsl.loaders import BlockScales, Fragments, GlobalTile, PreshuffledRows, load_direct
from fourwave.blocks.flydsl.memory import barrier, interleave, keep_order, lds_struct, uniform, wait_lds, wait_loads
from fourwave.blocks.flydsl.mma import FORMATS, WaveMma
from fourwave.blocks.flydsl.schedule import k_part, num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import WAVE, WORKGROUP
from fourwave.ops.gemm.cdna import finish, launcher
from fourwave.ops.gemm.config import brings_scales, geometry, shuffled_ahead, split_step

ARCH = "gfx950"


def reader_of(tile):
    return ColumnFragments if tile.in_columns else Fragments


def build(spec, fmt, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    scaling = brings_scales(spec.problem, ARCH)
    b_ahead = spec.problem.b_preshuffled and shuffled_ahead(spec.config)
    geo = geometry(
        spec.config, spec.problem.layout, fmt.elem_bytes, ARCH, scaling, epi.activation == SWIGLU, fmt.packed, b_ahead
    )
    through_lds = not b_ahead  # b
    slices_of_b = geo.slices_of_b
    dequantized = slices_of_b > 1  # b
    fmt_b = FORMATS["uint8", "uint8"] if dequantized else fmt
    storage = lds_struct(
        {
            "a": geo.num_stages * geo.a.stage_bytes,
            **({"b": geo.num_stages * geo.b.stage_bytes} if through_lds else {}),
            **BlockScales.storage(geo, idle=True),
        }
    )
    split_k = split_step(spec.problem, geo)

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def gemm_cdna4(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % WAVE
        wave = uniform(thread // WAVE)
        wave_m, wave_n = wave // geo.waves_n, wave % geo.waves_n
        tiles_m, tiles_n = num_tiles(M, geo.tile_m), num_tiles(N, geo.tile_n)
        step_k = geo.tile_k * geo.tiles_per_step
        split, row_k = spec.config.split_k, K
        tile, share, k_first, K = k_part(fx.Int32(fx.block_idx.x), tiles_m * tiles_n, K, split_k, split, bool(scaling))
        first_slice = (
            k_first >> 7
        )  # of 128 k, whose scales are read; where there are scales, parts begin with a chunk of them
        m_tile, n_tile = output_tile(tile, tiles_m, tiles_n, geo.group_m)
        m0, n0 = m_tile * geo.tile_m, n_tile * geo.tile_n

        lds = fx.SharedAllocator().allocate(storage).peek()
        lds_a = lds.a.ptr
        global_a = GlobalTile(arguments.a, geo.a, m0, K, thread)
        fragments_a = reader_of(geo.a)(geo.a, fmt, wave_m * geo.wave_tile_m, geo.frags_m, lane)
        if fx.const_expr(through_lds):
            lds_b = lds.b.ptr
            global_b = GlobalTile(arguments.b, geo.b, n0, K, thread)
            fragments_b = reader_of(geo.b)(geo.b, fmt_b, wave_n * geo.wave_tile_n, geo.frags_n, lane)
            values_b, reads_b = fragments_b.values, fragments_b.reads
        else:
            rows_b = PreshuffledRows(arguments.b, geo, n0, N, row_k, K, wave_n * geo.wave_tile_n, lane)
            values_b, reads_b = 0, 0
        mma = WaveMma(fmt, ARCH, geo.frags_m, geo.frags_n, row_sums(epi, geo, wave_n))
        scales = BlockScales(geo, lds, arguments, m0, n0, K, lane, wave)
        step_slices = geo.tiles_per_step * geo.num_slices // slices_of_b
        scales_a = scales.reader("a", wave_m * geo.wave_tile_m, geo.frags_m, step_slices)
        scales_b = scales.reader("b", wave_n * geo.wave_tile_n, geo.frags_n, step_slices)
        num_scales = len(scales_a) + len(scales_b)
        scales.share()

        def issue_loads(tile_index, stage):
            k0 = k_first + tile_index * geo.tile_k
            scales.issue(k0, stage)
            load_direct(global_a, lds_a, stage * geo.a.stage_bytes, k0, wave)
            if fx.const_expr(through_lds):
                load_direct(global_b, lds_b, stage * geo.b.stage_bytes, k0, wave)

        def load_b(tile_index, k_slice):
            """Preshuffled fragments of one slice, on their way."""
            return rows_b.load(k_first + tile_index * geo.tile_k + k_slice * geo.b.slice_k)

        def read_fragments(stage, k_slice, b=None):
            """b: that of the slice before, which may serve this one, too."""
            of_a = fragments_a.read(lds_a, stage * geo.a.stage_bytes, k_slice)
            if fx.const_expr(k_slice % slices_of_b == 0):
                b = fragments_b.read(lds_b, stage * geo.b.stage_bytes, k_slice // slices_of_b) if through_lds else []
            return of_a, b

        def read_scales(number):
            """Those of slice `number` of 128 k and of the next ones that are read together with it."""
            return scales_a.read(number) + scales_b.read(number)

        # Prologue: fill every stage; the first fragments once tile 0 has landed.
        # Preshuffled tiles of b among those of a as in the loop: a wait there leaves so many loads in flight.
        ahead = []
        first_b = b_ahead - geo.num_stages
        for tile_b in fx.range_constexpr(max(first_b, 0)):
            ahead += [load_b(fx.Int32(tile_b), k_slice) for k_slice in range(geo.num_slices)]
            keep_order()
        for stage in fx.range_constexpr(geo.num_stages):
            issue_loads(fx.Int32(stage), stage)
            if fx.const_expr(b_ahead and first_b + stage >= 0):
                keep_order()
                ahead += [load_b(fx.Int32(first_b + stage), k_slice) for k_slice in range(geo.num_slices)]
                keep_order()
        # Behind tile 0 of a: the other tiles, and of preshuffled b one more where it is that far ahead.
        in_flight = (geo.num_stages - 1) * geo.loads_per_tile
        wait_loads(in_flight=in_flight + (geo.b_loads if b_ahead and first_b >= 0 else 0))
        barrier()
        frag_a, frag_b = read_fragments(fx.Int32(0), 0)
        scale = read_scales(first_slice)

        # Main loop, tiles_per_step K tiles a step. State: stage of tile k, its first fragments, the scales of its first slices,
        # the accumulators.
        num_steps = num_tiles(K - k_first, step_k)
        counts = [fragments_a.values, values_b, num_scales, len(ahead) * geo.frags_n]
        state = [fx.Int32(0)] + frag_a + frag_b + scale + [value for each in ahead for value in each] + mma.zero()
        for step, state in range(fx.Int32(0), num_steps, fx.Int32(1), init=state, unroll=1):
            stage = fx.Int32(state[0])
            values = [fx.Vector(value) for value in state[1:]]
            frag_a = values[: counts[0]]
            frag_b = values[counts[0] : sum(counts[:2])]
            scale = values[sum(counts[:2]) : sum(counts[:3])]
            flat_b = values[sum(counts[:3]) : sum(counts)]
            ahead = [flat_b[i : i + geo.frags_n] for i in range(0, len(flat_b), geo.frags_n)]
            acc = values[sum(counts) :]
            for k_tile_of_step in fx.range_constexpr(geo.tiles_per_step):
                next_stage = (stage == geo.num_stages - 1).select(fx.Int32(0), stage + 1)
                for k_slice in fx.range_constexpr(geo.num_slices):
                    k_tile = fx.Int32(step) * geo.tiles_per_step + k_tile_of_step
                    slice_of_step = k_tile_of_step * geo.num_slices + k_slice
                    # Scales: of slices of 128 k, and read once for several.
                    number = first_slice + k_tile * (geo.num_slices // slices_of_b) + k_slice // slices_of_b
                    byte = slice_of_step // slices_of_b % scales_b.slices
                    new_scales = (slice_of_step + 1) % (slices_of_b * scales_b.slices) == 0
                    if fx.const_expr(k_slice < geo.num_slices - 1):
                        next_a, next_b = read_fragments(stage, k_slice + 1, frag_b)
                    else:
                        wait_lds()
                        # In flight: tiles k + 1 .. k + num_stages - 1. All but the oldest may stay so. Preshuffled b: also
                        # the slices of one tile, issued since tile k + 1 of a and before now.
                        in_flight = (geo.num_stages - 2) * geo.loads_per_tile
                        wait_loads(in_flight=in_flight + (geo.b_loads if b_ahead else 0))
                        barrier()
                        keep_order()
                        issue_loads(k_tile + geo.num_stages, stage)
                        next_a, next_b = read_fragments(next_stage, 0)
                    next_scale = read_scales(number + 1) if new_scales else []
                    if fx.const_expr(slice_of_step % (slices_of_b * scales_b.slices) == 0):
                        scale_a = scales_a.sort(scale[: len(scales_a)], number)
                        scale_b = scales_b.sort(scale[len(scales_a) :], number)
                    multiplied_b = fragments_b.sort(frag_b) if through_lds else ahead[slice_of_step]
                    if fx.const_expr(dequantized):
                        word = k_slice % slices_of_b
                        multiplied_b = [
                            e2m1.scaled_eight(codes[word], (fx.Uint32(each[0]) >> 8 * byte) & 255)
                            for codes, each in zip(multiplied_b, scale_b)
                        ]
                        acc = mma.step(fragments_a.sort(frag_a), multiplied_b, acc)
                    elif fx.const_expr(scaling == "128"):
                        acc = mma.fold(frag_a, multiplied_b, acc, scale_a, scale_b[0], byte)
                    else:
                        acc = mma.step(fragments_a.sort(frag_a), multiplied_b, acc, scale_a, scale_b, byte)
                    loads = geo.loads_per_tile - (geo.b_loads if b_ahead else 0) if k_slice == geo.num_slices - 1 else 0
                    new_b = (k_slice + 1) % slices_of_b == 0
                    reads = fragments_a.reads + (reads_b if new_b else 0) + (num_scales if new_scales else 0)
                    interleave(mma.instructions, loads=loads, reads=reads)
                    # Multiplications of one slice stay with its reads: behind the barrier they would hold it up.
                    keep_order()
                    if fx.const_expr(b_ahead):
                        # Into the registers that were just multiplied.
                        ahead[slice_of_step] = load_b(k_tile + b_ahead, k_slice)
                        keep_order()
                    frag_a, frag_b, scale = next_a, next_b, next_scale
                stage = next_stage
            results = yield [stage] + frag_a + frag_b + scale + [value for each in ahead for value in each] + acc

        # Drain: only loads past K are left; they must not land in LDS that another workgroup may own by then. Behind the last of
        # those come the last slice's fragments of preshuffled b, which land in registers.
        wait_loads(in_flight=geo.b_loads // geo.num_slices if b_ahead else 0)

        # Epilogue.
        acc = [fx.Vector(value) for value in results[1 + sum(counts) :]]
        finish(acc, epi, arguments, geo, split, (m0, n0), tiles_m * tiles_n, tile, share, wave_m, wave_n, lane)

    return launcher(gemm_cdna4, geo, epi, spec.config.split_k)
