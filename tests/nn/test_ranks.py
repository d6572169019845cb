"""Delayed scaling over ranks: the largest amax of all of them, in one all-reduce a step. Two processes on the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fourwave as fw

RECIPE = fw.recipes.DelayedScaling(amax_history_len=4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = fw.nn.Linear(32, 32), fw.nn.LayerNormMLP(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Inside(torch.nn.Module):
    """Its region is in the compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = fw.nn.prepare(fw.nn.Linear(32, 32), RECIPE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with fw.autocast(recipe=RECIPE):
            return self.linear(x)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 2 * rank)


def steps(rank: int, recipe: Any, group: Any, xs: Any, wrap: Any = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net: Any = Net()
    inner = net
    if wrap is not None:
        inner = copy.deepcopy(fw.nn.prepare(inner, recipe))
        net = wrap(inner)
    for step in range(5):
        with fw.autocast(recipe=recipe, amax_reduction_group=group):
            y = net(xs(step, rank))
            with torch.no_grad(), fw.autocast(recipe=recipe, amax_reduction_group=group):
                net(xs(step, rank))  # no step, and no collective
        y.square().sum().backward()
    return {name: t.clone() for name, t in inner.state_dict().items() if "delayed" in name}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    calls: list[int] = []
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counted
    together = steps(rank, RECIPE, None, data)
    count = list(calls)
    own = [dist.new_group([r]) for r in range(2)][rank]
    alone = steps(rank, RECIPE, own, data)
    apart = steps(rank, fw.recipes.DelayedScaling(amax_history_len=4, reduce_amax=False), None, data)
    compiled = steps(rank, RECIPE, None, data, lambda net: torch.compile(net, backend="eager"))
    # State that is there when it wraps: its forward passes broadcast the buffers of rank 0.
    parallel = steps(rank, RECIPE, own, data, torch.nn.parallel.DistributedDataParallel)
    inside = torch.compile(Inside(), backend="eager", fullgraph=True)
    refused = False
    try:
        inside(data(0, rank))
    except Exception as error:
        refused = "cannot reduce amax over the ranks" in str(error)
    results = {
        "together": together,
        "calls": count,
        "alone": alone,
        "apart": apart,
        "compiled": compiled,
        "parallel": parallel,
    }
    torch.save({**results, "refused": refused}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this PyTorch has no torch.distributed")
def test_the_largest_amax_of_all_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    # Steps 2 to 5 begin with one all-reduce of the 3 + 6 newest amax.
    assert [r["calls"] for r in ranks] == [[9] * 4] * 2
    for name, scale in ranks[0]["together"].items():
        if name.endswith("scale"):
            assert torch.equal(scale, ranks[1]["together"][name]), name
            assert not torch.equal(ranks[0]["alone"][name], ranks[1]["alone"][name])
    assert all(r["refused"] for r in ranks)
    for rank, kept in enumerate(ranks):
        for name, tensor in kept["together"].items():
            torch.testing.assert_close(kept["compiled"][name], tensor, msg=name)
        for name, tensor in kept["alone"].items():
            torch.testing.assert_close(kept["parallel"][name], tensor, msg=name)
        right = steps(rank, RECIPE, None, data)
        for name, tensor in right.items():
            assert torch.equal(kept["alone"][name], tensor) and torch.equal(kept["apart"][name], tensor), name
    # What a layer's input scale must be: rank 1 has the larger input.
    history = ranks[0]["together"]["first.delayed_amax_history"]
    largest = [max(float(data(step, rank).abs().max()) for rank in range(2)) for step in range(4)]
    assert history[1:, 0].tolist() == pytest.approx(largest[1:], rel=1e-6)
    assert float(ranks[0]["together"]["first.delayed_scale"][0]) == pytest.approx(max(largest) / 448, rel=1e-6)
