"""What a step costs: the work in a plan, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..scheduling.plan import StepPlan

# Without work for so many seconds, threads sleep and others use the caches.
PAUSE_SECONDS = 0.01


def _reached(mean: float, width: float, window: float) -> float:
    """The mean of what queries see through a window that would see ``mean`` positions, from half a ``width`` fewer to half a width more."""
    low, high = max(0.0, mean - width / 2), mean + width / 2
    if window >= high:
        return mean
    if window <= low:
        return window
    return ((window * window - low * low) / 2 + window * (high - window)) / (high - low)


@dataclass(frozen=True)
class StepWork:
    """The amounts that decide a step's time.

    Attributes:
        tokens: whose layers are computed.
        sequences: whose next token is sampled.
        cached: positions whose keys and values are read, over all sequences.
        pairs: of a query and a key, over all sequences.
        swapped: blocks that are copied to or from host memory.
        chunks: sequences that have tokens in the step.
        prompts: those that have more than a decode's token.
        prompt_pairs: the pairs of these alone.
        after_pause: whether the engine had nothing to do before, so that threads sleep and caches are cold.
    """

    tokens: int
    sequences: int
    cached: int
    pairs: int
    swapped: int = 0
    chunks: int = 0
    prompts: int = 0
    prompt_pairs: int = 0
    after_pause: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """The work of a plan."""
        tokens = sequences = cached = pairs = prompts = prompt_pairs = 0
        for chunk in plan.chunks:
            count, stop = chunk.count, chunk.start + chunk.count
            tokens += count
            sequences += chunk.is_last
            cached += stop
            if count == 1 and chunk.is_last:
                pairs += stop
            else:
                prompts += 1
                prompt_pairs += count * chunk.start + count * (count + 1) // 2
        swapped = len(plan.swap_out) + len(plan.swap_in)
        return cls(tokens, sequences, cached, pairs + prompt_pairs, swapped, len(plan.chunks), prompts, prompt_pairs)

    @property
    def decode_cached(self) -> int:
        """Positions that decodes read: each has one query."""
        return self.pairs - self.prompt_pairs

    def within(self, windows: Sequence[tuple[int, float]]) -> StepWork:
        """The work as layers with windows see it, whose queries read only so many positions; of sequences as long as their mean.

        Args:
            windows: positions, and the share of keys and values that layers with such a window have.
        """
        if not windows:
            return self

        def seen(keys: int, of: int, width: float = 0.0, beside: float = 0.0) -> int:
            mean = keys / max(1, of)
            less = sum(share * (mean - _reached(mean, width, window + beside)) for window, share in windows)
            return round(keys - less * of)

        decodes = self.chunks - self.prompts
        queries = self.tokens - decodes
        of_each = queries / max(1, self.prompts)
        decoded = seen(self.decode_cached, decodes)
        # The queries of a prompt's chunk see one position more each, so that together they read its length beside a window.
        of_prompts = seen(self.cached - self.decode_cached, self.prompts, beside=of_each)
        pairs = seen(self.prompt_pairs, queries, width=of_each)
        return replace(self, cached=decoded + of_prompts, pairs=decoded + pairs, prompt_pairs=pairs)

    def later(self, steps: int) -> StepWork:
        """The work of a step of decodes alone, so many steps later."""
        more = steps * self.tokens
        return replace(self, cached=self.cached + more, pairs=self.pairs + more, swapped=0, after_pause=False)


class StepCost(Protocol):
    """How long a step takes on some device, with some model."""

    def seconds(self, work: StepWork) -> float:
        """The time of a step, the host's share included."""
        ...


@dataclass(frozen=True)
class LinearCost:
    """A step's time as a sum of its amounts, each at its price in seconds.

    Attributes:
        step: of any step.
        token, sequence, cached, pair, swapped: of one of each.
    """

    step: float
    token: float = 0.0
    sequence: float = 0.0
    cached: float = 0.0
    pair: float = 0.0
    swapped: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """The sum."""
        return (
            self.step
            + self.token * work.tokens
            + self.sequence * work.sequences
            + self.cached * work.cached
            + self.pair * work.pairs
            + self.swapped * work.swapped
        )
