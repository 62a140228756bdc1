"""Parts of a divided model that draft: each rank computes its share of what one process drafts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.decoder.parts.batch import Run
from smelt.runtime.engine.executors.torch_executor import TorchExecutor
from smelt.runtime.speculation.counts import DraftCounts
from smelt.runtime.speculation.lookup_first import weights_of
from smelt.runtime.speculation.model_drafter import ModelDrafter
from smelt.system.errors import RuntimeProblem
from torch import Tensor
from transformers import AutoTokenizer

from ...tiny import SMELT_6M
from ..speculation.pretend import pretend_lookup

PROMPTS = [[1, 5, 9, 5, 9, 5, 9], [3, 4], [11], list(range(60, 5, -1))]
TEXTS = ["The river ran past the old mill", "She opened the door and", "In the morning the ship", "He had never", "The"]
TEXTS += ["It was", "When the king", "A small boy", "After the war", "I do not", "They said that", "Nothing in the"]
ENGINE: dict[str, Any] = {"quiet": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "block_size": 4}
HOST: dict[str, Any] = {"host_cache_bytes": 1 << 20, "swap": "swap"}
WAYS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=2, expert parallel": {"tp": 2, "enable_expert_parallel": True},
    "pp=2": {"pp": 2},
    "pp=3": {"pp": 3},
    "tp=2, pp=2": {"tp": 2, "pp": 2},
    "cp=2": {"cp": 2},
    "tp=2, cp=2": {"tp": 2, "cp": 2},
}
GREEDY = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, temperature=0, logprobs=500, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=3, top_p=0.95, ignore_eos=True)


def answered(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], DraftCounts]:
    """Tokens, twice: prompts are cached the second time; and what became of drafts."""
    found = [[output.outputs[0].token_ids for output in engine.generate(prompts, SAMPLED)] for _ in range(2)]
    assert found[0] == found[1]
    assert engine.drafting is not None
    return found[0], engine.drafting.total


def one_token_branches(engine: Engine) -> None:
    """Let the branches of an engine's model not go on."""
    weights, drafting = weights_of(engine.drafter), engine.drafting
    assert weights is not None
    assert drafting is not None
    weights.longest_branch = drafting._longest_branch = 1


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "lookup+"])
@pytest.mark.parametrize(
    ("way", "architecture", "layers"),
    [
        ("tp=2", "llama", 2),
        ("tp=2", "opt", 1),
        ("tp=2, expert parallel", "mixtral", 3),
        ("pp=2", "llama", 3),  # in the middle of the second stage
        ("pp=2", "gemma3_text", 1),  # in the middle of the first
        ("pp=3", "llama", 1),  # all of the first, and others have none
        ("tp=2, pp=2", "gemma3_text", 2),
        ("cp=2", "llama", 2),
        ("tp=2, cp=2", "gemma3_text", 3),
    ],
)
def test_an_early_exit_drafts_what_it_drafts_on_one_process(
    tiny: Callable[..., Path], way: str, architecture: str, layers: int, before: str
) -> None:
    model = tiny(architecture, torch.float32, num_hidden_layers=4)
    exits = {"drafter": f"{before}early-exit:{layers}", "draft_tokens": 3, "draft_branches": 0 if "cp" in way else 2}
    with closing(Engine(model, **ENGINE)) as plain:
        known = plain.generate(PROMPTS, SAMPLED)
    tokens = [output.outputs[0].token_ids for output in known]
    with closing(Engine(model, **exits, **ENGINE)) as one:
        one_token_branches(one)  # as they are on several
        if before:
            pretend_lookup(one, known)
        counted = answered(one, PROMPTS)[1]
    with closing(Engine(model, **exits, **WAYS[way], **HOST, **ENGINE)) as several:
        if before:
            pretend_lookup(several, known)
        assert answered(several, PROMPTS) == (tokens, counted)
    assert counted.all_accepted > 0
    assert (counted.looked_up > 0) == (before != "")


def by_both(engine: Engine, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of a text, of all bits and of the upper ones."""
    run = Run(tokens, 0, list(range(-(-len(tokens) // 4))), len(tokens), len(tokens))
    executor, drafter = engine.executor, engine.drafter
    assert isinstance(executor, TorchExecutor)
    assert isinstance(drafter, ModelDrafter)
    with torch.inference_mode():
        return executor.by_model([run]), drafter.compute([run])


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tp=2", "pp=2", "pp=3", "tp=2, pp=2", "cp=2"])
def test_upper_bits_draft_and_answer_as_on_one_process(way: str, w4in8: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    prompts: list[list[int]] = [tokenizer(text).input_ids for text in TEXTS]
    nested = {"drafter": "nested", "draft_tokens": 3, "upper_bits_at": 3, "max_num_seqs": 4}
    logits, acceptance, likely = [], [], list[dict[int, float]]()
    for options in ({}, WAYS[way] | HOST):
        with closing(Engine(w4in8, **nested, **options, **ENGINE)) as engine:
            logits.append(by_both(engine, [token for prompt in prompts for token in prompt]))
            for first in range(0, len(prompts), 3):  # four sequences would be answered by the upper bits
                engine.generate(prompts[first : first + 3], GREEDY)
            assert engine.drafting is not None
            acceptance.append(engine.drafting.total.acceptance)
            names = [engine.add_request(prompts[0], ONE) for _ in range(4)]
            outputs = {}
            while engine.has_work:
                outputs |= {output.request_id: output for output in engine.step()}
            assert [outputs[name].upper_bits for name in names] == [False, False, False, True]
            likely += [(outputs[name].outputs[0].logprobs or [{}])[0] or {} for name in names]
    (all_bits, upper), apart = logits[0], far(*logits[0])
    assert far(logits[1][0], all_bits) < 0.3 * apart  # inputs are rounded, and by the largest that a rank has
    assert far(logits[1][1], upper) < 0.3 * apart
    # Where two tokens are about as likely, roundings decide, and another text follows: a thousand drafts have been 0.035 apart.
    assert acceptance[1] == pytest.approx(acceptance[0], abs=0.05)
    common = sorted(set.intersection(*map(set, likely)))
    assert len(common) > 100
    answers = torch.tensor([[each[token] for token in common] for each in likely])
    assert far(answers[4:], answers[:4]) < 0.3 * far(answers[0], answers[3])


@pytest.mark.slow
def test_a_model_without_planes_is_refused_on_all_ranks(tiny: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeProblem, match="no weights of 8 bits"):
        Engine(tiny("llama", torch.bfloat16), drafter="nested", tp=2, **ENGINE)
