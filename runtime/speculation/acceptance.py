"""How often draft tokens are right: on average, by how close the drafter's second choice came to them, and by how much of the text repeats itself."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ..requests.sequence import Sequence
from ..scheduling.plan import DraftPath

# Draft tokens are counted together whose second choice had odds of less than these against them.
_ODDS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
# As how many draft tokens what is known of all counts for those of one kind, and how fast the past is forgotten.
_ALL_COUNT, _KEPT = 4.0, 0.999

# Tokens that were looked up are counted together if fewer than so many tokens before them had occurred before; and how often they are assumed to
# be right before anything was compared: in the greedy text of a small model (smelt-6m) they were so often or more often.
_MATCHED = (3, 4, 5, 8, 16)
_FIRST_BY_MATCH, _FIRST_COUNTS = (0.4, 0.55, 0.65, 0.75, 0.9, 0.95), 8.0


class AcceptanceShare:
    """How often a draft token is accepted whose predecessors were."""

    def __init__(self) -> None:
        self.accepted = self.tried = 0.0

    def add(self, accepted: int, tried: int, kept: float) -> None:
        """Count some more; those before them count ``kept`` times as much for each."""
        self.accepted = self.accepted * kept**tried + accepted
        self.tried = self.tried * kept**tried + tried

    def fade(self, kept: float) -> None:
        """What was learned counts less: it is tried again some day."""
        self.accepted, self.tried = self.accepted * kept, self.tried * kept

    def share(self, prior: float, counts: float) -> float:
        """The share, if what was assumed before anything was tried counts as so many tokens."""
        return min(0.995, (self.accepted + prior * counts) / (self.tried + counts))


class AcceptanceByOdds:
    """How often a draft token is accepted, by the odds of the drafter's second choice against it: from 0, if that was out of the question, to 1.

    A compressed model seldom errs where it is sure, and most of the tokens that are rejected are those that it was least sure of.

    Attributes:
        is_known: whether anything was counted.
    """

    def __init__(self) -> None:
        self._shares = [AcceptanceShare() for _ in range(len(_ODDS) + 1)]
        self.is_known = False

    def add(self, odds: SequenceOf[float], accepted: int) -> None:
        """Count the tokens of a chain that were tried: the first ones were accepted, one after them, if there is one, was not."""
        for i, each in enumerate(odds):
            self._of(each).add(int(i < accepted), 1, _KEPT)
        self.is_known = self.is_known or bool(odds)

    def share(self, odds: float, of_all: float) -> float:
        """The share; before anything is known the share of all tokens."""
        return self._of(odds).share(of_all, _ALL_COUNT)

    def _of(self, odds: float) -> AcceptanceShare:
        return self._shares[bisect_right(_ODDS, odds)]


class AcceptanceByMatch:
    """How often tokens that were looked up are right, by how many tokens before them had occurred before: of two that is chance, of ten seldom."""

    def __init__(self) -> None:
        self._shares: dict[int, AcceptanceShare] = {}

    def add(self, matched: int, right: int, compared: int) -> None:
        """Count the tokens of a draft that were compared with what came: the first ones were right, one after them, if there is one, was not."""
        self._shares.setdefault(bisect_right(_MATCHED, matched), AcceptanceShare()).add(right, compared, _KEPT)

    def share(self, matched: int, of_all: float | None = None) -> float:
        """The share.

        Args:
            matched: how many tokens had occurred before.
            of_all: of those of all sequences, if these are of one.
        """
        kind = bisect_right(_MATCHED, matched)
        prior, counts = (_FIRST_BY_MATCH[kind], _FIRST_COUNTS) if of_all is None else (of_all, _ALL_COUNT)
        known = self._shares.get(kind)
        return prior if known is None else known.share(prior, counts)


@dataclass(frozen=True)
class WorthOfTokens:
    """Lets drafts grow while another token is expected to bring more than its time does otherwise, and branch where that is so.

    Attributes:
        by_odds: how often tokens are accepted, by their odds.
        of_all: how often all are.
        caught: how often the second choice is right where the first is wrong.
        of_next: how often those of a sequence are, which is what is known of a token before it is chosen.
        speed: tokens per second.
        drafting: seconds of a drafter's step by its sequences.
        row: seconds of verifying a token.
    """

    by_odds: AcceptanceByOdds
    of_all: float
    caught: float
    of_next: Mapping[Sequence, float]
    speed: float
    drafting: Callable[[int], float]
    row: float

    def going_on(self, paths: SequenceOf[DraftPath]) -> set[int]:
        """The places of the paths that get another token.

        A step of the drafter takes about as long for one path as for several, so that all are decided on together.
        """
        values = [(self._reached(path) * self.of_next[path.sequence], place) for place, path in enumerate(paths)]
        values.sort(key=lambda each: each[0], reverse=True)
        best, count, brought = 0.0, 0, 0.0
        for i, (value, _) in enumerate(values, start=1):
            brought += value
            gain = brought - self.speed * (self.drafting(i) + i * self.row)
            if gain > best:
                best, count = gain, i
        return {place for _, place in values[:count]}

    def branching(self, odds: SequenceOf[float]) -> list[int]:
        """The places at which the second choice is right often enough for its row, the likeliest first."""
        reached, worth = 1.0, []
        for place, each in enumerate(odds):
            share = self.by_odds.share(each, self.of_all)
            gain = reached * (1 - share) * self.caught
            if gain > self.speed * self.row:
                worth.append((gain, place))
            reached *= share
        return [place for _, place in sorted(worth, reverse=True)]

    def _reached(self, path: DraftPath) -> float:
        shares = [self.by_odds.share(each, self.of_all) for each in path.odds]
        if path.leaves is not None:
            shares[path.leaves] = (1 - shares[path.leaves]) * self.caught
        return math.prod(shares)
