"""The live page: what is served, that it is safe, and how it behaves in a browser."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smelt.runtime.engine.engine import Engine
from smelt.runtime.engine.loop import Stream
from smelt.runtime.requests.params import SamplingParams
from smelt.runtime.serve.constraints.grammar import expression
from smelt.runtime.serve.http.config import ServerConfig
from smelt.runtime.serve.model.served_model import ServedModel

from ...tiny import REPOSITORY, SMELT_6M
from .serving import TEMPLATE, Serving, served, serving

FOLDER = REPOSITORY / "runtime" / "serve" / "page"
FILES = sorted(path for path in FOLDER.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc"))
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
# smelt-6m has learnt stories, and no conversations.
CONTINUES = "{% for message in messages %}{{ message.content }}{% endfor %}"
HOSTILE = "</p><img src=x onerror=alert(1)><script>alert(2)</script>"


# What is served


@pytest.mark.parametrize("path", ["", *(path.name for path in FILES)])
def test_files_have_their_types_and_a_strict_policy(path: str, server: Serving) -> None:
    found = httpx2.get(f"{server.url}/static/{path}" if path else f"{server.url}/")
    file = FOLDER / (path or "index.html")
    assert found.status_code == 200
    assert found.content == file.read_bytes()
    assert found.headers["content-type"].split(";")[0] == TYPES[file.suffix]
    assert found.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        rule.strip().split(" ", 1) for rule in found.headers["content-security-policy"].split(";") if rule.strip()
    )
    assert policy["default-src"] == "'self'"
    assert not {"script-src", "style-src", "img-src", "connect-src"} & set(policy), "nothing is looser than the default"


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/__init__.py",
        "/static/nothing.js",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/%2e%2e%2fapp.py",
        "/static/..%5capp.py",
        "/static/page/../../app.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/main.js%00.py",
        "/static/main.js/../../app.py",
        "/app.py",
        "/..",
    ],
)
def test_nothing_outside_the_folder_can_be_fetched(path: str, server: Serving) -> None:
    """The path is sent as it is: clients would shorten some of these."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 404
    assert json.loads(answer.read())["error"]["message"]
    connection.close()


def test_the_page_needs_no_key_and_the_models_do(engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(api_keys=("first",))) as found:
        for path in ("/", "/static/main.js", "/static/style.css"):
            assert httpx2.get(f"{found.url}{path}").status_code == 200
        assert httpx2.get(f"{found.url}/v1/models").status_code == 401


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_no_file_names_anything_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|wss?:|[\"'(=]\s*//|@import|url\(|\bdata:[a-z]", text)


def test_the_page_has_no_inline_script_or_style_and_labels_all_fields() -> None:
    elements: list[tuple[str, dict[str, str | None]]] = []
    texts: list[tuple[str, str]] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            elements.append((tag, dict(attrs)))

        def handle_data(self, data: str) -> None:
            texts.append((elements[-1][0] if elements else "", data))

    Elements().feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    for tag, attributes in elements:
        assert tag not in ("style", "iframe", "object", "embed", "base"), tag
        assert not [name for name in attributes if name == "style" or name.startswith("on")], (tag, attributes)
        for name in ("src", "href"):
            value = attributes.get(name)
            assert (
                value is None or (FOLDER / value.removeprefix("static/")).is_file() or value in ("v1/models", "metrics")
            )
    assert not [text for tag, text in texts if tag == "script" and text.strip()]
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label"}
    fields = {attributes["id"] for tag, attributes in elements if tag in ("input", "select", "textarea")}
    assert labelled == fields


def test_scripts_make_no_markup_from_text() -> None:
    for file in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setHTML|createContextualFragment|srcdoc",
            file.read_text(encoding="utf-8"),
        ), file.name


def test_what_the_page_is_made_of_is_installed() -> None:
    setup = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "smelt.runtime.serve.page" in setup["packages"]
    patterns = setup["package-data"]["smelt.runtime.serve.page"]
    assert {path for pattern in patterns for path in FOLDER.glob(pattern)} == set(FILES)


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser of this machine."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(
        (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome")) if p), None
    )
    if program is None:
        pytest.skip("needs chromium or chrome on PATH")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """``opened(server, width=…)`` shows a server's page; whatever the page complains of or asks others for fails the test."""
    troubles: list[str] = []
    elsewhere: list[str] = []
    contexts = []

    def show(server: Serving, width: int = 1280, expects: str = "", **options: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **options))
        shown = contexts[-1].new_page()

        def complain(message: Any) -> None:
            # The browser writes a line for each response that is an error.
            is_expected = expects and expects in message.text
            if message.type in ("error", "warning") and not is_expected:
                troubles.append(message.text)

        shown.on("console", complain)
        shown.on("pageerror", lambda error: troubles.append(str(error)))
        shown.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        shown.on("request", lambda asked: None if asked.url.startswith(server.url) else elsewhere.append(asked.url))
        shown.goto(server.url)
        return shown

    yield show
    for context in contexts:
        context.close()
    assert not troubles
    assert not elsewhere


@pytest.fixture(scope="module")
def pair(engine: Engine) -> Iterator[Serving]:
    """Two models that continue a conversation as a text. The second is shown a line more, and answers differ by it."""
    models = [served(engine, "dry", template=CONTINUES), served(engine, "rainy", template=f"\n{CONTINUES}")]
    engine.tokenizer.chat_template = TEMPLATE
    with serving(models) as found:
        yield found


def _say(shown: Any, text: str, *, first: str | None = None, second: str | None = None, tokens: int = 32) -> None:
    shown.locator("#first option").first.wait_for(state="attached")
    if first is not None:
        shown.get_by_label("Model", exact=True).select_option(first)
    if second is not None:
        shown.get_by_label("Compare with").select_option(second)
    shown.get_by_label("Max tokens").fill(str(tokens))
    shown.get_by_label("Message", exact=True).fill(text)
    shown.get_by_role("button", name="Send").click()


def _ended(shown: Any, count: int = 1) -> None:
    """So many answers are there, and none grows any more."""
    shown.wait_for_function(
        "count => document.querySelectorAll('.answer[aria-busy=false]').length === count"
        " && !document.querySelector('.answer[aria-busy=true]')",
        arg=count,
    )


def _texts(shown: Any) -> list[str]:
    return shown.locator(".answer > .text").evaluate_all("all => all.map((one) => one.textContent)")


def _figures(shown: Any) -> str:
    return shown.locator(".figures").inner_text().replace("\N{NO-BREAK SPACE}", " ")


def _api(server: Serving, model: str, messages: list[dict[str, str]], tokens: int = 32) -> Mapping[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "logprobs": True}
    return httpx2.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.usefixtures("slowly")
def test_an_answer_is_the_apis_answer(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    _say(shown, "Tell me a story")
    _ended(shown)
    wanted = _api(pair, "dry", [_user("Tell me a story")])["message"]["content"]
    assert len(wanted) > 20
    assert _texts(shown) == [wanted]
    said = _figures(shown)
    assert re.fullmatch(r"first token after [\d.]+ m?s · [\d.,]+ tokens/s · 32 tokens · ended at max tokens", said), (
        said
    )


def test_a_conversation_goes_on_with_its_answers(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    shown.get_by_label("System message").fill("Be kind.")
    _say(shown, "One")
    _ended(shown)
    shown.get_by_label("Message", exact=True).fill("Two")
    shown.keyboard.press("Shift+Enter")
    shown.keyboard.type("lines")
    shown.keyboard.press("Enter")
    _ended(shown, 2)
    turns = [{"role": "system", "content": "Be kind."}, _user("One")]
    first = _api(pair, "dry", turns)["message"]["content"]
    turns += [{"role": "assistant", "content": first}, _user("Two\nlines")]
    assert _texts(shown) == [first, _api(pair, "dry", turns)["message"]["content"]]
    shown.get_by_role("button", name="New chat").click()
    assert shown.locator(".turn").count() == 0
    _say(shown, "One")
    _ended(shown)
    assert _texts(shown) == [first]


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
    _say(shown, "Once upon a time", first="dry")
    _ended(shown, 2)
    assert max(inside) == (1 if one_after_the_other else 2)
    wanted = [_api(pair, name, [_user("Once upon a time")]) for name in ("dry", "rainy")]
    texts = [choice["message"]["content"] for choice in wanted]
    assert texts[0] != texts[1]
    assert _texts(shown) == texts
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
    _say(shown, "Tell me a story", second="smelt-6m")
    _ended(shown, 2)
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
        _say(shown, "Once upon a time")
        _ended(shown)
        body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0}
        first = httpx2.post(f"{found.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert _texts(shown) == [first]
        assert "has no chat template: it continues the text" in shown.locator(".answer .note").inner_text()
        _say(shown, "Then")
        _ended(shown, 2)
        body["prompt"] = f"Once upon a time{first}\nThen"
        second = httpx2.post(f"{found.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        assert _texts(shown) == [first, second]
        shown.close()


def test_an_error_is_shown_in_the_apis_words(opened: Opened, server: Serving) -> None:
    shown = opened(server, expects="400 (Bad Request)")
    _say(shown, "Hello", tokens=1_000_000)
    _ended(shown)
    refused = httpx2.post(
        f"{server.url}/v1/chat/completions", json={"messages": [_user("Hello")], "max_tokens": 1_000_000}
    ).json()["error"]["message"]
    assert shown.locator(".answer .worse").inner_text() == refused
    assert shown.get_by_label("Message", exact=True).input_value() == "Hello", "it can be sent again"


def test_a_server_that_is_gone_is_said_so(opened: Opened, engine: Engine) -> None:
    with serving([served(engine)]) as found:
        shown = opened(found, expects="ERR_CONNECTION_REFUSED")
        shown.locator("#first option").first.wait_for(state="attached")
    _say(shown, "Hello")
    _ended(shown)
    assert "cannot be reached" in shown.locator(".answer .worse").inner_text()
    shown.wait_for_function("() => document.getElementById('engine-problem').textContent !== ''")


@pytest.fixture
def slowly(engine: Engine) -> Iterator[None]:
    """Every step takes a while longer."""
    engine.core.on_step = lambda _: time.sleep(0.03)
    yield
    engine.core.on_step = None


@pytest.mark.usefixtures("slowly")
def test_a_stopped_answer_ends_at_the_server_too(opened: Opened, pair: Serving, engine: Engine) -> None:
    shown = opened(pair)
    _say(shown, "Tell me a story", tokens=500)
    shown.wait_for_function("() => document.querySelector('.answer > .text').textContent.length > 10")
    assert shown.get_by_role("button", name="Send").is_disabled()
    shown.get_by_role("button", name="Stop").click()
    _ended(shown)
    assert _figures(shown).endswith("stopped")
    assert shown.get_by_role("button", name="Stop").is_disabled()
    assert shown.get_by_role("button", name="Send").is_enabled()
    engine.core.on_step = None
    text = _texts(shown)[0]
    wanted = _api(pair, "dry", [_user("Tell me a story")], 500)["message"]["content"]
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
        _say(shown, "Hello", tokens=4)
        _ended(shown)
        assert _figures(shown).startswith("first token")
        assert shown.evaluate("Object.values(sessionStorage)") == ["right"]
        assert shown.evaluate("Object.keys(localStorage).length") == 0
        assert shown.context.cookies() == []
        shown.close()


class _Hostile(ServedModel):
    """Says nothing but HOSTILE."""

    def start(self, prompt: list[int], params: SamplingParams, *, name: str, priority: int = 0) -> Stream:
        constraint = self.compile(expression(re.escape(HOSTILE).replace("/", r"\/")), None)
        return super().start(prompt, replace(params, constraint=constraint), name=name, priority=priority)


def test_what_a_model_says_stays_text(opened: Opened, engine: Engine) -> None:
    engine.tokenizer.chat_template = TEMPLATE
    with serving([_Hostile("<img src=x onerror=alert(3)>", engine, SMELT_6M)]) as found:
        shown = opened(found)
        _say(shown, "<b>bold</b>", tokens=200)
        _ended(shown)
        assert _texts(shown) == [HOSTILE]
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
    _say(shown, "https://example.org/" + "a" * 200, second="rainy")
    _ended(shown, 2)
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
    _ended(shown)
    assert _texts(shown)[0]
    log = shown.get_by_role("log")
    assert log.get_attribute("aria-live") == "polite"


# Charts


def _cells(shown: Any, chart: str) -> list[str]:
    return shown.get_by_role("table", name=chart).locator("tbody td").all_inner_texts()


def _reaches(shown: Any, chart: str, holds: Callable[[list[str]], bool]) -> list[str]:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        found = _cells(shown, chart)
        if found and holds(found):
            return found
        shown.wait_for_timeout(50)
    raise AssertionError((chart, _cells(shown, chart)))


@pytest.mark.usefixtures("slowly")
def test_charts_show_what_the_engine_does(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
    _reaches(shown, "Tokens per second", lambda cells: cells == ["0", "0"])
    assert _cells(shown, "Time between tokens") == ["–", "–"], "nothing was generated while the page was open"
    _say(shown, "Tell me a story", tokens=400)
    _reaches(shown, "Requests", lambda cells: cells == ["1", "0"])
    # A step takes at least 30 ms.
    assert 1 <= float(_reaches(shown, "Tokens per second", lambda cells: float(cells[0]) > 1)[0]) <= 50
    assert _reaches(shown, "KV cache use", lambda cells: cells != ["0%"])
    p50, p99 = _reaches(shown, "Time between tokens", lambda cells: cells[0] != "–")
    assert float(p50.removesuffix(" ms")) >= 25, "the bucket that has 30 ms begins there"
    assert p99.endswith("s")
    assert _cells(shown, "Time to the first token")[0] != "–"
    shown.get_by_role("button", name="Stop").click()
    _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
    _reaches(shown, "Tokens per second", lambda cells: cells[0] == "0")


def test_a_charts_values_can_be_read_at_any_time(opened: Opened, server: Serving) -> None:
    shown = opened(server)
    plot = shown.get_by_role("slider", name="Requests: values over time")
    when = shown.get_by_role("table", name="Requests").locator("thead th").first
    shown.wait_for_function("() => document.querySelectorAll('.chart tbody td').length > 0")
    shown.wait_for_timeout(3500)
    assert when.inner_text() == "now"
    plot.focus()
    shown.keyboard.press("ArrowLeft")
    shown.keyboard.press("ArrowLeft")
    assert re.fullmatch(r"[2-4] s ago: smelt-6m running 0, smelt-6m waiting 0", plot.get_attribute("aria-valuetext"))
    assert plot.get_attribute("aria-valuetext").startswith(when.inner_text())
    assert plot.locator(".cursor").count() == 1
    shown.keyboard.press("Escape")
    assert when.inner_text() == "now"
    assert plot.locator(".cursor").count() == 0
    shown.keyboard.press("Home")
    assert int(when.inner_text().split()[0]) >= 3
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + box["width"] - 10, box["y"] + 50)
    assert when.inner_text() in ("now", "1 s ago")


def test_each_model_has_its_lines_and_its_row(opened: Opened, pair: Serving) -> None:
    shown = opened(pair)
    table = shown.get_by_role("table", name="Tokens per second")
    table.locator("tbody tr").nth(1).wait_for()
    assert table.locator("tbody th").all_inner_texts() == ["dry", "rainy"]
    plot = shown.get_by_role("slider", name="Requests: values over time")
    strokes = plot.locator("polyline").evaluate_all(
        "lines => lines.map((l) => [getComputedStyle(l).stroke, getComputedStyle(l).strokeDasharray !== 'none'])"
    )
    assert len({tuple(stroke) for stroke in strokes}) == 4, "two colours, each whole and dashed"


def test_the_metrics_are_read_as_prometheus_reads_them(opened: Opened, server: Serving) -> None:
    lines = httpx2.get(f"{server.url}/metrics").text
    lines += '# TYPE odd gauge\nodd{a="x\\\\n\\n\\"}{",b=""} +Inf\nodd{a=","} -1.5e-07\n'
    wanted = [
        [sample.name, sample.labels, str(sample.value)]
        for family in text_string_to_metric_families(lines)
        for sample in family.samples
    ]
    found = opened(server).evaluate(
        "lines => import('/static/metrics.js').then(({ parse }) =>"
        " parse(lines).map(({ name, labels, value }) => [name, labels, String(value).replace('Infinity', 'inf')]))",
        lines,
    )
    assert [[name, labels, str(float(value))] for name, labels, value in found] == wanted
    assert len(found) > 50


@pytest.mark.parametrize("prefix", ["smelt", "vllm"])
def test_the_prefix_is_found(prefix: str, opened: Opened, engine: Engine) -> None:
    with serving([served(engine)], ServerConfig(metrics_prefix=prefix)) as found:
        shown = opened(found)
        _reaches(shown, "Requests", lambda cells: cells == ["0", "0"])
        shown.close()


@pytest.mark.parametrize(
    ("share", "before", "after", "wanted"),
    [
        # Ten values: four up to 1, four up to 2, two beyond. The fifth is a quarter into the second bucket.
        (0.5, [], [[1, 4], [2, 8], ["Infinity", 10]], 1.25),
        (0.2, [], [[1, 4], [2, 8], ["Infinity", 10]], 0.5),
        (0.99, [], [[1, 4], [2, 8], ["Infinity", 10]], 2),
        # Of those, only the two beyond are new.
        (0.5, [[1, 4], [2, 8], ["Infinity", 8]], [[1, 4], [2, 8], ["Infinity", 10]], 2),
        (0.5, [[1, 4], [2, 4], ["Infinity", 4]], [[1, 4], [2, 8], ["Infinity", 8]], 1.5),
        (0.5, [[1, 4], [2, 8], ["Infinity", 10]], [[1, 4], [2, 8], ["Infinity", 10]], None),
    ],
)
def test_quantiles_are_those_of_histogram_quantile(
    share: float, before: list[Any], after: list[Any], wanted: float | None, opened: Opened, server: Serving
) -> None:
    found = opened(server).evaluate(
        "([share, before, after]) => import('/static/metrics.js').then(({ quantile }) => {"
        " const map = (pairs) => new Map(pairs.map(([bound, count]) => [Number(bound), count]));"
        " return quantile(share, map(before), map(after)); })",
        [share, before, after],
    )
    assert found == wanted


def test_rates_are_over_the_time_between_polls_and_start_again_with_the_server(opened: Opened, server: Serving) -> None:
    found = opened(server).evaluate(
        "polls => import('/static/history.js').then(({ History }) => {"
        " const history = new History();"
        " for (const [at, prompt] of polls) history.add(at, new Map([['m', { prompt, first: new Map(), between: new Map() }]]));"
        " return history.points.map(({ at, models }) => [at, models.get('m').prompt]); })",
        # The server starts again between 3 and 4, and the page is not looked at from 5 to 400.
        [[0, 100], [1, 110], [2, 150], [3, 150], [4, 7], [5, 9], [400, 1000], [401, 1005]],
    )
    assert found == [[400, None], [401, 5]]
    found = opened(server).evaluate(
        "polls => import('/static/history.js').then(({ History }) => {"
        " const history = new History();"
        " for (const [at, prompt] of polls) history.add(at, new Map([['m', { prompt, first: new Map(), between: new Map() }]]));"
        " return history.points.map(({ models }) => models.get('m').prompt); })",
        [[0, 100], [1, 110], [2, 150], [3, 150], [4, 7], [5, 9]],
    )
    assert found == [None, 10, 25, 20, None, 2]


@pytest.mark.parametrize("highest", [1, 0.001, 37, 99, 100, 101, 1234, 2.5e-9])
@pytest.mark.parametrize("whole", [False, True])
def test_ticks_are_round_few_and_reach_the_highest_value(
    highest: float, whole: bool, opened: Opened, server: Serving
) -> None:
    ticks = opened(server).evaluate(
        "([highest, whole]) => import('/static/axis.js').then(({ ticks }) => ticks(highest, whole))", [highest, whole]
    )
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] >= highest * 0.999
    steps = {float(f"{after - before:.6g}") for before, after in itertools.pairwise(ticks)}
    assert len(steps) == 1
    assert f"{steps.pop():e}"[0] in "125"
    assert not whole or all(tick == int(tick) for tick in ticks)
