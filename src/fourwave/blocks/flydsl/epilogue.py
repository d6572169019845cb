"""out = act(alpha * acc + bias) (+ out), in float32, rounded once (ties to even) when it is stored."""

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


def store_tile(acc, epi, arguments, m0, n0, geo, wave_m, wave_n, lane):
    """Finish and store one wave's accumulators. arguments: see cdna.launcher.

    Lane l holds, of result (i, j), one row of the output and four columns (mma.py); the results of one group of N
    fragments together give it a run of neighbouring columns (tiles.OperandTile.run_element).
    """
    out, M, N = arguments.out, arguments.M, arguments.N
    size = epi.out_dtype.width // 8
    row_bytes = fx.Int64(fx.get_scalar(out.stride[0])) * size
    used_rows = minimum(M - m0, fx.Int32(geo.tile_m))
    out_buffer = Buffer(
        out,
        fx.Int64(m0) * row_bytes + fx.Int64(n0) * size,
        fx.Int64(used_rows - 1) * row_bytes + fx.Int64(N - n0) * size,
    )
    if epi.bias_dtype is not None:
        bias_size = epi.bias_dtype.width // 8
        bias_buffer = Buffer(arguments.bias, fx.Int64(n0) * bias_size, fx.Int64(N - n0) * bias_size)

    group, run = geo.b.group, geo.b.run
    width = min(run, 16 // size) if epi.vectorised else 1  # elements per store
    pitch = fx.Int32(row_bytes)
    rows = [wave_m * geo.wave_tile_m + geo.a.fragment_row(i, lane % MMA_M) for i in range(geo.frags_m)]
    for p in range(geo.frags_n // group):
        first_column = wave_n * geo.wave_tile_n + p * group * MMA_N + (lane // MMA_M) * run
        for c in range(0, run, width):
            column = first_column + c
            stored = column < N - n0
            addend = None
            if epi.bias_dtype is not None:
                offset = select(stored, column * bias_size, OUT_OF_RANGE)
                addend = bias_buffer.load(offset, width, epi.bias_dtype).to(fx.Float32)
            for i, row in enumerate(rows):
                offset = select(stored, row * pitch + column * size, OUT_OF_RANGE)
                values = []
                for e in range(width):
                    q, r = geo.b.run_element(c + e)
                    x = acc[i * geo.frags_n + p * group + q][r] * arguments.alpha
                    if addend is not None:
                        x = x + addend[e]
                    values.append(activate(x, epi.activation))
                result = fx.Vector.from_elements(values, fx.Float32)
                if epi.accumulate:
                    result = result + out_buffer.load(offset, width, epi.out_dtype).to(fx.Float32)
                out_buffer.store(result.to(epi.out_dtype), offset)
            # One run at a time: the compiler would load and convert everything first, and have no registers for it.
            keep_order()
