"""MXFP4 GEMM for gfx1250: out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

a        TN, NN: [M, K / 2]; NT: [K, M / 2]   packed e2m1, element 0 in the low half of a byte, rows 16-byte aligned
b        TN: [N, K / 2]; NN, NT: [K, N / 2]   likewise
a_scale, b_scale   [M or N, ceil(K / 32)] or, NT and b of NN, [ceil(K / 32), M or N]; float8_e8m0fnu, rows 16-byte aligned
out      [M, N] float32, bfloat16 or float16, inner stride 1; accumulation and epilogue in float32
bias     [N], optional

Four waves of 32 lanes compute one 256 x 256 tile, each a quarter of 128 x 128 that it holds in registers for all of K.
Everything goes through LDS, by the tensor data mover (blocks/flydsl/tdm.py), which fills what lies past M, N and K with zeros.
No allocation depends on K.

LDS      three stages of codes, 256 rows of a and 256 of b, 128 k each (a tile);
         two pages of scales, of the same rows, for the 1024 k of 8 tiles (a group)
         Where k is not contiguous, 128 rows of 256 codes and 32 of 256 scales in their place; codes are turned as they are
         read (ds_load_tr4_b64), scales are read byte by byte.

Schedule, tile j in stage j % 3 and registers, its scales on page (j // 8) % 2:
         wait until this wave's LDS reads of tile j are back, and its part of tile j + 1 has landed; arrive
         multiply a quarter of tile j
         depart: in every wave (tile j + 1 is complete, and the stage of tile j is free)
         issue the wave's part of tile j + 3 into the stage of tile j
         read tile j + 1 into the other registers; multiply the rest of tile j
A tile is thus on its way for two steps of multiplying. Each wave issues one tile of the data mover in each step: half of the
stored rows of a (waves 0, 1) or of b (2, 3). In every 8th step, waves 0 and 1 bring all rows of a and b, and 2 and 3 the scales of the
group after next, on the page whose last scales were read in the step before; they share that step's wait.
Tiles past K fetch nothing and land as zeros, so that the wait counts hold in the last steps as well.

Epilogue: two passes of 64 rows of each wave (four of 32 when accumulating), from registers to a place in LDS that no other wave
uses; there a loop finishes one row after the other, which keeps the code small (512 results of a lane, unrolled, take minutes
to compile); and to memory as one tile, which drops what lies past M and N. bias, and what was in out, come the same way.
"""

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl import tdm, wmma
from fourwave.blocks.flydsl.control import loop
from fourwave.blocks.flydsl.epilogue import activate
from fourwave.blocks.flydsl.memory import keep_order, lds_read, lds_struct, lds_write, minimum, select, uniform
from fourwave.blocks.flydsl.schedule import num_tiles, output_tile
from fourwave.blocks.flydsl.tdm import Tile
from fourwave.blocks.flydsl.tiles import log2
from fourwave.ops.gemm.cdna import launcher
from fourwave.ops.gemm.gfx1250_config import (
    CODE_BYTES,
    CODE_GAP,
    CONFIG,
    LDS,
    NUM_PAGES,
    PAGE,
    SCALE_BYTES,
    SCALE_GAP,
    STAGE,
    TILES_PER_PAGE,
)

WAVES = 4
TILE = CONFIG.tile_m  # rows of a and columns of b, alike
HALF = TILE // 2  # of a wave
FRAGMENTS = HALF // wmma.MMA_M
CODE_PITCH, SCALE_PITCH = CODE_BYTES + CODE_GAP, SCALE_BYTES + SCALE_GAP
FIRST_PAGE = CONFIG.num_stages * STAGE
OPERAND_CODES, OPERAND_SCALES = TILE * CODE_PITCH, TILE * SCALE_PITCH  # bytes of an operand in a stage and a page
TURNED_PITCH = (
    TILE // 2 + CODE_GAP
)  # of the 128 rows of an operand in which k is not contiguous; scales have no gaps then
STEPS = 2  # tiles per iteration: registers trade places without copies. Divides TILES_PER_PAGE
PASS_ROWS = HALF // 2
GAP = 16  # bytes behind each row in LDS of the epilogue
RUN = HALF // wmma.WAVE  # columns of a lane in the epilogue: a row for each wave
ROWS_AT_ONCE = 4


def group_of(tile):
    """Number of the group of a tile of K; shifts, since signed division takes five times as many instructions."""
    return tile >> log2(TILES_PER_PAGE)


def in_group(tile):
    return tile & (TILES_PER_PAGE - 1)


def operand(turned, first_row, which, lane):
    """Reads the wave's fragments of a (which 0) or b (1)."""
    codes_at, scales_at = which * OPERAND_CODES, which * OPERAND_SCALES
    if turned:
        return wmma.TurnedOperand(first_row, FRAGMENTS, codes_at, TURNED_PITCH, scales_at, TILE, lane)
    return wmma.Operand(first_row, FRAGMENTS, codes_at, CODE_PITCH, scales_at, SCALE_PITCH, lane)


def build(spec, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    turned_a, turned_b = spec.problem.layout == "NT", spec.problem.layout != "TN"
    storage = lds_struct({"all": LDS})

    @flyc.kernel(known_block_size=[WAVES * wmma.WAVE, 1, 1])
    def gemm_gfx1250(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % wmma.WAVE
        wave = uniform(thread // wmma.WAVE)
        wave_m, wave_n = wave // 2, wave % 2
        tiles_m, tiles_n = num_tiles(M, TILE), num_tiles(N, TILE)
        m_tile, n_tile = output_tile(fx.Int32(fx.block_idx.x), tiles_m, tiles_n, CONFIG.group_m)
        # Divisions of uniform values end in vector registers; descriptors are scalar.
        m0, n0 = uniform(m_tile) * TILE, uniform(n_tile) * TILE

        lds = fx.SharedAllocator().allocate(storage).peek().all.ptr
        bring = Bring(arguments, (turned_a, turned_b), m0, n0, wave, tdm.lds_base(lds))
        operand_a = operand(turned_a, wave_m * HALF, 0, lane)
        operand_b = operand(turned_b, wave_n * HALF, 1, lane)

        def read(tile, stage):
            """Codes and scales of a tile. All Vectors."""
            codes = stage * STAGE
            page, number = FIRST_PAGE + (group_of(tile) & 1) * PAGE, in_group(tile)
            return (
                operand_a.codes(lds, codes) + operand_b.codes(lds, codes),
                operand_a.scales(lds, page, number) + operand_b.scales(lds, page, number),
            )

        def multiply(codes, scales, acc, rows):
            pairs = FRAGMENTS // 2
            a, b = codes[:FRAGMENTS], codes[FRAGMENTS:]
            return wmma.multiply(a, b, acc, scales[:pairs], scales[pairs:], rows)

        # Prologue. Of each wave: one part of the scales of groups 0 and 1; its parts of tiles 0, 1, 2.
        bring.first_scales().load()
        for stage in fx.range_constexpr(CONFIG.num_stages):
            bring.codes(fx.Int32(stage), fx.Int32(stage)).load()
        # Of those 4, the first 2: all scales and tile 0. Tiles 1 and 2 may stay in flight.
        tdm.wait_tiles(in_flight=2)
        tdm.arrive()
        tdm.depart()
        keep_order()
        codes, scales = read(fx.Int32(0), fx.Int32(0))

        # Main loop. State: stage of tile j, its codes and scales, the accumulators.
        num_codes, num_scales = len(codes), len(scales)
        state = [fx.Int32(0)] + codes + scales + wmma.zero(FRAGMENTS * FRAGMENTS)
        iterations = num_tiles(K, STEPS * CONFIG.tile_k)
        for step, state in range(fx.Int32(0), iterations, fx.Int32(1), init=state, unroll=1):
            stage = fx.Int32(state[0])
            values = [fx.Vector(value) for value in state[1:]]
            codes = values[:num_codes]
            scales = values[num_codes : num_codes + num_scales]
            acc = values[num_codes + num_scales :]
            for part in fx.range_constexpr(STEPS):
                tile = fx.Int32(step) * STEPS + part
                next_stage = select(stage == CONFIG.num_stages - 1, 0, stage + 1)
                tdm.wait_lds()
                # Issued so far: tiles up to j + 2, and scales in place of parts of some, one of each wave in each step. In
                # order; so all but the last is there: tile j + 1, and what came in the step before last or earlier.
                tdm.wait_tiles(in_flight=1)
                tdm.arrive()
                keep_order()
                acc = multiply(codes, scales, acc, range(FRAGMENTS // 4))
                keep_order()
                tdm.depart()
                keep_order()
                brought = bring.codes(tile + CONFIG.num_stages, stage)
                # Scales of group g are last read in step 8 * g + 6. Group g + 2 takes their page in step 8 * g + 7, the last
                # of an iteration, and is first read in step 8 * g + 15.
                if fx.const_expr(part == STEPS - 1):
                    turn = in_group(tile) == TILES_PER_PAGE - 1
                    brought = bring.eighth(group_of(tile), stage).otherwise(turn, brought)
                brought.load()
                keep_order()
                next_codes, next_scales = read(tile + 1, next_stage)
                acc = multiply(codes, scales, acc, range(FRAGMENTS // 4, FRAGMENTS))
                keep_order()
                codes, scales, stage = next_codes, next_scales, next_stage
            results = yield [stage] + codes + scales + acc

        # Drain: what is left are tiles past K and the reads of one. LDS is then the epilogue's.
        tdm.wait_lds()
        tdm.wait_tiles(in_flight=0)
        tdm.arrive()
        tdm.depart()
        keep_order()
        acc = [fx.Vector(value) for value in results[1 + num_codes + num_scales :]]
        store(acc, epi, arguments, lds, m0 + wave_m * HALF, n0 + wave_n * HALF, wave, lane)

    return launcher(gemm_gfx1250, CONFIG, epi, threads=WAVES * wmma.WAVE)


class Bring:
    """What one wave brings to LDS."""

    def __init__(self, arguments, turned, m0, n0, wave, lds):
        is_b, second = wave >= 2, wave % 2 == 1

        def strips(which, first, size):
            """Of the codes and of the scales of a (which 0) or b (1)."""
            name, K = "ab"[which], arguments.K
            tensors = getattr(arguments, name), getattr(arguments, f"{name}_scale")
            places = lds + which * OPERAND_CODES, lds + FIRST_PAGE + which * OPERAND_SCALES
            make = _Strip.turned if turned[which] else _Strip.of
            return make(tensors, first, size, K, places)

        a, b = strips(0, m0, arguments.M), strips(1, n0, arguments.N)
        self._scales = b[1].otherwise(second, a[1])
        self._first_group = select(is_b, 1, 0)
        self._half = b[0].otherwise(is_b, a[0]).half(second)
        # Chosen once, so that the loop has scalars to add up, and no lane masks.
        self._eighth = self._scales.otherwise(is_b, b[0].otherwise(second, a[0]))

    def first_scales(self):
        """Group 0 by waves 0 and 1, group 1 by 2 and 3."""
        group = self._first_group
        return self._scales.tile(group * self._scales.per_group, 0, group)

    def codes(self, tile, stage):
        """The wave's half of the rows of a or b."""
        return self._half.tile(tile * self._half.per_tile, stage, 0)

    def eighth(self, group, stage):
        """In the last step of a group: all rows of the tile that the step brings, or scales of the group after next."""
        strip = self._eighth
        return strip.tile(strip.first_at + group * strip.per_group, stage, group & 1)


_LONG = ("start", "stride", "along")
_SHORT = (
    "rows", "columns", "row_unit", "column_unit", "lds", "pitch", "tile_rows", "tile_columns", "layout", "per_stage",
    "per_page", "per_tile", "first_at", "per_group",
)  # fmt: skip


class _Strip:
    """An operand's codes or scales, from which tiles are taken along K.

    start         Int64 address; stride, along: Int64, bytes to the next row and to the next place along K
    rows, columns how many there are from `start` on; row_unit, column_unit: how many of them a place along K is, 0 or 1
    lds, pitch    address in LDS of the first row in stage or page 0, and bytes to the next
    tile_rows, tile_columns, layout    of a tile, and of that in LDS (tdm.layout)
    per_stage, per_page   bytes in LDS from one stage or page to the next
    per_tile, per_group, first_at     places along K of a tile, of 8, and of what is brought in step 7
    """

    def __init__(self, fields):
        for name in _LONG:
            setattr(self, name, fx.Int64(fields[name]))
        for name in _SHORT:
            setattr(self, name, fx.Int32(fields[name]))

    @staticmethod
    def of(tensors, first, size, K, places):
        """k is contiguous: a row for each row of op(a), or column of op(b), from `first` on; places along K are bytes."""
        return _codes_and_scales(
            tensors, places, lambda stride: fx.Int64(first) * stride, lambda stride: 1,
            {"rows": size - first, "row_unit": 0, "column_unit": 1, "tile_rows": TILE},
            ({"columns": K >> 1, "pitch": CODE_PITCH}, {"columns": (K + 31) >> 5, "pitch": SCALE_PITCH}),
            (CODE_BYTES, SCALE_BYTES), (CODE_GAP, SCALE_GAP), ({}, {}),
        )  # fmt: skip

    @staticmethod
    def turned(tensors, first, size, K, places):
        """A row for each k, or 32 of them; places along K are rows."""
        left = size - first
        return _codes_and_scales(
            tensors, places, None, lambda stride: stride,
            {"row_unit": 1, "column_unit": 0},
            (
                {"rows": K, "columns": left >> 1, "pitch": TURNED_PITCH, "tile_rows": CONFIG.tile_k, "offset": first >> 1},
                {"rows": (K + 31) >> 5, "columns": left, "pitch": TILE, "tile_rows": SCALE_BYTES, "offset": first},
            ),
            (TILE // 2, TILE), (CODE_GAP, 0), ({"per_tile": CONFIG.tile_k}, {"per_tile": wmma.BLOCKS}),
        )  # fmt: skip

    def otherwise(self, condition, other):
        """This one where condition (uniform) holds, else other."""
        return _Strip({n: condition.select(getattr(self, n), getattr(other, n)) for n in _LONG + _SHORT})

    def half(self, second):
        """The first half of its tiles' rows, or the second."""
        fields = {name: getattr(self, name) for name in _LONG + _SHORT}
        fields["tile_rows"] = self.tile_rows >> 1
        skipped = select(second, fields["tile_rows"], 0)
        fields["start"] = self.start + self.stride * fx.Int64(skipped)
        fields["rows"] = self.rows - skipped
        fields["lds"] = self.lds + skipped * self.pitch
        return _Strip(fields)

    def tile(self, at, stage, page):
        """at (Int32): place along K."""
        lds = self.lds + stage * self.per_stage + page * self.per_page
        left = (
            tdm.not_negative(self.rows - at * self.row_unit),
            tdm.not_negative(self.columns - at * self.column_unit),
        )
        start = self.start + fx.Int64(at) * self.along
        return Tile.of(start, lds, (self.tile_rows, self.tile_columns), left, self.stride, self.layout)


def _codes_and_scales(tensors, places, offset, along, both, each, columns, gaps, units):
    """Two strips. offset, along: functions of the stride in bytes."""
    made = []
    for i in range(2):
        fields = {**both, **each[i]}
        stride = fx.Int64(fx.get_scalar(tensors[i].stride[0]))
        per_tile = units[i].get("per_tile", columns[i] if i == 0 else wmma.BLOCKS)
        # Step 7 brings codes of tile 10, and the scales of group 2.
        first = (TILES_PER_PAGE - 1 + CONFIG.num_stages) if i == 0 else NUM_PAGES * TILES_PER_PAGE
        fields |= {
            "start": tdm.address(tensors[i]) + (fx.Int64(fields["offset"]) if offset is None else offset(stride)),
            "stride": stride, "along": along(stride), "lds": places[i], "tile_columns": columns[i],
            "layout": tdm.layout(1, columns[i], gaps[i]), "per_stage": STAGE if i == 0 else 0,
            "per_page": 0 if i == 0 else PAGE, "per_tile": per_tile, "first_at": first * per_tile,
            "per_group": TILES_PER_PAGE * per_tile,
        }  # fmt: skip
        made.append(_Strip(fields))
    return made


def store(acc, epi, arguments, lds, m0, n0, wave, lane):
    """Finish and store a wave's 128 x 128 results, from out[m0, n0] on."""
    size = epi.out_dtype.width // 8
    rows = PASS_ROWS // 2 if epi.accumulate else PASS_ROWS
    pitch, out_pitch = HALF * 4 + GAP, HALF * size + GAP
    # The wave's places in LDS: its results, over which out is written; what was in out; the bias.
    results = wave * (rows * pitch)
    old = WAVES * rows * pitch + wave * (rows * out_pitch)
    line = LDS - WAVES * HALF * 4 + wave * (HALF * 4)
    base = tdm.lds_base(lds)
    columns_left = tdm.not_negative(arguments.N - n0)
    stride = fx.Int64(fx.get_scalar(arguments.out.stride[0]))
    column = lane * RUN

    bias = None
    if epi.bias_dtype is not None:
        bias_size = epi.bias_dtype.width // 8
        start = tdm.address(arguments.bias) + fx.Int64(n0) * bias_size
        left = (fx.Int32(1), columns_left)
        Tile.of(start, base + line, (1, HALF), left, fx.Int64(HALF), tdm.layout(bias_size)).load()
        tdm.wait_tiles(in_flight=0)
        bias = lds_read(lds, line + column * bias_size, RUN, epi.bias_dtype).to(fx.Float32)

    def finish(step, state):
        """Rows ROWS_AT_ONCE * step on. 16-bit rows of out lie where results of rows up to theirs were."""
        numbers = [step * ROWS_AT_ONCE + e for e in range(ROWS_AT_ONCE)]
        for row, values in [
            (row, lds_read(lds, results + row * pitch + column * 4, RUN, fx.Float32)) for row in numbers
        ]:
            z = [values[e] * arguments.alpha for e in range(RUN)]
            if bias is not None:
                z = [x + bias[e] for e, x in enumerate(z)]
            value = fx.Vector.from_elements([activate(x, epi.activation) for x in z], fx.Float32)
            if epi.accumulate:
                value = value + lds_read(lds, old + row * out_pitch + column * size, RUN, epi.out_dtype).to(fx.Float32)
            lds_write(lds, results + row * out_pitch + column * size, value.to(epi.out_dtype), RUN * size)
        return state

    for part in range(HALF // rows):
        row0 = m0 + part * rows
        start = tdm.address(arguments.out) + (fx.Int64(row0) * stride + fx.Int64(n0)) * size
        rows_left = tdm.not_negative(arguments.M - row0)
        if part > 0:
            tdm.wait_tiles(in_flight=0)  # the pass before has left LDS
            keep_order()
        if epi.accumulate:
            layout = tdm.layout(size, HALF * size, GAP)
            Tile.of(start, base + old, (rows, HALF), (rows_left, columns_left), stride, layout).load()
        for i in range(rows // wmma.MMA_M):
            at = results + (i * wmma.MMA_M + lane % wmma.MMA_M) * pitch
            at = at + (lane // wmma.MMA_M) * (wmma.ACC_PER_LANE * 4)
            for j in range(FRAGMENTS):
                values = acc[(part * (rows // wmma.MMA_M) + i) * FRAGMENTS + j]
                for half in range(2):
                    four = values.shuffle(values, list(range(4 * half, 4 * half + 4)))
                    lds_write(lds, at + j * wmma.MMA_N * 4 + half * 16, four)
        keep_order()
        if epi.accumulate:
            tdm.wait_tiles(in_flight=0)
            keep_order()
        loop(rows // ROWS_AT_ONCE, [], finish)
        tdm.wait_lds()
        # Rows with their gap, which lies past the tensor's columns.
        left = (rows_left, minimum(columns_left, fx.Int32(HALF)))
        Tile.of(start, base + results, (rows, HALF + GAP // size), left, stride, tdm.layout(size)).store()
