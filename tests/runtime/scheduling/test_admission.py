"""Admission by the predicted peak: the peak against all futures counted step by step, and preemptions on a starved cache."""

from __future__ import annotations

import random

import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.admission import PeakAdmission
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler

from .drive import Drive


def _sequence(tokens: int, left: int) -> Sequence:
    request = Request("r", [1], SamplingParams(), 10_000)
    request.predicted_tokens = tokens - 1 + left
    return Sequence(request, 0, [1] * tokens)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_that_of_the_predicted_steps(seed: int) -> None:
    """With blocks of one position nothing is rounded."""
    draw = random.Random(seed)
    pairs = [(draw.randint(1, 50), draw.randint(1, 50)) for _ in range(draw.randint(1, 9))]
    held = [sum(tokens + step for tokens, left in pairs if step <= left) for step in range(51)]
    admission = PeakAdmission(BlockCache(1, 1))
    assert admission.peak([_sequence(*pair) for pair in pairs]) == max(held)


def test_a_prefix_that_all_share_counts_once() -> None:
    """Requests with a long system prompt: as many run at once as without predictions, and none is preempted."""
    steps = {}
    for predicts in (False, True):
        cache = BlockCache(320, 16)
        scheduler = Scheduler(
            cache,
            max_num_batched_tokens=512,
            max_num_seqs=32,
            policy=POLICIES["fcfs"](),
            admission=PeakAdmission(cache) if predicts else None,
        )
        for i in range(200):
            prompt = [*range(2048), *range(10_000 + 100 * i, 10_016 + 100 * i)]
            request = Request(str(i), prompt, SamplingParams(), len(prompt) + 32)
            request.forked = True
            request.sequences = [Sequence(request, 0, list(prompt))]
            scheduler.add(request.sequences[0])
        steps[predicts] = 0
        while scheduler.has_work:
            plan = scheduler.schedule(float(steps[predicts]))
            scheduler.started(plan)
            scheduler.commit(plan, steps[predicts] + 1.0)
            for chunk in plan.chunks:
                if chunk.is_last:
                    chunk.sequence.tokens.append(1)
                    if len(chunk.sequence.generated) >= 32:
                        scheduler.end(chunk.sequence, "length")
            steps[predicts] += 1
        assert scheduler.preemptions == 0
    assert steps[True] < 1.2 * steps[False]


def _preemptions(policy: str, *, predicts: bool) -> tuple[int, int, float]:
    """Requests that may generate far more than they do, faster than the cache has room for them."""
    draw = random.Random(0)
    drive = Drive(policy, blocks=160, max_num_batched_tokens=64, max_num_seqs=32, predicts=predicts)
    for i in range(400):
        drive.add(str(i), draw.randint(4, 24), draw.choice([8, 60, 100]), most=500)
        for _ in range(6):
            drive.step()
    drive.run()
    computed = sum(plan.tokens for plan in drive.plans)
    return drive.scheduler.preemptions, computed, max(drive.ended.values())


@pytest.mark.parametrize(("policy", "slower"), [("fcfs", 1.1), ("prefill_first", 1.15)])
def test_sequences_rarely_preempt_each_other(policy: str, slower: float) -> None:
    """Also where newcomers come first in the order, and so have to wait more often."""
    before, computed_before, end_before = _preemptions(policy, predicts=False)
    after, computed_after, end_after = _preemptions(policy, predicts=True)
    assert before > 100
    assert after < before / 4
    assert computed_after < computed_before
    assert end_after < slower * end_before, "and the cache is not left empty"


class _Counting(BlockCache):
    """Counts how often a prefix is looked up."""

    looked_up = 0

    def find(self, tokens: list[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        self.looked_up += 1
        return super().find(tokens, salt)


def test_who_waits_is_looked_up_again_only_when_something_has_changed() -> None:
    """A long prompt's prefix at each step of those that run would take longer than the step."""
    cache = _Counting(100, 16)
    admission = PeakAdmission(cache)
    for _ in range(20):
        admission.ended(_sequence(101, 0))  # which have generated a hundred tokens each
    scheduler = Scheduler(
        cache, max_num_batched_tokens=4096, max_num_seqs=8, policy=POLICIES["fcfs"](), admission=admission
    )
    requests = [Request(str(i), [*range(1000 * i, 1000 * i + 640)], SamplingParams(), 800) for i in range(3)]
    for request in requests:
        request.forked = True
        request.sequences = [Sequence(request, 0, list(request.prompt))]
        scheduler.add(request.sequences[0])
    counts = []
    for step in range(60):
        plan = scheduler.schedule(float(step))
        scheduler.started(plan)
        scheduler.commit(plan, step + 1.0)
        for chunk in plan.chunks:
            chunk.sequence.tokens.append(1)
        counts.append(cache.looked_up)
        if step == 49:
            scheduler.end(requests[0].sequences[0], "stop")
    assert [len(scheduler.waiting), scheduler.preemptions] == [0, 0]
    assert counts[48] <= 5  # the two that started, and the third as they did
    assert requests[2].started == 50.0  # at once when there was room


def test_what_ended_by_force_teaches_nothing() -> None:
    drive = Drive(predicts=True)
    request = drive.add("a", 3, 9)
    drive.step()
    drive.scheduler.end(request.sequences[0], "abort")
    assert drive.scheduler._admission is not None
    assert not drive.scheduler._admission._recent
