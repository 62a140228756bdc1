"""Words that an output may not have, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

TokenWords = tuple[tuple[int, ...], ...]


def bad_words_tokens(tokenizer: Any, words: Iterable[str]) -> TokenWords:
    """Each word as tokens: as it stands at the beginning of a text, and as it stands after a space.

    Args:
        tokenizer: the model's.
        words: texts that are not blank.
    """
    written = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = (tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in written)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def completing(words: TokenWords, generated: Sequence[int]) -> list[int]:
    """The tokens that would complete a word.

    Args:
        words: as tokens.
        generated: the output so far.
    """
    return [word[-1] for word in words if _ends_with(generated, word[:-1])]


def _ends_with(tokens: Sequence[int], end: tuple[int, ...]) -> bool:
    return not end or tuple(tokens[-len(end) :]) == end
