"""Drafts from a sequence's own text: what followed the last time that its last tokens occurred."""

from __future__ import annotations

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
                places = continued_at(text.tokens, 1 + len(chunk.spare)) if chunk.spare else text.places
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
        if text.count < len(sequence.tokens):
            compared = text.extend(sequence.tokens)
            if compared is not None:
                self._of_all.add(text.matched, *compared)
                text.acceptance.add(text.matched, *compared)
            text.look_up()
        return text


class _Text:
    """A sequence's tokens as an array that grows with it, and what follows them.

    Attributes:
        count: of tokens.
        places: after the occurrence of the last tokens that a draft would go on from, if there is one.
        matched: how many of the last tokens occurred there.
        acceptance: how often drafts of this sequence would have been right.
    """

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.int64)
        self.count = 0
        self.places: list[int] = []
        self.matched = 0
        self.acceptance = AcceptanceByMatch()

    def extend(self, tokens: list[int]) -> tuple[int, int] | None:
        """Add those that have come.

        Returns:
            How many of a draft's first tokens are the same, and how many were compared; None if there would have been no draft.
        """
        came = tokens[self.count :]
        compared = None
        if self.places:
            expected = continuation(self.tokens, self.places[0], min(len(came), _COUNTED))
            right = next((i for i, (a, b) in enumerate(zip(expected, came, strict=False)) if a != b), len(expected))
            compared = right, min(right + 1, len(expected))
        count = len(tokens)
        if count > len(self._room):
            larger = np.empty(2 * count, dtype=np.int64)
            larger[: self.count] = self._room[: self.count]
            self._room = larger
        self._room[self.count : count] = came
        self.count = count
        return compared

    def look_up(self) -> None:
        """Find where the last tokens occurred before."""
        self.places = continued_at(self.tokens)
        self.matched = matched_at(self.tokens, self.places[0]) if self.places else 0

    @property
    def tokens(self) -> np.ndarray:
        """All of them."""
        return self._room[: self.count]


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


def matched_at(tokens: np.ndarray, place: int) -> int:
    """How many of the last tokens are before a place, too; no more than :data:`_COUNTED` are counted."""
    most = min(place, _COUNTED)
    differ = np.flatnonzero(tokens[place - most : place] != tokens[len(tokens) - most :])
    return most if not len(differ) else most - 1 - int(differ[-1])


def continuation(tokens: np.ndarray, place: int, count: int) -> list[int]:
    """So many tokens from a place on; from the end of the sequence on, those of the continuation itself."""
    length = len(tokens)
    return [int(tokens[place + i % (length - place)]) for i in range(count)]


def parts_of(count: int, parts: int) -> list[int]:
    """A number divided into nearly equal parts, the larger first."""
    return [(count + parts - 1 - i) // parts for i in range(parts)]
