"""Lookup: what followed the last time."""

from __future__ import annotations

import random

import numpy as np
import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.speculation.lookup import LookupDrafter, continuation, continued_at, matched_at, parts_of


@pytest.mark.parametrize(
    ("text", "count", "found"),
    [
        ("abcdXabcd", 3, "Xab"),
        ("abcdXabcdYab", 2, "cd"),  # the last of several places
        ("1ab2ab3xab4ab", 1, "4"),
        ("zabcQ yabcR zabc", 1, "Q"),  # the longest match
        ("abab", 6, "ababab"),  # goes on with itself
        ("aaaa", 3, "aaa"),
        ("abcde", 3, ""),
        ("abXb", 3, ""),  # one token is too few
        ("ab", 2, ""),
        ("a", 2, ""),
        ("aa", 2, ""),
    ],
)
def test_continuations(text: str, count: int, found: str) -> None:
    tokens = np.array([ord(letter) for letter in text])
    places = continued_at(tokens)
    assert "".join(chr(token) for place in places for token in continuation(tokens, place, count)) == found


@pytest.mark.parametrize(
    ("text", "most", "found"),
    [
        ("1ab2ab3xab4ab", 2, ["4a", "3x"]),  # the last place first
        ("1ab2ab3xab4ab", 9, ["4a", "3x", "2a"]),
        ("abQ. abQ, abR! ab", 3, ["R!", "Q,"]),  # each goes on with another token
        ("zabQ yabR xabS zab", 3, ["Q ", "S ", "R "]),  # the longest match first
        ("abab", 3, ["ab"]),
    ],
)
def test_branches_are_other_continuations(text: str, most: int, found: list[str]) -> None:
    tokens = np.array([ord(letter) for letter in text])
    places = continued_at(tokens, most)
    assert ["".join(map(chr, continuation(tokens, place, 2))) for place in places] == found


def test_branches_of_a_plan() -> None:
    """One for each spare block, as long together as there are places."""
    text = [ord(letter) for letter in "1ab2ab3xab4ab"]
    request = Request("a", text, SamplingParams(), 100, forked=True)
    sequence = Sequence(request, 0, list(text))
    plan = StepPlan([Chunk(sequence, len(text) - 1, 1, is_last=True, drafts=3, branched=5, spare=(7, 8))])
    tree = LookupDrafter().propose(plan).of[sequence]
    parts = ["".join(map(chr, part)) for part in (tree.chain, *(branch.tokens for branch in tree.branches))]
    assert parts == ["4ab", "3xa", "2a"]
    assert parts_of(2, 3) == [1, 1, 0]


@pytest.mark.parametrize(
    ("text", "matched"),
    [("abcdXabcd", 4), ("abcdXbcd", 3), ("abXab", 2), ("abababab", 6), ("abXcd", 0), ("q" + "abcdefghi" * 3 + "Z" + "abcdefghi" * 3, 16)],
)  # fmt: skip
def test_it_says_how_much_occurred_before(text: str, matched: int) -> None:
    assert LookupDrafter().matched(_sequence(text)) == matched


def test_matches_are_counted_backwards() -> None:
    assert matched_at("abcdXabQd", 4, 16) == 1
    assert matched_at("abcdXabQ", 3, 16) == 0
    assert matched_at("abcdXab", 2, 16) == 2
    assert matched_at("abcdabcd", 4, 3) == 3


def test_a_text_that_grows_is_looked_up_as_a_whole_one() -> None:
    """Beside the same text searched from its beginning each time."""
    draw = random.Random(0)
    lookup, sequence = LookupDrafter(), _sequence("ab")
    for _ in range(300):
        sequence.tokens += [draw.choice(b"abc") for _ in range(draw.choice([1, 1, 4]))]
        plan = StepPlan([Chunk(sequence, len(sequence.tokens) - 1, 1, is_last=True, drafts=6)])
        found = lookup.propose(plan).of
        tokens = np.array(sequence.tokens)
        places = continued_at(tokens)
        assert [tree.chain for tree in found.values()] == [continuation(sequence.tokens, place, 6) for place in places]


def test_it_learns_from_what_came_whether_it_was_drafted_or_not() -> None:
    """Each of many texts goes on as it did before, or never does: by how much of it had occurred."""
    lookup = LookupDrafter()
    for i in range(40):
        long, short = _sequence(f"abcdefgh{i}#abcdefgh"), _sequence(f"xyQ{i}#xy")
        for sequence in (long, short):
            assert lookup.matched(sequence) == (8 if sequence is long else 2)
            sequence.tokens += [ord(letter) for letter in (f"{i}#" if sequence is long else "Z")]
            lookup.matched(sequence)
    assert lookup.share(_sequence("abcdefgh?abcdefgh")) > 0.95
    assert lookup.share(_sequence("xyQ?xy")) < 0.1
    assert lookup.share(_sequence("abcd")) == 0


def test_a_sequence_of_its_own_kind_is_known_by_itself() -> None:
    lookup = LookupDrafter()
    for i in range(100):
        common = _sequence(f"xyQ{i}#xy")
        lookup.matched(common)
        common.tokens += [ord("Z")]
        lookup.matched(common)
    other = _sequence("ab1")
    for _ in range(8):  # two that occurred before, and the third comes again
        for letter in "-ab1" + chr(200 + _):
            lookup.matched(other)
            other.tokens.append(ord(letter))
    other.tokens += [ord("a"), ord("b")]
    assert lookup.share(other) > 3 * lookup.share(_sequence("xyQ?xy"))


def _sequence(text: str) -> Sequence:
    tokens = [ord(letter) for letter in text]
    return Sequence(Request("a", tokens, SamplingParams(), 1000, forked=True), 0, list(tokens))
