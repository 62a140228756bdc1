"""The measurements of a load, on an engine or on a server, and their table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from .percentile import percentile


@dataclass(frozen=True)
class RequestTimes:
    """A request that was served, in seconds of one clock.

    Attributes:
        came: when it arrived.
        prompt: tokens of its prompt.
        tokens: when each generated token was there.
    """

    came: float
    prompt: int
    tokens: list[float]

    @property
    def decode_rate(self) -> float | None:
        """The tokens that came after the first, by the time since; None if all came with it."""
        first, last = self.tokens[0], self.tokens[-1]
        return sum(at > first for at in self.tokens) / (last - first) if last > first else None


@dataclass(frozen=True)
class LoadResult:
    """The measurements of one load. Times are in seconds.

    Attributes:
        name: which load.
        requests: how many.
        prompt_tokens, output_tokens: totals over all requests.
        seconds: from the first arrival to the last token.
        first_token_p50, first_token_p99: from a request's arrival to its first token.
        between_tokens_p50, between_tokens_p99: between a request's tokens.
        completion_p50, completion_p99: from a request's arrival to its last token.
        decode_rate: of a request, generated tokens a second after the first; the median. It does not depend on how many
            tokens come at once, unlike the time between tokens.
        output_rate: generated tokens a second, over all.
        total_rate: prompt and generated tokens a second.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token_p50: float
    first_token_p99: float
    between_tokens_p50: float | None
    between_tokens_p99: float | None
    completion_p50: float
    completion_p99: float
    decode_rate: float | None
    output_rate: float
    total_rate: float

    @classmethod
    def of(cls, name: str, requests: Sequence[RequestTimes], seconds: float) -> LoadResult:
        """The measurements of requests that took so many seconds together."""
        firsts = [each.tokens[0] - each.came for each in requests]
        between = [b - a for each in requests for a, b in itertools.pairwise(each.tokens)]
        completions = [each.tokens[-1] - each.came for each in requests]
        rates = [each.decode_rate for each in requests if each.decode_rate is not None]
        prompts, outputs = sum(each.prompt for each in requests), sum(len(each.tokens) for each in requests)
        return cls(
            name,
            len(requests),
            prompts,
            outputs,
            seconds,
            percentile(firsts, 0.5),
            percentile(firsts, 0.99),
            percentile(between, 0.5) if between else None,
            percentile(between, 0.99) if between else None,
            percentile(completions, 0.5),
            percentile(completions, 0.99),
            percentile(rates, 0.5) if rates else None,
            outputs / seconds,
            (prompts + outputs) / seconds,
        )


def table_of_loads(loads: Sequence[LoadResult]) -> list[str]:
    """A line for each load, below a heading; nothing without loads."""
    if not loads:
        return []
    return [
        f"{'load':<14}{'requests':>9}{'tokens/s':>10}{'first token p50/p99':>23}{'between tokens p50/p99':>26}"
        f"{'completion p50/p99':>23}",
        *map(_line, loads),
    ]


def _line(load: LoadResult) -> str:
    between = (
        "-"
        if load.between_tokens_p50 is None or load.between_tokens_p99 is None
        else f"{1e3 * load.between_tokens_p50:.1f} / {1e3 * load.between_tokens_p99:.1f} ms"
    )
    first = f"{1e3 * load.first_token_p50:.0f} / {1e3 * load.first_token_p99:.0f} ms"
    completion = f"{load.completion_p50:.2f} / {load.completion_p99:.2f} s"
    return f"{load.name:<14}{load.requests:>9}{load.output_rate:>10.1f}{first:>23}{between:>26}{completion:>23}"
