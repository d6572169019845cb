"""What the CDNA GEMM kernels share: argument list, launcher, and the second kernel where K is split.

With split_k parts of K, split_k workgroups multiply for each tile and leave their accumulators in the workspace; a second
launch of one workgroup per tile adds them, part 0 first, and runs the epilogue. Each result is thus one fixed sum of
float32, whichever workgroup was first. (Counting arrivals in memory would save the launch, but has the last workgroup add
all parts of a tile alone, and relies on the order in which the dies' caches are written back.)
"""

from types import SimpleNamespace

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.epilogue import Partials, num_results, store_tile
from fourwave.blocks.flydsl.memory import keep_order, uniform
from fourwave.blocks.flydsl.schedule import num_tiles, output_tile
from fourwave.blocks.flydsl.tiles import WAVE, WORKGROUP

# In the launcher's order. Those that a specialisation does not use are placeholders, which the kernel never reads.
TENSORS = (
    "a", "b", "out", "bias", "a_scale", "b_scale", "preactivation", "bias_grad", "out_scale", "out_amax", "out_columnwise",
    "out_columnwise_scale", "workspace",
)  # fmt: skip

AT_ONCE = 4  # accumulators of which all parts are loaded together


def finish(acc, epi, arguments, geo, split, place, tiles, tile, part, wave_m, wave_n, lane):
    """The end of a kernel: the epilogue, or partial sums where K is split. place: m0, n0."""
    if split == 1:
        store_tile(acc, epi, arguments, *place, geo, wave_m, wave_n, lane)
        return
    Partials(arguments.workspace, part * tiles + tile, num_results(epi, geo), fx.Int32(fx.thread_idx.x)).store(acc)


def _reduction(geo, epi, split):
    @flyc.kernel(known_block_size=[WORKGROUP, 1, 1])
    def gemm_reduction(arguments):
        thread = fx.Int32(fx.thread_idx.x)
        lane, wave = thread % WAVE, uniform(thread // WAVE)
        tile = fx.Int32(fx.block_idx.x)
        tiles_m, tiles_n = num_tiles(arguments.M, geo.tile_m), num_tiles(arguments.N, geo.tile_n)
        m_tile, n_tile = output_tile(tile, tiles_m, tiles_n, geo.group_m)
        parts = [
            Partials(arguments.workspace, tile + tiles_m * tiles_n * part, num_results(epi, geo), thread)
            for part in range(split)
        ]
        acc = []
        for first in fx.range_constexpr(0, num_results(epi, geo), AT_ONCE):
            chunk = slice(first, first + AT_ONCE)
            total = parts[0].load(chunk)
            for part in parts[1:]:
                total = [sum_so_far + value for sum_so_far, value in zip(total, part.load(chunk), strict=True)]
            acc += total
            # The compiler would load everything first, and have no registers for it.
            keep_order()
        store_tile(
            acc,
            epi,
            arguments,
            m_tile * geo.tile_m,
            n_tile * geo.tile_n,
            geo,
            wave // geo.waves_n,
            wave % geo.waves_n,
            lane,
        )

    return gemm_reduction


def launcher(kernel, geo, epi=None, split=1, threads=WORKGROUP):
    """A FlyDSL JIT function (*TENSORS, M, N, K, alpha, stream) that launches kernel(arguments), arguments by name.

    Tensors are as GemmTensors says, 8-bit types as bytes, scalars with one element. workspace: float32, scratch.
    """

    reduction = None if split == 1 else _reduction(geo, epi, split)

    @flyc.jit
    def launch_gemm(
        a: fx.Tensor, b: fx.Tensor, out: fx.Tensor, bias: fx.Tensor, a_scale: fx.Tensor, b_scale: fx.Tensor,
        preactivation: fx.Tensor, bias_grad: fx.Tensor, out_scale: fx.Tensor, out_amax: fx.Tensor,
        out_columnwise: fx.Tensor, out_columnwise_scale: fx.Tensor, workspace: fx.Tensor,
        M: fx.Int32, N: fx.Int32, K: fx.Int32, alpha: fx.Float32, stream: fx.Stream = fx.Stream(None),
    ):  # fmt: skip
        arguments = SimpleNamespace(
            a=a, b=b, out=out, bias=bias, a_scale=a_scale, b_scale=b_scale, preactivation=preactivation, bias_grad=bias_grad,
            out_scale=out_scale, out_amax=out_amax, out_columnwise=out_columnwise, out_columnwise_scale=out_columnwise_scale,
            workspace=workspace, M=M, N=N, K=K, alpha=alpha,
        )  # fmt: skip
        tiles = num_tiles(M, geo.tile_m) * num_tiles(N, geo.tile_n)
        kernel(arguments).launch(grid=(tiles * split, 1, 1), block=(threads, 1, 1), stream=stream)
        if fx.const_expr(reduction is not None):
            reduction(arguments).launch(grid=(tiles, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)

    return launch_gemm
