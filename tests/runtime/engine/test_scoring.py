"""Scores of given continuations against transformers' log probabilities, and what they cost to compute."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from smelt.runtime import Engine, RuntimeProblem, SamplingParams
from transformers import AutoConfig, AutoModelForCausalLM

from ...tiny import SMELT_6M


def _pairs(count: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(0)

    def some(least: int, most: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(draw.randint(least, most))]

    contexts = [some(1, 50) for _ in range(5)]
    contexts += [contexts[0] + some(1, 20)]
    return [(draw.choice(contexts), some(1, 40)) for _ in range(count)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "block_size": 4},
        {"block_size": 4, "kv_cache_memory_bytes": 34},
        {"enable_prefix_caching": False},
        {"policy": "static"},
    ],
    ids=["plain", "pieces", "starved", "unshared", "static"],
)
def test_scores_are_transformers(options: dict[str, int], tiny: Callable[..., Path]) -> None:
    path = tiny()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if "kv_cache_memory_bytes" in options:
        held = options["kv_cache_memory_bytes"] * _block_bytes(path, options["block_size"])
        options = options | {"max_model_len": 112, "max_num_seqs": 8, "kv_cache_memory_bytes": held}
    engine = Engine(path, quiet=True, **options)  # type: ignore[arg-type]
    pairs = _pairs(40, model.config.vocab_size)
    found = engine.score(pairs)
    for (context, continuation), scores in zip(pairs, found, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        expected = rows[torch.arange(len(continuation)), continuation]
        torch.testing.assert_close(torch.tensor([s.logprob for s in scores]), expected, rtol=1e-4, atol=1e-4)
        assert [s.is_best for s in scores] == (rows.argmax(-1) == torch.tensor(continuation)).tolist()
    if "kv_cache_memory_bytes" in options:
        assert engine.scheduler.preemptions > 0
    engine.cache.check([])
    assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].finished


def test_a_shared_context_is_computed_once() -> None:
    engine = Engine(SMELT_6M, quiet=True)
    computed: list[int] = []
    execute = engine.executor.execute

    def counting(plan):  # type: ignore[no-untyped-def]
        computed.append(plan.tokens)
        return execute(plan)

    engine.executor.execute = counting  # type: ignore[method-assign]
    context = list(range(100, 137))
    engine.score([(context, [5]), (context, [6]), (context, [7, 8, 9]), (context, [7, 8, 9])])
    assert sum(computed) == len(context) + 2


def test_a_whole_context_length_can_be_scored_and_no_more() -> None:
    engine = Engine(SMELT_6M, max_model_len=32, quiet=True)
    assert len(engine.score([(list(range(2, 22)), list(range(30, 43)))])[0]) == 13
    with pytest.raises(RuntimeProblem, match="have 34 tokens, more than the engine's max_model_len of 32 plus one"):
        engine.score([(list(range(2, 22)), list(range(30, 44)))])
    with pytest.raises(RuntimeProblem, match="the continuation is empty"):
        engine.score([([1], [])])
    with pytest.raises(RuntimeProblem, match="the context has token 99999, outside"):
        engine.score([([99999], [1])])


def test_what_does_not_fit_into_the_cache_is_refused(tiny: Callable[..., Path]) -> None:
    path = tiny()
    engine = Engine(path, quiet=True, block_size=4, kv_cache_memory_bytes=5 * _block_bytes(path, 4))
    assert len(engine.score([([1] * 10, [2] * 11)])[0]) == 11
    with pytest.raises(RuntimeProblem, match="may grow to 21 tokens, which need 6 cache blocks, but there are 5"):
        engine.score([([1] * 10, [2] * 12)])


def test_prompt_logprobs_are_returned_once_when_a_prompt_is_computed_again(tiny: Callable[..., Path]) -> None:
    path = tiny()
    alone = Engine(path, quiet=True)
    starved = Engine(
        path,
        quiet=True,
        block_size=4,
        max_num_batched_tokens=8,
        max_model_len=64,
        kv_cache_memory_bytes=26 * _block_bytes(path, 4),
    )
    prompts = [[(7 * i + j) % 50 + 1 for j in range(40)] for i in range(4)]
    params = SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0, ignore_eos=True)
    for prompt, output in zip(prompts, starved.generate(prompts, params), strict=True):
        expected = alone.generate([prompt], params)[0].prompt_logprobs
        assert output.prompt_logprobs is not None
        assert expected is not None
        assert [list(entry) for entry in output.prompt_logprobs] == [list(entry) for entry in expected]
    assert starved.scheduler.preemptions > 0


def test_a_model_whose_logits_are_not_numbers_is_reported(tiny: Callable[..., Path]) -> None:
    path = tiny()
    weights = AutoModelForCausalLM.from_pretrained(path).state_dict()
    weights["model.norm.weight"][0] = float("nan")
    running = Engine(path, quiet=True)
    # No file may hold such a weight; a model that is being trained may come to have one.
    running.take_weights(AutoConfig.from_pretrained(path), weights, weights.__getitem__)
    with pytest.raises(RuntimeProblem, match="logits are NaN or infinite"):
        running.score([([1, 2], [3])])


def _block_bytes(path: Path, block_size: int) -> int:
    found = Engine(path, quiet=True, max_model_len=16, max_num_seqs=1, block_size=block_size).reservation
    return found.cache // found.blocks
