"""Adds a bias and clamps at zero: y[i] = max(x[i] + bias, 0). Written for an AMD GPU.

The grid is rounded up to whole blocks. Threads past the last element do nothing, unlike in tail.py.
"""

import sys

import flydsl.compiler as flyc
import torch
from flydsl import expr as fx

BLOCK = 256


@flyc.kernel(known_block_size=[BLOCK, 1, 1])
def bias_relu_kernel(x: fx.Tensor, y: fx.Tensor, bias: fx.Float32, n: fx.Int32):
    i = fx.Int32(fx.block_idx.x) * BLOCK + fx.Int32(fx.thread_idx.x)
    if i < n:
        value = x[i] + bias
        y[i] = (value > 0.0).select(value, fx.Float32(0.0))


@flyc.jit
def bias_relu(x: fx.Tensor, y: fx.Tensor, bias: fx.Float32, n: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    blocks = (n + BLOCK - 1) // BLOCK
    bias_relu_kernel(x, y, bias, n).launch(grid=(blocks, 1, 1), block=(BLOCK, 1, 1), stream=stream)


N = 1000
x = torch.randn(N, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0))
y = torch.empty(N, device="cuda")
bias_relu(x, y, 0.5, N, stream=torch.cuda.current_stream())
torch.cuda.synchronize()
right = torch.equal(y, (x + 0.5).clamp(min=0))
print("right:", right)
sys.exit(not right)
