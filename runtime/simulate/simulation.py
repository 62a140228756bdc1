"""A trace through the engine's scheduler on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ..costs.work import StepCost
from ..requests.trace import Arrival
from .options import SimulatedEngine
from .replica import Replica
from .results import SimulationResult

Report = Callable[[int], object]


def simulate(
    arrivals: SequenceOf[Arrival], engine: SimulatedEngine, cost: StepCost, *, progress: Report = lambda _: None
) -> SimulationResult:
    """Serve a trace with one engine.

    Args:
        arrivals: in order of time. Prefixes are shared if they name any.
        engine: the options.
        cost: how long steps take.
        progress: called with the number of requests that have arrived.

    Raises:
        RuntimeProblem: a request does not fit into the cache alone.
    """
    replica = Replica(engine, enable_prefix_caching=shares_prefixes(arrivals))
    for arrival in arrivals:
        replica.check(arrival)
    for number, arrival in enumerate(arrivals):
        replica.run_until(arrival.at, cost)
        replica.submit(number, arrival)
        progress(number)
    replica.run_until(math.inf, cost)
    return SimulationResult.of(engine.policy, [replica])


def shares_prefixes(arrivals: SequenceOf[Arrival]) -> bool:
    """Whether a trace says which prompts begin alike."""
    return any(arrival.prefix for arrival in arrivals)
