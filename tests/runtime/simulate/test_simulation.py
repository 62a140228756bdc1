"""The simulator: against arithmetic, against itself step by step, and against what the real engine planned."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime import RuntimeProblem, SamplingParams
from smelt.runtime.costs.work import LinearCost, StepWork
from smelt.runtime.requests.synthetic import LengthDistribution, synthetic
from smelt.runtime.requests.trace import Arrival, repeated
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler
from smelt.runtime.scheduling.swapping import TransferCost
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.replica import Replica
from smelt.runtime.simulate.results import Histogram
from smelt.runtime.simulate.simulation import simulate

from ..drive import engine
from .traffic import random_traffic

COST = LinearCost(step=1.0, token=0.01, sequence=0.02, cached=0.001)


def test_one_request_takes_what_arithmetic_says() -> None:
    """100 tokens in two steps of 60 and 40, then four decodes."""
    found = simulate([Arrival(0.0, 100, 5)], SimulatedEngine(blocks=100, max_num_batched_tokens=60), COST)
    prefill = (1 + 0.6 + 0.06) + (1 + 0.4 + 0.02 + 0.1)
    decodes = [1 + 0.01 + 0.02 + 0.001 * context for context in range(101, 105)]
    assert found.steps == 6
    assert found.first_token.mean == pytest.approx(prefill)
    assert found.completion.mean == pytest.approx(prefill + sum(decodes))
    assert found.between_tokens.mean == pytest.approx(sum(decodes) / 4)
    assert found.seconds == pytest.approx(prefill + sum(decodes))
    assert (found.prompt_tokens, found.output_tokens, found.busy) == (100, 5, 1.0)


def test_a_pause_without_requests_is_not_busy() -> None:
    arrivals = [Arrival(0.0, 1, 1), Arrival(100.0, 1, 1)]
    found = simulate(arrivals, SimulatedEngine(blocks=10), LinearCost(step=2.0))
    assert (found.seconds, found.steps) == (102.0, 2)
    assert found.busy == pytest.approx(4 / 102)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pause", [1.0, 10.0])
def test_repeated_steps_are_those_one_by_one(policy: str, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = random_traffic(120, pause=pause)
    options = SimulatedEngine(
        blocks=120, policy=policy, admission="immediate", max_num_batched_tokens=64, max_num_seqs=12
    )
    fast = simulate(arrivals, options, COST)
    monkeypatch.setattr(Replica, "_repeat", lambda *_: None)
    slow = simulate(arrivals, options, COST)
    assert (fast.steps, fast.preemptions, fast.requests) == (slow.steps, slow.preemptions, 120)
    for name in ("first_token", "completion", "normalized", "queue"):
        for share in ("mean", "p50", "p99"):
            assert getattr(getattr(fast, name), share) == pytest.approx(getattr(getattr(slow, name), share), rel=1e-9)
    assert fast.between_tokens.mean == pytest.approx(slow.between_tokens.mean, rel=1e-9)
    assert fast.cache.waste == pytest.approx(slow.cache.waste, rel=0.02)
    assert fast.cache.filled == pytest.approx(slow.cache.filled, rel=0.002)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_requests_end_in_a_starved_cache_with_host_memory(policy: str) -> None:
    options = SimulatedEngine(
        blocks=30, policy=policy, swap="swap", host_blocks=60, transfer=TransferCost(1, 1, 0.0, 1e6), max_tokens=250
    )
    found = simulate(random_traffic(150, seed=1, pause=2.0), options, COST)
    assert found.requests == 150
    assert (found.swaps > 0) == (found.preemptions > 0)


def test_prefixes_are_found_where_the_trace_says_so() -> None:
    """A session's second turn repeats its first; another session shares a block of 512."""
    arrivals = [
        Arrival(0.0, 1100, 10, (1, 2, 3)),
        Arrival(1000.0, 1600, 10, (1, 2, 3, 4)),
        Arrival(2000.0, 700, 10, (1, 9)),
    ]
    found = simulate(arrivals, SimulatedEngine(blocks=1000), COST)
    # The third block is found as far as the first turn had filled it: 1100 tokens are 68 blocks of 16, 1088 tokens.
    assert found.cached_share == pytest.approx((0 + 1088 + 512) / (1100 + 1600 + 700))


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(
        RuntimeProblem, match="of 100 prompt tokens and 100 to generate needs 13 cache blocks, and there are 12"
    ):
        simulate([Arrival(0.0, 100, 100)], SimulatedEngine(blocks=12), COST)


def test_a_trace_is_repeated_and_sped_up() -> None:
    trace = [Arrival(0.0, 1, 1), Arrival(2.0, 2, 2), Arrival(6.0, 3, 3)]
    found = repeated(trace, 7, rate=2.0)
    assert [a.prompt for a in found] == [1, 2, 3, 1, 2, 3, 1]
    assert [a.at for a in found] == pytest.approx([0, 1, 3, 4.5, 5.5, 7.5, 9])


def test_a_repetition_has_prompts_of_its_own() -> None:
    """Of 60 prompts without a common beginning, played four times, none is in the prefix cache."""
    trace = [Arrival(2.0 * i, 1024, 4, (2 * i, 2 * i + 1)) for i in range(60)]
    found = simulate(repeated(trace, 240), SimulatedEngine(blocks=100_000), COST)
    assert sum(each.cached for each in found.served) == 0
    shared = [replace(each, prefix=(0, each.prefix[1])) for each in trace]
    found = simulate(repeated(shared, 240), SimulatedEngine(blocks=100_000), COST)
    assert sum(each.cached for each in found.served) == 512 * (240 - 4)


def test_a_histogram_is_exact_within_a_hundredth() -> None:
    draw = random.Random(0)
    values = [draw.lognormvariate(0, 2) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    found = histogram.distribution()
    values.sort()
    assert found.mean == pytest.approx(sum(values) / len(values))
    for share, got in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert got == pytest.approx(values[int(share * len(values))], rel=0.011)


class _Replayed:
    """The time from each step of an engine to its next, in order."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    def seconds(self, work: StepWork) -> float:
        return next(self._seconds)


def _plan(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {chunk.sequence.request.id: (chunk.start, chunk.count) for chunk in plan.chunks}


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_are_those_of_the_engine(policy: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come while others run, in a cache that is too small for them; the engine's own times are replayed: when each step
    was scheduled, and when it ended."""
    draw = random.Random(policy)
    sizes = [(draw.randint(1, 60), draw.randint(1, 30)) for _ in range(24)]
    running = engine(tiny("llama", num_hidden_layers=1), policy=policy, max_model_len=96, enable_prefix_caching=False)
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "block_size": 8}
    blocks = 26
    made = SimulatedEngine(blocks=blocks, policy=policy, **options)
    running.core.scheduler = made.scheduler(enable_prefix_caching=False)
    came: list[float] = []
    seen: list[tuple[float, dict[str, tuple[int, int]]]] = []
    ended: list[float] = []
    schedule, add, commit = running.scheduler.schedule, running.scheduler.add, running.scheduler.commit

    def scheduled(now: float = 0.0) -> StepPlan:
        plan = schedule(now)
        seen.append((now, _plan(plan)))
        return plan

    def added(sequence: Any, now: float = 0.0) -> None:
        came.append(now)
        add(sequence, now)

    def committed(plan: StepPlan, now: float = 0.0, *replaced: Any) -> None:
        ended.append(now)
        commit(plan, now, *replaced)

    monkeypatch.setattr(running.scheduler, "schedule", scheduled)
    monkeypatch.setattr(running.scheduler, "commit", committed)
    monkeypatch.setattr(running.scheduler, "add", added)
    todo = list(enumerate(sizes))
    while todo or running.has_work:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if todo:
                i, (prompt, output) = todo.pop(0)
                running.add_request(
                    [1 + i] * prompt, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True), id=str(i)
                )
        if running.has_work:
            running.step()
    assert running.scheduler.preemptions > 0 or policy == "static"
    times = [now for now, _ in seen]
    arrivals = [Arrival(at - times[0], *size) for at, size in zip(came, sizes, strict=True)]
    arrivals = [replace(arrival, at=max(0.0, arrival.at)) for arrival in arrivals]
    steps = [b - a for a, b in itertools.pairwise(times)] + [1.0]
    monkeypatch.setattr(Replica, "_repeat", lambda *_: None)
    planned: list[dict[str, tuple[int, int]]] = []
    begin = Replica.begin

    def begun(self: Replica, now: float) -> Any:
        plan, work = begin(self, now)
        planned.append(_plan(plan))
        return plan, work

    monkeypatch.setattr(Replica, "begin", begun)
    ends = iter(ended)
    replayed = Scheduler.commit
    monkeypatch.setattr(Scheduler, "commit", lambda self, plan, _: replayed(self, plan, next(ends) - times[0]))
    simulate(arrivals, made, _Replayed(steps))
    assert planned == [plan for _, plan in seen if plan]


def test_feedback_queues_do_not_spend_their_time_on_computing_prompts_again() -> None:
    """Long prompts and equal outputs in a cache for some of them: waits reach the limit of starvation, and who is promoted would
    take the blocks of those that run. FastServe's order loses here, but no more than its quanta cost."""
    lengths = (
        LengthDistribution.parse("lognormal:1200,0.5", "prompts"),
        LengthDistribution.parse("fixed:200", "outputs"),
    )
    arrivals = synthetic(*lengths, count=400, rate=1.3, longest=4096, burstiness=1.0, seed=0)
    cost = LinearCost(step=0.0165, token=1.6e-4, cached=2e-7)
    first, feedback = (
        simulate(arrivals, SimulatedEngine(981, policy=policy, max_num_seqs=16, max_tokens=2048), cost)
        for policy in ("fcfs", "mlfq")
    )
    assert feedback.completion.mean < 2.5 * first.completion.mean
    assert feedback.preemptions < len(arrivals)
