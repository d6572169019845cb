"""What training scripts take from transformer_engine.pytorch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fourwave.nn.context import first_run
from fourwave.te.quantization import checkpoint

Tensor = torch.Tensor

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint", "prepare_te_modules_for_fsdp"]


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Around both runs of a checkpoint of one's own. The first one, without gradients, counts as training; the second one is known by
    the backward pass that it is in."""
    with first_run() if activation_recompute and not recompute_phase else contextlib.nullcontext():
        yield


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Nothing: it only changes where Transformer Engine keeps saved activations between forward and backward pass, which stay whole here."""


class CudaRNGStatesTracker:
    """Streams of random numbers besides PyTorch's own, by name: of the current GPU, or of the CPU where there is none."""

    def __init__(self) -> None:
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A stream that starts with seed; names and seeds of streams differ."""
        if seed in self.seeds_:
            raise ValueError(f"another stream has seed {seed}")
        if name in self.states_:
            raise ValueError(f"there is a stream {name} already")
        random = _random()
        before = random.get_rng_state()
        random.manual_seed(seed)
        self.states_[name] = random.get_rng_state()
        self.seeds_.add(seed)
        random.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """What runs inside draws from the stream `name`, and PyTorch's own stays where it was."""
        if name not in self.states_:
            raise ValueError(
                f"there is no stream {name}, but {', '.join(self.states_) or 'none'}; add(name, seed) makes one"
            )
        random = _random()
        before = random.get_rng_state()
        random.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = random.get_rng_state()
            random.set_rng_state(before)


def _random() -> Any:
    return torch.cuda if torch.cuda.is_available() else torch
