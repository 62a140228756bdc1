"""A scheduling policy is one class: one of our own runs requests to their ends, and the table's names select the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
from smelt.runtime import RuntimeProblem, SamplingParams
from smelt.runtime.blocks.block_cache import BlockCache
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.policies.fcfs import FirstComeFirstServed
from smelt.runtime.scheduling.policies.static import StaticBatching
from smelt.runtime.scheduling.policies.table import POLICIES
from smelt.runtime.scheduling.scheduler import Scheduler

from ..drive import engine


class ShortestPromptFirst(FirstComeFirstServed):
    """Of those that wait the shortest starts next; of those that run the shortest keeps its blocks the longest."""

    def order(self, waiting: SequenceOf[Sequence], running: list[Sequence], places: int) -> Iterable[Sequence]:
        return [*sorted(running, key=_prompt_length), *sorted(waiting, key=_prompt_length)]


def _prompt_length(sequence: Sequence) -> int:
    return len(sequence.request.prompt)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy under a name, as a row of the table would give it one."""
    monkeypatch.setitem(POLICIES, "shortest", ShortestPromptFirst)
    return "shortest"


PROMPTS = [[5 + i] * length for i, length in enumerate((40, 9, 30, 3, 21))]
BEAMS = SamplingParams(beam_width=3, max_tokens=6)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEVERAL = SamplingParams(n=2, temperature=0.8, seed=1, max_tokens=5)


def test_the_shortest_prompt_is_served_first(tiny: Callable[..., Path], named: str) -> None:
    running = engine(tiny("llama"), policy=named, max_num_seqs=1)
    order: list[str] = []
    for i, prompt in enumerate(PROMPTS):
        running.add_request(prompt, GREEDY, id=str(i))
    while running.has_work:
        order += [output.request_id for output in running.step() if output.finished]
    assert order == sorted(order, key=lambda name: len(PROMPTS[int(name)])) != sorted(order)


@pytest.mark.parametrize("blocks", [8, 11, 40])
def test_tokens_do_not_depend_on_the_policy(tiny: Callable[..., Path], named: str, blocks: int) -> None:
    """Beams, samples and greedy requests, in caches in which hardly more than one of them fits at a time."""
    path = tiny("llama")
    params = [GREEDY, BEAMS, GREEDY, SEVERAL, BEAMS]
    expected = engine(path).generate(PROMPTS, params)
    running = engine(path, policy=named, max_num_batched_tokens=16)
    running.core.scheduler = Scheduler(
        BlockCache(blocks, 8), max_num_batched_tokens=16, max_num_seqs=8, policy=ShortestPromptFirst()
    )
    found = running.generate(PROMPTS, params)
    assert [[c.token_ids for c in o.outputs] for o in found] == [[c.token_ids for c in o.outputs] for o in expected]
    assert (running.scheduler.preemptions > 0) == (blocks < 40)
    running.cache.check([])


def test_names_select_policies(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    assert type(engine(path).scheduler.policy) is FirstComeFirstServed
    assert isinstance(engine(path, policy="static").scheduler.policy, StaticBatching)
    with pytest.raises(RuntimeProblem, match="policy is 'fastest'; it must be fcfs, static"):
        engine(path, policy="fastest")


class LetsTheFirstGiveWay(FirstComeFirstServed):
    def victim(self, sequence: Sequence, running: list[Sequence]) -> Sequence:
        return running[0]


def _run(scheduler: Scheduler, steps: int) -> None:
    for _ in range(steps):
        plan = scheduler.schedule()
        scheduler.started(plan)
        scheduler.commit(plan)
        for chunk in plan.chunks:
            chunk.sequence.tokens.append(1)


def test_a_policy_cannot_break_a_step() -> None:
    """Who is in the step already is never asked to give way: here the second of two lacks a block, and has to give up its own."""
    scheduler = Scheduler(BlockCache(5, 4), max_num_batched_tokens=16, max_num_seqs=4, policy=LetsTheFirstGiveWay())
    sequences: list[Sequence] = []
    for i in range(2):
        request = Request(str(i), [i] * 7, SamplingParams(), 16)
        request.sequences = [Sequence(request, 0, [i] * 7)]
        sequences += request.sequences
        scheduler.add(sequences[-1])
    _run(scheduler, 3)
    assert scheduler.running == sequences[:1]
    assert sequences[0].computed == 9
    assert sequences[1].blocks == []
