"""The shapes of steps, each of which is compiled and captured once."""

from __future__ import annotations

from typing import NamedTuple

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
