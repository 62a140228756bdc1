"""The number of draft tokens, in worlds whose times and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from smelt.runtime.requests.params import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.drafting import DraftSize
from smelt.runtime.scheduling.plan import Chunk, DraftPath, StepPlan
from smelt.runtime.speculation.counts import DraftCounts, DraftOutcome
from smelt.runtime.speculation.fixed_length import Drafted
from smelt.runtime.speculation.length import AdaptiveDrafts
from smelt.runtime.speculation.times_by_rows import TimesByRows

ROWS = (1, 2, 4, 8, 16, 32, 64)


def times(seconds: Callable[[int], float], measured: tuple[int, ...] = ROWS) -> TimesByRows:
    found = TimesByRows()
    for rows in measured:
        found.measured(rows, seconds(rows))
    return found


def decodes(count: int, grows_to: int = 10**6) -> StepPlan:
    """A step in which so many sequences decode."""
    chunks = []
    for i in range(count):
        request = Request(f"{i}", [1, 2, 3], SamplingParams(max_tokens=None), grows_to, forked=True)
        sequence = Sequence(request, 0, [1, 2, 3, 4])
        request.sequences = [sequence]
        chunks.append(Chunk(sequence, 3, 1, is_last=True))
    return StepPlan(chunks)


def adaptive(
    verifying: TimesByRows,
    drafting: TimesByRows | None,
    clock: Callable[[], float] = lambda: 0.0,
    **others: Any,
) -> AdaptiveDrafts:
    """Where deciding takes no time, however busy the machine is that the tests run on."""
    return AdaptiveDrafts(8, verifying, drafting, clock=clock, **others)


class Found:
    """What occurred before: in some stretches of a text, where what followed is right with a known probability.

    Args:
        how_often: in which share of them.
        share: that probability.
    """

    def __init__(self, how_often: float, share: float) -> None:
        self.how_often, self.right = how_often, share

    def matched(self, sequence: Sequence) -> int:
        stretch = len(sequence.tokens) // 40
        return 8 * (random.Random(f"{stretch} {sequence.request.id}").random() < self.how_often)

    def share(self, sequence: Sequence) -> float:
        return self.right * bool(self.matched(sequence))


class World:
    """Steps that take known times, with drafts that are right with a probability.

    Args:
        verifying: seconds of a step by its rows.
        drafting: seconds of a drafter's step by its sequences.
        accepted: the probability.
        known: what is measured at the start; the same by default.
        measured: of how many rows.
        branches: how many a draft may have.
        caught: the probability that a branch has the right token where the chain is wrong.
        odds: draws how close a second choice comes to a draft token, and how likely the token then is right; by default nothing is known of that.
        lookup: what is found.
        weights: whether anything drafts with weights.
    """

    def __init__(
        self,
        verifying: Callable[[int], float],
        drafting: Callable[[int], float],
        accepted: float,
        known: Callable[[int], float] | None = None,
        *,
        measured: tuple[int, ...] = ROWS,
        branches: int = 0,
        caught: float = 0.0,
        odds: Callable[[random.Random], tuple[float, float]] | None = None,
        lookup: Found | None = None,
        weights: bool = True,
    ) -> None:
        self.odds, self.lookup = odds, lookup
        self.verifying, self.drafting, self.accepted, self.caught = verifying, drafting, accepted, caught
        drafting_times = times(drafting) if weights else None
        more: dict[str, Any] = {"branches": branches, "lookup": lookup, "most_found": 16}
        self.drafts = adaptive(times(known or verifying, measured), drafting_times, self.clock, **more)
        self.draw = random.Random(0)
        self.overhead = 0.0  # of a step with drafts
        self.deciding, self.now = 0.0, 0.0  # what each decision takes, and each step's lesson
        self.lengths: list[int] = []
        self.branched = self.looked_up = 0

    def clock(self) -> float:
        self.now += self.deciding
        return self.now

    def outcome(self, size: DraftSize) -> DraftOutcome:
        """Of one draft: branches of one token leave the chain at its first places."""
        right, share = 0, self.accepted
        if size.looks_up:
            assert self.lookup is not None
            share = self.lookup.right
        while right < size.chain and self.draw.random() < share:
            right += 1
        begins = right < min(size.chain, size.branches)
        caught = begins and self.draw.random() < self.caught
        return DraftOutcome(size.chain, right, size.branched, int(caught), caught if begins else None)

    def outcomes(self, plan: StepPlan, sizes: dict[int, DraftSize]) -> dict[Sequence, DraftOutcome]:
        """Of a step's drafts, whose chains may end before they are as long as they may be."""
        chosen = {plan.chunks[i].sequence: size for i, size in sizes.items()}
        if self.odds is None:
            return {sequence: self.outcome(size) for sequence, size in chosen.items()}
        odds: dict[Sequence, list[float]] = {sequence: [] for sequence in chosen}
        right = dict.fromkeys(chosen, 0)
        growing: set[Sequence] = set(chosen)
        while growing:
            for sequence in growing:
                close, share = self.odds(self.draw)
                right[sequence] += right[sequence] == len(odds[sequence]) and self.draw.random() < share
                odds[sequence].append(close)
            growing = {sequence for sequence in growing if len(odds[sequence]) < chosen[sequence].chain}
            rule = next(iter(chosen.values())).rule
            if rule is not None:
                paths = [DraftPath(sequence, odds[sequence]) for sequence in growing]
                growing = {paths[place].sequence for place in rule.going_on(paths)}
        return {each: DraftOutcome(len(odds[each]), right[each], odds=odds[each]) for each in chosen}

    def gain(self, sequences: int, steps: int) -> float:
        """How many times as many tokens a second as without drafts."""
        plan, seconds, tokens = decodes(sequences), 0.0, 0
        for _ in range(steps):
            begun = self.now
            sizes = self.drafts.sizes(plan, 512)
            deciding = (self.now - begun) / 2  # the clock was read at its begin and its end
            chunks = [replace(chunk, looks_up=i in sizes and sizes[i].looks_up) for i, chunk in enumerate(plan.chunks)]
            outcomes = self.outcomes(plan, sizes)
            self.lengths.append(max((outcome.drafted for outcome in outcomes.values()), default=0))
            looked_up = {chunk.sequence for chunk in chunks if chunk.looks_up}
            self.looked_up += len(looked_up)
            lengths = {each: outcome.drafted for each, outcome in outcomes.items() if each not in looked_up}
            self.branched += sum(size.branched for size in sizes.values())
            drafting = sum(
                self.drafting(sum(length > i for length in lengths.values()))
                for i in range(max(lengths.values(), default=0))
            )
            rows = sum(each.drafted + each.branched for each in outcomes.values())
            verifying = self.verifying(sequences + rows)
            whole = deciding + drafting + verifying + (self.overhead if sizes else 0.0)
            begun = self.now
            self.drafts.ran(StepPlan(chunks), Drafted(outcomes, drafting), whole)
            seconds += whole + (self.now - begun) / 2
            tokens += sequences + sum(each.accepted + each.on_branch for each in outcomes.values())
            for chunk in chunks if self.lookup is not None else ():
                outcome = outcomes.get(chunk.sequence)
                chunk.sequence.tokens += [0] * (1 + (outcome.accepted if outcome else 0))
        return tokens / seconds / (sequences / self.verifying(sequences))


def memory_bound(rows: int) -> float:
    """A step that mostly reads weights."""
    return 0.06 + 0.001 * rows


def compute_bound(rows: int) -> float:
    """A step whose rows are all but free."""
    return 0.01 + 0.01 * rows


def compute_bound_from_eight(rows: int) -> float:
    """As measured with a billion weights in bfloat16 on two cores of an AMD EPYC: up to eight rows weights are read, beyond them each row counts."""
    return 0.044 + 0.0022 * rows if rows <= 8 else 0.0616 + 0.006 * (rows - 8)


def a_quarter(sequences: int) -> float:
    """A drafter of a quarter of the bits."""
    return memory_bound(sequences) / 4


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("accepted", [0.6, 0.8, 0.95])
def test_it_comes_close_to_the_best_fixed_number(sequences: int, accepted: float) -> None:
    def fixed(length: int) -> float:
        tokens = sum(accepted**i for i in range(length + 1))
        seconds = length * a_quarter(sequences) + memory_bound(sequences * (1 + length))
        return tokens * memory_bound(sequences) / seconds

    found = World(memory_bound, a_quarter, accepted).gain(sequences, 600)
    assert found > 0.95 * max(1.0, *(fixed(length) for length in range(1, 9)))


@pytest.mark.few(6)
@pytest.mark.parametrize("sequences", [1, 8, 32])
@pytest.mark.parametrize("accepted", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("verifying", [memory_bound, compute_bound])
def test_it_never_loses_much(sequences: int, accepted: float, verifying: Callable[[int], float]) -> None:
    """Also from the first step on, when nothing is known of acceptance."""
    for steps in (100, 1000):
        assert World(verifying, lambda n: verifying(n) / 2, accepted).gain(sequences, steps) > 0.97


def sure_or_not(draw: random.Random) -> tuple[float, float]:
    """As was measured of smelt-6m and its W4 form: of three tokens two are sure, and the third is right two times of three."""
    return (0.3, 0.99) if draw.random() < 2 / 3 else (0.9, 0.67)


def no_matter(draw: random.Random) -> tuple[float, float]:
    """Second choices that say nothing."""
    return draw.random(), 0.88


def best_gain(
    odds: Callable[[random.Random], tuple[float, float]], *, least: float, most: int, sequences: int
) -> float:
    """Of drafts that go on while they are right with at least this probability, by simulation."""
    draw, tokens, seconds = random.Random(1), 0, 0.0
    for _ in range(4000):
        lengths = []
        for _ in range(sequences):
            length, right, is_right, reached = 0, 0, True, 1.0
            while length < most and reached >= least:
                _, share = odds(draw)
                length, reached = length + 1, reached * share
                is_right = is_right and draw.random() < share
                right += is_right
            lengths.append(length)
            tokens += 1 + right
        seconds += sum(a_quarter(sum(length > i for length in lengths)) for i in range(max(lengths)))
        seconds += memory_bound(sequences + sum(lengths))
    return tokens / seconds / (sequences / memory_bound(sequences))


@pytest.mark.parametrize(("sequences", "gain"), [(1, 1.02), (4, 0.98)])
def test_drafts_end_where_the_drafter_is_not_sure(sequences: int, gain: float) -> None:
    """One sequence's are better than any number of tokens, and nearly the best that can be done by how sure it is; several share the time of a step."""
    fixed = max(best_gain(sure_or_not, least=0, most=most, sequences=sequences) for most in range(1, 9))
    stopping = max(best_gain(sure_or_not, least=least / 20, most=8, sequences=sequences) for least in range(8, 20))
    found = World(memory_bound, a_quarter, 0.0, odds=sure_or_not).gain(sequences, 3000)
    assert found > gain * fixed
    assert found > 0.97 * stopping


@pytest.mark.few(1)
@pytest.mark.parametrize("sequences", [1, 4])
def test_what_says_nothing_is_no_loss(sequences: int) -> None:
    fixed = max(best_gain(no_matter, least=0, most=most, sequences=sequences) for most in range(1, 9))
    found = World(memory_bound, a_quarter, 0.0, odds=no_matter).gain(sequences, 3000)
    assert found > 0.96 * fixed


def test_drafts_that_nothing_can_end_have_the_best_fixed_number() -> None:
    """Also if odds are known of some, which were computed in another way."""
    world = World(memory_bound, a_quarter, 0.0, odds=sure_or_not)
    world.drafts = adaptive(times(memory_bound), times(a_quarter), ends_by_odds=False)
    fixed = max(best_gain(sure_or_not, least=0, most=most, sequences=1) for most in range(1, 9))
    assert world.gain(1, 3000) > 0.96 * fixed
    assert all(size.rule is None for size in world.drafts.sizes(decodes(1), 512).values())


@pytest.mark.parametrize("odds", [sure_or_not, no_matter])
@pytest.mark.parametrize("sequences", [1, 8])
def test_drafts_of_a_drafter_with_odds_are_no_loss_where_rows_are_dear(
    odds: Callable[[random.Random], tuple[float, float]], sequences: int
) -> None:
    assert World(compute_bound, a_quarter, 0.0, odds=odds).gain(sequences, 600) > 0.97


@pytest.mark.few(6)
@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("caught", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("sequences", [1, 8])
def test_branches_are_never_a_loss(sequences: int, caught: float, accepted: float) -> None:
    """Not beside no drafts, and hardly beside chains; a gain where they catch much of what chains miss and rows are cheap."""
    chains = World(memory_bound, a_quarter, accepted).gain(sequences, 600)
    trees = World(memory_bound, a_quarter, accepted, branches=4, caught=caught)
    found = trees.gain(sequences, 600)
    assert found > 0.97
    assert found > 0.97 * chains
    if accepted in (0.3, 0.6) and caught == 0.9 and sequences == 1:
        assert found > 1.05 * chains
    if caught == 0.0:  # of up to four a step and sequence
        assert trees.branched < 0.1 * 4 * 600 * sequences


@pytest.mark.parametrize("sequences", [1, 8])
def test_of_lookup_and_weights_both_are_used_where_they_are_better(sequences: int) -> None:
    """Lookup is right as often as the weights, costs nothing, and finds something half of the time."""
    weights = World(memory_bound, a_quarter, 0.8).gain(sequences, 1000)
    lookup = World(memory_bound, a_quarter, 0.0, lookup=Found(0.5, 0.8), weights=False).gain(sequences, 1000)
    both = World(memory_bound, a_quarter, 0.8, lookup=Found(0.5, 0.8))
    found = both.gain(sequences, 1000)
    assert found > 1.05 * max(weights, lookup)
    assert 0.2 * sequences * 1000 < both.looked_up < 0.6 * sequences * 1000


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize(("share", "accepted"), [(0.1, 0.9), (0.9, 0.1), (0.0, 0.0), (0.05, 0.5)])
def test_what_is_worse_of_lookup_and_weights_is_left_out(sequences: int, share: float, accepted: float) -> None:
    weights = World(memory_bound, a_quarter, accepted).gain(sequences, 1000)
    lookup = World(memory_bound, a_quarter, 0.0, lookup=Found(1.0, share), weights=False).gain(sequences, 1000)
    both = World(memory_bound, a_quarter, accepted, lookup=Found(1.0, share))
    assert both.gain(sequences, 1000) > 0.97 * max(1.0, weights, lookup)
    looked_up = both.looked_up / (sequences * 1000)
    assert looked_up > 0.9 if share > accepted else looked_up < 0.1


@pytest.mark.parametrize("deciding", [0.0005, 0.003])
def test_to_look_up_in_vain_is_hardly_a_loss(deciding: float) -> None:
    """Where it takes one percent of a step, or five; and what is found at last is used."""
    world = World(memory_bound, a_quarter, 0.0, lookup=Found(0.0, 0.9), weights=False)
    world.deciding = deciding
    assert world.gain(1, 2000) > 0.97
    assert world.lookup is not None
    world.lookup.how_often = 1.0
    world.gain(1, 200)  # it remembers what was lost
    assert world.gain(1, 1000) > 2


def test_branches_are_left_out_where_rows_cost_as_much_as_steps() -> None:
    world = World(compute_bound, a_quarter, 0.9, branches=4, caught=0.9)
    assert world.gain(8, 300) > 0.97
    assert world.branched == 0


def test_it_does_not_lose_much_where_what_was_measured_is_wrong() -> None:
    """Rows that seemed to be free, and are not."""
    world = World(compute_bound, a_quarter, 0.3, known=lambda rows: compute_bound(8))
    assert world.gain(8, 2000) > 0.97


@pytest.mark.parametrize("slow", [3, 4, 6])
@pytest.mark.parametrize("sequences", [1, 8])
def test_one_slow_step_at_the_start_does_not_keep_it_from_drafting(sequences: int, slow: int) -> None:
    """Of a large model few steps are measured then, and the last ones say how long all larger ones would be."""

    def verifying(rows: int) -> float:  # as measured with a billion weights in bfloat16 on two cores of an older EPYC
        if rows <= 8:
            return 0.12 if rows <= 4 else 0.27 * rows / 8
        return 0.27 + 0.022 * (rows - 8)

    def known(rows: int) -> float:
        return verifying(rows) * (1.5 if rows == slow else 1.0)

    measured = tuple(rows for rows in (1, 2, 3, 4, 6) if rows <= slow)
    gains = []
    for start, rows in ((known, measured), (verifying, ROWS)):
        world = World(verifying, a_quarter, 0.0, start, measured=rows, lookup=Found(1.0, 0.95), weights=False)
        world.gain(sequences, 400)
        gains.append(world.gain(sequences, 300))
    assert gains[1] > 1.1
    assert gains[0] > 0.95 * gains[1]


@pytest.mark.parametrize("at_first", [10, 30])
def test_a_machine_that_was_slow_at_first_does_not_draft_for_long(at_first: int) -> None:
    """Other users of its memory made steps without drafts longer, more than those with, so that drafts seemed to pay."""
    for seed in range(12):
        world = World(compute_bound_from_eight, lambda n: 0.018 + 0.0015 * n, 0.926)
        verifying, drafting, world.draw = world.verifying, world.drafting, random.Random(seed)
        world.verifying = lambda rows, fast=verifying: fast(rows) * (1.6 if rows == 8 else 1.3)
        world.drafting = lambda n, fast=drafting: fast(n) * 1.6
        world.gain(8, at_first)
        world.verifying, world.drafting = verifying, drafting
        assert world.gain(8, 300) > 0.97


@pytest.mark.parametrize("share", [0.001, 0.05, 0.3])
def test_deciding_does_not_lose_much_either(share: float) -> None:
    """A decision may take a good part of a small model's step: then only one step of many is decided on."""
    world = World(compute_bound, a_quarter, 0.0)
    world.deciding = share * compute_bound(1)
    assert world.gain(1, 3000) > 0.97


def test_it_notices_that_drafts_became_better_and_worse() -> None:
    world = World(memory_bound, a_quarter, 0.0)
    world.gain(1, 400)
    assert sum(world.lengths[-50:]) <= 5
    world.accepted = 0.95
    world.gain(1, 2000)
    assert sum(world.lengths[-50:]) > 100
    world.accepted = 0.0
    world.gain(1, 400)
    assert sum(world.lengths[-50:]) <= 5


def test_drafts_get_shorter_under_load() -> None:
    means = []
    for sequences in (1, 8, 32):
        world = World(lambda rows: 0.05 + 0.002 * rows, a_quarter, 0.85)
        world.gain(sequences, 300)
        means.append(sum(world.lengths) / len(world.lengths))
    assert means[0] > means[1] > means[2]


def test_what_cannot_be_of_use_is_not_drafted() -> None:
    drafts = adaptive(times(memory_bound), times(a_quarter))
    for _ in range(50):  # all are right
        plan = decodes(1)
        lengths = {plan.chunks[i].sequence: size.chain for i, size in drafts.sizes(plan, 512).items()}
        outcomes = {sequence: DraftOutcome(count, count) for sequence, count in lengths.items()}
        drafting = 0.015 * sum(lengths.values())
        drafts.ran(plan, Drafted(outcomes, drafting), drafting + 0.06)
    assert drafts.sizes(decodes(1), 512)[0].chain > 3
    assert drafts.sizes(decodes(1, grows_to=7), 512)[0].chain == 2  # of three tokens the last one is chosen after them
    assert drafts.sizes(decodes(1, grows_to=5), 512) == {}
    assert sum(size.tokens for size in drafts.sizes(decodes(1), 2).values()) <= 2
    prompt = decodes(1).chunks[0].sequence
    assert drafts.sizes(StepPlan([Chunk(prompt, 0, 3, is_last=True)]), 512) == {}
    prompt.request.params = SamplingParams(beam_width=2, n=2)
    assert drafts.sizes(StepPlan([Chunk(prompt, 3, 1, is_last=True)]), 512) == {}


class Requests:
    """One after another, in a world whose drafter has to read a request's tokens before it drafts for them.

    Args:
        reading: seconds of each token that it reads.
    """

    def __init__(self, reading: float) -> None:
        self.reading = reading
        self.drafts = adaptive(times(memory_bound), times(a_quarter), unprepared=self.unread)
        self.read: dict[Sequence, int] = {}
        self.draw = random.Random(0)
        self.drafted = 0

    def unread(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self.read.get(sequence, 0)

    def answer(self, count: int, *, prompt: int, length: int, most: int, accepted: float) -> tuple[float, float]:
        """So many requests whose answers end after ``length`` tokens and could have ``most``: how many times as fast as without drafts, and the share of steps with some."""
        seconds, steps, drafted = 0.0, 0, 0
        for _ in range(count):
            request = Request("", [1] * prompt, SamplingParams(max_tokens=None), prompt + most, forked=True)
            sequence = Sequence(request, 0, [1] * (prompt + 1))
            request.sequences = [sequence]
            while len(sequence.tokens) < prompt + length:
                plan = StepPlan([Chunk(sequence, len(sequence.tokens) - 1, 1, is_last=True)])
                chain = next((size.chain for size in self.drafts.sizes(plan, 512).values()), 0)
                right = 0
                while right < chain and self.draw.random() < accepted:
                    right += 1
                drafting, preparing, prepared = chain * a_quarter(1), 0.0, 0
                if chain:
                    prepared = self.unread(sequence)
                    preparing, self.read[sequence] = prepared * self.reading, len(sequence.tokens)
                sequence.tokens += [1] * (1 + right)
                whole = preparing + drafting + memory_bound(1 + chain)
                sequence.finish = "stop" if len(sequence.tokens) >= prompt + length else None
                outcomes = {sequence: DraftOutcome(chain, right)} if chain else {}
                self.drafts.ran(plan, Drafted(outcomes, drafting, prepared, preparing), whole)
                seconds, steps, drafted = seconds + whole, steps + 1, drafted + bool(chain)
        return count * (length - 1) * memory_bound(1) / seconds, drafted / steps


def test_a_drafter_reads_long_texts_for_long_answers() -> None:
    assert Requests(0.001).answer(20, prompt=1000, length=400, most=400, accepted=0.9)[0] > 1.3
    gain, drafted = Requests(0.001).answer(20, prompt=1000, length=9, most=9, accepted=0.9)
    assert drafted == 0
    assert gain == pytest.approx(1)


def test_it_does_not_read_long_texts_for_answers_that_might_have_been_long() -> None:
    """A limit of 4096 tokens says nothing: answers have twenty."""
    assert Requests(0.0004).answer(100, prompt=4000, length=20, most=4096, accepted=0.8)[0] > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [5, 200, 4000])
def test_a_drafter_that_was_of_no_use_is_tried_again(prompt: int) -> None:
    """Also if it has to read a text for that."""
    requests = Requests(0.0004)
    requests.answer(5, prompt=100, length=200, most=200, accepted=0.8)  # how fast it reads is known
    assert requests.answer(20, prompt=prompt, length=200, most=200, accepted=0.8)[1] > 0.8
    gain, drafted = requests.answer(100, prompt=prompt, length=200, most=200, accepted=0.02)
    assert gain > 0.97
    assert drafted < 0.2
    assert requests.answer(300, prompt=prompt, length=200, most=200, accepted=0.8)[1] > 0.8


def test_times_are_on_lines_between_measured_ones() -> None:
    found = TimesByRows()
    assert not found.is_known
    found.measured(2, 1.0)
    assert found.of(1) == found.of(50) == 1.0
    found.measured(6, 3.0)
    assert found.of(4) == 2.0
    assert found.of(10) == pytest.approx(5.0)
    found.measured(8, 2.9)  # a little noise
    assert found.of(7) == pytest.approx(3.0)
    assert found.of(14) == pytest.approx(2.9 + 1.9)  # as from 2 to 8
    assert found.of(1) == 1.0
    found.measured(9, 9.0)  # much
    assert found.of(18) == pytest.approx(18.0)
    found.measured(16, 3.0)
    assert found.of(9) == pytest.approx(1.15 * 3.0)
    assert found.of(32) == pytest.approx(3.2)  # as from 8 to 16
    for _ in range(100):  # contexts have grown
        found.measured(2, 2.0)
    assert found.of(2) == pytest.approx(2.0, rel=0.01)
    assert found.of(16) > 4


def test_counts() -> None:
    counts = DraftCounts()
    assert counts.acceptance is counts.agreement is counts.tokens_per_verification is None
    counts.add(DraftOutcome(3, 3))
    before = counts.copy()
    counts.add(DraftOutcome(3, 1))
    counts.add(DraftOutcome(1, 0))
    assert counts.drafted == [3, 2, 2]
    assert counts.accepted == [2, 1, 1]
    assert counts.acceptance == pytest.approx(4 / 7)
    assert counts.agreement == pytest.approx(4 / 6)
    assert counts.tokens_per_verification == pytest.approx(7 / 3)
    later = counts.since(before)
    assert (later.verified, later.drafted, later.accepted) == (2, [2, 1, 1], [1, 0, 0])
    assert later.by_position() == [0.5, 0.0, 0.0]
    assert "accepted 57% of 7 tokens" in counts.sentence()
    counts.add(DraftOutcome(2, 1, branched=4, on_branch=1, caught=True))
    assert counts.acceptance == pytest.approx(6 / 13)
    assert counts.tokens_per_verification == pytest.approx(10 / 4)
    assert counts.agreement == pytest.approx(5 / 8)
    assert "1 of 4 on branches" in counts.sentence()
    counts.add(DraftOutcome(2, 1, branched=1, caught=False))
    assert (counts.beside, counts.caught) == (2, 1)
    assert counts.since(before).with_those_of(before) == counts


def test_what_a_step_takes_without_drafts_is_measured_again_while_drafts_pay() -> None:
    """The model became twice as fast, its drafts did not: nothing but steps without drafts shows that they do not pay any more."""
    world = World(lambda rows: 0.1 + 0.001 * rows, lambda n: 0.02, 0.7)
    world.gain(1, 300)
    assert sum(world.lengths[-100:]) > 100
    assert 0 in world.lengths[10:]
    world.verifying = lambda rows: (0.02 if rows == 1 else 0.1) + 0.001 * rows
    world.gain(1, 600)
    assert sum(world.lengths[-100:]) < 10


def test_drafts_beside_prompts_need_no_step_without() -> None:
    drafts = adaptive(times(lambda rows: 0.06 + 0.0001 * rows), times(lambda n: 0.001))
    plan = decodes(2)
    prompt = decodes(1).chunks[0].sequence
    mixed = StepPlan([*plan.chunks, Chunk(prompt, 0, 3, is_last=True)])
    assert set(drafts.sizes(mixed, 512)) == {0, 1}
    assert drafts.sizes(plan, 512) == {}


def test_what_drafts_cost_in_python_counts() -> None:
    """Steps with drafts take longer than the model's and the drafter's parts together; the step's whole time says so."""
    world = World(memory_bound, a_quarter, 0.8)
    world.overhead = 0.2
    world.gain(1, 200)
    assert sum(world.lengths[-50:]) <= 5
