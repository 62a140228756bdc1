"""Lookup: what followed the last time."""

from __future__ import annotations

import numpy as np
import pytest
from smelt.runtime.speculation.lookup import continuation


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
    assert "".join(map(chr, continuation(tokens, count))) == found
