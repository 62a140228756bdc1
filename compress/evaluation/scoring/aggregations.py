"""How a metric's values of items become one: lm-eval's aggregations, by the names that reports have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Aggregate = Callable[[Sequence[Any]], float]


def mean(values: Sequence[Any]) -> float:
    """Named as lm-eval's own."""
    return math.fsum(values) / len(values)


def aggregation(name: str) -> Aggregate | None:
    """An aggregation by its name in a report; None if lm-eval does not know it."""
    if name == "mean":
        return mean
    from lm_eval.api.registry import aggregation_registry

    return aggregation_registry.get(name) if name in aggregation_registry else None


def name_of(aggregate: Aggregate) -> str:
    """An aggregation's name in a report: lm-eval's, or that of a task's own code in brackets, which may be called like another."""
    if aggregate is mean:
        return "mean"
    from lm_eval.api.registry import aggregation_registry

    found = next((name for name, known in aggregation_registry.items() if known is aggregate), None)
    return found or f"({getattr(aggregate, '__name__', type(aggregate).__name__)})"


def is_right_or_wrong(values: Sequence[Any]) -> bool:
    """Whether items are either right or wrong."""
    return all(isinstance(value, (bool, int, float)) and value in (0, 1) for value in values)
