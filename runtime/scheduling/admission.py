"""Admission by the predicted peak of the cache, so that sequences do not preempt each other. Touches no tensor."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from ..blocks.block_cache import BlockCache
from ..requests.sequence import Sequence

_REMEMBERED = 1000
_ENOUGH = 16


class PeakAdmission:
    """Whether the cache will hold all that run and one more until they end, as in LightLLM's past-future scheduler
    (Gong et al., ASPLOS 2025).

    Outputs are predicted from the lengths of those that have ended: a sequence that has generated some tokens is expected to end
    where, on average, those that generated more did. Until enough have ended, no growth is expected.

    Args:
        cache: the block cache.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums: list[int] | None = None  # of the longest outputs, longest last; None if outdated

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself."""
        length = len(sequence.generated)
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = None
        if len(self._recent) > _REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def allows(self, running: Iterable[Sequence], sequence: Sequence) -> bool:
        """Whether ``sequence`` may start beside ``running``."""
        if len(self._recent) < _ENOUGH:
            return True
        return self.peak([*running, sequence]) <= self._cache.blocks

    def peak(self, sequences: list[Sequence]) -> int:
        """The most blocks that these sequences are predicted to need at one time.

        All grow by a token a step, so the peak is where one of them ends: there, it and all that end later have grown by as much
        as it had left. A block that several of them share counts once.
        """
        size = self._cache.block_size
        left = sorted(((self._left(sequence), sequence) for sequence in sequences), key=lambda pair: -pair[0])
        most = held = 0
        seen: set[int] = set()
        for count, (steps, sequence) in enumerate(left, start=1):
            full = sequence.blocks[: len(sequence.tokens) // size]
            shared, before = self._cache.shared(full), len(seen)
            seen.update(shared)
            held += len(sequence.tokens) - size * (len(shared) - (len(seen) - before))
            # Each sequence's last block is half full on average.
            most = max(most, -(-(held + count * (steps + size // 2)) // size))
        return most

    def _left(self, sequence: Sequence) -> int:
        """The predicted number of tokens still to be generated."""
        request = sequence.request
        done = len(sequence.generated)
        longest = request.max_tokens - done
        if request.predicted_tokens is not None and request.predicted_tokens > done:
            return min(longest, request.predicted_tokens - done)
        if self._sums is None:
            self._sums = [0]
            for length in reversed(self._sorted):
                self._sums.append(self._sums[-1] + length)
        longer = len(self._sorted) - bisect_right(self._sorted, done)
        # One that outlives all others is expected to double.
        mean = self._sums[longer] / longer if longer else 2 * done + 1
        return max(0, min(longest, round(mean) - done))
