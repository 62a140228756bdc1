"""The parts of a model's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text before the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins.

    Attributes:
        index: which of the answer's calls, from 0.
        id: by which the tool's result refers to it.
        name: of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON once they are all there.

    Attributes:
        index: which call.
        text: to append.
    """

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Finds the parts of a text that comes in pieces, however it is cut."""

    def add(self, text: str) -> list[Part]:
        """The parts that are known after ``text``; what may still become the beginning of a tag is held back."""
        ...

    def end(self) -> list[Part]:
        """The rest, when no text follows."""
        ...


class Plain:
    """All is content."""

    def add(self, text: str) -> list[Part]:
        """The text."""
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        """Nothing is left."""
        return []


class FirstCall:
    """Leaves all calls but the first out.

    Args:
        all_parts: finds them.
    """

    def __init__(self, all_parts: Parser) -> None:
        self._all = all_parts

    def add(self, text: str) -> list[Part]:
        """The parts that are known after ``text``."""
        return [part for part in self._all.add(text) if _is_kept(part)]

    def end(self) -> list[Part]:
        """The rest."""
        return [part for part in self._all.end() if _is_kept(part)]


def _is_kept(part: Part) -> bool:
    return not isinstance(part, CallStart | CallArguments) or part.index == 0


@dataclass
class WholeAnswer:
    """A finished answer.

    Attributes:
        content, reasoning: texts.
        calls: each call's id, name and arguments.
    """

    content: str
    reasoning: str
    calls: list[tuple[str, str, str]]

    @classmethod
    def of(cls, parser: Parser, text: str) -> WholeAnswer:
        """Of a whole text."""
        found = cls("", "", [])
        for part in [*parser.add(text), *parser.end()]:
            match part:
                case Content(more):
                    found.content += more
                case Reasoning(more):
                    found.reasoning += more
                case CallStart(_, id, name):
                    found.calls.append((id, name, ""))
                case CallArguments(index, more):
                    id, name, arguments = found.calls[index]
                    found.calls[index] = id, name, arguments + more
        return found
