"""Drafts from a sequence's own text: what followed the last time that its last tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from weakref import WeakKeyDictionary

import numpy as np

from ..requests.sequence import Sequence
from ..scheduling.plan import StepPlan
from .acceptance import AcceptanceByMatch
from .drafter import Chains, Drafts
from .tree import DraftBranch, TokenTree

# Tokens that must have occurred before, at least and at most.
_LEAST, _MOST = 2, 5
# Up to so many are counted.
_COUNTED = 16
# So many of the last occurrences of two tokens are looked at.
_TRIED = 64


class LookupDrafter:
    """Prompt lookup (n-grams): for outputs that repeat parts of their prompt or of themselves, at no cost.

    As in Saxena's prompt lookup decoding and in vLLM's ``ngram``, but of several earlier places the last one is taken, and a draft that
    reaches the end of the sequence goes on with itself. Branches are what followed at others, where that was something else.

    How often its tokens are right is learned from the texts alone, by how many of the last tokens had occurred before: what would have been
    drafted is compared with what came, whether it was drafted or not.

    Attributes:
        longest_branch: as long as the chain.
    """

    longest_branch: int | None = None

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()
        self._of_all = AcceptanceByMatch()

    def propose(self, plan: StepPlan, chains: Chains | None = None) -> Drafts:
        """Drafts for the sequences whose last tokens occurred before."""
        found = {}
        for chunk in plan.chunks:
            if chunk.drafts:
                text = self._read(chunk.sequence)
                places = [] if text.place is None else [text.place]
                if chunk.spare:
                    places = continued_at(np.array(text.tokens), 1 + len(chunk.spare))
                if places:
                    lengths = [chunk.drafts, *parts_of(chunk.branched, len(places) - 1)]
                    chain, *others = (
                        continuation(text.tokens, place, count) for place, count in zip(places, lengths, strict=True)
                    )
                    found[chunk.sequence] = TokenTree(chain, [DraftBranch(0, other) for other in others if other])
        return Drafts(found)

    def matched(self, sequence: Sequence) -> int:
        """How many of a sequence's last tokens occurred before, where a draft of it would begin; 0 if there would be none."""
        return self._read(sequence).matched

    def share(self, sequence: Sequence) -> float:
        """How often tokens of such a draft are right if those before them are; 0 if there would be none."""
        text = self._read(sequence)
        return text.acceptance.share(text.matched, self._of_all.share(text.matched)) if text.matched else 0.0

    def unprepared(self, sequence: Sequence) -> int:
        """None."""
        return 0

    def replaced(self, sequence: Sequence, block: int, by: int) -> None:
        """Nothing: it has no cache."""

    def _read(self, sequence: Sequence) -> _Text:
        """A sequence's text as it is by now."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _Text()
        if len(text.tokens) < len(sequence.tokens):
            compared = text.extend(sequence.tokens)
            if compared is not None:
                self._of_all.add(text.matched, *compared)
                text.acceptance.add(text.matched, *compared)
            text.look_up()
        return text


class _Text:
    """A sequence's tokens, where each pair of them ended, and what follows the last ones.

    Attributes:
        tokens: all that were read.
        place: after the occurrence of the last tokens that a draft would go on from; None if there is none.
        matched: how many of the last tokens occurred there.
        acceptance: how often drafts of this sequence would have been right.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, int], list[int]] = {}
        self.place: int | None = None
        self.matched = 0
        self.acceptance = AcceptanceByMatch()

    def extend(self, tokens: list[int]) -> tuple[int, int] | None:
        """Add those that have come.

        Returns:
            How many of a draft's first tokens are the same, and how many were compared; None if there would have been no draft.
        """
        count = len(self.tokens)
        came = tokens[count:]
        compared = None
        if self.place is not None:
            expected = continuation(self.tokens, self.place, min(len(came), _COUNTED))
            right = next((i for i, (a, b) in enumerate(zip(expected, came, strict=False)) if a != b), len(expected))
            compared = right, min(right + 1, len(expected))
        # That of the last two is not an earlier one until others follow.
        for end in range(max(count, 2), len(tokens)):
            self._ends.setdefault((tokens[end - 2], tokens[end - 1]), []).append(end)
        self.tokens += came
        return compared

    def look_up(self) -> None:
        """Find where the last tokens occurred before: the last place where the most of them did, as far as :data:`_MOST`."""
        tokens = self.tokens
        self.place, self.matched = None, 0
        ends = self._ends.get((tokens[-2], tokens[-1]), ()) if len(tokens) > 1 else ()
        for end in ends[: -_TRIED - 1 : -1]:
            count = matched_at(tokens, end, _MOST)
            if count > self.matched:
                self.place, self.matched = end, count
                if count == _MOST:
                    self.matched = matched_at(tokens, end, _COUNTED)
                    return


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


def matched_at(tokens: SequenceOf[int], place: int, most: int) -> int:
    """How many of the last tokens are before a place, too, of at most so many."""
    last, count = len(tokens) - 1, 0
    while count < min(most, place) and tokens[place - 1 - count] == tokens[last - count]:
        count += 1
    return count


def continuation(tokens: SequenceOf[int], place: int, count: int) -> list[int]:
    """So many tokens from a place on; from the end of the sequence on, those of the continuation itself."""
    found = list(tokens[place : place + count])
    while len(found) < count:
        found += found[: count - len(found)]
    return found


def parts_of(count: int, parts: int) -> list[int]:
    """A number divided into nearly equal parts, the larger first."""
    return [(count + parts - 1 - i) // parts for i in range(parts)]
