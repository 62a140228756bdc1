"""The live page: what is served, and that it is safe."""

from __future__ import annotations

import http.client
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from smelt.runtime.engine.engine import Engine
from smelt.runtime.serve.http.config import ServerConfig

from ....tiny import REPOSITORY
from ..serving import Serving, served, serving
from .shown import FOLDER

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc"))
TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}


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
