"""What a simulation found: latencies, throughput, and how the cache was used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from ..measure.percentile import percentile
from ..scheduling.scheduler import Scheduler

# Pauses between tokens are counted in bins of 1%: there are millions of them.
_BINS = 100


@dataclass(frozen=True)
class Served:
    """A request that ended. Times are in seconds from the first arrival.

    Attributes:
        number: in the trace.
        at: its arrival.
        started, first, ended: when it was first computed, when its first token came, and its last.
        prompt, output: its tokens.
        cached: those of its prompt that were found in the prefix cache.
        preemptions: how often it lost its blocks.
    """

    number: int
    at: float
    started: float
    first: float
    ended: float
    prompt: int
    output: int
    cached: int
    preemptions: int


@dataclass(frozen=True)
class Distribution:
    """Of a latency, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> Distribution:
        """Of so many values; 0 if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        return cls(math.fsum(values) / len(values), *(percentile(values, share) for share in (0.5, 0.9, 0.99)))


class Histogram:
    """Millions of positive values, within 1%."""

    def __init__(self) -> None:
        self._bins: dict[int, int] = {}
        self._sum = 0.0
        self.count = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        place = math.floor(_BINS * math.log(value)) if value > 0 else -(10**9)
        self._bins[place] = self._bins.get(place, 0) + times
        self._sum += value * times
        self.count += times

    def merge(self, other: Histogram) -> None:
        """Count another's values too."""
        for place, times in other._bins.items():
            self._bins[place] = self._bins.get(place, 0) + times
        self._sum += other._sum
        self.count += other.count

    def distribution(self) -> Distribution:
        """The mean, exactly, and percentiles, within 1%."""
        if not self.count:
            return Distribution(0.0, 0.0, 0.0, 0.0)
        found, seen = [], 0
        shares = [0.5, 0.9, 0.99]
        for place in sorted(self._bins):
            seen += self._bins[place]
            while shares and seen > shares[0] * self.count - 1e-9 and seen >= 1:
                found.append(0.0 if place == -(10**9) else math.exp((place + 0.5) / _BINS))
                shares.pop(0)
        return Distribution(self._sum / self.count, *found)


@dataclass(frozen=True)
class CacheUse:
    """Means over time of the cache's positions, as shares of all. A block that several sequences share counts for each.

    Attributes:
        filled: with keys and values of running sequences.
        reserved: in their blocks, to be filled later.
        wasted: in their blocks, never to be filled: internal fragmentation.
        free: in no running sequence's block.
    """

    filled: float
    reserved: float
    wasted: float
    free: float

    @property
    def waste(self) -> float:
        """The share of the held positions that are not filled, now or ever."""
        held = self.filled + self.reserved + self.wasted
        return (self.reserved + self.wasted) / held if held else 0.0


class Counted(Protocol):
    """What a result is made of: one engine's counts."""

    served: list[Served]
    pauses: Histogram
    steps: int
    busy: float
    swapped: int
    filled: float
    reserved: float
    wasted: float
    now: float

    @property
    def scheduler(self) -> Scheduler: ...


@dataclass(frozen=True)
class SimulationResult:
    """A trace under one policy.

    Attributes:
        policy: which.
        requests, prompt_tokens, output_tokens: totals.
        seconds: from the first arrival to the last token, on the virtual clock.
        steps: how many.
        output_rate: generated tokens a second.
        first_token: from arrival to the first token (TTFT).
        between_tokens: between a request's tokens (TBT).
        completion: from arrival to the last token.
        normalized: completion divided by the request's output tokens.
        queue: from arrival until first computed.
        cache: how it was used.
        cached_share: the share of prompt tokens that were found in the prefix cache.
        preemptions, swaps: how often sequences lost their blocks, and how often those were swapped out.
        swapped_blocks: copied to or from host memory.
        busy: the share of time in steps, of all engines.
        served: the requests, in order of the trace.
    """

    policy: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    steps: int
    output_rate: float
    first_token: Distribution
    between_tokens: Distribution
    completion: Distribution
    normalized: Distribution
    queue: Distribution
    cache: CacheUse
    cached_share: float
    preemptions: int
    swaps: int
    swapped_blocks: int
    busy: float
    served: list[Served] = field(repr=False, default_factory=list)

    @classmethod
    def of(cls, policy: str, engines: Sequence[Counted], served: list[Served] | None = None) -> SimulationResult:
        """What some engines did together.

        Args:
            policy: its name.
            engines: all of them.
            served: the requests, if not each was served by one engine alone.
        """
        if served is None:
            served = [each for engine in engines for each in engine.served]
        served = sorted(served, key=lambda each: each.number)
        pauses = Histogram()
        for engine in engines:
            pauses.merge(engine.pauses)
        outputs = sum(each.output for each in served)
        prompts = sum(each.prompt for each in served)
        ended = max(engine.now for engine in engines)
        caches = [engine.scheduler.cache for engine in engines]
        everything = sum(
            cache.blocks * cache.block_size * engine.busy for cache, engine in zip(caches, engines, strict=True)
        )
        totals = (
            sum(engine.filled for engine in engines),
            sum(engine.reserved for engine in engines),
            sum(engine.wasted for engine in engines),
        )
        filled, reserved, wasted = (total / everything if everything else 0.0 for total in totals)
        return cls(
            policy,
            len(served),
            prompts,
            outputs,
            ended,
            sum(engine.steps for engine in engines),
            outputs / ended,
            Distribution.of([each.first - each.at for each in served]),
            pauses.distribution(),
            Distribution.of([each.ended - each.at for each in served]),
            Distribution.of([(each.ended - each.at) / each.output for each in served]),
            Distribution.of([each.started - each.at for each in served]),
            CacheUse(filled, reserved, wasted, max(0.0, 1 - filled - reserved - wasted)),
            sum(each.cached for each in served) / prompts,
            sum(engine.scheduler.preemptions for engine in engines),
            sum(engine.scheduler.swaps for engine in engines),
            sum(engine.swapped for engine in engines),
            sum(engine.busy for engine in engines) / ended / len(engines),
            served,
        )

    def as_data(self) -> dict[str, Any]:
        """As JSON, without the requests."""
        data = asdict(replace(self, served=[]))
        del data["served"]
        return {**data, "cache": {**data["cache"], "waste": self.cache.waste}}
