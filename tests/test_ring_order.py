"""The ring through which tiles of a weight gradient leave: no order of its warps stops, no piece is written over before it was read out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fourwave.blocks.cutedsl.ring_order import RingOrder
from fourwave.ops.grouped_gemm import sm90_config, sm90_tiles
from fourwave.ops.grouped_gemm.problem import GroupedProblem

COLUMNS = 32  # of a piece
TILES = 3
# What a role does next: wait until a barrier of a slot has completed that many phases, or arrive at it.
Step = tuple[str, str, int]


def consumer(order: RingOrder, told: dict[int, tuple[int, ...]]) -> Iterator[Step]:
    for _ in range(TILES):
        for piece in range(order.pieces):
            yield "wait", "ready", piece % order.slots
            yield "write", "", piece % order.slots
            for written in told[piece]:
                yield "arrive", "done", written % order.slots


def server(order: RingOrder) -> Iterator[Step]:
    for slot in range(order.slots):
        yield "arrive", "ready", slot
    for tile in range(TILES):
        for piece in range(order.pieces):
            yield "wait", "done", piece % order.slots
            yield "send", "", piece % order.slots
            for free in order.freed(piece):
                yield "read out", "", free % order.slots
                if tile < TILES - 1 or free + order.slots < order.pieces:
                    yield "arrive", "ready", free % order.slots


def play(order: RingOrder, told: dict[int, tuple[int, ...]], first: str) -> str | None:
    """What goes wrong, if anything, where the role `first` goes as far as it can after each step of the other one."""
    # Barriers have one arrival for each phase here.
    phases = {(name, slot): 0 for name in ("ready", "done") for slot in range(order.slots)}
    waited = dict.fromkeys(phases, 0)
    full: set[int] = set()  # slots that hold what was not yet read out
    roles = {"consumer": consumer(order, told), "server": server(order)}
    pending: dict[str, Step | None] = {name: next(role) for name, role in roles.items()}
    turns = sorted(roles, key=lambda name: name != first)
    while any(pending.values()):
        for name in turns:
            step = pending[name]
            if step is None or (step[0] == "wait" and phases[step[1:]] <= waited[step[1:]]):
                continue
            what, barrier, slot = step
            if what == "wait":
                waited[barrier, slot] += 1
                if phases[barrier, slot] > waited[barrier, slot]:
                    return f"{barrier} of slot {slot} is more than a phase ahead, which a parity does not tell"
            elif what == "arrive":
                phases[barrier, slot] += 1
            elif what == "write":
                if slot in full:
                    return f"slot {slot} is written over"
                full.add(slot)
            elif what == "read out":
                full.discard(slot)
            elif slot not in full:
                return f"slot {slot} is sent before it is written"
            pending[name] = next(roles[name], None)
            break
        else:
            return f"all wait: {pending}"
    return None


def orders() -> list[RingOrder]:
    return [
        RingOrder(pieces, slots, waits)
        for pieces in (2, 3, 4, 6, 8)
        for slots in range(2, pieces + 1)
        if pieces % slots == 0
        for waits in (False, True)
    ]


@pytest.mark.parametrize("first", ["consumer", "server"])
@pytest.mark.parametrize("order", orders(), ids=str)
def test_nobody_waits_for_ever(order: RingOrder, first: str) -> None:
    assert play(order, {piece: order.told(piece) for piece in range(order.pieces)}, first) is None
    assert [p for piece in range(order.pieces) for p in order.told(piece)] == list(range(order.pieces))
    assert [p for piece in range(order.pieces) for p in order.freed(piece)] == list(range(order.pieces))


def test_the_play_finds_what_is_wrong() -> None:
    """Above all what a kernel did that stopped on a GPU: of two turns, the pieces of one were told together."""
    order = RingOrder(6, 3, False)
    together = {piece: tuple(range(piece - 2, piece + 1)) if piece % 3 == 2 else () for piece in range(6)}
    one: dict[int, tuple[int, ...]] = {piece: (piece,) for piece in range(6)}

    class Never(RingOrder):
        def freed(self, piece: int) -> tuple[int, ...]:
            return ()

    class Early(RingOrder):
        def freed(self, piece: int) -> tuple[int, ...]:
            return tuple(p for p in (piece + 1,) if p < self.pieces) if piece else (0, 1)

    for first in ("consumer", "server"):
        assert "all wait" in (play(order, together, first) or "")
        assert play(order, one, first) is None
        assert "all wait" in (play(Never(6, 3, False), one, first) or "")
    assert "sent before" in (play(order, {**one, 0: (0, 1)}, "server") or "")
    assert "ahead" in (play(Early(6, 3, False), one, "server") or "")


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_what_cannot_go_round_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match="whole turns of at least 2"):
        RingOrder(6, slots, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tiles_have_rings_that_go_round(dtype: torch.dtype) -> None:
    layout, scaling = ("NT", None) if dtype == torch.bfloat16 else ("TN", "1x128")
    problem = GroupedProblem(
        4, 512, 256, 4096, "reduction", layout, dtype, dtype, torch.float32, None, True, "cuda", scaling, scaling
    )
    ringed = [config for config in sm90_tiles.candidates(problem) if config.ring]
    assert ringed
    for config in ringed:
        RingOrder(config.tile_n // COLUMNS, config.ring, config.addend == "load")
    assert "at least 2" in (sm90_config.why_unsupported(problem, replace(ringed[0], ring=1)) or "")
