"""FastServe's feedback queues against first come, first served."""

from __future__ import annotations

import math
from dataclasses import replace

from smelt.runtime.costs.swap_cost import SwapCost
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.scheduling.policies.mlfq import SkipJoinFeedbackQueue
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.replica import Replica
from smelt.runtime.simulate.results import SimulationResult
from smelt.runtime.simulate.simulation import simulate

from .setting import A100, LLAMA_13B, PAPER_POSITIONS, Row, Study, at_once, at_rate, cost_of, transfers

_HOST_BYTES = 64e9
_TRANSFER = 1_000_000
_PLACES = 16
_SHARES = (0.7, 0.9, 1.1)
# Beyond that, requests preempt each other in turn, and a simulation takes minutes.
_LIGHT = (0.5,)
_HEAVY = "heavy tails (pareto:200,1.2)"
_CASES = {
    _HEAVY: ("lognormal:161,1.1", "pareto:200,1.2", 4096, _SHARES),
    "ShareGPT-like (lognormal:338,0.9)": ("lognormal:161,1.1", "lognormal:338,0.9", 2048, _SHARES),
    "equal outputs (fixed:338)": ("lognormal:161,1.1", "fixed:338", 2048, _SHARES),
    "long prompts, equal outputs": ("lognormal:1200,0.5", "fixed:200", 4096, _LIGHT),
}
_WAYS = (("fcfs", False), ("mlfq", False), ("mlfq", True))
# Without what keeps requests from starving.
_UNPROMOTED, _FOREVER = "mlfq, never promoted", 1e12
# Seconds for each output token.
_MEAN_LIMIT, _P99_LIMIT = 0.03, 0.1


def feedback(study: Study) -> list[Row]:
    """FastServe: short outputs overtake long ones without being known in advance."""
    rows = []
    for load, (prompts, outputs, longest, shares) in _CASES.items():
        arrivals = study.random(prompts, outputs, 500, rate=1.0, longest=longest)
        capacity = _capacity(arrivals)
        for share in shares:
            for policy, host in (*_WAYS, *([(_UNPROMOTED, False)] if shares is _LIGHT else [])):
                found = _simulated(at_rate(arrivals, share * capacity), policy, host=host)
                rows.append(
                    {
                        "load": load, "busy": share, "arrivals": share * capacity, "requests": len(arrivals),
                        "policy": policy, "host": host, "mean_completion": found.completion.mean,
                        "p50_completion": found.completion.p50, "p99_completion": found.completion.p99,
                        "mean_normalized": found.normalized.mean, "p99_normalized": found.normalized.p99,
                        "output_rate": found.output_rate, "preemptions": found.preemptions,
                        "swapped_blocks": found.swapped_blocks,
                    }
                )  # fmt: skip
    return rows


def equal_latency(study: Study) -> list[Row]:
    """FastServe's other claim: the highest rate within limits of the latency for each output token."""
    prompts, outputs, longest, _ = _CASES[_HEAVY]
    arrivals = study.random(prompts, outputs, 500, rate=1.0, longest=longest)
    capacity = _capacity(arrivals)
    rows = []
    for policy, host in _WAYS:
        most = {"mean": 0.0, "p99": 0.0}
        for tenths in range(1, 25):
            rate = tenths / 10 * capacity
            found = _simulated(at_rate(arrivals, rate), policy, host=host).normalized
            within = {"mean": found.mean <= _MEAN_LIMIT, "p99": found.p99 <= _P99_LIMIT}
            for name, good in within.items():
                most[name] = rate if good and most[name] > rate - 0.15 * capacity else most[name]
            if not any(within.values()):
                break
        rows.append(
            {
                "policy": policy,
                "host": host,
                "requests": len(arrivals),
                "mean_rate": most["mean"],
                "p99_rate": most["p99"],
            }
        )
    return rows


def _engine(policy: str, *, host: bool) -> tuple[SimulatedEngine, SwapCost]:
    transfer = transfers(LLAMA_13B, A100, _TRANSFER)
    engine = SimulatedEngine(PAPER_POSITIONS // 16, policy=policy, max_num_seqs=_PLACES, max_tokens=2048)
    if host:
        engine = replace(engine, host_blocks=int(_HOST_BYTES / transfer.block_bytes), transfer=transfer)
    return engine, SwapCost(cost_of(LLAMA_13B, A100), transfer)


def _simulated(arrivals: list[Arrival], policy: str, *, host: bool) -> SimulationResult:
    if policy != _UNPROMOTED:
        engine, cost = _engine(policy, host=host)
        return simulate(arrivals, engine, cost)
    engine, cost = _engine("mlfq", host=host)
    replica = Replica(engine)
    replica.scheduler.policy = SkipJoinFeedbackQueue(starved=_FOREVER)
    for number, arrival in enumerate(arrivals):
        replica.run_until(arrival.at, cost)
        replica.submit(number, arrival)
    replica.run_until(math.inf, cost)
    return SimulationResult.of(policy, [replica])


def _capacity(arrivals: list[Arrival]) -> float:
    """Requests a second of full places: by Little's law, from the time that a request takes in them."""
    served = _simulated(at_once(arrivals), "fcfs", host=False).served
    return _PLACES * len(served) / sum(each.ended - each.started for each in served)
