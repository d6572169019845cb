"""The launcher that the CDNA GEMM kernels share: one argument list, one grid."""

from types import SimpleNamespace

import flydsl.compiler as flyc
from flydsl import expr as fx

from fourwave.blocks.flydsl.schedule import num_tiles
from fourwave.blocks.flydsl.tiles import WORKGROUP

# In the launcher's order. Those that a specialisation does not use are placeholders, which the kernel never reads.
TENSORS = (
    "a", "b", "out", "bias", "a_scale", "b_scale", "preactivation", "bias_grad", "out_scale", "out_amax", "out_columnwise",
    "out_columnwise_scale", "workspace",
)  # fmt: skip


def launcher(kernel, geo):
    """A FlyDSL JIT function (*TENSORS, M, N, K, alpha, stream) that launches kernel(arguments), arguments by name.

    Tensors are as GemmTensors says, 8-bit types as bytes, scalars with one element. workspace: float32, scratch.
    """

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
        kernel(arguments).launch(grid=(tiles, 1, 1), block=(WORKGROUP, 1, 1), stream=stream)

    return launch_gemm
