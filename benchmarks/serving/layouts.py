"""Placements over several devices: separate prefill and decode, pipelines, and models that share devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smelt.runtime.requests.trace import Arrival
from smelt.runtime.simulate.options import SimulatedEngine
from smelt.runtime.simulate.placements.pipeline import Lane, Pipeline, simulate_pipeline
from smelt.runtime.simulate.placements.placement import Placement
from smelt.runtime.simulate.replica import Replica
from smelt.runtime.simulate.results import Distribution, Served, SimulationResult

from .setting import A100, LLAMA_13B, Row, Study, blocks_of, cost_of, device_of

_PLACEMENTS = (
    ("replicas:4", "prefill_first", 8192), ("replicas:4", "fcfs", 512), ("disaggregated:1+3", "fcfs", 2048),
    ("disaggregated:2+2", "fcfs", 2048), ("disaggregated:3+1", "fcfs", 2048), ("hybrid:2+2,1024", "fcfs", 2048),
)  # fmt: skip
# Seconds to the first token, and between tokens on a request's average.
_LIMITS = {"tight TTFT": (0.4, 0.2), "tight TBT": (4.0, 0.025), "both tight": (0.4, 0.025)}
_RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0)
_ATTAINED = 0.9
# Bytes a second from one A100 to the next.
_LINK = 300e9
# Requests in a batch of AlpaServe's comparison.
_BATCH = 8


def disaggregation(study: Study) -> list[Row]:
    """DistServe: the rate at which 90% of the requests meet both limits, on four devices."""
    loads = {
        "chat, ShareGPT-like": study.random("lognormal:161,1.1", "lognormal:338,0.9", 1000, rate=1.0),
        "long prompts, short outputs": study.random(
            "lognormal:1500,0.5", "lognormal:100,0.7", 1000, rate=1.0, longest=4096
        ),
    }
    size, device = LLAMA_13B, device_of(A100)
    blocks = blocks_of(size, A100)
    rows = []
    for load, arrivals in loads.items():
        for text, policy, budget in _PLACEMENTS:
            engine = SimulatedEngine(blocks, policy=policy, max_num_batched_tokens=budget, max_num_seqs=256)
            placement = Placement.parse(text)
            met: dict[str, list[float]] = {name: [] for name in _LIMITS}
            for rate in _RATES:
                found = placement.simulate(at_rate_of(arrivals, rate), engine, size, device)
                for name, limits in _LIMITS.items():
                    met[name].append(attained(found.served, *limits))
                if max(each[-1] for each in met.values()) < _ATTAINED / 2:
                    break
            rows.append(
                {
                    "load": load, "placement": text, "policy": policy, "budget": budget, "requests": len(arrivals),
                    "limits": _LIMITS, "rates": _RATES, "met": met,
                    "goodput": {name: _goodput(shares) for name, shares in met.items()},
                }
            )  # fmt: skip
    return rows


def at_rate_of(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Random arrivals of one a second, at another rate: the same pauses, scaled."""
    return [replace(each, at=each.at / rate) for each in arrivals]


def attained(served: Sequence[Served], first: float, between: float) -> float:
    """The share of requests with their first token and their mean pause between tokens within limits."""
    good = sum(
        each.first - each.at <= first and (each.ended - each.first) <= between * (each.output - 1) for each in served
    )
    return good / len(served)


def _goodput(shares: Sequence[float]) -> float:
    """The highest rate up to which enough are within the limits, linear between the rates."""
    if shares[0] < _ATTAINED:
        return 0.0
    for i in range(1, len(shares)):
        if shares[i] < _ATTAINED:
            part = (shares[i - 1] - _ATTAINED) / (shares[i - 1] - shares[i])
            return _RATES[i - 1] + part * (_RATES[i] - _RATES[i - 1])
    return _RATES[-1]


def bubbles(study: Study) -> list[Row]:
    """SARATHI: equal pieces leave fewer bubbles in a pipeline than whole prompts."""
    loads = {
        "prompts of 1,500, widely spread": study.random("lognormal:1500,1", "lognormal:150,0.8", 300, longest=4096),
        "prompts of 1,500, all equal": study.random("fixed:1500", "fixed:150", 300, longest=4096),
        "prompts of 32, outputs of 400": study.random("fixed:32", "fixed:400", 300, longest=4096),
    }
    rows = []
    for stages in (2, 4, 8):
        device, share = device_of(A100), 1 / stages
        costs = [device.cost(LLAMA_13B, layers=share, head=i + 1 == stages) for i in range(stages)]
        blocks = blocks_of(LLAMA_13B, A100, placement=f"pipeline:{stages}")
        send = LLAMA_13B.hidden * LLAMA_13B.itemsize / _LINK
        for load, arrivals in loads.items():
            for policy, budget in (("orca", 4096), ("fcfs", 512), ("sarathi", 512)):
                engine = SimulatedEngine(blocks, policy=policy, max_num_batched_tokens=budget, max_num_seqs=32)
                found, idle = simulate_pipeline(arrivals, engine, costs, send=send)
                rows.append(
                    {
                        "stages": stages, "load": load, "policy": policy, "budget": budget, "requests": len(arrivals),
                        "bubbles": idle, "output_rate": found.output_rate, "p99_between": found.between_tokens.p99,
                    }
                )  # fmt: skip
    return rows


def multiplexing(study: Study) -> list[Row]:
    """AlpaServe: two models on two devices, each on its own, or both split over both."""
    cases = {
        "one pass (prompts of 512)": ("fixed:512", "fixed:1", 600, 9.0),
        "generation (512 and 100)": ("fixed:512", "exponential:100", 300, 4.0),
    }
    rows = []
    for load, (prompts, outputs, count, rate) in cases.items():
        for burstiness in (0.0, 1.0, 3.0, 6.0):
            for busy in (0.3, 0.6, 0.9):
                arrivals = sorted(
                    (
                        (model, arrival)
                        for model in (0, 1)
                        for arrival in study.random(
                            prompts, outputs, count, rate=busy * rate, burstiness=burstiness, longest=2048, seed=model
                        )
                    ),
                    key=lambda pair: pair[1].at,
                )
                alone, shared = _completion(arrivals, split=False), _completion(arrivals, split=True)
                rows.append(
                    {
                        "load": load, "burstiness": burstiness, "busy": busy, "arrivals": busy * rate,
                        "requests": len(arrivals), "dedicated": alone.mean, "split": shared.mean,
                        "ratio": alone.mean / shared.mean, "dedicated_p99": alone.p99, "split_p99": shared.p99,
                        "ratio_p99": alone.p99 / shared.p99,
                    }
                )  # fmt: skip
    return rows


def _completion(arrivals: list[tuple[int, Arrival]], *, split: bool) -> Distribution:
    """From arrival to the last token, with each model on a device of its own or split over both."""
    device = device_of(A100)
    one = SimulatedEngine(blocks_of(LLAMA_13B, A100), policy="orca", max_num_batched_tokens=2048, max_num_seqs=_BATCH)
    if not split:
        pipelines = [Pipeline([Lane(Replica(one), [cost_of(LLAMA_13B, A100)], model)]) for model in (0, 1)]
        for model, pipeline in enumerate(pipelines):
            pipeline.serve([(model, arrival) for other, arrival in arrivals if other == model])
    else:
        stages = [device.cost(LLAMA_13B, layers=0.5, head=i == 1) for i in (0, 1)]
        # Two batches of each model may be under way, each with its share of the memory of both devices.
        half = replace(one, blocks=one.blocks // 2, max_num_seqs=_BATCH)
        lanes = [Lane(Replica(half), stages, model) for model in (0, 1) for _ in range(2)]
        send = LLAMA_13B.hidden * LLAMA_13B.itemsize / _LINK
        pipelines = [Pipeline(lanes, send)]
        pipelines[0].serve(arrivals)
    engines = [lane.engine for pipeline in pipelines for lane in pipeline.lanes]
    return SimulationResult.of("orca", engines).completion
