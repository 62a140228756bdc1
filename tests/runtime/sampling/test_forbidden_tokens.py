"""Tokens that alone may come, and words that may not, beside transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from smelt.runtime import Engine, SamplingParams
from smelt.runtime.sampling.bad_words import bad_words_tokens
from smelt.system.errors import RuntimeProblem
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ...tiny import SMELT_6M
from ..drive import engine
from ..engine.test_text import TOKENIZERS

PROMPTS = ["The city of London", "Once upon a time there was", "In the year"]


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with closing(engine(SMELT_6M)) as found:
        yield found


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)


def _theirs(model: PreTrainedModel, tokens: list[int], count: int, **options: Any) -> list[int]:
    ids = torch.tensor([tokens])
    asked = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **asked)[0, len(tokens) :].tolist()  # type: ignore[misc]


@pytest.mark.parametrize("text", PROMPTS)
def test_bad_words_do_not_come(text: str, running: Engine, model: PreTrainedModel) -> None:
    """Words of one token and of several, of what the model says without them."""
    plain = running.generate(text, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))[0]
    said = str(plain.outputs[0].text).split()
    words = tuple(dict.fromkeys([*said[:4], *(word for word in said if len(word) > 6)]))
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, bad_words=words)
    found = running.generate(text, params)[0]
    ids = [list(each) for each in bad_words_tokens(running.tokenizer, words)]
    assert any(len(each) > 1 for each in ids)
    # transformers counts the prompt, too; of these words none stands at its end.
    assert found.outputs[0].token_ids == _theirs(model, plain.prompt_token_ids, 24, bad_words_ids=ids)
    assert set(words) <= set(said)
    assert not set(words) & set(str(found.outputs[0].text).split())


def test_words_are_written_as_they_stand_in_texts() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    forms = bad_words_tokens(tokenizer, [" river"])
    assert {tokenizer.decode(list(form)) for form in forms} == {"river", " river"}
    text = tokenizer("the river ran", add_special_tokens=False).input_ids
    assert any(tuple(text[i : i + len(form)]) == form for form in forms for i in range(len(text)))


def test_words_of_sentencepiece_are_those_within_a_word_too() -> None:
    """Its tokenizers begin every text with a space."""
    tokenizer = TOKENIZERS["sentencepiece"]()
    forms = bad_words_tokens(tokenizer, ["me"])
    for text in ("me", "the me", "theme", "\nme"):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert any(tuple(tokens[-len(form) :]) == form for form in forms), text


def test_no_other_tokens_come(running: Engine, model: PreTrainedModel) -> None:
    tokens = list(running.tokenizer(PROMPTS[0]).input_ids)
    allowed = tuple(range(100, 160))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, allowed_token_ids=allowed)
    others = [token for token in range(model.config.vocab_size) if token not in allowed]
    found = running.generate(tokens, params)[0].outputs[0].token_ids
    assert found == _theirs(model, tokens, 20, suppress_tokens=others)
    sampled = SamplingParams(
        max_tokens=40, temperature=3.0, n=4, seed=1, allowed_token_ids=allowed, repetition_penalty=1.2
    )
    for output in running.generate(tokens, sampled)[0].outputs:
        assert set(output.token_ids) <= set(allowed)


def test_beams_follow_both(running: Engine, model: PreTrainedModel) -> None:
    tokens = list(running.tokenizer(PROMPTS[1]).input_ids)
    allowed = tuple(range(80, 200))
    others = [token for token in range(model.config.vocab_size) if token not in allowed]
    common = {"max_tokens": 12, "temperature": 0, "beam_width": 3, "ignore_eos": True}
    found = running.generate(tokens, SamplingParams(**common, allowed_token_ids=allowed))[0]
    assert found.outputs[0].token_ids == _theirs(model, tokens, 12, num_beams=3, suppress_tokens=others)
    words = ("was", "a")
    found = running.generate(tokens, SamplingParams(**common, bad_words=words))[0]
    ids = [list(each) for each in bad_words_tokens(running.tokenizer, words)]
    assert found.outputs[0].token_ids == _theirs(model, tokens, 12, num_beams=3, bad_words_ids=ids)


@pytest.mark.parametrize(("allowed", "texts"), [((100,), 1), ((100, 101), 3)])
def test_fewer_tokens_than_beams(allowed: tuple[int, ...], texts: int, running: Engine) -> None:
    params = SamplingParams(beam_width=3, n=3, max_tokens=4, temperature=0, allowed_token_ids=allowed)
    found = [each.token_ids for each in running.generate(PROMPTS[0], params)[0].outputs]
    assert len(found) == len(set(map(tuple, found))) == texts
    assert all(len(each) == 4 and set(each) <= set(allowed) for each in found)


def test_beams_of_which_every_token_is_forbidden_end(running: Engine) -> None:
    params = SamplingParams(beam_width=2, max_tokens=4, min_tokens=3, temperature=0, stop_token_ids=range(4096))  # type: ignore[arg-type]
    (found,) = running.generate(PROMPTS[0], params)[0].outputs
    assert 1 <= len(found.token_ids) <= 4


@pytest.mark.parametrize("drafter", ["lookup", "early-exit:3"])
def test_drafts_follow_both(drafter: str, running: Engine) -> None:
    asked = [
        SamplingParams(max_tokens=32, seed=3, ignore_eos=True, bad_words=("the", "was", "and")),
        SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, allowed_token_ids=range(80, 300)),  # type: ignore[arg-type]
    ]
    prompts = ["the river ran and the river ran and"] * 2
    plain = [each.outputs[0].token_ids for each in running.generate(prompts, asked)]
    with closing(engine(SMELT_6M, drafter=drafter, draft_tokens=3)) as drafting:
        found = drafting.generate(prompts, asked)
        assert [each.outputs[0].token_ids for each in found] == plain
        assert sum(each.draft_tokens for each in found) > 0


def test_a_bad_word_comes_where_nothing_else_is_allowed(running: Engine) -> None:
    (token,) = running.tokenizer(" river", add_special_tokens=False).input_ids
    params = SamplingParams(
        max_tokens=5, temperature=1.0, allowed_token_ids=(token,), bad_words=("river",), min_tokens=2
    )
    assert running.generate(PROMPTS[0], params)[0].outputs[0].token_ids == [token] * 5


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"bad_words": ("a", " ")}, "bad_words is .*; it must be strings that are not blank"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is .*; it must be token ids, at least one, or None"),
        ({"allowed_token_ids": (5, 4096)}, "name token 4096, outside the vocabulary of 4096"),
    ],
)
def test_mistakes_get_a_sentence(params: dict[str, Any], sentence: str, running: Engine) -> None:
    with pytest.raises(RuntimeProblem, match=sentence):
        running.generate([5], SamplingParams(**params))
