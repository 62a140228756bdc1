"""The live page in a browser: conversations, keys, themes and what it makes of text."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from smelt.runtime.engine.engine import Engine
from smelt.runtime.engine.loop import Stream
from smelt.runtime.requests.params import SamplingParams
from smelt.runtime.serve.constraints.grammar import expression
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.model.served_model import ServedModel

from ....tiny import SMELT_6M
from ..serving import TEMPLATE, Serving, served, serving
from .shown import Opened, api, ended, figures, say, texts_of, user

HOSTILE = "</p><img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest.mark.usefixtures("slowly")
def test_an_answer_is_the_apis_answer(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    say(shown, "Tell me a story")
    ended(shown)
    wanted = api(pair, "dry", [user("Tell me a story")])["message"]["content"]
    assert len(wanted) > 20
    assert texts_of(shown) == [wanted]
    said = figures(shown)
    assert re.fullmatch(r"first token after [\d.]+ m?s · [\d.,]+ tokens/s · 32 tokens · ended at max tokens", said), (
        said
    )


def test_a_conversation_goes_on_with_its_answers(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    shown.get_by_label("System message").fill("Be kind.")
    say(shown, "One")
    ended(shown)
    shown.get_by_label("Message", exact=True).fill("Two")
    shown.keyboard.press("Shift+Enter")
    shown.keyboard.type("lines")
    shown.keyboard.press("Enter")
    ended(shown, 2)
    turns = [{"role": "system", "content": "Be kind."}, user("One")]
    first = api(pair, "dry", turns)["message"]["content"]
    turns += [{"role": "assistant", "content": first}, user("Two\nlines")]
    assert texts_of(shown) == [first, api(pair, "dry", turns)["message"]["content"]]
    shown.get_by_role("button", name="New chat").click()
    assert shown.locator(".turn").count() == 0
    say(shown, "One")
    ended(shown)
    assert texts_of(shown) == [first]


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("one_after_the_other", [False, True])
def test_two_models_are_side_by_side_with_their_difference_marked(
    one_after_the_other: bool, opened: Opened, pair: Serving, engine: Engine
) -> None:
    inside = []

    def count(_: Any) -> None:
        time.sleep(0.03)
        inside.append(pair.server.gate.inside)

    engine.core.on_step = count
    shown = opened(pair)
    shown.locator("#first option").first.wait_for(state="attached")
    shown.get_by_label("Compare with").select_option("rainy")
    if one_after_the_other:
        shown.get_by_label("One after the other").check()
    say(shown, "Once upon a time", first="dry")
    ended(shown, 2)
    assert max(inside) == (1 if one_after_the_other else 2)
    wanted = [api(pair, name, [user("Once upon a time")]) for name in ("dry", "rainy")]
    texts = [choice["message"]["content"] for choice in wanted]
    assert texts[0] != texts[1]
    assert texts_of(shown) == texts
    assert shown.locator(".answer h3").all_inner_texts() == ["dry", "rainy"]
    same = next(place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    for choice, text, mark in zip(wanted, texts, shown.locator(".text ins").all(), strict=True):
        start = 0
        for entry in choice["logprobs"]["content"]:
            if start + len(entry["token"]) > same:
                break
            start += len(entry["token"])
        assert 0 < start < same, "the space before a different word belongs to its token"
        assert mark.evaluate("mark => mark.textContent") == text[start:]
    boxes = [box.bounding_box() for box in shown.locator(".answer").all()]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert shown.locator(".figures").filter(has_text="tokens/s").count() == 2


def test_equal_answers_have_no_mark(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    say(shown, "Tell me a story", second="smelt-6m")
    ended(shown, 2)
    assert shown.locator(".text ins:visible").count() == 0
    assert shown.get_by_text("Both texts are the same.").is_visible()


@pytest.mark.parametrize(
    ("first", "second", "cuts"),
    [
        (("the running", []), ("the runner", []), [8, 8]),
        (("the running", ["the", " runn", "ing"]), ("the runner", ["the", " run", "ner"]), [8, 7]),
        (("the running", ["the", " run", "ning"]), ("the runner", ["the", " run", "ner"]), [7, 7]),
        # Decoded alone, the tokens of some tokenizers have no space.
        (("a bc d", ["a", "bc", "d"]), ("a bx d", ["a", "bx", "d"]), [1, 1]),
        # Tokens that are not the text's.
        (("so it is", ["<think>", "so"]), ("so it was", ["<think>", "so"]), [6, 6]),
        (("a😀", []), ("a😁", []), [1, 1]),
        (("one", []), ("one two", []), [3, 3]),
        (("one", []), ("one", []), None),
        (("", []), ("", []), None),
    ],
)
def test_texts_part_at_the_token_of_their_first_different_character(
    first: tuple[str, list[str]], second: tuple[str, list[str]], cuts: list[int] | None, opened: Opened, server: Serving
) -> None:
    answers = [{"text": text, "tokens": tokens, "isWhole": True} for text, tokens in (first, second)]
    script = "answers => import('/static/difference.js').then(({ parting }) => parting(...answers))"
    shown = opened(server)
    assert shown.evaluate(script, answers) == cuts
    if cuts is not None and cuts[0] == len(first[0]):
        # It may still go on.
        assert shown.evaluate(script, [{**answers[0], "isWhole": False}, answers[1]]) is None


def test_a_model_without_a_template_continues_the_text(opened: Opened, engine: Engine) -> None:
    model = served(engine, template=None)
    engine.tokenizer.chat_template = TEMPLATE
    with serving([model]) as found:
        shown = opened(found, expects="400 (Bad Request)")
        say(shown, "Once upon a time")
        ended(shown)
        body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
        first = httpx2.post(f"{found.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert texts_of(shown) == [first]
        assert "has no chat template: it continues the text" in shown.locator(".answer .note").inner_text()
        say(shown, "Then")
        ended(shown, 2)
        body["prompt"] = f"Once upon a time{first}\nThen"
        second = httpx2.post(f"{found.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert texts_of(shown) == [first, second]
        shown.close()


def test_an_error_is_shown_in_the_apis_words(opened: Opened, server: Serving) -> None:
    shown = opened(server, expects="400 (Bad Request)")
    say(shown, "Hello", tokens=1_000_000)
    ended(shown)
    refused = httpx2.post(
        f"{server.url}/v1/chat/completions", json={"messages": [user("Hello")], "max_tokens": 1_000_000}
    ).json()["error"]["message"]
    assert shown.locator(".answer .worse").inner_text() == refused
    assert shown.get_by_label("Message", exact=True).input_value() == "Hello", "it can be sent again"


def test_a_server_that_is_gone_is_said_so(opened: Opened, engine: Engine) -> None:
    with serving([served(engine)]) as found:
        shown = opened(found, expects="ERR_CONNECTION_REFUSED")
        shown.locator("#first option").first.wait_for(state="attached")
    say(shown, "Hello")
    ended(shown)
    assert "cannot be reached" in shown.locator(".answer .worse").inner_text()
    shown.wait_for_function("() => document.getElementById('engine-problem').textContent !== ''")


@pytest.mark.usefixtures("slowly")
def test_a_stopped_answer_ends_at_the_server_too(opened: Opened, pair: Serving, engine: Engine) -> None:
    shown = opened(pair)
    say(shown, "Tell me a story", tokens=500)
    shown.wait_for_function("() => document.querySelector('.answer > .text').textContent.length > 10")
    assert shown.get_by_role("button", name="Send").is_disabled()
    shown.get_by_role("button", name="Stop").click()
    ended(shown)
    assert figures(shown).endswith("stopped")
    assert shown.get_by_role("button", name="Stop").is_disabled()
    assert shown.get_by_role("button", name="Send").is_enabled()
    engine.core.on_step = None
    text = texts_of(shown)[0]
    wanted = api(pair, "dry", [user("Tell me a story")], 500)["message"]["content"]
    assert wanted.startswith(text)
    assert len(wanted) > len(text)
    ends = time.monotonic() + 20
    while pair.server.gate.inside and time.monotonic() < ends:
        time.sleep(0.01)
    assert pair.server.gate.inside == 0


def test_a_key_is_asked_for_and_forgotten_with_the_tab(opened: Opened, engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(api_keys=("right",))) as found:
        shown = opened(found, expects="401 (Unauthorized)")
        key = shown.get_by_label("API key")
        key.wait_for()
        assert "There is no API key" in shown.locator("#key-problem").inner_text()
        key.fill("wrong")
        shown.get_by_role("button", name="Use this key").click()
        shown.get_by_text("The API key is not one of this server's.").wait_for()
        key.fill("right")
        shown.keyboard.press("Enter")
        shown.wait_for_function("() => document.getElementById('key').hidden")
        say(shown, "Hello", tokens=4)
        ended(shown)
        assert figures(shown).startswith("first token")
        assert shown.evaluate("Object.values(sessionStorage)") == ["right"]
        assert shown.evaluate("Object.keys(localStorage).length") == 0
        assert shown.context.cookies() == []
        shown.close()


class _Hostile(ServedModel):
    """Says nothing but HOSTILE."""

    def start(self, prompt: list[int], params: SamplingParams, *rest: Any, **options: Any) -> Stream:
        constraint = self.compile(expression(re.escape(HOSTILE).replace("/", r"\/")), None)
        return super().start(prompt, replace(params, constraint=constraint), *rest, **options)


def test_what_a_model_says_stays_text(opened: Opened, engine: Engine) -> None:
    engine.tokenizer.chat_template = TEMPLATE
    with serving([_Hostile("<img src=x onerror=alert(3)>", engine, SMELT_6M)]) as found:
        shown = opened(found)
        say(shown, "<b>bold</b>", tokens=200)
        ended(shown)
        assert texts_of(shown) == [HOSTILE]
        assert shown.locator(".answer > .text").inner_text() == HOSTILE
        assert shown.locator(".asked").inner_text() == "<b>bold</b>"
        assert shown.locator(".answer h3").inner_text() == "<img src=x onerror=alert(3)>"
        shown.locator(".chart tbody th").first.wait_for()
        assert shown.locator("img, b, body script").count() == 0
        shown.close()


def test_the_policy_stops_markup_from_text(opened: Opened, server: Serving) -> None:
    shown = opened(server, expects="requires 'TrustedHTML' assignment")
    assert shown.evaluate("(() => { try { document.body.innerHTML = '<p>'; return false; } catch { return true; } })()")
    assert shown.locator("#message").is_visible()


def _colours(shown: Any) -> dict[str, float]:
    """Lightness, from 0 to 1, of the paper, of letters on it and of a field."""
    return shown.evaluate(
        "(() => { const of = (c) => c.match(/[\\d.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0) / 765;"
        " const style = getComputedStyle(document.body);"
        " return { paper: of(style.backgroundColor), ink: of(style.color),"
        " field: of(getComputedStyle(document.getElementById('message')).backgroundColor) }; })()"
    )


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_until_it_is_chosen(system: str, opened: Opened, server: Serving) -> None:
    def is_dark() -> bool:
        found = _colours(shown)
        assert abs(found["paper"] - found["ink"]) > 0.6
        assert found["field"] == found["paper"]
        return found["paper"] < 0.5

    shown = opened(server, color_scheme=system)
    button = shown.get_by_role("button", name="Dark theme")
    assert is_dark() is (system == "dark")
    assert button.get_attribute("aria-pressed") == str(system == "dark").lower()
    button.click()
    assert is_dark() is (system == "light")
    assert button.get_attribute("aria-pressed") == str(system == "light").lower()
    shown.reload()
    assert is_dark() is (system == "light"), "it is kept"


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_page_is_no_wider_than_the_screen(width: int, opened: Opened, pair: Serving) -> None:
    shown = opened(pair, width)
    say(shown, "https://example.org/" + "a" * 200, second="rainy")
    ended(shown, 2)
    shown.locator(".chart tbody td").first.wait_for()
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.get_by_role("log").evaluate("log => log.scrollWidth <= log.clientWidth"), "nor does it scroll inside"
    for box in shown.locator("button, input, select, textarea, .chart, .answer").all():
        found = box.bounding_box()
        assert found is None or (found["x"] >= 0 and found["x"] + found["width"] <= width)


def test_it_works_by_keyboard_alone(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    shown.locator("#first option").first.wait_for(state="attached")
    reached = []
    for _ in range(40):
        shown.keyboard.press("Tab")
        reached.append(shown.evaluate("document.activeElement.id || document.activeElement.getAttribute('aria-label')"))
        if reached[-1] == "message":
            break
    assert reached[-1] == "message"
    assert {"theme", "first", "second", "temperature", "max-tokens", "system"} <= set(reached)
    shown.keyboard.type("Hello")
    shown.keyboard.press("Tab")
    shown.keyboard.press("Enter")
    ended(shown)
    assert texts_of(shown)[0]
    log = shown.get_by_role("log")
    assert log.get_attribute("aria-live") == "polite"
