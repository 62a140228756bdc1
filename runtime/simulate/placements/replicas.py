"""Several engines with all of the model each; a request goes to the one with the fewest that have not ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...costs.work import StepCost
from ...requests.trace import Arrival
from ..options import SimulatedEngine
from ..replica import Replica
from ..results import Served, SimulationResult
from ..simulation import shares_prefixes


def simulate_replicas(
    arrivals: Sequence[Arrival], engine: SimulatedEngine, cost: StepCost, count: int
) -> SimulationResult:
    """Serve a trace with ``count`` equal engines.

    Raises:
        RuntimeProblem: a request does not fit into one engine's cache.
    """
    share = shares_prefixes(arrivals)
    engines = [Replica(engine, enable_prefix_caching=share) for _ in range(count)]
    serve(engines, [(number, arrival, None) for number, arrival in enumerate(arrivals)], cost)
    return SimulationResult.of(engine.policy, engines)


def serve(engines: Sequence[Replica], arrivals: Sequence[tuple[int, Arrival, Served | None]], cost: StepCost) -> None:
    """Give each request to the engine with the fewest, and run all to their ends.

    Args:
        engines: equal ones.
        arrivals: in order of time: number, request, and what another engine has done of it.
        cost: of their steps.

    Raises:
        RuntimeProblem: a request does not fit into one engine's cache.
    """
    for _, arrival, _ in arrivals:
        engines[0].check(arrival)
    for number, arrival, prefilled in arrivals:
        for engine in engines:
            engine.run_until(arrival.at, cost)
        min(engines, key=lambda engine: engine.load).submit(number, arrival, prefilled=prefilled)
    for engine in engines:
        engine.run_until(math.inf, cost)
