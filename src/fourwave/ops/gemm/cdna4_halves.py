"""Four-wave GEMM for CDNA4 (gfx950) with operand tiles in halves: 8-bit floats, the largest tile, two stages of LDS.

Formula, operands and epilogue are those of cdna4.py. Two stages of 256 x 256 x 128 fill LDS; waiting for a whole tile
would drain every load, and a set of fragments of the next tile beside this one's leaves no registers. So each operand
tile is brought, awaited, read and released in two halves, of which every wave has its part.

Schedule. The halves come in the order a0 b0 b1 a1 of tile 0, the same of tile 1, ...; half h lies in slot h % 8. A tile
is multiplied in four phases, a0 x b0, a0 x b1, a1 x b1, a1 x b0. Phase p (counted over all tiles):
  this wave's reads of half p + 1 are back, half p + 2 has landed; barrier: so in every wave
              (half p + 2 is complete, and the slot of half p + 1 is free)
              issue the loads of half p + 9 into the slot of half p + 1
              read the fragments of half p + 2; multiply
In flight after each wait: halves p + 3 .. p + 8, seven phases between a load and its use. Registers of a0 and of the
free half of b take the next tile's first halves, b's changing places: a step has two tiles. An odd last one is zeros.
Every wave passes every barrier equally often, tails included.

Block scales (cdna4.py): those of a come in the first phase of even steps, those of b in the first phase of odd ones, each
for the SCALE_K (two steps) that the next even step begins with. One load more in flight for the next six phases.

Limits  as cdna4.py.
Source  as cdna4.py; reading a tile's quadrants while others are loaded follows published eight-wave and four-wave kernels
        (HipKittens; FlyDSL kernels/).
"""

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.epilogue import SWIGLU, store_tile
from fourwave.blocks.flydsl.loaders import BlockScales, Fragments, GlobalTile, load_direct
from fourwave.blocks.flydsl.memory import barrier, interleave, keep_order, lds_struct, uniform, wait_lds, wait_loads
from fourwave.blocks.flydsl.mma import WaveMma
from fourwave.blocks.flydsl.schedule import num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import WAVE, WORKGROUP
from fourwave.ops.gemm.cdna import launcher
from fourwave.ops.gemm.config import block_scaled, geometry

ARCH = "gfx950"
NUM_STAGES = 2
ORDER = (("a", 0), ("b", 0), ("b", 1), ("a", 1))  # halves of a tile
QUADRANTS = ((0, 0), (0, 1), (1, 1), (1, 0))  # halves of a and b that each phase multiplies
NUM_HALVES = NUM_STAGES * len(ORDER)  # slots


def build(spec, fmt, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    geo = geometry(
        spec.config, spec.problem.layout, fmt.elem_bytes, ARCH, block_scaled(spec.problem), epi.activation == SWIGLU
    )
    tiles = {"a": geo.a.half(geo.waves_m), "b": geo.b.half(geo.waves_n)}
    frags_m, frags_n = geo.frags_m // 2, geo.frags_n // 2
    loads = {name: tile.loads for name, tile in tiles.items()}
    # Loads of the six halves after the one that phase f of a step waits for, and of scales in the first phase.
    in_flight = [
        sum(loads[ORDER[(f + i) % 4][0]] for i in range(3, 9)) + (1 if geo.scales and 1 <= f <= 6 else 0)
        for f in range(8)
    ]
    storage = lds_struct(
        {
            "a": NUM_STAGES * geo.a.stage_bytes,
            "b": NUM_STAGES * geo.b.stage_bytes,
            **BlockScales.storage(geo),
        }
    )

    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def gemm_cdna4_halves(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % WAVE
        wave = uniform(thread // WAVE)
        wave_m, wave_n = wave // geo.waves_n, wave % geo.waves_n
        m_tile, n_tile = output_tile(
            fx.Int32(fx.block_idx.x),
            num_tiles(M, geo.tile_m),
            num_tiles(N, geo.tile_n),
            geo.group_m,
        )
        m0, n0 = m_tile * geo.tile_m, n_tile * geo.tile_n

        shared = fx.SharedAllocator().allocate(storage).peek()
        lds = {"a": shared.a.ptr, "b": shared.b.ptr}
        sources = {
            (name, half): GlobalTile(tensor, tiles[name], first + half * tiles[name].split, K, thread)
            for name, tensor, first in (("a", arguments.a, m0), ("b", arguments.b, n0))
            for half in (0, 1)
        }
        readers = {
            "a": Fragments(tiles["a"], fmt, wave_m * tiles["a"].split, frags_m, lane),
            "b": Fragments(tiles["b"], fmt, wave_n * tiles["b"].split, frags_n, lane),
        }
        mma = WaveMma(fmt, ARCH, frags_m, frags_n)
        scales = BlockScales(geo, shared, arguments, m0, n0, K, lane, wave)
        scale_readers = {
            (name, half): scales.reader(name, (wave_part * 2 + half) * tiles[name].split, count, 2)
            for name, wave_part, count in (("a", wave_m, frags_m), ("b", wave_n, frags_n))
            for half in (0, 1)
        }
        num_scales = {name: len(scale_readers[name, 0]) for name in "ab"}
        count_a, count_b = frags_m + num_scales["a"], frags_n + num_scales["b"]

        def slot_offset(name, half, stage):
            return (stage * 2 + half) * tiles[name].stage_bytes

        def issue_loads(k_tile, half_index):
            """Half half_index of the halves from tile k_tile (Int32, even) on."""
            tile, place = half_index // 4, half_index % 4
            name, half = ORDER[place]
            k0 = (k_tile + tile) * geo.tile_k
            # Asked anew: the compiler would keep the LDS address of each of the loop's loads in a register of its own.
            own = uniform(thread // WAVE)
            load_direct(sources[name, half], lds[name], slot_offset(name, half, tile % NUM_STAGES), k0, own)

        def read_fragments(k_tile, half_index):
            """Fragments, and behind those of a step's first tile the scales of the step."""
            name, half = ORDER[half_index % 4]
            fragments = readers[name].read(lds[name], slot_offset(name, half, half_index // 4 % NUM_STAGES), 0)
            scales_too = half_index // 4 % 2 == 0
            return fragments + (scale_readers[name, half].read(k_tile + half_index // 4) if scales_too else [])

        def sort_scales(held, halves, k_tile):
            counts = {"a": frags_m, "b": frags_n}
            return {half: scale_readers[half].sort(held[half][counts[half[0]] :], k_tile) for half in halves}

        def multiply(held, words, byte, acc, half_a, half_b):
            frag_a, frag_b = held["a", half_a][:frags_m], held["b", half_b][:frags_n]
            scale_a, scale_b = words["a", half_a], words["b", half_b]
            where = [
                (half_a * frags_m + i) * geo.frags_n + half_b * frags_n + j
                for i in range(frags_m)
                for j in range(frags_n)
            ]
            acc = list(acc)
            products = mma.step(frag_a, frag_b, [acc[at] for at in where], scale_a, scale_b, byte)
            for at, value in zip(where, products, strict=True):
                acc[at] = value
            return acc

        # Prologue: the first scales; fill every slot; the fragments of the first two halves, and the load into the slot that frees.
        scales.issue_one("a", fx.Int32(0))
        scales.issue_one("b", fx.Int32(0))
        for index in fx.range_constexpr(NUM_HALVES):
            issue_loads(fx.Int32(0), index)
        wait_loads(in_flight=sum(loads[ORDER[i % 4][0]] for i in range(2, NUM_HALVES)))
        barrier()
        first_a, first_b = read_fragments(fx.Int32(0), 0), read_fragments(fx.Int32(0), 1)
        wait_lds()
        barrier()
        issue_loads(fx.Int32(0), NUM_HALVES)

        # Main loop, two K tiles a step. State: fragments and scales of halves a0 and b0, the accumulators.
        num_steps = num_tiles(K, geo.tile_k * 2)
        zero = [fx.Vector.filled(4, 0.0, fx.Float32) for _ in range(geo.frags_m * geo.frags_n)]
        state = first_a + first_b + zero
        for step, state in range(fx.Int32(0), num_steps, fx.Int32(1), init=state, unroll=1):
            values = [fx.Vector(value) for value in state]
            held = {("a", 0): values[:count_a], ("b", 0): values[count_a : count_a + count_b]}
            acc = values[count_a + count_b :]
            k_tile = fx.Int32(step) * 2
            words = {}
            for tile in fx.range_constexpr(2):
                coming = {}
                for phase in fx.range_constexpr(4):
                    index = tile * 4 + phase
                    wait_lds()
                    wait_loads(in_flight=in_flight[index])
                    barrier()
                    keep_order()
                    if fx.const_expr(index == 0):
                        scales.issue_alternating(step)
                    issue_loads(k_tile, index + 1 + NUM_HALVES)
                    name, half = ORDER[(phase + 2) % 4]
                    if fx.const_expr(phase < 2):
                        held[name, half] = read_fragments(k_tile, index + 2)
                    else:
                        coming[name, half] = read_fragments(k_tile, index + 2)
                    half_a, half_b = QUADRANTS[phase]
                    if fx.const_expr(tile == 0):
                        first_used = [each for each in (("a", half_a), ("b", half_b)) if each not in words]
                        words = words | sort_scales(held, first_used, k_tile)
                    acc = multiply(held, words, tile, acc, half_a, half_b)
                    scales_too = (index + 2) // 4 % 2 == 0
                    interleave(
                        mma.instructions,
                        loads=loads[ORDER[(phase + 1) % 4][0]],
                        reads=readers[name].reads + (num_scales[name] if scales_too else 0),
                    )
                    # Multiplications of one phase stay with its reads: behind the barrier they would hold it up.
                    keep_order()
                held = coming
            results = yield held["a", 0] + held["b", 0] + acc

        # Drain: only loads past K are left; they must not land in LDS that another workgroup may own by then.
        wait_loads(in_flight=0)

        # Epilogue.
        acc = [fx.Vector(value) for value in results[count_a + count_b :]]
        store_tile(acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane)

    return launcher(gemm_cdna4_halves, geo)
