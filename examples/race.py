"""Divides each row of x by its sum: y[r, c] = x[r, c] / sum over c of x[r, c]. Written for an AMD GPU.

One workgroup takes ROWS rows, one after another; each thread stores its element to LDS, and after a barrier adds up all of them. The mistake: a
wave that is done with a row stores its elements of the next row while another wave still reads the old ones.
"""

import sys

import flydsl.compiler as flyc
import torch
from flydsl import expr as fx

COLUMNS, ROWS = 256, 4  # columns = threads


@fx.struct
class Shared:
    row: fx.Array[fx.Float32, COLUMNS, 16]


@flyc.kernel(known_block_size=[COLUMNS, 1, 1])
def normalize_kernel(x: fx.Tensor, y: fx.Tensor):
    lds = fx.SharedAllocator().allocate(Shared).peek()
    thread = fx.Int32(fx.thread_idx.x)
    first = fx.Int32(fx.block_idx.x) * ROWS
    for row in fx.range_constexpr(ROWS):
        value = x[first + row, thread]
        lds.row[thread] = value
        fx.gpu.barrier()
        total = fx.Float32(0.0)
        for c in fx.range_constexpr(COLUMNS):
            total = total + lds.row[c]
        y[first + row, thread] = value / total


@flyc.jit
def normalize(x: fx.Tensor, y: fx.Tensor, blocks: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    normalize_kernel(x, y).launch(grid=(blocks, 1, 1), block=(COLUMNS, 1, 1), stream=stream)


torch.manual_seed(0)
x = torch.rand(8, COLUMNS).cuda()
y = torch.empty_like(x)
normalize(x, y, len(x) // ROWS, stream=torch.cuda.Stream())
torch.cuda.synchronize()
right = torch.allclose(y, x / x.sum(1, keepdim=True), rtol=1e-5)
print("right:", right)
sys.exit(not right)
