"""z = alpha * a_scale * b_scale * acc + bias, out = act(z) (+ out), in float32; z, where it is saved, and out are each rounded
once (ties to even) when they are stored.

The scales here are those that do not change along K: of a whole operand ("tensor"), or one for each row of out (a) or
column (b) ("row").
"""

from dataclasses import dataclass

from flydsl import expr as fx

from fourwave.blocks.flydsl.memory import OUT_OF_RANGE, Buffer, keep_order, minimum, select
from fourwave.blocks.flydsl.tiles import MMA_M, MMA_N


@dataclass(frozen=True)
class Epilogue:
    """What happens to the accumulator; dtypes are FlyDSL element types."""

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
    vectorised: bool = True  # rows of out are 16-byte aligned and N % 8 == 0: whole chunks are stored or none


def _sigmoid_times(x, y):
    """x * sigmoid(y). exp overflows to infinity for very negative y, which gives the right limit, 0."""
    return x / (fx.exp(-y) + 1.0)


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


def store_tile(acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane):
    """Finish and store one wave's accumulators. arguments: see cdna.launcher.

    Lane l holds, of result (i, j), one row of the output and four columns (mma.py); the results of one group of N
    fragments together give it a run of neighbouring columns (tiles.OperandTile.run_element).
    """
    M, N = arguments.M, arguments.N
    used_rows, used_columns = minimum(M - m0, fx.Int32(geo.tile_m)), N - n0
    out = Matrix(arguments.out, epi.out_dtype, m0, n0, used_rows, used_columns)
    bias = column_scale = saved = None
    if epi.preactivation_dtype is not None:
        saved = Matrix(arguments.preactivation, epi.preactivation_dtype, m0, n0, used_rows, used_columns)
    if epi.bias_dtype is not None:
        bias = Line(arguments.bias, epi.bias_dtype, n0, used_columns)
    if epi.b_scaling == "row":
        column_scale = Line(arguments.b_scale, fx.Float32, n0, used_columns)

    group, run = geo.b.group, geo.b.run
    width = min(run, 16 // out.size) if epi.vectorised else 1  # elements per store
    rows = [wave_m * geo.wave_tile_m + geo.a.fragment_row(i, lane % MMA_M) for i in range(geo.frags_m)]
    if epi.bias_grad_dtype is not None:
        # First, since its sums take registers.
        _store_bias_grad(acc[geo.frags_m * geo.frags_n :], epi, arguments, m0, n0, used_rows, rows, wave_n, lane)
        keep_order()
    factors = _row_factors(epi, arguments, m0, used_rows, rows)
    for p in range(geo.frags_n // group):
        first_column = wave_n * geo.wave_tile_n + p * group * MMA_N + (lane // MMA_M) * run
        for c in range(0, run, width):
            column = first_column + c
            stored = column < used_columns
            addend = None if bias is None else bias.load(column, width, stored)
            scale = None if column_scale is None else column_scale.load(column, width, stored)
            for i, row in enumerate(rows):
                z = []
                for e in range(width):
                    q, r = geo.b.run_element(c + e)
                    x = acc[i * geo.frags_n + p * group + q][r] * factors[i]
                    if scale is not None:
                        x = x * scale[e]
                    if addend is not None:
                        x = x + addend[e]
                    z.append(x)
                if saved is not None:
                    saved.store(fx.Vector.from_elements(z, fx.Float32), saved.offset(row, column, stored))
                result = fx.Vector.from_elements([activate(x, epi.activation) for x in z], fx.Float32)
                offset = out.offset(row, column, stored)
                if epi.accumulate:
                    result = result + out.load(offset, width)
                out.store(result, offset)
            # One run at a time: the compiler would load and convert everything first, and have no registers for it.
            keep_order()


def _row_factors(epi, arguments, m0, used_rows, rows):
    """For each of `rows`: alpha and the scales that do not depend on the column."""
    factor = arguments.alpha
    scales = [
        scalar(tensor)
        for tensor, scaling in ((arguments.a_scale, epi.a_scaling), (arguments.b_scale, epi.b_scaling))
        if scaling == "tensor"
    ]
    if scales:
        factor = factor * (scales[0] if len(scales) == 1 else scales[0] * scales[1])
    if epi.a_scaling != "row":
        return [factor] * len(rows)
    row_scale = Line(arguments.a_scale, fx.Float32, m0, used_rows)
    return [factor * row_scale.load(row, 1, row < used_rows)[0] for row in rows]


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
