"""Drafts from a sequence's own text: what followed the last time that its last tokens occurred."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan
from .drafter import Chains, Drafts
from .tree import DraftBranch, TokenTree

# Tokens that must have occurred before, at least and at most.
_LEAST, _MOST = 2, 5


class LookupDrafter:
    """Prompt lookup (n-grams): for outputs that repeat parts of their prompt or of themselves, at no cost.

    As in Saxena's prompt lookup decoding and in vLLM's ``ngram``, but of several earlier places the last one is taken, and a draft that
    reaches the end of the sequence goes on with itself. Branches are what followed at others, where that was something else.

    Attributes:
        longest_branch: as long as the chain.
    """

    longest_branch: int | None = None

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Tokens] = WeakKeyDictionary()

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Drafts for the sequences whose last tokens occurred before."""
        found = {}
        for chunk in plan.chunks:
            if chunk.drafts:
                sequence = chunk.sequence
                text = self._texts.get(sequence)
                if text is None:
                    text = self._texts[sequence] = _Tokens()
                text.extend(sequence.tokens)
                places = continued_at(text.all, 1 + len(chunk.spare))
                if places:
                    lengths = [chunk.drafts, *parts_of(chunk.branched, len(places) - 1)]
                    chain, *others = (
                        continuation(text.all, place, count) for place, count in zip(places, lengths, strict=True)
                    )
                    found[sequence] = TokenTree(chain, [DraftBranch(0, other) for other in others if other])
        return Drafts(found)

    def unprepared(self, sequence: Sequence) -> int:
        """None."""
        return 0

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """Nothing: it has no cache."""


class _Tokens:
    """A sequence's tokens as an array that grows with it."""

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.int64)
        self._count = 0

    def extend(self, tokens: list[int]) -> None:
        count = len(tokens)
        if count > len(self._room):
            larger = np.empty(2 * count, dtype=np.int64)
            larger[: self._count] = self._room[: self._count]
            self._room = larger
        self._room[self._count : count] = tokens[self._count :]
        self._count = count

    @property
    def all(self) -> np.ndarray:
        return self._room[: self._count]


def continued_at(tokens: np.ndarray, most: int = 1) -> list[int]:
    """Places after earlier occurrences of as many of the last tokens as possible, each of which goes on with another token.

    Args:
        tokens: of the sequence.
        most: how many places are wanted.

    Returns:
        The last place after an occurrence of the most tokens first; none if not even the last :data:`_LEAST` have occurred before.
    """
    length = len(tokens)
    if length <= _LEAST:
        return []
    # The ends of earlier occurrences, by how many of the last tokens are there.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    by_length = list[np.ndarray]()
    for back in range(2, min(_MOST, length - 1) + 1):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[-back]]
        if not len(ends):
            break
        if back >= _LEAST:
            by_length.append(ends)
    found: dict[int, int] = {}
    for ends in reversed(by_length):
        left = ends
        while len(left) and len(found) < most:
            place = int(left[-1])
            found.setdefault(int(tokens[place]), place)
            left = left[tokens[left] != tokens[place]]
    return list(found.values())


def continuation(tokens: np.ndarray, place: int, count: int) -> list[int]:
    """So many tokens from a place on; from the end of the sequence on, those of the continuation itself."""
    length = len(tokens)
    return [int(tokens[place + i % (length - place)]) for i in range(count)]


def parts_of(count: int, parts: int) -> list[int]:
    """A number divided into nearly equal parts, the larger first."""
    return [(count + parts - 1 - i) // parts for i in range(parts)]
