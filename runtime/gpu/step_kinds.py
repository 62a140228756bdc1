"""The shapes of steps, each of which is compiled and captured once."""

from __future__ import annotations

from typing import NamedTuple

from .step_tables import Room

FEW = (1, 2, 4, 8)
# Tokens of a step that is captured only once, with the largest number of sequences, some with one token: the wasted work
# is small compared to a long step's products.
LONG = 512


class StepKind(NamedTuple):
    """The shape of a step; steps of one kind share a captured graph.

    Attributes:
        tokens, sequences: the capacity.
        prompts, singles: whether some sequences have several tokens, and whether some have one.
        drafts: after how many tokens one is sampled, if some of them are drafts; 0 for one for each sequence.
    """

    tokens: int
    sequences: int
    prompts: bool
    singles: bool
    drafts: int = 0

    @classmethod
    def of_singles(cls, sequences: int) -> StepKind:
        """One token of each sequence."""
        return cls(sequences, sequences, False, True)

    @property
    def wanted(self) -> int:
        """After how many tokens one is sampled."""
        return self.drafts or self.sequences


def buckets(most: int) -> list[int]:
    """The sizes to which steps are padded, and ``most``: 1, 2, 4, 8, 16, 32, then by 32 to 128, by half to 512, then by an eighth.

    Padding is wasted work. Few tokens cost little more than reading the weights; beyond 512 each costs its
    products, so sizes are closer together, at multiples of 64.
    """
    found = [size for size in FEW if size < most]
    size = 16
    while size < most:
        found.append(size)
        if size < 128:
            size += min(size, 32)
        elif size < 512:
            size = min(size + size // 2, 512)
        else:
            size = -(-(size + size // 8) // 64) * 64
    return [*found, most]


def bucket(count: int, most: int) -> int:
    """The next of :func:`buckets`."""
    return next(size for size in buckets(most) if size >= count)


class StepKinds:
    """The kinds of steps that fit a device's tables.

    Args:
        room: of the tables.
    """

    def __init__(self, room: Room) -> None:
        self._room = room

    def of(self, counts: list[int], *, drafts: bool = False) -> StepKind:
        """The smallest kind that fits sequences of so many tokens. With ``drafts`` one is sampled after each token."""
        room, sequences = self._room, len(counts)
        if max(counts) == 1:
            return StepKind.of_singles(bucket(sequences, room.sequences))
        tokens, few = bucket(sum(counts), room.tokens), min(FEW[-1], room.sequences)
        if tokens > LONG:
            return StepKind(tokens, room.sequences, True, room.sequences > 1)
        most = few if sequences <= few else room.sequences
        return StepKind(tokens, most, True, min(counts) == 1, tokens if drafts else 0)

    def all(self) -> list[StepKind]:
        """All of them, the largest first."""
        room = self._room
        prompts = [
            StepKind(tokens, sequences, True, too)
            for tokens in buckets(room.tokens)
            if tokens > 1
            for sequences in {room.sequences if tokens > LONG else min(FEW[-1], room.sequences), room.sequences}
            for too in ((False,) if sequences == 1 else (True,) if tokens > LONG else (False, True))
        ]
        drafts = [kind._replace(drafts=kind.tokens) for kind in prompts if kind.tokens <= room.drafted]
        return sorted([*self.singles(), *prompts, *drafts], reverse=True)

    def singles(self) -> list[StepKind]:
        """Those of one token of each sequence, the largest first."""
        return [StepKind.of_singles(count) for count in reversed(buckets(self._room.sequences))]
