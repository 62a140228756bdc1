"""The choice between swapping and computing again, against the arithmetic of both."""

from __future__ import annotations

from typing import Any

import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.scheduling.swapping import Swapping, TransferCost

from .drive import Drive, alone

# Llama-3-8B's cache: 32 layers x 8 heads x 128 x 2 bytes, keys and values, in blocks of 16 positions.
BLOCK = 32 * 8 * 128 * 2 * 2 * 16


def _step(tokens: int) -> StepPlan:
    sequence = Sequence(Request("r", [1] * tokens, SamplingParams(), 9999), 0, [1] * tokens)
    return StepPlan([Chunk(sequence, 0, tokens, True)])


@pytest.mark.parametrize("transfer", [32 << 10, 1 << 20])
def test_long_transfers_move_the_crossover(transfer: int) -> None:
    """25 GB/s and 10 us a transfer: 2 MB of a block take 84 us in one piece of 2 MB, and 724 us in pieces of 32 kB."""
    cost = TransferCost(BLOCK, transfer, 10e-6, 25e9)
    one_block = (BLOCK / transfer) * 10e-6 + BLOCK / 25e9
    assert cost.seconds(1) == pytest.approx(one_block)
    crossover = 2 * one_block / 16  # seconds a token
    for factor, pays in ((0.9, False), (1.1, True)):
        swapping = Swapping("auto", 16, cost)
        swapping.ran(_step(512), 512 * crossover * factor)
        assert swapping.pays(1024) == pays


def test_without_a_measurement_it_computes_again() -> None:
    swapping = Swapping("auto", 16, TransferCost(BLOCK, BLOCK, 0.0, 1e12))
    assert not swapping.pays(100)
    swapping.ran(_step(3), 5.0)  # a decode's time says nothing about a prompt's
    assert not swapping.pays(100)
    swapping.ran(_step(512), 1.0)
    assert swapping.pays(100)
    assert not swapping.pays(0)


def test_decodes_say_nothing_about_a_prompts_token() -> None:
    """64 decodes of 10 ms are 156 us a token, for reading the weights once; a prompt's token takes 10 us."""
    swapping = Swapping("auto", 16, TransferCost(BLOCK, BLOCK, 10e-6, 25e9))  # 12 us a token, there and back
    swapping.ran(_step(512), 512 * 10e-6)
    assert not swapping.pays(1024)
    decodes = [Chunk(_step(100).chunks[0].sequence, 99, 1, True) for _ in range(64)]
    for _ in range(20):
        swapping.ran(StepPlan(decodes), 10e-3)
        swapping.ran(StepPlan([*decodes, *_step(32).chunks]), 10e-3)
    assert not swapping.pays(1024)


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first"])
def test_what_an_empty_plan_saves_is_copied_with_the_next_one(policy: str) -> None:
    """While the first one's last token is being computed, the second lacks a block and is swapped out: nobody is left to compute."""
    drive = Drive(policy, blocks=4, slots=4, swap="swap", ahead=True)
    drive.add("first", 4, 4)
    drive.add("second", 5, 8)
    drive.run()
    assert drive.scheduler.swaps == 1
    empty = next(i for i, plan in enumerate(drive.plans) if not plan.chunks)
    assert len(drive.plans[empty + 1].swap_out) == len(drive.plans[empty + 1].swap_in) == 2
    assert drive.answers["second"][0] == alone([1] * 5, b"", 0, 8)


def test_swapping_ahead_forgets_no_queue() -> None:
    """Those of all requests that wait, too, of which there are many more than of those that pause."""
    drive = Drive("mlfq", blocks=40, slots=400, swap="swap", max_num_seqs=8)
    for i in range(300):
        drive.add(f"{i}", 6, 12)
    jobs: dict[int, Any] = {}
    while drive.scheduler.has_work:
        drive.step()
        found = drive.scheduler.policy._jobs  # type: ignore[attr-defined]
        live = {id(request) for request in drive.requests.values()}
        assert all(found.get(key) is job for key, job in jobs.items() if key in live)
        jobs = dict(found)
    assert drive.scheduler.swaps > 0
