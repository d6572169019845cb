"""Who waits for whom among stages and slots of scales in the kernel of weight gradients (ops/grouped_gemm/sm90_wgrad.py), played in any order.

A barrier's wait tells phases apart by their parity only: with one that completed two phases ago it goes on at once, with one that is two
phases further it waits for ever. TMA completes what is under way in any order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

QUAD = 4  # steps whose scales a slot holds
Barrier = tuple[str, int]
# ("wait", barrier, how often it has completed a phase before) or ("arrive" or, when its bytes are there, "bring", barrier, 0)
Action = tuple[str, Barrier, int]
# Tiles, as (first block of a group's k, steps): quads begin at multiples of QUAD blocks and where a tile does.
TILES = ((0, 13), (2, 7), (3, 1), (0, 8), (1, 6), (3, 2), (0, 1), (0, 1), (0, 1), (2, 13), (0, 20))


def steps() -> Iterator[bool]:
    """Of all tiles, whether they begin a quad."""
    for block, count in TILES:
        for k in range(count):
            yield k == 0 or (block + k) % QUAD == 0


def producer(stages: int, slots: int, waits: str) -> Iterator[Action]:
    quads = 0
    for k, begins in enumerate(steps()):
        if k >= stages:
            yield "wait", ("empty", k % stages), k // stages - 1
        if begins:
            if quads >= slots and waits != "stages":
                yield "wait", ("free", quads % slots), quads // slots - 1
            yield "bring", ("brought", quads % slots), 0
            quads += 1
        yield "bring", ("full", k % stages), 0


def turner(stages: int, slots: int, waits: str) -> Iterator[Action]:
    """waits: for the "slot", or for the "first" stage of a quad, or for "every" one, which is full when its scales are there."""
    quads = 0
    for k, begins in enumerate(steps()):
        if waits == "every" or (waits == "first" and begins):
            yield "wait", ("full", k % stages), k // stages
        if begins:
            if waits not in ("every", "first"):
                yield "wait", ("brought", quads % slots), quads // slots
            yield "arrive", ("turned", quads % slots), 0
            quads += 1


def consumer(stages: int, slots: int) -> Iterator[Action]:
    quads = -1
    begin = [*steps(), True]
    for k in range(len(begin) - 1):
        yield "wait", ("full", k % stages), k // stages
        if begin[k]:
            quads += 1
            yield "wait", ("turned", quads % slots), quads // slots
        yield "arrive", ("empty", k % stages), 0
        # Scales may be read when a stage has been released.
        if begin[k + 1]:
            yield "arrive", ("free", quads % slots), 0


def play(stages: int, slots: int, waits: str, ranks: tuple[int, ...], seed: int) -> str | None:
    """What goes wrong, if anything. ranks: who goes first, of the producer, TMA, the turner and the consumer; seed: of TMA's order, and
    where it is odd of all else, too."""
    chance = random.Random(seed)
    phases: dict[Barrier, int] = {}
    under_way: list[Barrier] = []
    roles = {0: producer(stages, slots, waits), 2: turner(stages, slots, waits), 3: consumer(stages, slots)}
    brought: dict[int, int] = {}
    pending = {role: next(actions, None) for role, actions in roles.items()}

    def can_go(role: int) -> bool:
        if role == 1:
            return bool(under_way)
        action = pending[role]
        if action is None:
            return False
        what, barrier, before = action
        return what != "wait" or phases.get(barrier, 0) % 2 != before % 2

    while any(pending.values()) or under_way:
        able = [role for role in ranks if can_go(role)]
        if not able:
            return f"all wait: {pending}"
        role = chance.choice(able) if seed % 2 else able[0]
        if role == 1:
            barrier = under_way.pop(chance.randrange(len(under_way)))
            phases[barrier] = phases.get(barrier, 0) + 1
            continue
        action = pending[role]
        assert action is not None
        what, barrier, before = action
        if what == "wait" and phases.get(barrier, 0) != before + 1:
            return f"{role} goes on at {barrier}: {phases.get(barrier, 0)} phases, not {before + 1}"
        if what == "bring":
            under_way.append(barrier)
            if barrier[0] == "brought":
                slot = barrier[1]
                if phases.get(("free", slot), 0) < brought.get(slot, 0):
                    return f"slot {slot} is written over"
                brought[slot] = brought.get(slot, 0) + 1
        elif what == "arrive":
            phases[barrier] = phases.get(barrier, 0) + 1
        pending[role] = next(roles[role], None)
    return None


def plays(stages: int, slots: int, waits: str) -> set[str]:
    """The beginnings of what goes wrong in some order."""
    found = set()
    for ranks, seed in itertools.product(itertools.permutations(range(4)), range(8)):
        wrong = play(stages, slots, waits, ranks, seed)
        if wrong is not None:
            found.add(wrong[:8])
    return found


@pytest.mark.parametrize("slots", range(2, 6))
@pytest.mark.parametrize("stages", range(2, 8))
def test_slots_with_barriers_of_their_own_never_go_wrong(stages: int, slots: int) -> None:
    assert plays(stages, slots, "slot") == set()


@pytest.mark.parametrize("stages", [3, 4])
def test_the_play_finds_what_is_wrong(stages: int) -> None:
    """A kernel of three stages read scales before they were there: it waited for a quad's first stage only. Waiting for every stage, without a
    say in when it is filled again, can last for ever. What is free is told by stages only where there are as many slots, and where those are
    released when their scales have been read."""
    assert "2 goes o" in plays(stages, stages, "first")
    assert "all wait" in plays(stages, stages, "every")
    assert plays(stages, 2, "stages")
