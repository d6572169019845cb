"""Launches the FlyDSL quantization kernels: prepares x, compiles once per specialisation, calls."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from fourwave.backends import guard
from fourwave.quantize.problem import QuantizeProblem, QuantizeTensors

if TYPE_CHECKING:
    from fourwave.quantize.cdna import AmaxSpec, QuantizeSpec
    from fourwave.quantize.mxfp4 import Mxfp4Spec

    Spec = AmaxSpec | QuantizeSpec | Mxfp4Spec

ARCHS = ("gfx942", "gfx950")
MXFP4_ARCHS = (*ARCHS, "gfx1250")
ALIGN_BYTES = 16  # of bases and rows, where global memory is accessed in chunks of 16 bytes
TILE = 128
MXFP4_TILE = (32, 256)
MAX_ROW_BYTES = 2**26  # a wave's 32 rows have 32-bit offsets
MAX_TRANSPOSED_ROWS = 2**24  # a tile's 128 columns likewise
MAX_TILES = 2**24  # workgroups of 256 threads in a grid of less than 2^32 threads

_compiled: dict[Any, Any] = {}  # (spec, target) -> FlyDSL CompiledFunction
_lock = threading.Lock()  # FlyDSL traces one function at a time


def why_unsupported(problem: QuantizeProblem, arch: str) -> str | None:
    """Why the kernels for arch cannot quantize `problem`, or None. The only rule: backends and launcher ask it."""
    packed = problem.quant_format.element == "e2m1"
    archs = MXFP4_ARCHS if packed else ARCHS
    if arch not in archs:
        return f"there are quantization kernels for {', '.join(archs)}, not for {arch}"
    if problem.fnuz and arch != "gfx942":
        return f"{arch} converts to OCP's codes only; fnuz codes are gfx942's"
    if problem.columns * problem.x_dtype.itemsize >= MAX_ROW_BYTES:
        return f"rows of {problem.columns * problem.x_dtype.itemsize} bytes; the kernels take less than {MAX_ROW_BYTES}"
    if problem.columnwise and problem.transposed and problem.rows >= MAX_TRANSPOSED_ROWS:
        return f"{problem.rows} rows; transposed codes are written for less than {MAX_TRANSPOSED_ROWS}"
    tile = MXFP4_TILE if packed else (TILE, TILE)
    if (tiles := -(-problem.rows // tile[0]) * -(-problem.columns // tile[1])) >= MAX_TILES:
        return f"{tiles} tiles of {tile[0]} x {tile[1]}; a launch has less than {MAX_TILES}"
    return None


def run(
    problem: QuantizeProblem,
    arch: str,
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    outputs: QuantizeTensors | None = None,
    seed: torch.Tensor | None = None,
) -> tuple[QuantizeTensors, list[str]]:
    """What problem.outputs() lists, and notes, such as that x had to be copied.

    x is [rows, columns] with at least one element and any strides, on a GPU of that arch, or on the CPU inside a fourwave.sim session of that arch;
    the caller has made sure of it. seed: int64 (), where problem.stochastic. outputs: contiguous tensors to write, new ones if None. Nothing else is written.
    Raises NotImplementedError (why_unsupported).
    """
    if (reason := why_unsupported(problem, arch)) is not None:
        raise NotImplementedError(reason)
    guard.import_flydsl()
    from fourwave.quantize.cdna import AmaxSpec, QuantizeSpec

    notes: list[str] = []
    x = _readable(x, notes)
    out = problem.allocate(x) if outputs is None else outputs
    whole_chunks = _aligned(x) and problem.columns % 16 == 0
    x_dtype = str(problem.x_dtype).removeprefix("torch.")
    scaling = problem.quant_format.scaling
    sizes = problem.rows, problem.columns
    if problem.code_format.bits == 4:
        _run_mxfp4(problem, arch, x, x_dtype, out, seed)
        return out, notes

    row_amax = column_amax = None
    if scaling == "tensor":
        assert out.amax is not None
        row_amax = out.amax.view(1).view(torch.int32)
        row_amax.zero_()
        if not problem.given_scale:
            _launch(AmaxSpec(arch, x_dtype, False, False, whole_chunks), (x, row_amax, row_amax), sizes)
    elif scaling == "row":
        row_amax = x.new_zeros(problem.rows if problem.rowwise else 1, dtype=torch.int32)
        column_amax = x.new_zeros(problem.columns if problem.columnwise else 1, dtype=torch.int32)
        amax_spec = AmaxSpec(arch, x_dtype, problem.rowwise, problem.columnwise, whole_chunks)
        _launch(amax_spec, (x, row_amax, column_amax), sizes)

    scales = [scale if problem.given_scale else out.scale, out.columnwise_scale]
    if scaling == "tensor" and scales[0] is None:
        scales.reverse()  # the kernel knows one place for the one scale
    spec = QuantizeSpec(
        arch, x_dtype, problem.code_format.name, scaling, problem.scale_rule, problem.rowwise, problem.columnwise,
        problem.transposed, problem.given_scale, whole_chunks, problem.rows % 16 == 0,
    )  # fmt: skip
    _launch(spec, (x, out.data, scales[0], out.columnwise_data, scales[1], row_amax, column_amax), sizes)
    if scaling == "tensor" and out.scale is not None and out.columnwise_scale is not None:
        out.columnwise_scale.copy_(out.scale)
    return out, notes


def _run_mxfp4(
    problem: QuantizeProblem, arch: str, x: torch.Tensor, x_dtype: str, out: QuantizeTensors, seed: torch.Tensor | None
) -> None:
    from fourwave.quantize.mxfp4 import Mxfp4Spec

    assert (seed is not None) == problem.stochastic, "a seed belongs to stochastic rounding"
    spec = Mxfp4Spec(
        arch, x_dtype, problem.scale_rule, problem.rowwise, problem.columnwise, problem.transposed, problem.stochastic,
        problem.row_signs is not None, problem.column_signs is not None,
        _aligned(x) and problem.columns * x.element_size() % ALIGN_BYTES == 0,
        problem.columns % 32 == 0, problem.rows % 32 == 0,
    )  # fmt: skip
    words = None if seed is None else seed.reshape(1).view(torch.int32)
    tensors = (x, out.data, out.scale, out.columnwise_data, out.columnwise_scale, words)
    _launch(spec, tensors, (problem.rows, problem.columns, problem.row_signs or 0, problem.column_signs or 0))


def _readable(x: torch.Tensor, notes: list[str]) -> torch.Tensor:
    """x, or a contiguous copy where the kernel cannot read it as it lies."""
    rows, columns = x.shape
    if x.is_neg():
        notes.append("x copied: it is a negated view")
        return x.resolve_neg().contiguous()
    inner = x.stride(1) if columns > 1 else 1
    outer = x.stride(0) if rows > 1 else columns  # the stride of a single row says nothing
    if inner != 1:
        notes.append("x copied: inner stride is not 1")
        return x.contiguous()
    if outer * x.element_size() >= MAX_ROW_BYTES:
        notes.append(f"x copied: row stride {outer} is beyond the limit")
        return x.contiguous()
    return x if (outer, inner) == x.stride() else x.as_strided((rows, columns), (outer, inner))


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGN_BYTES == 0 and x.stride(0) * x.element_size() % ALIGN_BYTES == 0


def _launch(spec: Spec, tensors: tuple[torch.Tensor | None, ...], sizes: tuple[int, ...]) -> None:
    x = tensors[0]
    assert x is not None
    unused = x[0, :1]
    arguments = [_bytes(unused if t is None else t) for t in tensors]
    if x.device.type != "cuda":
        from fourwave import sim

        session = sim.active_session()
        if session is None:
            raise RuntimeError("CPU tensors need an open fourwave.sim session")
        _call(spec, ("sim", session.key), (*arguments, *sizes, None))
        return
    with torch.cuda.device(x.device):
        _call(spec, ("cuda", x.device.index), (*arguments, *sizes, torch.cuda.current_stream()))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """t as FlyDSL takes it: 8-bit types as bytes, a scalar as one element."""
    t = t.view(torch.uint8) if t.element_size() == 1 else t
    return t.view(1) if t.dim() == 0 else t


def _call(spec: Spec, target: Any, arguments: tuple[Any, ...]) -> None:
    compiled = _compiled.get((spec, target))
    if compiled is None:
        with _lock:
            compiled = _compiled.get((spec, target))
            if compiled is None:
                import flydsl.compiler as flyc

                # compile() also launches, since the arguments are live.
                _compiled[spec, target] = flyc.compile(build_launcher(spec), *jit_arguments(*arguments))
                return
    compiled(*arguments)


def build_launcher(spec: Spec) -> Any:
    """The FlyDSL JIT function of a specialisation."""
    guard.import_flydsl()
    from fourwave.quantize import cdna, mxfp4

    if isinstance(spec, mxfp4.Mxfp4Spec):
        return mxfp4.build(spec)
    return cdna.build_amax(spec) if isinstance(spec, cdna.AmaxSpec) else cdna.build_quantize(spec)


def placeholder_arguments(spec: Spec) -> list[Any]:
    """Arguments to compile with where nothing is launched; sizes do not matter."""
    from fourwave.quantize import cdna, mxfp4

    x = torch.zeros((16, 16), dtype=getattr(torch, spec.x_dtype))
    line, square = torch.zeros(16, dtype=torch.int32), torch.zeros((16, 16), dtype=torch.uint8)
    if isinstance(spec, mxfp4.Mxfp4Spec):
        return jit_arguments(x, square, square, square, square, line, 16, 16, 0, 0, None)
    if isinstance(spec, cdna.AmaxSpec):
        return jit_arguments(x, line, line, 16, 16, None)
    scale = (
        square
        if spec.scaling == "1x32"
        else torch.zeros((16, 16) if "128" in spec.scaling else (16,), dtype=torch.float32)
    )
    return jit_arguments(x, square, scale, square, scale, line, line, 16, 16, None)


def jit_arguments(*arguments: Any) -> list[Any]:
    """Arguments for tracing: every extent and row stride is a run-time value, the inner stride is 1."""
    import flydsl.compiler as flyc

    def dynamic(t: torch.Tensor) -> Any:
        return flyc.from_torch_tensor(t).mark_layout_dynamic(leading_dim=t.dim() - 1)

    return [dynamic(a) if isinstance(a, torch.Tensor) else a for a in arguments]
