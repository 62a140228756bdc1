"""Scoring requests, grouped by shared context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Group:
    """Continuations of one context.

    Attributes:
        context: token ids.
        continuations: the distinct continuations to score after it.
        places: for each continuation, the indices of its pairs.
    """

    context: list[int]
    continuations: list[list[int]] = field(default_factory=list)
    places: list[list[int]] = field(default_factory=list)


def grouped(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], most: int) -> list[Group]:
    """Pairs of context and continuation grouped by context, with contexts of common prefix next to each other.

    Args:
        pairs: token ids.
        most: the largest number of continuations in a group.
    """
    asked: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for i, (context, continuation) in enumerate(pairs):
        asked.setdefault(tuple(context), {}).setdefault(tuple(continuation), []).append(i)
    groups = []
    for context in sorted(asked):
        of_context = list(asked[context].items())
        for start in range(0, len(of_context), most):
            part = of_context[start : start + most]
            groups.append(Group(list(context), [list(c) for c, _ in part], [places for _, places in part]))
    return groups
