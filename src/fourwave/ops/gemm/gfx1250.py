"""MX GEMM for gfx1250: out[M, N] = act(alpha * op(a) @ op(b) + bias) (+ out).

a        TN, NN: [M, K]; NT: [K, M]   codes in rows that are 16-byte aligned: packed e2m1, two in a byte, element 0 in the low half,
                                      or float8_e4m3fn or float8_e5m2. TN, NN with packed b: also bfloat16, without scales
b        TN: [N, K]; NN, NT: [K, N]   packed e2m1, float8_e4m3fn or float8_e5m2, in any mix with a
a_scale, b_scale   [M or N, ceil(K / 32)] or, NT and b of NN, [ceil(K / 32), M or N]; float8_e8m0fnu, rows 16-byte aligned
out      [M, N] float32, bfloat16 or float16, inner stride 1; accumulation and epilogue in float32. Or quantized (blocks/flydsl/lds_codes.py)
         swiglu: [M, N / 2], silu of the first half of the columns times the second
bias     [N]; preactivation [M, N], written before the activation; bias_grad [M], NT, the sums of op(a) over K; all optional

Four waves of 32 lanes compute one tile, of 256 x 256 each a quarter of 128 x 128, and hold it in registers for all of K. Where
M is small, each wave has all rows and a quarter of the columns (gfx1250_config.py lists the tiles).
Everything goes through LDS, by the tensor data mover (blocks/flydsl/tdm.py), which fills what lies past M, N and K with zeros.
No allocation depends on K.

LDS      three stages of codes: 128 k (a tile of K) of the rows of a and b;
         two pages of scales, of the same rows, for the 1024 k of 8 tiles (a group)
         Where k is not contiguous, 128 rows of codes and 32 of scales in their place; codes are turned as they are
         read (ds_load_tr4_b64, ds_load_tr8_b64), scales are read byte by byte.
         Of 256 x 256 packed codes: 137728 bytes.

Schedule, tile j in stage j % 3 and registers, its scales on page (j // 8) % 2:
         wait until this wave's LDS reads of tile j are back, and its part of tile j + 1 has landed; arrive
         multiply a quarter of tile j
         depart: in every wave (tile j + 1 is complete, and the stage of tile j is free)
         issue the wave's part of tile j + 3 into the stage of tile j
         read tile j + 1 into the other registers; multiply the rest of tile j
A tile is thus on its way for two steps of multiplying. Each wave issues one tile of the data mover in each step: half of the
stored rows of a (waves 0, 1) or of b (2, 3). In every 8th step, waves 0 and 1 bring all rows of a and b, and 2 and 3 the scales of
a and b (of b, a half each, where a has none) of the group after next, on the page whose last scales were read in the step
before; they share that step's wait.
Tiles past K fetch nothing and land as zeros, so that the wait counts hold in the last steps as well.

Bfloat16 a: b is dequantized in registers, exactly, fragment by fragment as it is multiplied.

Swiglu: half of the columns of a tile of b are of each half of b, in one tile of three dimensions. Each wave has as many of one as of
the other, and so both factors of its part of out.

Epilogue: passes over rows of each wave, from registers to a place in LDS that no other wave
uses; there a loop finishes one row after the other, which keeps the code small (512 results of a lane, unrolled, take minutes
to compile); and to memory as one tile, which drops what lies past M and N. bias, and what was in out, come the same way.
"""

import functools

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl import tdm, wmma
from fourwave.blocks.flydsl.control import loop
from fourwave.blocks.flydsl.epilogue import activate, swiglu
from fourwave.blocks.flydsl.lds_codes import LdsCodes
from fourwave.blocks.flydsl.memory import keep_order, lds_read, lds_struct, lds_write, minimum, select, uniform
from fourwave.blocks.flydsl.schedule import num_tiles, output_tile
from fourwave.blocks.flydsl.tdm import Tile
from fourwave.blocks.flydsl.tiles import log2
from fourwave.blocks.flydsl.wmma_tiles import BLOCKS, CODE_GAP, GAP_EVERY, TILE_K, TILES_PER_PAGE, with_gaps
from fourwave.ops.gemm.cdna import launcher
from fourwave.ops.gemm.gfx1250_config import LINE_BYTES, NUM_PAGES, ROW_GAP, STAGES, geometry

STEPS = 2  # tiles per iteration: registers trade places without copies. Divides TILES_PER_PAGE
ROWS_AT_ONCE = 4  # of the epilogue's loop


def group_of(tile):
    """Number of the group of a tile of K; shifts, since signed division takes five times as many instructions."""
    return tile >> log2(TILES_PER_PAGE)


def in_group(tile):
    return tile & (TILES_PER_PAGE - 1)


def build(spec, epi):
    """The launcher of one specialisation (amd.Specialisation), see cdna.launcher."""
    problem, config = spec.problem, spec.config
    geo = geometry(problem, config)
    storage = lds_struct({"all": geo.lds})
    dequantized = not geo.a.scaled

    @flyc.kernel(known_block_size=[geo.waves * wmma.WAVE, 1, 1])
    def gemm_gfx1250(arguments):
        M, N, K = arguments.M, arguments.N, arguments.K
        thread = fx.Int32(fx.thread_idx.x)
        lane = thread % wmma.WAVE
        wave = uniform(thread // wmma.WAVE)
        wave_m, wave_n = wave // config.waves_n, wave % config.waves_n
        tiles_m, tiles_n = num_tiles(M, config.tile_m), num_tiles(N, config.tile_n)
        m_tile, n_tile = output_tile(fx.Int32(fx.block_idx.x), tiles_m, tiles_n, config.group_m)
        # Divisions of uniform values end in vector registers; descriptors are scalar.
        m0, n0 = uniform(m_tile) * config.tile_m, uniform(n_tile) * config.tile_n

        lds = fx.SharedAllocator().allocate(storage).peek().all.ptr
        bring = Bring(arguments, geo, m0, n0, wave, tdm.lds_base(lds))
        operand_a = operand(geo, 0, wave_m * geo.a.wave_step, lane, dequantized)
        operand_b = operand(geo, 1, wave_n * geo.b.wave_step, lane, dequantized)
        mma = products(problem, geo, lane)

        def read(tile, stage):
            """Codes and scales of a tile. All Vectors."""
            codes = stage * geo.stage
            page, number = geo.first_page + (group_of(tile) & 1) * geo.page, in_group(tile)
            return (
                operand_a.codes(lds, codes) + operand_b.codes(lds, codes),
                operand_a.scales(lds, page, number) + operand_b.scales(lds, page, number),
            )

        scales_of_a = 0 if dequantized else geo.a.fragments // 2

        def multiply(codes, scales, acc, cells):
            a, b = codes[: operand_a.values], codes[operand_a.values :]
            return mma.multiply(a, b, acc, scales[:scales_of_a], scales[scales_of_a:], cells)

        # Prologue. Of each wave: one part of the scales of groups 0 and 1; its parts of tiles 0, 1, 2.
        bring.first_scales().load()
        for stage in fx.range_constexpr(STAGES):
            bring.codes(fx.Int32(stage), fx.Int32(stage)).load()
        # Of those 4, the first 2: all scales and tile 0. Tiles 1 and 2 may stay in flight.
        tdm.wait_tiles(in_flight=2)
        tdm.arrive()
        tdm.depart()
        keep_order()
        codes, scales = read(fx.Int32(0), fx.Int32(0))

        # Main loop. State: stage of tile j, its codes and scales, the accumulators.
        num_codes, num_scales = len(codes), len(scales)
        state = [fx.Int32(0)] + codes + scales + wmma.zero(mma.results)
        iterations = num_tiles(K, STEPS * TILE_K)
        for step, state in range(fx.Int32(0), iterations, fx.Int32(1), init=state, unroll=1):
            stage = fx.Int32(state[0])
            values = [fx.Vector(value) for value in state[1:]]
            codes = values[:num_codes]
            scales = values[num_codes : num_codes + num_scales]
            acc = values[num_codes + num_scales :]
            for part in fx.range_constexpr(STEPS):
                tile = fx.Int32(step) * STEPS + part
                next_stage = select(stage == STAGES - 1, 0, stage + 1)
                # The last reads are of scales, whose page nothing overwrites in an even step: one might stay out then. And where
                # scales are put together from bytes, or shifted (turned operands, bfloat16), that has waited for them. But the
                # order of reads is the compiler's, so no count other than 0 is safe.
                tdm.wait_lds()
                # Issued so far: tiles up to j + 2, and scales in place of parts of some, one of each wave in each step. In
                # order; so all but the last is there: tile j + 1, and what came in the step before last or earlier.
                tdm.wait_tiles(in_flight=1)
                tdm.arrive()
                keep_order()
                acc = multiply(codes, scales, acc, mma.first)
                keep_order()
                tdm.depart()
                keep_order()
                brought = bring.codes(tile + STAGES, stage)
                # Scales of group g are last read in step 8 * g + 6. Group g + 2 takes their page in step 8 * g + 7, the last
                # of an iteration, and is first read in step 8 * g + 15.
                if fx.const_expr(part == STEPS - 1):
                    turn = in_group(tile) == TILES_PER_PAGE - 1
                    brought = bring.eighth(group_of(tile), stage).otherwise(turn, brought)
                brought.load()
                keep_order()
                next_codes, next_scales = read(tile + 1, next_stage)
                acc = multiply(codes, scales, acc, mma.rest)
                keep_order()
                codes, scales, stage = next_codes, next_scales, next_stage
            results = yield [stage] + codes + scales + acc

        # Drain: what is left are tiles past K and the reads of one. LDS is then the epilogue's. (The last read is of scales, and
        # no epilogue of today's reaches them; that is not relied on.)
        tdm.wait_lds()
        tdm.wait_tiles(in_flight=0)
        tdm.arrive()
        tdm.depart()
        keep_order()
        acc = [fx.Vector(value) for value in results[1 + num_codes + num_scales :]]
        m0, n0 = m0 + wave_m * geo.a.wave_step, (n0 >> log2(geo.parts)) + wave_n * geo.b.wave_step
        if fx.const_expr(epi.bias_grad_dtype is not None):
            store_sums(acc[-geo.a.fragments :], epi, arguments, geo, lds, m0, n0, wave, lane)
        store(acc, epi, arguments, geo, lds, m0, n0, wave, lane)

    return launcher(gemm_gfx1250, config, epi, threads=geo.waves * wmma.WAVE)


def operand(geo, which, first_row, lane, dequantized):
    """Reads the wave's fragments of a (which 0) or b (1)."""
    side = (geo.a, geo.b)[which]
    make = wmma.TurnedOperand if side.turned else wmma.Operand
    return make(side, first_row, which * geo.a.code_bytes, which * geo.a.scale_bytes, lane, dequantized)


def products(problem, geo, lane):
    """Multiplies the wave's fragments."""
    if not geo.a.scaled:
        return wmma.Dequantized(geo.a.fragments, geo.b.fragments, lane)
    a, b = (str(dtype).removeprefix("torch.") for dtype in (problem.a_dtype, problem.b_dtype))
    return wmma.Scaled(a, b, geo.a.fragments, geo.b.fragments, row_sums=problem.bias_grad_dtype is not None)


class Bring:
    """What one wave brings to LDS."""

    def __init__(self, arguments, geo, m0, n0, wave, lds):
        is_b, second = wave >= 2, wave % 2 == 1
        a = _Strip.codes(geo, 0, arguments.a, m0, arguments.M, arguments.K, lds)
        b = _Strip.codes(geo, 1, arguments.b, n0, arguments.N, arguments.K, lds)
        self._half = b.half(second).otherwise(is_b, a.half(second))
        b_scales = _Strip.scales(geo, 1, arguments.b_scale, n0, arguments.N, arguments.K, lds)
        if geo.a.scaled:
            a_scales = _Strip.scales(geo, 0, arguments.a_scale, m0, arguments.M, arguments.K, lds)
            self._scales = b_scales.otherwise(second, a_scales)
        else:
            self._scales = b_scales.half(second)
        self._first_group = select(is_b, 1, 0)
        # Chosen once, so that the loop has scalars to add up, and no lane masks.
        self._eighth = self._scales.otherwise(is_b, b.otherwise(second, a))

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


class _Strip:
    """An operand's codes or scales, from which tiles are taken along K. An element: a byte, or a bfloat16.

    start         Int64 address; along: Int64, bytes to the next place along K
    left, tile, unit  for each dimension, the innermost first: how many elements there are from `start` on, how many a tile has,
                  and how many a place along K is, 0 or 1
    stride        Int64, elements from one to the next, of each dimension but the innermost
    lds, half_lds address in LDS of the first row in stage or page 0, and bytes that half of a tile takes
    layout        of a tile in LDS (tdm.layout)
    per_stage, per_page   bytes in LDS from one stage or page to the next
    per_tile, per_group, first_at     places along K of a tile, of 8, and of what is brought in step 7

    Two dimensions: rows of columns. Where b comes in halves (wmma_tiles.Side) there are three, of which tiles of a have two.
    """

    _LONG = ("start", "along")
    _SHORT = ("lds", "half_lds", "layout", "per_stage", "per_page", "per_tile", "first_at", "per_group")

    def __init__(self, fields, strides, dimensions, outermost=None):
        """dimensions: [left, tile, unit] of each. outermost: number of the last that tiles have, and bytes from one to the next."""
        self._fields = {name: fx.Int64(fields[name]) for name in self._LONG}
        self._fields |= {name: fx.Int32(fields[name]) for name in self._SHORT}
        self.strides = [fx.Int64(stride) for stride in strides]
        self.dimensions = [[fx.Int32(value) for value in each] for each in dimensions]
        self.outermost = outermost
        for name, value in self._fields.items():
            setattr(self, name, value)

    @staticmethod
    def codes(geo, which, tensor, first, size, K, lds):
        """Of a (which 0) or b (1), from row of op(a) or column of op(b) `first` on, of `size`."""
        side = (geo.a, geo.b)[which]
        packed = 1 if side.bits == 4 else 0  # two codes share a byte
        return _Strip._of(
            geo, side, tensor, first, size, K, packed, max(1, side.bits // 8), (side.stored_rows, side.row_bytes), CODE_GAP, TILE_K,
            # Step 7 brings codes of tile 10.
            TILES_PER_PAGE - 1 + STAGES,
            {"lds": lds + which * geo.a.code_bytes, "per_stage": geo.stage, "per_page": 0},
        )  # fmt: skip

    @staticmethod
    def scales(geo, which, tensor, first, size, K, lds):
        side = (geo.a, geo.b)[which]
        return _Strip._of(
            geo, side, tensor, first, size, (K + 31) >> 5, 0, 1, (side.scale_rows, side.scale_row_bytes), side.scale_gap, BLOCKS,
            # Step 7 brings scales of group 2.
            NUM_PAGES * TILES_PER_PAGE,
            {"lds": lds + geo.first_page + which * geo.a.scale_bytes, "per_stage": 0, "per_page": geo.page},
        )  # fmt: skip

    @staticmethod
    def _of(geo, side, tensor, first, size, length, packed, element, tile, gap, unit, first_tile, places):
        """first: row of op(a) or column of op(b), of `size`; length: along K; element: bytes of one; tile: rows and bytes of a row;
        unit: along K of a tile; first_tile: its number in step 7."""
        stride = fx.Int64(fx.get_scalar(tensor.stride[0]))
        pitch = stride * element
        rows, row_bytes = tile
        if side.halves:
            first, size = first >> 1, size >> 1
        if side.turned:
            start, along, per_tile = fx.Int64(first >> packed) * element, pitch, unit
            columns, lines = [(size - first) >> packed, row_bytes // element, 0], [length, rows, 1]
        else:
            start, along, per_tile = fx.Int64(first) * pitch, element, unit >> packed
            columns, lines = [length >> packed, row_bytes // element, 1], [size - first, rows, 0]
        if side.halves and side.turned:
            columns[1] //= 2
            # Of what is stored: rows may have been padded (amd.run).
            strides = [fx.Int64(fx.get_scalar(tensor.shape[1]) >> 1), stride]
            dimensions = [columns, [2, 2, 0], lines]
        elif side.halves:
            lines[1] //= 2
            strides, dimensions = [stride, stride * fx.Int64(size)], [columns, lines, [2, 2, 0]]
        elif geo.parts > 1:
            strides, dimensions = [stride, 0], [columns, lines, [0, 0, 0]]
        else:
            strides, dimensions = [stride], [columns, lines]
        last = 2 if side.halves else 1
        return _Strip(
            {
                **places, "start": tdm.address(tensor) + start, "along": along, "half_lds": with_gaps(rows // 2 * row_bytes, gap),
                "layout": tdm.layout(element, GAP_EVERY, gap), "per_tile": per_tile, "first_at": first_tile * per_tile,
                "per_group": TILES_PER_PAGE * per_tile,
            },
            strides, dimensions, (last, fx.Int64(strides[last - 1]) * element),
        )  # fmt: skip

    def otherwise(self, condition, other):
        """This one where condition (uniform) holds, else other."""

        def choose(ours, others):
            return [condition.select(a, b) for a, b in zip(ours, others, strict=True)]

        fields = dict(zip(self._fields, choose(self._fields.values(), other._fields.values()), strict=True))
        dimensions = [choose(*both) for both in zip(self.dimensions, other.dimensions, strict=True)]
        return _Strip(fields, choose(self.strides, other.strides), dimensions)

    def half(self, second):
        """The first half of its tiles' outermost dimension, or the second."""
        number, distance = self.outermost
        left, tile, unit = self.dimensions[number]
        tile = tile >> 1
        skipped = select(second, tile, 0)
        fields = self._fields | {
            "start": self.start + distance * fx.Int64(skipped),
            "lds": self.lds + select(second, self.half_lds, 0),
        }
        dimensions = list(self.dimensions)
        dimensions[number] = [left - skipped, tile, unit]
        return _Strip(fields, self.strides, dimensions)

    def tile(self, at, stage, page):
        """at (Int32): place along K."""
        lds = self.lds + stage * self.per_stage + page * self.per_page
        left = [tdm.not_negative(left - at * unit) for left, _, unit in self.dimensions]
        sizes = [tile for _, tile, _ in self.dimensions]
        planes = (sizes[2], left[2], self.strides[1]) if len(sizes) > 2 else None
        start = self.start + fx.Int64(at) * self.along
        return Tile.of(start, lds, (sizes[1], sizes[0]), (left[1], left[0]), self.strides[0], self.layout, planes)


def store_sums(sums, epi, arguments, geo, lds, m0, n0, wave, lane):
    """bias_grad of a wave's rows, from m0 on, by the waves that hold out's first columns. Each lane holds the sum of row
    lane % 16 of each fragment, in every element."""
    dtype = epi.bias_grad_dtype
    size = dtype.width // 8
    line = geo.lds - (geo.waves - wave) * LINE_BYTES
    start = tdm.address(arguments.bias_grad) + fx.Int64(m0) * size
    rows = geo.a.wave_rows
    left = (fx.Int32(1), select(n0 == 0, tdm.not_negative(arguments.M - m0), 0))
    tile = Tile.of(start, tdm.lds_base(lds) + line, (1, rows), left, fx.Int64(rows), tdm.layout(size))
    if epi.accumulate:
        tile.load()
        tdm.wait_tiles(in_flight=0)
    for i, value in enumerate(sums):
        at = line + (i * wmma.MMA_M + lane % wmma.MMA_M) * size
        total = fx.Vector.filled(1, value[0], fx.Float32)
        if epi.accumulate:
            total = total + lds_read(lds, at, 1, dtype).to(fx.Float32)
        lds_write(lds, at, total.to(dtype)[0], size)
    tdm.wait_lds()
    tile.store()
    if epi.bias_dtype is not None:
        tdm.wait_tiles(in_flight=0)  # bias takes the same place


def store(acc, epi, arguments, geo, lds, m0, n0, wave, lane):
    """Finish and store a wave's results, from out[m0, n0] on.

    A row in LDS has the wave's columns of out, or (swiglu) as many of each half of the product, one behind the other.
    """
    rows, parts = geo.pass_rows, geo.parts
    columns, out_columns = geo.b.wave_rows // parts, arguments.N >> log2(parts)
    size = epi.out_dtype.width // 8
    pitch, out_pitch = geo.pitch(4), geo.out_pitch
    run = columns // wmma.WAVE  # of a lane: a row for each wave
    # The wave's places in LDS: its results, over which out is written; what was in out; the preactivation; the bias.
    results = wave * (rows * pitch)
    old = geo.waves * rows * pitch + wave * (rows * out_pitch)
    line = geo.lds - (geo.waves - wave) * LINE_BYTES
    base = tdm.lds_base(lds)
    columns_left = tdm.not_negative(out_columns - n0)
    used_columns = minimum(columns_left, fx.Int32(columns))
    column = lane * run
    saved = None
    if epi.preactivation_dtype is not None:
        saved_size = epi.preactivation_dtype.width // 8
        saved_pitch = geo.pitch(saved_size)
        saved = geo.waves * rows * (pitch + out_pitch * epi.accumulate) + wave * (rows * saved_pitch)
    quantized = None
    if epi.out_scaling is not None:
        before = geo.waves * rows * (pitch + (0 if saved is None else saved_pitch))
        place = before + wave * geo.quantized_lds(rows)
        quantized = LdsCodes(epi, arguments, lds, place, rows, columns, n0, columns_left, lane)

    bias = None
    if epi.bias_dtype is not None:
        bias_size = epi.bias_dtype.width // 8
        left = (fx.Int32(1), columns_left)
        places = [part * (columns * bias_size) for part in range(parts)]
        for part, at in enumerate(places):
            start = tdm.address(arguments.bias) + fx.Int64(n0 + out_columns * part) * bias_size
            Tile.of(start, base + line + at, (1, columns), left, fx.Int64(columns), tdm.layout(bias_size)).load()
        tdm.wait_tiles(in_flight=0)
        at = line + column * bias_size
        bias = [lds_read(lds, at + place, run, epi.bias_dtype).to(fx.Float32) for place in places]

    def finish(step, state, rows_left):
        """Rows ROWS_AT_ONCE * step on. 16-bit rows of out lie where results of rows up to theirs were."""
        numbers = [step * ROWS_AT_ONCE + e for e in range(ROWS_AT_ONCE)]
        read = [
            [lds_read(lds, results + row * pitch + (part * columns + column) * 4, run, fx.Float32) for part in range(parts)]
            for row in numbers
        ]  # fmt: skip
        for row, values in zip(numbers, read, strict=True):
            z = [[each[e] * arguments.alpha for e in range(run)] for each in values]
            if bias is not None:
                z = [[x + b[e] for e, x in enumerate(each)] for each, b in zip(z, bias, strict=True)]
            if saved is not None:
                for part, each in enumerate(z):
                    at = saved + row * saved_pitch + (part * columns + column) * saved_size
                    write(at, each, epi.preactivation_dtype, saved_size)
            if parts == 2:
                value = [swiglu(gate, up) for gate, up in zip(*z, strict=True)]
            else:
                value = [activate(x, epi.activation) for x in z[0]]
            if epi.accumulate:
                addend = lds_read(lds, old + row * out_pitch + column * size, run, epi.out_dtype).to(fx.Float32)
                value = [x + addend[e] for e, x in enumerate(value)]
            if quantized is not None:
                state = quantized.row(row, value, row < rows_left, state)
                if quantized.columnwise:
                    write(results + row * pitch + column * 4, value, fx.Float32, 4)
                continue
            write(results + row * out_pitch + column * size, value, epi.out_dtype, size)
        return state

    def write(at, values, dtype, element):
        """A lane's run of one row, `values` Float32."""
        converted = fx.Vector.from_elements(values, fx.Float32).to(dtype)
        lds_write(lds, at, converted if run > 1 else converted[0], run * element)

    def place(tensor, row0, column0, element):
        """Address of tensor[row0, column0], and its stride."""
        stride = fx.Int64(fx.get_scalar(tensor.stride[0]))
        return tdm.address(tensor) + (fx.Int64(row0) * stride + fx.Int64(column0)) * element, stride

    largest = [] if epi.out_scaling != "tensor" else [fx.Int32(0)]
    for part in range(geo.a.wave_rows // rows):
        row0 = m0 + part * rows
        rows_left = tdm.not_negative(arguments.M - row0)
        if part > 0:
            # The pass before has left LDS. Its preactivation, stored last, may stay: the wait for what was in out comes before
            # its place is written.
            tdm.wait_tiles(in_flight=parts if saved is not None and epi.accumulate else 0)
            keep_order()
        if quantized is None:
            start, stride = place(arguments.out, row0, n0, size)
        if epi.accumulate:
            layout = tdm.layout(size, columns * size, ROW_GAP)
            Tile.of(start, base + old, (rows, columns), (rows_left, columns_left), stride, layout).load()
        for i in range(rows // wmma.MMA_M):
            at = results + (i * wmma.MMA_M + lane % wmma.MMA_M) * pitch
            at = at + (lane // wmma.MMA_M) * (wmma.ACC_PER_LANE * 4)
            for j in range(geo.b.fragments):
                values = acc[(part * (rows // wmma.MMA_M) + i) * geo.b.fragments + j]
                for half in range(2):
                    four = values.shuffle(values, list(range(4 * half, 4 * half + 4)))
                    lds_write(lds, at + j * wmma.MMA_N * 4 + half * 16, four)
        keep_order()
        if epi.accumulate:
            tdm.wait_tiles(in_flight=0)
            keep_order()
        largest = loop(rows // ROWS_AT_ONCE, largest, functools.partial(finish, rows_left=rows_left))
        if quantized is not None and quantized.columnwise:
            quantized.turn(results, pitch, rows_left)
        tdm.wait_lds()
        # Rows with their gap, which lies past the tensor's columns.
        left = (rows_left, used_columns)
        if quantized is not None:
            quantized.store(base, row0, rows_left)
        else:
            Tile.of(start, base + results, (rows, columns + ROW_GAP // size), left, stride, tdm.layout(size)).store()
        if saved is not None:
            tile = (rows, saved_pitch // saved_size)
            for number in range(parts):
                start, stride = place(arguments.preactivation, row0, n0 + out_columns * number, saved_size)
                at = base + saved + number * (columns * saved_size)
                Tile.of(start, at, tile, left, stride, tdm.layout(saved_size)).store()
    if quantized is not None:
        quantized.keep_amax(largest)
