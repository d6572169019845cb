"""Loops and branches on run-time values that helpers outside a kernel's own body can use.

FlyDSL rewrites `for` and `if` in the function it compiles, and not in the functions that one calls.
"""

from flydsl import expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import scf as _scf
from flydsl.expr.meta import dsl_loc_tracing
from flydsl.expr.typing import as_ir_value

_NO_UNROLLING = "#llvm.loop_annotation<unroll = <count = 1 : i32, disable = true>>"


@dsl_loc_tracing
def _for(count, state):
    zero, one, stop = (as_ir_value(fx.Int32(value)) for value in (0, 1, count))
    op = _scf.ForOp(zero, stop, one, [as_ir_value(value) for value in state])
    op.attributes["loop_annotation"] = ir.Attribute.parse(_NO_UNROLLING)
    return op


@dsl_loc_tracing
def _if(condition):
    return _scf.IfOp(as_ir_value(fx.Boolean(condition)))


@dsl_loc_tracing
def _yield(values):
    _scf.YieldOp([as_ir_value(value) for value in values])


def loop(count, state, body):
    """body(i, state) for i = 0 .. count - 1 (Int32); returns the last state.

    state: a list of Int32 and Vectors; body returns one of the same types. Its operations keep their own source lines.
    """
    vectors = [isinstance(value, fx.Vector) for value in state]

    def wrapped(values):
        return [
            fx.Vector(value) if is_vector else fx.Int32(value) for value, is_vector in zip(values, vectors, strict=True)
        ]

    op = _for(count, state)
    with ir.InsertionPoint(op.body):
        _yield(body(fx.Int32(op.induction_variable), wrapped(list(op.inner_iter_args))))
    return wrapped(list(op.results))


def when(condition, body):
    """body() where condition (Boolean, uniform over the wave) holds. Its operations keep their own source lines."""
    op = _if(condition)
    with ir.InsertionPoint(op.then_block):
        body()
        _yield([])
