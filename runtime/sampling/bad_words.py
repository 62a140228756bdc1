"""Words that an output may not have, as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

TokenWords = tuple[tuple[int, ...], ...]


def bad_words_tokens(tokenizer: Any, words: Iterable[str]) -> TokenWords:
    """Each word as tokens: as it stands at the beginning of a text, after a space, and at the beginning of a line or within a word.

    Args:
        tokenizer: the model's.
        words: texts that are not blank.
    """
    forms = [form for word in words for form in (word.lstrip(), f" {word.lstrip()}", f"\n{word.lstrip()}")]
    line, *found = (tuple(tokens) for tokens in tokenizer(["\n", *forms], add_special_tokens=False).input_ids)
    for place in range(2, len(found), 3):  # sentencepiece's tokenizers begin every text with a space
        found[place] = found[place][len(line) :] if found[place][: len(line)] == line else ()
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
