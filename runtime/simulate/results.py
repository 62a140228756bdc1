"""What a simulation found: latencies, throughput, and how the cache was used."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

# Pauses between tokens are counted in bins of 1%: there are millions of them.
_BINS = 100


@dataclass(frozen=True)
class Served:
    """A request that ended. Times are in seconds from the first arrival.

    Attributes:
        at: its arrival.
        started, first, ended: when it was first computed, when its first token came, and its last.
        prompt, output: its tokens.
        cached: those of its prompt that were found in the prefix cache.
        preemptions: how often it lost its blocks.
    """

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
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        at = [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99)]
        return cls(math.fsum(ordered) / len(ordered), *at)


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
        unfilled: in blocks of running sequences, but not filled yet.
        free: in no sequence's block.
    """

    filled: float
    unfilled: float
    free: float

    @property
    def waste(self) -> float:
        """The share of the held positions that are not filled."""
        held = self.filled + self.unfilled
        return self.unfilled / held if held else 0.0


@dataclass(frozen=True)
class SimulationResult:
    """A trace under one policy.

    Attributes:
        policy: which.
        requests, prompt_tokens, output_tokens: totals.
        seconds: from the first arrival to the last token, on the virtual clock.
        steps: how many.
        output_rate: generated tokens a second.
        first_token: from arrival to the first token.
        between_tokens: between a request's tokens.
        completion: from arrival to the last token.
        normalized: completion divided by the request's output tokens.
        queue: from arrival until first computed.
        cache: how it was used.
        cached_share: the share of prompt tokens that were found in the prefix cache.
        preemptions, swaps: how often sequences lost their blocks, and how often those were swapped out.
        swapped_blocks: copied to or from host memory.
        busy: the share of time in steps.
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

    def as_data(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "cache": {**asdict(self.cache), "waste": self.cache.waste}}
