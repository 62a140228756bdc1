"""How many tokens to draft: as many as are expected to pay, by acceptance, load and measured times. Touches no tensor."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from ..requests.sequence import Sequence
from ..scheduling.drafting import most_drafts, takes_drafts
from ..scheduling.plan import StepPlan
from .counts import DraftCounts
from .times_by_rows import TimesByRows

# The share of all time that drafts may have cost more than they gained, and the seconds in which half of the past is forgotten.
_MOST_LOST, _REMEMBERED = 0.02, 30.0
# More draft tokens must be expected to be faster by this factor.
_BETTER = 1.01
# Acceptance that is assumed before anything was drafted, and how many tokens that counts as.
_FIRST, _FIRST_COUNTS = 0.75, 8.0
# Of a sequence: as how many tokens what is known of all others counts, and how fast its own past is forgotten.
_OTHERS_COUNT, _KEPT = 4.0, 0.97
# The share of a step's time that deciding may take where nothing is drafted, and the most steps that are not decided on therefore.
_MOST_DECIDING, _MOST_SKIPPED = 0.005, 64
# Tokens that a drafter may compute before a draft that is only tried.
_FEW = 16
# Of all sequences together.
_ALL_KEPT = 0.999


@dataclass(frozen=True)
class Drafted:
    """A step's drafts.

    Attributes:
        drafted, accepted: tokens of each sequence that had a draft.
        drafting, verifying: seconds of both parts of the step.
        prepared, preparing: tokens before the drafts that the drafter computed first, and the seconds that took.
    """

    drafted: Mapping[Sequence, int]
    accepted: Mapping[Sequence, int]
    drafting: float
    verifying: float
    prepared: int = 0
    preparing: float = 0.0


class _Acceptance:
    """How often a draft token is accepted whose predecessors were."""

    def __init__(self) -> None:
        self.accepted = self.tried = 0.0

    def add(self, accepted: int, tried: int, kept: float) -> None:
        self.accepted = self.accepted * kept**tried + accepted
        self.tried = self.tried * kept**tried + tried

    def share(self, prior: float, counts: float) -> float:
        return min(0.995, (self.accepted + prior * counts) / (self.tried + counts))


class FixedDrafts:
    """The same number of draft tokens for every sequence.

    Args:
        count: how many.

    Attributes:
        total: what became of them.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.total = DraftCounts()

    def counts(self, plan: StepPlan, budget: int) -> dict[int, int]:
        """Always the same."""
        return {i: self._count for i, chunk in enumerate(plan.chunks) if takes_drafts(chunk)}

    def begin_load(self) -> None:
        """Another load begins, which what drafts cost before says nothing of."""

    def ran(self, plan: StepPlan, drafted: Drafted) -> None:
        """Count a step's drafts."""
        self.total.steps += bool(drafted.drafted)
        for sequence, count in drafted.drafted.items():
            self.total.add(count, drafted.accepted[sequence])


class AdaptiveDrafts(FixedDrafts):
    """As many as are expected to give the most tokens per second.

    What a step would take with each number of draft tokens is known from measured steps; how many of them would be accepted, from
    those before, of each sequence and of all. Nothing is drafted where that is expected to be the fastest, except now and then
    a token to see whether it still is. Whatever the estimates say, drafts stop while those of the last minute have cost more than 2%
    of its time, compared with the same tokens without drafts.

    Args:
        most: the most tokens of a draft.
        verifying: times of the model's steps.
        drafting: times of the drafter's; None if it has no steps.
        unprepared: how many of a sequence's tokens the drafter would have to compute first.
    """

    def __init__(
        self,
        most: int,
        verifying: TimesByRows,
        drafting: TimesByRows | None,
        unprepared: Callable[[Sequence], int] = lambda _: 0,
    ) -> None:
        super().__init__(most)
        self._unprepared = unprepared
        self._per_prepared: float | None = None  # seconds of a token
        self._verifying, self._drafting = verifying, drafting
        self._of_all = _Acceptance()
        self._of_each: WeakKeyDictionary[Sequence, _Acceptance] = WeakKeyDictionary()
        self._lost = self._spent = 0.0
        self._trying = 0.0  # what tries were expected to lose
        self._deciding = 0.0  # seconds that the last decision took
        self._skipped = 0  # steps that are not decided on
        self._per_draft = 0.0  # seconds of a draft token, without a drafter's own steps

    def counts(self, plan: StepPlan, budget: int) -> dict[int, int]:
        """The number of draft tokens of each chunk that gives the step the most tokens per second."""
        self._deciding = 0.0
        if self._skipped > 0:
            self._skipped -= 1
            return {}
        begun = time.perf_counter()
        found = self._chosen(plan, budget)
        self._deciding = time.perf_counter() - begun
        if not found and self._verifying.is_known:
            # Deciding takes less than a millisecond, which is not nothing beside a small model's steps.
            self._skipped = min(_MOST_SKIPPED, int(self._deciding / (_MOST_DECIDING * self._verifying.of(plan.tokens))))
        return found

    def _chosen(self, plan: StepPlan, budget: int) -> dict[int, int]:
        taking = [(i, chunk.sequence) for i, chunk in enumerate(plan.chunks) if takes_drafts(chunk)]
        if not taking or budget <= 0 or self._lost > _MOST_LOST * self._spent or not self._verifying.is_known:
            return {}
        shares = [self._share(sequence) for _, sequence in taking]
        most = [min(self._count, most_drafts(sequence), budget) for _, sequence in taking]
        rows = plan.tokens
        plain = self._verifying.of(rows)
        # Tokens per second, with what each row more would have to bring.
        best, chosen = len(taking) / plain, [0] * len(taking)
        row = max(0.0, self._verifying.of(rows + len(taking)) - plain) / len(taking) / plain
        for count in range(1, max(most) + 1):
            lengths = [
                self._useful(share, min(count, limit), row, len(taking))
                for share, limit in zip(shares, most, strict=True)
            ]
            if sum(lengths) > budget:
                break
            speed = self._tokens(shares, lengths) / self._seconds(rows, lengths)
            if speed > _BETTER * best:
                best, chosen = speed, lengths
        if not any(chosen):
            chosen = self._tried([sequence for _, sequence in taking], shares, most, rows, plain)
        else:
            gain = 1 - len(taking) / plain / best  # the share of all time that drafts save
            for i, (_, sequence) in enumerate(taking):
                left = sequence.request.grows_to - len(sequence.tokens)
                if chosen[i] and self._preparing(sequence) > gain * left * plain:
                    chosen[i] = 0
        return {place: length for (place, _), length in zip(taking, chosen, strict=True) if length}

    def begin_load(self) -> None:
        """Forget what drafts have cost; what is known of times and acceptance stays."""
        self._lost = self._spent = self._trying = 0.0

    def ran(self, plan: StepPlan, drafted: Drafted) -> None:
        """Learn from a step."""
        super().ran(plan, drafted)
        total = drafted.drafting + drafted.verifying + drafted.preparing + self._deciding
        kept = 0.5 ** (total / _REMEMBERED)
        self._spent, self._lost, self._trying = self._spent * kept + total, self._lost * kept, self._trying * kept
        if drafted.prepared:
            each = drafted.preparing / drafted.prepared
            self._per_prepared = each if self._per_prepared is None else (self._per_prepared + each) / 2
        if plan.has_prompts:
            return
        sequences = len(plan.chunks)
        rows = sequences + sum(drafted.drafted.values())
        seconds = drafted.drafting + drafted.verifying
        self._verifying.measured(rows, drafted.verifying)
        if drafted.drafted:
            self._learn_drafting(drafted)
            # The same tokens, a step for each of a sequence's.
            gained = sum(drafted.accepted.values()) / sequences
            lost = seconds - self._verifying.of(sequences) * (1 + gained)
            self._lost += lost
        self._lost += self._deciding

    def _learn_drafting(self, drafted: Drafted) -> None:
        counts = list(drafted.drafted.values())
        if self._drafting is None:
            self._per_draft += 0.1 * (drafted.drafting / sum(counts) - self._per_draft)
        elif self._drafting.is_known:
            # Of all its steps together; each is as much longer or shorter than known as all are.
            expected = self._drafting_seconds(counts)
            self._drafting.measured(len(counts), self._drafting.of(len(counts)) * drafted.drafting / expected)
        for sequence, count in drafted.drafted.items():
            accepted = drafted.accepted[sequence]
            tried = accepted + (accepted < count)
            self._of_all.add(accepted, tried, _ALL_KEPT)
            self._of_each.setdefault(sequence, _Acceptance()).add(accepted, tried, _KEPT)

    def _preparing(self, sequence: Sequence) -> float:
        """Seconds before the drafter can draft for a sequence."""
        count = self._unprepared(sequence)
        if count == 0 or self._drafting is None:
            return 0.0
        return self._drafting.of(1) if self._per_prepared is None else count * self._per_prepared

    def _share(self, sequence: Sequence) -> float:
        everyone = self._of_all.share(_FIRST, _FIRST_COUNTS)
        own = self._of_each.get(sequence)
        return everyone if own is None else own.share(everyone, _OTHERS_COUNT)

    @staticmethod
    def _useful(share: float, most: int, row: float, sequences: int) -> int:
        """How many of a sequence's draft tokens are worth their rows: those likely enough to be reached and accepted."""
        count, reached = 0, share
        # A token is worth the time of a step, which gives each of the sequences one.
        while count < most and reached >= row * sequences:
            count, reached = count + 1, reached * share
        return count

    @staticmethod
    def _tokens(shares: list[float], lengths: list[int]) -> float:
        return sum((1 - share ** (length + 1)) / (1 - share) for share, length in zip(shares, lengths, strict=True))

    def _seconds(self, rows: int, lengths: list[int]) -> float:
        return self._drafting_seconds(lengths) + self._verifying.of(rows + sum(lengths))

    def _drafting_seconds(self, lengths: list[int]) -> float:
        if self._drafting is None:
            return self._per_draft * sum(lengths)
        return sum(self._drafting.of(sum(length > i for length in lengths)) for i in range(max(lengths, default=0)))

    def _tried(
        self, sequences: list[Sequence], shares: list[float], most: list[int], rows: int, plain: float
    ) -> list[int]:
        """A token for each sequence, if it may be lost; none otherwise."""
        lengths = [min(1, limit) for limit in most]
        # For those that it would have to prepare itself for, a try is too dear.
        lengths = [
            0 if self._unprepared(sequence) > _FEW else length
            for sequence, length in zip(sequences, lengths, strict=True)
        ]
        expected = self._seconds(rows, lengths) - plain * self._tokens(shares, lengths) / len(shares)
        # What was gained before is no reason to lose it.
        if max(self._lost, 0.0) + self._trying + expected > _MOST_LOST / 2 * self._spent:
            return [0] * len(lengths)
        self._trying += expected
        return lengths
