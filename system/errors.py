"""What Smelt says when something is wrong: one sentence of what, where and what to do."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

_LONGEST = 300  # of what is repeated of an error of another library


class SmeltError(Exception):
    """A mistake or a mishap that a user can act on. Its text is one clear sentence, or one a line."""


@dataclass(frozen=True)
class Problem:
    """One thing that would make a run fail, found before any work.

    Attributes:
        where: the recipe field, file or tensor it is about.
        what: the sentence.
    """

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class ProblemsError(SmeltError):
    """Problems that were found before any work, one a line.

    Attributes:
        problems: what would make the run fail.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def raise_problems(problems: list[Problem]) -> None:
    """Raise a :class:`ProblemsError` that lists all ``problems``; do nothing if there are none."""
    if problems:
        raise ProblemsError(problems)


def nearest_name(value: str, known: list[str]) -> str:
    """A phrase to end a sentence with, such as ``; did you mean group_size?``, or nothing."""
    lowered = {name.lower(): name for name in known}
    longer = [
        name for name in lowered if len(value) > 2 and name.startswith(value.lower())
    ]  # h100: h100-sxm, h100-pcie
    if len(longer) > 1:
        return f"; did you mean {' or '.join(lowered[name] for name in longer[:3])}?"
    close = longer or difflib.get_close_matches(value.lower(), list(lowered), n=1, cutoff=0.55)
    return f"; did you mean {lowered[close[0]]}?" if close else ""


def first_line(error: BaseException) -> str:
    """How another library's error begins; its class's name if it says nothing."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def in_one_line(error: BaseException) -> str:
    """What another library's error says, shortened; its class's name if it says nothing."""
    return " ".join(str(error).split())[:_LONGEST] or type(error).__name__


class RuntimeProblem(SmeltError, ValueError):  # noqa: N818 - public, and a sentence for a person
    """A checkpoint, an option or a request that cannot be served; the message says what, where and what to do."""
