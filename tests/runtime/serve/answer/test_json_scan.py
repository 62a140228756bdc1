"""Objects in pieces, against the json library."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smelt.runtime.serve.answer.json_scan import ObjectScan, decoded, is_object

from .cutting import cuts
from .json_objects import OBJECTS, written


def _scan(pieces: list[str]) -> tuple[ObjectScan, int]:
    scan, taken = ObjectScan(), 0
    for piece in pieces:
        taken += scan.add(piece)
    return scan, taken


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    value=OBJECTS,
    style=st.integers(0, 7),
    before=st.sampled_from(["", " ", "\n"]),
    after=st.text("} {\"'a", max_size=5),
)
def test_an_object_is_found_with_its_values(value: dict[str, Any], style: int, before: str, after: str) -> None:
    text = before + written(value, style)
    for pieces in ([text + after], list(text + after)):
        scan, taken = _scan(pieces)
        assert scan.is_ended
        assert not scan.is_broken
        assert scan.text == text
        assert taken == len(text)
        assert {key: json.loads(text[span.start : span.end]) for key, span in scan.values.items()} == value


@settings(max_examples=200, deadline=None, derandomize=True)
@given(value=OBJECTS, style=st.integers(0, 7), size=st.floats(0, 1))
def test_a_part_of_an_object_is_neither_ended_nor_broken(value: dict[str, Any], style: int, size: float) -> None:
    text = written(value, style)
    part = text[: int(size * len(text))]
    scan, taken = _scan([part])
    if part != text:
        assert not scan.is_over
    assert taken == len(part)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=st.lists(st.sampled_from([*'{}[]",: \n\\ax1-.', '"a":', "true", "null", '{"']), max_size=16).map("".join))
def test_any_text_is_read_alike_however_it_is_cut(text: str) -> None:
    whole, taken = _scan([text])
    for pieces in cuts(text):
        scan, others = _scan(pieces)
        assert (scan.text, scan.values, scan.is_ended, scan.is_broken, scan.in_string, others) == (
            whole.text, whole.values, whole.is_ended, whole.is_broken, whole.in_string, taken,
        )  # fmt: skip
    assert whole.text == text[:taken]


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    text=st.lists(st.sampled_from(["{", '"a"', ":", ",", "}", " ", "1", "[1]", '"}"', "null", "x"]), max_size=12).map(
        "".join
    )
)
def test_what_ends_is_json_but_for_a_last_comma(text: str) -> None:
    """Its values are flat, so nothing in it is read leniently."""
    scan, _ = _scan([text])
    if is_object(text):
        assert scan.is_ended
    if scan.is_ended:
        found = scan.text
        while (shorter := found.replace(", ", ",")) != found:
            found = shorter
        assert is_object(scan.text) or is_object(found.replace(",}", "}"))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("x", 0),
        ("{x}", 1),
        ("{1}", 1),
        ("{{", 1),
        ('{"a"}', 4),
        ('{"a" 1}', 5),
        ('{"a": }', 6),
        ('{"a": 1 2}', 8),
        ('{"a": 01}', 8),
        ('{"a": tru}', 9),
        ('{"a": True}', 6),
        ('{"a": [1}', 8),
        ('{"a": {]', 7),
        ('{"a": 1]', 7),
        ('{"a": "b" "c"', 10),
    ],
)
def test_the_character_that_breaks_it_is_left(text: str, taken: int) -> None:
    scan, found = _scan([text])
    assert scan.is_broken
    assert not scan.is_ended
    assert found == taken


def test_of_two_values_the_first_counts() -> None:
    scan, _ = _scan(['{"a": 1, "\\u0061": 2}'])
    span = scan.values["a"]
    assert scan.text[span.start : span.end] == "1"
    assert list(scan.values) == ["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a', True),
        ('{"a"', False),
        ('{"a": "b\\"', True),
        ('{"a": "b\\\\"', False),
        ('{"a": ["b', True),
        ('{"a": ["b\n', False),
        ('{"a": ["b\n", "', True),
    ],
)
def test_whether_a_tag_is_inside_a_string(text: str, expected: bool) -> None:
    scan, _ = _scan([text])
    assert scan.in_string is expected


def test_strings() -> None:
    assert decoded('"a\\u00e9\\n\\"b"') == 'aé\n"b'
    assert decoded('"a\nb"') == "a\nb"
    assert decoded('"\\ud83d\\ude42"') == "🙂"
    for wrong in ('"\\ud83d"', "1", "null", '"\\x"', '"a'):
        assert decoded(wrong) is None
    assert is_object('{"a": 1}')
    for wrong in ("[]", "1", "", "{", "[" * 100_000):
        assert not is_object(wrong)
