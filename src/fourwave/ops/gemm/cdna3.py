"""Four-wave GEMM for CDNA3 (gfx942): out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

a        TN, NN: [M, K]; NT: [K, M]          float32, bfloat16 or float16, inner stride 1, rows 16-byte aligned
         or float8_e4m3fnuz and float8_e5m2fnuz, in any mix of a and b
         or float8_e4m3fn and float8_e5m2 with scales of blocks, see below
b        TN: [N, K]; NN, NT: [K, N]          as a
a_scale, b_scale   TN, "1x128" of a with "128x128" of b: float32, straight to registers; each product of 128 k is scaled
                   before it is added. "1x32": float8_e8m0fnu in the operand's memory order ("tensor" and "row": epilogue.py)
out      [M, N] float32, bfloat16 or float16, inner stride 1; accumulation and epilogue in float32
bias     [N], optional

Four waves of 64 lanes compute one tile_m x tile_n tile; each wave holds its share of the accumulator in registers for
all of K. Operand tiles go from global memory to registers and from there to swizzled LDS, in the operand's own memory
order (blocks/flydsl/tiles.py); this machine's direct loads to LDS bring 4 bytes per lane only. Where K is not
contiguous, a lane reads a few neighbours along M or N at each k and sorts them into fragments in registers.

Schedule, K step k, with two LDS buffers per operand, one more tile in registers, and num_slices = tile_k / slice_k (32; 64 for 8-bit):
  slices 0 .. last - 1: read the next slice's fragments of tile k; multiply this slice's
  last slice: this wave's LDS reads of tile k and writes of tile k + 1 are done; barrier: so are every wave's
              write tile k + 2, which was loaded during the last step, to the buffer of tile k
              issue the loads of tile k + 3 into the registers this frees
              read the first fragments of tile k + 1; multiply the last slice of tile k
The compiler counts the waits for the loads, since their results are ordinary registers. The raw barrier does not wait
for LDS writes, so wait_lds comes before it. Tiles past K fetch nothing and are zeros.
Every wave passes every barrier equally often, tails included.

Block scales: this machine's matrix unit takes none, so codes become bfloat16 between registers and LDS, exactly
(blocks/flydsl/dequantize.py), and are multiplied as such. Where K is not contiguous, a lane writes every second chunk of a
line: two lanes meet in a bank.

Limits  tails in M, N and K are handled; 16-byte alignment and the row stride limit are checked in config.py and amd.py.
Source  operand layout of V_MFMA_F32_16X16X16_BF16, V_MFMA_F32_16X16X32_FP8_FP8: AMD CDNA3 ISA guide, AMD matrix instruction calculator.
"""

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.epilogue import SWIGLU, row_sums
from fourwave.blocks.flydsl.loaders import Fragments, GlobalTile, RegisterScales, StagedCodes, StagedTile
from fourwave.blocks.flydsl.memory import barrier, interleave, keep_order, uniform, wait_lds
from fourwave.blocks.flydsl.mma import WaveMma
from fourwave.blocks.flydsl.schedule import k_part, num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import WAVE, WORKGROUP
from fourwave.ops.gemm.cdna import finish, launcher
from fourwave.ops.gemm.config import block_scaled, code_format, geometry, wide_scaled

ARCH = "gfx942"
NUM_STAGES = 2  # LDS buffers per operand


def build(spec, fmt, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    geo = geometry(spec.config, spec.problem.layout, fmt.elem_bytes, ARCH, swiglu=epi.activation == SWIGLU)
    codes, wide = block_scaled(spec.problem), wide_scaled(spec.problem)
    assert geo.num_stages == NUM_STAGES, "why_unsupported lets nothing else through"

    @fx.struct
    class Storage:
        a: fx.Array[fx.Uint8, NUM_STAGES * geo.a.stage_bytes, 16]
        b: fx.Array[fx.Uint8, NUM_STAGES * geo.b.stage_bytes, 16]

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def gemm_cdna3(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % WAVE
        wave = uniform(thread // WAVE)
        wave_m, wave_n = wave // geo.waves_n, wave % geo.waves_n
        tiles_m, tiles_n = num_tiles(M, geo.tile_m), num_tiles(N, geo.tile_n)
        step_k = geo.tile_k * geo.tiles_per_step
        split = spec.config.split_k
        tile, share, k_first, K = k_part(fx.Int32(fx.block_idx.x), tiles_m * tiles_n, K, step_k, split)
        m_tile, n_tile = output_tile(tile, tiles_m, tiles_n, geo.group_m)
        m0, n0 = m_tile * geo.tile_m, n_tile * geo.tile_n

        lds = fx.SharedAllocator().allocate(Storage).peek()
        lds_a, lds_b = lds.a.ptr, lds.b.ptr
        if fx.const_expr(codes):
            staged_a = StagedCodes(
                arguments.a, arguments.a_scale, geo.a, code_format(spec.problem.a_dtype), m0, K, thread
            )
            staged_b = StagedCodes(
                arguments.b, arguments.b_scale, geo.b, code_format(spec.problem.b_dtype), n0, K, thread
            )
        else:
            staged_a = StagedTile(GlobalTile(arguments.a, geo.a, m0, K, thread), fmt.dtype, thread)
            staged_b = StagedTile(GlobalTile(arguments.b, geo.b, n0, K, thread), fmt.dtype, thread)
        fragments_a = Fragments(geo.a, fmt, wave_m * geo.wave_tile_m, geo.frags_m, lane)
        fragments_b = Fragments(geo.b, fmt, wave_n * geo.wave_tile_n, geo.frags_n, lane)
        # Where both operands are sorted in registers, codes made numbers, or elements wide, spread reads cost registers that a
        # 256 x 256 tile does not have.
        spread = (fragments_a.sorted or fragments_b.sorted) and not codes and fmt.elem_bytes < 4
        hinted_reads = fragments_a.reads + fragments_b.reads if spread else 0
        mma = WaveMma(fmt, ARCH, geo.frags_m, geo.frags_n, row_sums(epi, geo, wave_n))

        def load_tile(tile_index):
            k0 = k_first + tile_index * geo.tile_k
            return staged_a.load(k0) + staged_b.load(k0)

        def write_tile(values, stage):
            staged_a.store(values[: staged_a.values], lds_a, stage * geo.a.stage_bytes)
            staged_b.store(values[staged_a.values :], lds_b, stage * geo.b.stage_bytes)

        def read_fragments(stage, k_slice):
            return (
                fragments_a.read(lds_a, stage * geo.a.stage_bytes, k_slice),
                fragments_b.read(lds_b, stage * geo.b.stage_bytes, k_slice),
            )

        num_scales = 0
        if fx.const_expr(wide):
            scales = RegisterScales(arguments, geo, m0, n0, wave_m, wave_n, lane)
            num_scales = geo.frags_m + 1

        def load_scales(k_slice):
            return scales.load(k_slice * geo.a.slice_k) if wide else []

        # Prologue: tiles 0 and 1 to LDS, tile 2 in registers; the first fragments.
        tile0, tile1 = load_tile(fx.Int32(0)), load_tile(fx.Int32(1))
        write_tile(tile0, 0)
        write_tile(tile1, 1)
        staged = load_tile(fx.Int32(NUM_STAGES))
        wait_lds()
        barrier()
        frag_a, frag_b = read_fragments(fx.Int32(0), 0)
        scale = load_scales(fx.Int32(0))

        # Main loop, tiles_per_step K tiles a step. State: stage of tile k, tile k + 2 in registers, the first fragments
        # of tile k, scales of its first 128 k, the accumulators.
        num_steps = num_tiles(K - k_first, step_k)
        counts = [staged_a.values + staged_b.values, fragments_a.values, fragments_b.values, num_scales]
        state = [fx.Int32(0)] + staged + frag_a + frag_b + scale + mma.zero()
        for step, state in range(fx.Int32(0), num_steps, fx.Int32(1), init=state, unroll=1):
            stage = fx.Int32(state[0])
            values = [fx.Vector(value) for value in state[1:]]
            staged = values[: counts[0]]
            frag_a = values[counts[0] : sum(counts[:2])]
            frag_b = values[sum(counts[:2]) : sum(counts[:3])]
            scale = values[sum(counts[:3]) : sum(counts)]
            acc = values[sum(counts) :]
            for k_tile_of_step in fx.range_constexpr(geo.tiles_per_step):
                for k_slice in fx.range_constexpr(geo.num_slices):
                    if fx.const_expr(k_slice < geo.num_slices - 1):
                        next_a, next_b = read_fragments(stage, k_slice + 1)
                    else:
                        wait_lds()
                        barrier()
                        keep_order()
                        write_tile(staged, stage)
                        k_tile = fx.Int32(step) * geo.tiles_per_step + k_tile_of_step
                        staged = load_tile(k_tile + (NUM_STAGES + 1))
                        next_a, next_b = read_fragments(1 - stage, 0)
                    if fx.const_expr(wide):
                        # Two slices are the 128 k of a scale.
                        second = (k_tile_of_step * geo.num_slices + k_slice) % 2
                        if fx.const_expr(second == 0):
                            part = mma.zero()
                            done = (fx.Int32(step) * geo.tiles_per_step + k_tile_of_step) * geo.num_slices + k_slice
                            next_scale = load_scales(done + 2)
                        part = mma.step(fragments_a.sort(frag_a), fragments_b.sort(frag_b), part)
                        if fx.const_expr(second == 1):
                            acc = mma.add_scaled(part, acc, scale[: geo.frags_m], scale[geo.frags_m])
                            scale = next_scale
                    else:
                        acc = mma.step(fragments_a.sort(frag_a), fragments_b.sort(frag_b), acc)
                    moves = k_slice == geo.num_slices - 1
                    writes = staged_a.writes + staged_b.writes if moves else 0
                    loads = staged_a.loads + staged_b.loads if moves else 0
                    interleave(mma.instructions, writes=writes, loads=loads, reads=hinted_reads)
                    # Multiplications of one slice stay with its reads: behind the barrier they would hold it up.
                    keep_order()
                    frag_a, frag_b = next_a, next_b
                stage = 1 - stage
            results = yield [stage] + staged + frag_a + frag_b + scale + acc

        # Drain: nothing; what is still in flight are registers of tiles past K.

        # Epilogue.
        acc = [fx.Vector(value) for value in results[1 + sum(counts) :]]
        finish(acc, epi, arguments, geo, split, (m0, n0), tiles_m * tiles_n, tile, share, wave_m, wave_n, lane)

    return launcher(gemm_cdna3, geo, epi, spec.config.split_k)
