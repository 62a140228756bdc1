"""Texts for parsers, cut in every way."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

from smelt.runtime.serve.answer.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning, WholeAnswer

MakeParser = Callable[[], Parser]


def numbered() -> Callable[[], str]:
    """Names for calls that a test knows."""
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def parts_of(parser: Parser, pieces: Iterable[str]) -> list[Part]:
    """The parts of a text, those of one kind that follow each other as one."""
    found: list[Part] = []
    for part in [*(part for piece in pieces for part in parser.add(piece)), *parser.end()]:
        assert isinstance(part, CallStart) or part.text, "no part is empty"
        last = found[-1] if found else None
        if isinstance(part, CallArguments) and isinstance(last, CallArguments):
            assert last.index == part.index
        if isinstance(part, (Content, Reasoning, CallArguments)) and type(last) is type(part):
            found[-1] = replace(last, text=last.text + part.text)  # type: ignore[union-attr]
        else:
            found.append(part)
    return found


def cuts(text: str) -> list[list[str]]:
    """A text in two pieces, cut anywhere; in single characters; and in random pieces."""
    found = [[text[:at], text[at:]] for at in range(1, len(text))]
    found.append(list(text))
    chance = random.Random(len(text))
    for _ in range(20):
        places = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(2, 8)))
        found.append([text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])])
    return found


def read(make: MakeParser, text: str) -> WholeAnswer:
    """A text's answer, which is the same however it is cut."""
    whole = parts_of(make(), [text])
    for pieces in cuts(text):
        assert parts_of(make(), pieces) == whole, pieces
    for index, start in enumerate(part for part in whole if isinstance(part, CallStart)):
        assert start.index == index
    return WholeAnswer.of(make(), text)


def calls(answer: WholeAnswer) -> list[tuple[str, str]]:
    """Names and arguments."""
    return [(name, arguments) for _, name, arguments in answer.calls]
