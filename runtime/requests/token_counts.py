"""How often a sequence has each of its tokens, for penalties, without counting all of them anew for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


class TokenCounts:
    """The distinct tokens of a growing list, from some place on, and how often they occur.

    Args:
        tokens: the list.
        start: the first that counts.
    """

    def __init__(self, tokens: Sequence[int], start: int) -> None:
        self._tokens, self._counted = tokens, start
        self._place: dict[int, int] = {}
        self._distinct, self._times = np.empty(64, np.int64), np.empty(64, np.float32)

    @contextmanager
    def counted(self, certain: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The distinct tokens and how often each occurs, while within.

        Args:
            certain: how many of the list's tokens stay; those after them are forgotten afterwards.
        """
        self._add(self._tokens[self._counted : certain])
        self._counted = max(self._counted, certain)
        tried = self._tokens[self._counted :]
        known = len(self._place)
        self._add(tried)
        count = len(self._place)
        try:
            yield self._distinct[:count], self._times[:count]
        finally:
            for token in tried:
                self._times[self._place[token]] -= 1
            for token in self._distinct[known:count].tolist():
                del self._place[token]

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self._place)
                if place == len(self._distinct):
                    self._distinct, self._times = (
                        np.concatenate([each, each]) for each in (self._distinct, self._times)
                    )
                self._distinct[place], self._times[place] = token, 0
            self._times[place] += 1
