"""Launches that HIP refuses, or leaves undefined, by their sizes alone."""

from __future__ import annotations

import pytest
import torch

from fourwave import sim

pytestmark = pytest.mark.skipif(sim.unavailable() is not None, reason=f"no simulator: {sim.unavailable()}")

if sim.unavailable() is None:
    import flydsl.compiler as flyc
    import flydsl.expr as fx

    @flyc.kernel
    def any_kernel(y: fx.Tensor):
        y[fx.Int32(0)] = 1.0

    @flyc.kernel(known_block_size=[64, 2, 1])
    def known_kernel(y: fx.Tensor):
        y[fx.Int32(0)] = 1.0

    @flyc.jit
    def any_size(y: fx.Tensor, grid: fx.Int32, grid_y: fx.Int32, block: fx.Int32, block_y: fx.Int32):
        any_kernel(y).launch(grid=(grid, grid_y, 1), block=(block, block_y, 1))

    @flyc.jit
    def known_size(y: fx.Tensor, block: fx.Int32, block_y: fx.Int32):
        known_kernel(y).launch(grid=(1, 1, 1), block=(block, block_y, 1))

    @flyc.jit
    def traced_size(y: fx.Tensor, block: fx.Constexpr[int]):
        any_kernel(y).launch(grid=(1, 1, 1), block=(block, 1, 1))


def out():
    return torch.zeros(1)


@pytest.mark.parametrize("arch", sim.ARCHS)
def test_a_kernel_that_states_no_size_is_for_256_threads(arch):
    for block in ((1, 1), (256, 1), (64, 4)):
        assert len(sim.run(any_size, out(), 1, 1, *block, arch=arch, checks="init").launches) == 1
    for block in ((257, 1), (1024, 1), (64, 5)):
        with pytest.raises(ValueError, match=rf"with {block[0] * block[1]} threads .* at most 256, and HIP refuses"):
            sim.run(any_size, out(), 1, 1, *block, arch=arch)
    assert len(sim.run(traced_size, out(), 1024, arch=arch, checks="init").launches) == 1  # known when it is traced


def test_a_stated_size_is_exact():
    assert len(sim.run(known_size, out(), 64, 2, checks="init").launches) == 1
    for block in ((32, 2), (128, 1), (2, 64), (64, 1)):
        with pytest.raises(
            ValueError, match=rf"with \({block[0]}, {block[1]}, 1\) threads.* exactly \(64, 2, 1\) \(known_block_size"
        ):
            sim.run(known_size, out(), *block)


def test_negative_sizes():
    for sizes in ((-1, 1, 64, 1), (1, -1, 64, 1), (1, 1, -64, 1)):
        with pytest.raises(ValueError, match=r"-.*sizes are not negative"):
            sim.run(any_size, out(), *sizes)


def test_dimensions_of_2_to_the_32():
    for sizes, axis in (((1 << 26, 1, 64, 1), "x"), ((1, 1 << 30, 64, 4), "y")):
        with pytest.raises(ValueError, match=rf"in {axis}, {1 << 32} in all; HIP refuses 2\^32"):
            sim.run(any_size, out(), *sizes)
    report = sim.run(any_size, out(), (1 << 26) - 1, 1, 64, 1, workgroups=range(1), checks="init")
    assert report.workgroups == 1


TEXT = """
module attributes {ATTRIBUTES} {
  llvm.func @k(%p: !llvm.ptr<1>) KERNEL {
    %c = llvm.mlir.constant(1.0 : f32) : f32
    llvm.store %c, %p : f32, !llvm.ptr<1>
    llvm.return
  }
}
"""


@pytest.mark.parametrize(
    ("attributes", "kernel", "good", "bad"),
    [
        ("", "", 1024, 1025),
        ("", 'attributes {rocdl.flat_work_group_size = "1,128"}', 128, 129),
        ("", 'attributes {rocdl.reqd_work_group_size = array<i32: 96, 1, 1>}', 96, 64),
        ('"ttg.num-warps" = 2 : i32, "ttg.threads-per-warp" = 64 : i32', "", 128, 64),
        ('"ttg.num-warps" = 2 : i32, "ttg.total-num-warps" = 3 : i32, "ttg.threads-per-warp" = 64 : i32', "", 192, 128),
    ],
)  # fmt: skip
def test_modules_by_hand(attributes, kernel, good, bad):
    text = TEXT.replace("ATTRIBUTES", attributes).replace("KERNEL", kernel)
    y = torch.zeros(1)
    sim.run_module(text, [y], 1, good, checks=("memory",))
    assert y.item() == 1
    with pytest.raises(ValueError, match=f"{bad}"):
        sim.run_module(text, [y], 1, bad)
    with pytest.raises(ValueError, match="2\\^32"):
        sim.run_module(text, [y], (1 << 32) // good + 1, good)
