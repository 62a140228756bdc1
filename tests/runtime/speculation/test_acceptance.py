"""How sure a drafter is of its tokens, and drafts that end where it is not."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.requests.sequence import Sequence
from smelt.runtime.scheduling.drafting import DraftSize
from smelt.runtime.scheduling.plan import DraftPath, DraftRule, StepPlan
from smelt.runtime.speculation.acceptance import AcceptanceByOdds, WorthOfTokens
from smelt.runtime.speculation.counts import DraftOutcome
from smelt.runtime.speculation.fixed_length import Drafted, FixedDrafts
from transformers import AutoModelForCausalLM

from .test_exact import ENGINE, GREEDY, PROMPTS, drafters  # noqa: F401 - a fixture
from .test_length import decodes


class EndsAbove:
    """A rule: drafts go on while their last token's odds are no higher."""

    def __init__(self, most: float) -> None:
        self._most = most

    def going_on(self, paths: SequenceOf[DraftPath]) -> set[int]:
        return {place for place, path in enumerate(paths) if path.odds[-1] <= self._most}

    def branching(self, odds: SequenceOf[float]) -> list[int]:
        return [place for place, each in enumerate(odds) if each > self._most]


class WatchedDrafts(FixedDrafts):
    """A fixed number of draft tokens, which end where a rule says so; keeps what became of them."""

    def __init__(self, count: int, rule: DraftRule | None = None, branches: int = 0) -> None:
        super().__init__(count, branches)
        self._rule = rule
        self.seen: list[tuple[list[int], DraftOutcome]] = []

    def sizes(self, plan: StepPlan, budget: int) -> dict[int, DraftSize]:
        return {i: replace(size, rule=self._rule) for i, size in super().sizes(plan, budget).items()}

    def ran(self, plan: StepPlan, drafted: Drafted, now: float) -> None:
        super().ran(plan, drafted, now)
        self.seen += [(list(sequence.tokens), outcome) for sequence, outcome in drafted.of.items()]


def watched(checkpoint: str, drafter: str, drafting: WatchedDrafts, params: SamplingParams) -> list[list[int]]:
    engine = Engine(checkpoint, drafter=drafter, draft_tokens=3, **ENGINE)
    engine.core.drafting = engine.scheduler.drafting = drafting
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params)]


@pytest.mark.few(1)
@pytest.mark.parametrize("drafter", ["itself", "shallow"])  # the second one has keys and values of its own
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, logit_bias={3: 1.0})], ids=["greedy", "greedy with a bias"])
def test_odds_are_those_of_the_drafters_second_choice(
    drafters: dict[str, str],  # noqa: F811
    drafter: str,
    params: SamplingParams,
) -> None:
    drafting = WatchedDrafts(3)
    watched(drafters["itself"], drafters[drafter], drafting, params)
    model = AutoModelForCausalLM.from_pretrained(drafters[drafter])
    compared = 0
    for tokens, outcome in drafting.seen:
        assert len(outcome.odds) == outcome.drafted
        begin = len(tokens) - outcome.accepted - 1
        for i, odds in enumerate(outcome.odds[: outcome.tried]):
            with torch.no_grad():
                logits = model(torch.tensor([tokens[: begin + i]])).logits[0, -1]
            for token, bias in params.logit_bias.items():
                logits[token] += bias
            first, second = logits.topk(2).values.tolist()
            assert odds == pytest.approx(torch.tensor(second - first).exp().item(), rel=1e-3)
            compared += 1
    assert compared > 80


@pytest.mark.few(4)
@pytest.mark.parametrize("drafter", ["near", "shallow", "first layers", "head"])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=24, seed=7, ignore_eos=True)], ids=["greedy", "sampled"]
)
def test_drafts_end_where_the_rule_says(drafters: dict[str, str], drafter: str, params: SamplingParams) -> None:  # noqa: F811
    """And the output stays what it is without."""
    plain = Engine(drafters["itself"], **ENGINE).generate(PROMPTS, params)
    drafting = WatchedDrafts(6, rule=EndsAbove(0.8))
    tokens = watched(drafters["itself"], drafters[drafter], drafting, params)
    assert tokens == [output.outputs[0].token_ids for output in plain]
    ended = 0
    for known, outcome in drafting.seen:
        assert all(0 <= odds <= 1 for odds in outcome.odds)
        assert all(odds <= 0.8 for odds in outcome.odds[:-1])
        ended += outcome.drafted < 6 and outcome.odds[-1] > 0.8
        # Those that end for another reason are at the end of what was asked for.
        left = params.max_tokens - (len(known) - outcome.accepted - 1 - len(prompt_of(known)))
        assert outcome.drafted in (6, left - 1) or outcome.odds[-1] > 0.8
    assert ended > 10


def prompt_of(tokens: list[int]) -> list[int]:
    """The prompt that a sequence began with."""
    return next(prompt for prompt in PROMPTS if tokens[: len(prompt)] == prompt)


def test_lookup_has_no_odds(drafters: dict[str, str]) -> None:  # noqa: F811
    drafting = WatchedDrafts(3, rule=EndsAbove(-1.0))
    watched(drafters["itself"], "lookup", drafting, GREEDY)
    assert drafting.seen
    assert all(outcome.odds == () for _, outcome in drafting.seen)


def test_shares_by_odds_are_learned() -> None:
    draw, shares = random.Random(0), AcceptanceByOdds()
    assert not shares.is_known
    assert shares.share(0.9, 0.8) == pytest.approx(0.8)
    for _ in range(3000):
        odds = draw.random()
        shares.add([odds], int(draw.random() < 1 - odds**2))
    assert shares.is_known
    for odds in (0.05, 0.2, 0.4, 0.6, 0.78, 0.9, 0.98):
        assert shares.share(odds, 0.5) == pytest.approx(1 - odds**2, abs=0.12)


def sequences(count: int) -> list[Sequence]:
    return [chunk.sequence for chunk in decodes(count).chunks]


def rule(speed: float, of_next: list[tuple[Sequence, float]]) -> WorthOfTokens:
    """A drafter's step takes half a second and a hundredth for each sequence; no row takes any. Of the tokens with the highest odds half are right."""
    shares = AcceptanceByOdds()
    for _ in range(400):
        shares.add([0.01, 0.01, 0.97], 3)
        shares.add([0.01, 0.01, 0.97], 2)
    return WorthOfTokens(shares, 0.8, 0.9, dict(of_next), speed, lambda count: 0.5 + 0.01 * count, 0.0)


def goes_on(rule: WorthOfTokens, odds: dict[Sequence, list[float]]) -> set[Sequence]:
    paths = [DraftPath(sequence, each) for sequence, each in odds.items()]
    return {paths[place].sequence for place in rule.going_on(paths)}


def test_a_draft_goes_on_while_its_next_token_brings_more_than_its_time() -> None:
    (one,) = sequences(1)
    found = rule(1.0, [(one, 0.8)])
    assert goes_on(found, {one: [0.01] * 8}) == {one}  # 0.8 tokens or nearly, in the time of 0.51
    assert goes_on(found, {one: [0.01, 0.97]}) == set()  # 0.4
    assert goes_on(rule(0.7, [(one, 0.8)]), {one: [0.01, 0.97]}) == {one}
    assert goes_on(rule(0.7, [(one, 0.5)]), {one: [0.01, 0.97]}) == set()
    assert goes_on(rule(0.7, [(one, 0.8)]), {one: [0.97, 0.01, 0.97]}) == set()  # 0.2


def test_drafts_share_the_time_of_a_step() -> None:
    first, second, third = sequences(3)
    found = rule(1.2, [(first, 0.8), (second, 0.8), (third, 0.01)])
    sure, unsure = [0.01], [0.97]
    assert goes_on(found, {first: unsure, second: unsure}) == {first, second}  # neither would alone
    assert goes_on(found, {first: unsure}) == set()
    assert goes_on(found, {first: sure, second: unsure, third: sure}) == {first, second}
    assert goes_on(found, {}) == set()


def test_a_branch_goes_on_beside_its_chain_where_both_are_worth_it() -> None:
    (one,) = sequences(1)
    unsure = [0.01, 0.97]
    chain, branch, longer = DraftPath(one, unsure), DraftPath(one, unsure, 1), DraftPath(one, [*unsure, 0.97], 1)
    found = rule(0.7, [(one, 0.8)])
    assert found.going_on([chain, branch]) == {
        0,
        1,
    }  # 0.4 tokens by the chain and 0.36 by the branch in the time of 0.52
    assert found.going_on([chain, longer]) == {0, 1}  # 0.18 is still more than the hundredth that it takes
    assert replace(found, row=0.3).going_on([chain, longer]) == set()  # and less than its row
    assert found.going_on([branch]) == set()
    assert replace(found, caught=0.0).going_on([chain, branch]) == {0}


def test_branches_leave_where_the_second_choice_is_worth_its_row() -> None:
    (one,) = sequences(1)
    by_row = [replace(rule(1.0, [(one, 0.8)]), row=row) for row in (0.2, 0.3, 0.5)]
    odds = [0.01, 0.97, 0.01, 0.97]  # the second one is wrong every other time, and so is the last, if it is reached
    assert by_row[0].branching(odds) == [1, 3]  # 0.45 tokens and 0.22
    assert by_row[1].branching(odds) == [1]
    assert by_row[2].branching(odds) == []
    assert by_row[0].branching([]) == []


@pytest.mark.few(3)
@pytest.mark.parametrize("drafter", ["near", "shallow", "head"])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=24, seed=7, ignore_eos=True)], ids=["greedy", "sampled"]
)
def test_second_choices_are_verified_where_the_rule_says(
    drafters: dict[str, str],  # noqa: F811
    drafter: str,
    params: SamplingParams,
) -> None:
    """They take places that the chain has left, and the output stays what it is."""
    plain = Engine(drafters["itself"], **ENGINE).generate(PROMPTS, params)
    drafting = WatchedDrafts(6, rule=EndsAbove(0.5), branches=2)
    tokens = watched(drafters["itself"], drafters[drafter], drafting, params)
    assert tokens == [output.outputs[0].token_ids for output in plain]
    for known, outcome in drafting.seen:
        unsure = sum(odds > 0.5 for odds in outcome.odds)
        before = len(known) - outcome.accepted - outcome.on_branch - 1 - len(prompt_of(known))
        most = min(6, params.max_tokens - before - 1)
        assert outcome.branched == min(2, unsure, most - outcome.drafted)
    assert drafting.total.branched > 10
    assert drafting.total.beside > 0
