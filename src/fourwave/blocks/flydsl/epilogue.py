"""z = alpha * a_scale * b_scale * acc + bias, out = act(z) (+ out), in float32; z, where it is saved, and out are each rounded
once (ties to even) when they are stored. swiglu: the columns of z are two halves, out = silu(first) * second.
Or out is quantized (convert.py) straight from float32: with one given scale, its largest magnitude kept, or in blocks of 32.

The scales here are those that do not change along K: of a whole operand ("tensor"), or one for each row of out (a) or
column (b) ("row").
"""

from dataclasses import dataclass

from flydsl import expr as fx

from fourwave.blocks.flydsl.convert import ALL_LANES, INF_BITS, NAN_BITS, BlockScale, Codes, lane_max, larger, magnitude
from fourwave.blocks.flydsl.memory import OUT_OF_RANGE, Buffer, keep_order, minimum, select
from fourwave.blocks.flydsl.tiles import MMA_M, MMA_N, WORKGROUP
from fourwave.formats.element import ElementFormat

SWIGLU = "swiglu"
BLOCK = 32  # elements that share a scale of "1x32"
RESULT_BYTES = 16  # of a 16 x 16 result, per lane
CODE_RUN = 8  # codes per store: rows of out are aligned to as many bytes


@dataclass(frozen=True)
class Epilogue:
    """What happens to the accumulator; dtypes are FlyDSL element types, 8-bit ones Uint8."""

    arch: str
    out_dtype: type
    bias_dtype: type | None = None
    activation: str | None = None
    accumulate: bool = False
    a_scaling: str | None = None
    b_scaling: str | None = None
    preactivation_dtype: type | None = None
    bias_grad_dtype: type | None = None
    out_scaling: str | None = None
    out_direction: str = "rowwise"
    out_scale_rule: str = "floor"
    code_format: ElementFormat | None = None  # of quantized output
    vectorised: bool = True  # rows of out are 16-byte aligned and N % 8 == 0: whole chunks are stored or none


def _sigmoid_times(x, y):
    """x * sigmoid(y). exp overflows to infinity for very negative y, which gives the right limit, 0."""
    return x / (fx.exp(-y) + 1.0)


def swiglu(gate, up):
    return _sigmoid_times(gate, gate) * up


def _erfc(z):
    """erfc(z) for z >= 0 with relative error below 1.2e-7.

    Source: Chebyshev fit in Press et al., Numerical Recipes, section 6.2 (erfcc).
    """
    t = 1.0 / (z * 0.5 + 1.0)
    coefficients = (
        -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
        0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
    )  # fmt: skip
    poly = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        poly = t * poly + c
    return t * fx.exp(poly - z * z)


def activate(x, activation):
    """x: Float32. The formulas are those of torch.nn.functional."""
    if activation is None:
        return x
    if activation == "relu":
        return (x < 0.0).select(fx.Float32(0.0), x)  # NaN stays NaN
    if activation == "silu":
        return _sigmoid_times(x, x)
    if activation == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) == sigmoid(2 * u), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
        return _sigmoid_times(x, x * (x * x * (2 * 0.7978845608 * 0.044715) + 2 * 0.7978845608))
    assert activation == "gelu", activation
    z = x * 0.7071067811865476
    upper = 0.5 * _erfc((z < 0.0).select(-z, z))  # 1 - Phi(|x|)
    return x * (z < 0.0).select(upper, 1.0 - upper)


class Matrix:
    """The rows m0.. of a row-major matrix that a workgroup writes, from column n0 on. Offsets are relative to both."""

    def __init__(self, tensor, dtype, m0, n0, rows, columns):
        """rows, columns: how many are left from m0, n0 on; the inner stride is 1."""
        self.dtype, self.size = dtype, dtype.width // 8
        row_bytes = fx.Int64(fx.get_scalar(tensor.stride[0])) * self.size
        self.pitch = fx.Int32(row_bytes)
        self.buffer = Buffer(
            tensor,
            fx.Int64(m0) * row_bytes + fx.Int64(n0) * self.size,
            fx.Int64(rows - 1) * row_bytes + fx.Int64(columns) * self.size,
        )

    def offset(self, row, column, stored):
        """Byte offset; where `stored` is false, one that stores nothing. Rows past the last are out of range."""
        return select(stored, row * self.pitch + column * self.size, OUT_OF_RANGE)

    def load(self, offset, width):
        return self.buffer.load(offset, width, self.dtype).to(fx.Float32)

    def store(self, values, offset):
        """Float32 values, rounded; more than 16 bytes take two stores."""
        count = values.numel
        if count * self.size > 16:
            half = count // 2
            self.store(values.shuffle(values, list(range(half))), offset)
            self.store(values.shuffle(values, list(range(half, count))), offset + half * self.size)
            return
        self.buffer.store(values.to(self.dtype), offset)


class Line:
    """Elements first.. of a contiguous vector with `count` left: bias, scales."""

    def __init__(self, tensor, dtype, first, count):
        self.dtype, self.size = dtype, dtype.width // 8
        self.buffer = Buffer(tensor, fx.Int64(first) * self.size, fx.Int64(count) * self.size)

    def load(self, index, width, wanted):
        """Float32 values; zeros where `wanted` is false or past the end."""
        offset = select(wanted, index * self.size, OUT_OF_RANGE)
        return self.buffer.load(offset, width, self.dtype).to(fx.Float32)

    def store(self, value, index, wanted):
        """One Float32 value, rounded; nothing where `wanted` is false."""
        self.buffer.store(value.to(self.dtype), select(wanted, index * self.size, OUT_OF_RANGE))


def scalar(tensor):
    """The one element of a float32 tensor, the same in all lanes."""
    return Line(tensor, fx.Float32, fx.Int32(0), fx.Int32(1)).load(fx.Int32(0), 1, fx.Boolean(True))[0]


def row_sums(epi, geo, wave_n):
    """WaveMma's row_sums: the waves that share rows each sum a part of them, for bias_grad."""
    if epi.bias_grad_dtype is None:
        return None
    return (2 if geo.waves_n > 1 and geo.frags_m % 2 == 0 else 1), wave_n


def num_results(epi, geo):
    """Accumulators of a wave, bias_grad's included."""
    sums = row_sums(epi, geo, None)
    return geo.frags_m * geo.frags_n + (0 if sums is None else geo.frags_m // sums[0])


class Partials:
    """The accumulators of one workgroup in `workspace`, as lanes have them: one result of all lanes after the other."""

    def __init__(self, workspace, number, results, thread):
        """number (Int32): of the tile and part."""
        size = results * WORKGROUP * RESULT_BYTES
        self.buffer = Buffer(workspace, fx.Int64(number) * size, fx.Int64(size))
        self.offsets = [thread * RESULT_BYTES + i * (WORKGROUP * RESULT_BYTES) for i in range(results)]

    def store(self, acc):
        for value, offset in zip(acc, self.offsets, strict=True):
            self.buffer.store(value, offset)

    def load(self, chosen):
        """A slice of the accumulators."""
        return [self.buffer.load(offset, 4, fx.Float32) for offset in self.offsets[chosen]]


def store_tile(acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane):
    """Finish and store one wave's accumulators. arguments: see cdna.launcher; n0: in columns of the product."""
    wave = _Wave(acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane)
    if epi.bias_grad_dtype is not None:
        # First, since its sums take registers.
        sums = acc[geo.frags_m * geo.frags_n :]
        _store_bias_grad(sums, epi, arguments, m0, n0, wave.used_rows, wave.rows, wave_n, lane)
        keep_order()
    if epi.out_scaling == "1x32":
        wave.store_blocks()
    else:
        wave.store()


class _Wave:
    """One wave's part of a tile.

    Lane l holds, of result (i, j), one row of the product and four columns (mma.py); the results of one group of N fragments
    together give it a run of neighbouring columns (tiles.OperandTile.run_element). With swiglu, groups with an even number
    hold columns of the first half of the product, those with an odd one the same columns of the second half.
    """

    def __init__(self, acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane):
        self.acc, self.epi, self.arguments, self.geo, self.lane, self.m0 = acc, epi, arguments, geo, lane, m0
        M, N = arguments.M, arguments.N
        self.parts = 2 if epi.activation == SWIGLU else 1
        assert geo.frags_n // geo.b.group % self.parts == 0, "config.operand_tiles chooses the groups"
        if self.parts == 2:
            n0, N = n0 >> 1, N >> 1
        # First column and number of columns from there on, of out; the second half of the product lies `half` further.
        self.n0, self.half = n0, N
        self.used_rows, self.used_columns = minimum(M - m0, fx.Int32(geo.tile_m)), N - n0
        self.group, self.run = geo.b.group, geo.b.run
        self.groups = geo.frags_n // geo.b.group // self.parts
        self.first_column = wave_n * (geo.wave_tile_n // self.parts) + (lane // MMA_M) * self.run
        self.first_row = wave_m * geo.wave_tile_m
        self.rows = [self.first_row + geo.a.fragment_row(i, lane % MMA_M) for i in range(geo.frags_m)]
        self.factors = None

        self.saved = None
        if epi.preactivation_dtype is not None:
            self.saved = Matrix(
                arguments.preactivation, epi.preactivation_dtype, m0, n0, self.used_rows, arguments.N - n0
            )
        starts = [n0 + part * self.half for part in range(self.parts)]
        self.bias = self.scale = None
        if epi.bias_dtype is not None:
            self.bias = [Line(arguments.bias, epi.bias_dtype, start, self.used_columns) for start in starts]
        if epi.b_scaling == "row":
            self.scale = [Line(arguments.b_scale, fx.Float32, start, self.used_columns) for start in starts]

    def _matrix(self, tensor, dtype):
        return Matrix(tensor, dtype, self.m0, self.n0, self.used_rows, self.used_columns)

    def _column(self, q, c):
        """Column of out, relative to the tile's first, of element c of the lane's run in group q."""
        return self.first_column + q * self.group * MMA_N + c

    def _lines(self, lines, column, width, stored):
        return None if lines is None else [line.load(column, width, stored) for line in lines]

    def _outputs(self, i, q, c, width, column, stored, bias, scale):
        """act(z) of `width` columns of row i as Float32; z is saved on the way."""
        if self.factors is None:
            self.factors = _row_factors(self.epi, self.arguments, self.m0, self.used_rows, self.rows)
        halves = []
        for part in range(self.parts):
            z = []
            for e in range(width):
                fragment, r = self.geo.b.run_element(c + e)
                at = i * self.geo.frags_n + (q * self.parts + part) * self.group + fragment
                x = self.acc[at][r]
                for factor in self.factors[i]:
                    x = x * factor
                if scale is not None:
                    x = x * scale[part][e]
                if bias is not None:
                    x = x + bias[part][e]
                z.append(x)
            if self.saved is not None:
                offset = self.saved.offset(self.rows[i], column + part * self.half, stored)
                self.saved.store(fx.Vector.from_elements(z, fx.Float32), offset)
            halves.append(z)
        if self.parts == 2:
            return [swiglu(gate, up) for gate, up in zip(*halves, strict=True)]
        return [activate(x, self.epi.activation) for x in halves[0]]

    def store(self):
        """out as it is, or as codes with one scale for all ("tensor")."""
        epi = self.epi
        out = self._matrix(self.arguments.out, epi.out_dtype)
        width = min(self.run, 16 // out.size) if epi.vectorised else 1  # elements per store
        codes = amax = None
        if epi.out_scaling == "tensor":
            codes = Codes(epi.code_format, epi.arch)
            inv_scale = BlockScale.given(scalar(self.arguments.out_scale)).inv
            amax = fx.Int32(0)
            width = min(width, CODE_RUN)
        for q in range(self.groups):
            for c in range(0, self.run, width):
                column = self._column(q, c)
                stored = column < self.used_columns
                bias, scale = (self._lines(lines, column, width, stored) for lines in (self.bias, self.scale))
                for i, row in enumerate(self.rows):
                    values = self._outputs(i, q, c, width, column, stored, bias, scale)
                    offset = out.offset(row, column, stored)
                    if codes is not None:
                        inside = stored & (row < self.used_rows)
                        bits = _largest([magnitude(value) for value in values])
                        amax = larger(amax, select(inside, bits, 0))
                        # Codes.pack's own way with NaN trips LLVM's instruction selection for gfx942.
                        scaled = [value * inv_scale for value in values]
                        numbers = [value == value for value in scaled]
                        _store_codes(out.buffer, codes, scaled, offset, nan=False, finite=numbers)
                        continue
                    result = fx.Vector.from_elements(values, fx.Float32)
                    if epi.accumulate:
                        result = result + out.load(offset, width)
                    out.store(result, offset)
                # One run at a time: the compiler would load and convert everything first, and have no registers for it.
                keep_order()
        if codes is not None:
            # Bits of non-negative floats order as integers: the maximum does not depend on the order of the waves. A NaN
            # is the largest of all.
            amax = lane_max(amax, ALL_LANES, epi.arch)
            amax = (amax > INF_BITS).select(fx.Int32(NAN_BITS), amax)
            buffer = Buffer(self.arguments.out_amax, fx.Int64(0), fx.Int64(4))
            buffer.atomic_max(amax, select(self.lane == 0, 0, OUT_OF_RANGE))

    def store_blocks(self):
        """out as codes with a scale for each 32 columns of a row, or each 32 rows of a column, or both."""
        epi, geo, lane = self.epi, self.geo, self.lane
        codes = Codes(epi.code_format, epi.arch)
        saturate = epi.out_scale_rule == "floor"
        rowwise, columnwise = (epi.out_direction in (direction, "both") for direction in ("rowwise", "columnwise"))
        width = min(self.run, CODE_RUN) if epi.vectorised else 1  # columns per store
        # Lanes 16 apart hold neighbouring runs; a block of 32 columns is `span` groups of all of them, or a run each of two.
        span = max(1, BLOCK // (MMA_N * self.group))
        row_mask = 48 if self.group <= 2 else 16
        # Neighbouring lanes hold neighbouring rows; a block of 32 rows is two fragments of 16, or four of 8 each.
        frags = max(2, geo.a.group) if columnwise else 1
        column_mask = 15 if geo.a.group <= 2 else 7
        if rowwise:
            out = self._matrix(self.arguments.out, fx.Uint8)
            first = self.n0 >> 5
            scales = Matrix(
                self.arguments.out_scale, fx.Uint8, self.m0, first, self.used_rows, ((self.half + 31) >> 5) - first
            )
        if columnwise:
            turned = self._matrix(self.arguments.out_columnwise, fx.Uint8)
            turned_scales = Matrix(
                self.arguments.out_columnwise_scale, fx.Uint8, self.m0 >> 5, self.n0, (self.used_rows + 31) >> 5,
                self.used_columns,
            )  # fmt: skip
        for q0 in range(0, self.groups, span):
            places = [(q, c) for q in range(q0, q0 + span) for c in range(0, self.run, width)]
            columns = [self._column(q, c) for q, c in places]
            stored = [column < self.used_columns for column in columns]
            for i0 in range(0, geo.frags_m, frags):
                tile = []  # [row][place][column] values
                for i in range(i0, i0 + frags):
                    line = []
                    for (q, c), column, inside in zip(places, columns, stored, strict=True):
                        bias, scale = (self._lines(lines, column, width, inside) for lines in (self.bias, self.scale))
                        line.append(self._outputs(i, q, c, width, column, inside, bias, scale))
                    tile.append(line)
                rows = self.rows[i0 : i0 + frags]
                # Magnitudes; what is outside of out counts as zero.
                bits = [
                    [
                        [select(inside & (row < self.used_rows), magnitude(value), 0) for value in values]
                        for values, inside in zip(line, stored, strict=True)
                    ]
                    for line, row in zip(tile, rows, strict=True)
                ]
                for line, each, row in zip(tile, bits, rows, strict=True) if rowwise else ():
                    amax = lane_max(_largest([b for place in each for b in place]), row_mask, epi.arch)
                    scale = BlockScale.of(amax, epi.code_format, epi.out_scale_rule)
                    for values, column, inside in zip(line, columns, stored, strict=True):
                        words = [value * scale.inv for value in values]
                        offset = out.offset(row, column, inside)
                        _store_codes(
                            out.buffer, codes, words, offset, saturate=saturate, nan=False, finite=scale.finite
                        )
                    # The lane that holds the block's first columns has them in its first place.
                    first = (lane // MMA_M) % (4 if self.group <= 2 else 2) == 0
                    offset = scales.offset(row, columns[0] >> 5, first & stored[0])
                    scales.buffer.store(_bytes([scale.byte]), offset)
                if columnwise:
                    for p, (column, inside) in enumerate(zip(columns, stored, strict=True)):
                        maxima = [
                            lane_max(_largest([each[p][e] for each in bits]), column_mask, epi.arch)
                            for e in range(width)
                        ]
                        made = [BlockScale.of(amax, epi.code_format, epi.out_scale_rule) for amax in maxima]
                        for line, row in zip(tile, rows, strict=True):
                            values = [value * scale.inv for value, scale in zip(line[p], made, strict=True)]
                            finite = [scale.finite for scale in made]
                            offset = turned.offset(row, column, inside)
                            _store_codes(
                                turned.buffer, codes, values, offset, saturate=saturate, nan=False, finite=finite
                            )
                        # rows[0] is the first of its block in the lanes that hold the first row.
                        first = (lane % MMA_M) % (column_mask + 1) == 0
                        block = rows[0] >> 5
                        wanted = first & inside & (rows[0] < self.used_rows)
                        offset = turned_scales.offset(block, column, wanted)
                        turned_scales.buffer.store(_bytes([scale.byte for scale in made]), offset)
                keep_order()


def _largest(values):
    """Of Int32."""
    result = values[0]
    for value in values[1:]:
        result = larger(result, value)
    return result


def _bytes(values):
    """1 or a multiple of 4 Int32 below 256 as a Vector to store: bytes, or words of four."""
    if len(values) == 1:
        return fx.Vector.filled(1, values[0].to(fx.Uint8), fx.Uint8)
    words = [
        values[i] | (values[i + 1] << 8) | (values[i + 2] << 16) | (values[i + 3] << 24)
        for i in range(0, len(values), 4)
    ]
    return fx.Vector.from_elements(words, fx.Int32)


def _store_codes(buffer, codes, values, offset, saturate=True, nan=True, finite=None):
    """1, 4 or 8 Float32, already divided by the scale. finite: of all, or a list with one each (Codes.pack)."""
    words = []
    for i in range(0, len(values), 4):
        four = values[i : i + 4]
        each = finite
        if isinstance(finite, list):
            each = finite[i : i + 4]
            each = codes.masks(each + each[-1:] * (4 - len(each)))
        words.append(codes.pack(four + [fx.Float32(0.0)] * (4 - len(four)), saturate=saturate, nan=nan, finite=each))
    if len(values) == 1:
        buffer.store(_bytes([words[0] & 255]), offset)
        return
    buffer.store(fx.Vector.from_elements(words, fx.Int32), offset)


def _row_factors(epi, arguments, m0, used_rows, rows):
    """For each of `rows`: the scales that do not depend on the column, and alpha, to be multiplied one after the other.

    Their product could overflow or underflow where the result does not.
    """
    scales = [
        scalar(tensor)
        for tensor, scaling in ((arguments.a_scale, epi.a_scaling), (arguments.b_scale, epi.b_scaling))
        if scaling == "tensor"
    ]
    factors = [*scales, arguments.alpha]
    if epi.a_scaling != "row":
        return [factors] * len(rows)
    row_scale = Line(arguments.a_scale, fx.Float32, m0, used_rows)
    return [[row_scale.load(row, 1, row < used_rows)[0], *factors] for row in rows]


def _store_bias_grad(sums, epi, arguments, m0, n0, used_rows, rows, wave_n, lane):
    """The sums of a's rows (mma.WaveMma.row_sums), by one wave of those that hold them, of one column of tiles."""
    line = Line(arguments.bias_grad, epi.bias_grad_dtype, m0, used_rows)
    factors = [1.0] * len(rows)
    if epi.a_scaling == "tensor":
        factors = [scalar(arguments.a_scale)] * len(rows)
    elif epi.a_scaling == "row":
        row_scale = Line(arguments.a_scale, fx.Float32, m0, used_rows)
        factors = [row_scale.load(row, 1, row < used_rows)[0] for row in rows]
    parts = len(rows) // len(sums)
    for i, total in enumerate(sums):
        row, factor = rows[i], factors[i]
        if parts > 1:
            row = select(wave_n == 0, row, rows[i + len(sums)])
            factor = (wave_n == 0).select(fx.Float32(factor), fx.Float32(factors[i + len(sums)]))
        # Every column of the result is the sum: the lanes of column 0 have it in element 0.
        wanted = (lane < MMA_M) & (n0 == 0) & (wave_n < parts) & (row < used_rows)
        value = fx.Vector.filled(1, total[0] * factor, fx.Float32)
        if epi.accumulate:
            value = value + line.load(row, 1, wanted)
        line.store(value, row, wanted)
