"""Prompts in pieces of a token budget against whole prompts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

from smelt.runtime.costs.work import StepCost, StepWork
from smelt.runtime.requests.trace import Arrival
from smelt.runtime.scheduling.plan import StepPlan
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.replica import Replica
from smelt.runtime.simulate.results import SimulationResult

from .setting import A100, LLAMA_3_8B, Row, Study, at_once, at_rate, blocks_of, cost_of

_WHOLE = 16384
_BUSY = 0.75


class SaturatedSteps(Replica):
    """An engine that counts the steps with more work than the token budget.

    Attributes:
        saturated: steps for which those that ran or could start had at least a budget of tokens.
        full: of these, the ones with a budget of tokens.
    """

    saturated = 0
    full = 0

    def begin(self, now: float) -> tuple[StepPlan, StepWork]:
        """Schedule a step, and count it."""
        scheduler, budget = self.scheduler, self.engine.max_num_batched_tokens
        places = self.engine.max_num_seqs - len(scheduler.running)
        free = scheduler.cache.free - len(scheduler.running)
        wanted = sum(each.remaining for each in scheduler.running)
        for each in islice(scheduler.waiting, max(0, places)):
            free -= scheduler.cache.needed(len(each.tokens))
            if free < 0 or wanted >= budget:
                break
            wanted += each.remaining
        plan, work = super().begin(now)
        self.saturated += wanted >= budget
        self.full += wanted >= budget and plan.tokens == budget
        return plan, work


def chunks(study: Study) -> list[Row]:
    """SARATHI and SplitFuse: decodes go on while prompts are computed."""
    loads: list[tuple[str, list[Arrival], int]] = [
        ("long prompts", study.random("lognormal:7000,0.5", "lognormal:200,0.8", 300, rate=1.0, longest=_WHOLE), 32),
        ("Azure conversations", study.azure(1000, _WHOLE), 128),
        ("short prompts, long outputs", study.random("lognormal:60,0.6", "lognormal:500,0.6", 500, rate=1.0), 128),
    ]
    whole, pieces = ("prefill_first", "orca"), ("fcfs", "sarathi")
    ways = [*((name, _WHOLE) for name in whole), *((name, 512) for name in pieces)]
    more = [("fcfs", budget) for budget in (128, 256, 1024, 2048)]
    rows = []
    for load, arrivals, places in loads:
        cost = cost_of(LLAMA_3_8B, A100)
        engine = SimulatedEngine(blocks_of(LLAMA_3_8B, A100), max_num_seqs=places)
        most: float | None = None
        for policy, budget in [*ways, *more]:
            options = replace(engine, policy=policy, max_num_batched_tokens=budget)
            full = _served(at_once(arrivals), options, cost)
            found = SimulationResult.of(policy, [full])
            most = most or _BUSY * len(arrivals) / found.seconds
            loaded = SimulationResult.of(policy, [_served(at_rate(arrivals, most), options, cost)])
            rows.append(
                {
                    "load": load, "policy": policy, "budget": budget, "requests": len(arrivals), "arrivals": most,
                    "output_rate": found.output_rate, "p99_between": loaded.between_tokens.p99,
                    "p50_between": loaded.between_tokens.p50, "mean_first": loaded.first_token.mean,
                    "p99_first": loaded.first_token.p99, "mean_completion": loaded.completion.mean,
                    "saturated": full.saturated, "full": full.full,
                }
            )  # fmt: skip
    return rows


def _served(arrivals: list[Arrival], options: SimulatedEngine, cost: StepCost) -> SaturatedSteps:
    replica = SaturatedSteps(options)
    for number, arrival in enumerate(arrivals):
        replica.run_until(arrival.at, cost)
        replica.submit(number, arrival)
    replica.run_until(math.inf, cost)
    return replica
