"""Several policies on one trace, with an interval around each figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...costs.device_cost import ScaledCost
from ...costs.work import StepCost
from ...requests.trace import Arrival
from ..options import SimulatedEngine
from ..results import SimulationResult

# Intervals are found on so many requests.
_INTERVAL_REQUESTS = 2000

FIGURES: dict[str, Callable[[SimulationResult], float]] = {
    "output_rate": lambda found: found.output_rate,
    **{
        f"{name}_{share}": (lambda found, name=name, share=share: getattr(getattr(found, name), share))
        for name in ("first_token", "between_tokens", "completion", "normalized")
        for share in ("mean", "p50", "p99")
    },
}
Simulate = Callable[[Sequence[Arrival], SimulatedEngine, Callable[[StepCost], StepCost]], SimulationResult]


@dataclass(frozen=True)
class PolicyResult:
    """One policy's result.

    Attributes:
        result: with the cost model as it is.
        intervals: of each figure, if all steps took less or more time by the cost model's spread.
    """

    result: SimulationResult
    intervals: dict[str, tuple[float, float]]

    def as_data(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.result.as_data(), "intervals": self.intervals}


def compare(
    arrivals: Sequence[Arrival],
    engine: SimulatedEngine,
    policies: Sequence[str],
    simulate: Simulate,
    spread: float,
) -> list[PolicyResult]:
    """Simulate each policy, and how its figures move with the cost model's error.

    Args:
        arrivals: the trace.
        engine: its options but for the policy.
        policies: by name.
        simulate: simulates a trace; the last argument changes cost models.
        spread: of the cost model, in relative terms.
    """
    found = []
    for policy in policies:
        options = replace(engine, policy=policy)
        result = simulate(arrivals, options, lambda cost: cost)
        few = arrivals[:_INTERVAL_REQUESTS]
        base = result if len(few) == len(arrivals) else simulate(few, options, lambda cost: cost)
        moved = [
            simulate(few, options, lambda cost, factor=factor: ScaledCost(cost, factor))
            for factor in (1 / (1 + spread), 1 + spread)
        ]
        intervals = {}
        for name, figure in FIGURES.items():
            value, usual = figure(result), figure(base)
            ratios = [figure(each) / usual if usual else 1.0 for each in moved]
            intervals[name] = (value * min(1.0, *ratios), value * max(1.0, *ratios))
        found.append(PolicyResult(result, intervals))
    return found
