"""Requests that come while others wait are answered from the upper bits, in the same steps as the others, and say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.decoder.prompt_states import prompt_states
from smelt.runtime.serve.openai.usage import backend, usage
from smelt.runtime.speculation.model_drafter import ModelDrafter
from smelt.system.errors import RuntimeProblem
from transformers import AutoTokenizer

from ...tiny import SMELT_6M

TEXTS = ["The river ran past the old mill", "She opened the door and", "In the morning the ship", "He had never"]
PROMPTS: list[list[int]] = [AutoTokenizer.from_pretrained(SMELT_6M)(text).input_ids for text in TEXTS]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
ENGINE: dict[str, Any] = {"quiet": True, "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "drafter": "nested"}


def _first(engine: Engine, prompt: list[int], upper: bool) -> int:
    """The token that one of both models chooses after a prompt."""
    assert isinstance(engine.drafter, ModelDrafter)
    model = engine.drafter.model if upper else engine.model
    return int(model.head.logits(next(prompt_states(model, [prompt]))[0, -1:]).argmax())


def _alone(engine: Engine, prompt: list[int], upper: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What an engine answers that has no other request."""
    submit = engine._submit

    def marked(request: Any, sink: Any) -> None:
        request.upper_bits, request.salt = upper, b"a test %d" % upper
        submit(request, sink)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_submit", marked)
        (output,) = engine.generate([prompt], GREEDY)
    assert output.outputs[0].token_ids[0] == _first(engine, prompt, upper)
    return output.outputs[0].token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", [{}, {"draft_tokens": 3, "draft_branches": 2}], ids=str)
def test_those_that_come_while_others_wait_are_answered_from_the_upper_bits(
    drafts: dict[str, int], w4in8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(w4in8, upper_bits_at=2, **drafts, **ENGINE)
    prompts = [*PROMPTS, PROMPTS[0]]
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    found = [outputs[name] for name in names]
    assert [output.upper_bits for output in found] == [False, False, True, True, True]
    for prompt, output in zip(prompts, found, strict=True):
        assert output.outputs[0].token_ids == _alone(engine, prompt, output.upper_bits, monkeypatch)
        assert not output.upper_bits or output.draft_tokens == 0
    if drafts:
        assert engine.drafting is not None
        assert engine.drafting.total.branched > 0
        assert all(output.accepted_tokens for output in found[:2])
    apart = [_alone(engine, p, True, monkeypatch) != _alone(engine, p, False, monkeypatch) for p in PROMPTS]
    assert any(apart), "both models say the same: the test tests nothing"
    assert usage(found)["upper_bits"] is True
    assert backend(found[2]) == {"system_fingerprint": "upper-bits"}
    assert "upper_bits" not in usage(found[:2])
    assert backend(found[0]) == {}


def test_keys_and_values_of_both_are_not_mixed(w4in8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(w4in8, upper_bits_at=1, block_size=16, **ENGINE)
    long = [token for prompt in PROMPTS * 2 for token in prompt]
    (whole,) = engine.generate([long], GREEDY)
    first, second = engine.add_request(PROMPTS[1], GREEDY), engine.add_request(long, GREEDY)
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert not outputs[first].upper_bits
    assert outputs[second].upper_bits
    assert outputs[second].num_cached_tokens == 0
    assert outputs[second].outputs[0].token_ids == _alone(engine, long, True, monkeypatch)
    (again,) = engine.generate([long], GREEDY)
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize(
    "options", [{"drafter": "lookup"}, {"drafter": None}, {"drafter": "nested", "upper_bits_at": 0}]
)
def test_without_planes_there_are_no_upper_bits(options: dict[str, Any], tiny: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeProblem, match="with drafter nested"):
        Engine(tiny("llama"), quiet=True, **{"upper_bits_at": 2, **options})
