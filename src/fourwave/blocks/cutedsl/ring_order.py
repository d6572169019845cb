"""Who waits for whom in the ring of pieces that blocks.cutedsl.ring_store describes: plain Python, from which the kernel is unrolled.

A tile's pieces take the ring's slots in turn. The consumer waits until piece j's slot is ready, writes, and says of the pieces in `told`
that they are written. The server waits for each piece in order, hands it to TMA, and makes the slots of the pieces in `freed` ready, each for
the piece `slots` further on, of this tile or the next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RingOrder:
    """pieces: of a tile, a multiple of slots; waits_for_memory: TMA brings what they are added to

    At least two slots: the server makes a piece's slot ready when the next piece is written.
    """

    pieces: int
    slots: int
    waits_for_memory: bool

    def __post_init__(self) -> None:
        if self.slots < 2 or self.pieces % self.slots:
            raise ValueError(f"a ring of {self.slots} for {self.pieces} pieces of a tile: whole turns of at least 2")

    @property
    def turns(self) -> int:
        """That a tile takes of the ring."""
        return self.pieces // self.slots

    def told(self, piece: int) -> tuple[int, ...]:
        """Pieces that a consumer says it has written when it has written `piece`.

        What arrives from memory is sent back as soon as it can be. Of other tiles that are one turn of the ring, one fence serves all pieces;
        of several turns it must not, since the server makes a turn's last slot ready when the next turn's first piece is written.
        """
        if self.waits_for_memory or self.turns > 1:
            return (piece,)
        return tuple(range(self.pieces)) if piece == self.pieces - 1 else ()

    def freed(self, piece: int) -> tuple[int, ...]:
        """Pieces that have been read out when the server has handed `piece` to TMA and waited for those before it; a tile's last one is
        waited for, too."""
        last = piece == self.pieces - 1
        return tuple(range(max(0, piece - 1), piece + 1 if last else piece))
