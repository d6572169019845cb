"""Adds the tiles of x, each one reversed: y[t] = sum over i of x[i, TILE - 1 - t]. Written for an AMD GPU (gfx950).

Two LDS buffers: tile i + 1 is on its way while tile i is added. Copies go straight from global memory to LDS; the compiler does not wait for
them, the kernel does. The wait leaves the copy of tile i + 1 in flight, which was issued last; missing_wait.py leaves both.
"""

import sys

import flydsl.compiler as flyc
import torch
from flydsl import expr as fx

THREADS, WIDTH = 256, 4
TILE = THREADS * WIDTH  # 16 bytes a thread and copy


@fx.struct
class Shared:
    tiles: fx.Array[fx.Float32, 2 * TILE, 16]


@flyc.kernel(known_block_size=[THREADS, 1, 1])
def add_tiles_kernel(x: fx.Tensor, y: fx.Tensor, num_tiles: fx.Int32):
    lds = fx.SharedAllocator().allocate(Shared).peek()
    thread = fx.Int32(fx.thread_idx.x)
    wave = fx.Int32(fx.rocdl.readfirstlane(fx.Int32.ir_type, fx.Int32(thread // 64).ir_value()))
    quads = fx.logical_divide(fx.rocdl.make_buffer_tensor(x, max_size=False), fx.make_layout(WIDTH, 1))
    copy = fx.make_copy_atom(fx.rocdl.cdna4.BufferLoadAsyncLDS128b(), fx.Float32)

    def fetch(tile):
        """Each wave's 64 lanes bring 64 * WIDTH elements to consecutive places."""
        place = (tile % 2) * TILE + wave * (64 * WIDTH)
        target = fx.make_view(fx.add_offset(lds.tiles.ptr, fx.make_int_tuple(place)), fx.make_layout(WIDTH, 1))
        fx.copy(copy, fx.slice(quads, (None, tile * THREADS + thread)), target)

    fetch(fx.Int32(0))
    sums = [fx.Float32(0.0) for _ in range(WIDTH)]
    for tile, state in range(fx.Int32(0), num_tiles, fx.Int32(1), init=sums):
        tile = fx.Int32(tile)
        fetch(tile + 1)  # past the last tile it reads nothing: the buffer ends there
        fx.rocdl.s_waitcnt(vmcnt=1)  # tile i has landed
        fx.gpu.barrier()
        last = (tile % 2) * TILE + TILE - 1 - thread * WIDTH
        sums = [fx.Float32(state[i]) + lds.tiles[last - i] for i in range(WIDTH)]
        fx.gpu.barrier()
        results = yield sums
    fx.rocdl.s_waitcnt(vmcnt=0)
    for i in fx.range_constexpr(WIDTH):
        y[thread * WIDTH + i] = fx.Float32(results[i])


@flyc.jit
def add_tiles(x: fx.Tensor, y: fx.Tensor, num_tiles: fx.Int32, stream: fx.Stream = fx.Stream(None)):
    add_tiles_kernel(x, y, num_tiles).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


x = torch.randint(-100, 100, (6, TILE), device="cuda").float()
y = torch.empty(TILE, device="cuda")
add_tiles(x.view(-1), y, 6, stream=torch.cuda.current_stream())
torch.cuda.synchronize()
right = torch.equal(y, x.flip(1).sum(0))
print("right:", right)
sys.exit(not right)
