"""Lookup: what followed the last time."""

from __future__ import annotations

import numpy as np
import pytest
from smelt.runtime import SamplingParams
from smelt.runtime.requests.sequence import Request, Sequence
from smelt.runtime.scheduling.plan import Chunk, StepPlan
from smelt.runtime.speculation.lookup import LookupDrafter, continuation, continued_at, parts_of


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
