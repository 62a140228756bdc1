"""Random traffic through every policy: bursts and pauses, samples and shared prefixes, requests that are cancelled and steps that fail.

Nobody is lost, nobody waits longer than for those who may go before, every answer is the lone run's, and all blocks are accounted for.
The cache holds one to two of the longest requests, and host memory nothing, a few blocks, or all of it. A failure is repeated by its seed alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.mlfq import STARVED_QUANTA
from smelt.runtime.scheduling.policies.shortest import PATIENCE_SECONDS
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import live
from smelt.runtime.scheduling.swapping import SwapMode

from .drive import VOCABULARY, Drive, alone

# Host memory as a share of the cache's blocks, and how it is used.
HOSTS: list[tuple[float, SwapMode]] = [(0, "auto"), (0.15, "swap"), (0.5, "auto"), (10, "swap"), (1, "recompute")]
LONGEST = 80
LIVE = 30
IN_ORDER = ("fcfs", "sarathi", "orca", "static")

QUICK = [(policy, seed, 375) for seed, policy in enumerate(POLICIES)]
SLOW = [(policy, seed, 1200) for policy in POLICIES for seed in range(10)]


@dataclass
class Asked:
    """A request, what it should answer, and when, in steps, it came and ended."""

    request: Request
    answers: dict[int, list[int]]
    came: int
    left: int | None = None
    ended_by: str | None = None


@dataclass
class Traffic:
    """A drive with random requests, checked after every step."""

    policy: str
    seed: int
    asked: dict[str, Asked] = field(default_factory=dict)
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(f"{self.policy} {self.seed}")
        share, self.swap = HOSTS[self.seed % len(HOSTS)]
        size = draw.choice([1, 3, 4, 8])
        blocks = -(-LONGEST // size) + draw.choice([0, 1, 40 // size, 80 // size])
        self.drive = Drive(
            self.policy,
            blocks=blocks,
            block_size=size,
            max_num_batched_tokens=48 if self.swap == "auto" else draw.choice([2, 5, 16, 48]),
            max_num_seqs=draw.choice([3, 6, 12]),
            predicts=self.seed % 2 == 0,
            share=self.seed != 3,
            slots=max(1, int(share * blocks)) if share else 0,
            swap=self.swap,
            ahead=draw.random() < 0.5,
            token_seconds=0.01,
            # Blocks that a step restores can be found before it has run.
            breaks=lambda plan: draw.random() < (0.01 if plan.swap_in else 0.001),
        )
        # A request of several samples keeps all from running ahead.
        self.samples = [1] if self.drive.ahead and draw.random() < 0.7 else [1, 1, 1, 1, 2, 3]
        self.prefixes = [self._tokens(draw.choice([8, 16, 24])) for _ in range(3)]
        self.floods = self.seed == 9  # short requests come as fast as they end
        self.turns: list[list[int]] = []  # of sessions that may go on
        self.lost: Counter[Sequence] = (
            Counter()
        )  # since the last token that anybody got: how often each lost its blocks
        self.served: dict[str, int] = {}
        preempt = self.drive.scheduler._preempt

        def counted(sequence: Sequence, plan: StepPlan) -> None:
            self.lost[sequence] += 1
            assert self.lost[sequence] <= 2, "blocks are taken again and again, and nobody gets a token"
            swaps = self.swap == "swap" and sequence.computed > 0
            preempt(sequence, plan)
            self.counts["swapped" if sequence.swapped else "full" if swaps else "dropped"] += 1

        self.drive.scheduler._preempt = counted  # type: ignore[method-assign]

    def run(self, steps: int) -> None:
        """Traffic for so many steps, and then until all have ended."""
        draw = self.draw
        rate = 0.0
        while self.steps < steps:
            if draw.random() < 0.02 or not self.drive.scheduler.has_work:
                rate = 0.9 if self.floods else draw.choice([0.0, 0.05, 0.15, 0.9])
            if draw.random() < rate and len(self.drive.requests) < LIVE:
                self.arrive()
            if self.drive.requests and draw.random() < 0.02:
                self.cancel()
            self.step()
        while self.drive.requests:
            self.step()

    def arrive(self) -> None:
        """One more request: new, of a known prefix, or the next turn of a session."""
        draw = self.draw
        short = self.floods and draw.random() < 0.95
        prompt = [] if short else draw.choice([[], [], [], [], *self.prefixes, *self.turns[-3:]])
        prompt = [*prompt, *self._tokens(draw.choice([1, 2, 7, 20]))]
        most = 2 if short else min(LONGEST - len(prompt), draw.choice([1, 10, 30, 60]))
        output = most if draw.random() < 0.5 else draw.randint(1, most)
        n = draw.choice(self.samples)
        salt = draw.choice([b"", b"", b"other"])
        name = str(len(self.asked))
        request = self.drive.add(
            name,
            prompt,
            output,
            priority=draw.randrange(3),
            deadline=draw.choice([None, 5, 50, 500]) if self.policy == "deadline" else None,
            predicted=draw.choice([None, output, draw.randint(1, 40)]),
            most=most,
            n=n,
            salt=salt,
        )
        answers = {i: alone(prompt, salt, i, max(1, output - i)) for i in range(n)}
        self.asked[name] = Asked(request, answers, self.steps)
        self.served[name] = self.steps
        if len(prompt) + output <= LONGEST - 30:
            self.turns.append(prompt + answers[0])

    def cancel(self) -> None:
        """Cancel a request, in each state as often as in others."""
        states: dict[str, list[str]] = {}
        for name, request in self.drive.requests.items():
            for sequence in live(request):
                states.setdefault(self._state(sequence), []).append(name)
        state = self.draw.choice(sorted(states))
        self.counts[f"cancelled {state}"] += 1
        name = self.draw.choice(states[state])
        self.drive.end(name)
        self._left(name, "abort")

    def step(self) -> None:
        """One step, after which everything is counted."""
        drive, before, broken = self.drive, set(self.drive.requests), self.drive.broken
        plan = drive.step()
        fails = drive.broken > broken
        self.steps += bool(plan.chunks)
        assert plan.tokens <= drive.max_num_batched_tokens
        assert len(plan.chunks) <= drive.max_num_seqs
        for name in before - set(drive.requests):
            self._left(name, "error" if fails else "itself")
        if fails or any(chunk.is_last for chunk in plan.chunks):
            self.lost.clear()
        for chunk in plan.chunks:
            self._check_gap(chunk.sequence.request)
        self.counts["saved"] += len(plan.swap_out)
        self.counts["restored"] += len(plan.swap_in)
        self.counts["copied"] += len(plan.copies)
        self._check_everything_is_somewhere()

    def _check_everything_is_somewhere(self) -> None:
        scheduler, cache = self.drive.scheduler, self.drive.cache
        everybody = [*scheduler.running, *scheduler.waiting]
        expected = [
            sequence
            for request in self.drive.requests.values()
            for sequence in request.sequences[: None if request.forked else 1]
            if sequence.finish is None
        ]
        assert len(everybody) == len(expected)
        assert set(everybody) == set(expected), "a sequence is lost"
        cache.check([sequence.blocks for sequence in everybody])
        if cache.host is not None:
            cache.host.check([sequence.saved for sequence in everybody])

    def _check_gap(self, request: Request) -> None:
        """Under the feedback queue nobody is passed over for longer than it takes to be promoted and to come first."""
        since, self.served[request.id] = self.served.get(request.id, self.steps), self.steps
        gap = self.steps - since
        if self.policy == "mlfq" and gap > STARVED_QUANTA:
            others = [other for other in self.asked.values() if other.left is None or other.left > since]
            first_tokens = sum(self._computed(other.request) + 2 for other in others)
            assert gap <= 1.05 * STARVED_QUANTA + first_tokens

    def _left(self, name: str, by: str) -> None:
        asked = self.asked[name]
        asked.left, asked.ended_by = self.steps, by
        self.counts[by] += 1
        self.counts["found"] += asked.request.cached_tokens

    def check_answers(self) -> None:
        """All that were accepted have ended, with the lone run's tokens unless they were cut off."""
        for name, asked in self.asked.items():
            assert asked.left is not None, f"request {name} has not ended"
            found = self.drive.answers.get(name, {})
            if asked.ended_by == "itself":
                assert found == asked.answers
            else:
                assert found.items() <= asked.answers.items()
                for sequence in asked.request.sequences:
                    assert asked.answers[sequence.index][: len(sequence.generated)] == sequence.generated

    def check_waiting(self) -> None:
        """In every step somebody who may go before a request, or itself, is a step further."""
        for asked in self.asked.values():
            assert asked.left is not None
            others = [
                other
                for other in self.asked.values()
                if other.came <= asked.left
                and (other.left is None or other.left >= asked.came)
                and self._may_go_before(other.request, asked.request)
            ]
            assert asked.left - asked.came <= sum(map(self._work, others))

    def check_nothing_is_held(self) -> None:
        """All blocks and slots are free."""
        cache = self.drive.cache
        cache.check([])
        assert cache.free == cache.blocks
        if cache.host is not None:
            cache.begin_step()
            cache.host.check([])
            assert cache.host.free == cache.host.slots

    def _may_go_before(self, other: Request, request: Request) -> bool:
        if self.policy in IN_ORDER:
            return other.number <= request.number
        if self.policy == "priority":
            return other.priority <= request.priority
        if self.policy == "deadline":
            return other.due <= request.due
        if self.policy == "shortest":
            return other.arrived <= request.arrived + PATIENCE_SECONDS
        return True

    def _work(self, asked: Asked) -> int:
        """The most steps that a request's sequences take, were each alone and first."""
        request = asked.request
        computed = self._computed(request)
        samples = len(request.sequences)
        return samples * (computed + request.max_tokens + 1) + request.preemptions * computed

    def _computed(self, request: Request) -> int:
        """The most steps in which all its tokens are computed."""
        return -(-request.grows_to // self.drive.max_num_batched_tokens)

    def _state(self, sequence: Sequence) -> str:
        if self.drive.is_started(sequence):
            return "started"
        if sequence.admitted:
            return "running"
        return "swapped" if sequence.swapped else "waiting"

    def _tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(count)]


@cache
def traffic(policy: str, seed: int, steps: int) -> Traffic:
    """Traffic that has ended."""
    found = Traffic(policy, seed)
    found.run(steps)
    return found


def _check(ended: Traffic) -> None:
    ended.check_answers()
    ended.check_waiting()
    ended.check_nothing_is_held()


@pytest.mark.parametrize(("policy", "seed", "steps"), QUICK)
def test_nobody_is_lost_or_starves(policy: str, seed: int, steps: int) -> None:
    _check(traffic(policy, seed, steps))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "seed", "steps"), SLOW)
def test_nobody_is_lost_or_starves_in_100000_steps(policy: str, seed: int, steps: int) -> None:
    _check(traffic(policy, seed, steps))


def test_everything_has_happened() -> None:
    """What the traffic is for: each event in the quick runs."""
    counts = sum((traffic(*each).counts for each in QUICK), Counter[str]())
    for event in ("itself", "abort", "error", "saved", "restored", "copied", "found", "swapped", "full", "dropped"):
        assert counts[event] > 0, event
    for state in ("waiting", "running", "swapped", "started"):
        assert counts[f"cancelled {state}"] > 0, state
    assert sum(steps for _, _, steps in SLOW) >= 100_000
