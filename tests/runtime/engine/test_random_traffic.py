"""Random traffic on a real engine under every policy: starved, with little host memory or much, cancelled, and with steps that fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime import Engine, RequestOutput, SamplingParams
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.scheduling.policies.table import POLICIES

from ...tiny import make_model, save_model
from ..drive import engine

LONGEST = 64
MOST = 24
BLOCKS = 10  # of 8 positions: two more than the longest request
HOSTS: dict[str, dict[str, Any]] = {
    "tiny": {"host_blocks": 2, "swap": "swap", "admission": "immediate"},
    "ample": {"host_blocks": 100, "swap": "swap", "admission": "immediate"},
    "none": {"host_blocks": 0, "admission": "immediate"},
    "predicted": {"host_blocks": 30, "swap": "auto", "admission": "predicted"},
}
QUICK = [("mlfq", "tiny"), ("priority", "ample")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("llama", seed=3, num_hidden_layers=1), tmp_path_factory.mktemp("llama"))


def _prompts(draw: random.Random) -> list[list[int]]:
    """Prompts of which most share their beginning with others."""
    common = [draw.randrange(4, 4096) for _ in range(30)]
    return [
        common[: draw.choice([0, 8, 17, 30])] + [draw.randrange(4, 4096) for _ in range(draw.choice([1, 5, 10]))]
        for _ in range(12)
    ]


def _starved(path: Path, policy: str, *, host_blocks: int, **options: Any) -> Engine:
    found = engine(path, max_model_len=LONGEST, max_num_seqs=1).reservation
    block = found.cache // found.blocks
    return engine(
        path,
        policy=policy,
        max_model_len=LONGEST,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=BLOCKS * block,
        host_cache_bytes=host_blocks * block,
        **options,
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "host"),
    [
        pytest.param(policy, host, marks=() if (policy, host) in QUICK else pytest.mark.slow)
        for policy in POLICIES
        for host in HOSTS
    ],
)
def test_tokens_are_those_of_each_request_alone(path: Path, policy: str, host: str) -> None:
    draw = random.Random(f"{policy} {host}")
    prompts = _prompts(draw)
    greedy = SamplingParams(temperature=0, max_tokens=MOST, ignore_eos=True)
    lone = engine(path, enable_prefix_caching=False)
    alone = [lone.generate(prompt, greedy)[0].outputs[0].token_ids for prompt in prompts]
    running = _starved(path, policy, **HOSTS[host])
    execute = running.executor.execute

    def sometimes_fails(plan: StepPlan) -> Any:
        if draw.random() < (0.05 if plan.swap_in else 0.003):
            raise MemoryError("no room for the logits")
        return execute(plan)

    running.executor.execute = sometimes_fails  # type: ignore[method-assign]
    asked: dict[str, list[int]] = {}
    finished: dict[str, RequestOutput] = {}
    steps = cancelled = failed = 0
    while steps < 400 or running.has_work:
        if steps < 400 and draw.random() < 0.25:
            which, most = draw.randrange(len(prompts)), draw.choice([1, 8, MOST])
            name = running.add_request(
                prompts[which],
                SamplingParams(temperature=0, max_tokens=most, n=draw.choice([1, 1, 1, 2]), ignore_eos=True),
                priority=draw.randrange(3),
                predicted_tokens=draw.choice([None, most]),
            )
            asked[name] = alone[which][:most]
        alive = [name for name in asked if running.is_running(name)]
        if alive and draw.random() < 0.02:
            name = draw.choice(alive)
            running.abort(name)
            del asked[name]
            cancelled += 1
        try:
            finished |= {output.request_id: output for output in running.step() if output.finished}
        except MemoryError:
            failed += 1
            assert not running.has_work
            asked = {name: tokens for name, tokens in asked.items() if name in finished}
        steps += 1
        assert steps < 4000, "requests do not end"
        everybody = [*running.scheduler.running, *running.scheduler.waiting]
        running.cache.check([sequence.blocks for sequence in everybody])
        if running.cache.host is not None:
            running.cache.host.check([sequence.saved for sequence in everybody])
    assert finished.keys() == asked.keys()
    for name, output in finished.items():
        assert output.error is None
        assert all(completion.token_ids == asked[name] for completion in output.outputs)
    running.cache.check([])
    assert running.cache.free == running.cache.blocks == BLOCKS
    preemptions, swaps = running.scheduler.preemptions, running.scheduler.swaps
    assert cancelled > 0
    assert preemptions > 0
    if HOSTS[host].get("swap") == "swap":
        assert swaps > 0
        assert (swaps < preemptions) == (host == "tiny"), "host memory is full now and then, or never"
