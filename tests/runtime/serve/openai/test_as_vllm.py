"""What clients that were written for vLLM's server send, and what they take from answers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import jsonschema
import pytest
import torch
from smelt.runtime import Engine, EngineConfig, SamplingParams
from smelt.runtime.serve.model.answer_format import AnswerOptions
from smelt.runtime.serve.model.loader import ModelLoader
from smelt.runtime.serve.openai.token_text import TextPlaces, TokenText, piece_bytes
from smelt.system.errors import SmeltError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ....tiny import SMELT_6M
from ...engine.test_text import TOKENIZERS
from ..serving import Serving, served, serving

PROMPT = "The river ran"
MESSAGES = [{"role": "user", "content": "Where is London?"}]


def _post(server: Serving, path: str, **body: Any) -> dict[str, Any]:
    found = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return found.json()


@pytest.fixture(scope="module")
def makers_choice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smelt-6m with a generation config."""
    path = tmp_path_factory.mktemp("models") / "smelt-6m"
    shutil.copytree(SMELT_6M, path)
    own = (
        json.loads((path / "generation_config.json").read_text()) if (path / "generation_config.json").is_file() else {}
    )
    said = {"do_sample": True, "temperature": 0.6, "top_k": 1, "repetition_penalty": 1.3}
    (path / "generation_config.json").write_text(json.dumps(own | said))
    return path


@pytest.mark.parametrize("which", ["auto", "none"])
def test_what_a_request_does_not_say_is_as_the_models_maker_has_it(which: Any, makers_choice: Path) -> None:
    config = EngineConfig(dtype="float32", quiet=True, max_num_seqs=4)
    loader = ModelLoader(config, 1, AnswerOptions(generation_config=which))
    model = loader.load("mine", makers_choice)
    greedy = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12)
    wanted = model.engine.generate(PROMPT, greedy)[0].outputs[0].text
    plain = model.engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert wanted != plain
    with serving([model]) as server:
        texts = {_post(server, "completions", prompt=PROMPT, max_tokens=12)["choices"][0]["text"] for _ in range(3)}
        assert (texts == {wanted}) == (which == "auto")
        own = _post(server, "completions", prompt=PROMPT, max_tokens=12, temperature=0, repetition_penalty=1)
        assert own["choices"][0]["text"] == plain


def test_fields_that_clients_add_of_their_own_are_ignored(server: Serving) -> None:
    """Of messages and tools: LiteLLM's, LangChain's, Cline's; at the top only what asks for nothing."""
    asked = {"max_tokens": 4, "temperature": 0}
    plain = _post(server, "chat/completions", messages=MESSAGES, **asked)["choices"][0]["message"]
    message = {"role": "user", "id": "1", "cache_control": {"type": "ephemeral"}, "provider_specific_fields": None}
    part = {"type": "text", "text": "Where is London?", "cache_control": {"type": "ephemeral"}}
    nothing = {
        "best_of": 1,
        "length_penalty": 1.0,
        "request_id": "a",
        "functions": [],
        "function_call": "none",
        "logit_bias": None,
    }
    nothing |= {
        "bad_words": [],
        "ignore_eos": None,
        "include_reasoning": True,
        "use_beam_search": False,
        "guided_json": None,
    }
    stream = {"stream_options": {"include_usage": None, "include_obfuscation": False}}
    for content in ([part], ["Where is London?"]):
        found = _post(
            server, "chat/completions", messages=[{**message, "content": content}], **asked, **nothing, **stream
        )
        assert found["choices"][0]["message"] == plain
    arguments: dict[str, Any] = {"name": "f", "arguments": {"city": "Rome"}}
    calls = [{"id": "1", "type": None, "function": arguments, "extra_content": {}}]
    turns = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    tools = [{"type": "function", "function": {"name": "f", "returns": {}}, "cache_control": {}}]
    _post(server, "chat/completions", messages=turns, tools=tools, tool_choice="none", **asked)
    for name, value in (("best_of", 2), ("temprature", 1), ("guided_json", {}), ("chat_template", "a")):
        refused = httpx2.post(f"{server.url}/v1/chat/completions", json={"messages": MESSAGES, **asked, name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_allowed_tokens_and_bad_words(server: Serving) -> None:
    """In every API of OpenAI's; what may not be asked is refused by name."""
    asked: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    plain = _post(server, "completions", prompt=PROMPT, max_tokens=12, **asked)["choices"][0]["text"]
    words = sorted({word for word in plain.split() if word.isalpha()})
    found = _post(server, "completions", prompt=PROMPT, max_tokens=12, bad_words=words, **asked)["choices"][0]["text"]
    assert found
    assert not set(words) & set(found.split())
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    (token,) = tokenizer(" river", add_special_tokens=False).input_ids
    chat = _post(server, "chat/completions", messages=MESSAGES, max_tokens=3, allowed_token_ids=[token], **asked)
    assert chat["choices"][0]["message"]["content"].split() == ["river"] * 3
    response = _post(server, "responses", input="a", max_output_tokens=3, allowed_token_ids=[token], **asked)
    assert response["output"][0]["content"][0]["text"].split() == ["river"] * 3
    for name, value, part in (
        ("allowed_token_ids", [1 << 30], "outside the vocabulary"),
        ("allowed_token_ids", [], "at least one"),
        ("bad_words", [""], "not blank"),
        ("bad_words", ["a"] * 257, "256"),
        ("bad_words", ["a" * 129], "128"),
        ("bad_words", ["\ud800"], "UTF-8"),
        ("allowed_token_ids", [1] * 20000, "16384"),
    ):
        body = json.dumps({"prompt": PROMPT, name: value})  # with surrogates, which httpx2 does not write
        refused = httpx2.post(
            f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}
        )
        assert refused.status_code == 400
        assert part in refused.json()["error"]["message"]


def test_prompts_are_cut_where_a_request_says_so(server: Serving, engine: Engine) -> None:
    """The end stays: as many tokens as are asked for, or as leave room for the answer."""
    tokenizer = engine.tokenizer
    prompt = tokenizer(" ".join(f"The river ran {i} miles" for i in range(engine.max_model_len))).input_ids
    assert len(prompt) > engine.max_model_len
    common: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    for asked, kept in ((12, 12), (-1, engine.max_model_len - 6)):
        found = _post(server, "completions", prompt=[prompt, prompt[:5]], truncate_prompt_tokens=asked, **common)[
            "choices"
        ]
        alone = _post(server, "completions", prompt=prompt[-kept:], **common)["choices"][0]
        assert found[0]["prompt_token_ids"] == prompt[-kept:]
        assert found[0]["token_ids"] == alone["token_ids"]
        assert found[1]["prompt_token_ids"] == prompt[:5]
    asked = {
        "prompt": "one two three four five six seven eight",
        "truncate_prompt_tokens": 3,
        "echo": True,
        "logprobs": 1,
    }
    echoed = _post(server, "completions", max_tokens=2, temperature=0, **asked)["choices"][0]
    assert echoed["text"].startswith(" six seven eight")
    begun = zip(echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"], strict=True)
    assert all(echoed["text"].startswith(token, place) for token, place in begun)
    messages = [{"role": "user", "content": tokenizer.decode(prompt[:500])}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for asked, kept in ((20, 20), (-1, min(len(whole), engine.max_model_len - 6))):
        chat = _post(server, "chat/completions", messages=messages, truncate_prompt_tokens=asked, **common)
        assert chat["prompt_token_ids"] == whole[-kept:]
    wanted = _post(server, "embeddings", input=prompt[-9:])["data"][0]["embedding"]
    cut = _post(server, "embeddings", input=prompt, truncate_prompt_tokens=9)
    assert (cut["data"][0]["embedding"], cut["usage"]["prompt_tokens"]) == (wanted, 9)
    for asked in (0, -2):
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": asked})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_structural_tags(server: Serving) -> None:
    """Text is free until a trigger, then it is one of the tags that begin so; as tags, or as a JSON text of them."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    tag: dict[str, Any] = {"type": "structural_tag", "triggers": ["<f=", "The"]}
    tag["structures"] = [
        {"begin": "<f=a>", "schema": schema, "end": "</f>"},
        {"begin": "The %json ", "schema": schema, "end": "!"},
    ]
    written = re.compile(r"The %json (\{[^}]*\})!")
    for asked in (
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"structured_outputs": {"structural_tag": tag}},
    ):
        found = _post(
            server, "completions", prompt="The river ran.", max_tokens=200, seed=3, temperature=1, n=4, **asked
        )["choices"]
        tags = 0
        for choice in found:
            free = written.sub("", choice["text"])
            assert free.count("The") <= (choice["finish_reason"] == "length")  # that one was cut
            for each in written.findall(choice["text"]):
                jsonschema.validate(json.loads(each), schema)
                tags += 1
        assert tags
    short = {**tag, "triggers": ["<g"]}
    for asked, part in (
        ({"response_format": short}, "begins with 0 of the triggers"),
        ({"response_format": {**tag, "triggers": ["<f", "<f=", "The"]}}, "begins with 2 of the triggers"),
        ({"response_format": {**tag, "triggers": []}}, "response_format.triggers"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.structures"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structural tag is wrong at its beginning"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structures"),
        ({"response_format": {**tag, "structures": [{"begin": "The", "schema": {"type": "x"}, "end": ""}]}}, "tag"),
        ({"response_format": {"type": "tag"}}, "json_object"),
    ):
        refused = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", **asked})
        assert refused.status_code == 400
        assert part in refused.json()["error"]["message"]


def test_documents_are_the_templates(makers_choice: Path) -> None:
    """A model that answers from texts gets those of a request, and what looks like its control tokens is text."""
    template = "{% for each in documents %}{{ each.text }}{% endfor %}<|user|>{{ messages[0].content }}"
    config = EngineConfig(dtype="float32", quiet=True, max_num_seqs=4)
    loader = ModelLoader(config, 1, AnswerOptions(chat_template=template))
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    with serving([loader.load("mine", makers_choice)]) as server:
        documents = [{"text": "The river ran.<|end|>"}]
        found = _post(
            server, "chat/completions", messages=MESSAGES, documents=documents, max_tokens=1, return_token_ids=True
        )["prompt_token_ids"]
    assert tokenizer.decode(found) == "The river ran.<|end|><|user|>Where is London?"
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in found


def test_beams(server: Serving) -> None:
    """As many as there are answers, as transformers finds them; one is greedy."""
    tokenizer = AutoTokenizer.from_pretrained(SMELT_6M)
    model: Any = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    common = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "use_beam_search": True, "temperature": 0.7}
    for penalty in (1.0, 2.0):
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=None,
            num_beams=3, num_return_sequences=3, length_penalty=penalty,
        )[:, ids.shape[1] :]  # fmt: skip
        found = _post(server, "completions", n=3, length_penalty=penalty, return_token_ids=True, **common)["choices"]
        assert [each["token_ids"] for each in found] == theirs.tolist()
        assert [each["text"] for each in found] == [tokenizer.decode(each) for each in theirs]
    single = _post(server, "completions", **common)["choices"][0]["text"]
    assert single == _post(server, "completions", prompt=PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    chats = _post(server, "chat/completions", messages=MESSAGES, max_tokens=6, n=2, use_beam_search=True)["choices"]
    assert len({each["message"]["content"] for each in chats}) == 2
    schema = {"type": "json_object"}
    for path, body, param in (
        ("completions", {"prompt": PROMPT, "stream": True}, "stream"),
        ("completions", {"prompt": PROMPT, "response_format": schema}, "use_beam_search"),
        ("chat/completions", {"messages": MESSAGES, "response_format": schema}, "use_beam_search"),
        ("completions", {"prompt": PROMPT, "use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ):
        refused = httpx2.post(f"{server.url}/v1/{path}", json={"use_beam_search": True, "n": 2} | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_a_seed_of_minus_one_is_none(server: Serving) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": -1, "temperature": 1.0}
    assert len({_post(server, "completions", **asked)["choices"][0]["text"] for _ in range(4)}) > 1


def test_a_stream_begins_with_the_first_token(engine: Engine) -> None:
    """Who measures the time to it takes the first chunk."""
    order: list[str] = []
    step = engine.advance

    def stepped() -> Any:
        time.sleep(0.3)  # in which a chunk that waits for no token would come
        order.append("step")
        return step()

    engine.advance = stepped  # type: ignore[method-assign]
    try:
        with serving([served(engine)]) as server:
            body = {"messages": [{"role": "user", "content": "word " * 300}], "max_tokens": 3, "stream": True}
            with httpx2.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        order.append("chunk")
    finally:
        del engine.advance  # type: ignore[method-assign]
    assert order[0] == "step"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_token_ids_are_returned_if_asked_for(path: str, stream: bool, server: Serving, engine: Engine) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "stream": stream}
    asked |= {"prompt": PROMPT} if path == "completions" else {"messages": MESSAGES}
    with httpx2.stream("POST", f"{server.url}/v1/{path}", json=asked, timeout=60) as answer:
        answer.read()
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    bodies = [json.loads(line) for line in lines] if stream else [answer.json()]
    found = [token for body in bodies for choice in body["choices"] for token in choice.get("token_ids", [])]
    prompts = [body.get("prompt_token_ids") or body["choices"][0].get("prompt_token_ids") for body in bodies]
    assert [bool(each) for each in prompts] == [True] + [False] * (len(prompts) - 1)
    prompt = prompts[0]
    wanted = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=6))[0]
    assert found == wanted.outputs[0].token_ids


def test_a_bad_generation_config_is_refused_when_the_model_is_loaded(makers_choice: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad"
    shutil.copytree(makers_choice, path)
    said = json.loads((path / "generation_config.json").read_text())
    for name, value, why in (
        ("top_k", True, "top_k is True, not a number"),
        ("min_p", 7, "min_p is 7; it must be from 0 to 1"),
    ):
        (path / "generation_config.json").write_text(json.dumps({**said, name: value}))
        loader = ModelLoader(EngineConfig(quiet=True), 1)
        with pytest.raises(SmeltError, match=rf"generation_config\.json: .*{why}|is not a valid generation config"):
            loader.load("bad", path)


def test_responses_say_how_tokens_were_chosen(makers_choice: Path) -> None:
    options = AnswerOptions(chat_template="{{ messages[0].content }}")
    config = EngineConfig(dtype="float32", quiet=True, max_num_seqs=4)
    model = ModelLoader(config, 1, options).load("mine", makers_choice)
    with serving([model]) as server:
        assert _post(server, "responses", input="Hi", max_output_tokens=2)["temperature"] == 0.6
        assert _post(server, "responses", input="Hi", max_output_tokens=2, temperature=0.1)["temperature"] == 0.1


def test_ranks_are_those_of_the_vocabulary_or_not_known(server: Serving) -> None:
    ids = next(iter(server.models)).encode(PROMPT)
    found = _post(server, "completions", prompt=ids, max_tokens=1, prompt_logprobs=5)["choices"][0]["prompt_logprobs"]
    model = AutoModelForCausalLM.from_pretrained(SMELT_6M, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    for place, token in enumerate(ids[1:]):
        rank = int((logits[place] > logits[place, token]).sum()) + 1
        assert found[place + 1][str(token)]["rank"] == (rank if rank <= 5 else None)


def test_bytes_of_parts_of_characters_join_to_the_text(server: Serving) -> None:
    model = next(iter(server.models))
    tokens = model.encode("ννν 🚀")
    assert any("\N{REPLACEMENT CHARACTER}" in model.decode([token]) for token in tokens)
    biases = {str(token): 100.0 for token in tokens}
    asked: dict[str, Any] = {
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 1,
        "logit_bias": biases,
        "logprobs": True,
    }
    content = _post(server, "chat/completions", **asked)["choices"][0]["logprobs"]["content"]
    raw = b"".join(bytes(each["bytes"]) for each in content)
    assert b"".join(map(TokenText(model).bytes_of, tokens)).decode() == "ννν 🚀"
    assert b"token_id" not in raw
    text = "ννν 🚀"
    places = TextPlaces(TokenText(model), skip_special_tokens=True)
    found = [*places.of_prompt(tokens, text), *places.of_output(tokens)]
    assert found[0] == 0
    assert found[len(tokens)] == len(text)
    assert found[len(tokens) :] == [len(text) + place for place in found[: len(tokens)]]


@pytest.mark.parametrize(("piece", "raw"), [("<0xE2>", b"\xe2"), ("âĤ", b"\xe2\x82"), ("Ġ", b" "), ("Ċ", b"\n")])
def test_pieces_have_bytes_in_two_spellings(piece: str, raw: bytes) -> None:
    assert piece_bytes(piece) == raw


def test_what_is_echoed_is_what_was_sent(server: Serving) -> None:
    prompt = "<|endoftext|>Hi there"
    found = _post(server, "completions", prompt=prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert found["text"] == prompt
    places = found["logprobs"]["text_offset"]
    assert [prompt[a:b] for a, b in zip(places, [*places[1:], len(prompt)], strict=True)] == found["logprobs"]["tokens"]


@pytest.mark.parametrize("skip", [True, False])
def test_places_are_those_in_the_text_streamed_or_not(skip: bool, server: Serving) -> None:
    """Of tokens that have a text, special ones and parts of characters among them."""
    model = next(iter(server.models))
    special = model.encode("<|endoftext|>")
    prompt = [*special, *model.encode("Hi ν"), *special, *model.encode(" there 🚀")]
    biases = {str(token): 90.0 for token in [*special, *model.encode("ν once 🚀")]}
    body: dict[str, Any] = {
        "model": model.name, "prompt": prompt, "max_tokens": 16, "seed": 1, "echo": True, "logprobs": 0, "logit_bias": biases,
        "ignore_eos": True, "skip_special_tokens": skip,
    }  # fmt: skip
    [choice] = _post(server, "completions", **body)["choices"]
    text, places = choice["text"], choice["logprobs"]["text_offset"]
    ends = [*places[1:], len(text)]
    known = [
        (text[a:b], token)
        for a, b, token in zip(places, ends, choice["logprobs"]["tokens"], strict=True)
        if not token.startswith("token_id:")
    ]
    assert all(found == ("" if skip and token == "<|endoftext|>" else token) for found, token in known[:-1])
    streamed = list[int]()
    with httpx2.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["logprobs"]["text_offset"]
    assert streamed == places


def test_tokens_of_sentencepiece_have_their_spaces() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]()
    model: Any = SimpleNamespace(tokenizer=tokenizer, encode=tokenizer.encode, decode=tokenizer.decode)
    texts = TokenText(model)
    named = {name: tokenizer.convert_tokens_to_ids(name) for name in ("▁the", "me", "</s>", "<0xCE>")}
    assert [texts.of(token) for token in named.values()] == [" the", "me", "</s>", f"token_id:{named['<0xCE>']}"]
    ids = [tokenizer.bos_token_id, named["▁the"], named["▁the"], named["me"]]
    places = TextPlaces(texts, skip_special_tokens=True)
    assert places.of_prompt(ids, "the theme") == [0, 0, 3, 7]
    assert places.of_output([named["▁the"], tokenizer.eos_token_id, named["me"]]) == [9, 13, 13]
    space = tokenizer.convert_tokens_to_ids("▁")
    places = TextPlaces(texts, skip_special_tokens=True)
    assert places.of_prompt([space, named["me"], space, named["me"]], "me me") == [0, 0, 2, 3]
    # A byte that is no character before a space.
    places = TextPlaces(texts, skip_special_tokens=True)
    assert places.of_prompt([named["<0xCE>"], space, named["me"]], "\N{REPLACEMENT CHARACTER} me") == [0, 0, 2]


@pytest.fixture
def short_queue() -> Iterator[Serving]:
    with serving([served(Engine(SMELT_6M, max_num_seqs=2, max_waiting=3, quiet=True))]) as found:
        yield found


def test_prompts_of_one_request_do_not_keep_each_other_out(short_queue: Serving) -> None:
    async def all_of_them() -> list[int]:
        async with httpx2.AsyncClient(timeout=60) as client:
            body = {"prompt": [PROMPT] * 12, "max_tokens": 4}
            return [(await client.post(f"{short_queue.url}/v1/completions", json=body)).status_code for _ in range(5)]

    assert asyncio.run(all_of_them()) == [200] * 5


def test_responses_take_vllms_ways_to_stop(server: Serving, engine: Engine) -> None:
    asked: dict[str, Any] = {"input": "Where is London?", "max_output_tokens": 8, "temperature": 0}
    whole = _post(server, "responses", **asked)["output"][0]["content"][0]["text"]
    stop = whole[3:5]
    cut = _post(server, "responses", **asked, stop=[stop], include_stop_str_in_output=True)
    assert cut["output"][0]["content"][0]["text"] == whole[: whole.index(stop) + 2]
    token = next(iter(server.models)).encode(" the")[0]
    biased = _post(server, "responses", **asked, logit_bias={str(token): 100}, stop_token_ids=[token])
    assert biased["output"][0]["content"][0]["text"] == ""
