"""``/v1/completions`` through OpenAI's client and lm-eval's requests, against the engine itself."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import openai
import pytest
import torch
from smelt.runtime import SamplingParams
from smelt.runtime.engine.engine import Engine
from transformers import AutoModelForCausalLM

from ....tiny import SMELT_6M
from ..serving import Serving

PROMPT = "The city of"


@pytest.fixture
def client(server: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def _ids(server: Serving, text: str) -> list[int]:
    return next(iter(server.models)).encode(text)


def test_a_completion_is_the_engines(client: openai.OpenAI, server: Serving, engine: Engine) -> None:
    wanted = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0]
    found = client.completions.create(model="smelt-6m", prompt=PROMPT, max_tokens=20, temperature=0)
    assert found.choices[0].text == wanted.outputs[0].text
    assert found.choices[0].finish_reason == wanted.outputs[0].finish_reason
    assert found.usage is not None
    prompt = len(_ids(server, PROMPT))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (
        prompt,
        20,
        prompt + 20,
    )


def test_a_stream_says_the_same_in_pieces(client: openai.OpenAI, server: Serving) -> None:
    asked: dict[str, Any] = {
        "model": "smelt-6m",
        "prompt": [PROMPT, "Once upon a"],
        "max_tokens": 12,
        "temperature": 0,
        "n": 1,
    }
    whole = client.completions.create(**asked)
    texts, finished = ["", ""], ["", ""]
    # The client's strict types have no chunk without a reason, which OpenAI's own chunks lack, too.
    lenient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    chunks = list(lenient.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            finished[choice.index] = choice.finish_reason or finished[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert finished == ["length", "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_prefix_that_was_served_before_is_counted_as_cached(client: openai.OpenAI) -> None:
    prompt = "A story about a small town. " * 12
    for is_cached in (False, True):
        found = client.completions.create(model="smelt-6m", prompt=prompt, max_tokens=2, temperature=0)
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        cached = found.usage.prompt_tokens_details.cached_tokens or 0
        assert (cached >= 64) == is_cached
        assert cached < found.usage.prompt_tokens


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, engine: Engine) -> None:
    text = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0].text or ""
    stop = text[10:14]
    found = client.completions.create(model="smelt-6m", prompt=PROMPT, max_tokens=20, temperature=0, stop=[stop])
    assert found.choices[0].text == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    assert (found.choices[0].model_extra or {})["stop_reason"] == stop


def test_what_ends_a_text_is_kept_if_asked_for(client: openai.OpenAI, engine: Engine, server: Serving) -> None:
    whole = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
    text = whole.text or ""
    asked: dict[str, Any] = {"model": "smelt-6m", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    kept = {"include_stop_str_in_output": True}
    stop = text[10:14]
    found = client.completions.create(**asked, stop=[stop], extra_body=kept).choices[0]
    assert found.text == text[: text.index(stop) + len(stop)]
    lenient = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    pieces = lenient.completions.create(**asked, stop=[stop], stream=True, extra_body=kept)
    assert "".join(piece.choices[0].text for piece in pieces) == found.text
    token = whole.token_ids[5]
    first = whole.token_ids.index(token)
    for extra, count in ((kept, first + 1), ({}, first)):
        found = client.completions.create(**asked, extra_body={**extra, "stop_token_ids": [token]}).choices[0]
        assert found.text == next(iter(server.models)).decode(whole.token_ids[:count])
        assert (found.model_extra or {})["stop_reason"] == token


def test_special_tokens_are_kept_if_asked_for(client: openai.OpenAI, engine: Engine) -> None:
    end = next(iter(engine.ends))
    asked: dict[str, Any] = {"model": "smelt-6m", "prompt": PROMPT, "max_tokens": 2, "logit_bias": {str(end): 100}}
    for skips in (True, False):
        extra = {"ignore_eos": True, "skip_special_tokens": skips}
        found = client.completions.create(**asked, extra_body=extra).choices[0].text
        assert found == engine.tokenizer.decode([end, end], skip_special_tokens=skips)


@pytest.mark.parametrize(
    ("extra", "matches"),
    [
        ({"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}}, "[a-z]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*"),
    ],
)
def test_structures_are_followed_after_each_prompt(extra: dict[str, Any], matches: str, client: openai.OpenAI) -> None:
    found = client.completions.create(
        model="smelt-6m", prompt=[PROMPT, "Once upon a time"], max_tokens=20, n=2, temperature=0.8, extra_body=extra
    )
    assert len(found.choices) == 4
    assert all(re.fullmatch(matches, choice.text) for choice in found.choices)


def test_samples_of_a_seed_repeat_and_differ_from_each_other(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smelt-6m",
        "prompt": PROMPT,
        "max_tokens": 12,
        "n": 3,
        "seed": 7,
        "temperature": 1.0,
    }
    one, two = ([choice.text for choice in client.completions.create(**asked).choices] for _ in range(2))
    assert one == two
    assert len(set(one)) == 3


def test_biases_decide(client: openai.OpenAI, server: Serving) -> None:
    (wanted,) = _ids(server, " the")[:1]
    found = client.completions.create(
        model="smelt-6m", prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={str(wanted): 100}
    )
    assert found.choices[0].text == next(iter(server.models)).decode([wanted]) * 3


def test_what_lm_eval_asks_is_what_transformers_computes(server: Serving) -> None:
    """Token ids with ``echo`` and one more token: the log probabilities of all but the first."""
    prompts = [_ids(server, PROMPT + " London is"), _ids(server, "Once upon a time")]
    body = {
        "model": "smelt-6m", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    found = httpx2.post(f"{server.url}/v1/completions", json=body).json()
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    for prompt, choice in zip(prompts, sorted(found["choices"], key=lambda c: c["index"]), strict=True):
        logprobs = choice["logprobs"]
        with torch.no_grad():
            wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        expected = [wanted[i, token].item() for i, token in enumerate(prompt[1:])]
        assert logprobs["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-3)
        for i, top in enumerate(logprobs["top_logprobs"][1:-1]):
            assert max(top.values()) == pytest.approx(wanted[i].max().item(), abs=1e-3)
        assert choice["text"].startswith(next(iter(server.models)).decode(prompt))


def test_only_the_prompt_is_echoed_for_no_tokens(server: Serving) -> None:
    prompt = _ids(server, PROMPT)
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 0, "logprobs": 2, "echo": True}
    found = httpx2.post(f"{server.url}/v1/completions", json=body).json()
    assert found["choices"][0]["text"] == PROMPT
    assert len(found["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert found["usage"]["completion_tokens"] == 0


def test_a_prompt_may_fill_the_context_and_no_more(server: Serving, engine: Engine) -> None:
    longest = engine.max_model_len
    for length, most, status in (
        (longest - 1, 1, 200),
        (longest - 1, 2, 400),
        (longest, 1, 400),
        (longest + 5, 1, 400),
    ):
        body = {"prompt": [5] * length, "max_tokens": most, "temperature": 0}
        found = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert found.status_code == status, found.text
        if status == 400:
            assert found.json()["error"]["code"] == "context_length_exceeded"
            assert str(longest) in found.json()["error"]["message"]


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": ""}, "prompt is empty", None),
    ({"prompt": []}, "prompt", "prompt"),
    ({"prompt": [4096]}, "4096", None),
    ({"prompt": [[1], "a"]}, "prompt", None),
    ({"prompt": "a", "temperature": 3}, "temperature", "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p", "top_p"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "max_tokens"),
    ({"prompt": "a", "max_tokens": "many"}, "max_tokens", "max_tokens"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "99999", None),
    ({"prompt": "a", "stop": [""]}, "stop", None),
    ({"prompt": "a", "suffix": "b"}, "suffix", "suffix"),
    ({"prompt": "a", "best_of": 3}, "best_of", "best_of"),
    ({"prompt": "a", "n": 1000}, "n", "n"),
    ({"prompt": ["a"] * 200}, "128", "prompt"),
    ({"prompt": "a", "temprature": 1}, "temprature", "temprature"),
    ({}, "prompt", "prompt"),
]


@pytest.mark.parametrize(("body", "says", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said(
    body: dict[str, Any], says: str, param: str | None, stream: bool, server: Serving
) -> None:
    """As an error of HTTP, also where a stream was asked for."""
    found = httpx2.post(f"{server.url}/v1/completions", json={**body, "stream": stream})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    if param is not None:
        assert error["param"] == param
    assert found.headers["x-request-id"]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; known: smelt-6m") as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
