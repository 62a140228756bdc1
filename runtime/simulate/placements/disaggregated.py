"""Engines that compute prompts, and others that generate: keys and values are sent from the first to the second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...costs.work import StepCost
from ...requests.trace import Arrival
from ..options import SimulatedEngine
from ..replica import Replica
from ..results import Served, SimulationResult
from ..simulation import shares_prefixes
from .replicas import serve


def simulate_disaggregated(
    arrivals: Sequence[Arrival],
    engine: SimulatedEngine,
    cost: StepCost,
    *,
    prefill: int,
    decode: int,
    send: float,
    shortest: int = 0,
) -> SimulationResult:
    """Serve a trace as DistServe does (Zhong et al., OSDI 2024).

    A prompt's keys and values stay where they were computed until a decode engine has room, and are sent beside other work.

    Args:
        arrivals: in order of time.
        engine: the options of each.
        cost: of their steps.
        prefill, decode: how many engines of each kind.
        send: seconds for each token's keys and values.
        shortest: prompts of fewer tokens are computed by the decode engines, as in a hybrid of both.

    Raises:
        RuntimeProblem: a request does not fit into one engine's cache.
    """
    share = shares_prefixes(arrivals)
    prompts = [Replica(engine, enable_prefix_caching=share) for _ in range(prefill)]
    decoders = [Replica(engine, enable_prefix_caching=share) for _ in range(decode)]
    for arrival in arrivals:
        decoders[0].check(arrival)
    everything: list[tuple[int, Arrival, Served | None]] = [
        (number, arrival, None) for number, arrival in enumerate(arrivals)
    ]
    sent = [(number, arrival) for number, arrival, _ in everything if arrival.prompt >= shortest]
    # A request's first token is made with its prompt.
    serve(prompts, [(number, replace(arrival, output=1), None) for number, arrival in sent], cost)
    computed = [each for replica in prompts for each in replica.served]
    to_decode: list[tuple[int, Arrival, Served | None]] = [
        (each.number, replace(arrivals[each.number], at=each.ended + send * each.prompt), each)
        for each in computed
        if arrivals[each.number].output > 1
    ]
    stays = [each for each in everything if each[1].prompt < shortest]
    serve(decoders, sorted([*to_decode, *stays], key=lambda each: each[1].at), cost)
    served = [each for each in computed if arrivals[each.number].output == 1]
    served += [each for replica in decoders for each in replica.served]
    return SimulationResult.of(engine.policy, [*prompts, *decoders], served)
