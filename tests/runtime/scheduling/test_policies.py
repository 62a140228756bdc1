"""What each policy promises, on a scheduler alone: which tokens share a step, and who goes first."""

from __future__ import annotations

import random

import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.scheduling.policies.mlfq import SkipJoinFeedbackQueue
from smelt.runtime.scheduling.policies.table import POLICIES

from .drive import Drive, pieces


def _decoding_and_arriving(policy: str) -> Drive:
    """Two requests that decode, and two prompts of 40 and 6 tokens that have just come."""
    drive = Drive(policy)
    drive.add("a", 3, 30)
    drive.add("b", 3, 30)
    drive.step()
    drive.step()
    drive.add("long", 40, 3)
    drive.add("short", 6, 3)
    return drive


def test_decodes_are_in_every_step_and_prompts_fill_it() -> None:
    drive = _decoding_and_arriving("fcfs")
    found = [pieces(drive.step()) for _ in range(4)]
    assert found == [
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 12, "short": 2},
        {"a": 1, "b": 1, "long": 1, "short": 4},
    ]


def test_one_prompt_alone_joins_the_decodes() -> None:
    drive = _decoding_and_arriving("sarathi")
    found = [pieces(drive.step()) for _ in range(4)]
    assert found == [
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 14},
        {"a": 1, "b": 1, "long": 12},
        {"a": 1, "b": 1, "long": 1, "short": 6},
    ]


def test_prompts_are_whole_beside_decodes() -> None:
    drive = Drive("orca")
    drive.add("a", 3, 30)
    drive.step()
    drive.add("b", 12, 3)
    drive.add("c", 8, 3)  # 1 + 12 + 8 tokens are more than a step has
    drive.add("d", 2, 3)  # would fit, but is not first
    assert [pieces(drive.step()) for _ in range(2)] == [{"a": 1, "b": 12}, {"a": 1, "b": 1, "c": 8, "d": 2}]


@pytest.mark.parametrize("policy", ["orca", "prefill_first"])
def test_a_prompt_longer_than_a_step_is_computed_in_pieces(policy: str) -> None:
    drive = Drive(policy)
    drive.add("long", 40, 2)
    drive.run()
    assert [pieces(plan)["long"] for plan in drive.plans] == [16, 16, 8, 1]


def test_prompts_come_before_decodes() -> None:
    drive = Drive("prefill_first")
    drive.add("a", 3, 30)
    drive.add("b", 3, 30)
    drive.step()
    drive.step()
    drive.add("c", 12, 3)
    drive.add("d", 6, 3)  # 12 + 6 tokens are more than a step has
    found = [pieces(drive.step()) for _ in range(3)]
    assert found == [{"c": 12}, {"d": 6}, {"a": 1, "b": 1, "c": 1, "d": 1}]


def test_a_batch_starts_when_the_last_has_ended() -> None:
    drive = Drive("static", max_num_seqs=2)
    for name, output in (("a", 2), ("b", 9), ("c", 2)):
        drive.add(name, 3, output)
    drive.run()
    assert drive.first["c"] == drive.ended["b"] + 1


def test_the_most_urgent_interrupt_others() -> None:
    drive = Drive("priority", max_num_seqs=2)
    drive.add("a", 3, 20, priority=1)
    drive.add("b", 3, 20, priority=2)
    drive.step()
    drive.add("equal", 3, 20, priority=1)
    drive.add("urgent", 3, 5, priority=0)
    assert set(pieces(drive.step())) == {"a", "urgent"}, "b, of the highest number, gives way, and equal does not"
    drive.run()
    assert sorted(drive.ended, key=drive.ended.__getitem__) == ["urgent", "a", "equal", "b"]


def test_the_most_urgent_get_blocks_of_others() -> None:
    """Two requests fill the cache; a third needs as much as one of them has."""
    drive = Drive("priority", blocks=10)
    victim = drive.add("late", 16, 4, priority=3)
    drive.add("early", 16, 4, priority=2)
    drive.step()
    drive.step()
    drive.add("urgent", 12, 4, priority=1)
    drive.step()
    assert victim.preemptions == 1
    assert {s.request.id for s in drive.scheduler.running} == {"early", "urgent"}
    drive.run()
    drive.cache.check([])


def test_the_earliest_deadline_goes_first() -> None:
    drive = Drive("deadline", max_num_seqs=1)
    drive.add("none", 3, 12)
    drive.step()
    drive.add("late", 3, 5, deadline=1000)
    drive.add("soon", 3, 5, deadline=10)
    assert set(pieces(drive.step())) == {"soon"}, "what runs gives its place away"
    drive.run()
    assert sorted(drive.ended, key=drive.ended.__getitem__) == ["soon", "late", "none"]


def test_the_shortest_prediction_goes_first() -> None:
    drive = Drive("shortest", max_num_seqs=1)
    drive.add("none", 3, 12)
    drive.add("wrong", 3, 20, predicted=1)
    drive.add("right", 3, 5, predicted=5)
    drive.run()
    assert sorted(drive.ended, key=drive.ended.__getitem__) == ["wrong", "right", "none"]


def test_short_requests_do_not_hold_up_a_long_one_forever() -> None:
    drive = Drive("shortest", max_num_seqs=1)
    drive.add("long", 3, 50)
    for i in range(40):
        drive.add(f"short {i}", 3, 2)
        drive.step()
        drive.step()
    assert 30 < drive.first["long"] < 40, "it waits for 30 seconds"


@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "orca"])
def test_nobody_starts_past_one_that_has_just_lost_its_blocks(policy: str) -> None:
    """The second request lacks a block in the third step and gives up its own, which would do for the third request."""
    drive = Drive(policy, blocks=4)
    drive.add("a", 4, 8)
    second = drive.add("b", 7, 5).sequences[0]
    drive.step()
    drive.step()
    third = drive.add("c", 3, 2).sequences[0]
    while drive.scheduler.has_work:
        drive.step()
        assert not (third in drive.scheduler.running and second in drive.scheduler.waiting)
    assert second.request.preemptions == 1


@pytest.mark.few(6)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("predicts", [False, True])
def test_all_end_in_a_cache_that_is_too_small_for_them_together(policy: str, predicts: bool) -> None:
    draw = random.Random(policy)
    drive = Drive(policy, blocks=24, predicts=predicts)
    for i in range(300):
        drive.add(f"{i}", draw.randint(1, 30), draw.randint(1, 40), priority=draw.randrange(3))
        for _ in range(draw.randrange(8)):
            drive.step()
            drive.cache.check([s.blocks for s in [*drive.scheduler.running, *drive.scheduler.waiting]])
    drive.run()
    assert len(drive.ended) == 300
    drive.cache.check([])


def test_short_outputs_overtake_long_ones_that_came_first() -> None:
    """Nobody knows their lengths: two long ones use their quanta, and make way."""
    ended = {}
    for policy in ("fcfs", "mlfq"):
        drive = Drive(policy, max_num_seqs=2)
        for name, output in (("long 1", 60), ("long 2", 60), ("short 1", 3), ("short 2", 3)):
            drive.add(name, 4, output)
        drive.run()
        ended[policy] = drive.ended
        assert drive.scheduler.preemptions == 0, "there is room for all of them"
    assert min(ended["fcfs"][name] for name in ("short 1", "short 2")) > 60
    assert max(ended["mlfq"][name] for name in ("short 1", "short 2")) < 20
    assert max(ended["mlfq"].values()) <= max(ended["fcfs"].values()) + 3


def test_a_long_prompt_skips_the_first_queues() -> None:
    drive = Drive("mlfq", max_num_seqs=1, max_num_batched_tokens=64)
    drive.add("teacher", 64, 2)  # a second for 64 tokens
    drive.run()
    drive.add("long", 640, 2)
    drive.add("short", 3, 2)
    drive.run()
    assert drive.ended["short"] < drive.first["long"]


def test_who_is_not_served_gets_its_turn() -> None:
    drive = Drive("mlfq", max_num_seqs=1)
    drive.add("long", 4, 2000)
    for i in range(800):
        drive.add(f"short {i}", 3, 1)
        drive.step()
    assert drive.plans[-1].chunks
    sequence = next(s for s in drive.scheduler.running if s.request.id == "long")
    assert len(sequence.generated) > 1, "after 500 quanta it is served once more"


def test_who_has_just_lost_its_blocks_is_no_victim_before_a_step_has_run() -> None:
    """Steps may be scheduled ahead: what it was served before it lost them does not count."""
    policy = SkipJoinFeedbackQueue(quantum=1.0)
    old, new = (Request(name, [1] * 10, SamplingParams(), 100) for name in ("old", "new"))
    old.number, new.number, new.arrived = 0, 1, 50.0
    running, waiting = Sequence(old, 0, [1] * 10), Sequence(new, 0, [1] * 10)
    old.sequences, new.sequences = [running], [waiting]
    policy.order([], [running], 1)
    running.computed = 9
    prompt = StepPlan([Chunk(running, 0, 100, True)], at=0.0)
    for _ in range(2):
        policy.ran(prompt, 100.0)
    policy.begin(100.0)
    policy.order([waiting], [running], 1)
    assert policy.gives_way(waiting, [running]) is running
    old.preemptions += 1
    assert policy.gives_way(waiting, [running]) is None
