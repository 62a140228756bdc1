"""The items of Smelt's own tasks, cut from the evaluation half of the builtin corpus."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

from datasets import Dataset

_CORPUS = Path(__file__).parents[3] / "models" / "builtin" / "corpus" / "evaluation.jsonl"
# Sentence boundaries: closing punctuation before a capital or a digit, and paragraph breaks.
_BREAK = re.compile(r"""(?<!\bMr)(?<!\bMrs)(?<!\bDr)[.!?]["')]*\s+(?=["'(]?[A-Z0-9])|\n\n""")
_PROSE = re.compile(r"""["'(]?[A-Z0-9][^\n]*[.!?]["')]*""")
_LAST_WORD = re.compile(r"""(?P<word> [A-Za-z]+)[.!?]["')]*$""")
_LEAST_WORDS = 4
_LEAST_BEFORE = 2
_CUTS = 4
_CHOICES = 4

Item = dict[str, object]
Splits = dict[str, Dataset]


def passages(**_: object) -> Splits:
    """One item a passage: its title and its text."""
    return {"test": Dataset.from_list(_passages())}


def last_words(**_: object) -> Splits:
    """One item a sentence: its last word, and all that the passage says before it.

    Items of one passage follow each other, each context beginning with the one before.
    """
    items: list[Item] = []
    for number, passage in enumerate(_passages()):
        text = passage["text"]
        for start, end in _sentences(text)[_LEAST_BEFORE:]:
            found = _LAST_WORD.search(text[start:end])
            if _is_prose(text[start:end]) and found:
                context = text[: start + found.start("word")]
                items.append({"passage": number, "context": context, "word": found["word"]})
    return {"test": Dataset.from_list(items)}


def continuations(**_: object) -> Splits:
    """Several items a passage: its text up to a sentence about its middle, and four sentences that may follow.

    The wrong ones come from other passages, at the same cut, with lengths closest to the right one's, so that length
    does not give the answer away.
    """
    texts = [passage["text"] for passage in _passages()]
    cuts = [_cuts(text) for text in texts]
    items: list[Item] = []
    for number, text in enumerate(texts):
        for cut, (start, end) in enumerate(cuts[number]):
            right = text[start:end]
            others = [
                texts[other][slice(*spans[cut])]
                for other, spans in enumerate(cuts)
                if other != number and cut < len(spans)
            ]
            choices = sorted(others, key=lambda wrong: abs(len(wrong) - len(right)))[: _CHOICES - 1]
            answer = (number + cut) % _CHOICES
            choices.insert(answer, right)
            items.append({"passage": number, "context": text[:start].rstrip(), "choices": choices, "answer": answer})
    return {"test": Dataset.from_list(items)}


def _passages() -> list[dict[str, str]]:
    return [json.loads(line) for line in _CORPUS.read_text(encoding="utf-8").splitlines()]


def _sentences(text: str) -> list[tuple[int, int]]:
    """Start and end of each sentence of a text, without the space between them."""
    bounds = [0, *(found.end() for found in _BREAK.finditer(text)), len(text)]
    return [(start, start + len(text[start:end].rstrip())) for start, end in pairwise(bounds)]


def _is_prose(sentence: str) -> bool:
    """Whether it is a sentence of some length, not a list number, a date, a line of code or of dialogue."""
    return _PROSE.fullmatch(sentence) is not None and len(sentence.split()) >= _LEAST_WORDS


def _cuts(text: str) -> list[tuple[int, int]]:
    """The first sentences of the second half."""
    sentences = _sentences(text)
    second = sentences[len(sentences) // 2 :]
    return [(start, end) for start, end in second if _is_prose(text[start:end])][:_CUTS]
