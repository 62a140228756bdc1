"""Recipes and command lines that nobody wrote: each ends well, or in sentences, soon and in little memory."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smelt.compress import Recipe, SmeltError
from smelt.compress.cli import main
from smelt.compress.commands.schema import recipe_schema
from smelt.compress.sweep.trials import Sweep

_SECONDS, _MORE_MEMORY = 5, 500_000_000
_KNOWN = settings(
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
QUICK, LONG = settings(_KNOWN, max_examples=35), settings(_KNOWN, max_examples=350)
profiles = pytest.mark.parametrize("profile", [QUICK, pytest.param(LONG, marks=pytest.mark.slow)], ids=["few", "many"])

GOOD = {
    "model": "builtin:smelt-6m",
    "output": "out",
    "calibrate": {"samples": 2, "length": 16},
    "steps": [{"quantize": {"scheme": "W4A16", "rounding": {"method": "gptq", "damping": 0.1}}}],
    "evaluate": {"windows": 2, "speed": {"prompt": 4}},
}


def _names(schema: Any) -> set[str]:
    """All fields and values that a recipe may name."""
    if isinstance(schema, list):
        return {name for each in schema for name in _names(each)}
    if not isinstance(schema, dict):
        return {schema} if isinstance(schema, str) else set()
    found = set(schema.get("properties", {})) | {each for each in schema.get("enum", []) if isinstance(each, str)}
    return found | {name for key, each in schema.items() if key != "description" for name in _names(each)}


NAMES = st.sampled_from(sorted(_names(recipe_schema())))
ODD_TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "",
            "~nosuchuser/x",
            "x" * 300,
            "a/" * 2500,
            "\0",
            "\ud800",
            "/dev/zero",
            "re:(",
            "re:a{9999999999999999999}",
            "²",
            "2:4",
            "0:0",
            "400k",
            "9" * 400,
        ]
    ),
)
ODD_NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, 2**70, 10**400, -1, 0, float("nan"), float("inf"), 5e-324]),
)
SCALARS = st.one_of(NAMES, ODD_TEXT, ODD_NUMBERS, st.booleans(), st.none(), st.dates(), st.binary(max_size=4))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(NAMES, NAMES, ODD_TEXT, st.integers()), inner, max_size=4),
        st.sets(st.text(max_size=3), max_size=3),
    ),
    max_leaves=12,
)
# What YAML itself makes of text, its tags, anchors and brackets included.
SOURCE = st.lists(
    st.one_of(
        NAMES,
        ODD_TEXT,
        st.sampled_from(
            [
                ": ",
                "\n",
                "\n  ",
                "- ",
                "[",
                "]",
                "{",
                "}",
                ", ",
                "&a ",
                "*a",
                "<<: *a",
                "!!int ",
                "!!set ",
                "!!python/name:os.system ",
                "'",
                '"',
                "|\n ",
                "? ",
                "#",
                "\t",
                "---",
                "%",
                "2026-01-01",
                ".nan",
                "0x" + "f" * 99,
                "[" * 2000,
                "- " * 2000,
            ]
        ),
    ),
    max_size=30,
).map("".join)


def _places(data: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place, *(each for key, value in inside for each in _places(value, (*place, key)))]


@st.composite
def _changed(draw: Callable[[Any], Any]) -> dict[str, Any]:
    """A good recipe with a value or two put in somewhere."""
    recipe = json.loads(json.dumps(GOOD))
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(_places(recipe)))
        target = recipe
        for key in place[:-1]:
            target = target[key]
        if not place or (isinstance(inner := target[place[-1]], dict) and draw(st.booleans())):
            (recipe if not place else inner)[draw(st.one_of(NAMES, NAMES, ODD_TEXT))] = draw(VALUES)
        else:
            target[place[-1]] = draw(VALUES)
    return recipe


def _dumped(data: Any) -> str:
    try:
        return yaml.dump(data, allow_unicode=True)
    except (yaml.YAMLError, ValueError):  # what YAML cannot write; JSON writes most of it
        return json.dumps(data, default=str, skipkeys=True)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def late(_signal: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"this took more than {_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) < _MORE_MEMORY


def _holds(load: Callable[[], object]) -> None:
    """It loads, or says why not; nothing else."""
    said = ""
    with _bounded():
        try:
            load()
        except SmeltError as error:
            said = str(error) or " "
    lines = said.split("\n")
    assert all(line.strip() for line in lines) or not said
    assert len(lines) <= 50
    assert "Traceback" not in said


@profiles
def test_changed_recipes(profile: settings, tmp_path: Path) -> None:
    @profile
    @given(_changed())
    def check(data: dict[str, Any]) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text(_dumped(data), encoding="utf-8", errors="surrogatepass")
        _holds(lambda: Recipe.load(path))
        path.write_text(
            _dumped({**data, "sweep": {"grid": {"seed": [1, 2]}}}), encoding="utf-8", errors="surrogatepass"
        )
        _holds(lambda: Sweep.load(path))

    check()


@profiles
def test_any_text_as_a_recipe(profile: settings, tmp_path: Path) -> None:
    @profile
    @given(SOURCE)
    def check(text: str) -> None:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        _holds(lambda: Recipe.load(path))

    check()


@profiles
def test_overrides(profile: settings, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(_dumped(GOOD))
    fields = st.one_of(
        st.sampled_from([".".join(map(str, place)) for place in _places(GOOD) if place]),
        st.lists(st.one_of(NAMES, ODD_TEXT, st.integers().map(str)), max_size=4).map(".".join),
    )
    values = st.one_of(SOURCE, SCALARS.map(str), VALUES.map(_dumped))

    @profile
    @given(st.lists(st.tuples(fields, values).map("=".join), max_size=3))
    def check(overrides: list[str]) -> None:
        _holds(lambda: Recipe.load(path, overrides))

    check()


OPTIONS = {
    "eval": ["--limit", "--fewshot", "--windows", "--length", "--samples", "--speed", "--fail-if", "--tasks", "--text", "--baseline", "--output", "--device"],
    "bench": ["--prompt", "--output", "--concurrency", "--requests", "--trace-requests", "--trace"],
    "chat": ["--temperature", "--top-p", "--max-tokens", "--max-model-len", "--seed"],
    "export": ["--to", "--type", "--output"],
    "merge": ["--adapter", "--output"],
    "compare": ["--fail-if", "--output"],
    "run": ["--set", "--output"],
    "sweep": ["--set", "--output", "--fail-if"],
    "inspect": [],
}  # fmt: skip


@profiles
def test_options(profile: settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a model or report that is not there, so that nothing is done that takes long."""
    monkeypatch.chdir(tmp_path)
    text = st.one_of(SCALARS.map(str), SOURCE, st.sampled_from(["ppl>1e999", ",", "prompt=²", "none", "gguf", "0"]))
    words = text.map(lambda each: each.replace("\0", ""))  # no argument holds one
    one = st.sampled_from(sorted(OPTIONS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.lists(st.tuples(st.sampled_from(OPTIONS[name] or ["--json"]), words), max_size=3),
        )
    )

    @profile
    @given(one)
    def check(given_: tuple[str, list[tuple[str, str]]]) -> None:
        command, options = given_
        nowhere = ["./nowhere"] * (2 if command == "compare" else 1)
        arguments = [command, *nowhere, *(f"{option}={value}" for option, value in options)]
        said = io.StringIO()
        with (
            patch.object(sys, "argv", ["smelt", *arguments]),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
            pytest.raises(SystemExit) as ended,
            _bounded(),
        ):
            main()
        assert ended.value.code in (1, 2)
        assert said.getvalue().strip()
        assert "Traceback" not in said.getvalue()
        assert list(tmp_path.iterdir()) == []

    check()
