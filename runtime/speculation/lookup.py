"""Drafts from a sequence's own text: what followed the last time that its last tokens occurred."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan
from .drafter import Drafts

# Tokens that must have occurred before, at least and at most.
_LEAST, _MOST = 2, 5


class LookupDrafter:
    """Prompt lookup (n-grams): for outputs that repeat parts of their prompt or of themselves, at no cost.

    As in Saxena's prompt lookup decoding and in vLLM's ``ngram``, but of several earlier places the last one is taken, and a draft that
    reaches the end of the sequence goes on with itself.
    """

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Tokens] = WeakKeyDictionary()

    def propose(self, plan: StepPlan) -> Drafts:
        """Drafts for the sequences whose last tokens occurred before."""
        found = {}
        for chunk in plan.chunks:
            if chunk.drafts:
                sequence = chunk.sequence
                text = self._texts.get(sequence)
                if text is None:
                    text = self._texts[sequence] = _Tokens()
                text.extend(sequence.tokens)
                draft = continuation(text.all, chunk.drafts)
                if draft:
                    found[sequence] = draft
        return Drafts(found)

    def unprepared(self, sequence: Sequence) -> int:
        """None."""
        return 0


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


def continuation(tokens: np.ndarray, count: int) -> list[int]:
    """What followed the last earlier occurrence of as many of the last tokens as possible.

    Args:
        tokens: of the sequence.
        count: how many tokens are wanted.

    Returns:
        So many tokens, or none if the last :data:`_LEAST` have not occurred before.
    """
    length = len(tokens)
    # The ends of earlier occurrences.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    for back in range(2, min(_MOST, length - 1) + 1):
        longer = ends[ends >= back]
        longer = longer[tokens[longer - back] == tokens[-back]]
        if not len(longer):
            if back <= _LEAST:
                return []
            break
        ends = longer
    if not len(ends) or length <= _LEAST:
        return []
    period = length - int(ends[-1])
    return [int(tokens[length - period + i % period]) for i in range(count)]
