"""How much to draft: as many tokens as are expected to pay, by acceptance, load and measured times. Touches no tensor."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

from ..requests.sequence import Sequence
from ..scheduling.drafting import DraftSize, most_drafts, takes_drafts
from ..scheduling.plan import StepPlan
from .acceptance import AcceptanceByOdds, AcceptanceShare, WorthOfTokens
from .drafter import Lookup
from .fixed_length import Drafted, FixedDrafts, looked_up_in
from .preparing import Preparing
from .sources import NO_BRANCHES, DraftBranches, DraftLengths, DraftSource
from .times_by_rows import TimesByRows

# The share of all time that drafts may have cost more than they gained, and the seconds in which half of the past is forgotten.
_MOST_LOST, _REMEMBERED = 0.02, 30.0
# More draft tokens must be expected to be faster by this factor.
_BETTER = 1.01
# So many more draft tokens that are not faster, and longer drafts are not looked at.
_PATIENCE = 4
# Acceptance that is assumed before anything was drafted, and how many tokens that counts as.
_FIRST, _FIRST_COUNTS = 0.75, 8.0
# The same of branches, where the chain is wrong.
_FIRST_CAUGHT = 0.4
# Of a sequence: as how many tokens what is known of all others counts, and how fast its own past is forgotten.
_OTHERS_COUNT, _KEPT = 4.0, 0.97
# The share of a step's time that deciding may take where nothing is drafted, and learning as well; therefore up to so many steps are
# not decided on, or not learned from.
_MOST_DECIDING, _MOST_SKIPPED = 0.001, 64
# The share of all time that may be lost before what could be looked up is not looked up at every step, and of a step's time that it may then take.
_MOST_ASKING, _MOST_LOOKING = 0.005, 0.01
# Steps of a number of sequences without drafts that are measured before it drafts for as many, and the share of the known time that is so much
# less that more are.
_MEASURED, _SHORTER = 3, 0.95
# Steps with drafts after which some without are measured again, since what drafts gain is known only beside them: the more, the more they
# gain; and how many without follow each other then, at least.
_FRESH, _LEAST_FRESH, _PER_GAIN = 64, 8, 64
_COMPARED = 2
# Steps with drafts after which they have another length: what that takes may be known from the start only, when something else ran.
_ANOTHER = 32
_OTHERS: tuple[Callable[[int], int], ...] = (
    lambda count: count + 1,
    lambda count: max(1, count - 1),
    lambda count: (count + 1) // 2,
)
# Tokens that a drafter computes together in a step that takes about as long as for one, as long as nothing else is known.
_TOGETHER = 16
# Of all sequences together.
_ALL_KEPT = 0.999
# Of weights beside which all drafts are looked up.
_UNUSED = 0.99


class AdaptiveDrafts(FixedDrafts):
    """As many as are expected to give the most tokens per second, in a chain alone or with branches.

    What a step would take with each number of draft tokens is known from measured steps; how many of them would be accepted, from
    those before, of each sequence and of all. Nothing is drafted where that is expected to be the fastest, except now and then
    a token to see whether it still is; and where drafts pay, a step now and then has none. Whatever the estimates say, drafts stop while
    those of the last minute have cost more than 2% of its time, compared with the same tokens without drafts.

    Args:
        most: the most tokens of a chain.
        verifying: times of the model's steps, as long as no others are known.
        drafting: times of the drafter's; None if nothing drafts with weights.
        unprepared: how many of a sequence's tokens the drafter would have to compute first.
        branches: the most branches of a chain.
        longest_branch: how many tokens each may have; None for as many as the chain.
        lookup: what could be looked up; None if nothing is.
        most_found: the most tokens of a chain that is.
        ends_by_odds: whether chains can end where the drafter is not sure.
        clock: what time it is, in seconds, for what deciding itself takes.
    """

    def __init__(
        self,
        most: int,
        verifying: TimesByRows,
        drafting: TimesByRows | None,
        unprepared: Callable[[Sequence], int] = lambda _: 0,
        branches: int = 0,
        longest_branch: int | None = 1,
        *,
        lookup: Lookup | None = None,
        most_found: int = 0,
        ends_by_odds: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(most, branches, longest_branch, lookup)
        self._most_found = most_found
        self._preparing = Preparing(unprepared)
        self._verifying, self._drafting = verifying, drafting
        self._plain = TimesByRows()  # of steps without drafts
        self._first: dict[int, list[float]] = {}  # the first ones of each number of sequences
        self._left: dict[int, int] = {}  # steps with drafts until one without
        self._fresh = _FRESH  # after the next one without
        self._until_another, self._others = _ANOTHER, itertools.cycle(_OTHERS)
        self._of_all = AcceptanceShare()
        self._caught = AcceptanceShare()
        self._of_each: WeakKeyDictionary[Sequence, AcceptanceShare] = WeakKeyDictionary()
        self._by_odds = AcceptanceByOdds()
        self._ends_by_odds = ends_by_odds
        self._clock = clock
        self._lost = self._spent = 0.0
        self._trying = 0.0  # what tries were expected to lose
        self._deciding = 0.0  # seconds that the last decision took
        self._skipped = self._unlearned = 0  # steps that are not decided on, or not learned from
        self._passed = 0.0  # seconds of those that were not learned from

    def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        """The sizes that give the step the most tokens per second."""
        self._deciding = 0.0
        if self._skipped > 0:
            self._skipped -= 1
            return {}
        begun = self._clock()
        found = self._chosen(plan, budget)
        self._deciding = self._clock() - begun
        self._lost += self._deciding
        # What can be looked up comes and goes.
        may_skip = self._lookup is None or self._lost > _MOST_ASKING * self._spent
        if not found and may_skip and self._verifying.is_known and not self._compares(plan):
            # Deciding takes less than a millisecond, which is not nothing beside a small model's steps.
            most = _MOST_DECIDING if self._lookup is None else _MOST_LOOKING
            self._skipped = min(_MOST_SKIPPED, int(self._deciding / (most * self._without_drafts(plan))))
        return found

    def _compares(self, plan: StepPlan) -> bool:
        """Whether the step is to have no drafts so that others can be compared with it."""
        return self._left.get(len(plan.chunks), 0) <= 0 and not plan.has_prompts

    def _as_long(self, lengths: list[int], sources: list[DraftSource]) -> list[int]:
        """Another length than the best one, now and then."""
        self._until_another -= 1
        if self._until_another > 0:
            return lengths
        self._until_another, other = _ANOTHER, next(self._others)
        return [length and min(other(length), source.most) for length, source in zip(lengths, sources, strict=True)]

    def _without_drafts(self, plan: StepPlan) -> float:
        """Seconds of a step. How long one with prompts would take is known from those that verify as many tokens."""
        return self._verifying.of(plan.tokens) if plan.has_prompts else self._plain.of(len(plan.chunks))

    def _chosen(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        taking = [(i, chunk.sequence) for i, chunk in enumerate(plan.chunks) if takes_drafts(chunk)]
        if not taking or budget <= 0 or self._lost > _MOST_LOST * self._spent:
            return {}
        if not self._verifying.is_known or self._compares(plan):
            return {}
        rows = plan.tokens
        plain = self._without_drafts(plan)
        # What each row more would have to bring.
        row = max(0.0, self._verifying.of(rows + len(taking)) - self._verifying.of(rows)) / len(taking) / plain
        sources = self._sources([sequence for _, sequence in taking], budget, row, plain)
        found = DraftLengths(len(taking) / plain, [0] * len(taking), [NO_BRANCHES] * len(taking))
        for looks_up in (True, False):  # what is looked up takes rows only, and may be longer
            found = self._grown(found, sources, row * len(taking), rows, budget, looks_up=looks_up)
        best, chosen, branches = found.speed, found.lengths, found.branches
        usual = chosen
        if not any(chosen):
            chosen = self._tried([sequence for _, sequence in taking], sources, rows, plain)
        else:
            self._fresh = min(_FRESH, max(_LEAST_FRESH, int(_PER_GAIN * (best * plain / len(taking) - 1))))
            gain = plain / len(taking) - 1 / best  # seconds that drafts save for each token
            for i, ((_, sequence), source) in enumerate(zip(taking, sources, strict=True)):
                if chosen[i] and not source.looks_up and not self._preparing.pays(sequence, gain, self._prepared_guess):
                    chosen[i] = 0
            usual, chosen = chosen, self._as_long(chosen, sources)
        sizes = {
            place: DraftSize(length, others.count, others.tokens, looks_up=source.looks_up)
            for (place, _), length, others, source in zip(taking, chosen, branches, sources, strict=True)
            if length
        }
        by_weights = {place: size for place, size in sizes.items() if not size.looks_up}
        if chosen is usual and by_weights and self._by_odds.is_known:
            limits = {place: source for (place, _), source in zip(taking, sources, strict=True)}
            others = sum(size.tokens for size in sizes.values() if size.looks_up)
            sizes |= self._by_rule(plan, by_weights, limits, best, rows + others, budget - others)
        return sizes

    def _grown(
        self, choice: DraftLengths, sources: list[DraftSource], row: float, rows: int, budget: int, *, looks_up: bool
    ) -> DraftLengths:
        """The best length of the drafts of one kind, with those of the other as they are.

        Args:
            choice: without them.
            sources: of each sequence's draft.
            row: what a row more would have to bring, in tokens.
            rows: of the step without drafts.
            budget: how many tokens all drafts may have.
            looks_up: which kind.
        """
        useful = [self._useful(source, row) if source.looks_up == looks_up else 0 for source in sources]
        best, longest, seconds = choice, 0, 0.0
        lengths, reached = list(choice.lengths), [1.0] * len(sources)
        drafted, tokens = sum(lengths), self._tokens([source.share for source in sources], lengths)
        for count in range(1, max(useful) + 1):
            longer = [place for place, most in enumerate(useful) if most >= count]
            drafted += len(longer)
            if drafted > budget or count > longest + _PATIENCE:
                break
            for place in longer:
                reached[place] *= sources[place].share
                tokens += reached[place]
                lengths[place] = count
            if not looks_up:
                seconds += self._drafting_seconds_of(len(longer))
            speed = tokens / (seconds + self._verifying.of(rows + drafted))
            if speed > _BETTER * best.speed:
                best, longest = DraftLengths(speed, list(lengths), [NO_BRANCHES] * len(sources)), count
            if self._branches and not self._by_odds.is_known:
                others = [
                    self._useful_branches(source, length, row) for source, length in zip(sources, lengths, strict=True)
                ]
                more = sum(each.tokens for each in others)
                if more == 0 or drafted + more > budget:
                    continue
                gained = sum(each.gained for each in others)
                speed = (tokens + gained) / (seconds + self._verifying.of(rows + drafted + more))
                if speed > _BETTER * best.speed:
                    best, longest = DraftLengths(speed, list(lengths), others), count
        return best

    def _sources(self, sequences: list[Sequence], budget: int, row: float, plain: float) -> list[DraftSource]:
        """What drafts for each sequence: of two, what brings more for its time.

        Args:
            sequences: all that may have drafts.
            budget: how many tokens all drafts may have.
            row: the share of a step's time without drafts that a row more takes.
            plain: that time.
        """
        count = len(sequences)
        # If all did the same.
        of_row, of_step = row * count, self._drafting_seconds_of(count) / plain
        found = []
        for sequence in sequences:
            limit = min(most_drafts(sequence), budget)
            of_weights = DraftSource(self._share(sequence), 0 if self._drafting is None else min(self._count, limit))
            looked_up = of_weights
            if self._lookup is not None:
                share = self._lookup.share(sequence)
                looked_up = DraftSource(share, min(self._most_found, limit) if share else 0, looks_up=True)
            speed = of_weights.speed(of_row + of_step)
            is_better = self._drafting is None or looked_up.speed(of_row) > speed
            if looked_up.most and not is_better:  # or there would be no draft at all
                gain = plain / count * (1 - 1 / speed)
                is_better = not self._preparing.pays(sequence, gain, self._prepared_guess)
            found.append(looked_up if is_better else of_weights)
        return found

    def _by_rule(
        self,
        plan: StepPlan,
        sizes: dict[int, DraftSize],
        sources: dict[int, DraftSource],
        speed: float,
        rows: int,
        budget: int,
    ) -> dict[int, DraftSize]:
        """Chains that end where another token would bring less than its time does at this speed, and may be longer until then; branches likewise.

        Args:
            plan: the step without drafts.
            sizes: of the drafts by weights, which would be the fastest if all of a sequence's tokens were right as often.
            sources: of all sequences' drafts.
            speed: that is expected, in tokens per second.
            rows: of the step without drafts by weights.
            budget: how many tokens these may have.
        """
        count, tokens = len(sizes), sum(size.tokens for size in sizes.values())
        drafting = self._drafting_seconds_of(count) / count
        # As long as a token that is sure to be reached would be worth its time in so long a step.
        longer, surest = 0, max(sources[place].share for place in sizes)
        while longer < self._count and tokens + count <= budget:
            more = self._verifying.of(rows + tokens + count) - self._verifying.of(rows + tokens)
            if speed * (drafting + max(0.0, more) / count) >= surest:
                break
            longer, tokens = longer + 1, tokens + count
        row = max(0.0, self._verifying.of(rows + tokens) - self._verifying.of(rows)) / tokens
        everyone = self._of_all.share(_FIRST, _FIRST_COUNTS)
        of_next = {plan.chunks[place].sequence: source.share for place, source in sources.items()}
        rule = WorthOfTokens(
            self._by_odds,
            everyone,
            self._caught.share(_FIRST_CAUGHT, _FIRST_COUNTS),
            of_next,
            speed,
            self._drafting_seconds_of,
            row,
        )
        found = {}
        for place, size in sizes.items():
            chain = min(size.chain + longer, sources[place].most)
            # They take what the chain leaves.
            branches = min(self._branches, chain - 1)
            found[place] = DraftSize(
                chain, branches, branches if self._longest_branch == 1 else max(0, chain - 1), rule
            )
        return found

    def begin_load(self) -> None:
        """Forget what drafts have cost; what is known of times and acceptance stays."""
        self._lost = self._spent = self._trying = 0.0
        self._preparing.begin_load()

    def ran(self, plan: StepPlan, drafted: Drafted, now: float) -> None:
        """Learn from a step."""
        total = now - plan.at
        if self._unlearned > 0 and not drafted.of and not self._compares(plan):
            self._unlearned -= 1
            self._passed += total
            return
        begun = self._clock()
        super().ran(plan, drafted, now)
        self._learn(plan, drafted, total)
        learning = self._clock() - begun
        self._spent, self._lost = self._spent + learning, self._lost + learning
        if not drafted.of and total > 0:
            # As in deciding: a few microseconds of a small model's step.
            self._unlearned = min(_MOST_SKIPPED, int(learning / (_MOST_DECIDING * total)))

    def _learn(self, plan: StepPlan, drafted: Drafted, total: float) -> None:
        kept = 0.5 ** ((total + self._passed) / _REMEMBERED)
        self._spent = self._spent * kept + total + self._passed
        self._preparing.passed(total + self._passed)
        self._lost, self._trying, self._passed = self._lost * kept, self._trying * kept, 0.0
        self._preparing.learn(drafted.prepared, drafted.preparing)
        self._preparing.ended(chunk.sequence for chunk in plan.chunks)
        if plan.has_prompts:
            return
        sequences = len(plan.chunks)
        # All of the step but deciding: also what its tokens take in Python.
        seconds = total - drafted.preparing - self._deciding
        if not drafted.of:
            self._learn_plain(sequences, seconds)
            return
        rows = sequences + sum(each.drafted + each.branched for each in drafted.of.values())
        self._verifying.measured(rows, seconds - drafted.drafting)
        self._learn_drafting(plan, drafted)
        # The same tokens, a step for each of a sequence's.
        gained = sum(each.accepted + each.on_branch for each in drafted.of.values()) / sequences
        lost = seconds - self._plain.of(sequences) * (1 + gained)
        self._lost += lost
        if not looked_up_in(plan).issuperset(drafted.of):
            self._preparing.gained(-lost)
        self._left[sequences] -= 1

    def _learn_plain(self, sequences: int, seconds: float) -> None:
        if sequences in self._left:
            if self._left[sequences] <= 0:
                self._left[sequences] -= 1
            # Otherwise what is known is too long, and the next step has no drafts either.
            if self._left[sequences] <= -_COMPARED and seconds > _SHORTER * self._plain.of(sequences):
                self._left[sequences] = self._fresh
            # Longer contexts make steps with drafts longer, too.
            self._plain.measured(sequences, seconds)
            self._verifying.measured(sequences, seconds)
            return
        first = self._first.setdefault(sequences, [])
        first.append(seconds)
        if len(first) < _MEASURED:
            return
        seconds = statistics.median(self._first.pop(sequences))
        if not self._plain.is_known and self._verifying.is_known:
            # What was measured before is without what the engine does between the model's steps.
            self._verifying.shift(max(0.0, seconds - self._verifying.of(sequences)))
        self._plain.measured(sequences, seconds)
        self._verifying.measured(sequences, seconds)  # there may be none of so many rows yet
        self._left[sequences] = _LEAST_FRESH

    def _learn_drafting(self, plan: StepPlan, drafted: Drafted) -> None:
        looked_up = looked_up_in(plan)
        by_weights = {sequence: outcome for sequence, outcome in drafted.of.items() if sequence not in looked_up}
        if by_weights and self._drafting is not None and self._drafting.is_known:
            # Of all its steps together; each is as much longer or shorter than known as all are.
            steps = itertools.zip_longest(*(each.steps for each in by_weights.values()), fillvalue=0)
            expected = sum(self._drafting_seconds_of(sum(each)) for each in steps)
            count = len(by_weights)
            self._drafting.measured(count, self._drafting.of(count) * drafted.drafting / expected)
        for sequence, outcome in by_weights.items():
            self._of_all.add(outcome.accepted, outcome.tried, _ALL_KEPT)
            self._of_each.setdefault(sequence, AcceptanceShare()).add(outcome.accepted, outcome.tried, _KEPT)
            if self._ends_by_odds:
                self._by_odds.add(outcome.odds[: outcome.tried], outcome.accepted)
        if looked_up and not by_weights:  # or weights that were wrong once would never be tried again
            self._of_all.fade(_UNUSED)
            for sequence in looked_up & set(self._of_each):
                self._of_each[sequence].fade(_KEPT)
        for outcome in drafted.of.values():
            if outcome.caught is not None:
                self._caught.add(outcome.caught, 1, _ALL_KEPT)
            elif outcome.is_chain_wrong:
                self._caught.fade(_ALL_KEPT)

    @property
    def _prepared_guess(self) -> float:
        """Seconds of a token that the drafter prepares, before any was measured."""
        return self._drafting_seconds_of(_TOGETHER) / _TOGETHER

    def _share(self, sequence: Sequence) -> float:
        everyone = self._of_all.share(_FIRST, _FIRST_COUNTS)
        own = self._of_each.get(sequence)
        return everyone if own is None else own.share(everyone, _OTHERS_COUNT)

    @staticmethod
    def _useful(source: DraftSource, row: float) -> int:
        """How many of a sequence's draft tokens are worth their rows: those likely enough to be reached and accepted."""
        count, reached = 0, source.share
        # A token is worth the time of a step, which gives each of the sequences one.
        while count < source.most and reached >= row:
            count, reached = count + 1, reached * source.share
        return count

    def _useful_branches(self, source: DraftSource, length: int, worth: float) -> DraftBranches:
        """The branches beside a chain that are worth their rows: what each is expected to gain is at least ``worth``."""
        if source.looks_up and self._drafting is not None:
            return NO_BRANCHES
        share = source.share
        caught = self._caught.share(_FIRST_CAUGHT, _FIRST_COUNTS)
        count = tokens = 0
        gained = 0.0
        if source.looks_up or self._drafting is None:  # all leave it at its beginning, and one of them may be right
            reached = (1 - share) * caught
            while tokens < self._branches * length and reached >= worth * self._branches:
                tokens, gained, reached = tokens + self._branches, gained + reached, reached * share
            return DraftBranches(self._branches if tokens else 0, tokens, gained)
        # Each leaves it at another place.
        reached = (1 - share) * caught
        while count < min(self._branches, length) and reached >= worth:
            count, gained, reached = count + 1, gained + reached, reached * share
        return DraftBranches(count, count, gained)

    @staticmethod
    def _tokens(shares: list[float], lengths: list[int]) -> float:
        return sum((1 - share ** (length + 1)) / (1 - share) for share, length in zip(shares, lengths, strict=True))

    def _drafting_seconds(self, lengths: list[int]) -> float:
        return sum(
            self._drafting_seconds_of(sum(length > i for length in lengths)) for i in range(max(lengths, default=0))
        )

    def _drafting_seconds_of(self, sequences: int) -> float:
        """Of a draft token by weights for each of some sequences."""
        return 0.0 if self._drafting is None or not sequences else self._drafting.of(sequences)

    def _tried(self, sequences: list[Sequence], sources: list[DraftSource], rows: int, plain: float) -> list[int]:
        """A token for each sequence, if it may be lost; none otherwise."""
        ready = self._preparing.tried(sequences, self._prepared_guess)
        lengths = [min(int(each or source.looks_up), source.most) for each, source in zip(ready, sources, strict=True)]
        if not any(lengths):
            return lengths
        by_weights = [length for length, source in zip(lengths, sources, strict=True) if not source.looks_up]
        seconds = self._drafting_seconds(by_weights) + self._verifying.of(rows + sum(lengths))
        expected = seconds - plain * self._tokens([source.share for source in sources], lengths) / len(sources)
        # What was gained before is no reason to lose it.
        if max(self._lost, 0.0) + self._trying + expected > _MOST_LOST / 2 * self._spent:
            return [0] * len(lengths)
        self._trying += expected
        return lengths
